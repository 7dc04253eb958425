"""Draws the figures of the pages from the rows {name: row} of runs.jsonl. They are 6 inches wide:
10 points are 9 pixels high on a phone of 390 pixels, and 19 where a page is 840 wide."""

import statistics
from functools import partial
from textwrap import fill

import numpy as np

from lib.files import read_json, read_jsonl
from results import longer, order
from results.show import (
    FAMILIES,
    HERE,
    copy_baseline,
    docs_schemes,
    family,
    loss,
    scheme_losses,
    uses_tokens,
    without_seed,
)
from tools.terms import draw_terms

BLUE, ORANGE = FAMILIES["added at the input"][1], FAMILIES["relative offset"][1]
GRAY, LIGHT = "0.35", "0.92"
STYLE = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": "medium",
    "figure.constrained_layout.use": True,
    "savefig.dpi": 200,
}
SPREAD = "spread (0: tokens cannot be told apart)"


def seeds(rows, name):
    """-> the rows of all seeds of a run."""
    return [row for run, row in rows.items() if without_seed(run) == name]


def panels(title, x, y="", grid=(1, 1), height=3.8, sharey=True):
    """-> the axes of a new figure, as an array (lines, columns) of panels with the same scales.
    height: in inches."""
    from matplotlib.figure import Figure

    figure = Figure((6, height))
    figure.suptitle(fill(title, 66), x=0.01, ha="left", size=11, weight="bold")
    figure.supxlabel(fill(x, 75), size=10)
    figure.supylabel(y, size=10)
    return figure.subplots(*grid, sharex=True, sharey=sharey, squeeze=False)


def write(axes, text, xy, shift=(6, 0), **style):
    """Write a text at a point of the data, shifted to the right and up."""
    style = dict(textcoords="offset points", va="center") | style
    axes.annotate(text, xy, shift, annotation_clip=False, **style)


def fraction(axes, inches):
    """-> inches as a fraction of a panel's height, to place texts."""
    return inches * axes.get_gridspec().nrows / axes.figure.get_figheight()


def label_ends(axes, ends):
    """Write names at the ends of their curves, {name: (y, color)}, without overlaps; a line leads
    from each curve to its name."""
    axes.margins(x=0.01)
    axes.get_ylim()  # updates the transformation from data to heights, 0 to 1
    heights = [(axes.transScale + axes.transLimits).transform((1, y))[1] for y, _ in ends.values()]
    order = np.argsort(heights)
    index = fraction(axes, 0.19) * np.arange(len(order))
    free = np.array(heights)[order] - index
    # The mean of two layouts: one pushes overlapping names up, the other pushes them down.
    up, down = np.maximum.accumulate(free), np.minimum.accumulate(free[::-1])[::-1]
    for i, height in zip(order, index + (up + down) / 2):
        name, (_, color) = [*ends.items()][i]
        style = dict(color=color, transform=axes.transAxes, clip_on=False)
        axes.plot([1, 1.03], [heights[i], height], lw=0.8, **style)
        write(axes, name, (1.03, height), (3, 0), xycoords="axes fraction", color=color)


def name_families(axes, schemes, x, y):
    """Write the names of the schemes' families in their colors, from a point in the axes (0 to 1)
    downward."""
    style = dict(transform=axes.transAxes, bbox=dict(color="w", pad=1))
    for name, color in dict(map(family, schemes)).items():
        axes.text(x, y, name, color=color, **style)
        y -= fraction(axes, 0.24)


def dots(axes, values, line, color):
    """A dot for each seed of a horizontal line."""
    axes.plot(values, [line] * len(values), "o", color=color, alpha=0.6, mew=0, ms=8)


def name_lines(axes, names):
    """Name the lines of a figure, from the top to the bottom."""
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.tick_params(left=False)
    axes.spines["left"].set_visible(False)


def draw_ranking(rows, both=True):
    """The losses after 6 M tokens, of all schemes; both: beside those after 49 M, of the schemes
    that have them. After 49 M, the number is that of the first seed, which all have."""
    schemes = {pe: x for pe, x in scheme_losses(rows).items() if x[1] or not both}
    title = "After 6 million tokens, schemes only added at the input are not below none; "
    title += "all others are"
    if both:
        title = "After 49 M tokens, eight schemes are within .13 nats; "
        title += "BERT's (abs) is .6 behind rope at 1.9 M parameters, .3 at twice the width"

    def number(pe, later):
        return schemes[pe][1][0] if later else statistics.mean(schemes[pe][0])

    order = sorted(schemes, key=lambda pe: number(pe, both))
    x = "validation loss of mlm (nats); a dot is a seed, the number "
    x += "that of seed 1337; gray: after 6 M tokens, their mean" if both else "their mean"
    x += "" if both else "; xl, alibi_ns: other vocabulary, which adds up to .07"
    [[axes]] = panels(title, x, height=4.4 if both else 7)
    name_lines(axes, order)
    for line, (pe, tick) in enumerate(zip(order, axes.get_yticklabels())):
        color = family(pe)[1]
        tick.set_color(color)
        axes.axhline(line, color=LIGHT, zorder=0)
        for later, values in enumerate(schemes[pe][: 1 + both]):
            shade = color if later == both else GRAY
            dots(axes, values, line, shade)
            at, shift, align = (min, -7, "right") if later else (max, 7, "left")
            text = f"{number(pe, later):.2f}"
            write(axes, text, (at(values), line), (shift, 0), ha=align, color=shade)
    axes.axvline(number("none", both), color="k", lw=0.8, ls=":", zorder=0)
    axes.margins(x=0.12)
    name_families(axes, order, *((0.58, 0.53) if both else (0.48, 0.9)))
    return axes


def draw_docs_ranking(rows, ranked=None, mine=None, remark=""):
    """The losses on docs after 1,500 steps. ranked: {pe: rows of its seeds}, by default those of
    our rows; mine: a scheme to mark."""
    ranked = ranked or docs_schemes(rows)
    losses = {pe: [*map(loss, group)] for pe, group in ranked.items()}
    title = "On docs, after 1,500 steps, all schemes in attention have learned order; abs has not"
    title = f"{mine} among the schemes on docs after 1,500 steps" if mine else title
    x = "validation loss of mlm (nats); a dot is a seed, the number their mean"
    [[axes]] = panels(title + remark, x, height=1.2 + 0.25 * len(losses))
    by_loss = sorted(losses, key=lambda pe: statistics.mean(losses[pe]))
    name_lines(axes, by_loss)
    for line, (pe, tick) in enumerate(zip(by_loss, axes.get_yticklabels())):
        color = "k" if pe == mine else family(pe)[1]
        tick.set(color=color, weight="bold" if pe == mine else None)
        axes.axhline(line, color=LIGHT, zorder=0)
        dots(axes, losses[pe], line, color)
        text = f"{statistics.mean(losses[pe]):.2f}"
        text += " (yours)" if pe == mine else ""
        write(axes, text, (max(losses[pe]), line), (7, 0), color=color)
    axes.margins(x=0.12)
    name_families(axes, [pe for pe in by_loss if pe != mine], 0.55, 0.9)
    return axes


def draw_mine(folder, rows, ranked, found, rises, mine, reasons):
    """The ranking of docs, the order tasks and the rise of the loss on longer sequences (lines of
    longer.table), with scheme `mine` marked; reasons: why its losses are not comparable, if so."""
    import matplotlib

    with matplotlib.rc_context(STYLE):
        remark = f" (not comparable: {'; '.join(reasons)})" if reasons else ""
        draw_docs_ranking(rows, ranked, mine, remark).figure.savefig(folder / "ranking.png")
        draw_order(rows, found, mine).figure.savefig(folder / "order.png")
        if not rises:
            return
        x, y = f"tokens per sequence (trained on {longer.TRAINED}, docs)", "rise of the loss (nats)"
        [[axes]] = panels(f"Longer sequences than in training{remark}", x, y)
        curves = {}
        for line in rises:
            pe = line["scheme"]
            points = [(n, float(line[f"on {n}"])) for n in longer.LENGTHS[1:]]
            curves[f"-> {pe}" if pe == mine else pe] = [(longer.TRAINED, 0.0), *points], pe
        draw_curves(axes, curves)
        length_ticks(axes)
        axes.figure.savefig(folder / "lengths.png")


def length_ticks(axes):
    axes.set_xscale("log", base=2)
    axes.set_xticks(longer.LENGTHS, map(str, longer.LENGTHS))
    axes.minorticks_off()


def draw_curves(axes, curves):
    """Draw {name: (points, scheme)} in the color of the scheme's family, named at their ends."""
    for points, pe in curves.values():
        axes.plot(*zip(*points), color=family(pe)[1])
    ends = {name: (points[-1][1], family(pe)[1]) for name, (points, pe) in curves.items()}
    label_ends(axes, ends)


def draw_plateau(rows):
    title = "rope, rel, t5 and TUPE learn order within 1,400 steps; abs and sin stay with none"
    [[axes]] = panels(title, "step (seed 1337)", "training loss of mlm (nats)")
    schemes = "none abs sin t5 rel tupe_a tupe_r rope".split()
    draw_curves(axes, {pe: (rows[f"{pe}-s1337"]["curve"], pe) for pe in schemes})
    name_families(axes, schemes, 0.6, 0.92)
    return axes


def name_rate(pe, lr):
    """-> a scheme's name, with the learning rate if it is not the usual one."""
    return pe if lr == 3e-3 else f"{pe} ({lr:.0e})".replace("e-0", "e-")


def draw_long(rows):
    title = "BERT's positions (abs) begin to help after 16 M tokens; after 49 M "
    title += "they are .6 behind rope (1.9 M parameters)"
    [[axes]] = panels(title, "millions of tokens (seed 1337)", "validation loss of mlm (nats)")
    axes.set_ylim(2.5, 7.2)  # room for the names
    curves = {}
    for row in rows.values():
        pe, lr, steps, seed = (row["args"][key] for key in ("pe", "lr", "steps", "seed"))
        if steps == 24000 and seed == 1337:
            points = [(2048 * step / 1e6, value) for step, value in row["val_curve"]]
            curves[name_rate(pe, lr)] = points, pe
    draw_curves(axes, curves)
    return axes


USED = 0.001  # the tokens are used if random ones raise the loss by more than this
RANDOM_TOKENS = {
    "pplm-3e-3": "alone",
    "pplm-30000": "alone, 30,000 steps",
    "pplm-5e-4": "alone, RPP's learning rate",
    "pplm-embeddings": "alone, on mlm's embeddings",
    "pplm-embeddings-frozen": "the same, frozen",
    "pplm-random-frozen": "alone, on random embeddings, frozen",
    "mlm+pplm-mlm.01": "with mlm, weighted .01",
    "mlm+pplm-mlm.1": "with mlm, weighted .1",
    "mlm+pplm": "with mlm",
    "pplm-after-mlm-3e-3": "after mlm",
    "pplm-after-mlm-5e-4": "after mlm, RPP's learning rate",
}


def cost_of_random_tokens(row):
    return row["words"]["random"] - row["words"]["true"]


def draw_random_tokens(rows):
    title = (
        "Alone, position prediction rarely uses the tokens; after mlm or with enough of it, it does"
    )
    x = "what random tokens add to the loss of pplm (nats); a dot is a seed; "
    x += f"at the right: the seeds that use the tokens (above {USED})"
    [[axes]] = panels(title, x)
    name_lines(axes, [*RANDOM_TOKENS.values()])
    for line, name in enumerate(RANDOM_TOKENS):
        costs = [cost_of_random_tokens(row) for row in seeds(rows, name)]
        axes.axhline(line, color=LIGHT, zorder=0)
        dots(axes, costs, line, ORANGE)
        text = f"{sum(cost > USED for cost in costs)} of {len(costs)}"
        write(axes, text, (1, line), xycoords=("axes fraction", "data"))
    axes.margins(x=0.03)
    return axes


def draw_alone(rows):
    title = (
        "Position prediction alone ignores the tokens for 20,000 steps; two of ten runs then do not"
    )
    [[axes]] = panels(title, "step", "validation loss of pplm (nats)")
    for row in seeds(rows, "pplm-30000"):
        used = cost_of_random_tokens(row) > USED
        axes.plot(*zip(*row["val_curve"]), color=ORANGE if used else BLUE, zorder=3 - used)
    first, more = rows["pplm-30000-s1337"], rows["pplm-after-30000-s6"]
    curve = [(30000, rows["pplm-30000-s6"]["val_loss"])]
    curve += [(30000 + step, value) for step, value in more["val_curve"]]
    axes.plot(*zip(*curve), "--", color=ORANGE)
    style = dict(color=ORANGE, ha="right")
    text = f"seed 1337: uses the tokens\nfrom step {uses_tokens(first)} on"
    write(axes, text, (24000, 1.4), (-14, 0), **style)
    text = f"seed 6,\ntrained further:\nafter {uses_tokens(more)}\nmore"
    write(axes, text, curve[-1], (4, -32), **style)
    write(axes, "the eight others", (10000, 1.67), color=BLUE)
    copy = copy_baseline(more)
    axes.axhline(copy, color="k", lw=1)
    write(axes, "copy: the lowest loss without using the tokens", (0, copy), (0, -9))
    return axes


def draw_layers(rows):
    """Layer 0 is the embedding. Seeds 6 and 7 were trained for 3,000 more steps."""
    title = "In three of nine long runs of pplm alone, the spread rises more than a hundredfold"
    grid = panels(title, "step; dotted: the tokens begin to lower the loss", SPREAD, (2, 2), 5.4)
    colors = ["0.6", "#9ecae1", "#4292c6", "#2171b5", "#08306b"]
    panel_titles = {
        "classroom-16-30000-s1": "16 tokens, seed 1",
        "pplm-30000-s6": "64 tokens, seed 6",
        "pplm-30000-s9": "64 tokens, seed 9: not yet",
        "pplm-30000-s7": "64 tokens, seed 7: like 4 others",
    }
    for axes, (name, panel_title) in zip(grid.flat, panel_titles.items()):
        row = rows[name]
        more = rows.get(f"pplm-after-{name.removeprefix('pplm-')}", {"spreads": []})
        table = row["spreads"] + [[30000 + step, *spread] for step, *spread in more["spreads"]]
        ends, (steps, *layers) = {}, zip(*table)
        for n, (spread, color) in enumerate(zip(layers, colors)):
            axes.plot(steps, spread, color=color)
            ends[f"layer {n}" if n else "embedding"] = spread[-1], color
        axes.set(yscale="log", title=panel_title, xticks=[0, 15000, 30000])
    label_ends(axes, ends)
    first, second = rows["classroom-16-30000-s1"], rows["pplm-after-30000-s6"]
    for axes, row, start in (grid[0, 0], first, 0), (grid[0, 1], second, 30000):
        axes.axvline(start + int(uses_tokens(row).replace(",", "")), color="k", ls=":")
    return axes


SPREADS = {
    "4-layers": "post-LN, 4 layers",
    "2-layers": "2 layers",
    "mlm.01": "mlm, weighted .01",
    "batch-512": "batch 512",
    "pre": "pre-LN",
    "1-layers": "1 layer",
    "mlm.1": "mlm, weighted .1",
    "last": "RPP's pair head",
}


def draw_spread(rows):
    title = "Runs that use the tokens (orange) end with a spread above .2, all others below .02"
    x = "step; 1 of 3: runs that use the tokens; a dot: they begin to lower the loss of pplm alone"
    grid = panels(title, x, SPREAD, (4, 2), 6.4)
    for axes, (name, label) in zip(grid.flat, SPREADS.items()):
        runs = seeds(rows, f"classroom-16-{name}")
        using = [cost_of_random_tokens(row) > USED for row in runs]
        for row, uses in zip(runs, using):
            steps, *_, spread = zip(*row["spreads"])
            begins = [f"{step:,}" == uses_tokens(row) for step in steps]
            axes.plot(steps, spread, "o-", color=ORANGE if uses else BLUE, markevery=begins)
        axes.set(yscale="log", title=f"{label}: {sum(using)} of {len(runs)}")
    return axes


def draw_lengths(rows):
    """For each scheme the mean of its seeds."""
    title = "After 49 M tokens, every scheme loses on longer sequences than those of training; "
    title += "after 6 M, deberta and alibi do not"
    x, y = "tokens per sequence (means of one to three seeds)", "rise of the loss of mlm (nats)"
    grid = panels(title, x, y, (2, 1), 6.4, sharey=False)
    panel_titles = {128: "trained on 128 tokens, 6 M in all", 64: "trained on 64, 49 M in all"}
    for axes, (trained_on, panel_title) in zip(grid.flat, panel_titles.items()):
        rises, schemes = {}, {}
        for row in rows.values():
            pe, lr, block_size = (row["args"][key] for key in ("pe", "lr", "block_size"))
            on_web = "$TEXT" in row["commands"]["train"]
            if "lengths" in row and on_web and block_size == trained_on:
                losses = {int(length): loss for length, loss in row["lengths"].items()}
                rise = [(length, loss - losses[block_size]) for length, loss in losses.items()]
                name = name_rate(pe, lr)
                schemes[name] = pe
                rises.setdefault(name, []).append(rise)
        draw_curves(axes, {name: (np.mean(rises[name], 0), schemes[name]) for name in rises})
        axes.set_title(panel_title)
    length_ticks(axes)
    name_families(grid[0, 0], schemes.values(), 0.02, 0.9)
    return axes


def draw_order(rows, found=None, mine=None):
    """Panels (schemes, tasks) for 32, 64 and 128 tokens. found: accuracies by scheme
    (order.accuracies); mine: a scheme to mark. The color is 0 at the accuracy of the best predictor
    without positions, and 1 where all answers are right."""
    from matplotlib.figure import Figure

    found = found or order.accuracies()
    ranked = [pe for pe in scheme_losses(rows) if pe != mine]  # by their loss after 6 M tokens
    others = [pe for pe in found if pe not in ("bag", mine, *ranked)]
    schemes = [mine] * bool(mine) + ranked + others
    bag, tasks = found["bag"], [*found["bag"]]
    figure = Figure((6, 2.6 + 0.2 * len(schemes)))
    title = "alibi names half of the neighbors, and t5 no token far away; only schemes whose "
    title += "logits combine token and offset find the token after a marker"
    title = f"{mine} (bold) in order tasks, beside all other schemes" if mine else title
    figure.suptitle(fill(title, 62), x=0.01, ha="left", size=11, weight="bold")
    for n, axes in enumerate(figure.subplots(1, 3, sharey=True)):
        gains = [[(found[pe][t][n] - bag[t][n]) / (1 - bag[t][n]) for t in tasks] for pe in schemes]
        image = axes.imshow(np.clip(gains, 0, 1), "Blues", vmin=0, vmax=1, aspect="auto")
        axes.set_title(("32 (training)", "64 tokens", "128 tokens")[n])
        axes.set_xticks(range(len(tasks)), tasks, rotation=90)
        axes.set_yticks(range(len(schemes)), schemes)
        axes.tick_params(length=0)
        axes.set_xticks(np.arange(len(tasks)) - 0.5, minor=True)
        axes.set_yticks(np.arange(len(schemes)) - 0.5, minor=True)
        axes.grid(which="minor", color="w", lw=0.8)
        axes.tick_params(which="minor", length=0)
        for pe, tick in zip(schemes, axes.get_yticklabels()):
            tick.set(color="k" if pe == mine else family(pe)[1])
            tick.set(weight="bold" if pe == mine else None)
        axes.spines[:].set_visible(False)
    bar = figure.colorbar(image, ax=figure.axes, location="bottom", shrink=0.5, aspect=40)
    bar.set_ticks([0, 1], labels=["as without positions", "always right"])
    return figure.axes[0]


CELLS = {
    "abs": ("at the input (abs)", BLUE),
    "qk_no_norm": ("queries and keys, small", BLUE),
    "qk_layer_1": ("queries and keys, layer 1", GRAY),
    "qk_values": ("queries, keys, values", "#D55E00"),
    "qk_input": ("queries, keys, input", "#D55E00"),
    "qk": ("queries and keys", "#009E73"),
    "qk_pp": ("the same, no mixed terms", "#009E73"),
    "tupe_a": ("TUPE (tupe_a)", "#CC79A7"),
}


def draw_cells(rows):
    """Training losses on docs of variants between abs and tupe_a (results/cells.py)."""
    title = "Large position vectors that only queries and keys see are learned early, and without "
    title += "mixed terms almost as well as TUPE; small ones as little as BERT's"
    [[axes]] = panels(title, "step (docs, seed 1337)", "training loss of mlm (nats)")
    curves = {pe: rows[f"docs-{pe}-s1337"]["curve"] for pe in ("abs", "tupe_a")}
    for row in read_jsonl(HERE / "cells.jsonl"):
        if row["task"] == "docs" and row["seed"] == 1337:
            curves.setdefault(row["cell"], row["curve"])
    for name, (_, color) in CELLS.items():
        axes.plot(*zip(*curves[name]), color=color)
    label_ends(axes, {label: (curves[n][-1][1], color) for n, (label, color) in CELLS.items()})
    return axes


def draw_collapse(rows):
    """Order task of results/cells.py: spreads of hidden states, and accuracies."""
    title = "Positions at the input or in the values: all hidden states become alike "
    title += "before attention finds the neighbor"
    names = {"none": ("none", GRAY)} | {x: CELLS[x] for x in ("abs", "qk_input", "qk_values", "qk")}
    x = "step; the task: name the token to the left, one of 4,096 (seed 2)"
    grid = panels(title, x, grid=(2, 1), height=4.6, sharey=False)
    curves = {
        row["cell"]: list(zip(*row["curve"]))
        for row in read_jsonl(HERE / "cells.jsonl")
        if (row["task"], row["seed"], row["flags"]) == ("order", 2, "")
    }
    for [axes], column, what in zip(grid, (2, 1), ("spread", "accuracy")):
        for name, (_, color) in names.items():
            style = "--" if name == "qk_input" else "-"
            axes.plot(curves[name][0], curves[name][column], style, color=color)
        axes.set_ylabel(what)
    ends = {label: (curves[name][2][-1], color) for name, (label, color) in names.items()}
    label_ends(grid[0, 0], ends)
    return grid[0, 0]


RACERS = {"Roberta": "RoBERTa (abs)", "MPNet": "MPNet", "DebertaV2": "DeBERTa-v2"}


def draw_rotation(rows):
    """A query and a key as rope rotates them, at positions 1 and 3, and four positions later. The
    text can be read on a page of 390 pixels."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Arc, Wedge

    figure = Figure((6, 2.5))
    title = "Four positions later, both vectors are rotated further:\n"
    title += "the angle between them, and so their product, stays"
    figure.suptitle(title, x=0.01, ha="left", size=12, weight="bold")
    w = 15  # degrees per position
    for axes, moved in zip(figure.subplots(1, 2), (0, 4)):
        axes.set(aspect="equal", xlim=(-1.25, 1.35), ylim=(-0.08, 1.3))
        axes.axis("off")
        q_angle, k_angle = w * (1 + moved), 45 + w * (3 + moved)
        axes.add_patch(Wedge((0, 0), 0.7, q_angle, k_angle, color=LIGHT))
        for text, start, end, radius, color in [
            (f"$q$ at {1 + moved}", 0, q_angle, 0.8, BLUE),
            (f"$k$ at {3 + moved}", 45, k_angle, 0.88, ORANGE),
            (f"{k_angle - q_angle}°", 0, (q_angle + k_angle) / 2, 0, "k"),
        ]:
            x, y = np.cos(np.deg2rad([start, end])), np.sin(np.deg2rad([start, end]))
            distance = 1.06 if radius else 0.4
            style = dict(size=12, ha="center", va="bottom", color=color)
            axes.text(distance * x[1], distance * y[1], text, **style)
            if radius:
                axes.plot([0.7 * x[0], x[0]], [0.7 * y[0], y[0]], ":", color="0.5", lw=2)
                axes.plot([0, x[1]], [0, y[1]], color=color, lw=3)
                arc = dict(theta1=start, theta2=end, color=color)
                axes.add_patch(Arc((0, 0), 2 * radius, 2 * radius, **arc))
    return axes


def draw_race(rows):
    title = "In twenty minutes ours take 3 to 4 times as many steps: logits at masked tokens only"
    [[axes]] = panels(title, "minutes of training", "validation loss of mlm (nats)")
    ends = {}
    for row in read_json(HERE / "bench-race.json")["rows"]:
        if row["race"] == 20 and "curve" in row:
            name = row["name"].removesuffix("ForMaskedLM")
            pe = name.removeprefix("ours ")
            curve = [(seconds / 60, loss) for seconds, loss in row["curve"]]
            color = GRAY if name in RACERS else family(pe)[1]
            axes.plot(*zip(*curve), "--" if name in RACERS else "-", color=color)
            ends[RACERS.get(name, f"{pe} (ours)")] = curve[-1][1], color
    axes.set_xticks(range(0, 21, 5))
    label_ends(axes, ends)
    text = "dashed: transformers' models,\nwhich compute logits at every token"
    axes.text(0.35, 0.88, text, transform=axes.transAxes)
    return axes


FIGURES = {
    "ranking.png": draw_ranking,
    "ranking-all.png": partial(draw_ranking, both=False),
    "ranking-docs.png": draw_docs_ranking,
    "plateau.png": draw_plateau,
    "long.png": draw_long,
    "reading.png": draw_random_tokens,
    "alone.png": draw_alone,
    "layers.png": draw_layers,
    "spread.png": draw_spread,
    "lengths.png": draw_lengths,
    "race.png": draw_race,
    "order.png": draw_order,
    "cells.png": draw_cells,
    "collapse.png": draw_collapse,
    "rotation.png": draw_rotation,
}


def draw(folder, rows):
    """Draw the figures of the pages into a folder."""
    import matplotlib  # only figures need it

    with matplotlib.rc_context(STYLE):
        for file, paint in FIGURES.items():
            paint(rows).figure.savefig(folder / file)
    terms = read_json(HERE / "terms.json")["runs"]  # of tools.terms
    title = "In abs, the position term varies only at [CLS] and [SEP]; TUPE's favors the next token"
    title += " (abs was trained for longer, because it learns order later)"
    draw_terms(folder / "terms.png", terms, fill(title, 66))
