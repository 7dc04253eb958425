"""The driver in results/: its tables, its rows, what it prints, and a tiny table end to end."""

import json
import os
import re
import shlex

import pytest

import finetune
import train
from lib.config import RunFailed
from results import run, show
from results.show import without_seed
from tests.conftest import ROOT, TINY, exit_code, one_line, write_corpus
from tools import probe


@pytest.fixture
def data_folders(monkeypatch, tmp_path):
    """TEXT and GLUE are set, and the files of all tasks exist."""
    for name in ("TEXT", "GLUE"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.delenv("BLIMP", raising=False)
    for task in finetune.GLUE.values():
        (tmp_path / task.folder).mkdir()


def test_lines_of_tables_txt():
    """A line of tables.txt expands to one run per choice and seed."""
    tables = run.read_tables(
        "# a comment with | bars | in | it\nPPLM = --n_head 16\n\n"
        "a | x-{abs,sin} | 2 | PPLM --pe {} --init_from out/results/y-sSEED\n"
        "b | y | 0 | PPLM | mnli cola: --seeds 3; docs: --seeds 1 @ .1 1\n"
    )
    assert list(tables["a"]) == ["x-abs-s1337", "x-abs-s1", "x-sin-s1337", "x-sin-s1"]
    flags = "--n_head 16 --pe sin --init_from out/results/y-s1 --seed 1"
    assert tables["a"]["x-sin-s1"] == (flags, "") and tables["b"]["y"][0] == "--n_head 16"
    assert list(run.fine_tunings(tables["b"]["y"][1], 200)) == [
        ("mnli", "--seeds 3", "1", 200),
        ("cola", "--seeds 3", "1", 200),
        ("docs", "--seeds 1", ".1", 20),
        ("docs", "--seeds 1", "1", 200),
    ]


@pytest.mark.slow
def test_tables_and_rows_agree(data_folders):
    """Every command of tables.txt is accepted by its program, and every run that another one is
    initialized from exists. runs.jsonl has every row but those of the papers' tables, made by the
    commands that the tables give today, and contains no path."""
    programs = {"train.py": train, "finetune.py": finetune, "tools.probe": probe}
    rows, parsed = run.all_rows(), set()
    for table, runs in run.TABLES.items():
        for name in runs:
            parts = run.commands(table, name)
            assert table in run.PAPERS or parts.items() <= rows[name]["commands"].items(), name
            for start in re.findall(r"--init_\w+ out/results/(\S+)", parts["train"]):
                run.find(start)
            for command in parts.values():
                command = re.sub(r"--seed \d+|/results/\S+|-m ", "", command)  # seeds aside
                _, program, *flags = shlex.split(command)
                if program in programs and command not in parsed:
                    programs[program].parse_args(flags)
                parsed.add(command)
    for row in rows.values():
        run.find(row["run"])
        assert not re.search(r"/(work|home|tmp|root|mnt)\b", json.dumps(row))


def test_all_tables_are_printed(capsys):
    """Without an argument, every row is printed, with its loss."""
    run.main([])
    lines = capsys.readouterr().out.splitlines()
    for row in run.all_rows().values():
        found = [line for line in lines if line.startswith(f"| {without_seed(row['run'])} ")]
        assert any(f"{show.loss(row):.3f}" in line for line in found)


def test_mistakes_and_failures_are_one_line(capsys, monkeypatch, tmp_path):
    """A mistake is one line; of a command that fails, it is the last line that it printed."""
    monkeypatch.delenv("TEXT", raising=False)
    assert "no table or run nothing" in one_line(capsys, run.main, ["nothing"])
    assert "$TEXT" in one_line(capsys, run.main, ["schemes"])
    with pytest.raises(RunFailed, match="b ended with 3: why$"):
        run.call("python -c \"print('why'); exit(3)\"", tmp_path / "b")


def test_weights_that_are_gone_are_not_replaced(monkeypatch, capsys):
    """A row that lacks a part is left alone if its weights are not there: nothing is trained."""
    monkeypatch.setenv("BLIMP", "x")
    monkeypatch.setattr(run, "call", lambda *args: pytest.fail("a command was run"))
    monkeypatch.setattr(run, "OUT", ROOT / "out" / "nowhere")
    run.make_row("schemes", "none-s1", "")
    assert "none-s1: not done: blimp" in capsys.readouterr().out


@pytest.mark.slow
def test_tiny_table(tmp_path, monkeypatch, capsys):
    """A table of two runs is trained, probed and fine-tuned, the second run from the first one's
    weights and at two of its steps. After an interruption, what is done is not done again."""
    write_corpus(tmp_path / "text.jsonl")
    (tmp_path / "CoLA").mkdir()
    for split in ("train", "dev"):
        text = "x\t1\t\tIt is so.\nx\t0\t*\tSo it is is.\n"
        (tmp_path / "CoLA" / f"{split}.tsv").write_text(text)
    tables = run.read_tables(
        f"TINY = {shlex.join(TINY)} --dataset text.jsonl --steps 6 --keep_every 3\n"
        "tiny | a | 0 | TINY --pe t5\n"
        "tiny | b | 0 | TINY --pe abs --objective mlm+pplm --init_from out/results/a "
        "| cola: --limit_train 2 --epochs 1 @ .5 1\n"
        "docs | docs-{t5,abs} | 3 | TINY --pe {}\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GLUE", str(tmp_path))
    monkeypatch.setattr(run, "ROWS", tmp_path / "runs.jsonl")
    monkeypatch.setattr(run, "TABLES", tables)
    programs = {"train.py": train.main, "tools.probe": probe.main, "finetune.py": finetune.main}

    def drive(name, interrupted=None):
        """-> the exit code, and the programs that were called; Ctrl-C is pressed in one."""
        calls = []

        def call(command, folder):
            _, program, *flags = shlex.split(os.path.expandvars(command).replace("-m ", "", 1))
            calls.append(program)
            if program == interrupted:
                raise KeyboardInterrupt
            programs[program](flags)

        monkeypatch.setattr(run, "call", call)
        return exit_code(run.main, [name]), calls

    calls = ["train.py", "train.py", "tools.probe", "finetune.py"]
    assert drive("b", interrupted="finetune.py") == (130, calls)
    assert not run.ROWS.exists()
    assert drive("b") == (None, ["finetune.py", "finetune.py"])
    [row] = run.read_jsonl(run.ROWS)
    assert row["run"] == "b" and list(row["commands"]) == ["train", "probe", "cola at .5", "cola"]
    assert {"cola matthews", "cola matthews at 0.5"} <= row["scores"].keys()
    log = run.read_jsonl("out/results/b/log.jsonl")
    assert row["val_loss"] == log[-1]["val_loss"] and row["baselines"] == log[0]["baselines"]
    assert row["words"]["random"] > 0 and len(row["ranges"]) == len(run.RANGES)
    assert drive("tiny") == (None, ["tools.probe"])  # a is trained already
    assert "| b at 0.5 " in capsys.readouterr().out
    assert drive("tiny") == (None, [])

    # `first` trains a class's own runs of the table docs, and prints them beside our rows
    row = next(
        row for row in run.read_jsonl(ROOT / "results/runs.jsonl") if "docs-t5-" in row["run"]
    )
    run.ROWS.write_text(json.dumps(row) + "\n")
    assert drive("first") == (None, ["train.py", "train.py", "tools.probe"])
    table = capsys.readouterr().out.rpartition("| scheme")[2]
    for pe in ("t5", "abs"):
        loss = run.read_jsonl(f"out/first/docs-{pe}-s1337/log.jsonl")[-1]["val_loss"]
        assert re.search(rf"{pe} +\| {loss:.3f}", table)
    assert f"{row['val_loss']:.3f}" in table
