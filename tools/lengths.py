"""Length extrapolation: the loss of mlm on sequences longer than those it was trained on.

    python -m tools.lengths --ckpt RUN --lengths 64,128,256

Every length uses the same text of the run's validation data with the same masked tokens, cut into
sequences of that length. Prints the mean loss and the loss by position, and writes lengths.json.
"""

import numpy as np
import torch
import torch.nn.functional as F

import objectives
from data import validation_sequences
from lib.config import Parser, UserError, between, one_line_errors
from lib.device import keep_memory, pick_device
from lib.files import newest_run
from objectives import new_batch, seeded_generator
from tools.output import add_run_flags, output_folder, print_table, write_numbers
from tools.probe import run_corpus

BATCH_TOKENS = 8192  # tokens per batch
TEXT_TOKENS = 65_536  # tokens of the validation text that are used


def list_of_lengths(text):
    """'64,128' -> [64, 128]."""
    return sorted(set(map(between(int, "[4, 1e5]"), text.split(","))))


def check_length(encoder, longest):
    """Raise UserError if the encoder has a table of positions that is too short."""
    try:
        encoder(torch.zeros(1, longest, dtype=torch.long))
    except ValueError as error:
        raise UserError(
            f"--lengths {longest}: {error}; to extend it, train further with the run's "
            f"own flags and --init_from RUN --block_size {longest} --out_dir NEW"
        ) from None


def masked_text(corpus, mlm, longest):
    """Join sequences of the longest length from all over the validation text, and mask them once,
    as in training -> the masked tokens (N,), the original ones (N,), is masked (N,) bool."""
    sequences = validation_sequences(corpus, max(1, TEXT_TOKENS // longest), longest)
    if not len(sequences):
        raise UserError(f"the validation text has no sequence of {longest} tokens")
    text = sequences[:, 1:-1].reshape(1, -1)
    batch = new_batch(text, corpus.vocab_size)
    mlm.corrupt(batch, seeded_generator("cpu", "lengths"))
    return batch["tokens"][0], text[0], batch["mlm_selected"][0]


@torch.no_grad()
def losses_by_position(model, text, length):
    """Cut the text into sequences of `length` tokens -> the positions of its masked tokens (N,)
    and their losses in nats (N,), as arrays."""
    encoder, mlm, n = model.encoder, model.objectives["mlm"], length - 2
    cfg, device = encoder.config, encoder.tok.weight.device
    tokens, original, masked = (x[: len(x) // n * n].view(-1, n).to(device) for x in text)
    tokens = F.pad(tokens, (1, 1), value=cfg.sep_id)
    tokens[:, 0] = cfg.cls_id  # (R, L): [CLS] x_1 ... x_n [SEP]
    size, losses = max(1, BATCH_TOKENS // length), []
    for x, target, at in zip(tokens.split(size), original.split(size), masked.split(size)):
        hidden = encoder(x)[:, 1:-1][at]  # (N, C)
        logits = mlm.token_logits(encoder, hidden)
        losses.append(F.cross_entropy(logits, target[at], reduction="none").cpu().double())
    return masked.nonzero()[:, 1].cpu().numpy() + 1, torch.cat(losses).numpy()


def main(argv=None):
    with one_line_errors():
        parser = Parser("-m tools.lengths", __doc__)
        tokens = "tokens per sequence, such as 64,128,256"
        parser.add_argument("--lengths", required=True, type=list_of_lengths, help=tokens)
        add_run_flags(parser, "lengths")
        args = parser.parse_args(argv)
        keep_memory()
        lengths, path = args.lengths, args.ckpt or newest_run()
        model = objectives.load(path)
        if "mlm" not in model.objectives:
            raise UserError(
                f"only mlm can be scored; {path} was trained with {'+'.join(model.names)}"
            )
        check_length(model.encoder, lengths[-1])
        text = masked_text(run_corpus(model.run_info), model.objectives["mlm"], lengths[-1])
        model.to(pick_device(args.device))
        width = 32 if lengths[-1] <= 256 else 64
        cfg, means, by_position, table = model.encoder.config, {}, {}, []
        for length in lengths:
            positions, losses = losses_by_position(model, text, length)
            means[length] = losses.mean()
            bins = positions // width * width
            by_position[length] = {int(b): losses[bins == b].mean() for b in np.unique(bins)}
            table.append({"tokens": length, "all positions": means[length]})
            for start in range(0, lengths[-1], width):
                table[-1][f"{start}-{start + width - 1}"] = by_position[length].get(start)
        numbers = {"pe": cfg.pe, "max_len": cfg.max_len}
        file = output_folder(path, "lengths", args.out_dir) / "lengths.json"
        write_numbers(file, {**numbers, "lengths": means, "by_position": by_position})
        print(f"{cfg.pe}, trained on {cfg.max_len} tokens per sequence; loss of mlm by position")
        print_table(table)
        print(f"wrote {file}")


if __name__ == "__main__":
    main()
