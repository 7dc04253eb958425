"""Prints the tables of results/runs.jsonl."""

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
from tools.output import print_table

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
    "tuned": "loss|last 200 steps",
    "classroom": "loss|copy|random tokens|shuffled tokens|AUC|spread|uses tokens at|minutes",
    "lengths": "loss",
    "clipped": "loss",
    "ids": "loss",
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
    if lines and table in ("rates", "tuned"):
        print("\nEach scheme at its own learning rate (show.own_rates)\n")
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


def docs_schemes(rows):
    """-> {pe: the rows of its seeds} on docs after 1,500 steps, at the settings of `docs`."""
    found = {}
    for name, row in rows.items():
        if without_seed(name) == f"docs-{row['args']['pe']}":
            found.setdefault(row["args"]["pe"], []).append(row)
    return found


def longest_sequence(pe):
    """-> "any", or "max_len" for a scheme with a table of positions."""
    encoder = Encoder(EncoderConfig(vocab_size=64, pe=pe)).eval()
    try:
        encoder(torch.zeros(1, encoder.config.max_len + 1, dtype=torch.long))
    except ValueError:
        return "max_len"
    return "any"


def step_times():
    """-> {pe: step time of a demo model relative to that of abs}."""
    files = [read_json(HERE / f"bench-pe-demo{x}.json")["rows"] for x in ("", "-2")]
    return {row["pe"]: 1 / row["speed"] for row in sum(files, [])}


def docs_ranking(ranked, mine, speed):
    """ranked: {pe: rows of its seeds}; speed: that of scheme `mine` relative to abs -> a line for
    each scheme, by the mean of its losses."""
    times, lines = step_times() | {mine: 1 / speed}, []
    by_loss = sorted(ranked, key=lambda pe: statistics.mean(map(loss, ranked[pe])))
    for rank, pe in enumerate(by_loss, 1):
        mean = f"{statistics.mean(map(loss, ranked[pe])):.2f}"
        line = {"": "->" if pe == mine else "", "rank": rank, "scheme": pe, "loss": mean}
        line |= {"seeds": join_seeds(map(loss, ranked[pe])), "step time / abs": f"{times[pe]:.1f}"}
        lines.append(line)
    return lines


def ranking(rows):
    """A line for each scheme of table `schemes`. What a scheme adds to a model, and what it can
    represent, is found out from a model of demo size."""
    times = step_times()

    def n_parameters(encoder):
        return sum(p.numel() for p in encoder.parameters())

    without = n_parameters(Encoder(EncoderConfig(vocab_size=64, pe="none")))
    lines = []
    for pe, losses in scheme_losses(rows).items():
        encoder = Encoder(EncoderConfig(vocab_size=64, pe=pe))
        line = {"scheme": pe, "family": family(pe)[0]}
        for tokens, values in zip(("6 M", "49 M"), losses):
            mean = f"{statistics.mean(values):.2f}" if values else ""
            line |= {f"loss, {tokens} tokens": mean, f"seeds, {tokens}": join_seeds(values)}
        line["parameters added"] = f"{n_parameters(encoder) - without:,}"
        line["step time / abs"] = f"{times[pe]:.1f}"
        line["longest sequence"] = longest_sequence(pe)
        masked_ok = all(part.masked_ok for part in parse_pe(pe))
        line["masked positions"] = "yes" if masked_ok else "no"
        lines.append(line)
    return lines


def own_rates(rows):
    """-> a line for each scheme: its learning rate, the one with the lowest training loss in the
    last 200 steps of the shortest runs (seed 1337); the losses of these runs at each rate, and of
    longer ones at the common rate and at its own. Sorted by the loss at its own rate, for which
    nothing was tuned on validation text."""
    (shortest, *longer), lines = sorted({row["args"]["steps"] for row in rows}), []
    by_rate, chosen = {}, {}  # {(scheme, steps, rate): losses}, {scheme: (training loss, rate)}
    for row in rows:
        args = row["args"]
        by_rate.setdefault((args["pe"], args["steps"], args["lr"]), []).append(loss(row))
        if args["steps"] == shortest and args["seed"] == 1337:
            last = COLUMNS["last 200 steps"](row)
            chosen[args["pe"]] = min((last, args["lr"]), chosen.get(args["pe"], (np.inf,)))
    rates = sorted({lr for _, steps, lr in by_rate if steps == shortest})
    for pe, (_, own) in sorted(
        chosen.items(), key=lambda x: statistics.mean(by_rate[x[0], shortest, x[1][1]])
    ):
        line = {"scheme": pe, "own learning rate": f"{own:g}"}
        for lr in rates:
            line[f"{lr:g}"] = join_seeds(by_rate.get((pe, shortest, lr), ()))
        for steps in longer:
            for name, lr in {"common": 3e-3, "own": own}.items():
                losses = by_rate.get((pe, steps, lr), ())
                line[f"{steps:,} steps, {name}"] = join_seeds(losses)
        lines.append(line)
    return lines


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
