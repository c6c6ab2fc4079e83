"""The known families of models, one small file each; ``docs/how-to/add-a-family.md`` says how to add one."""

from __future__ import annotations

from typing import Any

from streamkl.integrations.transformers.families.base import Attention, Family, GroupedQuery, Inputs
from streamkl.integrations.transformers.families.deepseek_v32 import DeepseekV32
from streamkl.integrations.transformers.families.dsa import SparseLatent
from streamkl.integrations.transformers.families.gemma3 import Gemma3
from streamkl.integrations.transformers.families.glm_moe_dsa import GlmMoeDsa
from streamkl.integrations.transformers.families.llama import Llama
from streamkl.integrations.transformers.families.qwen3 import Qwen3
from streamkl.integrations.transformers.families.qwen3_5 import Qwen35
from streamkl.integrations.transformers.families.qwen3_next import Qwen3Next

__all__ = ["FAMILIES", "Attention", "Family", "GroupedQuery", "Inputs", "SparseLatent", "family_of", "register_family"]

FAMILIES: dict[str, Family] = {}
"""By ``config.model_type``."""


def register_family(family: Family) -> None:
    """Makes the models of a family known."""
    FAMILIES.update(dict.fromkeys(family.model_types, family))


def family_of(config: Any) -> Family:
    """The family of a model, by its config.

    Raises:
        ValueError: It is none of those that are known.
    """
    if config.model_type not in FAMILIES:
        raise ValueError(
            f"no family of models is known for model_type {config.model_type!r}: there are "
            f"{', '.join(sorted({family.name for family in FAMILIES.values()}))}; "
            f"register_family adds one (docs/how-to/add-a-family.md)"
        )
    return FAMILIES[config.model_type]


for _family in (Llama(), Qwen3(), Qwen3Next(), Qwen35(), Gemma3(), DeepseekV32(), GlmMoeDsa()):
    register_family(_family)
