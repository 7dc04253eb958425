"""tools/order.py: the tasks on sequences written out by hand, and its baselines."""

from types import SimpleNamespace

import pytest
import torch

from tests.conftest import one_line
from tools import order

# {task: [(tokens, answers), ...]}: tokens 0 to 9, the markers * and +; - where there is no answer
BY_HAND = {
    "left neighbor": [("3 1 4 1 5", "- 3 1 4 1")],
    "right neighbor": [("3 1 4 1 5", "1 4 1 5 -")],
    "5 to the left": [("3 1 4 1 5 9 2", "- - - - - 3 1")],
    "20 to the left": [
        (22 * "7 " + "8", 20 * "- " + "7 7 7"),
        (3 * "1 2 3 4 5 6 7 ", 20 * "- " + "1"),
    ],
    "first token": [("3 1 4", "3 3 3")],
    "mirror image": [("3 1 4 1 5", "5 1 4 1 3")],
    "index odd?": [("3 1 4 1 5", "0 1 0 1 0")],
    "last marker before": [("3 * 4 + 5 * *", "- - 0 0 1 1 0")],
    "token after marker": [("3 1 * 1 5", "1 1 1 1 1"), ("* 2 3", "2 2 2")],
    "which marker first?": [("3 * 4 + 5", "0 0 0 0 0"), ("+ * 4", "1 1 1")],
    "seen before?": [("3 1 4 1 3 3", "0 0 0 1 1 1")],
}
ARGS = SimpleNamespace(length=34, vocab=10)


@pytest.mark.parametrize("task", order.TASKS)
def test_answers(task):
    """The answers are those of sequences written out by hand."""
    for tokens, answers in BY_HAND[task]:
        x = torch.tensor([[10 if t == "*" else 11 if t == "+" else int(t) for t in tokens.split()]])
        expected = [order.UNSCORED if t == "-" else int(t) for t in answers.split()]
        assert order.TASKS[task][0](x, 10).tolist() == [expected]


def test_markers():
    """Tasks with markers have them where the answers need them: each once, before the last token,
    or often."""
    generator, found = torch.Generator().manual_seed(0), {}
    for task in order.TASKS:
        x, _ = order.draw_batch(task, 200, 32, 10, generator)
        found[task] = [(x == marker).sum(1) for marker in (10, 11)]
        if task in ("token after marker", "which marker first?"):
            assert (x[:, -1] < 10).all() and (found[task][0] == 1).all()
    assert (found.pop("which marker first?")[1] == 1).all()
    assert (found.pop("token after marker")[1] == 0).all()
    assert all(3 < sum(found.pop("last marker before")).double().mean() < 5 for _ in "x")
    assert all(a.sum() == b.sum() == 0 for a, b in found.values())


def test_what_a_bag_of_tokens_knows():
    """`chance` gives the most frequent answer. `bag` is what an enumeration of all orders gives: it
    cannot tell odd indices or the order of two markers, and names the left neighbor as the token
    that is most frequent among the others."""
    for task in ("index odd?", "which marker first?"):
        assert order.chance(task, ARGS) == pytest.approx(0.5, abs=0.05)
        assert order.bag_of_tokens(task, ARGS) == pytest.approx(0.5, abs=0.03)
    x, _ = order.draw_batch(
        "left neighbor",
        64,
        32,
        10,
        order.seeded_generator("cpu", "order", "left neighbor", "test", 1),
    )
    expected = []
    for row in x.tolist():
        for i in range(32):
            others = row[:i] + row[i + 1 :]
            expected.append(max(map(others.count, others)) / 31)
    assert order.bag_of_tokens("left neighbor", ARGS) == pytest.approx(
        sum(expected) / len(expected), abs=0.01
    )


def test_an_encoder_learns_what_its_scheme_can_represent(capsys):
    """In some steps, t5 learns to name its neighbors, and none cannot; a mistake is one line."""
    flags = "--tasks", "left neighbor", "--vocab", "4", "--length", "24", "--steps", "120"
    order.main(["--pe", "none,t5", *flags])
    row = capsys.readouterr().out.splitlines()[3].split("|")
    none, t5, bag = (float(cell.split(",")[0]) for cell in row[2:5])
    assert t5 > 0.9 and none < bag + 0.03 and none < 0.6
    assert "unknown --pe 'foo'" in one_line(capsys, order.main, ["--pe", "rope,foo"])
    assert "unknown task 'x'" in one_line(capsys, order.main, ["--pe", "t5", "--tasks", "x"])


def test_the_output_layer_can_begin_at_zero():
    """Without learning, the answer is then always 0, and hidden states still tell tokens apart."""
    args = "--pe none --length 24 --steps 20 --lr 1e-50 --zero_head".split()
    accuracies, [[step, accuracy, spread]] = order.measure(
        "none", "index odd?", 0, order.parse_args(args)
    )
    assert accuracies == [0.5] * 3 and (step, accuracy) == (20, 0.5) and 0.9 < spread <= 1
