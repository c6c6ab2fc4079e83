"""Gemma 3: five layers with a window for each that sees all keys."""

from streamkl.integrations.transformers.families.base import GroupedQuery


class Gemma3(GroupedQuery):
    """The global layers; those with a window stay dense."""

    name = "gemma3"
    model_types = ("gemma3", "gemma3_text")
    attention = "Gemma3Attention"
