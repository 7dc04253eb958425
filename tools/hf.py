"""Import RoBERTa's weights as a run, or export a run to transformers (needs requirements-dev.txt).

    python -m tools.hf import FacebookAI/roberta-base out/roberta    # a name on the hub or a folder
    python -m tools.hf export out/my-run my-model                    # a run
    python -m tools.hf export out/my-run/finetuned-docs.pt my-tuned  # a fine-tuned model

Every program here takes an imported run. An exported one opens as AutoModelForMaskedLM, as
AutoModel if it has no mlm head, or as AutoModelForSequenceClassification, with its labels, if it
was fine-tuned. ARCHITECTURES below lists the schemes that can be exported.

Weights are copied unchanged, but their order differs. RoBERTa numbers GPT-2's tokens differently,
and has <s> <pad> </s> <unk> <mask> and three fillers as special tokens. Its positions start at row
2 of the table, after the row of padding; row 0, which it never uses, becomes the masked position.
sin and lsin are exported as tables of max_len positions. RoBERTa was trained on pairs
A </s></s> B, while the programs here write a single [SEP] between A and B (deviation).
"""

import os
import shlex
from dataclasses import asdict
from pathlib import Path

import torch
import transformers
from tokenizers import AddedToken, ByteLevelBPETokenizer, processors
from transformers.convert_slow_tokenizer import bytes_to_unicode

from lib.bpe import encoding_arguments, gpt2_state
from lib.config import Parser, UserError, one_line_errors
from lib.files import make_folder, opening, read_checkpoint, write_checkpoint, write_json
from lib.sources import check_hub
from model import N_SPECIALS, UNKNOWN_POS, Encoder, EncoderConfig, Positions, load, parse_pe
from objectives import ObjectiveConfig, Pretraining

# A scheme -> the architecture in transformers that computes the same.
# fmt: off
ARCHITECTURES = {
    "none": "roberta", "abs": "roberta", "sin": "roberta", "lsin": "roberta",
    "t5": "mpnet", "abs+t5": "mpnet", "sin+t5": "mpnet", "lsin+t5": "mpnet", "rope": "roformer",
}
# fmt: on
CONSTANTS = ("t5_max_distance", "rope_base", "rope_scale")  # that transformers cannot change
# A field of EncoderConfig -> its name in transformers.
SIZES = {
    "vocab_size": "vocab_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "d_model": "hidden_size",
    "d_ff": "intermediate_size",
    "norm_eps": "layer_norm_eps",
    "dropout": "hidden_dropout_prob",
    "attn_dropout": "attention_probs_dropout_prob",
}
# The rest of RoBERTa's configuration.
ROBERTA = {
    "model_type": "roberta",
    "hidden_act": "gelu",
    "position_embedding_type": "absolute",
    "type_vocab_size": 1,
    "pad_token_id": 1,
    "is_decoder": False,
    "tie_word_embeddings": True,
}
SPECIALS = dict(cls_token="[CLS]", pad_token="[PAD]", sep_token="[SEP]", mask_token="[MASK]")


def their_sizes(cfg):
    """EncoderConfig -> the sizes of a model of transformers. RoBERTa's positions start at 2."""
    sizes = {theirs: getattr(cfg, ours) for ours, theirs in SIZES.items()}
    return sizes | {"max_position_embeddings": cfg.max_len + 2}


def linears_and_norms(net):
    """Yield the weight and the bias of every linear layer and LayerNorm. All these architectures
    have the same ones in the same order, once our qkv is split into q, k and v."""
    for name, module in net.named_modules():
        if isinstance(module, (torch.nn.Linear, torch.nn.LayerNorm)):
            n = 3 if name.endswith("qkv") else 1
            for weight, bias in zip(module.weight.chunk(n), module.bias.chunk(n)):
                yield weight
                yield bias


def compare_hidden_states(encoder, theirs, their_ids):
    """Raise UserError if the two models differ on two random sequences, which would mean that
    transformers has changed."""
    ids = torch.randint(encoder.config.cls_id, (2, encoder.config.max_len))
    hidden = theirs.eval().base_model(torch.tensor(their_ids)[ids])[0]
    difference = (encoder.eval()(ids) - hidden).abs().max()
    print(f"checked: the hidden states of two random sequences differ by {difference:.1e} at most")
    if not difference < 1e-3:
        raise UserError(f"transformers {transformers.__version__} gives other hidden states")


def token_names(arguments):
    """Arguments of tiktoken.Encoding -> the name of each id, as in GPT-2's vocab.json, in which
    each byte is written as a printable character."""
    characters = bytes_to_unicode()
    tokens = [
        token.decode("latin-1").translate(characters) for token in arguments["mergeable_ranks"]
    ]
    return tokens + list(arguments["special_tokens"])


# --------------------------------------------------------------------------------------------------
# Import


def from_pretrained(auto_class, source, **options):
    """transformers' from_pretrained, with a UserError for anything that fails."""
    try:
        return getattr(transformers, auto_class).from_pretrained(source, **options)
    except Exception as error:  # a wrong name, no network, a damaged file: many exception types
        raise UserError(f"{source} cannot be read: {error!r:.300}") from None


def match_ids(tokenizer, size, names):
    """-> for each of our ids, the id of the same token in their tokenizer; a permutation of
    range(size). Raises UserError."""
    ids = tokenizer.get_vocab()
    ids |= {name: getattr(tokenizer, f"{role}_id") for role, name in SPECIALS.items()}
    # Our four spare special tokens get the ids that remain: <unk> and the three fillers.
    their_ids = [ids.get(name) for name in names[:-4]]
    remaining = sorted(set(range(size)) - set(their_ids))
    if None in their_ids or len(remaining) != 4:
        raise UserError(f"{tokenizer.name_or_path}: its tokens are not GPT-2's plus 8 specials")
    return their_ids + remaining


def import_run(source, run):
    """A RoBERTa model -> a run folder. Raises UserError if the model is not RoBERTa."""
    if not os.path.isdir(source):
        check_hub()
    config = from_pretrained("AutoConfig", source)
    for key, value in ROBERTA.items():
        if getattr(config, key, value) != value:
            raise UserError(f"{source} is not RoBERTa: its {key} is {getattr(config, key)}")
    arguments = encoding_arguments(gpt2_state())
    tokenizer = from_pretrained("AutoTokenizer", source)
    their_ids = match_ids(tokenizer, config.vocab_size, token_names(arguments))
    theirs, info = from_pretrained("AutoModelForMaskedLM", source, output_loading_info=True)
    if info["missing_keys"]:
        raise UserError(f"{source} is not RoBERTa: it has no {min(info['missing_keys'])}")

    sizes = {ours: getattr(config, name) for ours, name in SIZES.items()}
    cfg = EncoderConfig(max_len=config.max_position_embeddings - 2, **sizes)
    objective = ObjectiveConfig("mlm")
    model = Pretraining(Encoder(cfg), objective)
    for own, given in zip(linears_and_norms(model), linears_and_norms(theirs.float())):
        own.copy_(given)
    decoder = theirs.lm_head.decoder  # its weight is the token embedding
    model.encoder.tok.weight.zero_()[: len(their_ids)] = decoder.weight[their_ids]
    model.objectives["mlm"].bias.copy_(decoder.bias[their_ids])
    embeddings = theirs.roberta.embeddings
    positions = embeddings.position_embeddings.weight + embeddings.token_type_embeddings.weight
    table = model.encoder.scheme.parts["Absolute"].table.weight
    table.copy_(positions.roll(-2, 0)[:-1])  # rows 2, 3, ..., then 0; row 1 is for padding
    compare_hidden_states(model.encoder, theirs, their_ids)
    make_folder(run)
    checkpoint = {
        "args": asdict(objective) | {"dataset": source, "cache": "cache"},
        "command": shlex.join(["python", "-m", "tools.hf", "import", source, str(run)]),
        "identity": {"imported from": source},  # so that it cannot be resumed
        "step": 0,
        "data": {"dataset": source},
        "tokenizer": arguments,
        "config": asdict(cfg),
        "model": model.state_dict(),
    }
    write_checkpoint(run / "ckpt.pt", checkpoint)


# --------------------------------------------------------------------------------------------------
# Export


def new_model(run, encoder, checkpoint):
    """-> a randomly initialized model of transformers with the run's architecture. Raises
    UserError if transformers has none."""
    cfg, weights, task = encoder.config, checkpoint["model"], "task" in checkpoint
    components = set(parse_pe(cfg.pe))
    kinds = [kind for pe, kind in ARCHITECTURES.items() if set(parse_pe(pe)) == components]
    # RoFormer's classification head has a GELU, and our span head is a single layer.
    other_head = task and (kinds == ["roformer"] or "head.4.weight" not in weights)
    other_pe = any(getattr(cfg, name) != getattr(EncoderConfig(), name) for name in CONSTANTS)
    other = other_head or other_pe or cfg.norm != "post"
    if not kinds or other or "objectives.clm.bias" in weights:
        raise UserError(
            f"{run}, --pe {cfg.pe}: transformers has no such model. Schemes to export: "
            f"{', '.join(ARCHITECTURES)}, with the default --{', --'.join(CONSTANTS)}; not clm or "
            "--norm pre, nor rope or SQuAD if fine-tuned"
        )
    config = ROBERTA | their_sizes(cfg) | {"model_type": kinds[0]}
    if encoder.scheme.token_scale != 1:  # sin, lsin scale the input embeddings only, so untie them
        config["tie_word_embeddings"] = False
    if task:
        config["id2label"] = dict(enumerate(checkpoint["classes"] or ["score"]))
        config["label2id"] = {label: i for i, label in config["id2label"].items()}
    auto_class = "AutoModelForSequenceClassification" if task else "AutoModelForMaskedLM"
    return getattr(transformers, auto_class).from_config(
        transformers.AutoConfig.for_model(**config)
    )


def export_run(run, folder):
    """A run or a fine-tuned model -> a folder that transformers opens. Raises UserError if it
    cannot be exported."""
    checkpoint, encoder = read_checkpoint(run), load(run)
    cfg, scheme, weights = encoder.config, encoder.scheme, checkpoint["model"]
    theirs = new_model(run, encoder, checkpoint)
    # First the encoder, then the head of a task or of mlm, if there is one.
    names = ("head.", "objectives.mlm.dense", "objectives.mlm.norm")
    head = [value for key, value in weights.items() if key.startswith(names)]
    for given, own in zip([*linears_and_norms(encoder), *head], linears_and_norms(theirs)):
        own.copy_(given)
    # Special tokens come first: MPNet's padding has id 1, and positions start after it.
    their_ids = [*range(N_SPECIALS, cfg.vocab_size), *range(N_SPECIALS)]
    base, tokens = theirs.base_model, encoder.tok.weight[: cfg.vocab_size]
    embeddings = base.embeddings
    embeddings.word_embeddings.weight[their_ids] = tokens * scheme.token_scale
    if "objectives.mlm.bias" in weights:
        decoder = theirs.get_output_embeddings()
        decoder.weight[their_ids] = tokens
        decoder.bias[their_ids] = weights["objectives.mlm.bias"]
    if hasattr(embeddings, "position_embeddings"):  # RoFormer has none
        pos = torch.arange(-2, cfg.max_len).clamp(min=UNKNOWN_POS)
        table = embeddings.position_embeddings.weight.zero_()
        table[:, None] += scheme.embed(Positions(pos[:, None]))  # (max_len + 2, 1, C) or 0
    if hasattr(embeddings, "token_type_embeddings"):  # MPNet has none
        embeddings.token_type_embeddings.weight.zero_()
    if "T5Bias" in scheme.parts:  # all rows except that of masked positions
        table = scheme.parts["T5Bias"].table.weight[:-1]
        base.encoder.relative_attention_bias.weight.copy_(table)
    compare_hidden_states(encoder, theirs, their_ids)
    make_folder(folder)
    names = token_names(checkpoint["tokenizer"])
    with opening(folder):
        (theirs if head else base).save_pretrained(folder)
        write_tokenizer(folder, dict(zip(names, their_ids)), cfg.max_len)


def write_tokenizer(folder, vocab, max_len):
    """Write the files that AutoTokenizer opens. vocab: {token name: their id}, in the order of our
    ids."""
    # tiktoken joins the two neighbors that form the token of lowest rank, so every way to split a
    # token into two is a merge.
    merges = []
    for name in list(vocab)[:-N_SPECIALS]:
        for cut in range(1, len(name)):
            parts = name[:cut], name[cut:]
            if set(parts) <= vocab.keys():
                merges.append(parts)
    tokenizer = ByteLevelBPETokenizer(vocab, merges)  # splits text with GPT-2's pattern
    # As RoBERTa's, offsets do not include the space before a word.
    trim = processors.ByteLevel(add_prefix_space=False, trim_offsets=True)
    add_specials = processors.BertProcessing(("[SEP]", 2), ("[CLS]", 0))
    tokenizer.post_processor = processors.Sequence([trim, add_specials])
    # [MASK] replaces the space before it too, as a token that begins a word would.
    tokenizer.add_special_tokens(["[CLS]", "[PAD]", "[SEP]", AddedToken("[MASK]", lstrip=True)])
    tokenizer.save(f"{folder}/tokenizer.json")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **SPECIALS,
        "model_max_length": max_len,
        "model_input_names": ["input_ids", "attention_mask"],
    }
    write_json(folder / "tokenizer_config.json", config)


def main(argv=None):
    directions = {"import": import_run, "export": export_run}
    with one_line_errors(), torch.no_grad():
        parser = Parser("-m tools.hf import|export SOURCE TARGET", __doc__)
        parser.add_argument("direction", choices=directions)
        parser.add_argument("source", type=os.path.expanduser)
        parser.add_argument("target", type=lambda path: Path(os.path.expanduser(path)))
        args = parser.parse_args(argv)
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        if args.target.exists():
            raise UserError(f"{args.target} already exists: choose another name")
        directions[args.direction](args.source, args.target)


if __name__ == "__main__":
    main()
