"""The order tasks of tools/order.py for all schemes (`python -m results.run order`): the rows, and
the figure of the field guide."""

import shlex

import torch

from lib.device import git_commit, processor_name
from lib.files import append_jsonl, read_jsonl
from results.show import HERE
from tools import order

ROWS, SEEDS = HERE / "order.jsonl", range(3)


def run(schemes, flags="", seeds=SEEDS, file=ROWS):
    """Append a row for each scheme and seed that has none yet. flags: of tools.order."""
    for seed in seeds:
        there = {(row["pe"], row["seed"], row["flags"]) for row in read_jsonl(file)}
        for pe in schemes:
            if (pe, seed, flags) in there:
                continue
            args = order.parse_args(["--pe", pe, *shlex.split(flags)])
            found = {t: order.measure(pe, t, seed, args) for t in args.tasks.split(",")}
            machine = {"processor": processor_name("cpu"), "threads": torch.get_num_threads()}
            row = {"pe": pe, "seed": seed, "flags": flags, "git": git_commit()}
            row |= {"machine": machine | {"torch": str(torch.__version__)}}
            row["accuracy"] = {t: [round(x, 4) for x in a] for t, (a, _) in found.items()}
            row["curve"] = {t: [[i, round(x, 3)] for i, x in c] for t, (_, c) in found.items()}
            append_jsonl(file, row)
            print(pe, seed, {t: a[0] for t, a in row["accuracy"].items()}, flush=True)
