"""Pre-training objectives: what is hidden from the encoder, and how its answer is scored.

name          from     what is corrupted                    what is predicted
mlm           BERT     15% of the tokens (80% [MASK],       the token, at those places only
                       10% random, 10% kept)
pmlm          P0 3.1   the positions of 60% of the tokens,  the true offset of ordered pairs with a hidden end
                       hidden
pplm          P0 3.1   the same, permuted among themselves  the true offset of all ordered pairs i != j
pplm_some     P0 3.1   the same                             that of the pairs whose two ends really moved
pplm_binary   P0 3.1   the same                             is the pair's given offset its true one?

Joined by `+`: mlm+pplm is the sum of both losses on one corrupted batch. An objective has two halves:

    corrupt(batch, generator)       eager, on the batch's device, vectorised, static counts; edits the dict
    loss(encoder, hidden, batch)    compiled with the encoder -> loss (), {name: ()} to log

batch is a dict: tokens (B, L) as the encoder sees them, original (B, L), eligible (B, L) bool (not a special),
pos (B, L) or absent; every objective adds its own keys. Letters as in model.py; n = L - 2 inner places,
k = round(rate * n) selected slots a row. Specials are never selected and never scored: where a row has fewer
than k eligible tokens (inner [SEP]s), the slots beyond get weight 0. Losses of different objectives are not
comparable; each has its own baselines, printed when training starts.
"""

import hashlib
import math
from dataclasses import dataclass, fields

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
    init_weights,
    load_strict,
    read_checkpoint,
)

PAIR_HIDDEN = 64                # width of the pair head's MLP
PAIR_CHUNK_BYTES = 256 << 20    # float32 logits of the pair head that may be alive at once


@dataclass
class ObjectiveConfig:
    """The one home of every default of the objectives. Raises ValueError on a rate that cannot be."""
    objective: str = "mlm"
    mask_rate: float = 0.15     # mlm: share of tokens selected
    pos_rate: float = 0.60      # share of positions hidden or permuted (P0)

    def __post_init__(self):
        for name in ("mask_rate", "pos_rate"):
            if not 0 < getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; a rate is between 0 and 1, both excluded")
        parse_objective(self.objective)


def new_batch(tokens, vocab_size) -> dict:
    """Clean rows (B, L) -> the dictionary that objectives corrupt."""
    return {"tokens": tokens, "original": tokens, "eligible": tokens < vocab_size - N_SPECIALS}


def stream(device, *key) -> torch.Generator:
    """A generator that is a pure function of its key, such as (seed, step, micro, name)."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest, "little") >> 1)


def select(eligible, rate, generator):
    """k = round(rate * (L - 2)) uniformly chosen eligible places a row -> slots (B, k) int64, valid (B, k) bool."""
    B, L = eligible.shape
    k = round(rate * (L - 2))
    score = torch.rand(B, L, generator=generator, device=eligible.device).masked_fill(~eligible, -1.0)
    score, slots = score.topk(k, dim=1)         # sorted: the valid slots come first
    return slots, score >= 0


class Objective(nn.Module):
    """The seam: subclasses override these four."""
    hides_positions = False     # puts UNKNOWN_POS into pos, which a scheme has to allow

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


# ---------------------------------------------------------------------------------------------------------
# Tokens

class MLM(Objective):
    """Masked language modelling (BERT): the head runs at the k selected places only."""

    def __init__(self, encoder, cfg):
        super().__init__(encoder, cfg)
        C = encoder.config.d_model
        self.mask_id, self.vocab_size = encoder.config.mask_id, encoder.config.vocab_size
        self.dense = nn.Linear(C, C)
        self.norm = nn.LayerNorm(C, eps=encoder.config.norm_eps)
        self.bias = nn.Parameter(torch.zeros(self.vocab_size))

    def check(self, L):
        if round(self.cfg.mask_rate * (L - 2)) < 1:
            raise ValueError(f"mask_rate {self.cfg.mask_rate} of {L - 2} tokens selects none: take a larger rate or longer rows")

    def corrupt(self, batch, generator):
        slots, valid = select(batch["eligible"], self.cfg.mask_rate, generator)
        target = batch["original"].gather(1, slots)                                 # (B, k)
        dice = torch.rand(slots.shape, generator=generator, device=slots.device)
        random = torch.randint(self.vocab_size - N_SPECIALS, slots.shape, generator=generator, device=slots.device)
        shown = torch.where(dice < 0.8, self.mask_id, torch.where(dice < 0.9, random, target))
        shown = torch.where(valid, shown, target)
        batch["tokens"] = batch["tokens"].scatter(1, slots, shown)
        batch.update(mlm_slots=slots, mlm_target=target, mlm_weight=valid.float())

    def logits(self, encoder, hidden):
        """(..., C) -> (..., V): dense, GELU, LayerNorm, the tied embedding and a bias. Padded ids never leave."""
        x = self.norm(F.gelu(self.dense(hidden)))
        return F.linear(x, encoder.tok.weight)[..., :self.vocab_size] + self.bias

    def loss(self, encoder, hidden, batch):
        slots, weight = batch["mlm_slots"], batch["mlm_weight"].flatten()
        at_slots = hidden.gather(1, slots[..., None].expand(-1, -1, hidden.size(-1)))   # (B, k, C)
        logits = self.logits(encoder, at_slots).float().flatten(0, 1)               # (B*k, V)
        target = batch["mlm_target"].flatten()
        loss = F.cross_entropy(logits, target, reduction="none")
        scalars = {} if self.training else {"mlm_accuracy": mean(logits.argmax(-1) == target, weight)}
        return mean(loss, weight), scalars

    def baselines(self, L, unigram):
        return {"uniform": math.log(self.vocab_size - N_SPECIALS), "unigram": unigram}


def mean(values, weight):
    return (values * weight).sum() / weight.sum().clamp(min=1)


# ---------------------------------------------------------------------------------------------------------
# Positions

class PairHead(nn.Module):
    """s_ij in R^H -> psi -> logits of the pair's class (P0 sec 3).

    s is one more attention layer's logits on the final hidden states: its own W_q, W_k through Encoder.logits,
    so with the scheme's positional terms and scale. Not the last block's own scores: that block's value, output
    and FFN weights would get no gradient and reach fine-tuning untrained. psi is H -> 64, GELU, -> n_class.
    """
    def __init__(self, encoder, n_class):
        super().__init__()
        C, self.n_head = encoder.config.d_model, encoder.config.n_head
        self.query, self.key = XavierLinear(C, C), XavierLinear(C, C)
        self.table = encoder.pe.pair_table()        # rel_k has a table a layer: this one is the head's
        self.psi = nn.Sequential(XavierLinear(self.n_head, PAIR_HIDDEN), nn.GELU(), XavierLinear(PAIR_HIDDEN, n_class))
        self.n_class = n_class

    def scores(self, encoder, hidden, pos):
        """(B, L, C) -> (B, n, n, H) over the inner places."""
        B, L, C = hidden.shape
        q, k = (f(hidden).view(B, L, self.n_head, -1).transpose(1, 2) for f in (self.query, self.key))
        s = encoder.logits(q, k, encoder.positions(hidden[..., 0], pos), self.table)    # (B, H, L, L)
        return s[:, :, 1:-1, 1:-1].permute(0, 2, 3, 1)

    def chunk_rows(self, B, n):
        """How many query rows fit the byte budget: peak memory then does not grow with L^3."""
        return max(1, min(n, PAIR_CHUNK_BYTES // (4 * B * n * self.n_class)))


class PPLM(Objective):
    """Position-permutation language modelling (P0 sec 3.1): 60% of the tokens trade places, in position only.

    Every ordered pair i != j of ordinary tokens is scored; its class is its true offset j - i, plus L - 1. The other
    position objectives are this one with another corruption, other pairs or another label.
    """
    name = "pplm"

    def __init__(self, encoder, cfg):
        super().__init__(encoder, cfg)
        self.L = encoder.config.max_len
        self.head = PairHead(encoder, self.n_class())

    def n_class(self):
        return 2 * self.L - 1

    def check(self, L):
        if round(self.cfg.pos_rate * (L - 2)) < 2:
            raise ValueError(f"pos_rate {self.cfg.pos_rate} of {L - 2} tokens leaves fewer than 2 to permute: "
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

    def loss(self, encoder, hidden, batch):
        s = self.head.scores(encoder, hidden, batch["pos"])                         # (B, n, n, H)
        eligible, pos = batch["eligible"][:, 1:-1], batch["pos"][:, 1:-1]           # (B, n)
        B, n = eligible.shape
        rows = self.head.chunk_rows(B, n)
        recompute = rows < n and torch.is_grad_enabled()    # in the backward pass, one chunk alive at a time
        sums = 0
        for start in range(0, n, rows):
            chunk = (s[:, start:start + rows], eligible, pos, start)
            sums = sums + (checkpoint(self.chunk_sums, *chunk, use_reentrant=False, preserve_rng_state=False)
                           if recompute else self.chunk_sums(*chunk))
        total, n_right, n_pairs = sums
        scalars = {} if self.training else {f"{self.name}_accuracy": n_right / n_pairs.clamp(min=1)}
        return total / n_pairs.clamp(min=1), scalars

    def chunk_sums(self, s, eligible, pos, start):
        """Query rows start.. of the scores (B, r, n, H) -> (3,): summed loss, right answers, pairs."""
        B, r, n, _ = s.shape
        place = torch.arange(n, device=s.device)
        touched, mine = pos != place + 1, slice(start, start + r)                   # [CLS] has position 0
        i, true = place[mine, None], place - place[mine, None]                      # (r, 1), (r, n)
        label = self.label(true, pos[:, None] - pos[:, mine, None]).expand(B, r, n)
        weight = (eligible[:, mine, None] & eligible[:, None] & (i != place)
                  & self.scored(touched[:, mine, None], touched[:, None])).float()  # (B, r, n)
        logits = self.head.psi(s).float()                                           # (B, r, n, n_class)
        loss = F.cross_entropy(logits.flatten(0, 2), label.flatten(), reduction="none").view_as(weight)
        right = 0 * weight if self.training else weight * (logits.argmax(-1) == label)
        return torch.stack(((loss * weight).sum(), right.sum(), weight.sum()))

    def baselines(self, L, unigram):
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
    averages over random pairs of places: exact to about .003.
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
    """Entropy of t_j - t_i, when (t_i, t_j) are two different of m places with weights (m, m)."""
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
    return weights


# ---------------------------------------------------------------------------------------------------------
# The sum

OBJECTIVES = {"mlm": MLM, "pmlm": PMLM, "pplm": PPLM, "pplm_some": PPLMSome, "pplm_binary": PPLMBinary}
TOKEN_OBJECTIVES, POSITION_OBJECTIVES = ("mlm",), ("pmlm", "pplm", "pplm_some", "pplm_binary")


def parse_objective(objective: str) -> list[str]:
    """'pplm+mlm' -> ['mlm', 'pplm'], in the order of corruption. Raises ValueError, with the reason."""
    names = objective.split("+")
    for name in names:
        if name not in OBJECTIVES:
            raise ValueError(f"unknown objective {name!r}; choose from {', '.join(OBJECTIVES)}, or a sum such as mlm+pplm")
    for kind, group in (("token", TOKEN_OBJECTIVES), ("position", POSITION_OBJECTIVES)):
        if sum(name in group for name in names) > 1:
            raise ValueError(f"objective {objective}: at most one {kind} objective ({', '.join(group)})")
    return sorted(names, key=list(OBJECTIVES).index)        # tokens first, then positions, whatever the spelling


class Pretraining(nn.Module):
    """The encoder with the heads of its objectives: what is compiled, wrapped by DDP, and saved."""

    def __init__(self, encoder: Encoder, cfg: ObjectiveConfig):
        super().__init__()
        self.encoder = encoder
        self.names = parse_objective(cfg.objective)
        self.objectives = nn.ModuleDict({name: OBJECTIVES[name](encoder, cfg) for name in self.names})
        self.objectives.apply(init_weights)
        for objective in self.objectives.values():
            objective.check(encoder.config.max_len)
            if objective.hides_positions and not encoder.pe.hidden_ok:
                raise ValueError(f"objective {cfg.objective} hides positions, and pe {encoder.config.pe} has no way to "
                                 "say 'unknown': take another pe")

    def corrupt(self, tokens, *key) -> dict:
        """Clean rows (B, L) -> a corrupted batch, a pure function of (tokens, key)."""
        batch = new_batch(tokens, self.encoder.config.vocab_size)
        for name, objective in self.objectives.items():
            objective.corrupt(batch, stream(tokens.device, *key, name))
        return batch

    def forward(self, batch):
        """-> loss (), the sum; dict of scalars: each part's loss and what it logs."""
        hidden = self.encoder(batch["tokens"], batch.get("pos"))
        total, scalars = 0, {}
        for name, objective in self.objectives.items():
            loss, more = objective.loss(self.encoder, hidden, batch)
            total = total + loss
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
    model = Pretraining(Encoder(EncoderConfig(**ckpt["config"])),
                        ObjectiveConfig(**{f.name: ckpt["args"][f.name] for f in fields(ObjectiveConfig)}))
    load_strict(model, ckpt["model"], path)
    model.encoder.tokenizer = tiktoken.Encoding(**ckpt["tokenizer"])
    return model.eval()
