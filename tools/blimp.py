"""Minimal pairs: which of two sentences does a model find more likely?

    python -m tools.blimp --ckpt RUN --pairs blimp/data

The folder holds .jsonl files (or .xz, .gz) with sentence_good and sentence_bad, such as
data/*.jsonl of huggingface.co/datasets/alexwarstadt/blimp (BLiMP, Warstadt et al. 2020). No
training is needed. Which score is used depends on the objective:

mlm                   pseudo-log-likelihood: each token masked in turn (Salazar et al. 2020)
clm                   log-likelihood
position objectives   mean log-probability of the true offsets

Order-only pairs consist of two orders of the same tokens, so token frequencies cannot tell them
apart. A tie counts 1/2. Writes blimp.json: the accuracies by phenomenon and paradigm, their mean
over paradigms, and that of order-only pairs.
"""

import os
from pathlib import Path

import numpy as np
import pandas  # comes with datasets
import torch
import torch.nn.functional as F
from tqdm import tqdm  # comes with datasets

import objectives
from lib.config import Parser, UserError, one_line_errors
from lib.device import keep_memory, pick_device
from lib.files import newest_run
from lib.sources import file_rows, readable
from model import UNKNOWN_POS
from tools.output import add_run_flags, output_folder, print_table, write_numbers
from tools.sample import position_objective

BATCH_TOKENS = 8192  # tokens per batch
TIE_NATS = 1e-4  # scores that are closer than this tie


def read_pairs(path):
    """-> a table of good, bad, paradigm, phenomenon. The last two default to the file's name.
    Raises UserError."""
    tables = []
    for file in sorted(Path(path).glob("[!.]*.jsonl*")) if os.path.isdir(path) else [path]:
        rows = pandas.DataFrame(readable(file_rows(str(file), None), file))
        rows = rows.reindex(columns=["sentence_good", "sentence_bad", "UID", "linguistics_term"])
        rows.columns = "good bad paradigm phenomenon".split()
        if not rows[["good", "bad"]].map(lambda x: isinstance(x, str) and x.strip()).all(axis=None):
            raise UserError(f"{file}: every line needs texts sentence_good and sentence_bad")
        rows["paradigm"] = rows.paradigm.fillna(os.path.basename(file).partition(".jsonl")[0])
        # The paper counts the s-selection paradigms under argument structure.
        rows["phenomenon"] = rows.phenomenon.fillna(rows.paradigm)
        rows["phenomenon"] = rows.phenomenon.replace("s-selection", "argument_structure")
        tables.append(rows)
    if not sum(map(len, tables)):
        raise UserError(f"--pairs {path}: there are no pairs, it takes a folder of .jsonl files")
    return pandas.concat(tables, ignore_index=True)


# --------------------------------------------------------------------------------------------------
# Scores: tokens (B, L) -> (B,), the higher the more likely; float64, so that sums of the same
# numbers in another order tie


def pseudo_log_likelihood(model, tokens):
    """mlm: the sum over tokens of log p(token | all others)."""
    encoder, (B, L) = model.encoder, tokens.shape
    n = L - 2
    index = torch.arange(1, n + 1, device=tokens.device).repeat(B)  # (B n,): the masked token
    rows = tokens.repeat_interleave(n, 0)  # (B n, L)
    masked = rows.scatter(1, index[:, None], encoder.config.mask_id)
    each = torch.arange(len(rows), device=tokens.device), index
    logits = model.objectives["mlm"].token_logits(encoder, encoder(masked)[each])  # (B n, V)
    losses = F.cross_entropy(logits, rows[each], reduction="none")
    return -losses.view(B, n).cpu().double().sum(1)


def log_likelihood(model, tokens):
    """clm: the sum over tokens of log p(token | those to its left)."""
    hidden = model.encoder(tokens, causal=True)[:, :-2]
    logits = model.objectives["clm"].token_logits(model.encoder, hidden)  # (B, n, V)
    losses = F.cross_entropy(logits.mT, tokens[:, 1:-1], reduction="none")
    return -losses.cpu().double().sum(1)


def offset_likelihood(model, tokens):
    """Position objectives: the mean log-probability of the true offset over all pairs, with
    every token at its true position (pmlm: at a masked one)."""
    objective, (B, L) = position_objective(model), tokens.shape
    index = torch.arange(L)
    pos = index.repeat(B, 1)
    if objective.masks_positions:
        pos[:, 1:-1] = UNKNOWN_POS
    log_p = objective.offset_log_p(model.encoder, tokens, pos.to(tokens.device))
    true = (index - index[:, None])[1:-1, 1:-1].expand(B, -1, -1)  # (B, n, n)
    log_p = log_p.gather(-1, (true + objective.max_len - 1)[..., None])[..., 0]  # (B, n, n)
    return log_p[:, true[0] != 0].double().mean(1).nan_to_num()  # a single token has no pairs


@torch.no_grad()
def sentence_scores(model, sentences):
    """N lists of ids -> (N,) float64. In float32 without autocast, so that ties stay ties. Raises
    UserError if the objective cannot score sentences."""
    cfg, device = model.encoder.config, model.encoder.tok.weight.device
    if "mlm" in model.objectives:
        score = pseudo_log_likelihood
    elif "clm" in model.objectives:
        score = log_likelihood
    elif position_objective(model):
        score = offset_likelihood
    else:
        raise UserError(
            f"{'+'.join(model.names)} cannot score sentences; mlm, clm and position objectives can"
        )
    lengths = np.array([len(ids) for ids in sentences])
    scores, batches = np.zeros(len(sentences)), []
    for n in np.unique(lengths):  # all of one length: no padding
        same = np.flatnonzero(lengths == n)
        size = max(1, BATCH_TOKENS // (n * (n + 2)))  # mlm needs n sequences per sentence
        batches += np.split(same, range(size, len(same), size))
    for chosen in tqdm(batches, "minimal pairs", leave=False, disable=None):
        tokens = [(cfg.cls_id, *sentences[i], cfg.sep_id) for i in chosen]
        scores[chosen] = score(model, torch.tensor(tokens, device=device)).numpy()
    return scores


def score_pairs(model, pairs):
    """-> what blimp.json holds. Pairs that are too long for the model are left out. Raises
    UserError if all are."""

    def encode(text):  # with a space, as before a word inside a sentence
        return model.encoder.tokenizer.encode_ordinary(" " + text.strip())

    ids = pairs[["good", "bad"]].map(encode)
    longest = model.encoder.config.max_len - 2
    ids = ids[ids.map(len).max(axis=1) <= longest]
    if ids.empty:
        raise UserError(f"all pairs are longer than the {longest} tokens that the model takes")
    good, bad = np.split(sentence_scores(model, [*ids.good, *ids.bad]), 2)
    table = pairs.loc[ids.index]
    table["order_only"] = ids.good.map(sorted) == ids.bad.map(sorted)
    table["correct"] = np.where(abs(good - bad) <= TIE_NATS, 0.5, good > bad)
    by_paradigm = table.groupby("paradigm").correct.mean()
    return {
        "mean": by_paradigm.mean(),
        "order_only": table.correct[table.order_only].mean(),
        "order_only_pairs": int(table.order_only.sum()),
        "ties": int((table.correct == 0.5).sum()),
        "pairs": len(table),
        "phenomena": table.groupby("phenomenon").correct.mean().to_dict(),
        "paradigms": by_paradigm.to_dict(),
        "left_out": len(pairs) - len(ids),
    }


def main(argv=None):
    with one_line_errors():
        parser = Parser("-m tools.blimp", __doc__)
        folder = "folder of .jsonl files, or one file"
        parser.add_argument("--pairs", type=os.path.expanduser, required=True, help=folder)
        add_run_flags(parser, "blimp")
        args = parser.parse_args(argv)
        keep_memory()
        pairs, path = read_pairs(args.pairs), args.ckpt or newest_run()
        model = objectives.load(path).to(pick_device(args.device))
        results = score_pairs(model, pairs)
        file = output_folder(path, "blimp", args.out_dir) / "blimp.json"
        write_numbers(file, results)
        rows = [{"phenomenon": key, "accuracy": x} for key, x in results["phenomena"].items()]
        rows += [{"phenomenon": key, "accuracy": results[key]} for key in ("mean", "order_only")]
        print_table(rows)
        print(
            f"{results['pairs']:,} pairs, {results['left_out']:,} too long; {results['ties']:,} "
            f"ties; {results['order_only_pairs']:,} are two orders of the same tokens (order_only)"
        )
        print(f"wrote {file}")


if __name__ == "__main__":
    main()
