"""Why does TUPE learn order sooner than BERT? Variants between the two (`cells`), and schemes whose
table has ten times the learning rate, each trained on an order task, on docs or on Wikipedia and
books; a row for each run is appended to cells.jsonl.

    python -m results.cells                              # the table
    python -m results.cells order abs qk qk_pp           # name the left neighbor of 4,096 tokens
    python -m results.cells docs qk qk_pp --seeds 1337 1
    TEXT='texts/*.jsonl.xz' python -m results.cells web qk qk_pp --seeds 1337

In BERT, x_i + p_i is the input of layer 1. Here, as in TUPE, p has its own LayerNorm and enters the
queries and keys of every layer. But it passes through the tokens' own matrices W_Q and W_K:

    qk      s_ij = (x_i + p_i) W_Q . (x_j + p_j) W_K / sqrt(D)       values x_j W_V
    qk_pp   s_ij = (x_i W_Q . x_j W_K + p_i W_Q . p_j W_K) / sqrt(D)

CELLS lists what the others change.
"""

import math
import os
import shlex
import tempfile

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.utils import parametrize

import model
import train
from lib.config import Parser, one_line_errors
from lib.device import git_commit, processor_name
from lib.files import append_jsonl, read_jsonl
from model import (
    Absolute,
    BertAD,
    Component,
    T5Bias,
    T5UntieCls,
    TupeFree,
    TupeR,
    UntiedPositions,
    embedding,
    reset_cls,
)
from results.show import HERE
from tools import order
from tools.output import print_table

ROWS = HERE / "cells.jsonl"
NEIGHBOR = "--vocab 4096 --steps 600"  # flags of tools.order
TEXTS = {"docs": "", "web": '--steps 3000 --dataset "$TEXT" --tokenizer bpe'}  # of train.py


class Positions(Component):
    """p in queries and keys. `Block.attend` below does the rest; this has the weights."""

    combinable = False
    terms = ("token-position", "position-position")  # besides token-token
    layers_with = None  # the only layer with positions (None: all layers)
    layer_norm, in_values, at_input, reset = True, False, False, False
    separate = False  # U_Q and U_K instead of W_Q and W_K
    size = 1  # of the initial p, in units of N(0, 0.02)
    xavier = False  # W_Q and W_K initialized as TUPE's U_Q and U_K

    def __init__(self, cfg):
        super().__init__(cfg)
        self.max_len = cfg.max_len
        self.untied = UntiedPositions(cfg) if self.separate else None
        self.table = None if self.separate else embedding(cfg.max_len + 1, cfg.d_model)
        if self.size != 1:
            self.table.weight.data *= self.size
        self.norm = nn.LayerNorm(cfg.d_model) if self.layer_norm else nn.Identity()
        if self.reset:
            self.theta = model.normal(2 * cfg.n_head)
        if self.at_input:  # a second table, of small vectors as in BERT
            self.input_table = embedding(cfg.max_len + 1, cfg.d_model)

    def embed(self, pos):
        return self.input_table(pos.table_rows(self.max_len)) if self.at_input else 0

    def project(self, block, pos):
        """-> p W_Q, p W_K and p W_V, (1 or B, H, L, D) each; the first two are p U_Q and p U_K if
        `separate`."""
        if self.separate:
            return *self.untied(pos), None
        p = self.norm(self.table(pos.table_rows(self.max_len)))  # (1 or B, L, C)
        p = F.linear(p, block.qkv.weight).unflatten(-1, (3, block.n_head, -1))
        return p.permute(2, 0, 3, 1, 4)  # (3, 1 or B, H, L, D)


class Block(model.Block):
    """A transformer layer with the attention of a cell; of any other scheme, model.Block's."""

    def __init__(self, cfg, layer):
        super().__init__(cfg, layer)
        if any(getattr(part, "xavier", False) for part in model.parse_pe(cfg.pe)):
            for weight in self.qkv.weight.data.chunk(3)[:2]:
                nn.init.xavier_uniform_(weight)

    def attend(self, x, scheme, pos, bias):
        """Arguments and result as in model.Block.attend."""
        part = next(iter(scheme.parts.values()))
        if not isinstance(part, Positions) or part.layers_with not in (None, self.layer):
            return super().attend(x, scheme, pos, bias)
        B, L, C = x.shape
        q, k, v = self.normed_heads(x)
        p_q, p_k, p_v = part.project(self, pos)
        logits = q @ k.transpose(-1, -2)  # (B, H, L, L)
        if "token-position" in part.terms:
            logits = logits + q @ p_k.transpose(-1, -2) + p_q @ k.transpose(-1, -2)
        if "position-position" in part.terms:
            term = p_q @ p_k.transpose(-1, -2)
            if part.reset:
                term = reset_cls(term, part.theta.view(2, -1))
            logits = logits + term
        A = (logits * part.scale).softmax(-1)
        y = A @ (v + p_v if part.in_values else v)
        return self.out(y.transpose(1, 2).reshape(B, L, C))


def large_positions(factor, xavier_matrices=False):
    class Large(Absolute):
        xavier = xavier_matrices

        def __init__(self, cfg):
            super().__init__(cfg)
            self.table.weight.data *= factor

    return Large


class BertADNoNorm(BertAD):
    def __init__(self, cfg):
        super().__init__(cfg)
        self.positions.norm = nn.Identity()


class BertADSmall(BertAD):
    def __init__(self, cfg):
        super().__init__(cfg)
        for u in (self.positions.u_q, self.positions.u_k):
            nn.init.normal_(u.weight, std=0.02)


def ten_times_the_learning_rate(scheme):
    """A class of model.py whose table is 10 w. So w is a tenth of the table at first, and an update
    of Adam moves the table ten times as far."""

    class Ten(nn.Module):
        def forward(self, w):
            return 10 * w

        def right_inverse(self, table):
            return table / 10

    class Faster(scheme):
        def __init__(self, cfg):
            super().__init__(cfg)
            table = getattr(self, "relative_bias", self).table
            has_rows = isinstance(table, nn.Embedding)  # TupeFree's table is a parameter
            holder, name = (table, "weight") if has_rows else (self, "table")
            parametrize.register_parametrization(holder, name, Ten())

    return Faster


PP, CROSS = ("position-position",), ("token-position",)
CELLS = {  # name: (what it is, a class or what it changes in qk)
    "abs_xavier": ("abs, W_Q and W_K initialized as U_Q and U_K", large_positions(1, True)),
    "abs_large": ("abs, initial p 5 times as large", large_positions(5)),
    "abs_large_xavier": ("both", large_positions(5, True)),
    "qk": ("p in queries and keys only, of every layer, through W_Q and W_K", {}),
    "qk_pp": ("qk, without the mixed terms", {"terms": PP}),
    "qk_pp_xavier": (
        "qk_pp, W_Q and W_K initialized as U_Q and U_K",
        {"terms": PP, "xavier": True},
    ),
    "qk_cross": ("qk, only the mixed terms", {"terms": CROSS}),
    "qk_values": ("qk, p also in the values", {"in_values": True}),
    "qk_pp_values": ("qk_pp, p also in the values", {"terms": PP, "in_values": True}),
    "qk_input": ("qk, p also at the input, as in abs", {"at_input": True}),
    "qk_pp_input": ("qk_pp, p also at the input, as in abs", {"terms": PP, "at_input": True}),
    "qk_layer_1": ("qk, only in layer 1", {"layers_with": 0}),
    "qk_no_norm": ("qk, without the LayerNorm of p", {"layer_norm": False}),
    "qk_large": (
        "the same, initial p 50 times as large",
        {"layer_norm": False, "size": 50},
    ),
    "qk_pp_2d": ("qk_pp, over sqrt(2D)", {"terms": PP, "scale_terms": 2}),
    "qk_pp_2d_reset": (
        "the same, [CLS] reset",
        {"terms": PP, "scale_terms": 2, "reset": True},
    ),
    "separate": ("qk, through U_Q and U_K", {"separate": True}),
    "separate_pp": ("qk_pp, through U_Q and U_K", {"separate": True, "terms": PP}),
    "separate_cross": ("qk_cross, through U_Q and U_K", {"separate": True, "terms": CROSS}),
    "bert_ad_no_norm": ("bert_ad, without the LayerNorm of p", BertADNoNorm),
    "bert_ad_small": ("bert_ad, U_Q and U_K initialized as W_Q and W_K", BertADSmall),
    "abs_rate": ("abs, ten times the learning rate for p", ten_times_the_learning_rate(Absolute)),
    "t5_rate": (
        "t5, ten times the learning rate for its table",
        ten_times_the_learning_rate(T5Bias),
    ),
    "t5_untie_cls_rate": ("the same of t5_untie_cls", ten_times_the_learning_rate(T5UntieCls)),
    "tupe_a_free_rate": ("the same of tupe_a_free", ten_times_the_learning_rate(TupeFree)),
    "tupe_r_rate": ("the same of T5's table in tupe_r", ten_times_the_learning_rate(TupeR)),
}


def register():
    """Make the cells known to --pe."""
    model.Block = Block
    for name, (_, cell) in CELLS.items():
        cell = type(name, (Positions,), cell) if isinstance(cell, dict) else cell
        model.SCHEMES[name] = [cell]


def run(task, cell, seed, flags, file=ROWS):
    """Train a cell and append its row, unless it has one."""
    key = {"task": task, "cell": cell, "seed": seed, "flags": flags}
    if any(key.items() <= row.items() for row in read_jsonl(file)):
        return
    if task == "order":
        args = order.parse_args(["--pe", cell, *shlex.split(f"{NEIGHBOR} {flags}")])
        accuracy, curve = order.measure(cell, "left neighbor", seed, args)
        found = {"accuracy": accuracy, "curve": curve}
    else:
        with tempfile.TemporaryDirectory() as folder:
            given = ["--pe", cell, "--seed", str(seed), "--out_dir", folder]
            train.main([*given, *map(os.path.expandvars, shlex.split(f"{TEXTS[task]} {flags}"))])
            first, *lines = read_jsonl(f"{folder}/log.jsonl")
        curve = [[line["step"], round(line["loss"], 4)] for line in lines]
        found = {"loss": lines[-1]["val_loss"], "curve": curve}
        found |= {key: first[key] for key in ("precision", "baselines")}
    machine = {"processor": processor_name("cpu"), "threads": torch.get_num_threads()}
    machine["torch"] = str(torch.__version__)
    append_jsonl(file, key | {"git": git_commit(), "machine": machine} | found)


def table(rows):
    """Rows of cells.jsonl -> a line per cell: the accuracies of its seeds after 200, 300 and 600
    steps of the order task, and its losses on docs and on Wikipedia and books."""
    lines = {}
    for row in rows:
        name = f"{row['cell']} {row['flags']}".strip()
        what = CELLS.get(row["cell"], (f"scheme {row['cell']}",))[0]
        line = lines.setdefault(name, {"cell": name, "": what})
        if row["task"] == "order":
            curve = {step: right for step, right, *_ in row["curve"]}
            for step in (200, 300, 600):
                line.setdefault(f"at step {step}", []).append(f"{curve.get(step, math.nan):.2f}")
        else:
            line.setdefault(row["task"], []).append(f"{row['loss']:.2f}")
    return [
        {column: ", ".join(x) if isinstance(x, list) else x for column, x in line.items()}
        for line in lines.values()
    ]


def main(argv=None):
    parser = Parser("-m results.cells", __doc__)
    parser.add_argument("task", nargs="?", choices=("order", *TEXTS), help="what to train on")
    parser.add_argument("cells", nargs="*", help="cells, or schemes of model.py")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0], help="random seeds")
    parser.add_argument("--flags", default="", help="more flags of tools.order or train.py")
    register()
    with one_line_errors():
        args = parser.parse_args(argv)
        for seed in args.seeds:
            for cell in args.cells:
                run(args.task, cell, seed, args.flags)
    print_table(table(read_jsonl(ROWS)))


if __name__ == "__main__":
    main()
