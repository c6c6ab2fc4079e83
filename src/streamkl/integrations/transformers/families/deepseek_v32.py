"""DeepSeek-V3.2."""

from streamkl.integrations.transformers.families.dsa import SparseLatent


class DeepseekV32(SparseLatent):
    """Its indexer rotates in halves, unlike its attention."""

    name = "deepseek_v32"
    model_types = ("deepseek_v32",)
    attention = "DeepseekV32Attention"
    rope_layout = "half"
