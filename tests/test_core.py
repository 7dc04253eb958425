"""What model.py and objectives.py promise beyond the equations of test_all.py: what they refuse,
speed and memory, precision, the path of a GPU, and torch.compile (about a minute for each test)."""

import dataclasses
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import model as model_module
from lib import baselines
from lib.device import can_compile
from model import Positions, load
from objectives import ObjectiveConfig, Pretraining
from test_all import ALL_PE, SEP, VOCAB, close, corrupted, pretraining, sequences, slow, tiny
from tests.conftest import refuses

ALONE = "none bert_ad tupe_a tupe_r tupe_a_tie_cls tupe_r_tie_cls t5_untie_cls bert_r_untie_cls "
ALONE += "tupe_a_free tupe_r_factored deberta"
# fmt: off
ILLEGAL = [
    *((tiny, dict(pe=f"rope+{pe}"), f"{pe} cannot be part of a sum") for pe in ALONE.split()),
    (tiny, dict(pe="bert_r+t5"), "t5 is in the sum already"),
    (tiny, dict(pe="rope", d_model=10), "even width"),
    (tiny, dict(n_head=3), "--d_model 16 is not a multiple of --n_head 3"),
    (tiny, dict(norm="last"), "choose from post, pre"),
    (corrupted, dict(objective="pmlm+pplm_some"), "at most one position objective"),
    (corrupted, dict(objective="mlm+taco"), "at most one token objective"),
    (corrupted, dict(objective="clm+pplm"), "clm is causal"),
    (corrupted, dict(objective="mlm", pair_head="linear"), "has no effect on --objective mlm"),
    (corrupted, dict(objective="tc", tc_on="masked"), "--tc_on masked needs mlm"),
    (corrupted, dict(objective="tc", tc_window=4), "must be odd"),
    (corrupted, dict(objective="taco", loss_weights=(1.0,)), "mlm.tc needs 2 numbers"),
    (corrupted, dict(objective="nsp", B=3), "needs --batch_size 4"),
]
# fmt: on


@pytest.mark.parametrize("build, change, message", ILLEGAL)
def test_what_cannot_be_computed_is_refused(build, change, message):
    """What cannot be built, or would have no effect, is refused with the reason. TUPE's reset and
    the scales of tupe, bert_ad and deberta apply to their own sum, so these schemes stand alone."""
    refuses(message, build, **change)


def test_baselines_of_a_model(monkeypatch):
    """A sum has the baselines of each part; a printed loss is compared with the lowest it beats."""
    values = dict(prior=3.0, copy=2.0, selected=1.5, moved=1.0, free_slots=0.5)
    monkeypatch.setattr(baselines, "position_baselines", lambda L, rate: values)
    corpus = SimpleNamespace(train=np.repeat([3, 7, SEP], [10, 30, 5]), vocab_size=VOCAB)
    model = pretraining("mlm+pplm+tc", mlm_on="all", tc_negatives=3)
    expected = {"mlm.uniform": 2 * math.log(64), "pplm.uniform": math.log(23)}
    expected["mlm.unigram"] = 2 * -(0.25 * math.log(0.25) + 0.75 * math.log(0.75))
    expected |= {"tc.constant": math.log(4), "pplm.prior": 3.0, "pplm.copy": 2.0}
    expected |= {"pplm.selected": 1.5, "pplm.moved": 1.0}
    assert baselines.compute_baselines(model, corpus) == pytest.approx(expected)
    assert baselines.beaten("pplm", 1.9, expected) == ("copy", 2.0)
    assert baselines.beaten("pplm", 9.0, expected) is None


def test_bias_is_computed_once(monkeypatch):
    """All layers and the pair head share TUPE's positional term, so it is computed once per step
    (TUPE sec 3.3)."""
    calls, original = [], model_module.Tupe.bias
    monkeypatch.setattr(model_module.Tupe, "bias", lambda *args: calls.append(1) or original(*args))
    model, _, batch = corrupted("pplm", "tupe_r", n_layer=3)
    model(batch)
    assert len(calls) == 1


def test_no_tensor_of_l_l_d():
    """rel needs memory for (L, L) logits and (L, R) sums, but not for a vector per pair."""
    sizes, encoder = [], tiny("rel", d_model=64)  # D = 32
    with torch.autograd.graph.saved_tensors_hooks(lambda x: sizes.append(x.numel()) or x, id):
        encoder(sequences(1, 40))
    assert 2 * 40 * 130 <= max(sizes) < 40 * 40 * 32


def inductor(function):
    if not can_compile(torch.device("cpu")):
        pytest.skip("no C++ compiler")
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True)


DTYPES = torch.float32, torch.float16, torch.bfloat16


@pytest.mark.parametrize(
    "compiles, dtype", [*((False, x) for x in DTYPES), slow(True, torch.float32)], ids=str
)
def test_dropout(dtype, compiles):
    """Dropout drops a share p of the elements independently of each other, divides the others by
    1 - p, has its own derivative and repeats with the seed, like F.dropout but faster on a CPU."""
    dropout = inductor(model_module.dropout) if compiles else model_module.dropout
    x = torch.full((999, 1001), 2.0, dtype=dtype, requires_grad=True)
    results = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        y = dropout(x, 0.1, True)
        results.append((y, *torch.autograd.grad(y.sum(), x)))
    (y, gradient), again, other = results
    assert torch.equal(y, again[0]) and not torch.equal(y, other[0])
    assert y.dtype == dtype and torch.equal(gradient, y / 2)
    close(y[y != 0].double().unique(), torch.tensor([2 / 0.9]), 1e-2)
    dropped = (y == 0).double()
    assert abs(dropped.mean() - 0.1) < 0.002
    for neighbors in (dropped[:, 1:] * dropped[:, :-1], dropped[1:] * dropped[:-1]):
        assert abs(neighbors.mean() - 0.01) < 0.001, "four elements share a draw"
    assert model_module.dropout(x, 0.1, False) is x and model_module.dropout(x, 0.0, True) is x
    assert model_module.dropout(x.float(), 1 - 1e-9, True).isfinite().all()


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


def write_run(folder, encoder):
    """A run folder with this encoder, as train.py saves it, and a tokenizer of single bytes."""
    tokenizer = dict(name="bytes", pat_str=".", special_tokens={})
    tokenizer["mergeable_ranks"] = {bytes([i]): i for i in range(256)}
    weights = {f"encoder.{key}": value for key, value in encoder.state_dict().items()}
    weights["objectives.mlm.bias"] = torch.zeros(VOCAB)
    config = dataclasses.asdict(encoder.config)
    torch.save({"config": config, "tokenizer": tokenizer, "model": weights}, folder / "ckpt.pt")
    return folder


def test_load(tmp_path):
    """load(run) is the encoder of a run in eval mode. Fields of its configuration can be overridden
    and weights that do not fit are refused."""
    encoder, tokens = tiny("tupe_r", dropout=0.5), sequences()
    loaded = load(write_run(tmp_path, encoder))
    close(loaded(tokens), encoder.eval()(tokens), 1e-4)
    assert not loaded.training and loaded.tokenizer.encode("a") == [97]
    assert load(tmp_path / "ckpt.pt", dropout=0.25).config.dropout == 0.25
    refuses("does not fit this model: size mismatch", load, tmp_path, d_ff=48)
    refuses("does not fit this model: Missing key", load, tmp_path, pe="rel")
    refuses("no checkpoint", load, tmp_path / "other")


@pytest.mark.parametrize("pe", "sin lsin rsin rlsin rope alibi t5".split())
def test_angles_and_distances_stay_exact_in_16_bits(pe, tmp_path):
    """load(run).bfloat16() rounds weights, but no frequency, slope or bucket: up to position 512
    every positional term is right to 16 bits. (Rounded frequencies give angles off by 2.)"""
    exact = load(write_run(tmp_path, tiny(pe, n_layer=1, d_model=96, n_head=6, max_len=512)))
    rounded, pos, results = load(tmp_path).bfloat16(), torch.arange(512), []
    q, k = torch.randn(2, 1, 6, 512, 16, dtype=torch.bfloat16)
    for encoder, x in ((exact, (q.float(), k.float())), (rounded, (q, k))):
        scheme, at = encoder.scheme, Positions(pos)
        terms = [scheme.embed(at), scheme.bias(at), *scheme.terms(*x, at, 0, None)]
        results.append([term.float() for term in terms if term is not None])
    for a, b in zip(*results):
        assert ((a - b).abs() <= 0.03 * (1 + a.abs())).all()
    assert rounded(sequences()).dtype == torch.bfloat16


COMPILED = "none clm, tupe_r mlm+pplm, lsin+alibi pmlm, rel padded"  # half a minute each


@pytest.mark.slow
@pytest.mark.parametrize("case", COMPILED.split(", "))
def test_compiled_training_equals_eager(case):
    """Compiled training with dropout has the losses of eager training in distribution, repeats with
    the seed, and its gradient is the derivative of its loss."""
    pe, objective = case.split()
    encoder = tiny(pe, n_layer=1, dropout=0.1, attn_dropout=0.1)
    model, weight = encoder, torch.randn(6, 12, 16, dtype=torch.double)
    batch = {"tokens": sequences(), "pad": torch.arange(12).expand(6, 12) > 8}
    if objective != "padded":
        model = Pretraining(encoder, ObjectiveConfig(objective)).double()
        batch = model.corrupt(sequences(), 0)
    compiled, parameters = inductor(model), [p for p in model.parameters() if p.requires_grad]

    def loss(module, seed):
        torch.manual_seed(seed)
        return (module(**batch) * weight).mean() if model is encoder else module(batch)[0]

    losses = [[loss(module, seed).item() for seed in range(60)] for module in (compiled, model)]
    assert loss(compiled, 7) == losses[0][7] != losses[0][8]
    means, errors = np.mean(losses, 1), np.std(losses, 1) / 60**0.5
    assert abs(means[0] - means[1]) < 4 * np.linalg.norm(errors)
    assert 0.6 < errors[0] / errors[1] < 1.6
    gradient = torch.autograd.grad(loss(compiled, 7), parameters, materialize_grads=True)
    ends = []
    for step in (1e-3, -2e-3):  # along the gradient
        torch._foreach_add_([p.data for p in parameters], gradient, alpha=step)
        ends.append(loss(compiled, 7).item())
    slope = 2e-3 * sum(g.square().sum().item() for g in gradient)
    assert abs((ends[0] - ends[1]) / slope - 1) < 0.01
