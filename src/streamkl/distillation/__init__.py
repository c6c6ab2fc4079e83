"""Training of indexers on a frozen model: ``streamkl distill``, on Hugging Face's trainer.

It uses the public functions, ``indexer``, ``sparse``, ``text`` and ``integrations.transformers``; only the command line
and its benchmark import it. The command calls ``run.distill``.
"""

from streamkl.distillation.settings import Settings

__all__ = ["Settings"]
