"""SQuAD: its files, windows of long contexts, answers from logits, and its metrics."""

import functools
import itertools
import re
import string
from collections import Counter
from operator import eq, itemgetter
from typing import NamedTuple

import numpy as np

from lib.config import UserError
from lib.files import DAMAGE, opening, read_json
from lib.glue import Task, load_from_hub

# BERT's values. What differs from its script (run_squad.py) otherwise: an answer is cut out of the
# context by characters (BERT's is whole words, trimmed afterwards); spans are chosen among all that
# are short enough (BERT's have one of the 20 best first and one of the 20 best last tokens); the
# stride is a third of the length (BERT's is 128, a third of Wang 2021's 384); of an answer in the
# training data, every token that overlaps it counts (BERT searches for the best word pieces);
# a wrong answer_start is refused, not skipped.
N_BEST = 20  # candidate answers per window and per question
MAX_ANSWER = 30  # tokens of an answer
MAX_QUESTION = 64  # tokens of a question


class Question(NamedTuple):
    texts: tuple  # question, context
    golds: list = ()  # the annotators' answers; empty: unanswerable
    starts: list = ()  # the index of each answer's first character in the context
    id: str = ""


class Window(NamedTuple):
    """The part of a context that one sequence of tokens holds."""

    question: int  # index of its question
    context: str  # the whole context
    spans: np.ndarray  # (n, 2) start and end in the context, in characters, of each of its tokens
    offset: int  # index of the first of them in the sequence
    starts: np.ndarray  # (n,) bool: may an answer start here? (in the window with most context)


# --------------------------------------------------------------------------------------------------
# Files


def read_squad(task, file, is_test=False):
    """SQuAD's JSON, v1.1 or v2.0 -> [Question]. Raises UserError."""
    questions = []
    with opening(file, *DAMAGE):
        for article in read_json(file)["data"]:
            for paragraph in article["paragraphs"]:
                context = paragraph["context"]
                for q in paragraph["qas"]:
                    golds = [answer["text"] for answer in q["answers"]]
                    starts = [answer["answer_start"] for answer in q["answers"]]
                    if not all(map(context.startswith, golds, starts)):
                        raise UserError(f"{file}: question {q['id']} has a wrong answer_start")
                    questions.append(Question((q["question"], context), golds, starts, q["id"]))
        n_ids = len({question.id for question in questions})
    if n_ids < len(questions):
        print(f"{file}: {len(questions)} questions have only {n_ids} ids, each with one prediction")
    return questions


def read_hub(task, name, split):
    """A split of the hub's data set, in the form that read_squad gives."""
    return [
        Question(
            (row["question"], row["context"]),
            row["answers"]["text"],
            row["answers"]["answer_start"],
            row["id"],
        )
        for row in load_from_hub(task.repo, None, split)
    ]


# --------------------------------------------------------------------------------------------------
# Windows


@functools.lru_cache(maxsize=1)  # the questions about a context follow each other
def token_spans(tokenizer, text):
    """-> token ids, (n, 2) start and end of each in characters. A character that the byte-level BPE
    splits belongs to both tokens."""
    ids = tokenizer.encode_ordinary(text)
    data = np.frombuffer(text.encode(), np.uint8)
    # Maps each byte to its character: all bytes of a character except the first are 10xxxxxx.
    character = np.cumsum((data & 0xC0) != 0x80) - 1
    sizes = np.array([len(piece) for piece in tokenizer.decode_tokens_bytes(ids)], int)
    ends = np.cumsum(sizes)
    return ids, np.stack((character[ends - sizes], character[ends - 1] + 1), axis=1)


def windows(index, question, tokenizer, cfg, length):
    """Yield ((ids, label), Window) for each window of a question: [CLS] question [SEP] part of the
    context [SEP], with a new part every length // 3 tokens.

    The label is (first, last), the indices of the answer's tokens in ids; it is (0, 0), the [CLS],
    if the answer is not wholly in the window (as in BERT).
    """
    asked, text = question.texts
    q = tokenizer.encode_ordinary(asked.strip())[: min(MAX_QUESTION, length // 2)]
    context, spans = token_spans(tokenizer, text.strip())
    spans = spans + len(text) - len(text.lstrip())  # positions in the original context
    offset = len(q) + 2
    room = length - offset - 1
    # Which tokens overlap the answer?
    start, size = (question.starts[0], len(question.golds[0])) if question.golds else (0, 0)
    in_answer = (spans[:, 1] > start) & (spans[:, 0] < start + size)
    stride = min(length // 3, room)
    firsts = range(0, max(1, len(context) - room + stride), stride)  # to the context's end
    best = most_context(firsts, room, len(context))
    for number, first in enumerate(firsts):
        part = slice(first, first + room)
        inside = np.flatnonzero(in_answer[part]) + offset
        complete = 0 < in_answer.sum() == len(inside)
        label = tuple(inside[[0, -1]].tolist()) if complete else (0, 0)
        ids = [cfg.cls_id, *q, cfg.sep_id, *context[part], cfg.sep_id]
        yield (ids, label), Window(index, text, spans[part], offset, best[part] == number)


def most_context(firsts, room, n):
    """Windows of at most `room` of n tokens, which begin at `firsts` -> (n,) for each token the
    number of the window in which it has most context: on its poorer side, then in all (BERT)."""
    first = np.array(firsts)[:, None]  # (windows, 1)
    end = np.minimum(first + room, n)
    left, right = np.arange(n) - first, end - 1 - np.arange(n)  # (windows, n)
    context = np.minimum(left, right)
    return np.where(context < 0, -1, context + 0.01 * (end - first)).argmax(0)


# --------------------------------------------------------------------------------------------------
# Answers


def n_best(first, last):
    """Logits of the tokens of a window, as first and as last token of the answer, (n,) each
    -> up to N_BEST (score, i, j), best first, with i <= j < i + MAX_ANSWER."""
    i, j = np.triu_indices(len(first))
    short = j - i < MAX_ANSWER
    i, j = i[short], j[short]
    scores = first[i] + last[j]
    best = np.argsort(-scores, kind="stable")[:N_BEST]
    return list(zip(scores[best].tolist(), i[best].tolist(), j[best].tolist()))


def rank_answers(outputs, windows, with_null):
    """Logits (2, L) of each window -> for each question [(score, text), ...], best first.

    with_null (v2.0): the candidates include "", no answer. Its score is the lowest of the windows'
    null scores, both logits at [CLS] (BERT).
    """
    ranked = []
    for _, group in itertools.groupby(zip(outputs, windows), lambda pair: pair[1].question):
        candidates, null_scores = [], []
        for out, window in group:
            null_scores.append(float(out[:, 0].sum()))
            first, last = out[:, window.offset : window.offset + len(window.spans)]
            for score, i, j in n_best(np.where(window.starts, first, -np.inf), last):
                # Decoding the ids could lose a part of a character; the context has all of them.
                text = window.context[window.spans[i, 0] : window.spans[j, 1]].strip()
                if score > -np.inf and text:
                    candidates.append((score, text))
        best = {}  # each text once
        for score, text in sorted(candidates, key=itemgetter(0), reverse=True):
            best.setdefault(text, score)
        candidates = [(score, text) for text, score in best.items()][:N_BEST]
        if with_null or not candidates:  # an empty context has no candidates
            candidates.append((min(null_scores), ""))
        ranked.append(sorted(candidates, key=itemgetter(0), reverse=True))
    return ranked


# --------------------------------------------------------------------------------------------------
# Metrics


def normalize_answer(text):
    """The official normalization: lower case, no punctuation, no articles, single spaces."""
    text = "".join(c for c in text.lower() if c not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def answer_f1(gold, text):
    """F1 over the words of two normalized answers; 0 if they have none in common."""
    gold, text = gold.split(), text.split()
    common = Counter(gold) & Counter(text)
    return 2 * common.total() / max(1, len(gold) + len(text))


def best_over_golds(score, is_v2=False):
    """-> metric(labels, predictions): lists of lists of gold answers (empty: no answer) and of
    texts. The best score over a question's golds counts; the mean over questions is returned.
    v2.0 leaves out golds that normalize to nothing, such as "The"."""

    def metric(labels, predictions):
        scores = []
        for golds, text in zip(labels, map(normalize_answer, predictions)):
            golds = [gold for gold in map(normalize_answer, golds) if gold or not is_v2]
            scores.append(max(score(gold, text) for gold in golds) if golds else text == "")
        return np.mean(scores)

    return metric


SQUAD = Task(
    "",  # the files are in --data_dir itself
    ("question", "context"),
    (),
    kind="span",
    repo="rajpurkar/squad",
    metrics={"em": best_over_golds(eq), "f1": best_over_golds(answer_f1)},
    extension="-v1.1.json",
    read=read_squad,
    read_hub=read_hub,
)
SQUAD_V2 = SQUAD._replace(
    metrics={"em": best_over_golds(eq, True), "f1": best_over_golds(answer_f1, True)},
    extension="-v2.0.json",
    repo="rajpurkar/squad_v2",
)
