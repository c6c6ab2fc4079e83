"""Training on Hugging Face's trainer: ``streamkl distill`` of indexers alone, ``streamkl finetune`` with their model.

It uses the public functions, ``indexer``, ``sparse``, ``text`` and ``integrations.transformers``; only the command line
and its benchmark import it. The commands call ``run.distill`` and ``finetune.finetune``.
"""

from streamkl.distillation.settings import FinetuneSettings, Settings

__all__ = ["FinetuneSettings", "Settings"]
