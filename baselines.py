"""What a reader who knows only so much would score: the lines that a loss is set beside.

    known = baselines(model, unigram)       # of a Pretraining -> {name: nats}, printed and logged

What each one knows stands in MEANING; which an objective has, in `of_part`. For pplm and its kin
rows have n = L - 2 eligible tokens; prior is p(r) ~ n - |r|, and each later one also knows what
those before it know: copy the two given positions, but no token; selected, which places were
selected; moved, which of them really moved.

Below copy, tokens are being read; below moved, free_slots and some_moved, order is known for sure.
Above these probe.py asks whether the loss rises when the words stand in another order.
"""

import math

import numpy as np

N_SPECIALS = 8
MEANING = {  # what one knows who loses so much
    "uniform": "which answers there are",
    "unigram": "how frequent words are",
    "constant": "how frequent the answers are",
    "prior": "how frequent each distance is",
    "copy": "where two words seem to stand, but no word",
    "selected": "where they seem to stand and which words were picked",
    "moved": "where they seem to stand and which words really moved",
    "free_slots": "which places are hidden",
    "some_moved": "which places moved",
    "binary": "how often a distance is the true one",
}
NAMES = {
    "pplm": ("prior", "copy", "selected", "moved"),
    "pmlm": ("prior", "free_slots"),
    "pplm_some": ("prior", "some_moved"),
    "pplm_binary": ("binary",),
}


def baselines(model, unigram) -> dict:
    """{name: nats} of a Pretraining; with several objectives, objective.name. unigram: the entropy
    of the corpus's words."""
    found, shape = {}, model.encoder.config
    for name, part in model.objectives.items():
        prefix = f"{name}." if len(model.names) > 1 else ""
        for key, value in of_part(name, part.cfg, shape, unigram).items():
            found[prefix + key] = value
    return found


def meaning_of(name):
    """pplm.copy -> what one knows who loses so much, in words."""
    return MEANING[name.rpartition(".")[2]]


def of_part(name, cfg, shape, unigram):
    """{name: nats} of one objective; an unknown one has none."""
    if name in ("mlm", "clm"):
        n_means = 2 if cfg.mlm_on == "all" else 1
        uniform = math.log(shape.vocab_size - N_SPECIALS)
        return {"uniform": n_means * uniform, "unigram": n_means * unigram}
    if name in ("tc", "nsp"):
        return {"constant": math.log(1 + cfg.tc_negatives if name == "tc" else 2)}
    if name not in NAMES:
        return {}
    # Mean |offset| of two different places: the best constant is 0.
    L = shape.max_len
    distance = L / 3 - 1 / 3
    if cfg.pair_loss == "wasserstein":
        return {"prior": distance}
    if cfg.pair_loss == "smooth_l1":
        return {"prior": (distance - 0.5) / L}
    known = position_baselines(L, cfg.pos_rate)
    uniform = math.log(2 if name == "pplm_binary" else 2 * L - 1)
    return {"uniform": uniform} | {key: known[key] for key in NAMES[name]}


def unigram_entropy(corpus):
    """Nats a token, of the first ten million tokens, specials left out."""
    counts = np.bincount(corpus.train[:10_000_000], minlength=corpus.vocab_size)[:-N_SPECIALS]
    return entropy(counts)


def position_baselines(L, rate) -> dict:
    """The cross-entropy (nats) of each reader of positions, for rows without an inner [SEP].

    prior is exact; the rest are means over random pairs of places, exact to about .003 (.01 at
    rates that move few). In a row with an inner [SEP] fewer tokens share the same k slots: at L 64
    binary is there .012 too high and copy .01 too low.
    """
    n, rng = L - 2, np.random.default_rng(0)
    k, samples = round(rate * n), min(4000, max(16, 2**26 // L**2))  # seconds, whatever L
    pairs = n * (n - 1)
    both, one = k * (k - 1) / pairs, 2 * k * (n - k) / pairs  # of a pair's ends, selected
    copy = inside = kept = moved = some = some_pairs = 0.0  # sums over the samples
    for _ in range(samples):
        a, b = rng.choice(n, 2, replace=False)
        weights = copy_weights(n, k, a, b)
        copy += offset_entropy(np.arange(n), weights)
        kept += np.trace(weights, b - a) / weights.sum()
        places = rng.choice(n, k, replace=False)
        inside += offset_entropy(places, np.ones((k, k)))
        places = places[places != rng.permutation(places)]
        m = len(places)  # so many really moved
        if m == 0:
            continue  # then all is known
        # Each row counts by its pairs: m (m - 1) with two moved ends, 2 m (n - m) with one.
        two_moved = m * (m - 1) * offset_entropy(places, moved_weights(m))
        some += two_moved
        some_pairs += m * (m - 1)
        moved += two_moved + 2 * m * (n - m) * math.log(m - 1)
    selected = both * inside / samples + one * math.log(k)
    p = kept / samples
    r = np.arange(-n + 1, n)
    return {
        "prior": entropy(np.where(r == 0, 0, n - abs(r))),
        "copy": copy / samples,
        "selected": selected,
        "moved": moved / pairs / samples,
        "free_slots": selected / (both + one),
        "some_moved": some / max(1, some_pairs),
        "binary": entropy(np.array([p, 1 - p])),
    }


def entropy(counts) -> float:
    p = counts[counts > 0] / counts.sum()
    return float(-(p * np.log(p)).sum())


def offset_entropy(places, weights) -> float:
    """Entropy of t_j - t_i, when (t_i, t_j) are two different of m places with weights (m, m),
    whose diagonal is set to 0."""
    np.fill_diagonal(weights, 0)
    r = places[None, :] - places[:, None]  # (m, m)
    return entropy(np.bincount((r - r.min()).ravel(), weights.ravel()))


def moved_weights(m):
    """P(t_i, t_j | i seen at place 0, j at place 1, and all m moved) up to a factor -> (m, m).

    How many permutations without a fixed point are left, once two tokens have their places?
    """
    trade, chain, free = (count_free(m - 2, fixed) for fixed in (m - 2, m - 3, m - 4))
    largest = max(trade, chain, 1)  # too large for floats
    weights = np.full((m, m), free / largest)
    weights[1, :] = weights[:, 0] = chain / largest  # one is at the other's place
    weights[1, 0] = trade / largest  # they traded
    weights[0, :] = weights[:, 1] = 0  # neither is where it is seen
    return weights


def count_free(n, k):
    """Permutations of n, of which the first k must not stay where they are."""
    return sum((-1) ** i * math.comb(k, i) * math.factorial(n - i) for i in range(k + 1))


def copy_weights(n, k, a, b):
    """P(t_i, t_j | i seen at a, j seen at b) times n (n - 1) -> (n, n).

    The corruption treats all places alike, so only the pattern counts: who is right, who is at the
    other's place. Both are selected with k (k - 1) / (n (n - 1)); two of k permuted places then go
    to two given ones with 1 / (k (k - 1)).
    """
    out, others = n - k, max(n - 2, 1)
    swapped = 1
    chain = (k - 2) / others  # a's true place is b, b's a third one
    right = out * (out - 1) + 2 * out + swapped  # no, one or both selected
    half = out * (k - 1) / others + chain  # one right, the other at a third
    rest = n * (n - 1) - right - swapped - 2 * (n - 2) * (half + chain)
    weights = np.full((n, n), rest / max((n - 2) * (n - 3), 1))
    weights[a, :] = weights[:, b] = half
    weights[b, :] = weights[:, a] = chain
    weights[a, b], weights[b, a] = right, swapped
    np.fill_diagonal(weights, 0)
    return weights
