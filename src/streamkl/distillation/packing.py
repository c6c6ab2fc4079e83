"""Text packed into sequences of one length: documents one after another, an end-of-text token between them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from streamkl.distillation.settings import DATASET, split_sources
from streamkl.text import TextError, documents, documents_of

PART = 1 << 17
"""How many characters are tokenized at a time."""


def packed(tokenizer: Any, sources: list[str], length: int, most: int, *, field: str, encoding: str) -> np.ndarray:
    """Sequences of tokens, ``[sequences, length]``, uint32.

    Text is read and tokenized until there are enough sequences, so a source may be of any size.

    Args:
        tokenizer: Of transformers.
        sources: Files, folders, or datasets by ``dataset:NAME@SPLIT``.
        length: Tokens of a sequence.
        most: How many sequences there are at most.
        field: The field of a JSONL line or a dataset's row that has the text.
        encoding: Of files.

    Raises:
        TextError: A source cannot be read, or there is less text than one sequence.
    """
    first = first_tokens(tokenizer)
    width = length - len(first)
    wanted, parts, found = width * most, [], 0
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    for starts, text in _texts(sources, field, encoding):
        # verbose=False: transformers would warn of texts longer than the model's context, before they are cut
        ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        ids = np.asarray(end + ids if starts and found else ids, dtype=np.uint32)
        parts.append(ids)
        found += len(ids)
        if found >= wanted:
            break
    if found < width or not width:
        raise TextError(
            f"the text has {found:,} token{'' if found == 1 else 's'}, less than one sequence of {length:,}: "
            f"name more text, or a smaller length"
        )
    sequences = min(found // width, most)
    text = np.concatenate(parts)[: sequences * width].reshape(sequences, width)
    return np.concatenate((np.tile(first, (sequences, 1)), text), 1)


def first_tokens(tokenizer: Any) -> np.ndarray:
    """The token that the tokenizer puts before every text, if there is one: a sequence starts with it."""
    ids = tokenizer.encode("a")
    known = len(ids) > 1 and ids[0] == tokenizer.bos_token_id
    return np.asarray(ids[:1] if known else [], dtype=np.uint32)


def texts(source: str, field: str, encoding: str) -> Iterator[tuple[bool, str]]:
    """The texts of one file or dataset, each with whether a document starts with it."""
    if source.startswith(DATASET):
        for row in _rows(source.removeprefix(DATASET), field):
            yield True, row
        return
    for document in documents_of(Path(source), field=field, encoding=encoding, part=PART):
        yield document.part == 0, document.text


def _texts(sources: list[str], field: str, encoding: str) -> Iterator[tuple[bool, str]]:
    """Texts in the order of their sources, each with whether a document starts with it."""
    files, datasets = split_sources(sources)
    if files:
        for document in documents(files, field=field, encoding=encoding, part=PART):
            yield document.part == 0, document.text
    for dataset in datasets:
        yield from texts(f"{DATASET}{dataset}", field, encoding)


def _rows(name: str, field: str) -> Iterator[str]:
    """The texts of a dataset: a folder that ``save_to_disk`` wrote, or a name for ``load_dataset``."""
    import datasets

    name, _, split = name.partition("@")
    try:
        loaded: Any = datasets.load_from_disk(name)
        loaded = loaded[split or "train"] if isinstance(loaded, dict) else loaded
    except (FileNotFoundError, KeyError):
        try:
            loaded = datasets.load_dataset(name, split=split or "train", streaming=True)
        except Exception as error:
            raise TextError(f"datasets cannot load {name!r}, split {split or 'train'!r}: {error}") from error
    rows: Iterable[Any] = loaded
    empty = True
    for row in rows:
        if not isinstance(row.get(field), str):
            raise TextError(f"a row of {name!r} has no text under {field!r}, but {', '.join(map(repr, row))}")
        if row[field].strip():
            empty = False
            yield row[field]
    if empty:
        raise TextError(f"no text in the dataset {name!r}")
