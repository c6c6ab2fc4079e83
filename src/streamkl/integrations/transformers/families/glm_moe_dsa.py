"""GLM-5 and its relatives (``glm_moe_dsa``)."""

from streamkl.integrations.transformers.families.dsa import SparseLatent


class GlmMoeDsa(SparseLatent):
    """Its indexer rotates in pairs; some layers share the top-k of the one before."""

    name = "glm_moe_dsa"
    model_types = ("glm_moe_dsa",)
    attention = "GlmMoeDsaAttention"
    rope_layout = "interleaved"
