"""How long a pre-training step takes, each scheme beside abs.

    python bench.py --pe all                            # every scheme, demo sizes
    python bench.py --pe tupe_r,rel --preset paper --batch_size 16

A step is corruption, forward, backward and update, on random tokens. Each scheme is measured against abs in turn,
one step of the one, one of the other (A B A B), so that a machine that slows down slows both; the ratio is the
median over the pairs, with the middle half of them as its spread.
"""

import json
import platform
import statistics
import time

import torch

from data import Parser, one_line_errors
from model import ALIASES, PE_NAMES, Encoder, EncoderConfig
from objectives import ObjectiveConfig, Pretraining
from train import PRESETS, Updater, autocast, can_compile, keep_memory, peak_memory_mb, pick_device, pick_dtype
from train import parse_args as train_args


class Stepper:
    """One model with its optimiser, and a pre-training step of it that can be timed."""

    def __init__(self, pe, args, device, dtype):
        a = self.args = train_args(["--preset", args.preset])
        self.device, self.dtype, self.n_steps = device, dtype, 0
        self.B, self.L = args.batch_size or a.batch_size, args.block_size or a.block_size
        torch.manual_seed(0)
        cfg = EncoderConfig(vocab_size=8192 if a.tokenizer == "bpe" else 50265, n_layer=a.n_layer, n_head=a.n_head,
                            d_model=a.d_model, d_ff=a.d_ff, max_len=self.L, dropout=a.dropout, attn_dropout=a.dropout, pe=pe)
        objective = ObjectiveConfig(args.objective, mask_rate=a.mask_rate, pos_rate=a.pos_rate)
        self.model = Pretraining(Encoder(cfg), objective).to(device)
        self.net = torch.compile(self.model) if args.compile else self.model
        self.updater = Updater(self.model, a, dtype)
        self.tokens = torch.randint(cfg.vocab_size - 8, (self.B, self.L), device=device)
        self.tokens[:, 0], self.tokens[:, -1] = cfg.cls_id, cfg.sep_id

    def __call__(self):
        """One step -> seconds."""
        self.synchronize()
        start = time.perf_counter()
        batch = self.model.corrupt(self.tokens, self.n_steps)
        with autocast(self.device, self.dtype):
            loss, _ = self.net(batch)
        self.updater.scaler.scale(loss).backward()
        self.updater.step()
        self.synchronize()
        self.n_steps += 1
        return time.perf_counter() - start

    def synchronize(self):
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def compare(pe, args, device, dtype):
    """-> row of the table: the scheme's step, and its ratio to that of abs, measured in turn."""
    torch._dynamo.reset()           # compiled code of the scheme before does not count towards dynamo's limit
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    ours = Stepper(pe, args, device, dtype)
    for _ in range(args.warmup):
        ours()
    peak = peak_memory_mb(device) if device.type == "cuda" else None        # a CPU knows only the process's highest
    base = Stepper("abs", args, device, dtype)
    for _ in range(args.warmup):
        base()
    pairs = [(base(), ours()) for _ in range(args.pairs)]
    ratios = [b / a for a, b in pairs]
    low, middle, high = statistics.quantiles(ratios, n=4)
    seconds = statistics.median(b for _, b in pairs)
    count = lambda stepper: sum(p.numel() for p in stepper.model.encoder.parameters())     # noqa: E731
    table = base.model.encoder.pe.parts["abs"].table.weight.numel()
    return {"name": "ours compiled" if args.compile else "ours eager", "pe": pe, "objective": args.objective,
            "ms_per_step": 1e3 * seconds, "tokens_per_s": ours.B * ours.L / seconds, "peak_mem_mb": peak,
            "parameters_added": count(ours) - count(base) + table, "ratio_to_abs": middle, "ratio_low": low, "ratio_high": high}


def main(argv=None):
    parser = Parser("bench.py", __doc__)
    parser.add_argument("--pe", default="all", help="schemes, separated by commas, or all (default: %(default)s)")
    parser.add_argument("--objective", default="mlm", help="default: %(default)s")
    parser.add_argument("--preset", choices=PRESETS, default="demo", help="sizes (default: %(default)s)")
    parser.add_argument("--batch_size", type=int, help="rows (default: the preset's)")
    parser.add_argument("--block_size", type=int, help="tokens a row (default: the preset's)")
    parser.add_argument("--pairs", type=int, default=15, help="steps of each of the two (default: %(default)s)")
    parser.add_argument("--warmup", type=int, default=3, help="steps before, untimed (default: %(default)s)")
    parser.add_argument("--device", choices=["cpu", "cuda", "mps"])
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--json", metavar="FILE", help="write the rows there")
    args = parser.parse_args(argv)
    keep_memory()
    with one_line_errors():
        if args.pairs < 2:
            raise ValueError(f"--pairs is {args.pairs}; a median with its spread needs at least 2")
        device = pick_device(args.device)
        dtype, _ = pick_dtype(device, args.dtype)
        names = [pe for pe in PE_NAMES if pe not in ALIASES or "untie" in pe] if args.pe == "all" else args.pe.split(",")
        for pe in names:
            Stepper(pe, args, device, dtype)
        if args.compile and not can_compile(device):
            raise ValueError("--compile: no compiler here")
    cpu = f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"
    chip = torch.cuda.get_device_name() if device.type == "cuda" else cpu
    machine = f"{chip}, torch {torch.__version__}, {str(dtype).removeprefix('torch.')}"
    print(f"{machine}; preset {args.preset}, {args.objective}\n{'pe':20}{'parameters':>12}{'ms/step':>9}{'tokens/s':>10}"
          f"{'to abs':>8}  middle half")
    rows = []
    for pe in names:
        row = compare(pe, args, device, dtype)
        rows.append(row)
        print(f"{pe:20}{row['parameters_added']:>+12,}{row['ms_per_step']:9.1f}{row['tokens_per_s']:10,.0f}{row['ratio_to_abs']:8.2f}"
              f"  {row['ratio_low']:.2f} - {row['ratio_high']:.2f}", flush=True)
        if args.json:
            with open(args.json, "w") as handle:
                json.dump({"machine": machine, "rows": rows}, handle, indent=1)


if __name__ == "__main__":
    main()
