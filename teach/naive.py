"""The papers' equations as plain loops over pairs of tokens. Read this first; it takes 20 minutes.

A sequence has L tokens, and token 0 is [CLS]. In attention, token i (the query) attends to every
token j (the key); a number s_ij, the logit, says how strongly. Without positions the logit is
q_i . k_j / sqrt(D), which depends on the tokens alone: if the sequence is shuffled, the same logits
appear in another order. So the model has to be given each token's position. This file has every
way of doing so that model.py implements; model.py computes the same logits for all pairs at once.

Notation, for one head of one layer: q_i is the query of token i, k_j the key of token j, v_j its
value; each is a vector of D numbers. pos[i] is the position assigned to token i, or MASKED (one
training task hides positions), and r = pos[j] - pos[i] is the offset of a pair. w holds the learned
weights of a scheme, as this head of this layer uses them:

    w.p          a vector (C,) per position; the last one is for masked positions
    w.a          a vector per offset, (D,) or for deberta, xl and tupe_r_factored (C,): row r + 64,
                 with r clipped to +-64; the last one is for pairs with a masked position
    w.b          a number per bucket of offsets; the last one is for pairs with a masked position
    w.U_Q, w.U_K matrices (C, D) that project w.p (TUPE, bert_ad) or w.a (deberta); so do w.F_Q and
                 w.F_K in tupe_r_factored
    w.theta      two numbers for [CLS]: the first for its row, the second for its column (TUPE
                 computes them from two vectors)
    w.M          a number per pair of positions (tupe_a_free)
    w.w          the frequencies of sin and lsin
    w.left, w.right, w.masked   slopes for tokens to the left and to the right (the same in alibi),
                 and a number for pairs with a masked position
    w.u, w.v, w.W   vectors (D,) and a matrix (C, D) that projects w.a (xl)

RPP is the paper on relative position prediction (Brüel-Gabrielsson & Scarvelis 2022), TUPE is Ke
et al. (2021), TACO is Fu et al. (2022), and Wang 2021 is "On Position Embeddings in BERT".
"""

from math import cos, log, sin, sqrt

import torch

MASKED = -1  # the id of a masked position, and the index of the last row of a table
TUPE = ("tupe_a", "tupe_r", "tupe_a_tie_cls", "tupe_r_tie_cls", "tupe_a_free", "tupe_r_factored")


def at_input(name, x, position, w):
    """The input of the first layer for one token with the embedding x (C,), before LayerNorm."""
    if name == "abs":  # BERT (TUPE eq 3): a learned vector per position
        return x + w.p[position]
    if name in ("sin", "lsin"):  # Vaswani; token embeddings are small at first, so scale them up
        p = w.p[MASKED] if position == MASKED else sinusoid(position, w.w)
        return sqrt(len(x)) * x + p
    return x


def logit(scheme, q, k, i, j, pos, weights):
    """The logit s_ij of one head.

    scheme: a name, or a sum of names such as "abs+t5"; weights: {name: its w}; q, k (L, D): the
    queries and keys of all tokens.
    """
    D, terms, s = len(q[i]), 1, 0.0
    q_i, k_j, r = q[i], k[j], pos[j] - pos[i]
    masked = i != j and MASKED in (pos[i], pos[j])
    for name in scheme.split("+"):
        w = weights[name]
        if name in ("rel", "rel_k", "rsin", "rlsin"):  # Shaw, TUPE eq 4: k_j + a_r
            s += q[i] @ w.a[offset_row(r, masked)] / sqrt(D)
        elif name == "t5":  # TUPE eq 5: a number per bucket, whatever the tokens are
            s += w.b[32 if masked else bucket(r)]
        elif name in ("alibi", "alibi_ns"):  # decreases with the distance
            s += w.masked if masked else -(w.right if r > 0 else w.left) * abs(r)
        elif name == "xl":  # Transformer-XL: u and v stand for a query that is always the same
            a = w.a[offset_row(r, masked)] @ w.W
            s += (w.u @ k[j] + (q[i] + w.v) @ a) / sqrt(D)
        elif name == "rope":  # rotate both; their product then depends on the offset alone
            q_i, k_j = rotate(q_i, pos[i]), rotate(k_j, pos[j])
        elif name == "deberta":  # content-to-position and position-to-content
            terms = 3
            s += q[i] @ (w.a[offset_row(r, masked)] @ w.U_K) / sqrt(3 * D)
            s += k[j] @ (w.a[offset_row(-r, masked)] @ w.U_Q) / sqrt(3 * D)
        elif name == "bert_ad":  # TUPE sec 4.3: token + position, with separate projections
            terms = 4
            q_i, k_j = q[i] + w.p[pos[i]] @ w.U_Q, k[j] + w.p[pos[j]] @ w.U_K
        elif name in TUPE or name == "t5_untie_cls":  # tokens and positions separately
            terms = 2 if name in TUPE else 1
            tied = name in ("tupe_a_tie_cls", "tupe_r_tie_cls")
            if i == 0 and not tied:  # attention from [CLS] does not depend on distance (TUPE eq 9)
                s += w.theta[0]
            elif j == 0 and not tied:  # nor does attention to [CLS]
                s += w.theta[1]
            else:
                s += positional_logit(name, w, pos[i], pos[j], r, masked, D)
        elif name not in ("none", "abs", "sin", "lsin"):  # these act only at the input
            raise ValueError(f"{name} has no equation yet: add it to logit in teach/naive.py")
    return q_i @ k_j / sqrt(terms * D) + s


def positional_logit(name, w, pos_i, pos_j, r, masked, D):
    """TUPE's v_ij, which depends on the two positions and not on the tokens."""
    if name == "tupe_a_free":  # TUPE sec 5: a free number per pair of positions
        return w.M[pos_i, pos_j]
    if name == "t5_untie_cls":  # T5's b_r alone
        return w.b[32 if masked else bucket(r)]
    v = (w.p[pos_i] @ w.U_Q) @ (w.p[pos_j] @ w.U_K) / sqrt(2 * D)  # TUPE eq 10; p after LayerNorm
    if name in ("tupe_r", "tupe_r_tie_cls"):  # TUPE eq 11: plus T5's b_r
        v = v + w.b[32 if masked else bucket(r)]
    if name == "tupe_r_factored":  # TUPE sec 5: b_r as the product of two projections of a_r
        a = w.a[offset_row(r, masked)]
        v = v + (a @ w.F_Q) @ (a @ w.F_K)
    return v


def attend(scheme, q, k, v, pos, weights, pad, kept=None):
    """One attention head: y_i = sum_j A_ij v_j, where A_i is the softmax of s_i over all tokens
    that are not padding. q, k, v (L, D), pos and pad lists of length L -> (L, D). kept (L, L): what
    dropout multiplies A by in training, 0 or 1 / (1 - p)."""
    L, y = len(q), []
    for i in range(L):
        keys = [j for j in range(L) if not pad[j]]
        A = torch.stack([logit(scheme, q, k, i, j, pos, weights) for j in keys]).softmax(0)
        A = A if kept is None else A * kept[i, keys]
        y_i = 0.0
        for A_ij, j in zip(A, keys):
            y_i = y_i + A_ij * v[j]
            for name in scheme.split("+"):
                if name in ("rel", "rsin", "rlsin"):  # Shaw: v_j + a_r
                    masked = i != j and MASKED in (pos[i], pos[j])
                    y_i = y_i + A_ij * weights[name].a[offset_row(pos[j] - pos[i], masked)]
        y.append(y_i)
    return torch.stack(y)


# --------------------------------------------------------------------------------------------------
# Parts of the equations


def offset_row(r, masked):
    """The row of the offset r in a table of offsets."""
    return 129 if masked else min(max(r, -64), 64) + 64


def bucket(r):
    """T5's bucket of the offset r: 16 per sign; the first 8 hold one distance each, the others
    logarithmically spaced ranges up to 128."""
    first, distance = (16, r) if r > 0 else (0, -r)
    if distance < 8:
        return first + distance
    return first + min(15, 8 + int(log(distance / 8) / log(128 / 8) * 8))


def frequencies(width):
    """w_k = 10000^(-2k/width)."""
    return [10000 ** (-2 * k / width) for k in range(width // 2)]


def sinusoid(x, w):
    """[sin w_0 x, cos w_0 x, sin w_1 x, cos w_1 x, ...]"""
    waves = []
    for w_k in w:
        angle = torch.as_tensor(x * w_k, dtype=torch.double)
        waves += [angle.sin(), angle.cos()]
    return torch.stack(waves)


def rotate(x, position):
    """Each pair of numbers is a point in a plane, rotated about the origin by position * w_n."""
    rotated = []
    for n, w_n in enumerate(frequencies(len(x))):
        angle, a, b = position * w_n, x[2 * n], x[2 * n + 1]
        rotated += [a * cos(angle) - b * sin(angle), a * sin(angle) + b * cos(angle)]
    return torch.stack(rotated)


# --------------------------------------------------------------------------------------------------
# Three losses


def mlm_loss(logits, tokens, selected):
    """Predict the original tokens at the selected indices, most of which the model saw as [MASK].
    logits (L, V), tokens (L,) -> the mean of -log p(token)."""
    losses = [-logits[i].log_softmax(0)[tokens[i]] for i in selected]
    return sum(losses) / len(losses)


def pplm_loss(pair_logits, L, eligible):
    """Predict the true offset of each ordered pair of tokens, when some tokens were given each
    other's positions (RPP sec 3.1). pair_logits(i, j) -> logits (2L-1,) of the offsets 1-L ... L-1;
    eligible[i]: token i is not special; special tokens are not scored."""
    losses = []
    for i in range(L):
        for j in range(L):
            if i != j and eligible[i] and eligible[j]:
                losses.append(-pair_logits(i, j).log_softmax(0)[j - i + L - 1])
    return sum(losses) / len(losses)


def tc_loss(h, e, candidates, anchors, temperature):
    """Each anchor must pick its neighbor among candidates, by what the context added to each token,
    g = h - e (TACO eq 3 to 8). h, e (B L, C): hidden states and embeddings; candidates[i]: indices
    of the neighbor, then of K tokens of other sequences (no gradient)."""
    g, losses = h - e, []
    for i in anchors:
        cosines = [torch.cosine_similarity(g[i], g[j].detach(), dim=0) for j in candidates[i]]
        losses.append(-(torch.stack(cosines) / temperature).log_softmax(0)[0])
    return sum(losses) / len(losses)
