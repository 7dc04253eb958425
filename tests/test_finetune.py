"""finetune.py beyond the specification: official files, SQuAD's texts, whole runs, wrong input."""

import json
import math
import random
import re
import shlex
import statistics
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tiktoken
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import data
import finetune
from lib import bow, glue, squad
from lib.files import lock, read_checkpoint
from model import Encoder, EncoderConfig, load
from tests.conftest import WORDS, one_line, refuses, run_train

CFG = EncoderConfig(vocab_size=8192)


def finetune_args(*flags):
    args = finetune.parse_args(["--task", "cola", *map(str, flags)])
    args.device, args.dtype = torch.device("cpu"), torch.float32
    return args


# --------------------------------------------------------------------------------------------------
# Files

# The official columns of each task's train.tsv and dev.tsv; MNLI's dev file has more labels.
OFFICIAL = {
    "cola": None,
    "sst2": "sentence label",
    "qnli": "index question sentence label",
    "mrpc": "Quality|#1 ID|#2 ID|#1 String|#2 String",
    "rte": "index sentence1 sentence2 label",
    "wnli": "index sentence1 sentence2 label",
    "qqp": "id qid1 qid2 question1 question2 is_duplicate",
    "stsb": "index genre filename year old_index source1 source2 sentence1 sentence2 score",
    "mnli": "index promptID pairID genre sentence1_binary_parse sentence2_binary_parse "
    "sentence1_parse sentence2_parse sentence1 sentence2 label1 gold_label",
}


def official_file(name, rows, end="\n", bom=False):
    """Rows of (texts, label as written) -> the bytes of an official file."""
    task = finetune.TASKS[name]
    if name == "cola":
        lines = [f"gj04\t{label}\t\t{text}" for (text,), label in rows]
    else:
        header = OFFICIAL[name].split("|" if "|" in OFFICIAL[name] else None)
        lines = ["\t".join(header)]
        for texts, label in rows:
            cells = {**dict(zip(task.texts, texts)), task.label: label}
            lines.append("\t".join(cells.get(column, "0") for column in header))
    return ("\ufeff" * bom + "".join(line + end for line in lines)).encode()


@pytest.mark.parametrize("name", OFFICIAL)
@pytest.mark.parametrize("end, bom", [("\n", False), ("\r\n", True)])
def test_official_files(tmp_path, name, end, bom):
    """Texts arrive as they are written, with quotes and all that str.splitlines takes for a line
    end."""
    task, file = finetune.TASKS[name], tmp_path / "train.tsv"
    labels = task.classes or ("0", "3.8", "5.000")
    texts = '"', "a\u2028b\x85", "", "it's \\ \x0b\x0c\x1c", "é"
    rows = [((text,) * len(task.texts), label) for text, label in zip(texts, labels * 3)]
    file.write_bytes(official_file(name, rows, end, bom))
    as_label = float if name == "stsb" else task.classes.index
    expected = [(texts, as_label(label)) for texts, label in rows]
    assert glue.read_tsv(task, file) == expected


def squad_json(questions, version="1.1"):
    """[(id, question, context, answers)] -> SQuAD's JSON."""
    paragraphs = []
    for i, q, context, answers in questions:
        answers = [{"text": text, "answer_start": start} for text, start in answers]
        mark = {"is_impossible": not answers} if version == "2.0" else {}
        qas = [{"id": i, "question": q, "answers": answers, **mark}]
        paragraphs.append({"context": context, "qas": qas})
    return json.dumps({"version": version, "data": [{"title": "t", "paragraphs": paragraphs}]})


RTE = "index\tsentence1\tsentence2\tlabel\n"


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("rte", RTE + "0\ta\tb\tmaybe\n", "line 2: label 'maybe' is not one of entailment"),
        ("rte", "sentence1\tlabel\na\tentailment\n", "no column sentence2, only sentence1, label"),
        ("rte", RTE + "0\ta\tb\tentailment\t\n", "line 2: not 4 columns"),
        ("rte", RTE, "has no rows"),
        ("rte", "", "has no rows"),
        ("sst2", "sentence\tlabel\nfine\t1\nbroken\rrow\t1\n", "line 3: not 2 columns"),
        ("stsb", official_file("stsb", [("ab", "nan")]), "score nan is not between 0 and 5"),
        ("sst2", b"sentence\tlabel\n\xff\t1\n", "can't decode byte 0xff"),
        ("squad", "{", "is damaged"),
        ("squad", '{"data": []}', "has no questions"),
        ("squad", '{"data": [{"paragraphs": [{}]}]}', "is damaged or not in SQuAD's format"),
        ("squad", "[]", "is damaged or not in SQuAD's format"),
        ("squad", squad_json([("7", "q", "a b", [("b", 1)])]), "question 7: the context has no"),
    ],
)
def test_malformed_files_are_one_line(tmp_path, name, content, message):
    """A malformed file is refused with a message that names the file and the line or question."""
    task, file = finetune.TASKS[name], tmp_path / "train"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    refuses(f"train.*{re.escape(message)}", task.read, task, file)


def test_test_files_and_missing_ones(tmp_path, capsys):
    """Test files have an index and no label; optional files may be missing, others may not."""
    args = finetune_args("--data_dir", tmp_path)
    for name, header in (
        ("cola", "index\tsentence"),
        ("ax", "index\tsentence1\tsentence2"),
        ("mrpc", "index\t#1 ID\t#2 ID\t#1 String\t#2 String"),
        ("qqp", "id\tquestion1\tquestion2"),
    ):
        task, n = finetune.TASKS[name], header.count("\t")
        lines = [header, *("\t".join([str(i), *["t"] * n]) for i in (0, 1, 7))]
        file = tmp_path / task.folder / ("diagnostic.tsv" if name == "ax" else "test.tsv")
        file.parent.mkdir()
        file.write_text("\n".join(lines))
        [(key, rows)] = glue.read_split(task, name, tmp_path, "test").items()
        assert key == ("AX" if name == "ax" else task.folder)
        assert rows == [(("t",) * len(task.texts), i) for i in (0, 1, 7)]
    mnli, rows = tmp_path / "MNLI", [(('A "b', "C"), 2)]
    mnli.mkdir()
    for file in ("train.tsv", "dev_matched.tsv"):
        (mnli / file).write_bytes(official_file("mnli", [(rows[0][0], "contradiction")]))
    assert finetune.read_task("mnli", args) == (rows, {"mnli": rows})
    assert glue.read_split(finetune.TASKS["mnli"], "mnli", tmp_path, "test") == {}
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == ["mnli-mm", "MNLI-m", "MNLI-mm"]
    assert all("does not exist, left out" in line for line in lines)
    (mnli / "dev_matched.tsv").unlink()
    files = "train.tsv, dev_matched.tsv, dev_mismatched.tsv"
    refuses(f"dev_matched.tsv does not exist; .* {files}$", finetune.read_task, "mnli", args)
    refuses("train.tsv does not exist; .* train.tsv, dev.tsv", finetune.read_task, "rte", args)


def test_hub_rows(monkeypatch):
    """Every task's rows on the hub take the same form as those of the files."""
    import datasets

    tasks, asked = finetune.TASKS, set()
    monkeypatch.setattr(glue, "check_hub", lambda: None)

    def load_dataset(repo, config, split):
        asked.add((repo, config, split))
        if "squad" in repo:
            answers = {"text": ["b"], "answer_start": [2]}
            answers = answers if split == "train" else {"text": [], "answer_start": []}
            return [{"id": "7", "context": "a b", "question": "q", "answers": answers}]
        columns = {c: c.upper() for c in tasks[config].hub or tasks[config].texts}
        return datasets.Dataset.from_list([{**columns, "label": 1, "idx": 5}])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    for name in (*OFFICIAL, "squad", "squad_v2"):
        task = tasks[name]
        train, evaluations = finetune.read_task(name, finetune_args())
        if task.kind == "span":
            assert train == [(("q", "a b"), ["b"], [2], "7")]
            assert evaluations == {name: [(("q", "a b"), [], [], "7")]}
        else:
            texts = tuple(c.upper() for c in task.hub or task.texts)
            assert train == evaluations[name] == [(texts, 1)]
            for rows in glue.read_split(task, name, None, "test").values():
                assert rows == [(texts, 5)]
    glue.read_split(glue.AX, "ax", None, "test")
    repo, v2 = "nyu-mll/glue", "rajpurkar/squad_v2"
    assert {(repo, "ax", "test"), (repo, "mnli", "test_mismatched"), (v2, None, "train")} <= asked
    # The order of the classes and the columns' names, as the hub's data cards have them.
    nli, rte = ("entailment", "neutral", "contradiction"), ("entailment", "not_entailment")
    assert tasks["mnli"].classes == tasks["ax"].classes == nli
    assert tasks["qnli"].classes == tasks["rte"].classes == rte
    assert tasks["mnli"].hub == ("premise", "hypothesis") and tasks["mrpc"].hub == glue.PAIR


def test_squad_files(tmp_path):
    """SQuAD's files may be in their own folder or directly in --data_dir; a question is
    unanswerable only if it is marked so."""
    answers = [("Zoë", 5), ("Zoë.", 5)]
    questions = [("1", "who?", "It's Zoë.", answers), ("2", "no?", "a\u2028b", [])]
    (tmp_path / "squad").mkdir()
    for folder in (tmp_path / "squad", tmp_path):
        for version in ("1.1", "2.0"):
            (folder / f"dev-v{version}.json").write_text(squad_json(questions, version))
    for folder in (tmp_path, tmp_path / "squad"):
        for name, golds in (("squad", None), ("squad_v2", [])):
            [questions] = glue.read_split(finetune.TASKS[name], name, folder, "dev").values()
            assert questions == [
                squad.Question(("who?", "It's Zoë."), ["Zoë", "Zoë."], [5, 5], "1"),
                squad.Question(("no?", "a\u2028b"), golds, [], "2"),
            ]


def test_docs_rows(tmp_path, monkeypatch):
    """Names of libraries are masked as whole words; the rows to score are pre-training's validation
    documents."""
    rows = [["torch", "PyTorch's np.pad"], ["numpy", "See from_numpy"], ["python", "import this"]]
    (tmp_path / "docs.json").write_text(json.dumps({"rows": rows, "every": 50}))
    monkeypatch.setattr(finetune, "prepare", lambda *args: SimpleNamespace(folder=tmp_path))
    train, evaluations = finetune.read_docs("")
    assert train == [(("[MASK]'s [MASK].pad",), 1), (("import this",), 0)]
    assert evaluations == {"docs": [(("See from_numpy",), 2)]}


# --------------------------------------------------------------------------------------------------
# Texts


@pytest.fixture(scope="session")
def tokenizer(corpus):
    return tiktoken.Encoding(**data.encoding_arguments(corpus.tokenizer))


def test_encode_cuts_the_longer_text_first(tokenizer):
    """A pair fits into the length, and spaces around a text take none of it."""
    cfg, short = CFG, tokenizer.encode_ordinary("a dog")
    ids = finetune.encode(("the fox " * 30, " " * 999 + "a dog"), tokenizer, cfg, 20)
    assert len(ids) == 20 and ids[0] == cfg.cls_id and ids[-1] == cfg.sep_id
    assert ids[-1 - len(short) : -1] == short and ids.count(cfg.sep_id) == 2
    swapped = finetune.encode(("a dog", "the fox " * 30), tokenizer, cfg, 20)
    assert len(swapped) == 20 and swapped[1 : 1 + len(short)] == short
    assert finetune.encode(("\na dog ",), tokenizer, cfg, 20) == [cfg.cls_id, *short, cfg.sep_id]
    assert cfg.mask_id in finetune.encode(("a [MASK] b [SEP]",), tokenizer, cfg, 30)


@pytest.mark.parametrize(
    "question, context, answer, label",
    [
        ("who", "the quick fox", "fox", True),
        (" " * 2000 + "who", "the quick fox", "fox", True),
        ("who" + "\n" * 2000, " " * 300 + "the quick fox" + " " * 300, "fox", True),
        ("", "fox", "fox", True),
        ("who", " \tfox\n", "fox", True),
        ("who", "In Zürich 狐 jumps, or a 😀.", "狐", True),
        ("who", "In Zürich 狐 jumps, or a 😀.", "Zürich 狐 jumps", True),
        ("who" * 500, "the quick fox", "fox", True),
        ("who \ud800", "a \ud800 fox \U0001f600", "fox", True),  # a lone surrogate
        ("who", "  fox  ", "  ", False),  # an answer of spaces
        ("who", "fox", "", False),
        ("who", "", None, False),
        ("who", "   ", None, False),
    ],
)
def test_squad_with_odd_texts(tokenizer, question, context, answer, label):
    """Spaces around a question or context take no tokens; a perfect model's spans give the answer,
    cut from the original context."""
    golds = [] if answer is None else [answer]
    q = squad.Question((question, context), golds, [context.find(answer or "")])
    for length in (8, 64):
        rows, windows = zip(*squad.windows(0, q, tokenizer, CFG, length))
        outs, found = [], False
        for (ids, (first, last)), window in zip(rows, windows):
            asked = tokenizer.decode(ids[1 : window.offset - 1])
            assert question.strip().replace("\ud800", "\ufffd").startswith(asked)
            outs.append(np.full((2, len(ids)), -5.0, np.float32))
            if first:
                outs[-1][0, first] = outs[-1][1, last] = 5.0
                found = True
            assert len(ids) <= length and bool(asked) == bool(question)
        [ranked] = squad.rank_answers(outs, windows, with_null=False)
        assert all(text in context for _, text in ranked)
        assert not found or ranked[0] == (10.0, answer)
    assert found == label


def test_no_answer_competes_with_the_lowest_null_score():
    """v2.0 gives no answer if the lowest null score of the windows is above the best span's; v1.1
    always answers."""
    spans = np.array([[0, 1], [1, 2]])
    windows = [squad.Window(0, "ab", spans, 1)] * 2
    for best, text in ((1, ""), (3, "a")):  # the null scores are 8 and 4, the best span has 2 best
        outs = [np.array([[null, best, 0, 0]] * 2, np.float32) for null in (4, 2)]
        [ranked] = squad.rank_answers(outs, windows, with_null=True)
        assert ranked[0][1] == text and (4.0, "") in ranked
        [ranked] = squad.rank_answers(outs, windows, with_null=False)
        assert ranked[0] == (2.0 * best, "a")


def test_heads_compute_in_float32():
    """Under 16-bit autocast the head's outputs are those of float32 arithmetic on the hidden
    states. (In 16 bits 1,500 rows of STS-B had 2 different scores.)"""
    cfg = EncoderConfig(vocab_size=72, n_layer=2, n_head=2, d_model=16, d_ff=32, max_len=12)
    model = finetune.Classifier(Encoder(cfg), "stsb", 12).eval()
    torch.nn.init.normal_(model.head[-1].weight, std=1e-3)
    torch.nn.init.ones_(model.head[-1].bias)
    tokens = torch.randint(0, 64, (200, 7), generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        hidden, out = model.encoder(tokens)[:, 0].float(), model(tokens, None)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out, model.head(hidden).squeeze(-1), rtol=0, atol=1e-7)
    assert len(out.unique()) > 100


# --------------------------------------------------------------------------------------------------
# Runs


@pytest.fixture(scope="session")
def home(corpus_file, cache, tmp_path_factory):
    """A folder with a run (out/run) and official files of tasks that one word decides (glue)."""
    home, rng = tmp_path_factory.mktemp("finetune"), random.Random(0)
    run_train(corpus_file, cache, home / "out" / "run", "--steps", 2, "--block_size", 32)
    folder = home / "glue"
    for name in ("cola", "mnli", "stsb"):
        task = finetune.TASKS[name]
        (folder / task.folder).mkdir(parents=True)
        classes = task.classes[:2] or ("0.5", "4.5")
        sizes = {"train": 320, "dev": 60, "dev_matched": 60, "dev_mismatched": 30}
        for file, n in sizes.items():
            rows = []
            for c in rng.choices((0, 1), (1, 2), k=n):
                word = [("owls", "seven")[c]]
                texts = [" ".join(rng.choices(WORDS[:8], k=4) + word) for _ in task.texts]
                rows.append((texts, classes[c]))
            (folder / task.folder / f"{file}.tsv").write_bytes(official_file(name, rows))
    (folder / "diagnostic").mkdir()
    for file in ("CoLA/test", "MNLI/test_matched", "diagnostic/diagnostic", "STS-B/test"):
        n, header = (1, "index\tsentence") if "CoLA" in file else (2, "index\tsentence1\tsentence2")
        lines = [header, *(f"{i}" + "\tthe quick owls" * n for i in range(5))]
        (folder / f"{file}.tsv").write_text("\n".join(lines) + "\n")
    for version in ("1.1", "2.0"):
        questions = []
        for i in range(24):
            words = rng.choices(WORDS[:8], k=40)
            words[rng.randrange(40)] = "owls"
            context, has_answer = " ".join(words), i % 3 or version == "1.1"
            answers = [("owls", context.index("owls"))] if has_answer else []
            questions.append((str(i), "who", context, answers))
        for split in ("train", "dev"):
            text = squad_json(questions, version)
            (folder / f"{split}-v{version}.json").write_text(text)
    return home


@pytest.fixture
def at_home(home, monkeypatch):
    monkeypatch.chdir(home)
    return home


def run_finetune(out, task, *flags):
    """-> the rows of results.jsonl that this call writes."""
    flags = "--out_dir", out, "--device cpu --dtype float32 --task", task, *flags
    finetune.main(shlex.split(" ".join(map(str, flags))))
    file = Path(out) / "results.jsonl"
    rows = [json.loads(line) for line in open(file)] if file.exists() else []
    file.unlink(missing_ok=True)
    return rows


LEARN = "--data_dir glue --lr 0.01 --epochs 8"
QUICK = "--data_dir glue --lr 0.01 --epochs 1 --limit_train 40"
EVAL = "--data_dir glue --eval_only"


def submitted(file):
    """-> the answers in a file for GLUE, if its form is right."""
    header, *lines = file.read_bytes().decode().split("\n")
    assert header == "index\tprediction" and lines.pop() == ""
    assert [line.split("\t")[0] for line in lines] == list("01234")
    return [line.split("\t")[1] for line in lines]


def test_learn_save_and_score_again(at_home, tmp_path, capsys):
    """A task that one word decides is learned; the best model is saved, scores the same again, and
    ranks its answers by probability."""
    rows = run_finetune(tmp_path, "cola", LEARN, "--lr 0.01 1e-7 --seeds 2 --predict")
    assert [(r["lr"], r["seed"]) for r in rows] == [(0.01, 0), (0.01, 1), (1e-7, 0), (1e-7, 1)]
    first = rows[0]
    keys = "task seed lr metrics majority ckpt seconds recipe epochs n_train batch_size length step"
    assert set(keys.split()) <= first.keys()
    assert all(r["metrics"]["accuracy"] > 0.9 > r["majority"] > 0.5 for r in rows[:2])
    assert first["constant"] == {"matthews": 0.0, "accuracy": first["majority"]}
    assert first["ckpt"] == "out/run" and rows[2]["one_class"]
    out = capsys.readouterr().out
    assert re.search(r"matthews .* 0.01 +2 +0 .*out/run\n", out)
    assert set(submitted(tmp_path / "CoLA.tsv")) == {"0"}  # owls
    (again,) = run_finetune(tmp_path, "cola", EVAL)
    assert again["metrics"] == max((r["metrics"] for r in rows), key=lambda m: m["matthews"])
    assert again["eval_only"] and again["n_train"] == 320
    checkpoint, model = finetune.load_finetuned(tmp_path / "finetuned-cola.pt")
    assert checkpoint["row"] in rows and not model.training
    [[(p, best), (q, _)]] = finetune.rank(model, [squad.Question(("the owls",))])
    assert best == 0 and p > 0.9 and p + q == pytest.approx(1)
    assert load(tmp_path / "finetuned-cola.pt").config.max_len == 32, "it is a checkpoint"


@pytest.mark.slow
def test_all_of_glue(at_home, tmp_path, capsys):
    """`all` takes the tasks that are there, the MNLI model predicts AX, and the files have the form
    that GLUE wants."""
    flags = "--predict --recipe bert --ckpt scratch --lr 0.006 --epochs 16"
    rows = run_finetune(tmp_path, "all", LEARN, flags)
    assert [r["task"] for r in rows] == ["cola", "stsb", "mnli", "mnli-mm"]
    assert rows[1]["metrics"]["pearson"] > 0.5 and rows[1]["majority"] == 0
    assert rows[0]["ckpt"] == f"scratch, shaped like {Path('out/run')}" and rows[0]["step"] == 0
    out = capsys.readouterr().out
    assert "Wang 2021's average: needs sst2, qnli, rte, qqp, mrpc" in out and "MNLI-mm: " in out
    for name, classes in (("CoLA", "01"), ("MNLI-m", glue.NLI), ("AX", glue.NLI)):
        assert set(submitted(tmp_path / f"{name}.tsv")) <= set(classes)
    assert all(0 <= float(value) <= 5 for value in submitted(tmp_path / "STS-B.tsv"))
    assert not (tmp_path / "MNLI-mm.tsv").exists() and not (tmp_path / "SST-2.tsv").exists()
    (tmp_path / "AX.tsv").unlink()
    assert run_finetune(tmp_path, "ax --data_dir glue --ckpt", tmp_path) == []
    assert len(submitted(tmp_path / "AX.tsv")) == 5
    again = run_finetune(tmp_path / "new", "all", EVAL, "--ckpt", tmp_path)  # each task's model
    assert [row["metrics"] for row in again] == [row["metrics"] for row in rows]
    # The MNLI model's encoder under the new head of another task, and its head on its own task.
    start = finetune.read_start(str(tmp_path / "finetuned-mnli.pt"))
    assert start["source"].endswith("(mnli)")
    other, same = (finetune.make_model(start, n, 32).state_dict() for n in ("rte", "mnli"))
    for key, value in start["model"].items():
        assert torch.equal(same[key], value)
        assert torch.equal(other[key], value) or key.startswith("head.")
    assert not torch.equal(other["head.1.weight"], same["head.1.weight"])


@pytest.mark.slow
def test_squad_run(at_home, tmp_path, capsys):
    """v1.1 with contexts longer than the rows; v2.0 with a length beyond max_len."""
    (first,) = run_finetune(tmp_path, "squad", LEARN, "--predict")
    assert first["metrics"]["f1"] >= first["metrics"]["em"] and first["metrics"]["f1"] > 0.3
    answers = json.loads((tmp_path / "squad.json").read_text())
    assert list(answers) == [str(i) for i in range(24)] and all(answers.values())
    golds = [q.golds for q in squad.read_squad(None, "glue/dev-v1.1.json")]
    assert finetune.METRICS["squad"](golds, list(answers.values())) == first["metrics"]
    (second,) = run_finetune(tmp_path, "squad_v2", QUICK, "--length 60")
    assert second["majority"] == pytest.approx(8 / 24) and first["majority"] == 0
    assert "length 60" in capsys.readouterr().out
    checkpoint, model = finetune.load_finetuned(tmp_path / "finetuned-squad_v2.pt")
    assert model.encoder.config.max_len == 60
    key = "encoder.scheme.parts.Absolute.table.weight"
    before = read_checkpoint("out/run")["model"][key]
    table = finetune.make_model(finetune.read_start("out/run"), "cola", 60).state_dict()[key]
    assert len(table) == 61 and torch.equal(table[:32], before[:32])
    [ranked] = finetune.rank(model, [squad.Question(("who", "a"))])
    assert {text for _, text in ranked} == {"", "a"} and sum(p for p, _ in ranked) == pytest.approx(
        1
    )
    (again,) = run_finetune(tmp_path, "squad_v2", EVAL)
    assert again["metrics"] == second["metrics"]


def test_squad_files_without_answers(at_home, tmp_path, capsys):
    """A file whose answers were removed gives predictions and no score, and cannot train."""
    folder = tmp_path / "test"
    folder.mkdir()
    for version in ("1.1", "2.0"):
        text = Path(f"glue/train-v{version}.json").read_text()
        (folder / f"train-v{version}.json").write_text(text)
        text = text.replace('"is_impossible": true', '"is_impossible": false')
        for file in [f"dev-v{version}.json"] + ["train-v2.0.json"] * (version == "2.0"):
            (folder / file).write_text(re.sub(r'"answers": \[.*?\]', '"answers": []', text))
    flags = QUICK.replace("glue", str(folder)), "--predict"
    assert run_finetune(tmp_path, "squad", *flags) == []
    out = capsys.readouterr().out
    assert "squad: no score, 24 questions have no answers" in out and "em" not in out.split()
    assert len(json.loads((tmp_path / "squad.json").read_text())) == 24
    assert run_finetune(tmp_path, "squad", *flags, "--eval_only") == []
    error = one_line(capsys, run_finetune, tmp_path, "squad_v2", *flags)
    assert "the training file has questions without answers" in error


def test_a_start_is_never_overwritten(at_home, tmp_path, capsys):
    """Every way to name the checkpoint is noticed before anything is trained; the same command may
    run again, but not twice at once."""
    run_finetune(tmp_path, "cola", QUICK)
    file = tmp_path / "finetuned-cola.pt"
    first, before = file.stat().st_ino, file.read_bytes()
    (tmp_path / "link.pt").symlink_to(file)
    for task, flags in (("cola", file), ("all", file), ("all", tmp_path / "link.pt")):
        error = one_line(capsys, run_finetune, tmp_path, task, QUICK, "--ckpt", flags)
        assert "would be overwritten: use another --out_dir" in error
        assert file.read_bytes() == before
    with lock(tmp_path, "fine-tuning", ".cola.lock"):
        error = one_line(capsys, run_finetune, tmp_path, "cola", QUICK)
    assert "another process is fine-tuning on cola in" in error
    assert len(run_finetune(tmp_path, "cola", QUICK)) == 1 and file.stat().st_ino != first


def test_scratch_without_a_run(corpus, tmp_path, monkeypatch):
    """Without a run, scratch is the demo's shape with the tokenizer of the docs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(finetune, "prepare", lambda *args: corpus)
    start = finetune.read_start("scratch")
    model = finetune.make_model(start, "cola", 16)
    assert model.encoder.config == EncoderConfig(vocab_size=corpus.vocab_size)
    assert {"tokenizer_hash", "data"} <= start.keys() and start["step"] == 0


@pytest.mark.slow
def test_bag_of_words(at_home, tmp_path):
    """The baseline learns single words; of a pair, which text has a word, and what both have."""
    pytest.importorskip("sklearn")
    (row,) = run_finetune(tmp_path, "cola --data_dir glue --ckpt bow")
    assert row["metrics"]["accuracy"] == 1 and row["ckpt"] == "bow"
    rng, rows = random.Random(0), ([], [])
    for i in range(400):
        a, b = (" ".join(rng.choices(WORDS, k=5)) for _ in range(2))
        rows[0].append(([f"{a} owls", f"{b} foxes"][:: -1 if i % 2 else 1], i % 2))
        new = " ".join(f"{c}{c}{rng.randrange(9)}" for c in rng.sample("abcdefghijkl", 3))
        rows[1].append(((f"{new} {a}", f"{new if i % 2 else new[::-1]} {b}"), i % 2))
    for pairs in rows:
        predictions = bow.bag_of_words(pairs[:300]).predict(pairs[300:])
        assert glue.accuracy([y for _, y in pairs[300:]], predictions) > 0.9


def failing(error):
    def fail(*args, **settings):
        raise error

    return fail


def test_failures_are_one_line_and_release_everything(at_home, tmp_path, monkeypatch, capsys):
    """A loss or gradient that is not finite, a full disk, Ctrl-C: one line, nothing saved, and the
    same process can start again, even while something holds on to the exception."""
    exceptions = []
    for code, message, where, name, what in (
        (1, "not finite", F, "mse_loss", lambda out, y: (out * math.nan).sum()),
        (1, "not finite", F, "mse_loss", lambda out, y: (out - out.detach()).sqrt().sum()),
        (1, "cannot be written", torch, "save", failing(RuntimeError("unexpected pos"))),
        (1, "out of memory", F, "mse_loss", failing(torch.OutOfMemoryError("CUDA"))),
        (130, "interrupted", finetune, "schedule", failing(KeyboardInterrupt())),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(where, name, what)
            with pytest.raises(SystemExit) as caught:
                run_finetune(tmp_path, "stsb", QUICK, "--limit_train 9")  # a single step
        exceptions.append(caught)
        error = capsys.readouterr().err.splitlines()
        assert caught.value.code == code and len(error) == 1 and message in error[0]
        assert not list(tmp_path.glob("finetuned*")) and not list(tmp_path.glob("*.tmp"))
    assert run_finetune(tmp_path, "stsb", QUICK)


class NoFloat64(TorchDispatchMode):
    """Refuses float64 tensors, as Apple's GPUs do."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            assert out.dtype != torch.float64, function
        return out


def test_nothing_on_the_device_is_float64(at_home, tmp_path):
    """Training and prediction need no float64, which Apple's GPUs do not have."""
    for task in ("cola", "stsb", "squad_v2"):
        train, _ = finetune.read_task(task, finetune_args("--data_dir", "glue"))
        args = finetune_args("--epochs", 1)
        model = finetune.make_model(finetune.read_start("out/run"), task, 32)
        rows, _ = finetune.encode_rows(model, train[:20])
        chosen = finetune.settings(args, task, vars(model.encoder.config))
        with NoFloat64():
            finetune.train(model, rows, chosen, 1e-3, 0, args)
            finetune.predict(model, train[:20], torch.float32)


def test_fp16_on_a_cpu(at_home, tmp_path, monkeypatch, capsys):
    """fp16 trains with the gradient scaler, close to float32; a gradient that overflows in every
    step ends the run."""
    (a,) = run_finetune(tmp_path, "cola", LEARN, "--epochs 4")
    (b,) = run_finetune(tmp_path, "cola", LEARN, "--epochs 4 --dtype float16")
    assert abs(a["metrics"]["accuracy"] - b["metrics"]["accuracy"]) < 0.1
    real = F.cross_entropy
    monkeypatch.setattr(F, "cross_entropy", lambda *args: real(*args) * 1e38)
    flags = "--dtype float16 --epochs 6"
    error = one_line(capsys, run_finetune, tmp_path, "cola", QUICK, flags, code=1)
    assert "not finite" in error


@pytest.mark.slow
def test_compiled_finetuning_agrees_with_eager(at_home):
    """With --compile, on padded batches of all lengths and with dropout, the loss decreases as it
    does in eager mode."""
    start, losses = finetune.read_start("out/run"), {}
    start["config"] |= {"dropout": 0.1, "attn_dropout": 0.1, "pe": "tupe_r"}
    start["model"] = {}
    rows = [([*range(4 + i % 5), *[i % 2] * 4], i % 2) for i in range(80)]
    for args in (finetune_args("--epochs", 8), finetune_args("--epochs", 8, "--compile")):
        model = finetune.make_model(start, "cola", 32)
        seen, loss = losses.setdefault(args.compile, []), model.loss
        model.loss = lambda *batch: (seen.append(loss(*batch)), seen[-1])[1]
        finetune.train(model, rows, finetune.settings(args, "cola", start["config"]), 0.01, 0, args)
    eager, compiled = [torch.stack(x).detach() for x in losses.values()]
    assert eager[-4:].mean() < 0.4 and abs((eager - compiled)[:4].max()) < 0.02
    assert len(eager) == len(compiled) and abs((eager - compiled)[-4:].mean()) < 0.15


def test_the_best_learning_rate_counts(capsys):
    """Of several learning rates, the one with the best median (or mean) over seeds is reported."""
    runs, rest = [], dict(ckpt="a", task="cola", seconds=1.0, one_class=False)
    for lr, values in ((1, (0.1, 0.2, 0.9)), (2, (0.3, 0.3, 0.4))):
        for seed, m in enumerate(values):
            scores = dict(metrics={"matthews": m}, constant={"matthews": 0.0})
            runs.append({**rest, "lr": lr, "seed": seed, **scores})
    assert finetune.best_runs(runs, statistics.median) == {("a", "cola"): runs[3:]}
    assert finetune.best_runs(runs, statistics.mean) == {("a", "cola"): runs[:3]}
    finetune.report(runs, finetune_args("--recipe", "tupe"))
    out = capsys.readouterr().out.split()
    row = out[out.index("matthews") :][:9]
    assert row == "matthews 0.300 0.300 0.400 0.058 0.000 2 3 0".split()


@pytest.mark.parametrize(
    "flags, message",
    [
        ("cola --data_dir {tmp}", "has no rows"),
        ("cola --ckpt nowhere", "no checkpoint at nowhere"),
        ("cola --ckpt {tmp}/CoLA/train.tsv", "not a readable checkpoint"),
        ("cola --ckpt {tmp}/broken.pt", "does not fit this model: missing encoder.blocks.0.fc1"),
        ("docs --predict", "no test set"),
        ("cola --eval_only", "no checkpoint at out/run/finetuned-cola.pt"),
        ("cola --eval_only --ckpt nowhere", "no checkpoint at nowhere"),
        ("cola --eval_only --ckpt out/run/ckpt.pt", "not a fine-tuned model"),
        ("cola --eval_only --ckpt {tmp}/finetuned-mnli.pt", "fine-tuned on mnli, not on cola"),
        ("all --ckpt bow", "one classification task"),
        ("cola --ckpt bow --predict", "keeps no model"),
        ("all --data_dir {tmp}/CoLA", "none of GLUE's folders"),
        ("cola --lr 1 0", "must be in (0, 1e9)"),
        ("cola --length 7", "must be in [8, 100000]"),
    ],
)
def test_mistakes_are_one_line(at_home, tmp_path, capsys, monkeypatch, flags, message):
    """Each mistake ends with exit code 2 and a line that says what is wrong."""
    (tmp_path / "CoLA").mkdir()
    (tmp_path / "CoLA" / "train.tsv").write_text("")
    if "broken" in flags:
        checkpoint = read_checkpoint("out/run")
        del checkpoint["model"]["encoder.blocks.0.fc1.weight"]
        torch.save(checkpoint, tmp_path / "broken.pt")
    if "finetuned-mnli" in flags:
        run_finetune(tmp_path, "mnli", QUICK)
        capsys.readouterr()
    flags = f"--data_dir glue --device cpu --task {flags.format(tmp=tmp_path)}".split()
    assert message.format(tmp=tmp_path) in one_line(capsys, finetune.main, flags)
    monkeypatch.setenv("WORLD_SIZE", "2")
    error = one_line(capsys, finetune.main, ["--task", "docs"])
    assert "single process: use python, not torchrun" in error
