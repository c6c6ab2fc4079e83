"""Dots 3 Note (``dots3_note``), and its text model."""

from streamkl.integrations.transformers.families.base import Attention
from streamkl.integrations.transformers.families.dsa import SparseLatent


class Dots3Note(SparseLatent):
    """Its indexer rotates in pairs, and reads a scaled latent; layers without one attend to a window or to all keys."""

    name = "dots3_note"
    model_types = ("dots3_note", "dots3_note_text")
    attention = "Dots3NoteTextAttention"
    rope_layout = "interleaved"

    def shares(self, attention: Attention) -> bool:
        """None does."""
        return False
