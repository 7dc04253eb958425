"""finetune.py beyond the specification: official files, SQuAD's texts, whole runs, wrong input."""

import json
import math
import random
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
from test_all import finetune_args
from tests.conftest import WORDS, one_line, refuses, run_train

CFG = EncoderConfig(vocab_size=8192)

# --------------------------------------------------------------------------------------------------
# Files

# The official columns of each task's train.tsv and dev.tsv; MNLI's dev file has more labels.
OFFICIAL = {
    "cola": "source label mark sentence",  # without this line
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


def official_file(name, rows):
    """Rows of (texts, label as written) -> the text of an official file."""
    task, header = finetune.TASKS[name], OFFICIAL[name].split("|" if name == "mrpc" else None)
    lines = [] if name == "cola" else [header]
    for texts, label in rows:
        cells = {**dict(zip(task.texts, texts)), task.label: label}
        lines.append([cells.get(column, "0") for column in header])
    return "".join("\t".join(line) + "\n" for line in lines)


def squad_json(questions, version="1.1"):
    """[(id, question, context, answers)] -> SQuAD's JSON."""
    paragraphs = []
    for i, q, context, answers in questions:
        answers = [{"text": text, "answer_start": start} for text, start in answers]
        mark = {"is_impossible": not answers} if version == "2.0" else {}
        qas = [{"id": i, "question": q, "answers": answers, **mark}]
        paragraphs.append({"context": context, "qas": qas})
    return json.dumps({"version": version, "data": [{"title": "t", "paragraphs": paragraphs}]})


@pytest.mark.parametrize("name", OFFICIAL)
@pytest.mark.parametrize("end, bom", [("\n", ""), ("\r\n", "\ufeff")])
def test_official_files(tmp_path, name, end, bom):
    """Texts arrive as they are written, with quotes and all that str.splitlines takes for a line
    end."""
    task, file = finetune.TASKS[name], tmp_path / "train.tsv"
    labels = task.classes or ("0", "3.8", "5.000")
    texts = '"', "a\u2028b\x85", "", "it's \\ \x0b\x0c\x1c", "é"
    rows = [((text,) * len(task.texts), label) for text, label in zip(texts, labels * 3)]
    file.write_bytes((bom + official_file(name, rows).replace("\n", end)).encode())
    as_label = float if name == "stsb" else task.classes.index
    assert glue.read_tsv(task, file) == [(texts, as_label(label)) for texts, label in rows]


RTE = "sentence1\tsentence2\tlabel\n"


# fmt: off
@pytest.mark.parametrize("name, content, message", [
    ("rte", RTE + "a\tb\tmaybe\n", "line 2: label 'maybe'"),
    ("rte", "sentence1\tlabel\na\tentailment\n", "no column sentence2"),
    ("rte", RTE + "a\tb\tc\tentailment\n", "line 2: not 3 columns"),
    ("rte", RTE + "a\tb\tentailment\nbroken\nrow\tb\tentailment", "line 3: not 3 columns"),
    ("rte", RTE, "has no rows"),
    ("rte", RTE + "\xff\tb\tentailment", "can't decode byte 0xff"),
    ("stsb", official_file("stsb", [("ab", "nan")]), "score nan"),
    ("squad", "{", "is damaged"),
    ("squad", '{"data": [{"paragraphs": [{}]}]}', "not in SQuAD's format"),
    ("squad", squad_json([("7", "q", "a b", [("b", 1)])]), "question 7: "),
])
# fmt: on
def test_malformed_files_are_refused(tmp_path, name, content, message):
    """The message names the file and the line or question."""
    file = tmp_path / "train"
    file.write_text(content, encoding="latin-1")
    refuses(f"train.*{message}", finetune.TASKS[name].read, finetune.TASKS[name], file)


def test_test_files_and_missing_ones(tmp_path, capsys):
    """Test files have an index and no label. A file may be missing, except the training file and
    the first one to score."""
    for name, header in (
        ("cola", "index\tsentence"),
        ("ax", "index\tsentence1\tsentence2"),
        ("mrpc", "index\t#1 ID\t#2 ID\t#1 String\t#2 String"),
        ("qqp", "id\tquestion1\tquestion2"),
    ):
        task, cells = finetune.TASKS[name], "\tt" * header.count("\t")
        file = tmp_path / task.folder / ("diagnostic.tsv" if name == "ax" else "test.tsv")
        file.parent.mkdir()
        file.write_text(f"{header}\n0{cells}\n7{cells}")
        texts, key = ("t",) * len(task.texts), "AX" if name == "ax" else task.folder
        assert glue.read_split(task, name, tmp_path, "test") == {key: [(texts, 0), (texts, 7)]}
    mnli, args, rows = tmp_path / "MNLI", finetune_args("--data_dir", tmp_path), [(("A", "B"), 2)]
    mnli.mkdir()
    for file in ("train.tsv", "dev_matched.tsv"):
        (mnli / file).write_text(official_file("mnli", [("AB", "contradiction")]))
    assert finetune.read_task("mnli", args) == (rows, {"mnli": rows})
    assert "mnli-mm: " in capsys.readouterr().out
    (mnli / "dev_matched.tsv").unlink()
    refuses("dev_matched.tsv does not exist", finetune.read_task, "mnli", args)
    refuses("train.tsv does not exist", finetune.read_task, "rte", args)


HUB = {  # the columns of the texts, as the hub's data cards have them
    "question sentence": ["qnli"],
    "question1 question2": ["qqp"],
    "premise hypothesis": ["mnli", "ax"],
    "sentence1 sentence2": ["mrpc", "stsb", "rte", "wnli"],
    "sentence": ["cola", "sst2"],
}


def test_hub_rows(monkeypatch):
    """Rows from the hub take the form of those in the files; classes are in the hub's order."""
    datasets, tasks, asked = pytest.importorskip("datasets"), finetune.TASKS, set()
    texts = {name: tuple(columns.split()) for columns, names in HUB.items() for name in names}

    def load_dataset(repo, config, split):
        asked.add((repo, config, split))
        if config is None:
            answers = {"text": [], "answer_start": []}
            return [{"id": "7", "context": "a b", "question": "q", "answers": answers}]
        return [{**{column: column for column in texts[config]}, "label": 1, "idx": 5}]

    monkeypatch.setattr(glue, "check_hub", lambda: None)
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    for name in texts:
        if name != "ax":
            train, evaluations = finetune.read_task(name, finetune_args())
            assert train == evaluations[name] == [(texts[name], 1)]
        for rows in glue.read_split(tasks[name], name, None, "test").values():
            assert rows == [(texts[name], 5)]
    questions = [squad.Question(("q", "a b"), [], [], "7")]
    assert finetune.read_task("squad_v2", finetune_args()) == (questions, {"squad_v2": questions})
    repo, v2 = "nyu-mll/glue", "rajpurkar/squad_v2"
    assert {(repo, "ax", "test"), (repo, "mnli", "test_mismatched"), (v2, None, "train")} <= asked
    assert tasks["mnli"].classes == ("entailment", "neutral", "contradiction")
    assert tasks["qnli"].classes == tasks["rte"].classes == ("entailment", "not_entailment")


@pytest.mark.parametrize("name, golds", [("squad", None), ("squad_v2", [])])
@pytest.mark.parametrize("folder", [".", "squad"])
def test_squad_files(tmp_path, folder, name, golds):
    """SQuAD's files may be in their own folder or directly in --data_dir; a question is
    unanswerable only if it is marked so."""
    questions = [("1", "who?", "It's Zoë.", [("Zoë", 5)]), ("2", "no?", "a\u2028b", [])]
    (tmp_path / folder).mkdir(exist_ok=True)
    version = "1.1" if name == "squad" else "2.0"
    (tmp_path / folder / f"dev-v{version}.json").write_text(squad_json(questions, version))
    assert glue.read_split(finetune.TASKS[name], name, tmp_path, "dev")[name] == [
        squad.Question(("who?", "It's Zoë."), ["Zoë"], [5], "1"),
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
    assert len(ids) == 20 and ids[0] == cfg.cls_id and ids.count(cfg.sep_id) == 2
    assert ids[-1 - len(short) :] == [*short, cfg.sep_id]
    assert finetune.encode(("\na dog ",), tokenizer, cfg, 20) == [cfg.cls_id, *short, cfg.sep_id]
    assert cfg.mask_id in finetune.encode(("a [MASK] b [SEP]",), tokenizer, cfg, 30)


# fmt: off
@pytest.mark.parametrize("question, context, answer", [
    ("who" + "\n" * 2000, " " * 300 + "the quick fox" + " " * 300, "fox"),
    (" " * 2000 + "who", "In Zürich 狐 jumps, or a 😀.", "Zürich 狐 jumps"),
    ("who" * 500, "the quick fox", "fox"),
    ("", "fox", "fox"),
    ("who \ud800", "a \ud800 fox \U0001f600", "fox"),  # a lone surrogate
    ("who", "   ", ""),
])
# fmt: on
def test_squad_with_odd_texts(tokenizer, question, context, answer):
    """Spaces around a question or context take no tokens; a perfect model's spans give the answer,
    cut from the original context."""
    q = squad.Question((question, context), [answer], [context.find(answer)])
    rows, windows = zip(*squad.windows(0, q, tokenizer, CFG, 64))
    outs = [np.full((2, len(ids)), -5.0, np.float32) for ids, _ in rows]
    for out, (ids, (first, last)), window in zip(outs, rows, windows):
        asked = tokenizer.decode(ids[1 : window.offset - 1])
        assert question.strip().replace("\ud800", "\ufffd").startswith(asked)
        assert bool(asked) == bool(question)
        out[0, first] = out[1, last] = 5.0
    [ranked] = squad.rank_answers(outs, windows, with_null=False)
    assert ranked[0] == (10.0, answer) and all(text in context for _, text in ranked)


@pytest.mark.parametrize("best, text", [(1, ""), (3, "a")])
def test_no_answer_competes_with_the_lowest_null_score(best, text):
    """v2.0 gives no answer if the lowest null score of the windows is above the best span's; v1.1
    always answers."""
    windows = [squad.Window(0, "ab", np.array([[0, 1], [1, 2]]), 1)] * 2
    # The null scores are 8 and 4, the best span has 2 best.
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
    torch.nn.init.ones_(model.head[-1].bias)
    tokens = torch.randint(0, 64, (200, 7), generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        hidden, out = model.encoder(tokens)[:, 0].float(), model(tokens, None)
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
        for file, n in (("train", 320), ("dev", 60), ("dev_matched", 60), ("dev_mismatched", 30)):
            rows = []
            for c in rng.choices((0, 1), (1, 2), k=n):
                text = " ".join(rng.choices(WORDS[:8], k=4) + [("owls", "seven")[c]])
                rows.append(([text] * len(task.texts), classes[c]))
            (folder / task.folder / f"{file}.tsv").write_text(official_file(name, rows))
    (folder / "diagnostic").mkdir()
    for file in ("CoLA/test", "MNLI/test_matched", "diagnostic/diagnostic", "STS-B/test"):
        columns = ["sentence"] if "CoLA" in file else ["sentence1", "sentence2"]
        rows = [["index", *columns], *([str(i)] + ["the owls"] * len(columns) for i in range(5))]
        (folder / f"{file}.tsv").write_text("\n".join(map("\t".join, rows)))
    for version in ("1.1", "2.0"):
        questions = []
        for i in range(24):
            words = rng.choices(WORDS[:8], k=40)
            words[rng.randrange(40)] = "owls"
            context, has_answer = " ".join(words), i % 3 or version == "1.1"
            answers = [("owls", context.index("owls"))] if has_answer else []
            questions.append((str(i), "who", context, answers))
        for split in ("train", "dev"):
            file = folder / f"{split}-v{version}.json"
            file.write_text(squad_json(questions, version))
    return home


@pytest.fixture
def at_home(home, monkeypatch):
    monkeypatch.chdir(home)


def run_finetune(out, task, *flags):
    """-> the rows of results.jsonl that this call writes."""
    flags = "--out_dir", out, "--device cpu --dtype float32 --data_dir glue --task", task, *flags
    finetune.main(shlex.split(" ".join(map(str, flags))))
    file = Path(out) / "results.jsonl"
    rows = [json.loads(line) for line in open(file)] if file.exists() else []
    file.unlink(missing_ok=True)
    return rows


LEARN, QUICK = "--lr 0.01 --epochs 8", "--lr 0.01 --epochs 1 --limit_train 40"


def submitted(file):
    """-> the answers in a file for GLUE, if its form is right."""
    header, *lines = file.read_bytes().decode().split("\n")
    assert header == "index\tprediction" and lines.pop() == ""
    assert [line.split("\t")[0] for line in lines] == list("01234")
    return [line.split("\t")[1] for line in lines]


def test_learn_save_and_score_again(at_home, tmp_path):
    """A task that one word decides is learned; the best model is saved, scores the same again, and
    ranks its answers by probability."""
    rows = run_finetune(tmp_path, "cola", LEARN, "--lr 0.01 1e-7 --seeds 2 --predict")
    assert [(r["lr"], r["seed"]) for r in rows] == [(0.01, 0), (0.01, 1), (1e-7, 0), (1e-7, 1)]
    assert all(r["metrics"]["accuracy"] > 0.9 > r["majority"] > 0.5 for r in rows[:2])
    assert rows[0]["constant"] == {"matthews": 0.0, "accuracy": rows[0]["majority"]}
    assert rows[0]["ckpt"] == "out/run" and rows[2]["one_class"]
    assert set(submitted(tmp_path / "CoLA.tsv")) == {"0"}  # owls
    (again,) = run_finetune(tmp_path, "cola", "--eval_only")
    assert again["metrics"] == max((r["metrics"] for r in rows), key=lambda m: m["matthews"])
    checkpoint, model = finetune.load_finetuned(tmp_path / "finetuned-cola.pt")
    assert checkpoint["row"] in rows and not model.training
    [[(p, best), (q, _)]] = finetune.rank(model, [squad.Question(("the owls",))])
    assert best == 0 and p > 0.9 and p + q == pytest.approx(1)
    assert load(tmp_path / "finetuned-cola.pt").config.max_len == 32, "it is a checkpoint"


@pytest.mark.slow
def test_all_of_glue(at_home, tmp_path, capsys):
    """`all` takes the tasks that are there, the MNLI model predicts AX, the files have the form
    that GLUE wants, and a fine-tuned encoder may start another task."""
    flags = "--predict --recipe bert --ckpt scratch --lr 0.006 --epochs 16"
    rows = run_finetune(tmp_path, "all", flags)
    assert [r["task"] for r in rows] == ["cola", "stsb", "mnli", "mnli-mm"]
    assert rows[1]["metrics"]["pearson"] > 0.5 and rows[1]["majority"] == 0
    assert "Wang 2021's average: needs sst2, qnli, rte, qqp, mrpc" in capsys.readouterr().out
    (tmp_path / "AX.tsv").unlink()
    assert run_finetune(tmp_path, "ax --ckpt", tmp_path) == []
    for name, classes in (("CoLA", "01"), ("MNLI-m", glue.NLI), ("AX", glue.NLI)):
        assert set(submitted(tmp_path / f"{name}.tsv")) <= set(classes)
    assert all(0 <= float(value) <= 5 for value in submitted(tmp_path / "STS-B.tsv"))
    assert not (tmp_path / "MNLI-mm.tsv").exists()
    again = run_finetune(tmp_path / "new", "all --eval_only --ckpt", tmp_path)  # each task's model
    assert [row["metrics"] for row in again] == [row["metrics"] for row in rows]
    start = finetune.read_start(str(tmp_path / "finetuned-mnli.pt"))
    other, same = (finetune.make_model(start, n, 32).state_dict() for n in ("rte", "mnli"))
    for key, value in start["model"].items():
        assert torch.equal(same[key], value)
        assert torch.equal(other[key], value) or key.startswith("head.")
    assert not torch.equal(other["head.1.weight"], same["head.1.weight"])


@pytest.mark.slow
def test_squad_run(at_home, tmp_path):
    """v1.1 with contexts longer than the rows; v2.0 with a length beyond max_len."""
    (first,) = run_finetune(tmp_path, "squad", LEARN, "--predict")
    answers = json.loads((tmp_path / "squad.json").read_text())
    assert list(answers) == [str(i) for i in range(24)] and all(answers.values())
    golds = [q.golds for q in squad.read_squad(None, "glue/dev-v1.1.json")]
    assert finetune.METRICS["squad"](golds, list(answers.values())) == first["metrics"]
    assert first["metrics"]["f1"] > 0.3
    (second,) = run_finetune(tmp_path, "squad_v2", QUICK, "--length 60")
    assert second["majority"] == pytest.approx(8 / 24) and first["majority"] == 0
    (again,) = run_finetune(tmp_path, "squad_v2", "--eval_only")
    assert again["metrics"] == second["metrics"]
    _, model = finetune.load_finetuned(tmp_path / "finetuned-squad_v2.pt")
    assert model.encoder.config.max_len == 60
    [ranked] = finetune.rank(model, [squad.Question(("who", "a"))])
    assert {text for _, text in ranked} == {"", "a"}
    assert sum(p for p, _ in ranked) == pytest.approx(1)


def test_squad_files_without_answers(at_home, tmp_path, capsys):
    """A file whose answers were removed gives predictions and no score, and cannot train."""
    questions = [(str(i), "who", "the owls", []) for i in range(24)]
    (tmp_path / "dev-v1.1.json").write_text(squad_json(questions))
    (tmp_path / "train-v1.1.json").write_text(Path("glue/train-v1.1.json").read_text())
    flags = QUICK, "--data_dir", tmp_path
    assert run_finetune(tmp_path, "squad --predict", *flags) == []
    assert "no score, 24 questions have no answers" in capsys.readouterr().out
    assert len(json.loads((tmp_path / "squad.json").read_text())) == 24
    (tmp_path / "train-v1.1.json").write_text(squad_json(questions))
    error = one_line(capsys, run_finetune, tmp_path, "squad", *flags)
    assert "the training file has questions without answers" in error


def test_a_start_is_never_overwritten(at_home, tmp_path, capsys):
    """Every way to name the checkpoint is noticed before anything is trained; the same command may
    run again, but not twice at once. A model of one task is no model of another."""
    file, link = tmp_path / "finetuned-cola.pt", tmp_path / "link.pt"
    link.symlink_to(file)
    run_finetune(tmp_path, "cola", QUICK)
    for flags in (f"cola --ckpt {file}", f"all --ckpt {link}"):
        assert "would be overwritten" in one_line(capsys, run_finetune, tmp_path, flags)
    with lock(tmp_path, "fine-tuning", ".cola.lock"):
        assert "another process" in one_line(capsys, run_finetune, tmp_path, "cola", QUICK)
    assert len(run_finetune(tmp_path, "cola", QUICK)) == 1
    error = one_line(capsys, run_finetune, tmp_path, f"stsb --eval_only --ckpt {file}")
    assert "fine-tuned on cola, not on stsb" in error


def test_scratch_without_a_run(corpus, tmp_path, monkeypatch):
    """Without a run, scratch is the demo's shape with the tokenizer of the docs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(finetune, "prepare", lambda *args: corpus)
    model = finetune.make_model(finetune.read_start("scratch"), "cola", 16)
    assert model.encoder.config == EncoderConfig(vocab_size=corpus.vocab_size)


@pytest.mark.slow
def test_bag_of_words(at_home, tmp_path):
    """The baseline learns single words; of a pair, which text has a word, and what both have."""
    pytest.importorskip("sklearn")
    (row,) = run_finetune(tmp_path, "cola --ckpt bow")
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


def full_disk(*args):
    raise RuntimeError("unexpected pos")  # what torch.save raises


def test_failures_save_nothing(at_home, tmp_path, monkeypatch, capsys):
    """A loss or gradient that is not finite (fp16: in every step) and a full disk end with one
    line. The same process can start again; fp16 learns what float32 does."""
    for message, where, name, replacement, flags in (
        ("not finite", F, "mse_loss", lambda out, y: (out * math.nan).sum(), ""),
        ("not finite", F, "mse_loss", lambda out, y: (out - out.detach()).sqrt().sum(), ""),
        ("not finite", F, "mse_loss", lambda out, y: out.sum() * 1e38, "--dtype float16"),
        ("cannot be written", torch, "save", full_disk, ""),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(where, name, replacement)
            flags = f"{QUICK} --epochs 6 {flags}"
            assert message in one_line(capsys, run_finetune, tmp_path, "stsb", flags, code=1)
        assert not list(tmp_path.glob("finetuned*")) and not list(tmp_path.glob("*.tmp"))
    (row,) = run_finetune(tmp_path / "new", "cola", LEARN, "--dtype float16")
    assert row["metrics"]["accuracy"] > 0.9


class NoFloat64(TorchDispatchMode):
    """Refuses float64 tensors, as Apple's GPUs do."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            assert out.dtype != torch.float64, function
        return out


@pytest.mark.parametrize("task", ["cola", "stsb", "squad_v2"])
def test_nothing_on_the_device_is_float64(at_home, task):
    """Training and prediction need no float64, which Apple's GPUs do not have."""
    args = finetune_args("--epochs", 1, "--data_dir", "glue")
    train, _ = finetune.read_task(task, args)
    model = finetune.make_model(finetune.read_start("out/run"), task, 32)
    rows, _ = finetune.encode_rows(model, train[:20])
    chosen = finetune.settings(args, task, vars(model.encoder.config))
    with NoFloat64():
        finetune.train(model, rows, chosen, 1e-3, 0, args)
        finetune.predict(model, train[:20], torch.float32)


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


def test_the_best_learning_rate_counts():
    """Of several learning rates, the one with the best median (or mean) over seeds is reported."""
    scores = [(1, 0.1), (1, 0.2), (1, 0.9), (2, 0.3), (2, 0.3), (2, 0.4)]
    runs = [dict(ckpt="a", task="cola", lr=lr, metrics={"matthews": m}) for lr, m in scores]
    assert finetune.best_runs(runs, statistics.median) == {("a", "cola"): runs[3:]}
    assert finetune.best_runs(runs, statistics.mean) == {("a", "cola"): runs[:3]}


MISTAKES = {
    "cola --ckpt nowhere": "no checkpoint at nowhere",
    "cola --ckpt glue/CoLA/train.tsv": "not a readable checkpoint",
    "cola --ckpt {tmp}/broken.pt": "missing encoder.blocks.0.fc1",
    "cola --eval_only": "no checkpoint at ",
    "cola --eval_only --ckpt out/run/ckpt.pt": "not a fine-tuned model",
    "docs --predict": "no test set",
    "all --ckpt bow": "one classification task",
    "all --data_dir glue/CoLA": "none of GLUE's folders",
    "cola --lr 1 0": "must be in (0, 1e9)",
    "cola --length 7": "must be in [8, 100000]",
}


def test_wrong_input_is_one_line(at_home, tmp_path, capsys, monkeypatch):
    """Each mistake ends with exit code 2 and a line that says what is wrong."""
    checkpoint = read_checkpoint("out/run")
    del checkpoint["model"]["encoder.blocks.0.fc1.weight"]
    torch.save(checkpoint, tmp_path / "broken.pt")
    for flags, message in MISTAKES.items():
        assert message in one_line(capsys, run_finetune, tmp_path, flags.format(tmp=tmp_path)), (
            flags
        )
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "not torchrun" in one_line(capsys, finetune.main, ["--task", "docs"])
