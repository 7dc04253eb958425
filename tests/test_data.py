"""data.py, lib/sources.py, lib/bpe.py beyond test_all.py: sources, odd text, prepared folders."""

import gzip
import json
import os
import random
import shutil
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pandas
import pyarrow.parquet
import pytest

import data
from lib import bpe, sources
from lib.sources import Part
from test_all import documents_in, encoding_of
from tests.conftest import WORDS, one_line, refuses, write_corpus


def test_file_formats_give_the_same_documents(tmp_path):
    """All formats and compressions give the same texts. Of a Parquet file, no other column is
    read."""
    texts = ["one fox\nand a line", 'two, "dogs"', "three\nowls ☃", "long " * 50_000 + "end"]
    frame = pandas.DataFrame({"text": texts, "n": range(4)})
    for i, encoding in enumerate(("utf-8", "utf-8-sig")):
        blank = "\n\n\n" + "\n \n".join(texts[:3])
        for file in (f"a{i}.txt", f"a{i}.py", f"a{i}"):  # other endings are text, too
            (tmp_path / file).write_text(blank, encoding=encoding, newline="\r\n")
        rows = "\n \n" * i + frame.to_csv(index=False)
        (tmp_path / f"b{i}.csv").write_text(rows, encoding=encoding)
    for name in ("c.jsonl", "d.JSONL.gz", "e.jsonl.xz", "f.jsonl.bz2"):
        frame.to_json(tmp_path / name, orient="records", lines=True)
    frame.to_json(tmp_path / "g.json", orient="records", indent=1)
    frame.text.to_json(tmp_path / "h.json", orient="values")
    frame.to_parquet(tmp_path / "i.parquet")
    for file in tmp_path.iterdir():
        found = [text.rstrip() for text in sources.file_documents(str(file), "text")]
        assert found == (texts[:3] if file.name[0] == "a" else texts), file.name
    assert all(row.keys() == {"text"} for row in sources.file_rows(f"{tmp_path}/i.parquet", "text"))


ROWS = b"a,b\n" * 5
MISTAKES = [  # a file, its content, and a part of the line that says what is wrong
    ("none.jsonl", None, "no file with text in it matches"),
    ("C:/texts/*", None, "no file with text in it matches"),  # not a hub set named C
    (".", None, "is a folder: name its files"),
    ("some/set", None, "needs no network"),
    ("a.docx", b"PK\3\4\n" + bytes(9), "(read as text: the ending is none of .txt, .md, .json"),
    ("b.tar.gz", gzip.compress(b"text" + bytes(512)), "not text: it has a null character"),
    ("one.jsonl", b'{"text": "a"}\n', "1 documents with text in them; at least 2"),
    ("body.jsonl", b'{"body": "a"}\n{"body": "b"}\n', "no column 'text', only body"),
    ("a.jsonl", b'{"text": "a"}\n{"text": "b"\n{"text": "c"}\n', "cannot be read after row 1: "),
    ("cut.txt.gz", gzip.compress(random.Random(0).randbytes(9999))[:5000], "after row 0: "),
    # A lenient parser would let the stray quote swallow the rows up to the next one.
    ("a.csv", b"n,text\n" + ROWS + b'"Odd,text\n' + ROWS + b'a,"b, c"\n', "after row 5: "),
    ("comma.csv", b"text\n" + b"one, two\n" * 5, "more columns than the header"),
    ("two.csv", b"text,id,text\n" + b"one,1,two\n" * 5, "two columns are named 'text'"),
    ("two.jsonl", b'{"text": "a", "text": "b"}\n' * 5, "two columns are named 'text'"),
    ("two.json", b'[{"text": "a", "text": "b"}]', "two columns are named 'text'"),
    ("numbers.jsonl", b'{"text": 7}\n' * 5, "column 'text' holds int, not text"),
    ("latin1.txt", "caf\xe9, na\xefve\n".encode("latin-1") * 50, "can't decode byte 0xe9"),
]


def test_wrong_input_is_one_line(tmp_path, monkeypatch, capsys):
    """Files that are missing, damaged or in another encoding, and a hub that does not answer, are
    refused by name in one line."""
    monkeypatch.chdir(tmp_path)
    for module in ("huggingface_hub.constants", "datasets.config"):
        monkeypatch.setattr(f"{module}.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    mistakes, texts = list(MISTAKES), pyarrow.array(["a", "b"])
    for name, columns, names, message in (
        ("body.parquet", [texts, texts], ["body", "n"], "no column 'text', only body, n"),
        ("two.parquet", [texts, texts], ["text", "text"], "two columns are named 'text'"),
        ("struct.parquet", [pyarrow.array([{"a": "b"}])], ["text"], "'text' holds dict, not text"),
        ("list.parquet", [pyarrow.array([["a"]])], ["text"], "'text' holds list, not text"),
        ("binary.parquet", [pyarrow.array([b"a"])], ["text"], "'text' holds bytes, not text"),
    ):
        pyarrow.parquet.write_table(pyarrow.table(columns, names), name)
        mistakes.append((name, None, message))
    for name, content, message in mistakes:
        if content is not None:
            (tmp_path / name).write_bytes(content)
        error = one_line(capsys, data.main, ["--dataset", name])
        assert message in error and name in error


def test_what_a_text_lacks_is_said(tmp_path, capsys):
    """Rows without text, and with other columns, are skipped, and their number is printed. If the
    second document, the only one for validation, is too short, the message says so."""
    rows = ['{"n": 1}', '{"text": null, "n": {"a": 1}}', "7", '{"text": " "}', '{"text": ["a"]}']
    rows += [json.dumps({"text": "short" if i == 1 else "longer " * 50}) for i in range(40)]
    (tmp_path / "a.jsonl").write_text("\n\n".join(rows))
    corpus = data.prepare(str(tmp_path / "a.jsonl"), "bpe", tmp_path / "cache")
    assert "40 documents, 5 rows without text skipped" in capsys.readouterr().out
    message = f"{len(corpus.val)} for validation .its second document .* 64 needs 62"
    refuses(message, data.Batches, corpus, 64, 0)


def test_local_files(tmp_path, monkeypatch):
    """Files are sorted and listed once, without hidden and empty ones. Another column, and a file
    that has changed, make another corpus."""
    (tmp_path / "a" / "b").mkdir(parents=True)
    for name in ("a/z.txt", "a/b/y.txt", "a/._z.txt", "a/b/.y.txt", "a/e.txt"):
        (tmp_path / name).write_text("" if name == "a/e.txt" else "text")
    monkeypatch.chdir(tmp_path)
    assert sources.list_files("a/**/**.txt") == ["a/b/y.txt", "a/z.txt"]
    os.rename("a", "a [v2]")
    assert sources.list_files("a [v2]/**/**.txt") == ["a [v2]/b/y.txt", "a [v2]/z.txt"]
    os.rename("a [v2]", "a")
    columns = "text", "text", "title"
    names = [sources.find_source("a/**/*", column, "").name for column in columns]
    (tmp_path / "a" / "z.txt").write_text("another")
    names.append(sources.find_source("a/**/*", "text", "").name)
    assert names[0] == names[1] and len({*names}) == 3


def test_docs_corpus(tmp_path, monkeypatch):
    """The docs corpus takes docstrings from the syntax tree, without tests, short texts and
    duplicates, and its rows are kept for finetune, with the same documents for validation. What
    cannot be parsed is skipped."""
    texts = [f"{i}: " + 10 * "a longer text. " + "End." for i in range(14)]
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "a.py").write_text(f'"""{texts[13]}"""')
    (tmp_path / "b.py").write_text("print 2")
    (tmp_path / "deep.py").write_text("x = " + "-" * 20_000 + "1")
    (tmp_path / "folder.py").mkdir()
    (tmp_path / ".#c.py").symlink_to("user@host.123")  # an editor's lock
    functions = [f'def f{i}():\n    """{text}"""\n' for i, text in enumerate(texts[:12])]
    functions += ['add_docstr(f, """Short.""")', f'add_docstr(f, """{texts[12]}""")']
    (tmp_path / "c.py").write_text("raise SystemExit\n" + "\n".join(functions + functions[:12]))
    monkeypatch.setattr(sources, "docs_folders", lambda: {"torch": tmp_path})
    corpus = data.prepare("docs", "bpe", tmp_path / "cache")
    docs = json.loads((corpus.folder / "docs.json").read_text())
    assert [text for library, text in docs["rows"] if library == "torch"] == texts[:13]
    assert documents_in(corpus, "val") == [text for _, text in docs["rows"]][1 :: docs["every"]]
    assert data.find_prepared("docs", "bpe", tmp_path / "cache") == corpus.folder
    monkeypatch.setattr(data, "docs_versions", lambda: {"torch": "another one"})
    assert data.find_prepared("docs", "bpe", tmp_path / "cache") is None


def test_docs_without_sources(tmp_path, monkeypatch, capsys):
    """A package that is compiled only is said to give nothing; one without __init__.py is read."""
    (tmp_path / "some").mkdir()
    (tmp_path / "some" / "a.pyc").write_bytes(b"compiled")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sources, "DOCS_LIBRARIES", ("python", "some"))
    folders = sources.docs_folders()
    assert folders["some"] == tmp_path / "some"
    monkeypatch.setattr(sources, "docs_folders", lambda: {"some": folders["some"]})
    assert {*sources.docs_documents().values()} == {"python"}  # the language reference
    assert "no docstrings of some" in capsys.readouterr().out


def test_hub_data_sets_stream(tmp_path):
    """Rows of a data set of the hub (here a folder that `datasets` reads like one) are joined to
    documents of four rows."""
    texts = [json.loads(line)["text"] for line in open(write_corpus(tmp_path / "train.jsonl", 7))]
    part = sources.hub_part(str(tmp_path), None, 4, "text")
    assert [*part.documents()] == ["\n".join(texts[:4]), "\n".join(texts[4:])]


def test_bpe_is_bounded_for_any_text(monkeypatch, capsys):
    """If words are too many, as in text without spaces, the BPE is trained on the most frequent
    ones, and a line says so. Words that are too long, such as DNA, are left out."""
    rng, counted = random.Random(0), {}
    monkeypatch.setattr(bpe, "train_bpe", lambda words, n_ids: counted.update(words) or [])
    text = " ".join(rng.choices(WORDS, k=2000))
    exact = Counter(word.encode() for word in bpe.regex.findall(bpe.GPT2_PATTERN, text))
    monkeypatch.setattr(bpe, "BPE_BYTES", 1000)
    odd = [f"{text} " + "".join(rng.choices("汉字文本很长没有空格", k=30)) for _ in range(50)]
    bpe.bpe_state([Part(lambda: ["ACGT" * 999, *odd], 1)])
    assert 900 < sum(map(len, counted)) <= 1000
    assert exact.keys() < counted.keys()
    assert f"trained on the {len(counted)} most frequent" in capsys.readouterr().out


def test_long_documents_are_cut_without_loss():
    """A document of any length is tokenized in chunks, cut in front of white space if possible."""
    for text in ("x" * 1_250_000, "word " * 250_000, "a\n" * 420_000, ""):
        cut = list(data.chunks(text))
        assert "".join(cut) == text and max(map(len, cut)) <= data.ENCODE_CHUNK
        assert text[:1] == "x" or all(chunk[0] in " \n" for chunk in cut[1:])


def test_every_token_is_a_word_in_scripts_without_spaces(corpus):
    """Ideographs, kana, Thai letters and non-ASCII punctuation begin a word, also where a character
    takes several tokens, of which the first begins it. Other letters continue a word."""
    encoding = encoding_of(corpus)
    first, _ = bpe.word_characters(encoding, corpus.vocab_size).tolist()
    for text, inside in (("中文。，かなไทย«»…🦊", False), ("éßαлисaאب한국", True)):
        for character in text:
            tokens = [first[token] for token in encoding.encode_ordinary(character)]
            assert tokens == [inside] + [True] * (len(tokens) - 1), character


def test_interrupted_and_simultaneous(corpus_file, corpus, tmp_path, capsys):
    """A folder without meta.json, which is written last, is prepared again. Of two processes that
    do so at once, one makes the files, and the other waits for it."""
    folder = shutil.copytree(corpus.folder, tmp_path / corpus.folder.name)
    (folder / "meta.json").unlink()
    os.truncate(folder / "train.bin", 100)
    with ThreadPoolExecutor() as pool:
        jobs = [pool.submit(data.prepare, corpus_file, "bpe", tmp_path) for _ in range(2)]
    assert jobs[0].result().meta == jobs[1].result().meta == corpus.meta
    assert capsys.readouterr().out.count("rows without text skipped") == 1
    assert (folder / "train.bin").read_bytes() == (corpus.folder / "train.bin").read_bytes()


def reverse(file):
    file.write_bytes(np.fromfile(file, np.uint16)[::-1].tobytes())


def exchange_merges(file):
    state = json.loads(file.read_text())
    state["ranks"][300:302] = reversed(state["ranks"][300:302])
    file.write_text(json.dumps(state))


@pytest.mark.parametrize("in_cache", [True, False])
def test_a_damaged_folder_is_refused(corpus_file, corpus, tmp_path, in_cache):
    """A prepared folder is used only if its files are those that its meta.json describes, whether
    it is found in the cache or given as --dataset."""
    for number, (name, damage) in enumerate(
        [
            ("train.bin", lambda file: os.truncate(file, 300)),
            ("train.bin", lambda file: os.truncate(file, 301)),
            ("val.bin", lambda file: os.truncate(file, 0)),
            ("val.bin", reverse),
            ("tokenizer.json", exchange_merges),
            ("tokenizer.json", lambda file: file.unlink()),
            *(
                (name, lambda file, text=text: file.write_text(text))
                for name in ("meta.json", "tokenizer.json")
                for text in ("{}", "[]", "null", '{"tokenizer": "bpe", "dtype": 7}')
            ),
        ]
    ):
        folder = tmp_path / str(number) / corpus.folder.name
        shutil.copytree(corpus.folder, folder)
        damage(folder / name)
        dataset = corpus_file if in_cache else str(folder)
        refuses(str(folder), data.prepare, dataset, "bpe", folder.parent)


def test_data_as_a_program(tmp_path, monkeypatch, capsys):
    """~ is expanded. What is prepared is not made again, and a prepared folder needs no text."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "my texts").mkdir()
    write_corpus(tmp_path / "my texts" / "t.jsonl", 20)
    flags = ["--dataset", "~/my texts/*.jsonl", "--text_column=title", "--cache=~/my cache"]
    data.main(flags)
    (folder,) = (tmp_path / "my cache").iterdir()
    assert capsys.readouterr().out.splitlines()[-1] == f"ready: {folder}"
    monkeypatch.setattr(data, "lock", lambda *args: pytest.fail("prepared again"))
    data.main(flags)
    monkeypatch.setattr(data, "find_source", lambda *args: pytest.fail("the text is read"))
    assert documents_in(data.prepare(str(folder), "bpe", "nowhere"), "val") == ["t1"]
    refuses("prepared with --tokenizer bpe", data.prepare, str(folder), "gpt2", "")
