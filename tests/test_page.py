"""tools/page.py and its page: in a headless Chromium, if there is one, the model in JavaScript and
the user interface; and the checkpoint in 16 bits."""

import html
import json
import re
import shutil
import subprocess
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from data import encoding_arguments, validation_sequences
from finetune import make_model, read_start
from lib.config import defaults
from model import Encoder, EncoderConfig
from objectives import ObjectiveConfig, Pretraining
from tests.conftest import one_line, weights
from tools import page, probe, sample

SHAPE = dict(vocab_size=8192, n_layer=2, n_head=4, d_model=32, d_ff=48, max_len=64)
TEXTS = [
    "it's 3.14, isn't it?",
    "a [MASK] in the [MASK]",
    "tab\tand\nline\r\nends ",
    "no\u00a0break\u2003em\u3000wide\u0085next \ufeffmark",
    "naïve café Ångström ﬁ ǅ e\u0301 o\u0308",
    "日本語のテキスト 漢字 مرحبا بالعالم 👩‍👩‍👧 🇩🇪 x² + y³ = ½ Ⅷ ٣٤",
    "_under_ __init__() don't we've THEY'LL I'd",
    *(c * n for c in "ae.=- " for n in range(2, 12)),  # equal ranks: the first is joined
    *(f"a{chr(c)} {chr(c)}{chr(c)}b" for c in range(0x3100) if chr(c).isspace()),
    "".join(chr(c) for c in range(0x3100) if chr(c).isprintable() or chr(c).isspace()),
]


@pytest.fixture
def make_run(corpus, tmp_path):
    """make_run("a", "t5"): a run in which every weight matters -> its path."""

    def make(name, pe="abs", objective="mlm+pplm", tokenizer=None, norm="post", **settings):
        torch.manual_seed(3)
        encoder = Encoder(EncoderConfig(**SHAPE, pe=pe, norm=norm))
        model = Pretraining(encoder, ObjectiveConfig(objective, **settings))
        for p in model.parameters():
            p.data.add_(0.1 * torch.randn_like(p))
        checkpoint = {
            "args": defaults(ObjectiveConfig) | {"objective": objective} | settings,
            "config": asdict(encoder.config),
            "data": {"dataset": "docs"},
            "tokenizer": encoding_arguments(tokenizer or corpus.tokenizer),
            "model": model.state_dict(),
        }
        (tmp_path / name).mkdir()
        torch.save(checkpoint, tmp_path / name / "ckpt.pt")
        return str(tmp_path / name)

    return make


CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
# No sandbox, which containers lack, and nothing that uses the network by itself.
FLAGS = (
    "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --window-size=1280,800 --dump-dom"
).split()


@pytest.fixture
def in_browser(tmp_path):
    """in_browser(runs, script): make a page of runs and run a script in it, the body of a function
    that may use the page's own ones -> what it returns; there must be no errors."""
    if CHROMIUM is None:
        pytest.skip("no Chromium here")

    def in_browser(runs, script):
        file = tmp_path / "page.html"
        page.main([*runs, str(file)])
        first = "<script>var errors = []; onerror = (message) => errors.push(message)</script>"
        last = f"""<script>
            const value = (() => {{ {script} }})();
            document.documentElement.textContent = JSON.stringify([value, errors]);</script>"""
        file.write_text(file.read_text().replace("<body>", f"<body>{first}") + last)
        command = [CHROMIUM, *FLAGS, f"--user-data-dir={tmp_path / 'chromium'}", file.as_uri()]
        done = subprocess.run(command, capture_output=True, timeout=300)
        [text] = re.findall(r"<html[^>]*>(\[.*\])</html>", done.stdout.decode())
        value, errors = json.loads(html.unescape(text))
        assert errors == []
        return value

    return in_browser


@pytest.mark.slow
@torch.no_grad()
def test_the_page_computes_what_python_does(in_browser, make_run):
    """Token ids, hidden states, probabilities of tokens and of offsets are those of the Python
    model with its weights rounded to 16 bits, where tokens have wrong positions."""
    runs = [make_run(pe, pe) for pe in ("none", "sin", "abs+t5", "tupe_r", "alibi", "rope")]
    runs += [make_run("linear", "t5_untie_cls", pair_scores="content", pair_head="linear")]
    runs += [make_run("some", "rope+t5", "mlm+pplm_some+tc", norm="pre")]
    models = [sample.load_pretraining(run) for run in runs]
    tokenizer, cfg = models[0].encoder.tokenizer, models[0].encoder.config
    encoded = [
        tokenizer.encode(
            text.replace(" [MASK]", "[MASK]"), allowed_special={"[MASK]"}, disallowed_special=()
        )
        for text in TEXTS
    ]
    tokens = torch.tensor([[cfg.cls_id, *encoded[1], cfg.sep_id]])  # with [MASK]
    pos = torch.arange(tokens.size(1))[None]
    pos[0, 1:-1] = pos[0, 1:-1].roll(1)
    script = f"""
        const tokens = {tokens[0].tolist()}, pos = {pos[0].tolist()};
        const outputs = runs.map((run) => {{
            const hidden = run.encoder.forward(tokens, pos), C = run.config.d_model;
            const pairs = softmax(run.encoder.pair_logits(hidden, pos, run.position), 127);
            const p = run.encoder.token_probabilities(hidden.slice(C, 2 * C));
            return [hidden, p, pairs].map((x) => Array.from(x, (y) => Number(y.toPrecision(8))));
        }});
        return [{json.dumps(TEXTS)}.map((text) => tokenizer.encode(text)), outputs];"""
    ids, outputs = in_browser(runs, script)
    assert [text for text, a, b in zip(TEXTS, ids, encoded) if a != b] == []
    for model, given in zip(models, outputs, strict=True):
        encoder, position = model.encoder, sample.position_objective(model)
        for name, weight in model.named_parameters():
            if not name.startswith("encoder.scheme."):
                weight.data = weight.data.half().float()
        hidden = encoder(tokens, pos)
        logits = model.objectives["mlm"].token_logits(encoder, hidden[0, 1])[: cfg.cls_id]
        pairs = position.head.psi(position.head.scores(encoder, hidden, pos))
        for own, x in zip((hidden, logits.softmax(-1), pairs.softmax(-1)), given):
            x = torch.tensor(x).view(own.shape)
            torch.testing.assert_close(x, own, atol=5e-5, rtol=1e-4, msg=encoder.config.pe)


@pytest.mark.slow
def test_the_page_restores_order_as_sample_does(in_browser, make_run):
    """best_order, confidence and correct_pairs equal those of tools/sample.py."""
    rng, script, expected = torch.Generator().manual_seed(0), "", []
    for n in (2, 3, 5, 12, 30):
        pos = torch.randperm(n, generator=rng) + 1
        if n == 5:  # the assigned positions are the most likely ones, but excluded
            pos = torch.arange(n) + 1
        true = torch.arange(n) - torch.arange(n)[:, None]
        logits = 3 * torch.randn(n, n, 127, generator=rng) + 4 * F.one_hot(true + 63, 127)
        script += f"""{{
            const logits = Float32Array.from({logits.flatten().tolist()}), pos = {pos.tolist()};
            const order = best_order(logits, pos);
            results.push([order, confidence(logits, pos), correct_pairs(argsort(pos))]);
        }}"""
        p = logits.softmax(-1).gather(-1, (pos - pos[:, None] + 63)[..., None])[..., 0]
        p = p.fill_diagonal_(0)
        expected.append((p.sum(0) + p.sum(1)) / (2 * n - 2))
        share = sample.correct_pairs(pos.argsort()) / (n * (n - 1) / 2)
        expected[-1] = sample.best_order(logits.log_softmax(-1), pos), expected[-1], share
    results = in_browser([make_run("a")], f"const results = []; {script} return results;")
    for (order, p, share), (own_order, own_p, own_share) in zip(results, expected, strict=True):
        assert order == own_order.tolist()
        assert p == pytest.approx(own_p.tolist(), abs=1e-6)
        assert share == pytest.approx(own_share)


@pytest.mark.slow
def test_the_actions(in_browser, make_run):
    """Typing, shuffling, restoring, exchanging, masking and attention work; what is typed is not
    HTML; the first action needs no scrolling, and 360 pixels are wide enough."""
    script = """
        const all = (selector) => [...document.querySelectorAll(selector)], seen = {};
        const click = (selector, n = 0) => all(selector)[n].click();
        seen.first_action = $("shuffle").getBoundingClientRect().bottom < innerHeight;
        $("text").value = "<b>the</b> alpha beta gamma delta";
        click("#form button");
        seen.n = ids.length;
        seen.html = [texts.join("").includes("<b>"), all("#mask b").length];
        seen.ordered = [...order, $("restore").disabled];
        $("share").value = ids.length;
        click("#shuffle");
        seen.shuffled = [...order];
        click("#restore");
        seen.restored = [all("#orders .token").length, all("#orders .run").length];
        click("#reset");
        click("#order button", 0);
        click("#order button", 2);
        seen.exchanged = [...order];
        click("#mask button", 0);
        seen.masked = [all("#mask button")[0].textContent, all("#predictions .bar").length];
        click("#attention button", 3);
        const sums = () => runs.map((run) => attention(run)
            .slice(3 * (ids.length + 2), 4 * (ids.length + 2)).reduce((a, b) => a + b));
        const first = [...attention(runs[0])].join();
        click("#positions-only");
        seen.positions_only = first !== [...attention(runs[0])].join();
        $("head").value = 3;
        $("head").dispatchEvent(new Event("change"));
        seen.attention = [query, ...sums(), all("canvas").length, all("#attention .bar").length];
        document.body.style.width = "360px";
        seen.width = document.body.scrollWidth;
        return seen;"""
    seen = in_browser([make_run("a", "tupe_r"), make_run("b", "rope", "mlm")], script)
    ordered, n = list(range(seen["n"])), seen["n"]
    assert seen["first_action"] and seen["width"] == 360 and seen["html"] == [True, 0]
    assert seen["ordered"] == [*ordered, True]
    assert sorted(seen["shuffled"]) == ordered != seen["shuffled"]
    assert seen["restored"] == [n, 1]  # one run has a pair head
    assert seen["exchanged"] == [2, 1, 0, *ordered[3:]]
    assert seen["masked"] == ["[MASK]", 2 * 2 * 5]  # runs, masked tokens, predictions
    assert seen["positions_only"]
    assert seen["attention"] == pytest.approx([3, 1, 1, 2, 2 * (n + 2)])
    assert not re.search("https?:", page.SOURCE.read_text()), "a page works without a network"


@pytest.mark.slow
@pytest.mark.parametrize(
    "objective, hidden",
    [("mlm", "order"), ("pplm_binary", "mask"), ("pmlm", "order mask"), ("nsp+tc", "order mask")],
)
def test_other_objectives(in_browser, make_run, objective, hidden):
    """Sections that no run supports are hidden."""
    script = """
        if (pair_runs.length) (shuffle(), restore());
        const which = [...document.querySelectorAll("section[hidden]")];
        return [which.map(({ id }) => id.split("-")[0]).join(" "), $("orders").textContent];"""
    ids, text = in_browser([make_run("a", objective=objective)], script)
    assert ids == hidden and ("which tokens moved" in text) == (objective == "pplm_binary")


def test_half_checkpoint(run, corpus, tmp_path, capsys):
    """A checkpoint in 16 bits predicts as the run does, in every program that takes --ckpt."""
    folder = run("a", "--objective mlm+pplm --pe rope+t5 --steps 3")
    small = tmp_path / "small.pt"
    page.main([str(folder), str(small)])
    own, given = weights(folder), weights(tmp_path, "small.pt")
    assert own.keys() - given.keys() == {"optimizer", "scaler"}
    for name, x in own["model"].items():
        assert torch.equal(given["model"][name], x.half() if x.dim() == 2 else x), name
    assert given["model"]["encoder.scheme.parts.Rotary.w.value"].dtype == torch.float32
    models = [sample.load_pretraining(path) for path in (folder, small)]
    batch = models[0].corrupt(validation_sequences(corpus, 4, 16), 0)
    losses = [float(model(batch)[0]) for model in models]
    assert losses[0] == pytest.approx(losses[1], abs=1e-3)
    start = make_model(read_start(str(small)), "docs", 16).state_dict()["encoder.tok.weight"]
    assert torch.equal(start, own["model"]["encoder.tok.weight"].half().float())
    sample.main(["--ckpt", str(small), "--text", "the [MASK] brown fox"])
    probe.main(["--ckpt", str(small), "--out_dir", str(tmp_path / "probe"), "--device", "cpu"])
    assert "[MASK]: " in capsys.readouterr().out and (tmp_path / "probe/probe.json").exists()


def test_wrong_input_is_one_line(make_run, tmp_path, monkeypatch, capsys):
    """What a page cannot show, and where it cannot be written, is refused in one line."""
    monkeypatch.chdir(tmp_path)
    fine = make_run("fine")
    other_tokens = {"name": "gpt2", "pattern": "a", "ranks": ["a"], "specials": {}}
    tuned = torch.load(f"{fine}/ckpt.pt", weights_only=True) | {"task": "rte"}
    torch.save(tuned, "tuned.pt")
    (tmp_path / "folder.html").mkdir()
    for arguments, message in [
        (["page.html"], "no checkpoint under out/"),
        ([make_run("1", "rel"), "page.html"], "cannot run --pe rel, only none, abs"),
        ([make_run("2", "abs+rel_k"), "page.html"], "cannot run --pe abs+rel_k"),
        ([make_run("3", "bert_ad"), "page.html"], "cannot run --pe bert_ad"),
        ([make_run("4", objective="clm"), "page.html"], "clm is causal"),
        ([fine, make_run("5", tokenizer=other_tokens), "page.html"], "another tokenizer"),
        (["tuned.pt", "page.html"], "is fine-tuned"),
        (["nothing", "page.html"], "no checkpoint"),
        ([fine, "folder.html"], "folder.html"),
        ([fine, "page.htm"], "page.htm"),
        ([fine, "nowhere/page.html"], "nowhere/page.html"),
        ([fine, str(page.SOURCE)], "would be overwritten"),
        ([fine, f"{fine}/ckpt.pt"], "would be overwritten"),
        ([fine, fine, "small.pt"], "from one RUN"),
    ]:
        assert message in one_line(capsys, page.main, arguments)
    assert not Path("page.html").exists()
