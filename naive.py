"""The papers' equations as plain loops, a pair of tokens at a time. Read this first; 20 minutes.

A sentence is a row of L tokens; token 0 is [CLS]. Attention lets token i look at every token j,
how much, says a number s_ij, the logit. Without positions it is q_i . k_j / sqrt(D), words alone:
shuffle the sentence, and every s_ij only moves along. Something must say where each word stands.
What follows are the ways to say it. model.py computes the same for all pairs at once.

Letters: q_i the query of token i, k_j the key of token j, v_j its value, D numbers each, of one
head of one layer. pos[i] is where token i is said to stand; r = pos[j] - pos[i] is the offset of a
pair. w holds what is learned, as this head of this layer sees it:

    w.p          a vector for each position; the last is for a hidden one
    w.a          a vector for each offset, row r + 64, clipped to +-64; last: an end is hidden
    w.b          a number for each bucket of offsets; last: an end is hidden
    w.U_Q, w.U_K matrices that project w.p (TUPE, bert_ad) or w.a (deberta)
    w.theta      two numbers for [CLS]: for its row and its column
    w.w          how fast the hands of sin and lsin turn; what else a scheme has stands in its line

P1 is the TUPE paper, P3 "On Position Embeddings in BERT", P0 relative position prediction.
"""

from math import cos, log, sin, sqrt

import torch

HIDDEN = -1  # the position of a token whose place is not told: the last row of each table


def at_input(name, word, position, w):
    """What the first layer is given of a token: its word's vector, in some schemes its place."""
    if name == "abs":  # BERT (P1 eq 3): a learned vector per position
        return word + w.p[position]
    if name in ("sin", "lsin"):  # Vaswani: clock hands; words start small, so they are multiplied
        place = w.p[HIDDEN] if position == HIDDEN else sinusoid(position, w.w)
        return sqrt(len(word)) * word + place
    return word


def logit(scheme, q, k, i, j, pos, w, L):
    """s_ij of one head. q, k (L, D): of all tokens of the row. scheme: a name, or a sum of names; w
    {name: its weights}. L: no scheme here needs it, yours may."""
    D, terms, s = len(q[i]), 1, 0.0
    q_i, k_j, r = q[i], k[j], pos[j] - pos[i]
    hidden = i != j and HIDDEN in (pos[i], pos[j])
    for name in scheme.split("+"):
        its = w[name]
        if name in ("rel", "rel_k", "rsin", "rlsin"):  # Shaw, P1 eq 4: the key knows its offset
            s += q[i] @ its.a[row_of(r, hidden)] / sqrt(D)
        elif name == "t5":  # P1 eq 5: a number per offset, whatever the words
            s += its.b[32 if hidden else bucket(r)]
        elif name == "alibi":  # the farther, the less
            s += its.unknown if hidden else -its.slope * abs(r)
        elif name == "rope":  # turn both by their positions: the product knows the difference
            q_i, k_j = rotate(q_i, pos[i]), rotate(k_j, pos[j])
        elif name == "deberta":  # the word asks for places, the place for words
            terms = 3
            s += q[i] @ (its.a[row_of(r, hidden)] @ its.U_K) / sqrt(3 * D)
            s += k[j] @ (its.a[row_of(-r, hidden)] @ its.U_Q) / sqrt(3 * D)
        elif name == "bert_ad":  # P1 sec 4.3: words and places added, each projected on its own
            terms = 4
            q_i, k_j = q[i] + its.p[pos[i]] @ its.U_Q, k[j] + its.p[pos[j]] @ its.U_K
        elif name.startswith("tupe") or name == "t5_untie_cls":  # P1: words here, places there
            terms = 1 if name == "t5_untie_cls" else 2
            untied = not name.endswith("_tie_cls")
            if untied and i == 0:  # what [CLS] sees does not depend on distance (P1 eq 9)
                s += its.theta[0]
            elif untied and j == 0:  # nor how others see it
                s += its.theta[1]
            else:
                s += places(name, its, pos[i], pos[j], r, hidden, D)
        elif name not in ("none", "abs", "sin", "lsin"):  # these act at the input alone
            raise ValueError(f"{name} has no equation yet: write it into logit in naive.py")
    return q_i @ k_j / sqrt(terms * D) + s


def places(name, w, pos_i, pos_j, r, hidden, D):
    """TUPE's v_ij: how the places i and j belong together, whatever words stand there."""
    v = 0.0
    if name == "tupe_a_free":  # P1 sec 5: a free number for each pair of places
        return w.M[pos_i, pos_j]
    if name.startswith("tupe"):  # P1 eq 10; w.p after its LayerNorm
        v = (w.p[pos_i] @ w.U_Q) @ (w.p[pos_j] @ w.U_K) / sqrt(2 * D)
    if name == "tupe_r_factored":  # P1 sec 5: b_r made of two projections of a_r
        a = w.a[row_of(r, hidden)]
        return v + (a @ w.F_Q) @ (a @ w.F_K)
    if name.startswith("tupe_r") or name == "t5_untie_cls":  # P1 eq 11: and T5's number
        v = v + w.b[32 if hidden else bucket(r)]
    return v


def attend(scheme, q, k, v, pos, w, pad):
    """One head: y_i = sum_j A_ij v_j, A_i. the softmax of s_i. over the tokens that are no padding
    -> (L, D)."""
    L, y = len(q), []
    for i in range(L):
        seen = [j for j in range(L) if not pad[j]]
        A = torch.stack([logit(scheme, q, k, i, j, pos, w, L) for j in seen]).softmax(0)
        y_i = 0.0
        for A_ij, j in zip(A, seen):
            y_i = y_i + A_ij * v[j]
            for name in scheme.split("+"):
                if name in ("rel", "rsin", "rlsin"):  # the value knows its offset, too
                    hidden = i != j and HIDDEN in (pos[i], pos[j])
                    y_i = y_i + A_ij * w[name].a[row_of(pos[j] - pos[i], hidden)]
        y.append(y_i)
    return torch.stack(y)


# --------------------------------------------------------------------------------------------------
# What the equations are made of


def row_of(r, hidden):
    """Row of a table of offsets."""
    return 129 if hidden else min(max(r, -64), 64) + 64


def bucket(r):
    """T5: 16 buckets a side; the first 8 hold one distance each, the others more, up to 128."""
    side, n = (16, r) if r > 0 else (0, -r)
    return side + (n if n < 8 else min(15, 8 + int(log(n / 8) / log(128 / 8) * 8)))


def frequencies(width):
    """w_k = 10000^(-2k/width)."""
    return [10000 ** (-2 * k / width) for k in range(width // 2)]


def sinusoid(x, w):
    """[sin w_0 x, cos w_0 x, sin w_1 x, ..]: hands of clocks, each slower than the one before."""
    hands = []
    for w_k in w:
        angle = torch.as_tensor(x * w_k, dtype=torch.double)
        hands += [angle.sin(), angle.cos()]
    return torch.stack(hands)


def rotate(x, position):
    """Each pair of numbers is a point in a plane, turned about the origin."""
    out = []
    for n, w_k in enumerate(frequencies(len(x))):
        angle, a, b = position * w_k, x[2 * n], x[2 * n + 1]
        out += [a * cos(angle) - b * sin(angle), a * sin(angle) + b * cos(angle)]
    return torch.stack(out)


# --------------------------------------------------------------------------------------------------
# Two losses


def mlm_loss(logits, words, selected):
    """Which words stood at the selected places? logits (L, V): the model's answer at every place,
    having seen [MASK] there -> mean of -log p(the word)."""
    losses = [-logits[i].log_softmax(0)[words[i]] for i in selected]
    return sum(losses) / len(losses)


def pplm_loss(answer, L, is_word):
    """How far apart do two words really stand (P0 sec 3.1)? Some of them were given each other's
    positions, and all ordered pairs are asked. answer(i, j) -> logits of the offsets 1-L .. L-1."""
    losses = []
    for i in range(L):
        for j in range(L):
            if i != j and is_word[i] and is_word[j]:  # [CLS] and [SEP] are not asked
                losses.append(-answer(i, j).log_softmax(0)[j - i + L - 1])
    return sum(losses) / len(losses)
