"""Text -> token ids on disk -> batches.

    python data.py                                                   # the built-in docs corpus, nothing to download
    python data.py --dataset 'books/*.jsonl.xz' --tokenizer bpe      # your files: txt, jsonl, csv, parquet; gz, xz
    python data.py --dataset wikibooks --tokenizer gpt2              # English Wikipedia and BookCorpus, from the hub

train.py calls the same code when the data is not there yet. Three stages, each skipped when its result exists:

    documents   an iterator of texts, never all in memory
    tokenizer   GPT-2's byte-level BPE, or one of 8,184 ids trained on the corpus itself -> tokenizer.json
    tokens      every document followed by [SEP], one stream a split                     -> train.bin, val.bin, meta.json

A row is [CLS] x_1 .. x_(L-2) [SEP]: the stream is cut into pieces of L - 2 tokens, across documents (RoBERTa's
FULL-SENTENCES), so inner [SEP]s say where a document ends. Every n-th document goes to validation, whole.
"""

import argparse
import ast
import bz2
import collections
import glob
import gzip
import hashlib
import heapq
import importlib.metadata
import importlib.util
import inspect
import itertools
import json
import logging
import lzma
import os
import re
import shlex
import sys
import sysconfig
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import regex  # comes with tiktoken: the same syntax as its patterns
import tiktoken
from tqdm import tqdm  # comes with datasets

GPT2_PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
BPE_IDS = 8184                  # + 8 specials = 8192
BPE_SAMPLE = 50_000_000         # characters of text that the BPE is trained on
SPECIALS = ("[CLS]", "[PAD]", "[SEP]", "[MASK]", "[spare0]", "[spare1]", "[spare2]", "[spare3]")
PIECE = 100_000                 # characters given to the tokenizer at once: bounds memory for endless lines
DOCS_LIBRARIES = ("python", "torch", "numpy", "pandas", "datasets")
AHEAD = 2_000_000               # characters that are read ahead of the tokenizer: bounds memory for small documents
BOOKS_ROWS = 1000               # BookCorpus mirrors hold a sentence a row: this many make a document


@contextmanager
def one_line_errors():
    """A user's mistake (ValueError, OSError) ends the program with one line and exit code 2, not a traceback."""
    try:
        yield
    except (ValueError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("interrupted; what was finished is kept", file=sys.stderr)
        sys.exit(130)


# ---------------------------------------------------------------------------------------------------------
# Documents: the docs corpus

def docs_documents():
    """(library, text) of the English that installed packages carry in their docstrings. Read, never imported."""
    seen = set()
    for library, folder in docs_folders().items():
        for file in sorted(folder.rglob("*.py")):
            parts = file.relative_to(folder).parts
            if {"tests", "test", "idlelib", "site-packages", "dist-packages"} & set(parts[:-1]):
                continue
            for text in docstrings(file):
                if len(text) >= 100 and text not in seen:
                    seen.add(text)
                    yield library, text
    from pydoc_data.topics import topics  # the language reference, as text
    yield from (("python", text) for text in dict.fromkeys(topics.values()) if text not in seen)


def docs_folders():
    folders = {"python": Path(sysconfig.get_path("stdlib"))}
    for library in DOCS_LIBRARIES[1:]:
        folders[library] = Path(importlib.util.find_spec(library).origin).parent
    return folders


def docstrings(file):
    """Docstrings of a source file, and texts given to add_docstr (torch documents its C functions so)."""
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):           # a template, or a test for bad syntax
        return
    for node in ast.walk(tree):
        text = None
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            text = ast.get_docstring(node)
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "").startswith("add_docstr"):
            text = next((a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)), None)
        if text:
            yield inspect.cleandoc(text)


def docs_versions():
    versions = {name: importlib.metadata.version(name) for name in DOCS_LIBRARIES[1:]}
    return {"python": ".".join(map(str, sys.version_info[:3])), **versions}


# ---------------------------------------------------------------------------------------------------------
# Documents: local files and the hub, through `datasets`

OPENERS = {".gz": gzip.open, ".xz": lzma.open, ".bz2": bz2.open}
FORMATS = {".txt": "text", ".md": "text", ".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet"}


@dataclass
class Source:
    """Where documents come from. parts() -> [(function -> iterator of texts, bytes of text or an estimate, 0 = unknown)]."""
    name: str           # a folder's name in the cache, unique to the content
    about: dict         # what stands in meta.json
    parts: callable     # called only when there is work to do: for the hub it needs the network
    val_every: int      # every n-th document is for validation
    labels: list | None = None      # docs: the library of each document


def find_source(dataset, text_column="text", books="SamuelYang/bookcorpus") -> Source:
    """'docs', 'wikibooks', a glob of files, or the name of a hub data set -> Source. Raises ValueError, OSError."""
    if dataset == "docs":
        documents = list(docs_documents())      # 12 MB: small enough to hold, and hashed to name the folder
        digest = hashlib.sha256("\0".join(text for _, text in documents).encode()).hexdigest()[:12]
        about = {"versions": docs_versions(), "documents": len(documents), "hash": digest}
        size = sum(len(text.encode()) for _, text in documents)
        part = (lambda: (text for _, text in documents)), size
        return Source(f"docs-{digest}", about, lambda: [part], 10, [library for library, _ in documents])
    if files := sorted(f for f in glob.glob(os.path.expanduser(dataset), recursive=True) if os.path.isfile(f)):
        files = [f for f in files if os.path.getsize(f)]
        if not files:
            raise ValueError(f"{dataset}: empty, no text in it")
        stats = [(os.path.basename(f), os.path.getsize(f), os.stat(f).st_mtime_ns) for f in files]
        digest = hashlib.sha256(json.dumps([stats, text_column]).encode()).hexdigest()[:12]
        def parts():
            return [(lambda f=f: file_documents(f, text_column), estimated_bytes(f)) for f in files]
        about = {"files": [name for name, _, _ in stats], "text_column": text_column}
        return Source(f"files-{digest}", about, parts, 50)
    if re.search(r"[*?\[]|\.(txt|md|jsonl?|csv|parquet|gz|xz|bz2)$|^[./~]", dataset):
        raise FileNotFoundError(f"no file matches {dataset!r}")
    hub = ([("wikimedia/wikipedia", "20231101.en", 1), (books, None, BOOKS_ROWS)] if dataset == "wikibooks"
           else [(*(dataset.split(":") + [None])[:2], 1)])
    digest = hashlib.sha256(json.dumps([hub, text_column]).encode()).hexdigest()[:12]
    parts = lambda: [hub_part(name, config, text_column, join) for name, config, join in hub]           # noqa: E731
    slug = re.sub(r"\W+", "-", dataset)
    return Source(f"hub-{slug}-{digest}", {"hub": hub, "text_column": text_column}, parts, 50)


def estimated_bytes(file):
    """Text in a file, from its size: compressed English is about 3.5 times smaller."""
    return os.path.getsize(file) * (3.5 if Path(file).suffix in OPENERS or file.endswith(".parquet") else 1)


def file_documents(file, text_column):
    """Texts of one local file; one of .txt ends at an empty line."""
    suffixes = Path(file).suffixes
    if suffixes and suffixes[-1] in OPENERS:
        suffixes.pop()
    kind = FORMATS.get(suffixes[-1] if suffixes else "")
    if kind is None:
        raise ValueError(f"{file}: unknown kind of file; known are {', '.join(FORMATS)}, each also with .gz, .xz or .bz2")
    if kind == "text":
        yield from text_paragraphs(file)
        return
    if kind == "json":
        check_json(file)
    import datasets
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)       # what is wrong is said below, in one line
    try:
        rows = datasets.load_dataset(kind, data_files=str(Path(file).resolve()), split="train", streaming=True)
    except Exception as error:      # it looks into the file for its columns, and has many kinds of complaint
        raise ValueError(f"{file} cannot be read: {type(error).__name__}: {error}") from None
    yield from column(rows, text_column, file)


def check_json(file):
    """Rows of JSON are objects. pyarrow dies of a segmentation fault where the first is null (apache/arrow#47409)."""
    opener = OPENERS.get(Path(file).suffix, open)
    with opener(file, "rt", encoding="utf-8-sig", errors="replace") as handle:
        while (line := read_line(handle, file)) and not line.strip():
            pass
    if line.strip()[:1] not in ("{", "["):
        raise ValueError(f"{file} cannot be read: it begins with {line.strip()[:20]!r}, not with an object in braces")


def text_paragraphs(file):
    """Documents of a plain text file, separated by empty lines, at most PIECE characters at a time."""
    opener = OPENERS.get(Path(file).suffix, open)
    with opener(file, "rt", encoding="utf-8", errors="replace") as handle:
        document, size = [], 0
        while line := read_line(handle, file):
            if line.strip() and size < PIECE:
                document.append(line)
                size += len(line)
                continue
            yield "".join(document)
            document, size = [line], len(line)
        yield "".join(document)


def read_line(handle, file):
    try:
        return handle.readline(PIECE)
    except (EOFError, lzma.LZMAError, zlib.error, OSError) as error:
        raise ValueError(f"{file} is damaged: {type(error).__name__}: {error}") from None


def hub_part(name, config, text_column, join):
    """A data set of the hub, streamed. Says beforehand what will be downloaded."""
    from datasets import load_dataset, load_dataset_builder
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)        # a line for each retry
    try:
        info = load_dataset_builder(name, config).info
    except Exception as error:
        raise ValueError(f"cannot open the hub data set {name!r} ({type(error).__name__}): is the name right and the "
                         "network there? --dataset docs needs no network, --dataset 'path/*.jsonl' takes files") from None
    text, download = info.dataset_size or 0, info.download_size or 0
    print(f"{name}: {download / 1e9:.1f} GB to stream, {text / 1e9:.1f} GB of text; on disk as tokens about "
          f"{text / 2.2e9:.1f} GB; at 10 MB/s {text / 1e7 / 60:.0f} minutes")

    def documents():
        rows = column(load_dataset(name, config, split="train", streaming=True), text_column, name)
        return rows if join == 1 else ("\n".join(group) for group in batched(rows, join))
    return documents, text


def column(rows, name, where):
    """Texts of one column. Raises ValueError naming the columns there are, or what broke under way."""
    rows = iter(rows)
    while True:
        try:
            row = next(rows)
        except StopIteration:
            return
        except Exception as error:      # pyarrow, datasets and the network have many kinds
            raise ValueError(f"{where} cannot be read: {type(error).__name__}: {error}") from None
        if name not in row:
            raise ValueError(f"{where} has no column {name!r}, only {', '.join(row)}: name one with --text_column")
        if isinstance(row[name], str):
            yield row[name]


def batched(items, n):
    items = iter(items)
    while group := list(itertools.islice(items, n)):
        yield group


# ---------------------------------------------------------------------------------------------------------
# Tokenizer

def train_bpe(words: collections.Counter, n_ids: int) -> list[bytes]:
    """Byte-level byte-pair encoding (Sennrich 2016) -> tokens in order of rank: 256 bytes, then the merges.

    words: Counter of pre-tokens as bytes. Each merge joins the most frequent pair of neighbours; a heap with
    lazy updates and an index from pair to words keeps it to seconds. Ties go to the smaller pair of bytes.
    """
    ranks = [bytes([b]) for b in range(256)]
    items = [(list(bytes([b]) for b in word), count) for word, count in sorted(words.items())]
    count_of, words_with = collections.Counter(), collections.defaultdict(set)
    for w, (parts, count) in enumerate(items):
        for pair in zip(parts, parts[1:]):
            count_of[pair] += count
            words_with[pair].add(w)
    heap = [(-count, pair) for pair, count in count_of.items()]
    heapq.heapify(heap)
    known = set(ranks)
    while len(ranks) < n_ids and heap:
        count, pair = heapq.heappop(heap)
        if -count != count_of[pair]:
            if count_of[pair] > 0:
                heapq.heappush(heap, (-count_of[pair], pair))       # its count has changed: back in line
            continue
        merged = pair[0] + pair[1]
        if merged not in known:                 # another split of the same bytes may have made it already
            known.add(merged)
            ranks.append(merged)
        changed = set()
        for w in words_with.pop(pair):
            parts, count = items[w]
            for old in zip(parts, parts[1:]):
                count_of[old] -= count
                changed.add(old)
            parts = merge(parts, pair, merged)
            items[w] = parts, count
            for new in zip(parts, parts[1:]):
                count_of[new] += count
                words_with[new].add(w)
                changed.add(new)
        for new in changed:
            if count_of[new] > 0:
                heapq.heappush(heap, (-count_of[new], new))
        del count_of[pair]
    return ranks


def merge(parts, pair, merged):
    """Join every occurrence of the pair in a word's parts, from the left."""
    out, i = [], 0
    while i < len(parts):
        if i + 1 < len(parts) and parts[i] == pair[0] and parts[i + 1] == pair[1]:
            out.append(merged)
            i += 2
        else:
            out.append(parts[i])
            i += 1
    return out


def bpe_state(parts) -> dict:
    """Train the corpus's own BPE on a sample that takes equally from each of its parts."""
    words, share = collections.Counter(), BPE_SAMPLE // len(parts)
    with tqdm(total=len(parts), desc="bpe: counting words", unit="part", leave=False) as bar:
        for documents, _ in parts:
            left = share
            for text in documents():
                words.update(regex.findall(GPT2_PATTERN, text[:left]))
                left -= len(text)
                if left <= 0:
                    break
            bar.update()
    start = time.time()
    n_words = len(words)
    ranks = train_bpe(collections.Counter({w.encode(): n for w, n in words.items()}), BPE_IDS)
    if len(ranks) < BPE_IDS:                    # a tiny corpus: fill up, so that the specials' ids do not move
        ranks += [b"\xff\xfe" + str(i).encode() for i in range(BPE_IDS - len(ranks))]
    longest = ", ".join(repr(token.decode("utf-8", "replace")) for token in sorted(ranks, key=len)[-4:])
    print(f"bpe: {BPE_IDS:,} ids from {n_words:,} different words in {time.time() - start:.0f} s; the longest: {longest}")
    return tokenizer_state("bpe", GPT2_PATTERN, ranks)


def gpt2_state() -> dict:
    """GPT-2's BPE through tiktoken. Raises ValueError with what to do when its files cannot be had."""
    try:
        gpt2 = tiktoken.get_encoding("gpt2")
    except Exception as error:
        raise ValueError(
            f"GPT-2's vocabulary cannot be fetched ({type(error).__name__}): --tokenizer bpe needs no network, or set "
            "TIKTOKEN_CACHE_DIR to a folder in which tiktoken once stored it") from None
    ranks = sorted(gpt2._mergeable_ranks, key=gpt2._mergeable_ranks.get)
    return tokenizer_state("gpt2", gpt2._pat_str, ranks, ("<|endoftext|>",))


def tokenizer_state(name, pattern, ranks, more=()):
    """A tokenizer as JSON can hold it: bytes as latin-1 text, in order of rank."""
    specials = {text: len(ranks) + i for i, text in enumerate((*more, *SPECIALS))}
    ranks = [token.decode("latin-1") for token in ranks]
    digest = hashlib.sha256(json.dumps([pattern, ranks, specials]).encode()).hexdigest()[:12]
    return {"name": name, "pattern": pattern, "ranks": ranks, "specials": specials, "hash": digest}


def encoding_arguments(state) -> dict:
    """The arguments of tiktoken.Encoding; checkpoints hold them, so a run is usable without its corpus."""
    ranks = {token.encode("latin-1"): rank for rank, token in enumerate(state["ranks"])}
    return {"name": state["name"], "pat_str": state["pattern"], "mergeable_ranks": ranks,
            "special_tokens": state["specials"]}


def pieces(text):
    """Cut a long document at white space, so that no single call to the tokenizer is large."""
    while len(text) > PIECE:
        cut = max(text.rfind(" ", 1, PIECE), text.rfind("\n", 1, PIECE))
        cut = cut if cut > 0 else PIECE
        yield text[:cut]
        text = text[cut:]
    yield text


# ---------------------------------------------------------------------------------------------------------
# Tokens on disk

@dataclass
class Corpus:
    """A prepared corpus: two token streams as memory maps, the tokenizer, and the facts about them."""
    folder: Path
    meta: dict
    tokenizer: dict             # its state; see tokenizer_state
    train: np.ndarray
    val: np.ndarray

    @property
    def vocab_size(self):
        return self.meta["vocab_size"]

    def n_rows(self, split, L):
        return len(getattr(self, split)) // (L - 2)

    def rows(self, split, index, L):
        """Rows [CLS] x_1 .. x_(L-2) [SEP] at `index` (n,) -> (n, L) int64. Raises OSError if the file was cut short."""
        stream, n = getattr(self, split), L - 2
        if os.path.getsize(file := self.folder / f"{split}.bin") < stream.nbytes:       # reading on would be a SIGBUS
            raise OSError(f"{file} was cut short under the run: delete {self.folder} and prepare it again")
        out = np.empty((len(index), L), np.int64)
        out[:, 0], out[:, -1] = self.vocab_size - 8, self.vocab_size - 6            # [CLS], [SEP]
        for row, i in zip(out, index):
            row[1:-1] = stream[i * n:(i + 1) * n]
        return out


class Batches:
    """Rows in an order that is a function of (seed, index): a new permutation each epoch, nothing to save.

    With a fraction below 1 only that share of the rows is used, the same for every seed.
    """
    def __init__(self, corpus: Corpus, L, seed, fraction=1.0):
        self.corpus, self.L, self.seed, self.epoch = corpus, L, seed, None
        self.kept = np.arange(corpus.n_rows("train", L), dtype=np.uint32)
        if fraction < 1:
            self.kept = np.sort(np.random.default_rng(0).permutation(self.kept)[:round(fraction * len(self.kept))])
        self.n = len(self.kept)
        if self.n < 1 or corpus.n_rows("val", L) < 1:
            raise ValueError(f"{corpus.folder} holds {len(corpus.train):,} tokens for training and {len(corpus.val):,} "
                             f"for validation: too few for one row of {L}; take more text or a smaller --block_size")

    def __call__(self, index, size):
        """The rows index * size .. (index + 1) * size of the endless sequence of epochs -> (size, L) int64."""
        return self.corpus.rows("train", [self.row(i) for i in range(index * size, (index + 1) * size)], self.L)

    def row(self, i):
        if i // self.n != self.epoch:
            self.epoch = i // self.n
            self.order = np.random.default_rng((self.seed, self.epoch)).permutation(self.kept)
        return int(self.order[i % self.n])


def prepare(dataset="docs", tokenizer="bpe", cache="cache", text_column="text", books="SamuelYang/bookcorpus") -> Corpus:
    """Text -> tokens on disk, whatever is already there skipped -> Corpus. Raises ValueError, OSError."""
    if dataset == "docs" and (folder := newest_docs(cache, tokenizer)):
        return open_corpus(folder)
    if dataset == "docs":
        print("docs: reading the docstrings of the installed packages (half a minute)", flush=True)
    source = find_source(dataset, text_column, books)
    folder = Path(cache) / f"{source.name}-{tokenizer}"
    if not (folder / "meta.json").exists():
        parts = source.parts()
        folder.mkdir(parents=True, exist_ok=True)
        state_file = folder / "tokenizer.json"
        if not state_file.exists():
            write_json(state_file, gpt2_state() if tokenizer == "gpt2" else bpe_state(parts))
        if source.labels:       # finetune.py --task docs wants the documents with their labels
            documents, _ = parts[0]
            write_json(folder / "docs.json", {"every": source.val_every, "rows": list(zip(source.labels, documents()))})
        tokenize(source, parts, json.loads(state_file.read_text()), folder, dataset)
    return open_corpus(folder)


def newest_docs(cache, tokenizer):
    """A prepared docs corpus of the very packages that are installed now, so that 25 s of reading are saved."""
    for meta in Path(cache).glob(f"docs-*-{tokenizer}/meta.json"):
        if json.loads(meta.read_text())["source"]["versions"] == docs_versions():
            return meta.parent
    return None


def tokenize(source, parts, state, folder, dataset):
    """Documents -> train.bin and val.bin, written aside, then renamed; meta.json last, so it means 'complete'."""
    encoding, sep = tiktoken.Encoding(**encoding_arguments(state)), state["specials"]["[SEP]"]
    vocab_size = len(state["ranks"]) + len(state["specials"])
    dtype = np.uint16 if vocab_size <= 65536 else np.uint32
    counts, n_bytes, example, document = {"train": 0, "val": 0}, 0, None, -1
    aside = {split: folder / f"{split}.{os.getpid()}.tmp" for split in counts}
    files = {split: open(aside[split], "wb") for split in counts}
    bar = tqdm(total=sum(size for _, size in parts) or None, unit="B", unit_scale=True, desc=f"tokens: {dataset[-30:]}")
    every_text = (text for documents, _ in parts for text in documents())
    with bar, files["train"], files["val"], removed(*aside.values()):
        for document, (text, ids) in enumerate(encoded((text for text in every_text if text.strip()), encoding)):
            split = "val" if document % source.val_every == 1 else "train"      # the second one already is
            stream = np.fromiter(itertools.chain(*ids, [sep]), dtype)
            stream.tofile(files[split])
            counts[split] += len(stream)
            example = stream[:24].tolist() if document == 0 else example
            bar.update(len(text.encode("utf-8", "replace")))
            n_bytes += len(text)
        if min(counts.values()) == 0:
            raise ValueError(f"{dataset}: {document + 1} documents with text in it; at least 2 are needed, one to train on "
                             "and one to validate on")
        for split in counts:
            files[split].flush()
            os.replace(aside[split], folder / f"{split}.bin")
    meta = {"dataset": dataset, "source": source.about, "tokenizer": state["name"], "tokenizer_hash": state["hash"],
            "vocab_size": vocab_size, "dtype": np.dtype(dtype).name, "documents": document + 1, "characters": n_bytes,
            "tokens": counts}
    write_json(folder / "meta.json", meta)
    print(f"tokens: {document + 1:,} documents, {counts['train']:,} tokens to train on, {counts['val']:,} to validate on")
    print(f"the first ones: {encoding.decode(example)!r}")


def encoded(texts, encoding):
    """(text, the ids of its pieces) in order. While all cores encode, the next texts are read and decompressed."""
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        waiting, size = collections.deque(), 0
        for text in itertools.chain(texts, [None]):             # None: the end
            if text is not None:
                waiting.append((text, [pool.submit(encoding.encode_ordinary, piece) for piece in pieces(text)]))
                size += len(text)
            while waiting and (size > AHEAD or text is None):
                first, jobs = waiting.popleft()
                size -= len(first)
                yield first, [job.result() for job in jobs]


@contextmanager
def removed(*files):
    """Whatever happens, these are not there afterwards."""
    try:
        yield
    finally:
        for file in files:
            file.unlink(missing_ok=True)


def open_corpus(folder) -> Corpus:
    """A prepared folder -> Corpus. Raises ValueError when it is damaged."""
    try:
        meta, state = (json.loads((folder / name).read_text()) for name in ("meta.json", "tokenizer.json"))
    except ValueError as error:
        raise ValueError(f"{folder} is damaged ({error}): delete it and prepare it again") from None
    maps = []
    for split in ("train", "val"):
        stream = np.memmap(folder / f"{split}.bin", meta["dtype"], "r")
        if len(stream) != meta["tokens"][split]:
            raise ValueError(f"{folder / split}.bin holds {len(stream):,} tokens, not {meta['tokens'][split]:,}: "
                             f"delete {folder} and prepare it again")
        maps.append(stream)
    return Corpus(folder, meta, state, *maps)


def write_json(file, value):
    aside = Path(f"{file}.{os.getpid()}.tmp")
    aside.write_text(json.dumps(value))
    os.replace(aside, file)


# ---------------------------------------------------------------------------------------------------------

class Parser(argparse.ArgumentParser):
    """--help that reads like a page of a manual: the module's docstring, then a flag a line. A mistake is one line."""

    def __init__(self, script, doc, epilog=None):
        style = lambda prog: argparse.RawDescriptionHelpFormatter(prog, max_help_position=30, width=118)    # noqa: E731
        super().__init__(usage=f"python {script} [flags]", description=doc, epilog=epilog, formatter_class=style,
                         allow_abbrev=False)

    def error(self, message):
        print(f"error: {message}", file=sys.stderr)
        sys.exit(2)


def add_data_flags(parser):
    parser.add_argument("--dataset", help="docs, wikibooks, a glob of files ('books/*.jsonl.xz'), or a hub name[:config]")
    parser.add_argument("--tokenizer", choices=["bpe", "gpt2"], help="bpe: trained on the corpus; gpt2: through tiktoken")
    parser.add_argument("--text_column", default="text", help="the column that holds the text (default: %(default)s)")
    parser.add_argument("--books_dataset", default="SamuelYang/bookcorpus",
                        help="hub mirror of BookCorpus for --dataset wikibooks (default: %(default)s)")
    parser.add_argument("--cache", default="cache", help="folder for prepared data (default: %(default)s)")


def main():
    parser = Parser("data.py", __doc__)
    add_data_flags(parser)
    args = parser.parse_args()
    args.dataset = args.dataset or "docs"
    args.tokenizer = args.tokenizer or ("bpe" if args.dataset == "docs" else "gpt2")
    with one_line_errors():
        corpus = prepare(args.dataset, args.tokenizer, args.cache, args.text_column, args.books_dataset)
    print(f"ready: {corpus.folder}, {corpus.vocab_size:,} ids, {len(corpus.train) / 1e6:.1f} M tokens to train on, "
          f"{len(corpus.val) / 1e6:.2f} M to validate on")
    flags = [f"--{name} {shlex.quote(str(value))}" for name, value in vars(args).items() if value != parser.get_default(name)]
    print("next: python train.py " + " ".join(flags))


if __name__ == "__main__":
    main()
