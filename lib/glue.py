"""GLUE: its tasks, the official files, the same rows from the hub, and its metrics."""

import math
import os
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas  # comes with datasets

from lib.config import UserError
from lib.files import opening, unique
from lib.sources import check_hub

# --------------------------------------------------------------------------------------------------
# Metrics: (labels, predictions) -> float. What is undefined for finite predictions counts as 0.


def accuracy(labels, predictions):
    return np.mean(np.equal(labels, predictions))


def f1_score(labels, predictions):
    """F1 of class 1; 0 if neither the labels nor the predictions contain it."""
    ones = np.array([labels, predictions]) == 1  # (2, n)
    return 2 * ones.all(0).sum() / max(1, ones.sum())


def pearson(labels, predictions):
    """Pearson's correlation (of two rows always 1, -1 or 0); 0 if one side is constant, up to
    rounding in float32, and NaN if it is not finite. For two binary vectors it is Matthews'
    correlation."""
    x = np.array([labels, predictions], float)  # (2, n)
    if not np.isfinite(x).all():
        return math.nan
    if (np.ptp(x, 1) <= 1e-6 * abs(x).max(1)).any():
        return 0.0
    return np.corrcoef(x)[0, 1]


def spearman(labels, predictions):
    return pearson(pandas.Series(labels).rank(), pandas.Series(predictions).rank())


# --------------------------------------------------------------------------------------------------
# Rows: (texts, label); in test files the row's index takes the place of the label


def read_tsv(task, file, is_test=False):
    """An official file -> [(texts, label)].

    The files are tab-separated, without quoting, with or without a BOM. A line ends with a newline
    only: a text may contain a carriage return. A row that does not have as many columns as the
    header is skipped, because its texts may be shifted (QQP's train.tsv has a few). Raises
    UserError with file and line.
    """
    rows, n_skipped = [], 0
    header = None if is_test else task.header
    class_of = {text: i for i, text in enumerate(task.classes)}
    with opening(file), open(file, "rb") as lines:
        for number, line in enumerate(lines, 1):
            try:
                text = line.decode("utf-8-sig")
                cells = text.removesuffix("\n").removesuffix("\r").split("\t")
                if header is None:
                    header = cells
                    continue
                if len(cells) != len(header):
                    n_skipped += bool(text.strip())
                    continue
                row = unique(zip(header, cells))
                if is_test:
                    value = int(cells[0])
                elif task.kind == "class":
                    value = class_of[row[task.label]]
                elif not math.isfinite(value := float(row[task.label])):
                    raise ValueError(f"{row[task.label]!r} is not a finite number")
                rows.append((tuple(row[name] for name in task.texts), value))
            except (KeyError, ValueError) as error:  # also UnicodeDecodeError
                where = f"{file}, line {number}"
                raise UserError(f"{where} is not in {task.folder}'s format ({error})") from None
    if n_skipped:
        print(f"{file}: skipped {n_skipped} rows with missing or additional columns")
    return rows


def read_hub(task, name, split):
    """A split of the hub's data set, in the form that read_tsv gives."""
    split = split.replace("diagnostic", "test")  # of AX
    label = "idx" if "test" in split else "label"
    columns = task.hub or task.texts
    rows = load_from_hub(task.repo, name, split)
    return [(tuple(row[column] for column in columns), row[label]) for row in rows]


def load_from_hub(repo, config, split):
    """-> the rows of a hub data set, as dictionaries. Raises UserError if they cannot be
    fetched."""
    import datasets

    check_hub()
    try:
        return datasets.load_dataset(repo, config, split=split)
    except Exception as error:
        raise UserError(
            f"cannot fetch {repo} ({config}) from the hub ({type(error).__name__}): give a folder "
            "with the official files (--data_dir), or use --task docs, which needs no network"
        ) from None


# --------------------------------------------------------------------------------------------------
# Tasks


class Task(NamedTuple):
    """Where a task's rows are, in the official files and on the hub, and how it is scored."""

    folder: str  # below --data_dir
    texts: tuple  # the columns of the texts in the official files
    classes: tuple = ("0", "1")  # as the official files write them, in the hub's order
    metrics: dict = {"accuracy": accuracy}  # the first one selects the best learning rate
    kind: str = "class"  # or score (regression), span (question answering)
    label: str = "label"
    hub: tuple = ()  # the columns of the texts on the hub, if they have other names there
    repo: str = "nyu-mll/glue"
    header: tuple | None = None  # of train.tsv and dev.tsv, if they have none
    # Suffix of the name in the results, or name of the file to submit -> split on the hub.
    dev: dict = {"": "validation"}
    test: dict = {"": "test"}  # "": the file to submit is named after the folder
    extension: str = ".tsv"
    read: Callable = read_tsv  # (task, file, is_test) -> rows
    read_hub: Callable = read_hub  # (task, name, split) -> rows

    def file(self, split):
        """The official file of one of the hub's splits, named dev for validation."""
        return split.replace("validation", "dev") + self.extension

    def score(self, labels, predictions):
        return {name: float(metric(labels, predictions)) for name, metric in self.metrics.items()}


PAIR = ("sentence1", "sentence2")
NLI, RTE = ("entailment", "neutral", "contradiction"), ("entailment", "not_entailment")
F1 = {"accuracy": accuracy, "f1": f1_score}
GLUE = {
    # GLUE scores CoLA by Matthews' correlation and RPP by accuracy, so both are computed.
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
# The diagnostic set has no training rows and no labels: the MNLI model predicts it.
AX = GLUE["mnli"]._replace(folder="diagnostic", dev={}, test={"AX": "diagnostic"})


# What each paper averages over GLUE. TUPE and TACO include both MNLI sets, Wang 2021 only the
# mismatched one; none of them includes WNLI.
# fmt: off
WANG = {"cola": "matthews", "sst2": "accuracy", "qnli": "accuracy", "rte": "accuracy",
        "mnli-mm": "accuracy", "qqp": "f1", "mrpc": "f1", "stsb": "spearman"}
AVERAGES = {
    "TUPE": {**WANG, "mnli": "accuracy", "qqp": "accuracy", "mrpc": "accuracy", "stsb": "pearson"},
    "TACO": {**WANG, "mnli": "accuracy"},
    "Wang 2021": WANG,
}
# fmt: on


def paper_averages(scores):
    """{(task, metric): score} -> {paper: its average over GLUE, or the list of missing tasks}."""
    averages = {}
    for paper, metrics in AVERAGES.items():
        missing = [task for task, metric in metrics.items() if (task, metric) not in scores]
        averages[paper] = missing or statistics.mean(scores[pair] for pair in metrics.items())
    return averages


def read_split(task, name, data_dir, split):
    """'train', 'dev' or 'test' -> {name in the results, or of the file to submit: rows}, from the
    official files in data_dir, or if that is None from the hub.

    A missing file is reported in one line. Raises UserError if it is the training file or the first
    one to score, or if a file has no rows.
    """
    rows, is_test = {}, split == "test"
    for key, part in {"train": {"": "train"}, "dev": task.dev, "test": task.test}[split].items():
        key = (key or task.folder) if is_test else name + key
        file = Path(data_dir or "", task.folder, task.file(part))
        if data_dir is None:
            rows[key] = task.read_hub(task, name, part)
        elif os.path.exists(file):
            rows[key] = task.read(task, file, is_test)
        elif is_test or rows:
            print(f"{key}: {file} does not exist, left out")
            continue
        else:
            raise UserError(f"{file} does not exist")
        if not rows[key]:
            raise UserError(f"{file if data_dir else task.repo} has no rows for {key}")
    return rows
