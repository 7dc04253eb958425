"""The folder of a pre-training run: checkpoint, configuration and log; and what is printed about
it."""

import contextlib
import json
import math
import os
import shlex
import signal
from pathlib import Path

import torch.nn as nn

from lib.baselines import KNOWS, compare
from lib.config import UserError
from lib.files import (
    append_jsonl,
    atomic_write,
    lock,
    make_folder,
    read_checkpoint,
    read_jsonl,
    write_checkpoint,
    write_json,
)
from lib.weights import load_strict


class RunFolder:
    """ckpt.pt (with the tokenizer), config.json and log.jsonl of a run.

    Raises UserError if the folder holds a checkpoint and `resume` is not given, or one that cannot
    be resumed. `checkpoint` is what to resume from, or None.
    """

    def __init__(self, path, resume):
        self.path, self.checkpoint = Path(path), None
        if os.path.exists(self.path / "ckpt.pt"):
            if not resume:
                raise UserError(
                    f"{path} already holds a run: resume it with --resume, or choose another "
                    "--out_dir"
                )
            self.checkpoint = read_checkpoint(path)
            if not {"identity", "optimizer", "scaler"} <= self.checkpoint.keys():
                raise UserError(
                    f"{path}/ckpt.pt has weights, but no state of training (it is a copy for a "
                    "page, an imported or a fine-tuned model): start from it with --init_from"
                )
        elif resume:
            print(f"--resume: there is no checkpoint in {path}, so this run starts at step 0")

    def load(self, identity, model, optimizer, scaler):
        """Load the state of the checkpoint -> its step. Raises UserError if `identity`, the
        dictionary of what determines the result, differs from the checkpoint's."""
        # Older checkpoints have the tokenizer's hash only among the data.
        then = {"the tokenizer": self.checkpoint["data"]["tokenizer_hash"]}
        then |= self.checkpoint["identity"]
        differ = [
            f"{key} was {then.get(key)}, is {value}"
            for key, value in identity.items()
            if then.get(key) != value
        ]
        if differ:
            raise UserError(
                f"{self.path} holds another run: {'; '.join(differ)}; use the same flags and text, "
                "or another --out_dir"
            )
        load_strict(model, self.checkpoint["model"], self.path)
        optimizer.load_state_dict(self.checkpoint["optimizer"])
        if self.checkpoint["scaler"]:  # empty unless it was fp16
            scaler.load_state_dict(self.checkpoint["scaler"])
        step, self.checkpoint = self.checkpoint["step"], None  # frees its memory
        return step

    @contextlib.contextmanager
    def open(self, step, run_info):
        """Lock the folder for the length of the block, and write what describes the run. Log lines
        after `step`, at which it begins or resumes, are dropped: these steps are repeated."""
        make_folder(self.path)
        with lock(self.path):
            rows = read_jsonl(self.path / "log.jsonl")
            rows = [row for row in rows if row.get("step", math.inf) <= step]  # not the first one
            lines = [json.dumps(row) + "\n" for row in [run_info, *rows]]
            with atomic_write(self.path / "log.jsonl") as handle:
                handle.write("".join(lines).encode())
            write_json(self.path / "config.json", run_info)
            yield

    def log(self, row):
        append_jsonl(self.path / "log.jsonl", row)

    def save(self, state, keep=False):
        """Replace ckpt.pt; keep: also write ckpt_<step>.pt, and that first, since a resumed run
        continues after the step of ckpt.pt."""
        if keep:
            write_checkpoint(self.path / f"ckpt_{state['step']}.pt", state)
        write_checkpoint(self.path / "ckpt.pt", state)


def clip_and_step(model, optimizer, scaler):
    """Clip the gradients, update the weights, and drop the gradients -> their norm before clipping.
    The scaler does nothing except in fp16, where it skips a step with a gradient that is not
    finite."""
    scaler.unscale_(optimizer)
    grad_norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    return grad_norm


def schedule(step, steps, warmup):
    """Fraction of the peak learning rate: linear warm-up, then linear decay, which reaches 0 after
    the last step."""
    return min((step + 1) / max(1, warmup), (steps - step) / max(1, steps - warmup))


def broken(bad, scaler):
    """Whether training cannot go on. bad () bool: some step had a loss or gradient that is not
    finite. With fp16 that is normal at first: the scaler skips such a step and halves its scale,
    and training cannot go on once the scale is below 1. (A CPU-GPU sync.)"""
    return scaler.get_scale() < 1 if scaler.is_enabled() else bool(bad)


@contextlib.contextmanager
def catch_signals():
    """-> a dictionary whose `number` is set once SIGINT, SIGTERM or SIGHUP (a closed terminal)
    arrives, so that a run can save and stop after its step; a second SIGINT or SIGTERM exits at
    once. Signals that are ignored (nohup) stay ignored."""
    received, previous = {"number": None}, {}

    def handler(number, frame):
        if received["number"] and number in (signal.SIGINT, signal.SIGTERM):
            os._exit(128 + number)
        received["number"] = number

    numbers = {signal.SIGINT, signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGINT)}
    for number in numbers:  # Windows has no SIGHUP
        if signal.getsignal(number) != signal.SIG_IGN:
            previous[number] = signal.signal(number, handler)
    try:
        yield received
    finally:
        for number, old in previous.items():
            signal.signal(number, old)


def format_row(row, names, steps, baselines):
    """A row of the log as a line of text. names: the objectives' names."""
    text = f"step {row['step']:>6}/{steps}  loss {row['loss']:.4f}"
    if len(names) > 1:
        text += f" ({', '.join(f'{name} {row[name]:.3f}' for name in names)})"
    text += f"  lr {row['lr']:.1e}  {row['ms_per_step']:.0f} ms/step"
    text += f"  {row['tokens_per_s'] / 1e3:.1f}k tokens/s"
    if "mfu" in row:
        text += f"  MFU {100 * row['mfu']:.0f}%"
    if row["peak_mem_mb"]:
        text += f"  {row['peak_mem_mb'] / 1024:.1f} GB"
    if "val_loss" in row:
        text += f"  val_loss {row['val_loss']:.4f}"
        for name in names:
            if sides := compare(name, row[f"val_{name}"], baselines):
                text += f" ({name} {sides})" if len(names) > 1 else f" ({sides})"
    return text


def print_start(run_info, model, sequences, epochs, reason, lines):
    """What a run is. sequences: per step; reason: why its dtype was chosen; lines: more to say."""
    args, (device, dtype) = run_info["args"], run_info["precision"]
    n_parameters = sum(p.numel() for p in model.parameters())
    print(
        f"{args['pe']}, {args['objective']}: {n_parameters / 1e6:.2f} M parameters; "
        f"{args['steps']:,} steps of {sequences} sequences of {args['block_size']} tokens, "
        f"{epochs:.1f} epochs"
    )
    print(f"{device}, {dtype} ({reason})")
    if run_info["baselines"]:  # a user-defined objective may have none
        print("baselines (loss in nats of a predictor that knows only ...):")
    for name, value in run_info["baselines"].items():
        print(f"  {name:16}{value:6.3f}  {KNOWS[name.rpartition('.')[2]]}")
    for name, objective in model.objectives.items():
        if objective.learns_after and args["objective"] == name and not args["init_from"]:
            print(f"{name} alone may not use its tokens: try {start_from(objective)}")
    print(*lines, sep="\n")


def start_from(objective):
    return f"--init_from a run of {objective.learns_after}"


# What is left out is not used, or hardly, if the loss rises by fewer nats. (After a run of demo it
# rises a little with `abs`, whose loss is hardly lower than that of `none`.)
USED, CLEARLY = 0.01, 0.2


def remedy(objective, args, pairs):
    """What to try if a model does not use its tokens (position objectives) or their order (mlm)."""
    decisive = ("block_size", "norm", "n_head", "pos_rate")
    differ = [f"--{key} {pairs[key]}" for key in decisive if getattr(args, key) != pairs[key]]
    if objective.kind == "position" and differ:
        return f"--preset pairs: {' '.join(differ)}"
    if objective.learns_after and not args.init_from:
        return start_from(objective)
    if args.pe == "none":
        return "another --pe: none has no positions"
    if objective.kind == "position":
        return "more --steps, or " + ("another --seed" if args.pe == "tupe_r" else "--pe tupe_r")
    if args.pe in ("abs", "bert_a", "sin", "lsin"):  # order is used later than with the others
        return "more --steps, or another scheme, such as --pe rope"
    return "more --steps"


def print_summary(folder, row, model, args, pairs, baselines, seconds):
    """The end of a run: its validation losses beside their baselines, whether the model uses what
    each objective should make it use, and what to do next. row: the last one of the log; pairs:
    the values of the preset."""
    print(f"finished in {seconds / 60:.1f} minutes; checkpoint: {folder}/ckpt.pt")
    for name, objective in model.objectives.items():
        loss, ablated = row[f"val_{name}"], row.get(f"ablated_{name}")
        sides = compare(name, loss, baselines)
        print(f"{name}: validation loss {loss:.3f} nats" + f", {sides}" * bool(sides))
        if ablated is not None:
            rise = ablated - loss
            verdict = "not used" if rise < USED else "used" if rise >= CLEARLY else "hardly used"
            ablation = f"ablation, with {objective.ablation} {ablated:.3f}"
            print(f"  {ablation}: {objective.uses} {verdict}")
            if rise < CLEARLY:
                print(f"  try {remedy(objective, args, pairs)}")
    run, kinds = shlex.quote(folder.as_posix()), {x.kind for x in model.objectives.values()}
    text = ""
    if "position" in kinds:
        text = ' --text "Raises an error if the file does not exist."'
    elif "mlm" in model.names:
        text = ' --text "Returns the [MASK] of the array."'
    print(f"next: python -m tools.sample --ckpt {run}{text}")
    print(f"      python -m tools.probe --ckpt {run}          (how it uses positions and tokens)")
    print(f"      python finetune.py --task docs --ckpt {run}")
    if args.preset in ("demo", "pairs"):
        # RPP's own settings are post-LN and permute 60% of the positions.
        kept = f" --norm pre --pos_rate {args.pos_rate}" if args.preset == "pairs" else ""
        full_size = f"--pe {args.pe} --objective {args.objective} --preset rpp{kept}"
        print(f"full size, on a GPU (untested): python train.py {full_size}")
