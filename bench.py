"""How fast a pre-training step is: beside a peer, scheme by scheme, objective by objective, and beside the hardware.

    python bench.py --peer hf --preset paper --batch_size 16 --mask_rate .15     # transformers' RoBERTa, eager and compiled
    python bench.py --pe all                            # every scheme beside abs
    python bench.py --objective all --preset paper --batch_size 16               # every objective beside mlm
    python bench.py --sweep --preset paper              # rows of 128 .. 2048, the tokens of a step constant
    python bench.py --data 'books/*.jsonl.xz'           # tokenising beside decompressing, the loader beside a step

A step is corruption, forward, backward, clip and update, on random tokens. Those that are compared take turns, one step of
each (A B A B), so that a machine that slows down slows all: a ratio is the median over the rounds, with the middle half of
them as its spread. Peak memory is that of a fresh process that does nothing else.
The peer is used as its users do: masking like DataCollatorForLanguageModeling's, logits at every place, labels -100, sdpa;
sizes, vocabulary, dropout, autocast, fused AdamW and clipping are ours. Its rows are full, so it gets no attention mask.

The floor, counted on paper; count() has it for any config, a test holds it against PyTorch's counter. V' is V padded to a
multiple of 64, k = round(mask_rate (L - 2)) slots, w bytes a number (2 in 16 bits); backward is twice forward.

                     operations, forward + backward                   paper: B 64, L 128, k 38   base: B 32, L 512, k 76
    qkv and out      3 * 8 B L C^2 a layer                            0.155 T                    2.783 T
    feed-forward     3 * 4 B L C F a layer                            0.309 T                    5.566 T
    attention        3 * 4 B L^2 C a layer                            0.039 T                    0.928 T
    head             3 * 2 B k C (C + V')                             0.189 T                    0.572 T
    together                                                          0.691 T                    9.850 T
    bytes that move
    layers           5 w B L (8 C + 2 F) a layer                      4.0 GB                     24.2 GB
    head             5 w B k V'                                       1.2 GB                     1.2 GB
    optimiser        36 bytes a parameter                             0.8 GB                     4.5 GB
    bytes that stay
    parameters       16 a parameter: it, its gradient, two moments    0.36 GB                    2.00 GB
    activations      w B L (8 C + 2 F) a layer                        0.81 GB                    4.83 GB

Why 5: what backward needs is written once and read twice, its gradient written and read; x, q, k, v, attention's output and
three inputs of norms make 8 C, both sides of the GELU 2 F. Attention's own probabilities do not count: a fused kernel never
stores them. Why 36: the norm reads the gradient that backward wrote, AdamW reads four numbers and writes three.
`x floor` is measured over sum over parts of max(operations / rate of a large matrix product, bytes / rate of a large copy),
both timed in the same run. Floor and MFU count what the task needs, for the peer too: logits at unselected places, padding,
dropout and a scheme's own terms are overhead.
"""

import argparse
import glob
import importlib.util
import json
import multiprocessing
import os
import platform
import statistics
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from pathlib import Path

import torch

import data
import model
import objectives
import train
from model import PE_NAMES, Encoder, EncoderConfig
from objectives import KINDS, MLM, OBJECTIVES, PAIR_HIDDEN, ObjectiveConfig, Pretraining
from train import PRESETS

SWEEP = (128, 256, 512, 1024, 2048)     # rows of so many tokens


class FullMLM(MLM):
    """mlm_full: one softmax over the vocabulary at every token, what P0 holds pplm's cost against.

    Not --mlm_on all, which scores masked and other tokens in two passes, nor clm, whose attention has a mask.
    """
    def loss(self, encoder, hidden, batch):
        return self.score(encoder, hidden.flatten(0, 1), batch["original"].flatten(), batch["eligible"].flatten())[0], {}


# ---------------------------------------------------------------------------------------------------------
# What is measured

@dataclass(frozen=True)
class Variant:
    """What a line of a table measures; sizes come from the preset."""
    preset: str
    B: int
    L: int
    mask_rate: float
    pe: str = "abs"
    objective: str = "mlm"
    compiled: bool = False
    maker: str = "ours"

    @property
    def name(self):
        return f"{self.maker} {'compiled' if self.compiled else 'eager'}"

    def config(self):
        p = PRESETS[self.preset]
        shape = {name: p[name] for name in ("n_layer", "n_head", "d_model", "d_ff")}
        return EncoderConfig(vocab_size=8192 if p["tokenizer"] == "bpe" else 50265, max_len=self.L, pe=self.pe, **shape)

    def build(self):
        """-> the model. Raises ValueError on what there is not, or what does not go together."""
        if self.maker == "hf":
            return build_hf(self.config())
        full = self.objective == "mlm_full"
        cfg = ObjectiveConfig("mlm" if full else self.objective, mask_rate=self.mask_rate)
        pretraining = Pretraining(Encoder(self.config()), cfg)
        if full:
            pretraining.objectives["mlm"] = FullMLM(pretraining.encoder, cfg)
        if self.B < pretraining.min_rows:
            raise ValueError(f"{self.objective} draws from other rows: --batch_size is {self.B}; it must be at least 2")
        return pretraining

    def n_parameters(self):
        with torch.device("meta"):      # no memory, no time
            return sum(p.numel() for p in self.build().parameters())


def build_hf(cfg):
    """transformers' RoBERTa of the same sizes. Its positions start at 2, and it has token types: one, here."""
    from transformers import RobertaConfig, RobertaForMaskedLM
    return RobertaForMaskedLM(RobertaConfig(
        vocab_size=cfg.vocab_size, hidden_size=cfg.d_model, num_hidden_layers=cfg.n_layer, num_attention_heads=cfg.n_head,
        intermediate_size=cfg.d_ff, hidden_dropout_prob=cfg.dropout, attention_probs_dropout_prob=cfg.attn_dropout,
        max_position_embeddings=cfg.max_len + 2, type_vocab_size=1, layer_norm_eps=cfg.norm_eps, attn_implementation="sdpa"))


def collate(tokens, cfg, rate):
    """What DataCollatorForLanguageModeling does -> input ids, labels (-100 where nothing is scored)."""
    coin = lambda p: torch.full(tokens.shape, p, device=tokens.device).bernoulli().bool()               # noqa: E731
    selected = coin(rate) & (tokens < cfg.cls_id)
    masked = coin(0.8) & selected
    swapped = coin(0.5) & selected & ~masked
    words = torch.randint(cfg.cls_id, tokens.shape, device=tokens.device)
    return torch.where(swapped, words, tokens.masked_fill(masked, cfg.mask_id)), tokens.masked_fill(~selected, -100)


class Stepper:
    """A variant's model with its optimiser, and a pre-training step of it that can be timed."""

    def __init__(self, variant, device, dtype):
        torch.manual_seed(0)
        self.variant, self.device, self.dtype, self.n_steps = variant, device, dtype, 0
        self.cfg, self.model = variant.config(), variant.build().to(device).train()
        self.net = torch.compile(self.model) if variant.compiled else self.model
        self.updater = train.Updater(self.model, train.parse_args(["--preset", variant.preset]), dtype)
        self.tokens = torch.randint(4, self.cfg.cls_id, (variant.B, variant.L), device=device)  # RoBERTa's specials are 0 .. 3
        self.tokens[:, 0], self.tokens[:, -1] = self.cfg.cls_id, self.cfg.sep_id

    def loss(self):
        if self.variant.maker == "hf":
            ids, labels = collate(self.tokens, self.cfg, self.variant.mask_rate)
            with train.autocast(self.device, self.dtype):
                return self.net(input_ids=ids, labels=labels).loss
        batch = self.model.corrupt(self.tokens, self.n_steps)
        with train.autocast(self.device, self.dtype):
            return self.net(batch)[0]

    def __call__(self):
        """One step -> seconds."""
        synchronize(self.device)
        start = time.perf_counter()
        self.updater.scaler.scale(self.loss()).backward()
        self.updater.step()
        synchronize(self.device)
        self.n_steps += 1
        return time.perf_counter() - start


def synchronize(device):
    if device.type != "cpu":
        torch.accelerator.synchronize()


def fresh(function, *args):
    """function(*args) in a process of its own, so that its peak memory is nobody else's. Call it while this one is small:
    on Linux a child's peak starts with its parent's."""
    try:
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            return pool.submit(function, *args).result()
    except BrokenProcessPool:
        raise OSError("a measuring process was ended from outside; most likely out of memory") from None


def peak_memory(variant, device, dtype):
    train.keep_memory()
    step = Stepper(variant, device, dtype)
    for _ in range(3):
        step()
    return train.peak_memory_mb(device)


# ---------------------------------------------------------------------------------------------------------
# The floor

def count(cfg, B, L, objective="mlm", mask_rate=0.15, n_parameters=0, width=2):
    """{part: (operations, bytes moved)} of a step, as the docstring counts them; the heads of tc and nsp are left out."""
    C, F, V, n = cfg.d_model, cfg.d_ff, -(-cfg.vocab_size // 64) * 64, L - 2
    forward = {"qkv and out": 8 * B * L * C ** 2 * cfg.n_layer, "feed-forward": 4 * B * L * C * F * cfg.n_layer,
               "attention": 4 * B * L ** 2 * C * cfg.n_layer}
    moved = {"qkv and out": 6 * B * L * C * cfg.n_layer, "feed-forward": 2 * B * L * (C + F) * cfg.n_layer}
    slots = {"mlm": round(mask_rate * n), "mlm_full": L, "clm": L - 1}
    for name in objectives.ALIASES.get(objective, objective).split("+"):
        if name in slots:
            forward["head"], moved["head"] = 2 * B * slots[name] * C * (C + V), B * slots[name] * V
        if name in KINDS["position"]:
            classes = 2 if name == "pplm_binary" else 2 * L - 1
            psi = 2 * B * n ** 2 * PAIR_HIDDEN * (cfg.n_head + classes)
            forward["pairs"], moved["pairs"] = 4 * B * L * C ** 2 + 2 * B * L ** 2 * C + psi, B * n ** 2 * classes
    parts = {name: (3 * operations, 5 * width * moved.get(name, 0)) for name, operations in forward.items()}
    return {**parts, "optimiser": (0, 36 * n_parameters)}


def ceilings(device, dtype):
    """-> operations a second of a large matrix product, bytes a second of a large copy: the best of five."""
    big = device.type == "cuda"
    a, b = torch.randn(2, *2 * [8192 if big else 2048], device=device, dtype=dtype)
    source = torch.zeros(2 ** (30 if big else 27), dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)

    def best(call):
        seconds = []
        for _ in range(6):              # the first one warms up
            synchronize(device)
            start = time.perf_counter()
            call()
            synchronize(device)
            seconds.append(time.perf_counter() - start)
        return min(seconds[1:])
    return 2 * len(a) ** 3 / best(lambda: a @ b), 2 * len(source) / best(lambda: target.copy_(source))


# ---------------------------------------------------------------------------------------------------------
# Tables

class Bench:
    """The machine, its ceilings, and the rows so far."""

    def __init__(self, args):
        self.args, self.rows, self.peaks = args, [], {}
        self.device = train.pick_device(args.device)
        self.dtype, _ = train.pick_dtype(self.device, args.dtype)
        cpu = f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"
        chip = torch.cuda.get_device_name() if self.device.type == "cuda" else cpu
        self.machine = f"{chip}, torch {torch.__version__}, {str(self.dtype).removeprefix('torch.')}"

    def start(self, variants, title):
        """Memory, measured while this process is small; then the ceilings."""
        for variant in variants:
            self.peaks[variant] = fresh(peak_memory, variant, self.device, self.dtype)
        train.keep_memory()
        self.rates = ceilings(self.device, self.dtype)
        print(f"{self.machine}; preset {self.args.preset}; a matrix product: {self.rates[0] / 1e12:.2f} TFLOP/s, a copy: "
              f"{self.rates[1] / 1e9:.1f} GB/s\n{'':14}{'pe':19}{'objective':12}{'B x L':>10}{'ms/step':>9}{'tokens/s':>11}"
              f"{'peak MB':>9}{'MFU':>6}{'x floor':>9}  {title}")

    def turns(self, variants):
        """A step of each in turn, and again -> a list of seconds for each."""
        torch._dynamo.reset()           # compiled code of those before does not count towards dynamo's limit
        steppers = [Stepper(variant, self.device, self.dtype) for variant in variants]
        rounds = [[step() for step in steppers] for _ in range(self.args.warmup + self.args.pairs)]
        return list(zip(*rounds[self.args.warmup:]))

    def against(self, reference, variants, key):
        """A row for each variant, with its time over that of the reference, measured in turn."""
        self.start(variants, f"time, over that of {key} (middle half)")
        for variant in variants:
            base, mine = self.turns((reference, variant))
            self.add(variant, mine, {f"ratio_to_{key}": [b / a for a, b in zip(base, mine)]})

    def peer(self, variants):
        """All of them in turn; ours also as times the tokens/s of the peer's."""
        self.start(variants, "times the tokens/s of .. (middle half)")
        seconds = dict(zip(variants, self.turns(variants)))
        for variant, mine in seconds.items():
            theirs = {v.name: t for v, t in seconds.items() if v.maker == "hf" and variant.maker == "ours"}
            self.add(variant, mine, {f"speed_to_{name.replace(' ', '_')}": [b / a for a, b in zip(mine, t)]
                                     for name, t in theirs.items()})

    def add(self, v, seconds, ratios):
        """Print a row, and keep it."""
        median, n_parameters = statistics.median(seconds), v.n_parameters()
        parts = count(v.config(), v.B, v.L, v.objective, v.mask_rate, n_parameters, self.dtype.itemsize)
        floor = sum(max(n / self.rates[0], size / self.rates[1]) for n, size in parts.values())
        peak = train.peak_flops(self.device) if self.dtype != torch.float32 else None
        mfu = sum(n for n, _ in parts.values()) / median / peak if peak else None
        row = {"name": v.name, "pe": v.pe, "objective": v.objective, "batch_size": v.B, "block_size": v.L,
               "parameters": n_parameters, "parameters_added": n_parameters - replace(v, pe="none").n_parameters(),
               "tokens_per_s": v.B * v.L / median, "ms_per_step": 1e3 * median, "peak_mem_mb": self.peaks[v], "mfu": mfu,
               "over_floor": median / floor}
        texts = []
        for key, values in ratios.items():
            row[f"{key}_low"], row[key], row[f"{key}_high"] = low, middle, high = statistics.quantiles(values, n=4)
            name = key[9:].replace("_", " ") + " " if key.startswith("speed") else ""
            texts.append(f"{name}{middle:.2f} ({low:.2f} - {high:.2f})")
        print(f"{v.name:14}{v.pe:19}{v.objective:12}{f'{v.B} x {v.L}':>10}{1e3 * median:9.1f}{row['tokens_per_s']:11,.0f}"
              f"{self.peaks[v] or 0:9,.0f}{f'{mfu:.0%}' if mfu else '-':>6}{median / floor:9.1f}  {', '.join(texts)}", flush=True)
        self.keep(row)

    def keep(self, row):
        self.rows.append(row)
        if self.args.json:
            Path(self.args.json).write_text(json.dumps({"machine": self.machine, "rows": self.rows}, indent=1))


# ---------------------------------------------------------------------------------------------------------
# Data

def timed_prepare(pattern, tokenizer, cache):
    start = time.perf_counter()
    data.prepare(pattern, tokenizer, cache)
    return time.perf_counter() - start, train.peak_memory_mb(torch.device("cpu"))


def timed_reading(pattern):
    """-> bytes of text, seconds to decompress them, seconds to decompress and parse them."""
    start = time.perf_counter()
    for file in glob.glob(os.path.expanduser(pattern), recursive=True):
        with data.OPENERS.get(Path(file).suffix, open)(file, "rb") as handle:
            while handle.read(1 << 20):
                pass
    middle = time.perf_counter()
    size = sum(len(text.encode()) for documents, _ in data.find_source(pattern).parts() for text in documents())
    return size, middle - start, time.perf_counter() - middle


def bench_data(bench, pattern, tokenizer, variant):
    """Tokenising beside reading; the loader beside a step."""
    with tempfile.TemporaryDirectory() as cache:
        whole, whole_peak = fresh(timed_prepare, pattern, tokenizer, cache)
        for meta in Path(cache).glob("*/meta.json"):
            meta.unlink()               # the tokenizer stays: now the tokens alone
        tokens, peak = fresh(timed_prepare, pattern, tokenizer, cache)
        size, unpack, parse = timed_reading(pattern)
        batches = data.Batches(data.prepare(pattern, tokenizer, cache), variant.L, 0)
        start = time.perf_counter()
        for i in range(100):
            batches(i, variant.B)
        loader = (time.perf_counter() - start) / 100
    [seconds] = bench.turns([variant])
    share = loader / statistics.median(seconds)
    for what, t in {"decompress": unpack, "decompress and parse": parse, "the same and tokenise": tokens,
                    "the same and train the BPE": whole}.items():
        print(f"{what:28}{size / t / 1e6:8.1f} MB/s of text")
    print(f"peak memory {peak:,.0f} MB, with the BPE's training {whole_peak:,.0f} MB, for {size / 1e6:,.0f} MB of text\n"
          f"the loader: {1e3 * loader:.2f} ms a batch of {variant.B} x {variant.L}, {share:.2%} of a step")
    bench.keep({"name": "data", "mb": size / 1e6, "decompress_s": unpack, "parse_s": parse, "tokenize_s": tokens,
                "prepare_s": whole, "peak_mem_mb": peak, "prepare_peak_mem_mb": whole_peak, "loader_ms": 1e3 * loader,
                "loader_share": share})


# ---------------------------------------------------------------------------------------------------------

def parse_args(argv):
    parser = data.Parser("bench.py", __doc__)
    parser.add_argument("--peer", choices=["hf"], help="ours beside transformers' RobertaForMaskedLM, eager and compiled")
    parser.add_argument("--pe", default="abs", help="schemes, separated by commas, or all (default: %(default)s)")
    parser.add_argument("--objective", default="mlm", help="objectives, by commas, or all; mlm_full: a head at every token")
    parser.add_argument("--sweep", action="store_true", help=f"rows of {', '.join(map(str, SWEEP))} tokens")
    parser.add_argument("--data", metavar="GLOB", help="tokenise these files, and time the loader")
    parser.add_argument("--tokenizer", choices=["bpe", "gpt2"], default="bpe", help="of --data (default: %(default)s)")
    parser.add_argument("--preset", choices=PRESETS, default="demo", help="sizes (default: %(default)s)")
    for name, what in {"batch_size": "rows", "block_size": "tokens a row"}.items():
        parser.add_argument(f"--{name}", type=int, help=f"{what} (default: the preset's)")
    parser.add_argument("--mask_rate", type=float, help="of mlm (default: the preset's)")
    parser.add_argument("--pairs", type=int, default=15, help="steps of each that are timed (default: %(default)s)")
    parser.add_argument("--warmup", type=int, default=3, help="steps of each before (default: %(default)s)")
    parser.add_argument("--device", choices=["cpu", "cuda", "mps"])
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, help="--peer has both unless --no-compile")
    parser.add_argument("--json", metavar="FILE", help="write the rows there")
    return parser.parse_args(argv)


def plan(args, bench):
    """Flags -> the function that measures. Raises ValueError before anything is."""
    p = PRESETS[args.preset]
    for name in ("batch_size", "block_size", "mask_rate"):
        if getattr(args, name) is None:
            setattr(args, name, p[name])
    for name, low in {"batch_size": 1, "block_size": 4, "pairs": 2, "warmup": 0}.items():
        if getattr(args, name) < low:
            raise ValueError(f"--{name} is {getattr(args, name)}; it must be at least {low}")
    pes = [pe for pe in PE_NAMES if pe not in model.ALIASES or "untie" in pe] if args.pe == "all" else args.pe.split(",")
    names = [*OBJECTIVES, "mlm_full"] if args.objective == "all" else args.objective.split(",")
    if len(pes) > 1 and len(names) > 1 or (len(pes) > 1 or len(names) > 1) and (args.peer or args.sweep or args.data):
        raise ValueError("several schemes or several objectives, not both, and neither with --peer, --sweep or --data")
    if sum(map(bool, (args.peer, args.sweep, args.data))) > 1:
        raise ValueError("--peer, --sweep and --data: one at a time")
    compiler = train.can_compile(bench.device)
    if args.compile and not compiler:
        raise ValueError("--compile: no compiler here")
    ours = Variant(args.preset, args.batch_size, args.block_size, args.mask_rate, pes[0], names[0],
                   bool(args.compile and not args.peer))
    variants = [replace(ours, pe=pe, objective=name) for pe in pes for name in names]
    if args.sweep:
        tokens = max(ours.B * ours.L, SWEEP[-1])
        variants = [replace(ours, B=tokens // L, L=L) for L in SWEEP]
    if args.peer:
        if importlib.util.find_spec("transformers") is None:
            raise ValueError("--peer hf needs transformers: pip install -r requirements-dev.txt")
        if not compiler:
            print("compiled: skipped, no compiler here")
        kinds = [False, True] if compiler and args.compile is not False else [False]
        variants = [replace(ours, maker=maker, compiled=compiled) for maker in ("ours", "hf") for compiled in kinds]
        variants = [v if v.maker == "ours" else replace(v, pe="abs", objective="mlm") for v in variants]
    for variant in variants:
        variant.n_parameters()
    if args.data:
        return lambda: bench_data(bench, args.data, args.tokenizer, ours)
    if args.peer:
        return lambda: bench.peer(variants)
    if args.sweep:
        return lambda: bench.against(variants[0], variants, f"{SWEEP[0]}")
    key = "mlm" if len(names) > 1 or ours.objective != "mlm" and ours.pe == "abs" else "abs"
    reference = replace(ours, objective="mlm") if key == "mlm" else replace(ours, pe="abs")
    return lambda: bench.against(reference, variants, key)


def main(argv=None):
    args = parse_args(argv)
    with data.one_line_errors():
        bench = Bench(args)
        measure = plan(args, bench)
    with train.one_line_failures("lower --batch_size, --block_size, or take a smaller --preset"):
        measure()


if __name__ == "__main__":
    main()
