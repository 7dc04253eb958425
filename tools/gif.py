"""Record a page of tools/page.py as an animated GIF.

    python -m tools.gif docs/demo.html docs/demo.gif

It needs Chromium, which it controls over the DevTools protocol. The recording switches from none to
another encoding, if the page has both, then shuffles a sentence and restores it. Shuffles that the
model does not restore are skipped, so the GIF shows what the model can do and not how often.
"""

import base64
import io
import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from PIL import Image  # comes with matplotlib

from lib.config import Parser, UserError, one_line_errors
from lib.files import opening

FLAGS = "--headless --no-sandbox --disable-gpu --hide-scrollbars --remote-debugging-pipe"


class Browser:
    """A headless Chromium with one page."""

    def __init__(self, file):
        program = shutil.which("chromium") or shutil.which("google-chrome")
        if program is None:
            raise UserError("no chromium or google-chrome is installed")
        self.folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        # It reads commands from file descriptor 3 and writes answers to 4, each ended by a 0 byte.
        (read, self.out), (self.input, write) = os.pipe(), os.pipe()
        # (bash, as other shells have no descriptors above 9.)
        command = f'exec "$0" {FLAGS} --user-data-dir="$1" 3<&{read} 4>&{write}'
        self.process = subprocess.Popen(
            ["bash", "-c", command, program, self.folder.name],
            pass_fds=(read, write),
            stderr=subprocess.DEVNULL,
        )
        os.close(read), os.close(write)
        self.n, self.rest, self.session, self.errors = 0, b"", None, []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self.session = self.session["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")
        self.resize(700)
        self.call("Page.navigate", url=Path(file).resolve().as_uri())
        self.run("document.readyState === 'complete' ? 0 : new Promise((f) => (onload = f))")

    def call(self, method, **parameters):
        """Send a command -> its result."""
        self.n += 1
        message = {"id": self.n, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self.receive()
            if answer.get("id") == self.n:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']['message']}")
                return answer["result"]
            if answer.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded"):
                self.errors.append(answer["params"])

    def receive(self):
        """-> the next message."""
        while b"\0" not in self.rest:
            received = os.read(self.input, 1 << 20)
            if not received:
                raise UserError("the browser has ended")
            self.rest += received
        message, self.rest = self.rest.split(b"\0", 1)
        return json.loads(message)

    def run(self, script):
        """The value of a JavaScript expression, which may be a promise."""
        result = self.call(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        if "exceptionDetails" in result:
            raise RuntimeError(result["exceptionDetails"]["exception"]["description"])
        return result["result"].get("value")

    def resize(self, height):
        size = {"width": 840, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)

    def screenshot(self):
        """-> what is visible, as an image."""
        data = self.call("Page.captureScreenshot", format="png")["data"]
        return Image.open(io.BytesIO(base64.b64decode(data))).convert("RGB")

    def close(self):
        self.call("Browser.close")
        self.process.wait(30)


# Shuffle until the model restores the sentence, then go back to the shuffled one.
SHUFFLE = """(() => {
    for (let n = 0; n < 100; n++) {
        shuffle();
        const [order, text] = [sentence.order, $("result").textContent];
        restore();
        if ($("result").textContent !== "Restored.") continue;
        set_order(order);
        $("result").textContent = text;
        return true;
    }
    return false;
})()"""


def record(browser):
    """-> [(image, milliseconds), ...]."""
    frames = []

    def show(script, milliseconds, focus=None):
        if focus:  # half a second before the click
            browser.run(f"{focus}.focus({{focusVisible: true}})")
            frames.append((browser.screenshot(), 600))
        browser.run(script)
        browser.run("new Promise((f) => setTimeout(f, 100))")
        frames.append((browser.screenshot(), milliseconds))

    hide = "'form, .soft:not(#sentence + .soft)'"
    browser.run(f"document.querySelectorAll({hide}).forEach((x) => (x.hidden = true))")
    shown = "document.querySelectorAll('.words, #sentence + .soft')"
    last = f"[...{shown}].filter((x) => x.offsetParent).at(-1)"
    # A shuffled sentence may need one more line.
    browser.resize(round(browser.run(f"{last}.getBoundingClientRect().bottom")) + 50)
    names = browser.run("runs.map((run) => run.config.pe)")
    others = [name for name in ("tupe_r", *names) if name in names and name != "none"]
    if "none" in names:
        show(f"choose(runs[{names.index('none')}])", 2500)
    if others:
        n = names.index(others[0])
        show(f"choose(runs[{n}])", 3000, f"$('switch').querySelectorAll('input')[{n}]")
    if browser.run("pair_run !== undefined"):
        if not browser.run(SHUFFLE):
            raise UserError("the model restores none of 100 shuffles of the first sentence")
        browser.run("$('shuffle').focus()")
        show("0", 2500)
        show("restore()", 4000, "$('restore')")
    return frames


def main(argv=None):
    with one_line_errors():
        parser = Parser("-m tools.gif PAGE.html FILE.gif", __doc__)
        parser.add_argument("page", metavar="PAGE.html")
        parser.add_argument("file", metavar="FILE.gif")
        args = parser.parse_args(argv)
        if not Path(args.page).is_file():
            raise UserError(f"{args.page} does not exist")
        browser = Browser(args.page)
        images, durations = zip(*record(browser))
        browser.close()
        images = [image.quantize(64, dither=Image.Dither.NONE) for image in images]
        with opening(args.file):
            images[0].save(
                args.file, save_all=True, append_images=images[1:], duration=durations, loop=0
            )
        print(f"{args.file}: {os.path.getsize(args.file) / 1e6:.2f} MB, {len(images)} frames")


if __name__ == "__main__":
    main()
