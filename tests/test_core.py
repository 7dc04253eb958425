"""What model.py and lib/baselines.py promise beyond the equations of test_all.py: costs, precision,
and compiling."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import model as model_module
from lib import baselines
from model import Positions
from test_all import SEP, VOCAB, close, corrupted, pretraining, sequences, slow, tiny


def test_baselines_of_a_sum():
    """A sum has the baselines of each part; a printed loss is compared with those on both sides."""
    corpus = SimpleNamespace(train=np.repeat([3, 7, SEP], [10, 30, 5]), vocab_size=VOCAB)
    model = pretraining("mlm+pplm+tc", mlm_on="all", tc_negatives=3)
    expected = {"mlm.uniform": 2 * math.log(64), "pplm.uniform": math.log(23)}
    expected["mlm.unigram"] = 2 * -(0.25 * math.log(0.25) + 0.75 * math.log(0.75))
    expected["tc.constant"] = math.log(4)
    of_positions = baselines.position_baselines(12, 0.6)
    expected |= {f"pplm.{x}": of_positions[x] for x in ("prior", "copy")}
    found = baselines.compute_baselines(model, corpus)
    assert found == pytest.approx(expected)
    own = {name[5:]: x for name, x in found.items() if name.startswith("pplm.")}
    ordered = sorted(own, key=own.get)
    for name, lower, higher in zip(ordered, ["", *ordered], [*ordered[1:], ""]):
        for loss, above, below in (
            (own[name] - 1e-4, name, lower),
            (own[name] + 1e-4, higher, name),
        ):
            sides = [f"below {above} {own[above]:.3f}"] if above else []
            sides += [f"above {below} {own[below]:.3f}"] if below else []
            assert baselines.compare("pplm", loss, found) == ", ".join(sides)
    assert baselines.compare("my_objective", 1.0, found) == ""


def test_time_and_memory(monkeypatch):
    """All layers share TUPE's positional term (TUPE sec 3.3); the pair head computes it once more.
    rel needs memory for (L, L) logits and (L, R) sums, but not for a vector per pair."""
    calls, sizes, bias = [], [], model_module.Tupe.bias
    monkeypatch.setattr(model_module.Tupe, "bias", lambda *args: calls.append(1) or bias(*args))
    model, _, batch = corrupted("pplm", "tupe_r", n_layer=3)
    model(batch)
    assert len(calls) == 2
    encoder = tiny("rel", d_model=64)  # D = 32
    with torch.autograd.graph.saved_tensors_hooks(lambda x: sizes.append(x.numel()) or x, id):
        encoder(sequences(1, 40))
    assert 2 * 40 * 130 <= max(sizes) < 40 * 40 * 32


@pytest.mark.parametrize("pe", "sin rsin rope alibi t5".split())
def test_positions_are_exact_in_16_bits(pe):
    """A model cast to 16 bits keeps its frequencies, slopes and buckets: up to position 512 every
    positional term is right to 16 bits."""
    shape, pos, results = dict(n_layer=1, d_model=96, n_head=6, max_len=512), torch.arange(512), []
    exact, rounded = tiny(pe, **shape).float(), tiny(pe, **shape).float().bfloat16()
    q, k = torch.randn(2, 1, 6, 512, 16, dtype=torch.bfloat16)
    for encoder, x in ((exact, (q.float(), k.float())), (rounded, (q, k))):
        scheme, at = encoder.scheme, Positions(pos)
        terms = [scheme.embed(at), scheme.bias(at), *scheme.terms(*x, at, 0, 0)]
        results.append([torch.as_tensor(term).float() for term in terms])
    for a, b in zip(*results):
        assert ((a - b).abs() <= 0.03 * (1 + a.abs())).all()
    assert rounded(sequences()).dtype == torch.bfloat16


COMPILED = [("tupe_r", "mlm+pplm"), ("rel", "taco"), ("alibi", "pmlm")]
COMPILED += [slow(pe, "mlm+pplm") for pe in ("deberta", "lsin+rlsin", "rope", "tupe_a_free")]


@pytest.mark.parametrize("pe, objective", COMPILED)
def test_one_graph(pe, objective):
    """torch.compile makes one graph of encoder and objectives, without breaks."""
    model, _, batch = corrupted(objective, pe)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    close(compiled(batch)[0], model(batch)[0], 1e-6)
