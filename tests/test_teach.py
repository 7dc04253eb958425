"""teach/: the losses of naive.py, and the exercises with their grading."""

import ast
import re
import shutil

import pytest
import torch

from model import Encoder, EncoderConfig
from objectives import ObjectiveConfig, Pretraining
from teach import exercises, naive
from teach.exercises import EXERCISES
from tests.conftest import ROOT, exit_code, one_line

L, CLS, SEP = 10, 64, 66  # with a vocabulary of 64 ordinary tokens and the 8 special ones


@pytest.mark.parametrize("objective", ["mlm", "pplm"])
def test_naive_losses_equal_the_model(objective):
    """mlm_loss and pplm_loss of naive.py are the losses of objectives.py."""
    torch.manual_seed(0)
    config = EncoderConfig(
        vocab_size=72, n_layer=1, n_head=2, d_model=16, d_ff=32, max_len=L, dropout=0.0
    )
    model = Pretraining(Encoder(config), ObjectiveConfig(objective, mask_rate=0.4)).double().eval()
    tokens = torch.randint(0, CLS, (1, L))
    tokens[0, 0], tokens[0, 4], tokens[0, -1] = CLS, SEP, SEP
    batch = model.corrupt(tokens, 0)
    hidden = model.encoder(batch["tokens"], batch.get("pos"))
    part = model.objectives[objective]
    if objective == "mlm":
        logits = part.token_logits(model.encoder, hidden)[0]
        expected = naive.mlm_loss(logits, tokens[0], batch["mlm_slots"][0].tolist())
    else:
        scores = part.head.scores(model.encoder, hidden, batch["pos"])[0]  # (n, n, H)
        eligible = [token < CLS for token in tokens[0].tolist()]
        expected = naive.pplm_loss(lambda i, j: part.head.psi(scores[i - 1, j - 1]), L, eligible)
    torch.testing.assert_close(model(batch)[0].double(), expected, rtol=0, atol=1e-6)


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
    files = {str(file.relative_to(tmp_path / "copy")) for file in tmp_path.rglob("copy/**/*.py")}
    assert {"train.py", "test_all.py", "lib/config.py", "teach/naive.py"} <= files
    assert "teach/exercises.py" not in files


@pytest.mark.slow
@pytest.mark.parametrize("name", EXERCISES)
def test_exercise_fails_until_it_is_written(name, tmp_path, capsys):
    """A blank method fails the deciding tests."""
    folder, exercise = tmp_path / "copy", EXERCISES[name]
    exercises.make_copy(name, folder)
    assert exit_code(exercises.main, ["--grade", str(folder)]) == 1
    out = capsys.readouterr().out
    assert re.search(f"({'|'.join(exercise.methods)}) is not written yet", out), out
    assert "0 of 0" not in out


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tupe", "mlm", "batches"])
def test_the_original_passes(name, tmp_path, capsys):
    """With the original method the deciding tests pass, even if the student has damaged another
    file."""
    folder, exercise = tmp_path / "copy", EXERCISES[name]
    exercises.make_copy(name, folder)
    (folder / "train.py").write_text("damaged")
    shutil.copy(ROOT / exercise.file, folder / exercise.file)
    assert exit_code(exercises.main, ["--grade", str(folder)]) is None
    passed, total = re.search(r"(\d+) of (\d+) tests pass", capsys.readouterr().out).groups()
    assert passed == total != "0"


@pytest.mark.slow
@pytest.mark.parametrize(
    "old, new, message",
    [
        ("v[..., 0, :] = theta_1", "pass", "reset_cls returns another result than the original"),
        ("v[..., 0, :] = theta_1", "v[..., 0, :] = theta_1 +", "SyntaxError"),
        ("v[..., 0, :] = theta_1", "return v[0]", "'shape' do not match"),
    ],
)
def test_grade_shows_the_first_error(old, new, message, tmp_path, capsys):
    """A wrong method is compared with the original; one that fails is shown with its error."""
    exercises.make_copy("reset", tmp_path / "copy")
    source = (ROOT / "model.py").read_text()
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
