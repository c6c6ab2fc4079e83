"""Passages of an exact number of tokens, cut from a user's text at random places."""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from streamkl.text import Document, TextError, documents

CHARACTERS = 1 << 28
"""How many characters of text are kept; the rest is not used."""

PER_TOKEN = 5
"""An estimate of the characters per token."""


class Book(NamedTuple):
    """The text of one file."""

    name: str
    text: str


class Haystack:
    """Books, and the tokenizer that measures their passages.

    Attributes:
        books: Those that have text.
        digest: Of all text, to recognise it.
    """

    def __init__(self, books: Iterable[Book], tokenizer: Any) -> None:
        self.books, self.tokenizer = list(books), tokenizer
        digest = hashlib.sha256()
        for book in self.books:
            digest.update(book.text.encode("utf-8", "surrogatepass"))
        self.digest = digest.hexdigest()[:16]

    @classmethod
    def read(cls, paths: Iterable[str | Path], tokenizer: Any, *, field: str, encoding: str) -> Haystack:
        """Of files: each is a book, and the lines of a file of JSON lines follow one another in it."""
        found = documents(paths, field=field, encoding=encoding)
        books, left = [], CHARACTERS
        for file, parts in itertools.groupby(found, key=lambda document: document.file):
            text = _joined(parts, left)
            left -= len(text)
            books.append(Book(file.name, text))
            if left <= 0:
                break
        return cls(books, tokenizer)

    def encode(self, text: str) -> list[int]:
        """The tokens of a text, without special ones."""
        return self.tokenizer.encode(text, add_special_tokens=False, verbose=False)

    def passage(self, rng: random.Random, tokens: int) -> tuple[str, list[int]]:
        """A passage that starts with a sentence where it can.

        Args:
            rng: Chooses the book, by its length, and the place in it.
            tokens: How many the passage has.

        Returns:
            The name of its book, and its tokens.

        Raises:
            TextError: No book has as many.
        """
        books = self.books
        while books:
            book = rng.choices(books, [len(book.text) for book in books])[0]
            ids = self._cut(rng, book.text, tokens)
            if len(ids) == tokens:
                return book.name, ids
            books = [other for other in books if other is not book]
        longest = max(self.books, key=lambda book: len(book.text))
        count = len(self.encode(longest.text))
        raise TextError(
            f"no text is long enough: {tokens:,} tokens of prose are needed, and the longest of {len(self.books)}, "
            f"{longest.name}, has {count:,}; name longer texts, or shorter lengths"
        )

    def _cut(self, rng: random.Random, text: str, tokens: int) -> list[int]:
        """``tokens`` tokens of a text, or all it has if it has fewer."""
        at, size = rng.random(), PER_TOKEN * tokens
        while True:
            start = int(at * max(0, len(text) - size))
            start = _sentence(text, start, start + min(1000, size // 8))
            ids = self.encode(text[start : start + size + PER_TOKEN * 8])
            if len(ids) >= tokens or size >= len(text):
                return ids[:tokens] if len(ids) >= tokens else self.encode(text)[:tokens]
            size *= 2


def _joined(parts: Iterable[Document], limit: int) -> str:
    """The text of a file, up to a limit."""
    texts, held, line = [], 0, 0
    for part in parts:
        if held < limit:
            texts.append("\n\n" + part.text if part.line != line and texts else part.text)
            held += len(texts[-1])
        line = part.line
    return "".join(texts)[:limit]


def _sentence(text: str, start: int, end: int) -> int:
    """The start of the first sentence in ``[start, end)``; ``start`` if there is none."""
    if start == 0:
        return 0
    found = [at + len(mark) for mark in (". ", ".\n", "\n\n", "? ", "! ") if (at := text.find(mark, start, end)) >= 0]
    return min(found, default=start)
