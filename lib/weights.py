"""Loading weights: strictly, or whatever fits into another configuration (warm start)."""

from dataclasses import asdict

import torch

from lib.config import UserError


def load_strict(module, weights, path):
    """load_state_dict, with a one-line UserError if keys or shapes do not match."""
    try:
        module.load_state_dict(weights)
    except RuntimeError as error:
        reason = " ".join(str(error).split()).partition(": ")[2]
        raise UserError(f"{path} does not fit this model: {reason:.300}") from None


def warm_start(module, checkpoint, path) -> dict:
    """Copy the weights of a checkpoint that fit into a module (with `.encoder`) that may have
    another positional scheme, other settings of it, another objective or max_len.

    Weights are matched by name, so those of another scheme keep their initialization (Wang 2021
    replaces the scheme of a trained model). With a larger max_len, tables keep their trained rows
    and get new ones (Wang 2021 trains at length 128, then at 512). With another max_offset, tables
    keep their rows by offset.
    -> {"loaded": [...], "grown": [...], "new": [...], "dropped": [...]}: parameter names.
    Raises UserError if the encoders differ in anything else.
    """
    given, own = module.encoder.keep_offsets(checkpoint["model"], "encoder"), module.state_dict()
    old, new = checkpoint["config"], asdict(module.encoder.config)
    fixed = "vocab_size", "n_layer", "n_head", "d_model", "d_ff", "norm", "norm_eps"
    differ = [
        f"{key} is {old[key]} there, {new[key]} here" for key in fixed if old[key] != new[key]
    ]
    if differ:
        raise UserError(
            f"{path}: {', '.join(differ)}; only the positional scheme and its settings, the "
            "objective and a larger --block_size may differ"
        )
    old_len, added = old["max_len"], new["max_len"] - old["max_len"]
    if added < 0:
        raise UserError(
            f"{path} was trained on sequences of {old_len} tokens: --block_size must be at least "
            f"{old_len}, not {new['max_len']}"
        )
    changes = {"loaded": [], "grown": [], "new": [], "dropped": sorted(given.keys() - own.keys())}
    for key, target in own.items():
        sizes = list(zip(given[key].shape, target.shape)) if key in given else []
        if key in given and given[key].shape == target.shape:
            target.copy_(given[key])
            changes["loaded"].append(key)
        elif added and sizes and all(b - a in (0, added, 2 * added) for a, b in sizes):
            grow(target, given[key], old_len, added)
            changes["grown"].append(key)
        else:  # not in the checkpoint, or a head with other classes
            changes["new"].append(key)
    return changes


def grow(target, trained, old_len, added):
    """Copy a table for old_len positions into one for `added` more: each position keeps its row,
    the last row (masked positions) stays last, and a class of the pair head keeps its offset."""
    index = []
    for old, new in zip(trained.shape, target.shape):
        rows = torch.arange(old)
        if new - old == 2 * added:  # class = offset + L - 1
            rows += added
        elif new > old:
            rows[old_len:] += added
        index.append(rows)
    target[torch.meshgrid(*index, indexing="ij")] = trained.to(target)  # its device and dtype
