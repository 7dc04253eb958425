"""finetune.py beyond the specification: official files, SQuAD's texts, whole runs, wrong input."""

import dataclasses
import json
import math
import random
import shlex
import statistics
from pathlib import Path

import numpy as np
import pytest
import tiktoken
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import data
import finetune
from lib import glue, squad
from lib.files import lock
from model import EncoderConfig, load
from test_all import close, finetune_args, sequences, tiny_classifier
from tests.conftest import WORDS, one_line, run_train

NLI, RTE = ("entailment", "neutral", "contradiction"), ("entailment", "not_entailment")
# fmt: off
COLUMNS = {  # of the official train.tsv and dev.tsv; of the texts on the hub; classes there
    "cola": ("source label mark sentence", "sentence", ("0", "1")),  # the files have no header
    "sst2": ("sentence label", "sentence", ("0", "1")),
    "qnli": ("index question sentence label", "question sentence", RTE),
    "mrpc": ("Quality|#1 ID|#2 ID|#1 String|#2 String", "sentence1 sentence2", ("0", "1")),
    "rte":  ("index sentence1 sentence2 label", "sentence1 sentence2", RTE),
    "wnli": ("index sentence1 sentence2 label", "sentence1 sentence2", ("0", "1")),
    "qqp":  ("id qid1 qid2 question1 question2 is_duplicate", "question1 question2", ("0", "1")),
    "stsb": ("index genre sentence1 sentence2 score", "sentence1 sentence2", ()),
    "mnli": ("index genre sentence1 sentence2 label1 gold_label", "premise hypothesis", NLI),
}
# fmt: on


def official_file(name, rows):
    """Rows of (texts, label as written) -> the text of an official file."""
    task, header = finetune.TASKS[name], COLUMNS[name][0].split("|" if name == "mrpc" else None)
    lines = [] if name == "cola" else [header]
    for texts, label in rows:
        cells = {**dict(zip(task.texts, texts)), task.label: label}
        lines.append([cells.get(column, "0") for column in header])
    return "".join("\t".join(line) + "\n" for line in lines)


def squad_json(questions):
    """[(id, question, context, answers)] -> SQuAD's JSON; answers: None if they were removed."""
    paragraphs = []
    for i, q, context, answers in questions:
        qa = {"id": i, "question": q, "is_impossible": answers == []}
        qa["answers"] = [{"text": text, "answer_start": start} for text, start in answers or ()]
        paragraphs.append({"context": context, "qas": [qa]})
    return json.dumps({"data": [{"title": "t", "paragraphs": paragraphs}]})


@pytest.mark.parametrize("name", COLUMNS)
def test_official_files_and_the_hub(tmp_path, monkeypatch, name):
    """Texts arrive as they are written, with quotes and all that str.splitlines takes for a line
    end; a rare row without all columns is skipped. Rows from the hub take the same form, with the
    hub's order of classes."""
    task, (_, columns, classes) = finetune.TASKS[name], COLUMNS[name]
    texts = '"', "a\u2028b\x85", "", "it's \\ \x0b\x0c\x1c", "é"
    texts, labels = [(text, f"{text}2")[: len(task.texts)] for text in texts], range(len(texts))
    written = [classes[y % len(classes)] if classes else f"{y}.0" for y in labels]
    expected = [(text, y % len(classes) if classes else y) for text, y in zip(texts, labels)]
    for bom, end in (("", "\n"), ("\ufeff", "\r\n")):
        content = bom + official_file(name, zip(texts, written)).replace("\n", end)
        (tmp_path / "train.tsv").write_bytes(content.encode())
        assert glue.read_tsv(task, tmp_path / "train.tsv") == expected
    many = official_file(name, [*zip(texts, written)] * 201) + "broken\n"  # as in QQP's train.tsv
    (tmp_path / "train.tsv").write_bytes(many.encode())
    assert glue.read_tsv(task, tmp_path / "train.tsv") == expected * 201
    row = {**dict(zip(columns.split(), texts[0])), "label": 1, "idx": 5}
    monkeypatch.setattr(glue, "check_hub", lambda: None)
    monkeypatch.setattr("datasets.load_dataset", lambda repo, config, split: [row])
    train, evaluations = finetune.read_task(name, finetune_args())
    assert train == evaluations[name] == [(texts[0], 1)]
    for rows in glue.read_split(task, name, None, "test").values():
        assert rows == [(texts[0], 5)]


def test_docs_and_scratch(corpus, tmp_path, monkeypatch):
    """In the docs task, names of libraries are masked as whole words, and pre-training's validation
    documents are scored. Without a run, scratch is the demo's shape with the docs' tokenizer."""
    rows = [["torch", "PyTorch's np.pad"], ["numpy", "See from_numpy"], ["python", "import this"]]
    (tmp_path / "docs.json").write_text(json.dumps({"rows": rows, "every": 50}))
    docs = dataclasses.replace(corpus, folder=tmp_path)
    monkeypatch.setattr(finetune, "prepare", lambda *args: docs)
    monkeypatch.chdir(tmp_path)
    train, evaluations = finetune.read_docs("")
    assert train == [(("[MASK]'s [MASK].pad",), 1), (("import this",), 0)]
    assert evaluations == {"docs": [(("See from_numpy",), 2)]}
    model = finetune.make_model(finetune.read_start("scratch"), "cola", 16)
    assert model.encoder.config == EncoderConfig(
        vocab_size=corpus.vocab_size, dropout=0.0, attn_dropout=0.0
    )


def test_texts_become_tokens(corpus):
    """The longer text of a pair is cut first, and so is SQuAD's question; spaces around a text take
    no tokens, and [MASK] in it is the special token."""
    tokenizer = tiktoken.Encoding(**data.encoding_arguments(corpus.tokenizer))
    cfg, short = EncoderConfig(vocab_size=8192), tokenizer.encode_ordinary("a dog")
    ids = finetune.encode(("the fox " * 30, " " * 999 + "a dog"), tokenizer, cfg, 20)
    assert len(ids) == 20 and ids[0] == cfg.cls_id and ids.count(cfg.sep_id) == 2
    assert ids[-1 - len(short) :] == [*short, cfg.sep_id]
    ids = finetune.encode((" a dog", "the fox " * 30), tokenizer, cfg, 20)
    assert len(ids) == 20 and ids[: len(short) + 2] == [cfg.cls_id, *short, cfg.sep_id]
    assert cfg.mask_id in finetune.encode(("a [MASK] b [SEP]",), tokenizer, cfg, 30)
    question = squad.Question((" " * 2000 + "a dog " * 500, "a dog"))
    [((ids, _), window)] = squad.windows(0, question, tokenizer, cfg, 128)
    asked = tokenizer.encode_ordinary("a dog " * 500)[:64]
    assert ids == [cfg.cls_id, *asked, cfg.sep_id, *short, cfg.sep_id]


def test_no_answer_competes_with_the_lowest_null_score():
    """v2.0 gives no answer if the lowest null score of the windows is above the best span's; v1.1
    always answers."""
    windows = [squad.Window(0, "ab", np.array([[0, 1], [1, 2]]), 1)] * 2
    for best, text in ((1, ""), (3, "a")):
        # The null scores are 8 and 4, the best span has 2 best.
        outs = [np.array([[null, best, 0, 0]] * 2, np.float32) for null in (4, 2)]
        [ranked] = squad.rank_answers(outs, windows, with_null=True)
        assert ranked[0][1] == text and (4.0, "") in ranked
        [ranked] = squad.rank_answers(outs, windows, with_null=False)
        assert ranked[0] == (2.0 * best, "a")


def test_heads_compute_in_float32():
    """Under 16-bit autocast the head's outputs are those of float32 arithmetic on the hidden
    states. (In 16 bits 1,500 rows of STS-B had 2 different scores.)"""
    model = tiny_classifier("stsb").float().eval()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        hidden, out = model.encoder(sequences())[:, 0].float(), model(sequences(), None)
    close(out, model.head(hidden).squeeze(-1), 1e-6)


@pytest.fixture(scope="module")
def home(corpus_file, cache, tmp_path_factory):
    """Be in a folder with a run (out/run) and files of tasks that one word decides (glue)."""
    home, rng = tmp_path_factory.mktemp("finetune"), random.Random(0)
    run_train(
        corpus_file, cache, home / "out" / "run", *"--steps 2 --block_size 32 --dropout .1".split()
    )
    for name in ("cola", "mnli", "stsb"):
        task, folder = finetune.TASKS[name], home / "glue" / finetune.TASKS[name].folder
        folder.mkdir(parents=True)
        classes = task.classes[:2] or ("0.5", "4.5")
        for file, n in (("train", 320), ("dev", 60), ("dev_matched", 60), ("dev_mismatched", 30)):
            rows = []
            for c in rng.choices((0, 1), (1, 2), k=n):
                words = rng.choices(WORDS[:8], k=rng.randrange(2, 6))
                rows.append(([" ".join([*words, ("owls", "seven")[c]])] * 2, classes[c]))
            (folder / f"{file}.tsv").write_text(official_file(name, rows))
    (home / "glue" / "diagnostic").mkdir()
    for file in ("CoLA/test", "MNLI/test_matched", "diagnostic/diagnostic", "STS-B/test"):
        columns = ["sentence"] if "CoLA" in file else ["sentence1", "sentence2"]
        rows = [["index", *columns], *([str(i)] + ["the owls"] * len(columns) for i in range(5))]
        (home / "glue" / f"{file}.tsv").write_text("\n".join(map("\t".join, rows)))
    questions = []
    for i in range(24):
        words = WORDS[:8] * 5 + ["owls"] * (i % 3 > 0)
        rng.shuffle(words)
        context = " ".join(words)
        answers = [("owls", context.index("owls"))] if i % 3 else []
        questions.append((str(i), "who", context, answers))
    for split in ("train", "dev"):
        (home / "glue" / f"{split}-v2.0.json").write_text(squad_json(questions))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        yield home


def run_finetune(out, task, *flags):
    """-> the rows of results.jsonl that this call writes."""
    flags = "--out_dir", out, "--device cpu --dtype float32 --data_dir glue --task", task, *flags
    finetune.main(shlex.split(" ".join(map(str, flags))))
    file = Path(out) / "results.jsonl"
    rows = [json.loads(line) for line in open(file)] if file.exists() else []
    file.unlink(missing_ok=True)
    return rows


LEARN, QUICK = "--lr 0.01 --epochs 8", "--lr 0.01 --epochs 1 --limit_train 40"


def test_learn_save_and_score_again(home, tmp_path):
    """A task that one word decides is learned; the best learning rate counts; the best model is
    saved, scores the same again, and ranks its answers by probability."""
    rows = run_finetune(tmp_path, "cola", LEARN, "--lr 0.01 1e-7 --seeds 2")
    assert [(r["lr"], r["seed"]) for r in rows] == [(0.01, 0), (0.01, 1), (1e-7, 0), (1e-7, 1)]
    assert all(r["metrics"]["accuracy"] > 0.9 > r["majority"] > 0.5 for r in rows[:2])
    assert rows[0]["constant"] == {"matthews": 0.0, "accuracy": rows[0]["majority"]}
    assert rows[0]["ckpt"] == "out/run" and rows[2]["one_class"]
    assert finetune.best_runs(rows, statistics.median) == {("out/run", "cola"): rows[:2]}
    (again,) = run_finetune(tmp_path, "cola", "--eval_only")
    assert again["metrics"] == max((r["metrics"] for r in rows), key=lambda m: m["matthews"])
    _, model = finetune.load_finetuned(tmp_path / "finetuned-cola.pt")
    [[(p, best), (q, _)]] = finetune.rank(model, [squad.Question(("the owls",))])
    assert best == 0 and p > 0.9 and p + q == pytest.approx(1)
    assert load(tmp_path / "finetuned-cola.pt").config.max_len == 32, "it is a checkpoint"


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags", [f"cola --dtype float16 {LEARN}", f"cola --compile {LEARN}", "mnli --ckpt bow"]
)
def test_other_runs_learn(home, tmp_path, flags):
    """A task is learned with fp16, compiled with dropout for all lengths, and as a bag of words."""
    rows = run_finetune(tmp_path, flags)
    assert rows and all(row["metrics"]["accuracy"] > 0.9 for row in rows)


class NoFloat64(TorchDispatchMode):
    """Refuses float64 tensors, as Apple's GPUs do."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        assert not isinstance(out, torch.Tensor) or out.dtype != torch.float64, function
        return out


@pytest.mark.parametrize("task", ["cola", "stsb", "squad_v2"])
def test_nothing_on_the_device_is_float64(home, task):
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
def test_all_of_glue(home, tmp_path):
    """`all` takes the tasks that are there, the MNLI model predicts AX, the files have the form
    that GLUE wants, and a fine-tuned encoder may start another task."""
    flags = "--predict --recipe bert --ckpt scratch --lr 0.006 --epochs 16"
    rows = run_finetune(tmp_path, "all", flags)
    assert [r["task"] for r in rows] == ["cola", "stsb", "mnli", "mnli-mm"]
    assert rows[1]["metrics"]["pearson"] > 0.5 and rows[1]["majority"] == 0
    (tmp_path / "AX.tsv").unlink()
    assert run_finetune(tmp_path, "ax --ckpt", tmp_path) == []
    for name, answer in (("CoLA", "0"), ("MNLI-m", NLI[0]), ("AX", NLI[0]), ("STS-B", None)):
        header, *lines = (tmp_path / f"{name}.tsv").read_text().splitlines()
        indices, answers = zip(*(line.split("\t") for line in lines))
        assert header == "index\tprediction" and indices == tuple("01234")
        assert set(answers) == {answer} or name == "STS-B" and 0 <= float(answers[0]) < 2
    again = run_finetune(tmp_path / "new", "all --eval_only --ckpt", tmp_path)  # each task's model
    assert [row["metrics"] for row in again] == [row["metrics"] for row in rows]
    start = finetune.read_start(str(tmp_path / "finetuned-mnli.pt"))
    other = finetune.make_model(start, "rte", 32).state_dict()
    for key, value in start["model"].items():
        assert torch.equal(other[key], value) != key.startswith("head.")


@pytest.mark.slow
def test_squad_run(home, tmp_path, capsys):
    """SQuAD v2.0 is learned from contexts longer than the sequences, which are longer than max_len;
    a file without answers gets no score."""
    (row,) = run_finetune(tmp_path, "squad_v2 --lr 0.01 --epochs 30 --length 40 --predict")
    answers = json.loads((tmp_path / "squad_v2.json").read_text())
    golds = [q.golds for q in squad.read_squad(None, "glue/dev-v2.0.json")]
    assert list(answers) == [str(i) for i in range(24)]
    assert finetune.METRICS["squad"](golds, list(answers.values())) == row["metrics"]
    assert row["metrics"]["f1"] > row["majority"] == pytest.approx(8 / 24)
    (again,) = run_finetune(tmp_path, "squad_v2 --eval_only")
    assert again["metrics"] == row["metrics"]
    (tmp_path / "dev-v2.0.json").write_text(squad_json([("0", "who", "the owls", None)]))
    assert run_finetune(tmp_path, "squad_v2 --eval_only --data_dir", tmp_path) == []
    assert "no score, 1 questions have no answers" in capsys.readouterr().out


def test_a_start_is_never_overwritten(home, tmp_path, capsys):
    """A run may be repeated, but not twice at once, nor from the model that it would replace. A
    model of one task is no model of another."""
    file, link = tmp_path / "finetuned-cola.pt", tmp_path / "link.pt"
    link.symlink_to(file)
    for _ in range(2):
        assert len(run_finetune(tmp_path, "cola", QUICK)) == 1
    for flags, message in (
        (f"all --ckpt {link}", "would be overwritten"),
        (f"stsb --eval_only --ckpt {file}", "fine-tuned on cola, not on stsb"),
        ("cola", "another process"),
    ):
        with lock(tmp_path, "fine-tuning", ".cola.lock"):
            assert message in one_line(capsys, run_finetune, tmp_path, flags)


def test_a_loss_or_gradient_that_is_not_finite(home, tmp_path, monkeypatch, capsys):
    """Training that diverged (with fp16: in every step) ends with one line, and saves nothing."""
    for flags, loss in (
        ("", lambda out, y: (out * math.nan).sum()),
        ("", lambda out, y: (out - out.detach()).sqrt().sum()),  # only the gradient
        ("--dtype float16", lambda out, y: out.sum() * 1e38),
    ):
        monkeypatch.setattr(F, "mse_loss", loss)
        flags = f"{QUICK} --epochs 6 {flags}"
        assert "not finite" in one_line(capsys, run_finetune, tmp_path, "stsb", flags, code=1)
    assert not list(tmp_path.glob("finetuned*"))


HEADER = "sentence1\tsentence2\tlabel\n"
# fmt: off
MISTAKES = [  # flags, content of the task's files if it is wrong, message
    ("cola --eval_only --ckpt out/run/ckpt.pt", None, "not a fine-tuned model"),
    ("cola --eval_only --lr 1", None, "--lr has no effect"),
    ("cola --eval_only --limit_train 9", None, "--limit_train has no effect"),
    ("all --data_dir glue/CoLA", None, "none of GLUE's folders"),
    ("rte", None, "train.tsv does not exist"),
    ("rte", HEADER + "a\tb\tmaybe\n", "train.tsv, line 2: label 'maybe'"),
    ("rte", "sentence1\tlabel\na\tentailment\n", "no column sentence2"),
    ("rte", HEADER + "a\tb\tentailment\nbroken\nrow\tb\tentailment", "line 3: not 3 columns"),
    ("rte", HEADER, "train.tsv has no rows"),
    ("rte", HEADER + "\xff\tb\tentailment", "can't decode byte 0xff"),
    ("stsb", official_file("stsb", [("ab", "nan")]), "score nan"),
    ("squad", '{"data": [{"paragraphs": [{}]}]}', "not in SQuAD's format"),
    ("squad", squad_json([("7", "q", "a b", [("b", 1)])]), "question 7: "),
    ("squad", squad_json([("7", "q", "a b", None)]), "questions without answers"),
]
# fmt: on


@pytest.mark.parametrize("flags, content, message", MISTAKES)
def test_wrong_input_is_one_line(home, tmp_path, capsys, flags, content, message):
    """Each mistake ends with exit code 2 and a line that says what is wrong and where."""
    if content:
        task = finetune.TASKS[flags]
        (tmp_path / task.folder).mkdir()
        for split in ("train", "validation"):
            file = tmp_path / task.folder / task.file(split)
            file.write_text(content, encoding="latin-1")
        flags += f" --data_dir {tmp_path}"
    assert message in one_line(capsys, run_finetune, tmp_path, flags)
