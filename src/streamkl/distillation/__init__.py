"""Training of indexers on a frozen model: ``streamkl distill``, on Hugging Face's trainer.

It stands on the public functions, ``indexer``, ``sparse``, ``text`` and ``integrations.transformers``; nothing imports it
but the command line. ``run.distill`` is what the command calls.
"""

from streamkl.distillation.settings import Settings

__all__ = ["Settings"]
