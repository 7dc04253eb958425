"""tools/page.py and its page, in a headless Chromium if there is one; the checkpoint in 16 bits."""

import html
import json
import re
import shutil
import subprocess

import pytest
import torch
import torch.nn.functional as F

from data import validation_sequences
from finetune import make_model, read_start
from tests.conftest import one_line, weights
from tools import page, sample

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")
TEXTS = [
    "a [MASK] in the [MASK]",
    "naïve ﬁ ǅ e\u0301 o\u0308 日本語 مرحبا 👩‍👩‍👧 🇩🇪 x² = ½ Ⅷ ٣٤",
    "_under_ __init__() don't we've THEY'LL I'd",
    *(c * n for c in "ae.=- " for n in range(2, 12)),  # equal ranks: the first is joined
    *(f"a{chr(c)} {chr(c)}{chr(c)}b" for c in range(0x3100) if chr(c).isspace()),
    "".join(chr(c) for c in range(0x3100) if chr(c).isprintable() or chr(c).isspace()),
]


@pytest.fixture
def make_run(run):
    """make_run("a", "--pe t5"): a run in which every weight matters -> its path."""

    def make(folder, flags=""):
        shape = "--steps 1 --n_layer 2 --n_head 4 --d_model 32 --block_size 64"
        folder = run(folder, f"{shape} --objective mlm+pplm {flags}")
        checkpoint = weights(folder)
        for x in checkpoint["model"].values():
            x += 0.1 * torch.randn_like(x)
        torch.save(checkpoint, folder / "ckpt.pt")
        return str(folder)

    return make


def in_browser(folder, runs, script):
    """Make a page of runs and run a script in it, the body of a function that may use the page's
    own ones -> what it returns. There must be no errors."""
    file = folder / "page.html"
    page.main([*runs, str(file)])
    first = "<script>var errors = []; onerror = (message) => errors.push(message)</script>"
    last = f"""<script>
        const value = (() => {{ {script} }})();
        document.documentElement.textContent = JSON.stringify([value, errors]);</script>"""
    file.write_text(file.read_text().replace("<body>", f"<body>{first}") + last)
    # No sandbox, which containers lack, and nothing that uses the network by itself.
    flags = "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking"
    command = [CHROMIUM, *flags.split(), f"--user-data-dir={folder / 'chromium'}", "--dump-dom"]
    done = subprocess.run([*command, file.as_uri()], capture_output=True, timeout=300)
    [text] = re.findall(r"<html[^>]*>(\[.*\])</html>", done.stdout.decode())
    value, errors = json.loads(html.unescape(text))
    assert errors == []
    return value


@pytest.mark.slow
@needs_chromium
def test_the_page_computes_what_python_does(make_run, tmp_path):
    """Token ids, hidden states, probabilities of tokens and of offsets are those of the Python
    model with its weights rounded to 16 bits, where tokens have wrong positions."""
    runs = [make_run(pe, f"--pe {pe}") for pe in ("none", "sin", "abs+t5", "tupe_r", "alibi")]
    runs += [make_run("linear", "--pe t5_untie_cls --pair_scores content --pair_head linear")]
    runs += [make_run("pre", "--pe rope+t5 --objective mlm+pplm_some+tc --norm pre")]
    models = [sample.load_pretraining(run) for run in runs]
    tokenizer, cfg = models[0].encoder.tokenizer, models[0].encoder.config
    texts = [text.replace(" [MASK]", "[MASK]") for text in TEXTS]
    encoded = [tokenizer.encode(text, allowed_special={"[MASK]"}) for text in texts]
    tokens = torch.tensor([[cfg.cls_id, *encoded[0], cfg.sep_id]])  # with [MASK]
    pos = torch.arange(tokens.size(1))[None]
    pos[0, 1:-1] = pos[0, 1:-1].roll(1)
    script = f"""
        const tokens = {tokens[0].tolist()}, pos = {pos[0].tolist()};
        const outputs = runs.map((run) => {{
            const hidden = run.encoder.forward(tokens, pos), C = run.config.d_model;
            const pairs = softmax(run.encoder.pair_logits(hidden, pos, run.position), 127);
            const p = run.encoder.token_probabilities(hidden.slice(C, 2 * C));
            return [hidden, p, pairs].map((x) => Array.from(x));
        }});
        return [{json.dumps(TEXTS)}.map((text) => tokenizer.encode(text)), outputs];"""
    ids, outputs = in_browser(tmp_path, runs, script)
    assert [text for text, a, b in zip(TEXTS, ids, encoded) if a != b] == []
    for model, given in zip(models, outputs, strict=True):
        encoder, position = model.encoder, sample.position_objective(model)
        for name, weight in model.named_parameters():
            if not name.startswith("encoder.scheme."):
                weight.data = weight.data.half().float()
        hidden, states = encoder(tokens, pos), encoder.hidden_states(tokens, pos)
        logits = model.objectives["mlm"].token_logits(encoder, hidden[0, 1])[: cfg.cls_id]
        pairs = position.head.psi(position.head.scores(encoder, states, pos))
        for own, x in zip((hidden, logits.softmax(-1), pairs.softmax(-1)), given):
            x = torch.tensor(x).view(own.shape)
            torch.testing.assert_close(x, own, atol=5e-5, rtol=1e-4, msg=encoder.config.pe)


@pytest.mark.slow
@needs_chromium
def test_the_page_restores_order_as_sample_does(make_run, tmp_path):
    """best_order, confidence and correct_pairs equal those of tools/sample.py."""
    rng, given, expected = torch.Generator().manual_seed(0), [], []
    for n in (2, 3, 5, 12, 20):
        pos = torch.randperm(n, generator=rng) + 1
        if n == 5:  # the assigned positions are the most likely ones, but excluded
            pos = torch.arange(n) + 1
        true = torch.arange(n) - torch.arange(n)[:, None]
        logits = 3 * torch.randn(n, n, 127, generator=rng) + 4 * F.one_hot(true + 63, 127)
        given.append((logits.flatten().tolist(), pos.tolist()))
        p = logits.softmax(-1).gather(-1, (pos - pos[:, None] + 63)[..., None])[..., 0]
        p = p.fill_diagonal_(0)
        numbers = ((p.sum(0) + p.sum(1)) / (2 * n - 2)).tolist()
        numbers.append(sample.correct_pairs(pos.argsort()) / (n * (n - 1) / 2))
        order = sample.best_order(logits.log_softmax(-1), pos).tolist()
        expected.append([order, pytest.approx(numbers, abs=1e-6)])
    script = f"""return {json.dumps(given)}.map(([logits, pos]) => {{
        logits = Float32Array.from(logits);
        const numbers = [...confidence(logits, pos), correct_pairs(argsort(pos))];
        return [best_order(logits, pos), numbers];
    }});"""
    assert in_browser(tmp_path, [make_run("a")], script) == expected


@pytest.mark.slow
@needs_chromium
def test_the_actions(make_run, tmp_path):
    """Typing (text, not HTML), shuffling, restoring, exchanging, masking and attention work, and
    sections that no run supports are hidden."""
    script = """
        const all = (selector) => [...document.querySelectorAll(selector)];
        const click = (selector, n = 0) => all(selector)[n].click();
        $("text").value = "<b>the</b> alpha beta";
        click("#form button");
        const seen = [ids.length, texts.join("").includes("<b>"), all("#mask b").length];
        $("share").value = ids.length;
        click("#shuffle");
        seen.push([...order]);
        click("#restore");
        seen.push(all("#orders .token").length);
        click("#reset");
        click("#order button", 0);
        click("#order button", 2);
        seen.push([...order]);
        click("#mask button", 0);
        seen.push(all("#mask button")[0].textContent, all("#predictions .bar").length);
        const with_tokens = attention(runs[0]).join();
        click("#attention button", 3);
        click("#positions-only");
        seen.push(query, attention(runs[0]).join() !== with_tokens);
        return seen;"""
    runs = [make_run("a", "--pe tupe_r"), make_run("b", "--pe rope --objective mlm")]
    n, typed, elements, shuffled, restored, exchanged, *rest = in_browser(tmp_path, runs, script)
    assert typed and elements == 0, "the text contains <b>, and there is no such element"
    assert sorted(shuffled) == list(range(n)) != shuffled
    assert restored == n, "one run has a pair head"
    assert exchanged == [2, 1, 0, *range(3, n)]
    assert rest == ["[MASK]", 2 * 2 * 5, 3, True]  # of 2 runs, 2 masked tokens, 5 predictions
    script = """
        if (pair_runs.length) (shuffle(), restore());
        return [...document.querySelectorAll("section[hidden]")].map(({ id }) => id);"""
    for objective, hidden in (("pplm_binary", ["mask"]), ("pmlm", ["order", "mask"])):
        run = make_run(objective, f"--objective {objective}")
        assert in_browser(tmp_path, [run], script) == [f"{name}-section" for name in hidden]


def test_half_checkpoint(run, corpus, tmp_path):
    """A checkpoint in 16 bits predicts as the run does, and fine-tuning starts from it."""
    folder, small = run("a", "--objective mlm+pplm --pe abs+t5 --steps 3"), tmp_path / "small.pt"
    page.main([str(folder), str(small)])
    own, given = weights(folder), weights(tmp_path, "small.pt")
    assert own.keys() - given.keys() == {"optimizer", "scaler"}
    for name, x in own["model"].items():
        assert torch.equal(given["model"][name], x.half() if x.dim() == 2 else x), name
    models = [sample.load_pretraining(path) for path in (folder, small)]
    batch = models[0].corrupt(validation_sequences(corpus, 4, 16), 0)
    losses = [float(model(batch)[0]) for model in models]
    assert losses[0] == pytest.approx(losses[1], abs=1e-3)
    start = make_model(read_start(str(small)), "docs", 32).state_dict()  # longer than the run's
    assert torch.equal(
        start["encoder.tok.weight"], own["model"]["encoder.tok.weight"].half().float()
    )


def test_wrong_input_is_one_line(make_run, tmp_path, monkeypatch, capsys):
    """What a page cannot show, and where it cannot be written, is refused in one line."""
    monkeypatch.chdir(tmp_path)
    fine = make_run("fine")
    checkpoint = weights(fine)
    torch.save(checkpoint | {"task": "rte"}, "tuned.pt")
    tokens = list(checkpoint["tokenizer"]["mergeable_ranks"])
    checkpoint["tokenizer"]["mergeable_ranks"] = {x: i for i, x in enumerate(reversed(tokens))}
    torch.save(checkpoint, "other.pt")
    for arguments, message in (
        (["page.html"], "no checkpoint under out/"),
        ([make_run("rel", "--pe abs+rel_k"), "page.html"], "cannot run --pe abs+rel_k, only none"),
        ([make_run("clm", "--objective clm"), "page.html"], "clm is causal"),
        ([make_run("last", "--pair_layer last"), "page.html"], "no --pair_layer last"),
        ([fine, "other.pt", "page.html"], "another tokenizer"),
        (["tuned.pt", "page.html"], "is fine-tuned"),
        ([fine, "nowhere/page.html"], "nowhere/page.html"),
        ([fine, str(page.SOURCE)], "would be overwritten"),
        ([fine, f"{fine}/ckpt.pt"], "would be overwritten"),
        ([fine, fine, "small.pt"], "from one RUN"),
    ):
        assert message in one_line(capsys, page.main, arguments)
    assert not (tmp_path / "page.html").exists()
