"""Try a trained model on a text.

    python -m tools.sample                                                # prompts for texts
    python -m tools.sample --text 'Returns the [MASK] of the array.'      # mlm
    python -m tools.sample --text 'It is not possible to use both.'       # pplm
    python -m tools.sample --ckpt out/run/finetuned-mnli.pt --text 'A man sleeps. ||| He is awake.'

The output depends on what the model was trained for:

objective                text                         output
mlm                      a text with [MASK]           the five most likely tokens
pplm and its variants    a sentence                   two of its words exchanged, then restored
                                                      from the offsets that the model predicts
clm                      the beginning of a text      its continuation
nsp                      'one part ||| another'       probability that the second follows
a task (finetune.py)     one text, or 'one ||| two'   predictions with probabilities
"""

import contextlib
import os
import sys

import torch

import finetune
import objectives
from finetune import LIBRARY_NAMES, TASKS, encode_rows, rank
from lib.bpe import encode_text
from lib.config import Parser, UserError, one_line_errors, printable
from lib.files import newest_run, read_checkpoint
from lib.squad import Question
from objectives import token_strings

NEXT_TOKENS = 20  # tokens that clm generates
TEXTS = {
    "mlm": "a text with [MASK]",
    "position": "a sentence, of which two words are exchanged",
    "clm": "the beginning of a text",
    "nsp": "'one part ||| another'",
}


# --------------------------------------------------------------------------------------------------
# A model and its input


def position_objective(model):
    """-> the model's position objective, or None."""
    return next((x for x in model.objectives.values() if x.kind == "position"), None)


def encode(encoder, *texts):
    """-> [CLS] text [SEP] ... as (1, L). Raises UserError if it is too long for the model, or too
    short."""
    cfg = encoder.config
    ids = [cfg.cls_id]
    for text in texts:
        ids += [*encode_text(text, encoder.tokenizer), cfg.sep_id]
    if not 4 <= len(ids) <= cfg.max_len:
        raise UserError(
            f"the text has {len(ids) - 2} tokens; this model takes 2 to {cfg.max_len - 2}"
        )
    return torch.tensor([ids], device=encoder.tok.weight.device)


def decode(strings, order):
    """Token strings in the given order (n,) -> text."""
    return printable("".join(strings[i] for i in order).replace("[MASK]", " [MASK]").strip())


# --------------------------------------------------------------------------------------------------
# Tokens and contexts


def fill_masks(encoder, mlm, text):
    """-> for each [MASK] of the text, the five most likely tokens [(token, probability), ...]."""
    tokens = encode(encoder, text)
    hidden = encoder(tokens)[tokens == encoder.config.mask_id]  # (n_masks, C)
    logits = mlm.token_logits(encoder, hidden)[:, : encoder.config.cls_id]  # no special tokens
    p, best = logits.softmax(-1).topk(5)
    return [
        [(encoder.tokenizer.decode([i]), x) for i, x in zip(*pair)]
        for pair in zip(best.tolist(), p.tolist())
    ]


def continue_text(encoder, clm, text):
    """-> NEXT_TOKENS tokens, each the most likely one, or as many as fit into the sequence."""
    tokens = encode(encoder, text)[:, :-1]
    n_given = tokens.size(1)
    for _ in range(min(NEXT_TOKENS, encoder.config.max_len - n_given)):
        last = encoder(tokens, causal=True)[:, -1:]  # (1, 1, C)
        logits = clm.token_logits(encoder, last)[..., : encoder.config.cls_id]
        tokens = torch.cat((tokens, logits.argmax(-1)), 1)
    return printable(encoder.tokenizer.decode(tokens[0, n_given:].tolist()))


# --------------------------------------------------------------------------------------------------
# Order


def restore(model, text):
    """Exchange two words of a sentence and restore them from the predicted offsets -> its n token
    strings, and two permutations (n,): their order as exchanged, and as restored. Without a space
    before it, the first token would be recognizable."""
    encoder, position = model.encoder, position_objective(model)
    tokens = encode(encoder, " " + text.lstrip())
    pos = position.exchange(encoder, tokens)
    restored = position.restore(encoder, tokens, pos)
    return token_strings(encoder, tokens[0, 1:-1]), pos.argsort(), restored.argsort()


def correct_pairs(order) -> int:
    """The number of pairs that a permutation (n,) leaves in order: all n (n - 1) / 2 for the
    identity, half of them by chance."""
    first, second = torch.combinations(order).T
    return int((first < second).sum())


# --------------------------------------------------------------------------------------------------
# What is printed


def print_sample(model, text):
    """Print what a pre-trained model predicts for a text. Raises UserError if the text does not
    suit its objectives."""
    encoder, heads, position = model.encoder, model.objectives, position_objective(model)
    parts = [part.rstrip() for part in text.split("|||", 1)]
    if "[MASK]" in text and "mlm" in heads:
        for answers in fill_masks(encoder, heads["mlm"], text):
            print("[MASK]: " + ", ".join(f"{token!r} {p:.2f}" for token, p in answers))
    elif "|||" in text and "nsp" in heads:
        p = heads["nsp"].classify(encoder(encode(encoder, *parts))).softmax(-1)[0, 0]
        print(f"probability that the second part follows the first: {p:.3f}")
    elif "|||" in text or "[MASK]" in text or not (position or "clm" in heads):
        raise UserError(f"this model ({'+'.join(model.names)}) takes {accepted_texts(model)}")
    elif "clm" in heads:
        print(f"{text} ...{continue_text(encoder, heads['clm'], text)}")
    else:
        strings, exchanged, restored = restore(model, text)
        n = len(strings)
        print(f"exchanged: {decode(strings, exchanged)}")
        print(f"restored:  {decode(strings, restored)}")
        print(f"original:  {decode(strings, range(n))}")
        print(
            f"pairs in the correct order, of {n * (n - 1) // 2}: {correct_pairs(exchanged)} as "
            f"exchanged, {correct_pairs(restored)} as restored"
        )


def accepted_texts(model):
    """-> which texts a pre-trained model takes, in words."""
    names = ["position" if part.kind == "position" else n for n, part in model.objectives.items()]
    return " or ".join(TEXTS[name] for name in names if name in TEXTS) or "no text"


def print_predictions(model, text):
    """Print what a fine-tuned Classifier predicts for one text, or two joined by |||. Raises
    UserError if the number of texts is wrong."""
    task = TASKS[model.name]
    texts = [part.strip() for part in text.split("|||") if part.strip()]
    if len(texts) != len(task.texts):
        raise UserError(f"{model.name} takes {len(task.texts)} text(s), {' ||| '.join(task.texts)}")
    if model.name == "docs":
        texts = [LIBRARY_NAMES.sub("[MASK]", texts[0])]  # as in the task's data
    tokenizer, cfg = model.encoder.tokenizer, model.encoder.config
    encoded = encode_rows(model.name, [Question(texts)], tokenizer, cfg, model.length)
    [answers] = rank(model, *encoded)
    for p, answer in answers[:5]:
        if task.kind == "score":
            print(f"{answer:.3f}")
        elif p > 0:
            name = task.classes[answer] if task.classes else answer or "(no answer)"
            print(f"{p:.4f}  {printable(name)}")


def read_line():
    """-> a line from standard input; empty at its end, or if it is closed."""
    with contextlib.suppress(EOFError, OSError):
        return input("text: ").strip() if sys.stdin else ""
    return ""


def main(argv=None):
    with one_line_errors():
        parser = Parser("-m tools.sample", __doc__)
        ckpt = "run folder or checkpoint (default: the newest run)"
        parser.add_argument("--ckpt", type=os.path.expanduser, help=ckpt)
        parser.add_argument("--text", help="the text (default: prompts, line by line)")
        args = parser.parse_args(argv)
        path = args.ckpt or newest_run()
        if "task" in read_checkpoint(path):
            model = finetune.load(path)
            print_output, trained_on = print_predictions, model.name
            accepted = " ||| ".join(TASKS[model.name].texts)
        else:
            model = objectives.load(path)
            print_output, trained_on = print_sample, "+".join(model.names)
            accepted = accepted_texts(model)
        print(f"{path}: {model.encoder.config.pe}, {trained_on}")
        if args.text is not None:
            return print_output(model, args.text)
        print(f"Enter {accepted}, or an empty line to quit.")
        while text := read_line():
            try:
                print_output(model, text)
            except UserError as error:  # the next text may be fine
                print(error)


if __name__ == "__main__":
    main()
