"""Probe how a model uses positions and tokens: indicators, losses and figures.

    python -m tools.probe                        # the newest run under out/ (or --ckpt RUN)
    python -m tools.probe --runs 'out/*'         # compare runs: tables, and the maps of all
    python -m tools.probe --pe t5,rope,alibi     # untrained schemes (or all); needs no run

The identical-word probe (Wang 2021, sec 4.2 and app. B) feeds sequences [CLS] w ... w [SEP], in
which only the positions differ, and averages the attention of layer 1 over heads and 300 words. The
indicators of this attention map are:

    opr   0 if nearer tokens always get more attention (monotonicity), .5 if the order is random;
          ties: the share of equal pairs, which opr counts as ordered; opr_20, ties_20: only the
          first 20 offsets
    aiv   0 if attention depends on the offset alone (translation invariance)
    sd    0 if attention is the same in both directions (symmetry)
    db    1 if the tokens before and after get the same attention (direction balance)

The losses are measured on the run's validation text: for a position objective, a token ablation
(the loss with true, random and shuffled tokens); for mlm, the loss at true positions. A position
objective uses the tokens if random ones increase its loss, and their order if shuffled ones do. The
spread of hidden states is 0 if they depend on their sequence and position, but not on their token.

Writes probe.json and, if matplotlib is installed, figures.
"""

import math
import os
import re
import statistics
from collections import defaultdict
from pathlib import Path

import numpy as np
import pandas  # comes with datasets
import torch
import torch.nn.functional as F

import objectives
from data import open_corpus, validation_batches
from finetune import best_runs
from lib.config import Parser, UserError, one_line_errors
from lib.device import keep_memory, pick_device
from lib.files import expand, newest_run, read_json, read_jsonl
from model import (
    PE_NAMES,
    Encoder,
    EncoderConfig,
    FactoredBias,
    Positions,
    Relative,
    RelativeKeys,
    RelativeSinusoidal,
    UntiedPositions,
    frequencies,
)
from objectives import new_batch, random_tokens, seeded_generator, shuffled_positions
from tools.output import add_run_flags, output_folder, print_table, write
from tools.sample import position_objective

MAX_POSITIONS = 128  # positions that are probed, as in Wang 2021
TIE = 1e-12  # differences below this share of the largest entry are rounding errors


# --------------------------------------------------------------------------------------------------
# Indicators (Wang 2021, app. B) of a map A (L, L), a float64 array with queries in rows


def aiv(A):
    """Translation invariance: the variance within groups of the same offset, relative to the
    variance of all entries; NaN for a constant map."""
    if np.ptp(A) <= TIE * abs(A).max():
        return math.nan
    groups = map(A.diagonal, range(1 - len(A), len(A)))
    return float(sum(len(group) * group.var() for group in groups) / A.size / A.var())


def order(A, first=None):
    """Monotonicity -> [opr, ties]: the shares of pairs, going outward from each i, that are out of
    decreasing order, and that are equal; first: use only that many entries. Ties count as ordered,
    so a low opr means nothing if there are many. The 2L series, S_i+ and S_i-, are weighted by
    length."""
    tie = TIE * abs(A).max()
    shares, weight = np.zeros(2), 0
    for i in range(len(A)):
        for s in (A[i, i:], A[i, i::-1]):  # S_i+ and S_i-, both from A_ii outward
            s = s[:first]
            rise = s - s[:, None]  # (n, n): farther entry minus nearer one
            rise = rise[np.triu_indices(len(s), 1)]
            if len(rise):
                shares += len(s) * np.mean([rise > tie, abs(rise) <= tie], 1)
                weight += len(s)
    return (shares / weight).tolist()


def opr(A, first=None):
    """Monotonicity: the first number of order."""
    return order(A, first)[0]


def sd(A):
    """Symmetry: the mean of |A_ij - A_ji| over i < j."""
    return float(abs(A - A.T)[np.triu_indices(len(A), 1)].mean())


def db(A, l=20):  # noqa: E741 (the paper's notation)
    """Direction balance: the sum below the diagonal over the sum above it, |i - j| <= l (the text
    of Wang 2021; its formula is upside down); inf for a causal map."""
    upper = np.triu(np.tril(A, l), 1).sum()
    lower = np.tril(np.triu(A, -l), -1).sum()
    with np.errstate(all="ignore"):
        return float(lower / upper)


def indicators(A):
    """-> {name: float}"""
    names = "opr ties opr_20 ties_20".split()
    return dict(zip(names, order(A) + order(A, 20)), aiv=aiv(A), sd=sd(A), db=db(A))


# --------------------------------------------------------------------------------------------------
# The identical-word probe


@torch.no_grad()
def attention_logits(encoder, tokens, causal=False):
    """The attention logits of layer 1, before the softmax -> (B, H, L, L)."""
    pos = Positions.of(tokens)
    q, k, _ = encoder.blocks[0].normed_heads(encoder.embed(tokens, pos))
    return encoder.logits(q, k, pos, 0, causal=causal)


def probe_words(encoder, n=300):
    """A fixed choice of n tokens that are whole words, or of any tokens if there are too few
    -> (n,) ids."""
    ids = range(encoder.config.cls_id)
    words = [
        i
        for i in ids
        if re.fullmatch(rb" [A-Za-z]{2,}", encoder.tokenizer.decode_single_token_bytes(i))
    ]
    order = np.random.default_rng(0).permutation(words if len(words) >= n else ids)
    return torch.from_numpy(order[:n])


def identical_word_maps(encoder, words, causal=False):
    """words (n,) ids -> the logits and the probabilities of layer 1 for sequences
    [CLS] w ... w [SEP], averaged over words: two float64 arrays (H, L, L)."""
    cfg = encoder.config
    sequences = words[:, None].repeat(1, min(MAX_POSITIONS, cfg.max_len))
    sequences[:, 0], sequences[:, -1] = cfg.cls_id, cfg.sep_id
    logits = A = 0
    for tokens in sequences.split(16):
        s = attention_logits(encoder, tokens, causal=causal).double()  # (16, H, L, L)
        logits = logits + s.sum(0)
        A = A + s.softmax(-1).sum(0)
    return (logits / len(words)).numpy(), (A / len(words)).numpy()


# --------------------------------------------------------------------------------------------------
# Losses


def run_corpus(run_info):
    """The prepared corpus that a run was trained on; nothing is prepared or downloaded. Raises
    UserError if it is not in the run's cache (any more)."""
    args, cache = run_info["args"], Path(run_info["args"]["cache"])
    for folder in (Path(args["dataset"]), *sorted(cache.glob("*"))):
        if (folder / "meta.json").exists() and read_json(folder / "meta.json") == run_info["data"]:
            return open_corpus(folder)
    dataset = run_info["data"]["dataset"]
    raise UserError(f"the text of the run ({dataset}) is not prepared in {cache}")


def detect_moved(encoder, objective, batch):
    """Measure how well a position objective detects moved tokens. Yield for each sequence with n
    eligible tokens: confidence (n,), the probability that a pair's assigned offset is the true one,
    averaged over all pairs of a token in both directions; stayed (n,) bool; and the AUC of the
    confidence (ties count 1/2; NaN if all tokens stayed or all moved)."""
    head, states = objective.head, encoder.hidden_states(batch["tokens"], batch["pos"])
    scores = head.scores(encoder, states, batch["pos"])  # (B, L-2, L-2, H)
    for s, pos, eligible in zip(scores, batch["pos"], batch["eligible"]):
        index = eligible.nonzero()[:, 0]
        pos = pos[index]
        assigned = pos - pos[:, None]  # (n, n)
        label = objective.label(assigned, assigned)  # the class if the assigned offset is true
        s = s[index - 1][:, index - 1]  # [CLS] has no scores
        p = head.psi(s).float().softmax(-1)  # (n, n, n_classes)
        p = p.gather(-1, label[..., None])[..., 0].fill_diagonal_(0)
        confidence = (p.sum(0) + p.sum(1)) / (2 * len(p) - 2)
        stayed = pos == index
        difference = confidence[stayed][:, None] - confidence[~stayed]
        yield confidence, stayed, float(difference.sign().mean() + 1) / 2


@torch.no_grad()
def token_ablation(model, corpus):
    """The loss of a position objective, in nats, on the validation sequences with the true tokens,
    with random ones, and with the sequence's own in another order. Without autocast and dropout
    (the model is left in eval mode), so `true` is the validation loss in the log of a float32 run.

    -> {"true", "random", "shuffled", "auc"}; auc: how well moved tokens are detected
    (detect_moved), None for pmlm.
    """
    [(name, objective)] = [x for x in model.objectives.items() if x[1].kind == "position"]
    encoder, losses, aucs = model.encoder, defaultdict(float), []
    cls_id, device = encoder.config.cls_id, encoder.tok.weight.device
    batches = validation_batches(corpus, encoder.config.max_len)
    model.eval()
    for number, tokens in enumerate(batches):  # the same corruption as in train.evaluate
        batch = model.corrupt(tokens.to(device), "validation", number)
        tokens, generator = batch["tokens"], seeded_generator(device, "ablation", number)
        order = shuffled_positions(tokens < cls_id, generator)
        for kind, replaced in {
            "true": tokens,
            "random": random_tokens(tokens, cls_id, generator),
            "shuffled": tokens.gather(1, order),
        }.items():
            _, scalars = model({**batch, "tokens": replaced})
            losses[kind] += float(scalars[name]) * len(tokens) / sum(map(len, batches))
        if not objective.masks_positions:
            aucs += [auc for *_, auc in detect_moved(encoder, objective, batch)]
    losses["auc"] = float(np.nanmean(aucs)) if aucs else None
    return losses


@torch.no_grad()
def mlm_losses(model, corpus):
    """The loss of mlm, in nats, on the validation sequences at true positions, whatever else the
    objective corrupts, so that mlm and mlm+pplm can be compared; and at shuffled positions. Without
    autocast and dropout -> {"mlm", "mlm_shuffled"}."""
    encoder, mlm = model.encoder, model.objectives["mlm"]
    batches, losses = validation_batches(corpus, encoder.config.max_len), defaultdict(float)
    model.eval()
    for number, tokens in enumerate(batches):
        tokens = tokens.to(encoder.tok.weight.device)
        batch = new_batch(tokens, encoder.config.vocab_size)
        mlm.corrupt(batch, seeded_generator(tokens.device, "validation", number, "mlm"))
        for kind in ("mlm", "mlm_shuffled"):
            if kind == "mlm_shuffled":
                mlm.ablate(batch, seeded_generator(tokens.device, "ablation", number))
            loss, _ = mlm.loss(encoder, encoder(batch["tokens"], batch.get("pos")), batch)
            losses[kind] += float(loss) * len(tokens) / sum(map(len, batches))
    return losses


@torch.no_grad()
def token_spread(encoder, tokens, causal=False):
    """How much hidden states depend on their own tokens, after each layer: their RMS after
    subtracting the mean of each sequence and of each position, divided by their RMS before.
    At 0, tokens cannot be told apart. tokens (B, L), of which only ordinary ones count
    -> a list of n_layer + 1 numbers, the first one for the embedding."""
    ordinary = (tokens < encoder.config.cls_id)[..., None].cpu().double()  # (B, L, 1)
    spreads = []
    for hidden in encoder.hidden_states(tokens, causal=causal):
        rest = hidden = hidden.cpu().double() * ordinary  # (B, L, C)
        for axis in (1, 0):  # the mean of each sequence, then of each position
            mean = rest.sum(axis, keepdim=True) / ordinary.sum(axis, keepdim=True).clamp(min=1)
            rest = (rest - mean) * ordinary
        spreads.append(float((rest.square().sum() / hidden.square().sum()).sqrt()))
    return spreads


# --------------------------------------------------------------------------------------------------
# Figures: {file: panels}, a panel being a dictionary with a matrix or with curves


def heatmap(title, matrix, axes=("key position", "query position"), first=0):
    """axes: labels of columns and rows; first: the position or offset of column and row 0."""
    return dict(title=title, axes=axes, first=first, matrix=np.asarray(matrix))


def attention_map(title, A):
    """A map of attention probabilities, to be compared with those of other models: on a fixed
    scale, in powers of two relative to uniform attention."""
    matrix = np.log2(np.maximum(A * len(A), 2.0**-9))
    return {**heatmap(title, matrix), "limits": (-3, 3)}


def position_vectors(encoder):
    """-> {"position": (L, C), "offset": (R, D) with offset 0 in the middle}, as far as the scheme
    has them, in float64."""
    vectors, scheme = {}, encoder.scheme
    L = min(MAX_POSITIONS, encoder.config.max_len)
    zero = encoder.config.max_offset  # the row of offset 0
    m = min(zero, L - 1)  # larger offsets do not occur in training
    offsets = slice(zero - m, zero + m + 1)
    p = scheme.embed(Positions(torch.arange(L)))
    if isinstance(p, torch.Tensor):
        vectors["position"] = p[0]
    for part in scheme.modules():
        if isinstance(part, UntiedPositions):  # TUPE, bert_ad: what U_Q and U_K are applied to
            vectors["position"] = part.norm(part.table.weight)[:L]
        if isinstance(part, (Relative, FactoredBias)):
            vectors["offset"] = part.table.weight[offsets]
        if isinstance(part, RelativeKeys):  # one table per layer: that of layer 1
            vectors["offset"] = part.layers[0].weight[offsets]
        if isinstance(part, RelativeSinusoidal):
            vectors["offset"] = part.vectors()[offsets]
    return {axis: v.detach().double() for axis, v in vectors.items()}


def similarity_maps(vectors):
    """Dot products (Wang 2021, figs 1 and 8) and cosines (fig 6) of position vectors."""
    panels = []
    for axis, v in vectors.items():
        first = -(len(v) // 2) if axis == "offset" else 0
        unit = F.normalize(v, dim=1)
        panels.append(heatmap("dot products", v @ v.T, (axis, axis), first))
        panels.append(heatmap("cosines", unit @ unit.T, (axis, axis), first))
    return panels


def proximity(vectors):
    """The mean dot product of two vectors at distance r (Wang 2021, fig 4b); for sinusoids with the
    default frequencies it is the mean of cos(w_k r) (eq 6)."""
    curves = {}
    for axis, v in vectors.items():
        length, width = v.shape
        r, dots = torch.arange(length), v @ v.T
        mean = torch.stack([dots.diagonal(i).mean() for i in r])
        curves[f"{axis} vectors"] = r, mean / mean[0]
        angles = r[:, None] * frequencies(width // 2 * 2, v)
        curves[f"default sinusoids of width {width}"] = r, angles.cos().mean(1)
    axes = dict(xlabel="distance r", ylabel="dot product relative to r = 0")
    return [dict(title="proximity", curves=curves, **axes)] if curves else []


def learned_frequencies(encoder):
    """The frequencies of lsin and rlsin beside the default ones (Wang 2021, fig 4a)."""
    curves = {}
    for name, part in encoder.scheme.parts.items():
        if getattr(part, "learned", False):  # sinusoids whose frequencies are parameters
            w, k = part.w.detach(), torch.arange(len(part.w))
            curves[f"{name}, learned"] = k, w.abs()
            curves[f"{name}, default"] = k, frequencies(2 * len(w), w)
    axes = dict(xlabel="k", ylabel="|w_k|, radians per position", yscale="log")
    return [dict(title="frequencies", curves=curves, **axes)] if curves else []


@torch.no_grad()
def figures_of(encoder, logits):
    """An encoder on the CPU, and its logits (H, L, L) of the identical-word probe -> the figures of
    one model; those for which the scheme has nothing to show are empty."""
    vectors, (H, L, _) = position_vectors(encoder), logits.shape
    # The logits without tokens, q = k = 0: TUPE's positional correlation, or another scheme's bias.
    zero = encoder.tok.weight.new_zeros(1, H, L, encoder.config.d_head)
    bias = encoder.logits(zero, zero, torch.arange(L), 0)[0]  # (H, L, L)
    heads = enumerate(bias if bias.any() else (), 1)
    return {
        "map.png": [heatmap(f"{encoder.config.pe}: mean logits", logits.mean(0))],  # figs 2, 11
        "vectors.png": similarity_maps(vectors),
        "proximity.png": proximity(vectors),
        "frequencies.png": learned_frequencies(encoder),
        "positional.png": [heatmap(f"head {h}", b) for h, b in heads],  # TUPE fig 5
    }


# --------------------------------------------------------------------------------------------------
# One run, many runs, untrained schemes


def examine(path, device):
    """-> the model on the CPU in float64, the mean logits (H, L, L) of the identical-word probe,
    its map A (L, L), and the numbers for probe.json. Raises UserError."""
    model = objectives.load(path)
    losses = {"words": dict.fromkeys(("true", "random", "shuffled", "auc"))}
    losses |= {"mlm": None, "mlm_shuffled": None, "spread": None}
    try:
        corpus = run_corpus(model.run_info)
    except UserError as error:
        print(f"{path}: no losses, {error}")
    else:
        model.to(device)
        tokens = validation_batches(corpus, model.encoder.config.max_len)[0].to(device)
        losses["spread"] = token_spread(model.encoder, tokens, model.causal)
        if position_objective(model):
            losses["words"] = token_ablation(model, corpus)
        if "mlm" in model.objectives:
            losses |= mlm_losses(model, corpus)
    model.cpu().double()  # in this order: an Apple GPU has no float64
    logits, A = identical_word_maps(model.encoder, probe_words(model.encoder), model.causal)
    A = A.mean(0)  # average first, then compute the indicators
    numbers = {
        "pe": model.encoder.config.pe,
        "objective": "+".join(model.names),
        "indicators": {
            "with_specials": indicators(A),
            "without_specials": indicators(A[1:-1, 1:-1]),  # rows, columns of [CLS] and [SEP]
        },
        **losses,
    }
    return model, logits, A, numbers


def probe_run(path, out_dir, device):  # --ckpt
    """Write and print the probe of one run. Raises UserError."""
    model, logits, A, numbers = examine(path, device)
    file = output_folder(path, "probe", out_dir) / "probe.json"
    write(file, {"ckpt": str(path), **numbers, "map": A}, figures_of(model.encoder, logits))
    print_table([{"": name.replace("_", " "), **x} for name, x in numbers["indicators"].items()])
    words = numbers["words"]
    if words["true"] is not None:
        print(
            "token ablation: position loss {true:.3f} with the true tokens, {random:.3f} with "
            "random ones, {shuffled:.3f} with shuffled ones".format(**words)
        )
    if words["auc"] is not None:
        print(f"AUC of moved tokens against the others: {words['auc']:.3f} (chance .5)")
    if numbers["spread"]:
        print(
            "spread of hidden states, layer 0 to the last:",
            *(f"{x:.2g}" for x in numbers["spread"]),
        )
    if numbers["mlm"] is not None:
        true, shuffled = numbers["mlm"], numbers["mlm_shuffled"]
        print(f"mlm loss: {true:.3f} at true positions, {shuffled:.3f} at shuffled ones")


def task_scores(folder, step):
    """-> {"task metric": median over seeds at the best learning rate} of the runs of finetune.py
    that started from a run's last checkpoint, with the settings of the last one of each task."""
    rows = [row for row in read_jsonl(folder / "results.jsonl") if row.get("step") == step]
    rows = [row for row in rows if "finetuned-" not in row["ckpt"]]

    def settings(row):
        return [row.get(x) for x in "ckpt recipe epochs batch_size length n_train".split()]

    last = {row["task"]: settings(row) for row in rows}
    rows = {(x["task"], x["lr"], x["seed"]): x for x in rows if settings(x) == last[x["task"]]}
    best = best_runs(rows.values(), statistics.median)
    return {
        f"{task} {metric}": statistics.median(row["metrics"][metric] for row in group)
        for (_, task), group in best.items()
        for metric in group[0]["metrics"]
    }


INDICATORS = ("opr", "opr_20", "aiv", "aiv w/o specials", "sd", "db")


def correlations(runs):
    """Pearson's r of indicators and task scores over the runs of one objective (Wang 2021, table 5)
    -> rows of a table. Runs without positions (none) are left out, as in its footnote 11."""
    rows, table = [], []
    for run in runs:
        for score, value in run["scores"].items():
            rows.append({**run, "score": score, "value": value})
    frame = pandas.DataFrame(rows, columns=["pe", "objective", "score", "value", *INDICATORS])
    frame = frame[frame.pe != "none"].replace([math.inf, -math.inf], math.nan)
    for (objective, score), group in frame.groupby(["objective", "score"]):
        if len(group) > 2:
            r = group[["value", *INDICATORS]].corr(min_periods=3)["value"].drop("value")
            table.append({"objective": objective, "score": score, "runs": len(group), **r})
    return table


def compare_runs(patterns, out_dir, device):  # --runs
    """Print the indicators (Wang 2021, table 2) and losses of runs and the correlations with their
    task scores; draw their maps side by side. Raises UserError."""
    globs = [os.path.expanduser(f"{pattern}/ckpt.pt") for pattern in patterns]
    folders, runs = {Path(file).parent for x in globs for file in expand(x)}, []
    for folder in sorted(folders):
        try:
            model, _, A, numbers = examine(folder, device)
        except UserError as error:
            print(f"{folder}: left out, {error}")
            continue
        log = read_jsonl(folder / "log.jsonl")
        val_loss = next((row["val_loss"] for row in reversed(log) if "val_loss" in row), None)
        step = model.run_info["step"]
        run = {
            "run": folder.name,
            **numbers,
            "spread": numbers["spread"] and numbers["spread"][-1],  # of the last layer
            "steps": step,
            "val_loss": val_loss,
            **numbers["indicators"]["with_specials"],
            "aiv w/o specials": numbers["indicators"]["without_specials"]["aiv"],
            **{f"words {kind}": loss for kind, loss in numbers["words"].items()},
            "scores": task_scores(folder, step),
        }
        loss = val_loss if numbers["mlm"] is None else numbers["mlm"]
        title = numbers["pe"] if loss is None else f"{numbers['pe']}: loss {loss:.2f}"
        runs.append((run, attention_map(title, A)))
    if not runs:
        raise UserError(f"{' '.join(patterns)}: no folder with a readable ckpt.pt")
    runs.sort(key=lambda pair: pair[0]["mlm"] or pair[0]["val_loss"] or math.inf)
    runs, maps = zip(*runs)
    table5 = correlations(runs)
    numbers = {"runs": runs, "correlations": table5}
    out = Path(out_dir or min(folders).parent / "probe")
    write(out / "probe.json", numbers, {"maps.png": maps})
    print_table(runs)
    if table5:
        print("Pearson's r; positive: runs with a higher indicator have better scores")
        print_table(table5)


def untrained_schemes(names, out_dir):  # --pe
    """The indicators and maps of schemes before training, in an encoder of the demo's shape with
    random tokens. Raises UserError."""
    maps, table = [], []
    names = PE_NAMES if names == "all" else names.split(",")
    try:
        configs = [EncoderConfig(vocab_size=8192, pe=pe.strip()) for pe in names]
    except ValueError as error:  # an unknown scheme or an illegal sum
        raise UserError(str(error)) from None
    for cfg in configs:
        torch.manual_seed(0)
        encoder = Encoder(cfg).requires_grad_(False)
        words = torch.arange(encoder.config.cls_id)[:: encoder.config.cls_id // 50]
        _, A = identical_word_maps(encoder.double().eval(), words)
        maps.append(attention_map(encoder.config.pe, A.mean(0)))
        table.append({"pe": encoder.config.pe, **indicators(A.mean(0)[1:-1, 1:-1])})
    write(Path(out_dir or "out/schemes", "probe.json"), {"schemes": table}, {"maps.png": maps})
    print_table(table)


# --------------------------------------------------------------------------------------------------


def parse_args(argv=None):
    parser, path = Parser("-m tools.probe", __doc__), os.path.expanduser
    mode = add_run_flags(parser, "probe, --pe: out/schemes")
    mode("--runs", nargs="+", metavar="GLOB", help="run folders to compare")
    mode("--pe", type=str.lower, help="untrained schemes, such as t5,rope,alibi, or all")
    mode("--dynamics", type=path, metavar="RUN", help="python -m tools.dynamics --ckpt RUN")
    return parser.parse_args(argv)


def main(argv=None):
    with one_line_errors():
        args = parse_args(argv)
        keep_memory()
        device = pick_device(args.device)
        if args.pe:
            untrained_schemes(args.pe, args.out_dir)
        elif args.runs:
            compare_runs(args.runs, args.out_dir, device)
        elif args.dynamics:  # its former name, in the rows of results/runs.jsonl
            from tools.dynamics import dynamics  # imports this file

            dynamics(args.dynamics, None, args.out_dir, device)
        else:
            probe_run(args.ckpt or newest_run(), args.out_dir, device)


if __name__ == "__main__":
    main()
