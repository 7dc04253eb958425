"""Make one HTML file that runs trained models in a browser, without a server or a network.

    python -m tools.page RUN RUN out/page.html  # run folders or checkpoint files
    python -m tools.page out/page.html          # the newest run under out/
    python -m tools.page RUN out/small.pt       # writes a 16-bit checkpoint to share instead

The page has a switch between the models. It predicts a masked word in two orders of a sentence,
restores the order of a shuffled sentence (a run of pplm), and draws attention. The models run in
the page itself: its source, tools/page.html, has the encoder, its heads and the tokenizer in plain
JavaScript. This program fills in the data:

    weights     named as in the checkpoint: token embeddings in 8 bits, other matrices in 6.5 bits
                per weight (pack), vectors in 32 bits
    tables      what the scheme adds at each position, in 32 bits. They come from the run itself,
                so every scheme that uses only the hooks `embed` and `bias` works. rope is computed
                in the page; vectors per offset (rel, deberta, ...) are tables of each layer
    tokenizers  each once

A 16-bit checkpoint has no optimizer state and is a sixth of the size of the run's. All programs
that take --ckpt accept it (their results go to its folder unless --out_dir is given).
"""

import base64
import json
import os
from dataclasses import asdict
from pathlib import Path

import torch
import torch.nn.functional as F

import model as schemes
import objectives
from lib.config import Parser, UserError, one_line_errors
from lib.files import atomic_write, newest_run, read_checkpoint, write_checkpoint
from lib.restore import MARGIN
from model import Component, Positions, parse_pe

SOURCE = Path(__file__).resolve().with_name("page.html")
ROOT = SOURCE.parent.parent  # of the repository: a page inside it has links to its pages
MARK = '<script type="application/json" id="data">null</script>'
MAX_TOKENS = 64  # of a sentence in the page, with [CLS] and [SEP]
TEXTS = {"docs": "the documentation of Python packages", "wikibooks": "Wikipedia and books"}

# What the page says about a component: "the model ..."
MEANINGS = {
    "NoPositions": "gets no positions: a sentence is a bag of words",
    "Absolute": "adds a learned vector for each position to the token's embedding",
    "Sinusoidal": "adds sines and cosines of the position to the token's embedding",
    "LearnedSinusoidal": "adds sines and cosines of the position, with learned frequencies",
    "Relative": "adds a learned vector for each offset between two tokens to keys and values",
    "RelativeKeys": "adds a learned vector for each offset between two tokens to the keys",
    "RelativeSinusoidal": "adds sines and cosines of the offset to keys and values",
    "LearnedRelativeSinusoidal": "adds sines and cosines of the offset to keys and values",
    "T5Bias": "adds a learned number for each offset between two tokens to their attention",
    "T5UntieCls": "adds a learned number for each offset between two tokens to their attention",
    "BertAD": "adds learned vectors for each position to queries and keys",
    "Tupe": "adds to the attention of two tokens a learned term of their two positions",
    "TupeATieCls": "adds to the attention of two tokens a learned term of their two positions",
    "TupeFree": "adds to the attention of two tokens a learned number for their two positions",
    "TupeR": "lets attention also depend on where two tokens are and how far apart",
    "TupeRTieCls": "lets attention also depend on where two tokens are and how far apart",
    "TupeRFactored": "lets attention also depend on where two tokens are and how far apart",
    "Deberta": "compares each token with learned vectors for its offsets to the others",
    "Rotary": "rotates queries and keys, so that attention depends on how far apart two tokens are",
    "Alibi": "lowers the attention of two tokens in proportion to their distance",
}
# The page has JavaScript for the other hooks of these.
COMPUTED = ("Rotary", "BertAD", "Relative", "RelativeKeys", "RelativeSinusoidal")
COMPUTED += ("LearnedRelativeSinusoidal", "Deberta")
PAIRS = {"pplm", "pplm_some"}


# --------------------------------------------------------------------------------------------------
# What the page can run


def check(path, model):
    """Raise UserError if the page cannot compute the model."""
    for part in parse_pe(model.encoder.config.pe):
        for hook in ("edit_qk", "scores", "values"):
            known = part.__name__ in COMPUTED or getattr(part, hook) is getattr(Component, hook)
            if not known:
                raise UserError(f"{path}: a page has no JavaScript for {part.__name__}.{hook}")
    if model.causal:
        raise UserError(f"{path}: clm is causal, and a page runs bidirectional models only")
    if not {"mlm", *PAIRS} & set(model.names):
        raise UserError(f"{path}: a page shows mlm and pplm, and this is {'+'.join(model.names)}")
    if PAIRS & set(model.names) and model.cfg.pair_layer == "last":
        raise UserError(f"{path}: a page has no --pair_layer last")


# --------------------------------------------------------------------------------------------------
# The data of a run


def floats(tensor):
    """-> its numbers in 32 bits, as base64 text."""
    return base64.b64encode(tensor.numpy().astype("<f4").tobytes()).decode()


def quantize(name, matrix):
    """(n, m) -> integers (n, m), and a scale for each row (n, 1): the matrix is about scale *
    integers. The largest integer is 46; for token embeddings, which need it, 143."""
    largest = 143 if name.endswith("tok.weight") else 46
    scale = matrix.abs().amax(1, keepdim=True).clamp(min=1e-12) / largest
    return (matrix / scale).round(), scale


def pack(name, weight):
    """A weight -> JSON. A matrix is written in 93 printable characters, '"' to '~': one for each
    weight (93 integers); five for four token embeddings (287 integers, since 288^4 < 93^5). This
    changes the losses of docs/demo.html's models by .011 at most."""
    shape = list(weight.shape)
    if len(shape) != 2:
        return {"shape": shape, "floats": floats(weight)}
    integers, scale = quantize(name, weight)
    digits = integers.long().flatten() + 46
    if name == "tok.weight":
        four = F.pad(digits + 143 - 46, (0, -len(digits) % 4)).view(-1, 4)
        digits = (four * 288 ** torch.arange(4)).sum(1, keepdim=True) // 93 ** torch.arange(5) % 93
    text = (digits + 34).to(torch.uint8).numpy().tobytes().decode("ascii")
    return {"shape": shape, "rows": text, "scales": floats(scale)}


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
    """-> what the scheme adds at positions 0 to n - 1: embed (n, C), bias (H, n, n), and q and k
    (n, C) of bert_ad, without those that it does not have."""
    pos = Positions(torch.arange(min(encoder.config.max_len, MAX_TOKENS)))
    tables = {"embed": encoder.scheme.embed(pos), "bias": encoder.scheme.bias(pos)}
    if "BertAD" in encoder.scheme.parts:
        heads = encoder.scheme.parts["BertAD"].positions(pos)  # (1, H, n, D) each
        tables["q"], tables["k"] = (x.transpose(1, 2).flatten(2) for x in heads)  # (1, n, C)
    return {name: table[0] for name, table in tables.items() if isinstance(table, torch.Tensor)}


def offset_vectors(encoder, layer):
    """-> the vectors of a layer for the offsets 1 - n to n - 1, (H, 2n - 1, D) each: q_i . keys_r
    and k_j . queries_-r are added to the scores of a pair, and A_ij values_r to the output."""
    cfg, total = encoder.config, {}
    H, D, n = cfg.n_head, cfg.d_head, min(cfg.max_len, MAX_TOKENS)
    rows = torch.arange(1 - n, n).clamp(-cfg.max_offset, cfg.max_offset) + cfg.max_offset
    for part in encoder.scheme.parts.values():
        vectors = {}
        if isinstance(part, schemes.Relative):
            vectors = dict.fromkeys(("keys", "values"), part.table.weight)
        elif isinstance(part, schemes.RelativeSinusoidal):
            vectors = dict.fromkeys(("keys", "values"), part.vectors())
        elif isinstance(part, schemes.RelativeKeys):
            vectors = {"keys": part.layers[layer].weight}
        elif isinstance(part, schemes.Deberta):
            both = part.layers[layer](part.table.weight)  # (R, 2C)
            keys, queries = both.unflatten(-1, (2, H, D)).permute(1, 2, 0, 3)  # (H, R, D) each
            vectors = {"keys": keys, "queries": queries}
        for name, a in vectors.items():
            total[name] = total.get(name, 0) + a.expand(H, -1, D)[:, rows]
    return total


def describe_run(model, args):
    """-> everything the page needs to know about a run, for JSON."""
    encoder, info = model.encoder, model.run_info
    cfg, used = encoder.config, info["args"]
    copies = info["identity"].get("--grad_accum times processes", 0)  # 0: imported from elsewhere
    pairs = [name for name in model.names if name in PAIRS]  # one at most
    layers = range(cfg.n_layer + len(pairs) * (model.cfg.pair_scores == "total"))
    parts = list(encoder.scheme.parts)
    return {
        "text": TEXTS.get(info["data"]["dataset"], args.text),
        "n_tokens": info["step"] * copies * used.get("batch_size", 0) * cfg.max_len,
        "n_parameters": sum(weight.numel() for weight in model.parameters()),
        "objectives": model.names,
        "position": {"name": pairs[0], "pair_scores": model.cfg.pair_scores} if pairs else None,
        "meaning": "; it ".join(MEANINGS.get(part, f"uses {part}") for part in parts),
        "rotary": "Rotary" in parts,
        "config": asdict(cfg),
        "scale": encoder.scheme.scale,
        "token_scale": encoder.scheme.token_scale,
        "weights": {name: pack(name, weight) for name, weight in weights_of(model).items()},
        "tables": {name: floats(table) for name, table in tables_of(encoder).items()},
        "offsets": [
            {name: floats(a) for name, a in offset_vectors(encoder, layer).items()}
            for layer in layers
        ],
    }


def fill(page):
    """The data of a page -> its HTML."""
    data = json.dumps(page)
    data = data.replace("</", r"<\/").replace("<!", r"<\u0021")  # "</script>" ends the data
    return SOURCE.read_text(encoding="utf-8").replace(MARK, MARK.replace("null", data))


def page_text(paths, args):
    """Paths of runs -> the HTML of their page. Raises UserError."""
    files = [Path(path).resolve() for path in paths]
    files = [path.parent if path.name == "ckpt.pt" else path for path in files]
    if len(set(files)) < len(files):
        raise UserError("a RUN is given twice")
    top = os.path.commonpath([path.parent for path in files])
    runs, tokenizers = [], []
    for path, name in zip(paths, files):
        model = objectives.load(path)
        check(path, model)
        ranks = model.run_info["tokenizer"]["mergeable_ranks"]
        tokens = [token.decode("latin-1") for token in sorted(ranks, key=ranks.get)]
        if tokens not in tokenizers:
            tokenizers.append(tokens)
        more = {"tokenizer": tokenizers.index(tokens), "file": os.path.relpath(name, top)}
        runs.append(describe_run(model, args) | more)
    page = {"runs": runs, "tokenizers": tokenizers, "restores": args.restores, "margin": MARGIN}
    folder = Path(args.file).resolve().parent
    if folder.is_relative_to(ROOT):
        page["root"] = os.path.relpath(ROOT, folder)
    return fill(page)


def half_checkpoint(path):
    """A run's checkpoint with its matrices in 16 bits, without the optimizer's state."""
    checkpoint = read_checkpoint(path)
    # Vectors are small, and frequencies need their 32 bits.
    weights = checkpoint["model"].items()
    checkpoint["model"] = {name: x.half() if x.dim() == 2 else x for name, x in weights}
    return {key: value for key, value in checkpoint.items() if key not in ("optimizer", "scaler")}


def main(argv=None):
    with one_line_errors():
        parser = Parser("-m tools.page RUN FILE.pt | [RUN ...] FILE.html", __doc__)
        parser.add_argument("runs", nargs="*", metavar="RUN", type=os.path.expanduser)
        parser.add_argument("file", metavar="FILE", type=os.path.expanduser)
        parser.add_argument(
            "--text", default="your text", help="what runs on files were trained on"
        )
        parser.add_argument("--restores", help="how well order is restored: 'about 6 of 10 swaps'")
        args = parser.parse_args(argv)
        file, runs = Path(args.file), args.runs or [newest_run()]
        if (
            file.suffix not in (".html", ".pt")
            or file.name.startswith("ckpt")
            or file.resolve() == SOURCE
        ):
            raise UserError(f"cannot write {file}: the last argument is a new FILE.html or FILE.pt")
        if file.suffix == ".pt":
            if len(args.runs) != 1:
                raise UserError(f"{file}: a checkpoint is made from one RUN")
            write_checkpoint(file, half_checkpoint(runs[0]))
        else:
            text = page_text(runs, args)
            with atomic_write(file) as handle:
                handle.write(text.encode())
        print(f"{file}: {file.stat().st_size / 1e6:.1f} MB, from {', '.join(runs)}")


if __name__ == "__main__":
    main()
