"""The documentation: snippets run, commands parse, and links resolve."""

import importlib
import re
import shlex
import warnings
from textwrap import indent

import pytest
import torch

import finetune
import model
import objectives
import train
from test_all import corrupted
from tests.conftest import ROOT, documented

PAGES = [ROOT / "README.md", *sorted(ROOT.glob("*/*.md"))]


def snippet(page, index, names):
    """Run a Python snippet of a page, where `names` are defined -> all names."""
    found = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    exec(found[index], names := dict(names))
    return names


def test_snippets_work_as_printed(monkeypatch):
    """README's scheme can be added to SCHEMES and the reference's objective to OBJECTIVES, and both
    learn; README's first snippet uses an encoder, the reference's last one embeds a sentence."""
    used = snippet("README.md", 0, {})
    assert used["hidden"].shape == (2, 16, 128) and used["A"].shape == (2, 4, 16, 16)
    kerple = snippet("README.md", 1, vars(model))["Kerple"]
    replaced = snippet("docs/reference.md", 0, vars(objectives))["ReplacedTokens"]
    monkeypatch.setitem(model.SCHEMES, "kerple", [kerple])
    monkeypatch.setitem(objectives.OBJECTIVES, "rtd", replaced)
    for objective, pe in (("pplm", "kerple"), ("pmlm", "kerple"), ("rtd+pplm", "abs")):
        net, _, batch = corrupted(objective, pe)
        optimizer, losses = torch.optim.AdamW(net.parameters(), lr=1e-2), []
        for _ in range(20):
            losses.append(net(batch)[0])
            optimizer.zero_grad()
            losses[-1].backward()
            optimizer.step()
        assert losses[-1] < losses[0]
        if objective == "pmlm":  # has masked positions
            assert all(p.grad.abs().sum() > 0 for p in net.encoder.scheme.parameters())
    monkeypatch.chdir(ROOT)
    vector = snippet("docs/reference.md", -1, {})["vector"]
    assert vector.shape == (128,) and vector.isfinite().all()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_and_links(page, monkeypatch):
    """Every command that a page prints names a program and, if that has a function parse_args,
    flags that exist. Every link to a file of the project leads to one. An empty line follows every
    table (GitHub makes any other line a row of it)."""
    for placeholder in ("mine", "SCHEME", "kerple", "NAME"):
        monkeypatch.setitem(model.SCHEMES, placeholder, [])
    text = page.read_text()
    assert not re.search(r"^\|.*\n[^|\n]", text, re.MULTILINE)
    for command in re.findall(r"(?:^    |&& )(python .*?)(?=\s+#|\s+&&|$)", text, re.MULTILINE):
        program, *flags = shlex.split(command)[1:]
        if program in ("train.py", "finetune.py"):
            {"train.py": train, "finetune.py": finetune}[program].parse_args(flags)
        elif program == "-m":
            module = importlib.import_module(flags[0])
            getattr(module, "parse_args", list)(flags[1:])
        else:
            assert (ROOT / program).exists(), command
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text):
        assert target.startswith("http") or (page.parent / target).exists(), target


def test_field_guide():
    """docs/encodings.md and docs/reference.md list the same schemes; one that neither has, such as
    a student's own, is a warning. The guide's links lead to the classes of model.py (lines may have
    moved if there is such a scheme), and its code is that of model.py."""
    page, source = (ROOT / "docs/encodings.md").read_text(), (ROOT / "model.py").read_text()
    reference = (ROOT / "docs/reference.md").read_text()
    new = [name for name in model.PE_NAMES if not documented(name)]
    if new:
        warnings.warn(f"undocumented scheme: {', '.join(new)}", stacklevel=1)
    for name in set(model.PE_NAMES) - set(new):
        assert f"`{name}`" in reference, name
        assert f"`{name}`" in page or name in ("bert_a", "bert_r"), name
    for name, line in re.findall(r"\[`(\w+)`\]\(\.\./model\.py(?:#L(\d+))?\)", page):
        assert f"class {name}(" in (source if new else source.splitlines()[int(line) - 1]), name
    for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        assert any(indent(code, depth * " ") in source for depth in (4, 8)), code
