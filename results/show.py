"""What run.py prints of the rows, and the pictures that it draws of them."""

import itertools
import json
import re
import statistics

import numpy as np
import pandas

from finetune import RECIPES, paper_averages
from model import Encoder, EncoderConfig
from probe import print_table

# The training loss below which order is used: who sees none ends at 6.3, on docs at 5.7.
PLATEAU = {"docs": 5.5, "web": 6.2}
# What the papers' tables have: the mean over GLUE, but for P0.
# fmt: off
PUBLISHED = {
    "p0-mlm": "mnli .597, cola .614, qnli .666", "p0-pmlm": ".612, .618, .642",
    "p0-pplm": ".626, .617, .673", "p0-pplm_some": ".590, .618, .631",
    "p0-pplm_binary": ".595, .607, .634", "p1-abs": ".835", "p1-abs+t5": ".837",
    "p1-tupe_a": ".835 at .3, .845", "p1-tupe_r": ".838 at .3, .849", "p2-mlm": ".750",
    "p2-taco": ".749 at .2, .762", "p3-none": ".766", "p3-abs": ".822", "p3-sin": ".805",
    "p3-lsin": ".806", "p3-rel": ".817", "p3-rsin": ".818", "p3-rlsin": ".822",
    "p3-abs+rel": ".818", "p3-abs+rsin": ".815", "p3-abs+rlsin": ".825", "p3-lsin+rel": ".808",
    "p3-lsin+rsin": ".813", "p3-lsin+rlsin": ".814",
}
# fmt: on


# --------------------------------------------------------------------------------------------------
# Columns: row -> number, text, or None where it is not known


def loss(row):
    """Validation loss of the objective; of a sum: of its last part."""
    return row.get(f"val_{row['args']['objective'].split('+')[-1]}", row["val_loss"])


def leaves(row):
    """The step at which mlm's training loss has left the plateau."""
    if row["args"]["objective"] != "mlm":
        return None
    level = PLATEAU["web" if "$TEXT" in row["commands"]["train"] else "docs"]
    steps = [step for step, value in row["curve"] if value < level]
    return f"{steps[0]:,}" if steps else "never"


def loss_after(row, share):
    """Validation loss after this share of the steps, where there was a validation."""
    return dict(row["val_curve"]).get(round(share * row["args"]["steps"]))


def parameters(row):
    """The scheme's own."""
    config = EncoderConfig(vocab_size=72, pe=row["args"]["pe"], n_head=row["args"]["n_head"])
    return f"{sum(p.numel() for p in Encoder(config).pe.parameters()):,}"


def all_pairs(row):
    """The share of all minimal pairs; none where order-only ones alone were judged."""
    found = row.get("blimp")
    if found and round(found["mean"] - found["order_only"], 9):
        return found["mean"]
    return None


COLUMNS = {
    "own parameters": parameters,
    "loss": loss,
    # Fresh text: a rate that is chosen by it is chosen on documents to train on.
    "last 200 steps": lambda row: statistics.mean(value for _, value in row["curve"][-2:]),
    "mlm loss": lambda row: row.get("val_mlm"),
    "on true positions": lambda row: row.get("mlm"),
    "copy": lambda row: row["baselines"].get("copy", row["baselines"].get("pplm.copy")),
    "random words": lambda row: row["words"]["random"],
    "other order": lambda row: row["words"]["shuffled"],
    "AUC": lambda row: row["words"]["auc"],
    "leaves at step": leaves,
    "AIV": lambda row: row["indicators"].get("aiv"),
    "OPR": lambda row: row["indicators"].get("opr"),
    "BLiMP": all_pairs,
    "order-only": lambda row: row.get("blimp", {}).get("order_only"),
    "contextual score": lambda row: row["contexts"][-1][1] if row.get("contexts") else None,
    "published": lambda row: PUBLISHED.get(row["run"]),
    "minutes": lambda row: f"{row['minutes']:.0f}",
}
READS = "loss|mlm loss|on true positions|copy|random words|other order|AUC"
SHOWN = {
    "docs": "loss|leaves at step|AIV|minutes",
    "schemes": "own parameters|loss|leaves at step|AIV|OPR|BLiMP|order-only",
    "recipe": "loss|last 200 steps|leaves at step|AIV|order-only",
    "reading": READS,
    "plateau": f"{READS}|AIV",
    "lengths": "loss",
    "objectives": "mlm loss|on true positions|loss|random words|contextual score|BLiMP|order-only",
    "p2": "mlm loss|loss|minutes",
    "worth": "mlm loss|loss",
    "lab": f"{READS}|AIV",
}


# --------------------------------------------------------------------------------------------------
# Tables


def stem(name):
    """The name of a run without its seed."""
    return re.sub(r"-s\d+$", "", name)


def text(x):
    return "-" if x in (None, "") else f"{x:.3f}" if isinstance(x, float) else str(x)


def together(values):
    """Of several seeds -> text: one where all are the same, none where none is known."""
    values = list(map(text, values))
    return "" if {*values} == {"-"} else values[0] if len({*values}) == 1 else ", ".join(values)


def keys_of(rows, name):
    """The keys of rows' dictionaries of this name, each once, in order."""
    found = {}
    for row in rows:
        found |= row[name]
    return list(found)


def scores(runs, recipe, share=""):
    """-> {metric: 'median (min - max); of the next run'}, of models fine-tuned after this share of
    the steps; the mean where the recipe's paper takes that."""
    middle, found, first = getattr(statistics, RECIPES[recipe]["aggregate"]), {}, {}
    for key in keys_of(runs, "scores"):
        metric, _, at = key.partition(" at ")
        known = [row["scores"][key] for row in runs if key in row["scores"]]
        if at == share:
            first[tuple(metric.split())] = middle(known[0])
            found[metric] = "; ".join(map(spread, map(middle, known), known))
    for paper, mean in paper_averages(first).items():  # over GLUE, as each takes it
        if isinstance(mean, float):
            found[f"{paper}'s mean"] = f"{mean:.3f}"
    return found


def spread(value, values):
    return f"{value:.3f}" + (f" ({min(values):.3f} - {max(values):.3f})" if values[1:] else "")


def lines_of(table, runs, rows):
    """A line for all seeds of a run -> dicts of texts; runs: {name: (flags, fine-tuned)}."""
    groups, found = {}, []
    for name in runs:
        if name in rows:
            groups.setdefault(stem(name), []).append(rows[name])
    for name, group in groups.items():
        line = {"run": name, "seeds": ", ".join(str(row["args"]["seed"]) for row in group)}
        for column in SHOWN.get(table, "loss|published").split("|"):
            line[column] = together(map(COLUMNS[column], group))
        for length in group[0].get("lengths", ()) if table == "lengths" else ():
            line[length] = together(row.get("lengths", {}).get(length) for row in group)
        tuned = runs[group[0]["run"]][1]
        if tuned:
            recipe = re.search(r"--recipe (\w+)|$", tuned)[1] or "electra"
            for share in tuned.partition("@")[2].split()[:-1]:  # before the end: P1, fig 4
                under_way = [loss_after(row, float(share)) for row in group]
                early = line | {"run": f"{name} at {share}", "loss": together(under_way)}
                found.append(early | scores(group, recipe, f"{float(share):g}"))
            line |= scores(group, recipe)
            line["one class"] = ", ".join(itertools.chain(*(row["collapsed"] for row in group)))
        found.append(line)
    return found


def print_lines(lines):
    """In Markdown, without empty columns."""
    frame = pandas.DataFrame(lines).fillna("")
    print_table(frame.loc[:, (frame != "").any()].to_dict("records"))


def show(table, runs, rows):
    """Print a table of what has been run."""
    lines = lines_of(table, runs, rows)
    if not lines:
        return
    print(f"\n## {table}\n")
    print_lines(lines)
    if table == "recipe":
        print(
            "\nEach scheme at its best rate, by the last 200 training steps, for post and pre-LN\n"
        )
        print_lines(best_recipes(lines))
    if table == "schemes":
        print("\nP3's table 5 and fig 5: see show.properties\n")
        print_lines(properties([rows[name] for name in runs if name in rows]))


def best_recipes(lines):
    """Of the lines of `recipe`, for each scheme and norm the one whose training loss is lowest."""
    best = {}
    for line in lines:
        pe, norm, *_ = [*line["run"].split("-"), "post"]
        last = statistics.mean(map(float, line["last 200 steps"].split(", ")))
        if not line["run"].endswith("12000"):
            best[pe, norm] = min(
                best.get((pe, norm), (last, line)), (last, line), key=lambda x: x[0]
            )
    return [line for _, line in best.values()]


def properties(rows):
    """P3's table 5 and fig 5 over schemes (means of their seeds), `none` aside: how far a property
    is violated, among so many neighbours, and minus the loss; positive: better where it is
    violated. Pearson's r (95%) and that of ranks; over all, and over those that learned order."""
    found = []
    for row in rows:
        run = {"pe": row["args"]["pe"], "loss": -row["val_loss"]}
        run |= {"aiv": row["indicators"]["aiv"], "sd": row["indicators"]["sd"]}
        for n, *values in row["ranges"]:
            run[f"opr {n}"], run[f"db {n}"] = values
        found.append(run)
    means = pandas.DataFrame(found).groupby("pe").mean().drop("none", errors="ignore")
    lines = {name: {"violated": name} for name in means.columns.drop("loss")}
    for kept in (means, means[means.loss > -6]):
        n = len(kept)
        for name, line in lines.items():
            r = kept.corr().loc[name, "loss"]
            low, high = np.tanh(np.arctanh(r) + np.array([-1.96, 1.96]) / max(1, n - 3) ** 0.5)
            line[f"r of {n}"] = f"{r:.2f} ({low:.2f} to {high:.2f})"
            line[f"ranks of {n}"] = f"{kept.rank().corr().loc[name, 'loss']:.2f}"
    return [*lines.values()]


# --------------------------------------------------------------------------------------------------
# Pictures


# At the input blue, by offset orange, untied green; Okabe and Ito's, for the colour-blind.
CURVES = dict.fromkeys(["abs", "sin"], "#0072B2") | {"none": "#000000"}
CURVES |= dict.fromkeys(["t5", "rel", "rope"], "#D55E00") | dict.fromkeys(
    ["tupe_a", "tupe_r"], "#009E73"
)
BARS = {
    "read-pplm-3e-3-s1337": "alone",
    "read-pplm-30000-s1337": "alone, 30,000 steps:\none seed of three",
    "read-pplm-5e-4-s1337": "alone, P0's rate",
    "read-pplm-words-s1337": "alone, on mlm's\nword embeddings",
    "read-pplm-words-frozen-s1337": "the same, frozen:\none seed of three",
    "read-pplm-random-frozen-s1337": "on random ones,\nfrozen",
    "read-pplm-after-mlm-3e-3-s1337": "alone, after mlm",
    "read-pplm-after-mlm-5e-4-s1337": "alone, after mlm,\nP0's rate",
    "read-mlm.1-s1337": "beside mlm\nweighted .1",
    "read-4-heads-s1337": "beside mlm, 4 heads",
    "read-s1337": "beside mlm",
    "read-3000": "beside mlm, 3,000 steps",
}


ALONE = {
    "read-pplm-after-mlm-3e-3-s1337": "from a model that guessed words",
    "read-pplm-30000-s1337": "from nothing",
    "read-pplm-30000-s1": "another seed",
    "read-pplm-30000-s2": "a third seed",
}


def draw(folder, tables, rows):
    """plateau.png, reading.png, alone.png, lengths.png and race.png, of what has been run."""
    from matplotlib.figure import Figure  # only pictures need it

    def picture(name, x, y, paint):
        figure = Figure(figsize=(8, 4.5), layout="constrained")
        axes = figure.subplots()
        paint(axes)
        axes.set(xlabel=x, ylabel=y)
        axes.spines[["top", "right"]].set_visible(False)
        figure.savefig(folder / name, dpi=110)

    picture("plateau.png", "step", "training loss (nats)", lambda axes: curves(axes, rows))
    reading = {BARS[name]: rows[name] for name in BARS if name in rows}
    picture("reading.png", "", "pplm's loss (nats)", lambda axes: worth_of_words(axes, reading))
    alone = {label: rows[name] for name, label in ALONE.items() if name in rows}
    picture("alone.png", "step", "pplm's loss (nats)", lambda axes: when_it_reads(axes, alone))
    long = [rows[name] for name in tables["lengths"] if rows.get(name, {}).get("lengths")]
    if long:
        picture("lengths.png", "tokens a row", "mlm's loss", lambda axes: by_length(axes, long))
    if (folder / "bench-race.json").exists():
        learners = json.loads((folder / "bench-race.json").read_text())["rows"]
        longest = max(row["race"] for row in learners)
        learners = [row for row in learners if row["race"] == longest]
        picture("race.png", "minutes", "mlm's loss", lambda axes: by_the_clock(axes, learners))


def label(axes, ends):
    """Write names at the ends of their curves, {name: (line, (x, y))}, none over another."""
    low, high = axes.get_ylim()
    names = sorted(ends, key=lambda name: ends[name][1][1])
    index = 0.045 * (high - low) * np.arange(len(names))
    free = np.array([ends[name][1][1] for name in names]) - index
    # Pushed up where it would cover the one below, pushed down likewise, and the mean of both.
    up, down = np.maximum.accumulate(free), np.minimum.accumulate(free[::-1])[::-1]
    for name, at in zip(names, index + (up + down) / 2):
        line, (x, _) = ends[name]
        style = dict(textcoords="offset points", va="center", annotation_clip=False)
        axes.annotate(name, (x, at), (6, 0), color=line.get_color(), **style)
    axes.margins(x=0.02)


def curves(axes, rows):
    """When schemes leave the plateau; dashed, on validation text: abs at lab size, and there beside
    pplm."""
    ends = {}
    for pe, color in CURVES.items():
        if row := rows.get(f"{pe}-s1337"):
            (line,) = axes.plot(*zip(*row["curve"]), color=color)
            ends[pe] = line, row["curve"][-1]
    for objective, name in {"mlm": "abs, larger", "mlm+pplm": "the same, with pplm"}.items():
        if row := rows.get(f"lab-abs-{objective}-s1337"):
            (line,) = axes.plot(*zip(*row["val_curve"]), "--", color=CURVES["abs"])
            ends[name] = line, row["val_curve"][-1]
    label(axes, ends)
    axes.text(700, 7.0, "the plateau: words are counted, their order is hardly used")


def worth_of_words(axes, runs):
    """pplm's loss with true, random and shuffled words, {name: row}, against the line of `copy`."""
    for shift, words in enumerate(("true", "random", "shuffled")):
        heights = [row["words"][words] for row in runs.values()]
        at = np.arange(len(runs)) + 0.18 * (shift - 1)
        color = ["#0072B2", "#E69F00", "#CC79A7"][shift]
        axes.plot(at, heights, "o", ms=9, label=f"{words} words", color=color)
    line = COLUMNS["copy"](next(iter(runs.values())))
    axes.axhline(line, color="k", label="copy: the best without reading")
    axes.set_xticks(range(len(runs)), runs, rotation=35, ha="right")
    axes.set_ylim(1.2, 2.3)
    axes.legend(ncols=2, loc="upper center", frameon=False)


def when_it_reads(axes, runs):
    """pplm's validation loss, {name: row of a run of pplm alone}, against the line of `copy`."""
    ends = {}
    for name, row in runs.items():
        (line,) = axes.plot(*zip(*row["val_curve"]))
        ends[name] = line, row["val_curve"][-1]
    level = COLUMNS["copy"](next(iter(runs.values())))
    axes.axhline(level, color="k", lw=1)
    axes.text(5000, level, "copy: the best without reading", va="bottom")
    label(axes, ends)


def by_length(axes, runs):
    """mlm's loss on rows of growing length, a line a scheme: the mean of its seeds."""
    ends = {}
    for pe in dict.fromkeys(row["args"]["pe"] for row in runs):
        of_pe = [row["lengths"] for row in runs if row["args"]["pe"] == pe]
        losses = [statistics.mean(row[n] for row in of_pe) for n in of_pe[0]]
        (line,) = axes.plot([*of_pe[0]], losses, marker="o")
        ends[pe] = line, (len(losses) - 1, losses[-1])
    label(axes, ends)


def by_the_clock(axes, rows):
    """mlm's loss beside the minutes of training, of what bench.py --race wrote; peers dashed."""
    ends = {}
    for row in rows:
        if "curve" in row:
            curve = [(seconds / 60, loss) for seconds, loss in row["curve"]]
            (line,) = axes.plot(*zip(*curve), "-" if row["name"].startswith("ours") else "--")
            ends[row["name"].removesuffix("ForMaskedLM")] = line, curve[-1]
    label(axes, ends)
