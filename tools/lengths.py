"""Length extrapolation: the loss of mlm on sequences longer than those it was trained on.

    python -m tools.lengths --ckpt RUN --lengths 64,128,256

Every length uses the same text of the run's validation data with the same masked tokens, cut into
sequences of that length. Prints the mean loss and the loss by position, and writes lengths.json.
"""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from data import validation_sequences
from lib.config import DEVICE, PATH, Parser, catch_errors, setting
from lib.device import keep_memory, pick_device
from lib.files import newest_run
from objectives import new_batch, seeded_generator
from tools.probe import output_folder, print_table, run_corpus, write_numbers
from tools.sample import load_pretraining

BATCH_TOKENS = 8192  # tokens per batch
TEXT_TOKENS = 65_536  # tokens of the validation text that are used


@dataclass
class LengthsConfig:
    lengths: str | None = setting(None, "tokens per sequence, such as 64,128,256")
    ckpt: str | None = setting(None, "run folder or checkpoint (default: the newest run)", PATH)
    out_dir: str | None = setting(None, "where to write (default: RUN/lengths)", PATH)
    device: str | None = DEVICE


def parse_lengths(text):
    """'64,128' -> [64, 128]. Raises ValueError."""
    numbers = [int(x) if x.strip().isdecimal() else 0 for x in (text or "").split(",")]
    if min(numbers) < 4:
        raise ValueError("--lengths takes numbers of at least 4, such as 64,128,256")
    return sorted(set(numbers))


def masked_text(corpus, mlm, longest):
    """Join sequences of the longest length from all over the validation text, and mask them once,
    as in training -> the masked tokens (N,), the original ones (N,), is masked (N,) bool."""
    sequences = validation_sequences(corpus, max(1, TEXT_TOKENS // longest), longest)
    if not len(sequences):
        raise ValueError(f"the validation text has no sequence of {longest} tokens")
    text = sequences[:, 1:-1].reshape(1, -1)
    batch = new_batch(text, corpus.vocab_size)
    mlm.corrupt(batch, seeded_generator("cpu", "lengths"))
    return batch["tokens"][0], text[0], batch["mlm_selected"][0]


@torch.no_grad()
def losses_by_position(model, text, length):
    """Cut the text into sequences of `length` tokens -> the positions of its masked tokens (N,)
    and their losses in nats (N,), as arrays. Raises ValueError if the model has a table of
    positions that is too short."""
    encoder, mlm, n = model.encoder, model.objectives["mlm"], length - 2
    cfg, device = encoder.config, encoder.tok.weight.device
    tokens, original, masked = (x[: len(x) // n * n].view(-1, n).to(device) for x in text)
    tokens = F.pad(tokens, (1, 1), value=cfg.sep_id)
    tokens[:, 0] = cfg.cls_id  # (R, L): [CLS] x_1 ... x_n [SEP]
    size, losses = max(1, BATCH_TOKENS // length), []
    for x, target, at in zip(tokens.split(size), original.split(size), masked.split(size)):
        try:
            hidden = encoder(x)[:, 1:-1][at]  # (N, C)
        except ValueError:  # Positions.table_rows
            raise ValueError(
                f"--lengths {length}: the position table of pe {cfg.pe} ends at {cfg.max_len}; "
                "to extend it, train a few more steps with the run's own flags and "
                f"--init_from RUN --block_size {length} --out_dir NEW"
            ) from None
        logits = mlm.token_logits(encoder, hidden)
        losses.append(F.cross_entropy(logits, target[at], reduction="none").cpu().double())
    return masked.nonzero()[:, 1].cpu().numpy() + 1, torch.cat(losses).numpy()


def main(argv=None):
    with catch_errors():
        parser = Parser("-m tools.lengths", __doc__)
        parser.add_settings("flags", LengthsConfig)
        args = parser.parse_args(argv, LengthsConfig())
        keep_memory()
        lengths, path = parse_lengths(args.lengths), args.ckpt or newest_run()
        model = load_pretraining(path)
        if "mlm" not in model.objectives:
            raise ValueError(
                f"only mlm can be scored; {path} was trained with {'+'.join(model.names)}"
            )
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
        print(f"{cfg.pe}, trained on {cfg.max_len} tokens per sequence; loss of mlm by position")
        print_table(table)
        numbers = {"pe": cfg.pe, "max_len": cfg.max_len}
        file = output_folder(path, "lengths", args.out_dir) / "lengths.json"
        write_numbers(file, {**numbers, "lengths": means, "by_position": by_position})
        print(f"wrote {file}")


if __name__ == "__main__":
    main()
