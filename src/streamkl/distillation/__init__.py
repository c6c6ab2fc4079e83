"""Training of indexers on a frozen model: ``streamkl distill``, on Hugging Face's trainer.

It stands on the public functions, ``indexer``, ``sparse``, ``text`` and ``integrations.transformers``; the command line
and its benchmark import it, and nothing else does. ``run.distill`` is what the command calls.
"""

from streamkl.distillation.settings import Settings

__all__ = ["Settings"]
