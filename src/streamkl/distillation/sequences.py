"""The text of a run in sequences of tokens, and their samples."""

from __future__ import annotations

import hashlib
import warnings
from typing import Any

import numpy as np

from streamkl.distillation import shards
from streamkl.distillation.packing import first_tokens, packed
from streamkl.distillation.samples import Samples
from streamkl.distillation.settings import RunSettings
from streamkl.distillation.shards import TokenSequences
from streamkl.text import TextError


def samples_of(settings: RunSettings, tokenizer: Any, groups: int, *, late: bool = False) -> Samples:
    """All samples of a run.

    Args:
        settings: Of the run.
        tokenizer: Of the model.
        groups: How many processes, or groups of them that share a sequence, have samples of their own.
        late: Whether the weight of a query is the number of keys that it sees.
    """
    per_step = settings.batch * settings.accumulation * groups
    found = sequences(tokenizer, settings, settings.steps * per_step)
    if len(found) < per_step:
        warnings.warn(
            f"the text has {len(found)} sequences of {settings.length} tokens, fewer than one step takes: they are "
            f"repeated",
            RuntimeWarning,
            stacklevel=3,
        )
    return Samples(
        found, settings.steps * per_step, settings.seed, tokenizer=tokenizer, share=settings.needles,
        facts=settings.facts, answer_weight=settings.answer_weight, late=late,
    )  # fmt: skip


def sequences(tokenizer: Any, settings: RunSettings, most: int) -> np.ndarray | TokenSequences:
    """The text in sequences: packed now, or read from token shards."""
    tokenized = [source for source in settings.text if shards.is_tokenized(source)]
    if not tokenized:
        return packed(tokenizer, settings.text, settings.length, most, field=settings.field, encoding=settings.encoding)
    if len(tokenized) < len(settings.text):
        raise TextError(
            f"{tokenized[0]} has token shards, and the rest of the text has not: tokenize all of it, or none"
        )
    found = [shard for source in tokenized for shard in shards.find(source, tokenizer)]
    return TokenSequences(found, settings.length, first_tokens(tokenizer), len(tokenizer))


def digest(sequences: np.ndarray | TokenSequences) -> str:
    """A digest of all tokens, or of the shards that have them."""
    if isinstance(sequences, TokenSequences):
        return sequences.digest()
    return hashlib.sha256(np.ascontiguousarray(sequences).data).hexdigest()
