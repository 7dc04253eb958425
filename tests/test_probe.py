"""tools/probe.py, blimp.py and lengths.py: indicators, losses, figures, minimal pairs, longer
sequences."""

import gzip
import itertools
import json
import lzma
import math
import random
import re
import shlex
from collections import Counter

import numpy as np
import pandas
import pytest
import torch
import torch.nn.functional as F

import train
from lib.device import autocast
from model import PE_NAMES, UNKNOWN_POS, Encoder, EncoderConfig, Positions, parse_pe
from objectives import ObjectiveConfig, Pretraining
from tests.conftest import log_of, one_line, run_train
from tools import blimp, lengths, probe

VOCAB, CLS, SEP, MASK = 72, 64, 66, 67
CPU = torch.device("cpu")


def pretraining(objective="mlm", pe="abs", L=12, n_layer=1, scale=1, **settings):
    """A small random model in float64; scale: of its matrices, so that every term matters."""
    torch.manual_seed(0)
    cfg = EncoderConfig(VOCAB, pe, n_layer, 2, d_model=16, d_ff=32, max_len=L, dropout=0.0)
    model = Pretraining(Encoder(cfg), ObjectiveConfig(objective, **settings))
    for p in model.parameters():
        p.data.mul_(scale if p.dim() > 1 else 1)
    return model.double().eval().requires_grad_(False)


def small_encoder(pe, **settings):
    return pretraining(pe=pe, n_layer=2, scale=10, **settings).encoder


class Text:
    """Stands for a data.Corpus with n tokens of validation text, some of them [SEP]."""

    vocab_size = VOCAB
    train = np.array([5, 6, 7, SEP] * 9, np.uint16)

    def __init__(self, n):
        self.val = np.random.default_rng(0).integers(0, CLS, n)
        self.val[4::23] = SEP

    def n_sequences(self, split, L):
        return len(self.val) // (L - 2)

    def sequences(self, split, index, L):
        whole = self.val[: self.n_sequences(split, L) * (L - 2)].reshape(-1, L - 2)
        return np.pad(whole[index], ((0, 0), (1, 1)), constant_values=[(0, 0), (CLS, SEP)])

    def all_sequences(self):
        return torch.from_numpy(self.sequences("val", np.arange(len(self.val) // 10), 12))


# --------------------------------------------------------------------------------------------------
# Indicators


def naive_indicators(A, first, reach):
    """Wang 2021, app. B, by loops -> aiv, opr, ties, sd, db."""
    L, groups = len(A), {}
    for i, j in np.ndindex(A.shape):
        groups.setdefault(j - i, []).append(A[i, j])
    within = sum(np.var(group) * len(group) for group in groups.values()) / L**2
    wrong, tied, weight = 0, 0, 0
    for i in range(L):
        for s in (A[i, i:][:first], A[i, i::-1][:first]):
            if pairs := list(itertools.combinations(s, 2)):
                wrong += len(s) * np.mean([far > near for near, far in pairs])
                tied += len(s) * np.mean([far == near for near, far in pairs])
                weight += len(s)
    sd = np.mean([abs(A[i, j] - A[j, i]) for i, j in itertools.combinations(range(L), 2)])
    near = [(i, j) for i, j in np.ndindex(A.shape) if 0 < abs(i - j) <= reach]
    balance = sum(A[i, j] for i, j in near if i > j) / sum(A[i, j] for i, j in near if i < j)
    return [within / np.var(A), wrong / weight, tied / weight, sd, balance]


@pytest.mark.parametrize("L, first, reach", [(2, None, 20), (9, 4, 3), (26, 20, 20)])
def test_indicators_equal_loops(L, first, reach):
    """The indicators are those of Wang 2021's formulas, with and without ties."""
    rng = np.random.default_rng(L)
    for A in (rng.random((L, L)), rng.integers(1, 4, (L, L)).astype(float)):
        opr, ties = probe.order(A, first)
        found = [probe.aiv(A), opr, ties, probe.sd(A), probe.db(A, reach)]
        assert opr == probe.opr(A, first) and all(type(x) is float for x in found)
        assert found == pytest.approx(naive_indicators(A, first, reach), abs=1e-12)


def test_indicators_of_known_maps():
    """A Toeplitz map is translation-invariant; a map that decreases with distance is ordered,
    symmetric and balanced; a constant map has no AIV."""
    L = 11
    r = np.arange(L)[None, :] - np.arange(L)[:, None]
    toeplitz = np.random.default_rng(0).random(2 * L)[r]
    assert probe.aiv(toeplitz) < 1e-15 < probe.aiv(toeplitz + np.eye(L, k=2) * np.arange(L))
    near = np.exp(-abs(r) / 3)
    assert (probe.opr(1 / near), probe.opr(near, 4), probe.order(near)) == (1, 0, [0, 0])
    assert probe.sd(near) == 0 and probe.db(near) == pytest.approx(1)
    assert probe.db(np.tril(near)) == math.inf and probe.db(np.triu(near)) == 0
    for value in (1 / 7, 0.3):  # their variance is a rounding error, not 0
        flat = np.full((7, 7), value)
        assert math.isnan(probe.aiv(flat)) and probe.order(flat) == [0, 1]


def test_untrained_schemes_have_their_properties():
    """Without [CLS] and [SEP], none gives a constant map, purely relative schemes Toeplitz logits
    (AIV 0; a little more after the softmax, whose normalizers differ at the edges), and alibi an
    ordered and balanced map."""
    bound = {"rel": 0.02, "alibi": 0.03, "t5": 0.12}
    for pe in ("none", "rel", "t5", "alibi", "abs"):
        torch.manual_seed(1)
        encoder = Encoder(EncoderConfig(vocab_size=VOCAB, n_layer=1, pe=pe)).double().eval()
        maps = probe.identical_word_maps(encoder, torch.arange(20))
        logits, A = (m.mean(0)[1:-1, 1:-1] for m in maps)
        if pe == "none":
            assert np.ptp(A) < 1e-15 and math.isnan(probe.aiv(A))
            assert probe.order(A)[1] == probe.order(A, 20)[1] == 1
        elif pe == "abs":
            assert probe.aiv(A) > 0.5
        else:
            assert probe.aiv(logits) < 1e-12 and probe.aiv(A) < bound[pe]
        if pe == "alibi":
            assert probe.order(A) == [0, 0] and probe.db(A) == pytest.approx(1, abs=1e-3)


# --------------------------------------------------------------------------------------------------
# The identical-word probe and its figures


@pytest.mark.parametrize("pe", ["tupe_r", "abs+rlsin"])
def test_map_equals_a_loop_over_words(pe):
    """The map is the mean of the attention of layer 1 over words, one sequence at a time."""
    encoder, words = small_encoder(pe), torch.tensor([3, 60, 7, 11] * 5)  # more than one batch
    sequences = [torch.tensor([[CLS] + [w] * 10 + [SEP]]) for w in words.tolist()]
    logits, A = probe.identical_word_maps(encoder, words)
    expected = np.mean([encoder.attention(x)[0].numpy() for x in sequences], 0)
    np.testing.assert_allclose(A, expected, atol=1e-12)
    expected = np.mean([encoder.attention_logits(x)[0].numpy() for x in sequences], 0)
    np.testing.assert_allclose(logits, expected, atol=1e-12)
    _, causal = probe.identical_word_maps(encoder, words, causal=True)
    assert probe.db(causal.mean(0)) == math.inf and causal.sum(-1) == pytest.approx(1)


@pytest.mark.parametrize("pe", [name for name in PE_NAMES if name not in ("bert_a", "bert_r")])
def test_every_scheme_has_its_figures(pe):
    """Which figures a scheme has follows from its components; the positional logits are the bias of
    the scheme (bert_ad: the product of its projected positions), and the vectors are its tables."""
    encoder = small_encoder(pe)
    logits, _ = probe.identical_word_maps(encoder, torch.arange(3))
    figures, vectors = probe.figures_of(encoder, logits), probe.position_vectors(encoder)
    names = {component.__name__ for component in parse_pe(pe)}
    added = names & {"Absolute", "Sinusoidal", "LearnedSinusoidal"}
    untied = hasattr(next(iter(encoder.scheme.parts.values())), "positions")
    relative = [name for name in names if "Relative" in name or name == "TupeRFactored"]
    expected = {"position"} if added or untied else set()
    assert set(vectors) == (expected | {"offset"} if relative else expected)
    assert bool(figures["vectors.png"]) == bool(figures["proximity.png"]) == bool(vectors)
    assert bool(figures["frequencies.png"]) == any("Learned" in name for name in names)
    assert len(figures["map.png"]) == 1
    positions = Positions(torch.arange(12))
    bias = encoder.scheme.bias(positions)
    if pe == "bert_ad":
        q, k = encoder.scheme.parts["BertAD"].positions(positions)
        bias = q @ k.transpose(-1, -2) / math.sqrt(4 * 8)
    panels = figures["positional.png"]
    assert len(panels) == (0 if bias is None else 2)
    for panel, b in zip(panels, () if bias is None else bias[0]):
        np.testing.assert_allclose(panel["matrix"], b, atol=1e-12)
    if "LearnedSinusoidal" in names:  # untrained: the default frequencies
        for file in ("proximity.png", "frequencies.png"):
            (_, found), (_, default), *_ = figures[file][0]["curves"].values()
            np.testing.assert_allclose(found, default, atol=1e-5)
    if pe == "rel":
        table = encoder.scheme.parts["Relative"].table.weight
        assert torch.equal(vectors["offset"], table[64 - 11 : 64 + 12])
        assert figures["vectors.png"][0]["first"] == -11
    if untied:  # after the LayerNorm
        assert vectors["position"].mean(1).abs().max() < 1e-9


@pytest.mark.slow
def test_figures_are_drawn(tmp_path):
    """Heatmaps (also with -inf of a causal model, and on a fixed scale) and curves become PNGs."""
    pytest.importorskip("matplotlib")
    A = np.random.default_rng(0).random((12, 12))
    A[0, 1:] = -np.inf
    curves = dict(title="c", xlabel="x", yscale="log", curves={"a": ([1, 2], [3, 4])})
    maps = 7 * [probe.attention_map("t5", np.full((12, 12), 1 / 12))]
    assert not maps[0]["matrix"].any()  # uniform attention is 0
    for name, panels in (("a", [probe.heatmap("m", A)]), ("b", [curves, curves]), ("c", maps)):
        probe.draw(tmp_path / f"{name}.png", panels)
        assert (tmp_path / f"{name}.png").read_bytes()[:4] == b"\x89PNG"


# --------------------------------------------------------------------------------------------------
# Losses


def test_replaced_tokens():
    """Special tokens stay; random tokens are as frequent as in the text; shuffled sequences keep
    their tokens in another order."""
    torch.manual_seed(0)
    tokens, text = Text(4000).all_sequences(), torch.tensor([1, 1, 1, 2])
    tokens[:, 4] = MASK
    special = tokens >= CLS
    found = probe.replaced_tokens(tokens, CLS, text)
    assert list(found) == ["true", "random", "shuffled"] and found["true"] is tokens
    assert all((x[special] == tokens[special]).all() for x in found.values())
    drawn = found["random"][~special]
    assert set(drawn.tolist()) == {1, 2} and abs((drawn == 1).float().mean() - 0.75) < 0.03
    for sequence, other in zip(tokens, found["shuffled"]):
        assert sorted(sequence.tolist()) == sorted(other.tolist())
    moved = (found["shuffled"] != tokens)[~special].float().mean()
    assert 0.8 < moved < 0.95  # one of 9 gets its own position again


@torch.no_grad()
def naive_auc(model, name, batch):
    """For each token, the probability that the assigned offset is the true one, by loops over its
    pairs."""
    objective, aucs = model.objectives[name], []
    hidden = model.encoder(batch["tokens"], batch["pos"])
    s = objective.head.scores(model.encoder, hidden, batch["pos"])
    for b, pos in enumerate(batch["pos"].tolist()):
        tokens, confidence = batch["eligible"][b].nonzero().flatten().tolist(), Counter()
        for i, j in itertools.permutations(tokens, 2):
            p = objective.head.psi(s[b, i - 1, j - 1]).float().softmax(-1)
            p = float(p[1 if name == "pplm_binary" else pos[j] - pos[i] + 11])
            confidence.update({i: p, j: p})
        pairs = [(i, j) for i in tokens for j in tokens if pos[i] == i and pos[j] != j]
        aucs.append(np.mean([confidence[i] > confidence[j] for i, j in pairs]))
    return np.mean(aucs)


@pytest.mark.parametrize("name", ["pplm", "pplm_some", "pplm_binary", "pmlm"])
def test_token_ablation_equals_a_loop(name):
    """The losses are those of the model on the corrupted validation batch with its tokens replaced,
    and the AUC that of a loop over pairs."""
    model, corpus = pretraining("mlm+" + name, mask_rate=0.3), Text(200)
    found = probe.token_ablation(model.train(), corpus)
    assert not model.training and found == probe.token_ablation(model, corpus)
    batch = model.corrupt(corpus.all_sequences(), "validation", 0)
    torch.manual_seed(0)
    kinds = probe.replaced_tokens(batch["tokens"], CLS, torch.tensor([5, 6, 7] * 9))
    losses = {kind: float(model({**batch, "tokens": kinds[kind]})[1][name]) for kind in kinds}
    auc = None if name == "pmlm" else pytest.approx(naive_auc(model, name, batch))
    assert found == {**{kind: pytest.approx(losses[kind]) for kind in kinds}, "auc": auc}
    torch.nn.init.zeros_(model.encoder.tok.weight)  # then tokens cannot matter
    found = probe.token_ablation(model, corpus)
    assert found["true"] == found["random"] == found["shuffled"]


def test_losses_are_those_of_the_log():
    """In two batches, of 17 and 16: `true` is the validation loss, and so is mlm's loss at true
    positions if nothing else is corrupted; with pplm beside it, it is still that one."""
    corpus, float32 = Text(330), autocast(CPU, torch.float32)

    def logged(model):
        batches = probe.validation_batches(corpus, 12)
        assert list(map(len, batches)) == [17, 16]
        return train.evaluate(model, batches, float32, CPU)

    model = pretraining("pplm")
    found = probe.token_ablation(model, corpus)
    assert found["true"] == pytest.approx(logged(model)["val_pplm"], abs=1e-6)
    model, both = pretraining("mlm"), pretraining("mlm+pplm")
    both.load_state_dict(model.state_dict(), strict=False)
    expected = logged(model)["val_loss"]
    assert probe.mlm_loss(model, corpus) == pytest.approx(expected, abs=1e-6)
    assert probe.mlm_loss(both.train(), corpus) == pytest.approx(expected, abs=1e-6)
    assert abs(logged(both)["val_mlm"] - expected) > 1e-4


def test_context_cosines_equal_a_loop():
    """TACO app. A.3: the mean cosine of each token with the others of its sequence, and with those
    of other sequences."""
    torch.manual_seed(0)
    h, eligible = torch.randn(4, 6, 5), torch.rand(4, 6) < 0.6
    eligible[0], eligible[1] = True, torch.arange(6) == 2  # sequence 1 has a single token
    tokens, intra, inter = [tuple(x) for x in eligible.nonzero().tolist()], [], []

    def cosine(a, b):
        return float(F.cosine_similarity(h[a], h[b], dim=0))

    for a in tokens:
        if same := [cosine(a, b) for b in tokens if b[0] == a[0] and b != a]:
            intra.append(np.mean(same))
            inter.append(np.mean([cosine(a, b) for b in tokens if b[0] != a[0]]))
    intra, inter = np.mean(intra), np.mean(inter)
    expected = {"intra-context": intra, "inter-context": inter, "contextual score": intra - inter}
    assert probe.context_cosines(h, eligible) == pytest.approx(expected, abs=1e-6)


def test_correlations_are_pearsons():
    """Over the runs of one objective except none, where the indicator is finite; NaN if it is
    constant."""
    for x, undefined in (([1.0, 1, 1], True), ([1.0, math.inf, 2], True), ([3.0, 1, 2], False)):
        runs = [{"pe": "abs", "objective": "mlm", "scores": {"s": i}, "x": x[i]} for i in range(3)]
        runs.append({"pe": "none", "objective": "mlm", "scores": {"s": 9}, "x": -9.0})
        [found] = probe.correlations(runs, ["x"])
        assert found["runs"] == 3 and math.isnan(found["x"]) == undefined
    assert found["x"] == pytest.approx(np.corrcoef([0, 1, 2], x)[0, 1])


def test_task_scores_are_of_the_last_checkpoint(tmp_path):
    """The score of a task is the median over seeds at the best learning rate, of rows that started
    from the run's last checkpoint and not from a fine-tuned model."""
    rows = []
    for lr, seed, accuracy in ((0.1, 0, 0.9), (0.1, 1, 0.1), (0.2, 0, 0.7), (0.2, 1, 0.6)):
        row = {"task": "docs", "ckpt": "out/run", "step": 9, "lr": lr, "seed": seed}
        rows.append({**row, "metrics": {"accuracy": accuracy}})
    wrong = {"step": 5}, {"ckpt": "out/run/finetuned-mnli.pt (mnli)"}
    rows += [{**rows[0], **change, "metrics": {"accuracy": 1}} for change in wrong]
    text = "\n".join(map(json.dumps, rows))
    (tmp_path / "results.jsonl").write_text(text + '\n{"task": "do')
    assert probe.task_scores(tmp_path, 9) == {"docs accuracy": pytest.approx(0.65)}


# --------------------------------------------------------------------------------------------------
# Minimal pairs


def naive_mlm(model, row):
    total = 0
    for i in range(1, len(row) - 1):
        tokens = torch.tensor([row])
        tokens[0, i] = MASK
        logits = model.objectives["mlm"].token_logits(model.encoder, model.encoder(tokens)[0, i])
        total += float(logits.log_softmax(-1)[row[i]])
    return total


def naive_clm(model, row):
    total = 0
    for i in range(1, len(row) - 1):
        hidden = model.encoder(torch.tensor([row[:i]]), causal=True)[0, -1]
        logits = model.objectives["clm"].token_logits(model.encoder, hidden)
        total += float(logits.log_softmax(-1)[row[i]])
    return total


def naive_offsets(model, row):
    objective = blimp.position_objective(model)
    pos = torch.arange(len(row))[None]
    pos[0, 1:-1] = UNKNOWN_POS if objective.masks_positions else pos[0, 1:-1]
    hidden = model.encoder(torch.tensor([row]), pos)
    s = objective.head.scores(model.encoder, hidden, pos)
    log_p = []
    for i, j in itertools.permutations(range(1, len(row) - 1), 2):
        label = 1 if objective.n_classes == 2 else j - i + 11
        log_p.append(float(objective.head.psi(s[0, i - 1, j - 1]).log_softmax(-1)[label]))
    return np.mean(log_p) if log_p else 0


def random_sentences(n=24):
    rng = random.Random(0)
    return [rng.choices(range(CLS), k=1 + i % 10) for i in range(n)]


@pytest.mark.parametrize(
    "objective, pe, naive",
    [
        ("mlm+pplm", "tupe_r", naive_mlm),
        ("clm", "t5", naive_clm),
        ("pplm", "abs", naive_offsets),
        ("pplm_binary", "rope", naive_offsets),
        ("pmlm", "sin", naive_offsets),
    ],
)
def test_sentence_scores_equal_loops(objective, pe, naive, monkeypatch):
    """In float32, in batches of several lengths, the scores are those of one sentence at a time."""
    monkeypatch.setattr(blimp, "BATCH_TOKENS", 100)
    model, sentences = pretraining(objective, pe, scale=5), random_sentences()
    expected = [naive(model, [CLS, *ids, SEP]) for ids in sentences]
    found = blimp.sentence_scores(model.float(), sentences)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-4)
    with pytest.raises(ValueError, match="tc cannot score sentences"):
        blimp.sentence_scores(pretraining("tc"), sentences)


def test_a_model_without_positions_ties_on_order():
    """`none` gives two orders of the same tokens the same score in float32, also of thousands of
    nats; a scheme with positions does not."""
    sentences = [ids for ids in random_sentences(100) if len(ids) > 3]
    moved = [random.Random(0).sample(ids, len(ids)) for ids in sentences]
    for pe, ties in (("none", True), ("alibi", False)):
        model = pretraining(pe=pe, n_layer=3, scale=10).float()
        found = blimp.sentence_scores(model, sentences + moved)
        near = abs(np.subtract(*np.split(found, 2))) <= blimp.TIE_NATS
        assert near.all() if ties else near.mean() < 0.2
    logits = 13.7 * torch.arange(72.0)
    model.objectives["mlm"].token_logits = lambda encoder, x: logits.expand(len(x), -1)
    a, b = np.split(blimp.sentence_scores(model, sentences + moved), 2)
    assert abs(a).max() > 3000
    np.testing.assert_allclose(a, b, rtol=0, atol=1e-9)


def test_accuracies_are_means_over_pairs_and_paradigms():
    """mean averages the paradigms, phenomena average their pairs, order_only its pairs."""
    columns = "paradigm phenomenon order_only correct".split()
    rows = [
        ("a", "x", True, 1.0),
        ("b", "x", False, 0.5),
        ("b", "x", True, 0.0),
        ("c", "y", False, 1.0),
    ]
    assert blimp.accuracies(pandas.DataFrame(rows, columns=columns)) == {
        "mean": pytest.approx((1 + 0.25 + 1) / 3),
        "order_only": 0.5,
        "order_only_pairs": 2,
        "ties": 1,
        "pairs": 4,
        "phenomena": {"x": 0.5, "y": 1.0},
        "paradigms": {"a": 1.0, "b": 0.25, "c": 1.0},
    }


def write_pairs(file, rows, opener=open):
    with opener(file, "wt", encoding="utf-8") as handle:
        for good, bad, *names in rows:
            row = {"sentence_good": good, "sentence_bad": bad}
            handle.write(json.dumps(row | dict(zip(("UID", "linguistics_term"), names))) + "\n")


def test_pairs_are_read_from_all_files(tmp_path):
    """Plain and compressed files are read, hidden ones are not; names default to the file's."""
    write_pairs(tmp_path / "b.jsonl.xz", [("1", "x", "u", "s-selection")], lzma.open)
    write_pairs(tmp_path / "a.jsonl.gz", [("it is.", "is it.", "v", "binding")], gzip.open)
    write_pairs(tmp_path / "own.jsonl", [("true", "é"), ("2", "3")])
    (tmp_path / "own.jsonl").write_text((tmp_path / "own.jsonl").read_text() + "\n")
    (tmp_path / "._own.jsonl").write_bytes(b"\x00\x05")
    (tmp_path / "notes.txt").write_text("no pairs")
    assert blimp.read_pairs(tmp_path).values.tolist() == [
        ["it is.", "is it.", "v", "binding"],
        ["1", "x", "u", "argument_structure"],
        ["true", "é", "own", "own"],
        ["2", "3", "own", "own"],
    ]


# --------------------------------------------------------------------------------------------------
# Length extrapolation


@pytest.mark.parametrize("pe", ["none", "sin", "rel", "t5", "rope", "alibi", "lsin+rlsin"])
def test_losses_by_position_equal_a_loop(pe, monkeypatch):
    """Sequences of one, two and four times max_len: each loss is that of a single sequence."""
    monkeypatch.setattr(lengths, "TEXT_TOKENS", 48)
    monkeypatch.setattr(lengths, "BATCH_TOKENS", 30)
    model = pretraining("mlm", pe, L=6, mask_rate=0.3)
    text = lengths.masked_text(Text(90), model.objectives["mlm"], 24)
    tokens, original, masked = text
    assert len(tokens) == 44 and masked.sum() == round(0.3 * 42)  # all lengths have the same text
    for length in (6, 13, 24):
        n, expected = length - 2, []
        for start in range(0, 44 - n + 1, n):
            row = torch.tensor([[CLS, *tokens[start : start + n].tolist(), SEP]])
            logits = model.objectives["mlm"].token_logits(model.encoder, model.encoder(row)[0])
            for i in masked[start : start + n].nonzero()[:, 0].tolist():
                loss = -float(logits[i + 1].log_softmax(-1)[original[start + i]])
                expected.append((i + 1, loss))
        positions, losses = lengths.losses_by_position(model, text, length)
        assert positions.tolist() == [position for position, _ in expected]
        np.testing.assert_allclose(losses, [loss for _, loss in expected], atol=1e-9)


@pytest.mark.parametrize("pe", ["abs", "tupe_r", "bert_ad", "tupe_a_free"])
def test_tables_of_positions_have_an_end(pe):
    """A scheme with a table of absolute positions is refused beyond max_len, with what to do."""
    model = pretraining("mlm", pe)
    text = lengths.masked_text(Text(90), model.objectives["mlm"], 24)
    lengths.losses_by_position(model, text, 12)
    message = rf"the position table of pe {pe} ends at 12; .*--init_from RUN --block_size 24"
    with pytest.raises(ValueError, match=message):
        lengths.losses_by_position(model, text, 24)


# --------------------------------------------------------------------------------------------------
# The programs


@pytest.fixture(scope="module")
def runs(corpus_file, cache, tmp_path_factory):
    """A folder of tiny runs, and one of minimal pairs."""
    out = tmp_path_factory.mktemp("runs")
    for name, flags in (
        ("abs", "--steps 12 --keep_every 4 --dtype float32"),
        ("none", "--pe none"),
        ("lsin", "--pe lsin+rlsin --objective pplm"),
        ("clm", "--pe t5 --objective clm"),
        ("both", "--pe alibi --objective mlm+pplm_binary --dtype float32"),
    ):
        run_train(corpus_file, cache, out / name, "--steps", 4, *flags.split())
    (out / "pairs").mkdir()
    rows = [
        ("quick brown fox", "fox brown quick", "a"),
        ("seven wise owls", "seven wise xyzzy", "b"),
        ("a" * 999, "b", "b"),
    ]
    write_pairs(out / "pairs" / "own.jsonl.xz", rows, lzma.open)
    (out / "words.tsv").write_text("quick\tfox\t7.5\nlazy\tzebra\t1\n")
    return out


def read(file):
    return json.loads(file.read_text())


@pytest.fixture
def not_drawn(monkeypatch):
    """Figures are empty files."""
    monkeypatch.setattr(probe, "draw", lambda file, panels: file.touch())


def test_probe_of_a_run(runs, said, monkeypatch, not_drawn):
    """probe.json has the map, its indicators with and without special tokens, and the losses of
    the log; figures that the scheme does not have are left out."""
    probe.main(["--ckpt", str(runs / "both")])
    found = read(runs / "both" / "probe" / "probe.json")
    encoder = probe.load_pretraining(runs / "both").encoder.double()
    words = probe.probe_words(encoder)
    ten = probe.probe_words(encoder, 10)
    assert re.fullmatch("( [A-Za-z]{2,}){10}", encoder.tokenizer.decode(ten.tolist()))
    A = probe.identical_word_maps(encoder, words)[1].mean(0)
    np.testing.assert_allclose(found["map"], A, atol=1e-7)
    assert found["indicators"]["with_specials"] == probe.indicators(A)
    assert found["indicators"]["without_specials"] == probe.indicators(A[1:-1, 1:-1])
    logged = log_of(runs / "both")[-1]["val_pplm_binary"]
    assert list(found["words"]) == ["true", "random", "shuffled", "auc"]
    assert found["words"]["true"] == pytest.approx(logged, abs=1e-4)
    assert f"mlm loss at true positions: {found['mlm']:.3f}" in said()
    figures = {file.stem for file in (runs / "both" / "probe").glob("*.png")}
    assert figures == {"map", "positional"}


def test_what_is_missing_is_left_out(runs, said, monkeypatch):
    """Without matplotlib there are no figures; without the text of the run there are no losses."""

    def draw(file, panels):
        raise ImportError

    monkeypatch.setattr(probe, "draw", draw)
    checkpoint = torch.load(runs / "clm" / "ckpt.pt")
    checkpoint["data"]["documents"] += 1
    torch.save(checkpoint, runs / "clm" / "ckpt_other.pt")
    probe.main(["--ckpt", str(runs / "clm" / "ckpt_other.pt")])
    found, out = read(runs / "clm" / "probe_ckpt_other" / "probe.json"), said()
    assert found["indicators"]["with_specials"]["db"] == "inf"  # a causal map
    assert set(found["words"].values()) == {found["mlm"]} == {None}
    assert "no figures: pip install matplotlib" in out and "is not prepared in" in out


def test_probe_of_runs_and_of_schemes(runs, said, tmp_path, not_drawn):
    """--runs has a row per run, in the order of the schemes, and correlations where there are
    scores; a damaged run is left out; --pe needs no run."""
    (runs / "damaged").mkdir()
    (runs / "damaged" / "ckpt.pt").write_bytes(b"PK")
    for i, name in enumerate(("abs", "none", "lsin")):
        row = {"task": "docs", "ckpt": "run", "step": 12 if name == "abs" else 4, "lr": 1}
        row |= {"seed": 0, "metrics": {"accuracy": i / 10}}
        (runs / name / "results.jsonl").write_text(json.dumps(row))
    probe.main(["--runs", str(runs / "*")])
    out, found = said(), read(runs / "probe" / "probe.json")
    assert [run["run"] for run in found["runs"]] == ["none", "abs", "lsin", "clm", "both"]
    assert out.count("left out") == 1 and "no correlations" in out
    by_name = {run["run"]: run for run in found["runs"]}
    assert by_name["abs"]["val_loss"] == log_of(runs / "abs")[-1]["val_loss"]
    assert by_name["abs"]["scores"] == {"docs accuracy": 0}
    assert by_name["both"]["words true"] == by_name["both"]["words"]["true"]
    assert (runs / "probe" / "maps.png").exists()

    probe.main(["--pe", "none,alibi", "--out_dir", str(tmp_path)])
    none, alibi = read(tmp_path / "probe.json")["schemes"]
    assert none["aiv"] is None and alibi["opr"] == 0 and "| alibi" in said()


def test_dynamics_of_a_run(runs, corpus, not_drawn):
    """Each kept checkpoint has its cosines, of contexts and of the token embeddings of word
    pairs."""
    flags = ["--dynamics", str(runs / "abs"), "--pairs", str(runs / "words.tsv")]
    probe.main(flags)
    found = read(runs / "abs" / "dynamics" / "probe.json")
    assert [row["step"] for row in found["steps"]] == [4, 8, 12]
    encoder = probe.load_pretraining(runs / "abs" / "ckpt_8.pt").encoder
    row = found["steps"][1]

    def vector(word):
        return encoder.tok.weight[encoder.tokenizer.encode_ordinary(" " + word)].mean(0)

    cosines = [
        float(F.cosine_similarity(vector(a), vector(b), dim=0))
        for a, b in (("quick", "fox"), ("lazy", "zebra"))
    ]
    assert row["word pairs"] == pytest.approx(np.mean(cosines), abs=1e-5)
    tokens = probe.validation_sequences(corpus, 128, 16)
    expected = probe.context_cosines(encoder(tokens), tokens < encoder.config.cls_id)
    assert row["contextual score"] == pytest.approx(expected["contextual score"], abs=1e-5)
    assert found["sequences"] == len(tokens)


def test_blimp_of_a_run(runs, said):
    """blimp.json has the accuracies of the pairs that fit; without positions, order-only pairs tie,
    whatever the case of the first letter."""
    flags = ["--ckpt", str(runs / "none"), "--pairs", str(runs / "pairs")]
    blimp.main(flags)
    found = read(runs / "none" / "blimp" / "blimp.json")
    names = "mean order_only order_only_pairs ties pairs phenomena paradigms left_out"
    assert list(found) == names.split()
    assert (found["pairs"], found["left_out"], found["order_only_pairs"]) == (2, 1, 1)
    assert found["order_only"] == 0.5 and found["ties"] >= 1
    assert found["paradigms"]["a"] == 0.5 and "| mean" in said()
    model = probe.load_pretraining(runs / "none")
    encode = model.encoder.tokenizer.encode_ordinary
    texts = " seven wise owls", " seven wise xyzzy"
    good, bad = blimp.sentence_scores(model, list(map(encode, texts)))
    assert found["phenomena"]["b"] == (good > bad)


def test_lengths_of_a_run(runs, said):
    """lengths.json has the mean loss of every length, and the losses by position."""
    lengths.main(["--ckpt", str(runs / "none"), "--lengths", "40,16"])
    found = read(runs / "none" / "lengths" / "lengths.json")
    assert list(found["lengths"]) == ["16", "40"] == list(found["by_position"])
    assert list(found["by_position"]["40"]) == ["0", "32"] and "| 0-31" in said()
    assert found["lengths"]["16"] == pytest.approx(found["by_position"]["16"]["0"])


@pytest.mark.parametrize(
    "main, flags, message",
    [
        (probe.main, "--ckpt nowhere", "no checkpoint at nowhere"),
        (probe.main, "--ckpt damaged", "not a readable checkpoint"),
        (probe.main, "--runs nowhere*", "no folder with a readable ckpt.pt"),
        (probe.main, "--runs abs --ckpt abs", "give one of"),
        (probe.main, "--pe t5 --ckpt abs", "give one of"),
        (probe.main, "--pe foo", "unknown --pe 'foo'"),
        (probe.main, "--dynamics lsin", "--keep_every"),
        (probe.main, "--dynamics abs --pairs bad/a.jsonl", "line 1 is not word<TAB>word"),
        (probe.main, "--pairs words.tsv", "--pairs needs --dynamics"),
        (probe.main, "--ckpt abs --device cuda", "--device cuda: not available"),
        (blimp.main, "--ckpt abs", "--pairs is missing"),
        (blimp.main, "--ckpt abs --pairs damaged", "there are no pairs"),
        (blimp.main, "--ckpt abs --pairs nowhere", "there are no pairs"),
        (blimp.main, "--ckpt abs --pairs bad/a.jsonl", "every line needs texts sentence_good"),
        (blimp.main, "--ckpt abs --pairs bad/b.jsonl", "b.jsonl cannot be read"),
        (blimp.main, "--ckpt abs --pairs bad/c.jsonl.xz", "c.jsonl.xz cannot be read"),
        (blimp.main, "--ckpt abs --pairs bad/d.jsonl", "all pairs are longer than the 14 tokens"),
        (lengths.main, "--ckpt abs", "--lengths None"),
        (lengths.main, "--ckpt abs --lengths 64,x", "--lengths 64,x: give lengths"),
        (lengths.main, "--ckpt abs --lengths 3", "--lengths 3: give lengths"),
        (lengths.main, "--ckpt abs --lengths 64", "the position table of pe abs ends at 16"),
        (lengths.main, "--ckpt none --lengths 9999999", "validation"),
        (lengths.main, "--ckpt clm --lengths 64", "--lengths scores mlm; clm is clm"),
    ],
)
def test_wrong_inputs_are_one_line(runs, main, flags, message, monkeypatch, capsys):
    """A wrong checkpoint, flag or file ends with exit code 2 and one line."""
    monkeypatch.chdir(runs)
    for folder in ("bad", "damaged"):
        (runs / folder).mkdir(exist_ok=True)
    (runs / "damaged" / "ckpt.pt").write_bytes(b"PK")
    (runs / "bad" / "a.jsonl").write_text('{"sentence_good": "a", "sentence_bad": ""}\n')
    (runs / "bad" / "b.jsonl").write_text('{"sentence')
    (runs / "bad" / "c.jsonl.xz").write_bytes(lzma.compress(b"{}")[:-9])
    write_pairs(runs / "bad" / "d.jsonl", [("a" * 999, "b")])
    assert message in one_line(capsys, main, shlex.split(flags))


# --------------------------------------------------------------------------------------------------
# A device without float64


class Emulated(torch.Tensor):
    """A tensor on an emulated Apple GPU: what is computed from it stays there, float64 and numpy
    are refused, and .cpu() brings it back."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is torch.Tensor.numpy:
            raise TypeError("can't convert mps:0 device type tensor to numpy")
        out = super().__torch_function__(function, types, args, kwargs or {})
        if function is torch.Tensor.cpu:
            with torch._C.DisableTorchFunctionSubclass():
                return out.as_subclass(torch.Tensor)
        if isinstance(out, cls) and out.dtype == torch.float64:
            raise TypeError("Cannot convert a MPS Tensor to float64")
        return out


@pytest.fixture
def emulated(monkeypatch):
    """model.to(...) moves every weight to the emulated device."""

    def to(module, device):
        return module._apply(lambda t: t.as_subclass(Emulated))

    monkeypatch.setattr(torch.nn.Module, "to", to)
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    yield
    torch.__future__.set_overwrite_module_params_on_conversion(False)


@pytest.mark.parametrize(
    "main, flags, file",
    [
        (probe.main, "--ckpt both", "probe.json"),
        (probe.main, "--ckpt lsin", "probe.json"),
        (probe.main, "--dynamics abs --pairs words.tsv", "probe.json"),
        (blimp.main, "--ckpt abs --pairs pairs", "blimp.json"),
        (blimp.main, "--ckpt clm --pairs pairs", "blimp.json"),
        (blimp.main, "--ckpt lsin --pairs pairs", "blimp.json"),
        (lengths.main, "--ckpt none --lengths 16,40", "lengths.json"),
    ],
)
def test_no_float64_on_the_device(
    runs, main, flags, file, request, tmp_path, monkeypatch, not_drawn
):
    """On a device that refuses float64, as Apple's, the programs write the same numbers."""
    monkeypatch.chdir(runs)
    main([*flags.split(), "--out_dir", str(tmp_path / "cpu")])
    request.getfixturevalue("emulated")
    main([*flags.split(), "--out_dir", str(tmp_path / "device")])
    assert read(tmp_path / "device" / file) == read(tmp_path / "cpu" / file)


def test_the_emulated_device_refuses_float64(emulated):
    """The emulation works: what is computed from its weights cannot become float64 there."""
    model = pretraining().float().to("mps")
    hidden = model.encoder(torch.zeros(1, 12, dtype=torch.long))
    assert type(hidden) is Emulated and type(hidden.cpu()) is torch.Tensor
    with pytest.raises(TypeError, match="float64"):
        hidden.double()
    with pytest.raises(TypeError, match="float64"):
        model.double()
    assert model.cpu().double().encoder.tok.weight.dtype == torch.float64
