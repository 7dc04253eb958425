"""A BERT-style text encoder whose positional scheme is one flag.

    from model import load
    encoder = load("out/docs-demo-tupe_r-pplm-s1337")     # a run folder or a checkpoint file
    hidden = encoder(tokens)                              # (B, L) token ids -> (B, L, C)

Letters: B batch, L length, C width (d_model), H heads, D = C/H. Token i looks at token j: q_i is a
query, k_j a key, v_j a value, content is q_i . k_j, A the softmax of s over j. pos_i is where token
i is said to stand, p_i a vector of that position; r = pos_j - pos_i is an offset, key minus query,
a_r a vector of it. U_Q and U_K are matrices that project p. reset gives the row and the column of
[CLS] a number each per head, theta_1 and theta_2 (P1 eq 9). Tables of absolute positions have
max_len + 1 rows: row max_len is the unknown, hidden position (TUPE has two more rows, for theta).
P0 is the paper on relative position prediction, P1 TUPE, P3 "On Position Embeddings in BERT".

An attention logit is    s_ij = q_i . k_j / sqrt(scale_terms * D) + bias_ij
where scale_terms is 1, for tupe_* 2, for bert_ad 4. A scheme is a sum of components, and a
component overrides some of four hooks, nothing else:

name (--pe)         from            hooks          what it adds
none                P3              -              nothing: a bag of words
abs, bert_a         P1 eq 3, P3     embed          x_i + p_i, a learned table
sin                 Vaswani 2017    embed          x_i + [sin w_k i, cos w_k i], w_k = 10000^(-2k/C)
lsin                P3              embed          the same with w learned
rel                 Shaw 2018, P3   offset_tables  q_i . (k_j + a_r)/sqrt(D); output
                                                   sum_j A_ij (v_j + a_r)
rel_k               P1 eq 4         offset_tables  the key term alone, a table per layer
rsin, rlsin         NEZHA, P3       offset_tables  rel with a = sinusoids of the signed offset, w
                                                   fixed or learned
t5                  P1 eq 5         bias           b_bucket(r) per head, shared by all layers
abs+t5, bert_r      P1 eq 5         embed bias
bert_ad             P1 sec 4.3      edit_qk        (q_i + p_i U_Q) . (k_j + p_j U_K) / sqrt(4D)
tupe_a              P1 eq 10        bias           content/sqrt(2D)
                                                   + reset(p_i U_Q . p_j U_K / sqrt(2D))
tupe_r              P1 eq 11        bias           content/sqrt(2D)
                                                   + reset(p_i U_Q . p_j U_K / sqrt(2D) + t5)
tupe_a_tie_cls,     P1 sec 4.3      bias           without the reset of [CLS] (P1 has the first)
tupe_r_tie_cls
t5_untie_cls        P1 sec 3.2      bias           reset(t5)
bert_r_untie_cls    P1 sec 3.2      embed bias     abs + reset(t5)
tupe_a_free         P1 sec 5        bias           reset(a free table M_h[i, j]), a failed attempt
tupe_r_factored     P1 sec 5        bias           tupe_r with b_r = (a_r F_Q) . (a_r F_K), another
                                                   failed attempt
rope                Su 2021         edit_qk        q, k rotated by position
alibi               Press 2021      bias           -slope_h |r|

and the sums of P3: abs+rel, abs+rsin, abs+rlsin, lsin+rel, lsin+rsin, lsin+rlsin. Any other sum
works too if no two parts use the same hook and none is marked `alone`: rope+t5, abs+alibi,
sin+rel_k. One special case reaches into objectives.py: rel_k has a table a layer, so its pair head
brings one of its own.
"""

import math
from dataclasses import dataclass
from functools import partial

import tiktoken
import torch
import torch.nn as nn
import torch.nn.functional as F

import fast
from common import check_settings, load_strict, read_checkpoint, setting

UNKNOWN_POS = -1  # a hidden position (objective pmlm)
N_SPECIALS = 8  # [CLS] [PAD] [SEP] [MASK] and four spare ones: the last ids of a vocabulary
MAX_OFFSET = 64  # rel, rel_k, rsin, rlsin, tupe_r_factored clip offsets to +-64 (P3)
T5_BUCKETS = 32
T5_MAX_DISTANCE = 128


# --------------------------------------------------------------------------------------------------
# Configuration


@dataclass
class EncoderConfig:
    """Every default of the architecture. A field with a help text is a flag, too.

    Raises ValueError on a shape that cannot be built.
    """

    vocab_size: int = 50265  # with the 8 specials
    pe: str = setting("abs", "positional scheme, or a sum such as rope+t5")
    n_layer: int = setting(4, "layers", "[1, 1000]")
    n_head: int = setting(4, "attention heads", "[1, 1e4]")
    d_model: int = setting(128, "width C", "[1, 1e5]")
    d_ff: int = setting(512, "width of the feed-forward layer", "[1, 1e6]")
    # longest row; absolute tables have one row more, the unknown
    max_len: int = setting(64, allowed="[1, 1e6]")
    dropout: float = setting(0.1, "everywhere, attention included", "[0, 1)")
    attn_dropout: float = setting(0.1, allowed="[0, 1)")
    norm_eps: float = 1e-5

    def __post_init__(self):
        check_settings(self)
        if self.d_model % self.n_head:
            raise ValueError(
                f"--d_model {self.d_model} is not a multiple of --n_head {self.n_head}"
            )
        for name in parse_pe(self.pe):
            width = component_class(name).even
            if width and getattr(self, width) % 2:
                raise ValueError(
                    f"--pe {name} pairs sines with cosines: {width} must be even, not "
                    f"{getattr(self, width)} (d_head is d_model / n_head)"
                )

    @property
    def d_head(self):
        return self.d_model // self.n_head

    # The specials stand at the same distance from the end whatever the tokenizer.
    cls_id = property(lambda self: self.vocab_size - 8)
    pad_id = property(lambda self: self.vocab_size - 7)
    sep_id = property(lambda self: self.vocab_size - 6)
    mask_id = property(lambda self: self.vocab_size - 5)


# --------------------------------------------------------------------------------------------------
# Positions. `pos` is always (1 or B, L) int64.


def offset_matrix(pos):
    """(1 or B, L) positions -> (1 or B, L, L) offsets r_ij = pos_j - pos_i. P3 writes i - j: a
    relabelling (departure)."""
    return pos[:, None, :] - pos[:, :, None]


def hidden_pairs(pos):
    """(1 or B, L) -> (1 or B, L, L) bool: i != j and at least one end hidden. A token's pair with
    itself is never hidden: its offset is 0."""
    hidden = pos == UNKNOWN_POS
    diagonal = torch.eye(pos.size(1), dtype=torch.bool, device=pos.device)
    return (hidden[:, None, :] | hidden[:, :, None]) & ~diagonal


def table_index(pos, max_len: int):
    """Row of an absolute table for each position; the unknown is row max_len.

    Raises ValueError on rows longer than the table. The values of pos, which must be below max_len,
    are not looked at: a GPU would have to be waited for.
    """
    if pos.size(1) > max_len:
        raise ValueError(
            f"a row of {pos.size(1)} tokens, but the position table ends at {max_len} "
            "(sin, lsin and the schemes of offsets alone go on beyond it)"
        )
    return torch.where(pos == UNKNOWN_POS, max_len, pos)


def offset_index(pos):
    """Row of a clipped offset table for each pair (B, L, L); the unknown is the last row."""
    clipped = offset_matrix(pos).clamp(-MAX_OFFSET, MAX_OFFSET) + MAX_OFFSET
    return torch.where(hidden_pairs(pos), 2 * MAX_OFFSET + 1, clipped)


def t5_bucket(r):
    """T5's bidirectional buckets of the offset r: exact below 8, then logarithmic up to 128."""
    half = T5_BUCKETS // 2  # one half for each sign
    exact = half // 2
    distance = r.abs()
    ratio = torch.log(distance.clamp(min=1).float() / exact)
    ratio = ratio / math.log(T5_MAX_DISTANCE / exact)
    far = exact + (ratio * (half - exact)).long()
    far = far.clamp(max=half - 1)
    bucket = torch.where(distance < exact, distance, far)
    return bucket + half * (r > 0)


def frequencies(width):
    """w_k = 10000^(-2k/width), k = 0 .. width/2 - 1 (Vaswani 2017, sec 3.5)."""
    k = torch.arange(0, width, 2).double()
    return 10000.0 ** (-k / width).to(torch.get_default_dtype())


def sinusoids(x, w):
    """(...) positions or offsets, (width/2,) frequencies -> (..., width), sines and cosines
    interleaved."""
    angles = x[..., None].to(w.dtype) * w
    waves = torch.stack((angles.sin(), angles.cos()), dim=-1)
    return waves.flatten(-2)


def normal(*shape):
    return nn.Parameter(0.02 * torch.randn(*shape))


class XavierLinear(nn.Linear):
    """A linear layer that init_weights starts Xavier-uniform: U_Q, U_K, F_Q, F_K, the pair head.

    With N(0, 0.02) the product of two small numbers starts so near 0 that learning is late
    (departure).
    """


# --------------------------------------------------------------------------------------------------
# Components


class Component(nn.Module):
    """To add a scheme, subclass this, override some of its four hooks, and add a line to SCHEMES.

    probe.py draws what offset_tables gives: row r + 64 for offset r.
    """

    scale_terms = 1  # content logits are divided by sqrt(scale_terms * D)
    scale_tokens = False  # multiply token embeddings by sqrt(C)
    hidden_ok = True  # can it express an unknown position?
    alone = False  # must it stand alone, outside any sum?
    even = None  # a width that must be even: "d_model" or "d_head"

    def __init__(self, cfg: EncoderConfig):
        super().__init__()

    def embed(self, pos):
        """-> (1 or B, L, C), added to the token embedding."""

    def bias(self, pos):
        """-> (1 or B, H, L, L) logits without words, made once for all layers of an encoder (and
        once more for the pair head). Pairs with a hidden end (hidden_pairs) have a value of their
        own: their offset would be nonsense."""

    def edit_qk(self, q, k, pos):
        """q, k (B, H, L, D) -> the same, edited, in every layer."""

    def offset_tables(self, layer):
        """-> key vectors (R, D) and value vectors (R, D) or None; row r + 64 for offset r, clipped,
        the last row for a hidden one."""


HOOKS = ("embed", "bias", "edit_qk", "offset_tables")


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

    Token embeddings are scaled by sqrt(C) (departure: unit sinusoids would drown N(0, .02) tokens
    35 to 1).
    """

    scale_tokens = True
    even = "d_model"

    def __init__(self, cfg, learned=False):
        super().__init__(cfg)
        self.unknown = normal(cfg.d_model)
        w = frequencies(cfg.d_model)
        self.w = nn.Parameter(w) if learned else nn.Buffer(w)

    def embed(self, pos):
        hidden = (pos == UNKNOWN_POS)[..., None]
        return torch.where(hidden, self.unknown, sinusoids(pos, self.w))


class Relative(Component):
    """One learned table for keys and values, shared by heads and layers (Shaw 2018, P3)."""

    def __init__(self, cfg):
        super().__init__(cfg)
        self.table = nn.Embedding(2 * MAX_OFFSET + 2, cfg.d_head)

    def offset_tables(self, layer):
        return self.table.weight, self.table.weight


class RelativeKeys(Component):
    """Key side only, a table a layer (P1 eq 4)."""

    def __init__(self, cfg):
        super().__init__(cfg)
        tables = [nn.Embedding(2 * MAX_OFFSET + 2, cfg.d_head) for _ in range(cfg.n_layer)]
        self.tables = nn.ModuleList(tables)

    def offset_tables(self, layer):
        return self.tables[layer].weight, None


class RelativeSinusoidal(Component):
    """rel with sinusoids of the signed offset (NEZHA takes the shifted index: departure)."""

    even = "d_head"

    def __init__(self, cfg, learned=False):
        super().__init__(cfg)
        self.unknown = normal(1, cfg.d_head)
        w = frequencies(cfg.d_head)
        self.w = nn.Parameter(w) if learned else nn.Buffer(w)

    def offset_tables(self, layer):
        r = torch.arange(-MAX_OFFSET, MAX_OFFSET + 1, device=self.w.device)
        known = sinusoids(r, self.w)
        table = torch.cat((known, self.unknown))  # (2*64 + 2, D)
        return table, table


class T5Bias(Component):
    """A learned scalar per head and bucket of the offset (P1 eq 5), not scaled."""

    def __init__(self, cfg):
        super().__init__(cfg)
        self.table = nn.Embedding(T5_BUCKETS + 1, cfg.n_head)

    def bias(self, pos):
        bucket = t5_bucket(offset_matrix(pos))  # (B, L, L)
        bucket = torch.where(hidden_pairs(pos), T5_BUCKETS, bucket)
        return self.table(bucket).permute(0, 3, 1, 2)  # (B, L, L, H) -> (B, H, L, L)


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
        b = self.f_q(r) * self.f_k(r)  # (R, C)
        b = b.view(len(r), self.n_head, -1).sum(-1)  # (R, H)
        b = F.embedding(offset_index(pos), b)  # (B, L, L, H)
        return b.permute(0, 3, 1, 2)  # (B, H, L, L)


class Alibi(Component):
    """-slope_h |r|, symmetric for encoders, the published slopes for any H (Press 2021)."""

    def __init__(self, cfg):
        super().__init__(cfg)
        self.unknown = normal(cfg.n_head, 1, 1)
        slopes = torch.tensor(self.published_slopes(cfg.n_head))
        self.slopes = nn.Buffer(slopes.view(-1, 1, 1))

    @staticmethod
    def published_slopes(n_head):
        def powers(n):
            return [2 ** (-8 * (h + 1) / n) for h in range(n)]

        n = 2 ** int(math.log2(n_head))
        more = powers(2 * n)[0::2]  # no power of two: every other slope of the next one
        return powers(n) + more[: n_head - n]

    def bias(self, pos):
        distance = offset_matrix(pos).abs()[:, None]  # (B, 1, L, L)
        bias = -self.slopes * distance.to(self.slopes.dtype)  # (B, H, L, L)
        return torch.where(hidden_pairs(pos)[:, None], self.unknown, bias)


class Rotary(Component):
    """q and k rotated by their position, pairs interleaved, base 10000 (Su 2021): q_i . k_j then
    depends on j - i."""

    hidden_ok = False  # no rotation stands for "unknown"
    even = "d_head"

    def __init__(self, cfg):
        super().__init__(cfg)
        self.w = nn.Buffer(frequencies(cfg.d_head))

    def edit_qk(self, q, k, pos):
        angles = pos[..., None].to(self.w.dtype) * self.w  # (B, L, D/2)
        cos = angles.cos().to(q.dtype)[:, None]  # (B, 1, L, D/2)
        sin = angles.sin().to(q.dtype)[:, None]
        return self.rotate(q, cos, sin), self.rotate(k, cos, sin)

    @staticmethod
    def rotate(x, cos, sin):
        even = x[..., 0::2]
        odd = x[..., 1::2]
        turned = (even * cos - odd * sin, even * sin + odd * cos)
        return torch.stack(turned, dim=-1).flatten(-2)


class UntiedTable(nn.Module):
    """What TUPE and bert_ad share: a position table p, its LayerNorm, its own projections U_Q, U_K.

    Shared by all layers, so TUPE has about 2*C*C parameters more than abs (P1 sec 3.3).
    """

    def __init__(self, cfg, extra_rows=0):
        super().__init__()
        self.n_head = cfg.n_head
        self.max_len = cfg.max_len
        # max_len positions, the unknown, then theta_1 and theta_2
        self.table = nn.Embedding(cfg.max_len + 1 + extra_rows, cfg.d_model)
        self.norm = nn.LayerNorm(cfg.d_model, eps=cfg.norm_eps)
        self.u_q = XavierLinear(cfg.d_model, cfg.d_model, bias=False)
        self.u_k = XavierLinear(cfg.d_model, cfg.d_model, bias=False)

    def forward(self, pos):
        """-> p_i U_Q and p_j U_K at the positions, (1 or B, H, L, D) each, and of all rows
        (rows, C)."""
        p = self.norm(self.table.weight)  # (rows, C)
        all_q, all_k = self.u_q(p), self.u_k(p)
        rows = table_index(pos, self.max_len)
        heads = (*rows.shape, self.n_head, -1)  # (1 or B, L, H, D)
        q = F.embedding(rows, all_q).view(heads)
        k = F.embedding(rows, all_k).view(heads)
        q = q.transpose(1, 2)  # (1 or B, H, L, D)
        k = k.transpose(1, 2)
        return q, k, all_q, all_k


def reset_cls(v, theta):
    """P1 eq 9. v (B, H, L, L), theta (2, H): row [CLS] becomes theta_1, the rest of column [CLS]
    theta_2.

    theta_1 fills a whole row, so the softmax cancels it and it never gets a gradient; it is here
    because the paper has it.
    """
    first = torch.arange(v.size(-1), device=v.device) == 0  # [CLS] is index 0
    row, column = theta.view(2, -1, 1, 1)
    v = torch.where(first, column, v)  # the column first,
    return torch.where(first[:, None], row, v)  # then the row and (0, 0)


class Tupe(Component):
    """TUPE (P1 eq 10, 11): words and positions have their own correlation, summed; [CLS] is untied.

        s_ij = q_i . k_j / sqrt(2D) + reset(p_i U_Q . p_j U_K / sqrt(2D) + b_r)

    (b_r: tupe_r alone, a number per head and bucket of offsets. reset: reset_cls above.)
    BERT adds positions to words once, at the input, so its logits mix word with position ("how much
    does `cat` attend to place 7?", P1 eq 6). TUPE keeps the two apart: this class computes the
    second term, from positions alone; the first, q_i . k_j, each block computes itself.
    """

    alone = True
    scale_terms = 2

    def __init__(self, cfg, relative=None, reset=True):
        super().__init__(cfg)
        self.positions = UntiedTable(cfg, extra_rows=2 if reset else 0)
        self.offsets = relative(cfg) if relative else None  # tupe_r: T5's b_r
        self.scale = (self.scale_terms * cfg.d_head) ** -0.5
        self.reset = reset

    def bias(self, pos):
        # Each position has a vector p_i. Two matrices, U_Q and U_K, project all of them, and no
        # word ever passes through these. Words and positions give two terms of about the same size:
        # dividing both by sqrt(2D), not sqrt(D), keeps the size of their sum (P1 sec 3.3).
        q, k, all_q, all_k = self.positions(pos)  # (1 or B, H, L, D); all: (rows, C)
        v = q @ k.transpose(-1, -2) * self.scale  # P1's v_ij (1 or B, H, L, L)
        if self.offsets is not None:  # tupe_r's b_r
            v = v + self.offsets.bias(pos)
        if not self.reset:
            return v
        # [CLS] stands first by convention, not by meaning: what it sees and who sees it should not
        # depend on distance. So its row and column are replaced, T5's part included (the released
        # code resets the two parts apart: departure), by theta_1 and theta_2 of each head, made
        # like the rest: p_t U_Q . p_t U_K, t being the last two rows of p.
        theta = all_q[-2:] * all_k[-2:]  # (2, C)
        theta = theta.view(2, q.size(1), -1).sum(-1)  # (2, H)
        return reset_cls(v, theta * self.scale)


class TupeFree(Component):
    """TUPE-A with a free table in place of p_i U_Q . p_j U_K (P1 sec 5, a failed attempt)."""

    alone = True
    scale_terms = 2

    def __init__(self, cfg):
        super().__init__(cfg)
        self.table = normal(cfg.n_head, cfg.max_len + 1, cfg.max_len + 1)
        self.theta = normal(2, cfg.n_head)

    def bias(self, pos):
        H, T, _ = self.table.shape
        row = table_index(pos, T - 1)
        cell = row[:, :, None] * T + row[:, None, :]  # (B, L, L)
        cells = self.table.view(H, T * T).t()
        v = F.embedding(cell, cells)  # (B, L, L, H)
        return reset_cls(v.permute(0, 3, 1, 2), self.theta)


class T5UntieCls(Component):
    """T5's bias with [CLS] untied (P1 sec 3.2: "can be widely applied"); theta are free scalars."""

    alone = True

    def __init__(self, cfg):
        super().__init__(cfg)
        self.offsets = T5Bias(cfg)
        self.theta = normal(2, cfg.n_head)

    def bias(self, pos):
        return reset_cls(self.offsets.bias(pos), self.theta)


class BertAD(Component):
    """BERT-A^d (P1 sec 4.3): all four word and position terms, positions projected on their own."""

    alone = True
    scale_terms = 4

    def __init__(self, cfg):
        super().__init__(cfg)
        self.positions = UntiedTable(cfg)

    def edit_qk(self, q, k, pos):
        p_q, p_k, *_ = self.positions(pos)
        return q + p_q, k + p_k


# Every name of --pe, in the order of the table above: a class, or the sum that it stands for.
SCHEMES = {
    "none": NoPositions,
    "abs": Absolute,
    "bert_a": "abs",
    "sin": Sinusoidal,
    "lsin": partial(Sinusoidal, learned=True),
    "rel": Relative,
    "rel_k": RelativeKeys,
    "rsin": RelativeSinusoidal,
    "rlsin": partial(RelativeSinusoidal, learned=True),
    "abs+rel": "abs+rel",
    "abs+rsin": "abs+rsin",
    "abs+rlsin": "abs+rlsin",
    "lsin+rel": "lsin+rel",
    "lsin+rsin": "lsin+rsin",
    "lsin+rlsin": "lsin+rlsin",
    "t5": T5Bias,
    "abs+t5": "abs+t5",
    "bert_r": "abs+t5",
    "bert_ad": BertAD,
    "tupe_a": Tupe,
    "tupe_r": partial(Tupe, relative=T5Bias),
    "tupe_a_tie_cls": partial(Tupe, reset=False),
    "tupe_r_tie_cls": partial(Tupe, relative=T5Bias, reset=False),
    "t5_untie_cls": T5UntieCls,
    "bert_r_untie_cls": "abs+t5_untie_cls",
    "tupe_a_free": TupeFree,
    "tupe_r_factored": partial(Tupe, relative=FactoredBias),
    "rope": Rotary,
    "alibi": Alibi,
}
PE_NAMES = list(SCHEMES)


def component_class(name):
    return getattr(SCHEMES[name], "func", SCHEMES[name])  # looks through partial()


def used_hooks(name):
    cls = component_class(name)
    return [hook for hook in HOOKS if getattr(cls, hook) is not getattr(Component, hook)]


def parse_pe(pe: str) -> list[str]:
    """'abs+t5' -> ['abs', 't5']. Raises ValueError, with the reason, on what is not legal; names
    in SCHEMES always are."""
    parts = []
    for name in pe.split("+"):
        meaning = SCHEMES.get(name)
        parts += meaning.split("+") if isinstance(meaning, str) else [name]
    owner = {}
    for part in parts:
        if part not in SCHEMES:
            raise ValueError(
                f"unknown pe {part!r}; choose from {', '.join(PE_NAMES)}, or a sum such as rope+t5"
            )
        if len(parts) == 1 or pe in SCHEMES:
            continue
        if component_class(part).alone:
            raise ValueError(f"pe {pe}: {part} stands alone, it cannot be part of a sum")
        for hook in used_hooks(part):
            if hook in owner:
                raise ValueError(
                    f"pe {pe}: {owner[hook]} and {part} both use the hook {hook!r}; a "
                    "sum may use each hook once"
                )
            owner[hook] = part
    return parts


class Pairs:
    """Which row of a table of offsets belongs to which pair: index (1 or B, L, L)."""

    def __init__(self, index):
        self.index = index

    def rows(self, table):
        """The table in the form that pick and add_up index: unchanged, (R, D)."""
        return table

    def pick(self, x):
        """(B, H, L, R) -> (B, H, L, L): for each pair the entry of its row."""
        index = self.index[:, None].expand(x.size(0), x.size(1), -1, -1)
        return x.gather(-1, index)

    def add_up(self, A, n_rows):
        """(B, H, L, L) -> (B, H, L, R): the sum over j of the pairs that share a row."""
        zeros = A.new_zeros(*A.shape[:-1], n_rows)
        return zeros.scatter_add(-1, self.index[:, None].expand_as(A), A)


class PositionalScheme(nn.Module):
    """The sum of a scheme's components: who does what at each of the four hooks."""

    def __init__(self, cfg: EncoderConfig):
        super().__init__()
        names = parse_pe(cfg.pe)
        self.parts = nn.ModuleDict({name: SCHEMES[name](cfg) for name in names})
        parts = self.parts.values()
        n_terms = max(part.scale_terms for part in parts)
        self.scale = (n_terms * cfg.d_head) ** -0.5
        scaled = any(part.scale_tokens for part in parts)
        self.token_scale = cfg.d_model**0.5 if scaled else 1.0
        self.hidden_ok = all(part.hidden_ok for part in parts)
        self.at = dict.fromkeys(HOOKS)  # hook -> the one part that uses it, or None
        for name, part in self.parts.items():
            for hook in used_hooks(name):
                self.at[hook] = part
        self.in_logits = any(self.at[hook] for hook in HOOKS if hook != "embed")

    def own_table(self):
        """The pair head's table of offsets, where each attention layer has its own: rel_k."""
        if "rel_k" not in self.parts:
            return None
        shape = self.parts["rel_k"].tables[0].weight.shape
        return nn.Embedding(*shape)

    def bias_and_mask(self, pos, pad, causal, dtype):
        """What is added to the logits of every layer: the scheme's bias, and -inf where pad or
        causal forbid to look -> (1 or B, 1 or H, L, L), (L, L) of causal alone, or None."""
        bias = masked = None
        if self.at["bias"]:
            bias = self.at["bias"].bias(pos)
        if pad is not None:
            masked = pad[:, None, None, :]  # (B, 1, 1, L)
        L = pos.size(1)
        if causal:  # by index, not by position
            future = torch.ones(L, L, dtype=torch.bool, device=pos.device).triu(1)
            masked = future if masked is None else masked | future
        if masked is not None:
            if bias is None:
                bias = torch.zeros(L, L, dtype=dtype, device=pos.device)
            bias = bias.masked_fill(masked, float("-inf"))
        return None if bias is None else bias.to(dtype).contiguous()

    def terms(self, q, k, pos, layer, bias, in_order=False, key_table=None):
        """-> q, k, bias such that the logits are scale * q k^T + bias, and what is added to the
        values: (pairs, table) or None. key_table: the pair head's own."""
        plain = q
        if self.at["edit_qk"]:
            q, k = self.at["edit_qk"].edit_qk(q, k, pos)
        if self.at["offset_tables"] is None:
            return q, k, bias, None
        if key_table is not None:
            keys, values = key_table.weight, None
        else:
            part = self.at["offset_tables"]
            keys, values = part.offset_tables(layer)
        # q_i . a_r for all R rows, then each pair picks its row: never an (L, L, D) tensor. With
        # rope, q is taken before its rotation, for a_r is not rotated.
        if in_order:  # pos is 0 .. L-1
            pairs = fast.InOrder(q.size(2), MAX_OFFSET)
        else:
            pairs = Pairs(offset_index(pos))
        keys = pairs.rows(keys).to(q.dtype)  # (R, D)
        term = plain * self.scale @ keys.t()  # (B, H, L, R)
        term = pairs.pick(term)  # (B, H, L, L)
        bias = term if bias is None else term + bias
        if values is None:
            return q, k, bias, None
        return q, k, bias, (pairs, pairs.rows(values))


# --------------------------------------------------------------------------------------------------
# The encoder


class Block(nn.Module):
    """Post-LN Transformer layer: attention, then feed-forward with exact GELU, each
    x = LN(x + f(x))."""

    def __init__(self, cfg: EncoderConfig, layer: int):
        super().__init__()
        self.layer = layer
        self.n_head = cfg.n_head
        self.attn_dropout = cfg.attn_dropout
        self.qkv = nn.Linear(cfg.d_model, 3 * cfg.d_model)
        self.out = nn.Linear(cfg.d_model, cfg.d_model)
        self.norm1 = nn.LayerNorm(cfg.d_model, eps=cfg.norm_eps)
        self.fc1 = nn.Linear(cfg.d_model, cfg.d_ff)
        self.fc2 = nn.Linear(cfg.d_ff, cfg.d_model)
        self.norm2 = nn.LayerNorm(cfg.d_model, eps=cfg.norm_eps)
        self.drop = fast.dropout(cfg.dropout)

    def heads(self, x):
        """(B, L, C) -> q, k, v, (B, H, L, D) each."""
        x = self.qkv(x)  # (B, L, 3C)
        x = x.unflatten(-1, (3, self.n_head, -1))  # (B, L, 3, H, D)
        return x.permute(2, 0, 3, 1, 4)

    def forward(self, x, scheme, pos, bias, in_order):
        """x (B, L, C), the scheme, pos (1 or B, L), its bias_and_mask; in_order: is pos 0 .. L-1?
        -> (B, L, C)."""
        B, L, C = x.shape
        q, k, v = self.heads(x)
        p = self.attn_dropout if self.training else 0.0
        # What the scheme does to queries and keys, and its part of the scores.
        q, k, bias, for_values = scheme.terms(q, k, pos, self.layer, bias, in_order)
        if q.is_cuda and for_values is None:
            y = fast.attention(q, k, v, bias, p, scheme.scale)
        else:
            # Who looks where: q_i . k_j, plus what the scheme says of (i, j) whatever the words.
            scores = q * scheme.scale @ k.transpose(-1, -2)  # (B, H, L, L)
            scores = scores if bias is None else scores + bias
            A = scores.softmax(-1)  # a row sums to 1 over the keys
            A = fast.drop(A, p) if p else A
            y = A @ v  # (B, H, L, D)
            if for_values is not None:
                # rel: sum_j A_ij a_r(ij). First the weight that each row i gives to each offset,
                # then one product: (B, H, L, R) @ (R, D).
                pairs, values = for_values
                weights = pairs.add_up(A, len(values))
                y = y + weights @ values.to(A.dtype)
        y = y.transpose(1, 2).reshape(B, L, C)  # (B, H, L, D) -> (B, L, C)
        x = self.norm1(x + self.drop(self.out(y)))
        y = self.fc2(F.gelu(self.fc1(x)))
        return self.norm2(x + self.drop(y))


class Encoder(nn.Module):
    """Token embedding (+ input positions) -> LayerNorm -> dropout -> n_layer blocks. No segment
    embeddings (P3's BERT has them: departure)."""

    def __init__(self, cfg: EncoderConfig):
        super().__init__()
        self.config = cfg
        self.tokenizer = None  # load() puts the run's tokenizer here
        padded = -(-cfg.vocab_size // 64) * 64  # a multiple of 64: matrix units like it
        self.tok = nn.Embedding(padded, cfg.d_model)
        self.pe = PositionalScheme(cfg)
        self.norm = nn.LayerNorm(cfg.d_model, eps=cfg.norm_eps)
        self.drop = fast.dropout(cfg.dropout)
        self.blocks = nn.ModuleList(Block(cfg, layer) for layer in range(cfg.n_layer))
        self.apply(init_weights)

    def forward(self, tokens, pos=None, pad=None, causal=False, n_layer=None):
        """Token ids -> hidden states.

        tokens (B, L) int64, [CLS] at index 0; pos (L,) or (B, L) int64, None = arange(L),
        UNKNOWN_POS = hidden; pad (B, L) bool, True = padding; n_layer: stop after so many blocks.
        -> (B, L, C). Raises ValueError if a row is longer than a table of positions.
        """
        in_order = pos is None  # then tables of offsets are read faster
        if pos is None:
            pos = torch.arange(tokens.size(1), device=tokens.device)
        pos = torch.atleast_2d(pos)  # (L,) -> (1, L), one for all rows
        x = self.drop(self.embed(tokens, pos))
        bias = self.pe.bias_and_mask(pos, pad, causal, compute_dtype(x))
        for block in self.blocks[:n_layer]:
            x = block(x, self.pe, pos, bias, in_order)
        return x

    def embed(self, tokens, pos):
        """The input of the first layer, before dropout: words, plus positions where the scheme adds
        them -> (B, L, C)."""
        x = self.tok(tokens) * self.pe.token_scale
        if self.pe.at["embed"]:
            x = x + self.pe.at["embed"].embed(pos)
        return self.norm(x)

    def logits(self, q, k, pos, layer, pad=None, causal=False, key_table=None):
        """Attention logits before the softmax, as an attention layer of this model has them.

        q, k (B, H, L, D); pos (1 or B, L); layer an index; key_table an nn.Embedding, the pair
        head's own where own_table() gives one -> (B, H, L, L).
        """
        bias = self.pe.bias_and_mask(pos, pad, causal, q.dtype)
        q, k, bias, _ = self.pe.terms(q, k, pos, layer, bias, key_table=key_table)
        scores = q * self.pe.scale @ k.transpose(-1, -2)
        return scores if bias is None else scores + bias

    @torch.no_grad()
    def layer_logits(self, tokens, layer=0, pos=None, pad=None, causal=False):
        """Logits of one layer, dropout off; arguments as forward's -> (B, H, L, L)."""
        was_training = self.training
        self.eval()
        if pos is None:
            pos = torch.arange(tokens.size(1), device=tokens.device)
        pos = torch.atleast_2d(pos)
        x = self(tokens, pos, pad, causal, n_layer=layer)
        q, k, _ = self.blocks[layer].heads(x)
        self.train(was_training)
        return self.logits(q, k, pos, layer, pad, causal)

    def attention(self, tokens, layer=0, pos=None, pad=None):
        """Attention probabilities of one layer, likewise, never causal -> (B, H, L, L)."""
        logits = self.layer_logits(tokens, layer, pos, pad)
        return logits.softmax(-1)


def compute_dtype(x):
    """The dtype that matrix products have here: autocast's, else x's."""
    kind = x.device.type
    if torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return x.dtype


def init_weights(module):
    """The start of every weight.

    Linear, Embedding      N(0, 0.02), bias 0
    XavierLinear           Xavier-uniform, bias 0 (U_Q, U_K, F_Q, F_K, the pair head)
    LayerNorm              1 and 0
    bare parameters        where they are made: unknown positions, theta, free tables N(0, 0.02);
                           frequencies w 10000^(-2k/C)
    """
    if isinstance(module, XavierLinear):
        nn.init.xavier_uniform_(module.weight)
    elif isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


def load(path, **override) -> Encoder:
    """A run folder or checkpoint file -> Encoder in eval mode, with `.config` and `.tokenizer`.

    `override` replaces fields of the configuration (dropout=0.0). Raises ValueError if the weights
    do not fit.
    """
    checkpoint = read_checkpoint(path)
    config = {**checkpoint["config"], **override}
    encoder = Encoder(EncoderConfig(**config))
    encoder.tokenizer = tiktoken.Encoding(**checkpoint["tokenizer"])
    weights = {}
    for key, value in checkpoint["model"].items():
        if key.startswith("encoder."):
            weights[key.removeprefix("encoder.")] = value
    load_strict(encoder, weights, path)
    return encoder.eval()
