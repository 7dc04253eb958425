"""Devices: which one to use, in what precision, and what it can do."""

import ctypes
import os
import platform
import re
import subprocess
import sys
import warnings
from pathlib import Path

import torch

from lib.config import UserError

try:
    import resource  # peak memory of a process
except ModuleNotFoundError:  # Windows has none
    resource = None


def processor_name(device_type):
    """-> the name of the GPU or of the CPU."""
    if device_type == "cuda":
        return torch.cuda.get_device_name()
    info = Path("/proc/cpuinfo")
    model = re.search("model name.*: (.*)", info.read_text()) if info.exists() else None
    return model[1] if model else platform.processor() or platform.machine()


def pick_device(name=None):
    """-> the torch.device of this process. Raises UserError if it is missing or unsupported."""
    backends = {"cuda": torch.cuda, "mps": torch.backends.mps, "cpu": torch.cpu}
    names = [kind for kind, backend in backends.items() if backend.is_available()]
    name = name or names[0]
    if name not in names:
        raise UserError(f"--device {name}: not available; choose from {', '.join(names)}")
    if name != "cuda":
        return torch.device(name)
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    n_gpus = torch.cuda.device_count()
    if device.index >= n_gpus:
        raise UserError(f"there are {n_gpus} GPUs: use --nproc_per_node {n_gpus} at most")
    torch.cuda.set_device(device)
    # cuDNN's attention can return NaN for q's gradient with some masks (pytorch#196678).
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        torch.zeros(1, device=device) + 1
    except torch.AcceleratorError as error:
        raise UserError(
            f"this torch ({torch.__version__}) does not run on {torch.cuda.get_device_name()} "
            f"({str(error).splitlines()[0]}); for a V100: pip install --force-reinstall "
            "'torch>=2.10,<2.14' --index-url https://download.pytorch.org/whl/cu126"
        ) from None
    return device


def pick_dtype(device, name=None):
    """-> (dtype of autocast, why it was chosen). float32 means no autocast. It depends on the
    hardware alone, so that a command has the same precision every time and in every process."""
    if name:
        return getattr(torch, name), "--dtype"
    if device.type == "cuda":
        if torch.cuda.get_device_capability() >= (8, 0):
            return torch.bfloat16, "native from sm_80 on"
        return torch.float16, "no native bf16 before sm_80; with a gradient scaler"
    if device.type == "cpu":
        # The other operations gain nothing from bf16, so the matmuls must gain much. avx512_bf16 is
        # not enough on Intel: without AMX, bf16 takes twice as long there.
        if torch.cpu._is_amx_tile_supported():
            return torch.bfloat16, "this CPU has AMX"
        if torch.cpu._is_avx512_bf16_supported() and processor_name("cpu").startswith("AMD"):
            return torch.bfloat16, "this CPU is AMD's and has avx512_bf16"
        return torch.float32, "this CPU has neither AMX nor AMD's avx512_bf16"
    return torch.float32, "the default on this device"


def autocast(device, dtype):
    """The autocast context for a dtype; can be entered repeatedly."""
    return torch.autocast(device.type, dtype, enabled=dtype != torch.float32)


def can_compile(device):
    """Whether torch.compile works on this device. If not, because there is no compiler, no Python.h
    or a /tmp that forbids execution, prints one line that says why."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.compile(lambda x: 2 * x)(torch.ones(8, device=device))
        return True
    except Exception as error:  # from a compiler, the linker, the loader, Triton, ...
        lines = f"{type(error).__name__}: {error}".splitlines()
        reason = next((line for line in lines if "error: " in line), lines[0])
        print(f"torch.compile does not work here, so nothing is compiled ({reason})")
        return False


def keep_memory():
    """On Linux, let malloc keep large blocks, since every step needs the same ones again.

    Otherwise each is mapped anew: a step of the demo's pplm took 256 ms instead of 163 (2-core
    Xeon).
    """
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        # M_MMAP_THRESHOLD; older versions refuse more than 32 MiB. If it is not set, setting
        # M_TRIM_THRESHOLD would fix it at 128 KiB.
        if libc.mallopt(-3, 1 << 30) or libc.mallopt(-3, 1 << 25):
            libc.mallopt(-1, (1 << 31) - 1)  # M_TRIM_THRESHOLD


# Peak dense 16-bit FLOP/s from the data sheets (of the SXM cards).
PEAK_FLOPS = {"V100-SXM": 125e12, "A100": 312e12, "H100 80GB HBM3": 989e12}


def flops_per_token(model):
    """FLOPs of forward and backward per token: 6 per weight of a matrix multiplication, plus
    attention (PaLM, app. B). Heads and positional terms are left out."""
    cfg, encoder = model.encoder.config, model.encoder
    n_weights = sum(p.numel() for p in encoder.blocks.parameters())
    return 6 * n_weights + 12 * cfg.n_layer * cfg.d_model * cfg.max_len


def peak_flops(device):
    """Peak FLOP/s of the device, or None if unknown (then MFU is not printed)."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return next((flops for key, flops in PEAK_FLOPS.items() if key in name), None)


def peak_memory_mb(device):
    """Peak memory of this process in MiB; 0 on Windows, where it is not measured."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    if resource is None:
        return 0.0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)


def git_commit():
    """-> the commit of the project's own repository, "" if it is none, such as an export inside
    another repository."""
    root = Path(__file__).resolve().parent.parent
    env = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}  # another one's
    git = ["git", "-C", str(root), "rev-parse", "--show-toplevel", "HEAD"]
    try:
        done = subprocess.run(git, capture_output=True, text=True, env=env, timeout=10)
        top, commit = done.stdout.splitlines()
        return commit if os.path.samefile(top, root) else ""
    except (OSError, subprocess.TimeoutExpired, ValueError):  # no git, or no repository or commit
        return ""
