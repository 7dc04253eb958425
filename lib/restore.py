"""Exchange two words of a sentence, and restore them with a model that predicts offsets."""

import itertools

import torch

# best_order shows the PROPOSALS most promising exchanges of two tokens to the model, and makes one
# if this raises the mean log-probability of the offsets by more than MARGIN.
PROPOSALS, MARGIN = 12, 0.12


def exchange_words(strings, generator):
    """n token strings -> positions (n,) from 1 on, in which two different words have exchanged
    theirs. A word is one token here; if there are fewer than two, any tokens count."""
    words = {
        token.lower(): i
        for i, (token, after) in enumerate(zip(strings, [*strings[1:], ""]))
        if token[:1].isspace() and token[1:].isalpha() and not after[:1].isalpha()
    }
    chosen = torch.tensor([*words.values()] if len(words) > 1 else range(len(strings)))
    two = chosen[torch.randperm(len(chosen), generator=generator)[:2]]
    pos = torch.arange(1, len(strings) + 1)
    pos[two] = pos[two.flip(0)]
    return pos


def best_order(predict, pos, margin=MARGIN):
    """Exchange two tokens as long as the order then looks better to the model.

    predict: positions (n,) of n tokens -> log-probabilities (n, n, 2L - 1) of the offset of each
    pair. pos (n,): the positions to begin with -> (n,).

    The score of an order is the mean log-probability of its offsets. One prediction proposes: of
    all exchanges, those that score best if the tokens keep the positions they have now. The model
    then sees each proposal, and the best one is made if it raises the score by more than `margin`.
    """

    def score(log_p, pos):
        r = pos - pos[:, None] + log_p.size(-1) // 2  # (n, n): classes of the offsets
        return log_p.gather(-1, r[..., None]).squeeze(-1).fill_diagonal_(0).sum() / (n * n - n)

    n, log_p = len(pos), predict(pos)
    most = score(log_p, pos)
    while True:
        orders = []
        for i, j in itertools.combinations(range(n), 2):
            orders.append(pos.clone())
            orders[-1][[i, j]] = pos[[j, i]]
        proposals = sorted(orders, key=lambda order: -score(log_p, order))[:PROPOSALS]
        predicted = [predict(order) for order in proposals]
        scores = [score(*pair) for pair in zip(predicted, proposals)]
        best = max(range(len(scores)), key=scores.__getitem__)
        if scores[best] <= most + margin:
            return pos
        pos, log_p, most = proposals[best], predicted[best], scores[best]
