"""Training under bad conditions: kills, signals, full disks, damaged files, several processes,
failures in a notebook, overflows, wrong input."""

import itertools
import math
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import train
from lib.device import can_compile
from lib.files import lock
from lib.run import catch_signals
from model import PE_NAMES, load
from objectives import Pretraining
from tests.conftest import ROOT, log_of, one_line, refuses, run_train, train_flags, weights

OFTEN = "--steps 12 --eval_every 3 --objective taco --pe rel --dropout .1 --dtype float32"


@pytest.fixture(scope="module")
def whole(corpus_file, cache, tmp_path_factory):
    """A run that was never stopped."""
    folder = tmp_path_factory.mktemp("whole")
    run_train(corpus_file, cache, folder, *shlex.split(OFTEN))
    return folder


def assert_same(a, b):
    """Two run folders hold bit-equal weights and optimizer states."""
    a, b = weights(a), weights(b)
    for key in ("model", "optimizer", "step", "scaler"):
        torch.testing.assert_close(a[key], b[key], rtol=0, atol=0)


def before_step(monkeypatch, when, function):
    """Call function() before a step of train.py."""
    get_lr = train.get_lr

    def hooked(step, args):
        if step == when:
            function()
        return get_lr(step, args)

    monkeypatch.setattr(train, "get_lr", hooked)


def send(number):
    """-> a function that sends a signal to this process."""
    return lambda: os.kill(os.getpid(), number)


def overflow(monkeypatch, when):
    """Make the loss of some training forward passes infinite, counted from 0."""
    forward, count = Pretraining.forward, itertools.count()

    def overflowing(self, batch):
        loss, scalars = forward(self, batch)
        return loss * (math.inf if self.training and next(count) in when else 1), scalars

    monkeypatch.setattr(Pretraining, "forward", overflowing)


@pytest.mark.slow
def test_killed_at_any_moment(corpus_file, cache, tmp_path, run):
    """After kill -9 at random moments, most of them in a save, a run resumes and ends with the
    weights of an uninterrupted one."""
    flags = "--steps 400 --eval_every 2 --objective taco --pe rel --dropout .1"
    uninterrupted, cut, rng, steps = run("whole", flags), tmp_path / "cut", random.Random(0), []
    command = [sys.executable, "train.py", *train_flags(corpus_file, cache, cut)]
    command += [*shlex.split(flags), "--resume"]
    for _ in range(5):
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        for _ in range(rng.randint(1, 30)):  # lines of the log
            next(line for line in process.stdout if line.startswith("step "))
        time.sleep(rng.random() / 20)
        process.kill()
        process.communicate()
        steps.append(weights(cut)["step"])
    assert steps == sorted({*steps}) and steps[-1] < 400
    assert_same(uninterrupted, run("cut", f"{flags} --resume"))


@pytest.mark.parametrize("number, code", [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_saves_and_stops(run, whole, tmp_path, monkeypatch, number, code):
    """SIGTERM and Ctrl-C end the run after the current step, which is saved; resuming it gives the
    uninterrupted run."""
    with monkeypatch.context() as patch, pytest.raises(SystemExit, match=str(code)):
        before_step(patch, 4, send(number))
        run("run", OFTEN)
    assert weights(tmp_path / "run")["step"] == 5
    assert_same(whole, run("run", f"{OFTEN} --resume"))


def test_a_second_signal_exits_at_once(monkeypatch):
    """A second signal does not wait for the end of the step."""
    codes = []
    monkeypatch.setattr(os, "_exit", codes.append)
    with catch_signals() as signals:
        send(signal.SIGINT)()
        assert signals["number"] == signal.SIGINT and codes == []
        send(signal.SIGTERM)()
    assert codes == [143]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk(run, whole, tmp_path, monkeypatch, capsys):
    """A full disk is one line; the last checkpoint stays readable, and the run can be resumed."""
    folder = tmp_path / "run"
    with monkeypatch.context() as patch:
        before_step(patch, 7, lambda: (folder / "ckpt.pt.tmp").symlink_to("/dev/full"))
        error = one_line(capsys, run, "run", OFTEN, code=1)
    assert f"{folder}/ckpt.pt cannot be written: " in error
    assert weights(folder)["step"] == 6
    assert_same(whole, run("run", f"{OFTEN} --resume"))


def write_cola(folder):
    (folder / "CoLA").mkdir(parents=True)
    lines = [f"gj04\t{i % 2}\t\tthe {('lazy', 'quick')[i % 2]} fox {i}\n" for i in range(40)]
    for name in ("train.tsv", "dev.tsv"):
        (folder / "CoLA" / name).write_text("".join(lines))


NOTEBOOK = """
import os, signal, train, finetune
from tools import probe
get_lr, forward = train.get_lr, train.Pretraining.forward
handler, kill = signal.getsignal(signal.SIGINT), lambda: os.kill(os.getpid(), signal.SIGINT)
----
train.get_lr = lambda step, args: step == 3 and kill() or get_lr(step, args)
train.main(FLAGS)
----
train.Pretraining.forward = lambda *args: (forward(*args)[0] * float("inf"), {})
train.main([*FLAGS, "--resume"])
----
train.main([*FLAGS, "--resume"])
----
train.get_lr, train.Pretraining.forward = get_lr, forward
train.main([*FLAGS, "--resume"])
----
finetune.main(TUNING)
----
probe.main(["--ckpt", RUN, "--device", "cpu"])
----
assert signal.getsignal(signal.SIGINT) is handler
"""


@pytest.mark.slow
def test_in_a_notebook(corpus_file, cache, tmp_path):
    """In a Jupyter kernel, whose shell keeps the traceback of the last error: train, interrupt,
    fail twice, resume, fine-tune, probe."""
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    write_cola(tmp_path / "glue")
    run = str(tmp_path / "run")
    flags = shlex.split("--steps 8 --eval_every 4 --log_every 1 --block_size 32 --pe tupe_r")
    tuning = f"--task cola --data_dir {tmp_path}/glue --ckpt {run} --epochs 1 --device cpu"
    names = {"FLAGS": train_flags(corpus_file, cache, run, *flags), "RUN": run}
    text = NOTEBOOK
    for name, value in {**names, "TUNING": shlex.split(tuning)}.items():
        text = text.replace(name, repr(value))
    cells = [nbformat.v4.new_code_cell(cell.strip()) for cell in text.split("----")]
    notebook = nbformat.v4.new_notebook(cells=cells)
    resources = {"metadata": {"path": str(ROOT)}}
    nbclient.NotebookClient(
        notebook, timeout=600, allow_errors=True, resources=resources, kernel_name="python3"
    ).execute()
    outputs = [cell.outputs for cell in notebook.cells]
    errors = [[o.evalue for o in cell if o.output_type == "error"] for cell in outputs]
    printed = ["".join(o.get("text", "") for o in cell) for cell in outputs]
    assert errors == [[], ["130"], ["1"], ["1"], [], [], [], []], printed
    assert "stopped at step 4" in printed[1] and "resumed at step 4" in printed[4]
    assert all("not finite near step 5" in text for text in printed[2:4])
    assert weights(run)["step"] == 8 and "cola" in printed[5] and printed[6]


@pytest.mark.parametrize("dtype, step, saved", [("float32", 8, 5), ("float16", 17, 15)])
def test_a_loss_that_is_not_finite(run, tmp_path, monkeypatch, capsys, dtype, step, saved):
    """A loss that is not finite (fp16: ten in a row) ends the run with one line; nothing is saved
    after it."""
    overflow(monkeypatch, {*range(7, 30), *([0, 2] if dtype == "float16" else [])})
    flags = f"--steps 30 --eval_every 5 --log_every 1 --dtype {dtype}"
    assert f"not finite near step {step}" in one_line(capsys, run, "run", flags, code=1)
    assert weights(tmp_path / "run")["step"] == saved


def test_a_gradient_that_is_not_finite(run, monkeypatch, capsys):
    """A single gradient that is not finite ends the run at the next log line, too: it leaves a
    weight that may not be used again soon."""
    clip, norms = torch.nn.utils.clip_grad_norm_, iter([1, 1, math.nan, 1, 1])
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", lambda *a: clip(*a) * next(norms))
    flags = "--steps 30 --log_every 5 --dtype float32"
    assert "not finite near step 5" in one_line(capsys, run, "run", flags, code=1)


def test_fp16_skips_steps_and_resumes(run, tmp_path, monkeypatch):
    """A step that overflows changes no weight, halves the scale and advances the schedule. A run
    resumed among such steps is bit-equal."""
    flags = "--steps 10 --keep_every 1 --log_every 1 --grad_accum 2 --dtype float16"
    with monkeypatch.context() as patch:
        overflow(patch, {2, 7, 8, 16})  # in steps 1, 3, 4 and 8
        uninterrupted = run("whole", flags)
    states = [weights(uninterrupted, f"ckpt_{step}.pt") for step in range(1, 11)]
    for step, (a, b) in enumerate(zip(states, states[1:]), 1):
        skipped = all(torch.equal(a["model"][key], b["model"][key]) for key in a["model"])
        assert skipped == (step in {1, 3, 4, 8})
        assert b["scaler"]["scale"] == a["scaler"]["scale"] / (2 if skipped else 1)
    rates = [row["lr"] for row in log_of(uninterrupted)[1:]]
    assert rates[2] > rates[3] > rates[4] > rates[5]
    (tmp_path / "cut").mkdir()
    os.link(uninterrupted / "ckpt_4.pt", tmp_path / "cut" / "ckpt.pt")
    overflow(monkeypatch, {0, 8})  # in steps 4 and 8
    assert_same(uninterrupted, run("cut", f"{flags} --resume"))


@pytest.mark.slow
@pytest.mark.parametrize("pe", PE_NAMES)
def test_fp16_agrees_with_float32(run, pe):
    """Every scheme trains in fp16, with accumulation, as it does in float32."""
    flags = f"--pe {pe} --objective mlm+pplm --steps 5 --log_every 1 --grad_accum 2 --dtype"
    a, b = (log_of(run(dtype, f"{flags} {dtype}")) for dtype in ("float32", "float16"))
    for x, y in zip(a[1:], b[1:], strict=True):
        assert x["loss"] == pytest.approx(y["loss"], abs=0.01)


def test_unreadable_checkpoints(run, capsys):
    """A checkpoint that cannot be read or is something else is one line, for every use of it. A
    damaged log does not stop a run from being resumed."""
    folder = run("run", "--steps 3")
    good, file = (folder / "ckpt.pt").read_bytes(), folder / "ckpt.pt"
    for content in (good[: len(good) // 2], b"", b"not a checkpoint", None):
        file.write_bytes(content or b"")
        if content is None:
            torch.save({"some": "dictionary"}, file)
        refuses("ckpt.pt is not a (readable )?checkpoint", load, folder)
        for name, flags in (("run", "--resume"), ("new", f"--init_from {folder}")):
            assert "ckpt.pt is not a" in one_line(capsys, run, name, f"--steps 3 {flags}")
    file.write_bytes(good)
    (folder / "log.jsonl").write_bytes(b"\xff\xfe\n7\n[]\n")
    run("run", "--steps 3 --resume")


def test_two_runs_in_one_folder(run, tmp_path, capsys):
    """A second run in a folder is refused as long as the first one is there."""
    (tmp_path / "run").mkdir()
    with lock(tmp_path / "run"):
        assert "another process is training in" in one_line(capsys, run, "run", "--steps 1")
    run("run", "--steps 1")


def torchrun(*command):
    """Run `command` in two processes -> CompletedProcess with text output."""
    launcher = "-m torch.distributed.run --standalone --nproc_per_node 2".split()
    command = [sys.executable, *launcher, *map(str, command)]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)


@pytest.mark.slow
def test_two_processes_equal_accumulation(corpus_file, cache, tmp_path, run):
    """Two processes have the losses and the weights of one with twice the accumulation, dropout
    included, and print no warning."""
    flags = "--steps 4 --dropout .1 --dtype float32 --objective nsp+taco+pplm --pe rel"
    one = run("one", f"{flags} --grad_accum 4")
    flags = train_flags(corpus_file, cache, tmp_path / "two", *shlex.split(flags))
    ended = torchrun("train.py", *flags, "--grad_accum", 2)
    assert ended.returncode == 0 and "warn" not in ended.stderr.lower(), ended.stderr
    a, b = (weights(folder)["model"] for folder in (one, tmp_path / "two"))
    torch.testing.assert_close(a, b, rtol=0, atol=1e-6)
    a, b = log_of(one)[-1], log_of(tmp_path / "two")[-1]
    for key in ("loss", "val_loss", "nsp", "mlm", "tc", "pplm"):
        assert a[key] == pytest.approx(b[key], abs=1e-5)


KILLED = """import os, signal, train
get_lr, me = train.get_lr, os.getpid()
kill = lambda step: step == 17 and os.environ["RANK"] == "1" and os.kill(me, signal.SIGKILL)
train.get_lr = lambda step, args: kill(step) or get_lr(step, args)
train.main()"""


@pytest.mark.slow
def test_two_processes_end(corpus_file, cache, corpus, tmp_path, run):
    """Runs of two processes end, however they end: finished (gloo's destructors can hang), with a
    user's mistake, with a loss that is not finite, or because one of them was killed. One process
    may continue for two."""
    flags = ["train.py", *train_flags(corpus_file, cache, tmp_path / "run", "--steps", 40)]
    assert torchrun(*flags, "--steps", 3, "--out_dir", tmp_path / "short").returncode == 0
    for more, message in (
        (["--dataset", "nowhere/*.txt"], "nowhere"),
        (["--lr", "9e8", "--log_every", 1], "not finite near step"),
    ):
        ended = torchrun(*flags, *more)
        assert ended.returncode and message in ended.stderr
        assert 'train.py", line' not in ended.stderr  # a traceback of ours
    (tmp_path / "killed.py").write_text(KILLED)
    ended = torchrun(tmp_path / "killed.py", *flags[1:], "--eval_every", 5)
    assert ended.returncode and weights(tmp_path / "run")["step"] == 15
    assert weights(run("run", "--steps 40 --resume --grad_accum 2"))["step"] == 40


@pytest.mark.slow
@pytest.mark.skipif(not can_compile(torch.device("cpu")), reason="needs a C++ compiler")
@pytest.mark.parametrize("pe, objective", [("tupe_r", "mlm"), ("rel", "pplm")])
def test_compiled_training_with_dropout(run, pe, objective):
    """Compiled training with dropout learns as eager training does, and the same seed gives the
    same losses again."""
    flags = f"--pe {pe} --objective {objective} --dropout .1 --steps 40 --lr 0.01 --log_every 1"
    logs = []
    for name, compile in (("eager", "--no-compile"), ("once", "--compile"), ("twice", "--compile")):
        torch._dynamo.reset()
        rows = log_of(run(name, f"{flags} --dtype float32 {compile}"))[1:]
        logs.append([row["loss"] for row in rows])
    eager, compiled, again = logs
    assert compiled == again
    assert compiled[0] == pytest.approx(eager[0], abs=0.1)  # with other dropout masks
    assert sum(compiled[-10:]) / 10 == pytest.approx(sum(eager[-10:]) / 10, abs=0.1)
    assert compiled[-1] < compiled[0] - (0.1 if objective == "pplm" else 1)


def test_home_folders_and_spaces(corpus_file, tmp_path, monkeypatch, capsys):
    """Path flags expand ~, and the commands that are printed can be pasted."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.jsonl").write_bytes(Path(corpus_file).read_bytes())
    train.main([*train_flags("~/text.jsonl", "~/c", "~/a b"), "--steps", "1"])
    starts = ["--init_from=~/a b", "--init_embeddings", "~/a b"]
    train.main([*train_flags("~/text.jsonl", "~/c", "~/b"), "--steps", "1", *starts])
    assert {"text.jsonl", "c", "a b", "b"} == {file.name for file in tmp_path.iterdir()}
    folder = re.search(r"--ckpt (.*?) +\(try", capsys.readouterr().out)[1]
    assert shlex.split(folder) == [str(tmp_path / "a b")]


# Flags, and a part of the one line that says what is wrong.
EARLY_MISTAKES = {  # found before data is prepared, which may take hours
    "--pe foo": "tupe_r",
    "--pe rope --objective pmlm": "rope",
    "--objective foo": "pplm",
    "--objective tc --batch_size 1": "--batch_size 2",
    "--mask_rate .01": "selects none",
    "--pos_rate .3": "--pos_rate has no effect on --objective mlm",
    "--lr nan": "--lr is nan; it must be in (0, 1e9)",
    "--steps 1e22": "invalid int value",
    "--steps 0": "--steps is 0; it must be in [1, 2e9]",
    "--d_model 10 --n_head 3": "n_head",
    "--preset huge": "invalid choice",
    "--stepz 3": "unrecognized arguments: --stepz",
    "--init_from nowhere": "no checkpoint at nowhere",
}
MISTAKES = {
    "--dataset no/such/*.jsonl": "no/such",
    "--block_size 4000": "a smaller --block_size",
    "--init_from {run} --d_model 32": "d_model is 16 there, 32 here",
    "--init_from {run} --block_size 8": "--block_size must be at least 16, not 8",
    "--init_embeddings {run} --d_model 32": "--init_embeddings does not fit",
    "--out_dir {run}/ckpt.pt/a": "Not a directory",
}


def test_wrong_input_is_one_line(run, tmp_path, monkeypatch, capsys):
    """Wrong input is one line that says what is allowed, with exit code 2; nothing is written."""
    folder = run("run", "--steps 1")
    for flags, message in {**MISTAKES, **EARLY_MISTAKES}.items():
        if flags in EARLY_MISTAKES:
            monkeypatch.setattr(train, "prepare", lambda **settings: pytest.fail("too late"))
        error = one_line(capsys, run, "wrong", flags.format(run=folder))
        assert error.startswith("error: ") and message in error, (flags, error)
        assert not (tmp_path / "wrong").exists()
