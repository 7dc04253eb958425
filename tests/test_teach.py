"""teach/: the losses of naive.py, and the exercises with their grading."""

import ast
import re
import shutil

import pytest
import torch

from teach import exercises, naive
from teach.exercises import EXERCISES
from test_all import CLS, corrupted
from tests.conftest import ROOT, exit_code, one_line


@pytest.mark.parametrize("objective", ["mlm", "pplm"])
def test_naive_losses_equal_the_model(objective):
    """mlm_loss and pplm_loss of naive.py are the losses of objectives.py."""
    model, tokens, batch = corrupted(objective, B=1)
    hidden = model.encoder(batch["tokens"], batch.get("pos"))
    part, tokens = model.objectives[objective], tokens[0].tolist()
    if objective == "mlm":
        logits = part.token_logits(model.encoder, hidden)[0]
        expected = naive.mlm_loss(logits, tokens, batch["mlm_slots"][0].tolist())
    else:
        scores = part.head.scores(model.encoder, hidden, batch["pos"])[0]  # (n, n, H)
        eligible = [token < CLS for token in tokens]
        psi = part.head.psi
        expected = naive.pplm_loss(lambda i, j: psi(scores[i - 1, j - 1]), len(tokens), eligible)
    torch.testing.assert_close(model(batch)[0], expected, rtol=0, atol=1e-6, check_dtype=False)


@pytest.mark.parametrize("name", EXERCISES)
def test_copy_lacks_only_the_methods_to_write(name, tmp_path):
    """A stub keeps signature and docstring, and nothing else in the file changes."""
    exercise = EXERCISES[name]
    exercises.make_copy(name, tmp_path / "copy")
    before, after = (f.joinpath(exercise.file).read_text() for f in (ROOT, tmp_path / "copy"))
    for method in exercise.methods:
        original, stub = (exercises.find_function(text, method) for text in (before, after))
        docstring = ast.get_docstring(original)
        assert ast.unparse(stub.args) == ast.unparse(original.args)
        assert ast.get_docstring(stub) == docstring
        assert isinstance(stub.body[-1], ast.Raise) and len(stub.body) == 1 + bool(docstring)
    added = [line for line in after.splitlines() if line not in before.splitlines()]
    assert all(re.match(r" +(#|raise NotImplementedError)", line) for line in added)
    assert not (tmp_path / "copy" / "teach" / "exercises.py").exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", EXERCISES)
def test_grade(name, tmp_path, capsys):
    """A blank method fails the deciding tests. With the original one they pass (one is tried),
    even if the student has damaged another file."""
    folder, exercise = tmp_path / "copy", EXERCISES[name]
    exercises.make_copy(name, folder)
    assert exit_code(exercises.main, ["--grade", str(folder)]) == 1
    assert re.search(f"({'|'.join(exercise.methods)}) is not written yet", capsys.readouterr().out)
    if name != "tupe":
        return
    (folder / "train.py").write_text("damaged")
    shutil.copy(ROOT / exercise.file, folder / exercise.file)
    assert exit_code(exercises.main, ["--grade", str(folder)]) is None
    passed, total = re.search(r"(\d+) of (\d+) tests pass", capsys.readouterr().out).groups()
    assert passed == total != "0"


@pytest.mark.slow
@pytest.mark.parametrize(
    "new, message",
    [
        ("pass", "reset_cls returns another result than the original"),
        ("v[..., 0, :] = theta_1 +", "SyntaxError"),
    ],
)
def test_grade_shows_the_first_error(new, message, tmp_path, capsys):
    """A wrong method is compared with the original; one that fails is shown with its error."""
    exercises.make_copy("reset", tmp_path / "copy")
    source, old = (ROOT / "model.py").read_text(), "v[..., 0, :] = theta_1"
    assert old in source
    (tmp_path / "copy" / "model.py").write_text(source.replace(old, new))
    assert exit_code(exercises.main, ["--grade", str(tmp_path / "copy")]) == 1
    assert message in capsys.readouterr().out


def test_copy_of_a_read_only_checkout_is_writable(tmp_path, monkeypatch):
    """Contents are copied and not permissions, so the student can edit every file."""
    checkout = tmp_path / "checkout"
    exercises.copy_files(checkout, *exercises.CORE)
    for path in [*checkout.rglob("*"), checkout]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    monkeypatch.setattr(exercises, "ROOT", checkout)
    exercises.make_copy("tupe", tmp_path / "copy")
    copied = [*tmp_path.rglob("copy/**/*")]
    assert len(copied) > 10 and all(path.stat().st_mode & 0o200 for path in copied)


def test_copy_that_fails_leaves_nothing(tmp_path, monkeypatch):
    """A folder appears only when it is complete: a half-made one would contain the answer."""
    monkeypatch.setitem(EXERCISES, "tupe", EXERCISES["tupe"]._replace(methods=["Tupe.missing"]))
    with pytest.raises(ValueError, match=r"no Tupe\.missing"):
        exercises.make_copy("tupe", tmp_path / "copy")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "flags, message",
    [
        (["tup"], "unknown exercise 'tup'; choose from attention, tupe,"),
        (["tupe", "."], "exists already"),
        (["--grade", "none"], "was not made by"),
        (["tupe", "--grade", "."], "not both"),
    ],
)
def test_mistakes_are_one_line(flags, message, capsys):
    """A wrong argument ends in one line that says what is allowed."""
    assert message in one_line(capsys, exercises.main, flags)
