"""Fine-tune a pre-trained encoder on GLUE or SQuAD with the papers' recipes, and score it.

    python finetune.py --task docs                # no network: which library is a docstring from?
    python finetune.py --task docs --ckpt scratch                  # the same without pre-training
    python finetune.py --task cola --data_dir glue --seeds 5       # glue/CoLA/train.tsv, ...
    python finetune.py --task all --recipe tupe --seeds 5          # all of GLUE from the hub
    python finetune.py --task rte --ckpt out/run/finetuned-mnli.pt        # from the MNLI model

Every score is a line of results.jsonl. The table at the end shows the median or mean over seeds,
the spread, and the score of always giving the most frequent answer (majority). The best run's model
is saved beside it as finetuned-<task>.pt, replacing an earlier one; tools/predict.py scores it
again and writes the files to submit. --compile is off by default, because it is only worth it in
long runs.
"""

import itertools
import math
import os
import re
import statistics
import time
from collections import defaultdict
from dataclasses import asdict
from operator import itemgetter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import tiktoken
import torch
import torch.nn as nn
import torch.nn.functional as F
from tqdm import tqdm  # comes with datasets

from data import prepare
from lib import squad
from lib.bpe import encode_text
from lib.config import Parser, UserError, add_device_flags, between, leave, one_line_errors
from lib.device import autocast, can_compile, keep_memory, pick_device, pick_dtype
from lib.files import (
    DAMAGE,
    append_jsonl,
    lock,
    make_folder,
    newest_run,
    opening,
    read_checkpoint,
    read_json,
    write_checkpoint,
)
from lib.glue import GLUE, Task, paper_averages, read_split
from lib.run import broken, clip_and_step, schedule
from lib.sources import DOCS_LIBRARIES
from lib.squad import SQUAD, SQUAD_V2
from lib.weights import load_strict, warm_start
from model import Encoder, EncoderConfig, linear

EVAL_TOKENS = 16384  # tokens per batch in evaluation
LIBRARY_NAMES = re.compile(
    r"\b(python|pytorch|torch|numpy|np|pandas|pd|datasets?|hugging ?face)\b", re.IGNORECASE
)

# --------------------------------------------------------------------------------------------------
# Tasks and recipes

TASKS = {
    **GLUE,
    "squad": SQUAD,
    "squad_v2": SQUAD_V2,
    "docs": Task("", ("text",), DOCS_LIBRARIES, test={}),
}

# What the papers do and this does not (deviations): ELECTRA's code has one linear layer on [CLS],
# warms up to .9 of the learning rate, uses Adam without bias correction, and trains MRPC and STS-B
# on both orders of the texts. TACO has another recipe for base size (table 8) and leaves MNLI-mm
# out of the average in its table 3; in short runs, its warm-up is cut to a third of the steps. Wang
# 2021 evaluates every 1,000 steps on SQuAD's dev set and reports the best; here the last model is
# scored. The encoder's dropout is not part of a recipe: it is that of the pre-trained model, 0 for
# the presets demo, lab and pairs.
# fmt: off
RECIPES = {
    # ELECTRA (Clark 2020, app. B), which RPP follows
    "electra": dict(epochs=3, lr=[1e-4], layer_decay=.8, batch_size=32, warmup=.1, weight_decay=0.,
                    eps=1e-6, length=128, aggregate="median"),
    # TUPE, table 1
    "tupe": dict(epochs=10, lr=[2e-5, 3e-5, 4e-5, 5e-5], layer_decay=1., batch_size=32, warmup=.06,
                 weight_decay=.01, eps=1e-6, length=512, aggregate="median"),
    # TACO, tables 6 and 7
    "taco": dict(epochs=4, lr=[5e-5], layer_decay=1., batch_size=64, warmup=100, weight_decay=0.,
                 eps=1e-8, length=128, aggregate="mean"),
    # Wang 2021, table 6; the rest is the default of the script it uses
    "bert": dict(epochs=3, lr=[2e-5], layer_decay=1., batch_size=32, warmup=0, weight_decay=0.,
                 eps=1e-8, length=128, aggregate="mean"),
}
# fmt: on


def recipe_for(name, task, d_model):
    """-> a recipe's values for a task and the width of the model. A warm-up below 1 is a fraction
    of the steps. Of several learning rates, the one with the best score counts."""
    values = dict(RECIPES[name])
    task = task.removesuffix("_v2")
    if name == "electra":
        if d_model < 512:
            values["lr"] = [3e-4]
        if task in ("rte", "stsb"):
            values["epochs"] = 10
        if task == "squad":
            values |= dict(epochs=2, length=512)
    elif name == "tupe" and task in ("mnli", "qqp", "qnli"):
        values["epochs"] = 5
    elif name == "taco":
        if task in ("mnli", "qqp"):
            values |= dict(epochs=6, warmup=2000)
        if task in ("qnli", "sst2"):
            values["warmup"] = 200
        if task in ("cola", "stsb", "mrpc", "rte"):
            values["batch_size"] = 32
    elif name == "bert" and task == "squad":
        values |= dict(lr=[3e-5], length=384)
    if task == "docs":
        values["epochs"] = 10
    return values


def settings(args, task, cfg):
    """The recipe for a task, overridden by the flags -> namespace of recipe, epochs, lr (a list),
    batch_size, length, ... cfg: the encoder's configuration as a dictionary."""
    chosen = recipe_for(args.recipe, task, cfg["d_model"]) | {"recipe": args.recipe}
    chosen["length"] = min(chosen["length"], cfg["max_len"])
    flags = {k: value for k, value in vars(args).items() if k in chosen and value is not None}
    return SimpleNamespace(**chosen | flags)


# --------------------------------------------------------------------------------------------------
# Data. A row is (texts, label), or a squad.Question. In a test row, the label is the row's index.


def read_docs(cache):
    """The docs task: which library does a docstring come from? -> training rows, {"docs": rows to
    score}.

    Names of libraries are masked as whole words (numpy, but not from_numpy). The rows to score are
    the validation documents of pre-training.
    """
    train, dev = [], []
    with opening(file := prepare("docs", "bpe", cache).folder / "docs.json", *DAMAGE):
        stored = read_json(file)
        for i, (library, text) in enumerate(stored["rows"]):
            is_dev = i % stored["every"] == 1  # the split of pre-training (data.py)
            texts = (LIBRARY_NAMES.sub("[MASK]", text),)
            (dev if is_dev else train).append((texts, DOCS_LIBRARIES.index(library)))
    return train, {"docs": dev}


def read_task(name, data_dir, cache, limit_train=None):
    """-> training rows, {name in the results: rows to score}. Raises UserError."""
    if name == "docs":
        rows, evaluations = read_docs(cache)
        limit_train = limit_train or 500
    else:
        rows = read_split(TASKS[name], name, data_dir, "train")[name]
        evaluations = read_split(TASKS[name], name, data_dir, "dev")
    order = np.random.default_rng(0).permutation(len(rows))[:limit_train]
    return [rows[i] for i in order], evaluations


def encode(texts, tokenizer, cfg, length):
    """One or two texts -> the ids of [CLS] A [SEP] or [CLS] A [SEP] B [SEP], at most `length`; the
    longer text is cut first. "[MASK]" in a text is the special token (the docs task)."""
    room = length - 1 - len(texts)
    parts = [encode_text(text.strip(), tokenizer)[:room] for text in texts]
    while sum(map(len, parts)) > room:
        max(parts, key=len).pop()
    ids = [cfg.cls_id]
    for part in parts:
        ids += [*part, cfg.sep_id]
    return ids


def encode_rows(name, rows, tokenizer, cfg, length):
    """Rows of a task -> [(ids, label)], and for SQuAD the Window of each. A label is a class, a
    score, or (first, last) token of the answer."""
    if TASKS[name].kind != "span":
        return [(encode(row[0], tokenizer, cfg, length), row[1]) for row in rows], []
    encoded, windows = [], []
    for i, question in enumerate(rows):
        for row, window in squad.windows(i, question, tokenizer, cfg, length):
            encoded.append(row)
            windows.append(window)
    return encoded, windows


def batches_by_length(rows, size, rng=None):
    """-> arrays of row indices, one per batch. Rows of similar length are together, so that there
    is little padding. Shuffled if rng is given."""
    order = rng.permutation(len(rows)) if rng else np.arange(len(rows))
    window = 50 * size if rng else len(rows)  # sorted by length within a window: random enough
    batches = []
    for part in np.split(order, range(window, len(rows), window)):
        by_length = sorted(part, key=lambda i: len(rows[i][0]))
        batches += np.split(by_length, range(size, len(by_length), size))
    if rng:
        rng.shuffle(batches)
    return batches


def padded_batch(rows, indices, pad_id, device):
    """-> tokens (B, L), pad (B, L) bool or None without padding, labels (B,) or (B, 2); L is the
    length of the longest sequence."""
    ids, labels = zip(*[rows[i] for i in indices])
    tokens = nn.utils.rnn.pad_sequence(list(map(torch.tensor, ids)), True, pad_id)
    has_padding = (tokens == pad_id).any()
    tensors = tokens, torch.tensor(labels)
    if device.type == "cuda":  # pinned memory is copied asynchronously
        tensors = [x.pin_memory() for x in tensors]
    tokens, labels = [x.to(device, non_blocking=True) for x in tensors]
    return tokens, tokens == pad_id if has_padding else None, labels


# --------------------------------------------------------------------------------------------------
# Model


class Classifier(nn.Module):
    """An encoder with a task's head: dropout, dense, tanh, dropout, linear on [CLS]; for spans one
    linear layer on every token. length: the maximum sequence length."""

    def __init__(self, encoder, name, length):
        super().__init__()
        task, C = TASKS[name], encoder.config.d_model
        self.encoder, self.name, self.kind, self.length = encoder, name, task.kind, length
        dense = [] if task.kind == "span" else [nn.Dropout(0.1), linear(C, C), nn.Tanh()]
        n_out = len(task.classes) or {"score": 1, "span": 2}[task.kind]
        self.head = nn.Sequential(*dense, nn.Dropout(0.1), linear(C, n_out))

    def forward(self, tokens, pad):
        """tokens (B, L) int64, pad (B, L) bool or None -> (B, n_classes) logits, (B,) scores, or
        (B, 2, L) logits of the first and the last token of a span."""
        hidden = self.encoder(tokens, pad=pad)  # (B, L, C)
        # The head runs in float32: in 16 bits, many different rows would get the same score.
        with torch.autocast(hidden.device.type, enabled=False):
            hidden = hidden.to(self.head[-1].weight.dtype)
            if self.kind != "span":
                return self.head(hidden[:, 0]).squeeze(-1)  # (B, n_classes); (B, 1) -> (B,)
            out = self.head(hidden).transpose(1, 2)  # (B, L, 2) -> (B, 2, L)
        return out if pad is None else out.masked_fill(pad[:, None], -math.inf)

    def loss(self, tokens, pad, labels):
        out = self(tokens, pad)
        if self.kind == "score":
            return F.mse_loss(out, labels)
        return F.cross_entropy(out.flatten(0, -2), labels.flatten())  # spans: (2B, L), (2B,)


def new_classifier(start, source, name, length, seed=0):
    """-> a Classifier with a new head and the encoder of a checkpoint (start, read from source); a
    length beyond max_len extends its position tables. Raises UserError if the weights do not
    fit."""
    torch.manual_seed(seed)
    cfg = start["config"]
    encoder = Encoder(EncoderConfig(**{**cfg, "max_len": max(length, cfg["max_len"])}))
    encoder.tokenizer = tiktoken.Encoding(**start["tokenizer"])
    model = Classifier(encoder, name, length)
    weights = {key: value for key, value in start["model"].items() if key.startswith("encoder.")}
    if weights:  # else scratch
        new = warm_start(model, {**start, "model": weights}, source)["new"]
        if missing := [key for key in new if key.startswith("encoder.")]:
            raise UserError(f"{source} does not fit this model: missing {', '.join(missing[:3])}")
    return model


def load(path) -> Classifier:
    """finetuned-<task>.pt -> its Classifier in eval mode on the CPU; `.run_info` is the checkpoint
    without the weights. Raises UserError."""
    checkpoint = read_checkpoint(path)
    if "task" not in checkpoint:
        raise UserError(f"{path} is not a fine-tuned model: python finetune.py makes one")
    model = new_classifier(checkpoint, path, checkpoint["task"], checkpoint["length"])
    load_strict(model, checkpoint["model"], path)  # with its head
    model.run_info = {key: value for key, value in checkpoint.items() if key != "model"}
    return model.eval()


# --------------------------------------------------------------------------------------------------
# Training


def param_groups(model, lr, layer_decay, weight_decay):
    """The optimizer's groups, each with its own peak learning rate: the head has lr, the top layer
    lr * layer_decay, and so on down; embeddings and shared positional tables have the lowest.

    ELECTRA's code decays once more below the head: its top layer has lr * layer_decay^2
    (deviation). Weight decay is on matrices only.
    """
    n_layer, groups = len(model.encoder.blocks), defaultdict(list)
    for name, p in model.named_parameters():
        # Some schemes have weights of their own in each layer.
        layer = re.match(r"encoder\.(?:blocks|scheme\.parts\.\w+\.layers)\.(\d+)", name)
        if name.startswith("head."):
            depth = 0
        elif name.startswith("encoder.final_norm."):
            depth = 1
        else:
            depth = n_layer - int(layer[1]) if layer else n_layer + 1
        key = lr * layer_decay**depth, weight_decay if p.dim() >= 2 else 0.0
        groups[key].append(p)
    return [
        {"params": params, "peak_lr": peak, "weight_decay": decay}
        for (peak, decay), params in groups.items()
    ]


def warmup_steps(warmup, steps):
    """A recipe's warm-up (below 1: a fraction of the steps) -> steps, at most a third of the run:
    with few rows, taco's would be longer."""
    return min(warmup * steps if warmup < 1 else warmup, steps // 3)


def train(model, rows, chosen, lr, seed, args):
    """Fine-tune in place on rows of (ids, label), with the values that settings() gives. The
    program ends if the loss or the gradient is not finite."""
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    steps = chosen.epochs * math.ceil(len(rows) / chosen.batch_size)
    warmup = warmup_steps(chosen.warmup, steps)
    if args.compile:
        torch._dynamo.reset()  # the previous model's graphs count towards dynamo's limit
        model.compile(dynamic=True)  # the length varies (on a GPU, SDPA needs a few graphs)
    optimizer = torch.optim.AdamW(
        param_groups(model, lr, chosen.layer_decay, chosen.weight_decay), eps=chosen.eps, fused=True
    )
    scaler = torch.amp.GradScaler(args.device.type, enabled=args.dtype == torch.float16)
    epochs = (batches_by_length(rows, chosen.batch_size, rng) for _ in range(chosen.epochs))
    batches = itertools.chain.from_iterable(epochs)
    bad = torch.zeros((), dtype=torch.bool, device=args.device)  # was anything not finite?
    model.train()
    bar = tqdm(batches, f"{model.name} seed {seed}", steps, leave=False, disable=None)
    for step, indices in enumerate(bar):
        # The groups' learning rates rise and fall together, each with its own peak.
        for group in optimizer.param_groups:
            group["lr"] = group["peak_lr"] * schedule(step, steps, warmup)

        tokens, pad, labels = padded_batch(rows, indices, model.encoder.config.pad_id, args.device)
        with autocast(args.device, args.dtype):
            loss = model.loss(tokens, pad, labels)
        scaler.scale(loss).backward()

        grad_norm = clip_and_step(model, optimizer, scaler)
        bad |= ~(loss.detach() + grad_norm).isfinite()
        if (step % 200 == 199 or step + 1 == steps) and broken(bad, scaler):  # a CPU-GPU sync
            message = f"{model.name} seed {seed}: loss or gradient not finite near step {step + 1}"
            leave(1, f"{message} of {steps}; try a lower --lr, or --dtype float32")


# --------------------------------------------------------------------------------------------------
# Predictions and scores


@torch.no_grad()
def outputs(model, rows, dtype):
    """-> the model's float32 output for each row of (ids, label): (n_classes,), (), or (2, L) with
    the L of its batch."""
    device, results = next(model.parameters()).device, [None] * len(rows)
    model.eval()
    size = max(1, EVAL_TOKENS // max(len(ids) for ids, _ in rows))
    for indices in batches_by_length(rows, size):
        tokens, pad, _ = padded_batch(rows, indices, model.encoder.config.pad_id, device)
        with autocast(device, dtype):
            for i, out in zip(indices, model(tokens, pad).cpu().numpy()):
                results[i] = out
    return results


def rank(model, encoded, windows, dtype=torch.float32):
    """A Classifier and what encode_rows gives -> for each row [(probability, answer), ...], best
    first: class indices, SQuAD's most likely texts (in v2.0 also "" for no answer), or one score
    (probability 1)."""
    raw = outputs(model, encoded, dtype)
    if model.kind == "score":
        return [[(1.0, float(score))] for score in raw]
    if model.kind == "span":
        ranked = squad.rank_answers(raw, windows, with_null=model.name == "squad_v2")
    else:
        ranked = [sorted(zip(x, range(len(x))), key=itemgetter(0), reverse=True) for x in raw]
    for pairs in ranked:
        logits, answers = zip(*pairs)
        pairs[:] = zip(torch.tensor(logits).softmax(0).tolist(), answers)
    return ranked


def predict(model, encoded, windows, dtype):
    """A Classifier -> one prediction per row: class index, score or text."""
    return [pairs[0][1] for pairs in rank(model, encoded, windows, dtype)]


def evaluate(predicted, evaluations, run, began, out_dir):
    """Score predictions, {name in the results: list}, on evaluations, {name: rows} -> rows that are
    appended to results.jsonl.

    run: a dictionary (seed, lr, ckpt, ...) that becomes part of every row; began: time.time() when
    the run began. In a row, `metrics` are the model's scores and `constant` those of always giving
    the most frequent answer.
    """
    results = []
    for name, rows in evaluations.items():
        task, labels = TASKS[name.removesuffix("-mm")], [row[1] for row in rows]
        predictions = predicted[name]
        answer = "" if task.kind == "span" else statistics.mode(labels)
        metrics = task.score(labels, predictions)
        constant = task.score(labels, [answer] * len(labels))
        majority = constant.get("accuracy", constant.get("em", 0.0))
        row = {**run, "task": name, "metrics": metrics, "constant": constant, "majority": majority}
        row |= {"one_class": len(set(predictions)) == 1, "seconds": time.time() - began}
        append_jsonl(out_dir / "results.jsonl", row)
        results.append(row)
    return results


def print_scores(results):
    for row in results:
        shown = ", ".join(f"{key} {value:.4f}" for key, value in row["metrics"].items())
        lr = f" lr {row['lr']}" if row["lr"] else ""  # a bag of words has none
        print(
            f"{row['task']} seed {row['seed']}{lr}: {shown} "
            f"(majority {row['majority']:.4f}), {row['seconds']:.0f} s"
        )


# --------------------------------------------------------------------------------------------------
# The table


def best_runs(results, aggregate):
    """Rows -> {(checkpoint, task): the rows of the learning rate with the best first metric}, as
    TUPE does. aggregate: a function of the scores of all seeds, such as statistics.median."""
    groups = defaultdict(lambda: defaultdict(list))
    for row in results:
        groups[row["ckpt"], row["task"]][row["lr"]].append(row)

    def first_metric(rows):  # the worst if it is NaN
        value = aggregate([next(iter(row["metrics"].values())) for row in rows])
        return -math.inf if math.isnan(value) else value

    return {key: max(by_lr.values(), key=first_metric) for key, by_lr in groups.items()}


def report(results, args):
    """Print one line per task and metric: aggregate over seeds, spread, the constant answer's
    score, and how many runs always give the same answer."""
    aggregate, scores = getattr(np, RECIPES[args.recipe]["aggregate"]), {}  # NaN stays NaN
    print(
        f"\n{'':10}{'metric':10}{aggregate.__name__:>8}{'min':>8}{'max':>8}{'std':>7}{'majority':>10}"
        f"{'best lr':>9}{'seeds':>7}{'collapsed':>11}"
    )
    for (_, name), rows in best_runs(results, aggregate).items():
        for metric, constant in rows[0]["constant"].items():
            values = [row["metrics"][metric] for row in rows]
            scores[name, metric] = aggregate(values)
            print(
                f"{name:10}{metric:10}{aggregate(values):8.3f}{min(values):8.3f}{max(values):8.3f}"
                f"{np.std(values, ddof=len(values) > 1):7.3f}{constant:10.3f}"
                f"{rows[0]['lr']!s:>9}{len(values):7}{sum(row['one_class'] for row in rows):11}"
            )
    averages = paper_averages(scores) if args.task == "all" else {}
    for paper, mean in averages.items():
        shown = f"{mean:.4f}" if isinstance(mean, float) else f"needs {', '.join(mean)}"
        print(f"{paper}'s average: {shown}")


# --------------------------------------------------------------------------------------------------
# The program


def parse_args(argv=None):
    """-> namespace of the flags. None: decided by the recipe, the run or the device."""
    parser = Parser("finetune.py", __doc__)
    count, path = between(int, "[1, 1e9]"), os.path.expanduser
    flag = parser.add_argument_group("task and files").add_argument
    flag("--task", choices=(*TASKS, "all"), default="docs", help="all: GLUE, with papers' averages")
    flag("--ckpt", type=path, help="run or checkpoint (default: the newest under out/), or scratch")
    flag("--data_dir", type=path, help="GLUE's folders, or SQuAD's JSON (default: the hub)")
    flag("--limit_train", type=count, help="training examples (default: all; docs: 500)")
    flag("--out_dir", type=path, help="for results.jsonl and the model (default: the checkpoint's)")
    flag("--cache", type=path, default="cache", help="folder for prepared data")

    flag = parser.add_argument_group("recipe, and what replaces its values").add_argument
    flag("--recipe", choices=list(RECIPES), default="electra", help="RPP's; Wang 2021's is bert")
    flag("--seeds", type=between(int, "[1, 1000]"), default=1, help="number of runs, 0, 1, ...")
    flag("--lr", type=between(float, "(0, 1e9)"), nargs="+", help="peaks; the best one counts")
    flag("--epochs", type=between(int, "[1, 10000]"), help="docs: 10 in every recipe")
    flag("--batch_size", type=count, help="sequences per step")
    # Beyond the model's max_len, position tables get new rows.
    flag("--length", type=between(int, "[8, 100000]"), help="tokens (default: at most max_len)")
    flag("--dropout", type=between(float, "[0, 1)"), help="of the encoder (default: as trained)")
    add_device_flags(parser)
    return parser.parse_args(argv)


def finetune(name, rows, evaluations, start, source, args):
    """Fine-tune on a task with every learning rate and seed, and save the model with the best first
    metric -> rows of results.jsonl. rows, evaluations: from read_task; start: a checkpoint, source:
    its name in the results."""
    chosen = settings(args, name, start["config"])
    tokenizer, cfg = tiktoken.Encoding(**start["tokenizer"]), EncoderConfig(**start["config"])
    encoded, _ = encode_rows(name, rows, tokenizer, cfg, chosen.length)
    to_score = {
        key: encode_rows(name, value, tokenizer, cfg, chosen.length)
        for key, value in evaluations.items()
    }
    print(
        f"{name}: from {source}; length {chosen.length}\n"
        f"{len(rows):,} rows to train on, {sum(map(len, evaluations.values())):,} to score; "
        f"recipe {chosen.recipe}: {chosen.epochs} epochs, batch {chosen.batch_size}, lr",
        *chosen.lr,
    )
    file, unscored = args.out_dir / f"finetuned-{name}.pt", args.out_dir / f"unscored-{name}.pt"
    results, best_score = [], math.nan  # NaN: no score yet
    for lr, seed in itertools.product(chosen.lr, range(args.seeds)):
        began = time.time()
        model = new_classifier(start, source, name, chosen.length, seed).to(args.device)
        train(model, encoded, chosen, lr, seed, args)
        run = {**vars(chosen), "dropout": start["config"]["dropout"], "seed": seed, "lr": lr}
        run |= {"n_train": len(rows), "ckpt": source, "step": start["step"]}
        checkpoint = {
            **{key: start[key] for key in ("tokenizer", "step", "data")},
            "task": name,
            "classes": TASKS[name].classes,
            "length": chosen.length,
            "row": run,
            "config": asdict(model.encoder.config),
            "model": model.state_dict(),
        }
        write_checkpoint(unscored, checkpoint)  # so that it is not lost if scoring fails
        predicted = {key: predict(model, *x, args.dtype) for key, x in to_score.items()}
        scored = evaluate(predicted, evaluations, run, began, args.out_dir)
        score = next(iter(scored[0]["metrics"].values()))
        if math.isnan(best_score) or score > best_score:
            best_score = score
            with opening(file):
                os.replace(unscored, file)
        print_scores(scored)
        results += scored
    unscored.unlink(missing_ok=True)
    print(f"{name}: the best run's model is {file}")
    return results


def task_names(args):
    """--task -> the names of the tasks; for `all`, those whose training file exists. Raises
    UserError if there is none."""
    if args.task != "all":
        return [args.task]
    names = []
    for name, task in GLUE.items():
        file = Path(args.data_dir or "", task.folder, task.file("train"))
        if args.data_dir is None or os.path.exists(file):
            names.append(name)
        else:
            print(f"{name}: {file} does not exist; skipped")
    if not names:
        raise UserError(f"--task all: {args.data_dir} has no training file of GLUE")
    return names


def main(argv=None):
    with one_line_errors("use a smaller --batch_size or --length"):
        args = parse_args(argv)
        keep_memory()
        args.device = pick_device(args.device)
        args.dtype, _ = pick_dtype(args.device, args.dtype)
        args.compile = args.compile and can_compile(args.device)

        # All tasks start from the same checkpoint, even if another process saves a newer one.
        scratch = args.ckpt == "scratch"
        source = newest_run() if scratch or not args.ckpt else args.ckpt
        start = read_checkpoint(source)
        start.pop("optimizer", None)  # twice as large as the model
        if args.dropout is not None:
            start["config"] |= {"dropout": args.dropout, "attn_dropout": args.dropout}
        folder = Path("out") if scratch else Path(source)
        args.out_dir = Path(args.out_dir or (folder.parent if folder.is_file() else folder))
        names = task_names(args)
        kinds = itertools.product(("finetuned", "unscored"), names)
        files = [os.path.realpath(args.out_dir / f"{kind}-{name}.pt") for kind, name in kinds]
        if os.path.realpath(source) in files:
            raise UserError(f"{source} would be overwritten: use another --out_dir")
        if scratch:
            start |= {"model": {}, "step": 0}
            source = f"scratch, shaped like {source}"

        # All files are read before anything is trained.
        flags = args.data_dir, args.cache, args.limit_train
        tasks = {name: read_task(name, *flags) for name in names}
        make_folder(args.out_dir)
        results = []
        for name in names:
            with lock(args.out_dir, f"fine-tuning on {name}", f".{name}.lock"):
                results += finetune(name, *tasks.pop(name), start, source, args)
        report(results, args)
        print(f"results: {args.out_dir}/results.jsonl")


if __name__ == "__main__":
    main()
