"""teach/: the losses of naive.py, and the exercises with their hints and grading."""

import ast
import re
import shutil

import pytest

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


@pytest.mark.slow
def test_grade_shows_the_first_error(tmp_path, capsys):
    """A wrong method is compared with the original; one that fails is shown with its error."""
    exercises.make_copy("reset", tmp_path / "copy")
    source, old = (ROOT / "model.py").read_text(), "v[..., 0, :] = theta_1"
    assert old in source
    wrong = {"pass": "reset_cls does not return", f"{old} +": "SyntaxError"}
    for new, message in wrong.items():
        (tmp_path / "copy" / "model.py").write_text(source.replace(old, new))
        assert exit_code(exercises.main, ["--grade", str(tmp_path / "copy")]) == 1
        assert message in capsys.readouterr().out


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
