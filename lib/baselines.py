"""Baselines: the losses, in nats, of predictors that know only part of the input.

For pplm and its variants, sequences have n = L - 2 eligible tokens, and `prior` is p(r) ~ n - |r|
for r != 0. The others also know a pair's two assigned positions, but no token. A loss below `copy`
means that the model uses token identity. `free_slots` and `some_moved` know which positions were
masked or moved, too: a loss below them means that it has learned order.
"""

import functools
import math

import numpy as np

KNOWS = {  # "a predictor that knows only ..."
    "uniform": "the set of classes",
    "unigram": "token frequencies",
    "constant": "class frequencies",
    "prior": "the frequency of each offset",
    "copy": "the two assigned positions, and no token",
    "free_slots": "which positions are masked",
    "some_moved": "which positions really moved",
    "binary": "how often the assigned offset is the true one",
}
POSITION_BASELINES = {
    "pplm": ("prior", "copy"),
    "pmlm": ("prior", "free_slots"),
    "pplm_some": ("prior", "some_moved"),
    "pplm_binary": ("binary",),
}


def compute_baselines(model, corpus) -> dict:
    """{name: nats} for the objectives of a Pretraining model, as objective.name if it has several.

    An objective that is not listed here has none. Takes a few seconds for position objectives.
    """
    baselines, config = {}, model.encoder.config
    for name, part in model.objectives.items():
        own = {}
        if name in ("mlm", "clm"):
            n_means = 2 if part.cfg.mlm_on == "all" else 1
            n = config.cls_id  # ordinary tokens: the special ones have the last ids
            unigram = entropy(np.bincount(corpus.train[:10_000_000])[:n])
            own = {"uniform": n_means * math.log(n), "unigram": n_means * unigram}
        elif name in ("tc", "nsp"):
            own = {"constant": math.log(1 + part.cfg.tc_negatives if name == "tc" else 2)}
        elif name in POSITION_BASELINES:
            L = config.max_len
            values = position_baselines(L, part.cfg.pos_rate)
            own = {"uniform": math.log(2 if name == "pplm_binary" else 2 * L - 1)}
            own |= {key: values[key] for key in POSITION_BASELINES[name]}
        prefix = f"{name}." if len(model.objectives) > 1 else ""
        baselines |= {prefix + key: value for key, value in own.items()}
    return baselines


def compare(objective, loss, baselines) -> str:
    """The baselines of an objective on both sides of a loss, such as "below prior 4.444, above copy
    4.199"; "" if it has none."""
    own = {}
    for name, value in baselines.items():
        prefix, _, key = name.rpartition(".")
        if prefix in ("", objective):
            own[value] = key
    above, below = [x for x in own if x > loss], [x for x in own if x <= loss]
    sides = [f"below {own[min(above)]} {min(above):.3f}"] if above else []
    sides += [f"above {own[max(below)]} {max(below):.3f}"] if below else []
    return ", ".join(sides)


@functools.cache
def position_baselines(L, rate) -> dict:
    """Cross-entropies (nats) for sequences of L tokens without an inner [SEP].

    prior is exact; the others are means over random pairs of positions, exact to about 0.003 (0.01
    at rates that move few tokens, or all). With an inner [SEP], fewer tokens share the same k
    slots: at L = 64 binary is then 0.012 too high, and copy 0.01 too low.
    """
    n, rng = L - 2, np.random.default_rng(0)
    k, samples = round(rate * n), min(4000, max(16, 2**26 // L**2))  # a few seconds for any L
    both, one = k * (k - 1), 2 * k * (n - k)  # the number of pairs: both, one selected
    copy = inside = kept = some = some_pairs = 0.0  # sums over the samples
    for _ in range(samples):
        a, b = rng.choice(n, 2, replace=False)
        weights = copy_weights(n, k, a, b)
        copy += offset_entropy(np.arange(n), weights)
        kept += np.trace(weights, b - a) / weights.sum()
        selected = rng.choice(n, k, replace=False)
        inside += offset_entropy(selected, np.ones((k, k)))
        selected = selected[selected != rng.permutation(selected)]
        m = len(selected)  # the number that really moved
        if m:
            some += m * (m - 1) * offset_entropy(selected, moved_weights(m))
            some_pairs += m * (m - 1)
    p = kept / samples
    r = np.arange(-n + 1, n)
    return {
        "prior": entropy(np.where(r == 0, 0, n - abs(r))),
        "copy": copy / samples,
        "free_slots": (both * inside / samples + one * math.log(k)) / (both + one),
        "some_moved": some / max(1, some_pairs),
        "binary": entropy(np.array([p, 1 - p])),
    }


def entropy(counts) -> float:
    p = counts[counts > 0] / counts.sum()
    return float(-(p * np.log(p)).sum())


def offset_entropy(positions, weights) -> float:
    """The entropy of t_j - t_i, where (t_i, t_j) are two different positions out of m, with
    probabilities proportional to weights (m, m); the diagonal is set to 0."""
    np.fill_diagonal(weights, 0)
    r = positions[None, :] - positions[:, None]  # (m, m)
    return entropy(np.bincount((r - r.min()).ravel(), weights.ravel()))


def moved_weights(m):
    """P(t_i, t_j | i is assigned position 0, j position 1, all m moved), up to a factor -> (m, m):
    the number of permutations without a fixed point once the positions of two tokens are given."""
    swap, chain, free = (count_free(m - 2, fixed) for fixed in (m - 2, m - 3, m - 4))
    largest = max(swap, chain, 1)  # the counts are too large for floats
    weights = np.full((m, m), free / largest)
    weights[1, :] = weights[:, 0] = chain / largest  # one is from the other's position
    weights[1, 0] = swap / largest  # they swapped
    weights[0, :] = weights[:, 1] = 0  # neither is from its assigned position
    return weights


def count_free(n, k):
    """The number of permutations of n elements in which the first k have no fixed point."""
    return sum((-1) ** i * math.comb(k, i) * math.factorial(n - i) for i in range(k + 1))


def copy_weights(n, k, a, b):
    """P(t_i, t_j | i is assigned a, j is assigned b) times n (n - 1) -> (n, n).

    Corruption treats all positions alike, so only the pattern counts: which of the two is assigned
    its true position, and which the other's. Both are selected with probability
    k (k - 1) / (n (n - 1)); two of the k permuted positions then go to two given ones with
    probability 1 / (k (k - 1)).
    """
    out, others = n - k, max(n - 2, 1)
    swapped = 1
    chain = (k - 2) / others  # a's true position is b, and b's is a third one
    right = out * (out - 1) + 2 * out + swapped  # none, one or both are selected
    half = out * (k - 1) / others + chain  # one is right, the other from a third position
    rest = n * (n - 1) - right - swapped - 2 * (n - 2) * (half + chain)
    weights = np.full((n, n), rest / max((n - 2) * (n - 3), 1))
    weights[a, :] = weights[:, b] = half
    weights[b, :] = weights[:, a] = chain
    weights[a, b], weights[b, a] = right, swapped
    np.fill_diagonal(weights, 0)
    return weights
