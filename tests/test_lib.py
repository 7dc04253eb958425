"""lib: errors, files, devices."""

import pytest
import torch

from lib import device as devices
from lib.config import RunFailed, catch_errors
from lib.files import atomic_write, read_json, read_jsonl
from tests.conftest import one_line, refuses


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


def test_damaged_files(tmp_path):
    """A damaged JSON file is refused by name; broken lines of JSON lines are skipped; a file that
    is being written keeps its old content until it is complete."""
    file = tmp_path / "x.json"
    for content in (b"", b"\xff\xfe", b"[]", b'{"a": 1}', b'{"a": "1", "b": "c"}'):
        file.write_bytes(content)
        refuses("x.json is damaged", read_json, file, a=int, b=str)
    file.write_bytes(b'{"a": 1}\n7\n\xff\n{"b"\n\n{"a": 2}')
    with pytest.raises(KeyError), atomic_write(file) as handle:
        handle.write(b"half")
        raise KeyError
    assert read_jsonl(file) == [{"a": 1}, {"a": 2}] and [*tmp_path.iterdir()] == [file]


def test_a_gpu(monkeypatch):
    """cuDNN's attention is switched off (pytorch#196678); a GPU without kernels and more processes
    than GPUs are refused; bf16 is used from sm_80 on; and the peak FLOP/s are those of the card's
    variant."""
    fakes = {"is_available": True, "device_count": 1, "get_device_name": "Tesla V100-PCIE-16GB"}
    for name, value in fakes.items():
        monkeypatch.setattr(torch.cuda, name, lambda *args, value=value: value)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    for capability, kernels, dtype in (
        ((7, 0), ["sm_70", "sm_90"], torch.float16),
        ((8, 6), ["sm_80", "sm_90"], torch.bfloat16),  # machine code of the same major version
        ((12, 0), ["sm_80", "compute_90"], torch.bfloat16),  # PTX of an older one
        ((9, 0), ["gfx942"], torch.bfloat16),  # ROCm
        ((7, 0), ["sm_75", "sm_80", "compute_90"], None),
        ((9, 0), ["sm_80", "sm_86"], None),
    ):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
        monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: kernels)
        torch.backends.cuda.enable_cudnn_sdp(True)
        if dtype is None:
            refuses("has no kernels for Tesla V100", devices.pick_device)
        else:
            assert devices.pick_device() == torch.device("cuda", 0)
            assert devices.pick_dtype(torch.device("cuda"))[0] == dtype
        assert not torch.backends.cuda.cudnn_sdp_enabled()
    assert devices.peak_flops(torch.device("cuda")) == 112e12  # 125e12 with NVLink
    monkeypatch.setenv("LOCAL_RANK", "1")
    refuses("there are 1 GPUs", devices.pick_device, "cuda")
