"""Seeded problems over the whole contract of ``attention_kl``: `make_case` builds one, `random_case` draws one.

Every tensor sits in a larger one filled with nan, with random strides, so that a read outside of it shows. Rows that
must not matter (they see no key, have weight 0, or lie past the last packed sequence) hold nan themselves, and so do
keys that no other row sees.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from streamkl import reference

DIMS = (16, 40, 59, 64, 80, 96, 111, 128, 192, 256, 576)
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
STUDENT = ("student_q", "student_k")
TEACHER = ("teacher_q", "teacher_k")


class Heads(NamedTuple):
    """Query and key heads of the teacher, distributions and key heads of the student."""

    teacher: int = 4
    teacher_kv: int = 2
    student: int = 4
    student_kv: int = 4


@dataclass
class Case:
    """One call of ``attention_kl``, the gradients asked of it, and what it should be compared with.

    Attributes:
        seed: What its values were drawn with.
        tensors: ``teacher_q``, ``teacher_k``, ``student_q``, ``student_k``.
        options: The keyword arguments, without ``teacher_lse``.
        teacher_lse: Rounded from float64; nan in rows that must not matter.
        wanted: The names of the tensors that want a gradient.
        upstream: The gradient of the loss, of the loss's shape.
        dead_rows: ``[Nq]`` of bool: rows that must not matter.
    """

    seed: int
    tensors: dict[str, Tensor]
    options: dict[str, Any]
    teacher_lse: Tensor | None
    wanted: tuple[str, ...]
    upstream: Tensor
    dead_rows: Tensor

    def to(self, device: str | torch.device) -> Case:
        """The same case on another device."""

        def move(x: Any) -> Any:
            return x.to(device) if isinstance(x, Tensor) else x

        tensors, options = ({name: move(x) for name, x in part.items()} for part in (self.tensors, self.options))
        lse, upstream, dead = move(self.teacher_lse), move(self.upstream), move(self.dead_rows)
        return Case(self.seed, tensors, options, lse, self.wanted, upstream, dead)

    def clean(self, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        """The tensors with 0 in the rows that must not matter, contiguous; cast to ``dtype`` if given."""
        return {
            name: torch.where(x.isnan(), 0.0, x.detach()).to(dtype or x.dtype).contiguous()
            for name, x in self.tensors.items()
        }

    def __str__(self) -> str:
        shapes = ", ".join(f"{name} {list(x.shape)} {str(x.dtype)[6:]}" for name, x in self.tensors.items())
        options = {name: list(x.shape) if isinstance(x, Tensor) else x for name, x in self.options.items()}
        lse = "with" if self.teacher_lse is not None else "without"
        return f"seed {self.seed}: {shapes}; {options}; {lse} teacher_lse; gradients to {', '.join(self.wanted)}"


def make_case(
    seed: int = 0,
    *,
    heads: Heads = Heads(),  # noqa: B008
    dims: tuple[int, int] = (32, 32),
    dtypes: tuple[torch.dtype, torch.dtype] = (torch.float32, torch.float32),
    batch: int = 2,
    tokens: tuple[int, int] = (50, 50),
    cu_seqlens: tuple[list[int], list[int]] | None = None,
    teacher_lse: bool = False,
    row_weight: Tensor | None = None,
    wanted: tuple[str, ...] = STUDENT,
    spread: tuple[float, float] = (1.0, 1.0),
    offset: tuple[float, float] = (0.0, 0.0),
    guard: bool = True,
    device: str | torch.device = "cpu",
    **options: Any,
) -> Case:
    """Builds one problem; the same arguments give the same problem.

    Args:
        seed: Draws values, strides and upstream gradient.
        heads: How many heads of each kind.
        dims: Head dims of teacher and student.
        dtypes: Dtypes of teacher and student.
        batch: Batch size; 1 for packed sequences.
        tokens: Queries and keys of a batch element, or of all packed sequences and what lies past them.
        cu_seqlens: Starts of packed queries and keys.
        teacher_lse: Whether the call is given one.
        row_weight: ``[B, Nq]`` or ``[B, R, Nq]``, packed ``[Tq]`` or ``[R, Tq]``.
        wanted: The names of the tensors that want a gradient.
        spread: Standard deviations of teacher and student logits, about.
        offset: Added to the first element of each query and key: shifts the logits of a row together.
        guard: Puts the tensors into larger ones filled with nan, with random strides.
        device: Where the tensors live; their values do not depend on it.
        options: Keyword arguments of ``attention_kl``.
    """
    rng = random.Random(seed)
    torch_rng = torch.Generator().manual_seed(seed)
    (nq, nk), packed = tokens, cu_seqlens is not None
    shapes = {
        "teacher_q": (batch, heads.teacher, nq, dims[0]),
        "teacher_k": (batch, heads.teacher_kv, nk, dims[0]),
        "student_q": (batch, heads.student, nq, dims[1]),
        "student_k": (batch, heads.student_kv, nk, dims[1]),
    }
    values = {}
    for n, (name, shape) in enumerate(shapes.items()):
        x = torch.randn(shape, generator=torch_rng) * (spread[n // 2] if name.endswith("_q") else 1.0)
        x[..., 0] += offset[n // 2]
        values[name] = x.to(dtypes[n // 2])

    options = {"causal": False, "window": None, **options}
    if cu_seqlens is not None:
        options["cu_seqlens_q"], options["cu_seqlens_k"] = (
            torch.tensor(starts, dtype=torch.int32 if seed % 2 else torch.int64) for starts in cu_seqlens
        )
    mask: dict[str, Any] = {name: options.get(name) for name in ("causal", "window", "cu_seqlens_q", "cu_seqlens_k")}
    allowed = reference.allowed_pairs(nq, nk, **mask)
    dead = ~allowed.any(-1)
    if row_weight is not None:
        options["row_weight"] = row_weight
        dead = dead | (row_weight == 0).reshape(row_weight.shape[:-1].numel(), nq).all(0)
    unseen = ~allowed[~dead].any(0)
    for side in ("teacher", "student"):
        values[f"{side}_q"][:, :, dead] = torch.nan
        values[f"{side}_k"][:, :, unseen] = torch.nan
    if packed:
        values = {name: x[0].transpose(0, 1) for name, x in values.items()}

    lse = None
    if teacher_lse:
        q, k = (torch.where(values[name].isnan(), 0.0, values[name]).double() for name in TEACHER)
        lse = reference.attention_lse(q, k, scale=options.get("teacher_scale"), **mask)
        lse = torch.where(dead, torch.nan, lse).to(torch.float64 if torch.float64 in dtypes else torch.float32)
    rows = (heads.student, nq) if packed else (batch, heads.student, nq)
    upstream = torch.randn(rows if options.get("reduction") == "none" else (), generator=torch_rng)

    def place(x: Tensor) -> Tensor:
        return _guarded(x, rng, device) if guard else x.to(device)

    for name in ("row_weight", "cu_seqlens_q", "cu_seqlens_k"):
        if options.get(name) is not None:
            options[name] = place(options[name])
    return Case(
        seed, {name: place(x) for name, x in values.items()}, options, None if lse is None else place(lse),
        wanted, upstream.to(device), dead.to(device),
    )  # fmt: skip


def random_case(
    seed: int,
    *,
    device: str | torch.device = "cpu",
    dtypes: tuple[torch.dtype, ...] = DTYPES,
    dims: tuple[int, ...] = DIMS,
    max_tokens: int = 96,
    max_heads: int = 9,
    max_batch: int = 3,
) -> Case:
    """Draws one problem of the contract; the same seed gives the same problem.

    Args:
        seed: Any integer.
        device: Where the tensors live; their values do not depend on it.
        dtypes: The dtypes to draw the teacher's and the student's from.
        dims: The head dims to draw from.
        max_tokens: The most queries, and keys, of a batch element or of all packed sequences together.
        max_heads: The most heads of the student; the teacher has up to three times as many.
        max_batch: The most batch elements.

    Example:
        >>> from streamkl.testing import check_accuracy, random_case
        >>> check_accuracy(random_case(3), backend="tiled").worst <= 1
        True
    """
    rng = random.Random(seed)
    drawn: dict[str, Any] = {}
    teacher_dtype = rng.choice(dtypes)
    drawn["dtypes"] = (teacher_dtype, teacher_dtype if rng.random() < 0.7 else rng.choice(dtypes))
    heads = drawn["heads"] = _draw_heads(rng, max_heads)
    drawn["dims"] = (rng.choice(dims), rng.choice(dims))
    packed = rng.random() < 0.35
    batch = drawn["batch"] = 1 if packed else min(rng.choice((1, 1, 2, 3)), max_batch)
    if packed:
        drawn["tokens"], drawn["cu_seqlens"] = _draw_sequences(rng, max_tokens)
    else:
        nq = rng.choice((0, 1, 2)) if rng.random() < 0.1 else rng.randint(3, max_tokens)
        nk = nq if rng.random() < 0.5 else rng.randint(0 if rng.random() < 0.1 else 1, max_tokens)
        drawn["tokens"] = (nq, nk)
    drawn["causal"] = rng.random() < 0.5
    drawn["window"] = _draw_window(rng, max_tokens)
    drawn["teacher_lse"] = rng.random() < 0.5
    if rng.random() < 0.5:
        drawn["row_weight"] = _draw_row_weight(
            rng, batch, heads.student, drawn["tokens"][0], packed, drawn["dtypes"][1]
        )
    for name in ("teacher_scale", "student_scale"):
        drawn[name] = None if rng.random() < 0.6 else rng.choice((0.05, 0.3, 1.0))
    drawn["spread"] = (rng.choice((0.3, 1.0, 3.0)), rng.choice((0.3, 1.0, 3.0)))
    drawn["offset"] = (rng.choice((0, 0, 0, 2, 8)), rng.choice((0, 0, 0, 2, 8)))
    drawn["student_activation"] = "relu" if rng.random() < 0.25 else None
    drawn["reduction"] = rng.choice(("mean", "sum", "none"))
    if heads.teacher == heads.student:
        drawn["divergence"] = rng.choice(("forward", "forward", "reverse"))
        drawn["wanted"] = rng.choice((STUDENT, STUDENT, TEACHER, STUDENT + TEACHER))
    return make_case(seed, device=device, **drawn)


def _draw_heads(rng: random.Random, most: int) -> Heads:
    student = rng.choice([n for n in (1, 1, 2, 3, 4, 6, 9) if n <= most])
    teacher = student * rng.choice((1, 1, 1, 2, 3))
    return Heads(teacher, rng.choice(_divisors(teacher)), student, rng.choice(_divisors(student)))


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def _draw_window(rng: random.Random, max_tokens: int) -> tuple[int, int] | None:
    if rng.random() < 0.6:
        return None
    left, right = (rng.choice((-1, 0, 1, rng.randint(2, max_tokens))) for _ in range(2))
    return left, right


def _draw_sequences(rng: random.Random, max_tokens: int) -> tuple[tuple[int, int], tuple[list[int], list[int]]]:
    """Tokens and starts of a packed batch, some sequences empty, some tokens past the last one."""
    count = rng.randint(0, 4)
    starts_q, starts_k = [0], [0]
    same = rng.random() < 0.4
    for _ in range(count):
        q_len = 0 if rng.random() < 0.15 else rng.randint(1, max_tokens // count)
        k_len = q_len if same else 0 if rng.random() < 0.15 else rng.randint(1, max_tokens // count)
        starts_q.append(starts_q[-1] + q_len)
        starts_k.append(starts_k[-1] + k_len)
    slack_q, slack_k = (rng.choice((0, 0, 1, 5)) for _ in range(2))
    return (starts_q[-1] + slack_q, starts_k[-1] + slack_k), (starts_q, starts_k)


def _draw_row_weight(
    rng: random.Random, batch: int, heads: int, nq: int, packed: bool, student_dtype: torch.dtype
) -> Tensor:
    """Weights a row or a row and head, some 0, whole rows of 0 among them."""
    torch_rng = torch.Generator().manual_seed(rng.getrandbits(32))
    shape = (heads, nq) if rng.random() < 0.5 else (nq,)
    weight = torch.rand(shape if packed else (batch, *shape), generator=torch_rng) * 2
    if rng.random() < 0.6:
        weight[..., torch.rand(nq, generator=torch_rng) < rng.choice((0.2, 0.9))] = 0.0
    if rng.random() < 0.3:
        weight.view(-1)[::3] = 0.0
    return weight.to(torch.float32 if rng.random() < 0.7 else student_dtype)


def _guarded(x: Tensor, rng: random.Random, device: str | torch.device) -> Tensor:
    """The same values inside a larger tensor of nan (of -1 for integers), with other strides and alignment."""
    order = list(range(x.dim()))
    if rng.random() < 0.5:
        rng.shuffle(order)
    step = rng.choice((1, 1, 2))
    starts = [rng.choice((0, 1, 3)) for _ in order]
    lengths = [n * step if d == x.dim() - 1 else n for d, n in enumerate(x.shape)]
    sizes = [start + length + rng.choice((1, 2)) for start, length in zip(starts, lengths, strict=True)]
    guard = torch.nan if x.dtype.is_floating_point else -1
    buffer = torch.full([sizes[d] for d in order], guard, dtype=x.dtype, device=device)
    view = buffer.permute([order.index(d) for d in range(x.dim())])
    for d in range(x.dim()):
        view = view.narrow(d, starts[d], lengths[d])
    return view[..., ::step].copy_(x)
