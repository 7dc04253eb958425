"""The bag-of-words baseline of fine-tuning, which ignores word order.

    python -m tools.bow --task docs
    python -m tools.bow --task mnli --data_dir glue --out_dir out/run

The score becomes a line of results.jsonl. Needs scikit-learn (requirements-dev.txt).
"""

import os
import time
from pathlib import Path

from finetune import TASKS, evaluate, print_scores, read_task
from lib.config import Parser, between, one_line_errors
from lib.files import make_folder


def bag_of_words(rows):
    """Fit TF-IDF with logistic regression on rows of (texts, class) -> scikit-learn's model;
    .predict(rows) gives classes.

    The features are the words. For a pair of texts, further features are whether the first text
    contains each word of the second, and the share of such words in tenths.
    """
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline

    words = TfidfVectorizer().build_analyzer()

    def features(row):
        first, *second = map(words, row[0])
        found = [f"a {w}" for w in first]
        for text in second:
            found += [f"b {w}" for w in text] + [f"b, in a: {w in first} {w}" for w in text]
            share = sum(w in first for w in text) / max(1, len(text))
            found += [f"share {tenth}" for tenth in range(int(10 * share))]
        return found

    model = make_pipeline(
        TfidfVectorizer(analyzer=features, sublinear_tf=True),
        LogisticRegression(C=10 if len(rows[0][0]) == 1 else 1, max_iter=1000),
    )
    return model.fit(rows, [label for _, label in rows])


def parse_args(argv=None):
    parser, path = Parser("-m tools.bow", __doc__), os.path.expanduser
    flag = parser.add_argument_group("task and files").add_argument
    tasks = [name for name, task in TASKS.items() if task.kind == "class"]
    flag("--task", choices=tasks, default="docs", help="a classification task")
    official = "folder with GLUE's official folders (default: from the hub)"
    flag("--data_dir", type=path, help=official)
    rows = between(int, "[1, 1e9]")
    flag("--limit_train", type=rows, help="training examples (default: all; docs: 500)")
    flag("--out_dir", type=path, default="out", help="folder for results.jsonl")
    flag("--cache", type=path, default="cache", help="folder for prepared data")
    return parser.parse_args(argv)


def main(argv=None):
    with one_line_errors("use a smaller --limit_train"):
        args, began = parse_args(argv), time.time()
        rows, evaluations = read_task(args.task, args.data_dir, args.cache, args.limit_train)
        model = bag_of_words(rows)
        run = {"seed": 0, "lr": None, "ckpt": "bow", "n_train": len(rows)}
        make_folder(args.out_dir)
        predicted = {name: list(model.predict(x)) for name, x in evaluations.items()}
        print_scores(evaluate(predicted, evaluations, run, began, Path(args.out_dir)))


if __name__ == "__main__":
    main()
