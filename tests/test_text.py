"""Text of files and JSON lines as documents, and what hostile files do."""

import json
import tracemalloc
from pathlib import Path

import pytest

from streamkl import text
from streamkl.text import TextError, documents


def write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def test_files_folders_and_json_lines_are_read_in_order(tmp_path: Path) -> None:
    write(tmp_path / "b.txt", "\ufeffone\r\ntwo\rthree")
    write(tmp_path / "a.jsonl", '{"text": "first"}\n\n"second"\n')
    write(tmp_path / "ignored.md", "not text of ours")
    assert [(d.file.name, *d[1:]) for d in documents([tmp_path])] == [
        ("a.jsonl", 1, 0, "first"),
        ("a.jsonl", 3, 0, "second"),
        ("b.txt", 0, 0, "one\ntwo\nthree"),
    ]
    assert [d.text for d in documents([tmp_path / "ignored.md"])] == ["not text of ours"]
    assert [d.text for d in documents([write(tmp_path / "c.jsonl", '{"body": "x"}')], field="body")] == ["x"]


def test_long_documents_come_in_parts_that_are_the_whole(tmp_path: Path) -> None:
    for content in ("é and so on, " * 1000, "né" * 5000, "a\r\n" * 4000):
        path = write(tmp_path / "long.txt", content)
        parts = list(documents([path], part=997))
        assert "".join(p.text for p in parts) == content.replace("\r\n", "\n")
        assert max(len(p.text) for p in parts) <= 997
        assert [p.part for p in parts] == list(range(len(parts)))


@pytest.mark.slow
def test_a_line_of_200_mb_is_read_in_little_memory(tmp_path: Path) -> None:
    path = tmp_path / "line.txt"
    with path.open("wb") as handle:
        for _ in range(200):
            handle.write(b"x" * (1 << 20))
    tracemalloc.start()
    count = sum(len(d.text) for d in documents([path]))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count == 200 << 20
    assert peak < 16 << 20, f"{peak >> 20} MB"


def test_a_line_of_json_that_is_too_long_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text, "LONGEST_LINE", 1 << 20)
    path = write(tmp_path / "long.jsonl", json.dumps("short") + "\n" + json.dumps("y" * (1 << 20)))
    with pytest.raises(TextError, match=r"line 2 of .*long.jsonl has more than 1 MB"):
        list(documents([path]))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty.txt", "", r"no text in .*empty.txt"),
        ("spaces.txt", " \n\t\n", r"no text in .*spaces.txt"),
        ("empty.jsonl", '""\n{"text": ""}\n', r"no text in .*empty.jsonl"),
        ("latin.txt", "caf\u00e9".encode("latin-1"), r"latin.txt is not UTF-8: byte 0xe9 at offset 3"),
        ("latin.jsonl", b'"ok"\n"caf\xe9"\n', r"latin.jsonl is not UTF-8: byte 0xe9 at offset 9"),
        ("utf16.txt", "text".encode("utf-16"), r"utf16.txt is not UTF-8: byte 0xff at offset 0"),
        ("broken.jsonl", '"ok"\n{"text": ', r"line 2 of .*broken.jsonl is not JSON"),
        ("other.jsonl", '{"body": "x"}', r"line 1 of .*other.jsonl has no 'text', but 'body'"),
        ("number.jsonl", '{"text": 3}', r"the text of line 1 of .*number.jsonl is no string but int"),
    ],
)
def test_what_is_not_text_is_named(tmp_path: Path, name: str, content: str | bytes, message: str) -> None:
    with pytest.raises(TextError, match=message):
        list(documents([write(tmp_path / name, content)]))


def test_a_byte_of_another_encoding_is_found_behind_a_cut_character(tmp_path: Path) -> None:
    path = write(tmp_path / "cut.txt", b"a" * 9 + "é".encode() + b"b" * 8 + b"\xff")
    with pytest.raises(TextError, match="byte 0xff at offset 19"):
        list(documents([path], part=10))
    assert [d.text for d in documents([write(tmp_path / "l.txt", b"caf\xe9")], encoding="latin-1")] == ["café"]
    for encoding in ("latin-99", "hex"):
        with pytest.raises(TextError, match=f"there is no encoding '{encoding}'"):
            list(documents([tmp_path / "l.txt"], encoding=encoding))


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(TextError, match=r"there is no file .*missing.txt"):
        list(documents([tmp_path / "missing.txt"]))
    with pytest.raises(TextError, match=r"has no .txt or .jsonl file"):
        list(documents([tmp_path]))
    with pytest.raises(TextError, match="no text was named"):
        list(documents([]))
