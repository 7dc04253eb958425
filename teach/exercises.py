"""Exercises: rewrite one method of this project, and check that it does what the paper says.

    python -m teach.exercises                          # list the exercises
    python -m teach.exercises tupe                     # copy the project, without that method
    python -m teach.exercises --grade exercises/tupe   # run the tests; exit code 0 if all pass

The copy holds the core, teach/naive.py (the equations as loops over pairs of tokens) and the tests.
Grading uses the student's file and the original of everything else. If a test fails, it shows
where the student's method first differs from the original on the same input.
"""

import copy
import functools
import importlib
import importlib.util
import json
import shlex
import shutil
import subprocess
import sys
import tempfile
import textwrap
import traceback
from ast import get_docstring, parse
from pathlib import Path
from typing import NamedTuple

import torch

from lib.config import Parser, UserError, leave, one_line_errors
from lib.files import read_json

ROOT = Path(__file__).resolve().parent.parent
CORE = "*.py *.md *.txt pyproject.toml lib/*.py".split()
CORE += "teach/__init__.py teach/naive.py tests/__init__.py tests/conftest.py".split()
TIMEOUT = 300  # seconds for the tests of one exercise


class Exercise(NamedTuple):
    minutes: int  # that a student needs
    file: str
    methods: list  # the methods to write
    source: str  # of the equation
    task: str  # becomes the comment in the stub
    tests: str  # pytest's -k for the tests of test_all.py that grade it


EXERCISES = {
    "attention": Exercise(
        20,
        "model.py",
        ["Block.attend"],
        "Vaswani 2017 eq 1",
        "x (B, L, C) -> (B, L, C). self.heads(x) gives q, k, v (B, H, L, D). scheme.terms(q, k, "
        "pos, self.layer, bias) gives q, k and what is added to scheme.scale * q_i . k_j, which "
        "may be None. The softmax over j is A; apply F.dropout(A, self.attn_dropout, "
        "self.training). The output of a head is A v, plus scheme.values(A, pos, self.layer) if "
        "scheme.has_values. Concatenate the heads and apply self.out.",
        "attention_equals_triple_loop and (none or abs or t5 or rope) or causal_and_pad",
    ),
    "tupe": Exercise(
        25,
        "model.py",
        ["Tupe.bias"],
        "TUPE eq 10, 11",
        "-> (1 or B, H, L, L). self.positions(pos) gives p U_Q and p U_K, see UntiedPositions; "
        "self.scale is 1 / sqrt(2D). Add the bias of self.relative_bias if there is one. If "
        "self.theta (2, C) is not None, [CLS] is untied by reset_cls, whose theta_t, one number "
        "per head, is p_t U_Q . p_t U_K / sqrt(2D) with p_t = self.theta[t]; see "
        "UntiedPositions.project.",
        "attention_equals_triple_loop and tupe",
    ),
    "reset": Exercise(
        10,
        "model.py",
        ["reset_cls"],
        "TUPE eq 9",
        "-> (B, H, L, L), a new tensor. [CLS] is token 0. Cell (0, 0) counts as part of row 0.",
        "attention_equals_triple_loop and (untie_cls or tupe)",
    ),
    "rotary": Exercise(
        20,
        "model.py",
        ["Rotary.edit_qk", "Rotary.rotate"],
        "Su 2021 eq 34",
        "q, k (B, H, L, D) -> the same shapes. frequencies(D, q) gives w (D/2,); pos.ids (1 or B, "
        "L) holds the positions. Components 2n and 2n+1 are a point in a plane, rotated by the "
        "angle position * w_n. edit_qk computes sines and cosines; rotate rotates one tensor.",
        "attention_equals_triple_loop and rope",
    ),
    "relative": Exercise(
        25,
        "model.py",
        ["offset_scores", "offset_values"],
        "Shaw 2018 eq 3, 4",
        "a is (R, D), one row per offset. offset_scores: q_i . a_r -> (B, H, L, L), without a "
        "scale; for deberta, a is (H, R, D). offset_values: sum_j A_ij a_r -> (B, H, L, D). "
        "pos.offset_rows (1 or B, L, L) holds the row of each pair. Never build a tensor "
        "(L, L, D): compute q_i . a_r for all R rows, of which `gather` picks one per pair; "
        "`scatter_add` sums A by row.",
        "attention_equals_triple_loop and (rel or rsin or rlsin)",
    ),
    "mlm": Exercise(
        20,
        "objectives.py",
        ["MLM.corrupt"],
        "BERT sec 3.1",
        "select(eligible, rate, generator, starts) gives slots and valid (B, k). starts: "
        "begins_word(tokens, self.in_word) of the original tokens if self.cfg.whole_word, "
        "otherwise None. 80% of the "
        "valid slots show self.mask_id, 10% a random ordinary token (an id below "
        "vocab_size - N_SPECIALS), 10% the original one; slots that are not valid keep theirs. "
        "Draw from the generator. mlm_target is the original token, mlm_weight is valid, and "
        "mlm_selected marks the valid slots.",
        "test_mlm or whole_words_are_selected or no_special_is_selected",
    ),
    "pplm": Exercise(
        15,
        "objectives.py",
        ["PPLM.corrupt", "PPLM.assign"],
        "RPP sec 3.1",
        "corrupt: select(eligible, rate, generator) gives slots and valid (B, k); batch['pos'] is "
        "(B, L), the true positions except at the slots. assign: the valid slots of a sequence get "
        "each other's positions, in random order; the others keep theirs. Tokens do not move. "
        "Do not loop over sequences; sort random numbers.",
        "pplm_permutes or no_special_is_selected",
    ),
    "pair_loss": Exercise(
        25,
        "objectives.py",
        ["PPLM.loss"],
        "RPP sec 3.1",
        "-> loss (), and {'accuracy': share of correct pairs}, or {} in training. Among the inner "
        "n = L - 2 tokens, score all ordered pairs i != j of eligible tokens that "
        "self.scored(pairs, i_moved, j_moved) keeps; moved: the token's position batch['pos'] is "
        "not the true one. Their class is self.label(true, assigned), of the offsets j - i. "
        "self.head.scores(encoder, batch['states'], batch['positions']) gives s (B, n, n, H). "
        "self.sums(s, label, weight) sums loss and correct pairs; it may be called once for all "
        "pairs (the original calls it in chunks, to limit memory).",
        "pair_losses_equal",
    ),
    "contrastive": Exercise(
        20,
        "objectives.py",
        ["TC.loss"],
        "TACO eq 6 to 8",
        "hidden (B, L, C) -> loss (), and {'accuracy': share of anchors that prefer the positive}, "
        "or {} in training. g = hidden - self.embedding(encoder, batch). batch['tc_candidates'] "
        "(B, L, 1 + K) are indices into the flattened batch, the positive first; candidates get no "
        "gradient. Softmax over cosines / self.cfg.tc_temperature; mean over the anchors, "
        "batch['tc_weight'] (B, L).",
        "tc_equals",
    ),
    "copy": Exercise(
        40,
        "lib/baselines.py",
        ["copy_weights"],
        "RPP sec 3.1, by counting",
        "k of n positions are selected and permuted among themselves. Cell (i, j): the probability "
        "that the true positions of two tokens are i and j, if they are assigned a and b, times "
        "any constant. -> numpy array (n, n).",
        "baselines_equal_an_enumeration",
    ),
    "batches": Exercise(
        15,
        "data.py",
        ["Batches.__call__"],
        "the docstring of Batches",
        "self.kept holds the indices of the sequences, self.n is their number. The order in epoch "
        "e is np.random.default_rng((self.seed, e)).permutation(self.kept). A batch may begin in "
        "one epoch and end in the next. self.corpus.sequences('train', indices, self.L) reads "
        "them.",
        "batches_visit",
    ),
}


# --------------------------------------------------------------------------------------------------
# Making a copy


def copy_files(folder, *patterns):
    """Copy files of the project: contents, not permissions, as the checkout may be read-only."""
    for pattern in patterns:
        for file in ROOT.glob(pattern):
            target = folder / file.relative_to(ROOT)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, target)


def make_copy(name, folder):
    """Write the project without the methods of an exercise to a new folder, which appears only when
    it is complete. Raises UserError, OSError."""
    exercise = find_exercise(name)
    if folder.exists():
        raise UserError(f"{folder} exists already: give another folder, or delete it")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".") as temporary:
        unfinished = Path(temporary, folder.name)
        copy_files(unfinished, *CORE)
        source = (ROOT / exercise.file).read_text()
        for method in exercise.methods:
            source = blank(source, method, f"Exercise ({exercise.source}): {exercise.task}")
        (unfinished / exercise.file).write_text(source)
        (unfinished / "exercise.json").write_text(json.dumps({"exercise": name}) + "\n")
        unfinished.rename(folder)


def find_function(source, name):
    """The syntax node of a function such as "Tupe.bias". Raises ValueError if there is none."""
    node = parse(source)
    for part in name.split("."):
        found = [child for child in node.body if getattr(child, "name", None) == part]
        if not found:
            raise ValueError(f"there is no {name}")
        node = found[-1]
    return node


def blank(source, name, comment):
    """The source with one function reduced to its signature, docstring and a comment."""
    node, lines = find_function(source, name), source.splitlines()
    if get_docstring(node) is not None:
        start = node.body[0].end_lineno
    else:  # the signature ends at the first line that ends with a colon
        start = next(n for n in range(node.lineno, len(lines)) if lines[n - 1].endswith(":"))
    indent = " " * (node.col_offset + 4)
    stub = [f"{indent}# {line}" for line in textwrap.wrap(comment, 94 - len(indent))]
    stub.append(f'{indent}raise NotImplementedError("{name} is not written yet")')
    return "\n".join(lines[:start] + stub + lines[node.end_lineno :]) + "\n"


# --------------------------------------------------------------------------------------------------
# Grading


def grade(folder):
    """-> the exercise's name and the result of `check`. Raises UserError, OSError."""
    if not (folder / "exercise.json").is_file():
        raise UserError(f"{folder} was not made by python -m teach.exercises NAME")
    name = read_json(folder / "exercise.json", exercise=str)["exercise"]
    exercise = find_exercise(name)
    if importlib.util.find_spec("pytest") is None:
        raise UserError("grading needs pytest: pip install -r requirements-dev.txt")
    with tempfile.TemporaryDirectory() as temporary:
        temporary = Path(temporary)
        copy_files(temporary, *CORE, "teach/exercises.py")
        shutil.copyfile(folder / exercise.file, temporary / exercise.file)
        code = f"from teach.exercises import check; check({name!r}, {str(ROOT)!r})"
        command = [sys.executable, "-W", "ignore", "-c", code]
        try:
            run = subprocess.run(command, cwd=temporary, capture_output=True, timeout=TIMEOUT)
        except subprocess.TimeoutExpired:
            message = f"not finished after {TIMEOUT} s: an infinite loop?"
            return name, {"passed": 0, "total": 0, "message": message}
        if not (temporary / "result.json").exists():
            raise UserError(f"the tests did not run: {run.stderr[-300:].decode(errors='replace')}")
        return name, read_json(temporary / "result.json")


def check(name, original):
    """Run the tests of an exercise in the current folder, a copy of the original with the student's
    file in it; write result.json."""
    import pytest

    exercise = EXERCISES[name]
    watch = Watch()
    try:
        for method in exercise.methods:
            watch.compare(exercise.file, method, Path(original))
        flags = ["-p", "no:cacheprovider", "-m", "", "--tb=short", "-k", exercise.tests]
        pytest.main([*flags, "test_all.py"], plugins=[watch])
    except Exception:  # importing the student's file
        watch.message = traceback.format_exc(limit=-1)
    if not watch.outcomes and not watch.message:
        watch.message = f"no test matches {exercise.tests}"
    result = {"passed": sum(watch.outcomes), "total": len(watch.outcomes)}
    Path("result.json").write_text(json.dumps(result | {"message": watch.message}))


class Watch:
    """A pytest plugin that keeps every test's outcome, and a message about the first failure."""

    def __init__(self):
        self.outcomes = []
        self.message = ""
        self.difference = ""  # the first wrong result in the current test

    def pytest_runtest_setup(self, item):
        self.difference = ""

    def pytest_runtest_logreport(self, report):
        if report.when == "call" and not report.skipped:
            self.outcomes.append(report.passed)
        if report.failed and not self.message:
            details = self.difference or report.longreprtext
            self.message = f"first failure: {report.nodeid}\n{details}"

    def pytest_collectreport(self, report):
        if report.failed:
            self.message = report.longreprtext

    def compare(self, file, name, original):
        """Make the student's function also call the original on the same input."""
        module = file.removesuffix(".py").replace("/", ".")
        owner, reference = importlib.import_module(module), load_module(original / file)
        *classes, method = name.split(".")
        for part in classes:
            owner, reference = getattr(owner, part), getattr(reference, part)
        is_static = isinstance(vars(owner).get(method), staticmethod)
        student, reference = getattr(owner, method), getattr(reference, method)

        @functools.wraps(student)
        def both(*args):
            __tracebackhide__ = True
            if self.difference or any(isinstance(arg, torch.Generator) for arg in args):
                return student(*args)  # random numbers may be drawn in another order
            inputs = [copy.copy(arg) for arg in args]
            result = student(*args)
            try:
                with torch.no_grad():
                    expected = reference(*inputs)
                torch.testing.assert_close(
                    result, expected, rtol=1e-4, atol=1e-6, equal_nan=True, check_dtype=False
                )
            except (AssertionError, TypeError, ValueError) as error:
                self.difference = f"{name} does not return what the original returns. {error}"
            return result

        setattr(owner, method, staticmethod(both) if is_static else both)


def load_module(file):
    """Import a file under a name of its own."""
    spec = importlib.util.spec_from_file_location(f"original_{file.stem}", file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


# --------------------------------------------------------------------------------------------------
# The program


def find_exercise(name):
    if name not in EXERCISES:
        raise UserError(f"unknown exercise {name!r}; choose from {', '.join(EXERCISES)}")
    return EXERCISES[name]


def print_list():
    print(f"{'name':12} {'minutes':>7}  {'equation':26}{'write':18}")
    for name, e in EXERCISES.items():
        print(f"{name:12} {e.minutes:7}  {e.source:26}{e.file:18}{', '.join(e.methods)}")
    print("\npython -m teach.exercises NAME copies the project; write the method there.")


def print_grade(name, result):
    methods = " and ".join(EXERCISES[name].methods)
    print(f"{name}, {methods}: {result['passed']} of {result['total']} tests pass")
    if result["message"]:
        print(result["message"])
        leave(1)


def main(argv=None):
    with one_line_errors():
        parser = Parser("-m teach.exercises", __doc__)
        parser.add_argument("name", nargs="?", help="copy the project for this exercise")
        parser.add_argument("folder", nargs="?", help="of the copy (default: exercises/NAME)")
        parser.add_argument("--grade", metavar="FOLDER", help="run the tests on this copy")
        args = parser.parse_args(argv)
        if args.grade and args.name:
            raise UserError("give a NAME or --grade FOLDER, not both")
        if args.grade:
            return print_grade(*grade(Path(args.grade).expanduser()))
        if args.name is None:
            return print_list()
        folder = Path(args.folder or f"exercises/{args.name}").expanduser()
        make_copy(args.name, folder)
        if args.folder is None:  # git and ruff ignore the copies
            (folder.parent / ".gitignore").write_text("*\n")
        exercise = EXERCISES[args.name]
        print(f"Write {' and '.join(exercise.methods)} in {folder / exercise.file}, then run")
        print(f"python -m teach.exercises --grade {shlex.quote(str(folder))}")


if __name__ == "__main__":
    main()
