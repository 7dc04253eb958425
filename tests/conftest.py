"""Shared helpers and fixtures. test_all.py imports the fixtures, tests in this folder need not."""

import json
import os
import random
import re
import shlex
from pathlib import Path

import pytest
import torch

import data
import train

torch.set_num_threads(1)  # the models are tiny
os.environ["OMP_NUM_THREADS"] = "1"  # for the processes that tests start

ROOT = Path(__file__).resolve().parent.parent
WORDS = "the quick brown fox jumps over a lazy dog while seven wise owls watch from their old tree"
WORDS = WORDS.split()
TINY = shlex.split(
    "--n_layer 1 --n_head 2 --d_model 16 --d_ff 32 --block_size 16 --batch_size 4 --warmup 2 "
    "--log_every 3 --tokenizer bpe --device cpu"
)


def documented(pe):
    """Whether the reference or the field guide lists a scheme. A student's own need not be."""
    pages = "docs/reference.md", "docs/encodings.md"
    rows = "\n".join(re.findall(r"^\|.*", "\n".join((ROOT / x).read_text() for x in pages), re.M))
    return f"`{pe}`" in rows


def write_corpus(path, n_docs=60):
    """Write documents of random words as JSON lines (title, text) -> the path as a string."""
    rng = random.Random(0)
    with open(path, "w") as handle:
        for i in range(n_docs):
            text = " ".join(rng.choices(WORDS, k=60)) + f" {i}."
            handle.write(json.dumps({"title": f"t{i}", "text": text}) + "\n")
    return str(path)


@pytest.fixture(scope="session")
def corpus_file(tmp_path_factory):
    """A small text data set, as an argument of --dataset."""
    return write_corpus(tmp_path_factory.mktemp("text") / "corpus.jsonl")


@pytest.fixture(scope="session")
def cache(tmp_path_factory):
    """The folder of prepared text, as an argument of --cache."""
    return str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="session")
def corpus(corpus_file, cache):
    """The prepared Corpus of corpus_file."""
    return data.prepare(corpus_file, "bpe", cache)


def train_flags(corpus_file, cache, out, *flags):
    """The flags of a tiny run, with more appended."""
    folders = "--dataset", corpus_file, "--cache", cache, "--out_dir", str(out)
    return [*folders, *TINY, *map(str, flags)]


def run_train(corpus_file, cache, out, *flags):
    """Train a tiny model in this process; the run folder is `out`."""
    train.main(train_flags(corpus_file, cache, out, *flags))


@pytest.fixture
def run(corpus_file, cache, tmp_path):
    """run("a", "--steps 3") trains in tmp_path / "a" and returns that folder."""

    def run(name, flags=""):
        run_train(corpus_file, cache, tmp_path / name, *shlex.split(flags))
        return tmp_path / name

    return run


def log_of(folder):
    """-> the lines of a run's log.jsonl; the first one is the configuration."""
    return [json.loads(line) for line in (Path(folder) / "log.jsonl").read_text().splitlines()]


def weights(folder, name="ckpt.pt"):
    """-> a run's checkpoint, loaded without this project's code."""
    return torch.load(Path(folder) / name, weights_only=True)


def exit_code(function, *args):
    """function(*args) -> the code with which it exits, or None if it returns."""
    try:
        function(*args)
    except SystemExit as exit:
        return exit.code


def one_line(capsys, function, *args, code=2):
    """function(*args) must exit with this code -> the single line that it prints on stderr."""
    assert exit_code(function, *args) == code
    error = capsys.readouterr().err
    assert error.count("\n") == 1, error
    return error


def refuses(message, function, *args, **settings):
    """function must raise a UserError or OSError, which main prints as one line, or a
    configuration's ValueError, which the parser reports."""
    with pytest.raises((ValueError, OSError), match=message):
        function(*args, **settings)
