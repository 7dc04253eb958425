"""Text -> token ids on disk -> batches.

    python data.py                                                # the built-in docs, no download
    python data.py --dataset 'books/*.jsonl.xz' --tokenizer bpe   # files of yours
    python data.py --dataset wikibooks --tokenizer gpt2           # Wikipedia, books: from the hub

Files are txt, jsonl, csv or parquet, plain or as gz, xz, bz2; a folder that is prepared already
does, too. train.py calls the same code when the data is not there yet. Three stages, each skipped
when its result exists:

    documents   an iterator of texts, never all in memory
    tokenizer   GPT-2's byte-level BPE, or one of 8,184 ids trained on the corpus itself
                -> tokenizer.json
    tokens      every document followed by [SEP], one stream a split
                -> train.bin, val.bin, meta.json

A row is [CLS] x_1 .. x_(L-2) [SEP], where x is a block of the stream: it begins and ends in
mid-sentence and runs across documents, whose ends the inner [SEP]s tell (RoBERTa's FULL-SENTENCES
keeps sentences whole: departure). Every n-th document goes to validation, whole.
"""

import ast
import bz2
import collections
import contextlib
import csv
import functools
import glob
import gzip
import hashlib
import heapq
import importlib.metadata
import importlib.util
import inspect
import itertools
import json
import lzma
import math
import operator
import os
import platform
import re
import shlex
import statistics
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing.pool import ThreadPool
from pathlib import Path

import numpy as np
import regex  # comes with tiktoken: the same syntax as its patterns
import tiktoken
import torch
from tqdm import tqdm  # comes with datasets

import common
from common import Parser, check_settings, one_line_errors, read_json, setting, write_json

GPT2_PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
BPE_IDS = 8184  # + 8 specials = 8192
BPE_SAMPLE = 50_000_000  # characters of text that the BPE is trained on
BPE_WORD = 1000  # longer words do not count: each merge would walk through them
SPECIALS = ("[CLS]", "[PAD]", "[SEP]", "[MASK]", "[spare0]", "[spare1]", "[spare2]", "[spare3]")
PIECE = 100_000  # characters tokenized at once: bounds memory for endless lines
DOCS_LIBRARIES = ("python", "torch", "numpy", "pandas", "datasets")
AHEAD = 2_000_000  # characters read ahead of the tokenizer: bounds memory
EDGE = 65_536  # bytes of either end of a file that tell it from others
BOOKS_ROWS = 1000  # BookCorpus mirrors hold a sentence a row: so many make a document
PATIENCE = 15  # seconds in which the hub must answer
EVAL_ROWS, EVAL_BATCH = 512, 32  # fixed rows on which every run is validated


@dataclass
class DataConfig:
    """Where text comes from; all fields are flags."""

    dataset: str = setting(
        "docs",
        "docs, wikibooks, a glob of files ('books/*.jsonl.xz'), a prepared folder, or a hub "
        "name[:config]",
    )
    tokenizer: str = setting(
        "bpe", "bpe: trained on the corpus; gpt2: through tiktoken", ("bpe", "gpt2")
    )
    text_column: str = setting("text", "the column that holds the text")
    books_dataset: str = setting("SamuelYang/bookcorpus", "hub mirror of BookCorpus for wikibooks")
    cache: str = setting("cache", "folder for prepared data")

    __post_init__ = check_settings


@dataclass
class Source:
    """Where documents come from."""

    name: str  # a folder's name in the cache, unique to the content
    about: dict  # what stands in meta.json
    parts: callable  # -> [(function -> iterator of texts, their size or 0)]; called
    #                                 only when there is work to do: the hub needs the network
    val_every: int = 50  # every n-th document is for validation
    docs: list | None = None  # [(library, text)]: finetune.py --task docs reads docs.json


def find_source(dataset, text_column, books):
    """docs, wikibooks, a glob of files, or the name of a hub data set -> Source.

    Raises ValueError, OSError.
    """
    if dataset == "docs":
        return docs_source()
    name = os.path.expanduser(dataset)
    found = glob.glob(name, recursive=True) or [name]  # which may have brackets
    if files := sorted(f for f in found if os.path.isfile(f) and os.path.getsize(f)):
        return files_source(files, text_column)
    if os.path.isdir(name) and dataset != "wikibooks":
        kinds = [Path(file).suffix for file in sorted(os.listdir(name)) if any(endings(file))]
        files = os.path.join(name, f"*{statistics.mode(kinds or ['.txt'])}")
        raise ValueError(f"--dataset {dataset} is a folder: name its files, {files!r}")
    if any(endings(dataset)) or not re.fullmatch(r"\w[\w.-]*(/[\w.-]+)?(:.+)?", dataset):
        raise FileNotFoundError(
            f"no file with text in it matches {dataset!r}; --dataset takes docs, wikibooks, "
            "'path/*.jsonl', a prepared folder or the name of a hub data set"
        )
    return hub_source(dataset, text_column, books)


def short_hash(text):
    return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:12]


# --------------------------------------------------------------------------------------------------
# Documents: the docs corpus


def docs_source():
    found = docs_documents()
    digest = short_hash("\0".join(found))
    about = {"versions": docs_versions(), "hash": digest}
    part = partial(iter, found), sum(map(len, found))
    docs = [(library, text) for text, library in found.items()]
    return Source(f"docs-{digest}", about, lambda: [part], 10, docs)


def docs_documents():
    """{text: library} of the English that installed packages carry in their docstrings: 12 MB.
    Read, never imported."""
    found = {}
    for library, folder in docs_folders().items():
        for file in sorted(folder.rglob("*.py")):
            parts = file.relative_to(folder).parts
            if {"tests", "test", "idlelib", "site-packages", "dist-packages"} & set(parts[:-1]):
                continue
            for text in docstrings(file):
                if len(text) >= 100:
                    found.setdefault(text, library)
    from pydoc_data.topics import topics  # the language reference, as text

    for text in topics.values():
        found.setdefault(text, "python")
    return found


def docs_folders():
    folders = {"python": Path(sysconfig.get_path("stdlib"))}
    for library in DOCS_LIBRARIES[1:]:
        folders[library] = Path(importlib.util.find_spec(library).origin).parent
    return folders


def docstrings(file):
    """Docstrings of a source file, and texts given to add_docstr (torch documents its C functions
    so; of add_docstr_all, which has a name before the text, the name: too short to be kept)."""
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):  # a template, or a test for bad syntax
        return
    for node in ast.walk(tree):
        texts = []
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            texts = [ast.get_docstring(node)]
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "").startswith("add_docstr"):
            texts = [arg.value for arg in node.args if isinstance(getattr(arg, "value", None), str)]
        if texts and texts[0]:
            yield inspect.cleandoc(texts[0])


def docs_versions():
    versions = {name: importlib.metadata.version(name) for name in DOCS_LIBRARIES[1:]}
    return {"python": platform.python_version(), **versions}


# --------------------------------------------------------------------------------------------------
# Documents: local files

NO_UTF8 = re.compile("[\udc80-\udcff]")  # what surrogateescape makes of bytes that are none
OPENERS = {".gz": gzip.open, ".xz": lzma.open, ".bz2": bz2.open}


def files_source(files, text_column):
    """Local files -> Source; they are read when asked for. A file is known by its name, its size
    and its two ends, wherever it lies and whenever it was touched. Raises OSError."""
    names, parts, digest = list(map(os.path.basename, files)), [], hashlib.sha256()
    digest.update(json.dumps([names, text_column]).encode())
    for file in files:
        kind, packed = endings(file)
        with open(file, "rb") as handle:
            size = handle.seek(0, os.SEEK_END)
            digest.update(str(size).encode())
            for place in (0, max(0, size - EDGE)):
                handle.seek(place)
                digest.update(handle.read(EDGE))
        ratio = 3.5 if packed or kind == ".parquet" else 1  # of compressed English
        parts.append((partial(file_documents, file, text_column), ratio * size))
    about = {"files": names, "text_column": text_column, "hash": digest.hexdigest()[:12]}
    return Source(f"files-{about['hash']}", about, lambda: parts)


def endings(name):
    """What a file's name says of its kind and of its compression -> ".jsonl", ".xz"; "" where it
    says nothing that is known."""
    path = Path(name.lower())
    packed = path.suffix if path.suffix in OPENERS else ""
    kind = Path(path.stem).suffix if packed else path.suffix
    return kind if kind in READERS else "", packed


def file_documents(file, text_column):
    """Texts of one local file. Raises ValueError if it cannot be read."""
    kind, packed = endings(file)
    if not kind:
        known = ", ".join([*READERS, *OPENERS])
        raise ValueError(f"{file}: unknown kind of file; known endings are {known}")
    newline, broken = "" if kind == ".csv" else None, 0
    with OPENERS.get(packed, open)(
        file, "rt", encoding="utf-8-sig", errors="surrogateescape", newline=newline
    ) as handle:
        for text in column(READERS[kind](handle), text_column, file):
            text, n = NO_UTF8.subn("\ufffd", text)
            broken += n
            yield text
    if broken:
        say_once(f"note: {file} is not UTF-8: {broken:,} of its bytes became U+FFFD, no letter")


say_once = functools.cache(print)  # files are read twice: for the BPE, and for the tokens


def text_rows(handle):
    """Documents of a plain text file, separated by empty lines, at most PIECE characters at a
    time."""
    document = ""
    for line in iter(partial(handle.readline, PIECE), ""):
        if len(document) >= PIECE or not line.strip():
            yield document
            document = ""
        document += line
    yield document


def json_rows(handle):
    """A row a line, or one list of them."""
    is_list = handle.read(1000).lstrip().startswith("[")
    handle.seek(0)
    yield from json.load(handle) if is_list else map(json.loads, filter(str.strip, handle))


def parquet_rows(handle):
    import pyarrow.parquet  # comes with datasets

    for batch in pyarrow.parquet.ParquetFile(handle.buffer).iter_batches(1000):
        yield from batch.to_pylist()


READERS = {
    ".txt": text_rows,
    ".md": text_rows,
    ".json": json_rows,
    ".jsonl": json_rows,
    ".csv": csv.DictReader,
    ".parquet": parquet_rows,
}
csv.field_size_limit(2**31 - 1)  # a document may be longer than 131,072 characters


def readable(rows, where):
    """The same rows; raises ValueError where they break off."""
    try:
        yield from rows
    except Exception as error:  # decompressors, parsers, datasets and networks have many kinds
        raise ValueError(
            f"{where} cannot be read, it is damaged or of another kind: "
            f"{type(error).__name__}: {error}"
        ) from None


def column(rows, name, where):
    """Texts of one column; a row may be a text itself. Raises ValueError naming the columns there
    are."""
    rows = readable(rows, where)
    first = list(itertools.islice(rows, 100))
    if first and all(isinstance(row, dict) and name not in row for row in first):
        raise ValueError(
            f"{where} has no column {name!r}, only {', '.join(map(str, first[0]))}: "
            "name one with --text_column"
        )
    for row in itertools.chain(first, rows):
        text = row.get(name) if isinstance(row, dict) else row
        if isinstance(text, str):
            yield text


# --------------------------------------------------------------------------------------------------
# Documents: the hub, through `datasets`


def hub_source(dataset, text_column, books):
    name, _, config = dataset.partition(":")
    hub = [(name, config or None, 1)]
    if dataset == "wikibooks":
        hub = [("wikimedia/wikipedia", "20231101.en", 1), (books, None, BOOKS_ROWS)]
    about = {"hub": hub, "text_column": text_column}
    slug, digest = re.sub(r"\W+", "-", dataset), short_hash(json.dumps([hub, text_column]))
    return Source(
        f"hub-{slug}-{digest}", about, lambda: [hub_part(*each, text_column) for each in hub]
    )


def hub_part(name, config, join, text_column):
    """A data set of the hub, streamed. Says beforehand what will be downloaded."""
    from datasets import load_dataset, load_dataset_builder

    try:
        ask_the_hub()
        info = load_dataset_builder(name, config).info
    except Exception as error:
        raise ValueError(
            f"cannot open the hub data set {name!r} ({type(error).__name__}): is the "
            "name right and the network there? --dataset docs needs no network, "
            "--dataset 'path/*.jsonl' takes files"
        ) from None
    text, download = info.dataset_size or 0, info.download_size or 0
    print(
        f"{name}: {download / 1e9:.1f} GB to stream, {text / 1e9:.1f} GB of text; on disk as "
        f"tokens about {text / 2.2e9:.1f} GB; at 10 MB/s {text / 1e7 / 60:.0f} minutes"
    )

    def documents():
        rows = load_dataset(name, config, split="train", streaming=True)
        texts = column(rows, text_column, name)
        return texts if join == 1 else iter(lambda: "\n".join(itertools.islice(texts, join)), "")

    return documents, text


def ask_the_hub():
    """Where the hub does not answer, its libraries shall take what they have stored, or fail."""
    import datasets
    from huggingface_hub import constants, utils

    if not constants.HF_HUB_OFFLINE:
        try:
            in_time(utils.get_session().head, constants.ENDPOINT)
        except Exception:
            constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True


def in_time(function, *args):
    """function(*args). Raises TimeoutError after PATIENCE: without a network, libraries try again
    for minutes."""
    with ThreadPool(1) as pool:
        return pool.apply_async(function, args).get(PATIENCE)


# --------------------------------------------------------------------------------------------------
# Tokenizer


def train_bpe(words, n_ids):
    """Byte-level byte-pair encoding (Sennrich 2016) -> tokens in order of rank: 256 bytes, then the
    merges.

    words: {pre-token as bytes: how often}. Each merge joins the most frequent pair of neighbours; a
    heap and an index from pair to words keep it to seconds. Ties go to the smaller pair of bytes.
    """
    # A token is written as one character, chr(rank): then joining a pair is str.replace.
    ranks = [bytes([b]) for b in range(256)]
    char = {token: chr(rank) for rank, token in enumerate(ranks)}
    texts, counts = [word.decode("latin-1") for word in words], list(words.values())
    count_of, words_with = collections.Counter(), collections.defaultdict(set)
    changed, heap = set(), []

    def count_pairs(w, sign):
        for pair in map(operator.add, texts[w], texts[w][1:]):
            count_of[pair] += sign * counts[w]
            words_with[pair].add(w)
            changed.add(pair)

    for w in range(len(texts)):
        count_pairs(w, 1)
    bar = tqdm(total=n_ids, initial=256, desc="bpe: merging", unit="id", leave=False)
    while len(ranks) < n_ids and (changed or heap):
        for a, b in changed:
            heapq.heappush(heap, (-count_of[a + b], ranks[ord(a)], ranks[ord(b)]))
        changed.clear()
        count, left, right = heapq.heappop(heap)
        pair, merged = char[left] + char[right], left + right
        if not count or -count != count_of[pair]:  # it has changed: there is another entry
            continue
        if merged not in char:  # another split of the same bytes may have made it
            char[merged] = chr(len(ranks))
            ranks.append(merged)
            bar.update()
        for w in words_with[pair]:
            count_pairs(w, -1)
            texts[w] = texts[w].replace(pair, char[merged])
            count_pairs(w, 1)
    return ranks


def bpe_state(parts):
    """Train the corpus's own BPE on a sample that takes from each of its parts by its size, or
    equally where a size is not known."""
    words, sizes = collections.Counter(), [size for _, size in parts]
    print(f"bpe: learning {BPE_IDS:,} pieces of words from the text (half a minute)", flush=True)
    for documents, size in parts:
        left = int(BPE_SAMPLE * size / sum(sizes) if all(sizes) else BPE_SAMPLE / len(parts))
        for text in tqdm(documents(), desc="bpe: counting words", unit=" documents", leave=False):
            words.update(regex.findall(GPT2_PATTERN, text[:left]))
            left -= len(text)
            if left <= 0:
                break
    short = {w.encode("utf-8", "replace"): n for w, n in words.items() if len(w) <= BPE_WORD}
    ranks = train_bpe(short, BPE_IDS)
    longest = [repr(token.decode("utf-8", "replace")) for token in sorted(ranks, key=len)[-4:]]
    # A tiny corpus: fill up, so that the specials' ids do not move.
    ranks += [b"\xff\xfe" + str(i).encode() for i in range(BPE_IDS - len(ranks))]
    print(
        f"bpe: {BPE_IDS:,} ids from {len(words):,} different words; the longest: "
        f"{', '.join(longest)}"
    )
    return tokenizer_state("bpe", GPT2_PATTERN, ranks)


def gpt2_state():
    """GPT-2's BPE through tiktoken. Raises ValueError, with what to do, when it cannot be had."""
    try:
        gpt2 = in_time(tiktoken.get_encoding, "gpt2")
    except Exception as error:
        raise ValueError(
            f"GPT-2's vocabulary cannot be fetched ({type(error).__name__}): "
            "--tokenizer bpe needs no network, or set TIKTOKEN_CACHE_DIR to a folder "
            "in which tiktoken once stored it"
        ) from None
    return tokenizer_state("gpt2", gpt2._pat_str, gpt2._mergeable_ranks, "<|endoftext|>")


def tokenizer_state(name, pattern, ranks, *more):
    """A tokenizer as JSON can hold it: bytes as latin-1 text, in order of rank."""
    specials = {text: len(ranks) + i for i, text in enumerate((*more, *SPECIALS))}
    ranks = [token.decode("latin-1") for token in ranks]
    state = {"name": name, "pattern": pattern, "ranks": ranks, "specials": specials}
    return {**state, "hash": tokenizer_hash(state)}


def tokenizer_hash(state):
    return short_hash(json.dumps([state.get(key) for key in ("pattern", "ranks", "specials")]))


def encoding_arguments(state):
    """The arguments of tiktoken.Encoding; checkpoints hold them, so a run is usable without its
    corpus."""
    ranks = {token.encode("latin-1"): rank for rank, token in enumerate(state["ranks"])}
    named = {"name": state["name"], "pat_str": state["pattern"]}
    return {**named, "mergeable_ranks": ranks, "special_tokens": state["specials"]}


def pieces(text):
    """Cut a long document at white space, so that no single call to the tokenizer is large."""
    start = 0
    while len(text) - start > PIECE:
        window = text[start + 1 : start + PIECE]
        cut = max(window.rfind(" "), window.rfind("\n")) + 1 or PIECE
        yield text[start : start + cut]
        start += cut
    yield text[start:]


# --------------------------------------------------------------------------------------------------
# Tokens on disk


@dataclass
class Corpus:
    """A prepared corpus: two token streams as memory maps, the tokenizer, and the facts."""

    folder: Path
    meta: dict
    tokenizer: dict  # its state; see tokenizer_state
    train: np.ndarray
    val: np.ndarray

    @property
    def vocab_size(self):
        return self.meta["vocab_size"]

    def n_rows(self, split, L):
        return len(getattr(self, split)) // (L - 2)

    def rows(self, split, index, L):
        """Rows [CLS] x_1 .. x_(L-2) [SEP] at `index` (n,) -> (n, L) int64. Raises OSError if the
        file was damaged under the run."""
        stream, n, file = getattr(self, split), L - 2, self.folder / f"{split}.bin"
        V, remedy = self.vocab_size, f"delete {self.folder} and prepare it again"
        if os.path.getsize(file) < stream.nbytes:  # reading on would be a SIGBUS
            raise OSError(f"{file} was cut short under the run: {remedy}")
        whole = stream[: len(stream) // n * n].reshape(-1, n)
        out = np.empty((len(index), L), np.int64)
        out[:, 1:-1] = whole[index]
        out[:, 0], out[:, -1] = V - 8, V - 6  # [CLS] .. [SEP]
        if out.max(initial=0) >= V:
            raise OSError(f"{file} has ids beyond the vocabulary: {remedy}")
        return out


class Batches:
    """Rows in an order that is a function of (seed, index): a new permutation each epoch, nothing
    to save.

    With a fraction below 1 only that share of the rows is used, the same for every seed.
    """

    def __init__(self, corpus: Corpus, L, seed, fraction=1.0):
        self.corpus, self.L, self.seed, self.epoch = corpus, L, seed, None
        self.kept = np.arange(corpus.n_rows("train", L), dtype=np.uint32)
        if fraction < 1:
            order = np.random.default_rng(0).permutation(self.kept)
            self.kept = np.sort(order[: round(fraction * len(order))])
        self.n = len(self.kept)
        if self.n < 1 or corpus.n_rows("val", L) < 1:
            raise ValueError(
                f"{corpus.folder} holds {len(corpus.train):,} tokens for training and "
                f"{len(corpus.val):,} for validation: too few for one row of {L}; "
                "take more text or a smaller --block_size"
            )

    def __call__(self, index, size):
        """The rows index * size .. (index + 1) * size of the endless sequence of epochs
        -> (size, L) int64."""
        numbers = []
        for i in range(index * size, (index + 1) * size):
            if i // self.n != self.epoch:
                self.epoch = i // self.n
                rng = np.random.default_rng((self.seed, self.epoch))
                self.order = rng.permutation(self.kept)
            numbers.append(self.order[i % self.n])
        return self.corpus.rows("train", np.array(numbers), self.L)


def prepare(
    dataset,
    tokenizer,
    cache,
    text_column=DataConfig.text_column,
    books_dataset=DataConfig.books_dataset,
) -> Corpus:
    """Text -> tokens on disk, whatever is already there skipped -> Corpus. Raises ValueError,
    OSError."""
    folder = Path(os.path.expanduser(dataset))
    if os.path.isfile(folder / "meta.json"):
        corpus = open_corpus(folder)
        if corpus.meta["tokenizer"] != tokenizer:
            name = corpus.meta["tokenizer"]
            raise ValueError(f"{folder} was made with --tokenizer {name}: give that flag")
        return corpus
    if dataset == "docs":
        if folder := prepared_docs(cache, tokenizer):
            return open_corpus(folder)
        print("docs: reading the docstrings of the installed packages (half a minute)", flush=True)
    source = find_source(dataset, text_column, books_dataset)
    folder = Path(cache) / f"{source.name}-{tokenizer}"
    if not (folder / "meta.json").exists():
        parts = source.parts()
        folder.mkdir(parents=True, exist_ok=True)
        with common.lock(folder, "preparing data", wait=True):
            if not (folder / "meta.json").exists():  # nor made while this one waited
                make_corpus(source, parts, tokenizer, folder, dataset)
    return open_corpus(folder)


def make_corpus(source, parts, tokenizer, folder, dataset):
    """The stages, in a folder that is locked."""
    if not (folder / "tokenizer.json").exists():
        state = gpt2_state() if tokenizer == "gpt2" else bpe_state(parts)
        write_json(folder / "tokenizer.json", state)
    if source.docs:
        write_json(folder / "docs.json", {"every": source.val_every, "rows": source.docs})
    with one_remedy(folder):
        state = read_tokenizer(folder)
    tokenize(source, parts, state, folder, dataset)


def prepared_docs(cache, tokenizer):
    """A prepared docs corpus of the very packages that are installed now, so that 25 s of reading
    are saved."""
    for file in Path(cache).glob(f"docs-*-{tokenizer}/meta.json"):
        with contextlib.suppress(ValueError, OSError):  # damaged: prepare sees it, if it counts
            if read_json(file, source=dict)["source"].get("versions") == docs_versions():
                return file.parent


def tokenize(source, parts, state, folder, dataset):
    """Documents -> train.bin and val.bin, written aside, then renamed; meta.json last, so it means
    'complete'."""
    encoding, sep = tiktoken.Encoding(**encoding_arguments(state)), state["specials"]["[SEP]"]
    lengths = {"train": 0, "val": 0}
    meta = {"dataset": dataset, "source": source.about, "tokenizer": state["name"]}
    meta |= {"documents": 0, "characters": 0, **determined(state, lengths)}
    texts = itertools.chain.from_iterable(documents() for documents, _ in parts)
    total = sum(size for _, size in parts) or None
    with (
        common.written_aside(folder / "train.bin") as train,
        common.written_aside(folder / "val.bin") as val,
        tqdm(total=total, unit="B", unit_scale=True, desc=f"tokens: {dataset[-30:]}") as bar,
    ):
        for text, ids in encoded(filter(str.strip, texts), encoding):
            # The second one already is for validation.
            split = "val" if meta["documents"] % source.val_every == 1 else "train"
            stream = np.fromiter(itertools.chain(*ids, [sep]), meta["dtype"])
            stream.tofile(val if split == "val" else train)
            lengths[split] += len(stream)
            meta["documents"] += 1
            meta["characters"] += len(text)
            bar.update(len(text))
        if 0 in lengths.values():
            raise ValueError(
                f"{dataset}: {meta['documents']} documents with text in it; at least "
                "2 are needed, one to train on and one to validate on"
            )
    write_json(folder / "meta.json", meta)
    print(
        f"tokens: {meta['documents']:,} documents, {lengths['train']:,} tokens to train on, "
        f"{lengths['val']:,} to validate on"
    )
    first = np.fromfile(folder / "train.bin", meta["dtype"], 24)
    print(f"the first ones: {encoding.decode(first.tolist())!r}")


def encoded(texts, encoding):
    """(text, the ids of its pieces) in order. While all cores encode, the next texts are read and
    decompressed."""
    with ThreadPoolExecutor() as pool:
        waiting, size = collections.deque(), 0
        for text in texts:
            waiting.append((text, pool.map(encoding.encode_ordinary, pieces(text))))
            size += len(text)
            while size > AHEAD:
                size -= len(waiting[0][0])
                yield waiting.popleft()
        yield from waiting


# --------------------------------------------------------------------------------------------------
# What is prepared already, and may be damaged


def open_corpus(folder):
    """A prepared folder -> Corpus. Raises ValueError when it is damaged."""
    with one_remedy(folder):
        state, streams, lengths = read_tokenizer(folder), {}, {}
        meta, known = read_json(folder / "meta.json", tokens=dict), determined(state, lengths)
        for split in ("train", "val"):
            stream = np.memmap(folder / f"{split}.bin", known["dtype"], "r")
            if stream[: 10**8].max() >= known["vocab_size"]:
                raise ValueError(f"{split}.bin has ids beyond the vocabulary")
            streams[split], lengths[split] = stream, len(stream)
        if meta | known != meta:
            raise ValueError(f"meta.json does not say what the other files do: {known}")
    return Corpus(folder, meta, state, **streams)


def open_prepared(meta, *places):
    """The corpus that a checkpoint's `data` describes, in one of the places, each a cache or a
    prepared folder; its text may be gone, and its folder have another name. Raises ValueError."""
    for place in map(Path, places):
        for file in (place / "meta.json", *sorted(place.glob("*/meta.json"))):
            for found in common.read_rows(file):  # of one that is damaged there are none
                if {**found, "dataset": meta["dataset"]} == meta:  # however it was asked for
                    return open_corpus(file.parent)
    text = f"the run's text ({meta['dataset']})"
    raise ValueError(f"{text} is not prepared in {places[0]}; --cache names another place")


def determined(state, lengths):
    """What tokenizer.json and the lengths of the streams say: in meta.json, when all is whole."""
    vocab_size = len(state["ranks"]) + len(state["specials"])
    return {
        "vocab_size": vocab_size,
        "dtype": "uint16" if vocab_size <= 65536 else "uint32",
        "tokenizer_hash": state["hash"],
        "tokens": lengths,
    }


def read_tokenizer(folder):
    state = read_json(folder / "tokenizer.json", name=str, hash=str)
    if state["hash"] != tokenizer_hash(state):
        raise ValueError("tokenizer.json: its hash is another")
    return state


@contextlib.contextmanager
def one_remedy(folder):
    """What is wrong in a prepared folder is said with what to do. Raises ValueError."""
    try:
        yield
    except (ValueError, FileNotFoundError) as error:
        raise ValueError(f"{folder} is damaged ({error}): delete it and prepare it again") from None


# --------------------------------------------------------------------------------------------------


def validation_rows(corpus, n_rows, L):
    """At most n_rows of them, from all over, for documents are in order -> (n, L) int64."""
    there = corpus.n_rows("val", L)
    chosen = np.linspace(0, there - 1, min(there, n_rows)).astype(int)
    return torch.from_numpy(corpus.rows("val", chosen, L))


def validation_batches(corpus, L):
    """What every run is validated on -> tuple of (b, L), b about EVAL_BATCH: a batch of a single
    row would have no other row to draw from."""
    rows = validation_rows(corpus, EVAL_ROWS, L)
    return rows.tensor_split(math.ceil(len(rows) / EVAL_BATCH))


def word_starts(tokenizer, vocab_size):
    """(V,) bool: which pieces begin a word, i.e. do not begin with a letter or a digit. Specials
    do."""
    if tokenizer is None:
        raise ValueError("whole_word needs the encoder's tokenizer, to know what begins a word")
    pieces = map(tokenizer.decode_single_token_bytes, range(vocab_size - len(SPECIALS)))
    starts = [piece[0] < 128 and not piece[:1].isalnum() for piece in pieces]
    return torch.tensor(starts + [True] * len(SPECIALS))


def main(argv=None):
    parser = Parser("data.py", __doc__)
    parser.add_settings("data", DataConfig)
    given = vars(parser.parse_args(argv))
    with one_line_errors():
        corpus = prepare(**vars(DataConfig(**given)))
    print(
        f"ready: {corpus.folder}, {corpus.vocab_size:,} ids, {len(corpus.train) / 1e6:.1f} M "
        f"tokens to train on, {len(corpus.val) / 1e6:.2f} M to validate on"
    )
    flags = [f"--{name} {shlex.quote(str(value))}" for name, value in given.items()]
    print("next: python train.py " + " ".join(flags))


if __name__ == "__main__":
    main()
