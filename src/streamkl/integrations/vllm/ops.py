"""The one operator of the plugin: writes a step's keys, values and index keys to their pages, and attends.

It is opaque to ``torch.compile``, as vLLM's own attention is.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.attention.attention import (  # pyright: ignore[reportMissingImports]  # an extra
    get_attention_context,
)

from streamkl.integrations.vllm.config import OPERATOR
from streamkl.integrations.vllm.pages import write_index_keys
from streamkl.sparse import IndexTensors

torch.library.define(
    OPERATOR,
    "(Tensor query, Tensor key, Tensor value, Tensor(a!) output, Tensor? index_q, Tensor? index_k, Tensor? index_w, "
    "str layer) -> ()",
    tags=torch.Tag.pt2_compliant_tag,
)


@torch.library.impl(OPERATOR, ("CPU", "CUDA"))
def _(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    index_q: Tensor | None,
    index_k: Tensor | None,
    index_w: Tensor | None,
    layer: str,
) -> None:
    context: Any = get_attention_context(layer)
    metadata, attention, kv_cache, slots = context
    if metadata is None or slots is None:  # vLLM warms up, without pages
        output.zero_()
        return
    tokens = metadata.num_actual_tokens
    attention.impl.do_kv_cache_update(attention, key, value, kv_cache, slots)
    index = index_keys = None
    if index_k is not None:
        assert index_q is not None, "an indexer has queries and keys"
        index, index_keys = IndexTensors(index_q, index_k, index_w), attention.index_cache.kv_cache
        write_index_keys(index_keys, slots[:tokens], index_k[:tokens])
    attention.impl.attend(
        attention, query, key, value, kv_cache, metadata, output, attention.selector, index, index_keys
    )


@torch.library.register_fake(OPERATOR)
def _(*args: object) -> None:
    pass
