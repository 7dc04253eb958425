"""tools/hf.py: RoBERTa in, transformers out, with the same hidden states, logits and token ids."""

import json
import random
import shlex
import shutil
from types import SimpleNamespace

import pytest
import torch
import transformers

import data
import finetune
import objectives
from lib import bpe
from lib.files import read_checkpoint
from tests.conftest import ROOT, one_line, run_train, weights
from tools import hf


@torch.no_grad()
def assert_same(model, theirs, order, L):
    """Hidden states, and logits where both models have them, are equal on sequences of several
    lengths with padding. order: our id of each of their ids."""
    encoder, base = model.encoder, theirs.base_model
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


@pytest.fixture
def roberta(tmp_path, monkeypatch):
    """A folder like that of roberta-base, with random weights and the tokens of a small GPT-2 in
    another order: .folder, .model, .order (our id of each of its ids), and .run, the imported run.
    """
    arguments = read_checkpoint(ROOT / "docs" / "demo.pt")["tokenizer"]
    ranks = arguments["mergeable_ranks"]
    gpt2 = bpe.tokenizer_state("gpt2", arguments["pat_str"], ranks, "<|endoftext|>")
    monkeypatch.setattr(hf, "gpt2_state", lambda: gpt2)
    monkeypatch.setattr(data, "gpt2_state", lambda: gpt2)
    folder, run, n = tmp_path / "roberta", tmp_path / "run", len(ranks)
    tokens, shuffled = hf.token_names(arguments)[:n], random.Random(0).sample(range(n), n)
    names = ["<s>", "<pad>", "</s>", "<unk>", *(tokens[i] for i in shuffled), "<|endoftext|>"]
    names += ["madeupword0000", "madeupword0001", "madeupword0002", "<mask>"]
    cuts = [(token[:i], token[i:]) for token in tokens for i in range(1, len(token))]
    known = set(tokens)
    merges = [f"{a} {b}" for a, b in cuts if {a, b} <= known]
    torch.manual_seed(0)
    sizes = dict(hidden_size=24, intermediate_size=48, num_hidden_layers=2, num_attention_heads=3)
    sizes |= dict(vocab_size=len(names), max_position_embeddings=9 + 2, type_vocab_size=1)
    config = transformers.RobertaConfig(layer_norm_eps=1e-5, initializer_range=0.1, **sizes)
    model = transformers.RobertaForMaskedLM(config).eval()
    model.roberta.pooler = transformers.RobertaModel(config).pooler  # roberta-base has one
    for p in model.parameters():
        p.data.add_(0.2 * torch.randn_like(p) if p.dim() == 1 else 0)
    model.save_pretrained(folder)
    (folder / "vocab.json").write_text(json.dumps({name: i for i, name in enumerate(names)}))
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]))
    hf.main(["import", str(folder), str(run)])
    # [CLS] [PAD] [SEP], a spare one, the tokens, <|endoftext|>, three spare ones, [MASK]
    order = [n + 1, n + 2, n + 3, n + 5, *shuffled, n, n + 6, n + 7, n + 8, n + 4]
    return SimpleNamespace(folder=folder, model=model, order=order, run=run)


@pytest.mark.slow
def test_a_roberta_is_imported_exactly(roberta, tmp_path):
    """The imported run computes what the model computed; exported and imported again, it is the
    same bit for bit. All three tokenizers give the same ids, offsets and padding."""
    model = objectives.load(roberta.run)
    encoder, embeddings = model.encoder, roberta.model.roberta.embeddings
    assert_same(model, roberta.model, roberta.order, 9)
    unused = embeddings.position_embeddings.weight[0] + embeddings.token_type_embeddings.weight[0]
    masked = encoder.scheme.parts["Absolute"].table.weight[-1]
    assert torch.equal(masked, unused), "the masked position is the row that RoBERTa never uses"
    hf.main(["export", str(roberta.run), str(tmp_path / "theirs")])
    hf.main(["import", str(tmp_path / "theirs"), str(tmp_path / "again")])
    before, after = weights(roberta.run), weights(tmp_path / "again")
    assert all(before[key] == after[key] for key in ("config", "tokenizer"))
    torch.testing.assert_close(after["model"], before["model"], rtol=0, atol=0)

    first, n = encoder.config.cls_id, encoder.config.vocab_size
    exported = transformers.AutoTokenizer.from_pretrained(tmp_path / "theirs")
    original = transformers.AutoTokenizer.from_pretrained(roberta.folder)
    assert exported.model_max_length == 9
    assert exported.tokenize("the [MASK].") == ["the", " [MASK]", "."]
    pieces = " the|fox| return|é東|naïve|'ll|I'M| |\n|\t|\xa0|\u3000|2,0|²|\U0001f600|\x1c|\x85|_|["
    rng, texts = random.Random(0), []
    for _ in range(300):
        parts = [*rng.choices(pieces.split("|"), k=20), chr(rng.randrange(0xD800))]
        texts.append("".join(rng.sample(parts, 10)))
    theirs, expected = (
        tokenizer(texts, padding=True, return_offsets_mapping=True)
        for tokenizer in (exported, original)
    )
    assert theirs["attention_mask"] == expected["attention_mask"]
    assert theirs["offset_mapping"] == expected["offset_mapping"]
    own_order = [*range(first, n), *range(first)]  # our id of each exported id
    for text, a, b in zip(texts, theirs["input_ids"], expected["input_ids"]):
        ids = [first, *encoder.tokenizer.encode_ordinary(text), encoder.config.sep_id]
        ids += [encoder.config.pad_id] * (len(a) - len(ids))
        assert [own_order[i] for i in a] == [roberta.order[i] for i in b] == ids


@pytest.mark.slow
def test_an_imported_run_is_a_run(roberta, corpus_file, tmp_path, capsys):
    """Fine-tuning and pre-training with another scheme start from it."""
    start = read_checkpoint(roberta.run)
    model = finetune.new_classifier(start, "", "cola", 9)
    assert torch.equal(model.encoder.tok.weight, start["model"]["encoder.tok.weight"])
    flags = "--n_layer 2 --n_head 3 --d_model 24 --d_ff 48 --block_size 9 --tokenizer gpt2 --pe t5"
    flags = *shlex.split(flags), "--objective", "pplm", "--norm", "post", "--steps", 2
    run_train(corpus_file, str(tmp_path), tmp_path / "more", *flags, "--init_from", roberta.run)
    assert "27 tensors loaded" in capsys.readouterr().out


@pytest.fixture
def export(run, tmp_path):
    """export("--pe t5") exports a run in which every weight matters, or a model that is fine-tuned
    on a task, to tmp_path / "theirs" -> the model."""

    def export(flags, task=None):
        shape = "--preset demo --steps 1 --n_layer 2 --n_head 4 --d_model 32 --block_size 128"
        folder = run("run", f"{shape} {flags}")
        checkpoint = weights(folder)
        checkpoint["config"]["norm_eps"] = 1e-3
        torch.save(checkpoint, folder / "ckpt.pt")
        model = objectives.load(folder)
        if task:
            classes = finetune.TASKS[task].classes
            checkpoint |= {"task": task, "classes": classes}
            model = finetune.Classifier(model.encoder, task, 40).eval()
        for p in model.parameters():
            p.data.add_(0.1 * torch.randn_like(p))
        torch.save(checkpoint | {"model": model.state_dict()}, folder / "ckpt.pt")
        hf.main(["export", str(folder), str(tmp_path / "theirs")])
        return model

    return export


CASES = [(pe, "mlm") for pe in (*hf.ARCHITECTURES, "t5+lsin")]
CASES += [("abs+t5", "pplm"), ("abs+t5", "mlm+pmlm")]


@pytest.mark.slow
@pytest.mark.parametrize("pe, objective", CASES)
def test_an_exported_model_computes_the_same(export, tmp_path, pe, objective):
    """transformers computes the same hidden states, and the same logits if there is an mlm head;
    without one the folder holds the encoder alone."""
    model = export(f"--pe {pe} --objective {objective}")
    auto = "AutoModelForMaskedLM" if "mlm" in model.objectives else "AutoModel"
    theirs = getattr(transformers, auto).from_pretrained(tmp_path / "theirs")
    assert theirs.config.architectures == [type(theirs).__name__]
    assert_same(model, theirs, [*range(8184, 8192), *range(8184)], 127)


@pytest.mark.slow
@pytest.mark.parametrize("pe, task", [("abs", "mnli"), ("abs+t5", "stsb")])
def test_a_classifier_is_exported_with_its_labels(export, tmp_path, pe, task):
    """From a pair of texts to scores, both give the same."""
    model, folder, pair = export(f"--pe {pe}", task), tmp_path / "theirs", ("the fox", "old é")
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(folder)
    assert theirs.config.id2label == dict(enumerate(finetune.TASKS[task].classes or ["score"]))
    ids = finetune.encode(pair, model.encoder.tokenizer, model.encoder.config, 40)
    batch = transformers.AutoTokenizer.from_pretrained(folder)(*pair, return_tensors="pt")
    with torch.no_grad():
        own, given = model(torch.tensor([ids]), None), theirs(**batch).logits.squeeze(-1)
    torch.testing.assert_close(given, own, rtol=0, atol=1e-5)


UNKNOWN = [("--pe rel_k", None), ("--pe rope+t5", None), ("--objective clm", None)]
UNKNOWN += [
    ("--pe rope --rope_scale 2", None),
    ("--norm pre", None),
    ("--pe abs", "squad"),
    ("--pe rope", "cola"),
]


@pytest.mark.parametrize("flags, task", UNKNOWN)
def test_what_transformers_does_not_have_is_refused(export, tmp_path, capsys, flags, task):
    """A model without a counterpart in transformers is refused, and nothing is written."""
    assert "none, abs, sin, lsin" in one_line(capsys, export, flags, task)
    assert not (tmp_path / "theirs").exists()


@pytest.mark.slow
def test_wrong_input_is_one_line(roberta, tmp_path, monkeypatch, capsys):
    """An existing target, and a model that is not RoBERTa (another activation, a missing layer,
    other tokens) are refused, and nothing is written."""
    monkeypatch.chdir(tmp_path)
    assert "exists" in one_line(capsys, hf.main, ["export", "run", "."])
    for file, old, new, message in (
        ("config.json", '"gelu"', '"relu"', "its hidden_act is relu"),
        ("config.json", '"num_hidden_layers": 2', '"num_hidden_layers": 3', "it has no roberta."),
        ("vocab.json", '"<|endoftext|>"', '"another"', "tokens are not GPT-2's"),
    ):
        shutil.copytree(roberta.folder, "edited", dirs_exist_ok=True)
        text = (roberta.folder / file).read_text()
        (tmp_path / "edited" / file).write_text(text.replace(old, new))
        assert message in one_line(capsys, hf.main, ["import", "edited", "new"])
        assert not (tmp_path / "new").exists()
