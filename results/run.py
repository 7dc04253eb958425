"""Make and print the rows behind docs/results.md. tables.txt lists the runs.

    python -m results.run                    # print every table, from runs.jsonl
    python -m results.run ranking --draw     # print one table, and draw docs/figures
    python -m results.run first              # train twelve schemes and compare with our losses
    python -m results.run pplm               # run what a table lacks; the same command resumes
    python -m results.run pplm-3e-3          # one run, all seeds (pplm-3e-3-s1: one seed)
    python -m results.run order              # the order tasks of tools.order for all schemes
    python -m results.run mine --pe NAME     # where does a new scheme land? (ten minutes)
    python -m results.run rpp-table-1        # a paper's table at its size, on one GPU (README.md
                                             # in this folder: how many hours)

Some tables need text to train on, GLUE, or minimal pairs:

    TEXT='texts/*.jsonl.xz' BLIMP=blimp/data python -m results.run recipe
    TEXT='texts/*.jsonl.xz' GLUE=glue python -m results.run taco

TEXT is what schemes, tuned, ids, ranking, recipe, lengths, taco, objectives, glue and lab are
trained on. GLUE is the folder of the official files (default for the papers' tables: the hub).
BLIMP is a folder of minimal pairs; without it they are not scored.

A run is trained in out/results/NAME, probed and fine-tuned there; once everything is done, its row
is appended to runs.jsonl. The last row of a name counts; to make a row again, delete its line and
its folder. Other flags (--cache, --dtype, ...) are passed to train.py.
"""

import os
import re
import shlex
import statistics
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch

import finetune
import train
from lib.config import Parser, RunFailure, UserError, between, leave, one_line_errors
from lib.device import processor_name
from lib.files import append_jsonl, make_folder, read_json, read_jsonl, write_json
from model import SCHEMES
from results import longer, order
from results.figures import draw, draw_mine
from results.show import (
    PLATEAU,
    docs_ranking,
    docs_schemes,
    first_below,
    join_seeds,
    leaves_plateau,
    longest_sequence,
    scheme_losses,
    show,
    without_seed,
)
from tools.order import schemes
from tools.output import print_table
from tools.probe import db, opr

HERE = Path(__file__).parent
ROWS = HERE / "runs.jsonl"
OUT = Path("out/results")
SEEDS = (1337, 1, 2, 3, 4)
ALIASES = {"bert_a", "bert_r"}  # of abs and abs+t5
# Trained on $TEXT
WEB = set("schemes tuned ids ranking recipe lengths taco objectives glue lab".split())
PAPERS = {"rpp-table-1", "tupe-figure-4", "taco-table-1", "wang-table-3"}
RANGES = (3, 5, 10, 20, 40, 62)  # neighbors for OPR and DB
ARGS = "pe objective preset seed steps lr warmup norm n_head pos_rate batch_size block_size".split()


class CommandFailed(RunFailure):
    """A command of a run has failed; the other runs may still succeed."""


# --------------------------------------------------------------------------------------------------
# What there is to run


def read_tables(text):
    """tables.txt -> {table: {run: (flags of train.py, fine-tuning)}}. Its header explains it."""
    tables, abbreviations = {}, {}
    for line in text.splitlines():
        for name, meaning in abbreviations.items():
            line = line.replace(name, meaning)
        if line.startswith("#") or not line:
            continue
        if "|" not in line:
            name, _, meaning = line.partition(" = ")
            abbreviations[name] = meaning
            continue
        table, names, n_seeds, flags, *tuned = [part.strip() for part in line.split("|")]
        before, _, rest = names.partition("{")
        choices, _, after = rest.partition("}")
        for choice in choices.split(","):
            name, chosen = before + choice + after, flags.replace("{}", choice)
            runs = {name: chosen}
            if int(n_seeds):
                runs = {
                    f"{name}-s{seed}": f"{chosen.replace('SEED', str(seed))} --seed {seed}"
                    for seed in SEEDS[: int(n_seeds)]
                }
            for run, run_flags in runs.items():
                tables.setdefault(table, {})[run] = run_flags, "".join(tuned)
    return tables


TABLES = read_tables((HERE / "tables.txt").read_text())


def find(name):
    """-> the first table that has a run, and the train.py flags used there."""
    return next((table, runs[name][0]) for table, runs in TABLES.items() if name in runs)


def fine_tunings(tuned, steps):
    """'mnli cola: --seeds 5 @ .1 1; ...' -> (task, flags, share, step of the run) for each."""
    for part in filter(None, tuned.split(";")):
        tasks, _, flags = part.partition(":")
        flags, _, shares = flags.partition("@")
        for share in shares.split() or ["1"]:
            for task in tasks.split():
                yield task, flags.strip(), share, round(float(share) * steps)


def commands(table, name, root=OUT):
    """-> {part of a row: command}, as one would type them. root: the folder of the runs."""
    home, flags = find(name)
    out, tuned = (root / name).as_posix(), TABLES[table][name][1]
    if home in WEB:
        flags += ' --dataset "$TEXT" --tokenizer bpe'
    parts = {"train": f"python train.py {flags} --resume --out_dir {out}"}
    if tuned or table not in PAPERS:  # else the run only initializes other runs
        parts["probe"] = f"python -m tools.probe --ckpt {out}"
    if "--keep_every" in flags and table not in PAPERS:
        parts["dynamics"] = f"python -m tools.dynamics --ckpt {out}"
    extrapolates = not re.search("abs|tupe|lab", name)  # has no table of absolute positions
    if table in ("lengths", "clipped", "long-text") or table == "ranking" and extrapolates:
        long_text = "1024,2048" if extrapolates else "1024"
        others = {"lengths": "128,256,512", "long-text": long_text}
        lengths = others.get(table, "64,128,256,512")
        parts["lengths"] = f"python -m tools.lengths --ckpt {out} --lengths {lengths}"
    scored = table in ("recipe", "schemes", "objectives", "ranking") and "-tc-" not in name
    if scored and "BLIMP" in os.environ:  # tc alone has no likelihoods
        parts["blimp"] = f'python -m tools.blimp --ckpt {out} --pairs "$BLIMP"'
    steps = train.parse_args(shlex.split(flags)).steps if "@" in tuned else 0
    for task, given, share, step in fine_tunings(tuned, steps):
        if task != "docs" and ("GLUE" in os.environ or table not in PAPERS):
            given += ' --data_dir "$GLUE"'
        start, to = (out, out) if share == "1" else (f"{out}/ckpt_{step}.pt", f"{out}/at_{share}")
        command = f"python finetune.py --task {task} {given} --ckpt {start} --out_dir {to}"
        parts[task if share == "1" else f"{task} at {share}"] = command
    return parts


# --------------------------------------------------------------------------------------------------
# Running it


def all_rows():
    return {row["run"]: row for row in read_jsonl(ROWS)}


def call(command, folder):
    """Run a command with this Python; its output is appended to the folder's run.log. Raises
    CommandFailed."""
    print(command)
    make_folder(folder)
    _, *words = [os.path.expandvars(word) for word in shlex.split(command)]
    with open(folder / "run.log", "a") as log:
        code = subprocess.run([sys.executable, *words], stdout=log, stderr=log).returncode
    if code:
        why = (folder / "run.log").read_text(errors="replace").strip().rpartition("\n")[2]
        raise CommandFailed(f"{folder.name} ended with {code} (see {folder / 'run.log'}): {why}")


def run_parts(folder, parts):
    """Run {part: command}, except for those that the folder's done.json lists."""
    notes = folder / "done.json"
    done = read_json(notes) if notes.exists() else {}
    for part, command in parts.items():
        if done.get(part) != command:
            call(command, folder)
            done[part] = command
            write_json(notes, done)


def train_run(name, more, root=OUT):
    """Train a run, after those that it is initialized from. An existing run is resumed;
    train.py refuses if its flags differ."""
    command = commands(find(name)[0], name, root)["train"] + more
    for start in re.findall(rf"--init_\w+ {OUT.as_posix()}/(\S+)", command):
        train_run(start, more)
    run_parts(root / name, {"train": command})


def lacking_parts(table, name, rows):
    """-> {part: command} of what a run's row lacks."""
    there = rows[name]["commands"] if name in rows else {}
    return {part: x for part, x in commands(table, name).items() if part not in there}


def make_row(table, name, more):
    """Run what a run's row lacks, then append the row. more: flags for train.py."""
    rows = all_rows()
    row, parts = rows.get(name), lacking_parts(table, name, rows)
    if not parts:  # another table's run of the same name has just been made
        return
    log = read_jsonl(OUT / name / "log.jsonl")
    if row and (not log or log[-1].get("val_loss") != row["val_loss"]):
        print(
            f"{name}: skipped {', '.join(parts)}, because the run's weights are not here; "
            "to train it again, delete its line in results/runs.jsonl"
        )
        return
    train_run(name, more)
    parts.pop("train", None)
    run_parts(OUT / name, parts)
    done = (row["commands"] if row else {}) | commands(table, name)
    append_jsonl(ROWS, {"run": name, "commands": done} | collect(OUT / name))


def curve(lines, *keys):
    """-> [[step, value], ...] of the lines that have one of the keys; the first one counts."""
    points = []
    for line in lines:
        values = [line[key] for key in keys if key in line]
        points += [[line["step"], round(x, 4)] for x in values[:1]]
    return points


def collect(folder):
    """The files of a finished run -> its row, without the commands. It contains no path."""
    first, *lines = read_jsonl(folder / "log.jsonl")
    args, last, (device, dtype) = first["args"], lines[-1], first["precision"]
    row = {
        "git": first["git"],
        "machine": {  # the hardware and software that a result may depend on
            "processor": processor_name(device),
            "threads": torch.get_num_threads(),
            "dtype": dtype,
            "torch": str(torch.__version__),
        },
        "baselines": first["baselines"],
    }
    row["args"] = {key: args.get(key) for key in ARGS}
    row["curve"], row["val_curve"] = curve(lines, "loss"), curve(lines, "val_mlm", "val_loss")
    row["minutes"] = statistics.median(x["ms_per_step"] for x in lines) * last["step"] / 6e4
    row |= {key: value for key, value in last.items() if key.startswith("val_")}
    for file in folder.glob("*/*.json"):  # of probe, dynamics, blimp and lengths
        found = read_json(file)
        row |= {key: found[key] for key in ("words", "mlm", "lengths", "spread") if key in found}
        if file.name == "blimp.json":
            row["blimp"] = found
        if "map" in found:
            A = np.array(found["map"])[1:-1, 1:-1]  # without [CLS] and [SEP]
            row["indicators"] = found["indicators"]["without_specials"]
            row["ranges"] = [[n, opr(A, n), db(A, n)] for n in RANGES]
        if "steps" in found:
            row["contexts"] = curve(found["steps"], "contextual score")
            row["spreads"] = []  # [step, spread of the embedding, of layer 1, ...]
            for x in found["steps"]:
                spreads = [x[key] for key in x if key.startswith("spread")]
                row["spreads"].append([x["step"], *(float(f"{s:.3g}") for s in spreads)])
    row["scores"], row["collapsed"] = {}, []
    results = {}
    for file in [folder / "results.jsonl", *folder.glob("at_*/results.jsonl")]:
        for x in read_jsonl(file):  # an interrupted task may have some rows twice
            if "finetuned-" not in x["ckpt"]:  # a row of tools.predict has the same keys
                results[x["task"], x["step"], x["lr"], x["seed"]] = x
    for (_, task), runs in finetune.best_runs(results.values(), statistics.median).items():
        share = runs[0]["step"] / last["step"]
        at = f" at {share:g}" if share < 1 else ""
        for metric in runs[0]["metrics"]:
            row["scores"][f"{task} {metric}{at}"] = [round(x["metrics"][metric], 4) for x in runs]
        row["collapsed"] += [f"{task} {x['seed']}{at}" for x in runs if x["one_class"]]
    return row


def run_first(more):
    """`first`: train twelve schemes here, and print their losses beside ours."""
    ours, lines, root = all_rows(), [], Path("out/first")
    for name in [without_seed(name) for name in TABLES["docs"] if name.endswith("-s2")]:
        train_run(f"{name}-s1337", more, root)
        log = read_jsonl(root / f"{name}-s1337" / "log.jsonl")[1:]
        own = first_below({"curve": curve(log, "loss")}, PLATEAU["docs"])
        rows = [row for run, row in ours.items() if without_seed(run) == name]
        line = {
            "scheme": name.removeprefix("docs-"),
            "loss": f"{log[-1]['val_loss']:.3f}",
            "our loss": join_seeds(row["val_loss"] for row in rows),
            f"below {PLATEAU['docs']} at step": own,
            "ours": join_seeds(map(leaves_plateau, rows)),
        }
        lines.append(line)
        print(f"{line['scheme']}: {line['loss']}")
    print()
    print_table(sorted(lines, key=lambda line: float(line["loss"])))
    out = root.as_posix()
    call(f"python -m tools.probe --runs '{out}/docs-*' --out_dir {out}/probe", root)
    print(f"\nattention maps of all of them: {out}/probe/maps.png")


def run_mine(flags):
    """`mine`: train a scheme on docs as the ranked ones were, measure it, and print and draw its
    rank among them. Writes into out/mine only."""
    parser = Parser("-m results.run mine", run_mine.__doc__)
    parser.add_argument("--pe", required=True, type=schemes, help="a scheme of model.py")
    parser.add_argument("--seeds", type=between(int, "[1, 3]"), default=1, help="number of seeds")
    text = "steps; the ranked schemes have 1,500, and with other numbers nothing is comparable"
    parser.add_argument("--steps", type=between(int, "[1, 1e6]"), default=1500, help=text)
    args = parser.parse_args(flags)
    if len(args.pe) > 1:
        raise UserError(f"mine takes one scheme, not {','.join(args.pe)}")
    root, pe, runs, folders = Path("out/mine"), args.pe[0], [], []
    print(
        "about ten minutes per seed; the same command resumes, and run.log in each folder has more"
    )
    home = root / f"{pe}-{args.steps}"
    for seed in SEEDS[: args.seeds]:
        folder = Path(f"{home}-s{seed}")
        folders.append(folder.as_posix())
        if (folder / "done.json").exists():
            print(f"{folder} is there already; delete out/mine to train {pe} again")
        given = f"--preset demo --pe {pe} --seed {seed} --steps {args.steps}"
        parts = {"train": f"python train.py {given} --resume --out_dir {folders[-1]}"}
        if longest_sequence(pe) == "any":
            lengths = ",".join(map(str, longer.LENGTHS))
            command = f"python -m tools.lengths --lengths {lengths} --ckpt {folders[-1]}"
            parts["lengths"] = command
        run_parts(folder, parts)
        runs.append(collect(folder))
    bench = f"python -m tools.bench --pe abs,{pe} --json {home.as_posix()}-bench.json"
    maps = f"python -m tools.probe --runs {' '.join(folders)} --out_dir {home.as_posix()}"
    run_parts(home, {"bench": bench, "maps": maps})
    order.run([pe], range(args.seeds), root / "order.jsonl")

    rows = all_rows()
    ranked = docs_schemes(rows)
    why, texts = [], {round(row["baselines"]["unigram"], 4) for row in [*ranked["none"], *runs]}
    if len(texts) > 1:
        why.append("your installed packages, and so the text of docs, differ from ours")
    if args.steps != 1500:
        why.append(f"it was trained for {args.steps:,} steps, the others for 1,500")
    ranked[pe] = runs
    print("\ndocs: schemes by validation loss of mlm (nats)")
    for reason in why:
        print(f"not comparable: {reason}")
    print_table(docs_ranking(ranked, pe, read_json(f"{home}-bench.json")["rows"][-1]["speed"]))
    rises = []
    if "lengths" in runs[0]:
        ours = {"change": "", "steps": 1500}
        of_mine = ours | {"pe": pe, "steps": args.steps}
        rises = longer.table(
            [x for x in read_jsonl(longer.ROWS) if ours.items() <= x.items() and x["pe"] in SCHEMES]
            + [of_mine | {"losses": run["lengths"]} for run in runs]
        )
        print("\nloss on a part of the text in sequences of 64 tokens, and its rise on longer ones")
        print_table(rises)
    print("\naccuracy in order tasks (tools.order) on 32, 64 and 128 tokens, trained on 32")
    found = order.accuracies() | order.accuracies(root / "order.jsonl")
    print_table(order.lines(dict.fromkeys((pe, "rope", "tupe_r")), found))
    draw_mine(home, rows, ranked, found, rises, pe, why)
    lengths = "lengths.png, " if rises else ""
    print(f"\nfigures in {home}: ranking.png, order.png, {lengths}maps.png")
    print("(the maps of the others: docs/figures/maps.png)")


# --------------------------------------------------------------------------------------------------
# The program


def main(argv=None):
    parser = Parser("-m results.run", __doc__)
    parser.add_argument("names", nargs="*", help=f"first, {', '.join(TABLES)}, or runs of these")
    text = "run nothing; print the tables and draw docs/figures from the rows that there are"
    parser.add_argument("--draw", action="store_true", help=text)
    argv = sys.argv[1:] if argv is None else argv
    with one_line_errors():
        if argv[:1] == ["mine"]:
            run_mine(argv[1:])
            return
        args, more = parser.parse_known_args(argv)
        more = "".join(f" {shlex.quote(flag)}" for flag in more)
        asked, wanted, known = {*args.names}, [], {"first", "order"}
        for table, runs in TABLES.items():
            for name in runs:
                if asked & (called := {table, name, without_seed(name)}):
                    wanted.append((table, name))
                    known |= called
        if asked - known:
            unknown = ", ".join(sorted(asked - known))
            raise UserError(f"no table or run {unknown}: see python -m results.run --help")
        rows, failed = all_rows(), []
        lacking = [run for run in wanted if not args.draw and lacking_parts(*run, rows)]
        for run in lacking:
            needed = " ".join(lacking_parts(*run, rows).values())
            for variable in re.findall(r'"\$(\w+)"', needed):
                if variable not in os.environ:
                    raise UserError(f"this needs ${variable}: see python -m results.run --help")
        for table, name in lacking:
            try:
                make_row(table, name, more)
            except CommandFailed as error:  # continue with the other runs
                failed.append(str(error))
                print(f"failed: {error}")
        if "first" in asked:
            run_first(more)
        if "order" in asked and not args.draw:
            order.run([pe for pe in SCHEMES if pe not in ALIASES])
        rows = all_rows()
        if "order" in asked:
            order.show(scheme_losses(rows))
        for table, runs in TABLES.items():
            if not asked or table in {table for table, _ in wanted}:
                show(table, runs, rows)
        if failed:
            leave(1, f"{len(failed)} runs failed; the last one: {failed[-1]}")
        if args.draw:
            draw(HERE.parent / "docs" / "figures", rows)


if __name__ == "__main__":
    main(sys.argv[1:])
