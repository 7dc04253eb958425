"""Text -> tokenizer -> token ids on disk -> batches.

    python data.py                                                # the built-in docs, no download
    python data.py --dataset 'books/*.jsonl.xz' --tokenizer bpe   # local files
    python data.py --dataset wikibooks --tokenizer gpt2           # Wikipedia, books (Hugging Face)

Files are txt, jsonl, csv or parquet; gz, xz and bz2 are decompressed. train.py calls the same
code if the data is not prepared yet. There are three stages; a stage whose result exists is
skipped:

    documents   an iterator of texts (lib/sources.py), never all in memory
    tokenizer   GPT-2's byte-level BPE, or one with 8,184 ids trained on the corpus itself
                -> tokenizer.json
    tokens      every document followed by [SEP], in one stream per split
                -> train.bin, val.bin and, last, meta.json

A sequence is [CLS] x_1 ... x_(L-2) [SEP], where x is a block of the stream: it may begin and end
within a sentence and contain several documents with [SEP] between them (deviation: RoBERTa's
FULL-SENTENCES keeps sentences whole). Every 50th document is for validation (docs: every 10th).
"""

import collections
import heapq
import itertools
import math
import operator
import shlex
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import regex  # comes with tiktoken; the same syntax as its patterns
import tiktoken
import torch
from tqdm import tqdm  # comes with datasets

from lib.config import PATH, Parser, catch_errors, setting, validate_config
from lib.files import atomic_write, lock, read_json, write_json
from lib.sources import docs_versions, find_source, short_hash

GPT2_PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
SPECIALS = ("[CLS]", "[PAD]", "[SEP]", "[MASK]", "[spare0]", "[spare1]", "[spare2]", "[spare3]")
BPE_IDS = 8184  # + 8 special tokens = 8192
# Bounds on the BPE's training text. English stays far below all but the first one (50 M characters
# have 0.2 M distinct words, 1.6 MB in all); text without spaces does not.
BPE_SAMPLE = 50_000_000  # characters of text
BPE_WORDS = 1_000_000  # different words counted at a time
BPE_BYTES = 4_000_000  # total bytes of the different words
BPE_WORD = 1000  # characters of a word
ENCODE_CHUNK = 100_000  # characters tokenized at once: bounds memory if a document is one line
READ_AHEAD = 2_000_000  # characters read ahead of the tokenizer
VAL_SEQUENCES, VAL_BATCH = 512, 32  # every run is validated on the same sequences


@dataclass
class DataConfig:
    """Which text is used; all fields are flags."""

    dataset: str = setting(
        "docs",
        "docs, wikibooks, a glob of files ('books/*.jsonl.xz'), a prepared folder, or a "
        "Hugging Face dataset name[:config]",
        PATH,
    )
    tokenizer: str = setting(
        "bpe", "bpe: trained on the corpus; gpt2: through tiktoken", ("bpe", "gpt2")
    )
    text_column: str = setting("text", "the column that holds the text")
    books_dataset: str = setting("SamuelYang/bookcorpus", "hub mirror of BookCorpus for wikibooks")
    cache: str = setting("cache", "folder for prepared data", PATH)

    __post_init__ = validate_config


# --------------------------------------------------------------------------------------------------
# Tokenizer


def train_bpe(words, n_ids):
    """Byte-level byte-pair encoding (Sennrich 2016) -> list of tokens in order of rank: the 256
    bytes, then the merges. It ends early if there is nothing left to merge.

    words: {word as bytes: its count}. Each step merges the most frequent pair of neighboring
    tokens; ties go to the pair whose bytes compare smaller.
    """
    # Inside a word, a token is the character chr(rank), so that merging is slicing a string.
    ranks = [bytes([b]) for b in range(256)]
    char = {token: chr(rank) for rank, token in enumerate(ranks)}
    texts, counts = [word.decode("latin-1") for word in words], list(words.values())
    pair_count, words_with = collections.Counter(), collections.defaultdict(list)
    for w, text in enumerate(texts):
        for pair in map(operator.add, text, text[1:]):
            pair_count[pair] += counts[w]
            words_with[pair].append(w)
    # The heap is lazy: a pair that has become rarer is corrected when it is popped.
    heap = [(-n, ranks[ord(a)], ranks[ord(b)]) for (a, b), n in pair_count.items()]
    heapq.heapify(heap)
    while len(ranks) < n_ids and heap:
        count, left, right = heapq.heappop(heap)
        pair = char[left] + char[right]
        if pair_count[pair] != -count:
            if pair_count[pair]:
                heapq.heappush(heap, (-pair_count[pair], left, right))
            continue
        if left + right not in char:  # another pair may have made the same token
            char[left + right] = chr(len(ranks))
            ranks.append(left + right)
        merged, increased = char[left + right], set()
        for w in words_with.pop(pair):
            text, i = texts[w], texts[w].find(pair)
            while i >= 0:  # only the pairs around position i change
                before = text[max(0, i - 1) : i + 3]
                text = text[:i] + merged + text[i + 2 :]
                after = text[max(0, i - 1) : i + 2]
                for p in map(operator.add, before, before[1:]):
                    pair_count[p] -= counts[w]
                for p in map(operator.add, after, after[1:]):
                    pair_count[p] += counts[w]
                    words_with[p].append(w)
                    increased.add(p)
                i = text.find(pair, i + 1)
            texts[w] = text
        for a, b in increased:
            if pair_count[a + b]:  # 0 if the next merge in the word removed it
                heapq.heappush(heap, (-pair_count[a + b], ranks[ord(a)], ranks[ord(b)]))
    return ranks


def most_frequent(words):
    """-> the most frequent words, up to BPE_BYTES bytes in all, without those longer than
    BPE_WORD characters."""
    kept, size = collections.Counter(), 0
    for word, n in words.most_common():
        if len(word) <= BPE_WORD:
            size += len(word.encode("utf-8", "replace"))
            if size > BPE_BYTES:
                break
            kept[word] = n
    return kept


def bpe_state(parts):
    """Train the corpus's own BPE on a sample of its parts -> a tokenizer's state.

    Every part contributes in proportion to its size, or equally if a size is unknown.
    """
    words, bounded, sizes = collections.Counter(), False, [part.size for part in parts]
    print(f"bpe: training a tokenizer of {BPE_IDS:,} ids (half a minute)", flush=True)
    for part in parts:
        left = int(BPE_SAMPLE * part.size / sum(sizes) if all(sizes) else BPE_SAMPLE / len(parts))
        for text in filter(None, part.documents()):
            words.update(match[0] for match in regex.finditer(GPT2_PATTERN, text[:left]))
            if len(words) > BPE_WORDS:
                words, bounded = most_frequent(words), True
            left -= len(text)
            if left <= 0:
                break
    kept = most_frequent(words)
    if bounded or len(kept) < len(words):
        print(f"bpe: too many or too long words; trained on the {len(kept):,} most frequent ones")
    ranks = train_bpe({word.encode("utf-8", "replace"): n for word, n in kept.items()}, BPE_IDS)
    # A tiny corpus has too few merges. Fill up with tokens that no UTF-8 text contains, so that the
    # ids of the special tokens are always the same.
    ranks += [b"\xff\xfe" + str(i).encode() for i in range(BPE_IDS - len(ranks))]
    return tokenizer_state("bpe", GPT2_PATTERN, ranks)


def gpt2_state():
    """GPT-2's BPE through tiktoken -> a tokenizer's state. Raises ValueError if it cannot be
    fetched."""
    try:
        gpt2 = tiktoken.get_encoding("gpt2")
    except Exception as error:
        raise ValueError(
            f"GPT-2's vocabulary cannot be fetched ({type(error).__name__}): use --tokenizer "
            "bpe, or set TIKTOKEN_CACHE_DIR to a folder in which tiktoken has stored it"
        ) from None
    return tokenizer_state("gpt2", gpt2._pat_str, gpt2._mergeable_ranks, "<|endoftext|>")


def tokenizer_state(name, pattern, ranks, *more_specials):
    """A tokenizer in a form for JSON: its tokens in order of rank, with bytes as latin-1."""
    specials = {text: len(ranks) + i for i, text in enumerate((*more_specials, *SPECIALS))}
    ranks = [token.decode("latin-1") for token in ranks]
    digest = short_hash([pattern, ranks, specials])
    return dict(name=name, pattern=pattern, ranks=ranks, specials=specials, hash=digest)


def encoding_arguments(state):
    """A tokenizer's state -> the arguments of tiktoken.Encoding. Checkpoints hold them, so a run
    can be used without its corpus."""
    ranks = {token.encode("latin-1"): rank for rank, token in enumerate(state["ranks"])}
    return {
        "name": state["name"],
        "pat_str": state["pattern"],
        "mergeable_ranks": ranks,
        "special_tokens": state["specials"],
    }


# Matches a character that continues a word. In scripts written without spaces no character does,
# so every token is a word of its own (BERT: every ideograph).
IN_WORD = regex.compile(
    r"[[\p{L}\p{M}\p{N}]--[\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}]]",
    regex.V1,
)


def word_starts(tokenizer, vocab_size):
    """-> (2, V) bool, for whole-word masking. [0]: the token begins a word; [1]: the token after it
    begins a word. As in BERT, punctuation, white space and special tokens are words of their own.
    (Two exceptions: text right after a character that is several tokens, such as an emoji, belongs
    to the same word as that character; and a character whose first byte is a token of its own, E0,
    begins a word, also in Devanagari or Tamil.)

    Raises ValueError without a tokenizer.
    """
    if tokenizer is None:
        raise ValueError("--whole_word needs the encoder's tokenizer, to know what begins a word")
    starts = torch.ones(2, vocab_size, dtype=torch.bool)
    for i in range(vocab_size - len(SPECIALS)):
        token = tokenizer.decode_single_token_bytes(i)
        continues_character = 0x80 <= token[0] < 0xC0
        # A token may hold only the first bytes of a character. Append typical continuation bytes,
        # so that the character can be decoded and classified.
        rest = b"\xb1" if token[0] < 0xE0 else b"\x80\x80\x80"
        first = (token + rest).decode("utf-8", "replace")[0]
        last = token.decode("utf-8", "replace")[-1]
        starts[0, i] = not (continues_character or IN_WORD.match(first))
        starts[1, i] = not (last == "\ufffd" or IN_WORD.match(last))
    return starts


# --------------------------------------------------------------------------------------------------
# Token ids on disk


@dataclass
class Corpus:
    """A prepared corpus: two streams of token ids as memory maps, the tokenizer, and meta.json."""

    folder: Path
    meta: dict
    tokenizer: dict  # see tokenizer_state
    train: np.ndarray  # (number of tokens,) uint16, or uint32 if the vocabulary needs it
    val: np.ndarray

    @property
    def vocab_size(self):
        return self.meta["vocab_size"]

    def n_sequences(self, split, L):
        return len(getattr(self, split)) // (L - 2)

    def sequences(self, split, index, L):
        """The sequences [CLS] x_1 ... x_(L-2) [SEP] with indices `index` (n,) -> (n, L) int64."""
        stream, n = getattr(self, split), L - 2
        blocks = stream[: len(stream) // n * n].reshape(-1, n)
        sequences = np.empty((len(index), L), np.int64)
        sequences[:, 1:-1] = blocks[index]
        sequences[:, 0] = self.tokenizer["specials"]["[CLS]"]
        sequences[:, -1] = self.tokenizer["specials"]["[SEP]"]
        return sequences


def prepare(
    dataset,
    tokenizer,
    cache,
    text_column=DataConfig.text_column,
    books_dataset=DataConfig.books_dataset,
) -> Corpus:
    """Documents -> tokenizer -> tokens on disk -> Corpus. Existing results are reused.

    Raises ValueError, OSError.
    """
    if folder := find_prepared(dataset, tokenizer, cache):
        return open_corpus(folder)
    source = find_source(dataset, text_column, books_dataset)
    folder = Path(cache).expanduser() / f"{source.name}-{tokenizer}"
    if not (folder / "meta.json").exists():
        parts = source.parts()
        folder.mkdir(parents=True, exist_ok=True)
        with lock(folder, "preparing data", wait=True):
            if not (folder / "meta.json").exists():  # another process may have made it meanwhile
                state = make_tokenizer(parts, tokenizer, folder)
                write_tokens(source, parts, state, folder, dataset)
    return open_corpus(folder)


def find_prepared(dataset, tokenizer, cache):
    """-> the folder if `dataset` is a prepared folder, or docs prepared from the installed library
    versions (reading them again takes 25 s); else None. Raises ValueError."""
    folder = Path(dataset).expanduser()
    if (folder / "meta.json").exists():
        used = read_json(folder / "meta.json", tokenizer=str)["tokenizer"]
        if used != tokenizer:
            raise ValueError(f"{folder} was prepared with --tokenizer {used}: give that flag")
        return folder
    if dataset == "docs":
        for file in Path(cache).expanduser().glob(f"docs-*-{tokenizer}/meta.json"):
            if read_json(file, source=dict)["source"].get("versions") == docs_versions():
                return file.parent


def make_tokenizer(parts, name, folder):
    """-> the tokenizer's state, also in tokenizer.json."""
    file = folder / "tokenizer.json"
    if not file.exists():
        write_json(file, gpt2_state() if name == "gpt2" else bpe_state(parts))
    return read_json(file, name=str, hash=str)


def write_tokens(source, parts, state, folder, dataset):
    """Write train.bin and val.bin, then meta.json, which says that the folder is complete. Raises
    ValueError if there is not enough text."""
    encoding, sep = tiktoken.Encoding(**encoding_arguments(state)), state["specials"]["[SEP]"]
    vocab_size = len(state["ranks"]) + len(state["specials"])
    meta = {
        "dataset": dataset,
        "source": source.about,
        "tokenizer": state["name"],
        "documents": 0,
        "characters": 0,
        "vocab_size": vocab_size,
        "dtype": "uint16" if vocab_size <= 65536 else "uint32",
        "tokenizer_hash": state["hash"],
        "tokens": {"train": 0, "val": 0},
    }
    if source.docs:
        write_json(folder / "docs.json", {"every": source.val_every, "rows": source.docs})
    texts = itertools.chain.from_iterable(part.documents() for part in parts)
    skipped, size = 0, sum(part.size for part in parts) or None
    with (
        atomic_write(folder / "train.bin") as train,
        atomic_write(folder / "val.bin") as val,
        tqdm(total=size, unit="B", unit_scale=True, desc="tokens", disable=None) as bar,
    ):
        for text, ids in encode(texts, encoding):
            skipped += text is None
            if not text or not text.strip():
                continue
            split = "val" if meta["documents"] % source.val_every == 1 else "train"
            tokens = np.fromiter(itertools.chain(*ids, [sep]), meta["dtype"])
            tokens.tofile(val if split == "val" else train)
            meta["tokens"][split] += len(tokens)
            meta["documents"] += 1
            meta["characters"] += len(text)
            bar.update(len(text))
        if 0 in meta["tokens"].values():
            raise ValueError(
                f"{dataset}: {meta['documents']} documents with text in them; at least 2 are "
                "needed, one for training and one for validation"
            )
    write_json(folder / "meta.json", meta)
    print(
        f"tokens: {meta['documents']:,} documents, {skipped:,} rows without text skipped; "
        f"{meta['tokens']['train']:,} tokens for training, {meta['tokens']['val']:,} for validation"
    )


def encode(texts, encoding):
    """Yield (text, list of the ids of its chunks) in order. All cores encode while the next texts
    are read and decompressed. A text may be None."""
    with ThreadPoolExecutor() as pool:
        waiting, size = collections.deque(), 0
        for text in texts:
            waiting.append((text, pool.map(encoding.encode_ordinary, chunks(text or ""))))
            size += len(text or "")
            while size > READ_AHEAD:
                size -= len(waiting[0][0] or "")
                yield waiting.popleft()
        yield from waiting


def chunks(text):
    """Cut a long text in front of white space, so that no call of the tokenizer is large."""
    start = 0
    while len(text) - start > ENCODE_CHUNK:
        window = text[start + 1 : start + ENCODE_CHUNK]
        # The last white space of the window, or the whole chunk if it has none (-1 + 1 = 0).
        cut = max(window.rfind(" "), window.rfind("\n")) + 1 or ENCODE_CHUNK
        yield text[start : start + cut]
        start += cut
    yield text[start:]


def open_corpus(folder) -> Corpus:
    """A prepared folder -> Corpus. Raises ValueError if it is damaged."""
    try:
        state = read_json(folder / "tokenizer.json", name=str, hash=str)
        meta = read_json(folder / "meta.json", tokens=dict, dtype=str, vocab_size=int)
        train, val = (np.memmap(folder / f"{s}.bin", meta["dtype"], "r") for s in ("train", "val"))
        if meta["tokens"] != {"train": len(train), "val": len(val)}:
            raise ValueError("the token files do not have the length that meta.json says")
    except (ValueError, FileNotFoundError) as error:
        raise ValueError(f"{folder} is damaged ({error}): delete it and prepare it again") from None
    return Corpus(folder, meta, state, train, val)


# --------------------------------------------------------------------------------------------------
# Batches


class Batches:
    """Training sequences in an order that is a function of (seed, index), so that a run resumes
    without saved state. Each epoch has a new permutation.

    fraction: use only this fraction of the sequences, the same ones for every seed.
    """

    def __init__(self, corpus: Corpus, L, seed, fraction=1.0):
        self.corpus, self.L, self.seed, self.epoch = corpus, L, seed, None
        self.kept = np.arange(corpus.n_sequences("train", L), dtype=np.uint32)
        if fraction < 1:
            order = np.random.default_rng(0).permutation(self.kept)
            self.kept = np.sort(order[: round(fraction * len(order))])
        self.n = len(self.kept)
        if self.n < 1 or corpus.n_sequences("val", L) < 1:
            raise ValueError(
                f"{corpus.folder} has {len(corpus.train):,} tokens for training and "
                f"{len(corpus.val):,} for validation (its second document and some later ones); "
                f"a sequence of {L} needs {L - 2} of each: add documents, or use a smaller "
                "--block_size or a larger --data_fraction"
            )

    def __call__(self, index, size):
        """Sequences index * size to (index + 1) * size - 1 of the concatenated epochs
        -> (size, L) int64."""
        numbers = []
        for i in range(index * size, (index + 1) * size):
            if i // self.n != self.epoch:
                self.epoch = i // self.n
                rng = np.random.default_rng((self.seed, self.epoch))
                self.order = rng.permutation(self.kept)
            numbers.append(self.order[i % self.n])
        return self.corpus.sequences("train", np.array(numbers), self.L)


def validation_sequences(corpus, n, L):
    """At most n sequences, evenly spaced over the validation stream -> (n, L) int64."""
    n_there = corpus.n_sequences("val", L)
    chosen = np.linspace(0, n_there - 1, min(n_there, n)).astype(int)
    return torch.from_numpy(corpus.sequences("val", chosen, L))


def validation_batches(corpus, L):
    """The sequences on which every run is validated -> tuple of (b, L) with b near VAL_BATCH: no
    batch has a single sequence, which contrastive losses could not use."""
    sequences = validation_sequences(corpus, VAL_SEQUENCES, L)
    return sequences.tensor_split(math.ceil(len(sequences) / VAL_BATCH))


def main(argv=None):
    parser = Parser("data.py", __doc__)
    parser.add_settings("data", DataConfig)
    with catch_errors():
        given = vars(parser.parse_args(argv))
        corpus = prepare(**vars(DataConfig(**given)))
    print(
        f"ready: {corpus.folder}, {corpus.vocab_size:,} ids, {len(corpus.train):,} tokens for "
        f"training, {len(corpus.val):,} for validation"
    )
    flags = [f"--{name}={value}" for name, value in given.items()]
    print("next: " + shlex.join(["python", "train.py", *flags]))


if __name__ == "__main__":
    main()
