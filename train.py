"""Pre-train a text encoder with any positional scheme (--pe) and any objective (--objective).

    python train.py --pe tupe_r                                         # minutes on a CPU
    python train.py --pe tupe_r --objective pplm                        # predicts offsets: minutes
    python train.py --pe tupe_r --objective mlm+pplm --preset rpp       # RPP's size, for a GPU
    torchrun --nproc_per_node 4 train.py --pe tupe_r --preset tupe      # several GPUs

A run is stored in out/<dataset>-<preset>-<pe>-<objective>-s<seed>/. To resume after Ctrl-C or a
crash, add --resume to the same command. A flag overrides the preset; --help shows demo's values.
"""

import contextlib
import os
import re
import shlex
import sys
import time
from collections import defaultdict
from dataclasses import asdict
from datetime import timedelta

import tiktoken
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from data import Batches, add_data_flags, prepare, validation_batches
from lib.baselines import compute_baselines
from lib.bpe import encoding_arguments
from lib.config import (
    Parser,
    UserError,
    add_device_flags,
    between,
    leave,
    one_line_errors,
    pick_fields,
)
from lib.device import (
    autocast,
    can_compile,
    flops_per_token,
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
    broken,
    catch_signals,
    clip_and_step,
    format_row,
    print_start,
    print_summary,
    schedule,
)
from lib.weights import load_strict, warm_start
from model import PE_NAMES, Encoder, EncoderConfig
from objectives import (
    OBJECTIVES,
    ObjectiveConfig,
    Pretraining,
    check_fit,
    hash_seed,
    predicts_positions,
    seeded_generator,
)

DOCS = dict(dataset="docs", tokenizer="bpe")
WEB = dict(dataset="wikibooks", tokenizer="gpt2")
ADAM_98 = dict(beta1=0.9, beta2=0.98, eps=1e-6)
ADAM_999 = dict(beta1=0.9, beta2=0.999, eps=1e-6)
# demo, lab and pairs are ours, short and without dropout; with pairs, small models that predict
# positions use their tokens. The others follow their papers, but rpp's warm-up, schedule, Adam
# settings and weight decay are ours, and so are wang's width, heads and steps (it gives epochs).
# fmt: off
PRESETS = {
    "demo": dict(n_layer=4, d_model=128, n_head=4, d_ff=512, block_size=64, batch_size=32,
                 grad_accum=1, lr=3e-3, warmup=500, steps=1500, mask_rate=.15, dropout=0.,
                 **ADAM_98, **DOCS),
    "lab": dict(n_layer=4, d_model=256, n_head=8, d_ff=1024, block_size=64, batch_size=64,
                grad_accum=1, lr=2e-3, warmup=500, steps=3000, mask_rate=.15, dropout=0.,
                **ADAM_98, **DOCS),
    "pairs": dict(n_layer=4, d_model=128, n_head=16, d_ff=512, block_size=16, batch_size=128,
                  grad_accum=1, lr=3e-3, warmup=500, steps=2000, mask_rate=.15, pos_rate=.30,
                  norm="pre", dropout=0., **ADAM_98, **DOCS),
    "rpp": dict(n_layer=12, d_model=256, n_head=16, d_ff=1024, block_size=128, batch_size=64,
                grad_accum=1, lr=5e-4, warmup=1000, steps=40_000, mask_rate=.30, **ADAM_98, **WEB),
    "taco": dict(n_layer=4, d_model=512, n_head=8, d_ff=2048, block_size=256, batch_size=64,
                 grad_accum=20, lr=1e-4, warmup=2500, steps=250_000, mask_rate=.15,
                 **ADAM_999 | {"eps": 1e-8}, **WEB),
    "wang": dict(n_layer=8, d_model=512, n_head=8, d_ff=2048, block_size=128, batch_size=128,
                 grad_accum=1, lr=5e-5, warmup=10_000, steps=250_000, mask_rate=.15, **ADAM_999,
                 **WEB),
    "tupe": dict(n_layer=12, d_model=768, n_head=12, d_ff=3072, block_size=512, batch_size=32,
                 grad_accum=8, lr=1e-4, warmup=10_000, steps=1_000_000, mask_rate=.15, **ADAM_999,
                 **WEB),
}
# fmt: on
# A run may be resumed with other values of these flags. --device changes all random numbers (of
# corruption, in validation too, and of dropout), --compile the dropout masks, --dtype float16 may
# skip steps, and the others change rounding at most. Instead of --grad_accum and the flags of the
# data, `identity` in train() holds the micro-batches per step and the text itself.
FREE_FLAGS = set(
    "resume out_dir cache device dtype compile detect_anomaly log_every eval_every keep_every "
    "grad_accum dataset text_column books_dataset tokenizer "
    "max_len attn_dropout".split()  # these two follow from others
)


def parse_args(argv=None):
    """Flags override the preset, which overrides the defaults -> a namespace with every value set.
    Raises UserError."""
    parser = Parser("train.py", __doc__)
    parser.epilog = f"--pe: {', '.join(PE_NAMES)}\n--objective: {', '.join(OBJECTIVES)}"
    count, positive = between(int, "[1, 1e9]"), between(float, "(0, 1e9)")
    rate, below_1 = between(float, "(0, 1)"), between(float, "[0, 1)")
    path = os.path.expanduser

    flag = parser.add_argument_group("run").add_argument
    what = "default: pairs if the objective predicts positions, otherwise demo"
    flag("--preset", choices=list(PRESETS), help=what)
    flag("--seed", type=between(int, "[0, 9e18]"), default=1337, help="random seed")
    flag("--out_dir", type=path, help="folder of the run (default: see above)")
    flag("--resume", action="store_true", help="resume from the checkpoint in --out_dir")
    flag("--init_from", type=path, help="run to start from; pe, objective and length may differ")
    flag("--init_embeddings", type=path, help="run whose token embeddings are copied (TACO)")
    flag("--freeze_embeddings", action="store_true", help="never update token embeddings (TACO)")
    flag("--eval_every", type=count, default=500, help="steps between evaluations")
    flag("--log_every", type=count, default=100, help="steps between log lines")
    flag("--keep_every", type=count, help="steps between checkpoints kept as ckpt_<step>.pt")
    flag("--detect_anomaly", action="store_true", help="find a NaN's line (slow, not compiled)")
    add_device_flags(parser)

    flag = parser.add_argument_group("optimization").add_argument
    flag("--steps", type=count, help="total optimizer steps; the learning-rate decay depends on it")
    flag("--block_size", type=between(int, "[4, 1e5]"), help="tokens per sequence, specials too")
    flag("--batch_size", type=count, help="micro-batch size per process")
    # Equals one larger batch if every micro-batch scores the same number of tokens, as with mlm,
    # unless inner [SEP]s leave too few. Other losses are means over numbers that vary, and tc's
    # negatives come from their own micro-batch.
    flag("--grad_accum", type=count, help="micro-batches per step: a larger batch")
    flag("--lr", type=positive, help="peak learning rate: linear warm-up, linear decay to 0")
    flag("--warmup", type=between(int, "[0, 1e9]"), help="steps (default: at most --steps / 3)")
    flag("--weight_decay", type=between(float, "[0, 1e9)"), default=0.01, help="on matrices only")
    flag("--beta1", type=below_1, help="AdamW beta1")
    flag("--beta2", type=below_1, help="AdamW beta2")
    flag("--eps", type=positive, help="AdamW epsilon")

    flag = parser.add_argument_group("model").add_argument
    flag("--pe", help="positional scheme, or a sum such as rope+t5")
    flag("--n_layer", type=between(int, "[1, 1000]"), help="layers")
    flag("--n_head", type=between(int, "[1, 1e4]"), help="attention heads")
    flag("--d_model", type=between(int, "[1, 1e5]"), help="embedding dimension C")
    flag("--d_ff", type=between(int, "[1, 1e6]"), help="hidden dimension of the feed-forward layer")
    flag("--dropout", type=below_1, help="dropout rate, attention included")
    flag("--norm", help="LayerNorm: post (after each residual connection, BERT) or pre")
    flag("--max_offset", type=between(int, "[1, 1e5]"), help="rel, deberta, ... clip offsets here")
    flag("--t5_max_distance", type=count, help="t5: from here on, distances share a bucket")
    flag("--rope_base", type=positive, help="rope: base of the frequencies")
    flag("--rope_scale", type=positive, help="rope: positions are divided by it")

    flag = parser.add_argument_group("objective").add_argument
    flag("--objective", help="pre-training objective, or a sum such as mlm+pplm")
    flag("--loss_weights", type=positive, nargs="+", help="one weight per objective of the sum")
    flag("--mask_rate", type=rate, help="fraction of tokens that mlm selects")
    flag("--whole_word", action="store_true", help="mlm: whole-word masking")
    flag("--mlm_on", help="loss on the masked tokens, or on all (TACO's MLM+TP)")
    flag("--pos_rate", type=rate, help="fraction of positions masked or permuted")
    flag("--pair_scores", help="total: with the scheme's positional terms, or content: without")
    flag("--pair_head", help="how a pair's attention logits become class logits: mlp or linear")
    flag("--pair_layer", help="logits of an extra layer, or of the last block (last, RPP)")
    flag("--tc_on", help="tc's anchors: all tokens, or masked ones (TACO's concentrated)")
    flag("--tc_embedding", help="what tc subtracts: input (tokens) or input_layer (TACO's code)")
    flag("--tc_window", type=count, help="W, odd: positives are at most (W-1)/2 tokens away")
    flag("--tc_negatives", type=between(int, "[1, 1e5]"), help="K, number of negatives")
    flag("--tc_temperature", type=positive, help="temperature of the softmax over cosines")

    flag = add_data_flags(parser)
    flag("--data_fraction", type=between(float, "(0, 1]"), default=1.0, help="of the text (TACO)")

    def parse(preset):
        defaults = vars(EncoderConfig()) | vars(ObjectiveConfig()) | PRESETS[preset or "demo"]
        parser.set_defaults(**defaults | {"preset": preset, "warmup": None})
        return parser.parse_args(argv)

    args = parse(None)  # --help ends this call, so it shows the demo's values
    args = parse(args.preset or ("pairs" if predicts_positions(args.objective) else "demo"))
    if args.warmup is None:
        args.warmup = min(PRESETS[args.preset]["warmup"], args.steps // 3)
    args.max_len, args.attn_dropout = args.block_size, args.dropout
    del args.vocab_size  # the tokenizer decides it
    try:
        cfg = pick_fields(ObjectiveConfig, args)
        check_fit(cfg, pick_fields(EncoderConfig, args), args.batch_size)
    except ValueError as error:
        parser.error(str(error))
    args.objective, args.loss_weights = cfg.objective, cfg.loss_weights  # in canonical order
    if not args.out_dir:
        dataset = re.sub(r"[^A-Za-z0-9]+", "-", args.dataset).strip("-")
        args.out_dir = f"out/{dataset}-{args.preset}-{args.pe}-{args.objective}-s{args.seed}"
    return args


def build_model(args, vocab_size, tokenizer):
    """-> the encoder with the heads of its objectives."""
    torch.manual_seed(args.seed)
    encoder = Encoder(pick_fields(EncoderConfig, args, vocab_size=vocab_size))
    encoder.tokenizer = tokenizer
    encoder.tok.weight.requires_grad_(not args.freeze_embeddings)
    return Pretraining(encoder, pick_fields(ObjectiveConfig, args))


def build_optimizer(model, args):
    """-> AdamW, with weight decay on matrices only."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.dim() >= 2], "weight_decay": args.weight_decay},
        {"params": [p for p in trainable if p.dim() < 2], "weight_decay": 0.0},
    ]
    betas = (args.beta1, args.beta2)
    return torch.optim.AdamW(groups, lr=args.lr, betas=betas, eps=args.eps, fused=True)


def initialize(model, args, sources, tokenizer):
    """Copy the weights of --init_from and --init_embeddings. sources: {path: checkpoint}
    -> lines to print. Raises UserError."""
    lines = []
    for path, source in sources.items():
        if source["tokenizer"] != tokenizer:
            raise UserError(f"{path} was trained with a different tokenizer from the data's")
    if args.init_from:
        changes = warm_start(model, sources[args.init_from], args.init_from)
        n_loaded = len(changes.pop("loaded"))
        lines.append(f"--init_from {args.init_from}: {n_loaded} tensors loaded")
        lines += [f"  {what}: {', '.join(names) or 'none'}" for what, names in changes.items()]
    if args.init_embeddings:
        weight = sources[args.init_embeddings]["model"]["encoder.tok.weight"]
        load_strict(model.encoder.tok, {"weight": weight}, "--init_embeddings")
    return lines


def train(args, argv):
    """A run from start to end."""
    # ---- device and processes: torchrun sets RANK and WORLD_SIZE; several nodes need a shared disk
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    device, run = pick_device(args.device), RunFolder(args.out_dir, args.resume)
    dtype, reason = pick_dtype(device, args.dtype)
    amp = autocast(device, dtype)
    starts = [] if run.checkpoint else filter(None, (args.init_from, args.init_embeddings))
    sources = {path: read_checkpoint(path) for path in starts}  # of a new run only
    if world > 1:
        backend, gpu = ("nccl", device) if device.type == "cuda" else ("gloo", None)
        dist.init_process_group(backend, timeout=timedelta(days=2), device_id=gpu)

    # ---- data: rank 0 prepares it while the others wait
    if rank > 0:
        dist.barrier()
    corpus = prepare(args.dataset, args.tokenizer, args.cache, args.text_column, args.books_dataset)
    if world > 1 and rank == 0:
        dist.barrier()
    batches = Batches(corpus, args.block_size, args.seed, args.data_fraction)
    validation = validation_batches(corpus, args.block_size)
    n_micro = args.grad_accum * world  # micro-batches per step
    sequences_per_step = args.batch_size * n_micro

    # ---- model and optimizer
    tokenizer = encoding_arguments(corpus.tokenizer)
    model = build_model(args, corpus.vocab_size, tiktoken.Encoding(**tokenizer)).to(device)
    if min(map(len, validation)) < model.min_sequences:
        raise UserError(f"--objective {args.objective} needs more validation text")
    optimizer = build_optimizer(model, args)
    scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)

    # ---- a new run, or one to resume. identity: what determines its result
    identity = {f"--{k}": v for k, v in vars(args).items() if k not in FREE_FLAGS}
    identity |= {"--grad_accum times processes": n_micro, "the text": corpus.meta["digest"]}
    identity["the tokenizer"] = corpus.meta["tokenizer_hash"]
    if run.checkpoint:  # one from before a flag existed has its default
        defaults = {f"--{k}": v for k, v in vars(EncoderConfig()).items()}
        run.checkpoint["identity"] = defaults | run.checkpoint["identity"]
        step = run.load(identity, model, optimizer, scaler)
        lines = [f"resumed at step {step}"]
    else:
        step, lines = 0, initialize(model, args, sources, tokenizer)
        sources.clear()  # frees their memory
    net = model  # the same weights, compiled or in DDP
    if world > 1:
        net = DistributedDataParallel(model, gradient_as_bucket_view=True)
    compiling = args.compile or args.compile is None and device.type == "cuda"
    if compiling and not args.detect_anomaly and can_compile(device):
        lines.append("compiling: the first step may take a minute")
        net = torch.compile(net)

    baselines = compute_baselines(model, corpus) if rank == 0 else {}
    run_info = {
        "args": vars(args),
        "command": shlex.join(["python", "train.py", *argv]),
        "identity": identity,
        "config": asdict(model.encoder.config),
        "data": corpus.meta,
        "precision": [device.type, str(dtype).removeprefix("torch.")],
        "git": git_commit(),
        "versions": {"torch": str(torch.__version__), "tiktoken": tiktoken.__version__},
        "baselines": baselines,
    }
    with contextlib.ExitStack() as stack:
        if rank == 0:
            stack.enter_context(run.open(step, run_info))
            epochs = args.steps * sequences_per_step / batches.n
            lines.append(f"folder: {run.path}")
            print_start(run_info, model, sequences_per_step, epochs, reason, lines)
        stack.enter_context(torch.autograd.set_detect_anomaly(args.detect_anomaly))
        # With several processes, signals are not caught: torchrun kills the processes, and the run
        # can be resumed from its last checkpoint.
        signals = stack.enter_context(catch_signals()) if world == 1 else {"number": None}
        row, sums = None, defaultdict(float)  # the last log line, and the sums of scalars since
        since, t0 = step, time.perf_counter()  # the step and the time of the last log line
        started, bad = t0, torch.zeros((), dtype=torch.bool, device=device)
        model.train()
        while step < args.steps:
            lr = args.lr * schedule(step, args.steps, args.warmup)
            for group in optimizer.param_groups:
                group["lr"] = lr

            # Data, corruption and dropout are functions of (seed, step, micro), so a resumed run
            # needs no RNG state, and 2 processes with 1 micro-batch each match 1 process with 2.
            # (With more only up to rounding, because the gradients are added in another order; in
            # fp16 too: grad_accum divides the loss before scaling, DDP after.
            # DDP splits a compiled model, which changes its dropout masks.)
            for accum in range(args.grad_accum):
                micro = accum * world + rank
                index = step * n_micro + micro
                tokens = torch.from_numpy(batches(index, args.batch_size))  # (B, L) int64
                if device.type == "cuda":  # pinned memory is copied asynchronously
                    tokens = tokens.pin_memory()
                tokens = tokens.to(device, non_blocking=True)
                batch = model.corrupt(tokens, args.seed, step, micro)
                # Dropout draws from the global generators.
                torch.manual_seed(hash_seed(args.seed, step, micro, "dropout"))
                last = accum == args.grad_accum - 1  # DDP averages gradients in the last one only
                with contextlib.nullcontext() if world == 1 or last else net.no_sync():
                    with amp:
                        loss, scalars = net(batch)
                    scaler.scale(loss / args.grad_accum).backward()
                for name, value in {"loss": loss.detach(), **scalars}.items():
                    sums[name] += value / args.grad_accum

            grad_norm = clip_and_step(model, optimizer, scaler)
            bad |= ~(grad_norm + loss.detach()).isfinite()  # looked at when logging
            step += 1

            evaluating = step % args.eval_every == 0 or step == args.steps
            keeping = bool(args.keep_every) and step % args.keep_every == 0
            stopping = signals["number"]
            if not (step % args.log_every == 0 or evaluating or keeping or stopping):
                continue  # most steps end here

            # Log, evaluate, save, then print. Steps that do not get here have no CPU-GPU sync.
            if broken(bad, scaler):
                leave(
                    1,
                    f"loss or gradient not finite by step {step}; {run.path} keeps its last "
                    "checkpoint: try a lower --lr, --dtype float32, or --detect_anomaly",
                )
            means = torch.stack([value.float() for value in sums.values()]) / (step - since)
            if world > 1:
                dist.all_reduce(means)
                means /= world
            seconds = (time.perf_counter() - t0) / (step - since)
            row = {"step": step, **dict(zip(sums, means.tolist())), "lr": lr}
            row["ms_per_step"] = 1e3 * seconds
            row["tokens_per_s"] = sequences_per_step * args.block_size / seconds
            row["peak_mem_mb"] = peak_memory_mb(device)
            if (peak := peak_flops(device)) and dtype != torch.float32:
                row["mfu"] = row["tokens_per_s"] / world * flops_per_token(model) / peak
            if rank == 0:  # the other ranks wait in their next all-reduce
                if evaluating:
                    row |= evaluate(model, validation, amp, device)
                for name, objective in model.objectives.items() if step == args.steps else ():
                    if objective.ablation:  # without what it should make the model use
                        ablated = evaluate(model, validation, amp, device, objective)
                        row[f"ablated_{name}"] = ablated[f"val_{name}"]
                run.log(row)
                if evaluating or keeping or stopping:
                    state = {
                        **run_info,
                        "tokenizer": tokenizer,
                        "step": step,
                        "model": model.state_dict(),
                        "optimizer": optimizer.state_dict(),
                        "scaler": scaler.state_dict(),
                    }
                    run.save(state, keeping)
                print(format_row(row, model.names, args.steps, baselines))
                for text in model.samples(validation[0][:1].to(device)) if evaluating else ():
                    print("    sample:", text)
            if stopping and step < args.steps:
                print(f"stopped at step {step}; resume with the same command and --resume")
                leave(128 + stopping)
            sums.clear()
            since, t0 = step, time.perf_counter()

    if world > 1:
        dist.barrier()  # until rank 0 has saved
    if rank == 0 and not row:
        print("this run has ended; to train further, use --init_from and another --out_dir")
    elif rank == 0:
        seconds = time.perf_counter() - started
        print_summary(run.path, row, model, args, PRESETS["pairs"], baselines, seconds)
    if world > 1:
        leave(0)


@torch.no_grad()
def evaluate(model, validation, amp, device, ablated=None):
    """Mean loss and scalars over fixed validation sequences with fixed corruption, without dropout
    -> {"val_" + name: float}. ablated: an objective whose `ablate` changes the batches first."""
    model.eval()
    sums, n = defaultdict(float), sum(map(len, validation))
    for number, tokens in enumerate(validation):
        batch = model.corrupt(tokens.to(device), "validation", number)
        if ablated:
            ablated.ablate(batch, seeded_generator(device, "ablation", number))
        with amp:
            loss, scalars = model(batch)
        for name, value in {"loss": loss, **scalars}.items():
            sums[f"val_{name}"] += value.float() * len(tokens) / n
    model.train()
    return {name: float(value) for name, value in sums.items()}


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    remedy = "decrease --batch_size (and increase --grad_accum), --block_size or --d_model"
    with one_line_errors(remedy):
        keep_memory()
        train(parse_args(argv), argv)


if __name__ == "__main__":
    main()
