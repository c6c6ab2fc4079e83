"""Which keys a query needs: streaming top-k selection, and what a selection is worth.

It stands on the public functions and ``problem``; ``streamkl`` exports its diagnostics, ``streamkl.indexer`` uses its
selection.
"""

from streamkl.sparse.diagnostics import attention_mass, topk_recall
from streamkl.sparse.scores import index_scores
from streamkl.sparse.selection import index_topk, oracle_topk

__all__ = ["attention_mass", "index_scores", "index_topk", "oracle_topk", "topk_recall"]
