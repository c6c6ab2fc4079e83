"""What the sparse backends have in common: prompts attend to selected keys, all else is as in the vLLM backend below.

A sparse backend is a class of vLLM's with one of these before it: `SparseMetadataBuilder` before a metadata builder,
`SparseImpl` before an implementation, `SparseStep` before the metadata, `SparseBackend` before the backend.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

import torch
from torch import Tensor

from streamkl.integrations.vllm import pages
from streamkl.integrations.vllm.metadata import Packed, Sequence, rows_of, split
from streamkl.integrations.vllm.settings import settings_of
from streamkl.sparse import AttentionCall, IndexTensors, Selector, sparse_attention


@dataclass
class SparseStep:
    """A step.

    Attributes:
        sparse: The sequences whose keys are selected.
        dense: vLLM's metadata of the other requests; ``None`` if there are none.
        dense_rows: ``[rows]``: their rows; ``None`` if that is all.
    """

    sparse: list[Sequence] = field(default_factory=list)
    dense: Any = None
    dense_rows: Tensor | None = None


class SparseMetadataBuilder:
    """Splits each step into sparse and dense requests.

    Attributes:
        step: The class of a step's metadata: vLLM's, with a `SparseStep`.
        supports_update_block_table: Whether metadata may be reused with other pages: those of the dense requests may
            not.
    """

    step: ClassVar[Any]
    supports_update_block_table: bool = False
    kv_cache_spec: Any

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)  # pyright: ignore[reportCallIssue]
        self.sparse_decode = selects_for_decodes(vllm_config)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        """The metadata of a step, for all layers."""
        build: Any = super().build  # pyright: ignore[reportAttributeAccessIssue]  # vLLM's builder
        whole = build(common_prefix_len, common_attn_metadata, fast_build)
        given = common_attn_metadata
        starts, table = given.query_start_loc_cpu, given.block_table_tensor
        parts = split(
            starts, given.seq_lens, table, given.is_prefilling, self.kv_cache_spec.block_size, self.sparse_decode
        )
        made = self.step(**{each.name: getattr(whole, each.name) for each in fields(whole)}, sparse=parts.sparse)
        if not parts.sparse:
            made.dense = whole
        elif len(parts.dense):
            rows, own = rows_of(starts, parts.dense)
            requests, on_device = parts.dense.to(table.device), rows.to(table.device)
            common = given.replace(
                query_start_loc=own.to(table.device), query_start_loc_cpu=own, seq_lens=given.seq_lens[requests],
                num_reqs=len(parts.dense), num_actual_tokens=len(rows), max_query_len=int(own.diff().max()),
                block_table_tensor=table[requests].contiguous(), slot_mapping=given.slot_mapping[on_device],
            )  # fmt: skip
            made.dense, made.dense_rows = build(common_prefix_len, common, fast_build), on_device
        return made


def selects_for_decodes(vllm_config: Any) -> bool:
    """Whether decoded tokens select keys, too."""
    settings = settings_of(vllm_config.model_config)
    return settings is not None and settings.decode == "sparse"


class SparseImpl:
    """Attends to selected keys where a step's metadata says so, and else as vLLM does.

    Attributes:
        layout: Of the KV cache.
    """

    layout: ClassVar[type[pages.Pages]]
    scale: float
    forward: Any

    def attend(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        metadata: SparseStep,
        output: Tensor,
        selector: Selector,
        index: IndexTensors | None,
        index_keys: Tensor | None,
    ) -> None:
        """Attention of a step whose keys, values and index keys are in their pages already.

        Args:
            layer: vLLM's attention layer.
            query: ``[T, H, D]``.
            key: ``[T, Hkv, D]``.
            value: ``[T, Hkv, D]``.
            kv_cache: ``[pages, Hkv, tokens, 2 * D]``.
            metadata: Of the step.
            output: ``[T, H, D]``, to be written.
            selector: Selects the keys.
            index: Of the step's tokens: ``[J, T, Di]``, ``[T, Di]``, ``[T, J]``; ``None`` without an indexer.
            index_keys: ``[pages, tokens, Di]``: the index keys of all tokens.
        """
        if metadata.dense is not None:
            rows = metadata.dense_rows
            if rows is None:
                self.forward(layer, query, key, value, kv_cache, metadata.dense, output)
            else:
                out = torch.empty_like(output[rows])
                self.forward(layer, query[rows], key[rows], value[rows], kv_cache, metadata.dense, out)
                output[rows] = out
        segments = [part for each in metadata.sparse for part in each.segments(selector.query_block)]
        for part in segments:
            if part.start == 0:  # all its keys are at hand
                own, rows = _of_rows(index, part.rows, None), part.rows
                output[rows] = self._whole(query[rows], key[rows], value[rows], selector, own)
        later = [part for part in segments if part.start > 0]
        if later:
            packed, index_k = Packed.of(later, query.device), None
            if index_keys is not None:
                index_k = torch.cat([pages.read_index_keys(index_keys, part.pages, part.end) for part in later])
            own = _of_rows(index, packed.rows, index_k)
            held = self.layout(kv_cache)
            output[packed.rows] = self._paged(query[packed.rows], held, later, packed, selector, own)

    def _whole(self, q: Tensor, k: Tensor, v: Tensor, selector: Selector, index: IndexTensors | None) -> Tensor:
        """Attention of a sequence from its first token on.

        Args:
            q: ``[n, H, D]``.
            k: ``[n, Hkv, D]``.
            v: ``[n, Hkv, D]``.
            selector: Selects the keys.
            index: ``[n, J, Di]``, ``[n, Di]``, ``[n, J]``.

        Returns:
            ``[n, H, D]``.
        """
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        if index is not None:
            w = None if index.index_w is None else index.index_w[None]
            index = IndexTensors(index.index_q.transpose(0, 1)[None], index.index_k[None], w)
        selected = selector.select(AttentionCall(q, k, self.scale, index=index))
        out = sparse_attention(q, k, v, selected, query_block=selector.query_block, scale=self.scale)
        return out[0].transpose(0, 1)

    def _paged(
        self,
        q: Tensor,
        held: pages.Pages,
        sequences: list[Sequence],
        packed: Packed,
        selector: Selector,
        index: IndexTensors | None,
    ) -> Tensor:
        """Attention of later tokens of sequences, all together; selected keys and values are read from their pages.

        Args:
            q: ``[T, H, D]``.
            held: The keys and values of all tokens.
            sequences: Of which tokens.
            packed: The same as a packed batch.
            selector: Selects the keys.
            index: ``[T, J, Di]``, ``[Tk, Di]``, ``[T, J]``.

        Returns:
            ``[T, H, D]``.
        """
        starts: dict[str, Any] = {"cu_seqlens_q": packed.cu_seqlens_q, "cu_seqlens_k": packed.cu_seqlens_k}
        if index is None:
            k = torch.cat([held.read_keys(each.pages, each.end) for each in sequences])
        else:  # an indexer selects without the model's own keys
            k = q[:1, :1].expand(len(index.index_k), 1, -1)
        selected = selector.select(AttentionCall(q, k, self.scale, index=index, **starts))
        return sparse_attention(
            q, held.keys, held.values, selected, query_block=selector.query_block, scale=self.scale, **starts,
            page_table=packed.page_table,
        )  # fmt: skip


class SparseBackend:
    """The backend of layers whose keys are selected.

    Attributes:
        name: Of the backend.
        impl: What attends.
        builder: What prepares a step.
    """

    name: ClassVar[str]
    impl: ClassVar[type]
    builder: ClassVar[type]

    @classmethod
    def get_name(cls) -> str:
        """Of the backend."""
        return cls.name

    @classmethod
    def get_impl_cls(cls) -> type:
        """What attends."""
        return cls.impl

    @classmethod
    def get_builder_cls(cls) -> type:
        """What prepares a step."""
        return cls.builder


def _of_rows(index: IndexTensors | None, rows: slice | Tensor, index_k: Tensor | None) -> IndexTensors | None:
    """The tensors of some rows, packed; ``index_k [Tk, Di]`` if the keys are not those of the rows."""
    if index is None:
        return None
    w = None if index.index_w is None else index.index_w[rows]
    return IndexTensors(index.index_q.transpose(0, 1)[rows], index.index_k[rows] if index_k is None else index_k, w)
