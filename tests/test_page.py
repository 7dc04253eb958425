"""tools/page.py and its page: the data, and in a headless Chromium, if there is one, the model in
JavaScript and the user interface."""

import base64
import json
import math
import os
import select
import shutil
import subprocess
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from data import encoding_arguments
from lib.config import defaults
from model import PE_NAMES, Encoder, EncoderConfig
from objectives import ObjectiveConfig, Pretraining
from tests.conftest import one_line
from tools import page, sample

SHOWN = [name for name in PE_NAMES if page.can_show(name)]
SHAPE = dict(vocab_size=8192, n_layer=2, n_head=4, d_model=32, d_ff=48, max_len=64)
LOSSES = [{"step": n, "mlm": 9.0 - n, "pplm": 5.0 - n, "val_mlm": 8.5 - n} for n in range(3)]
TEXTS = [
    "word",
    '<b>bold</b> & "quoted"',
    "it's 3.14, isn't it?",
    "tab\tand\nline\r\nends ",
    "no\u00a0break\u2003em\u3000wide\u0085next \ufeffmark",
    "naïve café Ångström ﬁ ǅ e\u0301 o\u0308",
    "日本語のテキスト 漢字 مرحبا بالعالم",
    "👩‍👩‍👧 🇩🇪 x² + y³ = ½ Ⅷ ٣٤ half a surrogate \ud83d here",
    "_under_ __init__() don't we've THEY'LL I'd",
    "a [MASK] in the [MASK]",
    "the alpha beta gamma " * 20,  # does not fit
]


def random_model(pe, objective="mlm+pplm", norm="post", **settings):
    """A model whose every weight matters."""
    torch.manual_seed(3)
    encoder = Encoder(EncoderConfig(**SHAPE, pe=pe, norm=norm))
    model = Pretraining(encoder, ObjectiveConfig(objective, **settings))
    for p in model.parameters():
        p.data.add_(0.1 * torch.randn_like(p))
    return model


@pytest.fixture
def make_run(corpus, tmp_path):
    """make_run("a", "t5"): a run of random_model in tmp_path / "out" / "a" -> its path."""

    def make(name, pe="abs", objective="mlm+pplm", losses=LOSSES, tokenizer=None, **settings):
        model, folder = random_model(pe, objective, **settings), tmp_path / "out" / name
        args = defaults(ObjectiveConfig) | {"objective": objective, "pe": pe} | settings
        checkpoint = {
            "args": args,
            "config": asdict(model.encoder.config),
            "data": {"dataset": "docs"},
            "tokenizer": encoding_arguments(tokenizer or corpus.tokenizer),
            "model": model.state_dict(),
        }
        folder.mkdir(parents=True)
        torch.save(checkpoint, folder / "ckpt.pt")
        (folder / "config.json").write_text(json.dumps({"args": args}))
        (folder / "log.jsonl").write_text("\n".join(map(json.dumps, [{}, *losses])))
        return str(folder)

    return make


@pytest.fixture
def make_page(tmp_path):
    """make_page(run, ...) -> the page's file."""

    def make(*runs):
        page.main([*runs, str(tmp_path / "page.html")])
        return tmp_path / "page.html"

    return make


def data_in(file):
    return json.loads(file.read_text().split('id="data">')[1].split("</script>")[0])


# --------------------------------------------------------------------------------------------------
# The data


@pytest.mark.parametrize("pe", [pe for pe in SHOWN if pe != "rope"])
@torch.no_grad()
def test_tables_hold_what_the_scheme_adds(pe):
    """The tables, indexed by positions in any order, give the encoder's own input and logits."""
    encoder = random_model(pe).encoder.double().eval()
    tables = page.tables_of(encoder)
    pos, tokens = torch.tensor([0, 7, 2, 3, 9, 1, 4]), torch.randint(8184, (1, 7))
    x = encoder.tok(tokens[0]) * encoder.scheme.token_scale
    x = x + tables["embed"][pos] if "embed" in tables else x
    expected = encoder(tokens, pos, n_layer=0)[0]
    torch.testing.assert_close(encoder.norm(x), expected, atol=1e-5, rtol=1e-5)
    q, k = torch.randn(2, 1, 4, 7, 8, dtype=torch.double)
    bias = tables["bias"][:, pos[:, None], pos] if "bias" in tables else 0
    logits = encoder.scheme.scale * (q @ k.mT)[0] + bias
    torch.testing.assert_close(logits, encoder.logits(q, k, pos, 0)[0], atol=1e-5, rtol=1e-5)


def test_a_page_contains_the_weights_and_the_log(make_run, make_page):
    """Every weight is in the page under its name, except for the scheme's; so are the losses."""
    run = make_run("a<!--", "t5")
    file = make_page(run)
    text = file.read_text().split('id="data">')[1]
    assert text.index("<") == text.index("</script>"), "nothing in the data ends the element"
    data, weights = data_in(file), dict(sample.load_pretraining(run).named_parameters())
    [shown] = data["runs"]
    numbers = np.frombuffer(base64.b64decode(shown["weights"]), "<f2").astype(np.float32)
    numbers = torch.from_numpy(numbers)
    for name, shape in shown["shapes"].items():
        given, numbers = numbers[: math.prod(shape)], numbers[math.prod(shape) :]
        prefix = "objectives." if name.startswith(("mlm", "pplm")) else "encoder."
        assert torch.equal(given.view(shape), weights.pop(prefix + name).half().float())
    assert len(numbers) == 0 and list(weights) == ["encoder.scheme.parts.T5Bias.table.weight"]
    points = [[n, 9.0 - n] for n in range(3)], [[n, 8.5 - n] for n in range(3)]
    assert shown["losses"]["mlm"] == {"train": points[0], "val": points[1], "baseline": None}
    assert sorted(data["tokens"][:256]) == sorted(map(chr, range(256)))
    assert {"Block", "T5Bias", "PairHead"} <= data["sources"].keys()


def test_the_newest_runs_are_found(make_run, make_page, tmp_path, monkeypatch):
    """Without RUN, a page has the newest mlm+pplm run and the newest mlm run that it can show."""
    monkeypatch.chdir(tmp_path)
    for time, objective in enumerate(["mlm", "mlm", "mlm+pplm", "nsp", "mlm"]):
        run = make_run(str(time), "rel" if time == 4 else "abs", objective)
        os.utime(Path(run, "ckpt.pt"), (time, time))
    assert [run["name"] for run in data_in(make_page())["runs"]] == ["2", "1"]


def test_wrong_input_is_one_line(make_run, tmp_path, monkeypatch, capsys):
    """What a page cannot show, and where it cannot be written, is refused in one line."""
    monkeypatch.chdir(tmp_path)
    assert "or train one" in one_line(capsys, page.main, ["page.html"])
    fine = make_run("fine")
    other_tokens = {"name": "gpt2", "pattern": "a", "ranks": ["a"], "specials": {}}
    tuned = torch.load(f"{fine}/ckpt.pt", weights_only=True) | {"task": "rte"}
    torch.save(tuned, "tuned.pt")
    (tmp_path / "folder.html").mkdir()
    for arguments, message in [
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
        ([fine, str(page.SOURCE)], "source of all pages"),
    ]:
        assert message in one_line(capsys, page.main, arguments)
    assert not Path("page.html").exists()


# --------------------------------------------------------------------------------------------------
# In a browser

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
# No sandbox, which containers lack, and nothing that uses the network by itself.
CHROMIUM_FLAGS = (
    "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --remote-debugging-pipe"
).split()


class Browser:
    """A headless Chromium with one page, controlled through a pipe (the DevTools protocol)."""

    def __init__(self, folder):
        read_end, self.write_to = os.pipe()
        self.read_from, write_end = os.pipe()
        redirect = f'exec "$0" "$@" 3</dev/fd/{read_end} 4>/dev/fd/{write_end}'
        self.process = subprocess.Popen(
            ["sh", "-c", redirect, CHROMIUM, *CHROMIUM_FLAGS, f"--user-data-dir={folder}"],
            pass_fds=(read_end, write_end),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(read_end)
        os.close(write_end)
        self.events, self.received, self.number, self.session = [], b"", 0, {}
        target = self.do("Target.createTarget", url="about:blank")["targetId"]
        attached = self.do("Target.attachToTarget", targetId=target, flatten=True)
        self.session = {"sessionId": attached["sessionId"]}
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.do(f"{domain}.enable")
        reduced = {"name": "prefers-reduced-motion", "value": "reduce"}  # so that nothing glides
        self.do("Emulation.setEmulatedMedia", features=[reduced])

    def do(self, method, **params):
        """Send a command -> its result. Events that arrive meanwhile are kept."""
        self.number += 1
        command = {"id": self.number, "method": method, "params": params, **self.session}
        command = json.dumps(command).encode() + b"\0"
        while command:
            command = command[os.write(self.write_to, command) :]
        while (answer := self.next_message()).get("id") != self.number:
            self.events.append(answer)
        assert "error" not in answer, answer
        return answer["result"]

    def next_message(self):
        while b"\0" not in self.received:
            assert select.select([self.read_from], [], [], 60)[0], "Chromium does not answer"
            self.received += os.read(self.read_from, 2**16)
        message, _, self.received = self.received.partition(b"\0")
        return json.loads(message)

    def open(self, file):
        self.events.clear()
        self.do("Page.navigate", url=file.as_uri())
        while not self.events_of("Page.loadEventFired"):
            self.events.append(self.next_message())

    def events_of(self, *methods):
        return [event["params"] for event in self.events if event.get("method") in methods]

    def js(self, expression):
        """-> the value of an expression in the page."""
        answer = self.do("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def center(self, selector, nth=0):
        """Scroll an element into view -> its center."""
        element = f"document.querySelectorAll({json.dumps(selector)})[{nth}]"
        self.js(f"{element}.scrollIntoView({{block: 'center'}})")
        box = self.js(f"{element}.getBoundingClientRect().toJSON()")
        return box["x"] + box["width"] / 2, box["y"] + box["height"] / 2

    def mouse(self, event, at, buttons=0):
        button = {} if event == "mouseMoved" else {"button": "left", "clickCount": 1}
        arguments = dict(x=at[0], y=at[1], buttons=buttons, **button)
        self.do("Input.dispatchMouseEvent", type=event, **arguments)

    def drag(self, *points):
        """Press at the first point, move over the others, release at the last one."""
        self.mouse("mouseMoved", points[0])
        self.mouse("mousePressed", points[0], buttons=1)
        for at in points[1:]:
            self.mouse("mouseMoved", at, buttons=1)
        self.mouse("mouseReleased", points[-1])

    def click(self, selector, nth=0):
        self.drag(self.center(selector, nth))

    def key(self, *names, shift=False):
        codes = {"Tab": 9, "Enter": 13, "Space": 32, "ArrowLeft": 37, "ArrowRight": 39}
        for name in names:
            text = {"Enter": "\r", "Space": " "}.get(name, name if len(name) == 1 else "")
            key = {"key": text if name == "Space" else name, "code": name, "modifiers": 8 * shift}
            key["windowsVirtualKeyCode"] = codes.get(name, 0)
            down = {"type": "keyDown", "text": text} if text else {"type": "rawKeyDown"}
            self.do("Input.dispatchKeyEvent", **key, **down)
            self.do("Input.dispatchKeyEvent", **key, type="keyUp")

    def close(self):
        self.process.terminate()
        self.process.wait(20)
        os.close(self.write_to)
        os.close(self.read_from)


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    if CHROMIUM is None:
        pytest.skip("no Chromium here")
    browser = Browser(tmp_path_factory.mktemp("chromium"))
    yield browser
    browser.close()


COMPUTE = """(run, tokens, pos) => {
    const hidden = run.encoder.forward(tokens, pos), C = run.config.d_model;
    const pairs = run.encoder.pair_logits(hidden, pos, run.position);
    const p = run.encoder.token_probabilities(hidden.slice(C, 2 * C));
    const all = [hidden, p, softmax(pairs, 2 * run.config.max_len - 1)];
    return all.map((x) => Array.from(x, (value) => value.toPrecision(9)).join(" "));
}"""


@pytest.mark.slow
@torch.no_grad()
def test_the_page_computes_what_python_does(browser, make_run, make_page):
    """Token ids, hidden states, probabilities of tokens and of offsets are those of the Python
    model with its weights rounded to 16 bits, also where tokens have wrong positions."""
    runs = [make_run(pe, pe) for pe in ("none", "abs", "t5", "tupe_r", "rope", "sin")]
    runs += [make_run("linear", "t5_untie_cls", pair_scores="content", pair_head="linear")]
    runs += [make_run("some", "rope+t5", "mlm+pplm_some+tc", norm="pre")]
    browser.open(make_page(*runs))
    for n, run in enumerate(runs):
        model = sample.load_pretraining(run)
        encoder, cfg = model.encoder, model.encoder.config
        position = sample.position_objective(model)
        for name, weight in model.named_parameters():
            if not name.startswith("encoder.scheme."):
                weight.data = weight.data.half().float()
        for text in TEXTS if n == 0 else TEXTS[::3]:
            ids = browser.js(f"tokenizer.encode({json.dumps(text)}).slice(0, {cfg.max_len - 2})")
            tokens = [i for i in ids if i != cfg.mask_id]
            plain = text.replace(" [MASK]", "")
            assert tokens == encoder.tokenizer.encode_ordinary(plain)[: cfg.max_len - 2]
            tokens = torch.tensor([[cfg.cls_id, *ids, cfg.sep_id]])
            pos = torch.arange(len(ids) + 2)[None]
            pos[0, 1:-1] = pos[0, 1:-1].roll(1)
            hidden = encoder(tokens, pos)
            logits = model.objectives["mlm"].token_logits(encoder, hidden[0, 1])[: cfg.cls_id]
            pairs = position.head.psi(position.head.scores(encoder, hidden, pos))
            expected = hidden, logits.softmax(-1), pairs.softmax(-1)
            call = f"({COMPUTE})(runs[{n}], {tokens[0].tolist()}, {pos[0].tolist()})"
            for own, given in zip(expected, browser.js(call)):
                given = torch.tensor(list(map(float, given.split()))).view(own.shape)
                torch.testing.assert_close(given, own, atol=5e-5, rtol=1e-4)


@pytest.mark.slow
def test_the_page_splits_text_as_tiktoken_does(browser, make_run, make_page, corpus):
    """Byte-pair encoding and GPT-2's pattern are equal on thousands of lines."""
    from pydoc_data.topics import topics

    run = make_run("a")
    browser.open(make_page(run))
    lines = [line for text in topics.values() for line in text.splitlines()][:3000]
    lines.append("".join(chr(c) for c in range(0x3100) if chr(c).isprintable() or chr(c).isspace()))
    lines += [c * n for c in "ae.=- " for n in range(2, 12)]  # equal ranks: the first is joined
    lines += [f"a{chr(c)} {chr(c)}{chr(c)}b" for c in range(0x3100) if chr(c).isspace()]
    given = browser.js(f"{json.dumps(lines)}.map((line) => tokenizer.encode(line))")
    tokenizer = sample.load_pretraining(run).encoder.tokenizer
    own = [tokenizer.encode_ordinary(line) for line in lines]
    assert [line for line, a, b in zip(lines, given, own) if a != b] == []


@pytest.mark.slow
def test_the_page_restores_order_as_sample_does(browser, make_run, make_page):
    """best_order, confidence and correct_pairs equal those of tools/sample.py."""
    browser.open(make_page(make_run("a")))
    rng = torch.Generator().manual_seed(0)
    for n in (2, 3, 5, 12, 30):
        pos = torch.randperm(n, generator=rng) + 1
        if n == 5:  # the assigned positions are the most likely ones, but excluded
            pos = torch.arange(n) + 1
        true = torch.arange(n) - torch.arange(n)[:, None]
        logits = 3 * torch.randn(n, n, 127, generator=rng) + 4 * F.one_hot(true + 63, 127)
        arguments = f"Float32Array.from({logits.flatten().tolist()}), {pos.tolist()}"
        best = sample.best_order(logits.log_softmax(-1), pos)
        assert browser.js(f"best_order({arguments})") == best.tolist()
        p = logits.softmax(-1).gather(-1, (pos - pos[:, None] + 63)[..., None])[..., 0]
        p = p.fill_diagonal_(0)
        expected = ((p.sum(0) + p.sum(1)) / (2 * n - 2)).tolist()
        assert browser.js(f"confidence({arguments})") == pytest.approx(expected, abs=1e-6)
        share = sample.correct_pairs(pos) / (n * (n - 1) / 2)
        assert browser.js(f"correct_pairs({(pos - 1).tolist()})") == pytest.approx(share)


@pytest.mark.slow
def test_the_user_interface(browser, make_run, make_page):
    """Typing, shuffling, predicting, dragging, masking and pointing work, also with the keyboard
    alone; what is typed is not HTML; there are no errors and no requests."""
    file = make_page(make_run("a", "tupe_r"), make_run("b", "rope", "mlm"))
    browser.open(file)
    shuffle = browser.js("document.querySelector('#shuffle').getBoundingClientRect().bottom")
    assert shuffle < 760, "the first action needs no scrolling"
    sentence = "<b>the</b> alpha beta gamma delta"
    browser.js("document.getElementById('text').value = ''")
    browser.click("#text")
    browser.key(*("Space" if c == " " else c for c in sentence), "Enter")
    shown = browser.js("[...document.querySelectorAll('#mask button')].map((x) => x.textContent)")
    assert "<" in "".join(shown) and browser.js("document.querySelectorAll('main b').length") == 0

    # Shuffle, predict the order (only one run has a pair head), reset.
    n = browser.js("order.length")
    ordered = list(range(n))
    assert browser.js("order") == ordered and browser.js("$('restore').disabled")
    browser.click("#shuffle")
    assert sorted(browser.js("order")) == ordered != browser.js("order")
    browser.click("#restore")
    [answer] = browser.js("[...document.querySelectorAll('#orders article')].map(x => x.innerText)")
    assert "% as predicted" in answer
    assert browser.js("document.querySelectorAll('#orders li').length") == n
    browser.click("#reset")
    assert browser.js("order") == ordered
    # Drag the first token to the third position; move it back by one with the keyboard.
    browser.drag(*[browser.center("#order button", i) for i in range(3)])
    assert browser.js("order")[:3] == [1, 2, 0]
    browser.js("document.querySelector('#order button').focus()")
    browser.key("ArrowRight")
    browser.key("ArrowRight", shift=True)
    assert browser.js("order")[:3] == [1, 0, 2]
    assert browser.js("document.activeElement.dataset.k") == "2", "the focus moves with the token"
    browser.key("Tab", "Enter")  # the next stop is "Predict the order"
    assert browser.js("document.querySelectorAll('#orders article').length") == 1

    # Mask two more tokens with the keyboard, and one of them less with the mouse.
    browser.js("document.querySelector('#mask button').focus()")
    browser.key("Enter", "ArrowRight", "Space")
    assert browser.js("document.querySelectorAll('#predictions .bar').length") == 2 * 3 * 5
    browser.click("#mask button", 0)
    assert browser.js("document.querySelectorAll('#predictions .bar').length") == 2 * 2 * 5

    # Point at a token: arcs of two runs; a map; positions only.
    browser.mouse("mouseMoved", browser.center("#queries button", 2))
    assert browser.js("query") == 2
    assert browser.js("document.querySelectorAll('#attention path').length") == 2 * (n + 2)
    sums = "runs.map((run) => attention_map(run).slice(0, ids.length + 2).reduce((a, b) => a + b))"
    assert browser.js(sums) == pytest.approx([1, 1], abs=1e-5)
    browser.js("$('view').value = 'map'")
    browser.click("#positions-only")
    cells = browser.js("document.querySelectorAll('#attention rect').length")
    assert cells == 2 * ((n + 2) ** 2 + 3)
    assert browser.js("document.querySelectorAll('#losses svg').length") == 2

    phone = dict(width=360, height=700, deviceScaleFactor=1, mobile=True)
    browser.do("Emulation.setDeviceMetricsOverride", **phone)
    assert browser.js("document.documentElement.scrollWidth") == 360, "no horizontal scrolling"
    browser.do("Emulation.clearDeviceMetricsOverride")
    errors = "Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded"
    assert browser.events_of(*errors) == []
    urls = [event["request"]["url"] for event in browser.events_of("Network.requestWillBeSent")]
    assert [url for url in urls if not url.startswith("data:")] == [file.as_uri()]
    browser.js("document.body.append(Object.assign(new Image(), {src: 'http://127.0.0.1:9/x'}))")
    browser.js("1")
    entries = [event["entry"]["text"] for event in browser.events_of("Log.entryAdded")]
    assert any("Content Security Policy" in text for text in entries), "requests are refused"


@pytest.mark.slow
def test_pages_of_other_objectives(browser, make_run, make_page):
    """A section for which no run has a head comes last, with the command that trains one."""
    for objective, missing in [("mlm", 1), ("pplm_binary", 1), ("pmlm", 2), ("nsp+tc", 2)]:
        browser.open(make_page(make_run(objective, objective=objective)))
        sections = browser.js("[...document.querySelectorAll('section')].map(x => x.innerText)")
        needs = ["No run on this page was trained for this" in text for text in sections]
        assert needs == [False] * (4 - missing) + [True] * missing
        if objective == "pplm_binary":
            browser.js("shuffle(); restore()")
            assert "which tokens moved" in browser.js("$('orders').textContent")
        browser.click("#queries button", 1)
        assert browser.events_of("Runtime.exceptionThrown") == []
    browser.open(page.SOURCE)
    assert "python -m tools.page RUN" in browser.js("$('about').textContent")
    assert browser.events_of("Runtime.exceptionThrown") == []
