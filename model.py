"""A BERT-style text encoder in which the positional scheme is one flag.

    import torch
    from model import load
    encoder = load("docs/demo.pt")                              # a checkpoint file or a run folder
    ids = encoder.tokenizer.encode("Returns a copy of the array.")
    tokens = torch.tensor([[encoder.config.cls_id, *ids, encoder.config.sep_id]])      # (B, L)
    hidden = encoder(tokens)                                                           # (B, L, C)

Notation: B batch size, L sequence length, C embedding dimension (d_model), H heads, D = C/H. Token
i (the query) attends to token j (the key) with the weight A_ij; x_i is the embedding of token i,
pos_i the position assigned to it, p_i a vector for that position, r = pos_j - pos_i the offset (key
minus query), and a_r a vector for that offset. R is the number of rows in a table of offsets; U and
F are projections. A first dimension of "1 or B" is 1 if all sequences of a batch have the same
positions. RPP is Bruel-Gabrielsson & Scarvelis (2022), TUPE Ke et al. (2021), Wang 2021 "On
Position Embeddings in BERT". (deviation) marks a difference from the cited paper.

The logits of one attention head, before the softmax over j, are

    s_ij = (q_i . k_j + scores_ij) / sqrt(t D) + bias_ij          t = scale_terms

where q_i and k_j are the query and the key after edit_qk (scores gets them before edit_qk). t is 2
for tupe_*, 3 for deberta, 4 for bert_ad, as in their papers, and 1 for all others. A scheme is
a sum of components, and a component overrides any of five hooks. In the table, reset(...) is the
function reset_cls below:

    embed    added to the token embeddings       scores   logits of tokens and positions together
    bias     logits of positions alone           values   added to the output of attention
    edit_qk  changes queries and keys

name (--pe)         from            hooks          what it does
none                Wang 2021       -              nothing: a bag of tokens
abs, bert_a         TUPE eq 3       embed          x_i + p_i, a learned table
sin                 Vaswani 2017    embed          sqrt(C) x_i + [sin w_k pos_i, cos w_k pos_i],
                                                   w_k = 10000^(-2k/C)
lsin                Wang 2021       embed          the same with w learned
rel                 Shaw 2018       scores values  q_i . (k_j + a_r) / sqrt(D); output
                                                   sum_j A_ij (v_j + a_r)
rel_k               TUPE eq 4       scores         the key term alone, one table per layer
rsin, rlsin         NEZHA, Wang     scores values  rel with a = sinusoids of the signed offset, w
                                                   fixed or learned
t5                  TUPE eq 5       bias           b_bucket(r) per head, shared by all layers
abs+t5, bert_r      TUPE eq 5       embed bias
bert_ad             TUPE sec 4.3    edit_qk        (q_i + p_i U_Q) . (k_j + p_j U_K) / sqrt(4D)
tupe_a              TUPE eq 10      bias           q_i . k_j / sqrt(2D)
                                                   + reset(p_i U_Q . p_j U_K / sqrt(2D))
tupe_r              TUPE eq 11      bias           q_i . k_j / sqrt(2D)
                                                   + reset(p_i U_Q . p_j U_K / sqrt(2D) + t5)
tupe_a_tie_cls,     TUPE sec 4.3    bias           without the reset of [CLS]
tupe_r_tie_cls
t5_untie_cls        TUPE sec 3.2    bias           reset(t5)
bert_r_untie_cls    TUPE sec 3.2    embed bias     abs + reset(t5)
tupe_a_free         TUPE sec 5      bias           reset(a free table M_h[i, j]), a failed attempt
tupe_r_factored     TUPE sec 5      bias           tupe_r with b_r = (a_r F_Q) . (a_r F_K), another
                                                   failed attempt
deberta             He 2021         scores         (q_i . k_j + q_i . a_r U_K + k_j . a_-r U_Q)
                                                   / sqrt(3D), U_K and U_Q per layer
xl                  Dai 2019        scores         ((q_i + u) . k_j + (q_i + v) . a_r W) / sqrt(D),
                                                   a_r sinusoids of r, W per layer
rope                Su 2021         edit_qk        q and k rotated by their position
alibi               Press 2021      bias           -slope_h |r|
alibi_ns            Press's code    bias           -slope_h |r| to the left; to the right, with the
                                                   slopes of the heads in reverse order

Wang 2021's sums are abs+rel, abs+rsin, abs+rlsin, lsin+rel, lsin+rsin, lsin+rlsin. Other sums are
legal too: rope+t5, abs+alibi, sin+rel_k. A component with `combinable = False` cannot be
joined with "+": its scale or its reset of [CLS] is defined for its own terms.
"""

import functools
import math
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F

UNKNOWN_POS = -1  # the id of a masked position (objective pmlm)
N_SPECIALS = 8  # [CLS] [PAD] [SEP] [MASK] and 4 spare ones: the last ids of a vocabulary
SDPA_DEVICES = ("cuda",)  # where SDPA is used; on a CPU, an explicit softmax is faster


@dataclass
class EncoderConfig:
    """The architecture. Raises ValueError if the settings do not fit together."""

    vocab_size: int = 50265  # including the 8 special tokens
    pe: str = "abs"  # positional scheme: a name in SCHEMES, or a sum such as rope+t5
    n_layer: int = 4
    n_head: int = 4  # H
    d_model: int = 128  # C
    d_ff: int = 512  # hidden dimension of the feed-forward layer
    max_len: int = 64  # positions in the tables; the longest sequence of the schemes that have one
    max_offset: int = 64  # vectors of offsets (rel, deberta, ...) are clipped to +-64
    t5_max_distance: int = 128  # t5: from here on, all distances share a bucket; at least 16
    rope_base: float = 10000.0  # rope: the frequencies are base^(-2k/D)
    rope_scale: float = 1.0  # rope: positions are divided by it (position interpolation)
    dropout: float = 0.1  # of embeddings and of the output of every sublayer
    attn_dropout: float = 0.1  # of attention probabilities
    norm: str = "post"  # LayerNorm after each residual connection (BERT); pre: before each sublayer
    norm_eps: float = 1e-5

    def __post_init__(self):
        if self.d_model % self.n_head:
            raise ValueError(f"d_model {self.d_model} is not a multiple of n_head {self.n_head}")
        if self.norm not in ("post", "pre"):
            raise ValueError(f"norm is {self.norm!r}; choose from post, pre")
        if self.t5_max_distance < 16:  # fewer distances than buckets
            raise ValueError(f"t5_max_distance is {self.t5_max_distance}; it must be at least 16")
        for component in parse_pe(self.pe):
            if component.needs_even and getattr(self, component.needs_even) % 2:
                raise ValueError(f"--pe {self.pe} needs an even {component.needs_even}")

    d_head = property(lambda self: self.d_model // self.n_head)
    cls_id = property(lambda self: self.vocab_size - N_SPECIALS)
    pad_id = property(lambda self: self.cls_id + 1)
    sep_id = property(lambda self: self.cls_id + 2)
    mask_id = property(lambda self: self.cls_id + 3)


# --------------------------------------------------------------------------------------------------
# Positions


def once(function):
    """Decorates a function of a Positions, its first argument, and of constants: it is computed in
    the first layer that needs it, and kept for the others. (Nothing that depends on weights is.)"""

    @functools.wraps(function)
    def kept(pos, *args):
        key = function, *args
        if key not in pos.kept:
            pos.kept[key] = function(pos, *args)
        return pos.kept[key]

    return kept


class Positions:
    """The positions assigned to the tokens of a batch: the argument `pos` of every hook.

    ids (1 or B, L) int64, UNKNOWN_POS for a masked position. Every positional term is computed from
    these, not from the index of a token in the tensor, since pplm permutes them and pmlm masks
    them. (Only reset_cls, the causal mask and the diagonal of masked_pairs use the index.)
    """

    def __init__(self, ids):
        self.ids = torch.atleast_2d(ids)  # (L,) -> (1, L), shared by the batch
        self.kept = {}  # the results of functions that are decorated with `once`

    @classmethod
    def of(cls, tokens, pos=None):
        """tokens (B, L); pos a Positions, ids, or None: the indices of the tokens -> Positions."""
        if pos is None:
            pos = torch.arange(tokens.size(1), device=tokens.device)
        return pos if isinstance(pos, Positions) else cls(pos)

    @property
    @once
    def offsets(self):
        """(1 or B, L, L): r_ij = pos_j - pos_i, key minus query, as in Wang 2021 eq 5."""
        return self.ids[:, None, :] - self.ids[:, :, None]

    @property
    @once
    def masked_pairs(self):
        """(1 or B, L, L) bool: i != j, and at least one of the two positions is masked. (The offset
        of a token to itself is 0 even then.)"""
        masked = self.ids == UNKNOWN_POS
        diagonal = torch.eye(masked.size(1), dtype=torch.bool, device=masked.device)
        return (masked[:, None, :] | masked[:, :, None]) & ~diagonal

    @once
    def offset_rows(self, n_rows: int):
        """(1 or B, L, L): the row of each pair in a table of R = n_rows rows (OffsetTable): one per
        offset, which is clipped to the table's ends, and a last one for masked_pairs."""
        max_offset = n_rows // 2 - 1
        clipped = self.offsets.clamp(-max_offset, max_offset) + max_offset
        return torch.where(self.masked_pairs, n_rows - 1, clipped)

    def table_rows(self, max_len: int):
        """(1 or B, L): the row of each token in a table of max_len + 1 rows: one per position, and
        a last one for masked positions. Raises ValueError if the sequence is longer than the table.
        (The ids themselves are not checked: that would be a CPU-GPU sync.)"""
        if self.ids.size(1) > max_len:
            raise ValueError(
                f"a sequence of {self.ids.size(1)} tokens is longer than the position table "
                f"({max_len}); sin, lsin and purely relative schemes have no such limit"
            )
        return torch.where(self.ids == UNKNOWN_POS, max_len, self.ids)


# --------------------------------------------------------------------------------------------------
# Weights, which are initialized where they are created


def normal(*shape):
    """A parameter. The initial values of all weights (any other module keeps its own):

    normal, OffsetTable    N(0, 0.02) (masked positions, theta, free tables)
    linear, embedding      N(0, 0.02), bias 0, as in BERT
    xavier_linear          Xavier-uniform, bias 0: U_Q, U_K, F_Q, F_K, the pair head
    LayerNorm              1 and 0
    frequencies            10000^(-2k/width)
    """
    return nn.Parameter(0.02 * torch.randn(*shape))


def embedding(n_rows, width):
    table = nn.Embedding(n_rows, width)
    nn.init.normal_(table.weight, std=0.02)
    return table


def linear(n_in, n_out, bias=True):
    layer = nn.Linear(n_in, n_out, bias)
    nn.init.normal_(layer.weight, std=0.02)
    if bias:
        nn.init.zeros_(layer.bias)
    return layer


def xavier_linear(n_in, n_out, bias=True):
    """With BERT's N(0, 0.02), the product of two projections would be near 0, and the pair head
    would start to learn late (deviation)."""
    layer = linear(n_in, n_out, bias)
    nn.init.xavier_uniform_(layer.weight)
    return layer


class OffsetTable(nn.Embedding):
    """R = 2 max_offset + 2 vectors: one per offset from -max_offset to max_offset, and a last one
    for pairs with a masked position."""

    def __init__(self, cfg, width):
        super().__init__(2 * cfg.max_offset + 2, width)
        nn.init.normal_(self.weight, std=0.02)

    def resized(self, weight):
        """The weight (R', width) of another max_offset -> (R, width). Each offset keeps its vector.
        Larger offsets get the one to which they were clipped, so the model computes the same."""
        new, old = len(self.weight) // 2 - 1, len(weight) // 2 - 1
        rows = torch.arange(-new, new + 1).clamp(-old, old) + old
        return torch.cat((weight[rows], weight[-1:]))


# --------------------------------------------------------------------------------------------------
# A component of a positional scheme


class Component(nn.Module):
    """To add a scheme, subclass this, override some of its five hooks, and add a line to SCHEMES.
    A hook that is not overridden is not called.

    pos is a Positions. Pairs with a masked position (pos.masked_pairs) need a separate value, since
    their offset is meaningless. Weights of which each layer has its own are in self.layers, an
    nn.ModuleList or nn.ParameterList (see RelativeKeys); the pair head of objectives.py adds one.
    """

    scale_terms = 1  # q_i . k_j + scores_ij is divided by sqrt(scale_terms * D)
    scale_tokens = False  # multiply token embeddings by sqrt(C)
    masked_ok = True  # whether it can represent a masked position
    combinable = True  # whether it can be part of a sum
    needs_even = None  # "d_model" or "d_head" if that must be even

    def __init__(self, cfg: EncoderConfig):
        super().__init__()
        self.scale = (self.scale_terms * cfg.d_head) ** -0.5

    def embed(self, pos):
        """-> (1 or B, L, C), added to the token embeddings."""
        return 0

    def bias(self, pos):
        """-> (1 or B, H, L, L) logits of positions alone, computed once per forward pass and shared
        by all layers (and once more by the pair head of objectives.py)."""
        return 0

    def edit_qk(self, q, k, pos):
        """q, k (B, H, L, D) -> the same, changed, in every layer."""
        return q, k

    def scores(self, q, k, pos, layer):
        """q, k (B, H, L, D) before edit_qk -> (B, H, L, L) logits of tokens and positions together,
        scaled afterwards like q_i . k_j. layer: 0 to n_layer - 1, and n_layer for the pair head."""
        return 0

    def values(self, A, pos, layer):
        """A (B, H, L, L), the attention after dropout -> (B, H, L, D), added to A v."""
        return 0


# --------------------------------------------------------------------------------------------------
# The best-known schemes; the others are defined below the encoder, and SCHEMES at the end lists all


class Absolute(Component):
    """BERT: a learned vector per position, added to the token embedding (TUPE eq 3)."""

    def __init__(self, cfg):
        super().__init__(cfg)
        self.table = embedding(cfg.max_len + 1, cfg.d_model)  # the last row: masked

    def embed(self, pos):
        return self.table(pos.table_rows(self.table.num_embeddings - 1))


def frequencies(width, like, base=10000.0):
    """w_k = base^(-2k/width), k = 0 to width/2 - 1 (Vaswani 2017, sec 3.5), on the device of
    `like`. Not in 16 bits: angles near position 500 can be off by more than a radian (bfloat16)."""
    dtype = torch.promote_types(like.dtype, torch.float32)
    return base ** (-torch.arange(0, width, 2, device=like.device, dtype=dtype) / width)


def sinusoids(x, w):
    """Positions or offsets x (...), frequencies w (width/2,) -> (..., width), sines and cosines
    interleaved."""
    angles = x[..., None].to(w.dtype) * w  # (..., width/2)
    waves = torch.stack((angles.sin(), angles.cos()), dim=-1)  # (..., width/2, 2)
    return waves.flatten(-2)  # (..., width)


class Sinusoidal(Component):
    """Sines and cosines of the position with fixed frequencies.

    Token embeddings are multiplied by sqrt(C), as in Vaswani 2017 (deviation from Wang 2021): unit
    sinusoids would be 35 times as large as N(0, 0.02) token embeddings.
    """

    scale_tokens = True
    needs_even = "d_model"
    learned = False

    def __init__(self, cfg):
        super().__init__(cfg)
        self.masked = normal(cfg.d_model)
        self.w = nn.Parameter(frequencies(cfg.d_model, self.masked)) if self.learned else None

    def embed(self, pos):
        w = self.w if self.learned else frequencies(len(self.masked), self.masked)
        masked = (pos.ids == UNKNOWN_POS)[..., None]
        return torch.where(masked, self.masked, sinusoids(pos.ids, w))


# An (L, L, D) tensor is never built. For the keys, q_i . a_r is computed for all R rows of the
# table, and each pair gathers its value. For the values, the attention of each query is summed by
# offset, and the sums are multiplied by the table.


def offset_scores(q, a, pos):
    """q (B, H, L, D), a (R, D) or (H, R, D) -> q_i . a_r for each pair (B, H, L, L)."""
    scores = q @ a.to(q.dtype).transpose(-1, -2)  # (B, H, L, R)
    rows = pos.offset_rows(a.size(-2))[:, None]  # (1 or B, 1, L, L), 0 to R - 1
    rows = rows.expand(*scores.shape[:3], -1)  # (B, H, L, L)
    return scores.gather(-1, rows)


def offset_values(A, a, pos):
    """A (B, H, L, L), a (R, D) -> sum_j A_ij a_r for each query (B, H, L, D)."""
    zeros = A.new_zeros(*A.shape[:-1], len(a))  # (B, H, L, R)
    rows = pos.offset_rows(len(a))[:, None].expand_as(A)  # (B, H, L, L)
    by_offset = zeros.scatter_add(-1, rows, A)
    return by_offset @ a.to(A.dtype)


class Relative(Component):
    """A vector per offset, added to keys and values (Wang 2021 eq 5): one learned table for keys,
    values, heads and layers. (Shaw 2018 has separate vectors for keys and values.)

    s_ij = q_i . (k_j + a_r) / sqrt(D)        output_i = sum_j A_ij (v_j + a_r)
    """

    def __init__(self, cfg):
        super().__init__(cfg)
        self.table = OffsetTable(cfg, cfg.d_head)

    def scores(self, q, k, pos, layer):
        return offset_scores(q, self.table.weight, pos)

    def values(self, A, pos, layer):
        return offset_values(A, self.table.weight, pos)


def bias_from_table(table, index):
    """table (R, H), one scalar per head in each row; index (B, L, L), where B may be 1
    -> (B, H, L, L). (Not table[index]: its gradient is nondeterministic with several threads.)"""
    B, L, _ = index.shape
    scalars = table.t().expand(B, -1, -1)  # (B, H, R)
    index = index.view(B, 1, L * L).expand(-1, table.size(1), -1)  # (B, H, L L)
    return scalars.gather(-1, index).view(B, -1, L, L)


class T5Bias(Component):
    """A learned scalar per head and bucket of offsets, not scaled (TUPE eq 5). Rows 0 to 15 are
    for r <= 0, and 17 to 31 for r > 0: one for each distance up to 7, then eight for the four
    doublings up to 128 (t5_max_distance), two each. The last one, from 91 on, also has everything
    beyond."""

    def __init__(self, cfg):
        super().__init__(cfg)
        self.max_distance = cfg.t5_max_distance
        self.table = embedding(32 + 1, cfg.n_head)  # the last row: masked pairs
        doublings = math.log2(self.max_distance / 8)
        far = [8 + int(8 * math.log2(d / 8) / doublings) for d in range(8, self.max_distance)]
        self.bucket = nn.Buffer(torch.tensor([*range(8), *far]), persistent=False)

    def bias(self, pos):
        r = pos.offsets
        distance = r.abs().clamp(max=self.max_distance - 1)  # (1 or B, L, L)
        bucket = self.bucket[distance] + 16 * (r > 0)
        bucket = torch.where(pos.masked_pairs, 32, bucket)
        return bias_from_table(self.table.weight, bucket)


class Rotary(Component):
    """q and k rotated by their position, in pairs of neighboring dimensions (Su 2021). q_i . k_j
    then depends on the positions only through the offset r."""

    masked_ok = False  # no rotation represents a masked position
    needs_even = "d_head"

    def __init__(self, cfg):
        super().__init__(cfg)
        self.rope_base, self.rope_scale = cfg.rope_base, cfg.rope_scale

    @staticmethod
    @once
    def rotation(pos, width, base, scale, dtype):
        """-> cosines and sines of the angles w_k pos_i / scale, (1 or B, 1, L, width/2) each."""
        x = pos.ids.to(torch.promote_types(dtype, torch.float32)) / scale  # (1 or B, L)
        angles = x[..., None] * frequencies(width, x, base)  # (1 or B, L, width/2)
        return angles.cos().to(dtype)[:, None], angles.sin().to(dtype)[:, None]

    @staticmethod
    def rotate(x, cos, sin):
        even, odd = x[..., 0::2], x[..., 1::2]  # (B, H, L, D/2) each
        rotated = (even * cos - odd * sin, even * sin + odd * cos)
        return torch.stack(rotated, dim=-1).flatten(-2)  # (B, H, L, D/2, 2) -> (B, H, L, D)

    def edit_qk(self, q, k, pos):
        cos, sin = self.rotation(pos, q.size(-1), self.rope_base, self.rope_scale, q.dtype)
        return self.rotate(q, cos, sin), self.rotate(k, cos, sin)


class UntiedPositions(nn.Module):
    """What TUPE and bert_ad share: a table of position vectors p, its LayerNorm, and separate
    projections U_Q and U_K. All layers share it, so it adds about 2 C^2 parameters (TUPE sec
    3.3)."""

    def __init__(self, cfg):
        super().__init__()
        self.n_head, self.max_len = cfg.n_head, cfg.max_len
        self.table = embedding(cfg.max_len + 1, cfg.d_model)  # the last row: masked
        self.norm = nn.LayerNorm(cfg.d_model, eps=cfg.norm_eps)
        self.u_q = xavier_linear(cfg.d_model, cfg.d_model, bias=False)
        self.u_k = xavier_linear(cfg.d_model, cfg.d_model, bias=False)

    def project(self, p):
        """Vectors p (n, C) -> LN(p) U_Q and LN(p) U_K, (n, C) each."""
        p = self.norm(p)
        return self.u_q(p), self.u_k(p)

    def forward(self, pos):
        """-> p_i U_Q and p_j U_K at the assigned positions, (1 or B, H, L, D) each."""
        rows = pos.table_rows(self.max_len)  # (1 or B, L)
        # Projects the table's max_len + 1 vectors: a permuted batch would have B L of them.
        return [
            F.embedding(rows, p).unflatten(-1, (self.n_head, -1)).transpose(1, 2)
            for p in self.project(self.table.weight)
        ]


def reset_cls(v, theta):
    """TUPE eq 9. v (1 or B, H, L, L), theta (2, H): the row of [CLS] becomes theta_1, the rest of
    its column theta_2, so that attention from and to [CLS] does not depend on distance.

    theta_1 fills a whole row, so the softmax cancels it, and its gradient is 0. It is kept to match
    the paper.
    """
    theta_1, theta_2 = theta.unsqueeze(-1)  # (H, 1) each
    v = v.clone()
    v[..., 1:, 0] = theta_2  # [CLS] is index 0 and keeps its position
    v[..., 0, :] = theta_1  # including (0, 0)
    return v


class Tupe(Component):
    """TUPE (eq 10, 11): separate correlations of tokens and of positions, and [CLS] untied.

        s_ij = q_i . k_j / sqrt(2D) + reset(p_i U_Q . p_j U_K / sqrt(2D) + b_r)

    (p after a LayerNorm; b_r: tupe_r only, T5's bias; reset: reset_cls above.) In BERT, positions
    are added to the token embeddings, so its logits also contain two mixed terms, token-to-position
    and position-to-token (TUPE eq 6). TUPE drops both. `bias` below computes the
    position-to-position term; the token-to-token term q_i . k_j is the usual attention of each
    block.
    """

    combinable = False
    scale_terms = 2
    relative = None  # the class of b_r
    reset = True

    def __init__(self, cfg):
        super().__init__(cfg)
        self.positions = UntiedPositions(cfg)
        self.relative_bias = self.relative(cfg) if self.relative else None
        self.theta = normal(2, cfg.d_model) if self.reset else None  # p_t1, p_t2

    def bias(self, pos):
        # Dividing both terms by sqrt(2D) instead of sqrt(D) (here, and in dot_product_logits)
        # keeps the magnitude of their sum (TUPE sec 3.3), provided that the two are of similar
        # size. (With this initialization the positional term is larger at first.)
        p_q, p_k = self.positions(pos)  # (1 or B, H, L, D) each
        v = p_q @ p_k.transpose(-1, -2) * self.scale  # the paper's v_ij, (1 or B, H, L, L)
        if self.relative_bias is not None:
            v = v + self.relative_bias.bias(pos)
        if self.theta is None:
            return v
        # [CLS] is not part of the text, so its distance to other tokens means nothing. theta_1 and
        # theta_2 are computed from two learned vectors p_t as p_t U_Q . p_t U_K / sqrt(2D). They
        # replace T5's bias too (the released code resets the two parts separately: deviation).
        t_q, t_k = self.positions.project(self.theta)  # (2, C) each
        theta = (t_q * t_k).unflatten(-1, (v.size(1), -1)).sum(-1)  # (2, H)
        return reset_cls(v, theta * self.scale)


class TupeR(Tupe):
    relative = T5Bias


# --------------------------------------------------------------------------------------------------
# Mistakes in a new component: errors with its file and line


def located(method):
    """The name of a method with its file and line."""
    code = method.__code__
    return f"{method.__qualname__} ({code.co_filename}, line {code.co_firstlineno})"


def check_component(part):
    """Raise TypeError for mistakes in __init__ that would otherwise show late, or never."""
    where = located(type(part).__init__)
    if "scale" not in vars(part):
        raise TypeError(f"{where} does not call super().__init__(cfg)")
    for name, value in vars(part).items():
        for x in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(x, nn.Module) or isinstance(x, torch.Tensor) and x.requires_grad:
                raise TypeError(
                    f"{where}: self.{name} would not be trained; use nn.Parameter, nn.ModuleList "
                    "or nn.ParameterList"
                )


def call_hook(hook, *args):
    """hook(*args), where an error of torch, such as dtypes that differ, names the hook at its end
    (lib/config.py knows some errors by how they begin)."""
    try:
        return hook(*args)
    except RuntimeError as error:
        error.args = (f"{error}, in {located(hook)}",)
        raise


def compute_dtype(x):
    """The dtype that matrix multiplications use: autocast's if it is enabled, otherwise x's."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def check_result(hook, x, shape, like=None):
    """Raise an error that names the hook, with file and line, unless x is a number or a tensor
    (1 or B, *shape), has the dtype of `like` and, with --detect_anomaly, is finite."""
    if isinstance(x, (int, float)):
        return
    if not isinstance(x, torch.Tensor) or x.shape[1:] != shape:
        found = tuple(x.shape) if isinstance(x, torch.Tensor) else x
        expected = f"(1 or B, {', '.join(map(str, shape))})"
        raise TypeError(f"{located(hook)} returned {found} instead of a tensor {expected}")
    if like is not None and compute_dtype(x) != compute_dtype(like):
        raise TypeError(f"{located(hook)} returned {x.dtype} instead of {like.dtype}")
    if not torch.compiler.is_compiling() and torch.is_anomaly_enabled() and not x.isfinite().all():
        raise FloatingPointError(f"{located(hook)} returned a value that is not finite")


# --------------------------------------------------------------------------------------------------
# The sum of a scheme's components


def plus(a, b):
    """a + b, each a tensor or a number. Adding 0 would cost a pass over a tensor (B, H, L, L)."""
    for x, other in ((a, b), (b, a)):
        if not isinstance(x, torch.Tensor) and x == 0:
            return other
    return a + b


def sum_hooks(hooks, shape, *args, like=None):
    """The sum of what the hooks of a scheme's components return: a tensor (1 or B, *shape) with the
    dtype of `like`, or a number, 0 if there are no hooks."""
    total = 0
    for hook in hooks:
        term = call_hook(hook, *args)
        check_result(hook, term, shape, like)
        total = plus(total, term)
    return total


class PositionalScheme(nn.Module):
    """The sum of a scheme's components, hook by hook: the interface that Block and Encoder use."""

    def __init__(self, cfg: EncoderConfig):
        super().__init__()
        self.parts = nn.ModuleDict({c.__name__: c(cfg) for c in parse_pe(cfg.pe)})
        parts = list(self.parts.values())
        for part in parts:
            check_component(part)
        self.scale = parts[0].scale  # parse_pe has checked that it is the same for all
        self.token_scale = cfg.d_model**0.5 if any(part.scale_tokens for part in parts) else 1.0
        # The hooks that components override; the others are not called.
        self.embeds = [part.embed for part in parts if type(part).embed is not Component.embed]
        self.biases = [part.bias for part in parts if type(part).bias is not Component.bias]
        self.edits = [part.edit_qk for part in parts if type(part).edit_qk is not Component.edit_qk]
        self.scorers = [part.scores for part in parts if type(part).scores is not Component.scores]
        self.valuers = [part.values for part in parts if type(part).values is not Component.values]
        self.has_values = bool(self.valuers)
        self.n_head, self.d_model = cfg.n_head, cfg.d_model

    def embed(self, pos):
        """-> (1 or B, L, C), or 0 if no component overrides it."""
        return sum_hooks(self.embeds, (pos.ids.size(1), self.d_model), pos)

    def bias(self, pos):
        """-> (1 or B, H, L, L) or 0."""
        L = pos.ids.size(1)
        return sum_hooks(self.biases, (self.n_head, L, L), pos)

    def terms(self, q, k, pos, layer, bias):
        """-> q, k and `added`, a tensor (1 or B, H, L, L) or 0, such that the logits of one layer
        are scale q . k + added.

        q, k (B, H, L, D); layer 0 to n_layer - 1, and n_layer for the pair head; bias: what is
        added in every layer (Encoder.bias_and_mask)."""
        H, L = q.shape[1:3]
        scores = sum_hooks(self.scorers, (H, L, L), q, k, pos, layer, like=q)
        added = plus(self.scale * scores, bias)
        for edit in self.edits:
            edited = call_hook(edit, q, k, pos)
            if not isinstance(edited, tuple):
                found = type(edited).__name__
                raise TypeError(f"{located(edit)} returned {found} instead of q, k")
            for x in edited:
                check_result(edit, x, q.shape[1:], q)
            q, k = edited
        return q, k, added

    def values(self, A, pos, layer):
        """A (B, H, L, L) -> (B, H, L, D) or 0."""
        H, L = A.shape[1:3]
        return sum_hooks(self.valuers, (H, L, self.d_model // H), A, pos, layer, like=A)


# --------------------------------------------------------------------------------------------------
# The encoder


def dot_product_logits(q, k, added, scale):
    """q, k (B, H, L, D), added broadcastable to (B, H, L, L), or 0 -> (B, H, L, L)."""
    return plus((q * scale) @ k.transpose(-1, -2), added)


class Block(nn.Module):
    """A transformer layer: attention, then a feed-forward layer with exact GELU, each as
    x = LN(x + f(x)) (norm post, as in BERT) or x = x + f(LN(x)) (norm pre)."""

    def __init__(self, cfg: EncoderConfig, layer: int):
        super().__init__()
        self.layer, self.n_head, self.pre = layer, cfg.n_head, cfg.norm == "pre"
        self.dropout, self.attn_dropout = cfg.dropout, cfg.attn_dropout
        self.qkv = linear(cfg.d_model, 3 * cfg.d_model)
        self.out = linear(cfg.d_model, cfg.d_model)
        self.norm1 = nn.LayerNorm(cfg.d_model, eps=cfg.norm_eps)
        self.fc1 = linear(cfg.d_model, cfg.d_ff)
        self.fc2 = linear(cfg.d_ff, cfg.d_model)
        self.norm2 = nn.LayerNorm(cfg.d_model, eps=cfg.norm_eps)

    def normed_heads(self, x):
        """The block's input (B, L, C), to which norm pre applies its LayerNorm -> q, k, v,
        (B, H, L, D) each."""
        x = self.norm1(x) if self.pre else x
        x = self.qkv(x).unflatten(-1, (3, self.n_head, -1))  # (B, L, 3, H, D)
        return x.permute(2, 0, 3, 1, 4)  # (3, B, H, L, D)

    def attend(self, x, scheme, pos, bias):
        """Multi-head attention with the scheme's terms; arguments as in forward -> (B, L, C)."""
        B, L, C = x.shape
        q, k, v = self.normed_heads(x)
        q, k, added = scheme.terms(q, k, pos, self.layer, bias)  # logits = scale q . k + added
        p = self.attn_dropout if self.training else 0.0
        # On a GPU, SDPA's fused kernels never materialize the attention A. On a CPU, the explicit
        # softmax is faster; and `values` needs A.
        if x.device.type in SDPA_DEVICES and not scheme.has_values:
            # The softmax cancels a number, which is the same for all keys.
            mask = added if isinstance(added, torch.Tensor) else None
            y = F.scaled_dot_product_attention(q, k, v, mask, dropout_p=p, scale=scheme.scale)
        else:
            A = dot_product_logits(q, k, added, scheme.scale).softmax(-1)  # (B, H, L, L)
            A = F.dropout(A, p)
            y = A @ v  # (B, H, L, D)
            if scheme.has_values:
                y = y + scheme.values(A, pos, self.layer)
        return self.out(y.transpose(1, 2).reshape(B, L, C))  # (B, H, L, D) -> (B, L, C)

    def forward(self, x, scheme, pos, bias):
        """x (B, L, C); scheme: the PositionalScheme; pos: a Positions; bias: what
        Encoder.bias_and_mask returned, the same for all layers -> (B, L, C)."""
        attended = F.dropout(self.attend(x, scheme, pos, bias), self.dropout, self.training)
        x = x + attended if self.pre else self.norm1(x + attended)
        hidden = self.fc1(self.norm2(x) if self.pre else x)
        transformed = F.dropout(self.fc2(F.gelu(hidden)), self.dropout, self.training)
        return x + transformed if self.pre else self.norm2(x + transformed)


class Encoder(nn.Module):
    """Token (+ position) embedding -> LayerNorm -> dropout -> n_layer blocks (-> LayerNorm with
    norm pre). There are no segment embeddings (Wang 2021's BERT has them: deviation)."""

    def __init__(self, cfg: EncoderConfig):
        super().__init__()
        self.config = cfg
        self.tokenizer = None  # a tiktoken.Encoding, set by those who load or build a model
        padded_size = 64 * math.ceil(cfg.vocab_size / 64)  # faster matrix multiplication
        self.tok = embedding(padded_size, cfg.d_model)
        self.scheme = PositionalScheme(cfg)
        self.norm = nn.LayerNorm(cfg.d_model, eps=cfg.norm_eps)
        self.blocks = nn.ModuleList(Block(cfg, layer) for layer in range(cfg.n_layer))
        pre = cfg.norm == "pre"
        self.final_norm = nn.LayerNorm(cfg.d_model, eps=cfg.norm_eps) if pre else nn.Identity()

    def embed(self, tokens, pos):
        """tokens (B, L), Positions -> the input of the first block, before dropout (B, L, C)."""
        x = self.tok(tokens) * self.scheme.token_scale
        return self.norm((x + self.scheme.embed(pos)).to(x.dtype))

    def bias_and_mask(self, pos, pad, causal, dtype):
        """What all layers add to their logits: the scheme's bias, and -inf where padding or the
        causal mask (by index, not by position) forbids attention. Broadcastable to (B, H, L, L), or
        a number, 0 if there is nothing to add."""
        bias, L = self.scheme.bias(pos), pos.ids.size(1)
        forbidden = None if pad is None else pad[:, None, None, :]  # (B, 1, 1, L)
        if causal:
            future = torch.ones(L, L, dtype=torch.bool, device=pos.ids.device).triu(1)
            forbidden = future if forbidden is None else forbidden | future
        if forbidden is not None:
            bias = torch.where(forbidden, -math.inf, bias)
        if isinstance(bias, torch.Tensor):
            bias = bias.to(dtype).contiguous()  # as SDPA demands
        return bias

    def forward(self, tokens, pos=None, pad=None, causal=False, states=None):
        """Token ids -> the last hidden states (B, L, C).

        tokens   (B, L) int64, with [CLS] at index 0
        pos      positions (L,) or (B, L) int64, or a Positions; UNKNOWN_POS marks a masked one
                 (default: the index of each token)
        pad      (B, L) bool, True at padding
        causal   whether each token attends only to itself and to those before it
        states   a list to which the input of each block and what is returned are appended

        Raises ValueError if a sequence is longer than a position table.
        """
        states, pos = [] if states is None else states, Positions.of(tokens, pos)
        x = F.dropout(self.embed(tokens, pos), self.config.dropout, self.training)
        bias = self.bias_and_mask(pos, pad, causal, compute_dtype(x))
        for block in self.blocks:
            states.append(x)
            x = block(x, self.scheme, pos, bias)
        states.append(self.final_norm(x))
        return states[-1]

    def hidden_states(self, tokens, pos=None, pad=None, causal=False):
        """Arguments as in forward -> n_layer + 1 states (B, L, C): the input of each block, and
        what forward returns."""
        states = []
        self(tokens, pos, pad, causal, states)
        return states

    def logits(self, q, k, pos, layer, pad=None, causal=False):
        """Attention logits before the softmax. q, k (B, H, L, D); pos (L,), (B, L) or a Positions;
        layer 0 to n_layer - 1, or n_layer for objectives.PairHead -> (B, H, L, L)."""
        pos = pos if isinstance(pos, Positions) else Positions(pos)
        bias = self.bias_and_mask(pos, pad, causal, q.dtype)
        q, k, added = self.scheme.terms(q, k, pos, layer, bias)
        return dot_product_logits(q, k, added, self.scheme.scale)

    @torch.no_grad()
    def attention(self, tokens, layer=0, pos=None, pad=None, causal=False):
        """Attention probabilities of one block with dropout off; layer may be negative (-1: the
        last) -> (B, H, L, L)."""
        block, pos = self.blocks[layer], Positions.of(tokens, pos)
        modes = {module: module.training for module in self.modules()}
        try:
            states = self.eval().hidden_states(tokens, pos, pad, causal)
            q, k, _ = block.normed_heads(states[block.layer])
            return self.logits(q, k, pos, block.layer, pad, causal).softmax(-1)
        finally:
            for module, training in modes.items():
                module.training = training

    def add_layer(self):
        """Add the pair head's own weights to the components that have weights per layer: what they
        create for one more layer."""
        larger = PositionalScheme(replace(self.config, n_layer=self.config.n_layer + 1))
        larger.to(self.tok.weight)  # its device and dtype
        for part, more in zip(self.scheme.parts.values(), larger.parts.values()):
            if len(getattr(part, "layers", ())) == self.config.n_layer:
                part.layers.append(more.layers[-1])
            shapes, expected = ({n: p.shape for n, p in x.named_parameters()} for x in (part, more))
            if shapes != expected:
                raise TypeError(
                    f"{located(type(part).__init__)}: weights that differ between layers belong in "
                    "self.layers, an nn.ModuleList or nn.ParameterList; the pair head adds one"
                )

    def keep_offsets(self, weights, prefix=""):
        """A state_dict, perhaps of another max_offset -> one with this encoder's number of offsets
        (OffsetTable.resized). prefix: of the encoder's names in it."""
        weights = dict(weights)
        for name, module in self.named_modules(prefix=prefix):
            if isinstance(module, OffsetTable) and f"{name}.weight" in weights:
                weights[f"{name}.weight"] = module.resized(weights[f"{name}.weight"])
        return weights


def load(path, **override) -> Encoder:
    """A run folder or checkpoint file -> Encoder in eval mode, with `.config` and `.tokenizer`.
    `override` replaces fields of the configuration (dropout=0.0, max_offset=128). Raises
    RuntimeError if the weights do not fit. (A run of clm was trained with causal=True, which
    forward must be given.)"""
    import tiktoken

    path = Path(path)
    file = path / "ckpt.pt" if path.is_dir() else path
    checkpoint = torch.load(file, map_location="cpu", weights_only=True)
    cfg = EncoderConfig(**{**checkpoint["config"], **override})
    encoder = Encoder(cfg)
    encoder.tokenizer = tiktoken.Encoding(**checkpoint["tokenizer"])
    weights = checkpoint["model"].items()
    weights = {k.removeprefix("encoder."): v for k, v in weights if k.startswith("encoder.")}
    if weights.keys() - encoder.state_dict().keys():
        encoder.add_layer()  # the pair head's
    encoder.load_state_dict(encoder.keep_offsets(weights))
    return encoder.eval()


# --------------------------------------------------------------------------------------------------
# The other schemes


class NoPositions(Component):
    combinable = False


class LearnedSinusoidal(Sinusoidal):
    learned = True


class RelativeKeys(Component):
    """Relative for keys only, with one table per layer (TUPE eq 4)."""

    def __init__(self, cfg):
        super().__init__(cfg)
        self.layers = nn.ModuleList(OffsetTable(cfg, cfg.d_head) for _ in range(cfg.n_layer))

    def scores(self, q, k, pos, layer):
        return offset_scores(q, self.layers[layer].weight, pos)


def offset_sinusoids(max_offset, w, masked):
    """Frequencies w (width/2,), a vector for pairs with a masked position (width,) -> a (R, width),
    the sinusoids of the offsets -max_offset to max_offset, and that vector."""
    r = torch.arange(-max_offset, max_offset + 1, device=w.device)
    return torch.cat((sinusoids(r, w), masked[None]))


class RelativeSinusoidal(Component):
    """rel with sinusoids of the signed offset r (deviation: NEZHA's code takes those of r + 64)."""

    needs_even = "d_head"
    learned = False

    def __init__(self, cfg):
        super().__init__(cfg)
        self.max_offset = cfg.max_offset
        self.masked = normal(cfg.d_head)
        self.w = nn.Parameter(frequencies(cfg.d_head, self.masked)) if self.learned else None

    def vectors(self):
        """-> a (R, D)."""
        w = self.w if self.learned else frequencies(len(self.masked), self.masked)
        return offset_sinusoids(self.max_offset, w, self.masked)

    def scores(self, q, k, pos, layer):
        return offset_scores(q, self.vectors(), pos)

    def values(self, A, pos, layer):
        return offset_values(A, self.vectors(), pos)


class LearnedRelativeSinusoidal(RelativeSinusoidal):
    learned = True


class TransformerXL(Component):
    """Sinusoids of the offset, projected in each layer, and learned vectors u and v of each head,
    which give a key and an offset a logit of their own, whatever the query is (Dai et al. 2019,
    XLNet; deviation: offsets are clipped to max_offset).

    s_ij = ((q_i + u) . k_j + (q_i + v) . a_r W) / sqrt(D)
    """

    needs_even = "d_model"

    def __init__(self, cfg):
        super().__init__(cfg)
        self.max_offset, C = cfg.max_offset, cfg.d_model
        self.masked = normal(C)
        self.u, self.v = normal(cfg.n_head, 1, cfg.d_head), normal(cfg.n_head, 1, cfg.d_head)
        self.layers = nn.ModuleList(linear(C, C, bias=False) for _ in range(cfg.n_layer))  # W

    def scores(self, q, k, pos, layer):
        w = frequencies(len(self.masked), self.masked)
        a = self.layers[layer](offset_sinusoids(self.max_offset, w, self.masked))  # (R, C)
        a = a.unflatten(-1, (q.size(1), -1)).transpose(0, 1)  # (H, R, D)
        of_key = self.u.to(k.dtype) @ k.transpose(-1, -2)  # (B, H, 1, L)
        return of_key + offset_scores(q + self.v.to(q.dtype), a, pos)


class Deberta(Component):
    """Content-to-position and position-to-content terms (He 2021), projected in each layer:

    s_ij = (q_i . k_j + q_i . a_r U_K + k_j . a_-r U_Q) / sqrt(3D)

    We follow the paper's equation; its code uses a_r in both terms.
    """

    combinable = False
    scale_terms = 3

    def __init__(self, cfg):
        super().__init__(cfg)
        self.table = OffsetTable(cfg, cfg.d_model)
        C = cfg.d_model
        self.layers = nn.ModuleList(  # U_K and U_Q of each layer
            linear(C, 2 * C, bias=False) for _ in range(cfg.n_layer)
        )

    def scores(self, q, k, pos, layer):
        a = self.layers[layer](self.table.weight)  # (R, 2C)
        a_k, a_q = a.unflatten(-1, (2, q.size(1), -1)).permute(1, 2, 0, 3)  # (H, R, D) each
        content_to_position = offset_scores(q, a_k, pos)  # (B, H, L, L)
        # Cell (j, i) of the gathered tensor has the offset from j to i, which is -r. Transposed, it
        # is the term of the pair (i, j).
        position_to_content = offset_scores(k, a_q, pos).transpose(-1, -2)
        return content_to_position + position_to_content


class FactoredBias(Component):
    """b_r = (a_r F_Q) . (a_r F_K) per head (TUPE sec 5, a failed attempt)."""

    def __init__(self, cfg):
        super().__init__(cfg)
        self.n_head = cfg.n_head
        self.table = OffsetTable(cfg, cfg.d_model)
        self.f_q = xavier_linear(cfg.d_model, cfg.d_model, bias=False)
        self.f_k = xavier_linear(cfg.d_model, cfg.d_model, bias=False)

    def bias(self, pos):
        a = self.table.weight
        b = self.f_q(a) * self.f_k(a)  # (R, C)
        b = b.unflatten(-1, (self.n_head, -1)).sum(-1)  # (R, H)
        return bias_from_table(b, pos.offset_rows(len(a)))


class Alibi(Component):
    """-slope_h |r|, symmetric, for an encoder, with the published slopes for any H (Press 2021)."""

    reverse = False

    def __init__(self, cfg):
        super().__init__(cfg)
        self.masked = normal(cfg.n_head)

    def slopes(self):
        """-> (H,): 2^(-8(h + 1)/n) for h < n, the largest power of two up to H. The other heads get
        those slopes of 2n heads that lie in between, from the largest on."""
        H, dtype = len(self.masked), torch.promote_types(self.masked.dtype, torch.float32)
        n = 2 ** int(math.log2(H))
        h = torch.arange(H, device=self.masked.device, dtype=dtype)
        return 2.0 ** (-8 / n * torch.where(h < n, h + 1, h - n + 0.5))

    def bias(self, pos):
        slopes, masked = self.slopes()[:, None, None], self.masked[:, None, None]  # (H, 1, 1)
        offsets = pos.offsets[:, None]  # (1 or B, 1, L, L)
        if self.reverse:
            slopes = torch.where(offsets > 0, slopes.flip(0), slopes)  # (1 or B, H, L, L)
        return torch.where(pos.masked_pairs[:, None], masked, -slopes * offsets.abs())


class AlibiNonsymmetric(Alibi):
    """For tokens to the right, the heads have the slopes in reverse order, so that a head leans to
    one side and can tell left from right."""

    reverse = True


class TupeATieCls(Tupe):
    reset = False


class TupeRTieCls(TupeR):
    reset = False


class TupeRFactored(Tupe):
    relative = FactoredBias


class TupeFree(Component):
    """TUPE-A with a free table instead of p_i U_Q . p_j U_K / sqrt(2D) (TUPE sec 5: it failed)."""

    combinable = False
    scale_terms = 2

    def __init__(self, cfg):
        super().__init__(cfg)
        # The last row and the last column are for masked positions.
        self.table = normal(cfg.n_head, cfg.max_len + 1, cfg.max_len + 1)
        self.theta = normal(2 * cfg.n_head)  # one dimension: no weight decay

    def bias(self, pos):
        H, n, _ = self.table.shape
        row = pos.table_rows(n - 1)
        cell = row[:, :, None] * n + row[:, None, :]  # (1 or B, L, L)
        v = bias_from_table(self.table.view(H, n * n).t(), cell)  # (1 or B, H, L, L)
        return reset_cls(v, self.theta.view(2, H))


class T5UntieCls(Component):
    """T5's bias with [CLS] untied (TUPE sec 3.2: "can be widely applied"); theta: free scalars."""

    combinable = False

    def __init__(self, cfg):
        super().__init__(cfg)
        self.relative_bias = T5Bias(cfg)
        self.theta = normal(2 * cfg.n_head)

    def bias(self, pos):
        return reset_cls(self.relative_bias.bias(pos), self.theta.view(2, -1))


class BertAD(Component):
    """BERT-A^d (TUPE sec 4.3): all four terms of tokens and positions, with separate projections
    for positions."""

    combinable = False
    scale_terms = 4

    def __init__(self, cfg):
        super().__init__(cfg)
        self.positions = UntiedPositions(cfg)

    def edit_qk(self, q, k, pos):
        p_q, p_k = self.positions(pos)
        return q + p_q, k + p_k


# Every name of --pe, and the components that it sums.
# fmt: off
SCHEMES = {
    "none": [NoPositions], "abs": [Absolute], "bert_a": [Absolute],
    "sin": [Sinusoidal], "lsin": [LearnedSinusoidal], "rel": [Relative], "rel_k": [RelativeKeys],
    "rsin": [RelativeSinusoidal], "rlsin": [LearnedRelativeSinusoidal],
    "abs+rel": [Absolute, Relative], "abs+rsin": [Absolute, RelativeSinusoidal],
    "abs+rlsin": [Absolute, LearnedRelativeSinusoidal],
    "lsin+rel": [LearnedSinusoidal, Relative], "lsin+rsin": [LearnedSinusoidal, RelativeSinusoidal],
    "lsin+rlsin": [LearnedSinusoidal, LearnedRelativeSinusoidal],
    "t5": [T5Bias], "abs+t5": [Absolute, T5Bias], "bert_r": [Absolute, T5Bias],
    "bert_ad": [BertAD], "tupe_a": [Tupe], "tupe_r": [TupeR],
    "tupe_a_tie_cls": [TupeATieCls], "tupe_r_tie_cls": [TupeRTieCls],
    "t5_untie_cls": [T5UntieCls], "bert_r_untie_cls": [Absolute, T5UntieCls],
    "tupe_a_free": [TupeFree], "tupe_r_factored": [TupeRFactored], "deberta": [Deberta],
    "xl": [TransformerXL], "rope": [Rotary], "alibi": [Alibi], "alibi_ns": [AlibiNonsymmetric],
}
# fmt: on
PE_NAMES = list(SCHEMES)


def parse_pe(pe: str) -> list:
    """'abs+t5' -> [Absolute, T5Bias]. Raises ValueError, with the reason, if the sum is not
    legal."""
    names, components = [pe] if pe in SCHEMES else pe.split("+"), []
    for name in names:
        if name not in SCHEMES:
            raise ValueError(
                f"unknown --pe {name!r}; choose from {', '.join(PE_NAMES)}, or a sum such as "
                "rope+t5 (a new class needs a line in SCHEMES in model.py)"
            )
        for component in SCHEMES[name]:
            if len(names) > 1 and not component.combinable:
                raise ValueError(f"--pe {pe}: {name} cannot be part of a sum: it is a whole scheme")
            if component in components:
                raise ValueError(f"--pe {pe}: {name} repeats a part of the sum")
            components.append(component)
    if len({component.scale_terms for component in components}) > 1:
        raise ValueError(f"--pe {pe}: its parts divide q . k by different scales")
    return components
