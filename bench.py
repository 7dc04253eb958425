"""How fast a pre-training step is: beside a peer, scheme by scheme, objective by objective, and
beside the hardware.

    python bench.py --pe all                            # every scheme beside abs
    python bench.py --objective all --preset paper      # every objective beside mlm
    python bench.py --gpu results/gpu.json              # every line that only a GPU can show

    --peer hf --preset paper --batch_size 16 --mask_rate .15    beside transformers
    --sweep --preset paper              rows of 128 .. 2048, as many tokens a step
    --data 'books/*.jsonl.xz'           tokenising beside decompressing, loader beside step
    --race 5 --json race.json           loss by the clock, beside transformers' models of this size
    --compile --combo --preset paper    inductor's combo kernels beside plain ones
    --agree --pe all --dtype float16    losses and gradients beside a CPU's

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
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from time import perf_counter
from timeit import repeat, timeit
from types import SimpleNamespace

import torch
import torch.nn as nn
from tqdm import tqdm

import common
import data
import train
from common import autocast, peak_memory_mb, read_json, setting, write_json
from fast import step_or_skip
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
    "race": {"objective", "compile", "combo"},
    "gpu": {"pe", "objective", "compile", "combo", "dtype", "json"},
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
    race: float | None = setting(
        None,
        "minutes: train this scheme, abs and models of transformers for so long each, on docs; "
        "learners that the --json file has already are skipped",
        "(0, 1e5]",
    )
    combo: bool = setting(False, "--compile: with inductor's combo kernels, beside without")
    agree: bool = setting(False, "losses and gradients of small models, beside float32 on a CPU")
    gpu: str | None = setting(
        None,
        "file for the results of every command that wants a GPU; what "
        "it has is skipped; flags given besides are added to each",
    )
    cache: str = setting("cache", "--race, --gpu: folder of prepared data")
    preset: str = setting("demo", "sizes", tuple(train.PRESETS))
    batch_size: int = setting(32, "rows", "[1, 1e6]")
    block_size: int = setting(64, "tokens a row", "[4, 1e5]")
    mask_rate: float = setting(0.15, "of mlm", "(0, 1)")
    lr: float | None = setting(None, "--race: peak rate of all (default: the preset's)", "(0, 1e9)")
    seed: int = setting(1337, "--race: of weights, rows and masks", "[0, 9e18]")
    pairs: int = setting(15, "steps of each that are timed", "[2, 1e6]")
    warmup: int = setting(3, "steps of each before", "[0, 1e6]")
    device: str | None = common.DEVICE
    dtype: str | None = common.DTYPE
    compile: bool | None = setting(None, "--peer has both, unless --no-compile")
    json: str | None = setting(None, "file to write the rows to")
    vocab_size: int | None = setting(None)  # None: as large as the preset's tokenizer

    __post_init__ = common.check_settings

    @property
    def name(self):
        how = "compiled" if self.compile else "eager"
        return f"{self.peer or 'ours'} {'combo' if self.combo else how}"

    @property
    def training(self):
        """The preset's flags of train.py."""
        return train.parse_args(["--preset", self.preset])

    @property
    def machine(self):
        """-> device, dtype."""
        device = common.pick_device(self.device)
        return device, common.pick_dtype(device, self.dtype)[0]

    @property
    def shape(self):
        training = self.training
        return common.pick_fields(
            EncoderConfig,
            training,
            pe=self.pe,
            max_len=self.block_size,
            attn_dropout=training.dropout,
            vocab_size=self.vocab_size or (8192 if training.tokenizer == "bpe" else 50265),
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


# transformers' classes -> what their users would set: positions at the input; T5's bias besides;
# DeBERTa-v3's, whose tables here have the offsets that occur.
PEERS = {
    "RobertaForMaskedLM": dict(type_vocab_size=1, attn_implementation="sdpa"),
    "MPNetForMaskedLM": {},
    "DebertaV2ForMaskedLM": dict(
        relative_attention=True,
        pos_att_type=["p2c", "c2p"],
        position_biased_input=False,
        share_att_key=True,
        norm_rel_ebd="layer_norm",
    ),
}


def build_hf(cfg, kind="RobertaForMaskedLM"):
    """A model of transformers with our sizes. RoBERTa's positions start at 2."""
    from hf import SHAPE, transformers  # seconds, and memory

    if transformers is None:
        raise ValueError("the peer needs transformers: pip install -r requirements-dev.txt")
    sizes = {theirs: getattr(cfg, ours) for ours, theirs in SHAPE.items()}
    model_class = getattr(transformers, kind)
    return model_class(
        model_class.config_class(**sizes, max_position_embeddings=cfg.max_len + 2, **PEERS[kind])
    )


def mask_as_peer(tokens, cfg, rate):
    """As DataCollatorForLanguageModeling masks -> input ids, labels (-100: not scored)."""
    chance, dice = torch.rand(2, *tokens.shape, device=tokens.device)
    selected = (chance < rate) & (tokens < cfg.cls_id)
    ids = torch.where(selected & (dice < 0.9), torch.randint_like(tokens, cfg.cls_id), tokens)
    ids = ids.masked_fill(selected & (dice < 0.8), cfg.mask_id)
    return {"input_ids": ids, "labels": tokens.masked_fill(~selected, -100)}


def compiled(v, net):
    return torch.compile(net, options={"combo_kernels": True} if v.combo else None)


def learner(model, v):
    """-> a function that updates the model with a loss (a function), at this rate, and says in how
    many seconds."""
    device, dtype = v.machine
    parameters = list(model.to(device).train().parameters())
    rate = torch.tensor(v.training.lr, device=device)
    optimizer = train.make_optimizer(model, v.training, rate)
    scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)

    def timed(loss, lr=v.training.lr):
        start = perf_counter()
        rate.fill_(lr)
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
    net, tokens = compiled(v, model) if v.compile else model, v.rows().to(v.machine[0])

    def loss():
        if v.peer:
            return net(**mask_as_peer(tokens, cfg, v.mask_rate)).loss
        return net(model.corrupt(tokens, 0))[0]

    return partial(learner(model, v), loss)


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
    common.keep_memory()
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
    common.keep_memory()
    device, dtype = variants[0].machine
    product, copy = ceilings(device, dtype)
    peak_rate = common.peak_flops(device) if dtype != torch.float32 else None
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
    row = dict(name="data", mb=mb, decompress_s=decompress_s, tokenize_s=tokenize_s)
    yield row | dict(peak_mem_mb=peak, loader_ms=loader_ms, loader_share=share)


def agree(variants):
    """How far the loss and the gradient of one batch are from a CPU's in float32: the loss as a
    difference, the gradient by the length of the difference over its own."""
    print(f"{'pe':19}{'objective':12}{'loss on a CPU':>14}{'off by':>10}{'gradient off by':>17}")
    for v in variants:
        torch.manual_seed(0)
        model = v.build().eval()  # dropout off
        batch, found = model.corrupt(v.rows(), 0), []
        for device, dtype in ((torch.device("cpu"), torch.float32), v.machine):
            model.to(device).zero_grad()
            net = compiled(v, model) if v.compile and found else model
            with autocast(device, dtype):
                loss = net({name: x.to(device) for name, x in batch.items()})[0]
            loss.backward()
            grads = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
            found.append((loss.item(), torch.cat(grads).float().cpu()))
        (loss, a), (other, b) = found
        off, gradient_off = abs(loss - other), float((a - b).norm() / a.norm())
        line = f"{v.pe:19}{v.objective:12}{loss:14.4f}{off:10.1e}{gradient_off:17.1e}"
        print(line, flush=True)
        row = {"name": "agree", "pe": v.pe, "objective": v.objective, "compile": v.compile}
        yield row | {"loss": loss, "loss_off": off, "gradient_off": gradient_off}


# --------------------------------------------------------------------------------------------------
# The race

POINTS = 20  # of a learner's curve


class Peer(nn.Module):
    """A model of transformers that takes our batches: our ids, each place its position, no id
    treated as padding."""

    def __init__(self, theirs, ours):
        super().__init__()
        self.theirs, self.corrupt = theirs, ours.corrupt
        self.encoder = SimpleNamespace(config=ours.encoder.config)  # train.evaluate asks for L
        theirs.config.pad_token_id = None
        for module in theirs.modules():
            if isinstance(module, nn.Embedding):  # the padding's row would stay 0
                module.padding_idx = None
                nn.init.normal_(module.weight, std=theirs.config.initializer_range)

    def forward(self, batch):
        """-> the mean loss of the masked places, which is what ours has; nothing to log."""
        labels = batch["original"].masked_fill(~batch["mlm_masked"], -100)
        place = torch.arange(labels.size(1), device=labels.device)[None]
        return self.theirs(batch["tokens"], position_ids=place, labels=labels).loss, {}


def learners(v, pes):
    """-> {name: a function that makes the model}, ours and transformers'."""
    found = {f"ours {pe}": replace(v, pe=pe).build for pe in dict.fromkeys([*pes, "abs"])}
    for kind in PEERS:
        found[kind] = lambda kind=kind: Peer(build_hf(v.shape, kind), replace(v, pe="none").build())
    return found


def start(v, build, batches):
    """-> a fresh model, and a function that makes its step of a number at a rate, on the rows and
    masks that train.py would have there, and says in how many seconds."""
    torch.manual_seed(v.seed)
    model = build()
    update = learner(model, v)

    def step(number, lr):
        def loss():
            tokens = torch.from_numpy(batches(number, v.batch_size)).to(v.machine[0])
            return model(model.corrupt(tokens, v.seed, number, 0))[0]

        return update(loss, lr)

    return model, step


def run_of(v, build, corpus, batches, steps, name):
    """Train for so many steps, warm-up and decay included -> facts for the learner's row."""
    device, dtype = v.machine
    model, step = start(v, build, batches)
    warmup = min(v.training.warmup, steps // 3)
    marks = {round(steps * (i + 1) / POINTS) for i in range(POINTS)}
    seconds, curve = 0.0, []
    for n in tqdm(range(steps), name, unit="step", leave=False, disable=None):
        # As in train.py: linear warm-up, then linear decay to 0.
        decay, rise = (steps - n) / max(1, steps - warmup), (n + 1) / max(1, warmup)
        seconds += step(n, v.lr * min(rise, decay))
        if n + 1 in marks:  # beside the clock
            loss = train.evaluate(model, corpus, autocast(device, dtype), device)["val_loss"]
            curve.append((seconds, loss))
    n_parameters = sum(p.numel() for p in model.parameters())
    facts = {"parameters": n_parameters, "steps": steps, "warmup": warmup, "seconds": seconds}
    return facts | {"loss": loss, "curve": curve}


def race(v, pes, rows):
    """Each learner's validation loss after the same minutes of training. How many steps fit into
    them is measured first, in turn; each then runs, decayed to its end. rows: those of an earlier
    start; they yield nothing again."""
    corpus = data.prepare("docs", "bpe", v.cache)
    v = replace(v, lr=v.lr or v.training.lr, vocab_size=corpus.vocab_size)
    batches = data.Batches(corpus, v.block_size, v.seed)
    builders = learners(v, pes)
    # What makes two rows comparable: others may stand in the same file.
    facts = {key: getattr(v, key) for key in ("race", "preset", "seed", "lr", "dtype", *SIZES)}
    facts |= {"threads": torch.get_num_threads(), "tokenizer_hash": corpus.meta["tokenizer_hash"]}
    there = {row["name"]: row for row in rows if facts.items() <= row.items()}
    plan = there.get("step times")
    if plan is None or not builders.keys() <= plan["ms_per_step"].keys():
        steps = [partial(start(v, build, batches)[1], 0, 0.0) for build in builders.values()]
        ms = [1e3 * median(seconds) for seconds in turns(v, steps)]
        plan = {"name": "step times", **facts, "ms_per_step": dict(zip(builders, ms))}
        yield plan
    left = [name for name in builders if name not in there]
    ms = plan["ms_per_step"]
    n = len(data.validation_batches(corpus, v.block_size))
    beside = sum(POINTS * n * ms[name] / 3 / 60e3 for name in left)  # forward: a third of a step
    print(
        f"{len(left)} of {len(builders)} learners to go, {v.race:g} minutes of training each; with "
        f"validation {v.race * len(left) + beside:.0f} minutes at most"
        f"{'' if v.json else '; without --json nothing is kept'}\n"
        f"{'':24}{'ms/step':>9}{'steps':>8}{'seconds':>9}{'loss':>8}",
        flush=True,
    )
    for name, build in builders.items():
        row = there.get(name)
        if row is None:
            steps = max(1, int(60e3 * v.race / ms[name]))
            row = {"name": name, **facts, **run_of(v, build, corpus, batches, steps, name)}
            yield row
        print(
            f"{name:24}{ms[name]:9.1f}{row['steps']:8,}{row['seconds']:9.0f}{row['loss']:8.3f}",
            flush=True,
        )


# --------------------------------------------------------------------------------------------------
# Where there is a card

LIMIT = 540  # seconds a command of --gpu may take
DOCS = "--dataset docs --tokenizer bpe"


def lines_of_gpu():
    """-> the commands, in the order of running. A GPU's numbers count once they agree with a
    CPU's."""
    found = []
    for dtype in ("float32", "float16", "bfloat16"):
        found += [f"bench.py --agree --pe all --dtype {dtype}"]
        found += [f"bench.py --agree --objective all --pe tupe_r --dtype {dtype}"]
    found += [f"data.py {DOCS}"]
    fp16 = "--pe tupe_r --objective pplm --preset paper --dtype float16 --steps 50"
    found += [f"train.py {fp16} {DOCS} --out_dir out/gpu/fp16"]
    found += [f"bench.py --peer hf --preset {x} --mask_rate .15" for x in ("paper", "base")]
    paper = "bench.py --compile --preset paper"
    found += [f"{paper} --pe {pe}" for pe in ("tupe_r", "tupe_a", "rel", "t5", "rope")]
    found += [f"{paper} --objective {x}" for x in ("pplm", "taco", "mlm_full")]
    found += ["bench.py --agree --compile --combo --pe tupe_r,rel --objective mlm,pplm"]
    found += [f"{paper} --combo", "bench.py --sweep --preset paper"]
    found += [f"bench.py --agree --compile --pe {pe}" for pe in SCHEMES]
    found += [f"bench.py --agree --compile --pe tupe_r --objective {x}" for x in OBJECTIVES]
    for x in ("mlm", "clm", *of_kind("position")):
        run = f"--pe abs --objective {x} --preset paper --resume"
        found += [f"train.py {run} {DOCS} --out_dir out/gpu/{x}"]
    return found


def every_line(file, given):
    """Run what the file lacks of lines_of_gpu(), a process a command; a command is a row, written
    at once. One that fails is a row too; one that LIMIT cuts goes on when it is asked for again."""
    rows = read_json(file, rows=list)["rows"] if os.path.exists(file) else []
    write_json(file, {"rows": rows})  # what cannot be written shows at once
    for command in lines_of_gpu():
        if command not in [row["command"] for row in rows if row["exit"] != "stopped"]:
            rows = [row for row in rows if row["command"] != command]
            rows.append(row_of_command(command, given, Path(f"{file}.part")))
            write_json(file, {"rows": rows})
            yield rows[-1]


def row_of_command(command, given, part):
    """Run it, with the flags that were given besides -> its row: exit, seconds and what it found.
    part: a file for what bench.py finds."""
    program, *words = command.split()
    # Only bench.py has --pairs, which make this a trial: as many --steps of training.
    names = {"device": "device", "preset": "preset", "cache": "cache", "pairs": "steps"}
    if program == "bench.py":
        names = {name: name for name in given if name != "gpu"}
        words.append(f"--json={part}")
    elif program == "data.py":
        names = {"cache": "cache"}
    else:
        part = Path(words[-1], "log.jsonl")
    words += [f"--{names[name]}={x}" for name, x in given.items() if name in names]
    print(f"python {program} {' '.join(words)}", flush=True)
    whole = [sys.executable, Path(__file__).with_name(program), *words]
    process = subprocess.Popen(whole, stderr=subprocess.PIPE, text=True)
    row, began = {"command": command}, perf_counter()
    try:
        error = process.communicate(timeout=LIMIT)[1]
        row["exit"] = process.returncode
    except subprocess.TimeoutExpired:
        process.terminate()  # a run is saved
        error = process.communicate()[1]
        row["exit"] = "stopped" if program == "train.py" else "too long"
    row["seconds"] = perf_counter() - began
    if row["exit"]:
        row["error"] = error.strip().splitlines()[-1:]
    if part.exists() and program == "train.py":
        row["rows"] = common.read_rows(part)[1:]
    elif part.exists():
        row |= read_json(part)
        part.unlink()
    return row


# --------------------------------------------------------------------------------------------------
# The program


def names_of(args):
    """--pe and --objective -> two lists of names."""
    first = {}  # name of each sum: an alias means what an earlier one does
    for name, parts in SCHEMES.items():
        first.setdefault(tuple(parts), name)
    pes = list(first.values())
    tasks = [*OBJECTIVES, "mlm_full"]
    pes = pes if args.pe == "all" else args.pe.split(",")
    return pes, tasks if args.objective == "all" else args.objective.split(",")


def table(args, given, rows=()):
    """-> an iterator of rows. Raises ValueError before anything is measured.

    rows: those that the --json file has already; --race goes on from them.
    """
    pes, tasks = names_of(args)
    check_together(args, given, pes, tasks)
    kinds = [False, True] if args.peer and args.compile is None else [bool(args.compile)]
    if True in kinds and not common.can_compile(args.machine[0]):
        print("compiled: skipped, no compiler here")
        kinds = [False]
    ours = replace(args, peer=None, pe=pes[0], objective=tasks[0], compile=kinds[0])
    ours.n_parameters()
    variants = [replace(ours, pe=x, objective=y) for x, y in itertools.product(pes, tasks)]
    if args.agree:
        return agree(variants)
    if args.gpu:
        return every_line(args.gpu, given)
    if args.race:
        return race(ours, pes if "pe" in given else ["tupe_r"], rows)
    if args.data:
        files = glob.glob(os.path.expanduser(args.data), recursive=True)
        if not files:
            raise ValueError(f"--data {args.data}: no file matches; 'books/*.jsonl.xz' would do")
        return bench_data(ours, files)
    if args.peer:
        peer = replace(ours, peer="hf", pe="abs", objective="mlm")
        variants = [replace(v, compile=kind) for v, kind in itertools.product((ours, peer), kinds)]
        return compare(variants, None, None)
    if args.combo:
        plain = replace(ours, combo=False)
        return compare([plain, ours], plain, "plain")
    if args.sweep:
        tokens = max(ours.batch_size * ours.block_size, SWEEP[-1])
        variants = [replace(ours, batch_size=tokens // L, block_size=L) for L in SWEEP]
        return compare(variants, variants[0], SWEEP[0])
    if tasks != ["mlm"] and len(pes) == 1:
        return compare(variants, replace(ours, objective="mlm"), "mlm")
    return compare(variants, replace(ours, pe="abs"), "abs")


def check_together(args, given, pes, tasks):
    """Raise ValueError on flags that ask for two tables."""
    tables = {"sweep", "data", "agree", "gpu", "peer", "race"}
    if not args.agree:
        tables.add("combo")
    for name, without in WITHOUT.items():
        if getattr(args, name):
            tables |= without
    asked = given.keys() & tables
    for name, names in (("pe", pes), ("objective", tasks)):
        if names[1:] and not (args.agree or args.race):  # which take all of them
            asked.add(name)
    if len(asked) > 1:
        raise ValueError(f"--{' and --'.join(sorted(asked))} do not go together: a table at a time")
    if args.combo and not args.compile:
        raise ValueError("--combo is of compiled kernels: add --compile")


def parse_args(argv=None):
    """-> BenchConfig, and {flag: value} of what was given."""
    parser = common.Parser("bench.py", __doc__)
    parser.add_settings("flags", BenchConfig, SIZES)
    given = vars(parser.parse_args(argv))
    preset = train.PRESETS[given.get("preset", "demo")]
    with common.one_line_errors():
        return BenchConfig(**{name: preset[name] for name in SIZES} | given), given


def main(argv=None):
    args, given = parse_args(argv)
    with common.one_line_errors("lower --batch_size, --block_size, or take a smaller --preset"):
        device, dtype = args.machine
        precision = str(dtype).removeprefix("torch.")
        args = replace(args, dtype=precision)  # measured once, for all processes
        rows = (
            read_json(args.json, rows=list)["rows"]
            if args.race and args.json and Path(args.json).exists()
            else []
        )
        lines = table(args, given, [*rows])  # measures nothing yet
        if args.json:
            Path(args.json).parent.mkdir(parents=True, exist_ok=True)
        chip = f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"
        if device.type == "cuda":
            chip = torch.cuda.get_device_name()
        machine = f"{chip}, torch {torch.__version__}, {precision}"
        print(f"{machine}; preset {args.preset}")
        for row in lines:
            rows.append(row)
            if args.json:
                write_json(args.json, {"machine": machine, "rows": rows})


if __name__ == "__main__":
    main()
