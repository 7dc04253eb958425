"""The tests, in the order of the files: data, model, objectives, train, finetune, probe.

    python -m pytest test_all.py
    python test_all.py --soak           # a few minutes more: one run, killed 20 times

A mechanism is held against a naive loop written from its paper, an implementation by others, or an invariant.
No network; what needs a library that is not installed is skipped, and so is GPT-2's vocabulary where
TIKTOKEN_CACHE_DIR does not hold it.
"""

import collections
import copy
import csv
import dataclasses
import gzip
import json
import lzma
import math
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tiktoken
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import bench
import data
import finetune
import model as model_module
import objectives
import probe
import train
from model import PE_NAMES, UNKNOWN_POS, Encoder, EncoderConfig, load, parse_pe
from objectives import ObjectiveConfig, Pretraining, stream

HERE = Path(__file__).parent
VOCAB = 72                      # 64 ordinary ids and the 8 specials
SUMS = ["rope+t5", "abs+alibi", "abs+rope", "sin+rel_k"]
ALL_PE = [name for name in PE_NAMES if name not in ("bert_a", "bert_r")] + SUMS     # the two are aliases


def tiny(pe="abs", **change):
    """A small encoder in float64, dropout off, its weights large enough for every term to count."""
    torch.manual_seed(0)
    config = dict(vocab_size=VOCAB, n_layer=2, n_head=2, d_model=16, d_ff=32, max_len=12, dropout=0.0, attn_dropout=0.0, pe=pe)
    torch.set_default_dtype(torch.double)
    encoder = Encoder(EncoderConfig(**{**config, **change}))
    torch.set_default_dtype(torch.float)
    with torch.no_grad():
        for p in encoder.parameters():
            if p.dim() > 1:
                p.mul_(10)
    return encoder


def some_tokens(B=3, L=7, seed=0):
    tokens = torch.randint(0, VOCAB - 8, (B, L), generator=torch.Generator().manual_seed(seed))
    tokens[:, 0] = VOCAB - 8
    return tokens


# =========================================================================================================
# data.py

WORDS = "the quick brown fox jumps over a lazy dog while seven wise owls watch from their old tree".split()


def write_corpus(path, n_docs=60, n_words=60, opener=open):
    rng = random.Random(0)
    with opener(path, "wt", encoding="utf-8") as handle:
        for i in range(n_docs):
            handle.write(json.dumps({"title": f"t{i}", "text": " ".join(rng.choices(WORDS, k=n_words)) + f" {i}."}) + "\n")
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


def naive_bpe(words, n_ids):
    """Byte-pair encoding from its definition: count all pairs anew for every merge."""
    ranks = [bytes([b]) for b in range(256)]
    items = [([bytes([b]) for b in word], n) for word, n in words.items()]
    while len(ranks) < n_ids:
        counts = collections.Counter()
        for parts, n in items:
            for pair in zip(parts, parts[1:]):
                counts[pair] += n
        if not counts:
            break
        pair = min(counts, key=lambda p: (-counts[p], p))
        if pair[0] + pair[1] not in ranks:
            ranks.append(pair[0] + pair[1])
        items = [(data.merge(parts, pair, pair[0] + pair[1]), n) for parts, n in items]
    return ranks


def test_bpe_equals_naive():
    rng = random.Random(1)
    words = collections.Counter("".join(rng.choices("abcd", k=rng.randint(1, 9))).encode() for _ in range(300))
    assert data.train_bpe(words, 330) == naive_bpe(words, 330)


def test_bpe_merges_an_overlapping_pair_once():
    assert data.merge([b"a", b"a", b"a"], (b"a", b"a"), b"aa") == [b"aa", b"a"]


def test_tokenizer_round_trip(corpus):
    encoding = tiktoken.Encoding(**data.encoding_arguments(corpus.tokenizer))
    assert encoding.n_vocab == 8192 == corpus.vocab_size and encoding._special_tokens["[CLS]"] == 8184
    for text in ("the fox", "naïve Ωμέγα 中文 🦊 \x00\x7f", " \n\t  two  spaces", ""):
        assert encoding.decode(encoding.encode_ordinary(text)) == text
    every_byte = bytes(range(256))
    assert all(encoding.decode_single_token_bytes(encoding.encode_single_token(bytes([b]))) == bytes([b]) for b in every_byte)
    assert encoding.encode_ordinary("[MASK]") != [8187], "a text that says [MASK] is not the special"


def test_corpus_splits_by_document(corpus, corpus_file):
    encoding = tiktoken.Encoding(**data.encoding_arguments(corpus.tokenizer))
    sep = corpus.vocab_size - 6
    texts = [json.loads(line)["text"] for line in open(corpus_file)]
    for split, wanted in (("val", [t for i, t in enumerate(texts) if i % 50 == 1]),
                          ("train", [t for i, t in enumerate(texts) if i % 50 != 1])):
        documents, current = [], []
        for token in getattr(corpus, split).tolist():
            if token == sep:
                documents.append(encoding.decode(current))
                current = []
            else:
                current.append(token)
        assert documents == wanted and not current
    assert corpus.train.dtype == np.uint16


def test_rows(corpus):
    rows = corpus.rows("train", [0, 3], 10)
    assert rows.shape == (2, 10) and rows.dtype == np.int64
    assert (rows[:, 0] == 8184).all() and (rows[:, -1] == 8186).all()
    assert rows[1, 1:-1].tolist() == corpus.train[24:32].tolist()


def test_batches_visit_every_row_once_an_epoch(corpus):
    batches = data.Batches(corpus, 10, seed=5)
    first = [batches.row(i) for i in range(batches.n)]
    assert sorted(first) == list(range(batches.n)) and first != sorted(first)
    second = [batches.row(batches.n + i) for i in range(batches.n)]
    assert sorted(second) == sorted(first) and second != first
    again = data.Batches(corpus, 10, seed=5)
    assert (again(3, 4) == batches(3, 4)).all(), "a batch is a function of (seed, index)"
    assert data.Batches(corpus, 10, seed=6).row(0) != first[0] or data.Batches(corpus, 10, seed=6).row(1) != first[1]


def test_prepare_skips_what_is_done(corpus, corpus_file, cache):
    before = {f: f.stat().st_mtime_ns for f in corpus.folder.iterdir()}
    data.prepare(corpus_file, "bpe", cache)
    assert {f: f.stat().st_mtime_ns for f in corpus.folder.iterdir()} == before
    assert set(f.name for f in before) == {"train.bin", "val.bin", "meta.json", "tokenizer.json"}


def test_file_formats_give_the_same_documents(tmp_path):
    import pyarrow
    import pyarrow.parquet
    texts = ["one fox\nand a line", "two, \"dogs\"", "three\nowls"]
    rows = [{"text": t, "n": i} for i, t in enumerate(texts)]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "a.jsonl").write_text(lines)
    for name, opener in (("b.jsonl.gz", gzip.open), ("c.jsonl.xz", lzma.open)):
        with opener(tmp_path / name, "wt") as handle:
            handle.write(lines)
    with open(tmp_path / "d.csv", "w", newline="") as handle:
        writer = csv.writer(handle)
        writer.writerows([["text", "n"], *[[r["text"], r["n"]] for r in rows]])
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "e.parquet")
    (tmp_path / "f.txt").write_text("\n\n".join(texts))
    with gzip.open(tmp_path / "g.txt.gz", "wt") as handle:
        handle.write("\n\n\n" + "\n\n".join(texts) + "\n\n")
    for file in sorted(tmp_path.iterdir()):
        found = [t.strip() for t in data.file_documents(str(file), "text") if t.strip()]
        assert found == texts, file.name


def test_long_documents_are_cut_without_loss():
    for text in ("x" * 250_000, "word " * 50_000, "a\n" * 120_000, "short", ""):
        cut = list(data.pieces(text))
        assert "".join(cut) == text and max(map(len, cut)) <= data.PIECE


@pytest.mark.parametrize("write, says", [
    (lambda f: f.write_text(""), "no text in it"),
    (lambda f: f.write_text('{"text": "only one"}\n'), "at least 2"),
    (lambda f: f.write_text('{"body": "a"}\n{"body": "b"}\n'), "no column 'text'"),
    (lambda f: f.write_text("not json at all {"), "cannot be read"),
    (lambda f: f.write_text('{"text": ""}\n{"text": "  "}\n'), "at least 2"),
])
def test_a_bad_corpus_is_one_clear_line(tmp_path, write, says):
    write(tmp_path / "bad.jsonl")
    with pytest.raises(ValueError, match=says):
        data.prepare(str(tmp_path / "bad.jsonl"), "bpe", str(tmp_path / "cache"))
    left = {f.name for f in (tmp_path / "cache").glob("*/*")}
    assert left <= {"tokenizer.json"}, "nothing half-written"


def test_a_cut_memory_map_is_noticed(corpus_file, tmp_path):
    corpus = data.prepare(corpus_file, "bpe", str(tmp_path))
    os.truncate(corpus.folder / "train.bin", 100)
    with pytest.raises(ValueError, match="prepare it again"):
        data.prepare(corpus_file, "bpe", str(tmp_path))


def test_docs_corpus_and_its_task(tmp_path, monkeypatch):
    """The default data set on a small tree: prepared once, and the task's test rows are pre-training's validation documents."""
    rng = random.Random(0)
    folders = {}
    for library in data.DOCS_LIBRARIES:
        folders[library] = tmp_path / library
        (tmp_path / library / "tests").mkdir(parents=True)
        (tmp_path / library / "tests" / "t.py").write_text('"""' + "Not to be read. " * 20 + '"""')
        texts = [" ".join(rng.choices(WORDS, k=30)) + f" {library} {i}" for i in range(12)]
        (tmp_path / library / "m.py").write_text("".join(f'def f{i}():\n    """{text}"""\n' for i, text in enumerate(texts)))
    monkeypatch.setattr(data, "docs_folders", lambda: folders)
    corpus = data.prepare("docs", "bpe", str(tmp_path / "cache"))
    monkeypatch.setattr(data, "docs_documents", lambda: 1 / 0)          # the second time nothing is read
    assert data.prepare("docs", "bpe", str(tmp_path / "cache")).folder == corpus.folder
    encoding, documents = tiktoken.Encoding(**data.encoding_arguments(corpus.tokenizer)), [[]]
    for token in corpus.val.tolist():
        documents[-1].append(token)
        if token == corpus.vocab_size - 6:
            documents.append([])
    validation = [encoding.decode(d[:-1]) for d in documents[:-1]]
    train_rows, evaluations = finetune.docs_rows(str(tmp_path / "cache"))
    hide = finetune.LIBRARY_NAMES.sub
    assert [texts[0] for texts, _ in evaluations["docs"]] == [hide("[MASK]", text) for text in validation]
    assert not {texts for texts, _ in train_rows} & {texts for texts, _ in evaluations["docs"]}
    assert not any("Not to be read" in texts[0] for texts, _ in train_rows)
    assert len(train_rows) + len(validation) == corpus.meta["documents"]
    label = dict(zip(data.DOCS_LIBRARIES, range(5)))
    assert all(data.DOCS_LIBRARIES[y] in label for _, y in train_rows) and len({y for _, y in train_rows}) == 5


def test_finished_data_needs_nothing(corpus_file, cache, corpus, monkeypatch):
    """Stages skip what is done: a prepared corpus opens without its tokenizer's source, its files' content or the hub."""
    monkeypatch.setattr(data, "bpe_state", lambda parts: 1 / 0)
    monkeypatch.setattr(data, "gpt2_state", lambda: 1 / 0)
    monkeypatch.setattr(data, "file_documents", lambda *a: 1 / 0)
    assert data.prepare(corpus_file, "bpe", cache).folder == corpus.folder
    monkeypatch.setattr(data, "hub_part", lambda *a: 1 / 0)
    one, two = (data.find_source("some/set", column) for column in ("text", "body"))
    assert one.name != two.name, "another column is another corpus"


@given(content=st.binary(max_size=300) | st.text(max_size=200).map(lambda t: t.encode("utf-8", "surrogatepass")))
@settings(max_examples=60, deadline=None)
@pytest.mark.parametrize("name", ["x.txt", "x.txt.gz", "x.txt.xz", "x.txt.bz2"])
def test_any_bytes_are_text_or_one_clear_line(name, content, tmp_path_factory):
    file = tmp_path_factory.mktemp("fuzz") / name
    file.write_bytes(content)
    try:
        assert all(isinstance(text, str) for text in data.file_documents(str(file), "text"))
    except ValueError as error:
        assert "is damaged" in str(error) and name != "x.txt"


JSON_LINES = ['{"text": "some words"}', '{"text": null}', '{"text": 7}', '{"title": "t"}', "[1]", "", "{", "7", "null", '"text"',
              "\x00", '{"text": "\\u0000 \\ud83d"}']


@given(lines=st.lists(st.sampled_from(JSON_LINES), max_size=5), end=st.sampled_from(["\n", "\r\n", ""]))
@settings(max_examples=15, deadline=None)
def test_any_jsonl_is_documents_or_one_clear_line(lines, end, tmp_path_factory):
    file = tmp_path_factory.mktemp("fuzz") / "x.jsonl"
    file.write_text("\n".join(lines) + end)
    try:
        assert all(isinstance(text, str) for text in data.file_documents(str(file), "text"))
    except ValueError as error:
        assert "cannot be read" in str(error) or "has no column" in str(error)


def test_texts_that_are_hardly_text(tmp_path):
    """NULs and broken UTF-8 pass; one endless line is cut; nothing but empty documents, or one, is one clear line."""
    contents = (b"a\0b c\n\n" * 9, 9), (b"caf\xe9 \xff\n\n" * 9, 9), (b"word " * 200_000, 10)
    for number, (content, documents) in enumerate(contents):
        file = tmp_path / f"{number}.txt"
        file.write_bytes(content)
        meta = data.prepare(str(file), "bpe", str(tmp_path / "cache")).meta
        assert documents <= meta["documents"] <= documents + 1
    for content in ("\n" * 100_000, "word"):
        (tmp_path / "empty.txt").write_text(content)
        with pytest.raises(ValueError, match="at least 2 are needed"):
            data.prepare(str(tmp_path / "empty.txt"), "bpe", str(tmp_path / "cache"))


@pytest.mark.parametrize("name", ["meta.json", "tokenizer.json"])
def test_a_damaged_cache_says_what_to_delete(corpus_file, tmp_path, name):
    folder = data.prepare(corpus_file, "bpe", str(tmp_path)).folder
    (folder / name).write_text('{"half')
    with pytest.raises(ValueError, match="delete it"):
        data.prepare(corpus_file, "bpe", str(tmp_path))


def test_damaged_files_are_one_clear_line(tmp_path):
    (tmp_path / "a.txt").write_text("words " * 10_000)
    whole = gzip.compress(random.Random(0).randbytes(50_000).hex().encode())
    (tmp_path / "b.txt.gz").write_bytes(whole[:len(whole) // 2])
    (tmp_path / "c.txt.xz").write_bytes(b"\xfd7zXZ\x00 and then nothing")
    for name in ("b.txt.gz", "c.txt.xz"):
        with pytest.raises(ValueError, match="is damaged"):
            list(data.file_documents(str(tmp_path / name), "text"))


def test_docstrings_are_read_not_imported(tmp_path):
    file = tmp_path / "m.py"
    file.write_text('"""Module."""\nraise SystemExit\ndef f():\n    """Does f."""\nadd_docstr(f, r"""Added.""")\n')
    assert list(data.docstrings(file)) == ["Module.", "Does f.", "Added."]
    file.write_text("def broken(:\n")
    assert list(data.docstrings(file)) == []


def test_hub_data_sets_stream(tmp_path, capsys):
    """The hub's code path, on a folder that `datasets` reads like one of its repositories."""
    write_corpus(tmp_path / "train.jsonl", 7)
    documents, _ = data.hub_part(str(tmp_path), None, "text", 1)
    texts = [json.loads(line)["text"] for line in open(tmp_path / "train.jsonl")]
    assert list(documents()) == texts and "GB to stream" in capsys.readouterr().out
    documents, _ = data.hub_part(str(tmp_path), None, "text", 3)
    assert list(documents()) == ["\n".join(texts[i:i + 3]) for i in (0, 3, 6)]
    with pytest.raises(ValueError, match="no column 'body', only title, text"):
        list(data.hub_part(str(tmp_path), None, "body", 1)[0]())


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


# =========================================================================================================
# model.py: every scheme against a triple loop written from the papers

def exact(f):
    return lambda x: torch.tensor(f(x), dtype=torch.double)


def sinusoid(x, width, w=None):
    w = [10000 ** (-2 * k / width) for k in range(width // 2)] if w is None else w
    return torch.stack([f(x * w[k]) for k in range(width // 2) for f in
                        ((torch.sin, torch.cos) if isinstance(w, torch.Tensor) else (exact(math.sin), exact(math.cos)))])


def naive_bucket(r):
    """T5's bucket of one offset (Raffel 2020): 16 buckets a side, 8 exact, the rest logarithmic to 128."""
    bucket, n = (16, r) if r > 0 else (0, -r)
    return bucket + (n if n < 8 else min(15, 8 + int(math.log(n / 8) / math.log(128 / 8) * 8)))


class Naive:
    """One attention layer of an encoder, a pair at a time, from the equations; reads the encoder's own parameters."""

    def __init__(self, encoder):
        self.cfg, self.parts = encoder.config, encoder.pe.parts
        self.D, self.H, self.T = self.cfg.d_head, self.cfg.n_head, self.cfg.max_len

    def head(self, vector, h):
        return vector[h * self.D:(h + 1) * self.D]

    def input(self, token, pos):
        x = token
        for name, part in self.parts.items():
            if name == "abs":
                x = x + part.table.weight[self.T if pos < 0 else pos]
            if name in ("sin", "lsin"):
                w = part.w if name == "lsin" else None
                x = x * math.sqrt(self.cfg.d_model) + (part.unknown if pos < 0 else sinusoid(pos, self.cfg.d_model, w))
        return x

    def offset_row(self, i, j, pi, pj):
        return 129 if i != j and (pi < 0 or pj < 0) else min(max(pj - pi, -64), 64) + 64

    def relative_vector(self, name, part, layer, row):
        if name == "rel":
            return part.table.weight[row]
        if name == "rel_k":
            return part.tables[layer].weight[row]
        return part.unknown[0] if row == 129 else sinusoid(row - 64, self.D, part.w if name == "rlsin" else None)

    def t5(self, part, h, i, j, pi, pj):
        return part.table.weight[32 if i != j and (pi < 0 or pj < 0) else naive_bucket(pj - pi)][h]

    def tupe_p(self, part, row, which, h):
        p = F.layer_norm(part.table.weight[row], (self.cfg.d_model,), part.norm.weight, part.norm.bias, self.cfg.norm_eps)
        return self.head((part.u_q if which == "q" else part.u_k).weight @ p, h)

    def positional(self, name, part, h, i, j, pi, pj):
        """v_ij of P1 before the reset."""
        T = self.T
        if name in ("t5", "t5_untie_cls"):
            return self.t5(part if name == "t5" else part.offsets, h, i, j, pi, pj)
        if name == "tupe_a_free":
            return part.table[h, T if pi < 0 else pi, T if pj < 0 else pj]
        if name == "alibi":
            n = 2 ** int(math.log2(self.H))
            slopes = [2 ** (-8 * (a + 1) / n) for a in range(n)] + [2 ** (-4 * (2 * a + 1) / n) for a in range(n)]
            return part.unknown[h, 0, 0] if i != j and (pi < 0 or pj < 0) else torch.tensor(-slopes[h] * abs(pj - pi)).double()
        if name.startswith("tupe"):
            rows = [T if p < 0 else p for p in (pi, pj)]
            v = (
                self.tupe_p(part.positions, rows[0], "q", h)
                @ self.tupe_p(part.positions, rows[1], "k", h)
                / math.sqrt(2 * self.D)
            )
            if name.startswith("tupe_r_factored"):
                r = part.offsets.table.weight[self.offset_row(i, j, pi, pj)]
                v = v + self.head(part.offsets.f_q.weight @ r, h) @ self.head(part.offsets.f_k.weight @ r, h)
            elif name.startswith("tupe_r"):
                v = v + self.t5(part.offsets, h, i, j, pi, pj)
            return v
        return 0.0

    def theta(self, name, part, which, h):
        if name in ("t5_untie_cls", "tupe_a_free"):
            return part.theta[which, h]
        row = self.T + 1 + which
        return self.tupe_p(part.positions, row, "q", h) @ self.tupe_p(part.positions, row, "k", h) / math.sqrt(2 * self.D)

    def rotate(self, x, pos):
        out = []
        for k in range(self.D // 2):
            angle = pos * 10000 ** (-2 * k / self.D)
            z = torch.complex(x[2 * k], x[2 * k + 1]) * complex(math.cos(angle), math.sin(angle))
            out += [z.real, z.imag]
        return torch.stack(out)

    def logit(self, q, k, h, i, j, pi, pj, layer):
        s, terms = 0.0, 1
        for name, part in self.parts.items():
            if name.startswith("tupe"):
                terms = 2
            if name == "bert_ad":
                terms = 4
                rows = [self.T if p < 0 else p for p in (pi, pj)]
                q = q + self.tupe_p(part.positions, rows[0], "q", h)
                k = k + self.tupe_p(part.positions, rows[1], "k", h)
            if name == "rope":
                q, k = self.rotate(q, pi), self.rotate(k, pj)
        for name, part in self.parts.items():
            if name in ("rel", "rel_k", "rsin", "rlsin"):
                s = s + q @ self.relative_vector(name, part, layer, self.offset_row(i, j, pi, pj)) / math.sqrt(self.D)
            untied = (name.startswith("tupe") and "tie_cls" not in name) or name == "t5_untie_cls"
            if untied and i == 0:
                s = s + self.theta(name, part, 0, h)
            elif untied and j == 0:
                s = s + self.theta(name, part, 1, h)
            else:
                s = s + self.positional(name, part, h, i, j, pi, pj)
        return s + q @ k / math.sqrt(terms * self.D)

    def attend(self, q, k, v, pos, layer, pad):
        B, H, L, D = q.shape
        out = []
        for b in range(B):
            for h in range(H):
                for i in range(L):
                    seen = [j for j in range(L) if not pad[b, j]]
                    s = torch.stack(
                        [self.logit(q[b, h, i], k[b, h, j], h, i, j, int(pos[b, i]), int(pos[b, j]), layer) for j in seen]
                    )
                    y = 0.0
                    for A, j in zip(s.softmax(0), seen):
                        y = y + A * v[b, h, j]
                        for name, part in self.parts.items():
                            if name in ("rel", "rsin", "rlsin"):
                                row = self.offset_row(i, j, int(pos[b, i]), int(pos[b, j]))
                                y = y + A * self.relative_vector(name, part, layer, row)
                    out.append(y)
        return torch.stack(out).view(B, H, L, D)


def hidden_ok(pe):
    return "rope" not in pe


@pytest.mark.parametrize("pe", ALL_PE)
def test_attention_equals_triple_loop(pe):
    """Forward and gradient, with B != L, a pad, positions permuted in one row and (where allowed) hidden in another."""
    encoder = tiny(pe)
    naive = Naive(encoder)
    B, L, H, D = 3, 6, 2, 8
    q, k, v = (torch.randn(B, H, L, D, dtype=torch.double, generator=torch.Generator().manual_seed(s)).requires_grad_()
               for s in range(3))
    pos = torch.stack([torch.arange(L), torch.tensor([0, 4, 2, 5, 1, 3]), torch.arange(L)])
    if hidden_ok(pe):
        pos[2, 2:4] = UNKNOWN_POS
    pad = torch.zeros(B, L, dtype=torch.bool)
    pad[1, 4:] = True
    layer = 1
    leaves = [q, k, v, *encoder.pe.parameters()]
    weight = torch.randn(B, H, L, D, dtype=torch.double, generator=torch.Generator().manual_seed(9))

    def run(attend):
        y = attend()
        grads = torch.autograd.grad((y * weight).sum(), leaves, allow_unused=True)
        return y.detach(), [torch.zeros_like(p) if g is None else g for p, g in zip(leaves, grads)]

    mask, relative = partial(encoder.pe.mask, pos, pad, False, q.dtype), partial(encoder.pe.relative, pos, layer)
    ways = [lambda: encoder.pe.attend(q, k, v, pos, layer, mask(), 0.0)]
    if (relative() or (None, None, None))[2] is None:       # what a GPU takes, unless the scheme adds to the values
        ways.append(lambda: encoder.pe.fused(q, k, v, pos, relative(), mask(), 0.0))
    theirs, theirs_grads = run(lambda: naive.attend(q, k, v, pos, layer, pad))
    for way in ways:
        ours, ours_grads = run(way)
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)
        for a, b in zip(ours_grads, theirs_grads):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-9)
    for b in range(B):      # what the components add at the input
        x = encoder.tok(torch.tensor([[5] * L])) * encoder.pe.token_scale
        added = encoder.pe.call("embed", pos[b:b + 1])
        x = x if added is None else x + added
        for i in range(L):
            torch.testing.assert_close(x[0, i], naive.input(encoder.tok.weight[5], int(pos[b, i])), rtol=0, atol=1e-6)


@pytest.mark.parametrize("pe", ["abs", "tupe_r", "rope", "rel", "rel_k", "rsin", "rlsin", "lsin+rlsin"])
@pytest.mark.parametrize("L", [1, 2, 7, 12])
def test_the_default_positions_are_arange(pe, L):
    """And what is faster when positions are in order gives the same, gradients too."""
    encoder, tokens, found = tiny(pe), some_tokens(L=L), []
    for pos in (None, torch.arange(L), torch.arange(L).expand(3, L)):
        encoder.zero_grad()
        out = encoder(tokens, pos=pos)
        out.square().sum().backward()
        found.append([out.detach(), *[p.grad.clone() for p in encoder.parameters() if p.grad is not None]])
    for other in found[1:]:
        for a, b in zip(found[0], other):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_offsets_beyond_the_table_are_clipped_in_order_too():
    encoder, tokens = tiny("rel", max_len=200), some_tokens(1, 200)
    torch.testing.assert_close(encoder(tokens), encoder(tokens, pos=torch.arange(200)), rtol=0, atol=1e-9)


@pytest.mark.parametrize("pe", ALL_PE)
def test_joint_permutation_permutes_the_output(pe):
    encoder, tokens = tiny(pe), some_tokens()
    order = torch.tensor([0, 3, 1, 6, 2, 5, 4])         # index 0, [CLS], aside
    pos = torch.arange(7).expand(3, 7)
    pad = torch.zeros(3, 7, dtype=torch.bool)
    pad[0, 5:] = True
    out = encoder(tokens, pos=pos, pad=pad)
    permuted = encoder(tokens[:, order], pos=pos[:, order], pad=pad[:, order])
    torch.testing.assert_close(permuted, out[:, order], rtol=0, atol=1e-9)


@pytest.mark.parametrize("pe", ALL_PE)
def test_order_matters_except_to_none(pe):
    """A flag that computes its positions and forgets to use them passes every other test of shapes."""
    encoder, tokens = tiny(pe), some_tokens()
    order = torch.tensor([0, 3, 1, 6, 2, 5, 4])
    change = (encoder(tokens[:, order]) - encoder(tokens)[:, order]).abs().max()
    assert change < 1e-9 if pe == "none" else change > 1e-3


@pytest.mark.parametrize("pe", [pe for pe in ALL_PE if hidden_ok(pe)])
def test_swapping_hidden_tokens_permutes_the_output(pe):
    encoder, tokens = tiny(pe), some_tokens()
    pos = torch.arange(7).expand(3, 7).clone()
    pos[:, [2, 5]] = UNKNOWN_POS
    order = torch.tensor([0, 1, 5, 3, 4, 2, 6])
    out = encoder(tokens, pos=pos)
    torch.testing.assert_close(encoder(tokens[:, order], pos=pos), out[:, order], rtol=0, atol=1e-9)
    if pe != "none":
        assert (encoder(tokens) - out).abs().max() > 1e-4, "hidden positions must be seen as hidden"


@pytest.mark.parametrize("pe", ["rel", "rel_k", "rsin", "rlsin", "t5", "t5_untie_cls", "rope", "alibi", "rope+t5"])
def test_relative_schemes_do_not_see_a_shift(pe):
    encoder, tokens = tiny(pe), some_tokens()
    shifted = encoder(tokens, pos=torch.arange(7) + 5)
    torch.testing.assert_close(shifted, encoder(tokens), rtol=0, atol=1e-9)


@pytest.mark.parametrize("pe", ["abs", "sin", "lsin", "tupe_a", "tupe_r", "bert_ad", "tupe_a_free", "abs+t5"])
def test_absolute_schemes_see_a_shift(pe):
    encoder, tokens = tiny(pe), some_tokens()
    assert (encoder(tokens, pos=torch.arange(7) + 5) - encoder(tokens)).abs().max() > 1e-3


@pytest.mark.parametrize("pe", ALL_PE)
def test_beyond_max_len(pe):
    """Tables of absolute positions refuse longer rows; all others go on, to offsets far past any table."""
    encoder, tokens = tiny(pe), some_tokens(2, 200)
    if any(part in ("abs", "bert_ad") or part.startswith("tupe") for part in parse_pe(pe)):
        with pytest.raises(ValueError, match="table ends at 12"):
            encoder(tokens)
    else:
        assert encoder(tokens).isfinite().all()


def test_causal_and_pad_masks():
    encoder, tokens = tiny("tupe_r"), some_tokens()
    changed = tokens.clone()
    changed[:, 5:] = 3
    torch.testing.assert_close(encoder(tokens, causal=True)[:, :5], encoder(changed, causal=True)[:, :5])
    pad = torch.zeros(3, 7, dtype=torch.bool)
    pad[:, 5:] = True
    torch.testing.assert_close(encoder(tokens, pad=pad)[:, :5], encoder(changed, pad=pad)[:, :5])
    torch.testing.assert_close(encoder(tokens, pad=pad)[:, :5], encoder(tokens[:, :5]))
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
        if name.endswith("qkv.bias"):       # softmax cancels a key bias: it adds the same to a whole row
            key = p.grad.chunk(3)[1].abs().max()
            assert (key > 1e-9) == ("rope" in pe), "only a rotated bias is not the same for all keys"
            assert all(g.abs().max() > 1e-9 for g in (p.grad.chunk(3)[0], p.grad.chunk(3)[2])), name
        elif name.endswith("theta"):
            assert p.grad[0].abs().max() < 1e-9 < p.grad[1].abs().max(), "theta_1 fills a row: softmax cancels it"
        else:
            assert p.grad.abs().max() > 1e-9, name


@pytest.mark.parametrize("pe", ALL_PE)
def test_state_dict_round_trip(pe, tmp_path):
    encoder = tiny(pe)
    torch.save(encoder.state_dict(), tmp_path / "w.pt")
    other = Encoder(encoder.config).double()
    other.load_state_dict(torch.load(tmp_path / "w.pt", weights_only=True))
    torch.testing.assert_close(other(some_tokens()), encoder(some_tokens()), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("pe", ALL_PE)
def test_compiles_without_graph_breaks(pe, dtype):
    encoder = tiny(pe).float()
    pos = torch.arange(7).flip(0).expand(3, 7).contiguous()
    torch._dynamo.reset()
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        compiled = torch.compile(encoder, fullgraph=True, backend="aot_eager")(some_tokens(), pos)
        eager = encoder(some_tokens(), pos)
    torch.testing.assert_close(compiled, eager, rtol=0, atol=1e-5 if dtype == torch.float32 else 0.2)


@pytest.mark.parametrize("pe, dtype", [("abs", torch.float32), ("tupe_r", torch.bfloat16), ("rel", torch.float32)], ids=str)
def test_inductor_agrees_with_eager(pe, dtype):
    """The real backend, forward and backward."""
    if not train.can_compile(torch.device("cpu")):
        pytest.skip("no C++ compiler")
    encoder = pretraining(pe=pe, double=False).encoder              # its logits are small, as bf16 wants them
    torch._dynamo.reset()
    compiled, results = torch.compile(encoder, fullgraph=True), []
    for module, kind in ((encoder, torch.float32), (encoder, dtype), (compiled, dtype)):
        encoder.zero_grad()
        with torch.autocast("cpu", kind, enabled=kind != torch.float32):
            out = module(some_tokens())
        (out * torch.arange(16)).sum().backward()
        results.append((out.detach().float(), *[p.grad for p in encoder.parameters()]))
    for exact, eager, fast in zip(*results):        # compiled is no further from float32 than eager is, but for rounding
        assert (fast - exact).norm() <= 2 * (eager - exact).norm() + 1e-4 * exact.norm().clamp(min=1.0)


@pytest.mark.parametrize("pe", ALL_PE)
def test_attention_probabilities(pe):
    encoder, tokens = tiny(pe), some_tokens()
    A = encoder.attention(tokens, layer=1)
    assert A.shape == (3, 2, 7, 7)
    torch.testing.assert_close(A.sum(-1), torch.ones(3, 2, 7, dtype=torch.double))
    assert A.std() > 1e-3 and not A.requires_grad


def test_parameters_that_schemes_add():
    """P1 sec 3.3: TUPE adds 2*C*C and little else; what the others add follows from the table in model.py."""
    count = lambda pe: sum(p.numel() for p in Encoder(EncoderConfig(vocab_size=VOCAB, pe=pe)).parameters())     # noqa: E731
    C, H, D, T, none = 128, 4, 32, 65, count("none")
    table = {"abs": T * C, "sin": C, "lsin": C + C // 2, "rel": 130 * D, "rel_k": 4 * 130 * D, "rsin": D, "rlsin": D + D // 2,
             "t5": 33 * H, "alibi": H, "rope": 0, "bert_ad": T * C + 2 * C + 2 * C * C, "tupe_a": (T + 2) * C + 2 * C + 2 * C * C,
             "tupe_r": (T + 2) * C + 2 * C + 2 * C * C + 33 * H, "tupe_a_tie_cls": T * C + 2 * C + 2 * C * C,
             "t5_untie_cls": 33 * H + 2 * H, "tupe_a_free": H * T * T + 2 * H, "bert_r": T * C + 33 * H,
             "tupe_r_factored": (T + 2) * C + 2 * C + 4 * C * C + 130 * C}
    assert {pe: count(pe) - none for pe in table} == table


def test_tables_are_shared_as_the_papers_have_it():
    keys = [name for name in Encoder(EncoderConfig(pe="rel")).state_dict() if name.startswith("pe.")]
    assert keys == ["pe.parts.rel.table.weight"], "one table for all heads and layers (P3)"
    assert len([name for name in Encoder(EncoderConfig(pe="rel_k")).state_dict() if name.startswith("pe.")]) == 4


def test_bias_is_computed_once_a_forward(monkeypatch):
    calls = []
    original = model_module.Tupe.bias
    monkeypatch.setattr(model_module.Tupe, "bias", lambda self, pos: calls.append(1) or original(self, pos))
    tiny("tupe_r", n_layer=4)(some_tokens())
    assert len(calls) == 1


def test_no_tensor_of_l_l_d(monkeypatch):
    """rel must never build (L, L, D): no tensor of a forward has more elements than the (B, H, L, L) logits."""
    from torch.utils._python_dispatch import TorchDispatchMode
    sizes = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            sizes.extend(
                t.untyped_storage().nbytes() // t.element_size()
                for t in (out if isinstance(out, (tuple, list)) else [out])
                if isinstance(t, torch.Tensor)
            )
            return out
    encoder = tiny("rel", d_model=64)                   # D = 32, L = 40: L*L*D = 51,200; R = 130 columns: 2*2*40*130
    for pos in (None, torch.arange(40)):
        with Watch():
            encoder(some_tokens(1, 40), pos=pos)
    assert max(sizes) < 40 * 40 * 32


def test_theta_fills_row_and_column():
    v = torch.zeros(1, 2, 4, 4)
    out = model_module.reset_cls(v, torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    assert (
        out[0, 0].tolist() == [[1, 1, 1, 1], [3, 0, 0, 0], [3, 0, 0, 0], [3, 0, 0, 0]]
        and out[0, 1, 0, 0] == 2
        and out[0, 1, 1, 0] == 4
    )


def test_t5_buckets():
    r = torch.arange(-1000, 1001)
    assert model_module.t5_bucket(r).tolist() == [naive_bucket(int(x)) for x in r]
    b = {x: int(model_module.t5_bucket(torch.tensor(x))) for x in (0, -1, 1, -7, -8, -16, -32, -64, -128, -10_000, 128)}
    assert b == {0: 0, -1: 1, 1: 17, -7: 7, -8: 8, -16: 10, -32: 12, -64: 14, -128: 15, -10_000: 15, 128: 31}


def test_initial_weights():
    torch.manual_seed(0)
    encoder = Encoder(EncoderConfig(vocab_size=8192, pe="tupe_r"))
    assert abs(encoder.tok.weight.std() - 0.02) < 1e-3 and abs(encoder.blocks[0].fc1.weight.std() - 0.02) < 1e-3
    bound = math.sqrt(6 / 256)                          # Xavier-uniform of a 128 x 128 matrix
    u = encoder.pe.parts["tupe_r"].positions.u_q.weight
    assert u.abs().max() <= bound and abs(u.std() - bound / math.sqrt(3)) < 5e-3
    assert all((m.bias == 0).all() for m in encoder.modules() if isinstance(m, torch.nn.Linear) and m.bias is not None)


@pytest.mark.parametrize(
    "pe, says",
    [
        ("foo", "choose from none, abs"),
        ("abs+sin", "both use the hook 'embed'"),
        ("abs+foo", "unknown"),
        ("rope+tupe_a", "stands alone"),
        ("none+abs", "stands alone"),
        ("t5+alibi", "'bias'"),
        ("abs+t5_untie_cls", "stands alone"),
        ("rope+bert_ad", "stands alone"),
        ("abs+abs", "both"),
    ],
)
def test_illegal_schemes_are_refused_with_the_reason(pe, says):
    with pytest.raises(ValueError, match=says.replace("+", r"\+")):
        EncoderConfig(pe=pe)


@pytest.mark.parametrize(
    "change", [dict(n_head=3), dict(d_model=10, n_head=2, pe="rope"), dict(n_layer=0), dict(dropout=1.0), dict(max_len=0)]
)
def test_impossible_shapes_are_refused(change):
    with pytest.raises(ValueError):
        EncoderConfig(**change)


# ----- against implementations by others

def test_t5_bias_equals_transformers():
    t5 = pytest.importorskip("transformers.models.t5.modeling_t5")
    from transformers import T5Config
    attention = t5.T5Attention(T5Config(num_heads=2, d_model=16, d_kv=8, is_decoder=False), has_relative_attention_bias=True)
    ours = tiny("t5").pe.parts["t5"].float()
    with torch.no_grad():
        ours.table.weight[:32] = attention.relative_attention_bias.weight
    theirs = attention.compute_bias(40, 40)
    torch.testing.assert_close(ours.bias(torch.arange(40)[None]), theirs)


def copy_bert_layers(encoder, theirs, names):
    """Copy our weights into a BERT-like model of transformers. names: (q, k, v, attention output) under each layer."""
    with torch.no_grad():
        for block, layer in zip(encoder.blocks, theirs.encoder.layer):
            q, k, v, out, norm1 = [layer.get_submodule(name) for name in names]
            pairs = [
                *zip((q, k, v), block.qkv.weight.chunk(3), block.qkv.bias.chunk(3)),
                (out, block.out.weight, block.out.bias),
                (norm1, block.norm1.weight, block.norm1.bias),
                (layer.intermediate.dense, block.fc1.weight, block.fc1.bias),
                (layer.output.dense, block.fc2.weight, block.fc2.bias),
                (layer.output.LayerNorm, block.norm2.weight, block.norm2.bias),
            ]
            for module, weight, bias in pairs:
                module.weight.copy_(weight)
                module.bias.copy_(bias)
        theirs.embeddings.word_embeddings.weight.copy_(encoder.tok.weight[:VOCAB])
        theirs.embeddings.LayerNorm.weight.copy_(encoder.norm.weight)
        theirs.embeddings.LayerNorm.bias.copy_(encoder.norm.bias)


BERT_NAMES = (
    "attention.self.query",
    "attention.self.key",
    "attention.self.value",
    "attention.output.dense",
    "attention.output.LayerNorm",
)


@pytest.mark.parametrize("name, pad_id, offset, pe", [("Bert", 0, 0, "abs"), ("Roberta", 1, 2, "abs"), ("MPNet", 1, 2, "abs+t5")])
def test_encoder_equals_transformers(name, pad_id, offset, pe):
    """abs against BERT and RoBERTa, abs+t5 against MPNet: hidden states of copied weights, a pad included."""
    transformers = pytest.importorskip("transformers")
    encoder = tiny(pe).float()
    config = getattr(transformers, f"{name}Config")(
        vocab_size=VOCAB,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        hidden_act="gelu",
        max_position_embeddings=12 + offset,
        layer_norm_eps=1e-5,
        pad_token_id=pad_id,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    theirs = getattr(transformers, f"{name}Model")(config, add_pooling_layer=False).eval()
    with torch.no_grad():
        if name == "MPNet":
            copy_bert_layers(
                encoder,
                theirs,
                ("attention.attn.q", "attention.attn.k", "attention.attn.v", "attention.attn.o", "attention.LayerNorm"),
            )
            # MPNet takes query minus key with T5's function, so its two halves are the other way round.
            theirs.encoder.relative_attention_bias.weight.copy_(encoder.pe.parts["t5"].table.weight[:32])
        else:
            copy_bert_layers(encoder, theirs, BERT_NAMES)
            types = theirs.embeddings.token_type_embeddings.weight     # we have none: type 0 folds into the positions
            types.normal_()
        table = encoder.pe.parts["abs"].table.weight[:12]
        theirs.embeddings.position_embeddings.weight[offset:offset + 12].copy_(table - types[0] if name != "MPNet" else table)
        tokens = some_tokens().clamp(min=2)
        pad = torch.zeros(3, 7, dtype=torch.bool)
        pad[1, 5:] = True
        out = theirs(tokens, attention_mask=(~pad).long(), position_ids=torch.arange(7)[None] + offset).last_hidden_state
        torch.testing.assert_close(encoder(tokens, pad=pad)[~pad], out[~pad], rtol=0, atol=1e-5)


def test_rope_equals_roformer():
    roformer = pytest.importorskip("transformers.models.roformer.modeling_roformer")
    D, L = 8, 10
    table = roformer.RoFormerSinusoidalPositionalEmbedding(L, D)
    if hasattr(table, "create_weight"):
        table.weight.data = table.create_weight()
    elif hasattr(table, "_init_weight"):
        table._init_weight()
    q, k = torch.randn(2, 2, 3, L, D)
    theirs = roformer.RoFormerSelfAttention.apply_rotary_position_embeddings(table(torch.Size([3, L]))[None, None], q, k)
    ours = tiny("rope").float().pe.parts["rope"].edit_qk(q, k, torch.arange(L)[None])
    for a, b in zip(ours, theirs):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5)


@pytest.mark.parametrize("n_head", [1, 2, 4, 6, 8, 12, 16])
def test_alibi_slopes_equal_bloom(n_head):
    bloom = pytest.importorskip("transformers.models.bloom.modeling_bloom")
    theirs = bloom.build_alibi_tensor(torch.ones(1, 2), n_head, torch.float32)[:, 0, 1]     # slope * position 1
    torch.testing.assert_close(torch.tensor(model_module.Alibi.published_slopes(n_head)), theirs)


# =========================================================================================================
# objectives.py

class Letters:
    """Stands for a tokenizer: even ids begin a word."""
    def decode_single_token_bytes(self, i):
        return b" a" if i % 2 == 0 else b"a"


def pretraining(objective="mlm", pe="abs", L=12, double=True, n_layer=1, **change):
    torch.manual_seed(1)
    encoder = Encoder(
        EncoderConfig(
            vocab_size=VOCAB, n_layer=n_layer, n_head=2, d_model=16, d_ff=32, max_len=L, dropout=0.0, attn_dropout=0.0, pe=pe
        )
    )
    encoder.tokenizer = Letters()
    model = Pretraining(encoder, ObjectiveConfig(objective, **change))
    return model.double() if double else model


def packed_rows(B=6, L=12, seed=0):
    """Rows as data.py makes them: [CLS] .. [SEP], with a [SEP] inside some."""
    tokens = some_tokens(B, L, seed)
    tokens[:, -1] = VOCAB - 6
    tokens[0, 5] = tokens[1, 3] = tokens[1, 7] = VOCAB - 6
    return tokens


def test_mlm_selects_80_10_10():
    model = pretraining("mlm", L=130, mask_rate=0.3)
    tokens = torch.randint(0, VOCAB - 8, (3000, 130), generator=torch.Generator().manual_seed(0))
    tokens[:, 0], tokens[:, -1] = VOCAB - 8, VOCAB - 6
    batch = model.corrupt(tokens, 0)
    slots, shown = batch["mlm_slots"], batch["tokens"].gather(1, batch["mlm_slots"])
    assert slots.shape == (3000, 38) and slots.numel() > 100_000
    assert all(len(set(row)) == 38 for row in slots[:50].tolist()), "places are drawn without replacement"
    masked, kept = (shown == VOCAB - 5).double().mean(), (shown == batch["mlm_target"]).double().mean()
    assert abs(masked - 0.8) < 0.01 and abs(kept - (0.1 + 0.1 / 64)) < 0.01
    random_tokens = shown[(shown != VOCAB - 5) & (shown != batch["mlm_target"])]
    assert random_tokens.max() < VOCAB - 8 and len(random_tokens.unique()) == VOCAB - 8
    changed = batch["tokens"] != tokens
    assert not changed[:, [0, -1]].any() and (changed.sum() == (shown != batch["mlm_target"]).sum())
    counts = torch.bincount(slots.flatten(), minlength=130)[1:-1].double()
    assert (counts - counts.mean()).abs().max() < 5 * counts.mean().sqrt(), "every place is as likely"


def test_no_special_is_selected_and_slots_beyond_have_weight_0():
    for objective in ("mlm", "pplm"):
        model = pretraining(objective, mask_rate=0.9, pos_rate=0.9)        # k = 9 of 10 inner places; row 1 has 8 eligible
        tokens = packed_rows()
        for seed in range(20):
            batch = model.corrupt(tokens, seed)
            special = tokens >= VOCAB - 8
            assert (batch["tokens"][special] == tokens[special]).all()
            if objective == "mlm":
                assert batch["mlm_weight"].sum(1).tolist() == [9, 8, 9, 9, 9, 9]
                assert not special.gather(1, batch["mlm_slots"])[batch["mlm_weight"] > 0].any()
            else:
                assert (batch["pos"] == torch.arange(12))[special].all()


def test_mlm_loss_equals_loop():
    model, tokens = pretraining("mlm", mask_rate=0.3), packed_rows()
    batch = model.corrupt(tokens, 3)
    hidden = model.encoder(batch["tokens"])
    mlm, total, n = model.objectives["mlm"], 0.0, 0
    for b in range(6):
        for slot, w in zip(batch["mlm_slots"][b].tolist(), batch["mlm_weight"][b].tolist()):
            if w == 0:
                continue
            x = mlm.norm(F.gelu(mlm.dense(hidden[b, slot])))
            scores = torch.stack([x @ model.encoder.tok.weight[t] + mlm.bias[t] for t in range(VOCAB)])
            total, n = total - scores.log_softmax(0)[tokens[b, slot]], n + 1
    torch.testing.assert_close(model(batch)[0], total / n, check_dtype=False, rtol=0, atol=1e-5)
    assert n == 18, "three places in each of six rows"


def test_padded_ids_never_leave():
    model = pretraining("mlm")
    assert model.encoder.tok.weight.shape[0] == 128
    assert model.objectives["mlm"].logits(model.encoder, torch.zeros(2, 16).double()).shape == (2, VOCAB)


def test_whole_words_are_selected():
    """Written again as a loop: words in order of their random score, piece by piece, until k are taken."""
    model, tokens = pretraining("mlm", L=34, mask_rate=0.4, whole_word=True), some_tokens(50, 34)
    tokens[:, -1] = tokens[::3, 9] = tokens[::5, 20] = VOCAB - 6
    batch = model.corrupt(tokens, 0)
    score = torch.rand(50, 34, generator=stream("cpu", 0, "mlm"))
    for b in range(50):
        words = []
        for i in range(34):
            if tokens[b, i] >= VOCAB - 8:
                words.append([])                                    # a special ends a word and is none
            elif i and words[-1] and tokens[b, i] % 2:
                words[-1].append(i)
            else:
                words.append([i])
        # The score of a word is that of its number, counted as places that start one, specials included.
        number, starts = [], 0
        for i in range(34):
            starts += int(tokens[b, i] >= VOCAB - 8 or tokens[b, i] % 2 == 0 or tokens[b, i - 1] >= VOCAB - 8)
            number.append(min(starts, 33))
        words = sorted((w for w in words if w), key=lambda w: -score[b, number[w[0]]])
        expected = [i for w in words for i in w][:round(0.4 * 32)]
        assert batch["mlm_slots"][b].tolist() == expected
    cut = [row for row in batch["mlm_slots"].tolist()]
    assert all(len(set(row)) == 13 for row in cut) and batch["mlm_weight"].all()


def test_word_starts(corpus):
    encoding = tiktoken.Encoding(**data.encoding_arguments(corpus.tokenizer))
    starts = objectives.word_starts(encoding, corpus.vocab_size)
    for text, expected in ((" lazy", True), ("e", False), (".", True), ("7", False), (" ", True), ("\n", True)):
        assert bool(starts[encoding.encode_ordinary(text)[0]]) == expected, text
    assert starts[-8:].all() and len(starts) == 8192
    with pytest.raises(ValueError, match="tokenizer"):
        objectives.word_starts(None, 72)


def test_mlm_on_all_adds_the_mean_over_the_rest():
    model, tokens = pretraining("mlm", mask_rate=0.3, mlm_on="all"), packed_rows()
    batch = model.corrupt(tokens, 3)
    logp = model.objectives["mlm"].logits(model.encoder, model.encoder(batch["tokens"])).log_softmax(-1)
    masked, rest = [], []
    for b in range(6):
        chosen = batch["mlm_slots"][b][batch["mlm_weight"][b]].tolist()
        for i in range(12):
            if tokens[b, i] < VOCAB - 8:
                (masked if i in chosen else rest).append(-logp[b, i, tokens[b, i]])
    assert len(masked) == 18 and len(rest) == 60 - 3 - 18
    expected = sum(masked) / len(masked) + sum(rest) / len(rest)
    torch.testing.assert_close(model(batch)[0], expected, check_dtype=False, rtol=0, atol=1e-5)
    assert model.baselines(6.0)["unigram"] == 12.0


def test_clm_equals_a_loop_and_sees_no_future():
    model, tokens = pretraining("clm", "tupe_r"), packed_rows()
    batch = model.corrupt(tokens, 0)
    assert (batch["tokens"] == tokens).all()
    losses = []
    for b in range(6):
        for i in range(11):
            if tokens[b, i + 1] < VOCAB - 8:
                cut = tokens[b:b + 1, :i + 1]                       # nothing but what stands to the left
                last = model.encoder(cut, causal=True)[0, -1]
                losses.append(-model.objectives["clm"].logits(model.encoder, last).log_softmax(-1)[tokens[b, i + 1]])
    assert len(losses) == 57
    torch.testing.assert_close(model(batch)[0], sum(losses) / len(losses), check_dtype=False, rtol=0, atol=1e-5)


# ----- tc

def test_tc_positives_and_negatives():
    """Positives within the window where there is one, uniform; negatives from other rows, uniform, with replacement."""
    stats = pytest.importorskip("scipy.stats")
    model, tokens = pretraining("tc", tc_negatives=20), packed_rows(6)
    tokens[2, 1:-1] = VOCAB - 6
    tokens[2, [2, 9]] = 5                                           # alone in their windows: each is the other's positive
    tokens[3, 2:-1] = VOCAB - 6                                     # a row with a single token
    words = tokens < VOCAB - 8
    near, seen = collections.Counter(), collections.Counter()
    for seed in range(300):
        batch = model.corrupt(tokens, seed)
        candidates, weight = batch["tc_candidates"], batch["tc_weight"]
        assert (candidates[2, 2, 0], candidates[2, 9, 0]) == (2 * 12 + 9, 2 * 12 + 2)
        assert (weight == (words & (torch.arange(6)[:, None] != 3))).all(), "all words but the single one"
        row, place = candidates // 12, candidates % 12
        index = torch.arange(6)[:, None, None]
        assert (row[..., :1] == index)[weight].all() and (row[..., 1:] != index)[weight].all()
        assert words.flatten()[candidates][weight].all(), "never a special"
        distance = (place[..., 0] - torch.arange(12)).abs()
        assert (distance[weight] > 0).all() and (distance[4:][weight[4:]] <= 2).all()
        near.update(int(x) for x in place[4, 5, :1])
        seen.update(candidates[0, 1, 1:].tolist())
    assert sorted(near) == [3, 4, 6, 7] and stats.chisquare(list(near.values())).pvalue > 1e-3
    others = words[1:].sum()
    assert len(seen) == others and stats.chisquare(list(seen.values())).pvalue > 1e-3


@pytest.mark.parametrize("cfg", [{}, dict(tc_embedding="original"), dict(tc_embedding="input_layer"), dict(tc_on="masked"),
                                 dict(tc_on="unmasked"), dict(tc_temperature=0.5, tc_negatives=3, tc_window=3)], ids=str)
@pytest.mark.parametrize("pe", ["abs", "sin"])
def test_tc_equals_a_loop(cfg, pe):
    """P2 eq 6 to 8, token by token."""
    model, tokens = pretraining("taco", pe, mask_rate=0.4, **cfg), packed_rows()
    batch = model.corrupt(tokens, 2)
    encoder, tc = model.encoder, model.objectives["tc"].cfg
    hidden = encoder(batch["tokens"])
    scale = 4.0 if pe == "sin" else 1.0                             # sqrt(C)
    e = encoder.tok.weight[tokens if tc.tc_embedding == "original" else batch["tokens"]] * scale
    if tc.tc_embedding == "input_layer":
        e = encoder.norm(e + encoder.pe.call("embed", torch.arange(12)[None]))
    g = (hidden - e).flatten(0, 1)
    losses = []
    for b in range(6):
        masked = batch["mlm_slots"][b].tolist()
        for i in range(12):
            wanted = {"all": True, "masked": i in masked, "unmasked": i not in masked}[tc.tc_on]
            if tokens[b, i] < VOCAB - 8 and wanted:
                candidates = batch["tc_candidates"][b, i]
                assert len(candidates) == 1 + tc.tc_negatives
                f = [torch.cosine_similarity(g[12 * b + i], g[c], dim=0) / tc.tc_temperature for c in candidates]
                losses.append(-torch.stack(f).log_softmax(0)[0])
    assert len(losses) == {"all": 57, "masked": 24, "unmasked": 33}[tc.tc_on]
    torch.testing.assert_close(model(batch)[1]["tc"], sum(losses) / 57 * 57 / len(losses), check_dtype=False, rtol=0, atol=1e-5)


def test_tc_of_a_constant_is_ln_1_plus_k_and_candidates_are_detached():
    model, tokens = pretraining("tc"), packed_rows()
    tc, batch = model.objectives["tc"], model.corrupt(tokens, 0)
    e = model.encoder.tok(tokens)
    with torch.no_grad():
        loss, _ = tc.loss(model.encoder, e + torch.ones(16), batch)
    assert abs(float(loss) - math.log(51)) < 1e-6 and model.baselines(0.0) == {"constant": math.log(51)}
    # The gradient is that of the anchors alone: one anchor's weight leaves every other hidden state without one.
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
    tokens[2, 3:-1] = VOCAB - 6                                     # two words: no two halves
    swapped = collections.Counter()
    for seed in range(30):
        batch = model.corrupt(tokens, seed)
        new, label = batch["tokens"], batch["nsp_label"]
        assert label.sum() == 21 and (batch["eligible"] == (new < VOCAB - 8)).all() and (batch["original"] == new).all()
        assert batch["nsp_weight"].tolist() == [float(b != 2) for b in range(42)] and (new[2] == tokens[2]).all()
        for b in [b for b in range(42) if b != 2]:
            words = [i for i in range(12) if tokens[b, i] < VOCAB - 8]
            middle = words[len(words) // 2]
            assert new[b, middle] == VOCAB - 6 and (new[b, :middle] == tokens[b, :middle]).all()
            same = [c for c in range(42) if (tokens[c, middle + 1:] == new[b, middle + 1:]).all()]
            assert same == [b] if not label[b] else (len(same) == 1 and same != [b] and label[same[0]] == 1)
        swapped.update(label.nonzero()[:, 0].tolist())
    assert len(swapped) == 42 and max(swapped.values()) < 28
    trades = [model.corrupt(tokens[:2], seed)["nsp_label"].tolist() for seed in range(200)]
    assert {tuple(t) for t in trades} == {(0, 0), (1, 1)} and 70 < sum(t[0] for t in trades) < 130, "two rows can only trade"


def test_nsp_loss_equals_a_loop_and_comes_before_masking():
    model, tokens = pretraining("mlm+nsp"), packed_rows()
    assert model.names == ["nsp", "mlm"]
    batch = model.corrupt(tokens, 0)
    assert (batch["original"] != tokens).any()
    assert (batch["mlm_target"] == batch["original"].gather(1, batch["mlm_slots"])).all()
    assert (batch["mlm_target"] < VOCAB - 8)[batch["mlm_weight"]].all(), "the new [SEP] is not selected"
    nsp, cls = model.objectives["nsp"], model.encoder(batch["tokens"])[:, 0]
    losses = [-nsp.out(torch.tanh(nsp.dense(x))).log_softmax(0)[y] for x, y in zip(cls, batch["nsp_label"])]
    torch.testing.assert_close(model(batch)[1]["nsp"], sum(losses) / 6, check_dtype=False, rtol=0, atol=1e-6)


def test_pplm_permutes_inside_the_selected_set():
    model, tokens = pretraining("pplm"), packed_rows(64)
    batch = model.corrupt(tokens, 0)
    pos, arange = batch["pos"], torch.arange(12)
    assert (batch["tokens"] == tokens).all()
    assert (pos.sort(1).values == arange).all(), "a permutation"
    assert ((pos != arange).sum(1) <= 6).all(), "k = round(.6 * 10)"
    chosen, valid = objectives.select(batch["eligible"], 0.6, stream("cpu", 0, "pplm"))
    outside = torch.ones(64, 12, dtype=torch.bool).scatter(1, chosen, ~valid)
    assert (pos == arange)[outside].all()


def test_pplm_permutation_is_uniform():
    """Chi-square over the 4! orders of 4 permuted places."""
    stats = pytest.importorskip("scipy.stats")
    model = pretraining("pplm", L=6, pos_rate=0.99)         # k = 4 of 4
    tokens = some_tokens(6000, 6)
    tokens[:, -1] = VOCAB - 6
    orders = collections.Counter(map(tuple, model.corrupt(tokens, 0)["pos"][:, 1:-1].tolist()))
    assert len(orders) == 24 and stats.chisquare(list(orders.values())).pvalue > 1e-3


def test_pplm_selection_is_uniform():
    model = pretraining("pplm", L=34)
    tokens = some_tokens(4000, 34)
    tokens[:, -1] = VOCAB - 6
    moved = (model.corrupt(tokens, 0)["pos"] != torch.arange(34)).double().mean(0)[1:-1]
    k = round(0.6 * 32)
    assert (moved - k / 32 * (1 - 1 / k)).abs().max() < 0.035


def pair_loop(name, model, tokens, batch, L, cfg):
    """Mean loss over the scored pairs, written from P0: scores of one more attention layer, psi, then the distance."""
    encoder, head = model.encoder, model.objectives[name].head
    hidden, pos = encoder(batch["tokens"], batch["pos"]), batch["pos"].tolist()
    naive, total, n = Naive(encoder), 0.0, 0
    q, k = (f(hidden).view(len(tokens), L, 2, 8) for f in (head.query, head.key))
    for b in range(len(tokens)):
        for i in range(L):
            for j in range(L):
                touched = (pos[b][i] != i) + (pos[b][j] != j)
                if i == j or tokens[b, i] >= VOCAB - 8 or tokens[b, j] >= VOCAB - 8:
                    continue
                if (name == "pmlm" and touched == 0) or (name == "pplm_some" and touched < 2):
                    continue
                if cfg.get("pair_scores") == "content":
                    s = torch.stack([q[b, i, h] @ k[b, j, h] / math.sqrt(8) for h in range(2)])
                else:
                    s = torch.stack([naive.logit(q[b, i, h], k[b, j, h], h, i, j, pos[b][i], pos[b][j], None) for h in range(2)])
                out, n = head.psi(s), n + 1
                if name == "pplm_binary":
                    total = total - out.log_softmax(0)[int(pos[b][j] - pos[b][i] == j - i)]
                elif cfg.get("pair_loss") == "wasserstein":
                    total = total + sum(p * abs(c - (L - 1) - (j - i)) for c, p in enumerate(out.softmax(0)))
                elif cfg.get("pair_loss") == "smooth_l1":
                    d = (out[0] - (j - i) / L).abs()
                    total = total + (0.5 * d * d * L if d < 1 / L else d - 0.5 / L)
                else:
                    total = total - out.log_softmax(0)[j - i + L - 1]
    return total / n


@pytest.mark.parametrize("name, pe, cfg", [
    *[("pplm", pe, {}) for pe in ("abs", "tupe_r", "t5", "bert_ad", "rope")], ("pmlm", "abs", {}), ("pmlm", "tupe_r", {}),
    ("pplm_some", "tupe_r", {}), ("pplm_binary", "tupe_r", {}), ("pplm", "tupe_r", dict(pair_scores="content")),
    ("pplm", "abs", dict(pair_head="linear")), ("pplm", "tupe_r", dict(pair_loss="wasserstein")),
    ("pmlm", "abs", dict(pair_loss="smooth_l1")), ("pplm_binary", "rel_k", dict(pair_scores="content", pair_head="linear"))])
def test_pair_losses_equal_a_loop(name, pe, cfg):
    """Which pairs, which labels: P0 sec 3.1, whatever the given positions."""
    model, tokens = pretraining(name, pe, L=8, **cfg), packed_rows(3, 8)
    batch = model.corrupt(tokens, 1)
    expected = pair_loop(name, model, tokens, batch, 8, cfg)
    torch.testing.assert_close(model(batch)[0], expected, check_dtype=False, rtol=0, atol=1e-5)


@pytest.mark.parametrize("pe, differs", [("abs", None), ("none", None), ("t5", True), ("rope", True), ("abs+rel_k", True)])
def test_content_scores_leave_positions_out(pe, differs):
    """Where a scheme adds nothing to the logits there is nothing to leave out, and that is said."""
    if not differs:
        with pytest.raises(ValueError, match="adds nothing there"):
            pretraining("pplm", pe, pair_scores="content")
        return
    total, content = pretraining("pplm", pe), pretraining("pplm", pe, pair_scores="content")
    content.load_state_dict(total.state_dict(), strict=False)
    batch = total.corrupt(packed_rows(), 1)
    assert not torch.allclose(total(batch)[0], content(batch)[0], rtol=0, atol=1e-6)


def test_wasserstein_equals_scipy():
    stats = pytest.importorskip("scipy.stats")
    logits, label = torch.randn(9, 15, dtype=torch.double), torch.randint(15, (9,))
    for x, y, found in zip(logits.softmax(-1).numpy(), label.tolist(), objectives.wasserstein(logits, label, 8)):
        assert abs(stats.wasserstein_distance(np.arange(15), [y], x) - found) < 1e-9


def test_smooth_l1_predicts_offsets():
    """Its one number is the offset over L; the logged accuracy is that of the rounded offset."""
    offset = torch.tensor([[-3.4], [0.6], [7.0]]) / 8
    loss = objectives.smooth_l1(offset, torch.tensor([-3, 1, 6]) + 7, 8)
    assert (objectives.nearest(offset, 8) - 7).tolist() == [-3, 1, 7]
    torch.testing.assert_close(loss, torch.tensor([0.5 * 0.4 ** 2, 0.5 * 0.4 ** 2, 0.5]) / 8)


@pytest.mark.parametrize("pair_loss", ["wasserstein", "smooth_l1"])
def test_prior_of_a_distance_is_the_best_constant(pair_loss):
    L = 20
    ours = pretraining("pplm", L=L, pair_loss=pair_loss).baselines(0.0)["prior"]
    r = torch.tensor([j - i for i in range(1, L - 1) for j in range(1, L - 1) if i != j])
    found = []
    for constant in range(-3, 4):
        logits = torch.full((len(r), 1), constant / L)
        if pair_loss == "wasserstein":
            logits = torch.full((len(r), 2 * L - 1), -1e9)
            logits[:, constant + L - 1] = 0
        found.append(float(objectives.PAIR_LOSSES[pair_loss][0](logits, r + L - 1, L).mean()))
    assert abs(min(found) - ours) < 1e-5 and abs(found[3] - ours) < 1e-5


def test_expected_offsets():
    """What the probe sorts words by: the mean of the predicted distribution, or smooth_l1's number, in places."""
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
            found = pplm.expected_offsets(model.encoder, torch.randn(1, 8, 16).double(), torch.arange(8)[None])
        torch.testing.assert_close(found, torch.full((1, 6, 6), 3.0))


def test_pmlm_hides_the_selected_positions():
    model, tokens = pretraining("pmlm"), packed_rows(64)
    batch = model.corrupt(tokens, 0)
    hidden = batch["pos"] == UNKNOWN_POS
    assert (batch["tokens"] == tokens).all() and (batch["pos"] == torch.arange(12))[~hidden].all()
    assert not hidden[tokens >= VOCAB - 8].any() and (hidden.sum(1) == 6).all()
    with pytest.raises(ValueError, match="hides positions, and pe rope"):
        pretraining("pmlm", "rope+t5")


def test_binary_accuracy_of_a_constant_answer():
    """A head that always says "moved" is right for the share of pairs whose given offset is not the true one."""
    model, tokens = pretraining("pplm_binary"), packed_rows(40)
    batch = model.eval().corrupt(tokens, 0)
    with torch.no_grad():
        model.objectives["pplm_binary"].head.psi[2].bias.copy_(torch.tensor([100.0, 0.0]))
    pos, right, pairs = batch["pos"], 0, 0
    for b in range(40):
        words = [i for i in range(12) if tokens[b, i] < VOCAB - 8]
        for i in words:
            for j in words:
                if i != j:
                    right, pairs = right + int(pos[b, j] - pos[b, i] != j - i), pairs + 1
    assert abs(model(batch)[1]["pplm_binary_accuracy"] - right / pairs) < 1e-6


def test_rel_k_gives_the_pair_head_its_own_table():
    model = pretraining("pplm", "rel_k")
    assert model.objectives["pplm"].head.table.weight.shape == (130, 8)
    model(model.corrupt(packed_rows(), 0))[0].backward()
    assert model.objectives["pplm"].head.table.weight.grad.abs().max() > 0
    assert pretraining("pplm", "rel").objectives["pplm"].head.table is None


@pytest.mark.parametrize("objective, item", [("pplm", 4 * 6 * 10 * 23), ("clm", 4 * VOCAB), ("mlm", 4 * VOCAB)])
def test_chunks_change_nothing(monkeypatch, objective, item):
    model, tokens = pretraining(objective, "tupe_r"), packed_rows()
    batch = model.corrupt(tokens, 0)
    results = []
    for budget in (1 << 30, 3 * item, 1):         # all at once, three items at a time, one at a time
        monkeypatch.setattr(objectives, "CHUNK_BYTES", budget)
        model.zero_grad()
        loss, _ = model(batch)
        loss.backward()
        results.append([loss.detach(), *[p.grad.clone() for p in model.parameters()]])
    for other in results[1:]:
        for x, y in zip(results[0], other):
            torch.testing.assert_close(x, y, rtol=0, atol=1e-6)     # the loss itself is in float32


def test_chunks_are_as_long_as_the_budget_allows(monkeypatch):
    monkeypatch.setattr(objectives, "CHUNK_BYTES", 25)
    spans = []
    objectives.in_chunks(lambda start, stop: spans.append((start, stop)) or torch.zeros(1), 7, 10)
    assert spans == [(0, 2), (2, 4), (4, 6), (6, 7)]


@pytest.mark.parametrize("objective, flags", [("pplm", {}), ("pplm_binary", {}), ("pplm", dict(pair_loss="smooth_l1"))])
def test_chunks_keep_nothing_for_the_backward_pass(monkeypatch, objective, flags):
    """The pair head's MLP is wider than two classes or one number: its hidden layer counts too."""
    model = pretraining(objective, "abs", **flags)
    batch = model.corrupt(packed_rows(), 0)
    hidden = model.encoder(batch["tokens"], pos=batch["pos"])
    part, kept = model.objectives[objective], []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.nbytes) or x, lambda x: x):
        for budget in (1 << 30, 2 * 4 * batch["pos"].numel() * objectives.PAIR_HIDDEN):         # all at once; two queries
            monkeypatch.setattr(objectives, "CHUNK_BYTES", budget)
            part.loss(model.encoder, hidden, batch)
            kept.append(None)
    whole, chunked = (sum(kept[:(at := kept.index(None))]), sum(kept[at + 1:-1]))
    assert chunked < whole / 5, (whole, chunked)


ALL_OBJECTIVES = ["mlm", "clm", "pmlm", "pplm", "pplm_some", "pplm_binary", "tc", "taco", "nsp", "mlm+pplm", "taco+pmlm",
                  "clm+tc", "nsp+mlm+pplm_some+tc"]


@pytest.mark.parametrize("pe", ["abs", "tupe_r"])
@pytest.mark.parametrize("objective", ALL_OBJECTIVES)
def test_every_objective_trains_every_parameter(objective, pe):
    """Below 1e-9 are those that softmax cancels: theta_1, a row of a table. Unused heads would show here."""
    model = pretraining(objective, pe, pos_rate=0.4, n_layer=2)     # tupe's [CLS] sees no position in the last layer
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() > 1:
                p.mul_(5)           # at N(0, .02) some gradients are real, but tiny
    model(model.corrupt(packed_rows(), 0))[0].backward()
    small = [name for name, p in model.named_parameters() if p.grad is None or p.grad.abs().max() < 1e-9]
    assert small == []
    if pe == "tupe_r" and "pplm" in objective:
        assert model.encoder.pe.parts["tupe_r"].positions.table.weight.grad[-1].abs().max() > 1e-9, "theta_2 learns"


@pytest.mark.parametrize("objective", ["mlm", "clm", "pplm", "taco", "nsp", "nsp+mlm+pplm_some+tc"])
def test_objectives_compile_without_graph_breaks(objective):
    torch._dynamo.reset()
    model, tokens = pretraining(objective, "tupe_r", double=False), packed_rows()
    batch = model.corrupt(tokens, 0)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(batch)[0], model(batch)[0])
    compiled(batch)[0].backward()


@pytest.mark.parametrize("L, rate", [(32, 0.6), (64, 0.6), (32, 0.3)])
def test_baselines_equal_a_simulation(L, rate):
    """Corrupt many rows, and fit each reader's best guess by counting."""
    n = L - 2
    k, rng, R = round(rate * n), np.random.default_rng(1), 6000
    places = np.argsort(rng.random((R, n)), 1)[:, :k]
    given_at = np.tile(np.arange(n), (R, 1))
    shuffled = rng.permuted(places, axis=1)
    np.put_along_axis(given_at, places, shuffled, 1)                    # given_at[token] = its given place
    ours = objectives.position_baselines(L, rate)
    r = (np.arange(n)[None, :] - np.arange(n)[:, None])
    counts = np.bincount((r + n).ravel()[r.ravel() != 0]).astype(float)
    p = counts[counts > 0] / counts.sum()
    assert abs(ours["prior"] + (p * np.log(p)).sum()) < 1e-9

    # copy: the loss of predicting from the joint counts of (given a, given b, offset), trained on one half,
    # scored by exact symmetry: the table below depends on (a, b) only, so counts over many rows estimate it.
    a_b_r = np.zeros((n, n, 2 * n))
    for row in given_at:
        a_b_r[row[:, None], row[None, :], r + n] += 1
    a_b_r[np.arange(n), np.arange(n)] = 0
    a_b_r[:, :, n] = 0
    q = a_b_r / a_b_r.sum(-1, keepdims=True).clip(1)
    plug_in = -(q * np.log(np.where(q > 0, q, 1))).sum(-1)[~np.eye(n, dtype=bool)]
    bias = ((q > 0).sum(-1)[~np.eye(n, dtype=bool)] - 1) / (2 * R)     # Miller-Madow: counting underestimates entropy
    assert abs(ours["copy"] - (plug_in + bias).mean()) < 0.02

    # selected and moved: per row, by enumerating what is still possible for each pair.
    for key, sets in (("selected", [set(p) for p in places[:60]]),
                      ("moved", [set(np.flatnonzero(row != np.arange(n))) for row in given_at[:60]])):
        found = []
        for row, inside in zip(given_at[:60], sets):
            where = np.array(sorted(inside))
            for i, j in rng.permutation(n * n)[:150].reshape(-1, 1) // np.array([n, 1]) % n:
                if i == j:
                    continue
                free_i = where if i in inside else np.array([i])
                free_j = where if j in inside else np.array([j])
                if key == "moved":
                    free_i, free_j = (f[f != row[x]] if len(f) > 1 else f for f, x in ((free_i, i), (free_j, j)))
                d = (free_j[None, :] - free_i[:, None])[free_j[None, :] != free_i[:, None]]
                share = np.bincount(d - d.min()) / len(d)
                share = share[share > 0]
                found.append(-(share * np.log(share)).sum())
        assert abs(ours[key] - np.mean(found)) < 4 * np.std(found) / len(found) ** 0.5 < 0.1, key

    # pmlm scores pairs with a selected end, pplm_some those with two moved ends; both know the sets, so per row:
    some, scored, right = [], 0.0, 0.0
    for row, inside in zip(given_at[:200], places[:200]):
        where, moved = np.sort(inside), np.flatnonzero(row != np.arange(n))
        d = (where[None, :] - where[:, None])[~np.eye(k, dtype=bool)]
        share = np.bincount(d - d.min()) / len(d)
        both_hidden = -(share[share > 0] * np.log(share[share > 0])).sum()
        scored += (k * (k - 1) * both_hidden + 2 * k * (n - k) * math.log(k)) / (k * (k - 1) + 2 * k * (n - k)) / 200
        # Of two moved ends seen at (a, b), t_i is any moved place but a, t_j any but b, and they differ.
        for a, b in rng.choice(moved, (20, 2)):
            if a != b:
                d = [tj - ti for ti in moved for tj in moved if ti != a and tj != b and ti != tj]
                share = np.bincount(np.array(d) - min(d)) / len(d)
                some.append(-(share[share > 0] * np.log(share[share > 0])).sum())
        same = (row[None, :] - row[:, None]) == r
        right += same[~np.eye(n, dtype=bool)].mean() / 200
    assert abs(ours["free_slots"] - scored) < 0.01 and abs(ours["some_moved"] - np.mean(some)) < 0.01
    assert abs(ours["binary"] + right * math.log(right) + (1 - right) * math.log(1 - right)) < 0.01


def test_baselines_of_the_design():
    """Figures found independently for rate .6."""
    for L, copy_, selected, moved in ((32, 3.553, 2.788, 2.607), (64, 4.198, 3.387, 3.290), (128, 4.841, 4.017, 3.963)):
        ours = objectives.position_baselines(L, 0.6)
        assert (
            abs(ours["copy"] - copy_) < 0.005 and abs(ours["selected"] - selected) < 0.005 and abs(ours["moved"] - moved) < 0.01
        )


@pytest.mark.parametrize("objective", ["mlm+pplm", "taco", "taco+pplm", "nsp+mlm+pmlm", "clm+tc"])
def test_a_sum_is_the_sum_of_its_parts(objective):
    model, tokens = pretraining(objective, "tupe_r"), packed_rows()
    batch = model.corrupt(tokens, 5)
    total, scalars = model(batch)
    torch.testing.assert_close(total, sum(scalars[name] for name in model.names))
    hidden = model.encoder(batch["tokens"], batch.get("pos"), causal=objective == "clm+tc")
    for name in model.names:
        alone, _ = model.objectives[name].loss(model.encoder, hidden, batch)
        torch.testing.assert_close(alone, scalars[name])
    assert (batch["tokens"] != tokens).any() or "clm" in objective
    assert ("pos" in batch) == ("pmlm" in objective or "pplm" in objective)


def test_weights_follow_the_spelling():
    cfg = ObjectiveConfig("pplm+taco", loss_weights=(2.0, 1.0, 0.5))
    assert cfg.objective == "mlm+pplm+tc" and cfg.loss_weights == (1.0, 2.0, 0.5)
    model, tokens = pretraining("pplm+taco", loss_weights=(2.0, 1.0, 0.5)), packed_rows()
    total, parts = model(model.corrupt(tokens, 0))
    torch.testing.assert_close(total, parts["mlm"] + 2 * parts["pplm"] + 0.5 * parts["tc"])


def test_parts_draw_from_their_own_streams():
    both, alone = pretraining("pplm+mlm"), pretraining("mlm")
    assert both.names == ["mlm", "pplm"], "the order of corruption does not depend on the spelling"
    tokens = packed_rows()
    assert (both.corrupt(tokens, 1, 2)["tokens"] == alone.corrupt(tokens, 1, 2)["tokens"]).all()


@pytest.mark.parametrize("objective, key", [("mlm", "tokens"), ("pmlm", "pos"), ("pplm", "pos"), ("tc", "tc_candidates"),
                                           ("nsp", "tokens"), ("nsp+mlm+pplm+tc", "tokens")])
def test_corruption_is_a_pure_function(objective, key):
    model, tokens = pretraining(objective), packed_rows()
    clean = tokens.clone()
    one = model.corrupt(tokens, 7, 100, 0)
    torch.manual_seed(99)
    two = model.corrupt(tokens, 7, 100, 0)
    assert all((one[name] == two[name]).all() for name in one) and (tokens == clean).all()
    assert all((model.corrupt(tokens, *other)[key] != one[key]).any() for other in ((8, 100, 0), (7, 101, 0), (7, 100, 1)))


def test_scheme_weights_of_the_pair_head_start_xavier():
    torch.manual_seed(0)
    head = Pretraining(Encoder(EncoderConfig(vocab_size=VOCAB)), ObjectiveConfig("pplm")).objectives["pplm"].head
    assert abs(head.query.weight.std() - math.sqrt(2 / 256)) < 5e-3


@pytest.mark.parametrize("change, says", [
    (dict(objective="foo"), "choose from mlm"),
    (dict(objective="pplm+pplm"), "at most one position"), (dict(objective="pmlm+pplm_some"), "at most one position"),
    (dict(objective="mlm+mlm"), "at most one token"), (dict(objective="taco+mlm"), "at most one token"),
    (dict(objective="taco+tc"), "at most one contrastive"), (dict(objective="mlm+clm"), "at most one token"),
    (dict(objective="clm+pplm"), "neither positions nor nsp"), (dict(objective="nsp+clm"), "neither positions nor nsp"),
    (dict(mask_rate=0.0), "between 0 and 1"), (dict(mask_rate=1.0), "between 0 and 1"),
    (dict(pos_rate=1.5), "between 0 and 1"), (dict(pos_rate=float("nan")), "between 0 and 1"),
    (dict(mlm_on="most"), "choose from masked, all"), (dict(objective="clm", mlm_on="all"), "mlm_on is for mlm"),
    (dict(objective="pplm", whole_word=True), "whole_word is for mlm"), (dict(pair_loss="wasserstein"), "pair_loss is for pmlm"),
    (dict(objective="pplm_binary", pair_loss="smooth_l1"), "two classes"), (dict(tc_window=7), "tc_window is for tc"),
    (dict(objective="tc", tc_on="masked"), "needs mlm"), (dict(objective="tc", tc_embedding="original"), "without mlm"),
    (dict(objective="tc", tc_window=4), "odd"), (dict(objective="tc", tc_window=1), "odd"),
    (dict(objective="tc", tc_negatives=0), "positive"),
    (dict(objective="tc", tc_temperature=0.0), "positive"), (dict(objective="taco", loss_weights=(1.0,)), "wants 2"),
    (dict(objective="taco", loss_weights=(1.0, 0.0)), "wants 2 positive"),
])
def test_bad_objectives_are_refused(change, says):
    with pytest.raises(ValueError, match=says):
        ObjectiveConfig(**change)


def test_rows_too_short_are_refused():
    with pytest.raises(ValueError, match="fewer than 2"):
        pretraining("pplm", L=4, pos_rate=0.5)
    with pytest.raises(ValueError, match="selects none"):
        pretraining("mlm", L=4)
    for objective in ("tc", "nsp"):
        with pytest.raises(ValueError, match="other rows"):
            pretraining(objective).corrupt(packed_rows()[:1], 0)


# =========================================================================================================
# train.py

TINY = [
    "--n_layer",
    "1",
    "--n_head",
    "2",
    "--d_model",
    "16",
    "--d_ff",
    "32",
    "--block_size",
    "16",
    "--batch_size",
    "4",
    "--warmup",
    "2",
    "--device",
    "cpu",
    "--log_every",
    "3",
]


def run_train(corpus_file, cache, out, *flags):
    train.main(["--dataset", corpus_file, "--tokenizer", "bpe", "--cache", cache, "--out_dir", str(out), *TINY, *flags])


def weights(folder, name="ckpt.pt"):
    return torch.load(Path(folder) / name, weights_only=True)


def test_presets_are_whole_and_legal():
    for name, preset in train.PRESETS.items():
        args = train.parse_args(["--preset", name])
        assert all(getattr(args, key) == value for key, value in preset.items())
        assert None not in [getattr(args, key) for key in ("dataset", "tokenizer", "lr", "beta1", "mask_rate", "n_head")]
        EncoderConfig(n_layer=args.n_layer, n_head=args.n_head, d_model=args.d_model, d_ff=args.d_ff, max_len=args.block_size)
    assert train.parse_args([]).preset == "demo" and train.parse_args(["--lr", "1"]).lr == 1


def test_default_encoder_is_the_demo():
    demo, cfg = train.PRESETS["demo"], EncoderConfig()
    assert (cfg.n_layer, cfg.n_head, cfg.d_model, cfg.d_ff, cfg.max_len) == tuple(
        demo[k] for k in ("n_layer", "n_head", "d_model", "d_ff", "block_size"))


def test_schedule():
    args = train.parse_args(["--steps", "10", "--warmup", "4", "--lr", "1"])
    updater = train.Updater(pretraining(double=False), args, torch.float32)
    rates = []
    for step in range(10):
        updater.done.fill_(step)
        rates.append(round(float(updater.lr()), 4))
    assert rates == [0.25, 0.5, 0.75, 1.0, 1.0, 0.8333, 0.6667, 0.5, 0.3333, 0.1667]


@pytest.mark.parametrize("card, built, runs", [
    ((7, 0), ["sm_70", "sm_80"], True), ((7, 0), ["sm_75", "sm_80", "sm_90", "compute_90"], False), ((8, 6), ["sm_80"], True),
    ((9, 0), ["sm_80", "sm_90a"], True), ((12, 0), ["sm_80", "compute_90"], True), ((12, 0), ["sm_80", "sm_90"], False),
    ((9, 0), ["gfx90a", "gfx942"], True)])
def test_a_card_without_kernels_is_noticed(card, built, runs):
    assert train.has_kernels(*card, built) is runs


def test_more_processes_than_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(ValueError, match="finds 2 GPUs"):
        train.pick_device("cuda")


@pytest.mark.parametrize("name, expected", [
    ("Tesla V100-SXM2-16GB", 125e12), ("Tesla V100-PCIE-16GB", 112e12), ("NVIDIA H100 80GB HBM3", 989e12), ("NVIDIA A10G", None),
    ("NVIDIA H100 PCIe", 756e12), ("NVIDIA GeForce RTX 4090 Laptop GPU", None), ("NVIDIA GeForce RTX 3090 Ti", None)])
def test_peak_of_a_card(name, expected, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert train.peak_flops(torch.device("cuda")) == expected


def test_each_part_is_set_beside_its_own_baselines():
    assert train.beside({"pplm": 4.4, "val_loss": 4.5, "val_pplm": 4.5}, {"prior": 4.6, "uniform": 4.8}) == " (0.100 below prior)"
    both = {"mlm.uniform": 9.0, "mlm.unigram": 6.7, "pplm.uniform": 4.8, "pplm.prior": 4.6}
    assert (
        train.beside({"val_loss": 11.0, "val_mlm": 6.5, "val_pplm": 4.7}, both)
        == " (0.200 below mlm.unigram, 0.100 below pplm.uniform)"
    )
    assert train.beside({"val_loss": 15.0, "val_mlm": 9.5, "val_pplm": 5.0}, both) == ""


def test_weight_decay_spares_vectors():
    groups = train.make_optimizer(pretraining(double=False), train.parse_args([])).param_groups
    assert all(p.dim() >= 2 for p in groups[0]["params"]) and all(p.dim() < 2 for p in groups[1]["params"])
    assert groups[0]["weight_decay"] == 0.01 and groups[1]["weight_decay"] == 0


def test_a_bad_gradient_skips_the_update(capsys):
    model = pretraining(double=False)
    updater = train.Updater(model, train.parse_args(["--steps", "10"]), torch.float32)
    batch = model.corrupt(packed_rows(), 0)
    before = copy.deepcopy(model.state_dict())
    model(batch)[0].backward()
    next(model.parameters()).grad[0, 0] = float("nan")
    updater.step()
    assert all((before[k] == v).all() for k, v in model.state_dict().items()) and updater.done == 0
    with pytest.raises(SystemExit) as stopped:
        updater.check(1, [1.0])
    assert stopped.value.code == 1 and "not finite near step 1" in capsys.readouterr().err
    model(batch)[0].backward()
    updater.step()
    assert any((before[k] != v).any() for k, v in model.state_dict().items()) and updater.done == 1


def test_clipping_is_of_the_global_norm():
    model = pretraining(double=False)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    seen = []
    updater = train.Updater(model, train.parse_args([]), torch.float32)
    updater.optimizer.step = lambda: seen.append(torch.stack([p.grad.norm() for p in model.parameters()]).norm())
    updater.step()
    assert abs(seen[0] - 1) < 1e-4


@pytest.mark.parametrize("objective", ["mlm", "pplm", "mlm+pplm"])
def test_accumulation_is_the_mean_of_its_micro_batches(objective, corpus_file, cache, tmp_path):
    """The gradients that `update` hands to the optimiser, before clipping, against the mean of both losses."""
    flags = ["--grad_accum", "2", "--dropout", "0", "--dtype", "float32", "--pe", "tupe_r", "--objective", objective]
    run = train.set_up(train.parse_args(["--dataset", corpus_file, "--tokenizer", "bpe", "--cache", cache, "--out_dir",
                                         str(tmp_path / "run"), *TINY, *flags]))
    run.net, seen = run.model, []
    run.updater.step = lambda: seen.extend(p.grad.clone() for p in run.model.parameters())
    sums = train.update(run, 3)
    run.model.zero_grad()
    losses = [
        run.model(run.model.corrupt(torch.from_numpy(run.batches(3 * 2 + micro, 4)), 1337, 3, micro))[0] for micro in (0, 1)
    ]
    (sum(losses) / 2).backward()
    torch.testing.assert_close(sums["loss"], sum(losses).detach() / 2)
    for a, p in zip(seen, run.model.parameters()):
        torch.testing.assert_close(a, p.grad, rtol=0, atol=1e-6)


def test_the_scaler_path(monkeypatch):
    """fp16's path, on a CPU: an overflow skips the update and halves the scale; ten in a row stop the run."""
    model = pretraining(double=False)
    updater = train.Updater(model, train.parse_args(["--steps", "10"]), torch.float16)
    assert updater.scaler.is_enabled()
    batch = model.corrupt(packed_rows(), 0)
    updater.scaler.scale(model(batch)[0]).backward()
    next(model.parameters()).grad[0, 0] = float("inf")
    before, scale = copy.deepcopy(model.state_dict()), updater.scaler.get_scale()
    updater.step()
    assert all((before[k] == v).all() for k, v in model.state_dict().items()) and updater.scaler.get_scale() == scale / 2
    updater.check(1, [1.0])                                             # one is normal
    updater.scaler.scale(model(batch)[0]).backward()
    updater.step()
    assert updater.done == 1 and updater.skipped == 0 and any((before[k] != v).any() for k, v in model.state_dict().items())
    other = train.Updater(pretraining(double=False), train.parse_args([]), torch.float32)
    other.load_state_dict(updater.state_dict())                         # resumed under another --dtype
    other.check(2, [1.0])
    updater.load_state_dict(other.state_dict())
    updater.skipped.fill_(10)
    with pytest.raises(SystemExit):
        updater.check(20, [1.0])


def test_run_learns_logs_and_saves(corpus_file, cache, tmp_path, capsys):
    run_train(corpus_file, cache, tmp_path / "run", "--steps", "60", "--lr", "0.01", "--eval_every", "30", "--keep_every", "20")
    lines = [json.loads(line) for line in open(tmp_path / "run" / "log.jsonl")]
    assert lines[0]["baselines"].keys() == {"uniform", "unigram"} and lines[0]["config"]["d_model"] == 16
    assert {"step", "loss", "lr", "ms_per_step", "tokens_per_s"} <= lines[1].keys()
    evaluated = [line for line in lines[1:] if "val_loss" in line]
    assert [line["step"] for line in evaluated] == [30, 60]
    assert evaluated[-1]["val_loss"] < lines[1]["loss"] - 1
    names = {f.name for f in (tmp_path / "run").iterdir()}
    assert names == {
        "ckpt.pt",
        "ckpt_prev.pt",
        "ckpt_20.pt",
        "ckpt_40.pt",
        "ckpt_60.pt",
        "config.json",
        "tokenizer.json", ".lock",
        "log.jsonl",
    }
    out = capsys.readouterr().out
    assert "baselines (nats): uniform" in out and "--preset paper" in out.splitlines()[-1]
    encoder = load(tmp_path / "run")
    assert not encoder.training and encoder.tokenizer.decode(encoder.tokenizer.encode_ordinary("the fox")) == "the fox"
    assert not any(key.startswith("_orig_mod") for key in weights(tmp_path / "run")["model"])


@pytest.mark.parametrize("pe, objective", [("abs", "mlm"), ("tupe_r", "pplm"), ("rel", "clm+tc"), ("t5", "nsp+mlm+pmlm")])
def test_resume_is_bit_exact(corpus_file, cache, tmp_path, pe, objective):
    flags = ["--pe", pe, "--objective", objective, "--steps", "12", "--eval_every", "6", "--grad_accum", "2", "--keep_every", "6"]
    run_train(corpus_file, cache, tmp_path / "whole", *flags)
    (tmp_path / "cut").mkdir()
    os.link(tmp_path / "whole" / "ckpt_6.pt", tmp_path / "cut" / "ckpt.pt")
    run_train(corpus_file, cache, tmp_path / "cut", *flags, "--resume")
    a, b = weights(tmp_path / "whole"), weights(tmp_path / "cut")
    assert a["step"] == b["step"] == 12
    assert all((a["model"][key] == b["model"][key]).all() for key in a["model"])


def test_resume_refuses_another_run(corpus_file, cache, tmp_path, capsys):
    run_train(corpus_file, cache, tmp_path / "run", "--steps", "3")
    for flags, says in ((["--steps", "3"], "--resume"), (["--steps", "4", "--resume"], "--steps was 3, is 4"),
                        (["--steps", "3", "--resume", "--pe", "t5"], "--pe was abs, is t5")):
        with pytest.raises(SystemExit) as stopped:
            run_train(corpus_file, cache, tmp_path / "run", *flags)
        assert stopped.value.code == 2 and says in capsys.readouterr().err


def test_sigterm_saves_and_resume_goes_on(corpus_file, cache, tmp_path):
    command = [sys.executable, HERE / "train.py", "--dataset", corpus_file, "--tokenizer", "bpe", "--cache", cache,
               "--out_dir", tmp_path / "run", *TINY, "--steps", "100000"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    for line in process.stdout:
        if line.startswith("step"):
            break
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 143 and "--resume" in out
    assert weights(tmp_path / "run")["step"] > 0


def test_a_second_signal_leaves_at_once(monkeypatch):
    left = []
    monkeypatch.setattr(train.os, "_exit", left.append)
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    signals = train.Signals()
    os.kill(os.getpid(), signal.SIGINT)
    assert signals.received == signal.SIGINT and left == []
    os.kill(os.getpid(), signal.SIGTERM)
    for number, handler in zip((signal.SIGTERM, signal.SIGINT), before):
        signal.signal(number, handler)
    assert left == [143]


# A training whose save is cut at a chosen call: killed there, or told that the disk is full.
CUT = """
import os, signal, sys
import train
how, where, which = sys.argv[1], sys.argv[2], int(sys.argv[3])
module, name = {"write": (train.torch, "save"), "fsync": (os, "fsync"), "link": (os, "link"), "replace": (os, "replace")}[where]
real, calls = getattr(module, name), [0]
def cut(*args, **more):
    if where != "replace" or str(args[0]).endswith(".tmp") and "ckpt" in str(args[0]):
        calls[0] += 1
    if calls[0] == which:
        if how == "kill":
            if where == "write":
                args[1].write(b"half of a checkpoint")
                args[1].flush()
            os.kill(os.getpid(), signal.SIGKILL)
        raise OSError(28, "No space left on device") if where != "write" else RuntimeError("file write failed")
    return real(*args, **more)
setattr(module, name, cut)
train.main(sys.argv[4:])
"""


def train_flags(corpus_file, cache, out, *flags):
    return ["--dataset", corpus_file, "--tokenizer", "bpe", "--cache", cache, "--out_dir", str(out), *TINY, *flags]


SAVED_OFTEN = ["--steps", "12", "--eval_every", "3", "--objective", "taco+pplm", "--pe", "tupe_r"]


@pytest.fixture(scope="session")
def whole_run(corpus_file, cache, tmp_path_factory):
    """The run never stopped, for comparison."""
    folder = tmp_path_factory.mktemp("whole")
    run_train(corpus_file, cache, folder / "run", *SAVED_OFTEN)
    return weights(folder / "run")["model"]


@pytest.mark.parametrize("where, which", [("write", 3), ("link", 1), ("replace", 2), ("replace", 3)])
def test_killed_inside_the_write(corpus_file, cache, tmp_path, where, which, whole_run):
    """At whatever call of save() the process dies, there is a whole checkpoint, and the end is bit for bit the same."""
    flags = train_flags(corpus_file, cache, tmp_path / "run", *SAVED_OFTEN)
    dead = subprocess.run([sys.executable, "-c", CUT, "kill", where, str(which), *flags], cwd=HERE, capture_output=True)
    assert dead.returncode == -signal.SIGKILL, dead.stderr
    there = [name for name in ("ckpt.pt", "ckpt_prev.pt") if (tmp_path / "run" / name).exists()]
    assert all(weights(tmp_path / "run", name)["step"] in (3, 6, 9) for name in there) and (there or which == 1)
    train.main([*flags, "--resume"])
    assert all((value == whole_run[key]).all() for key, value in weights(tmp_path / "run")["model"].items())


@pytest.mark.parametrize("where", ["write", "fsync"])
def test_a_full_disk_is_one_line_and_loses_nothing(corpus_file, cache, tmp_path, where):
    flags = train_flags(corpus_file, cache, tmp_path / "run", *SAVED_OFTEN)
    dead = subprocess.run([sys.executable, "-c", CUT, "full", where, "3", *flags], cwd=HERE, capture_output=True, text=True)
    assert dead.returncode == 1 and dead.stderr.strip().splitlines()[-1].startswith("error: "), dead.stderr
    assert "Traceback" not in dead.stderr and "the last checkpoint is of step 6" in dead.stderr
    assert weights(tmp_path / "run")["step"] == 6 and weights(tmp_path / "run", "ckpt_prev.pt")["step"] == 3
    assert not list((tmp_path / "run").glob("*.tmp"))


def test_two_runs_in_one_folder(corpus_file, cache, tmp_path, capsys):
    (tmp_path / "run").mkdir()
    with train.lock(tmp_path / "run"):
        with pytest.raises(SystemExit) as stopped:
            run_train(corpus_file, cache, tmp_path / "run", "--steps", "1")
    assert stopped.value.code == 2 and "another process is training in" in capsys.readouterr().err
    run_train(corpus_file, cache, tmp_path / "run", "--steps", "1")


def test_a_memory_map_cut_short_under_the_run(corpus_file, tmp_path, monkeypatch, capsys):
    cache = str(tmp_path / "cache")
    file = data.prepare(corpus_file, "bpe", cache).folder / "train.bin"
    real = train.Updater.step

    def step(self):
        real(self)
        if int(self.done) == 4:
            os.truncate(file, 100)
    monkeypatch.setattr(train.Updater, "step", step)
    with pytest.raises(SystemExit) as stopped:
        run_train(corpus_file, cache, tmp_path / "run", "--steps", "50", "--eval_every", "3")
    assert stopped.value.code == 1
    assert "was cut short under the run" in (text := capsys.readouterr().err) and "checkpoint is of step 3" in text


def test_out_of_memory_is_one_line(corpus_file, cache, tmp_path, monkeypatch, capsys):
    def step(self):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 7 EiB")
    monkeypatch.setattr(train.Updater, "step", step)
    for flags in (["--steps", "5"], ["--d_ff", "10000000000000"]):
        with pytest.raises(SystemExit) as stopped:
            run_train(corpus_file, cache, tmp_path / "run", *flags)
        assert stopped.value.code == 1 and "lower --batch_size" in capsys.readouterr().err


def test_ctrl_c_while_preparing_is_one_line(corpus_file, tmp_path, monkeypatch, capsys):
    def interrupted(*args):
        raise KeyboardInterrupt
    monkeypatch.setattr(data, "tokenize", interrupted)
    with pytest.raises(SystemExit) as stopped:
        run_train(corpus_file, str(tmp_path / "cache"), tmp_path / "run")
    assert stopped.value.code == 130 and "interrupted" in capsys.readouterr().err


def test_a_run_folder_that_cannot_be(corpus_file, cache, tmp_path, capsys):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(SystemExit) as stopped:
        run_train(corpus_file, cache, tmp_path / "file" / "run", "--steps", "1")
    assert stopped.value.code == 2 and capsys.readouterr().err.startswith("error: ")


def two_processes(tmp_path, patch, *flags):
    """train.py under torchrun with two processes, after a patch of its module -> how it ended."""
    script = tmp_path / "patched.py"
    script.write_text(f"import os, signal, sys, time\nsys.path.insert(0, {str(HERE)!r})\nimport train\n{patch}\ntrain.main()")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--standalone"]
    return subprocess.run([*torchrun, script, *flags], env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True,
                          text=True, timeout=300)


AT_STEP_15 = """
real = train.update
def update(run, step):
    if run.rank == {rank} and step == 15: os.kill(os.getpid(), signal.{name})
    return real(run, step)
train.update = update
"""


def test_a_rank_that_dies_takes_the_others_down(corpus_file, cache, tmp_path):
    flags = train_flags(corpus_file, cache, tmp_path / "run", "--eval_every", "10", "--log_every", "10", "--steps", "30")
    data.prepare(corpus_file, "bpe", cache)
    dead = two_processes(tmp_path, AT_STEP_15.format(rank=1, name="SIGKILL"), *flags)
    assert dead.returncode != 0 and "Signal 9 (SIGKILL)" in dead.stderr
    assert weights(tmp_path / "run")["step"] == 10
    train.main([*flags, "--resume", "--grad_accum", "2"])       # and one process may go on for the two
    assert weights(tmp_path / "run")["step"] == 30


def test_a_signal_to_one_rank_stops_all_and_saves(corpus_file, cache, tmp_path):
    """torchrun ends the others as soon as one has left: none leaves before a slow save is done."""
    flags = train_flags(corpus_file, cache, tmp_path / "run", "--eval_every", "10", "--log_every", "10", "--steps", "30")
    data.prepare(corpus_file, "bpe", cache)
    slow = "kept = train.save\ndef save(*args):\n    time.sleep(2)\n    return kept(*args)\ntrain.save = save"
    stopped = two_processes(tmp_path, AT_STEP_15.format(rank=0, name="SIGTERM") + slow, *flags)
    assert stopped.returncode != 0 and "stopped at step 20" in stopped.stdout
    assert weights(tmp_path / "run")["step"] == 20


BARRIER_LAST = """      # a reduced tensor that gloo has not let go of yet deadlocks the group's end, once in 5 to 30 runs
calls, end = [], train.dist.destroy_process_group
for name in ("all_reduce", "barrier"):
    setattr(train.dist, name, lambda *args, name=name, call=getattr(train.dist, name): calls.append(name) or call(*args))
def checked_end():
    assert calls[-1] == "barrier", calls
    end()
train.dist.destroy_process_group = checked_end"""


@pytest.mark.parametrize("objective", ["nsp+taco+pplm", "clm+tc", "mlm+pmlm"])
def test_two_processes_equal_accumulation(corpus_file, cache, tmp_path, objective):
    """torchrun with two gloo processes: the weights of one process with twice the accumulation, within 1e-6."""
    common = ["--dataset", corpus_file, "--tokenizer", "bpe", "--cache", cache, *TINY, "--steps", "3", "--dropout", "0",
              "--dtype", "float32", "--objective", objective, "--pe", "tupe_r"]
    data.prepare(corpus_file, "bpe", cache)
    train.main([*common, "--grad_accum", "2", "--out_dir", str(tmp_path / "one")])
    two_processes(tmp_path, BARRIER_LAST, *common, "--out_dir", tmp_path / "two").check_returncode()
    a, b = weights(tmp_path / "one")["model"], weights(tmp_path / "two")["model"]
    for key in a:
        torch.testing.assert_close(a[key], b[key], rtol=0, atol=1e-6)
    a, b = (json.loads((tmp_path / name / "log.jsonl").read_text().splitlines()[-1]) for name in ("one", "two"))
    for key in ("loss", *[key for key in a if key.startswith("loss_")], "val_loss"):
        assert abs(a[key] - b[key]) < 1e-5, f"{key} is the mean over all processes"


@pytest.mark.parametrize(
    "flags, says",
    [
        (["--pe", "foo"], "tupe_r"),
        (["--objective", "foo"], "pplm"),
        (["--preset", "foo"], "demo"),
        (["--lr", "-1"], "--lr"),
        (["--lr", "nan"], "--lr"),
        (["--steps", "0"], "--steps"),
        (["--block_size", "3"], "--block_size"),
        (["--mask_rate", "1.5"], "mask_rate"),
        (["--d_model", "10", "--n_head", "3"], "n_head"),
        (["--dataset", "no/such/*.jsonl"], "no file matches"),
        (["--block_size", "4000"], "too few for one row"),
        (["--device", "cpu", "--dtype", "float16"], "float16"),
        (["--dropout", "2"], "dropout"),
        (["--objective", "tc", "--batch_size", "1"], "--batch_size 2"),
        (["--objective", "taco", "--loss_weights", "1"], "wants 2"),
        (["--objective", "clm+pplm"], "reads from the left"),
        (["--tc_window", "7"], "tc_window is for tc"),
        (["--pair_loss", "l2"], "wasserstein"),
        (["--objective", "pplm", "--block_size", "4", "--pos_rate", "0.3"], "fewer than 2"),
        (["--data_fraction", "0"], "--data_fraction"),
        (["--data_fraction", "0.0001"], "too few"),
        (["--init_embeddings", "no/such"], "no checkpoint"),
    ],
)
def test_mistakes_are_one_line_and_exit_2(corpus_file, cache, tmp_path, capsys, flags, says):
    with pytest.raises(SystemExit) as stopped:
        run_train(corpus_file, cache, tmp_path / "run", *flags)
    error = capsys.readouterr().err
    assert stopped.value.code == 2 and says in error and len(error.splitlines()) == 1
    assert not (tmp_path / "run").exists(), "nothing half-written"


@pytest.mark.parametrize("flags, says", [
    (["--pe", "rope", "--objective", "pmlm"], "unknown"), (["--objective", "pplm", "--pair_scores", "content"], "content"),
    (["--objective", "tc", "--batch_size", "1"], "--batch_size 2"), (["--pe", "tupe_r+abs"], "alone"),
    (["--init_from", "nowhere"], "no checkpoint"), (["--init_embeddings", "nowhere"], "no checkpoint"),
    (["--objective", "pplm", "--block_size", "4", "--pos_rate", "0.3"], "fewer than 2")])
def test_mistakes_show_before_data_are_prepared(tmp_path, capsys, monkeypatch, flags, says):
    """Wikipedia would take hours."""
    monkeypatch.setattr(train, "prepare", lambda *args: pytest.fail("too late"))
    with pytest.raises(SystemExit) as stopped:
        train.main([*flags, "--preset", "paper", "--device", "cpu", "--out_dir", str(tmp_path / "run")])
    assert stopped.value.code == 2 and says in capsys.readouterr().err


def test_what_may_surprise_is_said(corpus_file, cache, tmp_path, capsys):
    run_train(corpus_file, cache, tmp_path / "run", "--resume", "--steps", "2", "--warmup", "2")
    out = capsys.readouterr().out
    assert "no checkpoint in" in out and "starts at step 0" in out and "the learning rate only rises" in out
    (tmp_path / "run" / "ckpt.pt").rename(tmp_path / "run" / "ckpt_prev.pt")
    with pytest.raises(SystemExit):
        run_train(corpus_file, cache, tmp_path / "run", "--resume", "--steps", "2")
    assert "ckpt_prev.pt, the one before: rename it" in capsys.readouterr().err


@given(content=st.binary(max_size=200), cut=st.integers(0, 2000))
@settings(max_examples=40, deadline=None)
def test_any_bytes_are_no_checkpoint(content, cut, tmp_path_factory):
    file = tmp_path_factory.mktemp("fuzz") / "ckpt.pt"
    torch.save({"config": {}, "model": {}, "tokenizer": {}}, file)
    whole = file.read_bytes()
    for damaged in (content, whole[:cut % len(whole)], whole[:40] + content + whole[40 + len(content):]):
        file.write_bytes(damaged)
        try:
            assert isinstance(model_module.read_checkpoint(str(file)), dict)        # the damage was where nothing is read
        except ValueError as error:
            assert "checkpoint" in str(error)


def test_bad_checkpoints_are_one_line(corpus_file, cache, tmp_path):
    run_train(corpus_file, cache, tmp_path / "run", "--steps", "3")
    good = (tmp_path / "run" / "ckpt.pt").read_bytes()
    with pytest.raises(FileNotFoundError, match="no checkpoint at"):
        load(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="does not fit this model"):
        load(tmp_path / "run", d_ff=64)
    with pytest.raises(ValueError, match="missing pe.parts.t5"):
        load(tmp_path / "run", pe="t5")
    for content in (good[:len(good) // 2], b"", b"not a checkpoint"):
        (tmp_path / "run" / "ckpt.pt").write_bytes(content)
        with pytest.raises(ValueError, match="not a readable checkpoint"):
            load(tmp_path / "run")
    torch.save({"some": "thing"}, tmp_path / "run" / "ckpt.pt")
    with pytest.raises(ValueError, match="not a checkpoint of this project"):
        load(tmp_path / "run")


def test_compiled_training_agrees_with_eager(corpus_file, cache, tmp_path):
    if not train.can_compile(torch.device("cpu")):
        pytest.skip("no C++ compiler")
    flags = ["--steps", "2", "--dropout", "0", "--dtype", "float32", "--pe", "tupe_r", "--objective", "pplm"]
    run_train(corpus_file, cache, tmp_path / "eager", *flags)
    torch._dynamo.reset()
    run_train(corpus_file, cache, tmp_path / "compiled", *flags, "--compile")
    a, b = weights(tmp_path / "eager")["model"], weights(tmp_path / "compiled")["model"]
    assert a.keys() == b.keys()
    for key in a:
        torch.testing.assert_close(a[key], b[key], rtol=0, atol=1e-3)


# ----- P2's experiments

def test_embeddings_are_taken_over_and_frozen(corpus_file, cache, tmp_path, capsys):
    run_train(corpus_file, cache, tmp_path / "a", "--steps", "3")
    run_train(corpus_file, cache, tmp_path / "b", "--steps", "3", "--seed", "5", "--objective", "taco", "--pe", "t5",
              "--init_embeddings", str(tmp_path / "a"), "--freeze_embeddings")
    a, b = weights(tmp_path / "a"), weights(tmp_path / "b")
    assert (a["model"]["encoder.tok.weight"] == b["model"]["encoder.tok.weight"]).all()
    run_train(corpus_file, cache, tmp_path / "c", "--steps", "3", "--seed", "5", "--init_embeddings", str(tmp_path / "a"))
    c = weights(tmp_path / "c")["model"]["encoder.tok.weight"]
    assert (c != a["model"]["encoder.tok.weight"]).any() and (c - a["model"]["encoder.tok.weight"]).abs().max() < 0.02
    with pytest.raises(SystemExit) as stopped:
        run_train(corpus_file, cache, tmp_path / "d", "--d_model", "32", "--init_embeddings", str(tmp_path / "a"))
    assert stopped.value.code == 2 and "width 16, this model 32" in capsys.readouterr().err


def test_a_fraction_of_the_data(corpus):
    whole, part, other = data.Batches(corpus, 16, 0), data.Batches(corpus, 16, 0, 0.25), data.Batches(corpus, 16, 1, 0.25)
    assert part.n == round(whole.n / 4)
    kept = {part.row(i) for i in range(part.n)}
    assert len(kept) == part.n == len(set(part.kept.tolist())) and kept == {other.row(i) for i in range(part.n)}
    assert {whole.row(i) for i in range(whole.n)} == set(range(whole.n))
    spread = np.histogram(sorted(kept), 4, (0, whole.n))[0]
    assert spread.min() > 0, "from all over the corpus, not its beginning"


def test_a_rate_without_its_objective_is_noted(capsys):
    assert train.parse_args(["--objective", "pplm", "--mask_rate", "0.3"]).mask_rate == 0.3
    assert "--mask_rate has no effect on pplm" in capsys.readouterr().out
    train.parse_args(["--objective", "taco+pplm", "--mask_rate", "0.3", "--pos_rate", "0.5"])
    assert capsys.readouterr().out == ""


# ----- warm start

def saved(model):
    return {"model": model.state_dict(), "config": dataclasses.asdict(model.encoder.config)}


@pytest.mark.parametrize("pe", ["abs", "tupe_r", "tupe_a_free", "bert_ad", "rel", "lsin+rel"])
def test_warm_start_grows_the_tables(pe):
    """With a larger max_len the model does to short rows what it did, hidden positions included; new rows are fresh."""
    small, large = pretraining("pplm", pe, L=12), pretraining("pplm", pe, L=20)
    checkpoint = saved(small)
    done = model_module.warm_start(large, checkpoint, "run")
    assert done["new"] == done["dropped"] == []
    tokens, pos = packed_rows(), torch.arange(12).expand(6, 12).clone()
    pos[2:, 4:6] = UNKNOWN_POS
    torch.testing.assert_close(large.encoder(tokens, pos), small.encoder(tokens, pos), rtol=0, atol=1e-12)
    assert large.encoder(some_tokens(2, 20)).isfinite().all()
    a, b = (m.objectives["pplm"].pair_logits(m.encoder, m.encoder(tokens), pos) for m in (small, large))
    torch.testing.assert_close(b[..., 8:8 + 23], a, rtol=0, atol=1e-12)        # offset r: class r + 11, now r + 19
    untouched = pretraining("pplm", pe, L=20)
    for key in done["grown"]:
        assert (large.state_dict()[key] == untouched.state_dict()[key]).any(), f"{key}: new rows are as they were made"


def test_warm_start_swaps_the_scheme():
    old, new = pretraining("mlm", "abs"), pretraining("mlm", "abs+rel")
    torch.nn.init.normal_(old.encoder.pe.parts["abs"].table.weight)
    done = model_module.warm_start(new, saved(old), "run")
    assert done["new"] == ["encoder.pe.parts.rel.table.weight"] and done["dropped"] == done["grown"] == []
    assert all((new.state_dict()[key] == value).all() for key, value in old.state_dict().items())
    done = model_module.warm_start(pretraining("pplm", "t5"), saved(old), "run")
    assert "encoder.pe.parts.abs.table.weight" in done["dropped"] and "encoder.pe.parts.t5.table.weight" in done["new"]
    assert any(key.startswith("objectives.mlm") for key in done["dropped"])


@pytest.mark.parametrize("L", [12, 20])
def test_warm_start_with_other_classes(L):
    """A head of other classes starts fresh; nothing of it is copied to where it would mean something else."""
    for old, new in (({}, dict(pair_loss="smooth_l1")), (dict(pair_loss="smooth_l1"), {})):
        trained, fresh = pretraining("pplm", L=12, **old), pretraining("pplm", L=L, **new)
        before = {key: value.clone() for key, value in fresh.state_dict().items()}
        done = model_module.warm_start(fresh, saved(trained), "run")
        assert done["new"] == [f"objectives.pplm.head.psi.2.{kind}" for kind in ("weight", "bias")]
        assert all(torch.equal(fresh.state_dict()[key], before[key]) for key in done["new"])


def test_warm_start_refuses_other_shapes():
    small = pretraining("mlm", "abs", L=12)
    with pytest.raises(ValueError, match="would cut"):
        model_module.warm_start(
            pretraining("mlm", L=8, mask_rate=0.3), saved(small), "run"
        )
    other = Pretraining(
        Encoder(EncoderConfig(vocab_size=VOCAB, n_layer=1, n_head=2, d_model=16, d_ff=48, max_len=12)), ObjectiveConfig()
    )
    with pytest.raises(ValueError, match="d_ff is 32 there and 48 here"):
        model_module.warm_start(other, saved(small), "run")


def test_init_from_tells_what_it_did(corpus_file, cache, tmp_path, capsys):
    run_train(corpus_file, cache, tmp_path / "short", "--steps", "3", "--pe", "tupe_r")
    run_train(
        corpus_file,
        cache,
        tmp_path / "long",
        "--steps",
        "3",
        "--pe",
        "tupe_r",
        "--block_size",
        "24",
        "--init_from",
        str(tmp_path / "short"),
    )
    out = capsys.readouterr().out
    assert "1 tensors grown: encoder.pe.parts.tupe_r.positions.table.weight" in out and "0 tensors new" in out


# =========================================================================================================
# finetune.py

def test_metrics_equal_scikit_learn_and_scipy():
    """On random and on degenerate input: one class, constant scores, ties."""
    metrics, stats = pytest.importorskip("sklearn.metrics"), pytest.importorskip("scipy.stats")
    rng = np.random.default_rng(0)
    binary = [rng.integers(0, 2, 20) for _ in range(30)] + [np.zeros(20, int), np.ones(20, int)]
    for y, p in zip(binary + binary[-2:] * 2, binary[::-1] + binary[:4]):
        f1 = metrics.f1_score(y, p, zero_division=0)
        assert finetune.METRICS["cola"](y, p) == pytest.approx(
            {"matthews": metrics.matthews_corrcoef(y, p), "accuracy": metrics.accuracy_score(y, p)}, abs=1e-12)
        for task in ("mrpc", "qqp"):
            assert finetune.METRICS[task](y, p) == pytest.approx({"accuracy": metrics.accuracy_score(y, p), "f1": f1}, abs=1e-12)
    for task in ("sst2", "mnli", "qnli", "rte", "wnli", "ax", "docs"):
        assert finetune.METRICS[task](y, p) == {"accuracy": metrics.accuracy_score(y, p)}
    for spread in (1, 1e-150, 1e6):
        y, p = rng.integers(0, 6, 40) * spread, rng.normal(size=40).round(1)
        assert finetune.METRICS["stsb"](y, p) == pytest.approx(
            {"pearson": stats.pearsonr(y / spread, p)[0], "spearman": stats.spearmanr(y, p)[0]}, abs=1e-9)
    nothing = {"pearson": 0.0, "spearman": 0.0}
    assert finetune.METRICS["stsb"](y, [0.1] * 40) == finetune.METRICS["stsb"]([2.5] * 40, p) == nothing
    assert finetune.METRICS["stsb"](y, [math.nan] * 40) == nothing and set(finetune.METRICS) == set(finetune.TASKS)
    assert (finetune.ranks([3, 1, 3, 2]) == stats.rankdata([3, 1, 3, 2])).all()


def squad_by_hand(golds, text):
    """The official scoring, written anew: words without punctuation and articles, no answer counts as no words."""
    def words(s):
        kept = "".join(c for c in s.lower() if c not in "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~")
        return [w for w in re.split(r"\s+", re.sub(r"(?<!\w)(?:an?|the)(?!\w)", " ", kept)) if w]
    found = [words(g) for g in golds if words(g)] or [[]]
    mine, em, f1 = words(text), 0.0, 0.0
    for gold in found:
        em = max(em, float(gold == mine))
        left, same = list(gold), 0
        for word in mine:
            if word in left:
                left.remove(word)
                same += 1
        if not gold or not mine:
            f1 = max(f1, float(gold == mine))
        elif same:
            precision, recall = same / len(mine), same / len(gold)
            f1 = max(f1, 2 * precision * recall / (precision + recall))
    return em, f1


@pytest.mark.parametrize("golds, text, em, f1", [
    (["the cat"], "Cat!", 1, 1), (["an owl, a fox"], "owl fox", 1, 1), (["theatre"], "the atre", 0, 0), ([], "", 1, 1),
    ([], "x", 0, 0), (["a b c", "b"], "b", 1, 1), (["b c d"], "c", 0, 0.5), (["x"], "", 0, 0), (["The"], "", 1, 1),
    (["c c d"], "c d d", 0, 2 / 3), (["$5.00"], "500", 1, 1), (["area"], "are", 0, 0),
    (["Café  au\tlait"], "café au lait", 1, 1)])
def test_squad_metrics_on_edge_cases(golds, text, em, f1):
    assert finetune.METRICS["squad"]([golds], [text]) == pytest.approx({"em": em, "f1": f1})
    assert squad_by_hand(golds, text) == pytest.approx((em, f1))


ANSWER = st.lists(st.sampled_from("the|a|An|cat|Dog's|3.5|é|,|the-end|\u00a0|".split("|")), max_size=5).map(" ".join)


@given(pairs=st.lists(st.tuples(st.lists(ANSWER, max_size=3), ANSWER), min_size=1, max_size=5))
@settings(max_examples=150, deadline=None)
def test_squad_metrics_equal_an_independent_one(pairs):
    found = finetune.METRICS["squad_v2"]([golds for golds, _ in pairs], [text for _, text in pairs])
    em, f1 = np.mean([squad_by_hand(*pair) for pair in pairs], axis=0)
    assert found == pytest.approx({"em": em, "f1": f1})


# The official columns of each task's train.tsv and dev.tsv; MNLI's dev file has more labels.
OFFICIAL = {
    "cola": None, "sst2": "sentence label", "mrpc": "Quality|#1 ID|#2 ID|#1 String|#2 String", "stsb":
    "index genre filename year old_index source1 source2 sentence1 sentence2 score", "qqp":
    "id qid1 qid2 question1 question2 is_duplicate", "mnli": "index promptID pairID genre sentence1_binary_parse "
    "sentence2_binary_parse sentence1_parse sentence2_parse sentence1 sentence2 label1 gold_label", "qnli":
    "index question sentence label", "rte": "index sentence1 sentence2 label", "wnli": "index sentence1 sentence2 label",
}
# st.text without the characters that end a field or a row; some that str.splitlines would take for an end are made likely.
LINE = st.text(st.one_of(st.sampled_from('"\u2028\x85\x0b\x0c\x1c \'\\'), st.characters(
    blacklist_characters="\t\r\n\0", blacklist_categories=("Cs",))), max_size=12)


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
@given(draw=st.data(), bom=st.booleans(), end=st.sampled_from(["\n", "\r\n"]))
@settings(max_examples=25, deadline=None)
def test_readers_of_official_files(tmp_path_factory, name, draw, bom, end):
    task = finetune.TASKS[name]
    label = st.sampled_from(task.classes or ("0", "3.8", "5.000"))
    rows = draw.draw(st.lists(st.tuples(st.tuples(*[LINE] * len(task.texts)), label), min_size=1, max_size=4))
    file = tmp_path_factory.mktemp("glue") / "train.tsv"
    file.write_bytes(official_file(name, rows, end, bom))
    as_label = float if name == "stsb" else task.classes.index
    assert finetune.read_file(name, file, "train") == [(texts, as_label(label)) for texts, label in rows]
    # One tab too many or too few is noticed, with the line, wherever the row stands.
    wrong = draw.draw(st.integers(0, len(rows) - 1))
    lines = official_file(name, rows, end, bom).split(end.encode())
    line = wrong + (name != "cola")
    lines[line] = draw.draw(st.sampled_from([lines[line].rsplit(b"\t", 1)[0], lines[line] + b"\t"])) or b"\t\t"
    file.write_bytes(end.encode().join(lines))
    with pytest.raises(ValueError, match=f"train.tsv, line {line + 1}: .* columns, not"):
        finetune.read_file(name, file, "train")
    if len(rows) > 1:
        assert len(finetune.read_file(name, file, "train", skip_bad=True)) == len(rows) - 1


def test_readers_of_malformed_files(tmp_path, capsys):
    file = tmp_path / "train.tsv"
    for name, text, says in (
        ("rte", "index\tsentence1\tsentence2\tlabel\n0\ta\tb\tmaybe\n", "line 2: label 'maybe' is not one of entailment"),
        ("rte", "index\tsentence1\tlabel\n0\ta\tentailment\n", "no column sentence2, only index, sentence1, label"),
        ("rte", "", "has no rows"), ("rte", "index\tsentence1\tsentence2\tlabel\n", "has no rows"),
        ("rte", "\n", "no column sentence1"),
        ("sst2", "sentence\tlabel\nfine\t1\nbroken\rrow\t1\n", "line 3: 1 columns, not 2"),
        ("stsb", official_file("stsb", [(("a", "b"), "5.1")]).decode(), "line 2: score 5.1 is not in 0 .. 5"),
        ("stsb", official_file("stsb", [(("a", "b"), "nan")]).decode(), "score nan is not in 0 .. 5"),
        ("stsb", official_file("stsb", [(("a", "b"), "five")]).decode(), "line 2: .*'five'"),
        ("sst2", b"sentence\tlabel\n\xff\t1\n", "can't decode byte 0xff"),
    ):
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
        with pytest.raises(ValueError, match=says):
            finetune.read_file(name, file, "train")
    # QQP's known trouble: a question that goes on in the next line.
    rows = [((f"q{i}", "x" * 200_000), "1") for i in range(3)]
    file.write_bytes(official_file("qqp", rows).replace(b"q1\t", b'"q1\nmore"\t'))
    with pytest.raises(ValueError, match="line 3: 4 columns, not 6; --skip_bad_rows"):
        finetune.read_file("qqp", file, "train")
    assert [texts for texts, _ in finetune.read_file("qqp", file, "train", skip_bad=True)] == [rows[0][0], rows[2][0]]
    assert "2 malformed rows left out, the first: line 3" in capsys.readouterr().out


def finetune_args(*flags):
    return finetune.parse_args(["--task", "cola", *map(str, flags)])


def test_test_files_and_optional_ones(tmp_path, capsys):
    args = finetune_args("--data_dir", tmp_path)
    for name, header in (("cola", "index\tsentence"), ("mrpc", "index\t#1 ID\t#2 ID\t#1 String\t#2 String"),
                         ("qqp", "id\tquestion1\tquestion2"), ("ax", "index\tsentence1\tsentence2")):
        task = finetune.TASKS[name]
        (tmp_path / task.folder).mkdir()
        n = header.count("\t")
        lines = [header, *("\t".join([str(i), *["t"] * n]) for i in (0, 1, 7))]
        (tmp_path / task.folder / ("diagnostic.tsv" if name == "ax" else "test.tsv")).write_text("\n".join(lines))
        (key, rows), = finetune.read_split(name, args, "test").items()
        assert key == ("AX" if name == "ax" else task.folder) and rows == [(("t",) * len(task.texts), i) for i in (0, 1, 7)]
    (tmp_path / "MNLI").mkdir()
    for file in ("train.tsv", "dev_matched.tsv"):
        (tmp_path / "MNLI" / file).write_bytes(official_file("mnli", [(('A "b', "C"), "contradiction")]))
    assert finetune.read_task("mnli", args) == ([(('A "b', "C"), 2)], {"mnli": [(('A "b', "C"), 2)]})
    assert finetune.read_split("mnli", args, "test") == {}
    said = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in said] == ["mnli-mm", "MNLI-m", "MNLI-mm"] and "not there, left out" in said[0]
    (tmp_path / "MNLI" / "dev_matched.tsv").unlink()
    with pytest.raises(FileNotFoundError):
        finetune.read_task("mnli", args)


def test_hub_rows(monkeypatch):
    """Every task as the hub has it, labels as numbers in the order of `classes`."""
    import datasets
    asked = []

    def load_dataset(repo, config, split):
        asked.append((repo, config, split))
        if "squad" in repo:
            answers = {"text": ["b"], "answer_start": [2]} if split == "train" else {"text": [], "answer_start": []}
            return [{"id": "7", "title": "", "context": "a b", "question": "q", "answers": answers}]
        columns = finetune.TASKS[config].hub
        return datasets.Dataset.from_list([{**{c: c.upper() for c in columns}, "label": 1, "idx": 5}])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    for name in (*OFFICIAL, "squad", "squad_v2"):
        task, args = finetune.TASKS[name], finetune_args()
        train, evaluations = finetune.read_task(name, args)
        if task.kind == "span":
            assert train == [("7", "q", "a b", [("b", 2)])] and evaluations == {name: [("7", "q", "a b", [])]}
        else:
            assert train == evaluations[name] == [(tuple(c.upper() for c in task.hub), 1)]
            assert all(rows == [(train[0][0], 5)] for rows in finetune.read_split(name, args, "test").values())
    assert ("nyu-mll/glue", "mnli", "test_mismatched") in asked and ("nyu-mll/glue", "mnli", "validation_matched") in asked
    assert ("rajpurkar/squad_v2", None, "validation") in asked and ("nyu-mll/glue", "stsb", "test") in asked
    # The hub's order of classes, by its data cards.
    assert finetune.TASKS["mnli"].classes == finetune.TASKS["ax"].classes == ("entailment", "neutral", "contradiction")
    assert finetune.TASKS["qnli"].classes == finetune.TASKS["rte"].classes == ("entailment", "not_entailment")
    monkeypatch.setattr(datasets, "load_dataset", lambda *a, **k: 1 / 0)
    with pytest.raises(ValueError, match="--data_dir"):
        finetune.hub_rows("mnli", "train")


def squad_json(questions, version="1.1"):
    """[(id, question, context, answers)] -> SQuAD's JSON; no answers in v2: is_impossible."""
    return json.dumps({"version": version, "data": [{"title": "t", "paragraphs": [{"context": context, "qas": [
        {"id": i, "question": q, "answers": [{"text": text, "answer_start": start} for text, start in answers],
         **({"is_impossible": not answers, "plausible_answers": []} if version == "2.0" else {})}]}
        for i, q, context, answers in questions]}]})


def test_squad_files(tmp_path, capsys):
    questions = [finetune.Question("1", "who?", "It's Zoë.", [("Zoë", 5), ("Zoë.", 5)]),
                 finetune.Question("2", "no?", "a\u2028b", [])]
    (tmp_path / "squad").mkdir()
    for folder in (tmp_path / "squad", tmp_path):           # in a folder of their own, or directly
        for split in ("train", "dev"):
            (folder / f"{split}-v2.0.json").write_text(squad_json(questions, "2.0"), encoding="utf-8")
    for folder in (tmp_path, tmp_path / "squad"):
        assert finetune.read_task("squad_v2", finetune_args("--data_dir", folder)) in (
            (questions, {"squad_v2": questions}), (questions[::-1], {"squad_v2": questions}))
    file = tmp_path / "train-v1.1.json"
    for text, says in (("{", "not in SQuAD's format"), ("{}", "KeyError: 'data'"), ('{"data": 3}', "not in SQuAD"),
                       (squad_json([("1", "q", "a b", [("b", 1)])]), "question 1: its answer is not at its place.*--skip_bad")):
        file.write_text(text)
        with pytest.raises(ValueError, match=says):
            finetune.read_file("squad", file, "train")
    file.write_text(squad_json([("1", "q", "a b", [("b", 1)]), ("2", "q", "a b", [("b", 2)])]))
    assert [q.id for q in finetune.read_file("squad", file, "train", skip_bad=True)] == ["2"]
    assert "1 malformed rows left out" in capsys.readouterr().out


@pytest.fixture(scope="session")
def tokenizer(corpus):
    return tiktoken.Encoding(**data.encoding_arguments(corpus.tokenizer))


def test_encode_cuts_the_longest_first(tokenizer):
    cfg = EncoderConfig(vocab_size=8192)
    ids = finetune.encode(("the fox " * 30, "a dog"), tokenizer, cfg, 20)
    short = tokenizer.encode_ordinary("a dog")
    assert len(ids) == 20 and ids[0] == cfg.cls_id and ids[-1] == cfg.sep_id and ids[-1 - len(short):-1] == short
    assert ids.count(cfg.sep_id) == 2
    swapped = finetune.encode(("a dog", "the fox " * 30), tokenizer, cfg, 20)
    assert len(swapped) == 20 and swapped[1:1 + len(short)] == short, "whichever of the two is longer"
    assert finetune.encode(("the fox",), tokenizer, cfg, 20) == [cfg.cls_id, *tokenizer.encode_ordinary("the fox"), cfg.sep_id]
    assert cfg.mask_id in finetune.encode(("a [MASK] b [SEP]",), tokenizer, cfg, 30)


TEXT = st.text(st.one_of(st.sampled_from("the fox é漢😀\n"), st.characters(blacklist_categories=("Cs",))), max_size=60)


@given(text=TEXT)
@settings(max_examples=150, deadline=None)
def test_token_spans_cover_the_text(tokenizer, text):
    """Spans go from the first character to the last without a gap, and hold what their tokens decode to."""
    ids, spans = finetune.token_spans(tokenizer, text)
    pieces = tokenizer.decode_tokens_bytes(ids)
    assert len(ids) == len(spans) and b"".join(pieces) == text.encode()
    assert all(piece in text[a:b].encode() for piece, (a, b) in zip(pieces, spans.tolist()))
    assert [text[a] for a, _ in spans[:1]] + [text[b - 1] for _, b in spans[-1:]] == ([text[0], text[-1]] if text else [])
    assert all(b - 1 <= c <= b for (_, b), (c, _) in zip(spans.tolist(), spans.tolist()[1:]))


@given(context=TEXT, question=TEXT, length=st.integers(16, 40), cut=st.tuples(st.floats(0, 1), st.floats(0, 1)))
@settings(max_examples=150, deadline=None)
def test_squad_windows(tokenizer, context, question, length, cut):
    """Windows cover every token in steps of a third; a labelled span holds the answer, and is it where tokens' borders allow."""
    a, b = sorted(round(x * len(context)) for x in cut)
    cfg, answers = EncoderConfig(vocab_size=8192), [(context[a:b], a)] if a < b else []
    q = finetune.Question("1", question, context, answers)
    ids, spans = finetune.token_spans(tokenizer, context)
    found = finetune.windows(3, q, tokenizer, cfg, length)
    room = length - found[0][1].offset - 1
    starts = [k * min(length // 3, room) for k in range(len(found))]
    for ((row, (first, last)), window), start in zip(found, starts):
        part = ids[start:start + room]
        assert row[window.offset - 1:] == [cfg.sep_id, *part, cfg.sep_id] and row[0] == cfg.cls_id and len(row) <= length
        assert (window.spans == spans[start:start + room]).all() and len(part) == len(window.spans) and window.question == 3
        inside = [i for i, (x, y) in enumerate(spans.tolist()) if y > a and x < b] if answers else []
        whole = bool(inside) and start <= inside[0] and inside[-1] < start + len(part)
        assert (first, last) == ((inside[0] - start + window.offset, inside[-1] - start + window.offset) if whole else (0, 0))
        if whole:
            x, y = window.spans[first - window.offset][0], window.spans[last - window.offset][1]
            assert x <= a and b <= y
            if not any(p < edge < q for p, q in spans.tolist() for edge in (a, b)):
                assert context[x:y] == context[a:b]
    assert [start + room >= len(ids) for start in starts] == [False] * (len(starts) - 1) + [True], "to the end, and no further"


def test_answers_are_cut_from_the_context(tokenizer):
    """A perfect model's spans give the very answer, spaces aside, although a token brings its space along."""
    context = "In Zürich the “quick” brown fox — 狐 — jumps, 50% of the time."
    for text in ("Zürich", "the “quick”", "狐", "50%", "jumps", "brown fox"):
        q = finetune.Question("1", "who", context, [(text, context.index(text))])
        ((row, (first, last)), window), *_ = finetune.windows(0, q, tokenizer, EncoderConfig(vocab_size=8192), 200)
        out = np.full((2, len(row)), -5.0, np.float32)
        out[0, first] = out[1, last] = 5.0
        encoded = finetune.Encoded([(row, 0)], [[text]], [window])
        (best, null), = finetune.candidates([out], encoded)
        assert (best[0] == (10.0, text) or best[0][1].strip("“”%,") == text.strip("“”%,")) and null == -10.0
        assert len(best) == finetune.N_BEST and best == sorted(best, key=lambda pair: -pair[0])


@given(n=st.integers(0, 12), longest=st.integers(1, 6), seed=st.integers(0, 1000))
@settings(max_examples=60, deadline=None)
def test_n_best_equals_a_loop(n, longest, seed):
    first, last = np.random.default_rng(seed).normal(size=(2, n))
    every = sorted(((first[i] + last[j], i, j) for i in range(n) for j in range(i, min(n, i + longest))), reverse=True)
    assert finetune.n_best(first, last, 5, longest) == [pytest.approx(one) for one in every[:5]]


def test_no_answer_by_the_lowest_null_score(monkeypatch):
    """Two windows: the null score is the lower one; v2 gives no text where it is above the best by more than the threshold."""
    model = finetune.Classifier(tiny(), "squad_v2", 16)
    spans = np.array([[0, 1], [1, 2]])
    encoded = finetune.Encoded([], [[]], [finetune.Window(0, "ab", spans, 1), finetune.Window(0, "ab", spans, 1)])
    outs = [np.array([[4, 1, 0, 0], [4, 1, 0, 0]], np.float32), np.array([[2, 0, 0, 9], [2, 0, 0, 9]], np.float32)]
    monkeypatch.setattr(finetune, "outputs", lambda *args: outs)
    assert finetune.predict(model, encoded, None, 0.0) == [""] and finetune.predict(model, encoded, None, 1.9) == [""]
    assert finetune.predict(model, encoded, None, 2.0) == ["a"]
    model.name = "squad"
    assert finetune.predict(model, encoded, None, 0.0) == ["a"], "v1 always answers, and never with what is not context"


def test_batches_take_every_row_once_and_near_lengths():
    rows = [([0] * n, 0) for n in np.random.default_rng(0).integers(1, 100, 500)]
    for rng in (None, np.random.default_rng(1)):
        groups = list(finetune.batches(rows, 32, rng))
        assert sorted(i for g in groups for i in g) == list(range(500))
        padding = sum(max(len(rows[i][0]) for i in g) * len(g) - sum(len(rows[i][0]) for i in g) for g in groups)
        assert padding < 0.15 * sum(len(ids) for ids, _ in rows)


@pytest.mark.parametrize("name", ["mnli", "stsb", "squad"])
def test_padding_changes_no_output_and_no_loss(name):
    model = finetune.Classifier(tiny("tupe_r"), name, 12).eval().double()
    rows = [([64, 1, 2, 3, 66], 1.5), ([64, 5, 66], 2.5)]
    if name != "stsb":
        rows = [(ids, (1, 2) if name == "squad" else int(y)) for ids, y in rows]
    tokens, pad, labels = finetune.collate(rows, 65, torch.device("cpu"))
    assert tokens.tolist() == [[64, 1, 2, 3, 66], [64, 5, 66, 65, 65]] and pad.tolist() == [[False] * 5, [False] * 3 + [True] * 2]
    together, alone = model(tokens, pad), [finetune.collate([row], 65, torch.device("cpu")) for row in rows]
    for row, (ids, none, _) in zip(together, alone):
        assert none is None
        torch.testing.assert_close(row[..., :ids.size(1)] if name == "squad" else row, model(ids, None)[0])
    losses = [model.loss(*one) for one in alone]
    torch.testing.assert_close(model.loss(tokens, pad, labels), sum(losses) / 2)
    out = model(tokens, pad)
    by_hand = {"stsb": lambda: ((out - labels) ** 2).mean(), "mnli": lambda: -out.log_softmax(-1)[[0, 1], labels].mean(),
               "squad": lambda: -out.log_softmax(-1)[[[0, 0], [1, 1]], [[0, 1]] * 2, labels].mean()}[name]()
    torch.testing.assert_close(model.loss(tokens, pad, labels), by_hand.to(torch.float32))


def test_recipes_are_the_papers_tables():
    wide, narrow = {"d_model": 512, "max_len": 512}, {"d_model": 256, "max_len": 128}

    def row(recipe, name, cfg=wide, *flags):
        s = finetune.settings(finetune_args("--recipe", recipe, *flags), name, cfg)
        return s.epochs, s.lr, s.batch_size, s.warmup, s.weight_decay, s.eps, s.length, s.layer_decay

    assert row("electra", "mnli") == (3, [1e-4], 32, .1, 0, 1e-6, 128, .8) and row("electra", "rte")[0] == 10
    assert row("electra", "stsb", narrow)[:2] == (10, [3e-4]) and row("electra", "squad")[0::6] == (2, 512)
    assert row("tupe", "qnli") == (5, [2e-5, 3e-5, 4e-5, 5e-5], 32, .06, .01, 1e-6, 512, 1) and row("tupe", "sst2")[0] == 10
    assert row("taco", "mnli") == (6, [5e-5], 64, 2000, 0, 1e-8, 128, 1) and row("taco", "qqp")[:4] == (6, [5e-5], 64, 2000)
    assert all(row("taco", name)[0:4] == (4, [5e-5], 64, 200) for name in ("qnli", "sst2"))
    assert all(row("taco", name)[0:4] == (4, [5e-5], 32, 100) for name in ("cola", "stsb", "mrpc", "rte"))
    assert row("bert", "qqp") == (3, [2e-5], 32, 0, 0, 1e-8, 128, 1) and row("bert", "squad_v2")[1::5] == ([3e-5], 384)
    assert row("tupe", "cola", narrow)[6] == 128, "no longer than max_len"
    assert row("tupe", "cola", narrow, "--length", 300, "--lr", 1, 2, "--epochs", 7)[::6] == (7, 300)
    assert all(row(recipe, "docs")[0] == 10 for recipe in finetune.RECIPES)
    assert [(r["aggregate"], r["seeds"]) for r in finetune.RECIPES.values()] == [
        ("median", 10), ("median", 5), ("mean", 4), ("mean", 5)]


def test_finetuning_schedule():
    of = lambda *args: [round(finetune.schedule(step, 10, *args), 4) for step in range(10)]         # noqa: E731
    assert of(4) == of(0.4) == [0.25, 0.5, 0.75, 1.0, 1.0, 0.8333, 0.6667, 0.5, 0.3333, 0.1667]
    assert of(0) == [1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1]
    assert of(20) == [round((step + 1) / 20, 4) for step in range(10)], "a warm-up that the run does not reach the end of"


def test_layer_wise_decay_and_weight_decay():
    for pe in ("tupe_r", "rel_k", "abs"):
        model = finetune.Classifier(tiny(pe), "mnli", 12)
        groups = finetune.param_groups(model, 1.0, 0.5, 0.01)
        found = {id(p): (g["peak"], g["weight_decay"]) for g in groups for p in g["params"]}
        assert sum(len(g["params"]) for g in groups) == len(found) == len(list(model.parameters()))
        for name, p in model.named_parameters():
            peak = 1.0 if name.startswith("head") else 0.25 if ".0." in name else 0.5 if ".1." in name else 0.125
            assert found[id(p)] == (peak, 0.01 if p.dim() >= 2 else 0.0), name
    assert {g["peak"] for g in finetune.param_groups(model, 2.0, 1.0, 0)} == {2.0}
    probe = finetune.Classifier(tiny(), "mnli", 12, probe=True)
    assert probe.train().head.training and not probe.encoder.training, "a frozen encoder has no dropout"
    learned = {id(p) for g in finetune.param_groups(probe, 1, .8, 0) for p in g["params"]}
    assert learned == {id(probe.head[-1].weight), id(probe.head[-1].bias)}


def test_averages_of_the_papers():
    """The papers' own rows give the papers' own averages."""
    order = ["mnli", "mnli-mm", "qnli", "qqp", "sst2", "cola", "mrpc", "rte", "stsb"]
    rows = {"P1": ((84.77, 84.95, 91.78, 90.99, 92.75, 56.77, 87.90, 71.70, 89.60), 83.47),        # table 2, BERT-A
            "P2": ((77.9, 78.4, 86.5, 86.1, 88.9, 34.2, 88.1, 59.5, 86.1), 76.2),                  # table 1, TACO-250k
            "P3": ((None, 84.8, 88.7, 87.8, 93.0, 60.2, 89.4, 65.1, 88.6), 82.2)}                  # table 3, learned APE
    for paper, (values, mean) in rows.items():
        measures = finetune.AVERAGES[paper]
        scores = {(name, measures[name]): value for name, value in zip(order, values) if name in measures}
        assert len(scores) == (8 if paper == "P3" else 9) and abs(finetune.paper_averages(scores)[paper] - mean) < 0.051
        del scores["rte", "accuracy"]
        assert finetune.paper_averages(scores)[paper] == ["rte"]
    assert finetune.AVERAGES["P1"]["stsb"] == "pearson" and finetune.AVERAGES["P2"]["mrpc"] == "f1"


def test_the_best_learning_rate_counts():
    runs = [dict(ckpt="a", task="cola", lr=lr, seed=seed, metrics={"matthews": m, "accuracy": -m})
            for lr, values in ((1, (.1, .2, .9)), (2, (.3, .3, .4))) for seed, m in enumerate(values)]
    assert finetune.aggregate(runs, "tupe") == {("a", "cola", "matthews"): (.3, [.3, .3, .4], runs[3:]),
                                                ("a", "cola", "accuracy"): (-.3, [-.3, -.3, -.4], runs[3:])}
    assert finetune.aggregate(runs, "taco")["a", "cola", "matthews"][0] == pytest.approx(0.4), "by their means the first is best"


@pytest.fixture(scope="session")
def small_run(corpus_file, cache, tmp_path_factory):
    """A run of 32 tokens a row with kept checkpoints, and official files of tasks that one word decides."""
    home = tmp_path_factory.mktemp("finetune")
    run_train(corpus_file, cache, home / "out" / "run", "--steps", "6", "--keep_every", "2", "--block_size", "32")
    rng = random.Random(0)
    for name in ("cola", "mnli", "stsb"):
        task = finetune.TASKS[name]
        (home / "glue" / task.folder).mkdir(parents=True)
        classes = task.classes[:2] or ("0.5", "4.5")
        for file, n in {"train.tsv": 320, "dev.tsv": 60, "dev_matched.tsv": 60, "dev_mismatched.tsv": 30}.items():
            rows = []
            for c in rng.choices((0, 1), (1, 2), k=n):
                texts = [" ".join(rng.choices(WORDS[:8], k=4) + [("owls", "seven")[c]]) for _ in task.texts]
                rows.append((texts, classes[c]))
            (home / "glue" / task.folder / file).write_bytes(official_file(name, rows))
    tests = (("CoLA", "test.tsv", 1), ("MNLI", "test_matched.tsv", 2), ("diagnostic", "diagnostic.tsv", 2),
             ("STS-B", "test.tsv", 2))
    for folder, file, n in tests:
        (home / "glue" / folder).mkdir(exist_ok=True)
        lines = ["index\t" + "\t".join(("sentence",) if n == 1 else ("sentence1", "sentence2"))]
        lines += ["\t".join([str(i), *["the quick owls"] * n]) for i in range(5)]
        (home / "glue" / folder / file).write_text("\n".join(lines) + "\n")
    for version in ("1.1", "2.0"):
        questions = []
        for i in range(24):
            words = rng.choices(WORDS[:8], k=40)
            words[rng.randrange(40)] = "owls"
            context = " ".join(words)
            questions.append((str(i), "who", context, [("owls", context.index("owls"))] if i % 3 or version == "1.1" else []))
        for split in ("train", "dev"):
            (home / "glue" / f"{split}-v{version}.json").write_text(squad_json(questions, version))
    return home


@pytest.fixture
def at_run(small_run, monkeypatch):
    monkeypatch.chdir(small_run)
    return small_run


def run_finetune(out, *flags):
    """-> the rows that this call has written."""
    finetune.main(["--out_dir", str(out), "--device", "cpu", "--dtype", "float32", *map(str, flags)])
    file = Path(out) / "results.jsonl"
    rows = [json.loads(line) for line in open(file)] if file.exists() else []
    file.unlink(missing_ok=True)
    return rows


LEARN = ["--data_dir", "glue", "--lr", "0.01", "--epochs", "8"]


def test_finetune_learns_saves_and_repeats(at_run, tmp_path, capsys):
    """A task that a word decides: learned; the best of the runs is saved; it scores the same again, exactly."""
    rows = run_finetune(tmp_path, "--task", "cola", *LEARN, "--lr", 0.01, 1e-7, "--seeds", 2, "--predict")
    assert [(r["lr"], r["seed"]) for r in rows] == [(0.01, 0), (0.01, 1), (1e-7, 0), (1e-7, 1)]
    assert {"task", "seed", "lr", "metrics", "majority", "ckpt", "seconds", "recipe", "epochs", "n_train"} <= rows[0].keys()
    assert all(r["metrics"]["accuracy"] > 0.9 > r["majority"] > 0.5 for r in rows[:2]) and rows[2]["one_class"]
    assert rows[0]["constant"] == {"matthews": 0.0, "accuracy": rows[0]["majority"]} and rows[0]["ckpt"] == "out/run"
    out = capsys.readouterr().out
    assert "median" in out and "collapsed: 2 of 4" in out and "the best of 2" in out and "   0.01      2" in out
    lines = (tmp_path / "CoLA.tsv").read_bytes().decode().split("\n")
    assert lines[0] == "index\tprediction" and [line.split("\t")[0] for line in lines[1:-1]] == list("01234") and len(lines) == 7
    assert {line.split("\t")[1] for line in lines[1:-1]} == {"0"}, "owls are class 0"
    again, = run_finetune(tmp_path, "--task", "cola", "--data_dir", "glue", "--eval_only")
    assert again["metrics"] == max((r["metrics"] for r in rows), key=lambda m: m["matthews"]) and again["eval_only"]
    finetune.main(["--task", "cola", "--ckpt", str(tmp_path / "finetuned-cola.pt"), "--predict_text", "the owls"])
    shown = [line.split("  ") for line in capsys.readouterr().out.splitlines()[-2:]]
    assert [name for _, name in shown] == ["0", "1"] and abs(sum(float(p) for p, _ in shown) - 1) < 1e-3
    assert load(tmp_path / "finetuned-cola.pt").config.max_len == 32, "its encoder is a checkpoint like any other"


def test_finetune_all_of_glue(at_run, tmp_path, capsys):
    """--task all takes what is there, MNLI's model predicts AX, files are as GLUE wants them."""
    rows = run_finetune(tmp_path, "--task", "all", *LEARN, "--predict", "--recipe", "bert", "--ckpt", "scratch", "--lr", 0.006,
                        "--epochs", 16)
    assert [r["task"] for r in rows] == ["cola", "stsb", "mnli", "mnli-mm"]
    assert rows[1]["metrics"]["pearson"] > 0.5 and rows[1]["majority"] == 0
    assert rows[0]["ckpt"] == f"scratch, shaped like {Path('out/run')}"
    out = capsys.readouterr().out
    assert "P3's average: not without sst2, qnli, rte, qqp, mrpc" in out and "MNLI-mm: " in out
    for name, classes in (("CoLA", {"0", "1"}), ("MNLI-m", set(finetune.NLI)), ("AX", set(finetune.NLI)), ("STS-B", None)):
        header, *lines = (tmp_path / f"{name}.tsv").read_text().splitlines()
        assert header == "index\tprediction" and [line.split("\t")[0] for line in lines] == list("01234")
        values = {line.split("\t")[1] for line in lines}
        assert values <= classes if classes else all(0 <= float(v) <= 5 for v in values)
    assert not (tmp_path / "MNLI-mm.tsv").exists() and not (tmp_path / "SST-2.tsv").exists()
    (tmp_path / "AX.tsv").unlink()
    assert run_finetune(tmp_path, "--task", "ax", "--data_dir", "glue", "--ckpt", tmp_path) == []
    assert len((tmp_path / "AX.tsv").read_text().splitlines()) == 6
    # The MNLI model's encoder under a fresh head of another task, and its own head on its own task.
    start = finetune.read_start(str(tmp_path / "finetuned-mnli.pt"), "")
    assert start["source"].endswith("(mnli)")
    other, same = (finetune.make_model(start, name, 32, 0).state_dict() for name in ("rte", "mnli"))
    for key, value in start["model"].items():
        assert torch.equal(same[key], value) and (torch.equal(other[key], value) or key.startswith("head."))
    assert not torch.equal(other["head.1.weight"], same["head.1.weight"])


def test_scores_are_clipped_in_the_submission_file(at_run, tmp_path, monkeypatch):
    model = finetune.Classifier(tiny(), "stsb", 16)
    monkeypatch.setattr(finetune, "encode_rows", lambda *args: None)
    monkeypatch.setattr(finetune, "predict", lambda *args: [-0.2, 5.1, 2.34567, 0.0, 5.0])
    finetune.write_predictions("stsb", model, finetune_args("--data_dir", "glue"), None, tmp_path)
    assert [line.split("\t")[1] for line in (tmp_path / "STS-B.tsv").read_text().splitlines()[1:]] == [
        "0.000", "5.000", "2.346", "0.000", "5.000"]


def test_finetune_squad(at_run, tmp_path, capsys):
    """v1.1 in rows too short for the context, so in windows; v2.0 with a length beyond max_len."""
    first, = run_finetune(tmp_path, "--task", "squad", *LEARN, "--predict")
    assert first["metrics"]["f1"] >= first["metrics"]["em"] and first["metrics"]["f1"] > 0.3 and first["majority"] == 0
    answers = json.loads((tmp_path / "squad.json").read_text())
    assert list(answers) == [str(i) for i in range(24)] and all(answers.values())
    golds = [[text for text, _ in q.answers] for q in finetune.read_squad("glue/dev-v1.1.json")[0]]
    assert finetune.METRICS["squad"](golds, list(answers.values())) == first["metrics"]
    second, = run_finetune(tmp_path, "--task", "squad_v2", *LEARN, "--epochs", 1, "--length", 60, "--null_threshold", -1e9)
    assert second["metrics"] == second["constant"] and second["majority"] == pytest.approx(8 / 24) and second["one_class"]
    assert "length 60 (position tables extended from 32)" in capsys.readouterr().out
    assert load(tmp_path / "finetuned-squad_v2.pt").config.max_len == 60
    run_finetune(tmp_path, "--task", "squad", "--predict_text", "who ||| the quick brown owls jump over")
    assert "owls" in capsys.readouterr().out.splitlines()[1]
    run_finetune(tmp_path, "--task", "squad_v2", "--predict_text", "who ||| a")
    shown = [line.split("  ") for line in capsys.readouterr().out.splitlines()[1:]]
    assert sorted(text for _, text in shown) == ["(no answer)", "a"] and abs(sum(float(p) for p, _ in shown) - 1) < 1e-3
    again, = run_finetune(tmp_path, "--task", "squad_v2", "--data_dir", "glue", "--eval_only", "--null_threshold", -1e9)
    assert again["metrics"] == second["metrics"]


def test_freeze_encoder_and_length(at_run, tmp_path):
    """A probe leaves every weight of the encoder as it is; --length beyond max_len keeps the trained rows of the table."""
    before = finetune.read_checkpoint("out/run")["model"]
    run_finetune(tmp_path, "--task", "mnli", *LEARN, "--epochs", 1, "--freeze_encoder")
    saved = finetune.read_checkpoint(tmp_path / "finetuned-mnli.pt")
    encoder = {key: value for key, value in saved["model"].items() if key.startswith("encoder.")}
    assert encoder and all(torch.equal(value, before[key]) for key, value in encoder.items())
    assert sorted(set(saved["model"]) - set(encoder)) == ["head.1.bias", "head.1.weight"] and saved["probe"]
    assert len(run_finetune(tmp_path, "--task", "mnli", "--data_dir", "glue", "--eval_only")) == 2
    model = finetune.make_model(finetune.read_start("out/run", ""), "mnli", 50, 0)
    table, old = model.encoder.pe.parts["abs"].table.weight, before["encoder.pe.parts.abs.table.weight"]
    assert len(table) == 51 and len(old) == 33 and torch.equal(table[:32], old[:32]) and torch.equal(table[50], old[32])


def test_every_kept_checkpoint_is_scored_in_order(at_run, tmp_path, capsys):
    rows = run_finetune(tmp_path, "--task", "cola", *LEARN, "--epochs", 1, "--limit_train", 20, "--ckpt", "out/run/ckpt_*.pt")
    assert [(r["step"], r["ckpt"], r["n_train"]) for r in rows] == [
        (s, os.path.join("out/run", f"ckpt_{s}.pt"), 20) for s in (2, 4, 6)]
    args = finetune_args("--ckpt", "out/*/ckpt_*.pt")
    assert finetune.home(args) == "out" and len(finetune.find_sources("cola", args)) == 3
    assert finetune.home(finetune_args("--ckpt", "out/run/ckpt_*.pt")) == "out/run" == finetune.home(finetune_args())


def test_the_newest_run_is_looked_up_once(at_run, tmp_path, monkeypatch):
    """Another run may save while this one goes through its tasks."""
    seen = []
    monkeypatch.setattr(finetune, "run_tasks", lambda args, *_: seen.append(args.ckpt))
    finetune.main(["--task", "all", "--device", "cpu", "--out_dir", str(tmp_path)])
    assert seen == [finetune.newest_run()]


def test_ax_takes_the_model_of_out_dir(at_run, tmp_path, monkeypatch):
    """And an average with --eval_only is over one folder's models."""
    seen = []
    monkeypatch.setattr(finetune, "run_tasks", lambda args, *_: seen.append(args.ckpt))
    finetune.main(["--task", "ax", "--device", "cpu", "--out_dir", str(tmp_path)])
    args = finetune_args("--out_dir", tmp_path)
    args.ckpt, args.task, args.eval_only = *seen, "ax", True
    assert finetune.find_sources("mnli", args) == [str(tmp_path / "finetuned-mnli.pt")]


def test_averages_of_eval_only_are_over_a_folder(capsys):
    args = SimpleNamespace(recipe="electra", task="all", eval_only=True)
    rows = [{"task": task, "ckpt": f"out/finetuned-{task}.pt ({task})", "lr": 1e-4, "seconds": 1.0, "one_class": False,
             "metrics": {metric: .5}, "constant": {metric: 0.0}} for task, metric in finetune.AVERAGES["P3"].items()]
    finetune.report(rows, args)
    assert re.search(r"P3's average: 0.5000 +out\n", capsys.readouterr().out)


def test_a_full_disk_under_fine_tuning_is_one_line(at_run, tmp_path, monkeypatch, capsys):
    def full(*args, **kwargs):
        raise RuntimeError("unexpected pos 1152 vs 1046")           # torch's words
    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(SystemExit) as stopped:
        run_finetune(tmp_path, "--task", "cola", *LEARN, "--limit_train", 20, "--epochs", 1)
    assert stopped.value.code == 1 and "cannot be written" in capsys.readouterr().err
    assert not list(tmp_path.glob("*.tmp"))


def test_missing_weights_are_not_made_up(at_run):
    start = finetune.read_start("out/run", "")
    del start["model"]["encoder.blocks.0.fc1.weight"]
    with pytest.raises(ValueError, match="missing encoder.blocks.0.fc1.weight"):
        finetune.make_model(start, "cola", 32, 0)


def test_compiled_finetuning_agrees_with_eager(at_run, tmp_path, monkeypatch):
    """The flag compiles, once for all lengths. (The tracer alone: code generation is tested in train.py's section.)"""
    seen, compiled = [], torch.nn.Module.compile
    monkeypatch.setattr(finetune, "can_compile", lambda device: True)
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **kw: (seen.append(kw), compiled(self, backend="eager", **kw)))
    flags = ["--task", "cola", *LEARN, "--epochs", 1, "--limit_train", 40]
    (a,), (b,) = run_finetune(tmp_path, *flags), run_finetune(tmp_path, *flags, "--compile")
    assert a["metrics"] == b["metrics"] and seen == [{"dynamic": True}]


def test_finetuning_clips_the_gradient_of_every_step(at_run, tmp_path, monkeypatch):
    norms, clip = [], torch.nn.utils.clip_grad_norm_
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", lambda params, norm: norms.append((len(list(params)), norm)) or clip(
        [torch.zeros(1, requires_grad=True)], norm))
    run_finetune(tmp_path, "--task", "cola", *LEARN, "--epochs", 2, "--limit_train", 40)
    model = finetune.make_model(finetune.read_start("out/run", ""), "cola", 32, 0)
    assert norms == [(len(list(model.parameters())), 1.0)] * 4


def test_finetuning_stops_cleanly(at_run, tmp_path, monkeypatch, capsys):
    """A loss that is not finite: exit 1 and nothing saved. Ctrl-C: one line and 130."""
    with pytest.raises(SystemExit) as stopped:
        run_finetune(tmp_path, "--task", "stsb", *LEARN, "--lr", "1e30")
    assert stopped.value.code == 1 and "not finite" in capsys.readouterr().err and not (tmp_path / "finetuned-stsb.pt").exists()

    def interrupted(*args):
        raise KeyboardInterrupt
    monkeypatch.setattr(finetune, "schedule", interrupted)
    with pytest.raises(SystemExit) as stopped:
        run_finetune(tmp_path, "--task", "stsb", *LEARN)
    assert stopped.value.code == 130 and "interrupted" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--eval_only", "--predict_text=a ||| b"])
def test_scratch_has_nothing_to_evaluate(flag, capsys):
    with pytest.raises(SystemExit) as stopped:
        finetune.parse_args(["--task", "rte", "--ckpt", "scratch", flag])
    assert stopped.value.code == 2 and "untrained" in capsys.readouterr().err


def test_bag_of_words(at_run, tmp_path):
    pytest.importorskip("sklearn")
    row, = run_finetune(tmp_path, "--task", "cola", "--data_dir", "glue", "--ckpt", "bow")
    assert row["metrics"]["accuracy"] == 1 and row["ckpt"] == "bow"


def test_finetune_mistakes(at_run, tmp_path, capsys):
    (tmp_path / "CoLA").mkdir()
    (tmp_path / "CoLA" / "train.tsv").write_text("")
    (tmp_path / "finetuned-mnli.pt").write_bytes((at_run / "out" / "run" / "ckpt.pt").read_bytes())
    cola = ["--task", "cola", "--data_dir", "glue"]
    for flags, says in (
        (["--task", "foo"], "docs"), (["--task", "cola", "--data_dir", "nowhere"], "nowhere"),
        (["--task", "cola", "--data_dir", str(tmp_path)], "has no rows"), ([*cola, "--length", "2"], "--length"),
        (["--task", "squad", "--data_dir", "glue", "--length", "12"], "SQuAD 16"), ([*cola, "--lr", "1", "0"], "--lr"),
        ([*cola, "--ckpt", "nowhere"], "no checkpoint at"), ([*cola, "--ckpt", "out/run/x*.pt"], "no file matches"),
        ([*cola, "--eval_only"], "no checkpoint at"),
        (["--task", "mnli", "--ckpt", str(tmp_path), "--predict_text", "a ||| b"], "no model fine-tuned on mnli"),
        (["--task", "cola", "--predict_text", "a ||| b"], "takes 1 text(s)"), (["--task", "all", "--ckpt", "bow"], "one task"),
        (["--task", "squad", "--ckpt", "bow"], "classes"), (["--task", "ax", "--predict_text", "a"], "for ax: mnli"),
        ([*cola, "--seeds", "0"], "--seeds"), (["--task", "docs", "--predict"], "no test rows"),
    ):
        with pytest.raises(SystemExit) as stopped:
            finetune.main([*flags, "--device", "cpu"])
        captured = capsys.readouterr()
        assert stopped.value.code == 2 and says in captured.err and captured.err.count("\n") == 1, flags


# =========================================================================================================
# probe.py

def appendix_b(A, first=None):
    """P3's indicators from the text of its appendix B, element by element -> AIV, OPR, ties, SD."""
    L = len(A)
    values = [A[i, j] for i in range(L) for j in range(L)]
    variance = lambda xs: sum((x - sum(xs) / len(xs)) ** 2 for x in xs) / len(xs)       # noqa: E731
    groups = [[A[i, i + r] for i in range(L) if 0 <= i + r < L] for r in range(-L + 1, L)]
    within = sum(variance(g) * len(g) for g in groups) / sum(len(g) for g in groups)
    sequences = [[A[i, j] for j in range(i, L)] for i in range(L)] + [[A[i, j] for j in range(i, -1, -1)] for i in range(L)]
    wrong, tied, weight = 0, 0, 0
    for s in sequences:
        s = s[:first] if first else s
        pairs = [(s[a], s[b]) for a in range(len(s)) for b in range(a + 1, len(s))]
        if pairs:
            wrong += len(s) * sum(far > near for near, far in pairs) / len(pairs)
            tied += len(s) * sum(far == near for near, far in pairs) / len(pairs)
            weight += len(s)
    pairs = [abs(A[i, j] - A[j, i]) for i in range(L) for j in range(i + 1, L)]
    return within / variance(values), wrong / weight, tied / weight, sum(pairs) / len(pairs)


def balance(A, reach):
    lower = sum(A[i, j] for i in range(len(A)) for j in range(len(A)) if i > j and i - j <= reach)
    return lower / sum(A[i, j] for i in range(len(A)) for j in range(len(A)) if i < j and j - i <= reach)


@pytest.mark.parametrize("L, first", [(2, None), (5, None), (9, 4), (13, None), (26, 20)])
def test_indicators_equal_loops(L, first):
    rng = np.random.default_rng(L)
    for A in (rng.random((L, L)), rng.integers(1, 4, (L, L)).astype(float)):            # the second has many ties
        expected_aiv, expected_opr, ties, expected_sd = appendix_b(A, first)
        found = [probe.aiv(A), probe.opr(A, first), probe.tie_rate(A, first), probe.sd(A), probe.db(A), probe.db(A, l=3)]
        assert all(type(x) is float for x in found)
        assert found == pytest.approx([expected_aiv, expected_opr, ties, expected_sd, balance(A, 20), balance(A, 3)], abs=1e-12)


def test_indicators_of_known_maps():
    L = 11
    r = np.arange(L)[None, :] - np.arange(L)[:, None]
    toeplitz = np.random.default_rng(0).random(2 * L)[r]
    assert probe.aiv(toeplitz) < 1e-15 < probe.aiv(toeplitz + np.eye(L, k=2) * np.arange(L))
    near, far = np.exp(-abs(r) / 3), np.exp(abs(r) / 3)
    assert (probe.opr(near), probe.opr(far), probe.opr(near, 4), probe.tie_rate(near)) == (0, 1, 0, 0)
    assert probe.sd(near) == 0 and probe.db(near) == pytest.approx(1)
    assert probe.db(np.tril(near)) == math.inf and probe.db(np.triu(near)) == 0
    assert probe.db(1.0 + 3 * (r < 0)) == pytest.approx(4)                              # lower over upper
    for value in (1 / 7, 0.3):                                                          # their variance is rounding, not 0
        flat = np.full((7, 7), value)
        assert math.isnan(probe.aiv(flat)) and probe.opr(flat) == 0 and probe.tie_rate(flat) == 1
    random_map = np.random.default_rng(1).random((60, 60))
    assert abs(probe.opr(random_map) - 0.5) < 0.02 and abs(probe.aiv(random_map) - 1) < 0.1


def untrained(pe):
    torch.manual_seed(1)
    return Encoder(EncoderConfig(vocab_size=VOCAB, n_layer=1, pe=pe)).double().eval()


def test_untrained_schemes_have_the_properties_they_are_built_with():
    """All without [CLS] and [SEP]: these are other words, so their rows and columns differ whatever the scheme.

    AIV is 0 on logits. After the softmax rows near the edges have other normalisers: over six seeds .001 to .006 (rel),
    .022 (alibi), .015 to .085 (t5, whose far buckets are few and random) at this size.
    """
    bound = {"rel": 0.02, "alibi": 0.03, "t5": 0.12}
    for pe in ("none", "rel", "t5", "alibi", "abs"):
        logits, A = (m.mean(0)[1:-1, 1:-1] for m in probe.identical_word_maps(untrained(pe), torch.arange(20)))
        if pe == "none":        # a bag of words: uniform among the words
            assert np.ptp(A) < 1e-15 and math.isnan(probe.aiv(A)) and probe.tie_rate(A) == probe.tie_rate(A, 20) == 1
        elif pe == "abs":
            assert probe.aiv(A) > 0.5
        else:
            assert probe.aiv(logits) < 1e-12 and probe.aiv(A) < bound[pe]
        if pe == "alibi":
            assert probe.opr(A) == probe.tie_rate(A) == 0 and probe.db(A) == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize("pe", ["tupe_r", "abs+rlsin"])
def test_the_map_equals_a_loop_over_words(pe):
    encoder, words = tiny(pe), torch.tensor([3, 60, 7, 11] * 5)         # more than one chunk
    L = encoder.config.max_len
    maps = [encoder.attention(torch.tensor([[VOCAB - 8] + [w] * (L - 2) + [VOCAB - 6]]))[0].numpy() for w in words.tolist()]
    logits, A = probe.identical_word_maps(encoder, words)
    np.testing.assert_allclose(A, sum(maps) / len(maps), atol=1e-12)
    one_logits, one = probe.identical_word_maps(encoder, words[:1])
    np.testing.assert_allclose(torch.from_numpy(one_logits).softmax(-1).numpy(), one, atol=1e-12)
    assert not np.allclose(logits, one_logits)
    _, causal = probe.identical_word_maps(encoder, words, causal=True)
    assert probe.db(causal.mean(0)) == math.inf and causal.sum(-1) == pytest.approx(1)


def test_probe_words_are_whole_words(corpus):
    encoder = Encoder(EncoderConfig(vocab_size=corpus.vocab_size))
    encoder.tokenizer = tiktoken.Encoding(**data.encoding_arguments(corpus.tokenizer))
    chosen = probe.probe_words(encoder, 10).tolist()
    assert len(set(chosen)) == 10 and chosen == probe.probe_words(encoder, 10).tolist()
    assert all(encoder.tokenizer.decode([i])[0] == " " and encoder.tokenizer.decode([i])[1:].isalpha() for i in chosen)
    assert len(set(probe.probe_words(encoder, 250).tolist())) == 250                    # too few words: any ordinary token


@pytest.mark.parametrize("pe", [name for name in PE_NAMES if name not in ("bert_a", "bert_r")])
def test_every_scheme_has_its_pictures(pe):
    encoder = tiny(pe)
    logits, _ = probe.identical_word_maps(encoder, torch.arange(3))
    found, vectors = probe.pictures_of(encoder, logits, True), probe.position_vectors(encoder)
    parts = set(parse_pe(pe))
    there = {file for file, panels in found.items() if not isinstance(panels, str)}
    absolute = bool(parts & {"abs", "sin", "lsin", "bert_ad"}) or pe.startswith("tupe") and pe != "tupe_a_free"
    relative = bool(parts & {"rel", "rel_k", "rsin", "rlsin", "tupe_r_factored"})
    assert ("absolute" in vectors, "relative" in vectors) == (absolute, relative)
    if pe in ("rsin", "rel"):
        first, v = vectors["relative"]
        table = encoder.pe.parts[pe].relative(torch.arange(12)[None], 0)[1].detach().numpy()
        assert first == -11 and np.array_equal(v, table[64 - 11:64 + 12])
    if pe.startswith("tupe") and absolute:      # after its LayerNorm
        assert vectors["absolute"][1].mean(1) == pytest.approx(0, abs=1e-9)
    assert ("vectors.png" in there) == ("proximity.png" in there) == bool(vectors)
    assert ("frequencies.png" in there) == bool(parts & {"lsin", "rlsin"})
    assert ("positional.png" in there) == any(word in pe for word in ("t5", "tupe", "bert", "alibi"))
    assert all(pe in reason for file, reason in found.items() if file not in there)
    assert len(found["map_per_head.png"]) == 2 and there >= {"map.png", "map_per_head.png"}
    if "positional.png" in there and pe != "bert_ad":
        bias = encoder.pe.call("bias", torch.arange(12)[None])[0].detach().numpy()
        np.testing.assert_allclose([panel["matrix"] for panel in found["positional.png"]], bias)


def test_positional_logits_of_bert_ad_and_proximity_of_sinusoids():
    encoder = tiny("bert_ad")
    positions = encoder.pe.parts["bert_ad"].positions
    p = positions.norm(positions.table.weight)[:12]
    expected = [(positions.u_q(p)[:, h:h + 8] @ positions.u_k(p)[:, h:h + 8].T / math.sqrt(4 * 8)).detach() for h in (0, 8)]
    found = probe.pictures_of(encoder, np.zeros((2, 12, 12)), False)["positional.png"]
    np.testing.assert_allclose([panel["matrix"] for panel in found], np.stack(expected), atol=1e-12)
    for pe in ("sin", "lsin", "rsin"):      # untrained: Vaswani's frequencies
        pictures = probe.pictures_of(untrained(pe), np.zeros((4, 64, 64)), False)
        (_, ours), (_, default) = pictures["proximity.png"][0]["curves"].values()
        np.testing.assert_allclose(ours, default, atol=1e-5)
        if pe == "lsin":
            (_, learned), (_, default) = pictures["frequencies.png"][0]["curves"].values()
            np.testing.assert_allclose(learned, default, rtol=1e-6)


def test_proposition_1_of_tupe():
    """P1: any Toeplitz B (n, n) is G D G*, D diagonal (2n, 2n), G_kj = e^((j-1) i pi k / n) / 2n. Here B is T5's bias."""
    n = 12
    B = tiny("t5").pe.call("bias", torch.arange(n)[None])[0, 0].detach().numpy()
    k, j = np.arange(1, n + 1)[:, None], np.arange(1, 2 * n + 1)
    G = np.exp((j - 1) * 1j * np.pi * k / n) / (2 * n)
    # B_km is a function of k - m, of period 2n if one likes: D is its Fourier transform, times 2n.
    period = np.array([B[r, 0] if r < n else 0 if r == n else B[0, 2 * n - r] for r in range(2 * n)])
    D = np.diag(2 * n * np.fft.fft(period))
    np.testing.assert_allclose(G @ D @ G.conj().T, B, atol=1e-12)


def test_context_cosines_equal_a_loop():
    """P2 app. A.3: for every token another one of its row, and one of another row; here the mean over all of them."""
    torch.manual_seed(0)
    h, eligible = torch.randn(4, 6, 5), torch.rand(4, 6) < 0.6
    eligible[0], eligible[1] = True, torch.arange(6) == 2                               # row 1 has no other token
    cosine = lambda a, b: float(F.cosine_similarity(h[a].double(), h[b].double(), dim=0))       # noqa: E731
    tokens = [(b, i) for b in range(4) for i in range(6) if eligible[b, i]]
    intra, inter = [], []
    for a in tokens:
        same = [cosine(a, b) for b in tokens if b[0] == a[0] and b != a]
        if same:
            intra.append(np.mean(same))
            inter.append(np.mean([cosine(a, b) for b in tokens if b[0] != a[0]]))
    assert probe.context_cosines(h, eligible) == pytest.approx((np.mean(intra), np.mean(inter)), abs=1e-12)


def strict_json(file):
    def refuse(literal):
        raise AssertionError(f"{literal} is not JSON")
    return json.loads(file.read_text(), parse_constant=refuse)


@pytest.fixture(scope="module")
def probed(corpus_file, cache, tmp_path_factory):
    """Tiny runs: what --ckpt, --runs, --dynamics and --text work on."""
    out = tmp_path_factory.mktemp("probed")
    for name, pe, objective, *more in (
        ("abs", "abs", "mlm", "--steps", "12", "--keep_every", "4", "--eval_every", "6"), ("none", "none", "mlm", "--lr", "0.01"),
        ("lsin", "lsin+rlsin", "mlm", "--eval_every", "2"), ("tupe", "tupe_r", "mlm"), ("clm", "t5", "clm", "--n_layer", "2"),
        ("binary", "abs", "mlm+pplm_binary"), ("nsp", "abs", "mlm+nsp"), ("tc", "abs", "mlm+tc"),
        ("smooth", "abs", "pplm", "--pair_loss", "smooth_l1"), ("pmlm", "abs", "pmlm"),
    ):
        run_train(corpus_file, cache, out / name, "--steps", "4", "--pe", pe, "--objective", objective, *more)
    return out


def test_probe_of_a_run(probed, capsys, monkeypatch):
    probe.main(["--ckpt", str(probed / "lsin"), "--per_head"])
    out = capsys.readouterr().out
    assert "positional.png left out: lsin+rlsin has no" in out and "frequencies.png left out" not in out
    found = strict_json(probed / "lsin" / "probe" / "probe.json")
    model = objectives.load_pretraining(probed / "lsin").double()
    _, A = probe.identical_word_maps(model.encoder, probe.probe_words(model.encoder))
    A = A.mean(0)
    assert found["indicators"]["with_specials"]["opr_20"] == probe.opr(A, 20)
    assert found["indicators"]["without_specials"]["aiv"] == probe.aiv(A[1:-1, 1:-1])
    assert np.shape(found["map"]) == (16, 16) and len(found["pictures"]["map_per_head.png"]) == 2
    pictures = {"map.png", "map_per_head.png", "vectors.png", "proximity.png", "frequencies.png"}
    assert pictures == {file.name for file in (probed / "lsin" / "probe").glob("*.png")}
    monkeypatch.setitem(sys.modules, "matplotlib", None)                                # as if it were not installed
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    for name, says in (("none", "| -"), ("clm", "inf")):
        probe.main(["--ckpt", str(probed / name / "ckpt.pt"), "--out_dir", str(probed / "numbers" / name)])
        out = capsys.readouterr().out
        assert "pip install matplotlib" in out and says in out
        assert [file.name for file in (probed / "numbers" / name).iterdir()] == ["probe.json"]
    assert strict_json(probed / "numbers" / "none" / "probe.json")["indicators"]["without_specials"]["aiv"] is None
    found = strict_json(probed / "numbers" / "clm" / "probe.json")
    assert found["indicators"]["with_specials"]["db"] == "inf" and found["pictures"]["map.png"][0]["matrix"][0][1] is None


def test_probe_of_runs(probed, capsys):
    for i, name in enumerate(("abs", "none", "lsin", "tupe")):
        rows = [{"task": "docs", "ckpt": "out/run", "seed": seed, "lr": lr, "metrics": {"accuracy": i / 10 + lr + seed}}
                for lr, seed in ((0.1, 0), (0.2, 0), (0.2, 1), (0.2, 7))]
        (probed / name / "results.jsonl").write_text("\n".join(map(json.dumps, rows)))
    probe.main(["--runs", str(probed / "*"), "--out_dir", str(probed / "compared")])
    out = capsys.readouterr().out
    found = strict_json(probed / "compared" / "probe.json")
    by_name = {row["run"]: row for row in found["runs"]}
    assert len(by_name) == 10 and by_name["tupe"]["pe"] == "tupe_r" and by_name["abs"]["steps"] == 12
    assert by_name["abs"]["val_loss"] == json.loads((probed / "abs" / "log.jsonl").read_text().splitlines()[-1])["val_loss"]
    assert "--lr differs: " in out and "0.01 (none)" in out and "--pe differs" not in out
    assert by_name["lsin"]["scores"] == {"docs accuracy": pytest.approx(1.4)}           # median over seeds, best lr
    (table5,) = found["correlations"]
    assert table5["runs"] == 3 and table5["objective"] == "mlm"                         # none left out
    names = ("abs", "lsin", "tupe")
    assert table5["opr"] == pytest.approx(np.corrcoef([by_name[n]["opr"] for n in names], [0, 2, 3])[0, 1])
    assert {file.name for file in (probed / "compared").glob("*.png")} == {"maps.png", "losses.png"}
    assert len(found["pictures"]["losses.png"]) == len({row["objective"] for row in by_name.values()})
    probe.main(["--runs", str(probed / "abs"), str(probed / "no*"), "--out_dir", str(probed / "two")])
    assert "no correlations" in capsys.readouterr().out
    (probed / "none" / "results.jsonl").unlink()
    assert [math.isnan(probe.pearson(x, [1.0, 2.0, 3.0])) for x in ([1.0, 1, 1], [1.0, math.inf, 2], [3.0, 1, 2])] == [1, 1, 0]


def test_dynamics_of_a_run(probed, capsys, tmp_path):
    pairs = tmp_path / "pairs.tsv"
    pairs.write_text("quick\tfox\t7.5\nlazy\tzebra\t1\n")
    probe.main(["--dynamics", str(probed / "abs"), "--pairs", str(pairs)])
    found = strict_json(probed / "abs" / "dynamics" / "probe.json")
    assert [row["step"] for row in found["steps"]] == [4, 8, 12]
    assert {file.name for file in (probed / "abs" / "dynamics").glob("*.png")} == {"contexts.png", "words.png", "vectors.png"}
    encoder, last = load(probed / "abs" / "ckpt_12.pt"), found["steps"][-1]
    vector = lambda word: encoder.tok.weight.detach()[encoder.tokenizer.encode_ordinary(" " + word)].mean(0)     # noqa: E731
    cosines = [float(F.cosine_similarity(vector(a), vector(b), dim=0)) for a, b in (("quick", "fox"), ("lazy", "zebra"))]
    assert last["word pairs"] == pytest.approx(sum(cosines) / 2, abs=1e-5)
    args = json.loads((probed / "abs" / "config.json").read_text())["args"]
    corpus = data.prepare(args["dataset"], "bpe", args["cache"])
    n = corpus.n_rows("val", 16)
    tokens = torch.from_numpy(corpus.rows("val", np.linspace(0, n - 1, min(n, 128)).astype(int), 16))
    with torch.no_grad():
        intra, inter = probe.context_cosines(encoder(tokens), tokens < encoder.config.cls_id)
    assert last["contextual score"] == pytest.approx(intra - inter, abs=1e-5) and found["rows"] == len(tokens)
    table = encoder.pe.parts["abs"].table.weight[:16].detach().double().numpy()
    np.testing.assert_allclose(found["pictures"]["vectors.png"][-1]["matrix"], table @ table.T, rtol=1e-3)
    probe.main(["--dynamics", str(probed / "abs"), "--out_dir", str(tmp_path / "d")])
    assert "words.png left out" in capsys.readouterr().out


def test_text_that_clm_goes_on_with(probed):
    model = objectives.load_pretraining(probed / "clm")
    with torch.no_grad():       # hardly trained: large weights, so that what a token sees alters the next one
        for p in model.encoder.blocks.parameters():
            p.mul_(20)
    ids = model.encoder.tokenizer.encode_ordinary("the quick brown fox")
    tokens = [model.encoder.config.cls_id, *ids]
    with torch.no_grad():
        while len(tokens) < 16:
            hidden = model.encoder(torch.tensor([tokens]), causal=True)[0, -1]
            tokens.append(int(model.objectives["clm"].logits(model.encoder, hidden)[:model.encoder.config.cls_id].argmax()))
        assert probe.go_on(model, "the quick brown fox") == model.encoder.tokenizer.decode(tokens[1 + len(ids):])


@torch.no_grad()
def test_two_texts(probed):
    """nsp's probability is that of its loss; tc's cosines are those of the texts read one by one."""
    model = objectives.load_pretraining(probed / "nsp")
    encode, (p,) = model.encoder.tokenizer.encode_ordinary, probe.two_texts(model, "the quick fox ||| over a lazy dog")
    cfg = model.encoder.config
    tokens = torch.tensor([[cfg.cls_id, *encode("the quick fox"), cfg.sep_id, *encode(" over a lazy dog"), cfg.sep_id]])
    batch = {"nsp_label": torch.tensor([0]), "nsp_weight": torch.tensor([1.0])}
    loss, _ = model.objectives["nsp"].loss(model.encoder, model.encoder(tokens), batch)
    assert p == pytest.approx(math.exp(-loss.item()), abs=1e-6)
    model = objectives.load_pretraining(probed / "tc")
    g = []
    for text in ("the quick fox", " over a lazy dog"):
        tokens = torch.tensor([[cfg.cls_id, *encode(text), cfg.sep_id]])
        g.append((model.encoder(tokens) - model.encoder.tok(tokens))[0, 1:-1].detach())
    cosine = lambda a, b: float(F.cosine_similarity(a, b, dim=0))       # noqa: E731
    within = [np.mean([cosine(a, b) for b in rows if b is not a]) for rows in map(list, g) for a in rows]
    across = [np.mean([cosine(a, b) for b in g[1 - i]]) for i in (0, 1) for a in g[i]]
    found = probe.two_texts(model, "the quick fox ||| over a lazy dog")
    assert found == pytest.approx((np.mean(within), np.mean(across)), abs=1e-5)


def test_hidden_spread_equals_a_loop():
    """`none` tells words apart and no places; a model without words the other way round."""
    for pe, causal in (("abs", False), ("abs", True), ("none", False)):
        encoder, words = tiny(pe, max_len=9).double().eval(), torch.tensor([3, 5, 8, 13])
        rows = [torch.tensor([[encoder.config.cls_id, *[w] * 7, encoder.config.sep_id]]) for w in words.tolist()]
        hidden = np.array([encoder(row, causal=causal)[0].detach().numpy() for row in rows])        # (4, 9, C)
        over_words = np.mean([hidden[:, i].std(0) for i in range(1, 8)])
        over_places = np.mean([hidden[w, 1:8].std(0) for w in range(4)])
        found = probe.hidden_spread(encoder, words, causal)
        assert found == pytest.approx({"std words": over_words, "std places": over_places}, abs=1e-12)
        assert pe != "none" or found["std places"] < 1e-12
    encoder = tiny("abs", max_len=9).double().eval()
    torch.nn.init.zeros_(encoder.tok.weight)
    found = probe.hidden_spread(encoder, words)
    assert found["std words"] < 1e-12 < found["std places"]


def test_who_moved_with_a_perfect_model(probed, monkeypatch):
    model = objectives.load_pretraining(probed / "binary")

    def knows(encoder, hidden, pos):
        moved = pos[0, 1:-1] != torch.arange(1, pos.size(1) - 1)
        false = moved[:, None] | moved
        return 50.0 * F.one_hot((~false).long(), 2)[None].float()
    monkeypatch.setattr(model.objectives["pplm_binary"], "pair_logits", knows, raising=False)
    rows, auc = probe.who_moved(model, "the quick brown fox jumps over a dog")
    assert auc == 1 and {moved for _, moved, _ in rows} == {True, False}
    assert "".join(word for word, _, _ in rows) == "the quick brown fox jumps over a dog"
    short = next(text for n in range(2, 12) if len(model.encoder.tokenizer.encode_ordinary(text := " dog" * n)) == 5)
    assert {moved for _, moved, _ in probe.who_moved(model, short)[0]} == {True, False}, "the first shuffle moves none of 5"
    assert all(share < 1e-6 for _, moved, share in rows if moved) and all(share > 0 for _, moved, share in rows if not moved)


def test_pairs_right():
    assert probe.pairs_right(torch.arange(6)) == 1 and probe.pairs_right(torch.arange(6).flip(0)) == 0
    assert abs(probe.pairs_right(torch.tensor([1, 0, 2])) - 2 / 3) < 1e-6


def test_put_in_order_with_a_perfect_model(corpus_file, cache, tmp_path, monkeypatch):
    """A model that knows every offset puts the sentence back; one that copies leaves it as it was given."""
    run_train(corpus_file, cache, tmp_path / "run", "--steps", "3", "--objective", "pplm")
    model = objectives.load_pretraining(tmp_path / "run")
    text, pplm = "the quick brown fox jumps over a lazy dog", model.objectives["pplm"]

    def sure_of(true):
        def logits(encoder, hidden, pos):
            places = torch.arange(hidden.size(1)) if true else pos[0]
            r = (places[None, :] - places[:, None])[1:-1, 1:-1] + pplm.L - 1
            return 50.0 * F.one_hot(r, 2 * pplm.L - 1)[None].float()
        return logits
    for true, expected in ((True, 1.0), (False, None)):
        monkeypatch.setattr(pplm, "pair_logits", sure_of(true), raising=False)
        (given_words, found, original), (before, after) = probe.put_in_order(model, text)
        assert "".join(original) == text and sorted(found) == sorted(original) and before < 1
        assert after == (expected or before)
        assert found == (original if true else given_words)


def test_probe_text(probed, capsys):
    for ckpt, text, says in (
        ("abs", "the [MASK] fox [MASK]", "[MASK]: "), ("nsp", "the [MASK] fox", "[MASK]: "),
        ("smooth", "the quick brown fox", "pairs in the right order"), ("pmlm", "the quick brown fox", "given:"),
        ("binary", "the quick brown fox jumps", "AUC"), ("clm", "the quick", "the quick -> "),
        ("nsp", "the quick ||| brown fox", "probability 0."), ("tc", "the quick ||| brown fox", "across"),
    ):
        probe.main(["--ckpt", str(probed / ckpt), "--text", text])
        assert says in capsys.readouterr().out


@pytest.mark.parametrize("flags, says", [
    (["--ckpt", "abs", "--text", "no mask here"], "write [MASK] for mlm"),
    (["--ckpt", "pmlm", "--text", "a [MASK] b"], "objective pmlm: write [MASK] for mlm"),
    (["--ckpt", "tc", "--text", "no bars here"], "'one ||| another' for nsp and tc"),
    (["--ckpt", "abs", "--text", "one ||| another"], "for nsp and tc"),
    (["--ckpt", "pmlm", "--text", "fox " * 40], "tokens"),
    (["--ckpt", "tc", "--text", "the quick |||"], "0 tokens"),
    (["--ckpt", "nowhere", "--text", "x y"], "no checkpoint"),
    (["--ckpt", "nowhere"], "no checkpoint"),
    (["--runs", "nowhere*"], "no folder with a readable ckpt.pt"),
    (["--dynamics", "lsin"], "--keep_every"),
    (["--dynamics", "abs", "--cache", "nowhere"], "--cache names another place"),
    (["--dynamics", "abs", "--pairs", "nowhere"], "No such file"),
    (["--dynamics", "abs", "--pairs", "abs/config.json"], "line 1 is not word<TAB>word<TAB>score"),
    (["--runs", "abs", "--text", "x"], "are for --ckpt"),
    (["--runs", "abs", "--ckpt", "abs"], "not allowed with"),
    (["--pairs", "abs"], "are for --dynamics"),
])
def test_mistakes_with_the_probe_are_one_line(flags, says, probed, monkeypatch, capsys):
    monkeypatch.chdir(probed)
    with pytest.raises(SystemExit) as stopped:
        probe.main(flags)
    error = capsys.readouterr().err
    assert stopped.value.code == 2 and says in error and error.count("\n") == 1


def test_fill_masks_gives_words_of_the_text(corpus_file, cache, tmp_path):
    run_train(corpus_file, cache, tmp_path / "run", "--steps", "150", "--lr", "0.02")
    model = objectives.load_pretraining(tmp_path / "run")
    (best, *_), = probe.fill_masks(model, "the quick brown [MASK] jumps over")
    assert best[0].strip() in WORDS


def test_only_comparable_scores_count():
    row = dict(task="rte", step=9, ckpt="out/run", recipe="electra", epochs=3, n_train=9, length=64)
    others = [dict(row, step=5), dict(row, eval_only=True), dict(row, probe=True), dict(row, ckpt="finetuned-mnli.pt (mnli)"),
              dict(task="rte", ckpt="bow", n_train=9)]
    assert probe.comparable([row, row, *others], 9) == [row, row]
    assert probe.comparable([row, dict(row, epochs=1)], 9) == [dict(row, epochs=1)], "the last settings"


def test_a_fine_tuned_model_is_not_probed(tmp_path):
    torch.save({"config": {}, "model": {}, "tokenizer": {}}, tmp_path / "finetuned.pt")
    with pytest.raises(ValueError, match="take its run's ckpt.pt"):
        probe.load_pretraining(str(tmp_path / "finetuned.pt"))


# =========================================================================================================
# bench.py

TINY_BENCH = ["--batch_size", "2", "--block_size", "16", "--pairs", "2", "--warmup", "1", "--device", "cpu", "--dtype", "float32"]


def bench_variant(**change):
    return bench.Variant("demo", 2, 16, .15, **change)


@pytest.fixture
def no_memory(monkeypatch):
    """Peak memory takes a process for each row: measured in one test only."""
    monkeypatch.setattr(bench, "fresh", lambda function, *args: 1.0)


def bench_rows(tmp_path, *flags):
    bench.main([*TINY_BENCH, *flags, "--json", str(tmp_path / "rows.json")])
    found = json.loads((tmp_path / "rows.json").read_text())
    assert found["machine"]
    for row in found["rows"]:
        assert {"name", "pe", "objective", "tokens_per_s", "ms_per_step", "peak_mem_mb", "mfu"} <= row.keys()
        tokens = row["batch_size"] * row["block_size"]
        assert row["tokens_per_s"] * row["ms_per_step"] == pytest.approx(1000 * tokens) and row["over_floor"] > 0
    return found["rows"]


def test_bench_holds_schemes_against_abs(tmp_path, no_memory):
    rows = bench_rows(tmp_path, "--pe", "abs,rel")
    assert [row["pe"] for row in rows] == ["abs", "rel"] and rows[1]["parameters_added"] == 130 * 32
    assert all(row["ratio_to_abs_low"] <= row["ratio_to_abs"] <= row["ratio_to_abs_high"] for row in rows)


def test_bench_holds_objectives_against_mlm(tmp_path, no_memory):
    rows = bench_rows(tmp_path, "--objective", "pplm,mlm_full,taco")
    assert [row["objective"] for row in rows] == ["pplm", "mlm_full", "taco"] and "ratio_to_mlm" in rows[0]


def test_bench_sweeps_lengths_at_constant_tokens(tmp_path, no_memory, monkeypatch):
    monkeypatch.setattr(bench, "SWEEP", (8, 32))
    rows = bench_rows(tmp_path, "--sweep")
    assert [(row["batch_size"], row["block_size"]) for row in rows] == [(4, 8), (1, 32)] and "ratio_to_8" in rows[1]


def test_bench_beside_the_peer(tmp_path, no_memory):
    pytest.importorskip("transformers")
    ours, theirs = bench_rows(tmp_path, "--peer", "hf", "--no-compile")
    assert (ours["name"], theirs["name"]) == ("ours eager", "hf eager") and ours["speed_to_hf_eager"] > 0


def test_bench_measures_memory_in_a_fresh_process(tmp_path):
    row, = bench_rows(tmp_path, "--pe", "abs")
    assert 50 < row["peak_mem_mb"] < 5000


def test_peer_has_our_parameters_but_for_what_is_documented():
    pytest.importorskip("transformers")
    ours, theirs = bench_variant(), bench_variant(maker="hf")
    # One position more (ours: an unknown one; theirs: two before the first), and one token type.
    assert theirs.n_parameters() - ours.n_parameters() == 2 * 128
    names = dict(theirs.build().named_parameters())
    assert not any("pooler" in name for name in names)
    assert theirs.build().config._attn_implementation == "sdpa"


@pytest.mark.parametrize("change", [dict(), dict(objective="mlm_full"), dict(maker="hf")])
def test_measured_steps_are_updates(change):
    if change.get("maker") == "hf":
        pytest.importorskip("transformers")
    step = bench.Stepper(bench_variant(**change), torch.device("cpu"), torch.float32)
    before = [p.clone() for p in step.model.parameters()]
    assert step() > 0 and step.n_steps == 1
    assert all((p != old).any() for p, old in zip(step.model.parameters(), before) if old.dim() > 1)


def test_peers_masking_is_the_collators():
    cfg = bench_variant().config()
    tokens = torch.randint(4, cfg.cls_id, (500, 200))
    tokens[:, 0] = cfg.cls_id
    ids, labels = bench.collate(tokens, cfg, .15)
    scored = labels != -100
    assert not scored[:, 0].any() and torch.equal(labels[scored], tokens[scored]) and torch.equal(ids[~scored], tokens[~scored])
    assert abs(scored[:, 1:].float().mean() - .15) < .01
    assert abs((ids[scored] == cfg.mask_id).float().mean() - .8) < .02
    assert abs((ids[scored] == tokens[scored]).float().mean() - .1) < .02


@pytest.mark.parametrize("preset, objective", [("demo", "mlm"), ("demo", "mlm_full"), ("demo", "clm"), ("demo", "pplm"),
                                               ("demo", "mlm+pplm_binary"), ("paper", "mlm")])
def test_floor_is_what_pytorch_counts(preset, objective):
    from torch.utils.flop_counter import FlopCounterMode
    v = bench.Variant(preset, 2, 64, .15, objective=objective)
    step = bench.Stepper(v, torch.device("cpu"), torch.float32)
    with FlopCounterMode(display=False) as counter:
        step.loss().backward()
    counted = sum(operations for operations, _ in bench.count(v.config(), v.B, v.L, objective, .15).values())
    assert counted == pytest.approx(counter.get_total_flops(), rel=.03)


def test_floor_in_the_docstring_is_the_one_counted():
    lines = {line.split("  ")[2].strip(): line for line in bench.__doc__.splitlines() if " a layer " in line or "3 * 2 B" in line}
    for preset, B, L, rate in [("paper", 64, 128, .3), ("base", 32, 512, .15)]:
        parts = bench.count(bench.Variant(preset, B, L, rate).config(), B, L, "mlm", rate)
        for name in ("qkv and out", "feed-forward", "attention", "head"):
            assert f" {parts[name][0] / 1e12:.3f} T" in lines[name]
        moved = sum(parts[name][1] for name in ("qkv and out", "feed-forward")) / 1e9
        assert f" {moved:.1f} GB" in lines["layers"]


def test_dropout_on_a_cpu():
    torch.manual_seed(0)
    x = torch.full((999, 1001), 2.0, requires_grad=True)
    y = model_module.drop(x, .1)
    y.sum().backward()
    dropped = y == 0
    assert abs(dropped.float().mean() - .1) < .002 and torch.equal(x.grad, y.detach() / 2)
    assert y[~dropped].unique().numel() == 1 and abs(y.mean() - 2) < .005
    assert abs((dropped[:, 1:] & dropped[:, :-1]).float().mean() - .01) < .001          # neighbours share a draw, not their luck
    torch.manual_seed(0)
    assert torch.equal(model_module.drop(x, .1), y) and model_module.drop(x, .1, training=False) is x
    assert model_module.drop(x, .9999999).isfinite().all()


@pytest.mark.parametrize("flags, said", [
    (["--pe", "foo"], "choose from"), (["--objective", "foo"], "choose from"), (["--pairs", "1"], "at least 2"),
    (["--pe", "rope", "--objective", "pmlm"], "unknown"), (["--objective", "tc", "--batch_size", "1"], "at least 2"),
    (["--peer", "hf", "--sweep"], "a table of its own"), (["--pe", "all", "--objective", "all"], "a table of its own"),
    (["--data", "no/such*.txt"], "no file"), (["--block_size", "3"], "at least 4"), (["--mask_rate", "2"], "mask_rate"),
    (["--preset", "foo"], "invalid choice"),
    (["--data", "docs"], "takes files"), (["--finetune", "glue", "--compile"], "no use")])
def test_bench_mistakes_are_one_line(flags, said, capsys):
    with pytest.raises(SystemExit) as stopped:
        bench.main([*flags, "--device", "cpu"])
    error = capsys.readouterr().err
    assert stopped.value.code == 2 and said in error and error.count("\n") == 1


def test_bench_of_data(tmp_path, corpus_file, capsys, monkeypatch):
    monkeypatch.setattr(bench, "fresh", lambda function, *args: function(*args))
    bench.main([*TINY_BENCH, "--data", str(corpus_file), "--json", str(tmp_path / "rows.json")])
    row, = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert row["mb"] * 1e6 == os.path.getsize(corpus_file) and 0 < row["loader_share"] < 10
    assert "MB/s" in capsys.readouterr().out


# =========================================================================================================
# README.md

def readme_snippets():
    return [block.split("```")[0] for block in (HERE / "README.md").read_text().split("```python\n")[1:]]


def test_scheme_of_the_readme_works(monkeypatch):
    monkeypatch.setattr(model_module, "COMPONENTS", dict(model_module.COMPONENTS))
    snippet, = [text for text in readme_snippets() if "class Kerple" in text]
    exec(snippet, model_module.__dict__)
    for pe in ("kerple", "abs+kerple"):
        encoder, tokens = tiny(pe), some_tokens()
        with torch.no_grad():           # tiny() makes matrices ten times larger, these (H, 1, 1) too
            encoder.pe.parts["kerple"].a.fill_(0.5)
        pos = torch.arange(7).expand(3, 7).clone()
        pos[:, 2] = UNKNOWN_POS
        order = torch.tensor([0, 3, 1, 6, 2, 5, 4])
        torch.testing.assert_close(encoder(tokens[:, order], pos[:, order]), encoder(tokens, pos)[:, order], rtol=0, atol=1e-9)
        assert (encoder(tokens[:, order]) - encoder(tokens)[:, order]).abs().max() > 1e-3


def test_objective_of_the_readme_works(monkeypatch):
    """A class with two halves, and a line each in two tables: here the recipe's least, how many words a row has."""
    class Count(objectives.Objective):
        def __init__(self, encoder, cfg):
            super().__init__(encoder, cfg)
            self.out = torch.nn.Linear(encoder.config.d_model, 1)

        def corrupt(self, batch, generator):
            batch["count"] = batch["eligible"].sum(1)

        def loss(self, encoder, hidden, batch):
            return (self.out(hidden[:, 0])[:, 0] - batch["count"]).square().mean(), {}

    monkeypatch.setitem(objectives.OBJECTIVES, "count", Count)
    monkeypatch.setitem(objectives.KINDS, "sentence", (*objectives.KINDS["sentence"], "count"))
    model, tokens = pretraining("count+mlm"), packed_rows()
    loss, scalars = model(model.corrupt(tokens, 0))
    assert loss.isfinite() and {"count", "mlm"} <= scalars.keys()
    assert pretraining("count").baselines(6.0) == {}


def test_model_is_used_as_the_readme_says(corpus_file, cache, tmp_path):
    run_train(corpus_file, cache, tmp_path / "run", "--steps", "3", "--block_size", "64")
    snippet, = [text for text in readme_snippets() if "from model import load" in text]
    names = {}
    exec(snippet.replace("out/docs-demo-tupe_r-mlm-s1337", str(tmp_path / "run")), names)
    assert names["vector"].shape == (16,) and names["vector"].isfinite().all()


def test_commands_of_the_readme_parse():
    """Every `python X.py ..` line of the README is accepted by X's own parser."""
    import shlex

    lines = re.findall(
        r"(?:python|torchrun --nproc_per_node \d+) (?:train|finetune|data|probe|bench)\.py(?:'[^']*'|[^`\n|#&)'])*",
        (HERE / "README.md").read_text(),
    )
    assert len(lines) >= 8
    for line in lines:
        words = shlex.split(line)
        script = next(word for word in words if word.endswith(".py"))
        flags = [word for word in words[words.index(script) + 1:] if word != "--help"]
        if script == "train.py":
            train.parse_args(flags)
        elif script == "finetune.py":
            finetune.parse_args(flags)
        else:
            source = (HERE / script).read_text() + (HERE / "data.py").read_text()
            assert all(f'"{flag}"' in source for flag in flags if flag.startswith("--")), line


def soak(n_kills=20, seed=0):
    """A few minutes: a run killed at random moments, or inside a save, and resumed each time; its end is compared bit for bit.

    Every second kill is SIGKILL from outside, the others SIGTERM, a death inside a write, or a full disk.
    """
    rng, began, tally = random.Random(seed), time.time(), collections.Counter()
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        corpus, cache = write_corpus(folder / "corpus.jsonl", 400), str(folder / "cache")
        flags = ["--objective", "taco+pplm", "--pe", "tupe_r", "--steps", "1500", "--eval_every", "25", "--log_every", "25",
                 "--grad_accum", "2"]
        print("the run never stopped", flush=True)
        run_train(corpus, cache, folder / "whole", *flags)
        flags = train_flags(corpus, cache, folder / "cut", *flags, "--resume")
        step, log = 0, folder / "cut" / "log.jsonl"
        for kill in range(n_kills):
            kind, how, where = [("SIGKILL", "", ""), ("SIGTERM", "", ""), ("SIGKILL", "", ""),
                                ("dies in a write", "kill", ["fsync", "link", "replace", "write"][kill % 4]),
                                ("SIGKILL", "", ""), ("disk full", "full", ["fsync", "write"][kill % 2])][kill % 6]
            command = [sys.executable, HERE / "train.py", *flags]
            if how:
                command = [sys.executable, "-c", CUT, how, where, str(rng.randint(1, 5)), *flags]
            process = subprocess.Popen(command, cwd=HERE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
            if not how:
                written = log.stat().st_mtime_ns if log.exists() else 0
                while kill % 5 and process.poll() is None and (not log.exists() or log.stat().st_mtime_ns == written):
                    time.sleep(0.05)                        # most die between two steps or inside one, every fifth before
                time.sleep(rng.uniform(0, 3))
                process.send_signal(getattr(signal, kind))
            errors = process.communicate(timeout=300)[1]
            lost = [line for line in errors.splitlines() if "Traceback" in line]
            now = weights(folder / "cut")["step"] if (folder / "cut" / "ckpt.pt").exists() else 0
            tally[kind] += 1
            print(f"{kill + 1:3} {kind:16} exit {process.returncode:4}, last checkpoint at step {now}", flush=True)
            assert now >= step and not lost, errors
            step = now
        train.main(flags)
        a, b = weights(folder / "whole")["model"], weights(folder / "cut")["model"]
        different = [key for key in a if (a[key] != b[key]).any()]
    print(f"soak: {dict(tally)}; tensors that differ from the run never stopped: {len(different)} of {len(a)}; "
          f"{time.time() - began:.0f} s")
    return 1 if different else 0


if __name__ == "__main__":
    if "--soak" in sys.argv:
        sys.exit(soak())
    start = time.time()
    code = pytest.main([__file__, *sys.argv[1:]])
    print(f"{time.time() - start:.0f} s")
    sys.exit(code)
