"""Indexers as modules, which project hidden states to index queries and keys and train with ``streamkl.indexer_kl``.

They use the public functions and ``streamkl.sparse``; nothing in the core imports them.
"""

from streamkl.indexer.base import Indexer, IndexTensors
from streamkl.indexer.head import HeadIndexer
from streamkl.indexer.lightning import LightningIndexer
from streamkl.indexer.rope import apply_rope, rope_tables

__all__ = ["HeadIndexer", "IndexTensors", "Indexer", "LightningIndexer", "apply_rope", "rope_tables"]
