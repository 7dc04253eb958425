"""Order tasks: what can a positional scheme represent, and what does it learn within seconds?

    python -m tools.order --pe rope,alibi              # a minute or two
    python -m tools.order --pe abs --vocab 4096        # many different tokens
    python -m tools.order --pe rope --layers 1

For each random token of a sequence, a small encoder predicts something that depends on order, such
as the token before it. It is trained on sequences of --length tokens, and scored on new ones of
this length, of twice and of four times as many. (Tables of positions are long enough for the
longest, but only their first rows are trained.)

Beside the accuracy of each scheme stand those of two predictors: `chance` always gives the most
frequent answer, and `bag` knows which tokens a sequence has, but not their order.
"""

import argparse
import time

import torch
import torch.nn as nn
import torch.nn.functional as F

from lib.config import Parser, UserError, between, one_line_errors
from model import N_SPECIALS, Encoder, EncoderConfig, parse_pe
from objectives import seeded_generator
from tools.output import print_table
from tools.probe import token_spread

UNSCORED = -100  # the target of a token that has no answer: what cross_entropy ignores
BATCH, TEST_SEQUENCES = 32, 512


# --------------------------------------------------------------------------------------------------
# The tasks: x (B, n), random tokens 0 to V - 1, in which `mark` puts the markers V and V + 1 -> the
# answer for each token, (B, n), as a token or as 0 or 1


def neighbor(r):
    """The token r to the right of each token."""

    def answers(x, V):
        target = torch.full_like(x, UNSCORED)
        if r > 0:
            target[:, :-r] = x[:, r:]
        else:
            target[:, -r:] = x[:, :r]
        return target

    return answers


def first_token(x, V):
    return x[:, :1].expand_as(x)


def mirror_image(x, V):
    return x.flip(1)


def parity(x, V):
    """Is the index of the token odd?"""
    return (torch.arange(x.size(1)) % 2).expand_as(x)


def nearest_marker(x, V):
    """Which marker is the last one before each token?"""
    index = torch.arange(x.size(1)).expand_as(x)
    last = torch.where(x >= V, index, -1).cummax(1).values  # up to each token
    last = F.pad(last, (1, -1), value=-1)  # before each token
    return torch.where(last >= 0, x.gather(1, last.clamp(min=0)) - V, UNSCORED)


def after_marker(x, V):
    """The token after the marker."""
    marker = (x == V).long().argmax(1, keepdim=True)  # (B, 1): its index
    return x.gather(1, (marker + 1).clamp(max=x.size(1) - 1)).expand_as(x)


def which_first(x, V):
    """Is the second marker before the first one?"""
    first, second = ((x == marker).long().argmax(1, keepdim=True) for marker in (V, V + 1))
    return (second < first).long().expand_as(x)


def seen_before(x, V):
    """Does the same token occur further to the left?"""
    return (x[:, :, None] == x[:, None, :]).tril(-1).any(-1).long()


def no_markers(x, V, generator):
    return x


def many_markers(x, V, generator):
    """One of eight tokens becomes a marker, the first or the second one."""
    draw = torch.randint(0, 16, x.shape, generator=generator)
    return torch.where(draw < 2, V + draw, x)


def place_markers(n_markers):
    """Each marker stands once, but not at the end."""

    def mark(x, V, generator):
        index = torch.rand(len(x), x.size(1) - 1, generator=generator).argsort(1)[:, :n_markers]
        return x.scatter(1, index, torch.arange(V, V + n_markers).expand_as(index))

    return mark


TASKS = {  # name: (answers, mark)
    "left neighbor": (neighbor(-1), no_markers),
    "right neighbor": (neighbor(1), no_markers),
    "5 to the left": (neighbor(-5), no_markers),
    "20 to the left": (neighbor(-20), no_markers),
    "first token": (first_token, no_markers),
    "mirror image": (mirror_image, no_markers),
    "index odd?": (parity, no_markers),
    "last marker before": (nearest_marker, many_markers),
    "token after marker": (after_marker, place_markers(1)),
    "which marker first?": (which_first, place_markers(2)),
    "seen before?": (seen_before, no_markers),
}


def draw_batch(task, B, n, V, generator):
    """-> tokens x (B, n) and their answers (B, n)."""
    answers, mark = TASKS[task]
    x = mark(torch.randint(0, V, (B, n), generator=generator), V, generator)
    return x, answers(x, V)


# --------------------------------------------------------------------------------------------------
# Accuracies


def measure(pe, task, seed, args):
    """Train an encoder with a scheme on a task -> its accuracies on sequences of 1, 2 and 4 times
    the length, and every 20 steps [step, accuracy on that step's batch, spread of the last hidden
    states]. (No sequence is trained on twice, so this is the accuracy on new ones.)"""
    torch.manual_seed(seed)
    V, generator = args.vocab, seeded_generator("cpu", "order", task, seed)
    shape = dict(n_layer=args.layers, n_head=4, d_model=64, d_ff=256, max_len=4 * args.length)
    shape |= {name: getattr(args, name) for name in ("norm", "t5_max_distance", "max_offset")}
    cfg = EncoderConfig(V + 2 + N_SPECIALS, pe, **shape, dropout=0.0, attn_dropout=0.0)
    encoder, head = Encoder(cfg), nn.Linear(cfg.d_model, V + 2)
    if args.zero_head:
        for parameter in head.parameters():
            nn.init.zeros_(parameter)
    parameters = [*encoder.parameters(), *head.parameters()]
    optimizer = torch.optim.AdamW(parameters, betas=(0.9, 0.98), eps=1e-6, fused=True)

    def with_specials(x):  # (B, n) -> (B, n + 2)
        return F.pad(F.pad(x, (1, 0), value=cfg.cls_id), (0, 1), value=cfg.sep_id)

    def logits(x):  # (B, n) -> (B, n, V + 2)
        return head(encoder(with_specials(x))[:, 1:-1])

    def accuracy(found, target):
        return (found == target)[target != UNSCORED].double().mean().item()

    curve = []
    for step in range(args.steps):
        warmup, decay = (step + 1) / (args.steps / 6), (args.steps - step) / (args.steps * 5 / 6)
        optimizer.param_groups[0]["lr"] = args.lr * min(warmup, decay)
        x, target = draw_batch(task, BATCH, args.length - 2, V, generator)
        predicted = logits(x)
        F.cross_entropy(predicted.flatten(0, 1), target.flatten()).backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % 20 == 0:
            spread = token_spread(encoder, with_specials(x))[-1]
            right = accuracy(predicted.argmax(-1), target)
            curve.append([step + 1, round(right, 3), round(spread, 3)])

    accuracies, encoder = [], encoder.eval()
    for longer in (1, 2, 4):
        generator = seeded_generator("cpu", "order", task, "test", longer)
        x, target = draw_batch(task, TEST_SEQUENCES, longer * args.length - 2, V, generator)
        with torch.no_grad():
            found = torch.cat([logits(part).argmax(-1) for part in x.split(BATCH)])
        accuracies.append(accuracy(found, target))
    return accuracies, curve


def chance(task, args):
    """-> the share of the most frequent answer."""
    generator = seeded_generator("cpu", "order", task, "test", 1)
    _, target = draw_batch(task, TEST_SEQUENCES, args.length - 2, args.vocab, generator)
    return target[target != UNSCORED].bincount().max().item() / (target != UNSCORED).sum().item()


def bag_of_tokens(task, args, sequences=64, orders=1000):
    """-> the best accuracy of a predictor that knows the tokens of a sequence, and which one it is
    asked about, but not their order: all orders of a sequence are equally likely, so it gives the
    answer that is most frequent among random ones."""
    generator, right, n_scored = seeded_generator("cpu", "order", task, "test", 1), 0, 0
    x, _ = draw_batch(task, sequences, args.length - 2, args.vocab, generator)
    for tokens in x:
        shuffled = torch.rand(orders, len(tokens), generator=generator).argsort(1)
        same_tokens = tokens[shuffled]  # (orders, n)
        target = TASKS[task][0](same_tokens, args.vocab)
        scored = target != UNSCORED
        asked, answer = same_tokens[scored].unique(return_inverse=True)[1], target[scored]
        counts = torch.zeros(len(tokens), args.vocab + 2)
        counts.index_put_((asked, answer), torch.ones(len(asked)), accumulate=True)
        right, n_scored = right + counts.amax(1).sum().item(), n_scored + len(asked)
    return right / n_scored


def schemes(text):
    """A `type` for add_argument: "rope,alibi" -> the names."""
    for pe in (names := text.split(",")):
        try:
            parse_pe(pe)
        except ValueError as error:
            raise argparse.ArgumentTypeError(error) from None
    return names


def parse_args(argv=None):
    parser = Parser("-m tools.order", __doc__)
    flag, count = parser.add_argument, between(int, "[1, 1e6]")
    flag("--pe", required=True, type=schemes, help="schemes, separated by commas")
    flag("--tasks", default=",".join(TASKS), help="tasks, separated by commas")
    flag("--length", type=between(int, "[24, 1e4]"), default=32, help="tokens per sequence")
    flag("--layers", type=count, default=2, help="layers of width 64 with 4 heads")
    flag("--norm", default="post", choices=("post", "pre"), help="as in train.py")
    flag("--t5_max_distance", type=between(int, "[16, 1e6]"), default=128, help="as in train.py")
    flag("--max_offset", type=between(int, "[1, 1e6]"), default=64, help="as in train.py")
    flag("--vocab", type=between(int, "[2, 1e6]"), default=32, help="number of different tokens")
    flag("--steps", type=count, default=300, help=f"steps of {BATCH} sequences")
    flag("--lr", type=between(float, "(0, 1e9)"), default=3e-3, help="peak learning rate")
    flag("--zero_head", action="store_true", help="the output layer begins at 0, not at random")
    flag("--seeds", type=count, default=1, help="seeds 0, 1, ...; the mean is printed")
    return parser.parse_args(argv)


def main(argv=None):
    with one_line_errors():
        args = parse_args(argv)
        tasks, started, table = args.tasks.split(","), time.time(), []
        if unknown := set(tasks) - set(TASKS):
            raise UserError(f"unknown task {min(unknown)!r}; choose from {', '.join(TASKS)}")
        for task in tasks:
            row = {"task": task}
            for pe in args.pe:
                runs = [measure(pe, task, seed, args)[0] for seed in range(args.seeds)]
                means = torch.tensor(runs).mean(0).tolist()
                row[pe] = ", ".join(f"{x:.2f}" for x in means)
            row |= {
                name: f"{f(task, args):.2f}"
                for name, f in (("bag", bag_of_tokens), ("chance", chance))
            }
            table.append(row)
        lengths = ", ".join(str(x * args.length) for x in (1, 2, 4))
        print(f"accuracy on {lengths} tokens, after {args.steps} steps on {args.length}")
        print_table(table)
        print("bag: knows the tokens, not their order; chance: always the most frequent answer")
        print(f"{time.time() - started:.0f} seconds")


if __name__ == "__main__":
    main()
