"""Probe how a model uses positions and tokens: indicators, losses and figures.

    python -m tools.probe                        # the newest run under out/ (or --ckpt RUN)
    python -m tools.probe --runs 'out/*'         # compare runs: tables, and the maps of all
    python -m tools.probe --pe t5,rope,alibi     # untrained schemes (or all); needs no run
    python -m tools.probe --dynamics RUN         # similarity of contexts, over checkpoints
    python -m tools.probe --terms RUN [RUN2] --text '...'   # attention logits, term by term

The identical-word probe (Wang 2021, sec 4.2 and app. B) feeds sequences [CLS] w ... w [SEP], in
which only the positions differ, and averages the attention of layer 1 over heads and 300 words. The
indicators of this attention map are:

    opr   0 if nearer tokens always get more attention (monotonicity), .5 if the order is random;
          ties: the share of equal pairs, which opr counts as ordered; opr_20, ties_20: only the
          first 20 offsets
    aiv   0 if attention depends on the offset alone (translation invariance)
    sd    0 if attention is the same in both directions (symmetry)
    db    1 if the tokens before and after get the same attention (direction balance)

The losses are measured on the run's validation text: for a position objective, a token ablation
(the loss with true, random and shuffled tokens); for mlm, the loss at true positions. A position
objective uses the tokens if random ones increase its loss, and their order if shuffled ones do. The
spread of hidden states is 0 if they depend on their sequence and position, but not on their token.

--terms splits the logits of layer 1 into token and position terms (TUPE eq 6), for the head
whose logits depend most on positions.

Writes probe.json and, if matplotlib is installed, figures.
"""

import glob
import json
import math
import os
import re
import statistics
from collections import defaultdict
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pandas  # comes with datasets
import torch
import torch.nn.functional as F

from data import open_corpus, validation_batches, validation_sequences
from finetune import best_runs
from lib.config import Parser, UserError, one_line_errors
from lib.device import keep_memory, pick_device
from lib.files import newest_run, read_json, read_jsonl, write_json
from model import (
    MAX_OFFSET,
    PE_NAMES,
    Encoder,
    EncoderConfig,
    FactoredBias,
    Positions,
    Relative,
    RelativeKeys,
    RelativeSinusoidal,
    Tupe,
    UntiedPositions,
    frequencies,
)
from objectives import new_batch, seeded_generator
from tools.sample import detect_moved, encode, load_pretraining, position_objective

MAX_POSITIONS = 128  # positions that are probed, as in Wang 2021
TIE = 1e-12  # differences below this share of the largest entry are rounding errors
TRAIN_TOKENS = 10_000_000  # tokens of the training text from which random ones are drawn
SENTENCE = "Return the index of the key in the list."  # of --terms
DYNAMICS_SEQUENCES = 128  # validation sequences that --dynamics uses


# --------------------------------------------------------------------------------------------------
# Indicators (Wang 2021, app. B) of a map A (L, L), a float64 array with queries in rows


def aiv(A):
    """Translation invariance: the variance within groups of the same offset, relative to the
    variance of all entries; NaN for a constant map."""
    if np.ptp(A) <= TIE * abs(A).max():
        return math.nan
    groups = map(A.diagonal, range(1 - len(A), len(A)))
    return float(sum(len(group) * group.var() for group in groups) / A.size / A.var())


def order(A, first=None):
    """Monotonicity -> [opr, ties]: the shares of pairs, going outward from each i, that are out of
    decreasing order, and that are equal; first: use only that many entries. Ties count as ordered,
    so a low opr means nothing if there are many. The 2L series, S_i+ and S_i-, are weighted by
    length."""
    tie = TIE * abs(A).max()
    shares, weight = np.zeros(2), 0
    for i in range(len(A)):
        for s in (A[i, i:], A[i, i::-1]):  # S_i+ and S_i-, both from A_ii outward
            s = s[:first]
            rise = s - s[:, None]  # (n, n): farther entry minus nearer one
            rise = rise[np.triu_indices(len(s), 1)]
            if len(rise):
                shares += len(s) * np.mean([rise > tie, abs(rise) <= tie], 1)
                weight += len(s)
    return (shares / weight).tolist()


def opr(A, first=None):
    """Monotonicity: the first number of order."""
    return order(A, first)[0]


def sd(A):
    """Symmetry: the mean of |A_ij - A_ji| over i < j."""
    return float(abs(A - A.T)[np.triu_indices(len(A), 1)].mean())


def db(A, l=20):  # noqa: E741 (the paper's notation)
    """Direction balance: the sum below the diagonal over the sum above it, |i - j| <= l (the text
    of Wang 2021; its formula is upside down); inf for a causal map."""
    upper = np.triu(np.tril(A, l), 1).sum()
    lower = np.tril(np.triu(A, -l), -1).sum()
    with np.errstate(all="ignore"):
        return float(lower / upper)


def indicators(A):
    """-> {name: float}"""
    names = "opr ties opr_20 ties_20".split()
    return dict(zip(names, order(A) + order(A, 20)), aiv=aiv(A), sd=sd(A), db=db(A))


# --------------------------------------------------------------------------------------------------
# The identical-word probe


@torch.no_grad()
def attention_logits(encoder, tokens, causal=False):
    """The attention logits of layer 1, before the softmax -> (B, H, L, L)."""
    pos = Positions.of(tokens)
    q, k, _ = encoder.blocks[0].heads(encoder.embed(tokens, pos))
    return encoder.logits(q, k, pos, 0, causal=causal)


def probe_words(encoder, n=300):
    """A fixed choice of n tokens that are whole words, or of any tokens if there are too few
    -> (n,) ids."""
    ids = range(encoder.config.cls_id)
    words = [
        i
        for i in ids
        if re.fullmatch(rb" [A-Za-z]{2,}", encoder.tokenizer.decode_single_token_bytes(i))
    ]
    order = np.random.default_rng(0).permutation(words if len(words) >= n else ids)
    return torch.from_numpy(order[:n])


def identical_word_maps(encoder, words, causal=False):
    """words (n,) ids -> the logits and the probabilities of layer 1 for sequences
    [CLS] w ... w [SEP], averaged over words: two float64 arrays (H, L, L)."""
    cfg = encoder.config
    sequences = words[:, None].repeat(1, min(MAX_POSITIONS, cfg.max_len))
    sequences[:, 0], sequences[:, -1] = cfg.cls_id, cfg.sep_id
    logits = A = 0
    for tokens in sequences.split(16):
        s = attention_logits(encoder, tokens, causal=causal).double()  # (16, H, L, L)
        logits = logits + s.sum(0)
        A = A + s.softmax(-1).sum(0)
    return (logits / len(words)).numpy(), (A / len(words)).numpy()


# --------------------------------------------------------------------------------------------------
# Losses


def run_corpus(run_info):
    """The prepared corpus that a run was trained on; nothing is prepared or downloaded. Raises
    UserError if it is not in the run's cache (any more)."""
    args, cache = run_info["args"], Path(run_info["args"]["cache"]).expanduser()
    for folder in (Path(args["dataset"]).expanduser(), *sorted(cache.glob("*"))):
        if (folder / "meta.json").exists() and read_json(folder / "meta.json") == run_info["data"]:
            return open_corpus(folder)
    dataset = run_info["data"]["dataset"]
    raise UserError(f"the text of the run ({dataset}) is not prepared in {cache}")


@torch.no_grad()
def token_ablation(model, corpus):
    """The loss of a position objective, in nats, on the validation sequences with the true tokens,
    with random ones, and with the sequence's own in another order. Without autocast and dropout
    (the model is left in eval mode), so `true` is the validation loss in the log of a float32 run.

    -> {"true", "random", "shuffled", "auc"}; auc: how well moved tokens are detected
    (tools.sample.detect_moved), None for pmlm.
    """
    [(name, objective)] = [x for x in model.objectives.items() if x[1].kind == "position"]
    encoder = model.encoder
    cls_id, device = encoder.config.cls_id, encoder.tok.weight.device
    batches = validation_batches(corpus, encoder.config.max_len)
    text = torch.from_numpy(corpus.train[:TRAIN_TOKENS].astype(int)).to(device)
    text, n = text[text < cls_id], sum(map(len, batches))
    losses, aucs = defaultdict(float), []
    model.eval()
    for number, tokens in enumerate(batches):  # the same corruption as in train.evaluate
        batch = model.corrupt(tokens.to(device), "validation", number)
        torch.manual_seed(number)
        for kind, replaced in replaced_tokens(batch["tokens"], cls_id, text).items():
            _, scalars = model({**batch, "tokens": replaced})
            losses[kind] += float(scalars[name]) * len(tokens) / n
        if not objective.masks_positions:
            aucs += [auc for *_, auc in detect_moved(encoder, objective, batch)]
    losses["auc"] = float(np.nanmean(aucs)) if aucs else None
    return losses


def replaced_tokens(tokens, cls_id, text):
    """tokens (B, L) -> {"true": unchanged, "random": drawn from text (N,), "shuffled": the
    sequence's own in random order}, special tokens staying as they are. Uses the global
    generator."""
    special = tokens >= cls_id
    random = text[torch.randint_like(tokens, len(text))]
    # Both sorts are stable and put special tokens last, in their own order. So the others get
    # each other's indices at random, and special tokens their own.
    draws = torch.rand_like(tokens, dtype=torch.float).masked_fill(special, 2.0)
    source = draws.argsort(stable=True)
    target = special.long().argsort(stable=True)
    return {
        "true": tokens,
        "random": torch.where(special, tokens, random),
        "shuffled": tokens.scatter(1, target, tokens.gather(1, source)),
    }


@torch.no_grad()
def mlm_loss(model, corpus):
    """The loss of mlm, in nats, on the validation sequences at true positions, whatever else the
    objective corrupts, so that mlm and mlm+pplm can be compared. Without autocast and dropout."""
    encoder, mlm = model.encoder, model.objectives["mlm"]
    batches, total = validation_batches(corpus, encoder.config.max_len), 0
    model.eval()
    for number, tokens in enumerate(batches):
        tokens = tokens.to(encoder.tok.weight.device)
        batch = new_batch(tokens, encoder.config.vocab_size)
        mlm.corrupt(batch, seeded_generator(tokens.device, "validation", number, "mlm"))
        loss, _ = mlm.loss(encoder, encoder(batch["tokens"]), batch)
        total += float(loss) * len(tokens)
    return total / sum(map(len, batches))


# --------------------------------------------------------------------------------------------------
# Figures: {file: panels}, a panel being a dictionary with a matrix or with curves


def heatmap(title, matrix, axes=("key position", "query position"), first=0):
    """axes: labels of columns and rows; first: the position or offset of column and row 0."""
    return dict(title=title, axes=axes, first=first, matrix=np.asarray(matrix))


def attention_map(title, A):
    """A map of attention probabilities, to be compared with those of other models: on a fixed
    scale, in powers of two relative to uniform attention."""
    matrix = np.log2(np.maximum(A * len(A), 2.0**-9))
    return {**heatmap(title, matrix), "limits": (-3, 3)}


def position_vectors(encoder):
    """-> {"position": (L, C), "offset": (R, D) with offset 0 in the middle}, as far as the scheme
    has them, in float64."""
    vectors, scheme = {}, encoder.scheme
    L = min(MAX_POSITIONS, encoder.config.max_len)
    m = min(MAX_OFFSET, L - 1)  # larger offsets do not occur in training
    offsets = slice(MAX_OFFSET - m, MAX_OFFSET + m + 1)
    p = scheme.embed(Positions(torch.arange(L)))
    if p is not None:
        vectors["position"] = p[0]
    for part in scheme.modules():
        if isinstance(part, UntiedPositions):  # TUPE, bert_ad: what U_Q and U_K are applied to
            vectors["position"] = part.norm(part.table.weight)[:L]
        if isinstance(part, (Relative, FactoredBias)):
            vectors["offset"] = part.table.weight[offsets]
        if isinstance(part, RelativeKeys):  # one table per layer: that of layer 1
            vectors["offset"] = part.layers[0].weight[offsets]
        if isinstance(part, RelativeSinusoidal):
            vectors["offset"] = part.vectors()[offsets]
    return {axis: v.detach().double() for axis, v in vectors.items()}


def similarity_maps(vectors):
    """Dot products (Wang 2021, figs 1 and 8) and cosines (fig 6) of position vectors."""
    panels = []
    for axis, v in vectors.items():
        first = -(len(v) // 2) if axis == "offset" else 0
        unit = F.normalize(v, dim=1)
        panels.append(heatmap("dot products", v @ v.T, (axis, axis), first))
        panels.append(heatmap("cosines", unit @ unit.T, (axis, axis), first))
    return panels


def proximity(vectors):
    """The mean dot product of two vectors at distance r (Wang 2021, fig 4b); for sinusoids with the
    default frequencies it is the mean of cos(w_k r) (eq 6)."""
    curves = {}
    for axis, v in vectors.items():
        length, width = v.shape
        r, dots = torch.arange(length), v @ v.T
        mean = torch.stack([dots.diagonal(i).mean() for i in r])
        curves[f"{axis} vectors"] = r, mean / mean[0]
        angles = r[:, None] * frequencies(width // 2 * 2, v)
        curves[f"default sinusoids of width {width}"] = r, angles.cos().mean(1)
    axes = dict(xlabel="distance r", ylabel="dot product relative to r = 0")
    return [dict(title="proximity", curves=curves, **axes)] if curves else []


def learned_frequencies(encoder):
    """The frequencies of lsin and rlsin beside the default ones (Wang 2021, fig 4a)."""
    curves = {}
    for name, part in encoder.scheme.parts.items():
        if getattr(part, "learned", False):  # sinusoids whose frequencies are parameters
            w, k = part.w.detach(), torch.arange(len(part.w))
            curves[f"{name}, learned"] = k, w.abs()
            curves[f"{name}, default"] = k, frequencies(2 * len(w), w)
    axes = dict(xlabel="k", ylabel="|w_k|, radians per position", yscale="log")
    return [dict(title="frequencies", curves=curves, **axes)] if curves else []


@torch.no_grad()
def figures_of(encoder, logits):
    """An encoder on the CPU, and its logits (H, L, L) of the identical-word probe -> the figures of
    one model; those for which the scheme has nothing to show are empty."""
    vectors, (H, L, _) = position_vectors(encoder), logits.shape
    # The logits without tokens, q = k = 0: TUPE's positional correlation, or another scheme's bias.
    zero = encoder.tok.weight.new_zeros(1, H, L, encoder.config.d_head)
    bias = encoder.logits(zero, zero, torch.arange(L), 0)[0]  # (H, L, L)
    heads = enumerate(bias if bias.any() else (), 1)
    return {
        "map.png": [heatmap(f"{encoder.config.pe}: mean logits", logits.mean(0))],  # figs 2, 11
        "vectors.png": similarity_maps(vectors),
        "proximity.png": proximity(vectors),
        "frequencies.png": learned_frequencies(encoder),
        "positional.png": [heatmap(f"head {h}", b) for h, b in heads],  # TUPE fig 5
    }


def draw(file, panels):
    """Draw panels as a grid -> PNG."""
    from matplotlib.figure import Figure

    columns, width, height = 1, 9, 3.6
    if "matrix" in panels[0]:
        columns, width, height = min(len(panels), 6), 2.9, 2.5
    if "limits" in panels[0]:
        width, height = 8.4 / columns, 1.8
    rows = math.ceil(len(panels) / columns)
    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    for number, panel in enumerate(panels, 1):
        ax = figure.add_subplot(rows, columns, number)
        ax.set_title(panel["title"], size=10)
        if "curves" in panel:
            ax.set(**{name: panel[name] for name in panel.keys() & {"xlabel", "ylabel", "yscale"}})
            for name, (x, y) in panel["curves"].items():
                ax.plot(x, y, marker=".", label=name)
            ax.grid(alpha=0.3)
            ax.legend(bbox_to_anchor=(1, 1), loc="upper left")
            continue
        M = np.ma.masked_invalid(panel["matrix"])  # -inf of a causal model stays white
        start = panel["first"] - 0.5
        stop = start + len(M)
        image = ax.imshow(M, "cividis_r", extent=(start, stop, stop, start))
        if "limits" in panel:
            image.set(cmap="PuOr", clim=panel["limits"])
            ax.set(xticks=[], yticks=[])
            continue
        ax.set(xlabel=panel["axes"][0], ylabel=panel["axes"][1])
        # The middle 98%, without the edges, so that [CLS] and [SEP] do not hide the rest.
        image.set_clim(*np.percentile(M[1:-1, 1:-1].compressed(), (1, 99)))
        figure.colorbar(image, ax=ax, fraction=0.046)
    if "limits" in panels[0]:  # one scale for all
        ticks = {-3: "1/8", -2: "1/4", -1: "1/2", 0: "1", 1: "2", 2: "4", 3: "8"}
        bar = figure.colorbar(image, ax=figure.axes, location="bottom", shrink=0.6, aspect=50)
        bar.set_ticks([*ticks], labels=[*ticks.values()])
        bar.set_label("attention of a query (row) to a key (column), relative to uniform attention")
        title = "Attention of layer 1 between identical tokens that differ only in their positions"
        figure.suptitle(title, x=0.01, ha="left", size=11, weight="bold")
    figure.savefig(file, dpi=200)


# --------------------------------------------------------------------------------------------------
# Terms of the attention logits


@torch.no_grad()
def logit_terms(encoder, tokens):
    """The logits of layer 1 for tokens (1, L), split into terms (TUPE eq 6) -> {title: (H, L, L)},
    without terms that are 0. They add up to attention_logits(encoder, tokens)."""
    scheme, block, pos = encoder.scheme, encoder.blocks[0], Positions(torch.arange(tokens.size(1)))
    parts = [*scheme.parts.values()]

    def project(x, bias=None):  # (1, L, C) -> q, k, v (1, H, L, D), without the block's LayerNorm
        qkv = F.linear(x, block.qkv.weight, bias).unflatten(-1, (3, block.n_head, -1))
        return qkv.permute(2, 0, 3, 1, 4)

    x = encoder.tok(tokens) * scheme.token_scale  # (1, L, C)
    p = scheme.embed(pos)
    p = torch.zeros_like(x) if p is None else p
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
    return {title: term[0] for title, term in terms.items() if term is not None and term.any()}


def show_terms(paths, text, out_dir):  # --terms
    """Write and draw the terms of the logits of a sentence."""
    runs = []
    for path in paths:
        model = load_pretraining(path).double()
        encoder, tokens = model.encoder, encode(model.encoder, text)
        maps = logit_terms(encoder, tokens)
        total, first = sum(maps.values()), next(iter(maps.values()))
        head = int((total - first)[:, 1:-1, 1:-1].flatten(1).std(1).argmax())
        maps["sum: $s_{ij}$"] = total
        run = {"ckpt": path, "pe": encoder.config.pe, "head": head + 1}
        run |= {name: model.run_info[name] for name in ("command", "step")}
        run["tokens"] = [encoder.tokenizer.decode([i]).strip() for i in tokens[0].tolist()]
        runs.append({**run, "maps": {title: A[head].numpy().round(3) for title, A in maps.items()}})
    folder = output_folder(paths[0], "terms", out_dir)
    write(folder, {"text": text, "runs": runs}, {"terms.png": runs})


def draw_terms(file, runs, title=None):
    """Draw the maps of show_terms, one row and color scale per run -> PNG."""
    from matplotlib.figure import Figure

    columns = max(len(run["maps"]) for run in runs)
    figure = Figure(figsize=(8.4, 2.45 * len(runs)), layout="constrained")
    figure.suptitle(title, x=0.01, ha="left", size=11, weight="bold")
    for line, run in enumerate(runs):
        # The softmax ignores what a row has in common.
        maps = {title: A - np.mean(A, 1, keepdims=True) for title, A in run["maps"].items()}
        limit = np.percentile(np.abs([*maps.values()]), 99)
        ticks, n_empty = range(len(run["tokens"])), columns - len(maps)
        for n, (title, A) in enumerate(maps.items()):
            column = n + n_empty if n else 0  # the first term at the left, the others at the right
            ax = figure.add_subplot(len(runs), columns, line * columns + column + 1)
            image = ax.imshow(A, "PuOr", clim=(-limit, limit))
            ax.set_title(title.replace(": ", "\n"), fontsize=8.5)
            ax.set_xticks(ticks, run["tokens"], rotation=90, fontsize=8, parse_math=False)
            ax.set(yticks=[], xlabel="key $j$")
            sign = "=" if title.startswith("sum") else "+"
            ax.set_ylabel(sign, rotation=0, ha="right", va="center", fontsize=14)
            if n == 0:
                ax.set_yticks(ticks, run["tokens"], fontsize=8, parse_math=False)
                label = f"{run['pe']}, {run['step']:,} steps, head {run['head']}\nquery $i$"
                ax.set_ylabel(label, rotation=90, ha="center", va="bottom", fontsize=9)
        figure.colorbar(image, fraction=0.046, label="logit minus its row's mean")
    figure.savefig(file, dpi=200)


# --------------------------------------------------------------------------------------------------
# Flags and output, also of blimp.py and lengths.py


def add_run_flags(parser, folder):
    """Add --ckpt, --out_dir and --device -> the add_argument of flags that exclude --ckpt."""
    flag, path = parser.add_argument, os.path.expanduser
    mode = parser.add_mutually_exclusive_group().add_argument
    mode("--ckpt", type=path, help="run folder or checkpoint (default: the newest run)")
    flag("--out_dir", type=path, help=f"where to write (default: RUN/{folder})")
    flag("--device", choices=("cpu", "cuda", "mps"), help="default: cuda, else mps, else cpu")
    return mode


def output_folder(path, name, out_dir):
    """-> out_dir, or by default the folder `name` of a run, or for a checkpoint file
    <name>_<checkpoint> beside it."""
    file = Path(path)
    default = file.with_name(f"{name}_{file.stem}") if file.is_file() else file / name
    return Path(out_dir or default)


def write_numbers(file, numbers):
    """Write JSON: arrays with seven decimals, NaN as null, infinity as "inf"."""
    Path(file).parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(numbers, default=lambda array: np.asarray(array).round(7).tolist())
    write_json(file, json.loads(text, parse_constant={"Infinity": "inf"}.get))


def write(folder, numbers, figures):
    """Write probe.json, and the figures if matplotlib is installed."""
    folder, written = Path(folder), ["probe.json"]
    write_numbers(folder / "probe.json", numbers)
    if find_spec("matplotlib"):
        for file, panels in figures.items():
            if panels:
                (draw_terms if file == "terms.png" else draw)(folder / file, panels)
                written.append(file)
    else:
        print("no figures: pip install matplotlib")
    print(f"wrote {folder}: {', '.join(written)}")


def print_table(rows):
    """Dictionaries -> a Markdown table, without columns that are empty or hold dictionaries; NaN
    and None become a dash."""
    columns = []
    for name in dict.fromkeys(name for row in rows for name in row):
        cells = [row.get(name, "") for row in rows]
        if isinstance(cells[0], dict):
            continue
        cells = [f"{x:.4f}" if isinstance(x, float) else str(x) for x in cells]
        if any(cells):
            cells = ["-" if x in ("nan", "None") else x for x in cells]
            width = max(map(len, [name, *cells]))
            columns.append([cell.ljust(width) for cell in (name, "-" * width, *cells)])
    for line in zip(*columns):
        print(f"| {' | '.join(line)} |")


# --------------------------------------------------------------------------------------------------
# One run, many runs, untrained schemes


def examine(path, device):
    """-> the model on the CPU in float64, the mean logits (H, L, L) of the identical-word probe,
    its map A (L, L), and the numbers for probe.json. Raises UserError, OSError."""
    model = load_pretraining(path)
    losses = {"words": dict.fromkeys(("true", "random", "shuffled", "auc"))}
    losses |= {"mlm": None, "spread": None}
    try:
        corpus = run_corpus(model.run_info)
    except (UserError, OSError) as error:
        print(f"{path}: no losses, {error}")
    else:
        model.to(device)
        tokens = validation_batches(corpus, model.encoder.config.max_len)[0].to(device)
        losses["spread"] = token_spread(model.encoder, tokens, model.causal)
        if position_objective(model):
            losses["words"] = token_ablation(model, corpus)
        if "mlm" in model.objectives:
            losses["mlm"] = mlm_loss(model, corpus)
    model.cpu().double()  # in this order: an Apple GPU has no float64
    logits, A = identical_word_maps(model.encoder, probe_words(model.encoder), model.causal)
    A = A.mean(0)  # average first, then compute the indicators
    numbers = {
        "pe": model.encoder.config.pe,
        "objective": "+".join(model.names),
        "indicators": {
            "with_specials": indicators(A),
            "without_specials": indicators(A[1:-1, 1:-1]),  # rows, columns of [CLS] and [SEP]
        },
        **losses,
    }
    return model, logits, A, numbers


def probe_run(path, out_dir, device):  # --ckpt
    """Write and print the probe of one run. Raises UserError, OSError."""
    model, logits, A, numbers = examine(path, device)
    folder, saved = output_folder(path, "probe", out_dir), {"ckpt": str(path), **numbers, "map": A}
    write(folder, saved, figures_of(model.encoder, logits))
    print_table([{"": name.replace("_", " "), **x} for name, x in numbers["indicators"].items()])
    words = numbers["words"]
    if words["true"] is not None:
        print(
            "token ablation: position loss {true:.3f} with the true tokens, {random:.3f} with "
            "random ones, {shuffled:.3f} with shuffled ones".format(**words)
        )
    if words["auc"] is not None:
        print(f"AUC of moved tokens against the others: {words['auc']:.3f} (chance .5)")
    if numbers["spread"]:
        print(
            "spread of hidden states, layer 0 to the last:",
            *(f"{x:.2g}" for x in numbers["spread"]),
        )
    if numbers["mlm"] is not None:
        print(f"mlm loss at true positions: {numbers['mlm']:.3f}")


def task_scores(folder, step):
    """-> {"task metric": median over seeds at the best learning rate} of the runs of finetune.py
    that started from a run's last checkpoint, with the settings of the last one of each task."""
    rows = [row for row in read_jsonl(folder / "results.jsonl") if row.get("step") == step]
    rows = [row for row in rows if "finetuned-" not in row["ckpt"]]

    def settings(row):
        return [row.get(x) for x in "ckpt recipe epochs batch_size length n_train".split()]

    last = {row["task"]: settings(row) for row in rows}
    rows = {(x["task"], x["lr"], x["seed"]): x for x in rows if settings(x) == last[x["task"]]}
    best = best_runs(rows.values(), statistics.median)
    return {
        f"{task} {metric}": statistics.median(row["metrics"][metric] for row in group)
        for (_, task), group in best.items()
        for metric in group[0]["metrics"]
    }


INDICATORS = ("opr", "opr_20", "aiv", "aiv w/o specials", "sd", "db")


def correlations(runs):
    """Pearson's r of indicators and task scores over the runs of one objective (Wang 2021, table 5)
    -> rows of a table. Runs without positions (none) are left out, as in its footnote 11."""
    rows, table = [], []
    for run in runs:
        for score, value in run["scores"].items():
            rows.append({**run, "score": score, "value": value})
    frame = pandas.DataFrame(rows, columns=["pe", "objective", "score", "value", *INDICATORS])
    frame = frame[frame.pe != "none"].replace([math.inf, -math.inf], math.nan)
    for (objective, score), group in frame.groupby(["objective", "score"]):
        if len(group) > 2:
            r = group[["value", *INDICATORS]].corr(min_periods=3)["value"].drop("value")
            table.append({"objective": objective, "score": score, "runs": len(group), **r})
    return table


def compare_runs(patterns, out_dir, device):  # --runs
    """Print the indicators (Wang 2021, table 2) and losses of runs and the correlations with their
    task scores; draw their maps side by side. Raises UserError."""
    globs = [os.path.expanduser(f"{pattern}/ckpt.pt") for pattern in patterns]
    folders, runs = {Path(file).parent for x in globs for file in glob.glob(x)}, []
    for folder in sorted(folders):
        try:
            model, _, A, numbers = examine(folder, device)
        except (UserError, OSError) as error:
            print(f"{folder}: left out, {error}")
            continue
        log = read_jsonl(folder / "log.jsonl")
        val_loss = next((row["val_loss"] for row in reversed(log) if "val_loss" in row), None)
        step = model.run_info["step"]
        run = {
            "run": folder.name,
            **numbers,
            "spread": numbers["spread"] and numbers["spread"][-1],  # of the last layer
            "steps": step,
            "val_loss": val_loss,
            **numbers["indicators"]["with_specials"],
            "aiv w/o specials": numbers["indicators"]["without_specials"]["aiv"],
            **{f"words {kind}": loss for kind, loss in numbers["words"].items()},
            "scores": task_scores(folder, step),
        }
        loss = val_loss if numbers["mlm"] is None else numbers["mlm"]
        title = numbers["pe"] if loss is None else f"{numbers['pe']}: loss {loss:.2f}"
        runs.append((run, attention_map(title, A)))
    if not runs:
        raise UserError(f"{' '.join(patterns)}: no folder with a readable ckpt.pt")
    runs.sort(key=lambda pair: pair[0]["mlm"] or pair[0]["val_loss"] or math.inf)
    runs, maps = zip(*runs)
    table5 = correlations(runs)
    numbers = {"runs": runs, "correlations": table5}
    write(out_dir or min(folders).parent / "probe", numbers, {"maps.png": maps})
    print_table(runs)
    if table5:
        print("Pearson's r; positive: runs with a higher indicator have better scores")
        print_table(table5)


def untrained_schemes(names, out_dir):  # --pe
    """The indicators and maps of schemes before training, in an encoder of the demo's shape with
    random tokens. Raises UserError."""
    maps, table = [], []
    names = PE_NAMES if names == "all" else names.split(",")
    try:
        configs = [EncoderConfig(vocab_size=8192, pe=pe.strip()) for pe in names]
    except ValueError as error:  # an unknown scheme or an illegal sum
        raise UserError(str(error)) from None
    for cfg in configs:
        torch.manual_seed(0)
        encoder = Encoder(cfg).requires_grad_(False)
        words = torch.arange(encoder.config.cls_id)[:: encoder.config.cls_id // 50]
        _, A = identical_word_maps(encoder.double().eval(), words)
        maps.append(attention_map(encoder.config.pe, A.mean(0)))
        table.append({"pe": encoder.config.pe, **indicators(A.mean(0)[1:-1, 1:-1])})
    write(out_dir or "out/schemes", {"schemes": table}, {"maps.png": maps})
    print_table(table)


# --------------------------------------------------------------------------------------------------
# Dynamics over the checkpoints of a run


def context_cosines(vectors, eligible):
    """The mean cosine of a token with the other tokens of its sequence, and with those of other
    sequences (TACO, app. A.3). TACO samples one of each per token; here all are averaged: the same
    mean without the noise (deviation).

    vectors (B, L, C), eligible (B, L) bool, both on the CPU -> {name: float}
    """
    g = F.normalize(vectors.double(), dim=-1) * eligible[..., None]
    m = eligible.sum(1, keepdim=True)  # (B, 1): tokens per sequence
    own = g.sum(1, keepdim=True)  # (B, 1, C): their sum
    intra = ((g * own).sum(-1) - 1) / (m - 1)  # (B, L), without the token itself
    inter = (g * (own.sum(0) - own)).sum(-1) / (m.sum() - m)
    intra, inter = float(intra[eligible].mean()), float(inter[eligible].mean())
    return {"intra-context": intra, "inter-context": inter, "contextual score": intra - inter}


def token_spread(encoder, tokens, causal=False):
    """How much hidden states depend on their own tokens, after each layer: their RMS after
    subtracting the mean of each sequence and of each position, divided by their RMS before.
    At 0, tokens cannot be told apart. tokens (B, L), of which only ordinary ones count
    -> a list of n_layer + 1 numbers, the first one for the embedding."""
    ordinary = (tokens < encoder.config.cls_id)[..., None].cpu().double()  # (B, L, 1)
    spreads = []
    for hidden in encoder.hidden_states(tokens, causal=causal):
        rest = hidden = hidden.cpu().double() * ordinary  # (B, L, C)
        for axis in (1, 0):  # the mean of each sequence, then of each position
            mean = rest.sum(axis, keepdim=True) / ordinary.sum(axis, keepdim=True).clamp(min=1)
            rest = (rest - mean) * ordinary
        spreads.append(float((rest.square().sum() / hidden.square().sum()).sqrt()))
    return spreads


def word_pair_similarity(encoder, file):
    """The mean cosine of two words' embeddings (averaged over a word's tokens) over the lines
    word<TAB>word<TAB>score of a file. Raises UserError."""
    cosines = []
    text = Path(file).read_text(encoding="utf-8")
    for number, line in enumerate(text.splitlines() or [""], 1):
        words = line.split("\t")[:-1]
        if len(words) != 2:
            raise UserError(f"{file}, line {number} is not word<TAB>word<TAB>score")
        ids = [encoder.tokenizer.encode_ordinary(" " + word) for word in words]
        one, two = [encoder.tok.weight[x].mean(0) for x in ids]  # (C,)
        cosines.append(F.cosine_similarity(one, two, dim=0))
    return float(torch.stack(cosines).mean())


def dynamics(folder, pairs, out_dir, device):  # --dynamics
    """Measure how similar a run's contexts and words are at each of its checkpoints (TACO, figs 3
    and 6), and the spread of its hidden states. Raises UserError, OSError."""
    folder, table, tokens = Path(folder), [], None
    checkpoints = {int(file.stem[5:]): file for file in folder.glob("ckpt_[0-9]*.pt")}
    if not checkpoints:
        raise UserError(f"{folder} has no ckpt_<step>.pt: train with --keep_every N")
    for step, file in sorted(checkpoints.items()):
        model = load_pretraining(file)
        cfg, encoder = model.encoder.config, model.encoder.to(device)
        if tokens is None:
            corpus = run_corpus(model.run_info)
            tokens = validation_sequences(corpus, DYNAMICS_SEQUENCES, cfg.max_len)
        hidden = [encoder(x.to(device), causal=model.causal).cpu() for x in tokens.split(16)]
        table.append({"step": step, **context_cosines(torch.cat(hidden), tokens < cfg.cls_id)})
        spreads = token_spread(encoder, tokens.to(device), model.causal)
        table[-1] |= {f"spread {layer}": x for layer, x in enumerate(spreads)}
        if pairs:
            table[-1]["word pairs"] = word_pair_similarity(encoder, pairs)
    steps, *columns = zip(*(row.values() for row in table))
    panels = []
    for title, values in zip([*table[0]][1:], columns):
        curves = {title: (steps, values)}
        panels.append(dict(title=title, curves=curves, xlabel="step", ylabel="value"))
    numbers = {"run": str(folder), "sequences": len(tokens), "steps": table}
    write(out_dir or folder / "dynamics", numbers, {"dynamics.png": panels})
    print_table(table)


# --------------------------------------------------------------------------------------------------


def parse_args(argv=None):
    parser, path = Parser("-m tools.probe", __doc__), os.path.expanduser
    mode = add_run_flags(parser, "probe and the like, --pe: out/schemes")
    mode("--runs", nargs="+", metavar="GLOB", help="run folders to compare")
    mode("--pe", type=str.lower, help="untrained schemes, such as t5,rope,alibi, or all")
    mode("--dynamics", type=path, metavar="RUN", help="run with the checkpoints of --keep_every")
    mode("--terms", nargs="*", type=path, metavar="RUN", help="runs whose logits are split")
    flag = parser.add_argument
    flag("--pairs", type=path, help="with --dynamics: file with lines word<TAB>word<TAB>score")
    flag("--text", help="with --terms: a sentence")
    args = parser.parse_args(argv)
    if args.text and args.terms is None:
        raise UserError("--text needs --terms")
    if args.pairs and not args.dynamics:
        raise UserError("--pairs needs --dynamics")
    return args


def main(argv=None):
    with one_line_errors():
        args = parse_args(argv)
        keep_memory()
        device = pick_device(args.device)
        if args.pe:
            untrained_schemes(args.pe, args.out_dir)
        elif args.runs:
            compare_runs(args.runs, args.out_dir, device)
        elif args.dynamics:
            dynamics(args.dynamics, args.pairs, args.out_dir, device)
        elif args.terms is not None:
            show_terms(args.terms or [newest_run()], args.text or SENTENCE, args.out_dir)
        else:
            probe_run(args.ckpt or newest_run(), args.out_dir, device)


if __name__ == "__main__":
    main()
