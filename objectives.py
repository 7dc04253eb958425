"""Pre-training objectives: what is hidden from the encoder, and how its answer is scored.

name          from     what is corrupted                    what is predicted
mlm           BERT     15% of the tokens (80% [MASK],       the token, at those places only
                       10% random, 10% kept)
clm           P0       nothing; attention is causal         the next token
pmlm          P0 3.1   the positions of 60% of the tokens,  the true offset of ordered pairs with a hidden end
                       hidden
pplm          P0 3.1   the same, permuted among themselves  the true offset of all ordered pairs i != j
pplm_some     P0 3.1   the same                             that of the pairs whose two ends really moved
pplm_binary   P0 3.1   the same                             is the pair's given offset its true one?
tc            P2 eq 8  nothing                              which of K + 1 tokens stands in the same context
taco          P2 eq 11 mlm+tc
nsp           BERT     [SEP] in the middle; in half of the  does the second half follow the first?
                       rows another row's second half

Joined by `+`: mlm+pplm is the sum of both losses on one corrupted batch. An objective has two halves:

    corrupt(batch, generator)       eager, on the batch's device, vectorised, static counts; edits the dict
    loss(encoder, hidden, batch)    compiled with the encoder -> loss (), {name: ()} to log

batch is a dict: tokens (B, L) as the encoder sees them, original (B, L), eligible (B, L) bool (not a special),
pos (B, L) or absent; every objective adds its own keys. Letters as in model.py; n = L - 2 inner places,
k = round(rate * n) selected slots a row. Specials are never selected and never scored: where a row has fewer
than k eligible tokens (inner [SEP]s), the slots beyond get weight 0. Losses of different objectives are not
comparable; each has its own baselines, printed when training starts.
"""

import contextlib
import hashlib
import math
from dataclasses import dataclass, fields
from functools import partial

import numpy as np
import tiktoken
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from model import (
    N_SPECIALS,
    UNKNOWN_POS,
    Encoder,
    EncoderConfig,
    XavierLinear,
    compute_dtype,
    init_weights,
    load_strict,
    read_checkpoint,
)

PAIR_HIDDEN = 64                # width of the pair head's MLP
CHUNK_BYTES = 1 << 30           # float32 logits over pairs or over the vocabulary that may be alive at once


@dataclass
class ObjectiveConfig:
    """The one home of every default of the objectives. Raises ValueError on what cannot be, or would have no effect
    (but for the two rates, which presets set)."""
    objective: str = "mlm"
    loss_weights: tuple | None = None   # one a part, in the order of `objective`; None: 1 each
    mask_rate: float = 0.15             # mlm: share of tokens selected
    whole_word: bool = False            # mlm: select whole words
    mlm_on: str = "masked"              # or all: also the mean over the tokens that were not selected (P2's MLM+TP)
    pos_rate: float = 0.60              # share of positions hidden or permuted (P0)
    pair_loss: str = "ce"               # or wasserstein, smooth_l1 (P0's future work)
    pair_scores: str = "total"          # or content: without positional terms (P0's formula, scaled)
    pair_head: str = "mlp"              # or linear
    tc_on: str = "all"                  # or masked, unmasked: which tokens are anchors (P2's concentrated TACO: masked)
    tc_embedding: str = "input"         # or original, input_layer: what is subtracted from the hidden state
    tc_window: int = 5                  # positives stand at most (window - 1) / 2 away
    tc_negatives: int = 50
    tc_temperature: float = 0.07

    def __post_init__(self):
        for name in ("mask_rate", "pos_rate"):
            if not 0 < getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; a rate is between 0 and 1, both excluded")
        for name, values in CHOICES.items():
            if getattr(self, name) not in values:
                raise ValueError(f"{name} is {getattr(self, name)!r}; choose from {', '.join(values)}")
        if self.tc_window < 3 or self.tc_window % 2 == 0:
            raise ValueError(f"tc_window is {self.tc_window}; it must be odd and at least 3")
        for name in ("tc_negatives", "tc_temperature"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be positive")
        self.sort_parts()
        self.check_use()

    def sort_parts(self):
        """Parts in the order of corruption, whatever the spelling, and their weights with them."""
        given, names = spell_out(self.objective), parse_objective(self.objective)
        if self.loss_weights is not None:
            if len(self.loss_weights) != len(given) or not all(0 < w < math.inf for w in self.loss_weights):
                raise ValueError(f"loss_weights {' '.join(f'{w:g}' for w in self.loss_weights)}: {'+'.join(given)} wants "
                                 f"{len(given)} positive numbers")
            self.loss_weights = tuple(self.loss_weights[given.index(name)] for name in names)
        self.objective = "+".join(names)

    def check_use(self):
        """A setting that would do nothing is refused, the two rates aside."""
        names = self.objective.split("+")
        default = {f.name: f.default for f in fields(self)}
        for prefix, users in {"mlm_on": ("mlm",), "whole_word": ("mlm",), "pair_": KINDS["position"], "tc_": ("tc",)}.items():
            for name in default:
                if name.startswith(prefix) and getattr(self, name) != default[name] and not set(users) & set(names):
                    raise ValueError(f"{name} is for {', '.join(users)}; the objective is {self.objective}")
        if self.tc_on != "all" and "mlm" not in names:
            raise ValueError(f"tc_on {self.tc_on} needs mlm, which says what is masked; the objective is {self.objective}")
        if self.tc_embedding == "original" and "mlm" not in names:
            raise ValueError(f"tc_embedding original is input without mlm, which masks; the objective is {self.objective}")
        if self.pair_loss != "ce" and "pplm_binary" in names:
            raise ValueError(f"pair_loss {self.pair_loss} is a distance between offsets; pplm_binary has two classes")


CHOICES = {"mlm_on": ("masked", "all"), "pair_loss": ("ce", "wasserstein", "smooth_l1"), "pair_scores": ("total", "content"),
           "pair_head": ("mlp", "linear"), "tc_on": ("all", "masked", "unmasked"),
           "tc_embedding": ("input", "original", "input_layer")}
# Corruption goes in this order; a sum has at most one of each kind.
KINDS = {"sentence": ("nsp",), "token": ("mlm", "clm"), "position": ("pmlm", "pplm", "pplm_some", "pplm_binary"),
         "contrastive": ("tc",)}
ALIASES = {"taco": "mlm+tc"}


def spell_out(objective: str) -> list[str]:
    """'pplm+taco' -> ['pplm', 'mlm', 'tc']."""
    return [part for name in objective.split("+") for part in ALIASES.get(name, name).split("+")]


def parse_objective(objective: str) -> list[str]:
    """'pplm+mlm' -> ['mlm', 'pplm'], in the order of corruption. Raises ValueError, with the reason."""
    names = spell_out(objective)
    for name in names:
        if name not in OBJECTIVES:
            raise ValueError(f"unknown objective {name!r}; choose from {', '.join(OBJECTIVES)}, or a sum such as mlm+pplm")
    for kind, group in KINDS.items():
        if sum(name in group for name in names) > 1:
            raise ValueError(f"objective {objective}: at most one {kind} objective ({', '.join(group)})")
    if "clm" in names and {"nsp", *KINDS["position"]} & set(names):
        raise ValueError(f"objective {objective}: clm reads from the left, so it goes with neither positions nor nsp")
    return [name for group in KINDS.values() for name in group if name in names]


def new_batch(tokens, vocab_size) -> dict:
    """Clean rows (B, L) -> the dictionary that objectives corrupt."""
    return {"tokens": tokens, "original": tokens, "eligible": tokens < vocab_size - N_SPECIALS}


def stream(device, *key) -> torch.Generator:
    """A generator that is a pure function of its key, such as (seed, step, micro, name)."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest, "little") >> 1)


def select(eligible, rate, generator, starts=None):
    """k = round(rate * (L - 2)) random eligible places a row -> slots (B, k) int64, valid (B, k) bool.

    Uniform; or, given which places start a word (B, L) bool, whole words in random order, the last one cut.
    """
    B, L = eligible.shape
    k = round(rate * (L - 2))
    score = torch.rand(B, L, generator=generator, device=eligible.device)
    if starts is not None:
        score = score.gather(1, starts.long().cumsum(1).clamp(max=L - 1))       # all pieces of a word have its score
    score, order = score.masked_fill(~eligible, -1.0).sort(dim=1, descending=True, stable=True)
    return order[:, :k], score[:, :k] >= 0                                      # the valid slots come first


def in_chunks(sums, n, item_bytes):
    """sums(start, stop) -> tensor, added up over chunks of 0 .. n that fit CHUNK_BYTES.

    Chunks are computed again in the backward pass, so that one is alive at a time: a row of L tokens has L^2 (2L - 1)
    logits of pairs, or L V of words.
    """
    size = max(1, min(n, CHUNK_BYTES // item_bytes))
    if size == n or not torch.is_grad_enabled():
        return sum(sums(start, min(start + size, n)) for start in range(0, n, size))
    return sum(checkpoint(sums, start, min(start + size, n), use_reentrant=False, preserve_rng_state=False)
               for start in range(0, n, size))


class Objective(nn.Module):
    """The seam: subclasses override these four."""
    hides_positions = False     # puts UNKNOWN_POS into pos, which a scheme has to allow
    min_rows = 1                # rows that a batch must have

    def __init__(self, encoder: Encoder, cfg: ObjectiveConfig):
        super().__init__()
        self.cfg = cfg

    def check(self, L):
        """Raise ValueError if rows of L tokens are too short."""

    def corrupt(self, batch, generator):
        """Edit the batch."""

    def loss(self, encoder, hidden, batch):
        """hidden (B, L, C) -> loss (), dict of scalars to log."""

    def baselines(self, L, unigram):
        """{name: nats} to set the loss against, for rows of L tokens; unigram is the corpus's entropy."""
        return {}


# ---------------------------------------------------------------------------------------------------------
# Tokens

class TokenObjective(Objective):
    """The head of mlm and clm: dense, GELU, LayerNorm, the tied embedding and a bias."""

    def __init__(self, encoder, cfg):
        super().__init__(encoder, cfg)
        C = encoder.config.d_model
        self.mask_id, self.vocab_size = encoder.config.mask_id, encoder.config.vocab_size
        self.dense = nn.Linear(C, C)
        self.norm = nn.LayerNorm(C, eps=encoder.config.norm_eps)
        self.bias = nn.Parameter(torch.zeros(self.vocab_size))

    def logits(self, encoder, hidden):
        """(..., C) -> (..., V). Padded ids never leave."""
        x = self.norm(F.gelu(self.dense(hidden)))
        return F.linear(x, encoder.tok.weight)[..., :self.vocab_size] + self.bias

    def score(self, encoder, hidden, target, weight):
        """hidden (N, C), target (N,), weight (N,) bool -> (2,): mean cross-entropy, accuracy (0 in training)."""
        def sums(start, stop):
            logits = self.logits(encoder, hidden[start:stop]).float()               # (n, V)
            w = weight[start:stop].float()
            loss = F.cross_entropy(logits, target[start:stop], reduction="none")
            right = torch.zeros_like(w) if self.training else (logits.argmax(-1) == target[start:stop]) * w
            return torch.stack(((loss * w).sum(), right.sum()))
        return in_chunks(sums, len(target), 4 * self.vocab_size) / weight.sum().clamp(min=1)

    def baselines(self, L, unigram):
        return {"uniform": math.log(self.vocab_size - N_SPECIALS), "unigram": unigram}


class MLM(TokenObjective):
    """Masked language modelling (BERT): the head runs at the k selected places only, unless mlm_on is all."""

    def __init__(self, encoder, cfg):
        super().__init__(encoder, cfg)
        self.starts = nn.Buffer(word_starts(encoder.tokenizer, self.vocab_size), persistent=False) if cfg.whole_word else None

    def check(self, L):
        if round(self.cfg.mask_rate * (L - 2)) < 1:
            raise ValueError(f"mask_rate {self.cfg.mask_rate} of {L - 2} tokens selects none: take a larger rate or longer rows")

    def corrupt(self, batch, generator):
        """Edits tokens; adds mlm_slots, mlm_target, mlm_weight (B, k) and mlm_masked (B, L) bool."""
        original, eligible = batch["original"], batch["eligible"]
        starts = None if self.starts is None else self.starts[original] | ~eligible.roll(1, 1)      # after a special too
        slots, valid = select(eligible, self.cfg.mask_rate, generator, starts)
        target = original.gather(1, slots)                                          # (B, k)
        dice = torch.rand(slots.shape, generator=generator, device=slots.device)
        random = torch.randint(self.vocab_size - N_SPECIALS, slots.shape, generator=generator, device=slots.device)
        shown = torch.where(dice < 0.8, self.mask_id, torch.where(dice < 0.9, random, target))
        shown = torch.where(valid, shown, target)
        batch["tokens"] = batch["tokens"].scatter(1, slots, shown)
        masked = torch.zeros_like(eligible).scatter(1, slots, valid)
        batch.update(mlm_slots=slots, mlm_target=target, mlm_weight=valid, mlm_masked=masked)

    def loss(self, encoder, hidden, batch):
        slots = batch["mlm_slots"]
        at_slots = hidden.gather(1, slots[..., None].expand(-1, -1, hidden.size(-1)))       # (B, k, C)
        loss, right = self.score(encoder, at_slots.flatten(0, 1), batch["mlm_target"].flatten(), batch["mlm_weight"].flatten())
        scalars = {} if self.training else {"mlm_accuracy": right}
        if self.cfg.mlm_on == "all":        # mean over the masked plus mean over the rest (P2 sec 5.2, MLM+TP)
            rest = batch["eligible"] & ~batch["mlm_masked"]
            loss = loss + self.score(encoder, hidden.flatten(0, 1), batch["original"].flatten(), rest.flatten())[0]
        return loss, scalars

    def baselines(self, L, unigram):
        n_means = 2 if self.cfg.mlm_on == "all" else 1
        return {name: n_means * value for name, value in super().baselines(L, unigram).items()}


class CLM(TokenObjective):
    """Causal language modelling: every place predicts the token after it. Attention sees what stands to the left."""

    def loss(self, encoder, hidden, batch):
        loss, right = self.score(encoder, hidden[:, :-1].flatten(0, 1), batch["original"][:, 1:].flatten(),
                                 batch["eligible"][:, 1:].flatten())
        return loss, {} if self.training else {"clm_accuracy": right}


def word_starts(tokenizer, vocab_size) -> torch.Tensor:
    """(V,) bool: which pieces begin a word, i.e. do not begin with a letter or a digit. Specials do."""
    if tokenizer is None:
        raise ValueError("whole_word needs the encoder's tokenizer, to know which pieces begin a word")
    n = vocab_size - N_SPECIALS
    inside = [(piece := tokenizer.decode_single_token_bytes(i))[0] >= 128 or piece[:1].isalnum() for i in range(n)]
    return torch.tensor([not x for x in inside] + [True] * N_SPECIALS)


# ---------------------------------------------------------------------------------------------------------
# Positions

class PairHead(nn.Module):
    """s_ij in R^H -> psi -> logits of the pair's class (P0 sec 3).

    s is one more attention layer's logits on the final hidden states: its own W_q, W_k through Encoder.logits,
    so with the scheme's positional terms and scale (`total`), or q_i . k_j / sqrt(D) alone (`content`). Not the last
    block's own scores: that block's value, output and FFN weights would get no gradient and reach fine-tuning
    untrained. psi is H -> 64, GELU, -> n_class (`mlp`), or H -> n_class (`linear`).
    """
    def __init__(self, encoder, cfg, n_class):
        super().__init__()
        C, self.n_head = encoder.config.d_model, encoder.config.n_head
        self.total, self.n_class = cfg.pair_scores == "total", n_class
        self.query, self.key = XavierLinear(C, C), XavierLinear(C, C)
        self.table = encoder.pe.pair_table() if self.total else None    # rel_k has a table a layer: this one is the head's
        mlp = nn.Sequential(XavierLinear(self.n_head, PAIR_HIDDEN), nn.GELU(), XavierLinear(PAIR_HIDDEN, n_class))
        self.psi = mlp if cfg.pair_head == "mlp" else XavierLinear(self.n_head, n_class)

    def scores(self, encoder, hidden, pos):
        """(B, L, C) -> (B, n, n, H) over the inner places."""
        B, L, C = hidden.shape
        q, k = (f(hidden).view(B, L, self.n_head, -1).transpose(1, 2) for f in (self.query, self.key))
        if self.total:
            s = encoder.logits(q, k, encoder.positions(hidden[..., 0], pos), self.table)    # (B, H, L, L)
        else:
            s = q @ k.transpose(-1, -2) / q.size(-1) ** 0.5
        return s[:, :, 1:-1, 1:-1].permute(0, 2, 3, 1)


# How a pair's logits (N, n_class) are held against its class (N,): -> losses (N,), and which class they name (N,). A class
# is an offset plus L - 1, so the distance of two classes is that of their offsets.

def cross_entropy(logits, label, L):
    return F.cross_entropy(logits, label, reduction="none")


def wasserstein(logits, label, L):
    """W1 between the predicted distribution and the one true offset: sum_c p_c |c - y|.

    Linear in p: who knows nothing yet puts everything on one class near the median, where the softmax has no gradient. The
    three runs so far ended there (RESULTS.md, section 9).
    """
    distance = (torch.arange(2 * L - 1, device=label.device) - label[:, None]).abs()        # (N, 2L-1)
    return (logits.softmax(-1) * distance).sum(-1)


def smooth_l1(logits, label, L):
    """One number a pair, the offset as a share of L; quadratic within one place."""
    return F.smooth_l1_loss(logits[:, 0], (label - (L - 1)) / L, beta=1 / L, reduction="none")


def likeliest(logits, L):
    return logits.argmax(-1)


def nearest(logits, L):
    return (logits[:, 0] * L).round().long() + L - 1


PAIR_LOSSES = {"ce": (cross_entropy, likeliest), "wasserstein": (wasserstein, likeliest), "smooth_l1": (smooth_l1, nearest)}


class PPLM(Objective):
    """Position-permutation language modelling (P0 sec 3.1): 60% of the tokens trade places, in position only.

    Every ordered pair i != j of ordinary tokens is scored; its class is its true offset j - i, plus L - 1. The other
    position objectives are this one with another corruption, other pairs or another label.
    """
    name = "pplm"

    def __init__(self, encoder, cfg):
        super().__init__(encoder, cfg)
        self.L = encoder.config.max_len
        self.head = PairHead(encoder, cfg, self.n_class())

    def n_class(self):
        return 1 if self.cfg.pair_loss == "smooth_l1" else 2 * self.L - 1

    def check(self, L):
        if round(self.cfg.pos_rate * (L - 2)) < 2:
            raise ValueError(f"pos_rate {self.cfg.pos_rate} of {L - 2} tokens leaves fewer than 2 to hide or permute: "
                             "take a larger rate or longer rows")

    def corrupt(self, batch, generator):
        B, L = batch["tokens"].shape
        true = torch.arange(L, device=batch["tokens"].device).expand(B, L)
        slots, valid = select(batch["eligible"], self.cfg.pos_rate, generator)
        batch["pos"] = self.new_positions(true, slots, valid, generator)

    def new_positions(self, true, slots, valid, generator):
        """true (B, L), selected slots and whether they are valid (B, k) -> positions (B, L)."""
        order = torch.rand(slots.shape, generator=generator, device=slots.device)
        order = torch.where(valid, order, 2.0 + torch.arange(slots.size(1), device=slots.device))   # these stay put
        donors = slots.gather(1, order.argsort(1))
        return true.scatter(1, slots, true.gather(1, donors))

    def scored(self, touched_i, touched_j):
        """Which pairs count, given whether each end's position is not its true one (it moved, or is hidden)."""
        return True

    def label(self, true, given):
        """Class of a pair, from its true and its given offset."""
        return true + self.L - 1

    def pair_logits(self, encoder, hidden, pos):
        """All pairs of inner places at once -> (B, n, n, n_class). For short rows; loss works in chunks."""
        return self.head.psi(self.head.scores(encoder, hidden, pos))

    def expected_offsets(self, encoder, hidden, pos):
        """(B, n, n): the mean of the predicted distribution of offsets, or the one number of smooth_l1."""
        logits = self.pair_logits(encoder, hidden, pos).float()
        if self.cfg.pair_loss == "smooth_l1":
            return logits[..., 0] * self.L
        return logits.softmax(-1) @ (torch.arange(2 * self.L - 1.0, device=logits.device) - (self.L - 1))

    def loss(self, encoder, hidden, batch):
        s = self.head.scores(encoder, hidden, batch["pos"])                         # (B, n, n, H)
        eligible, pos = batch["eligible"][:, 1:-1], batch["pos"][:, 1:-1]           # (B, n)
        B, n = eligible.shape
        rows = partial(self.row_sums, s, eligible, pos)
        total, n_right, n_pairs = in_chunks(rows, n, 4 * B * n * max(self.head.n_class, PAIR_HIDDEN))
        scalars = {} if self.training else {f"{self.name}_accuracy": n_right / n_pairs.clamp(min=1)}
        return total / n_pairs.clamp(min=1), scalars

    def row_sums(self, s, eligible, pos, start, stop):
        """Query rows start .. stop of the scores (B, n, n, H) -> (3,): summed loss, right answers, pairs."""
        n = s.size(1)
        place = torch.arange(n, device=s.device)
        touched, mine = pos != place + 1, slice(start, stop)                        # [CLS] has position 0
        i, true = place[mine, None], place - place[mine, None]                      # (r, 1), (r, n)
        weight = (eligible[:, mine, None] & eligible[:, None] & (i != place)
                  & self.scored(touched[:, mine, None], touched[:, None])).float()  # (B, r, n)
        label = self.label(true, pos[:, None] - pos[:, mine, None]).expand_as(weight)
        logits = self.head.psi(s[:, mine]).float().flatten(0, 2)                    # (B r n, n_class)
        measure, predict = PAIR_LOSSES[self.cfg.pair_loss]
        loss = measure(logits, label.flatten(), self.L).view_as(weight)
        right = 0 * weight if self.training else weight * (predict(logits, self.L).view_as(weight) == label)
        return torch.stack(((loss * weight).sum(), right.sum(), weight.sum()))

    def baselines(self, L, unigram):
        prior = L / 3 - 1 / 3       # mean |offset| of two different places among n: the best constant is 0
        if self.cfg.pair_loss == "wasserstein":
            return {"prior": prior}
        if self.cfg.pair_loss == "smooth_l1":
            return {"prior": (prior - 0.5) / L}
        known = position_baselines(L, self.cfg.pos_rate)
        return {"uniform": math.log(2 * L - 1), **{key: known[key] for key in self.baseline_names}}

    baseline_names = ("prior", "copy", "selected", "moved")


class PMLM(PPLM):
    """Position-masked language modelling (P0 sec 3.1): 60% of the positions are hidden, the tokens stay.

    Scored are the ordered pairs with at least one hidden end.
    """
    name, hides_positions, baseline_names = "pmlm", True, ("prior", "free_slots")

    def new_positions(self, true, slots, valid, generator):
        return true.scatter(1, slots, torch.where(valid, UNKNOWN_POS, true.gather(1, slots)))

    def scored(self, touched_i, touched_j):
        return touched_i | touched_j


class PPLMSome(PPLM):
    """pplm, scored on the pairs whose two ends really moved (P0: "just the permuted positions")."""
    name, baseline_names = "pplm_some", ("prior", "some_moved")

    def scored(self, touched_i, touched_j):
        return touched_i & touched_j


class PPLMBinary(PPLM):
    """Is the pair's given offset its true one? (P0 says "for each position": read as per pair, a departure.)"""
    name, baseline_names = "pplm_binary", ("binary",)

    def n_class(self):
        return 2

    def label(self, true, given):
        return (true == given).long()

    def baselines(self, L, unigram):
        return {"uniform": math.log(2), "binary": position_baselines(L, self.cfg.pos_rate)["binary"]}


def position_baselines(L, rate) -> dict:
    """The cross-entropy (nats) of a reader who knows only so much, for rows of n = L - 2 eligible tokens.

    prior       how frequent offsets are, p(r) ~ n - |r|
    copy        pplm: also the two given positions, no token
    selected    pplm: also which places were selected; moved: also which of them really moved
    free_slots  pmlm: which places are hidden
    some_moved  pplm_some: which places moved
    binary      pplm_binary: how often the given offset is the true one
    Below copy, tokens are being read; below moved, free_slots and some_moved, order is known. All but prior are
    averages over random pairs of places: exact to about .003. In a row with an inner [SEP] fewer tokens share the same k
    slots: at L 64 binary is there .012 too high and copy .01 too low.
    """
    n, rng = L - 2, np.random.default_rng(0)
    k, samples = round(rate * n), min(4000, 2 ** 19 // L)       # seconds, whatever L
    r = np.arange(-n + 1, n)
    both, one = k * (k - 1) / (n * (n - 1)), 2 * k * (n - k) / (n * (n - 1))    # of a pair's ends, selected
    copy, inside, moved, some, kept = [], [], [], [], []
    for _ in range(samples):
        a, b = rng.choice(n, 2, replace=False)
        weights = copy_weights(n, k, a, b)
        copy.append(offset_entropy(np.arange(n), weights))
        kept.append(np.trace(weights, b - a) / weights.sum())
        places = rng.choice(n, k, replace=False)
        inside.append(offset_entropy(places, np.ones((k, k))))
        places = places[places != rng.permutation(places)]
        if (m := len(places)) > 1:
            # Two moved tokens are anywhere in the moved set but where they are seen: here at places 0 and 1.
            weights = np.ones((m, m))
            weights[0, :] = weights[:, 1] = 0
            some.append(offset_entropy(places, weights))
            moved.append((m * (m - 1) * some[-1] + 2 * m * (n - m) * math.log(max(m - 1, 1))) / (n * (n - 1)))
    selected, p = both * np.mean(inside) + one * math.log(k), np.mean(kept)
    found = {"prior": entropy(np.where(r == 0, 0, n - abs(r))), "copy": np.mean(copy), "selected": selected,
             "moved": np.mean(moved or [0]), "free_slots": selected / (both + one), "some_moved": np.mean(some or [0]),
             "binary": entropy(np.array([p, 1 - p]))}
    return {key: float(value) for key, value in found.items()}


def entropy(counts) -> float:
    p = counts[counts > 0] / counts.sum()
    return float(-(p * np.log(p)).sum())


def offset_entropy(places, weights) -> float:
    """Entropy of t_j - t_i, when (t_i, t_j) are two different of m places with weights (m, m), whose diagonal is set to 0."""
    np.fill_diagonal(weights, 0)
    r = places[None, :] - places[:, None]                                       # (m, m)
    return entropy(np.bincount((r - r.min()).ravel(), weights.ravel()))


def copy_weights(n, k, a, b):
    """P(t_i, t_j | i seen at a, j seen at b) up to a factor -> (n, n).

    The corruption treats all places alike, so only the pattern counts: who is right, who is at the other's place.
    """
    both_in, one_in = k * (k - 1) / (n * (n - 1)), (n - k) * k / (n * (n - 1))  # both selected; b selected, a not
    swapped = both_in / (k * (k - 1))           # a permutation of k takes two places to two given ones
    chain = both_in * (1 / k - 1 / (k * (k - 1))) / max(n - 2, 1)               # a's true place is b, b's a third one
    right = (n - k) * (n - k - 1) / (n * (n - 1)) + 2 * one_in / k + swapped
    half = one_in * (1 - 1 / k) / max(n - 2, 1) + chain                         # one is right, the other at a third place
    free = (1 - right - swapped - 2 * (n - 2) * (half + chain)) / max((n - 2) * (n - 3), 1)
    weights = np.full((n, n), free)
    weights[a, :] = weights[:, b] = half
    weights[b, :] = weights[:, a] = chain
    weights[a, b], weights[b, a] = right, swapped
    np.fill_diagonal(weights, 0)
    return weights


# ---------------------------------------------------------------------------------------------------------
# Contexts

class TC(Objective):
    """Token-alignment contrastive loss (P2 eq 8): what context gives to a token is alike for neighbours.

    g = h - e, the hidden state less the word's embedding. For every token, InfoNCE over cosines / temperature with
    one positive, a near token of its row, and K negatives, tokens of other rows; both detached (P2's code; its text
    is silent: departure).
    """
    min_rows = 2

    def corrupt(self, batch, generator):
        """Draws tc_candidates (B, L, 1 + K), places in the flat batch, the positive first, and tc_weight (B, L)."""
        if len(batch["tokens"]) < 2:
            raise ValueError("tc takes its negatives from other rows: a batch needs at least 2")
        eligible = batch["eligible"]
        B, L = eligible.shape
        m = eligible.sum(1, keepdim=True)                                           # (B, 1) eligible tokens of each row
        anchors = {"all": eligible, "masked": batch.get("mlm_masked"), "unmasked": eligible}[self.cfg.tc_on]
        if self.cfg.tc_on == "unmasked":
            anchors = anchors & ~batch["mlm_masked"]
        rows = L * torch.arange(B, device=eligible.device)[:, None, None]
        candidates = torch.cat((rows + self.positives(eligible, m, generator)[..., None],
                                self.negatives(eligible, m, generator)), -1)
        batch.update(tc_candidates=candidates, tc_weight=anchors & (m > 1) & (m.sum() > m))

    def positives(self, eligible, m, generator):
        """A uniform eligible place other than i at distance 1 .. (W-1)/2; where there is none, any of the row -> (B, L)."""
        B, L = eligible.shape
        device, half = eligible.device, (self.cfg.tc_window - 1) // 2
        place = torch.arange(L, device=device)
        steps = torch.arange(-half, half, device=device)
        steps = steps + (steps >= 0)                                                # -half .. half without 0
        near = place[:, None] + steps                                               # (L, W-1)
        inside = (near >= 0) & (near < L)
        there = eligible[:, near.clamp(0, L - 1)] & inside                          # (B, L, W-1)
        score = torch.rand(there.shape, generator=generator, device=device).masked_fill(~there, -1)
        best, which = score.max(-1)                                                 # (B, L)
        # Any other: the u-th eligible place, i itself left out.
        order = (~eligible).long().sort(dim=1, stable=True).indices                 # eligible places first
        rank = eligible.long().cumsum(1) - 1                                        # of i among them
        u = draw((m - 1).clamp(min=1).expand(B, L), generator)
        far = order.gather(1, (u + (u >= rank)).clamp(max=L - 1))
        return torch.where(best >= 0, (place + steps[which]).clamp(0, L - 1), far)

    def negatives(self, eligible, m, generator):
        """K eligible places of other rows, with replacement -> (B, L, K) places in the flat batch."""
        B, L = eligible.shape
        order = (~eligible.flatten()).long().sort(stable=True).indices              # all eligible places, row by row
        first = (m.cumsum(0) - m)[..., None]                                        # (B, 1, 1) rank of the row's first
        others = (m.sum() - m).clamp(min=1)[..., None]
        u = draw(others.expand(B, L, self.cfg.tc_negatives), generator)
        return order[torch.where(u >= first, u + m[..., None], u).clamp(max=B * L - 1)]     # jumps over the row itself

    def embedding(self, encoder, batch):
        """e (B, L, C): what is subtracted."""
        if self.cfg.tc_embedding == "input_layer":                                  # P2's code
            return encoder.embed(batch["tokens"], encoder.positions(batch["tokens"], batch.get("pos")))
        tokens = batch["tokens" if self.cfg.tc_embedding == "input" else "original"]
        return encoder.tok(tokens) * encoder.pe.token_scale

    def loss(self, encoder, hidden, batch):
        """P2 eq 6 to 8: cross-entropy of the positive among 1 + K candidates, mean over the anchors."""
        g = F.normalize((hidden - self.embedding(encoder, batch)).float(), dim=-1)  # (B, L, C)
        # Training under autocast takes 16 bits: a quarter of the time. Validation takes all: in bf16 close candidates tie.
        dtype = compute_dtype(hidden) if self.training else g.dtype
        candidates = F.embedding(batch["tc_candidates"], g.detach().flatten(0, 1).to(dtype))        # (B, L, 1 + K, C)
        with contextlib.nullcontext() if self.training else torch.autocast(hidden.device.type, enabled=False):
            logits = torch.einsum("blc,blkc->blk", g.to(dtype), candidates).float() / self.cfg.tc_temperature
        weight = batch["tc_weight"].float()
        n = weight.sum().clamp(min=1)
        loss = ((logits.logsumexp(-1) - logits[..., 0]) * weight).sum() / n
        if self.training:
            return loss, {}
        return loss, {"tc_accuracy": ((logits[..., 0] > logits[..., 1:].amax(-1)) * weight).sum() / n}

    def baselines(self, L, unigram):
        return {"constant": math.log(1 + self.cfg.tc_negatives)}


def draw(n, generator):
    """Uniform integers below n (a tensor of counts)."""
    u = torch.rand(n.shape, generator=generator, device=n.device)
    return (u * n).long().clamp(max=n - 1)


class NSP(Objective):
    """Next sentence prediction (BERT), on packed rows: [CLS] first half [SEP] second half [SEP].

    The middle eligible token becomes [SEP]. In half of the rows (rounded down) what follows is another row's: the chosen
    rows pass theirs on in a circle. 0: it follows, 1: it does not; from [CLS], through BERT's pooler.
    """
    min_rows = 2

    def __init__(self, encoder, cfg):
        super().__init__(encoder, cfg)
        C = encoder.config.d_model
        self.sep_id, self.vocab_size = encoder.config.sep_id, encoder.config.vocab_size
        self.dense, self.out = nn.Linear(C, C), nn.Linear(C, 2)

    def corrupt(self, batch, generator):
        """Makes new rows, on which the objectives after it work; adds nsp_label and nsp_weight (B,)."""
        tokens = batch["original"]
        B, L = tokens.shape
        if B < 2:
            raise ValueError("nsp takes second halves from other rows: a batch needs at least 2")
        m = batch["eligible"].sum(1, keepdim=True)
        middle = ((batch["eligible"].cumsum(1) > m // 2).long()).argmax(1, keepdim=True)            # (B, 1)
        chosen = torch.rand(B, generator=generator, device=tokens.device).argsort()[:max(2, B // 2)]
        stay = torch.arange(B, device=tokens.device)
        donor = stay.scatter(0, chosen, chosen.roll(1))
        if B < 4:                                           # two rows can only trade: then let a coin decide
            coin = torch.rand((), generator=generator, device=tokens.device)
            donor = torch.where(coin < B / (2 * len(chosen)), donor, stay)
        after = torch.arange(L, device=tokens.device) > middle                                      # (B, L)
        mixed = torch.where(after, tokens[donor], tokens).scatter(1, middle, self.sep_id)
        mixed = torch.where(m > 2, mixed, tokens)           # too short for two halves: left alone, not scored
        batch.update(new_batch(mixed, self.vocab_size), nsp_weight=(m > 2)[:, 0].float(),
                     nsp_label=(donor != stay).long())

    def loss(self, encoder, hidden, batch):
        logits = self.out(torch.tanh(self.dense(hidden[:, 0]))).float()             # (B, 2)
        label, weight = batch["nsp_label"], batch["nsp_weight"]
        n = weight.sum().clamp(min=1)
        loss = (F.cross_entropy(logits, label, reduction="none") * weight).sum() / n
        return loss, {} if self.training else {"nsp_accuracy": ((logits.argmax(-1) == label) * weight).sum() / n}

    def baselines(self, L, unigram):
        return {"constant": math.log(2)}


# ---------------------------------------------------------------------------------------------------------
# The sum

OBJECTIVES = {"mlm": MLM, "clm": CLM, "pmlm": PMLM, "pplm": PPLM, "pplm_some": PPLMSome, "pplm_binary": PPLMBinary, "tc": TC,
              **ALIASES, "nsp": NSP}


class Pretraining(nn.Module):
    """The encoder with the heads of its objectives: what is compiled, wrapped by DDP, and saved."""

    def __init__(self, encoder: Encoder, cfg: ObjectiveConfig):
        super().__init__()
        self.encoder = encoder
        self.names = cfg.objective.split("+")
        self.weights = dict(zip(self.names, cfg.loss_weights or [1.0] * len(self.names)))
        self.causal = "clm" in self.names
        self.min_rows = max(OBJECTIVES[name].min_rows for name in self.names)
        self.objectives = nn.ModuleDict({name: OBJECTIVES[name](encoder, cfg) for name in self.names})
        self.objectives.apply(init_weights)
        for objective in self.objectives.values():
            objective.check(encoder.config.max_len)
            if objective.hides_positions and not encoder.pe.hidden_ok:
                raise ValueError(f"objective {cfg.objective} hides positions, and pe {encoder.config.pe} has no way to "
                                 "say 'unknown': take another pe")
        if cfg.pair_scores == "content" and not encoder.pe.in_logits:
            raise ValueError(f"pair_scores content leaves out what the scheme adds to attention logits: pe {encoder.config.pe} "
                             "adds nothing there")

    def corrupt(self, tokens, *key) -> dict:
        """Clean rows (B, L) -> a corrupted batch, a pure function of (tokens, key)."""
        batch = new_batch(tokens, self.encoder.config.vocab_size)
        for name, objective in self.objectives.items():
            objective.corrupt(batch, stream(tokens.device, *key, name))
        return batch

    def forward(self, batch):
        """-> loss (), the weighted sum; dict of scalars: each part's loss, unweighted, and what it logs."""
        hidden = self.encoder(batch["tokens"], batch.get("pos"), causal=self.causal)
        total, scalars = 0, {}
        for name, objective in self.objectives.items():
            loss, more = objective.loss(self.encoder, hidden, batch)
            total = total + self.weights[name] * loss
            scalars.update({name: loss.detach(), **more})
        return total, scalars

    def baselines(self, unigram) -> dict:
        """{name: nats}; with several objectives, name.baseline."""
        L = self.encoder.config.max_len
        found = {name: objective.baselines(L, unigram) for name, objective in self.objectives.items()}
        return {key if len(found) == 1 else f"{name}.{key}": value for name, baselines in found.items()
                for key, value in baselines.items()}


def load_pretraining(path) -> Pretraining:
    """A run folder or checkpoint file -> the encoder with its heads, in eval mode. Raises like model.load."""
    ckpt = read_checkpoint(path)
    if "args" not in ckpt:
        raise ValueError(f"{path} is a fine-tuned model, without the heads of pre-training: take its run's ckpt.pt")
    encoder = Encoder(EncoderConfig(**ckpt["config"]))
    encoder.tokenizer = tiktoken.Encoding(**ckpt["tokenizer"])
    model = Pretraining(encoder, ObjectiveConfig(**{f.name: ckpt["args"][f.name] for f in fields(ObjectiveConfig)
                                                    if f.name in ckpt["args"]}))
    load_strict(model, ckpt["model"], path)
    return model.eval()
