"""The documentation: snippets run, commands parse, links resolve, and the language rules hold."""

import importlib
import re
import shlex
from pathlib import Path

import pytest
import torch

from tests.conftest import ROOT

PAGES = [ROOT / "README.md", *sorted(ROOT.glob("*/*.md"))]
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
# Expressions that this project does not use, because native readers stumble over them.
BANNED = (
    r"(?<![.\w/'\"$`])\.\.(?![./\w])|\bP[0-3]\b|\bdeparture|plain twin|rows of (text|words)|"
    r"by the clock|\bbut for\b|goes on (where|with --)|one who knows|\bhidden (word|position)|"
    r"guess(es|ing)? (masked|hidden) word|reads? (no|its|the) words?|what (words|losses) are worth"
)


def snippets(page):
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


def commands(page):
    """The commands of a page, each a line that starts with `python` after its indentation."""
    for line in (ROOT / page).read_text().splitlines():
        for part in re.split(r"&&", re.sub(r"\s+#.*", "", line)):
            if re.match(r"\s*python ", part) and line.startswith("    "):
                yield part.strip()


def test_the_schemes_example_works_as_printed():
    """README's own scheme can be added to SCHEMES, with permuted and masked positions."""
    import model
    from objectives import ObjectiveConfig, Pretraining

    space = vars(model).copy()
    exec(snippets("README.md")[0], space)
    model.SCHEMES["kerple"] = [space["Kerple"]]
    try:
        for objective in ("mlm", "pplm", "pmlm"):
            cfg = model.EncoderConfig(72, "kerple", 1, 2, 16, 32, 12)
            net = Pretraining(model.Encoder(cfg), ObjectiveConfig(objective))
            tokens = torch.randint(0, 64, (4, 12))
            tokens[:, 0], tokens[:, -1] = 64, 66
            net(net.corrupt(tokens, 0))[0].backward()
            gradients = [p.grad for p in net.encoder.scheme.parameters()]
            assert gradients[0].abs().sum() > 0 and gradients[1].abs().sum() > 0
    finally:
        del model.SCHEMES["kerple"]


def test_the_objectives_example_works_as_printed():
    """The reference's own objective can be added to OBJECTIVES, and its loss decreases."""
    import model
    import objectives

    space = vars(objectives).copy()
    exec(snippets("docs/reference.md")[0], space)
    objectives.OBJECTIVES["rtd"] = space["ReplacedTokens"]
    try:
        cfg = model.EncoderConfig(72, "abs", 1, 2, 16, 32, 12, dropout=0.0, attn_dropout=0.0)
        net = objectives.Pretraining(model.Encoder(cfg), objectives.ObjectiveConfig("rtd+pplm"))
        tokens = torch.randint(0, 64, (4, 12))
        tokens[:, 0], tokens[:, -1] = 64, 66
        optimizer, losses = torch.optim.AdamW(net.parameters(), lr=1e-2), []
        for _ in range(20):
            loss, scalars = net(net.corrupt(tokens, 0))
            losses.append(float(scalars["rtd"]))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        assert losses[-1] < losses[0]
    finally:
        del objectives.OBJECTIVES["rtd"]


@pytest.mark.parametrize("page", NAMES)
def test_commands_parse(page):
    """Every command that a page prints names a program and flags that exist."""
    import finetune
    import train

    for command in commands(page):
        words = shlex.split(command)[1:]
        if words[0] == "train.py":
            train.parse_args(words[1:])
        elif words[0] == "finetune.py":
            finetune.parse_args(words[1:])
        elif words[0] == "-m" and words[1] != "pytest":
            assert importlib.util.find_spec(words[1]), command
        elif words[0] != "-m":
            assert (ROOT / words[0]).exists(), command


@pytest.mark.parametrize("page", NAMES)
def test_links_resolve(page):
    """Every link to a file of the project leads to one."""
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", (ROOT / page).read_text()):
        if not target.startswith("http"):
            assert ((ROOT / page).parent / target).exists(), target


SOURCES = [*ROOT.glob("*.py"), *ROOT.glob("*/*.py"), *ROOT.glob("*/*.sh"), *PAGES]
SOURCES = sorted(str(p.relative_to(ROOT)) for p in SOURCES if p.name != Path(__file__).name)


@pytest.mark.parametrize("name", SOURCES)
def test_language(name):
    """No file uses an expression of the list above."""
    for number, line in enumerate((ROOT / name).read_text().splitlines(), 1):
        assert not re.search(BANNED, line, re.IGNORECASE), f"{name}:{number}: {line.strip()}"
