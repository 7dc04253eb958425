"""What a model has learned about positions: numbers and pictures.

    python probe.py                             # the newest run under out/ (or --ckpt RUN)
    python probe.py --runs 'out/*'              # many runs: a table, losses, all maps in one grid
    python probe.py --pe t5,rope,alibi          # schemes at their start, without a run

    --dynamics RUN                      checkpoints of train.py --keep_every: P2 figs 3, 6, P3 fig 8
    --ckpt RUN --blimp DIR              which of two sentences is likelier? BLiMP's .jsonl files
    --ckpt RUN --lengths 64,128,256     mlm on rows longer than those trained on
The last two also go with --runs.

P3's indicators are of layer 1's attention between identical words: opr 0 if nearer words always get
more (.5: at random; ties: its share of equal pairs; _20: the first 20 alone), aiv 0 if only the
offset counts, sd 0 if both directions are alike, db 1 if words before and after get the same.

Writes a folder with probe.json and, where matplotlib is there, pictures. Needs no GPU. A model that
finetune.py saved has indicators and pictures, but no --blimp. P1 is the TUPE paper, P2 TACO, P3 "On
Position Embeddings in BERT". To try a model on a text: sample.py.
"""

import glob
import json
import math
import os
import re
import textwrap
from collections import defaultdict
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pandas
import torch
import torch.nn.functional as F
from tqdm import tqdm  # comes with datasets, as pandas does

from common import (
    Parser,
    keep_memory,
    newest_run,
    one_line_errors,
    pick_device,
    read_rows,
    setting,
    write_json,
)
from data import (
    OPENERS,
    json_rows,
    open_prepared,
    readable,
    validation_batches,
    validation_rows,
    word_starts,
)
from model import (
    MAX_OFFSET,
    PE_NAMES,
    UNKNOWN_POS,
    Encoder,
    EncoderConfig,
    FactoredBias,
    Positions,
    RelativeSinusoidal,
    Sinusoidal,
    TupeFree,
    UntiedTable,
    frequencies,
)
from objectives import new_batch, stream
from sample import believed, load_pretraining, position_objective

SHOWN = 128  # positions that are probed and shown, as in P3
TIE = 1e-12  # differences below this share of the largest entry are rounding
COUNTED = 10_000_000  # tokens of the training stream that say how frequent words are
DYNAMICS_ROWS = 128  # validation rows that --dynamics reads
BATCH_TOKENS = 8192  # of rows that --blimp and --lengths read at once
LENGTH_TOKENS = 65_536  # of the validation text that --lengths reads at every length
TIE_NATS = 1e-4  # sentences whose scores are nearer than that tie
ACROSS = 6  # maps beside one another
PRIOR = 100  # counts, spread as words are frequent, added to bigrams
# Okabe and Ito's colours: the colour-blind can tell them apart.
COLOURS = "#0072B2 #D55E00 #009E73 #CC79A7 #E69F00 #56B4E9 #000000".split()
NOT_COMPARED = set(
    "pe objective steps out_dir cache device dtype compile log_every eval_every save_every "
    "keep_every resume".split()
)


@dataclass
class ProbeConfig:
    """The flags. --runs, which takes several texts, is added by hand."""

    ckpt: str | None = setting(None, "run folder or checkpoint file (default: the newest run)")
    pe: str | None = setting(
        None, "schemes at their start, without a run: t5,rope,alibi, or all of them: all"
    )
    dynamics: str | None = setting(None, "follow a run over the checkpoints that it kept")
    pairs: str | None = setting(None, "with --dynamics: lines of word<TAB>word<TAB>score")
    blimp: str | None = setting(
        None,
        "minimal pairs: a .jsonl file with sentence_good and "
        "sentence_bad, or a folder of such, also with .gz, .xz or .bz2",
    )
    lengths: str | None = setting(
        None, "score mlm on rows of these lengths, such as 64,128,256, longer than trained on too"
    )
    cache: str | None = setting(None, "folder of prepared data (default: the run's)")
    out_dir: str | None = setting(
        None,
        "where to write (default: RUN/probe, RUN/dynamics, RUN/blimp, RUN/lengths, or probe, "
        "blimp, lengths beside the runs; out/schemes)",
    )


# --------------------------------------------------------------------------------------------------
# A run: its model, its text


def own_corpus(model, cache):
    """What a run was trained on, if it still lies prepared. Raises ValueError if not."""
    args = model.facts["args"]
    return open_prepared(model.facts["data"], cache or args["cache"], args.get("dataset", ""))


# --------------------------------------------------------------------------------------------------
# Indicators (P3 app. B) of a float64 map A (L, L), queries in rows; ideally 0, direction balance 1


def aiv(A):
    """Translation invariance: variance within groups of one offset, over the variance of all. NaN
    for a constant map."""
    if np.ptp(A) <= TIE * abs(A).max():
        return math.nan
    groups = map(A.diagonal, range(1 - len(A), len(A)))
    return float(sum(len(group) * group.var() for group in groups) / A.size / A.var())


def opr(A, first=None):
    """Monotonicity: share of pairs out of decreasing order, outward from each i, among the `first`
    elements; .5 random."""
    return order(A, first)[0]


def order(A, first=None):
    """-> [opr, share of its pairs that are ties]. These count as ordered: where many are, a low opr
    says nothing. The 2L sequences are weighted by length; one of length 1 has no pair."""
    tie = TIE * abs(A).max()
    shares, weight = np.zeros(2), 0
    for i in range(len(A)):
        for s in (A[i, i:], A[i, i::-1]):  # S_i+ and S_i-, both from A_ii
            s = s[:first]
            rise = s - s[:, None]  # (n, n), farther less nearer
            rise = rise[np.triu_indices(len(s), 1)]
            if len(rise):
                shares += len(s) * np.mean([rise > tie, abs(rise) <= tie], 1)
                weight += len(s)
    return (shares / weight).tolist()


def sd(A):
    """Symmetry: mean |A_ij - A_ji| over i < j."""
    return float(abs(A - A.T)[np.triu_indices(len(A), 1)].mean())


def db(A, l=20):  # noqa: E741 (P3's letter)
    """Direction balance: sum below the diagonal over sum above it, |i - j| <= l (P3's text; its
    formula is upside down)."""
    upper = np.triu(np.tril(A, l), 1).sum()
    lower = np.tril(np.triu(A, -l), -1).sum()
    with np.errstate(all="ignore"):  # of a causal map inf
        return float(lower / upper)


def indicators(A):
    """-> {name: float}"""
    names = "opr ties opr_20 ties_20".split()
    return dict(zip(names, order(A) + order(A, 20)), aiv=aiv(A), sd=sd(A), db=db(A))


# --------------------------------------------------------------------------------------------------
# Where the maps come from: rows of one word, in which nothing but the position differs


def probe_words(encoder, n=300):
    """A fixed choice of n whole words, or of any ordinary tokens where there are too few words
    -> (n,) ids."""
    ids = range(encoder.config.cls_id)
    words = [
        i
        for i in ids
        if re.fullmatch(rb" [A-Za-z]{2,}", encoder.tokenizer.decode_single_token_bytes(i))
    ]
    order = np.random.default_rng(0).permutation(words if len(words) >= n else ids)
    return torch.from_numpy(order[:n])


def identical_words(encoder, words):
    """(n,) ids -> (n, L) rows [CLS] w .. w [SEP]."""
    rows = words[:, None].repeat(1, min(SHOWN, encoder.config.max_len))
    rows[:, 0] = encoder.config.cls_id
    rows[:, -1] = encoder.config.sep_id
    return rows


def identical_word_maps(encoder, words, causal=False):
    """P3 sec 4.2: layer 1's logits and probabilities for rows [CLS] w .. w [SEP], means over w
    -> 2 float64 arrays (H, L, L)."""
    logits = A = 0
    for rows in identical_words(encoder, words).split(16):
        s = encoder.layer_logits(rows, causal=causal).double()  # (16, H, L, L)
        logits = logits + s.sum(0)
        A = A + s.softmax(-1).sum(0)
    return (logits / len(words)).numpy(), (A / len(words)).numpy()


def hidden_spread(encoder, words, causal=False):
    """What the last hidden states of the same rows tell apart: their standard deviation over words
    at one place, and over the places of one word, specials left out, means over the rest and over
    dimensions -> {name: float}."""
    hidden = encoder(identical_words(encoder, words), causal=causal)[:, 1:-1]  # (n, L-2, C)
    return {
        "std words": float(hidden.std(0, correction=0).mean()),
        "std places": float(hidden.std(1, correction=0).mean()),
    }


def position_vectors(encoder):
    """-> {"absolute": (L, C), "relative": (R, D), offset 0 in the middle}, as far as the scheme has
    them."""
    found, pe = {}, encoder.pe
    L = min(SHOWN, encoder.config.max_len)
    m = min(MAX_OFFSET, L - 1)  # longer offsets were never trained
    near = slice(MAX_OFFSET - m, MAX_OFFSET + m + 1)
    if embed := pe.part_with["embed"]:
        found["absolute"] = embed.embed(Positions(torch.arange(L)))[0]
    if hasattr(scores := pe.part_with["scores"], "vectors"):
        found["relative"] = scores.vectors(0)[near]  # rel_k: layer 1's
    for part in pe.modules():
        if isinstance(part, UntiedTable):  # TUPE, bert_ad: as U_Q and U_K see them
            found["absolute"] = part.norm(part.table.weight)[:L]
        if isinstance(part, FactoredBias):
            found["relative"] = part.table.weight[near]
    return {kind: v.double() for kind, v in found.items()}


# --------------------------------------------------------------------------------------------------
# What words are worth to a position objective


@torch.no_grad()
def worth_of_words(model, corpus):
    """A position objective's loss, in nats, on validation rows with their own words, with random
    ones, and with their own in another order.

    The gap between true and random says that words are read, the one between true and shuffled
    that their order is. auc: see believed; None where no probability is predicted. No dropout (the
    model is left in eval mode) and no autocast: of a float32 run, true is the validation loss in
    its log. Seeds the global generator. -> {"true", "random", "shuffled", "auc"}
    """
    objective = position_objective(model)
    encoder, cfg = model.encoder, model.encoder.config
    device, batches = encoder.tok.weight.device, validation_batches(corpus, cfg.max_len)
    text = torch.from_numpy(corpus.train[:COUNTED].astype(int)).to(device)
    text, n = text[text < cfg.cls_id], sum(map(len, batches))
    losses, areas = defaultdict(float), []
    model.eval()
    # The rows, batches and corruption with which train.py evaluates.
    for number, tokens in enumerate(batches):
        batch = model.corrupt(tokens.to(device), "validation", number)
        torch.manual_seed(number)
        for kind, words in other_words(batch["tokens"], cfg.cls_id, text).items():
            batch["tokens"] = words
            hidden = encoder(words, batch["pos"])
            loss, _ = objective.loss(encoder, hidden, batch)
            losses[kind] += float(loss) * len(words) / n
            has_p = objective.cfg.pair_loss == "ce" and not objective.hides_positions
            if kind == "true" and has_p:
                areas += [area for *_, area in believed(objective, encoder, hidden, batch)]
    losses["auc"] = float(np.nanmean(areas)) if areas else None
    return losses


@torch.no_grad()
def mlm_loss(model, corpus):
    """mlm's loss, in nats, on validation rows whose words are masked as in training's validation
    and whose positions are the true ones, whatever else the objective corrupts: this one number
    compares mlm with mlm+pplm. Without dropout and autocast."""
    encoder, mlm = model.encoder, model.objectives["mlm"]
    batches, total = validation_batches(corpus, encoder.config.max_len), 0
    model.eval()
    for number, tokens in enumerate(batches):
        tokens = tokens.to(encoder.tok.weight.device)
        batch = new_batch(tokens, encoder.config.vocab_size)
        mlm.corrupt(batch, stream(tokens.device, "validation", number, "mlm"))
        loss, _ = mlm.loss(encoder, encoder(batch["tokens"]), batch)
        total += float(loss) * len(tokens)
    return total / sum(map(len, batches))


def words_as_text(found):
    """What worth_of_words has found, in a line for people."""
    text = (
        "position loss: {true:.3f} with the true words, {random:.3f} with random ones, "
        "{shuffled:.3f} with the row's own in another order".format(**found)
    )
    if found["auc"] is not None:
        text += f"; moved tokens told from the others: AUC {found['auc']:.3f} (chance .5)"
    return text


def other_words(tokens, cls_id, text):
    """Rows (B, L) whose words say something else; [MASK] and other specials stay.

    -> {"true": as they are, "random": drawn from a text (N,), "shuffled": the row's own, at random
    places}. Draws from the global generator.
    """
    special = tokens >= cls_id
    random = text[torch.randint_like(tokens, len(text))]
    # Both sorts are stable and put specials last, in their own order. So words go to the places of
    # words, in a random order, and specials to their own places.
    dice = torch.rand_like(tokens, dtype=torch.float).masked_fill(special, 2.0)
    donors = dice.argsort(stable=True)
    places = special.long().argsort(stable=True)
    return {
        "true": tokens,
        "random": torch.where(special, tokens, random),
        "shuffled": tokens.scatter(1, places, tokens.gather(1, donors)),
    }


# --------------------------------------------------------------------------------------------------
# Pictures: {file: [panel, ..], or why it is left out}. A panel is a dict, whose numbers go to
# probe.json, drawn or not.


def maps(titles, matrices, x="key position", y="query position", first=0):
    """first: what row and column 0 stand for. A map of zeros is left out."""
    return [
        dict(axes=dict(title=title, xlabel=x, ylabel=y), first=first, matrix=np.asarray(matrix))
        for title, matrix in zip(titles, matrices)
        if matrix.any()
    ]


def lines(title, x, y, curves, scale="linear"):
    """curves: {name: (x, y)}."""
    axes = dict(title=title, xlabel=x, ylabel=y, yscale=scale)
    return [dict(axes=axes, curves=curves)] if curves else []


def vector_maps(vectors, names=("dot products", "cosines")):
    """Dot products of position vectors (P3 figs 1, 8) and, given two names, cosines (fig 6)."""
    panels = []
    for kind, v in vectors.items():
        axis, first = "position", 0
        if kind == "relative":
            axis, first = "offset", -(len(v) // 2)
        titles = [f"{kind}: {name}" for name in names]
        unit = F.normalize(v, dim=1)
        panels += maps(titles, [v @ v.T, unit @ unit.T], axis, axis, first)
    return panels


def proximity(vectors):
    """Mean dot product of two vectors r places apart (P3 fig 4b); of default sinusoids: mean
    cos(w_k r) (P3 eq 6)."""
    curves = {}
    for kind, v in vectors.items():
        length, width = v.shape
        r, dots = torch.arange(length), v @ v.T
        mean = torch.stack([dots.diagonal(i).mean() for i in r])
        curves[kind] = r, mean / mean[0]
        angles = r[:, None] * frequencies(width)
        curves[f"default sinusoids, width {width}"] = r, angles.cos().mean(1)
    return lines(
        "proximity of positions (P3 fig 4b)",
        "offset between the two",
        "dot product, as a share of that at 0",
        curves,
    )


def learned_frequencies(encoder):
    """Of sinusoids alone: another component's w may be anything."""
    curves = {}
    for name, part in encoder.pe.parts.items():
        sinusoidal = isinstance(part, (Sinusoidal, RelativeSinusoidal))
        if sinusoidal and isinstance(part.w, torch.nn.Parameter):
            k = torch.arange(len(part.w))
            curves[f"{name}: learned"] = k, part.w.abs()
            curves[f"{name}: default"] = k, frequencies(2 * len(k))
    return lines("frequencies (P3 fig 4a)", "k", "|w_k|, radians a position", curves, "log")


def positional_logits(encoder, L):
    """Layer 1's logits without words (P1 fig 5), q = k = 0, and those of position vectors alone
    (P3 fig 9) -> 2 x (H, L, L), 0 if the scheme has nothing there.

    The second is P W_Q W_K^T P^T / sqrt(D), P what is added to the words. As in P3 the LayerNorm
    after the sum is left out, which would need the words; so are the biases of W_Q and W_K.
    """
    cfg, heads = encoder.config, encoder.blocks[0].heads
    pos, embed = torch.arange(L)[None], encoder.pe.part_with["embed"]
    zero = encoder.tok.weight.new_zeros(1, L, cfg.d_model)
    biases = heads(zero)  # (3, 1, H, L, D)
    alone = encoder.logits(0 * biases[0], 0 * biases[1], pos, 0)
    P = embed.embed(Positions(pos)) if embed else zero
    q, k, _ = heads(P) - biases
    added = q @ k.transpose(-1, -2) / cfg.d_head**0.5
    return alone[0], added[0]


@torch.no_grad()
def pictures_of(encoder, logits):
    """logits (H, L, L) of identical words -> pictures of one model."""
    pe, vectors = encoder.config.pe, position_vectors(encoder)
    heads = [f"head {h + 1}" for h in range(len(logits))]
    alone, added = positional_logits(encoder, logits.shape[-1])
    no_vectors = f"{pe} has no vectors of positions or offsets"
    return {
        "map.png": maps([f"{pe}: mean logits"], [logits.mean(0)]),  # P3 figs 2, 11
        "map_per_head.png": maps(heads, logits),
        "vectors.png": vector_maps(vectors) or no_vectors,
        "proximity.png": proximity(vectors) or no_vectors,
        "frequencies.png": learned_frequencies(encoder)
        or f"{pe} has no learned frequencies (lsin and rlsin have)",
        "positional.png": maps(heads, alone)
        or f"{pe} has no logits without words (tupe_*, bert_ad, t5, alibi have)",
        "position_logits.png": maps(heads, added)
        or f"{pe} has no vectors added to words (abs, sin, lsin have)",
    }


FAMILIES = ["no positions", "at the input", "by offset", "both", "words and\nplaces apart"]


def family(encoder):
    """Where a scheme tells places apart -> an index of FAMILIES."""
    pe = encoder.pe
    if any(isinstance(part, (UntiedTable, TupeFree)) for part in pe.modules()):
        return 4
    return (1 if pe.part_with["embed"] else 0) + (2 if pe.in_logits else 0)


def family_map(encoder, A, loss=None):
    """The map A (L, L) of one scheme, as a panel for draw_families."""
    title = encoder.config.pe if loss is None else f"{encoder.config.pe}  {loss:.2f}"
    return dict(axes=dict(title=title), family=family(encoder), matrix=A)


def in_rows(panels):
    """-> rows of at most ACROSS (family, panel), family by family; a family begins a row where it
    does not fit into what is left of one. Its name stands at its first panel."""
    rows = [[]]
    for number, name in enumerate(FAMILIES):
        members = [panel for panel in panels if panel["family"] == number]
        if rows[-1] and len(rows[-1]) + len(members) > ACROSS:
            rows.append([])
        for panel in members:
            if len(rows[-1]) == ACROSS:
                rows.append([])
            rows[-1].append((name if panel is members[0] else "", panel))
    return [row for row in rows if row]


def draw_families(file, panels, figure_class):
    """Maps after the softmax -> PNG, all on one scale, in multiples of attention that is alike
    everywhere."""
    rows = in_rows(panels)
    columns = max(3, max(map(len, rows)))
    size = min(2.0, 9 / columns)  # inches; a README shows about 9 side by side
    shape = size * columns, (0.9 * size + 0.3) * len(rows) + 0.9
    figure = figure_class(figsize=shape, layout="constrained")
    grid = figure.subplots(len(rows), columns, squeeze=False)
    for ax in grid.flat:
        ax.set(xticks=[], yticks=[], frame_on=False)
    for row, axes in zip(rows, grid):
        for ax, (name, panel) in zip(axes, row):
            M = np.log2(np.maximum(panel["matrix"] * len(panel["matrix"]), 2.0**-9))
            image = ax.imshow(M, "PuOr", vmin=-3, vmax=3)
            ax.set_frame_on(True)
            ax.set_ylabel(name, size=10)
            ax.set_title("\n".join(textwrap.wrap(panel["axes"]["title"], 17)), size=10)
    bar = figure.colorbar(image, ax=grid, location="bottom", aspect=40, shrink=0.7, extend="both")
    bar.set_ticks(range(-3, 4), labels="1/8 1/4 1/2 1 2 4 8".split())
    bar.set_label("attention of a place (row) to another (column); 1: alike to all")
    figure.savefig(file, dpi=200)


def draw(file, panels, figure_class):
    """A grid of panels -> PNG. A map's colours span the middle 98% of its values but for its
    edges, so that [CLS] and [SEP] do not hide the rest."""
    columns, width, height = 1, 9, 3.6
    if "matrix" in panels[0]:
        columns, width, height = min(len(panels), 4), 2.9, 2.5
    rows = math.ceil(len(panels) / columns)
    figure = figure_class(figsize=(width * columns, height * rows), layout="constrained")
    for number, panel in enumerate(panels, 1):
        ax = figure.add_subplot(rows, columns, number, **panel["axes"])
        if "matrix" in panel:
            M = np.ma.masked_invalid(panel["matrix"])  # a causal model's -inf stays white
            a = panel["first"] - 0.5
            b = a + len(M)
            image = ax.imshow(M, "cividis_r", extent=(a, b, b, a))  # dark is high, as in P3
            image.set_clim(*np.percentile(M[1:-1, 1:-1].compressed(), (1, 99)))
            figure.colorbar(image, ax=ax, fraction=0.046)
        else:
            ax.set_prop_cycle(
                color=4 * COLOURS, linestyle=np.repeat(["-", "--", ":", "-."], len(COLOURS))
            )
            for name, (x, y) in panel["curves"].items():
                ax.plot(x, y, marker=".", label=name)
            ax.grid(alpha=0.3)
            ax.legend(bbox_to_anchor=(1, 1), loc="upper left")
    figure.savefig(file, dpi=150)


# --------------------------------------------------------------------------------------------------
# What is written and printed


def plain(x):
    """What JSON can hold: arrays to seven decimals, NaN null, infinity "inf" (and -inf, a causal
    map's, null)."""
    text = json.dumps(x, default=lambda array: np.asarray(array).round(7).tolist())
    return json.loads(text, parse_constant={"Infinity": "inf"}.get)


def write(folder, numbers, pictures):
    """probe.json, and the pictures if matplotlib is there."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        Figure = None
    folder, written = Path(folder), ["probe.json"]
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "probe.json", plain({**numbers, "pictures": pictures}))
    for file, panels in pictures.items():
        if isinstance(panels, str):
            print(f"{file} left out: {panels}")
        elif Figure:
            how = draw_families if "family" in panels[0] else draw
            how(folder / file, panels, Figure)
            written.append(file)
    advice = "" if Figure else "; for pictures: pip install matplotlib"
    print(f"wrote {folder}: {', '.join(written)}{advice}")


def print_table(rows):
    """Dicts with the same keys -> a table that is Markdown too, of what is a number or a text; a
    dash is NaN, or what is not there."""
    columns = []
    for name, example in rows[0].items():
        if not isinstance(example, dict):
            column = [name, ""]
            for row in rows:
                x = row[name]
                x = f"{x:.4f}" if isinstance(x, float) else str(x)
                column.append("-" if x in ("nan", "None") else x)
            width = max(map(len, column))
            column[1] = "-" * width
            columns.append([text.ljust(width) for text in column])
    for line in zip(*columns):
        print(f"| {' | '.join(line)} |")


# --------------------------------------------------------------------------------------------------
# One run, and many


def examine(path, cache):
    """What --ckpt and --runs have in common -> model in float64, the mean logits (H, L, L), the one
    map A (L, L), {name: finding}. Raises ValueError, OSError."""
    model = load_pretraining(path)
    words, mlm = dict.fromkeys("true random shuffled auc".split()), None
    if position_objective(model) or "mlm" in model.objectives:
        try:
            corpus = own_corpus(model, cache)
            if position_objective(model):
                words = worth_of_words(model, corpus)
            if "mlm" in model.objectives:
                mlm = mlm_loss(model, corpus)
        except (ValueError, OSError) as error:
            print(f"{path}, losses left out: {error}")
    encoder = model.encoder.double()
    chosen = probe_words(encoder)
    logits, A = identical_word_maps(encoder, chosen, model.causal)
    A = A.mean(0)  # averaged over heads and words, then judged
    return (
        model,
        logits,
        A,
        {
            "pe": encoder.config.pe,
            "objective": "+".join(model.names),
            "indicators": {
                "with_specials": indicators(A),
                "without_specials": indicators(A[1:-1, 1:-1]),  # rows, columns of [CLS] and [SEP]
            },
            "words": words,
            "mlm": mlm,
            **hidden_spread(encoder, chosen[:64], model.causal),
        },
    )


def probe_run(path, cache, out_dir):  # --ckpt
    """Print what one run has learned, and write it. Raises ValueError, OSError."""
    model, logits, A, run = examine(path, cache)
    print_table([{"": name.replace("_", " "), **x} for name, x in run["indicators"].items()])
    print(
        f"last hidden states: standard deviation over words at one place {run['std words']:.3f}, "
        f"over the places of one word {run['std places']:.3f}"
    )
    if run["words"]["true"] is not None:
        print(words_as_text(run["words"]))
        if run["mlm"] is not None:
            print(f"mlm, words masked and every position the true one: {run['mlm']:.3f}")
    write(
        out_dir or beside(path, "probe"),
        {"ckpt": str(path), **run, "map": A},
        pictures_of(model.encoder, logits),
    )


def beside(path, name):
    """Where to write of a run folder, or of a checkpoint file."""
    file = Path(path)
    return file / name if file.is_dir() else file.with_name(f"{name}_{file.stem}")


def read_run(folder, name, cache):
    """-> its map as a panel, [(step, val_loss)], a row for the table and probe.json."""
    model, _, A, run = examine(folder, cache)
    facts, found = model.facts, run["indicators"]
    losses, by_lr, scores = [], defaultdict(list), {}
    for line in intact_rows(folder / "log.jsonl"):
        if line.keys() >= {"step", "val_loss"}:
            losses.append((line["step"], float(line["val_loss"])))
    results = intact_rows(folder / "results.jsonl", "task", "ckpt", "lr", "metrics")
    for result in comparable(results, facts["step"]):
        for metric, value in result["metrics"].items():
            key = f"{result['task']} {metric}", result["lr"]
            by_lr[key].append(value)
    for (score, _), values in by_lr.items():  # median over seeds, at the best lr
        scores[score] = max(scores.get(score, -math.inf), float(np.median(values)))
    val_loss = losses[-1][1] if losses else None
    return (
        family_map(model.encoder, A, val_loss if run["mlm"] is None else run["mlm"]),
        losses,
        {
            "run": name,
            **run,
            "steps": facts["step"],
            "val_loss": val_loss,
            **found["with_specials"],
            "aiv w/o": found["without_specials"]["aiv"],
            **{f"words {kind}": value for kind, value in run["words"].items()},
            "scores": scores,
            "args": facts["args"],
        },
    )


def intact_rows(file, *keys):
    """Rows of a JSON-lines file that have these keys; says how many have not."""
    kept = [row for row in read_rows(file) if row.keys() >= set(keys)]
    if file.exists():
        lost = len(file.read_bytes().splitlines()) - len(kept)
        if lost > 0:
            print(f"{file}: {lost} damaged lines left out")
    return kept


def comparable(results, steps):
    """Rows of results.jsonl that say what the run's last checkpoint is good for, by each task's
    last settings: no other checkpoint, no second evaluation, no frozen encoder, no start from a
    fine-tuned model."""

    def settings(r):
        return [r.get(key) for key in "recipe epochs n_train length".split()]

    kept = []
    for r in results:
        if r["ckpt"] == "bow" or ".pt (" in r["ckpt"] or r.get("step", steps) != steps:
            continue
        if not (r.get("eval_only") or r.get("probe")):
            kept.append(r)
    last = {r["task"]: settings(r) for r in kept}
    return [r for r in kept if settings(r) == last[r["task"]]]


def correlations(runs, names=("opr", "opr_20", "aiv", "aiv w/o", "sd", "db")):
    """P3 table 5, over runs of one objective -> rows of a table. `none` is left out, far from all
    others (footnote 11)."""
    rows, table = [], []
    for run in runs:
        for score, value in run["scores"].items():
            rows.append({**run, "score": score, "value": value})
    frame = pandas.DataFrame(rows, columns=["pe", "objective", "score", "value", *names])
    frame = frame[frame.pe != "none"].replace([math.inf, -math.inf], math.nan)
    for (objective, score), group in frame.groupby(["objective", "score"]):
        if len(group) > 2:
            # Over the runs where a number is finite; NaN where it is the same in all.
            r = group[["value", *names]].corr(min_periods=3)["value"].drop("value")
            table.append({"objective": objective, "score": score, "runs": len(group), **r})
    return table


def over_runs(patterns, read):
    """-> the folder above the runs, [read(folder, name)] of those that can be read.

    Says why another cannot. Raises ValueError where none can.
    """
    folders, found = set(), []
    for pattern in patterns:
        folders |= {Path(file).parent for file in glob.glob(f"{pattern}/ckpt.pt")}
    root = min(sorted(folders), key=lambda folder: len(folder.parts), default=Path()).parent
    for folder in sorted(folders):
        try:
            found.append(read(folder, os.path.relpath(folder, root)))
        except Exception as error:  # whatever ails it, the others still count
            print(f"{folder} left out: {type(error).__name__}: {error}")
    if not found:
        raise ValueError(f"{' '.join(patterns)}: no folder with a readable ckpt.pt")
    return root, found


def compare_runs(patterns, cache, out_dir):  # --runs
    """Print P3's table 2 over the runs, the flags in which they differ, and table 5; write maps
    and losses of all."""
    runs, grid, panels, losses = [], [], [], defaultdict(dict)
    root, found = over_runs(patterns, partial(read_run, cache=cache))
    several = len({run["objective"] for *_, run in found}) > 1
    for panel, curve, run in found:
        runs.append(run)
        grid.append(panel)
        if several:
            panel["axes"]["title"] += f" {run['objective']}"
        if curve:
            losses[run["objective"]][run["run"]] = np.array(curve).T
    print_table(runs)
    flags = set().union(*[run["args"] for run in runs])
    for flag in sorted(flags - NOT_COMPARED):
        values = {run["run"]: run["args"].get(flag) for run in runs}
        if len(set(map(str, values.values()))) > 1:
            print(f"--{flag} differs: {values}")
    table5 = correlations(runs)
    if table5:
        print(
            "\nPearson's r of indicators and scores (P3 table 5); positive: better where the "
            "property is violated"
        )
        print_table(table5)
    else:
        print(
            "no correlations with tasks: they take 3 runs of one objective, pe none aside, with "
            "results of finetune.py"
        )
    for objective, curves in losses.items():  # a panel each: they are not comparable
        panels += lines(objective, "step", "validation loss", curves)
    write(
        out_dir or root / "probe",
        {"runs": runs, "correlations": table5},
        {"maps.png": grid, "losses.png": panels or "no run has a log with val_loss"},
    )


def schemes_at_start(names, out_dir):  # --pe
    """P3's indicators and the maps of schemes before any training: an encoder of the demo's shape,
    and random words. Raises ValueError."""
    panels, patterns, table = [], [], []
    for pe in PE_NAMES if names == "all" else names.split(","):
        torch.manual_seed(0)
        encoder = Encoder(EncoderConfig(vocab_size=8192, pe=pe.strip())).requires_grad_(False)
        words = torch.arange(encoder.config.cls_id)[:: encoder.config.cls_id // 50]
        logits, A = (m.mean(0) for m in identical_word_maps(encoder.double().eval(), words))
        panels.append(family_map(encoder, A))
        patterns += maps([encoder.config.pe], [logits])
        table.append({"pe": encoder.config.pe, **indicators(A[1:-1, 1:-1])})
    print_table(table)
    write(
        out_dir or "out/schemes", {"schemes": table}, {"maps.png": panels, "logits.png": patterns}
    )


# --------------------------------------------------------------------------------------------------
# Over a run's checkpoints


def context_cosines(vectors, eligible):
    """Mean cosine of a token with the others of its row, and with those of other rows (P2 app.
    A.3). P2 samples one of each for every token; here all are taken: the same mean, no noise
    (departure). (B, L, C), (B, L) bool -> {name: float}."""
    g = F.normalize(vectors.double(), dim=-1) * eligible[..., None]
    m = eligible.sum(1, keepdim=True)  # (B, 1) tokens of a row
    own = g.sum(1, keepdim=True)  # (B, 1, C) their sum
    intra = ((g * own).sum(-1) - 1) / (m - 1)  # (B, L), less the token with itself
    inter = (g * (own.sum(0) - own)).sum(-1) / (m.sum() - m)
    counted = eligible & (m > 1) & (m.sum() > m)
    intra, inter = float(intra[counted].mean()), float(inter[counted].mean())
    return {"intra-context": intra, "inter-context": inter, "contextual score": intra - inter}


def pair_cosines(encoder, file):
    """Cosines of two words' embeddings (a word: its pieces' mean) for a file's lines
    `word<TAB>word<TAB>score` -> (n,) tensor."""
    cosines = []
    text = Path(file).read_text(encoding="utf-8")
    for number, line in enumerate(text.splitlines() or [""], 1):
        words = line.split("\t")[:-1]
        if len(words) != 2:
            raise ValueError(f"{file}, line {number} is not word<TAB>word<TAB>score")
        pieces = [encoder.tokenizer.encode_ordinary(" " + word) for word in words]
        one, two = [encoder.tok.weight[ids].mean(0) for ids in pieces]  # (C,)
        cosines.append(F.cosine_similarity(one, two, dim=0))
    return torch.stack(cosines)


def dynamics(folder, pairs, cache, out_dir):  # --dynamics
    """How contexts and words come together and apart (P2 figs 3, 6), how positions take shape (P3
    fig 8)."""
    folder, tokens = Path(folder), None
    table, shapes = [], []
    kept = sorted((int(file.stem[5:]), file) for file in folder.glob("ckpt_[0-9]*.pt"))
    if not kept:
        raise FileNotFoundError(f"{folder} keeps no ckpt_<step>.pt: train with --keep_every N")
    for number, (step, file) in enumerate(kept):
        model = load_pretraining(file)
        cfg = model.encoder.config
        if tokens is None:
            tokens = validation_rows(own_corpus(model, cache), DYNAMICS_ROWS, cfg.max_len)
        hidden = [model.encoder(rows, causal=model.causal) for rows in tokens.split(16)]
        found = {"step": step, **context_cosines(torch.cat(hidden), tokens < cfg.cls_id)}
        if pairs:
            found["word pairs"] = float(pair_cosines(model.encoder, pairs).mean())
        table.append(found)
        if number in np.linspace(0, len(kept) - 1, 8).astype(int):
            shapes += vector_maps(position_vectors(model.encoder), [f"step {step:,}"])
    print_table(table)
    frame = pandas.DataFrame(table)

    def curves(title, *names):
        found = {name: (frame["step"], frame[name]) for name in names if name in frame}
        return lines(title, "step", "mean cosine", found)

    write(
        out_dir or folder / "dynamics",
        {"run": str(folder), "rows": len(tokens), "steps": table},
        {
            "contexts.png": curves("hidden states", "intra-context", "inter-context")
            + curves("their gap", "contextual score"),
            "words.png": curves(f"embeddings of the pairs in {pairs}", "word pairs")
            or "no --pairs",
            "vectors.png": shapes or f"{cfg.pe} has no vectors of positions or offsets",
        },
    )


# --------------------------------------------------------------------------------------------------
# Minimal pairs (BLiMP, Warstadt et al. 2020): which of two sentences is likelier? Nothing is
# trained for it. Two orders of the same tokens are one bag of words: only who knows order can tell.


def read_pairs(path):
    """A .jsonl file, plain or compressed, or a folder of such -> a table with a row a pair: good,
    bad, paradigm, phenomenon. What a row does not say of the last two is its file's name. Raises
    ValueError, OSError."""
    path, pairs = Path(path), []
    for file in [path] if path.is_file() else sorted(path.glob("*.jsonl*")):
        with OPENERS.get(file.suffix, open)(file, "rt", encoding="utf-8-sig") as handle:
            for number, row in enumerate(readable(json_rows(handle), file), 1):
                row = row if isinstance(row, dict) else {}
                texts = row.get("sentence_good"), row.get("sentence_bad")
                if not all(isinstance(text, str) and text for text in texts):
                    raise ValueError(
                        f"{file}, row {number}: sentence_good and sentence_bad must be texts"
                    )
                paradigm = str(row.get("UID") or file.name.partition(".jsonl")[0])
                phenomenon = str(row.get("linguistics_term") or paradigm)
                if phenomenon == "s-selection":  # one of the paper's 12 has its paradigms
                    phenomenon = "argument_structure"
                pairs.append((*texts, paradigm, phenomenon))
    if not pairs:
        raise ValueError(
            f"no pairs in {path}: --blimp takes .jsonl files, such as data/*.jsonl of "
            "huggingface.co/datasets/alexwarstadt/blimp"
        )
    return pandas.DataFrame(pairs, columns="good bad paradigm phenomenon".split())


def pseudo_log_likelihoods(model, tokens, starts):
    """mlm: the sum over tokens of log p(token | the others).

    pll: the token alone is masked (Salazar et al. 2020). pll_word_l2r: so are the later pieces of
    its word, which would give it away (Kauf & Ivanova 2023). tokens (B, L); starts (V,) bool: which
    pieces begin a word -> (2, B)
    """
    encoder, mlm = model.encoder, model.objectives["mlm"]
    word = starts[tokens[:, 1:-1]].cumsum(1)  # (B, n): its number
    # Row i of a sentence masks token i and what follows it in its word; the diagonal: i alone.
    rest = (word[:, :, None] == word[:, None]).triu()  # (B, n, n)

    def log_p(chosen, masks):  # (B, n), (B, n, n) bool -> (R,)
        sentence, place = chosen.nonzero(as_tuple=True)
        rows = tokens[sentence]  # (R, L)
        masked = rows.masked_fill(F.pad(masks[chosen], (1, 1)), encoder.config.mask_id)
        at = torch.arange(len(rows), device=rows.device), place + 1
        logits = mlm.word_logits(encoder, encoder(masked)[at])  # (R, V): at the masked places only
        losses = F.cross_entropy(logits, rows[at], reduction="none")
        return -losses.double()  # sums of float32 would not tie

    pll = log_p(word >= 0, rest.tril()).view(word.shape)
    split = rest.sum(-1) > 1  # elsewhere both rows are the same
    l2r = pll.masked_scatter(split, log_p(split, rest))
    return torch.stack((pll, l2r)).sum(-1)


def log_likelihood(model, tokens):
    """clm: the sum of log p(token | those to its left); tokens (B, L) -> (B,)"""
    hidden = model.encoder(tokens, causal=True)[:, :-2]
    logits = model.objectives["clm"].word_logits(model.encoder, hidden)  # (B, n, V)
    losses = F.cross_entropy(logits.mT, tokens[:, 1:-1], reduction="none")
    return -losses.double().sum(1)


def offset_likelihood(model, tokens):
    """Position objectives: the mean log-probability of pairs' true offsets, positions as they are
    (another --pair_loss than ce: minus the loss). pmlm scores pairs with a hidden end: there all
    are hidden. tokens (B, L) -> (B,)"""
    objective, (B, L) = position_objective(model), tokens.shape
    place = torch.arange(L, device=tokens.device)[None]
    pos = place.clone()
    if objective.hides_positions:
        pos[:, 1:-1] = UNKNOWN_POS
    batch = {"tokens": tokens, "pos": pos}
    s = objective.head.scores(model.encoder, model.encoder(**batch), batch)  # (B, n, n, H)
    offset = Positions(place[:, 1:-1]).offsets.expand(B, -1, -1)
    pairs = offset != 0  # (B, n, n): n (n - 1) a row
    label = objective.label(offset, offset)
    losses = objective.measure.loss(objective.head.psi(s[pairs]), label[pairs])
    return -losses.view(B, (L - 2) * (L - 3)).double().mean(1).nan_to_num()


@torch.no_grad()
def sentence_scores(model, sentences):
    """N lists of ids -> {name: (N,) float64}, higher is likelier. Float32 without autocast, so that
    ties stay ties. Raises ValueError where no objective can tell."""
    cfg, device = model.encoder.config, model.encoder.tok.weight.device
    if "mlm" in model.objectives:
        starts = word_starts(model.encoder.tokenizer, cfg.vocab_size).to(device)
        names, score = ["pll", "pll_word_l2r"], partial(pseudo_log_likelihoods, starts=starts)
    elif "clm" in model.objectives:
        names, score = ["log-likelihood"], log_likelihood
    elif position_objective(model):
        names, score = ["offsets"], offset_likelihood
    else:
        raise ValueError(
            f"{'+'.join(model.names)} cannot say how likely a sentence is: --blimp "
            "takes runs of mlm, clm or a position objective"
        )
    lengths = np.array([len(ids) for ids in sentences])
    scores = np.zeros((len(names), len(sentences)))
    batches = []
    for n in np.unique(lengths):  # one length: nothing to pad
        same = np.flatnonzero(lengths == n)
        size = max(1, BATCH_TOKENS // (n * (n + 2)))  # mlm masks n rows a sentence
        batches += np.split(same, range(size, len(same), size))
    for chosen in tqdm(batches, "minimal pairs", leave=False, disable=None):
        rows = [(cfg.cls_id, *sentences[i], cfg.sep_id) for i in chosen]
        scores[:, chosen] = score(model, torch.tensor(rows, device=device)).cpu()
    return dict(zip(names, scores))


def count_scores(corpus, sentences):
    """What is due to frequency alone: log-likelihoods by how often the training text has words, and
    pairs of neighbours smoothed with these -> {name: (N,)}"""
    V, text = corpus.vocab_size, corpus.train[:COUNTED].astype(int)
    count = np.bincount(text, minlength=V)
    pairs = pandas.Series(text[:-1] * V + text[1:]).value_counts()
    ids = np.concatenate(sentences)
    left = np.concatenate([[V - 6, *ids[:-1]] for ids in sentences])  # [SEP] comes first
    p = (count[ids] + 1) / (len(text) + V)
    bigram = pairs.reindex(left * V + ids, fill_value=0) + PRIOR * p
    number = np.repeat(np.arange(len(sentences)), [len(ids) for ids in sentences])
    return {
        "bigram": np.bincount(number, np.log(bigram / (count[left] + PRIOR))),
        "unigram": np.bincount(number, np.log(p)),
    }


def clustered_error(values, clusters):
    """Standard error of the mean of a Series whose values are alike within a cluster: pairs of one
    paradigm share a template, so they are no independent trials (Liang & Zeger 1986). NaN for a
    single cluster."""
    sums = (values - values.mean()).groupby(clusters).sum()
    n = len(sums)
    return float(np.sqrt((sums**2).sum() * n / (n - 1))) / len(values) if n > 1 else math.nan


def right_or_wrong(scores, index):
    """{score: good sentences, then bad (2N,)} -> a table (N, scores): 1 where the good one is
    likelier, .5 where they tie."""
    right = pandas.DataFrame(index=index)
    for name, values in scores.items():
        gap = np.subtract(*np.split(values, 2))
        right[name] = np.where(abs(gap) <= TIE_NATS, 0.5, gap > 0)
    return right


def shares(right, pairs, reordered):
    """Which pairs are right, the pairs, and which are two orders of the same tokens (N,) bool
    -> what probe.json holds of them: shares, their standard errors, ties."""
    same = right[reordered]
    paradigms = right.groupby(pairs.paradigm).mean()
    own = same.groupby(pairs.paradigm).mean()
    table = right.groupby(pairs.phenomenon).mean().reindex(np.unique(pairs.phenomenon))
    first = right.columns[0]  # pll, or the one score of the objective
    phenomena = table[first].to_dict()
    table.loc["mean"] = paradigms.mean()
    table.loc["order-only"] = same.mean()
    errors = {}
    for score in right:
        errors[score] = {
            "mean": clustered_error(paradigms[score], paradigms.index),
            "order-only": clustered_error(same[score], pairs.paradigm),
        }
    ties, same_ties = (right == 0.5).sum().to_dict(), (same == 0.5).sum().to_dict()
    return {
        "ties": ties,
        "order-only ties": same_ties,
        "scores": table.to_dict(),
        "errors": errors,
        "paradigms": paradigms.to_dict(),
        "blimp": {
            "mean": table[first]["mean"],
            "mean_error": errors[first]["mean"],
            "order_only": table[first]["order-only"],
            "order_only_error": errors[first]["order-only"],
            "order_only_pairs": len(same),
            "order_only_ties": same_ties[first],
            "ties": ties[first],
            "phenomena": phenomena,
            "paradigms": paradigms[first].to_dict(),
            "order_only_paradigms": own[first].to_dict(),
        },
    }


def judge_pairs(path, name, pairs, cache, out_dir=None):  # --blimp
    """The share of pairs whose good sentence a run finds likelier, a tie being half a one; prints
    and writes it -> what probe.json holds. Raises ValueError, OSError."""
    model = load_pretraining(path)
    if model.objectives:  # a fine-tuned model has none: it is refused below
        model.to(pick_device())
    longest = model.encoder.config.max_len - 2

    def encode(text):  # the first word like one inside a sentence, so that orders can be compared
        return model.encoder.tokenizer.encode_ordinary(" " + text.lstrip())

    ids = pairs[["good", "bad"]].map(encode)
    ids = ids[ids.map(len).max(axis=1) <= longest]
    if ids.empty:
        raise ValueError(f"no pair fits {path}, whose rows hold {longest} tokens of text")
    sentences = [*ids.good, *ids.bad]
    scores = sentence_scores(model, sentences)
    try:
        scores |= count_scores(own_corpus(model, cache), sentences)
    except (ValueError, OSError) as error:
        print(f"{path}, what frequency says left out: {error}")
    found = shares(
        right_or_wrong(scores, ids.index),
        pairs,
        ids.good.map(sorted) == ids.bad.map(sorted),
    )
    run = {
        "run": name,
        "pe": model.encoder.config.pe,
        "objective": "+".join(model.names),
        "pairs": len(ids),
        "too long": len(pairs) - len(ids),
        "order-only": found["blimp"]["order_only_pairs"],
        **found,
    }
    run["blimp"] |= {"pairs": run["pairs"], "left_out": run["too long"]}
    print(
        f"{name}: {run['pe']}, {run['objective']}; {run['pairs']:,} pairs, of which "
        f"{run['order-only']:,} are two orders of the same tokens (order-only); too long for the "
        f"rows: {run['too long']:,}"
    )
    print_table(pair_table(run))
    print("share of pairs right, a tie (last row) half a one; +-: standard error over paradigms")
    write(out_dir or beside(path, "blimp"), run, {"phenomena.png": phenomena_of([run])})
    return run


def pair_table(run):
    """-> rows for print_table: phenomena, mean, order-only and ties of every score."""
    rows = []
    for name in next(iter(run["scores"].values())):
        row = {"phenomenon": name}
        for score, shares in run["scores"].items():
            error = run["errors"][score].get(name, math.nan)
            row[score] = shares[name] if math.isnan(error) else f"{shares[name]:.4f} +- {error:.4f}"
        rows.append(row)
    return [*rows, {"phenomenon": "ties", **run["ties"]}]


def phenomena_of(runs):
    """-> panel of all scores; what frequency says stands there once."""
    curves = {}
    for run in runs:
        for score, row in run["scores"].items():
            prefix = "" if score in ("bigram", "unigram") else f"{run['run']}: "
            curves[prefix + score] = list(row.values()), list(row)
    return lines("minimal pairs", "share of pairs right", "", curves)


def compare_pairs(patterns, pairs, cache, out_dir):  # --blimp with --runs
    root, runs = over_runs(patterns, partial(judge_pairs, pairs=pairs, cache=cache))
    table = []
    for run in runs:
        for score, row in run["scores"].items():
            table.append({"run": run["run"], "score": score, **row, "ties": run["ties"][score]})
    print_table(table)
    write(out_dir or root / "blimp", {"runs": runs}, {"phenomena.png": phenomena_of(runs)})


# --------------------------------------------------------------------------------------------------
# Rows longer than any that was trained on


def one_text(corpus, mlm, longest):
    """The text that rows of every length are cut from: stretches of the longest from all over the
    validation stream, masked once, as in training -> tokens as seen (N,), as they were (N,), where
    masked (N,) bool."""
    rows = validation_rows(corpus, max(1, LENGTH_TOKENS // longest), longest)
    text = rows[:, 1:-1].reshape(1, -1)
    batch = new_batch(text, corpus.vocab_size)
    mlm.corrupt(batch, stream("cpu", "lengths"))
    return batch["tokens"][0], text[0], batch["mlm_masked"][0]


@torch.no_grad()
def losses_by_place(model, corpus, length, longest):
    """mlm's losses, in nats, at the masked places of a text that is cut into rows of one length;
    with every length the same words are masked -> places in the row (N,), losses (N,). Raises
    ValueError where the scheme's table ends before."""
    encoder, mlm, n = model.encoder, model.objectives["mlm"], length - 2
    cfg, device = encoder.config, encoder.tok.weight.device
    text = one_text(corpus, mlm, longest)
    if len(text[0]) < n:
        raise ValueError(f"the validation text has no row of {length} tokens")
    tokens, original, masked = (x[: len(x) // n * n].view(-1, n).to(device) for x in text)
    tokens = F.pad(tokens, (1, 1), value=cfg.sep_id)
    tokens[:, 0] = cfg.cls_id  # (R, L): [CLS] x_1 .. x_n [SEP]
    size, losses = max(1, BATCH_TOKENS // length), []
    for rows, words, at in zip(tokens.split(size), original.split(size), masked.split(size)):
        try:
            hidden = encoder(rows)[:, 1:-1][at]  # (N, C)
        except ValueError:  # see model.table_index
            raise ValueError(
                f"--lengths {length}: pe {cfg.pe} has a table that ends at place {cfg.max_len}; it "
                "can be given fresh rows and some more steps: python train.py --init_from RUN "
                f"--block_size {length}"
            ) from None
        losses.append(
            F.cross_entropy(mlm.word_logits(encoder, hidden), words[at], reduction="none").double()
        )
    return masked.nonzero()[:, 1].cpu().numpy() + 1, torch.cat(losses).cpu().numpy()


def score_lengths(path, name, lengths, cache, out_dir=None):  # --lengths
    """mlm's loss on rows of these lengths, in all and by distance from the start; prints and writes
    it -> what probe.json holds. Raises ValueError, OSError."""
    model = load_pretraining(path)
    if "mlm" not in model.objectives:
        raise ValueError(f"--lengths scores mlm; {path} is {'+'.join(model.names)}")
    corpus, cfg = own_corpus(model, cache), model.encoder.config
    model.to(pick_device())
    width = 32 if max(lengths) <= 256 else 64
    losses, curves, table = {}, {}, []
    for length in lengths:
        places, found = losses_by_place(model, corpus, length, max(lengths))
        losses[str(length)] = found.mean()
        curves[str(length)] = pandas.Series(found).groupby(places // width * width).mean()
        table.append({"rows of": length, "all places": found.mean()})
        for start in range(0, max(lengths), width):
            table[-1][f"{start}-{start + width - 1}"] = curves[str(length)].get(start)
    print(f"{name}: {cfg.pe}, trained on rows of {cfg.max_len}; mlm's loss, by place in the row")
    print_table(table)
    run = {"run": name, "pe": cfg.pe, "max_len": cfg.max_len, "lengths": losses}
    run["lengths_by_place"] = {length: curve.to_dict() for length, curve in curves.items()}
    drawn = {f"rows of {x}": (curve.index + width / 2, curve) for x, curve in curves.items()}
    title = f"{cfg.pe}, trained on rows of {cfg.max_len}"
    pictures = {"lengths.png": lines(title, "place in the row", "mlm loss", drawn)}
    write(out_dir or beside(path, "lengths"), run, pictures)
    return run


def compare_lengths(patterns, lengths, cache, out_dir):  # --lengths with --runs
    root, runs = over_runs(patterns, partial(score_lengths, lengths=lengths, cache=cache))
    print_table([{"run": run["run"], "pe": run["pe"], **run["lengths"]} for run in runs])
    curves = {run["run"]: (lengths, list(run["lengths"].values())) for run in runs}
    panels = lines("longer rows", "tokens in a row", "mlm loss", curves)
    write(out_dir or root / "lengths", {"runs": runs}, {"lengths.png": panels})


def whole_numbers(text):
    """'64,128' -> [64, 128]. Raises ValueError."""
    numbers = [int(x) for x in text.split(",") if x.strip().isdigit()]
    if len(numbers) < 1 + text.count(",") or min(numbers) < 4:
        raise ValueError(f"--lengths {text}: take lengths of 4 and more, such as 64,128,256")
    return sorted(set(numbers))


def parse_args(argv=None):
    """-> namespace with every value set. Exits with 2 on a mistake."""
    parser = Parser("probe.py", __doc__)
    parser.add_argument("--runs", nargs="+", metavar="GLOB", help="compare run folders")
    parser.add_settings("what is probed", ProbeConfig)
    args = parser.parse_args(argv, ProbeConfig())
    if sum(map(bool, (args.ckpt, args.runs, args.dynamics, args.pe))) > 1:
        parser.error("take one of --ckpt, --runs, --dynamics and --pe")
    if args.pairs and not args.dynamics:
        parser.error("--pairs is for --dynamics")
    if sum(map(bool, (args.blimp, args.lengths, args.dynamics, args.pe))) > 1:
        parser.error("take one of --blimp, --lengths, --dynamics and --pe")
    return args


def main(argv=None):
    args = parse_args(argv)
    keep_memory()
    with one_line_errors():
        if args.pe:
            return schemes_at_start(args.pe.lower(), args.out_dir)
        what = args.runs or args.dynamics or args.ckpt or newest_run()
        where = args.cache, args.out_dir
        if args.blimp and args.runs:
            compare_pairs(what, read_pairs(args.blimp), *where)
        elif args.blimp:
            judge_pairs(what, Path(what).name, read_pairs(args.blimp), *where)
        elif args.lengths and args.runs:
            compare_lengths(what, whole_numbers(args.lengths), *where)
        elif args.lengths:
            score_lengths(what, Path(what).name, whole_numbers(args.lengths), *where)
        elif args.runs:
            compare_runs(what, *where)
        elif args.dynamics:
            dynamics(what, args.pairs, *where)
        else:
            probe_run(what, *where)


if __name__ == "__main__":
    main()
