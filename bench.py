"""How fast a pre-training step is: beside a peer, scheme by scheme, objective by objective, and
beside the hardware.

    python bench.py --peer hf --preset paper --batch_size 16 --mask_rate .15    # and transformers
    python bench.py --pe all                            # every scheme beside abs
    python bench.py --objective all --preset paper --batch_size 16      # every objective beside mlm
    python bench.py --sweep --preset paper              # rows of 128 .. 2048, as many tokens a step
    python bench.py --data 'books/*.jsonl.xz'           # tokenising beside decompressing, loader
                                                        # beside step
    python bench.py --finetune glue                     # SST-2: batches by length, all padded to
                                                        # 128, and transformers
    python bench.py --agree --pe all --dtype float16    # losses and gradients beside a CPU's
    python bench.py --lower sm_90 --peer hf --preset paper      # what torch.compile would launch on
                                                                # a GPU, without one (gpu.py)
    python bench.py --gpu results/gpu.json              # every line that only a GPU can show

A step is corruption, forward, backward, clip and update, on random tokens. What is compared takes
turns, a step of each (A B A B), so that a machine that slows down slows all: a ratio is the median
over the rounds, with their middle half. Peak memory is that of a fresh process. The peer is
transformers' RoBERTa, eager and compiled, used as its users do: DataCollatorForLanguageModeling's
masking, logits at every place, sdpa, no attention mask since rows are full; sizes, dropout,
autocast, fused AdamW and clipping are ours.

The floor, on paper: V' is V padded to a multiple of 64, k = round(mask_rate (L - 2)), w bytes a
number (2 in 16 bits).
    operations (backward is twice forward)     paper: B 64, L 128, k 38   base: B 32, L 512, k 76
    qkv and out      3 * 8 B L C^2 a layer     0.155 T                    2.783 T
    feed-forward     3 * 4 B L C F a layer     0.309 T                    5.566 T
    attention        3 * 4 B L^2 C a layer     0.039 T                    0.928 T
    head             3 * 2 B k C (C + V')      0.189 T                    0.572 T
    bytes that move
    layers           5 w B L (8 C + 2 F) a layer   4.0 GB                 24.2 GB
    head             5 w B k V'                1.2 GB                     1.2 GB
    optimiser        36 a parameter            0.8 GB                     4.5 GB
    bytes that stay
    parameters       16 each: it, its gradient, two moments   0.36 GB     2.00 GB
    activations      w B L (8 C + 2 F) a layer     0.81 GB                4.83 GB
5: what backward needs is written once and read twice, its gradient written and read. 8 C: x, q, k,
v, attention's output, three inputs of norms; 2 F: both sides of the GELU; attention's probabilities
a fused kernel never stores. 36: the gradient is written, read for its norm, and AdamW reads four
numbers and writes three. `x floor` is a step's time over the sum over parts of max(operations /
rate of a large product, bytes / rate of a large copy), both timed in the same run. It and MFU count
what the task needs: logits at other places, padding, dropout and a scheme's own terms are overhead.
"""

import glob
import itertools
import multiprocessing
import os
import platform
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from time import perf_counter
from timeit import repeat, timeit

import numpy as np
import torch

import data
import finetune
import train
from common import (
    DEVICE,
    DTYPE,
    Parser,
    autocast,
    can_compile,
    check_settings,
    keep_memory,
    one_line_errors,
    peak_flops,
    peak_memory_mb,
    pick_device,
    pick_dtype,
    pick_fields,
    setting,
    write_json,
)
from fast import compiled, step_or_skip
from model import SCHEMES, Encoder, EncoderConfig
from objectives import (
    MLM,
    OBJECTIVES,
    PAIR_HIDDEN,
    ObjectiveConfig,
    Pretraining,
    of_kind,
    spell_out,
)

SWEEP = (128, 256, 512, 1024, 2048)  # rows of so many tokens
SIZES = ("batch_size", "block_size", "mask_rate")  # the preset's, where not given
# Flags that these tables do not take.
WITHOUT = {
    "finetune": {"block_size", "mask_rate", "objective", "compile"},
    "lower": {"compile", "device", "dtype", "pairs", "warmup"},
    "gpu": {"pe", "objective", "compile", "dtype", "json"},
}


@dataclass(frozen=True)
class BenchConfig:
    """The flags, and with one scheme and one objective what a line of a table measures."""

    peer: str | None = setting(None, "ours beside RobertaForMaskedLM, eager and compiled", ("hf",))
    pe: str = setting("abs", "schemes, separated by commas, or all")
    objective: str = setting(
        "mlm", "objectives, separated by commas, or all; mlm_full: mlm with its head at every token"
    )
    sweep: bool = setting(False, f"rows of {', '.join(map(str, SWEEP))} tokens")
    data: str | None = setting(None, "a glob of files: tokenise them, and time the loader")
    finetune: str | None = setting(
        None, "folder of GLUE's official files: fine-tune on its SST-2, beside transformers"
    )
    lower: str | None = setting(
        None,
        "a card that need not be there: what torch.compile would launch on it",
        ("sm_70", "sm_80", "sm_90"),
    )
    agree: bool = setting(False, "losses and gradients of small models, beside float32 on a CPU")
    gpu: str | None = setting(
        None,
        "file for the results of every command that wants a GPU; what "
        "it has is skipped; flags given besides are added to each",
    )
    cache: str = setting("cache", "--finetune: folder of prepared data")
    preset: str = setting("demo", "sizes", tuple(train.PRESETS))
    batch_size: int = setting(32, "rows", "[1, 1e6]")
    block_size: int = setting(64, "tokens a row", "[4, 1e5]")
    mask_rate: float = setting(0.15, "of mlm", "(0, 1)")
    pairs: int = setting(15, "steps of each that are timed", "[2, 1e6]")
    warmup: int = setting(3, "steps of each before", "[0, 1e6]")
    device: str | None = DEVICE
    dtype: str | None = DTYPE
    compile: bool | None = setting(None, "--peer has both, unless --no-compile")
    json: str | None = setting(None, "file to write the rows to")

    __post_init__ = check_settings

    @property
    def name(self):
        return f"{self.peer or 'ours'} {'compiled' if self.compile else 'eager'}"

    @property
    def training(self):
        """The preset's flags of train.py."""
        return train.parse_args(["--preset", self.preset])

    @property
    def machine(self):
        """-> device, dtype."""
        device = pick_device(self.device)
        return device, pick_dtype(device, self.dtype)[0]

    @property
    def shape(self):
        return pick_fields(
            EncoderConfig,
            self.training,
            pe=self.pe,
            max_len=self.block_size,
            vocab_size=8192 if self.training.tokenizer == "bpe" else 50265,
        )

    def rows(self):
        """Random words between [CLS] and [SEP] -> (B, L). RoBERTa's own specials are 0 .. 3."""
        cfg = self.shape
        tokens = torch.randint(4, cfg.cls_id, (self.batch_size, self.block_size))
        tokens[:, 0], tokens[:, -1] = cfg.cls_id, cfg.sep_id
        return tokens

    def build(self):
        """-> the model. Raises ValueError on what there is not, or what does not go together."""
        if self.peer:
            return build_hf(self.shape)
        cfg = ObjectiveConfig(self.objective.replace("mlm_full", "mlm"), mask_rate=self.mask_rate)
        model = Pretraining(Encoder(self.shape), cfg)
        if "mlm_full" in self.objective:
            model.objectives["mlm"] = FullMLM(model.encoder, cfg)
        train.check_rows(model, self.batch_size)
        return model

    def n_parameters(self):
        with torch.device("meta"):  # no memory, no time
            return sum(p.numel() for p in self.build().parameters())


# --------------------------------------------------------------------------------------------------
# What is measured


class FullMLM(MLM):
    """mlm_full: one softmax over the vocabulary at every token: what P0's cost argument is about,
    at its dearest.

    Not --mlm_on all, which scores masked and other tokens in two passes, nor clm, whose attention
    has a mask.
    """

    def loss(self, encoder, hidden, batch):
        every = [batch[name].flatten() for name in ("original", "eligible")]
        return self.score(encoder, hidden.flatten(0, 1), *every)[0], {}


def build_hf(cfg, kind="RobertaForMaskedLM"):
    """transformers' RoBERTa of the same sizes. Its positions start at 2, and it has token types:
    one, here."""
    from hf import SHAPE, transformers  # seconds, and memory

    if transformers is None:
        raise ValueError("the peer needs transformers: pip install -r requirements-dev.txt")
    sizes = {theirs: getattr(cfg, ours) for ours, theirs in SHAPE.items()}
    config = transformers.RobertaConfig(
        **sizes,
        max_position_embeddings=cfg.max_len + 2,
        type_vocab_size=1,
        attn_implementation="sdpa",
    )
    return getattr(transformers, kind)(config)


def collate(tokens, cfg, rate):
    """As DataCollatorForLanguageModeling masks -> input ids, labels (-100: not scored)."""
    chance, dice = torch.rand(2, *tokens.shape, device=tokens.device)
    selected = (chance < rate) & (tokens < cfg.cls_id)
    ids = torch.where(selected & (dice < 0.9), torch.randint_like(tokens, cfg.cls_id), tokens)
    ids = ids.masked_fill(selected & (dice < 0.8), cfg.mask_id)
    return {"input_ids": ids, "labels": tokens.masked_fill(~selected, -100)}


def learner(model, v):
    """-> a function that updates the model with each of the losses it is given (functions), and
    says in how many seconds."""
    device, dtype = v.machine
    parameters = list(model.to(device).train().parameters())
    optimizer = train.make_optimizer(model, v.training, torch.tensor(v.training.lr, device=device))
    scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)

    def timed(losses):
        start = perf_counter()
        for loss in losses:
            with autocast(device, dtype):
                value = loss()
            scaler.scale(value).backward()
            step_or_skip(parameters, optimizer, scaler)
        value.item()  # a GPU is waited for
        return perf_counter() - start

    return timed


def pretraining(v):
    """-> a function that makes a step on random tokens, and says in how many seconds."""
    torch.manual_seed(0)
    model, cfg = v.build(), v.shape
    net, tokens = model, v.rows().to(v.machine[0])
    if v.compile:  # a peer as its users do
        net = torch.compile(net) if v.peer else compiled(net, v.machine[0])

    def loss():
        if v.peer:
            return net(**collate(tokens, cfg, v.mask_rate)).loss
        return net(model.corrupt(tokens, 0))[0]

    return partial(learner(model, v), [loss])


def turns(v, steps):
    """A step of each in turn, and again -> a tuple of seconds for each."""
    rounds = []
    for _ in range(v.warmup + v.pairs):
        rounds.append([step() for step in steps])
    return list(zip(*rounds[v.warmup :]))


def turns_of(*variants):
    torch._dynamo.reset()  # graphs of those before count towards dynamo's limit
    return turns(variants[0], [*map(pretraining, variants)])


def middle_half(values, others):
    """Quartiles of the ratio of what was timed in the same rounds."""
    return quantiles([a / b for a, b in zip(values, others)], n=4)


def fresh(function, *args):
    """function(*args) in a process of its own. To be called while this one is small: a child's peak
    starts with its parent's."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *args).result()


def peak_memory(v):
    keep_memory()
    step = pretraining(v)
    for _ in range(3):
        step()
    return peak_memory_mb(v.machine[0])


# --------------------------------------------------------------------------------------------------
# What it is held against


def count(v, n_parameters=0):
    """{part: (operations, bytes moved)} of a step, as the docstring counts them; the heads of tc
    and nsp are left out."""
    cfg, B, L, n = v.shape, v.batch_size, v.block_size, v.block_size - 2
    C, F, V = cfg.d_model, cfg.d_ff, -(-cfg.vocab_size // 64) * 64
    tokens = B * L * cfg.n_layer
    slots = {"mlm": round(v.mask_rate * n), "mlm_full": L, "clm": L - 1}
    # Operations forward, and numbers that are kept for the way back.
    forward = {
        "qkv and out": (8 * tokens * C**2, 6 * tokens * C),
        "feed-forward": (4 * tokens * C * F, 2 * tokens * (C + F)),
        "attention": (4 * tokens * L * C, 0),
    }
    for name in spell_out(v.objective):
        if name in slots:
            forward["head"] = 2 * B * slots[name] * C * (C + V), B * slots[name] * V
        if name in of_kind("position"):
            classes = 2 if name == "pplm_binary" else 2 * L - 1
            pairs = B * n**2
            psi = 2 * pairs * PAIR_HIDDEN * (cfg.n_head + classes)
            scores = 4 * B * L * C**2 + 2 * B * L**2 * C
            forward["pairs"] = scores + psi, pairs * classes
    parts = {"optimiser": (0, 36 * n_parameters)}
    for name, (operations, kept) in forward.items():
        parts[name] = 3 * operations, 5 * v.machine[1].itemsize * kept
    return parts


def ceilings(device, dtype):
    """-> operations a second of a large matrix product, bytes a second of a large copy."""
    n = 8192 if device.type == "cuda" else 2048
    a = torch.randn(n, n, device=device, dtype=dtype)
    x, y = torch.ones(2, 8 * n * n, device=device)
    product = min(repeat(lambda: (a @ a)[0, 0].item(), number=1))  # item() waits for a GPU
    copy = min(repeat(lambda: y.copy_(x)[0].item(), number=1))
    return 2 * n**3 / product, 2 * x.nbytes / copy


# --------------------------------------------------------------------------------------------------
# The tables. Each prints its rows, and yields them.


def compare(variants, reference, key):
    """A row for each: its time over that of the reference, in turns with it; without one (--peer),
    its tokens/s over hf's."""
    for v in variants:
        v.n_parameters()  # what cannot be built shows before anything is measured
    peaks = [fresh(peak_memory, v) for v in variants]  # while this process is small
    keep_memory()
    device, dtype = variants[0].machine
    product, copy = ceilings(device, dtype)
    peak_rate = peak_flops(device) if dtype != torch.float32 else None
    print(
        f"a matrix product: {product / 1e12:.2f} TFLOP/s, a copy: {copy / 1e9:.1f} GB/s\n"
        f"{'':14}{'pe':19}{'objective':12}{'B x L':>10}{'ms/step':>9}{'tokens/s':>11}"
        f"{'peak MB':>9}{'MFU':>6}{'x floor':>9}  ratio (middle half)"
    )
    together = [] if reference else turns_of(*variants)
    for v, peak in zip(variants, peaks):
        if reference:
            base, seconds = turns_of(reference, v)
            ratios = {f"ratio_to_{key}": middle_half(seconds, base)}
        else:
            seconds = together[variants.index(v)]
            ratios = {
                f"speed_to_{other.name}".replace(" ", "_"): middle_half(theirs, seconds)
                for other, theirs in zip(variants, together)
                if other.peer
            }
        ms, n_parameters = 1e3 * median(seconds), v.n_parameters()
        parts = count(v, n_parameters).values()
        floor = 1e3 * sum(max(n / product, size / copy) for n, size in parts)
        mfu = peak_rate and sum(n for n, _ in parts) / (ms / 1e3 * peak_rate)
        row = {key: getattr(v, key) for key in ("name", "pe", "objective", *SIZES)}
        row |= {
            "parameters": n_parameters,
            "parameters_added": n_parameters - replace(v, pe="none").n_parameters(),
            "tokens_per_s": 1e3 * v.batch_size * v.block_size / ms,
            "ms_per_step": ms,
            "peak_mem_mb": peak,
            "mfu": mfu,
            "over_floor": ms / floor,
        }
        text = ""
        for name, (low, middle, high) in ratios.items():
            row |= {f"{name}_low": low, name: middle, f"{name}_high": high}
            text += f"  {name} {middle:.2f} ({low:.2f} - {high:.2f})"
        print(
            f"{v.name:14}{v.pe:19}{v.objective:12}{f'{v.batch_size} x {v.block_size}':>10}"
            f"{ms:9.1f}{row['tokens_per_s']:11,.0f}{peak or 0:9,.0f}"
            f"{f'{mfu:.0%}' if mfu else '-':>6}{ms / floor:9.1f}{text}",
            flush=True,
        )
        yield row


def timed_prepare(v, cache):
    seconds = timeit(lambda: data.prepare(v.data, "bpe", cache), number=1)
    return seconds, peak_memory_mb(torch.device("cpu"))


def bench_data(v, files):
    """Tokenising beside reading and decompressing; the loader beside a step."""
    with tempfile.TemporaryDirectory() as cache:
        fresh(timed_prepare, v, cache)
        for meta in Path(cache).glob("*/meta.json"):
            meta.unlink()  # the tokenizer stays: now its training is not in the time
        tokenize_s, peak = fresh(timed_prepare, v, cache)
        mb, start = 0, perf_counter()
        for file in files:
            with data.OPENERS.get(Path(file).suffix, open)(file, "rb") as handle:
                mb += len(handle.read()) / 1e6
        decompress_s = perf_counter() - start
        batches = data.Batches(data.prepare(v.data, "bpe", cache), v.block_size, 0)
        number = itertools.count()
        loader_ms = 10 * timeit(lambda: batches(next(number), v.batch_size), number=100)
    share = loader_ms / 1e3 / median(turns_of(v)[0])
    print(
        f"{mb:,.0f} MB: decompressed at {mb / decompress_s:.1f} MB/s, with parsing and "
        f"tokenising {mb / tokenize_s:.1f} MB/s, peak memory {peak:,.0f} MB\n"
        f"the loader: {loader_ms:.2f} ms a batch of {v.batch_size} x {v.block_size}, "
        f"{share:.2%} of a step"
    )
    yield {
        "name": "data",
        "mb": mb,
        "decompress_s": decompress_s,
        "tokenize_s": tokenize_s,
        "peak_mem_mb": peak,
        "loader_ms": loader_ms,
        "loader_share": share,
    }


def bench_finetune(v):
    """Fine-tuning on SST-2: batches of near lengths, the same rows padded to 128, and the peer on
    the batches of the former. A round is ten batches of each in turn."""
    corpus = data.prepare("docs", "bpe", v.cache)
    cfg = replace(v.shape, vocab_size=corpus.vocab_size, max_len=128)
    start = {
        "config": vars(cfg),
        "tokenizer": data.encoding_arguments(corpus.tokenizer),
        "model": {},
    }
    ours = finetune.make_model(start, "sst2", 128, 0)
    hf = build_hf(cfg, "RobertaForSequenceClassification")
    flags = finetune.parse_args(["--task", "sst2", "--data_dir", v.finetune])
    rows, _ = finetune.encode_rows(ours, finetune.read_split("sst2", flags, "train")["sst2"])
    groups = list(finetune.batches_by_length(rows, v.batch_size, np.random.default_rng(0)))
    rows.append(([cfg.pad_id] * 128, 0))  # the last one, -1, makes a batch so wide

    def batch(group):
        return finetune.padded_batch(rows, group, cfg.pad_id, v.machine[0])

    def peer(group):  # RoBERTa's own pad id is 1, from which it counts positions
        tokens, _, labels = batch(group)
        padded = tokens == cfg.pad_id
        return hf(tokens.masked_fill(padded, 1), (~padded).long(), labels=labels).loss

    def ten_steps(model, loss):
        timed, order = learner(model, v), itertools.cycle(groups)
        return lambda: timed([partial(loss, next(order)) for _ in range(10)])

    seconds = turns(
        v,
        [
            ten_steps(ours, lambda group: ours.loss(*batch(group))),
            ten_steps(ours, lambda group: ours.loss(*(x[:-1] for x in batch([*group, -1])))),
            ten_steps(hf, peer),
        ],
    )
    print(
        f"SST-2, batch {v.batch_size}\n{'':16}{'ms a batch':>10}  time, over that by length "
        "(middle half)"
    )
    for name, each in zip(("by length", "padded to 128", "hf"), seconds):
        low, middle, high = middle_half(each, seconds[0])
        ms = 100 * median(each)
        print(f"{name:16}{ms:10.1f}  {middle:.2f} ({low:.2f} - {high:.2f})")
        yield {
            "name": f"finetune {name}",
            "ms_per_batch": ms,
            "ratio_low": low,
            "ratio": middle,
            "ratio_high": high,
        }


# --------------------------------------------------------------------------------------------------
# The program


def names_of(args):
    """--pe and --objective -> two lists of names."""
    # Without the aliases: a name that stands for another one.
    pes = [name for name, x in SCHEMES.items() if x == name or x not in SCHEMES]
    tasks = [*OBJECTIVES, "mlm_full"]
    pes = pes if args.pe == "all" else args.pe.split(",")
    return pes, tasks if args.objective == "all" else args.objective.split(",")


def table(args, given):
    """-> an iterator of rows. Raises ValueError before anything is measured."""
    pes, tasks = names_of(args)
    if args.gpu or args.agree or args.lower:
        import gpu  # and inductor with it: seconds, and memory
    tables = {"sweep", "data", "finetune", "agree", "gpu", "lower" if args.lower else "peer"}
    for name, without in WITHOUT.items():
        if getattr(args, name):
            tables |= without
    asked = given.keys() & tables
    for name, names in (("pe", pes), ("objective", tasks)):
        if names[1:] and not (args.lower or args.agree):  # which take all pairs of them
            asked.add(name)
    if len(asked) > 1:
        raise ValueError(f"--{' and --'.join(sorted(asked))} do not go together: a table at a time")
    kinds = [False, True] if args.peer and args.compile is None else [bool(args.compile)]
    if True in kinds and not can_compile(args.machine[0]):
        print("compiled: skipped, no compiler here")
        kinds = [False]
    ours = replace(args, peer=None, pe=pes[0], objective=tasks[0], compile=kinds[0])
    ours.n_parameters()
    peer = replace(ours, peer="hf", pe="abs", objective="mlm")
    variants = [replace(ours, pe=x, objective=y) for x, y in itertools.product(pes, tasks)]
    if args.agree:
        return gpu.agree(variants)
    if args.lower:
        gpu.pretend()  # may start this program anew: nothing was printed yet
        if args.peer:
            variants.append(peer)
        return gpu.lower(variants, args.lower, collate)
    if args.finetune:
        return bench_finetune(ours)
    if args.gpu:
        return gpu.every_line(args.gpu, given)
    if args.data:
        files = glob.glob(os.path.expanduser(args.data), recursive=True)
        if not files:
            raise ValueError(f"--data {args.data}: no file matches; 'books/*.jsonl.xz' would do")
        return bench_data(ours, files)
    if args.peer:
        variants = [replace(v, compile=kind) for v, kind in itertools.product((ours, peer), kinds)]
        return compare(variants, None, None)
    if args.sweep:
        tokens = max(ours.batch_size * ours.block_size, SWEEP[-1])
        variants = [replace(ours, batch_size=tokens // L, block_size=L) for L in SWEEP]
        return compare(variants, variants[0], SWEEP[0])
    if tasks != ["mlm"] and len(pes) == 1:
        return compare(variants, replace(ours, objective="mlm"), "mlm")
    return compare(variants, replace(ours, pe="abs"), "abs")


def parse_args(argv=None):
    """-> BenchConfig, and {flag: value} of what was given."""
    parser = Parser("bench.py", __doc__)
    parser.add_settings("flags", BenchConfig, SIZES)
    given = vars(parser.parse_args(argv))
    preset = train.PRESETS[given.get("preset", "demo")]
    with one_line_errors():
        return BenchConfig(**{name: preset[name] for name in SIZES} | given), given


def main(argv=None):
    args, given = parse_args(argv)
    rows = []
    with one_line_errors("lower --batch_size, --block_size, or take a smaller --preset"):
        lines = table(args, given)  # measures nothing yet
        if args.json:
            Path(args.json).parent.mkdir(parents=True, exist_ok=True)
        device, dtype = args.machine
        chip = f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"
        if device.type == "cuda":
            chip = torch.cuda.get_device_name()
        machine = f"{chip}, torch {torch.__version__}, {str(dtype).removeprefix('torch.')}"
        print(f"{machine}; preset {args.preset}")
        for row in lines:
            rows.append(row)
            if args.json:
                write_json(args.json, {"machine": machine, "rows": rows})


if __name__ == "__main__":
    main()
