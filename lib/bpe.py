"""Byte-level byte-pair encoding: training, tokenizers as JSON, tables for whole-word masking.

A tokenizer has three forms: its state, for JSON (tokenizer.json); the arguments of
tiktoken.Encoding, which a checkpoint holds; and the encoding, a tiktoken.Encoding, which encodes.
"""

import collections
import heapq
import operator

import regex  # comes with tiktoken; the same syntax as its patterns
import tiktoken
import torch

from lib.config import UserError
from lib.sources import short_hash

GPT2_PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
SPECIALS = ("[CLS]", "[PAD]", "[SEP]", "[MASK]", "[spare0]", "[spare1]", "[spare2]", "[spare3]")
BPE_IDS = 8184  # + 8 special tokens = 8192
# Bounds on the BPE's training text. English stays far below all but the first one (50 M characters
# have 0.2 M distinct words, 1.6 MB in all); text without spaces does not.
BPE_SAMPLE = 50_000_000  # characters of text
BPE_BYTES = 4_000_000  # total bytes of the different words
BPE_WORD = 1000  # characters of a word; longer ones are left out


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


def bpe_state(parts):
    """Train the corpus's own BPE on a sample of its parts -> a tokenizer's state.

    Every part contributes in proportion to its size, or equally if a size is unknown.
    """
    counts, sizes = collections.Counter(), [part.size for part in parts]
    print(f"bpe: training a tokenizer of {BPE_IDS:,} ids (half a minute)")
    for part in parts:
        left = int(BPE_SAMPLE * part.size / sum(sizes) if all(sizes) else BPE_SAMPLE / len(parts))
        for text in filter(None, part.documents()):
            found = regex.findall(GPT2_PATTERN, text[:left])
            counts.update(word for word in found if len(word) <= BPE_WORD)
            left -= len(text)
            if left <= 0:
                break
    words, size = {}, 0  # the most frequent ones, up to BPE_BYTES in all
    for text, n in counts.most_common():
        word = text.encode("utf-8", "replace")
        size += len(word)
        if size > BPE_BYTES:
            print(f"bpe: too many different words; trained on the {len(words):,} most frequent")
            break
        words[word] = n
    ranks = train_bpe(words, BPE_IDS)
    # A tiny corpus has too few merges. Fill up with tokens that no UTF-8 text contains, so that the
    # ids of the special tokens are always the same.
    ranks += [b"\xff\xfe" + str(i).encode() for i in range(BPE_IDS - len(ranks))]
    return tokenizer_state("bpe", GPT2_PATTERN, ranks)


def gpt2_state():
    """GPT-2's BPE through tiktoken -> a tokenizer's state. Raises UserError if it cannot be
    fetched."""
    try:
        gpt2 = tiktoken.get_encoding("gpt2")
    except Exception as error:
        raise UserError(
            f"GPT-2's vocabulary cannot be fetched ({type(error).__name__}): use --tokenizer "
            "bpe, or set TIKTOKEN_CACHE_DIR to a folder in which tiktoken has stored it"
        ) from None
    return tokenizer_state("gpt2", gpt2._pat_str, gpt2._mergeable_ranks, "<|endoftext|>")


def tokenizer_state(name, pattern, ranks, *more_specials):
    """A tokenizer in a form for JSON: its tokens in order of rank, with bytes as latin-1."""
    specials = {text: len(ranks) + i for i, text in enumerate((*more_specials, *SPECIALS))}
    ranks = [token.decode("latin-1") for token in ranks]
    state = dict(name=name, pattern=pattern, ranks=ranks, specials=specials)
    return state | {"hash": tokenizer_hash(state)}


def tokenizer_hash(state):
    return short_hash([state["pattern"], state["ranks"], state["specials"]])


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


def encode_text(text, tokenizer):
    """A text for a trained model -> its ids. [MASK] in it is the special token, which replaces the
    space before it too, as in pre-training; what else looks like a special token is text."""
    text = text.replace(" [MASK]", "[MASK]")
    return tokenizer.encode(text, allowed_special={"[MASK]"}, disallowed_special=())


# Matches a character that is part of a longer word. In scripts written without spaces none is, so
# every token is a word of its own (BERT: every ideograph).
IN_WORD = regex.compile(
    r"[[\p{L}\p{M}\p{N}]--[\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}]]",
    regex.V1,
)


def word_characters(encoding, vocab_size):
    """-> (2, V) bool, for whole-word masking. [0]: the token's first character is part of a word (a
    letter or digit), or the token continues a character; [1]: its last character is part of a word,
    or incomplete. A token begins a word unless [0] holds for it and [1] for the token before it.

    As in BERT, punctuation, white space and special tokens are words of their own. (Two exceptions:
    text right after a character that is several tokens, such as an emoji, belongs to the same word
    as that character; and a character whose first byte is a token of its own, E0, begins a word,
    also in Devanagari or Tamil.)
    """
    inside = torch.zeros(2, vocab_size, dtype=torch.bool)
    for i in range(vocab_size - len(SPECIALS)):
        token = encoding.decode_single_token_bytes(i)
        continues_character = 0x80 <= token[0] < 0xC0
        # A token may hold only the first bytes of a character. Append typical continuation bytes,
        # so that the character can be decoded and classified.
        rest = b"\xb1" if token[0] < 0xE0 else b"\x80\x80\x80"
        first = (token + rest).decode("utf-8", "replace")[0]
        last = token.decode("utf-8", "replace")[-1]
        inside[0, i] = continues_character or bool(IN_WORD.match(first))
        inside[1, i] = last == "\ufffd" or bool(IN_WORD.match(last))
    return inside
