"""The rows behind RESULTS.md: made here, printed here (show.py). tables.txt says what they are.

    python results/run.py                           # print every table, from runs.jsonl
    python results/run.py first                     # twelve schemes, each beside our figures
    python results/run.py reading --workers 2       # run what a table lacks; stopped, it goes on

    read-8-heads-s1                                         one run; read-8-heads: of all seeds
    p0-table-1                                              a paper's table at its size, on one GPU:
                                                            first it says how long that takes
    p0-table-1 --trial 'texts/*.txt'                        the same at a tiny size

Some tables need texts, or files to fine-tune on:

    TEXT='texts/*.jsonl.xz' BLIMP=blimp/data python results/run.py recipe
    TEXT='texts/*.jsonl.xz' GLUE=glue python results/run.py p2

A run trains in out/results/NAME, is probed there and fine-tuned; when all is done it is a line of
runs.jsonl (the last one of a name counts). Flags that are not below (--cache, --dtype ..) go to
train.py. TEXT: what schemes, recipe, lengths, p2, objectives, glue and lab learn from. BLIMP:
minimal pairs, judged where it is named. GLUE: folder of the official files; the papers' tables take
them from the hub where it is not named.
"""

import json
import os
import platform
import re
import shlex
import statistics
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "results")]
from show import PLATEAU, draw, leaves, show, stem, together  # noqa: E402

import finetune  # noqa: E402
import train  # noqa: E402
from bench import count  # noqa: E402
from common import Parser, fcntl, one_line_errors, pick_device, pick_dtype, pick_fields  # noqa: E402
from common import read_rows as read  # noqa: E402
from model import Encoder, EncoderConfig  # noqa: E402
from probe import db, opr, print_table  # noqa: E402

ROWS = ROOT / "results" / "runs.jsonl"
OUT = "out/results"
SEEDS = (1337, 1, 2, 3, 4)
WEB = {"schemes", "recipe", "lengths", "p2", "objectives", "glue", "lab"}  # trained on $TEXT
PAPERS = {"p0-table-1", "p1-figure-4", "p2-table-1", "p3-table-3"}
RANGES = (3, 5, 10, 20, 40, 62)  # neighbours that monotonicity and direction balance look at
KEPT = "pe objective preset seed steps lr warmup norm n_head pos_rate batch_size block_size".split()
# --trial: a paper's table at a size for seconds. Of two flags the later one counts.
TINY = (
    "--n_layer 1 --d_model 32 --n_head 2 --d_ff 64 --batch_size 4 --grad_accum 1 --warmup 2 "
    "--tokenizer bpe --keep_every 2"
)
TINY_TUNED = "--seeds 1 --limit_train 32 --epochs 1 --lr 1e-3 --length 16"
# fmt: off
GLUE_ROWS = {"mnli": 393e3, "qqp": 364e3, "qnli": 105e3, "sst2": 67e3, "cola": 8.6e3, "stsb": 5.7e3,
             "mrpc": 3.7e3, "rte": 2.5e3, "wnli": 635}
# fmt: on


# --------------------------------------------------------------------------------------------------
# What there is to run


def read_tables(text):
    """tables.txt -> {table: {run: (flags of train.py, fine-tuned)}}. It says how it is read."""
    tables, short = {}, {}
    for line in text.splitlines():
        for name, meaning in short.items():
            line = line.replace(name, meaning)
        if line.startswith("#") or not line:
            continue
        if "|" not in line:
            name, _, meaning = line.partition(" = ")
            short[name] = meaning
            continue
        table, names, seeds, flags, *tuned = [part.strip() for part in line.split("|")]
        before, _, rest = names.partition("{")
        choices, _, after = rest.partition("}")
        for choice in choices.split(","):
            name, chosen = before + choice + after, flags.replace("{}", choice)
            runs = {name: chosen}
            if int(seeds):
                runs = {
                    f"{name}-s{seed}": f"{chosen.replace('SEED', str(seed))} --seed {seed}"
                    for seed in SEEDS[: int(seeds)]
                }
            for run, its_flags in runs.items():
                tables.setdefault(table, {})[run] = its_flags, "".join(tuned)
    return tables


TABLES = read_tables((ROOT / "results" / "tables.txt").read_text())


def find(name):
    """-> the first table that holds a run, and the run's flags of train.py: they count."""
    for table, runs in TABLES.items():
        if name in runs:
            return table, runs[name][0]
    raise ValueError(f"no run {name} in results/tables.txt")


def plan(tuned, steps):
    """'mnli cola: --seeds 5 @ .1 1; ..' -> task, flags, share and step of the run, of each."""
    for part in filter(None, tuned.split(";")):
        tasks, _, flags = part.partition(":")
        flags, _, shares = flags.partition("@")
        for share in shares.split() or ["1"]:
            for task in tasks.split():
                yield task, flags.strip(), share, round(float(share) * steps)


def commands(table, name, settings):
    """{part of a row: command}, as one types them."""
    home, flags = find(name)
    out = f"{settings.out}/{name}"
    tuned, steps = TABLES[table][name][1], 0
    if tuned or settings.trial:
        steps = train.parse_args(shlex.split(flags)).steps
    if home in WEB:
        flags += ' --dataset "$TEXT" --tokenizer bpe'
    if settings.trial:
        steps = min(steps, 20)
        length = 16 if "--block_size 128" in flags else 32  # P3 trains at two
        text = shlex.quote(settings.trial)
        flags += f" {TINY} --steps {steps} --block_size {length} --dataset {text}"
    flags = flags.replace(OUT, settings.out)
    made = {"train": f"python train.py {flags} --resume --out_dir {out}"}
    if tuned or table not in PAPERS:  # else others start from it, that is all
        made["probe"] = f"python probe.py --ckpt {out}"
    if "--keep_every 500 " in flags:
        made["dynamics"] = f"python probe.py --dynamics {out}"
    if table == "lengths":
        made["lengths"] = f"python probe.py --ckpt {out} --lengths 128,256,512"
    judged = table in ("recipe", "schemes", "objectives") and "-tc-" not in name
    if judged and "BLIMP" in os.environ:  # tc alone cannot say what is likelier
        made["blimp"] = f'python probe.py --ckpt {out} --blimp "$BLIMP"'
    for task, given, share, step in plan(tuned, steps):
        if "GLUE" in os.environ and task != "docs":
            if not Path(os.environ["GLUE"], finetune.TASKS[task].folder).exists():
                continue  # main has said so
            given += ' --data_dir "$GLUE"'
        start, to = (out, out) if share == "1" else (f"{out}/ckpt_{step}.pt", f"{out}/at_{share}")
        given += f" {TINY_TUNED}" if settings.trial else ""
        command = f"python finetune.py --task {task} {given} --ckpt {start} --out_dir {to}"
        made[task if share == "1" else f"{task} at {share}"] = command
    return made


def hours(table, name):
    """-> hours of pre-training and of fine-tuning on a V100, at 30% of its 112 TFLOP/s in fp16 and
    of its 900 GB/s, whichever takes longer for a part of the step (bench.count)."""
    flags, tuned = TABLES[table][name]
    args = train.parse_args(shlex.split(flags))
    shape = pick_fields(EncoderConfig, args, vocab_size=50265, max_len=args.block_size)
    with torch.device("meta"):  # no memory, no time
        n = sum(p.numel() for p in Encoder(shape).parameters())
    step = SimpleNamespace(**vars(args), shape=shape, machine=(None, torch.float16))
    parts = count(step, n).values()
    seconds = sum(max(work / (0.3 * 112e12), moved / (0.3 * 900e9)) for work, moved in parts)
    updates = 0  # rows of 64 tokens, roughly, that are fine-tuned on
    for task, given, _, _ in plan(tuned, args.steps):
        given = finetune.parse_args(["--task", task, *shlex.split(given)])
        chosen = finetune.settings(given, task, vars(shape))
        updates += GLUE_ROWS[task] * chosen.epochs * len(chosen.lr) * given.seeds
    work = 6 * (n - shape.vocab_size * shape.d_model) * 64 * updates
    return args.steps * args.grad_accum * seconds / 3600, work / (0.3 * 112e12) / 3600


# --------------------------------------------------------------------------------------------------
# Running it


@contextmanager
def locked(file, wait=True):
    """Hold a lock while the block lasts -> is it ours? wait: until it is."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with open(file, "a") as handle:
        ours = True
        if fcntl:  # Windows has none
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except BlockingIOError:
                ours = False
        yield ours


def rows_of(settings):
    """{run: its row}, the last one of a name."""
    return {row["run"]: row for row in read(settings.rows)}


def call(command, folder):
    """Run a command in the project's root; what it prints goes to the run's own log."""
    print(command, flush=True)
    with open(folder / "run.log", "a") as log:
        code = subprocess.run(command, shell=True, cwd=ROOT, stdout=log, stderr=log).returncode
    if code in (-2, 130):
        raise KeyboardInterrupt
    if code:
        why = (folder / "run.log").read_text().strip().rpartition("\n")[2]
        raise RuntimeError(f"{folder.name} ended with {code}: {why}")


def trained(folder, command):
    """Did a run come to its end here? Raises ValueError if it came from other flags."""
    if not (folder / "ckpt.pt").exists():
        return False
    first, *lines = read(folder / "log.jsonl")
    wanted = vars(train.parse_args(shlex.split(command)[2:]))
    wanted = json.loads(json.dumps(wanted, default=str))  # as the log has it
    for flag in wanted.keys() - train.FREE_FLAGS - {"dataset", "given"}:
        there = first["args"].get(flag, wanted[flag])
        if there != wanted[flag]:
            raise ValueError(f"{folder} has --{flag} {there}, not {wanted[flag]}: move it away")
    return bool(lines) and lines[-1]["step"] == wanted["steps"]


def ensure_trained(table, name, settings):
    """Train a run that is not there, after those that it starts from."""
    folder = ROOT / settings.out / name
    command = commands(table, name, settings)["train"] + settings.more
    if trained(folder, command):
        return
    for start in re.findall(rf"--init_\w+ {settings.out}/(\S+)", command):
        with locked(ROOT / settings.out / start / "row.lock"):
            ensure_trained(find(start)[0], start, settings)
    folder.mkdir(parents=True, exist_ok=True)
    call(command, folder)


def make_row(table, name, settings):
    """Do what a row lacks, then write it. What is done is noted, and not done again."""
    row, made = rows_of(settings).get(name, {}), commands(table, name, settings)
    lacking = {part: x for part, x in made.items() if row.get("commands", {}).get(part) != x}
    if row:  # another table's flags for a run of this name: the same run
        lacking.pop("train", None)
    if not lacking:
        return
    folder = ROOT / settings.out / name
    log = read(folder / "log.jsonl")
    if row and (not log or log[-1].get("val_loss") != row["val_loss"]):
        print(f"{name}: its row lacks {', '.join(lacking)} and its weights are gone: made anew")
        row, lacking = {}, made
    ensure_trained(table, name, settings)
    notes = folder / "done.json"
    done = json.loads(notes.read_text()) if notes.exists() else {}
    for part, command in lacking.items():
        if part != "train" and done.get(part) != command:
            call(command, folder)
            done[part] = command
            notes.write_text(json.dumps(done))
    row |= {"run": name, "commands": row.get("commands", {}) | lacking} | collect(folder)
    with locked(folder.parent / "rows.lock"), open(settings.rows, "a") as handle:
        handle.write(json.dumps(row) + "\n")


def curve(lines, *keys):
    """-> [[step, value], ..] of the lines that have one of the keys, by the first they have."""
    found = []
    for line in lines:
        values = [line[key] for key in keys if key in line]
        found += [[line["step"], round(x, 4)] for x in values[:1]]
    return found


def machine(args):
    """What a figure may depend on."""
    device, info = pick_device(args["device"]), Path("/proc/cpuinfo")
    name = re.search("model name.*: (.*)", info.read_text()) if info.exists() else None
    processor = name[1] if name else platform.processor()
    return {
        "processor": torch.cuda.get_device_name() if device.type == "cuda" else processor,
        "threads": torch.get_num_threads(),
        "dtype": str(pick_dtype(device, args["dtype"])[0]).removeprefix("torch."),
        "torch": str(torch.__version__),
    }


def collect(folder):
    """What came out, from the files of a run's folder. No path of the machine."""
    first, *lines = read(folder / "log.jsonl")
    args, last = first["args"], lines[-1]
    row = {"git": first["git"], "machine": machine(args), "baselines": first["baselines"]}
    row["args"] = {key: args.get(key) for key in KEPT}
    row["curve"], row["val_curve"] = curve(lines, "loss"), curve(lines, "val_mlm", "val_loss")
    row["minutes"] = statistics.median(x["ms_per_step"] for x in lines) * last["step"] / 6e4
    row |= {key: value for key, value in last.items() if key.startswith("val_")}
    for file in folder.glob("*/probe.json"):  # of probe, blimp, lengths, dynamics
        found = json.loads(file.read_text())
        row |= {key: found[key] for key in ("words", "mlm", "blimp", "lengths") if key in found}
        if "map" in found:
            A = np.array(found["map"])[1:-1, 1:-1]  # without [CLS] and [SEP]
            row["indicators"] = found["indicators"]["without_specials"]
            row["ranges"] = [[n, opr(A, n), db(A, n)] for n in RANGES]
        if "steps" in found:
            row["contexts"] = curve(found["steps"], "contextual score")
    row["scores"], row["collapsed"] = {}, []
    results = {}
    for file in [folder / "results.jsonl", *folder.glob("at_*/results.jsonl")]:
        for x in read(file):  # a task that was stopped has some twice
            results[x["task"], x["step"], x["lr"], x["seed"]] = x
    best = finetune.best_runs(results.values(), statistics.median)  # the best rate counts (P1)
    for (_, task), runs in best.items():
        share = runs[0]["step"] / last["step"]
        at = f" at {share:g}" if share < 1 else ""
        for metric in runs[0]["metrics"]:
            row["scores"][f"{task} {metric}{at}"] = [round(x["metrics"][metric], 4) for x in runs]
        row["collapsed"] += [f"{task} {x['seed']}{at}" for x in runs if x["one_class"]]
    return row


def run_first(settings):
    """`first`: a class's own runs of docs' schemes, kept apart, beside the rows that are here."""
    ours, lines, began = rows_of(settings), [], time.time()
    settings.out = "out/first"
    for name in [f"{stem(name)}-s1337" for name in TABLES["docs"] if name.endswith("-s2")]:
        ensure_trained("docs", name, settings)
        log = read(ROOT / settings.out / name / "log.jsonl")[1:]
        own = {"args": {"objective": "mlm"}, "curve": curve(log, "loss"), "commands": {"train": ""}}
        rows = [row for run, row in ours.items() if stem(run) == stem(name)]
        lines.append(
            {
                "scheme": stem(name).removeprefix("docs-"),
                "loss": f"{log[-1]['val_loss']:.3f}",
                "loss here": ", ".join(f"{row['val_loss']:.3f}" for row in rows),
                f"below {PLATEAU['docs']} at step": leaves(own),
                "at step here": together(map(leaves, rows)),
            }
        )
        print(f"{lines[-1]['scheme']}: {lines[-1]['loss']}")
    print()
    print_table(sorted(lines, key=lambda line: float(line["loss"])))
    call(f"python probe.py --runs '{settings.out}/docs-*'", ROOT / settings.out)
    print(
        f"\n{(time.time() - began) / 60:.0f} minutes; a map of each: {settings.out}/probe/maps.png"
    )


# --------------------------------------------------------------------------------------------------


def announce(wanted, settings):
    """Say what is left out, and how long a paper's table takes. Raises ValueError where the
    environment lacks something."""
    tasks = set()
    for table, name in wanted:
        tasks |= {task for task, *_ in plan(TABLES[table][name][1], 1)} & {*finetune.GLUE}
    of_papers = [pair for pair in wanted if pair[0] in PAPERS]
    needed = ["TEXT"] * any(find(name)[0] in WEB for _, name in wanted)
    needed += ["GLUE"] * bool(tasks and len(of_papers) < len(wanted))
    for name in needed:
        if name not in os.environ:
            raise ValueError(f"this needs ${name}: see python results/run.py --help")
    if settings.trial and len(of_papers) < len(wanted):
        raise ValueError(f"--trial is for {', '.join(sorted(PAPERS))}")
    for task in sorted(tasks) if "GLUE" in os.environ else ():
        if not Path(os.environ["GLUE"], folder := finetune.TASKS[task].folder).exists():
            print(f"{task}: no {folder} in $GLUE, left out")
    if of_papers:
        each = [hours(*pair) for pair in of_papers]
        for (_, name), (before, after) in zip(of_papers, each):
            print(f"{name:24} {before:8.1f} + {after:6.1f} hours")
        before, after = np.sum(each, axis=0)
        print(
            f"{before:,.0f} hours of a V100 to pre-train and {after:,.0f} to fine-tune at 30% of "
            "112 TFLOP/s (fp16) and of 900 GB/s; small models, whose kernels are short, take longer"
        )


def main(argv=None):
    parser = Parser("results/run.py", __doc__)
    parser.add_argument("names", nargs="*", help=f"first, {', '.join(TABLES)}, or runs of these")
    parser.add_argument("--workers", type=int, default=1, help="runs at once (default: 1)")
    parser.add_argument("--draw", action="store_true", help="pictures of what has been run")
    parser.add_argument(
        "--trial", default="", metavar="TEXT", help="papers' tables, tiny: see above"
    )
    settings, more = parser.parse_known_args(argv)
    settings.more = "".join(f" {shlex.quote(flag)}" for flag in more)
    settings.out, settings.rows = OUT, ROWS
    if settings.trial:
        settings.out, settings.rows = "out/trial", ROOT / "out/trial/runs.jsonl"
    asked, failed = {*settings.names}, []
    with one_line_errors():
        wanted, known = [], {"first"}
        for table, runs in TABLES.items():
            for name in runs:
                if asked & (called := {table, name, stem(name)}):
                    wanted.append((table, name))
                    known |= called
        if unknown := asked - known:
            raise ValueError(f"no table or run {', '.join(sorted(unknown))}: see --help")
        announce(wanted, settings)
        again = [sys.executable, __file__, *(x for x in argv or sys.argv[1:] if x != "first")]
        again += ["--workers", "1"]
        others = [
            subprocess.Popen(again, stdout=subprocess.DEVNULL) for _ in range(settings.workers - 1)
        ]
        for table, name in wanted:
            with locked(ROOT / settings.out / name / "row.lock", wait=False) as ours:
                try:
                    if ours:  # else another worker is at it
                        make_row(table, name, settings)
                except RuntimeError as error:  # the others go on
                    print(f"error: {error}", file=sys.stderr)
                    failed.append(name)
        failed += [other for other in others if other.wait()]
        if "first" in asked:
            run_first(settings)
        else:
            rows = rows_of(settings)
            for table, runs in TABLES.items():
                if not asked or {name for t, name in wanted if t == table}:
                    show(table, runs, rows)
            if settings.draw:
                draw(ROOT / "results", TABLES, rows)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
