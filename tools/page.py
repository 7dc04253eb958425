"""Make one HTML file that runs trained models in a browser, without a server or a network.

    python -m tools.page RUN RUN out/page.html  # run folders or checkpoint files, side by side
    python -m tools.page out/page.html          # the newest run under out/
    python -m tools.page RUN out/small.pt       # writes a 16-bit checkpoint to share instead

The page restores the order of a shuffled sentence, predicts masked tokens and draws attention. The
models run in the page itself: its source, tools/page.html, has the encoder, its heads and the
tokenizer in plain JavaScript. This program fills in the data:

    weights   named as in the checkpoint, in 16 bits
    tables    what the scheme adds at each position, in 32 bits: to the input (L, C), and to the
              logits (H, L, L). They come from the run itself, so every scheme that uses only the
              hooks `embed` and `bias` works; rope is computed in the page
    tokens    of the tokenizer, which all runs of a page share

A 16-bit checkpoint has no optimizer state and is a sixth of the size of the run's. All
programs that take --ckpt accept it (their results go to its folder unless --out_dir is given).
docs/demo.html and docs/demo.pt come from the README's mlm+pplm run.
"""

import base64
import json
import os
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch

from lib.config import Parser, UserError, one_line_errors
from lib.files import atomic_write, newest_run, read_checkpoint, write_checkpoint
from model import PE_NAMES, Component, Positions, Rotary, parse_pe
from tools.sample import load_pretraining, position_objective

SOURCE = Path(__file__).resolve().with_name("page.html")
MARK = '<script type="application/json" id="data">null</script>'


def can_show(pe):
    """Whether a scheme uses only the hooks `embed` and `bias`, or is rope."""
    other_hooks = ("edit_qk", "scores", "values")
    return all(
        component is Rotary
        or all(getattr(component, hook) is getattr(Component, hook) for hook in other_hooks)
        for component in parse_pe(pe)
    )


def check(path, model):
    """Raise UserError if the page cannot compute the model."""
    pe = model.encoder.config.pe
    if not can_show(pe):
        names = ", ".join(filter(can_show, PE_NAMES))
        raise UserError(f"{path}: a page cannot run --pe {pe}, only {names} and their sums")
    if model.causal:
        raise UserError(f"{path}: clm is causal, and a page runs bidirectional models only")
    if (position := position_objective(model)) and position.cfg.pair_layer == "last":
        raise UserError(f"{path}: a page has no --pair_layer last")


def to_base64(tensors, dtype):
    """All tensors, concatenated -> text."""
    numbers = [tensor.numpy().astype(dtype).ravel() for tensor in tensors]
    return base64.b64encode(np.concatenate(numbers).tobytes()).decode()


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


def describe_run(model):
    """-> everything the page needs to know about a run, for JSON."""
    encoder, weights, position = model.encoder, weights_of(model), position_objective(model)
    if position:
        cfg, [name] = position.cfg, [n for n, x in model.objectives.items() if x is position]
        position = {"name": name, "pos_rate": cfg.pos_rate, "pair_scores": cfg.pair_scores}
    return {
        "dataset": model.run_info["data"]["dataset"],
        "n_parameters": sum(weight.numel() for weight in model.parameters()),
        "objectives": model.names,
        "position": position,
        "components": list(encoder.scheme.parts),
        "config": asdict(encoder.config),
        "scale": encoder.scheme.scale,
        "token_scale": encoder.scheme.token_scale,
        "shapes": {name: list(weight.shape) for name, weight in weights.items()},
        "weights": to_base64(weights.values(), "<f2"),
        "tables": {name: to_base64([table], "<f4") for name, table in tables_of(encoder).items()},
    }


def page_text(paths):
    """Paths of runs -> the HTML of their page. Raises UserError."""
    runs, ranks = [], None
    for path in paths:
        model = load_pretraining(path)
        check(path, model)
        own_ranks = model.run_info["tokenizer"]["mergeable_ranks"]
        if ranks not in (None, own_ranks):
            raise UserError(f"{path} has another tokenizer than {paths[0]}")
        ranks = own_ranks
        runs.append(describe_run(model))
    tokens = [token.decode("latin-1") for token in sorted(ranks, key=ranks.get)]
    data = json.dumps({"runs": runs, "tokens": tokens})
    data = data.replace("<", "\\u003c")  # "</script>" would end the data
    return SOURCE.read_text(encoding="utf-8").replace(MARK, MARK.replace("null", data))


def half_checkpoint(path):
    """A run's checkpoint with its matrices in 16 bits, without the optimizer's state."""
    checkpoint = read_checkpoint(path)
    # Vectors are small, and frequencies need their 32 bits.
    weights = checkpoint["model"].items()
    checkpoint["model"] = {name: x.half() if x.dim() == 2 else x for name, x in weights}
    return {key: value for key, value in checkpoint.items() if key not in ("optimizer", "scaler")}


def main(argv=None):
    with one_line_errors():
        parser = Parser("-m tools.page", __doc__)
        parser.usage = "python -m tools.page [RUN ...] FILE.html | RUN FILE.pt"
        parser.add_argument("runs", nargs="*", metavar="RUN", type=os.path.expanduser)
        parser.add_argument("file", metavar="FILE", type=os.path.expanduser)
        args = parser.parse_args(argv)
        file, runs = Path(args.file), args.runs or [newest_run()]
        if file.suffix not in (".html", ".pt") or file.is_dir() or not file.parent.is_dir():
            raise UserError(
                f"cannot write {file}: the last argument is FILE.html or FILE.pt, in a folder that "
                "exists"
            )
        if file.resolve() == SOURCE or (file.suffix == ".pt" and file.name.startswith("ckpt")):
            raise UserError(f"{file} would be overwritten: choose another file")
        if file.suffix == ".pt":
            if len(args.runs) != 1:
                raise UserError(f"{file}: a checkpoint is made from one RUN")
            write_checkpoint(file, half_checkpoint(runs[0]))
        else:
            text = page_text(runs)
            with atomic_write(file) as handle:
                handle.write(text.encode())
        print(f"{file}: {file.stat().st_size / 1e6:.1f} MB, from {', '.join(runs)}")


if __name__ == "__main__":
    main()
