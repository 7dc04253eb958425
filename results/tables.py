"""The tables of RESULTS.md and the pictures, from the raw rows in this folder.

    python results/tables.py                            # print the tables, draw the pictures
    python results/tables.py collect schemes out/*      # run folders -> results/schemes.jsonl, a row a run
    python results/tables.py probes out/probe/probe.json                    # of probe.py --runs -> results/probe.json
    python results/tables.py scores finetune 'mlm, demo' out/run/results.jsonl      # fine-tuning rows -> results/finetune.jsonl

schemes.jsonl, objectives.jsonl   pre-training runs
claims.jsonl                      pre-training runs behind P0's table 1 and P1's order, with their validation curves; `changed`
                                  is an edit of model.py, in words
finetune.jsonl, claims_finetune.jsonl   fine-tuning runs (results.jsonl of run folders), with what they started from
probe.json                        probe.py --runs, pictures left out
bench*.json                       bench.py --json
pplm.jsonl                        the log of the run in the README's figure
"""

import json
import statistics
import sys
from collections import Counter
from pathlib import Path

HERE = Path(__file__).parent
KEPT = ("pe", "objective", "preset", "seed", "steps", "lr", "block_size", "batch_size", "mask_rate", "pair_loss", "pair_scores")
PAPER_P0 = {"mlm": (.614, .597), "pmlm": (.618, .612), "pplm": (.617, .626), "pplm_some": (.618, .590),
            "pplm_binary": (.607, .595)}         # its table 1: CoLA accuracy, MNLI accuracy


def read(name):
    file = HERE / name
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def collect(name, folders):
    """A row a run: its flags, its last validation, its data and versions; no path of the machine."""
    rows = []
    for folder in map(Path, folders):
        first, *lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
        curve = [line for line in lines if "val_loss" in line]
        last = curve[-1]
        rows.append({**{key: first["args"][key] for key in KEPT}, "trained_steps": last["step"], "loss": last["loss"],
                     **{key: value for key, value in last.items() if key.startswith("val_")}, "baselines": first["baselines"],
                     "data": first["data"]["source"].get("hash") or first["data"]["source"].get("files"),
                     "tokens": first["data"]["tokens"]["train"], "torch": first["versions"]["torch"],
                     "ms_per_step": round(statistics.median(line["ms_per_step"] for line in lines)),
                     "curve": [[line["step"], round(line["val_loss"], 4)] for line in curve]})
        if (probe := folder / "probe" / "probe.json").exists():
            numbers = json.loads(probe.read_text())
            rows[-1].update({key: round(numbers[key], 4) for key in ("std words", "std places")})
    (HERE / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(f"{len(rows)} rows -> results/{name}.jsonl")


def scores(into, name, file):
    """Rows of a results.jsonl, with a name for what they started from instead of a path; those of the same name are replaced."""
    rows = [row for row in read(f"{into}.jsonl") if row["from"] != name]
    rows += [{**json.loads(line), "from": name} for line in Path(file).read_text().splitlines()]
    rows = [{key: value for key, value in row.items() if key != "ckpt"} for row in rows]
    (HERE / f"{into}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def probes(file):
    """probe.json of probe.py --runs, less its pictures and what names a folder."""
    found = json.loads(Path(file).read_text())["runs"]
    rows = [{key: value for key, value in run.items() if key not in ("indicators", "args", "scores")} for run in found]
    (HERE / "probe.json").write_text(json.dumps({"runs": rows}, indent=0))


def by_scheme(objective):
    """{pe: its rows}, in the order they were run."""
    found = {}
    for row in read("schemes.jsonl"):
        if row["objective"] == objective:
            found.setdefault(row["pe"], []).append(row)
    return found


def scheme_tables():
    bench = json.loads((HERE / "bench.json").read_text()) if (HERE / "bench.json").exists() else {"rows": []}
    cost = {row["pe"]: row for row in bench["rows"]}
    pplm = by_scheme("pplm")
    print("\n| pe | parameters added | step, to abs | mlm: validation loss (min - max of 3 seeds) | "
          "pplm: validation loss | below prior |")
    print("|---|---|---|---|---|---|")
    for pe, rows in by_scheme("mlm").items():
        losses = [row["val_loss"] for row in rows]
        added = f"{cost[pe]['parameters_added']:,}" if pe in cost else ""
        ratio = f"{cost[pe]['ratio_to_abs']:.2f}" if pe in cost else ""
        ordered = " | "
        if pe in pplm:
            loss = pplm[pe][0]["val_loss"]
            ordered = f"{loss:.3f} | {pplm[pe][0]['baselines']['prior'] - loss:.3f}"
        print(f"| `{pe}` | {added} | {ratio} | {median_and_spread(losses)} | {ordered} |")


def beside_baselines(row):
    """A run's losses, the lowest baseline that each has passed with the next one, and its accuracies, as three texts."""
    parts = row["objective"].split("+")
    losses = [row.get(f"val_{part}", row["val_loss"]) for part in parts]
    notes, right = [], []
    for part, loss in zip(parts, losses):
        own = sorted((value, key.split(".")[-1]) for key, value in row["baselines"].items()
                     if "." not in key or key.startswith(f"{part}."))
        passed, missed = [x for x in own if loss < x[0]], [x for x in own if loss >= x[0]]
        text = [f"{passed[0][0] - loss:.3f} below `{passed[0][1]}` ({passed[0][0]:.3f})"] if passed else []
        text += [f"{loss - missed[-1][0]:.3f} above `{missed[-1][1]}`"] if missed else []
        notes.append((f"{part}: " if len(parts) > 1 else "") + ", ".join(text))
        right += [f"{row[key]:.3f}"] if (key := f"val_{part}_accuracy") in row else []
    return ", ".join(f"{x:.3f}" for x in losses), "; ".join(notes), ", ".join(right)


def objective_table():
    """Each objective beside its own baselines."""
    print("\n| objective | pe | steps | lr | validation loss | beside its baselines | accuracy |\n" + 7 * "|---" + "|")
    for row in sorted(read("objectives.jsonl"), key=lambda row: (row["objective"], row["pe"], row["steps"], -row["lr"])):
        print(f"| `{row['objective']}` | `{row['pe']}` | {row['steps']:,} | {row['lr']:.0e} | "
              + " | ".join(beside_baselines(row)) + " |")


def finetune_table():
    groups = {}
    for row in read("finetune.jsonl"):
        groups.setdefault((row["task"], row["from"]), []).append(row)
    print("\n| task | from | metric | median | min - max | a constant answer | seeds | s a run |\n" + 8 * "|---" + "|")
    for (task, source), rows in groups.items():
        for metric in rows[0]["metrics"]:
            values = [row["metrics"][metric] for row in rows]
            constant = rows[0].get("constant", {"accuracy": rows[0]["majority"]}).get(metric, 0.0)
            print(f"| {task} | {source} | {metric} | {statistics.median(values):.3f} | {min(values):.3f} - {max(values):.3f} | "
                  f"{constant:.3f} | {len(rows)} | {statistics.mean(row['seconds'] for row in rows):.0f} |")


def p0_table():
    """P0's table 1 at this size: what fine-tuning scores after each pre-training, beside the paper's; then the runs of part 2."""
    tuned, minutes = {}, Counter()
    for row in read("claims_finetune.jsonl"):
        minutes[row["from"]] += row["seconds"] / 60
        for metric, value in row["metrics"].items():
            tuned.setdefault(row["from"], {}).setdefault((row["task"], metric), []).append(value)
            tuned.setdefault("the commonest answer", {})[row["task"], metric] = [row["constant"][metric]]
    controls = ["scratch", "the commonest answer"]
    lab = [source for source in tuned if source.endswith(", lab")]
    others = [source for source in tuned if source not in (*PAPER_P0, *lab, *controls)]
    for sources, paper in (([*PAPER_P0, *lab, *controls], PAPER_P0), ([*others, *controls], {})):
        columns = list(tuned[sources[0]])
        heads = [f"{task}, {metric}" for task, metric in columns] + ["paper: CoLA, MNLI"] * bool(paper) + ["minutes"]
        print("\n| pre-training | " + " | ".join(heads) + " |\n" + (len(heads) + 1) * "|---" + "|")
        for source in sources:
            cells = [median_and_spread(tuned[source].get(column, [])) for column in columns]
            cells += [", ".join(f"{x:.3f}" for x in paper.get(source, ()))] * bool(paper)
            print(f"| {source} | " + " | ".join(cells) + " | " + f"{minutes[source]:.0f}" * (source in minutes) + " |")


def median_and_spread(values):
    """-> 'median (min - max)'; one value alone; nothing where there is none."""
    if not values:
        return ""
    return f"{statistics.median(values):.3f}" + (f" ({min(values):.3f} - {max(values):.3f})" if len(values) > 1 else "")


def claim_tables():
    """The pre-training runs behind the claims: P0's table 1, mlm scheme by scheme and seed by seed, what P0 did not run."""
    rows = read("claims.jsonl")
    table1 = [row for row in rows if row["trained_steps"] > 2000 or row["preset"] == "lab"]
    run_table(table1)
    rows = [row for row in rows if row not in table1]
    print("\n| pe | changed | seed 1337 | seed 1 |\n|---|---|---|---|")
    mlm = {}
    for row in rows:
        if row["objective"] == "mlm":
            mlm.setdefault((p1_name(row), changes(row)), {})[row["seed"]] = f"{row['val_loss']:.3f}"
    for (pe, changed), losses in mlm.items():
        print(f"| `{pe}` | {changed} | {losses.get(1337, '')} | {losses.get(1, '')} |")
    run_table([row for row in rows if row["objective"] != "mlm"])


def run_table(rows):
    print("\n| objective | pe | changed | validation loss | beside its baselines | accuracy | std words | std places "
          "| s a step |\n" + 9 * "|---" + "|")
    for row in rows:
        print(f"| `{row['objective']}` | `{row['pe']}` | {changes(row)} | " + " | ".join(beside_baselines(row))
              + f" | {row['std words']:.2f} | {row['std places']:.2f} | {row['ms_per_step'] / 1e3:.2f} |")


def p1_name(row):
    return "bert_a" if row["pe"] == "abs" else row["pe"]        # one scheme, two names


def changes(row):
    """What a run of claims.jsonl has that the others have not; `changed` is an edit of model.py, in words."""
    own = [str(row[key]) for key in ("preset", "pair_loss", "pair_scores") if row[key] not in ("demo", "ce", "total")]
    return ", ".join(own + [f"lr {row['lr']:g}"] * (row["lr"] != 2e-3) + [row[key] for key in ("changed",) if key in row])


def draw_claims():
    """P1 fig 4a: mlm's validation loss against steps, scheme by scheme; a line a seed."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    rows = [row for row in read("claims.jsonl")
            if row["objective"] == "mlm" and row["steps"] == 2000 and row["lr"] == 2e-3 and "changed" not in row]
    names = list(dict.fromkeys(map(p1_name, rows)))
    figure, axes = plt.subplots(figsize=(7, 4.2), dpi=130)
    colours = dict(zip(names, ("#000000", "#E69F00", "#56B4E9", "#009E73", "#0072B2", "#D55E00", "#CC79A7")))
    for row in rows:
        first = row["seed"] == rows[0]["seed"]
        axes.plot(*zip(*row["curve"]), marker="o", ms=3, lw=1.4 if first else 0.8, ls="-" if first else "--",
                  color=colours[p1_name(row)], label=p1_name(row) if first else None)
    axes.axhline(rows[0]["baselines"]["unigram"], color="grey", lw=0.8, ls=":")
    axes.set(xlabel="step", ylabel="mlm (30%): validation loss, nats")
    axes.legend(frameon=False)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.tight_layout()
    figure.savefig(HERE / "p1_order.png")


def probe_table():
    """P3's table 2: the indicators of layer 1's mean map over identical words."""
    found = json.loads((HERE / "probe.json").read_text())["runs"] if (HERE / "probe.json").exists() else []
    print("\n| pe | validation loss | AIV | AIV without specials | OPR | ties | OPR, 20 | SD | DB |\n" + 9 * "|---" + "|")
    show = lambda x: "-" if x is None else x if isinstance(x, str) else f"{x:.3f}"     # noqa: E731
    for row in found:
        keys = ("val_loss", "aiv", "aiv w/o", "opr", "ties", "opr_20", "sd", "db")
        print(f"| `{row['pe']}` | " + " | ".join(show(row[key]) for key in keys) + " |")


def draw_pplm():
    """pplm's loss against steps, with the lines of its baselines."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    first, *lines = read("pplm.jsonl")
    figure, axes = plt.subplots(figsize=(7, 3.8), dpi=130)
    axes.plot([x["step"] for x in lines], [x["loss"] for x in lines], color="#0072B2", label="training")
    val = [x for x in lines if "val_loss" in x]
    axes.plot([x["step"] for x in val], [x["val_loss"] for x in val], "o", color="#D55E00", label="validation")
    for name, value in first["baselines"].items():
        axes.axhline(value, color="grey", lw=0.8, ls="--")
        axes.text(lines[-1]["step"] * 1.01, value, name, va="center", fontsize=9)
    axes.set(xlabel="step", ylabel="loss, nats a pair", xlim=(0, lines[-1]["step"]))
    axes.legend(loc="center right", frameon=False)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.tight_layout()
    figure.savefig(HERE / "pplm.png")


if __name__ == "__main__":
    if sys.argv[1:2] == ["collect"]:
        collect(sys.argv[2], sys.argv[3:])
    elif sys.argv[1:2] == ["probes"]:
        probes(sys.argv[2])
    elif sys.argv[1:2] == ["scores"]:
        scores(*sys.argv[2:])
    else:
        scheme_tables()
        objective_table()
        finetune_table()
        p0_table()
        claim_tables()
        probe_table()
        draw_pplm()
        draw_claims()
