"""The documentation: snippets run, commands parse, links resolve, and the language rules hold."""

import importlib
import re
import shlex
from pathlib import Path

import pytest
import torch

import finetune
import model
import objectives
import train
from tests.conftest import ROOT

PAGES = [ROOT / "README.md", *sorted(ROOT.glob("*/*.md"))]
SOURCES = [*ROOT.glob("*.py"), *ROOT.glob("*/*.py"), *ROOT.glob("*/*.sh"), *PAGES]
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
# Expressions that this project does not use, because native readers stumble over them.
BANNED = (
    r"(?<![.\w/'\"$`])\.\.(?![./\w])|\bP[0-3]\b|\bdeparture|plain twin|rows of (text|words)|"
    r"by the clock|\bbut for\b|goes on (where|with --)|one who knows|\bhidden (word|position)|"
    r"guess(es|ing)? (masked|hidden) word|reads? (no|its|the) words?|what (words|losses) are worth"
)


def snippet(page, module):
    """Run the first Python snippet of a page as if it were at the end of a module -> its names."""
    names = vars(module).copy()
    exec(re.search(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)[1], names)
    return names


def trained(pe, objective):
    """-> a model after 20 steps on one batch, in which the loss must decrease."""
    cfg = model.EncoderConfig(72, pe, 1, 2, 16, 32, 12, dropout=0.0, attn_dropout=0.0)
    net = objectives.Pretraining(model.Encoder(cfg), objectives.ObjectiveConfig(objective))
    tokens = torch.randint(0, 64, (4, 12))
    tokens[:, 0], tokens[:, -1] = 64, 66
    optimizer, losses = torch.optim.AdamW(net.parameters(), lr=1e-2), []
    for _ in range(20):
        losses.append(net(net.corrupt(tokens, 0))[0])
        optimizer.zero_grad()
        losses[-1].backward()
        optimizer.step()
    assert losses[-1] < losses[0]
    return net


def test_the_schemes_example_works_as_printed(monkeypatch):
    """README's own scheme can be added to SCHEMES, with permuted and masked positions."""
    monkeypatch.setitem(model.SCHEMES, "kerple", [snippet("README.md", model)["Kerple"]])
    trained("kerple", "pplm")
    scheme = trained("kerple", "pmlm").encoder.scheme
    assert all(p.grad.abs().sum() > 0 for p in scheme.parameters())


def test_the_objectives_example_works_as_printed(monkeypatch):
    """The reference's own objective can be added to OBJECTIVES, and be part of a sum."""
    own = snippet("docs/reference.md", objectives)["ReplacedTokens"]
    monkeypatch.setitem(objectives.OBJECTIVES, "rtd", own)
    trained("abs", "rtd")
    trained("abs", "rtd+pplm")


def test_the_reference_uses_the_demo_checkpoint(monkeypatch):
    """The reference's last snippet embeds a sentence with docs/demo.pt."""
    monkeypatch.chdir(ROOT)
    names, text = {}, (ROOT / "docs" / "reference.md").read_text()
    exec(re.findall(r"```python\n(.*?)```", text, re.DOTALL)[-1], names)
    assert names["vector"].shape == (128,) and names["vector"].isfinite().all()


def commands(page):
    """The commands of a page, each a line that starts with `python` after its indentation."""
    for line in (ROOT / page).read_text().splitlines():
        for part in re.split(r"&&", re.sub(r"\s+#.*", "", line)):
            if re.match(r"\s*python ", part) and line.startswith("    "):
                yield part.strip()


@pytest.mark.parametrize("page", NAMES)
def test_commands_parse(page):
    """Every command that a page prints names a program and flags that exist."""
    for command in commands(page):
        program, *flags = shlex.split(command)[1:]
        if program in ("train.py", "finetune.py"):
            {"train.py": train, "finetune.py": finetune}[program].parse_args(flags)
        elif program == "-m":
            assert importlib.util.find_spec(flags[0]), command
        else:
            assert (ROOT / program).exists(), command


@pytest.mark.parametrize("page", NAMES)
def test_links_resolve(page):
    """Every link to a file of the project leads to one."""
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", (ROOT / page).read_text()):
        if not target.startswith("http"):
            assert ((ROOT / page).parent / target).exists(), target


def test_language():
    """No file uses an expression of the list above."""
    for file in SOURCES:
        for number, line in enumerate(file.read_text().splitlines(), 1):
            if file.name != Path(__file__).name:
                assert not re.search(BANNED, line, re.IGNORECASE), f"{file}:{number}: {line}"
