"""Try a pre-trained model on a sentence.

    python probe.py --text 'Returns the [MASK] of the array elements.'     # mlm: the five likeliest words
    python probe.py --text 'The function returns a copy of the array.'     # pplm: shuffled, and put back in order

Takes the newest run under out/ unless --ckpt names one; needs no GPU.
"""

import glob
import os

import torch

from data import Parser, one_line_errors
from model import UNKNOWN_POS
from objectives import load_pretraining, stream


@torch.no_grad()
def fill_masks(model, text, k=5):
    """The k likeliest words for each [MASK] of the text -> list of lists of (word, probability)."""
    encoder, cfg = model.encoder, model.encoder.config
    # A masked word takes its leading space with it, as in training.
    ids = encoder.tokenizer.encode(text.replace(" [MASK]", "[MASK]"), allowed_special={"[MASK]"})
    tokens = row(ids, cfg)
    logits = model.objectives["mlm"].logits(encoder, encoder(tokens))[0]            # (L, V)
    logits[:, cfg.cls_id:] = float("-inf")                                          # no special is an answer
    p, best = logits[tokens[0] == cfg.mask_id].float().softmax(-1).topk(k)
    return [[(encoder.tokenizer.decode([i]), float(q)) for i, q in zip(*pair)] for pair in zip(best.tolist(), p)]


@torch.no_grad()
def put_in_order(model, text, seed=0):
    """Shuffle (or hide) 60% of a sentence's positions, as in training, and sort the tokens by the offsets the model predicts.

    -> tokens as given, tokens as the model orders them, tokens as they were, and for the first two the share of
    pairs in the right order.
    """
    encoder, pplm = model.encoder, model.objectives[ordering(model)]
    ids = encoder.tokenizer.encode_ordinary(text)
    tokens = row(ids, encoder.config)
    batch = {"tokens": tokens, "eligible": tokens < encoder.config.cls_id}
    pplm.corrupt(batch, stream("cpu", seed, "probe"))
    p = pplm.pair_logits(encoder, encoder(tokens, batch["pos"]), batch["pos"])[0].float().softmax(-1)  # (n, n, 2L-1)
    offset = p @ (torch.arange(p.size(-1)) - (pplm.L - 1.0))                        # (n, n) expected r_ij
    offset.fill_diagonal_(0)
    place = offset.mean(0) - offset.mean(1)     # far to the right of all others, and they to its left: late
    pos = batch["pos"][0, 1:-1]
    hidden = pos == UNKNOWN_POS                 # pmlm: what was hidden is shown at the free places, in any order
    free = torch.arange(1, len(ids) + 1)[hidden]
    given = pos.masked_scatter(hidden, free[torch.randperm(len(free), generator=torch.Generator().manual_seed(seed))]).argsort()
    found = place.argsort()
    words = [encoder.tokenizer.decode([i]) for i in ids]
    return [[words[i] for i in order] for order in (given, found, range(len(ids)))], [pairs_right(o) for o in (given, found)]


def pairs_right(order):
    """Share of pairs that a permutation leaves in order: 1 for the identity, .5 by chance, 0 reversed."""
    later = order[None, :] > order[:, None]                                         # (n, n)
    return float(later.float().triu(1).sum() / (len(order) * (len(order) - 1) / 2))


def row(ids, cfg):
    """-> [CLS] ids [SEP] as (1, L). Raises ValueError when it is longer than the model's rows."""
    if not 2 <= len(ids) <= cfg.max_len - 2:
        raise ValueError(f"the text has {len(ids)} tokens; between 2 and {cfg.max_len - 2} fit this model")
    return torch.tensor([[cfg.cls_id, *ids, cfg.sep_id]])


def ordering(model):
    """The objective of the model that predicts offsets, or None."""
    return next((name for name in ("pplm", "pplm_some", "pmlm") if name in model.names), None)


def try_text(model, text):
    if "[MASK]" in text:
        if "mlm" not in model.names:
            raise ValueError(f"[MASK] is for a run trained with mlm; this one's objective is {'+'.join(model.names)}")
        for words in fill_masks(model, text):
            print("[MASK]: " + ", ".join(f"{word!r} {p:.2f}" for word, p in words))
    elif ordering(model):
        (given, found, true), (before, after) = put_in_order(model, text)
        print("given:  " + "|".join(given))
        print("model:  " + "|".join(found))
        print("true:   " + "|".join(true))
        print(f"pairs in the right order: {before:.0%} as given, {after:.0%} as the model puts them")
    elif "mlm" in model.names:
        raise ValueError("this run's objective is mlm: write [MASK] where a word is to be guessed")
    else:
        raise ValueError("a run of pplm_binary predicts no offsets: try one of pplm, pplm_some or pmlm")


def main(argv=None):
    parser = Parser("probe.py", __doc__)
    parser.add_argument("--text", required=True, help="a sentence; with [MASK] for a model trained with mlm")
    parser.add_argument("--ckpt", help="run folder or checkpoint file (default: the newest under out/)")
    args = parser.parse_args(argv)
    with one_line_errors():
        runs = sorted(glob.glob("out/*/ckpt.pt"), key=os.path.getmtime)
        if not (args.ckpt or runs):
            raise FileNotFoundError("no checkpoint under out/: pre-train one first (python train.py)")
        path = args.ckpt or os.path.dirname(runs[-1])
        model = load_pretraining(path)
        print(f"{path}: {model.encoder.config.pe}, {'+'.join(model.names)}")
        try_text(model, args.text)


if __name__ == "__main__":
    main()
