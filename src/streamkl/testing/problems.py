"""Seeded problems over the whole contract: `make_case` builds one of ``attention_kl``, `random_case` draws one.

``indexer_cases.py`` does the same for ``indexer_kl``.

Every tensor is a view into a larger one filled with nan, with random strides, so that a read outside of it shows. Rows
that must not matter (they see no key, have weight 0, or lie past the last sequence of a packed (varlen) batch) hold nan
themselves, and so do keys that no other row sees.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from streamkl import reference

DIMS = (16, 40, 59, 64, 80, 96, 111, 128, 192, 256, 576)
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
STUDENT = ("student_q", "student_k")
"""The student's tensors in a `Case`: as ``wanted``, they are those that gradients are asked for."""
TEACHER = ("teacher_q", "teacher_k")
"""The teacher's tensors in a `Case`; ``STUDENT + TEACHER`` asks for the gradients of both."""
INFINITE = 0.15
"""The share of random problems in which a token is infinite."""
REST = 0.3
"""The share of random problems in which the teacher's softmax covers more than the allowed keys."""
FAR_BELOW = -61440.0
"""Stands for -inf in an element of a key: its logits have probabilities of 0 in float64, in every dtype."""


class Infinite(NamedTuple):
    """An infinite value in the first element of a token, in all its heads; queries of an infinite key are positive.

    Attributes:
        name: The tensor that holds it, such as ``teacher_k``.
        token: The token.
        value: ``inf`` or ``-inf``.
    """

    name: str
    token: int
    value: float


class Heads(NamedTuple):
    """How many heads both sides have.

    Attributes:
        teacher: Query heads of the teacher.
        teacher_kv: Key heads of the teacher.
        student: Query heads of the student: its distributions.
        student_kv: Key heads of the student.
    """

    teacher: int = 4
    teacher_kv: int = 2
    student: int = 4
    student_kv: int = 4


@dataclass
class Case:
    """One call of ``attention_kl`` or ``indexer_kl``, and the gradients that it should give.

    Attributes:
        seed: The seed of its values.
        tensors: ``teacher_q``, ``teacher_k``, ``student_q``, ``student_k``; for an indexer ``index_q``, ``index_k`` and
            perhaps ``index_w`` instead of the student's.
        options: The keyword arguments, without ``teacher_lse``.
        teacher_lse: Rounded from float64; nan in rows that must not matter.
        wanted: The names of the tensors that want a gradient.
        upstream: The gradient of the loss, of the loss's shape.
        dead_rows: ``[Nq]`` of bool: rows that must not matter.
        function: The name of the function that is called.
        infinite: What is infinite in its tensors, if anything is.
    """

    seed: int
    tensors: dict[str, Tensor]
    options: dict[str, Any]
    teacher_lse: Tensor | None
    wanted: tuple[str, ...]
    upstream: Tensor
    dead_rows: Tensor
    function: str = "attention_kl"
    infinite: Infinite | None = None

    def to(self, device: str | torch.device) -> Case:
        """The same case on another device."""

        def move(x: Any) -> Any:
            return x.to(device) if isinstance(x, Tensor) else x

        tensors, options = ({name: move(x) for name, x in part.items()} for part in (self.tensors, self.options))
        lse, upstream, dead = move(self.teacher_lse), move(self.upstream), move(self.dead_rows)
        return Case(self.seed, tensors, options, lse, self.wanted, upstream, dead, self.function, self.infinite)

    def clean(self, dtype: torch.dtype | None = None, finite: bool = True) -> dict[str, Tensor]:
        """The tensors with 0 in the rows that must not matter, contiguous; cast to ``dtype`` if given.

        With ``finite``, -inf becomes `FAR_BELOW`, which has the same loss and gradients.
        """
        values = {name: torch.where(x.isnan(), 0.0, x.detach()) for name, x in self.tensors.items()}
        if finite:
            values = {name: torch.where(x == -torch.inf, FAR_BELOW, x) for name, x in values.items()}
        return {name: x.to(dtype or x.dtype).contiguous() for name, x in values.items()}

    def __str__(self) -> str:
        shapes = ", ".join(f"{name} {list(x.shape)} {str(x.dtype)[6:]}" for name, x in self.tensors.items())
        options = {name: list(x.shape) if isinstance(x, Tensor) else x for name, x in self.options.items()}
        lse = "with" if self.teacher_lse is not None else "without"
        wanted = f"gradients to {', '.join(self.wanted)}"
        return f"seed {self.seed}: {shapes}; {options}; {lse} teacher_lse; {wanted}; infinite: {self.infinite}"


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
    teacher_rest: bool = False,
    row_weight: Tensor | None = None,
    wanted: tuple[str, ...] = STUDENT,
    spread: tuple[float, float] = (1.0, 1.0),
    offset: tuple[float, float] = (0.0, 0.0),
    infinite: Infinite | None = None,
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
        tokens: Queries and keys of a batch element, or of all packed sequences and the tokens past them.
        cu_seqlens: Starts of packed queries and keys.
        teacher_lse: Whether the call is given one.
        teacher_rest: Whether the call is given one.
        row_weight: ``[B, Nq]`` or ``[B, R, Nq]``, packed ``[Tq]`` or ``[R, Tq]``.
        wanted: The names of the tensors that want a gradient.
        spread: Approximate standard deviations of teacher and student logits.
        offset: Added to the first element of each query and key: shifts the logits of a row together.
        infinite: A token that is infinite.
        guard: Puts the tensors into larger ones filled with nan, with random strides.
        device: Where the tensors live; their values do not depend on it.
        options: Keyword arguments of ``attention_kl``.
    """
    (nq, nk), packed = tokens, cu_seqlens is not None
    shapes = {
        "teacher_q": (batch, heads.teacher, nq, dims[0]),
        "teacher_k": (batch, heads.teacher_kv, nk, dims[0]),
        "student_q": (batch, heads.student, nq, dims[1]),
        "student_k": (batch, heads.student_kv, nk, dims[1]),
    }
    torch_rng = torch.Generator().manual_seed(seed)
    values = draw_values(torch_rng, shapes, dtypes, spread, offset)
    make_infinite(values, infinite)
    options, allowed, dead = mask_options(seed, tokens, cu_seqlens, row_weight, {"causal": False, **options})
    poison(values, allowed, dead)
    if packed:
        values = {name: x[0].transpose(0, 1) for name, x in values.items()}
    lse = draw_lse(values, options, dead) if teacher_lse else None
    if teacher_rest:
        options["teacher_rest"] = draw_rest(seed, values, options, dead)
    rows = (heads.student, nq) if packed else (batch, heads.student, nq)
    upstream = torch.randn(rows if options.get("reduction") == "none" else (), generator=torch_rng)
    case = Case(seed, values, options, lse, wanted, upstream, dead, infinite=infinite)
    return place_case(case, guard, device)


def make_infinite(values: dict[str, Tensor], infinite: Infinite | None) -> None:
    """Puts an infinite value into q or k, ``[B, heads, N, D]``."""
    if infinite is None:
        return
    if infinite.name.endswith("_k"):
        q = values[infinite.name[:-1] + "q"]
        q[..., 0] = q[..., 0].abs() + 0.5
    values[infinite.name][:, :, infinite.token, 0] = infinite.value


def draw_infinite(rng: random.Random, target: str, other: str, tokens: tuple[int, int]) -> Infinite | None:
    """Mostly a key of the target that has probability 0; else any infinite token, which makes rows nan."""
    if 0 in tokens:
        return None
    nq, nk = tokens
    if rng.random() < 0.6:
        return Infinite(f"{target}_k", rng.randrange(nk), -torch.inf)
    name = rng.choice((f"{target}_q", f"{target}_k", f"{other}_q", f"{other}_k"))
    return Infinite(name, rng.randrange(nq if name.endswith("_q") else nk), rng.choice((-torch.inf, torch.inf)))


def draw_values(
    rng: torch.Generator,
    shapes: dict[str, tuple[int, ...]],
    dtypes: tuple[torch.dtype, torch.dtype],
    spread: tuple[float, float],
    offset: tuple[float, float],
) -> dict[str, Tensor]:
    """The q and k of teacher and student, in this order, ``[B, heads, N, D]``."""
    values = {}
    for n, (name, shape) in enumerate(shapes.items()):
        x = torch.randn(shape, generator=rng) * (spread[n // 2] if name.endswith("_q") else 1.0)
        x[..., 0] += offset[n // 2]
        values[name] = x.to(dtypes[n // 2])
    return values


def mask_options(
    seed: int,
    tokens: tuple[int, int],
    cu_seqlens: tuple[list[int], list[int]] | None,
    row_weight: Tensor | None,
    options: dict[str, Any],
) -> tuple[dict[str, Any], Tensor, Tensor]:
    """The options of the call; which pairs they allow, ``[masks, Nq, Nk]``; which rows must not matter, ``[Nq]``."""
    options = {"window": None, **options}
    if cu_seqlens is not None:
        options["cu_seqlens_q"], options["cu_seqlens_k"] = (
            torch.tensor(starts, dtype=torch.int32 if seed % 2 else torch.int64) for starts in cu_seqlens
        )
    allowed = reference.allowed_pairs(*tokens, **mask_of(options))
    allowed = allowed[None] if allowed.dim() == 2 else allowed.flatten(0, 1)
    dead = ~allowed.any(-1).any(0)
    if row_weight is not None:
        options["row_weight"] = row_weight
        dead = dead | (row_weight == 0).reshape(row_weight.shape[:-1].numel(), tokens[0]).all(0)
    return options, allowed, dead


def mask_of(options: dict[str, Any]) -> dict[str, Any]:
    """The options that say which keys a row may see."""
    names = ("causal", "window", "cu_seqlens_q", "cu_seqlens_k", "topk_indices")
    return {**{name: options.get(name) for name in names}, "key_span": options.get("key_span", 1)}


def poison(values: dict[str, Tensor], allowed: Tensor, dead: Tensor) -> None:
    """Puts nan into the rows that must not matter, and into the keys that no other row sees."""
    unseen = ~allowed[:, ~dead].any(1).any(0)
    for name, x in values.items():
        x[:, :, dead if name.endswith("_q") else unseen] = torch.nan


def draw_lse(values: dict[str, Tensor], options: dict[str, Any], dead: Tensor) -> Tensor:
    """The teacher's log-sum-exp from float64, in float32 unless an input is float64; nan in rows that do not matter."""
    q, k = (torch.where(values[name].isnan(), 0.0, values[name]).double() for name in TEACHER)
    lse = reference.attention_lse(q, k, scale=options.get("teacher_scale"), **mask_of(options))
    wide = any(x.dtype == torch.float64 for x in values.values())
    return torch.where(dead, torch.nan, lse).to(torch.float64 if wide else torch.float32)


def draw_rest(seed: int, values: dict[str, Tensor], options: dict[str, Any], dead: Tensor) -> Tensor:
    """The log-sum-exp of what lies outside: a hundredth to a hundred times what is inside, or nothing; as the LSE."""
    lse = draw_lse(values, options, dead)
    more = torch.empty(lse.shape).uniform_(-5.0, 5.0, generator=torch.Generator().manual_seed(seed))
    return torch.where(more < -4.5, -torch.inf, lse + more)


def place_case(case: Case, guard: bool, device: str | torch.device) -> Case:
    """The case on a device, its tensors inside larger ones if they are to be guarded."""
    rng = random.Random(case.seed)

    def place(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        return guarded(x, rng, device) if guard else x.to(device)

    options = {name: place(x) for name, x in case.options.items()}
    tensors = {name: place(x) for name, x in case.tensors.items()}
    lse, upstream, dead = place(case.teacher_lse), case.upstream.to(device), case.dead_rows.to(device)
    return Case(case.seed, tensors, options, lse, case.wanted, upstream, dead, case.function, case.infinite)


def random_case(
    seed: int,
    *,
    device: str | torch.device = "cpu",
    dtypes: tuple[torch.dtype, ...] = DTYPES,
    dims: tuple[int, ...] = DIMS,
    max_tokens: int = 96,
    topk: bool = False,
    key_span: bool = False,
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
        topk: Whether keys are selected.
        key_span: Whether a key stands for several tokens.
        max_heads: The most heads of the student; the teacher has up to three times as many.
        max_batch: The most batch elements.

    Examples:
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
        drawn["tokens"], drawn["cu_seqlens"] = draw_sequences(rng, max_tokens)
    else:
        nq = rng.choice((0, 1, 2)) if rng.random() < 0.1 else rng.randint(3, max_tokens)
        nk = nq if rng.random() < 0.5 else rng.randint(0 if rng.random() < 0.1 else 1, max_tokens)
        drawn["tokens"] = (nq, nk)
    drawn["causal"] = rng.random() < 0.5
    drawn["window"] = draw_window(rng, max_tokens)
    if key_span:
        draw_key_span(seed, drawn)
    drawn["teacher_lse"] = rng.random() < 0.5
    if rng.random() < 0.5:
        drawn["row_weight"] = draw_row_weight(rng, batch, heads.student, drawn["tokens"][0], packed, drawn["dtypes"][1])
    drawn["teacher_rest"] = random.Random(f"rest {seed}").random() < REST
    for name in ("teacher_scale", "student_scale"):
        drawn[name] = None if rng.random() < 0.6 else rng.choice((0.05, 0.3, 1.0))
    drawn["spread"] = (rng.choice((0.3, 1.0, 3.0)), rng.choice((0.3, 1.0, 3.0)))
    drawn["offset"] = (rng.choice((0, 0, 0, 2, 8)), rng.choice((0, 0, 0, 2, 8)))
    drawn["student_activation"] = "relu" if rng.random() < 0.25 else None
    drawn["reduction"] = rng.choice(("mean", "sum", "none"))
    if heads.teacher == heads.student:
        drawn["divergence"] = rng.choice(("forward", "forward", "reverse"))
        drawn["wanted"] = rng.choice((STUDENT, STUDENT, TEACHER, STUDENT + TEACHER))
    if topk:
        topk_heads = rng.choice((None, heads.student))
        drawn["topk_indices"] = draw_topk(rng, batch, topk_heads, drawn["tokens"], drawn.get("cu_seqlens"))
    if rng.random() < INFINITE:
        target, other = ("teacher", "student") if drawn.get("divergence") != "reverse" else ("student", "teacher")
        infinite = drawn["infinite"] = draw_infinite(rng, target, other, drawn["tokens"])
        promised = infinite is not None and (infinite.name, infinite.value) == (f"{target}_k", -torch.inf)
        drawn["wanted"] = (f"{other}_q", f"{other}_k") if promised else ()
    return make_case(seed, device=device, **drawn)


def _draw_heads(rng: random.Random, most: int) -> Heads:
    student = rng.choice([n for n in (1, 1, 2, 3, 4, 6, 9) if n <= most])
    teacher = student * rng.choice((1, 1, 1, 2, 3))
    return Heads(teacher, rng.choice(_divisors(teacher)), student, rng.choice(_divisors(student)))


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def draw_window(rng: random.Random, max_tokens: int) -> tuple[int, int] | None:
    """``None``, or a random window."""
    if rng.random() < 0.6:
        return None
    left, right = (rng.choice((-1, 0, 1, rng.randint(2, max_tokens))) for _ in range(2))
    return left, right


def draw_key_span(seed: int, drawn: dict[str, Any]) -> None:
    """Draws how many tokens a key stands for, and mostly gives each sequence as many keys as its tokens make."""
    rng = random.Random(f"span {seed}")
    span = rng.choice((2, 3, 4, 4, 7, 16, 128))
    drawn.update(causal=True, window=None, key_span=span)
    if rng.random() < 0.3:
        return
    (nq, nk), cu_seqlens = drawn["tokens"], drawn.get("cu_seqlens")
    if cu_seqlens is None:
        drawn["tokens"] = (nq, nq // span)
        return
    starts_q, starts_k = cu_seqlens
    starts = [0]
    for first, last in itertools.pairwise(starts_q):
        starts.append(starts[-1] + (last - first) // span)
    drawn["tokens"], drawn["cu_seqlens"] = (nq, nk - starts_k[-1] + starts[-1]), (starts_q, starts)


def draw_sequences(rng: random.Random, max_tokens: int) -> tuple[tuple[int, int], tuple[list[int], list[int]]]:
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


def draw_topk(
    rng: random.Random,
    batch: int,
    topk_heads: int | None,
    tokens: tuple[int, int],
    cu_seqlens: tuple[list[int], list[int]] | None,
) -> Tensor:
    """Random selected keys: any number in any order, padding anywhere, rows of only padding, keys past a sequence."""
    (nq, nk), lengths = tokens, [tokens[1]] * tokens[0]
    if cu_seqlens is not None:
        starts_q, starts_k = cu_seqlens
        lengths = [0] * nq
        for n in range(len(starts_q) - 1):
            lengths[starts_q[n] : starts_q[n + 1]] = [starts_k[n + 1] - starts_k[n]] * (starts_q[n + 1] - starts_q[n])
    columns = rng.choice((0, 1, nk, nk + 3, rng.randint(1, nk + 1))) if rng.random() < 0.3 else rng.randint(1, nk + 1)
    padding = rng.choice((0.0, 0.0, 0.3, 0.9))
    torch_rng = torch.Generator().manual_seed(rng.getrandbits(32))
    topk = torch.full((batch, topk_heads or 1, nq, columns), -1)
    for head in topk.view(batch * (topk_heads or 1), nq, columns).unbind(0):
        for i, length in enumerate(lengths):
            within = nk if rng.random() < 0.2 else length  # beyond its sequence, a row sees nothing
            keys = torch.randperm(within, generator=torch_rng)[:columns]
            head[i, torch.randperm(columns, generator=torch_rng)[: len(keys)]] = keys
    topk[torch.rand(topk.shape, generator=torch_rng) < padding] = -1
    if rng.random() < 0.5:
        topk[:, :, torch.rand(nq, generator=torch_rng) < 0.2] = -1
    topk = topk.to(rng.choice((torch.int32, torch.int64)))
    topk = topk if topk_heads is not None else topk[:, 0]
    return topk if cu_seqlens is None else topk[0]


def draw_row_weight(
    rng: random.Random, batch: int, heads: int, nq: int, packed: bool, student_dtype: torch.dtype
) -> Tensor:
    """Weights per row, or per row and head; some are 0, also for whole rows."""
    torch_rng = torch.Generator().manual_seed(rng.getrandbits(32))
    shape = (heads, nq) if rng.random() < 0.5 else (nq,)
    weight = torch.rand(shape if packed else (batch, *shape), generator=torch_rng) * 2
    if rng.random() < 0.6:
        weight[..., torch.rand(nq, generator=torch_rng) < rng.choice((0.2, 0.9))] = 0.0
    if rng.random() < 0.3:
        weight.view(-1)[::3] = 0.0
    return weight.to(torch.float32 if rng.random() < 0.7 else student_dtype)


def guarded(x: Tensor, rng: random.Random, device: str | torch.device) -> Tensor:
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
