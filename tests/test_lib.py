"""lib: configuration, errors, files, devices."""

import os
from dataclasses import dataclass

import pytest
import torch

from lib import device as devices
from lib.config import PATH, Parser, RunFailed, catch_errors, setting, validate_config
from lib.files import atomic_write, lock, newest_run, read_json, read_jsonl
from tests.conftest import exit_code, one_line, refuses

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@dataclass
class Example:
    n: int = setting(3, "a number", "[1, 10)")
    rates: tuple | None = setting(None, "numbers", "(0, 1]")
    mode: str = setting("a", "50% of the modes", ("a", "b"))
    folder: str | None = setting(None, "a folder", PATH)
    fast: bool = setting(False, "a switch")
    compile: bool | None = setting(None, "a switch with three states")
    derived: int = setting(7)
    __post_init__ = validate_config


def parse(*flags):
    parser = Parser("example.py", "An example.")
    parser.add_settings("flags", Example, {"n": 3})
    return vars(parser.parse_args(flags))


def test_fields_become_flags(monkeypatch):
    """A field with a help text is a flag with its type; only flags that are given are set."""
    monkeypatch.setenv("HOME", "/home/me")
    assert parse() == {} and Example(n=1).derived == 7
    flags = "--n 5 --rates .1 1 --mode b --folder=~/x --fast --no-compile".split()
    given = {"n": 5, "rates": [0.1, 1.0], "mode": "b", "folder": "/home/me/x"}
    assert parse(*flags) == {**given, "fast": True, "compile": False}
    for wrong in ({"n": 0}, {"n": 10}, {"n": float("nan")}, {"rates": (0.5, 0)}, {"mode": "c"}):
        refuses(f"--{[*wrong][0]} is ", Example, **wrong)
    for flags in (["--n", "x"], ["--mode", "c"], ["--derived", "1"], ["--fas"]):
        refuses("--", parse, *flags)
    assert exit_code(parse, "--help") == 0


def test_errors_become_one_line(capsys):
    """Before a run starts, a ValueError is the user's mistake; then it is a bug with a traceback. A
    failure of the run, a full disk or no memory is always one line."""

    def program(error, running):
        with catch_errors("use less") as status:
            status.running = running
            raise error

    for error, before, after in (
        (OSError(28, "No space left on device"), 2, 1),
        (RunFailed("not finite"), 1, 1),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), 1, 1),
        (KeyboardInterrupt(), 130, 130),
    ):
        for running, code in ((False, before), (True, after)):
            one_line(capsys, program, error, running, code=code)
    assert len(one_line(capsys, program, ValueError("two\nlines " + "x" * 5000), False)) < 300
    for error, running in ((ValueError(), True), (RuntimeError(), False), (KeyError(), False)):
        with pytest.raises(type(error)):
            program(error, running)


def test_files(tmp_path, monkeypatch):
    """A damaged JSON file is refused by name; broken lines of JSON lines are skipped; a file that
    is being written keeps its old content until it is complete."""
    file = tmp_path / "x.json"
    for content in (b"", b"\xff\xfe", b"[]", b'{"a": 1}', b'{"a": "1", "b": "c"}'):
        file.write_bytes(content)
        refuses("x.json is damaged", read_json, file, a=int, b=str)
    file.write_bytes(b'\xef\xbb\xbf{"a": 1, "b": "c"}')
    assert read_json(file, a=int, b=str) == {"a": 1, "b": "c"}
    file.write_bytes(b'{"a": 1}\n7\n\xff\n{"b"\n\n{"a": 2}')
    with pytest.raises(KeyError), atomic_write(file) as handle:
        handle.write(b"half")
        raise KeyError
    assert read_jsonl(file) == [{"a": 1}, {"a": 2}] and read_jsonl(tmp_path / "y") == []
    with atomic_write(file) as handle:
        handle.write(b"{}")
    assert read_jsonl(file) == [{}] and [*tmp_path.iterdir()] == [file]
    with lock(tmp_path):
        refuses("another process is training in", lock(tmp_path).__enter__)
    monkeypatch.chdir(tmp_path)
    refuses("pre-train a model first", newest_run)
    for seconds, name in enumerate(("b", "a")):
        (tmp_path / "out" / name).mkdir(parents=True)
        (tmp_path / "out" / name / "ckpt.pt").touch()
        os.utime(tmp_path / "out" / name / "ckpt.pt", (seconds, seconds))
    assert newest_run() == "out/a"


# fmt: off
@pytest.mark.parametrize("capability, built, runs", [
    ((7, 0), ["sm_75", "sm_80", "sm_90", "compute_90"], False),
    ((9, 0), ["sm_80", "sm_86"], False),
    ((9, 0), ["sm_80", "sm_90a"], True),
    ((8, 6), ["sm_80", "sm_90"], True),
    ((12, 0), ["sm_80", "compute_90"], True),
    ((9, 0), ["gfx90a", "gfx942"], True),
])
# fmt: on
def test_kernels_for_a_gpu(capability, built, runs):
    """Machine code runs on its own major version, PTX on everything newer."""
    assert devices.has_kernels(*capability, built) is runs


def test_a_gpu(monkeypatch):
    """cuDNN's attention is switched off (pytorch#196678), more processes than GPUs are refused,
    fp16 is used where bf16 is not native, and the peak FLOP/s are those of the card's variant."""
    names = ["Tesla V100-SXM2-16GB", "Tesla V100-PCIE-16GB", "GeForce RTX 4090 Laptop GPU"]
    fakes = {"is_available": True, "device_count": 1, "get_arch_list": ["sm_70", "sm_90"]}
    for name, value in fakes.items():
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    for capability, dtype in (((9, 0), torch.bfloat16), ((7, 0), torch.float16)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
        torch.backends.cuda.enable_cudnn_sdp(True)
        assert devices.pick_device().type == "cuda" and not torch.backends.cuda.cudnn_sdp_enabled()
        assert devices.pick_dtype(CUDA)[0] == dtype
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: names.pop(0))
    assert [devices.peak_flops(CUDA) for _ in range(3)] == [125e12, 112e12, None]
    monkeypatch.setenv("LOCAL_RANK", "1")
    refuses("there are 1 GPUs", devices.pick_device, "cuda")


@pytest.mark.parametrize("speedup, dtype", [(1.9, torch.bfloat16), (1.1, torch.float32)])
def test_the_dtype_of_a_cpu(speedup, dtype, monkeypatch):
    """A CPU uses bf16 if it is faster there, which does not follow from its instructions."""
    monkeypatch.setattr(devices, "bf16_speedup", lambda: speedup)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    assert devices.pick_dtype(CPU)[0] == dtype
    assert devices.pick_dtype(CPU, "float16") == (torch.float16, "--dtype")
