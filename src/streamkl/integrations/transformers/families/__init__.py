"""The known families of models, one small file each; the last is for all others, if they are standard decoders.

``docs/how-to/add-a-family.md`` says how to add one.
"""

from __future__ import annotations

from typing import Any

from streamkl.integrations.transformers.families.axk2 import AXK2
from streamkl.integrations.transformers.families.base import (
    Attention,
    Family,
    GroupedQuery,
    Inputs,
    Losses,
    OwnIndexers,
)
from streamkl.integrations.transformers.families.deepseek_v4 import DeepseekV4
from streamkl.integrations.transformers.families.deepseek_v32 import DeepseekV32
from streamkl.integrations.transformers.families.dots3_note import Dots3Note
from streamkl.integrations.transformers.families.dsa import SparseLatent
from streamkl.integrations.transformers.families.gemma3 import Gemma3
from streamkl.integrations.transformers.families.glm5_next import Glm5Next
from streamkl.integrations.transformers.families.glm_moe_dsa import GlmMoeDsa
from streamkl.integrations.transformers.families.hy_v4 import HYV4
from streamkl.integrations.transformers.families.llama import Llama
from streamkl.integrations.transformers.families.minimax_m3_vl import MiniMaxM3
from streamkl.integrations.transformers.families.mistral_large4 import MistralLarge4
from streamkl.integrations.transformers.families.qwen3 import Qwen3
from streamkl.integrations.transformers.families.qwen3_5 import Qwen35
from streamkl.integrations.transformers.families.qwen3_next import Qwen3Next
from streamkl.integrations.transformers.families.qwen4_exp import Qwen4Exp
from streamkl.integrations.transformers.families.structural import Structural

__all__ = [
    "FAMILIES",
    "Attention",
    "Family",
    "GroupedQuery",
    "Inputs",
    "Losses",
    "OwnIndexers",
    "SparseLatent",
    "family_of",
    "register_family",
]

FAMILIES: dict[str, Family] = {}
"""By ``config.model_type``; ``"*"`` is any other."""


def register_family(family: Family) -> None:
    """Makes the models of a family known."""
    FAMILIES.update(dict.fromkeys(family.model_types, family))


def family_of(config: Any) -> Family:
    """The family of a model, by its config: that of its type, or else the structural one."""
    return FAMILIES.get(config.model_type, FAMILIES["*"])


for _family in (
    Llama(), Qwen3(), Qwen3Next(), Qwen35(), Gemma3(), DeepseekV32(), GlmMoeDsa(), AXK2(), MistralLarge4(), HYV4(),
    MiniMaxM3(), DeepseekV4(), Glm5Next(), Qwen4Exp(), Dots3Note(), Structural(),
):  # fmt: skip
    register_family(_family)
