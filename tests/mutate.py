"""Does test_all.py notice mistakes? Each mutant below makes one, in a copy of the project.

    python tests/mutate.py              # all of them: about half an hour on one core
    python tests/mutate.py --only 12    # one of them

Prints which test fails first. Exits with 1 if a mutant survives, which means that no test fails.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# {file: [(text that occurs once, what replaces it, what this breaks)]}
# fmt: off
MUTANTS = {
    "model.py": [
        ("added, scheme.scale).softmax(-1)", "added, scheme.scale).softmax(-2)",
         "softmax over queries"),
        ("self.fc1(self.norm2(x) if self.pre else x)", "self.fc1(x)",
         "norm pre without the LayerNorm of the feed-forward layer"),
        ("self.ids[:, None, :] - self.ids[:, :, None]",
         "self.ids[:, :, None] - self.ids[:, None, :]",
         "offsets are query minus key"),
        ("masked[:, :, None]) & ~diagonal", "masked[:, :, None])",
         "masked offset to itself is not 0"),
        ("self.ids == UNKNOWN_POS, max_len, self.ids", "self.ids == UNKNOWN_POS, 0, self.ids",
         "masked positions share the row of position 0"),
        ("16 * (r > 0)", "16 * (r < 0)", "T5 bucket of the other sign"),
        ("math.log2(d / 8)", "math.log2(d / 9)", "T5's far buckets begin later"),
        ("cfg.d_model**0.5 if any", "1.0 if any", "sin without scaled token embeddings"),
        ("offset_scores(k, a_q, pos).transpose(-1, -2)", "offset_scores(k, a_q, pos)",
         "deberta's position-to-content term not transposed"),
        ("cos, sin), self.rotate(k, cos, sin)", "cos, sin), k", "rope not applied to the keys"),
        ("-slopes * offsets", "slopes * offsets", "alibi prefers distant tokens"),
        ("slopes.flip(0), slopes)", "slopes, slopes.flip(0))", "alibi_ns leans to the other side"),
        ("offset_scores(q + self.v", "offset_scores(q + self.u", "xl adds u to the queries of a_r"),
        ("v[..., 1:, 0] = theta_2", "v[..., 1:, 1] = theta_2", "theta_2 in the wrong column"),
        ("theta * self.scale", "theta", "TUPE's theta without its scale"),
        ("k.transpose(-1, -2) * self.scale  # the paper", "k.transpose(-1, -2)  # the paper",
         "TUPE's positional term without its scale"),
        ("pad[:, None, None, :]", "pad[:, None, :, None]", "padding masks queries"),
        (".triu(1)", ".triu(2)", "causal attention sees the next token"),
        ("self.attn_dropout if self.training else 0.0", "self.attn_dropout",
         "attention dropout in evaluation"),
        ("self.config.dropout, self.training)", "self.config.dropout)",
         "dropout of embeddings in evaluation"),
    ],
    "objectives.py": [
        ("tokens < vocab_size - N_SPECIALS}", "tokens <= vocab_size - N_SPECIALS}",
         "[CLS] selected"),
        ("u < 0.8, self.mask_id", "u < 0.9, self.mask_id", "no random tokens in mlm"),
        ("mlm_weight=valid", "mlm_weight=valid | True", "slots that are not valid are scored"),
        ("self.score(encoder, hidden[:, :-1]", "self.score(encoder, hidden[:, 1:]",
         "clm predicts the token that it sees"),
        ("return true_offset + self.max_len - 1", "return assigned_offset + self.max_len - 1",
         "labels from assigned offsets"),
        ("(true_offset != 0)  # (B", "(true_offset < 99)  # (B",
         "pairs of a token with itself are scored"),
        ("(i_moved | j_moved)", "(i_moved & j_moved)",
         "pmlm scores pairs with two masked positions"),
        ("/ q.size(-1) ** 0.5", "/ q.size(-1)", "scale of the pair head's content scores"),
        ("layer = encoder.config.n_layer\n", "layer = encoder.config.n_layer - 1\n",
         "the pair head shares the last layer's positional weights"),
        ("(self.cfg.tc_window - 1) // 2", "self.cfg.tc_window - 1", "tc's window twice as wide"),
        ("torch.where(u >= first, u + m[..., None], u)", "u", "negatives from the same sequence"),
        ("flat = g.detach()", "flat = g", "tc's candidates get gradients"),
        ("self.weights[name] * loss", "loss", "loss weights ignored"),
        ("self.loss_weights[given.index(name)] for", "self.loss_weights[names.index(name)] for",
         "loss weights in the wrong order"),
        ("*key, name))", "*key))", "mlm and pplm select the same tokens"),
    ],
    "lib/baselines.py": [("chain = (k - 2) / others", "chain = (k - 1) / others", "baseline copy")],
    "lib/weights.py": [("rows[old_len:] += added", "pass", "masked positions lose their row")],
    "data.py": [
        ("source.val_every == 1", "source.val_every == 0", "another split"),
        ("[*ids, sep]", "[*ids]", "documents without [SEP]"),
        ("rng((self.seed, self.epoch))", "rng((self.seed, 0))", "the same order in every epoch"),
    ],
    "lib/run.py": [
        ('optimizer.load_state_dict(self.checkpoint["optimizer"])', "pass",
         "resume without the optimizer"),
        ("model.parameters(), 1.0)", "model.parameters(), 10.0)", "clipping at 10"),
    ],
    "train.py": [
        ("(args.steps - step) /", "(args.steps - step - 1) /", "learning rate 0 in the last step"),
        ('"weight_decay": 0.0}', '"weight_decay": args.weight_decay}', "weight decay on vectors"),
        ("scale(loss / args.grad_accum)", "scale(loss)", "accumulation without division"),
        ("index = step * n_micro + micro", "index = step + micro", "micro-batches seen twice"),
        ("len(tokens) / n\n", "1 / len(validation)\n", "small validation batches count more"),
    ],
    "finetune.py": [
        ("n_layer - int(layer[1])", "1 + int(layer[1])", "layer-wise decay reversed"),
        ("self.head(hidden[:, 0])", "self.head(hidden[:, 1])", "the head is not on [CLS]"),
        ("F.mse_loss(out, labels)", "F.binary_cross_entropy_with_logits(out, labels)",
         "STS-B as classification"),
        ("self.encoder(tokens, pad=pad)", "self.encoder(tokens)", "padding is attended to"),
        ("(steps - step) / (steps - warmup)", "1.0", "no decay of the learning rate"),
    ],
}
# fmt: on


def first_failure(folder):
    """Run test_all.py in a copy of the project -> the first test that fails, or None."""
    command = [sys.executable, "-m", "pytest", "test_all.py", "-x", "-q", "--tb=no", "-rfE"]
    env = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    run = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
    found = re.search(r"^(?:FAILED|ERROR) (?:test_all\.py::)?(\S+)", run.stdout, re.MULTILINE)
    return found[1] if found else "an error" if run.returncode else None


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", type=int, metavar="N", help="try this mutant alone")
    only, survivors = parser.parse_args().only, 0
    mutants = [(file, *mutant) for file, group in MUTANTS.items() for mutant in group]
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, "copy")
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns("out", "cache", ".git"))
        if failed := first_failure(copy):
            sys.exit(f"without a mutant, {failed} fails")
        for number, (file, old, new, what) in enumerate(mutants, 1):
            if only in (None, number):
                source = (copy / file).read_text()
                assert source.count(old) == 1, f"mutant {number}: {old!r} is not once in {file}"
                (copy / file).write_text(source.replace(old, new))
                failed = first_failure(copy)
                (copy / file).write_text(source)
                survivors += failed is None
                outcome = f"caught by {failed}" if failed else "SURVIVED"
                print(f"{number:2} {file:16} {what:56} {outcome}", flush=True)
    sys.exit(survivors > 0)


if __name__ == "__main__":
    main()
