"""tools/bench.py: what is measured, what it is compared with, and what the rows contain."""

import json
import shlex

import pytest
import torch

from model import PE_NAMES
from objectives import OBJECTIVES
from tests.conftest import one_line
from tools import bench

FLAGS = shlex.split("--batch_size 2 --block_size 16 --pairs 2 --device cpu --dtype float32")


def variant(**changes):
    sizes = dict(batch_size=2, block_size=16, pairs=2, device="cpu", dtype="float32")
    return bench.BenchConfig(**sizes | changes)


def rows(tmp_path, flags):
    """Run the program -> the rows that it writes."""
    bench.main([*FLAGS, *shlex.split(flags), "--json", str(tmp_path / "new" / "rows.json")])
    return json.loads((tmp_path / "new" / "rows.json").read_text())["rows"]


@pytest.fixture
def fixed_times(monkeypatch):
    """Steps take fixed times instead of being run, and memory is not measured."""
    seconds = {"rel": 0.003, "pplm": 0.002, "mlm_full": 0.004}

    def make_step(v):
        own = 0.002 if v.peer else seconds.get(v.pe, seconds.get(v.objective, 0.001))
        return lambda: own

    monkeypatch.setattr(bench, "make_step", make_step)
    monkeypatch.setattr(bench, "peak_memory", lambda v: 1.0)


def test_schemes_are_compared_with_abs_and_objectives_with_mlm(tmp_path, fixed_times):
    """The reference comes first, and speed is its time over a row's time."""
    found = rows(tmp_path, "--pe rel,abs,t5")
    assert [(row["pe"], row["speed"]) for row in found] == [
        ("abs", 1),
        ("rel", pytest.approx(1 / 3)),
        ("t5", 1),
    ]
    assert all(row["tokens_per_s"] * row["ms_per_step"] == pytest.approx(32e3) for row in found)
    assert found[1]["parameters"] - found[0]["parameters"] == 130 * 32 - 17 * 128
    found = rows(tmp_path, "--objective pplm,mlm_full")
    speeds = {row["objective"]: row["speed"] for row in found}
    assert speeds == {"mlm": 1, "pplm": 0.5, "mlm_full": 0.25}


def test_the_peer_is_compared_eager_and_compiled(tmp_path, fixed_times, monkeypatch):
    """Each of our rows is compared with the peer's of the same kind."""
    pytest.importorskip("transformers")
    monkeypatch.setattr(bench, "can_compile", lambda device: True)
    found = rows(tmp_path, "--peer hf --pe tupe_r")
    assert [(row["name"], row["pe"], row["speed"]) for row in found] == [
        ("hf eager", "abs", 1),
        ("ours eager", "tupe_r", 2),
        ("hf compiled", "abs", 1),
        ("ours compiled", "tupe_r", 2),
    ]


def test_all_is_everything_once(monkeypatch):
    """--pe all has every scheme except aliases; --objective all every objective."""
    monkeypatch.setattr(bench, "compare", lambda groups: [v for _, v in groups])
    schemes = [v.pe for v in bench.measurements(variant(pe="all"))]
    assert schemes == [pe for pe in PE_NAMES if pe not in ("abs", "bert_a", "bert_r")]
    objectives = [v.objective for v in bench.measurements(variant(objective="all", batch_size=4))]
    assert objectives == [*(name for name in OBJECTIVES if name != "mlm"), "mlm_full"]


@pytest.mark.parametrize("changes", [{}, {"objective": "mlm_full"}, {"peer": "hf"}])
def test_a_step_updates_every_weight(changes, monkeypatch):
    """What is timed is an update of the whole model, in training mode."""
    if "peer" in changes:
        pytest.importorskip("transformers")
    model, cfg, args = bench.build(variant(**changes))
    monkeypatch.setattr(bench, "build", lambda v: (model, cfg, args))
    before = [p.clone() for p in model.parameters()]
    assert bench.make_step(variant(**changes))() > 0 and model.training
    pairs = zip(model.parameters(), before)
    assert all((p != old).any() for p, old in pairs if old.dim() > 1)


def test_the_peer_has_our_size():
    """Its parameters are ours, except for one more position (ours has one masked position, theirs
    has two before the first) and one token type."""
    pytest.importorskip("transformers")
    models = [bench.build(variant(peer=peer))[0] for peer in (None, "hf")]
    ours, theirs = [sum(p.numel() for p in model.parameters()) for model in models]
    assert theirs - ours == 2 * 128


def test_the_peers_masking():
    """15% of the tokens are scored: 80% [MASK], 10% random, 10% unchanged, as by
    DataCollatorForLanguageModeling."""
    _, cfg, _ = bench.build(variant())
    tokens = torch.randint(4, cfg.cls_id, (500, 200))
    tokens[:, 0] = cfg.cls_id
    ids, labels = bench.mask_like_peer(tokens, cfg, 0.15).values()
    scored = labels != -100
    assert not scored[:, 0].any() and torch.equal(labels[scored], tokens[scored])
    assert torch.equal(ids[~scored], tokens[~scored]) and ids.max() <= cfg.mask_id
    assert abs(scored[:, 1:].float().mean() - 0.15) < 0.01
    assert abs((ids[scored] == cfg.mask_id).float().mean() - 0.8) < 0.02
    assert abs((ids[scored] == tokens[scored]).float().mean() - 0.1) < 0.02


def test_agree(tmp_path):
    """In float32 a CPU agrees with itself exactly, in bfloat16 roughly."""
    flags = "--agree --pe tupe_r,rel --objective mlm,pplm"
    assert [row["gradient_difference"] for row in rows(tmp_path, flags)] == [0] * 4
    [row] = rows(tmp_path, "--agree --dtype bfloat16")
    assert 0 < row["difference"] < 0.05 and 1e-4 < row["gradient_difference"] < 0.1


@pytest.mark.slow
def test_memory_is_that_of_a_new_process(tmp_path):
    """The peak of a tiny model is that of a process with torch, not that of these tests."""
    [row] = rows(tmp_path, "--pe abs")
    assert 50 < row["peak_mem_mb"] < 2000


MISTAKES = {
    "--pe foo": "choose from",
    "--preset paper": "choose from 'demo'",
    "--pairs 1": "[2, ",
    "--pe rope --objective pmlm": "cannot represent",
    "--pe abs,rel --objective mlm,pplm": "but not both",
    "--peer hf --agree": "--peer takes one scheme",
}


def test_wrong_input_is_one_line(capsys):
    """What cannot be measured is refused before anything is measured."""
    for flags, message in MISTAKES.items():
        assert message in one_line(capsys, bench.main, ["--device", "cpu", *flags.split()])
