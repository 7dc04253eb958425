"""How often does a model of pplm restore exchanged words of a sentence?

    python -m results.restore docs/demo.pt                     # results/everyday.txt
    python -m results.restore RUN --text FILE --margin .1      # one sentence per line

Two random words that are one token each are exchanged (--exchanges 2: twice), and the order of the
tokens is restored, as in a page of tools.page (which also keeps words of several tokens whole).
Even lines may decide a setting; odd lines decide nothing.
"""

import random
from collections import Counter

import torch

import objectives
from lib.config import Parser, UserError, one_line_errors
from lib.files import DAMAGE, opening
from lib.restore import MARGIN
from tools import sample


def restore_words(model, sentence, exchanges, margin, rng):
    """-> "restored", "left" or "wrong", or None if too few words are one token."""
    encoder, objective = model.encoder, sample.position_objective(model)
    single, n = [], 0  # their positions, and the number of tokens
    for word in sentence.split():
        length = len(encoder.tokenizer.encode(" " + word))
        single += [n] if length == 1 else []
        n += length
    if len(single) < 2 * exchanges:
        return None
    tokens, given = sample.encode(encoder, " " + sentence)[0], torch.arange(1, n + 1)
    chosen = rng.sample(single, 2 * exchanges)
    for i, j in zip(chosen[::2], chosen[1::2]):
        given[[i, j]] = given[[j, i]]

    pos = objective.restore(encoder, tokens[None], given, margin)
    if torch.equal(tokens[1:-1][pos.argsort()], tokens[1:-1]):
        return "restored"
    return "left" if torch.equal(pos, given) else "wrong"


def main(argv=None):
    parser = Parser("-m results.restore", __doc__)
    parser.add_argument("ckpt")
    parser.add_argument("--text", default="results/everyday.txt")
    parser.add_argument("--exchanges", type=int, default=1)
    parser.add_argument("--margin", type=float, default=MARGIN)
    with one_line_errors(), torch.no_grad():
        args = parser.parse_args(argv)
        model = objectives.load(args.ckpt)
        if not {"pplm", "pplm_some"} & set(model.names):
            raise UserError(f"{args.ckpt} was trained with {'+'.join(model.names)}, without pplm")
        with opening(args.text, *DAMAGE), open(args.text, encoding="utf-8") as handle:
            sentences = [line.strip() for line in handle]
        for half in (0, 1):
            rng, found = random.Random(half), Counter()
            for sentence in sentences[half::2]:
                found[restore_words(model, sentence, args.exchanges, args.margin, rng)] += 1
            del found[None]
            print(
                f"{('even', 'odd')[half]} lines, {found.total()} sentences: {found['restored']} "
                f"restored, {found['left']} left, {found['wrong']} wrong"
            )


if __name__ == "__main__":
    main()
