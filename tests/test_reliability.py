"""Training under bad conditions: kills, signals, full disks, damaged files, several processes,
overflows, wrong input."""

import contextlib
import json
import math
import os
import shlex
import shutil
import signal
import subprocess
import sys

import pytest
import torch

import objectives
import train
from lib import bpe
from lib.files import lock
from test_all import let_overflow
from tests.conftest import (
    ROOT,
    exit_code,
    log_of,
    one_line,
    refuses,
    train_flags,
    weights,
    write_corpus,
)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk(run, capsys):
    """A full disk is one line; the last checkpoint stays readable, and the run can be resumed."""
    folder = run("run", "--steps 6 --keep_every 3")
    os.replace(folder / "ckpt_3.pt", folder / "ckpt.pt")
    (folder / "ckpt.pt.tmp").symlink_to("/dev/full")
    error = one_line(capsys, run, "run", "--steps 6 --resume", code=1)
    assert f"{folder}/ckpt.pt" in error and weights(folder)["step"] == 3
    assert weights(run("run", "--steps 6 --resume"))["step"] == 6


def test_damaged_and_busy_folders(run, capsys):
    """A checkpoint that cannot be read or is something else is one line, for every use of it; so is
    a folder in which another run trains."""
    folder = run("run", "--steps 3")
    good, file = (folder / "ckpt.pt").read_bytes(), folder / "ckpt.pt"
    torch.save({"some": "dictionary"}, folder / "other.pt")
    for content in (good[: len(good) // 2], (folder / "other.pt").read_bytes()):
        file.write_bytes(content)
        refuses("ckpt.pt is not a (readable )?checkpoint", objectives.load, folder)
        for name, flags in (("run", "--resume"), ("new", f"--init_from {folder}")):
            assert "ckpt.pt is not a" in one_line(capsys, run, name, f"--steps 3 {flags}")
    file.write_bytes(good)
    with lock(folder):
        error = one_line(capsys, run, "run", "--steps 3 --resume")
    assert "another process is training in" in error


def test_a_gradient_that_is_not_finite(run, tmp_path, monkeypatch, capsys):
    """A single gradient that is not finite ends the run at the next log line, and nothing is saved:
    it leaves a weight that may not be used again soon."""
    clip, norms = torch.nn.utils.clip_grad_norm_, iter([1, 1, math.nan, 1, 1])
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", lambda *a: clip(*a) * next(norms))
    flags = "--steps 30 --log_every 5 --eval_every 5 --dtype float32"
    assert "not finite by step 5" in one_line(capsys, run, "run", flags, code=1)
    assert not (tmp_path / "run" / "ckpt.pt").exists()


@pytest.mark.parametrize("log_every", [1, 40])
@pytest.mark.parametrize("n_skipped", [16, 99])
def test_fp16_ends_by_its_scale(run, monkeypatch, capsys, n_skipped, log_every):
    """In fp16, a run ends if its scale falls below 1, from 65,536 after 17 skipped steps, however
    often it is logged."""
    let_overflow(monkeypatch, range(2, 2 + n_skipped))
    flags = f"--steps 40 --log_every {log_every} --dtype float16"
    code = exit_code(run, "run", flags)
    assert code == (None if n_skipped <= 16 else 1), capsys.readouterr()


@pytest.mark.slow
@pytest.mark.parametrize("pe", ["abs+t5", "deberta", "lsin+rel", "rope", "tupe_r"])
def test_fp16_agrees_with_float32(run, pe):
    """Schemes of every kind train in fp16, with accumulation, as it does in float32."""
    flags = f"--pe {pe} --objective mlm+pplm --steps 5 --log_every 1 --grad_accum 2 --dtype"
    a, b = (log_of(run(dtype, f"{flags} {dtype}")) for dtype in ("float32", "float16"))
    for x, y in zip(a[1:], b[1:], strict=True):
        assert x["loss"] == pytest.approx(y["loss"], abs=0.01)


def torchrun(*command):
    """Run `command` in two processes -> CompletedProcess with text output."""
    launcher = "-m torch.distributed.run --standalone --nproc_per_node 2".split()
    command = [sys.executable, *launcher, *map(str, command)]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)


KILLED = """import os, signal, train
schedule, me = train.schedule, os.getpid()
kill = lambda step: step == 3 and os.environ["RANK"] == "1" and os.kill(me, signal.SIGKILL)
train.schedule = lambda step, *args: kill(step) or schedule(step, *args)
train.main()"""


@pytest.mark.slow
def test_two_processes(corpus_file, cache, tmp_path, run):
    """Two processes have the losses and the weights of one with twice the accumulation, even if one
    of them is killed and the run is resumed. They end, however they end (gloo's destructors can
    hang): finished, with a user's mistake, or with a loss that is not finite."""
    flags = "--steps 4 --eval_every 2 --dropout .1 --dtype float32 --objective nsp+taco+pplm"
    one, two = run("one", f"{flags} --pe rel --grad_accum 4"), tmp_path / "two"
    flags = train_flags(corpus_file, cache, two, *shlex.split(f"{flags} --pe rel --grad_accum 2"))
    (tmp_path / "killed.py").write_text(KILLED)
    assert torchrun(tmp_path / "killed.py", *flags).returncode and weights(two)["step"] == 2
    ended = torchrun("train.py", *flags, "--resume")
    assert ended.returncode == 0 and "warn" not in ended.stderr.lower(), ended.stderr
    a, b = (weights(folder)["model"] for folder in (one, two))
    torch.testing.assert_close(a, b, rtol=0, atol=1e-6)
    a, b = log_of(one)[-1], log_of(two)[-1]
    for key in ("loss", "val_loss", "nsp", "mlm", "tc", "pplm"):
        assert a[key] == pytest.approx(b[key], abs=1e-5)
    for more, message in (
        ("--dataset nowhere/*.txt", "nowhere"),
        ("--lr 9e8 --steps 40 --log_every 1", "not finite by step"),
    ):
        ended = torchrun("train.py", *flags, "--out_dir", tmp_path / "new", *more.split())
        assert ended.returncode and message in ended.stderr
        assert 'train.py", line' not in ended.stderr  # a traceback of ours


class FakeDDP(torch.nn.Module):
    """Records for each micro-batch of training whether gradients would be synchronized, and the
    seed of its dropout masks."""

    def __init__(self, module, **_):
        super().__init__()
        self.module, self.syncing, FakeDDP.seen = module, True, []

    @contextlib.contextmanager
    def no_sync(self):
        self.syncing = False
        yield
        self.syncing = True

    def forward(self, batch):
        loss, scalars = self.module(batch)
        self.seen.append((batch["key"], self.syncing, torch.initial_seed(), loss.item()))
        return loss, scalars


def test_one_of_two_processes(run, tmp_path, monkeypatch):
    """It takes every second micro-batch, with dropout masks of its own; gradients are synchronized
    in the last one of a step; the log has the mean of both processes (here, they are equal)."""
    corrupt = objectives.Pretraining.corrupt
    with_key = lambda model, tokens, *key: corrupt(model, tokens, *key) | {"key": key}  # noqa: E731
    monkeypatch.setattr(objectives.Pretraining, "corrupt", with_key)
    monkeypatch.setattr(train, "DistributedDataParallel", FakeDDP)
    for name in ("init_process_group", "barrier"):
        monkeypatch.setattr(train.dist, name, lambda *args, **settings: None)
    monkeypatch.setattr(train.dist, "all_reduce", lambda means: means.mul_(2))
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    flags = "--steps 2 --log_every 2 --grad_accum 2 --dtype float32 --seed 5"
    assert exit_code(run, "two", flags) == 0
    keys, syncing, seeds, losses = zip(*FakeDDP.seen)
    assert keys == ((5, 0, 0), (5, 0, 2), (5, 1, 0), (5, 1, 2))
    assert syncing == (False, True) * 2
    assert seeds == tuple(objectives.hash_seed(*key, "dropout") for key in keys)
    assert log_of(tmp_path / "two")[-1]["loss"] == pytest.approx(sum(losses) / 4)


def test_resume_needs_the_state_of_training(run, capsys):
    """A checkpoint without it, such as a copy for a page or a fine-tuned model, is refused."""
    folder = run("run", "--steps 3")
    whole = weights(folder)
    for keys, message in (
        ({"optimizer", "scaler"}, "no state of training"),
        ({"identity", "args"}, "no state of training"),
        ({"optimizer"}, "no state of training"),
        ({"step"}, "not a checkpoint of this project"),  # finetune.py needs it after training
    ):
        part = {key: value for key, value in whole.items() if key not in keys}
        torch.save(part, folder / "ckpt.pt")
        assert message in one_line(capsys, run, "run", "--steps 3 --resume")


def test_resume_refuses_another_tokenizer(run, corpus, tmp_path, capsys):
    """A run is tied to its tokenizer, even if the token ids are the same."""
    folder = tmp_path / corpus.folder.name
    shutil.copytree(corpus.folder, folder)
    flags = f"--steps 3 --dataset {folder}"
    checkpoint = run("run", flags) / "ckpt.pt"
    older = torch.load(checkpoint, weights_only=True)  # its identity was without the tokenizer
    del older["identity"]["the tokenizer"]
    torch.save(older, checkpoint)
    assert exit_code(run, "run", f"{flags} --resume") is None
    ranks = [token.encode("latin-1") for token in corpus.tokenizer["ranks"]]
    ranks[300:302] = reversed(ranks[300:302])
    state = bpe.tokenizer_state("bpe", corpus.tokenizer["pattern"], ranks)
    (folder / "tokenizer.json").write_text(json.dumps(state))
    (folder / "meta.json").write_text(json.dumps(corpus.meta | {"tokenizer_hash": state["hash"]}))
    assert "the tokenizer was" in one_line(capsys, run, "run", f"{flags} --resume")


def test_resume_refuses_another_text(run, tmp_path, capsys):
    """A run is tied to the tokens of its text, even if another one has as many."""
    rows = [json.dumps({"text": f"fox {i} " * 40}) + "\n" for i in range(100, 160)]
    file, flags = tmp_path / "text.jsonl", f"--steps 3 --dataset {tmp_path}/text.jsonl"
    file.write_text("".join(rows))
    run("run", flags)
    file.write_text("".join(reversed(rows)))  # the same vocabulary and number of tokens
    assert "the text was" in one_line(capsys, run, "run", f"{flags} --resume")


@pytest.mark.slow
def test_an_output_that_is_gone_does_not_end_a_run(corpus_file, cache, tmp_path):
    """A closed pipe for standard output or error loses what is printed, and nothing else."""
    flags = train_flags(corpus_file, cache, tmp_path / "run", "--steps", 60, "--log_every", 1)
    command = [sys.executable, "train.py", *flags]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.readline()
    process.stdout.close()
    process.stderr.close()
    assert process.wait() == 0
    assert weights(tmp_path / "run")["step"] == 60 and len(log_of(tmp_path / "run")) == 61


@pytest.mark.parametrize("name", ["SIGHUP", "SIGTERM", "SIGINT"])
def test_signals(run, tmp_path, monkeypatch, capsys, name):
    """SIGHUP (a closed terminal), SIGTERM and Ctrl-C save and stop; where they are ignored (nohup),
    they stay ignored. Afterwards, as a notebook needs, everything is as before."""
    number, schedule = getattr(signal, name), train.schedule

    def kill_at_step_3(step, *args):
        if step == 3:
            os.kill(os.getpid(), number)
        return schedule(step, *args)

    monkeypatch.setattr(train, "schedule", kill_at_step_3)
    before = signal.signal(number, signal.SIG_DFL)  # it may be ignored where the tests run
    try:
        assert exit_code(run, "run", "--steps 9") == 128 + number
        assert weights(tmp_path / "run")["step"] == 4
        assert signal.getsignal(number) == signal.SIG_DFL
        signal.signal(number, signal.SIG_IGN)
        assert exit_code(run, "ignored", "--steps 5") is None
    finally:
        signal.signal(number, before)
    assert weights(tmp_path / "ignored")["step"] == 5


# What Windows does not have, or does not allow, is removed; then programs are run.
WINDOWS = """import importlib, os, signal, sys
import datasets, filelock, torch  # they may use what is removed
for name in ("resource", "fcntl", "pwd", "grp", "termios"):
    sys.modules[name] = None  # an import of it raises ModuleNotFoundError
there = "SIG_DFL SIG_IGN SIGABRT SIGFPE SIGILL SIGINT SIGSEGV SIGTERM".split()
for name in [name for name in vars(signal) if name.startswith("SIG") and name not in there]:
    delattr(signal, name)
replace = os.replace

def replace_closed(*files):
    opened = {os.path.realpath(f"/proc/self/fd/{n}") for n in os.listdir("/proc/self/fd")}
    assert not opened & {os.path.realpath(file) for file in files}
    replace(*files)

os.replace = replace_closed
for command in sys.argv[1:]:
    program, *flags = command.split("|")
    try:
        importlib.import_module(program).main(flags)
    except SystemExit as end:
        assert not end.code, command
"""


@pytest.mark.slow
def test_without_what_windows_lacks(cache, tmp_path):
    """Every program prints its help, and a model is trained, fine-tuned and probed without the
    modules and signals that Windows lacks, without replacing an open file, in a console that cannot
    print every character, and where files are not UTF-8 unless it is said."""
    files = [file for file in ROOT.glob("*/*.py") if "def main(argv" in file.read_text()]
    names = [f"{file.parent.name}.{file.stem}" for file in files if file.parent.name != "tests"]
    commands = [f"{name}|--help" for name in ["train", "finetune", "data", *names]]
    file, out, text = write_corpus(tmp_path / "text.jsonl"), tmp_path / "out", tmp_path / "lines"
    flags = train_flags(
        file, cache, out, "--steps", 6, "--keep_every", 3, "--objective", "mlm+pplm"
    )
    text.write_text("na\u00efve \u6f22 owls\n", encoding="utf-8")
    (tmp_path / "CoLA").mkdir()
    for split in ("train", "dev"):
        rows = "x\t1\t\tIt is \u6f22.\nx\t0\t*\tSo it is is.\n"
        (tmp_path / "CoLA" / f"{split}.tsv").write_text(rows, encoding="utf-8")
    tune = f"--task cola --data_dir {tmp_path} --ckpt {out} --epochs 1 --limit_train 2".split()
    commands += ["|".join(["train", *flags]), "|".join(["finetune", *tune])]
    commands += [f"tools.probe|--ckpt|{out}", f"results.restore|{out}|--text|{text}"]
    env = {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LC_ALL": "C"}
    env |= {"PYTHONIOENCODING": "cp1252", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", WINDOWS, *commands]
    ended = subprocess.run(command, env=os.environ | env, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert log_of(out)[-1]["peak_mem_mb"] == 0 and (out / "finetuned-cola.pt").exists()


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_compiled_training_with_dropout(run):
    """Compiled training with dropout learns as eager training does, and the same seed gives the
    same losses again."""
    flags = "--pe tupe_r --objective mlm+pplm --dropout .1 --steps 40 --lr 0.01 --log_every 1"
    logs = []
    for name, compile in (("eager", "--no-compile"), ("once", "--compile"), ("twice", "--compile")):
        torch._dynamo.reset()
        rows = log_of(run(name, f"{flags} --dtype float32 {compile}"))[1:]
        logs.append([row["loss"] for row in rows])
    eager, compiled, again = logs
    assert compiled == again
    assert compiled[0] == pytest.approx(eager[0], abs=0.1)  # with other dropout masks
    assert sum(compiled[-10:]) / 10 == pytest.approx(sum(eager[-10:]) / 10, abs=0.1)
    assert compiled[-1] < compiled[0] - 1


# Flags, and a part of the one line that says what is wrong.
EARLY_MISTAKES = {  # found before data is prepared, which may take hours
    "--pe foo": "tupe_r",
    "--pe rope+tupe_r": "tupe_r cannot be part of a sum",
    "--pe rope --d_model 10": "--pe rope needs an even d_head",
    "--pe rope --objective pmlm": "rope",
    "--n_head 3": "d_model 16 is not a multiple of n_head 3",
    "--objective foo": "pplm",
    "--objective mlm+taco": "at most one token objective",
    "--objective clm+pplm": "clm is causal",
    "--objective tc --batch_size 1": "--batch_size 2",
    "--objective tc --tc_on masked": "--tc_on masked needs mlm",
    "--objective pplm --whole_word": "--whole_word needs mlm",
    "--objective tc --tc_window 4": "must be odd",
    "--norm around": "norm is 'around'; choose from post, pre",
    "--objective pplm --pair_layer first": "choose from extra, last",
    "--seed -1": "argument --seed: -1 is not in [0, 9e18]",
    "--objective taco --loss_weights 1": "mlm+tc needs 2 numbers",
    "--objective pplm --pos_rate .05": "selects fewer than 2",
    "--dropout 1": "argument --dropout: 1 is not in [0, 1)",
    "--step 3": "unrecognized arguments: --step",
    "--lr nan": "argument --lr: nan is not in (0, 1e9)",
    "--init_from nowhere": "no checkpoint at nowhere",
}
MISTAKES = {
    "--dataset no/such/*.jsonl": "no/such",
    "--block_size 4000": "a smaller --block_size",
    "--init_from {run} --d_model 32": "d_model is 16 there, 32 here",
    "--init_embeddings {run} --d_model 32": "--init_embeddings does not fit",
}


def test_wrong_input_is_one_line(run, tmp_path, monkeypatch, capsys):
    """Wrong input is one line that says what is allowed, with exit code 2; nothing is written."""
    folder = run("run", "--steps 1")
    for flags, message in {**MISTAKES, **EARLY_MISTAKES}.items():
        if flags in EARLY_MISTAKES:
            monkeypatch.setattr(train, "prepare", lambda *args: pytest.fail("too late"))
        error = one_line(capsys, run, "wrong", flags.format(run=folder))
        assert error.startswith("error: ") and message in error, (flags, error)
        assert not (tmp_path / "wrong").exists()
    assert exit_code(train.main, ["--help"]) == 0
