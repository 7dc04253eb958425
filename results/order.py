"""The order tasks of tools/order.py for all schemes (`python -m results.run order`): their rows,
order.jsonl, and what the pages show of them."""

import statistics

import numpy as np
import pandas
import torch

from lib.device import git_commit, processor_name
from lib.files import append_jsonl, read_jsonl
from results.show import HERE
from tools import order
from tools.output import print_table

ROWS, SEEDS = HERE / "order.jsonl", range(3)


def run(schemes, seeds=SEEDS, file=ROWS):
    """Append a row for each scheme and seed that has none yet, and for `bag`, the best predictor
    without positions."""
    for seed in seeds:
        there = {(row["pe"], row["seed"]) for row in read_jsonl(file)}
        for pe in schemes:
            if (pe, seed) not in there:
                args = order.parse_args(["--pe", pe])
                found = {task: order.measure(pe, task, seed, args) for task in order.TASKS}
                curve = {task: curve for task, (_, curve) in found.items()}
                append_row(file, pe, seed, {t: a for t, (a, _) in found.items()}, curve=curve)
    if file == ROWS and "bag" not in {row["pe"] for row in read_jsonl(file)}:
        found = {}
        for task in order.TASKS:
            lengths = [["--pe", "none", "--length", str(n)] for n in (32, 64, 128)]
            found[task] = [order.bag_of_tokens(task, order.parse_args(x)) for x in lengths]
        append_row(file, "bag", 0, found)


def append_row(file, pe, seed, accuracy, **more):
    accuracy = {task: [round(x, 4) for x in values] for task, values in accuracy.items()}
    machine = {"processor": processor_name("cpu"), "threads": torch.get_num_threads()}
    row = {"pe": pe, "seed": seed, "git": git_commit()}
    row["machine"] = machine | {"torch": str(torch.__version__)}
    append_jsonl(file, row | {"accuracy": accuracy} | more)
    print(f"order tasks: {pe}, seed {seed}")


def accuracies(file=ROWS):
    """-> {pe: {task: accuracies on 32, 64 and 128 tokens, means over the seeds}}."""
    runs = {}
    for row in read_jsonl(file):
        runs.setdefault(row["pe"], []).append(row["accuracy"])
    return {
        pe: {t: [statistics.mean(x) for x in zip(*(run[t] for run in group))] for t in group[0]}
        for pe, group in runs.items()
    }


def correlations(losses, file=ROWS, samples=1000):
    """Does a task predict the loss? losses: {pe: (losses after 6 M tokens, losses after 49 M)} ->
    a line per task: Spearman's r of minus the mean loss and the accuracy on sequences of 32 tokens
    during training (its mean over the steps: what is learned, and how soon), with the 95% interval
    of a bootstrap over schemes."""
    during = {}
    for row in read_jsonl(file):
        for task, curve in row.get("curve", {}).items():
            mean = statistics.mean(accuracy for _, accuracy, *_ in curve)
            during.setdefault(task, {}).setdefault(row["pe"], []).append(mean)
    generator, found = np.random.default_rng(0), []
    for task, by_scheme in during.items():
        found.append({"task": task})
        for n, tokens in enumerate(("6 M", "49 M")):
            schemes = [pe for pe in by_scheme if pe in losses and losses[pe][n]]
            x = np.array([statistics.mean(by_scheme[pe]) for pe in schemes])
            y = np.array([-statistics.mean(losses[pe][n]) for pe in schemes])
            draws = generator.integers(0, len(x), (samples, len(x)))
            rs = [spearman(x[draw], y[draw]) for draw in draws]
            low, high = np.nanpercentile(rs, (2.5, 97.5))
            text = f"{spearman(x, y):.2f} ({low:.2f} to {high:.2f})"
            found[-1][f"r after {tokens} tokens, {len(x)} schemes"] = text
    return found


def spearman(x, y):
    return pandas.Series(x).rank().corr(pandas.Series(y).rank())


def lines(schemes, found):
    """-> a line per task with the accuracies of schemes, and `bag`."""
    return [
        {"task": task}
        | {pe: ", ".join(f"{x:.2f}" for x in found[pe][task]) for pe in (*schemes, "bag")}
        for task in order.TASKS
    ]


def show(losses):
    """Print the accuracies of all schemes, and what predicts their losses (correlations)."""
    found = accuracies()
    print("accuracy in order tasks on 32, 64 and 128 tokens, trained on 32; means over seeds\n")
    table = lines([pe for pe in found if pe != "bag"], found)
    columns = {pe: [line[pe] for line in table] for pe in found}
    names = [line["task"] for line in table]
    print_table([{"scheme": pe} | dict(zip(names, values)) for pe, values in columns.items()])
    print("\nSpearman's r with minus the loss on Wikipedia and books (order.correlations)\n")
    print_table(correlations(losses))
