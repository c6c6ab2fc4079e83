"""vLLM's CPU backend with prompts that attend to selected keys; what decodes, and all writing, is inherited."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor
from vllm.v1.attention.backends.cpu_attn import (  # pyright: ignore[reportMissingImports]  # an extra
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)

from streamkl.integrations.vllm import pages
from streamkl.integrations.vllm.metadata import Packed, Sequence, rows_of, split
from streamkl.integrations.vllm.settings import settings_of
from streamkl.sparse import AttentionCall, IndexTensors, Selector, sparse_attention

NAME = "STREAMKL_CPU"
PATH = f"{__name__}.SparseBackend"


class SparseBackend(CPUAttentionBackend):
    """The backend of layers whose keys are selected."""

    @staticmethod
    def get_name() -> str:
        """Of the backend."""
        return NAME

    @staticmethod
    def get_impl_cls() -> type:
        """What attends."""
        return SparseImpl

    @staticmethod
    def get_builder_cls() -> type:
        """What prepares a step."""
        return SparseMetadataBuilder


@dataclass
class SparseMetadata(CPUAttentionMetadata):
    """A step.

    Attributes:
        sparse: The sequences whose keys are selected.
        dense: vLLM's metadata of the other requests; ``None`` if there are none.
        dense_rows: ``[rows]``: their rows; ``None`` if that is all.
    """

    sparse: list[Sequence] = field(default_factory=list)
    dense: CPUAttentionMetadata | None = None
    dense_rows: Tensor | None = None


class SparseMetadataBuilder(CPUAttentionMetadataBuilder):
    """Splits each step into sparse and dense requests.

    Raises:
        ValueError: The layout of the pages is not known.
    """

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        pages.check_layout(self.isa)
        settings = settings_of(vllm_config.model_config)
        self.sparse_decode = settings is not None and settings.decode == "sparse"

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> SparseMetadata:
        """The metadata of a step, for all layers."""
        whole = super().build(common_prefix_len, common_attn_metadata, fast_build)
        given = common_attn_metadata
        starts = given.query_start_loc_cpu
        parts = split(
            starts, given.seq_lens, given.block_table_tensor, given.is_prefilling, self.kv_cache_spec.block_size,
            self.sparse_decode,
        )  # fmt: skip
        made = SparseMetadata(**{each.name: getattr(whole, each.name) for each in fields(whole)}, sparse=parts.sparse)
        if not parts.sparse:
            made.dense = whole
        elif len(parts.dense):
            rows, own = rows_of(starts, parts.dense)
            common = given.replace(
                query_start_loc=own, query_start_loc_cpu=own, seq_lens=given.seq_lens[parts.dense],
                num_reqs=len(parts.dense), num_actual_tokens=len(rows), max_query_len=int(own.diff().max()),
                block_table_tensor=given.block_table_tensor[parts.dense].contiguous(),
                slot_mapping=given.slot_mapping[rows],
            )  # fmt: skip
            made.dense, made.dense_rows = super().build(common_prefix_len, common, fast_build), rows
        return made


class SparseImpl(CPUAttentionBackendImpl):
    """Attends to selected keys where a step's metadata says so, and else as vLLM does."""

    def attend(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        metadata: SparseMetadata,
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
            packed, index_k = Packed.of(later), None
            if index_keys is not None:
                index_k = torch.cat([pages.read_index_keys(index_keys, part.pages, part.end) for part in later])
            own = _of_rows(index, packed.rows, index_k)
            held = pages.KeyValuePages(kv_cache)
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
        held: pages.KeyValuePages,
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


def _of_rows(index: IndexTensors | None, rows: slice | Tensor, index_k: Tensor | None) -> IndexTensors | None:
    """The tensors of some rows, packed; ``index_k [Tk, Di]`` if the keys are not those of the rows."""
    if index is None:
        return None
    w = None if index.index_w is None else index.index_w[rows]
    return IndexTensors(index.index_q.transpose(0, 1)[rows], index.index_k[rows] if index_k is None else index_k, w)
