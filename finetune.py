"""Fine-tune a pre-trained encoder on GLUE or SQuAD and score it, as the papers do it.

    python finetune.py --task docs                                   # no network: which library is this docstring from?
    python finetune.py --task cola --data_dir glue --seeds 5         # official files: glue/CoLA/train.tsv, dev.tsv
    python finetune.py --task all --recipe tupe --seeds 5 --predict  # GLUE from the hub, the papers' averages, files to submit
    python finetune.py --task docs --ckpt scratch                    # the same shape, untrained (bow: bag of words)
    python finetune.py --task sst2 --ckpt 'out/run/ckpt_*.pt'        # every kept checkpoint: score against steps
    python finetune.py --task rte --ckpt out/run/finetuned-mnli.pt   # start from the MNLI model's encoder
    python finetune.py --task mnli --predict_text 'A man sleeps. ||| Nobody is awake.'

Takes the newest checkpoint under out/ unless --ckpt names one. Every run is a line of results.jsonl; the table at the
end has the aggregate over seeds, the spread, and what always giving the commonest answer scores. The best run's model
is kept beside it as finetuned-<task>.pt. P0 is the paper on relative position prediction, P1 TUPE, P2 TACO, P3 "On
Position Embeddings in BERT".
"""

import argparse
import csv
import functools
import glob
import json
import math
import os
import re
import statistics
import string
import sys
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import tiktoken
import torch
import torch.nn as nn
import torch.nn.functional as F
from tqdm import tqdm

from data import DOCS_LIBRARIES, Parser, encoding_arguments, one_line_errors, prepare, removed
from model import Encoder, EncoderConfig, read_checkpoint, warm_start
from train import autocast, can_compile, keep_memory, one_line_failures, pick_device, pick_dtype, stop, write_torch

EVAL_TOKENS = 16384             # tokens of a batch when nothing is learned
N_BEST, MAX_ANSWER, MAX_QUESTION = 20, 30, 64           # SQuAD: candidates, and tokens of an answer and of a question (BERT)
LIBRARY_NAMES = re.compile(r"\b(python|pytorch|torch|numpy|np|pandas|pd|datasets?|hugging ?face)\b", re.IGNORECASE)


# ---------------------------------------------------------------------------------------------------------
# Metrics: (labels, predictions) -> float. Where one is not defined it is 0, so that no table holds a NaN.

def accuracy(labels, predictions):
    return float(np.mean(np.asarray(labels) == np.asarray(predictions)))


def f1_score(labels, predictions):
    """F1 of class 1; 0 where neither the labels nor the predictions hold it."""
    y, p = np.asarray(labels) == 1, np.asarray(predictions) == 1
    return float(2 * (y & p).sum() / max(1, y.sum() + p.sum()))


def pearson(labels, predictions):
    """Pearson correlation; 0 where one side is constant or not finite. Of two binary vectors it is Matthews'."""
    y, p = np.asarray(labels, float), np.asarray(predictions, float)
    if not np.isfinite([y, p]).all() or np.ptp(y) == 0 or np.ptp(p) == 0:
        return 0.0
    y, p = y - y.mean(), p - p.mean()
    y, p = y / np.abs(y).max(), p / np.abs(p).max()         # so that squares of tiny numbers do not vanish
    return float(np.clip((y * p).sum() / math.sqrt((y * y).sum() * (p * p).sum()), -1, 1))


def ranks(x):
    """Ranks from 1; equal values share the mean of theirs."""
    _, place, counts = np.unique(np.asarray(x, float), return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[place]


def normalise_answer(text):
    """SQuAD's official normalisation: lower case, no punctuation, no articles, single spaces."""
    text = "".join(c for c in text.lower() if c not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def answer_f1(gold, text):
    """F1 over words of two normalised texts; without words on one side it is 1 if both have none (the v2 script)."""
    gold, text = gold.split(), text.split()
    if not gold or not text:
        return float(gold == text)
    return 2 * sum((Counter(gold) & Counter(text)).values()) / (len(gold) + len(text))


def over_golds(score):
    """-> metric of lists of gold texts (none: no answer) and of texts: the best over a question's golds, then the mean."""
    def metric(labels, predictions):
        golds = [[g for g in map(normalise_answer, each) if g] or [""] for each in labels]
        return float(np.mean([max(score(g, normalise_answer(p)) for g in each) for each, p in zip(golds, predictions)]))
    return metric


ACCURACY, F1 = {"accuracy": accuracy}, {"accuracy": accuracy, "f1": f1_score}
SQUAD = {"em": over_golds(lambda gold, text: gold == text), "f1": over_golds(answer_f1)}


# ---------------------------------------------------------------------------------------------------------
# Tasks and recipes

class Task(NamedTuple):
    """Where a task's rows are, in the official files and on the hub, and how they are scored."""
    folder: str                     # below --data_dir
    texts: tuple                    # columns of the official files; a number in CoLA's, which have no header
    hub: tuple                      # the hub's columns
    classes: tuple = ("0", "1")     # as the official file writes them, in the hub's order
    metrics: dict = ACCURACY
    label: str | int = "label"
    # Name in the table or of the file to submit -> (official file, the hub's split).
    dev: dict = {"": ("dev.tsv", "validation")}
    test: dict = {}                 # none named: test.tsv, submitted under the folder's name
    train: dict = {"": ("train.tsv", "train")}
    kind: str = "class"             # or score, span
    repo: str = "nyu-mll/glue"


def squad(version, repo):
    return Task("squad", ("question", "context"), (), (), SQUAD, kind="span", repo=repo, train={
        "": (f"train-{version}.json", "train")}, dev={"": (f"dev-{version}.json", "validation")})


NLI, RTE, PAIR = ("entailment", "neutral", "contradiction"), ("entailment", "not_entailment"), ("sentence1", "sentence2")
TASKS = {
    # GLUE scores CoLA by Matthews, P0 reports accuracy: both, always.
    "cola": Task("CoLA", (3,), ("sentence",), metrics={"matthews": pearson, **ACCURACY}, label=1),
    "sst2": Task("SST-2", ("sentence",), ("sentence",)),
    "mrpc": Task("MRPC", ("#1 String", "#2 String"), PAIR, metrics=F1, label="Quality"),
    "stsb": Task("STS-B", PAIR, PAIR, (), {"pearson": pearson, "spearman": lambda y, p: pearson(ranks(y), ranks(p))}, "score",
                 kind="score"),
    "qqp": Task("QQP", ("question1", "question2"), ("question1", "question2"), metrics=F1, label="is_duplicate"),
    "mnli": Task("MNLI", PAIR, ("premise", "hypothesis"), NLI, label="gold_label",
                 dev={"": ("dev_matched.tsv", "validation_matched"), "-mm": ("dev_mismatched.tsv", "validation_mismatched")},
                 test={"MNLI-m": ("test_matched.tsv", "test_matched"), "MNLI-mm": ("test_mismatched.tsv", "test_mismatched")}),
    "qnli": Task("QNLI", ("question", "sentence"), ("question", "sentence"), RTE),
    "rte": Task("RTE", PAIR, PAIR, RTE),
    "wnli": Task("WNLI", PAIR, PAIR),
    # Predicted by the MNLI model.
    "ax": Task("diagnostic", PAIR, ("premise", "hypothesis"), NLI, dev={}, test={"AX": ("diagnostic.tsv", "test")}),
    "squad": squad("v1.1", "rajpurkar/squad"),
    "squad_v2": squad("v2.0", "rajpurkar/squad_v2"),
    "docs": Task("", ("text",), (), DOCS_LIBRARIES),
}
GLUE = ("cola", "sst2", "mrpc", "stsb", "qqp", "mnli", "qnli", "rte", "wnli", "ax")
METRICS = {name: lambda labels, predictions, task=task: {key: metric(labels, predictions) for key, metric in task.metrics.items()}
           for name, task in TASKS.items()}

# A value, or one for each task and one for the rest. Warm-up below 1 is a share of the steps. lr_small is for a width
# below 512. Of several learning rates the best counts. The seeds are what the papers ran; --seeds is 1 by default.
REST = ""
RECIPES = {
    # ELECTRA (Clark 2020, app. B), which P0 follows.
    "electra": dict(epochs={"rte": 10, "stsb": 10, "squad": 2, "squad_v2": 2, REST: 3}, lr=[1e-4], lr_small=[3e-4],
                    batch_size=32, warmup=.1, weight_decay=0., eps=1e-6, layer_decay=.8,
                    length={"squad": 512, "squad_v2": 512, REST: 128}, aggregate="median", seeds=10),
    # P1, table 1.
    "tupe": dict(epochs={"mnli": 5, "qqp": 5, "qnli": 5, REST: 10}, lr=[2e-5, 3e-5, 4e-5, 5e-5], batch_size=32, warmup=.06,
                 weight_decay=.01, eps=1e-6, layer_decay=1., length=512, aggregate="median", seeds=5),
    # P2, tables 6 and 7.
    "taco": dict(epochs={"mnli": 6, "qqp": 6, REST: 4}, lr=[5e-5],
                 batch_size={"cola": 32, "stsb": 32, "mrpc": 32, "rte": 32, REST: 64},
                 warmup={"mnli": 2000, "qqp": 2000, "qnli": 200, "sst2": 200, REST: 100}, weight_decay=0., eps=1e-8,
                 layer_decay=1., length=128, aggregate="mean", seeds=4),
    # P3, table 6; the rest is its script's default. Its SQuAD figure is the best of every 1,000 steps on dev: not
    # followed, the last model is scored (departure).
    "bert": dict(epochs=3, lr={"squad": [3e-5], "squad_v2": [3e-5], REST: [2e-5]}, batch_size=32, warmup=0, weight_decay=0.,
                 eps=1e-8, layer_decay=1., length={"squad": 384, "squad_v2": 384, REST: 128}, aggregate="mean", seeds=5),
}
# What each paper averages over GLUE: both MNLIs in P1 and P2, the mismatched one alone in P3; never WNLI.
COMMON = {"cola": "matthews", "sst2": "accuracy", "qnli": "accuracy", "rte": "accuracy", "mnli-mm": "accuracy"}
AVERAGES = {
    "P1": {**COMMON, "mnli": "accuracy", "qqp": "accuracy", "mrpc": "accuracy", "stsb": "pearson"},
    "P2": {**COMMON, "mnli": "accuracy", "qqp": "f1", "mrpc": "f1", "stsb": "spearman"},
    "P3": {**COMMON, "qqp": "f1", "mrpc": "f1", "stsb": "spearman"},
}


def settings(args, name, cfg):
    """The recipe's row for a task with the flags over it -> namespace of epochs, lr and seeds (lists), batch_size, length, .."""
    chosen = {key: value.get(name, value.get(REST)) if isinstance(value, dict) else value
              for key, value in RECIPES[args.recipe].items()}
    if cfg["d_model"] < 512:
        chosen["lr"] = chosen.get("lr_small", chosen["lr"])
    if name == "docs":
        chosen["epochs"] = 10
    flags = {key: getattr(args, key) for key in ("epochs", "lr", "batch_size", "length") if getattr(args, key)}
    return SimpleNamespace(**{**chosen, "length": min(chosen["length"], cfg["max_len"]), **flags,
                              "recipe": args.recipe, "seeds": range(args.seeds), "probe": args.freeze_encoder})


# ---------------------------------------------------------------------------------------------------------
# Reading rows: (texts, label); in test files (texts, number of the row); in SQuAD's Question

class Question(NamedTuple):
    id: str
    question: str
    context: str
    answers: list           # of (text, first character); none: it has no answer


def read_tsv(file, columns, convert):
    """Official GLUE file -> list of (texts, convert(last column)), list of what is wrong with the other rows, with line.

    columns: names or numbers; without a name the file has no header. Tab-separated, no quoting, a BOM or none. A row that
    has not as many columns as the header is malformed: its texts may be shifted. Raises ValueError on a missing column.
    """
    csv.field_size_limit(2 ** 31 - 1)           # no field is too long
    rows, bad, named = [], [], [c for c in columns if isinstance(c, str)]
    with open(file, encoding="utf-8-sig", newline="") as handle:
        reader = csv.reader(handle, delimiter="\t", quoting=csv.QUOTE_NONE)
        try:
            header = next(reader, named) if named else [None] * (max(columns) + 1)
            if missing := [c for c in named if c not in header]:
                raise ValueError(f"{file} has no column {', '.join(missing)}, only {', '.join(header)}")
            index = [header.index(c) if c in named else c for c in columns]
            for row in filter(None, reader):    # an empty line is none
                try:
                    if len(row) != len(header):
                        raise ValueError(f"{len(row)} columns, not {len(header)}")
                    rows.append((tuple(row[i] for i in index[:-1]), convert(row[index[-1]])))
                except ValueError as error:
                    bad.append(f"line {reader.line_num}: {error}")
        except (csv.Error, UnicodeDecodeError) as error:
            raise ValueError(f"{file}, after line {reader.line_num}: {error}") from None
    return rows, bad


def read_label(task, text):
    """The label column of an official file -> class index, or a score in 0 .. 5. Raises ValueError."""
    if task.kind == "score":
        if not 0 <= float(text) <= 5:           # NaN too
            raise ValueError(f"score {text} is not in 0 .. 5")
        return float(text)
    if text not in task.classes:
        raise ValueError(f"label {text!r} is not one of {', '.join(task.classes)}")
    return task.classes.index(text)


def read_squad(file):
    """SQuAD's JSON, v1.1 or v2.0 -> list of Question, list of what is wrong with the others. Raises ValueError."""
    questions, bad = [], []
    try:
        articles = json.loads(Path(file).read_text(encoding="utf-8-sig"))["data"]
        for paragraph, q in ((p, q) for article in articles for p in article["paragraphs"] for q in p["qas"]):
            answers = [] if q.get("is_impossible") else [(a["text"], a["answer_start"]) for a in q["answers"]]
            if all(paragraph["context"].startswith(text, start) for text, start in answers):
                questions.append(Question(q["id"], q["question"], paragraph["context"], answers))
            else:
                bad.append(f"question {q['id']}: its answer is not at its place in the context")
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{file} is not in SQuAD's format ({type(error).__name__}: {error})") from None
    return questions, bad


def read_file(name, path, split, skip_bad=False):
    """Official file -> rows. A malformed row is an error with file and line, or is counted (--skip_bad_rows)."""
    task, convert = TASKS[name], functools.partial(read_label, TASKS[name])
    if task.kind == "span":
        rows, bad = read_squad(path)
    elif split == "test":                       # the first column is the row's number; CoLA's has a header, with the hub's name
        rows, bad = read_tsv(path, (*(task.hub if name == "cola" else task.texts), 0), int)
    else:
        rows, bad = read_tsv(path, (*task.texts, task.label), convert)
    if bad and not skip_bad:
        raise ValueError(f"{path}, {bad[0]}; --skip_bad_rows leaves such rows out")
    if bad:
        print(f"{path}: {len(bad)} malformed rows left out, the first: {bad[0]}")
    if not rows:
        raise ValueError(f"{path} has no rows")
    return rows


def hub_rows(name, split, test=False):
    """A split of the hub's data set, in the form the official files give. Raises ValueError without a network."""
    task = TASKS[name]
    from datasets import load_dataset
    try:
        rows = load_dataset(task.repo, None if task.kind == "span" else name, split=split)
    except Exception as error:
        raise ValueError(f"cannot fetch {task.repo} ({name}) from the hub ({type(error).__name__}): name a folder with the "
                         "official files with --data_dir, or take --task docs, which needs no network") from None
    if task.kind == "span":
        return [Question(r["id"], r["question"], r["context"], list(zip(r["answers"]["text"], r["answers"]["answer_start"])))
                for r in rows]
    return [(tuple(row[column] for column in task.hub), row["idx" if test else "label"]) for row in rows]


def docs_rows(cache):
    """Which library does a docstring come from? Libraries' names are masked as whole words (numpy, but not from_numpy);
    tested on pre-training's validation documents."""
    folder = prepare("docs", "bpe", cache).folder
    stored = json.loads((folder / "docs.json").read_text())
    rows = [((LIBRARY_NAMES.sub("[MASK]", text),), DOCS_LIBRARIES.index(library)) for library, text in stored["rows"]]
    # The same split as data.tokenize makes.
    is_test = [i % stored["every"] == 1 for i in range(len(rows))]
    return [r for r, test in zip(rows, is_test) if not test], {"docs": [r for r, test in zip(rows, is_test) if test]}


def read_split(name, args, split):
    """'train', 'dev' or 'test' -> {name in the table, or of the file to submit: rows}. Raises ValueError, OSError.

    A file that is not there is one printed line, unless it is the training file or the first one to score.
    """
    task, found = TASKS[name], {}
    files = getattr(task, split) or ({task.folder: ("test.tsv", "test")} if split == "test" else {})
    for key, (file, hub_split) in files.items():
        key, path = key if split == "test" else name + key, Path(args.data_dir or "") / task.folder / file
        if task.kind == "span" and not path.exists():
            path = path.parent.parent / file    # SQuAD's files may lie in --data_dir itself
        if not args.data_dir:
            found[key] = hub_rows(name, hub_split, split == "test")
        elif not path.exists() and (split == "test" or found):
            print(f"{key}: {path} is not there, left out")
        else:
            found[key] = read_file(name, path, split, args.skip_bad_rows)
    return found


def read_task(name, args):
    """-> training rows ([] with --eval_only), {name in the table: evaluation rows}. Raises ValueError, OSError."""
    if name == "docs":
        train, evaluations = docs_rows(args.cache)
    else:
        train = [] if args.eval_only else read_split(name, args, "train")[name]
        evaluations = read_split(name, args, "dev")
    limit = args.limit_train or (500 if name == "docs" else len(train))
    order = np.random.default_rng(0).permutation(len(train))[:limit]
    return [train[i] for i in order], evaluations


# ---------------------------------------------------------------------------------------------------------
# Rows of ids

class Window(NamedTuple):
    """A part of a SQuAD context that makes a row."""
    question: int           # its question's place in the list
    context: str
    spans: np.ndarray       # (n, 2) first and last character + 1 of each context token
    offset: int             # place of the first of them in the row


class Encoded(NamedTuple):
    rows: list              # (ids, label): a class, a score, or (first, last) of the answer's tokens, (0, 0) for none
    labels: list            # what the metrics compare with: one a row, or a question's gold texts
    windows: list = None    # SQuAD: one a row


def encode(texts, tokenizer, cfg, length):
    """One or two texts -> [CLS] A [SEP] or [CLS] A [SEP] B [SEP], at most `length` ids, the longest cut first."""
    # 16 characters an id are more than text needs: a long document is not tokenised only to be cut.
    parts = [tokenizer.encode(text[:16 * length], allowed_special={"[MASK]"}, disallowed_special=()) for text in texts]
    room = length - 1 - len(parts)
    while sum(map(len, parts)) > room:
        max(parts, key=len).pop()
    return [cfg.cls_id] + [i for part in parts for i in part + [cfg.sep_id]]


@functools.lru_cache(maxsize=1)                 # a context's questions stand together
def token_spans(tokenizer, text):
    """-> ids, (n, 2) first and last character + 1 of each. A character cut in two by the byte-level BPE is in both."""
    ids = tokenizer.encode_ordinary(text)
    data = np.frombuffer(text.encode("utf-8", "surrogatepass"), np.uint8)
    character = np.cumsum((data & 0xC0) != 0x80) - 1        # of each byte: all but a character's first are 10xxxxxx
    ends = np.cumsum([len(piece) for piece in tokenizer.decode_tokens_bytes(ids)], dtype=int)
    starts = np.concatenate(([0], ends))[:-1]
    return ids, np.stack((character[starts], character[ends - 1] + 1), axis=1)


def windows(number, question, tokenizer, cfg, length):
    """Question -> list of ((ids, label), Window): [CLS] question [SEP] part of the context [SEP], a part every length // 3.

    The label is (0, 0), [CLS], where the answer is not wholly in the part, as BERT has it.
    """
    q = tokenizer.encode_ordinary(question.question)[:min(MAX_QUESTION, length // 2)]
    context, spans = token_spans(tokenizer, question.context)
    offset, room = len(q) + 2, length - len(q) - 3
    text, start = question.answers[0] if question.answers else ("", 0)
    inside = np.flatnonzero((spans[:, 1] > start) & (spans[:, 0] < start + len(text)))             # the answer's tokens
    found, step = [], min(length // 3, room)
    for first in range(0, max(1, len(context) - room + step), step):            # until a part has reached the end
        part = context[first:first + room]
        whole = len(inside) and first <= inside[0] and inside[-1] < first + len(part)
        label = (int(inside[0]) - first + offset, int(inside[-1]) - first + offset) if whole else (0, 0)
        found.append((([cfg.cls_id, *q, cfg.sep_id, *part, cfg.sep_id], label),
                      Window(number, question.context, spans[first:first + room], offset)))
    return found


def encode_rows(model, rows):
    """Rows as read -> Encoded for this model."""
    tokenizer, cfg = model.encoder.tokenizer, model.encoder.config
    if model.kind != "span":
        return Encoded([(encode(texts, tokenizer, cfg, model.length), label) for texts, label in rows], [y for _, y in rows])
    found = [pair for number, q in enumerate(rows) for pair in windows(number, q, tokenizer, cfg, model.length)]
    return Encoded([row for row, _ in found], [[text for text, _ in q.answers] for q in rows], [w for _, w in found])


def batches(rows, size, rng=None):
    """Rows of near lengths together, so that little is padding -> (rows of one batch). Shuffled when rng is given."""
    order = rng.permutation(len(rows)) if rng else np.arange(len(rows))
    window = 50 * size if rng else len(rows)            # sorted by length within a window: still random enough
    groups = []
    for start in range(0, len(rows), window):
        near = sorted(order[start:start + window], key=lambda i: len(rows[i][0]))
        groups += [near[i:i + size] for i in range(0, len(near), size)]
    for g in (rng.permutation(len(groups)) if rng else range(len(groups))):
        yield groups[g]


def collate(rows, pad_id, device):
    """-> tokens (B, L), pad (B, L) bool or None without padding, labels (B,) or (B, 2); L is the longest of the batch."""
    longest = max(len(ids) for ids, _ in rows)
    tokens = torch.tensor([ids + [pad_id] * (longest - len(ids)) for ids, _ in rows])
    labels = torch.tensor([label for _, label in rows])
    if device.type == "cuda":                   # pinned memory is copied while the host goes on
        tokens, labels = tokens.pin_memory(), labels.pin_memory()
    tokens, labels = tokens.to(device, non_blocking=True), labels.to(device, non_blocking=True)
    return tokens, tokens == pad_id if any(len(ids) < longest for ids, _ in rows) else None, labels


# ---------------------------------------------------------------------------------------------------------
# Model

class Classifier(nn.Module):
    """Encoder with a task's head: on [CLS] dropout, dense, tanh, dropout, linear; for spans one linear layer on every token.

    probe: the encoder stays as it is, one linear layer on [CLS] learns (--freeze_encoder).
    """
    def __init__(self, encoder, name, length, probe=False):
        super().__init__()
        self.encoder, self.name, self.length, self.probe, self.kind = encoder, name, length, probe, TASKS[name].kind
        C, n_out = encoder.config.d_model, {"class": len(TASKS[name].classes), "score": 1, "span": 2}[self.kind]
        dense = [] if probe or self.kind == "span" else [nn.Dropout(0.1), nn.Linear(C, C), nn.Tanh()]
        self.head = nn.Sequential(*dense, nn.Dropout(0.1), nn.Linear(C, n_out))
        for layer in (layer for layer in self.head if isinstance(layer, nn.Linear)):
            nn.init.normal_(layer.weight, std=0.02)
            nn.init.zeros_(layer.bias)
        encoder.requires_grad_(not probe)

    def forward(self, tokens, pad):
        """-> (B, n_class) logits, (B,) scores, or (B, 2, L) logits of the first and the last token of a span."""
        hidden = self.encoder(tokens, pad=pad)                                      # (B, L, C)
        if self.kind != "span":
            return self.head(hidden[:, 0]).float().squeeze(-1)      # (B, 1) -> (B,); more classes than one stay
        out = self.head(hidden).float().transpose(1, 2)                             # (B, L, 2) -> (B, 2, L)
        return out if pad is None else out.masked_fill(pad[:, None], float("-inf"))

    def loss(self, tokens, pad, labels):
        out = self(tokens, pad)
        if self.kind == "score":
            return F.mse_loss(out, labels)
        return F.cross_entropy(out.flatten(0, -2), labels.flatten())                # spans: (2B, L), (2B,)

    def train(self, mode=True):
        super().train(mode)
        self.encoder.train(mode and not self.probe)                 # a frozen encoder has no dropout either
        return self


def newest_run():
    """Folder of the newest checkpoint under out/. Raises FileNotFoundError."""
    if not (found := glob.glob("out/*/ckpt.pt")):
        raise FileNotFoundError("no checkpoint under out/: pre-train one (python train.py), or take --ckpt scratch")
    return os.path.dirname(max(found, key=os.path.getmtime))


def home(args):
    """The folder where results and fine-tuned models lie: --out_dir, else the run's."""
    if args.out_dir or args.ckpt in ("scratch", "bow"):
        return args.out_dir or "out"
    ckpt = args.ckpt or newest_run()
    return ckpt if os.path.isdir(ckpt) else os.path.dirname(re.split(r"[*?\[]", ckpt)[0]) or "."


def find_sources(name, args):
    """-> list of paths, or ['scratch'], to start from; what a glob finds in the order of steps. Raises FileNotFoundError."""
    if args.eval_only:
        place = args.ckpt if args.ckpt and args.task != "all" else home(args)
        return [os.path.join(place, f"finetuned-{name}.pt") if os.path.isdir(place) else place]
    if args.ckpt in (None, "scratch") or os.path.exists(args.ckpt) or not re.search(r"[*?\[]", args.ckpt):
        return [args.ckpt or newest_run()]
    if not (files := glob.glob(args.ckpt)):
        raise FileNotFoundError(f"no file matches {args.ckpt!r}")
    kept = [file for file in files if os.path.basename(file) != "ckpt_prev.pt"]     # another name of one of them
    return sorted(kept or files, key=lambda file: read_checkpoint(file).get("step", 0))


def read_start(source, cache, tuned_on=None):
    """A path or 'scratch' -> checkpoint dictionary with `source`, its name in the table. Raises ValueError, OSError."""
    if source != "scratch":
        start = read_checkpoint(source)
        if tuned_on and start.get("task") != tuned_on:
            raise ValueError(f"{source} is no model fine-tuned on {tuned_on}; python finetune.py --task {tuned_on} makes one")
        return {**start, "source": source + (f" ({start['task']})" if "task" in start else "")}
    if glob.glob("out/*/ckpt.pt"):
        run = newest_run()
        return {**read_checkpoint(run), "model": {}, "step": 0, "source": f"scratch, shaped like {run}"}
    corpus = prepare("docs", "bpe", cache)
    return {"config": asdict(EncoderConfig(vocab_size=corpus.vocab_size)), "tokenizer": encoding_arguments(corpus.tokenizer),
            "tokenizer_hash": corpus.meta["tokenizer_hash"], "model": {}, "source": "scratch, demo"}


def make_model(start, name, length, seed, probe=False):
    """A start's encoder with a head for the task -> Classifier. Raises ValueError if the weights do not fit.

    A length beyond max_len extends position tables with fresh rows. The head is fresh, but for a model fine-tuned on
    this very task.
    """
    torch.manual_seed(seed)
    encoder = Encoder(EncoderConfig(**{**start["config"], "max_len": max(length, start["config"]["max_len"])}))
    encoder.tokenizer = tiktoken.Encoding(**start["tokenizer"])
    model = Classifier(encoder, name, length, probe)
    parts = ("encoder.", "head.") if (start.get("task"), start.get("probe")) == (name, probe) else ("encoder.",)
    if weights := {key: value for key, value in start["model"].items() if key.startswith(parts)}:
        new = warm_start(model, {**start, "model": weights}, start["source"])["new"]
        if missing := [key for key in new if key.startswith(parts)]:
            raise ValueError(f"{start['source']} does not fit this model: missing {', '.join(missing[:3])}")
    return model


def save_model(file, model, start, row):
    """All that is needed to use the model, written aside, then renamed. model.load() takes its encoder."""
    about = {key: start[key] for key in ("tokenizer", "tokenizer_hash", "step", "data") if key in start}
    about |= {"task": model.name, "classes": TASKS[model.name].classes, "length": model.length, "probe": model.probe, "row": row,
              "config": asdict(model.encoder.config)}
    aside = Path(f"{file}.{os.getpid()}.tmp")
    with removed(aside):
        with open(aside, "wb") as handle:
            write_torch(handle, {**about, "model": {key: value.cpu() for key, value in model.state_dict().items()}})
        os.replace(aside, file)


# ---------------------------------------------------------------------------------------------------------
# Training and predicting

class Machine(NamedTuple):
    device: torch.device
    dtype: torch.dtype
    compile: bool


def param_groups(model, lr, layer_decay, weight_decay):
    """Head lr, top layer lr * layer_decay, and so on down; words and shared positional tables lowest.

    ELECTRA's code decays once more below the head: its top layer has lr * layer_decay^2 (departure).
    Weight decay is on matrices only. Frozen weights are left out.
    """
    n, groups = len(model.encoder.blocks), {}
    for name, p in model.named_parameters():
        if p.requires_grad:
            layer = re.match(r"encoder\.(?:blocks|pe\.parts\.rel_k\.tables)\.(\d+)\.", name)       # rel_k has a table a layer
            depth = 0 if name.startswith("head.") else n - int(layer[1]) if layer else n + 1
            groups.setdefault((lr * layer_decay ** depth, weight_decay if p.dim() >= 2 else 0.0), []).append(p)
    return [{"params": params, "lr": peak, "peak": peak, "weight_decay": decay} for (peak, decay), params in groups.items()]


def schedule(step, steps, warmup):
    """Share of the peak at a step: linear warm-up (below 1: a share of the steps), then linear to 0."""
    warmup = warmup * steps if warmup < 1 else warmup
    return min((step + 1) / max(1, warmup), (steps - step) / max(1, steps - warmup), 1.0)


def train_one(model, rows, chosen, lr, seed, machine):
    """Fine-tune in place: AdamW, the recipe's schedule, clip 1. Exits with 1 when the loss is not finite."""
    torch.manual_seed(seed)
    rng, device, title = np.random.default_rng(seed), machine.device, f"{model.name} seed {seed}"
    if machine.compile:
        torch._dynamo.reset()                   # graphs of the task before count towards dynamo's limit
        model.compile(dynamic=True)             # lengths differ from batch to batch: one graph for all, not one for each
    optimizer = torch.optim.AdamW(param_groups(model, lr, chosen.layer_decay, chosen.weight_decay), eps=chosen.eps, fused=True)
    scaler = torch.amp.GradScaler(device.type, enabled=machine.dtype == torch.float16)
    steps = chosen.epochs * math.ceil(len(rows) / chosen.batch_size)
    order = (group for _ in range(chosen.epochs) for group in batches(rows, chosen.batch_size, rng))
    model.train()
    for step, group in enumerate(tqdm(order, total=steps, desc=title, unit="step", disable=None, leave=False)):
        for param_group in optimizer.param_groups:
            param_group["lr"] = param_group["peak"] * schedule(step, steps, chosen.warmup)
        batch = collate([rows[i] for i in group], model.encoder.config.pad_id, device)
        with autocast(device, machine.dtype):
            loss = model.loss(*batch)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if ((step + 1) % 200 == 0 or step + 1 == steps) and not torch.isfinite(loss):      # seldom: it waits for the device
            stop(1, f"{title}: the loss is not finite at step {step + 1} of {steps}; try a lower --lr, or --dtype float32")


@torch.no_grad()
def outputs(model, rows, machine):
    """-> list of the model's float32 output for each row: (n_class,), () or (2, length of the row)."""
    model.eval()
    found = [None] * len(rows)
    for group in batches(rows, max(1, EVAL_TOKENS // max(len(ids) for ids, _ in rows))):
        tokens, pad, _ = collate([rows[i] for i in group], model.encoder.config.pad_id, machine.device)
        with autocast(machine.device, machine.dtype):
            out = model(tokens, pad).cpu().numpy()
        for i, one in zip(group, out):
            found[i] = one[:, :len(rows[i][0])] if model.kind == "span" else one
    return found


def predict(model, encoded, machine, null_threshold=0.0):
    """-> one prediction a row or question: class index, score, or text."""
    found = outputs(model, encoded.rows, machine)
    if model.kind == "span":
        threshold = null_threshold if model.name == "squad_v2" else math.inf        # v1: every question has an answer
        return ["" if null - best[0][0] > threshold else best[0][1] for best, null in candidates(found, encoded)]
    return [int(one.argmax()) if model.kind == "class" else float(one) for one in found]


def n_best(first, last, k=N_BEST, longest=MAX_ANSWER):
    """(n,), (n,) logits of a window's tokens -> up to k (score, i, j), best first, i <= j < i + longest."""
    beyond = np.full(longest, -np.inf, last.dtype)
    ends = np.lib.stride_tricks.sliding_window_view(np.concatenate((last, beyond)), longest)[:len(first)]
    scores = first[:, None] + ends                                                  # (n, longest): i, j - i
    best = np.argsort(-scores, axis=None, kind="stable")[:k]
    return [(float(scores.flat[b]), int(b) // longest, int(b) // longest + int(b) % longest) for b in best
            if np.isfinite(scores.flat[b])]


def candidates(found, encoded):
    """Outputs -> for each question [(score, text), ..], best first, and its null score: the lowest of its windows' (BERT)."""
    texts, null = [[(-math.inf, "")] for _ in encoded.labels], [math.inf] * len(encoded.labels)
    for out, w in zip(found, encoded.windows):
        null[w.question] = min(null[w.question], float(out[:, 0].sum()))            # both ends at [CLS]
        # Cut from the context by characters: decoding the ids could lose a part of one.
        texts[w.question] += [(score, w.context[w.spans[i, 0]:w.spans[j, 1]].strip())
                              for score, i, j in n_best(*out[:, w.offset:w.offset + len(w.spans)])]
    return [(sorted(each, key=lambda pair: -pair[0])[:N_BEST], lowest) for each, lowest in zip(texts, null)]


def bag_of_words(rows, evaluations):
    """TF-IDF with logistic regression on the same rows -> {name: predictions}."""
    try:
        from sklearn.feature_extraction.text import TfidfVectorizer
        from sklearn.linear_model import LogisticRegression
    except ImportError:
        raise ValueError("--ckpt bow needs scikit-learn: pip install -r requirements-dev.txt") from None
    vectors = TfidfVectorizer(sublinear_tf=True)
    x = vectors.fit_transform(" ".join(texts) for texts, _ in rows)
    model = LogisticRegression(C=10, max_iter=1000).fit(x, [label for _, label in rows])
    return {name: model.predict(vectors.transform(" ".join(texts) for texts, _ in found)).tolist()
            for name, found in evaluations.items()}


# ---------------------------------------------------------------------------------------------------------
# Results

def record(name, scored, folder, **facts):
    """{name in the table: (labels, predictions)} -> lines of results.jsonl, printed.

    `constant` is what the commonest answer, always given, scores.
    """
    rows, metrics = [], METRICS[name]
    for where, (labels, predictions) in scored.items():
        answer = "" if TASKS[name].kind == "span" else Counter(labels).most_common(1)[0][0]
        constant, found = metrics(labels, [answer] * len(labels)), metrics(labels, predictions)
        majority = constant.get("accuracy", constant.get("em", 0.0))
        rows.append({"task": where, **facts, "metrics": found, "constant": constant, "majority": majority,
                     "one_class": len(set(predictions)) == 1})
        print(f"{where} seed {facts['seed']}" + (f" lr {facts['lr']:g}: " if facts["lr"] else ": ")
              + ", ".join(f"{key} {value:.4f}" for key, value in found.items())
              + f" (majority {majority:.4f}), {facts['seconds']:.0f} s", flush=True)
        with open(folder / "results.jsonl", "a") as handle:
            handle.write(json.dumps(rows[-1]) + "\n")
    return rows


def aggregate(results, recipe):
    """Runs -> {(start, task, metric): (aggregate, values, runs)}, of the learning rate whose first metric is best (P1)."""
    middle, table = getattr(statistics, RECIPES[recipe]["aggregate"]), {}
    for source, where in dict.fromkeys((r["ckpt"], r["task"]) for r in results):
        mine = [r for r in results if (r["ckpt"], r["task"]) == (source, where)]
        by_lr = [[r for r in mine if r["lr"] == lr] for lr in dict.fromkeys(r["lr"] for r in mine)]
        first, *_ = mine[0]["metrics"]
        best = max(by_lr, key=lambda rows: middle([r["metrics"][first] for r in rows]))
        for metric in mine[0]["metrics"]:
            values = [r["metrics"][metric] for r in best]
            table[source, where, metric] = middle(values), values, best
    return table


def paper_averages(scores):
    """{(task, metric): score} -> {paper: its own average over GLUE, or the list of tasks that it lacks}."""
    lacks = {paper: [pair[0] for pair in each.items() if pair not in scores] for paper, each in AVERAGES.items()}
    return {paper: lacks[paper] or statistics.mean(scores[pair] for pair in each.items()) for paper, each in AVERAGES.items()}


def report(results, args):
    """The table: aggregate over seeds, spread, what a constant answer scores, from what each row started."""
    table, name = aggregate(results, args.recipe), RECIPES[args.recipe]["aggregate"]
    print(f"\n{'':10}{'metric':10}{name:>8}{'min':>8}{'max':>8}{'std':>7}{'majority':>10}{'lr':>7}{'seeds':>7}"
          f"{'s a run':>9}  start")
    for (source, where, metric), (middle, values, rows) in table.items():
        std = statistics.stdev(values) if len(values) > 1 else 0.0
        seconds, lr = statistics.mean(r["seconds"] for r in rows), f"{rows[0]['lr']:g}" if rows[0]["lr"] else "-"
        print(f"{where:10}{metric:10}{middle:8.3f}{min(values):8.3f}{max(values):8.3f}{std:7.3f}{rows[0]['constant'][metric]:10.3f}"
              f"{lr:>7}{len(values):7}{seconds:9.0f}  {source}")
    if (tried := len({row["lr"] for row in results})) > 1:
        print(f"lr: the best of {tried}, chosen on the rows that are scored here, as P1 does")
    if collapsed := [f"{r['task']} seed {r['seed']} lr {r['lr'] or 0:g}" for r in results if r["one_class"]]:
        print(f"collapsed: {len(collapsed)} of {len(results)} scores come from one answer always given: {', '.join(collapsed)}")
    # An average is over one start; with --eval_only every task has its own file, in one folder.
    begun = {r["ckpt"]: os.path.dirname(r["ckpt"]) if args.eval_only else r["ckpt"] for r in results}
    for source in dict.fromkeys(begun.values()) if args.task == "all" else ():
        scores = {(where, metric): found[0] for (start, where, metric), found in table.items() if begun[start] == source}
        for paper, mean in paper_averages(scores).items():
            print(f"{paper}'s average: " + (f"not without {', '.join(mean)}" if isinstance(mean, list) else f"{mean:.4f}")
                  + f"  {source}")


def write_predictions(name, model, args, machine, folder):
    """Files as gluebenchmark.com takes them; for SQuAD, whose test is not public, the JSON of the dev file."""
    task, span = TASKS[name], TASKS[name].kind == "span"
    for key, rows in read_split(name, args, "dev" if span else "test").items():
        predictions = predict(model, encode_rows(model, rows), machine, args.null_threshold)
        if span:
            file, text = folder / f"{key}.json", json.dumps({q.id: text for q, text in zip(rows, predictions)})
        else:
            shown = [task.classes[p] if task.classes else f"{min(max(p, 0.0), 5.0):.3f}" for p in predictions]
            file, lines = folder / f"{key}.tsv", [f"{index}\t{answer}\n" for (_, index), answer in zip(rows, shown)]
            text = "index\tprediction\n" + "".join(lines)
        file.write_text(text, encoding="utf-8", newline="\n")
        print(f"predictions: {len(rows):,} rows in {file}")


def predict_text(args, machine):
    """--predict_text: print classes with probabilities, the score, or the likeliest answers. Raises ValueError, OSError."""
    args.eval_only, name, texts = True, args.task, [text.strip() for text in args.predict_text.split("|||")]
    task = TASKS[name]
    if len(texts) != len(task.texts):
        raise ValueError(f"{name} takes {len(task.texts)} text(s), 'one ||| other'; {len(texts)} given")
    start = read_start(find_sources(name, args)[0], args.cache, name)
    model = make_model(start, name, start["length"], 0, start["probe"]).to(machine.device)
    if name == "docs":
        texts = [LIBRARY_NAMES.sub("[MASK]", texts[0])]             # as the task's rows are
    encoded = encode_rows(model, [Question("", *texts, []) if task.kind == "span" else (texts, 0)])
    found = outputs(model, encoded.rows, machine)
    print(f"{start['source']}:")
    if task.kind == "score":
        return print(f"{float(found[0]):.3f}")
    pairs, null = (list(zip(found[0].tolist(), task.classes)), 0) if task.kind == "class" else candidates(found, encoded)[0]
    pairs += [(null, "(no answer)")] * (name == "squad_v2")
    pairs = [(score, text) for score, text in pairs if score > -math.inf]
    p = torch.tensor([score for score, _ in pairs]).softmax(0).tolist()
    for share, text in sorted(zip(p, [text for _, text in pairs]), reverse=True)[:5]:
        print(f"{share:.4f}  {text}")


# ---------------------------------------------------------------------------------------------------------
# The program

def parse_args(argv=None):
    """-> flags; what the recipe decides is None unless given. Exits with 2 on a mistake."""
    parser = Parser("finetune.py", __doc__)
    group = parser.add_argument_group("what is trained")
    group.add_argument("--task", choices=[*TASKS, "all"], required=True, help="all: GLUE, and each paper's own average")
    group.add_argument("--ckpt", help="run folder or checkpoint, fine-tuned or not, or a glob of them (default: the newest under "
                       "out/); scratch: untrained; bow: bag of words")
    group.add_argument("--data_dir", help="folder with GLUE's official folders, or SQuAD's JSON (default: from the hub)")
    group.add_argument("--skip_bad_rows", action="store_true", help="leave malformed rows out, and count them")
    group.add_argument("--limit_train", type=int, help="training rows (default: all; docs 500)")
    group.add_argument("--freeze_encoder", action="store_true", help="train one linear layer on the frozen encoder: a probe")
    group = parser.add_argument_group("recipe")
    group.add_argument("--recipe", choices=RECIPES, default="electra", help="electra is P0's, tupe P1's, taco P2's, bert P3's "
                       "(default: %(default)s)")
    seeds = ", ".join(f"{name} {recipe['seeds']}" for name, recipe in RECIPES.items())
    group.add_argument("--seeds", type=int, default=1, help=f"runs, with seeds 0, 1, .. (default: 1; the papers: {seeds})")
    group.add_argument("--lr", type=float, nargs="+", help="of the head; the best of several counts")
    group.add_argument("--epochs", type=int, help="docs: 10 in every recipe")
    group.add_argument("--batch_size", type=int)
    group.add_argument("--length", type=int, help="ids a row at most (default: the recipe's, or the model's max_len if smaller); "
                       "beyond max_len position tables get fresh rows")
    group = parser.add_argument_group("using a fine-tuned model")
    group.add_argument("--eval_only", action="store_true", help="score finetuned-<task>.pt of --ckpt or --out_dir, train nothing")
    group.add_argument("--predict", action="store_true", help="write the files that GLUE takes, or SQuAD's JSON, to --out_dir")
    group.add_argument("--predict_text", metavar="TEXT", help="'one ||| other': print classes and probabilities")
    group.add_argument("--null_threshold", type=float, default=0.0, help="squad_v2: no answer where the null score is higher by "
                       "more (default: %(default)s, not tuned on dev)")
    group = parser.add_argument_group("running")
    group.add_argument("--out_dir", help="where results.jsonl, the model and predictions go (default: the run's folder)")
    group.add_argument("--cache", default="cache", help="folder of prepared data (default: %(default)s)")
    group.add_argument("--device", choices=["cpu", "cuda", "mps"], help="default: cuda, else mps, else cpu")
    group.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], help="default: what the device does best")
    group.add_argument("--compile", action=argparse.BooleanOptionalAction, default=False,
                       help="torch.compile with dynamic shapes: pays in long runs only (default: off)")
    args = parser.parse_args(argv)
    with one_line_errors():
        for name in ("seeds", "epochs", "batch_size", "length", "limit_train", "lr"):
            given = getattr(args, name)
            if given is not None and not all(0 < value < math.inf for value in np.atleast_1d(given)):
                raise ValueError(f"--{name} is {given}; it must be positive")
        if args.ckpt == "bow" and (args.task == "all" or TASKS[args.task].kind != "class" or args.eval_only or args.predict):
            raise ValueError("--ckpt bow is for one task with classes, and keeps no model to predict with")
        if args.predict and args.task == "docs":
            raise ValueError("docs has no test rows to predict")
        if args.ckpt == "scratch" and (args.eval_only or args.predict_text):
            raise ValueError("--ckpt scratch is untrained: --eval_only and --predict_text take a fine-tuned model")
        if args.predict_text and args.task in ("all", "ax"):
            raise ValueError("--predict_text takes one task (for ax: mnli)")
    return args


def prepare_run(name, source, train, evaluations, args):
    """-> checkpoint dictionary, settings, rows of ids, {name: Encoded}; says what will happen. Raises ValueError, OSError."""
    start = read_start(source, args.cache, name if args.eval_only else None)
    chosen, max_len = settings(args, name, start["config"]), start["config"]["max_len"]
    if args.eval_only:
        row = start["row"]                                  # of results.jsonl, when it was trained
        chosen = SimpleNamespace(**{**row, "lr": [row["lr"]], "seeds": [row["seed"]]})
    if name == "docs" and (other := start.get("data", {}).get("source", {}).get("hash")):
        if other != (here := prepare("docs", "bpe", args.cache).meta["source"]["hash"]):
            print(f"note: the run learned from the documentation of other package versions (docs {other}, here {here}): rows to "
                  "test may have been among its training text")
    if chosen.length < (16 if TASKS[name].kind == "span" else 8):
        raise ValueError(f"--length is {chosen.length}; a pair with its specials needs at least 8, SQuAD 16")
    model = make_model(start, name, chosen.length, 0, chosen.probe)         # a mistake shows here
    scored = {where: encode_rows(model, found) for where, found in evaluations.items()}
    print(f"{name}: from {start['source']}; length {chosen.length}"
          + (f" (position tables extended from {max_len})" if chosen.length > max_len else "")
          + "".join(f"; {len(e.labels):,} rows of {where} to score" for where, e in scored.items()))
    if not args.eval_only:
        print(f"{len(train):,} rows to train on; recipe {chosen.recipe}: {chosen.epochs} epochs, batch {chosen.batch_size}, lr "
              + " ".join(f"{lr:g}" for lr in chosen.lr), flush=True)
    return start, chosen, encode_rows(model, train).rows, scored


def run_task(name, args, machine, folder):
    """Fine-tune from every source with every learning rate and seed -> rows. Keeps the model whose first metric is best."""
    model_of = "mnli" if name == "ax" else name             # AX has no training rows: the MNLI model predicts it
    with one_line_errors():
        sources, (train, evaluations) = find_sources(model_of, args), read_task(name, args)
    results, best, file = [], (-math.inf, None), folder / f"finetuned-{name}.pt"
    for source in sources:
        with one_line_errors():
            start, chosen, rows, encoded = prepare_run(model_of, source, train, evaluations, args)
        for lr, seed in ((lr, seed) for lr in chosen.lr for seed in chosen.seeds):
            began = time.time()
            model = make_model(start, model_of, chosen.length, seed, chosen.probe).to(machine.device)
            if not args.eval_only:
                train_one(model, rows, chosen, lr, seed, machine)
            scored = {where: (e.labels, predict(model, e, machine, args.null_threshold)) for where, e in encoded.items()}
            results += record(name, scored, folder, seed=seed, lr=lr, ckpt=start["source"], seconds=time.time() - began,
                              recipe=chosen.recipe, epochs=chosen.epochs, batch_size=chosen.batch_size, length=chosen.length,
                              n_train=len(train), step=start.get("step", 0), probe=chosen.probe, eval_only=args.eval_only)
            first = next(iter(results[-len(scored)]["metrics"].values())) if scored else 0.0
            if first > best[0]:
                best = first, model
                if not args.eval_only:
                    save_model(file, model, start, results[-len(scored)])
    if not args.eval_only:
        print(f"{name}: the best run's model is {file}")
    if args.predict or name == "ax":
        with one_line_errors():
            write_predictions(name, best[1], args, machine, folder)
    return results


def run_tasks(args, machine, folder):
    """One task, or all of GLUE as far as it is there -> rows."""
    results = []
    for name in GLUE if args.task == "all" else [args.task]:
        if name == "ax" and args.task == "all" and not (args.predict and (folder / "finetuned-mnli.pt").exists()):
            continue
        if args.task == "all" and args.data_dir and not (Path(args.data_dir) / TASKS[name].folder).exists():
            print(f"{name}: {Path(args.data_dir) / TASKS[name].folder} is not there, left out")
        elif args.ckpt == "bow":
            began = time.time()
            with one_line_errors():
                train, evaluations = read_task(name, args)
                found = bag_of_words(train, evaluations)
            scored = {where: ([label for _, label in rows], found[where]) for where, rows in evaluations.items()}
            results += record(name, scored, folder, seed=0, lr=None, ckpt="bow", seconds=time.time() - began, n_train=len(train))
        else:
            changed = {**vars(args), "eval_only": args.eval_only or name == "ax"}
            results += run_task(name, SimpleNamespace(**changed), machine, folder)
    return results


def main(argv=None):
    args = parse_args(argv)
    keep_memory()
    with one_line_errors():
        device = pick_device(args.device)
        machine = Machine(device, pick_dtype(device, args.dtype)[0], args.compile and can_compile(device))
        if args.compile and not machine.compile:
            print("not compiled: no compiler here")
        if args.predict_text:
            return predict_text(args, machine)
        if not (args.ckpt or args.eval_only or args.task == "ax"):
            args.ckpt = newest_run()        # once: another run may save while this one goes through its tasks
        folder = Path(home(args))
        folder.mkdir(parents=True, exist_ok=True)
    with one_line_failures("lower --batch_size or --length"):
        if results := run_tasks(args, machine, folder):
            report(results, args)
            print(f"results: {folder / 'results.jsonl'}")


if __name__ == "__main__":
    sys.exit(main())
