"""The record of one attention, and the captures that a thread has open."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from streamkl.autocasting import autocast
from streamkl.integrations.transformers.layout import Layout
from streamkl.integrations.transformers.masks import Sequences
from streamkl.sparse import AttentionCall

REFUSED = {"softcap": "a soft cap on its logits", "s_aux": "attention sinks", "position_bias": "a bias by position"}
"""Arguments of attention functions that change the softmax, which StreamKL does not support."""


MASKS = 3
"""How many earlier masks a capture keeps: a model makes one for each kind of layer."""


class Attended(NamedTuple):
    """One attention of a layer.

    Attributes:
        layer: The number of the layer.
        call: Its q and k, after RoPE, in the dtype that attention multiplies (autocast's, where it is on), the scale,
            the mask, the log-sum-exp if it is known, and the indexer's tensors, with their graph if gradients are
            enabled. A padded or packed batch is packed, without padding.
        indices: The selected keys; ``None`` for dense attention.
        query_block: How many queries share their top-k.
        tokens: ``[Tq]``: where each packed query lies in the batch, counted row by row; ``None`` if all are there.
    """

    layer: int
    call: AttentionCall
    indices: Tensor | None = None
    query_block: int = 1
    tokens: Tensor | None = None


class Recorded(NamedTuple):
    """One attention as its function saw it. It is packed where it is read, outside of what checkpointing repeats."""

    layer: int
    query: Tensor
    key: Tensor
    scale: float | None
    sequences: Sequences
    lse: Tensor | None = None

    def attended(self) -> Attended:
        """Its `Attended`."""
        layout, window = self.sequences.layout(self.query.device), self.sequences.window
        with torch.enable_grad():  # it may be read where gradients are off, and keeps its graph
            query, key = layout.queries(self.query), layout.all_keys(self.key)
        call = AttentionCall(
            query, key, self.scale,
            window=None if window is None else (window - 1, 0), cu_seqlens_q=layout.cu_seqlens_q,
            cu_seqlens_k=layout.cu_seqlens_k, lse=_rows(self.lse, layout),
        )  # fmt: skip
        return Attended(self.layer, call, tokens=layout.query_at)


class Capture(Mapping[int, Attended]):
    """The attention of a model's last forward, by the number of the layer.

    Args:
        config: Of the model's decoder.
        numbers: The layer of each attention module that is captured, by ``id(module)``.
        each: Is called with each `Attended`, in place of keeping it.
        lse: Whether the log-sum-exp is wanted where attention has it.
        graph: Whether only calls with gradients enabled are captured.
    """

    def __init__(
        self, config: Any, numbers: dict[int, int], each: Callable[[Attended], None] | None, lse: bool, graph: bool
    ) -> None:
        self.config, self.numbers, self.each, self.lse, self.graph = config, numbers, each, lse, graph
        self._masks: list[tuple[Any, Sequences]] = []
        self._kept: dict[int, Recorded | Attended] = {}
        self._done: dict[int, bool] = {}

    def __getitem__(self, layer: int) -> Attended:
        if layer not in self._kept:
            raise KeyError(f"layer {layer} did not attend: got {sorted(self._kept) or 'none'}")
        kept = self._kept[layer]
        return kept.attended() if isinstance(kept, Recorded) else kept

    def __contains__(self, layer: object) -> bool:
        return layer in self._kept

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(self._kept))

    def __len__(self) -> int:
        return len(self._kept)

    def note(self, mask: Any, sequences: Sequences) -> None:
        """Keeps the sequences of a mask that the model has made; after an attention, that of a new forward."""
        if self._done:
            self._masks, self._done = [], {}
        self._masks = [(mask, sequences), *self._masks[:MASKS]]

    def end(self) -> None:
        """Drops the masks at the end of the block."""
        self._masks = []

    def skips(self, layer: int) -> bool:
        """Whether a call is none to record: checkpointing repeats it, or there is no graph."""
        return layer in self._done or (self.graph and not torch.is_grad_enabled())

    def record(self, recorded: Recorded) -> None:
        """Keeps an attention, or hands it to ``each``."""
        self._done[recorded.layer] = True
        recorded = recorded._replace(query=autocast(recorded.query), key=autocast(recorded.key))
        if self.each is None:
            self._kept[recorded.layer] = recorded
        else:
            self.each(recorded.attended())

    def tell(self, attended: Attended) -> None:
        """Keeps an attention that an implementation of StreamKL has packed already, or hands it to ``each``."""
        if self.graph and not torch.is_grad_enabled():
            return
        call = attended.call
        attended = attended._replace(call=call._replace(q=autocast(call.q), k=autocast(call.k)))
        if self.each is None:
            self._kept[attended.layer] = attended
        else:
            self.each(attended)

    def sequences_of(self, mask: Any, window: int | None, layer: int, query: Tensor, key: Tensor) -> Sequences:
        """The sequences of the mask that a layer attends with: the newest of its window, if there are several.

        Raises:
            ValueError: It is another mask than those that the model made.
        """
        found = [kept for kept in self._masks if kept[0] is mask] or [
            kept for kept in self._masks if _alike(kept[0], mask)
        ]
        if found:
            made, sequences = next((kept for kept in found if kept[1].window == window), found[0])
            if made is not mask and torch.compiler.is_compiling():
                return sequences.unless(((made == 0) != (mask == 0)).any())  # what is read later
            return sequences
        if mask is None and query.shape[2] == key.shape[2]:
            return Sequences(query.shape[0], query.shape[2], key.shape[2])
        shape = list(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise ValueError(
            f"attention is captured with padding as a mask of [batch, tokens]: layer {layer} attends with a mask of "
            f"its own, {shape}"
        )


OPEN: ContextVar[tuple[Capture, ...]] = ContextVar("streamkl_captures", default=())
"""The captures of the calls that this thread, or this task of ``asyncio``, makes."""
TRACED = threading.local()
"""The same, for ``torch.compile``, which traces no context variable."""


def captures_of(module: nn.Module) -> list[tuple[Capture, int]]:
    """The open captures of a module, each with the number of the layer."""
    found = []
    for capture in open_captures():
        number = capture.numbers.get(id(module))
        if number is not None:
            found.append((capture, number))
    return found


def open_captures() -> tuple[Capture, ...]:
    """The captures of this thread or task."""
    return getattr(TRACED, "open", ()) if torch.compiler.is_compiling() else OPEN.get()


def opened(capture: Capture) -> None:
    """Opens a capture."""
    OPEN.set((*OPEN.get(), capture))
    TRACED.open = OPEN.get()


def closed(capture: Capture) -> None:
    """Closes it: by identity, since captures that were opened later may still be open."""
    OPEN.set(tuple(other for other in OPEN.get() if other is not capture))
    TRACED.open = OPEN.get()


def refuse(module: nn.Module, arguments: dict[str, Any], doing: str) -> None:
    """Raises a ``ValueError`` for a softmax that something does not support."""
    for name, what in REFUSED.items():
        if arguments.get(name) is not None:
            raise ValueError(
                f"layer {getattr(module, 'layer_idx', None)} has {what} ({name}), which {doing} does not support"
            )


def _rows(lse: Tensor | None, layout: Layout) -> Tensor | None:
    """``[B, H, Nq]`` as it is, or packed ``[H, Tq]``."""
    if lse is None or not layout.packed:
        return lse
    return layout.queries(lse.unsqueeze(-1)).squeeze(-1).transpose(0, 1)


def _alike(made: Any, mask: Any) -> bool:
    """Whether a mask is a copy of the one that was made, maybe in another dtype; while compiling, whether it may be."""
    if not isinstance(made, Tensor) or not isinstance(mask, Tensor) or made.shape != mask.shape:
        return False
    return torch.compiler.is_compiling() or torch.equal(made == 0, mask.to(made.device) == 0)
