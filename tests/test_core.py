"""What model.py and lib/baselines.py promise beyond the equations of test_all.py: costs, precision,
the path of a GPU, and loading."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import model as model_module
from lib import baselines
from model import Positions, load
from test_all import ALL_PE, SEP, VOCAB, close, corrupted, pretraining, sequences, tiny
from tests.conftest import refuses


def test_baselines_of_a_sum():
    """A sum has the baselines of each part; a printed loss is compared with the lowest it beats."""
    corpus = SimpleNamespace(train=np.repeat([3, 7, SEP], [10, 30, 5]), vocab_size=VOCAB)
    model = pretraining("mlm+pplm+tc", mlm_on="all", tc_negatives=3)
    expected = {"mlm.uniform": 2 * math.log(64), "pplm.uniform": math.log(23)}
    expected["mlm.unigram"] = 2 * -(0.25 * math.log(0.25) + 0.75 * math.log(0.75))
    expected["tc.constant"] = math.log(4)
    of_positions = baselines.position_baselines(12, 0.6)
    expected |= {f"pplm.{x}": of_positions[x] for x in ("prior", "copy", "selected", "moved")}
    found = baselines.compute_baselines(model, corpus)
    assert found == pytest.approx(expected)
    copy = found["pplm.copy"]
    assert baselines.beaten("pplm", copy - 0.01, found) == ("copy", copy)
    assert baselines.beaten("pplm", 9.0, found) is None


def test_time_and_memory(monkeypatch):
    """All layers and the pair head share TUPE's positional term (TUPE sec 3.3). rel needs memory
    for (L, L) logits and (L, R) sums, but not for a vector per pair."""
    calls, sizes, bias = [], [], model_module.Tupe.bias
    monkeypatch.setattr(model_module.Tupe, "bias", lambda *args: calls.append(1) or bias(*args))
    model, _, batch = corrupted("pplm", "tupe_r", n_layer=3)
    model(batch)
    assert len(calls) == 1
    encoder = tiny("rel", d_model=64)  # D = 32
    with torch.autograd.graph.saved_tensors_hooks(lambda x: sizes.append(x.numel()) or x, id):
        encoder(sequences(1, 40))
    assert 2 * 40 * 130 <= max(sizes) < 40 * 40 * 32


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_dropout(dtype):
    """Dropout drops a share p of the elements independently of each other, divides the others by
    1 - p, has its own derivative and repeats with the seed, like F.dropout but faster on a CPU."""
    x = torch.full((999, 1001), 2.0, dtype=dtype, requires_grad=True)
    results = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        y = model_module.dropout(x, 0.1, True)
        results.append((y, *torch.autograd.grad(y.sum(), x)))
    (y, gradient), again, other = results
    assert torch.equal(y, again[0]) and not torch.equal(y, other[0])
    assert y.dtype == dtype and torch.equal(gradient, y / 2)
    close(y[y != 0].double().unique(), torch.tensor([2 / 0.9]), 1e-2)
    dropped = (y == 0).double()
    assert abs(dropped.mean() - 0.1) < 0.002
    for neighbors in (dropped[:, 1:] * dropped[:, :-1], dropped[1:] * dropped[:-1]):
        assert abs(neighbors.mean() - 0.01) < 0.001, "four elements share a draw"


@pytest.mark.parametrize("pe", ALL_PE)
def test_fused_attention_and_autocast(pe, monkeypatch):
    """On a GPU, attention runs through F.scaled_dot_product_attention, which computes the same;
    mixed precision changes hidden states by rounding only."""
    encoder, tokens, results, calls = tiny(pe, attn_dropout=0.5).eval(), sequences(), [], []
    pad, fused = torch.arange(12).expand(6, 12) > 8, F.scaled_dot_product_attention

    def watch(*args, **settings):
        calls.append(1)
        return fused(*args, **settings)

    monkeypatch.setattr(F, "scaled_dot_product_attention", watch)
    for is_cuda in (False, True):
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "is_cuda", is_cuda, raising=False)
            hidden = encoder(tokens, pad=pad)
        gradients = torch.autograd.grad(hidden.square().sum(), encoder.blocks.parameters())
        results.append([hidden, *gradients])
    close(*results)
    assert len(calls) == (0 if encoder.scheme.has_values else 2)
    with torch.autocast("cpu", torch.bfloat16):
        assert (encoder.float()(tokens, pad=pad) - hidden).norm() < 0.1 * hidden.norm()


@pytest.mark.parametrize("pe", "sin lsin rsin rlsin rope alibi t5".split())
def test_angles_and_distances_stay_exact_in_16_bits(pe):
    """load(run).bfloat16() rounds weights, but no frequency, slope or bucket: up to position 512
    every positional term is right to 16 bits. (Rounded frequencies give angles off by 2.)"""
    shape, pos, results = dict(n_layer=1, d_model=96, n_head=6, max_len=512), torch.arange(512), []
    exact, rounded = tiny(pe, **shape).float(), tiny(pe, **shape).float().bfloat16()
    q, k = torch.randn(2, 1, 6, 512, 16, dtype=torch.bfloat16)
    for encoder, x in ((exact, (q.float(), k.float())), (rounded, (q, k))):
        scheme, at = encoder.scheme, Positions(pos)
        terms = [scheme.embed(at), scheme.bias(at), *scheme.terms(*x, at, 0, None)]
        results.append([term.float() for term in terms if term is not None])
    for a, b in zip(*results):
        assert ((a - b).abs() <= 0.03 * (1 + a.abs())).all()
    assert rounded(sequences()).dtype == torch.bfloat16


def test_load(run):
    """load(run) is the encoder of a run in eval mode; weights that do not fit are refused."""
    folder = run("run", "--steps 1 --pe tupe_r --dropout .5")
    assert not load(folder).training and load(folder).config.dropout == 0.5
    assert load(folder, dropout=0.0).config.dropout == 0
    checkpoint = torch.load(folder / "ckpt.pt")
    for change, error in ({"d_ff": 48}, "size mismatch"), ({"pe": "rel"}, "Missing key"):
        torch.save(checkpoint | {"config": checkpoint["config"] | change}, folder / "other.pt")
        refuses(f"does not fit this model: {error}", load, folder / "other.pt")
