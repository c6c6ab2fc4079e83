"""What one call of an attention module carries from its hook to the attention function."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from streamkl.integrations.transformers.families import Inputs
from streamkl.integrations.transformers.masks import Mask
from streamkl.sparse import IndexTensors


@dataclass(eq=False)
class ModuleCall:
    """One call of an attention module; it takes the place of the call's attention mask.

    Modules hand their mask to the attention function, and to an indexer of their own. So what it carries belongs to
    the call and never to the module: calls of several threads do not meet, and one that raises leaves nothing behind.

    Attributes:
        mask: The attention mask.
        inputs: What the layer's indexer reads, if the call needs its tensors.
        index: What an indexer of the module's own made, if the call needs it.
    """

    mask: Mask
    inputs: Inputs | None = None
    index: IndexTensors | None = None

    def __getitem__(self, part: Any) -> ModuleCall:
        """Itself: a module hands a part of its mask to its own indexer, whose forward is ours."""
        return self
