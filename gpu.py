"""What is about GPUs: what torch.compile would launch on one, told without it; how far one is from
a CPU; every command that wants one. These are tables of bench.py:

    python bench.py --lower sm_90
    python bench.py --agree --pe all --dtype float16
    python bench.py --gpu results/gpu.json

--lower: inductor lowers forward and backward for tensors that have a device and a shape but no
numbers, as far as the list of kernels, each with the bytes it moves and the operations of a matrix
product. A time is estimated per kernel, max(bytes / bandwidth, operations / rate, LAUNCH), at the
card's published figures: what a perfect kernel would take, so compare lines, do not quote times.
The update is left out, and so is what the host does. A PyTorch without CUDA refuses even to look at
such tensors; there STUB answers for a card's driver, in a process of its own.
"""

import ctypes
import os
import re
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from time import perf_counter
from types import SimpleNamespace
from typing import NamedTuple
from unittest import mock

import torch
import torch._functorch.config
import torch._inductor.config
from torch._inductor.compile_fx import compile_fx
from torch._inductor.graph import GraphLowering
from torch._inductor.ir import MultiOutput
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from common import autocast, read_json, read_rows, write_json
from model import SCHEMES
from objectives import OBJECTIVES, of_kind

LAUNCH = 2.5e-6  # seconds a kernel takes at least
LIMIT = 540  # seconds a command of --gpu may take
# What it runs, in this order.
LINES = """\
bench.py --agree --pe all --dtype float32
bench.py --agree --objective all --pe tupe_r --dtype float32
bench.py --agree --pe all --dtype float16
bench.py --agree --objective all --pe tupe_r --dtype float16
bench.py --agree --pe all --dtype bfloat16
bench.py --agree --objective all --pe tupe_r --dtype bfloat16
train.py --pe tupe_r --objective pplm --preset paper --dtype float16 --steps 50 \
--dataset docs --tokenizer bpe --out_dir out/gpu/fp16
bench.py --peer hf --preset paper --mask_rate .15
bench.py --peer hf --preset base --mask_rate .15
bench.py --compile --preset paper --pe tupe_r
bench.py --compile --preset paper --pe tupe_a
bench.py --compile --preset paper --pe rel
bench.py --compile --preset paper --pe t5
bench.py --compile --preset paper --pe rope
bench.py --compile --preset paper --objective pplm
bench.py --compile --preset paper --objective taco
bench.py --compile --preset paper --objective mlm_full
bench.py --sweep --preset paper
""".splitlines()
LINES += [f"bench.py --agree --compile --pe {pe}" for pe in SCHEMES]
LINES += [f"bench.py --agree --compile --pe tupe_r --objective {x}" for x in OBJECTIVES]
LINES += [
    f"train.py --pe abs --objective {x} --preset paper --resume "
    f"--dataset docs --tokenizer bpe --out_dir out/gpu/{x}"
    for x in ("mlm", "clm", *of_kind("position"))
]


class Card(NamedTuple):
    name: str
    capability: tuple
    processors: int
    bandwidth: float  # bytes a second
    rate: float  # operations a second in 16 bits
    dtype: torch.dtype  # what train.py takes there


CARDS = {
    "sm_70": Card("V100", (7, 0), 80, 0.9e12, 112e12, torch.float16),
    "sm_80": Card("A100", (8, 0), 108, 1.6e12, 312e12, torch.bfloat16),
    "sm_90": Card("H100", (9, 0), 132, 3.35e12, 989e12, torch.bfloat16),
}

# Loaded before PyTorch: there is an accelerator.
ANSWER = """
#include <c10/core/DeviceType.h>
#include <optional>
#define SEEN __attribute__((visibility("default")))
namespace at::accelerator {
SEEN std::optional<c10::DeviceType> getAccelerator(bool) { return c10::DeviceType::CUDA; }
SEEN bool isAccelerator(c10::DeviceType t) { return t == c10::DeviceType::CUDA; }
}
"""
# Loaded after it: its one stream and its events have nothing to do.
STUB = """
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
using namespace c10;
static const Device card(DeviceType::CUDA, 0);
static const Stream only(Stream::DEFAULT, card);
struct Guard : impl::NoOpDeviceGuardImpl<DeviceType::CUDA> {
  Stream getStream(Device) const noexcept override { return only; }
  Stream getNewStream(Device, int) const override { return only; }
  Stream exchangeStream(Stream) const noexcept override { return only; }
  Device getDevice() const override { return card; }
  DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void**, const Stream&, DeviceIndex, EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, DeviceIndex) const noexcept override {}
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)
struct Hooks : at::CUDAHooksInterface {
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  void init() const override {}
};
static auto hooks = new ((void*)&at::detail::getCUDAHooks()) Hooks();
"""


def build(library, source, *libraries):
    """A C++ source -> a shared library, its path. Raises ValueError where it does not compile."""
    root = Path(torch.__file__).parent
    command = [
        "g++",
        "-std=c++20",
        "-shared",
        "-fPIC",
        "-w",
        f"-I{root}/include",
        "-xc++",
        "-",
        "-o",
        library,
        f"-L{root}/lib",
        *libraries,
    ]
    try:
        subprocess.run(command, input=source, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        why = (getattr(error, "stderr", "") or str(error)).strip().splitlines()[0]
        raise ValueError(f"--lower needs g++ where PyTorch has no CUDA: {why}") from None
    return library


def pretend():
    """Make PyTorch accept CUDA tensors without numbers. Where it was built without CUDA, the
    process starts anew with ANSWER preloaded. Raises ValueError."""
    if torch.cuda.is_available():
        return
    if not torch.backends.cuda.is_built():
        if "LOWERING" not in os.environ:
            folder = tempfile.mkdtemp()
            stub = build(f"{folder}/stub.so", STUB, "-lc10", "-ltorch_cpu")
            answer = build(f"{folder}/answer.so", ANSWER)
            environment = {**os.environ, "LD_PRELOAD": answer, "LOWERING": stub}
            os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)
        stub = os.environ.pop("LOWERING")
        del os.environ["LD_PRELOAD"]
        ctypes.CDLL(stub)
        shutil.rmtree(Path(stub).parent)
    for name in ("empty.memory_format", "empty_strided"):
        FOLDING.impl(name, on_cpu)


def answering(answers):
    """-> a stack of contexts in which functions, given by their names, return these values."""
    stack = ExitStack()
    for name, answer in answers.items():
        stack.enter_context(mock.patch(name, lambda *a, x=answer, **k: x))
    return stack


def patches(card):
    """-> a stack of contexts in which inductor believes in the card."""
    major = card.capability[0]
    props = SimpleNamespace(
        name=card.name,
        gcnArchName="",
        major=major,
        minor=0,
        multi_processor_count=card.processors,
        max_threads_per_multi_processor=2048,
        regs_per_multiprocessor=65536,
        warp_size=32,
        max_threads_per_block=1024,
        total_memory=32 << 30,
        L2_cache_size=6 << 20,
        shared_memory_per_block=49152,
        shared_memory_per_block_optin=98304,
    )
    return answering(
        {
            "torch.cuda.is_available": True,
            "torch.cuda.device_count": 1,
            "torch.cuda.current_device": 0,
            "torch.cuda.get_device_properties": props,
            "torch.cuda.is_bf16_supported": major >= 8,
            "torch.cuda.is_initialized": True,
            "torch.cuda._exchange_device": 0,
            "torch.cuda._maybe_exchange_device": 0,
            "torch._dynamo.device_interface.CudaInterface.get_device_properties": props,
            "torch._dynamo.device_interface.CudaInterface.Worker.get_device_properties": props,
            "torch.utils._triton.has_triton": True,
            "torch._inductor.scheduler.has_triton": True,
            # Patterns that are traced with real tensors, for attention that is written out.
            "torch._inductor.fx_passes.fuse_attention._sfdp_init": None,
            "torch._inductor.fx_passes.pad_mm._pad_mm_init": None,
        }
    )


def attention(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, **_):
    """The kernel that PyTorch picks on a card: Flash where nothing is added to the logits (from
    sm_80 on), else the memory-efficient one."""
    if attn_mask is None and torch.cuda.get_device_capability()[0] >= 8:
        return torch.ops.aten._scaled_dot_product_flash_attention(
            q, k, v, dropout_p, is_causal, scale=scale
        )[0]
    if attn_mask is not None:
        attn_mask = attn_mask.expand(*q.shape[:-1], k.size(-2))
    return torch.ops.aten._scaled_dot_product_efficient_attention(
        q, k, v, attn_mask, True, dropout_p, is_causal, scale=scale
    )[0]


def on_cpu(size, *args, dtype=None, **kwargs):
    """What inductor folds it computes; here, a CPU does."""
    empty = torch.empty_strided if args else torch.empty
    return empty(size, *args, dtype=dtype, device="cpu")


FOLDING = torch.library.Library("aten", "IMPL", "CUDA")


class Done(Exception):
    """The graphs are known: nothing is run."""


def kernels(model, batch, card, combo):
    """Forward and backward of a model and its batch, compiled for a card, with fast.compiled's
    combo kernels or without -> [(kind, bytes, operations)], a kernel a row. pretend() comes first;
    the model's parameters are replaced."""
    found = []

    def count(graph):
        """In place of writing and compiling the kernels."""
        with V.set_graph_handler(graph):
            graph.init_wrapper_code()
            graph._update_scheduler()
            for node in graph.scheduler.nodes:
                kind = getattr(node.node, "python_kernel_name", None) or "triton"
                unpacked = isinstance(node.node, MultiOutput)  # of a kernel that is counted
                if type(node).__name__ != "NopKernelSchedulerNode" and not unpacked:
                    size = node.get_read_write_buffers_sizes()
                    found.append((kind, size, node.estimate_flops() or 0))

        def call(*args):
            raise Done

        return SimpleNamespace(call=call, __file__="", key="")

    def lower(graph, inputs):
        with patches(card), mock.patch.object(GraphLowering, "compile_to_module", count):
            return compile_fx(graph, inputs)

    answers = {
        "torch.cuda.get_device_capability": card.capability,
        "torch.cuda.is_bf16_supported": True,
        "torch.cuda.get_rng_state": torch.zeros(16, dtype=torch.uint8),
        "torch.cuda.set_rng_state": None,
        "torch.cuda.amp.common.amp_definitely_not_available": False,
    }
    with (
        answering(answers),
        torch._functorch.config.patch(
            force_non_lazy_backward_lowering=True, enable_autograd_cache=False
        ),
        torch._inductor.config.patch(fx_graph_cache=False, compile_threads=1, combo_kernels=combo),
        mock.patch("torch.nn.functional.scaled_dot_product_attention", attention),
    ):
        warnings.simplefilter("ignore")
        mode, known = FakeTensorMode(allow_non_fake_inputs=True), {None: None}

        def fake(x):
            if x not in known:  # what is tied stays tied
                known[x] = FakeTensor(mode, x.detach().to("meta"), torch.device("cuda", 0))
                if isinstance(x, torch.nn.Parameter):
                    known[x] = torch.nn.Parameter(known[x])
            return known[x]

        for module in model.modules():
            for tensors in (module._parameters, module._buffers):
                tensors.update({name: fake(x) for name, x in tensors.items()})
        batch = {name: fake(x) for name, x in batch.items()}
        torch._dynamo.reset()
        net = torch.compile(model, backend=lower, fullgraph=True)
        with mode, torch.autocast("cuda", card.dtype):
            try:
                net(**batch) if "input_ids" in batch else net(batch)
            except Done:
                pass
    return found


def lower(variants, name, collate):
    """bench.py's table of kernels -> a row for each of its variants; pretend() comes first."""
    card = CARDS[name]
    print(
        f"{card.name}, {card.dtype}: forward and backward\n{'':6}"
        f"{'pe':19}{'objective':12}{'launches':>9}{'GB':>7}{'estimated ms':>14}  kernels"
    )
    for v in variants:
        model, tokens = v.build().train(), v.rows()
        batch = collate(tokens, v.shape, v.mask_rate) if v.peer else model.corrupt(tokens, 0)
        found = kernels(model, batch, card, combo=not v.peer)
        size, seconds, kinds = 0, 0, Counter()  # triton, mm, _scaled_dot_product_.., ..
        for kind, moved, operations in found:
            size += moved
            seconds += max(moved / card.bandwidth, operations / card.rate, LAUNCH)
            kinds[re.sub(r".*aten\.(\w+).*|.*\.", r"\1", kind)] += 1
        facts = {
            key: getattr(v, key) for key in "pe objective batch_size block_size mask_rate".split()
        }
        row = {
            "name": f"{v.peer or 'ours'} compiled",
            "card": name,
            **facts,
            "launches": len(found),
            "gb": size / 1e9,
            "estimated_ms": 1e3 * seconds,
            "kernels": kinds,
        }
        print(
            f"{v.peer or 'ours':6}{v.pe:19}{v.objective:12}{len(found):9}{row['gb']:7.2f}"
            f"{row['estimated_ms']:14.2f}  "
            + ", ".join(f"{n} {kind}" for kind, n in kinds.items()),
            flush=True,
        )
        yield row


# --------------------------------------------------------------------------------------------------
# Where there is a card


def agree(variants):
    """How far the loss and the gradient of one batch are from a CPU's in float32: the loss as a
    difference, the gradient by the length of the difference over its own."""
    print(f"{'pe':19}{'objective':12}{'loss on a CPU':>14}{'off by':>10}{'gradient off by':>17}")
    for v in variants:
        torch.manual_seed(0)
        model = v.build().eval()  # dropout off
        batch, found = model.corrupt(v.rows(), 0), []
        for device, dtype in ((torch.device("cpu"), torch.float32), v.machine):
            model.to(device).zero_grad()
            net = torch.compile(model) if v.compile and found else model
            with autocast(device, dtype):
                loss = net({name: x.to(device) for name, x in batch.items()})[0]
            loss.backward()
            grads = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
            found.append((loss.item(), torch.cat(grads).float().cpu()))
        (loss, a), (other, b) = found
        row = {
            "name": "agree",
            "pe": v.pe,
            "objective": v.objective,
            "compile": v.compile,
            "loss": loss,
            "loss_off": abs(loss - other),
            "gradient_off": float((a - b).norm() / a.norm()),
        }
        print(
            f"{v.pe:19}{v.objective:12}{loss:14.4f}{row['loss_off']:10.1e}"
            f"{row['gradient_off']:17.1e}",
            flush=True,
        )
        yield row


def every_line(file, given):
    """Run what the file lacks of LINES, a process a command; a command is a row, written at once.
    One that fails is a row too; one that LIMIT cuts goes on when it is asked for again."""
    rows = read_json(file, rows=list)["rows"] if os.path.exists(file) else []
    write_json(file, {"rows": rows})  # what cannot be written shows at once
    ours = [f"--{name}={x}" for name, x in given.items() if name != "gpu"]
    # train.py has no --pairs, which make this a trial: as many --steps there.
    names = {"device": "device", "preset": "preset", "pairs": "steps"}
    trains = [f"--{names[name]}={x}" for name, x in given.items() if name in names]
    for command in LINES:
        if command in [row["command"] for row in rows if row["exit"] != "stopped"]:
            continue
        rows = [row for row in rows if row["command"] != command]
        program, *words = command.split()
        training = program == "train.py"
        part = Path(words[-1], "log.jsonl") if training else Path(f"{file}.part")
        words += trains if training else [*ours, f"--json={part}"]
        print(f"python {program} {' '.join(words)}", flush=True)
        process = subprocess.Popen(
            [sys.executable, Path(__file__).with_name(program), *words],
            stderr=subprocess.PIPE,
            text=True,
        )
        row, began = {"command": command}, perf_counter()
        try:
            error = process.communicate(timeout=LIMIT)[1]
            row["exit"] = process.returncode
        except subprocess.TimeoutExpired:
            process.terminate()  # a run is saved
            error, row["exit"] = process.communicate()[1], "stopped" if training else "too long"
        row["seconds"] = perf_counter() - began
        if row["exit"]:
            row["error"] = error.strip().splitlines()[-1:]
        if part.exists() and training:
            row["rows"] = read_rows(part)[1:]
        elif part.exists():
            row |= read_json(part)
            part.unlink()
        rows.append(row)
        write_json(file, {"rows": rows})
        yield row
