"""Fine-tune a pre-trained encoder and score it.

    python finetune.py --task docs                                   # no network: which library is this docstring from?
    python finetune.py --task cola --data_dir glue --seeds 5         # official files: glue/CoLA/train.tsv, dev.tsv
    python finetune.py --task mnli                                   # from the hub
    python finetune.py --task docs --ckpt scratch                    # the same shape, untrained: what did pre-training give?
    python finetune.py --task docs --ckpt bow                        # TF-IDF with logistic regression, for comparison

Takes the newest checkpoint under out/ unless --ckpt names one. Every run is a line of results.jsonl; the table at
the end has the median over seeds, the spread, and the majority rate: what always saying the commonest class scores.
The recipe is ELECTRA's (Clark 2020, app. B), which P0 follows.
"""

import csv
import glob
import json
import math
import os
import re
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tiktoken
import torch
import torch.nn as nn
import torch.nn.functional as F
from tqdm import tqdm

from data import DOCS_LIBRARIES, Parser, encoding_arguments, one_line_errors, prepare
from model import Encoder, EncoderConfig, load
from train import autocast, keep_memory, one_line_failures, pick_device, pick_dtype

BATCH, WARMUP, EPS, LAYER_DECAY, LENGTH = 32, 0.1, 1e-6, 0.8, 128
LIBRARY_NAMES = re.compile(r"\b(python|pytorch|torch|numpy|np|pandas|pd|datasets?|hugging ?face)\b", re.IGNORECASE)


# ---------------------------------------------------------------------------------------------------------
# Metrics

def accuracy(labels, predictions):
    return float(np.mean(np.asarray(labels) == np.asarray(predictions)))


def matthews(labels, predictions):
    """Matthews correlation of two binary vectors; 0 where one of them is constant, as scikit-learn has it."""
    y, p = np.asarray(labels, float), np.asarray(predictions, float)
    spread = y.std() * p.std()
    return float(((y - y.mean()) * (p - p.mean())).mean() / spread) if spread > 0 else 0.0


def cola_metrics(labels, predictions):
    """P0 reports accuracy, the others Matthews: both, always."""
    return {"matthews": matthews(labels, predictions), "accuracy": accuracy(labels, predictions)}


def accuracy_metrics(labels, predictions):
    return {"accuracy": accuracy(labels, predictions)}


# ---------------------------------------------------------------------------------------------------------
# Tasks

@dataclass
class Task:
    """Where a task's rows are, in the official files and on the hub. Columns of a file without a header are numbers."""
    folder: str                     # below --data_dir
    evaluations: dict               # name in the table -> (official file, split of the hub)
    texts: tuple                    # columns
    label: str | int
    classes: tuple                  # as the official file writes them, in the hub's order
    epochs: int = 3
    metrics: callable = accuracy_metrics
    hub_texts: tuple = ()


TASKS = {
    "cola": Task("CoLA", {"cola": ("dev.tsv", "validation")}, (3,), 1, ("0", "1"), 3, cola_metrics, ("sentence",)),
    "mnli": Task("MNLI", {"mnli": ("dev_matched.tsv", "validation_matched"),
                          "mnli-mm": ("dev_mismatched.tsv", "validation_mismatched")},
                 ("sentence1", "sentence2"), "gold_label", ("entailment", "neutral", "contradiction"), 3,
                 accuracy_metrics, ("premise", "hypothesis")),
    "docs": Task("", {"docs": None}, ("text",), "library", DOCS_LIBRARIES, 10),
}
METRICS = {name: task.metrics for name, task in TASKS.items()}


def read_tsv(file, columns):
    """Official GLUE file -> rows of the named columns. Tab-separated, no quoting. Raises ValueError with file and line."""
    rows = []
    with open(file, encoding="utf-8-sig", newline="") as handle:
        reader = csv.reader(handle, delimiter="\t", quoting=csv.QUOTE_NONE)
        index = list(columns)
        if isinstance(columns[-1], str):
            header = next(reader, [])
            if missing := [name for name in columns if name not in header]:
                raise ValueError(f"{file} has no column {', '.join(missing)}, only {', '.join(header)}")
            index = [header.index(name) for name in columns]
        for row in reader:
            if len(row) <= max(index):
                raise ValueError(f"{file}, line {reader.line_num}: {len(row)} columns, at least {max(index) + 1} are needed")
            rows.append([row[i] for i in index])
    return rows


def official_rows(task, data_dir, file):
    """-> list of (texts, label index)."""
    path = Path(data_dir) / task.folder / file
    rows = []
    for number, (*texts, label) in enumerate(read_tsv(path, (*task.texts, task.label)), 1):
        if label not in task.classes:
            raise ValueError(f"{path}, row {number}: label {label!r} is not one of {', '.join(task.classes)}")
        rows.append((tuple(texts), task.classes.index(label)))
    if not rows:
        raise ValueError(f"{path} has no rows")
    return rows


def hub_rows(name, task, split):
    from datasets import load_dataset
    try:
        rows = load_dataset("nyu-mll/glue", name, split=split)
    except Exception as error:
        raise ValueError(f"cannot fetch nyu-mll/glue {name} from the hub ({type(error).__name__}): name a folder with the "
                         "official files with --data_dir, or take --task docs, which needs no network") from None
    return [(tuple(row[column] for column in task.hub_texts), row["label"]) for row in rows]


def docs_rows(cache):
    """Which library does a docstring come from? Libraries' names are masked; tested on pre-training's validation documents."""
    folder = prepare("docs", "bpe", cache).folder
    stored = json.loads((folder / "docs.json").read_text())
    rows = [((LIBRARY_NAMES.sub("[MASK]", text),), DOCS_LIBRARIES.index(library)) for library, text in stored["rows"]]
    # The same split as data.tokenize makes.
    is_test = [i % stored["every"] == 1 for i in range(len(rows))]
    return [r for r, test in zip(rows, is_test) if not test], {"docs": [r for r, test in zip(rows, is_test) if test]}


def read_task(name, args):
    """-> training rows, {name in the table: evaluation rows}; a row is (texts, label)."""
    task = TASKS[name]
    if name == "docs":
        train, evaluations = docs_rows(args.cache)
    elif args.data_dir:
        train, evaluations = official_rows(task, args.data_dir, "train.tsv"), {}
        for where, (file, _) in task.evaluations.items():
            if evaluations and not (Path(args.data_dir) / task.folder / file).exists():
                print(f"{where}: {file} is not there, left out")
                continue
            evaluations[where] = official_rows(task, args.data_dir, file)
    else:
        train = hub_rows(name, task, "train")
        evaluations = {where: hub_rows(name, task, split) for where, (_, split) in task.evaluations.items()}
    limit = args.limit_train or (500 if name == "docs" else len(train))
    order = np.random.default_rng(0).permutation(len(train))[:limit]
    return [train[i] for i in order], evaluations


# ---------------------------------------------------------------------------------------------------------
# Rows of ids

def encode(texts, tokenizer, cfg, length):
    """One or two texts -> [CLS] A [SEP] or [CLS] A [SEP] B [SEP], at most `length` ids, the longest cut first."""
    # 16 characters an id are more than text needs: a long document is not tokenised only to be cut.
    parts = [tokenizer.encode(text[:16 * length], allowed_special={"[MASK]"}, disallowed_special=()) for text in texts]
    room = length - 1 - len(parts)
    while sum(map(len, parts)) > room:
        max(parts, key=len).pop()
    return [cfg.cls_id] + [i for part in parts for i in part + [cfg.sep_id]]


def encode_rows(rows, tokenizer, cfg, length):
    return [(encode(texts, tokenizer, cfg, length), label) for texts, label in rows]


def batches(rows, size, rng=None):
    """Rows of near lengths together, so that little is padding -> (rows of one batch). Shuffled when rng is given."""
    order = rng.permutation(len(rows)) if rng else np.arange(len(rows))
    window = 50 * size if rng else len(rows)            # sorted by length within a window: still random enough
    groups = []
    for start in range(0, len(rows), window):
        near = sorted(order[start:start + window], key=lambda i: len(rows[i][0]))
        groups += [near[i:i + size] for i in range(0, len(near), size)]
    for g in (rng.permutation(len(groups)) if rng else range(len(groups))):
        yield groups[g]


def collate(rows, pad_id, device):
    """-> tokens (B, L), pad (B, L) bool, labels (B,), padded to the longest of the batch."""
    longest = max(len(ids) for ids, _ in rows)
    tokens = torch.full((len(rows), longest), pad_id)
    for row, (ids, _) in zip(tokens, rows):
        row[:len(ids)] = torch.tensor(ids)
    return tokens.to(device), (tokens == pad_id).to(device), torch.tensor([label for _, label in rows], device=device)


# ---------------------------------------------------------------------------------------------------------
# Model

class Classifier(nn.Module):
    """Head on [CLS]: dropout, dense, tanh, dropout, linear."""
    def __init__(self, encoder, n_class):
        super().__init__()
        self.encoder = encoder
        C = encoder.config.d_model
        self.head = nn.Sequential(nn.Dropout(0.1), nn.Linear(C, C), nn.Tanh(), nn.Dropout(0.1), nn.Linear(C, n_class))
        for layer in (self.head[1], self.head[4]):
            nn.init.normal_(layer.weight, std=0.02)
            nn.init.zeros_(layer.bias)

    def forward(self, tokens, pad):
        return self.head(self.encoder(tokens, pad=pad)[:, 0])                       # (B, n_class)


def layer_groups(model, lr):
    """Layer-wise decay (ELECTRA): head lr, top layer lr * .8, and so on down; embeddings and positions lowest."""
    n = len(model.encoder.blocks)
    groups = [{"params": list(model.head.parameters()), "peak": lr}]
    groups += [{"params": list(block.parameters()), "peak": lr * LAYER_DECAY ** (n - i)}
               for i, block in enumerate(model.encoder.blocks)]
    rest = [p for name, p in model.encoder.named_parameters() if not name.startswith("blocks.")]
    return groups + [{"params": rest, "peak": lr * LAYER_DECAY ** (n + 1)}]


def train_one(model, rows, args, seed, device, dtype):
    """Fine-tune in place: AdamW, warm-up over a tenth of the steps, linear decay to 0, clip 1."""
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    optimizer = torch.optim.AdamW(layer_groups(model, args.lr), eps=EPS, weight_decay=0.0)
    scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)
    steps = args.epochs * math.ceil(len(rows) / args.batch_size)
    bar, step = tqdm(total=steps, desc=f"{args.task} seed {seed}", unit="step", disable=None, leave=False), 0
    model.train()
    for _ in range(args.epochs):
        for group in batches(rows, args.batch_size, rng):
            tokens, pad, labels = collate([rows[i] for i in group], model.encoder.config.pad_id, device)
            share = min((step + 1) / max(1, WARMUP * steps), (steps - step) / max(1, (1 - WARMUP) * steps))
            for param_group in optimizer.param_groups:
                param_group["lr"] = param_group["peak"] * share
            with autocast(device, dtype):
                loss = F.cross_entropy(model(tokens, pad).float(), labels)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            step += 1
            bar.update()
    bar.close()


@torch.no_grad()
def predict(model, rows, device, dtype, size=128):
    """-> predicted class of each row, in order."""
    model.eval()
    out = np.zeros(len(rows), int)
    for group in batches(rows, size):
        tokens, pad, _ = collate([rows[i] for i in group], model.encoder.config.pad_id, device)
        with autocast(device, dtype):
            out[group] = model(tokens, pad).argmax(-1).cpu().numpy()
    return out


def bag_of_words(rows, evaluations):
    """TF-IDF with logistic regression on the same rows -> {name: predictions}."""
    try:
        from sklearn.feature_extraction.text import TfidfVectorizer
        from sklearn.linear_model import LogisticRegression
    except ImportError:
        raise ValueError("--ckpt bow needs scikit-learn: pip install -r requirements-dev.txt") from None
    vectors = TfidfVectorizer(sublinear_tf=True)
    x = vectors.fit_transform(" ".join(texts) for texts, _ in rows)
    model = LogisticRegression(C=10, max_iter=1000).fit(x, [label for _, label in rows])
    return {name: model.predict(vectors.transform(" ".join(texts) for texts, _ in found)) for name, found in evaluations.items()}


# ---------------------------------------------------------------------------------------------------------

def newest_checkpoint():
    found = sorted(glob.glob("out/*/ckpt.pt"), key=os.path.getmtime)
    return str(Path(found[-1]).parent) if found else None


def make_encoder(ckpt, cache):
    """-> function that gives a fresh encoder, and the name of where it comes from."""
    source = newest_checkpoint() if ckpt in (None, "scratch") else ckpt
    if source is None and ckpt is None:
        raise FileNotFoundError("no checkpoint under out/: pre-train one (python train.py), or take --ckpt scratch")
    if ckpt != "scratch":
        load(source)            # a mistake shows here
        return lambda: load(source), source
    if source:
        trained = load(source)
        cfg, tokenizer = trained.config, trained.tokenizer
        name = f"scratch, shaped like {source}"
    else:
        corpus = prepare("docs", "bpe", cache)
        cfg, name = EncoderConfig(vocab_size=corpus.vocab_size), "scratch, demo"
        tokenizer = tiktoken.Encoding(**encoding_arguments(corpus.tokenizer))

    def fresh():
        encoder = Encoder(cfg)
        encoder.tokenizer = tokenizer
        return encoder
    return fresh, name


def parse_args(argv=None):
    parser = Parser("finetune.py", __doc__)
    parser.add_argument("--task", choices=TASKS, required=True)
    parser.add_argument("--ckpt", help="run folder or checkpoint file (default: the newest under out/); scratch: untrained; "
                        "bow: bag of words")
    parser.add_argument("--data_dir", help="folder with the official GLUE folders (default: from the hub)")
    parser.add_argument("--seeds", type=int, default=1, help="runs, with seeds 0, 1, .. (default: %(default)s)")
    parser.add_argument("--lr", type=float, help="of the head; lower layers get less (default: 1e-4, or 3e-4 below width 512)")
    parser.add_argument("--epochs", type=int, help="default: 3; docs 10")
    parser.add_argument("--batch_size", type=int, default=BATCH, help="default: %(default)s")
    parser.add_argument("--length", type=int, default=LENGTH,
                        help="ids a row at most; the model's max_len caps it (default: %(default)s)")
    parser.add_argument("--limit_train", type=int, help="training rows (default: all; docs 500)")
    parser.add_argument("--out_dir", help="where results.jsonl goes (default: the run's folder)")
    parser.add_argument("--cache", default="cache", help="folder of prepared data (default: %(default)s)")
    parser.add_argument("--device", choices=["cpu", "cuda", "mps"])
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"])
    args = parser.parse_args(argv)
    with one_line_errors():
        for name in ("seeds", "epochs", "batch_size", "length", "limit_train", "lr"):
            value = getattr(args, name)
            if value is not None and not (value > 0 and value < math.inf):
                raise ValueError(f"--{name} is {value}; it must be positive")
        if args.length < 8:
            raise ValueError(f"--length is {args.length}; a pair with its specials needs at least 8")
    args.epochs = args.epochs or TASKS[args.task].epochs
    return args


def report(results, task):
    """The table: median over seeds, spread, majority rate."""
    print(f"\n{'':10}{'metric':12}{'median':>8}{'min':>8}{'max':>8}{'majority':>10}{'seeds':>7}{'s a run':>9}")
    for where in dict.fromkeys(r["task"] for r in results):
        rows = [r for r in results if r["task"] == where]
        for metric in rows[0]["metrics"]:
            values = [r["metrics"][metric] for r in rows]
            majority = f"{rows[0]['majority']:.3f}" if metric == "accuracy" else "0" if metric == "matthews" else "-"
            print(f"{where:10}{metric:12}{statistics.median(values):8.3f}{min(values):8.3f}{max(values):8.3f}{majority:>10}"
                  f"{len(rows):7}{statistics.mean(r['seconds'] for r in rows):9.0f}")
    if constant := [r for r in results if r["one_class"]]:
        print(f"collapsed: {len(constant)} of {len(results)} runs predict one class only")


def main(argv=None):
    args = parse_args(argv)
    keep_memory()
    task, bow = TASKS[args.task], args.ckpt == "bow"
    with one_line_errors():
        device = pick_device(args.device)
        dtype, _ = pick_dtype(device, args.dtype)
        fresh, source = (None, "bow") if bow else make_encoder(args.ckpt, args.cache)
        rows, evaluations = read_task(args.task, args)
        if not bow:
            encoder = fresh()
            cfg, length = encoder.config, min(args.length, encoder.config.max_len)
            args.lr = args.lr or (1e-4 if cfg.d_model >= 512 else 3e-4)
            rows = encode_rows(rows, encoder.tokenizer, cfg, length)
            evaluations = {name: encode_rows(found, encoder.tokenizer, cfg, length) for name, found in evaluations.items()}
        folder = Path(args.out_dir or (source if os.path.isdir(source) else "out"))
        folder.mkdir(parents=True, exist_ok=True)
    scored = ", ".join(f"{len(found):,} of {name}" for name, found in evaluations.items())
    print(f"{args.task}: {len(rows):,} rows to train on, {scored} to score; from {source}"
          + ("" if bow else f"; length {length}, lr {args.lr:g}, {args.epochs} epochs"))
    results = []
    for seed in range(1 if bow else args.seeds):
        start = time.time()
        if bow:
            predictions = bag_of_words(rows, evaluations)
        else:
            torch.manual_seed(seed)
            model = Classifier(fresh(), len(task.classes)).to(device)
            with one_line_failures("lower --batch_size or --length"):
                train_one(model, rows, args, seed, device, dtype)
            predictions = {name: predict(model, found, device, dtype) for name, found in evaluations.items()}
        for name, found in evaluations.items():
            labels = [label for _, label in found]
            results.append({"task": name, "seed": seed, "lr": args.lr, "metrics": task.metrics(labels, predictions[name]),
                            "majority": max(np.bincount(labels)) / len(labels), "one_class": len(set(predictions[name])) == 1,
                            "ckpt": source, "seconds": time.time() - start, "epochs": args.epochs, "n_train": len(rows)})
            print(f"{name} seed {seed}: " + ", ".join(f"{key} {value:.4f}" for key, value in results[-1]["metrics"].items())
                  + f" (majority {results[-1]['majority']:.4f}), {results[-1]['seconds']:.0f} s", flush=True)
            with open(folder / "results.jsonl", "a") as handle:
                handle.write(json.dumps(results[-1]) + "\n")
    report(results, args.task)
    print(f"results: {folder / 'results.jsonl'}")


if __name__ == "__main__":
    sys.exit(main())
