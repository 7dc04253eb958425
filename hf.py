"""RoBERTa's weights in, ours out, through transformers (pip install transformers).

    python hf.py import FacebookAI/roberta-base out/roberta     # a name of the hub, or a folder
    python hf.py export out/my-run my-model                     # a run
    python hf.py export out/my-run/finetuned-docs.pt my-tuned   # with its labels

What comes in is a run folder that every program here takes. What goes out (KINDS) opens as
AutoModelForMaskedLM; AutoModel without mlm; AutoModelForSequenceClassification when fine-tuned.

No number changes, only its place. RoBERTa counts GPT-2's tokens in another order, and has <s> <pad>
</s> <unk> <mask> and three fillers for our specials. Its positions start at row 2, after the pads'
row; row 0, never used, is our unknown position. sin and lsin go out as tables up to max_len.
RoBERTa learned A </s></s> B; the programs here write one [SEP] (departure).
"""

import os
import re
import shlex
from pathlib import Path

import torch

import common
from data import encoding_arguments, gpt2_state
from model import N_SPECIALS, UNKNOWN_POS, Encoder, EncoderConfig, Positions, load
from objectives import ObjectiveConfig, Pretraining

try:
    import transformers
    from tokenizers import AddedToken, ByteLevelBPETokenizer, processors
    from transformers.convert_slow_tokenizer import bytes_to_unicode
except ImportError:
    transformers = None

# The components of a scheme -> the models of transformers that compute the same.
# fmt: off
KINDS = {
    "none": "roberta", "abs": "roberta", "sin": "roberta", "lsin": "roberta",
    "t5": "mpnet", "abs+t5": "mpnet", "sin+t5": "mpnet", "lsin+t5": "mpnet", "rope": "roformer",
}
# fmt: on
# A field of EncoderConfig -> its name there.
SHAPE = {
    "vocab_size": "vocab_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "d_model": "hidden_size",
    "d_ff": "intermediate_size",
    "norm_eps": "layer_norm_eps",
    "dropout": "hidden_dropout_prob",
    "attn_dropout": "attention_probs_dropout_prob",
}
# What else makes a model RoBERTa.
FIXED = {
    "model_type": "roberta",
    "hidden_act": "gelu",
    "position_embedding_type": "absolute",
    "type_vocab_size": 1,
    "pad_token_id": 1,
    "is_decoder": False,
    "tie_word_embeddings": True,
}
ROLES = dict(cls_token="[CLS]", pad_token="[PAD]", sep_token="[SEP]", mask_token="[MASK]")


def layers(net):
    """-> weight and bias of every linear layer and LayerNorm. All these models have the same ones
    in the same order; q, k and v, which are one layer of ours, are taken apart."""
    for name, module in net.named_modules():
        if isinstance(module, (torch.nn.Linear, torch.nn.LayerNorm)):
            n = 3 if name.endswith("qkv") else 1
            for pair in zip(module.weight.chunk(n), module.bias.chunk(n)):
                yield from pair


def check(encoder, theirs, where):
    """Do both make the same of two rows of words? Raises ValueError: transformers has changed."""
    ids = torch.randint(encoder.config.cls_id, (2, encoder.config.max_len))
    hidden = theirs.eval().base_model(torch.tensor(where)[ids])[0]
    apart = (encoder.eval()(ids) - hidden).abs().max()
    print(f"checked: hidden states of two random rows differ by {apart:.1e} at most")
    if not apart < 1e-3:
        raise ValueError(f"transformers {transformers.__version__} computes something else")


def spelled(arguments):
    """Arguments of tiktoken.Encoding -> our ids' names as in GPT-2's files: bytes are letters."""
    letters = bytes_to_unicode()
    words = [token.decode("latin-1").translate(letters) for token in arguments["mergeable_ranks"]]
    return words + list(arguments["special_tokens"])


def fetch(kind, source, **options):
    """One of transformers' Auto classes reads. Raises ValueError, one line whatever was wrong."""
    try:
        return getattr(transformers, kind).from_pretrained(source, **options)
    except Exception as error:  # a name, the network, a damaged file: many kinds of complaint
        raise ValueError(f"{source} cannot be read: {error!r:.300}") from None


def find_ids(tokenizer, size, names):
    """-> their id for each of our names, a permutation of range(size). Raises ValueError."""
    ids = tokenizer.get_vocab()
    ids |= {name: getattr(tokenizer, f"{role}_id") for role, name in ROLES.items()}
    # <unk> and the three fillers are left over, and so are our four spare ones.
    where = [ids.get(name) for name in names[:-4]]
    left = sorted(set(range(size)) - set(where))
    if None in where or len(left) != 4:
        raise ValueError(f"{tokenizer.name_or_path}: its tokens are not GPT-2's and 8 specials")
    return where + left


def import_run(source, run):
    """A RoBERTa -> a run folder. Raises ValueError on what is not like RoBERTa."""
    config = fetch("AutoConfig", source)
    for key, value in FIXED.items():
        if getattr(config, key, value) != value:
            raise ValueError(f"{source} is not RoBERTa: its {key} is {getattr(config, key)}")
    state = gpt2_state()
    arguments = encoding_arguments(state)
    where = find_ids(fetch("AutoTokenizer", source), config.vocab_size, spelled(arguments))
    # All weights must be there, and no others; but roberta-base has a pooler, never trained.
    theirs, info = fetch("AutoModelForMaskedLM", source, output_loading_info=True)
    wrong = [f"missing {key}" for key in info["missing_keys"]]
    wrong += [f"extra {key}" for key in info["unexpected_keys"] if "pooler" not in key]
    if wrong:
        raise ValueError(f"{source} is not RoBERTa: {', '.join(sorted(wrong)[:3])}")
    shape = {ours: getattr(config, name) for ours, name in SHAPE.items()}
    cfg = EncoderConfig(max_len=config.max_position_embeddings - 2, **shape)
    model = Pretraining(Encoder(cfg), ObjectiveConfig("mlm"))
    for own, given in zip(layers(model), layers(theirs.float())):
        own.copy_(given)
    decoder = theirs.lm_head.decoder  # its weight is the word embedding
    model.encoder.tok.weight.zero_()[: len(where)] = decoder.weight[where]
    model.objectives["mlm"].bias.copy_(decoder.bias[where])
    at = theirs.roberta.embeddings
    rows = at.position_embeddings.weight + at.token_type_embeddings.weight
    model.encoder.pe.parts["abs"].table.weight.copy_(rows.roll(-2, 0)[:-1])  # not the pads'
    check(model.encoder, theirs, where)
    run.mkdir(parents=True)
    common.write_torch(
        run / "ckpt.pt",
        {
            "args": {"objective": "mlm", "cache": "cache"},
            "n_micro": 1,
            "step": 0,
            "command": f"python hf.py import {source} {run}",
            "data": {"dataset": source, "tokens": {}},
            "tokenizer": arguments,
            "tokenizer_hash": state["hash"],
            "config": vars(cfg),
            "model": model.state_dict(),
        },
    )


def new_model(run, encoder, checkpoint):
    """-> a model of transformers like a run's, weights random. Raises ValueError if none is."""
    cfg, weights, task = encoder.config, checkpoint["model"], "task" in checkpoint
    kind = KINDS.get("+".join(sorted(encoder.pe.parts)))
    # Other heads: RoFormer's has GELU, a span's or a probe's one layer. clm looks left only.
    other_head = task and (kind == "roformer" or "head.4.weight" not in weights)
    pre_norm = getattr(cfg, "norm", "post") != "post"
    if kind is None or other_head or pre_norm or "objectives.clm.bias" in weights:
        raise ValueError(
            f"{run}, pe {cfg.pe}, has no class in transformers. What can go: "
            f"{', '.join(KINDS)}; no clm, no --norm pre; fine-tuned: no rope, no span, no probe"
        )
    shape = FIXED | {name: getattr(cfg, ours) for ours, name in SHAPE.items()}
    shape |= {
        "model_type": kind,
        "max_position_embeddings": cfg.max_len + 2,
        "tie_word_embeddings": encoder.pe.token_scale == 1,
    }  # sin scales words, going in
    if task:
        shape["id2label"] = dict(enumerate(checkpoint["classes"] or ["score"]))
        shape["label2id"] = {label: i for i, label in shape["id2label"].items()}
    auto = "AutoModelForSequenceClassification" if task else "AutoModelForMaskedLM"
    return getattr(transformers, auto).from_config(transformers.AutoConfig.for_model(**shape))


def export_run(run, folder):
    """A run or a fine-tuned model -> a folder of transformers'. Raises ValueError on others."""
    encoder, checkpoint = load(run), common.read_checkpoint(run)
    cfg, pe, weights = encoder.config, encoder.pe, checkpoint["model"]
    theirs = new_model(run, encoder, checkpoint)
    # In the order of both: the encoder, then a task's head or mlm's, where there is one.
    ours = ("head.", "objectives.mlm.dense", "objectives.mlm.norm")
    head = [value for key, value in weights.items() if key.startswith(ours)]
    for given, own in zip([*layers(encoder), *head], layers(theirs)):
        own.copy_(given)
    # Specials come first: positions begin behind [PAD]'s number, which is always 1 in MPNet.
    where = [*range(N_SPECIALS, cfg.vocab_size), *range(N_SPECIALS)]
    base, words = theirs.base_model, encoder.tok.weight[: cfg.vocab_size]
    at = base.embeddings
    at.word_embeddings.weight[where] = words * pe.token_scale
    if "objectives.mlm.bias" in weights:
        decoder = theirs.get_output_embeddings()
        decoder.weight[where] = words
        decoder.bias[where] = weights["objectives.mlm.bias"]
    if hasattr(at, "position_embeddings"):  # RoFormer has none
        part, pos = pe.part_with["embed"], torch.arange(-2, cfg.max_len).clamp(min=UNKNOWN_POS)
        at.position_embeddings.weight[:] = part.embed(Positions(pos[:, None]))[:, 0] if part else 0
    if hasattr(at, "token_type_embeddings"):  # MPNet has none
        at.token_type_embeddings.weight.zero_()
    if "t5" in pe.parts:  # all rows but the hidden pairs'
        base.encoder.relative_attention_bias.weight.copy_(pe.parts["t5"].table.weight[:-1])
    check(encoder, theirs, where)
    folder.mkdir(parents=True)
    (theirs if head else base).save_pretrained(folder)
    write_tokenizer(folder, dict(zip(spelled(checkpoint["tokenizer"]), where)), cfg.max_len)
    (folder / "README.md").write_text(card(run, checkpoint), encoding="utf-8")


def write_tokenizer(folder, vocab, max_len):
    """{name: id there}, in the order of our ids -> what AutoTokenizer opens."""
    # tiktoken joins the two neighbours that make the token of lowest rank: every cut is a merge.
    merges = []
    for name in list(vocab)[:-N_SPECIALS]:
        for cut in range(1, len(name)):
            parts = name[:cut], name[cut:]
            if set(parts) <= vocab.keys():
                merges.append(parts)
    tokenizer = ByteLevelBPETokenizer(vocab, merges)  # it knows GPT-2's pattern
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 2), ("[CLS]", 0))
    # [MASK] takes the space before it along, as words do.
    tokenizer.add_special_tokens(["[CLS]", "[PAD]", "[SEP]", AddedToken("[MASK]", lstrip=True)])
    tokenizer.save(f"{folder}/tokenizer.json")
    common.write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **ROLES,
            "model_max_length": max_len,
            "model_input_names": ["input_ids", "attention_mask"],
        },
    )


def card(run, checkpoint):
    """-> the model card: what it learned from and how, the command, its scores."""
    row, args, command = map(checkpoint.get, ("row", "args", "command"))
    if row:
        start = re.sub(r"(?<=^scratch), .*|(?<=\.pt) \(\w+\)$", "", row["ckpt"])
        words = ["--task", checkpoint["task"], "--ckpt", start, "--limit_train", row["n_train"]]
        for flag in ("recipe", "lr", "epochs", "batch_size", "length"):
            words += [f"--{flag}", row[flag]]
        command = f"python finetune.py {shlex.join(map(str, words))}"
    elif command is None:  # a run of before commands were kept
        silent = ("out_dir", "cache", "resume")
        flags = [f"{k} {v}" for k, v in args.items() if k not in silent and v is not None]
        command = f"train.py with {', '.join(flags)}"
    folder = run if os.path.isdir(run) else os.path.dirname(run)
    rows = [row] if row else common.read_rows(os.path.join(folder, "results.jsonl"))
    scores = [f"- {row['task']}, seed {row['seed']}: {row['metrics']}\n" for row in rows]
    return f"""---
library_name: transformers
---
Positions: {checkpoint["config"]["pe"]}. Trained on: {args["objective"] if args else row["task"]},
{checkpoint["step"]} steps, data {checkpoint["data"]["dataset"]}.

    {command}

""" + "".join(scores)


def main(argv=None):
    directions = {"import": import_run, "export": export_run}
    parser = common.Parser("hf.py import|export SOURCE TARGET", __doc__)
    parser.add_argument("direction", choices=directions)
    parser.add_argument("source")
    parser.add_argument("target", type=Path)
    args = parser.parse_args(argv)
    if transformers is None:
        parser.error("hf.py needs transformers: pip install transformers")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    with common.one_line_errors(), torch.no_grad():
        if args.target.exists():
            raise ValueError(f"{args.target} is there already: name another")
        directions[args.direction](args.source, args.target)


if __name__ == "__main__":
    main()
