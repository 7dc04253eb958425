"""Fine-tune a pre-trained encoder on GLUE or SQuAD and score it, as the papers do it.

    python finetune.py --task docs                  # no network: which library's docstring is this?
    python finetune.py --task docs --ckpt scratch   # the same shape, untrained (bow: bag of words)
    python finetune.py --task cola --data_dir glue --seeds 5            # glue/CoLA/train.tsv, ..

    --task all --recipe tupe --seeds 5 --predict        all of GLUE from the hub, files to submit
    --task sst2 --ckpt 'out/run/ckpt_*.pt'              score against steps
    --task rte --ckpt out/run/finetuned-mnli.pt         from the MNLI model
    --task mnli --predict_text 'A man sleeps. ||| Nobody is awake.'

Takes the newest checkpoint under out/ unless --ckpt names one. Every run is a line of
results.jsonl. The table at the end has the aggregate over seeds, the spread, and what always giving
the commonest answer scores (majority). The best run's model is finetuned-<task>.pt beside it. P0 is
the paper on relative position prediction, P1 TUPE, P2 TACO, P3 "On Position Embeddings in BERT".
"""

import csv
import functools
import glob
import itertools
import json
import math
import os
import re
import statistics
import string
import time
from collections import Counter, defaultdict
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from operator import eq, itemgetter
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pandas  # comes with datasets, as tqdm does
import tiktoken
import torch
import torch.nn as nn
import torch.nn.functional as F
from tqdm import tqdm

from common import (
    DEVICE,
    DTYPE,
    Parser,
    autocast,
    can_compile,
    check_settings,
    keep_memory,
    lock,
    newest_run,
    one_line_errors,
    pick_device,
    pick_dtype,
    read_checkpoint,
    read_json,
    setting,
    stop,
    write_torch,
)
from data import DOCS_LIBRARIES, ask_the_hub, encoding_arguments, prepare
from fast import step_or_skip
from model import Encoder, EncoderConfig, init_weights, warm_start

EVAL_TOKENS = 16384  # tokens of a batch when nothing is learned
N_BEST = 20  # SQuAD, as BERT has it: candidates of a question,
MAX_ANSWER = 30  # tokens of an answer
MAX_QUESTION = 64  # and of a question
DECISIVE = "ckpt data_dir limit_train freeze_encoder recipe seeds lr epochs batch_size length"
LIBRARY_NAMES = re.compile(
    r"\b(python|pytorch|torch|numpy|np|pandas|pd|datasets?|hugging ?face)\b", re.IGNORECASE
)


# --------------------------------------------------------------------------------------------------
# Metrics: (labels, predictions) -> float. Where one is not defined it is 0, so that no table holds
# a NaN.


def accuracy(labels, predictions):
    return np.mean(np.equal(labels, predictions))


def f1_score(labels, predictions):
    """F1 of class 1; 0 where neither the labels nor the predictions hold it."""
    ones = np.array([labels, predictions]) == 1  # (2, n)
    return 2 * ones.all(0).sum() / max(1, ones.sum())


def pearson(labels, predictions):
    """Pearson correlation; 0 where one side is constant or not finite. Of two binary vectors it is
    Matthews'."""
    x = np.array([labels, predictions], float)  # (2, n)
    if not np.isfinite(x).all() or not np.ptp(x, 1).all():
        return 0.0
    return np.corrcoef(x)[0, 1]


def spearman(labels, predictions):
    return pearson(pandas.Series(labels).rank(), pandas.Series(predictions).rank())


def normalise_answer(text):
    """SQuAD's official normalisation: lower case, no punctuation, no articles, single spaces."""
    text = "".join(c for c in text.lower() if c not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def answer_f1(gold, text):
    """F1 over the words of two normalised texts; where one has none, 1 if both have none (as the
    script of v2 does)."""
    gold, text = gold.split(), text.split()
    if gold == text:
        return 1.0
    common = Counter(gold) & Counter(text)
    return 2 * common.total() / (len(gold) + len(text))


def over_golds(score):
    """-> metric of lists of gold texts (none: no answer) and of texts: the best over a question's
    golds, then the mean."""

    def metric(labels, predictions):
        best = []
        for golds, text in zip(labels, predictions):
            golds = [gold for gold in map(normalise_answer, golds) if gold] or [""]
            best.append(max(score(gold, normalise_answer(text)) for gold in golds))
        return np.mean(best)

    return metric


# --------------------------------------------------------------------------------------------------
# Tasks and recipes


class Task(NamedTuple):
    """Where a task's rows are, in the official files and on the hub, and how they are scored."""

    folder: str  # below --data_dir
    texts: tuple  # columns of the official files
    classes: tuple = ("0", "1")  # as the official file writes them, in the hub's order
    metrics: dict = {"accuracy": accuracy}
    kind: str = "class"  # or score, span
    label: str = "label"
    hub: tuple = ()  # the hub's columns, if they have other names
    repo: str = "nyu-mll/glue"
    header: tuple | None = None  # of train.tsv and dev.tsv, where these have none
    # Name in the table, or of the file to submit -> the hub's split. Files say dev for validation.
    dev: dict = {"": "validation"}
    test: dict = {"": "test"}  # unnamed: under the folder's name
    suffix: str = ".tsv"

    def file(self, part):  # train, or the hub's name of another split
        return part.replace("validation", "dev") + self.suffix

    def score(self, labels, predictions):
        return {name: float(metric(labels, predictions)) for name, metric in self.metrics.items()}


PAIR = ("sentence1", "sentence2")
NLI, RTE = ("entailment", "neutral", "contradiction"), ("entailment", "not_entailment")
F1 = {"accuracy": accuracy, "f1": f1_score}
SQUAD = Task(
    "squad",
    ("question", "context"),
    (),
    kind="span",
    repo="rajpurkar/squad",
    metrics={"em": over_golds(eq), "f1": over_golds(answer_f1)},
    suffix="-v1.1.json",
)
GLUE = {
    # GLUE scores CoLA by Matthews, P0 reports accuracy: both, always.
    "cola": Task(
        "CoLA",
        ("sentence",),
        header=("source", "label", "mark", "sentence"),
        metrics={"matthews": pearson, "accuracy": accuracy},
    ),
    "sst2": Task("SST-2", ("sentence",)),
    "mrpc": Task("MRPC", ("#1 String", "#2 String"), metrics=F1, label="Quality", hub=PAIR),
    "stsb": Task(
        "STS-B",
        PAIR,
        (),
        kind="score",
        label="score",
        metrics={"pearson": pearson, "spearman": spearman},
    ),
    "qqp": Task("QQP", ("question1", "question2"), metrics=F1, label="is_duplicate"),
    "mnli": Task(
        "MNLI",
        PAIR,
        NLI,
        label="gold_label",
        hub=("premise", "hypothesis"),
        dev={"": "validation_matched", "-mm": "validation_mismatched"},
        test={"MNLI-m": "test_matched", "MNLI-mm": "test_mismatched"},
    ),
    "qnli": Task("QNLI", ("question", "sentence"), RTE),
    "rte": Task("RTE", PAIR, RTE),
    "wnli": Task("WNLI", PAIR),
}
TASKS = {
    **GLUE,
    # Nothing to train on and no labels: the MNLI model predicts it.
    "ax": GLUE["mnli"]._replace(folder="diagnostic", dev={}, test={"AX": "diagnostic"}),
    "squad": SQUAD,
    "squad_v2": SQUAD._replace(suffix="-v2.0.json", repo="rajpurkar/squad_v2"),
    "docs": Task("", ("text",), DOCS_LIBRARIES),
}
METRICS = {name: task.score for name, task in TASKS.items()}  # for other programs

# A value, or one for each task (squad: both versions), for a width below 512 (narrow) and for the
# rest. Warm-up below 1 is a share of the steps. Of several learning rates the best counts.
#
# Departures. ELECTRA's code has one linear layer on [CLS], warms up to .9 of the rate, has an Adam
# without bias correction, and learns MRPC and STS-B with the texts in both orders. P2 has another
# recipe for base size (its table 8), and averages MNLI-m alone in its table 3. P3's SQuAD figure is
# the best of every 1,000 steps on dev; here the last model is scored.
REST = ""
# fmt: off
RECIPES = {
    # ELECTRA (Clark 2020, app. B), which P0 follows.
    "electra": dict(
        epochs={"rte": 10, "stsb": 10, "squad": 2, REST: 3},
        lr={"narrow": [3e-4], REST: [1e-4]}, layer_decay=.8,
        batch_size=32, warmup=.1, weight_decay=0., eps=1e-6,
        length={"squad": 512, REST: 128}, aggregate="median"
    ),
    # P1, table 1.
    "tupe": dict(
        epochs={"mnli": 5, "qqp": 5, "qnli": 5, REST: 10},
        lr=[2e-5, 3e-5, 4e-5, 5e-5], layer_decay=1.,
        batch_size=32, warmup=.06, weight_decay=.01, eps=1e-6,
        length=512, aggregate="median"
    ),
    # P2, tables 6 and 7.
    "taco": dict(
        epochs={"mnli": 6, "qqp": 6, REST: 4},
        lr=[5e-5], layer_decay=1.,
        batch_size={"cola": 32, "stsb": 32, "mrpc": 32, "rte": 32, REST: 64},
        warmup={"mnli": 2000, "qqp": 2000, "qnli": 200, "sst2": 200, REST: 100},
        weight_decay=0., eps=1e-8,
        length=128, aggregate="mean"
    ),
    # P3, table 6; the rest is its script's default.
    "bert": dict(
        epochs=3,
        lr={"squad": [3e-5], REST: [2e-5]}, layer_decay=1.,
        batch_size=32, warmup=0, weight_decay=0., eps=1e-8,
        length={"squad": 384, REST: 128}, aggregate="mean"
    ),
}
# fmt: on
# What each paper averages over GLUE: both MNLIs in P1 and P2, the mismatched one alone in P3; never
# WNLI.
# fmt: off
P3 = {"cola": "matthews", "sst2": "accuracy", "qnli": "accuracy", "rte": "accuracy",
      "mnli-mm": "accuracy", "qqp": "f1", "mrpc": "f1", "stsb": "spearman"}
AVERAGES = {
    "P1": {**P3, "mnli": "accuracy", "qqp": "accuracy", "mrpc": "accuracy", "stsb": "pearson"},
    "P2": {**P3, "mnli": "accuracy"},
    "P3": P3,
}
# fmt: on


def settings(args, name, cfg):
    """The recipe's row for a task with the flags over it -> namespace of epochs, lr (a list),
    batch_size, length, .. cfg: the encoder's configuration as a dictionary."""
    chosen = dict(RECIPES[args.recipe], recipe=args.recipe, probe=args.freeze_encoder)
    width = "narrow" if cfg["d_model"] < 512 else REST
    for key, value in chosen.items():
        if isinstance(value, dict):
            chosen[key] = value.get(name.removesuffix("_v2"), value.get(width, value[REST]))
    if name == "docs":
        chosen["epochs"] = 10
    chosen["length"] = min(chosen["length"], cfg["max_len"])
    given = {key: value for key, value in vars(args).items() if value and key in chosen}
    return SimpleNamespace(**chosen | given)


# --------------------------------------------------------------------------------------------------
# Reading rows: (texts, label), of SQuAD Questions; in test files the label is the row's number


class Question(NamedTuple):
    texts: tuple  # question, context
    golds: list  # texts of the answers; none: it has no answer
    starts: list  # their first characters in the context
    id: str


@contextmanager
def damage_is_one_line(file):
    """What goes wrong with a file of another form becomes one ValueError that names it."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, TypeError) as error:
        about = f"{type(error).__name__}: {error}"
        raise ValueError(f"{file} is damaged, or has another format ({about})") from None


def read_tsv(file, task):
    """Official GLUE file -> list of (texts, label), and list of what is wrong with the other rows,
    with line.

    Tab-separated, no quoting, a BOM or none. A row that has not as many columns as the header is
    malformed: its texts may be shifted. Raises ValueError on a missing column.
    """
    rows, bad = [], []
    with open(file, encoding="utf-8-sig", newline="") as handle:
        reader = csv.DictReader(handle, task.header, delimiter="\t", quoting=csv.QUOTE_NONE)
        try:
            there = reader.fieldnames or [*task.texts, task.label]
            label = task.label or there[0]  # of test files: the row's number
            missing = [name for name in (*task.texts, label) if name not in there]
            if missing:
                raise ValueError(
                    f"{file} has no column {', '.join(missing)}, only {', '.join(there)}"
                )
            for row in reader:
                try:
                    if None in row or None in row.values():  # too many, or too few
                        raise ValueError(f"not {len(there)} columns")
                    texts = tuple(row[name] for name in task.texts)
                    rows.append((texts, read_label(task, row[label])))
                except ValueError as error:
                    bad.append(f"line {reader.line_num}: {error}")
        except (csv.Error, UnicodeDecodeError) as error:
            raise ValueError(f"{file}, after line {reader.line_num}: {error}") from None
    return rows, bad


def read_label(task, text):
    """The label column of an official file -> class index, a score in 0 .. 5, or a test row's
    number. Raises ValueError."""
    if not task.label:
        return int(text)
    if task.kind == "score":
        if not 0 <= float(text) <= 5:  # NaN too
            raise ValueError(f"score {text} is not in 0 .. 5")
        return float(text)
    if text not in task.classes:
        raise ValueError(f"label {text!r} is not one of {', '.join(task.classes)}")
    return task.classes.index(text)


def read_squad(file):
    """SQuAD's JSON, v1.1 or v2.0 -> list of Question, and list of what is wrong with the others.
    Raises ValueError."""
    questions, bad = [], []
    with damage_is_one_line(file):
        for article in read_json(file)["data"]:
            for paragraph in article["paragraphs"]:
                context = paragraph["context"]
                for q in paragraph["qas"]:
                    golds = [answer["text"] for answer in q["answers"]]
                    starts = [answer["answer_start"] for answer in q["answers"]]
                    if all(map(context.startswith, golds, starts)):
                        questions.append(Question((q["question"], context), golds, starts, q["id"]))
                    else:
                        bad.append(
                            f"question {q['id']}: its answer is not at its place in the context"
                        )
    return questions, bad


def read_file(name, path, split, skip_bad=False):
    """Official file -> rows. A malformed row is an error with file and line, or is counted
    (--skip_bad_rows)."""
    task = TASKS[name]
    if split == "test":  # it has a header, and no labels
        task = task._replace(header=None, label=None)
    rows, bad = read_squad(path) if task.kind == "span" else read_tsv(path, task)
    if bad and not skip_bad:
        raise ValueError(f"{path}, {bad[0]}; --skip_bad_rows leaves such rows out")
    if bad:
        print(f"{path}: {len(bad)} malformed rows left out, the first: {bad[0]}")
    if not rows:
        raise ValueError(f"{path} has no rows")
    return rows


def hub_rows(name, split):
    """A split of the hub's data set, in the form the official files give. Raises ValueError without
    a network."""
    import datasets

    task = TASKS[name]
    ask_the_hub()
    try:
        rows = datasets.load_dataset(task.repo, None if task.kind == "span" else name, split=split)
    except Exception as error:
        raise ValueError(
            f"cannot fetch {task.repo} ({name}) from the hub "
            f"({type(error).__name__}): name a folder with the official files with "
            "--data_dir, or take --task docs, which needs no network"
        ) from None
    found = []
    for r in rows:
        texts = tuple(r[column] for column in task.hub or task.texts)
        if task.kind == "span":
            golds = r["answers"]
            found.append(Question(texts, golds["text"], golds["answer_start"], r["id"]))
        else:
            found.append((texts, r["idx" if "test" in split else "label"]))
    return found


def docs_rows(cache):
    """Which library does a docstring come from? -> training rows, {"docs": rows to score}.

    Libraries' names are masked as whole words (numpy, but not from_numpy); tested on pre-training's
    validation documents.
    """
    train, test = [], []
    with damage_is_one_line(f"a docs folder in {cache} (delete it, it is prepared again)"):
        stored = read_json(prepare("docs", "bpe", cache).folder / "docs.json")
        class_of = dict(zip(DOCS_LIBRARIES, itertools.count()))
        for number, row in enumerate(stored["rows"]):
            text = LIBRARY_NAMES.sub("[MASK]", row[1])
            # The same split as data.tokenize makes.
            split = test if number % stored["every"] == 1 else train
            split.append(((text,), class_of[row[0]]))
    return train, {"docs": test}


def read_split(name, args, split):
    """'train', 'dev' or 'test' -> {name in the table, or of the file to submit: rows}.

    A file that is not there is one printed line, unless it is the training file or the first one to
    score. Raises ValueError, OSError.
    """
    task, found, is_test = TASKS[name], {}, split == "test"
    for key, part in getattr(task, split, {"": "train"}).items():
        key = key or task.folder if is_test else name + key
        if not args.data_dir:
            found[key] = hub_rows(name, "test" if name == "ax" else part)
            continue
        path = Path(args.data_dir, task.folder, task.file(part))
        if task.kind == "span" and not path.exists():
            path = Path(args.data_dir, task.file(part))  # SQuAD's may lie in --data_dir itself
        if path.exists():
            found[key] = read_file(name, path, split, args.skip_bad_rows)
        elif is_test or found:
            print(f"{key}: {path} is not there, left out")
        else:
            files = map(task.file, ("train", *task.dev.values()))
            raise FileNotFoundError(f"{path} is not there: its folder holds {', '.join(files)}")
    return found


def read_task(name, args):
    """-> training rows ([] with --eval_only), {name in the table: rows to score}. Raises
    ValueError, OSError."""
    if name == "docs":
        train, evaluations = docs_rows(args.cache)
    else:
        train = [] if args.tuned else read_split(name, args, "train")[name]
        evaluations = read_split(name, args, "dev")
    limit = args.limit_train or (500 if name == "docs" else None)
    order = np.random.default_rng(0).permutation(len(train))[:limit]
    return [train[i] for i in order], evaluations


# --------------------------------------------------------------------------------------------------
# Rows of ids


class Window(NamedTuple):
    """A part of a SQuAD context that makes a row."""

    question: int  # its question's place in the list
    context: str
    spans: np.ndarray  # (n, 2) first and last character + 1 of each context token
    offset: int  # place of the first of them in the row


def encode(texts, tokenizer, cfg, length):
    """One or two texts -> [CLS] A [SEP] or [CLS] A [SEP] B [SEP], at most `length` ids, the longest
    cut first."""
    # 16 characters an id are more than text needs: a long document is not tokenised only to be cut.
    parts = [
        tokenizer.encode(text[: 16 * length], allowed_special={"[MASK]"}, disallowed_special=())
        for text in texts
    ]
    room = length - 1 - len(parts)
    while sum(map(len, parts)) > room:
        max(parts, key=len).pop()
    ids = [cfg.cls_id]
    for part in parts:
        ids += [*part, cfg.sep_id]
    return ids


@functools.lru_cache(maxsize=1)  # in dev files a context's questions stand together
def token_spans(tokenizer, text):
    """-> ids, (n, 2) first and last character + 1 of each. A character cut in two by the byte-level
    BPE is in both."""
    ids = tokenizer.encode_ordinary(text)
    data = np.frombuffer(text.encode("utf-8", "surrogatepass"), np.uint8)
    # The character of each byte: all bytes but a character's first one are 10xxxxxx.
    character = np.cumsum((data & 0xC0) != 0x80) - 1
    sizes = np.array([len(piece) for piece in tokenizer.decode_tokens_bytes(ids)], int)
    ends = np.cumsum(sizes)
    return ids, np.stack((character[ends - sizes], character[ends - 1] + 1), axis=1)


def windows(number, question, tokenizer, cfg, length):
    """Question -> ((ids, label), Window), ..: [CLS] question [SEP] part of the context [SEP], a
    part every length // 3.

    The label is (0, 0), [CLS], where the answer is not wholly in the part, as BERT has it.
    """
    asked, text = question.texts
    q = tokenizer.encode_ordinary(asked)[: min(MAX_QUESTION, length // 2)]
    context, spans = token_spans(tokenizer, text)
    offset = len(q) + 2
    room = length - offset - 1
    # Which tokens of the context are the answer's?
    start, size = (question.starts[0], len(question.golds[0])) if question.golds else (0, 0)
    of_answer = (spans[:, 1] > start) & (spans[:, 0] < start + size)
    step = min(length // 3, room)
    for first in range(0, max(1, len(context) - room + step), step):  # until one reaches the end
        part = slice(first, first + room)
        inside = np.flatnonzero(of_answer[part]) + offset
        whole = 0 < of_answer.sum() == len(inside)
        label = tuple(inside[[0, -1]].tolist()) if whole else (0, 0)
        ids = [cfg.cls_id, *q, cfg.sep_id, *context[part], cfg.sep_id]
        yield (ids, label), Window(number, text, spans[part], offset)


def encode_rows(model, rows):
    """Rows as read -> [(ids, label), ..] for this model, a label being a class, a score, or (first,
    last) token of the answer; of SQuAD also a Window for each."""
    tokenizer, cfg = model.encoder.tokenizer, model.encoder.config
    encoded, places = [], []
    for number, row in enumerate(rows):
        if model.kind == "span":
            parts, where = zip(*windows(number, row, tokenizer, cfg, model.length))
            encoded += parts
            places += where
        else:
            encoded.append((encode(row[0], tokenizer, cfg, model.length), row[1]))
    return encoded, places


def batches_by_length(rows, size, rng=None):
    """Rows of near lengths together, so that little is padding -> row numbers, an array a batch.
    Shuffled when rng is given."""
    order = rng.permutation(len(rows)) if rng else np.arange(len(rows))
    window = 50 * size if rng else len(rows)  # sorted by length within one: random enough
    groups = []
    for part in np.split(order, range(window, len(rows), window)):
        near = sorted(part, key=lambda i: len(rows[i][0]))
        groups += np.split(near, range(size, len(near), size))
    if rng:
        rng.shuffle(groups)
    return groups


def padded_batch(rows, group, pad_id, device):
    """Numbers of rows -> tokens (B, L), pad (B, L) bool or None without padding, labels (B,) or
    (B, 2); L is the longest of the batch."""
    ids, labels = zip(*[rows[i] for i in group])
    tokens = nn.utils.rnn.pad_sequence(list(map(torch.tensor, ids)), True, pad_id)
    padded = (tokens == pad_id).any()
    tensors = tokens, torch.tensor(labels)
    if device.type == "cuda":  # pinned memory is copied while the host goes on
        tensors = [x.pin_memory() for x in tensors]
    tokens, labels = [x.to(device, non_blocking=True) for x in tensors]
    return tokens, tokens == pad_id if padded else None, labels


# --------------------------------------------------------------------------------------------------
# Model


class Classifier(nn.Module):
    """Encoder with a task's head: on [CLS] dropout, dense, tanh, dropout, linear; for spans one
    linear layer on every token.

    probe: the encoder stays as it is, one linear layer on [CLS] learns (--freeze_encoder).
    """

    def __init__(self, encoder, name, length, probe=False):
        super().__init__()
        task, C = TASKS[name], encoder.config.d_model
        self.encoder, self.name, self.kind = encoder, name, task.kind
        self.length, self.probe = length, probe
        dense = []
        if not probe and task.kind != "span":
            dense = [nn.Dropout(0.1), nn.Linear(C, C), nn.Tanh()]
        n_out = len(task.classes) or {"score": 1, "span": 2}[task.kind]
        self.head = nn.Sequential(*dense, nn.Dropout(0.1), nn.Linear(C, n_out))
        self.head.apply(init_weights)
        encoder.requires_grad_(not probe)

    def forward(self, tokens, pad):
        """-> (B, n_class) logits, (B,) scores, or (B, 2, L) logits of the first and the last token
        of a span."""
        hidden = self.encoder(tokens, pad=pad)  # (B, L, C)
        # In 16 bits the scores of all rows could be two.
        with torch.autocast(hidden.device.type, enabled=False):
            hidden = hidden.to(self.head[-1].weight.dtype)
            if self.kind != "span":
                return self.head(hidden[:, 0]).squeeze(-1)  # (B, n_class); (B, 1) -> (B,)
            out = self.head(hidden).transpose(1, 2)  # (B, L, 2) -> (B, 2, L)
        return out if pad is None else out.masked_fill(pad[:, None], -math.inf)

    def loss(self, tokens, pad, labels):
        out = self(tokens, pad)
        if self.kind == "score":
            return F.mse_loss(out, labels)
        return F.cross_entropy(out.flatten(0, -2), labels.flatten())  # spans: (2B, L), (2B,)

    def train(self, mode=True):
        super().train(mode)
        self.encoder.train(mode and not self.probe)  # a frozen encoder has no dropout either
        return self


def home(args):
    """The folder where results and fine-tuned models lie: --out_dir, else the run's."""
    if args.out_dir or args.ckpt in ("scratch", "bow"):
        return Path(args.out_dir or "out")
    folder = Path(args.ckpt)
    while not folder.is_dir():  # a file, or a glob
        folder = folder.parent
    return folder


def read_starts(ckpt, cache):
    """--ckpt -> what to start from, read once for all tasks; what a glob finds in the order of
    steps. Raises ValueError, OSError."""
    if ckpt == "scratch" or os.path.exists(ckpt):
        return [read_start(ckpt, cache)]
    files = glob.glob(ckpt)
    if not files:
        raise FileNotFoundError(f"no checkpoint at {ckpt}")
    # ckpt_prev.pt is another name of one of them.
    kept = [file for file in files if not file.endswith("ckpt_prev.pt")]
    starts = [read_start(file, cache) for file in kept or files]
    return sorted(starts, key=lambda start: start.get("step", 0))


def read_start(source, cache):
    """A path or 'scratch' -> checkpoint dictionary with `source`, its name in the table, and
    `file`. Raises ValueError, OSError."""
    if source != "scratch":
        start = read_checkpoint(source)
        start.pop("optimizer", None)  # twice as large as the model
        name = f"{source} ({start['task']})" if "task" in start else source
        return {**start, "source": name, "file": os.path.realpath(source)}
    if glob.glob("out/*/ckpt.pt"):
        run = newest_run()
        about = {"model": {}, "step": 0, "source": f"scratch, shaped like {run}"}
        return read_checkpoint(run) | about
    corpus = prepare("docs", "bpe", cache)
    return {
        "config": asdict(EncoderConfig(vocab_size=corpus.vocab_size)),
        "tokenizer": encoding_arguments(corpus.tokenizer),
        "tokenizer_hash": corpus.meta["tokenizer_hash"],
        "data": corpus.meta,
        "step": 0,
        "model": {},
        "source": "scratch, demo",
    }


def make_model(start, name, length, seed, probe=False):
    """A start's encoder with a head for the task -> Classifier. Raises ValueError if the weights do
    not fit.

    A length beyond max_len extends position tables with fresh rows. The head is fresh, but for a
    model fine-tuned on this very task.
    """
    if length < 8:
        raise ValueError(f"rows of {length} ids are too short: --length must be 8 or more")
    torch.manual_seed(seed)
    cfg = start["config"]
    encoder = Encoder(EncoderConfig(**{**cfg, "max_len": max(length, cfg["max_len"])}))
    encoder.tokenizer = tiktoken.Encoding(**start["tokenizer"])
    model = Classifier(encoder, name, length, probe)
    same = (start.get("task"), start.get("probe")) == (name, probe)
    weights = {
        key: value for key, value in start["model"].items() if same or key.startswith("encoder.")
    }
    if weights:
        done = warm_start(model, {**start, "model": weights}, start["source"])
        missing = [key for key in done["new"] if same or key.startswith("encoder.")]
        if missing:
            raise ValueError(
                f"{start['source']} does not fit this model: missing {', '.join(missing[:3])}"
            )
    return model


def asked_for(args):
    """The flags that decide which model comes out -> {name: value}."""
    return {name: getattr(args, name) for name in DECISIVE.split()}


def check_place(name, starts, args):
    """Raise ValueError where the model to come would replace one that it starts from, or one that
    another command made."""
    file = args.out_dir / f"finetuned-{name}.pt"
    if os.path.realpath(file) in [start.get("file") for start in starts]:
        raise ValueError(f"{file} is what this starts from: take another --out_dir")
    if file.exists() and read_checkpoint(file).get("flags") != asked_for(args):
        raise ValueError(f"{file} is another command's: take another --out_dir, or remove it")


def save_model(file, model, start, row, flags=None):
    """All that is needed to use the model. model.load() takes its encoder."""
    write_torch(
        file,
        {
            **{key: start[key] for key in ("tokenizer", "tokenizer_hash", "step", "data")},
            "task": model.name,
            "classes": TASKS[model.name].classes,
            "length": model.length,
            "probe": model.probe,
            "row": row,
            "flags": flags,
            "config": asdict(model.encoder.config),
            "model": model.state_dict(),
        },
    )


def load_tuned(name, args):
    """finetuned-<name>.pt of --ckpt or --out_dir -> its dictionary, Classifier. Raises ValueError,
    OSError."""
    file = args.ckpt
    if os.path.isdir(file):
        file = os.path.join(file, f"finetuned-{name}.pt")
    start = read_start(file, args.cache) if os.path.exists(file) else {}
    if start.get("task") != name:
        raise ValueError(
            f"no model fine-tuned on {name} at {file}: python finetune.py --task {name} makes one"
        )
    with damage_is_one_line(file):
        model = make_model(start, name, start["length"], 0, start["probe"])
        row = start["row"]
        json.dumps([row, hash(row["lr"]), row["seed"]])  # are they there, and plain?
    return start, model.to(args.device)


# --------------------------------------------------------------------------------------------------
# Training


def param_groups(model, lr, layer_decay, weight_decay):
    """Head lr, top layer lr * layer_decay, and so on down; words and shared positional tables
    lowest.

    ELECTRA's code decays once more below the head: its top layer has lr * layer_decay^2
    (departure). Weight decay is on matrices only. Frozen weights are left out.
    """
    n_layer, groups = len(model.encoder.blocks), defaultdict(list)
    for name, p in model.named_parameters():
        # Some schemes have weights of their own in each layer.
        layer = re.match(r"encoder\.(?:blocks|pe\.parts\.\w+\.\w+)\.(\d+)\.", name)
        depth = n_layer - int(layer[1]) if layer else n_layer + 1
        if name.startswith("head."):
            depth = 0
        if name.startswith("encoder.norm_last."):
            depth = 1
        if p.requires_grad:
            key = lr * layer_decay**depth, weight_decay if p.dim() >= 2 else 0.0
            groups[key].append(p)
    return [
        {"params": params, "peak": peak, "weight_decay": decay}
        for (peak, decay), params in groups.items()
    ]


def schedule(step, steps, warmup):
    """Share of the peak at a step: linear warm-up (below 1: a share of the steps), then linear to
    0."""
    warmup = warmup * steps if warmup < 1 else warmup
    return min((step + 1) / max(1, warmup), (steps - step) / max(1, steps - warmup), 1.0)


def train_one(model, rows, chosen, lr, seed, args):
    """Fine-tune in place on rows of (ids, label), with what settings() gives. Exits with 1 when
    loss or gradient are not finite."""
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    if args.compile:
        torch._dynamo.reset()  # graphs of the task before count towards dynamo's limit
        model.compile(dynamic=True)  # lengths differ from batch to batch: one graph for all
    optimizer = torch.optim.AdamW(
        param_groups(model, lr, chosen.layer_decay, chosen.weight_decay), eps=chosen.eps, fused=True
    )
    scaler = torch.amp.GradScaler(args.device.type, enabled=args.dtype == torch.float16)
    parameters = list(model.parameters())
    skipped, steps = 0, chosen.epochs * math.ceil(len(rows) / chosen.batch_size)
    epochs = (batches_by_length(rows, chosen.batch_size, rng) for _ in range(chosen.epochs))
    groups = itertools.chain.from_iterable(epochs)
    bar = tqdm(groups, f"{model.name} seed {seed}", steps, leave=False, disable=None)
    model.train()
    for step, group in enumerate(bar, 1):
        # The learning rate: each layer has its own peak, all rise and fall together.
        for param_group in optimizer.param_groups:
            param_group["lr"] = param_group["peak"] * schedule(step - 1, steps, chosen.warmup)

        # Rows of near lengths, padded to the longest of them; forward and backward.
        batch = padded_batch(rows, group, model.encoder.config.pad_id, args.device)
        with autocast(args.device, args.dtype):  # inside it matrix products take 16 bits
            loss = model.loss(*batch)
        scaler.scale(loss).backward()

        # Clip the gradient to norm 1 and update the weights; one that is not finite is skipped.
        skipped += step_or_skip(parameters, optimizer, scaler)

        # Is all well? Seldom asked: here the host waits for the device. (With fp16 some updates
        # are skipped while the scaler looks for its scale.)
        if step % 200 == 0 or step == steps:
            if not loss.isfinite() or (skipped and not scaler.is_enabled()):
                stop(
                    1,
                    f"{model.name} seed {seed}: loss or gradient not finite near step {step} "
                    f"of {steps}; try a lower --lr, or --dtype float32",
                )


# --------------------------------------------------------------------------------------------------
# Predicting


@torch.no_grad()
def outputs(model, rows, args):
    """-> list of the model's float32 output for each row: (n_class,), (), or (2, L) with L of the
    longest row of its batch."""
    model.eval()
    found = [None] * len(rows)
    for group in batches_by_length(rows, max(1, EVAL_TOKENS // max(len(ids) for ids, _ in rows))):
        batch = padded_batch(rows, group, model.encoder.config.pad_id, args.device)
        with autocast(args.device, args.dtype):
            for i, out in zip(group, model(*batch[:2]).cpu().numpy()):
                found[i] = out
    return found


def ranked(model, rows, args):
    """Rows as read -> for each [(score, answer), ..]: of every class, of the likeliest texts
    (squad_v2: and of "", no answer), or the one score."""
    encoded, places = encode_rows(model, rows)
    found = outputs(model, encoded, args)
    if model.kind == "span":
        return candidates(
            found, places, args.null_threshold if model.name == "squad_v2" else math.inf
        )
    if model.kind == "score":
        return [[(0.0, float(score))] for score in found]
    return [list(zip(logits.tolist(), range(len(logits)))) for logits in found]


def predict(model, rows, args):
    """Classifier or bag_of_words() -> one prediction a row: class index, score, or text."""
    if not isinstance(model, Classifier):
        return model.predict(rows)
    return [max(pairs, key=itemgetter(0))[1] for pairs in ranked(model, rows, args)]


def n_best(first, last, k=N_BEST, longest=MAX_ANSWER):
    """(n,), (n,) logits of a window's tokens -> up to k (score, i, j), best first,
    i <= j < i + longest."""
    i, j = np.triu_indices(len(first))
    short = j - i < longest
    i, j = i[short], j[short]
    scores = first[i] + last[j]
    best = np.argsort(-scores, kind="stable")[:k]
    return list(zip(scores[best].tolist(), i[best].tolist(), j[best].tolist()))


def candidates(found, windows, threshold):
    """Outputs -> for each question [(score, text), ..], best first, then its null score, less the
    threshold, with "": the lowest of its windows' (BERT)."""
    answers = []
    for _, group in itertools.groupby(zip(found, windows), lambda pair: pair[1].question):
        pairs, null = [], []
        for out, w in group:
            null.append(float(out[:, 0].sum()))  # both ends at [CLS]
            first, last = out[:, w.offset : w.offset + len(w.spans)]
            for score, i, j in n_best(first, last):
                # Cut from the context by characters: decoding ids could lose a part of one.
                pairs.append((score, w.context[w.spans[i, 0] : w.spans[j, 1]].strip()))
        pairs.sort(key=itemgetter(0), reverse=True)
        answers.append([*pairs[:N_BEST], (min(null) - threshold, "")])
    return answers


def bag_of_words(rows):
    """What words tell without their order: TF-IDF with logistic regression on these rows
    -> scikit-learn's model.

    Of a pair: the words of each text, of the second one also whether the first has them, and of how
    many that is true, in tenths.
    """
    try:
        from sklearn.feature_extraction.text import TfidfVectorizer
        from sklearn.linear_model import LogisticRegression
        from sklearn.pipeline import make_pipeline
    except ImportError:
        raise ValueError(
            "--ckpt bow needs scikit-learn: pip install -r requirements-dev.txt"
        ) from None
    words = TfidfVectorizer().build_analyzer()

    def features(row):
        first, *second = map(words, row[0])
        found = [f"a {w}" for w in first]
        for b in second:
            found += [f"b {w}" for w in b] + [f"b, in a: {w in first} {w}" for w in b]
            share = sum(w in first for w in b) / max(1, len(b))
            found += [f"share {tenth}" for tenth in range(int(10 * share))]
        return found

    model = make_pipeline(
        TfidfVectorizer(analyzer=features, sublinear_tf=True),
        LogisticRegression(C=10 if len(rows[0][0]) == 1 else 1, max_iter=1000),
    )
    return model.fit(rows, [label for _, label in rows])


# --------------------------------------------------------------------------------------------------
# Results


def record(name, evaluations, began, model, args, facts):
    """{name in the table: rows}, a model -> lines of results.jsonl, printed.

    `constant` is what the commonest answer, always given, scores. began: time.time() at the start;
    facts: what else the lines say.
    """
    found, task = [], TASKS[name]
    for where, rows in evaluations.items():
        labels, predictions = [row[1] for row in rows], predict(model, rows, args)
        answer = "" if task.kind == "span" else statistics.mode(labels)
        metrics = task.score(labels, predictions)
        constant = task.score(labels, [answer] * len(labels))
        majority = constant.get("accuracy", constant.get("em", 0.0))
        row = {**facts, "task": where, "metrics": metrics, "constant": constant}
        row |= {"majority": majority, "one_class": len(set(predictions)) == 1}
        found.append({**row, "seconds": time.time() - began})
        shown = ", ".join(f"{key} {value:.4f}" for key, value in metrics.items())
        print(
            f"{where} seed {facts['seed']} lr {facts['lr']}: {shown} (majority {majority:.4f}), "
            f"{time.time() - began:.0f} s",
            flush=True,
        )
        with open(args.out_dir / "results.jsonl", "a") as handle:
            handle.write(json.dumps(found[-1]) + "\n")
    return found


def best_runs(results, middle):
    """Rows -> {(start, task): rows of the learning rate whose first metric is best} (P1). middle:
    of several seeds."""
    groups = defaultdict(lambda: defaultdict(list))
    for row in results:
        groups[row["ckpt"], row["task"]][row["lr"]].append(row)

    def first_metric(rows):
        return middle(next(iter(row["metrics"].values())) for row in rows)

    return {key: max(by_lr.values(), key=first_metric) for key, by_lr in groups.items()}


def paper_averages(scores):
    """{(task, metric): score} -> {paper: its own average over GLUE, or the list of tasks that it
    lacks}."""
    found = {}
    for paper, measures in AVERAGES.items():
        lacking = [pair[0] for pair in measures.items() if pair not in scores]
        found[paper] = lacking or statistics.mean(scores[pair] for pair in measures.items())
    return found


def report(results, args):
    """The table: aggregate over seeds, spread, what a constant answer scores, from what each row
    started."""
    name, scores = RECIPES[args.recipe]["aggregate"], defaultdict(dict)
    middle = getattr(statistics, name)
    print(
        f"\n{'':10}{'metric':10}{name:>8}{'min':>8}{'max':>8}{'std':>7}{'majority':>10}{'lr':>7}"
        f"{'seeds':>7}{'s a run':>9}  start"
    )
    for (source, where), rows in best_runs(results, middle).items():
        # An average is over one start; with --eval_only every task has its own file, in one folder.
        start = os.path.dirname(source) if args.eval_only else source
        for metric, constant in rows[0]["constant"].items():
            values = [row["metrics"][metric] for row in rows]
            scores[start][where, metric] = middle(values)
            print(
                f"{where:10}{metric:10}{middle(values):8.3f}{min(values):8.3f}{max(values):8.3f}"
                f"{np.std(values, ddof=len(values) > 1):7.3f}{constant:10.3f}"
                f"{rows[0]['lr']!s:>7}{len(values):7}"
                f"{statistics.mean(row['seconds'] for row in rows):9.0f}  {source}"
            )
    tried = {row["lr"] for row in results if row["ckpt"] == results[0]["ckpt"]}
    if len(tried) > 1:
        print(f"lr: the best of {len(tried)}, chosen on the rows that are scored here, as P1 does")
    collapsed = [
        f"{row['task']} seed {row['seed']} lr {row['lr']}" for row in results if row["one_class"]
    ]
    if collapsed:
        print(
            f"collapsed: {len(collapsed)} of {len(results)} scores come from one answer always "
            f"given: {', '.join(collapsed)}"
        )
    for start, of_start in scores.items() if args.task == "all" else ():
        for paper, mean in paper_averages(of_start).items():
            shown = f"{mean:.4f}" if isinstance(mean, float) else f"not without {', '.join(mean)}"
            print(f"{paper}'s average: {shown}  {start}")


def write_predictions(name, model, args):
    """Files as gluebenchmark.com takes them; for SQuAD, whose test is not public, the JSON of the
    dev file."""
    task = TASKS[name]
    files = read_split(name, args, "dev" if task.kind == "span" else "test")
    if name == "mnli":
        files |= read_split("ax", args, "test")
    for key, rows in files.items():
        predictions = predict(model, rows, args)
        if task.kind == "span":
            file = args.out_dir / f"{key}.json"
            text = json.dumps({row.id: answer for row, answer in zip(rows, predictions)})
        else:
            file, text = args.out_dir / f"{key}.tsv", "index\tprediction\n"
            for (_, index), p in zip(rows, predictions):
                answer = task.classes[p] if task.classes else f"{min(max(p, 0.0), 5.0):.3f}"
                text += f"{index}\t{answer}\n"
        file.write_bytes(text.encode())
        print(f"predictions: {len(rows):,} rows in {file}")


def predict_text(args):
    """--predict_text: print classes with probabilities, the score, or the likeliest answers. Raises
    ValueError, OSError."""
    name, task = args.task, TASKS[args.task]
    texts = [text.strip() for text in args.predict_text.split("|||") if text.strip()]
    if len(texts) != len(task.texts):
        raise ValueError(
            f"{name} takes {len(task.texts)} text(s), 'one ||| other'; {len(texts)} given"
        )
    if name == "docs":
        texts = [LIBRARY_NAMES.sub("[MASK]", texts[0])]  # as the task's rows are
    start, model = load_tuned(name, args)
    [pairs] = ranked(model, [Question(texts, [], [], "")], args)
    print(f"{start['source']}:")
    scores, answers = zip(*pairs)
    if task.kind == "score":
        print(f"{answers[0]:.3f}")
        return
    shares = torch.tensor(scores).softmax(0).tolist()
    for share, answer in sorted(zip(shares, task.classes or answers), reverse=True)[:5]:
        if share:
            print(f"{share:.4f}  {answer or '(no answer)'}")


# --------------------------------------------------------------------------------------------------
# The program


@dataclass
class FinetuneConfig:
    """The flags; None is for the recipe, the run or the machine to decide."""

    task: str = setting("docs", "all: GLUE, and each paper's own average", (*TASKS, "all"))
    ckpt: str | None = setting(
        None,
        "run folder or checkpoint, fine-tuned or not, or a glob of "
        "them (default: the newest under out/); scratch: untrained; bow: "
        "bag of words",
    )
    data_dir: str | None = setting(
        None, "folder with GLUE's official folders, or SQuAD's JSON (default: from the hub)"
    )
    skip_bad_rows: bool = setting(False, "leave malformed rows out, and count them")
    limit_train: int | None = setting(None, "training rows (default: all; docs 500)", "[1, 1e9]")
    freeze_encoder: bool = setting(False, "train one linear layer on the frozen encoder: a probe")
    recipe: str = setting(
        "electra", "electra is P0's, tupe P1's, taco P2's, bert P3's", tuple(RECIPES)
    )
    seeds: int = setting(
        1, "runs, with seeds 0, 1, ..; the papers: electra 10, tupe 5, taco 4, bert 5", "[1, 1000]"
    )
    lr: tuple | None = setting(None, "of the head; the best of several counts", "(0, 1e9)")
    epochs: int | None = setting(
        None, "passes over the rows; docs: 10 in every recipe", "[1, 10000]"
    )
    batch_size: int | None = setting(None, "rows an update", "[1, 1e6]")
    length: int | None = setting(
        None,
        "ids a row at most (default: the recipe's, or the model's "
        "max_len if smaller); beyond max_len position tables get fresh "
        "rows",
        "[1, 100000]",
    )
    eval_only: bool = setting(
        False, "score finetuned-<task>.pt of --ckpt or --out_dir, train nothing"
    )
    predict: bool = setting(False, "write the files that GLUE takes, or SQuAD's JSON, to --out_dir")
    predict_text: str | None = setting(None, "'one ||| other': print classes and probabilities")
    null_threshold: float = setting(
        0.0, "squad_v2: no answer where the null score is higher by more; not tuned on dev"
    )
    out_dir: str | None = setting(
        None, "where results.jsonl, the model and predictions go (default: the run's folder)"
    )
    cache: str = setting("cache", "folder of prepared data")
    device: str | None = DEVICE
    dtype: str | None = DTYPE
    compile: bool | None = setting(
        None, "torch.compile with dynamic shapes: pays in long runs only (default: off)"
    )

    __post_init__ = check_settings

    @property
    def tuned(self):
        """Is a fine-tuned model used, and nothing trained?"""
        return self.eval_only or self.predict_text is not None or self.task == "ax"


def parse_args(argv=None):
    """-> FinetuneConfig. Exits with 2 on a mistake."""
    parser = Parser("finetune.py", __doc__)
    parser.add_settings("flags", FinetuneConfig)
    with one_line_errors():
        args = FinetuneConfig(**vars(parser.parse_args(argv)))
        no_classes = args.task == "all" or TASKS[args.task].kind != "class"
        if args.ckpt == "bow" and (no_classes or args.tuned or args.predict):
            raise ValueError(
                "--ckpt bow is for one task with classes to learn, and keeps no model "
                "to predict with"
            )
        if args.predict_text is not None and args.task in ("all", "ax"):
            raise ValueError("--predict_text takes one task (for ax: mnli)")
        if args.predict and args.task == "docs":
            raise ValueError("docs has no test rows to predict")
    return args


def run_task(name, starts, args, progress):
    """Fine-tune from every start with every learning rate and seed -> rows. Keeps the model whose
    first metric is best."""
    train, evaluations = read_task(name, args)
    results, best, file = [], (-math.inf, None), args.out_dir / f"finetuned-{name}.pt"
    for start in starts:
        with damage_is_one_line(start["source"]):
            max_len = start["config"]["max_len"]
            chosen = settings(args, name, start["config"])
            model = make_model(start, name, chosen.length, 0, chosen.probe)
            other = start["data"].get("source", {}).get("hash")
        rows, _ = encode_rows(model, train)
        if name == "docs" and other:
            here = prepare("docs", "bpe", args.cache).meta["source"]["hash"]
            if other != here:
                print(
                    f"note: the run learned from the documentation of other package versions "
                    f"(docs {other}, here {here}): rows to test may have been among its text"
                )
        extended = f" (position tables extended from {max_len})"
        print(
            f"{name}: from {start['source']}; length {chosen.length}"
            f"{extended if chosen.length > max_len else ''}"
        )
        print(
            f"{len(train):,} rows to train on, {sum(map(len, evaluations.values())):,} to score; "
            f"recipe {chosen.recipe}: {chosen.epochs} epochs, batch {chosen.batch_size}, lr",
            *chosen.lr,
            flush=True,
        )

        progress.saved = 0  # what fails now breaks under way: it is no user's mistake
        for lr, seed in itertools.product(chosen.lr, range(args.seeds)):
            began = time.time()
            model = make_model(start, name, chosen.length, seed, chosen.probe).to(args.device)
            train_one(model, rows, chosen, lr, seed, args)
            facts = {**vars(chosen), "seed": seed, "lr": lr, "n_train": len(train)}
            facts |= {"ckpt": start["source"], "step": start["step"]}
            new = record(name, evaluations, began, model, args, facts)
            results += new
            first, *_ = new[0]["metrics"].values()
            if first > best[0]:
                best = first, model
                save_model(file, model, start, new[0], asked_for(args))
        progress.saved = None
    print(f"{name}: the best run's model is {file}")
    if args.predict:
        write_predictions(name, best[1], args)
    return results


def run_tuned(name, args):
    """Score a fine-tuned model, and predict with it -> rows. AX has no labels: MNLI's predicts
    it."""
    start, model = load_tuned("mnli" if name == "ax" else name, args)
    print(f"{name}: from {start['source']}; length {model.length}")
    _, evaluations = read_task(name, args)
    facts = {**start["row"], "ckpt": start["source"], "eval_only": True}
    results = record(name, evaluations, time.time(), model, args, facts)
    if args.predict or name == "ax":
        write_predictions(name, model, args)
    return results


def run_tasks(args, progress):
    """One task, or all of GLUE as far as it is there -> rows."""
    results, starts, names = [], [], [args.task]
    if args.task == "all":
        names = list(GLUE)
        for name in GLUE if args.data_dir else ():
            folder = Path(args.data_dir, TASKS[name].folder)
            if not folder.exists():
                print(f"{name}: {folder} is not there, left out")
                names.remove(name)
        if not names:
            raise ValueError("--task all: nothing of GLUE is there")
    if not args.tuned and args.ckpt != "bow":
        starts = read_starts(args.ckpt, args.cache)
        for name in names:
            check_place(name, starts, args)
    for name in names:
        if args.tuned:
            results += run_tuned(name, args)
        elif args.ckpt == "bow":
            began, (train, evaluations) = time.time(), read_task(name, args)
            facts = {"seed": 0, "lr": None, "ckpt": "bow", "n_train": len(train)}
            results += record(name, evaluations, began, bag_of_words(train), args, facts)
        else:
            with lock(args.out_dir, f"fine-tuning on {name}", f".{name}.lock"):
                results += run_task(name, starts, args, progress)
    return results


def main(argv=None):
    args = parse_args(argv)
    keep_memory()
    with one_line_errors("lower --batch_size or --length") as progress:
        if int(os.environ.get("WORLD_SIZE", 1)) > 1:
            raise ValueError("finetune.py is one process: python, not torchrun; a task on each GPU")
        args.device = pick_device(args.device)
        args.dtype, _ = pick_dtype(args.device, args.dtype)
        if args.compile and not can_compile(args.device):
            print("not compiled: no compiler here")
            args.compile = False
        if not args.ckpt:  # once: another run may save while this one is at work
            args.ckpt = args.tuned and args.out_dir or newest_run()
        args.out_dir = home(args)
        if args.predict_text is not None:
            predict_text(args)
            return
        args.out_dir.mkdir(parents=True, exist_ok=True)
        if results := run_tasks(args, progress):
            report(results, args)
            print(f"results: {args.out_dir}/results.jsonl")


if __name__ == "__main__":
    main()
