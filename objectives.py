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

Objectives are joined by `+`: mlm+pplm is the (weighted) sum of both losses on one corrupted batch.
Each objective has two methods:

    corrupt(batch, generator)       not compiled, because it draws random numbers
    loss(encoder, hidden, batch)    compiled with the encoder -> loss (), {name: ()} to log

and two more that say what has been learned: `sample` and `ablate`.

No shape in these two depends on the data, so there is no recompilation and no CPU-GPU sync.

A batch is a dictionary with these keys, and each objective adds its own:

    tokens (B, L)      the input of the encoder
    original (B, L)    the tokens before corruption
    eligible (B, L)    bool, True except for special tokens
    pos (B, L)         the assigned positions, if an objective changes them
    positions, states  a Positions and Encoder.hidden_states, added by Pretraining.forward

Paper names and notation are as in model.py; TACO is Fu et al. (2022). n = L - 2 is the number
of inner tokens, those between [CLS] and the last [SEP]. k = round(rate n) is the number of selected
tokens ("slots") per sequence. Special tokens are never selected and never scored. If a sequence has
fewer than k eligible tokens (because of an inner [SEP]), the remaining slots get weight 0. Losses
of different objectives are not comparable; lib/baselines.py computes what each should be compared
with.
"""

import hashlib
from argparse import Namespace
from dataclasses import dataclass, fields
from typing import Literal, get_args

import tiktoken
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from lib.bpe import word_characters
from lib.config import UserError, pick_fields, printable
from lib.files import read_checkpoint
from lib.restore import MARGIN, best_order, exchange_words
from lib.weights import load_strict
from model import (
    N_SPECIALS,
    UNKNOWN_POS,
    Encoder,
    EncoderConfig,
    Positions,
    compute_dtype,
    linear,
    parse_pe,
    xavier_linear,
)

PAIR_HIDDEN = 64  # hidden dimension of the pair head's MLP
CHUNK_BYTES = 1 << 30  # maximum memory for the float32 logits of pairs

# Objectives corrupt a batch in this order; a sum has at most one of each kind.
KINDS = ["sentence", "token", "position", "contrastive"]


def expand(objective) -> list[str]:
    """'taco+pplm' -> ['mlm', 'tc', 'pplm']: names that stand for a sum are replaced by it."""
    names = []
    for name in objective.split("+"):
        value = OBJECTIVES.get(name)
        names += expand(value) if isinstance(value, str) else [name]
    return names


def sort_objectives(names) -> list[str]:
    """['pplm', 'mlm'] -> ['mlm', 'pplm'], the order of corruption. Raises ValueError, with the
    reason, if the sum is not legal."""
    for name in names:
        if name not in OBJECTIVES:
            raise ValueError(
                f"unknown --objective {name!r}; choose from {', '.join(OBJECTIVES)}, or a sum such "
                "as mlm+pplm"
            )
    kinds = [OBJECTIVES[name].kind for name in names]
    for kind in kinds:
        if kinds.count(kind) > 1:
            raise ValueError(f"--objective {'+'.join(names)}: at most one {kind} objective")
    if "clm" in names and {"sentence", "position"} & set(kinds):
        raise ValueError("clm is causal, so it cannot be combined with nsp or a position objective")
    return sorted(names, key=lambda name: KINDS.index(OBJECTIVES[name].kind))


@dataclass
class ObjectiveConfig:
    """The settings of the objectives. Raises ValueError on an unknown choice or a wrong sum."""

    objective: str = "mlm"  # a name in OBJECTIVES, or a sum such as mlm+pplm
    loss_weights: tuple | None = None  # one weight per objective of the sum
    mask_rate: float = 0.15  # fraction of tokens that mlm selects
    whole_word: bool = False  # mlm: whole-word masking
    mlm_on: Literal["masked", "all"] = "masked"  # loss on the masked tokens, or on all (MLM+TP)
    pos_rate: float = 0.60  # fraction of positions masked or permuted
    pair_scores: Literal["total", "content"] = "total"  # with the scheme's terms, or without
    pair_head: Literal["mlp", "linear"] = "mlp"  # how a pair's logits become class logits
    pair_layer: Literal["extra", "last"] = "extra"  # of one more layer, or of the last block (RPP)
    tc_on: Literal["all", "masked"] = "all"  # tc's anchors (masked: TACO's concentrated)
    tc_embedding: Literal["input", "input_layer"] = "input"  # what tc subtracts from h
    tc_window: int = 5  # W, odd: positives are at most (W-1)/2 tokens away, if one is eligible
    tc_negatives: int = 50  # K
    tc_temperature: float = 0.07

    def __post_init__(self):
        for field in fields(self):
            value, choices = getattr(self, field.name), get_args(field.type)
            if isinstance(value, str) and choices and value not in choices:
                raise ValueError(f"--{field.name} is {value!r}; choose from {', '.join(choices)}")
        if self.tc_window < 3 or self.tc_window % 2 == 0:
            raise ValueError(f"--tc_window is {self.tc_window}; it must be odd and at least 3")
        # Sort the objectives, and their weights with them, into the order of corruption.
        given = expand(self.objective)
        names = sort_objectives(given)
        if self.loss_weights is not None:
            if len(self.loss_weights) != len(given):
                raise ValueError(
                    f"--loss_weights: {'+'.join(given)} needs {len(given)} numbers, "
                    f"not {len(self.loss_weights)}"
                )
            self.loss_weights = tuple(self.loss_weights[given.index(name)] for name in names)
        self.objective = "+".join(names)
        for flag, value in (("tc_on", "masked"), ("mlm_on", "all"), ("whole_word", True)):
            if getattr(self, flag) == value and "mlm" not in names:
                setting = f"--{flag}" if value is True else f"--{flag} {value}"
                raise ValueError(f"{setting} needs mlm; the objective is {self.objective}")


def predicts_positions(objective: str) -> bool:
    """Whether a sum of objectives has one that predicts positions."""
    known = [name for name in expand(objective) if name in OBJECTIVES]
    return any(OBJECTIVES[name].kind == "position" for name in known)


def check_fit(cfg: ObjectiveConfig, encoder_cfg: EncoderConfig, batch_size=None):
    """Raise ValueError if the objectives do not fit the encoder, or a batch is too small."""
    for name in cfg.objective.split("+"):
        objective, n = OBJECTIVES[name], encoder_cfg.max_len - 2
        rate = getattr(cfg, objective.rate) if objective.rate else 1
        if round(rate * n) < objective.min_selected:
            raise ValueError(
                f"--{objective.rate} {rate} of {n} tokens selects fewer than "
                f"{objective.min_selected}: increase it or --block_size"
            )
        masked_ok = all(component.masked_ok for component in parse_pe(encoder_cfg.pe))
        if objective.masks_positions and not masked_ok:
            raise ValueError(
                f"--objective {name} masks positions, which --pe {encoder_cfg.pe} cannot "
                "represent: use another scheme, or pplm"
            )
        if batch_size is not None and batch_size < objective.min_sequences:
            raise ValueError(
                f"--objective {name} needs --batch_size {objective.min_sequences} or more"
            )


class Objective(nn.Module):
    """To add an objective, subclass this, override some of these, and add a line to OBJECTIVES."""

    kind = "token"  # one of KINDS
    masks_positions = False  # puts UNKNOWN_POS into pos
    min_sequences = 1  # in a batch
    rate = None  # the field of ObjectiveConfig that says which share of the tokens it selects
    min_selected = 1  # per sequence
    uses = ablation = None  # "order is", to be followed by "used"; what `ablate` puts there
    learns_after = None  # the objective from whose model it should start

    def __init__(self, encoder: Encoder, cfg):
        super().__init__()
        self.cfg = cfg

    def corrupt(self, batch, generator):
        """Change the batch. A token objective changes batch["tokens"] only, and looks at
        batch["original"] for the true ones. A sentence objective replaces the whole batch."""

    def loss(self, encoder, hidden, batch):
        """hidden (B, L, C) -> loss (), dictionary of scalars to log."""

    def ablate(self, batch, generator):
        """Change a corrupted batch such that what should be used is of no use. If that does not
        raise the loss, the model does not use it."""

    def sample(self, encoder, tokens):
        """Tokens (1, L) -> a line of text that shows what the model makes of them."""


def new_batch(tokens, vocab_size) -> dict:
    """Clean sequences (B, L) -> the dictionary that objectives corrupt."""
    return {"tokens": tokens, "original": tokens, "eligible": tokens < vocab_size - N_SPECIALS}


def hash_seed(*key) -> int:
    """63 bits that are a function of the key, such as (seed, step, micro, name), in any process."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def seeded_generator(device, *key) -> torch.Generator:
    """A generator that is a function of its key alone."""
    return torch.Generator(device).manual_seed(hash_seed(*key))


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
    draw = torch.rand(B, L, generator=generator, device=eligible.device)
    if starts is not None:  # all tokens of word w (0, 1, ...) share the w-th random number
        draw = draw.gather(1, starts.long().cumsum(1) - 1)
    draw = draw.masked_fill(~eligible, -1.0)
    draw, order = draw.sort(dim=1, descending=True, stable=True)
    return order[:, :k], draw[:, :k] >= 0


def begins_word(tokens, in_word):
    """tokens (B, L), in_word (2, V) bool: whether a token's first and last character are part of a
    word (lib/bpe.py) -> (B, L) bool, False where a token continues the word before it."""
    first, last = in_word
    begins = ~(first[tokens] & last[tokens.roll(1, 1)])
    begins[:, 0] = True  # roll compares it with the last token
    return begins


def shuffled_positions(eligible, generator):
    """eligible (B, L) -> positions (B, L): those of eligible tokens in random order, and the index
    of the others."""
    draw = torch.rand(eligible.shape, generator=generator, device=eligible.device)
    # Both sorts are stable and put tokens that are not eligible last, in their own order.
    source = draw.masked_fill(~eligible, 2.0).argsort(dim=1, stable=True)
    target = (~eligible).long().argsort(dim=1, stable=True)
    return torch.empty_like(source).scatter(1, target, source)


def random_tokens(tokens, cls_id, generator):
    """tokens (B, L) -> the same, with every ordinary token replaced by one of the batch's ordinary
    tokens, drawn with replacement."""
    ordinary = tokens < cls_id
    pool = tokens[ordinary]
    draw = torch.randint(len(pool), tokens.shape, generator=generator, device=tokens.device)
    return torch.where(ordinary, pool[draw], tokens)


def token_strings(encoder, ids):
    """A tensor of n ids -> n strings. (Part of a character becomes a replacement character.)"""
    return [encoder.tokenizer.decode([i]) for i in ids.tolist()]


def weighted_mean(values, weight):
    weight = weight.float()
    return (values * weight).sum() / weight.sum().clamp(min=1)


# --------------------------------------------------------------------------------------------------
# Tokens


class TokenObjective(Objective):
    """The head of mlm and clm: dense, GELU, LayerNorm, the tied embedding and a bias."""

    def __init__(self, encoder, cfg):
        super().__init__(encoder, cfg)
        C = encoder.config.d_model
        self.mask_id, self.vocab_size = encoder.config.mask_id, encoder.config.vocab_size
        self.dense = linear(C, C)
        self.norm = nn.LayerNorm(C, eps=encoder.config.norm_eps)
        self.bias = nn.Parameter(torch.zeros(self.vocab_size))

    def token_logits(self, encoder, hidden):
        """(..., C) -> (..., V padded as the embedding is); padded ids get -inf."""
        x = self.norm(F.gelu(self.dense(hidden)))
        n_padding = encoder.tok.num_embeddings - self.vocab_size
        bias = F.pad(self.bias, (0, n_padding), value=-torch.inf)
        return F.linear(x, encoder.tok.weight, bias)

    def score(self, encoder, hidden, target, weight):
        """hidden (..., C), target (...), weight (...) bool -> mean cross-entropy, and accuracy in
        evaluation."""
        logits = self.token_logits(encoder, hidden).float().flatten(0, -2)  # (N, V padded)
        target, weight = target.flatten(), weight.flatten()
        loss = weighted_mean(F.cross_entropy(logits, target, reduction="none"), weight)
        if self.training:
            return loss, {}
        return loss, {"accuracy": weighted_mean(logits.argmax(-1) == target, weight)}


class MLM(TokenObjective):
    """Masked language modeling (BERT)."""

    rate = "mask_rate"
    uses, ablation = "order is", "shuffled positions"

    def __init__(self, encoder, cfg):
        super().__init__(encoder, cfg)
        in_word = word_characters(encoder.tokenizer, self.vocab_size) if cfg.whole_word else None
        self.register_buffer("in_word", in_word, persistent=False)

    def corrupt(self, batch, generator):
        """Changes tokens; adds mlm_slots, mlm_target (B, k) int64, mlm_weight (B, k) bool and
        mlm_selected (B, L) bool."""
        original, eligible = batch["original"], batch["eligible"]
        starts = begins_word(original, self.in_word) if self.cfg.whole_word else None  # (B, L)
        slots, valid = select(eligible, self.cfg.mask_rate, generator, starts)
        target = original.gather(1, slots)  # (B, k)
        # 80% [MASK], 10% a random token, 10% unchanged, since fine-tuning has no [MASK].
        u = torch.rand(slots.shape, generator=generator, device=slots.device)
        n_ordinary = self.vocab_size - N_SPECIALS
        random = torch.randint(n_ordinary, slots.shape, generator=generator, device=slots.device)
        shown = torch.where(u < 0.8, self.mask_id, torch.where(u < 0.9, random, target))
        shown = torch.where(valid, shown, target)
        batch["tokens"] = batch["tokens"].scatter(1, slots, shown)
        selected = torch.zeros_like(eligible).scatter(1, slots, valid)
        batch.update(mlm_slots=slots, mlm_target=target, mlm_weight=valid, mlm_selected=selected)

    def loss(self, encoder, hidden, batch):
        # The head runs at the k slots only, by default 15% of the tokens.
        slots = batch["mlm_slots"][..., None].expand(-1, -1, hidden.size(-1))  # (B, k, C)
        at_slots = hidden.gather(1, slots)  # (B, k, C)
        loss, scalars = self.score(encoder, at_slots, batch["mlm_target"], batch["mlm_weight"])
        if self.cfg.mlm_on == "all":  # plus the mean over the other tokens (TACO sec 5.2, MLM+TP)
            others = batch["eligible"] & ~batch["mlm_selected"]
            loss = loss + self.score(encoder, hidden, batch["original"], others)[0]
        return loss, scalars

    def ablate(self, batch, generator):
        batch["pos"] = shuffled_positions(batch["eligible"], generator)

    def sample(self, encoder, tokens):
        """Masked tokens are shown as [predicted|true]."""
        batch = new_batch(tokens, self.vocab_size)
        self.corrupt(batch, seeded_generator(tokens.device, "sample"))
        logits = self.token_logits(encoder, encoder(batch["tokens"]))[0, :, : encoder.config.cls_id]
        strings = zip(token_strings(encoder, tokens[0]), token_strings(encoder, logits.argmax(-1)))
        text = "".join(
            f" [{predicted.strip()}|{true.strip()}]" if masked else true
            for (true, predicted), masked in zip(strings, batch["mlm_selected"][0])
        )
        return text.removeprefix("[CLS]").removesuffix("[SEP]")


class CLM(TokenObjective):
    """Causal language modeling: the hidden state of each token predicts the next token."""

    def loss(self, encoder, hidden, batch):
        target, weight = batch["original"][:, 1:], batch["eligible"][:, 1:]
        return self.score(encoder, hidden[:, :-1], target, weight)


# --------------------------------------------------------------------------------------------------
# Positions


class PairHead(nn.Module):
    """RPP sec 3: psi(s_ij) classifies each pair of tokens from s_ij, its H attention logits.

    RPP takes the logits of the last block (pair_layer `last`). The values, output and FFN of that
    block then get no gradient from position prediction. By default (`extra`, deviation), s_ij are
    the logits of one more attention layer on the final hidden states, with its own W_q and W_k. For
    pplm alone, `last` with N layers equals `extra` with N - 1, except for the initialization.

    With pair_scores `total` the logits include the scheme's positional terms and scale, as in every
    layer of the model; with `content` they are q_i . k_j / sqrt(D) alone (RPP's formula has no
    scale: deviation). psi is H -> 64, GELU, -> n_classes (`mlp`), or H -> n_classes (`linear`).
    """

    def __init__(self, encoder, cfg, n_classes):
        super().__init__()
        C, self.n_head = encoder.config.d_model, encoder.config.n_head
        self.extra, self.total = cfg.pair_layer == "extra", cfg.pair_scores == "total"
        if self.extra:
            self.query, self.key = xavier_linear(C, C), xavier_linear(C, C)
            if self.total:  # the encoder's scheme gets weights for one more layer
                encoder.add_layer()
        if cfg.pair_head == "linear":
            self.psi = xavier_linear(self.n_head, n_classes)
        else:
            first = xavier_linear(self.n_head, PAIR_HIDDEN)
            self.psi = nn.Sequential(first, nn.GELU(), xavier_linear(PAIR_HIDDEN, n_classes))

    def scores(self, encoder, states, pos):
        """states: what Encoder.hidden_states returned for the assigned positions pos, (B, L) or a
        Positions -> s (B, n, n, H), for the inner tokens."""
        if self.extra:
            layer = encoder.config.n_layer
            q, k = (  # (B, H, L, D) each
                project(states[-1]).unflatten(-1, (self.n_head, -1)).transpose(1, 2)
                for project in (self.query, self.key)
            )
        else:
            layer = encoder.config.n_layer - 1
            q, k, _ = encoder.blocks[layer].normed_heads(states[layer])  # (B, H, L, D)
        if self.total:
            s = encoder.logits(q, k, pos, layer)  # (B, H, L, L)
        else:
            s = q @ k.transpose(-1, -2) / q.size(-1) ** 0.5  # (B, H, L, L)
        return s[:, :, 1:-1, 1:-1].permute(0, 2, 3, 1)  # (B, n, n, H)


class PPLM(Objective):
    """Position permutation (RPP sec 3.1). Some tokens are assigned each other's positions; the
    tensor of tokens does not change. The head then predicts the true offset j - i of each ordered
    pair of tokens, as class j - i + max_len - 1. The loss is the mean over all pairs of the batch.

    For example, the slots [5, 2, 7] are assigned [7, 5, 2]: token 5 gets position 7, and so on. The
    pair of tokens 5 and 2 then has the assigned offset 5 - 7 = -2, and its true offset is -3.

    Variants override which positions are assigned (`assign`), which pairs are scored (`scored`), or
    what their class is (`label`).
    """

    kind, n_classes = "position", None
    rate, min_selected = "pos_rate", 2
    uses, ablation = "the tokens are", "random tokens"

    def __init__(self, encoder, cfg):
        super().__init__(encoder, cfg)
        self.max_len, self.cls_id = encoder.config.max_len, encoder.config.cls_id
        n_classes = self.n_classes or 2 * self.max_len - 1
        self.head = PairHead(encoder, cfg, n_classes)
        self.chunk_size = max(1, CHUNK_BYTES // (4 * max(n_classes, PAIR_HIDDEN)))

    def assign(self, slots, valid, generator):
        """Slots (B, k), the indices of the selected tokens -> the positions assigned to them: those
        of the valid slots in random order."""
        # Sorting random numbers gives a permutation. Slots that are not valid (they come last) draw
        # 2, 3, ..., so they are sorted last and in order, and keep their positions.
        draw = torch.rand(slots.shape, generator=generator, device=slots.device)
        last = 2.0 + torch.arange(slots.size(1), device=slots.device)
        return slots.gather(1, torch.where(valid, draw, last).argsort(1))

    def corrupt(self, batch, generator):
        """Adds pos (B, L)."""
        B, L = batch["tokens"].shape
        slots, valid = select(batch["eligible"], self.cfg.pos_rate, generator)  # (B, k)
        true_pos = torch.arange(L, device=slots.device).expand(B, L)
        batch["pos"] = true_pos.scatter(1, slots, self.assign(slots, valid, generator))

    def scored(self, pairs, i_moved, j_moved):
        """Which of the pairs (B, n, n) bool are scored: here, all. i_moved, j_moved: whether the
        assigned position of token i or j differs from the true one."""
        return pairs

    def label(self, true_offset, assigned_offset):
        """The offsets of pairs, (n, n) and (B, n, n) -> their classes, with either shape."""
        return true_offset + self.max_len - 1

    def sums(self, s, label, weight):
        """s (N, H), label (N,), weight (N,) -> (2,): the weighted sums of loss and correct
        predictions (0 in training)."""
        logits = self.head.psi(s).float()  # (N, n_classes)
        loss = F.cross_entropy(logits, label, reduction="none") * weight
        correct = loss.new_zeros(1) if self.training else (logits.argmax(-1) == label) * weight
        return torch.stack((loss.sum(), correct.sum()))

    def loss(self, encoder, hidden, batch):
        pos = batch["pos"][:, 1:-1]  # (B, n): of the inner tokens
        eligible = batch["eligible"][:, 1:-1]  # (B, n)
        index = torch.arange(1, pos.size(1) + 1, device=pos.device)  # (n,): the true positions
        true_offset = index - index[:, None]  # (n, n): j - i
        assigned_offset = pos[:, None, :] - pos[:, :, None]  # (B, n, n); only PPLMBinary uses it
        moved = pos != index  # (B, n): permuted or masked
        pairs = eligible[:, :, None] & eligible[:, None] & (true_offset != 0)  # (B, n, n)
        pairs = self.scored(pairs, moved[:, :, None], moved[:, None])
        label = self.label(true_offset, assigned_offset).expand_as(pairs)  # (B, n, n)
        # psi gets only the H attention logits of a pair, not the hidden states.
        s = self.head.scores(encoder, batch["states"], batch["positions"])  # (B, n, n, H)
        s, label, weight = s.flatten(0, 2), label.flatten(), pairs.flatten().float()  # N = B n n
        # A sequence has n^2 pairs, each with a softmax over 2L - 1 classes. Large batches are split
        # into chunks, whose logits are recomputed in the backward pass, so that only one chunk's
        # logits exist at a time.
        recompute = len(s) > self.chunk_size
        total = 0
        for chunk in zip(*[x.split(self.chunk_size) for x in (s, label, weight)]):
            if recompute:
                total = total + checkpoint(self.sums, *chunk, use_reentrant=False)
            else:
                total = total + self.sums(*chunk)
        loss, accuracy = total / weight.sum().clamp(min=1)
        return loss, {} if self.training else {"accuracy": accuracy}

    def ablate(self, batch, generator):
        batch["tokens"] = random_tokens(batch["tokens"], self.cls_id, generator)

    def offset_log_p(self, encoder, tokens, pos):
        """Tokens (B, L) and their positions (B, L) -> the log-probability of each offset of each
        pair of the n = L - 2 inner tokens, (B, n, n, 2 max_len - 1), on the CPU."""
        scores = self.head.scores(encoder, encoder.hidden_states(tokens, pos), pos)
        return self.head.psi(scores).float().log_softmax(-1).cpu()

    def exchange(self, encoder, tokens):
        """Tokens (1, L) -> positions (n,) of the inner tokens, in which two words have exchanged
        theirs."""
        strings = token_strings(encoder, tokens[0, 1:-1])
        return exchange_words(strings, seeded_generator("cpu", "sample"))

    def restore(self, encoder, tokens, pos, margin=MARGIN):
        """Tokens (1, L) and positions (n,) of the inner ones -> positions (n,), as best_order
        leaves them. pmlm masks those positions that are not true."""
        n = len(pos)
        moved = pos != torch.arange(1, n + 1)

        def predict(pos):
            if self.masks_positions:
                pos = torch.where(moved, UNKNOWN_POS, pos)
            pos = torch.cat((torch.tensor([0]), pos, torch.tensor([n + 1])))[None]  # (1, L)
            return self.offset_log_p(encoder, tokens, pos.to(tokens.device))[0]

        return best_order(predict, pos, margin)

    def sample(self, encoder, tokens):
        """A text with exchanged words -> what the model makes of it."""
        strings, pos = token_strings(encoder, tokens[0, 1:-1]), self.exchange(encoder, tokens)
        restored = self.restore(encoder, tokens, pos)
        given, found = ("".join(strings[i] for i in x.argsort()) for x in (pos, restored))
        verdict = "correct" if found == "".join(strings) else f"true: {''.join(strings).strip()}"
        return f"{given} -> {'unchanged' if found == given else found} ({verdict})"


class PMLM(PPLM):
    """Position masking: predict the offset of pairs with at least one masked position."""

    masks_positions = True

    def assign(self, slots, valid, generator):
        return torch.where(valid, UNKNOWN_POS, slots)

    def scored(self, pairs, i_moved, j_moved):
        return pairs & (i_moved | j_moved)


class PPLMSome(PPLM):
    """PPLM, scored on pairs whose tokens both moved (RPP: "just the permuted positions"). These are
    few, and small models hardly use their tokens, unless they have learned pplm before."""

    learns_after = "pplm"

    def scored(self, pairs, i_moved, j_moved):
        return pairs & i_moved & j_moved


class PPLMBinary(PPLM):
    """Predict whether the assigned offset of a pair is its true one. (Deviation: RPP says "for each
    position", not pair.) A small model may not use its tokens, unless it has learned pplm before.
    """

    n_classes, learns_after = 2, "pplm"

    def label(self, true_offset, assigned_offset):
        return (true_offset == assigned_offset).long()

    def offset_log_p(self, encoder, tokens, pos):
        """As in PPLM, but scores: the assigned offset of each pair has the log-probability that it
        is the true one, and every other offset that it is not."""
        false, true = super().offset_log_p(encoder, tokens, pos).split(1, -1)  # (B, n, n, 1) each
        assigned = (pos[:, None, 1:-1] - pos[:, 1:-1, None]).cpu()[..., None]  # (B, n, n, 1)
        log_p = false.repeat(1, 1, 1, 2 * self.max_len - 1)
        return log_p.scatter(-1, assigned + self.max_len - 1, true)


# --------------------------------------------------------------------------------------------------
# Contexts


def random_below(n, generator):
    """n, a tensor of counts -> for each, a uniform random integer from 0 to n - 1."""
    u = torch.rand(n.shape, generator=generator, device=n.device)
    return (u * n).long().clamp(max=n - 1)


class TC(Objective):
    """Token-alignment contrastive loss (TACO eq 3 to 8): neighboring tokens should get similar
    information from their context.

    g = h - e, the last hidden state minus the token embedding, is what the context contributed. The
    loss of a token, the anchor, is InfoNCE: the cross-entropy of picking one positive (a nearby
    token of its sequence, or any other if none is near) over K negatives (tokens of other
    sequences). Logits are cosine / temperature.

    An example with K = 2 and a window of 5, so that positives are at most 2 tokens away:

        sequence 0   [CLS] the  keys of   a  dict [SEP]      the anchor is `of`
        sequence 1   [CLS] open the file and read [SEP]

    The positive is `the`, `keys`, `a` or `dict`, say `keys`; the negatives are 2 tokens of sequence
    1, say `file` and `read`. In the flattened batch, in which sequence 1 begins at 7, their indices
    are tc_candidates[0, 3] = [2, 10, 12], and the loss of `of` is the cross-entropy of class 0.

    Deviations: candidates are detached (as in TACO's code; the paper does not mention it), e is the
    token embedding alone, before LayerNorm, at first about 0.02 times as long as h (TACO's code:
    the output of the input layer, see tc_embedding), and special tokens are excluded (TACO's code
    includes them).
    """

    kind, min_sequences = "contrastive", 2

    def corrupt(self, batch, generator):
        """Draws tc_candidates (B, L, 1 + K), indices into the flattened batch with the positive
        first, and tc_weight (B, L)."""
        eligible = batch["eligible"]
        B, L = eligible.shape
        m = eligible.sum(1, keepdim=True)  # (B, 1): eligible tokens per sequence
        anchors = batch["mlm_selected"] if self.cfg.tc_on == "masked" else eligible
        # The index, in the flattened batch, at which each sequence begins.
        first_index = L * torch.arange(B, device=eligible.device)[:, None, None]  # (B, 1, 1)
        near, is_near = self.nearby(eligible, generator)
        near = torch.where(is_near, near, self.elsewhere(eligible, m, generator))
        positives = first_index + near[..., None]  # (B, L, 1)
        candidates = torch.cat((positives, self.negatives(eligible, m, generator)), -1)
        # A token counts if it has a positive (m > 1) and negatives (in other sequences).
        batch.update(tc_candidates=candidates, tc_weight=anchors & (m > 1) & (m.sum() > m))

    def nearby(self, eligible, generator):
        """-> (B, L): a random eligible token at distance 1 to (W-1)/2; (B, L) bool: is there one?
        Each neighbor draws a number, and the largest one wins."""
        L, device, half = eligible.size(1), eligible.device, (self.cfg.tc_window - 1) // 2
        index = torch.arange(L, device=device)
        delta = torch.arange(-half, half, device=device)
        delta = delta + (delta >= 0)  # -half to half without 0
        near = index[:, None] + delta  # (L, W-1)
        inside = (near >= 0) & (near < L)
        allowed = eligible[:, near.clamp(0, L - 1)] & inside  # (B, L, W-1)
        score = torch.rand(allowed.shape, generator=generator, device=device)
        best, which = score.masked_fill(~allowed, -1).max(-1)  # (B, L)
        return index + delta[which], best >= 0

    def elsewhere(self, eligible, m, generator):
        """-> (B, L): another eligible token of the sequence: the u-th one, skipping i itself."""
        order = (~eligible).long().sort(dim=1, stable=True).indices  # eligible ones first
        rank = eligible.long().cumsum(1) - 1  # (B, L): of i among them
        u = random_below((m - 1).clamp(min=1).expand_as(rank), generator)
        return order.gather(1, u + (u >= rank))

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
            return encoder.embed(batch["tokens"], batch["positions"])
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
        weight = batch["tc_weight"]
        loss = weighted_mean(logits.logsumexp(-1) - logits[..., 0], weight)
        if self.training:
            return loss, {}
        correct = logits[..., 0] > logits[..., 1:].amax(-1)
        return loss, {"accuracy": weighted_mean(correct, weight)}


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
        self.dense, self.out = linear(C, C), linear(C, 2)

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
        # (A tiny text may be in the batch twice, so that a donor has the same second half.)
        batch["nsp_label"] = (mixed != tokens).any(1).long()
        mixed = mixed.scatter(1, middle, self.sep_id)
        tokens = torch.where(m > 2, mixed, tokens)  # 2 tokens or fewer are not split
        batch.update(new_batch(tokens, self.vocab_size))
        batch["nsp_weight"] = (m > 2)[:, 0]

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
        check_fit(cfg, encoder.config)
        self.encoder, self.cfg = encoder, cfg
        self.names = cfg.objective.split("+")
        self.min_sequences = max(OBJECTIVES[name].min_sequences for name in self.names)
        self.weights = dict(zip(self.names, cfg.loss_weights or [1.0] * len(self.names)))
        self.causal = "clm" in self.names
        parts = {name: OBJECTIVES[name](encoder, cfg) for name in self.names}
        self.objectives = nn.ModuleDict(parts)
        if cfg.pair_layer == "last" and all(part.kind == "position" for part in parts.values()):
            # Nothing trains what follows the last block's logits. (The W_v in its qkv gets a
            # gradient of 0.) Freeze it: DDP expects a gradient for every weight that requires one.
            block = encoder.blocks[-1]
            after = [block.out, block.fc1, block.fc2, block.norm2]
            after.append(encoder.final_norm if block.pre else block.norm1)
            if cfg.pair_scores == "content":  # then its logits have no positional terms either
                components = encoder.scheme.parts.values()
                after += [x.layers[-1] for x in components if hasattr(x, "layers")]
            for module in after:
                module.requires_grad_(False)

    def corrupt(self, tokens, *key) -> dict:
        """Clean sequences (B, L) -> a corrupted batch, a function of (tokens, key) alone. Raises
        ValueError if there are too few sequences."""
        if len(tokens) < self.min_sequences:
            raise ValueError(f"{self.cfg.objective} needs {self.min_sequences} sequences or more")
        batch = new_batch(tokens, self.encoder.config.vocab_size)
        for name, objective in self.objectives.items():
            objective.corrupt(batch, seeded_generator(tokens.device, *key, name))
        return batch

    @torch.no_grad()
    def samples(self, tokens):
        """The beginning of a sequence (1, L) -> one line of text per objective that has any: what
        the model makes of it."""
        tokens, was_training = tokens[:, :24].clone(), self.training
        tokens[:, -1] = self.encoder.config.sep_id
        self.eval()
        texts = [objective.sample(self.encoder, tokens) for objective in self.objectives.values()]
        self.train(was_training)
        return [printable(" ".join(text.split())) for text in texts if text]

    def forward(self, batch):
        """-> loss (), the weighted sum; dictionary of scalars: the unweighted loss of each
        objective and, in evaluation, its accuracy."""
        states, pos = [], Positions.of(batch["tokens"], batch.get("pos"))
        hidden = self.encoder(batch["tokens"], pos, causal=self.causal, states=states)
        batch = {**batch, "positions": pos, "states": states}
        total, scalars = 0, {}
        for name, objective in self.objectives.items():
            loss, extra = objective.loss(self.encoder, hidden, batch)
            total = total + self.weights[name] * loss
            scalars[name] = loss.detach()
            scalars.update({f"{name}_{key}": value for key, value in extra.items()})
        return total, scalars


def load(path) -> Pretraining:
    """A run folder or checkpoint file -> the encoder with the heads of its objectives, in eval
    mode, without gradients; `.run_info` is the checkpoint without its weights. Raises
    UserError."""
    checkpoint = read_checkpoint(path)
    if "task" in checkpoint:
        raise UserError(
            f"{path} is fine-tuned, without the heads of pre-training: give the run that it "
            "started from"
        )
    encoder = Encoder(EncoderConfig(**checkpoint["config"]))
    encoder.tokenizer = tiktoken.Encoding(**checkpoint["tokenizer"])
    args = Namespace(**checkpoint["args"])
    model = Pretraining(encoder, pick_fields(ObjectiveConfig, args))
    load_strict(model, checkpoint["model"], path)
    model.run_info = {k: v for k, v in checkpoint.items() if k not in ("model", "optimizer")}
    return model.requires_grad_(False).eval()
