"""Qwen3-Next: linear attention, and full attention with a gate in every fourth layer."""

from streamkl.integrations.transformers.families.base import GroupedQuery


class Qwen3Next(GroupedQuery):
    """The layers of full attention; a quarter of a head is rotated."""

    name = "qwen3_next"
    model_types = ("qwen3_next",)
    attention = "Qwen3NextAttention"
