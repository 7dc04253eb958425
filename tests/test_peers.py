"""The mechanisms of test_all.py compared with other libraries, with the rules of official scripts,
with published figures, and with losses that this project had before. tests/test_hf.py compares
whole models with those of transformers."""

import itertools
import math
import random
import re
from collections import Counter

import numpy as np
import pytest
import tiktoken
import torch

import data
import finetune
from lib import glue, squad
from lib.sources import Part
from model import EncoderConfig, Positions
from test_all import close, tiny
from tests.conftest import log_of

ODD_TEXT = ["the ", "fox", " fox", "é", "漢", "😀", "\n", " ", "“", "owl's "]


# --------------------------------------------------------------------------------------------------
# transformers: positional schemes


def test_t5_bias_equals_transformers():
    """t5 is T5's bias, with copied weights."""
    t5 = pytest.importorskip("transformers.models.t5.modeling_t5")
    config = t5.T5Config(num_heads=2, d_model=16, d_kv=8, is_decoder=False)
    theirs = t5.T5Attention(config, has_relative_attention_bias=True)
    ours = tiny("t5").scheme.parts["T5Bias"].float()
    ours.table.weight.data[:32] = theirs.relative_attention_bias.weight
    close(ours.bias(Positions(torch.arange(300))), theirs.compute_bias(300, 300), 1e-6)


def test_rope_equals_transformers():
    """rope rotates queries and keys as RoFormer does."""
    roformer = pytest.importorskip("transformers.models.roformer.modeling_roformer")
    table = roformer.RoFormerSinusoidalPositionalEmbedding(10, 8)
    table.weight.data = table.create_weight()
    q, k = torch.randn(2, 2, 3, 10, 8)
    rotate = roformer.RoFormerSelfAttention.apply_rotary_position_embeddings
    theirs = rotate(table(torch.Size([3, 10]))[None, None], q, k)
    ours = tiny("rope").float().scheme.parts["Rotary"].edit_qk(q, k, Positions(torch.arange(10)))
    close(ours, theirs, 1e-5)


@pytest.mark.parametrize("n_head", [1, 2, 4, 6, 8, 12, 16])
def test_alibi_slopes_equal_transformers(n_head):
    """alibi's slopes are the published ones (BLOOM's), for any number of heads."""
    bloom = pytest.importorskip("transformers.models.bloom.modeling_bloom")
    theirs = bloom.build_alibi_tensor(torch.ones(1, 2), n_head, torch.float32)[:, 0, 1]
    ours = tiny("alibi", n_head=n_head, d_model=2 * n_head).scheme.parts["Alibi"]
    close(-ours.bias(Positions(torch.arange(2)))[0, :, 0, 1], theirs, 1e-6)


def test_deberta_equals_transformers():
    """deberta's logits are DeBERTa's, term by term. Their offsets are query minus key and end at
    63; in k_j . a_-r W_Q their code uses a_r, so for that term they get the table in reverse."""
    deberta = pytest.importorskip("transformers.models.deberta.modeling_deberta")
    encoder, L = tiny("deberta"), 9
    part, scale = encoder.scheme.parts["Deberta"], encoder.scheme.scale
    config = deberta.DebertaConfig(hidden_size=16, num_attention_heads=2, relative_attention=True)
    config.max_relative_positions, config.pos_att_type = 64, ["c2p", "p2c"]
    theirs = deberta.DisentangledSelfAttention(config).double().eval()
    theirs.pos_proj.weight.data, theirs.pos_q_proj.weight.data = part.layers[1].weight.chunk(2)
    theirs.pos_q_proj.bias.data.zero_()
    q, k = torch.randn(2, 2, 2, L, 8, dtype=torch.double)
    a = part.table.weight[:129]  # row r + 64
    offsets, expected = torch.arange(L)[:, None] - torch.arange(L), q @ k.mT * scale
    for kind, table in (("c2p", a.flip(0)[:128]), ("p2c", a[:128])):
        theirs.pos_att_type = [kind]
        expected = expected + theirs.disentangled_att_bias(q * scale, k, offsets, table, 3)
    close(encoder.logits(q, k, torch.arange(L), 1), expected, 1e-6)


# --------------------------------------------------------------------------------------------------
# tokenizers: byte-pair encoding and words


def test_bpe_equals_another_library():
    """The merges are those of Hugging Face's tokenizers. Counts are such that no pairs tie."""
    tokenizers = pytest.importorskip("tokenizers")
    rng, words = random.Random(1), Counter()
    for _ in range(400):
        words["".join(rng.choices("abcde", k=rng.randint(2, 6)))] += rng.randint(1, 99)
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=5 + 40, show_progress=False)
    model.train_from_iterator([f"{word} " * n for word, n in words.items()], trainer)
    theirs = sorted(model.get_vocab(), key=model.token_to_id)[5:]
    ours = data.train_bpe({word.encode(): n for word, n in words.items()}, 256 + 40)[256:]
    assert [token.decode() for token in ours] == theirs


def test_word_starts_are_berts():
    """A token begins a word where BERT's pre-tokenizer begins one; punctuation is its own word."""
    tokenizers = pytest.importorskip("tokenizers")
    text = "The fox (seven, old)\nIt's a well-known 3.14: “naïve” _x_ jumps... ça va? Ωμέγα—лиса"
    state = data.bpe_state([Part(lambda: [text.replace(" ", "")[::-1], text], 1)])
    encoding = tiktoken.Encoding(**data.encoding_arguments(state))
    begins, before_word = data.word_starts(encoding, encoding.n_vocab).tolist()
    words = tokenizers.pre_tokenizers.BertPreTokenizer().pre_tokenize_str(text)
    starts = {len(text[:i].encode()) for _, (i, _) in words}
    position, previous = 0, True
    ids = [
        i for token in re.findall(r"\w{1,3}| ?\W", text) for i in encoding.encode_ordinary(token)
    ]
    for token in ids:  # cut small, so that words have several tokens
        piece = encoding.decode_single_token_bytes(token)
        first = position + len(piece) - len(piece.lstrip())
        if piece.strip():
            assert (begins[token] or previous) == (first in starts), (piece, position)
        position, previous = position + len(piece), before_word[token]
    assert position == len(text.encode())
    assert all(begins[-8:]) and all(before_word[-8:]) and len(begins) == 8192


# --------------------------------------------------------------------------------------------------
# Metrics, averages, SQuAD


def test_metrics_equal_scikit_learn_and_scipy():
    """The metrics are those of the libraries, also for one class, constant scores and ties."""
    metrics, stats = pytest.importorskip("sklearn.metrics"), pytest.importorskip("scipy.stats")
    ours, rng = finetune.METRICS, np.random.default_rng(0)
    binary = [rng.integers(0, 2, 20) for _ in range(30)] + [np.zeros(20, int), np.ones(20, int)]
    for y, p in zip(binary + binary[-2:] * 2, binary[::-1] + binary[:4]):
        right = metrics.accuracy_score(y, p)
        f1 = {"accuracy": right, "f1": metrics.f1_score(y, p, zero_division=0)}
        matthews = {"matthews": metrics.matthews_corrcoef(y, p), "accuracy": right}
        assert ours["cola"](y, p) == pytest.approx(matthews, abs=1e-12)
        assert ours["mrpc"](y, p) == ours["qqp"](y, p) == pytest.approx(f1, abs=1e-12)
    for task in ("sst2", "mnli", "qnli", "rte", "wnli", "ax", "docs"):
        assert ours[task](y, p) == {"accuracy": right}
    for spread in (1, 1e-150, 1e6):
        y, p = rng.integers(0, 6, 40) * spread, rng.normal(size=40).round(1)
        expected = stats.pearsonr(y / spread, p)[0], stats.spearmanr(y, p)[0]
        assert list(ours["stsb"](y, p).values()) == pytest.approx(expected, abs=1e-9)
    undefined = {"pearson": 0.0, "spearman": 0.0}
    assert ours["stsb"](y, [0.1] * 40) == ours["stsb"]([2.5] * 40, p) == undefined
    assert ours["stsb"](y, [math.nan] * 40) == undefined


def test_averages_of_the_papers():
    """The papers' own rows give the papers' own averages."""
    order = ["mnli", "mnli-mm", "qnli", "qqp", "sst2", "cola", "mrpc", "rte", "stsb"]
    for paper, values, mean in (
        ("TUPE", (84.77, 84.95, 91.78, 90.99, 92.75, 56.77, 87.90, 71.70, 89.60), 83.47),  # table 2
        ("TACO", (77.9, 78.4, 86.5, 86.1, 88.9, 34.2, 88.1, 59.5, 86.1), 76.2),  # table 1, 250k
        ("Wang 2021", (None, 84.8, 88.7, 87.8, 93.0, 60.2, 89.4, 65.1, 88.6), 82.2),  # table 3
    ):
        metrics, by_task = glue.AVERAGES[paper], dict(zip(order, values))
        scores = {(task, metric): by_task[task] for task, metric in metrics.items()}
        assert len(scores) == (8 if paper == "Wang 2021" else 9)
        assert abs(finetune.paper_averages(scores)[paper] - mean) < 0.051
        del scores["rte", "accuracy"]
        assert finetune.paper_averages(scores)[paper] == ["rte"]
    assert glue.AVERAGES["TUPE"]["stsb"] == "pearson" and glue.AVERAGES["TACO"]["mrpc"] == "f1"


@pytest.mark.parametrize(
    "golds, text, em, f1",
    [
        (["an owl, a fox"], "owl fox", 1, 1),
        (["a fox", "the fox den"], "fox den", 1, 1),
        ([], "", 1, 1),
        ([], "fox", 0, 0),
        (["b c d"], "c", 0, 0.5),
        (["The"], "", 1, 1),
        (["c c d"], "c d d", 0, 2 / 3),
        (["$5.00"], "500", 1, 1),
        (["Café  au\tla"], "café au la", 1, 1),
    ],
)
def test_squad_metrics_follow_the_official_rules(golds, text, em, f1):
    """The best gold answer counts; case, punctuation, articles and spaces do not."""
    assert finetune.METRICS["squad"]([golds], [text]) == pytest.approx({"em": em, "f1": f1})


@pytest.mark.parametrize("seed", range(40))
def test_squad_windows(corpus, seed):
    """As in BERT's run_squad.py, windows cover the context in equal steps (here of a third); the
    label is the answer's tokens if all of them are in the window. Spans point into the original
    context."""
    tokenizer = tiktoken.Encoding(**data.encoding_arguments(corpus.tokenizer))
    rng = random.Random(seed)
    context, question = ("".join(rng.choices(ODD_TEXT, k=rng.randrange(30))) for _ in range(2))
    length = rng.randrange(8, 40)
    a, b = sorted(rng.randrange(len(context) + 1) for _ in range(2))
    cfg, golds = EncoderConfig(vocab_size=8192), [context[a:b]] * (a < b)
    q = squad.Question((question, context), golds, [a] * (a < b), "1")
    ids = tokenizer.encode_ordinary(context.strip())
    lead = len(context) - len(context.lstrip())
    pieces = tokenizer.decode_tokens_bytes(ids)
    ends = list(itertools.accumulate(map(len, pieces), initial=0))
    of_byte = [i for i, c in enumerate(context.strip()) for _ in c.encode()]
    spans = [(lead + of_byte[x], lead + of_byte[y - 1] + 1) for x, y in zip(ends, ends[1:])]
    found = list(squad.windows(3, q, tokenizer, cfg, length))
    room = length - found[0][1].offset - 1
    starts = [i * min(length // 3, room) for i in range(len(found))]
    answer = [i for i, (x, y) in enumerate(spans) if golds and y > a and x < b]
    for ((row, label), window), start in zip(found, starts):
        part, offset = ids[start : start + room], window.offset
        assert row[offset - 1 :] == [cfg.sep_id, *part, cfg.sep_id] and row[0] == cfg.cls_id
        assert window.spans.tolist() == [list(span) for span in spans[start : start + room]]
        assert window.question == 3 and window.context == context and len(row) <= length
        if answer and start <= answer[0] and answer[-1] < start + len(part):
            assert label == (answer[0] - start + offset, answer[-1] - start + offset)
        else:
            assert label == (0, 0)
    reach_the_end = [start + room >= len(ids) for start in starts]
    assert reach_the_end == [False] * (len(starts) - 1) + [True]


@pytest.mark.parametrize("seed", range(30))
def test_n_best_equals_a_loop(seed):
    """n_best gives the best spans of all that are in order and not too long."""
    rng = np.random.default_rng(seed)
    n, longest = rng.integers(0, 12), rng.integers(1, 6)
    first, last = rng.normal(size=(2, n))
    every = [(first[i] + last[j], i, j) for i in range(n) for j in range(i, min(n, i + longest))]
    expected = [pytest.approx(one) for one in sorted(every, reverse=True)[:5]]
    assert squad.n_best(first, last, 5, longest) == expected


# --------------------------------------------------------------------------------------------------
# Earlier versions

# Losses of ten float32 steps on one thread: who changes what is computed sees it here.
# fmt: off
GOLDEN = {
    ("abs", "mlm"):
        [8.9431, 8.9871, 8.9103, 8.8519, 8.8191, 8.8053, 8.8412, 8.7729, 8.7058, 8.8669],
    ("tupe_r", "pplm"):
        [3.4418, 3.4470, 3.4289, 3.4209, 3.4142, 3.4057, 3.4076, 3.4044, 3.4028, 3.4076],
    ("rel", "taco"):
        [22.8899, 22.0832, 19.6027, 20.9236, 19.4965, 19.4211, 19.4121, 18.6981, 18.9097, 19.1977],
    ("rope", "clm"):
        [9.0314, 9.0127, 8.9653, 8.9551, 8.9110, 8.8663, 8.8205, 8.7984, 8.7298, 8.7819],
    ("none", "nsp+mlm"):
        [9.6478, 9.6662, 9.6867, 9.5573, 9.5712, 9.4997, 9.5618, 9.5201, 9.4926, 9.4734],
}
# fmt: on


@pytest.mark.parametrize("pe, objective", GOLDEN)
def test_golden_losses(run, pe, objective):
    """A change of what is computed is noticed, even where no other test looks."""
    flags = "--steps 10 --log_every 1 --eval_every 10 --dtype float32 --no-compile"
    rows = log_of(run("run", f"{flags} --pe {pe} --objective {objective}"))[1:]
    close([row["loss"] for row in rows], GOLDEN[pe, objective], 1e-3)
