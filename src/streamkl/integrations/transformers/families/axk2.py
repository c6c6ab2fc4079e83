"""A.X-K2 (``axk2``)."""

from streamkl.integrations.transformers.families.dsa import SparseLatent


class AXK2(SparseLatent):
    """Its indexer rotates in halves, although its heads rotate in pairs."""

    name = "axk2"
    model_types = ("axk2",)
    attention = "AXK2Attention"
    rope_layout = "half"
