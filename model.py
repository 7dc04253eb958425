"""A BERT-style text encoder whose positional scheme is one flag.

    from model import load
    encoder = load("out/docs-demo-tupe_r-pplm-s1337")     # a run folder or a checkpoint file
    hidden = encoder(tokens)                              # (B, L) token ids -> (B, L, C)

Letters: B batch, L length, C width (d_model), H heads, D = C/H, T = max_len + 1 (row max_len of a table is
the unknown, hidden position). Offsets are r_ij = pos_j - pos_i, key minus query. P1 is the TUPE paper,
P3 "On Position Embeddings in BERT", P0 "Relative position prediction as pre-training".

An attention logit is    s_ij = q_i . k_j / sqrt(scale_terms * D) + bias_ij.
A scheme is a sum of components, and a component uses one or more of four hooks, nothing else:

name (--pe)         from            hooks      what it adds
none                P3              -          nothing: a bag of words
abs, bert_a         P1 eq 3, P3     embed      x_i + p_i, a learned table
sin                 Vaswani 2017    embed      x_i + [sin w_k i, cos w_k i], w_k = 10000^(-2k/C)
lsin                P3              embed      the same with w learned
rel                 Shaw 2018, P3   relative   q_i . (k_j + a_r)/sqrt(D); output sum_j A_ij (v_j + a_r)
rel_k               P1 eq 4         relative   the key term alone, a table per layer
rsin, rlsin         NEZHA, P3       relative   rel with a = sinusoids of the signed offset, w fixed or learned
t5                  P1 eq 5         bias       b_bucket(r) per head, shared by all layers
abs+t5, bert_r      P1 eq 5         embed bias
bert_ad             P1 sec 4.3      edit_qk    (q_i + p_i U_Q) . (k_j + p_j U_K) / sqrt(4D)
tupe_a              P1 eq 10        bias       content/sqrt(2D) + reset(p_i U_Q . p_j U_K / sqrt(2D))
tupe_r              P1 eq 11        bias       content/sqrt(2D) + reset(p_i U_Q . p_j U_K / sqrt(2D) + t5)
tupe_a_tie_cls, tupe_r_tie_cls  P1 4.3  bias   without the reset of [CLS] (P1 has the first)
t5_untie_cls        P1 sec 3.2      bias       reset(t5)
bert_r_untie_cls    P1 sec 3.2      embed bias abs + reset(t5)
tupe_a_free         P1 sec 5        bias       reset(a free table M_h[i, j]) (a failed attempt)
tupe_r_factored     P1 sec 5        bias       tupe_r with b_r = r_r F_Q . r_r F_K (a failed attempt)
rope                Su 2021         edit_qk    q, k rotated by position
alibi               Press 2021      bias       -slope_h |r|

and the sums of P3: abs+rel, abs+rsin, abs+rlsin, lsin+rel, lsin+rsin, lsin+rlsin. Any other sum in which
no two parts want the same hook works too: rope+t5, abs+alibi, sin+rel_k.
"""

import math
import os
from dataclasses import asdict, dataclass
from functools import partial

import tiktoken
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

UNKNOWN_POS = -1      # a hidden position (objective pmlm)
N_SPECIALS = 8        # [CLS] [PAD] [SEP] [MASK] and four spare ones are the last ids of every vocabulary
MAX_OFFSET = 64       # rel, rel_k, rsin, rlsin, tupe_r_factored: offsets are clipped to +-64 (P3)
T5_BUCKETS, T5_MAX_DISTANCE = 32, 128


# ---------------------------------------------------------------------------------------------------------
# Configuration

@dataclass
class EncoderConfig:
    """The one home of every default of the architecture. Raises ValueError on a shape that cannot be built."""
    vocab_size: int = 50265         # with the 8 specials
    n_layer: int = 4
    n_head: int = 4
    d_model: int = 128
    d_ff: int = 512
    max_len: int = 64               # rows of the absolute position tables
    dropout: float = 0.1
    attn_dropout: float = 0.1
    pe: str = "abs"                 # positional scheme: a name of PE_NAMES or a sum of components
    norm_eps: float = 1e-5

    def __post_init__(self):
        for name in ("n_layer", "n_head", "d_model", "d_ff", "max_len"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.d_model % self.n_head:
            raise ValueError(f"d_model {self.d_model} does not divide by n_head {self.n_head}")
        for name in ("dropout", "attn_dropout"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be in [0, 1)")
        parts = parse_pe(self.pe)
        if {"sin", "lsin"} & set(parts) and self.d_model % 2:
            raise ValueError(f"pe {self.pe} pairs sines with cosines: d_model must be even, not {self.d_model}")
        if {"rope", "rsin", "rlsin"} & set(parts) and self.d_head % 2:
            raise ValueError(f"pe {self.pe} works on pairs: d_model / n_head must be even, not {self.d_head}")

    @property
    def d_head(self):
        return self.d_model // self.n_head

    # The specials stand at the same distance from the end whatever the tokenizer.
    cls_id = property(lambda self: self.vocab_size - 8)
    pad_id = property(lambda self: self.vocab_size - 7)
    sep_id = property(lambda self: self.vocab_size - 6)
    mask_id = property(lambda self: self.vocab_size - 5)


# ---------------------------------------------------------------------------------------------------------
# Positions

def offsets(pos: Tensor) -> Tensor:
    """(B, L) positions -> (B, L, L) offsets r_ij = pos_j - pos_i. P3 writes i - j: a relabelling (departure)."""
    return pos[:, None, :] - pos[:, :, None]


def hidden_pairs(pos: Tensor) -> Tensor:
    """(B, L) -> (B, L, L) bool: i != j and at least one end hidden. i = j is by index, so it keeps offset 0."""
    hidden = pos == UNKNOWN_POS
    diagonal = torch.eye(pos.size(1), dtype=torch.bool, device=pos.device)
    return (hidden[:, None, :] | hidden[:, :, None]) & ~diagonal


def table_index(pos: Tensor, max_len: int) -> Tensor:
    """Row of an absolute table for each position; the unknown is row max_len. Raises (ValueError) on rows longer than the
    table; the values of pos, which must be below max_len, are not looked at: on a GPU that would wait for it."""
    if pos.size(1) > max_len:
        raise ValueError(f"a row of {pos.size(1)} tokens, but the position table ends at {max_len} "
                         "(sin, lsin, t5, rel, rope and alibi go on beyond it)")
    return torch.where(pos == UNKNOWN_POS, max_len, pos)


def offset_index(pos: Tensor) -> Tensor:
    """Row of a clipped offset table for each pair (B, L, L); the unknown is the last row."""
    clipped = offsets(pos).clamp(-MAX_OFFSET, MAX_OFFSET) + MAX_OFFSET
    return torch.where(hidden_pairs(pos), 2 * MAX_OFFSET + 1, clipped)


def t5_bucket(r: Tensor) -> Tensor:
    """T5's bidirectional buckets of the offset r = key - query: exact below 8, then logarithmic up to 128."""
    half = T5_BUCKETS // 2
    exact = half // 2
    distance = r.abs()
    log_ratio = torch.log(distance.clamp(min=1).float() / exact) / math.log(T5_MAX_DISTANCE / exact)
    far = (exact + (log_ratio * (half - exact)).long()).clamp(max=half - 1)
    return torch.where(distance < exact, distance, far) + half * (r > 0)


def frequencies(width: int) -> Tensor:
    """w_k = 10000^(-2k/width), k = 0 .. width/2 - 1 (Vaswani 2017, sec 3.5)."""
    return 10000.0 ** (-torch.arange(0, width, 2).double() / width).to(torch.get_default_dtype())


def sinusoids(x: Tensor, w: Tensor) -> Tensor:
    """(...) positions or offsets, (width/2,) frequencies -> (..., width), sines and cosines interleaved."""
    angles = x[..., None].to(w.dtype) * w
    return torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(-2)


def split_heads(x: Tensor, n_head: int) -> Tensor:
    B, L, C = x.shape
    return x.view(B, L, n_head, C // n_head).transpose(1, 2)        # (B, L, C) -> (B, H, L, D)


def normal(*shape) -> nn.Parameter:
    return nn.Parameter(0.02 * torch.randn(*shape))


class XavierLinear(nn.Linear):
    """A linear layer that init_weights starts Xavier-uniform: U_Q, U_K, F_Q, F_K and the pair head.

    With N(0, 0.02) their product of two small numbers starts so near 0 that learning is late (departure).
    """


# ---------------------------------------------------------------------------------------------------------
# Components: each overrides some of four hooks. `pos` is always (1 or B, L) int64.

class Component(nn.Module):
    scale_terms = 1         # content logits are divided by sqrt(scale_terms * D)
    scale_tokens = False    # multiply token embeddings by sqrt(C)
    hidden_ok = True        # can it express an unknown position?
    alone = False           # must it stand alone, outside any sum?

    def __init__(self, cfg: EncoderConfig):
        super().__init__()

    def embed(self, pos):
        """-> (1 or B, L, C), added to the token embedding."""

    def bias(self, pos):
        """-> (1 or B, H, L, L) content-free logits, computed once a forward and shared by all layers."""

    def edit_qk(self, q, k, pos):
        """q, k (B, H, L, D) -> the same, edited, in every layer."""

    def relative(self, pos, layer):
        """-> index (1 or B, L, L) of each pair's row, key table (R, D), value table (R, D) or None."""


HOOKS = ("embed", "bias", "edit_qk", "relative")


class NoPositions(Component):
    alone = True


class Absolute(Component):
    """A learned vector per position, added to the input (P1 eq 3)."""
    def __init__(self, cfg):
        super().__init__(cfg)
        self.table = nn.Embedding(cfg.max_len + 1, cfg.d_model)

    def embed(self, pos):
        return self.table(table_index(pos, self.table.num_embeddings - 1))


class Sinusoidal(Component):
    """Sines and cosines of the position, at fixed or learned frequencies.

    Token embeddings are scaled by sqrt(C) (departure: unit sinusoids would drown N(0, .02) tokens 35 to 1).
    """
    scale_tokens = True

    def __init__(self, cfg, learned=False):
        super().__init__(cfg)
        self.unknown = normal(cfg.d_model)
        w = frequencies(cfg.d_model)
        self.w = nn.Parameter(w) if learned else nn.Buffer(w)

    def embed(self, pos):
        return torch.where((pos == UNKNOWN_POS)[..., None], self.unknown, sinusoids(pos, self.w))


class Relative(Component):
    """One learned table of offsets for keys and values, shared by heads and layers (Shaw 2018, P3)."""
    def __init__(self, cfg):
        super().__init__(cfg)
        self.table = nn.Embedding(2 * MAX_OFFSET + 2, cfg.d_head)

    def relative(self, pos, layer):
        return offset_index(pos), self.table.weight, self.table.weight


class RelativeKeys(Component):
    """Key side only, a table a layer (P1 eq 4). The pair head brings its own table as `layer`."""
    def __init__(self, cfg):
        super().__init__(cfg)
        self.tables = nn.ModuleList(nn.Embedding(2 * MAX_OFFSET + 2, cfg.d_head) for _ in range(cfg.n_layer))

    def relative(self, pos, layer):
        table = self.tables[layer] if isinstance(layer, int) else layer
        return offset_index(pos), table.weight, None


class RelativeSinusoidal(Component):
    """rel with sinusoids of the signed offset for its table (NEZHA takes the shifted index: departure)."""
    def __init__(self, cfg, learned=False):
        super().__init__(cfg)
        self.unknown = normal(1, cfg.d_head)
        w = frequencies(cfg.d_head)
        self.w = nn.Parameter(w) if learned else nn.Buffer(w)

    def relative(self, pos, layer):
        known = sinusoids(torch.arange(-MAX_OFFSET, MAX_OFFSET + 1, device=pos.device), self.w)
        table = torch.cat((known, self.unknown))                    # (2*64 + 2, D)
        return offset_index(pos), table, table


class T5Bias(Component):
    """A learned scalar per head and bucket of the offset (P1 eq 5), not scaled."""
    def __init__(self, cfg):
        super().__init__(cfg)
        self.table = nn.Embedding(T5_BUCKETS + 1, cfg.n_head)

    def bias(self, pos):
        bucket = torch.where(hidden_pairs(pos), T5_BUCKETS, t5_bucket(offsets(pos)))
        return self.table(bucket).permute(0, 3, 1, 2)               # (B, L, L, H) -> (B, H, L, L)


class FactoredBias(Component):
    """b_r = (r_r F_Q) . (r_r F_K) per head (P1 sec 5, a failed attempt)."""
    def __init__(self, cfg):
        super().__init__(cfg)
        self.n_head = cfg.n_head
        self.table = nn.Embedding(2 * MAX_OFFSET + 2, cfg.d_model)
        self.f_q = XavierLinear(cfg.d_model, cfg.d_model, bias=False)
        self.f_k = XavierLinear(cfg.d_model, cfg.d_model, bias=False)

    def bias(self, pos):
        r = self.table.weight
        b = (self.f_q(r) * self.f_k(r)).view(len(r), self.n_head, -1).sum(-1)       # (R, H)
        return F.embedding(offset_index(pos), b).permute(0, 3, 1, 2)                # (B, H, L, L)


class Alibi(Component):
    """-slope_h |r|: the symmetric form for encoders, with the published slopes for any H (Press 2021)."""
    def __init__(self, cfg):
        super().__init__(cfg)
        self.unknown = normal(cfg.n_head, 1, 1)
        self.slopes = nn.Buffer(torch.tensor(self.published_slopes(cfg.n_head)).view(-1, 1, 1))

    @staticmethod
    def published_slopes(n_head):
        powers = lambda n: [2 ** (-8 * (h + 1) / n) for h in range(n)]      # noqa: E731
        n = 2 ** int(math.log2(n_head))         # not a power of two: every other slope of the next one fills up
        return powers(n) + powers(2 * n)[0::2][:n_head - n]

    def bias(self, pos):
        distance = offsets(pos).abs()[:, None].to(self.slopes.dtype)                # (B, 1, L, L)
        return torch.where(hidden_pairs(pos)[:, None], self.unknown, -self.slopes * distance)


class Rotary(Component):
    """q and k rotated by their position, pairs interleaved, base 10000 (Su 2021): q_i . k_j depends on j - i."""
    hidden_ok = False       # there is no rotation that stands for "unknown"

    def __init__(self, cfg):
        super().__init__(cfg)
        self.w = nn.Buffer(frequencies(cfg.d_head))

    def edit_qk(self, q, k, pos):
        angles = (pos[..., None].to(self.w.dtype) * self.w)[:, None]                # (B, 1, L, D/2)
        cos, sin = angles.cos().to(q.dtype), angles.sin().to(q.dtype)
        return self.rotate(q, cos, sin), self.rotate(k, cos, sin)

    @staticmethod
    def rotate(x, cos, sin):
        even, odd = x[..., 0::2], x[..., 1::2]
        return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)


class UntiedTable(nn.Module):
    """What TUPE and bert_ad share: a position table p, its LayerNorm, and its own projections U_Q and U_K.

    Shared by all layers, so TUPE costs 2*C*C parameters and little else (P1 sec 3.3).
    """
    def __init__(self, cfg, extra_rows=0):
        super().__init__()
        self.n_head, self.max_len = cfg.n_head, cfg.max_len
        self.table = nn.Embedding(cfg.max_len + 1 + extra_rows, cfg.d_model)    # positions, the unknown, theta_1, theta_2
        self.norm = nn.LayerNorm(cfg.d_model, eps=cfg.norm_eps)
        self.u_q = XavierLinear(cfg.d_model, cfg.d_model, bias=False)
        self.u_k = XavierLinear(cfg.d_model, cfg.d_model, bias=False)

    def project(self):
        p = self.norm(self.table.weight)
        return self.u_q(p), self.u_k(p)                                             # (rows, C) each

    def pick(self, rows, pos):
        """Projected rows (rows, C) at positions (B, L) -> (B, H, L, D)."""
        return split_heads(F.embedding(table_index(pos, self.max_len), rows), self.n_head)


def reset_cls(v: Tensor, theta: Tensor) -> Tensor:
    """P1 eq 9. v (B, H, L, L), theta (2, H): row [CLS] becomes theta_1, the rest of column [CLS] theta_2.

    theta_1 fills a whole row, so softmax cancels it and it never gets a gradient: kept for the figures.
    """
    first = torch.arange(v.size(-1), device=v.device) == 0                          # [CLS] is index 0
    v = torch.where(first, theta[1].view(-1, 1, 1), v)                              # the column first,
    return torch.where(first[:, None], theta[0].view(-1, 1, 1), v)                  # then the row, (0, 0) included


class Tupe(Component):
    """TUPE (P1 eq 10, 11): words and positions have their own correlation, summed; [CLS] is untied.

        s_ij = q_i . k_j / sqrt(2D) + reset(p_i U_Q . p_j U_K / sqrt(2D) + b_r)

    The reset replaces the whole positional term, T5's part included (the released code resets the two parts
    apart: departure). theta_1 and theta_2 are built like the positional term, from two more rows of p.
    """
    alone, scale_terms = True, 2

    def __init__(self, cfg, relative=None, reset=True):
        super().__init__(cfg)
        self.positions = UntiedTable(cfg, extra_rows=2 if reset else 0)
        self.offsets = relative(cfg) if relative else None
        self.scale = (self.scale_terms * cfg.d_head) ** -0.5
        self.reset = reset

    def bias(self, pos):
        p_q, p_k = self.positions.project()
        q, k = self.positions.pick(p_q, pos), self.positions.pick(p_k, pos)         # (B, H, L, D)
        v = q @ k.transpose(-1, -2) * self.scale                                    # (B, H, L, L)
        if self.offsets is not None:
            v = v + self.offsets.bias(pos)
        if not self.reset:
            return v
        theta = (p_q[-2:] * p_k[-2:]).view(2, q.size(1), -1).sum(-1) * self.scale   # (2, H)
        return reset_cls(v, theta)


class TupeFree(Component):
    """TUPE-A with a free table in place of p_i U_Q . p_j U_K (P1 sec 5, a failed attempt)."""
    alone, scale_terms = True, 2

    def __init__(self, cfg):
        super().__init__(cfg)
        self.table = normal(cfg.n_head, cfg.max_len + 1, cfg.max_len + 1)
        self.theta = normal(2, cfg.n_head)

    def bias(self, pos):
        H, T, _ = self.table.shape
        row = table_index(pos, T - 1)
        cell = row[:, :, None] * T + row[:, None, :]                                # (B, L, L)
        v = F.embedding(cell, self.table.view(H, T * T).t()).permute(0, 3, 1, 2)    # (B, H, L, L)
        return reset_cls(v, self.theta)


class T5UntieCls(Component):
    """T5's bias with [CLS] untied (P1 sec 3.2: "can be widely applied"); theta are free scalars per head."""
    alone = True

    def __init__(self, cfg):
        super().__init__(cfg)
        self.offsets = T5Bias(cfg)
        self.theta = normal(2, cfg.n_head)

    def bias(self, pos):
        return reset_cls(self.offsets.bias(pos), self.theta)


class BertAD(Component):
    """BERT-A^d (P1 sec 4.3): all four word and position terms, with projections of the positions' own."""
    alone, scale_terms = True, 4

    def __init__(self, cfg):
        super().__init__(cfg)
        self.positions = UntiedTable(cfg)

    def edit_qk(self, q, k, pos):
        p_q, p_k = self.positions.project()
        return q + self.positions.pick(p_q, pos), k + self.positions.pick(p_k, pos)


COMPONENTS = {
    "none": NoPositions,
    "abs": Absolute,
    "sin": Sinusoidal,
    "lsin": partial(Sinusoidal, learned=True),
    "rel": Relative,
    "rel_k": RelativeKeys,
    "rsin": RelativeSinusoidal,
    "rlsin": partial(RelativeSinusoidal, learned=True),
    "t5": T5Bias,
    "bert_ad": BertAD,
    "tupe_a": Tupe,
    "tupe_r": partial(Tupe, relative=T5Bias),
    "tupe_a_tie_cls": partial(Tupe, reset=False),
    "tupe_r_tie_cls": partial(Tupe, relative=T5Bias, reset=False),
    "t5_untie_cls": T5UntieCls,
    "tupe_a_free": TupeFree,
    "tupe_r_factored": partial(Tupe, relative=FactoredBias),
    "rope": Rotary,
    "alibi": Alibi,
}
ALIASES = {"bert_a": "abs", "bert_r": "abs+t5", "bert_r_untie_cls": "abs+t5_untie_cls"}
PE_NAMES = ["none", "abs", "bert_a", "sin", "lsin", "rel", "rel_k", "rsin", "rlsin", "abs+rel", "abs+rsin",
            "abs+rlsin", "lsin+rel", "lsin+rsin", "lsin+rlsin", "t5", "abs+t5", "bert_r", "bert_ad", "tupe_a",
            "tupe_r", "tupe_a_tie_cls", "tupe_r_tie_cls", "t5_untie_cls", "bert_r_untie_cls", "tupe_a_free",
            "tupe_r_factored", "rope", "alibi"]


def component_class(name):
    return getattr(COMPONENTS[name], "func", COMPONENTS[name])      # looks through partial()


def used_hooks(cls):
    return [hook for hook in HOOKS if getattr(cls, hook) is not getattr(Component, hook)]


def parse_pe(pe: str) -> list[str]:
    """'abs+t5' -> ['abs', 't5']. Raises ValueError, with the reason, on an unknown name or an illegal sum."""
    parts = [part for name in pe.split("+") for part in ALIASES.get(name, name).split("+")]
    for part in parts:
        if part not in COMPONENTS:
            raise ValueError(f"unknown pe {part!r}; choose from {', '.join(PE_NAMES)}, or a sum such as rope+t5")
    if len(parts) > 1 and pe not in ALIASES:
        for part in parts:
            if component_class(part).alone:
                raise ValueError(f"pe {pe}: {part} stands alone, it cannot be part of a sum")
        owner = {}
        for part in parts:
            for hook in used_hooks(component_class(part)):
                if hook in owner:
                    raise ValueError(f"pe {pe}: {owner[hook]} and {part} both use the hook {hook!r}; "
                                     "a sum may use each hook once")
                owner[hook] = part
    return parts


class PositionalScheme(nn.Module):
    """The sum of a scheme's components, and the attention that uses them."""

    def __init__(self, cfg: EncoderConfig):
        super().__init__()
        self.parts = nn.ModuleDict({name: COMPONENTS[name](cfg) for name in parse_pe(cfg.pe)})
        self.scale = (max(p.scale_terms for p in self.parts.values()) * cfg.d_head) ** -0.5
        self.token_scale = cfg.d_model ** 0.5 if any(p.scale_tokens for p in self.parts.values()) else 1.0
        self.hidden_ok = all(p.hidden_ok for p in self.parts.values())
        self.in_logits = any(set(used_hooks(type(p))) - {"embed"} for p in self.parts.values())    # or at the input alone?

    def call(self, hook, *args):
        """The hook of the one part that has it, else None."""
        for part in self.parts.values():
            if hook in used_hooks(type(part)):
                return getattr(part, hook)(*args)
        return None

    def pair_table(self):
        """A table for the pair head (objectives.py), where the scheme has one a layer: rel_k. Else None."""
        table = self.parts["rel_k"].tables[0] if "rel_k" in self.parts else None
        return table and nn.Embedding(*table.weight.shape)

    def mask(self, pos, pad, causal, dtype):
        """Everything that is added to the logits and is the same in every layer: (1 or B, 1 or H, L, L), or None."""
        bias = self.call("bias", pos)
        masked = None
        if pad is not None:
            masked = pad[:, None, None, :]                                          # (B, 1, 1, L)
        if causal:                                                                  # by index, not by position
            L = pos.size(1)
            future = torch.ones(L, L, dtype=torch.bool, device=pos.device).triu(1)
            masked = future if masked is None else masked | future
        if masked is not None:
            if bias is None:
                bias = torch.zeros((), dtype=dtype, device=pos.device).expand(pos.size(1), pos.size(1))
            bias = bias.masked_fill(masked, float("-inf"))
        return None if bias is None else bias.to(dtype).contiguous()

    def relative(self, pos, layer, in_order=False):
        """Of the part with vectors for offsets -> Pairs, key table (R, D), value table (R, D) or None; else None."""
        found = self.call("relative", pos, layer)
        if found is None:
            return None
        index, keys, values = found
        pairs = (PairsInOrder if in_order else Pairs)(index)
        return pairs, pairs.rows(keys), None if values is None else pairs.rows(values)

    def terms(self, q, k, pos, relative, mask):
        """-> q, k edited and q scaled, so that the logits are q k^T + the third value (or None)."""
        q, k = self.call("edit_qk", q, k, pos) or (q, k)
        q = q * self.scale
        if relative is not None:
            # q_i . a_r for all R rows, then each pair picks its row: never an (L, L, D) tensor.
            pairs, key_table, _ = relative
            term = pairs.pick(q @ key_table.to(q.dtype).t())                        # (B, H, L, R) -> (B, H, L, L)
            mask = term if mask is None else term + mask
        return q, k, mask

    def logits(self, q, k, pos, relative, mask):
        q, k, mask = self.terms(q, k, pos, relative, mask)
        scores = q @ k.transpose(-1, -2)                                            # (B, H, L, L)
        return scores if mask is None else scores + mask

    def attend(self, q, k, v, pos, layer, mask, dropout, in_order=False):
        """Softmax attention -> (B, H, L, D)."""
        relative = self.relative(pos, layer, in_order)
        pairs, _, value_table = relative or (None, None, None)
        if q.is_cuda and value_table is None:
            return self.fused(q, k, v, pos, relative, mask, dropout)
        # On a CPU a plain softmax beats the library call: 212 against 323 ms, forward and backward with dropout and a bias,
        # at B 64, H 16, L 128, D 16 in bf16 on 2 cores; 5.1 against 6.5 ms at the demo's sizes.
        A = drop(self.logits(q, k, pos, relative, mask).softmax(-1), dropout)       # (B, H, L, L)
        out = A @ v
        if value_table is not None:
            # sum_j A_ij a_r(ij): first the weight that each row i gives to each offset, then one product.
            out = out + pairs.add_up(A, len(value_table)) @ value_table.to(A.dtype)     # (B, H, L, R) @ (R, D)
        return out

    def fused(self, q, k, v, pos, relative, mask, dropout):
        """attend by the library's kernel, for schemes that leave the values alone."""
        q, k, mask = self.terms(q, k, pos, relative, mask)
        mask = None if mask is None else mask.contiguous()          # the kernel wants aligned rows, not PairsInOrder's view
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, scale=1.0)


def drop(x: Tensor, p: float, training=True) -> Tensor:
    """F.dropout. On a CPU 16 random bits decide about a number, four from one draw: F.dropout takes one draw each, which is
    a quarter of a step (`paper`, batch 16, bf16, one core: 0.75 of the time). p is rounded to 1/65536."""
    if not (training and p > 0 and x.device.type == "cpu") or torch.compiler.is_compiling():
        return F.dropout(x, p, training)
    n, cut = x.numel(), min(round(65536 * p), 65535)
    bits = torch.empty(-(-n // 4), dtype=torch.int64).random_(-2 ** 63, None).view(torch.int16)[:n].view(x.shape)
    return x * bits.ge_(cut - 32768).to(x.dtype).mul_(65536 / (65536 - cut))


class Dropout(nn.Dropout):
    def forward(self, x):
        return drop(x, self.p, self.training)


class Pairs:
    """Which row of a table of offsets belongs to which pair: index (1 or B, L, L)."""

    def __init__(self, index):
        self.index = index

    def rows(self, table):
        """The rows that pick and add_up count in: (R, D)."""
        return table

    def pick(self, x):
        """(B, H, L, R) -> (B, H, L, L): what each pair's row has."""
        return x.gather(-1, self.index[:, None].expand(x.size(0), x.size(1), -1, -1))

    def add_up(self, A, n_rows):
        """(B, H, L, L) -> (B, H, L, R): the sum over j of the pairs that share a row."""
        return A.new_zeros(*A.shape[:-1], n_rows).scatter_add(-1, self.index[:, None].expand_as(A), A)


class PairsInOrder(Pairs):
    """Positions 0 .. L-1: with a row for each offset -(L-1) .. L-1, the rows of (i, 0 .. L-1) stand side by side, one place
    further left for each i. So pick is a view with other strides, add_up its reverse: in half the time."""

    def rows(self, table):
        first = self.index[0]                                                       # (L, L)
        return F.embedding(torch.cat((first[1:, 0].flip(0), first[0])), table)      # (2L-1, D)

    @staticmethod
    def strides(x):
        """Size, strides and offset of the view (B, H, L, L) of a contiguous x (B, H, L, 2L-1)."""
        B, H, L, R = x.shape
        return (B, H, L, L), (H * L * R, L * R, R - 1, 1), L - 1

    def pick(self, x):
        return x.contiguous().as_strided(*self.strides(x))

    def add_up(self, A, n_rows):
        zeros = A.new_zeros(*A.shape[:-1], n_rows)
        return torch.as_strided_scatter(zeros, A, *self.strides(zeros))


# ---------------------------------------------------------------------------------------------------------
# The encoder

class Block(nn.Module):
    """Post-LN Transformer layer: attention, then feed-forward with exact GELU, each x = LN(x + f(x))."""

    def __init__(self, cfg: EncoderConfig, layer: int):
        super().__init__()
        self.layer, self.n_head, self.attn_dropout = layer, cfg.n_head, cfg.attn_dropout
        self.qkv = nn.Linear(cfg.d_model, 3 * cfg.d_model)
        self.out = nn.Linear(cfg.d_model, cfg.d_model)
        self.norm1 = nn.LayerNorm(cfg.d_model, eps=cfg.norm_eps)
        self.fc1 = nn.Linear(cfg.d_model, cfg.d_ff)
        self.fc2 = nn.Linear(cfg.d_ff, cfg.d_model)
        self.norm2 = nn.LayerNorm(cfg.d_model, eps=cfg.norm_eps)
        self.drop = Dropout(cfg.dropout)

    def heads(self, x):
        return [split_heads(y, self.n_head) for y in self.qkv(x).chunk(3, dim=-1)]  # 3 x (B, H, L, D)

    def forward(self, x, scheme, pos, mask, in_order):
        B, L, C = x.shape
        dropout = self.attn_dropout if self.training else 0.0
        y = scheme.attend(*self.heads(x), pos, self.layer, mask, dropout, in_order)     # (B, H, L, D)
        y = y.transpose(1, 2).reshape(B, L, C)
        x = self.norm1(x + self.drop(self.out(y)))
        return self.norm2(x + self.drop(self.fc2(F.gelu(self.fc1(x)))))


class Encoder(nn.Module):
    """Token embedding (+ input positions) -> LayerNorm -> dropout -> n_layer blocks. No segment embeddings."""

    def __init__(self, cfg: EncoderConfig):
        super().__init__()
        self.config = cfg
        self.tokenizer = None                               # load() puts the run's tiktoken.Encoding here
        padded = -(-cfg.vocab_size // 64) * 64              # a multiple of 64: matrix units like it
        self.tok = nn.Embedding(padded, cfg.d_model)
        self.pe = PositionalScheme(cfg)
        self.norm = nn.LayerNorm(cfg.d_model, eps=cfg.norm_eps)
        self.drop = Dropout(cfg.dropout)
        self.blocks = nn.ModuleList(Block(cfg, layer) for layer in range(cfg.n_layer))
        self.apply(init_weights)

    def forward(self, tokens, pos=None, pad=None, causal=False):
        """Token ids -> hidden states.

        tokens (B, L) int64, [CLS] at index 0; pos (L,) or (B, L) int64, None = arange(L), UNKNOWN_POS = hidden;
        pad (B, L) bool, True = padding. -> (B, L, C). Raises ValueError if a row is longer than a table of positions.
        """
        return self._run(tokens, pos, pad, causal, len(self.blocks))[0]

    def embed(self, tokens, pos):
        """The input of the first layer, before dropout: words, plus positions where the scheme adds them -> (B, L, C)."""
        x = self.tok(tokens) * self.pe.token_scale
        input_positions = self.pe.call("embed", pos)
        return self.norm(x if input_positions is None else x + input_positions)

    def _run(self, tokens, pos, pad, causal, n_blocks):
        in_order, pos = pos is None, self.positions(tokens, pos)
        x = self.drop(self.embed(tokens, pos))
        mask = self.pe.mask(pos, pad, causal, compute_dtype(x))
        for block in self.blocks[:n_blocks]:
            x = block(x, self.pe, pos, mask, in_order)
        return x, pos, mask

    @staticmethod
    def positions(tokens, pos=None):
        """-> (1 or B, L) int64."""
        if pos is None:
            pos = torch.arange(tokens.size(1), device=tokens.device)
        return pos if pos.dim() == 2 else pos[None]

    def logits(self, q, k, pos, layer):
        """Attention logits before the softmax, as an attention layer of this model has them.

        q, k (B, H, L, D); pos (1 or B, L); layer an index, or the pair head's own table -> (B, H, L, L).
        """
        return self.pe.logits(q, k, pos, self.pe.relative(pos, layer), self.pe.mask(pos, None, False, q.dtype))

    @torch.no_grad()
    def attention(self, tokens, layer=0, pos=None, pad=None):
        """Attention probabilities of one layer, dropout off: (B, L) token ids -> (B, H, L, L)."""
        was_training = self.training
        self.eval()
        x, pos, mask = self._run(tokens, pos, pad, False, layer)
        q, k, _ = self.blocks[layer].heads(x)
        self.train(was_training)
        return self.pe.logits(q, k, pos, self.pe.relative(pos, layer), mask).softmax(-1)


def compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype that matrix products have here: autocast's, else x's."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def init_weights(module: nn.Module):
    """The start of every weight.

    Linear, Embedding      N(0, 0.02), bias 0
    XavierLinear           Xavier-uniform, bias 0 (U_Q, U_K, F_Q, F_K, the pair head)
    LayerNorm              1 and 0
    bare parameters        where they are made: unknown positions, theta, free tables N(0, 0.02); w 10000^(-2k/C)
    """
    if isinstance(module, (nn.Linear, nn.Embedding)):
        if isinstance(module, XavierLinear):
            nn.init.xavier_uniform_(module.weight)
        else:
            nn.init.normal_(module.weight, std=0.02)
        if getattr(module, "bias", None) is not None:
            nn.init.zeros_(module.bias)


# ---------------------------------------------------------------------------------------------------------
# Checkpoints

def read_checkpoint(path) -> dict:
    """A run folder or a checkpoint file -> its dictionary, weights on the CPU. Raises ValueError, FileNotFoundError."""
    file = os.path.join(path, "ckpt.pt") if os.path.isdir(path) else str(path)
    if not os.path.exists(file):
        raise FileNotFoundError(f"no checkpoint at {file}")
    try:
        checkpoint = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:      # a truncated archive, a foreign file, code that weights_only refuses
        older = os.path.join(os.path.dirname(file), "ckpt_prev.pt")
        hint = f"; the one before it is {older}" if os.path.exists(older) and older != file else ""
        raise ValueError(f"{file} is not a readable checkpoint ({type(error).__name__}){hint}") from None
    if not isinstance(checkpoint, dict) or not {"config", "model", "tokenizer"} <= set(checkpoint):
        raise ValueError(f"{file} is not a checkpoint of this project (it has no config, model and tokenizer)")
    return checkpoint


def load(path, **override) -> Encoder:
    """A run folder or checkpoint file -> Encoder in eval mode, with `.config` and `.tokenizer`.

    `override` replaces fields of the configuration (dropout=0.0). Raises ValueError if the weights do not fit.
    """
    checkpoint = read_checkpoint(path)
    encoder = Encoder(EncoderConfig(**{**checkpoint["config"], **override}))
    encoder.tokenizer = tiktoken.Encoding(**checkpoint["tokenizer"])
    weights = {key.removeprefix("encoder."): value for key, value in checkpoint["model"].items()
               if key.startswith("encoder.")}
    load_strict(encoder, weights, path)
    return encoder.eval()


def load_strict(module, weights, path):
    """load_state_dict that says in one line which keys or shapes do not fit."""
    own = module.state_dict()
    missing, extra = sorted(own.keys() - weights.keys()), sorted(weights.keys() - own.keys())
    shapes = [f"{key} is {tuple(weights[key].shape)}, not {tuple(own[key].shape)}" for key in own
              if key in weights and weights[key].shape != own[key].shape]
    problems = [f"missing {', '.join(missing[:3])}"] * bool(missing) + [f"extra {', '.join(extra[:3])}"] * bool(extra)
    if problems + shapes:
        raise ValueError(f"{path} does not fit this model: {'; '.join(problems + shapes[:3])}")
    module.load_state_dict(weights)


def warm_start(module, checkpoint, path) -> dict:
    """Load what fits of a checkpoint's weights into a module whose scheme, heads or max_len may be others.

    Weights are matched by name, so those of another positional scheme start fresh (P3 swaps the scheme under a
    trained model). With a larger max_len the trained rows of tables are kept and the new ones start fresh (P3
    trains at 128, then at 512). -> {"loaded": [...], "grown": [...], "new": [...], "dropped": [...]}, names.
    Raises ValueError when the encoders differ in anything else.
    """
    given, own = checkpoint["model"], module.state_dict()
    old, new = checkpoint["config"], asdict(module.encoder.config)
    free = {"pe", "max_len", "dropout", "attn_dropout"}
    if different := [f"{key} is {old[key]} there and {new[key]} here" for key in new.keys() - free if old[key] != new[key]]:
        raise ValueError(f"{path}: {', '.join(sorted(different))}; only the positional scheme, the objective and a larger "
                         "--block_size may differ")
    old_len, new_len = old["max_len"], new["max_len"]
    if new_len < old_len:
        raise ValueError(f"{path} has rows of {old_len}; --block_size {new_len} would cut them: take at least {old_len}")
    done = {"loaded": [], "grown": [], "new": [], "dropped": sorted(given.keys() - own.keys())}
    more = new_len - old_len
    for key, fresh in own.items():
        if key in given and given[key].shape == fresh.shape:
            fresh.copy_(given[key])
            done["loaded"].append(key)
        elif key in given and more and all(n - o in (0, more, 2 * more) for o, n in zip(given[key].shape, fresh.shape)):
            grow(fresh, given[key], old_len, new_len)
            done["grown"].append(key)
        else:                               # not there, or a head with other classes
            done["new"].append(key)
    return done


def grow(fresh, trained, old_len, new_len):
    """Copy a table for old_len positions into one for new_len: rows keep their position, what follows them (the
    unknown, theta) moves to the new end; the pair head's classes keep their offset."""
    index = []
    for old, new in zip(trained.shape, fresh.shape):
        rows = torch.arange(old)
        if new - old == 2 * (new_len - old_len):                                # class = offset + L - 1
            rows = rows + new_len - old_len
        elif new > old:
            rows = torch.where(rows < old_len, rows, rows + new_len - old_len)
        index.append(rows)
    fresh[torch.meshgrid(*index, indexing="ij")] = trained.to(fresh.device)
