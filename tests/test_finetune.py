"""finetune.py beyond the specification: official files, SQuAD's texts, whole runs, wrong input; and
tools/predict.py and tools/bow.py."""

import collections
import dataclasses
import json
import math
import random
import re
import shlex
import shutil
import statistics
import string
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import finetune
from lib import glue, squad
from lib.files import lock, read_checkpoint, read_jsonl
from model import EncoderConfig, load
from test_all import close, encoding_of, finetune_args, sequences, tiny_classifier
from tests.conftest import WORDS, one_line, run_train
from tools import bow, predict

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


@pytest.mark.parametrize("name", COLUMNS)
def test_official_files_and_the_hub(tmp_path, monkeypatch, name):
    """Texts arrive as they are written, with quotes and all that str.splitlines takes for a line
    end; a rare row without all columns is skipped. Rows from the hub take the same form, with the
    hub's order of classes."""
    task, (_, columns, classes) = finetune.TASKS[name], COLUMNS[name]
    texts = '"', "a\u2028b\x85", "", "it's \\ \x0b\x0c\x1c", "é\rè"
    texts, labels = [(text, f"{text}2")[: len(task.texts)] for text in texts], range(len(texts))
    written = [classes[y % len(classes)] if classes else f"{y}.0" for y in labels]
    expected = [(text, y % len(classes) if classes else y) for text, y in zip(texts, labels)]
    for bom, end in (("", "\n"), ("\ufeff", "\r\n")):
        content = official_file(name, zip(texts, written)) + "broken\n"  # as in QQP's train.tsv
        (tmp_path / "train.tsv").write_bytes((bom + content.replace("\n", end)).encode())
        assert glue.read_tsv(task, tmp_path / "train.tsv") == expected
    row = {**dict(zip(columns.split(), texts[0])), "label": 1, "idx": 5}
    monkeypatch.setattr(glue, "check_hub", lambda: None)
    monkeypatch.setattr("datasets.load_dataset", lambda repo, config, split: [row])
    train, evaluations = finetune.read_task(name, None, None)
    assert train == evaluations[name] == [(texts[0], 1)]
    for rows in glue.read_split(task, name, None, "test").values():
        assert rows == [(texts[0], 5)]


def test_docs(corpus, tmp_path, monkeypatch):
    """In the docs task, names of libraries are masked as whole words, and pre-training's validation
    documents are scored."""
    rows = [["torch", "PyTorch's np.pad"], ["numpy", "See from_numpy"], ["python", "import this"]]
    (tmp_path / "docs.json").write_text(json.dumps({"rows": rows, "every": 50}))
    docs = dataclasses.replace(corpus, folder=tmp_path)
    monkeypatch.setattr(finetune, "prepare", lambda *args: docs)
    train, evaluations = finetune.read_docs("")
    assert train == [(("[MASK]'s [MASK].pad",), 1), (("import this",), 0)]
    assert evaluations == {"docs": [(("See from_numpy",), 2)]}


def test_texts_become_tokens(corpus):
    """The longer text of a pair is cut first, and so is SQuAD's question. No word is lost that has
    room, not even after spaces. [MASK] is the special token, [SEP] is not."""
    tokenizer = encoding_of(corpus)
    cfg, short = EncoderConfig(vocab_size=8192), tokenizer.encode_ordinary("a dog")
    cls, sep = cfg.cls_id, cfg.sep_id
    for a, b in (("the fox " * 30, " " * 999 + "a dog"), (" a dog", "the fox " * 30)):
        parts = [tokenizer.encode_ordinary(text.strip()) for text in (a, b)]
        for length in range(2 * len(short) + 3, 150):
            ids = finetune.encode((a, b), tokenizer, cfg, length)
            kept = [list(part) for part in parts]
            while len(kept[0]) + len(kept[1]) > length - 3:
                max(kept, key=len).pop()
            assert ids == [cls, *kept[0], sep, *kept[1], sep]
    ids = finetune.encode(("a [MASK] b [SEP]",), tokenizer, cfg, 30)
    assert (ids.count(cfg.mask_id), ids.count(sep)) == (1, 1)
    a, b = map(tokenizer.encode_ordinary, ("a", " b"))
    assert ids[: len(a + b) + 2] == [cls, *a, cfg.mask_id, *b]  # no lone space, as in pre-training
    question = squad.Question((" " * 2000 + "a dog " * 500, "a dog"))
    [((ids, _), window)] = squad.windows(0, question, tokenizer, cfg, 128)
    asked = tokenizer.encode_ordinary("a dog " * 500)[:64]
    assert ids == [cls, *asked, sep, *short, sep]


def official_scores(golds, text, version):
    """EM and F1 of one question, as evaluate-v1.1.py and evaluate-v2.0.py compute them."""

    def normalize(text):
        text = "".join(c for c in text.lower() if c not in set(string.punctuation))
        return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())

    def f1(gold, text):
        gold, text = normalize(gold).split(), normalize(text).split()
        if version == 2 and (not gold or not text):
            return int(gold == text)
        n_same = sum((collections.Counter(gold) & collections.Counter(text)).values())
        if n_same == 0:
            return 0
        precision, recall = n_same / len(text), n_same / len(gold)
        return 2 * precision * recall / (precision + recall)

    if version == 2:
        golds = [gold for gold in golds if normalize(gold)] or [""]
    em = max(normalize(gold) == normalize(text) for gold in golds)
    return {"em": float(em), "f1": max(f1(gold, text) for gold in golds)}


def test_squad_metrics_equal_the_official_scripts():
    """The best gold answer counts; case, punctuation, articles and spaces do not. v1.1 gives no F1
    to answers without a common word, even if both are empty; v2.0 leaves out empty golds."""
    rng, words = random.Random(0), ["the", "A", "an", "fox", "Fox's", "owl", "-", "é", "$5.00"]
    cases = [(["The"], ""), (["The", "fox"], "an"), (["a fox"], "the fox den")]
    for _ in range(300):
        texts = [
            " ".join(rng.choices(words, k=rng.randrange(4))) for _ in range(rng.randrange(2, 5))
        ]
        cases.append((texts[1:], texts[0]))
    for name, version in (("squad", 1), ("squad_v2", 2)):
        each = [official_scores(*case, version) for case in cases]
        for case, expected in zip(cases, each):
            found = finetune.TASKS[name].score(*([x] for x in case))
            assert found == pytest.approx(expected), (name, case)
        found = finetune.TASKS[name].score(*zip(*cases))
        assert found == pytest.approx({m: np.mean([x[m] for x in each]) for m in ("em", "f1")})
    cases = [([], ""), ([], "fox"), (["The"], ""), (["The"], "fox"), (["fox"], "")]
    each = [official_scores(*case, 2)["f1"] for case in cases]
    assert each == [1, 0, 1, 0, 0]
    assert finetune.TASKS["squad_v2"].score(*zip(*cases)) == pytest.approx({"em": 0.4, "f1": 0.4})


def test_correlations():
    """Predictions that are equal up to rounding have no correlation; NaN stays NaN, and the run
    that it comes from is not the best."""
    labels = [1, 2, 3, 4]
    for metric in (glue.pearson, glue.spearman):
        assert math.isnan(metric(labels, [1, 2, math.nan, 4]))
    rounding = np.float32(0.3) + np.arange(4, dtype=np.float32) * np.float32(3e-8)
    assert glue.pearson(labels, rounding) == glue.pearson([7] * 4, labels) == 0
    scores = {0.1: [0.2, math.nan], 0.2: [math.nan, math.nan], 0.3: [-0.5, -0.3]}
    rows = [
        {"ckpt": "run", "task": "stsb", "lr": lr, "metrics": {"pearson": score}}
        for lr, pair in scores.items()
        for score in pair
    ]
    assert finetune.best_runs(rows, np.median) == {("run", "stsb"): rows[4:]}


def best_window(windows, position):
    """BERT's _check_is_max_context: windows are (first, number of tokens, ...) -> index."""
    scores = {}
    for i, (first, n, *_) in enumerate(windows):
        if first <= position < first + n:
            scores[i] = min(position - first, first + n - 1 - position) + 0.01 * n
    return max(scores, key=scores.get)  # the first one, if equal


def berts_answers(outputs, windows):
    """BERT's run_squad.py for one question, but with all spans that are short enough: windows are
    (first, number of tokens, spans in characters) -> [(score, start, end)], best first."""
    found = []
    for number, (out, (first, n, spans)) in enumerate(zip(outputs, windows)):
        offset, of_window = out.shape[1] - n - 1, []
        for i in range(n):
            for j in range(i, min(n, i + 30)):
                if best_window(windows, first + i) == number:
                    score = out[0, offset + i] + out[1, offset + j]
                    of_window.append((score, spans[i][0], spans[j][1]))
        found += sorted(of_window, reverse=True)[:20]
    return sorted(found, reverse=True)


@pytest.mark.parametrize("seed", range(10))
def test_squad_answers_are_berts(corpus, seed):
    """An answer may begin at a token only in the window where that token has most context, each
    text is listed once with its best score, and spaces alone are no answer."""
    tokenizer = encoding_of(corpus)
    rng = random.Random(seed)
    pieces = ["the ", "fox", " fox", "é", "漢", "\n", " ", "owl's "]
    context = "".join(rng.choices(pieces, k=rng.randrange(1, 60)))
    question, length = squad.Question(("who", context)), rng.randrange(8, 40)
    rows, windows = zip(*squad.windows(0, question, tokenizer, EncoderConfig(), length))
    outs = [np.random.default_rng(seed + i).normal(size=(2, len(r[0]))) for i, r in enumerate(rows)]
    stride, plain, first = min(length // 3, length - windows[0].offset - 1), [], 0
    for window in windows:
        plain.append((first, len(window.spans), window.spans.tolist()))
        first += stride
    expected, seen = [], set()
    for score, start, end in berts_answers(outs, plain):
        text = context[start:end].strip()
        if text and text not in seen:
            expected.append((score, text))
            seen.add(text)
    [ranked] = squad.rank_answers(outs, windows, with_null=False)
    null = [(min(out[:, 0].sum() for out in outs), "")]
    expected = expected[:20] or null
    assert [text for _, text in ranked] == [text for _, text in expected]
    assert [score for score, _ in ranked] == pytest.approx([score for score, _ in expected])


def test_no_answer_competes_with_the_lowest_null_score(monkeypatch):
    """v2.0 gives no answer if the lowest null score of the windows is above the best span's; v1.1
    always answers."""
    windows = [squad.Window(0, "ab", np.array([[0, 1], [1, 2]]), 1, np.array([True, True]))] * 2
    for best, text in ((1, ""), (3, "a")):
        # The null scores are 8 and 4, the best span has 2 best.
        outs = [np.array([[null, best, 0, 0]] * 2, np.float32) for null in (4, 2)]
        monkeypatch.setattr(finetune, "outputs", lambda *args, outs=outs: outs)
        models = [Namespace(kind="span", name=name) for name in ("squad", "squad_v2")]
        [[v1], [v2]] = (finetune.rank(model, None, windows) for model in models)
        assert v1[0][1] == "a" and "" not in [answer for _, answer in v1]
        p = {answer: x for x, answer in v2}
        assert v2[0][1] == text and math.log(p[""] / p["a"]) == pytest.approx(4 - 2 * best)


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
    paragraphs = []
    for i in range(24):
        words = WORDS[:8] * 5 + ["owls"] * (i % 3 > 0)
        rng.shuffle(words)
        context = " ".join(words)
        answers = [{"text": "owls", "answer_start": context.index("owls")}] if i % 3 else []
        question = {"id": str(i), "question": "who", "answers": answers}
        paragraphs.append({"context": context, "qas": [question]})
    for split in ("train", "dev"):
        content = json.dumps({"data": [{"paragraphs": paragraphs}]})
        (home / "glue" / f"{split}-v2.0.json").write_text(content)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        yield home


def call(main, out, *flags):
    """-> the rows of results.jsonl that this call of a program writes."""
    file = out / "results.jsonl"
    before = len(read_jsonl(file))
    main(shlex.split(" ".join([f"--out_dir {out} --data_dir glue", *flags])))
    return read_jsonl(file)[before:]


def run_finetune(out, task, *flags):
    return call(finetune.main, out, "--device cpu --dtype float32 --task", task, *flags)


def run_predict(out, *flags):
    return call(predict.main, out, f"--device cpu --dtype float32 --ckpt {out}", *flags)


def encoded_for(model, rows):
    """-> what finetune.encode_rows gives for a Classifier."""
    tokenizer, cfg = model.encoder.tokenizer, model.encoder.config
    return finetune.encode_rows(model.name, rows, tokenizer, cfg, model.length)


LEARN, QUICK = "--lr 0.01 --epochs 8", "--lr 0.01 --epochs 1 --limit_train 40"


def test_learn_save_and_score_again(home, tmp_path):
    """A task that one word decides is learned; the best learning rate counts; the best model is
    saved, scores the same again, and ranks its answers by probability."""
    rows = run_finetune(tmp_path, "cola", LEARN, "--lr 0.01 1e-7 --seeds 2 --dropout .2")
    assert [(r["lr"], r["seed"]) for r in rows] == [(0.01, 0), (0.01, 1), (1e-7, 0), (1e-7, 1)]
    assert all(r["metrics"]["accuracy"] > 0.9 > r["majority"] > 0.5 for r in rows[:2])
    assert rows[0]["constant"] == {"matthews": 0.0, "accuracy": rows[0]["majority"]}
    (tmp_path / "wrong").mkdir()  # the most frequent answer is that of the labels
    texts = {"cola": [("x", 1), ("x", 1), ("x", 0)]}
    [row] = finetune.evaluate({"cola": [0] * 3}, texts, {}, 0, tmp_path / "wrong")
    assert row["majority"] == pytest.approx(2 / 3)
    assert rows[0]["ckpt"] == "out/run" and rows[2]["one_class"] and rows[0]["dropout"] == 0.2
    assert finetune.best_runs(rows, statistics.median) == {("out/run", "cola"): rows[:2]}
    (again,) = run_predict(tmp_path)
    assert again["ckpt"] == f"{tmp_path}/finetuned-cola.pt"
    assert again["metrics"] == max((r["metrics"] for r in rows), key=lambda m: m["matthews"])
    model = finetune.load(tmp_path / "finetuned-cola.pt")
    encoded = encoded_for(model, [squad.Question(("the owls",))])
    [[(p, best), (q, _)]] = finetune.rank(model, *encoded)
    assert best == 0 and p > 0.9 and p + q == pytest.approx(1)
    config = load(tmp_path / "finetuned-cola.pt").config
    assert (config.max_len, config.dropout, config.attn_dropout) == (32, 0.2, 0.2)


@pytest.mark.slow
def test_a_compiled_model_learns(home, tmp_path):
    """A task is learned when compiled, with dropout, for all lengths."""
    rows = run_finetune(tmp_path, f"cola --compile {LEARN}")
    assert rows and all(row["metrics"]["accuracy"] > 0.9 for row in rows)


def test_what_is_scored_is_ready_before_training(home, tmp_path, monkeypatch, capsys):
    """A task's rows are encoded once, before its first step, and all files of all tasks are read
    before that. The model is saved before it is scored."""
    encode, texts = finetune.encode, []
    monkeypatch.setattr(finetune, "encode", lambda t, *args: texts.append(t) or encode(t, *args))
    train = finetune.train
    monkeypatch.setattr(finetune, "train", lambda *args: texts.append("train") or train(*args))
    assert len(run_finetune(tmp_path, "cola", QUICK, "--lr 0.01 1e-7 --seeds 2")) == 4
    assert len(texts) == 40 + 60 + 4 and texts[100:] == ["train"] * 4
    assert [file.name for file in tmp_path.glob("*.pt")] == ["finetuned-cola.pt"]

    monkeypatch.setattr(finetune, "outputs", lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run_finetune(tmp_path, "mnli", QUICK)
    assert finetune.load(tmp_path / "unscored-mnli.pt").name == "mnli"

    monkeypatch.setattr(finetune, "train", lambda *args: pytest.fail("trained"))
    shutil.copytree("glue", tmp_path / "glue")
    (tmp_path / "glue" / "MNLI" / "dev_mismatched.tsv").write_text("cut")
    flags = f"{QUICK} --data_dir {tmp_path}/glue"
    assert "dev_mismatched.tsv" in one_line(capsys, run_finetune, tmp_path, "all", flags)
    (tmp_path / "glue" / "dev-v2.0.json").write_text('{"data": []}')
    assert "has no rows" in one_line(capsys, run_finetune, tmp_path, "squad_v2", flags)


def test_a_repeated_question_is_said(home, tmp_path, capsys):
    """A file to submit has one answer for each id."""
    content = json.loads(Path("glue/dev-v2.0.json").read_text())
    content["data"] *= 2
    (tmp_path / "dev.json").write_text(json.dumps(content))
    assert len(squad.read_squad(None, tmp_path / "dev.json")) == 48
    assert "48 questions have only 24 ids" in capsys.readouterr().out


def test_bag_of_words(home, tmp_path):
    """One word decides, and it is in the bag."""
    rows = call(bow.main, tmp_path, "--task mnli")
    assert [row["task"] for row in rows] == ["mnli", "mnli-mm"]
    assert all(row["metrics"]["accuracy"] > 0.9 and row["ckpt"] == "bow" for row in rows)


class NoFloat64(TorchDispatchMode):
    """Refuses float64 tensors, as Apple's GPUs do."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        assert not isinstance(out, torch.Tensor) or out.dtype != torch.float64, function
        return out


@pytest.mark.parametrize("task", ["cola", "stsb", "squad_v2"])
def test_nothing_on_the_device_is_float64(home, task):
    """Training and prediction need no float64, which Apple's GPUs do not have."""
    args = finetune_args("--epochs", 1)
    train, _ = finetune.read_task(task, "glue", None)
    model = finetune.new_classifier(read_checkpoint("out/run"), "", task, 32)
    encoded = encoded_for(model, train[:20])
    chosen = finetune.settings(args, task, vars(model.encoder.config))
    with NoFloat64():
        finetune.train(model, encoded[0], chosen, 1e-3, 0, args)
        finetune.predict(model, *encoded, torch.float32)


@pytest.mark.slow
def test_all_of_glue(home, tmp_path, monkeypatch):
    """`all` takes the tasks that are there, the MNLI model predicts AX, the files have the form
    that GLUE wants, and a fine-tuned encoder may start another task."""
    rows = run_finetune(tmp_path, "all --recipe bert --ckpt scratch --lr 0.006 --epochs 16")
    assert [r["task"] for r in rows] == ["cola", "stsb", "mnli", "mnli-mm"]
    assert rows[1]["metrics"]["pearson"] > 0.5 and rows[1]["majority"] == 0
    again = {row["task"]: row["metrics"] for row in run_predict(tmp_path)}  # each task's model
    assert again == {row["task"]: row["metrics"] for row in rows}
    for name, answer in (("CoLA", "0"), ("MNLI-m", NLI[0]), ("AX", NLI[0]), ("STS-B", None)):
        header, *lines = (tmp_path / f"{name}.tsv").read_text().splitlines()
        indices, answers = zip(*(line.split("\t") for line in lines))
        assert header == "index\tprediction" and indices == tuple("01234")
        assert set(answers) == {answer} or name == "STS-B" and 0 <= float(answers[0]) < 2
    start = read_checkpoint(tmp_path / "finetuned-mnli.pt")
    for task in ("rte", "mnli"):
        other = finetune.new_classifier(start, "", task, 32).state_dict()
        for key, value in start["model"].items():
            assert torch.equal(other[key], value) != key.startswith("head."), "the head is new"


def test_files_to_submit():
    """A row's index, and its class as the official files write it, or its whole score."""
    rows = [(("a", "b"), index) for index in (3, 5, 8)]
    for name, predictions, written in (
        ("mnli", [2, 0, 1], ["contradiction", "entailment", "neutral"]),
        ("rte", [1, 0, 1], ["not_entailment", "entailment", "not_entailment"]),
        ("stsb", [-0.5, 2.3456789012, 5.1], ["-0.5", "2.3456789012", "5.1"]),
    ):
        text = predict.prediction_file(finetune.TASKS[name], rows, predictions)
        assert text == "index\tprediction\n" + "".join(
            f"{i}\t{x}\n" for i, x in zip("358", written)
        )


@pytest.mark.slow
def test_squad_run(home, tmp_path):
    """SQuAD v2.0 is learned from contexts longer than the sequences, which are longer than
    max_len."""
    (row,) = run_finetune(tmp_path, "squad_v2 --lr 0.01 --epochs 30 --length 40")
    (again,) = run_predict(tmp_path)
    answers = json.loads((tmp_path / "squad_v2.json").read_text())
    golds = [q.golds for q in squad.read_squad(None, "glue/dev-v2.0.json")]
    assert list(answers) == [str(i) for i in range(24)]
    assert finetune.TASKS["squad_v2"].score(golds, list(answers.values())) == row["metrics"]
    assert row["metrics"]["f1"] > row["majority"] == pytest.approx(8 / 24)
    assert again["metrics"] == row["metrics"]


def test_a_start_is_never_overwritten(home, tmp_path, capsys):
    """A run may be repeated, but not twice at once, nor from the model that it would replace."""
    file, link = tmp_path / "finetuned-cola.pt", tmp_path / "link.pt"
    link.symlink_to(file)
    for _ in range(2):
        assert len(run_finetune(tmp_path, "cola", QUICK)) == 1
    assert "would be overwritten" in one_line(capsys, run_finetune, tmp_path, f"all --ckpt {link}")
    with lock(tmp_path, "fine-tuning", ".cola.lock"):
        assert "another process" in one_line(capsys, run_finetune, tmp_path, "cola")


def test_scratch_has_no_weights(home, tmp_path, monkeypatch):
    """--ckpt scratch takes the shape of the newest run, and not its weights."""
    starts = []
    monkeypatch.setattr(finetune, "finetune", lambda *args: starts.append(args[-3:]) or [])
    monkeypatch.setattr(finetune, "report", lambda results, args: None)
    run_finetune(tmp_path, "cola", QUICK)
    run_finetune(tmp_path, "cola --ckpt scratch", QUICK)
    (pretrained, run, _), (scratch, shaped, _) = starts
    assert pretrained["model"] and not scratch["model"] and shaped == f"scratch, shaped like {run}"
    assert scratch["config"] == pretrained["config"]


def test_a_loss_or_gradient_that_is_not_finite(home, tmp_path, monkeypatch, capsys):
    """Training that diverged (with fp16: in every step) ends with one line, and saves nothing."""
    for flags, loss in (
        ("", lambda out, y: (out * math.nan).sum()),
        ("", lambda out, y: (out - out.detach()).sqrt().sum()),  # only the gradient
        ("--dtype float16", lambda out, y: out.sum() * 1e38),
    ):
        monkeypatch.setattr(F, "mse_loss", loss)
        flags = f"{QUICK} --epochs 12 {flags}"  # fp16's scale falls below 1 in 17 steps
        assert "not finite" in one_line(capsys, run_finetune, tmp_path, "stsb", flags, code=1)
    assert not list(tmp_path.glob("finetuned*"))


HEADER = "sentence1\tsentence2\tlabel\n"
# fmt: off
MISTAKES = [  # flags, content of the task's files if it is wrong, message
    ("all --data_dir glue/CoLA", None, "no training file of GLUE"),
    ("rte", None, "train.tsv does not exist"),
    ("rte", HEADER + "a\tb\tmaybe\n", "train.tsv, line 2 is not in RTE's format ('maybe')"),
    ("rte", "sentence1\tlabel\na\tentailment\n", "not in RTE's format ('sentence2')"),
    ("rte", HEADER, "train.tsv has no rows"),
    ("rte", "sentence1\tsentence2\tsentence2\tlabel\na\tb\tc\tentailment\n", "named 'sentence2'"),
    *(("stsb", f"sentence1\tsentence2\tscore\na\tb\t1\na\tb\t{score}\n", f"line 3 is not {end}")
      for score in ("nan", "inf", "1e400") for end in [f"in STS-B's format ('{score}'"]),
    ("squad", '{"data": [{"paragraphs": [{}]}]}', "no 'context'"),
    ("squad", '{"data": [{"paragraphs": [{"context": 7, "qas": []}]}]}', "has no rows"),
    ("squad_v2", '{"data": []}', "train-v2.0.json has no rows"),
    ("squad_v2", '{"data": null}', "train-v2.0.json is damaged"),
    ("squad", '{"data": [{"paragraphs": [{"context": "a b", "qas": [{"id": "7", "question": "q", '
     '"answers": [{"text": "b", "answer_start": 1}]}]}]}]}', "question 7 has a wrong answer_start"),
]
# fmt: on


@pytest.mark.parametrize("flags, content, message", MISTAKES)
def test_wrong_input_is_one_line(home, tmp_path, capsys, flags, content, message):
    """Each mistake ends with exit code 2 and a line that says what is wrong and where."""
    if content:
        task = finetune.TASKS[flags]
        (tmp_path / task.folder).mkdir(exist_ok=True)
        for split in ("train", "validation"):
            (tmp_path / task.folder / task.file(split)).write_text(content)
        flags += f" --data_dir {tmp_path}"
    assert message in one_line(capsys, run_finetune, tmp_path, flags)


def test_predict_names_what_it_cannot_load(home, tmp_path, capsys):
    """tools.predict needs a fine-tuned model."""
    assert "no finetuned-<task>.pt" in one_line(capsys, run_predict, tmp_path)
    message = one_line(capsys, run_predict, tmp_path, "--ckpt out/run/ckpt.pt")
    assert "not a fine-tuned model" in message
