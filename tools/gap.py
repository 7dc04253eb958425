"""How large is the gap between the losses of runs, and how much of it may be due to the text?

    python -m tools.gap out/a out/b out/c       # each run minus the first

All runs are scored with mlm on the same 4,096 sequences of the validation text, or as many as there
are, with the same masked tokens. The interval is a bootstrap over sequences: if it excludes 0,
other text of this kind would hardly reverse the order of these two models. It says nothing about
seeds, which may differ by more: compare several of each scheme.
"""

import os

import numpy as np
import torch
import torch.nn.functional as F

import objectives
from data import validation_sequences
from lib.config import Parser, UserError, one_line_errors
from lib.device import keep_memory, pick_device
from objectives import new_batch, seeded_generator
from tools.output import print_table
from tools.probe import run_corpus

SEQUENCES, BATCH = 4096, 32
SAMPLES = 2000  # of the bootstrap


def check_same_task(models, paths):
    """Raise UserError if the runs cannot be scored on the same masked tokens."""
    for path, model in zip(paths, models):
        if "mlm" not in model.objectives:
            raise UserError(f"{path} was trained without mlm")
        first = models[0].run_info
        for name in ("block_size", "mask_rate", "whole_word"):
            if model.run_info["args"][name] != first["args"][name]:
                raise UserError(f"--{name} of {path} differs from that of {paths[0]}")
        if model.run_info["data"]["digest"] != first["data"]["digest"]:
            raise UserError(f"the text of {path} differs from that of {paths[0]}")


@torch.no_grad()
def losses_by_sequence(model, sequences):
    """sequences (N, L) -> the sums of the losses of each one's masked tokens in nats (N,), and the
    numbers of these tokens (N,), as float64 arrays."""
    encoder, mlm = model.encoder, model.objectives["mlm"]
    device, sums, counts = encoder.tok.weight.device, [], []
    for number, tokens in enumerate(sequences.split(BATCH)):
        batch = new_batch(tokens.to(device), encoder.config.vocab_size)
        mlm.corrupt(batch, seeded_generator(device, "gap", number))
        slots, target, weight = (batch[f"mlm_{x}"] for x in ("slots", "target", "weight"))  # (B, k)
        hidden = encoder(batch["tokens"])  # (B, L, C)
        hidden = hidden.gather(1, slots[..., None].expand(-1, -1, hidden.size(2)))  # (B, k, C)
        logits = mlm.token_logits(encoder, hidden)
        losses = F.cross_entropy(logits.mT, target, reduction="none") * weight
        sums.append(losses.cpu().double().sum(1))
        counts.append(weight.cpu().double().sum(1))
    return torch.cat(sums).numpy(), torch.cat(counts).numpy()


def interval(differences, counts):
    """The sums of the differences of two losses by sequence (N,), and the numbers of tokens (N,)
    -> the ends of the 95% interval of their mean per token."""
    generator, n = np.random.default_rng(0), len(counts)
    draws = generator.integers(0, n, (SAMPLES, n))
    means = differences[draws].sum(1) / counts[draws].sum(1)
    return np.percentile(means, (2.5, 97.5))


def main(argv=None):
    with one_line_errors():
        parser = Parser("-m tools.gap", __doc__)
        parser.add_argument("runs", nargs="+", type=os.path.expanduser, help="folders of runs")
        parser.add_argument("--device", choices=("cpu", "cuda", "mps"), help="default: the best")
        args = parser.parse_args(argv)
        keep_memory()
        models = [objectives.load(path) for path in args.runs]
        check_same_task(models, args.runs)
        length, lines = models[0].encoder.config.max_len, []
        sequences = validation_sequences(run_corpus(models[0].run_info), SEQUENCES, length)
        for path, model in zip(args.runs, models):
            sums, counts = losses_by_sequence(model.to(pick_device(args.device)), sequences)
            if not lines:
                first = sums
            low, high = interval(sums - first, counts)
            gap = (sums - first).sum() / counts.sum()
            line = {"run": path, "loss": f"{sums.sum() / counts.sum():.4f}"}
            line |= {"minus the first": f"{gap:+.4f}", "95%": f"{low:+.4f} to {high:+.4f}"}
            lines.append(line)
        print(f"mlm on {len(sequences):,} sequences of the validation text")
        print_table(lines)


if __name__ == "__main__":
    main()
