"""Qwen3: Llama with norms on queries and keys."""

from streamkl.integrations.transformers.families.base import GroupedQuery


class Qwen3(GroupedQuery):
    """Every layer attends to all keys, unless the config gives some a window."""

    name = "qwen3"
    model_types = ("qwen3",)
    attention = "Qwen3Attention"
