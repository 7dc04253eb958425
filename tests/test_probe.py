"""tools/probe.py, terms.py, dynamics.py, blimp.py and lengths.py: indicators, losses, terms of the
logits, checkpoints of a run, minimal pairs, longer sequences."""

import itertools
import json
import lzma
import math
import random
import shlex
import shutil
from collections import defaultdict

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.metrics import roc_auc_score

import data
import objectives
from model import UNKNOWN_POS
from objectives import random_tokens, seeded_generator, shuffled_positions
from test_all import ALL_PE, CLS, MASK, SEP, close, corrupted, enlarge, pretraining, sequences, tiny
from tests.conftest import log_of, one_line, run_train
from tools import blimp, dynamics, gap, lengths, probe, terms
from tools.output import output_folder


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
    """The indicators are those of Wang 2021, app. B, with and without ties."""
    rng = np.random.default_rng(L)
    for A in (rng.random((L, L)), rng.integers(1, 4, (L, L)).astype(float)):
        found = [probe.aiv(A), *probe.order(A, first), probe.sd(A), probe.db(A, reach)]
        assert probe.opr(A, first) == found[1]
        assert found == pytest.approx(naive_indicators(A, first, reach), abs=1e-12)


@pytest.mark.parametrize("pe", ["tupe_r", "abs+rlsin"])
def test_identical_word_probe_equals_a_loop(pe):
    """The map is the mean of the attention of layer 1 over words, one sequence at a time."""
    encoder, words = tiny(pe), torch.tensor([3, 60, 7, 11] * 5)  # more than one batch
    alone = [torch.tensor([[CLS] + [w] * 10 + [SEP]]) for w in words.tolist()]
    maps = probe.identical_word_maps(encoder, words)
    logits = [probe.attention_logits(encoder, x)[0] for x in alone]
    for found, wanted in zip(maps, (logits, [s.softmax(-1) for s in logits])):
        close(torch.from_numpy(found), sum(wanted) / len(alone))


@pytest.mark.parametrize("norm", ["post", "pre"])
@pytest.mark.parametrize("pe", ALL_PE)
def test_terms_add_up_to_the_logits(pe, norm):
    """The terms of TUPE eq 6 and what else a scheme adds are all of the model's logits."""
    encoder, tokens = tiny(pe, norm=norm), sequences(1)
    logits = probe.attention_logits(encoder, tokens)
    close(sum(terms.logit_terms(encoder, tokens).values()), logits[0])
    close(logits.softmax(-1), encoder.attention(tokens))


def test_terms_are_those_of_the_equation():
    """Through a LayerNorm, whose bias belongs to the token, each term is that of TUPE eq 6."""
    encoder, tokens, D = tiny("abs"), sequences(1), 8
    e, p = encoder.tok.weight[tokens[0]], encoder.scheme.parts["Absolute"].table.weight[:12]
    sd = ((e + p).var(1, correction=0, keepdim=True) + 1e-5).sqrt()
    x = encoder.norm.weight * (e - e.mean(1, keepdim=True)) / sd + encoder.norm.bias
    p = encoder.norm.weight * (p - p.mean(1, keepdim=True)) / sd
    (W_Q, W_K, _), (b_Q, b_K, _) = (w.chunk(3) for w in encoder.blocks[0].qkv.parameters())
    pairs = itertools.product((x @ W_Q.T + b_Q, p @ W_Q.T), (x @ W_K.T + b_K, p @ W_K.T))
    for term, (q, k) in zip(terms.logit_terms(encoder, tokens).values(), pairs, strict=True):
        for h in range(2):
            dims = slice(h * D, h * D + D)
            close(term[h], q[:, dims] @ k[:, dims].T / math.sqrt(D))


def test_random_tokens_and_shuffled_positions():
    """Special tokens stay; random tokens are as frequent as in the batch; other tokens get each
    other's positions, in every sequence in another order."""
    tokens, generator = sequences(500), torch.Generator().manual_seed(0)
    tokens[(tokens < CLS) & (tokens > 9)] = 9
    ordinary, index = tokens < CLS, torch.arange(12).expand(500, -1)
    drawn = random_tokens(tokens, CLS, generator)
    assert torch.equal(drawn[~ordinary], tokens[~ordinary])
    shares = [(x[ordinary] == 9).double().mean() for x in (drawn, tokens)]
    assert abs(shares[0] - shares[1]) < 0.02 and (drawn != tokens).any()
    pos = shuffled_positions(ordinary, generator)
    assert torch.equal(pos[~ordinary], index[~ordinary])
    assert torch.equal(pos.sort(1).values, index) and len(pos.unique(dim=0)) > 490
    assert 0.8 < (pos != index)[ordinary].double().mean() < 0.95  # one of 10 keeps its own


@pytest.mark.parametrize("name", ["pplm", "pplm_binary"])
def test_detection_of_moved_tokens_equals_a_loop(name):
    """A token's confidence is the mean probability, over its pairs in both directions, that the
    assigned offset is the true one; the AUC is scikit-learn's."""
    model, tokens, batch = corrupted(name)
    model.eval().requires_grad_(False)
    encoder, objective, pos = model.encoder, model.objectives[name], batch["pos"]
    states = encoder.hidden_states(tokens, pos)
    p = objective.head.psi(objective.head.scores(encoder, states, pos)).softmax(-1)
    found = probe.detect_moved(encoder, objective, batch)
    for b, (confidence, stayed, auc) in enumerate(found):
        index, expected = batch["eligible"][b].nonzero()[:, 0].tolist(), []
        for i in index:
            of_pairs = []
            for j, k in itertools.permutations(index, 2):
                if i in (j, k):
                    label = 1 if name == "pplm_binary" else pos[b, k] - pos[b, j] + 11
                    of_pairs.append(p[b, j - 1, k - 1, label].item())
            expected.append(np.mean(of_pairs))
        assert confidence.tolist() == pytest.approx(expected, abs=1e-6)
        assert stayed.tolist() == [int(pos[b, i]) == i for i in index]
        assert auc == pytest.approx(roc_auc_score(stayed, confidence))
    assert b == len(tokens) - 1


def naive_score(model, row):
    """The sum of log p of each token given all others (mlm) or those before it (clm), or the mean
    log p of the true offsets."""
    [(name, objective)], inner = [*model.objectives.items()][:1], range(1, len(row) - 1)
    log_p = []
    if objective.kind == "position":
        pos = torch.arange(len(row))[None]
        pos[:, 1:-1] = UNKNOWN_POS if name == "pmlm" else pos[:, 1:-1]
        states = model.encoder.hidden_states(torch.tensor([row]), pos)
        psi = objective.head.psi(objective.head.scores(model.encoder, states, pos)[0])
        for i, j in itertools.permutations(inner, 2):
            log_p.append(float(psi[i - 1, j - 1].log_softmax(-1)[j - i + 11]))
        return np.mean(log_p)
    for i in inner:
        tokens = torch.tensor([row if name == "mlm" else row[: i + 1]])
        tokens[0, i] = MASK
        hidden = model.encoder(tokens, causal=name == "clm")[0, i if name == "mlm" else i - 1]
        logits = objective.token_logits(model.encoder, hidden)
        log_p.append(float(logits.log_softmax(-1)[row[i]]))
    return sum(log_p)


@pytest.mark.parametrize(
    "objective, pe", [("mlm+pplm", "tupe_r"), ("clm", "t5"), ("pplm", "rope"), ("pmlm", "sin")]
)
def test_sentence_scores_equal_loops(objective, pe, monkeypatch):
    """In batches of several lengths, the scores are those of one sentence at a time."""
    monkeypatch.setattr(blimp, "BATCH_TOKENS", 100)
    model = pretraining(objective, pe).requires_grad_(False)
    sentences = [random.Random(i).choices(range(CLS), k=2 + i % 9) for i in range(24)]
    expected = [naive_score(model, [CLS, *ids, SEP]) for ids in sentences]
    assert blimp.sentence_scores(model, sentences) == pytest.approx(expected, abs=1e-5)


@pytest.fixture(scope="module")
def runs(corpus_file, cache, tmp_path_factory):
    """A folder of tiny runs, validated in batches of 5 and 4 sequences, and minimal pairs."""
    out = tmp_path_factory.mktemp("runs")
    pairs = [("a" * 999, "b"), ("quick brown fox", "fox brown quick"), ("wise owls", "wise xyzzy")]
    with lzma.open(out / "pairs.jsonl.xz", "wt") as handle:
        for good, bad in (*pairs, pairs[-1]):
            pair = {"sentence_good": good, "sentence_bad": bad, "UID": good[:4]}
            handle.write(json.dumps(pair) + "\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data, "VAL_BATCH", 5)
        for name, flags in (
            ("abs", "--steps 12 --keep_every 4"),
            ("none", "--pe none"),
            ("clm", "--pe t5 --objective clm"),
            # a learning rate that makes the weights large, so that positions matter
            ("both", "--pe rel --objective mlm+pplm_binary --dtype float32 --lr 0.1"),
        ):
            run_train(corpus_file, cache, out / name, "--steps", 4, *flags.split())
        yield out


def results(main, out, *flags):
    """Run a program -> what it writes as JSON to the new folder `out`."""
    main([*map(str, flags), "--out_dir", str(out)])
    [file] = out.glob("*.json")
    return json.loads(file.read_text())


def test_losses_of_a_run(runs, corpus, tmp_path):
    """The token ablation has the losses of the corrupted sequences with their tokens replaced; the
    first is that of the log. mlm is scored at true positions."""
    found = results(probe.main, tmp_path / "out", "--ckpt", runs / "both")
    aiv = pytest.approx(probe.aiv(np.array(found["map"])), abs=1e-3)  # of a rounded map
    assert found["indicators"]["with_specials"]["aiv"] == aiv
    assert {file.stem for file in tmp_path.glob("out/*.png")} == {"map", "vectors", "proximity"}
    model, expected = objectives.load(runs / "both"), defaultdict(float)
    for number, tokens in enumerate(probe.validation_batches(corpus, 16)):
        batch, share = model.corrupt(tokens, "validation", number), len(tokens) / 9
        generator, x = seeded_generator("cpu", "ablation", number), batch["tokens"]
        pos = shuffled_positions(batch["eligible"], seeded_generator("cpu", "ablation", number))
        expected["mlm_shuffled"] += share * float(model({**batch, "pos": pos})[1]["mlm"])
        true = {**batch, "pos": torch.arange(16).expand_as(tokens)}
        expected["mlm"] += share * float(model(true)[1]["mlm"])
        order = shuffled_positions(x < model.encoder.config.cls_id, generator)
        drawn = random_tokens(x, model.encoder.config.cls_id, generator)
        for kind, y in (("true", x), ("random", drawn), ("shuffled", x.gather(1, order))):
            expected[kind] += share * float(model({**batch, "tokens": y})[1]["pplm_binary"])
    assert 0 < found["words"].pop("auc") < 1
    losses = {key: found[key] for key in ("mlm", "mlm_shuffled")}
    assert losses | found["words"] == pytest.approx(expected, abs=1e-5)
    logged = log_of(runs / "both")[-1]["val_pplm_binary"]
    assert found["words"]["true"] == pytest.approx(logged, abs=1e-4)


def test_comparison_of_runs_and_of_schemes(runs, tmp_path, monkeypatch):
    """--runs has a row per run, whose score is the median over seeds at the best learning rate,
    with the last settings (here 5 epochs); tools.terms draws two runs; --pe needs no run."""
    rows = [(1, 0.3, 0, 1.0), (5, 0.1, 0, 0.9), (5, 0.1, 1, 0.1), (5, 0.2, 0, 1.0)]
    rows += [(5, 0.2, 0, 0.7), (5, 0.2, 1, 0.6)]  # seed 0 was repeated: the last one counts
    rows = [dict(epochs=n, lr=lr, seed=s, metrics={"accuracy": x}) for n, lr, s, x in rows]
    rows = [{"task": "docs", "ckpt": "run", "step": 12, **row} for row in rows]
    # Scores from an earlier checkpoint and with other settings do not count.
    rows = [rows[3] | {"n_train": 7, "seed": 2}, *rows, rows[3] | {"step": 6}]
    rows = map(json.dumps, rows)
    (runs / "abs" / "results.jsonl").write_text("\n".join(rows))
    shutil.copytree(runs / "none", tmp_path / "lr[1]")
    [run] = results(probe.main, tmp_path / "one", "--runs", tmp_path / "lr[1]")["runs"]
    assert run["run"] == "lr[1]"  # a folder, not a pattern
    table = results(probe.main, tmp_path / "runs", "--runs", runs / "*")["runs"]
    losses = [run["mlm"] or run["val_loss"] for run in table]
    assert losses == sorted(losses)
    found = {run["run"]: run for run in table}
    assert {*found} == {"none", "abs", "both", "clm"}
    assert found["abs"]["scores"] == {"docs accuracy": pytest.approx(0.65)}
    assert found["clm"]["db"] == "inf"  # a causal map
    # Of the terms, those of the head are drawn in which positions matter most.
    maps = [torch.zeros(2, 9, 9) for _ in range(2)]
    maps[0][0], maps[1][1] = torch.randn(9, 9), 0.1 * torch.randn(9, 9)
    monkeypatch.setattr(terms, "logit_terms", lambda *_: dict(zip(("tokens", "positions"), maps)))
    flags = "--ckpt", runs / "abs", runs / "both", "--text", "$a$"
    assert [run["head"] for run in results(terms.main, tmp_path / "terms", *flags)["runs"]] == [
        2,
        2,
    ]
    assert output_folder(runs / "abs", "terms", None) == runs / "abs" / "terms"
    assert output_folder(runs / "abs" / "ckpt_4.pt", "terms", None).name == "terms_ckpt_4"
    assert (tmp_path / "terms" / "terms.png").exists()
    none, alibi = results(probe.main, tmp_path / "pe", "--pe", "none,alibi")["schemes"]
    assert none["aiv"] is None and alibi["opr"] == 0 and alibi["aiv"] < 0.03


def test_dynamics_of_a_run(runs, corpus, tmp_path, monkeypatch):
    """TACO app. A.3: the mean cosine of each token with the others of its sequence, and with those
    of other sequences, for each kept checkpoint; the spread of hidden states; the mean cosine of
    pairs of words."""
    load = objectives.load

    def load_enlarged(file):  # so that every weight matters
        torch.manual_seed(0)
        return enlarge(load(file))

    monkeypatch.setattr(objectives, "load", load_enlarged)
    pairs = tmp_path / "pairs.tsv"
    pairs.write_text("array\tvalues\t9.1\nreturn\tdocumentation\t1.5\n")
    flags = ["--ckpt", runs / "abs", "--pairs", pairs]
    rows = results(dynamics.main, tmp_path / "out", *flags)["steps"]
    assert [row["step"] for row in rows] == [4, 8, 12]
    encoder = objectives.load(runs / "abs" / "ckpt_8.pt").encoder
    tokens = dynamics.validation_sequences(corpus, 128, 16)
    chosen = (tokens < encoder.config.cls_id).nonzero()
    hidden = encoder(tokens)[tuple(chosen.T)]
    rest = hidden
    for axis in (0, 1):  # without the mean of each sequence, then that of each position
        at = chosen[:, axis]
        rest = rest - torch.stack([rest[at == n].mean(0) for n in at.tolist()])
    spread = (rest.square().mean() / hidden.square().mean()).sqrt()
    vectors = F.normalize(hidden, dim=1)
    cosines, same = vectors @ vectors.T, chosen[:, :1] == chosen[:, 0]
    inter = [row[others].mean() for row, others in zip(cosines, ~same)]
    intra = [row[others].mean() for row, others in zip(cosines, same.fill_diagonal_(False))]
    words = []
    for word in (" array", " values", " return", " documentation"):
        ids = encoder.tokenizer.encode_ordinary(word)
        words.append(sum(encoder.tok.weight[i] for i in ids))  # a cosine ignores length
    (a, b, c, d), last = F.normalize(torch.stack(words), dim=1), f"spread {encoder.config.n_layer}"
    names = ("intra-context", "inter-context", last, "word pairs")
    found = [rows[1][name] for name in names]
    expected = [np.mean(intra), np.mean(inter), float(spread), float((a @ b + c @ d) / 2)]
    assert found == pytest.approx(expected, abs=1e-5)


def test_blimp_of_a_run(runs, tmp_path):
    """Without positions, two orders of the same tokens tie; the more likely sentence wins (the one
    with fewer tokens in an untrained model); too long pairs are left out; paradigms count equally,
    however many pairs they have."""
    pairs = runs / "pairs.jsonl.xz"
    found = results(blimp.main, tmp_path, "--ckpt", runs / "none", "--pairs", pairs)
    assert (found["pairs"], found["left_out"], found["order_only_pairs"]) == (3, 1, 1)
    assert (found["order_only"], found["mean"]) == (0.5, 0.75)


def test_gap_between_runs(runs, corpus, monkeypatch, capsys):
    """The losses are those of single sequences; the interval is that of a mean; runs whose masked
    tokens differ are refused."""
    monkeypatch.setattr(gap, "BATCH", 1)
    gap.main([str(runs / name) for name in ("none", "abs", "none")])
    lines = [line.split("|") for line in capsys.readouterr().out.splitlines()[-3:]]
    sequences, losses = data.validation_sequences(corpus, gap.SEQUENCES, 16), []
    for name in ("none", "abs"):
        model, total = objectives.load(runs / name), 0
        for number, tokens in enumerate(sequences.split(1)):
            batch = objectives.new_batch(tokens, model.encoder.config.vocab_size)
            mlm = model.objectives["mlm"]
            mlm.corrupt(batch, objectives.seeded_generator("cpu", "gap", number))
            loss, _ = mlm.loss(model.encoder, model.encoder(batch["tokens"]), batch)
            total += float(loss) / len(sequences)  # all have the same number of masked tokens
        losses.append(total)
    assert [float(line[2]) for line in lines] == pytest.approx([*losses, losses[0]], abs=1e-4)
    assert float(lines[1][3]) == pytest.approx(losses[1] - losses[0], abs=2e-4)
    assert "+0.0000 to +0.0000" in lines[2][4]
    x, n = np.random.default_rng(1).normal(1, 3, 5000), np.full(5000, 2.0)
    expected = x.mean() / 2 + np.array([-1.96, 1.96]) * x.std() / 2 / 5000**0.5
    assert gap.interval(x, n) == pytest.approx(expected, abs=0.003)
    assert "without mlm" in one_line(capsys, gap.main, [str(runs / "none"), str(runs / "clm")])


def test_lengths_of_a_run(runs, corpus, tmp_path, monkeypatch):
    """A loss by position is the mean over single sequences, which all have the same text."""
    model = enlarge(objectives.load(runs / "both")).double()
    monkeypatch.setattr(objectives, "load", lambda path: model)
    monkeypatch.setattr(lengths, "BATCH_TOKENS", 80)
    found = results(lengths.main, tmp_path, "--ckpt", runs / "both", "--lengths", "40,16")
    cfg, mlm = model.encoder.config, model.objectives["mlm"]
    tokens, original, masked = lengths.masked_text(corpus, mlm, 40)
    for n in (14, 38):
        losses, whole = defaultdict(list), len(masked) // n * n
        positions, _ = lengths.losses_by_position(model, (tokens, original, masked), n + 2)
        assert positions.tolist() == [i % n + 1 for i in range(whole) if masked[i]]
        for start in range(0, len(tokens) - n + 1, n):
            row = torch.tensor([[cfg.cls_id, *tokens[start : start + n].tolist(), cfg.sep_id]])
            log_p = mlm.token_logits(model.encoder, model.encoder(row)[0]).log_softmax(-1)
            for i in masked[start : start + n].nonzero()[:, 0].tolist():
                losses[str((i + 1) // 32 * 32)].append(-float(log_p[i + 1, original[start + i]]))
        expected = {first: pytest.approx(np.mean(x)) for first, x in losses.items()}
        assert found["by_position"][str(n + 2)] == expected and losses
    assert found["lengths"]["16"] == pytest.approx(found["by_position"]["16"]["0"])


@pytest.mark.parametrize(
    "main, flags, message",
    [
        (blimp.main, "--ckpt abs --pairs nowhere", "nowhere cannot be read"),
        (blimp.main, "--ckpt abs --pairs abs/log.jsonl", "every line needs texts"),
        (lengths.main, "--ckpt abs --lengths 64", "longer than the position table (16)"),
        (lengths.main, "--ckpt clm --lengths 64", "only mlm can be scored"),
    ],
)
def test_wrong_inputs_are_one_line(runs, main, flags, message, monkeypatch, capsys):
    """A wrong run, file or flag ends in one line that says what is wrong."""
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


@pytest.mark.parametrize(
    "main, flags",
    [
        (probe.main, "--ckpt both"),
        (probe.main, "--dynamics abs"),
        (blimp.main, "--ckpt none --pairs pairs.jsonl.xz"),
        (lengths.main, "--ckpt none --lengths 16,40"),
    ],
)
def test_no_float64_on_the_device(runs, main, flags, tmp_path, monkeypatch):
    """On a device that refuses float64, as Apple's GPUs do, the programs write the same numbers."""
    monkeypatch.chdir(runs)
    on_cpu = results(main, tmp_path / "cpu", *flags.split())
    to = lambda module, device: module._apply(lambda t: t.as_subclass(Emulated))  # noqa: E731
    monkeypatch.setattr(torch.nn.Module, "to", to)
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        assert results(main, tmp_path / "device", *flags.split()) == on_cpu
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(False)
