"""How often does a model of pplm restore two exchanged words of a sentence?

    python -m results.restore docs/demo.pt                     # results/everyday.txt
    python -m results.restore RUN --text FILE --margin 4.3     # one sentence per line

Two random words that are one token each are exchanged, and the order of the tokens is restored. As
in a page of tools.page, a sentence is left as it is if the best other order is less likely by more
than the margin. (The page also keeps words of several tokens whole.) Even lines may decide
a setting; odd lines decide nothing.
"""

import random

import torch

from lib.config import Parser, one_line_errors
from model import Positions
from tools.sample import best_order, encode, load_pretraining

MARGINS = (2, 3, 4, 4.3, 5, 6, 8, 1e9)


def offsets_log_p(model, tokens, pos):
    """Tokens and their positions (1, L) -> log-probability of each offset of each pair of the
    L - 2 inner tokens, (n, n, 2 max_len - 1)."""
    [objective] = [x for x in model.objectives.values() if hasattr(x, "head")]
    states = model.encoder.hidden_states(tokens, pos)
    scores = objective.head.scores(model.encoder, states, Positions(pos))
    return objective.head.psi(scores).float().log_softmax(-1)[0]


def likelihood(log_p, pos):
    """-> (n, n): the log-probability of each pair's offset in an order."""
    r = pos - pos[:, None] + log_p.size(-1) // 2
    return log_p.gather(-1, r[..., None])[..., 0].fill_diagonal_(0)


def restore_swap(model, sentence, rng):
    """-> (what the best order costs in mean log-probability, tokens that are then wrong), or None
    if fewer than two words are single tokens."""
    single, n = [], 0  # their positions, and the number of tokens
    for word in sentence.split():
        length = len(model.encoder.tokenizer.encode(" " + word))
        single += [n + 1] if length == 1 else []
        n += length
    if len(single) < 2:
        return None
    tokens, pos = encode(model.encoder, " " + sentence), torch.arange(n + 2)
    i, j = rng.sample(single, 2)
    pos[[i, j]] = pos[[j, i]]
    log_p, given = offsets_log_p(model, tokens, pos[None]), pos[1:-1]
    best = best_order(log_p, given)
    before, after = likelihood(log_p, given), likelihood(log_p, best)
    changed = (best - best[:, None] != given - given[:, None]).sum()
    wrong = (tokens[0, 1:-1][best.argsort()] != tokens[0, 1:-1]).sum()
    return float((before - after).sum() / changed), int(wrong)


def main(argv=None):
    parser = Parser("-m results.restore", __doc__)
    parser.add_argument("ckpt")
    parser.add_argument("--text", default="results/everyday.txt")
    parser.add_argument("--margin", type=float, nargs="+", default=MARGINS)
    with one_line_errors():
        args = parser.parse_args(argv)
        model = load_pretraining(args.ckpt)
        with open(args.text) as handle:
            sentences = [line.strip() for line in handle]
        for half in (0, 1):
            rng, found = random.Random(half), []
            with torch.no_grad():
                for sentence in sentences[half::2]:
                    found.append(restore_swap(model, sentence, rng))
            found = [x for x in found if x]
            print(f"\n{('even', 'odd')[half]} lines, {len(found)} sentences")
            for margin in args.margin:
                wrong = [wrong if cost <= margin else 2 for cost, wrong in found]
                print(
                    f"margin {margin:g}: {wrong.count(0)} restored, {wrong.count(2)} left or two "
                    f"tokens wrong, {sum(x > 2 for x in wrong)} made worse"
                )


if __name__ == "__main__":
    main()
