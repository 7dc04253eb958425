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

An attention logit is    s_ij = q_i . k_j / sqrt(t D) + scores_ij + bias_ij,    t = scale_terms
where t is 1, for tupe_* 2, deberta 3, bert_ad 4. A scheme is a sum of components, and a component
overrides some of five hooks, nothing else:

    embed    adds to the input              scores    adds logits of words and places together
    bias     adds logits of places alone    values    adds to what attention puts out
    edit_qk  changes queries and keys

name (--pe)         from            hooks          what it does
none                P3              -              nothing: a bag of words
abs, bert_a         P1 eq 3, P3     embed          x_i + p_i, a learned table
sin                 Vaswani 2017    embed          x_i + [sin w_k i, cos w_k i], w_k = 10000^(-2k/C)
lsin                P3              embed          the same with w learned
rel                 Shaw 2018, P3   scores values  q_i . (k_j + a_r) / sqrt(D); output
                                                   sum_j A_ij (v_j + a_r)
rel_k               P1 eq 4         scores         the key term alone, a table a layer
rsin, rlsin         NEZHA, P3       scores values  rel with a = sinusoids of the signed offset, w
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
deberta             He 2021         scores         (q_i . k_j + q_i . a_r W_K + k_j . a_-r W_Q)
                                                   / sqrt(3D), W_K and W_Q a layer
rope                Su 2021         edit_qk        q, k rotated by position
alibi               Press 2021      bias           -slope_h |r|

and the sums of P3: abs+rel, abs+rsin, abs+rlsin, lsin+rel, lsin+rsin, lsin+rlsin. Any other sum
works too if no two parts use the same hook and none is marked `alone`: rope+t5, abs+alibi,
sin+rel_k.
"""

import math
from dataclasses import asdict, dataclass

import tiktoken
import torch
import torch.nn as nn
import torch.nn.functional as F

import fast
from common import check_settings, read_checkpoint, setting

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
    norm: str = setting("post", "LayerNorm after each sum, as in BERT, or before", ("post", "pre"))

    def __post_init__(self):
        check_settings(self)
        if self.d_model % self.n_head:
            raise ValueError(
                f"--d_model {self.d_model} is not a multiple of --n_head {self.n_head}"
            )
        for name, component in parse_pe(self.pe).items():
            width = component.even
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
# Positions


class Positions:
    """Where the tokens of a batch claim to stand: what every hook is given as `pos`.

    ids (1 or B, L) int64: their positions, UNKNOWN_POS for a hidden one. in_order: are they 0 ..
    L-1? Then tables of offsets are read faster.
    """

    def __init__(self, ids, in_order=False):
        self.ids = torch.atleast_2d(ids)  # (L,) -> (1, L), one for all rows
        self.in_order, self._pairs = in_order, None
        self.bias = None  # the scheme's, made once, for all layers and for the pair head

    @property
    def offsets(self):
        """(1 or B, L, L): r_ij = pos_j - pos_i, key minus query, as in P3's eq 5."""
        return self.ids[:, None, :] - self.ids[:, :, None]

    @property
    def hidden(self):
        """(1 or B, L, L) bool: i != j and at least one end hidden. A token's pair with itself is
        never hidden: its offset is 0."""
        unknown = self.ids == UNKNOWN_POS
        diagonal = torch.eye(unknown.size(1), dtype=torch.bool, device=unknown.device)
        return (unknown[:, None, :] | unknown[:, :, None]) & ~diagonal

    def places(self, max_len: int):
        """(1 or B, L): rows of a table of max_len positions and, last, the unknown.

        Raises ValueError on rows longer than the table. The values, which must be below max_len,
        are not looked at: a GPU would have to be waited for.
        """
        if self.ids.size(1) > max_len:
            raise ValueError(
                f"a row of {self.ids.size(1)} tokens, but the position table ends at {max_len} "
                "(sin, lsin and the schemes of offsets alone go on beyond it)"
            )
        return torch.where(self.ids == UNKNOWN_POS, max_len, self.ids)

    @property
    def pairs(self):
        """Which row of a table of offsets belongs to which pair; made once, for all layers."""
        if self._pairs is None and self.in_order:
            self._pairs = fast.InOrder(self.ids.size(1), MAX_OFFSET)  # the same, faster
        elif self._pairs is None:
            self._pairs = Pairs(self)
        return self._pairs


class Pairs:
    """A table of offsets has a row r + 64 for each clipped offset r, and a last one for hidden
    pairs. index (1 or B, L, L): each pair's row."""

    def __init__(self, pos):
        clipped = pos.offsets.clamp(-MAX_OFFSET, MAX_OFFSET) + MAX_OFFSET
        self.index = torch.where(pos.hidden, 2 * MAX_OFFSET + 1, clipped)

    def rows(self, table):
        """The table in the form that pick and add_up index: unchanged, (R, ..)."""
        return table

    def pick(self, x):
        """(B, H, L, R) -> (B, H, L, L): for each pair the entry of its row."""
        index = self.index[:, None].expand(x.size(0), x.size(1), -1, -1)
        return x.gather(-1, index)

    def add_up(self, A, n_rows):
        """(B, H, L, L) -> (B, H, L, R): the sum over j of the pairs that share a row."""
        zeros = A.new_zeros(*A.shape[:-1], n_rows)
        return zeros.scatter_add(-1, self.index[:, None].expand_as(A), A)


def a_head_each(table, index):
    """table (R, H), a number for each head in each row; index (B, L, L), each pair's row
    -> (B, H, L, L)."""
    B, L, _ = index.shape
    numbers = table.t().expand(B, -1, -1)  # (B, H, R)
    index = index.view(B, 1, L * L).expand(-1, table.size(1), -1)  # (B, H, L L)
    return numbers.gather(-1, index).view(B, -1, L, L)


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

    With N(0, 0.02) the product of two such small numbers would start near 0, and the pair head
    learn late (departure; tupe_a would not: results/control.jsonl).
    """


# --------------------------------------------------------------------------------------------------
# Components


class Component(nn.Module):
    """To add a scheme, subclass this, override some of its five hooks, and add a line to SCHEMES.

    pos is a Positions; pairs with a hidden end (pos.hidden) want a value of their own: their offset
    would be nonsense.
    """

    scale_terms = 1  # content logits are divided by sqrt(scale_terms * D)
    scale_tokens = False  # multiply token embeddings by sqrt(C)
    hidden_ok = True  # can it express an unknown position?
    alone = False  # must it stand alone, outside any sum?
    even = None  # a width that must be even: "d_model" or "d_head"

    def __init__(self, cfg: EncoderConfig):
        super().__init__()
        self.scale = (self.scale_terms * cfg.d_head) ** -0.5

    def embed(self, pos):
        """-> (1 or B, L, C), added to the token embedding."""

    def bias(self, pos):
        """-> (1 or B, H, L, L) logits without words, made once for all layers (and the pair
        head)."""

    def edit_qk(self, q, k, pos):
        """q, k (B, H, L, D) -> the same, edited, in every layer."""

    def scores(self, q, k, pos, layer):
        """-> (B, H, L, L) logits of words and places together, in every layer. q, k (B, H, L, D)
        are the words', not edited; q is divided by sqrt(scale_terms D) already, as in q_i . k_j. A
        term without q is multiplied by self.scale. layer: see weights_of."""

    def values(self, A, pos, layer):
        """A (B, H, L, L), the attention -> (B, H, L, D), added to A v."""

    def layer_weights(self, cfg):
        """-> a module of what one layer has of its own, where layers differ. The pair head, which
        is one more layer, has one too."""

    def weights_of(self, layer, layers):
        """Those of a layer, given by its number, or by its weights themselves (the pair head)."""
        return layers[layer] if isinstance(layer, int) else layer


HOOKS = ("embed", "bias", "edit_qk", "scores", "values")


class NoPositions(Component):
    alone = True


class Absolute(Component):
    """A learned vector per position, added to the input (P1 eq 3)."""

    def __init__(self, cfg):
        super().__init__(cfg)
        self.table = nn.Embedding(cfg.max_len + 1, cfg.d_model)

    def embed(self, pos):
        return self.table(pos.places(self.table.num_embeddings - 1))


class Sinusoidal(Component):
    """Sines and cosines of the position, at fixed frequencies.

    Token embeddings are scaled by sqrt(C) (departure: unit sinusoids would drown N(0, .02) tokens
    35 to 1).
    """

    scale_tokens = True
    even = "d_model"
    learned = False

    def __init__(self, cfg):
        super().__init__(cfg)
        self.unknown = normal(cfg.d_model)
        w = frequencies(cfg.d_model)
        self.w = nn.Parameter(w) if self.learned else nn.Buffer(w)

    def embed(self, pos):
        unknown = (pos.ids == UNKNOWN_POS)[..., None]
        return torch.where(unknown, self.unknown, sinusoids(pos.ids, self.w))


class LearnedSinusoidal(Sinusoidal):
    learned = True


class Relative(Component):
    """Keys and values know the offset (Shaw 2018, P3), by one learned table for heads and layers:

    s_ij = q_i . (k_j + a_r) / sqrt(D)        output_i = sum_j A_ij (v_j + a_r)
    """

    def __init__(self, cfg):
        super().__init__(cfg)
        self.table = nn.Embedding(2 * MAX_OFFSET + 2, cfg.d_head)

    def vectors(self, layer):
        """a (R, D): row r + 64 for offset r, clipped, the last row for a hidden one."""
        return self.table.weight

    # Never an (L, L, D) tensor: q_i . a_r for all R rows of the table, then each pair picks its
    # own; and first the weight that each i gives to each offset, then its product with the table.

    def scores(self, q, k, pos, layer):
        a = pos.pairs.rows(self.vectors(layer)).to(q.dtype)
        return pos.pairs.pick(q @ a.t())  # (B, H, L, R) -> (B, H, L, L)

    def values(self, A, pos, layer):
        a = pos.pairs.rows(self.vectors(layer)).to(A.dtype)
        return pos.pairs.add_up(A, len(a)) @ a  # (B, H, L, R) @ (R, D)


class RelativeKeys(Relative):
    """Key side only, a table a layer (P1 eq 4)."""

    values = Component.values  # not used

    def __init__(self, cfg):
        Component.__init__(self, cfg)
        self.tables = nn.ModuleList(self.layer_weights(cfg) for _ in range(cfg.n_layer))

    def layer_weights(self, cfg):
        return nn.Embedding(2 * MAX_OFFSET + 2, cfg.d_head)

    def vectors(self, layer):
        return self.weights_of(layer, self.tables).weight


class RelativeSinusoidal(Relative):
    """rel with sinusoids of the signed offset (NEZHA takes the shifted index: departure)."""

    even = "d_head"
    learned = False

    def __init__(self, cfg):
        Component.__init__(self, cfg)
        self.unknown = normal(1, cfg.d_head)
        w = frequencies(cfg.d_head)
        self.w = nn.Parameter(w) if self.learned else nn.Buffer(w)

    def vectors(self, layer):
        r = torch.arange(-MAX_OFFSET, MAX_OFFSET + 1, device=self.w.device)
        return torch.cat((sinusoids(r, self.w), self.unknown))  # (2*64 + 2, D)


class LearnedRelativeSinusoidal(RelativeSinusoidal):
    learned = True


class Deberta(Component):
    """Words look for places and places for words (He 2021), each layer with projections of its own:

    s_ij = (q_i . k_j + q_i . a_r W_K + k_j . a_-r W_Q) / sqrt(3D)

    The paper's equation; its code takes a_r in both terms (departure).
    """

    alone = True
    scale_terms = 3

    def __init__(self, cfg):
        super().__init__(cfg)
        self.table = nn.Embedding(2 * MAX_OFFSET + 2, cfg.d_model)
        self.layers = nn.ModuleList(self.layer_weights(cfg) for _ in range(cfg.n_layer))

    def layer_weights(self, cfg):
        return nn.Linear(cfg.d_model, 2 * cfg.d_model, bias=False)  # W_K and W_Q

    def scores(self, q, k, pos, layer):
        a = self.weights_of(layer, self.layers)(pos.pairs.rows(self.table.weight))  # (R, 2C)
        a_k, a_q = a.unflatten(-1, (2, q.size(1), -1)).permute(1, 2, 3, 0)  # (H, D, R) each
        to_places = pos.pairs.pick(q @ a_k)  # (B, H, L, R) -> (B, H, L, L)
        from_places = pos.pairs.pick(k * self.scale @ a_q)  # [j, i]: the offset from j to i is -r
        return to_places + from_places.transpose(-1, -2)


class T5Bias(Component):
    """A learned scalar per head and bucket of the offset (P1 eq 5), not scaled."""

    def __init__(self, cfg):
        super().__init__(cfg)
        self.table = nn.Embedding(T5_BUCKETS + 1, cfg.n_head)

    def bias(self, pos):
        bucket = torch.where(pos.hidden, T5_BUCKETS, t5_bucket(pos.offsets))  # (1 or B, L, L)
        return a_head_each(self.table.weight, bucket)


class FactoredBias(Component):
    """b_r = (a_r F_Q) . (a_r F_K) per head (P1 sec 5, a failed attempt)."""

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
        return a_head_each(b, Pairs(pos).index)


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
        distance = pos.offsets.abs()[:, None]  # (B, 1, L, L)
        bias = -self.slopes * distance.to(self.slopes.dtype)  # (B, H, L, L)
        return torch.where(pos.hidden[:, None], self.unknown, bias)


class Rotary(Component):
    """q and k rotated by their position, pairs interleaved, base 10000 (Su 2021): q_i . k_j then
    depends on j - i."""

    hidden_ok = False  # no rotation stands for "unknown"
    even = "d_head"

    def __init__(self, cfg):
        super().__init__(cfg)
        self.w = nn.Buffer(frequencies(cfg.d_head))

    def edit_qk(self, q, k, pos):
        angles = pos.ids[..., None].to(self.w.dtype) * self.w  # (B, L, D/2)
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
        rows = pos.places(self.max_len)
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
    row, column = theta.unsqueeze(-1)  # (H, 1) each
    v = v.clone(memory_format=torch.contiguous_format)
    v[..., 1:, 0] = column  # [CLS] is index 0
    v[..., 0, :] = row  # (0, 0) too
    return v


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
    relative = None  # what makes b_r
    reset = True

    def __init__(self, cfg):
        super().__init__(cfg)
        self.positions = UntiedTable(cfg, extra_rows=2 if self.reset else 0)
        self.offsets = self.relative(cfg) if self.relative else None

    def bias(self, pos):
        # Each position has a vector p_i. Two matrices, U_Q and U_K, project all of them, and no
        # word ever passes through these. Dividing both terms by sqrt(2D), not sqrt(D), keeps the
        # size of their sum (P1 sec 3.3), if both are of about the same size. At the start they are
        # not: with these weights places are the larger.
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


class TupeR(Tupe):
    relative = T5Bias


class TupeATieCls(Tupe):
    reset = False


class TupeRTieCls(TupeR):
    reset = False


class TupeRFactored(Tupe):
    relative = FactoredBias


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
        row = pos.places(T - 1)
        cell = row[:, :, None] * T + row[:, None, :]  # (1 or B, L, L)
        return reset_cls(a_head_each(self.table.view(H, T * T).t(), cell), self.theta)


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


# Every name of --pe, in the order of the table above: the components that it adds up.
SCHEMES = {
    "none": [NoPositions],
    "abs": [Absolute],
    "bert_a": [Absolute],
    "sin": [Sinusoidal],
    "lsin": [LearnedSinusoidal],
    "rel": [Relative],
    "rel_k": [RelativeKeys],
    "rsin": [RelativeSinusoidal],
    "rlsin": [LearnedRelativeSinusoidal],
    "abs+rel": [Absolute, Relative],
    "abs+rsin": [Absolute, RelativeSinusoidal],
    "abs+rlsin": [Absolute, LearnedRelativeSinusoidal],
    "lsin+rel": [LearnedSinusoidal, Relative],
    "lsin+rsin": [LearnedSinusoidal, RelativeSinusoidal],
    "lsin+rlsin": [LearnedSinusoidal, LearnedRelativeSinusoidal],
    "t5": [T5Bias],
    "abs+t5": [Absolute, T5Bias],
    "bert_r": [Absolute, T5Bias],
    "bert_ad": [BertAD],
    "tupe_a": [Tupe],
    "tupe_r": [TupeR],
    "tupe_a_tie_cls": [TupeATieCls],
    "tupe_r_tie_cls": [TupeRTieCls],
    "t5_untie_cls": [T5UntieCls],
    "bert_r_untie_cls": [Absolute, T5UntieCls],
    "tupe_a_free": [TupeFree],
    "tupe_r_factored": [TupeRFactored],
    "deberta": [Deberta],
    "rope": [Rotary],
    "alibi": [Alibi],
}
PE_NAMES = list(SCHEMES)


def used_hooks(component):
    return [hook for hook in HOOKS if getattr(component, hook) is not getattr(Component, hook)]


def parse_pe(pe: str) -> dict:
    """'bert_r' -> {'abs': Absolute, 't5': T5Bias}. Raises ValueError, with the reason, on what is
    not legal; names in SCHEMES always are."""
    components, parts, owner = [], {}, {}
    for name in [pe] if pe in SCHEMES else pe.split("+"):
        if name not in SCHEMES:
            raise ValueError(
                f"unknown pe {name!r}; choose from {', '.join(PE_NAMES)}, or a sum such as rope+t5"
            )
        components += SCHEMES[name]
    # A component is called by the first name that it has alone.
    name_of = {sums[0]: name for name, sums in reversed(SCHEMES.items()) if len(sums) == 1}
    for component in components:
        name = name_of[component]
        parts[name] = component
        if pe in SCHEMES:
            continue
        if component.alone:
            raise ValueError(f"pe {pe}: {name} stands alone, it cannot be part of a sum")
        for hook in used_hooks(component):
            if hook in owner:
                raise ValueError(
                    f"pe {pe}: {owner[hook]} and {name} both use the hook {hook!r}; a sum may use "
                    "each hook once"
                )
            owner[hook] = name
    return parts


class PositionalScheme(nn.Module):
    """The sum of a scheme's components."""

    def __init__(self, cfg: EncoderConfig):
        super().__init__()
        parts = {name: component(cfg) for name, component in parse_pe(cfg.pe).items()}
        self.parts = nn.ModuleDict(parts)
        self.part_with = dict.fromkeys(HOOKS)  # hook -> the one part that uses it, or None
        for part in parts.values():
            for hook in used_hooks(type(part)):
                self.part_with[hook] = part
        self.scale = min(part.scale for part in parts.values())
        scaled = any(part.scale_tokens for part in parts.values())
        self.token_scale = cfg.d_model**0.5 if scaled else 1.0
        self.hidden_ok = all(part.hidden_ok for part in parts.values())
        self.in_logits = any(self.part_with[hook] for hook in HOOKS if hook != "embed")

    def layer_weights(self, cfg):
        """-> what one more layer, the pair head, has of its own, or None."""
        part = self.part_with["scores"]
        return part.layer_weights(cfg) if part else None

    def bias_and_mask(self, pos, pad, causal, dtype):
        """What is added to the logits of every layer: the scheme's bias, and -inf where pad or
        causal forbid to look -> (1 or B, 1 or H, L, L), (L, L) of causal alone, or None."""
        masked = None
        if self.part_with["bias"] and pos.bias is None:
            pos.bias = self.part_with["bias"].bias(pos)
        bias = pos.bias
        if pad is not None:
            masked = pad[:, None, None, :]  # (B, 1, 1, L)
        L, device = pos.ids.size(1), pos.ids.device
        if causal:  # by index, not by position
            future = torch.ones(L, L, dtype=torch.bool, device=device).triu(1)
            masked = future if masked is None else masked | future
        if masked is not None:
            if bias is None:
                bias = torch.zeros(L, L, dtype=dtype, device=device)
            bias = bias.masked_fill(masked, float("-inf"))
        return None if bias is None else bias.to(dtype).contiguous()

    def terms(self, q, k, pos, layer, bias):
        """-> q, k, bias such that a layer's logits are scale * q k^T + bias."""
        scores = None
        if part := self.part_with["scores"]:
            scores = part.scores(q * self.scale, k, pos, layer)  # (B, H, L, L)
            bias = scores if bias is None else scores + bias
        if part := self.part_with["edit_qk"]:
            q, k = part.edit_qk(q, k, pos)
        return q, k, bias


# --------------------------------------------------------------------------------------------------
# The encoder


class Block(nn.Module):
    """Transformer layer: attention, then feed-forward with exact GELU, each x = LN(x + f(x)), or,
    with norm pre, x = x + f(LN(x))."""

    def __init__(self, cfg: EncoderConfig, layer: int):
        super().__init__()
        self.layer, self.n_head, self.pre = layer, cfg.n_head, cfg.norm == "pre"
        self.attn_dropout = cfg.attn_dropout
        self.qkv = nn.Linear(cfg.d_model, 3 * cfg.d_model)
        self.out = nn.Linear(cfg.d_model, cfg.d_model)
        self.norm1 = nn.LayerNorm(cfg.d_model, eps=cfg.norm_eps)
        self.fc1 = nn.Linear(cfg.d_model, cfg.d_ff)
        self.fc2 = nn.Linear(cfg.d_ff, cfg.d_model)
        self.norm2 = nn.LayerNorm(cfg.d_model, eps=cfg.norm_eps)
        self.drop = fast.dropout(cfg.dropout)

    def forward(self, x, scheme, pos, bias):
        """x (B, L, C), the scheme, its Positions and bias_and_mask -> (B, L, C)."""
        y = self.drop(self.attend(x, scheme, pos, bias))
        if self.pre:
            x = x + y
            return x + self.drop(self.feed_forward(self.norm2(x)))
        x = self.norm1(x + y)
        return self.norm2(x + self.drop(self.feed_forward(x)))

    def heads(self, x):
        """(B, L, C) -> q, k, v, (B, H, L, D) each."""
        x = self.qkv(self.norm1(x) if self.pre else x)  # (B, L, 3C)
        x = x.unflatten(-1, (3, self.n_head, -1))  # (B, L, 3, H, D)
        return x.permute(2, 0, 3, 1, 4)

    def attend(self, x, scheme, pos, bias):
        B, L, C = x.shape
        q, k, v = self.heads(x)
        p = self.attn_dropout if self.training else 0.0
        # What the scheme does to queries and keys, and its part of the logits.
        q, k, bias = scheme.terms(q, k, pos, self.layer, bias)
        part = scheme.part_with["values"]
        if q.is_cuda and part is None:
            y = fast.attention(q, k, v, bias, p, scheme.scale)
        else:
            # Who looks where: q_i . k_j, plus what the scheme says of (i, j).
            logits = q * scheme.scale @ k.transpose(-1, -2)  # (B, H, L, L)
            logits = logits if bias is None else logits + bias
            A = logits.softmax(-1)  # a row sums to 1 over the keys
            A = fast.drop(A, p) if p else A
            y = A @ v  # (B, H, L, D)
            if part is not None:
                y = y + part.values(A, pos, self.layer)
        return self.out(y.transpose(1, 2).reshape(B, L, C))  # (B, H, L, D) -> (B, L, C)

    def feed_forward(self, x):
        return self.fc2(F.gelu(self.fc1(x)))


class Encoder(nn.Module):
    """Token embedding (+ input positions) -> LayerNorm -> dropout -> n_layer blocks (-> LayerNorm,
    with norm pre). No segment embeddings (P3's BERT has them: departure)."""

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
        last = nn.LayerNorm(cfg.d_model, eps=cfg.norm_eps)
        self.norm_last = last if cfg.norm == "pre" else None
        self.apply(init_weights)

    def forward(self, tokens, pos=None, pad=None, causal=False, n_layer=None):
        """Token ids -> hidden states.

        tokens (B, L) int64, [CLS] at index 0; pos (L,) or (B, L) int64 or a Positions, None =
        arange(L), UNKNOWN_POS = hidden; pad (B, L) bool, True = padding; n_layer: stop after so
        many blocks. -> (B, L, C). Raises ValueError if a row is longer than a table of positions.
        """
        if pos is None:
            pos = Positions(torch.arange(tokens.size(1), device=tokens.device), in_order=True)
        elif not isinstance(pos, Positions):
            pos = Positions(pos)
        x = self.drop(self.embed(tokens, pos))
        bias = self.pe.bias_and_mask(pos, pad, causal, compute_dtype(x))
        for block in self.blocks[:n_layer]:
            x = block(x, self.pe, pos, bias)
        if self.norm_last is not None and n_layer is None:
            x = self.norm_last(x)
        return x

    def embed(self, tokens, pos):
        """The input of the first layer, before dropout: words, plus positions (a Positions) where
        the scheme adds them -> (B, L, C)."""
        x = self.tok(tokens) * self.pe.token_scale
        if part := self.pe.part_with["embed"]:
            x = x + part.embed(pos)
        return self.norm(x)

    def logits(self, q, k, pos, layer, pad=None, causal=False):
        """Attention logits before the softmax, as an attention layer of this model has them.

        q, k (B, H, L, D); pos (L,) or (B, L), or a Positions, which keeps the scheme's bias;
        layer an index, or what pe.layer_weights gave -> (B, H, L, L).
        """
        pos = pos if isinstance(pos, Positions) else Positions(pos)
        bias = self.pe.bias_and_mask(pos, pad, causal, q.dtype)
        q, k, bias = self.pe.terms(q, k, pos, layer, bias)
        logits = q * self.pe.scale @ k.transpose(-1, -2)
        return logits if bias is None else logits + bias

    # For probing

    @torch.no_grad()
    def layer_logits(self, tokens, layer=0, pos=None, pad=None, causal=False):
        """Logits of one layer, dropout off; arguments as forward's -> (B, H, L, L)."""
        was_training = self.training
        self.eval()
        if pos is None:
            pos = torch.arange(tokens.size(1), device=tokens.device)
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


def load_strict(module, weights, path):
    """load_state_dict, whose complaint about keys or shapes becomes one line."""
    try:
        module.load_state_dict(weights)
    except RuntimeError as error:
        why = " ".join(str(error).split()).partition(": ")[2]
        raise ValueError(f"{path} does not fit this model: {why:.300}") from None


def warm_start(module, checkpoint, path) -> dict:
    """Load what fits of a checkpoint's weights into a module with another scheme, objective or
    max_len.

    Weights are matched by name, so those of another positional scheme start fresh (P3 swaps the
    scheme under a trained model). With a larger max_len the trained rows of tables are kept and the
    new ones start fresh (P3 trains at 128, then at 512).
    -> {"loaded": [...], "grown": [...], "new": [...], "dropped": [...]}, names.
    Raises ValueError when the encoders differ in anything else.
    """
    given, own = checkpoint["model"], module.state_dict()
    old, new = checkpoint["config"], asdict(module.encoder.config)
    old = {**asdict(EncoderConfig()), **old}  # a field that is younger than the run had its default
    fixed = sorted(new.keys() - {"pe", "max_len", "dropout", "attn_dropout"})
    differ = [
        f"{key} is {old[key]} there and {new[key]} here" for key in fixed if old[key] != new[key]
    ]
    if differ:
        raise ValueError(
            f"{path}: {', '.join(differ)}; only the positional scheme, the objective "
            "and a larger --block_size may differ"
        )
    old_len, more = old["max_len"], new["max_len"] - old["max_len"]
    if more < 0:
        raise ValueError(
            f"{path} has rows of {old_len}; --block_size {new['max_len']} would cut "
            f"them: take at least {old_len}"
        )
    done = {"loaded": [], "grown": [], "new": [], "dropped": sorted(given.keys() - own.keys())}
    for key, fresh in own.items():
        sizes = list(zip(given[key].shape, fresh.shape)) if key in given else []
        if key in given and given[key].shape == fresh.shape:
            fresh.copy_(given[key])
            done["loaded"].append(key)
        elif more and sizes and all(b - a in (0, more, 2 * more) for a, b in sizes):
            grow(fresh, given[key], old_len, more)
            done["grown"].append(key)
        else:  # not there, or a head with other classes
            done["new"].append(key)
    return done


def grow(fresh, trained, old_len, more):
    """Copy a table for old_len positions into one for `more` of them: rows keep their position,
    what follows them (the unknown, theta) moves to the new end; the pair head's classes keep their
    offset."""
    index = []
    for old, new in zip(trained.shape, fresh.shape):
        rows = torch.arange(old)
        if new - old == 2 * more:  # class = offset + L - 1
            rows += more
        elif new > old:
            rows[old_len:] += more
        index.append(rows)
    fresh[torch.meshgrid(*index, indexing="ij")] = trained.to(fresh.device)
