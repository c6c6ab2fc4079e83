"""Sparse attention in models of transformers: ``sparsify(model, selector)``, by name, and saved with the model.

Importing it registers the attention implementations ``streamkl_sparse``, ``streamkl_oracle``, ``streamkl_window``,
``streamkl_random`` and ``streamkl_dense``, and lets ``from_pretrained`` find the indexers of a model that was saved
sparse.
"""

from streamkl.integrations.transformers.requirements import check_requirements

check_requirements()

from streamkl.integrations.transformers.attention import register  # noqa: E402
from streamkl.integrations.transformers.capture import capture_attention  # noqa: E402
from streamkl.integrations.transformers.distiller import AttentionDistiller, DistillationStep  # noqa: E402
from streamkl.integrations.transformers.families import (  # noqa: E402
    Family,
    GroupedQuery,
    OwnIndexers,
    SparseLatent,
    register_family,
)
from streamkl.integrations.transformers.indexers import (  # noqa: E402
    Indexers,
    load_indexers,
    new_indexers,
    save_indexers,
)
from streamkl.integrations.transformers.loading import wrap_from_pretrained  # noqa: E402
from streamkl.integrations.transformers.model import SparseModel, sparsify  # noqa: E402
from streamkl.integrations.transformers.recording import Attended, Capture  # noqa: E402
from streamkl.integrations.transformers.trainer import AttentionDistillation  # noqa: E402

__all__ = [
    "Attended",
    "AttentionDistillation",
    "AttentionDistiller",
    "Capture",
    "DistillationStep",
    "Family",
    "GroupedQuery",
    "Indexers",
    "OwnIndexers",
    "SparseLatent",
    "SparseModel",
    "capture_attention",
    "load_indexers",
    "new_indexers",
    "register_family",
    "save_indexers",
    "sparsify",
]

register()
wrap_from_pretrained()
