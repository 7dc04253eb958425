"""Split the attention logits of layer 1 into token and position terms (TUPE eq 6).

    python -m tools.terms --ckpt RUN [RUN2] --text 'Return the index of the key in the list.'

Each run is shown with the head whose logits depend most on positions. Writes terms.json and, if
matplotlib is installed, terms.png.
"""

import math
import os

import numpy as np
import torch
import torch.nn.functional as F

import objectives
from lib.config import Parser, one_line_errors
from lib.device import keep_memory
from lib.files import newest_run
from model import Positions, Tupe
from tools.output import output_folder, write
from tools.sample import encode

SENTENCE = "Return the index of the key in the list."


@torch.no_grad()
def logit_terms(encoder, tokens):
    """The logits of layer 1 for tokens (1, L), split into terms (TUPE eq 6) -> {title: (H, L, L)},
    without terms that are 0. They add up to tools.probe.attention_logits."""
    scheme, block, pos = encoder.scheme, encoder.blocks[0], Positions(torch.arange(tokens.size(1)))
    parts = [*scheme.parts.values()]

    def project(x, bias=None):  # (1, L, C) -> q, k, v (1, H, L, D), without the block's LayerNorm
        qkv = F.linear(x, block.qkv.weight, bias).unflatten(-1, (3, block.n_head, -1))
        return qkv.permute(2, 0, 3, 1, 4)

    x = encoder.tok(tokens) * scheme.token_scale  # (1, L, C)
    p = torch.zeros_like(x) + scheme.embed(pos)
    for norm in (encoder.norm, block.norm1)[: 1 + block.pre]:
        # Given the standard deviation of x + p, LayerNorm is linear. Its bias, and those of W_Q and
        # W_K below, are counted as token terms, as in a model without input positions.
        sd = ((x + p).var(-1, correction=0, keepdim=True) + norm.eps).sqrt()
        x, p = (norm.weight * (z - z.mean(-1, keepdim=True)) / sd for z in (x, p))
        x = x + norm.bias
    q, k, _ = project(x, block.qkv.bias)
    p_q, p_k, _ = project(p)
    *_, rest = scheme.terms(q + p_q, k + p_k, pos, 0, scheme.bias(pos))
    for part in parts:  # rope rotates all four; bert_ad adds projected positions to q and k
        if added := part.edit_qk(0 * q, 0 * k, pos):
            q, k = (edited - own for edited, own in zip(part.edit_qk(q, k, pos), added))
            p_q, p_k = part.edit_qk(p_q, p_k, pos)
    t, U = parts[0].scale_terms, "U" if hasattr(parts[0], "positions") else "W"
    root = rf"/ \sqrt{{{t if t > 1 else ''}D}}"
    v = rf"p_i {U}_Q \cdot p_j {U}_K {root}"
    terms = {
        rf"token-to-token: $x_i W_Q \cdot x_j W_K {root}$": scheme.scale * q @ k.mT,
        rf"token-to-position: $x_i W_Q \cdot p_j {U}_K {root}$": scheme.scale * q @ p_k.mT,
        rf"position-to-token: $p_i {U}_Q \cdot x_j W_K {root}$": scheme.scale * p_q @ k.mT,
        rf"position-to-position: ${v}$": scheme.scale * p_q @ p_k.mT,
    }
    title = rf"other terms: $\mathrm{{scores}}_{{ij}} {root} + \mathrm{{bias}}_{{ij}}$"
    if isinstance(parts[0], Tupe):
        v += " + b_r" if parts[0].relative else ""
        v = rf"\mathrm{{reset}}({v})" if parts[0].reset else v
        title = f"position-to-position: ${v}$"
    terms[title] = rest
    return {title: term[0] for title, term in terms.items() if torch.as_tensor(term).any()}


def draw_terms(file, runs, title=None):
    """Draw the maps of split_logits, three per line and one color scale per run -> PNG."""
    from matplotlib.figure import Figure

    lines = [math.ceil(len(run["maps"]) / 3) for run in runs]
    figure = Figure(figsize=(6, 0.5 + 2.5 * sum(lines)), layout="constrained")
    figure.suptitle(title, x=0.01, ha="left", size=11, weight="bold")
    parts = figure.subfigures(len(runs), height_ratios=lines, squeeze=False)[:, 0]
    for run, part, n_lines in zip(runs, parts, lines):
        # The softmax ignores what a row has in common.
        maps = {title: A - np.mean(A, 1, keepdims=True) for title, A in run["maps"].items()}
        limit = np.percentile(np.abs([*maps.values()]), 99)
        tokens, last = run["tokens"], len(run["tokens"]) - 1
        for n, (title, A) in enumerate(maps.items()):
            ax = part.add_subplot(n_lines, 3, n + 1)
            image = ax.imshow(A, "PuOr", clim=(-limit, limit), aspect="auto")
            sign = "= " if title.startswith("sum") else "+ " if n else ""
            ax.set_title(sign + title.replace(": ", "\n"), fontsize=10)
            ax.set(xticks=[], yticks=[])
            if n + 3 >= len(maps):  # nothing stands below
                ax.set_xticks([0, last], [tokens[0], tokens[last]], parse_math=False)
                ax.set_xlabel("key $j$")
            if n % 3 == 0:
                ax.set_yticks(range(last + 1), tokens, parse_math=False)
                ax.set_ylabel("query $i$")
        label = f"{run['pe']}, {run['step']:,} steps, head {run['head']}"
        part.suptitle(label, size=10, weight="bold")
        part.colorbar(image, ax=part.axes, aspect=40, label="logit minus its row's mean")
    figure.savefig(file, dpi=200)


def split_logits(paths, text, out_dir):
    """Write and draw the terms of the logits of a sentence."""
    runs = []
    for path in paths:
        model = objectives.load(path).double()
        encoder, tokens = model.encoder, encode(model.encoder, text)
        maps = logit_terms(encoder, tokens)
        total, first = sum(maps.values()), next(iter(maps.values()))
        head = int((total - first)[:, 1:-1, 1:-1].flatten(1).std(1).argmax())
        maps["sum: $s_{ij}$"] = total
        run = {"ckpt": path, "pe": encoder.config.pe, "head": head + 1}
        run |= {name: model.run_info[name] for name in ("command", "step")}
        run["tokens"] = [encoder.tokenizer.decode([i]).strip() for i in tokens[0].tolist()]
        runs.append({**run, "maps": {title: A[head].numpy().round(3) for title, A in maps.items()}})
    file = output_folder(paths[0], "terms", out_dir) / "terms.json"
    write(file, {"text": text, "runs": runs}, {"terms.png": runs}, draw_terms)


def main(argv=None):
    with one_line_errors():
        parser, path = Parser("-m tools.terms", __doc__), os.path.expanduser
        flag = parser.add_argument
        runs = "run folders or checkpoints (default: the newest run)"
        flag("--ckpt", nargs="+", type=path, metavar="RUN", help=runs)
        flag("--text", default=SENTENCE, help="a sentence")
        flag("--out_dir", type=path, help="where to write (default: RUN/terms)")
        args = parser.parse_args(argv)
        keep_memory()
        split_logits(args.ckpt or [newest_run()], args.text, args.out_dir)


if __name__ == "__main__":
    main()
