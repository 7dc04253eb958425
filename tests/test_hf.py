"""tools/hf.py: RoBERTa in, transformers out, with the same hidden states, logits and token ids."""

import json
import random
import re
import shlex
import shutil
from dataclasses import asdict
from types import SimpleNamespace

import pytest
import tiktoken
import torch

import finetune
from data import encoding_arguments, gpt2_state
from lib.config import defaults
from model import Encoder, EncoderConfig
from objectives import ObjectiveConfig, Pretraining
from tests.conftest import WORDS, exit_code, one_line, run_train, weights
from tools import hf, sample

transformers = pytest.importorskip("transformers")

EXPORTED = {
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


def write_merges(file, ranks, characters):
    """GPT-2's merges.txt: the two parts of each token under BPE with the ranks below its own."""
    lines = ["#version: 0.2"]
    for token, rank in ranks.items():
        parts = [bytes([byte]) for byte in token]
        while len(parts) > 2:
            joined = [ranks.get(a + b, rank) for a, b in zip(parts, parts[1:])]
            at = joined.index(min(joined))
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        if len(parts) == 2:
            lines.append(" ".join(part.decode("latin-1").translate(characters) for part in parts))
    file.write_text("\n".join(lines))


@pytest.fixture(scope="module")
def roberta(tmp_path_factory):
    """A folder like that of roberta-base, with random weights and with GPT-2's tokens in another
    order: .folder, .model, .order (our id of each of its ids), and .run, the imported run."""
    try:
        ranks = encoding_arguments(gpt2_state())["mergeable_ranks"]
    except ValueError as error:
        pytest.skip(str(error))
    folder, run = tmp_path_factory.mktemp("roberta"), tmp_path_factory.mktemp("run") / "run"
    characters = hf.bytes_to_unicode()
    tokens = [token.decode("latin-1").translate(characters) for token in ranks]
    shuffled = random.Random(0).sample(range(50256), 50256)
    names = ["<s>", "<pad>", "</s>", "<unk>", *(tokens[i] for i in shuffled), "<|endoftext|>"]
    names += ["madeupword0000", "madeupword0001", "madeupword0002", "<mask>"]
    (folder / "vocab.json").write_text(json.dumps({name: i for i, name in enumerate(names)}))
    write_merges(folder / "merges.txt", ranks, characters)
    torch.manual_seed(0)
    config = transformers.RobertaConfig(
        vocab_size=50265,
        hidden_size=24,
        num_hidden_layers=2,
        num_attention_heads=3,
        intermediate_size=48,
        layer_norm_eps=1e-5,
        max_position_embeddings=9 + 2,
        initializer_range=0.1,
        type_vocab_size=1,
    )
    model = transformers.RobertaForMaskedLM(config).eval()
    for p in model.parameters():
        p.data.add_(0.2 * torch.randn_like(p) if p.dim() == 1 else 0)
    model.save_pretrained(folder)
    hf.main(["import", str(folder), str(run)])
    # [CLS] [PAD] [SEP], a spare one, the tokens, <|endoftext|>, three spare ones, [MASK]
    order = [50257, 50258, 50259, 50261, *shuffled, 50256, 50262, 50263, 50264, 50260]
    return SimpleNamespace(folder=folder, model=model, order=order, run=run)


@pytest.fixture(scope="module")
def exported_again(roberta, tmp_path_factory):
    """The imported run, exported to a folder."""
    folder = tmp_path_factory.mktemp("again") / "theirs"
    hf.main(["export", str(roberta.run), str(folder)])
    return folder


@pytest.mark.slow
def test_a_roberta_is_imported_exactly(roberta):
    """The imported run computes what the model computed, from the same tokens of a text."""
    model = sample.load_pretraining(roberta.run)
    cfg, embeddings = model.encoder.config, roberta.model.roberta.embeddings
    assert (cfg.n_layer, cfg.n_head, cfg.max_len) == (2, 3, 9)
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
def test_exporting_and_importing_again_changes_nothing(roberta, exported_again, tmp_path):
    """Weights, configuration and tokenizer survive the round trip bit for bit."""
    hf.main(["import", str(exported_again), str(tmp_path / "again")])
    before, after = weights(roberta.run), weights(tmp_path / "again")
    for key in ("config", "tokenizer", "tokenizer_hash"):
        assert before[key] == after[key]
    assert before["model"].keys() == after["model"].keys()
    for name, weight in before["model"].items():
        assert torch.equal(weight, after["model"][name])
    command = f"    python -m tools.hf import {roberta.folder} {roberta.run}\n"
    assert command in (exported_again / "README.md").read_text()


@pytest.mark.slow
def test_an_imported_run_is_a_run(roberta, corpus_file, cache, tmp_path, capsys):
    """Sampling, fine-tuning and pre-training with another scheme start from it; resuming is
    refused in one line."""
    sample.main(["--ckpt", str(roberta.run), "--text", "France [MASK]."])
    assert "[MASK]: " in capsys.readouterr().out
    start = finetune.read_start(str(roberta.run), cache)
    model = finetune.make_model(start, "cola", 9, 0)
    assert torch.equal(model.encoder.tok.weight, start["model"]["encoder.tok.weight"])
    sizes = "--n_layer 2 --n_head 3 --d_model 24 --d_ff 48 --block_size 9"
    flags = f"--tokenizer gpt2 --pe t5 --objective pplm --steps 2 --init_from {roberta.run}"
    run_train(corpus_file, cache, tmp_path / "more", *shlex.split(f"{sizes} {flags}"))
    assert "27 tensors loaded" in capsys.readouterr().out
    assert exit_code(run_train, corpus_file, cache, roberta.run, "--resume") == 2
    assert "holds another run" in capsys.readouterr().err


@pytest.mark.slow
def test_exported_gpt2_tokenizer(roberta, exported_again):
    """It splits text as tiktoken does, and its offsets are RoBERTa's, without the space before a
    word."""
    theirs = transformers.AutoTokenizer.from_pretrained(exported_again)
    assert_same_tokens(tiktoken.Encoding(**encoding_arguments(gpt2_state())), theirs)
    original = transformers.AutoTokenizer.from_pretrained(roberta.folder)
    for text in ["sum of the array", "  two  spaces\nand a line ", " array", *random_texts(30)]:
        offsets = [t(text, return_offsets_mapping=True).offset_mapping for t in (theirs, original)]
        assert offsets[0] == offsets[1]


# --------------------------------------------------------------------------------------------------
# Export


@pytest.fixture
def random_run(corpus, tmp_path):
    """random_run("t5") saves a model whose every weight matters to tmp_path / "run"; .export()
    exports it to tmp_path / "theirs"."""

    def make(pe="abs", objective="mlm", norm="post"):
        torch.manual_seed(3)
        encoder = Encoder(EncoderConfig(8192, pe, 2, 4, 32, 48, 140, norm_eps=1e-3, norm=norm))
        model = Pretraining(encoder, ObjectiveConfig(objective)).eval()
        for p in model.parameters():
            p.data.add_(0.1 * torch.randn_like(p))
        arguments = encoding_arguments(corpus.tokenizer)
        encoder.tokenizer = tiktoken.Encoding(**arguments)
        shutil.rmtree(tmp_path / "theirs", ignore_errors=True)
        (tmp_path / "run").mkdir(exist_ok=True)
        checkpoint = {
            "args": defaults(ObjectiveConfig) | {"objective": objective},
            "command": f"python train.py --pe {pe} --objective {objective}",
            "config": asdict(encoder.config),
            "data": {"dataset": "some text"},
            "step": 7,
            "tokenizer": arguments,
            "tokenizer_hash": "",
            "model": model.state_dict(),
        }
        torch.save(checkpoint, tmp_path / "run" / "ckpt.pt")
        return model

    def export(file="run"):
        hf.main(["export", str(tmp_path / file), str(tmp_path / "theirs")])

    make.export = export
    return make


@pytest.mark.parametrize("pe", EXPORTED)
def test_an_exported_model_computes_the_same(random_run, tmp_path, pe):
    """Opened by the class that the folder names, and by AutoModel."""
    model, folder = random_run(pe), tmp_path / "theirs"
    random_run.export()
    auto = transformers.AutoModelForMaskedLM
    theirs, info = auto.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert theirs.config.model_type == EXPORTED[pe]
    for each in (theirs, transformers.AutoModel.from_pretrained(folder)):
        assert_same(model, each, OWN_ORDER, 139)


def test_other_objectives_are_exported_without_their_heads(random_run, tmp_path):
    """Without mlm the folder holds the encoder alone; the card has the command and the scores."""
    for objective, auto in (("pplm", "AutoModel"), ("mlm+pmlm+tc", "AutoModelForMaskedLM")):
        model = random_run("abs+t5", objective)
        row = {"task": "cola", "seed": 1, "lr": 0.01, "metrics": {"accuracy": 0.75}}
        (tmp_path / "run" / "results.jsonl").write_text(json.dumps(row) + "\n")
        random_run.export("run/ckpt.pt")
        theirs = getattr(transformers, auto).from_pretrained(tmp_path / "theirs")
        assert theirs.config.architectures == [type(theirs).__name__]
        assert_same(model, theirs, OWN_ORDER, 21)
        card = (tmp_path / "theirs" / "README.md").read_text()
        assert f"\n    python train.py --pe abs+t5 --objective {objective}\n" in card
        assert f"Trained on: {objective},\n7 steps, data some text." in card
        assert "- cola, seed 1: {'accuracy': 0.75}" in card


@pytest.mark.parametrize(
    "pe, task, kind", [("abs", "mnli", "Roberta"), ("abs+t5", "stsb", "MPNet")]
)
def test_a_classifier_is_exported_with_its_labels(random_run, tmp_path, pe, task, kind):
    """From a pair of texts to scores, both give the same. The card has a legal command."""
    encoder, folder = random_run(pe).encoder, tmp_path / "theirs"
    model = save_classifier(encoder, task, tmp_path)
    random_run.export("tuned.pt")
    auto = transformers.AutoModelForSequenceClassification
    theirs = auto.from_pretrained(folder)
    labels = dict(enumerate(finetune.TASKS[task].classes or ["score"]))
    assert type(theirs).__name__ == f"{kind}ForSequenceClassification"
    assert theirs.config.id2label == labels
    texts = (PARIS, "the lazy é")
    ids = finetune.encode(texts, encoder.tokenizer, encoder.config, 40)
    batch = transformers.AutoTokenizer.from_pretrained(folder)(*texts, return_tensors="pt")
    with torch.no_grad():
        own, given = model(torch.tensor([ids]), None), theirs(**batch).logits.squeeze(-1)
    torch.testing.assert_close(given, own, rtol=0, atol=1e-5)
    card = (folder / "README.md").read_text()
    assert f"Trained on: {task}" in card and "0.625" in card
    command = shlex.split(re.search(r"^    python finetune.py (.*)$", card, re.M)[1])
    args = finetune.parse_args(command)
    assert (args.task, args.ckpt) == (task, "some run/tuned.pt")
    assert (args.lr, args.epochs, args.length, args.limit_train) == ([1e-4], 3, 40, 99)


def save_classifier(encoder, task, folder):
    """Save a fine-tuned model as finetune.py does, as tuned.pt -> the model."""
    model = finetune.Classifier(encoder, task, 40).eval()
    torch.nn.init.normal_(model.head[-1].weight)
    row = {"task": task, "ckpt": "some run/tuned.pt (rte)", "seed": 0, "lr": 1e-4, "epochs": 3}
    row |= {"batch_size": 8, "length": 40, "recipe": "electra", "n_train": 99}
    checkpoint = weights(folder / "run") | {
        "task": task,
        "classes": finetune.TASKS[task].classes,
        "row": row | {"metrics": {"accuracy": 0.625}},
        "model": model.state_dict(),
    }
    torch.save(checkpoint, folder / "tuned.pt")
    return model


def test_exported_tokenizer(random_run, tmp_path):
    """It splits text as tiktoken does, joins pairs as finetune.py does, and its offsets do not
    include the space before a word."""
    ours = random_run().encoder.tokenizer
    random_run.export()
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "theirs")
    assert_same_tokens(ours, theirs)
    a, b = [[i + 8 for i in ours.encode_ordinary(text)] for text in (PARIS, "aaa")]
    assert theirs(PARIS, "aaa")["input_ids"] == [0, *a, 2, *b, 2]
    assert theirs(f"{PARIS} [MASK].")["input_ids"] == [0, *a, 3, ord(".") + 8, 2]
    roles = [getattr(theirs, f"{role}_token_id") for role in ("cls", "pad", "sep", "mask")]
    assert roles == [0, 1, 2, 3]
    batch = theirs([PARIS, "aaa"], padding=True)
    assert batch.keys() == {"input_ids", "attention_mask"} and batch["input_ids"][1][-1] == 1
    assert len(theirs) == ours.n_vocab and theirs.model_max_length == 140
    text = "the quick dog"
    spans = theirs(text, return_offsets_mapping=True, add_special_tokens=False).offset_mapping
    assert all(text[start:end].strip() == text[start:end] for start, end in spans)
    assert "".join(text[start:end] for start, end in spans) == "thequickdog"


# --------------------------------------------------------------------------------------------------
# Wrong input


@pytest.mark.parametrize("pe", ["rel_k", "tupe_r", "rope+t5", "clm", "pre", "squad", "rope, cola"])
def test_what_cannot_be_exported_is_one_line(random_run, tmp_path, capsys, pe):
    """A model without a counterpart in transformers is refused, and nothing is written."""
    file = "run"
    if pe == "clm":
        random_run(objective="clm")
    elif pe == "pre":
        random_run(norm="pre")
    elif pe in ("squad", "rope, cola"):
        model = random_run("rope" if "rope" in pe else "abs")
        save_classifier(model.encoder, pe.split()[-1], tmp_path)
        file = "tuned.pt"
    else:
        random_run(pe)
    assert "none, abs, sin, lsin" in one_line(capsys, random_run.export, file)
    assert not (tmp_path / "theirs").exists()


def test_wrong_input_is_one_line(random_run, tmp_path, monkeypatch, capsys):
    """A missing run, an existing target and a missing package are refused in one line each."""
    random_run()
    run, target = str(tmp_path / "run"), str(tmp_path / "new")
    for message, *arguments in [
        ("no checkpoint", "export", str(tmp_path / "nowhere"), target),
        ("cannot be read", "import", str(tmp_path / "nowhere"), target),
        ("already exists: choose another", "export", run, str(tmp_path)),
        ("already exists: choose another", "import", run, str(tmp_path)),
        ("invalid choice", "send", run, target),
        ("required: target", "export", run),
    ]:
        assert message in one_line(capsys, hf.main, arguments)
    monkeypatch.setattr(hf, "transformers", None)
    assert "pip install transformers" in one_line(capsys, hf.main, ["export", run, target])


@pytest.mark.slow
def test_what_is_not_roberta_is_refused(roberta, tmp_path, capsys):
    """Another activation or architecture, a missing or additional tensor, a damaged file and other
    tokens are each one line, and no run is made."""
    from safetensors.torch import load_file, save_file

    folder, run = tmp_path / "edited", tmp_path / "run"

    def refused():
        return one_line(capsys, hf.main, ["import", str(folder), str(run)])

    config = json.loads((roberta.folder / "config.json").read_text())
    for change, message in [
        ({"hidden_act": "relu"}, "its hidden_act is relu"),
        ({"model_type": "bert"}, "its model_type is bert"),
        ({"model_type": "a new one"}, "cannot be read"),
        ({"num_hidden_layers": 3}, "missing roberta.encoder.layer.2"),
    ]:
        shutil.copytree(roberta.folder, folder, dirs_exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config | change))
        assert message in refused()

    shutil.copytree(roberta.folder, folder, dirs_exist_ok=True)
    tensors = load_file(folder / "model.safetensors")
    tensors["roberta.pooler.dense.weight"] = torch.zeros(24, 24)  # roberta-base has one
    tensors["roberta.encoder.layer.0.adapter.weight"] = torch.zeros(24, 24)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    assert "RoBERTa: extra roberta.encoder.layer.0.adapter.weight\n" in refused()
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:5000])
    assert "cannot be read" in refused()

    shutil.copytree(roberta.folder, folder, dirs_exist_ok=True)
    vocab = json.loads((folder / "vocab.json").read_text())
    vocab["another"] = vocab.pop("<|endoftext|>")
    (folder / "vocab.json").write_text(json.dumps(vocab))
    assert "tokens are not GPT-2's" in refused()
    assert not run.exists()
