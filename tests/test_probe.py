"""tools/probe.py, blimp.py and lengths.py: indicators, losses, terms of the logits, minimal pairs,
longer sequences."""

import itertools
import json
import lzma
import math
import random
import shlex

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import train
from lib.device import autocast
from model import PE_NAMES, UNKNOWN_POS, Encoder, EncoderConfig, Positions
from objectives import ObjectiveConfig, Pretraining
from tests.conftest import log_of, one_line, run_train
from tools import blimp, lengths, probe

VOCAB, CLS, SEP, MASK = 72, 64, 66, 67


def pretraining(objective="mlm", pe="abs", L=12, n_layer=1, scale=1, norm="post", **settings):
    """A small random model in float64; scale: of its matrices, so that every term matters."""
    torch.manual_seed(0)
    cfg = EncoderConfig(VOCAB, pe, n_layer, 2, 16, 32, max_len=L, dropout=0.0, norm=norm)
    model = Pretraining(Encoder(cfg), ObjectiveConfig(objective, **settings))
    for p in model.parameters():
        p.data.mul_(scale if p.dim() > 1 else 1)
    return model.double().eval().requires_grad_(False)


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
# Indicators and the identical-word probe


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
    """With and without ties."""
    rng = np.random.default_rng(L)
    for A in (rng.random((L, L)), rng.integers(1, 4, (L, L)).astype(float)):
        found = [probe.aiv(A), *probe.order(A, first), probe.sd(A), probe.db(A, reach)]
        assert found == pytest.approx(naive_indicators(A, first, reach), abs=1e-12)
        assert probe.opr(A, first) == found[1]


@pytest.mark.parametrize("pe, bound", [("rel", 0.02), ("alibi", 0.03), ("t5", 0.12), ("none", 0)])
def test_untrained_schemes_have_their_properties(pe, bound):
    """Without [CLS] and [SEP], purely relative schemes have Toeplitz logits (AIV 0; a little more
    after the softmax, whose normalizers differ at the edges), alibi an ordered and balanced map,
    and none a constant one (whose variance is a rounding error)."""
    encoder = Encoder(EncoderConfig(vocab_size=VOCAB, n_layer=1, pe=pe)).double().eval()
    maps = probe.identical_word_maps(encoder, torch.arange(20))
    logits, A = (m.mean(0)[1:-1, 1:-1] for m in maps)
    if pe == "none":
        assert math.isnan(probe.aiv(A)) and probe.order(A) == [0, 1]
    else:
        assert probe.aiv(logits) < 1e-12 and probe.aiv(A) < bound
    if pe == "alibi":
        assert probe.order(A) == [0, 0] and probe.db(A) == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize("pe", ["tupe_r", "abs+rlsin"])
def test_map_equals_a_loop_over_words(pe):
    """The map is the mean of the attention of layer 1 over words, one sequence at a time."""
    encoder = pretraining(pe=pe, n_layer=2, scale=10).encoder
    words = torch.tensor([3, 60, 7, 11] * 5)  # more than one batch
    sequences = [torch.tensor([[CLS] + [w] * 10 + [SEP]]) for w in words.tolist()]
    maps = probe.identical_word_maps(encoder, words)
    for found, of_layer in zip(maps, (encoder.attention_logits, encoder.attention)):
        expected = np.mean([of_layer(x)[0].numpy() for x in sequences], 0)
        np.testing.assert_allclose(found, expected, atol=1e-12)


# --------------------------------------------------------------------------------------------------
# Terms of the attention logits


def random_encoder(pe, norm):
    """-> an encoder with random biases, scales of LayerNorm, ..., and a sequence."""
    encoder = pretraining(pe=pe, norm=norm).encoder
    for p in encoder.parameters():
        p.data.normal_()
    return encoder, torch.tensor([[CLS, 3, 9, 3, 40, 8, SEP]])


@pytest.mark.parametrize("norm", ["post", "pre"])
@pytest.mark.parametrize("pe", [*PE_NAMES, "abs+rope", "sin+alibi"])
def test_terms_add_up_to_the_logits(pe, norm):
    """TUPE eq 6 and whatever else a scheme adds, with random biases and scales of LayerNorm."""
    encoder, tokens = random_encoder(pe, norm)
    total = sum(probe.logit_terms(encoder, tokens).values())
    expected = encoder.attention_logits(tokens)[0]
    torch.testing.assert_close(total, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("pe", ["abs", "tupe_r"])
def test_terms_equal_loops(pe):
    """TUPE eq 6, with a LayerNorm, and eq 11: each pair of tokens by itself."""
    encoder, tokens = random_encoder(pe, "post")
    g, b = encoder.norm.weight, encoder.norm.bias
    W, c = encoder.blocks[0].qkv.weight.view(3, 2, 8, 16), encoder.blocks[0].qkv.bias.view(3, 2, 8)
    table = encoder.scheme.parts["Absolute"].table.weight if pe == "abs" else torch.zeros(12, 16)
    bias, x, p = encoder.scheme.bias(Positions(torch.arange(7))), [], []
    for e, added in zip(encoder.tok.weight[tokens[0]], table):
        sd = ((e + added).var(correction=0) + 1e-5).sqrt()
        x.append(g * (e - e.mean()) / sd + b)
        p.append(g * (added - added.mean()) / sd)
    terms = [*probe.logit_terms(encoder, tokens).values()]
    for h, i, j in itertools.product(range(2), range(7), range(7)):
        queries = W[0, h] @ x[i] + c[0, h], W[0, h] @ p[i]
        keys = W[1, h] @ x[j] + c[1, h], W[1, h] @ p[j]
        expected = [float(q @ k) / math.sqrt(8) for q in queries for k in keys]
        if pe == "tupe_r":
            expected = [expected[0] / math.sqrt(2), float(bias[0, h, i, j])]
        assert [float(term[h, i, j]) for term in terms] == pytest.approx(expected, abs=1e-9)


# --------------------------------------------------------------------------------------------------
# Losses


def test_replaced_tokens():
    """Special tokens stay; random tokens are as frequent as in the text; shuffled sequences keep
    their tokens in another order."""
    torch.manual_seed(0)
    tokens, text = Text(4000).all_sequences(), torch.tensor([1, 1, 1, 2])
    special = tokens >= CLS
    found = probe.replaced_tokens(tokens, CLS, text)
    assert found["true"] is tokens
    assert all((x[special] == tokens[special]).all() for x in found.values())
    drawn = found["random"][~special]
    assert set(drawn.tolist()) == {1, 2} and abs((drawn == 1).float().mean() - 0.75) < 0.03
    assert torch.equal(tokens.sort(1).values, found["shuffled"].sort(1).values)
    moved = (found["shuffled"] != tokens)[~special].float().mean()
    assert 0.8 < moved < 0.95  # one of 9 gets its own position again


@pytest.mark.parametrize("name", ["pplm", "pplm_some", "pplm_binary", "pmlm"])
def test_token_ablation(name):
    """The losses are those of the model on the corrupted validation batch with its tokens replaced;
    where tokens cannot matter, all are the same."""
    model, corpus = pretraining("mlm+" + name, mask_rate=0.3), Text(200)
    found = probe.token_ablation(model, corpus)
    batch = model.corrupt(corpus.all_sequences(), "validation", 0)
    torch.manual_seed(0)
    kinds = probe.replaced_tokens(batch["tokens"], CLS, torch.tensor([5, 6, 7] * 9))
    losses = {kind: float(model({**batch, "tokens": kinds[kind]})[1][name]) for kind in kinds}
    assert {kind: found[kind] for kind in kinds} == pytest.approx(losses)
    assert found["auc"] is None if name == "pmlm" else 0 < found["auc"] < 1
    torch.nn.init.zeros_(model.encoder.tok.weight)
    found = probe.token_ablation(model, corpus)
    assert found["true"] == found["random"] == found["shuffled"]


def test_losses_are_those_of_the_log():
    """In two batches, of 17 and 16: `true` is the validation loss, and so is mlm's loss at true
    positions, also with pplm beside it."""
    corpus, cpu = Text(330), torch.device("cpu")

    def logged(model):
        batches = probe.validation_batches(corpus, 12)
        return train.evaluate(model, batches, autocast(cpu, torch.float32), cpu)["val_loss"]

    pplm, mlm, both = map(pretraining, ("pplm", "mlm", "mlm+pplm"))
    both.load_state_dict(mlm.state_dict(), strict=False)
    found = [probe.token_ablation(pplm, corpus)["true"]]
    found += [probe.mlm_loss(mlm, corpus), probe.mlm_loss(both, corpus)]
    assert found == pytest.approx([logged(pplm), logged(mlm), logged(mlm)], abs=1e-6)


def test_context_cosines_equal_a_loop():
    """TACO app. A.3: the mean cosine of each token with the others of its sequence, and with those
    of other sequences."""
    torch.manual_seed(0)
    h, eligible = torch.randn(4, 6, 5), torch.rand(4, 6) < 0.6
    eligible[0], eligible[1] = True, torch.arange(6) == 2  # sequence 1 has a single token
    tokens, intra, inter = [tuple(x) for x in eligible.nonzero().tolist()], [], []
    for a in tokens:
        cosines = {b: float(F.cosine_similarity(h[a], h[b], dim=0)) for b in tokens if b != a}
        if same := [cosine for b, cosine in cosines.items() if b[0] == a[0]]:
            intra.append(np.mean(same))
            inter.append(np.mean([cosine for b, cosine in cosines.items() if b[0] != a[0]]))
    found = probe.context_cosines(h, eligible)
    expected = [np.mean(intra), np.mean(inter), np.mean(intra) - np.mean(inter)]
    assert [*found.values()] == pytest.approx(expected, abs=1e-6)


# --------------------------------------------------------------------------------------------------
# Minimal pairs and longer sequences


def naive_likelihood(model, row):
    """Each token from all others (mlm), or from those before it (clm)."""
    total, [(name, objective)] = 0, [*model.objectives.items()][:1]
    for i in range(1, len(row) - 1):
        tokens = torch.tensor([row if name == "mlm" else row[: i + 1]])
        tokens[0, i] = MASK
        hidden = model.encoder(tokens, causal=name == "clm")[0, i if name == "mlm" else i - 1]
        logits = objective.token_logits(model.encoder, hidden)
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
        ("mlm+pplm", "tupe_r", naive_likelihood),
        ("clm", "t5", naive_likelihood),
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


@pytest.mark.parametrize("pe, ties", [("none", True), ("alibi", False)])
def test_a_model_without_positions_ties_on_order(pe, ties):
    """`none` gives two orders of the same tokens the same score in float32; others do not."""
    sentences = [ids for ids in random_sentences(100) if len(ids) > 3]
    moved = [random.Random(0).sample(ids, len(ids)) for ids in sentences]
    model = pretraining(pe=pe, n_layer=3, scale=10).float()
    found = blimp.sentence_scores(model, sentences + moved)
    near = abs(np.subtract(*np.split(found, 2))) <= blimp.TIE_NATS
    assert near.all() if ties else near.mean() < 0.2


@pytest.mark.parametrize("pe", ["sin", "rel", "t5", "lsin+rlsin"])
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
        found = np.transpose(lengths.losses_by_position(model, text, length))
        np.testing.assert_allclose(found, expected, atol=1e-9)


# --------------------------------------------------------------------------------------------------
# The programs


@pytest.fixture(scope="module")
def runs(corpus_file, cache, tmp_path_factory):
    """A folder of tiny runs, and one of minimal pairs."""
    out = tmp_path_factory.mktemp("runs")
    for name, flags in (
        ("abs", "--steps 12 --keep_every 4"),
        ("none", "--pe none"),
        ("clm", "--pe t5 --objective clm"),
        ("both", "--pe tupe_r --objective mlm+pplm_binary --dtype float32"),
    ):
        run_train(corpus_file, cache, out / name, "--steps", 4, *flags.split())
    pairs = [("a" * 999, "b"), ("quick brown fox", "fox brown quick"), ("wise owls", "wise xyzzy")]
    pairs = [{"sentence_good": good, "sentence_bad": bad} for good, bad in pairs]
    (out / "pairs").mkdir()
    with lzma.open(out / "pairs" / "own.jsonl.xz", "wt") as handle:
        handle.writelines(json.dumps(pair) + "\n" for pair in pairs)
    (out / "words.tsv").write_text("quick\tfox\t7.5\nlazy\tzebra\t1\n")
    return out


def read(file):
    return json.loads(file.read_text())


def test_probe_of_a_run(runs):
    """probe.json has the map, its indicators and the losses of the log; there is a figure of
    everything that the scheme has."""
    probe.main(["--ckpt", str(runs / "both")])
    found = read(runs / "both" / "probe" / "probe.json")
    encoder = probe.load_pretraining(runs / "both").encoder.double()
    A = probe.identical_word_maps(encoder, probe.probe_words(encoder))[1].mean(0)
    np.testing.assert_allclose(found["map"], A, atol=1e-7)
    assert found["indicators"]["without_specials"] == probe.indicators(A[1:-1, 1:-1])
    logged = log_of(runs / "both")[-1]["val_pplm_binary"]
    assert found["words"]["true"] == pytest.approx(logged, abs=1e-4)
    figures = {file.stem for file in (runs / "both" / "probe").glob("*.png")}
    assert figures == {"map", "vectors", "proximity", "positional"}


def test_terms_of_two_runs(runs):
    """probe.json holds the terms of one head of each run, which add up, and how it was trained."""
    paths = [str(runs / "abs"), str(runs / "both")]
    probe.main(["--terms", *paths, "--text", "the quick $fox$ jumps"])
    for run, path in zip(read(runs / "abs" / "terms" / "probe.json")["runs"], paths):
        *terms, total = np.array([*run["maps"].values()])
        np.testing.assert_allclose(sum(terms), total, atol=0.005)
        model = probe.load_pretraining(path)
        tokens = probe.encode(model.encoder, "the quick $fox$ jumps")
        expected = model.encoder.attention_logits(tokens)[0, run["head"] - 1]
        np.testing.assert_allclose(total, expected, atol=0.001)
        assert run["command"].startswith("python train.py") and len(run["tokens"]) == len(total)
    assert (runs / "abs" / "terms" / "terms.png").exists()


def test_probe_of_runs_and_of_schemes(runs, tmp_path):
    """--runs has a row per run, in the order of the schemes; a score is the median over seeds at
    the best learning rate. --pe needs no run."""
    rows = [(0.1, 0, 0.9), (0.1, 1, 0.1), (0.2, 0, 0.7), (0.2, 1, 0.6)]
    rows = [dict(lr=lr, seed=seed, metrics={"accuracy": x}) for lr, seed, x in rows]
    rows = [json.dumps({"task": "docs", "ckpt": "run", "step": 12, **row}) for row in rows]
    (runs / "abs" / "results.jsonl").write_text("\n".join(rows))
    probe.main(["--runs", str(runs / "*")])
    found = read(runs / "probe" / "probe.json")["runs"]
    assert [run["run"] for run in found] == ["none", "abs", "clm", "both"]
    assert found[1]["val_loss"] == log_of(runs / "abs")[-1]["val_loss"]
    assert found[1]["scores"] == {"docs accuracy": pytest.approx(0.65)}
    assert found[2]["db"] == "inf"  # a causal map
    probe.main(["--pe", "none,alibi", "--out_dir", str(tmp_path)])
    none, alibi = read(tmp_path / "probe.json")["schemes"]
    assert none["aiv"] is None and alibi["opr"] == 0


def test_dynamics_of_a_run(runs, corpus):
    """Each kept checkpoint has its cosines, of contexts and of the embeddings of word pairs."""
    probe.main(["--dynamics", str(runs / "abs"), "--pairs", str(runs / "words.tsv")])
    rows = read(runs / "abs" / "dynamics" / "probe.json")["steps"]
    assert [row["step"] for row in rows] == [4, 8, 12]
    encoder = probe.load_pretraining(runs / "abs" / "ckpt_8.pt").encoder
    tokens = probe.validation_sequences(corpus, 128, 16)
    expected = probe.context_cosines(encoder(tokens), tokens < encoder.config.cls_id)
    assert rows[1]["contextual score"] == pytest.approx(expected["contextual score"], abs=1e-5)
    pairs = [encoder.tokenizer.encode_ordinary(x) for x in (" quick", " fox", " lazy", " zebra")]
    vectors = torch.stack([encoder.tok.weight[ids].mean(0) for ids in pairs])
    expected = float(F.cosine_similarity(vectors[::2], vectors[1::2]).mean())
    assert rows[1]["word pairs"] == pytest.approx(expected, abs=1e-5)


def test_blimp_and_lengths_of_a_run(runs):
    """Without positions, order-only pairs tie; pairs that are too long are left out. Each length
    has its mean loss and the losses by position."""
    blimp.main(["--ckpt", str(runs / "none"), "--pairs", str(runs / "pairs")])
    found = read(runs / "none" / "blimp" / "blimp.json")
    assert (found["pairs"], found["left_out"], found["order_only_pairs"]) == (2, 1, 1)
    assert found["order_only"] == 0.5 and found["ties"] >= 1
    lengths.main(["--ckpt", str(runs / "none"), "--lengths", "40,16"])
    found = read(runs / "none" / "lengths" / "lengths.json")
    assert list(found["lengths"]) == ["16", "40"]
    assert list(found["by_position"]["40"]) == ["0", "32"]
    assert found["lengths"]["16"] == pytest.approx(found["by_position"]["16"]["0"])


@pytest.mark.parametrize(
    "main, flags, message",
    [
        (probe.main, "--ckpt nowhere", "no checkpoint at nowhere"),
        (probe.main, "--terms abs --ckpt abs", "give one of"),
        (probe.main, "--dynamics clm", "--keep_every"),
        (blimp.main, "--ckpt abs --pairs nowhere", "there are no pairs"),
        (blimp.main, "--ckpt abs --pairs abs/log.jsonl", "every line needs texts"),
        (lengths.main, "--ckpt abs --lengths 64", "the position table of pe abs ends at 16"),
        (lengths.main, "--ckpt clm --lengths 64", "--lengths scores mlm; clm is clm"),
    ],
)
def test_wrong_inputs_are_one_line(runs, main, flags, message, monkeypatch, capsys):
    monkeypatch.chdir(runs)
    assert message in one_line(capsys, main, shlex.split(flags))


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
        (probe.main, "--dynamics abs --pairs words.tsv", "probe.json"),
        (blimp.main, "--ckpt none --pairs pairs", "blimp.json"),
        (lengths.main, "--ckpt none --lengths 16,40", "lengths.json"),
    ],
)
def test_no_float64_on_the_device(runs, main, flags, file, request, tmp_path, monkeypatch):
    """On a device that refuses float64, as Apple's, the programs write the same numbers."""
    monkeypatch.chdir(runs)
    main([*flags.split(), "--out_dir", str(tmp_path / "cpu")])
    request.getfixturevalue("emulated")
    main([*flags.split(), "--out_dir", str(tmp_path / "device")])
    assert read(tmp_path / "device" / file) == read(tmp_path / "cpu" / file)
