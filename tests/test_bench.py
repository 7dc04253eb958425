"""tools/bench.py: what is measured, and what it is compared with."""

import json

import torch

from tests.conftest import one_line
from tools import bench


def test_speed_is_relative_to_the_reference(tmp_path, monkeypatch):
    """Schemes are compared with abs, objectives with mlm, and ours with the peer of its kind; speed
    is the reference's time over a row's time."""

    def make_step(v, args):  # instead of training, steps take fixed times
        return lambda: 2 if v.peer else 4 if v.pe == "rel" or v.objective == "pplm" else 1

    def rows(flags):
        bench.main([*flags.split(), "--device", "cpu", "--json", str(tmp_path / "rows.json")])
        found = json.loads((tmp_path / "rows.json").read_text())["rows"]
        return [(row["name"], row["pe"], row["objective"], row["speed"]) for row in found]

    monkeypatch.setattr(bench, "make_step", make_step)
    monkeypatch.setattr(bench, "peak_memory", lambda v, args: 1.0)
    monkeypatch.setattr(bench, "can_compile", lambda device: True)
    ours = ("ours eager", "abs", "mlm", 1)
    assert rows("--pe rel,abs") == [ours, ("ours eager", "rel", "mlm", 0.25)]
    assert rows("--objective pplm") == [ours, ("ours eager", "abs", "pplm", 0.25)]
    expected = [("hf eager", "abs", "mlm", 1), ("ours eager", "rel", "mlm", 0.5)]
    expected += [("hf compiled", "abs", "mlm", 1), ("ours compiled", "rel", "mlm", 0.5)]
    assert rows("--peer hf --pe rel") == expected


def test_the_peers_step(monkeypatch):
    """A step updates every matrix of the peer, which has our size except for one more position and
    one token type."""
    flags = bench.parse_args("--batch_size 2 --block_size 16".split())
    flags.device, flags.dtype = torch.device("cpu"), torch.float32
    v = bench.Variant("abs", "mlm", False)
    ours, _, _ = bench.build(v, flags)
    model, cfg, run = bench.build(v._replace(peer="hf"), flags)
    before = [p.clone() for p in model.parameters()]
    assert sum(p.numel() for p in before) - sum(p.numel() for p in ours.parameters()) == 2 * 128
    monkeypatch.setattr(bench, "build", lambda v, args: (model, cfg, run))
    assert bench.make_step(v._replace(peer="hf"), flags)() > 0 and model.training
    assert all((p != old).any() for p, old in zip(model.parameters(), before) if p.dim() > 1)


def test_wrong_input_is_one_line(capsys):
    """What cannot be measured is refused before anything is measured."""
    for flags, message in (
        ("--pe rope --objective pmlm", "cannot represent"),
        ("--pe t5,rope --peer hf", "--peer takes one scheme"),
    ):
        assert message in one_line(capsys, bench.main, f"--device cpu {flags}".split())
