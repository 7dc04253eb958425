"""Try a model: it says something about a text of yours.

    python sample.py                                               # asks for texts, line by line
    python sample.py --text 'Returns the [MASK] of the array.'     # for a model of mlm
    python sample.py --text 'It is not possible to use both.'      # for one of positions

Takes the newest run under out/ unless --ckpt names one. What a model says depends on what it was
trained for:

mlm                      a text with [MASK]             the five likeliest words
pplm, pplm_some, pmlm    a sentence                     is shuffled, and put back in order
pplm_binary              a sentence                     is shuffled: which words moved?
clm                      the beginning of a text        goes on
nsp                      'one part ||| another'         does the second follow the first?
tc                       'one text ||| another'         how alike are contexts, within and across?

train.py prints line() of a fixed sentence, so that one sees a model learn.
"""

import math
import re
from argparse import Namespace
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from common import Parser, newest_run, one_line_errors, pick_fields, read_checkpoint, setting
from model import UNKNOWN_POS, load, load_strict
from objectives import ObjectiveConfig, Pretraining, new_batch, stream

NEXT_TOKENS = 20  # with which clm goes on
SHUFFLES = 40  # of a sentence that is put back in order
SEARCHED = 100_000  # tokens of the validation text in which a fixed sentence is looked for
USES = {
    "mlm": "a text with [MASK]",
    "position": "a sentence, to be shuffled",
    "clm": "the beginning of a text",
    "nsp": "'one part ||| another'",
    "tc": "'one text ||| another'",
}


@dataclass
class SampleConfig:
    ckpt: str | None = setting(None, "run folder or checkpoint file (default: the newest run)")
    text: str | None = setting(None, "what to try it on (default: asks, line by line)")


# --------------------------------------------------------------------------------------------------
# A model and a row


def load_pretraining(path):
    """A run folder or checkpoint file -> the encoder with the heads of its objectives, in eval
    mode, without gradients; `.facts` is the checkpoint.

    A model that finetune.py saved has no objectives. Raises ValueError, FileNotFoundError.
    """
    facts = read_checkpoint(path)
    encoder = load(path).requires_grad_(False)
    if "task" in facts:
        name = f"finetuned-{facts['task']}"
        return Namespace(encoder=encoder, names=[name], objectives={}, causal=False)
    model = Pretraining(encoder, pick_fields(ObjectiveConfig, Namespace(**facts["args"])))
    load_strict(model, facts["model"], path)
    model.facts = facts
    return model.requires_grad_(False).eval()


def position_objective(model):
    for objective in model.objectives.values():
        if objective.kind == "position":
            return objective


def row(encoder, *texts):
    """-> [CLS] text [SEP] .. as (1, L). A [MASK] takes its leading space with it, as in training.
    Raises ValueError when the row is longer than the model's."""
    cfg = encoder.config
    ids = [cfg.cls_id]
    for text in texts:
        text = text.replace(" [MASK]", "[MASK]")
        ids += encoder.tokenizer.encode(text, allowed_special={"[MASK]"}, disallowed_special=())
        ids.append(cfg.sep_id)
    if not 4 <= len(ids) <= cfg.max_len:
        raise ValueError(
            f"the text has {len(ids) - 2} tokens; between 2 and {cfg.max_len - 2} fit this model"
        )
    return torch.tensor([ids], device=encoder.tok.weight.device)


def shown(piece):
    """A token for people: ' word' is word; what begins no word stands in quotes."""
    return piece[1:] if piece[:1] == " " and piece[1:].isalnum() else repr(piece)


# --------------------------------------------------------------------------------------------------
# Words


def fill_masks(encoder, mlm, text, n=5):
    """For each [MASK] the n likeliest tokens -> [(token, probability), ..], .."""
    tokens = row(encoder, text)
    hidden = encoder(tokens)[tokens == encoder.config.mask_id]  # (masks, C)
    logits = mlm.word_logits(encoder, hidden)[:, : encoder.config.cls_id]  # not a special
    p, best = logits.softmax(-1).topk(n)
    for ids, q in zip(best.tolist(), p.tolist()):
        yield [(encoder.tokenizer.decode([i]), x) for i, x in zip(ids, q)]


def go_on(encoder, clm, text):
    """The likeliest next token, NEXT_TOKENS times or until the row is full -> text."""
    tokens = row(encoder, text)[:, :-1]
    n_given = tokens.size(1)
    for _ in range(min(NEXT_TOKENS, encoder.config.max_len - n_given)):
        last = encoder(tokens, causal=True)[:, -1:]  # (1, 1, C)
        logits = clm.word_logits(encoder, last)[..., : encoder.config.cls_id]
        tokens = torch.cat((tokens, logits.argmax(-1)), 1)
    return encoder.tokenizer.decode(tokens[0, n_given:].tolist())


def what_context_gives(model, texts):
    """tc's g = h - e of two texts -> the mean cosine of two tokens of one text, and of two
    texts."""
    encoder, g = model.encoder, []
    for text in texts:
        tokens = row(encoder, text)
        hidden = encoder(tokens, causal=model.causal)
        e = model.objectives["tc"].embedding(encoder, new_batch(tokens, encoder.config.vocab_size))
        g.append(F.normalize((hidden - e)[0, 1:-1].double(), dim=-1))  # (n, C)
    within = [((x @ x.T).sum(1) - 1) / (len(x) - 1) for x in g]  # less the token with itself
    return float(torch.cat(within).mean()), float((g[0] @ g[1].T).mean())


# --------------------------------------------------------------------------------------------------
# Order


def shuffled(encoder, objective, text, seed=0):
    """Shuffle (or hide) the positions of a sentence, as in training -> its n words, batch, hidden
    (1, L, C). A space comes first: without it the first word would give its place away."""
    tokens = row(encoder, " " + text.lstrip())
    device = tokens.device
    objective.check(tokens.size(1))
    batch = new_batch(tokens, encoder.config.vocab_size)
    if batch["eligible"].sum() < 2:
        raise ValueError(f"{text!r} has no two words to shuffle")
    true = batch["pos"] = torch.arange(tokens.size(1), device=device)
    while (batch["pos"] == true).all():  # of a short text all may stay where they are
        objective.corrupt(batch, stream(device, seed, "probe"))
        seed += 1
    words = [encoder.tokenizer.decode([i]) for i in tokens[0, 1:-1].tolist()]
    return words, batch, encoder(tokens, batch["pos"])


def offset_scores(objective, encoder, hidden, batch):
    """How likely every offset of all pairs of inner places is, in nats -> (B, n, n, 2L - 1). Of
    smooth_l1, which predicts one number: minus the distance from it."""
    logits = objective.head.psi(objective.head.scores(encoder, hidden, batch)).float()
    if objective.cfg.pair_loss == "smooth_l1":
        L = objective.L
        return -(torch.arange(1 - L, L, device=logits.device) - L * logits).abs()
    return logits.log_softmax(-1)


def best_order(scores, given):
    """Where n words are given (n,), and scores (n, n, 2L - 1) of their offsets -> where they should
    stand: two are exchanged, whichever makes all offsets likeliest, until no exchange helps.

    It starts from the given places and from the words sorted by their mean offsets; the likelier
    end counts. The given order is no answer: most pairs did not move, but something did.
    """
    n, L = len(given), scores.size(-1) // 2 + 1
    offset = scores.softmax(-1) @ torch.arange(1.0 - L, L)
    rank = (offset.mean(0) - offset.mean(1)).argsort().argsort()  # right of others: late
    word, ends = torch.arange(n), []
    both = (scores + scores.transpose(0, 1).flip(-1)).double()  # a pair's two offsets together
    both[word, word] = 0
    for pos in (given, given.sort().values[rank]):
        while True:
            r = pos - pos[:, None] + L - 1  # (n, n)
            now, turned = (both.gather(-1, x[..., None])[..., 0] for x in (r, r.T))
            # gain[i, j]: of word i's pairs, if it stood where j stands; j has no other place yet.
            gain = both[:, word, r].sum(-1) - both[..., L - 1] - now.sum(1, keepdim=True)
            gain = gain + gain.T + now + turned  # both move: their own pair's offset turns
            moved = (pos != given).nonzero()[:, 0]
            gain.fill_diagonal_(1e-6 if len(moved) else -math.inf)  # no exchange
            if len(moved) == 2:  # to exchange them again would lead back
                gain[moved, moved.flip(0)] = -math.inf
            i, j = divmod(int(gain.argmax()), n)
            if i == j:
                break
            pos = pos.clone()
            pos[[i, j]] = pos[[j, i]]
        ends.append((float(now.sum()), pos))
    return max(ends, key=lambda end: end[0])[1]


def put_in_order(encoder, objective, text, seed=0):
    """Shuffle a sentence and put it in order by the offsets that the model predicts -> its words,
    in which order they were given, and into which the model puts them: two permutations (n,)."""
    words, batch, hidden = shuffled(encoder, objective, text, seed)
    pos = batch["pos"][0, 1:-1].cpu()
    unknown = pos == UNKNOWN_POS  # pmlm: these may stand in any place that is free
    free = unknown.nonzero()[:, 0] + 1  # the places of the words that are hidden
    pos[unknown] = free[torch.randperm(len(free), generator=stream("cpu", seed, "shown"))]
    scores = offset_scores(objective, encoder, hidden, batch)[0].cpu()
    return words, pos.argsort(), best_order(scores, pos).argsort()


def pairs_right(order):
    """Share of pairs that a permutation leaves in order: 1 for the identity, .5 by chance, 0
    reversed."""
    first, second = torch.combinations(order).T
    return float((first < second).float().mean())


def believed(objective, encoder, hidden, batch):
    """Can an objective tell which tokens moved? For each row -> of its n words, how far it believes
    their places (n,): P(a pair's given offset is its true one), mean over both directions of all
    pairs of a word; did they stay (n,); and the share of (stayed, moved) pairs in which the first
    is believed more, a tie being half a one: the AUC, NaN where all moved or none."""
    head = objective.head
    scores = head.scores(encoder, hidden, batch)  # (B, L-2, L-2, H)
    for s, pos, is_word in zip(scores, batch["pos"], batch["eligible"]):
        place = is_word.nonzero()[:, 0]
        pos = pos[place]
        given = pos - pos[:, None]  # (n, n)
        # The class that a pair has if its given offset is its true one.
        label = objective.label(given, given)
        s = s[place - 1][:, place - 1]  # [CLS] has no scores
        p = head.psi(s).float().softmax(-1)  # (n, n, n_class)
        p = p.gather(-1, label[..., None])[..., 0].fill_diagonal_(0)
        share = (p.sum(0) + p.sum(1)) / (2 * len(p) - 2)
        stayed = pos == place
        more = share[stayed][:, None] - share[~stayed]
        yield share, stayed, float(more.sign().mean() + 1) / 2


# --------------------------------------------------------------------------------------------------
# What it says of a text


def filled(model, text, n):
    """For each [MASK] of a text: 'word 0.21, word 0.10, ..'."""
    for answers in fill_masks(model.encoder, model.objectives["mlm"], text, n):
        yield ", ".join(f"{shown(piece)} {p:.2f}" for piece, p in answers)


def read(words, order):
    """Tokens in an order of places (n,) -> text."""
    text = "".join(words[i] for i in order)
    return text.replace("[MASK]", " [MASK]").strip()


def who_moved(encoder, objective, text):
    """pplm_binary: shuffle a sentence -> its n words, how far the model believes the place of each
    (n,), did it stay (n,), and the AUC of this."""
    words, batch, hidden = shuffled(encoder, objective, text)
    [(share, stayed, area)] = believed(objective, encoder, hidden, batch)
    places = batch["eligible"][0, 1:-1].nonzero()[:, 0]  # not those of a [MASK]
    return [words[i] for i in places.tolist()], share, stayed, area


def uses(model):
    """Which texts a model takes, in words."""
    kinds = ["position" if part.kind == "position" else n for n, part in model.objectives.items()]
    return " or ".join(USES[kind] for kind in kinds if kind in USES) or "no text: try probe.py"


def answer(model, text):
    """Print what a model has to say of a text. Raises ValueError where it has nothing."""
    heads, parts = model.objectives, [part.rstrip() for part in text.split("|||", 1)]
    if "[MASK]" in text and "mlm" in heads:
        for words in filled(model, text, 5):
            print(f"[MASK]: {words}")
    elif "|||" in text and "nsp" in heads:
        hidden = model.encoder(row(model.encoder, *parts))
        p = heads["nsp"].answer(hidden).softmax(-1)[0, 0]
        print(f"the second part follows the first: probability {p:.3f}")
    elif "|||" in text and "tc" in heads:
        within, across = what_context_gives(model, parts)
        print(f"what context gives to two words is alike by (mean cosine) {within:.3f} within")
        print(f"a text, {across:.3f} across the two")
    elif "|||" in text or "[MASK]" in text or not (position_objective(model) or "clm" in heads):
        raise ValueError(f"this model ({'+'.join(model.names)}) takes {uses(model)}")
    elif "clm" in heads:
        print(f"{text} ..{go_on(model.encoder, heads['clm'], text)}")
    elif "pplm_binary" in heads:
        print("some words were moved; how far the model believes that each stands where it did:")
        *found, area = who_moved(model.encoder, heads["pplm_binary"], text)
        for word, p, stayed in zip(*found):
            print(f"{p:.2f} {'stayed' if stayed else 'moved '} {word!r}")
        print(f"told apart: AUC {area:.2f} (1 always, .5 by chance)")
    else:
        shuffle_and_order(model.encoder, position_objective(model), text)


def shuffle_and_order(encoder, objective, text):
    """Print a shuffled sentence as given and as the model puts it, and how many shuffles it
    undoes."""
    # 100 apart: a seed that moves nothing goes on to the next ones.
    tries = [put_in_order(encoder, objective, text, 100 * n) for n in range(SHUFFLES)]
    words, given, found = tries[0]
    true = read(words, range(len(words)))
    print(f"shuffled:  {read(words, given)}\nthe model: {read(words, found)}\nthe text:  {true}")
    print(
        f"pairs of words in the right order: {pairs_right(given):.0%} as shuffled, "
        f"{pairs_right(found):.0%} as the model puts them"
    )
    undone = sum(read(words, order) == true for _, _, order in tries)
    print(f"of {SHUFFLES} shuffles of this text it undoes {undone}")


# --------------------------------------------------------------------------------------------------
# One line of it, for the log of a training


def check(model, text):
    """Raise ValueError where line() would have nothing to say of a text: it does not suit the
    objective or, once the encoder has its tokenizer, the rows."""
    position, has_mask = position_objective(model), "[MASK]" in text
    if has_mask and "mlm" not in model.objectives:
        raise ValueError(f"[MASK] is for mlm; the objective is {'+'.join(model.names)}")
    if not (has_mask or position or "clm" in model.objectives):
        why = "needs a [MASK]" if "mlm" in model.objectives else "has nothing to say of a text"
        raise ValueError(f"{'+'.join(model.names)} {why}: {text!r}")
    if model.encoder.tokenizer is not None:
        tokens = row(model.encoder, " " + text.lstrip())
        if position:
            position.check(tokens.size(1))


def fixed_sentence(model, corpus):
    """The first sentence of 8 to 16 plain words in the validation text that fits the rows, else
    the first such run of words -> text: for mlm with a [MASK], of clm the first half; None if
    there is none."""
    text = model.encoder.tokenizer.decode(corpus.val[:SEARCHED].tolist())
    words = r"(?: [A-Za-z]+){7,15}"
    for pattern in (rf"\b[A-Z][a-z]*{words}\.", rf"\b[A-Za-z]+{words}"):
        for sentence in re.findall(pattern, text):
            if "mlm" in model.objectives:
                sentence = mask_a_word(model.encoder.tokenizer, sentence)
            if "clm" in model.objectives:
                sentence = " ".join(sentence.split(" ")[:5])
            try:
                check(model, sentence)
                return sentence
            except ValueError:  # too long for the rows, or too short to shuffle
                continue


def mask_a_word(tokenizer, sentence):
    """[MASK] in place of the longest inner word that is one token, else of the middle one."""
    words, lengths = sentence.split(" "), {}
    for i in range(1, len(words) - 1):
        if len(tokenizer.encode_ordinary(" " + words[i])) == 1:
            lengths[i] = len(words[i])
    words[max(lengths, key=lengths.get, default=len(words) // 2)] = "[MASK]"
    return " ".join(words)


@torch.no_grad()
def line(model, text=None, corpus=None):
    """What a model (a Pretraining, in training or not) says of a text, in one line; '' where it has
    nothing to say. Draws nothing from the global generators, and computes without autocast.

    text: one that passed check(); None takes a sentence of the corpus's validation text, the same
    at every call.
    """
    was_training, device = model.training, model.encoder.tok.weight.device
    text = text or fixed_sentence(model, corpus)
    model.eval()
    with torch.autocast(device.type, enabled=False):
        said = " | ".join(remarks(model, text)) if text else ""
    model.train(was_training)
    return " ".join(said.split())


def remarks(model, text):
    encoder, heads, position = model.encoder, model.objectives, position_objective(model)
    if "[MASK]" in text:
        yield f"{text} = {'; '.join(filled(model, text, 3))}"
    if "pplm_binary" in heads:
        words, share, stayed, _ = who_moved(encoder, position, text)
        moved = (~stayed).nonzero()[:, 0].tolist()
        doubted = share.argsort()[: len(moved)].sort().values.tolist()  # as many as moved
        truth = ", ".join(shown(words[i]) for i in moved)
        guess = ", ".join(shown(words[i]) for i in doubted)
        yield f"of {text!r} moved: {truth}; the model says: {guess}"
    elif position:
        words, given, found = put_in_order(encoder, position, text)
        yield f"{read(words, given)} -> {read(words, found)}"
    if "clm" in heads:
        yield f"{text} ..{go_on(encoder, heads['clm'], text)}"


# --------------------------------------------------------------------------------------------------


def texts_from_keyboard():
    """Lines until an empty one, or the end of input."""
    while True:
        try:
            text = input("text: ")
        except EOFError:
            return
        if not text.strip():
            return
        yield text


def main(argv=None):
    parser = Parser("sample.py", __doc__)
    parser.add_settings("what is tried", SampleConfig)
    args = parser.parse_args(argv, SampleConfig())
    with one_line_errors():
        path = args.ckpt or newest_run()
        model = load_pretraining(path)
        if not model.objectives:
            raise ValueError(f"{path} is fine-tuned, without heads to try: take its run's ckpt.pt")
        print(f"{path}: {model.encoder.config.pe}, {'+'.join(model.names)}")
        if args.text is not None:
            return answer(model, args.text)
        print(f"It takes {uses(model)}; an empty line ends.")
        for text in texts_from_keyboard():
            try:
                answer(model, text)
            except ValueError as error:  # the next text may suit
                print(error)


if __name__ == "__main__":
    main()
