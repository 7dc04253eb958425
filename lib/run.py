"""The folder of a pre-training run: checkpoint, configuration, tokenizer and log; and what is
printed about it."""

import contextlib
import json
import os
import shlex
import signal
from pathlib import Path

from lib.baselines import KNOWS, beaten
from lib.files import (
    atomic_write,
    hardlink,
    lock,
    read_checkpoint,
    read_jsonl,
    write_checkpoint,
    write_json,
)


class RunFolder:
    """ckpt.pt, config.json, tokenizer.json and log.jsonl of a run.

    Raises ValueError if the folder holds a checkpoint and `resume` is not given. `checkpoint` is
    what to resume from, or None.
    """

    def __init__(self, path, resume):
        self.path, self.checkpoint = Path(path), None
        if (self.path / "ckpt.pt").exists():
            if not resume:
                raise ValueError(
                    f"{path} already holds a run: resume it with --resume, or choose another "
                    "--out_dir"
                )
            self.checkpoint = read_checkpoint(path)
        elif resume:
            print(f"--resume: there is no checkpoint in {path}, so this run starts at step 0")

    def check_identity(self, identity):
        """Raise ValueError if the arguments that determine the result differ from those of the
        checkpoint."""
        then = self.checkpoint["identity"]
        differ = [
            f"{key} was {then.get(key)}, is {value}"
            for key, value in identity.items()
            if then.get(key) != value
        ]
        if differ:
            raise ValueError(
                f"{self.path} holds another run: {'; '.join(differ)}; use the same flags, or "
                "another --out_dir"
            )

    @contextlib.contextmanager
    def open(self, run_info, tokenizer):
        """Lock the folder for the length of the block, and write what describes the run. Log lines
        after the checkpoint are dropped: these steps are repeated."""
        self.path.mkdir(parents=True, exist_ok=True)
        with lock(self.path):
            step = self.checkpoint["step"] if self.checkpoint else 0
            rows = [row for row in read_jsonl(self.path / "log.jsonl")[1:] if row["step"] <= step]
            lines = [json.dumps(row) + "\n" for row in [run_info, *rows]]
            with atomic_write(self.path / "log.jsonl") as handle:
                handle.write("".join(lines).encode())
            write_json(self.path / "config.json", run_info)
            write_json(self.path / "tokenizer.json", tokenizer)
            yield

    def log(self, row):
        with open(self.path / "log.jsonl", "a") as handle:
            handle.write(json.dumps(row) + "\n")

    def save(self, state, keep=False):
        """Replace ckpt.pt; keep: also as ckpt_<step>.pt, which is written first, since a resumed
        run continues after the step of ckpt.pt."""
        if keep:
            kept = self.path / f"ckpt_{state['step']}.pt"
            write_checkpoint(kept, state)
            hardlink(kept, self.path / "ckpt.pt")
        else:
            write_checkpoint(self.path / "ckpt.pt", state)


@contextlib.contextmanager
def catch_signals():
    """-> a dictionary whose `number` is set once SIGTERM or SIGINT arrives, so that a run can save
    and stop after its step; a second signal exits at once."""
    received = {"number": None}

    def handler(number, frame):
        if received["number"]:
            os._exit(128 + number)
        received["number"] = number

    previous = {n: signal.signal(n, handler) for n in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield received
    finally:
        for number, old in previous.items():
            signal.signal(number, old)


def command_line(flags):
    """{flag: value} -> the command of train.py that gives these flags."""
    words = ["python", "train.py"]
    for name, value in flags.items():
        if value is False:
            words.append(f"--no-{name}")
        else:
            values = value if isinstance(value, (tuple, list)) else [value]
            words.append(f"--{name}")
            words += [str(x) for x in values if x is not True]
    return shlex.join(words)


def format_row(row, names, steps, baselines):
    """A row of the log as a line of text. names: the objectives' names."""
    text = f"step {row['step']:>6}/{steps}  loss {row['loss']:.4f}"
    if len(names) > 1:
        text += f" ({', '.join(f'{name} {row[name]:.3f}' for name in names)})"
    text += f"  lr {row['lr']:.1e}  {row['ms_per_step']:.0f} ms/step"
    text += f"  {row['tokens_per_s'] / 1e3:.1f}k tokens/s"
    if "mfu" in row:
        text += f"  MFU {100 * row['mfu']:.0f}%"
    text += f"  {row['peak_mem_mb'] / 1024:.1f} GB"
    if "val_loss" in row:
        text += f"  val_loss {row['val_loss']:.4f}"
        for name in names:
            if passed := beaten(name, row[f"val_{name}"], baselines):
                text += f" ({passed[1] - row[f'val_{name}']:.3f} below {passed[0]})"
    return text


def print_baselines(baselines):
    if baselines:  # a user-defined objective may have none
        print("baselines (loss in nats of a predictor that knows only ...):")
    for name, value in baselines.items():
        print(f"  {name:16}{value:6.3f}  {KNOWS[name.rpartition('.')[2]]}")


def print_summary(folder, row, names, baselines, seconds):
    """The end of a run: its validation losses beside their baselines, and what to do next."""
    print(f"finished in {seconds / 60:.1f} minutes; checkpoint: {folder}/ckpt.pt")
    for name in names:
        text = f"{name}: validation loss {row[f'val_{name}']:.3f} nats"
        if passed := beaten(name, row[f"val_{name}"], baselines):
            text += f", below the baseline {passed[0]} ({passed[1]:.3f})"
        print(text)
    run = shlex.quote(str(folder))
    print(
        f"next: python -m tools.sample --ckpt {run}         (try it on your own text)\n"
        f"      python -m tools.probe --ckpt {run}          (how it uses positions and tokens)\n"
        f"      python finetune.py --task docs --ckpt {run}"
    )
