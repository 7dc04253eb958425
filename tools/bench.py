"""Measure the time and memory of a training step, for our models and transformers' RoBERTa.

    python -m tools.bench --pe all                          # every scheme, relative to abs
    python -m tools.bench --objective all --preset rpp      # every objective, relative to mlm
    python -m tools.bench --peer hf --preset rpp --batch_size 16 --mask_rate .15
    python -m tools.bench --agree --pe all --dtype float16  # losses and gradients against a CPU's

A step is corruption, forward, backward, clipping and update, on random tokens. Two models take
turns, one step each, so that a change in the speed of the device affects both; their relative
speed is the median over these pairs of steps, with its interquartile range. Peak memory is that
of a new process.

The peer is RobertaForMaskedLM as its users train it: the masking of
DataCollatorForLanguageModeling, logits at every position, SDPA, and no attention mask, since no
sequence is padded. Sizes, dropout, autocast, fused AdamW and clipping are ours.

The objective mlm_full is mlm with its head at every token, because RPP compares the cost of
position prediction with that of a softmax over the vocabulary.
"""

import itertools
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median, quantiles
from time import perf_counter

import torch
import torch.nn as nn

import train
from lib.config import DEVICE, DTYPE, PATH, Parser, catch_errors, setting, validate_config
from lib.device import (
    autocast,
    can_compile,
    keep_memory,
    peak_memory_mb,
    pick_device,
    pick_dtype,
    processor_name,
)
from lib.files import write_json
from model import SCHEMES
from objectives import MLM, OBJECTIVES

WARMUP = 3  # steps that are not timed
SIZES = ("batch_size", "block_size", "mask_rate")


@dataclass(frozen=True)
class BenchConfig:
    """The flags. With a single scheme and objective, it describes one row."""

    pe: str = setting("abs", "schemes separated by commas, or all")
    objective: str = setting("mlm", "objectives separated by commas, or all")
    peer: str | None = setting(None, "compare with transformers, eager and compiled", ("hf",))
    agree: bool = setting(False, "compare losses and gradients with those of a CPU in float32")
    preset: str = setting("demo", "sizes", tuple(train.PRESETS))
    batch_size: int | None = setting(None, "sequences per step", "[1, 1e6]")
    block_size: int | None = setting(None, "tokens per sequence", "[4, 1e5]")
    mask_rate: float | None = setting(None, "share of tokens that mlm selects", "(0, 1)")
    pairs: int = setting(15, "timed steps of each model", "[2, 1e6]")
    device: str | None = DEVICE
    dtype: str | None = DTYPE
    compile: bool | None = setting(None, "use torch.compile (default: --peer measures both)")
    json: str | None = setting(None, "write the rows to this JSON file", PATH)

    __post_init__ = validate_config

    @property
    def name(self):
        return f"{self.peer or 'ours'} {'compiled' if self.compile else 'eager'}"


# --------------------------------------------------------------------------------------------------
# Models


class FullMLM(MLM):
    """mlm_full: the head at every token."""

    def loss(self, encoder, hidden, batch):
        return self.score(encoder, hidden, batch["original"], batch["eligible"])


def build(v):
    """BenchConfig of one row -> model, EncoderConfig, arguments of train.py. Raises ValueError on a
    combination that is not possible."""
    flags = ["--preset", v.preset, "--pe", v.pe]
    flags += ["--objective", v.objective.replace("mlm_full", "mlm")]
    for name in SIZES:
        if getattr(v, name) is not None:
            flags += [f"--{name}", str(getattr(v, name))]
    args = train.parse_args(flags)
    model = train.build_model(args, vocab_size=8192 if args.tokenizer == "bpe" else 50265)
    if "mlm_full" in v.objective:
        model.objectives["mlm"] = FullMLM(model.encoder, model.objectives["mlm"].cfg)
    cfg = model.encoder.config
    return build_peer(cfg) if v.peer else model, cfg, args


def build_peer(cfg):
    """EncoderConfig -> RobertaForMaskedLM of the same size."""
    from tools.hf import SIZES as NAMES  # not at the top: it takes seconds and memory
    from tools.hf import transformers

    if transformers is None:
        raise ValueError("--peer needs transformers: pip install -r requirements-dev.txt")
    sizes = {theirs: getattr(cfg, ours) for ours, theirs in NAMES.items()}
    config = transformers.RobertaConfig(
        **sizes,
        max_position_embeddings=cfg.max_len + 2,  # positions start at 2
        type_vocab_size=1,
        attn_implementation="sdpa",
    )
    return transformers.RobertaForMaskedLM(config)


def mask_like_peer(tokens, cfg, rate):
    """Tokens (B, L) -> the arguments of RobertaForMaskedLM, masked as
    DataCollatorForLanguageModeling does; label -100: not scored."""
    chance, u = torch.rand(2, *tokens.shape, device=tokens.device)
    selected = (chance < rate) & (tokens < cfg.cls_id)
    ids = torch.where(selected & (u < 0.9), torch.randint_like(tokens, cfg.cls_id), tokens)
    ids = ids.masked_fill(selected & (u < 0.8), cfg.mask_id)
    return {"input_ids": ids, "labels": tokens.masked_fill(~selected, -100)}


def random_tokens(cfg, args):
    """-> (B, L) ids from 4 on, since 0 to 3 are RoBERTa's special tokens."""
    tokens = torch.randint(4, cfg.cls_id, (args.batch_size, args.block_size))
    tokens[:, 0], tokens[:, -1] = cfg.cls_id, cfg.sep_id
    return tokens


# --------------------------------------------------------------------------------------------------
# Time and memory


def make_step(v):
    """-> a function that trains for one step and returns its seconds."""
    torch.manual_seed(0)
    device, dtype = pick_device(v.device), getattr(torch, v.dtype)
    model, cfg, args = build(v)
    model.to(device).train()
    net = torch.compile(model) if v.compile else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, fused=True)
    scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)
    tokens = random_tokens(cfg, args).to(device)

    def step():
        start = perf_counter()
        if v.peer:
            inputs = mask_like_peer(tokens, cfg, args.mask_rate)
            with autocast(device, dtype):
                loss = net(**inputs).loss
        else:
            batch = model.corrupt(tokens, 0)
            with autocast(device, dtype):
                loss, _ = net(batch)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        loss.item()  # wait for the GPU
        return perf_counter() - start

    return step


def time_in_turns(*variants):
    """-> for each variant, the seconds of its timed steps."""
    torch._dynamo.reset()  # else earlier variants count towards the recompile limit
    steps = [make_step(v) for v in variants]
    rounds = [[step() for step in steps] for _ in range(WARMUP + variants[0].pairs)]
    return list(zip(*rounds[WARMUP:]))


def peak_memory(v):
    """-> peak memory of a few steps in MiB, in a new process. (A child's peak starts with its
    parent's, so this comes before anything large is built.)"""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(measure_memory, v).result()


def measure_memory(v):
    keep_memory()
    step = make_step(v)
    for _ in range(3):
        step()
    return peak_memory_mb(pick_device(v.device))


def compare(groups):
    """Yield a row for every reference and variant. groups: pairs of a reference and a variant,
    which take turns; `speed` is the reference's time over the variant's."""
    peaks = {v: peak_memory(v) for v in dict.fromkeys(itertools.chain(*groups))}
    keep_memory()
    print(
        f"{'':14}{'pe':19}{'objective':12}{'B x L':>10}{'ms/step':>10}{'tokens/s':>11}"
        f"{'peak MB':>9}  speed (quartiles)"
    )
    for reference, variant in groups:
        timed = time_in_turns(reference, variant)
        for v, seconds in zip((reference, variant), timed):
            if v not in peaks:
                continue  # its row is there already
            with torch.device("meta"):  # only to describe it
                model, _, args = build(v)
            low, middle, high = quantiles([a / b for a, b in zip(timed[0], seconds)], n=4)
            row = {
                "name": v.name,
                "pe": v.pe,
                "objective": v.objective,
                **{name: getattr(args, name) for name in SIZES},
                "parameters": sum(p.numel() for p in model.parameters()),
                "tokens_per_s": args.batch_size * args.block_size / median(seconds),
                "ms_per_step": 1e3 * median(seconds),
                "peak_mem_mb": peaks.pop(v),
                "reference": f"{reference.name}, {reference.pe}, {reference.objective}",
                "speed": middle,
                "speed_middle_half": [low, high],
            }
            shape = f"{args.batch_size} x {args.block_size}"
            print(
                f"{v.name:14}{v.pe:19}{v.objective:12}{shape:>10}{row['ms_per_step']:10.1f}"
                f"{row['tokens_per_s']:11,.0f}{row['peak_mem_mb']:9,.0f}"
                f"  {middle:.2f} ({low:.2f} - {high:.2f})",
                flush=True,
            )
            yield row


def agree(variants):
    """Yield for each variant how far the loss and the gradient of one batch are from those of a CPU
    in float32: the difference of the losses, and the norm of the gradients' difference over the
    gradient's norm."""
    print(f"{'pe':19}{'objective':12}{'loss on a CPU':>14}{'difference':>12}{'gradient error':>17}")
    for v in variants:
        torch._dynamo.reset()  # as in time_in_turns
        torch.manual_seed(0)
        model, cfg, args = build(v)
        model.eval()  # no dropout
        batch = model.corrupt(random_tokens(cfg, args), 0)
        here = pick_device(v.device), getattr(torch, v.dtype)
        losses, gradients = [], []
        for device, dtype in ((torch.device("cpu"), torch.float32), here):
            model.to(device).zero_grad()
            net = torch.compile(model) if v.compile and losses else model
            with autocast(device, dtype):
                loss, _ = net({name: x.to(device) for name, x in batch.items()})
            loss.backward()
            parts = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
            losses.append(loss.item())
            gradients.append(torch.cat(parts).float().cpu())
        difference = abs(losses[1] - losses[0])
        relative = float((gradients[1] - gradients[0]).norm() / gradients[0].norm())
        print(
            f"{v.pe:19}{v.objective:12}{losses[0]:14.4f}{difference:12.1e}{relative:17.1e}",
            flush=True,
        )
        row = {"name": "agree", "pe": v.pe, "objective": v.objective, "compile": bool(v.compile)}
        yield {**row, "loss": losses[0], "difference": difference, "gradient_difference": relative}


# --------------------------------------------------------------------------------------------------
# The program


def measurements(args):
    """-> an iterator of rows. Raises ValueError before anything is measured."""
    names = {}
    for name, components in SCHEMES.items():
        names.setdefault(tuple(components), name)  # an alias would be measured twice
    pes = list(names.values()) if args.pe == "all" else args.pe.split(",")
    objectives = args.objective.split(",")
    if args.objective == "all":
        objectives = [*OBJECTIVES, "mlm_full"]
    several = len(pes) > 1 or len(objectives) > 1
    if len(pes) > 1 and len(objectives) > 1 and not args.agree:
        raise ValueError("several schemes or several objectives, but not both (except --agree)")
    if args.peer and (several or args.agree):
        raise ValueError("--peer takes one scheme and one objective, and no --agree")
    compiling = [False, True] if args.peer and args.compile is None else [bool(args.compile)]
    if True in compiling and not can_compile(pick_device(args.device)):
        print("not compiled: there is no compiler here")
        compiling = [False]
    pairs = itertools.product(pes, objectives)
    variants = [replace(args, pe=x, objective=y, peer=None, compile=compiling[0]) for x, y in pairs]
    for v in variants:
        with torch.device("meta"):  # only checks the combination
            build(v)
    if args.agree:
        return agree(variants)
    if args.peer:
        ours = [replace(variants[0], compile=kind) for kind in compiling]
        return compare([(replace(v, peer="hf", pe="abs", objective="mlm"), v) for v in ours])
    change = {"pe": "abs"} if objectives == ["mlm"] or len(pes) > 1 else {"objective": "mlm"}
    reference = replace(variants[0], **change)
    others = [v for v in variants if v != reference] or [reference]
    return compare([(reference, v) for v in others])


def main(argv=None):
    remedy = "decrease --batch_size or --block_size, or choose a smaller --preset"
    with catch_errors(remedy):
        parser = Parser("-m tools.bench", __doc__)
        parser.add_settings("flags", BenchConfig, SIZES)
        args = BenchConfig(**vars(parser.parse_args(argv)))
        device = pick_device(args.device)
        dtype = str(pick_dtype(device, args.dtype)[0]).removeprefix("torch.")
        rows = measurements(replace(args, dtype=dtype))  # nothing is measured yet
        name, threads = processor_name(device.type), torch.get_num_threads()
        machine = f"{name}, {threads} threads, torch {torch.__version__}, {dtype}"
        print(f"{machine}; preset {args.preset}")
        done = []
        for row in rows:
            done.append(row)
            if args.json:
                Path(args.json).parent.mkdir(parents=True, exist_ok=True)
                write_json(args.json, {"machine": machine, "rows": done})


if __name__ == "__main__":
    main()
