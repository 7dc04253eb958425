"""The driver in results/: its tables, its rows, what it prints, and a tiny table end to end."""

import json
import os
import re
import shlex

import numpy as np
import pytest

import finetune
import train
from lib.config import RunFailed
from results import run, show
from results.show import without_seed
from tests.conftest import ROOT, TINY, exit_code, one_line, refuses, write_corpus
from tools import blimp, lengths, probe


@pytest.fixture
def data_folders(monkeypatch, tmp_path):
    """TEXT and GLUE are set, and the files of all tasks exist."""
    for name in ("TEXT", "GLUE"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.delenv("BLIMP", raising=False)
    for task in finetune.GLUE.values():
        (tmp_path / task.folder).mkdir()
    return monkeypatch


def test_lines_of_tables_txt():
    """A line of tables.txt expands to one run per choice and seed."""
    tables = run.read_tables(
        "# a comment with | bars | in | it\nPPLM = --n_head 16\n\n"
        "a | x-{abs,sin} | 2 | PPLM --pe {} --init_from out/results/y-sSEED\n"
        "b | y | 0 | PPLM | mnli cola: --seeds 3; docs: --seeds 1 @ .1 1\n"
    )
    assert list(tables["a"]) == ["x-abs-s1337", "x-abs-s1", "x-sin-s1337", "x-sin-s1"]
    flags = "--n_head 16 --pe sin --init_from out/results/y-s1 --seed 1"
    assert tables["a"]["x-sin-s1"] == (flags, "")
    assert tables["b"]["y"][0] == "--n_head 16"
    assert list(run.fine_tunings(tables["b"]["y"][1], 200)) == [
        ("mnli", "--seeds 3", "1", 200),
        ("cola", "--seeds 3", "1", 200),
        ("docs", "--seeds 1", ".1", 20),
        ("docs", "--seeds 1", "1", 200),
    ]


@pytest.mark.slow
def test_all_commands_are_legal(data_folders):
    """Every command of every table is accepted by its program, and every run that another one is
    initialized from exists."""
    data_folders.setenv("BLIMP", "x")
    checked = {"train.py": train.parse_args, "finetune.py": finetune.parse_args}
    checked |= {"tools.probe": probe.parse_args}
    parsed = set()
    for table, runs in run.TABLES.items():
        for name in runs:
            parts = run.commands(table, name)
            for start in re.findall(r"--init_\w+ out/results/(\S+)", parts["train"]):
                run.find(start)
            for command in parts.values():
                _, *words = shlex.split(re.sub(r"--seed \d+|/results/\S+", "", command))
                program, *flags = words[1:] if words[0] == "-m" else words
                if program in checked and (program, *flags) not in parsed:  # seeds aside
                    checked[program](flags)
                parsed.add((program, *flags))
    assert {program for program, *_ in parsed} == {*checked, "tools.lengths", "tools.blimp"}
    assert lengths.parse_lengths("128,256,512") == [128, 256, 512] and blimp.main


def test_no_row_is_missing(data_folders):
    """runs.jsonl has everything that the tables ask for, except for the papers' tables, and every
    row was made by the commands that the tables give today. No row contains a path."""
    rows = run.all_rows()
    for table in run.TABLES.keys() - run.PAPERS:
        for name in run.TABLES[table]:
            assert not run.missing(table, name, rows.get(name)), (table, name)
            for part, command in run.commands(table, name).items():
                assert rows[name]["commands"][part] == command
    assert len(rows) == len(run.read_jsonl(run.ROWS)) > 300
    for row in rows.values():
        run.find(row["run"])
        assert not re.search(r"/(work|home|tmp|root|mnt)\b", json.dumps(row))


def test_all_tables_are_printed(capsys):
    """Without an argument, every row is printed, with its loss."""
    run.main([])
    out = capsys.readouterr().out
    for row in run.all_rows().values():
        lines = [x for x in out.splitlines() if x.startswith(f"| {without_seed(row['run'])} ")]
        assert any(f"{show.loss(row):.3f}" in line for line in lines)
    assert "| tupe_r-mlm-3540 " in out.partition("## taco")[2]


def test_unknown_names_and_missing_data_are_one_line(capsys, monkeypatch):
    """A mistake is one line with exit code 2."""
    monkeypatch.delenv("TEXT", raising=False)
    assert "no table or run nothing" in one_line(capsys, run.main, ["nothing"])
    assert "$TEXT" in one_line(capsys, run.main, ["schemes"])
    refuses("no run x", run.find, "x")


def test_weights_that_are_gone_are_not_replaced(monkeypatch, capsys):
    """A row that lacks a part is left alone if its weights are not there: nothing is trained, and
    the row says so."""
    monkeypatch.setenv("BLIMP", "x")
    monkeypatch.setattr(run, "call", lambda *args: pytest.fail("a command was run"))
    monkeypatch.setattr(run, "OUT", ROOT / "out" / "nowhere")
    run.make_row("schemes", "none-s1", "")
    assert "none-s1: not done: blimp" in capsys.readouterr().out


def test_correlations_over_schemes():
    """Wang 2021's table 5: Pearson's r of the schemes' means, without `none`, and that of ranks."""
    rng, rows = np.random.default_rng(0), []
    for pe in ("none", "abs", "abs", "sin", "t5", "rel", "rope"):
        aiv, sd, opr, db, loss = rng.random(5)
        row = {"args": {"pe": pe}, "indicators": {"aiv": aiv, "sd": sd}, "val_loss": 5 + loss}
        rows.append(row | {"ranges": [[20, opr, db]]})
    rows[-1]["val_loss"] = 7  # has not learned order
    line = {line["violated"]: line for line in show.correlations(rows)}["opr 20"]
    x = np.array([row["ranges"][0][1] for row in rows])
    y = -np.array([row["val_loss"] for row in rows])
    x, y = [np.array([z[1:3].mean(), *z[3:]]) for z in (x, y)]
    assert line["r of 5"].startswith(f"{np.corrcoef(x, y)[0, 1]:.2f} (")
    assert line["r of 4"].startswith(f"{np.corrcoef(x[:4], y[:4])[0, 1]:.2f} (")
    ranks = [z.argsort().argsort() for z in (x, y)]
    assert line["ranks of 5"] == f"{np.corrcoef(*ranks)[0, 1]:.2f}"


def test_a_failed_command_is_one_line(tmp_path):
    """A command runs in this Python; if it fails, the last line that it printed is the message."""
    run.call("python -c \"print('fine')\"", tmp_path / "a")
    assert (tmp_path / "a" / "run.log").read_text() == "fine\n"
    with pytest.raises(RunFailed, match="b ended with 3: why$"):
        run.call("python -c \"print('why'); exit(3)\"", tmp_path / "b")


@pytest.fixture
def drive(tmp_path, monkeypatch):
    """drive(tables, names, interrupted) runs the driver in an empty folder, with the programs in
    this process -> its exit code, and the programs that it called. `interrupted` is one at which
    Ctrl-C is pressed."""
    write_corpus(tmp_path / "text.jsonl")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run, "ROWS", tmp_path / "runs.jsonl")
    programs = {"train.py": train.main, "tools.probe": probe.main, "finetune.py": finetune.main}

    def drive(tables, *names, interrupted=None):
        def call(command, folder):
            program, *flags = shlex.split(os.path.expandvars(command).replace("-m ", "", 1))[1:]
            calls.append(program)
            if program == interrupted:
                raise KeyboardInterrupt
            programs[program](flags)

        calls = []
        abbreviation = f"TINY = {shlex.join(TINY)} --dataset text.jsonl --steps 6 --keep_every 3\n"
        monkeypatch.setattr(run, "call", call)
        monkeypatch.setattr(run, "TABLES", run.read_tables(abbreviation + tables))
        return exit_code(run.main, names), calls

    return drive


@pytest.mark.slow
def test_tiny_table(drive, tmp_path, monkeypatch, capsys):
    """A table of two runs is trained, probed and fine-tuned, the second run from the first one's
    weights and at two of its steps. After an interruption, what is done is not done again."""
    (tmp_path / "CoLA").mkdir()
    for split in ("train", "dev"):
        text = "x\t1\t\tIt is so.\nx\t0\t*\tSo it is is.\n"
        (tmp_path / "CoLA" / f"{split}.tsv").write_text(text)
    monkeypatch.setenv("GLUE", str(tmp_path))
    tables = (
        "tiny | a | 0 | TINY --pe t5\n"
        "tiny | b | 0 | TINY --pe abs --objective mlm+pplm --init_from out/results/a "
        "| cola: --limit_train 2 --epochs 1 @ .5 1\n"
    )
    code, calls = drive(tables, "b", interrupted="finetune.py")
    assert code == 130 and calls == ["train.py", "train.py", "tools.probe", "finetune.py"]
    assert not run.ROWS.exists()
    assert drive(tables, "b") == (None, ["finetune.py", "finetune.py"])
    [row] = run.read_jsonl(run.ROWS)
    assert row["run"] == "b" and list(row["commands"]) == ["train", "probe", "cola at .5", "cola"]
    metrics = {f"cola {name}" for name in ("matthews", "accuracy")}
    assert set(row["scores"]) == metrics | {f"{name} at 0.5" for name in metrics}
    log = run.read_jsonl("out/results/b/log.jsonl")
    assert row["val_loss"] == log[-1]["val_loss"] and row["val_mlm"] == log[-1]["val_mlm"]
    assert row["baselines"] == log[0]["baselines"] and row["words"]["random"] > 0
    assert len(row["ranges"]) == len(run.RANGES) and row["args"]["pe"] == "abs"

    capsys.readouterr()
    assert drive(tables, "tiny") == (None, ["tools.probe"])  # a is trained already
    assert "| b at 0.5 " in capsys.readouterr().out
    assert drive(tables, "tiny") == (None, [])
    assert {row["run"] for row in run.read_jsonl(run.ROWS)} == {"a", "b"}


@pytest.mark.slow
def test_first(drive, capsys):
    """`first` trains a class's own runs in out/first, and prints them beside our rows."""
    rows = run.read_jsonl(ROOT / "results" / "runs.jsonl")
    ours = next(row for row in rows if row["run"] == "docs-t5-s1337")
    run.ROWS.write_text(json.dumps(ours) + "\n")
    code, calls = drive("docs | docs-{t5,abs} | 3 | TINY --pe {}\n", "first")
    assert not code and calls == ["train.py", "train.py", "tools.probe"]
    table = capsys.readouterr().out.rpartition("| scheme")[2]
    for pe in ("t5", "abs"):
        loss = run.read_jsonl(f"out/first/docs-{pe}-s1337/log.jsonl")[-1]["val_loss"]
        assert re.search(rf"{pe} +\| {loss:.3f}", table)
    assert f"{ours['val_loss']:.3f}" in table
