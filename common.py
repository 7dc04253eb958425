"""The machine: what every program here needs and no reader has to read.

settings     a flag is a field of a dataclass: its default, its help and its range stand in one line
errors       a user's mistake is one line and exit code 2, what breaks under way one line and 1
devices      which one, in what precision, with what compiler, memory and peak
files        written aside, then renamed; read with a check
checkpoints  read, load strictly, or load what fits into another shape
"""

import argparse
import contextlib
import ctypes
import dataclasses
import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import torch

try:
    import fcntl  # locks
    import resource  # peak memory on a CPU
except ImportError:  # Windows has neither
    fcntl = resource = None


# --------------------------------------------------------------------------------------------------
# Settings


def setting(default, help="", allowed=None):
    """A field of a configuration that is also a flag.

    allowed: the values there are, or an interval such as "[1, 1000]" or "(0, 1)" (ends excluded).
    Without help it is no flag.
    """
    return dataclasses.field(default=default, metadata={"help": help, "allowed": allowed})


# Flags of every program that computes.
DEVICE = setting(None, "default: cuda, else mps, else cpu", ("cpu", "cuda", "mps"))
DTYPE = setting(
    None,
    "of matrix products (default: what the device does best)",
    ("float32", "bfloat16", "float16"),
)


def check_settings(config):
    """Raise ValueError, with what is allowed, where a field of a dataclass is out of its range."""
    for field in dataclasses.fields(config):
        value, allowed = getattr(config, field.name), field.metadata.get("allowed")
        if allowed is None or value is None:
            continue
        values = value if isinstance(value, (tuple, list)) else [value]
        if not isinstance(allowed, str):
            if value not in allowed:
                raise ValueError(f"--{field.name} is {value!r}; choose from {', '.join(allowed)}")
        elif not all(within(x, allowed) for x in values):
            raise ValueError(f"--{field.name} is {value}; it must be in {allowed}")


def within(value, interval):
    """Is a number in an interval such as "[1, 1000)"? NaN is in none."""
    low, high = map(float, interval[1:-1].split(","))
    above = value >= low if interval[0] == "[" else value > low
    return above and (value <= high if interval[-1] == "]" else value < high)


def pick_fields(config_class, args, **more):
    """The configuration whose fields have the values that a namespace of flags gives them."""
    names = [field.name for field in dataclasses.fields(config_class)]
    return config_class(**{n: getattr(args, n) for n in names if hasattr(args, n)} | more)


def defaults(*config_classes):
    """{flag: default} of all fields that are flags."""
    found = {}
    for config_class in config_classes:
        for field in dataclasses.fields(config_class):
            if field.metadata.get("help"):
                found[field.name] = field.default
    return found


class Parser(argparse.ArgumentParser):
    """--help that reads like a page of a manual: the docstring, then a flag a line."""

    def __init__(self, script, doc, epilog=None):
        def style(prog):
            return argparse.RawDescriptionHelpFormatter(prog, max_help_position=30, width=100)

        super().__init__(
            usage=f"python {script} [flags]",
            description=doc,
            epilog=epilog,
            formatter_class=style,
            allow_abbrev=False,
        )
        for stream in (sys.stdout, sys.stderr):  # a name may have bytes that are no UTF-8
            if hasattr(stream, "reconfigure"):
                stream.reconfigure(errors="backslashreplace")

    def add_settings(self, title, config_class, of_preset=()):
        """A flag for each field with a help text, in a group. What is not given stays away from
        the namespace, so that a preset can stand between the flag and the default."""
        group = self.add_argument_group(title)
        for field in dataclasses.fields(config_class):
            help, allowed = field.metadata.get("help"), field.metadata.get("allowed")
            if not help:
                continue
            kind = getattr(field.type, "__args__", (field.type,))[0]  # int | None -> int
            options = {"default": argparse.SUPPRESS}
            if field.type is bool:
                options["action"] = "store_true"
            elif kind is bool:
                options["action"] = argparse.BooleanOptionalAction
            else:
                options["type"] = float if kind is tuple else kind
                options["nargs"] = "+" if kind is tuple else None
                options["choices"] = None if isinstance(allowed, str) else allowed
            if field.name in of_preset:
                help += " (from the preset)"
            elif field.default is not None and field.type is not bool:
                help += f" (default: {field.default})"
            group.add_argument(f"--{field.name}", help=help.replace("%", "%%"), **options)

    def error(self, message):
        """A mistake is one line."""
        stop(2, message)


# --------------------------------------------------------------------------------------------------
# Errors


def short(message):
    """One line, in which nothing that was given takes more than 200 characters."""
    for given in sys.argv[1:]:
        if len(given) > 200:
            message = message.replace(given, given[:200] + "..")
    return re.sub(r"(\S{200})\S+", r"\1..", " ".join(message.split()))


@contextlib.contextmanager
def one_line_errors(remedy="take a smaller model or batch"):
    """What goes wrong ends the program with one line; other exceptions are bugs, and show.

    Exit code 2 for a user's mistake (ValueError, OSError); 1 for what breaks under way: memory, and
    disks once the namespace that this yields has `saved`, the step of the last checkpoint.
    """
    progress = SimpleNamespace(saved=None)
    try:
        yield progress
    except KeyboardInterrupt:
        stop(130, "interrupted; what was finished is kept")
    except (ValueError, RuntimeError, MemoryError, OSError) as error:
        under_way = progress.saved is not None
        last = f"; the last checkpoint is of step {progress.saved}" if progress.saved else ""
        no_memory = isinstance(error, (torch.OutOfMemoryError, MemoryError))
        if no_memory or "can't allocate memory" in str(error):
            stop(1, f"out of memory: {remedy}{last}")
        if isinstance(error, OSError) or isinstance(error, ValueError) and not under_way:
            stop(1 if under_way else 2, f"{error}{last}")
        raise


def stop(code, message):
    print(f"error: {short(message)}", file=sys.stderr)
    leave(code)


def leave(code):
    """Exit. One of several processes leaves without destructors: gloo's, which join a thread that
    waits for Python's lock while they hold it, can hang for ever (pytorch#190489)."""
    if torch.distributed.is_initialized():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


# --------------------------------------------------------------------------------------------------
# Devices


def pick_device(name=None):
    """-> torch.device of this process. Raises ValueError if it is not there, or has no kernels."""
    there = {
        "cuda": torch.cuda.is_available(),
        "mps": torch.backends.mps.is_available(),
        "cpu": True,
    }
    found = [kind for kind in there if there[kind]]
    name = name or found[0]
    if name not in found:
        raise ValueError(f"--device {name}: no such device here; there is {', '.join(found)}")
    if name != "cuda":
        return torch.device(name)
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    if device.index >= (n := torch.cuda.device_count()):
        raise ValueError(
            f"process {device.index + 1} of this machine finds {n} GPUs: "
            f"--nproc_per_node {n} at most"
        )
    torch.cuda.set_device(device)
    # cuDNN's attention gives NaN in q's gradient under some masks (pytorch#196678).
    torch.backends.cuda.enable_cudnn_sdp(False)
    major, minor = torch.cuda.get_device_capability()
    if not has_kernels(major, minor, torch.cuda.get_arch_list()):
        card = f"{torch.cuda.get_device_name()} (sm_{major}{minor})"
        raise ValueError(
            f"this torch ({torch.__version__}) has no kernels for {card}; for a V100: "
            "pip install --force-reinstall 'torch>=2.10,<2.14' "
            "--index-url https://download.pytorch.org/whl/cu126"
        )
    return device


def has_kernels(major, minor, built):
    """Does a torch built for `built` (torch.cuda.get_arch_list()) run on capability major.minor?

    Machine code (sm_80) runs on the same major from its minor on; PTX (compute_90) on all newer.
    """
    found = re.findall(r"(sm|compute)_(\d+)(\d)", " ".join(built))
    for kind, *version in found:
        a, b = map(int, version)
        if (a, b) <= (major, minor) and (a == major or kind == "compute"):
            return True
    return not found  # ROCm names its own otherwise


BF16_PAYS = 1.2  # times as fast as float32, at least: the rest of a step gains nothing by it


def pick_dtype(device, name=None):
    """-> dtype of matrix products under autocast, and why. float32 means no autocast."""
    if name:
        if name == "float16" and device.type != "cuda":
            raise ValueError("--dtype float16 needs a GPU; bfloat16 and float32 work here")
        return getattr(torch, name), "asked for"
    if device.type == "cuda":
        if torch.cuda.get_device_capability() >= (8, 0):
            return torch.bfloat16, "native from sm_80 on"
        return torch.float16, "no native bf16 before sm_80; with a gradient scaler"
    if device.type == "cpu":
        if torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported():
            gain = bf16_gain()
            if gain >= BF16_PAYS:
                return torch.bfloat16, f"bf16 products are {gain:.1f} times as fast here"
            return torch.float32, f"bf16 is {'hardly faster' if gain > 1 else 'slower'} on this CPU"
    return torch.float32, "no fast 16-bit arithmetic here"


@functools.cache
def bf16_gain():
    """How many times as fast as in float32 a matrix product is in bf16 on this CPU.

    Units for bf16 do not tell: on a Xeon that has them (avx512_bf16, no AMX) bf16 takes twice the
    time of float32, on an EPYC and with AMX less. So both are timed, in turn, and the best of each
    counts, which is stable on a busy machine, too. A tenth of a second, once a process.
    """
    found = {torch.float32: [], torch.bfloat16: []}
    for dtype in found:
        product_seconds(dtype)  # the first one prepares its kernel
    began = time.perf_counter()
    while len(found[torch.bfloat16]) < 5 or time.perf_counter() - began < 0.05:
        for dtype, seconds in found.items():
            seconds.append(product_seconds(dtype))
    return min(found[torch.float32]) / min(found[torch.bfloat16])


def product_seconds(dtype):
    """Seconds of a product that gives each thread about a millisecond's work."""
    n = round(384 * torch.get_num_threads() ** (1 / 3))
    a = torch.ones(n, n, dtype=dtype)
    began = time.perf_counter()
    a @ a
    return time.perf_counter() - began


def autocast(device, dtype):
    """The context in which matrix products are taken in dtype; it can be entered again."""
    if dtype == torch.float32:
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype)


def can_compile(device):
    """Is there what torch.compile needs: Triton and a C compiler, or a C++ compiler?"""
    if device.type == "cuda":
        from torch.utils._triton import has_triton

        return has_triton() and shutil.which(os.environ.get("CC", "gcc")) is not None
    return any(map(shutil.which, (os.environ.get("CXX", ""), "g++", "clang++", "cl")))


def keep_memory():
    """On Linux, let malloc keep large blocks: a step's tensors are as large as the last one's.

    Without it each is mapped and faulted in anew: 256 ms a step of the demo's pplm instead of 163
    (2-core Xeon).
    """
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        if hasattr(libc, "mallopt"):  # glibc
            libc.mallopt(-3, 1 << 30)  # M_MMAP_THRESHOLD
            libc.mallopt(-1, (1 << 31) - 1)  # M_TRIM_THRESHOLD


# Dense 16-bit matrix operations a second, by the vendors' sheets. The first name that fits counts.
# fmt: off
PEAKS = {"Laptop": None, "Ti": None, "4090 D": None, "H100 PCIe": 756e12, "H100 NVL": 835e12,
         "V100 PCIE": 112e12, "H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12,
         "4090": 165e12, "3090": 71e12, "V100": 125e12, "A10": 125e12, "L4": 121e12, "T4": 65e12}
# fmt: on


def peak_flops(device):
    """Operations a second of the device; None where unknown, so that MFU is absent, not wrong."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    for key, flops in PEAKS.items():
        if re.search(rf"\b{key}\b", name.replace("-", " ")):
            return flops


def peak_memory_mb(device):
    """None on Windows."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    if resource:
        kilo = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return kilo / (2**20 if sys.platform == "darwin" else 2**10)


def check_memory(n_parameters, device):
    """Raise ValueError where the weights, their gradients and Adam's moments cannot fit."""
    if device.type == "cuda":
        there = torch.cuda.get_device_properties(device).total_memory
    elif hasattr(os, "sysconf"):
        there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    else:
        return
    if 16 * n_parameters > there:
        need = f"{n_parameters / 1e9:,.1f} G parameters take {16 * n_parameters / 1e9:,.0f} GB"
        raise ValueError(
            f"{need} to train, and this machine has {there / 1e9:,.0f}: lower "
            "--d_model, --d_ff, --n_layer or --block_size"
        )


def git_commit():
    try:
        git = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True
        )
        return git.stdout.strip()
    except OSError:
        return ""


class Signals:
    """SIGTERM and SIGINT ask for a stop after the step; a second one leaves at once.

    At the end of a `with` they do again what they did before. Python hands signals to its main
    thread alone: in another one nothing changes.
    """

    def __init__(self):
        self.received, self.before = None, {}
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self.before[number] = signal.signal(number, self)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        for number, handler in self.before.items():
            signal.signal(number, handler or signal.SIG_DFL)  # None: it was not Python's

    def __call__(self, number, frame):
        if self.received:
            os._exit(128 + number)
        self.received = number


# --------------------------------------------------------------------------------------------------
# Files


@contextlib.contextmanager
def written_aside(file, previous=None):
    """What is written to the handle becomes the file when all is on the disk: it is whole at every
    moment. What was there stays as `previous`, if that is named.

    What a killed process left aside has the same name, and is written over. Several that may write
    the same file need a lock.
    """
    aside, link = Path(f"{file}.tmp"), Path(f"{previous or file}.tmp")
    try:
        with open(aside, "wb") as handle:
            yield handle
            handle.flush()
            os.fsync(handle.fileno())
        if previous and os.path.exists(file):
            second_name(file, link)  # a link, so that the file itself never goes away
            os.replace(link, previous)
        os.replace(aside, file)
    finally:
        aside.unlink(missing_ok=True)
        link.unlink(missing_ok=True)


def write_json(file, value):
    with written_aside(file) as handle:
        handle.write(json.dumps(value).encode())


def write_torch(file, value, previous=None):
    with written_aside(file, previous) as handle:
        try:
            torch.save(value, handle)
        except RuntimeError as error:  # what torch makes of a full disk
            raise OSError(f"{file} cannot be written: {error}") from None


def second_name(file, target):
    """A hard link, or a copy where the file system has none."""
    target.unlink(missing_ok=True)
    try:
        os.link(file, target)
    except OSError:
        shutil.copy2(file, target)


def read_json(file, **kinds):
    """-> the object in a JSON file, of which these keys have these types. Raises ValueError."""
    try:
        found = json.loads(Path(file).read_text(encoding="utf-8-sig"))
    except ValueError as error:  # not UTF-8, or not JSON
        raise ValueError(f"{file} is damaged ({error})") from None
    for key, kind in kinds.items():
        if not isinstance(found, dict) or not isinstance(found.get(key), kind):
            raise ValueError(f"{file} is damaged (it has no {key} of type {kind.__name__})")
    return found


def read_rows(file):
    """-> the objects of a JSON-lines file, with what a crash or a full disk cut short left out."""
    rows = []
    if Path(file).exists():
        for line in Path(file).read_text(encoding="utf-8", errors="replace").splitlines():
            with contextlib.suppress(ValueError):
                rows.append(json.loads(line))
    return [row for row in rows if isinstance(row, dict)]


def lock(folder, work="training", name=".lock", wait=False):
    """Two processes at the same work in one folder would overwrite each other's files -> the open
    lock, which ends when it is closed, or with the process. Where another process has it: waits for
    that one, or raises ValueError."""
    handle = open(Path(folder, name), "w")
    busy = f"another process is {work} in {folder}"
    if fcntl:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not wait:
                raise ValueError(f"{busy}: wait for it, or name another --out_dir") from None
            print(f"{busy}: waiting for it", flush=True)
            fcntl.flock(handle, fcntl.LOCK_EX)
        except OSError as error:  # some network file systems have no locks
            print(f"no lock on {folder} ({error}): do not start a second run there")
    return handle


# --------------------------------------------------------------------------------------------------
# Checkpoints


def read_checkpoint(path) -> dict:
    """A run folder or a checkpoint file -> its dictionary, weights on the CPU.

    Raises ValueError, FileNotFoundError.
    """
    file = Path(path)
    if file.is_dir():
        file /= "ckpt.pt"
    if not file.exists():
        raise FileNotFoundError(f"no checkpoint at {file}")
    try:
        found = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # a truncated archive, a foreign file, code that is refused
        older = file.with_name("ckpt_prev.pt")
        hint = f"; the one before it is {older}" if older.exists() and older != file else ""
        raise ValueError(
            f"{file} is not a readable checkpoint ({type(error).__name__}){hint}"
        ) from None
    if not isinstance(found, dict) or not {"config", "model", "tokenizer"} <= set(found):
        raise ValueError(
            f"{file} is not a checkpoint of this project (it has no config, model and tokenizer)"
        )
    return found


def newest_run():
    """Folder of the newest checkpoint under out/. Raises FileNotFoundError."""
    found = max(Path("out").glob("*/ckpt.pt"), key=os.path.getmtime, default=None)
    if found is None:
        raise FileNotFoundError(
            "no checkpoint under out/: pre-train one first (python train.py), "
            "or name one with --ckpt"
        )
    return str(found.parent)
