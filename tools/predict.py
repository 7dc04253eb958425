"""Score fine-tuned models on the dev sets, and write their predictions for the test sets.

    python -m tools.predict --ckpt out/run/finetuned-mnli.pt --data_dir glue
    python -m tools.predict --ckpt out/run                 # all finetuned-<task>.pt of the folder
    python -m tools.predict --ckpt out/run/finetuned-squad_v2.pt --data_dir squad

The scores become lines of results.jsonl. The files are those that gluebenchmark.com takes, such as
CoLA.tsv; an MNLI model also writes AX.tsv. SQuAD's test set is not public, so its JSON has the
answers for the dev set.
"""

import json
import os
import time
from pathlib import Path

from finetune import TASKS, encode_rows, evaluate, load, predict, print_scores, read_docs
from lib.config import Parser, UserError, add_device_flags, one_line_errors
from lib.device import can_compile, keep_memory, pick_device, pick_dtype
from lib.files import atomic_write, make_folder, newest_run
from lib.glue import AX, read_split


def prediction_file(task, rows, predictions):
    """-> the text of a file to submit. STS-B's scores are written as they are, neither rounded nor
    cut to 0 to 5 (GLUE takes any number), so that the file has the score that is printed."""
    if task.kind == "span":
        return json.dumps({row.id: answer for row, answer in zip(rows, predictions)})
    lines = ["index\tprediction\n"]
    for (_, index), p in zip(rows, predictions):
        lines.append(f"{index}\t{task.classes[p] if task.classes else p}\n")
    return "".join(lines)


def score_and_predict(path, args):
    """Append the scores of finetuned-<task>.pt to results.jsonl, and write its predictions."""
    began = time.time()
    model = load(path)
    if args.compile:
        model.compile(dynamic=True)
    name, out_dir = model.name, Path(args.out_dir or os.path.dirname(path))
    task = TASKS[name]
    if name == "docs":
        _, dev = read_docs(args.cache)
    else:
        dev = read_split(task, name, args.data_dir, "dev")
    tests = dev if task.kind == "span" else read_split(task, name, args.data_dir, "test")
    if name == "mnli":
        tests |= read_split(AX, "ax", args.data_dir, "test")

    model.to(args.device)
    make_folder(out_dir)
    run = {**model.run_info["row"], "ckpt": path}
    predicted = {}
    for key, rows in (dev | tests).items():
        encoder = model.encoder
        encoded = encode_rows(name, rows, encoder.tokenizer, encoder.config, model.length)
        predicted[key] = predict(model, *encoded, args.dtype)
    print_scores(evaluate(predicted, dev, run, began, out_dir))
    for key, rows in tests.items():
        file = out_dir / f"{key}{'.json' if task.kind == 'span' else '.tsv'}"
        with atomic_write(file) as handle:
            handle.write(prediction_file(task, rows, predicted[key]).encode())
        print(f"predictions: {len(rows):,} rows in {file}")


def parse_args(argv=None):
    parser, path = Parser("-m tools.predict", __doc__), os.path.expanduser
    flag = parser.add_argument_group("task and files").add_argument
    ckpt = "finetuned-<task>.pt, or a folder of them (default: the newest run's)"
    flag("--ckpt", type=path, help=ckpt)
    official = "folder with GLUE's official folders, or SQuAD's JSON (default: from the hub)"
    flag("--data_dir", type=path, help=official)
    out = "folder for results.jsonl and predictions (default: the checkpoint's)"
    flag("--out_dir", type=path, help=out)
    flag("--cache", type=path, default="cache", help="folder for prepared data")
    add_device_flags(parser)
    return parser.parse_args(argv)


def main(argv=None):
    with one_line_errors("use another --device"):
        args = parse_args(argv)
        keep_memory()
        args.device = pick_device(args.device)
        args.dtype, _ = pick_dtype(args.device, args.dtype)
        args.compile = args.compile and can_compile(args.device)
        ckpt = Path(args.ckpt or newest_run())
        files = sorted(ckpt.glob("finetuned-*.pt")) if ckpt.is_dir() else [ckpt]
        if not files:
            raise UserError(f"no finetuned-<task>.pt in {ckpt}")
        for file in files:
            score_and_predict(str(file), args)


if __name__ == "__main__":
    main()
