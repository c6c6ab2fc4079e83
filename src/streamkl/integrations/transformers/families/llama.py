"""Llama, and what has its architecture: SmolLM2 among others."""

from streamkl.integrations.transformers.families.base import GroupedQuery


class Llama(GroupedQuery):
    """Every layer attends to all keys."""

    name = "llama"
    model_types = ("llama",)
    attention = "LlamaAttention"
