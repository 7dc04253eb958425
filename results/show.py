"""Prints the tables of results/runs.jsonl, and draws the figures."""

import re
import statistics
from pathlib import Path

import numpy as np
import pandas
import torch

from finetune import RECIPES
from lib.files import read_json
from lib.glue import paper_averages
from model import Encoder, EncoderConfig, parse_pe
from tools.probe import draw_terms, print_table

HERE = Path(__file__).parent

# A training loss below this means that token order is used: a model without positions ends a demo
# run above it.
PLATEAU = {"docs": 5.5, "web": 6.2}
# Published scores: RPP reports MNLI, CoLA and QNLI, the others the mean over GLUE.
# fmt: off
PUBLISHED = {
    "rpp-mlm": "mnli .597, cola .614, qnli .666", "rpp-pmlm": ".612, .618, .642",
    "rpp-pplm": ".626, .617, .673", "rpp-pplm_some": ".590, .618, .631",
    "rpp-pplm_binary": ".595, .607, .634", "tupe-abs": ".835", "tupe-abs+t5": ".837",
    "tupe-tupe_a": ".835 at .3, .845", "tupe-tupe_r": ".838 at .3, .849", "taco-mlm": ".750",
    "taco-taco": ".749 at .2, .762", "wang-none": ".766", "wang-abs": ".822", "wang-sin": ".805",
    "wang-lsin": ".806", "wang-rel": ".817", "wang-rsin": ".818", "wang-rlsin": ".822",
    "wang-abs+rel": ".818", "wang-abs+rsin": ".815", "wang-abs+rlsin": ".825",
    "wang-lsin+rel": ".808", "wang-lsin+rsin": ".813", "wang-lsin+rlsin": ".814",
}
# fmt: on


# --------------------------------------------------------------------------------------------------
# Columns: a row of runs.jsonl -> a number, a text, or None if unknown


def loss(row):
    """Validation loss of the objective; of the last one in a sum."""
    return row.get(f"val_{row['args']['objective'].split('+')[-1]}", row["val_loss"])


def first_below(row, level):
    """The first step at which the training loss, a mean of 100 steps, is below a level, as text."""
    steps = [step for step, value in row["curve"] if value < level]
    return f"{steps[0]:,}" if steps else "never"


def leaves_plateau(row):
    if row["args"]["objective"] != "mlm":
        return None
    return first_below(row, PLATEAU["web" if "$TEXT" in row["commands"]["train"] else "docs"])


def uses_tokens(row):
    """The first step at which the training loss of pplm is .02 below the copy baseline."""
    if row["args"]["objective"] != "pplm":
        return None
    return first_below(row, copy_baseline(row) - 0.02)


def copy_baseline(row):
    return row["baselines"].get("copy", row["baselines"].get("pplm.copy"))


COLUMNS = {
    "loss": loss,
    # Where text is seen once, this can select a learning rate without validation text.
    "last 200 steps": lambda row: statistics.mean(value for _, value in row["curve"][-2:]),
    "mlm loss": lambda row: row.get("val_mlm"),
    "at true positions": lambda row: row.get("mlm"),
    "copy": copy_baseline,
    "random tokens": lambda row: row["words"]["random"],
    "shuffled tokens": lambda row: row["words"]["shuffled"],
    "AUC": lambda row: row["words"]["auc"],
    "leaves plateau at": leaves_plateau,
    "uses tokens at": uses_tokens,
    "AIV": lambda row: row["indicators"].get("aiv"),
    "OPR": lambda row: row["indicators"].get("opr"),
    "order-only": lambda row: row.get("blimp", {}).get("order_only"),
    "contextual score": lambda row: row["contexts"][-1][1] if row.get("contexts") else None,
    "spread": lambda row: f"{row['spread'][-1]:.2g}" if row.get("spread") else None,
    "published": lambda row: PUBLISHED.get(row["run"]),
    "minutes": lambda row: f"{row['minutes']:.0f}",
}
TOKENS = "loss|mlm loss|at true positions|copy|random tokens|shuffled tokens|AUC"
SHOWN = {
    "docs": "loss|leaves plateau at|AIV|minutes",
    "schemes": "loss|leaves plateau at|AIV|OPR|order-only",
    "recipe": "loss|last 200 steps|leaves plateau at|AIV|order-only",
    "pplm": TOKENS,
    "plateau": f"{TOKENS}|AIV",
    "rates": "loss|last 200 steps",
    "classroom": "loss|copy|random tokens|shuffled tokens|AUC|spread|uses tokens at|minutes",
    "lengths": "loss",
    "objectives": "mlm loss|at true positions|loss|random tokens|contextual score|order-only",
    "taco": "mlm loss|loss|minutes",
    "docs-task": "mlm loss|loss",
    "lab": f"{TOKENS}|AIV",
}


# --------------------------------------------------------------------------------------------------
# Tables


def without_seed(name):
    return re.sub(r"-s\d+$", "", name)


def join_seeds(values):
    """Values of several seeds -> one text: a single value if all are equal, "" if none is known."""
    texts = ["-" if x is None else f"{x:.3f}" if isinstance(x, float) else str(x) for x in values]
    unique = set(texts)
    return "" if unique == {"-"} else texts[0] if len(unique) == 1 else ", ".join(texts)


def scores(rows, recipe, share=""):
    """-> {metric: "median (min - max); the next pre-training seed's"} of models that were
    fine-tuned after this share of the steps."""
    middle = getattr(statistics, RECIPES[recipe or "electra"]["aggregate"])
    found, first = {}, {}
    for key in dict.fromkeys(key for row in rows for key in row["scores"]):
        metric, _, at = key.partition(" at ")
        if at == share:
            known = [row["scores"][key] for row in rows if key in row["scores"]]
            first[tuple(metric.split())] = middle(known[0])
            texts = []
            for x in known:
                spread = f" ({min(x):.3f} - {max(x):.3f})" if len(x) > 1 else ""
                texts.append(f"{middle(x):.3f}{spread}")
            found[metric] = "; ".join(texts)
    for paper, mean in paper_averages(first).items():
        if isinstance(mean, float):  # else a list of the tasks that are missing
            found[f"{paper}'s average"] = f"{mean:.3f}"
    return found


def table_lines(table, runs, rows):
    """One dict of texts per run, all seeds together. runs: {name: (flags, fine-tuning)}."""
    groups, lines = {}, []
    for name in runs:
        if name in rows:
            groups.setdefault(without_seed(name), []).append(rows[name])
    for name, group in groups.items():
        line = {"run": name, "seeds": ", ".join(str(row["args"]["seed"]) for row in group)}
        for column in SHOWN.get(table, "loss|published").split("|"):
            line[column] = join_seeds(map(COLUMNS[column], group))
        for length in group[0].get("lengths", ()):
            line[length] = join_seeds(row.get("lengths", {}).get(length) for row in group)
        tuned = runs[group[0]["run"]][1]
        if tuned:
            recipe = re.search(r"--recipe (\w+)|$", tuned)[1]
            for share in tuned.partition("@")[2].split()[:-1]:  # before the end: TUPE, figure 4
                share = float(share)
                step = round(share * group[0]["args"]["steps"])
                early = [dict(row["val_curve"]).get(step) for row in group]
                early = {"run": f"{name} at {share:g}", "loss": join_seeds(early)}
                lines.append(line | early | scores(group, recipe, f"{share:g}"))
            line |= scores(group, recipe)
            line["one class"] = ", ".join(sum((row["collapsed"] for row in group), []))
        lines.append(line)
    return lines


def show(table, runs, rows):
    """Print a table, if any of its runs has a row."""
    lines = table_lines(table, runs, rows)
    if lines:
        print(f"\n## {table}\n")
        print_table(lines)
    if lines and table == "rates":
        print("\nEach scheme at the common and at its own learning rate (show.own_rates)\n")
        print_table(own_rates([rows[name] for name in runs if name in rows]))
    if lines and table == "schemes":
        print("\nWang 2021, table 5 and figure 5 (show.correlations)\n")
        print_table(correlations([rows[name] for name in runs if name in rows]))
    if table == "ranking":
        print("\nAll schemes by their loss after 6 million tokens (show.ranking)\n")
        print_table(ranking(rows))


# The families of schemes, their patterns and colors (Okabe and Ito's, for the color-blind). The
# first match counts: a sum belongs to its relative part.
FAMILIES = {
    "no positions": ("none", "#000000"),
    "added at the input": ("abs|l?sin", "#0072B2"),
    "separate positions (TUPE)": ("tupe.*|bert_ad", "#009E73"),
    "rotary": ("rope", "#CC79A7"),
    "relative offset": (".*", "#D55E00"),
}


def family(pe):
    """-> the family of a scheme and its color."""
    for name, (pattern, color) in FAMILIES.items():
        if re.fullmatch(pattern, pe):
            return name, color


def seeds(rows, name):
    """-> the rows of all seeds of a run."""
    return [row for run, row in rows.items() if without_seed(run) == name]


def scheme_losses(rows):
    """-> {pe: (losses after 3,000 steps, losses after 24,000)} on Wikipedia and books, a loss for
    each seed, from the lowest mean after 3,000 steps to the highest."""
    found = {}
    for run, row in rows.items():
        pe, name = row["args"]["pe"], without_seed(run)
        # At 3e-3, abs diverges in the long run, and sin does not learn order.
        long = f"{pe}-post-1e-3-24000" if pe in ("abs", "sin") else f"rank-{pe}"
        if name in (pe, long):
            found.setdefault(pe, ([], []))[name == long].append(loss(row))
    found = {pe: losses for pe, losses in found.items() if losses[0]}
    return dict(sorted(found.items(), key=lambda item: statistics.mean(item[1][0])))


def ranking(rows):
    """A line for each scheme of table `schemes`. What a scheme adds to a model, and what it can
    represent, is found out from a model of demo size."""
    bench = read_json(HERE / "bench-pe-demo.json")["rows"]
    step_times = {row["pe"]: f"{1 / row['speed']:.1f}" for row in bench}

    def n_parameters(encoder):
        return sum(p.numel() for p in encoder.parameters())

    without = n_parameters(Encoder(EncoderConfig(vocab_size=64, pe="none")))
    lines = []
    for pe, losses in scheme_losses(rows).items():
        encoder, longest = Encoder(EncoderConfig(vocab_size=64, pe=pe)).eval(), "any"
        try:
            encoder(torch.zeros(1, encoder.config.max_len + 1, dtype=torch.long))
        except ValueError:  # longer than its table of positions
            longest = "max_len"
        line = {"scheme": pe, "family": family(pe)[0]}
        for tokens, values in zip(("6 M", "49 M"), losses):
            mean = f"{statistics.mean(values):.2f}" if values else ""
            line |= {f"loss, {tokens} tokens": mean, f"seeds, {tokens}": join_seeds(values)}
        line["parameters added"] = f"{n_parameters(encoder) - without:,}"
        line["step time / abs"] = step_times[pe]
        line["longest sequence"] = longest
        masked_ok = all(part.masked_ok for part in parse_pe(pe))
        line["masked positions"] = "yes" if masked_ok else "no"
        lines.append(line)
    return lines


def own_rates(rows):
    """Each scheme at the common learning rate and at its own, the one with the lowest training loss
    in the last 200 of 1,500 steps (seed 1337). Their text is seen once, so nothing is tuned on
    validation text."""
    by_rate, chosen, lines = {}, {}, {}
    for row in rows:
        args = row["args"]
        by_rate.setdefault((args["pe"], args["steps"], args["lr"]), []).append(row)
        last = COLUMNS["last 200 steps"](row)
        if args["steps"] == 1500 and args["seed"] == 1337:
            chosen[args["pe"]] = min((last, args["lr"]), chosen.get(args["pe"], (np.inf,)))
    for pe, (_, own) in chosen.items():
        lines[pe] = {"scheme": pe, "own learning rate": f"{own:g}"}
        for steps in (1500, 6000):
            for name, lr in {"common": 3e-3, "own": own}.items():
                losses = map(loss, by_rate.get((pe, steps, lr), ()))
                lines[pe][f"{steps:,} steps, {name}"] = join_seeds(losses)
    return [*lines.values()]


def correlations(rows):
    """Wang 2021's table 5 and figure 5, with minus the loss instead of the tasks' scores.

    Correlates AIV, SD, and OPR and DB over n neighbors with minus the loss: Pearson's r with its
    95% interval, and Spearman's. A point is the mean over the seeds of a scheme, without `none`;
    first for all schemes, then for those that have learned order (a loss below 6 nats). A positive
    r means that schemes with a higher indicator have lower losses.
    """
    found = []
    for row in rows:
        run = {"pe": row["args"]["pe"], "loss": -row["val_loss"]}
        run |= {"aiv": row["indicators"]["aiv"], "sd": row["indicators"]["sd"]}
        for n, *values in row["ranges"]:
            run[f"opr {n}"], run[f"db {n}"] = values
        found.append(run)
    means = pandas.DataFrame(found).groupby("pe").mean().drop("none", errors="ignore")
    lines = {name: {"indicator": name} for name in means.columns.drop("loss")}
    for kept in (means, means[means.loss > -6]):
        n = len(kept)
        pearson, ranks = kept.corr().loss, kept.rank().corr().loss
        for name, line in lines.items():
            r = pearson[name]
            low, high = np.tanh(np.arctanh(r) + np.array([-1.96, 1.96]) / max(1, n - 3) ** 0.5)
            line[f"r of {n}"] = f"{r:.2f} ({low:.2f} to {high:.2f})"
            line[f"ranks of {n}"] = f"{ranks[name]:.2f}"
    return [*lines.values()]


# --------------------------------------------------------------------------------------------------
# Figures, 840 pixels wide on a page; each is drawn from the rows {name: row} of runs.jsonl

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


def draw(folder, rows):
    """Draw the figures of the pages into a folder."""
    import matplotlib  # only figures need it

    with matplotlib.rc_context(STYLE):
        for file, paint in FIGURES.items():
            paint(rows).figure.savefig(folder / file)
    terms = read_json(HERE / "terms.json")["runs"]  # of tools.probe --terms
    title = "In abs, the position term varies only at [CLS] and [SEP]; TUPE's favors the next token"
    title += "\n(abs was trained for longer, because it learns order later)"
    draw_terms(folder / "terms.png", terms, title)


def panels(title, x, y="", grid=(1, 1), height=4.2):
    """-> the axes of a new figure, as an array (lines, columns) of panels with the same scales.
    height: in hundreds of pixels."""
    from matplotlib.figure import Figure

    figure = Figure((8.4, height))
    figure.suptitle(title, x=0.01, ha="left", size=11, weight="bold")
    figure.supxlabel(x, size=10)
    figure.supylabel(y, size=10)
    return figure.subplots(*grid, sharex=True, sharey=True, squeeze=False)


def write(axes, text, xy, shift=(6, 0), **style):
    """Write a text at a point of the data, shifted to the right and up."""
    style = dict(textcoords="offset points", va="center") | style
    axes.annotate(text, xy, shift, annotation_clip=False, **style)


def label_ends(axes, ends):
    """Write names at the ends of their curves, {name: (y, color)}, without overlaps; a line leads
    from each curve to its name."""
    axes.margins(x=0.01)
    axes.get_ylim()  # updates the transformation from data to heights, 0 to 1
    heights = [(axes.transScale + axes.transLimits).transform((1, y))[1] for y, _ in ends.values()]
    order = np.argsort(heights)
    index = 0.05 * np.arange(len(order))
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
    for name, color in dict(map(family, schemes)).items():
        axes.text(x, y, name, color=color, transform=axes.transAxes)
        y -= 0.065


def dots(axes, values, line, color):
    """A dot for each seed of a horizontal line."""
    axes.plot(values, [line] * len(values), "o", color=color, alpha=0.6, mew=0, ms=8)


def name_lines(axes, names):
    """Name the lines of a figure, from the top to the bottom."""
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.tick_params(left=False)
    axes.spines["left"].set_visible(False)


def draw_ranking(rows):
    schemes = {pe: losses for pe, losses in scheme_losses(rows).items() if losses[1]}
    title = (
        "After 49 million tokens, eight schemes are within .13 nats; BERT's (abs) is .6 behind rope"
    )
    return paint_ranking(schemes, title, 4.2)


def draw_ranking_all(rows):
    title = (
        "After 6 million tokens, schemes only added at the input are not below none; all others are"
    )
    return paint_ranking(scheme_losses(rows), title, 7.4)


def paint_ranking(schemes, title, height):
    """The losses of schemes, {pe: (after 6 M tokens, after 49 M)}: the latter beside the former, if
    all schemes have them. After 49 M, the number is that of the first seed, which all have."""
    both = all(later for _, later in schemes.values())

    def number(pe, later):
        return schemes[pe][1][0] if later else statistics.mean(schemes[pe][0])

    order = sorted(schemes, key=lambda pe: number(pe, both))
    x = "validation loss of mlm (nats); a dot is a seed, the number "
    x += "that of seed 1337; gray: after 6 M tokens, their mean" if both else "their mean"
    [[axes]] = panels(title, x, height=height)
    name_lines(axes, order)
    for line, (pe, tick) in enumerate(zip(order, axes.get_yticklabels())):
        name, color = family(pe)
        tick.set_color(color)
        axes.axhline(line, color=LIGHT, zorder=0)
        write(axes, name, (1, line), xycoords=("axes fraction", "data"), color=color)
        for later, values in enumerate(schemes[pe][: 1 + both]):
            shade = color if later == both else GRAY
            dots(axes, values, line, shade)
            at, shift, align = (min, -7, "right") if later else (max, 7, "left")
            text = f"{number(pe, later):.2f}"
            write(axes, text, (at(values), line), (shift, 0), ha=align, color=shade)
    axes.axvline(number("none", both), color="k", lw=0.8, ls=":", zorder=0)
    axes.margins(x=0.1)
    return axes


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


def draw_long(rows):
    title = (
        "BERT's positions (abs) begin to help after 16 M tokens; after 49 M they are .6 behind rope"
    )
    [[axes]] = panels(title, "millions of tokens (seed 1337)", "validation loss of mlm (nats)")
    axes.set_ylim(2.5, 7.2)  # room for the names
    curves = {}
    for row in rows.values():
        pe, lr, steps, seed = (row["args"][key] for key in ("pe", "lr", "steps", "seed"))
        if steps == 24000 and seed == 1337:
            points = [(2048 * step / 1e6, value) for step, value in row["val_curve"]]
            curves[f"{pe} ({lr:.0e})".replace("e-0", "e-")] = points, pe
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
    x = f"what random tokens add to the loss of pplm (nats); a dot is a seed; used: above {USED}"
    [[axes]] = panels(title, x)
    name_lines(axes, [*RANDOM_TOKENS.values()])
    for line, name in enumerate(RANDOM_TOKENS):
        costs = [cost_of_random_tokens(row) for row in seeds(rows, name)]
        axes.axhline(line, color=LIGHT, zorder=0)
        dots(axes, costs, line, ORANGE)
        text = f"{sum(cost > USED for cost in costs)} of {len(costs)} use them"
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
    text = f"seed 6, trained further\n(dashed): after {uses_tokens(more)} more"
    write(axes, text, curve[-1], (4, -20), **style)
    write(axes, "the eight others", (10000, 1.67), color=BLUE)
    copy = copy_baseline(more)
    axes.axhline(copy, color="k", lw=1)
    write(axes, "copy: the lowest loss without using the tokens", (0, copy), (0, -9))
    return axes


def draw_layers(rows):
    """Layer 0 is the embedding. Seeds 6 and 7 were trained for 3,000 more steps."""
    title = "In three of nine long runs of pplm alone, the spread rises more than a hundredfold"
    grid = panels(title, "step; dotted: the tokens begin to lower the loss", SPREAD, (1, 4))
    colors = ["0.6", "#9ecae1", "#4292c6", "#2171b5", "#08306b"]
    panel_titles = {
        "classroom-16-30000-s1": "16 tokens, seed 1",
        "pplm-30000-s6": "64 tokens, seed 6",
        "pplm-30000-s9": "64, seed 9: not yet",
        "pplm-30000-s7": "64, 7: like 4 others",
    }
    for axes, (name, panel_title) in zip(grid[0], panel_titles.items()):
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
    grid = panels(title, x, SPREAD, (2, 4))
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
    title = (
        "On sequences four times as long, t5's loss rises by half a nat; deberta's, alibi's do not"
    )
    y = "change of the loss of mlm (nats), mean of 3 seeds"
    [[axes]] = panels(title, "tokens per sequence (trained on 128)", y)
    ends, found = {}, {}
    for row in rows.values():
        if without_seed(row["run"]).startswith("long-"):
            found.setdefault(row["args"]["pe"], []).append([*row["lengths"].values()])
    for pe, losses in found.items():
        change, color = np.mean(losses, 0), family(pe)[1]
        axes.plot(["128", "256", "512"], change - change[0], "o-", color=color)
        ends[pe] = change[-1] - change[0], color
    label_ends(axes, ends)
    name_families(axes, ends, 0.05, 0.9)
    return axes


RACERS = {"Roberta": "RoBERTa (abs)", "MPNet": "MPNet", "DebertaV2": "DeBERTa-v2"}


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
    label_ends(axes, ends)
    text = "dashed: transformers' models, which compute logits at every token"
    axes.text(0.35, 0.92, text, transform=axes.transAxes)
    return axes


FIGURES = {
    "ranking.png": draw_ranking,
    "ranking-all.png": draw_ranking_all,
    "plateau.png": draw_plateau,
    "long.png": draw_long,
    "reading.png": draw_random_tokens,
    "alone.png": draw_alone,
    "layers.png": draw_layers,
    "spread.png": draw_spread,
    "lengths.png": draw_lengths,
    "race.png": draw_race,
}
