"""`ContextParallel`: one sequence over the ranks of a mesh dimension."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from streamkl import loss as compose
from streamkl import validation
from streamkl.api import Backend
from streamkl.dense_attention import causal_attention, window_attention
from streamkl.distributed.gathering import Gathered, heads_to_tokens, total
from streamkl.distributed.layout import HeadTail
from streamkl.distributed.operators import ShardedOperators


class ContextParallel:
    """One sequence over the ranks of a mesh dimension: the losses, and the teacher's own attention.

    Every rank holds a chunk from the head of the sequence and one from its tail (`HeadTail`), so that all have the same
    work under a causal mask. Tensors that are given to its methods hold the tokens of this rank. Keys are gathered from
    all ranks, and each rank computes the rows of its own queries; gradients of keys are added over all ranks in float32
    and go back to their owners. Loss and gradients are those of one process, to rounding.

    Every rank gets the loss of the whole sequence, and gradients of its own tokens. Gradients of parameters are
    therefore summed over the ranks, not averaged: under data parallelism that averages over all ranks, multiply the
    loss by the size of this dimension.

    Attributes:
        queries: The layout of queries.
        keys: The layout of keys.

    Args:
        mesh: A mesh of one dimension, such as ``mesh["cp"]``.
        tokens: The length of the sequence, or of all packed sequences together. Any length: chunks differ by at most
            one token.
        key_tokens: How many keys there are, if not as many as queries.

    Examples:
        On every rank of a mesh with a dimension ``cp``, each with its tokens of one long sequence:

        >>> import torch
        >>> from torch.distributed.device_mesh import DeviceMesh
        >>> from streamkl.distributed import ContextParallel
        >>> def layer_loss(mesh: DeviceMesh, query, key, value, index_q, index_k, index_w):
        ...     cp = ContextParallel(mesh["cp"], tokens=1_048_576)
        ...     keys = cp.gather(key)  # on their way from here on
        ...     output, lse = cp.attention(query, keys, value)
        ...     return output, cp.indexer_kl(query, keys, index_q, index_k, index_w, teacher_lse=lse)
    """

    def __init__(self, mesh: DeviceMesh, tokens: int, key_tokens: int | None = None) -> None:
        if not isinstance(mesh, DeviceMesh) or mesh.ndim != 1:
            got = f"{mesh.ndim} of them" if isinstance(mesh, DeviceMesh) else repr(mesh)
            raise ValueError(f"mesh must be a DeviceMesh of one dimension, such as mesh['cp']: got {got}")
        for name, count in (("tokens", tokens), ("key_tokens", key_tokens)):
            if not (name == "key_tokens" and count is None) and (not isinstance(count, int) or count < 0):
                raise ValueError(f"{name} must be a number of tokens: got {count!r}")
        self.mesh, self._group = mesh, mesh.get_group()
        rank, size = mesh.get_local_rank(), mesh.size()
        self.queries = HeadTail(tokens, rank, size)
        self.keys = self.queries if key_tokens is None else HeadTail(key_tokens, rank, size)

    def shard(self, x: Tensor, dim: int) -> Tensor:
        """The tokens of this rank, of a tensor that has all of them along ``dim``."""
        return self.queries.shard(x, dim)

    def position_ids(self, device: torch.device | str | None = None) -> Tensor:
        """The positions of this rank's tokens, ``[tokens]``, int64: what RoPE needs."""
        return self.queries.positions(device)

    def gather(self, x: Tensor, dim: int = 2) -> Gathered:
        """Starts to gather keys, or values, from all ranks, and does not wait.

        Args:
            x: The tokens of this rank along ``dim``, such as keys ``[B, Hkv, n, D]``. A constant.
            dim: The dimension of the tokens.

        Returns:
            What `attention`, `attention_kl` and `indexer_kl` take as keys, so that they are gathered once for all.
        """
        _refuse_dtensors({"x": x})
        return Gathered(self.keys, self._group, x, dim)

    def unshard(self, x: Tensor, dim: int) -> Tensor:
        """All tokens, from those of each rank along ``dim``; a constant. The inverse of `shard`."""
        return Gathered(self.queries, self._group, x, dim).whole()

    def heads_to_tokens(self, x: Tensor) -> Tensor:
        """Exchanges heads for tokens, where a tensor-parallel teacher has some heads of all tokens on each rank.

        Args:
            x: ``[B, H / size, N, D]``: the heads of this rank, of all tokens.

        Returns:
            ``[B, H, n, D]``: all heads, of the tokens of this rank. A constant.

        Raises:
            ValueError: It has other tokens than the whole sequence.
        """
        if x.shape[2] != self.queries.tokens:
            raise ValueError(f"x must have all {self.queries.tokens} tokens: got {x.shape[2]}")
        return heads_to_tokens(self.queries, self._group, x)

    def total(self, x: Tensor) -> Tensor:
        """The sum of a scalar over the ranks. Its gradient is the upstream one: all ranks have the same loss."""
        return total(x, self._group)

    def attention(
        self,
        q: Tensor,
        k: Tensor | Gathered,
        v: Tensor | Gathered,
        *,
        scale: float | None = None,
        window: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Causal attention of this rank's queries to all keys, and its log-sum-exp: that of a frozen teacher.

        For each of its two chunks, the keys before the chunk are attended to without a mask, and merged by log-sum-exp
        with the causal attention of the chunk to itself. It takes no packed sequences.

        Args:
            q: ``[B, H, n, D]``, after RoPE at `position_ids`.
            k: ``[B, Hkv, n, D]``, or what `gather` returned.
            v: ``[B, Hkv, n, Dv]``, or what `gather` returned.
            scale: Multiplies the products; ``1/sqrt(D)`` if not given.
            window: How many keys a query sees, its own among them, as transformers counts: at least 1. All before it
                if not given.

        Returns:
            The output ``[B, H, n, Dv]`` and the log-sum-exp ``[B, H, n]``. Constants.

        Raises:
            ValueError: A tensor wants a gradient, which this attention does not have, or has the wrong tokens; or the
                window leaves no key.
        """
        if self.keys.tokens < self.queries.tokens:
            raise ValueError(f"every query must see a key: got {self.queries.tokens} and {self.keys.tokens} tokens")
        for name, x in (("q", q), ("k", k), ("v", v)):
            if isinstance(x, Tensor) and x.requires_grad and torch.is_grad_enabled():
                raise ValueError(f"attention is that of a frozen teacher: got {name} that requires a gradient")
        _refuse_dtensors({"q": q, "k": k, "v": v})
        if window is not None and window < 1:
            raise ValueError(f"a window has a query's own key, so at least 1: got {window}")
        for name, x in (("q", q), ("k", k), ("v", v)):
            shape = x.local.shape if isinstance(x, Gathered) else x.shape
            if len(shape) != 4 or (isinstance(x, Gathered) and x.dim != 2):
                raise ValueError(f"{name} must be of shape [batch, heads, tokens, dim]: got {list(shape)}")
        _check_tokens("q", q, self.queries)
        keys, values = (x if isinstance(x, Gathered) else self.gather(x) for x in (k, v))
        outputs, first, ahead = [], 0, self.keys.tokens - self.queries.tokens
        for start, end in self.queries.spans:
            rows = q[:, :, first : first + end - start]
            whole_k, whole_v = (x.whole()[:, :, : end + ahead] for x in (keys, values))
            if window is None:
                outputs.append(causal_attention(rows, whole_k, whole_v, scale))
            else:
                outputs.append(window_attention(rows, whole_k, whole_v, window, scale))
            first += end - start
        output, lse = (torch.cat(parts, 2) for parts in zip(*outputs, strict=True))
        return output, lse

    def attention_kl(
        self,
        teacher_q: Tensor,
        teacher_k: Tensor | Gathered,
        student_q: Tensor,
        student_k: Tensor,
        *,
        causal: bool = False,
        window: tuple[int, int] | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_k: Tensor | None = None,
        topk_indices: Tensor | None = None,
        teacher_scale: float | None = None,
        student_scale: float | None = None,
        student_activation: Literal["relu"] | None = None,
        teacher_lse: Tensor | None = None,
        teacher_rest: Tensor | None = None,
        row_weight: Tensor | None = None,
        divergence: Literal["forward", "reverse"] = "forward",
        reduction: Literal["mean", "sum", "none"] = "mean",
        deterministic: bool | None = None,
        backend: Backend = "auto",
    ) -> Tensor:
        """`streamkl.attention_kl` of the whole sequence.

        Takes its arguments, with the tokens of this rank wherever there is one per query or key: ``teacher_lse``,
        ``row_weight`` and ``topk_indices`` have this rank's queries. What is about the sequence is about the whole of
        it: ``cu_seqlens`` are those of all tokens, a packed sequence may lie on several ranks, and ``topk_indices``
        name keys by their place in it. ``cu_seqlens`` are read on the host.

        Args:
            teacher_q: ``[B, H, n, Dt]``, or packed ``[n, H, Dt]``.
            teacher_k: ``[B, Hkv, n, Dt]``, or packed ``[n, Hkv, Dt]``; or what `gather` returned, a constant.
            student_q: ``[B, R, n, Ds]``, or packed ``[n, R, Ds]``.
            student_k: ``[B, Rkv, n, Ds]``, or packed ``[n, Rkv, Ds]``.
            causal: As in `streamkl.attention_kl`, and so are all that follow.
            window: ``(left, right)``.
            cu_seqlens_q: Of all tokens.
            cu_seqlens_k: Of all tokens.
            topk_indices: Of this rank's queries.
            teacher_scale: Multiplies the teacher's products.
            student_scale: Multiplies the student's products.
            student_activation: ``"relu"`` or ``None``.
            teacher_lse: Of this rank's queries.
            teacher_rest: Of this rank's queries.
            row_weight: Of this rank's queries.
            divergence: ``"forward"`` or ``"reverse"``.
            reduction: ``"mean"`` and ``"sum"`` are over the rows of all ranks; ``"none"`` gives those of this rank.
            deterministic: As in `streamkl.attention_kl`.
            backend: An engine; not ``"reference"``.

        Returns:
            The loss: the same on all ranks, or with ``"none"`` the rows of this rank. Where the gradients come with
            the loss in one pass, everything is exchanged in the forward; otherwise gradients of keys are exchanged in
            the backward, and all ranks must call it.

        Raises:
            ValueError: An argument is wrong or cannot be sharded; the message says why.
        """
        gathered, teacher_k = self._local(teacher_k)
        named = {"teacher_q": teacher_q, "teacher_k": teacher_k, "student_q": student_q, "student_k": student_k}
        _refuse_dtensors(named)
        arguments = validation.attention_kl_arguments(
            teacher_q, teacher_k, student_q, student_k, causal, window, cu_seqlens_q, cu_seqlens_k, topk_indices,
            teacher_scale, student_scale, student_activation, teacher_lse, teacher_rest, row_weight, divergence,
            reduction, deterministic, backend,
        )  # fmt: skip
        self._check(arguments, backend)
        operators = ShardedOperators(self._group, self.queries, self.keys, arguments, gathered)
        loss = compose.attention_kl(
            arguments, teacher_scale, student_scale, student_activation, divergence, reduction, backend, operators
        )
        return loss.squeeze(0) if arguments.keys.packed and reduction == "none" else loss

    def indexer_kl(
        self,
        teacher_q: Tensor,
        teacher_k: Tensor | Gathered,
        index_q: Tensor,
        index_k: Tensor,
        index_w: Tensor | None = None,
        *,
        activation: Literal["relu"] | None = "relu",
        index_scale: float | None = None,
        topk_indices: Tensor | None = None,
        teacher_scale: float | None = None,
        teacher_lse: Tensor | None = None,
        teacher_rest: Tensor | None = None,
        causal: bool = True,
        window: tuple[int, int] | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_k: Tensor | None = None,
        row_weight: Tensor | None = None,
        reduction: Literal["mean", "sum", "none"] = "mean",
        deterministic: bool | None = None,
        backend: Backend = "auto",
    ) -> Tensor:
        """`streamkl.indexer_kl` of the whole sequence; arguments are sharded as those of `attention_kl` are.

        Args:
            teacher_q: ``[B, H, n, Dt]``, or packed ``[n, H, Dt]``.
            teacher_k: ``[B, Hkv, n, Dt]``, or packed ``[n, Hkv, Dt]``; or what `gather` returned.
            index_q: ``[B, J, n, Di]``, or packed ``[n, J, Di]``.
            index_k: ``[B, n, Di]``, or packed ``[n, Di]``.
            index_w: ``[B, n, J]``, or packed ``[n, J]``.
            activation: As in `streamkl.indexer_kl`, and so are all that follow.
            index_scale: Multiplies the indexer's products.
            topk_indices: Of this rank's queries.
            teacher_scale: Multiplies the teacher's products.
            teacher_lse: Of this rank's queries.
            teacher_rest: Of this rank's queries.
            causal: Query ``i`` sees the keys up to its own.
            window: ``(left, right)``.
            cu_seqlens_q: Of all tokens.
            cu_seqlens_k: Of all tokens.
            row_weight: Of this rank's queries.
            reduction: ``"mean"`` and ``"sum"`` are over the rows of all ranks; ``"none"`` gives those of this rank.
            deterministic: As in `streamkl.indexer_kl`.
            backend: An engine; not ``"reference"``.

        Returns:
            The loss: the same on all ranks, or with ``"none"`` the rows of this rank.

        Raises:
            ValueError: An argument is wrong or cannot be sharded; the message says why.
        """
        gathered, teacher_k = self._local(teacher_k)
        _refuse_dtensors({"teacher_q": teacher_q, "teacher_k": teacher_k, "index_q": index_q, "index_k": index_k})
        arguments = validation.indexer_kl_arguments(
            teacher_q, teacher_k, index_q, index_k, index_w, activation, index_scale, topk_indices, teacher_scale,
            teacher_lse, teacher_rest, causal, window, cu_seqlens_q, cu_seqlens_k, row_weight, reduction,
            deterministic, backend,
        )  # fmt: skip
        self._check(arguments, backend)
        operators = ShardedOperators(self._group, self.queries, self.keys, arguments, gathered)
        loss = compose.attention_kl(
            arguments, teacher_scale, index_scale, activation, "forward", reduction, backend, operators
        )
        return loss.squeeze(0) if arguments.keys.packed and reduction == "none" else loss

    def _local(self, k: Tensor | Gathered) -> tuple[Gathered | None, Tensor]:
        """Keys that are being gathered, if they are, and those of this rank."""
        return (k, k.local) if isinstance(k, Gathered) else (None, k)

    def _check(self, arguments: validation.KLArguments, backend: str) -> None:
        if backend == "reference":
            raise ValueError("backend='reference' is not sharded: name an engine, or 'auto'")
        # Only the first two: the others were held to have as many tokens.
        for name, x, layout in (
            ("teacher_q", arguments.teacher_q, self.queries),
            ("teacher_k", arguments.teacher_k, self.keys),
        ):
            _check_tokens(name, x, layout)


def _check_tokens(name: str, x: Tensor, layout: HeadTail) -> None:
    """Checks the tokens of ``[B, heads, tokens, dim]``."""
    if x.shape[2] != layout.length:
        raise ValueError(
            f"{name} must have the {layout.length} of {layout.tokens} tokens that rank {layout.rank} of {layout.size} "
            f"holds (ContextParallel.shard): got {x.shape[2]}"
        )


def _refuse_dtensors(named: dict[str, Any]) -> None:
    for name, x in named.items():
        if hasattr(x, "placements"):
            raise ValueError(
                f"{name} must be a plain tensor, the tokens of this rank: got a DTensor, {x.placements}; "
                f"take its to_local() where heads and batch are those of this rank"
            )
