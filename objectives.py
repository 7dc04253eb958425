"""Pre-training objectives: what is hidden from the encoder, and how its answer is scored.

name          from     what is corrupted                    what is predicted
mlm           BERT     15% of the tokens (80% [MASK],       the token, at those places only
                       10% random, 10% kept)
clm           P0       nothing; attention is causal         the next token
pmlm          P0 3.1   the positions of 60% of the tokens,  the true offset of ordered pairs with a
                       hidden                               hidden end
pplm          P0 3.1   the same, permuted among themselves  the true offset of all ordered pairs
pplm_some     P0 3.1   the same                             that of the pairs whose two ends moved
pplm_binary   P0 3.1   the same                             is the pair's given offset its true one?
tc            P2 eq 8  nothing                              which of K + 1 tokens stands in the same
                                                            context
taco          P2 eq 11 mlm+tc
nsp           BERT     [SEP] in the middle; in half of the  does the second half follow the first?
                       rows another row's second half

P0 is the paper on relative position prediction, P2 TACO. Joined by `+`: mlm+pplm is the sum of
both losses on one corrupted batch. An objective has two halves:

    corrupt(batch, generator)       not compiled; no shape depends on the data
    loss(encoder, hidden, batch)    compiled with the encoder -> loss (), {name: ()} to log

batch is a dict: tokens (B, L) as the encoder sees them, original (B, L), eligible (B, L) bool (not
a special), pos (B, L) or absent; every objective adds its own keys. Letters as in model.py; n = L-2
inner places, k = round(rate * n) selected slots a row. Specials are never selected and never
scored: where a row has fewer than k eligible tokens (inner [SEP]s), the slots beyond get weight 0.
Losses of different objectives are not comparable; each has its own baselines (baselines.py),
printed when training starts.
"""

import contextlib
import hashlib
from dataclasses import dataclass, fields
from functools import partial

import torch
import torch.nn as nn
import torch.nn.functional as F

import fast
from common import check_settings, setting
from data import word_starts
from model import (
    N_SPECIALS,
    UNKNOWN_POS,
    Encoder,
    Positions,
    XavierLinear,
    compute_dtype,
    init_weights,
)

PAIR_HIDDEN = 64  # width of the pair head's MLP


# In this order objectives corrupt a batch; a sum has at most one of each kind.
KINDS = ["sentence", "token", "position", "contrastive"]


class Objective(nn.Module):
    """To add an objective, subclass this, override some of these, and add a line to OBJECTIVES."""

    kind = "token"  # one of KINDS
    settings = ()  # the fields of ObjectiveConfig that are for it
    hides_positions = False  # puts UNKNOWN_POS into pos
    min_rows = 1  # that a batch must have

    def __init__(self, encoder: Encoder, cfg):
        super().__init__()
        self.cfg = cfg

    def check(self, L):
        """Raise ValueError if rows of L tokens are too short."""

    def corrupt(self, batch, generator):
        """Edit the batch. A token objective changes batch["tokens"] alone, and asks for the words
        in batch["original"]. A sentence objective makes other rows: what it leaves in
        batch["tokens"] is original and eligible for the objectives after it."""

    def loss(self, encoder, hidden, batch):
        """hidden (B, L, C) -> loss (), dict of scalars to log."""


def new_batch(tokens, vocab_size) -> dict:
    """Clean rows (B, L) -> the dictionary that objectives corrupt."""
    return {"tokens": tokens, "original": tokens, "eligible": tokens < vocab_size - N_SPECIALS}


def stream(device, *key) -> torch.Generator:
    """A generator that is a pure function of its key, such as (seed, step, micro, name)."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest, "little") >> 1)


def select(eligible, rate, generator, starts=None):
    """k = round(rate * (L - 2)) random eligible places a row -> slots (B, k) int64, valid (B, k)
    bool.

    Uniform; or, given which places start a word (B, L) bool, whole words in random order, the last
    one cut.
    """
    B, L = eligible.shape
    k = round(rate * (L - 2))
    # Every place draws a number, and the k largest win: a sample without replacement, for all rows
    # at once. A special's -1 never wins against a word. Where a row has fewer than k words, it
    # does: these slots come last, and are marked as not valid.
    score = torch.rand(B, L, generator=generator, device=eligible.device)
    if starts is not None:  # all pieces of a word have its number
        score = score.gather(1, starts.long().cumsum(1).clamp(max=L - 1))
    score = score.masked_fill(~eligible, -1.0)
    score, order = score.sort(dim=1, descending=True, stable=True)
    return order[:, :k], score[:, :k] >= 0


def learned(*modules):
    """-> parameters that learn: all but those of --freeze_embeddings."""
    found = []
    for module in modules:
        found += [p for p in module.parameters() if p.requires_grad]
    return found


def weighted_mean(values, weight):
    return (values * weight).sum() / weight.sum().clamp(min=1)


class CrossEntropy:
    """How an answer is scored: logits (N, n_class) beside the true classes (N,)."""

    def __init__(self, n_class):
        self.n_class = self.n_out = n_class  # n_out: numbers that an answer is made of

    def loss(self, logits, label):
        """-> (N,)"""
        return F.cross_entropy(logits, label, reduction="none")

    def predict(self, logits):
        """-> the likeliest class (N,)"""
        return logits.argmax(-1)


# --------------------------------------------------------------------------------------------------
# Tokens


class TokenObjective(Objective):
    """The head of mlm and clm: dense, GELU, LayerNorm, the tied embedding and a bias."""

    def __init__(self, encoder, cfg):
        super().__init__(encoder, cfg)
        C = encoder.config.d_model
        self.mask_id = encoder.config.mask_id
        self.vocab_size = encoder.config.vocab_size
        self.dense = nn.Linear(C, C)
        self.norm = nn.LayerNorm(C, eps=encoder.config.norm_eps)
        self.bias = nn.Parameter(torch.zeros(self.vocab_size))

    def word_logits(self, encoder, hidden):
        """(..., C) -> (..., V padded as the embedding is). Padded ids have -inf: to cut them off
        would copy all logits."""
        x = self.norm(F.gelu(self.dense(hidden)))
        bias = F.pad(self.bias, (0, -self.vocab_size % 64), value=-torch.inf)
        return F.linear(x, encoder.tok.weight, bias)

    def score(self, encoder, hidden, target, weight):
        """hidden (N, C), target (N,), weight (N,) bool -> mean cross-entropy, accuracy (0 in
        training)."""
        return fast.loss_in_chunks(
            partial(self.word_logits, encoder),
            learned(self, encoder.tok),
            hidden,
            target,
            weight,
            measure=CrossEntropy(self.vocab_size),
            width=self.vocab_size,
            judge=not self.training,
        )


class MLM(TokenObjective):
    """Masked language modelling (BERT): the head runs at the k selected places only, unless mlm_on
    is all."""

    settings = ("mask_rate", "whole_word", "mlm_on")

    def __init__(self, encoder, cfg):
        super().__init__(encoder, cfg)
        starts = None
        if cfg.whole_word:
            starts = word_starts(encoder.tokenizer, self.vocab_size)
        self.register_buffer("starts", starts, persistent=False)

    def check(self, L):
        if round(self.cfg.mask_rate * (L - 2)) < 1:
            raise ValueError(
                f"--mask_rate {self.cfg.mask_rate} of {L - 2} tokens selects none: "
                "take a larger rate or longer rows"
            )

    def corrupt(self, batch, generator):
        """Edits tokens; adds mlm_slots, mlm_target, mlm_weight (B, k) and mlm_masked (B, L)
        bool."""
        original, eligible = batch["original"], batch["eligible"]
        starts = None
        if self.starts is not None:  # after a special a word begins too
            starts = self.starts[original] | ~eligible.roll(1, 1)
        slots, valid = select(eligible, self.cfg.mask_rate, generator, starts)
        target = original.gather(1, slots)  # (B, k)
        # 80% [MASK], 10% a random word, 10% as they were: fine-tuning will show no [MASK].
        dice = torch.rand(slots.shape, generator=generator, device=slots.device)
        random = torch.randint(
            self.vocab_size - N_SPECIALS, slots.shape, generator=generator, device=slots.device
        )
        shown = torch.where(dice < 0.9, random, target)
        shown = torch.where(dice < 0.8, self.mask_id, shown)
        shown = torch.where(valid, shown, target)
        batch["tokens"] = batch["tokens"].scatter(1, slots, shown)
        masked = torch.zeros_like(eligible).scatter(1, slots, valid)
        batch.update(mlm_slots=slots, mlm_target=target, mlm_weight=valid, mlm_masked=masked)

    def loss(self, encoder, hidden, batch):
        # The head runs at the k slots only: with 15% of the places that is a seventh of its cost.
        slots = batch["mlm_slots"][..., None].expand(-1, -1, hidden.size(-1))
        at_slots = hidden.gather(1, slots).flatten(0, 1)  # (B k, C)
        target = batch["mlm_target"].flatten()
        weight = batch["mlm_weight"].flatten()
        loss, right = self.score(encoder, at_slots, target, weight)
        if self.cfg.mlm_on == "all":  # plus the mean over the rest (P2 sec 5.2, MLM+TP)
            rest = (batch["eligible"] & ~batch["mlm_masked"]).flatten()
            hidden, words = (hidden.flatten(0, 1), batch["original"].flatten())
            loss = loss + self.score(encoder, hidden, words, rest)[0]
        return loss, {} if self.training else {"mlm_accuracy": right}


class CLM(TokenObjective):
    """Causal language modelling: every place predicts the token after it. Attention sees what
    stands to the left."""

    def loss(self, encoder, hidden, batch):
        target = batch["original"][:, 1:].flatten()
        weight = batch["eligible"][:, 1:].flatten()
        hidden = hidden[:, :-1].flatten(0, 1)
        loss, right = self.score(encoder, hidden, target, weight)
        return loss, {} if self.training else {"clm_accuracy": right}


# --------------------------------------------------------------------------------------------------
# Positions


class PairHead(nn.Module):
    """s_ij in R^H -> psi -> logits of the pair's class (P0 sec 3).

    s is one more attention layer's logits on the final hidden states: its own W_q, W_k through
    Encoder.logits, so with the scheme's positional terms and scale (`total`), or
    q_i . k_j / sqrt(D) alone (`content`; P0's formula has no scale: departure). P0 takes the last
    block's own scores (`--pair_from last`); not so here (departure), for that block's value, output
    and FFN weights would learn nothing and reach fine-tuning untrained. psi is H -> 64, GELU,
    -> n_out (`mlp`), or H -> n_out (`linear`).
    """

    def __init__(self, encoder, cfg, n_out):
        super().__init__()
        C, self.n_head = encoder.config.d_model, encoder.config.n_head
        self.last = encoder.config.n_layer - 1
        self.cfg = cfg
        self.table = None  # what the scheme has anew in every layer (rel_k, deberta), here too
        if cfg.pair_from == "own":
            self.query, self.key = XavierLinear(C, C), XavierLinear(C, C)
            if cfg.pair_scores == "total":
                self.table = encoder.pe.layer_weights(encoder.config)
        self.psi = nn.Sequential(
            XavierLinear(self.n_head, PAIR_HIDDEN), nn.GELU(), XavierLinear(PAIR_HIDDEN, n_out)
        )
        if cfg.pair_head == "linear":
            self.psi = XavierLinear(self.n_head, n_out)

    def scores(self, encoder, hidden, batch):
        """(B, L, C) -> s (B, n, n, H) over the inner places."""
        B, L, C = hidden.shape
        if self.cfg.pair_from == "last":  # the last block's input, made again (other dropout)
            before = encoder(batch["tokens"], batch["pos"], n_layer=self.last)
            q, k, _ = encoder.blocks[-1].heads(before)
        else:
            heads = (B, L, self.n_head, -1)
            q = self.query(hidden).view(heads).transpose(1, 2)  # (B, H, L, D)
            k = self.key(hidden).view(heads).transpose(1, 2)
        if self.cfg.pair_scores == "total":
            layer = self.last if self.table is None else self.table
            pos = batch.get("positions", batch["pos"])
            s = encoder.logits(q, k, pos, layer)  # (B, H, L, L)
        else:
            s = q @ k.transpose(-1, -2) / q.size(-1) ** 0.5
        return s[:, :, 1:-1, 1:-1].permute(0, 2, 3, 1)  # (B, n, n, H)


class PPLM(Objective):
    """Position-permutation language modelling (P0 sec 3.1): 60% of the tokens trade places, in
    position only.

    Every ordered pair i != j of ordinary tokens is scored; its class is its true offset j - i, plus
    L - 1. The other position objectives are this one with another corruption, other pairs or
    another label.
    """

    name, kind, classes = "pplm", "position", None
    settings = ("pos_rate", "pair_loss", "pair_scores", "pair_head", "pair_from")

    def __init__(self, encoder, cfg):
        super().__init__(encoder, cfg)
        self.L = encoder.config.max_len
        self.measure = PAIR_LOSSES[cfg.pair_loss](self.classes or 2 * self.L - 1)
        self.head = PairHead(encoder, cfg, self.measure.n_out)

    def check(self, L):
        if round(self.cfg.pos_rate * (L - 2)) < 2:
            raise ValueError(
                f"--pos_rate {self.cfg.pos_rate} of {L - 2} tokens leaves fewer than "
                "2 to hide or permute: take a larger rate or longer rows"
            )

    def corrupt(self, batch, generator):
        """Adds pos (B, L), in which the selected tokens have each other's positions."""
        B, L = batch["tokens"].shape
        slots, valid = select(batch["eligible"], self.cfg.pos_rate, generator)
        true = torch.arange(L, device=slots.device).expand(B, L)
        # The words stay where they are in the tensor; only the positions they claim are shuffled.
        # Sorting random numbers permutes the k slots. Slots that are not valid (specials, in rows
        # with fewer than k words) draw 2, 3, .., above all others and in order: they stay put.
        order = torch.rand(slots.shape, generator=generator, device=slots.device)
        last = 2.0 + torch.arange(slots.size(1), device=slots.device)
        donors = slots.gather(1, torch.where(valid, order, last).argsort(1))
        batch["pos"] = true.scatter(1, slots, donors)

    def label(self, true, given):
        """The class of pairs, from their true and their given offsets."""
        return true + self.L - 1

    def scored(self, pairs, i_moved, j_moved):
        """Which of the pairs (B, n, n) bool count; moved: is an end's position not its true one?"""
        return pairs

    def loss(self, encoder, hidden, batch):
        pos = batch["pos"][:, 1:-1]  # (B, n): the inner places
        eligible = batch["eligible"][:, 1:-1]
        place = torch.arange(1, pos.size(1) + 1, device=pos.device)  # [CLS] has place 0
        true = place - place[:, None]  # (n, n): j - i
        given = pos[:, None] - pos[:, :, None]  # (B, n, n)
        moved = pos != place  # or hidden
        pairs = eligible[:, :, None] & eligible[:, None] & (true != 0)  # (B, n, n)
        pairs = self.scored(pairs, moved[:, :, None], moved[:, None])
        label = self.label(true, given).expand_as(pairs)
        # One more attention layer looks at the final hidden states. Its scores s_ij, one a head,
        # are all that psi sees of a pair: from these few numbers it names the offset.
        s = self.head.scores(encoder, hidden, batch)  # (B, n, n, H)
        # n^2 pairs a row, each with a softmax over 2L - 1 offsets: psi runs in chunks.
        loss, right = fast.loss_in_chunks(
            self.head.psi,
            learned(self.head.psi),
            s.flatten(0, 2),
            label.flatten(),
            pairs.flatten(),
            measure=self.measure,
            width=max(self.measure.n_out, PAIR_HIDDEN),
            judge=not self.training,
        )
        if self.cfg.pair_from == "last":  # every weight has a gradient, as DDP wants: 0
            loss = loss + 0 * hidden.sum()
        return loss, {} if self.training else {f"{self.name}_accuracy": right}


class PMLM(PPLM):
    """Position-masked language modelling (P0 sec 3.1): 60% of the positions are hidden, the tokens
    stay.

    Scored are the ordered pairs with at least one hidden end.
    """

    name, hides_positions = "pmlm", True

    def corrupt(self, batch, generator):
        B, L = batch["tokens"].shape
        true = torch.arange(L, device=batch["tokens"].device).expand(B, L)
        slots, valid = select(batch["eligible"], self.cfg.pos_rate, generator)
        shown = torch.where(valid, UNKNOWN_POS, slots)
        batch["pos"] = true.scatter(1, slots, shown)

    def scored(self, pairs, i_moved, j_moved):
        return pairs & (i_moved | j_moved)


class PPLMSome(PPLM):
    """pplm, scored on the pairs whose two ends really moved (P0: "just the permuted positions")."""

    name = "pplm_some"

    def scored(self, pairs, i_moved, j_moved):
        return pairs & i_moved & j_moved


class PPLMBinary(PPLM):
    """Is the pair's given offset its true one? (P0 says "for each position": read as per pair, a
    departure.)"""

    name, classes = "pplm_binary", 2
    settings = ("pos_rate", "pair_scores", "pair_head", "pair_from")  # no distance to measure

    def label(self, true, given):
        return (true == given).long()


# P0's future work: how far off an offset is, in place of whether it is right.


class Wasserstein(CrossEntropy):
    """W1 between the predicted distribution of a pair's offset and the one true offset:
    sum_c p_c |c - y|. A class is an offset plus L - 1, so their distances are the same.

    Linear in p: a model that knows nothing yet puts all probability on one class near the median,
    where the softmax has no gradient. The three runs so far ended there.
    """

    def loss(self, logits, label):
        classes = torch.arange(logits.size(1), device=label.device)
        distance = (classes - label[:, None]).abs()  # (N, 2L-1)
        return (logits.softmax(-1) * distance).sum(-1)


class SmoothL1(CrossEntropy):
    """One number a pair, its offset as a share of L; quadratic within one place."""

    def __init__(self, n_class):
        super().__init__(n_class)
        self.L, self.n_out = (n_class + 1) // 2, 1

    def loss(self, logits, label):
        true = (label - (self.L - 1)) / self.L
        return F.smooth_l1_loss(logits[:, 0], true, beta=1 / self.L, reduction="none")

    def predict(self, logits):
        return (logits[:, 0] * self.L).round().long() + self.L - 1


PAIR_LOSSES = {"ce": CrossEntropy, "wasserstein": Wasserstein, "smooth_l1": SmoothL1}


# --------------------------------------------------------------------------------------------------
# Contexts


class TC(Objective):
    """Token-alignment contrastive loss (P2 eq 8): what context gives to a token is alike for
    neighbours.

    g = h - e, the hidden state less the word's embedding. For every token, InfoNCE over cosines /
    temperature with one positive, a near token of its row, and K negatives, tokens of other rows;
    both detached (P2's code; its text is silent: departure). e is the word's embedding alone (P2's
    code has word and position: departure); specials take no part (there they do: departure).
    """

    kind, min_rows = "contrastive", 2
    settings = ("tc_on", "tc_embedding", "tc_window", "tc_negatives", "tc_temperature")

    def corrupt(self, batch, generator):
        """Draws tc_candidates (B, L, 1 + K), places in the flat batch, the positive first, and
        tc_weight (B, L)."""
        eligible = batch["eligible"]
        B, L = eligible.shape
        m = eligible.sum(1, keepdim=True)  # (B, 1) eligible tokens of a row
        anchors = eligible
        if self.cfg.tc_on == "masked":
            anchors = batch["mlm_masked"]
        if self.cfg.tc_on == "unmasked":
            anchors = eligible & ~batch["mlm_masked"]
        rows = L * torch.arange(B, device=eligible.device)[:, None, None]
        positives = self.positives(eligible, m, generator)[..., None]
        negatives = self.negatives(eligible, m, generator)
        candidates = torch.cat((rows + positives, negatives), -1)
        batch.update(tc_candidates=candidates, tc_weight=anchors & (m > 1) & (m.sum() > m))

    def positives(self, eligible, m, generator):
        """A uniform eligible place other than i at distance 1 .. (W-1)/2; where there is none, any
        of the row -> (B, L)."""
        B, L = eligible.shape
        device, half = eligible.device, (self.cfg.tc_window - 1) // 2
        place = torch.arange(L, device=device)
        steps = torch.arange(-half, half, device=device)
        steps = steps + (steps >= 0)  # -half .. half without 0
        near = place[:, None] + steps  # (L, W-1)
        inside = (near >= 0) & (near < L)
        free = eligible[:, near.clamp(0, L - 1)] & inside  # (B, L, W-1)
        score = torch.rand(free.shape, generator=generator, device=device)
        score = score.masked_fill(~free, -1)
        best, which = score.max(-1)  # (B, L)
        # Any other: the u-th eligible place, i itself left out.
        order = (~eligible).long().sort(dim=1, stable=True).indices  # eligible places first
        rank = eligible.long().cumsum(1) - 1  # of i among them
        u = draw((m - 1).clamp(min=1).expand(B, L), generator)
        far = order.gather(1, u + (u >= rank))
        return torch.where(best >= 0, place + steps[which], far)

    def negatives(self, eligible, m, generator):
        """K eligible places of other rows, with replacement -> (B, L, K) places in the flat
        batch."""
        B, L = eligible.shape
        order = (~eligible.flatten()).long().sort(stable=True).indices  # all eligible, row by row
        first = (m.cumsum(0) - m)[..., None]  # (B, 1, 1) rank of the row's first
        others = (m.sum() - m).clamp(min=1)[..., None]
        u = draw(others.expand(B, L, self.cfg.tc_negatives), generator)
        u = torch.where(u >= first, u + m[..., None], u)  # jumps over the row itself
        return order[u]

    def embedding(self, encoder, batch):
        """e (B, L, C): what is subtracted."""
        if self.cfg.tc_embedding == "input_layer":  # P2's code
            tokens = batch["tokens"]
            in_order = torch.arange(tokens.size(1), device=tokens.device)
            return encoder.embed(tokens, Positions(batch.get("pos", in_order)))
        tokens = batch["tokens" if self.cfg.tc_embedding == "input" else "original"]
        return encoder.tok(tokens) * encoder.pe.token_scale

    def loss(self, encoder, hidden, batch):
        """P2 eq 6 to 8, with the exp that eq 6 and 7 lack (departure): cross-entropy of the
        positive among 1 + K candidates, mean over the anchors."""
        g = hidden - self.embedding(encoder, batch)
        g = F.normalize(g.float(), dim=-1)  # (B, L, C)
        # Training under autocast takes 16 bits: a quarter of the time. Validation takes all: in
        # bf16 close candidates tie.
        dtype, precision = (compute_dtype(hidden), contextlib.nullcontext())
        if not self.training:
            dtype = g.dtype
            precision = torch.autocast(hidden.device.type, enabled=False)
        flat = g.detach().flatten(0, 1).to(dtype)  # (B L, C)
        candidates = F.embedding(batch["tc_candidates"], flat)  # (B, L, 1+K, C)
        with precision:
            g = g.to(dtype)
            cosines = torch.einsum("blc,blkc->blk", g, candidates)
        logits = cosines.float() / self.cfg.tc_temperature
        weight = batch["tc_weight"].float()
        loss = weighted_mean(logits.logsumexp(-1) - logits[..., 0], weight)
        if self.training:
            return loss, {}
        right = logits[..., 0] > logits[..., 1:].amax(-1)
        return loss, {"tc_accuracy": weighted_mean(right, weight)}


def draw(n, generator):
    """Uniform integers below n (a tensor of counts)."""
    u = torch.rand(n.shape, generator=generator, device=n.device)
    return (u * n).long().clamp(max=n - 1)


class NSP(Objective):
    """Next sentence prediction (BERT), on packed rows (departure): [CLS] first half [SEP] second
    half [SEP].

    The middle eligible token becomes [SEP]. In half of the rows (rounded down) what follows is
    another row's: the chosen rows pass theirs on in a circle. 0: it follows, 1: it does not; from
    [CLS], through BERT's pooler.
    """

    kind, min_rows = "sentence", 4

    def __init__(self, encoder, cfg):
        super().__init__(encoder, cfg)
        C = encoder.config.d_model
        self.sep_id = encoder.config.sep_id
        self.dense, self.out = nn.Linear(C, C), nn.Linear(C, 2)

    def corrupt(self, batch, generator):
        """Makes new rows; adds nsp_label, nsp_weight (B,)."""
        tokens, device = batch["tokens"], batch["tokens"].device
        B, L = tokens.shape
        m = batch["eligible"].sum(1, keepdim=True)
        second = batch["eligible"].cumsum(1) > m // 2  # (B, L)
        middle = second.long().argmax(1, keepdim=True)  # (B, 1)
        order = torch.rand(B, generator=generator, device=device).argsort()
        chosen = order[: B // 2]
        stay = torch.arange(B, device=device)
        donor = stay.scatter(0, chosen, chosen.roll(1))
        after = torch.arange(L, device=device) > middle  # (B, L)
        mixed = torch.where(after, tokens[donor], tokens)
        mixed = mixed.scatter(1, middle, self.sep_id)
        batch["tokens"] = torch.where(m > 2, mixed, tokens)  # too short for halves: left alone
        batch["nsp_label"] = (donor != stay).long()
        batch["nsp_weight"] = (m > 2)[:, 0].float()

    def answer(self, hidden):
        """(B, L, C) -> logits (B, 2)."""
        return self.out(torch.tanh(self.dense(hidden[:, 0])))

    def loss(self, encoder, hidden, batch):
        logits = self.answer(hidden).float()
        label, weight = batch["nsp_label"], batch["nsp_weight"]
        loss = weighted_mean(F.cross_entropy(logits, label, reduction="none"), weight)
        right = weighted_mean(logits.argmax(-1) == label, weight)
        return loss, {} if self.training else {"nsp_accuracy": right}


# --------------------------------------------------------------------------------------------------
# The sum

# Every name of --objective, in the order of the table above: a class, or the sum it stands for.
OBJECTIVES = {
    "mlm": MLM,
    "clm": CLM,
    "pmlm": PMLM,
    "pplm": PPLM,
    "pplm_some": PPLMSome,
    "pplm_binary": PPLMBinary,
    "tc": TC,
    "taco": "mlm+tc",
    "nsp": NSP,
}


class Pretraining(nn.Module):
    """The encoder with the heads of its objectives: what is compiled, wrapped by DDP, and saved."""

    def __init__(self, encoder: Encoder, cfg):
        super().__init__()
        self.encoder = encoder
        self.names = cfg.objective.split("+")
        self.weights = dict(zip(self.names, cfg.loss_weights or [1.0] * len(self.names)))
        self.causal = "clm" in self.names
        parts = {name: OBJECTIVES[name](encoder, cfg) for name in self.names}
        self.objectives = nn.ModuleDict(parts)
        self.objectives.apply(init_weights)
        self.min_rows = max(part.min_rows for part in parts.values())
        for part in parts.values():
            part.check(encoder.config.max_len)
            if part.hides_positions and not encoder.pe.hidden_ok:
                raise ValueError(
                    f"objective {cfg.objective} hides positions, and pe "
                    f"{encoder.config.pe} has no way to say 'unknown': take another"
                )
        if cfg.pair_scores == "content" and not encoder.pe.in_logits:
            raise ValueError(
                "pair_scores content leaves out what the scheme adds to attention "
                f"logits: pe {encoder.config.pe} adds nothing there"
            )

    def corrupt(self, tokens, *key) -> dict:
        """Clean rows (B, L) -> a corrupted batch, a pure function of (tokens, key)."""
        if len(tokens) < self.min_rows:
            raise ValueError(f"{'+'.join(self.names)} needs {self.min_rows} rows in a batch")
        batch = new_batch(tokens, self.encoder.config.vocab_size)
        for name, objective in self.objectives.items():
            objective.corrupt(batch, stream(tokens.device, *key, name))
            if objective.kind == "sentence":  # its rows are the text of the others
                batch.update(new_batch(batch["tokens"], self.encoder.config.vocab_size))
        return batch

    def forward(self, batch):
        """-> loss (), the weighted sum; dict of scalars: each part's loss, unweighted, and what it
        logs."""
        if "pos" in batch:  # what a scheme makes of them once serves the pair head, too
            batch = {**batch, "positions": Positions(batch["pos"])}
        hidden = self.encoder(batch["tokens"], batch.get("positions"), causal=self.causal)
        total, scalars = 0, {}
        for name, objective in self.objectives.items():
            loss, more = objective.loss(self.encoder, hidden, batch)
            total = total + self.weights[name] * loss
            scalars.update({name: loss.detach(), **more})
        return total, scalars


# --------------------------------------------------------------------------------------------------
# Flags and names


@dataclass
class ObjectiveConfig:
    """Every default of the objectives; all are flags.

    Raises ValueError on a value that is impossible or would have no effect (but for the two rates:
    presets set mask_rate, and train.py prints a note).
    """

    objective: str = setting("mlm", "what is predicted, or a sum such as mlm+pplm")
    loss_weights: tuple | None = setting(None, "one for each part of the sum", "(0, 1e9)")
    mask_rate: float = setting(0.15, "share of tokens selected", "(0, 1)")
    whole_word: bool = setting(False, "select whole words")
    mlm_on: str = setting(
        "masked",
        "score the masked tokens, or all (P2's MLM+TP: the two means added)",
        ("masked", "all"),
    )
    pos_rate: float = setting(0.60, "share of positions hidden or permuted (P0)", "(0, 1)")
    pair_loss: str = setting(
        "ce", "how a pair's offset is scored (P0's future work)", tuple(PAIR_LOSSES)
    )
    pair_scores: str = setting(
        "total",
        "the pair head with the scheme's positional terms, or "
        "content: without (P0's formula, scaled)",
        ("total", "content"),
    )
    pair_head: str = setting("mlp", "between the scores and the classes", ("mlp", "linear"))
    pair_from: str = setting(
        "own",
        "scores of a layer of the head's own, or of the last block, as "
        "in P0: its value, output and FFN weights then learn nothing, and "
        "the encoder runs twice",
        ("own", "last"),
    )
    tc_on: str = setting(
        "all",
        "which tokens are anchors; masked: P2's concentrated TACO",
        ("all", "masked", "unmasked"),
    )
    tc_embedding: str = setting(
        "input",
        "what is subtracted from the hidden state: the word seen, "
        "the word there was, word and position (P2's code)",
        ("input", "original", "input_layer"),
    )
    tc_window: int = setting(5, "odd: positives stand at most (W-1)/2 away", "[3, 1e5]")
    tc_negatives: int = setting(50, "tokens of other rows", "[1, 1e5]")
    tc_temperature: float = setting(0.07, "of the softmax over cosines", "(0, 1e9)")

    def __post_init__(self):
        check_settings(self)
        if self.tc_window % 2 == 0:
            raise ValueError(f"--tc_window is {self.tc_window}; it must be odd")
        # Parts in the order of corruption, whatever the spelling, and their weights with them.
        given = spell_out(self.objective)
        names = parse_objective(self.objective)
        if self.loss_weights is not None:
            if len(self.loss_weights) != len(given):
                raise ValueError(f"--loss_weights: {'+'.join(given)} wants {len(given)} numbers")
            self.loss_weights = tuple(self.loss_weights[given.index(name)] for name in names)
        self.objective = "+".join(names)
        for name in without_effect(self, names):
            if not name.endswith("_rate"):
                raise ValueError(
                    f"--{name} is for {', '.join(users(name))}; the objective is {self.objective}"
                )
        for name in ("tc_on", "tc_embedding"):
            value = getattr(self, name)
            if value in ("masked", "unmasked", "original") and "mlm" not in names:
                raise ValueError(
                    f"--{name} {value} needs mlm, which masks; the objective is {self.objective}"
                )


def users(setting_name):
    """The objectives that a setting is for; all, if none names it."""
    parts = [name for name in OBJECTIVES if isinstance(OBJECTIVES[name], type)]
    return [name for name in parts if setting_name in OBJECTIVES[name].settings] or parts


def without_effect(cfg, names):
    """The settings that were changed, but are for objectives other than these."""
    changed = [f.name for f in fields(cfg) if getattr(cfg, f.name) != f.default]
    return [name for name in changed if not set(users(name)) & set(names)]


def spell_out(objective: str) -> list[str]:
    """'pplm+taco' -> ['pplm', 'mlm', 'tc']."""
    parts = []
    for name in objective.split("+"):
        meaning = OBJECTIVES.get(name)
        parts += meaning.split("+") if isinstance(meaning, str) else [name]
    return parts


def parse_objective(objective: str) -> list[str]:
    """'pplm+mlm' -> ['mlm', 'pplm'], in the order of corruption. Raises ValueError, with the
    reason."""
    names = spell_out(objective)
    for name in names:
        if name not in OBJECTIVES:
            raise ValueError(
                f"unknown objective {name!r}; choose from {', '.join(OBJECTIVES)}, or "
                "a sum such as mlm+pplm"
            )
    kinds = [OBJECTIVES[name].kind for name in names]
    for kind in kinds:
        if kinds.count(kind) > 1:
            raise ValueError(
                f"objective {objective}: at most one {kind} objective ({', '.join(of_kind(kind))})"
            )
    if "clm" in names and {"sentence", "position"} & set(kinds):
        raise ValueError(
            f"objective {objective}: clm reads from the left, so it goes with neither "
            f"positions nor {', '.join(of_kind('sentence'))}"
        )
    return sorted(names, key=lambda name: KINDS.index(OBJECTIVES[name].kind))


def of_kind(kind):
    return [name for name in OBJECTIVES if getattr(OBJECTIVES[name], "kind", None) == kind]
