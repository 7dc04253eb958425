"""The specification of model.py, objectives.py, data.py, train.py and finetune.py, as tests.

    python -m pytest test_all.py          # the quick tests: a minute
    python -m pytest test_all.py -m ""    # also the slow tests

Read it from top to bottom; teach/naive.py has the equations of all positional schemes. The first
sentence of each test is the statement, of a paper or of our documentation, that it checks. Each
mechanism is compared with a plain loop or with an invariant; tests/test_peers.py compares it with
other libraries. Many tests run over PE_NAMES or OBJECTIVES, so that a new scheme or objective is
tested as soon as it is added. Notation: B sequences of L tokens, C = d_model, H heads of dimension
D = C/H (d in TUPE). RPP is relative position prediction (pplm, pmlm); model.py cites the papers. To
see that these tests notice mistakes, run tests/mutate.py.
"""

import copy
import dataclasses
import itertools
import json
import math
import random
import re
from collections import Counter, defaultdict
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import tiktoken
import torch
import torch.nn.functional as F
from scipy import stats

import data
import finetune
import model as model_module
import objectives
import train
from lib import baselines, bpe
from lib.config import UserError, pick_fields
from lib.device import autocast
from lib.files import read_jsonl
from lib.weights import warm_start
from model import (
    PE_NAMES,
    SCHEMES,
    UNKNOWN_POS,
    Component,
    Encoder,
    EncoderConfig,
    Positions,
    T5Bias,
    load,
    parse_pe,
)
from objectives import OBJECTIVES, ObjectiveConfig, Pretraining, seeded_generator
from teach import naive
from tests.conftest import (  # fixtures, too
    TINY,
    WORDS,
    cache,  # noqa: F401
    corpus,  # noqa: F401
    corpus_file,  # noqa: F401
    documented,
    log_of,
    one_line,
    refuses,
    run,  # noqa: F401
    weights,
)

VOCAB, CLS, SEP, MASK = 72, 64, 66, 67  # 64 ordinary ids, [CLS] [PAD] [SEP] [MASK], 4 spare
CPU = torch.device("cpu")
ALL_PE = [pe for pe in PE_NAMES if pe not in ("bert_a", "bert_r")]  # these are abs and abs+t5
ALL_PE += ["rope+t5", "abs+alibi", "abs+rope", "sin+rel_k", "abs+sin"]
NEW_PE = [pe for pe in PE_NAMES if not documented(pe)]  # your own: some facts cannot be known of it
XAVIER = re.compile(r"\b(u_q|u_k|f_q|f_k|query|key|psi)\b")  # weights made by xavier_linear
ALL_OBJECTIVES = [*OBJECTIVES, "mlm+pplm", "taco+pmlm", "clm+tc", "nsp+mlm+pplm_some+tc"]


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


def close(a, b, atol=1e-9):
    torch.testing.assert_close(a, b, rtol=0, atol=atol, check_dtype=False)


def masked_ok(pe):  # whether the scheme can represent a masked position (pmlm); rope cannot
    return all(part.masked_ok for part in parse_pe(pe))


def enlarge(module):
    """Make weights so large, and vectors so different, that every term matters."""
    for name, p in module.named_parameters():
        if p.dim() == 1:
            p.data += 0.1 * torch.randn_like(p)
        elif not XAVIER.search(name):
            p.data *= 10
        if not p.any():  # a new scheme may start with a table of zeros
            p.data += 0.1 * torch.randn_like(p)
    return module


def tiny(pe="abs", **change):
    """A small encoder in float64 without dropout."""
    shape = dict(vocab_size=VOCAB, n_layer=2, n_head=2, d_model=16, d_ff=32, max_len=12, pe=pe)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.double)
    encoder = Encoder(EncoderConfig(**shape | dict(dropout=0.0, attn_dropout=0.0) | change))
    torch.set_default_dtype(torch.float)
    return enlarge(encoder)


def sequences(B=6, L=12):
    """Token ids (B, L) as data.py packs them: [CLS] ... [SEP], with [SEP] inside the first two."""
    tokens = torch.randint(0, CLS, (B, L), generator=torch.Generator().manual_seed(0))
    tokens[:, 0], tokens[:, -1] = CLS, SEP
    tokens[0, L // 2] = tokens[1:2, L // 4] = tokens[1:2, 2 * L // 3] = SEP
    return tokens


# ==================================================================================================
# model.py: positional schemes


# All schemes are compared with teach/naive.py, which has their equations as loops. head_weights
# returns an encoder's weights; naive_encoder computes its output.
NAMES = {parts[0].__name__: pe for pe, parts in reversed(SCHEMES.items()) if len(parts) == 1}


def scheme_of(encoder):
    return "+".join(NAMES[key] for key in encoder.scheme.parts)


def head_weights(encoder, layer, h):
    """{scheme: the weights w of teach/naive.py} for head h of a layer. Layer n_layer is the extra
    attention layer from which pplm and pmlm predict offsets, the pair head."""
    cfg, weights = encoder.config, {}
    D, rows = cfg.d_head, slice(h * cfg.d_head, (h + 1) * cfg.d_head)  # of a linear layer's weight
    for key, part in encoder.scheme.parts.items():
        name, w = NAMES[key], SimpleNamespace()
        if name in ("abs", "rel"):
            w.p = w.a = part.table.weight
        elif name in ("sin", "lsin"):
            w.p = part.masked[None]
            w.w = part.w if name == "lsin" else naive.frequencies(cfg.d_model)
        elif name == "rel_k":
            w.a = part.layers[layer].weight
        elif name in ("rsin", "rlsin"):
            w_k = part.w if name == "rlsin" else naive.frequencies(D)
            w.a = torch.stack([*(naive.sinusoid(r, w_k) for r in range(-64, 65)), part.masked])
        elif name == "deberta":
            w.a, both = part.table.weight, part.layers[layer].weight.chunk(2)
            w.U_K, w.U_Q = both[0][rows].T, both[1][rows].T
        elif name == "xl":
            waves = (naive.sinusoid(r, naive.frequencies(cfg.d_model)) for r in range(-64, 65))
            w.a = torch.stack([*waves, part.masked])
            w.u, w.v, w.W = part.u[h, 0], part.v[h, 0], part.layers[layer].weight[rows].T
        elif name in ("alibi", "alibi_ns"):
            other = h if name == "alibi" else cfg.n_head - 1 - h
            w.left, w.right = (2 ** (-8 * (x + 1) / cfg.n_head) for x in (h, other))
            w.masked = part.masked[h]
        elif name == "tupe_a_free":
            w.M, w.theta = part.table[h], part.theta.view(2, -1)[:, h]
        elif name == "t5":
            w.b = part.table.weight[:, h]
        elif name == "t5_untie_cls":
            w.b, w.theta = part.relative_bias.table.weight[:, h], part.theta.view(2, -1)[:, h]
        elif name == "bert_ad" or name.startswith("tupe"):
            u = part.positions
            w.p, w.U_Q, w.U_K = u.norm(u.table.weight), u.u_q.weight[rows].T, u.u_k.weight[rows].T
            if name != "bert_ad" and not name.endswith("tie_cls"):
                w.theta = [(p @ w.U_Q) @ (p @ w.U_K) / math.sqrt(2 * D) for p in u.norm(part.theta)]
            if name == "tupe_r_factored":
                b = part.relative_bias
                w.a, w.F_Q, w.F_K = b.table.weight, b.f_q.weight[rows].T, b.f_k.weight[rows].T
            elif name.startswith("tupe_r"):
                w.b = part.relative_bias.table.weight[:, h]
        else:  # a new scheme: its modules and parameters, of those with a row per head this head's
            w = SimpleNamespace(**dict(part.named_children()), h=h, layer=layer)
            for key, value in part.named_parameters(recurse=False):
                setattr(w, key, value[h] if value.dim() and len(value) == cfg.n_head else value)
        weights[name] = w
    return weights


def naive_encoder(encoder, tokens, pos, pad, kept=None):
    """Encoder.forward, one sequence, head and pair of tokens at a time. pos (B, L), pad (B, L).
    kept: what each dropout multiplies by, in the order of the calls, the sequence first."""
    cfg, outputs = encoder.config, []
    pre, H, layers = cfg.norm == "pre", cfg.n_head, range(cfg.n_layer)
    weights = [[head_weights(encoder, layer, h) for h in range(H)] for layer in layers]
    for b, (ids, at, padding) in enumerate(zip(tokens.tolist(), pos.tolist(), pad.tolist())):
        drop = iter([x[b] for x in kept] if kept else [1] * 99)
        x = []
        for token, position in zip(ids, at):
            x.append(encoder.tok.weight[token])
            # sin also scales the token embedding, so it comes before abs
            for name, w in sorted(weights[0][0].items(), key=lambda item: "sin" not in item[0]):
                x[-1] = naive.at_input(name, x[-1], position, w)
        x = encoder.norm(torch.stack(x)) * next(drop)  # (L, C)
        for layer, block in enumerate(encoder.blocks):
            qkv = block.qkv(block.norm1(x) if pre else x).view(len(x), 3, H, cfg.d_head)
            heads, dropped = [], next(drop) if kept else [None] * H
            for h, w in enumerate(weights[layer]):
                q, k, v = qkv[:, :, h].unbind(1)  # (L, D) each
                args = scheme_of(encoder), q, k, v, at, w, padding, dropped[h]
                heads.append(naive.attend(*args))
            x = x + block.out(torch.cat(heads, -1)) * next(drop)
            x = x if pre else block.norm1(x)
            x = x + block.fc2(F.gelu(block.fc1(block.norm2(x) if pre else x))) * next(drop)
            x = x if pre else block.norm2(x)
        outputs.append(encoder.final_norm(x) if pre else x)
    return torch.stack(outputs)


@pytest.mark.parametrize("pe, norm", [*((pe, "post") for pe in ALL_PE), ("tupe_r", "pre")])
def test_attention_equals_triple_loop(pe, norm):
    """Hidden states and gradients are those of the papers' equations (teach/naive.py), with
    positions that are permuted, distant or masked, with padding, and for B != L. No sequence
    depends on the others of its batch."""
    encoder, tokens = tiny(pe, norm=norm, max_len=100), sequences(3, 5)
    pos = torch.tensor([[0, 1, 2, 3, 4], [0, 4, 2, 1, 3], [0, 99, 2, 3, 66]])
    if masked_ok(pe):
        pos[2, 2:4] = UNKNOWN_POS
    pad = torch.zeros(3, 5, dtype=torch.bool)
    pad[1, 3:] = True
    alone = [encoder(*(x[b : b + 1] for x in (tokens, pos, pad))) for b in range(3)]
    change = (encoder(tokens, pos, pad) - torch.cat(alone)).abs().max()
    assert change < 1e-9, "what a sequence gets depends on the other sequences of the batch"
    weight, results = torch.randn(3, 5, 16, dtype=torch.double), []
    for hidden in (encoder(tokens, pos, pad), naive_encoder(encoder, tokens, pos, pad)):
        loss, leaves = (hidden * weight).sum(), list(encoder.parameters())
        results.append([hidden, *torch.autograd.grad(loss, leaves, materialize_grads=True)])
    close(*results, atol=1e-8)
    close(encoder.hidden_states(tokens, pos, pad)[-1], hidden)


def test_t5_buckets():
    """Buckets are exact up to 7, then logarithmic up to 128, separately for each sign (T5)."""
    bias = T5Bias(EncoderConfig())
    bias.table.weight.data[:] = torch.arange(33.0)[:, None]  # so that the bias is the bucket
    buckets = bias.bias(Positions(torch.arange(2001)))[0, 0, 1000].tolist()  # r = -1000 to 1000
    assert buckets == [naive.bucket(r) for r in range(-1000, 1001)]
    some = [0, -1, 1, -7, -8, -16, -32, -64, -128, 128]
    assert [buckets[1000 + r] for r in some] == [0, 1, 17, 7, 8, 10, 12, 14, 15, 31]

    far = T5Bias(EncoderConfig(t5_max_distance=512))
    assert far.bucket.tolist().index(15) == math.ceil(8 * 64 ** (7 / 8))
    refuses("t5_max_distance is 15", EncoderConfig, t5_max_distance=15)


def test_rope_base_and_scale():
    """rope rotates the n-th pair of dimensions by the angle rope_base^(-2n/D) pos / rope_scale."""
    encoder, q = tiny("rope", rope_base=100.0, rope_scale=4.0), torch.randn(2, 8)
    part = encoder.scheme.parts["Rotary"]
    rotated = part.edit_qk(q[None, None], q[None, None], Positions(torch.tensor([3, 11])))[1][0, 0]
    for x, y, position in zip(q.unflatten(-1, (4, 2)), rotated.unflatten(-1, (4, 2)), (3, 11)):
        angle = torch.tensor([100 ** (-n / 4) * position / 4 for n in range(4)])
        turned = torch.view_as_complex(x.contiguous()) * torch.polar(torch.ones(4), angle)
        close(torch.view_as_complex(y.contiguous()), turned, 1e-5)


# ----- invariants


@pytest.mark.parametrize("pe", ALL_PE)
def test_joint_permutation_permutes_the_output(pe):
    """Only positions carry order: permuting tokens, positions and padding together, except [CLS],
    permutes the output. Permuting the tokens alone does so only for `none` (Wang 2021), and for two
    tokens whose positions are masked (RPP 3.1)."""
    encoder, tokens, pos = tiny(pe), sequences(3, 7), torch.arange(7).repeat(3, 1)
    order, swap = torch.tensor([0, 3, 1, 6, 2, 5, 4]), torch.tensor([0, 1, 5, 3, 4, 2, 6])
    pad = torch.zeros(3, 7, dtype=torch.bool)
    pad[0, 5:] = True
    hidden = encoder(tokens, pos, pad)
    close(encoder(tokens[:, order], pos[:, order], pad[:, order]), hidden[:, order])
    close(encoder(tokens, pad=pad), hidden)  # the default
    change = (encoder(tokens[1:, order]) - hidden[1:, order]).abs().max()
    assert change < 1e-9 if pe == "none" else change > 1e-3
    if masked_ok(pe):
        pos[:, [2, 5]] = UNKNOWN_POS
        masked = encoder(tokens, pos)
        close(encoder(tokens[:, swap], pos), masked[:, swap])
        assert pe == "none" or (masked - hidden)[1:].abs().max() > 1e-4, "masking has no effect"


RELATIVE = "none rel rel_k rsin rlsin t5 t5_untie_cls rope alibi deberta rope+t5 rel+alibi".split()
RELATIVE += ["xl", "alibi_ns"]


@pytest.mark.parametrize("pe", [*ALL_PE, "rel+alibi"])
def test_shifted_positions(pe):
    """Adding 5 to every position leaves relative schemes unchanged, and changes absolute ones. (A
    new scheme may be either.)"""
    encoder, tokens = tiny(pe), sequences(3, 7)
    change = (encoder(tokens, torch.arange(7) + 5) - encoder(tokens)).abs().max()
    relative = change < 1e-9 if pe in NEW_PE else pe in RELATIVE
    assert change < 1e-9 if relative else change > 1e-3


@pytest.mark.parametrize("pe", ALL_PE)
def test_causal_and_padding_masks(pe):
    """The causal mask is by index, whatever the positions: in one layer, the output for token i is
    that of the sequence cut after i. A padded token is treated as if it were not there."""
    encoder, tokens, pos = tiny(pe, n_layer=1), sequences(3, 7), torch.tensor([0, 4, 2, 5, 1, 3, 6])
    hidden = encoder(tokens, pos, causal=True)
    A = encoder.attention(tokens, 0, pos, causal=True)  # (3, H, 7, 7)
    two_layers = tiny(pe)
    A_1 = two_layers.attention(tokens, 1, pos, causal=True)
    for i in range(7):
        cut = tokens[:, : i + 1], pos[: i + 1]
        close(hidden[:, i], encoder(*cut)[:, i])
        close(A[:, :, i], F.pad(encoder.attention(cut[0], 0, cut[1])[:, :, i], (0, 6 - i)))
        of_cut = two_layers.attention(cut[0], 1, cut[1], causal=True)
        close(A_1[:, :, i], F.pad(of_cut[:, :, i], (0, 6 - i)))
    rest, pad = [0, 1, 2, 3, 5, 6], (torch.arange(7) == 4).expand(3, 7)
    for causal in (False, True):
        without = encoder(tokens[:, rest], pos[rest], causal=causal)
        close(encoder(tokens, pos, pad, causal)[:, rest], without)


@pytest.mark.parametrize("pe", ALL_PE)
def test_longer_than_max_len(pe):
    """Schemes with a table of positions reject longer sequences; all others accept them."""
    encoder = tiny(pe)
    if any(13 in p.shape for p in encoder.scheme.parameters()):  # max_len + 1 rows
        refuses(r"13 tokens is longer than the position table \(12\)", encoder, sequences(2, 13))
    else:
        assert encoder(sequences(2, 200)).isfinite().all()


# ----- initialization and dropout


class Fire(Component):  # as a student would write it
    def __init__(self, cfg):
        super().__init__(cfg)
        nn = torch.nn
        self.mlp = nn.Sequential(nn.Linear(1, 32), nn.ReLU(), nn.Linear(32, cfg.n_head))

    def bias(self, pos):
        r = pos.offsets[..., None].to(self.mlp[0].weight.dtype)
        return self.mlp(r / 64).permute(0, 3, 1, 2)


def test_initial_weights(monkeypatch):
    """The initial weights are those of the table in model.normal, in all schemes and heads. Those
    of a student's modules are PyTorch's, also after heads have been added."""
    torch.manual_seed(0)
    monkeypatch.setitem(SCHEMES, "mine", [Fire])
    model = Pretraining(Encoder(EncoderConfig(pe="mine")), ObjectiveConfig("pplm"))
    first, _, last = model.encoder.scheme.parts["Fire"].mlp
    assert first.weight.std() > 0.4 < first.bias.std()  # U(-1, 1)
    assert last.weight.std() > 0.08  # U(-1, 1) / sqrt(32)
    for pe in [pe for pe in ALL_PE if pe not in NEW_PE]:
        encoder = Encoder(EncoderConfig(pe=pe, vocab_size=VOCAB, n_layer=1))
        model = Pretraining(encoder, ObjectiveConfig("mlm+pplm"))
        for name, module in model.named_modules():
            for key, p in module.named_parameters(recurse=False):
                if key == "w":  # frequencies
                    close(p, 10000 ** (-torch.arange(len(p)) / len(p)), 1e-6)
                elif key == "bias" or isinstance(module, torch.nn.LayerNorm):
                    assert (p == (1.0 if key == "weight" else 0.0)).all(), name
                elif XAVIER.search(name):
                    bound = math.sqrt(6 / sum(p.shape))
                    assert p.abs().max() <= bound and abs(p.std() * 3**0.5 / bound - 1) < 0.1
                else:
                    assert abs(p.std() / 0.02 - 1) < (0.05 if p.numel() > 1000 else 0.9), name


@pytest.mark.parametrize("pe, norm", [("abs+rel", "post"), ("tupe_r", "pre"), ("rope", "post")])
def test_dropout_in_training(pe, norm, monkeypatch):
    """In training, dropout is applied to the embeddings, the attention probabilities, with which
    values and rel's value term are weighted, and the output of each sublayer (BERT), each at its
    rate; in evaluation, nowhere. Encoder.attention returns the probabilities before dropout."""
    encoder = tiny(pe, norm=norm, dropout=0.2, attn_dropout=0.3)
    tokens, pos = sequences(2, 5), torch.tensor([[0, 4, 2, 1, 3]] * 2)
    no_pad = torch.zeros(2, 5, dtype=torch.bool)
    pad = torch.tensor([[False] * 5, [False, False, True, False, False]])
    attention = [encoder.attention(tokens, layer, pos) for layer in (0, 1)]
    assert encoder.training
    rates, kept, probabilities = [], [], []

    def dropout(x, p=0.5, training=True):
        if not training or p == 0:
            probabilities.extend([x] if x.dim() == 4 else [])
            return x
        rates.append(p)
        kept.append((torch.rand(x.shape) > p).double() / (1 - p))
        return x * kept[-1]

    monkeypatch.setattr(F, "dropout", dropout)
    hidden = encoder(tokens, pos)
    assert rates == [0.2, 0.3, 0.2, 0.2, 0.3, 0.2, 0.2]
    close(hidden, naive_encoder(encoder, tokens, pos, no_pad, kept))
    hidden = encoder.eval()(tokens, pos)
    assert len(rates) == 7
    close(attention, probabilities)
    close(hidden, naive_encoder(encoder, tokens, pos, no_pad))
    probabilities.clear()
    encoder(tokens, pos, pad)
    expected = probabilities[:2]
    close([encoder.attention(tokens, layer, pos, pad) for layer in (0, 1)], expected)
    assert not encoder.training


@pytest.mark.parametrize("pe", ALL_PE)
def test_both_attention_paths(pe, monkeypatch):
    """On a GPU, attention runs through F.scaled_dot_product_attention, except where the scheme
    needs the probabilities; it computes the same."""
    encoder, tokens, results, calls = tiny(pe).eval(), sequences(), [], []
    pad, fused = torch.arange(12).expand(6, 12) > 8, F.scaled_dot_product_attention
    watched = lambda *args, **settings: calls.append(settings) or fused(*args, **settings)  # noqa: E731
    monkeypatch.setattr(F, "scaled_dot_product_attention", watched)
    for devices in ((), ("cpu",)):
        monkeypatch.setattr(model_module, "SDPA_DEVICES", devices)
        hidden = encoder(tokens, pad=pad)
        gradients = torch.autograd.grad(hidden.square().sum(), encoder.blocks.parameters())
        results.append([hidden, *gradients])
    close(*results)
    assert len(calls) == (0 if encoder.scheme.has_values else 2)
    calls.clear()
    encoder.blocks[0].attn_dropout = 0.3
    encoder.train()(tokens)
    encoder.eval()(tokens)
    assert encoder.scheme.has_values or [x["dropout_p"] for x in calls] == [0.3, 0.0, 0.0, 0.0]


# ----- a student's mistakes


class Right(Component):
    def __init__(self, cfg):
        super().__init__(cfg)
        self.a = torch.nn.Parameter(torch.ones(cfg.n_head))

    def bias(self, pos):
        return -self.a[:, None, None] * pos.offsets.abs()[:, None]


class NoReturn(Right):
    def bias(self, pos):
        super().bias(pos)


class WrongShape(Right):
    def bias(self, pos):
        return super().bias(pos).mean(1)


class WrongDtype(Right):
    def bias(self, pos):
        return (pos.offsets.abs()[..., None].float() @ self.a[None]).movedim(-1, 1)


class WrongDtypeReturned(Right):
    def scores(self, q, k, pos, layer):
        return (q @ k.mT).float()


class WrongDtypeOfTwo(Right):
    def edit_qk(self, q, k, pos):
        return q.float(), k.float()


class WrongDtypeOfValues(Right):
    def values(self, A, pos, layer):
        return A.float().sum(-1, keepdim=True).expand(-1, -1, -1, 8)


class NotFinite(Right):
    def bias(self, pos):
        return torch.log(super().bias(pos))


class NoPair(Right):
    def edit_qk(self, q, k, pos):
        pass


class WrongOfTwo(Right):
    def edit_qk(self, q, k, pos):
        return q, k[..., :1]


class NoSuper(Component):
    def __init__(self, cfg):
        self.size = cfg.n_head


class Unregistered(Right):
    def __init__(self, cfg):
        super().__init__(cfg)
        self.tables = [torch.nn.Embedding(4, 4)]


class TwoScales(Right):
    scale_terms = 2


MISTAKES = {
    NoReturn: r"NoReturn.bias \(.*test_all.py, line \d+\) returned None .*\(1 or B, 2, 12, 12\)",
    WrongShape: r"WrongShape.bias .* returned \(1, 12, 12\)",
    WrongDtype: r"^expected .* dtype.*, in WrongDtype.bias \(.*test_all.py, line \d+\)",
    WrongDtypeReturned: r"Returned.scores .* returned torch.float32 instead of torch.float64",
    WrongDtypeOfTwo: r"OfTwo.edit_qk .* returned torch.float32 instead of torch.float64",
    WrongDtypeOfValues: r"OfValues.values .* returned torch.float32 instead of torch.float64",
    NoPair: r"NoPair.edit_qk .* returned None",
    WrongOfTwo: r"WrongOfTwo.edit_qk .* returned \(6, 2, 12, 1\)",
    NoSuper: r"NoSuper.__init__ \(.*line \d+\) does not call super",
    Unregistered: "Unregistered.__init__ .* self.tables would not be trained",
}


@pytest.mark.parametrize("component", MISTAKES)
def test_a_mistake_in_a_component_is_named(component, monkeypatch):
    """A hook without `return`, a wrong shape or dtype, a forgotten super().__init__() and weights
    that are not registered raise an error that names the method, with its file and line. Autocast
    accepts any dtype."""
    monkeypatch.setitem(SCHEMES, "mine", [Right])
    tiny("mine")(sequences())
    tiny("mine+abs")(sequences())
    monkeypatch.setitem(SCHEMES, "mine", [component])
    with pytest.raises((TypeError, RuntimeError), match=MISTAKES[component]):
        tiny("mine")(sequences())
    if component.__name__.startswith("WrongDtype"):
        with torch.autocast("cpu", torch.bfloat16):
            tiny("mine").float()(sequences())
    monkeypatch.setitem(SCHEMES, "mine", [NotFinite])
    tiny("mine")(sequences())
    with torch.autograd.set_detect_anomaly(True):
        with pytest.raises(FloatingPointError, match="NotFinite.bias .* not finite"):
            tiny("mine")(sequences())
    monkeypatch.setitem(SCHEMES, "mine", [TwoScales])
    monkeypatch.setitem(SCHEMES, "ours", [TwoScales, SCHEMES["abs"][0]])
    for pe in ("mine+abs", "ours"):
        refuses("different scales", EncoderConfig, pe=pe)
    refuses("needs a line in SCHEMES", EncoderConfig, pe="other")


def test_load(run):
    """load(run) is the encoder of a run in eval mode, also of one with a layer for the pair head;
    weights that do not fit are refused. With another max_offset, tables keep their rows by
    offset, and larger offsets get the row to which they were clipped."""
    folder = run("run", "--steps 1 --pe deberta --objective pplm --dropout .5 --max_offset 5")
    encoder, tokens, pos = load(folder), sequences(2), 9 * torch.arange(12)
    assert not encoder.training and encoder.config.dropout == 0.5
    more, fewer = load(folder, max_offset=70), load(folder, max_offset=3)
    close(more(tokens, pos), encoder(tokens, pos))
    rows = [x.scheme.parts["Deberta"].table.weight for x in (encoder, fewer)]
    close(rows[1], rows[0][[2, 3, 4, 5, 6, 7, 8, 11]])  # -3 to 3, masked
    assert load(folder, dropout=0.0).config.dropout == 0
    assert len(encoder.scheme.parts["Deberta"].layers) == encoder.config.n_layer + 1
    for change, error in ({"d_ff": 48}, "size mismatch"), ({"pe": "rel"}, "Missing key"):
        with pytest.raises(RuntimeError, match=error):
            load(folder, **change)


# ==================================================================================================
# objectives.py


def pretraining(objective="mlm", pe="abs", L=12, n_layer=1, norm="post", max_offset=64, **change):
    """A small Pretraining model in float64 for sequences of L tokens."""
    encoder = tiny(pe, n_layer=n_layer, max_len=L, norm=norm, max_offset=max_offset)
    config = ObjectiveConfig(objective, **change)
    model = Pretraining(encoder, config).double()
    enlarge(model.objectives)
    return model


def corrupted(objective, pe="abs", B=6, L=12, **change):
    """-> a model, clean sequences, and the batch that it makes of them."""
    model, tokens = pretraining(objective, pe, L, **change), sequences(B, L)
    return model, tokens, model.corrupt(tokens, 0)


def check(model, batch, name, loss, hits):
    """The loss of an objective must be `loss`, its accuracy in evaluation the mean of `hits`."""
    for training in (True, False):
        scalars = model.train(training)(batch)[1]
        close(scalars[name], loss, 1e-5)
        assert (f"{name}_accuracy" in scalars) != training
    assert abs(scalars[f"{name}_accuracy"] - np.mean(hits)) < 1e-6


# ----- tokens


def test_mlm_selects_80_10_10():
    """Of the selected tokens, 80% become [MASK], 10% a random token, 10% stay (BERT); all tokens of
    a sequence are selected equally often, without replacement."""
    model, tokens = pretraining("mlm", L=130, mask_rate=0.3), sequences(3000, 130)
    batch = model.corrupt(tokens, 0)
    slots, target = batch["mlm_slots"], tokens.gather(1, batch["mlm_slots"])
    shown = batch["tokens"].gather(1, slots)
    assert slots.shape == (3000, 38) and (slots.sort().values.diff() > 0).all()
    masked, kept = ((shown == x).double().mean() for x in (MASK, target))
    assert abs(masked - 0.8) < 0.01 and abs(kept - (0.1 + 0.1 / 64)) < 0.01
    others = shown[(shown != MASK) & (shown != target)]
    assert sorted(others.unique().tolist()) == list(range(64))
    assert (batch["tokens"] != tokens).sum() == (shown != target).sum()
    counts = torch.bincount(slots.flatten(), minlength=130)[1:-1].double()
    assert (counts - counts.mean()).abs().max() < 5 * counts.mean().sqrt()


@pytest.mark.parametrize("objective", ["mlm", "pplm", "pmlm"])
def test_no_special_is_selected(objective):
    """k = round(rate (L - 2)) tokens are selected per sequence, the slots, but never special ones.
    If a sequence has fewer than k others, the remaining slots have weight 0."""
    rate = "mask_rate" if objective == "mlm" else "pos_rate"
    model, tokens = pretraining(objective, **{rate: 0.9}), sequences()
    special, n_selected = tokens >= CLS, [9, 8, 9, 9, 9, 9]  # k = 9; the second has 8 others
    for seed in range(20):
        batch = model.corrupt(tokens, seed)
        pos = batch.get("pos", torch.arange(12).expand(6, 12))
        assert torch.equal(batch["tokens"][special], tokens[special])
        assert torch.equal(pos[special], torch.arange(12).expand(6, 12)[special])
        if objective == "mlm":
            assert batch["mlm_weight"].sum(1).tolist() == n_selected
            assert batch["mlm_selected"].sum(1).tolist() == n_selected
            assert not special.gather(1, batch["mlm_slots"])[batch["mlm_weight"]].any()
        if objective == "pmlm":  # other positions and all tokens are unchanged (RPP 3.1)
            masked, true = pos == UNKNOWN_POS, torch.arange(12).expand(6, 12)
            assert masked.sum(1).tolist() == n_selected
            assert torch.equal(batch["tokens"], tokens) and torch.equal(pos[~masked], true[~masked])


@pytest.mark.parametrize("mlm_on", ["masked", "all"])
def test_mlm_loss_equals_a_loop(mlm_on):
    """mlm scores the selected tokens with the tied embedding; `all` adds the mean over the others
    (TACO sec 5.2, MLM+TP). Ids that only pad the embedding have no probability."""
    model, tokens, batch = corrupted("mlm", mask_rate=0.3, mlm_on=mlm_on)
    mlm, hidden, losses = model.objectives["mlm"], model.encoder(batch["tokens"]), ([], [])
    hits = []
    for b, i in itertools.product(range(6), range(12)):
        if tokens[b, i] < CLS:
            x = mlm.norm(F.gelu(mlm.dense(hidden[b, i])))
            logits = model.encoder.tok.weight[:VOCAB] @ x + mlm.bias
            selected = i in batch["mlm_slots"][b, batch["mlm_weight"][b]]
            losses[selected].append(F.cross_entropy(logits, tokens[b, i]))
            hits += [logits.argmax() == tokens[b, i]] if selected else []
    assert list(map(len, losses)) == [39, 18]
    loss = sum(losses[1]) / 18 + (sum(losses[0]) / 39 if mlm_on == "all" else 0)
    check(model, batch, "mlm", loss, hits)
    logits = mlm.token_logits(model.encoder, hidden)
    assert logits.size(-1) == 128 and (logits[..., VOCAB:] == -math.inf).all()


def test_whole_words_are_selected(monkeypatch):
    """--whole_word selects words in random order until k tokens are selected; the last word may be
    cut."""
    ids = torch.arange(VOCAB)
    begins, ends = ids % 2 == 0, (ids % 5 == 0) | (ids >= CLS)  # a word begins here; after this
    in_word = torch.stack((~begins, ~ends))
    monkeypatch.setattr(objectives, "word_characters", lambda *args: in_word)
    model, tokens = pretraining("mlm", L=34, mask_rate=0.4, whole_word=True), sequences(50, 34)
    batch = model.corrupt(tokens, 0)
    assert batch["mlm_slots"].shape == (50, 13) and batch["mlm_weight"].all()
    assert objectives.begins_word(torch.tensor([[1, 3, 1]]), in_word).tolist() == [[1, 0, 0]]
    n_words = n_neighbors = 0
    for b, slots in enumerate(batch["mlm_slots"].tolist()):
        words = []
        for i in range(1, 33):
            if begins[tokens[b, i]] or ends[tokens[b, i - 1]]:
                words.append([])
            if tokens[b, i] < CLS:
                words[-1].append(i)
        last = None
        while slots:
            (word,) = [w for w, word in enumerate(words) if slots[0] in word]
            assert slots[: len(words[word])] == words[word][: len(slots)]
            slots = slots[len(words[word]) :]
            n_words, n_neighbors, last = n_words + 1, n_neighbors + (word - 1 == last), word
    assert n_words > 300 and n_neighbors < 0.1 * n_words


def test_clm_equals_a_loop():
    """clm predicts each token from the ones before it, and from nothing else."""
    model, tokens, batch = corrupted("clm", "tupe_r")
    losses, hits = [], []
    for b, i in itertools.product(range(6), range(1, 12)):
        if tokens[b, i] < CLS:
            last = model.encoder(tokens[b : b + 1, :i], causal=True)[0, -1]
            logits = model.objectives["clm"].token_logits(model.encoder, last)
            losses.append(F.cross_entropy(logits, tokens[b, i]))
            hits.append(logits.argmax() == tokens[b, i])
    assert len(losses) == 57 and torch.equal(batch["tokens"], tokens)
    check(model, batch, "clm", sum(losses) / 57, hits)


# ----- positions (RPP)


def test_pplm_permutes_the_selected_positions():
    """PPLM permutes the positions of 60% of the tokens among themselves, uniformly, and leaves the
    tokens where they are (RPP 3.1)."""
    model, tokens, batch = corrupted("pplm", B=64)
    pos, true = batch["pos"], torch.arange(12)
    assert torch.equal(batch["tokens"], tokens) and (pos.sort(1).values == true).all()
    n_moved = (pos != true).sum(1)
    assert n_moved.max() == 6 and 4.5 < n_moved.double().mean() < 5.5  # of 6, one stays by chance
    batch = pretraining("pplm", L=6, pos_rate=0.99).corrupt(sequences(6002, 6)[2:], 0)
    orders = Counter(map(tuple, batch["pos"][:, 1:-1].tolist()))
    assert len(orders) == 24 and stats.chisquare(list(orders.values())).pvalue > 1e-3


PAIR_LOSSES = [("pplm", pe, {}) for pe in ("abs", "tupe_r", "rel_k", "deberta", "rope+rel")]
PAIR_LOSSES += [("pmlm", "tupe_r", {}), ("pplm_some", "t5", {}), ("pplm_binary", "bert_ad", {})]
PAIR_LOSSES += [("pplm", "tupe_r", dict(pair_scores="content"))]
PAIR_LOSSES += [("pmlm", "rel_k", dict(pair_scores="content", pair_head="linear"))]
PAIR_LOSSES += [("pplm", pe, dict(pair_layer="last")) for pe in ("abs", "tupe_r", "rel_k")]
PAIR_LOSSES += [("pplm", "abs", dict(norm="pre", pair_layer=x)) for x in ("extra", "last")]


@pytest.mark.parametrize("name, pe, cfg", PAIR_LOSSES, ids=str)
def test_pair_losses_equal_a_loop(name, pe, cfg):
    """RPP 3.1: the true offset j - i of a pair is predicted, as one of 2L - 1 classes, from its H
    attention logits alone: those of one more attention layer (deviation; "last": of the last
    block), with the scheme's terms for the assigned positions ("content": without). psi, an MLP
    ("linear": a linear layer), turns them into class logits. The loss is the mean cross-entropy
    over ordered pairs of ordinary tokens: pplm takes all, pmlm those with a masked position,
    pplm_some those in which both moved; pplm_binary predicts whether the assigned offset is the
    true one (two classes)."""
    L, H, D = 9, 2, 8
    model, tokens, batch = corrupted(name, pe, B=3, L=L, **cfg)
    encoder, head, pos = model.encoder, model.objectives[name].head, batch["pos"].tolist()
    last, losses, hits = cfg.get("pair_layer") == "last", [], []
    if "pair_scores" not in cfg:
        weights = [head_weights(encoder, encoder.config.n_layer - last, h) for h in range(H)]
    hidden = encoder.hidden_states(batch["tokens"], batch["pos"])[-1 - last]
    if "norm" in cfg:
        hidden = encoder.blocks[-1].norm1(hidden) if last else hidden
    for b, (i, j) in itertools.product(range(3), itertools.permutations(range(L), 2)):
        if last:
            q, k, _ = encoder.blocks[-1].qkv(hidden[b]).view(L, 3, H, D).permute(1, 2, 0, 3)
        else:
            q, k = (f(hidden[b]).view(L, H, D).unbind(1) for f in (head.query, head.key))
        n_moved = (pos[b][i] != i) + (pos[b][j] != j)  # permuted or masked
        if max(tokens[b, [i, j]]) >= CLS or n_moved < {"pmlm": 1, "pplm_some": 2}.get(name, 0):
            continue
        s = [q[h][i] @ k[h][j] / math.sqrt(D) for h in range(H)]
        if "pair_scores" not in cfg:
            args, scheme = (i, j, pos[b]), scheme_of(encoder)
            s = [naive.logit(scheme, q[h], k[h], *args, weights[h]) for h in range(H)]
        label = torch.tensor(j - i + L - 1)
        if name == "pplm_binary":
            label = torch.tensor(int(pos[b][j] - pos[b][i] == j - i))
        logits = head.psi(torch.stack(s))
        losses.append(F.cross_entropy(logits, label))
        hits.append(logits.argmax() == label)
    check(model, batch, name, sum(losses) / len(losses), hits)


def test_chunks_change_nothing():
    """The pair head takes pairs in chunks and recomputes their logits in the backward pass. Loss,
    accuracy and gradients do not depend on the chunk size."""
    model, _, batch = corrupted("pplm", "tupe_r")
    results, saved, parameters = [], [], list(model.parameters())
    for model.objectives["pplm"].chunk_size in (10**6, 7, 1):
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda x: sizes.append(x.numel()) or x, lambda x: x
        ):
            loss, _ = model.train()(batch)
        gradients = torch.autograd.grad(loss, parameters, materialize_grads=True)
        results.append([model.eval()(batch)[1], *gradients])
        saved.append(sum(sizes))
    close(results[0], results[1], 1e-6)
    close(results[0], results[2], 1e-6)
    assert saved[1] < saved[0] / 3


# ----- contexts (TACO) and sentences


def test_tc_positives_and_negatives():
    """The positive of a token is drawn uniformly from those at most (W-1)/2 away (W = 5), or if
    there is none, from its whole sequence; the K negatives from the other sequences of the batch,
    uniformly (TACO). tc_candidates holds indices into the flattened batch, the positive first."""
    model, tokens = pretraining("tc", tc_negatives=20), sequences()
    tokens[2, 1:-1] = tokens[3, 2:-1] = SEP  # the only token of sequence 3 has no positive
    tokens[2, [2, 9]] = 5  # none is near: each is the other's positive
    ordinary, b = tokens < CLS, torch.arange(6)[:, None, None]
    positives, negatives = Counter(), Counter()
    for seed in range(300):
        batch = model.corrupt(tokens, seed)
        candidates, weight = batch["tc_candidates"], batch["tc_weight"]
        assert torch.equal(weight, ordinary & (b[..., 0] != 3))
        assert ordinary.flatten()[candidates][weight].all()
        sequence, i = candidates // 12, candidates % 12
        assert ((sequence == b) == (torch.arange(21) == 0))[weight].all()
        distance = (i[..., 0] - torch.arange(12)).abs()
        assert (distance > 0)[weight].all() and (distance <= 2)[4:][weight[4:]].all()
        assert (i[2, 2, 0], i[2, 9, 0]) == (9, 2)
        positives.update(i[4, 5, :1].tolist())
        negatives.update(candidates[0, 1, 1:].tolist())
    assert sorted(positives) == [3, 4, 6, 7] and len(negatives) == ordinary[1:].sum()
    for counts in (positives, negatives):
        assert stats.chisquare(list(counts.values())).pvalue > 1e-3


CONCENTRATED = dict(tc_on="masked", tc_temperature=0.5, tc_negatives=3, tc_window=3)  # TACO 5.2


@pytest.mark.parametrize("pe", ["abs", "sin"])
@pytest.mark.parametrize("cfg", [{}, dict(tc_embedding="input_layer"), CONCENTRATED], ids=str)
def test_tc_equals_a_loop(cfg, pe):
    """TACO eq 3 to 8: what the context adds to a token is g = h - e, its last hidden state minus
    its embedding (tc_embedding="input_layer": minus the whole input of the first layer); nearby
    tokens should get a similar g. The loss of a token is the cross-entropy of picking its positive
    among 1 + K candidates, by the cosines of their g / temperature; the mean is over all ordinary
    tokens or, with tc_on="masked", those that mlm selected. h and e are of the corrupted tokens."""
    model, tokens, batch = corrupted("taco", pe, mask_rate=0.4, **cfg)
    encoder, tc = model.encoder, model.objectives["tc"].cfg
    e = encoder.tok.weight[batch["tokens"]] * (4.0 if pe == "sin" else 1.0)  # sqrt(C)
    if tc.tc_embedding == "input_layer":
        e = encoder.norm(e + encoder.scheme.embed(Positions(torch.arange(12))))
    h, e = encoder(batch["tokens"]).flatten(0, 1), e.flatten(0, 1)
    parameters, anchors = [*encoder.parameters()], []
    for b, i in itertools.product(range(6), range(12)):
        if tokens[b, i] < CLS and (tc.tc_on == "all" or i in batch["mlm_slots"][b]):
            anchors.append(12 * b + i)
    assert len(anchors) == (57 if tc.tc_on == "all" else 24)
    candidates = batch["tc_candidates"].flatten(0, 1)
    assert candidates.size(1) == 1 + tc.tc_negatives
    loss = naive.tc_loss(h, e, candidates, anchors, tc.tc_temperature)
    g = h - e
    cosines = [torch.cosine_similarity(g[i], g[candidates[i]], dim=-1) for i in anchors]
    hits = [x.argmax() == 0 for x in cosines]
    check(model, batch, "tc", loss, hits)
    model.weights["mlm"] = 0.0
    for ours, expected in zip(
        torch.autograd.grad(model.train()(batch)[0], parameters),
        torch.autograd.grad(loss, parameters),
    ):
        close(ours, expected, 1e-5)  # cosines are in float32


def test_nsp():
    """Next sentence prediction (BERT): the middle token becomes [SEP], half of the sequences get
    the second half of another one, and [CLS] predicts which. A sequence too short to split is
    unchanged and not scored."""
    model, tokens, replaced = pretraining("nsp"), sequences(9), Counter()
    tokens[2, 3:-1] = SEP  # two tokens
    for seed in range(100):
        batch = model.corrupt(tokens, seed)
        new, label = batch["tokens"], batch["nsp_label"].tolist()
        assert sum(label) == 4 and torch.equal(new[2], tokens[2])
        assert batch["nsp_weight"].tolist() == [b != 2 for b in range(9)]
        replaced.update(b for b in range(9) if label[b])
        for b in {*range(9)} - {2}:
            eligible = (tokens[b] < CLS).nonzero().flatten().tolist()
            middle = eligible[len(eligible) // 2]
            assert new[b, : middle + 1].tolist() == [*tokens[b, :middle].tolist(), SEP]
            (donor,) = (tokens[:, middle + 1 :] == new[b, middle + 1 :]).all(1).nonzero()
            assert (donor != b) == label[b]
    assert all(25 < replaced[b] < 65 for b in range(9))
    twins = model.corrupt(tokens[4:5].expand(8, -1), 0)  # a tiny text: the donor has the same half
    assert not twins["nsp_label"].any()
    nsp, scored = model.objectives["nsp"], [0, 1, *range(3, 9)]
    logits = nsp.out(torch.tanh(nsp.dense(model.encoder(new)[:, 0])))[scored]
    label = batch["nsp_label"][scored]
    check(model, batch, "nsp", F.cross_entropy(logits, label), (logits.argmax(1) == label).tolist())


# ----- all objectives


GRADIENTS = [("mlm+pmlm" if masked_ok(pe) else "mlm+pplm", pe) for pe in ALL_PE]
GRADIENTS += [(objective, pe) for objective in ALL_OBJECTIVES for pe in ("tupe_r", "rel_k")]


@pytest.mark.parametrize("objective, pe", GRADIENTS)
def test_every_parameter_gets_a_gradient(objective, pe):
    """Every parameter affects the loss, except those that add one number to a whole row of logits,
    which the softmax cancels: theta_1, and key biases (but not with rope and deberta). There are
    weights for layer n_layer if and only if there is a pair head that uses them."""
    model, _, batch = corrupted(objective, pe, n_layer=2)
    model(batch)[0].backward()
    has_extra = any(".layers.2." in name for name, _ in model.named_parameters())
    has_layers = any(hasattr(part, "layers") for part in model.encoder.scheme.parts.values())
    assert has_extra == ("pos" in batch and has_layers)
    for name, p in model.named_parameters():
        if name.endswith("qkv.bias"):
            q, k, v = p.grad.abs().unflatten(0, (3, -1)).amax(1)
            keys = k > 1e-9 if pe in NEW_PE else "rope" in pe or pe == "deberta"
            assert min(q, v) > 1e-9 and (k > 1e-9) == keys, name
        elif name.endswith("theta") and pe not in NEW_PE:
            theta_1, theta_2 = p.grad.abs().view(2, -1).amax(1)
            assert theta_1 < 1e-9 < theta_2
        else:
            assert p.requires_grad and p.grad.abs().max() > 1e-9, name
    content = pretraining("pplm", "rel_k", pair_scores="content").encoder.scheme
    assert len(content.parts["RelativeKeys"].layers) == 1


@pytest.mark.parametrize("norm", ["post", "pre"])
def test_what_the_last_blocks_logits_do_not_need_is_frozen(norm):
    """With --pair_layer last (RPP) and no other objective, the rest of the last block gets no
    gradient. It is frozen, except for its values, which share a matrix with queries and keys. With
    --pair_scores content, so are the layer's own weights of a scheme."""
    cases = [("pplm", "total", 10), ("mlm+pplm", "total", 0), ("pplm", "content", 11)]
    for objective, scores, n_frozen in cases:
        encoder = tiny("rel_k" if scores == "content" else "tupe_r", norm=norm)
        cfg = ObjectiveConfig(objective, pair_layer="last", pair_scores=scores)
        model = Pretraining(encoder, cfg).double()
        model(model.corrupt(sequences(), 0))[0].backward()
        frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
        assert frozen == {name for name, p in model.named_parameters() if p.grad is None}
        assert len(frozen) == n_frozen
        no_values = encoder.blocks[-1].qkv.weight.grad[2 * 16 :].abs().max() == 0
        assert no_values == (objective == "pplm")


@pytest.mark.parametrize("objective", ALL_OBJECTIVES)
def test_a_sum_is_the_sum_of_its_parts(objective):
    """The loss is the weighted sum of the parts' losses on one corrupted batch, whatever the order
    they are given in; taco is mlm + tc (TACO eq 11). Only tokens that mlm selected are changed."""
    model, tokens, batch = corrupted(objective, "tupe_r")
    given, weights = objective.replace("taco", "mlm+tc").split("+"), (2.0, 3.0, 5.0, 7.0)
    states = model.encoder.hidden_states(batch["tokens"], batch.get("pos"), causal="clm" in given)
    full = {**batch, "states": states, "positions": Positions.of(tokens, batch.get("pos"))}
    parts = [model.objectives[name] for name in given]
    losses = [part.loss(model.encoder, states[-1], full) for part in parts]
    assert len(given) == len(model.objectives)
    close(model(batch)[0], sum(loss for loss, _ in losses), 1e-5)
    spelling = "+".join(reversed(given))
    weighted = pretraining(spelling, "tupe_r", loss_weights=weights[: len(given)][::-1])
    close(weighted.corrupt(tokens, 0), batch, 0)
    close(weighted(batch)[0], sum(w * loss for w, (loss, _) in zip(weights, losses)), 1e-5)
    selected = batch.get("mlm_selected", torch.zeros_like(tokens).bool())
    assert torch.equal(batch["tokens"][~selected], batch["original"][~selected])
    assert torch.equal(batch["eligible"], batch["original"] < CLS)


def test_corruption_is_a_function_of_its_key():
    """A batch depends on (tokens, key) alone, in every process, and each part has a generator of
    its own."""
    assert seeded_generator("cpu", 1337, 0, "mlm").initial_seed() == 6945921723512978997
    drawn = dict(mlm="mlm_slots", pplm="pos", tc="tc_candidates", nsp="nsp_label")
    model, tokens = pretraining("nsp+mlm+pplm+tc"), sequences()
    batch, clean = model.corrupt(tokens, 7, 100, 0), tokens.clone()
    torch.manual_seed(99)
    close(model.corrupt(tokens, 7, 100, 0), batch, 0)
    assert torch.equal(tokens, clean)
    for key in ((8, 100, 0), (7, 101, 0), (7, 100, 1)):
        other = model.corrupt(tokens, *key)
        assert all((other[name] != batch[name]).any() for name in drawn.values())
    together = pretraining("tc+pplm+mlm", mask_rate=0.6).corrupt(tokens, 7)
    for name in ("mlm", "pplm", "tc"):
        alone = pretraining(name, mask_rate=0.6).corrupt(tokens, 7)
        close(alone[drawn[name]], together[drawn[name]], 0)
    moved = together["pos"] != torch.arange(12)
    assert (moved & ~together["mlm_selected"]).any(), "mlm and pplm select the same tokens"


# ----- lib/baselines.py: what a loss is compared with


def enumerated_baselines(n, k):
    """Enumerate every selection, permutation and pair, and count the true offsets given what each
    predictor knows -> {baseline: nats}."""
    seen = defaultdict(lambda: defaultdict(Counter))
    for selected in itertools.combinations(range(n), k):
        for order in itertools.permutations(selected):
            pos = {i: i for i in range(n)} | dict(zip(selected, order))  # assigned
            moved = tuple(i for i in pos if pos[i] != i)
            for i, j in itertools.permutations(range(n), 2):
                known = {"prior": (), "copy": (pos[i], pos[j])}
                if {i, j} & set(selected):
                    shown = [None if x in selected else x for x in (i, j)]
                    known["free_slots"] = (selected, *shown)
                if {i, j} <= set(moved):
                    known["some_moved"] = (moved, *known["copy"])
                for name, knowledge in known.items():
                    seen[name][knowledge][j - i] += 1
                seen["binary"][()][pos[j] - pos[i] == j - i] += 1
    nats = {}
    for name, tables in seen.items():
        loss = sum(-c * math.log(c / t.total()) for t in tables.values() for c in t.values())
        nats[name] = loss / sum(t.total() for t in tables.values())
    return nats


@pytest.mark.parametrize("n, k", [(6, 4), slow(7, 4), slow(5, 5)])
def test_baselines_equal_an_enumeration(n, k):
    """Each baseline is the lowest loss of a predictor that knows only what its name says."""
    ours = baselines.position_baselines(n + 2, k / n)
    for name, loss in enumerated_baselines(n, k).items():
        assert ours[name] == pytest.approx(loss, abs=0.005), name


# ==================================================================================================
# data.py: tokenizer, token ids on disk, batches


def encoding_of(corpus):
    return tiktoken.Encoding(**bpe.encoding_arguments(corpus.tokenizer))


def documents_in(corpus, split):
    """The texts of a stream; each is followed by [SEP]."""
    *texts, rest = encoding_of(corpus).decode(getattr(corpus, split)).split("[SEP]")
    assert rest == ""
    return texts


def naive_bpe(words, n_ids):
    """Byte-pair encoding from its definition: count all pairs again before every merge."""
    ranks = [bytes([b]) for b in range(256)]
    items = [([bytes([b]) for b in word], n) for word, n in words.items()]
    while len(ranks) < n_ids:
        counts = Counter()
        for tokens, n in items:
            for pair in zip(tokens, tokens[1:]):
                counts[pair] += n
        if not counts:
            break
        pair = min(counts, key=lambda p: (-counts[p], p))
        if pair[0] + pair[1] not in ranks:
            ranks.append(pair[0] + pair[1])
        for tokens, _ in items:
            i = 0
            while i < len(tokens) - 1:
                if (tokens[i], tokens[i + 1]) == pair:
                    tokens[i : i + 2] = [pair[0] + pair[1]]
                i += 1
    return ranks


@pytest.mark.parametrize("n_words, longest", [(300, 9), (8, 9), (20, 60)])  # the second ends early
def test_bpe_equals_naive_bpe(n_words, longest):
    """train_bpe gives the tokens of naive_bpe in the same order; ties go to the smaller bytes."""
    rng, words = random.Random(1), Counter({b"aaaaa": 3, b"abababa": 2})
    for _ in range(n_words):
        words["".join(rng.choices("abcdé", k=rng.randint(1, longest))).encode()] += 1
    assert bpe.train_bpe(words, 900) == naive_bpe(words, 900)


def test_tokenizer_round_trip(corpus):
    """Any text is restored from its ids, every byte is a token, and the 8 special tokens have the
    last ids, which no text can produce."""
    encoding = encoding_of(corpus)
    assert encoding.n_vocab == corpus.vocab_size == 8192
    assert [encoding.encode_single_token(name) for name in bpe.SPECIALS] == [*range(8184, 8192)]
    for text in ("the fox", "naïve Ωμέγα 中文 🦊 \x00\x7f", " \n\t  two  spaces", "[MASK]", ""):
        ids = encoding.encode_ordinary(text)
        assert encoding.decode(ids) == text and max(ids, default=0) < 8184
    for byte in map(bytes, zip(range(256))):
        assert encoding.decode_single_token_bytes(encoding.encode_single_token(byte)) == byte


def test_documents_are_split_and_packed(corpus, corpus_file):
    """Every 50th document, beginning with the second, is for validation as a whole; all others are
    packed into the training stream, each followed by [SEP]."""
    texts = [json.loads(line)["text"] for line in open(corpus_file)]
    assert documents_in(corpus, "val") == [t for i, t in enumerate(texts) if i % 50 == 1]
    assert documents_in(corpus, "train") == [t for i, t in enumerate(texts) if i % 50 != 1]


def test_sequences(corpus):
    """A sequence is [CLS] x [SEP], where x is the next block of L - 2 tokens of the stream."""
    sequences = corpus.sequences("train", [0, 3], 10)
    assert sequences.dtype == np.int64 and sequences[:, [0, -1]].tolist() == [[8184, 8186]] * 2
    assert sequences[1, 1:-1].tolist() == corpus.train[24:32].tolist()
    n = corpus.n_sequences("train", 10)
    whole = corpus.sequences("train", np.arange(n), 10)[:, 1:-1]
    assert n == len(corpus.train) // 8 and (whole.ravel() == corpus.train[: 8 * n]).all()


def test_batches_visit_every_sequence_once_per_epoch():
    """The order is a new permutation in each epoch and a function of (seed, index) alone; a
    fraction keeps the same sequences for every seed."""
    corpus = SimpleNamespace(n_sequences=lambda split, L: 30, sequences=lambda split, i, L: i)
    batches = partial(data.Batches, corpus, 10)
    first, second = batches(5)(0, 30).tolist(), batches(5)(1, 30).tolist()
    assert sorted(first) == sorted(second) == list(range(30)) and second != first != sorted(first)
    assert first == np.random.default_rng((5, 0)).permutation(30).tolist()
    assert batches(5)(7, 4).tolist() == first[28:] + second[:2], "a function of (seed, index)"
    assert batches(6)(0, 30).tolist() != first
    a, b = (set(batches(seed, 1 / 3)(0, 20)) for seed in (5, 6))
    assert a == b and len(a) == 10


def test_validation_sequences_cover_the_stream(corpus, monkeypatch):
    """Validation uses the same sequences in every run, evenly spaced from the first to the last."""
    n = corpus.n_sequences("val", 6)
    chosen = [0, (n - 1) // 4, (n - 1) // 2, 3 * (n - 1) // 4, n - 1]
    sequences = data.validation_sequences(corpus, 5, 6)
    assert n > 20 and sequences.tolist() == corpus.sequences("val", chosen, 6).tolist()
    monkeypatch.setattr(data, "VAL_BATCH", n - 2)  # two batches of nearly the same size
    batches = data.validation_batches(corpus, 6)
    assert [len(batch) for batch in batches] == [n - n // 2, n // 2]
    assert torch.cat(batches).tolist() == corpus.sequences("val", np.arange(n), 6).tolist()


# ==================================================================================================
# train.py


@pytest.mark.parametrize("preset", train.PRESETS)
def test_presets_and_names(preset):
    """A flag overrides the preset. A run is named after what determines it."""
    flags = "--steps", "7", "--objective", "pplm+mlm", "--loss_weights", "2", "1"
    args = train.parse_args(["--preset", preset, *flags])
    assert args.steps == 7 and args.lr == train.PRESETS[preset]["lr"]
    assert args.loss_weights == (1, 2)  # in the order of mlm+pplm
    assert args.out_dir == f"out/{args.dataset}-{preset}-abs-mlm+pplm-s1337"
    args = train.parse_args(["--warmup", "0", "--dropout", ".3", "--block_size", "99"])
    assert (args.warmup, args.attn_dropout, args.max_len) == (0, 0.3, 99)
    for dataset, name in (("a/b:20231101.de", "a-b-20231101-de"), ("x/*.txt", "x-txt")):
        assert train.parse_args(["--dataset", dataset]).out_dir == f"out/{name}-demo-abs-mlm-s1337"


@pytest.mark.parametrize("objective", ALL_OBJECTIVES)
def test_default_preset(objective):
    """The default preset is `pairs` if the objective predicts positions, and `demo` otherwise."""
    preset = "pairs" if re.search("pplm|pmlm", objective) else "demo"
    args = vars(train.parse_args(["--objective", objective, "--pe", "t5", "--lr", "0.1"]))
    assert args["preset"] == preset
    assert args.items() >= (train.PRESETS[preset] | {"lr": 0.1}).items()
    assert train.parse_args(["--objective", objective, "--preset", "lab"]).preset == "lab"


def plain_training(args, corpus, dtype, overflows=()):
    """What the documentation says that train.py does, one step after the other -> parameters, the
    log's rows of training, the scale. overflows: micro-batches whose loss is infinite."""
    torch.manual_seed(args.seed)
    config = {f.name: getattr(args, f.name) for f in dataclasses.fields(EncoderConfig)[1:-1]}
    encoder = Encoder(EncoderConfig(vocab_size=8192, **config))
    model = Pretraining(encoder, pick_fields(ObjectiveConfig, args))
    stream = np.fromfile(corpus.folder / "train.bin", np.uint16).astype(int)
    n, micro_batches = len(stream) // (args.block_size - 2), 0
    order, rows, sums, since, scale = [], [], Counter(), 0, 65536.0 if dtype == "float16" else 1.0
    for epoch in range(9):
        order += np.random.default_rng((args.seed, epoch)).permutation(n).tolist()
    parameters, groups = list(model.parameters()), []
    for p in parameters:
        groups.append({"params": [p], "weight_decay": args.weight_decay if p.dim() >= 2 else 0})
    adam = torch.optim.AdamW(groups, betas=(args.beta1, args.beta2), eps=args.eps)
    for step in range(1, args.steps + 1):
        rise, fall = step / args.warmup, (args.steps - step + 1) / (args.steps - args.warmup)
        lr = args.lr * min(rise, fall, 1)
        for accum in range(args.grad_accum):
            chosen, order = order[: args.batch_size], order[args.batch_size :]
            blocks = [stream[14 * i : 14 * i + 14] for i in chosen]
            tokens = torch.tensor([[8184, *block, 8186] for block in blocks])
            batch = model.corrupt(tokens, args.seed, step - 1, accum)
            generator = seeded_generator("cpu", args.seed, step - 1, accum, "dropout")
            torch.manual_seed(generator.initial_seed())
            with torch.autocast("cpu", getattr(torch, dtype), enabled=dtype != "float32"):
                loss, scalars = model(batch)
            loss = loss * (math.inf if micro_batches in overflows else 1)
            (scale * loss / args.grad_accum).backward()
            sums.update({"loss": loss.item() / args.grad_accum})
            sums.update({name: x.item() / args.grad_accum for name, x in scalars.items()})
            micro_batches += 1
        norm = torch.stack([p.grad.norm() for p in parameters]).norm() / scale
        for group, p in zip(adam.param_groups, parameters):
            p.grad *= min(1.0, (1 / (norm + 1e-6)).item()) / scale  # to a global norm of 1
            group["lr"] = lr
        if norm.isfinite():
            adam.step()
        else:
            scale /= 2
        adam.zero_grad()
        if step % args.log_every == 0 or step % args.eval_every == 0 or step == args.steps:
            rows.append({key: x / (step - since) for key, x in sums.items()})
            rows[-1] |= {"step": step, "lr": lr}
            since, sums = step, Counter()
    return dict(model.named_parameters()), rows, scale


def let_overflow(monkeypatch, overflows):
    """In training, make the loss of these micro-batches infinite, counted from 0."""
    forward, count = Pretraining.forward, itertools.count()

    def overflowing(self, batch):
        loss, scalars = forward(self, batch)
        infinite = self.training and next(count) in overflows
        return loss * (math.inf if infinite else 1), scalars

    monkeypatch.setattr(Pretraining, "forward", overflowing)


PLAIN = {  # float32: gradients below 1, which are not clipped, and a large eps: their size matters
    "float32": "--objective mlm+tc --pe t5 --loss_weights .1 .03 --grad_accum 2 --dropout .2 "
    "--eps .01 --lr .1",
    "bfloat16": "--objective nsp+mlm+pplm --pe rel --norm pre --weight_decay .3 --beta1 .8",
    "float16": "--objective mlm+pplm --pe tupe_r --grad_accum 2 --dropout .1 --eps 1e-5",
}


@pytest.mark.parametrize("dtype", PLAIN)
def test_training_equals_a_plain_loop(dtype, run, corpus, monkeypatch):
    """A run has the weights and the log of a plain loop: batches in the order of a permutation per
    epoch; corruption and dropout by (seed, step, micro); gradients accumulated as means and clipped
    to a norm of 1; AdamW with decay on matrices only; a learning rate that rises linearly and falls
    linearly to 0 after the last step; logged means over the steps since the last line. With fp16, a
    step whose gradient is not finite is skipped, and halves the scale."""
    flags = f"--steps 7 --log_every 3 --eval_every 5 --seed 4 --dtype {dtype} {PLAIN[dtype]}"
    overflows = {3, 8} if dtype == "float16" else set()  # micro-batches: steps 2 and 5
    with monkeypatch.context() as patch:
        let_overflow(patch, overflows)
        folder = run("run", flags)
    args = SimpleNamespace(**log_of(folder)[0]["args"])
    parameters, rows, scale = plain_training(args, corpus, dtype, overflows)
    state, atol = weights(folder), 1e-4 if dtype == "float32" else 2e-3
    for name, p in parameters.items():
        close(state["model"][name], p, atol)
    for logged, row in zip(log_of(folder)[1:], rows, strict=True):
        assert {key: logged[key] for key in row} == pytest.approx(row, abs=1e-3)
    assert state["scaler"].get("scale", 1.0) == scale
    if overflows:
        assert scale == 65536 / 4


# ----- a run


def test_a_run_learns_logs_and_saves(run, capsys):
    """A run writes the files and the log that are documented, and its loss falls."""
    folder = run("run", "--steps 60 --lr 0.01 --eval_every 30 --keep_every 20 --pe t5")
    first, *rows = log_of(folder)
    assert {"args", "command", "config", "data", "precision", "git", "versions"} <= first.keys()
    assert first["config"]["d_model"] == 16 and first["args"]["pe"] == "t5"
    assert first["baselines"].keys() == {"uniform", "unigram"}
    assert first["baselines"]["uniform"] == pytest.approx(math.log(8184), abs=1e-3)
    columns = {"step", "loss", "mlm", "lr", "ms_per_step", "tokens_per_s", "peak_mem_mb"}
    assert all(columns <= row.keys() for row in rows)
    assert [row["step"] for row in rows] == sorted({*range(3, 61, 3), 20, 40})
    evaluated = [row for row in rows if "val_loss" in row]
    assert [row["step"] for row in evaluated] == [30, 60] and "val_mlm" in evaluated[0]
    assert evaluated[-1]["val_loss"] < 8 < rows[0]["loss"]
    names = "ckpt.pt ckpt_20.pt ckpt_40.pt ckpt_60.pt config.json log.jsonl .lock"
    assert {file.name for file in folder.iterdir()} == {*names.split()}
    out = capsys.readouterr().out
    assert out.count("sample: ") == 2 and "with shuffled positions" in out
    assert re.search("python train.py .*--pe t5 .*--preset rpp", out.splitlines()[-1])


@pytest.mark.parametrize(
    "pe, objective",
    [("tupe_r", "mlm+pplm"), slow("rel", "taco --dtype float16")],
)
def test_resume_is_bit_exact(run, tmp_path, pe, objective):
    """A run that is resumed half-way ends with the weights and the log of an uninterrupted one."""
    flags = f"--pe {pe} --objective {objective} --steps 12 --eval_every 6 --grad_accum 2 "
    flags += "--keep_every 3 --dropout .1"
    whole, cut = run("whole", flags), tmp_path / "cut"
    cut.mkdir()
    old = weights(whole, "ckpt_6.pt")
    for name in ("max_offset", "t5_max_distance", "rope_base", "rope_scale"):
        del old["config"][name], old["identity"][f"--{name}"]  # older than these flags
    torch.save(old, cut / "ckpt.pt")
    lines = (whole / "log.jsonl").read_text().splitlines()
    (cut / "log.jsonl").write_text("\n".join(lines[:4]) + '\n{"st')  # step 9, and a crash
    run("cut", f"{flags} --resume")
    for key in ("model", "optimizer", "scaler"):
        close(weights(whole)[key], weights(cut)[key], 0)
    logs = [log_of(folder)[1:] for folder in (whole, cut)]
    for row in logs[0] + logs[1]:
        for measured in ("ms_per_step", "tokens_per_s", "peak_mem_mb"):
            del row[measured]
    assert logs[0] == logs[1]


def test_resume_refuses_another_run(run, capsys):
    """A folder that holds a run is refused without --resume, and other flags are refused with it,
    except for those that change it by rounding at most."""
    folder = run("run", "--steps 3")
    before = (folder / "ckpt.pt").read_bytes()
    for flags, message in {
        "": "--resume, or choose another --out_dir",
        "--resume --steps 4": "--steps was 3, is 4",
        "--resume --pe t5": "--pe was abs, is t5",
        "--resume --rope_base 100": "--rope_base was 10000.0, is 100.0",
        "--resume --seed 1 --lr 1": "--seed was 1337, is 1; --lr was 0.003, is 1.0",
        "--resume --grad_accum 2": "--grad_accum times processes was 1, is 2",
    }.items():
        assert message in one_line(capsys, run, "run", f"--steps 3 {flags}")
    run("run", "--steps 3 --resume --eval_every 2 --log_every 1 --dtype float16")
    assert (folder / "ckpt.pt").read_bytes() == before  # it had ended already
    run("new", "--steps 1 --resume")
    assert "starts at step 0" in capsys.readouterr().out


# ----- a run that starts from another one (lib/weights.py)


@pytest.mark.parametrize("pe", ["abs", "tupe_r", "tupe_a_free", "bert_ad", "rel_k", "lsin+rel"])
def test_warm_start_grows_tables(pe):
    """With a larger max_len (Wang 2021 trains at 128, then at 512), outputs for short sequences
    are unchanged, also for masked positions and offset classes; new rows are as initialized. With a
    larger max_offset, all outputs are."""
    short, outputs = pretraining("pplm", pe, max_offset=5), []
    long = pretraining("pplm", pe, L=20, max_offset=9)
    fresh, config = copy.deepcopy(long.state_dict()), dataclasses.asdict(short.encoder.config)
    done = warm_start(long, {"model": short.state_dict(), "config": config}, "run")
    assert done["new"] == done["dropped"] == []
    tokens, pos = sequences(), torch.arange(12).repeat(6, 1)
    pos[2:, 4:6] = UNKNOWN_POS
    for model, first in ((short, 0), (long, 8)):  # offset r is class r + 11, then r + 19
        head, states = model.objectives["pplm"].head, model.encoder.hidden_states(tokens, pos)
        logits = head.psi(head.scores(model.encoder, states, pos))
        outputs.append([states[-1], logits[..., first : first + 23]])
    close(*outputs)
    for key in done["grown"]:
        assert 0 < (long.state_dict()[key] == fresh[key]).double().mean() < 1, key
    other = {"model": fresh}
    for key, value in dict(d_ff=48, n_head=4, n_layer=2, norm="pre", vocab_size=80).items():
        other["config"] = config | {key: value}
        refuses(f"{key} is {value} there", warm_start, long, other, "run")
    other["config"] = config | dict(max_len=20)
    refuses("at least 20, not 12", warm_start, short, other, "run")


def test_init_from(run, capsys):
    """A run may start from one with another scheme (Wang 2021 replaces that of a trained model),
    objective or block size; it prints what was loaded, and resumes without the original run."""
    short = run("short", "--steps 3 --pe tupe_r")
    flags = f"--steps 1 --lr 1e-9 --init_from {short} --block_size 24 --pe t5 --objective clm"
    other, out = run("other", flags), capsys.readouterr().out
    assert "new: encoder.scheme.parts.T5Bias.table.weight, objectives.clm." in out
    assert "dropped: encoder.scheme.parts.TupeR." in out
    trained, other = weights(short)["model"], weights(other)["model"]
    for key in ("encoder.tok.weight", "encoder.blocks.0.qkv.weight"):
        close(other[key], trained[key], 1e-8)
    (short / "ckpt.pt").unlink()
    run("other", f"{flags} --resume")


def test_tacos_flags(run, capsys):
    """--init_embeddings uses another run's token embeddings, --freeze_embeddings keeps them, and
    --data_fraction uses that share of the training sequences (TACO)."""
    first = run("a", "--steps 3")
    flags = f"--steps 3 --seed 5 --init_embeddings {first} --data_fraction .05"
    frozen = run("b", f"{flags} --objective taco --pe t5 --freeze_embeddings")
    assert "0.9 epochs" in capsys.readouterr().out  # 3 steps of 4 of the 13 sequences
    first, frozen, learned = (
        weights(folder)["model"]["encoder.tok.weight"]
        for folder in (first, frozen, run("c", flags))
    )
    assert torch.equal(first, frozen) and 0 < (learned - first).abs().max() < 0.02
    a, b = ({"name": "bpe", "mergeable_ranks": {token: 0}} for token in (b"a", b"b"))
    with pytest.raises(UserError, match="different tokenizer"):  # of another text
        train.initialize(None, None, {"run": {"tokenizer": a}}, b)


# ----- evaluation


def small_model(flags):
    return train.build_model(train.parse_args([*TINY, *flags.split()]), 8192, None)


def test_evaluation_is_the_same_for_every_scheme(corpus):
    """A validation loss is the mean over fixed sequences with fixed corruption, whatever the scheme
    and the seed, without dropout."""
    validation, inputs = data.validation_batches(corpus, 16), {}
    validation = (validation[0][:8], *validation, validation[0][:5])  # a smaller one counts less
    for pe, seed in (("abs", 0), ("t5", 1)):
        model = small_model(f"--objective nsp+mlm+pplm+tc --dropout .5 --pe {pe} --seed {seed}")
        batches = inputs[pe] = []
        hook = model.register_forward_hook(lambda _, args, out: batches.append(args[0]))
        row = train.evaluate(model, validation, autocast(CPU, torch.float32), CPU)
        hook.remove()
        assert model.training and {"val_mlm", "val_pplm_accuracy", "val_tc"} <= row.keys()
        slots = [batch["mlm_slots"][:5] for batch in batches]
        assert not torch.equal(slots[0], slots[1]), "two batches are corrupted alike"
        losses = [model.eval()(batch)[0].item() for batch in batches]
        expected = np.average(losses, weights=[len(batch) for batch in validation])
        assert row["val_loss"] == pytest.approx(expected, abs=1e-5)
    for a, b in zip(*inputs.values(), strict=True):
        assert all(torch.equal(a[key], b[key]) for key in a if torch.is_tensor(a[key]))


@pytest.mark.parametrize("name, used", [(x, y) for x in ("mlm", "pplm") for y in (True, False)])
def test_ablation(name, used):
    """Shuffled positions leave the loss of mlm as it is if the model does not use order, and random
    tokens that of pplm if it does not use its tokens. Special tokens keep positions and ids."""
    model, tokens, batch = corrupted(name, "none" if name == "mlm" and not used else "t5")
    if name == "pplm" and not used:
        model.encoder.tok.weight.data[:] = model.encoder.tok.weight[0].clone()
    index, changed = torch.arange(12).expand(6, -1), {"pos": None, **batch}
    model.objectives[name].ablate(changed, seeded_generator("cpu", 0))
    losses = [model.eval()(x)[1][name] for x in (batch, changed)]
    assert (abs(losses[1] - losses[0]) > 1e-4) == used
    assert used or abs(losses[1] - losses[0]) < 1e-9
    key, old = ("pos", index) if name == "mlm" else ("tokens", batch["tokens"])
    new, kept = changed[key], tokens >= CLS
    assert torch.equal(new[kept], old[kept]) and (new != old)[~kept].double().mean() > 0.7
    if name == "mlm":
        assert torch.equal(new.sort().values, index)
    assert {*new.flatten().tolist()} <= {*old.flatten().tolist()}
    assert all(changed[other] is batch[other] for other in batch.keys() - {key})


def test_sample(corpus, monkeypatch):
    """A sample of mlm shows [predicted|true] for each masked token; one of a position objective
    shows a text whose words have exchanged their positions, and the order that the model finds."""
    tokens = data.validation_batches(corpus, 16)[0][:1]
    model = small_model("--objective mlm+pplm --mask_rate .3")
    model.encoder.tokenizer = encoding_of(corpus)
    truth = 9.0 * F.one_hot(tokens, 8192)
    monkeypatch.setattr(model.objectives["mlm"], "token_logits", lambda *args: truth)
    text, order = model.samples(tokens)
    words = [part.split("]")[0].split("|") for part in text.split("[")[1:]]
    assert len(words) == round(0.3 * 14) and all(a == b for a, b in words) and model.training
    original = encoding_of(corpus).decode(tokens[0, 1:-1].tolist())
    assert re.sub(r" ?\[(.+?)\|.+?\]| ", r"\1", text) == original.replace(" ", "")
    given, _, found = order.rpartition(" (")[0].partition(" -> ")
    assert given != original.strip() and sorted(given) == sorted(original.strip())
    assert found == "unchanged" or sorted(found) == sorted(given)


# ==================================================================================================
# finetune.py


def tiny_classifier(task, pe="abs", **change):
    """A small Classifier in float64 for rows of at most 12 tokens."""
    model = finetune.Classifier(tiny(pe, **change), task, 12).double()
    enlarge(model.head)
    return model


def finetune_args(*flags):
    args = finetune.parse_args(["--task", "cola", *map(str, flags)])
    args.device, args.dtype = CPU, torch.float32
    return args


def test_batches_take_every_row_once_and_similar_lengths():
    """Each epoch visits each row once, with little padding, in another order for each seed."""
    rows = [([0] * n, 0) for n in np.random.default_rng(0).integers(1, 100, 500)]
    orders = []
    for rng in (None, np.random.default_rng(1), np.random.default_rng(2)):
        batches = list(finetune.batches_by_length(rows, 32, rng))
        orders.append([i for batch in batches for i in batch])
        assert sorted(orders[-1]) == list(range(500))
        lengths = [[len(rows[i][0]) for i in batch] for batch in batches]
        padding = sum(max(batch) * len(batch) - sum(batch) for batch in lengths)
        assert padding < 0.15 * sum(map(sum, lengths))
    assert orders[1] != orders[2] and lengths != sorted(lengths)


def test_squads_head_with_padding():
    """SQuAD's head is linear, on every token. A padded batch gives what its rows give alone; the
    loss is the mean cross-entropy of the answer's first and last token."""
    model = tiny_classifier("squad", "tupe_r").eval()
    rows, losses = [([64, 1, 2, 3, 66], (1, 2)), ([64, 5, 66], (1, 2))], []
    tokens, pad, labels = finetune.padded_batch(rows, [0, 1], 65, CPU)
    assert tokens.tolist() == [[64, 1, 2, 3, 66], [64, 5, 66, 65, 65]]
    assert pad.tolist() == [[False] * 5, [False] * 3 + [True] * 2]
    for out, row in zip(model(tokens, pad), rows):
        ids, pad_alone, _ = finetune.padded_batch([row], [0], 65, CPU)
        alone = model.head[-1](model.encoder(ids)[0]).T  # (2, L)
        assert pad_alone is None
        close(out[:, : len(row[0])], alone)
        losses.append(-alone.log_softmax(1)[[0, 1], [1, 2]].mean())
    close(model.loss(tokens, pad, labels), sum(losses) / 2, 1e-7)


# ELECTRA app. B (RPP follows it); TUPE table 1; TACO tables 6 and 7; Wang 2021 table 6.
BEST_OF = [2e-5, 3e-5, 4e-5, 5e-5]
# fmt: off
RECIPES = {  # epochs, lr, batch, warm-up, weight decay, eps, length, layer-wise decay, over seeds
    ("electra", "stsb", 256):     (10, [3e-4], 32, 0.1, 0, 1e-6, 128, 0.8, "median"),
    ("electra", "squad_v2", 512): (2, [1e-4], 32, 0.1, 0, 1e-6, 512, 0.8, "median"),
    ("tupe", "qnli", 512):        (5, BEST_OF, 32, 0.06, 0.01, 1e-6, 512, 1, "median"),
    ("tupe", "sst2", 256):        (10, BEST_OF, 32, 0.06, 0.01, 1e-6, 128, 1, "median"),
    ("taco", "qqp", 512):         (6, [5e-5], 64, 2000, 0, 1e-8, 128, 1, "mean"),
    ("taco", "sst2", 512):        (4, [5e-5], 64, 200, 0, 1e-8, 128, 1, "mean"),
    ("taco", "rte", 512):         (4, [5e-5], 32, 100, 0, 1e-8, 128, 1, "mean"),
    ("bert", "squad", 512):       (3, [3e-5], 32, 0, 0, 1e-8, 384, 1, "mean"),
    ("bert", "docs", 256):        (10, [2e-5], 32, 0, 0, 1e-8, 128, 1, "mean"),
}
# fmt: on


@pytest.mark.parametrize("recipe, task, d_model", RECIPES)
def test_recipes_are_the_papers_tables(recipe, task, d_model):
    """A recipe has the values of its paper, with sequences no longer than the model's max_len, and
    flags override it."""
    cfg = {"d_model": d_model, "max_len": 512 if d_model == 512 else 128}
    s = finetune.settings(finetune_args("--recipe", recipe), task, cfg)
    row = s.epochs, s.lr, s.batch_size, s.warmup, s.weight_decay, s.eps, s.length, s.layer_decay
    assert (*row, s.aggregate) == RECIPES[recipe, task, d_model]
    args = finetune_args("--recipe", recipe, "--length", 300, "--lr", 1, 2, "--epochs", 7)
    s = finetune.settings(args, task, cfg)
    assert (s.length, list(s.lr), s.epochs) == (300, [1, 2], 7)


def test_finetuning_schedule():
    """Linear warm-up, given in steps or as a share, of at most a third; then linear decay."""

    def of(warmup):
        steps = finetune.warmup_steps(warmup, 10)
        return [round(finetune.schedule(step, 10, steps), 4) for step in range(10)]

    assert of(2) == of(0.2) == [0.5, 1, 1, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125]
    assert of(0) == [1, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1]
    assert of(20) == of(3)


@pytest.mark.parametrize("pe", ["tupe_r", "rel_k", "deberta", "abs"])
@pytest.mark.parametrize("norm", ["post", "pre"])
def test_layer_wise_decay_and_weight_decay(pe, norm):
    """The learning rate decreases from the head to the embeddings; vectors have no weight decay."""
    model = tiny_classifier("mnli", pe, norm=norm)
    groups = finetune.param_groups(model, 1.0, 0.5, 0.01)
    found = {id(p): (g["peak_lr"], g["weight_decay"]) for g in groups for p in g["params"]}
    assert sum(len(g["params"]) for g in groups) == len(found) == len(list(model.parameters()))
    for name, p in model.named_parameters():
        peak = 0.25 if ".0." in name else 0.5 if ".1." in name else 0.125
        peak = 0.5 if "final_norm" in name else peak
        peak = 1.0 if name.startswith("head") or ".layers.2." in name else peak
        assert found[id(p)] == (peak, 0.01 if p.dim() >= 2 else 0.0), name
    assert {g["peak_lr"] for g in finetune.param_groups(model, 2.0, 1.0, 0)} == {2.0}


def plain_finetuning(model, train, texts, lr, seed, dtype):
    """Two epochs of electra's recipe in batches of 8, written from its table -> the predictions for
    the texts. It draws the same random numbers for dropout. With fp16, the second step's loss is
    infinite, so that it is skipped."""
    task, n_layer, groups = finetune.TASKS[model.name], len(model.encoder.blocks), []
    for name, p in model.named_parameters():
        layer = re.match(r"encoder\.blocks\.(\d)", name)
        below_head = n_layer - int(layer[1]) if layer else 0 if "head" in name else n_layer + 1
        groups.append({"params": [p], "peak": lr * 0.8**below_head})
    adam, parameters = torch.optim.AdamW(groups, eps=1e-6, weight_decay=0), [*model.parameters()]
    cfg, dense, linear = model.encoder.config, model.head[1], model.head[-1]

    def output(rows, p):
        """Rows of ids -> (B, n_classes), with dropout p in the head."""
        n = max(map(len, rows))
        tokens = torch.tensor([row + [cfg.pad_id] * (n - len(row)) for row in rows])
        with autocast(CPU, dtype):
            hidden = model.encoder(tokens, pad=tokens == cfg.pad_id)[:, 0].float()
        return linear(F.dropout(torch.tanh(dense(F.dropout(hidden, p, p > 0))), p, p > 0))

    def ids(texts):
        parts = [[*model.encoder.tokenizer.encode_ordinary(text), cfg.sep_id] for text in texts]
        return [cfg.cls_id, *itertools.chain(*parts)]

    torch.manual_seed(seed)
    rng, rows = np.random.default_rng(seed), [(ids(texts), y) for texts, y in train]
    batches = [batch for _ in range(2) for batch in finetune.batches_by_length(rows, 8, rng)]
    scale = 65536 if dtype == torch.float16 else 1
    for step, batch in enumerate(batches):
        out, labels = output([rows[i][0] for i in batch], 0.1), [rows[i][1] for i in batch]
        if task.kind == "score":
            loss = ((out[:, 0] - torch.tensor(labels)) ** 2).mean()
        else:
            loss = -out.log_softmax(1)[range(len(batch)), labels].mean()
        infinite = math.inf if step == 1 and dtype == torch.float16 else 1
        (loss * infinite * scale).backward()
        for p in parameters:
            p.grad /= scale
        norm = sum(p.grad.square().sum() for p in parameters) ** 0.5
        for group, p in zip(adam.param_groups, parameters):
            p.grad /= max(1, norm)
            rise, fall = (step + 1) / (0.1 * len(batches)), (len(batches) - step) / len(batches)
            group["lr"] = group["peak"] * min(rise, fall / 0.9, 1)
        if norm.isfinite():
            adam.step()
        else:
            scale /= 2
        adam.zero_grad()
    model.eval()
    with torch.no_grad():
        outs = [output([ids(t)], 0)[0] for t in texts]
    return [float(out) if task.kind == "score" else int(out.argmax()) for out in outs]


def write_task(folder, task, sizes):
    """Write official files of random rows; sizes: {file: rows} -> {file: [(texts, label)]}."""
    spec, rng, files = finetune.TASKS[task], random.Random(0), {}
    (folder / spec.folder).mkdir()
    for file, n in sizes.items():
        files[file] = []
        lines = [] if task == "cola" else [f"sentence1\tsentence2\t{spec.label}"]
        for _ in range(n):
            texts = [" ".join(rng.choices(WORDS, k=rng.randrange(1, 8))) for _ in spec.texts]
            y = rng.randrange(len(spec.classes)) if spec.classes else rng.uniform(0, 5)
            written = spec.classes[y] if spec.classes else y
            cells = ["x", written, "", *texts] if task == "cola" else [*texts, written]
            lines.append("\t".join(map(str, cells)))
            files[file].append((texts, y))
        (folder / spec.folder / f"{file}.tsv").write_text("\n".join(lines))
    return files


@pytest.mark.parametrize("case", ["cola float16", "stsb float32", "mnli float32"])
def test_finetuning_from_files_to_scores(corpus, tmp_path, monkeypatch, capsys, case):
    """From official files to results.jsonl, the table and the saved model, every learning rate and
    seed gives what the loop above gives: learning rates by layer, dropout in training only, skipped
    steps in fp16. Each dev file is scored, and the learning rate with the best median counts."""
    task, dtype = case.split()
    dev = {"dev_matched": 15, "dev_mismatched": 13} if task == "mnli" else {"dev": 15}
    train, *dev = write_task(tmp_path, task, {"train": 28, **dev}).values()
    encoder = tiny("t5", vocab_size=8192, max_len=32, dropout=0.1, attn_dropout=0.1).float()
    encoder.tok.weight.data[encoder.config.cls_id] = 0  # this and larger heads: the text decides
    monkeypatch.setattr(finetune, "linear", torch.nn.Linear)
    if dtype == "float16":  # the second of 8 steps overflows
        loss, count = finetune.Classifier.loss, itertools.count()
        infinite = lambda *args: loss(*args) * (math.inf if next(count) % 8 == 1 else 1)  # noqa: E731
        monkeypatch.setattr(finetune.Classifier, "loss", infinite)
    start = {"config": vars(encoder.config), "step": 3, "data": {}}
    start["tokenizer"] = bpe.encoding_arguments(corpus.tokenizer)
    start["model"] = {f"encoder.{key}": value for key, value in encoder.state_dict().items()}
    torch.save(start, tmp_path / "ckpt.pt")
    flags = f"--task {task} --data_dir {tmp_path} --ckpt {tmp_path}/ckpt.pt --device cpu --dtype "
    flags += f"{dtype} --lr 0.001 0.004 --seeds 2 --epochs 2 --batch_size 8"
    finetune.main(flags.split())

    train = [train[i] for i in np.random.default_rng(0).permutation(len(train))]
    rows, best = iter(read_jsonl(tmp_path / "results.jsonl")), (-2, None)
    scores = defaultdict(list)  # of the first metric
    for lr, seed in itertools.product((0.001, 0.004), range(2)):
        model = finetune.new_classifier(start, "", task, 32, seed)
        texts = [texts for file in dev for texts, _ in file]
        outs = plain_finetuning(model, train, texts, lr, seed, getattr(torch, dtype))
        for name, file in zip((task, f"{task}-mm"), dev):
            row, y, p = next(rows), [y for _, y in file], np.array(outs[: len(file)])
            del outs[: len(file)]
            assert (row["task"], row["lr"], row["seed"], row["step"]) == (name, lr, seed, 3)
            r = np.corrcoef(y, p)[0, 1] if len(set(p)) > 1 else 0.0
            expected = {"pearson": r} if task == "stsb" else {"accuracy": np.mean(y == p)}
            expected |= {"matthews": r} if task == "cola" else {}
            found = {key: row["metrics"][key] for key in expected}
            assert found == pytest.approx(expected, abs=1e-4)
            scores[name, lr].append(next(iter(row["metrics"].values())))
            if name == task and scores[name, lr][-1] > best[0]:
                best = scores[name, lr][-1], model
    assert next(rows, None) is None
    saved = weights(tmp_path, f"finetuned-{task}.pt")
    assert saved["task"] == task
    close(saved["model"], best[1].state_dict(), 1e-3 if dtype == "float16" else 2e-4)
    table = capsys.readouterr().out.rpartition("metric ")[2]
    for name in dict.fromkeys(name for name, _ in scores):
        median, lr = max((np.median(scores[name, lr]), -lr) for lr in (0.001, 0.004))
        assert re.search(rf"^{name} +\w+ +{median:.3f} .* {-lr} +2 ", table, re.MULTILINE)
