"""The driver in results/: its tables, its rows, what it prints, and a tiny table end to end."""

import itertools
import json
import os
import re
import shlex
import statistics
from pathlib import PureWindowsPath

import matplotlib
import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text

import finetune
import model
import train
from model import Encoder, EncoderConfig, Positions
from results import cells, figures, longer, run, show
from results.show import without_seed
from tests.conftest import TINY, exit_code, one_line, write_corpus
from tools import dynamics, probe


@pytest.mark.slow
def test_tables_and_rows_agree(monkeypatch, capsys):
    """Every command of tables.txt is accepted by its program; runs.jsonl has every row but those of
    the papers' tables, made by today's commands (tools.dynamics was a mode of tools.probe, and demo
    the preset of all objectives), without
    paths, and printed with its loss."""
    monkeypatch.delenv("BLIMP", raising=False)
    programs = {"train.py": train, "finetune.py": finetune, "tools.probe": probe}
    rows, parsed = run.all_rows(), set()
    for table, runs in run.TABLES.items():
        for name in runs:
            parts = run.commands(table, name)
            assert parts == run.commands(table, name, PureWindowsPath(run.OUT))
            if table not in run.PAPERS:
                made = json.dumps(rows[name]["commands"])
                made = json.loads(made.replace("probe --dynamics", "dynamics --ckpt"))
                plain = {part: x.replace("--preset demo ", "") for part, x in parts.items()}
                assert plain.items() <= made.items(), name
            for start in re.findall(r"--init_\w+ out/results/(\S+)", parts["train"]):
                run.find(start)  # raises an error if it is in no table
            for command in parts.values():
                command = re.sub(r"--seed \d+|/results/\S+|-m ", "", command)  # seeds aside
                _, program, *flags = shlex.split(command)
                if program in programs and command not in parsed:
                    programs[program].parse_args(flags)
                parsed.add(command)
    run.main([])
    lines = capsys.readouterr().out.splitlines()
    for row in rows.values():
        run.find(row["run"])
        assert not re.search(r"/(work|home|tmp|root|mnt)\b", json.dumps(row))
        found = [line for line in lines if line.startswith(f"| {without_seed(row['run'])} ")]
        assert any(f"{show.loss(row):.3f}" in line for line in found)


def test_ranking():
    """The table of all schemes: losses from the commands of the rows, parameters from two models,
    what is known of the schemes, and rows of table `ranking`."""
    rows, expected = run.all_rows(), {}
    for row in rows.values():
        command = r'python train.py --pe (\S+) --steps 3000 --seed \d+ --dataset "\$TEXT".*'
        found = re.fullmatch(command, row["commands"]["train"])
        if found and row["run"].startswith(found[1] + "-s"):
            expected.setdefault(found[1], []).append(row["val_loss"])
    rank = sorted(expected, key=lambda pe: sum(expected[pe]) / len(expected[pe]))
    table = {line["scheme"]: line for line in show.ranking(rows)}
    assert [*table] == rank and len(rank) == 30
    none = Encoder(EncoderConfig(vocab_size=8192, pe="none"))
    for pe, line in table.items():
        assert line["loss, 6 M tokens"] == f"{sum(expected[pe]) / len(expected[pe]):.2f}"
        assert line["seeds, 6 M"] == ", ".join(f"{x:.3f}" for x in expected[pe])
        more = sum(p.numel() for p in Encoder(EncoderConfig(vocab_size=8192, pe=pe)).parameters())
        assert line["parameters added"] == f"{more - sum(p.numel() for p in none.parameters()):,}"
        limited = re.search(r"abs|tupe|\bbert", pe)
        assert line["longest sequence"] == ("max_len" if limited else "any")
        assert line["masked positions"] == ("no" if pe == "rope" else "yes")
    assert table["abs+t5"]["family"] == "relative offset"  # of its relative part
    later = {"t5": "rank-t5-s1337", "abs": "abs-post-1e-3-24000-s1337"}
    for pe, run_name in later.items():
        assert table[pe]["loss, 49 M tokens"] == f"{rows[run_name]['val_loss']:.2f}"
    assert table["rel_k"]["loss, 49 M tokens"] == ""


def overlapping_texts(axes):
    """-> pairs of labels of a figure that overlap, and labels that it cuts off."""
    canvas, found = FigureCanvasAgg(axes.figure), []
    canvas.draw()
    texts = axes.figure.texts + [text for panel in axes.figure.axes for text in panel.texts]
    boxes = [(text.get_text(), text.get_window_extent()) for text in texts]
    width, height = canvas.get_width_height()
    for i, (one, A) in enumerate(boxes):
        if min(A.x0, A.y0) < -2 or A.x1 > width + 2 or A.y1 > height + 2:
            found.append((one, "cut off"))
        for other, B in boxes[i + 1 :]:
            if min(A.x1, B.x1) - max(A.x0, B.x0) > 1 and min(A.y1, B.y1) - max(A.y0, B.y0) > 2:
                found.append((one, other))
    return found


@pytest.mark.slow
def test_figures():
    """Every figure is drawn, no labels overlap, and all are at least 9 pixels high on a phone of
    390. The titles of the rankings and of the lengths follow from the rows."""
    rows, found = run.all_rows(), {}
    files = {file.name for file in (run.HERE.parent / "docs" / "figures").iterdir()}
    assert {*figures.FIGURES, "terms.png", "maps.png", "maps-long.png"} == files
    with matplotlib.rc_context(figures.STYLE):
        for file, paint in figures.FIGURES.items():
            axes = paint(rows)
            found[file] = overlapping_texts(axes)
            points = min(text.get_fontsize() for text in axes.figure.findobj(Text))
            assert points / 72 * 390 / axes.figure.get_figwidth() >= 9, file
    assert not any(found.values()), found
    losses = {pe: sum(x) / len(x) for pe, (x, _) in show.scheme_losses(rows).items()}
    gains = {pe: losses["none"] - loss for pe, loss in losses.items() if pe != "none"}
    inputs = {"abs", "sin", "lsin"}
    assert all(gain < 0 if pe in inputs else gain > 0.4 for pe, gain in gains.items())
    later = {pe: x[0] for pe, (_, x) in show.scheme_losses(rows).items() if x}  # seed 1337
    close = [pe for pe in later if later[pe] < min(later.values()) + 0.135]
    assert len(close) == 8 and 0.55 < later["abs"] - later["rope"] < 0.65
    wide = {pe: rows[f"lab-{pe}-12000"]["val_loss"] for pe in ("abs", "rope")}
    assert 0.25 < wide["abs"] - wide["rope"] < 0.35
    for name, row in rows.items():
        losses = [*row.get("lengths", {64: 0, 512: 1}).values()]  # one, if a table ends there
        first, last = losses[0], losses[-1]
        if re.match("long-(deberta|alibi)", name):
            assert last < first + 0.01
        elif row["args"]["block_size"] == 64:
            assert last > first


def test_what_cannot_be_made(monkeypatch, capsys, tmp_path):
    """A mistake is one line; of a command that fails, it is the last line that it printed. A row
    that lacks a part is left alone if its weights are not there: nothing is trained."""
    monkeypatch.delenv("TEXT", raising=False)
    assert "no table or run nothing" in one_line(capsys, run.main, ["nothing"])
    assert exit_code(run.main, ["schemes"]) is None  # nothing is lacking
    assert "## schemes" in capsys.readouterr().out
    with monkeypatch.context() as patch:
        patch.setattr(run, "ROWS", tmp_path / "none.jsonl")
        assert "$TEXT" in one_line(capsys, run.main, ["schemes"])
    monkeypatch.setenv("TEXT", r"C:\my texts\*.txt")  # no shell changes a path
    with pytest.raises(
        run.CommandFailed, match=r"b ended with 3 \(see .*run.log\): C:.my texts.\*.txt$"
    ):
        run.call('python -c "import sys; print(sys.argv[1]); exit(3)" "$TEXT"', tmp_path / "b")
    monkeypatch.delenv("TEXT")
    monkeypatch.setenv("BLIMP", "x")
    monkeypatch.setattr(run, "call", lambda *args: pytest.fail("a command was run"))
    monkeypatch.setattr(run, "OUT", tmp_path)
    run.make_row("schemes", "none-s1", "")
    assert "none-s1: skipped blimp" in capsys.readouterr().out


@pytest.mark.parametrize("pe, steps", [("rel_k", 1500), ("abs", 40)])
def test_mine(tmp_path, monkeypatch, capsys, pe, steps):
    """`mine` ranks a scheme among those of docs by its loss, and says if its text or its number of
    steps is another. It trains and measures once."""
    ours, called = run.all_rows()["docs-rope-s1337"], []

    def call(command, folder):
        called.append(command.split()[1:3][-1] if "-m" in command else "train")
        run.make_folder(folder)
        if called[-1] == "train":
            args = {"pe": pe, "seed": 1337, "objective": "mlm", "steps": steps}
            first = {"args": args, "git": "", "precision": ["cpu", "float32"]}
            run.append_jsonl(folder / "log.jsonl", first | {"baselines": baselines})
            last = {"step": steps, "loss": 3.7, "val_loss": 3.75, "ms_per_step": 1.0}
            run.append_jsonl(folder / "log.jsonl", last)
        elif called[-1] == "tools.bench":
            json_file = shlex.split(command)[-1]
            run.write_json(json_file, {"rows": [{"pe": pe, "speed": 0.5}]})
        elif called[-1] == "tools.lengths":
            losses = {64: 4.0, 128: 4.25, 256: 4.5, 512: 5.0}
            run.make_folder(folder / "lengths")
            run.write_json(folder / "lengths" / "lengths.json", {"lengths": losses})

    def mine(*more):
        assert exit_code(run.main, ["mine", "--pe", pe, "--steps", str(steps), *more]) is None
        return capsys.readouterr().out

    monkeypatch.setattr(run, "call", call)
    monkeypatch.setattr(run.order.order, "measure", lambda *args: ([1.0, 0.5, 0.25], [[20, 0.1]]))
    monkeypatch.chdir(tmp_path)
    baselines = ours["baselines"]
    out = mine()
    comparable = steps == 1500
    assert ("not comparable: it was trained for 40 steps" in out) is not comparable
    others = {k: rows for k, rows in show.docs_schemes(run.all_rows()).items() if k != pe}
    rank = 1 + sum(statistics.mean(map(show.loss, rows)) < 3.75 for rows in others.values())
    assert re.search(rf"\| -> \| {rank} +\| {pe} +\| 3.75 \| 3.750 +\| 2.0 ", out)
    assert "| left neighbor       | 1.00, 0.50, 0.25 |" in out
    measured = ["tools.lengths"] if pe == "rel_k" else []  # abs has a table of positions
    assert called == ["train", *measured, "tools.bench", "tools.probe"]
    folder = tmp_path / "out" / "mine" / f"{pe}-{steps}"
    figures = {"ranking.png", "order.png"}
    if measured:
        figures.add("lengths.png")
        assert re.search(rf"\| {pe} .* 4.00 .* \+0.25 .* \+0.50 .* \+1.00", out)
    assert {file.name for file in folder.iterdir()} == {"done.json", *figures}
    called.clear()
    baselines = {"unigram": 6.0}
    assert "text of docs" in mine("--seeds", "2")
    assert called == ["train", *measured, "tools.probe"]  # of the second seed; maps of both
    assert "one scheme" in one_line(capsys, run.main, ["mine", "--pe", "abs,rel"])
    assert "unknown --pe 'fire'" in one_line(capsys, run.main, ["mine", "--pe", "fire"])


def test_order_rows(tmp_path, monkeypatch, capsys):
    """A row is made once per scheme and seed. A task that is learned the sooner, the lower a
    scheme's loss, has r = 1, and one that is learned later -1. Schemes without a loss are left
    out."""
    schemes, calls = ["none", "abs", "t5", "rope", "xl"], []

    def measure(pe, task, seed, args):
        calls.append((pe, seed))
        final = schemes.index(pe) / 10
        final = final if task == "left neighbor" else 1 - final
        return [final, final / 2, seed / 4], [[20, final / 2], [40, final]]

    monkeypatch.setattr(run.order.order, "measure", measure)
    for n_seeds in (1, 3):
        run.order.run(schemes, range(n_seeds), tmp_path / "order.jsonl")
    assert len(calls) == 5 * 3 * len(run.order.order.TASKS) and len({*calls}) == 5 * 3
    found = run.order.accuracies(tmp_path / "order.jsonl")
    assert found["t5"]["left neighbor"] == pytest.approx([0.2, 0.1, 0.25])
    losses = {pe: ([6 - i, 7 - i], [5 - i] if i else []) for i, pe in enumerate(schemes[:4])}
    left, right, *_ = run.order.correlations(losses, tmp_path / "order.jsonl")
    assert left["r after 6 M tokens, 4 schemes"].startswith("1.00 (")
    assert left["r after 49 M tokens, 3 schemes"].startswith("1.00 (")
    assert right["r after 6 M tokens, 4 schemes"].startswith("-1.00 (")


def cell(monkeypatch, pe, **changes):
    """An encoder with one layer in float64 whose positions are those of a cell of results.cells."""
    monkeypatch.setattr(model, "Block", model.Block)  # register() replaces it
    monkeypatch.setattr(model, "SCHEMES", dict(model.SCHEMES))
    cells.register()
    if changes:
        [component] = model.SCHEMES[pe]
        model.SCHEMES[pe] = [type(pe, (component,), changes)]
    torch.manual_seed(0)
    shape = dict(n_layer=1, d_model=8, n_head=2, d_ff=8, max_len=12, dropout=0.0, attn_dropout=0.0)
    return Encoder(EncoderConfig(20, pe, **shape)).double()


def test_cells_equal_the_schemes_between_which_they_lie(monkeypatch):
    """With separate matrices and the same scale, two cells are bert_ad and tupe_a_tie_cls."""
    tokens = torch.arange(20).view(2, 10)
    for name, scale, pe in ("separate", 4, "bert_ad"), ("separate_pp", 2, "tupe_a_tie_cls"):
        with monkeypatch.context() as patch:
            found = cell(patch, name, scale_terms=scale)(tokens)
            torch.testing.assert_close(found, cell(patch, pe)(tokens))


@pytest.mark.parametrize("name", ["abs", "t5", "t5_untie_cls", "tupe_a_free", "tupe_r"])
def test_ten_times_the_rate(monkeypatch, name):
    """The vectors or scalars start at the same values, and a step of SGD moves them 100 times as
    far: their gradient is ten times as large, and so is what a step does. (Adam's: ten times.)"""
    found = []
    for pe in (name, f"{name}_rate"):
        torch.manual_seed(0)
        encoder, tokens = cell(monkeypatch, pe), torch.arange(6)[None]
        hook = encoder.scheme.embed if name == "abs" else encoder.scheme.bias
        before = hook(Positions.of(tokens))
        named = encoder.scheme.named_parameters()
        optimizer = torch.optim.SGD([p for n, p in named if "positions" not in n], lr=0.001)
        (before * torch.arange(before.size(-1))).sum().backward()
        optimizer.step()
        found.append((before.detach(), hook(Positions.of(tokens)) - before))
    (before, moved), (before_10, moved_10) = found
    torch.testing.assert_close(before, before_10)
    torch.testing.assert_close(moved_10[..., 1:, 1:], 100 * moved[..., 1:, 1:])  # without [CLS]


@pytest.mark.parametrize("name", [n for n, x in cells.CELLS.items() if isinstance(x[1], dict)])
def test_cells_by_hand(monkeypatch, name):
    """The output of attention, as a loop over pairs of tokens: which terms the logits have, and
    whether the values contain positions."""
    encoder = cell(monkeypatch, name)
    [part], [block] = encoder.scheme.parts.values(), encoder.blocks
    for p in part.parameters():  # positions that matter, and a LayerNorm that is not the identity
        p.data.add_(torch.randn_like(p))
    x, H, C = torch.randn(2, 5, 8).double(), 2, 8
    table = part.untied.table if part.separate else part.table
    norm = part.untied.norm if part.separate else part.norm
    p, (w_q, w_k, w_v), (b_q, b_k, b_v) = (
        norm(table.weight[:5]), block.qkv.weight.chunk(3), block.qkv.bias.chunk(3),
    )  # fmt: skip
    u_q, u_k = (part.untied.u_q.weight, part.untied.u_k.weight) if part.separate else (w_q, w_k)
    if name in ("qk_no_norm", "qk_large"):
        p = table.weight[:5]
    y = torch.zeros(2, 5, C).double()
    for b, h in itertools.product(range(2), range(H)):
        of_head, s = slice(4 * h, 4 * h + 4), torch.zeros(5, 5).double()
        for i, j in itertools.product(range(5), range(5)):
            q, k = (w_q @ x[b, i] + b_q)[of_head], (w_k @ x[b, j] + b_k)[of_head]
            p_q, p_k = (u_q @ p[i])[of_head], (u_k @ p[j])[of_head]
            s[i, j] = q @ k
            if "pp" not in name:
                s[i, j] += q @ p_k + p_q @ k
            if "cross" not in name:
                reset = part.theta.view(2, H)[1 if i else 0, h] if "reset" in name else 0
                s[i, j] += reset if "reset" in name and (i == 0 or j == 0) else p_q @ p_k
        A = (s / (8 if "2d" in name else 4) ** 0.5).softmax(-1)
        v = x[b] @ w_v.T + b_v
        v = v + p @ w_v.T if "values" in name else v
        y[b, :, of_head] = A @ v[:, of_head]
    found = block.attend(x, encoder.scheme, model.Positions.of(x[..., 0].long()), 0)
    torch.testing.assert_close(found, y @ block.out.weight.T + block.out.bias)
    table = encoder.scheme.embed(model.Positions.of(x[..., 0].long()))
    assert isinstance(table, torch.Tensor) == ("input" in name)


def longer_encoder(monkeypatch, pe):
    """An encoder in float64 whose positions have strong effects, and its positional component."""
    monkeypatch.setattr(model, "SCHEMES", dict(model.SCHEMES))
    longer.register()
    torch.manual_seed(0)
    shape = dict(n_layer=2, d_model=16, n_head=2, d_ff=8, dropout=0.0, attn_dropout=0.0)
    encoder = Encoder(EncoderConfig(20, pe, max_len=512, **shape)).double()
    [part] = encoder.scheme.parts.values()
    for parameter in part.parameters():
        parameter.data.add_(torch.randn_like(parameter))
    return encoder, part


@pytest.mark.parametrize("pe", [pe for pe, x in longer.CHANGES.items() if longer.CLIPPED in x])
def test_clipped_offsets(monkeypatch, pe):
    """After the change, a model computes what it does if offsets are clipped before."""
    encoder, part = longer_encoder(monkeypatch, pe)
    tokens = torch.randint(12, (1, 100))
    offsets = model.Positions(torch.arange(100)).offsets.clamp(-longer.CLIP, longer.CLIP)
    with monkeypatch.context() as patch:
        patch.setattr(model.Positions, "offsets", offsets)
        expected = encoder(tokens)
    assert not torch.allclose(encoder(tokens), expected)
    longer.CHANGES[pe][longer.CLIPPED](part, encoder.config, None)
    torch.testing.assert_close(encoder(tokens), expected)


def test_changes_of_rope(monkeypatch):
    """On sequences three times as long, interpolation makes position 3 i count as i; with the
    larger base, only the slowest rotation does, and the fastest is as before."""

    def angles(ids):
        pos = model.Positions(torch.tensor(ids))
        cos, sin = part.rotation(pos, 8, part.rope_base, part.rope_scale, torch.float64)
        return torch.atan2(sin, cos).flatten(0, 2)  # (L, 4)

    found = {}
    for name, change in ("", None), *longer.CHANGES["rope"].items():
        encoder, part = longer_encoder(monkeypatch, "rope")
        if change:
            change(part, encoder.config, 3)
        found[name] = angles([0, 1, 2, 3, 6])
    before, interpolated, larger_base = found.values()
    torch.testing.assert_close(interpolated[[3, 4]], before[[1, 2]])
    torch.testing.assert_close(larger_base[:, 0], before[:, 0])
    torch.testing.assert_close(larger_base[[3, 4], -1], before[[1, 2], -1])


@pytest.mark.parametrize("pe", ["abs", "rope", "t5", "deberta", "tupe_r", "rel"])
def test_random_positions(monkeypatch, pe):
    """Ascending ids below 512, [CLS] first, the same in all layers and anew in each pass."""
    encoder, _ = longer_encoder(monkeypatch, f"{pe}_random")
    plain, part = longer_encoder(monkeypatch, pe)
    weights = encoder.state_dict().items()
    plain.load_state_dict({k.replace("Random", type(part).__name__): w for k, w in weights})
    tokens, drawn = torch.randint(12, (2, 30)), []
    for seed in (1, 2):
        torch.manual_seed(seed)
        ids = longer.random_positions(model.Positions(torch.arange(30))).ids
        assert ids[0, 0] == 0 and (ids.diff() > 0).all() and ids.max() < 512
        torch.manual_seed(seed)
        torch.testing.assert_close(encoder(tokens), plain(tokens, ids))
        drawn.append(ids)
    assert not torch.equal(*drawn)
    all_ids = longer.random_positions(model.Positions(torch.arange(512))).ids
    assert torch.equal(all_ids, torch.arange(512)[None])


@pytest.mark.slow
def test_tiny_table(tmp_path, monkeypatch, capsys):
    """A table of two runs is trained, probed and fine-tuned, the second run from the first one's
    weights and at two of its steps. After an interruption, what is done is not done again."""
    ours = run.all_rows()["docs-t5-s1337"]
    write_corpus(tmp_path / "text.jsonl")
    (tmp_path / "CoLA").mkdir()
    for split in ("train", "dev"):
        text = "x\t1\t\tIt is so.\nx\t0\t*\tSo it is is.\n"
        (tmp_path / "CoLA" / f"{split}.tsv").write_text(text)
    tables = run.read_tables(
        f"TINY = {shlex.join(TINY)} --dataset text.jsonl --steps 6 --keep_every 3\n"
        "tiny | a | 0 | TINY --pe t5\n"
        "tiny | b | 0 | TINY --pe abs --objective mlm+pplm --preset demo --init_from out/results/a "
        "| cola: --limit_train 2 --epochs 1 @ .5 1\n"
        "docs | docs-{t5,abs} | 3 | TINY --pe {}\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GLUE", str(tmp_path))
    monkeypatch.setattr(run, "ROWS", tmp_path / "runs.jsonl")
    monkeypatch.setattr(run, "TABLES", tables)
    programs = {"train.py": train.main, "finetune.py": finetune.main}
    programs |= {"tools.probe": probe.main, "tools.dynamics": dynamics.main}

    def drive(name, interrupted=None):
        """-> the exit code, and the programs that were called; Ctrl-C is pressed in one."""
        calls = []

        def call(command, folder):
            _, program, *flags = shlex.split(os.path.expandvars(command).replace("-m ", "", 1))
            calls.append(program)
            if program == interrupted:
                raise KeyboardInterrupt
            programs[program](flags)

        monkeypatch.setattr(run, "call", call)
        return exit_code(run.main, [name]), calls

    calls = ["train.py", "train.py", "tools.probe", "tools.dynamics", "finetune.py"]
    assert drive("b", interrupted="finetune.py") == (130, calls)
    assert not run.ROWS.exists()
    assert drive("b") == (None, ["finetune.py", "finetune.py"])
    [row] = run.read_jsonl(run.ROWS)
    assert row["run"] == "b"
    assert list(row["commands"]) == ["train", "probe", "dynamics", "cola at .5", "cola"]
    assert {"cola matthews", "cola matthews at 0.5"} <= row["scores"].keys()
    log = run.read_jsonl("out/results/b/log.jsonl")
    assert row["val_loss"] == log[-1]["val_loss"] and row["baselines"] == log[0]["baselines"]
    assert row["words"]["random"] > 0 and len(row["ranges"]) == len(run.RANGES)
    assert drive("tiny") == (None, ["tools.probe", "tools.dynamics"])  # a is trained already
    assert "| b at 0.5 " in capsys.readouterr().out
    assert drive("tiny") == (None, [])

    # `first` trains a class's own runs of the table docs, and prints them beside our rows
    run.ROWS.write_text(json.dumps(ours) + "\n")
    assert drive("first") == (None, ["train.py", "train.py", "tools.probe"])
    table = capsys.readouterr().out.rpartition("| scheme")[2]
    loss = run.read_jsonl("out/first/docs-t5-s1337/log.jsonl")[-1]["val_loss"]
    assert re.search(rf"t5 +\| {loss:.3f}", table)
    assert f"{ours['val_loss']:.3f}" in table
