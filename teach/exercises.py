"""Exercises: rewrite a part of this project, and check that it does what the paper says.

    python -m teach.exercises                          # list the exercises
    python -m teach.exercises tupe                     # copy the project, without that part
    python -m teach.exercises --hint tupe              # a second hint; the first is in the copy
    python -m teach.exercises --grade exercises/tupe   # run the tests; exit code 0 if all pass

The copy holds the core, teach/naive.py (the equations as loops over pairs of tokens) and the tests.
Grading uses the student's file and the original of everything else. If a test fails, it shows
where the student's method first differs from the original on the same input.
"""

import copy
import functools
import importlib
import json
import os
import runpy
import shlex
import shutil
import subprocess
import sys
import tempfile
import textwrap
import traceback
from ast import get_docstring, parse
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import torch

from lib.config import Parser, UserError, leave, one_line_errors
from lib.files import opening, read_json

ROOT = Path(__file__).resolve().parent.parent
CORE = "*.py *.md *.txt pyproject.toml lib/*.py".split()
CORE += "teach/__init__.py teach/naive.py tests/__init__.py tests/conftest.py".split()
CORE += ["docs/reference.md", "docs/encodings.md"]  # tests look up which schemes they list
TIMEOUT = 300  # seconds for the tests of one exercise


class Exercise(NamedTuple):
    minutes: int  # that a student needs
    file: str
    methods: dict  # the methods to write, with the axes of what they return
    source: str  # of the equation
    task: str  # task and hint become the comment in the stub
    hint: str
    second_hint: str  # what --hint prints
    tests: str  # pytest's -k for the tests of test_all.py that grade it


EXERCISES = {
    "attention": Exercise(
        20,
        "model.py",
        {"Block.attend": "sequence token component"},
        "Vaswani 2017 eq 1",
        task="x (B, L, C) -> (B, L, C). self.normed_heads(x) gives q, k, v (B, H, L, D). "
        "scheme.terms(q, k, pos, self.layer, bias) gives q, k and what is added to scheme.scale "
        "* q_i . k_j, a tensor or 0. The softmax over j is A; apply F.dropout(A, "
        "self.attn_dropout, self.training). The output of a head is A v, plus scheme.values(A, "
        "pos, self.layer) if scheme.has_values. Concatenate the heads and apply self.out.",
        hint="the logits of all pairs are one matrix product, q @ k.transpose(-1, -2).",
        second_hint="j is the last dimension of the logits. A @ v is (B, H, L, D), and self.out "
        "takes (B, L, C): transpose dimensions 1 and 2, then reshape.",
        tests="attention_equals_triple_loop and (none or abs or t5 or rope) or causal_and_pad",
    ),
    "tupe": Exercise(
        25,
        "model.py",
        {"Tupe.bias": "sequence head query key"},
        "TUPE eq 10, 11",
        task="-> (1 or B, H, L, L). self.positions(pos) gives p U_Q and p U_K, see "
        "UntiedPositions; self.scale is 1 / sqrt(2D). Add the bias of self.relative_bias if there "
        "is one. If self.theta (2, C) is not None, [CLS] is untied by reset_cls, whose theta_t, "
        "one number per head, is p_t U_Q . p_t U_K / sqrt(2D) with p_t = self.theta[t]; see "
        "UntiedPositions.project.",
        hint="the product of positions is computed as q_i . k_j is in attention. reset_cls comes "
        "last: it replaces T5's bias too.",
        second_hint="self.positions.project(self.theta) gives two tensors (2, C). Multiply them "
        "elementwise, split C into heads with unflatten(-1, (H, -1)), sum over the D numbers of "
        "each head, and multiply by self.scale: that is theta (2, H).",
        tests="attention_equals_triple_loop and tupe",
    ),
    "reset": Exercise(
        10,
        "model.py",
        {"reset_cls": "sequence head query key"},
        "TUPE eq 9",
        task="-> (B, H, L, L), a new tensor. [CLS] is token 0. Cell (0, 0) counts as part of row "
        "0.",
        hint="clone v first; the caller still needs the old one.",
        second_hint="v[..., 0, :] is the row of [CLS] for all sequences and heads, (B, H, L). To "
        "fill it, the first number of each head, theta[0] (H,), needs one more dimension: "
        "theta[0][:, None]. Fill the column before the row.",
        tests="attention_equals_triple_loop and (untie_cls or tupe)",
    ),
    "rotary": Exercise(
        20,
        "model.py",
        {
            "Rotary.rotation": "sequence head token angle",
            "Rotary.rotate": "sequence head token component",
        },
        "Su 2021 eq 34",
        task="pos.ids (1 or B, L) holds the positions. Components 2n and 2n+1 of a query are a "
        "point in a plane, rotated by the angle w_n * position / scale. rotation -> the cosines "
        "and sines of all angles, (1 or B, 1, L, width/2) each, in dtype. frequencies(width, x, "
        "base) gives w (width/2,), in the dtype of x but not in 16 bits. rotate: x (B, H, L, D); "
        "cos and sin (1 or B, 1, L, D/2) from rotation -> (B, H, L, D).",
        hint="x[..., 0::2] and x[..., 1::2] are the two coordinates of all points.",
        second_hint="(a, b) becomes (a cos - b sin, a sin + b cos); torch.stack(..., dim=-1) and "
        "flatten(-2) interleave the two again. The angles pos.ids[..., None] * w are (1 or B, L, "
        "width/2): insert a dimension for the heads, [:, None].",
        tests="attention_equals_triple_loop and rope",
    ),
    "relative": Exercise(
        25,
        "model.py",
        {
            "offset_scores": "sequence head query key",
            "offset_values": "sequence head query component",
        },
        "Shaw 2018 eq 3, 4",
        task="a is (R, D), one row per offset. offset_scores: q_i . a_r -> (B, H, L, L), without "
        "a scale; for deberta, a is (H, R, D). offset_values: sum_j A_ij a_r -> (B, H, L, D). "
        "pos.offset_rows(R) (1 or B, L, L) gives the row of each pair. Never build a tensor (L, L, "
        "D).",
        hint="compute q_i . a_r for all R rows; each pair then picks one of these numbers. For "
        "the values, sum A by row first.",
        second_hint="rows = pos.offset_rows(R)[:, None].expand(B, H, L, L). scores.gather(-1, "
        "rows) picks from scores (B, H, L, R); zeros (B, H, L, R).scatter_add(-1, rows, A) sums "
        "by row, and the sums @ a are the values.",
        tests="attention_equals_triple_loop and (rel or rsin or rlsin)",
    ),
    "mlm": Exercise(
        20,
        "objectives.py",
        {"MLM.corrupt": ""},
        "BERT sec 3.1",
        task="write BERT's masking. Select the share self.cfg.mask_rate of the eligible tokens: "
        "single tokens, or whole words if self.cfg.whole_word. Of the selected ones, 80% become "
        "self.mask_id, 10% a random ordinary token (ids below vocab_size - N_SPECIALS), and 10% "
        "stay. Put the changed tokens into the batch, and what the loss needs: the slots, their "
        "original tokens (mlm_target), which slots are valid (mlm_weight), and which tokens of "
        "the sequence are selected. Draw every random number from the generator.",
        hint="`select` does the selection, with starts = begins_word(original, self.in_word) for "
        "whole words. A slot that is not valid keeps its token.",
        second_hint="draw a number u in [0, 1) per slot: below .8 the slot shows [MASK], below .9 "
        "a random token, otherwise the original; torch.where chooses. gather(1, slots) reads the "
        "tokens at the slots, scatter(1, slots, shown) writes them. mlm_selected is `valid`, "
        "scattered into zeros (B, L).",
        tests="test_mlm or whole_words_are_selected or no_special_is_selected",
    ),
    "pplm": Exercise(
        15,
        "objectives.py",
        {"PPLM.corrupt": "", "PPLM.assign": ""},
        "RPP sec 3.1",
        task="corrupt: select(eligible, rate, generator) gives slots and valid (B, k); "
        "batch['pos'] is (B, L), the true positions except at the slots. assign: the valid slots "
        "of a sequence get each other's positions, in random order; the others keep theirs. "
        "Tokens do not move. Do not loop over sequences.",
        hint="sorting random numbers gives a random permutation.",
        second_hint="draw a number in [0, 1) per slot. Slots that are not valid are the last "
        "ones: give them 2, 3, ... instead, so that they stay last. slots.gather(1, "
        "numbers.argsort(1)) is the result of assign; corrupt scatters it into "
        "torch.arange(L).expand(B, L).",
        tests="pplm_permutes or no_special_is_selected",
    ),
    "pair_loss": Exercise(
        25,
        "objectives.py",
        {"PPLM.loss": ""},
        "RPP sec 3.1",
        task="write the loss of position prediction: the mean cross-entropy of the true offset "
        "over all scored pairs. A pair is an ordered pair of different eligible tokens i and j; "
        "the first and the last token of a sequence take no part, so n = L - 2 remain. "
        "self.scored says which pairs are scored. The class of a pair is self.label(true offset, "
        "assigned offset). An offset is the position of j minus that of i: the true position is "
        "the index in the sequence, the assigned one is in batch['pos']. Return the loss, and "
        "{'accuracy': the share of correctly predicted pairs} in evaluation, {} in training.",
        hint="self.head.scores(encoder, batch['states'], batch['pos']) gives the attention "
        "logits s (B, n, n, H) of all pairs; hidden is not needed. Make a label and a weight (B, "
        "n, n), 1 for scored pairs and otherwise 0, and flatten all three to N = B n n pairs for "
        "self.sums.",
        second_hint="with index = 1, ..., n, the true offsets are index - index[:, None], and a "
        "token has moved where batch['pos'][:, 1:-1] != index. label.expand_as(pairs) gives every "
        "sequence its labels. Divide both sums by the number of scored pairs (at least 1). The "
        "original calls self.sums in chunks, which saves memory; one call is enough.",
        tests="pair_losses_equal",
    ),
    "contrastive": Exercise(
        20,
        "objectives.py",
        {"TC.loss": ""},
        "TACO eq 6 to 8",
        task="hidden (B, L, C) -> loss (), and {'accuracy': share of anchors that prefer the "
        "positive}, or {} in training. g = hidden - self.embedding(encoder, batch). "
        "batch['tc_candidates'] (B, L, 1 + K) are indices into the flattened batch, the positive "
        "first; candidates get no gradient. Softmax over cosines / self.cfg.tc_temperature; mean "
        "over the anchors, batch['tc_weight'] (B, L).",
        hint="after F.normalize, a cosine is a dot product. weighted_mean takes the mean.",
        second_hint="flat = g.detach().flatten(0, 1) is (B L, C), so flat[batch['tc_candidates']] "
        "is (B, L, 1 + K, C); torch.einsum('blc,blkc->blk', g, ...) gives the cosines. The loss "
        "of an anchor is logits.logsumexp(-1) - logits[..., 0].",
        tests="tc_equals",
    ),
    "copy": Exercise(
        40,
        "lib/baselines.py",
        {"copy_weights": "i j"},
        "RPP sec 3.1, by counting",
        task="k of n positions are selected and permuted among themselves. Cell (i, j): the "
        "probability that the true positions of two tokens are i and j, if they are assigned a "
        "and b, times any constant. -> numpy array (n, n).",
        hint="only the pattern counts: is i equal to a or b, is j equal to b or a? Count the ways "
        "for (a, b), for (b, a), for the rest of row a and column b, and for the rest of row b "
        "and column a. All other cells are equal.",
        second_hint="times n (n - 1), cell (a, b) is (n - k)(n - k - 1) + 2 (n - k) + 1, for "
        "none, one or both selected; cell (b, a) is 1. The rest of row b and column a is c = (k - "
        "2) / (n - 2), and that of row a and column b is (n - k)(k - 1) / (n - 2) + c. The "
        "diagonal is 0, and the other (n - 2)(n - 3) cells share what is missing to n (n - 1).",
        tests="baselines_equal_an_enumeration",
    ),
    "batches": Exercise(
        15,
        "data.py",
        {"Batches.__call__": "sequence"},
        "the docstring of Batches",
        task="self.kept holds the indices of the sequences, self.n is their number. The order in "
        "epoch e is np.random.default_rng((self.seed, e)).permutation(self.kept). A batch may "
        "begin in one epoch and end in the next. self.corpus.sequences('train', indices, self.L) "
        "reads them.",
        hint="number the sequences of all epochs from 0 on. In which epoch is number i, and where?",
        second_hint="number i is in epoch i // self.n, at i % self.n of its order. Go through the "
        "numbers of the batch one by one and collect the indices; keep the last epoch's order in "
        "self.order, and its number in self.epoch, so that it is not computed for every sequence.",
        tests="batches_visit",
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
    """Write the project without the methods of an exercise to a new folder. Raises UserError."""
    exercise = EXERCISES[name]
    if folder.exists():
        raise UserError(f"{folder} exists already: give another folder, or delete it")
    source = (ROOT / exercise.file).read_text(encoding="utf-8")
    for method in exercise.methods:
        source = blank(source, method, exercise)
    with opening(folder):
        copy_files(folder, *CORE)
        (folder / exercise.file).write_text(source, encoding="utf-8")
        (folder / "exercise.txt").write_text(name)


def find_function(source, name):
    """The syntax node of a function such as "Tupe.bias"."""
    node = parse(source)
    for part in name.split("."):
        node = next(child for child in node.body if getattr(child, "name", None) == part)
    return node


def blank(source, name, exercise):
    """The source with one function reduced to its signature, docstring, task and hint."""
    node, lines = find_function(source, name), source.splitlines()
    # Without a docstring, a signature has one line.
    start = node.body[0].end_lineno if get_docstring(node) else node.lineno
    indent = " " * (node.col_offset + 4)
    comments = f"Exercise ({exercise.source}): {exercise.task}", f"Hint: {exercise.hint}"
    width = 94 - len(indent)
    stub = [f"{indent}# {line}" for text in comments for line in textwrap.wrap(text, width)]
    stub.append(f'{indent}raise NotImplementedError("{name} is not written yet")')
    return "\n".join(lines[:start] + stub + lines[node.end_lineno :]) + "\n"


# --------------------------------------------------------------------------------------------------
# Grading


def grade(folder):
    """Run the tests of an exercise on a student's copy, and print how many pass. Exits with 1 if
    one fails. Raises UserError."""
    if not (folder / "exercise.txt").is_file():
        raise UserError(f"{folder} was not made by python -m teach.exercises NAME")
    name = (folder / "exercise.txt").read_text()
    exercise = EXERCISES[name]
    with tempfile.TemporaryDirectory() as temporary:
        temporary = Path(temporary)
        copy_files(temporary, *CORE, "teach/exercises.py")
        with opening(folder / exercise.file):
            shutil.copyfile(folder / exercise.file, temporary / exercise.file)
        code = f"from teach.exercises import check; check({name!r}, {str(ROOT)!r})"
        command = [sys.executable, "-W", "ignore", "-c", code]
        try:
            run = subprocess.run(command, cwd=temporary, capture_output=True, timeout=TIMEOUT)
        except subprocess.TimeoutExpired:
            leave(1, f"{name}: not finished after {TIMEOUT} s: an infinite loop?")
        if not (temporary / "result.json").exists():
            raise UserError(f"the tests did not run: {run.stderr[-300:].decode(errors='replace')}")
        result = read_json(temporary / "result.json")
    methods = " and ".join(exercise.methods)
    print(f"{name}, {methods}: {result['passed']} of {result['total']} tests pass")
    if result["message"] or not result["total"]:
        print(result["message"])
        leave(1)


def check(name, original):
    """Run the tests of an exercise in the current folder, a copy of the original with the student's
    file in it; write result.json."""
    import pytest

    exercise = EXERCISES[name]
    watch = Watch()
    try:
        for method, axes in exercise.methods.items():
            watch.compare(exercise.file, method, axes, Path(original))
        flags = ["-p", "no:cacheprovider", "-m", "", "--tb=short", "-k", exercise.tests]
        pytest.main([*flags, "test_all.py"], plugins=[watch])
    except Exception:  # importing the student's file
        watch.message = traceback.format_exc(limit=-1)
    result = {"passed": sum(watch.outcomes), "total": len(watch.outcomes)}
    Path("result.json").write_text(json.dumps(result | {"message": watch.message}))


def describe_error(error, file):
    """-> the lines of the student's file that led to an error in it, and the error."""
    if isinstance(error, NotImplementedError):
        return str(error)
    frames = traceback.extract_tb(error.__traceback__)
    lines = [f"{file}:{f.lineno}: {f.line}" for f in frames if f.filename == os.path.abspath(file)]
    return "\n".join([*lines, f"{type(error).__name__}: {error}"])


def difference(name, result, expected, axes, args):
    """-> where a student's result differs from the original's, and the cause if it can be
    recognized; "" if they are equal. axes: names of the axes; args: the arguments of both."""
    if isinstance(result, tuple) and isinstance(expected, tuple) and len(result) == len(expected):
        found = [
            difference(f"{name}, result {n}", *pair, axes, args)
            for n, pair in enumerate(zip(result, expected))
        ]
        return next(filter(None, found), "")
    tolerance = dict(rtol=1e-4, atol=1e-6, equal_nan=True)
    try:
        torch.testing.assert_close(result, expected, **tolerance, check_dtype=False)
        return ""
    except (AssertionError, TypeError, ValueError) as error:
        intro = f"{name} does not return what the original returns."
        if type(result) is not type(expected):
            types = (type(x).__name__ for x in (result, expected))
            return "{} Its result is a {}, the original's a {}.".format(intro, *types)
        if not isinstance(result, (torch.Tensor, np.ndarray)):
            return f"{intro} {error}"
    a, b = torch.as_tensor(result).double(), torch.as_tensor(expected).double()
    names, lines = axes.split(), [intro]
    if len(names) != b.dim():
        names = [f"axis {d}" for d in range(b.dim())]
    if a.shape != b.shape:
        shape = ", ".join(f"{axis} {n}" for axis, n in zip(names, b.shape))
        lines.append(f"Its shape is {tuple(a.shape)}, the original's {tuple(b.shape)}: {shape}.")
        if not b.dim() or a.shape != (1, *b.shape[1:]):
            return "\n".join(lines)
        a = a.expand_as(b)  # a result for one sequence may be right for some of them
    wrong = ~torch.isclose(a, b, **tolerance)
    if wrong.any():
        first = tuple(wrong.nonzero()[0].tolist())
        where = ", ".join(f"{axis} {n}" for axis, n in zip(names, first))
        values = f"{a[first]:.4g} instead of {b[first]:.4g}"
        count = f"{wrong.sum()} of {wrong.numel()} numbers differ. "
        lines.append(f"{count}At {where}: {values}." if first else f"It is {values}.")
    moved = [(x.ids != torch.arange(x.ids.size(1))).any(1) for x in args if hasattr(x, "ids")]
    for d, axis in enumerate(names):
        differs = wrong.movedim(d, 0).reshape(wrong.size(d), -1).any(1)
        agree, differ = (
            ", ".join(map(str, x.nonzero()[:, 0].tolist())) for x in (~differs, differs)
        )
        cause = ""
        if axis == "sequence" and moved and torch.equal(differs, moved[0]):
            cause = " (whose positions are not 0, 1, 2, ...)"
        elif axis in ("token", "query", "key") and differ == "0":
            cause = " ([CLS])"
        if agree and differ:
            lines.append(f"{axis}: {differ} wrong{cause}, {agree} right")
    factor = (a * b).sum() / a.square().sum()
    if wrong.any() and wrong.dim() and torch.allclose(factor * a, b, 1e-4, 1e-6):
        lines.append(f"All numbers are right if multiplied by {factor:.4g}.")
    if a.dim() > 1 and a.mT.shape == b.shape and torch.allclose(a.mT, b, 1e-4, 1e-6):
        lines.append(f"The axes {names[-2]} and {names[-1]} are exchanged.")
    return "\n".join(lines)


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

    def compare(self, file, name, axes, original):
        """Make the student's function also call the original on the same input."""
        module = file.removesuffix(".py").replace("/", ".")
        owner = importlib.import_module(module)
        reference = SimpleNamespace(**runpy.run_path(str(original / file)))
        *classes, method = name.split(".")
        for part in classes:
            owner, reference = getattr(owner, part), getattr(reference, part)
        is_static = isinstance(vars(owner).get(method), staticmethod)
        student, reference = getattr(owner, method), getattr(reference, method)

        @functools.wraps(student)
        def both(*args):
            __tracebackhide__ = True
            inputs = [copy.copy(arg) for arg in args]
            try:
                result = student(*args)
            except Exception as error:
                self.difference = self.difference or describe_error(error, file)
                raise
            # Random numbers may be drawn in another order.
            if not self.difference and not any(isinstance(arg, torch.Generator) for arg in args):
                with torch.no_grad():
                    expected = reference(*inputs)
                self.difference = difference(name, result, expected, axes, args)
            return result

        setattr(owner, method, staticmethod(both) if is_static else both)


# --------------------------------------------------------------------------------------------------
# The program


def print_list():
    print(f"{'name':12} {'minutes':>7}  {'equation':26}{'write':18}")
    for name, e in EXERCISES.items():
        print(f"{name:12} {e.minutes:7}  {e.source:26}{e.file:18}{', '.join(e.methods)}")
    print("\npython -m teach.exercises NAME copies the project; write the method there.")
    print("python -m teach.exercises --hint NAME prints a second hint; the first is in the copy.")


def main(argv=None):
    with one_line_errors():
        parser = Parser("-m teach.exercises", __doc__)
        mode = parser.add_mutually_exclusive_group().add_argument
        names = {"choices": EXERCISES, "metavar": "NAME"}
        mode("name", nargs="?", **names, help="copy the project for this exercise")
        mode("--hint", **names, help="print a second hint")
        mode("--grade", metavar="FOLDER", help="run the tests on this copy")
        parser.add_argument("folder", nargs="?", help="of the copy (default: exercises/NAME)")
        args = parser.parse_args(argv)
        if args.hint:
            return print(textwrap.fill(f"Second hint: {EXERCISES[args.hint].second_hint}", 100))
        if args.grade:
            return grade(Path(os.path.expanduser(args.grade)))
        if args.name is None:
            return print_list()
        folder = Path(os.path.expanduser(args.folder or f"exercises/{args.name}"))
        make_copy(args.name, folder)
        exercise = EXERCISES[args.name]
        print(f"Write {' and '.join(exercise.methods)} in {folder / exercise.file}, then run")
        print(f"python -m teach.exercises --grade {shlex.quote(folder.as_posix())}")


if __name__ == "__main__":
    main()
