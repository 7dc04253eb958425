"""Pre-train a text encoder: any positional scheme (--pe) with any objective (--objective).

    python train.py                                          # abs, mlm, preset demo: a CPU, minutes, no download
    python train.py --pe tupe_r --objective pplm             # TUPE-R, relative position prediction
    python train.py --pe tupe_r --objective pplm --preset paper            # P0's size, on one GPU
    torchrun --nproc_per_node 4 train.py --preset base --pe tupe_r         # several GPUs

A run lives in out/<dataset>-<preset>-<pe>-<objective>-s<seed>/. Killed or stopped, it goes on with --resume.
Any flag overrides its preset.
"""

import argparse
import contextlib
import ctypes
import dataclasses
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import numpy as np
import tiktoken
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.flop_counter import FlopCounterMode
from tqdm import tqdm

try:
    import fcntl  # locks
    import resource  # peak memory on a CPU
except ImportError:     # Windows has neither
    fcntl = resource = None

from data import Batches, Corpus, Parser, add_data_flags, encoding_arguments, one_line_errors, prepare, removed, write_json
from model import N_SPECIALS, PE_NAMES, Encoder, EncoderConfig, load_strict, read_checkpoint, warm_start
from objectives import CHOICES, KINDS, OBJECTIVES, ObjectiveConfig, Pretraining, stream

# Rows of the table in the README. Dropout is .1 everywhere. Sources: demo and lab ours; paper P0 app. A (warm-up,
# betas and decay are ours); small P2; medium P3 (it gives epochs, the steps are ours); base P1.
DOCS, WEB = dict(dataset="docs", tokenizer="bpe"), dict(dataset="wikibooks", tokenizer="gpt2")
FAST, BERT = dict(beta1=.9, beta2=.98, eps=1e-6), dict(beta1=.9, beta2=.999, eps=1e-6)
PRESETS = {
    "demo": dict(n_layer=4, d_model=128, n_head=4, d_ff=512, block_size=64, batch_size=32, grad_accum=1, lr=2e-3,
                 warmup=100, steps=1500, mask_rate=.15, **FAST, **DOCS),
    "lab": dict(n_layer=4, d_model=256, n_head=8, d_ff=1024, block_size=64, batch_size=64, grad_accum=1, lr=1e-3,
                warmup=300, steps=3000, mask_rate=.15, **FAST, **DOCS),
    "paper": dict(n_layer=12, d_model=256, n_head=16, d_ff=1024, block_size=128, batch_size=64, grad_accum=1, lr=5e-4,
                  warmup=1000, steps=40_000, mask_rate=.30, **FAST, **WEB),
    "small": dict(n_layer=4, d_model=512, n_head=8, d_ff=2048, block_size=256, batch_size=64, grad_accum=20, lr=1e-4,
                  warmup=2500, steps=250_000, mask_rate=.15, **{**BERT, "eps": 1e-8}, **WEB),
    "medium": dict(n_layer=8, d_model=512, n_head=8, d_ff=2048, block_size=128, batch_size=128, grad_accum=1, lr=5e-5,
                   warmup=10_000, steps=250_000, mask_rate=.15, **BERT, **WEB),
    "base": dict(n_layer=12, d_model=768, n_head=12, d_ff=3072, block_size=512, batch_size=32, grad_accum=8, lr=1e-4,
                 warmup=10_000, steps=1_000_000, mask_rate=.15, **BERT, **WEB),
}
STOP_EVERY = 10                         # micro-batches between agreeing to stop, with several processes
EVAL_ROWS, EVAL_BATCH = 512, 32         # validation: fixed rows, fixed corruption, the same for every run
# Flags that do not alter what a run computes: they may change when it is resumed.
FREE_FLAGS = {"resume", "init_from", "init_embeddings", "out_dir", "cache", "device", "dtype", "compile", "log_every",
              "eval_every", "keep_every", "grad_accum"}         # 2 processes x 1 is 1 process x 2: their product is compared


# ---------------------------------------------------------------------------------------------------------
# Flags

def presets_text():
    rows = [f"  {name:8}{p['n_layer']:>2} layers of {p['d_model']}, rows of {p['block_size']}, lr {p['lr']:g}, "
            f"batch {p['batch_size'] * p['grad_accum']:,}, {p['steps']:,} steps, {p['dataset']}" for name, p in PRESETS.items()]
    return "presets:\n" + "\n".join(rows)


def parse_args(argv=None):
    """Flags over preset over defaults -> namespace with every value set. Exits with 2 on a mistake."""
    parser = Parser("train.py", __doc__, presets_text())
    of, enc = ObjectiveConfig, EncoderConfig
    group = parser.add_argument_group("what is trained")
    group.add_argument("--pe", default=enc.pe, help=f"positional scheme (default: %(default)s): {', '.join(PE_NAMES)}; "
                       "or a sum such as rope+t5")
    group.add_argument("--objective", default=of.objective, help=f"one of {', '.join(OBJECTIVES)}, or a sum such as mlm+pplm "
                       "(default: %(default)s)")
    group.add_argument("--loss_weights", type=float, nargs="+", metavar="W", help="one for each part of the sum (default: 1)")
    group.add_argument("--preset", choices=PRESETS, default="demo", help="sizes and schedule (default: %(default)s)")
    group.add_argument("--seed", type=int, default=1337, help="of everything random (default: %(default)s)")

    add_data_flags(parser.add_argument_group("data (dataset and tokenizer: from the preset)"))

    group = parser.add_argument_group("sizes (from the preset)")
    group.add_argument("--block_size", type=int, help="tokens a row, [CLS] and [SEP] included; also max_len")
    group.add_argument("--n_layer", type=int, help="layers")
    group.add_argument("--n_head", type=int, help="attention heads")
    group.add_argument("--d_model", type=int, help="width C")
    group.add_argument("--d_ff", type=int, help="width of the feed-forward layer")
    group.add_argument("--dropout", type=float, default=enc.dropout, help="everywhere, attention included (default: %(default)s)")

    def choice(name, help):
        group.add_argument(f"--{name}", choices=CHOICES[name], default=getattr(of, name), help=f"{help} (default: %(default)s)")
    group = parser.add_argument_group("token objectives")
    group.add_argument("--mask_rate", type=float, help="mlm: share of tokens selected (from the preset)")
    group.add_argument("--whole_word", action="store_true", help="mlm: select whole words")
    choice("mlm_on", "mlm: score the masked tokens, or all (P2's MLM+TP: the two means added)")
    group = parser.add_argument_group("position objectives")
    group.add_argument("--pos_rate", type=float, help=f"share of positions hidden (pmlm) or permuted (default: {of.pos_rate})")
    choice("pair_loss", "how a pair's offset is scored")
    choice("pair_scores", "the pair head with the scheme's positional terms, or without")
    choice("pair_head", "between the scores and the classes")
    group = parser.add_argument_group("tc, taco")
    choice("tc_on", "which tokens are anchors; masked and unmasked need mlm")
    choice("tc_embedding", "what is subtracted from the hidden state: the word seen, the word there was, word and position")
    group.add_argument("--tc_window", type=int, default=of.tc_window,
                       help="positives stand at most (W-1)/2 away (default: %(default)s)")
    group.add_argument("--tc_negatives", type=int, default=of.tc_negatives, help="tokens of other rows (default: %(default)s)")
    group.add_argument("--tc_temperature", type=float, default=of.tc_temperature, help="(default: %(default)s)")
    group = parser.add_argument_group("P2's experiments")
    group.add_argument("--init_embeddings", metavar="CKPT", help="start with the word embeddings of another run")
    group.add_argument("--freeze_embeddings", action="store_true", help="never update the word embeddings")
    group.add_argument("--data_fraction", type=float, default=1.0,
                       help="train on this share of the rows, chosen at random (default: %(default)s)")

    group = parser.add_argument_group("optimisation (from the preset)")
    group.add_argument("--steps", type=int, help="updates in all; part of a run, for the decay depends on it")
    group.add_argument("--batch_size", type=int, help="rows a micro-batch and process")
    group.add_argument("--grad_accum", type=int, help="micro-batches an update")
    group.add_argument("--lr", type=float, help="peak learning rate, linear warm-up and linear decay to 0")
    group.add_argument("--warmup", type=int, help="steps of warm-up")
    group.add_argument("--weight_decay", type=float, default=0.01, help="on matrices only (default: %(default)s)")
    group.add_argument("--beta1", type=float)
    group.add_argument("--beta2", type=float)
    group.add_argument("--eps", type=float, help="Adam's epsilon")

    group = parser.add_argument_group("running")
    group.add_argument("--out_dir", help="folder of the run (default: out/<dataset>-<preset>-<pe>-<objective>-s<seed>)")
    group.add_argument("--resume", action="store_true", help="go on from the run folder's checkpoint, if it has one")
    group.add_argument("--init_from", metavar="CKPT", help="start from the weights of another run: its scheme and objective may "
                       "differ, --block_size may be larger")
    group.add_argument("--eval_every", type=int, default=250,
                       help="steps between validations, which also save (default: %(default)s)")
    group.add_argument("--keep_every", type=int, default=0, help="also keep ckpt_<step>.pt every so many steps")
    group.add_argument("--log_every", type=int, default=50, help="steps between log lines (default: %(default)s)")
    group.add_argument("--device", choices=["cpu", "cuda", "mps"], help="default: cuda, else mps, else cpu")
    group.add_argument("--dtype", choices=["float32", "bfloat16", "float16"],
                       help="of matrix products (default: what the device does best)")
    group.add_argument("--compile", action=argparse.BooleanOptionalAction, help="torch.compile (default: on a GPU)")
    args = parser.parse_args(argv)
    rates = {name for name in ("mask_rate", "pos_rate") if getattr(args, name) is not None}
    for name, value in {**PRESETS[args.preset], "pos_rate": of.pos_rate}.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    with one_line_errors():
        check_args(args)
    for name, users in {"mask_rate": {"mlm"}, "pos_rate": set(KINDS["position"])}.items():
        if name in rates and not users & set(args.objective.split("+")):
            print(f"note: --{name} has no effect on {args.objective}")
    return args


def objective_config(args):
    return ObjectiveConfig(**{f.name: getattr(args, f.name) for f in dataclasses.fields(ObjectiveConfig)})


def check_args(args):
    """Ranges that no other part of the program looks after. Raises ValueError."""
    for name in ("steps", "batch_size", "grad_accum", "eval_every", "log_every"):
        if not 1 <= getattr(args, name) < 2 ** 31:
            raise ValueError(f"--{name} is {getattr(args, name)}; it must be at least 1 (and below 2^31)")
    for name in ("lr", "eps"):
        if not 0 < getattr(args, name) < math.inf:
            raise ValueError(f"--{name} is {getattr(args, name)}; it must be a positive number")
    for name in ("warmup", "weight_decay", "keep_every", "seed"):
        if not 0 <= getattr(args, name) < 2 ** 63:
            raise ValueError(f"--{name} is {getattr(args, name)}; it cannot be negative, nor 2^63 or more")
    for name in ("beta1", "beta2"):
        if not 0 <= getattr(args, name) < 1:
            raise ValueError(f"--{name} is {getattr(args, name)}; it must be in [0, 1)")
    if args.block_size < 4:
        raise ValueError(f"--block_size is {args.block_size}; a row needs at least 4: [CLS], two tokens and [SEP]")
    if args.batch_size * args.block_size >= 2 ** 31:
        raise ValueError(f"--batch_size {args.batch_size} times --block_size {args.block_size} is too much for one micro-batch: "
                         "lower them and raise --grad_accum")
    if not 0 < args.data_fraction <= 1:
        raise ValueError(f"--data_fraction is {args.data_fraction}; it must be above 0 and at most 1")
    args.pe, args.objective = args.pe.lower(), args.objective.lower()
    cfg = objective_config(args)
    args.objective, args.loss_weights = cfg.objective, cfg.loss_weights     # in the order of corruption, whatever the spelling


def default_out_dir(args):
    dataset = Path(args.dataset).parent.name or Path(args.dataset).stem if re.search(r"[*?.]", args.dataset) else args.dataset
    name = f"{re.sub(r'[^A-Za-z0-9]+', '-', dataset).strip('-') or 'files'}-{args.preset}-{args.pe}-{args.objective}-s{args.seed}"
    return str(Path("out") / name)


# ---------------------------------------------------------------------------------------------------------
# The machine

def pick_device(name):
    """-> torch.device of this process. Raises ValueError if it is not there, or this torch has no code for it."""
    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    name = name or next(kind for kind in there if there[kind])
    if not there[name]:
        raise ValueError(f"--device {name}: no such device here; there is {', '.join(k for k in there if there[k])}")
    if name != "cuda":
        return torch.device(name)
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    if device.index >= (n := torch.cuda.device_count()):
        raise ValueError(f"process {device.index + 1} of this machine finds {n} GPUs: --nproc_per_node {n} at most")
    torch.cuda.set_device(device)
    major, minor = torch.cuda.get_device_capability()
    if not has_kernels(major, minor, torch.cuda.get_arch_list()):
        card = f"{torch.cuda.get_device_name()} (sm_{major}{minor})"
        raise ValueError(f"this torch ({torch.__version__}) has no kernels for {card}; "
                         "for a V100: pip install --force-reinstall 'torch>=2.10,<2.14' --index-url https://download.pytorch.org/whl/cu126")
    return device


def has_kernels(major, minor, built):
    """Does a torch built for `built` (torch.cuda.get_arch_list()) run on compute capability major.minor?

    Machine code (sm_80) runs on the same major from its minor on; PTX (compute_90) on everything newer.
    """
    for arch in built:
        if found := re.match(r"(sm|compute)_(\d+)(\d)", arch):
            kind, a, b = found[1], int(found[2]), int(found[3])
            if (a == major and b <= minor) or (kind == "compute" and (a, b) <= (major, minor)):
                return True
    return not any(arch.startswith(("sm", "compute")) for arch in built)      # ROCm names its cards otherwise


def pick_dtype(device, name):
    """-> dtype of matrix products under autocast, and why. float32 means no autocast."""
    if name:
        if name == "float16" and device.type != "cuda":
            raise ValueError("--dtype float16 needs a GPU; bfloat16 and float32 work here")
        return getattr(torch, name), "asked for"
    if device.type == "cuda":
        if torch.cuda.get_device_capability() >= (8, 0):
            return torch.bfloat16, "native from sm_80 on"
        return torch.float16, "no native bf16 before sm_80; with a gradient scaler"
    if device.type == "cpu" and (torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()):
        return torch.bfloat16, "this CPU has bf16 units"
    return torch.float32, "no fast 16-bit arithmetic here"


def autocast(device, dtype):
    return torch.autocast(device.type, dtype) if dtype != torch.float32 else contextlib.nullcontext()


def can_compile(device):
    if device.type == "cuda":
        from torch.utils._triton import has_triton
        return has_triton() and shutil.which(os.environ.get("CC", "gcc")) is not None
    return any(shutil.which(c) for c in (os.environ.get("CXX"), "g++", "clang++", "cl") if c)


def keep_memory():
    """On Linux, let malloc keep large blocks: a step's tensors are as large as the last one's.

    Without it each is mapped and faulted in anew: 256 ms a step of the demo's pplm instead of 163 (2-core Xeon).
    """
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        if hasattr(libc, "mallopt"):        # glibc
            libc.mallopt(-3, 1 << 30)       # M_MMAP_THRESHOLD
            libc.mallopt(-1, (1 << 31) - 1)     # M_TRIM_THRESHOLD


def peak_flops(device):
    """Dense 16-bit matrix operations a second by the vendor's sheet; None where unknown, so that MFU is absent, not wrong."""
    table = {"Laptop": None, "Ti": None, "4090 D": None, "H100 PCIe": 756e12, "H100 NVL": 835e12, "V100 PCIE": 112e12,
             "H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "4090": 165e12, "3090": 71e12, "V100": 125e12,
             "A10": 125e12, "L4": 121e12, "T4": 65e12}         # the first that fits
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return next((flops for key, flops in table.items() if re.search(rf"\b{key}\b", name.replace("-", " "))), None)


def peak_memory_mb(device):
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2 ** 20
    if resource is None:
        return None
    kilo = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return kilo / (2 ** 20 if sys.platform == "darwin" else 2 ** 10)


class Signals:
    """SIGTERM and SIGINT ask for a stop after the step; a second one leaves at once."""
    def __init__(self):
        self.received = None
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self)

    def __call__(self, number, frame):
        if self.received:
            os._exit(128 + number)
        self.received = number


# ---------------------------------------------------------------------------------------------------------
# Optimisation

def make_optimizer(model, args):
    """AdamW; weight decay on matrices only, not on biases, gains and vectors."""
    learned = [p for p in model.parameters() if p.requires_grad]        # not --freeze_embeddings
    groups = [{"params": [p for p in learned if p.dim() >= 2], "weight_decay": args.weight_decay},
              {"params": [p for p in learned if p.dim() < 2], "weight_decay": 0.0}]
    lr = torch.tensor(0.0, device=next(model.parameters()).device)      # set on the device, by Updater
    return torch.optim.AdamW(groups, lr=lr, betas=(args.beta1, args.beta2), eps=args.eps, fused=True)


class Updater:
    """Clip, schedule, step; every decision about a bad gradient is taken on the device, so no step waits for the host.

    A gradient that is not finite skips the update, and a skipped update advances no schedule.
    """
    def __init__(self, model, args, dtype):
        self.params, self.args = list(model.parameters()), args
        self.optimizer = make_optimizer(model, args)
        device = self.params[0].device
        self.scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)
        self.done = torch.zeros((), device=device)          # updates made
        self.skipped = torch.zeros((), device=device)       # in a row, just now
        self.lost = torch.zeros((), device=device)          # skipped since this process started

    def lr(self):
        """Linear warm-up over `warmup` updates to lr, then linear decay to 0 at `steps`."""
        a, t = self.args, self.done + 1
        decay = (a.steps - self.done) / max(1, a.steps - a.warmup)
        return a.lr * torch.minimum(t / max(1, a.warmup), decay).clamp(0, 1)

    def step(self):
        """One update from the gradients that are there, which it clears."""
        self.scaler.unscale_(self.optimizer)
        norm = torch.nn.utils.clip_grad_norm_(self.params, 1.0)
        bad = (~norm.isfinite()).float()
        for group in self.optimizer.param_groups:
            group["lr"].copy_(self.lr())
        if self.scaler.is_enabled():
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            self.optimizer.grad_scale, self.optimizer.found_inf = None, bad
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.done += 1 - bad
        self.skipped = (self.skipped + 1) * bad
        self.lost += bad

    def check(self, step, log):
        """Called at log lines, where the host may wait. Exits with 1 when training has broken down."""
        # A scaler skips while it looks for its scale: ten in a row are not normal. Without one, none is.
        if self.skipped >= 10 if self.scaler.is_enabled() else self.lost > 0:
            losses = ", ".join(f"{x:.3f}" for x in log[-3:])
            stop(1, f"gradient not finite near step {step} (losses before: {losses}); nothing was written after the last "
                 "checkpoint: try a lower --lr, or --dtype float32 or bfloat16")

    def state_dict(self):
        return {"optimizer": self.optimizer.state_dict(), "scaler": self.scaler.state_dict(), "done": self.done}

    def load_state_dict(self, state):
        self.optimizer.load_state_dict(state["optimizer"])
        for group in self.optimizer.param_groups:
            group["lr"] = group["lr"].to(self.done.device)
        if self.scaler.is_enabled() and state["scaler"]:    # it may have been saved under another --dtype
            self.scaler.load_state_dict(state["scaler"])
        self.done.copy_(state["done"])


@contextlib.contextmanager
def one_line_failures(remedy, run=None):
    """What breaks under way (memory, disk) ends with one line and exit code 1; other exceptions are bugs and show."""
    try:
        yield
    except KeyboardInterrupt:
        stop(130, "interrupted; what was finished is kept")
    except (RuntimeError, MemoryError, OSError) as error:
        last = f"; the last checkpoint is of step {run.saved}" if run else ""
        if isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "can't allocate memory" in str(error):
            stop(1, f"out of memory: {remedy}{last}")
        if isinstance(error, OSError):
            stop(1, f"{error}{last}")
        raise


def stop(code, message):
    print(f"error: {message}", file=sys.stderr)
    if dist.is_initialized():
        os._exit(code)          # the other ranks wait in a collective: torchrun ends them
    sys.exit(code)


# ---------------------------------------------------------------------------------------------------------
# Checkpoints and logs

def write_torch(handle, thing):
    """torch.save to an open file. Raises OSError on a full disk too, of which torch makes a RuntimeError."""
    try:
        torch.save(thing, handle)
    except RuntimeError as error:
        raise OSError(f"{handle.name} cannot be written: {error}") from None


def save(folder, step, model, updater, meta, keep=False):
    """Written aside, flushed to disk, then renamed; the one before stays as ckpt_prev.pt."""
    file, aside, previous = folder / "ckpt.pt", folder / "ckpt.tmp", folder / "ckpt_prev.tmp"
    with removed(aside, previous):
        with open(aside, "wb") as handle:
            write_torch(handle, {**meta, "step": step, "model": model.state_dict(), **updater.state_dict()})
            handle.flush()
            os.fsync(handle.fileno())
        if file.exists():
            link(file, previous)                        # so that ckpt.pt is there at every moment
            os.replace(previous, folder / "ckpt_prev.pt")
        os.replace(aside, file)
    if keep:
        link(file, folder / f"ckpt_{step}.pt")


def lock(folder):
    """Two runs in one folder would overwrite each other's checkpoints -> the open lock; it ends with the process."""
    handle = open(folder / ".lock", "w")
    if fcntl:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"another process is training in {folder}: wait for it, or name another --out_dir") from None
        except OSError as error:        # some network file systems have no locks
            print(f"no lock on {folder} ({error}): do not start a second run there")
    return handle


def link(file, target):
    """A second name for a file, or a copy where the file system has no hard links."""
    target.unlink(missing_ok=True)
    try:
        os.link(file, target)
    except OSError:
        shutil.copy2(file, target)


def resume(folder, model, updater, meta):
    """Load the run's checkpoint -> its step. Raises ValueError if a flag that alters the run differs."""
    checkpoint = read_checkpoint(folder)
    then, now = identity(checkpoint), identity(meta)
    different = [f"{key} was {then.get(key)}, is {now.get(key)}" for key in sorted({*then, *now})
                 if then.get(key) != now.get(key)]
    if different:
        raise ValueError(f"{folder} holds another run: {'; '.join(different)}; give the same flags, or another --out_dir")
    load_strict(model, checkpoint["model"], folder)
    updater.load_state_dict(checkpoint)
    return checkpoint["step"]


def tell_warm_start(model, path, meta, say):
    """--init_from: load what fits, and print what was loaded, what is new, what was dropped."""
    checkpoint = read_checkpoint(path)
    check_tokenizer(path, checkpoint, meta)
    for what, names in warm_start(model, checkpoint, path).items():
        shown = ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
        say(f"init_from {path}: {len(names)} tensors {what}" + (f": {shown}" if names and what != "loaded" else ""))


def check_tokenizer(path, checkpoint, meta):
    if checkpoint["tokenizer_hash"] != meta["tokenizer_hash"]:
        raise ValueError(f"{path} was trained with another tokenizer than this data is made with: prepare the data with its own")


def copy_embeddings(encoder, path, meta):
    """--init_embeddings: the word embeddings of another run (P2 fig 4). Raises ValueError when they do not fit."""
    checkpoint = read_checkpoint(path)
    check_tokenizer(path, checkpoint, meta)
    trained = checkpoint["model"]["encoder.tok.weight"]
    if trained.shape != encoder.tok.weight.shape:
        raise ValueError(f"{path} has word embeddings of width {trained.size(1)}, this model {encoder.config.d_model}")
    encoder.tok.weight.data.copy_(trained)


def identity(meta):
    """What makes two runs the same: the flags that alter them, the micro-batches an update, the data."""
    flags = {f"--{key}": value for key, value in meta["args"].items() if key not in FREE_FLAGS}
    return {**flags, "--grad_accum times processes": meta["n_micro"], "the data's tokens": meta["data"]["tokens"],
            "the tokenizer": meta["tokenizer_hash"]}


def git_commit():
    try:
        git = subprocess.run(["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True)
        return git.stdout.strip()
    except OSError:
        return ""


class Log:
    """log.jsonl and the terminal. The first line holds the configuration and the baselines."""
    def __init__(self, folder, first, step, quiet):
        self.quiet, self.file, self.losses = quiet, folder / "log.jsonl", []
        if quiet:
            return
        lines = [json.dumps(first)]
        if step and self.file.exists():         # resumed: what was logged after the checkpoint is made again
            lines += [line for line in self.file.read_text().splitlines()[1:] if logged_step(line) <= step]
        self.file.write_text("\n".join(lines) + "\n")

    def __call__(self, text, **row):
        if self.quiet:
            return
        tqdm.write(text)
        with open(self.file, "a") as handle:
            handle.write(json.dumps(row) + "\n")


def logged_step(line):
    try:
        return json.loads(line)["step"]
    except ValueError:          # a line that a crash cut short
        return math.inf


def unigram_entropy(corpus):
    """Nats a token, of the first ten million tokens, specials left out."""
    counts = np.bincount(corpus.train[:10_000_000], minlength=corpus.vocab_size)[:-N_SPECIALS]
    p = counts[counts > 0] / counts.sum()
    return float(-(p * np.log(p)).sum())


def beside(found, baselines):
    """'0.31 below prior': for each part of the objective, the lowest of its baselines that the validation loss has passed."""
    notes = []
    for part in [name for name in OBJECTIVES if f"val_{name}" in found]:
        loss = found[f"val_{part}"]
        own = {name: value for name, value in baselines.items() if "." not in name or name.split(".")[0] == part}
        if passed := {name: value for name, value in own.items() if loss < value}:
            name = min(passed, key=passed.get)
            notes.append(f"{passed[name] - loss:.3f} below {name}")
    return f" ({', '.join(notes)})" if notes else ""


@torch.no_grad()
def evaluate(model, corpus, cast, device):
    """Mean loss and scalars over fixed validation rows with fixed corruption, dropout off -> {name: float}."""
    model.eval()
    L, sums = model.encoder.config.max_len, {}
    n = min(EVAL_ROWS, corpus.n_rows("val", L))
    chosen = np.linspace(0, corpus.n_rows("val", L) - 1, n).astype(int)     # from all over: documents come in order
    # Batches of about one size: one of a single row would have no other row to draw from.
    for number, index in enumerate(np.array_split(chosen, math.ceil(n / EVAL_BATCH))):
        rows = corpus.rows("val", index, L)
        batch = model.corrupt(torch.from_numpy(rows).to(device), "validation", number)
        with cast():
            loss, scalars = model(batch)
        for name, value in {"val_loss": loss, **{f"val_{key}": value for key, value in scalars.items()}}.items():
            sums[name] = sums.get(name, 0) + value.float() * len(rows) / n
    model.train()
    return {name: float(value) for name, value in sums.items()}


# ---------------------------------------------------------------------------------------------------------
# Processes and small things

@contextlib.contextmanager
def first_rank_first(rank, world):
    """Rank 0 prepares the data while the others wait; then they find it done."""
    if rank > 0:
        dist.barrier()
    yield
    if rank == 0 and world > 1:
        dist.barrier()


def agree(received, device):
    """A signal that any rank has got counts for all of them."""
    number = torch.tensor(received or 0, device=device)
    dist.all_reduce(number, dist.ReduceOp.MAX)
    return int(number)


def parts_text(means):
    parts = [f"{name} {value:.3f}" for name, value in means.items() if name in OBJECTIVES]
    return f" ({', '.join(parts)})" if len(parts) > 1 else ""


@torch.no_grad()
def count_flops(run):
    """Operations of one micro-batch, forward and backward (three times the forward), counted by PyTorch."""
    rows = run.batches(0, run.args.batch_size)
    batch = run.model.corrupt(torch.from_numpy(rows).to(run.device), run.args.seed, 0, 0)
    with FlopCounterMode(display=False) as counter, run.cast():
        run.model(batch)
    return 3 * counter.get_total_flops()


# ---------------------------------------------------------------------------------------------------------
# The run

@dataclasses.dataclass
class Run:
    """What the loop works with."""
    args: argparse.Namespace
    rank: int
    world: int
    device: torch.device
    dtype: torch.dtype
    folder: Path
    corpus: Corpus
    batches: Batches
    model: Pretraining
    updater: Updater
    meta: dict              # what a checkpoint holds beside the weights
    step: int = 0           # updates already made
    saved: int = 0          # step of the last checkpoint
    net: torch.nn.Module = None     # the model, wrapped and compiled
    baselines: dict = None
    flops: int = 0          # of one update, over all processes
    log: Log = None

    @property
    def n_micro(self):
        return self.args.grad_accum * self.world

    def cast(self):
        return autocast(self.device, self.dtype)

    def say(self, text):
        if self.rank == 0:
            print(text, flush=True)


def try_out(args, shape):
    """What the flags alone can break, before data are prepared, which may take hours. Raises ValueError, OSError."""
    with torch.device("meta"):                  # no memory, no time
        cfg = dataclasses.replace(objective_config(args), whole_word=False)     # which needs the tokenizer
        check_rows(Pretraining(Encoder(EncoderConfig(**shape)), cfg), args.batch_size)
    for source in filter(None, (args.init_from, args.init_embeddings)):
        read_checkpoint(source)


def check_rows(model, rows):
    if rows < model.min_rows:
        raise ValueError(f"{'+'.join(model.names)} draws from other rows of the batch: it needs --batch_size 2 or more, and as "
                         f"many rows to validate on; here it is {rows}")


def set_up(args) -> Run:
    """Everything that a user's mistake can break, before the run's folder is touched. Raises ValueError, OSError."""
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    shape = dict(n_layer=args.n_layer, n_head=args.n_head, d_model=args.d_model, d_ff=args.d_ff, max_len=args.block_size,
                 dropout=args.dropout, attn_dropout=args.dropout, pe=args.pe)
    try_out(args, shape)
    device = pick_device(args.device)
    dtype, _ = pick_dtype(device, args.dtype)
    folder = Path(args.out_dir or default_out_dir(args))
    resuming = (folder / "ckpt.pt").exists()
    if resuming and not args.resume:
        raise ValueError(f"{folder} holds a run already: go on with --resume, or name another folder with --out_dir")
    if args.resume and not resuming:
        if (folder / "ckpt_prev.pt").exists():
            raise ValueError(f"{folder} has no ckpt.pt, but ckpt_prev.pt, the one before: rename it to go on from there")
        if rank == 0:
            print(f"--resume: no checkpoint in {folder}, so this run starts at step 0")
    if world > 1:
        # The others wait while the first prepares the data, which may take hours.
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=timedelta(days=2))
    with first_rank_first(rank, world):
        corpus = prepare(args.dataset, args.tokenizer, args.cache, args.text_column, args.books_dataset)
    batches = Batches(corpus, args.block_size, args.seed, args.data_fraction)
    torch.manual_seed(args.seed)
    encoder = Encoder(EncoderConfig(vocab_size=corpus.vocab_size, **shape))
    tokenizer = encoding_arguments(corpus.tokenizer)
    encoder.tokenizer = tiktoken.Encoding(**tokenizer)
    model = Pretraining(encoder, objective_config(args)).to(device)
    check_rows(model, min(args.batch_size, corpus.n_rows("val", args.block_size)))
    encoder.tok.weight.requires_grad_(not args.freeze_embeddings)
    meta = {"args": vars(args), "config": dataclasses.asdict(model.encoder.config), "data": corpus.meta,
            "tokenizer": tokenizer, "tokenizer_hash": corpus.meta["tokenizer_hash"],
            "n_micro": args.grad_accum * world, "git": git_commit(),
            "versions": {"torch": str(torch.__version__), "tiktoken": tiktoken.__version__}}
    run = Run(args, rank, world, device, dtype, folder, corpus, batches, model, Updater(model, args, dtype), meta)
    if resuming:
        run.step = run.saved = resume(folder, model, run.updater, meta)
        return run
    if args.init_from:
        tell_warm_start(model, args.init_from, meta, run.say)
    if args.init_embeddings:
        copy_embeddings(encoder, args.init_embeddings, corpus.meta)
    return run


def start(run):
    """Open the run's folder and log, wrap and compile the model, and say what will happen."""
    args, model = run.args, run.model
    run.baselines = model.baselines(unigram_entropy(run.corpus))
    facts = {key: value for key, value in run.meta.items() if key != "tokenizer"}
    run.log = Log(run.folder, {**facts, "baselines": run.baselines}, run.step, run.rank > 0)
    if run.rank == 0:
        write_json(run.folder / "config.json", facts)
        write_json(run.folder / "tokenizer.json", run.corpus.tokenizer)
    run.flops = count_flops(run) * run.n_micro
    run.net = model
    if run.world > 1:
        run.net = DistributedDataParallel(model, device_ids=[run.device.index] if run.device.type == "cuda" else None)
    compiled = ""
    if args.compile if args.compile is not None else run.device.type == "cuda":
        compiled = ", compiled" if can_compile(run.device) else ", not compiled: no compiler here"
    if compiled == ", compiled":
        run.net = torch.compile(run.net)
    rows = args.batch_size * run.n_micro
    run.say(f"{args.pe}, {args.objective}: {sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters, {args.n_layer} "
            f"layers of {args.d_model}; rows of {args.block_size}, {rows} an update; {args.steps:,} steps, "
            f"{args.steps * rows / run.batches.n:.1f} epochs of {run.batches.n:,} rows")
    _, why = pick_dtype(run.device, args.dtype)
    run.say(f"{run.device}, {str(run.dtype).removeprefix('torch.')} ({why}){compiled}; {run.flops / 1e9:.0f} GFLOP a step; "
            f"the run lives in {run.folder}")
    run.say("baselines (nats): " + ", ".join(f"{name} {value:.3f}" for name, value in run.baselines.items()))
    if run.step:
        run.say(f"resumed at step {run.step}")
    if args.warmup >= args.steps:
        run.say(f"note: --warmup {args.warmup} takes the whole run, so the learning rate only rises")


def update(run, step):
    """One update: micro-batches forward and backward, then the optimiser -> mean loss (), mean scalars.

    Data, corruption and dropout are functions of (seed, step, micro), so a resumed run needs no generator's state, and
    2 processes compute what 1 does with twice the accumulation.
    """
    args, sums = run.args, {}
    for accum in range(args.grad_accum):
        micro = accum * run.world + run.rank
        tokens = torch.from_numpy(run.batches(step * run.n_micro + micro, args.batch_size))
        if run.device.type == "cuda":
            tokens = tokens.pin_memory().to(run.device, non_blocking=True)      # a copy from other memory would wait
        batch = run.model.corrupt(tokens.to(run.device), args.seed, step, micro)
        torch.manual_seed(stream("cpu", args.seed, step, micro, "dropout").initial_seed())
        last = accum == args.grad_accum - 1
        with contextlib.nullcontext() if last or run.world == 1 else run.net.no_sync():
            with run.cast():
                loss, scalars = run.net(batch)
            run.updater.scaler.scale(loss / args.grad_accum).backward()
        for name, value in {"loss": loss.detach(), **scalars}.items():
            sums[name] = sums.get(name, 0) + value / args.grad_accum
    run.updater.step()
    return sums


def train(run):
    """The loop: update, now and then a log line, validation and a checkpoint."""
    args, step, signals = run.args, run.step, Signals()
    agree_every = max(1, STOP_EVERY // args.grad_accum)         # torchrun kills 30 s after its SIGTERM
    sums, since, began = {}, step, time.perf_counter()
    bar = tqdm(total=args.steps, initial=step, unit="step", disable=None if run.rank == 0 else True, leave=False)
    run.model.train()
    while step < args.steps:
        for name, value in update(run, step).items():
            sums[name] = sums.get(name, 0) + value
        step += 1
        bar.update()
        at_eval = step % args.eval_every == 0 or step == args.steps
        keep = args.keep_every and step % args.keep_every == 0
        # One process stops at once; several have to agree, at a step that all of them reach.
        leave = signals.received if run.world == 1 else step % agree_every == 0 and agree(signals.received, run.device)
        if step % args.log_every == 0 or at_eval or keep or leave:
            means = averages(sums, run.world, step - since)
            run.updater.check(step, [*run.log.losses, means["loss"]])
            write_log(run, step, means, (time.perf_counter() - began) / (step - since), at_eval)
            if run.rank == 0 and (at_eval or keep or leave):
                save(run.folder, step, run.model, run.updater, run.meta, keep)
                run.saved = step
            if leave:
                if run.world > 1:
                    dist.barrier()          # torchrun ends them all when one has left, and rank 0 may still be saving
                run.say(f"stopped at step {step}, saved in {run.folder}; go on with the same command and --resume")
                sys.exit(128 + leave)
            sums.clear()
            since, began = step, time.perf_counter()
    bar.close()


def averages(sums, world, n):
    """{name: sum over n steps, of this process} -> {name: mean over steps and processes}. Here the host waits."""
    total = torch.stack([value.float() for value in sums.values()])
    if world > 1:
        dist.all_reduce(total)
    return {name: value / (n * world) for name, value in zip(sums, total.tolist())}


def write_log(run, step, means, seconds, at_eval):
    """One line on the terminal and in log.jsonl; validation where it is due."""
    args = run.args
    rate = args.batch_size * run.n_micro * args.block_size / seconds
    row = dict(step=step, **means, lr=float(run.updater.lr()), ms_per_step=1e3 * seconds, tokens_per_s=rate,
               peak_mem_mb=peak_memory_mb(run.device))
    text = (f"step {step:>6}/{args.steps}  loss {means['loss']:.4f}{parts_text(means)}  lr {row['lr']:.1e}  "
            f"{1e3 * seconds:.0f} ms/step  {rate / 1e3:.1f}k tokens/s")
    if (peak := peak_flops(run.device)) and run.dtype != torch.float32:
        row["mfu"] = run.flops / seconds / (peak * run.world)
        text += f"  MFU {100 * row['mfu']:.0f}%"
    if at_eval and run.rank == 0:
        row.update(evaluate(run.model, run.corpus, run.cast, run.device))
        text += f"  val {row['val_loss']:.4f}{beside(row, run.baselines)}"
    run.log.losses.append(means["loss"])
    run.log(text + (f"  {row['peak_mem_mb'] / 1024:.1f} GB" if row["peak_mem_mb"] else ""), **row)


def main(argv=None):
    args = parse_args(argv)
    keep_memory()
    remedy = "lower --batch_size (and raise --grad_accum by as much), --block_size or --d_model"
    with one_line_failures(remedy), one_line_errors():
        run = set_up(args)
        run.folder.mkdir(parents=True, exist_ok=True)
        held = lock(run.folder) if run.rank == 0 else contextlib.nullcontext()
    with held, one_line_failures(remedy, run):
        start(run)
        train(run)
    if run.world > 1:
        dist.barrier()      # gloo lets go of averages' tensor a moment later; destroyed before that, the group deadlocks
        dist.destroy_process_group()
    run.say(f"done: {run.folder}/ckpt.pt\nnext: python probe.py --ckpt {run.folder} --text 'a sentence of yours'   |   "
            f"python finetune.py --task docs --ckpt {run.folder}")
    if args.preset == "demo":
        run.say("this was the demo; the real run, on a GPU: "
                f"python train.py --pe {args.pe} --objective {args.objective} --preset paper")


if __name__ == "__main__":
    main()
