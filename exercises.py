"""Exercises: write a method of this project anew, and see whether it does what the paper says.

    python exercises.py                          # which there are
    python exercises.py tupe                     # a copy of the project without it: exercises/tupe
    python exercises.py --grade exercises/tupe   # seconds; exit code 0 all right, 1 not yet

Each copy lacks one method, what gives it away elsewhere, and the tests. A grade runs the tests of
this project on the student's file; of all else it takes the original. Where the student's method
returns something else than the original does, it shows the first place.
"""

import ast
import copy
import functools
import importlib
import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
import textwrap
import traceback
from dataclasses import dataclass
from pathlib import Path

import torch

import common

HERE = Path(__file__).resolve().parent
NOT_FOR_STUDENTS = ("test_all.py", "exercises.py", "TEACHING.md")  # they hold the answers
LOOP = "test_attention_equals_triple_loop"
PATIENCE = 180  # seconds, then it must be an endless loop


@dataclass
class Exercise:
    minutes: int  # for a student
    file: str
    writes: tuple  # the methods to write
    source: str  # where the equation stands
    task: str  # goes into the stub
    tests: tuple  # the tests that know: quick, and never skipped
    hides: tuple = ()  # "file:function", what gives it away elsewhere
    random: bool = False  # it draws, so its results need not be the original's


def loops(*schemes):
    return tuple(f"{LOOP}[{name}]" for name in schemes)


EXERCISES = {
    "attention": Exercise(
        20,
        "model.py",
        ("Block.attend",),
        "Vaswani 2017 eq 1",
        "x (B, L, C) -> (B, L, C). self.heads(x) gives q, k, v (B, H, L, D). scheme.terms(q, "
        "k, pos, self.layer, bias) gives q, k and what is added to scheme.scale * q_i . k_j, "
        "or None. Then softmax, fast.drop(A, p) while training, A v, and, where "
        "scheme.part_with['values'] is not None, plus its values(A, pos, self.layer). Join the "
        "heads; self.out comes last.",
        loops("none", "abs", "t5", "rel", "rope") + ("test_causal_and_pad_masks",),
        ("naive.py:attend",),
    ),
    "tupe": Exercise(
        25,
        "model.py",
        ("Tupe.bias",),
        "P1 eq 10, 11",
        "-> (1 or B, H, L, L). self.positions(pos) gives p U_Q and p U_K: see "
        "UntiedTable.forward. self.scale is 1 / sqrt(2D). Add self.offsets.bias(pos) where "
        "there is one. With self.reset [CLS] is untied by reset_cls: theta_t = p_t U_Q . p_t "
        "U_K / sqrt(2D) of each head, t being the last two rows of the table -> (2, H).",
        loops("tupe_a_tie_cls", "tupe_r_tie_cls", "tupe_a", "tupe_r", "tupe_r_factored"),
        ("naive.py:places",),
    ),
    "reset": Exercise(
        10,
        "model.py",
        ("reset_cls",),
        "P1 eq 9",
        "-> (B, H, L, L), a new tensor. [CLS] is token 0; cell (0, 0) belongs to the row.",
        loops("t5_untie_cls", "tupe_a", "tupe_a_free"),
        ("naive.py:logit",),
    ),
    "rotary": Exercise(
        20,
        "model.py",
        ("Rotary.edit_qk", "Rotary.rotate"),
        "Su 2021 eq 34",
        "q, k (B, H, L, D) -> the same shapes. self.w (D/2,) holds the frequencies, pos.ids (1 "
        "or B, L) the positions. Numbers 2n and 2n+1 are a point, turned by the angle position "
        "* w_n. edit_qk makes cosines and sines, rotate turns one tensor.",
        loops("rope", "rope+t5", "abs+rope"),
        ("naive.py:rotate",),
    ),
    "relative": Exercise(
        25,
        "model.py",
        ("Relative.scores", "Relative.values"),
        "Shaw 2018 eq 3, 4",
        "a = pos.pairs.rows(self.vectors(layer)) is (R, D), a row for each offset. scores: q_i "
        ". a_r -> (B, H, L, L), q being divided by sqrt(D) already. values: sum_j A_ij a_r -> "
        "(B, H, L, D). pos.pairs.pick and add_up go between (.., L, R) and (.., L, L).",
        loops("rel", "rel_k", "rsin", "rlsin", "abs+rel") + ("test_no_tensor_of_l_l_d",),
        ("naive.py:logit", "naive.py:attend", "model.py:Deberta.scores"),
    ),
    "mlm": Exercise(
        20,
        "objectives.py",
        ("MLM.corrupt",),
        "BERT sec 3.1",
        "select(eligible, rate, generator, starts) gives slots and valid (B, k); starts is "
        "None, or with self.starts where a word begins, (B, L) bool: also behind a special. "
        "80% of the slots show self.mask_id, 10% a random ordinary word (an id below "
        "vocab_size - N_SPECIALS), 10% what they were; one that is not valid is left alone. "
        "Draw with the generator. mlm_target is the word there was, mlm_weight valid, "
        "mlm_masked where a valid slot is.",
        (
            "test_mlm_selects_80_10_10",
            "test_no_special_is_selected_and_slots_beyond_have_weight_0",
            "test_mlm_loss_equals_loop",
            "test_whole_words_are_selected",
            "test_mlm_on_all_adds_the_mean_over_the_rest",
        ),
        random=True,
    ),
    "pplm": Exercise(
        20,
        "objectives.py",
        ("PPLM.corrupt",),
        "P0 sec 3.1",
        "First select(eligible, rate, generator) -> slots and valid (B, k). The valid slots of "
        "a row get each other's positions, in an order that the generator draws; slots that "
        "are not valid keep theirs. No tokens move. No loop over rows is needed: sort random "
        "numbers.",
        (
            "test_pplm_permutes_inside_the_selected_set",
            "test_no_special_is_selected_and_slots_beyond_have_weight_0",
        ),
        random=True,
    ),
    "pair_loss": Exercise(
        25,
        "objectives.py",
        ("PPLM.loss",),
        "P0 sec 3.1",
        "-> loss (), {'<self.name>_accuracy': share that is right}, in training {}. Of the n = "
        "L - 2 inner places, all ordered pairs of eligible tokens i != j that "
        "self.scored(pairs, i_moved, j_moved) keeps; moved: the position batch['pos'] is not "
        "the true one. Their class is self.label(true, given), of offsets j - i. "
        "self.head.scores gives s (B, n, n, H). fast.loss_in_chunks takes the mean: rows of s, "
        "labels, weights, measure=self.measure, width=max(self.measure.n_out, PAIR_HIDDEN), "
        "judge=not self.training; see TokenObjective.",
        ("test_pair_losses_equal_a_loop", "test_binary_accuracy_of_a_constant_answer"),
        ("naive.py:pplm_loss",),
    ),
    "contrastive": Exercise(
        20,
        "objectives.py",
        ("TC.loss",),
        "P2 eq 6 to 8",
        "hidden (B, L, C) -> loss (), {'tc_accuracy': share}, in training {}. g = h - e, with "
        "e from self.embedding(encoder, batch). batch['tc_candidates'] (B, L, 1 + K) are "
        "places in the flat batch, the positive first: no gradient goes there. Softmax over "
        "cosines divided by self.cfg.tc_temperature; mean over the anchors, batch['tc_weight'] "
        "(B, L).",
        (
            "test_tc_equals_a_loop",
            "test_tc_of_a_constant_is_ln_1_plus_k_and_candidates_are_detached",
        ),
    ),
    "copy": Exercise(
        40,
        "baselines.py",
        ("copy_weights",),
        "P0 sec 3.1, a counting argument",
        "k of n places are drawn and permuted among themselves. Cell (i, j): how probable are "
        "the true places i and j, when the tokens claim to stand at a and b? A numpy array (n, "
        "n).",
        ("test_baselines_equal_an_enumeration",),
    ),
    "batches": Exercise(
        15,
        "data.py",
        ("Batches.__call__",),
        "the docstring of Batches",
        "self.kept are the numbers of the rows, self.n how many. Epoch e has the order of "
        "np.random.default_rng((self.seed, e)).permutation(self.kept). A batch may begin in "
        "one epoch and end in the next. self.corpus.rows('train', numbers, self.L) fetches.",
        ("test_batches_visit_every_row_once_an_epoch",),
    ),
}


# --------------------------------------------------------------------------------------------------
# A copy for a student


def function_in(source, name):
    """'Tupe.bias' -> its node. Raises ValueError where there is none."""
    node = ast.parse(source)
    for part in name.split("."):
        found = [child for child in node.body if getattr(child, "name", None) == part]
        if not found:
            raise ValueError(f"there is no {name}")
        node = found[-1]
    return node


def blank(source, name, remark):
    """The source with the body of one function gone: signature and docstring stay."""
    node, lines = function_in(source, name), source.splitlines()
    if ast.get_docstring(node) is not None:
        start = node.body[0].end_lineno
    else:  # the signature ends where a line ends with a colon
        start = next(n for n in range(node.lineno, len(lines)) if lines[n - 1].endswith(":"))
    indent = " " * (node.col_offset + 4)
    stub = [f"{indent}# {line}" for line in textwrap.wrap(remark, 94 - len(indent))]
    stub.append(f'{indent}raise NotImplementedError("{name} is not written yet")')
    return "\n".join(lines[:start] + stub + lines[node.end_lineno :]) + "\n"


def make_copy(name, folder):
    """The project without the answers to one exercise. Raises ValueError, OSError."""
    if folder.exists():
        raise ValueError(f"{folder} is there already: name another folder, or delete it")
    exercise = EXERCISES[name]
    folder.mkdir(parents=True)
    for file in [*HERE.glob("*.py"), *HERE.glob("*.md"), *HERE.glob("*.t*")]:
        if file.name not in NOT_FOR_STUDENTS:
            shutil.copy(file, folder)
    for method in exercise.writes:
        rewrite(folder / exercise.file, method, f"Exercise ({exercise.source}): {exercise.task}")
    for place in exercise.hides:
        file, _, function = place.partition(":")
        rewrite(folder / file, function, f"Hidden: it gives away the exercise {name}.")
    (folder / "exercise.json").write_text(json.dumps({"exercise": name}) + "\n")


def rewrite(file, function, remark):
    file.write_text(blank(file.read_text(), function, remark))


# --------------------------------------------------------------------------------------------------
# A grade


def grade(folder):
    """-> the exercise's name and what check found. Raises ValueError, OSError."""
    if not (folder / "exercise.json").is_file():
        raise ValueError(f"{folder} is no folder that `python exercises.py NAME` made")
    name = common.read_json(folder / "exercise.json", exercise=str)["exercise"]
    exercise = pick(name)
    if importlib.util.find_spec("pytest") is None:
        raise ValueError("a grade needs pytest: pip install -r requirements-dev.txt")
    with tempfile.TemporaryDirectory() as temporary:
        arena = Path(temporary)
        for file in folder.glob("*.py"):
            shutil.copy(file, arena)
        for file in [*HERE.glob("*.py"), HERE / "README.md", HERE / "pyproject.toml"]:
            if file.name != exercise.file:
                shutil.copy(file, arena)
        code = f"import exercises; exercises.check({name!r}, {str(HERE)!r})"
        command = [sys.executable, "-W", "ignore", "-c", code]
        try:
            done = subprocess.run(
                command, cwd=arena, capture_output=True, text=True, timeout=PATIENCE
            )
        except subprocess.TimeoutExpired:
            says = f"no end after {PATIENCE} s: an endless loop?"
            return name, {"right": 0, "of": 0, "test": None, "says": says}
        if not (arena / "found.json").exists():
            raise ValueError(f"the tests did not run: {done.stderr[-300:]}")
        return name, json.loads((arena / "found.json").read_text())


def check(name, original):
    """Runs in a folder with the student's file and the original's others; writes found.json."""
    import pytest

    exercise = EXERCISES[name]
    watch = Watch(exercise.file)
    try:
        importlib.import_module(exercise.file.removesuffix(".py"))
        for method in exercise.writes if not exercise.random else ():
            watch.over(method, Path(original))
        tests = [f"test_all.py::{test}" for test in exercise.tests]
        flags = ["-p", "no:cacheprovider", "-m", "", "--tb=no", "-q"]
        pytest.main([*flags, *tests], plugins=[watch])
    except Exception as error:  # the student's file cannot be imported
        watch.says = raised(error, exercise.file)
    found = {"right": sum(watch.outcomes), "of": len(watch.outcomes)}
    Path("found.json").write_text(json.dumps(found | {"test": watch.test, "says": watch.says}))


class Watch:
    """A plugin of pytest: which tests pass, and how the first that does not went wrong."""

    def __init__(self, file):
        self.file, self.outcomes = file, []
        self.test = self.says = None  # of the first that does not pass
        self.differs = None  # the first wrong result of the test that runs

    def pytest_runtest_setup(self, item):
        self.differs = None

    def pytest_runtest_logreport(self, report):
        if report.when == "call" and not report.skipped:
            self.outcomes.append(report.passed)

    def pytest_exception_interact(self, node, call, report):
        if self.test is None:
            self.test, self.says = node.name, self.differs or raised(call.excinfo.value, self.file)

    def over(self, name, original):
        """Compare each result of the student's function with the original's, on the same input."""
        owner, theirs = sys.modules[self.file.removesuffix(".py")], load(original / self.file)
        *classes, method = name.split(".")
        for part in classes:
            owner, theirs = getattr(owner, part), getattr(theirs, part)
        static = isinstance(vars(owner).get(method), staticmethod)
        student, reference = getattr(owner, method), getattr(theirs, method)

        @functools.wraps(student)
        def compared(*args):
            before = [copy.copy(arg) for arg in args]
            got = student(*args)
            if self.differs is None:
                with torch.no_grad():
                    place = difference(reference(*before), got)
                if place:
                    self.differs = f"{name} returns {place}"
            return got

        setattr(owner, method, staticmethod(compared) if static else compared)


def load(file):
    """A module from a file, under a name of its own."""
    spec = importlib.util.spec_from_file_location(f"original_{file.stem}", file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def difference(expected, got, at=""):
    """The first place where two results differ, in words, or None."""
    if isinstance(expected, (tuple, list)):
        if not isinstance(got, (tuple, list)) or len(got) != len(expected):
            return f"{at}{type(got).__name__}, expected {len(expected)} results"
        places = [difference(a, b, f"result {n}: ") for n, (a, b) in enumerate(zip(expected, got))]
        return next(filter(None, places), None)
    if isinstance(expected, dict):
        if not isinstance(got, dict) or list(got) != list(expected):
            return f"{at}{got}, expected the keys {list(expected)}"
        return difference(list(expected.values()), list(got.values()), at)
    try:
        a, b = torch.as_tensor(expected).detach(), torch.as_tensor(got).detach()
    except (TypeError, ValueError, RuntimeError):
        return f"{at}{type(got).__name__}, expected {type(expected).__name__}"
    if a.shape != b.shape:
        return f"{at}shape {tuple(b.shape)}, expected {tuple(a.shape)}"
    wrong = ~torch.isclose(a.double(), b.double(), rtol=1e-4, atol=1e-6, equal_nan=True)
    if wrong.any():
        place = tuple(wrong.nonzero()[0].tolist())
        share = f"{int(wrong.sum())} of {wrong.numel()} differ, the first at {place}: "
        return f"{at}{share if place else ''}expected {a[place]:.5g}, got {b[place]:.5g}"


def raised(error, file):
    """An exception in words: what, and in which line of the student's file or of the test."""
    if isinstance(error, NotImplementedError):
        return str(error)
    if isinstance(error, SyntaxError):
        return f"{error.msg} ({Path(error.filename).name}, line {error.lineno})"
    said = " ".join(str(error).split()).partition(" + where <built-in")[0]
    text = f"{type(error).__name__}: {said:.400}"
    frames = traceback.extract_tb(error.__traceback__)
    wanted = "test_all.py" if isinstance(error, AssertionError) else file
    for frame in reversed(frames):
        if Path(frame.filename).name == wanted and frame.name not in ("close", "alike"):
            return f"{text}\n{wanted}, line {frame.lineno}: {frame.line}"
    return text


# --------------------------------------------------------------------------------------------------
# The program


def pick(name):
    if name not in EXERCISES:
        raise ValueError(f"unknown exercise {name!r}; choose from {', '.join(EXERCISES)}")
    return EXERCISES[name]


def show_list():
    print(f"{'name':12} {'minutes':>7}  {'write':46} from")
    for name, e in EXERCISES.items():
        print(f"{name:12} {e.minutes:7}  {' and '.join(e.writes) + ' in ' + e.file:46} {e.source}")
    print("\npython exercises.py NAME makes a copy of the project in which you write it.")


def main(argv=None):
    parser = common.Parser("exercises.py", __doc__)
    parser.add_argument("name", nargs="?", help="make the student's copy of this exercise")
    parser.add_argument("folder", nargs="?", help="where (default: exercises/NAME)")
    parser.add_argument("--grade", metavar="FOLDER", help="is what was written there right?")
    args = parser.parse_args(argv)
    with common.one_line_errors():
        if args.grade and args.name:
            raise ValueError("give a NAME or --grade FOLDER, not both")
        if args.grade:
            return report(*grade(Path(args.grade)))
        if args.name is None:
            return show_list()
        exercise = pick(args.name)
        folder = Path(args.folder or Path("exercises") / args.name)
        make_copy(args.name, folder)
        if args.folder is None:  # git and ruff leave students' copies alone
            (folder.parent / ".gitignore").write_text("*\n")
    print(f"write {' and '.join(exercise.writes)} in {folder / exercise.file}, then")
    print(f"python exercises.py --grade {folder}")


def report(name, found):
    """Print a grade; leave with code 1 where it is not all right."""
    exercise = EXERCISES[name]
    print(f"{name}, {' and '.join(exercise.writes)}: {found['right']} of {found['of']} tests pass")
    if found["right"] == found["of"] and not found["says"]:
        return
    if found["test"]:
        print(f"the first that does not: {found['test']}")
    print(found["says"])
    sys.exit(1)


if __name__ == "__main__":
    main()
