"""A cell: one problem that all implementations of a benchmark run, and its tensors."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from streamkl.testing import STUDENT, TEACHER, Heads

DIRECTIONS = ("forward", "training", "training-both")
MASKS = ("causal", "full")
DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True)
class Cell:
    """One problem.

    Attributes:
        tokens: Queries, and as many keys.
        heads: Query and key heads of the teacher, distributions and key heads of the student.
        dims: Head dims of teacher and student.
        mask: ``causal`` or ``full``.
        dtype: The name of a torch dtype.
        direction: ``forward`` (no graph), ``training`` (forward and backward, gradients to the student) or
            ``training-both`` (gradients to the teacher too).
        batch: Batch size.
        indexer: Whether the student is an indexer: head-summed, with weights unless it has one head. The teacher's LSE
            is given then.
        topk: How many keys are selected per query of an indexer, spread evenly over those that it may see; 0 is all.
        key_span: How many tokens a key of an indexer stands for.
        rest: Whether the teacher of an indexer attends to more than the keys: ``teacher_rest`` is given.
        label: A name for the cell, such as that of a model, if its shape is not enough.
    """

    tokens: int
    heads: Heads
    dims: tuple[int, int]
    mask: str = "causal"
    dtype: str = "bfloat16"
    direction: str = "forward"
    batch: int = 1
    indexer: bool = False
    topk: int = 0
    key_span: int = 1
    rest: bool = False
    label: str = ""

    @classmethod
    def square(cls, heads: int, tokens: int, dim: int, **rest: Any) -> Cell:
        """The same number of heads of one width on every side."""
        return cls(tokens, Heads(heads, heads, heads, heads), (dim, dim), **rest)

    @classmethod
    def of_shape(cls, shape: str, **rest: Any) -> Cell:
        """Reads ``BxHxNxD``, such as ``1x8x4096x128``."""
        match = re.fullmatch(r"(\d+)x(\d+)x(\d+)x(\d+)", shape)
        if match is None or 0 in (numbers := [int(n) for n in match.groups()]):
            raise ValueError(f"a shape is BATCHxHEADSxTOKENSxDIM, such as 1x8x4096x128, not {shape!r}")
        batch, heads, tokens, dim = numbers
        return cls.square(heads, tokens, dim, batch=batch, **rest)

    @classmethod
    def of_dict(cls, values: dict[str, Any]) -> Cell:
        """The cell that `to_dict` wrote."""
        return cls(**{**values, "heads": Heads(*values["heads"]), "dims": tuple(values["dims"])})

    def to_dict(self) -> dict[str, Any]:
        """Numbers, strings and lists, for JSON."""
        return {**asdict(self), "heads": list(self.heads), "dims": list(self.dims)}

    @property
    def causal(self) -> bool:
        """Whether the mask is causal."""
        return self.mask == "causal"

    @property
    def wanted(self) -> tuple[str, ...]:
        """The inputs that want gradients."""
        student = (*STUDENT, "student_w") if self.weighted else STUDENT
        return {"forward": (), "training": student, "training-both": student + TEACHER}[self.direction]

    @property
    def weighted(self) -> bool:
        """Whether the student's heads have weights."""
        return self.indexer and self.heads.student > 1

    @property
    def distributions(self) -> int:
        """How many losses a query has."""
        return 1 if self.indexer else self.heads.student

    @property
    def keys(self) -> int:
        """The number of keys."""
        return self.tokens // self.key_span

    @property
    def plain(self) -> Cell:
        """The cell whose keys are tokens, and all that the teacher attends to."""
        return replace(self, key_span=1, rest=False)

    @property
    def pairs(self) -> int:
        """Pairs of a query and a key that the mask allows, per head."""
        seen = ((row + 1) // self.key_span if self.causal else self.keys for row in range(self.tokens))
        return self.batch * sum(min(keys, self.topk) if self.topk else keys for keys in seen)

    @property
    def layout(self) -> str:
        """Heads and dims, such as ``8x128`` or ``32/8x128 to 1x64``, with the label that the cell may have."""
        sides = [
            f"{heads}{'' if heads == kv_heads else f'/{kv_heads}'}x{dim}"
            for heads, kv_heads, dim in zip(self.heads[::2], self.heads[1::2], self.dims, strict=True)
        ]
        both = " to indexer ".join(sides) if self.indexer else " to ".join(dict.fromkeys(sides))
        both += f" on {self.topk:,} keys" if self.topk else ""
        both += f", a key for {self.key_span} tokens" if self.key_span > 1 else ""
        both += ", with a rest" if self.rest else ""
        batch = f"{self.batch}x" if self.batch > 1 else ""
        return f"{self.label} {batch}{both}".strip()

    def __str__(self) -> str:
        return f"{self.tokens:,} tokens, {self.layout}, {self.mask}, {self.dtype}, {self.direction}"

    def shortened(self, most: int) -> Cell:
        """The same cell with at most ``most`` tokens."""
        return replace(self, tokens=min(self.tokens, most))


Inputs = dict[str, Tensor]
"""``teacher_q``, ``teacher_k``, ``student_q`` and ``student_k``, each ``[B, heads, N, D]``; for an indexer also its
weights ``student_w [B, N, J]``, in float32, selected keys ``topk_indices [B, N, K]`` and ``teacher_rest [B, H, N]``.
Keys are fewer where each stands for several tokens."""


def draw_inputs(cell: Cell, device: str | torch.device) -> Inputs:
    """Standard normal values of a fixed seed, drawn in the cell's dtype; those that want gradients require them."""
    rng = torch.Generator(device).manual_seed(0)
    (h, h_kv, r, r_kv), (dt, ds) = cell.heads, cell.dims
    sizes = dict(zip(TEACHER + STUDENT, ((h, dt), (h_kv, dt), (r, ds), (r_kv, ds)), strict=True))
    inputs = {
        name: torch.randn(
            cell.batch, heads, cell.keys if name.endswith("_k") else cell.tokens, dim, generator=rng, device=device,
            dtype=getattr(torch, cell.dtype),
        )
        for name, (heads, dim) in sizes.items()
    }  # fmt: skip
    if cell.weighted:
        inputs["student_w"] = torch.randn(cell.batch, cell.tokens, r, generator=rng, device=device) * r**-0.5
    if cell.topk:
        inputs["topk_indices"] = _spread_keys(cell, device)
    if cell.rest:
        inputs["teacher_rest"] = torch.randn(cell.batch, h, cell.tokens, generator=rng, device=device)
    return {name: x.requires_grad_(name in cell.wanted) for name, x in inputs.items()}


def _spread_keys(cell: Cell, device: str | torch.device) -> Tensor:
    """``[B, N, K]``, int32: from the last key that a query sees backwards, -1 where there are no more."""
    first = 0 if cell.causal else cell.tokens - 1
    last = torch.arange(cell.tokens, dtype=torch.int32, device=device)[:, None].clamp_(min=first)
    step = (last // cell.topk).clamp_(min=1)
    keys = last - step * torch.arange(cell.topk, dtype=torch.int32, device=device)
    return keys.clamp_(min=-1).expand(cell.batch, -1, -1)
