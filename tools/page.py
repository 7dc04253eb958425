"""Make one HTML file that runs trained models in a browser, without a server or a network.

    python -m tools.page RUN RUN out/page.html  # run folders or checkpoint files, side by side
    python -m tools.page out/page.html          # the newest mlm+pplm and mlm runs under out/

The page restores the order of a shuffled sentence, predicts masked tokens and draws attention. The
models are computed in the page: tools/page.html is its source, with the encoder, its heads and the
tokenizer in plain JavaScript. This program fills in the data:

    weights   named as in the checkpoint, in 16 bits
    tables    what the scheme adds at each position, in 32 bits: to the input (L, C), and to the
              logits (H, L, L). They come from the run itself, so every scheme that uses only the
              hooks `embed` and `bias` works; rope is computed in the page
    tokens    of the tokenizer, which all runs of a page share
    and names, losses, and the Python source of what the page computes
"""

import base64
import inspect
import json
import os
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch

from lib.config import Parser, catch_errors
from lib.files import atomic_write, read_jsonl
from model import PE_NAMES, Block, Component, Positions, Rotary, parse_pe
from objectives import PairHead, TokenObjective
from tools.probe import probe_words
from tools.sample import load_pretraining

SOURCE = Path(__file__).resolve().with_name("page.html")
MARK = '<script type="application/json" id="data">null</script>'
# The baseline that is drawn beside a loss: unigram frequencies, or the assigned positions alone.
BASELINES = {"mlm": "unigram", "pplm": "copy", "pplm_some": "some_moved"}
N_POINTS = 200  # of a loss curve
N_PROBE_WORDS = 8  # sequences that the page averages over; tools.probe, which is faster, uses 300


# --------------------------------------------------------------------------------------------------
# Which runs the page can show


def can_show(pe):
    """Whether a scheme uses only the hooks `embed` and `bias`, or is rope."""
    other_hooks = ("edit_qk", "scores", "values")
    return all(
        component is Rotary
        or all(getattr(component, hook) is getattr(Component, hook) for hook in other_hooks)
        for component in parse_pe(pe)
    )


def check(path, model):
    """Raise ValueError if the page cannot compute the model."""
    pe = model.encoder.config.pe
    if not can_show(pe):
        names = ", ".join(filter(can_show, PE_NAMES))
        raise ValueError(f"{path}: a page cannot run --pe {pe}, only {names} and their sums")
    if model.causal:
        raise ValueError(f"{path}: clm is causal, and a page runs bidirectional models only")


def newest_runs():
    """-> the folders of the newest mlm+pplm run and the newest mlm run under out/ that the page can
    show. Raises FileNotFoundError."""
    newest = {}
    for file in sorted(Path("out").glob("*/ckpt.pt"), key=lambda file: file.stat().st_mtime):
        for run_info in read_jsonl(file.with_name("config.json")):
            if can_show(run_info["args"]["pe"]):
                newest[run_info["args"]["objective"]] = str(file.parent)
    runs = [newest[name] for name in ("mlm+pplm", "mlm") if name in newest]
    if not runs:
        raise FileNotFoundError(
            "no mlm+pplm or mlm run under out/ that a page can show: name a run, or train one "
            "(python train.py --pe tupe_r --objective mlm+pplm --pos_rate .15)"
        )
    return runs


# --------------------------------------------------------------------------------------------------
# The data of a run


def to_base64(tensors, dtype):
    """All tensors, concatenated -> text. Raises ValueError if a number is too large for dtype."""
    with np.errstate(over="ignore"):
        numbers = np.concatenate([tensor.numpy().astype(dtype).ravel() for tensor in tensors])
    if not np.isfinite(numbers).all():
        raise ValueError(f"weights too large for {numbers.itemsize * 8} bits")
    return base64.b64encode(numbers.tobytes()).decode()


def weights_of(model):
    """-> {name: tensor}, such as tok.weight, blocks.0.qkv.bias, pplm.head.query.weight; without
    those of the scheme, whose tables contain their effect."""
    weights = {}
    for name, weight in model.state_dict().items():
        name = name.removeprefix("encoder.").removeprefix("objectives.")
        if not name.startswith("scheme."):
            weights[name] = weight
    weights["tok.weight"] = weights["tok.weight"][: model.encoder.config.vocab_size]  # no padding
    return weights


def tables_of(encoder):
    """-> what the scheme adds at positions 0 to L-1: {"embed": (L, C), "bias": (H, L, L)}, without
    those that it does not have."""
    pos = Positions(torch.arange(encoder.config.max_len))
    tables = {"embed": encoder.scheme.embed(pos), "bias": encoder.scheme.bias(pos)}
    return {name: table[0] for name, table in tables.items() if table is not None}


def losses_of(path, names):
    """The log beside a checkpoint -> {objective: {"train": [[step, loss], ...], "val": the same,
    "baseline": [name, loss] or None}}."""
    folder = Path(path) if Path(path).is_dir() else Path(path).parent
    first, *rows = read_jsonl(folder / "log.jsonl") or [{}]
    losses, baselines = {}, first.get("baselines", {})
    for name in names:
        key = BASELINES.get(name)
        loss = baselines.get(f"{name}.{key}", baselines.get(key))  # no prefix if there is only one
        losses[name] = {"baseline": [key, loss] if loss else None}
        for kind, column in (("train", name), ("val", f"val_{name}")):
            points = [[row["step"], round(row[column], 4)] for row in rows if column in row]
            losses[name][kind] = points[:: len(points) // N_POINTS + 1]
    return losses


def sources_of(classes):
    """-> {class name: its Python source, after that of the classes it inherits from}."""
    sources = {}
    for cls in classes:
        own = [c for c in cls.__mro__ if c.__module__ == cls.__module__ and c is not Component]
        sources[cls.__name__] = "\n\n".join(inspect.getsource(c) for c in reversed(own))
    return sources


def describe_run(path, model):
    """-> everything the page needs to know about a run, for JSON."""
    encoder, weights, position = model.encoder, weights_of(model), None
    for name, objective in model.objectives.items():
        if objective.kind == "position":
            cfg = objective.cfg
            position = {"name": name, "pos_rate": cfg.pos_rate, "pair_scores": cfg.pair_scores}
    return {
        "name": Path(path).resolve().name,
        "dataset": model.run_info["data"]["dataset"],
        "n_parameters": sum(weight.numel() for weight in model.parameters()),
        "objectives": model.names,
        "losses": losses_of(path, model.names),
        "position": position,
        "components": list(encoder.scheme.parts),
        "config": asdict(encoder.config),
        "scale": encoder.scheme.scale,
        "token_scale": encoder.scheme.token_scale,
        "probe_words": probe_words(encoder, N_PROBE_WORDS).tolist(),
        "shapes": {name: list(weight.shape) for name, weight in weights.items()},
        "weights": to_base64(weights.values(), "<f2"),
        "tables": {name: to_base64([table], "<f4") for name, table in tables_of(encoder).items()},
    }


def page_data(paths):
    """Paths of runs -> the data of the page. Raises ValueError, FileNotFoundError."""
    runs, ranks, classes = [], None, [Block, TokenObjective, PairHead]
    for path in paths:
        model = load_pretraining(path)
        check(path, model)
        own_ranks = model.run_info["tokenizer"]["mergeable_ranks"]
        if ranks not in (None, own_ranks):
            raise ValueError(f"{path} has another tokenizer than {paths[0]}")
        ranks = own_ranks
        classes += map(type, model.encoder.scheme.parts.values())
        runs.append(describe_run(path, model))
    tokens = [token.decode("latin-1") for token in sorted(ranks, key=ranks.get)]
    return {"runs": runs, "tokens": tokens, "sources": sources_of(classes)}


def main(argv=None):
    with catch_errors():
        parser = Parser("-m tools.page", __doc__)
        parser.usage = "python -m tools.page [RUN ...] FILE.html"
        parser.add_argument("runs", nargs="*", metavar="RUN", type=os.path.expanduser)
        parser.add_argument("page", metavar="FILE.html", type=os.path.expanduser)
        args = parser.parse_args(argv)
        page = Path(args.page)
        if page.suffix != ".html" or page.is_dir() or not page.parent.is_dir():
            raise ValueError(
                f"cannot write {page}: the last argument is FILE.html, in a folder that exists"
            )
        if page.resolve() == SOURCE:
            raise ValueError(f"{page} is the source of all pages: choose another file")
        data = page_data(args.runs or newest_runs())
        text = json.dumps(data).replace("<", "\\u003c")  # "</script>" would end the data
        text = SOURCE.read_text(encoding="utf-8").replace(MARK, MARK.replace("null", text))
        with atomic_write(page) as handle:
            handle.write(text.encode())
        names = ", ".join(run["name"] for run in data["runs"])
        print(f"{page}: {len(text) / 1e6:.1f} MB, {names}; open it in a browser")


if __name__ == "__main__":
    main()
