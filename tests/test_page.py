"""tools/page.py and its page, in a headless Chromium if there is one; the checkpoint in 16 bits."""

import json
import shutil

import pytest
import torch
import torch.nn.functional as F

import objectives
from data import validation_sequences
from finetune import new_classifier
from lib.files import read_checkpoint
from lib.restore import best_order
from test_all import pretraining
from tests.conftest import one_line, refuses, weights
from tools import page, sample
from tools.gif import Browser

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
# Each hook, alone and in a sum
SCHEMES = ("none", "abs+t5", "sin", "tupe_r", "alibi", "rel", "abs+rsin", "rope+rel_k", "deberta")


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


def in_browser(folder, runs, script, *flags):
    """Make a page of runs and run a script in it, the body of a function that may use the page's
    own ones -> what it returns. There must be no errors."""
    file = folder / "page.html"
    page.main([*runs, str(file), *flags])
    browser = Browser(file)
    value = browser.run(f"(() => {{ {script} }})()")
    browser.close()
    assert browser.errors == []
    return value


def change_tokenizer(folder):
    """Reverse the order of a run's merges."""
    checkpoint = weights(folder)
    tokens = list(checkpoint["tokenizer"]["mergeable_ranks"])
    changed = {x: i for i, x in enumerate(tokens[:256] + tokens[:255:-1])}
    checkpoint["tokenizer"]["mergeable_ranks"] = changed
    torch.save(checkpoint, f"{folder}/ckpt.pt")


def test_tokenizers_of_a_page(make_run, tmp_path, monkeypatch):
    """A page has each tokenizer once, and each run has its own."""
    run, pages = make_run("a"), []
    copies = [shutil.copytree(run, tmp_path / name) for name in "bc"]
    change_tokenizer(copies[0])
    monkeypatch.setattr(page, "fill", lambda data: pages.append(data) or "")
    page.main([run, *map(str, copies), str(tmp_path / "page.html")])
    assert [run["tokenizer"] for run in pages[0]["runs"]] == [0, 1, 0]
    first, second = pages[0]["tokenizers"]
    assert first != second == first[:256] + first[:255:-1]


def rounded(path):
    """-> the model of a run with its weights as they are in a page."""
    model = objectives.load(path)
    for name, weight in model.named_parameters():
        if not name.startswith("encoder.scheme.") and weight.dim() == 2:
            integers, scale = page.quantize(name, weight.data)
            assert (integers * scale - weight).abs().max() < weight.abs().max() / 46
            weight.data = integers * scale
    return model


@pytest.mark.slow
@needs_chromium
def test_the_page_computes_what_python_does(make_run, tmp_path):
    """Token ids, hidden states, probabilities of tokens and of offsets are those of the Python
    model with its weights rounded as in the page, where tokens have wrong positions."""
    runs = [make_run(pe, f"--pe {pe}") for pe in (*SCHEMES, "bert_ad")]
    runs += [make_run("linear", "--pe t5_untie_cls --pair_scores content --pair_head linear")]
    runs += [make_run("pre", "--pe rope+t5 --objective mlm+pplm_some+tc --norm pre")]
    models = [rounded(run) for run in runs]
    tokenizer, cfg = models[0].encoder.tokenizer, models[0].encoder.config
    texts = [text.replace(" [MASK]", "[MASK]") for text in TEXTS]
    encoded = [tokenizer.encode(text, allowed_special={"[MASK]"}) for text in texts]
    tokens = torch.tensor([[cfg.cls_id, *encoded[0], cfg.sep_id]])  # with [MASK]
    pos = torch.arange(tokens.size(1))[None]
    pos[0, 1:-1] = pos[0, 1:-1].roll(1)
    script = f"""
        const tokens = {tokens[0].tolist()}, pos = {pos[0].tolist()};
        const outputs = runs.map((run) => {{
            const encoder = encoder_of(run), hidden = encoder.forward(tokens, pos);
            const pairs = log_softmax(encoder.pair_logits(hidden, pos, run.position), 127);
            const p = encoder.token_probabilities(hidden.slice(32, 64));
            return [hidden, p, pairs].map((x) => Array.from(x));
        }});
        return [{json.dumps(TEXTS)}.map((text) => tokenizers[0].encode(text)), outputs];"""
    ids, outputs = in_browser(tmp_path, runs, script)
    assert [text for text, a, b in zip(TEXTS, ids, encoded) if a != b] == []
    for model, given in zip(models, outputs, strict=True):
        encoder, position = model.encoder, sample.position_objective(model)
        hidden, states = encoder(tokens, pos), encoder.hidden_states(tokens, pos)
        logits = model.objectives["mlm"].token_logits(encoder, hidden[0, 1])[: cfg.cls_id]
        pairs = position.head.psi(position.head.scores(encoder, states, pos))
        for own, x in zip((hidden, logits.softmax(-1), pairs.log_softmax(-1)), given):
            x = torch.tensor(x).view(own.shape)
            torch.testing.assert_close(x, own, atol=1e-4, rtol=1e-4, msg=encoder.config.pe)


@pytest.mark.slow
@needs_chromium
def test_the_page_restores_order_as_sample_does(make_run, tmp_path):
    """For words of one token, best_order equals that of lib/restore.py. Longer words stay whole,
    and a large margin leaves the sentence as it is. doubts is the mean over pairs."""
    rng, given, expected = torch.Generator().manual_seed(0), [], []
    for n in (2, 3, 5, 12, 20):
        pos, true = torch.randperm(n, generator=rng) + 1, torch.arange(n)
        true = F.one_hot(true - true[:, None] + 63, 127)
        logits = 3 * torch.randn(n, n, 127, generator=rng) + 4 * true

        def predict(pos):  # half believes the positions
            return (logits + 2 * F.one_hot(pos - pos[:, None] + 63, 127)).log_softmax(-1)

        given.append((logits.flatten().tolist(), pos.argsort().tolist()))
        p = predict(pos).exp().gather(-1, (pos - pos[:, None] + 63)[..., None])[..., 0]
        p = p.fill_diagonal_(0)
        doubt = 1 - (p.sum(0) + p.sum(1)) / (2 * n - 2)
        best = best_order(predict, pos, 0.01).argsort().tolist()
        expected.append([best, pytest.approx(doubt.tolist(), abs=1e-6)])
    true = torch.arange(6) - torch.arange(6)[:, None]
    words = 9 * F.one_hot(true + 63, 127).float().log_softmax(-1)  # of 1, 3 and 2 tokens
    script = f"""
        const one = {json.dumps(given)}.map(([logits, order]) => {{
            const lengths = order.map(() => 1), n = order.length;
            const predict = (order) => {{
                const pos = positions_of(lengths, order), x = [...logits];
                for (let i = 0; i < n; i++)
                    for (let j = 0; j < n; j++) x[(i * n + j) * 127 + pos[j] - pos[i] + 63] += 2;
                return log_softmax(x, 127);
            }};
            const best = best_order(predict, lengths, order, 0.01);
            return [best, doubts(predict(order), positions_of(lengths, order))];
        }});
        const lengths = [1, 3, 2], words = {words.flatten().tolist()};
        return [one, positions_of(lengths, [2, 0, 1]),
            ...[0, 99].map((margin) => best_order(() => words, lengths, [2, 1, 0], margin))];"""
    one, positions, restored, left = in_browser(tmp_path, [make_run("a")], script)
    assert one == expected
    assert positions == [3, 4, 5, 6, 1, 2]
    assert restored == [0, 1, 2] and left == [2, 1, 0]


@pytest.mark.slow
@needs_chromium
def test_the_actions(make_run, tmp_path):
    """Switching, typing (text, not HTML), masking, exchanging, shuffling, restoring and attention
    work, also for models with different tokenizers."""
    runs = [make_run("none", "--pe none"), make_run("abs", "--pe abs --objective mlm")]
    change_tokenizer(runs[1])
    script = """
        const all = (selector) => [...document.querySelectorAll(selector)];
        const click = (selector, n = 0) => all(selector)[n].click();
        const texts = (selector) => all(selector).map((x) => x.textContent);
        $("mask-text").value = "<b>the</b> quick brown fox.";
        click("#mask form button");
        const masked = ["#first", "#second"].map((x) => texts(`${x} button`).indexOf("[MASK]"));
        click("#first button", 2);
        const seen = [texts("#first button"), all("#first b").length, masked];
        seen.push(texts("#second button"), $("verdict").textContent, texts("#first-words li"));
        seen.push(texts("#second-words li"));
        click("#switch input", 1);
        const overlap = $("verdict").textContent.includes("overlap");
        click("#second button", 2);
        click("#second button", 3);
        seen.push($("meaning").textContent, overlap, $("verdict").textContent);
        $("order-text").value = "the quick fox jumps over a lazy dog";
        click("#order form button");
        click("#shuffle");
        seen.push(sentence.order.filter((k, i) => k !== i).length, all("#sentence .moved").length);
        click("#restore");
        seen.push([...sentence.order].sort(), $("result").textContent.length > 0);
        click("#positions-only");
        seen.push(runs.map((run) => grid(run).at(3, 9) > 0), all("#maps canvas").length);
        cell = [0, 10]; // the offset 0
        $("map").dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowDown" }));
        return [...seen, $("cell").textContent];"""
    first, elements, masked, second, verdict, p, q, *rest = in_browser(tmp_path, runs, script)
    assert first == ["<b>the</b>", "quick", "[MASK]", "fox", "."] and elements == 0
    assert masked == [3, 3]  # "fox": the last content word
    assert second == ["fox", "quick", "[MASK]", "<b>the</b>", "."]  # [MASK] stays where it is
    assert verdict.startswith("Identical") and p == q and len(p) == 5
    meaning, overlap, verdict, moved, colored, order, said, attended, maps, cell = rest
    assert "adds a learned vector" in meaning and overlap and "You moved [MASK]" in verdict
    assert moved == colored == 2 and order == list(range(8)) and said
    assert attended == [True, True] and maps == 2 and "position 2 attends to offset 0" in cell


@pytest.mark.slow
@needs_chromium
def test_texts_and_drops(make_run, tmp_path):
    """A text that is cut or too short leads to a note. What is dropped on a word exchanges it only
    if it is a word of the same list. "The" and "the" are the same word in a restored sentence."""
    script = """
        const type = (text) => {
            $("mask-text").value = text;
            document.querySelector("#mask form button").click();
            return [mask.words.length, document.querySelector("#mask .note").textContent];
        };
        const texts = ["one", "the dog saw the cat", "the dog ".repeat(200), "長い".repeat(200)];
        const typed = texts.map((text) => type(text));
        const drop = (to, from) => {
            const event = (type, dataTransfer) => new DragEvent(type, { dataTransfer });
            const given = new DataTransfer(), list = from.list && $(from.list);
            if (list) list.querySelectorAll("button")[1].dispatchEvent(event("dragstart", given));
            else given.setData(from.type, from.text);
            $(to).querySelectorAll("button")[3].dispatchEvent(event("drop", given));
        };
        type("a quick fox [MASK] over dogs");
        use_sentence([" The", " dog", " saw", " the", " cat"]);
        const state = () => [...mask.second, ...sentence.order].join(" ");
        const before = state(), own = "application/x-word-of-second";
        for (const text of ["hello", "1", "", "99", "-1", "1.5", "length"])
            for (const type of ["text/plain", own, "application/x-word-of-sentence"])
                if (type === "text/plain" || text !== "1") drop("second", { type, text });
        drop("second", { list: "sentence" });
        const same = state() === before;
        drop("sentence", { list: "sentence" });
        const dropped = [...sentence.order];
        set_order([3, 1, 2, 0, 4]);
        const classes = [...$("sentence").querySelectorAll("button")].map((x) => x.className);
        return [typed, same, dropped, classes.join("")];"""
    typed, same, dropped, classes = in_browser(tmp_path, [make_run("a")], script)
    (_, short), fine, (n, cut), (_, long) = typed
    assert short and fine == [5, ""] and n > 5 and "cut after" in cut and "too long" in long
    assert same and dropped == [0, 3, 2, 1, 4] and classes == ""


@pytest.mark.slow
@needs_chromium
@pytest.mark.parametrize("block_size", [4, 6, 10])
def test_small_models(run, tmp_path, block_size):
    """Every control works where only a few words fit, or none."""
    flags = f"--steps 1 --pe rope --objective mlm+pplm --block_size {block_size}"
    flags += " --mask_rate .9 --pos_rate .9"
    script = """
        for (const selector of ["#first button", "#second button", "#sentence button", "#shuffle",
            "#restore", ".examples button", "#positions-only", "#example", "#switch input"])
            for (const x of document.querySelectorAll(selector)) x.click();
        const empty = () => mask.words.length || !$("verdict").textContent;
        return new Promise((done) => setTimeout(() => done(Boolean(empty())), 300));"""
    assert in_browser(tmp_path, [str(run("a", flags))], script)


@pytest.mark.slow
@needs_chromium
def test_back_to_the_page(make_run, tmp_path):
    """After a visit elsewhere, what the controls say is what is shown. All names are different. In
    a small window, nothing covers a title."""
    runs = [make_run(name, "--pe t5") for name in ("a", "b")] + [make_run("c", "--pe rope")]
    page.main([*runs, str(tmp_path / "page.html")])
    browser = Browser(tmp_path / "page.html")
    settled = "new Promise((f) => setTimeout(f, 500))"
    names = browser.run("runs.map((run) => run.name)")
    assert names == ["t5, mlm+pplm, a", "t5, mlm+pplm, b", "rope"]
    size = {"width": 320, "height": 256, "deviceScaleFactor": 1, "mobile": True}
    browser.call("Emulation.setDeviceMetricsOverride", **size)
    title = browser.run(
        """(() => {
            $("order-title").scrollIntoView();
            const { x, y } = $("order-title").getBoundingClientRect();
            return [document.elementFromPoint(x + 9, y + 9).id, document.body.scrollWidth];
        })()"""
    )
    assert title == ["order-title", 320]
    browser.run(
        """for (const [id, value] of [["layer", 1], ["head", 2]]) $(id).value = value;
        document.querySelectorAll("input[type=radio]").forEach((x, n) => n % 3 !== 1 || x.click());
        $("positions-only").click();
        document.querySelectorAll("input[type=text]").forEach((x) => (x.value = "other"));"""
    )
    entry = browser.call("Page.getNavigationHistory")["entries"][-1]["id"]
    browser.call("Page.navigate", url="about:blank")
    browser.run(settled)
    browser.call("Page.navigateToHistoryEntry", entryId=entry)
    browser.run(settled)
    controls = browser.run(
        """(() => {
            const all = (id) => [...$(id).querySelectorAll("input")];
            const checked = (id) => all(id).findIndex((x) => x.checked);
            return [checked("switch"), checked("pair-switch"), $("positions-only").checked,
                $("layer").value, $("head").value, $("mask-text").value];
        })()"""
    )
    state = browser.run(
        """[runs.indexOf(current), runs.filter((run) => run.position).indexOf(pair_run),
            !$("caption").textContent.startsWith("How much"), "0", "", EXAMPLES.other.mask[0]]"""
    )
    browser.close()
    assert controls == state and browser.errors == []


def test_half_checkpoint(run, corpus, tmp_path):
    """A checkpoint in 16 bits predicts as the run does, and fine-tuning starts from it."""
    folder, small = run("a", "--objective mlm+pplm --pe abs+t5 --steps 3"), tmp_path / "small.pt"
    page.main([str(folder), str(small)])
    own, given = weights(folder), weights(tmp_path, "small.pt")
    assert own.keys() - given.keys() == {"optimizer", "scaler"}
    for name, x in own["model"].items():
        assert torch.equal(given["model"][name], x.half() if x.dim() == 2 else x), name
    models = [objectives.load(path) for path in (folder, small)]
    batch = models[0].corrupt(validation_sequences(corpus, 4, 16), 0)
    losses = [float(model(batch)[0]) for model in models]
    assert losses[0] == pytest.approx(losses[1], abs=1e-3)
    start = new_classifier(read_checkpoint(small), "", "docs", 32).state_dict()  # a longer one
    assert torch.equal(
        start["encoder.tok.weight"], own["model"]["encoder.tok.weight"].half().float()
    )


def test_wrong_input_is_one_line(make_run, tmp_path, monkeypatch, capsys):
    """What a page cannot show, and where it cannot be written, is refused in one line."""
    monkeypatch.chdir(tmp_path)
    fine = make_run("fine")
    torch.save(weights(fine) | {"task": "rte"}, "tuned.pt")
    monkeypatch.setattr(page, "COMPUTED", ())
    for arguments, message in (
        (["tuned.pt", "page.html"], "is fine-tuned"),
        ([fine, f"{fine}/ckpt.pt"], "cannot write"),
        ([fine, fine, "small.pt"], "from one RUN"),
        ([fine, f"{fine}/ckpt.pt", "page.html"], "given twice"),
        (["page.html"], "no checkpoint under out/"),
    ):
        error = one_line(capsys, page.main, arguments)
        assert message in error and "--" not in error  # it has no flag for a run
    assert not (tmp_path / "page.html").exists()
    for objective, pe, change, message in (
        ("mlm", "abs+rel_k", {}, "no JavaScript for RelativeKeys.scores"),
        ("pmlm", "t5", {}, "this is pmlm"),
        ("clm", "t5", {}, "clm is causal"),
        ("pplm", "abs", {"pair_layer": "last"}, "no --pair_layer last"),
    ):
        refuses(message, page.check, "run", pretraining(objective, pe, **change))
