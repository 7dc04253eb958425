"""What lesson.ipynb needs beside the project: one attention head for naive.py, and live curves."""

import contextlib
import io
import shutil
from pathlib import Path
from types import SimpleNamespace

import matplotlib.pyplot as plt
import torch
from IPython.display import clear_output

import train
from lib.files import read_jsonl
from model import Positions


def first_head(encoder, tokens):
    """Head 1 of layer 1 for tokens (1, L): q, k (L, D), and its weights w as naive.logit wants
    them. encoder.config.pe is t5 or tupe_r."""
    D, positions = encoder.config.d_head, Positions(torch.arange(tokens.size(1)))
    q, k, _ = encoder.blocks[0].normed_heads(encoder.embed(tokens, positions))  # (1, H, L, D)
    [part] = encoder.scheme.parts.values()
    if encoder.config.pe == "t5":
        w = SimpleNamespace(b=part.table.weight[:, 0])
    else:
        u = part.positions
        w = SimpleNamespace(p=u.norm(u.table.weight), b=part.relative_bias.table.weight[:, 0])
        w.U_Q, w.U_K = u.u_q.weight[:D].T, u.u_k.weight[:D].T
        w.theta = [(p @ w.U_Q) @ (p @ w.U_K) / (2 * D) ** 0.5 for p in u.norm(part.theta)]
    return q[0, 0], k[0, 0], {encoder.config.pe: w}


def fit(runs, name, flags):
    """Run `python train.py FLAGS --out_dir out/lesson-NAME`, and draw the curves of all runs so far
    at every line of its log. runs: {name: folder}, to which this run is added."""
    runs[name] = Path(f"out/lesson-{name}")
    shutil.rmtree(runs[name], ignore_errors=True)  # so that a cell can be run again
    with contextlib.redirect_stdout(Redraw(runs)):
        train.main([*flags.split(), "--out_dir", str(runs[name])])


class Redraw(io.StringIO):
    """Receives what train.py prints, and redraws the figure at every line of the log."""

    def __init__(self, runs):
        super().__init__()
        self.runs = runs

    def write(self, text):
        if text.startswith("step"):
            draw(self.runs)


def draw(runs):
    """The training loss of each run (of a sum, the last objective's), and a baseline."""
    clear_output(wait=True)
    plt.figure(figsize=(7, 3.5))
    for name, folder in runs.items():
        run_info, *rows = read_jsonl(folder / "log.jsonl")
        objective = run_info["args"]["objective"].split("+")[-1]
        plt.plot([r["step"] for r in rows], [r[objective] for r in rows], ".-", label=name)
    baselines = run_info["baselines"]  # their names: unigram, copy, or of a sum pplm.copy
    baseline = [name for name in baselines if name.endswith(("unigram", "copy"))][-1]
    plt.axhline(baselines[baseline], color="gray", ls="--", label=baseline)
    plt.gca().set(xlim=(0, run_info["args"]["steps"]), xlabel="step", ylabel="training loss (nats)")
    plt.legend()
    plt.show()


def print_losses(runs):
    for name, folder in runs.items():
        print(f"{name:7} validation loss {read_jsonl(folder / 'log.jsonl')[-1]['val_loss']:.2f}")
