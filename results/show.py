"""Prints the tables of results/runs.jsonl, and draws the figures."""

import re
import statistics
from collections import defaultdict
from pathlib import Path

import numpy as np
import pandas

from finetune import RECIPES
from lib.files import read_json
from lib.glue import paper_averages
from tools.probe import draw_terms, print_table

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


def all_pairs(row):
    """Accuracy on all minimal pairs; None if only the order-only ones were scored."""
    found = row.get("blimp")
    if found and found["order_only_pairs"] < found["pairs"]:
        return found["mean"]


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
    "BLiMP": all_pairs,
    "order-only": lambda row: row.get("blimp", {}).get("order_only"),
    "contextual score": lambda row: row["contexts"][-1][1] if row.get("contexts") else None,
    "spread": lambda row: f"{row['spread'][-1]:.2g}" if row.get("spread") else None,
    "published": lambda row: PUBLISHED.get(row["run"]),
    "minutes": lambda row: f"{row['minutes']:.0f}",
}
TOKENS = "loss|mlm loss|at true positions|copy|random tokens|shuffled tokens|AUC"
SHOWN = {
    "docs": "loss|leaves plateau at|AIV|minutes",
    "schemes": "loss|leaves plateau at|AIV|OPR|BLiMP|order-only",
    "recipe": "loss|last 200 steps|leaves plateau at|AIV|order-only",
    "pplm": TOKENS,
    "plateau": f"{TOKENS}|AIV",
    "rates": "loss|last 200 steps",
    "classroom": "loss|copy|random tokens|shuffled tokens|AUC|spread|uses tokens at|minutes",
    "lengths": "loss",
    "objectives": "mlm loss|at true positions|loss|random tokens|contextual score|BLiMP|order-only",
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
    if not lines:
        return
    print(f"\n## {table}\n")
    print_table(lines)
    if table == "rates":
        print("\nEach scheme at the common and at its own learning rate (show.own_rates)\n")
        print_table(own_rates([rows[name] for name in runs if name in rows]))
    if table == "schemes":
        print("\nWang 2021, table 5 and figure 5 (show.correlations)\n")
        print_table(correlations([rows[name] for name in runs if name in rows]))


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
    """Wang 2021's table 5 and figure 5, over schemes instead of tasks.

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
# Figures (Okabe and Ito's colors, for the color-blind)

BLUE, ORANGE, GREEN = "#0072B2", "#D55E00", "#009E73"  # at the input, by offset, untied
CURVES = {"none": "#000000", "abs": BLUE, "sin": BLUE, "t5": ORANGE, "rel": ORANGE, "rope": ORANGE}
CURVES |= {"tupe_a": GREEN, "tupe_r": GREEN}
LARGER = {"lab-abs-mlm-s1337": "abs, lab size", "lab-abs-mlm+pplm-s1337": "abs, lab, with pplm"}
ABLATED = {
    "pplm-3e-3-s1337": "alone",
    "pplm-30000-s1337": "alone, 30,000 steps:\none seed of ten",
    "pplm-5e-4-s1337": "alone, RPP's\nlearning rate",
    "pplm-embeddings-s1337": "alone, on mlm's\nembeddings",
    "pplm-embeddings-frozen-s1337": "the same, frozen:\none seed of three",
    "pplm-random-frozen-s1337": "on random ones,\nfrozen",
    "pplm-after-mlm-3e-3-s1337": "alone, after mlm",
    "pplm-after-mlm-5e-4-s1337": "alone, after mlm,\nRPP's learning rate",
    "mlm+pplm-mlm.1-s1337": "with mlm\nweighted .1",
    "mlm+pplm-4-heads-s1337": "with mlm, 4 heads",
    "mlm+pplm-s1337": "with mlm",
    "mlm+pplm-3000": "with mlm, 3,000 steps",
}
COPY = "copy: lowest loss without using the tokens"


def draw(folder, tables, rows):
    """Draw the figures of docs/results.md into a folder. (tools.probe --terms wrote terms.json.)"""
    from matplotlib.figure import Figure  # only figures need it

    def figure(name, paint, chosen, y, *labels):  # a panel for each label of an x axis
        picture = Figure(figsize=(8, 4.5), layout="constrained")
        panels = picture.subplots(1, len(labels), sharey=True, squeeze=False)[0]
        paint(*panels, chosen)
        panels[0].set_ylabel(y)
        for axes, label in zip(panels, labels):
            axes.set_xlabel(label)
            axes.spines[["top", "right"]].set_visible(False)
        picture.savefig(folder / name, dpi=110)

    def pick(names):
        return {label: rows[name] for name, label in names.items() if name in rows}

    figure("plateau.png", draw_plateau, rows, "training loss (nats)", "step")
    figure("reading.png", draw_ablation, pick(ABLATED), "loss of pplm (nats)", "")
    long = pick({name: name for name in tables["pplm"] if name.startswith("pplm-30000-")})
    figure("alone.png", draw_alone, long, "loss of pplm (nats)", "step")
    layers = pick({f"pplm-30000-s{seed}": f"step (seed {seed})" for seed in (6, 9, 7)})
    figure("layers.png", draw_layers, layers, "spread of hidden states", *layers)
    short = pick({name: name for name in tables["classroom"] if "-16-" in name})
    figure("spread.png", draw_spread, short, "spread of hidden states", "step", "layer")
    long = [rows[name] for name in tables["lengths"] if rows.get(name, {}).get("lengths")]
    figure("lengths.png", draw_lengths, long, "loss of mlm (nats)", "tokens per sequence")
    race = read_json(Path(__file__).with_name("bench-race.json"), rows=list)["rows"]
    longest = max(row["race"] for row in race)
    race = [row for row in race if row["race"] == longest and "curve" in row]
    figure("race.png", draw_race, race, "loss of mlm (nats)", "minutes of training")
    terms = read_json(Path(__file__).with_name("terms.json"), runs=list)
    draw_terms(folder / "terms.png", terms["runs"])


def label_ends(axes, ends):
    """Write names at the ends of their curves, {name: (line, (x, y))}, without overlaps."""
    low, high = axes.get_ylim()
    names = sorted(ends, key=lambda name: ends[name][1][1])
    index = 0.045 * (high - low) * np.arange(len(names))
    free = np.array([ends[name][1][1] for name in names]) - index
    # The mean of two layouts: one pushes overlapping names up, the other pushes them down.
    up, down = np.maximum.accumulate(free), np.minimum.accumulate(free[::-1])[::-1]
    for name, y in zip(names, index + (up + down) / 2):
        line, (x, _) = ends[name]
        style = dict(textcoords="offset points", va="center", annotation_clip=False)
        axes.annotate(name, (x, y), (6, 0), color=line.get_color(), **style)
    axes.margins(x=0.02)


def draw_plateau(axes, rows):
    """Training loss of schemes; dashed, the validation loss of abs at lab size, alone and with
    pplm."""
    ends = {}
    for pe, color in CURVES.items():
        if row := rows.get(f"{pe}-s1337"):
            (line,) = axes.plot(*zip(*row["curve"]), color=color)
            ends[pe] = line, row["curve"][-1]
    for run, name in LARGER.items():
        if row := rows.get(run):
            (line,) = axes.plot(*zip(*row["val_curve"]), "--", color=BLUE)
            ends[name] = line, row["val_curve"][-1]
    label_ends(axes, ends)
    axes.text(700, 7.0, "the plateau: a bag of tokens, whose order is hardly used")


def draw_ablation(axes, runs):
    """Loss of pplm with true, random and shuffled tokens, {name: row}, and the copy baseline."""
    colors = {"true": "#0072B2", "random": "#E69F00", "shuffled": "#CC79A7"}
    for shift, (tokens, color) in enumerate(colors.items()):
        heights = [row["words"][tokens] for row in runs.values()]
        x = np.arange(len(runs)) + 0.18 * (shift - 1)
        axes.plot(x, heights, "o", ms=9, label=f"{tokens} tokens", color=color)
    axes.axhline(copy_baseline(next(iter(runs.values()))), color="k", label=COPY)
    axes.set_xticks(range(len(runs)), runs, rotation=35, ha="right")
    axes.set_ylim(1.2, 2.3)
    axes.legend(ncols=2, loc="upper center", frameon=False)


def draw_alone(axes, runs):
    """Validation loss of pplm alone, {name: row}, and the copy baseline."""
    level = copy_baseline(next(iter(runs.values())))
    ends = defaultdict(list)
    for row in runs.values():
        below = row["val_curve"][-1][1] < level
        (line,) = axes.plot(*zip(*row["val_curve"]), color=ORANGE if below else BLUE)
        ends[below].append((line, row["val_curve"][-1]))
    axes.axhline(level, color="k", lw=1)
    axes.text(5000, level, COPY, va="bottom")
    label_ends(axes, {f"{len(x)} of {len(runs)} seeds": x[0] for x in ends.values()})


def draw_layers(left, middle, right, runs):
    """Spread of hidden states after each layer over the steps of three runs of pplm, {name: row},
    on a log scale; layer 0 is the embedding."""
    for axes, row in zip((left, middle, right), runs.values()):
        steps, *layers = zip(*row["spreads"])
        for n, spread in enumerate(layers):
            axes.plot(steps, spread, label=f"layer {n}")
    left.set_yscale("log")
    right.legend(frameon=False, loc="lower right")


SPREADS = {
    "1-layers": ("1 layer", GREEN),
    "pre": ("4 layers, pre-LN", ORANGE),
    "batch-512": ("4 layers, batch 512", "#CC79A7"),
    "mlm.1": ("4 layers, with mlm weighted .1", "#E69F00"),
    "2-layers": ("2 layers", "#56B4E9"),
    "4-layers": ("4 layers (BERT's post-LN)", BLUE),
}


def draw_spread(left, right, runs):
    """Spread of hidden states in runs of pplm, {name: row}, on a log scale. Left: of the last layer
    over the steps; a dot is the step at which a run begins to use the tokens. Right: of each layer
    at the end; layer 0 is the embedding."""
    for kind, (label, color) in SPREADS.items():
        for row in [row for name, row in runs.items() if f"-16-{kind}-s" in name]:
            curve = {step: value for step, *_, value in row["spreads"]}
            left.plot(*zip(*curve.items()), color=color, label=label)
            label = None  # one entry of the legend for all seeds
            for step, value in curve.items():
                if f"{step:,}" == uses_tokens(row):
                    left.plot(step, value, "o", ms=9, color=color)
            right.plot(row["spread"], "o-", color=color)
    left.set_yscale("log")
    right.set_xticks(range(5))
    left.figure.legend(frameon=False, ncols=3, loc="outside lower center")


def draw_lengths(axes, rows):
    """Loss of mlm on sequences of growing length, for each scheme the mean of its seeds."""
    ends = {}
    for pe in dict.fromkeys(row["args"]["pe"] for row in rows):
        of_pe = [row["lengths"] for row in rows if row["args"]["pe"] == pe]
        losses = [statistics.mean(row[n] for row in of_pe) for n in of_pe[0]]
        (line,) = axes.plot([*of_pe[0]], losses, marker="o")
        ends[pe] = line, (len(losses) - 1, losses[-1])
    label_ends(axes, ends)


def draw_race(axes, rows):
    """Loss of mlm over minutes of training; transformers' models are dashed."""
    ends = {}
    for row in rows:
        curve = [(seconds / 60, loss) for seconds, loss in row["curve"]]
        (line,) = axes.plot(*zip(*curve), "-" if row["name"].startswith("ours") else "--")
        ends[row["name"].removesuffix("ForMaskedLM")] = line, curve[-1]
    label_ends(axes, ends)
