"""What a model has learned about positions: numbers, pictures, and a try.

    python probe.py --ckpt RUN                  # one run: P3's indicators, and what positions look like
    python probe.py --runs 'out/*'              # many runs: P3's table 2, losses, and table 5 where they were fine-tuned
    python probe.py --dynamics RUN              # over the checkpoints of train.py --keep_every: P2 figs 3, 6, P3 fig 8
    python probe.py --text 'Returns the [MASK] of the array.'   # try a model; what it does depends on its objective:

mlm                      a text with [MASK]              the five likeliest words
nsp                      'first part ||| second part'    does the second follow the first?
tc                       'one text ||| another text'     how alike are contexts within a text, and across?
pplm, pplm_some, pmlm    a sentence                      is shuffled, and put back in order
pplm_binary              a sentence                      is shuffled: which tokens moved?
clm                      the beginning of a text         goes on

Takes the newest run under out/ unless --ckpt names one. Writes a folder with probe.json and, where matplotlib is there,
pictures. Needs no GPU. P1 is the TUPE paper, P2 TACO, P3 "On Position Embeddings in BERT".
"""

import glob
import json
import math
import os
import re
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from data import Parser, one_line_errors, open_corpus, write_json
from model import MAX_OFFSET, UNKNOWN_POS, FactoredBias, UntiedTable, frequencies
from objectives import KINDS, load_pretraining, new_batch, stream

SHOWN = 128             # positions that are probed and shown, as in P3
TIE = 1e-12             # differences below this share of the largest entry are rounding
DYNAMICS_ROWS = 128     # validation rows that --dynamics reads
NEXT_TOKENS = 20        # with which clm goes on
COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"]     # Okabe and Ito: colour-blind safe
NOT_COMPARED = set("pe objective steps out_dir cache device dtype compile log_every eval_every keep_every resume".split())


# ---------------------------------------------------------------------------------------------------------
# Indicators (P3 app. B) of a float64 map A (L, L), queries in rows; ideally 0, direction balance 1. Then where A comes
# from: rows of one word, in which nothing but the position differs.

def aiv(A):
    """Translation invariance: variance within groups of one offset, over the variance of all. NaN for a constant map."""
    if np.ptp(A) <= TIE * abs(A).max():
        return math.nan
    return float(sum(len(g) * g.var() for g in (A.diagonal(r) for r in range(1 - len(A), len(A)))) / A.size / A.var())


def opr(A, first=None):
    """Monotonicity: share of pairs out of decreasing order, outward from each i, among the `first` elements; .5 random."""
    return pair_share(A, first, lambda rise, tie: rise > tie)


def tie_rate(A, first=None):
    """Share of opr's pairs that are ties. These count as ordered: where many are, a low opr says nothing."""
    return pair_share(A, first, lambda rise, tie: abs(rise) <= tie)


def pair_share(A, first, counts):
    """Share of pairs that count in the 2L sequences outward from each i, weighted by length; one of length 1 has no pair."""
    tie, total, weight = TIE * abs(A).max(), 0.0, 0
    for i in range(len(A)):
        for s in (A[i, i:][:first], A[i, i::-1][:first]):                           # S_i+ and S_i-, both from A_ii
            if (n := len(s)) > 1:
                rise = s[None, :] - s[:, None]                                      # (n, n), farther less nearer
                total += n * np.triu(counts(rise, tie), 1).sum() / (n * (n - 1) / 2)
                weight += n
    return float(total / weight) if weight else math.nan


def sd(A):
    """Symmetry: mean |A_ij - A_ji| over i < j."""
    return float(abs(A - A.T)[np.triu_indices(len(A), 1)].mean())


def db(A, l=20):    # noqa: E741 (P3's letter)
    """Direction balance: sum below the diagonal over sum above it, |i - j| <= l (P3's text; its formula is upside down)."""
    r = np.arange(len(A)) - np.arange(len(A))[:, None]                              # (L, L), key minus query
    lower, upper = A[(r < 0) & (r >= -l)].sum(), A[(r > 0) & (r <= l)].sum()
    return float(lower / upper) if upper else math.inf if lower else math.nan


def indicators(A):
    """-> {"with_specials": {name: float}, "without_specials": ..}: without the rows and columns of [CLS] and [SEP]."""
    return {name: {"opr": opr(B), "ties": tie_rate(B), "opr_20": opr(B, 20), "ties_20": tie_rate(B, 20), "aiv": aiv(B),
                   "sd": sd(B), "db": db(B)} for name, B in (("with_specials", A), ("without_specials", A[1:-1, 1:-1]))}


def probe_words(encoder, n=300):
    """A fixed choice of n whole words, or of any ordinary tokens where there are too few words -> (n,) ids."""
    ids = range(encoder.config.cls_id)
    words = [i for i in ids if re.fullmatch(rb" [A-Za-z]{2,}", encoder.tokenizer.decode_single_token_bytes(i))]
    return torch.from_numpy(np.random.default_rng(0).permutation(words if len(words) >= n else ids)[:n])


def identical_words(encoder, words):
    """(n,) ids -> rows [CLS] w .. w [SEP], at most 16 at a time: (n, L) each."""
    rows = words[:, None].repeat(1, min(SHOWN, encoder.config.max_len))
    rows[:, 0], rows[:, -1] = encoder.config.cls_id, encoder.config.sep_id
    return rows.split(16)


@torch.no_grad()
def identical_word_maps(encoder, words, causal=False):
    """P3 sec 4.2: layer 1's logits and probabilities for rows [CLS] w .. w [SEP], means over w -> 2 float64 arrays (H, L, L)."""
    logits, A = 0, 0
    for tokens in identical_words(encoder, words):
        x, pos, mask = encoder._run(tokens, None, None, causal, 0)
        q, k, _ = encoder.blocks[0].heads(x)
        s = encoder.pe.logits(q, k, pos, encoder.pe.relative(pos, 0), mask).double()        # (n, H, L, L)
        logits, A = logits + s.sum(0), A + s.softmax(-1).sum(0)
    return (logits / len(words)).numpy(), (A / len(words)).numpy()


@torch.no_grad()
def hidden_spread(encoder, words, causal=False):
    """What the last hidden states of the same rows tell apart: their standard deviation over words at one place, and over the
    places of one word, specials left out, means over the rest and over dimensions -> {name: float}."""
    hidden = torch.cat([encoder(rows, causal=causal) for rows in identical_words(encoder, words)])[:, 1:-1]   # (n, L-2, C)
    return {f"std {name}": float(hidden.std(axis, unbiased=False).mean()) for axis, name in enumerate(("words", "places"))}


def probe_map(path):
    """-> model in float64, the mean logits (H, L, L), the one map A (L, L): averaged over heads and words, then judged; the
    spread of the hidden states of 64 words."""
    model = load_pretraining(path).double()
    words = probe_words(model.encoder)
    logits, A = identical_word_maps(model.encoder, words, model.causal)
    return model, logits, A.mean(0), hidden_spread(model.encoder, words[:64], model.causal)


@torch.no_grad()
def position_vectors(encoder):
    """-> {"absolute": (0, (L, C) array), "relative": (the first one's offset, (R, D) array)}, as far as the scheme has them."""
    pe, L = encoder.pe, min(SHOWN, encoder.config.max_len)
    pos, m = torch.arange(L)[None], min(MAX_OFFSET, L - 1)                          # longer offsets were never trained
    absolute, relative = pe.call("embed", pos), pe.call("relative", pos, 0)         # rel_k: layer 1's table
    untied, factored = ([p for p in pe.modules() if isinstance(p, kind)] for kind in (UntiedTable, FactoredBias))
    if untied:                                                                      # TUPE, bert_ad: as U_Q and U_K see them
        absolute = untied[0].norm(untied[0].table.weight)[None, :L]
    table = relative[1] if relative else factored[0].table.weight if factored else None
    found = {"absolute": (0, absolute if absolute is None else absolute[0]),
             "relative": (-m, table if table is None else table[MAX_OFFSET - m:MAX_OFFSET + m + 1])}
    return {name: (first, v.double().numpy()) for name, (first, v) in found.items() if v is not None}


# ---------------------------------------------------------------------------------------------------------
# Pictures: {file: [panel, ..], or why it is left out}. A panel is a dict, whose numbers go to probe.json, drawn or not.

def maps(titles, matrices, x="key position", y="query position", first=0):      # first: what row and column 0 stand for
    return [dict(title=title, x=x, y=y, first=first, matrix=matrix) for title, matrix in zip(titles, matrices)]


def lines(title, x, y, curves, log=False):                                      # curves: {name: (x, y)}
    return [dict(title=title, x=x, y=y, curves=curves, log=log)]


def vector_maps(vectors, names=("dot products", "cosines")):
    """Dot products of position vectors (P3 figs 1, 8) and, given two names, cosines (fig 6)."""
    panels = []
    for kind, (first, v) in vectors.items():
        unit = v / np.maximum(np.linalg.norm(v, axis=1, keepdims=True), 1e-30)
        axis = "position" if kind == "absolute" else "offset"
        panels += maps([f"{kind}: {name}" for name in names], [v @ v.T, unit @ unit.T], axis, axis, first)
    return panels


def proximity(vectors):
    """Mean dot product of two vectors r places apart (P3 fig 4b); of default sinusoids: mean cos(w_k r) (P3 eq 6)."""
    curves = {}
    for kind, (_, v) in vectors.items():
        r, w, dots = np.arange(len(v)), frequencies(v.shape[1]).double().numpy(), v @ v.T
        mean = np.array([dots.diagonal(i).mean() for i in r])
        curves |= {kind: (r, mean / mean[0]), f"default sinusoids, width {len(v[0])}": (r, np.cos(r[:, None] * w).mean(1))}
    return lines("proximity of positions (P3 fig 4b)", "offset between the two", "dot product, as a share of that at 0", curves)


@torch.no_grad()
def pictures_of(encoder, logits, per_head):
    """-> pictures of one model."""
    pe, heads, L = encoder.config.pe, [f"head {h + 1}" for h in range(encoder.config.n_head)], logits.shape[-1]
    vectors, curves, no_vectors = position_vectors(encoder), {}, f"{pe} has no vectors of positions or offsets"
    for name, part in encoder.pe.parts.items():
        if isinstance(w := getattr(part, "w", None), torch.nn.Parameter):
            k = np.arange(len(w))
            curves |= {f"{name}: learned": (k, abs(w.numpy())), f"{name}: default": (k, frequencies(2 * len(w)).numpy())}
    nothing = torch.zeros(1, len(heads), L, encoder.config.d_head, dtype=encoder.tok.weight.dtype)     # q = k = 0 (P1 fig 5)
    positional = encoder.logits(nothing, nothing, torch.arange(L)[None], 0)[0].numpy()      # (H, L, L)
    return {
        "map.png": maps([f"{pe}: mean logits"], [logits.mean(0)]),                  # P3 figs 2, 11
        **({"map_per_head.png": maps(heads, logits)} if per_head else {}),
        "vectors.png": vector_maps(vectors) or no_vectors,
        "proximity.png": proximity(vectors) if vectors else no_vectors,
        "frequencies.png": lines("frequencies (P3 fig 4a)", "k", "|w_k|, radians a position", curves, log=True) if curves
        else f"{pe} has no learned frequencies (lsin and rlsin have)",
        "positional.png": maps(heads, positional) if positional.any()
        else f"{pe} has no logits without words (tupe_*, bert_ad, t5, alibi have)"}


def draw(file, panels, figure_class):
    """A grid of panels -> PNG. A map's colours span the middle 98% of its values, so that [CLS] does not hide the rest."""
    is_map = "matrix" in panels[0]
    columns = min(len(panels), 4) if is_map else 1
    rows, width = math.ceil(len(panels) / columns), 10 / max(columns, 2) if is_map else 8
    figure = figure_class(figsize=(width * columns, width * (0.85 if is_map else 0.4) * rows), layout="constrained")
    for number, panel in enumerate(panels, 1):
        ax = figure.add_subplot(rows, columns, number, xlabel=panel["x"], ylabel=panel["y"])
        ax.set_title(panel["title"], fontsize=10)
        if is_map:
            M = np.ma.masked_invalid(panel["matrix"])                               # a causal model's -inf stays white
            low, high = np.percentile(M.compressed(), (1, 99))
            a, b = panel["first"] - 0.5, panel["first"] + len(M) - 0.5
            image = ax.imshow(M, cmap="cividis_r", vmin=low, vmax=high, extent=(a, b, b, a))    # dark is high, as in P3
            figure.colorbar(image, ax=ax, shrink=0.8).ax.tick_params(labelsize=8)
        else:
            for i, (name, (x, y)) in enumerate(panel["curves"].items()):
                ax.plot(x, y, ["-", "--", ":", "-."][i // len(COLOURS) % 4], color=COLOURS[i % len(COLOURS)], label=name,
                        marker="o" if len(x) == 1 else None)
            ax.set_yscale("log" if panel["log"] else "linear")
            ax.grid(alpha=0.3)
            ax.legend(fontsize=8, bbox_to_anchor=(1, 1), loc="upper left")
    figure.savefig(file, dpi=100)


def plain(x):
    """What JSON can hold: arrays to four digits, NaN null, infinity "inf" (and -inf, a causal map's, null)."""
    text = json.dumps(x, default=lambda a: list(a) if a.ndim > 1 else [float(f"{value:.4g}") for value in a])
    return json.loads(text, parse_constant={"Infinity": "inf"}.get)


def write(folder, numbers, pictures):
    """probe.json, and the pictures if matplotlib is there."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        Figure = None
    folder, written = Path(folder), ["probe.json"]
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "probe.json", plain({**numbers, "pictures": pictures}))
    for file, panels in pictures.items():
        if isinstance(panels, str):
            print(f"{file} left out: {panels}")
        elif Figure:
            draw(folder / file, panels, Figure)
            written.append(file)
    print(f"wrote {folder}: {', '.join(written)}" + ("" if Figure else "; for pictures: pip install matplotlib"))


def print_table(rows):
    """Dicts with the same keys -> a table that is Markdown too; a dash is NaN, or what is not there."""
    def text(x):
        return "-" if x is None or x != x else f"{x:.4f}" if isinstance(x, float) else str(x)
    cells = [list(rows[0]), *[[text(x) for x in row.values()] for row in rows]]
    widths = [max(map(len, column)) for column in zip(*cells)]
    for row in [cells[0], ["-" * width for width in widths], *cells[1:]]:
        print("| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths)) + " |")


# ---------------------------------------------------------------------------------------------------------
# Runs

def probe_run(path, out_dir, per_head):     # --ckpt
    model, logits, A, spread = probe_map(path)
    found, file = indicators(A), Path(path)
    print_table([{"": name.replace("_", " "), **values} for name, values in found.items()])
    print("last hidden states: standard deviation over words at one place {:.3f}, over the places of one word {:.3f}".format(
        *spread.values()))
    write(out_dir or (file / "probe" if file.is_dir() else file.with_name(f"probe_{file.stem}")),
          {"ckpt": str(path), "pe": model.encoder.config.pe, "objective": "+".join(model.names), "indicators": found, "map": A,
           **spread},
          pictures_of(model.encoder, logits, per_head))


def read_run(folder, name):
    """-> dict: row (of the table), args, losses [(step, val_loss)], scores, indicators, logits (L, L)."""
    model, logits, A, spread = probe_map(folder)
    rows = {file: [json.loads(line) for line in (folder / f"{file}.jsonl").read_text().splitlines()]
            for file in ("log", "results") if (folder / f"{file}.jsonl").exists()}
    first, *log = rows.get("log") or [{}]
    losses, found, by_lr = [(row["step"], row["val_loss"]) for row in log if "val_loss" in row], indicators(A), {}
    row = {"run": name, "pe": model.encoder.config.pe, "objective": "+".join(model.names),
           "steps": log[-1]["step"] if log else None, "val_loss": losses[-1][1] if losses else None,
           **found["with_specials"], "aiv w/o": found["without_specials"]["aiv"], **spread}
    for result in comparable(rows.get("results", []), row["steps"]):
        for metric, value in result["metrics"].items():
            by_lr.setdefault(f"{result['task']} {metric}", {}).setdefault(result["lr"], []).append(value)
    scores = {name: max(float(np.median(v)) for v in values.values()) for name, values in by_lr.items()}     # at the best lr
    return dict(row=row, args=first.get("args", {}), losses=losses, scores=scores, indicators=found, logits=logits.mean(0))


def comparable(results, steps):
    """Rows of results.jsonl that say what the run's last checkpoint is good for, by each task's last settings: no other
    checkpoint, no second evaluation, no frozen encoder, no start from a fine-tuned model."""
    kept = [r for r in results if not (r.get("eval_only") or r.get("probe") or r["ckpt"] == "bow" or r["ckpt"].endswith(")"))
            and r.get("step", steps) == steps]
    settings = {r["task"]: [r.get(key) for key in ("recipe", "epochs", "n_train", "length")] for r in kept}
    return [r for r in kept if [r.get(key) for key in ("recipe", "epochs", "n_train", "length")] == settings[r["task"]]]


def pearson(x, y):
    """Over the pairs that are finite; NaN with fewer than 3, or where one side is constant."""
    x, y = np.array([pair for pair in zip(x, y) if np.isfinite(pair).all()]).reshape(-1, 2).T
    return float(np.corrcoef(x, y)[0, 1]) if len(x) > 2 and np.ptp(x) and np.ptp(y) else math.nan


def correlations(runs):
    """P3 table 5, over runs of one objective -> rows of a table. `none` is left out, far from all others (footnote 11)."""
    groups, names = {}, ("opr", "opr_20", "aiv", "aiv w/o", "sd", "db")
    for run in runs:
        for score, value in run["scores"].items() if run["row"]["pe"] != "none" else ():
            groups.setdefault((run["row"]["objective"], score), []).append((value, run["row"]))
    return [{"objective": objective, "score": score, "runs": len(group),
             **{name: pearson([row[name] for _, row in group], [value for value, _ in group]) for name in names}}
            for (objective, score), group in sorted(groups.items()) if len(group) > 2]


def compare_runs(patterns, out_dir):        # --runs
    """Print P3's table 2 over the runs, the flags in which they differ, and table 5; write maps and losses of all."""
    folders = sorted({Path(path) for pattern in patterns for path in glob.glob(pattern) if (Path(path) / "ckpt.pt").exists()})
    runs, losses, root = [], {}, min((folder.parent for folder in folders), key=lambda parent: len(parent.parts), default=None)
    for folder in folders:
        try:
            runs.append(read_run(folder, os.path.relpath(folder, root)))
        except (ValueError, TypeError, KeyError) as error:      # of another version of the code, say: the others still count
            print(f"{folder} left out: {error}")
    if not runs:
        raise ValueError(f"{' '.join(patterns)}: no folder with a readable ckpt.pt")
    print_table([run["row"] for run in runs])
    for flag in sorted(set().union(*[run["args"] for run in runs]) - NOT_COMPARED):
        values = {run["row"]["run"]: str(run["args"].get(flag)) for run in runs}
        if len(set(values.values())) > 1:
            print(f"--{flag} differs: " + ", ".join(f"{value} ({name})" for name, value in values.items()))
    if table5 := correlations(runs):
        print("\nPearson's r of indicators and scores (P3 table 5); positive: better where the property is violated")
        print_table(table5)
    else:
        print("no correlations with tasks: they take 3 runs of one objective, pe none aside, with results of finetune.py")
    for run in [run for run in runs if run["losses"]]:  # a panel an objective: losses of two are not comparable
        losses.setdefault(run["row"]["objective"], {})[run["row"]["run"]] = np.array(run["losses"]).T
    panels = [lines(objective, "step", "validation loss", curves)[0] for objective, curves in losses.items()]
    write(out_dir or root / "probe",
          {"runs": [{**run["row"], **{key: run[key] for key in ("indicators", "scores", "args")}} for run in runs],
           "correlations": table5},
          {"maps.png": maps([f"{run['row']['pe']}, {run['row']['objective']}" for run in runs], [run["logits"] for run in runs]),
           "losses.png": panels or "no run has a log with val_loss"})


def context_cosines(vectors, eligible):
    """Mean cosine of a token with the others of its row, and with those of other rows (P2 app. A.3). P2 samples one of each for
    every token; here all are taken: the same mean, no noise (departure). (B, L, C), (B, L) bool -> two floats."""
    g = F.normalize(vectors.double(), dim=-1) * eligible[..., None]
    m, own = eligible.sum(1, keepdim=True), g.sum(1, keepdim=True)                  # (B, 1) tokens, (B, 1, C) a row's sum
    intra = ((g * own).sum(-1) - 1) / (m - 1)                                       # (B, L), less the token with itself
    inter = (g * (own.sum(0) - own)).sum(-1) / (m.sum() - m)
    counted = eligible & (m > 1) & (m.sum() > m)
    return float(intra[counted].mean()), float(inter[counted].mean())


@torch.no_grad()
def pair_cosines(encoder, file):
    """Cosines of two words' embeddings (a word: its pieces' mean) for a file's lines `word<TAB>word<TAB>score` -> (n,) array."""
    rows = [line.split("\t") for line in Path(file).read_text(encoding="utf-8").splitlines()] or [[]]
    if wrong := [number for number, row in enumerate(rows, 1) if len(row) != 3 or not all(row)]:
        raise ValueError(f"{file}, line {wrong[0]} is not word<TAB>word<TAB>score")
    one, two = ([encoder.tok.weight[encoder.tokenizer.encode_ordinary(" " + word)].mean(0) for word in words]
                for words in list(zip(*rows))[:2])                                  # n x (C,) each
    return F.cosine_similarity(torch.stack(one), torch.stack(two)).double().numpy()


def validation_rows(folder, cache):
    """Rows from all over the run's own validation text, as it lies prepared -> (n, L). Raises ValueError if it does not."""
    facts = json.loads((folder / "config.json").read_text())
    cache, L = cache or facts["args"]["cache"], facts["config"]["max_len"]
    for meta in Path(cache).glob("*/meta.json"):
        if json.loads(meta.read_text()) == facts["data"]:
            corpus = open_corpus(meta.parent)
            n = corpus.n_rows("val", L)
            return torch.from_numpy(corpus.rows("val", np.linspace(0, n - 1, min(n, DYNAMICS_ROWS)).astype(int), L))
    raise ValueError(f"the text of {folder} ({facts['data']['dataset']}) is not prepared in {cache}; --cache names another place")


def dynamics(folder, pairs, cache, out_dir):
    """--dynamics: how contexts and words come together and apart (P2 figs 3, 6), how positions take shape (P3 fig 8)."""
    folder, rows, shapes = Path(folder), [], []
    kept = {int(step[1]): file for file in folder.glob("ckpt_*.pt") if (step := re.fullmatch(r"ckpt_(\d+)", file.stem))}
    if not kept:
        raise FileNotFoundError(f"{folder} keeps no ckpt_<step>.pt: train with --keep_every N")
    tokens, steps = validation_rows(folder, cache), np.array(sorted(kept))
    for number, step in enumerate(steps.tolist()):
        model = load_pretraining(kept[step])
        hidden = torch.cat([model.encoder(chunk, causal=model.causal) for chunk in tokens.split(16)])       # (n, L, C)
        intra, inter = context_cosines(hidden, tokens < model.encoder.config.cls_id)
        rows.append({"step": step, "intra-context": intra, "inter-context": inter, "contextual score": intra - inter})
        if pairs:
            rows[-1]["word pairs"] = float(pair_cosines(model.encoder, pairs).mean())
        if number in np.linspace(0, len(steps) - 1, 8).astype(int):
            shapes += vector_maps(position_vectors(model.encoder), [f"step {step:,}"])
    print_table(rows)

    def curves(title, *names):
        return lines(title, "step", "mean cosine", {name: (steps, np.array([row[name] for row in rows])) for name in names})
    write(out_dir or folder / "dynamics", {"run": str(folder), "rows": len(tokens), "steps": rows}, {
        "contexts.png": curves("hidden states", "intra-context", "inter-context") + curves("their gap", "contextual score"),
        "words.png": curves(f"embeddings of the word pairs in {Path(pairs).name}", "word pairs") if pairs else "no --pairs",
        "vectors.png": shapes or f"{model.encoder.config.pe} has no vectors of positions or offsets"})


# ---------------------------------------------------------------------------------------------------------
# A try

def row(ids, cfg):
    """-> [CLS] ids [SEP] as (1, L). Raises ValueError when it is longer than the model's rows."""
    if not 2 <= len(ids) <= cfg.max_len - 2:
        raise ValueError(f"the text has {len(ids)} tokens; between 2 and {cfg.max_len - 2} fit this model")
    return torch.tensor([[cfg.cls_id, *ids, cfg.sep_id]])


@torch.no_grad()
def fill_masks(model, text, k=5):
    """The k likeliest words for each [MASK], which takes its leading space with it as in training -> [[(word, probability)]]."""
    encoder, cfg = model.encoder, model.encoder.config
    tokens = row(encoder.tokenizer.encode(text.replace(" [MASK]", "[MASK]"), allowed_special={"[MASK]"}), cfg)
    logits = model.objectives["mlm"].logits(encoder, encoder(tokens))[0, :, :cfg.cls_id]    # (L, V): no special is an answer
    p, best = logits[tokens[0] == cfg.mask_id].float().softmax(-1).topk(k)
    return [[(encoder.tokenizer.decode([i]), float(q)) for i, q in zip(*pair)] for pair in zip(best.tolist(), p)]


def shuffled(model, text, seed):
    """Shuffle (or hide) 60% of a sentence's positions, as in training -> objective, n words, pos (1, L), hidden (1, L, C)."""
    encoder, ids = model.encoder, model.encoder.tokenizer.encode_ordinary(text)
    objective = next(model.objectives[name] for name in model.names if name in KINDS["position"])
    objective.check(len(ids) + 2)
    batch, moved = new_batch(row(ids, encoder.config), encoder.config.vocab_size), False
    while not moved:                        # of a short text all may stay where they are
        objective.corrupt(batch, stream("cpu", seed, "probe"))
        moved, seed = (batch["pos"] != torch.arange(len(ids) + 2)).any(), seed + 1
    return objective, [encoder.tokenizer.decode([i]) for i in ids], batch["pos"], encoder(batch["tokens"], batch["pos"])


@torch.no_grad()
def put_in_order(model, text, seed=0):
    """Shuffle a sentence and sort it by the offsets that the model predicts -> its tokens as given, as the model orders them
    and as they were, and for the first two the share of pairs in the right order."""
    objective, words, pos, hidden = shuffled(model, text, seed)
    offset = objective.expected_offsets(model.encoder, hidden, pos)[0].fill_diagonal_(0)    # (n, n)
    place = offset.mean(0) - offset.mean(1)     # far to the right of all others, and they to its left: late
    pos = pos[0, 1:-1]
    unknown = pos == UNKNOWN_POS                # pmlm: what was hidden is shown at the free places, in any order
    free = torch.arange(1, len(pos) + 1)[unknown]
    given = pos.masked_scatter(unknown, free[torch.randperm(len(free), generator=torch.Generator().manual_seed(seed))]).argsort()
    found = place.argsort()
    return [[words[i] for i in order] for order in (given, found, range(len(pos)))], [pairs_right(o) for o in (given, found)]


def pairs_right(order):
    """Share of pairs that a permutation leaves in order: 1 for the identity, .5 by chance, 0 reversed."""
    return float((order[None, :] > order[:, None]).triu(1).sum() / (len(order) * (len(order) - 1) / 2))


def who_moved(model, text, seed=0):
    """pplm_binary -> [(word, did it move, mean P(its given offsets are true))], AUC of the latter for words that stayed."""
    objective, words, pos, hidden = shuffled(model, text, seed)
    if len(words) < 4:
        raise ValueError(f"the text has {len(words)} tokens; take at least 4, so that some move and some stay")
    p = objective.pair_logits(model.encoder, hidden, pos)[0].float().softmax(-1)[..., 1]    # (n, n)
    share = (p + p.T).fill_diagonal_(0).sum(1) / (2 * len(p) - 2)
    moved = pos[0, 1:-1] != torch.arange(1, len(p) + 1)
    gap = share[~moved][:, None] - share[moved]                                     # (stayed, moved)
    return list(zip(words, moved.tolist(), share.tolist())), float(((gap > 0) + 0.5 * (gap == 0)).mean())


def go_on(model, text):
    """clm: the likeliest next token, NEXT_TOKENS times or until the row is full -> text."""
    encoder, cfg = model.encoder, model.encoder.config
    tokens = given = row(encoder.tokenizer.encode_ordinary(text), cfg)[:, :-1]
    while tokens.size(1) < min(cfg.max_len, given.size(1) + NEXT_TOKENS):
        logits = model.objectives["clm"].logits(encoder, encoder(tokens, causal=True)[:, -1])       # (1, V)
        tokens = torch.cat((tokens, logits[:, :cfg.cls_id].argmax(-1, keepdim=True)), 1)
    return encoder.tokenizer.decode(tokens[0, given.size(1):].tolist())


def two_texts(model, text):
    """'first ||| second' -> nsp: P(the second follows); tc: mean cosines, within and across, of g = h - e, what context gives."""
    encoder, cfg = model.encoder, model.encoder.config
    first, second = (encoder.tokenizer.encode_ordinary(part.rstrip()) for part in text.split("|||", 1))
    if "nsp" in model.names:
        nsp, hidden = model.objectives["nsp"], encoder(row([*first, cfg.sep_id, *second], cfg))
        return nsp.out(torch.tanh(nsp.dense(hidden[:, 0]))).softmax(-1)[0, :1].tolist()
    tokens = torch.nn.utils.rnn.pad_sequence([row(ids, cfg)[0] for ids in (first, second)], True, cfg.pad_id)    # (2, L)
    hidden = encoder(tokens, pad=tokens == cfg.pad_id, causal=model.causal)
    g = hidden - model.objectives["tc"].embedding(encoder, new_batch(tokens, cfg.vocab_size))
    return context_cosines(g, tokens < cfg.cls_id)


def try_text(model, text):
    """Print what the run's objective has to say about a text. Raises ValueError where it has nothing."""
    names, is_plain = model.names, "[MASK]" not in text and "|||" not in text
    if "[MASK]" in text and "mlm" in names:
        for words in fill_masks(model, text):
            print("[MASK]: " + ", ".join(f"{word!r} {p:.2f}" for word, p in words))
    elif "|||" in text and {"nsp", "tc"} & set(names):
        print(("the second part follows the first: probability {:.3f}" if "nsp" in names else "mean cosine of what context gives "
               "to tokens: {:.3f} within the texts, {:.3f} across").format(*two_texts(model, text)))
    elif is_plain and "pplm_binary" in names:
        rows, auc = who_moved(model, text)
        print("\n".join(f"{share:.2f} {'moved ' if moved else 'stayed'} {word!r}" for word, moved, share in rows))
        print(f"the number: how much of a word's offsets the model believes; AUC {auc:.2f} (1: told apart, .5: chance)")
    elif is_plain and set(KINDS["position"]) & set(names):
        (given, found, true), (before, after) = put_in_order(model, text)
        print(f"given:  {'|'.join(given)}\nmodel:  {'|'.join(found)}\ntrue:   {'|'.join(true)}")
        print(f"pairs in the right order: {before:.0%} as given, {after:.0%} as the model puts them")
    elif is_plain and "clm" in names:
        print(f"{text} -> {go_on(model, text)!r}")
    else:
        raise ValueError(f"objective {'+'.join(names)}: write [MASK] for mlm, 'one ||| another' for nsp and tc, or neither")


def main(argv=None):
    parser = Parser("probe.py", __doc__)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--ckpt", help="run folder or checkpoint file (default: the newest under out/)")
    what.add_argument("--runs", nargs="+", metavar="GLOB", help="compare run folders")
    what.add_argument("--dynamics", metavar="RUN", help="follow a run over the checkpoints that it kept")
    parser.add_argument("--text", help="try the model on a text: see above")
    parser.add_argument("--per_head", action="store_true", help="with --ckpt: also the map of each head")
    parser.add_argument("--pairs", metavar="FILE", help="with --dynamics: lines of word<TAB>word<TAB>score")
    parser.add_argument("--cache", help="with --dynamics: folder of prepared data (default: the run's)")
    parser.add_argument("--out_dir", help="where to write (default: RUN/probe, RUN/dynamics, or probe beside the runs)")
    args = parser.parse_args(argv)
    many = args.runs or args.dynamics
    if args.text is not None and args.out_dir:
        parser.error("--text writes nothing: --out_dir is for the others")
    if many and (args.text is not None or args.per_head) or (args.pairs or args.cache) and not args.dynamics:
        parser.error("--text and --per_head are for --ckpt; --pairs and --cache are for --dynamics")
    with one_line_errors(), torch.no_grad():
        if args.runs:
            return compare_runs(args.runs, args.out_dir)
        if args.dynamics:
            return dynamics(args.dynamics, args.pairs, args.cache, args.out_dir)
        newest = max(Path("out").glob("*/ckpt.pt"), key=os.path.getmtime, default=None)
        if not (args.ckpt or newest):
            raise FileNotFoundError("no checkpoint under out/: pre-train one first (python train.py)")
        path = args.ckpt or newest.parent
        if args.text is None:
            return probe_run(path, args.out_dir, args.per_head)
        model = load_pretraining(path)
        print(f"{path}: {model.encoder.config.pe}, {'+'.join(model.names)}")
        try_text(model, args.text)


if __name__ == "__main__":
    main()
