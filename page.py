"""Runs -> one HTML file that shows and runs their models in a browser: no server, no network.

    python page.py RUN RUN out/page.html    # run folders or checkpoint files, side by side
    python page.py out/page.html            # the newest mlm+pplm and the newest mlm run under out/

The page shuffles a sentence and asks the model for its order, hides words and shows its guesses,
and draws where every word looks. The model is computed in the page: page.html, beside this file, is
its source, with the encoder, its heads and the tokenizer in plain JavaScript and one marked place
for the data. Here the data are made:

    weights     as the checkpoint names them, in 16 bits, one base64 text
    tables      what the scheme adds, in 32 bits: to the input at each place (L, C), to the logits
                of each two places (H, L, L). They come from the run itself, so every scheme that
                acts through `embed` and `bias` runs in the page; rope is rotated there
    tokens      of the tokenizer, in order of rank: all runs of a page have the same
    the rest    names, losses, and the Python source of what the page computes
"""

import base64
import inspect
import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch

from common import Parser, one_line_errors, read_rows, written_aside
from model import PE_NAMES, Block, Component, Positions, parse_pe, used_hooks
from objectives import PairHead, TokenObjective
from probe import probe_words
from sample import load_pretraining, position_objective

SOURCE = Path(__file__).with_name("page.html")
MARK = '<script type="application/json" id="data">null</script>'
# A loss that is drawn beside the model's: of guessing by frequency, of copying given positions.
BASELINES = {"mlm": "unigram", "pplm": "copy", "pplm_some": "some_moved"}
POINTS = 200  # of a loss curve
N_WORDS = 8  # rows of one word that the page averages over: a browser is slower than probe.py


# --------------------------------------------------------------------------------------------------
# Which runs can go


def can_go(pe):
    """Does a scheme act through embed and bias alone, or is it rope?"""
    hooks = set()
    for name, component in parse_pe(pe).items():
        hooks |= set() if name == "rope" else set(used_hooks(component))
    return hooks <= {"embed", "bias"}


def check(path, model):
    """Raise ValueError for what the page cannot compute."""
    if not model.objectives:
        raise ValueError(f"{path} is fine-tuned: a page takes the run that it started from")
    pe, position = model.encoder.config.pe, position_objective(model)
    if not can_go(pe):
        able = ", ".join(filter(can_go, PE_NAMES))
        raise ValueError(f"{path}: a page cannot run pe {pe}; it can run {able}, and sums of them")
    if model.causal:
        raise ValueError(f"{path}: clm reads from the left alone, a page from both sides")
    if position and position.cfg.pair_from == "last":
        raise ValueError(f"{path}: a page cannot run --pair_from last, only own")


def newest_runs():
    """-> folders of the newest mlm+pplm run and the newest mlm run under out/ that can go."""
    newest = {}
    for file in sorted(Path("out").glob("*/ckpt.pt"), key=lambda file: file.stat().st_mtime):
        for facts in read_rows(file.with_name("config.json")):
            if can_go(facts["args"]["pe"]):
                newest[facts["args"]["objective"]] = str(file.parent)
    found = [newest[name] for name in ("mlm+pplm", "mlm") if name in newest]
    if not found:
        raise FileNotFoundError(
            "no mlm+pplm or mlm run under out/ that can go: name one, or train it first "
            "(python train.py --pe tupe_r --objective mlm+pplm --pos_rate .15)"
        )
    return found


# --------------------------------------------------------------------------------------------------
# What the page is given of a run


def in_base64(tensors, dtype):
    """Numbers of all tensors, one after the other -> text. Raises ValueError beyond the range."""
    with np.errstate(over="ignore"):
        numbers = np.concatenate([tensor.numpy().astype(dtype).ravel() for tensor in tensors])
    if not np.isfinite(numbers).all():
        raise ValueError(f"weights too large for {numbers.itemsize * 8} bits")
    return base64.b64encode(numbers.tobytes()).decode()


def weights_of(model):
    """{name: tensor}, named as in the code: tok.weight, blocks.0.qkv.bias, pplm.head.query.weight.
    The scheme's own are left out: its tables hold what comes of them."""
    weights = {}
    for name, weight in model.state_dict().items():
        name = name.removeprefix("encoder.").removeprefix("objectives.")
        if not name.startswith("pe."):
            weights[name] = weight
    weights["tok.weight"] = weights["tok.weight"][: model.encoder.config.vocab_size]  # no padding
    return weights


def tables_of(encoder):
    """What the scheme adds at places 0 .. L-1 -> {"embed": (L, C), "bias": (H, L, L)}, as far as
    it adds something."""
    cfg, tables = encoder.config, {}
    places = torch.arange(cfg.max_len)
    if part := encoder.pe.part_with["embed"]:
        tables["embed"] = part.embed(Positions(places))[0]
    nothing = encoder.tok.weight.new_zeros(1, cfg.n_head, cfg.max_len, cfg.d_head)
    bias = encoder.logits(nothing, nothing, places, 0)[0]  # of queries and keys that say nothing
    if bias.any():
        tables["bias"] = bias
    return tables


def losses_of(path, names):
    """The log beside a checkpoint -> {objective: {"train": [[step, loss], ..], "val": likewise,
    "baseline": [name, loss] or null}}"""
    folder = Path(path) if Path(path).is_dir() else Path(path).parent
    first, *rows = read_rows(folder / "log.jsonl") or [{}]
    found, known = {}, first.get("baselines", {})
    for name in names:
        key = BASELINES.get(name)
        loss = known.get(f"{name}.{key}", known.get(key))  # a single objective's has no prefix
        found[name] = {"baseline": [key, loss] if loss else None}
        for kind, column in (("train", name), ("val", f"val_{name}")):
            points = [[row["step"], round(row[column], 4)] for row in rows if column in row]
            found[name][kind] = points[:: len(points) // POINTS + 1]
    return found


def sources_of(classes):
    """{class: its Python source, after that of what it inherits}"""
    sources = {}
    for cls in classes:
        own = [c for c in cls.__mro__ if c.__module__ == cls.__module__ and c is not Component]
        sources[cls.__name__] = "\n\n".join(inspect.getsource(c) for c in reversed(own))
    return sources


def about(path, model):
    """A run, as JSON can hold it."""
    encoder, position, weights = model.encoder, position_objective(model), weights_of(model)
    return {
        "name": Path(path).resolve().name,
        "dataset": model.facts["data"]["dataset"],
        "n_parameters": sum(weight.numel() for weight in model.parameters()),
        "objectives": model.names,
        "losses": losses_of(path, model.names),
        "pairs": position and {"name": position.name, **asdict(position.cfg)},
        "parts": {name: type(part).__name__ for name, part in encoder.pe.parts.items()},
        "config": asdict(encoder.config),
        "scale": encoder.pe.scale,
        "token_scale": encoder.pe.token_scale,
        "words": probe_words(encoder, N_WORDS).tolist(),
        "shapes": {name: list(weight.shape) for name, weight in weights.items()},
        "weights": in_base64(weights.values(), "<f2"),
        "tables": {name: in_base64([table], "<f4") for name, table in tables_of(encoder).items()},
    }


def data_of(paths):
    """Runs -> what stands in the page's marked place. Raises ValueError, FileNotFoundError."""
    runs, ranks, classes = [], None, [Block, TokenObjective, PairHead]
    for path in paths:
        model = load_pretraining(path)
        check(path, model)
        if ranks not in (None, model.facts["tokenizer"]["mergeable_ranks"]):
            raise ValueError(f"{path} has another tokenizer than {paths[0]}: take runs of one text")
        ranks = model.facts["tokenizer"]["mergeable_ranks"]
        classes += map(type, model.encoder.pe.parts.values())
        runs.append(about(path, model))
    tokens = [token.decode("latin-1") for token in sorted(ranks, key=ranks.get)]
    return {"runs": runs, "tokens": tokens, "sources": sources_of(classes)}


def main(argv=None):
    parser = Parser("page.py", __doc__)
    parser.usage = "python page.py [RUN ..] FILE.html"
    parser.add_argument("runs", nargs="*", metavar="RUN", help="default: see above")
    parser.add_argument("page", metavar="FILE.html", help="where to write")
    args = parser.parse_args(argv)
    target = Path(args.page)
    with one_line_errors():
        if target.suffix != ".html" or target.is_dir() or not target.parent.is_dir():
            raise ValueError(
                f"cannot write {target}: the last argument is FILE.html, in a folder that exists"
            )
        if target.resolve() == SOURCE.resolve():
            raise ValueError(f"{target} is the source of all pages: take another name or folder")
        data = data_of(args.runs or newest_runs())
        text = json.dumps(data).replace("<", "\\u003c")  # </script> would end the data
        text = SOURCE.read_text(encoding="utf-8").replace(MARK, MARK.replace("null", text))
        with written_aside(target) as handle:
            handle.write(text.encode())
    names = ", ".join(run["name"] for run in data["runs"])
    print(f"{target}: {len(text) / 1e6:.1f} MB, {names}; open it in a browser")


if __name__ == "__main__":
    main()
