"""The tests. First the naive reference: attention by every scheme, a pair at a time, from the
papers' equations. Then file by file: data, model, objectives, train, finetune, probe, bench, hf.

    python -m pytest test_all.py        # every mechanism once: a minute or so on two cores
    python -m pytest test_all.py -m ""  # all: processes, kills, compilers, every scheme compiled
    python test_all.py --soak           # a few minutes more: one run, killed 20 times

A mechanism is held against a naive loop written from its paper, an implementation by others, or an
invariant. No network; what needs a library that is not installed is skipped, and so is GPT-2's
vocabulary where TIKTOKEN_CACHE_DIR does not hold it.
"""

import ast
import base64
import contextlib
import copy
import csv
import dataclasses
import functools
import gc
import gzip
import itertools
import json
import lzma
import math
import os
import random
import re
import runpy
import select
import shlex
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import weakref
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations, permutations, product
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas
import pytest
import tiktoken
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import baselines
import bench
import common
import data
import exercises
import fast
import finetune
import hf
import model as model_module
import naive
import objectives
import page
import probe
import sample
import train
from model import PE_NAMES, UNKNOWN_POS, Encoder, EncoderConfig, Positions, load, parse_pe
from objectives import OBJECTIVES, ObjectiveConfig, Pretraining, stream

HERE = Path(__file__).parent
baselines.position_baselines = functools.cache(baselines.position_baselines)  # most runs share it
VOCAB, CLS, SEP, MASK = 72, 64, 66, 67  # 64 ordinary ids and the 8 specials


def same_once(names, meaning):
    """The names, without those that mean what an earlier one means."""
    found = {}
    for name in names:
        found.setdefault(tuple(meaning(name)), name)
    return list(found.values())


# Every scheme and every objective, from the tables that define them.
ALL_PE = same_once([*PE_NAMES, "rope+t5", "abs+alibi", "abs+rope", "sin+rel_k"], parse_pe)
ALL_OBJECTIVES = [*OBJECTIVES, "mlm+pplm", "taco+pmlm", "clm+tc", "nsp+mlm+pplm_some+tc"]


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


def slow_unless(quick, names):
    """Parameters of a test: those in `quick` are of every run."""
    return [name if name in quick else slow(name) for name in names]


def parts_of(pe):
    return list(parse_pe(pe).values())


def hidden_ok(pe):
    return all(part.hidden_ok for part in parts_of(pe))


def louder(module, factor):
    """All weights times a factor, so that what is real is not tiny."""
    with torch.no_grad():
        for p in module.parameters():
            p.mul_(factor if p.dim() > 1 else 1)
    return module


SMALL = dict(vocab_size=VOCAB, n_head=2, d_model=16, d_ff=32, dropout=0.0, attn_dropout=0.0)


def tiny(pe="abs", **change):
    """A small encoder in float64, dropout off, its weights large enough for every term to count."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.double)
    encoder = Encoder(EncoderConfig(**{**SMALL, "n_layer": 2, "max_len": 12, "pe": pe, **change}))
    torch.set_default_dtype(torch.float)
    return louder(encoder, 10)


def some_tokens(B=3, L=7, seed=0):
    tokens = torch.randint(0, CLS, (B, L), generator=torch.Generator().manual_seed(seed))
    tokens[:, 0] = CLS
    return tokens


def close(a, b, atol=1e-9):
    torch.testing.assert_close(a, b, rtol=0, atol=atol, check_dtype=False)


def alike(a, b, atol=1e-9):
    np.testing.assert_allclose(a, b, rtol=0, atol=atol)


def exit_code(function, *args):
    """function(*args) ends the program -> with this code. (pytest.raises would keep its locks.)"""
    try:
        function(*args)
    except SystemExit as stopped:
        return stopped.code


@pytest.fixture
def said(capsys):
    """said(): what was printed since it was last asked."""
    return lambda: capsys.readouterr().out


def one_line(capsys, function, *args, code=2):
    """function(*args) ends the program with a code -> the one line that it says on stderr."""
    assert exit_code(function, *args) == code
    error = capsys.readouterr().err
    assert error.count("\n") == 1, error
    return error


def failing(error):
    def fail(*args, **settings):
        raise error

    return fail


def refuses(says, function, *args, **settings):
    """What it raises is shown as one line: see common.one_line_errors."""
    with pytest.raises((ValueError, OSError), match=says):
        function(*args, **settings)


# ==================================================================================================
# naive.py: what its equations are given


def seen_by(encoder, layer, h):
    """{name: weights} as naive.py's head h of a layer sees them. Of model.py it takes weights only.
    layer: a number, or the pair head's own module."""
    cfg, found = encoder.config, {}
    D, T = cfg.d_head, cfg.max_len + 1
    cut = slice(h * D, (h + 1) * D)

    def of_untied(part):  # TUPE's p after its LayerNorm, in the last rows theta's
        norm = part.norm.weight, part.norm.bias, cfg.norm_eps
        rows = F.layer_norm(part.table.weight, (cfg.d_model,), *norm)
        w = SimpleNamespace(p=rows[:T], U_Q=part.u_q.weight[cut].T, U_K=part.u_k.weight[cut].T)
        w.theta = [(p @ w.U_Q) @ (p @ w.U_K) / math.sqrt(2 * D) for p in rows[T:]]
        return w

    for name, part in encoder.pe.parts.items():
        w = SimpleNamespace()
        if name == "abs":
            w.p = part.table.weight
        elif name in ("sin", "lsin"):
            w = SimpleNamespace(p=part.unknown[None], w=part.w if name == "lsin" else None)
            w.w = naive.frequencies(cfg.d_model) if w.w is None else w.w
        elif name == "rel":
            w.a = part.table.weight
        elif name == "rel_k":
            w.a = (part.tables[layer] if isinstance(layer, int) else layer).weight
        elif name in ("rsin", "rlsin"):
            hands = part.w if name == "rlsin" else naive.frequencies(D)
            w.a = torch.stack(
                [*(naive.sinusoid(r, hands) for r in range(-64, 65)), part.unknown[0]]
            )
        elif name == "deberta":
            both = (part.layers[layer] if isinstance(layer, int) else layer).weight
            key, query = both.view(2, -1, cfg.d_model)
            w = SimpleNamespace(a=part.table.weight, U_K=key[cut].T, U_Q=query[cut].T)
        elif name == "t5":
            w.b = part.table.weight[:, h]
        elif name == "t5_untie_cls":
            w = SimpleNamespace(b=part.offsets.table.weight[:, h], theta=part.theta[:, h])
        elif name == "tupe_a_free":
            w = SimpleNamespace(M=part.table[h], theta=part.theta[:, h])
        elif name == "alibi":
            n = 2 ** int(math.log2(cfg.n_head))
            slopes = [2 ** (-8 * (a + 1) / n) for a in range(n)]
            slopes += [2 ** (-4 * (2 * a + 1) / n) for a in range(n)]
            w = SimpleNamespace(slope=slopes[h], unknown=part.unknown[h, 0, 0])
        elif name == "bert_ad" or name.startswith("tupe"):
            w = of_untied(part.positions)
            if name == "tupe_r_factored":
                offsets = part.offsets
                w.a, w.F_Q = offsets.table.weight, offsets.f_q.weight[cut].T
                w.F_K = offsets.f_k.weight[cut].T
            elif name.startswith("tupe_r"):
                w.b = part.offsets.table.weight[:, h]
        else:  # a new scheme: its own parameters, of those with a row a head this head's
            for key, value in part.named_parameters():
                of_heads = value.dim() > 0 and len(value) == cfg.n_head
                setattr(w, key.removesuffix(".weight"), value[h] if of_heads else value)
        found[name] = w
    return found


def scheme_of(encoder):
    return "+".join(encoder.pe.parts)


def naive_attention(encoder, q, k, v, pos, layer, pad):
    """(B, H, L, D) -> (B, H, L, D), by loops over everything."""
    out, (B, H, L, D) = [], q.shape
    for b, h in product(range(B), range(H)):
        at, w = pos[b].tolist(), seen_by(encoder, layer, h)
        args = q[b, h], k[b, h], v[b, h], at, w, pad[b]
        out.append(naive.attend(scheme_of(encoder), *args))
    return torch.stack(out).view(B, H, L, D)


# ==================================================================================================
# data.py

WORDS = "the quick brown fox jumps over a lazy dog while seven wise owls watch from their old tree"
WORDS = WORDS.split()


def write_corpus(path, n_docs=60, n_words=60, opener=open):
    rng = random.Random(0)
    with opener(path, "wt", encoding="utf-8") as handle:
        for i in range(n_docs):
            text = " ".join(rng.choices(WORDS, k=n_words)) + f" {i}."
            handle.write(json.dumps({"title": f"t{i}", "text": text}) + "\n")
    return str(path)


@pytest.fixture(scope="session")
def corpus_file(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("text") / "corpus.jsonl")


@pytest.fixture(scope="session")
def cache(tmp_path_factory):
    return str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="session")
def corpus(corpus_file, cache):
    return data.prepare(corpus_file, "bpe", cache)


def texts_of(path):
    return [json.loads(line)["text"] for line in open(path)]


def encoding_of(corpus):
    return tiktoken.Encoding(**data.encoding_arguments(corpus.tokenizer))


def names_in(folder):
    return {file.name for file in Path(folder).iterdir()}


def documents_in(corpus, split):
    """The texts of a stream: each is followed by a [SEP]."""
    *texts, rest = encoding_of(corpus).decode(getattr(corpus, split)).split("[SEP]")
    assert rest == ""
    return texts


def merge(parts, pair):
    """Join every occurrence of the pair in a word's parts, from the left."""
    out = []
    for part in parts:
        if out and (out[-1], part) == pair:
            out[-1] = out[-1] + part
        else:
            out.append(part)
    return out


def naive_bpe(words, n_ids):
    """Byte-pair encoding from its definition: count all pairs anew for every merge."""
    ranks = [bytes([b]) for b in range(256)]
    items = [([bytes([b]) for b in word], n) for word, n in words.items()]
    while len(ranks) < n_ids:
        counts = Counter()
        for parts, n in items:
            for pair in zip(parts, parts[1:]):
                counts[pair] += n
        if not counts:
            break
        pair = min(counts, key=lambda p: (-counts[p], p))
        if pair[0] + pair[1] not in ranks:
            ranks.append(pair[0] + pair[1])
        items = [(merge(parts, pair), n) for parts, n in items]
    return ranks


@pytest.mark.parametrize("n_words, n_ids", [(300, 900), (8, 900)])  # the second ends early
def test_bpe_equals_naive(n_words, n_ids):
    rng, words = random.Random(1), Counter()
    for _ in range(n_words):
        words["".join(rng.choices("abcdé", k=rng.randint(1, 9))).encode()] += 1
    assert data.train_bpe(words, n_ids) == naive_bpe(words, n_ids)


def test_bpe_merges_an_overlapping_pair_once():
    assert data.train_bpe({b"aaa": 1}, 300)[256:] == [b"aa", b"aaa"]


def test_bpe_leaves_endless_words_out(monkeypatch):
    """Each merge walks through the words it is in: with a word of megabytes it takes minutes."""
    counted = {}
    monkeypatch.setattr(data, "train_bpe", lambda words, n_ids: counted.update(words) or [])
    data.bpe_state([(lambda: ["a word " + "x" * 5000 + "\n" + "y" * 1000], 0)])
    assert set(counted) == {b"a", b" word", b"\n", b"y" * 1000}


def test_tokenizer_round_trip(corpus):
    encoding = encoding_of(corpus)
    assert encoding.n_vocab == 8192 == corpus.vocab_size
    assert encoding._special_tokens["[CLS]"] == 8184
    for text in ("the fox", "naïve Ωμέγα 中文 🦊 \x00\x7f", " \n\t  two  spaces", ""):
        assert encoding.decode(encoding.encode_ordinary(text)) == text
    for byte in map(bytes, zip(range(256))):
        assert encoding.decode_single_token_bytes(encoding.encode_single_token(byte)) == byte
    assert encoding.encode_ordinary("[MASK]") != [8187], "a text that says [MASK] is no special"


def test_corpus_splits_by_document(corpus, corpus_file):
    texts = texts_of(corpus_file)
    assert documents_in(corpus, "val") == [t for i, t in enumerate(texts) if i % 50 == 1]
    assert documents_in(corpus, "train") == [t for i, t in enumerate(texts) if i % 50 != 1]
    assert corpus.train.dtype == np.uint16


def test_rows(corpus):
    rows = corpus.rows("train", [0, 3], 10)
    assert rows.shape == (2, 10) and rows.dtype == np.int64
    assert (rows[:, 0] == 8184).all() and (rows[:, -1] == 8186).all()
    assert rows[1, 1:-1].tolist() == corpus.train[24:32].tolist()


def test_batches_visit_every_row_once_an_epoch():
    def batches(seed, fraction=1.0):
        corpus = SimpleNamespace(n_rows=lambda split, L: 30, rows=lambda split, index, L: index)
        return data.Batches(corpus, 10, seed, fraction)

    first, second = batches(5)(0, 30).tolist(), batches(5)(1, 30).tolist()
    assert sorted(first) == sorted(second) == list(range(30)) and second != first != sorted(first)
    assert batches(5)(7, 4).tolist() == first[28:] + second[:2], "a function of (seed, index)"
    assert batches(6)(0, 30).tolist() != first
    a, b = (set(batches(seed, 1 / 3)(0, 20)) for seed in (5, 6))
    assert a == b and len(a) == 10, "a fraction is the same for every seed"


def test_file_formats_give_the_same_documents(tmp_path):
    import pyarrow
    import pyarrow.parquet

    texts = ["one fox\nand a line", 'two, "dogs"', "three\nowls"]
    rows = [{"text": t, "n": i} for i, t in enumerate(texts)]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "a.jsonl").write_text(lines, encoding="utf-8-sig")
    for name, opener in (("b.jsonl.gz", gzip.open), ("c.jsonl.xz", lzma.open)):
        with opener(tmp_path / name, "wt") as handle:
            handle.write(lines)
    with open(tmp_path / "d[1].csv", "w", newline="") as handle:
        writer = csv.DictWriter(handle, ["text", "n"])
        writer.writeheader()
        writer.writerows(rows)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "e.parquet")
    (tmp_path / "f.txt").write_text("\n\n".join(texts))
    with gzip.open(tmp_path / "g.txt.gz", "wt") as handle:
        handle.write("\n\n\n" + "\n\n".join(texts) + "\n\n")
    (tmp_path / "h.json").write_text(json.dumps(rows, indent=1))
    (tmp_path / "i.json").write_text(json.dumps(texts))
    (tmp_path / "j.jsonl").write_text('{"n": 1}\n' * 9 + '{"text": null}\n\n7\n[]\n' + lines)
    (tmp_path / "k.csv").write_bytes(b'text\r\n"' + b"a\r\n" * 50_000 + b'"\r\n')
    assert list(data.file_documents(f"{tmp_path}/k.csv", "text")) == ["a\r\n" * 50_000]
    for file in sorted(tmp_path.glob("[!k]*")):
        found = map(str.strip, data.file_documents(str(file), "text"))
        assert list(dict.fromkeys(filter(None, found))) == texts, file.name


def test_long_documents_are_cut_without_loss():
    for text in ("x" * 1_250_000, "word " * 250_000, "a\n" * 420_000, "short", ""):
        cut = list(data.pieces(text))
        assert "".join(cut) == text and max(map(len, cut)) <= data.PIECE
        assert text[:1] == "x" or all(piece[:1] in " \n" for piece in cut[1:])


@pytest.mark.parametrize(
    "name, content, says",
    [
        ("x.jsonl", "", "no file with text in it"),
        ("x.jsonl", '{"text": "only one"}\n', "at least 2"),
        ("x.jsonl", '{"body": "a"}\n{"body": "b"}\n', "no column 'text'"),
    ],
)
def test_a_bad_corpus_is_one_clear_line(tmp_path, name, content, says):
    (tmp_path / name).write_text(content)
    refuses(says, data.prepare, str(tmp_path / name), "bpe", str(tmp_path / "cache"))
    left = {f.name for f in (tmp_path / "cache").glob("*/*")}
    assert left <= {"tokenizer.json", ".lock"}, "nothing half-written"


@pytest.mark.parametrize("dataset", ["", "no/such*", "none.jsonl", "a/b.txt.gz"])
def test_a_name_that_is_no_data_set_is_refused_at_once(dataset):
    says = "no file with text in it .* takes docs, wikibooks"
    refuses(says, data.find_source, dataset, "text", None)


def test_docs_corpus_and_its_task(tmp_path, monkeypatch):
    """The default data set on a small tree: prepared once, and the task's test rows are
    pre-training's validation documents."""
    rng = random.Random(0)
    folders = {library: tmp_path / library for library in data.DOCS_LIBRARIES}
    for library, folder in folders.items():
        (folder / "tests").mkdir(parents=True)
        (folder / "tests" / "t.py").write_text('"""' + "Not to be read. " * 20 + '"""')
        (folder / "short.py").write_text('"""Not to be read."""')
        texts = [" ".join(rng.choices(WORDS, k=30)) + f" {library} {i}" for i in range(12)]
        code = [f'def f{i}():\n    """{text}"""\n' for i, text in enumerate(texts)]
        (folder / "m.py").write_text("".join(code))
    monkeypatch.setattr(data, "docs_folders", lambda: folders)
    cache = tmp_path / "cache"
    corpus = data.prepare("docs", "bpe", cache)
    monkeypatch.setattr(data, "docs_documents", lambda: 1 / 0)  # not read twice
    for number, damaged in enumerate(["{", "[]", '{"source": 1}', '{"source": {}}']):
        (cache / f"docs-{number}-bpe").mkdir()
        (cache / f"docs-{number}-bpe" / "meta.json").write_text(damaged)
    assert data.prepare("docs", "bpe", cache).folder == corpus.folder
    validation = documents_in(corpus, "val")
    train_rows, evaluations = finetune.docs_rows(str(cache))
    hide = finetune.LIBRARY_NAMES.sub
    assert [t[0] for t, _ in evaluations["docs"]] == [hide("[MASK]", text) for text in validation]
    assert not {texts for texts, _ in train_rows} & {texts for texts, _ in evaluations["docs"]}
    assert not any("Not to be read" in texts[0] for texts, _ in train_rows)
    assert len(train_rows) + len(validation) == corpus.meta["documents"]
    assert {y for _, y in train_rows} == set(range(len(data.DOCS_LIBRARIES)))


def test_finished_data_needs_nothing(corpus_file, cache, corpus, monkeypatch):
    """Stages skip what is done: a prepared corpus opens without its tokenizer's source, its files'
    content or the hub."""
    for name in ("bpe_state", "gpt2_state", "file_documents"):
        monkeypatch.setattr(data, name, lambda *a: 1 / 0)
    assert data.prepare(corpus_file, "bpe", cache).folder == corpus.folder
    assert names_in(corpus.folder) == {
        "train.bin",
        "val.bin",
        "meta.json",
        "tokenizer.json",
        ".lock",
    }
    monkeypatch.setattr(data, "hub_part", lambda *a: 1 / 0)
    one, two = (data.find_source("some/set", column, None) for column in ("text", "body"))
    assert one.name != two.name, "another column is another corpus"


def test_files_that_were_moved_or_touched_are_the_same_data(tmp_path, monkeypatch):
    """And tokens that lie prepared are found when the text is gone and their folder renamed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(data, "EDGE", 64)
    write_corpus("t.jsonl", 20)
    corpus = data.prepare("t.jsonl", "bpe", "cache")
    os.utime("t.jsonl", (1, 1))
    Path("elsewhere").mkdir()
    shutil.copy("t.jsonl", "elsewhere")
    for dataset in ("t.jsonl", "./t.jsonl", f"{tmp_path}/*.jsonl", "elsewhere/t.jsonl"):
        assert data.prepare(dataset, "bpe", "cache").folder == corpus.folder
    whole = Path("t.jsonl").read_text()
    for changed in (
        whole[:-9] + whole[-9:].upper(),
        whole.replace("t0", "tX"),
        f"{whole[:500]}a{whole[500:]}",
    ):
        Path("t.jsonl").write_text(changed)
        assert data.find_source("t.jsonl", "text", "").name not in str(corpus.folder)
    Path("t.jsonl").unlink()
    Path("cache", "0").mkdir()
    Path("cache", "0", "meta.json").write_text("{")
    renamed = corpus.folder.rename("cache/any name")
    (found,) = {
        str(data.open_prepared(corpus.meta, *places).folder)
        for places in (["cache"], ["cache", "t.jsonl"], ["nowhere", "cache/any name"])
    }
    assert found == str(renamed)
    assert data.prepare("cache/any name", "bpe", "").meta == corpus.meta
    refuses("made with --tokenizer bpe", data.prepare, found, "gpt2", "")


def test_a_folder_is_no_data_set(tmp_path):
    """Taken as one, each of its lines was a document, and files that came later were not seen."""
    for name in ("a.jsonl.XZ", "b.jsonl.XZ", "c.txt", "d.py"):
        (tmp_path / name).write_text("x")
    refuses(r"is a folder: name its files, .*/\*.XZ'", data.find_source, str(tmp_path), "text", "")
    (tmp_path / "empty").mkdir()
    refuses(r"/empty/\*.txt'", data.find_source, f"{tmp_path}/empty", "text", "")


def test_a_killed_preparation_leaves_no_more_than_its_files(tmp_path, monkeypatch):
    """What it wrote aside has fixed names, and the next one writes over it."""
    file, real = write_corpus(tmp_path / "t.jsonl", 20), data.encoded

    def encoded(texts, encoding):
        yield from real(texts, encoding)
        shutil.copytree(tmp_path / "cache", tmp_path / "as if killed")  # nothing is cleared away

    monkeypatch.setattr(data, "encoded", encoded)
    whole = data.prepare(file, "bpe", tmp_path / "cache")
    left = tmp_path / "as if killed" / whole.folder.name
    assert names_in(left) == {"tokenizer.json", ".lock", "train.bin.tmp", "val.bin.tmp"}
    monkeypatch.setattr(data, "encoded", real)
    assert names_in(data.prepare(file, "bpe", left.parent).folder) == names_in(whole.folder)
    assert (left / "train.bin").read_bytes() == (whole.folder / "train.bin").read_bytes()


def test_two_programs_prepare_the_same_data(tmp_path, monkeypatch, said):
    """The second one waits, and finds it done."""
    file, real, calls = write_corpus(tmp_path / "t.jsonl", 20), data.tokenize, []

    def tokenize(*args):
        calls.append(time.sleep(0.3))
        real(*args)

    monkeypatch.setattr(data, "tokenize", tokenize)
    with ThreadPoolExecutor() as pool:
        jobs = [pool.submit(data.prepare, file, "bpe", tmp_path / "cache") for _ in range(2)]
    assert jobs[0].result().meta == jobs[1].result().meta and len(calls) == 1
    assert "another process is preparing data in" in said()


def test_the_sample_for_the_bpe_is_taken_by_size(monkeypatch):
    """One large file beside many notes; of the hub, whose sizes may be unknown, equal parts."""
    monkeypatch.setattr(data, "train_bpe", lambda words, n_ids: counted.update(words) or [])
    monkeypatch.setattr(data, "BPE_SAMPLE", 1000)
    parts = [(lambda: ["a" * 1000] * 9, 9000), *[(lambda: ["b" * 100], 100)] * 10]
    counted = {}
    data.bpe_state(parts)
    assert counted == {b"a" * 900: 1, b"b" * 10: 10}
    counted = {}
    data.bpe_state([(lambda: ["a" * 1000], 9000), (lambda: ["b" * 1000], 0)])
    assert counted == {b"a" * 500: 1, b"b" * 500: 1}


def test_text_that_is_no_utf_8_is_counted_and_said_once(tmp_path, said):
    text = "caf\xe9, \xfcber alles\n\n" * 9
    (tmp_path / "old.txt").write_bytes(text.encode("latin-1"))
    (tmp_path / "new.TXT").write_text(text + "\ufffd is a character")  # any case of the ending
    for name, found in (("old.txt", "caf\ufffd, \ufffdber"), ("new.TXT", "caf\xe9, \xfcber")):
        corpus = data.prepare(str(tmp_path / name), "bpe", tmp_path / "cache")
        assert documents_in(corpus, "val")[0].strip() == f"{found} alles"
    (line,) = [line for line in said().splitlines() if "U+FFFD" in line]
    assert "old.txt is not UTF-8: 18 of its bytes became" in line


@pytest.mark.parametrize(
    "name, damage",
    [
        ("train.bin", lambda old: old[:100]),
        ("train.bin", lambda old: b"\xff" * len(old)),
        ("tokenizer.json", lambda old: b'{"name": "x"}'),
        ("val.bin", lambda old: b""),
        ("val.bin", None),
        ("meta.json", lambda old: old[:40]),
        ("meta.json", lambda old: b'{"tokens": 7}'),
    ],
)
def test_damaged_stages_say_what_to_delete(corpus_file, tmp_path, name, damage):
    corpus = data.prepare(corpus_file, "bpe", str(tmp_path))
    file = corpus.folder / name
    if damage:  # in place: the map sees it, too
        content = damage(file.read_bytes())
        os.truncate(file, len(content))
        with open(file, "r+b") as handle:
            handle.write(content)
    else:
        file.unlink()
    if name == "train.bin":
        refuses("cut short|beyond .* prepare it again", corpus.rows, "train", [0], 10)
    if name == "tokenizer.json":  # stopped before the tokens
        (corpus.folder / "meta.json").unlink()
    refuses("delete it and prepare it again", data.prepare, corpus_file, "bpe", str(tmp_path))


def test_damaged_files_are_one_clear_line(tmp_path):
    whole = gzip.compress(random.Random(0).randbytes(50_000).hex().encode())
    for name, content in {
        "b.txt.gz": whole[: len(whole) // 2],
        "b.json.gz": whole[: len(whole) // 2],
        "c.txt.xz": b"\xfd7zXZ\x00 and then nothing",
    }.items():
        (tmp_path / name).write_bytes(content)
        refuses("is damaged", list, data.file_documents(str(tmp_path / name), "text"))


def test_docstrings_are_read_not_imported(tmp_path):
    file = tmp_path / "m.py"
    file.write_text(
        '"""Module."""\nraise SystemExit\ndef f():\n    """Does f."""\n'
        'add_docstr(f, r"""Added.""")\n'
    )
    assert list(data.docstrings(file)) == ["Module.", "Does f.", "Added."]
    file.write_text("def broken(:\n")
    assert list(data.docstrings(file)) == []


def test_hub_data_sets_stream(tmp_path, said):
    """The hub's code path, on a folder that `datasets` reads like one of its repositories."""
    texts = texts_of(write_corpus(tmp_path / "train.jsonl", 7))
    documents, _ = data.hub_part(str(tmp_path), None, 1, "text")
    assert list(documents()) == texts and "GB to stream" in said()
    documents, _ = data.hub_part(str(tmp_path), None, 3, "text")
    assert list(documents()) == ["\n".join(texts[i : i + 3]) for i in (0, 3, 6)]
    documents, _ = data.hub_part(str(tmp_path), None, 1, "body")
    refuses("no column 'body', only title, text", list, documents())


def online(monkeypatch, is_online):
    """What the hub's libraries believe, whatever HF_HUB_OFFLINE says."""
    import datasets
    from huggingface_hub import constants

    for module in (constants, datasets.config):
        monkeypatch.setattr(module, "HF_HUB_OFFLINE", not is_online)


@pytest.mark.parametrize(
    "call",
    [
        lambda: data.find_source("some/set", "text", None).parts(),
        lambda: finetune.hub_rows("cola", "train"),
        data.gpt2_state,
    ],
)
def test_a_network_that_does_not_answer_is_said_soon(call, monkeypatch):
    """The libraries' own tries would take minutes."""
    from huggingface_hub import constants

    online(monkeypatch, True)
    monkeypatch.setattr(data, "PATIENCE", 0.1)
    monkeypatch.setattr(tiktoken, "get_encoding", lambda *a: time.sleep(60))
    with socket.create_server(("127.0.0.1", 0)) as mute:
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{mute.getsockname()[1]}")
        began = time.time()
        refuses("needs no network", call)
        assert time.time() - began < 10


def test_gpt2_tokenizer():
    try:
        state = data.gpt2_state()
    except ValueError as error:
        assert "--tokenizer bpe" in str(error)
        pytest.skip("GPT-2's vocabulary is not here")
    encoding = tiktoken.Encoding(**data.encoding_arguments(state))
    assert encoding.n_vocab == 50265 and encoding._special_tokens["[CLS]"] == 50257
    text = "Hello world, it's 2026! 中文"
    assert encoding.encode_ordinary(text) == tiktoken.get_encoding("gpt2").encode_ordinary(text)


# ==================================================================================================
# model.py: every scheme against the naive reference, invariants, and other libraries


@pytest.mark.parametrize("pe", ALL_PE)
def test_attention_equals_triple_loop(pe):
    """Forward and gradient, with B != L, a pad, positions permuted in one row and (where allowed)
    hidden in another."""
    encoder = tiny(pe)
    block = encoder.blocks[1]
    B, L, H, D = 3, 6, 2, 8
    random = torch.Generator().manual_seed(0)
    q, k, v, weight = torch.randn(4, B, H, L, D, dtype=torch.double, generator=random)
    leaves = [x.requires_grad_() for x in (q, k, v)] + list(encoder.pe.parameters())
    pos = torch.stack([torch.arange(L), torch.tensor([0, 4, 2, 5, 1, 3]), torch.arange(L)])
    if hidden_ok(pe):
        pos[2, 2:4] = UNKNOWN_POS
    pad = torch.zeros(B, L, dtype=torch.bool)
    pad[1, 4:] = True

    def ours():
        """The block's own attention: given q, k and v, and caught before the output layer."""
        caught = []
        hook = block.out.register_forward_pre_hook(lambda module, args: caught.append(args[0]))
        block.heads = lambda x: (q, k, v)
        at = Positions(pos)
        bias = encoder.pe.bias_and_mask(at, pad, False, q.dtype)
        block(torch.zeros(B, L, H * D, dtype=torch.double), encoder.pe, at, bias)
        hook.remove()
        return caught[0].view(B, L, H, D).transpose(1, 2)

    found = []
    for y in (ours(), naive_attention(encoder, q, k, v, pos, 1, pad)):
        found.append([y, *torch.autograd.grad((y * weight).sum(), leaves, materialize_grads=True)])
    close(*found)
    words = encoder.tok.weight[5] * encoder.pe.token_scale
    for b, i in product(range(B), range(L)):  # what is added at the input
        x = words
        if part := encoder.pe.part_with["embed"]:
            x = words + part.embed(Positions(pos[b : b + 1]))[0, i]
        expected = encoder.tok.weight[5]
        for name, w in seen_by(encoder, 0, 0).items():
            expected = naive.at_input(name, expected, int(pos[b, i]), w)
        close(x, expected, 1e-6)


@pytest.mark.parametrize(
    "pe", ["abs", "tupe_r", "rope", "rel", "rel_k", "rsin", "rlsin", "lsin+rlsin"]
)
@pytest.mark.parametrize("L", [1, 2, 12])
def test_the_default_positions_are_arange(pe, L):
    """And what is faster when positions are in order gives the same, gradients too."""
    encoder, tokens, found = tiny(pe), some_tokens(L=L), []
    for pos in (None, torch.arange(L), torch.arange(L).expand(3, L)):
        out = encoder(tokens, pos=pos)
        found.append(
            [
                out,
                *torch.autograd.grad(
                    out.square().sum(), list(encoder.parameters()), materialize_grads=True
                ),
            ]
        )
    close(found[0], found[1])
    close(found[0], found[2])


@pytest.mark.parametrize("pe", ALL_PE)
def test_joint_permutation_permutes_the_output(pe):
    """And without the positions' order it does not."""
    encoder, tokens = tiny(pe), some_tokens()
    order = torch.tensor([0, 3, 1, 6, 2, 5, 4])  # index 0, [CLS], aside
    pos = torch.arange(7).expand(3, 7)
    pad = torch.zeros(3, 7, dtype=torch.bool)
    pad[0, 5:] = True
    out = encoder(tokens, pos=pos, pad=pad)
    permuted = encoder(tokens[:, order], pos=pos[:, order], pad=pad[:, order])
    close(permuted, out[:, order])
    # A flag that computes positions and forgets to use them passes every other test of shapes.
    change = (encoder(tokens[1:, order]) - out[1:, order]).abs().max()
    assert change < 1e-9 if pe == "none" else change > 1e-3


@pytest.mark.parametrize("pe", [pe for pe in ALL_PE if hidden_ok(pe)])
def test_swapping_hidden_tokens_permutes_the_output(pe):
    encoder, tokens = tiny(pe), some_tokens()
    pos = torch.arange(7).expand(3, 7).clone()
    pos[:, [2, 5]] = UNKNOWN_POS
    order = torch.tensor([0, 1, 5, 3, 4, 2, 6])
    out = encoder(tokens, pos=pos)
    close(encoder(tokens[:, order], pos=pos), out[:, order])
    if pe != "none":
        assert (encoder(tokens) - out).abs().max() > 1e-4, "hidden positions must be seen as hidden"


ABSOLUTE = "abs sin lsin tupe_a tupe_r bert_ad tupe_a_free abs+t5".split()
RELATIVE = "rel rel_k rsin rlsin t5 t5_untie_cls deberta rope alibi".split()


def legal_sums(parts):
    for n in (1, 2, 3):
        for names in itertools.combinations(parts, n):
            with contextlib.suppress(ValueError):
                parse_pe("+".join(names))
                yield "+".join(names)


@pytest.mark.parametrize("pe", [*ABSOLUTE, *legal_sums(RELATIVE)])
def test_absolute_schemes_see_a_shift_and_relative_ones_do_not(pe):
    encoder, tokens = tiny(pe), some_tokens()
    change = (encoder(tokens, pos=torch.arange(7) + 5) - encoder(tokens)).abs().max()
    assert change > 1e-3 if pe in ABSOLUTE else change < 1e-9


@pytest.mark.parametrize("pe", ALL_PE)
def test_beyond_max_len(pe):
    """Tables of absolute positions refuse longer rows; all others go on, to offsets far past any
    table."""
    encoder, tokens = tiny(pe), some_tokens(2, 200)
    if re.search("abs|bert_|tupe", pe):
        refuses("table ends at 12", encoder, tokens)
    else:
        assert encoder(tokens).isfinite().all()


def test_causal_and_pad_masks():
    encoder, tokens = tiny("tupe_r"), some_tokens()
    changed = tokens.clone()
    changed[:, 5:] = 3
    close(encoder(tokens, causal=True)[:, :5], encoder(changed, causal=True)[:, :5])
    pad = torch.zeros(3, 7, dtype=torch.bool)
    pad[:, 5:] = True
    close(encoder(tokens, pad=pad)[:, :5], encoder(changed, pad=pad)[:, :5])
    close(encoder(tokens, pad=pad)[:, :5], encoder(tokens[:, :5]))
    assert (encoder(tokens)[:, :5] - encoder(changed)[:, :5]).abs().max() > 1e-3


@pytest.mark.parametrize("pe", ALL_PE)
def test_every_parameter_gets_a_gradient(pe):
    encoder, tokens = tiny(pe), some_tokens(5, 12)
    pos = torch.arange(12).expand(5, 12).clone()
    if hidden_ok(pe):
        pos[:2, 4:6] = UNKNOWN_POS
    weight = torch.randn(5, 12, 16, dtype=torch.double, generator=torch.Generator().manual_seed(3))
    (encoder(tokens, pos=pos) * weight).sum().backward()
    for name, p in encoder.named_parameters():
        assert p.grad is not None, name
        # softmax cancels a key bias: it adds the same to a whole row
        if name.endswith("qkv.bias"):
            key = p.grad.chunk(3)[1].abs().max()
            touched = {encoder.pe.part_with[hook] for hook in ("scores", "edit_qk")} - {None}
            kinds = {type(part).__name__ for part in touched}
            varies = bool(kinds & {"Rotary", "Deberta"})  # turned, or multiplied with places
            known = kinds <= {"Rotary", "Deberta", "BertAD"} or all("Relative" in k for k in kinds)
            assert not known or (key > 1e-9) == varies, "a bias that is alike for all keys"
            assert all(g.abs().max() > 1e-9 for g in (p.grad.chunk(3)[0], p.grad.chunk(3)[2])), name
        elif name.endswith("theta"):
            one, two = p.grad.abs().amax(1)
            assert one < 1e-9 < two, "theta_1 fills a row: softmax cancels it"
        else:
            assert p.grad.abs().max() > 1e-9, name


@pytest.mark.parametrize("pe", slow_unless(("tupe_r",), ALL_PE))
def test_compiles_without_graph_breaks(pe):
    encoder, tokens = tiny(pe).float(), some_tokens()
    pos = torch.arange(7).flip(0).expand(3, 7).contiguous()
    torch._dynamo.reset()
    eager = encoder(tokens, pos)
    close(torch.compile(encoder, fullgraph=True, backend="eager")(tokens, pos), eager, 1e-5)
    with torch.autocast("cpu", torch.bfloat16):
        close(encoder(tokens, pos), eager, 0.2)


@pytest.mark.slow
def test_inductor_agrees_with_eager():
    """The real backend, forward and backward, in bf16; float32: test_compiled_training_.."""
    if not common.can_compile(torch.device("cpu")):
        pytest.skip("no C++ compiler")
    # its logits are small, as bf16 wants them
    encoder = pretraining(pe="tupe_r", double=False).encoder
    torch._dynamo.reset()
    compiled, results = torch.compile(encoder, fullgraph=True), []
    for module, rounds in ((encoder, False), (encoder, True), (compiled, True)):
        encoder.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=rounds):
            out = module(some_tokens())
        (out * torch.arange(16)).sum().backward()
        results.append((out.detach().float(), *[p.grad for p in encoder.parameters()]))
    # compiled is no further from float32 than eager is, but for rounding
    for exact, eager, quick in zip(*results):
        rounding = 1e-4 * exact.norm().clamp(min=1.0)
        assert (quick - exact).norm() <= 2 * (eager - exact).norm() + rounding


@pytest.mark.parametrize("pe", ALL_PE)
def test_attention_probabilities(pe):
    encoder, tokens = tiny(pe), some_tokens()
    A = encoder.attention(tokens, layer=1)
    assert A.shape == (3, 2, 7, 7)
    close(A.sum(-1), torch.ones(3, 2, 7, dtype=torch.double))
    assert A.std() > 1e-3 and not A.requires_grad
    close(A, encoder.attention(tokens, layer=1, pos=torch.arange(7)))  # as forward takes it: (L,)


def test_parameters_that_schemes_add():
    """P1 sec 3.3: TUPE adds 2*C*C and little else; the rest follows from model.py's table."""

    def count(pe):
        encoder = Encoder(EncoderConfig(vocab_size=VOCAB, pe=pe))
        return sum(p.numel() for p in encoder.parameters())

    C, H, D, T, none = 128, 4, 32, 65, count("none")
    table = {
        "abs": T * C,
        "sin": C,
        "lsin": C + C // 2,
        "rel": 130 * D,
        "rel_k": 4 * 130 * D,
        "rsin": D,
        "rlsin": D + D // 2,
        "t5": 33 * H,
        "alibi": H,
        "rope": 0,
        "bert_ad": T * C + 2 * C + 2 * C * C,
        "tupe_a": (T + 2) * C + 2 * C + 2 * C * C,
        "tupe_r": (T + 2) * C + 2 * C + 2 * C * C + 33 * H,
        "tupe_a_tie_cls": T * C + 2 * C + 2 * C * C,
        "t5_untie_cls": 33 * H + 2 * H,
        "tupe_a_free": H * T * T + 2 * H,
        "bert_r": T * C + 33 * H,
        "tupe_r_factored": (T + 2) * C + 2 * C + 4 * C * C + 130 * C,
    }
    assert {pe: count(pe) - none for pe in table} == table


def test_bias_is_computed_once_a_forward(monkeypatch):
    calls, original = [], model_module.Tupe.bias
    monkeypatch.setattr(model_module.Tupe, "bias", lambda *args: calls.append(1) or original(*args))
    tiny("tupe_r", n_layer=4)(some_tokens())
    assert len(calls) == 1
    model = pretraining("pplm", "tupe_r")  # and the pair head takes the same
    model(model.corrupt(packed_rows(), 1))
    assert len(calls) == 2


def test_no_tensor_of_l_l_d(monkeypatch):
    """rel must never build (L, L, D): no tensor of a forward has more elements than the logits."""
    from torch.utils._python_dispatch import TorchDispatchMode

    sizes = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            for t in out if isinstance(out, (tuple, list)) else [out]:
                if isinstance(t, torch.Tensor):
                    sizes.append(t.untyped_storage().nbytes() // t.element_size())
            return out

    # D = 32, L = 40: L*L*D = 51,200; R = 130 columns: 2*2*40*130
    encoder = tiny("rel", d_model=64)
    for pos in (None, torch.arange(40)):
        with Watch():
            encoder(some_tokens(1, 40), pos=pos)
    assert max(sizes) < 40 * 40 * 32


def test_t5_buckets():
    r = torch.arange(-1000, 1001)
    assert model_module.t5_bucket(r).tolist() == [naive.bucket(int(x)) for x in r]
    b = [naive.bucket(x) for x in (0, -1, 1, -7, -8, -16, -32, -64, -128, 128)]
    assert b == [0, 1, 17, 7, 8, 10, 12, 14, 15, 31]


def test_initial_weights():
    torch.manual_seed(0)
    encoder = Encoder(EncoderConfig(vocab_size=8192, pe="tupe_r"))
    assert abs(encoder.tok.weight.std() - 0.02) < 1e-3
    assert abs(encoder.blocks[0].fc1.weight.std() - 0.02) < 1e-3
    bound = math.sqrt(6 / 256)  # Xavier-uniform of a 128 x 128 matrix
    u = encoder.pe.parts["tupe_r"].positions.u_q.weight
    assert u.abs().max() <= bound and abs(u.std() - bound / math.sqrt(3)) < 5e-3
    assert all(
        (m.bias == 0).all()
        for m in encoder.modules()
        if isinstance(m, torch.nn.Linear) and m.bias is not None
    )


@pytest.mark.parametrize(
    "pe, says",
    [
        ("foo", "choose from none, abs"),
        ("abs+sin", "both use the hook 'embed'"),
        ("rope+tupe_a", "stands alone"),
        ("t5+alibi", "'bias'"),
    ],
)
def test_illegal_schemes_are_refused_with_the_reason(pe, says):
    refuses(says.replace("+", r"\+"), EncoderConfig, pe=pe)


@pytest.mark.parametrize(
    "change",
    [
        dict(n_head=3),
        dict(d_model=10, n_head=2, pe="rope"),
        dict(n_layer=0),
        dict(dropout=1.0),
        dict(max_len=0),
    ],
)
def test_impossible_shapes_are_refused(change):
    refuses(".", EncoderConfig, **change)


# ----- against implementations by others


def test_t5_bias_equals_transformers():
    t5 = pytest.importorskip("transformers.models.t5.modeling_t5")
    from transformers import T5Config

    attention = t5.T5Attention(
        T5Config(num_heads=2, d_model=16, d_kv=8, is_decoder=False),
        has_relative_attention_bias=True,
    )
    ours = tiny("t5").pe.parts["t5"].float()
    with torch.no_grad():
        ours.table.weight[:32] = attention.relative_attention_bias.weight
    theirs = attention.compute_bias(40, 40)
    close(ours.bias(Positions(torch.arange(40))), theirs, 1e-6)


ROBERTA_NAMES = "self.query self.key self.value output.dense output.LayerNorm"


def copy_bert_layers(encoder, theirs, names):
    """Copy our weights into a BERT-like model of transformers.

    names: (q, k, v, attention output) under each layer."""
    theirs.embeddings.LayerNorm.load_state_dict(encoder.norm.state_dict())
    theirs.embeddings.word_embeddings.weight.copy_(encoder.tok.weight[:VOCAB])
    for block, layer in zip(encoder.blocks, theirs.encoder.layer):
        q, k, v, out, norm = [layer.get_submodule(f"attention.{name}") for name in names.split()]
        for module, w, b in zip((q, k, v), block.qkv.weight.chunk(3), block.qkv.bias.chunk(3)):
            module.load_state_dict({"weight": w, "bias": b})
        for module, ours in (
            (out, block.out),
            (norm, block.norm1),
            (layer.output.dense, block.fc2),
            (layer.intermediate.dense, block.fc1),
            (layer.output.LayerNorm, block.norm2),
        ):
            module.load_state_dict(ours.state_dict())


@pytest.mark.parametrize(
    "name, pad_id, offset, pe",
    [("Bert", 0, 0, "abs"), ("Roberta", 1, 2, "abs"), ("MPNet", 1, 2, "abs+t5")],
)
def test_encoder_equals_transformers(name, pad_id, offset, pe):
    """abs against BERT and RoBERTa, abs+t5 against MPNet: hidden states of copied weights, a pad
    included."""
    transformers = pytest.importorskip("transformers")
    encoder = tiny(pe).float()
    config = getattr(transformers, f"{name}Config")(
        vocab_size=VOCAB,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=12 + offset,
        layer_norm_eps=1e-5,
        pad_token_id=pad_id,
    )
    theirs = getattr(transformers, f"{name}Model")(config, add_pooling_layer=False).eval()
    with torch.no_grad():
        table = encoder.pe.parts["abs"].table.weight[:12]
        if name == "MPNet":
            copy_bert_layers(encoder, theirs, "attn.q attn.k attn.v attn.o LayerNorm")
            # Its function of the offset adds 16 buckets where key > query, as ours does.
            buckets = encoder.pe.parts["t5"].table.weight[:32]
            theirs.encoder.relative_attention_bias.weight.copy_(buckets)
        else:
            copy_bert_layers(encoder, theirs, ROBERTA_NAMES)
            # we have none: type 0 folds into the positions
            table = table - theirs.embeddings.token_type_embeddings.weight.normal_()[0]
        theirs.embeddings.position_embeddings.weight[offset : offset + 12].copy_(table)
        tokens = some_tokens().clamp(min=2)
        pad = torch.zeros(3, 7, dtype=torch.bool)
        pad[1, 5:] = True
        out = theirs(
            tokens, attention_mask=(~pad).long(), position_ids=torch.arange(7)[None] + offset
        ).last_hidden_state
        close(encoder(tokens, pad=pad)[~pad], out[~pad], 1e-5)


def test_rope_equals_roformer():
    roformer = pytest.importorskip("transformers.models.roformer.modeling_roformer")
    D, L = 8, 10
    table = roformer.RoFormerSinusoidalPositionalEmbedding(L, D)
    table.weight.data = table.create_weight()
    q, k = torch.randn(2, 2, 3, L, D)
    rotate = roformer.RoFormerSelfAttention.apply_rotary_position_embeddings
    theirs = rotate(table(torch.Size([3, L]))[None, None], q, k)
    ours = tiny("rope").float().pe.parts["rope"].edit_qk(q, k, Positions(torch.arange(L)))
    for a, b in zip(ours, theirs):
        close(a, b, 1e-5)


def test_deberta_equals_transformers():
    """Each of the two terms, with copied weights. Theirs ends at an offset of 63, so rows are
    short; it counts query minus key; and in k_j . a_-r W_Q its code takes a_r, so there it is given
    the table the other way round. (Its scale is rounded to float32.)"""
    deberta = pytest.importorskip("transformers.models.deberta.modeling_deberta")
    L, C, H, D = 9, 16, 2, 8
    config = deberta.DebertaConfig(
        hidden_size=C, num_attention_heads=H, relative_attention=True, max_relative_positions=64
    )
    config.pos_att_type = ["c2p", "p2c"]
    theirs = deberta.DisentangledSelfAttention(config).double().eval()
    encoder = tiny("deberta")
    part = encoder.pe.parts["deberta"]
    W_k, W_q = part.layers[1].weight.view(2, C, C)
    theirs.pos_proj.weight.data.copy_(W_k)
    theirs.pos_q_proj.weight.data.copy_(W_q)
    theirs.pos_q_proj.bias.data.zero_()
    q, k = torch.randn(2, 2, H, L, D, dtype=torch.double)
    a = part.table.weight[:129]  # row r + 64
    offsets, expected = torch.arange(L)[:, None] - torch.arange(L), q @ k.mT * part.scale
    for kind, table in (("c2p", a.flip(0)[:128]), ("p2c", a[:128])):
        theirs.pos_att_type = [kind]
        args = q * part.scale, k, offsets, table, 3
        expected = expected + theirs.disentangled_att_bias(*args)
    apart = (encoder.logits(q, k, torch.arange(L), 1) - expected).abs().max()
    assert apart < 1e-6 < expected.abs().max(), apart


def test_norm_pre():
    """x + f(LN(x)), a last LayerNorm on top."""
    encoder, tokens = tiny("tupe_r", norm="pre"), some_tokens()
    pos = Positions(torch.arange(7))
    bias = encoder.pe.bias_and_mask(pos, None, False, torch.double)
    x = encoder.embed(tokens, pos)
    for block in encoder.blocks:
        q, k, v = block.qkv(block.norm1(x)).view(3, 7, 3, 2, 8).permute(2, 0, 3, 1, 4)
        A = (q @ k.mT * encoder.pe.scale + bias).softmax(-1)
        x = x + block.out((A @ v).transpose(1, 2).flatten(2))
        x = x + block.fc2(F.gelu(block.fc1(block.norm2(x))))
    close(encoder(tokens), encoder.norm_last(x))
    logits = encoder.layer_logits(tokens, 1)
    close(logits, q * encoder.pe.scale @ k.mT + bias)
    assert "norm_last.weight" in encoder.state_dict()
    assert "norm_last.weight" not in tiny("tupe_r").state_dict()


@pytest.mark.parametrize("n_head", [1, 2, 4, 6, 8, 12, 16])
def test_alibi_slopes_equal_bloom(n_head):
    bloom = pytest.importorskip("transformers.models.bloom.modeling_bloom")
    # slope * position 1
    theirs = bloom.build_alibi_tensor(torch.ones(1, 2), n_head, torch.float32)[:, 0, 1]
    close(torch.tensor(model_module.Alibi.published_slopes(n_head)), theirs, 1e-6)


# ----- fast.py: each piece against its plain twin


@pytest.mark.parametrize("bias", [None, torch.randn(1, 2, 5, 5)])
def test_the_fused_attention_is_the_plain_one(bias):
    q, k, v = torch.randn(3, 4, 2, 5, 8)
    scores = 0.3 * q @ k.transpose(-1, -2)
    plain = (scores if bias is None else scores + bias).softmax(-1) @ v
    close(fast.attention(q, k, v, bias, 0.0, 0.3), plain, 1e-5)


@pytest.mark.parametrize("L", [1, 5, 100])
def test_offsets_in_order_are_those_looked_up(L):
    """Beyond 64 they are clipped."""
    table, A = torch.randn(2 * 64 + 2, 3), torch.rand(2, 2, L, L)
    plain = model_module.Pairs(Positions(torch.arange(L)))
    ordered, q = fast.InOrder(L, 64), torch.randn(2, 2, L, 3)
    (a, one), (b, two) = ((pairs.rows(table), pairs) for pairs in (plain, ordered))
    close(two.pick(q @ b.t()), one.pick(q @ a.t()), 1e-4)
    close(two.add_up(A, len(b)) @ b, one.add_up(A, len(a)) @ a, 1e-3)


def test_dropout_on_a_cpu():
    torch.manual_seed(0)
    x = torch.full((999, 1001), 2.0, requires_grad=True)
    y = fast.drop(x, 0.1)
    y.sum().backward()
    dropped = y == 0
    assert abs(dropped.float().mean() - 0.1) < 0.002 and torch.equal(x.grad, y.detach() / 2)
    assert y[~dropped].unique().numel() == 1 and abs(y.mean() - 2) < 0.005
    # Neighbours share a draw, not their luck.
    assert abs((dropped[:, 1:] & dropped[:, :-1]).float().mean() - 0.01) < 0.001
    torch.manual_seed(0)
    assert torch.equal(fast.drop(x, 0.1), y) and fast.dropout(0.1).eval()(x) is x
    assert fast.drop(x, 0.9999999).isfinite().all()
    torch.manual_seed(0)
    assert torch.equal(torch.compile(fast.drop, backend="aot_eager", fullgraph=True)(x, 0.1), y)
    torch.manual_seed(0)
    assert torch.equal(fast.dropout(0.1)(x), y) and isinstance(fast.dropout(0), torch.nn.Identity)


def test_compiled_dropouts_are_independent():
    """Calls of the same shape are not made one, and the backward pass has its forward's mask."""
    x = torch.full((300, 301), 2.0, requires_grad=True)
    twice = torch.compile(
        lambda x: (fast.drop(x, 0.5), fast.drop(x + 1, 0.5)),
        fullgraph=True,
        backend="aot_eager_decomp_partition",
    )
    a, b = twice(x)
    a.sum().backward()
    assert torch.equal(x.grad, a.detach() / 2)
    for other in (b, twice(x)[0]):  # dropped by both: a quarter
        assert abs(((a == 0) & (other == 0)).float().mean() - 0.25) < 0.01


# ==================================================================================================
# objectives.py


class Letters:
    """Stands for a tokenizer: even ids begin a word."""

    def decode_single_token_bytes(self, i):
        return b" a" if i % 2 == 0 else b"a"


def pretraining(objective="mlm", pe="abs", L=12, double=True, n_layer=1, **change):
    torch.manual_seed(1)
    encoder = Encoder(EncoderConfig(**SMALL, n_layer=n_layer, max_len=L, pe=pe))
    encoder.tokenizer = Letters()
    model = Pretraining(encoder, ObjectiveConfig(objective, **change))
    return model.double() if double else model


def packed_rows(B=6, L=12, seed=0):
    """Rows as data.py makes them: [CLS] .. [SEP], with a [SEP] inside some."""
    tokens = some_tokens(B, L, seed)
    tokens[:, -1] = SEP
    tokens[0, 5] = tokens[1, 3] = tokens[1, 7] = SEP
    return tokens


def corrupted(objective, pe="abs", B=6, L=12, **change):
    """-> a model, rows, and the batch that it makes of them."""
    model, tokens = pretraining(objective, pe, L, **change), packed_rows(B, L)
    return model, tokens, model.corrupt(tokens, 0)


def test_mlm_selects_80_10_10():
    model = pretraining("mlm", L=130, mask_rate=0.3)
    tokens = some_tokens(3000, 130)
    tokens[:, -1] = SEP
    batch = model.corrupt(tokens, 0)
    slots, shown = batch["mlm_slots"], batch["tokens"].gather(1, batch["mlm_slots"])
    assert slots.shape == (3000, 38) and slots.numel() > 100_000
    assert (slots.sort().values.diff() > 0).all(), "places are drawn without replacement"
    masked, kept = ((shown == x).double().mean() for x in (MASK, batch["mlm_target"]))
    assert abs(masked - 0.8) < 0.01 and abs(kept - (0.1 + 0.1 / 64)) < 0.01
    random_tokens = shown[(shown != MASK) & (shown != batch["mlm_target"])]
    assert random_tokens.max() < CLS and len(random_tokens.unique()) == CLS
    changed = batch["tokens"] != tokens
    assert not changed[:, [0, -1]].any() and (changed.sum() == (shown != batch["mlm_target"]).sum())
    counts = torch.bincount(slots.flatten(), minlength=130)[1:-1].double()
    assert (counts - counts.mean()).abs().max() < 5 * counts.mean().sqrt(), "places are alike"


def test_no_special_is_selected_and_slots_beyond_have_weight_0():
    for objective in ("mlm", "pplm"):
        # k = 9 of 10 inner places; row 1 has 8 eligible
        model = pretraining(objective, mask_rate=0.9, pos_rate=0.9)
        tokens = packed_rows()
        for seed in range(20):
            batch = model.corrupt(tokens, seed)
            special = tokens >= CLS
            assert (batch["tokens"][special] == tokens[special]).all()
            if objective == "mlm":
                assert batch["mlm_weight"].sum(1).tolist() == [9, 8, 9, 9, 9, 9]
                assert not special.gather(1, batch["mlm_slots"])[batch["mlm_weight"] > 0].any()
            else:
                assert (batch["pos"] == torch.arange(12))[special].all()


def test_mlm_loss_equals_loop():
    model, tokens, batch = corrupted("mlm", mask_rate=0.3)
    hidden = model.encoder(batch["tokens"])
    mlm, total, n = model.objectives["mlm"], 0.0, 0
    for b in range(6):
        for slot in batch["mlm_slots"][b][batch["mlm_weight"][b] > 0]:
            x = mlm.norm(F.gelu(mlm.dense(hidden[b, slot])))
            scores = torch.stack(
                [x @ model.encoder.tok.weight[t] + mlm.bias[t] for t in range(VOCAB)]
            )
            total, n = total - scores.log_softmax(0)[tokens[b, slot]], n + 1
    close(model(batch)[0], total / n, 1e-5)
    assert n == 18, "three places in each of six rows"


def test_padded_ids_never_leave():
    model = pretraining("mlm")
    assert model.encoder.tok.weight.shape[0] == 128
    logits = model.objectives["mlm"].word_logits(model.encoder, torch.zeros(2, 16).double())
    assert (logits[:, VOCAB:] == float("-inf")).all() and logits[:, :VOCAB].isfinite().all()


def test_whole_words_are_selected():
    """Written again as a loop: words in order of their random score, piece by piece, until k are
    taken."""
    model, tokens = pretraining("mlm", L=34, mask_rate=0.4, whole_word=True), some_tokens(50, 34)
    tokens[:, -1] = tokens[::3, 9] = tokens[::5, 20] = SEP
    batch = model.corrupt(tokens, 0)
    score = torch.rand(50, 34, generator=stream("cpu", 0, "mlm"))
    for b in range(50):
        words = []
        for i in range(34):
            if tokens[b, i] >= CLS:
                # a special ends a word and is none
                words.append([])
            elif i and words[-1] and tokens[b, i] % 2:
                words[-1].append(i)
            else:
                words.append([i])
        # A word's score is that of its number, counted as places that start one, specials too.
        number, starts = [], 0
        for i in range(34):
            starts += int(tokens[b, i] >= CLS or tokens[b, i] % 2 == 0 or tokens[b, i - 1] >= CLS)
            number.append(min(starts, 33))
        words = sorted((w for w in words if w), key=lambda w: -score[b, number[w[0]]])
        expected = [i for w in words for i in w][: round(0.4 * 32)]
        assert batch["mlm_slots"][b].tolist() == expected
    assert batch["mlm_slots"].shape == (50, 13) and batch["mlm_weight"].all()


def test_word_starts(corpus):
    encoding = encoding_of(corpus)
    starts = data.word_starts(encoding, corpus.vocab_size)
    for text, expected in (
        (" lazy", True),
        ("e", False),
        (".", True),
        ("7", False),
        (" ", True),
        ("\n", True),
    ):
        assert bool(starts[encoding.encode_ordinary(text)[0]]) == expected, text
    assert starts[-8:].all() and len(starts) == 8192
    refuses("tokenizer", data.word_starts, None, 72)


def test_mlm_on_all_adds_the_mean_over_the_rest():
    model, tokens, batch = corrupted("mlm", mask_rate=0.3, mlm_on="all")
    logp = (
        model.objectives["mlm"]
        .word_logits(model.encoder, model.encoder(batch["tokens"]))
        .log_softmax(-1)
    )
    masked, rest = [], []
    for b in range(6):
        chosen = batch["mlm_slots"][b][batch["mlm_weight"][b]].tolist()
        for i in range(12):
            if tokens[b, i] < CLS:
                (masked if i in chosen else rest).append(-logp[b, i, tokens[b, i]])
    assert len(masked) == 18 and len(rest) == 60 - 3 - 18
    expected = sum(masked) / len(masked) + sum(rest) / len(rest)
    close(model(batch)[0], expected, 1e-5)
    assert baselines.baselines(model, 6.0)["unigram"] == 12.0


def test_clm_equals_a_loop_and_sees_no_future():
    model, tokens, batch = corrupted("clm", "tupe_r")
    assert (batch["tokens"] == tokens).all()
    losses = []
    for b in range(6):
        for i in range(11):
            if tokens[b, i + 1] < CLS:
                # nothing but what stands to the left
                last = model.encoder(tokens[b : b + 1, : i + 1], causal=True)[0, -1]
                logits = model.objectives["clm"].word_logits(model.encoder, last)
                losses.append(-logits.log_softmax(-1)[tokens[b, i + 1]])
    assert len(losses) == 57
    close(model(batch)[0], sum(losses) / len(losses), 1e-5)


# ----- tc


def test_tc_positives_and_negatives():
    """Positives within the window where there is one, uniform; negatives from other rows, uniform,
    with replacement."""
    stats = pytest.importorskip("scipy.stats")
    model, tokens = pretraining("tc", tc_negatives=20), packed_rows(6)
    tokens[2, 1:-1] = SEP
    # alone in their windows: each is the other's positive
    tokens[2, [2, 9]] = 5
    tokens[3, 2:-1] = SEP  # a row with a single token
    words = tokens < CLS
    near, seen = Counter(), Counter()
    index = torch.arange(6)[:, None, None]
    for seed in range(300):
        batch = model.corrupt(tokens, seed)
        candidates, weight = batch["tc_candidates"], batch["tc_weight"]
        assert (candidates[2, 2, 0], candidates[2, 9, 0]) == (2 * 12 + 9, 2 * 12 + 2)
        assert torch.equal(weight, words & (index[..., 0] != 3)), "all words but the single one"
        row, place = candidates // 12, candidates % 12
        assert (row[..., :1] == index)[weight].all() and (row[..., 1:] != index)[weight].all()
        assert words.flatten()[candidates][weight].all(), "never a special"
        distance = (place[..., 0] - torch.arange(12)).abs()
        assert (distance[weight] > 0).all() and (distance[4:][weight[4:]] <= 2).all()
        near.update(int(x) for x in place[4, 5, :1])
        seen.update(candidates[0, 1, 1:].tolist())
    assert sorted(near) == [3, 4, 6, 7] and stats.chisquare(list(near.values())).pvalue > 1e-3
    others = words[1:].sum()
    assert len(seen) == others and stats.chisquare(list(seen.values())).pvalue > 1e-3


@pytest.mark.parametrize(
    "cfg",
    [
        {},
        dict(tc_embedding="original"),
        dict(tc_embedding="input_layer"),
        dict(tc_on="masked"),
        dict(tc_on="unmasked"),
        dict(tc_temperature=0.5, tc_negatives=3, tc_window=3),
    ],
    ids=str,
)
@pytest.mark.parametrize("pe", ["abs", "sin"])
def test_tc_equals_a_loop(cfg, pe):
    """P2 eq 6 to 8, token by token."""
    model, tokens, batch = corrupted("taco", pe, mask_rate=0.4, **cfg)
    encoder, tc = model.encoder, model.objectives["tc"].cfg
    hidden = encoder(batch["tokens"])
    scale = 4.0 if pe == "sin" else 1.0  # sqrt(C)
    e = encoder.tok.weight[tokens if tc.tc_embedding == "original" else batch["tokens"]] * scale
    if tc.tc_embedding == "input_layer":
        e = encoder.norm(e + encoder.pe.part_with["embed"].embed(Positions(torch.arange(12))))
    g = (hidden - e).flatten(0, 1)
    losses = []
    for b in range(6):
        masked = batch["mlm_slots"][b].tolist()
        for i in range(12):
            wanted = {"all": True, "masked": i in masked, "unmasked": i not in masked}[tc.tc_on]
            if tokens[b, i] < CLS and wanted:
                candidates = batch["tc_candidates"][b, i]
                assert len(candidates) == 1 + tc.tc_negatives
                f = [
                    torch.cosine_similarity(g[12 * b + i], g[c], dim=0) / tc.tc_temperature
                    for c in candidates
                ]
                losses.append(-torch.stack(f).log_softmax(0)[0])
    assert len(losses) == {"all": 57, "masked": 24, "unmasked": 33}[tc.tc_on]
    close(model(batch)[1]["tc"], sum(losses) / len(losses), 1e-5)


def test_tc_of_a_constant_is_ln_1_plus_k_and_candidates_are_detached():
    model, tokens = pretraining("tc"), packed_rows()
    tc, batch = model.objectives["tc"], model.corrupt(tokens, 0)
    e = model.encoder.tok(tokens)
    with torch.no_grad():
        loss, _ = tc.loss(model.encoder, e + torch.ones(16), batch)
    assert abs(float(loss) - math.log(51)) < 1e-6
    assert baselines.baselines(model, 0.0) == {"constant": math.log(51)}
    # The gradient is that of the anchors alone: with one anchor's weight, of one hidden state.
    batch["tc_weight"] = torch.zeros_like(batch["tc_weight"])
    batch["tc_weight"][1, 4] = True
    hidden = torch.randn(6, 12, 16).double().requires_grad_()
    tc.loss(model.encoder, hidden, batch)[0].backward()
    touched = hidden.grad.abs().sum(-1) > 0
    assert touched[1, 4] and touched.sum() == 1


def test_tc_accuracy_is_not_rounded_to_16_bits():
    """Near the plateau all g are alike: in bf16 their cosines would tie, and a tie is a miss."""
    model, tokens = pretraining("tc", double=False).eval(), packed_rows()
    batch = model.corrupt(tokens, 0)
    hidden = model.encoder.tok(tokens) + 10 + torch.randn(6, 12, 16)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        rounded = model.objectives["tc"].loss(model.encoder, hidden, batch)
    with torch.no_grad():
        assert rounded == model.objectives["tc"].loss(model.encoder, hidden, batch)


# ----- nsp


def test_nsp_rows():
    model, tokens = pretraining("nsp"), packed_rows(42)
    tokens[2, 3:-1] = SEP  # two words: no two halves
    swapped = Counter()
    for seed in range(30):
        batch = model.corrupt(tokens, seed)
        new, label = batch["tokens"], batch["nsp_label"]
        assert label.sum() == 21 and (batch["eligible"] == (new < CLS)).all()
        assert (batch["original"] == new).all() and (new[2] == tokens[2]).all()
        assert batch["nsp_weight"].tolist() == [float(b != 2) for b in range(42)]
        for b in {*range(42)} - {2}:
            words = [i for i in range(12) if tokens[b, i] < CLS]
            middle = words[len(words) // 2]
            assert new[b, middle] == SEP and (new[b, :middle] == tokens[b, :middle]).all()
            same = [c for c in range(42) if (tokens[c, middle + 1 :] == new[b, middle + 1 :]).all()]
            assert len(same) == 1 and label[same] == label[b] == int(same != [b])
        swapped.update(label.nonzero()[:, 0].tolist())
    assert len(swapped) == 42 and max(swapped.values()) < 28


def test_nsp_loss_and_that_it_comes_before_masking():
    model, tokens, batch = corrupted("mlm+nsp")
    assert model.names == ["nsp", "mlm"]
    assert (batch["original"] != tokens).any()
    assert (batch["mlm_target"] == batch["original"].gather(1, batch["mlm_slots"])).all()
    assert (batch["mlm_target"] < CLS)[batch["mlm_weight"]].all(), "the new [SEP] is not selected"
    nsp, cls = model.objectives["nsp"], model.encoder(batch["tokens"])[:, 0]
    logp = nsp.out(torch.tanh(nsp.dense(cls))).log_softmax(1)
    close(model(batch)[1]["nsp"], -logp[range(6), batch["nsp_label"]].mean(), 1e-6)


def test_pplm_permutes_inside_the_selected_set():
    model, tokens, batch = corrupted("pplm", B=64)
    pos, arange = batch["pos"], torch.arange(12)
    assert (batch["tokens"] == tokens).all()
    assert (pos.sort(1).values == arange).all(), "a permutation"
    assert ((pos != arange).sum(1) <= 6).all(), "k = round(.6 * 10)"
    chosen, valid = objectives.select(batch["eligible"], 0.6, stream("cpu", 0, "pplm"))
    outside = torch.ones(64, 12, dtype=torch.bool).scatter(1, chosen, ~valid)
    assert (pos == arange)[outside].all()
    assert (pos == arange)[~outside].any(), "by chance some of the chosen keep their place"


def test_pplm_permutation_is_uniform():
    """Chi-square over the 4! orders of 4 permuted places."""
    stats = pytest.importorskip("scipy.stats")
    model = pretraining("pplm", L=6, pos_rate=0.99)  # k = 4 of 4
    tokens = some_tokens(6000, 6)
    tokens[:, -1] = SEP
    orders = Counter(map(tuple, model.corrupt(tokens, 0)["pos"][:, 1:-1].tolist()))
    assert len(orders) == 24 and stats.chisquare(list(orders.values())).pvalue > 1e-3


def pair_loop(name, model, tokens, batch, L, cfg):
    """Mean loss over the scored pairs, written from P0: scores of one more attention layer, psi,
    then the distance."""
    encoder, head = model.encoder, model.objectives[name].head
    hidden, pos = encoder(batch["tokens"], batch["pos"]), batch["pos"].tolist()
    total, n = 0.0, 0
    q, k = (f(hidden).view(len(tokens), L, 2, 8) for f in (head.query, head.key))
    layer = head.last if head.table is None else head.table
    w = [seen_by(encoder, layer, h) for h in range(2)]
    for b, i, j in product(range(len(tokens)), range(L), range(L)):
        pi, pj = pos[b][i], pos[b][j]
        touched = (pi != i) + (pj != j)
        if i == j or tokens[b, i] >= CLS or tokens[b, j] >= CLS:
            continue
        if touched < {"pmlm": 1, "pplm_some": 2}.get(name, 0):
            continue
        if cfg.get("pair_scores") == "content":
            s = [q[b, i, h] @ k[b, j, h] / math.sqrt(8) for h in range(2)]
        else:
            s = [
                naive.logit(scheme_of(encoder), q[b, :, h], k[b, :, h], i, j, pos[b], w[h], L)
                for h in range(2)
            ]
        out, n = head.psi(torch.stack(s)), n + 1
        if name == "pplm_binary":
            total = total - out.log_softmax(0)[int(pj - pi == j - i)]
        elif cfg.get("pair_loss") == "wasserstein":
            total = total + sum(
                p * abs(c - (L - 1) - (j - i)) for c, p in enumerate(out.softmax(0))
            )
        elif cfg.get("pair_loss") == "smooth_l1":
            d = (out[0] - (j - i) / L).abs()
            total = total + (0.5 * d * d * L if d < 1 / L else d - 0.5 / L)
        else:
            total = total - out.log_softmax(0)[j - i + L - 1]
    return total / n


@pytest.mark.parametrize(
    "name, pe, cfg",
    [
        *[("pplm", pe, {}) for pe in ("abs", "tupe_r", "t5", "bert_ad", "rope")],
        ("pmlm", "abs", {}),
        ("pmlm", "tupe_r", {}),
        ("pplm_some", "tupe_r", {}),
        ("pplm_binary", "tupe_r", {}),
        ("pplm", "tupe_r", dict(pair_scores="content")),
        ("pplm", "abs", dict(pair_head="linear")),
        ("pplm", "tupe_r", dict(pair_loss="wasserstein")),
        ("pmlm", "abs", dict(pair_loss="smooth_l1")),
        ("pplm", "rope+rel", {}),
        ("pplm_binary", "rel_k", dict(pair_scores="content", pair_head="linear")),
    ],
)
def test_pair_losses_equal_a_loop(name, pe, cfg):
    """Which pairs, which labels: P0 sec 3.1, whatever the given positions."""
    model, tokens, batch = corrupted(name, pe, L=8, **cfg, B=3)
    expected = pair_loop(name, model, tokens, batch, 8, cfg)
    close(model(batch)[0], expected, 1e-5)


def test_wasserstein_equals_scipy():
    stats = pytest.importorskip("scipy.stats")
    logits, label = torch.randn(9, 15, dtype=torch.double), torch.randint(15, (9,))
    for x, y, found in zip(
        logits.softmax(-1).numpy(), label.tolist(), objectives.Wasserstein(15).loss(logits, label)
    ):
        assert abs(stats.wasserstein_distance(np.arange(15), [y], x) - found) < 1e-9


def test_smooth_l1_predicts_offsets():
    """Its one number is the offset over L; the logged accuracy is that of the rounded offset."""
    offset = torch.tensor([[-3.4], [0.6], [7.0]]) / 8
    assert (objectives.SmoothL1(15).predict(offset) - 7).tolist() == [-3, 1, 7]


@pytest.mark.parametrize("pair_loss", ["wasserstein", "smooth_l1"])
def test_prior_of_a_distance_is_the_best_constant(pair_loss):
    L = 20
    model = pretraining("pplm", L=L, pair_loss=pair_loss)
    ours = baselines.baselines(model, 0.0)["prior"]
    r = torch.tensor([j - i for i in range(1, L - 1) for j in range(1, L - 1) if i != j])
    found = []
    for constant in range(-3, 4):
        logits = torch.full((len(r), 1), constant / L)
        if pair_loss == "wasserstein":
            logits = torch.full((len(r), 2 * L - 1), -1e9)
            logits[:, constant + L - 1] = 0
        found.append(float(model.objectives["pplm"].measure.loss(logits, r + L - 1).mean()))
    assert abs(min(found) - ours) < 1e-5 and abs(found[3] - ours) < 1e-5


def test_scores_of_the_last_block():
    """--pair_from last, as P0 has it: its own logits, and what it does with them learns nothing."""
    model, tokens, batch = corrupted("pplm", "tupe_r", n_layer=2, pair_from="last")
    encoder, head = model.encoder, model.objectives["pplm"].head
    last = encoder.layer_logits(batch["tokens"], 1, batch["pos"])[:, :, 1:-1, 1:-1]
    ours = head.scores(encoder, encoder(batch["tokens"], batch["pos"]), batch)
    close(ours, last.permute(0, 2, 3, 1))
    model(batch)[0].backward()
    block, C = encoder.blocks[-1], 16
    assert block.qkv.weight.grad[: 2 * C].abs().min(1).values.min() > 0
    for p in (block.qkv.weight.grad[2 * C :], block.out.weight.grad, block.fc1.weight.grad):
        assert p.abs().max() == 0
    assert encoder.blocks[0].fc1.weight.grad.abs().max() > 0 and not hasattr(head, "query")


def test_pmlm_hides_the_selected_positions():
    model, tokens, batch = corrupted("pmlm", B=64)
    hidden = batch["pos"] == UNKNOWN_POS
    assert (batch["tokens"] == tokens).all() and (batch["pos"] == torch.arange(12))[~hidden].all()
    assert not hidden[tokens >= CLS].any() and (hidden.sum(1) == 6).all()
    refuses("hides positions, and pe rope", pretraining, "pmlm", "rope+t5")


def test_binary_accuracy_of_a_constant_answer():
    """A head that always says "moved" is right for the share of pairs whose given offset is not the
    true one."""
    model, tokens, batch = corrupted("pplm_binary", B=40)
    with torch.no_grad():
        model.objectives["pplm_binary"].head.psi[2].bias.copy_(torch.tensor([100.0, 0.0]))
    pos, right = batch["pos"], []
    for b in range(40):
        words = [i for i in range(12) if tokens[b, i] < CLS]
        right += [int(pos[b, j] - pos[b, i] != j - i) for i, j in permutations(words, 2)]
    assert abs(model.eval()(batch)[1]["pplm_binary_accuracy"] - np.mean(right)) < 1e-6


def test_rel_k_gives_the_pair_head_its_own_table():
    model = pretraining("pplm", "rel_k")
    assert model.objectives["pplm"].head.table.weight.shape == (130, 8)
    model(model.corrupt(packed_rows(), 0))[0].backward()
    assert model.objectives["pplm"].head.table.weight.grad.abs().max() > 0
    assert pretraining("pplm", "rel").objectives["pplm"].head.table is None


@pytest.mark.parametrize(
    "objective, item", [("pplm", 4 * 6 * 10 * 23), ("clm", 4 * VOCAB), ("mlm", 4 * VOCAB)]
)
def test_chunks_change_nothing(monkeypatch, objective, item):
    model, tokens, batch = corrupted(objective, "tupe_r")
    results = []
    # all at once, three items at a time, one at a time
    for budget in (1 << 30, 3 * item, 1):
        monkeypatch.setattr(fast, "CACHE_BYTES", budget)
        model.zero_grad()
        loss, _ = model(batch)
        loss.backward()
        results.append([loss.detach(), *[p.grad.clone() for p in model.parameters()]])
    for other in results[1:]:
        close(results[0], other, 1e-6)  # the loss itself is in float32


def test_chunks_are_as_long_as_the_budget_allows(monkeypatch):
    sizes, x = [], torch.randn(7, 3, requires_grad=True)
    target, weight = torch.arange(7) % 3, torch.tensor([1, 1, 0, 1, 1, 1, 0])

    def head(x):
        sizes.append(len(x))
        return 2 * x

    for budget, expected in ((4 * 4 * 2, [2, 2, 2, 1]), (4 * 4 * 7, [7])):
        sizes.clear()
        monkeypatch.setattr(fast, "CACHE_BYTES", budget)
        loss, right = fast.loss_in_chunks(
            head, [], x, target, weight, objectives.CrossEntropy(3), 4, True
        )
        assert sizes == expected
        each = F.cross_entropy(2 * x, target, reduction="none")
        close(loss, (each * weight).sum() / 5, 1e-6)
        assert right == ((x.argmax(-1) == target) * weight).sum() / 5


class Held:
    def __init__(self, x):
        self.x = x


@pytest.mark.parametrize(
    "objective, flags",
    [slow("pplm", {}), ("pplm_binary", {}), slow("pplm", dict(pair_loss="smooth_l1"))],
)
def test_chunks_keep_nothing_for_the_backward_pass(monkeypatch, objective, flags):
    """Compiled, chunks are made again; else their gradient is taken at once. The pair head's MLP is
    wider than two classes or one number: its hidden layer counts too."""
    model = pretraining(objective, "abs", **flags)
    batch = model.corrupt(packed_rows(), 0)
    hidden = model.encoder(batch["tokens"], pos=batch["pos"])
    part, alive, found = model.objectives[objective], weakref.WeakSet(), []
    small = 2 * 4 * batch["pos"].numel() * objectives.PAIR_HIDDEN  # two queries

    def keep(x):  # lives as long as a graph holds it
        held = Held(x)
        alive.add(held)
        return held

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda held: held.x):
        for compiling, budget in ((True, 1 << 30), (True, small), (False, small)):
            monkeypatch.setattr(torch.compiler, "is_compiling", lambda now=compiling: now)
            monkeypatch.setattr(fast, "CHUNK_BYTES", budget)
            monkeypatch.setattr(fast, "CACHE_BYTES", budget)
            alive.clear()
            loss, _ = part.loss(model.encoder, hidden, batch)
            gc.collect()
            found.append(sum(held.x.nbytes for held in alive))
    whole, again, at_once = found
    assert again < whole / 5 and at_once < whole / 5, found


@pytest.mark.parametrize("pe", ["abs", "tupe_r"])
@pytest.mark.parametrize("objective", ALL_OBJECTIVES)
def test_every_objective_trains_every_parameter(objective, pe):
    """Below 1e-9 are those that softmax cancels: theta_1, a row of a table. Unused heads show."""
    # tupe's [CLS] sees no position in the last layer
    model = louder(pretraining(objective, pe, pos_rate=0.4, n_layer=2), 5)
    model(model.corrupt(packed_rows(), 0))[0].backward()
    small = [
        name for name, p in model.named_parameters() if p.grad is None or p.grad.abs().max() < 1e-9
    ]
    assert small == []
    if pe == "tupe_r" and "pplm" in objective:
        table = model.encoder.pe.parts["tupe_r"].positions.table.weight
        assert table.grad[-1].abs().max() > 1e-9, "theta_2 learns"


@pytest.mark.parametrize("objective", [slow("clm"), "pplm", slow("nsp+mlm+pplm_some+tc")])
def test_objectives_compile_without_graph_breaks(objective):
    torch._dynamo.reset()
    model, tokens, batch = corrupted(objective, "tupe_r", double=False)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    close(compiled(batch)[0], model(batch)[0], 1e-5)
    compiled(batch)[0].backward()


def enumerated_baselines(n, k):
    """Every selection, every permutation, every pair: what each reader knows, and what was true."""
    known = defaultdict(lambda: defaultdict(Counter))
    for chosen in combinations(range(n), k):
        for order in permutations(chosen):
            at = {i: i for i in range(n)} | dict(zip(chosen, order))  # given places
            moved = tuple(i for i in at if at[i] != i)
            for i, j in permutations(range(n), 2):
                facts = {
                    "prior": (),
                    "copy": (at[i], at[j]),
                    "selected": (chosen, at[i], at[j]),
                    "moved": (moved, at[i], at[j]),
                }
                if {i, j} & set(chosen):
                    shown = [None if x in chosen else x for x in (i, j)]
                    facts["free_slots"] = (chosen, *shown)
                if {i, j} <= set(moved):
                    facts["some_moved"] = facts["moved"]
                for reader, fact in facts.items():
                    known[reader][fact][j - i] += 1
                known["binary"][()][at[j] - at[i] == j - i] += 1
    found = {}
    for reader, tables in known.items():
        loss = sum(-c * math.log(c / t.total()) for t in tables.values() for c in t.values())
        found[reader] = loss / sum(t.total() for t in tables.values())
    return found


@pytest.mark.parametrize("n, k", [(6, 4), (7, 4), (6, 2), (7, 2), (5, 5)])
def test_baselines_equal_an_enumeration(n, k):
    ours = baselines.position_baselines(n + 2, k / n)
    for reader, loss in enumerated_baselines(n, k).items():
        assert ours[reader] == pytest.approx(loss, abs=0.02 if reader == "moved" else 0.005)


@pytest.mark.parametrize(
    "L, rate, copy, selected, moved, some_moved, binary",
    [
        (32, 0.6, 3.553, 2.788, 2.607, 3.828, 0.483),
        (64, 0.6, 4.198, 3.387, 3.290, 4.600, 0.465),
        slow(128, 0.6, 4.841, 4.017, 3.963, 5.324, 0.446),
        (64, 0.15, 1.619, 0.629, 0.504, 3.593, 0.554),
    ],
)
def test_baselines_of_the_design(L, rate, copy, selected, moved, some_moved, binary):
    """At real sizes; the figures are of two simulations that knew nothing of the formulas."""
    ours = baselines.position_baselines(L, rate)
    expected = dict(copy=copy, selected=selected, moved=moved, some_moved=some_moved, binary=binary)
    assert {name: ours[name] for name in expected} == pytest.approx(expected, abs=0.01)


@pytest.mark.parametrize("objective", ["mlm+pplm", "taco", "taco+pplm", "nsp+mlm+pmlm", "clm+tc"])
def test_a_sum_is_the_sum_of_its_parts(objective):
    model, tokens, batch = corrupted(objective, "tupe_r")
    total, scalars = model(batch)
    close(total, sum(scalars[name] for name in model.names), 1e-5)
    hidden = model.encoder(batch["tokens"], batch.get("pos"), causal=objective == "clm+tc")
    for name in model.names:
        alone, _ = model.objectives[name].loss(model.encoder, hidden, batch)
        close(alone, scalars[name], 1e-5)
    assert (batch["tokens"] != tokens).any() or "clm" in objective
    assert ("pos" in batch) == ("pmlm" in objective or "pplm" in objective)


class SentenceOrder(objectives.Objective):
    """As a student adds it: the halves of some rows change places, and nothing else is done."""

    kind = "sentence"

    def corrupt(self, batch, generator):
        tokens = batch["tokens"]
        swapped = torch.cat((tokens[:, :1], tokens[:, 6:-1], tokens[:, 1:6], tokens[:, -1:]), 1)
        batch["tokens"] = torch.where(
            (torch.arange(len(tokens)) % 2 == 0)[:, None], swapped, tokens
        )

    def loss(self, encoder, hidden, batch):
        return 0 * hidden.sum(), {}


def legal_objectives():
    """All sums of two, and each alone."""
    names = [*objectives.OBJECTIVES, "sop"]
    for first, second in [*combinations(names, 2), *((name, "") for name in names)]:
        with contextlib.suppress(ValueError):
            yield objectives.parse_objective(f"{first}+{second}".rstrip("+"))


def test_sums_of_objectives(monkeypatch):
    """Two by two: where no token objective has selected, the encoder sees what is asked for; a
    sentence objective's rows are the text of the others, whoever wrote it."""
    monkeypatch.setitem(objectives.OBJECTIVES, "sop", SentenceOrder)
    sums = {"+".join(names) for names in legal_objectives()}
    assert {"sop+mlm", "nsp+mlm", "mlm+pplm", "mlm+tc", "sop+pmlm"} <= sums and len(sums) > 35
    tokens = packed_rows(8)
    for name in sums:
        model = pretraining(name)
        batch = model.corrupt(tokens, 0)
        untouched = ~batch.get("mlm_masked", torch.zeros_like(batch["eligible"]))
        assert (batch["tokens"] == batch["original"])[untouched].all(), name
        assert torch.equal(batch["eligible"], batch["original"] < CLS), name
        if "mlm" in model.names:
            slots, valid = batch["mlm_slots"], batch["mlm_weight"]
            there = batch["original"].gather(1, slots) == batch["mlm_target"]
            assert there[valid].all(), name
        loss, _ = model(batch)
        assert loss.isfinite(), name


def test_weights_follow_the_spelling():
    cfg = ObjectiveConfig("pplm+taco", loss_weights=(2.0, 1.0, 0.5))
    assert cfg.objective == "mlm+pplm+tc" and cfg.loss_weights == (1.0, 2.0, 0.5)
    model, _, batch = corrupted("pplm+taco", loss_weights=(2.0, 1.0, 0.5))
    total, parts = model(batch)
    close(total, parts["mlm"] + 2 * parts["pplm"] + 0.5 * parts["tc"], 1e-5)


def test_parts_draw_from_their_own_streams():
    (both, _, one), (_, _, other) = corrupted("pplm+mlm"), corrupted("mlm")
    assert both.names == ["mlm", "pplm"], "the order of corruption does not depend on the spelling"
    assert torch.equal(one["tokens"], other["tokens"])


@pytest.mark.parametrize(
    "objective, key",
    [
        ("mlm", "tokens"),
        ("pmlm", "pos"),
        ("pplm", "pos"),
        ("tc", "tc_candidates"),
        ("nsp", "tokens"),
        ("nsp+mlm+pplm+tc", "tokens"),
    ],
)
def test_corruption_is_a_pure_function(objective, key):
    model, tokens = pretraining(objective), packed_rows()
    clean = tokens.clone()
    one = model.corrupt(tokens, 7, 100, 0)
    torch.manual_seed(99)
    two = model.corrupt(tokens, 7, 100, 0)
    assert all((one[name] == two[name]).all() for name in one) and (tokens == clean).all()
    assert all(
        (model.corrupt(tokens, *other)[key] != one[key]).any()
        for other in ((8, 100, 0), (7, 101, 0), (7, 100, 1))
    )


def test_scheme_weights_of_the_pair_head_start_xavier():
    torch.manual_seed(0)
    head = (
        Pretraining(Encoder(EncoderConfig(vocab_size=VOCAB)), ObjectiveConfig("pplm"))
        .objectives["pplm"]
        .head
    )
    assert abs(head.query.weight.std() - math.sqrt(2 / 256)) < 5e-3


@pytest.mark.parametrize(
    "change, says",
    [
        (dict(objective="foo"), "choose from mlm"),
        (dict(objective="pmlm+pplm_some"), "at most one position"),
        (dict(objective="mlm+clm"), "at most one token"),
        (dict(objective="clm+pplm"), "neither positions nor nsp"),
        (dict(mask_rate=0.0), r"in \(0, 1\)"),
        (dict(pos_rate=float("nan")), r"in \(0, 1\)"),
        (dict(mlm_on="most"), "choose from masked, all"),
        (dict(pair_loss="wasserstein"), "pair_loss is for pmlm, pplm, pplm_some;"),
        (dict(objective="tc", tc_embedding="original"), "tc_embedding original needs mlm"),
        (dict(objective="tc", tc_window=4), "odd"),
        (dict(objective="tc", tc_negatives=2**62), r"in \[1, 1e5\]"),
        (dict(objective="taco", loss_weights=(1.0,)), "wants 2"),
    ],
)
def test_bad_objectives_are_refused(change, says):
    refuses(says, ObjectiveConfig, **change)


def test_rows_too_short_are_refused():
    refuses("fewer than 2", pretraining, "pplm", L=4, pos_rate=0.5)
    refuses("selects none", pretraining, "mlm", L=4)
    for objective, rows in (("tc", 1), ("nsp", 3)):
        refuses(f"needs {rows + 1} rows", pretraining(objective).corrupt, packed_rows()[:rows], 0)


# ==================================================================================================
# train.py and common.py

TINY = shlex.split(
    "--n_layer 1 --n_head 2 --d_model 16 --d_ff 32 --block_size 16 --batch_size 4 "
    "--warmup 2 --device cpu --log_every 3 --save_every 0"
)


def train_flags(corpus_file, cache, out, *flags):
    data_flags = "--dataset", corpus_file, "--tokenizer", "bpe", "--cache", cache
    return [*data_flags, "--out_dir", str(out), *TINY, *flags]


def run_train(corpus_file, cache, out, *flags):
    train.main(train_flags(corpus_file, cache, out, *flags))


@pytest.fixture
def run(corpus_file, cache, tmp_path):
    """run("a", "--steps 3"): train in tmp_path / "a"."""

    def run(name, *flags):
        run_train(corpus_file, cache, tmp_path / name, *shlex.split(" ".join(map(str, flags))))

    return run


def read(file):
    """What a JSON file holds; NaN is no JSON."""
    return json.loads(file.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is none"))


def log_of(folder):
    return [json.loads(line) for line in open(folder / "log.jsonl")]


def weights(folder, name="ckpt.pt"):
    return torch.load(Path(folder) / name, weights_only=True)


def same_weights(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def test_presets_are_whole_and_legal():
    for name, preset in train.PRESETS.items():
        args = train.parse_args(["--preset", name])
        assert all(getattr(args, key) == value for key, value in preset.items())
        assert {"dataset", "tokenizer", "lr", "beta1", "mask_rate", "n_head"} <= preset.keys()
        common.pick_fields(EncoderConfig, args, max_len=args.block_size)
    assert train.parse_args([]).preset == "demo" and train.parse_args(["--lr", "1"]).lr == 1


def test_defaults_are_the_demo():
    demo, cfg = train.PRESETS["demo"], EncoderConfig()
    assert (cfg.n_layer, cfg.n_head, cfg.d_model, cfg.d_ff, cfg.max_len) == tuple(
        demo[k] for k in ("n_layer", "n_head", "d_model", "d_ff", "block_size")
    )


def test_every_flag_is_in_the_help_with_its_range(said):
    assert exit_code(train.parse_args, ["--help"]) == 0
    text = " ".join(said().split())
    for name in [*PE_NAMES, *OBJECTIVES, *train.PRESETS]:
        assert re.search(rf"[ :]{re.escape(name)}[, ]", text), name
    configs = (train.TrainConfig, EncoderConfig, ObjectiveConfig, data.DataConfig)
    flags = common.defaults(*configs)
    assert all(re.search(f"--{name}[ ,]", text) for name in flags)
    assert vars(train.parse_args([])).keys() == flags.keys() | {"given"}
    # What has no text is no flag: these follow from others.
    assert {"vocab_size", "max_len", "attn_dropout", "norm_eps"}.isdisjoint(flags)


def test_the_rate_that_is_logged_was_used(run, tmp_path, monkeypatch):
    """Linear warm-up, linear decay; the last update still has a rate."""
    used, step = [], train.step_or_skip
    monkeypatch.setattr(
        train,
        "step_or_skip",
        lambda parameters, optimizer, scaler: (
            used.append(float(optimizer.param_groups[1]["lr"]))
            or step(parameters, optimizer, scaler)
        ),
    )
    run("run", "--steps 10 --warmup 4 --lr 0.1 --log_every 1")
    logged = [row["lr"] for row in log_of(tmp_path / "run")[1:]]
    assert (
        logged
        == used
        == pytest.approx(
            [0.025, 0.05, 0.075, 0.1, 0.1, 0.0833333, 0.0666667, 0.05, 0.0333333, 0.0166667],
            abs=1e-6,
        )
    )


@pytest.mark.parametrize(
    "card, built, runs",
    [
        ((7, 0), ["sm_75", "sm_80", "sm_90", "compute_90"], False),
        ((9, 0), ["sm_80", "sm_90a"], True),
        ((12, 0), ["sm_80", "compute_90"], True),
        ((9, 0), ["gfx90a", "gfx942"], True),
    ],
)
def test_a_card_without_kernels_is_noticed(card, built, runs):
    assert common.has_kernels(*card, built) is runs


@pytest.mark.parametrize(
    "gain, dtype, why",
    [
        (1.9, torch.bfloat16, "bf16 products are 1.9 times as fast here"),
        (1.1, torch.float32, "bf16 is hardly faster on this CPU"),
        (0.5, torch.float32, "bf16 is slower on this CPU"),
    ],
)
def test_a_cpu_takes_bf16_where_it_is_faster(gain, dtype, why, monkeypatch):
    """Whatever units it has. Every second product in bf16 is disturbed; the best counts."""
    cpu = torch.device("cpu")
    seconds = {torch.float32: itertools.cycle([gain]), torch.bfloat16: itertools.cycle([1, 5])}
    monkeypatch.setattr(common, "product_seconds", lambda dtype: next(seconds[dtype]))
    monkeypatch.setattr(common, "bf16_gain", common.bf16_gain.__wrapped__)  # not remembered
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    assert common.pick_dtype(cpu) == (dtype, why)
    assert common.pick_dtype(cpu, "bfloat16") == (torch.bfloat16, "asked for")
    for units in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"):
        monkeypatch.setattr(torch.cpu, units, lambda: False)
    assert common.pick_dtype(cpu)[0] == torch.float32


def test_more_processes_than_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", "2")
    refuses("finds 2 GPUs", common.pick_device, "cuda")


def test_cudnns_attention_is_switched_off(monkeypatch):
    """pytorch#196678: NaN in q's gradient."""
    for name, value in {
        "is_available": True,
        "device_count": 1,
        "set_device": None,
        "get_device_capability": (9, 0),
        "get_arch_list": ["sm_90"],
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda *args, value=value: value)
    torch.backends.cuda.enable_cudnn_sdp(True)
    assert common.pick_device("cuda").type == "cuda"
    assert not torch.backends.cuda.cudnn_sdp_enabled()


@pytest.mark.parametrize(
    "name, expected",
    [
        ("Tesla V100-SXM2-16GB", 125e12),
        ("Tesla V100-PCIE-16GB", 112e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
    ],
)
def test_peak_of_a_card(name, expected, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert common.peak_flops(torch.device("cuda")) == expected


def test_each_part_is_set_beside_its_own_baselines():
    one = {"val_loss": 4.5, "val_pplm": 4.5}
    assert train.passed(one, {"prior": 4.6, "uniform": 4.8}) == " (0.100 below prior)"
    both = {"mlm.uniform": 9.0, "mlm.unigram": 6.7, "pplm.uniform": 4.8, "pplm.prior": 4.6}
    two = {"val_loss": 11.0, "val_mlm": 6.5, "val_pplm": 4.7}
    assert train.passed(two, both) == " (0.200 below mlm.unigram, 0.100 below pplm.uniform)"
    words, pairs = train.learned(two, both)
    assert "mlm loses 6.50 nats a word" in words and "how frequent words are (6.70)" in words
    assert "not yet better" not in words
    assert "; better than knowing only which answers there are (4.80)" in pairs
    assert "; not yet better than knowing only how frequent each distance is (4.60)" in pairs
    assert train.passed({"val_loss": 15.0, "val_mlm": 9.5, "val_pplm": 5.0}, both) == ""


# ----- the optimiser's step


def stepper(model, dtype=torch.float32):
    """The arguments of step_or_skip, as train.py makes them."""
    optimizer = train.make_optimizer(model, train.parse_args([]), torch.tensor(0.1))
    scaler = torch.amp.GradScaler("cpu", enabled=dtype == torch.float16)
    return list(model.parameters()), optimizer, scaler


def test_weight_decay_spares_vectors():
    matrices, vectors = stepper(pretraining(double=False))[1].param_groups
    assert all(p.dim() >= 2 for p in matrices["params"]) and matrices["weight_decay"] == 0.01
    assert all(p.dim() < 2 for p in vectors["params"]) and vectors["weight_decay"] == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_a_bad_gradient_skips_the_update(dtype):
    """And a good one is what AdamW does with the clipped gradient. fp16: the scale is halved."""
    model = pretraining(double=False)
    parameters, optimizer, scaler = stepper(model, dtype)
    batch, before = model.corrupt(packed_rows(), 0), copy.deepcopy(model.state_dict())
    scaler.scale(model(batch)[0]).backward()
    parameters[0].grad[0, 0] = float("inf")
    scale = scaler.get_scale()
    assert fast.step_or_skip(parameters, optimizer, scaler) == 1
    assert same_weights(before, model.state_dict())
    assert dtype == torch.float32 or scaler.get_scale() == scale / 2
    scaler.scale(model(batch)[0]).backward()
    assert fast.step_or_skip(parameters, optimizer, scaler) == 0 and parameters[0].grad is None
    assert all(state["step"] == 1 for state in optimizer.state.values())
    twin = pretraining(double=False)
    parameters, optimizer, _ = stepper(twin)
    twin(batch)[0].backward()
    torch.nn.utils.clip_grad_norm_(parameters, 1.0)
    optimizer.step()
    close(list(model.parameters()), list(twin.parameters()), 1e-5)


def test_clipping_is_of_the_global_norm():
    seen, (parameters, optimizer, scaler) = [], stepper(pretraining(double=False))
    for p in parameters:
        p.grad = torch.ones_like(p)
    optimizer.step = lambda: seen.extend(p.grad.norm() for p in parameters)
    fast.step_or_skip(parameters, optimizer, scaler)
    assert abs(torch.stack(seen).norm() - 1) < 1e-4


def poisoned(monkeypatch, bad):
    """Pretraining.forward, whose loss is infinite at the calls in `bad`."""
    real, calls = Pretraining.forward, itertools.count()

    def forward(self, batch):
        loss, scalars = real(self, batch)
        infinite = torch.is_grad_enabled() and next(calls) in bad
        return loss * (math.inf if infinite else 1), scalars

    monkeypatch.setattr(Pretraining, "forward", forward)


def test_training_that_breaks_down_stops(run, tmp_path, monkeypatch, capsys):
    poisoned(monkeypatch, {7})
    assert exit_code(run, "run", "--steps 30 --eval_every 5") == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert "not finite near step 9" in error and "after the last checkpoint" in error
    assert weights(tmp_path / "run")["step"] == 5


def test_the_scaler_skips_and_goes_on(run, tmp_path, monkeypatch, capsys):
    """fp16's path, on a CPU: an overflow is normal and advances no schedule; ten in a row stop."""
    real = common.pick_dtype
    monkeypatch.setattr(
        common,
        "pick_dtype",
        lambda device, name: real(device, name) if name == "float32" else (torch.float16, "tried"),
    )
    poisoned(monkeypatch, {2, 3})
    flags = "--steps 12 --log_every 1 --eval_every 6"
    run("run", flags)
    end = weights(tmp_path / "run")
    assert end["done"] == 10 and end["step"] == 12 and end["scaler"]["scale"] == 2**14
    rates = [row["lr"] for row in log_of(tmp_path / "run")[1:]]
    assert rates[2] == rates[3] == rates[4] > rates[5]
    for more in ("--dtype float32", ""):  # resumed under another --dtype, and back
        shutil.copy(tmp_path / "run" / "ckpt_prev.pt", tmp_path / "run" / "ckpt.pt")
        run("run", flags, "--resume", more)
        assert weights(tmp_path / "run")["done"] == 10
    poisoned(monkeypatch, set(range(4, 30)))
    assert exit_code(run, "ten", "--steps 30") == 1
    assert "not finite near step 15" in capsys.readouterr().err


@pytest.mark.parametrize("objective", ["mlm", "pplm", "mlm+pplm"])
def test_accumulation_is_the_mean_of_its_micro_batches(
    run, objective, corpus, tmp_path, monkeypatch
):
    """The gradients that the loop hands to the optimiser, before clipping, against the mean of both
    losses."""
    seen, models = [], []

    def caught(parameters, optimizer, scaler):
        seen.append([p.grad.clone() for p in parameters])
        optimizer.zero_grad()
        return torch.zeros(())

    monkeypatch.setattr(train, "step_or_skip", caught)
    monkeypatch.setattr(
        train, "Pretraining", lambda *args: models.append(Pretraining(*args)) or models[-1]
    )
    flags = "--grad_accum 2 --dropout 0 --dtype float32 --pe tupe_r --steps 4 --log_every 1"
    run("run", flags, "--objective", objective)
    model = models[-1]
    batches, losses = data.Batches(corpus, 16, 1337), []
    for micro in (0, 1):
        rows = torch.from_numpy(batches(3 * 2 + micro, 4))
        losses.append(model(model.corrupt(rows, 1337, 3, micro))[0])
    (sum(losses) / 2).backward()
    assert log_of(tmp_path / "run")[-1]["loss"] == pytest.approx(sum(losses).item() / 2, abs=1e-5)
    close(seen[3], [p.grad for p in model.parameters()], 1e-6)


# ----- runs


def test_run_learns_logs_and_saves(run, tmp_path, said):
    folder = tmp_path / "run"
    run(folder, "--steps 60 --lr 0.01 --eval_every 30 --keep_every 20")
    first, *lines = log_of(folder)
    assert first["baselines"].keys() == {"uniform", "unigram"} and first["config"]["d_model"] == 16
    assert {"step", "loss", "lr", "ms_per_step", "tokens_per_s"} <= lines[0].keys()
    evaluated = [line for line in lines if "val_loss" in line]
    assert [line["step"] for line in evaluated] == [30, 60]
    assert evaluated[-1]["val_loss"] < lines[0]["loss"] - 1
    names = "ckpt.pt ckpt_prev.pt ckpt_20.pt ckpt_40.pt ckpt_60.pt config.json tokenizer.json .lock"
    assert {file.name for file in folder.iterdir()} == {*names.split(), "log.jsonl"}
    out = said()
    assert "what it learned: mlm loses" in out and "--preset paper" in out.splitlines()[-1]
    encoder = load(folder)
    words = encoder.tokenizer.encode_ordinary("the fox")
    assert not encoder.training and encoder.tokenizer.decode(words) == "the fox"
    assert not any(key.startswith("_orig_mod") for key in weights(folder)["model"])


@pytest.mark.parametrize(
    "pe, objective",
    [("tupe_r", "pplm"), slow("abs", "mlm"), slow("rel", "clm+tc"), slow("t5", "nsp+mlm+pmlm")],
)
def test_resume_is_bit_exact(run, tmp_path, pe, objective):
    flags = f"--pe {pe} --objective {objective} --steps 12 --eval_every 6 --grad_accum 2 "
    flags += "--keep_every 6 --dropout .1"
    run("whole", flags)
    (tmp_path / "cut").mkdir()
    os.link(tmp_path / "whole" / "ckpt_6.pt", tmp_path / "cut" / "ckpt.pt")
    # A damaged log never stops a resume.
    (tmp_path / "cut" / "log.jsonl").write_bytes(b'{}\n{"step": 3}\n\xff\xfe\n7\n{"step": 9}\n{"st')
    run("cut", flags, "--resume")
    a, b = weights(tmp_path / "whole"), weights(tmp_path / "cut")
    assert a["step"] == b["step"] == 12 and same_weights(a["model"], b["model"])
    assert [row["step"] for row in log_of(tmp_path / "cut")[1:]] == [3, 9, 12]


def test_resume_without_the_text(tmp_path, cache, said):
    """What lies prepared is enough: the file may be gone, or have another name."""
    text, out = write_corpus(tmp_path / "text.jsonl", 40), tmp_path / "run"
    run_train(text, cache, out, "--steps", "3")
    os.remove(text)
    run_train(text, cache, out, "--steps", "3", "--resume")
    assert "resumed at step 3" in said()
    tokens = log_of(out)[0]["data"]["tokens"]
    run_train(f"{tmp_path}/./text.jsonl", cache, out, "--steps", "3", "--resume")
    assert log_of(out)[0]["data"]["tokens"] == tokens


def test_baselines_are_kept(run, tmp_path, monkeypatch):
    """A run that goes on does not compute them again."""
    run("run", "--objective pplm --steps 3")
    monkeypatch.setattr(train, "baselines", failing(RuntimeError("again")))
    run("run", "--objective pplm --steps 3 --resume")
    assert {"prior", "copy"} <= log_of(tmp_path / "run")[0]["baselines"].keys()


def test_signals_are_given_back(run, monkeypatch):
    """In a notebook the next Ctrl-C is the user's again, whether a run ended well or broke."""
    before = signal.getsignal(signal.SIGINT)
    during = []
    at_steps(monkeypatch, lambda step: during.append(signal.getsignal(signal.SIGINT)))
    run("run", "--steps 3")
    assert during[0] != before and signal.getsignal(signal.SIGINT) == before
    poisoned(monkeypatch, {1})
    assert exit_code(run, "broken", "--steps 3") == 1
    assert signal.getsignal(signal.SIGINT) == before


def test_the_hint_keeps_what_was_asked_for(said):
    args = train.parse_args("--pe tupe_r --pos_rate .15 --objective pplm --steps 3".split())
    train.say_goodbye(args, Path("run"), {}, {}, 60)
    assert "train.py --pe tupe_r --pos_rate 0.15 --objective pplm --preset paper" in said()


def test_resume_refuses_another_run(run, tmp_path, capsys):
    run("run", "--steps 3")
    for flags, says in (
        ("--steps 3", "--resume"),
        ("--steps 4 --resume", "--steps was 3, is 4"),
        ("--steps 3 --resume --pe t5", "--pe was abs, is t5"),
    ):
        assert says in one_line(capsys, run, "run", flags)
    old = weights(tmp_path / "run")  # a run older than a flag: it had its default
    del old["args"]["pair_from"]
    torch.save(old, tmp_path / "run" / "ckpt.pt")
    run("run", "--steps 3 --resume")


# Losses of ten float32 steps on one thread. Who changes what is computed sees it here, not in the
# next table. To make them anew: python test_all.py --golden
# fmt: off
GOLDEN = {
    ("abs", "mlm"):
        [8.9431, 8.9871, 8.9103, 8.8519, 8.8191, 8.8053, 8.8412, 8.7729, 8.7058, 8.8669],
    ("tupe_r", "pplm"):
        [3.4443, 3.4427, 3.4241, 3.4143, 3.4088, 3.3915, 3.4011, 3.3912, 3.3949, 3.3794],
    ("rel", "taco"):
        [22.8899, 22.0832, 19.6027, 20.9236, 19.4965, 19.4211, 19.4121, 18.6981, 18.9097, 19.1977],
    ("rope", "clm"):
        [9.0314, 9.0127, 8.9653, 8.9551, 8.9110, 8.8663, 8.8205, 8.7984, 8.7298, 8.7819],
    ("none", "nsp+mlm"):
        [9.6478, 9.6662, 9.6867, 9.5573, 9.5712, 9.4997, 9.5618, 9.5201, 9.4926, 9.4734],
}
# fmt: on


def golden_losses(pe, objective, corpus_file, cache, out):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    flags = f"--pe {pe} --objective {objective} --steps 10 --warmup 2 --log_every 1 --dtype float32"
    run_train(corpus_file, cache, out, *shlex.split(flags), "--no-compile")
    torch.set_num_threads(threads)
    return [round(row["loss"], 4) for row in log_of(out)[1:]]


@pytest.mark.parametrize("pe, objective", GOLDEN)
def test_golden_losses(pe, objective, corpus_file, cache, tmp_path):
    found = golden_losses(pe, objective, corpus_file, cache, tmp_path / "run")
    alike(found, GOLDEN[pe, objective], 1e-3)


def print_golden():
    with tempfile.TemporaryDirectory() as folder:
        corpus = write_corpus(Path(folder) / "corpus.jsonl")
        for pe, objective in GOLDEN:
            out = Path(folder, pe)
            found = golden_losses(pe, objective, corpus, f"{folder}/cache", out)
            print(f'    ("{pe}", "{objective}"): {found},')


def at_steps(monkeypatch, does):
    """Call does(number) before each of train.py's updates."""
    real, numbers = train.step_or_skip, itertools.count(1)
    monkeypatch.setattr(train, "step_or_skip", lambda *args: does(next(numbers)) or real(*args))


def test_sigterm_saves_and_resume_goes_on(run, tmp_path, monkeypatch, said):
    at_steps(monkeypatch, lambda n: n == 4 and os.kill(os.getpid(), signal.SIGTERM))
    assert exit_code(run, "run", "--steps 9") == 143
    assert "--resume" in said().splitlines()[-1]
    assert weights(tmp_path / "run")["step"] == 4
    run("run", "--steps 9 --resume")


def test_a_second_signal_leaves_at_once(monkeypatch):
    left = []
    monkeypatch.setattr(os, "_exit", left.append)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with common.Signals() as signals:
        os.kill(os.getpid(), signal.SIGINT)
        assert signals.received == signal.SIGINT and left == []
        os.kill(os.getpid(), signal.SIGTERM)
        assert left == [143]
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
    with pytest.raises(KeyboardInterrupt):  # as ever
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(1)


def test_signals_outside_the_main_thread():
    """There Python lets nobody set a handler: train.main() in a thread runs without one."""

    def in_a_thread():
        with common.Signals() as signals:
            return signals.received

    with ThreadPoolExecutor() as pool:
        assert pool.submit(in_a_thread).result() is None


# A training whose save is cut at a chosen call: killed there, or told that the disk is full.
CUT = """
import os, signal, sys, torch
import train
how, where, which = sys.argv[1], sys.argv[2], int(sys.argv[3])
module = torch if where == "save" else os
real, calls = getattr(module, where), [0]
def cut(*args, **more):
    if where != "replace" or str(args[0]).endswith(".tmp") and "ckpt" in str(args[0]):
        calls[0] += 1
    if calls[0] == which:
        if how == "kill":
            if where == "save":
                args[1].write(b"half of a checkpoint")
                args[1].flush()
            os.kill(os.getpid(), signal.SIGKILL)
        raise RuntimeError("write failed") if where == "save" else OSError(28, "No space left")
    return real(*args, **more)
setattr(module, where, cut)
train.main(sys.argv[4:])
"""
SAVED_OFTEN = shlex.split("--steps 12 --eval_every 3 --objective taco+pplm --pe rel --dropout .1")


@pytest.fixture(scope="session")
def whole_run(corpus_file, cache, tmp_path_factory):
    """The run never stopped, for comparison."""
    folder = tmp_path_factory.mktemp("whole")
    run_train(corpus_file, cache, folder / "run", *SAVED_OFTEN)
    return weights(folder / "run")["model"]


@pytest.mark.parametrize("seconds, steps", [("0", [3, 6, 9, 10]), ("1e6", [5, 10])])
def test_saves_keep_their_distance(run, monkeypatch, seconds, steps):
    """A save takes the time of hundreds of steps on a fast card: not at every validation, but
    always where --keep_every says so, and at the end."""
    write, saved = common.write_torch, []
    monkeypatch.setattr(
        common,
        "write_torch",
        lambda file, state, *more: (saved.append(state["step"]), write(file, state, *more)),
    )
    run(
        "run",
        "--steps 10 --eval_every 3 --save_every",
        seconds,
        "--keep_every 5" if seconds == "1e6" else "",
    )
    assert saved == steps


@pytest.mark.parametrize("where, which", [slow("save", 3), slow("link", 1), ("replace", 3)])
def test_killed_inside_the_write(corpus_file, cache, tmp_path, where, which, whole_run):
    """At whatever call the process dies, there is a whole checkpoint, and the end is bit for bit
    the same."""
    flags = train_flags(corpus_file, cache, tmp_path / "run", *SAVED_OFTEN)
    dead = subprocess.run(
        [sys.executable, "-c", CUT, "kill", where, str(which), *flags],
        cwd=HERE,
        capture_output=True,
    )
    assert dead.returncode == -signal.SIGKILL, dead.stderr
    names = ("ckpt.pt", "ckpt_prev.pt")
    found = [name for name in names if (tmp_path / "run" / name).exists()]
    assert found and all(weights(tmp_path / "run", name)["step"] in (3, 6, 9) for name in found)
    train.main([*flags, "--resume"])
    assert same_weights(whole_run, weights(tmp_path / "run")["model"])
    assert not list((tmp_path / "run").glob("*.tmp")), (
        "what was aside had a name that is used again"
    )


@pytest.mark.parametrize("where, which", [("save", 3), ("fsync", 5)])  # two are of JSON files
def test_a_full_disk_is_one_line_and_loses_nothing(
    corpus_file, cache, tmp_path, where, which, monkeypatch, capsys
):
    flags = train_flags(corpus_file, cache, tmp_path / "run", *SAVED_OFTEN)
    monkeypatch.setattr(sys, "argv", ["", "full", where, str(which), *flags])
    module = torch if where == "save" else os
    monkeypatch.setattr(module, where, getattr(module, where))  # undone at the end
    error = one_line(capsys, exec, CUT, {}, code=1)
    assert error.startswith("error: ") and "the last checkpoint is of step 6" in error
    steps = [weights(tmp_path / "run", name)["step"] for name in ("ckpt.pt", "ckpt_prev.pt")]
    assert steps == [6, 3] and not list((tmp_path / "run").glob("*.tmp"))


def test_two_runs_in_one_folder(run, corpus, tmp_path, capsys):
    (tmp_path / "run").mkdir()
    with common.lock(tmp_path / "run"):
        assert "another process is training in" in one_line(capsys, run, "run", "--steps 1")
    run("run", "--steps 1")


def test_a_memory_map_cut_short_under_the_run(run, corpus, tmp_path, monkeypatch, capsys):
    copied = shutil.copytree(corpus.folder, tmp_path / "cache" / corpus.folder.name)
    at_steps(monkeypatch, lambda n: n == 4 and os.truncate(copied / "train.bin", 100))
    flags = f"--steps 50 --eval_every 3 --cache {tmp_path}/cache"
    assert exit_code(run, "run", flags) == 1
    error = capsys.readouterr().err
    assert "was cut short under the run" in error and "checkpoint is of step 3" in error


def test_out_of_memory_is_one_line(run, monkeypatch, capsys):
    monkeypatch.setattr(train, "step_or_skip", failing(torch.OutOfMemoryError("CUDA out of ..")))
    assert "lower --batch_size" in one_line(capsys, run, "run", "--steps 5", code=1)


def test_ctrl_c_while_preparing_is_one_line(run, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(data, "tokenize", failing(KeyboardInterrupt()))
    flags = "--cache", tmp_path / "cache"
    assert "interrupted" in one_line(capsys, run, "run", *flags, code=130)


# ----- several processes


def two_processes(tmp_path, patch, *flags):
    """train.py under torchrun with two processes, after a patch of its modules -> how it ended.

    In the patch, rank and step (of step_or_skip) are known, and `at_step` is called before each."""
    script = tmp_path / "patched.py"
    script.write_text(f"""
import os, signal, sys, time
sys.path.insert(0, {str(HERE)!r})
import common, train
rank, calls, real = int(os.environ["RANK"]), [0], train.step_or_skip
def at_step(step): pass
def step(*args):
    calls[0] += 1
    at_step(calls[0])
    return real(*args)
train.step_or_skip = step
{patch}
train.main()""")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2"]
    return subprocess.run(
        [*torchrun, "--standalone", script, *flags],
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
    )


SIGNAL = """
def at_step(step):
    if rank == {rank} and step == 16: os.kill(os.getpid(), signal.{name})
"""
TEN = shlex.split("--eval_every 10 --log_every 10 --steps 30 --objective")


@pytest.mark.slow
def test_a_rank_that_dies_takes_the_others_down(corpus_file, cache, corpus, tmp_path):
    flags = train_flags(corpus_file, cache, tmp_path / "run", *TEN, "clm+tc")
    dead = two_processes(tmp_path, SIGNAL.format(rank=1, name="SIGKILL"), *flags)
    assert dead.returncode != 0 and "Signal 9 (SIGKILL)" in dead.stderr
    assert weights(tmp_path / "run")["step"] == 10
    train.main([*flags, "--resume", "--grad_accum", "2"])  # one process may go on for the two
    assert weights(tmp_path / "run")["step"] == 30


@pytest.mark.slow
def test_a_signal_to_one_rank_stops_all_and_saves(corpus_file, cache, corpus, tmp_path):
    """torchrun ends the others as soon as one has left: none leaves before a slow save is done. Our
    last line says how to go on."""
    flags = train_flags(corpus_file, cache, tmp_path / "run", *TEN, "mlm+pmlm")
    slow = """
save = common.write_torch
def write_torch(*args):
    time.sleep(2)
    save(*args)
common.write_torch = write_torch"""
    stopped = two_processes(tmp_path, SIGNAL.format(rank=0, name="SIGTERM") + slow, *flags)
    assert stopped.returncode != 0 and "stopped at step 20" in stopped.stdout.splitlines()[-1]
    assert "--resume" in stopped.stdout.splitlines()[-1]
    assert weights(tmp_path / "run")["step"] == 20


# Destructors of gloo can hang, however late (pytorch#190489): when all is saved and all have met,
# each process leaves without them.
LEAVES = """
order = []
for name in ("all_reduce", "barrier"):
    call = getattr(train.dist, name)
    setattr(train.dist, name, lambda *a, n=name, c=call, **k: order.append(n) or c(*a, **k))
train.dist.destroy_process_group = lambda *args: order.append("destroyed")
save, leave = common.write_torch, os._exit
common.write_torch = lambda *args: order.append("saved") or save(*args)
def left(code):
    os.write(1, f"ORDER {rank} {code} {' '.join(order[-2:])}\\n".encode())      # in one piece
    leave(code)
os._exit = left
"""


@pytest.mark.slow
def test_two_processes_equal_accumulation(corpus_file, cache, tmp_path):
    """torchrun with two gloo processes: the weights of one with twice the accumulation."""
    flags = shlex.split("--steps 3 --dropout 0 --dtype float32 --objective nsp+taco+pplm --pe rel")
    run_train(corpus_file, cache, tmp_path / "one", *flags, "--grad_accum", "2")
    flags = train_flags(corpus_file, cache, tmp_path / "two", *flags)
    done = two_processes(tmp_path, LEAVES, *flags)
    assert done.returncode == 0, done.stderr
    ends = sorted(re.findall(r"ORDER \d \d \w+ \w+", done.stdout))
    assert ends == ["ORDER 0 0 saved barrier", "ORDER 1 0 all_reduce barrier"]
    close(weights(tmp_path / "one")["model"], weights(tmp_path / "two")["model"], 1e-6)
    a, b = log_of(tmp_path / "one")[-1], log_of(tmp_path / "two")[-1]
    for key in ("loss", "val_loss", "nsp", "mlm", "tc", "pplm"):
        assert abs(a[key] - b[key]) < 1e-5, f"{key} is the mean over all processes"


@pytest.mark.slow
def test_resuming_without_a_shared_disk(run, corpus_file, tmp_path):
    """Two machines, each with a folder and a cache of its own: the first one's checkpoint counts
    for both."""
    flags = shlex.split("--steps 6 --dropout 0 --dtype float32 --eval_every 3 --keep_every 3")
    run("run0", *flags, "--grad_accum 2")
    own = f"""
os.environ["LOCAL_RANK"] = "0"                  # the first of its machine
sys.argv += ["--out_dir", {str(tmp_path)!r} + f"/run{{rank}}", "--cache",
             {str(tmp_path)!r} + f"/cache{{rank}}"]"""
    whole = weights(tmp_path / "run0")["model"]
    shutil.copy(tmp_path / "run0" / "ckpt_3.pt", tmp_path / "run0" / "ckpt.pt")
    again = two_processes(tmp_path, own, *train_flags(corpus_file, "", "", *flags, "--resume"))
    assert again.returncode == 0 and "resumed at step 3" in again.stdout, again.stderr
    close(weights(tmp_path / "run0")["model"], whole, 1e-6)
    assert {folder.name for folder in tmp_path.glob("*[01]")} == {"run0", "cache0", "cache1"}


# ----- mistakes


@pytest.mark.parametrize(
    "flags, says",
    [
        ("--pe foo", "tupe_r"),
        ("--lr nan", "--lr"),
        ("--block_size 3", "--block_size"),
        ("--d_model 10 --n_head 3", "n_head"),
        ("--dataset no/such/*.jsonl", "matches"),
        ("--block_size 4000", "too few for one row"),
        ("--dtype float16", "float16"),
        ("--data_fraction .0001", "too few"),
        # Sizes beyond reason: the limit is named, and memory is estimated before it is asked for.
        ("--d_model 1000000000", "[1, 1e5]"),
        ("--d_model 65536 --d_ff 1000000 --n_head 1 --n_layer 100", "G parameters take"),
        ("--batch_size 100000 --block_size 50000", "too much for one micro-batch"),
        ("--steps 1e22", "invalid int value"),
        (f"--pe {'x' * 5000}", "unknown pe"),
    ],
)
def test_mistakes_are_one_line_and_exit_2(corpus, run, tmp_path, capsys, monkeypatch, flags, says):
    monkeypatch.setattr(sys, "argv", shlex.split(flags))  # what it shortens in messages
    began, error = time.time(), one_line(capsys, run, "run", flags)
    assert says in error and len(error) < 1000 and time.time() - began < 60
    assert not (tmp_path / "run").exists(), "nothing half-written"


@pytest.mark.parametrize(
    "flags, says",
    [
        ("--pe rope --objective pmlm", "unknown"),
        ("--objective pplm --pair_scores content", "content"),
        ("--objective tc --batch_size 1", "--batch_size 2"),
        ("--init_from nowhere", "no checkpoint"),
        ("--objective pplm --block_size 4 --pos_rate .3", "fewer than 2"),
    ],
)
def test_mistakes_show_before_data_are_prepared(tmp_path, capsys, monkeypatch, flags, says):
    """Wikipedia would take hours."""
    monkeypatch.setattr(train, "prepare", lambda **settings: pytest.fail("too late"))
    flags += f" --preset paper --device cpu --out_dir {tmp_path}/run"
    assert says in one_line(capsys, train.main, shlex.split(flags))


def test_a_folder_that_cannot_be(run, tmp_path, capsys, said):
    (tmp_path / "file").write_text("in the way")
    assert one_line(capsys, run, "file/run", "--steps 1").startswith("error: ")
    # Its name may have bytes that are no UTF-8.
    run(os.fsdecode(b"run-\xff"), "--steps 1")
    assert "run-" in said()


def test_what_may_surprise_is_said(run, tmp_path, capsys, said):
    flags = "run", "--resume --steps 2"
    run(*flags, "--warmup 2")
    out = said()
    assert "no checkpoint in" in out and "starts at step 0" in out and "the rate only rises" in out
    (tmp_path / "run" / "ckpt.pt").rename(tmp_path / "run" / "ckpt_prev.pt")
    assert "ckpt_prev.pt, the one before: rename it" in one_line(capsys, run, *flags)


def test_a_rate_without_its_objective_is_noted(said):
    """Who uses a setting is known from the objectives themselves."""
    train.parse_args("--objective pplm --mask_rate .3".split())
    assert "--mask_rate is for mlm: it has no effect on pplm" in said()
    train.parse_args("--objective taco+pplm --mask_rate .3 --pos_rate .5".split())
    assert said() == ""
    assert objectives.users("pos_rate") == objectives.of_kind("position")


# ----- files and checkpoints


def test_what_a_json_file_must_hold(tmp_path):
    file = tmp_path / "x.json"
    for content in (b"", b"{", b"\xff\xfe", b"null", b"[]", b'{"a": 1}', b'{"a": "1", "b": "c"}'):
        file.write_bytes(content)
        refuses("x.json is damaged", common.read_json, file, a=int, b=str)
    file.write_text('{"a": 1, "b": "c"}')
    assert common.read_json(file, a=int, b=str) == {"a": 1, "b": "c"}
    file.write_bytes(b'{"a": 1}\n7\n\xff\n{"b"\n\n{"a": 2}')
    assert common.read_rows(file) == [{"a": 1}, {"a": 2}] and common.read_rows(tmp_path / "y") == []


def test_two_programs_save_in_one_folder(tmp_path, monkeypatch):
    """One writes while the other renames its link: what is aside is named after its file."""
    file, previous, replace = tmp_path / "ckpt.pt", tmp_path / "ckpt_prev.pt", os.replace
    common.write_torch(file, 1, previous)

    def while_another_writes(a, b):
        monkeypatch.setattr(os, "replace", replace)
        common.write_json(tmp_path / "other.json", {})
        replace(a, b)

    monkeypatch.setattr(os, "replace", while_another_writes)
    common.write_torch(file, 2, previous)
    assert (torch.load(file), torch.load(previous)) == (2, 1)


def test_bad_checkpoints_are_one_line(run, tmp_path):
    run("run", "--steps 3")
    good = (tmp_path / "run" / "ckpt.pt").read_bytes()
    refuses("no checkpoint at", load, tmp_path / "nowhere")
    refuses("does not fit this model", load, tmp_path / "run", d_ff=64)
    refuses(r'Missing key\(s\).* "pe.parts.t5', load, tmp_path / "run", pe="t5")
    for content in (good[: len(good) // 2], b"", b"not a checkpoint"):
        (tmp_path / "run" / "ckpt.pt").write_bytes(content)
        refuses("not a readable checkpoint", load, tmp_path / "run")
    torch.save({"some": "thing"}, tmp_path / "run" / "ckpt.pt")
    refuses("not a checkpoint of this project", load, tmp_path / "run")


@pytest.mark.slow
def test_compiled_training_agrees_with_eager(run, tmp_path):
    if not common.can_compile(torch.device("cpu")):
        pytest.skip("no C++ compiler")
    flags = "--steps 2 --dropout 0 --dtype float32 --pe rel --objective pplm"
    run("eager", flags)
    torch._dynamo.reset()
    run("compiled", flags, "--compile")
    close(weights(tmp_path / "eager")["model"], weights(tmp_path / "compiled")["model"], 1e-3)


# ----- P2's experiments


def test_embeddings_are_taken_over_and_frozen(run, tmp_path, capsys):
    def words(name, *flags):
        run(name, "--steps 3", *flags)
        return weights(tmp_path / name)["model"]["encoder.tok.weight"]

    first, taken = words("a"), f"--seed 5 --init_embeddings {tmp_path}/a"
    assert torch.equal(first, words("b", taken, "--objective taco --pe t5 --freeze_embeddings"))
    learned = words("c", taken)
    assert (learned != first).any() and (learned - first).abs().max() < 0.02
    assert "width 16, this model 32" in one_line(capsys, run, "d", taken, "--d_model 32")


# ----- warm start


def saved(model):
    return {"model": model.state_dict(), "config": dataclasses.asdict(model.encoder.config)}


@pytest.mark.parametrize("pe", ["abs", "tupe_r", "tupe_a_free", "bert_ad", "rel", "lsin+rel"])
def test_warm_start_grows_the_tables(pe):
    """With a larger max_len the model does to short rows what it did, hidden positions included;
    new rows are fresh."""
    small, large = pretraining("pplm", pe, L=12), pretraining("pplm", pe, L=20)
    done = model_module.warm_start(large, saved(small), "run")
    assert done["new"] == done["dropped"] == []
    tokens, pos = packed_rows(), torch.arange(12).expand(6, 12).clone()
    pos[2:, 4:6] = UNKNOWN_POS
    a, b = (m.encoder(tokens, pos) for m in (small, large))
    close(b, a)
    assert large.encoder(some_tokens(2, 20)).isfinite().all()
    batch, logits = {"tokens": tokens, "pos": pos}, []
    for model in (small, large):
        head = model.objectives["pplm"].head
        logits.append(head.psi(head.scores(model.encoder, model.encoder(tokens), batch)))
    # Offset r was class r + 11, and is class r + 19.
    close(logits[1][..., 8 : 8 + 23], logits[0])
    untouched = pretraining("pplm", pe, L=20).state_dict()
    for key in done["grown"]:
        assert (large.state_dict()[key] == untouched[key]).any(), f"{key}: new rows are fresh"


def test_warm_start_swaps_the_scheme():
    old, new = pretraining("mlm", "abs"), pretraining("mlm", "abs+rel")
    torch.nn.init.normal_(old.encoder.pe.parts["abs"].table.weight)
    done = model_module.warm_start(new, saved(old), "run")
    assert done["new"] == ["encoder.pe.parts.rel.table.weight"]
    assert done["dropped"] == done["grown"] == []
    assert all(torch.equal(new.state_dict()[key], value) for key, value in old.state_dict().items())
    done = model_module.warm_start(pretraining("pplm", "t5"), saved(old), "run")
    assert "encoder.pe.parts.abs.table.weight" in done["dropped"]
    assert "encoder.pe.parts.t5.table.weight" in done["new"]
    assert any(key.startswith("objectives.mlm") for key in done["dropped"])


@pytest.mark.parametrize("L", [12, 20])
def test_warm_start_with_other_classes(L):
    """A head of other classes starts fresh; nothing is copied to where it means something else."""
    for old, new in (({}, dict(pair_loss="smooth_l1")), (dict(pair_loss="smooth_l1"), {})):
        trained, fresh = pretraining("pplm", L=12, **old), pretraining("pplm", L=L, **new)
        before = copy.deepcopy(fresh.state_dict())
        done = model_module.warm_start(fresh, saved(trained), "run")
        assert done["new"] == [f"objectives.pplm.head.psi.2.{kind}" for kind in ("weight", "bias")]
        assert all(torch.equal(fresh.state_dict()[key], before[key]) for key in done["new"])


def test_warm_start_refuses_other_shapes():
    small = pretraining("mlm", "abs", L=12)
    refuses(
        "would cut",
        model_module.warm_start,
        pretraining("mlm", L=8, mask_rate=0.3),
        saved(small),
        "run",
    )
    other = saved(small)
    other["config"]["d_ff"] = 48
    refuses(
        "d_ff is 48 there and 32 here",
        model_module.warm_start,
        pretraining("mlm", "abs", L=12),
        other,
        "run",
    )


def test_init_from_tells_what_it_did(run, tmp_path, said):
    run("short", "--steps 3 --pe tupe_r")
    run("long", "--steps 3 --pe tupe_r --block_size 24 --init_from", tmp_path / "short")
    out = said()
    grown = "encoder.pe.parts.tupe_r.positions.table.weight"
    assert f"1 tensors grown: {grown}" in out and "0 tensors new" in out


# ==================================================================================================
# finetune.py


def test_metrics_equal_scikit_learn_and_scipy():
    """Also on degenerate input: one class, constant scores, ties."""
    metrics, stats = pytest.importorskip("sklearn.metrics"), pytest.importorskip("scipy.stats")
    ours, rng = {name: x.score for name, x in finetune.TASKS.items()}, np.random.default_rng(0)
    binary = [rng.integers(0, 2, 20) for _ in range(30)] + [np.zeros(20, int), np.ones(20, int)]
    for y, p in zip(binary + binary[-2:] * 2, binary[::-1] + binary[:4]):
        right = metrics.accuracy_score(y, p)
        f1 = {"accuracy": right, "f1": metrics.f1_score(y, p, zero_division=0)}
        matthews = {"matthews": metrics.matthews_corrcoef(y, p), "accuracy": right}
        assert ours["cola"](y, p) == pytest.approx(matthews, abs=1e-12)
        assert ours["mrpc"](y, p) == ours["qqp"](y, p) == pytest.approx(f1, abs=1e-12)
    for task in ("sst2", "mnli", "qnli", "rte", "wnli", "ax", "docs"):
        assert ours[task](y, p) == {"accuracy": right}
    assert type(ours["docs"](y, p)["accuracy"]) is float
    for spread in (1, 1e-150, 1e6):
        y, p = rng.integers(0, 6, 40) * spread, rng.normal(size=40).round(1)
        assert ours["stsb"](y, p) == pytest.approx(
            {"pearson": stats.pearsonr(y / spread, p)[0], "spearman": stats.spearmanr(y, p)[0]},
            abs=1e-9,
        )
    nothing = {"pearson": 0.0, "spearman": 0.0}
    assert ours["stsb"](y, [0.1] * 40) == ours["stsb"]([2.5] * 40, p) == nothing
    assert ours["stsb"](y, [math.nan] * 40) == nothing


@pytest.mark.parametrize(
    "golds, text, em, f1",
    [
        (["an owl, a fox"], "owl fox", 1, 1),
        ([], "", 1, 1),
        (["b c d"], "c", 0, 0.5),
        (["The"], "", 1, 1),
        (["c c d"], "c d d", 0, 2 / 3),
        (["$5.00"], "500", 1, 1),
        (["Café  au\tla"], "café au la", 1, 1),
    ],
)
def test_squad_metrics_on_edge_cases(golds, text, em, f1):
    assert finetune.METRICS["squad"]([golds], [text]) == pytest.approx({"em": em, "f1": f1})


# The official columns of each task's train.tsv and dev.tsv; MNLI's dev file has more labels.
OFFICIAL = {
    "cola": None,
    "sst2": "sentence label",
    "qnli": "index question sentence label",
    "mrpc": "Quality|#1 ID|#2 ID|#1 String|#2 String",
    "rte": "index sentence1 sentence2 label",
    "wnli": "index sentence1 sentence2 label",
    "qqp": "id qid1 qid2 question1 question2 is_duplicate",
    "stsb": "index genre filename year old_index source1 source2 sentence1 sentence2 score",
    "mnli": "index promptID pairID genre sentence1_binary_parse sentence2_binary_parse "
    "sentence1_parse sentence2_parse sentence1 sentence2 label1 gold_label",
}


def official_file(name, rows, end="\n", bom=False):
    """Rows of (texts, label as written) -> the bytes of an official file."""
    task = finetune.TASKS[name]
    if name == "cola":
        lines = [f"gj04\t{label}\t\t{text}" for (text,), label in rows]
    else:
        header = OFFICIAL[name].split("|" if "|" in OFFICIAL[name] else None)
        lines = ["\t".join(header)]
        for texts, label in rows:
            cells = {**dict(zip(task.texts, texts)), task.label: label}
            lines.append("\t".join(cells.get(column, "0") for column in header))
    return ("\ufeff" * bom + "".join(line + end for line in lines)).encode()


@pytest.mark.parametrize("name", OFFICIAL)
@pytest.mark.parametrize("end, bom", [("\n", False), ("\r\n", True)])
def test_readers_of_official_files(tmp_path, name, end, bom):
    """Quotes stay, and what str.splitlines takes for an end of a line."""
    task, file = finetune.TASKS[name], tmp_path / "train.tsv"
    labels = task.classes or ("0", "3.8", "5.000")
    texts = '"', "a\u2028b\x85", "", "it's \\ \x0b\x0c\x1c", "é"
    rows = [((text,) * len(task.texts), label) for text, label in zip(texts, labels * 3)]
    whole = official_file(name, rows, end, bom)
    file.write_bytes(whole)
    as_label = float if name == "stsb" else task.classes.index
    expected = [(texts, as_label(label)) for texts, label in rows]
    assert finetune.read_file(name, file, "train") == expected
    # One tab too many or too few is noticed, with the line.
    line = 3 + (name != "cola")
    for wrong in (lambda old: old.rsplit(b"\t", 1)[0], lambda old: old + b"\t"):
        lines = whole.split(end.encode())
        lines[line] = wrong(lines[line])
        file.write_bytes(end.encode().join(lines))
        says = rf"train.tsv, line {line + 1}: not \d+ columns"
        refuses(says, finetune.read_file, name, file, "train")
        assert len(finetune.read_file(name, file, "train", True)) == len(rows) - 1


def test_readers_of_malformed_files(tmp_path, said):
    file, rte = tmp_path / "train.tsv", "index\tsentence1\tsentence2\tlabel\n"
    for name, text, says in (
        ("rte", rte + "0\ta\tb\tmaybe\n", "line 2: label 'maybe' is not one of entailment"),
        ("rte", "sentence1\tlabel\na\tentailment\n", "no column sentence2, only sentence1, label"),
        ("rte", rte, "has no rows"),
        ("sst2", "sentence\tlabel\nfine\t1\nbroken\rrow\t1\n", "line 3: not 2 columns"),
        ("stsb", official_file("stsb", [("ab", "nan")]), "score nan is not in 0 .. 5"),
        ("sst2", b"sentence\tlabel\n\xff\t1\n", "can't decode byte 0xff"),
    ):
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
        refuses(says, finetune.read_file, name, file, "train")
    # QQP's known trouble: a question that goes on in the next line.
    rows = [((f"q{i}", "x" * 200_000), "1") for i in range(3)]
    file.write_bytes(official_file("qqp", rows).replace(b"q1\t", b'"q1\nmore"\t'))
    refuses("line 3: not 6 columns; --skip_bad_rows", finetune.read_file, "qqp", file, "train")
    found = finetune.read_file("qqp", file, "train", True)
    assert [texts for texts, _ in found] == [rows[0][0], rows[2][0]]
    assert "2 malformed rows left out, the first: line 3" in said()


def finetune_args(*flags):
    return finetune.parse_args(["--task", "cola", *map(str, flags)])


def test_test_files_and_optional_ones(tmp_path, said):
    args = finetune_args("--data_dir", tmp_path)
    for name, header in (
        ("cola", "index\tsentence"),
        ("ax", "index\tsentence1\tsentence2"),
        ("mrpc", "index\t#1 ID\t#2 ID\t#1 String\t#2 String"),
        ("qqp", "id\tquestion1\tquestion2"),
    ):
        task, n = finetune.TASKS[name], header.count("\t")
        lines = [header, *("\t".join([str(i), *["t"] * n]) for i in (0, 1, 7))]
        file = tmp_path / task.folder / ("diagnostic.tsv" if name == "ax" else "test.tsv")
        file.parent.mkdir()
        file.write_text("\n".join(lines))
        [(key, rows)] = finetune.read_split(name, args, "test").items()
        assert key == ("AX" if name == "ax" else task.folder)
        assert rows == [(("t",) * len(task.texts), i) for i in (0, 1, 7)]
    mnli, texts = tmp_path / "MNLI", ('A "b', "C")
    mnli.mkdir()
    for file in ("train.tsv", "dev_matched.tsv"):
        (mnli / file).write_bytes(official_file("mnli", [(texts, "contradiction")]))
    rows = [(texts, 2)]
    assert finetune.read_task("mnli", args) == (rows, {"mnli": rows})
    assert finetune.read_split("mnli", args, "test") == {}
    said = said().splitlines()
    assert [line.split(":")[0] for line in said] == ["mnli-mm", "MNLI-m", "MNLI-mm"]
    assert "not there, left out" in said[0]
    (mnli / "dev_matched.tsv").unlink()
    files = "train.tsv, dev_matched.tsv, dev_mismatched.tsv"
    refuses(f"dev_matched.tsv is not there: .* holds {files}$", finetune.read_task, "mnli", args)
    refuses("train.tsv is not there: .* train.tsv, dev.tsv", finetune.read_task, "rte", args)


def test_hub_rows(monkeypatch):
    """Every task as the hub has it, labels in the order of `classes`."""
    import datasets

    tasks = finetune.TASKS
    online(monkeypatch, False)

    def load_dataset(repo, config, split):
        asked.add((repo, config, split))
        if "squad" in repo:
            there = split == "train"
            answers = {"text": ["b"] * there, "answer_start": [2] * there}
            return [{"id": "7", "context": "a b", "question": "q", "answers": answers}]
        columns = {c: c.upper() for c in tasks[config].hub or tasks[config].texts}
        return datasets.Dataset.from_list([{**columns, "label": 1, "idx": 5}])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    asked, glue, args = set(), "nyu-mll/glue", finetune_args()
    for name in (*OFFICIAL, "squad", "squad_v2"):
        task = tasks[name]
        train, evaluations = finetune.read_task(name, args)
        if task.kind == "span":
            assert train == [(("q", "a b"), ["b"], [2], "7")]
            assert evaluations == {name: [(("q", "a b"), [], [], "7")]}
        else:
            texts = tuple(c.upper() for c in task.hub or task.texts)
            assert train == evaluations[name] == [(texts, 1)]
            for rows in finetune.read_split(name, args, "test").values():
                assert rows == [(texts, 5)]
    assert {
        (glue, "mnli", "test_mismatched"),
        (glue, "mnli", "validation_matched"),
        ("rajpurkar/squad_v2", None, "validation"),
        (glue, "stsb", "test"),
    } <= asked
    # The hub's order of classes and its names of columns, by its data cards.
    nli, rte = ("entailment", "neutral", "contradiction"), ("entailment", "not_entailment")
    assert tasks["mnli"].classes == tasks["ax"].classes == nli
    assert tasks["qnli"].classes == tasks["rte"].classes == rte
    assert tasks["mnli"].hub == ("premise", "hypothesis") and tasks["mrpc"].hub == finetune.PAIR


def squad_json(questions, version="1.1"):
    """[(id, question, context, answers)] -> SQuAD's JSON."""
    paragraphs = []
    for i, q, context, answers in questions:
        answers = [{"text": text, "answer_start": start} for text, start in answers]
        more = {"is_impossible": not answers, "plausible_answers": []} if version == "2.0" else {}
        qas = [{"id": i, "question": q, "answers": answers, **more}]
        paragraphs.append({"context": context, "qas": qas})
    return json.dumps({"version": version, "data": [{"title": "t", "paragraphs": paragraphs}]})


def test_squad_files(tmp_path, said):
    text = squad_json(
        [("1", "who?", "It's Zoë.", [("Zoë", 5), ("Zoë.", 5)]), ("2", "no?", "a\u2028b", [])], "2.0"
    )
    (tmp_path / "squad").mkdir()
    for folder in (tmp_path / "squad", tmp_path):  # in a folder of their own, or directly
        for split in ("train", "dev"):
            (folder / f"{split}-v2.0.json").write_text(text, encoding="utf-8")
    for folder in (tmp_path, tmp_path / "squad"):
        train, found = finetune.read_task("squad_v2", finetune_args("--data_dir", folder))
        questions = [
            finetune.Question(("who?", "It's Zoë."), ["Zoë", "Zoë."], [5, 5], "1"),
            finetune.Question(("no?", "a\u2028b"), [], [], "2"),
        ]
        assert found == {"squad_v2": questions} and train in (questions, questions[::-1])
    file = tmp_path / "train-v1.1.json"
    for text, says in (
        ("{", "is damaged"),
        ('{"data": [{"paragraphs": [{}]}]}', "damaged"),
        (
            squad_json([("1", "q", "a b", [("b", 1)])]),
            "question 1: its answer is not at its place.*--skip_bad",
        ),
    ):
        file.write_text(text)
        refuses(says, finetune.read_file, "squad", file, "train")
    file.write_text(squad_json([(str(i), "q", "a b", [("b", i)]) for i in (1, 2)]))
    assert [q.id for q in finetune.read_file("squad", file, "train", True)] == ["2"]
    assert "1 malformed rows left out" in said()


@pytest.mark.parametrize("content", ["{", "{}", '{"rows": [["torch", "t"]], "every": 0}'])
def test_damaged_docs_are_one_clear_line(tmp_path, monkeypatch, content):
    (tmp_path / "docs.json").write_text(content)
    monkeypatch.setattr(finetune, "prepare", lambda *args: SimpleNamespace(folder=tmp_path))
    refuses("damaged", finetune.docs_rows, "")
    monkeypatch.setattr(finetune, "prepare", lambda *args: {}["source"])  # of its meta.json
    refuses("damaged", finetune.docs_rows, "")


@pytest.fixture(scope="session")
def tokenizer(corpus):
    return encoding_of(corpus)


def test_encode_cuts_the_longest_first(tokenizer):
    cfg, short = EncoderConfig(vocab_size=8192), tokenizer.encode_ordinary("a dog")
    ids = finetune.encode(("the fox " * 30, "a dog"), tokenizer, cfg, 20)
    assert len(ids) == 20 and ids[0] == cfg.cls_id and ids[-1] == cfg.sep_id
    assert ids[-1 - len(short) : -1] == short and ids.count(cfg.sep_id) == 2
    swapped = finetune.encode(("a dog", "the fox " * 30), tokenizer, cfg, 20)
    assert len(swapped) == 20 and swapped[1 : 1 + len(short)] == short
    assert finetune.encode(("a dog",), tokenizer, cfg, 20) == [cfg.cls_id, *short, cfg.sep_id]
    assert cfg.mask_id in finetune.encode(("a [MASK] b [SEP]",), tokenizer, cfg, 30)


TEXT = st.text(
    st.one_of(st.sampled_from("the fox é漢😀\n"), st.characters(blacklist_categories=("Cs",))),
    max_size=60,
)


@given(text=TEXT)
@settings(max_examples=150, deadline=None)
def test_token_spans_cover_the_text(tokenizer, text):
    """Without a gap, holding what their tokens decode to."""
    ids, spans = finetune.token_spans(tokenizer, text)
    pieces, spans = tokenizer.decode_tokens_bytes(ids), spans.tolist()
    assert len(ids) == len(spans) and b"".join(pieces) == text.encode()
    assert all(piece in text[a:b].encode() for piece, (a, b) in zip(pieces, spans))
    assert not text or spans[0][0] == 0 and spans[-1][1] == len(text)
    assert all(b - 1 <= c <= b for (_, b), (c, _) in zip(spans, spans[1:]))


@given(
    context=TEXT,
    question=TEXT,
    length=st.integers(8, 40),
    cut=st.tuples(st.floats(0, 1), st.floats(0, 1)),
)
@settings(max_examples=150, deadline=None)
def test_squad_windows(tokenizer, context, question, length, cut):
    """They cover every token in steps of a third; a label holds the answer, as far as it can."""
    a, b = sorted(round(x * len(context)) for x in cut)
    cfg, golds = EncoderConfig(vocab_size=8192), [context[a:b]] * (a < b)
    q = finetune.Question((question, context), golds, [a] * (a < b), "1")
    ids, spans = finetune.token_spans(tokenizer, context)
    found = list(finetune.windows(3, q, tokenizer, cfg, length))
    room = length - found[0][1].offset - 1
    starts = [k * min(length // 3, room) for k in range(len(found))]
    inside = [i for i, (x, y) in enumerate(spans.tolist()) if golds and y > a and x < b]
    for ((row, label), window), start in zip(found, starts):
        part, offset = ids[start : start + room], window.offset
        assert row[offset - 1 :] == [cfg.sep_id, *part, cfg.sep_id] and row[0] == cfg.cls_id
        assert (window.spans == spans[start : start + room]).all() and len(part) == len(
            window.spans
        )
        assert window.question == 3 and len(row) <= length
        if not (inside and start <= inside[0] and inside[-1] < start + len(part)):
            assert label == (0, 0)
            continue
        assert label == (inside[0] - start + offset, inside[-1] - start + offset)
        x, y = window.spans[label[0] - offset][0], window.spans[label[1] - offset][1]
        cut_in_two = any(p < edge < q for p, q in spans.tolist() for edge in (a, b))
        assert x <= a and b <= y and (cut_in_two or context[x:y] == context[a:b])
    reach_the_end = [start + room >= len(ids) for start in starts]
    assert reach_the_end == [False] * (len(starts) - 1) + [True]


def test_answers_are_cut_from_the_context(tokenizer):
    """A perfect model's spans give the answer, although a token brings its space along."""
    context = "In Zürich the “quick” brown fox — 狐 — jumps, 50% of the time."
    for text in ("Zürich", "the “quick”", "狐", "50%", "jumps", "brown fox"):
        q = finetune.Question(("who", context), [text], [context.index(text)], "1")
        cfg = EncoderConfig(vocab_size=8192)
        ((row, (first, last)), window), *_ = finetune.windows(0, q, tokenizer, cfg, 200)
        out = np.full((2, len(row)), -5.0, np.float32)
        out[0, first] = out[1, last] = 5.0
        [(*best, null)] = finetune.candidates([out], [window], 0.0)
        assert best[0] == (10.0, text) or best[0][1].strip("“”%,") == text.strip("“”%,")
        assert null == (-10.0, "") and len(best) == finetune.N_BEST
        assert best == sorted(best, key=lambda pair: -pair[0])


@given(n=st.integers(0, 12), longest=st.integers(1, 6), seed=st.integers(0, 1000))
@settings(max_examples=60, deadline=None)
def test_n_best_equals_a_loop(n, longest, seed):
    first, last = np.random.default_rng(seed).normal(size=(2, n))
    every = [(first[i] + last[j], i, j) for i in range(n) for j in range(i, min(n, i + longest))]
    expected = [pytest.approx(one) for one in sorted(every, reverse=True)[:5]]
    assert finetune.n_best(first, last, 5, longest) == expected


def test_no_answer_by_the_lowest_null_score(monkeypatch):
    """Of two windows. v2 gives no text where it is above the best by more than the threshold."""
    model, spans = finetune.Classifier(tiny(), "squad_v2", 16), np.array([[0, 1], [1, 2]])
    outs = [np.array([[4, 1, 0, 0]] * 2, np.float32), np.array([[2, 0, 0, 9]] * 2, np.float32)]
    encoded = [], [finetune.Window(0, "ab", spans, 1)] * 2
    monkeypatch.setattr(finetune, "encode_rows", lambda *args: encoded)
    monkeypatch.setattr(finetune, "outputs", lambda *args: outs)
    for threshold, text in ((0.0, ""), (1.9, ""), (2.0, "a")):
        assert finetune.predict(model, [], SimpleNamespace(null_threshold=threshold)) == [text]
    model.name = "squad"
    assert finetune.predict(model, [], SimpleNamespace()) == ["a"], "v1 always answers"


def test_batches_take_every_row_once_and_near_lengths():
    rows = [([0] * n, 0) for n in np.random.default_rng(0).integers(1, 100, 500)]
    for rng in (None, np.random.default_rng(1)):
        groups = list(finetune.batches_by_length(rows, 32, rng))
        assert sorted(i for g in groups for i in g) == list(range(500))
        lengths = [[len(rows[i][0]) for i in g] for g in groups]
        padding = sum(max(group) * len(group) - sum(group) for group in lengths)
        assert padding < 0.15 * sum(map(sum, lengths))


@pytest.mark.parametrize("name", ["mnli", "stsb", "squad"])
def test_padding_changes_no_output_and_no_loss(name):
    model, cpu = finetune.Classifier(tiny("tupe_r"), name, 12).eval().double(), torch.device("cpu")
    label = {"stsb": float, "mnli": int, "squad": lambda y: (1, 2)}[name]
    rows = [([64, 1, 2, 3, 66], label(1.5)), ([64, 5, 66], label(2.5))]
    tokens, pad, labels = finetune.padded_batch(rows, range(len(rows)), 65, cpu)
    assert tokens.tolist() == [[64, 1, 2, 3, 66], [64, 5, 66, 65, 65]]
    assert pad.tolist() == [[False] * 5, [False] * 3 + [True] * 2]
    out, alone = model(tokens, pad), [finetune.padded_batch([row], [0], 65, cpu) for row in rows]
    for row, (ids, none, _) in zip(out, alone):
        assert none is None
        close(row[..., : ids.size(1)] if name == "squad" else row, model(ids, None)[0], 1e-6)
    losses = [model.loss(*one) for one in alone]
    close(model.loss(tokens, pad, labels), sum(losses) / 2, 1e-6)
    if name == "stsb":
        by_hand = ((out - labels) ** 2).mean()
    else:
        p, cells = out.log_softmax(-1), ([0, 1], labels)
        by_hand = -p[cells if name == "mnli" else ([[0] * 2, [1] * 2], [[0, 1]] * 2, labels)].mean()
    close(model.loss(tokens, pad, labels), by_hand, 1e-6)


def test_recipes_are_the_papers_tables():
    wide, narrow = {"d_model": 512, "max_len": 512}, {"d_model": 256, "max_len": 128}

    def row(recipe, name, cfg=wide, *flags):
        s = finetune.settings(finetune_args("--recipe", recipe, *flags), name, cfg)
        return (
            s.epochs,
            s.lr,
            s.batch_size,
            s.warmup,
            s.weight_decay,
            s.eps,
            s.length,
            s.layer_decay,
        )

    assert row("electra", "mnli") == (3, [1e-4], 32, 0.1, 0, 1e-6, 128, 0.8)
    assert row("electra", "stsb", narrow)[:2] == (10, [3e-4]) and row("electra", "rte")[0] == 10
    assert row("electra", "squad")[0::6] == row("electra", "squad_v2")[0::6] == (2, 512)
    assert row("tupe", "qnli") == (5, [2e-5, 3e-5, 4e-5, 5e-5], 32, 0.06, 0.01, 1e-6, 512, 1)
    assert row("tupe", "sst2", narrow)[:2] == (10, [2e-5, 3e-5, 4e-5, 5e-5])
    for names, epochs, batch, warmup in (
        ("mnli qqp", 6, 64, 2000),
        ("qnli sst2", 4, 64, 200),
        ("cola stsb mrpc rte", 4, 32, 100),
    ):
        for name in names.split():
            assert row("taco", name) == (epochs, [5e-5], batch, warmup, 0, 1e-8, 128, 1)
    assert row("bert", "qqp") == (3, [2e-5], 32, 0, 0, 1e-8, 128, 1)
    assert row("bert", "squad_v2", narrow)[1] == [3e-5] and row("bert", "squad")[6] == 384
    assert row("tupe", "cola", narrow)[6] == 128, "no longer than max_len"
    given = row("tupe", "cola", narrow, "--length", 300, "--lr", 1, 2, "--epochs", 7)
    assert given[::6] == (7, 300) and given[1] == [1, 2]
    assert all(row(recipe, "docs")[0] == 10 for recipe in finetune.RECIPES)
    over_seeds = [recipe["aggregate"] for recipe in finetune.RECIPES.values()]
    assert over_seeds == ["median", "median", "mean", "mean"]


def test_finetuning_schedule():
    def of(warmup):
        return [round(finetune.schedule(step, 10, warmup), 4) for step in range(10)]

    assert of(4) == of(0.4) == [0.25, 0.5, 0.75, 1, 1, 0.8333, 0.6667, 0.5, 0.3333, 0.1667]
    assert of(0) == [1, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1]
    assert of(20) == [0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5], "never at the peak"


def test_layer_wise_decay_and_weight_decay():
    for pe in ("tupe_r", "rel_k", "abs"):
        model = finetune.Classifier(tiny(pe), "mnli", 12)
        groups = finetune.param_groups(model, 1.0, 0.5, 0.01)
        found = {id(p): (g["peak"], g["weight_decay"]) for g in groups for p in g["params"]}
        n = len(list(model.parameters()))
        assert sum(len(g["params"]) for g in groups) == len(found) == n
        for name, p in model.named_parameters():
            peak = 0.25 if ".0." in name else 0.5 if ".1." in name else 0.125
            peak = 1.0 if name.startswith("head") else peak
            assert found[id(p)] == (peak, 0.01 if p.dim() >= 2 else 0.0), name
    assert {g["peak"] for g in finetune.param_groups(model, 2.0, 1.0, 0)} == {2.0}
    probe = finetune.Classifier(tiny(), "mnli", 12, probe=True).train()
    assert probe.head.training and not probe.encoder.training, "a frozen encoder has no dropout"
    learned = {id(p) for g in finetune.param_groups(probe, 1, 0.8, 0) for p in g["params"]}
    assert learned == {id(probe.head[-1].weight), id(probe.head[-1].bias)}


def test_averages_of_the_papers():
    """The papers' own rows give the papers' own averages."""
    order = ["mnli", "mnli-mm", "qnli", "qqp", "sst2", "cola", "mrpc", "rte", "stsb"]
    for paper, values, mean in (
        ("P1", (84.77, 84.95, 91.78, 90.99, 92.75, 56.77, 87.90, 71.70, 89.60), 83.47),  # table 2
        ("P2", (77.9, 78.4, 86.5, 86.1, 88.9, 34.2, 88.1, 59.5, 86.1), 76.2),  # table 1, TACO-250k
        ("P3", (None, 84.8, 88.7, 87.8, 93.0, 60.2, 89.4, 65.1, 88.6), 82.2),  # table 3
    ):
        kinds, by_name = finetune.AVERAGES[paper], dict(zip(order, values))
        scores = {(name, kind): by_name[name] for name, kind in kinds.items()}
        assert len(scores) == (8 if paper == "P3" else 9)
        assert abs(finetune.paper_averages(scores)[paper] - mean) < 0.051
        del scores["rte", "accuracy"]
        assert finetune.paper_averages(scores)[paper] == ["rte"]
    assert finetune.AVERAGES["P1"]["stsb"] == "pearson" and finetune.AVERAGES["P2"]["mrpc"] == "f1"


def test_the_best_learning_rate_counts(said):
    runs, row = [], dict(seconds=1.0, one_class=False)
    for lr, values in ((1, (0.1, 0.2, 0.9)), (2, (0.3, 0.3, 0.4))):
        for seed, m in enumerate(values):
            own = dict(ckpt="a", task="cola", lr=lr, seed=seed)
            scores = dict(metrics={"matthews": m}, constant={"matthews": 0.0})
            runs.append({**row, **own, **scores})
    assert finetune.best_runs(runs, statistics.median) == {("a", "cola"): runs[3:]}
    assert finetune.best_runs(runs, statistics.mean) == {("a", "cola"): runs[:3]}
    finetune.report(runs, finetune_args("--recipe", "tupe"))
    out = said()
    assert re.search(r"matthews +0.300 +0.300 +0.400 +0.058 +0.000 +2 +3", out)
    assert "the best of 2" in out
    finetune.report([runs[0], dict(runs[3], ckpt="b")], finetune_args("--recipe", "tupe"))
    assert "the best of" not in said()  # a rate each: nothing was chosen
    # With --eval_only every task has its own file: averages are over a folder.
    args, runs = SimpleNamespace(recipe="electra", task="all", eval_only=True), []
    for task, metric in finetune.AVERAGES["P3"].items():
        own = dict(task=task, ckpt=f"out/finetuned-{task}.pt ({task})", lr=1e-4)
        runs.append({**row, **own, "metrics": {metric: 0.5}, "constant": {metric: 0.0}})
    finetune.report(runs, args)
    assert re.search(r"P3's average: 0.5000 +out\n", said())


@pytest.fixture(scope="session")
def small_run(corpus_file, cache, tmp_path_factory):
    """A run with kept checkpoints, and official files of tasks that one word decides."""
    home, rng = tmp_path_factory.mktemp("finetune"), random.Random(0)
    glue = home / "glue"
    flags = "--steps 6 --keep_every 2 --block_size 32".split()
    run_train(corpus_file, cache, home / "out" / "run", *flags)
    for name in ("cola", "mnli", "stsb"):
        task = finetune.TASKS[name]
        (glue / task.folder).mkdir(parents=True)
        classes, sizes = task.classes[:2] or ("0.5", "4.5"), {"train": 320, "dev": 60}
        for file, n in {**sizes, "dev_matched": 60, "dev_mismatched": 30}.items():
            rows = []
            for c in rng.choices((0, 1), (1, 2), k=n):
                word = [("owls", "seven")[c]]
                texts = [" ".join(rng.choices(WORDS[:8], k=4) + word) for _ in task.texts]
                rows.append((texts, classes[c]))
            (glue / task.folder / f"{file}.tsv").write_bytes(official_file(name, rows))
    (glue / "diagnostic").mkdir()
    for file in ("CoLA/test", "MNLI/test_matched", "diagnostic/diagnostic", "STS-B/test"):
        n, header = (1, "index\tsentence") if "CoLA" in file else (2, "index\tsentence1\tsentence2")
        lines = [header, *(f"{i}" + "\tthe quick owls" * n for i in range(5))]
        (glue / f"{file}.tsv").write_text("\n".join(lines) + "\n")
    for version in ("1.1", "2.0"):
        questions = []
        for i in range(24):
            words = rng.choices(WORDS[:8], k=40)
            words[rng.randrange(40)] = "owls"
            context, has_answer = " ".join(words), i % 3 or version == "1.1"
            answers = [("owls", context.index("owls"))] if has_answer else []
            questions.append((str(i), "who", context, answers))
        for split in ("train", "dev"):
            (glue / f"{split}-v{version}.json").write_text(squad_json(questions, version))
    return home


@pytest.fixture
def at_run(small_run, monkeypatch):
    monkeypatch.chdir(small_run)
    return small_run


def run_finetune(out, task, *flags):
    """-> the rows that this call has written."""
    flags = "--out_dir", out, "--device cpu --dtype float32 --task", task, *flags
    finetune.main(shlex.split(" ".join(map(str, flags))))
    file = Path(out) / "results.jsonl"
    rows = [json.loads(line) for line in open(file)] if file.exists() else []
    file.unlink(missing_ok=True)
    return rows


LEARN = "--data_dir glue --lr 0.01 --epochs 8"
EVAL = "--data_dir glue --eval_only"


def submitted(file):
    """-> the answers of a file for GLUE, if its form is right."""
    header, *lines = file.read_bytes().decode().split("\n")
    assert header == "index\tprediction" and lines.pop() == ""
    assert [line.split("\t")[0] for line in lines] == list("01234")
    return [line.split("\t")[1] for line in lines]


def shown_shares(out):
    """What --predict_text printed -> {answer: share}; they sum to 1."""
    shares = {answer: float(p) for p, answer in (line.split("  ") for line in out.splitlines()[1:])}
    assert abs(sum(shares.values()) - 1) < 1e-3
    return shares


def test_finetune_learns_saves_and_repeats(at_run, tmp_path, capsys, said):
    """A word decides: learned; the best of the runs is saved; it scores the same again, exactly."""
    rows = run_finetune(tmp_path, "cola", LEARN, "--lr 0.01 1e-7 --seeds 2 --predict")
    assert [(r["lr"], r["seed"]) for r in rows] == [(0.01, 0), (0.01, 1), (1e-7, 0), (1e-7, 1)]
    first = rows[0]
    keys = "task seed lr metrics majority ckpt seconds recipe epochs n_train batch_size length step"
    assert {*keys.split(), "probe"} <= first.keys()
    assert all(r["metrics"]["accuracy"] > 0.9 > r["majority"] > 0.5 for r in rows[:2])
    assert first["constant"] == {"matthews": 0.0, "accuracy": first["majority"]}
    assert first["ckpt"] == "out/run" and rows[2]["one_class"]
    out = said()
    assert "median" in out and "collapsed: 2 of 4" in out and "the best of 2" in out
    assert "   0.01      2" in out and set(submitted(tmp_path / "CoLA.tsv")) == {"0"}, "owls: 0"
    (again,) = run_finetune(tmp_path, "cola", EVAL)
    assert again["metrics"] == max((r["metrics"] for r in rows), key=lambda m: m["matthews"])
    assert again["eval_only"] and again["n_train"] == 320
    capsys.readouterr()
    file = tmp_path / "finetuned-cola.pt"
    run_finetune(tmp_path, "cola --predict_text 'the owls' --ckpt", file)
    assert shown_shares(said()).keys() == {"0", "1"}
    assert load(file).config.max_len == 32, "its encoder is a checkpoint like any other"


HOW = {"recipe": "bert", "lr": 1e-4, "epochs": 3, "batch_size": 32, "length": 40, "n_train": 99}


def test_scratch_without_a_run_is_a_start_like_any_other(corpus, tmp_path, monkeypatch):
    """Its model is exported, too: the card says after how many steps, on what text."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(finetune, "prepare", lambda *given: corpus)
    start = finetune.read_start("scratch", "cache")
    model = finetune.make_model(start, "cola", 16, 0)
    row = {"task": "cola", "seed": 0, "metrics": {}, "ckpt": start["source"], **HOW}
    finetune.save_model("model.pt", model, start, row)
    card = hf.card("model.pt", common.read_checkpoint("model.pt"))
    assert f"0 steps, data {corpus.meta['dataset']}" in card
    assert "--task cola --ckpt scratch --limit_train 99 --recipe bert --lr 0.0001" in card


@pytest.mark.slow
def test_finetune_all_of_glue(at_run, tmp_path, said, monkeypatch):
    """All that is there is taken, MNLI's model predicts AX, files are as GLUE wants them."""
    rows = run_finetune(
        tmp_path, "all", LEARN, "--predict --recipe bert --ckpt scratch --lr 0.006 --epochs 16"
    )
    assert [r["task"] for r in rows] == ["cola", "stsb", "mnli", "mnli-mm"]
    assert rows[1]["metrics"]["pearson"] > 0.5 and rows[1]["majority"] == 0
    assert rows[0]["ckpt"] == f"scratch, shaped like {Path('out/run')}"
    out = said()
    assert "P3's average: not without sst2, qnli, rte, qqp, mrpc" in out and "MNLI-mm: " in out
    for name, classes in (("CoLA", "01"), ("MNLI-m", finetune.NLI), ("AX", finetune.NLI)):
        assert set(submitted(tmp_path / f"{name}.tsv")) <= set(classes)
    assert all(0 <= float(value) <= 5 for value in submitted(tmp_path / "STS-B.tsv"))
    assert not (tmp_path / "MNLI-mm.tsv").exists() and not (tmp_path / "SST-2.tsv").exists()
    (tmp_path / "AX.tsv").unlink()
    assert run_finetune(tmp_path, "ax --data_dir glue --ckpt", tmp_path) == []
    assert len(submitted(tmp_path / "AX.tsv")) == 5
    # The MNLI model's encoder under a fresh head of another task, and its own head on its own task.
    start = finetune.read_start(str(tmp_path / "finetuned-mnli.pt"), "")
    assert start["source"].endswith("(mnli)")
    other, same = (finetune.make_model(start, n, 32, 0).state_dict() for n in ("rte", "mnli"))
    for key, value in start["model"].items():
        assert torch.equal(same[key], value)
        assert torch.equal(other[key], value) or key.startswith("head.")
    assert not torch.equal(other["head.1.weight"], same["head.1.weight"])


def test_finetune_squad(at_run, tmp_path, said):
    """v1.1 in rows too short for its contexts; v2.0 with a length beyond max_len."""
    (first,) = run_finetune(tmp_path, "squad", LEARN, "--predict")
    assert first["metrics"]["f1"] >= first["metrics"]["em"] and first["metrics"]["f1"] > 0.3
    answers = read(tmp_path / "squad.json")
    assert list(answers) == [str(i) for i in range(24)] and all(answers.values())
    golds = [q.golds for q in finetune.read_squad("glue/dev-v1.1.json")[0]]
    assert finetune.TASKS["squad"].score(golds, list(answers.values())) == first["metrics"]
    v2 = "squad_v2 --null_threshold=-1e9"
    (second,) = run_finetune(tmp_path, v2, LEARN, "--epochs 1 --length 60")
    assert second["metrics"] == second["constant"] and second["one_class"]
    assert second["majority"] == pytest.approx(8 / 24) and first["majority"] == 0
    assert "length 60 (position tables extended from 32)" in said()
    assert load(tmp_path / "finetuned-squad_v2.pt").config.max_len == 60
    run_finetune(tmp_path, "squad --predict_text 'who ||| the quick brown owls jump over'")
    assert "owls" in said().splitlines()[1]
    run_finetune(tmp_path, "squad_v2 --predict_text 'who ||| a'")
    assert shown_shares(said()).keys() == {"(no answer)", "a"}
    (again,) = run_finetune(tmp_path, v2, EVAL)
    assert again["metrics"] == second["metrics"]


def test_freeze_encoder_and_length(at_run, tmp_path):
    """A probe leaves the encoder as it is; --length beyond max_len keeps the table's rows."""
    before = finetune.read_checkpoint("out/run")["model"]
    run_finetune(tmp_path, "mnli", LEARN, "--epochs 1 --freeze_encoder")
    saved = finetune.read_checkpoint(tmp_path / "finetuned-mnli.pt")
    encoder = {key for key in saved["model"] if key.startswith("encoder.")}
    assert encoder and all(torch.equal(saved["model"][key], before[key]) for key in encoder)
    assert set(saved["model"]) - encoder == {"head.1.bias", "head.1.weight"} and saved["probe"]
    assert len(run_finetune(tmp_path, "mnli", EVAL)) == 2
    model = finetune.make_model(finetune.read_start("out/run", ""), "mnli", 50, 0)
    key = "encoder.pe.parts.abs.table.weight"
    table, old = model.state_dict()[key], before[key]
    assert len(table) == 51 and len(old) == 33
    assert torch.equal(table[:32], old[:32]) and torch.equal(table[50], old[32])


def test_no_start_and_no_other_model_is_replaced(at_run, tmp_path, capsys, monkeypatch):
    """Every start is read once. A model that is there goes only for the same command's."""
    learn, read, calls = f"{LEARN} --epochs 1 --limit_train 9", finetune.read_checkpoint, []
    run_finetune(tmp_path, "cola", learn)
    cola = tmp_path / "finetuned-cola.pt"
    first = cola.stat().st_ino
    assert len(run_finetune(tmp_path, "cola", learn)) == 1 and cola.stat().st_ino != first
    before = cola.read_bytes()
    for task, flags, says in (
        ("cola", "--seeds 2", "another command's: take another --out_dir, or remove it"),
        ("cola", "--ckpt scratch", "another command's"),
        ("cola", f"--ckpt {cola}", "is what this starts from: take another --out_dir"),
        ("all", f"--ckpt {cola}", "finetuned-cola.pt is what this starts from"),
        ("all", f"--ckpt '{tmp_path}/*.pt'", "finetuned-cola.pt is what this starts from"),
    ):
        assert re.search(says, one_line(capsys, run_finetune, tmp_path, task, learn, flags))
        assert cola.read_bytes() == before and names_in(tmp_path) == {cola.name, ".cola.lock"}
    # All tasks start from what was there at first, even if it is written while they go on.
    start = shutil.copy("out/run/ckpt_2.pt", tmp_path / "start.pt")
    monkeypatch.setattr(finetune, "read_checkpoint", lambda file: calls.append(file) or read(file))
    real = finetune.record

    def record(*args):
        shutil.copy("out/run/ckpt_4.pt", start)
        return real(*args)

    monkeypatch.setattr(finetune, "record", record)
    rows = run_finetune(tmp_path / "new", "all", learn, "--ckpt", start)
    assert [row["step"] for row in rows] == [2] * 4 and calls == [str(start)]
    with common.lock(tmp_path / "new", "fine-tuning", ".cola.lock"):
        error = one_line(capsys, run_finetune, tmp_path / "new", "cola", learn, "--ckpt", start)
    assert "another process is fine-tuning on cola in" in error


def test_all_models_of_a_folder_are_scored_elsewhere(at_run, tmp_path):
    """--eval_only takes them from --ckpt, though results go to --out_dir."""
    learn = f"{LEARN} --epochs 1 --limit_train 9"
    rows = run_finetune(tmp_path / "models", "all", learn)
    flags = EVAL, "--predict --ckpt", tmp_path / "models"
    again = run_finetune(tmp_path / "new", "all", *flags)
    assert [row["metrics"] for row in again] == [row["metrics"] for row in rows]
    assert names_in(tmp_path / "new") == {"CoLA.tsv", "STS-B.tsv", "MNLI-m.tsv", "AX.tsv"}
    assert set(submitted(tmp_path / "new" / "AX.tsv")) <= set(finetune.NLI), "MNLI's model says it"


@pytest.mark.parametrize("name, probe", [("stsb", False), ("stsb", True), ("cola", False)])
def test_heads_compute_in_float32(name, probe):
    """In 16 bits 1,500 rows of STS-B had 2 different scores."""
    model = finetune.Classifier(tiny().float(), name, 12, probe).eval()
    torch.nn.init.normal_(model.head[-1].weight, std=1e-3)
    torch.nn.init.ones_(model.head[-1].bias)
    tokens = some_tokens(B=200)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        hidden, out = model.encoder(tokens)[:, 0].float(), model(tokens, None)
    assert out.dtype == torch.float32
    close(out, model.head(hidden).squeeze(-1), 1e-7)
    assert len(out.flatten().unique()) > 100


def test_every_kept_checkpoint_is_scored_in_order(at_run, tmp_path, monkeypatch):
    flags = "--epochs 1 --limit_train 20 --ckpt out/run/ckpt_*.pt"
    rows = run_finetune(tmp_path, "cola", LEARN, flags)
    files = [os.path.join("out/run", f"ckpt_{step}.pt") for step in (2, 4, 6)]
    assert [(r["step"], r["ckpt"]) for r in rows] == list(zip((2, 4, 6), files))
    assert {r["n_train"] for r in rows} == {20}
    assert len(finetune.read_starts("out/*/ckpt_*.pt", "")) == 3
    for ckpt, home in (
        ("out/*/ckpt_*.pt", "out"),
        ("out/run/ckpt_*.pt", "out/run"),
        ("out/run/ckpt.pt", "out/run"),
        ("out/run", "out/run"),
        ("bow", "out"),
    ):
        assert finetune.home(finetune_args("--ckpt", ckpt)) == Path(home)
    # The newest run is looked up once: another one may save while this one goes through its tasks.
    monkeypatch.setattr(finetune, "run_tasks", lambda args, *_: rows.append(args))
    finetune.main(["--task", "all", "--device", "cpu"])
    assert rows[-1].ckpt == finetune.newest_run() and rows[-1].out_dir == Path("out/run")


def test_damaged_models_are_one_line(at_run, tmp_path):
    """Parts of a fine-tuned model and of its settings, missing or of another type."""
    file, args = tmp_path / "finetuned-cola.pt", finetune_args("--ckpt", tmp_path)
    args.device = torch.device("cpu")
    run_finetune(tmp_path, "cola", LEARN, "--epochs 1 --limit_train 9")
    whole, fc1 = finetune.read_checkpoint(file), "encoder.blocks.0.fc1.weight"
    finetune.load_tuned("cola", args)
    for place, junk in (("row", None), (f"model {fc1}", None)):
        broken, (*outer, last) = copy.deepcopy(whole), place.split()
        inner = broken[outer[0]] if outer else broken
        inner.pop(last)
        if junk is not None:
            inner[last] = junk
        torch.save(broken, file)
        refuses("finetuned-cola.pt", finetune.load_tuned, "cola", args)
    start = finetune.read_start("out/run", "")
    del start["model"][fc1]
    refuses(f"missing {fc1}", finetune.make_model, start, "cola", 32, 0)


@pytest.mark.parametrize("really", [False, slow(True)])
def test_compiled_finetuning_agrees_with_eager(at_run, tmp_path, monkeypatch, really):
    """The flag compiles, once for all lengths. (The tracer alone: the rest is train.py's.)"""
    seen, compiled = [], torch.nn.Module.compile

    def compile(self, **how):
        seen.append(how)
        if really:
            compiled(self, backend="eager", **how)

    monkeypatch.setattr(finetune, "can_compile", lambda device: True)
    monkeypatch.setattr(torch.nn.Module, "compile", compile)
    flags = "cola", LEARN, "--epochs 1 --limit_train 40"
    (a,), (b,) = run_finetune(tmp_path, *flags), run_finetune(tmp_path, *flags, "--compile")
    assert a["metrics"] == b["metrics"] and seen == [{"dynamic": True}]


def test_finetuning_clips_the_gradient_of_every_step(at_run, tmp_path, monkeypatch):
    norms, clip = [], torch.nn.utils.clip_grad_norm_

    def clip_nothing(parameters, norm):
        norms.append((len(list(parameters)), norm))
        return clip([torch.zeros(1, requires_grad=True)], norm)

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", clip_nothing)
    run_finetune(tmp_path, "cola", LEARN, "--epochs 2 --limit_train 40")
    model = finetune.make_model(finetune.read_start("out/run", ""), "cola", 32, 0)
    assert norms == [(len(list(model.parameters())), 1.0)] * 4


def test_finetuning_stops_cleanly(at_run, tmp_path, monkeypatch, capsys):
    """A loss or gradient that is not finite, a full disk, Ctrl-C: one line, nothing saved."""
    flags = "stsb", LEARN, "--limit_train 40 --epochs 1"
    for code, says, where, name, what in (
        (1, "not finite", F, "mse_loss", lambda out, y: (out * math.nan).sum()),
        (1, "not finite", F, "mse_loss", lambda out, y: (out - out.detach()).sqrt().sum()),
        (1, "cannot be written", torch, "save", failing(RuntimeError("unexpected pos"))),
        (130, "interrupted", finetune, "schedule", failing(KeyboardInterrupt())),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(where, name, what)
            assert says in one_line(capsys, run_finetune, tmp_path, *flags, code=code)
        assert not list(tmp_path.glob("finetuned*")) and not list(tmp_path.glob("*.tmp"))


def test_bag_of_words(at_run, tmp_path):
    """A pair is a pair: which text has a word, and what both have, is seen."""
    pytest.importorskip("sklearn")
    (row,) = run_finetune(tmp_path, "cola --data_dir glue --ckpt bow")
    assert row["metrics"]["accuracy"] == 1 and row["ckpt"] == "bow"
    rng, rows = random.Random(0), ([], [])
    for i in range(400):
        a, b = (" ".join(rng.choices(WORDS, k=5)) for _ in range(2))
        rows[0].append(([f"{a} owls", f"{b} foxes"][:: -1 if i % 2 else 1], i % 2))
        new = " ".join(f"{c}{c}{rng.randrange(9)}" for c in rng.sample("abcdefghijkl", 3))
        rows[1].append(((f"{new} {a}", f"{new if i % 2 else new[::-1]} {b}"), i % 2))
    for pairs in rows:
        guesses = finetune.predict(finetune.bag_of_words(pairs[:300]), pairs[300:], None)
        assert finetune.accuracy([y for _, y in pairs[300:]], guesses) > 0.9


@pytest.mark.parametrize(
    "flags, says",
    [
        ("foo", "docs"),
        ("cola", "is one process: python, not torchrun"),
        ("cola --data_dir nowhere", "nowhere"),
        ("cola --data_dir {tmp}", "has no rows"),
        ("cola --ckpt nowhere", "no checkpoint at nowhere"),
        ("docs --predict", "no test rows"),
        ("cola --eval_only", "finetuned-cola.pt: python finetune.py --task cola makes one"),
        ("mnli --ckpt {tmp} --predict_text a|||b", "no model fine-tuned on mnli"),
        ("all --ckpt bow", "one task"),
        ("all --data_dir {tmp}/MNLI", "nothing of GLUE"),
        ("cola --predict_text a|||b", "takes 1 text(s)"),
        ("cola --lr 1 0", "1e9)"),
    ],
)
def test_finetune_mistakes(at_run, tmp_path, capsys, monkeypatch, flags, says):
    if "torchrun" in says:
        monkeypatch.setenv("WORLD_SIZE", "2")
    for folder in ("CoLA", "MNLI"):
        (tmp_path / folder).mkdir()
    (tmp_path / "CoLA" / "train.tsv").write_text("")
    (tmp_path / "finetuned-mnli.pt").write_bytes((at_run / "out/run/ckpt.pt").read_bytes())
    flags = f"--data_dir glue --device cpu --task {flags.format(tmp=tmp_path)}".split()
    assert says.format(tmp=tmp_path) in one_line(capsys, finetune.main, flags)


# --------------------------------------------------------------------------------------------------
# probe.py


def appendix_b(A, first=None):
    """P3's indicators from the text of its appendix B, element by element -> AIV, OPR, ties, SD."""
    L, groups = len(A), defaultdict(list)
    for i, j in np.ndindex(L, L):
        groups[j - i].append(A[i, j])
    within = sum(np.var(g) * len(g) for g in groups.values()) / L**2
    wrong, tied, weight = 0, 0, 0
    for i in range(L):
        for s in (A[i, i:][:first], A[i, i::-1][:first]):  # to the right, and to the left
            if pairs := list(combinations(s, 2)):
                wrong += len(s) * np.mean([far > near for near, far in pairs])
                tied += len(s) * np.mean([far == near for near, far in pairs])
                weight += len(s)
    sd = np.mean([abs(A[i, j] - A[j, i]) for i, j in combinations(range(L), 2)])
    return within / np.var(A), wrong / weight, tied / weight, sd


def balance(A, reach):
    near = [(i, j) for i, j in np.ndindex(A.shape) if 0 < abs(i - j) <= reach]
    return sum(A[i, j] for i, j in near if i > j) / sum(A[i, j] for i, j in near if i < j)


@pytest.mark.parametrize("L, first", [(2, None), (9, 4), (26, 20)])
def test_indicators_equal_loops(L, first):
    rng = np.random.default_rng(L)
    for A in (rng.random((L, L)), rng.integers(1, 4, (L, L)).astype(float)):  # many ties
        found = [
            probe.aiv(A),
            probe.opr(A, first),
            probe.order(A, first)[1],
            probe.sd(A),
            probe.db(A),
            probe.db(A, l=3),
        ]
        assert all(type(x) is float for x in found)
        expected = [*appendix_b(A, first), balance(A, 20), balance(A, 3)]
        assert found == pytest.approx(expected, abs=1e-12)


def test_indicators_of_known_maps():
    L = 11
    r = np.arange(L)[None, :] - np.arange(L)[:, None]
    toeplitz = np.random.default_rng(0).random(2 * L)[r]
    assert probe.aiv(toeplitz) < 1e-15 < probe.aiv(toeplitz + np.eye(L, k=2) * np.arange(L))
    near = np.exp(-abs(r) / 3)
    assert (probe.opr(1 / near), probe.opr(near, 4), probe.order(near)) == (1, 0, [0, 0])
    assert probe.sd(near) == 0 and probe.db(near) == pytest.approx(1)
    assert probe.db(np.tril(near)) == math.inf and probe.db(np.triu(near)) == 0
    assert math.isnan(probe.db(np.eye(L)))
    for value in (1 / 7, 0.3):  # their variance is rounding, not 0
        flat = np.full((7, 7), value)
        assert math.isnan(probe.aiv(flat)) and probe.order(flat) == [0, 1]


def untrained(pe):
    torch.manual_seed(1)
    return Encoder(EncoderConfig(vocab_size=VOCAB, n_layer=1, pe=pe)).double().eval()


def test_untrained_schemes_have_the_properties_they_are_built_with():
    """All without [CLS] and [SEP]: these are other words, so their rows and columns differ whatever
    the scheme.

    AIV is 0 on logits. After the softmax rows near the edges have other normalisers: over six seeds
    .001 to .006 (rel), .022 (alibi), .015 to .085 (t5, whose far buckets are few and random) at
    this size.
    """
    bound = {"rel": 0.02, "alibi": 0.03, "t5": 0.12}
    for pe in ("none", "rel", "t5", "alibi", "abs"):
        found = probe.identical_word_maps(untrained(pe), torch.arange(20))
        logits, A = (m.mean(0)[1:-1, 1:-1] for m in found)
        if pe == "none":  # a bag of words: uniform among the words
            assert np.ptp(A) < 1e-15 and math.isnan(probe.aiv(A))
            assert probe.order(A)[1] == probe.order(A, 20)[1] == 1
        elif pe == "abs":
            assert probe.aiv(A) > 0.5
        else:
            assert probe.aiv(logits) < 1e-12 and probe.aiv(A) < bound[pe]
        if pe == "alibi":
            assert probe.order(A) == [0, 0] and probe.db(A) == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize("pe", ["tupe_r", "abs+rlsin"])
def test_the_map_equals_a_loop_over_words(pe):
    encoder, words = tiny(pe), torch.tensor([3, 60, 7, 11] * 5)  # more than one chunk
    rows = [torch.tensor([[CLS] + [w] * 10 + [SEP]]) for w in words.tolist()]
    logits, A = probe.identical_word_maps(encoder, words)
    alike(A, np.mean([encoder.attention(x)[0] for x in rows], 0))
    one_logits, one = probe.identical_word_maps(encoder, words[:1])
    alike(torch.from_numpy(one_logits).softmax(-1), one)
    assert not np.allclose(logits, one_logits)
    _, causal = probe.identical_word_maps(encoder, words, causal=True)
    assert probe.db(causal.mean(0)) == math.inf and causal.sum(-1) == pytest.approx(1)


def test_probe_words_are_whole_words(corpus):
    encoder = Encoder(EncoderConfig(vocab_size=corpus.vocab_size))
    encoder.tokenizer = encoding_of(corpus)
    chosen = probe.probe_words(encoder, 10).tolist()
    assert len(set(chosen)) == 10 and chosen == probe.probe_words(encoder, 10).tolist()
    words = [encoder.tokenizer.decode([i]) for i in chosen]
    assert all(word[0] == " " and word[1:].isalpha() for word in words)
    # Too few words: any ordinary token.
    assert len(set(probe.probe_words(encoder, 250).tolist())) == 250


def matrices(panels):
    return np.stack([panel["matrix"] for panel in panels])


@pytest.mark.parametrize("pe", [name for name in PE_NAMES if name not in ("bert_a", "bert_r")])
def test_every_scheme_has_its_pictures(pe):
    encoder = tiny(pe).requires_grad_(False)
    logits, _ = probe.identical_word_maps(encoder, torch.arange(3))
    found, vectors = probe.pictures_of(encoder, logits), probe.position_vectors(encoder)
    parts = set(parse_pe(pe))
    there = {file for file, panels in found.items() if not isinstance(panels, str)}
    added = bool(parts & {"abs", "sin", "lsin"})
    absolute = added or pe == "bert_ad" or pe.startswith("tupe") and pe != "tupe_a_free"
    relative = bool(parts & {"rel", "rel_k", "rsin", "rlsin", "tupe_r_factored"})
    assert ("absolute" in vectors, "relative" in vectors) == (absolute, relative)
    if pe in ("rsin", "rel"):
        table = encoder.pe.parts[pe].vectors(0)
        assert torch.equal(vectors["relative"], table[64 - 11 : 64 + 12])
        assert found["vectors.png"][0]["first"] == -11
    if pe.startswith("tupe") and absolute:  # after its LayerNorm
        assert vectors["absolute"].mean(1).abs().max() < 1e-9
    assert ("vectors.png" in there) == ("proximity.png" in there) == bool(vectors)
    assert ("frequencies.png" in there) == bool(parts & {"lsin", "rlsin"})
    wordless = encoder.pe.part_with["bias"] or "bert_ad" in parts
    assert ("positional.png" in there) == bool(wordless)
    assert ("position_logits.png" in there) == added
    assert all(pe in reason for file, reason in found.items() if file not in there)
    assert len(found["map_per_head.png"]) == 2 and there >= {"map.png", "map_per_head.png"}
    if wordless and pe != "bert_ad":
        bias = encoder.pe.part_with["bias"].bias(Positions(torch.arange(12)))[0]
        alike(matrices(found["positional.png"]), bias)
    if added:  # P W_Q W_K^T P^T, a head's slice of each at a time
        W, p = encoder.blocks[0].qkv.weight.numpy(), vectors["absolute"].numpy()
        expected = [p @ W[h : h + 8].T @ W[16 + h : 24 + h] @ p.T / math.sqrt(8) for h in (0, 8)]
        alike(matrices(found["position_logits.png"]), expected)


def test_families_of_schemes():
    """From what a scheme does, not from its name."""
    found = {name: probe.FAMILIES[probe.family(tiny(name))].split()[0] for name in PE_NAMES}
    expected = {"none": "no"} | dict.fromkeys(["abs", "bert_a", "sin", "lsin"], "at")
    offsets = "rel rel_k rsin rlsin t5 t5_untie_cls deberta rope alibi".split()
    expected |= dict.fromkeys(offsets, "by")
    for name in PE_NAMES:
        apart = name.startswith("tupe") or name == "bert_ad"
        assert found[name] == expected.get(name, "words" if apart else "both"), name


class Shown:
    """Stands for matplotlib's Figure; .last is the one that was drawn."""

    def __new__(cls, **settings):
        from matplotlib.figure import Figure

        cls.last = Figure(**settings)
        return cls.last


def lies_within(figure):
    """Everything that is drawn lies within the picture."""
    inches = figure.get_tightbbox().extents
    return (inches >= 0).all() and (inches[2:] <= figure.get_size_inches()).all()


def test_maps_are_drawn_on_one_scale_family_by_family(tmp_path):
    pytest.importorskip("matplotlib")
    panels = []
    for i, pe in enumerate(["tupe_r_tie_cls", "t5", "none", "abs", *["rope"] * 8]):
        A = np.random.default_rng(i).random((12, 12)) ** (1 + 10 * i)
        panels.append(probe.family_map(tiny(pe), A / A.sum(1, keepdims=True), 4.654321))
    rows = probe.in_rows(panels)
    assert sorted(id(panel) for row in rows for _, panel in row) == sorted(map(id, panels))
    families = [panel["family"] for row in rows for _, panel in row]
    assert families == sorted(families) and max(map(len, rows)) == probe.ACROSS
    assert [name.split()[:1] for name, _ in rows[0]] == [["no"], ["at"]]
    probe.draw_families(tmp_path / "a.png", panels, Shown)
    images = [ax.images[0] for ax in Shown.last.axes if ax.images]
    assert len(images) == 12 and {image.get_clim() for image in images} == {(-3, 3)}
    uniform = probe.family_map(tiny("none"), np.full((12, 12), 1 / 12))
    probe.draw_families(tmp_path / "a.png", [uniform], Shown)
    alike(Shown.last.axes[0].images[0].get_array(), np.zeros((12, 12)), 1e-12)
    assert "t5  4.65" in [panel["axes"]["title"] for panel in panels] and lies_within(Shown.last)


def test_schemes_at_their_start(tmp_path, said, capsys, undrawn):
    found = probe_json(tmp_path, "--pe", "none,alibi")
    none, alibi = found["pictures"]["maps.png"]
    for panel in (none, alibi):  # after the softmax
        alike(np.sum(panel["matrix"], 1), np.ones(64), 1e-4)
    assert [row["pe"] for row in found["schemes"]] == ["none", "alibi"]
    assert found["schemes"][1]["opr"] == 0 and "| alibi" in said()
    assert pictures_in(tmp_path) == {"maps", "logits"}
    assert "unknown pe 'foo'" in one_line(capsys, probe.main, ["--pe", "foo"])
    assert "take one of" in one_line(capsys, probe.main, ["--pe", "t5", "--ckpt", "run"])


class Kerple(model_module.T5Bias):
    """Stands for what a student adds: its w is no frequency."""

    def __init__(self, cfg):
        super().__init__(cfg)
        self.w = torch.nn.Parameter(torch.ones(cfg.n_head, 1, 1))


def test_a_new_component_has_its_pictures(monkeypatch):
    monkeypatch.setitem(model_module.SCHEMES, "kerple", [Kerple])
    encoder = tiny("kerple")
    found = probe.pictures_of(encoder, np.zeros((2, 12, 12)))
    assert "kerple has no learned frequencies" in found["frequencies.png"]
    assert len(found["positional.png"]) == 2


def test_positional_logits_of_bert_ad_and_proximity_of_sinusoids():
    encoder = tiny("bert_ad").requires_grad_(False)
    positions = encoder.pe.parts["bert_ad"].positions
    p = positions.norm(positions.table.weight)[:12]
    q, k = positions.u_q(p), positions.u_k(p)
    expected = [q[:, h : h + 8] @ k[:, h : h + 8].T / math.sqrt(4 * 8) for h in (0, 8)]
    found = probe.pictures_of(encoder, np.zeros((2, 12, 12)))["positional.png"]
    alike(matrices(found), torch.stack(expected))
    for pe in ("sin", "lsin", "rsin"):  # untrained: Vaswani's frequencies
        pictures = probe.pictures_of(untrained(pe), np.zeros((4, 64, 64)))
        (_, ours), (_, default) = pictures["proximity.png"][0]["curves"].values()
        alike(ours, default, 1e-5)
        if pe == "lsin":
            (_, learned), (_, default) = pictures["frequencies.png"][0]["curves"].values()
            alike(learned, default, 1e-7)


def cosine(a, b):
    return float(F.cosine_similarity(a.double(), b.double(), dim=0))


def test_context_cosines_equal_a_loop():
    """P2 app. A.3: for every token another one of its row, and one of another row; here the mean
    over all of them."""
    torch.manual_seed(0)
    h, eligible = torch.randn(4, 6, 5), torch.rand(4, 6) < 0.6
    eligible[0], eligible[1] = True, torch.arange(6) == 2  # row 1 has no other token
    tokens = [tuple(place) for place in eligible.nonzero().tolist()]
    intra, inter = [], []
    for a in tokens:
        if same := [cosine(h[a], h[b]) for b in tokens if b[0] == a[0] and b != a]:
            intra.append(np.mean(same))
            inter.append(np.mean([cosine(h[a], h[b]) for b in tokens if b[0] != a[0]]))
    expected = {
        "intra-context": np.mean(intra),
        "inter-context": np.mean(inter),
        "contextual score": np.mean(intra) - np.mean(inter),
    }
    assert probe.context_cosines(h, eligible) == pytest.approx(expected, abs=1e-12)


# What words are worth.


def test_other_words():
    """Specials and [MASK] stay; a row keeps its words, in another order; random ones are as
    frequent as in the text."""
    torch.manual_seed(0)
    tokens, text = packed_rows(400), torch.tensor([1, 1, 1, 2])
    tokens[:, 4] = MASK  # [MASK]
    special = tokens >= CLS
    found = probe.other_words(tokens, CLS, text)
    assert list(found) == ["true", "random", "shuffled"] and found["true"] is tokens
    assert all((words[special] == tokens[special]).all() for words in found.values())
    drawn = found["random"][~special]
    assert set(drawn.tolist()) == {1, 2} and abs((drawn == 1).float().mean() - 0.75) < 0.03
    for row, other in zip(tokens, found["shuffled"]):
        assert sorted(row.tolist()) == sorted(other.tolist())
    moved = (found["shuffled"] != tokens)[~special].float().mean()
    assert 0.8 < moved < 0.95  # 1 in 8 or 9 finds its own place again


class Rows:
    """Stands for a data.Corpus."""

    vocab_size = VOCAB
    train = np.array([5, 6, 7, SEP] * 9, np.uint16)

    def __init__(self, n):
        self.tokens = packed_rows(n)

    def n_rows(self, split, L):
        return len(self.tokens)

    def rows(self, split, index, L):
        return self.tokens.numpy()[index]


@torch.no_grad()
def naive_auc(model, name, batch):
    """Of each row, for each word: P(the given offset is the true one), over its pairs both ways."""
    objective, areas = model.objectives[name], []
    s = objective.head.scores(model.encoder, model.encoder(batch["tokens"], batch["pos"]), batch)
    for b, pos in enumerate(batch["pos"].tolist()):
        words, share = batch["eligible"][b].nonzero().flatten().tolist(), Counter()
        for a, c in permutations(words, 2):
            answer = objective.head.psi(s[b, a - 1, c - 1]).float().softmax(-1)
            p = float(answer[1 if name == "pplm_binary" else pos[c] - pos[a] + 11])
            share.update({a: p, c: p})
        pairs = [(i, j) for i, j in product(words, words) if pos[i] == i and pos[j] != j]
        if pairs:
            areas.append(np.mean([share[i] > share[j] for i, j in pairs]))
    return np.mean(areas)


@pytest.mark.parametrize("name", ["pplm", "pplm_some", "pplm_binary", "pmlm", "smooth_l1"])
def test_the_worth_of_words_equals_a_loop(name):
    """All rows in one batch, so each loss is that of the whole; a sum corrupts tokens, too."""
    change = {"pair_loss": name} if name == "smooth_l1" else {}
    name = "pplm" if change else name
    model, corpus = pretraining("mlm+" + name, mask_rate=0.3, **change), Rows(20)
    found = probe.worth_of_words(model.train(), corpus)
    assert not model.training and found == probe.worth_of_words(model, corpus)
    batch = model.corrupt(corpus.tokens, "validation", 0)
    torch.manual_seed(0)
    kinds = probe.other_words(batch["tokens"], CLS, torch.tensor([5, 6, 7] * 9))
    losses = {kind: float(model({**batch, "tokens": kinds[kind]})[1][name]) for kind in kinds}
    auc = None if change or name == "pmlm" else pytest.approx(naive_auc(model, name, batch))
    assert found == {**{kind: pytest.approx(losses[kind]) for kind in kinds}, "auc": auc}


def test_the_worth_of_words_by_batches():
    """33 rows are two batches, of 17 and 16, as in train.evaluate."""
    model, corpus = pretraining("pplm"), Rows(33)
    plain = torch.autocast("cpu", enabled=False)
    logged = train.evaluate(model, corpus, plain, torch.device("cpu"))["val_pplm"]
    assert probe.worth_of_words(model, corpus)["true"] == pytest.approx(logged, abs=1e-6)


@torch.no_grad()
def test_mlm_on_true_positions(probed, corpus):
    """With mlm alone the loss in the log; beside a position objective that of the same masked rows
    with positions in order, by hand."""
    plain = torch.autocast("cpu", enabled=False)
    model, rows = pretraining("mlm"), Rows(33)
    logged = train.evaluate(model, rows, plain, torch.device("cpu"))
    assert probe.mlm_loss(model, rows) == pytest.approx(logged["val_loss"], abs=1e-6)
    both = pretraining("mlm+pplm")
    both.load_state_dict(model.state_dict(), strict=False)
    assert probe.mlm_loss(both.train(), rows) == pytest.approx(logged["val_loss"], abs=1e-6)
    moved = train.evaluate(both, rows, plain, torch.device("cpu"))["val_mlm"]
    assert abs(moved - logged["val_loss"]) > 1e-4


def test_words_that_cannot_matter_are_worth_nothing():
    model = pretraining("pplm")
    torch.nn.init.zeros_(model.encoder.tok.weight)
    found = probe.worth_of_words(model, Rows(20))
    assert found["true"] == found["random"] == found["shuffled"]


def knows_offsets(objective, true=True):
    """Make the head answer with the true offset of each pair, or copy the given one; of
    pplm_binary, with which ends have moved."""

    def scores(encoder, hidden, batch):
        pos = batch["pos"][:, 1:-1]
        place = torch.arange(1, pos.size(1) + 1).expand_as(pos)
        claim = place if true else pos
        label = claim[:, None] - claim[:, :, None] + objective.L - 1
        if objective.name == "pplm_binary":
            label = ((pos == place)[:, None] & (pos == place)[:, :, None]).long()
        return 50.0 * F.one_hot(label, objective.measure.n_class)

    objective.head.scores, objective.head.psi = scores, torch.nn.Identity()


@pytest.mark.parametrize("name", ["pplm", "pplm_some", "pplm_binary"])
def test_who_knows_all_offsets_tells_which_tokens_moved(name):
    model, corpus = pretraining(name, pos_rate=0.3), Rows(8)
    knows_offsets(model.objectives[name])
    found = probe.worth_of_words(model, corpus)
    assert found["auc"] == 1
    if name != "pplm_binary":  # who believes all that is given knows of none that it moved
        assert found["true"] < 1e-6
        knows_offsets(model.objectives[name], true=False)
        assert probe.worth_of_words(model, corpus)["auc"] == pytest.approx(0.5)


def test_offset_scores():
    """In nats, of each offset; of smooth_l1's one number, minus the distance from it in places."""
    for cfg in ({}, dict(pair_loss="smooth_l1", pair_head="linear")):
        model = pretraining("pplm", L=8, **cfg)
        pplm, last = model.objectives["pplm"], model.objectives["pplm"].head.psi
        last = last if cfg else last[2]
        with torch.no_grad():
            last.weight.zero_()
            if cfg:
                last.bias.fill_(3 / 8)
            else:
                last.bias.fill_(-50.0)[[7 + 2, 7 + 4]] = 0.0
            batch, hidden = {"pos": torch.arange(8)[None]}, torch.randn(1, 8, 16).double()
            found = sample.offset_scores(pplm, model.encoder, hidden, batch)
        assert found.shape == (1, 6, 6, 15)
        expected = [-abs(r - 3) if cfg else -math.log(2) for r in (2, 4)]
        torch.testing.assert_close(found[0, 1, 5, [7 + 2, 7 + 4]], torch.tensor(expected).float())


def test_best_order_tries_every_exchange():
    """Its end is no worse than that of a loop over exchanges and pairs from the given places, is
    not these, and no exchange improves it."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(5, 5, 2 * 7 - 1, generator=generator)

    def total(pos):
        pairs = [(i, j) for i in range(5) for j in range(5) if i != j]
        return sum(float(scores[i, j, pos[j] - pos[i] + 6]) for i, j in pairs)

    def climb(pos, given):
        while True:
            ways = [pos]
            for i, j in itertools.combinations(range(5), 2):
                ways.append(list(pos))
                ways[-1][i], ways[-1][j] = pos[j], pos[i]
            best = max(ways, key=lambda way: -math.inf if way == given else total(way))
            if best == pos:
                return pos
            pos = best

    for _ in range(8):
        given = (torch.randperm(5, generator=generator) + 1).tolist()
        found = sample.best_order(scores, torch.tensor(given)).tolist()
        assert total(found) >= total(climb(given, given)) and found != given
        assert climb(found, given) == found


# Runs.


def probe_json(folder, *flags):
    probe.main([*map(str, flags), "--out_dir", str(folder)])
    return read(folder / "probe.json")


def pictures_in(folder):
    return {file.stem for file in folder.glob("*.png")}


@pytest.fixture
def undrawn(monkeypatch):
    """Pictures are empty files: what is in them, and how they are drawn, has tests of its own."""
    for name in ("draw", "draw_families"):
        monkeypatch.setattr(probe, name, lambda file, panels, figure_class: file.touch())


@pytest.fixture(scope="module")
def probed(corpus_file, cache, tmp_path_factory):
    """Tiny runs: what --ckpt, --runs, --dynamics and --text work on."""
    out = tmp_path_factory.mktemp("probed")
    for name, flags in (
        ("abs", "--steps 12 --keep_every 4 --eval_every 6"),
        ("none", "--pe none --lr .01"),
        ("lsin", "--pe lsin+rlsin --eval_every 2"),
        ("tupe", "--pe tupe_r"),
        ("clm", "--pe t5 --objective clm --n_layer 2"),
        ("nsp", "--objective mlm+nsp"),
        ("binary", "--objective mlm+pplm_binary --dtype float32"),
        ("tc", "--objective mlm+tc"),
        ("smooth", "--objective pplm --pair_loss smooth_l1"),
        ("pmlm", "--objective pmlm"),
    ):
        run_train(corpus_file, cache, out / name, "--steps", "4", *flags.split())
    return out


@pytest.mark.slow
def test_probe_of_a_run(probed, said, monkeypatch):
    probe.main(["--ckpt", str(probed / "lsin")])
    out, folder = said(), probed / "lsin" / "probe"
    assert "positional.png left out: lsin+rlsin has no" in out
    assert "frequencies.png left out" not in out and "position objective" not in out
    found = read(folder / "probe.json")
    encoder = probe.load_pretraining(probed / "lsin").encoder.double()
    A = probe.identical_word_maps(encoder, probe.probe_words(encoder))[1].mean(0)
    assert found["indicators"]["with_specials"]["opr_20"] == probe.opr(A, 20)
    assert found["indicators"]["without_specials"]["aiv"] == probe.aiv(A[1:-1, 1:-1])
    assert np.shape(found["map"]) == (16, 16) and len(found["pictures"]["map_per_head.png"]) == 2
    assert pictures_in(folder) == {
        "map",
        "map_per_head",
        "vectors",
        "proximity",
        "frequencies",
        "position_logits",
    }
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # as if it were not installed
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    folder = probed / "numbers"
    found = probe_json(folder, "--ckpt", probed / "none" / "ckpt.pt")
    assert found["indicators"]["without_specials"]["aiv"] is None
    found = probe_json(folder, "--ckpt", probed / "clm")
    assert found["indicators"]["with_specials"]["db"] == "inf"
    assert found["pictures"]["map.png"][0]["matrix"][0][1] is None
    out = said()
    assert "pip install matplotlib" in out and "| -" in out and "inf" in out
    assert [file.name for file in folder.iterdir()] == ["probe.json"]


def test_probe_of_a_run_with_a_position_objective(probed, said, tmp_path, undrawn):
    found = probe_json(tmp_path, "--ckpt", probed / "binary")
    out, mlm, found = said(), found["mlm"], found["words"]
    assert list(found) == ["true", "random", "shuffled", "auc"]
    assert "moved tokens told from the others: AUC" in out
    assert f"every position the true one: {mlm:.3f}" in out
    logged = log_of(probed / "binary")[-1]["val_pplm_binary"]
    assert found["true"] == pytest.approx(logged, abs=1e-4)
    found = probe_json(tmp_path, "--ckpt", probed / "pmlm", "--cache", "nowhere")
    assert set(found["words"].values()) == {found["mlm"]} == {None}
    assert "is not prepared in nowhere; --cache names" in said()


def test_a_fine_tuned_model_is_probed(probed, capsys, tmp_path, undrawn):
    """Indicators and pictures need an encoder; sample.py needs the heads of pre-training."""
    saved, file = weights(probed / "lsin"), tmp_path / "finetuned-cola.pt"
    model = {key: value for key, value in saved["model"].items() if key.startswith("encoder.")}
    model["head.1.weight"] = torch.zeros(2, 16)
    torch.save(
        {
            "config": saved["config"],
            "tokenizer": saved["tokenizer"],
            "model": model,
            "task": "cola",
            "step": 4,
        },
        file,
    )
    probe.main(["--ckpt", str(file)])
    found = read(tmp_path / "probe_finetuned-cola" / "probe.json")
    expected = probe_json(tmp_path / "run", "--ckpt", probed / "lsin")
    own = {"ckpt": str(file), "objective": "finetuned-cola", "mlm": None}
    assert found == {**expected, **own} and expected["mlm"] > 0
    capsys.readouterr()
    flags = ["--ckpt", str(file), "--text", "the [MASK] fox"]
    assert "take its run's ckpt.pt" in one_line(capsys, sample.main, flags)


@pytest.mark.slow
def test_probe_of_runs(probed, said, undrawn):
    for i, name in enumerate(("abs", "none", "lsin", "tupe")):
        rows = []
        for lr, seed in ((0.1, 0), (0.2, 0), (0.2, 1), (0.2, 7)):
            rows.append(
                {
                    "task": "docs",
                    "ckpt": "out/run",
                    "seed": seed,
                    "lr": lr,
                    "metrics": {"accuracy": i / 10 + lr + seed},
                }
            )
        (probed / name / "results.jsonl").write_text("\n".join(map(json.dumps, rows)))
    found = probe_json(probed / "compared", "--runs", probed / "*")
    out = said()
    by_name = {row["run"]: row for row in found["runs"]}
    assert len(by_name) == 10 and "left out" not in out and by_name["tupe"]["pe"] == "tupe_r"
    assert by_name["abs"]["steps"] == 12
    assert by_name["abs"]["val_loss"] == log_of(probed / "abs")[-1]["val_loss"]
    assert "--lr differs: " in out and "'none': 0.01" in out and "--pe differs" not in out
    assert by_name["lsin"]["scores"] == {"docs accuracy": pytest.approx(1.4)}  # best lr, median
    (table5,) = found["correlations"]
    assert table5["runs"] == 3 and table5["objective"] == "mlm"  # none left out
    names = ("abs", "lsin", "tupe")
    expected = np.corrcoef([by_name[n]["opr"] for n in names], [0, 2, 3])[0, 1]
    assert table5["opr"] == pytest.approx(expected)
    binary = by_name["binary"]
    assert binary["words true"] == binary["words"]["true"] > 0 and 0 <= binary["words auc"] <= 1
    assert by_name["abs"]["words true"] is by_name["pmlm"]["words auc"] is None
    assert pictures_in(probed / "compared") == {"maps", "losses"}
    assert len(found["pictures"]["losses.png"]) == len({row["objective"] for row in found["runs"]})
    probe_json(probed / "two", "--runs", probed / "abs", probed / "no*")
    assert "no correlations" in said()
    (probed / "none" / "results.jsonl").unlink()


def test_correlations_are_pearsons_without_none():
    """Over the runs where a number is finite; NaN where it is the same in all."""
    for x, unknown in (([1.0, 1, 1], True), ([1.0, math.inf, 2], True), ([3.0, 1, 2], False)):
        rows = [{"pe": "abs", "objective": "mlm", "scores": {"s": i}, "x": x[i]} for i in range(3)]
        rows.append({"pe": "none", "objective": "mlm", "scores": {"s": 9}, "x": -9.0})
        [found] = probe.correlations(rows, ["x"])
        assert found["runs"] == 3 and math.isnan(found["x"]) == unknown
    assert found["x"] == pytest.approx(np.corrcoef([0, 1, 2], x)[0, 1])


def test_damaged_files_are_left_out(probed, said, tmp_path, undrawn):
    """A crash, a full disk, another program: what can be read still counts."""
    good = {"task": "docs", "ckpt": "out/run", "lr": 0.1, "metrics": {"accuracy": 0.5}}
    for name in ("lines", "checkpoint"):
        shutil.copytree(probed / "none", tmp_path / name)
    with open(tmp_path / "lines" / "log.jsonl", "ab") as handle:
        handle.write(b'\xff\xfe\n[1, 2]\n{"step": 9, "val_lo\n')
    rows = [json.dumps(row) for row in (good, [], {"task": "docs"}, "text")]
    (tmp_path / "lines" / "results.jsonl").write_bytes("\n".join(rows).encode() + b"\n\xff\n")
    (tmp_path / "checkpoint" / "ckpt.pt").write_bytes(b"PK")
    (tmp_path / "checkpoint" / "ckpt_prev.pt").unlink(missing_ok=True)
    found = probe_json(tmp_path / "probe", "--runs", tmp_path / "*")["runs"]
    out = said()
    assert [row["run"] for row in found] == ["lines"]
    assert found[0]["scores"] == {"docs accuracy": 0.5}
    assert found[0]["val_loss"] == log_of(probed / "none")[-1]["val_loss"]
    assert "log.jsonl: 3 damaged lines left out" in out
    assert "results.jsonl: 4 damaged lines left out" in out
    assert out.count(f"{tmp_path / 'checkpoint'} left out: ") == 1


DRIVER = str(HERE / "results" / "run.py")


@pytest.mark.slow
def test_tables_of_the_driver(capsys, monkeypatch, tmp_path):
    """results/run.py: every run of tables.txt is commands that the programs take, those that it
    starts from are runs, too; every row of runs.jsonl is printed, and none names the machine."""
    driver = runpy.run_path(DRIVER)
    for name in ("TEXT", "BLIMP", "GLUE"):
        monkeypatch.setenv(name, str(tmp_path))
    for task in finetune.GLUE.values():
        (tmp_path / task.folder).mkdir()
    here, parsed = SimpleNamespace(out="out/results", trial="", more=""), set()
    for table, runs in driver["TABLES"].items():
        for name in runs:
            commands = driver["commands"](table, name, here)
            assert next(iter(commands)) == "train"
            for start in re.findall(r"--init_\w+ out/results/(\S+)", commands["train"]):
                driver["find"](start)
            for command in commands.values():
                _, file, *flags = shlex.split(re.sub(r"--seed \d+|/results/\S+", "", command))
                program = {"train.py": train, "probe.py": probe, "finetune.py": finetune}[file]
                if (file, *flags) not in parsed:  # seeds and folders aside
                    program.parse_args(flags)
                parsed.add((file, *flags))
    rows = common.read_rows(driver["ROWS"])
    assert len({row["run"] for row in rows}) == len(rows) > 100
    for row in rows:
        assert {"git", "machine", "minutes", "commands", "curve", "val_loss", "words"} <= set(row)
        assert not re.search(r"/(work|home|tmp|root|mnt)\b", json.dumps(row))
    with pytest.raises(SystemExit):
        driver["main"]([])
    out = capsys.readouterr().out
    for row in rows:
        assert f"| {driver['stem'](row['run'])} " in out


def test_lines_of_tables_txt():
    text = (
        "# a comment with | bars | in | it\nREAD = --n_head 16\n\n"
        "a | x-{abs,sin} | 2 | READ --pe {} --init_from out/results/y-sSEED\n"
        "b | y | 0 | READ | mnli cola: --seeds 3; docs: --seeds 1 @ .1 1\n"
    )
    driver = runpy.run_path(DRIVER)
    tables = driver["read_tables"](text)
    assert list(tables["a"]) == ["x-abs-s1337", "x-abs-s1", "x-sin-s1337", "x-sin-s1"]
    flags = "--n_head 16 --pe sin --init_from out/results/y-s1 --seed 1"
    assert tables["a"]["x-sin-s1"] == (flags, "")
    assert tables["b"]["y"][0] == "--n_head 16"
    assert list(driver["plan"](tables["b"]["y"][1], 200)) == [
        ("mnli", "--seeds 3", "1", 200),
        ("cola", "--seeds 3", "1", 200),
        ("docs", "--seeds 1", ".1", 20),
        ("docs", "--seeds 1", "1", 200),
    ]


@pytest.fixture
def driver(tmp_path, monkeypatch):
    """-> a function that runs the driver on two runs, the second started from the first, with
    programs that only write what the driver reads; it returns the parts that were called."""
    names, calls = runpy.run_path(DRIVER)["main"].__globals__, []
    monkeypatch.setitem(names, "ROOT", tmp_path)
    monkeypatch.setitem(names, "ROWS", tmp_path / "runs.jsonl")
    monkeypatch.setitem(names, "show", lambda *args: None)
    weighted = "--steps 20 --init_from out/results/a --objective taco --loss_weights 1 .1"
    flags = "--steps 20", weighted
    runs = {"a": (flags[0], ""), "b": (flags[1], "docs: --seeds 2")}
    monkeypatch.setitem(names, "TABLES", {"recipe": runs})

    def call(command, folder):
        program = shlex.split(command)[1].removesuffix(".py")
        calls.append(f"{program} {folder.name}")
        if program in names["breaks"]:
            raise names["breaks"][program]
        if program == "train":
            args = vars(train.parse_args(shlex.split(command)[2:]))
            last = {"step": 20, "loss": 6.0, "val_loss": 5.0, "val_mlm": 5.0, "ms_per_step": 9.0}
            first = {"git": "1", "args": args, "baselines": {}}
            lines = [json.dumps(line) for line in (first, last)]
            (folder / "log.jsonl").write_text("\n".join(lines))
            (folder / "ckpt.pt").touch()
        elif program == "probe":
            made = folder / ("blimp" if "--blimp" in command else "probe")
            made.mkdir(exist_ok=True)
            found = {"blimp": {"mean": 0.5}} if made.name == "blimp" else {"words": {}, "mlm": 4.0}
            (made / "probe.json").write_text(json.dumps(found))
        else:
            row = {"task": "docs", "step": 20, "lr": 1, "ckpt": "x", "one_class": False}
            rows = [json.dumps(row | {"seed": s, "metrics": {"accuracy": s}}) for s in (0, 1)]
            (folder / "results.jsonl").write_text("\n".join(rows))

    def run(*asked, **breaks):
        calls.clear()
        names["breaks"] = breaks
        with pytest.raises(SystemExit) as stopped:
            names["main"](list(asked))
        names["code"] = stopped.value.code
        return calls[:]

    monkeypatch.setitem(names, "call", call)
    monkeypatch.setenv("TEXT", "x")
    monkeypatch.delenv("BLIMP", raising=False)
    run.names = names
    return run


def test_driver_goes_on_where_it_was_stopped(driver, monkeypatch):
    """A row is written once it is complete; nothing is done twice; a new part is added alone."""
    rows = driver.names["ROWS"]
    assert driver("b", probe=KeyboardInterrupt()) == ["train a", "train b", "probe b"]
    assert driver.names["code"] == 130 and not rows.exists()
    assert driver("b", finetune=RuntimeError("no memory")) == ["probe b", "finetune b"]
    assert driver.names["code"] == 1 and not rows.exists()
    assert driver("b") == ["finetune b"]
    (row,) = common.read_rows(rows)
    assert row["run"] == "b" and row["mlm"] == 4 and row["scores"] == {"docs accuracy": [0, 1]}
    assert set(row["commands"]) == {"train", "probe", "docs"} and "x" not in row["args"].values()
    assert driver("recipe") == ["probe a"]  # trained it was
    assert driver("recipe") == []
    monkeypatch.setenv("BLIMP", "x")
    assert driver("b") == ["probe b"]
    *_, row = common.read_rows(rows)
    assert row["blimp"] == {"mean": 0.5} and row["scores"] == {"docs accuracy": [0, 1]}
    shutil.rmtree(driver.names["ROOT"] / "out/results/b")
    assert driver("b") == []  # all there: the weights are not missed


def test_driver_shares_its_work(driver, capsys):
    """A run that another worker has is left to it; another's flags in a folder are refused."""
    with driver.names["locked"](driver.names["ROOT"] / "out/results/a/row.lock"):
        assert driver("a") == []
    assert driver("a") == ["train a", "probe a"]
    driver.names["TABLES"]["recipe"]["a"] = "--steps 20 --lr 1", ""
    driver.names["ROWS"].unlink()
    assert driver("a") == [] and driver.names["code"] == 2
    assert "a has --lr 0.003, not 1.0: move it away" in capsys.readouterr().err
    for asked, why in ("c", "no table or run c"), ("recipe --trial x", "--trial is for p0-table-1"):
        assert driver(*asked.split()) == [] and why in capsys.readouterr().err


def test_driver_runs_all_seeds_of_a_name(driver, monkeypatch):
    runs = dict.fromkeys(["c-s1", "c-s2", "cc-s1"], ("--steps 20", ""))
    monkeypatch.setitem(driver.names, "TABLES", {"recipe": runs})
    assert driver("c") == ["train c-s1", "probe c-s1", "train c-s2", "probe c-s2"]
    assert driver("c-s3") == [] and driver.names["code"] == 2


def test_properties_over_schemes():
    """P3's table 5: Pearson's r of the schemes' means, `none` aside, and that of ranks."""
    properties = runpy.run_path(DRIVER)["show"].__globals__["properties"]
    rng, rows = np.random.default_rng(0), []
    for pe in ("none", "abs", "abs", "sin", "t5", "rel", "rope"):
        aiv, sd, opr, db, loss = rng.random(5)
        row = {"args": {"pe": pe}, "indicators": {"aiv": aiv, "sd": sd}, "val_loss": 5 + loss}
        rows.append(row | {"ranges": [[20, opr, db]]})
    rows[-1]["val_loss"] = 7  # has not learned order
    found = {line["violated"]: line for line in properties(rows)}
    x = np.array([row["ranges"][0][1] for row in rows])
    y = -np.array([row["val_loss"] for row in rows])
    x, y = [np.array([z[1:3].mean(), *z[3:]]) for z in (x, y)]
    line = found["opr 20"]
    assert line["r of 5"].startswith(f"{np.corrcoef(x, y)[0, 1]:.2f} (")
    assert line["r of 4"].startswith(f"{np.corrcoef(x[:4], y[:4])[0, 1]:.2f} (")
    ranks = [z.argsort().argsort() for z in (x, y)]
    assert line["ranks of 5"] == f"{np.corrcoef(*ranks)[0, 1]:.2f}"


def test_a_share_of_all_pairs_needs_all_pairs():
    share = runpy.run_path(DRIVER)["show"].__globals__["COLUMNS"]["BLiMP"]
    assert share({"blimp": {"mean": 0.53, "order_only": 0.5}}) == 0.53
    judged = {"mean": 0.1 + 0.2, "order_only": 0.3}  # two orders of the same words alone
    assert share({"blimp": judged}) is None and share({}) is None


@pytest.mark.slow
def test_trial_of_a_papers_table(corpus_file, tmp_path):
    """From training to a line of the table, at a tiny size, in a copy of the project."""
    for file in [*HERE.glob("*.py"), HERE / "results"]:
        (shutil.copytree if file.is_dir() else shutil.copy)(file, tmp_path / file.name)
    (tmp_path / "glue" / "CoLA").mkdir(parents=True)
    for split in ("train", "dev"):
        rows = "x\t1\t\tIt is so.\nx\t0\t*\tSo it is is.\n"
        (tmp_path / "glue" / "CoLA" / f"{split}.tsv").write_text(rows)
    command = "results/run.py", "p2-mlm", "--trial", str(corpus_file), "--device", "cpu"
    env = os.environ | {"GLUE": str(tmp_path / "glue")}
    done = subprocess.run(
        [sys.executable, *command], cwd=tmp_path, capture_output=True, text=True, env=env
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "mnli: no MNLI in $GLUE, left out" in done.stdout
    assert "hours of a V100 to pre-train" in done.stdout
    (row,) = common.read_rows(tmp_path / "out" / "trial" / "runs.jsonl")
    scores = {f"cola {metric}{at}" for metric in ("matthews", "accuracy") for at in ("", " at 0.2")}
    assert row["run"] == "p2-mlm" and set(row["scores"]) == scores
    assert "| p2-mlm at .2 " in done.stdout.rpartition("p2-table-1")[2]


@pytest.mark.slow
def test_dynamics_of_a_run(probed, corpus, said, tmp_path, undrawn):
    pairs = tmp_path / "pairs.tsv"
    pairs.write_text("quick\tfox\t7.5\nlazy\tzebra\t1\n")
    folder = probed / "abs" / "dynamics"
    found = probe_json(folder, "--dynamics", probed / "abs", "--pairs", pairs)
    assert [row["step"] for row in found["steps"]] == [4, 8, 12]
    assert pictures_in(folder) == {"contexts", "words", "vectors"}
    encoder, last = load(probed / "abs" / "ckpt_12.pt").requires_grad_(False), found["steps"][-1]

    def vector(word):
        return encoder.tok.weight[encoder.tokenizer.encode_ordinary(" " + word)].mean(0)

    cosines = [cosine(vector(a), vector(b)) for a, b in (("quick", "fox"), ("lazy", "zebra"))]
    assert last["word pairs"] == pytest.approx(sum(cosines) / 2, abs=1e-5)
    n = corpus.n_rows("val", 16)
    rows = np.linspace(0, n - 1, min(n, 128)).astype(int)
    tokens = torch.from_numpy(corpus.rows("val", rows, 16))
    expected = probe.context_cosines(encoder(tokens), tokens < encoder.config.cls_id)
    assert last["contextual score"] == pytest.approx(expected["contextual score"], abs=1e-5)
    assert found["rows"] == len(tokens)
    table = encoder.pe.parts["abs"].table.weight[:16]
    drawn = found["pictures"]["vectors.png"][-1]["matrix"]
    np.testing.assert_allclose(drawn, table @ table.T, rtol=1e-3, atol=1e-6)
    probe.main(["--dynamics", str(probed / "abs")])
    assert "words.png left out" in said()


def test_text_that_clm_goes_on_with(probed):
    model = probe.load_pretraining(probed / "clm")
    encoder, clm = model.encoder, model.objectives["clm"]
    for p in encoder.blocks.parameters():
        p.mul_(20)  # hardly trained: so that what a token sees alters the next one
    ids = encoder.tokenizer.encode_ordinary("the quick brown fox")
    tokens = [encoder.config.cls_id, *ids]
    while len(tokens) < 16:
        hidden = encoder(torch.tensor([tokens]), causal=True)[0, -1]
        tokens.append(int(clm.word_logits(encoder, hidden)[: encoder.config.cls_id].argmax()))
    found = sample.go_on(encoder, clm, "the quick brown fox")
    assert found == encoder.tokenizer.decode(tokens[1 + len(ids) :])


def test_two_texts(probed, said):
    """nsp's probability is that of its loss; tc's cosines are those of the texts read one by
    one."""
    text = "the quick fox ||| over a lazy dog"
    model = probe.load_pretraining(probed / "nsp")
    encode, cfg = model.encoder.tokenizer.encode_ordinary, model.encoder.config
    ids = [*encode("the quick fox"), cfg.sep_id, *encode(" over a lazy dog")]
    batch = {"nsp_label": torch.tensor([0]), "nsp_weight": torch.tensor([1.0])}
    hidden = model.encoder(torch.tensor([[cfg.cls_id, *ids, cfg.sep_id]]))
    loss, _ = model.objectives["nsp"].loss(model.encoder, hidden, batch)
    sample.main(["--ckpt", str(probed / "nsp"), "--text", text])
    assert f"probability {math.exp(-loss.item()):.3f}" in said()
    model, g = probe.load_pretraining(probed / "tc"), []
    for part in ("the quick fox", " over a lazy dog"):
        tokens = torch.tensor([[cfg.cls_id, *encode(part), cfg.sep_id]])
        g.append(list((model.encoder(tokens) - model.encoder.tok(tokens))[0, 1:-1]))
    within = [np.mean([cosine(a, b) for b in rows if b is not a]) for rows in g for a in rows]
    across = [np.mean([cosine(a, b) for b in g[1 - i]]) for i in (0, 1) for a in g[i]]
    found = sample.what_context_gives(model, ["the quick fox", " over a lazy dog"])
    assert found == pytest.approx((np.mean(within), np.mean(across)), abs=1e-5)


def test_hidden_spread_equals_a_loop():
    """`none` tells words apart and no places; a model without words the other way round."""
    for pe, causal in (("abs", False), ("abs", True), ("none", False)):
        encoder, words = tiny(pe, max_len=9).requires_grad_(False), torch.tensor([3, 5, 8, 13])
        rows = torch.tensor([[CLS, *[w] * 7, SEP] for w in words])
        hidden = encoder(rows, causal=causal).numpy()  # (4, 9, C)
        over_words = np.mean([hidden[:, i].std(0) for i in range(1, 8)])
        over_places = np.mean([hidden[w, 1:8].std(0) for w in range(4)])
        found = probe.hidden_spread(encoder, words, causal)
        assert list(found.values()) == pytest.approx([over_words, over_places], abs=1e-12)
        assert pe != "none" or found["std places"] < 1e-12
    encoder = tiny("abs", max_len=9).requires_grad_(False)
    torch.nn.init.zeros_(encoder.tok.weight)
    found = probe.hidden_spread(encoder, words)
    assert found["std words"] < 1e-12 < found["std places"]


def test_who_moved_with_a_perfect_model(probed):
    model = probe.load_pretraining(probed / "binary")
    encoder, objective = model.encoder, model.objectives["pplm_binary"]
    knows_offsets(objective)
    text = "the quick brown fox jumps over a dog"
    words, share, stayed, area = sample.who_moved(encoder, objective, text)
    assert "".join(words) == " " + text and area == 1 and set(stayed.tolist()) == {True, False}
    assert torch.equal(share > 0.1, stayed)
    encode = encoder.tokenizer.encode_ordinary
    short = next(text for n in range(2, 12) if len(encode(text := " dog" * n)) == 5)
    *_, stayed, _ = sample.who_moved(encoder, objective, short)
    assert not stayed.all(), "the first shuffle moves none of 5"


def test_put_in_order_with_a_perfect_model(probed):
    """A model that knows every offset puts the sentence back; one that copies makes one exchange,
    as it must."""
    assert abs(sample.pairs_right(torch.tensor([1, 0, 2])) - 2 / 3) < 1e-6
    model = probe.load_pretraining(probed / "binary")
    text = "the quick brown fox jumps over a lazy dog"
    for name, true in (("pplm", True), ("pplm", False), ("pmlm", True)):
        objective = objectives.OBJECTIVES[name](model.encoder, ObjectiveConfig(name))
        knows_offsets(objective, true)
        words, given, found = sample.put_in_order(model.encoder, objective, text)
        assert "".join(words) == " " + text and sample.pairs_right(given) < 1
        assert sorted(given.tolist()) == sorted(found.tolist()) == list(range(len(words)))
        assert sample.pairs_right(found) == 1 if true else (found != given).sum() == 2
        if name == "pmlm":  # what was hidden stands anywhere, not in front
            _, batch, _ = sample.shuffled(model.encoder, objective, text, 0)
            hidden = (batch["pos"][0, 1:-1] == UNKNOWN_POS).nonzero()[:, 0]
            assert set(given[: len(hidden)].tolist()) != set(hidden.tolist())


def test_every_objective_says_something_of_a_text(probed, said, monkeypatch):
    monkeypatch.setattr(sample, "SHUFFLES", 3)
    for ckpt, text, says in (
        ("abs", "the [MASK] fox [MASK]", "[MASK]: "),
        ("smooth", "the quick brown fox", "pairs of words in the right order"),
        ("smooth", "[SEP][CLS]", "the text:  [SEP][CLS]"),  # typed, these are letters like others
        ("pmlm", "the quick brown fox", "of 3 shuffles of this text it undoes"),
        ("binary", "the quick brown fox jumps", "told apart: AUC"),
        ("clm", "the quick", "the quick .."),
        ("tc", "the quick ||| brown fox", "across the two"),
    ):
        sample.main(["--ckpt", str(probed / ckpt), "--text", text])
        assert says in said()


def test_without_a_text_it_asks_until_an_empty_line(probed, said, monkeypatch):
    lines = iter(["no mask here", "the [MASK] fox", "", "never asked"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
    sample.main(["--ckpt", str(probed / "abs")])
    first, second, no, mask = said().splitlines()
    assert "takes a text with [MASK]" in second and "takes a text with [MASK]" in no
    assert mask.startswith("[MASK]: ") and next(lines) == "never asked"


@pytest.mark.parametrize("name", ["abs", "pmlm", "binary", "clm"])
def test_the_line_of_a_training_leaves_it_alone(probed, corpus, name):
    """The same words as from the model in eval mode and float32; nothing drawn, nothing changed."""
    run = sample.load_pretraining(probed / name)
    encoder = load(probed / name, dropout=0.5, attn_dropout=0.5)
    model = Pretraining(encoder, ObjectiveConfig("+".join(run.names))).eval()
    model.load_state_dict(run.state_dict())
    expected = sample.line(model, corpus=corpus)
    model.train()
    torch.manual_seed(7)
    before = torch.get_rng_state()
    with torch.autocast("cpu", torch.bfloat16):
        assert sample.line(model, corpus=corpus) == expected
    assert model.training and torch.equal(before, torch.get_rng_state())
    assert "\n" not in expected and len(expected) > 20
    if "mlm" in model.objectives:
        text, _, words = expected.partition(" | ")[0].partition(" = ")
        [answers] = sample.fill_masks(model.eval().encoder, model.objectives["mlm"], text, 3)
        assert words == ", ".join(f"{sample.shown(word)} {p:.2f}" for word, p in answers)
        assert text.replace("[MASK]", "dog").split(" ")[0] in WORDS and text.count("[MASK]") == 1


def test_the_line_of_a_perfect_model(probed, corpus):
    """Shuffled words come back in order; without mlm no word is masked."""
    encoder = sample.load_pretraining(probed / "pmlm").encoder
    model = Pretraining(encoder, ObjectiveConfig("pplm")).eval()
    knows_offsets(model.objectives["pplm"])
    given, _, found = sample.line(model, corpus=corpus).partition(" -> ")
    assert sorted(given.split()) == sorted(found.split()) and given != found
    assert found in encoder.tokenizer.decode(corpus.val.tolist())
    text = "the quick brown fox jumps over it"
    assert sample.line(model, text).endswith(f"-> {text}")


@pytest.mark.parametrize(
    "objective, text, says",
    [
        ("mlm", "no mask here", "mlm needs a \\[MASK\\]"),
        ("pplm", "a [MASK] here", "\\[MASK\\] is for mlm; the objective is pplm"),
        ("nsp", "any text", "nsp has nothing to say of a text"),
        ("mlm+pplm", "fox dog", "leaves fewer than 2 to hide or permute"),
        ("mlm+pplm", "the [MASK] fox " * 9, "tokens; between 2 and 14 fit"),
        ("mlm+pplm", "the quick [MASK] fox jumps", None),
        ("clm", "the quick", None),
    ],
)
def test_a_text_that_does_not_suit_is_refused_before_training(probed, objective, text, says):
    encoder = sample.load_pretraining(probed / "abs").encoder
    model = Pretraining(encoder, ObjectiveConfig(objective)).eval()
    if says:
        with pytest.raises(ValueError, match=says):
            sample.check(model, text)
    else:
        sample.check(model, text)
        assert sample.line(model, text)
    encoder.tokenizer = None  # before data are prepared: the objective alone
    if not says or "than 2" in says or "between" in says:
        sample.check(model, text)
    else:
        with pytest.raises(ValueError, match=says):
            sample.check(model, text)


@pytest.mark.parametrize(
    "flags, says",
    [
        ("--ckpt abs --text 'no mask here'", "takes a text with [MASK]"),
        ("--ckpt pmlm --text 'a [MASK] b'", "(pmlm) takes a sentence"),
        ("--ckpt tc --text 'no bars here'", "'one text ||| another'"),
        ("--ckpt tc --text 'the quick |||'", "0 tokens"),
    ],
)
def test_mistakes_with_the_sample_are_one_line(flags, says, probed, monkeypatch, capsys):
    monkeypatch.chdir(probed)
    assert says in one_line(capsys, sample.main, shlex.split(flags))


@pytest.mark.parametrize(
    "flags, says",
    [
        ("--ckpt nowhere", "no checkpoint"),
        ("--runs nowhere*", "no folder with a readable ckpt.pt"),
        ("--dynamics lsin", "--keep_every"),
        ("--dynamics abs --pairs abs/config.json", "line 1 is not word<TAB>word<TAB>score"),
        ("--runs abs --ckpt abs", "take one of"),
        ("--ckpt abs --blimp nowhere", "no pairs in nowhere: --blimp takes .jsonl files"),
    ],
)
def test_mistakes_with_the_probe_are_one_line(flags, says, probed, monkeypatch, capsys):
    monkeypatch.chdir(probed)
    assert says in one_line(capsys, probe.main, shlex.split(flags))


# Minimal pairs.


def masked_log_p(model, row, place, hidden):
    """log p(the token at `place` | the row with the `hidden` places masked), one row at a time."""
    tokens = torch.tensor([row])
    tokens[0, hidden] = VOCAB - 5
    logits = model.objectives["mlm"].word_logits(model.encoder, model.encoder(tokens)[0, place])
    return float(logits.log_softmax(-1)[row[place]])


def naive_pll(model, row):
    """Salazar's sum, and Kauf and Ivanova's, with the words of Letters."""
    pll = l2r = 0
    for i in range(1, len(row) - 1):
        end = i + 1
        while end < len(row) - 1 and row[end] % 2:
            end += 1
        pll += masked_log_p(model, row, i, [i])
        l2r += masked_log_p(model, row, i, list(range(i, end)))
    return [pll, l2r]


def naive_clm(model, row):
    total = 0
    for i in range(1, len(row) - 1):
        hidden = model.encoder(torch.tensor([row[:i]]), causal=True)[0, -1]
        logits = model.objectives["clm"].word_logits(model.encoder, hidden)
        total += float(logits.log_softmax(-1)[row[i]])
    return [total]


def naive_offsets(model, row):
    objective, places = probe.position_objective(model), range(1, len(row) - 1)
    pos = torch.arange(len(row))[None]
    pos[0, 1:-1] = UNKNOWN_POS if objective.name == "pmlm" else pos[0, 1:-1]
    batch, total = {"tokens": torch.tensor([row]), "pos": pos}, []
    s = objective.head.scores(model.encoder, model.encoder(**batch), batch)
    for i, j in itertools.permutations(places, 2):
        answer = objective.head.psi(s[0, i - 1, j - 1]).double()
        label = 1 if objective.name == "pplm_binary" else j - i + 11
        if objective.cfg.pair_loss == "smooth_l1":
            away = abs(float(answer) - (j - i) / 12)
            total.append(-6 * away**2 if away < 1 / 12 else 1 / 24 - away)
        else:
            total.append(float(answer.log_softmax(-1)[label]))
    return [np.mean(total) if total else 0]  # one token: no pair


def random_sentences(n=24, seed=0):
    rng = random.Random(seed)
    return [rng.choices(range(VOCAB - 8), k=1 + i % 10) for i in range(n)]


@pytest.mark.parametrize(
    "objective, pe, naive",
    [
        ("mlm", "tupe_r", naive_pll),
        ("mlm+pplm", "rel", naive_pll),
        ("clm", "t5", naive_clm),
        ("pplm", "abs", naive_offsets),
        ("pplm_binary", "rope", naive_offsets),
        ("pmlm", "sin", naive_offsets),
        ("smooth_l1", "abs", naive_offsets),
    ],
)
@torch.no_grad()
def test_sentence_scores_equal_loops(objective, pe, naive, monkeypatch):
    """In float32, in batches of several lengths, against one row at a time in float64."""
    monkeypatch.setattr(probe, "BATCH_TOKENS", 100)
    change = {"pair_loss": objective} if objective == "smooth_l1" else {}
    model = pretraining("pplm" if change else objective, pe, double=False, **change).eval()
    for p in model.parameters():
        p.mul_(5 if p.dim() > 1 else 1)
    sentences = random_sentences()
    found = probe.sentence_scores(model, sentences)
    model.double()
    expected = [naive(model, [VOCAB - 8, *ids, VOCAB - 6]) for ids in sentences]
    np.testing.assert_allclose(np.transpose(list(found.values())), expected, rtol=1e-5, atol=1e-4)
    if naive is naive_pll:
        pll, l2r = found.values()
        assert 0 < (pll != l2r).sum() < len(sentences)


@pytest.mark.slow
@torch.no_grad()
def test_pll_equals_transformers():
    transformers = pytest.importorskip("transformers")
    model = pretraining(double=False, n_layer=2).eval()
    for p in model.parameters():
        p.copy_(torch.randn_like(p) / (4 if p.dim() > 1 else 1))
    config = transformers.RobertaConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=14,
        layer_norm_eps=1e-5,
    )
    theirs, ours = transformers.RobertaForMaskedLM(config).eval(), model.objectives["mlm"]
    copy_bert_layers(model.encoder, theirs.roberta, ROBERTA_NAMES)
    embeddings, head = theirs.roberta.embeddings, theirs.lm_head
    embeddings.token_type_embeddings.weight.zero_()
    table = model.encoder.pe.parts["abs"].table.weight
    embeddings.position_embeddings.weight[2:].copy_(table[:12])
    head.dense.load_state_dict(ours.dense.state_dict())
    head.layer_norm.load_state_dict(ours.norm.state_dict())
    head.decoder.weight.copy_(model.encoder.tok.weight[:VOCAB])
    head.decoder.bias.copy_(ours.bias)
    sentences, expected = random_sentences(400), []
    for ids in sentences:
        rows = torch.tensor([[VOCAB - 8, *ids, VOCAB - 6]]).repeat(len(ids), 1)
        inner, place = torch.arange(len(ids)), 1 + torch.arange(len(ids))
        rows[inner, place] = VOCAB - 5
        logits = theirs(rows, position_ids=2 + torch.arange(len(ids) + 2)[None]).logits
        p = logits.log_softmax(-1)[inner, place, torch.tensor(ids)]
        expected.append(float(p.sum()))
    found = probe.sentence_scores(model, sentences)["pll"]
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-4)


@torch.no_grad()
def test_a_bag_of_words_ties_on_order():
    """`none` on any weights, in float32; who has positions does not tie."""
    for pe, ties in (("none", True), ("alibi", False)):
        model = pretraining(pe=pe, double=False, n_layer=3).eval()
        for p in model.encoder.parameters():
            p.mul_(10)
        sentences = [ids for ids in random_sentences(200) if len(ids) > 3]
        moved = [random.Random(0).sample(ids, len(ids)) for ids in sentences]
        found = probe.sentence_scores(model, sentences + moved)["pll"]
        near = abs(np.subtract(*np.split(found, 2))) <= probe.TIE_NATS
        assert near.all() if ties else near.mean() < 0.2


def test_very_unlikely_sentences_tie_too():
    """Thousands of nats: a sum of float32 would differ by more than a tie allows."""
    model = pretraining(pe="none", double=False).eval()
    logits = 13.7 * torch.arange(72.0)
    model.objectives["mlm"].word_logits = lambda encoder, x: logits.expand(len(x), -1)
    ids = [random.Random(i).choices(range(64), k=10) for i in range(200)]
    moved = [random.Random(0).sample(x, 10) for x in ids]
    found = probe.sentence_scores(model, ids + moved)
    for scores in found.values():
        assert scores.dtype == np.float64 and np.abs(scores).max() > 3000
        a, b = np.split(scores, 2)
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-9)


@pytest.mark.parametrize("case", [str, str.lower])
def test_swapped_words_are_order_only_in_any_case(probed, tmp_path, case, capsys, undrawn):
    """A sentence's first word is the token that it is inside a sentence: the same words in another
    order are the same tokens, on which a bag of words ties, and word counts do."""
    pairs = [("dog watch the fox", "fox watch the dog"), (" owls jumps", "jumps owls")]
    write_pairs(tmp_path / "own.jsonl", [(case(good), case(bad)) for good, bad in pairs])
    found = probe_json(tmp_path / "out", "--ckpt", probed / "none", "--blimp", tmp_path)
    assert found["order-only"] == found["order-only ties"]["pll"] == 2
    assert found["order-only ties"]["unigram"] == 2 and found["blimp"]["order_only"] == 0.5


def test_the_error_of_a_share_is_clustered():
    """Of equal clusters: that of the mean of their means; not that of independent pairs; of
    unequal ones, the formula in a loop."""
    rng = np.random.default_rng(0)
    means = rng.random(8)
    values = pandas.Series(np.repeat(means, 50))
    clusters = pandas.Series(np.repeat(np.arange(8), 50))
    expected = means.std(ddof=1) / math.sqrt(8)
    assert probe.clustered_error(values, clusters) == pytest.approx(expected)
    assert expected > 5 * values.std() / math.sqrt(400)
    values, clusters = pandas.Series([1, 0, 0.5, 1, 1, 0.0]), pandas.Series([*"aabbbc"])
    sums = [sum(v - 3.5 / 6 for v, c in zip(values, clusters) if c == name) for name in "abc"]
    expected = math.sqrt(sum(x * x for x in sums) * 3 / 2) / 6
    assert probe.clustered_error(values, clusters) == pytest.approx(expected)
    assert math.isnan(probe.clustered_error(values, pandas.Series(["a"] * 6)))


def write_pairs(file, rows, opener=open):
    with opener(file, "wt", encoding="utf-8") as handle:
        for good, bad, *names in rows:
            row = {"sentence_good": good, "sentence_bad": bad}
            handle.write(json.dumps(row | dict(zip(("UID", "linguistics_term"), names))) + "\n")


@pytest.mark.slow
def test_minimal_pairs_of_runs(probed, corpus, capsys, tmp_path, undrawn):
    write_pairs(
        tmp_path / "one.jsonl.xz",
        [
            (" quick brown fox", " fox brown quick", "a", "s-selection"),
            (" the lazy dog", " dog the lazy", "b", "argument_structure"),
            ("a" * 999, "b", "c", "long"),
            ("owls", "owls", "b", "argument_structure"),
        ],
        lzma.open,
    )
    own = [(" seven wise owls", " seven wise xyzzy"), (" tree", " q")]
    write_pairs(tmp_path / "own.jsonl", own)
    found = probe_json(tmp_path / "out", "--runs", probed / "[anp]*", "--blimp", tmp_path)
    out = capsys.readouterr().out
    runs = {run["run"]: run for run in found["runs"]}
    assert runs.keys() == {"abs", "none", "nsp", "pmlm"} and "too long for the rows: 1" in out
    none = runs["none"]
    assert [none[key] for key in ("pairs", "too long", "order-only")] == [5, 1, 3]
    assert none["ties"]["pll"] >= none["order-only ties"]["pll"] == 3
    for run in runs.values():
        for score, row in run["scores"].items():
            by_name = run["paradigms"][score]
            assert row["own"] == by_name["own"] and row["mean"] == pytest.approx(
                np.mean([by_name["a"], by_name["b"], by_name["own"]])
            )
            assert row["argument_structure"] == pytest.approx((by_name["a"] + 2 * by_name["b"]) / 3)
    model = probe.load_pretraining(probed / "abs")
    assert none["scores"]["unigram"]["own"] == none["scores"]["bigram"]["own"] == 1
    texts = [" seven wise owls", " tree", " seven wise xyzzy", " q"]
    ids = model.encoder.tokenizer.encode_ordinary_batch(texts)
    a, b, c, d = probe.sentence_scores(model, ids)["pll"]
    assert runs["abs"]["paradigms"]["pll"]["own"] == np.mean([a > c, b > d])
    assert pictures_in(tmp_path / "out") == {"phenomena"} == pictures_in(probed / "abs" / "blimp")
    # Frequencies, by a loop; without the text they are left out.
    text, V = corpus.train.tolist(), corpus.vocab_size
    bigram = 0
    for left, token in zip([V - 6, *ids[0]], ids[0]):
        p = (text.count(token) + 1) / (len(text) + V)
        seen = sum(pair == (left, token) for pair in zip(text, text[1:]))
        bigram += math.log((seen + probe.PRIOR * p) / (text.count(left) + probe.PRIOR))
    assert probe.count_scores(corpus, ids)["bigram"][0] == pytest.approx(bigram)
    one = ["--ckpt", probed / "clm", "--blimp", tmp_path / "own.jsonl", "--cache", "nowhere"]
    assert list(probe_json(tmp_path / "out", *one)["scores"]) == ["log-likelihood"]
    assert "what frequency says left out" in capsys.readouterr().out


# Longer rows.


class Stream:
    """Stands for a data.Corpus whose validation text has 90 tokens."""

    vocab_size, val = VOCAB, (np.arange(90) * 7 % CLS).astype(np.uint16)

    def n_rows(self, split, L):
        return len(self.val) // (L - 2)

    def rows(self, split, index, L):
        out = np.full((len(index), L), SEP, np.int64)
        out[:, 0] = CLS
        for row, i in zip(out, index):
            row[1:-1] = self.val[i * (L - 2) : (i + 1) * (L - 2)]
        return out


@torch.no_grad()
@pytest.mark.parametrize("pe", ["none", "sin", "rel", "t5", "rope", "alibi", "lsin+rlsin"])
def test_losses_by_place_equal_a_loop(pe, monkeypatch):
    """Rows twice and four times as long as max_len, a row at a time; every length has the same
    text and masks."""
    monkeypatch.setattr(probe, "LENGTH_TOKENS", 48)
    monkeypatch.setattr(probe, "BATCH_TOKENS", 30)
    model = pretraining("mlm", pe, L=6, mask_rate=0.3).eval()
    seen, words, at = probe.one_text(Stream(), model.objectives["mlm"], 24)
    assert len(seen) == 44 and at.sum() == round(0.3 * 42)
    for length in (6, 13, 24):
        n, expected = length - 2, []
        for start in range(0, 44 - n + 1, n):
            row = torch.tensor([[CLS, *seen[start : start + n].tolist(), SEP]])
            logits = model.objectives["mlm"].word_logits(model.encoder, model.encoder(row)[0])
            for i in at[start : start + n].nonzero()[:, 0].tolist():
                loss = -float(logits[i + 1].log_softmax(-1)[words[start + i]])
                expected.append((i + 1, loss))
        places, losses = probe.losses_by_place(model, Stream(), length, 24)
        assert places.tolist() == [place for place, _ in expected]
        alike(losses, [loss for _, loss in expected])


@pytest.mark.parametrize("pe", ["abs", "tupe_r", "bert_ad", "tupe_a_free"])
def test_tables_that_end_are_refused_beyond_their_end(pe):
    model = pretraining("mlm", pe, L=12).eval().requires_grad_(False)
    probe.losses_by_place(model, Stream(), 12, 24)
    says = rf"pe {pe} has a table that ends at place 12; .*--init_from RUN --block_size 24"
    with pytest.raises(ValueError, match=says):
        probe.losses_by_place(model, Stream(), 24, 24)


def test_lengths_of_runs(probed, said, tmp_path, undrawn):
    found = probe_json(tmp_path / "one", "--ckpt", probed / "none", "--lengths", "16,40")
    assert list(found["lengths"]) == ["16", "40"] == list(found["lengths_by_place"])
    assert list(found["lengths_by_place"]["40"]) == ["0", "32"]
    assert "| 0-31" in said() and pictures_in(tmp_path / "one") == {"lengths"}
    runs = ["--runs", probed / "none", probed / "abs", probed / "clm"]
    [run] = probe_json(tmp_path / "two", *runs, "--lengths", "16,40")["runs"]
    out = said()
    assert "pe abs has a table that ends at place 16" in out and "--lengths scores mlm" in out
    assert run["lengths"] == found["lengths"] and pictures_in(tmp_path / "two") == {"lengths"}


@pytest.mark.parametrize(
    "lines, says",
    [
        ("", "no pairs in"),
        ('{"sentence_good": "a", "sentence_bad": "b"}\n["a", "b"]', "row 2: sentence_good"),
        ('{"sentence_good": "a", "sentence_bad": ""}', "row 1: sentence_good and"),
        ('{"sentence', "cannot be read"),
        (json.dumps({"sentence_good": "a" * 999, "sentence_bad": "b"}), "no pair fits"),
    ],
)
def test_pairs_that_cannot_be_read_are_one_line(lines, says, probed, tmp_path, capsys):
    (tmp_path / "own.jsonl").write_text(lines)
    assert exit_code(probe.main, ["--ckpt", str(probed / "abs"), "--blimp", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert says in error and error.count("\n") == 1
    with pytest.raises(ValueError, match="tc cannot say how likely"):
        probe.sentence_scores(pretraining("tc"), [[1, 2]])


def test_fill_masks_gives_words_of_the_text(run, tmp_path):
    run("run", "--steps 150 --lr 0.02")
    model = probe.load_pretraining(tmp_path / "run")
    text = "the quick brown [MASK] jumps over"
    [(best, *_)] = sample.fill_masks(model.encoder, model.objectives["mlm"], text)
    assert best[0].strip() in WORDS


def test_only_comparable_scores_count():
    row = dict(task="rte", step=9, ckpt="out/run", recipe="electra", epochs=3, n_train=9, length=64)
    others = [
        dict(row, step=5),
        dict(row, eval_only=True),
        dict(row, probe=True),
        dict(row, ckpt="finetuned-mnli.pt (mnli)"),
        dict(task="rte", ckpt="bow", n_train=9),
    ]
    assert probe.comparable([row, row, *others], 9) == [row, row]
    last = dict(row, epochs=1)
    assert probe.comparable([row, last], 9) == [last], "the last settings"
    copied = dict(row, ckpt="out/run (2)")
    assert probe.comparable([copied], 9) == [copied], "a folder may end in )"


# ==================================================================================================
# bench.py

TINY_BENCH = shlex.split(
    "--batch_size 2 --block_size 16 --pairs 2 --warmup 1 --device cpu --dtype float32"
)
variant = functools.partial(
    bench.BenchConfig, batch_size=2, block_size=16, device="cpu", dtype="float32"
)


@pytest.fixture
def no_memory(monkeypatch):
    """Peak memory takes a process for each row, the machine's rates a second: measured in one test
    only."""
    monkeypatch.setattr(bench, "fresh", lambda function, *args: 1.0)
    monkeypatch.setattr(bench, "ceilings", lambda device, dtype: (1e12, 1e10))


def bench_rows(tmp_path, *flags):
    bench.main([*TINY_BENCH, *flags, "--json", str(tmp_path / "rows.json")])
    found = read(tmp_path / "rows.json")
    assert found["machine"]
    for row in found["rows"]:
        assert {"name", "pe", "objective", "peak_mem_mb", "mfu"} <= row.keys()
        seconds = row["ms_per_step"] / 1000
        tokens = row["batch_size"] * row["block_size"]
        assert row["tokens_per_s"] * seconds == pytest.approx(tokens) and row["over_floor"] > 0
    return found["rows"]


def test_bench_holds_schemes_against_abs_and_objectives_against_mlm(
    tmp_path, no_memory, monkeypatch
):
    seconds = {"rel": 0.003, "pplm": 0.002, "mlm_full": 0.004}
    monkeypatch.setattr(
        bench, "pretraining", lambda v: lambda: seconds.get(v.pe, seconds.get(v.objective, 0.001))
    )
    rows = bench_rows(tmp_path, "--pe", "abs,rel")
    assert [(row["pe"], row["ratio_to_abs"]) for row in rows] == [("abs", 1), ("rel", 3)]
    assert [row["parameters_added"] for row in rows] == [17 * 128, 130 * 32]
    rows = bench_rows(tmp_path, "--objective", "pplm,mlm_full,taco")
    found = {row["objective"]: row["ratio_to_mlm"] for row in rows}
    assert found == {"pplm": 2, "mlm_full": 4, "taco": 1}


def test_bench_sweeps_lengths_at_constant_tokens(tmp_path, no_memory, monkeypatch):
    monkeypatch.setattr(bench, "SWEEP", (8, 32))
    monkeypatch.setattr(bench, "pretraining", lambda v: lambda: v.block_size / 1000)
    rows = bench_rows(tmp_path, "--sweep")
    assert [(row["batch_size"], row["ms_per_step"]) for row in rows] == [(4, 8), (1, 32)]
    assert [row["ratio_to_8"] for row in rows] == [1, 4], "dearer: above 1"


def test_bench_beside_the_peer(tmp_path, no_memory, monkeypatch):
    pytest.importorskip("transformers")
    monkeypatch.setattr(bench, "pretraining", lambda v: lambda: 0.002 if v.peer else 0.001)
    ours, theirs = bench_rows(tmp_path, "--peer", "hf", "--no-compile", "--pe", "rel")
    assert (ours["name"], theirs["name"]) == ("ours eager", "hf eager")
    assert ours["speed_to_hf_eager"] == 2 and (ours["pe"], theirs["pe"]) == ("rel", "abs")


def test_all_is_every_model_once(monkeypatch):
    """What is added to SCHEMES or OBJECTIVES appears; an alias of another does not."""
    monkeypatch.setattr(bench, "compare", lambda variants, reference, key: (variants, key))
    monkeypatch.setitem(model_module.SCHEMES, "new", [Kerple])
    monkeypatch.setitem(model_module.SCHEMES, "again", [model_module.Rotary, model_module.T5Bias])
    monkeypatch.setitem(objectives.OBJECTIVES, "new", objectives.TC)
    variants, key = bench.table(variant(pe="all"), {})
    expected = [*(pe for pe in PE_NAMES if pe not in ("bert_a", "bert_r")), "new", "again"]
    assert [v.pe for v in variants] == expected and key == "abs"
    variants, key = bench.table(variant(objective="all"), {})
    expected = [*objectives.OBJECTIVES, "mlm_full"]
    assert [v.objective for v in variants] == expected and key == "mlm"
    compiled = variant(peer="hf")
    monkeypatch.setattr(common, "can_compile", lambda device: True)
    names = [v.name for v in bench.table(compiled, {})[0]]
    assert names == ["ours eager", "ours compiled", "hf eager", "hf compiled"]
    variants, key = bench.table(variant(combo=True, compile=True), {})
    assert [v.name for v in variants] == ["ours compiled", "ours combo"] and key == "plain"


@pytest.mark.slow
def test_bench_measures_memory_in_a_fresh_process(tmp_path):
    (row,) = bench_rows(tmp_path, "--pe", "abs")
    assert 50 < row["peak_mem_mb"] < 5000


def test_peer_has_our_parameters_but_for_what_is_documented():
    pytest.importorskip("transformers")
    theirs = variant(peer="hf")
    # One position more (ours: an unknown one; theirs: two before the first), and one token type.
    assert theirs.n_parameters() - variant().n_parameters() == 2 * 128
    model = theirs.build()
    assert not any("pooler" in name for name, _ in model.named_parameters())
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("change", [{}, dict(objective="mlm_full"), dict(peer="hf")])
def test_measured_steps_are_updates(change, monkeypatch):
    if "peer" in change:
        pytest.importorskip("transformers")
    v = variant(**change)
    model = v.build()
    monkeypatch.setattr(bench.BenchConfig, "build", lambda self: model)
    before = [p.clone() for p in model.parameters()]
    assert bench.pretraining(v)() > 0 and model.training
    moved = [(p != old).any() for p, old in zip(model.parameters(), before) if old.dim() > 1]
    assert all(moved)


def test_peers_masking_is_the_collators():
    cfg = variant().shape
    tokens = torch.randint(4, cfg.cls_id, (500, 200))
    tokens[:, 0] = cfg.cls_id
    ids, labels = bench.mask_as_peer(tokens, cfg, 0.15).values()
    scored = labels != -100
    assert not scored[:, 0].any() and torch.equal(labels[scored], tokens[scored])
    assert torch.equal(ids[~scored], tokens[~scored]) and ids.max() <= cfg.mask_id
    assert abs(scored[:, 1:].float().mean() - 0.15) < 0.01
    assert abs((ids[scored] == cfg.mask_id).float().mean() - 0.8) < 0.02
    assert abs((ids[scored] == tokens[scored]).float().mean() - 0.1) < 0.02


@pytest.mark.parametrize(
    "preset, objective",
    [
        ("demo", "mlm"),
        ("demo", "mlm_full"),
        ("demo", "clm"),
        ("demo", "pplm"),
        ("demo", "mlm+pplm_binary"),
        slow("paper", "mlm"),
    ],
)
def test_floor_is_what_pytorch_counts(preset, objective, monkeypatch):
    from torch.utils.flop_counter import FlopCounterMode

    # The plain path: PyTorch cannot count a gradient that is taken inside a forward pass.
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)

    v = variant(preset=preset, objective=objective, block_size=64)
    step = bench.pretraining(v)
    with FlopCounterMode(display=False) as counter:
        step()
    counted = sum(operations for operations, _ in bench.count(v).values())
    assert counted == pytest.approx(counter.get_total_flops(), rel=0.03)


@pytest.mark.parametrize(
    "flags, said",
    [
        ("--pe foo", "choose from"),
        ("--pairs 1", "[2, "),
        ("--pe rope --objective pmlm", "unknown"),
        ("--objective tc --batch_size 1", "2 or more"),
        ("--peer hf --sweep", "--peer and --sweep do not go together"),
        ("--data docs", "no file"),
        ("--combo", "add --compile"),
        ("--gpu x.json --pe rel", "--gpu and --pe do not go together"),
    ],
)
def test_bench_mistakes_are_one_line(flags, said, capsys):
    assert said in one_line(capsys, bench.main, ["--device", "cpu", *flags.split()])


def test_how_far_16_bits_are_from_32(tmp_path):
    flags = "--agree --pe tupe_r,rel --objective pplm,mlm --batch_size 2 --device cpu".split()

    def rows(dtype):
        bench.main([*flags, "--dtype", dtype, "--json", str(tmp_path / "rows.json")])
        return read(tmp_path / "rows.json")["rows"]

    exact, rounded = rows("float32"), rows("bfloat16")
    assert len({(row["pe"], row["objective"]) for row in exact}) == 4
    assert not any(row["loss_off"] or row["gradient_off"] for row in exact)
    assert all(1e-3 < row["gradient_off"] < 3e-2 and row["loss_off"] < 5e-3 for row in rounded)


def test_the_lines_of_a_gpu_are_commands():
    lines = bench.lines_of_gpu()
    assert lines[0].startswith("bench.py --agree") and len(set(lines)) == len(lines)
    for command in lines:
        program, *words = command.split()
        if program != "data.py":
            {"bench.py": bench, "train.py": train}[program].parse_args(words)
        if program == "train.py":
            assert lines.index("data.py --dataset docs --tokenizer bpe") < lines.index(command)


@pytest.mark.slow
def test_the_lines_of_a_gpu_go_on_where_they_were(tmp_path, corpus_file, monkeypatch, said):
    trains = f"train.py --objective pplm --dataset {corpus_file} --resume --out_dir {tmp_path}/run"
    lines = ["bench.py --agree --dtype float32", "bench.py --objective foo", trains]
    monkeypatch.setattr(bench, "lines_of_gpu", lambda: lines)
    flags = f"--gpu {tmp_path}/gpu.json --device cpu --preset demo --cache {tmp_path}/cache".split()

    def run(n, *more):
        bench.main([*flags, *more])
        assert said().count("python ") == n
        return read(tmp_path / "gpu.json")["rows"]

    agrees, refused, trained = run(3, "--pairs", "2")
    assert (agrees["exit"], trained["exit"]) == (0, 0) and agrees["rows"][0]["loss_off"] == 0
    assert refused["exit"] == 2 and "choose from" in refused["error"][0]
    assert trained["rows"][-1]["step"] == 2
    assert run(0, "--pairs", "2")[2] == trained
    monkeypatch.setattr(bench, "LIMIT", 3)
    lines[:] = [trains.replace("/run", "/long")]
    for _ in range(2):  # what was cut is asked for again
        *_, stopped = run(1)
        assert stopped["exit"] == "stopped"


@pytest.fixture
def raced(corpus, tmp_path, monkeypatch, hugging):
    """-> raced(): the rows of a tiny race in which 5 steps of each learner fit into the time."""
    monkeypatch.setattr(data, "prepare", lambda *where: corpus)
    monkeypatch.setattr(bench, "turns", lambda v, steps: [[0.6]] * len(steps))
    tiny_demo = dict(n_layer=1, n_head=2, d_model=16, d_ff=32, batch_size=4, block_size=16)
    monkeypatch.setitem(train.PRESETS, "demo", train.PRESETS["demo"] | tiny_demo)

    def raced():
        flags = "--race .05 --pe rope --device cpu --dtype float32 --json"
        bench.main([*flags.split(), str(tmp_path / "race.json")])
        return read(tmp_path / "race.json")["rows"]

    return raced


def test_a_race_is_what_train_py_does(raced, run, tmp_path):
    """The same rows, masks, weights, schedule and validation: ours comes to the same loss. (The
    preset's warm-up, 500 steps, becomes a third of the race.)"""
    row = next(row for row in raced() if row["name"] == "ours rope")
    assert (row["steps"], row["warmup"]) == (5, 1) and len(row["curve"]) == 5
    assert row["curve"][-1] == [row["seconds"], row["loss"]]
    flags = "--pe rope --steps 5 --warmup 1 --eval_every 1 --device cpu --dtype float32"
    run("run", flags)
    losses = [line["val_loss"] for line in log_of(tmp_path / "run")[1:]]
    assert losses == pytest.approx([loss for _, loss in row["curve"]], rel=1e-6)


def test_a_race_goes_on_where_it_was(raced, tmp_path, monkeypatch):
    rows = raced()
    names = [row["name"] for row in rows]
    assert names == ["step times", "ours rope", "ours abs", *bench.PEERS]
    assert all(row["loss"] == row["curve"][-1][1] for row in rows[1:])
    began, really = [], bench.run_of
    monkeypatch.setattr(bench, "run_of", lambda *x: began.append(x[-1]) or really(*x))
    assert raced() == rows and began == []
    lost = rows.pop(3)
    common.write_json(tmp_path / "race.json", {"rows": rows})
    again = raced()[-1]
    assert began == [lost["name"]] and again["loss"] == lost["loss"]


@pytest.mark.parametrize(
    "kind, pe", [("RobertaForMaskedLM", "abs"), ("MPNetForMaskedLM", "abs+t5")]
)
def test_peers_in_a_race_see_our_batches(hugging, kind, pe):
    """With our weights a peer has our loss, on rows in which each of its specials stands as a
    word."""
    v = variant(pe=pe)
    model = v.build().eval()
    peer = bench.Peer(bench.build_hf(v.shape, kind), model).eval()
    theirs = peer.theirs
    with torch.no_grad():
        for own, given in zip(hf.layers(theirs), hf.layers(model)):
            own.copy_(given)
        at, encoder = theirs.base_model.embeddings, model.encoder
        at.word_embeddings.weight.copy_(encoder.tok.weight[: v.shape.vocab_size])
        at.position_embeddings.weight[:16] = encoder.pe.parts["abs"].table.weight[:16]
        if kind.startswith("MPNet"):
            table = encoder.pe.parts["t5"].table.weight[:-1]
            theirs.base_model.encoder.relative_attention_bias.weight.copy_(table)
        else:
            at.token_type_embeddings.weight.zero_()
        tokens = v.rows()
        tokens[:, 1:9] = torch.arange(8)
        batch = model.corrupt(tokens, 0)
        close(peer(batch)[0], model(batch)[0], 1e-5)


@pytest.mark.parametrize("kind", bench.PEERS)
def test_no_word_is_padding_in_a_race(hugging, kind):
    peer = bench.Peer(bench.build_hf(variant().shape, kind), variant().build())
    tables = [module for module in peer.modules() if isinstance(module, torch.nn.Embedding)]
    assert all(t.padding_idx is None and (t.weight != 0).any(-1).all() for t in tables)
    words = peer.theirs.get_input_embeddings().weight
    assert peer.theirs.get_output_embeddings().weight is words, "tied, as ours are"


def test_bench_of_data(tmp_path, corpus_file, said, monkeypatch):
    monkeypatch.setattr(bench, "fresh", lambda function, *args: function(*args))
    bench.main([*TINY_BENCH, "--data", str(corpus_file), "--json", str(tmp_path / "rows.json")])
    (row,) = read(tmp_path / "rows.json")["rows"]
    assert row["mb"] * 1e6 == pytest.approx(os.path.getsize(corpus_file))
    assert 0 < row["loader_share"] < 10 and "MB/s" in said()


# ==================================================================================================
# hf.py

# What has a class in transformers. All else is refused.
GOES_OUT = {
    "none": "roberta",
    "abs": "roberta",
    "sin": "roberta",
    "lsin": "roberta",
    "t5": "mpnet",
    "abs+t5": "mpnet",
    "sin+t5": "mpnet",
    "t5+lsin": "mpnet",
    "rope": "roformer",
}
PARIS = "The capital of France is"


@pytest.fixture(scope="session")
def hugging():
    return pytest.importorskip("transformers")


def write_gpt2_merges(file, ranks, letters):
    """GPT-2's merges.txt: the two parts that a token becomes by BPE with the ranks below its
    own."""
    lines = ["#version: 0.2"]
    for token, rank in ranks.items():
        parts = [bytes([byte]) for byte in token]
        while len(parts) > 2:
            joined = [ranks.get(a + b, rank) for a, b in zip(parts, parts[1:])]
            at = joined.index(min(joined))
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        if len(parts) == 2:
            lines.append(" ".join(part.decode("latin-1").translate(letters) for part in parts))
    assert len(lines) == 50_001, "as many as OpenAI's file has"
    file.write_text("\n".join(lines))


@pytest.fixture(scope="session")
def roberta(hugging, tmp_path_factory):
    """-> a function that makes a folder like that of roberta-base: random weights; GPT-2's tokens
    in another order between `<s> <pad> </s> <unk>` and three fillers and `<mask>`."""
    try:
        ranks = data.encoding_arguments(data.gpt2_state())["mergeable_ranks"]
    except ValueError as error:
        pytest.skip(str(error))
    letters = hf.bytes_to_unicode()
    words = [token.decode("latin-1").translate(letters) for token in ranks]
    order = random.Random(0).sample(range(50256), 50256)
    names = [
        "<s>",
        "<pad>",
        "</s>",
        "<unk>",
        *(words[i] for i in order),
        "<|endoftext|>",
        "madeupword0000",
        "madeupword0001",
        "madeupword0002",
        "<mask>",
    ]
    files = tmp_path_factory.mktemp("tokens")
    (files / "vocab.json").write_text(json.dumps({name: i for i, name in enumerate(names)}))
    write_gpt2_merges(files / "merges.txt", ranks, letters)

    def make(C, n_layer, H, L, eps=1e-5):
        folder = tmp_path_factory.mktemp("theirs")
        shutil.copytree(files, folder, dirs_exist_ok=True)
        torch.manual_seed(0)
        theirs = hugging.RobertaForMaskedLM(
            hugging.RobertaConfig(
                vocab_size=50265,
                hidden_size=C,
                num_hidden_layers=n_layer,
                num_attention_heads=H,
                intermediate_size=2 * C,
                layer_norm_eps=eps,
                max_position_embeddings=L + 2,
                initializer_range=0.1,
                type_vocab_size=1,
            )
        ).eval()
        for p in theirs.parameters():
            p.data.add_(0.2 * torch.randn_like(p) if p.dim() == 1 else 0)
        theirs.save_pretrained(folder)
        run = tmp_path_factory.mktemp("imported") / "run"
        hf.main(["import", str(folder), str(run)])
        return SimpleNamespace(folder=folder, theirs=theirs, run=run)

    # Our id of each of theirs: [CLS] [PAD] [SEP], a spare one, the words, ..
    make.order = [50257, 50258, 50259, 50261, *order, 50256, 50262, 50263, 50264, 50260]
    return make


@pytest.fixture(scope="session")
def imported(roberta):
    return roberta(C=16, n_layer=1, H=2, L=16)


@torch.no_grad()
def apart(model, theirs, order, L):
    """The largest difference of hidden states, and of logits where both have them, over rows of odd
    lengths with pads behind them. order: our id of each of theirs."""
    encoder, base = model.encoder, theirs.base_model
    ids = torch.randint(8, len(order) - 1, (5, L), generator=torch.Generator().manual_seed(1))
    pad = torch.arange(L) >= torch.tensor([L, L - 1, 7, 3, 1])[:, None]
    ids[:, 0], ids[0, 2:4], ids[pad] = 0, order.index(encoder.config.mask_id), 1
    ours, given = encoder(torch.tensor(order)[ids], pad=pad), {"attention_mask": (~pad).long()}
    found = [(ours, base(ids, **given)[0])]
    if theirs is not base:
        logits = model.objectives["mlm"].word_logits(encoder, ours)[..., order]
        found.append((logits, theirs(ids, **given).logits))
    assert all(a[~pad].std() > 0.1 for a, _ in found)
    return max(float((a - b)[~pad].abs().max()) for a, b in found)


@pytest.mark.parametrize("again", [False, slow(True)])
def test_a_roberta_comes_in_exactly(hugging, roberta, imported, again):
    found = roberta(C=48, n_layer=5, H=4, L=9, eps=1e-3) if again else imported
    model, order = probe.load_pretraining(found.run), roberta.order
    cfg, at = model.encoder.config, found.theirs.roberta.embeddings
    assert (cfg.n_layer, cfg.n_head, cfg.max_len) == ((5, 4, 9) if again else (1, 2, 16))
    assert apart(model, found.theirs, order, cfg.max_len) < 1e-5
    # The words are a permutation, the unknown position is the row that RoBERTa never uses.
    assert sorted(order) == list(range(50265))
    assert torch.equal(model.encoder.tok.weight[order], at.word_embeddings.weight)
    row = at.position_embeddings.weight[0] + at.token_type_embeddings.weight[0]
    assert torch.equal(model.encoder.pe.parts["abs"].table.weight[-1], row)
    text = f"{PARIS} Paris,\n\n naïve 東京 \x00\xa0 I'm 2,000 ﬁ!!  "
    ids = hugging.AutoTokenizer.from_pretrained(found.folder).encode(text)
    ours = model.encoder.tokenizer.encode_ordinary(text)
    assert [order[i] for i in ids] == [cfg.cls_id, *ours, cfg.sep_id]


@pytest.fixture(scope="session")
def out_again(imported, tmp_path_factory):
    folder = tmp_path_factory.mktemp("again") / "theirs"
    hf.main(["export", str(imported.run), str(folder)])
    return folder


@pytest.mark.slow
def test_out_and_in_again_is_bit_equal(imported, out_again, tmp_path):
    hf.main(["import", str(out_again), str(tmp_path / "again")])
    before, after = weights(imported.run), weights(tmp_path / "again")
    for key in ("config", "tokenizer", "tokenizer_hash"):
        assert before[key] == after[key]
    assert same_weights(before["model"], after["model"])
    command = f"    python hf.py import {imported.folder} {imported.run}\n"
    assert command in (out_again / "README.md").read_text()


@pytest.mark.slow
def test_an_imported_run_is_a_run(imported, corpus_file, cache, tmp_path, capsys):
    run = imported.run
    sample.main(["--ckpt", str(run), "--text", f"{PARIS} [MASK]."])
    assert "[MASK]: " in capsys.readouterr().out
    start = finetune.read_start(str(run), cache)
    model = finetune.make_model(start, "cola", 16, 0)
    assert torch.equal(model.encoder.tok.weight, start["model"]["encoder.tok.weight"])
    # Another scheme starts from it, if the data has its tokenizer. It cannot be resumed: a line.
    flags = shlex.split(f"--tokenizer gpt2 --pe t5 --objective pplm --steps 2 --init_from {run}")
    run_train(corpus_file, cache, tmp_path / "more", *flags)
    assert "15 tensors loaded" in capsys.readouterr().out
    assert exit_code(run_train, corpus_file, cache, run, "--tokenizer", "gpt2", "--resume") == 2
    assert "holds another run" in capsys.readouterr().err


SMALL_ORDER = [*range(8184, 8192), *range(8184)]  # our id of each there, where the BPE is our own


@pytest.fixture
def random_run(hugging, corpus, tmp_path):
    """-> a function that saves a model whose every weight counts as train.py does; its run is
    tmp_path / run. `export` sends it, or a file, to tmp_path / theirs."""

    def make(pe="abs", objective="mlm", *flags):
        torch.manual_seed(3)
        encoder = Encoder(EncoderConfig(8192, pe, 2, 4, 32, 48, max_len=140, norm_eps=1e-3))
        args = vars(train.parse_args(["--objective", objective, "--pe", pe, *flags]))
        model = Pretraining(encoder, ObjectiveConfig(objective)).eval()
        for p in model.parameters():
            p.data.add_(0.1 * torch.randn_like(p))
        arguments = data.encoding_arguments(corpus.tokenizer)
        encoder.tokenizer = tiktoken.Encoding(**arguments)
        shutil.rmtree(tmp_path / "theirs", ignore_errors=True)
        (tmp_path / "run").mkdir(exist_ok=True)
        facts = {"args": args, "config": vars(encoder.config), "data": {"dataset": "some text"}}
        facts |= {"step": 7, "tokenizer": arguments, "tokenizer_hash": ""}
        torch.save({**facts, "model": model.state_dict()}, tmp_path / "run" / "ckpt.pt")
        return model

    make.export = lambda file="run": hf.main(
        ["export", str(tmp_path / file), str(tmp_path / "theirs")]
    )
    return make


@pytest.mark.parametrize(
    "pe", [*slow_unless(("abs", "t5", "rope"), GOES_OUT), "rel_k", "tupe_r", "rope+t5"]
)
def test_what_goes_out_computes_the_same(hugging, random_run, tmp_path, capsys, pe):
    """Read again by the class that the folder names, and by AutoModel. All else is refused."""
    model, folder = random_run(pe), tmp_path / "theirs"
    if pe not in GOES_OUT:
        assert exit_code(random_run.export) == 2 and not folder.exists()
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and f"pe {pe}," in error and "none, abs, sin, lsin" in error
        return
    random_run.export()
    theirs, info = hugging.AutoModelForMaskedLM.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert theirs.config.model_type == GOES_OUT[pe]
    for each in (theirs, hugging.AutoModel.from_pretrained(folder)):
        assert apart(model, each, SMALL_ORDER, 139) < 1e-5


def test_other_objectives_go_without_their_heads(hugging, random_run, tmp_path):
    for objective, auto in (("pplm", "AutoModel"), ("mlm+pmlm+tc", "AutoModelForMaskedLM")):
        model = random_run("abs+t5", objective)
        random_run.export()
        theirs = getattr(hugging, auto).from_pretrained(tmp_path / "theirs")
        assert theirs.config.architectures == [type(theirs).__name__]
        assert apart(model, theirs, SMALL_ORDER, 21) < 1e-5
    random_run("abs", "clm")
    assert exit_code(random_run.export) == 2


def test_layers_with_the_norm_first_stay_here(random_run, tmp_path, monkeypatch, capsys):
    def load_pre(path):
        encoder = load(path)
        encoder.config.norm = "pre"
        return encoder

    random_run()
    monkeypatch.setattr(hf, "load", load_pre)
    assert "no --norm pre" in one_line(capsys, random_run.export)


@pytest.mark.parametrize(
    "pe, task, kind",
    [
        ("abs", "mnli", "Roberta"),
        slow("abs+t5", "stsb", "MPNet"),
        ("rope", "cola", None),
        slow("abs", "squad", None),
        slow("abs", "cola", "a probe"),
    ],
)
def test_a_classifier_goes_out_with_its_labels(
    hugging, random_run, tmp_path, capsys, pe, task, kind
):
    """Where the heads agree: not rope's, nor those of spans and probes."""
    encoder, folder = random_run(pe).encoder, tmp_path / "theirs"
    model = finetune.Classifier(encoder, task, 40, kind == "a probe").eval()
    torch.nn.init.normal_(model.head[-1].weight)
    row = {"task": task, "ckpt": "some run/tuned.pt (rte)", "seed": 0, **HOW}
    row["metrics"] = {"accuracy": 0.625}
    finetune.save_model(tmp_path / "tuned.pt", model, weights(tmp_path / "run"), row)
    if kind not in ("Roberta", "MPNet"):
        assert exit_code(random_run.export, "tuned.pt") == 2 and not folder.exists()
        assert capsys.readouterr().err.count("\n") == 1
        return
    random_run.export("tuned.pt")
    theirs = hugging.AutoModelForSequenceClassification.from_pretrained(folder)
    labels = dict(enumerate(finetune.TASKS[task].classes or ["score"]))
    assert type(theirs).__name__ == f"{kind}ForSequenceClassification"
    assert theirs.config.id2label == labels
    assert theirs.config.label2id == {label: i for i, label in labels.items()}
    # From a pair of texts to scores.
    texts = (PARIS, "the lazy é")
    ids = finetune.encode(texts, encoder.tokenizer, encoder.config, 40)
    batch = hugging.AutoTokenizer.from_pretrained(folder)(*texts, return_tensors="pt")
    with torch.no_grad():
        ours, found = model(torch.tensor([ids]), None), theirs(**batch).logits.squeeze(-1)
    torch.testing.assert_close(found, ours, rtol=0, atol=1e-5)
    card = (folder / "README.md").read_text()
    assert f"Trained on: {task}" in card and "0.625" in card
    command = shlex.split(re.search(r"^    python finetune.py (.*)$", card, re.M)[1])
    args = finetune.parse_args(command)
    assert (args.task, args.ckpt, args.lr) == (task, "some run/tuned.pt", [1e-4])
    assert [getattr(args, key) for key in ("epochs", "length", "limit_train")] == [3, 40, 99]


@pytest.mark.parametrize("command", ["python train.py --pe t5 --objective mlm+pplm", None])
def test_the_model_card(random_run, tmp_path, command):
    """It has what was asked for, and the command; of a run that kept none, its flags."""
    random_run("t5", "mlm+pplm", *shlex.split("--preset lab --steps 3 --whole_word"))
    run = tmp_path / "run"
    torch.save(weights(run) | ({"command": command} if command else {}), run / "ckpt.pt")
    row = {"task": "cola", "seed": 1, "lr": 0.01, "metrics": {"accuracy": 0.75}}
    (run / "results.jsonl").write_text(json.dumps(row) + "\n")
    random_run.export("run/ckpt.pt")
    card = (tmp_path / "theirs" / "README.md").read_text()
    assert "- cola, seed 1: {'accuracy': 0.75}" in card
    assert "Positions: t5. Trained on: mlm+pplm,\n7 steps, data some text." in card
    if command:
        assert f"\n    {command}\n" in card
    else:
        assert "train.py with preset lab, " in card and "steps 3, " in card and "cache" not in card


# ----- the tokenizer

PIECES = (
    " quick| lazy|é東| capital|'ll|I'M| |\n|\t|\xa0|\u3000|2|²|٣|\U0001f600|\x1c|\x85|e\u0301|_|["
)
PIECES = [*WORDS[:9], *PIECES.split("|")]
ANY_TEXT = st.text(max_size=40) | st.lists(st.sampled_from(PIECES), max_size=20).map("".join)


def check_tokenizer(ours, theirs):
    """Ids of words are 8 higher there: the specials come first."""

    @given(ANY_TEXT)
    @settings(max_examples=300, deadline=None)
    def cuts_alike(text):
        assume(not re.search(r"\[(CLS|PAD|SEP|MASK)\]", text))  # a special there, text here
        ids = theirs.encode(text, add_special_tokens=False)
        assert [i - 8 for i in ids] == ours.encode_ordinary(text)
        assert theirs.decode(ids) == ours.decode([i - 8 for i in ids])

    cuts_alike()


def test_tokenizer_json_cuts_as_tiktoken_does(hugging, random_run, tmp_path):
    """The own BPE; and what it puts around texts."""
    ours = random_run().encoder.tokenizer
    random_run.export()
    theirs = hugging.AutoTokenizer.from_pretrained(tmp_path / "theirs")
    check_tokenizer(ours, theirs)
    a, b = ([i + 8 for i in ours.encode_ordinary(text)] for text in (PARIS, "aaa"))
    assert theirs(PARIS, "aaa")["input_ids"] == [0, *a, 2, *b, 2]
    # The mask takes the space before it along, as in sample.py.
    assert theirs(f"{PARIS} [MASK].")["input_ids"] == [0, *a, 3, ord(".") + 8, 2]
    roles = [getattr(theirs, f"{role}_token_id") for role in ("cls", "pad", "sep", "mask")]
    assert roles == [0, 1, 2, 3]
    batch = theirs([PARIS, "aaa"], padding=True)
    assert batch.keys() == {"input_ids", "attention_mask"} and batch["input_ids"][1][-1] == 1
    assert len(theirs) == ours.n_vocab and theirs.model_max_length == 140


@pytest.mark.slow
def test_tokenizer_json_of_gpt2(hugging, out_again):
    theirs = hugging.AutoTokenizer.from_pretrained(out_again)
    check_tokenizer(tiktoken.Encoding(**data.encoding_arguments(data.gpt2_state())), theirs)


# ----- what cannot come in, and where nothing is written


def refused(direction, source, target, capsys):
    """-> the one line that says so."""
    capsys.readouterr()
    assert exit_code(hf.main, [direction, str(source), str(target)]) == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1
    return captured.err


@pytest.mark.parametrize(
    "change, says",
    [
        (dict(hidden_act="relu"), "its hidden_act is relu"),
        (dict(model_type="bert"), "its model_type is bert"),
        (dict(model_type="a new one"), "cannot be read"),
        (dict(num_hidden_layers=2), "missing roberta.encoder.layer.1"),
    ],
    ids=str,
)
def test_what_is_not_roberta_is_refused(imported, tmp_path, capsys, change, says):
    folder = shutil.copytree(imported.folder, tmp_path / "edited")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change))
    assert says in refused("import", folder, tmp_path / "run", capsys)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("key, says", [("roberta.encoder.layer.0.adapter.weight", "extra")])
def test_a_missing_or_an_extra_tensor(imported, tmp_path, capsys, key, says):
    from safetensors.torch import load_file, save_file

    folder = shutil.copytree(imported.folder, tmp_path / "edited")
    tensors = load_file(folder / "model.safetensors")
    tensors["roberta.pooler.dense.weight"] = torch.zeros(16, 16)  # which roberta-base has
    if tensors.pop(key, None) is None:
        tensors[key] = torch.zeros(16, 16)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    assert f"RoBERTa: {says} {key}\n" in refused("import", folder, tmp_path / "run", capsys)


@pytest.mark.slow
def test_damage_and_other_tokens_are_refused(imported, tmp_path, capsys):
    run, folder = tmp_path / "run", shutil.copytree(imported.folder, tmp_path / "edited")
    assert "cannot be read" in refused("import", tmp_path / "nowhere", run, capsys)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:5000])
    assert "cannot be read" in refused("import", folder, run, capsys)
    vocab = json.loads((folder / "vocab.json").read_text())
    config = json.loads((folder / "config.json").read_text())
    last = vocab.pop("<|endoftext|>")
    for name, size in (("another", 50265), ("<mask>", 50264)):
        (folder / "vocab.json").write_text(json.dumps(vocab | {name: last}))
        (folder / "config.json").write_text(json.dumps(config | {"vocab_size": size}))
        assert "tokens are not GPT-2's" in refused("import", folder, run, capsys)


def test_hf_leaves_a_folder_alone_and_needs_transformers(random_run, tmp_path, monkeypatch, capsys):
    random_run()
    (tmp_path / "mine").mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(hf, "fetch", failing(AssertionError))  # before all its work
        patch.setattr(hf, "load", failing(AssertionError))
        for direction in ("import", "export"):
            error = refused(direction, tmp_path / "run", tmp_path / "mine", capsys)
            assert "mine is there already: name another" in error
    assert "no checkpoint" in refused("export", tmp_path / "nowhere", tmp_path / "out", capsys)
    monkeypatch.setattr(hf, "transformers", None)
    assert "pip install transformers" in refused("export", tmp_path / "run", tmp_path / "o", capsys)


# ==================================================================================================
# page.py

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
# An own profile, no sandbox (containers have none), and nothing that asks the network by itself.
CHROMIUM_FLAGS = (
    "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --remote-debugging-pipe"
).split()
# Of every kind of character a few, one word, what looks like HTML, and more than fits.
SENTENCES = [
    *(
        "word",
        '<b>bold</b> & "quoted"',
        "</script><script>alert(1)</script>",
        "it's 3.14, isn't it?",
    ),
    *(
        "a  b   c",
        "tab\tand\nline\r\nends ",
        "no\u00a0break\u2003em\u3000wide\u0085next",
        "\ufeffmark",
    ),
    *(
        "naïve café Ångström ﬁ ǅ",
        "e\u0301 combining o\u0308",
        "日本語のテキスト 漢字",
        "مرحبا بالعالم",
        "שלום עולם",
    ),
    *(
        "emoji 👩‍👩‍👧 and 🇩🇪 flags",
        "x² + y³ = ½ Ⅷ ٣٤ ①",
        "half a surrogate \ud83d here",
        "_under_ __init__()",
    ),
    *("a [MASK] in the [MASK]", "don't we've THEY'LL I'd", "the alpha beta gamma " * 20),
]


class Browser:
    """A headless Chromium with one page, spoken to over a pipe (the DevTools protocol)."""

    def __init__(self, folder):
        to_read, self.write_to = os.pipe()
        self.read_from, to_write = os.pipe()
        fds = f'exec "$0" "$@" 3</dev/fd/{to_read} 4>/dev/fd/{to_write}'
        self.process = subprocess.Popen(
            ["sh", "-c", fds, CHROMIUM, *CHROMIUM_FLAGS, f"--user-data-dir={folder}"],
            pass_fds=(to_read, to_write),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_read)
        os.close(to_write)
        self.events, self.received, self.number, self.session = [], b"", 0, {}
        target = self.do("Target.createTarget", url="about:blank")["targetId"]
        found = self.do("Target.attachToTarget", targetId=target, flatten=True)
        self.session = {"sessionId": found["sessionId"]}
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.do(f"{domain}.enable")

    def do(self, method, **params):
        """A command -> its result; what is said meanwhile goes to events."""
        self.number += 1
        command = {"id": self.number, "method": method, "params": params, **self.session}
        command = json.dumps(command).encode() + b"\0"
        while command:
            command = command[os.write(self.write_to, command) :]
        while (answer := self.next()).get("id") != self.number:
            self.events.append(answer)
        assert "error" not in answer, answer
        return answer["result"]

    def next(self):
        while b"\0" not in self.received:
            assert select.select([self.read_from], [], [], 60)[0], "Chromium says nothing"
            self.received += os.read(self.read_from, 2**16)
        message, _, self.received = self.received.partition(b"\0")
        return json.loads(message)

    def open(self, file):
        self.events.clear()
        self.do("Page.navigate", url=file.as_uri())
        while not self.heard("Page.loadEventFired"):
            self.events.append(self.next())

    def heard(self, *methods):
        return [event["params"] for event in self.events if event.get("method") in methods]

    def js(self, expression):
        """-> the value of an expression in the page; Float32Arrays go as base64."""
        found = self.do("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def numbers(self, expression):
        """-> what an expression finds, Float32Arrays, as a list of numpy arrays."""
        code = "[...new Uint8Array(x.buffer, x.byteOffset, x.byteLength)]"
        code = f"({expression}).map((x) => {code}.map((b) => String.fromCharCode(b)).join(''))"
        texts = self.js(f"{code}.map(btoa)")
        return [np.frombuffer(base64.b64decode(text), "<f4") for text in texts]

    def at(self, selector, nth=0):
        """-> the middle of an element, scrolled into view"""
        found = f"document.querySelectorAll({json.dumps(selector)})[{nth}]"
        self.js(f"{found}.scrollIntoView({{block: 'center'}})")
        box = self.js(f"{found}.getBoundingClientRect().toJSON()")
        return box["x"] + box["width"] / 2, box["y"] + box["height"] / 2

    def mouse(self, kind, at):
        button = {} if kind == "mouseMoved" else {"button": "left", "clickCount": 1}
        buttons = 0 if kind == "mouseReleased" else 1 if self.down else 0
        self.do("Input.dispatchMouseEvent", type=kind, x=at[0], y=at[1], buttons=buttons, **button)

    down = False

    def press(self, at):
        self.mouse("mouseMoved", at)
        self.down = True
        self.mouse("mousePressed", at)

    def release(self, at):
        self.mouse("mouseReleased", at)
        self.down = False

    def click(self, selector, nth=0):
        at = self.at(selector, nth)
        self.press(at)
        self.release(at)

    def key(self, *names, shift=False):
        for name in names:
            text = {"Enter": "\r", "Space": " "}.get(name, name if len(name) == 1 else None)
            codes = {"Tab": 9, "Enter": 13, "Space": 32, "ArrowLeft": 37, "ArrowRight": 39}
            key = {"key": " " if name == "Space" else name, "code": name, "modifiers": 8 * shift}
            key["windowsVirtualKeyCode"] = codes.get(name, 0)
            more = {"text": text} if text else {}
            self.do(
                "Input.dispatchKeyEvent", type="keyDown" if text else "rawKeyDown", **key, **more
            )
            self.do("Input.dispatchKeyEvent", type="keyUp", **key)

    def close(self):
        self.process.terminate()
        self.process.wait(20)
        os.close(self.write_to)
        os.close(self.read_from)


@pytest.fixture(scope="session")
def browser(tmp_path_factory):
    if CHROMIUM is None:
        pytest.skip("no Chromium here")
    browser = Browser(tmp_path_factory.mktemp("chromium"))
    yield browser
    browser.close()


@pytest.fixture
def page_run(corpus, tmp_path):
    """page_run("a", pe="t5"): a run folder, random, whose every weight counts -> its path."""

    def make(name, objective="mlm+pplm", losses=(), tokenizer=corpus.tokenizer, **config):
        torch.manual_seed(3)
        shape = dict(vocab_size=8192, n_layer=2, n_head=4, d_model=32, d_ff=48, max_len=64)
        settings = {**train.parse_args(["--objective", objective]).__dict__}
        settings |= {key: config.pop(key) for key in settings.keys() & config.keys() - {"pe"}}
        encoder = Encoder(EncoderConfig(**shape | config))
        model = Pretraining(
            encoder, common.pick_fields(ObjectiveConfig, SimpleNamespace(**settings))
        )
        for p in model.parameters():
            p.data.add_(0.1 * torch.randn_like(p))
        facts = {
            "args": settings | {"pe": encoder.config.pe},
            "config": dataclasses.asdict(encoder.config),
            "data": {"dataset": "docs"},
            "tokenizer": data.encoding_arguments(tokenizer),
            "model": model.state_dict(),
        }
        folder = tmp_path / "out" / name
        folder.mkdir(parents=True)
        torch.save(facts, folder / "ckpt.pt")
        common.write_json(folder / "config.json", {"args": facts["args"]})
        (folder / "log.jsonl").write_text("\n".join(map(json.dumps, [{}, *losses])))
        return str(folder)

    return make


def from_base64(text, dtype):
    return torch.from_numpy(np.frombuffer(base64.b64decode(text), dtype).astype(np.float32))


@pytest.mark.parametrize("pe", [pe for pe in ALL_PE if page.can_go(pe) and "rope" not in pe])
def test_the_tables_of_a_page_hold_what_a_scheme_says(pe):
    """Indexed by positions, in whatever order, they give the encoder's own input and logits."""
    encoder = tiny(pe).requires_grad_(False)
    cfg, tables = encoder.config, page.tables_of(encoder)
    pos, tokens = torch.tensor([0, 7, 2, 3, 9, 1, 4]), some_tokens(1)  # [CLS] always has 0
    x = encoder.tok(tokens[0]) * encoder.pe.token_scale
    x = x + tables["embed"][pos] if "embed" in tables else x
    close(encoder.norm(x), encoder(tokens, pos[None], n_layer=0)[0])
    q, k = torch.randn(2, 1, cfg.n_head, 7, cfg.d_head, dtype=torch.double)
    bias = tables["bias"][:, pos[:, None], pos] if "bias" in tables else 0
    close(encoder.pe.scale * (q @ k.mT)[0] + bias, encoder.logits(q, k, pos[None], 0)[0])


def data_in(file):
    """What a page was given."""
    return json.loads(file.read_text().split('id="data">')[1].split("</script>")[0])


def test_a_page_has_the_weights_and_the_log(page_run, tmp_path, said):
    losses = [{"step": 5, "mlm": 4.0, "pplm": 2.5}, {"step": 9, "mlm": 3.0, "val_mlm": 3.25}]
    folder = page_run("a<!--", losses=losses, pe="t5")
    page.main([folder, str(tmp_path / "page.html")])
    assert "1.1 MB, a<!--" in said()
    text = (tmp_path / "page.html").read_text().split('id="data">')[1]
    assert text.index("<") == text.index("</script>")  # nothing in the data ends them
    found, model = data_in(tmp_path / "page.html"), probe.load_pretraining(folder)
    (run,) = found["runs"]
    numbers, weights = from_base64(run["weights"], "<f2"), dict(model.named_parameters())
    for name, shape in run["shapes"].items():
        here, numbers = numbers[: math.prod(shape)], numbers[math.prod(shape) :]
        whole = name if name.startswith("objectives.") else f"encoder.{name}"
        own = weights.pop(whole if whole in weights else f"objectives.{name}")
        close(here.view(shape), own.half().float())
    assert len(numbers) == 0 and list(weights) == ["encoder.pe.parts.t5.table.weight"]
    assert run["losses"]["mlm"] == {"train": [[5, 4], [9, 3]], "val": [[9, 3.25]], "baseline": None}
    assert (
        found["tokens"][:256] == [chr(byte) for byte in range(256)] and len(found["tokens"]) == 8184
    )
    assert {"Block", "T5Bias", "PairHead"} <= found["sources"].keys()


@pytest.mark.parametrize(
    "config, says",
    [
        ({"pe": "rel"}, "cannot run pe rel; it can run none, abs"),
        ({"pe": "abs+rel_k"}, "cannot run pe abs+rel_k"),
        ({"pe": "bert_ad"}, "cannot run pe bert_ad"),
        ({"objective": "clm"}, "clm reads from the left"),
        ({"pair_from": "last"}, "--pair_from last"),
        (
            {"tokenizer": {"name": "gpt2", "pattern": "a", "ranks": ["a"], "specials": {}}},
            "tokenizer",
        ),
    ],
)
def test_a_page_refuses_runs(page_run, tmp_path, capsys, config, says):
    runs = [page_run("fine"), page_run("other", **config)]
    assert says in one_line(capsys, page.main, [*runs, str(tmp_path / "page.html")])
    assert not list(tmp_path.glob("*.html"))


def test_a_page_refuses_targets_and_finds_runs(page_run, tmp_path, monkeypatch, capsys, said):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "a.html"
    folder.mkdir()
    for target in (folder, "x.htm", "nowhere/x.html", page.SOURCE):
        assert str(target) in one_line(capsys, page.main, [str(target)])
    assert "train it first" in one_line(capsys, page.main, ["page.html"])
    assert "no checkpoint" in one_line(capsys, page.main, ["nothing", "page.html"])
    for name, objective in (("1", "mlm"), ("2", "mlm"), ("3", "mlm+pplm"), ("4", "nsp")):
        os.utime(Path(page_run(name, objective), "ckpt.pt"), (int(name), int(name)))
    page_run("5", pe="rel")  # cannot go
    page.main(["page.html"])
    assert [run["name"] for run in data_in(Path("page.html"))["runs"]] == ["3", "2"]
    facts = torch.load("out/1/ckpt.pt", weights_only=True) | {"task": "rte"}
    torch.save(facts, "tuned.pt")
    assert "is fine-tuned" in one_line(capsys, page.main, ["tuned.pt", "page.html"])


def test_a_page_loads_nothing():
    """The browser enforces it; there is one place for data, and texts never get in as HTML."""
    source = page.SOURCE.read_text()
    assert "content=\"default-src 'none'; script-src 'unsafe-inline'; style-src" in source
    assert source.count(page.MARK) == 1 and source.count("//www.") == 1
    for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
        assert word not in source


# ----- in a browser


def rounded(folder):
    """A run whose weights have 16 bits, as a page has them; the scheme's own keep 32."""
    model = probe.load_pretraining(folder)
    for name, weight in model.named_parameters():
        if not name.startswith("encoder.pe."):
            weight.data = weight.data.half().float()
    return model


HERE_AND_THERE = """(run, tokens, pos) => {
    const hidden = run.encoder.forward(tokens, pos), C = run.config.d_model;
    const pairs = run.encoder.pair_logits(hidden, pos, run.pairs);
    const p = run.encoder.word_probabilities(hidden.slice(C, 2 * C));
    return [hidden, p, softmax(pairs, 2 * run.config.max_len - 1)];
}"""


def beside_python(browser, n, model, texts):
    """The page's n-th run beside a model of ours: largest differences of hidden states, largest
    relative ones of word and of pair probabilities. Some words claim other places."""
    encoder, worst = model.encoder, np.zeros(3)
    cfg, most = encoder.config, encoder.config.max_len - 2
    for text in texts:
        ids = browser.js(f"tokenizer.encode({json.dumps(text)}).slice(0, {most})")
        own = text.replace(" [MASK]", "[MASK]")
        own = encoder.tokenizer.encode(own, allowed_special={"[MASK]"}, disallowed_special=())
        assert ids == own[:most]
        tokens = torch.tensor([[cfg.cls_id, *ids, cfg.sep_id]])
        pos = torch.arange(len(ids) + 2)[None]
        pos[0, 1:-1] = (
            pos[0, 1:-1].roll(1) if len(ids) < 4 else pos[0, [2, 4, 3, 1, *range(5, len(ids) + 1)]]
        )
        hidden = encoder(tokens, pos)
        p = model.objectives["mlm"].word_logits(encoder, hidden[0, 1])[: cfg.cls_id].softmax(-1)
        head = model.objectives["pplm"].head
        pairs = head.psi(head.scores(encoder, hidden, {"tokens": tokens, "pos": pos})).softmax(-1)
        given = f"runs[{n}], {tokens[0].tolist()}, {pos[0].tolist()}"
        theirs = browser.numbers(f"({HERE_AND_THERE})({given})")
        for kind, (own, found) in enumerate(zip((hidden, p, pairs), theirs)):
            own = own.numpy().ravel()
            apart = abs(own - found) / (own + 1e-30 if kind else 1)
            worst[kind] = max(worst[kind], apart.max())
    return worst


SHOWN_PE = ["none", "abs", "t5", "tupe_r", "rope"]


@pytest.mark.slow
def test_a_page_computes_what_python_does(browser, page_run, tmp_path):
    more = [
        dict(pe="sin", pair_head="linear"),
        dict(pe="t5_untie_cls", pair_scores="content"),
        dict(pe="rope+t5", objective="mlm+pplm_some+tc"),
    ]
    configs = [dict(pe=pe) for pe in SHOWN_PE] + more
    folders = [page_run(str(n), **config) for n, config in enumerate(configs)]
    page.main([*folders, str(tmp_path / "page.html")])
    browser.open(tmp_path / "page.html")
    for n, folder in enumerate(folders):
        model = rounded(folder)
        model.objectives["pplm"] = probe.position_objective(model)
        worst = beside_python(browser, n, model, SENTENCES)
        print(configs[n], "hidden {:.1e}, words {:.1e}, pairs {:.1e}".format(*worst))
        assert worst[0] < 5e-5 and worst[1:].max() < 1e-5
    # Nothing but the weights' 16 bits lies between the page and the run itself.
    assert (
        1e-4 < beside_python(browser, 1, probe.load_pretraining(folders[1]), SENTENCES[:3])[0] < 0.1
    )


@pytest.mark.slow
def test_a_page_has_the_tokens_of_tiktoken(browser, page_run, tmp_path):
    from pydoc_data.topics import topics

    # A BPE of the same text, so that words are joined from many pieces.
    texts = [text[:5000] for text in topics.values()]
    run = page_run("a", tokenizer=data.bpe_state([(lambda: iter(texts), 0)]))
    page.main([run, str(tmp_path / "page.html")])
    browser.open(tmp_path / "page.html")
    encoding = load(tmp_path / "out" / "a").tokenizer
    lines = [line for text in topics.values() for line in text.splitlines()][:3000]
    odd = "".join(chr(c) for c in range(0x3100) if chr(c).isprintable() or chr(c).isspace())
    lines += [
        *SENTENCES,
        odd,
        *(c * n for c in "ae.=- " for n in range(2, 12)),  # neighbours of one rank: the first
        *(f"a{chr(c)} {chr(c)}{chr(c)}b" for c in range(0x3100) if chr(c).isspace()),
    ]
    lines = [line.replace("[MASK]", "") for line in lines]
    found = browser.js(f"{json.dumps(lines)}.map((line) => tokenizer.encode(line))")
    own = [encoding.encode_ordinary(line) for line in lines]
    assert [line for line, a, b in zip(lines, found, own) if a != b] == []


@pytest.mark.slow
def test_a_page_puts_words_in_order_as_probe_does(browser, page_run, tmp_path):
    """best_order, believed and pairs_right beside probe.py's."""
    page.main([page_run("a"), str(tmp_path / "page.html")])
    browser.open(tmp_path / "page.html")
    rng = torch.Generator().manual_seed(0)
    for n in (2, 3, 5, 12, 30):
        given = torch.randperm(n, generator=rng) + 1
        if n == 5:  # believed as it is: which is no answer
            given = torch.arange(n) + 1
        true = torch.arange(n) - torch.arange(n)[:, None]
        logits = 3 * torch.randn(n, n, 127, generator=rng) + 4 * F.one_hot(true + 63, 127)
        text = f"Float32Array.from({logits.flatten().tolist()}), {given.tolist()}"
        best = sample.best_order(logits.log_softmax(-1), given)
        assert browser.js(f"best_order({text})") == best.tolist()
        p = logits.softmax(-1).gather(-1, (given - given[:, None] + 63)[..., None])[..., 0]
        p = p.fill_diagonal_(0)
        alike(browser.js(f"believed({text})"), (p.sum(0) + p.sum(1)) / (2 * n - 2), 1e-6)
        right = browser.js(f"pairs_right({(given - 1).tolist()})")
        assert right == pytest.approx(sample.pairs_right(given), abs=1e-6)


@pytest.mark.slow
def test_a_page_is_driven(browser, page_run, tmp_path):
    """Loads without an error or a request; shuffles, asks, drags, hides, looks and reads what is
    typed; the same by keyboard alone; what is typed is no HTML."""
    losses = [{"step": n, "mlm": 9.0 - n, "pplm": 5.0 - n, "val_mlm": 8.5 - n} for n in range(3)]
    folders = [page_run("a", losses=losses, pe="tupe_r"), page_run("b", "mlm", losses, pe="rope")]
    page.main([*folders, str(tmp_path / "page.html")])
    less_motion = {"name": "prefers-reduced-motion", "value": "reduce"}  # so nothing glides
    browser.do("Emulation.setEmulatedMedia", features=[less_motion])
    browser.open(tmp_path / "page.html")
    sentence = "<b>the</b> alpha beta gamma delta"

    def words(where):
        return browser.js(
            f"[...document.querySelectorAll('{where} button')].map((x) => x.textContent)"
        )

    def order():
        return browser.js("order")

    # Types a sentence: what looks like HTML stays text.
    browser.js("document.getElementById('text').value = ''")
    browser.click("#text")
    browser.key(*("Space" if c == " " else c for c in sentence), "Enter")
    shown = "".join(words("#hide"))
    assert "<" in shown and browser.js("document.querySelectorAll('main b').length") == 0
    n = len(order())
    assert order() == list(range(n)) and browser.js("document.getElementById('ask').disabled")
    # Shuffles, asks, sorts.
    browser.click("#shuffle")
    given = order()
    assert sorted(given) == list(range(n)) and given != list(range(n))
    browser.click("#ask")
    answers = "document.querySelectorAll('#answers article')"
    assert browser.js(f"{answers}.length") == 1  # the other run has no pair head
    assert "% as the model puts them" in browser.js(f"{answers}[0].textContent")
    assert browser.js(f"{answers}[0].querySelectorAll('li').length") == n
    browser.click("#sort")
    assert order() == list(range(n))
    # Drags the first word to the third place.
    places = [browser.at("#order button", n) for n in (0, 1, 2)]
    browser.press(places[0])
    browser.mouse("mouseMoved", places[1])
    browser.mouse("mouseMoved", places[2])
    browser.release(places[2])
    assert order()[:3] == [1, 2, 0]
    # With keys: on from there, to the word behind, and one further.
    browser.js("document.querySelector('#order button').focus()")
    browser.key("ArrowRight")
    browser.key("ArrowRight", shift=True)
    assert order()[:3] == [1, 0, 2] and browser.js("document.activeElement.dataset.k") == "2"
    browser.key("Tab", "Enter")  # the next stop is the button that asks
    assert browser.js(f"{answers}.length") == 1
    # Hides two words; two models name five each.
    browser.js("document.querySelector('#hide button').focus()")
    browser.key("Enter", "ArrowRight", "Space")
    assert browser.js("[...hidden].length") == 3
    assert browser.js("document.querySelectorAll('#guesses .bar').length") == 2 * 3 * 5
    browser.click("#hide button", 0)
    assert browser.js("[...hidden].length") == 2
    # Looks: arcs of two runs, from the word under the mouse; as a map; at places only.
    browser.mouse("mouseMoved", browser.at("#look button", 2))
    assert browser.js("looking") == 2
    browser.js("document.querySelectorAll('#look button')[1].focus()")
    browser.mouse("mouseMoved", browser.at("#look button", 3))
    assert browser.js("looking") == 3  # a mouse goes on where a key was
    assert browser.js("document.querySelectorAll('#maps path').length") == 2 * (n + 2)
    sums = browser.js(
        "runs.map((run) => chosen_map(run).slice(0, ids.length + 2).reduce((a, b) => a + b))"
    )
    assert sums == pytest.approx([1, 1], abs=1e-5)
    browser.js("document.getElementById('view').value = 'map'")
    browser.click("#places")
    assert browser.js("document.querySelectorAll('#maps rect').length") == 2 * ((n + 2) ** 2 + 3)
    assert set(words("#look")) == {"[CLS]", "word", "[SEP]"}
    assert browser.js("document.querySelectorAll('#losses svg').length") == 2
    # A phone has no bar to scroll sideways; nothing was said to the console, nothing asked for.
    browser.do(
        "Emulation.setDeviceMetricsOverride",
        width=360,
        height=700,
        deviceScaleFactor=1,
        mobile=True,
    )
    assert browser.js("document.documentElement.scrollWidth") == 360
    browser.do("Emulation.clearDeviceMetricsOverride")
    errors = "Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded"
    assert browser.heard(*errors) == []
    requests = [event["request"]["url"] for event in browser.heard("Network.requestWillBeSent")]
    assert [url for url in requests if not url.startswith("data:")] == [
        (tmp_path / "page.html").as_uri()
    ]


@pytest.mark.slow
def test_a_page_of_any_objective_opens(browser, page_run, tmp_path):
    """Parts for which no run has a head say so; and the source itself says what it is."""
    for name in ("mlm", "pplm_binary", "pmlm", "nsp+tc"):
        page.main([page_run(name, name), str(tmp_path / "page.html")])
        browser.open(tmp_path / "page.html")
        missing = browser.js(
            "document.body.innerText.split('No run here was trained to').length - 1"
        )
        assert missing == (name != "mlm") + (name != "pplm_binary")
        if name == "pplm_binary":
            browser.js("shuffle(); ask()")
            answer = "document.getElementById('answers').textContent"
            assert "which words moved" in browser.js(answer)
        browser.click("#look button", 1)
        assert browser.heard("Runtime.exceptionThrown") == []
    browser.open(page.SOURCE)
    assert "python page.py RUN" in browser.js("document.getElementById('about').textContent")
    assert browser.heard("Runtime.exceptionThrown") == []


@pytest.mark.slow
def test_a_page_obeys_its_own_policy(browser, page_run, tmp_path):
    """A request that someone builds in is refused by the browser."""
    page.main([page_run("a"), str(tmp_path / "page.html")])
    browser.open(tmp_path / "page.html")
    browser.js(
        "document.body.append(Object.assign(new Image(), {src: 'http://127.0.0.1:9/x.png'}))"
    )
    browser.js("new Promise((done) => setTimeout(done, 200))")
    assert any(
        "Content Security Policy" in e["entry"]["text"] for e in browser.heard("Log.entryAdded")
    )


# ==================================================================================================
# README.md

README = (HERE / "README.md").read_text()
SNIPPETS = [block.split("```")[0] for block in README.split("```python\n")[1:]]


def snippet(says):
    (found,) = [text for text in SNIPPETS if says in text]
    return found


@pytest.fixture(scope="session")
def extended(tmp_path_factory):
    """A copy of the project, in which the README's scheme and objective are entered as it says."""
    folder = tmp_path_factory.mktemp("extended")
    for file in [*HERE.glob("*.py"), HERE / "README.md", HERE / "pyproject.toml"]:
        shutil.copy(file, folder)
    for file, says, table in (
        ("model.py", "(Component)", "SCHEMES"),
        ("objectives.py", "(Objective)", "OBJECTIVES"),
    ):
        text, source = snippet(says), (folder / file).read_text()
        (line,) = re.findall(rf"# and in {table}: +(.+)", text)
        above = re.search(rf"# Every name of .*\n{table} = {{\n", source)
        (folder / file).write_text(
            source[: above.start()]
            + text
            + "\n\n"
            + above[0]
            + f"    {line}\n"
            + source[above.end() :]
        )
    return folder


def run_in(folder, *command):
    return subprocess.run([sys.executable, *command], cwd=folder, capture_output=True, text=True)


@pytest.mark.slow
def test_what_the_readme_adds_is_everywhere(extended):
    """A class and a line: --help, the message for an unknown name, the benchmark's list."""
    help = run_in(extended, "train.py", "--help").stdout
    assert "kerple" in help and "rtd" in help
    for flag, name in (("--pe", "kerple"), ("--objective", "rtd")):
        assert name in run_in(extended, "train.py", flag, "foo").stderr
    lists = (
        "import bench; print(*bench.names_of(bench.parse_args("
        "['--pe', 'all', '--objective', 'all'])[0]), sep='\\n')"
    )
    pes, names = run_in(extended, "-c", lists).stdout.splitlines()
    assert "'kerple'" in pes and "'rtd'" in names
    note = run_in(
        extended,
        "-c",
        "import train; train.parse_args(['--objective', 'nsp', '--mask_rate', '.3'])",
    ).stdout
    assert "--mask_rate is for rtd, mlm" in note


@pytest.mark.slow
def test_what_the_readme_adds_passes_the_tests(extended):
    """All that run over every scheme and every objective; but a naive loop is a person's to add."""
    done = run_in(
        extended,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "test_all.py",
        "-k",
        "kerple or rtd",
        "-W",
        "ignore",
    )
    failed = re.findall(r"FAILED test_all.py::(\S+)", done.stdout)
    assert failed == ["test_attention_equals_triple_loop[kerple]"], done.stdout
    assert "kerple has no equation yet: write it into logit in naive.py" in done.stdout
    passed = int(re.search(r"(\d+) passed", done.stdout)[1])
    assert passed > 5, done.stdout


def test_model_is_used_as_the_readme_says(corpus_file, cache, tmp_path, monkeypatch):
    text = snippet("from model import load")
    (folder,) = re.findall(r'load\("(.+?)"\)', text)
    run_train(corpus_file, cache, tmp_path / folder, "--steps", "3", "--block_size", "64")
    monkeypatch.chdir(tmp_path)
    names = {}
    exec(text, names)
    assert names["vector"].shape == (16,) and names["vector"].isfinite().all()


def test_commands_of_the_readme_parse(monkeypatch):
    """Every `python X.py ..` line of the README, of --help and of runs/ is accepted by X's own
    parser."""
    command = r"(?:python|torchrun --nproc_per_node \d+) (\w+)\.py((?:'[^']*'|[^`\n|#&)'])*)"
    modules = {"train": train, "finetune": finetune, "probe": probe, "bench": bench}
    scripts = "".join(file.read_text() for file in HERE.glob("runs/*.sh"))
    scripts = re.sub(r"\$more|\$tune|\$\{[^}]*\}", "", scripts)  # what a rehearsal adds
    texts = [README, scripts, *(module.__doc__ for module in modules.values())]
    found = [pair for text in texts for pair in re.findall(command, text)]
    assert len(found) >= 30
    for script, flags in found:
        flags = [flag for flag in shlex.split(flags) if flag not in ("--help", "--soak", "..")]
        if script in modules:
            modules[script].parse_args(flags)


def test_layout_is_flat_and_lines_are_short():
    """What design and ruff cannot see: nested loops are no comprehensions, and nothing imports from
    train.py but tests and the benchmark."""
    files = sorted(HERE.glob("*.py"))
    for file in [*files, *HERE.glob("results/*.py")]:
        tree = ast.parse(file.read_text())
        for node in ast.walk(tree) if file.name != "test_all.py" else ():
            assert len(getattr(node, "generators", [])) < 2, f"{file.name}:{node.lineno}"
            if isinstance(node, ast.ImportFrom) and node.module == "train":
                assert file.name == "bench.py"


# ==================================================================================================
# exercises.py


@pytest.mark.parametrize("name", exercises.EXERCISES)
def test_a_stub_is_a_signature_and_a_docstring(name, tmp_path):
    """Nothing else of the file changes, and what was written is gone."""
    exercises.make_copy(name, tmp_path / "copy")
    exercise = exercises.EXERCISES[name]
    for method in exercise.writes:
        before, after = (
            (folder / exercise.file).read_text() for folder in (HERE, tmp_path / "copy")
        )
        a, b = (exercises.function_in(text, method) for text in (before, after))
        assert ast.unparse(a.args) == ast.unparse(b.args) and ast.get_docstring(a) == (
            ast.get_docstring(b)
        )
        assert isinstance(b.body[-1], ast.Raise) and len(b.body) == 1 + bool(ast.get_docstring(b))
        assert not set(ast.unparse(a.body[-1]).splitlines()) & set(after.splitlines())
    rest = [line for line in after.splitlines() if line not in before.splitlines()]
    assert all(re.match(r" +(#|raise NotImplementedError)", line) for line in rest)
    there = names_in(tmp_path / "copy")
    assert {"train.py", "README.md", "requirements.txt"} <= there
    assert not there & {"test_all.py", "exercises.py", "TEACHING.md"}, "they hold the answers"


@pytest.mark.parametrize(
    "name",
    [
        name if name == "reset" else pytest.param(name, marks=pytest.mark.slow)
        for name in exercises.EXERCISES
    ],
)
def test_an_exercise_fails_until_it_is_written(name, tmp_path, capsys):
    folder, exercise = tmp_path / "copy", exercises.EXERCISES[name]
    exercises.make_copy(name, folder)
    command = ["--grade", str(folder)]
    assert exit_code(exercises.main, command) == 1
    out = capsys.readouterr().out
    assert f"{exercise.writes[0]} is not written yet" in out and "0 of 0" not in out, out
    (folder / "train.py").write_text("a student breaks what is not theirs")
    shutil.copy(HERE / exercise.file, folder)
    assert exit_code(exercises.main, command) is None
    (right, of) = re.findall(r"(\d+) of (\d+) tests", capsys.readouterr().out)[0]
    assert right == of != "0"


def test_differences_say_shape_place_expected_and_got():
    a, b = torch.zeros(2, 3), torch.zeros(2, 3)
    assert exercises.difference(a, b) is None
    b[1, 2] = 0.5
    assert exercises.difference((a, a), (a, b)) == (
        "result 1: 1 of 6 differ, the first at (1, 2): expected 0, got 0.5"
    )
    assert exercises.difference(a, b[0]) == "shape (3,), expected (2, 3)"
    assert exercises.difference(a, None) == "NoneType, expected Tensor"
    assert exercises.difference((a, {}), (a, {"x": 1})).endswith("expected the keys []")


def test_mistakes_with_exercises_are_one_line(tmp_path, capsys):
    for says, *flags in (
        ("unknown exercise 'tup'; choose from attention, tupe,", "tup"),
        ("is there already", "tupe", str(tmp_path)),
        ("is no folder that", "--grade", str(tmp_path / "none")),
        ("not both", "tupe", "--grade", str(tmp_path)),
    ):
        assert says in one_line(capsys, exercises.main, flags)


def soak(n_kills=20, seed=0):
    """A few minutes: a run killed at random moments, or inside a save, and resumed each time; its
    end is compared bit for bit.

    Every second kill is SIGKILL from outside, the others SIGTERM, a death inside a write, or a full
    disk.
    """
    rng, began, tally = random.Random(seed), time.time(), Counter()
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        corpus, cache = write_corpus(folder / "corpus.jsonl", 400), str(folder / "cache")
        flags = shlex.split(
            "--objective taco+pplm --pe tupe_r --steps 1500 --eval_every 25 "
            "--log_every 25 --grad_accum 2"
        )
        print("the run never stopped", flush=True)
        run_train(corpus, cache, folder / "whole", *flags)
        flags = train_flags(corpus, cache, folder / "cut", *flags, "--resume")
        step, log = 0, folder / "cut" / "log.jsonl"
        for kill in range(n_kills):
            dies = ("dies in a write", "kill", ["fsync", "link", "replace", "save"][kill % 4])
            full = ("disk full", "full", ["fsync", "save"][kill % 2])
            cut, term = ("SIGKILL", "", ""), ("SIGTERM", "", "")
            kind, how, where = [cut, term, cut, dies, cut, full][kill % 6]
            command = [sys.executable, HERE / "train.py", *flags]
            if how:
                command = [sys.executable, "-c", CUT, how, where, str(rng.randint(1, 5)), *flags]
            process = subprocess.Popen(
                command, cwd=HERE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
            )
            if not how:
                written = log.stat().st_mtime_ns if log.exists() else 0
                # Most die between two steps or inside one, every fifth before.
                while kill % 5 and process.poll() is None:
                    if log.exists() and log.stat().st_mtime_ns != written:
                        break
                    time.sleep(0.05)
                time.sleep(rng.uniform(0, 3))
                process.send_signal(getattr(signal, kind))
            errors = process.communicate(timeout=300)[1]
            now = weights(folder / "cut")["step"] if (folder / "cut" / "ckpt.pt").exists() else 0
            tally[kind] += 1
            print(
                f"{kill + 1:3} {kind:16} exit {process.returncode:4}, checkpoint of step {now}",
                flush=True,
            )
            assert now >= step and "Traceback" not in errors, errors
            step = now
        train.main(flags)
        a, b = weights(folder / "whole")["model"], weights(folder / "cut")["model"]
        different = [key for key in a if not torch.equal(a[key], b[key])]
    print(
        f"soak: {dict(tally)}; tensors that differ from the run never stopped: {len(different)} "
        f"of {len(a)}; {time.time() - began:.0f} s"
    )
    return 1 if different else 0


if __name__ == "__main__":
    if "--soak" in sys.argv:
        sys.exit(soak())
    if "--golden" in sys.argv:
        sys.exit(print_golden())
    start = time.time()
    code = pytest.main([__file__, *sys.argv[1:]])
    print(f"{time.time() - start:.0f} s")
    sys.exit(code)
