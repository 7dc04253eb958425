"""How fast a pre-training step is: beside a peer, scheme by scheme, objective by objective, and beside the hardware.

    python bench.py --peer hf --preset paper --batch_size 16 --mask_rate .15     # transformers' RoBERTa, eager and compiled
    python bench.py --pe all                            # every scheme beside abs
    python bench.py --objective all --preset paper --batch_size 16               # every objective beside mlm
    python bench.py --sweep --preset paper              # rows of 128 .. 2048, the tokens of a step constant
    python bench.py --data 'books/*.jsonl.xz'           # tokenising beside decompressing, the loader beside a step
    python bench.py --finetune glue                     # SST-2: batches by length, all padded to 128, and transformers

A step is corruption, forward, backward, clip and update, on random tokens. What is compared takes turns, a step of each
(A B A B), so that a machine that slows down slows all: a ratio is the median over the rounds, with their middle half.
Peak memory is that of a fresh process. The peer is used as its users do: DataCollatorForLanguageModeling's masking, logits
at every place, sdpa, no attention mask since rows are full; sizes, dropout, autocast, fused AdamW and clipping are ours.

The floor, on paper: V' is V padded to a multiple of 64, k = round(mask_rate (L - 2)), w bytes a number (2 in 16 bits).
    operations (backward is twice forward)                    paper: B 64, L 128, k 38   base: B 32, L 512, k 76
    qkv and out      3 * 8 B L C^2 a layer                    0.155 T                    2.783 T
    feed-forward     3 * 4 B L C F a layer                    0.309 T                    5.566 T
    attention        3 * 4 B L^2 C a layer                    0.039 T                    0.928 T
    head             3 * 2 B k C (C + V')                     0.189 T                    0.572 T
    bytes that move
    layers           5 w B L (8 C + 2 F) a layer              4.0 GB                     24.2 GB
    head             5 w B k V'                               1.2 GB                     1.2 GB
    optimiser        36 a parameter                           0.8 GB                     4.5 GB
    bytes that stay
    parameters       16 each: it, its gradient, two moments   0.36 GB                    2.00 GB
    activations      w B L (8 C + 2 F) a layer                0.81 GB                    4.83 GB
5: what backward needs is written once and read twice, its gradient written and read. 8 C: x, q, k, v, attention's output,
three inputs of norms; 2 F: both sides of the GELU; attention's probabilities a fused kernel never stores. 36: the gradient
is written, read for its norm, and AdamW reads four numbers and writes three. `x floor` is a step's time over the sum over
parts of max(operations / rate of a large product, bytes / rate of a large copy), both timed in the same run. It and MFU
count what the task needs: logits at other places, padding, dropout and a scheme's own terms are overhead.
"""

import argparse
import glob
import itertools
import json
import multiprocessing
import os
import platform
import statistics
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch.utils.benchmark import Timer

import data
import finetune
import objectives
import train
from model import ALIASES, PE_NAMES, Encoder, EncoderConfig
from objectives import KINDS, MLM, OBJECTIVES, PAIR_HIDDEN, ObjectiveConfig, Pretraining
from train import PRESETS

SWEEP = (128, 256, 512, 1024, 2048)     # rows of so many tokens


class FullMLM(MLM):
    """mlm_full: one softmax over the vocabulary at every token: what P0's cost argument is about, at its dearest.

    Not --mlm_on all, which scores masked and other tokens in two passes, nor clm, whose attention has a mask.
    """
    def loss(self, encoder, hidden, batch):
        return self.score(encoder, hidden.flatten(0, 1), batch["original"].flatten(), batch["eligible"].flatten())[0], {}


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


def build_hf(cfg, kind="RobertaForMaskedLM"):
    """transformers' RoBERTa of the same sizes. Its positions start at 2, and it has token types: one, here."""
    try:
        import transformers
    except ImportError:
        raise ValueError("the peer needs transformers: pip install -r requirements-dev.txt") from None
    return getattr(transformers, kind)(transformers.RobertaConfig(
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
        wait = torch.accelerator.synchronize if self.device.type != "cpu" else int      # on a CPU there is nothing to wait for
        wait()
        start = time.perf_counter()
        self.updater.scaler.scale(self.loss()).backward()
        self.updater.step()
        wait()
        self.n_steps += 1
        return time.perf_counter() - start


def fresh(function, *args):
    """function(*args) in a process of its own. To be called while this one is small: a child's peak starts with its parent's."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *args).result()


def peak_memory(variant, device, dtype):
    train.keep_memory()
    step = Stepper(variant, device, dtype)
    for _ in range(3):
        step()
    return train.peak_memory_mb(device)


def count(cfg, B, L, objective="mlm", mask_rate=0.15, n_parameters=0, width=2):
    """{part: (operations, bytes moved)} of a step, as the docstring counts them; the heads of tc and nsp are left out."""
    C, F, V, n = cfg.d_model, cfg.d_ff, -(-cfg.vocab_size // 64) * 64, L - 2
    slots = {"mlm": round(mask_rate * n), "mlm_full": L, "clm": L - 1}
    parts = {"qkv and out": (8 * B * L * C ** 2 * cfg.n_layer, 6 * B * L * C * cfg.n_layer),
             "feed-forward": (4 * B * L * C * F * cfg.n_layer, 2 * B * L * (C + F) * cfg.n_layer),
             "attention": (4 * B * L ** 2 * C * cfg.n_layer, 0)}
    for name in objectives.spell_out(objective):
        if name in slots:
            parts["head"] = 2 * B * slots[name] * C * (C + V), B * slots[name] * V
        if name in KINDS["position"]:
            classes = 2 if name == "pplm_binary" else 2 * L - 1
            psi = 2 * B * n ** 2 * PAIR_HIDDEN * (cfg.n_head + classes)
            parts["pairs"] = 4 * B * L * C ** 2 + 2 * B * L ** 2 * C + psi, B * n ** 2 * classes
    parts = {name: (3 * operations, 5 * width * numbers) for name, (operations, numbers) in parts.items()}
    return {**parts, "optimiser": (0, 36 * n_parameters)}


def ceilings(device, dtype):
    """-> operations a second of a large matrix product, bytes a second of a large copy."""
    n, size = (8192, 1 << 30) if device.type == "cuda" else (2048, 1 << 27)
    names = {"a": torch.randn(n, n, device=device, dtype=dtype), "x": torch.ones(size, dtype=torch.uint8, device=device)}
    names["y"] = torch.zeros_like(names["x"])
    product, copy = (Timer(code, globals=names, num_threads=torch.get_num_threads()).timeit(5).mean
                     for code in ("a @ a", "y.copy_(x)"))
    return 2 * n ** 3 / product, 2 * size / copy


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

    def compare(self, variants, reference, key):
        """A row for each: its time over that of the reference, in turns with it; without one (--peer), tokens/s over hf's."""
        self.start(variants, f"time, over that of {key} (middle half)" if reference else "times the tokens/s of .. (middle half)")
        for v in variants if reference else []:
            base, mine = self.turns((reference, v))
            self.add(v, mine, {f"ratio_to_{key}": [b / a for a, b in zip(base, mine)]})
        if reference is None:
            seconds = dict(zip(variants, self.turns(variants)))
            for v, mine in seconds.items():
                peers = {p.name.replace(" ", "_"): t for p, t in seconds.items() if (p.maker, v.maker) == ("hf", "ours")}
                self.add(v, mine, {f"speed_to_{name}": [b / a for a, b in zip(mine, t)] for name, t in peers.items()})

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


def timed_prepare(pattern, cache):
    start = time.perf_counter()
    data.prepare(pattern, "bpe", cache)
    return time.perf_counter() - start, train.peak_memory_mb(torch.device("cpu"))


def bench_data(bench, pattern, v):
    """Tokenising beside reading and decompressing; the loader beside a step."""
    with tempfile.TemporaryDirectory() as cache:
        fresh(timed_prepare, pattern, cache)
        for meta in Path(cache).glob("*/meta.json"):
            meta.unlink()               # the tokenizer stays: now its training is not in the time
        tokenize, peak = fresh(timed_prepare, pattern, cache)
        start, size = time.perf_counter(), 0
        for file in glob.glob(os.path.expanduser(pattern), recursive=True):
            with data.OPENERS.get(Path(file).suffix, open)(file, "rb") as handle:
                size += len(handle.read())
        unpack = time.perf_counter() - start
        batches = data.Batches(data.prepare(pattern, "bpe", cache), v.L, 0)
        start = time.perf_counter()
        for i in range(100):
            batches(i, v.B)
        loader = (time.perf_counter() - start) / 100
    share = loader / statistics.median(bench.turns([v])[0])
    print(f"{bench.machine}\n{size / 1e6:,.0f} MB: decompressed at {size / unpack / 1e6:.1f} MB/s, with parsing and tokenising "
          f"{size / tokenize / 1e6:.1f} MB/s, peak memory {peak:,.0f} MB\nthe loader: {1e3 * loader:.2f} ms a batch of "
          f"{v.B} x {v.L}, {share:.2%} of a step")
    bench.keep({"name": "data", "mb": size / 1e6, "decompress_s": unpack, "tokenize_s": tokenize, "peak_mem_mb": peak,
                "loader_ms": 1e3 * loader, "loader_share": share})


def bench_finetune(bench, data_dir, v, cache):
    """Fine-tuning on SST-2: batches of near lengths, the same rows padded to 128, and the peer on the batches of the former.

    A round is ten batches of each in turn; ratios are of a round's seconds.
    """
    args = finetune.parse_args(["--task", "sst2", "--data_dir", data_dir])
    tokenizer = data.encoding_arguments(data.prepare("docs", "bpe", cache).tokenizer)
    start = {"config": {**asdict(v.config()), "vocab_size": 8192, "max_len": 128}, "tokenizer": tokenizer, "model": {}}
    ours = finetune.make_model(start, "sst2", 128, 0).to(bench.device)
    hf = build_hf(ours.encoder.config, "RobertaForSequenceClassification").to(bench.device).train()
    rows = finetune.encode_rows(ours, finetune.read_split("sst2", args, "train")["sst2"]).rows
    pad = ours.encoder.config.pad_id
    widest = [pad] * 128

    def peer_loss(tokens, padded, labels):      # RoBERTa's own pad id is 1, from which it counts positions
        mask = torch.ones_like(tokens) if padded is None else (~padded).long()
        return hf(tokens.masked_fill(tokens == pad, 1), attention_mask=mask, labels=labels).loss

    def by_length(group):
        return finetune.collate([rows[i] for i in group], pad, bench.device)

    def to_128(group):
        return [x[:-1] for x in finetune.collate([*(rows[i] for i in group), (widest, 0)], pad, bench.device)]

    variants = {"by length": (ours, ours.loss, by_length), "padded to 128": (ours, ours.loss, to_128),
                "hf": (hf, peer_loss, by_length)}
    optimizers = {model: torch.optim.AdamW(model.parameters(), 1e-4, fused=True) for model in (ours, hf)}
    seconds, batches = {name: [] for name in variants}, finetune.batches(rows, v.B, np.random.default_rng(0))
    ours.train()
    for _ in range(bench.args.warmup + bench.args.pairs):
        ten = list(itertools.islice(batches, 10))
        for name, (model, loss, collated) in variants.items():
            began = time.perf_counter()
            for group in ten:
                with train.autocast(bench.device, bench.dtype):
                    value = loss(*collated(group))
                value.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizers[model].step()
                optimizers[model].zero_grad()
            value.item()        # on a GPU: wait
            seconds[name].append(time.perf_counter() - began)
    print(f"{bench.machine}; preset {bench.args.preset}, SST-2, batch {v.B}\n"
          f"{'':16}{'ms a batch':>10}  time, over that by length (middle half)")
    for name, mine in ((name, each[bench.args.warmup:]) for name, each in seconds.items()):
        low, middle, high = statistics.quantiles([b / a for a, b in zip(seconds["by length"][bench.args.warmup:], mine)], n=4)
        print(f"{name:16}{100 * statistics.median(mine):10.1f}  {middle:.2f} ({low:.2f} - {high:.2f})")
        bench.keep({"name": f"finetune {name}", "ms_per_batch": 100 * statistics.median(mine), "ratio_low": low, "ratio": middle,
                    "ratio_high": high})


def parse_args(argv):
    """-> flags, with the preset's sizes, the schemes and the objectives spelled out."""
    parser = data.Parser("bench.py", __doc__)
    parser.add_argument("--peer", choices=["hf"], help="ours beside transformers' RobertaForMaskedLM, eager and compiled")
    parser.add_argument("--pe", default="abs", help="schemes, separated by commas, or all (default: %(default)s)")
    parser.add_argument("--objective", default="mlm", help="objectives, by commas, or all; mlm_full: a head at every token")
    parser.add_argument("--sweep", action="store_true", help=f"rows of {', '.join(map(str, SWEEP))} tokens")
    parser.add_argument("--data", metavar="GLOB", help="tokenise these files, and time the loader")
    parser.add_argument("--finetune", metavar="GLUE", help="fine-tune on GLUE/SST-2 of the official files, beside transformers")
    parser.add_argument("--cache", default="cache", help="--finetune: folder of prepared data (default: %(default)s)")
    parser.add_argument("--preset", choices=PRESETS, default="demo", help="sizes (default: %(default)s)")
    parser.add_argument("--batch_size", type=int, help="rows (default: the preset's)")
    parser.add_argument("--block_size", type=int, help="tokens a row (default: the preset's)")
    parser.add_argument("--mask_rate", type=float, help="of mlm (default: the preset's)")
    parser.add_argument("--pairs", type=int, default=15, help="steps of each that are timed (default: %(default)s)")
    parser.add_argument("--warmup", type=int, default=3, help="steps of each before (default: %(default)s)")
    parser.add_argument("--device", choices=["cpu", "cuda", "mps"])
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, help="--peer has both unless --no-compile")
    parser.add_argument("--json", metavar="FILE", help="write the rows there")
    args = parser.parse_args(argv)
    args.given = {name for name, value in vars(args).items() if value != parser.get_default(name)}
    for name in ("batch_size", "block_size", "mask_rate"):
        if getattr(args, name) is None:
            setattr(args, name, PRESETS[args.preset][name])
    args.pes = [pe for pe in PE_NAMES if pe not in ALIASES or "untie" in pe] if args.pe == "all" else args.pe.split(",")
    args.objectives = [*OBJECTIVES, "mlm_full"] if args.objective == "all" else args.objective.split(",")
    return args


def plan(args, bench):
    """-> the variants to compare, and what they are held against. Raises ValueError before anything is measured."""
    for name, low in {"batch_size": 1, "block_size": 4, "pairs": 2, "warmup": 0}.items():
        if getattr(args, name) < low:
            raise ValueError(f"--{name} is {getattr(args, name)}; it must be at least {low}")
    tables = ["--pe"] * (len(args.pes) > 1) + ["--objective"] * (len(args.objectives) > 1)
    tables += [f"--{name}" for name in ("peer", "sweep", "data", "finetune") if getattr(args, name)]
    if len(tables) > 1:
        raise ValueError(f"{' and '.join(tables)}: each is a table of its own, give one")
    kinds = [False, True] if args.peer and args.compile is None else [bool(args.compile)]
    if True in kinds and not train.can_compile(bench.device):
        print("compiled: skipped, no compiler here")
        kinds = [False]
    unused = [f"--{name}" for name in ("block_size", "mask_rate", "objective", "compile") if name in args.given]
    if args.finetune and unused:
        raise ValueError(f"{', '.join(unused)}: --finetune has no use for it")
    ours = Variant(args.preset, args.batch_size, args.block_size, args.mask_rate, args.pes[0], args.objectives[0], kinds[0])
    if args.data and "files" not in data.find_source(args.data).about:
        raise ValueError(f"--data {args.data}: it takes files, such as 'books/*.jsonl.xz'")
    if args.peer:
        variants = [replace(ours, compiled=kind) for kind in kinds]
        return [*variants, *(replace(v, maker="hf", pe="abs", objective="mlm") for v in variants)], None, None
    if args.sweep:
        variants = [replace(ours, B=max(ours.B * ours.L, SWEEP[-1]) // L, L=L) for L in SWEEP]
        return variants, variants[0], SWEEP[0]
    variants = [replace(ours, pe=pe, objective=name) for pe in args.pes for name in args.objectives]
    if args.objective != "mlm" and len(args.pes) == 1:
        return variants, replace(ours, objective="mlm"), "mlm"
    return variants, replace(ours, pe="abs"), "abs"


def main(argv=None):
    args = parse_args(argv)
    with data.one_line_errors():
        bench = Bench(args)
        variants, *held_against = plan(args, bench)
        for variant in variants:
            variant.n_parameters()      # what cannot be built shows before anything is measured
        with train.one_line_failures("lower --batch_size, --block_size, or take a smaller --preset"):
            if args.data:
                bench_data(bench, args.data, variants[0])
            elif args.finetune:
                bench_finetune(bench, args.finetune, variants[0], args.cache)
            else:
                bench.compare(variants, *held_against)


if __name__ == "__main__":
    main()
