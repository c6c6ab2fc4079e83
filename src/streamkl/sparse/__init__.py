"""Top-k selection of keys, attention over selected keys, and diagnostics of a selection.

It uses the public functions, ``problem`` and operators of its own (``ops.py``); ``streamkl`` exports its diagnostics,
``streamkl.indexer`` uses its selection.
"""

from streamkl.sparse.arguments import IndexTensors
from streamkl.sparse.attention import sparse_attention
from streamkl.sparse.diagnostics import attention_mass, topk_recall
from streamkl.sparse.scores import index_scores
from streamkl.sparse.selection import index_topk, oracle_topk
from streamkl.sparse.selectors import (
    AttentionCall,
    IndexerSelector,
    OracleSelector,
    RandomSelector,
    Selector,
    WindowSelector,
)

__all__ = [
    "AttentionCall",
    "IndexTensors",
    "IndexerSelector",
    "OracleSelector",
    "RandomSelector",
    "Selector",
    "WindowSelector",
    "attention_mass",
    "index_scores",
    "index_topk",
    "oracle_topk",
    "sparse_attention",
    "topk_recall",
]
