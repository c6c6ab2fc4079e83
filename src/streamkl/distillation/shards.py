"""Token shards: files of token ids, from ``streamkl tokenize`` or datatrove, read one sequence at a time.

A shard is datatrove's: ``NAME.ds`` has the ids one after another, little-endian, of 2 or 4 bytes;
``NAME.ds.index`` the ends of documents (uint64); ``NAME.ds.metadata`` the name of the tokenizer and the bytes per id.
``streamkl tokenize`` adds `INDEX`, which has the digests of all shards and what they were made from.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from streamkl.text import TextError

INDEX, SUFFIX = "corpus.json", ".ds"


@dataclass(frozen=True)
class Shard:
    """A file of token ids.

    Attributes:
        path: The file.
        tokens: How many ids it has.
        dtype: Of an id.
        digest: SHA-256 of the file; for a shard of datatrove that of its metadata and size.
    """

    path: Path
    tokens: int
    dtype: str
    digest: str


def is_tokenized(source: str) -> bool:
    """Whether a source is a token shard, or a folder of them."""
    path = Path(source)
    return path.suffix == SUFFIX or (path / INDEX).is_file() or (path.is_dir() and any(path.rglob(f"*{SUFFIX}")))


def find(source: str, tokenizer: Any) -> list[Shard]:
    """The shards of a source, by name.

    Raises:
        TextError: A shard is missing or cut off, or was made with another tokenizer.
    """
    path = Path(source)
    if (path / INDEX).is_file():
        return _indexed(path, tokenizer)
    files = sorted(path.rglob(f"*{SUFFIX}")) if path.is_dir() else [path]
    return [_plain(file, tokenizer) for file in files]


def read_index(folder: Path) -> dict[str, Any]:
    """The index of a folder of shards.

    Raises:
        TextError: It is something else.
    """
    try:
        found = json.loads((folder / INDEX).read_text(encoding="utf-8"))
    except ValueError:
        found = None
    if not isinstance(found, dict) or not found.keys() >= {"tokenizer", "dtype", "shards", "complete"}:
        raise TextError(f"{folder / INDEX} is not an index of token shards, as `streamkl tokenize` writes it")
    return found


def fingerprint(tokenizer: Any) -> str:
    """SHA-256 of what a tokenizer does with text, as far as it says so."""
    fast = getattr(tokenizer, "backend_tokenizer", None)
    rules = fast.to_str() if fast is not None else json.dumps(sorted(tokenizer.get_vocab().items()))
    return hashlib.sha256(f"{rules}{tokenizer.eos_token_id}".encode()).hexdigest()


def dtype_of(tokenizer: Any) -> str:
    """The dtype of ids: two bytes if they suffice."""
    return "<u2" if len(tokenizer) <= 1 << 16 else "<u4"


class TokenSequences:
    """Sequences of one length from shards; none crosses two of them. Indexing reads one, and keeps nothing.

    Args:
        shards: The shards.
        length: Tokens of a sequence.
        first: The tokens that every sequence starts with, ``[n]``.
        vocabulary: Ids are below it.

    Raises:
        TextError: No shard has a whole sequence.
    """

    def __init__(self, shards: Sequence[Shard], length: int, first: np.ndarray, vocabulary: int) -> None:
        self.shards, self.first, self.vocabulary = shards, first, vocabulary
        self.width = length - len(first)
        self.ends = np.cumsum([shard.tokens // self.width for shard in shards]) if self.width else np.zeros(1, int)
        self.shape = (int(self.ends[-1]), length)
        self.size = self.shape[0] * length
        if not self.shape[0]:
            longest = max(shard.tokens for shard in shards)
            raise TextError(f"the largest shard has {longest:,} tokens, less than one sequence of {length:,}")

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, number: int) -> np.ndarray:
        """One sequence, ``[length]``, uint32."""
        at = int(np.searchsorted(self.ends, number, side="right"))
        shard, before = self.shards[at], int(self.ends[at - 1]) if at else 0
        size = np.dtype(shard.dtype).itemsize
        # Mapped for this read alone: pages that were read before would count as this process's memory.
        ids = np.memmap(shard.path, shard.dtype, "r", offset=(number - before) * self.width * size, shape=self.width)
        if int(ids.max()) >= self.vocabulary:
            raise TextError(
                f"{shard.path} has the token {int(ids.max()):,}, and the tokenizer only {self.vocabulary:,}: it was "
                f"made with another one"
            )
        return np.concatenate((self.first, ids)).astype(np.uint32)

    def digest(self) -> str:
        """SHA-256 of the digests of all shards."""
        return hashlib.sha256(json.dumps([s.digest for s in self.shards]).encode()).hexdigest()


def _indexed(folder: Path, tokenizer: Any) -> list[Shard]:
    index = read_index(folder)
    if not index["complete"]:
        raise TextError(f"{folder} is not complete: the command that makes it, given again, resumes")
    if index["tokenizer"]["digest"] != fingerprint(tokenizer):
        raise TextError(f"{folder} was made with the tokenizer of {index['tokenizer']['name']}, which is another one")
    found = []
    for entry in index["shards"]:
        path = folder / entry["file"]
        _check_size(path, entry["tokens"] * np.dtype(index["dtype"]).itemsize)
        found.append(Shard(path, entry["tokens"], index["dtype"], entry["sha256"]))
    return found


def _plain(path: Path, tokenizer: Any) -> Shard:
    """A shard of datatrove; without metadata, ids have the size that datatrove would give them."""
    if not path.is_file():
        raise TextError(f"there is no file {path}")
    metadata = path.with_name(f"{path.name}.metadata")
    said = metadata.read_text() if metadata.is_file() else ""
    stated = re.match(r"[^\n]*\|([24])\n(\d+)\b", said)
    if said and stated is None:
        raise TextError(
            f"{metadata} must start with a line TOKENIZER|BYTES, 2 or 4, and one of the tokens: got {said[:80]!r}"
        )
    size = int(stated[1]) if stated else np.dtype(dtype_of(tokenizer)).itemsize
    tokens = path.stat().st_size // size
    if stated:
        _check_size(path, int(stated[2]) * size)
    digest = hashlib.sha256(f"{said} {path.name} {tokens}".encode()).hexdigest()
    return Shard(path, tokens, f"<u{size}", digest)


def _check_size(path: Path, wanted: int) -> None:
    if not path.is_file():
        raise TextError(f"{path} is missing")
    found = path.stat().st_size
    if found != wanted:
        raise TextError(f"{path} has {found:,} bytes, and should have {wanted:,}: it was cut off, or changed")
