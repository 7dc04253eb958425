"""The mechanisms of test_all.py compared with other libraries, with the rules of official scripts,
with published figures, and with losses that this project had before. t5, rope and all sums that
transformers has are compared with it in tests/test_hf.py."""

import itertools
import math
import random
import re

import numpy as np
import pytest
import tiktoken
import torch
from scipy import stats
from sklearn import metrics
from tokenizers.pre_tokenizers import BertPreTokenizer
from transformers import DebertaConfig
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.deberta.modeling_deberta import DisentangledSelfAttention

import finetune
from lib import bpe, glue, squad
from lib.sources import Part
from model import EncoderConfig, Positions
from objectives import begins_word
from test_all import close, encoding_of, tiny
from tests.conftest import log_of


def test_alibi_slopes_equal_transformers():
    """alibi's slopes are the published ones (BLOOM's), for any number of heads."""
    for n_head in (1, 6, 8, 12):
        theirs = build_alibi_tensor(torch.ones(1, 2), n_head, torch.float32)[:, 0, 1]
        ours = tiny("alibi", n_head=n_head, d_model=2 * n_head).scheme.parts["Alibi"]
        close(-ours.bias(Positions(torch.arange(2)))[0, :, 0, 1], theirs, 1e-6)


def test_deberta_equals_transformers():
    """deberta's logits are DeBERTa's, term by term. Their offsets are query minus key and end at
    63; in k_j . a_-r U_Q their code uses a_r, so for that term they get the table in reverse."""
    encoder, L = tiny("deberta"), 9
    part, scale = encoder.scheme.parts["Deberta"], encoder.scheme.scale
    config = DebertaConfig(hidden_size=16, num_attention_heads=2, relative_attention=True)
    config.max_relative_positions, config.pos_att_type = 64, ["c2p", "p2c"]
    theirs = DisentangledSelfAttention(config).double().eval()
    theirs.pos_proj.weight.data, theirs.pos_q_proj.weight.data = part.layers[1].weight.chunk(2)
    theirs.pos_q_proj.bias.data.zero_()
    q, k = torch.randn(2, 2, 2, L, 8, dtype=torch.double)
    a = part.table.weight[:129]  # row r + 64
    offsets, expected = torch.arange(L)[:, None] - torch.arange(L), q @ k.mT * scale
    for kind, table in (("c2p", a.flip(0)[:128]), ("p2c", a[:128])):
        theirs.pos_att_type = [kind]
        expected = expected + theirs.disentangled_att_bias(q * scale, k, offsets, table, 3)
    close(encoder.logits(q, k, torch.arange(L), 1), expected, 1e-6)


def test_word_starts_are_berts():
    """A token begins a word where BERT's pre-tokenizer begins one; punctuation is its own word."""
    text = "The fox (seven, old)\nIt's a well-known 3.14: “naïve” _x_ jumps... ça va? Ωμέγα—лиса"
    state = bpe.bpe_state([Part(lambda: [text.replace(" ", "")[::-1], text], 1)])
    encoding = tiktoken.Encoding(**bpe.encoding_arguments(state))
    in_word = bpe.word_characters(encoding, encoding.n_vocab)
    words = BertPreTokenizer().pre_tokenize_str(text)
    starts = {len(text[:i].encode()) for _, (i, _) in words}
    parts = re.findall(r"\w{1,3}| ?\W", text)  # so that words have several tokens
    tokens, position = sum(map(encoding.encode_ordinary, parts), []), 0
    sequence = torch.tensor([[encoding.n_vocab - 1, *tokens]])  # after a special token
    begins = begins_word(sequence, in_word)[0, 1:].tolist()
    for token, begins_one in zip(tokens, begins):
        piece = encoding.decode_single_token_bytes(token)
        first = position + len(piece) - len(piece.lstrip())
        if piece.strip():
            assert begins_one == (first in starts), (piece, position)
        position += len(piece)
    assert not in_word[:, -8:].any(), "special tokens"


def test_metrics_equal_scikit_learn_and_scipy():
    """The metrics are those of the libraries, also for one class, constant scores and ties."""
    ours, rng = finetune.TASKS, np.random.default_rng(0)
    binary = [rng.integers(0, 2, 20) for _ in range(30)] + [np.zeros(20, int), np.ones(20, int)]
    for y, p in zip(binary + binary[-2:] * 2, binary[::-1] + binary[:4]):
        right = metrics.accuracy_score(y, p)
        f1 = {"accuracy": right, "f1": metrics.f1_score(y, p, zero_division=0)}
        matthews = {"matthews": metrics.matthews_corrcoef(y, p), "accuracy": right}
        assert ours["cola"].score(y, p) == pytest.approx(matthews, abs=1e-12)
        assert ours["mrpc"].score(y, p) == ours["qqp"].score(y, p) == pytest.approx(f1, abs=1e-12)
        assert ours["mnli"].score(y, p) == {"accuracy": right}
    y, p = rng.integers(0, 6, 40), rng.normal(size=40).round(1)
    expected = stats.pearsonr(y, p)[0], stats.spearmanr(y, p)[0]
    assert list(ours["stsb"].score(y, p).values()) == pytest.approx(expected, abs=1e-9)
    assert ours["stsb"].score(y, [0.1] * 40) == {"pearson": 0.0, "spearman": 0.0}
    assert np.isnan([*ours["stsb"].score(y, [math.nan] * 40).values()]).all()


def test_averages_of_the_papers():
    """The papers' own rows give the papers' own averages."""
    order = ["mnli", "mnli-mm", "qnli", "qqp", "sst2", "cola", "mrpc", "rte", "stsb"]
    for paper, values, mean in (
        ("TUPE", (84.77, 84.95, 91.78, 90.99, 92.75, 56.77, 87.90, 71.70, 89.60), 83.47),  # table 2
        ("TACO", (77.9, 78.4, 86.5, 86.1, 88.9, 34.2, 88.1, 59.5, 86.1), 76.2),  # table 1, 250k
        ("Wang 2021", (None, 84.8, 88.7, 87.8, 93.0, 60.2, 89.4, 65.1, 88.6), 82.2),  # table 3
    ):
        by_task = dict(zip(order, values))
        scores = {(task, metric): by_task[task] for task, metric in glue.AVERAGES[paper].items()}
        assert abs(finetune.paper_averages(scores)[paper] - mean) < 0.051


@pytest.mark.parametrize("seed", range(10))
def test_squad_windows(corpus, seed):
    """As in BERT's run_squad.py, windows cover the context in equal steps (here of a third); the
    label is the answer's tokens if all of them are in the window. Spans point into the original
    context."""
    tokenizer = encoding_of(corpus)
    rng, pieces = random.Random(seed), ["the ", "fox", " fox", "é", "漢", "😀", "\n", " ", "owl's "]
    context = "".join(rng.choices(pieces, k=rng.randrange(30)))
    a, b = sorted(rng.randrange(len(context) + 1) for _ in range(2))
    golds, length = [context[a:b]] * (a < b), rng.randrange(8, 40)
    text, lead = context.strip(), len(context) - len(context.lstrip())
    ids = tokenizer.encode_ordinary(text)
    ends = list(itertools.accumulate(map(len, tokenizer.decode_tokens_bytes(ids)), initial=0))
    of_byte = [lead + i for i, c in enumerate(text) for _ in c.encode()]
    spans = [[of_byte[x], of_byte[y - 1] + 1] for x, y in zip(ends, ends[1:])]
    answer = [i for i, (x, y) in enumerate(spans) if golds and y > a and x < b]
    start, end, cfg = 0, -1, EncoderConfig(vocab_size=8192)
    q = squad.Question((" who?", context), golds, [a] * (a < b))
    list(squad.windows(2, q, tokenizer, cfg, length))  # another question about the same context
    for (row, label), window in squad.windows(3, q, tokenizer, cfg, length):
        assert end < len(ids), "no window after the one with the last token"
        offset, room = window.offset, length - window.offset - 1
        end = start + room
        assert row[offset - 1 :] == [cfg.sep_id, *ids[start:end], cfg.sep_id]
        assert window.spans.tolist() == spans[start:end]
        complete = answer and start <= answer[0] and answer[-1] < end
        shift = offset - start
        assert label == ((answer[0] + shift, answer[-1] + shift) if complete else (0, 0))
        start += min(length // 3, room)
    assert end >= len(ids)


GOLDEN = {"tupe_r pplm": 3.3536, "rel taco": 18.6842, "rope clm": 8.8719, "none nsp+mlm": 9.5121}


@pytest.mark.parametrize("case", GOLDEN)
def test_golden_losses(run, case):
    """The tenth loss on one thread stays what it was: any change of what is computed is noticed."""
    pe, objective = case.split()
    flags = "--preset demo --steps 10 --log_every 1 --dtype float32 --no-compile"
    rows = log_of(run("run", f"{flags} --pe {pe} --objective {objective}"))
    close(rows[-1]["loss"], GOLDEN[case], 1e-3)
