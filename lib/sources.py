"""Where text comes from: the documentation of installed packages, local files, the hub.

Every source gives documents as an iterator of strings, so a corpus is never in memory as a whole.
"""

import ast
import bz2
import contextlib
import csv
import gzip
import hashlib
import importlib.metadata
import importlib.util
import inspect
import itertools
import json
import lzma
import os
import platform
import re
import sysconfig
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

from lib.config import UserError
from lib.files import expand, unique

DOCS_LIBRARIES = ("python", "torch", "numpy", "pandas", "datasets")
BOOKS_ROWS = 1000  # mirrors of BookCorpus have one sentence per row: this many make a document
TEXT_CHUNK = 100_000  # a document of a text file is cut at about this many characters


class Part(NamedTuple):
    """One file or data set of a source."""

    documents: Callable  # () -> iterator of texts; None stands for a row without text
    size: float  # approximate number of characters; 0: unknown


class Source(NamedTuple):
    name: str  # unique to the content; names the folder in the cache
    about: dict  # goes into meta.json
    parts: Callable  # () -> list of Part; called only to prepare, because the hub needs the network
    val_every: int = 50  # every n-th document, beginning with the second, is for validation
    docs: list | None = None  # [(library, text)], for the fine-tuning task `docs`


def find_source(dataset, text_column, books_dataset) -> Source:
    """dataset: docs, wikibooks, a file, a glob of files, or the name[:config] of a hub data set.

    Raises UserError.
    """
    if dataset == "docs":
        return docs_source()
    if files := list_files(dataset):
        return files_source(files, text_column)
    if os.path.isdir(dataset):
        raise UserError(f"--dataset {dataset} is a folder: name its files, '{dataset}/*.jsonl'")
    if any(file_kind(dataset)) or not re.fullmatch(r"\w[\w.-]*(/[\w.-]+)?(:[\w.-]+)?", dataset):
        raise UserError(
            f"no file with text in it matches {dataset!r}; --dataset takes docs, wikibooks, "
            "'path/*.jsonl', a prepared folder or the name of a hub data set"
        )
    return hub_source(dataset, text_column, books_dataset)


def short_hash(value):
    """-> 12 hex digits of the SHA-256 of a text, or of the JSON of another value."""
    text = value if isinstance(value, str) else json.dumps(value)
    return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:12]


# --------------------------------------------------------------------------------------------------
# The docs corpus


def docs_source():
    print("docs: reading the docstrings of the installed packages (half a minute)")
    library_of = docs_documents()
    digest = short_hash("\0".join(library_of))
    part = Part(partial(iter, library_of), sum(map(len, library_of)))
    docs = [(library, text) for text, library in library_of.items()]
    about = {"versions": docs_versions(), "hash": digest}
    return Source(f"docs-{digest}", about, lambda: [part], 10, docs)


def docs_documents():
    """-> {text: library}: about 12 MB of English from the docstrings of the installed packages.
    The files are parsed, never imported."""
    library_of = {}
    for library, folder in docs_folders().items():
        found = len(library_of)
        for file in sorted(folder.rglob("*.py")):
            folders = file.relative_to(folder).parts[:-1]
            if {"tests", "test", "idlelib", "site-packages", "dist-packages"} & set(folders):
                continue
            try:
                tree = ast.parse(file.read_bytes())
            except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
                continue  # a dangling link, a template, a very deep expression
            for text in docstrings(tree):
                if len(text) >= 100:
                    library_of.setdefault(text, library)
        if len(library_of) == found:  # compiled (.pyc), or in a zip
            print(f"docs: no docstrings of {library}, whose source is not in {folder}")
    with contextlib.suppress(ModuleNotFoundError):  # some systems leave it out
        from pydoc_data.topics import topics  # Python's language reference

        for text in topics.values():
            library_of.setdefault(text, "python")
    return library_of


def docs_folders():
    folders = {"python": Path(sysconfig.get_path("stdlib"))}
    for library in DOCS_LIBRARIES[1:]:  # a folder without __init__.py has no origin
        [folder, *_] = importlib.util.find_spec(library).submodule_search_locations
        folders[library] = Path(folder)
    return folders


def docs_versions():
    versions = {name: importlib.metadata.version(name) for name in DOCS_LIBRARIES[1:]}
    return {"python": platform.python_version(), **versions}


def docstrings(tree):
    """The docstrings of a source file, and the texts that it passes to add_docstr, with which torch
    documents its C functions."""
    for node in ast.walk(tree):
        texts = []
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            texts = [ast.get_docstring(node)]
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "").startswith("add_docstr"):
            texts = [arg.value for arg in node.args if isinstance(getattr(arg, "value", None), str)]
        if texts and texts[0]:
            yield inspect.cleandoc(texts[0])


# --------------------------------------------------------------------------------------------------
# Local files


def list_files(pattern):
    """A file name or a glob pattern -> sorted list of the files that it matches, without hidden and
    empty files."""
    return [name for name in expand(pattern) if os.path.isfile(name) and os.path.getsize(name)]


def files_source(files, text_column):
    """Local files -> Source, identified by their paths, sizes and times."""
    stats, parts = [], []
    for file in files:
        stat = os.stat(file)
        stats.append((os.path.realpath(file), stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns))
        kind, compression = file_kind(file)
        ratio = 3.5 if compression or kind == ".parquet" else 1  # compression ratio of English text
        parts.append(Part(partial(file_documents, file, text_column), ratio * stat.st_size))
    digest = short_hash([stats, text_column])
    names = [os.path.basename(file) for file in files]
    about = {"files": names, "text_column": text_column, "hash": digest}
    return Source(f"files-{digest}", about, lambda: parts)


def file_kind(name):
    """The kind and the compression of a file, by its name's ending: (".jsonl", ".xz"); "" if
    unknown, which is read as text, or none."""
    path = Path(name.lower())
    compression = path.suffix if path.suffix in OPENERS else ""
    kind = Path(path.stem).suffix if compression else path.suffix
    return kind if kind in READERS else "", compression


def file_documents(file, text_column):
    """The texts of a local file, None for a row without text. Raises UserError."""
    name = file
    if not file_kind(file)[0]:  # tell the user, in case it is not text
        name += f" (read as text: the ending is none of {', '.join(READERS)})"
    return column(readable(file_rows(file, text_column), name), text_column, file)


def file_rows(file, text_column):
    """Yield the rows of a local file: dictionaries, or the documents of a text file."""
    kind, compression = file_kind(file)
    if kind == ".parquet":
        import pyarrow.parquet  # comes with datasets

        parquet = pyarrow.parquet.ParquetFile(file)
        names = parquet.schema_arrow.names
        unique(zip(names, names))
        columns = [text_column] if text_column in names else None
        for batch in parquet.iter_batches(1000, columns=columns):
            yield from batch.to_pylist()
    else:
        with OPENERS.get(compression, open)(file, "rt", encoding="utf-8-sig") as lines:
            yield from READERS.get(kind, text_rows)(lines)


def text_rows(lines):
    """Documents of a plain text file: they are separated by empty lines, and cut if longer than
    TEXT_CHUNK."""
    document = ""
    for line in iter(partial(lines.readline, TEXT_CHUNK), ""):
        if "\0" in line:
            raise ValueError("not text: it has a null character")
        if document and (len(document) >= TEXT_CHUNK or not line.strip()):
            yield document
            document = ""
        if document or line.strip():  # without the empty line before it
            document += line
    if document:
        yield document


def json_rows(lines):
    """One row per line, or one list of rows."""
    load = partial(json.loads, object_pairs_hook=unique)
    for number, line in enumerate(lines):
        if number == 0 and line.lstrip().startswith("["):
            yield from load(line + "".join(lines))
        elif line.strip():
            yield load(line)


def csv_rows(lines):
    """Rows of a CSV file with a header. The parser is strict, because a lenient one lets a stray
    quote swallow the rows after it."""
    csv.field_size_limit(2**31 - 1)  # a document may be longer than the default of 131,072
    reader = csv.reader(itertools.dropwhile(str.isspace, lines), strict=True)
    header = next(reader, [])
    for row in filter(None, reader):
        if len(row) > len(header):
            raise ValueError("a row has more columns than the header")
        yield unique(zip(header, row))


OPENERS = {".gz": gzip.open, ".xz": lzma.open, ".bz2": bz2.open}
READERS = {
    ".txt": text_rows,
    ".md": text_rows,
    ".json": json_rows,
    ".jsonl": json_rows,
    ".csv": csv_rows,
    ".parquet": None,
}


def readable(rows, name):
    """Pass rows on. If a parser, a decompressor or the hub raises one of its many kinds of errors,
    raise a UserError that begins with `name`."""
    n = 0
    try:
        for row in rows:
            yield row
            n += 1
    except Exception as error:
        reason = str(error) or type(error).__name__
        raise UserError(f"{name} cannot be read after row {n}: {reason}") from None


def column(rows, name, where):
    """Yield the texts of one column, None for a row without text; a row may also be a text itself.
    Raises UserError if there is no such column, or no text in it."""

    def value(row):
        return row.get(name) if isinstance(row, dict) else row

    first = list(itertools.islice(rows, 100))
    if first and all(isinstance(row, dict) and name not in row for row in first):
        columns = ", ".join(map(str, first[0]))
        raise UserError(f"{where}: no column {name!r}, only {columns}: name one with --text_column")
    kinds = {type(value(row)).__name__ for row in first} - {"NoneType"}
    if kinds and "str" not in kinds:
        held = f"column {name!r} holds {', '.join(sorted(kinds))}, not text"
        raise UserError(f"{where}: {held}: name another one with --text_column")
    for text in map(value, itertools.chain(first, rows)):
        yield text if isinstance(text, str) and text.strip() else None


# --------------------------------------------------------------------------------------------------
# The hub, through `datasets`


def hub_source(dataset, text_column, books_dataset):
    name, _, config = dataset.partition(":")
    sets = [(name, config or None, 1)]
    if dataset == "wikibooks":
        sets = [("wikimedia/wikipedia", "20231101.en", 1), (books_dataset, None, BOOKS_ROWS)]
    about = {"hub": sets, "text_column": text_column}
    slug, digest = re.sub(r"\W+", "-", dataset), short_hash([sets, text_column])
    return Source(
        f"hub-{slug}-{digest}", about, lambda: [hub_part(*each, text_column) for each in sets]
    )


def hub_part(name, config, rows_per_document, text_column):
    """A streamed data set -> Part. Prints what will be downloaded. Raises UserError."""
    from datasets import load_dataset, load_dataset_builder

    check_hub()
    try:
        info = load_dataset_builder(name, config).info
    except Exception as error:
        raise UserError(
            f"cannot open the hub data set {name!r} ({type(error).__name__}): check its name and "
            "the network. --dataset docs needs no network, --dataset 'path/*.jsonl' takes files"
        ) from None
    size, download = info.dataset_size or 0, info.download_size or 0
    print(
        f"{name}: {download / 1e9:.1f} GB to stream, {size / 1e9:.1f} GB of text, about "
        f"{size / 2.2e9:.1f} GB on disk as tokens; {size / 1e7 / 60:.0f} minutes at 10 MB/s"
    )

    def documents():
        rows = load_dataset(name, config, split="train", streaming=True)
        texts = column(readable(rows, name), text_column, name)
        if rows_per_document == 1:
            return texts
        texts = filter(None, texts)
        return iter(lambda: "\n".join(itertools.islice(texts, rows_per_document)), "")

    return Part(documents, size)


def check_hub():
    """Switch the hub's libraries to offline mode if the hub does not answer: they would otherwise
    retry for minutes. In offline mode they use what they have stored, or fail at once."""
    import datasets
    from huggingface_hub import constants, utils

    if not constants.HF_HUB_OFFLINE:
        try:
            utils.get_session().head(constants.ENDPOINT, timeout=15)
        except Exception:
            constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
