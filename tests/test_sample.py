"""tools/sample.py: predictions for a text, and the restoring of shuffled sentences."""

import itertools
import math
import shlex

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import finetune
import objectives
from lib.files import read_checkpoint
from lib.squad import Question
from model import UNKNOWN_POS
from tests.conftest import one_line, refuses, run_train
from tools import sample

TEXT = "the quick brown fox jumps over a lazy dog"


@pytest.fixture(scope="module")
def runs(corpus_file, cache, tmp_path_factory):
    """A folder of tiny runs, and fine-tuned models (untrained)."""
    out = tmp_path_factory.mktemp("runs")
    for name, flags in (
        ("mlm", "--objective mlm"),
        ("both", "--objective mlm+pplm"),
        ("binary", "--objective pplm_binary"),
        ("pmlm", "--objective pmlm"),
        ("clm", "--objective clm --pe t5 --n_layer 2"),
        ("nsp", "--objective mlm+nsp"),
        ("tc", "--objective mlm+tc"),
    ):
        run_train(corpus_file, cache, out / name, "--steps", 2, *flags.split())
    for task in ("mnli", "stsb", "squad_v2"):  # as finetune.py saves them
        checkpoint = {**read_checkpoint(out / "mlm"), "source": "run"}
        model = finetune.make_model(checkpoint, task, 16, seed=0)
        checkpoint |= {"task": task, "classes": finetune.TASKS[task].classes, "length": 16}
        checkpoint |= {"row": {}, "model": model.state_dict()}
        torch.save(checkpoint, out / f"{task}.pt")
    return out


# --------------------------------------------------------------------------------------------------
# Tokens and contexts


def test_fill_masks_gives_the_most_likely_tokens(runs):
    """The predictions for [MASK] are the model's five most likely ordinary tokens."""
    model = sample.load_pretraining(runs / "mlm")
    encoder, cfg = model.encoder, model.encoder.config
    ids = encoder.tokenizer.encode("the[MASK] fox[MASK]", allowed_special={"[MASK]"})
    hidden = encoder(torch.tensor([[cfg.cls_id, *ids, cfg.sep_id]]))[0, 1:-1]
    p = model.objectives["mlm"].token_logits(encoder, hidden)[:, : cfg.vocab_size - 8].softmax(-1)
    expected = []
    for row in p[torch.tensor(ids) == cfg.mask_id].tolist():
        best = sorted(range(len(row)), key=lambda i: -row[i])[:5]
        expected.append([(encoder.tokenizer.decode([i]), pytest.approx(row[i])) for i in best])
    found = sample.fill_masks(encoder, model.objectives["mlm"], "the [MASK] fox [MASK]")
    assert found == expected and len(found) == 2


def test_continuation_is_greedy(runs):
    """clm continues a text with the most likely token, again and again, until the sequence is
    full."""
    model = sample.load_pretraining(runs / "clm")
    encoder, clm = model.encoder, model.objectives["clm"]
    for p in encoder.blocks.parameters():
        p.mul_(20)  # so that each token changes the next prediction
    ids = encoder.tokenizer.encode_ordinary("the quick brown fox")
    tokens = [encoder.config.cls_id, *ids]
    while len(tokens) < 16:
        hidden = encoder(torch.tensor([tokens]), causal=True)[0, -1]
        tokens.append(int(clm.token_logits(encoder, hidden)[: encoder.config.cls_id].argmax()))
    found = sample.continue_text(encoder, clm, "the quick brown fox")
    assert found == encoder.tokenizer.decode(tokens[1 + len(ids) :])


def test_pairs_of_texts(runs, said):
    """nsp's probability is the one in its loss; tc's similarities are mean cosines over pairs of
    tokens."""
    model = sample.load_pretraining(runs / "nsp")
    encode, cfg = model.encoder.tokenizer.encode_ordinary, model.encoder.config
    ids = [*encode("the quick fox"), cfg.sep_id, *encode(" over a lazy dog")]
    batch = {"nsp_label": torch.tensor([0]), "nsp_weight": torch.tensor([1.0])}
    hidden = model.encoder(torch.tensor([[cfg.cls_id, *ids, cfg.sep_id]]))
    loss, _ = model.objectives["nsp"].loss(model.encoder, hidden, batch)
    sample.main(["--ckpt", str(runs / "nsp"), "--text", "the quick fox ||| over a lazy dog"])
    assert f"follows the first: {math.exp(-loss.item()):.3f}" in said()

    model, g = sample.load_pretraining(runs / "tc"), []
    for part in ("the quick fox", " over a lazy dog"):
        tokens = torch.tensor([[cfg.cls_id, *encode(part), cfg.sep_id]])
        g.append(list((model.encoder(tokens) - model.encoder.tok(tokens))[0, 1:-1]))
    within = [
        np.mean([F.cosine_similarity(a, b, 0) for b in x if b is not a]) for x in g for a in x
    ]
    across = [F.cosine_similarity(a, b, 0) for a, b in itertools.product(*g)]
    found = sample.context_similarity(model, ["the quick fox", " over a lazy dog"])
    assert found == pytest.approx((np.mean(within), np.mean(across)), abs=1e-5)


# --------------------------------------------------------------------------------------------------
# Order


def perfect(objective, copies=False):
    """Make the pair head predict every true offset, or (copies) every assigned one; for
    pplm_binary, whether both tokens stayed."""

    def scores(encoder, hidden, pos):
        pos = pos[:, 1:-1]
        index = torch.arange(1, pos.size(1) + 1).expand_as(pos)
        offset = pos if copies else index
        label = offset[:, None] - offset[:, :, None] + objective.L - 1
        if objective.n_classes == 2:
            label = ((pos == index)[:, None] & (pos == index)[:, :, None]).long()
        return 50.0 * F.one_hot(label, objective.n_classes or 2 * objective.L - 1)

    objective.head.scores, objective.head.psi = scores, torch.nn.Identity()


@pytest.mark.parametrize("name, copies", [("pplm", False), ("pplm", True), ("pmlm", False)])
def test_a_perfect_model_restores_the_sentence(runs, name, copies):
    """If the model knows every offset, the sentence is restored; if it copies the assigned ones,
    exactly one exchange is made."""
    model = sample.load_pretraining(runs / "both")
    objective = objectives.OBJECTIVES[name](model.encoder, objectives.ObjectiveConfig(name))
    perfect(objective, copies)
    words, shuffled, restored = sample.restore(model.encoder, objective, TEXT)
    n = len(words)
    assert "".join(words) == " " + TEXT
    assert sorted(shuffled.tolist()) == sorted(restored.tolist()) == list(range(n))
    assert sample.correct_pairs(shuffled) < n * (n - 1) / 2
    if copies:
        assert (restored != shuffled).sum() == 2
    else:
        assert restored.tolist() == list(range(n))
        assert sample.correct_pairs(restored) == n * (n - 1) / 2
        assert sample.correct_pairs(restored.flip(0)) == 0
    if name == "pmlm":  # tokens with a masked position may be anywhere, not only first
        _, batch, _ = sample.shuffle(model.encoder, objective, TEXT)
        masked = (batch["pos"][0, 1:-1] == UNKNOWN_POS).nonzero()[:, 0]
        assert set(shuffled[: len(masked)].tolist()) != set(masked.tolist())


def test_best_order_tries_every_exchange():
    """The result of best_order is not worse than hill climbing by a loop from the assigned
    positions, differs from these, and no exchange improves it."""
    generator = torch.Generator().manual_seed(0)

    def total(pos):
        pairs = itertools.permutations(range(5), 2)
        return sum(float(scores[i, j, pos[j] - pos[i] + 6]) for i, j in pairs)

    def climb(pos, assigned):
        while True:
            orders = [pos]
            for i, j in itertools.combinations(range(5), 2):
                orders.append(list(pos))
                orders[-1][i], orders[-1][j] = pos[j], pos[i]
            best = max(orders, key=lambda x: -math.inf if x == assigned else total(x))
            if best == pos:
                return pos
            pos = best

    for _ in range(20):
        scores = torch.randn(5, 5, 2 * 7 - 1, generator=generator)
        assigned = (torch.randperm(5, generator=generator) + 1).tolist()
        found = sample.best_order(scores, torch.tensor(assigned)).tolist()
        assert total(found) >= total(climb(assigned, assigned)) and found != assigned
        assert climb(found, assigned) == found


def test_moved_tokens_are_detected_by_a_perfect_model(runs):
    """If pplm_binary knows which pairs stayed, every token that stayed gets more confidence than
    every token that was moved; the first shuffle of a short text moves something."""
    model = sample.load_pretraining(runs / "binary")
    objective = model.objectives["pplm_binary"]
    perfect(objective)
    _, batch, hidden = sample.shuffle(model.encoder, objective, TEXT)
    [(confidence, stayed, auc)] = sample.detect_moved(objective, model.encoder, hidden, batch)
    assert auc == 1 and set(stayed.tolist()) == {True, False}
    assert confidence[stayed].min() > confidence[~stayed].max()
    for seed in range(20):
        _, batch, _ = sample.shuffle(model.encoder, objective, "the lazy dog", seed)
        assert (batch["pos"][0] != torch.arange(len(batch["pos"][0]))).any()


# --------------------------------------------------------------------------------------------------
# The program


# fmt: off
@pytest.mark.parametrize("ckpt, text, expected", [
    ("both", "the [MASK] fox", "[MASK]: "),
    ("both", "[SEP] [CLS] dog", "original: [SEP] [CLS] dog"),  # typed, they are plain text
    ("pmlm", TEXT, "pairs in the correct order, of "),
    ("binary", TEXT, "AUC of moved against others"),
    ("clm", "the quick", "the quick ..."),
    ("tc", "the quick ||| brown fox", "of different texts"),
])
# fmt: on
def test_every_objective_prints_a_sample(runs, said, ckpt, text, expected):
    """Each objective has its output for the kind of text it takes."""
    sample.main(["--ckpt", str(runs / ckpt), "--text", text])
    assert expected in said()


def test_finetuned_predictions(runs, said):
    """A fine-tuned model prints its classes with the probabilities of its logits, or a score, or
    answers with probabilities that sum to 1."""
    _, model = finetune.load_finetuned(runs / "mnli.pt")
    encoder = model.encoder
    ids = finetune.encode(["a fox", "a dog"], encoder.tokenizer, encoder.config, 16)
    with torch.no_grad():
        p = model(torch.tensor([ids]), None).softmax(-1)[0].tolist()
    sample.main(["--ckpt", str(runs / "mnli.pt"), "--text", "a fox ||| a dog"])
    pairs = sorted(zip(p, finetune.TASKS["mnli"].classes), reverse=True)
    assert said().splitlines()[1:] == [f"{x:.4f}  {name}" for x, name in pairs]

    _, model = finetune.load_finetuned(runs / "stsb.pt")
    [[(_, score)]] = finetune.rank(model, [Question(("a", "b"))])
    sample.main(["--ckpt", str(runs / "stsb.pt"), "--text", "a|||b"])
    assert said().splitlines()[1:] == [f"{score:.3f}"]

    sample.main(["--ckpt", str(runs / "squad_v2.pt"), "--text", "who ||| a"])
    answers = dict(reversed(line.split("  ")) for line in said().splitlines()[1:])
    assert set(answers) == {"a", "(no answer)"}
    assert sum(map(float, answers.values())) == pytest.approx(1, abs=1e-3)
    refuses("fine-tuned", sample.load_pretraining, runs / "mnli.pt")


def test_prompts_until_an_empty_line(runs, said, monkeypatch):
    """Without --text it prompts line by line; a text that does not suit is not the end."""
    lines = iter(["no mask here", "the [MASK] fox", "", "not read"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
    sample.main(["--ckpt", str(runs / "mlm")])
    _, _, error, answer = said().splitlines()
    assert "takes a text with [MASK]" in error
    assert answer.startswith("[MASK]: ") and next(lines) == "not read"


MISTAKES = {
    "--ckpt nowhere": "no checkpoint at nowhere",
    "--ckpt mlm --text 'no mask here'": "takes a text with [MASK]",
    "--ckpt pmlm --text 'a [MASK] b'": "(pmlm) takes a sentence",
    "--ckpt both --text 'the dog'": "too short to shuffle",
    "--ckpt tc --text 'the quick |||'": "0 tokens",
    f"--ckpt pmlm --text '{9 * TEXT}'": "this model takes 2 to 14",
    "--ckpt mnli.pt --text 'one text'": "mnli takes 2 text(s)",
    "--tex a": "--tex",
}


def test_wrong_input_is_one_line(runs, monkeypatch, capsys):
    """A wrong checkpoint, flag or text ends with exit code 2 and one line."""
    monkeypatch.chdir(runs)
    for flags, message in MISTAKES.items():
        assert message in one_line(capsys, sample.main, shlex.split(flags)), flags
