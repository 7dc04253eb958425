"""Files: atomic writes, checked reads, locks, checkpoints."""

import contextlib
import errno
import glob
import json
import os
from pathlib import Path

import filelock  # comes with torch and datasets
import torch

from lib.config import RunFailure, UserError

DAMAGE = (AttributeError, KeyError, TypeError, ValueError)  # of content that is not as expected


@contextlib.contextmanager
def opening(file, *damage):
    """Files and folders are opened, read, written and made inside this block: an OSError becomes a
    RunFailure if the disk is full or broken, else a UserError (a wrong path, no permission), and so
    does an error of the types `damage`."""
    try:
        yield
    except UserError:
        raise
    except OSError as error:
        failed = error.errno in (None, errno.ENOSPC, errno.EDQUOT, errno.EIO)  # NumPy: None
        kind = RunFailure if failed else UserError
        raise kind(f"{file}: {error.strerror or error}") from None
    except damage as error:
        reason = f"no {error}" if isinstance(error, KeyError) else error
        raise UserError(f"{file} is damaged or has another format ({reason})") from None


def make_folder(path):
    """Make a folder, and the folders that it is in, if they do not exist. Raises UserError."""
    with opening(path):
        Path(path).mkdir(parents=True, exist_ok=True)


def expand(pattern):
    """A path or a glob pattern -> sorted list of the paths that it stands for. As much of its
    beginning as exists is taken literally: lr[1e-3] may be a folder."""
    parts = Path(pattern).parts
    n = len(parts)
    while n and not os.path.exists(os.path.join(*parts[:n])):
        n -= 1
    literal = glob.escape(os.path.join("", *parts[:n]))
    return sorted({*glob.glob(os.path.join(literal, *parts[n:]), recursive=True)})


@contextlib.contextmanager
def atomic_write(file):
    """Open a temporary file for writing; when the block ends, sync and rename it to `file`, so that
    `file` is complete at any moment. If the block raises, `file` is left as it was."""
    temporary = Path(f"{file}.tmp")
    with opening(file):
        try:
            with open(temporary, "wb") as handle:
                yield handle
                handle.flush()
                os.fsync(handle.fileno())
            os.replace(temporary, file)
        finally:
            temporary.unlink(missing_ok=True)


def write_json(file, value):
    with atomic_write(file) as handle:
        handle.write(json.dumps(value).encode())


def write_checkpoint(file, state):
    """torch.save, atomically. Raises UserError, RunFailure."""
    try:
        with atomic_write(file) as handle:
            torch.save(state, handle)
    except RuntimeError as error:  # torch's own, on a full disk
        raise RunFailure(f"{file} cannot be written: {error}") from None


def append_jsonl(file, row):
    """Append an object as a line of its own, even if a crash has cut the last line short."""
    with opening(file), open(file, "a+b") as handle:
        handle.seek(max(0, handle.tell() - 1))
        torn = handle.read() not in (b"", b"\n")
        handle.write(b"\n" * torn + json.dumps(row).encode() + b"\n")


def read_jsonl(file):
    """-> the objects of a JSON-lines file. A line that a crash has cut short is left out, and so is
    an empty one (of two processes that have both seen such a line)."""
    rows = []
    with opening(file):
        lines = Path(file).read_bytes().splitlines() if os.path.exists(file) else []
    for line in filter(None, lines):
        try:
            rows.append({**json.loads(line)})
        except (TypeError, ValueError):  # not an object; not UTF-8, or not JSON
            print(f"{file}: skipped a damaged line")
    return rows


def unique(pairs):
    """(name, value) of each column -> dictionary. Raises ValueError if two have the same name, as
    one would silently replace the other. (Spreadsheets add columns without a name.)"""
    row = {}
    for name, value in pairs:
        if name and name in row:
            raise ValueError(f"two columns are named {name!r}")
        row[name] = value
    return row


def read_json(file):
    """-> the object in a JSON file. Raises UserError if it is not JSON."""
    with opening(file, *DAMAGE):
        return json.loads(Path(file).read_text("utf-8-sig"), object_pairs_hook=unique)


@contextlib.contextmanager
def lock(folder, doing="training", name=".lock", wait=False):
    """Hold an exclusive lock on a folder for the length of the block. If another process holds it,
    wait for it, or without `wait` raise UserError."""
    file = filelock.FileLock(Path(folder, name))
    busy = f"another process is {doing} in {folder}"
    try:
        file.acquire(blocking=False)
    except filelock.Timeout:
        if not wait:
            raise UserError(f"{busy}: wait for it, or use another --out_dir") from None
        print(f"{busy}: waiting for it")
        file.acquire()
    except (OSError, NotImplementedError) as error:  # some network file systems have no locks
        print(f"no lock on {folder} ({error}): do not start a second run there")
    try:
        yield
    finally:
        file.release()


def read_checkpoint(path) -> dict:
    """A run folder or a checkpoint file -> its dictionary, with the weights on the CPU. Raises
    UserError."""
    file = os.path.expanduser(path)
    if os.path.isdir(file):
        file = os.path.join(file, "ckpt.pt")
    if not os.path.exists(file):
        raise UserError(f"no checkpoint at {file}")
    try:
        checkpoint = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # a truncated archive, another kind of file, refused code
        kind = type(error).__name__
        raise UserError(f"{file} is not a readable checkpoint ({kind})") from None
    needed = {"config", "data", "model", "step", "tokenizer"}
    if not isinstance(checkpoint, dict) or not needed <= set(checkpoint):
        raise UserError(f"{file} is not a checkpoint of this project")
    return checkpoint


def newest_run():
    """-> the folder of the newest checkpoint under out/. Raises UserError."""
    file = max(Path("out").glob("*/ckpt.pt"), key=os.path.getmtime, default=None)
    if file is None:
        raise UserError(
            "no checkpoint under out/: pre-train a model first (python train.py), or give its path"
        )
    return str(file.parent)
