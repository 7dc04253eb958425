"""tools/sample.py: predictions for a text, and the restoring of shuffled sentences."""

import io
import itertools
import json
import math
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import finetune
import objectives
from lib.files import read_checkpoint
from lib.restore import best_order, exchange_words
from model import UNKNOWN_POS
from results import restore
from test_all import pretraining, sequences
from tests.conftest import run_train
from tools import sample

TEXT = "the quick brown fox jumps over a lazy dog"


@pytest.fixture(scope="module")
def runs(corpus_file, cache, tmp_path_factory):
    """A folder of tiny runs, and of a model fine-tuned on mnli (untrained)."""
    out = tmp_path_factory.mktemp("runs")
    for name in ("mlm+nsp+pplm+tc", "pplm_binary", "clm"):
        run_train(corpus_file, cache, out / name, "--steps", 2, "--objective", name, "--pe", "t5")
    checkpoint = read_checkpoint(out / "clm")
    model = finetune.new_classifier(checkpoint, "", "mnli", 16)
    checkpoint |= {"task": "mnli", "classes": finetune.TASKS["mnli"].classes, "length": 16}
    torch.save(checkpoint | {"row": {}, "model": model.state_dict()}, out / "mnli.pt")
    return out


def test_predictions_for_masks_and_pairs(runs, capsys):
    """For [MASK], the five most likely ordinary tokens are given; nsp's probability is the one in
    its loss."""
    model = objectives.load(runs / "mlm+nsp+pplm+tc")
    encoder, heads, cls_id = model.encoder, model.objectives, model.encoder.config.cls_id
    tokens = sample.encode(encoder, "the [MASK] fox")
    assert encoder.tokenizer.decode(tokens[0].tolist()) == "[CLS]the[MASK] fox[SEP]"
    hidden = encoder(tokens)[tokens == encoder.config.mask_id]
    p = heads["mlm"].token_logits(encoder, hidden)[0, :cls_id].softmax(-1).tolist()
    best = sorted(range(cls_id), key=lambda i: -p[i])[:5]
    expected = [(encoder.tokenizer.decode([i]), pytest.approx(p[i])) for i in best]
    assert sample.fill_masks(encoder, heads["mlm"], "the [MASK] fox") == [expected]

    parts = ["the quick fox", " over a lazy dog"]
    batch = {"nsp_label": torch.tensor([0]), "nsp_weight": torch.tensor([1.0])}
    loss, _ = heads["nsp"].loss(encoder, encoder(sample.encode(encoder, *parts)), batch)
    sample.main(["--ckpt", str(runs / "mlm+nsp+pplm+tc"), "--text", "|||".join(parts)])
    assert f"follows the first: {math.exp(-loss):.3f}" in capsys.readouterr().out


def test_best_order_and_restoring(runs):
    """best_order ends where the model, shown every exchange, finds none that raises the mean
    log-probability of the offsets by more than the margin. A model that knows all offsets restores
    a sentence."""
    generator, n, L = torch.Generator().manual_seed(0), 5, 9  # n: all exchanges are proposed
    moved = 0
    for margin in [0.0, 0.2, 9.0] * 10:
        logits = torch.randn(n, n, 2 * L - 1, generator=generator)

        def predict(pos):  # the model sees the positions
            return (logits * pos[:, None, None]).sin().log_softmax(-1)

        def score(pos):
            log_p = predict(torch.tensor(pos))
            pairs = list(itertools.permutations(range(n), 2))
            return np.mean([log_p[a, b, pos[b] - pos[a] + L - 1].item() for a, b in pairs])

        given = torch.randperm(n, generator=generator) + 1
        found = best_order(predict, given, margin).tolist()
        for i, j in itertools.combinations(range(n), 2):
            pos = list(found)
            pos[i], pos[j] = pos[j], pos[i]
            assert score(pos) <= score(found) + margin + 1e-6
        changed = found != given.tolist()
        assert sorted(found) == sorted(given.tolist()) and not (changed and margin == 9)
        assert not changed or score(found) > score(given.tolist()) + margin - 1e-6
        moved += changed
    assert moved > 10

    model = objectives.load(runs / "mlm+nsp+pplm+tc")
    pplm = model.objectives["pplm"]
    n = sample.encode(model.encoder, " " + TEXT).size(1) - 2
    know_offsets(pplm, torch.arange(1, n + 1))
    words, exchanged, restored = sample.restore(model, TEXT)
    assert "".join(words) == " " + TEXT
    assert restored.tolist() == sorted(exchanged.tolist()) == list(range(n)) != exchanged.tolist()
    assert sample.correct_pairs(restored) == math.comb(n, 2) > sample.correct_pairs(exchanged)


def know_offsets(objective, true):
    """Let the model of a position objective know the true positions (n,) of the inner tokens; None:
    it believes those that it is given -> a list of what it is given."""
    given, true = [], None if true is None else true - true[:, None]

    def class_logits(encoder, states, pos):
        given.append(pos[0, 1:-1])
        assigned = given[-1] - given[-1][:, None]
        label = objective.label(assigned if true is None else true, assigned)
        return 50.0 * F.one_hot(label, objective.n_classes or 2 * objective.max_len - 1)[None]

    objective.head.scores, objective.head.psi = class_logits, torch.nn.Identity()
    return given


@pytest.mark.parametrize("name", ["pplm", "pplm_some", "pplm_binary", "pmlm"])
def test_restoring_with_each_objective(name):
    """A model that knows which offsets are true restores exchanged words. pmlm masks the positions
    of exchanged words."""
    model, true = pretraining(name, "t5"), torch.arange(1, 11)
    seen, given = know_offsets(model.objectives[name], true), true.clone()
    given[[2, 7]] = given[[7, 2]]
    assert model.objectives[name].restore(model.encoder, sequences(1), given).equal(true)
    assert (seen[0] == UNKNOWN_POS).nonzero()[:, 0].tolist() == [2, 7] * (name == "pmlm")


def test_exchanged_words():
    """Two words of one token that differ, however they are written, exchange their positions; with
    fewer than two words, any two tokens do."""
    strings, exchanged = [" The", " quick", "er", " fox", ",", " the", " 42", " dog"], set()
    for seed in range(50):
        pos = exchange_words(strings, torch.Generator().manual_seed(seed))
        exchanged |= {frozenset((pos != torch.arange(1, 9)).nonzero()[:, 0].tolist())}
    assert exchanged == {frozenset(x) for x in itertools.combinations((5, 3, 7), 2)}
    assert exchange_words(["a", "b"], torch.Generator()).tolist() == [2, 1]


def test_rates_of_restoring(runs, tmp_path, capsys, monkeypatch):
    """results.restore: a model that knows the offsets restores all sentences, one that believes the
    given positions leaves them, and one that knows wrong offsets gets them wrong."""
    text, n = tmp_path / "text.txt", 9
    text.write_text(f"{TEXT}\n" * 4)
    true = torch.arange(1, n + 1)
    for known, outcome in (
        (true, "2 restored, 0 left, 0 wrong"),
        (None, "0 restored, 2 left, 0 wrong"),
        (true.flip(0), "0 restored, 0 left, 2 wrong"),
    ):
        model = objectives.load(runs / "mlm+nsp+pplm+tc")
        know_offsets(model.objectives["pplm"], known)
        monkeypatch.setattr(objectives, "load", lambda path: model)
        restore.main([str(runs / "mlm+nsp+pplm+tc"), "--text", str(text)])
        assert capsys.readouterr().out.count(outcome) == 2  # even and odd lines
        monkeypatch.undo()


# {run: {text: a part of what is printed}}
PRINTED = {
    "mlm+nsp+pplm+tc": {
        "[SEP] [CLS] dog fox": "original:  [SEP] [CLS] dog fox",  # typed, they are plain text
        "the [MASK] fox": "[MASK]: ",
        "the dog": "original:  the dog",
        "quick |||": "tokens",
        9 * TEXT: "this model takes 2 to 14",
    },
    "pplm_binary": {TEXT: "restored:", "a [MASK]": "takes a sentence"},
    "clm": {"the quick": "the quick ..."},
    "mnli.pt": {"a fox ||| a dog": "entailment", "one text": "mnli takes 2 text(s)"},
}


@pytest.mark.parametrize("ckpt", PRINTED)
def test_prompts_until_an_empty_line(runs, monkeypatch, capsys, ckpt):
    """Each objective has its output for the kind of text it takes; a text that does not suit is one
    line, and not the end, nor are bytes that are not UTF-8. A closed input is."""
    lines = b"\xff\n" + "\n".join([*PRINTED[ckpt], "", "not read"]).encode()
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(lines), "utf-8"))
    sample.main(["--ckpt", str(runs / ckpt)])
    printed = capsys.readouterr().out
    assert all(part in printed for part in PRINTED[ckpt].values())
    assert sys.stdin.read() == "not read"
    monkeypatch.setattr("sys.stdin", None)
    sample.main(["--ckpt", str(runs / ckpt)])


def test_texts_are_printed_without_control_characters(cache, tmp_path, runs, capsys):
    """A text with terminal escapes and bells is printed escaped, wherever it comes from."""
    rows = [{"text": f"fox \x1b[31mred\x07 bell\r over \x9b {i} " * 12} for i in range(40)]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    run_train(str(tmp_path / "a.jsonl"), cache, tmp_path / "run", "--steps", 1)
    [line] = [x for x in capsys.readouterr().out.split("\n") if "sample:" in x]
    assert "\\x1b[31m" in line and line.isprintable()
    assert sample.decode(["a\x1b[31m", " b\n"], [0, 1]) == "a\\x1b[31m b"
