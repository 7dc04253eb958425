"""lib/sources.py and data.py beyond the specification in test_all.py: sources, formats, damaged and
unusual text, prepared folders, the program."""

import csv
import gzip
import json
import lzma
import os
import random
import re
import shlex
import shutil
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pandas
import pytest
import tiktoken

import data
from lib import sources
from lib.sources import Part
from tests.conftest import WORDS, one_line, refuses, write_corpus


def read(file, column="text"):
    """-> the texts of a local file, without blank ones; None for a row without text."""
    texts = sources.file_documents(str(file), column)
    return [text and text.strip() for text in texts if text is None or text.strip()]


def documents_in(corpus, split):
    """The texts of a stream; each is followed by [SEP]."""
    encoding = tiktoken.Encoding(**data.encoding_arguments(corpus.tokenizer))
    return encoding.decode(getattr(corpus, split)).split("[SEP]")[:-1]


def names_in(folder):
    return {file.name for file in Path(folder).iterdir()}


# --------------------------------------------------------------------------------------------------
# Local files


def test_file_formats_give_the_same_documents(tmp_path):
    """All formats and compressions give the same texts, whatever they contain."""
    texts = ["one fox\nand a line", 'two, "dogs"', "three\nowls ☃"]
    rows = [{"text": t, "n": i} for i, t in enumerate(texts)]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    for i, encoding in enumerate(("utf-8", "utf-8-sig", "utf-16", "utf-32")):  # all but one: a BOM
        (tmp_path / f"a{i}.jsonl").write_text(lines, encoding=encoding)
        (tmp_path / f"b{i}.txt").write_text("\n\n\n" + "\n\n".join(texts), encoding=encoding)
        with open(tmp_path / f"c{i}[1].csv", "w", newline="", encoding=encoding) as handle:
            writer = csv.DictWriter(handle, ["text", "n"])
            writer.writeheader()
            writer.writerows(rows)
    for name, opener in (("d.JSONL.gz", gzip.open), ("e.jsonl.xz", lzma.open)):
        with opener(tmp_path / name, "wt") as handle:
            handle.write("\n" + lines)
    pandas.DataFrame(rows).to_parquet(tmp_path / "f.parquet")
    (tmp_path / "h.json").write_text(json.dumps(rows, indent=1))
    (tmp_path / "i.json").write_text(json.dumps(texts))
    for file in sorted(tmp_path.iterdir()):
        assert read(file) == texts, file.name
        assert sources.list_files(str(file)) == [str(file)], file.name


def test_fields_of_a_csv_keep_their_line_ends(tmp_path):
    """A quoted field may be long, and its line ends are not translated."""
    (tmp_path / "a.csv").write_bytes(b'text\r\n"' + b"a\r\n" * 50_000 + b'"\r\n')
    assert list(sources.file_documents(f"{tmp_path}/a.csv", "text")) == ["a\r\n" * 50_000]


def csv_with(row, quoted=False):
    rows = [f"title {i},text {i}" for i in range(60)]
    rows[5] = row
    if quoted:
        rows[30] = 'title 30,"She said, yes"'
    return "title,text\n" + "\n".join(rows) + "\n"


@pytest.mark.parametrize(
    "content, says",
    [
        (csv_with('"Weird title,The text'), "line 7: unexpected end"),
        (csv_with('"Weird title,The text', quoted=True), "line 7: .*expected"),
        (csv_with("a,b,c"), "line 7: not 2 columns"),
        (csv_with("only a title"), "line 7: not 2 columns"),
        ('title,"text\n' + csv_with("a,b"), "line 1: "),
        ('"a\nb",text\nx,y,z\n', "line 3: not 2 columns"),
    ],
)
def test_a_malformed_csv_names_the_line(tmp_path, content, says):
    """A stray quote must not silently swallow the rows after it."""
    (tmp_path / "a.csv").write_text(content)
    refuses(rf"a\.csv cannot be read: {says}", read, tmp_path / "a.csv")


def test_a_malformed_json_line_is_named(tmp_path):
    """The error names the file and the line, not a position within that line only."""
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n\n{"text": "b"\n{"text": "c"}\n')
    refuses(r"a\.jsonl cannot be read: line 3: ", read, tmp_path / "a.jsonl")


def test_damaged_files_are_one_clear_line(tmp_path):
    """A compressed file that was cut short, or is of another kind, is an error with its name."""
    whole = gzip.compress(random.Random(0).randbytes(50_000).hex().encode())
    for name, content in {
        "b.txt.gz": whole[: len(whole) // 2],
        "b.json.gz": whole[: len(whole) // 2],
        "c.txt.xz": b"\xfd7zXZ\x00 and then nothing",
        "d.parquet": b"PAR1 and then nothing",
        "e.jsonl": b"\xff\xfe{\0}",
    }.items():
        (tmp_path / name).write_bytes(content)
        refuses(f"{name} cannot be read: .", read, tmp_path / name)


@pytest.mark.parametrize("encoding", ["latin-1", "cp1252", "utf-16-le", "utf-16-be", "cp949"])
@pytest.mark.parametrize("name", ["a.txt", "a.csv", "a.txt.gz"])
def test_text_that_is_not_utf8_is_refused(tmp_path, encoding, name):
    """Decoding with the wrong encoding must not end in training data."""
    text = {"cp949": "한국어 한국어", "latin-1": "caf\xe9, na\xefve", "cp1252": "“yes”"}
    text = text.get(encoding, "plain letters, of which UTF-16 has valid UTF-8 with NULs")
    content = f'text\n"{text}"\n' * 50
    opener = gzip.open if name.endswith("gz") else open
    with opener(tmp_path / name, "wb") as handle:
        handle.write(content.encode(encoding))
    refuses(rf"{name}.*(not UTF-8|no column|line 2: not 1 columns)", read, tmp_path / name)


def test_a_trace_that_is_not_utf8_is_replaced(tmp_path, said):
    """One bad byte in a long text becomes U+FFFD and is reported once, though it is read twice."""
    text = "word " * 5000 + "caf\xe9"
    (tmp_path / "a.txt").write_bytes(text.encode("latin-1"))
    for _ in range(2):
        assert read(tmp_path / "a.txt") == [text.replace("\xe9", "\ufffd")]
    assert said().count("1 of 25,004 characters are not UTF-8") == 1


def test_bad_text_deep_in_a_file_is_refused_early(tmp_path):
    """A file whose second part has another encoding is refused, before all of it is read."""
    (tmp_path / "a.txt").write_bytes(b"good text\n\n" * 1000 + b"\xe4\xf6\xfc\n\n" * 100_000)
    documents = sources.file_documents(str(tmp_path / "a.txt"), "text")
    with pytest.raises(ValueError, match="not UTF-8"):
        for n, _ in enumerate(documents):
            assert n < 1100


def test_rows_without_text_are_counted(tmp_path, said):
    """Rows whose text is missing, blank or not a string are skipped and counted."""
    rows = ['{"n": 1}', '{"text": null}', "7", "[]", '{"text": " "}', '{"text": ""}']
    rows += [json.dumps({"text": f"text {i}"}) for i in range(20)]
    (tmp_path / "a.jsonl").write_text("\n".join(rows))
    assert read(tmp_path / "a.jsonl").count(None) == 6
    corpus = data.prepare(str(tmp_path / "a.jsonl"), "bpe", tmp_path / "cache")
    assert "20 documents, 6 rows without text skipped" in said()
    assert documents_in(corpus, "val") == ["text 1"] and len(documents_in(corpus, "train")) == 19


def test_listing_files(tmp_path, monkeypatch):
    """Files are sorted and listed once, whatever the pattern, without hidden and empty ones."""
    (tmp_path / "a" / "b").mkdir(parents=True)
    for name in ("a/z.txt", "a/b/y.txt", "a/._z.txt", "a/b/.y.txt", "a/e.txt", "a[1].txt"):
        (tmp_path / name).write_text("" if name == "a/e.txt" else "text")
    (tmp_path / "a" / "link.txt").symlink_to("z.txt")
    listed = [str(tmp_path / "a/b/y.txt"), str(tmp_path / "a/z.txt")]
    for pattern in ("a/**/**.txt", "a/**/*", "a/**/**/**", "a/**/*.txt"):
        files = sources.list_files(str(tmp_path / pattern))
        assert [os.path.realpath(file) for file in files] == listed, pattern
    monkeypatch.setenv("HOME", str(tmp_path))
    assert sources.list_files("~/a/b/*") == [str(tmp_path / "a/b/y.txt")]
    assert sources.list_files("~/a[1].txt") == [str(tmp_path / "a[1].txt")]
    assert sources.list_files("~/a/._z.txt") == [str(tmp_path / "a/._z.txt")], "named itself"
    assert sources.list_files("~/a/.*.txt") == sources.list_files("~/a/e.txt") == []


def test_any_change_of_a_file_is_another_corpus(tmp_path):
    """The name of the prepared folder depends on path, size and time of every file."""
    for name in "ab":
        write_corpus(tmp_path / f"{name}.jsonl", 20)
    pattern = str(tmp_path / "*.jsonl")
    find = partial(sources.find_source, pattern, "text", "")
    names = [find().name]
    assert find().name == names[0] != sources.find_source(pattern, "body", "").name
    text = (tmp_path / "b.jsonl").read_text()
    middle = len(text) // 2
    (tmp_path / "b.jsonl").write_text(text[:middle] + "x" + text[middle + 1 :])
    names.append(find().name)
    (tmp_path / "b.jsonl").rename(tmp_path / "c.jsonl")
    names.append(find().name)
    os.utime(tmp_path / "a.jsonl", (1, 1))
    names.append(find().name)
    assert len(set(names)) == 4


# --------------------------------------------------------------------------------------------------
# The docs and the hub


def test_docstrings_are_read_not_imported(tmp_path):
    """Docstrings come from the syntax tree; a file that cannot be parsed has none."""
    file = tmp_path / "m.py"
    file.write_text(
        '"""Module."""\nraise SystemExit\ndef f():\n    """Does f."""\n'
        'add_docstr(f, r"""Added.""")\n'
    )
    assert list(sources.docstrings(file)) == ["Module.", "Does f.", "Added."]
    file.write_text("def broken(:\n")
    assert list(sources.docstrings(file)) == []


def test_docs_corpus(tmp_path, monkeypatch):
    """The docs corpus leaves out tests and short texts, keeps its rows for finetune's docs task,
    and is not read again as long as the same packages are installed."""
    rng = random.Random(0)
    folders = {library: tmp_path / library for library in sources.DOCS_LIBRARIES}
    for library, folder in folders.items():
        (folder / "tests").mkdir(parents=True)
        (folder / "tests" / "t.py").write_text('"""' + "Not to be read. " * 20 + '"""')
        (folder / "short.py").write_text('"""Not to be read."""')
        texts = [" ".join(rng.choices(WORDS, k=30)) + f" {library} {i}" for i in range(12)]
        code = [f'def f{i}():\n    """{text}"""\n' for i, text in enumerate(texts)]
        (folder / "m.py").write_text("".join(code))
    monkeypatch.setattr(sources, "docs_folders", lambda: folders)
    corpus = data.prepare("docs", "bpe", tmp_path / "cache")
    docs = json.loads((corpus.folder / "docs.json").read_text())
    assert docs["every"] == 10 and {library for library, _ in docs["rows"]} == set(folders)
    texts = [text for _, text in docs["rows"]]
    assert documents_in(corpus, "val") == texts[1::10]
    assert documents_in(corpus, "train") == [t for i, t in enumerate(texts) if i % 10 != 1]
    assert not any("Not to be read" in text for text in texts)
    monkeypatch.setattr(sources, "docs_documents", lambda: 1 / 0)
    assert data.prepare("docs", "bpe", tmp_path / "cache").folder == corpus.folder
    monkeypatch.setattr(data, "docs_versions", lambda: {"torch": "another"})
    with pytest.raises(ZeroDivisionError):
        data.prepare("docs", "bpe", tmp_path / "cache")


def test_hub_data_sets_stream(tmp_path, said):
    """The hub's code path, on a folder that `datasets` reads like one of the hub's repositories."""
    pytest.importorskip("datasets")
    file = write_corpus(tmp_path / "train.jsonl", 7)
    texts = [json.loads(line)["text"] for line in open(file)]
    with open(file, "a") as handle:
        handle.write('{"title": "t", "text": null}\n')
    part = sources.hub_part(str(tmp_path), None, 1, "text")
    assert list(part.documents()) == [*texts, None] and "GB to stream" in said()
    part = sources.hub_part(str(tmp_path), None, 3, "text")
    assert list(part.documents()) == ["\n".join(texts[i : i + 3]) for i in (0, 3, 6)]
    part = sources.hub_part(str(tmp_path), None, 1, "body")
    refuses("no column 'body', only title, text", list, part.documents())


def test_without_a_network(monkeypatch):
    """A hub that cannot be reached is one line, at once; the prepared folder's name needs none."""
    import datasets
    from huggingface_hub import constants

    for module in (constants, datasets.config):
        monkeypatch.setattr(module, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # nothing listens there
    source, other = (sources.find_source("some/set", c, None) for c in ("text", "body"))
    assert source.name.startswith("hub-some-set-") and source.name != other.name
    began = time.time()
    refuses("'some/set' .*needs no network", source.parts)
    assert constants.HF_HUB_OFFLINE and time.time() - began < 10
    monkeypatch.setattr(tiktoken, "get_encoding", lambda name: 1 / 0)
    refuses("--tokenizer bpe needs no network", data.gpt2_state)


# --------------------------------------------------------------------------------------------------
# Tokenizer


def test_gpt2_tokenizer():
    """GPT-2's ids come first and are tiktoken's own, then the special tokens."""
    try:
        state = data.gpt2_state()
    except ValueError:
        pytest.skip("GPT-2's vocabulary is not here")
    encoding = tiktoken.Encoding(**data.encoding_arguments(state))
    assert encoding.n_vocab == 50265 and encoding.encode_single_token("[CLS]") == 50257
    text = "Hello world, it's 2026! 中文"
    assert encoding.encode_ordinary(text) == tiktoken.get_encoding("gpt2").encode_ordinary(text)


def count_words(parts, monkeypatch, **constants):
    """bpe_state, with train_bpe replaced -> {word: count} as given to it."""
    counted = {}
    for name, value in constants.items():
        monkeypatch.setattr(data, name, value)
    monkeypatch.setattr(data, "train_bpe", lambda words, n_ids: counted.update(words) or [])
    data.bpe_state(parts)
    return counted


def test_the_sample_for_the_bpe_is_taken_by_size(monkeypatch):
    """Every part contributes by its size; equally, if the size of one is unknown."""
    parts = [Part(lambda: ["a" * 1000] * 9, 9000), *[Part(lambda: ["b" * 100], 100)] * 10]
    counted = count_words(parts, monkeypatch, BPE_SAMPLE=1000)
    assert counted == {b"a" * 900: 1, b"b" * 10: 10}
    parts = [Part(lambda: ["a" * 1000], 9000), Part(lambda: [None, "b" * 1000], 0)]
    assert count_words(parts, monkeypatch) == {b"a" * 500: 1, b"b" * 500: 1}


def test_bpe_is_bounded_for_any_text(monkeypatch, said):
    """If words are too many or too long, the most frequent ones count, and a line says so. Ordinary
    text stays below the bounds and is counted exactly."""
    rng = random.Random(0)
    text = " ".join(rng.choices(WORDS, k=2000))
    exact = Counter(word.encode() for word in data.regex.findall(data.GPT2_PATTERN, text))
    assert count_words([Part(lambda: [text], 1)], monkeypatch) == exact
    assert "too many" not in said()
    odd = [f"{text} " + "".join(rng.choices("汉字文本很长没有空格", k=30)) for _ in range(50)]
    odd += ["x" * 101 + " " + "y" * 90]
    most_frequent, sizes = data.most_frequent, []
    monkeypatch.setattr(data, "most_frequent", lambda w: sizes.append(len(w)) or most_frequent(w))
    bounds = dict(BPE_WORDS=40, BPE_BYTES=1000, BPE_WORD=100)
    counted = count_words([Part(lambda: odd, 1)], monkeypatch, **bounds)
    assert 900 < sum(map(len, counted)) <= 1000 and max(sizes) <= 42
    assert all(abs(counted[word] - 50 * n) <= 50 for word, n in exact.items())
    assert f"trained on the {len(counted)} most frequent" in said()
    bounds["BPE_BYTES"] = 10_000
    assert set(count_words([Part(lambda: odd[-1:], 1)], monkeypatch, **bounds)) == {
        b" " + b"y" * 90
    }


@pytest.mark.slow
def test_bpe_takes_seconds_on_text_without_spaces():
    """100,000 Chinese characters whose clauses all differ: the time does not depend on the length
    of the words (a simple implementation needs minutes)."""
    rng, words = random.Random(0), Counter()
    for _ in range(5000):
        words["".join(chr(0x4E00 + int(rng.expovariate(0.003))) for _ in range(20)).encode()] += 1
    began = time.process_time()
    assert len(data.train_bpe(words, data.BPE_IDS)) == data.BPE_IDS
    assert time.process_time() - began < 30


def test_long_documents_are_cut_without_loss():
    """A document of any length is tokenized in chunks, cut in front of white space if possible."""
    for text in ("x" * 1_250_000, "word " * 250_000, "a\n" * 420_000, "short", ""):
        cut = list(data.chunks(text))
        assert "".join(cut) == text and max(map(len, cut)) <= data.ENCODE_CHUNK
        assert text[:1] == "x" or all(chunk[:1] in " \n" for chunk in cut[1:])


def test_every_token_is_a_word_in_scripts_without_spaces(corpus):
    """Ideographs, kana, Thai letters and non-ASCII punctuation begin a word, also where a character
    takes several tokens, of which the first begins it. Other letters continue a word."""
    encoding = tiktoken.Encoding(**data.encoding_arguments(corpus.tokenizer))
    begins, _ = data.word_starts(encoding, corpus.vocab_size).tolist()
    for text, expected in (("中文。，かなไทย«»…🦊", True), ("éßαлисаאب한국", False)):
        for character in text:
            tokens = [begins[token] for token in encoding.encode_ordinary(character)]
            assert tokens == [expected] + [False] * (len(tokens) - 1), character
    refuses("tokenizer", data.word_starts, None, 72)


# --------------------------------------------------------------------------------------------------
# Prepared folders


def test_a_prepared_folder_needs_nothing_else(corpus_file, cache, corpus, monkeypatch):
    """What is prepared is opened without the tokenizer's training or the text; the folder itself
    may be given as --dataset, for example when the text is gone."""
    for name in ("bpe_state", "gpt2_state", "write_tokens", "lock"):  # it may be read-only
        monkeypatch.setattr(data, name, lambda *args: 1 / 0)
    monkeypatch.setattr(sources, "file_documents", lambda *args: 1 / 0)
    assert data.prepare(corpus_file, "bpe", cache).folder == corpus.folder
    files = {"train.bin", "val.bin", "meta.json", "tokenizer.json", ".lock"}
    assert names_in(corpus.folder) == files
    monkeypatch.setattr(data, "find_source", lambda *args: 1 / 0)
    assert data.prepare(str(corpus.folder), "bpe", "nowhere").meta == corpus.meta
    refuses("prepared with --tokenizer bpe", data.prepare, str(corpus.folder), "gpt2", "")


def test_a_killed_preparation_is_made_again(tmp_path, monkeypatch):
    """A process that is killed leaves temporary files and no meta.json. The next one writes over
    them, with the same result."""
    file, encode = write_corpus(tmp_path / "t.jsonl", 20), data.encode

    def encode_and_copy(texts, encoding):
        yield from encode(texts, encoding)
        shutil.copytree(tmp_path / "cache", tmp_path / "killed")

    monkeypatch.setattr(data, "encode", encode_and_copy)
    whole = data.prepare(file, "bpe", tmp_path / "cache")
    left = tmp_path / "killed" / whole.folder.name
    assert names_in(left) == {"tokenizer.json", ".lock", "train.bin.tmp", "val.bin.tmp"}
    monkeypatch.setattr(data, "encode", encode)
    assert names_in(data.prepare(file, "bpe", left.parent).folder) == names_in(whole.folder)
    assert (left / "train.bin").read_bytes() == (whole.folder / "train.bin").read_bytes()


def test_a_failed_preparation_leaves_no_token_files(tmp_path):
    """An error in the middle of the text leaves nothing that looks complete."""
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n' * 300 + "{\n")
    refuses("line 301", data.prepare, str(tmp_path / "a.jsonl"), "bpe", tmp_path / "cache")
    (folder,) = (tmp_path / "cache").iterdir()
    assert names_in(folder) <= {"tokenizer.json", ".lock"}


def test_two_processes_prepare_the_same_data_once(tmp_path, monkeypatch, said):
    """The second process waits for the first and uses its result."""
    file, write_tokens, calls = write_corpus(tmp_path / "t.jsonl", 20), data.write_tokens, []

    def slow(*args):
        calls.append(time.sleep(0.3))
        write_tokens(*args)

    monkeypatch.setattr(data, "write_tokens", slow)
    with ThreadPoolExecutor() as pool:
        jobs = [pool.submit(data.prepare, file, "bpe", tmp_path / "cache") for _ in range(2)]
    assert jobs[0].result().meta == jobs[1].result().meta and len(calls) == 1
    assert "another process is preparing data in" in said()


@pytest.mark.parametrize(
    "name, damage",
    [
        ("train.bin", lambda old: old[:100]),
        ("tokenizer.json", lambda old: b'{"name": "x"}'),
        ("val.bin", lambda old: b""),
        ("val.bin", None),
        ("meta.json", lambda old: old[:40]),
        ("meta.json", lambda old: b'{"tokens": 7}'),
    ],
)
def test_a_damaged_prepared_folder_is_one_line(corpus_file, tmp_path, name, damage):
    """The error says which folder to delete."""
    file = data.prepare(corpus_file, "bpe", str(tmp_path)).folder / name
    content = file.read_bytes()
    file.unlink()
    if damage:
        file.write_bytes(damage(content))
    says = rf"{file.parent} is damaged .*delete it and prepare it again"
    refuses(says, data.prepare, corpus_file, "bpe", str(tmp_path))


def test_too_little_text_for_a_sequence(tmp_path):
    """The message has the number of tokens of both splits and says which documents are for
    validation, because one of 40 documents may be short."""
    rows = [{"text": "short" if i == 1 else "a long text " * 50} for i in range(40)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    corpus = data.prepare(str(tmp_path / "a.jsonl"), "bpe", tmp_path / "cache")
    says = f"{len(corpus.val)} for validation .its second document .* 64 needs 62"
    refuses(says, data.Batches, corpus, 64, 0)
    refuses("for training", data.Batches, corpus, 1 + len(corpus.train), 0, 1e-9)


# --------------------------------------------------------------------------------------------------
# The program


def test_data_as_a_program(tmp_path, monkeypatch, said):
    """It prints what was prepared and a command that can be pasted: paths with spaces are quoted,
    and ~ is expanded in every path."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "my texts").mkdir()
    write_corpus(tmp_path / "my texts" / "t.jsonl", 20)
    data.main(["--dataset", "~/my texts/*.jsonl", "--cache=~/my cache"])
    *_, ready, command = said().splitlines()
    assert ready.startswith(f"ready: {tmp_path}/my cache/files-") and "8,192 ids" in ready
    dataset, cache = f"--dataset={tmp_path}/my texts/*.jsonl", f"--cache={tmp_path}/my cache"
    assert shlex.split(command)[1:] == ["python", "train.py", dataset, cache]


@pytest.mark.parametrize(
    "flags, says",
    [
        ("--dataset ''", "no file with text in it"),
        ("--dataset none.jsonl", "no file with text .* takes docs, wikibooks"),
        ("--dataset 'no/such*'", "no file with text in it"),
        ("--dataset a/b.txt.gz", "no file with text in it"),
        ("--dataset empty.jsonl", "no file with text in it"),
        ("--dataset folder", r"is a folder: name its files"),
        ("--dataset a.docx", r"a.docx: unknown kind of file; known endings are \.txt"),
        ("--dataset one.jsonl", "1 documents with text in them; at least 2"),
        ("--dataset two.jsonl", "two.jsonl .*no column 'text', only body"),
        ("--dataset two.jsonl --text_column title", "no column 'title', only body"),
        ("--dataset latin.txt", "latin.txt: .* not UTF-8"),
        ("--dataset bad.csv", "bad.csv cannot be read: line 2"),
        ("--dataset two.jsonl --text_column body --cache one.jsonl", "Not a directory|exists"),
        ("--tokenizer bert", "invalid choice"),
        ("--data docs", "unrecognized arguments"),
    ],
)
def test_wrong_inputs_are_one_line(tmp_path, monkeypatch, capsys, flags, says):
    """A mistake is one line on standard error and exit code 2."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    for name, content in {
        "empty.jsonl": b"",
        "a.docx": b"PK",
        "one.jsonl": b'{"text": "only one"}\n',
        "two.jsonl": b'{"body": "a"}\n{"body": "b"}\n',
        "latin.txt": "caf\xe9".encode("latin-1"),
        "bad.csv": b'text\n"a\n',
    }.items():
        (tmp_path / name).write_bytes(content)
    assert re.search(says, one_line(capsys, data.main, shlex.split(flags)))
