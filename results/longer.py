"""Sequences longer than in training: what helps without training, and random positions in training.

    python -m results.longer                             # the table
    python -m results.longer rope t5 --seeds 1337 1      # train, score, append rows to longer.jsonl

A scheme is trained on docs with sequences of 64 tokens (`demo`), and its loss is measured on 64 to
512, as it is and with each of its CHANGES. `rope_random` and the like are trained and scored with
random positions (randomize).
"""

import statistics
from dataclasses import replace

import torch
import torch.nn as nn

import model
import objectives
import train
from lib.config import Parser, between, one_line_errors
from lib.device import git_commit, processor_name
from lib.files import append_jsonl, read_jsonl
from model import OffsetTable, Positions, once
from results.show import HERE
from tools.lengths import losses_by_position, masked_text
from tools.output import print_table
from tools.probe import run_corpus

ROWS = HERE / "longer.jsonl"
LENGTHS = (64, 128, 256, 512)
TRAINED = LENGTHS[0]
CLIP = 40  # offsets beyond it are rare in sequences of 64 tokens


# --------------------------------------------------------------------------------------------------
# Changes of a trained scheme (a component), for sequences `factor` times as long as in training


def interpolate(part, cfg, factor):
    """Positions between those of training (Chen 2023)."""
    part.rope_scale = factor


def enlarge_base(part, cfg, factor):
    """A base with which the slowest rotation is interpolated, and the fastest is not ("NTK-aware",
    see Peng 2023)."""
    part.rope_base *= factor ** (cfg.d_head / (cfg.d_head - 2))


def clip_offsets(part, cfg, factor):
    """Offsets beyond CLIP share the vector of CLIP."""
    for module in part.modules():
        if isinstance(module, OffsetTable):
            smaller = OffsetTable(replace(cfg, max_offset=CLIP), module.embedding_dim)
            module.weight = nn.Parameter(smaller.resized(module.weight))


def clip_buckets(part, cfg, factor):
    """Distances beyond CLIP share the bucket of CLIP."""
    part.bucket[CLIP:] = part.bucket[CLIP]


CLIPPED = f"offsets clipped to ±{CLIP}"
CHANGES = {  # scheme: {name of the change: function}
    "rope": {"positions interpolated": interpolate, "larger base": enlarge_base},
    "t5": {CLIPPED: clip_buckets},
    "rel": {CLIPPED: clip_offsets},
    "deberta": {CLIPPED: clip_offsets},
}
FLAGS = {"t5_random": f"--t5_max_distance {LENGTHS[-1]}"}
FLAGS["tupe_r_random"] = FLAGS["t5_random"]


# --------------------------------------------------------------------------------------------------
# Random positions


@once
def random_positions(pos):
    """L of the positions below LENGTHS[-1], drawn anew in every forward pass and in ascending
    order; [CLS] keeps 0 (Ruoss 2023)."""
    ids = torch.randperm(LENGTHS[-1] - 1)[: pos.ids.size(1) - 1] + 1
    return Positions(torch.cat((torch.zeros(1, dtype=torch.long), ids.sort().values)))


def randomize(component):
    """-> the component with random positions in all of its hooks, and tables for all of them."""

    class Random(component):
        def __init__(self, cfg):
            super().__init__(replace(cfg, max_len=LENGTHS[-1]))

    for name in ("embed", "bias", "edit_qk", "scores", "values"):
        hook = getattr(component, name)
        if hook is not getattr(model.Component, name):

            def randomized(self, *args, hook=hook):
                args = [random_positions(x) if isinstance(x, Positions) else x for x in args]
                return hook(self, *args)

            setattr(Random, name, randomized)
    return Random


def register():
    """Make NAME_random known to --pe for each scheme of one component."""
    for name, parts in list(model.SCHEMES.items()):
        if len(parts) == 1 and parts[0] is not model.NoPositions:
            model.SCHEMES[f"{name}_random"] = [randomize(parts[0])]


# --------------------------------------------------------------------------------------------------
# Training, scoring, rows


def score(path, change, length):
    """-> the loss of a run on sequences of `length` tokens, after a change of its scheme."""
    pretrained = objectives.load(path)
    [part] = pretrained.encoder.scheme.parts.values()
    if change:
        change(part, pretrained.encoder.config, length / TRAINED)
    text = masked_text(run_corpus(pretrained.run_info), pretrained.objectives["mlm"], LENGTHS[-1])
    torch.manual_seed(0)  # of random positions
    return losses_by_position(pretrained, text, length)[1].mean()


def run(pe, seed, steps, file=ROWS):
    """Train a scheme, and append a row for each of its changes."""
    folder = f"out/longer/{pe}-{steps}-s{seed}"
    flags = f"--pe {pe} --seed {seed} --steps {steps} {FLAGS.get(pe, '')} --out_dir {folder}"
    train.main([*flags.split(), "--resume"])
    processor, threads = processor_name("cpu"), torch.get_num_threads()
    machine = {"processor": processor, "threads": threads, "torch": str(torch.__version__)}
    for name, change in ({"": None} | CHANGES.get(pe, {})).items():
        losses = {length: round(float(score(folder, change, length)), 4) for length in LENGTHS}
        row = {"pe": pe, "change": name, "seed": seed, "steps": steps, "losses": losses}
        append_jsonl(file, row | {"git": git_commit(), "machine": machine})


def table(rows):
    """-> a line per scheme, change and number of steps: the losses on TRAINED tokens of its seeds,
    and the mean rises on longer ones."""
    groups = {}
    for row in rows:
        groups.setdefault((row["pe"], row["change"], row["steps"]), []).append(row["losses"])
    lines = []
    for (pe, change, steps), runs in groups.items():
        line = {"scheme": pe, "change": change, "steps": steps}
        line[f"loss on {TRAINED}"] = ", ".join(f"{losses[str(TRAINED)]:.2f}" for losses in runs)
        for n in map(str, LENGTHS[1:]):
            rises = [losses[n] - losses[str(TRAINED)] for losses in runs]
            line[f"on {n}"] = f"{statistics.mean(rises):+.2f}"
        lines.append(line)
    return lines


def main(argv=None):
    parser = Parser("-m results.longer", __doc__)
    parser.add_argument("pe", nargs="*", help="schemes, or rope_random and the like")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1337], help="random seeds")
    parser.add_argument("--steps", type=between(int, "[1, 1e6]"), default=1500, help="of training")
    register()
    with one_line_errors():
        args = parser.parse_args(argv)
        for seed in args.seeds:
            for pe in args.pe:
                run(pe, seed, args.steps)
    print_table(table(read_jsonl(ROWS)))


if __name__ == "__main__":
    main()
