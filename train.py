"""Pre-train a text encoder with any positional scheme (--pe) and any objective (--objective).

    python train.py --pe tupe_r                                         # minutes on a CPU
    python train.py --pe tupe_r --objective pplm                        # predict offsets
    python train.py --pe tupe_r --objective mlm+pplm --preset rpp       # RPP's size, for a GPU
    torchrun --nproc_per_node 4 train.py --pe tupe_r --preset tupe      # several GPUs

A run is stored in out/<dataset>-<preset>-<pe>-<objective>-s<seed>/. To resume after Ctrl-C or a
crash, add --resume to the same command. A flag overrides the preset.
"""

import argparse
import contextlib
import math
import os
import re
import time
from collections import defaultdict
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

import tiktoken
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel

from data import Batches, DataConfig, encoding_arguments, prepare, validation_batches
from lib.baselines import compute_baselines
from lib.config import (
    DEVICE,
    DTYPE,
    PATH,
    Parser,
    RunFailed,
    catch_errors,
    defaults,
    leave,
    pick_fields,
    setting,
    validate_config,
)
from lib.device import (
    autocast,
    can_compile,
    git_commit,
    keep_memory,
    peak_flops,
    peak_memory_mb,
    pick_device,
    pick_dtype,
)
from lib.files import read_checkpoint
from lib.run import (
    RunFolder,
    catch_signals,
    command_line,
    format_row,
    print_baselines,
    print_summary,
)
from lib.sources import file_kind
from lib.weights import load_strict, warm_start
from model import PE_NAMES, Encoder, EncoderConfig
from objectives import OBJECTIVES, ObjectiveConfig, Pretraining, new_batch, seeded_generator

DOCS = dict(dataset="docs", tokenizer="bpe")
WEB = dict(dataset="wikibooks", tokenizer="gpt2")
ADAM_98 = dict(beta1=0.9, beta2=0.98, eps=1e-6)
ADAM_999 = dict(beta1=0.9, beta2=0.999, eps=1e-6)
# demo and lab are our own; they are short, so they have no dropout. The others follow their papers,
# but rpp's warm-up, betas and weight decay are ours, and so are wang's width, heads and steps (the
# paper gives epochs).
# fmt: off
PRESETS = {
    "demo": dict(n_layer=4, d_model=128, n_head=4, d_ff=512, block_size=64, batch_size=32,
                 grad_accum=1, lr=3e-3, warmup=500, steps=1500, mask_rate=.15, dropout=0.,
                 **ADAM_98, **DOCS),
    "lab": dict(n_layer=4, d_model=256, n_head=8, d_ff=1024, block_size=64, batch_size=64,
                grad_accum=1, lr=2e-3, warmup=500, steps=3000, mask_rate=.15, dropout=0.,
                **ADAM_98, **DOCS),
    "rpp": dict(n_layer=12, d_model=256, n_head=16, d_ff=1024, block_size=128, batch_size=64,
                grad_accum=1, lr=5e-4, warmup=1000, steps=40_000, mask_rate=.30, **ADAM_98, **WEB),
    "taco": dict(n_layer=4, d_model=512, n_head=8, d_ff=2048, block_size=256, batch_size=64,
                 grad_accum=20, lr=1e-4, warmup=2500, steps=250_000, mask_rate=.15,
                 **{**ADAM_999, "eps": 1e-8}, **WEB),
    "wang": dict(n_layer=8, d_model=512, n_head=8, d_ff=2048, block_size=128, batch_size=128,
                 grad_accum=1, lr=5e-5, warmup=10_000, steps=250_000, mask_rate=.15, **ADAM_999,
                 **WEB),
    "tupe": dict(n_layer=12, d_model=768, n_head=12, d_ff=3072, block_size=512, batch_size=32,
                 grad_accum=8, lr=1e-4, warmup=10_000, steps=1_000_000, mask_rate=.15, **ADAM_999,
                 **WEB),
}
# fmt: on
# A resumed run may change these flags: they change the result by rounding at most (device also
# changes the random numbers). init_from and init_embeddings matter at step 0 only. For the data and
# grad_accum, `identity` in train() holds what must not change: token counts, tokenizer, and
# micro-batches per step.
FREE_FLAGS = set(
    "resume init_from init_embeddings out_dir cache device dtype compile log_every eval_every "
    "keep_every grad_accum dataset text_column books_dataset tokenizer".split()
)


@dataclass
class TrainConfig:
    """Flags of the run itself. None: set by the preset, or see the help text."""

    preset: str = setting("demo", "sizes and schedule, see below", tuple(PRESETS))
    seed: int = setting(1337, "random seed", "[0, 9e18]")
    block_size: int = setting(None, "tokens per sequence, with [CLS] and [SEP]", "[4, 1e5]")
    batch_size: int = setting(None, "micro-batch size per process", "[1, 1e6]")
    grad_accum: int = setting(None, "micro-batches per optimizer step", "[1, 1e6]")
    steps: int = setting(
        None, "total optimizer steps (the learning-rate decay depends on it)", "[1, 2e9]"
    )
    lr: float = setting(None, "peak learning rate: linear warm-up, linear decay to 0", "(0, 1e9)")
    warmup: int = setting(None, "warm-up steps; a shorter run never reaches --lr", "[0, 2e9]")
    weight_decay: float = setting(0.01, "on matrices only", "[0, 1e9)")
    beta1: float = setting(None, "AdamW beta1", "[0, 1)")
    beta2: float = setting(None, "AdamW beta2", "[0, 1)")
    eps: float = setting(None, "AdamW epsilon", "(0, 1e9)")
    data_fraction: float = setting(1.0, "fraction of the training sequences (TACO)", "(0, 1]")
    init_from: str | None = setting(
        None, "run to start from; its scheme, objective and block size may differ", PATH
    )
    init_embeddings: str | None = setting(
        None, "run from which the token embeddings are copied (TACO)", PATH
    )
    freeze_embeddings: bool = setting(False, "never update the token embeddings (TACO)")
    out_dir: str | None = setting(None, "folder of the run (default: see above)", PATH)
    resume: bool = setting(False, "resume from the checkpoint in the run's folder")
    eval_every: int = setting(500, "steps between evaluations", "[1, 2e9]")
    keep_every: int = setting(0, "steps between checkpoints kept as ckpt_<step>.pt", "[0, 2e9]")
    log_every: int = setting(100, "steps between log lines", "[1, 2e9]")
    device: str | None = DEVICE
    dtype: str | None = DTYPE
    compile: bool | None = setting(None, "use torch.compile (default: on a GPU only)")

    __post_init__ = validate_config


def parse_args(argv=None):
    """Flags override the preset, which overrides the defaults -> a namespace with every value set;
    `given` holds the flags that were given. Raises ValueError."""
    lines = [f"--pe: {', '.join(PE_NAMES)}", f"--objective: {', '.join(OBJECTIVES)}", "presets:"]
    for name, p in PRESETS.items():
        lines.append(
            f"  {name:6}{p['n_layer']:>2} layers of {p['d_model']}, sequences of "
            f"{p['block_size']}, batch {p['batch_size'] * p['grad_accum']:,}, lr {p['lr']:g}, "
            f"{p['steps']:,} steps, {p['dataset']}"
        )
    parser = Parser("train.py", __doc__, "\n".join(lines))
    groups = {
        "run": TrainConfig,
        "model": EncoderConfig,
        "objective": ObjectiveConfig,
        "data": DataConfig,
    }
    for title, config_class in groups.items():
        parser.add_settings(title, config_class, PRESETS["demo"])
    given = vars(parser.parse_args(argv))
    preset = PRESETS[given.get("preset", "demo")]
    args = argparse.Namespace(**defaults(*groups.values()) | preset | given)
    args.given = given
    pick_fields(TrainConfig, args)  # raises ValueError
    cfg = pick_fields(ObjectiveConfig, args)
    args.objective, args.loss_weights = cfg.objective, cfg.loss_weights  # in canonical order
    if not args.out_dir:
        dataset = args.dataset
        if re.search(r"[*?]", dataset) or file_kind(dataset)[0]:  # files: the name of their folder
            dataset = Path(dataset).parent.name or Path(dataset).stem
        dataset = re.sub(r"[^A-Za-z0-9]+", "-", dataset).strip("-") or "files"
        args.out_dir = f"out/{dataset}-{args.preset}-{args.pe}-{args.objective}-s{args.seed}"
    return args


def build_model(args, vocab_size, tokenizer=None):
    """-> the encoder with the heads of its objectives. Raises ValueError if the flags cannot be
    combined. Without a tokenizer, --whole_word is ignored."""
    torch.manual_seed(args.seed)
    sizes = dict(vocab_size=vocab_size, max_len=args.block_size, attn_dropout=args.dropout)
    encoder = Encoder(pick_fields(EncoderConfig, args, **sizes))
    encoder.tokenizer = tokenizer
    whole_word = args.whole_word and tokenizer is not None
    model = Pretraining(encoder, pick_fields(ObjectiveConfig, args, whole_word=whole_word))
    model.check_batch(args.batch_size)
    encoder.tok.weight.requires_grad_(not args.freeze_embeddings)
    return model


def get_lr(step, args):
    """Linear warm-up, then linear decay, which reaches 0 after the last step."""
    warmup = (step + 1) / max(1, args.warmup)
    decay = (args.steps - step) / max(1, args.steps - args.warmup)
    return args.lr * min(warmup, decay, 1.0)


def train(args, status):
    """A run from start to end. Sets `status.running` before the first step: from then on, a
    ValueError is a bug and keeps its traceback (lib/config.py)."""
    # ---- device and processes: torchrun sets RANK and WORLD_SIZE; several nodes need a shared disk
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    device = pick_device(args.device)
    # Build the model on the meta device to reject invalid flags before the data is prepared, which
    # can take hours. (The vocabulary size does not matter.)
    with torch.device("meta"):
        build_model(args, vocab_size=8192)
    run = RunFolder(args.out_dir, args.resume)
    checkpoint, step = run.checkpoint, 0
    paths = [] if checkpoint else filter(None, (args.init_from, args.init_embeddings))
    sources = {path: read_checkpoint(path) for path in paths}  # of a new run only
    dtype_name = args.dtype
    if checkpoint and checkpoint["precision"][0] == device.type:  # a resumed run keeps its dtype
        dtype_name = dtype_name or checkpoint["precision"][1]
    dtype, reason = pick_dtype(device, dtype_name)
    amp = autocast(device, dtype)
    if world > 1:
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=timedelta(days=2))

    # ---- data: rank 0 prepares it while the others wait
    if rank > 0:
        dist.barrier()
    corpus = prepare(**vars(pick_fields(DataConfig, args)))
    if world > 1 and rank == 0:
        dist.barrier()
    batches = Batches(corpus, args.block_size, args.seed, args.data_fraction)
    validation = validation_batches(corpus, args.block_size)

    # ---- model
    tokenizer = tiktoken.Encoding(**encoding_arguments(corpus.tokenizer))
    model = build_model(args, corpus.vocab_size, tokenizer).to(device)
    model.check_batch(min(map(len, validation)))
    n_micro = args.grad_accum * world  # micro-batches per step
    for path, source in sources.items():
        if source["tokenizer_hash"] != corpus.meta["tokenizer_hash"]:
            raise ValueError(f"{path} was trained with a different tokenizer from the data's")
    if args.init_from in sources:
        changes = warm_start(model, sources[args.init_from], args.init_from)
        if rank == 0:
            print(f"--init_from {args.init_from}: {len(changes.pop('loaded'))} tensors loaded")
            for what, names in changes.items():
                print(f"  {what}: {', '.join(names) or 'none'}")
    if args.init_embeddings in sources:
        weight = sources[args.init_embeddings]["model"]["encoder.tok.weight"]
        load_strict(model.encoder.tok, {"weight": weight}, "--init_embeddings")

    # ---- optimizer: weight decay on matrices only
    trainable = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.dim() >= 2], "weight_decay": args.weight_decay},
        {"params": [p for p in trainable if p.dim() < 2], "weight_decay": 0.0},
    ]
    betas = (args.beta1, args.beta2)
    optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=betas, eps=args.eps, fused=True)
    scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)

    # ---- resume
    identity = {f"--{k}": v for k, v in vars(args).items() if k not in FREE_FLAGS | {"given"}}
    identity |= {"--grad_accum times processes": n_micro, "the token counts": corpus.meta["tokens"]}
    identity |= {"the tokenizer": corpus.meta["tokenizer_hash"]}
    if checkpoint:
        run.check_identity(identity)
        step = checkpoint["step"]
        load_strict(model, checkpoint["model"], run.path)
        optimizer.load_state_dict(checkpoint["optimizer"])
        if checkpoint["scaler"]:  # empty unless it was fp16
            scaler.load_state_dict(checkpoint["scaler"])

    # ---- wrap
    net = model
    if world > 1:
        device_ids = [device.index] if device.type == "cuda" else None
        net = DistributedDataParallel(model, device_ids, gradient_as_bucket_view=True)
    compiling = args.compile or args.compile is None and device.type == "cuda"
    if compiling and not can_compile(device):
        print("torch.compile is off: no compiler found")
    elif compiling:
        print("compiling: the first step may take a minute", flush=True)
        net = torch.compile(net)

    # ---- describe the run
    baselines = compute_baselines(model, corpus) if rank == 0 else {}
    run_info = {
        "args": {name: value for name, value in vars(args).items() if name != "given"},
        "command": command_line(args.given),
        "identity": identity,
        "config": asdict(model.encoder.config),
        "data": corpus.meta,
        "tokenizer_hash": corpus.meta["tokenizer_hash"],
        "precision": [device.type, str(dtype).removeprefix("torch.")],
        "git": git_commit(),
        "versions": {"torch": str(torch.__version__), "tiktoken": tiktoken.__version__},
    }
    n_parameters = sum(p.numel() for p in model.parameters())
    sequences = args.batch_size * n_micro  # per step
    if rank == 0:
        print(
            f"{args.pe}, {args.objective}: {n_parameters / 1e6:.2f} M parameters; {args.steps:,} "
            f"steps of {sequences} sequences of {args.block_size} tokens, "
            f"{args.steps * sequences / batches.n:.1f} epochs"
        )
        print(f"{device}, {run_info['precision'][1]} ({reason})")
        print_baselines(baselines)
        print(f"resumed at step {step}" if step else f"folder: {run.path}", flush=True)

    with contextlib.ExitStack() as stack:
        if rank == 0:
            stack.enter_context(run.open({**run_info, "baselines": baselines}, corpus.tokenizer))
        # With several processes, signals are not caught: torchrun kills the processes, and the run
        # can be resumed from its last checkpoint.
        signals = stack.enter_context(catch_signals()) if world == 1 else {"number": None}
        status.running = True
        row, sums, since, t0 = None, defaultdict(float), step, time.perf_counter()
        started = t0
        # How many steps had a non-finite gradient; with fp16, how many in a row up to now.
        n_bad = torch.zeros((), device=device)
        model.train()
        while step < args.steps:
            lr = get_lr(step, args)
            for group in optimizer.param_groups:
                group["lr"] = lr

            # Data, corruption and dropout depend on (seed, step, micro) alone, so resuming needs no
            # RNG state, and 2 processes with 1 micro-batch each match 1 process with 2.
            # (In fp16 only up to rounding: grad_accum divides the loss before scaling, DDP after.)
            for accum in range(args.grad_accum):
                micro = accum * world + rank
                tokens = torch.from_numpy(batches(step * n_micro + micro, args.batch_size))
                if device.type == "cuda":
                    tokens = tokens.pin_memory().to(device, non_blocking=True)
                batch = model.corrupt(tokens.to(device), args.seed, step, micro)
                # Dropout draws from the global generators: seed them for this micro-batch.
                generator = seeded_generator("cpu", args.seed, step, micro, "dropout")
                torch.manual_seed(generator.initial_seed())
                last = accum == args.grad_accum - 1
                with contextlib.nullcontext() if world == 1 or last else net.no_sync():
                    with amp:
                        loss, scalars = net(batch)
                    scaler.scale(loss / args.grad_accum).backward()
                for name, value in {"loss": loss.detach(), **scalars}.items():
                    sums[name] += value / args.grad_accum

            # Clip and update. With fp16 the scaler skips a step with a non-finite gradient.
            scaler.unscale_(optimizer)
            grad_norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)
            bad = ~grad_norm.isfinite()
            n_bad = (n_bad + bad) * bad if scaler.is_enabled() else n_bad + bad
            step += 1

            evaluating = step % args.eval_every == 0 or step == args.steps
            keeping = args.keep_every > 0 and step % args.keep_every == 0
            stopping = signals["number"]
            if not (step % args.log_every == 0 or evaluating or keeping or stopping):
                continue

            # Log. Steps that do not get here have no CPU-GPU sync.
            means = torch.stack([value.float() for value in sums.values()]) / (step - since)
            if world > 1:
                dist.all_reduce(means)
                means /= world
            means = dict(zip(sums, means.tolist()))
            seconds = (time.perf_counter() - t0) / (step - since)
            if scaler.is_enabled():
                broken = n_bad >= 10  # some skips are normal while the scale is adjusted
            else:
                broken = n_bad > 0 or not math.isfinite(means["loss"])
            if broken:
                raise RunFailed(
                    f"loss or gradient not finite near step {step} (loss {means['loss']:.3f}); "
                    f"{run.path} keeps its last checkpoint: try a lower --lr, or --dtype float32"
                )
            row = dict(step=step, **means, lr=lr, ms_per_step=1e3 * seconds)
            row["tokens_per_s"] = sequences * args.block_size / seconds
            row["peak_mem_mb"] = peak_memory_mb(device)
            if (peak := peak_flops(device)) and dtype != torch.float32:
                row["mfu"] = row["tokens_per_s"] / world * flops_per_token(model) / peak
            if evaluating and rank == 0:  # the other ranks wait in their next all-reduce
                row |= evaluate(model, validation, amp, device)
            if rank == 0:
                run.log(row)
                print(format_row(row, model.names, args.steps, baselines), flush=True)
                if evaluating and (text := sample(model, validation[0][:1].to(device))):
                    print(f"    sample: {text}", flush=True)

            # Save everything that is needed to resume.
            if rank == 0 and (evaluating or keeping or stopping):
                state = {
                    **run_info,
                    "tokenizer": encoding_arguments(corpus.tokenizer),
                    "step": step,
                    "model": model.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "scaler": scaler.state_dict(),
                }
                run.save(state, keeping)
            if stopping:
                print(f"stopped at step {step}; resume with the same command and --resume")
                leave(128 + stopping)
            sums.clear()
            since, t0 = step, time.perf_counter()

    if world > 1:
        dist.barrier()  # until rank 0 has saved
    if rank == 0 and row:  # none if the run had already ended
        print_summary(run.path, row, model.names, baselines, time.perf_counter() - started)
        if args.preset == "demo":
            full_size = {"pe": args.pe, "objective": args.objective, "preset": "rpp"}
            print(f"full size, on a GPU: {command_line(full_size)}")
    if world > 1:
        leave(0)


def flops_per_token(model):
    """FLOPs of forward and backward per token: 6 per weight of a matrix multiplication, plus
    attention (PaLM, app. B). Heads and positional terms are left out."""
    cfg, encoder = model.encoder.config, model.encoder
    n_weights = sum(p.numel() for p in encoder.blocks.parameters())
    return 6 * n_weights + 12 * cfg.n_layer * cfg.d_model * cfg.max_len


@torch.no_grad()
def evaluate(model, validation, amp, device):
    """Mean loss and scalars over fixed validation sequences with fixed corruption, without dropout
    -> {"val_" + name: float}."""
    model.eval()
    sums, n = defaultdict(float), sum(map(len, validation))
    for number, tokens in enumerate(validation):
        batch = model.corrupt(tokens.to(device), "validation", number)
        with amp:
            loss, scalars = model(batch)
        for name, value in {"loss": loss, **scalars}.items():
            sums[f"val_{name}"] += value.float() * len(tokens) / n
    model.train()
    return {name: float(value) for name, value in sums.items()}


@torch.no_grad()
def sample(model, tokens):
    """What the model predicts for the beginning of a validation sequence (1, L) -> text: masked
    tokens as [predicted|true], or the tokens in their assigned and their predicted order; empty for
    other objectives."""
    encoder, cfg = model.encoder, model.encoder.config
    names = [name for name in model.names if name in ("mlm", "pmlm", "pplm", "pplm_some")]
    if not names:
        return ""
    objective = model.objectives[names[0]]
    tokens = tokens[:, :24].clone()
    tokens[:, -1] = cfg.sep_id
    texts = [encoder.tokenizer.decode([i]).replace("\n", " ") for i in tokens[0].tolist()]
    batch = new_batch(tokens, cfg.vocab_size)
    model.eval()
    objective.corrupt(batch, seeded_generator(tokens.device, "sample"))
    hidden = encoder(batch["tokens"], batch.get("pos"))  # (1, L, C)
    if names[0] == "mlm":
        slots = batch["mlm_slots"][0].tolist()
        logits = objective.token_logits(encoder, hidden[0, slots])[:, : cfg.cls_id]
        for slot, i in zip(slots, logits.argmax(-1).tolist()):
            predicted = encoder.tokenizer.decode([i]).strip()
            texts[slot] = f" [{predicted}|{texts[slot].strip()}]"
        text = "".join(texts[1:-1])
    else:  # sort the tokens by their mean offset from the others
        scores = objective.head.scores(encoder, hidden, batch["pos"])
        p = objective.head.psi(scores)[0].float().softmax(-1)  # (n, n, 2L - 1)
        offsets = p @ torch.arange(1.0 - objective.L, objective.L, device=p.device)
        assigned = batch["pos"][0, 1:-1].argsort(stable=True).tolist()
        predicted = offsets.mean(0).argsort().tolist()
        orders = ["".join(texts[1 + i] for i in order) for order in (assigned, predicted)]
        text = " -> ".join(order.strip() for order in orders)
    model.train()
    return text.strip()


def main(argv=None):
    remedy = "decrease --batch_size (and increase --grad_accum), --block_size or --d_model"
    with catch_errors(remedy) as status:
        keep_memory()
        train(parse_args(argv), status)


if __name__ == "__main__":
    main()
