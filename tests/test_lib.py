"""lib: errors, files, devices."""

import errno
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import train
from lib import device as devices
from lib.config import RunFailure, UserError, one_line_errors
from lib.files import (
    append_jsonl,
    atomic_write,
    expand,
    make_folder,
    newest_run,
    opening,
    read_checkpoint,
    read_json,
    read_jsonl,
    write_json,
)
from lib.run import print_summary
from tests.conftest import one_line, refuses


def test_errors_become_one_line(capsys):
    """A user's mistake, a missing optional package, a failure while running, no memory and Ctrl-C
    are one line, and control characters in it are escaped. Every other error is a bug and keeps its
    traceback, also one that looks alike, in a hook or an objective."""

    def program(error):
        with one_line_errors("use less"):
            raise error

    def allocate(n_bytes):
        with one_line_errors("use less"):
            torch.empty(n_bytes, dtype=torch.uint8)

    for error, code in (
        (UserError("two\nlines"), 2),
        (ModuleNotFoundError("No module named 'sklearn'", name="sklearn"), 2),
        (UserError("\x1b[31m\x07"), 2),
        (RunFailure("full"), 1),
        (MemoryError(), 1),
        (torch.OutOfMemoryError(), 1),
        (KeyboardInterrupt(), 130),
    ):
        assert one_line(capsys, program, error, code=code).rstrip("\n").isprintable()
    assert "out of memory: use less" in one_line(capsys, allocate, 2**60, code=1)
    lost = RuntimeError("[/a b/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed")
    with pytest.raises(SystemExit, match="1"):
        program(lost)
    for error in (
        ValueError("too many values to unpack"),
        FileNotFoundError(errno.ENOENT, "No such file or directory", "x"),
        OSError(errno.ENOSPC, "No space left on device"),
        RuntimeError("cannot allocate memory"),
        RuntimeError("set by peer"),
        KeyError(),
        TypeError(),
    ):
        with pytest.raises(type(error)):
            program(error)
    assert capsys.readouterr().err == ""


def test_errors_of_files(tmp_path):
    """Where the project opens a file, a wrong path is a user's mistake and a full disk a failure;
    both name the file."""
    file = tmp_path / "file"
    file.write_text("")
    for use in (
        lambda: write_json(file / "x", 1),
        lambda: make_folder(file / "x"),
        lambda: append_jsonl(tmp_path, {}),
        lambda: read_json(tmp_path / "no"),
        lambda: read_checkpoint("x" * 300),
        lambda: read_checkpoint("~nobody_there/x"),  # there is no such home
    ):
        with pytest.raises(UserError, match=f"{tmp_path}|xxx|nobody"):
            use()
    for number in (errno.ENOSPC, errno.EDQUOT, errno.EIO, None):
        with pytest.raises(RunFailure, match="my file"), opening("my file"):
            raise OSError(number, "no space") if number else OSError("4 requested and 0 written")


def test_damaged_files(tmp_path, capsys):
    """A damaged JSON file is refused by name; broken and empty lines of JSON lines are skipped; a
    file that is being written keeps its old content until it is complete."""
    file = tmp_path / "x.json"
    for content in (b"", b"\xff\xfe", b'{"a": 1, "a": 2}'):
        file.write_bytes(content)
        refuses("x.json is damaged", read_json, file)
    # A crash has cut the last line short.
    file.write_bytes(b'{"a": 1}\n{"b"\n\n{"b": "\xff"}\n[]\n7\nnull\n\0\n{"b"')
    append_jsonl(file, {"a": 2})
    with pytest.raises(KeyError), atomic_write(file) as handle:
        handle.write(b"half")
        raise KeyError
    assert read_jsonl(file) == [{"a": 1}, {"a": 2}] and [*tmp_path.iterdir()] == [file]
    assert capsys.readouterr().out.count("skipped a damaged line") == 7


def test_what_exists_is_no_pattern(tmp_path, monkeypatch):
    """A path that exists, or the beginning of one, is literal, whatever characters it has; the rest
    is a pattern."""
    monkeypatch.chdir(tmp_path)
    for folder in ("lr[1e-3]", "data [v2]", "a*", "ab", "1"):
        os.makedirs(f"{folder}/x[1]")
    for pattern, found in {
        "lr[1e-3]": ["lr[1e-3]"],
        "data [v2]/*": ["data [v2]/x[1]"],
        "a*/x[1]": ["a*/x[1]"],
        "a?/x*": ["a*/x[1]", "ab/x[1]"],
        "[0-9]/x[[]1]": ["1/x[1]"],
        f"{tmp_path}/lr*": [f"{tmp_path}/lr[1e-3]"],
        "no": [],
    }.items():
        assert expand(pattern) == [os.path.normpath(path) for path in found]


def test_the_commit_is_the_projects(tmp_path, monkeypatch):
    """Neither the commit of a repository around an export, nor of the one that GIT_DIR names, is
    recorded; nor does a git that hangs stop a run."""
    root = tmp_path / "project"
    (root / "lib").mkdir(parents=True)
    monkeypatch.setattr(devices, "__file__", str(root / "lib" / "device.py"))

    def commit(folder):
        identity = "-c user.email=a -c user.name=a"
        for command in ("init -q", f"{identity} commit -q --allow-empty -m x"):
            subprocess.run(["git", "-C", folder, *command.split()], check=True)
        head = ["git", "-C", folder, "rev-parse", "HEAD"]
        return subprocess.run(head, capture_output=True, text=True).stdout.strip()

    commit(tmp_path)
    assert devices.git_commit() == ""
    monkeypatch.setenv("GIT_DIR", str(tmp_path / ".git"))
    assert devices.git_commit() == ""
    monkeypatch.delenv("GIT_DIR")
    own = commit(root)
    monkeypatch.setenv("GIT_DIR", str(tmp_path / ".git"))
    assert devices.git_commit() == own != ""

    def hang(*args, timeout, **more):
        raise subprocess.TimeoutExpired(args, timeout)

    monkeypatch.setattr(subprocess, "run", hang)
    assert devices.git_commit() == ""


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
    """A summary compares a loss with the baselines on both sides. It says whether the tokens, or
    their order, are used: not if the loss rises by less than .01 without them, hardly if by less
    than .2; and then what to try."""
    values = {"mlm.unigram": 6.8, "pplm.prior": 4.444, "pplm.copy": 4.199}
    names = "val_mlm ablated_mlm val_pplm ablated_pplm".split()
    # flags | losses | what is printed
    for case in """
        --pe abs | 6 7 2 3 | 6.000 nats, below unigram 6.800; 7.000: order is used
        --pe abs | 6.9 6.9 2 3 | 6.900 nats, above unigram 6.800; try more --steps, or
        --pe none | 6 6 2 3 | order is not used; try another --pe
        --pe rope | 6 6 2 3 | order is not used; try more --steps@
        --pe abs | 6 7 4.268 4.268 | 4.268 nats, below prior 4.444, above copy 4.199; --pe tupe_r
        --norm post | 6 7 4.5 4.5 | 4.500 nats, above prior; not used; --preset pairs: --norm pre
        --preset demo | 6 7 3 3 | not used; --block_size 16 --norm pre --n_head 16 --pos_rate 0.3
        --pe abs | 6 7 1.25 1.5 | 1.250 nats, below copy; 1.500: the tokens are used
        --pe abs | 6 6.19 1.25 1.26 | 6.190: order is hardly used; 1.260: the tokens are hardly us
        --objective pplm_some | 6 7 3 3.1 | hardly used; try --init_from a run of pplm
        --objective pplm_some --init_from x | 6 7 3 3.1 | hardly used; try more --steps
        """.strip().splitlines():
        flags, losses, expected = case.split(" | ")
        args = train.parse_args(["--objective", "mlm+pplm", *flags.split()])
        row = dict(zip(names, map(float, losses.split())))
        row |= {"val_pplm_some": row["val_pplm"], "ablated_pplm_some": row["ablated_pplm"]}
        model = train.build_model(args, 8192, None)
        print_summary(Path("out/run"), row, model, args, train.PRESETS["pairs"], values, 60.0)
        printed = capsys.readouterr().out
        assert all(part in printed for part in expected.replace("@", "\n").split("; ")), printed


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="needs Linux")
def test_peak_memory():
    """The peak memory on a CPU is what the kernel says, in MiB."""
    [kib] = re.findall(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())
    assert devices.peak_memory_mb(torch.device("cpu")) == pytest.approx(int(kib) / 1024, rel=0.05)
