"""lib/sources.py and data.py beyond the specification in test_all.py: sources, formats, damaged and
unusual text, prepared folders, the program."""

import gzip
import json
import os
import random
import shlex
import shutil
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pandas
import pytest
import tiktoken

import data
from lib import sources
from lib.sources import Part
from test_all import documents_in, encoding_of
from tests.conftest import WORDS, one_line, refuses, write_corpus


def read(file):
    """-> the texts of a local file, without blank ones; None for a row without text."""
    texts = sources.file_documents(str(file), "text")
    return [text and text.strip() for text in texts if text is None or text.strip()]


def test_file_formats_give_the_same_documents(tmp_path):
    """All formats, compressions and encodings with a mark give the same texts, whatever they
    contain."""
    texts = ["one fox\nand a line", 'two, "dogs"', "three\nowls ☃", "long " * 50_000 + "end"]
    frame = pandas.DataFrame({"text": texts, "n": range(4)})
    for i, encoding in enumerate(("utf-8", "utf-8-sig", "utf-16", "utf-32")):
        (tmp_path / f"a{i}.txt").write_text("\n\n\n" + "\n\n".join(texts[:3]), encoding=encoding)
        frame.to_csv(tmp_path / f"b{i}[1].csv", index=False, encoding=encoding)
    for name in ("c.jsonl", "d.JSONL.gz", "e.jsonl.xz", "f.jsonl.bz2"):
        frame.to_json(tmp_path / name, orient="records", lines=True)
    frame.to_json(tmp_path / "g.json", orient="records", indent=1)
    frame.text.to_json(tmp_path / "h.json", orient="values")
    frame.to_parquet(tmp_path / "i.parquet")
    for file in sorted(tmp_path.iterdir()):
        assert read(file) == (texts[:3] if file.suffix == ".txt" else texts), file.name
        assert sources.list_files(str(file)) == [str(file)], file.name


def csv_with(row):
    rows = [f"title {i},text {i}" for i in range(60)]
    rows[5], rows[30] = row, 'title 30,"She said, yes"'
    return ("title,text\n" + "\n".join(rows) + "\n").encode()


@pytest.mark.parametrize(
    "name, content, says",
    [
        ("a.csv", csv_with('"Weird title,The text'), "line 7: .*a quote missing"),
        ("a.csv", csv_with("a,b,c"), "line 7: not 2 columns"),
        ("a.jsonl", b'{"text": "a"}\n\n{"text": "b"\n{"text": "c"}\n', "line 3: "),
        ("a.txt.gz", gzip.compress(random.Random(0).randbytes(9999))[:5000], "cannot be read: ."),
        ("a.txt.xz", b"\xfd7zXZ\x00 and then nothing", "cannot be read: ."),
        ("a.parquet", b"PAR1 and then nothing", "cannot be read: ."),
        ("a.txt", "caf\xe9, na\xefve\n".encode("latin-1") * 50, "not UTF-8"),
        ("a.csv", ("text\n" + '"한국어 한국어"\n' * 50).encode("cp949"), "not UTF-8"),
        ("a.txt.gz", gzip.compress("no mark".encode("utf-16-le") * 50), "not UTF-8"),
    ],
)
def test_unreadable_files_are_refused(tmp_path, name, content, says):
    """A damaged file, a stray quote (which could swallow the rows after it) and another encoding
    are errors with the file's name and, if it has lines, the line."""
    (tmp_path / name).write_bytes(content)
    refuses(f"{name}.*{says}", read, tmp_path / name)


def test_a_trace_that_is_not_utf8_is_replaced(tmp_path, said):
    """One bad byte in a long text becomes U+FFFD and is reported once, though it is read twice."""
    text = "word " * 5000 + "caf\xe9"
    (tmp_path / "a.txt").write_bytes(text.encode("latin-1"))
    for _ in range(2):
        assert read(tmp_path / "a.txt") == [text.replace("\xe9", "\ufffd")]
    assert said().count("1 of 25,004 characters are not UTF-8") == 1


def test_rows_without_text_are_counted(tmp_path, said):
    """Rows whose text is missing, blank or not a string are skipped and counted."""
    rows = ['{"n": 1}', '{"text": null}', "7", "[]", '{"text": " "}', '{"text": ""}']
    rows += [json.dumps({"text": f"text {i}"}) for i in range(20)]
    (tmp_path / "a.jsonl").write_text("\n".join(rows))
    corpus = data.prepare(str(tmp_path / "a.jsonl"), "bpe", tmp_path / "cache")
    assert "20 documents, 6 rows without text skipped" in said()
    assert documents_in(corpus, "val") == ["text 1"] and len(documents_in(corpus, "train")) == 19


def test_listing_files(tmp_path, monkeypatch):
    """Files are sorted and listed once, whatever the pattern, without hidden and empty ones."""
    (tmp_path / "a" / "b").mkdir(parents=True)
    for name in ("a/z.txt", "a/b/y.txt", "a/._z.txt", "a/b/.y.txt", "a/e.txt", "a[1].txt"):
        (tmp_path / name).write_text("" if name == "a/e.txt" else "text")
    (tmp_path / "a" / "link.txt").symlink_to("z.txt")
    monkeypatch.setenv("HOME", str(tmp_path))
    for pattern in ("a/**/**.txt", "a/**/*", "a/**/**/**"):
        files = map(os.path.realpath, sources.list_files(f"~/{pattern}"))
        assert [*files] == [str(tmp_path / "a/b/y.txt"), str(tmp_path / "a/z.txt")], pattern
    assert sources.list_files("~/a[1].txt") == [str(tmp_path / "a[1].txt")]


def test_any_change_of_a_file_is_another_corpus(tmp_path):
    """The name of the prepared folder depends on path, size and time of every file."""
    a, b = write_corpus(tmp_path / "a.jsonl", 2), write_corpus(tmp_path / "b.jsonl", 2)
    changes = [
        lambda: None,
        lambda: os.utime(a, (1, 1)),
        lambda: os.truncate(b, 99) or os.utime(b, (1, 1)),
        lambda: os.truncate(b, 98) or os.utime(b, (1, 1)),
        lambda: os.rename(b, tmp_path / "moved.jsonl"),
    ]
    names = []
    for change in changes:
        change()
        names += [sources.find_source(f"{tmp_path}/*.jsonl", "text", "").name for _ in range(2)]
    assert names[::2] == names[1::2] and len({*names}) == len(changes)


def test_docs_corpus(tmp_path, monkeypatch):
    """The docs corpus takes docstrings from the syntax tree, leaves out tests, short texts and
    duplicates, keeps its rows for finetune's docs task, and is not read again as long as the same
    packages are installed."""
    texts = [f"{i}: " + 10 * "a longer text. " + "End." for i in range(14)]
    functions = [f'def f{i}():\n    """{text}"""\n' for i, text in enumerate(texts[:12])]
    (tmp_path / "tests").mkdir()
    for name, code in {
        "tests/test_m.py": f'"""{texts[12]}"""',
        "broken.py": f'"""{texts[12]}"""\ndef broken(:\n',
        "m.py": "raise SystemExit\n" + "".join(functions),
        "n.py": f'"""Short."""\nadd_docstr(f, """{texts[0]}""")\nadd_docstr(f, """{texts[13]}""")',
    }.items():
        (tmp_path / name).write_text(code)
    monkeypatch.setattr(sources, "docs_folders", lambda: {"torch": tmp_path})
    corpus = data.prepare("docs", "bpe", tmp_path / "cache")
    docs = json.loads((corpus.folder / "docs.json").read_text())
    assert [text for library, text in docs["rows"] if library == "torch"] == texts[:12] + texts[13:]
    assert documents_in(corpus, "val") == [text for _, text in docs["rows"]][1 :: docs["every"]]
    monkeypatch.setattr(sources, "docs_documents", lambda: 1 / 0)
    assert data.prepare("docs", "bpe", tmp_path / "cache").folder == corpus.folder
    monkeypatch.setattr(data, "docs_versions", lambda: {"torch": "another"})
    with pytest.raises(ZeroDivisionError):
        data.prepare("docs", "bpe", tmp_path / "cache")


def test_hub_data_sets_stream(tmp_path):
    """The hub's code path, on a folder that `datasets` reads like one of the hub's repositories."""
    pytest.importorskip("datasets")
    texts = [json.loads(line)["text"] for line in open(write_corpus(tmp_path / "train.jsonl", 7))]
    part = sources.hub_part(str(tmp_path), None, 1, "text")
    assert list(part.documents()) == texts
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
    source = sources.find_source("some/set", "text", None)
    began = time.time()
    refuses("'some/set' .*needs no network", source.parts)
    assert source.name.startswith("hub-some-set-") and time.time() - began < 10
    monkeypatch.setattr(tiktoken, "get_encoding", lambda name: 1 / 0)
    refuses("--tokenizer bpe needs no network", data.gpt2_state)


def test_bpe_is_bounded_for_any_text(monkeypatch, said):
    """The BPE counts the words of ordinary text exactly. If words are too many or too long, the
    most frequent ones count, and a line says so."""
    rng, counted = random.Random(0), {}
    monkeypatch.setattr(data, "train_bpe", lambda words, n_ids: counted.update(words) or [])
    text = " ".join(rng.choices(WORDS, k=2000))
    data.bpe_state([Part(lambda: [text], 1)])
    exact = Counter(word.encode() for word in data.regex.findall(data.GPT2_PATTERN, text))
    assert counted == exact and "too many" not in said()
    counted.clear()
    for name, value in {"BPE_WORDS": 40, "BPE_BYTES": 1000, "BPE_WORD": 100}.items():
        monkeypatch.setattr(data, name, value)
    odd = [f"{text} " + "".join(rng.choices("汉字文本很长没有空格", k=30)) for _ in range(50)]
    data.bpe_state([Part(lambda: [*odd, "x" * 101], 1)])
    assert 900 < sum(map(len, counted)) <= 1000
    assert all(abs(counted[word] - 50 * n) <= 50 for word, n in exact.items())
    assert f"trained on the {len(counted)} most frequent" in said()


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
    encoding = encoding_of(corpus)
    begins, _ = data.word_starts(encoding, corpus.vocab_size).tolist()
    for text, expected in (("中文。，かなไทย«»…🦊", True), ("éßαлисaאب한국", False)):
        for character in text:
            tokens = [begins[token] for token in encoding.encode_ordinary(character)]
            assert tokens == [expected] + [False] * (len(tokens) - 1), character


def test_a_prepared_folder_needs_nothing_else(corpus_file, cache, corpus, tmp_path, monkeypatch):
    """What is prepared is opened without the tokenizer's training or the text, on a read-only disk
    too; the folder itself may be given as --dataset, for example when the text is gone. A copy that
    was cut short is refused."""
    for name in ("bpe_state", "gpt2_state", "write_tokens", "lock"):
        monkeypatch.setattr(data, name, lambda *args: 1 / 0)
    assert data.prepare(corpus_file, "bpe", cache).folder == corpus.folder
    monkeypatch.setattr(data, "find_source", lambda *args: 1 / 0)
    copy = shutil.copytree(corpus.folder, tmp_path / "copy")
    assert data.prepare(str(copy), "bpe", "nowhere").meta == corpus.meta
    refuses("prepared with --tokenizer bpe", data.prepare, str(copy), "gpt2", "")
    os.truncate(copy / "train.bin", 100)
    refuses(f"{copy} is damaged .*delete it", data.prepare, str(copy), "bpe", "")


def test_an_interrupted_preparation_is_made_again(corpus_file, corpus, tmp_path, monkeypatch):
    """An error leaves no token files, a kill temporary ones; the next process makes all of them,
    with the same result."""
    monkeypatch.setattr(data, "encode", lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        data.prepare(corpus_file, "bpe", tmp_path)
    monkeypatch.undo()
    (folder,) = tmp_path.iterdir()
    assert {file.name for file in folder.iterdir()} == {"tokenizer.json", ".lock"}
    (folder / "train.bin.tmp").write_bytes(b"half")
    data.prepare(corpus_file, "bpe", tmp_path)
    files = {"train.bin", "val.bin", "meta.json", "tokenizer.json", ".lock"}
    assert {file.name for file in folder.iterdir()} == files
    assert (folder / "train.bin").read_bytes() == (corpus.folder / "train.bin").read_bytes()


def test_two_processes_prepare_the_same_data_once(corpus_file, tmp_path, monkeypatch, said):
    """The second process waits for the first and uses its result."""
    write_tokens, calls = data.write_tokens, []

    def slow(*args):
        calls.append(time.sleep(0.3))
        write_tokens(*args)

    monkeypatch.setattr(data, "write_tokens", slow)
    with ThreadPoolExecutor() as pool:
        jobs = [pool.submit(data.prepare, corpus_file, "bpe", tmp_path) for _ in range(2)]
    assert jobs[0].result().meta == jobs[1].result().meta and len(calls) == 1
    assert "another process is preparing data in" in said()


def test_too_little_text_for_a_sequence(tmp_path):
    """The message has the number of tokens of both splits and says which documents are for
    validation, because the second of 40 documents may be short."""
    rows = [{"text": "short" if i == 1 else "a long text " * 50} for i in range(40)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    corpus = data.prepare(str(tmp_path / "a.jsonl"), "bpe", tmp_path / "cache")
    says = f"{len(corpus.val)} for validation .its second document .* 64 needs 62"
    refuses(says, data.Batches, corpus, 64, 0)
    refuses("for training", data.Batches, corpus, 1 + len(corpus.train), 0, 1e-9)


def test_data_as_a_program(tmp_path, monkeypatch, said):
    """It prepares any column and prints a command that can be pasted: paths with spaces are quoted,
    and ~ is expanded in every path."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "my texts").mkdir()
    write_corpus(tmp_path / "my texts" / "t.jsonl", 20)
    data.main(["--dataset", "~/my texts/*.jsonl", "--text_column", "title", "--cache=~/my cache"])
    (folder,) = (tmp_path / "my cache").iterdir()
    assert documents_in(data.open_corpus(folder), "val") == ["t1"]
    flags = [f"--dataset={tmp_path}/my texts/*.jsonl", "--text_column=title"]
    command = ["next:", "python", "train.py", *flags, f"--cache={tmp_path}/my cache"]
    assert shlex.split(said().splitlines()[-1]) == command


MISTAKES = {
    "--dataset none.jsonl": "no file with text in it matches 'none.jsonl'; --dataset takes docs",
    "--dataset 'no/such*'": "no file with text in it",
    "--dataset empty.jsonl": "no file with text in it",
    "--dataset folder": "is a folder: name its files",
    "--dataset a.docx": "a.docx: unknown kind of file; known endings are .txt",
    "--dataset one.jsonl": "1 documents with text in them; at least 2",
    "--dataset two.jsonl": "no column 'text', only body: name one with --text_column",
    "--dataset two.jsonl --text_column body --cache one.jsonl": "one.jsonl",
    "--tokenizer bert": "invalid choice",
    "--data docs": "unrecognized arguments",
}


def test_wrong_input_is_one_line(tmp_path, monkeypatch, capsys):
    """A mistake is one line on standard error and exit code 2."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "a.docx").write_text("PK")
    (tmp_path / "one.jsonl").write_text('{"text": "only one"}\n')
    (tmp_path / "two.jsonl").write_text('{"body": "a"}\n{"body": "b"}\n')
    for flags, message in MISTAKES.items():
        assert message in one_line(capsys, data.main, shlex.split(flags)), flags
