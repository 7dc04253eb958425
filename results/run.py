"""The tables of RESULTS.md: every row is a command, run here where its results are missing.

    python results/run.py                       # print what has been run
    python results/run.py docs reading          # run what these tables lack; stopped, it goes on
    python results/run.py read-32 read-abs      # what these runs lack
    TEXT='path/to/*.jsonl.xz' GLUE=path/to/glue BLIMP=path/to/blimp python results/run.py glue

From schemes on they train on $TEXT, Wikipedia and books. A run trains in out/results/NAME, is
probed there and fine-tuned; what came out is a line of results/runs.jsonl. To make a row again,
delete its line and its folder. (older.jsonl: rows of older tables, most of older recipes.)
"""

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas
from matplotlib.figure import Figure

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
from common import read_rows as read  # noqa: E402
from model import PE_NAMES, Encoder, EncoderConfig  # noqa: E402
from probe import correlations, db, opr, print_table  # noqa: E402

ROWS = ROOT / "results" / "runs.jsonl"
OUT = "out/results"

# table: {run: flags of train.py}. What two tables have in common is trained once.
READ = "--pe tupe_r --pos_rate .15 --n_head 16 --objective"
NONE = "--pe tupe_r --steps 1 --lr 1e-9"  # next to nothing is learned: from scratch
TABLES = {
    "docs": {
        "docs-pplm": "--pe tupe_r --objective pplm",
        "docs-taco": "--pe tupe_r --objective taco",
        "docs-16-heads": "--pe tupe_r --n_head 16",
        "docs-3000": "--pe tupe_r --n_head 16 --steps 3000",
    },
    "reading": {  # the run that reads, longer, and with one change
        "read-s1337": f"{READ} mlm+pplm",
        "read-s1": f"{READ} mlm+pplm --seed 1",
        "read-s2": f"{READ} mlm+pplm --seed 2",
        "read-3000": f"{READ} mlm+pplm --steps 3000",
        "read-abs": f"{READ} mlm+pplm --pe abs",
        "read-4-heads": f"{READ} mlm+pplm --n_head 4",
        "read-32": f"{READ} mlm+pplm --block_size 32 --batch_size 64",
        "read-.30": f"{READ} mlm+pplm --pos_rate .30",
        "read-.30-3000": f"{READ} mlm+pplm --pos_rate .30 --steps 3000",
        "read-.15-then-.30": f"{READ} mlm+pplm --pos_rate .30 --init_from {OUT}/read-s1337",
        "read-.60": f"{READ} mlm+pplm --pos_rate .60",
        "read-.60-3000": f"{READ} mlm+pplm --pos_rate .60 --steps 3000",
        "read-content": f"{READ} mlm+pplm --pair_scores content",
        "read-linear": f"{READ} mlm+pplm --pair_head linear",
        "read-some": f"{READ} mlm+pplm_some",
        "read-pmlm": f"{READ} mlm+pmlm",
        "read-pplm": f"{READ} pplm",
        "read-pplm-3000": f"{READ} pplm --steps 3000",
        "read-pplm-from-mlm": f"{READ} pplm --lr 5e-4 --init_from {OUT}/docs-3000",
    },
    "plateau": {  # what brings abs off it, on docs
        "docs-abs-pplm": f"{READ} pplm --pe abs",
        "docs-abs-after-pplm": f"--pe abs --n_head 16 --init_from {OUT}/docs-abs-pplm",
        "docs-abs-3000": "--pe abs --n_head 16 --steps 3000",
        "docs-abs-mlm+pplm": f"{READ} mlm+pplm --pe abs --steps 3000",
    },
    "worth": {"docs-scratch": NONE},  # and runs of these two, fine-tuned on docs
    "schemes": {},
    "blimp": {},  # the runs of schemes, on minimal pairs
    "objectives": {  # and below; these two: does abs leave its plateau at demo size?
        "abs-mlm-6000": "--pe abs --n_head 16 --steps 6000",
        "abs-mlm+pplm-6000": f"{READ} mlm+pplm --pe abs --steps 6000",
    },
    "glue": {"scratch": NONE},
    "lab": {"lab-scratch": f"--preset lab --n_head 16 {NONE}"},
}
GLUE = ["mnli", "cola", "sst2 --limit_train 20000"]
FINETUNE = {"worth": ["docs --seeds 5"], "glue": GLUE, "lab": GLUE}
BLIMP = {"blimp", "objectives"}  # minimal pairs are judged
WEB = {"schemes", "blimp", "objectives", "glue", "lab"}  # trained on $TEXT
KEPT = "pe objective preset seed steps lr warmup n_head pos_rate batch_size block_size".split()
RANGES = (3, 5, 10, 20, 40, 62)  # neighbours that monotonicity and direction balance look at
PLATEAU = 6.5  # nats: who knows only how frequent words are scores 6.78 on docs, 6.83 on $TEXT
ORDER = 6.0  # nats after 3,000 steps: who sees no order (`none`) scores 6.3
KNOWN = "abs none sin t5 rel tupe_a tupe_r rope".split()  # three seeds; in plateau.png
for seed in (1337, 1, 2):
    for pe in ("tupe_r", "abs"):
        TABLES["docs"][f"docs-{pe}-s{seed}"] = f"--pe {pe} --seed {seed}"
    for pe in KNOWN if seed == 2 else sorted({*PE_NAMES} - {"bert_a", "bert_r"}):  # = abs, abs+t5
        TABLES["schemes"][f"{pe}-s{seed}"] = f"--pe {pe} --steps 3000 --seed {seed}"
for seed in (1337, 1):
    for pe in ("tupe_r", "abs"):  # P2's and P0's
        for name, flags in {
            "mlm": "mlm",
            "taco": "taco",
            "taco-.01": "taco --loss_weights 1 .01",
            "concentrated": "taco --tc_on masked",
            "concentrated-.01": "taco --tc_on masked --loss_weights 1 .01",
            "tp": "mlm --mlm_on all",
            "tc": "tc",
            "clm": "clm",
            "pmlm": "pmlm --pos_rate .15 --n_head 16",
            "pplm": "pplm --pos_rate .15 --n_head 16",
            "mlm+pplm": "mlm+pplm --pos_rate .15 --n_head 16",
        }.items():
            flags = f"--pe {pe} --objective {flags} --steps 3000 --seed {seed} --keep_every 500"
            TABLES["objectives"][f"{pe}-{name}-s{seed}"] = flags
            if pe == "tupe_r" and name in ("mlm", "taco", "concentrated", "tp"):
                TABLES["glue"][f"{pe}-{name}-s{seed}"] = flags
for pe in ("tupe_r", "abs"):
    for objective in ("mlm", "mlm+pplm", "pplm", "taco"):
        flags = f"--preset lab --n_head 16 --pe {pe} --objective {objective}"
        flags += " --pos_rate .15" * ("pplm" in objective)
        TABLES["lab"][f"lab-{pe}-{objective}"] = flags
        if objective in ("mlm", "mlm+pplm"):
            TABLES["lab"][f"lab-{pe}-{objective}-1"] = f"{flags} --seed 1"
TABLES["blimp"] |= TABLES["schemes"]
trained = TABLES["docs"] | TABLES["reading"]
for name in (
    "docs-tupe_r-s1337 docs-16-heads docs-3000 docs-pplm docs-taco read-s1337 read-3000 "
    "read-pplm-from-mlm"
).split():
    TABLES["worth"][name] = trained[name]


def commands(table, name):
    """A row -> its commands, as one types them."""
    out = f"{OUT}/{name}"
    text = ' --dataset "$TEXT" --tokenizer bpe' if table in WEB else ""
    made = [
        f"python train.py {TABLES[table][name]}{text} --resume --out_dir {out}",
        f"python probe.py --ckpt {out}",
    ]
    if "--keep_every" in TABLES[table][name]:
        made.append(f"python probe.py --dynamics {out}")
    if table in BLIMP and "-tc-" not in name:  # tc alone cannot say what is likelier
        made.append(f'python probe.py --blimp "$BLIMP" --ckpt {out}')
    for task in FINETUNE.get(table, []):
        glue = "" if table == "worth" else " --data_dir $GLUE --seeds 3"
        made.append(f"python finetune.py --task {task}{glue} --ckpt {out}")
    return made


def curve(lines, key, digits=3):
    """-> [[step, value], ..] of the lines that have it."""
    return [[x["step"], round(x[key], digits)] for x in lines if key in x]


def run(table, name):
    """Run a row's commands, with a log in its folder -> what came out: flags, last validation,
    baselines, what words are worth, scores. No path of the machine."""
    folder = ROOT / OUT / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.jsonl").unlink(missing_ok=True)
    for command in commands(table, name):
        print(command, flush=True)
        with open(folder / "run.log", "a") as log:
            done = subprocess.run(command, shell=True, cwd=ROOT, stdout=log, stderr=log)
        if done.returncode:
            why = (folder / "run.log").read_text().strip().rpartition("\n")[2]
            sys.exit(f"error: it ended with {done.returncode}; {OUT}/{name}/run.log: {why}")
    first, *lines = read(folder / "log.jsonl")
    row = {"table": table, "run": name, "git": first["git"], "baselines": first["baselines"]}
    row["args"] = {key: first["args"][key] for key in KEPT}
    row["curve"], row["val_curve"] = curve(lines, "loss"), curve(lines, "val_mlm")
    row["minutes"] = statistics.median(x["ms_per_step"] for x in lines) * lines[-1]["step"] / 6e4
    row |= {key: value for key, value in lines[-1].items() if key.startswith("val_")}
    found = json.loads((folder / "probe" / "probe.json").read_text())
    row["words"], row["indicators"] = found["words"], found["indicators"]["without_specials"]
    A = np.array(found["map"])[1:-1, 1:-1]  # without [CLS] and [SEP]
    row["ranges"] = [[n, opr(A, n), db(A, n)] for n in RANGES]
    if (judged := folder / "blimp" / "probe.json").exists():
        judged = json.loads(judged.read_text())
        row["blimp"] = {key: judged[key] for key in ("pairs", "ties", "scores")}
    if (followed := folder / "dynamics" / "probe.json").exists():
        steps = json.loads(followed.read_text())["steps"]
        row["contexts"] = curve(steps, "contextual score", 4)
    row["scores"] = {}
    for result in read(folder / "results.jsonl") if table in FINETUNE else ():
        for metric, value in result["metrics"].items():
            row["scores"].setdefault(f"{result['task']} {metric}", []).append(round(value, 6))
    return row


def cells(row):
    """What is known of a row -> {column: text}; an empty one is not known."""
    known, words = row["baselines"], row["words"]
    schemes = row["table"] == "schemes"
    indicators = row["indicators"] if schemes else {}
    parts = row["args"]["objective"].split("+")
    losses = [row.get(f"val_{x}", row["val_loss"]) for x in parts]
    left = [step for step, loss in row["curve"] if parts == ["mlm"] and loss < PLATEAU]
    judged = row.get("blimp", {"scores": {}})["scores"]
    first = next(iter(judged.values()), {})  # pll, or what the objective has
    numbers = {
        "copy": known.get("copy", known.get("pplm.copy")),  # what places alone allow
        "true words": words["true"],  # as the others: without autocast
        "random words": words["random"],
        "other order": words["shuffled"],
        "AUC": words["auc"],
        "BLiMP": first.get("mean"),
        "order-only": first.get("order-only"),
        "AIV": indicators.get("aiv"),
        "OPR": indicators.get("opr"),
    }
    shown = {"run": row["run"], "flags": f"`{TABLES[row['table']][row['run']]}`"}
    if schemes:
        config = EncoderConfig(vocab_size=72, pe=row["args"]["pe"], n_head=row["args"]["n_head"])
        shown["parameters"] = sum(p.numel() for p in Encoder(config).pe.parameters())
    shown["losses"] = " ".join(f"{x:.3f}" for x in losses)
    for name, x in numbers.items():
        shown[name] = "" if x is None else f"{x:.3f}"
    shown[f"steps to {PLATEAU}"] = str(left[0]) if left else ""
    if row["table"] in ("objectives", "glue"):
        for name in ("val_curve", "contexts"):  # every 500 steps
            shown[name] = " ".join(f"{x:.3f}" for _, x in row.get(name, ()))
    shown["minutes"] = f"{row['minutes']:.0f}"
    scores = [
        f"{score} {statistics.median(x):.3f} ({min(x):.3f} - {max(x):.3f})"
        for score, x in row["scores"].items()
    ]
    return {**shown, "scores": "; ".join(scores)}


def properties(rows):
    """P3's table 5 and fig 5: Pearson's r, over runs, of how far a property is violated, among so
    many neighbours, and of a score; positive: better where it is violated."""
    names = ["aiv", "sd", *(f"opr {n}" for n in RANGES), *(f"db {n}" for n in RANGES)]
    runs = []
    for row in rows:
        run = {**row["args"], **row["indicators"], "scores": {"- loss": -row["val_loss"]}}
        for n, *values in row.get("ranges", ()):
            run[f"opr {n}"], run[f"db {n}"] = values
        if "blimp" in row:
            judged = next(iter(row["blimp"]["scores"].values()))
            run["scores"] |= {"BLiMP": judged["mean"], "order-only": judged["order-only"]}
        runs.append(run)
    return correlations(runs, names)


def show(table):
    """Print a table of what has been run."""
    rows = [row for row in read(ROWS) if row["table"] == table]
    if rows:
        lines = pandas.DataFrame([cells(row) for row in rows])
        print(f"\n{table}\n")
        print_table(lines.loc[:, lines.any()].to_dict("records"))  # no empty columns
    if table == "blimp":  # judged rows come last, and replace those of schemes
        rows = sorted(read(ROWS), key=lambda row: row["table"] == table)
        runs = {row["run"]: row for row in rows if row["table"] in ("schemes", table)}
        for limit in (9, ORDER):  # 9: all of them
            kept = [row for row in runs.values() if row["val_loss"] < limit]
            print(f"\nP3's table 5, fig 5: Pearson's r over {len(kept)} runs below {limit} nats\n")
            print_table(properties(kept))


def draw():
    """When schemes leave the plateau: training losses, as a picture beside this file."""
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for row in read(ROWS):
        pe, seed = row["args"]["pe"], row["args"]["seed"]
        if row["table"] == "schemes" and seed == 1337 and pe in KNOWN:
            steps, losses = zip(*row["curve"])
            axes.plot(steps, losses, label=pe)
    axes.legend()
    axes.set(xlabel="step", ylabel="training loss (nats)", title="when mlm leaves its plateau")
    figure.savefig(ROOT / "results" / "plateau.png", dpi=110)


def main():
    asked, wanted = set(sys.argv[1:]), []
    for table, runs in TABLES.items():
        wanted += [(table, name) for name in runs if asked & {table, name}]
    if unknown := asked.difference(*wanted):
        sys.exit(f"error: no table or run {', '.join(unknown)}; tables: {', '.join(TABLES)}")
    text = str([commands(*pair) for pair in wanted])
    for name in ("TEXT", "GLUE", "BLIMP"):
        if f"${name}" in text and name not in os.environ:
            sys.exit(f"error: this needs ${name}: see the top of {Path(__file__).name}")
    for table, name in wanted:
        if (table, name) not in {(row["table"], row["run"]) for row in read(ROWS)}:
            row = run(table, name)
            with open(ROWS, "a") as handle:
                handle.write(json.dumps(row) + "\n")
    for table in TABLES:
        show(table)
    if "schemes" in sys.argv:
        draw()


if __name__ == "__main__":
    main()
