"""Follow a run over its checkpoints: how similar its contexts and its words are (TACO, figs 3 and
6), and the spread of its hidden states.

    python -m tools.dynamics --ckpt RUN                       # a run of train.py --keep_every N
    python -m tools.dynamics --ckpt RUN --pairs wordsim.tsv   # pairs of words, too

Writes dynamics.json and, if matplotlib is installed, dynamics.png.
"""

import os
from pathlib import Path

import torch
import torch.nn.functional as F

import objectives
from data import validation_sequences
from lib.config import Parser, UserError, one_line_errors
from lib.device import keep_memory, pick_device
from lib.files import DAMAGE, newest_run, opening
from tools.output import add_run_flags, print_table, write
from tools.probe import run_corpus, token_spread

SEQUENCES = 128  # validation sequences that are used


def context_cosines(vectors, eligible):
    """The mean cosine of a token with the other tokens of its sequence, and with those of other
    sequences (TACO, app. A.3). TACO samples one of each per token; here all are averaged: the same
    mean without the noise (deviation).

    vectors (B, L, C), eligible (B, L) bool, both on the CPU -> {name: float}
    """
    g = F.normalize(vectors.double(), dim=-1) * eligible[..., None]
    m = eligible.sum(1, keepdim=True)  # (B, 1): tokens per sequence
    own = g.sum(1, keepdim=True)  # (B, 1, C): their sum
    intra = ((g * own).sum(-1) - 1) / (m - 1)  # (B, L), without the token itself
    inter = (g * (own.sum(0) - own)).sum(-1) / (m.sum() - m)
    intra, inter = float(intra[eligible].mean()), float(inter[eligible].mean())
    return {"intra-context": intra, "inter-context": inter, "contextual score": intra - inter}


def word_pair_similarity(encoder, file):
    """The mean cosine of two words' embeddings (averaged over a word's tokens) over the lines
    word<TAB>word<TAB>score of a file. Raises UserError."""
    cosines = []
    with opening(file, *DAMAGE):
        text = Path(file).read_text(encoding="utf-8")
    for number, line in enumerate(text.splitlines() or [""], 1):
        words = line.split("\t")[:-1]
        if len(words) != 2:
            raise UserError(f"{file}, line {number} is not word<TAB>word<TAB>score")
        ids = [encoder.tokenizer.encode_ordinary(" " + word) for word in words]
        one, two = [encoder.tok.weight[x].mean(0) for x in ids]  # (C,)
        cosines.append(F.cosine_similarity(one, two, dim=0))
    return float(torch.stack(cosines).mean())


def dynamics(folder, pairs, out_dir, device):
    """Measure how similar a run's contexts and words are at each of its checkpoints (TACO, figs 3
    and 6), and the spread of its hidden states. Raises UserError."""
    folder, table, tokens = Path(folder), [], None
    checkpoints = {int(file.stem[5:]): file for file in folder.glob("ckpt_[0-9]*.pt")}
    if not checkpoints:
        raise UserError(f"{folder} has no ckpt_<step>.pt: train with --keep_every N")
    for step, file in sorted(checkpoints.items()):
        model = objectives.load(file)
        cfg, encoder = model.encoder.config, model.encoder.to(device)
        if tokens is None:
            corpus = run_corpus(model.run_info)
            tokens = validation_sequences(corpus, SEQUENCES, cfg.max_len)
        hidden = [encoder(x.to(device), causal=model.causal).cpu() for x in tokens.split(16)]
        table.append({"step": step, **context_cosines(torch.cat(hidden), tokens < cfg.cls_id)})
        spreads = token_spread(encoder, tokens.to(device), model.causal)
        table[-1] |= {f"spread {layer}": x for layer, x in enumerate(spreads)}
        if pairs:
            table[-1]["word pairs"] = word_pair_similarity(encoder, pairs)
    steps, *columns = zip(*(row.values() for row in table))
    panels = []
    for title, values in zip([*table[0]][1:], columns):
        curves = {title: (steps, values)}
        panels.append(dict(title=title, curves=curves, xlabel="step", ylabel="value"))
    numbers = {"run": str(folder), "sequences": len(tokens), "steps": table}
    out = Path(out_dir or folder / "dynamics")
    write(out / "dynamics.json", numbers, {"dynamics.png": panels})
    print_table(table)


def main(argv=None):
    with one_line_errors():
        parser = Parser("-m tools.dynamics", __doc__)
        add_run_flags(parser, "dynamics")
        pairs = "file with lines word<TAB>word<TAB>score"
        parser.add_argument("--pairs", type=os.path.expanduser, help=pairs)
        args = parser.parse_args(argv)
        keep_memory()
        device = pick_device(args.device)
        dynamics(args.ckpt or newest_run(), args.pairs, args.out_dir, device)


if __name__ == "__main__":
    main()
