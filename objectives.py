"""Pre-training objectives: how a batch is corrupted, and how the model's prediction is scored.

name          from        what is corrupted                  what is predicted
mlm           BERT        15% of the tokens (80% [MASK],     the original token, at these tokens
                          10% random, 10% kept)              only
clm           RPP         nothing; attention is causal       the next token
pmlm          RPP 3.1     the positions of 60% of the        the true offset of ordered pairs with
                          tokens are masked                  at least one masked position
pplm          RPP 3.1     the positions of 60% of the        the true offset of all ordered pairs
                          tokens are permuted
pplm_some     RPP 3.1     the same                           the same, if both tokens moved
pplm_binary   RPP 3.1     the same                           is the assigned offset the true one?
tc            TACO eq 8   nothing                            which of K + 1 tokens is from the same
                                                             context?
taco          TACO eq 11  mlm+tc
nsp           BERT        [SEP] in the middle; half of the   does the second half follow the first?
                          sequences get another second half

Objectives are joined by `+`: mlm+pplm is the sum of both losses on one corrupted batch. Each
objective has two methods:

    corrupt(batch, generator)       not compiled, because it draws random numbers
    loss(encoder, hidden, batch)    compiled with the encoder -> loss (), {name: ()} to log

No shape depends on the data, so there is no recompilation and no CPU-GPU sync.

A batch is a dictionary with these keys, and each objective adds its own:

    tokens (B, L)      the input of the encoder
    original (B, L)    the tokens before corruption
    eligible (B, L)    bool, True except for special tokens
    pos (B, L)         the assigned positions, if an objective changes them
    positions          pos as a Positions object; Pretraining.forward adds it

Paper names and notation are as in model.py; TACO is Fu et al. (2022). n = L - 2 is the number
of inner tokens, those between [CLS] and the last [SEP]. k = round(rate n) is the number of selected
tokens ("slots") per sequence. Special tokens are never selected and never scored. If a sequence has
fewer than k eligible tokens (because of an inner [SEP]), the remaining slots get weight 0. Losses
of different objectives are not comparable; lib/baselines.py computes what each should be compared
with.
"""

import hashlib
from dataclasses import dataclass, fields

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from data import word_starts
from lib.config import setting, validate_config
from model import (
    N_SPECIALS,
    UNKNOWN_POS,
    Encoder,
    Positions,
    XavierLinear,
    compute_dtype,
    init_weights,
)

PAIR_HIDDEN = 64  # hidden dimension of the pair head's MLP
CHUNK_BYTES = 1 << 30  # maximum memory for the float32 logits of pairs

# Objectives corrupt a batch in this order; a sum has at most one of each kind.
KINDS = ["sentence", "token", "position", "contrastive"]


class Objective(nn.Module):
    """To add an objective, subclass this, override some of these, and add a line to OBJECTIVES."""

    kind = "token"  # one of KINDS
    settings = ()  # the fields of ObjectiveConfig that it uses
    masks_positions = False  # puts UNKNOWN_POS into pos
    min_sequences = 1  # in a batch

    def __init__(self, encoder: Encoder, cfg):
        super().__init__()
        self.cfg = cfg

    def check(self, L):
        """Raise ValueError if sequences of L tokens are too short."""

    def corrupt(self, batch, generator):
        """Change the batch. A token objective changes batch["tokens"] only, and looks at
        batch["original"] for the true ones. A sentence objective replaces the whole batch."""

    def loss(self, encoder, hidden, batch):
        """hidden (B, L, C) -> loss (), dictionary of scalars to log."""


def new_batch(tokens, vocab_size) -> dict:
    """Clean sequences (B, L) -> the dictionary that objectives corrupt."""
    return {"tokens": tokens, "original": tokens, "eligible": tokens < vocab_size - N_SPECIALS}


def seeded_generator(device, *key) -> torch.Generator:
    """A generator that is a function of its key alone, such as (seed, step, micro, name)."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest, "little") >> 1)  # 63 bits


def select(eligible, rate, generator, starts=None):
    """Select k = round(rate * (L - 2)) random eligible tokens per sequence -> slots (B, k) int64,
    their indices, and valid (B, k) bool.

    With starts (B, L) bool, True where a word begins: whole words are selected in random order, and
    the last one may be cut to reach k.
    """
    B, L = eligible.shape
    k = round(rate * (L - 2))
    # Every token draws a random number, and the k largest are selected: sampling without
    # replacement, for all sequences at once. Special tokens get -1, so they come last; where they
    # are among the first k, because there are fewer than k eligible tokens, the slot is not valid.
    score = torch.rand(B, L, generator=generator, device=eligible.device)
    if starts is not None:  # all tokens of word w (1, 2, ...) share the w-th random number
        word = starts.long().cumsum(1)  # (B, L)
        # The clamp only changes word L, the final [SEP], if every token begins a word.
        score = score.gather(1, word.clamp(max=L - 1))
    score = score.masked_fill(~eligible, -1.0)
    score, order = score.sort(dim=1, descending=True, stable=True)
    return order[:, :k], score[:, :k] >= 0


def weighted_mean(values, weight):
    return (values * weight).sum() / weight.sum().clamp(min=1)


# --------------------------------------------------------------------------------------------------
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

    def token_logits(self, encoder, hidden):
        """(..., C) -> (..., V padded as the embedding is); padded ids get -inf."""
        x = self.norm(F.gelu(self.dense(hidden)))
        bias = F.pad(self.bias, (0, -self.vocab_size % 64), value=-torch.inf)
        return F.linear(x, encoder.tok.weight, bias)

    def score(self, encoder, hidden, target, weight):
        """hidden (..., C), target (...), weight (...) bool -> mean cross-entropy, and accuracy in
        evaluation."""
        logits = self.token_logits(encoder, hidden).float().flatten(0, -2)  # (N, V)
        target, weight = target.flatten(), weight.flatten().float()
        loss = weighted_mean(F.cross_entropy(logits, target, reduction="none"), weight)
        if self.training:
            return loss, {}
        return loss, {"accuracy": weighted_mean(logits.argmax(-1) == target, weight)}


class MLM(TokenObjective):
    """Masked language modeling (BERT)."""

    settings = ("mask_rate", "whole_word", "mlm_on")

    def __init__(self, encoder, cfg):
        super().__init__(encoder, cfg)
        starts = word_starts(encoder.tokenizer, self.vocab_size) if cfg.whole_word else None
        self.register_buffer("starts", starts, persistent=False)

    def check(self, L):
        if round(self.cfg.mask_rate * (L - 2)) < 1:
            raise ValueError(
                f"--mask_rate {self.cfg.mask_rate} of {L - 2} tokens selects none: increase it or "
                "--block_size"
            )

    def corrupt(self, batch, generator):
        """Changes tokens; adds mlm_slots, mlm_target (B, k) int64, mlm_weight (B, k) bool and
        mlm_selected (B, L) bool."""
        original, eligible = batch["original"], batch["eligible"]
        starts = None
        if self.starts is not None:  # (2, V), see word_starts in data.py
            starts = self.starts[0][original] | self.starts[1][original.roll(1, 1)]  # (B, L)
        slots, valid = select(eligible, self.cfg.mask_rate, generator, starts)
        target = original.gather(1, slots)  # (B, k)
        # 80% [MASK], 10% a random token, 10% unchanged, since fine-tuning has no [MASK].
        u = torch.rand(slots.shape, generator=generator, device=slots.device)
        n_ordinary = self.vocab_size - N_SPECIALS
        random = torch.randint(n_ordinary, slots.shape, generator=generator, device=slots.device)
        shown = torch.where(u < 0.9, random, target)
        shown = torch.where(u < 0.8, self.mask_id, shown)
        shown = torch.where(valid, shown, target)
        batch["tokens"] = batch["tokens"].scatter(1, slots, shown)
        selected = torch.zeros_like(eligible).scatter(1, slots, valid)
        batch.update(mlm_slots=slots, mlm_target=target, mlm_weight=valid, mlm_selected=selected)

    def loss(self, encoder, hidden, batch):
        # The head runs at the k slots only, by default 15% of the tokens.
        slots = batch["mlm_slots"][..., None].expand(-1, -1, hidden.size(-1))
        at_slots = hidden.gather(1, slots)  # (B, k, C)
        loss, scalars = self.score(encoder, at_slots, batch["mlm_target"], batch["mlm_weight"])
        if self.cfg.mlm_on == "all":  # plus the mean over the other tokens (TACO sec 5.2, MLM+TP)
            others = batch["eligible"] & ~batch["mlm_selected"]
            loss = loss + self.score(encoder, hidden, batch["original"], others)[0]
        return loss, scalars


class CLM(TokenObjective):
    """Causal language modeling: the hidden state of each token predicts the next token."""

    def loss(self, encoder, hidden, batch):
        target, weight = batch["original"][:, 1:], batch["eligible"][:, 1:]
        return self.score(encoder, hidden[:, :-1], target, weight)


# --------------------------------------------------------------------------------------------------
# Positions


class PairHead(nn.Module):
    """RPP sec 3: psi(s_ij) classifies each pair of tokens from its H attention logits s_ij.

    s_ij are the logits of one additional attention layer on the final hidden states, with its own
    W_q and W_k. With pair_scores `total` they include the scheme's positional terms and scale, as
    in every layer of the model; with `content` they are q_i . k_j / sqrt(D) alone (RPP's formula
    has no scale: deviation). RPP takes the logits of the last block instead (deviation), but then
    the value, output and FFN weights of that block would never be trained. psi is
    H -> 64, GELU, -> n_classes (`mlp`), or H -> n_classes (`linear`).
    """

    def __init__(self, encoder, cfg, n_classes):
        super().__init__()
        C, self.n_head = encoder.config.d_model, encoder.config.n_head
        self.layer, self.total = encoder.config.n_layer, cfg.pair_scores == "total"
        self.query, self.key = XavierLinear(C, C), XavierLinear(C, C)
        self.psi = nn.Sequential(
            XavierLinear(self.n_head, PAIR_HIDDEN), nn.GELU(), XavierLinear(PAIR_HIDDEN, n_classes)
        )
        if cfg.pair_head == "linear":
            self.psi = XavierLinear(self.n_head, n_classes)

    def scores(self, encoder, hidden, pos):
        """hidden (B, L, C), pos (B, L) or a Positions -> s (B, n, n, H), for the inner tokens."""
        q = self.query(hidden).unflatten(-1, (self.n_head, -1)).transpose(1, 2)  # (B, H, L, D)
        k = self.key(hidden).unflatten(-1, (self.n_head, -1)).transpose(1, 2)
        if self.total:
            s = encoder.logits(q, k, pos, self.layer)  # (B, H, L, L)
        else:
            s = q @ k.transpose(-1, -2) / q.size(-1) ** 0.5  # (B, H, L, L)
        return s[:, :, 1:-1, 1:-1].permute(0, 2, 3, 1)  # (B, n, n, H)


class PositionObjective(Objective):
    """Relative position prediction (RPP sec 3.1). Some tokens are assigned other positions; the
    tensor of tokens does not change. The head then predicts the true offset j - i of each pair of
    tokens, as class j - i + L - 1. Subclasses override which positions are assigned (`assign`),
    which pairs are scored (`scored`), and what their class is (`label`).
    """

    kind, n_classes = "position", None
    settings = ("pos_rate", "pair_scores", "pair_head")

    def __init__(self, encoder, cfg):
        super().__init__(encoder, cfg)
        self.L = encoder.config.max_len
        n_classes = self.n_classes or 2 * self.L - 1
        self.head = PairHead(encoder, cfg, n_classes)
        self.chunk_size = max(1, CHUNK_BYTES // (4 * max(n_classes, PAIR_HIDDEN)))

    def check(self, L):
        if round(self.cfg.pos_rate * (L - 2)) < 2:
            raise ValueError(
                f"--pos_rate {self.cfg.pos_rate} of {L - 2} tokens selects fewer than 2: increase "
                "it or --block_size"
            )

    def assign(self, slots, valid, generator):
        """Slots (B, k), the indices of the selected tokens -> the positions assigned to them. By
        default, they are permuted among themselves."""
        # Sorting random numbers gives a permutation. Slots that are not valid draw 2, 3, ..., so
        # they are sorted last and in order, and keep their positions.
        order = torch.rand(slots.shape, generator=generator, device=slots.device)
        last = 2.0 + torch.arange(slots.size(1), device=slots.device)
        return slots.gather(1, torch.where(valid, order, last).argsort(1))

    def scored(self, pairs, i_moved, j_moved):
        """Which of the pairs (B, n, n) bool are scored; by default, all. i_moved, j_moved: whether
        the assigned position of token i or j differs from the true one."""
        return pairs

    def label(self, true, assigned):
        """True and assigned offsets of pairs -> their classes."""
        return true + self.L - 1

    def corrupt(self, batch, generator):
        """Adds pos (B, L)."""
        B, L = batch["tokens"].shape
        slots, valid = select(batch["eligible"], self.cfg.pos_rate, generator)
        true = torch.arange(L, device=slots.device).expand(B, L)
        batch["pos"] = true.scatter(1, slots, self.assign(slots, valid, generator))

    def loss(self, encoder, hidden, batch):
        pos = batch["pos"][:, 1:-1]  # (B, n): of the inner tokens
        eligible = batch["eligible"][:, 1:-1]  # (B, n)
        index = torch.arange(1, pos.size(1) + 1, device=pos.device)  # (n,): the true positions
        true = index - index[:, None]  # (n, n): j - i
        # (B, n, n); meaningless where a position is masked, and only PPLMBinary uses it.
        assigned = batch["positions"].offsets[:, 1:-1, 1:-1]
        moved = pos != index  # (B, n): permuted or masked
        pairs = eligible[:, :, None] & eligible[:, None] & (true != 0)  # (B, n, n)
        pairs = self.scored(pairs, moved[:, :, None], moved[:, None])
        label = self.label(true, assigned).expand_as(pairs)
        # psi gets only the H attention logits of a pair, not the hidden states.
        s = self.head.scores(encoder, hidden, batch["positions"])  # (B, n, n, H)
        s, label, weight = s.flatten(0, 2), label.flatten(), pairs.flatten().float()  # N = B n n
        # A sequence has n^2 pairs, each with a softmax over 2L - 1 classes. Large batches are split
        # into chunks, whose logits are recomputed in the backward pass, so that only one chunk's
        # logits exist at a time.
        recompute = len(s) > self.chunk_size and self.training
        total = 0
        for chunk in zip(*[x.split(self.chunk_size) for x in (s, label, weight)]):
            if recompute:
                total = total + checkpoint(self.sums, *chunk, use_reentrant=False)
            else:
                total = total + self.sums(*chunk)
        loss, accuracy = total / weight.sum().clamp(min=1)
        return loss, {} if self.training else {"accuracy": accuracy}

    def sums(self, s, label, weight):
        """s (N, H), label (N,), weight (N,) -> (2,): the weighted sums of loss and correct
        predictions (0 in training)."""
        logits = self.head.psi(s).float()  # (N, n_classes)
        loss = F.cross_entropy(logits, label, reduction="none") * weight
        correct = loss.new_zeros(1) if self.training else (logits.argmax(-1) == label) * weight
        return torch.stack((loss.sum(), correct.sum()))


class PMLM(PositionObjective):
    """Position masking: predict the offset of pairs with at least one masked position."""

    masks_positions = True

    def assign(self, slots, valid, generator):
        return torch.where(valid, UNKNOWN_POS, slots)

    def scored(self, pairs, i_moved, j_moved):
        return pairs & (i_moved | j_moved)


class PPLM(PositionObjective):
    """Position permutation: predict the offset of all pairs."""


class PPLMSome(PositionObjective):
    """PPLM, scored on pairs whose tokens both moved (RPP: "just the permuted positions")."""

    def scored(self, pairs, i_moved, j_moved):
        return pairs & i_moved & j_moved


class PPLMBinary(PositionObjective):
    """Predict whether the assigned offset of a pair is its true one. (Deviation: RPP says "for each
    position", not pair.)"""

    n_classes = 2

    def label(self, true, assigned):
        return (true == assigned).long()


# --------------------------------------------------------------------------------------------------
# Contexts


class TC(Objective):
    """Token-alignment contrastive loss (TACO eq 3 to 8): neighboring tokens should get similar
    information from their context.

    g = h - e, the last hidden state minus the token embedding, is what the context contributed. The
    loss of a token, the anchor, is InfoNCE: the cross-entropy of picking one positive (a nearby
    token of its sequence) over K negatives (tokens of other ones). Logits are cosine / temperature.

    Deviations: candidates are detached (as in TACO's code; the paper does not mention it), e is the
    token embedding alone (TACO's code: token and position embedding), and special tokens are
    excluded (TACO's code includes them).
    """

    kind, min_sequences = "contrastive", 2
    settings = ("tc_on", "tc_embedding", "tc_window", "tc_negatives", "tc_temperature")

    def corrupt(self, batch, generator):
        """Draws tc_candidates (B, L, 1 + K), indices into the flattened batch with the positive
        first, and tc_weight (B, L)."""
        eligible = batch["eligible"]
        B, L = eligible.shape
        m = eligible.sum(1, keepdim=True)  # (B, 1): eligible tokens per sequence
        anchors = batch["mlm_selected"] if self.cfg.tc_on == "masked" else eligible
        # The index, in the flattened batch, at which each sequence begins.
        first_index = L * torch.arange(B, device=eligible.device)[:, None, None]  # (B, 1, 1)
        positives = first_index + self.positives(eligible, m, generator)[..., None]  # (B, L, 1)
        candidates = torch.cat((positives, self.negatives(eligible, m, generator)), -1)
        batch.update(tc_candidates=candidates, tc_weight=anchors & (m > 1) & (m.sum() > m))

    def positives(self, eligible, m, generator):
        """-> (B, L): for each token i, a random eligible token at distance 1 to (W-1)/2, or, if
        there is none, any other eligible token of the sequence."""
        B, L = eligible.shape
        device, half = eligible.device, (self.cfg.tc_window - 1) // 2
        index = torch.arange(L, device=device)
        delta = torch.arange(-half, half, device=device)
        delta = delta + (delta >= 0)  # -half to half without 0
        near = index[:, None] + delta  # (L, W-1)
        inside = (near >= 0) & (near < L)
        allowed = eligible[:, near.clamp(0, L - 1)] & inside  # (B, L, W-1)
        score = torch.rand(allowed.shape, generator=generator, device=device)
        best, which = score.masked_fill(~allowed, -1).max(-1)  # (B, L)
        # Any other token: the u-th eligible one, skipping i itself.
        order = (~eligible).long().sort(dim=1, stable=True).indices  # eligible ones first
        rank = eligible.long().cumsum(1) - 1  # (B, L): of i among them
        u = random_below((m - 1).clamp(min=1).expand(B, L), generator)
        far = order.gather(1, u + (u >= rank))
        return torch.where(best >= 0, index + delta[which], far)

    def negatives(self, eligible, m, generator):
        """-> (B, L, K): eligible tokens of other sequences, with replacement, as indices into the
        flattened batch."""
        B, L = eligible.shape
        order = (~eligible.flatten()).long().sort(stable=True).indices  # (B L,): eligible first
        first = (m.cumsum(0) - m)[..., None]  # (B, 1, 1): where each sequence begins in `order`
        others = (m.sum() - m).clamp(min=1)[..., None]  # (B, 1, 1): eligible tokens of others
        u = random_below(others.expand(B, L, self.cfg.tc_negatives), generator)
        u = torch.where(u >= first, u + m[..., None], u)  # skip the sequence itself
        return order[u]

    def embedding(self, encoder, batch):
        """e (B, L, C): what is subtracted from the hidden state."""
        if self.cfg.tc_embedding == "input_layer":  # as in TACO's code
            index = torch.arange(batch["tokens"].size(1), device=batch["tokens"].device)
            return encoder.embed(batch["tokens"], Positions(batch.get("pos", index)))
        return encoder.tok(batch["tokens"]) * encoder.scheme.token_scale

    def loss(self, encoder, hidden, batch):
        """TACO eq 6 to 8, with the exp that eq 6 and 7 lack (deviation): the cross-entropy of the
        positive among 1 + K candidates, averaged over the anchors."""
        g = hidden - self.embedding(encoder, batch)
        g = F.normalize(g.float(), dim=-1)  # (B, L, C)
        # With autocast, training uses 16 bits, which takes a quarter of the time. Evaluation uses
        # float32, because close candidates tie in bf16.
        dtype = compute_dtype(hidden) if self.training else torch.float32
        flat = g.detach().flatten(0, 1).to(dtype)  # (B L, C)
        candidates = F.embedding(batch["tc_candidates"], flat)  # (B, L, 1+K, C)
        with torch.autocast(hidden.device.type, enabled=False):
            cosines = torch.einsum("blc,blkc->blk", g.to(dtype), candidates)
        logits = cosines.float() / self.cfg.tc_temperature
        weight = batch["tc_weight"].float()
        loss = weighted_mean(logits.logsumexp(-1) - logits[..., 0], weight)
        if self.training:
            return loss, {}
        correct = logits[..., 0] > logits[..., 1:].amax(-1)
        return loss, {"accuracy": weighted_mean(correct, weight)}


def random_below(n, generator):
    """n, a tensor of counts -> for each, a uniform random integer from 0 to n - 1."""
    u = torch.rand(n.shape, generator=generator, device=n.device)
    return (u * n).long().clamp(max=n - 1)


class NSP(Objective):
    """Next sentence prediction (BERT) on packed sequences (deviation): [CLS] first half [SEP]
    second half [SEP].

    The middle eligible token becomes [SEP]. Half of the sequences (rounded down) exchange their
    second halves cyclically. Class 0: the second half follows the first, class 1: it does not. The
    prediction is made from [CLS] through BERT's pooler.
    """

    kind, min_sequences = "sentence", 4  # half of them, at least 2, exchange halves

    def __init__(self, encoder, cfg):
        super().__init__(encoder, cfg)
        C = encoder.config.d_model
        self.sep_id, self.vocab_size = encoder.config.sep_id, encoder.config.vocab_size
        self.dense, self.out = nn.Linear(C, C), nn.Linear(C, 2)

    def corrupt(self, batch, generator):
        """Replaces the sequences of the batch; for the other objectives, the new ones are the
        original text. Adds nsp_label and nsp_weight (B,)."""
        tokens, device = batch["tokens"], batch["tokens"].device
        B, L = tokens.shape
        m = batch["eligible"].sum(1, keepdim=True)
        second = batch["eligible"].cumsum(1) > m // 2  # (B, L)
        middle = second.long().argmax(1, keepdim=True)  # (B, 1)
        order = torch.rand(B, generator=generator, device=device).argsort()
        chosen = order[: B // 2]
        own = torch.arange(B, device=device)
        # donor[b]: the sequence from which b gets its second half. Each chosen one gets that of the
        # chosen one before it; all others keep their own.
        donor = own.scatter(0, chosen, chosen.roll(1))
        after = torch.arange(L, device=device) > middle  # (B, L)
        mixed = torch.where(after, tokens[donor], tokens)
        mixed = mixed.scatter(1, middle, self.sep_id)
        tokens = torch.where(m > 2, mixed, tokens)  # 2 tokens or fewer are not split
        batch.update(new_batch(tokens, self.vocab_size))
        batch["nsp_label"] = (donor != own).long()
        batch["nsp_weight"] = (m > 2)[:, 0].float()

    def classify(self, hidden):
        """(B, L, C) -> logits (B, 2)."""
        return self.out(torch.tanh(self.dense(hidden[:, 0])))

    def loss(self, encoder, hidden, batch):
        logits = self.classify(hidden).float()
        label, weight = batch["nsp_label"], batch["nsp_weight"]
        loss = weighted_mean(F.cross_entropy(logits, label, reduction="none"), weight)
        accuracy = weighted_mean(logits.argmax(-1) == label, weight)
        return loss, {} if self.training else {"accuracy": accuracy}


# --------------------------------------------------------------------------------------------------
# Sums of objectives

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
    """The encoder and the heads of its objectives: what is compiled, wrapped by DDP, and saved."""

    def __init__(self, encoder: Encoder, cfg):
        super().__init__()
        self.encoder = encoder
        self.names = cfg.objective.split("+")
        self.weights = dict(zip(self.names, cfg.loss_weights or [1.0] * len(self.names)))
        self.causal = "clm" in self.names
        parts = {name: OBJECTIVES[name](encoder, cfg) for name in self.names}
        self.objectives = nn.ModuleDict(parts)
        self.objectives.apply(init_weights)
        self.min_sequences = max(part.min_sequences for part in parts.values())
        for part in parts.values():
            part.check(encoder.config.max_len)
            if part.masks_positions and not encoder.scheme.masked_ok:
                raise ValueError(
                    f"--objective {cfg.objective} masks positions, which --pe {encoder.config.pe} "
                    "cannot represent: use another scheme, or pplm"
                )
        # Some schemes have weights per layer; those of layer n_layer are for the pair head. Freeze
        # them if it does not use them: DDP expects a gradient for every weight that requires one.
        has_pair_head = any(part.kind == "position" for part in parts.values())
        for part in encoder.scheme.parts.values():
            if hasattr(part, "layers") and not (has_pair_head and cfg.pair_scores == "total"):
                part.layers[encoder.config.n_layer :].requires_grad_(False)

    def check_batch(self, size):
        """Raise ValueError if a batch of this size is too small."""
        if size < self.min_sequences:
            raise ValueError(
                f"--objective {'+'.join(self.names)} draws from other sequences of the batch: it "
                f"needs --batch_size {self.min_sequences} or more, and as many for validation"
            )

    def corrupt(self, tokens, *key) -> dict:
        """Clean sequences (B, L) -> a corrupted batch, a function of (tokens, key) alone. Raises
        ValueError if there are too few sequences."""
        self.check_batch(len(tokens))
        batch = new_batch(tokens, self.encoder.config.vocab_size)
        for name, objective in self.objectives.items():
            objective.corrupt(batch, seeded_generator(tokens.device, *key, name))
        return batch

    def forward(self, batch):
        """-> loss (), the weighted sum; dictionary of scalars: the unweighted loss of each
        objective and, in evaluation, its accuracy."""
        if "pos" in batch:  # one object, so the pair head reuses the bias of the encoder
            batch = {**batch, "positions": Positions(batch["pos"])}
        hidden = self.encoder(batch["tokens"], batch.get("positions"), causal=self.causal)
        total, scalars = 0, {}
        for name, objective in self.objectives.items():
            loss, extra = objective.loss(self.encoder, hidden, batch)
            total = total + self.weights[name] * loss
            scalars[name] = loss.detach()
            scalars.update({f"{name}_{key}": value for key, value in extra.items()})
        return total, scalars


@dataclass
class ObjectiveConfig:
    """The defaults of the objectives; all fields are flags. Raises ValueError on a value that is
    impossible or would have no effect (except for mask_rate, which presets set)."""

    objective: str = setting("mlm", "pre-training objective, or a sum such as mlm+pplm")
    loss_weights: tuple | None = setting(None, "one weight per objective of the sum", "(0, 1e9)")
    mask_rate: float = setting(0.15, "fraction of tokens that mlm selects", "(0, 1)")
    whole_word: bool = setting(False, "mlm: whole-word masking")
    mlm_on: str = setting(
        "masked", "loss on the masked tokens, or on all (TACO's MLM+TP)", ("masked", "all")
    )
    pos_rate: float = setting(0.60, "fraction of positions masked or permuted", "(0, 1)")
    pair_scores: str = setting(
        "total",
        "the pair head with the scheme's positional terms, or without (RPP's formula)",
        ("total", "content"),
    )
    pair_head: str = setting(
        "mlp", "how a pair's attention logits become class logits", ("mlp", "linear")
    )
    tc_on: str = setting(
        "all", "tc's anchors: all tokens, or masked ones (TACO's concentrated)", ("all", "masked")
    )
    tc_embedding: str = setting(
        "input",
        "what tc subtracts from the hidden state: the token embedding, or the encoder's whole "
        "input layer, with positions and LayerNorm, as in TACO's code",
        ("input", "input_layer"),
    )
    tc_window: int = setting(5, "W, odd: positives are at most (W-1)/2 tokens away", "[3, 1e5]")
    tc_negatives: int = setting(50, "K, number of negatives", "[1, 1e5]")
    tc_temperature: float = setting(0.07, "temperature of the softmax over cosines", "(0, 1e9)")

    def __post_init__(self):
        validate_config(self)
        if self.tc_window % 2 == 0:
            raise ValueError(f"--tc_window is {self.tc_window}; it must be odd")
        # Sort the objectives, and their weights with them, into the order of corruption.
        given = expand_aliases(self.objective)
        names = parse_objective(self.objective)
        if self.loss_weights is not None:
            if len(self.loss_weights) != len(given):
                raise ValueError(
                    f"--loss_weights: {'+'.join(given)} needs {len(given)} numbers, "
                    f"not {len(self.loss_weights)}"
                )
            self.loss_weights = tuple(self.loss_weights[given.index(name)] for name in names)
        self.objective = "+".join(names)
        used = {name for part in names for name in OBJECTIVES[part].settings}
        used |= {"objective", "loss_weights", "mask_rate"}
        for field in fields(self):
            if field.name not in used and getattr(self, field.name) != field.default:
                raise ValueError(f"--{field.name} has no effect on --objective {self.objective}")
        if self.tc_on == "masked" and "mlm" not in names:
            raise ValueError(f"--tc_on masked needs mlm; the objective is {self.objective}")


def expand_aliases(objective: str) -> list[str]:
    """'pplm+taco' -> ['pplm', 'mlm', 'tc']."""
    parts = []
    for name in objective.split("+"):
        meaning = OBJECTIVES.get(name)
        parts += meaning.split("+") if isinstance(meaning, str) else [name]
    return parts


def parse_objective(objective: str) -> list[str]:
    """'pplm+mlm' -> ['mlm', 'pplm'], in the order of corruption. Raises ValueError, with the
    reason, if the sum is not legal."""
    names = expand_aliases(objective)
    for name in names:
        if name not in OBJECTIVES:
            raise ValueError(
                f"unknown --objective {name!r}; choose from {', '.join(OBJECTIVES)}, or a sum such "
                "as mlm+pplm"
            )
    kinds = [OBJECTIVES[name].kind for name in names]
    for kind in kinds:
        if kinds.count(kind) > 1:
            raise ValueError(f"--objective {objective}: at most one {kind} objective")
    if "clm" in names and {"sentence", "position"} & set(kinds):
        raise ValueError(
            f"--objective {objective}: clm is causal, so it cannot be combined with nsp or a "
            "position objective"
        )
    return sorted(names, key=lambda name: KINDS.index(OBJECTIVES[name].kind))
