"""The data of one call of an attention module, from its hook to the attention function."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from streamkl.integrations.transformers.families import Inputs
from streamkl.integrations.transformers.masks import Mask
from streamkl.sparse import IndexTensors


@dataclass(eq=False)
class ModuleCall:
    """One call of an attention module, in place of the call's attention mask.

    Modules pass their mask to the attention function, and to an indexer of their own. So the data belongs to the call
    and never to the module: calls of several threads stay apart, and one that raises leaves nothing behind.

    Attributes:
        mask: The attention mask.
        inputs: The inputs of the layer's indexer, if the call needs its tensors.
        index: The tensors of the module's own indexer, if the call needs them.
    """

    mask: Mask
    inputs: Inputs | None = None
    index: IndexTensors | None = None

    def __getitem__(self, part: Any) -> ModuleCall:
        """Itself: a module passes a slice of its mask to its own indexer, whose forward is an `OwnIndexer`."""
        return self
