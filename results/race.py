"""The loss of mlm after equal wall-clock time: this project's models beside transformers'.

    OMP_NUM_THREADS=1 python -m results.race 20      # minutes of training per model; two hours
    python -m results.race 5 --pe tupe_r,rope        # other schemes; some flags of train.py, too

All models have the same size, sequences, masks, vocabulary and optimizer. How many steps fit into
the minutes is measured first, with the models taking turns. Each model is then trained for that
many steps, warm-up and decay included. Rows are added to results/bench-race.json; a model that has
a row there is not trained again, so the same command resumes.
"""

import argparse
from pathlib import Path
from statistics import median
from time import perf_counter

import torch
from tqdm import tqdm  # comes with datasets

import data
import train
from lib.config import Parser, UserError, one_line_errors
from lib.device import autocast, keep_memory, pick_device, pick_dtype, processor_name
from lib.files import read_json, write_json
from lib.run import clip_and_step, schedule
from tools.bench import PEERS, Peer

FILE = Path(__file__).with_name("bench-race.json")
WARMUP_ROUNDS, ROUNDS = 3, 15  # steps of each model to measure their times
POINTS = 20  # of a model's curve
# The flags of train.py that may be given: those that a row records, and where to run.
RECORDED = "preset seed lr batch_size block_size mask_rate".split()
FLAGS = [*RECORDED, "dtype", "cache", "device"]


def start(name, args, corpus, batches):
    """name: 'ours tupe_r', or a class of transformers -> a new model and step(number, lr), which
    runs one training step and returns its seconds."""
    torch.manual_seed(args.seed)
    pe = "none" if name in PEERS else name.removeprefix("ours ")
    run = argparse.Namespace(**vars(args) | {"pe": pe})
    ours = train.build_model(run, corpus.vocab_size, tokenizer=None)
    model = (Peer(name, ours) if name in PEERS else ours).to(args.device).train()
    optimizer = train.build_optimizer(model, args)
    scaler = torch.amp.GradScaler(args.device.type, enabled=args.dtype == torch.float16)

    def step(number, lr):
        began = perf_counter()
        for group in optimizer.param_groups:
            group["lr"] = lr
        tokens = torch.from_numpy(batches(number, args.batch_size)).to(args.device)
        with autocast(args.device, args.dtype):
            loss = model(model.corrupt(tokens, args.seed, number, 0))[0]
        scaler.scale(loss).backward()
        clip_and_step(model, optimizer, scaler)
        loss.item()  # wait for a GPU
        return perf_counter() - began

    return model, step


def step_times(names, args, corpus, batches):
    """-> {name: ms per step}, the median over rounds in which every model takes a step."""
    steps = [start(name, args, corpus, batches)[1] for name in names]
    rounds = [[step(0, 0.0) for step in steps] for _ in range(WARMUP_ROUNDS + ROUNDS)]
    return {name: 1e3 * median(x) for name, x in zip(names, zip(*rounds[WARMUP_ROUNDS:]))}


def train_for(steps, name, args, corpus, batches):
    """Train a model -> the numbers of its row."""
    model, step = start(name, args, corpus, batches)
    warmup = min(args.warmup, steps // 3)
    validation = data.validation_batches(corpus, args.block_size)
    points = {round(steps * (i + 1) / POINTS) for i in range(POINTS)}
    seconds, curve = 0.0, []
    for n in tqdm(range(steps), name, leave=False, disable=None):
        seconds += step(n, args.lr * schedule(n, steps, warmup))
        if n + 1 in points:  # not counted as training time
            amp = autocast(args.device, args.dtype)
            loss = train.evaluate(model, validation, amp, args.device)["val_loss"]
            curve.append((seconds, loss))
    n_parameters = sum(p.numel() for p in model.parameters())
    row = {"parameters": n_parameters, "steps": steps, "warmup": warmup, "seconds": seconds}
    return row | {"loss": loss, "curve": curve}


def race(minutes, schemes, args):
    """Train each model for this many minutes, unless it has a row, and print the table."""
    corpus = data.prepare("docs", "bpe", args.cache)
    batches = data.Batches(corpus, args.block_size, args.seed)
    dtype = str(args.dtype).removeprefix("torch.")
    name, threads = processor_name(args.device.type), torch.get_num_threads()
    machine = f"{name}, {threads} threads, torch {torch.__version__}, {dtype}"
    # Rows are comparable if these are equal; the file may hold others.
    conditions = {"race": minutes, **{name: getattr(args, name) for name in RECORDED}}
    conditions |= {"machine": machine, "tokenizer_hash": corpus.meta["tokenizer_hash"]}
    rows = read_json(FILE)["rows"] if FILE.exists() else []
    done = {row["name"]: row for row in rows if conditions.items() <= row.items()}

    def add(name, found):
        done[name] = {"name": name, **conditions, **found}
        rows.append(done[name])
        write_json(FILE, {"rows": rows})

    names = [*(f"ours {pe}" for pe in schemes), *PEERS]
    if not {*names} <= done.get("step times", {"ms_per_step": {}})["ms_per_step"].keys():
        add("step times", {"ms_per_step": step_times(names, args, corpus, batches)})
    ms = done["step times"]["ms_per_step"]
    print(f"{machine}\n{'':24}{'ms/step':>9}{'steps':>8}{'seconds':>9}{'loss':>8}")
    for name in names:
        if name not in done:
            steps = max(1, int(60e3 * minutes / ms[name]))
            add(name, train_for(steps, name, args, corpus, batches))
        row = done[name]
        print(f"{name:24}{ms[name]:9.1f}{row['steps']:8,}{row['seconds']:9.0f}{row['loss']:8.3f}")


def main(argv=None):
    parser = Parser("-m results.race", __doc__)
    parser.add_argument("minutes", type=float, help="minutes of training for each model")
    parser.add_argument("--pe", default="abs,tupe_r", help="schemes")
    with one_line_errors():
        given, more = parser.parse_known_args(argv)
        schemes = given.pe.split(",")
        for pe in schemes:
            args = train.parse_args([*more, "--pe", pe])
        for word in more:
            if word.startswith("--") and word[2:].partition("=")[0] not in FLAGS:
                raise UserError(f"{word} is not one of --{', --'.join(FLAGS)}")
        args.device = pick_device(args.device)
        args.dtype = pick_dtype(args.device, args.dtype)[0]
        keep_memory()
        race(given.minutes, schemes, args)


if __name__ == "__main__":
    main()
