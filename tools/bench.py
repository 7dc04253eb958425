"""Measure the time and memory of a training step, for our models and transformers' RoBERTa.

    python -m tools.bench --pe all                          # every scheme, relative to abs
    python -m tools.bench --objective all --preset rpp      # every objective, relative to mlm
    python -m tools.bench --peer hf --preset rpp --batch_size 16 --mask_rate .15
    python -m tools.bench --agree --pe all --dtype float16  # losses and gradients against a CPU's

A step is corruption, forward, backward, clipping and update, on random tokens. Two models take
turns, one step each, so that a change in the speed of the device affects both; their relative
speed is the median over these pairs of steps, with its interquartile range. The reference is abs
with the first objective. Peak memory is that of a new process.

The peer is RobertaForMaskedLM as its users train it: logits at every position, SDPA, and no
attention mask, since no sequence is padded. Sizes, masks, dropout, autocast, fused AdamW and
clipping are ours.

The objective mlm_full is mlm with its head at every token, because RPP compares the cost of
position prediction with that of a softmax over the vocabulary.
"""

import itertools
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import median, quantiles
from time import perf_counter
from typing import NamedTuple

import torch
import torch.nn as nn

import train
from lib.config import Parser, UserError, add_device_flags, between, one_line_errors
from lib.device import (
    autocast,
    can_compile,
    keep_memory,
    peak_memory_mb,
    pick_device,
    pick_dtype,
    processor_name,
)
from lib.files import make_folder, write_json
from lib.run import clip_and_step
from model import PE_NAMES
from objectives import MLM, OBJECTIVES

WARMUP = 3  # steps that are not timed
SIZES = ("batch_size", "block_size", "mask_rate")
# transformers' classes, as their users would set them. RoBERTa adds positions at the input, MPNet
# also adds T5's bias, and DeBERTa-v3 uses relative positions.
PEERS = {
    "RobertaForMaskedLM": dict(type_vocab_size=1, attn_implementation="sdpa"),
    "MPNetForMaskedLM": {},
    "DebertaV2ForMaskedLM": dict(
        relative_attention=True,
        pos_att_type=["p2c", "c2p"],
        position_biased_input=False,
        share_att_key=True,
        norm_rel_ebd="layer_norm",
    ),
}


class Variant(NamedTuple):
    """The model of one row. The other flags, `args` below, are the same for all rows."""

    pe: str
    objective: str
    compile: bool
    peer: str | None = None

    @property
    def name(self):
        return f"{self.peer or 'ours'} {'compiled' if self.compile else 'eager'}"


# --------------------------------------------------------------------------------------------------
# Models


class FullMLM(MLM):
    """mlm_full: the head at every token."""

    def loss(self, encoder, hidden, batch):
        return self.score(encoder, hidden, batch["original"], batch["eligible"])


class Peer(nn.Module):
    """A model of transformers that is trained on our batches: our token ids at positions
    0 to L - 1. No id counts as padding, so all embeddings are trained."""

    def __init__(self, name, ours):
        from tools.hf import their_sizes, transformers  # not at the top: takes seconds and memory

        super().__init__()
        cfg, self.corrupt = ours.encoder.config, ours.to("meta").corrupt  # without its weights
        model_class = getattr(transformers, name)
        config = model_class.config_class(**their_sizes(cfg), **PEERS[name])
        self.theirs = model_class(config)
        self.theirs.config.pad_token_id = None
        for module in self.theirs.modules():
            if isinstance(module, nn.Embedding):  # the row of padding would stay 0
                module.padding_idx = None
                nn.init.normal_(module.weight, std=config.initializer_range)

    def forward(self, batch):
        """-> the mean loss of the masked tokens, as ours; nothing to log."""
        labels = batch["original"].masked_fill(~batch["mlm_selected"], -100)
        index = torch.arange(labels.size(1), device=labels.device)[None]
        return self.theirs(batch["tokens"], position_ids=index, labels=labels).loss, {}


def build(v, args):
    """A Variant and the flags -> model, EncoderConfig, arguments of train.py. Raises UserError on a
    combination that is not possible."""
    flags = ["--preset", args.preset, "--pe", v.pe]
    flags += ["--objective", v.objective.replace("mlm_full", "mlm")]
    for name in SIZES:
        if getattr(args, name) is not None:
            flags += [f"--{name}", getattr(args, name)]
    run = train.parse_args(flags)
    model = train.build_model(run, 8192 if run.tokenizer == "bpe" else 50265, tokenizer=None)
    if "mlm_full" in v.objective:
        model.objectives["mlm"] = FullMLM(model.encoder, model.objectives["mlm"].cfg)
    cfg = model.encoder.config
    if v.peer:
        return Peer("RobertaForMaskedLM", model), cfg, run
    return model, cfg, run


def random_tokens(cfg, run):
    """-> (B, L) ids."""
    tokens = torch.randint(cfg.cls_id, (run.batch_size, run.block_size))
    tokens[:, 0], tokens[:, -1] = cfg.cls_id, cfg.sep_id
    return tokens


# --------------------------------------------------------------------------------------------------
# Time and memory


def make_step(v, args):
    """-> a function that trains for one step and returns its seconds."""
    torch.manual_seed(0)
    device, dtype = args.device, args.dtype
    model, cfg, run = build(v, args)
    model.to(device).train()
    net = torch.compile(model) if v.compile else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=run.lr, fused=True)
    scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)
    tokens = random_tokens(cfg, run).to(device)

    def step():
        start = perf_counter()
        batch = model.corrupt(tokens, 0)
        with autocast(device, dtype):
            loss, _ = net(batch)
        scaler.scale(loss).backward()
        clip_and_step(model, optimizer, scaler)
        loss.item()  # wait for the GPU
        return perf_counter() - start

    return step


def time_in_turns(variants, args):
    """-> for each variant, the seconds of its timed steps."""
    torch._dynamo.reset()  # else earlier variants count towards the recompile limit
    steps = [make_step(v, args) for v in variants]
    rounds = [[step() for step in steps] for _ in range(WARMUP + args.pairs)]
    return list(zip(*rounds[WARMUP:]))


def peak_memory(v, args):
    """-> peak memory of a few steps in MiB, in a new process. (A child's peak starts with its
    parent's, so this comes before anything large is built.)"""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(measure_memory, v, args).result()


def measure_memory(v, args):
    keep_memory()
    pick_device(args.device.type)  # also sets this process's attention kernels
    step = make_step(v, args)
    for _ in range(3):
        step()
    return peak_memory_mb(args.device)


def compare(groups, args):
    """Yield a row for every reference and variant. groups: pairs of a reference and a variant,
    which take turns; `speed` is the reference's time over the variant's."""
    peaks = {v: peak_memory(v, args) for v in dict.fromkeys(itertools.chain(*groups))}
    keep_memory()
    print(
        f"{'':14}{'pe':19}{'objective':12}{'B x L':>10}{'ms/step':>10}{'tokens/s':>11}"
        f"{'peak MB':>9}  speed (quartiles)"
    )
    for reference, variant in groups:
        timed = time_in_turns((reference, variant), args)
        for v, seconds in zip((reference, variant), timed):
            if v not in peaks:
                continue  # its row is there already
            with torch.device("meta"):  # only to describe it
                model, _, run = build(v, args)
            low, middle, high = quantiles([a / b for a, b in zip(timed[0], seconds)], n=4)
            row = {
                "name": v.name,
                "pe": v.pe,
                "objective": v.objective,
                **{name: getattr(run, name) for name in SIZES},
                "parameters": sum(p.numel() for p in model.parameters()),
                "tokens_per_s": run.batch_size * run.block_size / median(seconds),
                "ms_per_step": 1e3 * median(seconds),
                "peak_mem_mb": peaks.pop(v),
                "reference": f"{reference.name}, {reference.pe}, {reference.objective}",
                "speed": middle,
                "speed_middle_half": [low, high],
            }
            yield row  # written before it is printed
            shape = f"{run.batch_size} x {run.block_size}"
            print(
                f"{v.name:14}{v.pe:19}{v.objective:12}{shape:>10}{row['ms_per_step']:10.1f}"
                f"{row['tokens_per_s']:11,.0f}{row['peak_mem_mb']:9,.0f}"
                f"  {middle:.2f} ({low:.2f} - {high:.2f})"
            )


def agree(variants, args):
    """Yield for each variant how far the loss and the gradient of one batch are from those of a CPU
    in float32: the difference of the losses, and the norm of the gradients' difference over the
    gradient's norm."""
    print(f"{'pe':19}{'objective':12}{'loss on a CPU':>14}{'difference':>12}{'gradient error':>17}")
    for v in variants:
        torch._dynamo.reset()  # as in time_in_turns
        torch.manual_seed(0)
        model, cfg, run = build(v, args)
        model.eval()  # no dropout
        batch = model.corrupt(random_tokens(cfg, run), 0)
        here = args.device, args.dtype
        losses, gradients = [], []
        for device, dtype in ((torch.device("cpu"), torch.float32), here):
            model.to(device).zero_grad()
            net = torch.compile(model) if v.compile and losses else model
            with autocast(device, dtype):
                loss, _ = net({name: x.to(device) for name, x in batch.items()})
            scale = 2.0**16 if dtype == torch.float16 else 1.0  # GradScaler's, against underflow
            (scale * loss).backward()
            parts = [p.grad.flatten() / scale for p in model.parameters() if p.grad is not None]
            losses.append(loss.item())
            gradients.append(torch.cat(parts).float().cpu())
        difference = abs(losses[1] - losses[0])
        relative = float((gradients[1] - gradients[0]).norm() / gradients[0].norm())
        row = {"name": "agree", "pe": v.pe, "objective": v.objective, "compile": v.compile}
        yield {**row, "loss": losses[0], "difference": difference, "gradient_difference": relative}
        print(f"{v.pe:19}{v.objective:12}{losses[0]:14.4f}{difference:12.1e}{relative:17.1e}")


# --------------------------------------------------------------------------------------------------
# The program


def measurements(args):
    """-> an iterator of rows. Raises UserError before anything is measured."""
    pes = args.pe.split(",")
    if args.pe == "all":
        pes = [pe for pe in PE_NAMES if pe not in ("bert_a", "bert_r")]  # without aliases
    objectives = args.objective.split(",")
    if args.objective == "all":
        objectives = [*OBJECTIVES, "mlm_full"]
    if args.peer and (len(pes) * len(objectives) > 1 or args.agree):
        raise UserError("--peer takes one scheme and one objective, and no --agree")
    compiling = [False, True] if args.peer and args.compile is None else [bool(args.compile)]
    if True in compiling and not can_compile(args.device):
        compiling = [False]
    variants = [Variant(*pair, compiling[0]) for pair in itertools.product(pes, objectives)]
    for v in variants:
        with torch.device("meta"):  # only checks the combination
            build(v, args)
    if args.agree:
        return agree(variants, args)
    if args.peer:
        ours = [variants[0]._replace(compile=kind) for kind in compiling]
        return compare([(Variant("abs", "mlm", v.compile, "hf"), v) for v in ours], args)
    change = {"pe": "abs"} if objectives == ["mlm"] or len(pes) > 1 else {"objective": "mlm"}
    reference = variants[0]._replace(**change)
    others = [v for v in variants if v != reference] or [reference]
    return compare([(reference, v) for v in others], args)


def parse_args(argv=None):
    parser = Parser("-m tools.bench", __doc__)
    flag = parser.add_argument
    flag("--pe", default="abs", help="schemes separated by commas, or all")
    flag("--objective", default="mlm", help="objectives separated by commas, or all")
    flag("--peer", choices=["hf"], help="compare with transformers, eager and compiled")
    agreement = "compare losses and gradients with those of a CPU in float32"
    flag("--agree", action="store_true", help=agreement)
    flag("--preset", choices=train.PRESETS, default="demo", help="sizes")
    flag("--batch_size", help="sequences per step")
    flag("--block_size", help="tokens per sequence")
    flag("--mask_rate", help="share of tokens that mlm selects")
    flag("--pairs", type=between(int, "[2, 1e6]"), default=15, help="timed steps of each model")
    flag("--json", type=os.path.expanduser, help="write the rows to this JSON file")
    add_device_flags(parser)  # with --peer, both kinds are measured unless --compile is given
    return parser.parse_args(argv)


def main(argv=None):
    with one_line_errors("decrease --batch_size or --block_size, or choose a smaller --preset"):
        args = parse_args(argv)
        args.device = pick_device(args.device)
        args.dtype, _ = pick_dtype(args.device, args.dtype)
        rows = measurements(args)  # nothing is measured yet
        name, threads = processor_name(args.device.type), torch.get_num_threads()
        dtype = str(args.dtype).removeprefix("torch.")
        machine = f"{name}, {threads} threads, torch {torch.__version__}, {dtype}"
        print(f"{machine}; preset {args.preset}")
        measured = []
        for row in rows:
            measured.append(row)
            if args.json:
                make_folder(Path(args.json).parent)
                write_json(args.json, {"machine": machine, "rows": measured})


if __name__ == "__main__":
    main()
