"""tools/hf.py: RoBERTa in, transformers out, with the same hidden states, logits and token ids."""

import json
import random
import re
import shlex
import shutil
from dataclasses import asdict
from functools import partial
from types import SimpleNamespace

import pytest
import tiktoken
import torch

import finetune
from data import encoding_arguments, gpt2_state
from lib.config import defaults
from model import Encoder, EncoderConfig
from objectives import ObjectiveConfig, Pretraining
from tests.conftest import WORDS, one_line, run_train, weights
from tools import hf, sample

transformers = pytest.importorskip("transformers")

PARIS = "The capital of France is"
OWN_ORDER = [*range(8184, 8192), *range(8184)]  # our id of each exported id, for the demo's BPE


@torch.no_grad()
def assert_same(model, theirs, order, L):
    """Hidden states, and logits where both models have them, are equal on sequences of several
    lengths with padding. order: our id of each of their ids."""
    encoder, base = model.encoder.eval(), theirs.base_model
    ids = torch.randint(8, len(order) - 1, (5, L), generator=torch.Generator().manual_seed(1))
    pad = torch.arange(L) >= torch.tensor([L, L - 1, 7, 3, 1])[:, None]
    ids[:, 0], ids[0, 2:4], ids[pad] = 0, order.index(encoder.config.mask_id), 1
    hidden, mask = encoder(torch.tensor(order)[ids], pad=pad), {"attention_mask": (~pad).long()}
    outputs = [(hidden, base(ids, **mask)[0])]
    if theirs is not base:
        logits = model.objectives["mlm"].token_logits(encoder, hidden)[..., order]
        outputs.append((logits, theirs(ids, **mask).logits))
    for own, given in outputs:
        assert own[~pad].std() > 0.1
        torch.testing.assert_close(given[~pad], own[~pad], rtol=0, atol=1e-5)


def random_texts(n=300):
    """Texts made of words, of pieces that a pattern may split differently, and of any character."""
    rng = random.Random(0)
    pieces = " quick| lazy|é東| capital|'ll|I'M| |\n|\t|\xa0|\u3000|2|²|٣|\U0001f600|\x1c|\x85|_|["
    pieces = [*WORDS[:9], *pieces.split("|"), "e\u0301"]
    for _ in range(n):
        text = "".join(rng.choices(pieces, k=rng.randrange(20)))
        yield text + "".join(chr(rng.choice((rng.randrange(0xD800), 32))) for _ in range(5))


def assert_same_tokens(ours, theirs):
    """Both tokenizers split texts alike. Their ids are higher by 8, because special tokens come
    first there."""
    for text in random_texts():
        ids = theirs.encode(text, add_special_tokens=False)
        assert [i - 8 for i in ids] == ours.encode_ordinary(text)


# --------------------------------------------------------------------------------------------------
# Import


@pytest.fixture(scope="module")
def roberta(tmp_path_factory):
    """A folder like that of roberta-base, with random weights and with GPT-2's tokens in another
    order: .folder, .model, .order (our id of each of its ids), and .run, the imported run."""
    try:
        arguments = encoding_arguments(gpt2_state())
    except ValueError as error:
        pytest.skip(str(error))
    folder, run = tmp_path_factory.mktemp("roberta"), tmp_path_factory.mktemp("run") / "run"
    tokens, shuffled = hf.token_names(arguments)[:50256], [*range(50256)]
    random.Random(0).shuffle(shuffled)
    names = ["<s>", "<pad>", "</s>", "<unk>", *(tokens[i] for i in shuffled), "<|endoftext|>"]
    names += ["madeupword0000", "madeupword0001", "madeupword0002", "<mask>"]
    vocab = {name: i for i, name in enumerate(names)}
    (folder / "vocab.json").write_text(json.dumps(vocab))
    cuts = [(token[:i], token[i:]) for token in tokens for i in range(1, len(token))]
    merges = [f"{a} {b}" for a, b in cuts if a in vocab and b in vocab]
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]))
    torch.manual_seed(0)
    sizes = dict(hidden_size=24, intermediate_size=48, num_hidden_layers=2, num_attention_heads=3)
    sizes |= dict(vocab_size=50265, max_position_embeddings=9 + 2, type_vocab_size=1)
    config = transformers.RobertaConfig(layer_norm_eps=1e-5, initializer_range=0.1, **sizes)
    model = transformers.RobertaForMaskedLM(config).eval()
    model.roberta.pooler = transformers.RobertaModel(config).pooler  # roberta-base has one
    for p in model.parameters():
        p.data.add_(0.2 * torch.randn_like(p) if p.dim() == 1 else 0)
    model.save_pretrained(folder)
    hf.main(["import", str(folder), str(run)])
    # [CLS] [PAD] [SEP], a spare one, the tokens, <|endoftext|>, three spare ones, [MASK]
    order = [50257, 50258, 50259, 50261, *shuffled, 50256, 50262, 50263, 50264, 50260]
    return SimpleNamespace(folder=folder, model=model, order=order, run=run)


@pytest.mark.slow
def test_a_roberta_is_imported_exactly(roberta):
    """The imported run computes what the model computed, from the same tokens of a text."""
    model = sample.load_pretraining(roberta.run)
    cfg, embeddings = model.encoder.config, roberta.model.roberta.embeddings
    assert_same(model, roberta.model, roberta.order, 9)
    tokens = model.encoder.tok.weight[roberta.order]
    assert torch.equal(tokens, embeddings.word_embeddings.weight)
    unused = embeddings.position_embeddings.weight[0] + embeddings.token_type_embeddings.weight[0]
    masked = model.encoder.scheme.parts["Absolute"].table.weight[-1]
    assert torch.equal(masked, unused), "the masked position is the row that RoBERTa never uses"
    text = f"{PARIS} Paris,\n\n naïve 東京 \x00\xa0 I'm 2,000 ﬁ!!  "
    ids = transformers.AutoTokenizer.from_pretrained(roberta.folder).encode(text)
    ours = model.encoder.tokenizer.encode_ordinary(text)
    assert [roberta.order[i] for i in ids] == [cfg.cls_id, *ours, cfg.sep_id]


@pytest.mark.slow
def test_exporting_and_importing_again_changes_nothing(roberta, tmp_path):
    """Weights, configuration and tokenizer survive the round trip bit for bit. The exported
    tokenizer splits text as tiktoken does, and its offsets are RoBERTa's."""
    hf.main(["export", str(roberta.run), str(tmp_path / "theirs")])
    hf.main(["import", str(tmp_path / "theirs"), str(tmp_path / "again")])
    before, after = weights(roberta.run), weights(tmp_path / "again")
    for key in ("config", "tokenizer", "tokenizer_hash"):
        assert before[key] == after[key]
    torch.testing.assert_close(after["model"], before["model"], rtol=0, atol=0)
    theirs, original = (
        transformers.AutoTokenizer.from_pretrained(folder)
        for folder in (tmp_path / "theirs", roberta.folder)
    )
    assert_same_tokens(tiktoken.Encoding(**encoding_arguments(gpt2_state())), theirs)
    for text in ["  two  spaces\nand a line ", " array", *random_texts(30)]:
        offsets = [t(text, return_offsets_mapping=True).offset_mapping for t in (theirs, original)]
        assert offsets[0] == offsets[1]


@pytest.mark.slow
def test_an_imported_run_is_a_run(roberta, corpus_file, cache, tmp_path, capsys):
    """Fine-tuning and pre-training with another scheme start from it; resuming is refused."""
    start = finetune.read_start(str(roberta.run))
    model = finetune.make_model(start, "cola", 9)
    assert torch.equal(model.encoder.tok.weight, start["model"]["encoder.tok.weight"])
    sizes = "--n_layer 2 --n_head 3 --d_model 24 --d_ff 48 --block_size 9"
    flags = f"--tokenizer gpt2 --pe t5 --objective pplm --steps 2 --init_from {roberta.run}"
    run_train(corpus_file, cache, tmp_path / "more", *shlex.split(f"{sizes} {flags}"))
    assert "27 tensors loaded" in capsys.readouterr().out
    error = one_line(capsys, run_train, corpus_file, cache, roberta.run, "--resume")
    assert "holds another run" in error


# --------------------------------------------------------------------------------------------------
# Export


@pytest.fixture
def export(corpus, tmp_path):
    """export("t5") exports a model whose every weight matters to tmp_path / "theirs" -> the model.
    task: it's a fine-tuned model."""

    def export(pe="abs", objective="mlm", task=None, norm="post"):
        torch.manual_seed(3)
        encoder = Encoder(EncoderConfig(8192, pe, 2, 4, 32, 48, 140, norm_eps=1e-3, norm=norm))
        arguments = encoding_arguments(corpus.tokenizer)
        encoder.tokenizer = tiktoken.Encoding(**arguments)
        model = Pretraining(encoder, ObjectiveConfig(objective))
        checkpoint = {
            "args": defaults(ObjectiveConfig) | {"objective": objective},
            "command": f"python train.py --pe {pe} --objective {objective}",
            "config": asdict(encoder.config),
            "data": {"dataset": "some text"},
            "step": 7,
            "tokenizer": arguments,
        }
        row = {"task": task or "cola", "seed": 1, "lr": 1e-4, "metrics": {"accuracy": 0.625}}
        (tmp_path / "results.jsonl").write_text(json.dumps(row) + "\n")
        if task:
            model = finetune.Classifier(encoder, task, 40)
            row |= {"ckpt": "some run/tuned.pt (rte)", "recipe": "electra", "n_train": 99}
            row |= {"epochs": 3, "batch_size": 8, "length": 40}
            checkpoint |= {"task": task, "classes": finetune.TASKS[task].classes, "row": row}
        for p in model.eval().parameters():
            p.data.add_(0.1 * torch.randn_like(p))
        torch.save({**checkpoint, "model": model.state_dict()}, tmp_path / "run.pt")
        hf.main(["export", str(tmp_path / "run.pt"), str(tmp_path / "theirs")])
        return model

    return export


@pytest.mark.parametrize("pe", [*hf.ARCHITECTURES, "t5+lsin"])
def test_an_exported_model_computes_the_same(export, tmp_path, pe):
    """Opened with its mlm head, and by AutoModel."""
    model, folder = export(pe), tmp_path / "theirs"
    auto = transformers.AutoModelForMaskedLM
    theirs, info = auto.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    for each in (theirs, transformers.AutoModel.from_pretrained(folder)):
        assert_same(model, each, OWN_ORDER, 139)


@pytest.mark.parametrize(
    "objective, auto", [("pplm", "AutoModel"), ("mlm+pmlm+tc", "AutoModelForMaskedLM")]
)
def test_other_objectives_are_exported_without_their_heads(export, tmp_path, objective, auto):
    """Without mlm the folder holds the encoder alone; the card has the command and the scores."""
    model = export("abs+t5", objective)
    theirs = getattr(transformers, auto).from_pretrained(tmp_path / "theirs")
    assert theirs.config.architectures == [type(theirs).__name__]
    assert_same(model, theirs, OWN_ORDER, 21)
    card = (tmp_path / "theirs" / "README.md").read_text()
    assert f"\n    python train.py --pe abs+t5 --objective {objective}\n" in card
    assert "- cola, seed 1: {'accuracy': 0.625}" in card


@pytest.mark.parametrize("pe, task", [("abs", "mnli"), ("abs+t5", "stsb")])
def test_a_classifier_is_exported_with_its_labels(export, tmp_path, pe, task):
    """From a pair of texts to scores, both give the same. The card has a legal command."""
    model, folder = export(pe, task=task), tmp_path / "theirs"
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(folder)
    labels = dict(enumerate(finetune.TASKS[task].classes or ["score"]))
    assert theirs.config.id2label == labels
    texts = (PARIS, "the lazy é")
    ids = finetune.encode(texts, model.encoder.tokenizer, model.encoder.config, 40)
    batch = transformers.AutoTokenizer.from_pretrained(folder)(*texts, return_tensors="pt")
    with torch.no_grad():
        own, given = model(torch.tensor([ids]), None), theirs(**batch).logits.squeeze(-1)
    torch.testing.assert_close(given, own, rtol=0, atol=1e-5)
    command = re.search(r"^    python finetune.py (.*)$", (folder / "README.md").read_text(), re.M)
    args = finetune.parse_args(shlex.split(command[1]))
    assert (args.task, args.ckpt, args.lr) == (task, "some run/tuned.pt", [1e-4])
    assert (args.epochs, args.length, args.limit_train) == (3, 40, 99)


def test_exported_tokenizer(export, tmp_path):
    """It splits text as tiktoken does, joins pairs as finetune.py does, and its offsets do not
    include the space before a word."""
    ours = export().encoder.tokenizer
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "theirs")
    assert_same_tokens(ours, theirs)
    a, b = [[i + 8 for i in ours.encode_ordinary(text)] for text in (PARIS, "aaa")]
    assert theirs(PARIS, "aaa")["input_ids"] == [0, *a, 2, *b, 2]
    assert theirs(f"{PARIS} [MASK].")["input_ids"] == [0, *a, 3, ord(".") + 8, 2]
    batch = theirs([PARIS, "aaa"], padding=True)
    assert batch.keys() == {"input_ids", "attention_mask"} and batch["input_ids"][1][-1] == 1
    assert len(theirs) == ours.n_vocab and theirs.model_max_length == 140
    text = "the quick dog"
    spans = theirs(text, return_offsets_mapping=True, add_special_tokens=False).offset_mapping
    assert "".join(text[start:end] for start, end in spans) == "thequickdog"


# --------------------------------------------------------------------------------------------------
# Wrong input


UNKNOWN = [dict(pe="rel_k"), dict(pe="rope+t5"), dict(objective="clm"), dict(norm="pre")]
UNKNOWN += [dict(task="squad"), dict(pe="rope", task="cola")]


@pytest.mark.parametrize("changes", UNKNOWN, ids=str)
def test_what_transformers_does_not_have_is_refused(export, tmp_path, capsys, changes):
    """A model without a counterpart in transformers is refused, and nothing is written."""
    assert "none, abs, sin, lsin" in one_line(capsys, partial(export, **changes))
    assert not (tmp_path / "theirs").exists()


MISTAKES = {
    "export nowhere new": "no checkpoint",
    "import /nowhere new": "cannot be read",
    "export nowhere .": "already exists",
    "send nowhere new": "invalid choice",
}


def test_wrong_input_is_one_line(tmp_path, monkeypatch, capsys):
    """A missing source, an existing target and a missing package are refused."""
    monkeypatch.chdir(tmp_path)
    for flags, message in MISTAKES.items():
        assert message in one_line(capsys, hf.main, flags.split())
    monkeypatch.setattr(hf, "transformers", None)
    assert "pip install transformers" in one_line(capsys, hf.main, ["export", "run", "new"])


# fmt: off
@pytest.mark.slow
@pytest.mark.parametrize("file, old, new, message", [
    ("config.json", '"gelu"', '"relu"', "its hidden_act is relu"),
    ("config.json", '"num_hidden_layers": 2', '"num_hidden_layers": 3', "missing roberta."),
    ("config.json", '"num_hidden_layers": 2', '"num_hidden_layers": 1', "extra roberta."),
    ("vocab.json", '"<|endoftext|>"', '"another"', "tokens are not GPT-2's"),
])
# fmt: on
def test_what_is_not_roberta_is_refused(roberta, tmp_path, capsys, file, old, new, message):
    """Another activation, a missing or additional layer and other tokens give no run."""
    folder, run = tmp_path / "edited", tmp_path / "run"
    shutil.copytree(roberta.folder, folder)
    text = (folder / file).read_text()
    assert old in text
    (folder / file).write_text(text.replace(old, new))
    assert message in one_line(capsys, hf.main, ["import", str(folder), str(run)])
    assert not run.exists()
