"""lib: errors, files, devices."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import train
from lib import device as devices
from lib.config import UserError, one_line_errors
from lib.files import append_jsonl, atomic_write, newest_run, read_json, read_jsonl
from lib.run import print_summary
from tests.conftest import one_line, refuses


def test_errors_become_one_line(capsys):
    """A user's mistake, a missing optional package, a file that cannot be used, a full disk, no
    memory and Ctrl-C are one line; every other error is a bug and keeps its traceback."""

    def program(error):
        with one_line_errors("use less"):
            raise error

    for error, code in (
        (UserError("two\nlines"), 2),
        (ModuleNotFoundError("No module named 'sklearn'", name="sklearn"), 2),
        (FileNotFoundError(2, "No such file or directory", "x"), 2),
        (OSError(28, "No space left on device", "x"), 1),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), 1),
        (MemoryError(), 1),
        (KeyboardInterrupt(), 130),
    ):
        one_line(capsys, program, error, code=code)
    for error in (ValueError("too many values to unpack"), RuntimeError(), KeyError(), TypeError()):
        with pytest.raises(type(error)):
            program(error)


def test_damaged_files(tmp_path):
    """A damaged JSON file is refused by name; broken lines of JSON lines are skipped; a file that
    is being written keeps its old content until it is complete."""
    file = tmp_path / "x.json"
    for content in (b"", b"\xff\xfe"):
        file.write_bytes(content)
        refuses("x.json is damaged", read_json, file)
    file.write_bytes(b'{"a": 1}\n{"b"\n\n{"b"')  # a crash has cut the last line short
    append_jsonl(file, {"a": 2})
    with pytest.raises(KeyError), atomic_write(file) as handle:
        handle.write(b"half")
        raise KeyError
    assert read_jsonl(file) == [{"a": 1}, {"a": 2}] and [*tmp_path.iterdir()] == [file]


def test_the_newest_run(tmp_path, monkeypatch):
    """Without --ckpt, programs take the run that was saved last."""
    monkeypatch.chdir(tmp_path)
    refuses("no checkpoint under out/", newest_run)
    for seconds, name in enumerate(("b", "c", "a"), 1):
        (tmp_path / "out" / name).mkdir(parents=True)
        (tmp_path / "out" / name / "ckpt.pt").touch()
        os.utime(tmp_path / "out" / name / "ckpt.pt", (seconds, seconds))
    assert newest_run() == os.path.join("out", "a")


def test_a_gpu(monkeypatch):
    """cuDNN's attention is switched off (pytorch#196678); a GPU for which this torch has no kernels
    and more processes than GPUs are refused; bf16 is used from sm_80 on."""
    fakes = {"is_available": True, "device_count": 1, "get_device_name": "Tesla V100-SXM2-16GB"}
    for name, value in fakes.items():
        monkeypatch.setattr(torch.cuda, name, lambda *args, value=value: value)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch, "zeros", lambda *args, device: 0)
    gpu = torch.device("cuda", 0)
    for capability, dtype in (((7, 0), torch.float16), ((8, 0), torch.bfloat16)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
        torch.backends.cuda.enable_cudnn_sdp(True)
        assert devices.pick_device() == gpu and devices.pick_dtype(gpu)[0] == dtype
        assert not torch.backends.cuda.cudnn_sdp_enabled()
    assert devices.peak_flops(gpu) == 125e12

    def no_kernels(*args, device):
        raise torch.AcceleratorError("CUDA error: no kernel image is available")

    monkeypatch.setattr(torch, "zeros", no_kernels)
    refuses("does not run on Tesla V100.*no kernel image.*cu126", devices.pick_device)
    monkeypatch.setenv("LOCAL_RANK", "1")
    refuses("there are 1 GPUs", devices.pick_device, "cuda")


def test_dtype_of_a_cpu(monkeypatch):
    """bfloat16 is used with AMX, and with avx512_bf16 on AMD; nothing is measured."""
    for amx, avx, name, dtype in (
        (True, True, "Intel(R) Xeon(R) Platinum 8481C", torch.bfloat16),
        (False, True, "Intel(R) Xeon(R) Platinum 8369HC", torch.float32),
        (False, True, "AMD EPYC 9654", torch.bfloat16),
        (False, False, "AMD EPYC 7763", torch.float32),
    ):
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx)
        monkeypatch.setattr(devices, "processor_name", lambda device_type: name)
        assert devices.pick_dtype(torch.device("cpu"))[0] == dtype, name


@pytest.mark.slow
def test_compiling_is_tried(tmp_path):
    """Without a compiler, one line says why nothing is compiled."""
    code = "import torch; from lib.device import *; print(can_compile(torch.device('cpu')))"
    command, env = [sys.executable, "-c", code], {**os.environ, "CXX": "/no/g++", "PATH": ""}
    env["TORCHINDUCTOR_CACHE_DIR"] = str(tmp_path)  # with nothing that was compiled earlier
    done = subprocess.run(command, env=env, check=True, capture_output=True, text=True)
    reason, result = done.stdout.splitlines()
    assert result == "False" and "/no/g++" in reason and done.stderr == ""


def test_what_the_summary_says(capsys):
    """A summary compares a loss with the baselines on both sides, says whether the tokens, or their
    order, are used, which they are if their loss rises by .01 without them, and what to try if they
    are not."""
    values = {"mlm.unigram": 6.8, "pplm.prior": 4.444, "pplm.copy": 4.199}
    names = "val_mlm ablated_mlm val_pplm ablated_pplm".split()
    # flags | losses | what is printed
    for case in """
        --pe abs | 6 7 2 3 | 6.000 nats, below unigram 6.800; 7.000: order is used
        --pe abs | 6.9 6.9 2 3 | 6.900 nats, above unigram 6.800; try more --steps, or
        --pe none | 6 6 2 3 | order is not used; try another --pe
        --pe abs | 6 7 4.268 4.268 | 4.268 nats, below prior 4.444, above copy 4.199; try more
        --norm post | 6 7 4.5 4.5 | 4.500 nats, above prior; not used; --preset pairs: --norm pre
        --preset demo | 6 7 3 3 | not used; --block_size 16 --norm pre --n_head 16 --pos_rate 0.3
        --pe abs | 6 7 1.251 1.262 | 1.251 nats, below copy; 1.262: the tokens are used
        """.strip().splitlines():
        flags, losses, expected = case.split(" | ")
        args = train.parse_args(["--objective", "mlm+pplm", *flags.split()])
        row = dict(zip(names, map(float, losses.split())))
        model = train.build_model(args, 8192, None)
        print_summary(Path("out/run"), row, model, args, train.PRESETS["pairs"], values, 60.0)
        printed = capsys.readouterr().out
        assert all(part in printed for part in expected.split("; ")), printed
