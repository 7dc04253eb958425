"""Text -> tokenizer -> token ids on disk -> batches.

    python data.py                                                # the built-in docs, no download
    python data.py --dataset 'books/*.jsonl.xz' --tokenizer bpe   # local files
    python data.py --dataset wikibooks --tokenizer gpt2           # Wikipedia, books (Hugging Face)

Files are jsonl, json, csv, parquet or, with any other ending, text (*.txt, *.py), in which empty
lines separate the documents; all in UTF-8. gz, xz and bz2 are decompressed. train.py calls the same
code if the data is not prepared yet. There are three stages:

    documents   an iterator of texts (lib/sources.py), never all in memory
    tokenizer   GPT-2's byte-level BPE, or one with 8,184 ids trained on the corpus itself
                -> tokenizer.json
    tokens      every document followed by [SEP], in one stream per split
                -> train.bin, val.bin and, last, meta.json

A sequence is [CLS] x_1 ... x_(L-2) [SEP], where x is a block of the stream: it may begin and end
within a sentence and contain several documents with [SEP] between them (deviation: RoBERTa's
FULL-SENTENCES keeps sentences whole). Every 50th document is for validation (docs: every 10th).
"""

import hashlib
import itertools
import math
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tiktoken
import torch
from tqdm import tqdm  # comes with datasets

from lib.bpe import bpe_state, encoding_arguments, gpt2_state, tokenizer_hash
from lib.config import Parser, UserError, one_line_errors
from lib.files import DAMAGE, atomic_write, lock, make_folder, opening, read_json, write_json
from lib.sources import docs_versions, find_source

ENCODE_CHUNK = 100_000  # characters tokenized at once: bounds memory if a document is one line
BOOKS_DATASET = "SamuelYang/bookcorpus"
VAL_SEQUENCES, VAL_BATCH = 512, 32  # every run is validated on the same sequences


# --------------------------------------------------------------------------------------------------
# Token ids on disk


@dataclass
class Corpus:
    """A prepared corpus: two streams of token ids as memory maps, the tokenizer, and meta.json."""

    folder: Path
    meta: dict
    tokenizer: dict  # see tokenizer_state in lib/bpe.py
    train: np.ndarray  # (number of tokens,) uint16, or uint32 if the vocabulary needs it
    val: np.ndarray  # (number of tokens,)

    @property
    def vocab_size(self):
        return len(self.tokenizer["ranks"]) + len(self.tokenizer["specials"])

    def n_sequences(self, split, L):
        return len(getattr(self, split)) // (L - 2)

    def sequences(self, split, index, L):
        """The sequences [CLS] x_1 ... x_(L-2) [SEP] with indices `index` (b,) -> (b, L) int64."""
        stream, n = getattr(self, split), L - 2
        blocks = stream[: len(stream) // n * n].reshape(-1, n)
        sequences = np.empty((len(index), L), np.int64)
        sequences[:, 1:-1] = blocks[index]
        sequences[:, 0] = self.tokenizer["specials"]["[CLS]"]
        sequences[:, -1] = self.tokenizer["specials"]["[SEP]"]
        return sequences


def prepare(dataset, tokenizer, cache, text_column="text", books_dataset=BOOKS_DATASET) -> Corpus:
    """Documents -> tokenizer -> tokens on disk -> Corpus. Existing results are reused.

    Raises UserError, RunFailure.
    """
    folder = find_prepared(dataset, tokenizer, cache)
    if not folder:
        source = find_source(dataset, text_column, books_dataset)
        folder = Path(cache) / f"{source.name}-{tokenizer}"
        if not os.path.exists(folder / "meta.json"):
            parts = source.parts()
            make_folder(folder)
            with lock(folder, "preparing data", wait=True):
                if not os.path.exists(folder / "meta.json"):  # another process may have made it
                    state = gpt2_state() if tokenizer == "gpt2" else bpe_state(parts)
                    write_json(folder / "tokenizer.json", state)
                    write_tokens(source, parts, state, folder, dataset)
    return open_corpus(folder)


def find_prepared(dataset, tokenizer, cache):
    """-> the folder if `dataset` is a prepared folder, or docs prepared from the installed library
    versions (reading them again takes 25 s); else None. Raises UserError."""
    if os.path.exists(file := os.path.join(dataset, "meta.json")):
        with opening(file, *DAMAGE):
            used = read_json(file)["tokenizer"]
        if used != tokenizer:
            raise UserError(f"{dataset} was prepared with --tokenizer {used}: give that flag")
        return Path(dataset)
    if dataset == "docs":
        for file in Path(cache).glob(f"docs-*-{tokenizer}/meta.json"):
            with opening(file, *DAMAGE):
                if read_json(file)["source"]["versions"] == docs_versions():
                    return file.parent


def write_tokens(source, parts, state, folder, dataset):
    """Write train.bin and val.bin, then meta.json, which says that the folder is complete. Raises
    UserError if there is not enough text."""
    encoding, sep = tiktoken.Encoding(**encoding_arguments(state)), state["specials"]["[SEP]"]
    vocab_size = len(state["ranks"]) + len(state["specials"])
    meta = {
        "dataset": dataset,
        "source": source.about,
        "tokenizer": state["name"],
        "documents": 0,
        "rows_without_text": 0,
        "characters": 0,
        "vocab_size": vocab_size,
        "dtype": "uint16" if vocab_size <= 65536 else "uint32",
        "tokenizer_hash": state["hash"],
        "tokens": {"train": 0, "val": 0},
    }
    if source.docs:
        write_json(folder / "docs.json", {"every": source.val_every, "rows": source.docs})
    size = sum(part.size for part in parts) or None

    def texts():
        for part in parts:
            for text in part.documents():
                meta["rows_without_text"] += text is None
                if text:
                    yield text

    with (
        atomic_write(folder / "train.bin") as train,
        atomic_write(folder / "val.bin") as val,
        tqdm(total=size, unit="B", unit_scale=True, desc="tokens", disable=None) as bar,
    ):
        for text, ids in encode(texts(), encoding):
            split = "val" if meta["documents"] % source.val_every == 1 else "train"
            tokens = np.array([*ids, sep], meta["dtype"])
            tokens.tofile(val if split == "val" else train)
            meta["tokens"][split] += len(tokens)
            meta["documents"] += 1
            meta["characters"] += len(text)
            bar.update(len(text))
        if 0 in meta["tokens"].values():
            raise UserError(
                f"{dataset}: {meta['documents']} documents with text in them; at least 2 are "
                "needed, one for training and one for validation"
            )
    write_json(folder / "meta.json", meta | {"digest": text_digest(folder)})
    print(
        f"tokens: {meta['documents']:,} documents, {meta['rows_without_text']:,} rows without text "
        f"skipped; {meta['tokens']['train']:,} tokens for training, "
        f"{meta['tokens']['val']:,} for validation"
    )


def encode(texts, encoding):
    """Yield (text, its ids) in order. tiktoken uses all cores for a batch of texts."""
    while batch := list(itertools.islice(texts, 64)):
        parts = [list(chunks(text)) for text in batch]
        ids = iter(encoding.encode_ordinary_batch(list(itertools.chain(*parts))))
        for text, part in zip(batch, parts):
            yield text, itertools.chain(*itertools.islice(ids, len(part)))


def chunks(text):
    """Cut a long text in front of white space, so that no call of the tokenizer is large."""
    start = 0
    while len(text) - start > ENCODE_CHUNK:
        window = text[start + 1 : start + ENCODE_CHUNK]
        # Cut at the last white space. Without any, rfind gives -1: take the whole chunk.
        cut = max(window.rfind(" "), window.rfind("\n")) + 1 or ENCODE_CHUNK
        yield text[start : start + cut]
        start += cut
    yield text[start:]


def text_digest(folder):
    """-> 32 hex digits for all token ids of a prepared folder: train.py ties a run to them."""
    digest = hashlib.blake2b(digest_size=16)
    for split in ("train", "val"):
        digest.update(np.memmap(folder / f"{split}.bin", np.uint8, "r"))
    return digest.hexdigest()


def open_corpus(folder) -> Corpus:
    """A prepared folder -> Corpus. Raises UserError if its files are not those of its meta.json."""
    with opening(folder, *DAMAGE):
        state, meta = read_json(folder / "tokenizer.json"), read_json(folder / "meta.json")
        train, val = (np.memmap(folder / f"{s}.bin", meta["dtype"], "r") for s in ("train", "val"))
        found = {
            "tokens": {"train": len(train), "val": len(val)},
            "digest": text_digest(folder),  # up to a few seconds per GB
            "tokenizer_hash": tokenizer_hash(state),
        }
        if wrong := [key for key, value in found.items() if meta[key] != value]:
            raise ValueError(f"other {', '.join(wrong)} than in meta.json: prepare the text again")
    return Corpus(folder, meta, state, train, val)


# --------------------------------------------------------------------------------------------------
# Batches


class Batches:
    """Training sequences in an order that is a function of (seed, index), so that a run resumes
    without saved state. Each epoch has a new permutation.

    fraction: use only this fraction of the sequences, the same ones for every seed.
    """

    def __init__(self, corpus: Corpus, L, seed, fraction=1.0):
        self.corpus, self.L, self.seed, self.epoch = corpus, L, seed, None
        self.kept = np.arange(corpus.n_sequences("train", L), dtype=np.uint32)
        if fraction < 1:
            order = np.random.default_rng(0).permutation(self.kept)
            self.kept = np.sort(order[: round(fraction * len(order))])
        self.n = len(self.kept)
        if self.n < 1 or corpus.n_sequences("val", L) < 1:
            raise UserError(
                f"{corpus.folder} has {len(corpus.train):,} tokens for training and "
                f"{len(corpus.val):,} for validation (its second document and some later ones); "
                f"a sequence of {L} needs {L - 2} of each: add documents, or use a smaller "
                "--block_size or a larger --data_fraction"
            )

    def __call__(self, index, size):
        """Sequences index * size to (index + 1) * size - 1 of the concatenated epochs
        -> (size, L) int64."""
        numbers = []
        for i in range(index * size, (index + 1) * size):
            if i // self.n != self.epoch:
                self.epoch = i // self.n
                rng = np.random.default_rng((self.seed, self.epoch))
                self.order = rng.permutation(self.kept)
            numbers.append(self.order[i % self.n])
        return self.corpus.sequences("train", np.array(numbers), self.L)


def validation_sequences(corpus, n, L):
    """At most n sequences, evenly spaced over the validation stream -> (n, L) int64."""
    n_there = corpus.n_sequences("val", L)
    chosen = np.linspace(0, n_there - 1, min(n_there, n)).astype(int)
    return torch.from_numpy(corpus.sequences("val", chosen, L))


def validation_batches(corpus, L):
    """The sequences on which every run is validated -> tuple of (b, L), all b nearly equal and at
    most VAL_BATCH: a small last batch would have too few sequences for contrastive losses."""
    sequences = validation_sequences(corpus, VAL_SEQUENCES, L)
    return sequences.tensor_split(math.ceil(len(sequences) / VAL_BATCH))


def add_data_flags(parser):
    """Add the flags that say which text is used -> the add_argument of their group."""
    flag, path = parser.add_argument_group("data").add_argument, os.path.expanduser
    what = "docs, wikibooks, 'books/*.jsonl.xz', a prepared folder, or a hub set name[:config]"
    flag("--dataset", type=path, default="docs", help=what)
    flag("--tokenizer", choices=("bpe", "gpt2"), default="bpe", help="bpe: trained on the corpus")
    flag("--text_column", default="text", help="the column that holds the text")
    flag("--books_dataset", default=BOOKS_DATASET, help="hub mirror of BookCorpus for wikibooks")
    flag("--cache", type=path, default="cache", help="folder for prepared data")
    return flag


def main(argv=None):
    parser = Parser("data.py", __doc__)
    add_data_flags(parser)
    with one_line_errors():
        corpus = prepare(**vars(parser.parse_args(argv)))
        print(f"ready: {corpus.folder}")


if __name__ == "__main__":
    main()
