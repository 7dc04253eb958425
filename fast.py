"""The same results, faster. Each piece opens with its plain twin; a test holds the two equal
(dropout's draws are others, at the same rate).

To understand the project the plain twins are enough: the mean of loss_in_chunks, by which the pairs
and the words of a batch are scored, and the clipped update of step_or_skip.
"""

from functools import partial

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

CHUNK_BYTES = 1 << 30  # float32 logits of pairs or of words that may be alive at once
CACHE_BYTES = 1 << 22  # the same, where each chunk is done with before the next begins


# --------------------------------------------------------------------------------------------------
# Dropout


@torch.library.custom_op("fast::draw", mutates_args=("kept",))
def draw(kept: torch.Tensor, cut: int) -> None:
    """Fill kept, in place, with 0 where 16 random bits (four times from one draw) are below cut,
    else with 1 over the share of those that are not.

    An operator, so that a compiler takes it as it is; in place, because of two calls with the same
    arguments it would make one, and all layers would drop the same numbers.
    """
    # numpy's generator takes a quarter of the time; torch's decides where it starts.
    source = np.random.SFC64(int(torch.randint(2**62, ())))
    draws = source.random_raw(-(-kept.numel() // 4)).view(np.int16)
    numbers = torch.from_numpy(draws)[: kept.numel()].view(kept.shape)
    torch.ge(numbers, cut - 32768, out=numbers)  # 0 or 1; as a bool it takes five times as long
    kept.copy_(numbers).mul_(65536 / (65536 - cut))


def drop(x, p):
    """The plain twin:

        return F.dropout(x, p)

    On a CPU 16 random bits decide about a number: F.dropout takes a draw each, a quarter of a step
    (`paper`, batch 16, bf16, one core: 0.75 of the time). p is rounded to 1/65536.
    """
    if x.device.type != "cpu":
        return F.dropout(x, p)
    cut = min(round(65536 * p), 65535)
    kept = torch.empty(x.shape, dtype=x.dtype)
    draw(kept, cut)
    return x * kept


class Dropout(nn.Dropout):
    def forward(self, x):
        return drop(x, self.p) if self.training else x


def dropout(p):
    """The plain twin: nn.Dropout(p). Without a rate there is nothing to call."""
    return Dropout(p) if p else nn.Identity()


# --------------------------------------------------------------------------------------------------
# Attention


def attention(q, k, v, bias, p, scale):
    """The plain twin (what a CPU takes: 212 against 323 ms, forward and backward, at B 64, H 16,
    L 128, D 16 in bf16 on 2 cores):

        A = (q * scale @ k.transpose(-1, -2) + bias).softmax(-1)
        return F.dropout(A, p) @ v

    bias (1 or B, 1 or H, L, L) or None. A GPU never stores A.
    """
    if bias is not None:
        bias = bias.contiguous()  # the kernel wants aligned rows, not InOrder's view
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p=p, scale=scale)


class InOrder:
    """Offsets of positions 0 .. L-1. The plain twin is model.Pairs, which looks up each pair's row.

    Here the table has a row for each offset -(L-1) .. L-1. The rows of (i, 0 .. L-1) then stand
    side by side, one place further left for each i: pick is a view with other strides, add_up its
    reverse, in half the time.
    """

    def __init__(self, L, max_offset):
        self.L, self.max_offset = L, max_offset

    def rows(self, table):
        """(R, D), a row for each clipped offset -> (2L-1, D), a row for each offset."""
        r = torch.arange(1 - self.L, self.L, device=table.device)
        return F.embedding(r.clamp(-self.max_offset, self.max_offset) + self.max_offset, table)

    def strides(self, x):
        """Size, strides and offset of the view (B, H, L, L) of a contiguous (B, H, L, 2L-1)."""
        B, H, L, R = x.shape
        return (B, H, L, L), (H * L * R, L * R, R - 1, 1), L - 1

    def pick(self, x):
        """(B, H, L, 2L-1) -> (B, H, L, L)"""
        return x.contiguous().as_strided(*self.strides(x))

    def add_up(self, A, n_rows):
        """(B, H, L, L) -> (B, H, L, 2L-1)"""
        zeros = A.new_zeros(*A.shape[:-1], n_rows)
        return torch.as_strided_scatter(zeros, A, *self.strides(zeros))


# --------------------------------------------------------------------------------------------------
# Losses


class AtOnce(torch.autograd.Function):
    """Sums over chunks, with the gradient of each taken while its logits are still in the cache.
    What is kept for the way back is the gradient itself, of x and of the head's parameters."""

    @staticmethod
    def forward(ctx, sums, size, x, target, weight, *parameters):
        totals, of_x, of_parameters = 0, [], 0
        for part, *rest in zip(x.split(size), target.split(size), weight.split(size)):
            with torch.enable_grad():
                part = part.detach().requires_grad_()
                found = sums(part, *rest)
                first, *others = torch.autograd.grad(found[0], [part, *parameters])
            totals = totals + found.detach()
            of_x.append(first)
            of_parameters = (
                [a + b for a, b in zip(of_parameters, others)] if of_parameters else others
            )
        ctx.save_for_backward(torch.cat(of_x), *of_parameters)
        return totals

    @staticmethod
    def backward(ctx, upstream):
        gradients = [upstream[0].to(g.dtype) * g for g in ctx.saved_tensors]
        return None, None, gradients[0], None, None, *gradients[1:]


def loss_in_chunks(head, parameters, x, target, weight, measure, width, judge):
    """Mean loss of head(x) beside target, and share of right predictions, both weighted.

    The plain twin:

        logits = head(x).float()                                        # (N, classes)
        loss = (measure.loss(logits, target) * weight).sum() / weight.sum()
        right = ((measure.predict(logits) == target) * weight).sum() / weight.sum()

    x (N, ..), target (N,), weight (N,). A row of L tokens has L^2 (2L - 1) logits of pairs, or L V
    of words: more than a memory holds. So they are made in chunks, one alive at a time. Compiled,
    they are made again in the backward pass. width: numbers an item has at its widest; parameters:
    those of the head that learn.
    -> tensors (), (): loss, and accuracy (0 unless it is to judge).
    """

    def sums(x, target, weight):
        logits = head(x).float()
        loss = measure.loss(logits, target) * weight
        right = (measure.predict(logits) == target) * weight if judge else weight.new_zeros(())
        return torch.stack((loss.sum(), right.sum()))

    weight, at_once = weight.float(), not torch.compiler.is_compiling() and torch.is_grad_enabled()
    # At least eight times the head's own weights, whose gradient each chunk adds up.
    own = sum(4 * p.numel() for p in parameters)
    size = max(1, (max(CACHE_BYTES, 8 * own) if at_once else CHUNK_BYTES) // (4 * width))
    if at_once and size < len(x):
        total = AtOnce.apply(sums, size, x, target, weight, *parameters)
    else:
        chunks = zip(x.split(size), target.split(size), weight.split(size))
        if size < len(x) and torch.is_grad_enabled():
            sums = partial(checkpoint, sums, use_reentrant=False, preserve_rng_state=False)
        total = sum(sums(*chunk) for chunk in chunks)
    loss, right = total / weight.sum().clamp(min=1)
    return loss, right


# --------------------------------------------------------------------------------------------------
# The optimiser's step


def step_or_skip(parameters, optimizer, scaler):
    """Clip the gradient, update unless it is not finite, clear it. -> () 1.0 if skipped.

    The plain twin, which waits for the device at every step:

        norm = nn.utils.clip_grad_norm_(parameters, 1.0)
        if norm.isfinite():
            optimizer.step()

    Here the decision is taken on the device: fused AdamW reads `found_inf` there, and leaves
    weights, moments and its count of steps alone where it is 1. (`grad_scale` would divide the
    gradients; None: they are as they should be.) With fp16 the scaler does the same, having
    multiplied the loss so that small gradients do not vanish, and finds its scale by trying.
    """
    scaler.unscale_(optimizer)
    norm = nn.utils.clip_grad_norm_(parameters, 1.0)
    bad = (~norm.isfinite()).float()
    if scaler.is_enabled():
        scaler.step(optimizer)
        scaler.update()
    else:
        optimizer.grad_scale, optimizer.found_inf = None, bad
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return bad
