"""Pre-train a text encoder: any positional scheme (--pe) with any objective (--objective).

    python train.py --pe tupe_r                       # guess masked words: minutes on a CPU
    python train.py --pe tupe_r --objective mlm+pplm --pos_rate .15 --n_head 16 --steps 3000
    torchrun --nproc_per_node 4 train.py --pe tupe_r --preset base      # several GPUs

The second also asks where shuffled words stood, the third has BERT's size. A run lives in
out/<dataset>-<preset>-<pe>-<objective>-s<seed>/; stopped, it goes on with --resume. Any flag
overrides its preset.
"""

import argparse
import contextlib
import json
import math
import os
import re
import shlex
import time
from collections import defaultdict
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

import tiktoken
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.flop_counter import FlopCounterMode
from tqdm import tqdm

import common
import sample
from baselines import baselines, meaning_of, unigram_entropy
from common import one_line_errors, pick_fields, read_checkpoint, read_rows, setting
from data import (
    Batches,
    DataConfig,
    encoding_arguments,
    open_prepared,
    prepare,
    validation_batches,
)
from fast import step_or_skip
from model import PE_NAMES, Encoder, EncoderConfig, load_strict, warm_start
from objectives import OBJECTIVES, ObjectiveConfig, Pretraining, stream, users, without_effect

DOCS = dict(dataset="docs", tokenizer="bpe")
WEB = dict(dataset="wikibooks", tokenizer="gpt2")
ADAM_98 = dict(beta1=0.9, beta2=0.98, eps=1e-6)
ADAM_999 = dict(beta1=0.9, beta2=0.999, eps=1e-6)
# Sources: demo and lab ours (searched: results/README.md; short, so without dropout); paper P0
# app. A (warm-up, betas and decay ours); small P2; medium P3 (it gives epochs; width, heads and
# steps ours); base P1.
# fmt: off
PRESETS = {
    "demo": dict(n_layer=4, d_model=128, n_head=4, d_ff=512, block_size=64, batch_size=32,
                 grad_accum=1, lr=3e-3, warmup=500, steps=1500, mask_rate=.15, dropout=0.,
                 **ADAM_98, **DOCS),
    "lab": dict(n_layer=4, d_model=256, n_head=8, d_ff=1024, block_size=64, batch_size=64,
                grad_accum=1, lr=2e-3, warmup=500, steps=3000, mask_rate=.15, dropout=0.,
                **ADAM_98, **DOCS),
    "paper": dict(n_layer=12, d_model=256, n_head=16, d_ff=1024, block_size=128, batch_size=64,
                  grad_accum=1, lr=5e-4, warmup=1000, steps=40_000, mask_rate=.30, **ADAM_98,
                  **WEB),
    "small": dict(n_layer=4, d_model=512, n_head=8, d_ff=2048, block_size=256, batch_size=64,
                  grad_accum=20, lr=1e-4, warmup=2500, steps=250_000, mask_rate=.15,
                  **{**ADAM_999, "eps": 1e-8}, **WEB),
    "medium": dict(n_layer=8, d_model=512, n_head=8, d_ff=2048, block_size=128, batch_size=128,
                   grad_accum=1, lr=5e-5, warmup=10_000, steps=250_000, mask_rate=.15, **ADAM_999,
                   **WEB),
    "base": dict(n_layer=12, d_model=768, n_head=12, d_ff=3072, block_size=512, batch_size=32,
                 grad_accum=8, lr=1e-4, warmup=10_000, steps=1_000_000, mask_rate=.15, **ADAM_999,
                 **WEB),
}
# fmt: on
# What an objective's loss is a mean over, by its kind.
UNITS = {
    "token": "a word",
    "position": "a pair of words",
    "sentence": "an answer",
    "contrastive": "an answer",
}
STOP_EVERY = 10  # micro-batches after which several processes agree on whether to stop
# Flags that may change when a run is resumed: the machine's, and those of files and logs. Of
# grad_accum and the number of processes the product has to stay (identity).
FREE_FLAGS = set(
    "resume init_from init_embeddings out_dir cache device dtype compile log_every eval_every "
    "keep_every save_every grad_accum sample".split()
)
# Flags that the hint at the end of a demo leaves to the preset of the real run.
OF_A_DEMO = FREE_FLAGS | set(
    "preset steps warmup lr batch_size block_size n_layer d_model d_ff dataset tokenizer".split()
)


@dataclass
class TrainConfig:
    """The flags that are neither the encoder's nor the objective's nor the data's. None: every
    preset has its own, or see the help text."""

    preset: str = setting("demo", "sizes and schedule, see below", tuple(PRESETS))
    seed: int = setting(1337, "of everything random", "[0, 9e18]")
    block_size: int = setting(None, "tokens a row, [CLS] and [SEP] included", "[4, 1e5]")
    batch_size: int = setting(None, "rows a micro-batch and process", "[1, 1e6]")
    grad_accum: int = setting(None, "micro-batches an update", "[1, 1e6]")
    steps: int = setting(None, "updates in all; part of a run: the decay depends on it", "[1, 2e9]")
    lr: float = setting(None, "peak rate: linear warm-up, then linear decay to 0", "(0, 1e9)")
    warmup: int = setting(None, "steps of warm-up", "[0, 2e9]")
    weight_decay: float = setting(0.01, "on matrices only", "[0, 1e9)")
    beta1: float = setting(None, "Adam's first decay", "[0, 1)")
    beta2: float = setting(None, "Adam's second decay", "[0, 1)")
    eps: float = setting(None, "Adam's epsilon", "(0, 1e9)")
    data_fraction: float = setting(
        1.0, "train on this share of the rows, chosen at random (P2)", "(0, 1]"
    )
    init_from: str | None = setting(
        None, "a run to start from: its scheme and objective may differ, its rows be shorter"
    )
    init_embeddings: str | None = setting(None, "a run whose word embeddings to start with (P2)")
    freeze_embeddings: bool = setting(False, "never update the word embeddings (P2)")
    out_dir: str | None = setting(None, "folder of the run (default: see above)")
    resume: bool = setting(False, "go on from the run folder's checkpoint, if it has one")
    eval_every: int = setting(500, "steps between validations", "[1, 2e9]")
    save_every: float = setting(
        30.0, "a validation saves if the last save is so many seconds old", "[0, 1e9]"
    )
    keep_every: int = setting(0, "also keep ckpt_<step>.pt every so many steps", "[0, 2e9]")
    log_every: int = setting(100, "steps between log lines", "[1, 2e9]")
    sample: str | None = setting(None, "text of the line that the model says at each validation")
    device: str | None = common.DEVICE
    dtype: str | None = common.DTYPE
    compile: bool | None = setting(None, "torch.compile (default: on a GPU)")

    __post_init__ = common.check_settings


def parse_args(argv=None):
    """Flags over preset over defaults -> namespace with every value set. Exits with 2 on a
    mistake."""
    # Every field of these dataclasses that has a help text is a flag (common.add_settings);
    # pick_fields makes the dataclass of a run out of the flags again.
    lines = [f"--pe: {', '.join(PE_NAMES)}", f"--objective: {', '.join(OBJECTIVES)}", "presets:"]
    for name, p in PRESETS.items():
        rows = p["batch_size"] * p["grad_accum"]
        lines.append(
            f"  {name:8}{p['n_layer']:>2} layers of {p['d_model']}, rows of "
            f"{p['block_size']}, batch {rows:,}, lr {p['lr']:g}, {p['steps']:,} steps, "
            f"{p['dataset']}"
        )
    parser = common.Parser("train.py", __doc__, "\n".join(lines))
    groups = {
        "the run": TrainConfig,
        "what is trained": EncoderConfig,
        "objectives": ObjectiveConfig,
        "data": DataConfig,
    }
    for title, config_class in groups.items():
        parser.add_settings(title, config_class, PRESETS["demo"])
    given = vars(parser.parse_args(argv))
    preset = PRESETS[given.get("preset", "demo")]
    args = argparse.Namespace(**common.defaults(*groups.values()) | preset | given)
    with one_line_errors():
        args.pe, args.objective = args.pe.lower(), args.objective.lower()
        pick_fields(TrainConfig, args)
        pick_fields(EncoderConfig, args)
        cfg = pick_fields(ObjectiveConfig, args)
        if args.batch_size * args.block_size >= 2**31:
            raise ValueError(
                f"--batch_size {args.batch_size} times --block_size {args.block_size} "
                "is too much for one micro-batch: raise --grad_accum instead"
            )
    args.given = given
    # In the order of corruption, whatever the spelling.
    args.objective, args.loss_weights = cfg.objective, cfg.loss_weights
    for name in without_effect(cfg, cfg.objective.split("+")):
        if name in given:
            print(
                f"note: --{name} is for {', '.join(users(name))}: it has no effect on "
                f"{args.objective}"
            )
    return args


def default_out_dir(args):
    dataset = args.dataset
    if re.search(r"[*?.]", dataset):
        dataset = Path(dataset).parent.name or Path(dataset).stem
    dataset = re.sub(r"[^A-Za-z0-9]+", "-", dataset).strip("-") or "files"
    return f"out/{dataset}-{args.preset}-{args.pe}-{args.objective}-s{args.seed}"


# --------------------------------------------------------------------------------------------------
# The loop


def train(args, progress):
    """Everything from flags to the last checkpoint.

    Until the folder is opened every ValueError and OSError is a user's mistake; progress.saved is
    the step of the last checkpoint.
    """
    # ---- What it takes: a machine, text, a model, an optimiser; where an earlier process stopped.
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    main_process = rank == 0
    device = common.pick_device(args.device)
    folder = Path(args.out_dir or default_out_dir(args))
    try_out(args, device)
    corpus, checkpoint, dtype, why = prepare_together(args, folder, device, world, main_process)
    amp = common.autocast(device, dtype)  # inside it matrix products take 16 bits
    batches = Batches(corpus, args.block_size, args.seed, args.data_fraction)
    model = build_model(args, corpus, device)
    # Rate and counts are tensors on the device, so that no step waits for the host.
    lr = torch.zeros((), device=device)
    done = torch.zeros((), device=device)  # updates made
    lost = torch.zeros((), device=device)  # updates skipped
    in_a_row = torch.zeros((), device=device)  # skipped since one was made
    optimizer = make_optimizer(model, args, lr)
    scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)
    n_micro, rows = args.grad_accum * world, args.grad_accum * world * args.batch_size
    facts = facts_of(args, model, corpus, n_micro, device, dtype)
    if checkpoint:
        step = go_on(folder, checkpoint, facts, model, optimizer, lr, scaler, done)
    else:
        step = start_anew(model, args, facts, main_process)
    flops = count_flops(model, batches, args, amp, device) * n_micro
    if main_process:
        announce(args, model, batches, f"{device}, {name_of(dtype)} ({why})", rows, flops)
        known = facts["baselines"] = what_losses_are_worth(model, corpus, checkpoint)
        text = args.sample or sample.fixed_sentence(model, corpus)
        progress.lock = open_folder(folder, facts, corpus, step)  # held until the process ends
    progress.saved = step  # from here on nothing is a user's mistake
    net, how = wrap(model, args, device, world)
    if main_process:
        announce_baselines(known)
        print(f"resumed at step {step}" if step else f"the run lives in {folder}")
        if how:
            print(how, flush=True)

    # ---- The loop.
    signals = progress.at_the_end.enter_context(common.Signals())  # given back however it ends
    losses, stopping = [], 0
    parameters = list(model.parameters())
    agree_every = max(1, STOP_EVERY // args.grad_accum)  # torchrun kills 30 s after its SIGTERM
    sums, since, began = defaultdict(float), step, time.perf_counter()
    saved_at = started = began
    row = {}
    silent = None if main_process else True  # None: a bar in a terminal, nothing in a file
    bar = tqdm(total=args.steps, initial=step, unit="step", leave=False, disable=silent)
    model.train()
    while step < args.steps:
        # The learning rate: linear warm-up, then linear decay to 0. It follows the updates that
        # were made, not the steps: an update that is skipped advances no schedule.
        decay = (args.steps - done) / max(1, args.steps - args.warmup)
        rise = (done + 1) / max(1, args.warmup)
        lr.copy_(args.lr * torch.minimum(rise, decay).clamp(0, 1))

        # The gradient of the mean over grad_accum micro-batches. Rows, corruption and dropout are
        # functions of (seed, step, micro): a resumed run needs no generator's state, and two
        # processes compute what one does with twice the accumulation.
        for accum in range(args.grad_accum):
            micro = accum * world + rank
            tokens = torch.from_numpy(batches(step * n_micro + micro, args.batch_size))
            if device.type == "cuda":  # from pinned memory the copy does not wait
                tokens = tokens.pin_memory().to(device, non_blocking=True)
            batch = model.corrupt(tokens.to(device), args.seed, step, micro)
            # Dropout draws from the global generators, so these are seeded anew.
            torch.manual_seed(stream("cpu", args.seed, step, micro, "dropout").initial_seed())
            # Several processes exchange their gradients once an update, with the last backward.
            later = world > 1 and accum < args.grad_accum - 1
            with net.no_sync() if later else contextlib.nullcontext():
                with amp:
                    loss, scalars = net(batch)
                scaler.scale(loss / args.grad_accum).backward()
            for name, value in {"loss": loss.detach(), **scalars}.items():
                sums[name] += value / args.grad_accum

        # Clip the gradient to norm 1 and update the weights; a gradient that is not finite is
        # skipped. All of it on the device: the host does not wait, it runs ahead.
        bad = step_or_skip(parameters, optimizer, scaler)
        done += 1 - bad
        lost += bad
        in_a_row = (in_a_row + 1) * bad
        step += 1
        bar.update()

        # A signal asks to stop. One process stops at once; several have to agree, at a step that
        # all of them reach.
        stopping = signals.received or 0
        if world > 1 and step % agree_every:
            stopping = 0
        elif world > 1:
            number = torch.tensor(stopping, device=device)
            dist.all_reduce(number, dist.ReduceOp.MAX)
            stopping = int(number)
        evaluating = step % args.eval_every == 0 or step == args.steps
        keeping = args.keep_every > 0 and step % args.keep_every == 0
        if not (step % args.log_every == 0 or evaluating or keeping or stopping):
            continue

        # Log: here, once in a while, the host waits for the device.
        means = torch.stack([value.float() for value in sums.values()]) / (step - since)
        if world > 1:
            dist.all_reduce(means)
            means /= world
        means = dict(zip(sums, means.tolist()))
        losses.append(means["loss"])
        # With a scaler (fp16) skips are normal, unless the last ten updates were all skipped.
        # Without one a single skip stops the run.
        if in_a_row >= 10 or lost > 0 and not scaler.is_enabled():
            stop_as_broken(step, losses)
        seconds = (time.perf_counter() - began) / (step - since)
        row = log_row(step, means, lr, seconds, rows, flops / world, args, dtype, device)
        if evaluating and main_process:
            row.update(evaluate(model, corpus, amp, device))
        if main_process:
            tqdm.write(as_text(row, args.steps, known))
            with open(folder / "log.jsonl", "a") as handle:
                handle.write(json.dumps(row) + "\n")
        if evaluating and main_process and text:
            tqdm.write("    its guess: " + sample.line(model, text))  # the model speaks

        # Save: everything that the next process needs to go on as if nothing had happened.
        due = evaluating and time.perf_counter() - saved_at >= args.save_every
        if main_process and (due or keeping or stopping or step == args.steps):
            save(folder, keeping, step, facts, model, optimizer, scaler, done)
            progress.saved, saved_at = step, time.perf_counter()
        if stopping:
            break
        sums.clear()
        since, began = step, time.perf_counter()
    bar.close()
    if world > 1:
        dist.barrier()  # torchrun ends them all when one has left: not before all is saved
    progress.at_the_end.close()
    if main_process:
        if stopping:
            print(
                f"stopped at step {step}, saved in {folder}; --resume goes on with the same command"
            )
        else:
            say_goodbye(args, folder, row, known, time.perf_counter() - started)
    if world > 1 or stopping:
        common.leave(128 + stopping if stopping else 0)


# --------------------------------------------------------------------------------------------------
# What the loop calls


def make_optimizer(model, args, lr):
    """AdamW; weight decay on matrices and tables, not on biases, gains and other vectors: what has
    two dimensions or more counts as a matrix."""
    learned = [p for p in model.parameters() if p.requires_grad]  # not --freeze_embeddings
    matrices = [p for p in learned if p.dim() >= 2]
    vectors = [p for p in learned if p.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": args.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        groups, lr=lr, betas=(args.beta1, args.beta2), eps=args.eps, fused=True
    )


@torch.no_grad()
def evaluate(model, corpus, amp, device):
    """Mean loss and scalars over fixed validation rows with fixed corruption, dropout off
    -> {name: float}."""
    model.eval()
    batches, sums = validation_batches(corpus, model.encoder.config.max_len), defaultdict(float)
    n = sum(map(len, batches))
    for number, tokens in enumerate(batches):
        batch = model.corrupt(tokens.to(device), "validation", number)
        with amp:
            loss, scalars = model(batch)
        for name, value in {"loss": loss, **scalars}.items():
            name = f"val_{name}"
            sums[name] += value.float() * len(tokens) / n
    model.train()
    return {name: float(value) for name, value in sums.items()}


def as_text(row, steps, known):
    """A line of the log for people."""
    parts = [f"{name} {value:.3f}" for name, value in row.items() if name in OBJECTIVES]
    text = f"step {row['step']:>6}/{steps}  loss {row['loss']:.4f}"
    text += f" ({', '.join(parts)})" if len(parts) > 1 else ""
    text += (
        f"  lr {row['lr']:.1e}  {row['ms_per_step']:.0f} ms/step  "
        f"{row['tokens_per_s'] / 1e3:.1f}k tokens/s"
    )
    if "mfu" in row:
        text += f"  MFU {100 * row['mfu']:.0f}%"
    if "val_loss" in row:
        text += f"  val {row['val_loss']:.4f}{passed(row, known)}"
    return text + (f"  {row['peak_mem_mb'] / 1024:.1f} GB" if row["peak_mem_mb"] else "")


def passed(row, known):
    """' (0.310 below prior)': for each part of the objective, the lowest of its baselines that the
    validation loss has passed."""
    notes = []
    for part in OBJECTIVES:
        loss = row.get(f"val_{part}", math.inf)
        below = [pair for pair in baselines_of(part, known) if loss < pair[0]]
        if below:
            value, name = min(below)
            notes.append(f"{value - loss:.3f} below {name}")
    return f" ({', '.join(notes)})" if notes else ""


def baselines_of(part, known):
    """[(nats, name)]: "copy" of one objective, "pplm.copy" of several."""
    own = [name for name in known if "." not in name or name.startswith(f"{part}.")]
    return [(known[name], name) for name in own]


def learned(row, known):
    """What the loss on text that it has not seen is worth, a sentence for each part of the
    objective: the best baseline that it has passed, and the next one, which it has not."""
    for part in OBJECTIVES:
        if f"val_{part}" not in row:
            continue
        loss, own = row[f"val_{part}"], sorted(baselines_of(part, known))
        beaten = [pair for pair in own if loss < pair[0]]
        ahead = [pair for pair in own if loss >= pair[0]]
        unit = UNITS[OBJECTIVES[part].kind]
        text = f"{part} loses {loss:.2f} nats {unit} on text it has not seen"
        for said, pairs in (("better", beaten[:1]), ("not yet better", ahead[-1:])):
            for value, name in pairs:
                text += f"; {said} than knowing only {meaning_of(name)} ({value:.2f})"
        yield text


def log_row(step, means, lr, seconds, rows, flops, args, dtype, device):
    """A line of log.jsonl. seconds: of a step; flops: operations of a step, of one process."""
    row = dict(
        step=step,
        **means,
        lr=float(lr),
        ms_per_step=1e3 * seconds,
        tokens_per_s=rows * args.block_size / seconds,
        peak_mem_mb=common.peak_memory_mb(device),
    )
    if (peak := common.peak_flops(device)) and dtype != torch.float32:
        row["mfu"] = flops / seconds / peak
    return row


def stop_as_broken(step, losses):
    before = ", ".join(f"{x:.3f}" for x in losses[-3:])
    common.stop(
        1,
        f"gradient not finite near step {step} (losses: {before}); nothing was written after the "
        "last checkpoint: try a lower --lr, or --dtype float32 or bfloat16",
    )


def save(folder, keeping, step, facts, model, optimizer, scaler, done):
    state = {
        **facts,
        "step": step,
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scaler": scaler.state_dict(),
        "done": done,
    }
    common.write_torch(folder / "ckpt.pt", state, folder / "ckpt_prev.pt")
    if keeping:
        common.second_name(folder / "ckpt.pt", folder / f"ckpt_{step}.pt")


# --------------------------------------------------------------------------------------------------
# Before the loop


def try_out(args, device):
    """What the flags alone can break, before data are prepared, which may take hours. Raises
    ValueError, OSError."""
    with torch.device("meta"):  # no memory, no time
        cfg = pick_fields(ObjectiveConfig, args, whole_word=False)  # which needs a tokenizer
        encoder = Encoder(pick_fields(EncoderConfig, args, max_len=args.block_size))
        model = Pretraining(encoder, cfg)
    check_rows(model, args.batch_size)
    if args.sample:
        sample.check(model, args.sample)
    common.check_memory(sum(p.numel() for p in model.parameters()), device)
    for source in (args.init_from, args.init_embeddings):
        if source:
            read_checkpoint(source)


def check_rows(model, rows):
    if rows < model.min_rows:
        raise ValueError(
            f"{'+'.join(model.names)} draws from other rows of the batch: it needs "
            f"--batch_size {model.min_rows} or more, and as many rows to validate on; here it is "
            f"{rows}"
        )


def find_checkpoint(folder, args):
    """-> the checkpoint to go on from, or None. Raises ValueError where --resume is missing."""
    if (folder / "ckpt.pt").exists():
        if not args.resume:
            raise ValueError(
                f"{folder} holds a run already: go on with --resume, or name another "
                "folder with --out_dir"
            )
        return read_checkpoint(folder)
    if args.resume:
        if (folder / "ckpt_prev.pt").exists():
            raise ValueError(
                f"{folder} has no ckpt.pt, but ckpt_prev.pt, the one before: rename "
                "it to go on from there"
            )
        print(f"--resume: no checkpoint in {folder}, so this run starts at step 0")
    return None


def prepare_together(args, folder, device, world, main_process):
    """-> the corpus, the checkpoint to go on from or None, the precision and why: the same in all
    processes. The first one of each machine prepares data, which may take hours; others wait."""
    checkpoint = find_checkpoint(folder, args) if main_process else None
    precision = pick_precision(device, args.dtype, checkpoint)
    if world > 1:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        # The machines may have no disk in common: what the first process found counts for all.
        found = [(checkpoint, precision)]
        dist.broadcast_object_list(found)
        checkpoint, precision = found[0]
    first = int(os.environ.get("LOCAL_RANK", 0)) == 0
    corpus = find_data(args, checkpoint) if first else None
    if world > 1:
        dist.barrier(dist.new_group(backend="gloo", timeout=timedelta(days=2)))
        corpus = corpus or find_data(args, checkpoint)
        found = [corpus.meta]
        dist.broadcast_object_list(found)
        if found[0] != corpus.meta:
            raise ValueError(f"process {dist.get_rank()} has prepared other data than the first")
    return corpus, checkpoint, *precision


def pick_precision(device, name, checkpoint):
    """-> dtype of matrix products, and why. A run that goes on keeps its own."""
    before, dtype = (checkpoint or {}).get("precision", ("", ""))
    if name or before != device.type:
        return common.pick_dtype(device, name)
    return common.pick_dtype(device, dtype)[0], "as before"


def find_data(args, checkpoint):
    """-> the corpus: what a run had that goes on, if it still lies prepared, whether or not its
    text does; else prepared."""
    with contextlib.suppress(ValueError):
        if checkpoint:
            return open_prepared(checkpoint["data"], args.cache, args.dataset)
    return prepare(**vars(pick_fields(DataConfig, args)))


def build_model(args, corpus, device):
    """-> the encoder and the heads of its objectives, on the device."""
    torch.manual_seed(args.seed)
    sizes = dict(vocab_size=corpus.vocab_size, max_len=args.block_size, attn_dropout=args.dropout)
    encoder = Encoder(pick_fields(EncoderConfig, args, **sizes))
    encoder.tokenizer = tiktoken.Encoding(**encoding_arguments(corpus.tokenizer))
    model = Pretraining(encoder, pick_fields(ObjectiveConfig, args)).to(device)
    check_rows(model, min(args.batch_size, corpus.n_rows("val", args.block_size)))
    if args.sample:
        sample.check(model, args.sample)
    encoder.tok.weight.requires_grad_(not args.freeze_embeddings)
    return model


def wrap(model, args, device, world):
    """-> what runs: the model, wrapped for several processes, compiled where that pays; and how."""
    net = model
    if world > 1:
        ids = [device.index] if device.type == "cuda" else None
        net = DistributedDataParallel(
            model, device_ids=ids, broadcast_buffers=False, gradient_as_bucket_view=True
        )
    if not (args.compile or args.compile is None and device.type == "cuda"):
        return net, ""
    if not common.can_compile(device):
        return net, "not compiled: no compiler here"
    return torch.compile(net), "compiling: the first step may take a minute"


def facts_of(args, model, corpus, n_micro, device, dtype):
    """What every checkpoint holds, and but for the tokenizer config.json and the log's first line:
    all that a run is."""
    flags = {name: value for name, value in vars(args).items() if name != "given"}
    return {
        "args": flags,
        "command": command(args.given),
        "config": asdict(model.encoder.config),
        "data": corpus.meta,
        "tokenizer": encoding_arguments(corpus.tokenizer),
        "tokenizer_hash": corpus.meta["tokenizer_hash"],
        "n_micro": n_micro,
        "precision": (device.type, name_of(dtype)),
        "git": common.git_commit(),
        "versions": {"torch": str(torch.__version__), "tiktoken": tiktoken.__version__},
    }


def what_losses_are_worth(model, corpus, checkpoint):
    """-> {baseline: nats}; some take seconds, so a run keeps them."""
    if kept := checkpoint and checkpoint.get("baselines"):
        return kept
    if any(part.kind == "position" for part in model.objectives.values()):
        print("computing the baselines (some seconds)", flush=True)
    return baselines(model, unigram_entropy(corpus))


def name_of(dtype):
    return str(dtype).removeprefix("torch.")


def command(flags):
    """{flag: value} -> the command, as one types it. Folders are of no interest elsewhere."""
    words = ["python", "train.py"]
    for name, value in flags.items():
        if name not in ("out_dir", "cache", "resume"):
            words.append(f"--no-{name}" if value is False else f"--{name}")
            values = value if isinstance(value, (tuple, list)) else [value]
            words += [f"{x:g}" if isinstance(x, float) else str(x) for x in values if x is not True]
    return shlex.join(word for word in words if word != "False")


def go_on(folder, checkpoint, facts, model, optimizer, lr, scaler, done):
    """Take up a run where its checkpoint has it -> its step. Raises ValueError if it is another."""
    check_same_run(folder, checkpoint, facts)
    load_strict(model, checkpoint["model"], folder)
    optimizer.load_state_dict(checkpoint["optimizer"])
    for group in optimizer.param_groups:  # not the checkpoint's copy
        group["lr"] = lr
    if scaler.is_enabled() and checkpoint["scaler"]:  # saved under another --dtype: none
        scaler.load_state_dict(checkpoint["scaler"])
    done.copy_(checkpoint["done"])
    return checkpoint["step"]


def open_folder(folder, facts, corpus, step):
    """What a run's folder has from the start -> its lock. Raises ValueError if another has it."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = common.lock(folder)
    facts = {name: value for name, value in facts.items() if name != "tokenizer"}
    open_log(folder, facts, step)
    common.write_json(folder / "config.json", facts)
    common.write_json(folder / "tokenizer.json", corpus.tokenizer)
    return lock


def announce(args, model, batches, machine, rows, flops):
    n_parameters = sum(p.numel() for p in model.parameters())
    print(
        f"{args.pe}, {args.objective}: {n_parameters / 1e6:.2f} M parameters, {args.n_layer} "
        f"layers of {args.d_model}; rows of {args.block_size}, {rows} an update; {args.steps:,} "
        f"steps, {args.steps * rows / batches.n:.1f} epochs of {batches.n:,} rows"
    )
    print(f"{machine}; {flops / 1e9:.0f} GFLOP a step")
    if args.warmup >= args.steps:
        print(f"note: --warmup {args.warmup} takes the whole run: the rate only rises")


def announce_baselines(known):
    if known:  # an objective of your own may have none
        print("baselines: the loss (nats, lower is better) of one who knows only ..")
    for name, value in known.items():
        print(f"  {name:14}{value:6.3f}  .. {meaning_of(name)}")


def say_goodbye(args, folder, row, known, seconds):
    """What was learned in so many seconds, and what to do next. row: the log's last line."""
    print(f"done in {seconds / 60:.1f} minutes: {folder}/ckpt.pt")
    for sentence in learned(row, known):
        print(f"what it learned: {sentence}")
    other = "tupe_r" if args.pe == "abs" else "abs"
    how = "words and places apart" if args.pe == "abs" else "BERT's positions"
    compared = {"pe": other, **{k: v for k, v in args.given.items() if k != "pe"}}
    print(
        f"next: python sample.py --ckpt {folder}   (try it on a text of yours)\n"
        f"      python probe.py --ckpt {folder}   (what it does with places, and with words)\n"
        f"      python finetune.py --task docs --ckpt {folder}   (a task)\n"
        f"      {command(compared)}   (compare with {how})"
    )
    if args.preset == "demo":
        real = PRESETS["paper"]
        kept = {name: value for name, value in args.given.items() if name not in OF_A_DEMO}
        kept = {name: value for name, value in kept.items() if real.get(name) != value}
        print(f"this was the demo; the real run, on a GPU: {command(kept)} --preset paper")


def check_same_run(folder, checkpoint, facts):
    """Raise ValueError if a flag that alters what a run computes differs from the checkpoint's."""
    then, now = identity(checkpoint), identity(facts)
    differ = [f"{key} was {then[key]}, is {now[key]}" for key in now if then[key] != now[key]]
    if differ:
        raise ValueError(
            f"{folder} holds another run: {'; '.join(differ)}; give the same flags, "
            "or another --out_dir"
        )


def identity(facts):
    """What makes two runs the same: flags, micro-batches an update, data. A flag that is younger
    than the run had its default."""
    flags = common.defaults(TrainConfig, EncoderConfig, ObjectiveConfig, DataConfig)
    found = {
        "--grad_accum times processes": facts["n_micro"],
        "the data's tokens": facts["data"]["tokens"],
        "the tokenizer": facts["tokenizer_hash"],
    }
    for name in flags.keys() - FREE_FLAGS - common.defaults(DataConfig).keys():
        found[f"--{name}"] = facts["args"].get(name, flags[name])
    return found


def start_anew(model, args, facts, main_process):
    """--init_from: load what fits, and say what was loaded, what is new, what was dropped.
    --init_embeddings: the word embeddings alone (P2 fig 4). -> step 0. Raises ValueError."""
    for path in (args.init_from, args.init_embeddings):
        if path and read_checkpoint(path)["tokenizer_hash"] != facts["tokenizer_hash"]:
            raise ValueError(
                f"{path} was trained with another tokenizer than this data is made "
                "with: prepare the data with its own"
            )
    if args.init_from:
        done = warm_start(model, read_checkpoint(args.init_from), args.init_from)
        for what, names in done.items() if main_process else ():
            shown = ", ".join(names[:6]) + (f" and {len(names) - 6} more" if names[6:] else "")
            shown = f": {shown}" if names and what != "loaded" else ""
            print(f"init_from {args.init_from}: {len(names)} tensors {what}{shown}")
    if args.init_embeddings:
        words = read_checkpoint(args.init_embeddings)["model"]["encoder.tok.weight"]
        own = model.encoder.tok.weight
        if words.shape != own.shape:
            raise ValueError(
                f"{args.init_embeddings} has word embeddings of width "
                f"{words.size(1)}, this model {own.size(1)}"
            )
        own.data.copy_(words)
    return 0


@torch.no_grad()
def count_flops(model, batches, args, amp, device):
    """Operations of one micro-batch, forward and backward (three times the forward), counted by
    PyTorch."""
    rows = torch.from_numpy(batches(0, args.batch_size)).to(device)
    batch = model.corrupt(rows, args.seed, 0, 0)
    with FlopCounterMode(display=False) as counter, amp:
        model(batch)
    return 3 * counter.get_total_flops()


def open_log(folder, first, step):
    """Begin log.jsonl: the configuration and the baselines, then, in a resumed run, the lines up to
    its checkpoint. What was logged after it is made again."""
    rows = read_rows(folder / "log.jsonl")[1:] if step else []
    kept = [row for row in rows if row.get("step", math.inf) <= step]
    lines = [json.dumps(row) + "\n" for row in [first, *kept]]
    (folder / "log.jsonl").write_text("".join(lines))


def main(argv=None):
    args = parse_args(argv)
    common.keep_memory()
    remedy = "lower --batch_size (and raise --grad_accum by as much), --block_size or --d_model"
    with one_line_errors(remedy) as progress, contextlib.ExitStack() as progress.at_the_end:
        train(args, progress)


if __name__ == "__main__":
    main()
