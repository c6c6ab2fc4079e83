"""Qwen3.5: Qwen3-Next's layers under a vision model."""

from streamkl.integrations.transformers.families.base import GroupedQuery


class Qwen35(GroupedQuery):
    """The text model's layers of full attention; vision attends as it does."""

    name = "qwen3_5"
    model_types = ("qwen3_5", "qwen3_5_text")
    attention = "Qwen3_5Attention"
