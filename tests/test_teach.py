"""teach/: the losses of naive.py, and the exercises with their hints and grading."""

import ast
import re
import shutil

import numpy as np
import pytest
import torch

from model import Positions
from teach import exercises, naive
from teach.exercises import EXERCISES
from test_all import CLS, close, corrupted
from tests.conftest import ROOT, exit_code, one_line


def test_naive_losses_equal_the_model():
    """mlm_loss and pplm_loss of naive.py are the losses of objectives.py."""
    model, tokens, batch = corrupted("mlm", B=1)
    logits = model.objectives["mlm"].token_logits(model.encoder, model.encoder(batch["tokens"]))[0]
    loss = naive.mlm_loss(logits, tokens[0].tolist(), batch["mlm_slots"][0].tolist())
    close(model(batch)[0], loss, 1e-6)
    model, tokens, batch = corrupted("pplm", B=1)
    head, encoder = model.objectives["pplm"].head, model.encoder
    states = encoder.hidden_states(batch["tokens"], batch["pos"])
    psi = head.psi(head.scores(encoder, states, batch["pos"])[0])  # (n, n, classes)
    eligible = (tokens[0] < CLS).tolist()
    loss = naive.pplm_loss(lambda i, j: psi[i - 1, j - 1], tokens.size(1), eligible)
    close(model(batch)[0], loss, 1e-6)


def test_requirements_are_those_of_the_results():
    """The class installs the versions with which the results were measured."""
    measured, pinned = (
        dict(re.findall(r"^([\w-]+)==([\w.]+)", (ROOT / file).read_text(), re.MULTILINE))
        for file in ("results/environment.txt", "teach/requirements.txt")
    )
    assert {"torch", "numpy", "pandas", "datasets", "tiktoken"} <= pinned.keys()
    assert pinned.items() <= measured.items()


@pytest.mark.slow
@pytest.mark.parametrize("name", EXERCISES)
def test_solution_passes_and_stub_fails(name, tmp_path, capsys):
    """The copy lacks the methods to write and nothing else; without them the deciding tests fail.
    With the original ones all pass, even if the student has damaged another file."""
    folder, exercise = tmp_path / "copy", EXERCISES[name]
    exercises.make_copy(name, folder)
    before, after = (path.joinpath(exercise.file).read_text() for path in (ROOT, folder))
    for method in exercise.methods:
        original, stub = (exercises.find_function(text, method) for text in (before, after))
        assert ast.unparse(stub.args) == ast.unparse(original.args)
        assert ast.get_docstring(stub) == ast.get_docstring(original)
        assert isinstance(stub.body[-1], ast.Raise)
    added = set(after.splitlines()) - set(before.splitlines())
    assert all(re.match(r" +(#|raise NotImplementedError)", line) for line in added)
    exercises.main(["--hint", name])
    assert exercise.second_hint in " ".join(capsys.readouterr().out.split())
    assert exit_code(exercises.main, ["--grade", str(folder)]) == 1
    assert re.search(f"({'|'.join(exercise.methods)}) is not written yet", capsys.readouterr().out)
    (folder / "train.py").write_text("damaged")
    shutil.copy(ROOT / exercise.file, folder / exercise.file)
    assert exit_code(exercises.main, ["--grade", str(folder)]) is None
    passed, total = re.search(r"(\d+) of (\d+) tests pass", capsys.readouterr().out).groups()
    assert passed == total != "0"


def test_stubs_name_their_arguments():
    """Docstring and task of a method to write mention all of its arguments."""
    for exercise in EXERCISES.values():
        source = (ROOT / exercise.file).read_text()
        for method in exercise.methods:
            node = exercises.find_function(source, method)
            text = f"{ast.get_docstring(node)} {exercise.task} {exercise.hint}"
            for arg in node.args.args:
                named = arg.arg == "self" or re.search(rf"\b{arg.arg}\b", text)
                assert named, f"{method}: {arg.arg}"


def test_difference_names_axes_and_causes():
    """A wrong result is described by the names of its axes; a factor, a transpose, a wrong shape,
    [CLS] and positions that were not used are recognized."""
    right, axes = torch.randn(3, 2, 5, 5), EXERCISES["tupe"].methods["Tupe.bias"]
    pos = Positions(torch.tensor([[0, 1, 2, 3, 4], [0, 4, 2, 1, 3], [0, 2, 1, 3, 4]]))

    def describe(result, expected=right, axes=axes):
        return exercises.difference("f", result, expected, axes, [pos])

    assert describe(right.clone()) == "" == describe((right, {}), (right, {}))
    wrong = right.clone()
    wrong[:, 1, 1:, 0] += 1
    for line in ("12 of 150", "sequence 0, head 1, query 1, key 0", "key: 0 wrong ([CLS]), 1, 2"):
        assert line in describe(wrong)
    shared = describe(right[:1])
    assert "sequence: 1, 2 wrong (whose positions are not 0, 1, 2, ...), 0 right" in shared
    assert (
        "shape is (1, 2, 5, 5), the original's (3, 2, 5, 5): sequence 3, head 2, query 5" in shared
    )
    assert "multiplied by -0.5" in describe(-2 * right)
    assert "query and key are exchanged" in describe(right.mT)
    assert "shape is (3, 2, 4)" in describe(right[..., 0, :4])
    assert "a NoneType, the original's a Tensor" in describe(None)
    assert "f, result 1 does" in describe((right, wrong), (right, right))
    assert "axis 0: 1 wrong, 0, 2" in describe(np.array([0, 1, 2]), np.array([0, 3, 2]))
    assert "shape is (1, 3, 2, 5, 5)" in describe(right[None])
    assert "shape is ()" in describe(right[0, 0, 0, 0])
    assert "It is 2 instead of 1." in describe(torch.tensor(2.0), torch.tensor(1.0), "")
    assert "shape is (1,)" in describe(torch.ones(1), torch.tensor(1.0), "")
    assert "shape is ()" in describe(torch.tensor(1.0), torch.ones(1), "")


@pytest.mark.slow
def test_grade_shows_the_first_error(tmp_path, capsys):
    """A wrong method is compared with the original; one that fails is shown with its error."""
    exercises.make_copy("reset", tmp_path / "copy")
    source, old = (ROOT / "model.py").read_text(), "v[..., 0, :] = theta_1"
    assert old in source
    wrong = {
        "pass": "reset_cls does not return",
        f"{old} +": "SyntaxError",
        "v.fill(0)": ": v.fill(0)  # including (0, 0)\nAttributeError: 'Tensor'",
        'raise NotImplementedError("not yet")': "[tupe_a-post]\nnot yet\n",
    }
    for new, message in wrong.items():
        (tmp_path / "copy" / "model.py").write_text(source.replace(old, new))
        assert exit_code(exercises.main, ["--grade", str(tmp_path / "copy")]) == 1
        printed = capsys.readouterr().out
        assert message in printed and "site-packages" not in printed


@pytest.mark.parametrize(
    "flags, message",
    [
        ("tup", "invalid choice: 'tup'"),
        ("tupe .", "exists already"),
        ("--grade none", "was not made by"),
    ],
)
def test_mistakes_are_one_line(flags, message, capsys):
    """A wrong argument ends in one line that says what is allowed."""
    assert message in one_line(capsys, exercises.main, flags.split())
