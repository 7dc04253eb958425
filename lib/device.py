"""Devices: which one to use, in what precision, and what it can do."""

import contextlib
import ctypes
import functools
import os
import platform
import re
import resource  # peak memory of a process
import shutil
import subprocess
import sys
import time
from pathlib import Path

import torch


def processor_name(device_type):
    """-> the name of the GPU or of the CPU."""
    if device_type == "cuda":
        return torch.cuda.get_device_name()
    info = Path("/proc/cpuinfo")
    model = re.search("model name.*: (.*)", info.read_text()) if info.exists() else None
    return model[1] if model else platform.processor() or platform.machine()


def pick_device(name=None):
    """-> the torch.device of this process. Raises ValueError if it is missing or unsupported."""
    available = {
        "cuda": torch.cuda.is_available(),
        "mps": torch.backends.mps.is_available(),
        "cpu": True,
    }
    names = [kind for kind in available if available[kind]]
    name = name or names[0]
    if name not in names:
        raise ValueError(f"--device {name}: not available; choose from {', '.join(names)}")
    if name != "cuda":
        return torch.device(name)
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    n_gpus = torch.cuda.device_count()
    if device.index >= n_gpus:
        raise ValueError(f"there are {n_gpus} GPUs: use --nproc_per_node {n_gpus} at most")
    torch.cuda.set_device(device)
    # cuDNN's attention can return NaN for q's gradient with some masks (pytorch#196678).
    torch.backends.cuda.enable_cudnn_sdp(False)
    major, minor = torch.cuda.get_device_capability()
    if not has_kernels(major, minor, torch.cuda.get_arch_list()):
        raise ValueError(
            f"this torch ({torch.__version__}) has no kernels for {torch.cuda.get_device_name()} "
            f"(sm_{major}{minor}); for a V100: pip install --force-reinstall 'torch>=2.10,<2.14' "
            "--index-url https://download.pytorch.org/whl/cu126"
        )
    return device


def has_kernels(major, minor, arch_list):
    """Whether a torch built for arch_list (torch.cuda.get_arch_list()) runs on this capability.

    Machine code (sm_80) runs on the same major version from its minor version on, PTX (compute_90)
    on everything newer.
    """
    built = re.findall(r"(sm|compute)_(\d+)(\d)", " ".join(arch_list))
    for kind, *version in built:
        a, b = map(int, version)
        if (a, b) <= (major, minor) and (a == major or kind == "compute"):
            return True
    return not built  # ROCm uses other names


def pick_dtype(device, name=None):
    """-> (dtype of autocast, why it was chosen). float32 means no autocast."""
    if name:
        return getattr(torch, name), "--dtype"
    if device.type == "cuda":
        if torch.cuda.get_device_capability() >= (8, 0):
            return torch.bfloat16, "native from sm_80 on"
        return torch.float16, "no native bf16 before sm_80; with a gradient scaler"
    if device.type == "cpu":
        if torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported():
            speedup = bf16_speedup()
            if speedup >= 1.2:  # the other operations gain nothing from bf16
                return torch.bfloat16, f"bf16 matmuls are {speedup:.1f} times as fast here"
        return torch.float32, "bf16 is not faster on this CPU"
    return torch.float32, "the default on this device"


@functools.cache
def bf16_speedup():
    """How many times as fast a matmul is in bf16 as in float32 on this CPU.

    Having bf16 instructions is not enough: on some Xeons (avx512_bf16 without AMX) bf16 takes twice
    as long. Both are timed in turn, at least six times and for 50 ms; the best times are compared.
    """
    times = {torch.float32: [], torch.bfloat16: []}
    n = round(384 * torch.get_num_threads() ** (1 / 3))  # about a millisecond per thread
    start = time.perf_counter()
    while len(times[torch.bfloat16]) < 6 or time.perf_counter() - start < 0.05:
        for dtype, seconds in times.items():
            a = torch.ones(n, n, dtype=dtype)
            began = time.perf_counter()
            a @ a
            seconds.append(time.perf_counter() - began)
    return min(times[torch.float32]) / min(times[torch.bfloat16])


def autocast(device, dtype):
    """The autocast context for a dtype; can be entered repeatedly."""
    if dtype == torch.float32:
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype)


def can_compile(device):
    """Whether torch.compile has what it needs: Triton and a C compiler (GPU), or a C++ compiler."""
    if device.type == "cuda":
        from torch.utils._triton import has_triton

        return has_triton() and shutil.which(os.environ.get("CC", "gcc")) is not None
    return any(map(shutil.which, (os.environ.get("CXX", ""), "g++", "clang++")))


def keep_memory():
    """On Linux, let malloc keep large blocks, since every step needs the same ones again.

    Otherwise each is mapped anew: a step of the demo's pplm took 256 ms instead of 163 (2-core
    Xeon).
    """
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        if hasattr(libc, "mallopt"):  # glibc
            # M_MMAP_THRESHOLD; older versions refuse more than 32 MiB. If it is not set, setting
            # M_TRIM_THRESHOLD would fix it at 128 KiB.
            if libc.mallopt(-3, 1 << 30) or libc.mallopt(-3, 1 << 25):
                libc.mallopt(-1, (1 << 31) - 1)  # M_TRIM_THRESHOLD


# Peak dense 16-bit FLOP/s from the data sheets. The first name that matches is used.
# fmt: off
PEAK_FLOPS = {"Laptop": None, "Ti": None, "4090 D": None, "H100 PCIe": 756e12, "H100 NVL": 835e12,
              "V100 PCIE": 112e12, "H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12,
              "4090": 165e12, "3090": 71e12, "V100": 125e12, "A10": 125e12, "L4": 121e12,
              "T4": 65e12}
# fmt: on


def peak_flops(device):
    """Peak FLOP/s of the device, or None if unknown (then MFU is not printed)."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    for key, flops in PEAK_FLOPS.items():
        if re.search(rf"\b{key}\b", name.replace("-", " ")):
            return flops


def peak_memory_mb(device):
    """Peak memory of this process in MiB."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)


def git_commit():
    try:
        git = ["git", "rev-parse", "HEAD"]
        return subprocess.run(
            git, cwd=Path(__file__).parent, capture_output=True, text=True
        ).stdout.strip()
    except OSError:
        return ""
