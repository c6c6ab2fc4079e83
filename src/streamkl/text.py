"""A user's text as documents: files of text or of JSON lines, read piece by piece.

No file is held in memory: a document longer than `PART` characters comes in parts. Text that cannot be read raises a
`TextError` that says where it is and what to do.
"""

from __future__ import annotations

import codecs
import itertools
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

PART = 1 << 20
"""How many characters a part of a document has at most."""

LONGEST_LINE = 1 << 28
"""How many bytes a line of JSON may have: it is parsed as a whole."""

SUFFIXES = (".txt", ".jsonl")
"""The files that are read from a folder."""


class TextError(ValueError):
    """A file that cannot be read as text, or has none."""


class Document(NamedTuple):
    """A document, or a part of a long one.

    Attributes:
        file: The file that it is from.
        line: The number of its line in a file of JSON lines, from 1; 0 for a file that is one document.
        part: 0 for the first part, 1 for the next.
        text: At most `PART` characters, not all of them spaces.
    """

    file: Path
    line: int
    part: int
    text: str


def files(paths: Iterable[str | Path]) -> list[Path]:
    """The files that are named, and for folders the ``.txt`` and ``.jsonl`` files in them, by name.

    Raises:
        TextError: There is nothing under a name, or no file at all.
    """
    found: list[Path] = []
    for path in map(Path, paths):
        if path.is_dir():
            inside = sorted(p for p in path.rglob("*") if p.suffix in SUFFIXES and p.is_file())
            if not inside:
                raise TextError(f"the folder {path} has no {' or '.join(SUFFIXES)} file")
            found += inside
        elif path.exists():
            found.append(path)
        else:
            raise TextError(f"there is no file {path}")
    if not found:
        raise TextError("no text was named")
    return found


def documents(
    paths: Iterable[str | Path], *, field: str = "text", encoding: str = "utf-8", part: int = PART
) -> Iterator[Document]:
    r"""The documents of files, one after another: a ``.jsonl`` file has one per line, every other file is one.

    A line of JSON is a string, or an object with a string under ``field``. Files, lines and parts without a character
    that is not a space are left out.

    Args:
        paths: Files, or folders of them.
        field: The name of the text in a line of JSON.
        encoding: Of all files. A mark of the byte order is not part of the text.
        part: How many characters a part has at most.

    Raises:
        TextError: A file is missing, is not of this encoding, or has a line that is not of this form; or none of the
            files has text.

    Examples:
        >>> import pathlib, tempfile
        >>> from streamkl.text import documents
        >>> file = pathlib.Path(tempfile.mkdtemp()) / "two.jsonl"
        >>> _ = file.write_text('{"text": "It is a truth"}\n{"text": "universally acknowledged"}\n')
        >>> [document.text for document in documents([file])]
        ['It is a truth', 'universally acknowledged']
    """
    found = files(paths)
    empty = True
    for path in found:
        for document in documents_of(path, field=field, encoding=encoding, part=part):
            empty = False
            yield document
    if empty:
        raise TextError(f"no text in {_named(found)}")


def documents_of(path: Path, *, field: str = "text", encoding: str = "utf-8", part: int = PART) -> Iterator[Document]:
    """The documents of one file, as `documents` has them; none if it has no text."""
    whole = _lines(path, field, encoding) if path.suffix == ".jsonl" else [(0, _pieces(path, encoding, part))]
    for line, pieces in whole:
        texts = (text for text in _parts(pieces, part) if not text.isspace())
        for number, text in enumerate(texts):
            yield Document(path, line, number, text)


def _parts(pieces: Iterable[str], part: int) -> Iterator[str]:
    """Pieces as parts of at most ``part`` characters, cut after a space where there is one in a part's last half."""
    left = ""
    for piece in pieces:
        left, start = left + piece, 0  # a line of JSON is one piece: it is copied once, not once per part
        while len(left) - start > part:
            space = max(left.rfind(mark, start + part // 2, start + part) for mark in "\n ")
            end = space + 1 if space >= 0 else start + part
            yield left[start:end]
            start = end
        left = left[start:]
    if left:
        yield left


def _pieces(path: Path, encoding: str, size: int) -> Iterator[str]:
    r"""A file's text in pieces, with ``\n`` at the ends of lines."""
    decoder = _decoder(encoding)
    read, held = 0, ""
    with path.open("rb") as handle:
        while True:
            data = handle.read(size)
            text = held + _decode(decoder, data, path, read, final=not data)
            held = text[-1:] if text.endswith("\r") and data else ""  # the \n of an \r\n may be in the next piece
            yield text[: len(text) - len(held)].replace("\r\n", "\n").replace("\r", "\n")
            read += len(data)
            if not data:
                return


def _lines(path: Path, field: str, encoding: str) -> Iterator[tuple[int, Iterable[str]]]:
    """The number and the text of each line of JSON that has text."""
    read = 0
    with path.open("rb") as handle:
        for number in itertools.count(1):
            data = handle.readline(LONGEST_LINE + 1)
            if not data:
                return
            if len(data) > LONGEST_LINE:
                raise TextError(
                    f"line {number} of {path} has more than {LONGEST_LINE >> 20} MB, and a line of JSON is parsed "
                    f"whole: give long texts as files of text"
                )
            line = _decode(_decoder(encoding), data, path, read, final=True)
            read += len(data)
            if not line.isspace():
                yield number, [_text_of(line, field, path, number)]


def _text_of(line: str, field: str, path: Path, number: int) -> str:
    """The text of a line of JSON."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise TextError(f"line {number} of {path} is not JSON: {error}") from None
    if isinstance(value, dict):
        if field not in value:
            raise TextError(f"line {number} of {path} has no {field!r}, but {', '.join(map(repr, value)) or 'nothing'}")
        value = value[field]
    if not isinstance(value, str):
        raise TextError(f"the text of line {number} of {path} is no string but {type(value).__name__}")
    return value


def _decoder(encoding: str) -> codecs.IncrementalDecoder:
    try:
        name = codecs.lookup(encoding).name
        b"a".decode(name, "ignore")  # there are codecs of bytes, too
    except LookupError:
        raise TextError(f"there is no encoding {encoding!r}: name one as Python does, such as latin-1") from None
    return codecs.getincrementaldecoder("utf-8-sig" if name == "utf-8" else name)()


def _decode(decoder: codecs.IncrementalDecoder, data: bytes, path: Path, read: int, *, final: bool) -> str:
    before = len(decoder.getstate()[0])  # bytes of a character that the last piece cut
    try:
        return decoder.decode(data, final)
    except UnicodeDecodeError as error:
        at, byte = read - before + error.start, error.object[error.start]
        raise TextError(
            f"{path} is not {error.encoding.upper()}: byte 0x{byte:02x} at offset {at:,}; name its encoding, or "
            f"convert it with `iconv -f LATIN1 -t UTF-8`"
        ) from None


def _named(paths: list[Path]) -> str:
    """The first names of a list."""
    shown = ", ".join(str(path) for path in paths[:3])
    return shown if len(paths) <= 3 else f"{shown} and {len(paths) - 3} more files"
