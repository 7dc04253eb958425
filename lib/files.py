"""Files: atomic writes, checked reads, locks, checkpoints."""

import contextlib
import json
import os
from pathlib import Path

import filelock  # comes with torch and datasets
import torch

from lib.config import UserError


@contextlib.contextmanager
def atomic_write(file):
    """Open a temporary file for writing; when the block ends, sync and rename it to `file`, so that
    `file` is complete at any moment. If the block raises, `file` is left as it was."""
    temporary = Path(f"{file}.tmp")
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
    """torch.save, atomically. Raises OSError."""
    try:
        with atomic_write(file) as handle:
            torch.save(state, handle)
    except (OSError, RuntimeError) as error:  # a full disk; torch may raise a RuntimeError
        raise OSError(f"{file} cannot be written: {error}") from None


def append_jsonl(file, row):
    """Append an object as a line of its own, even if a crash has cut the last line short."""
    with open(file, "a+b") as handle:
        handle.seek(max(0, handle.tell() - 1))
        torn = handle.read() not in (b"", b"\n")
        handle.write(b"\n" * torn + json.dumps(row).encode() + b"\n")


def read_jsonl(file):
    """-> the objects of a JSON-lines file. A line that a crash has cut short is left out."""
    rows = []
    if Path(file).exists():
        for line in Path(file).read_text(encoding="utf-8").splitlines():
            try:
                rows.append(json.loads(line))
            except ValueError:
                print(f"{file}: skipped a damaged line")
    return rows


def read_json(file):
    """-> the object in a JSON file. Raises UserError if it is not JSON."""
    try:
        return json.loads(Path(file).read_text(encoding="utf-8-sig"))
    except ValueError as error:  # not UTF-8, or not JSON
        raise UserError(f"{file} is damaged ({error})") from None


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
    file = Path(path).expanduser()
    if file.is_dir():
        file /= "ckpt.pt"
    if not file.exists():
        raise UserError(f"no checkpoint at {file}")
    try:
        checkpoint = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # a truncated archive, another kind of file, refused code
        kind = type(error).__name__
        raise UserError(f"{file} is not a readable checkpoint ({kind})") from None
    if not isinstance(checkpoint, dict) or not {"config", "model", "tokenizer"} <= set(checkpoint):
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
