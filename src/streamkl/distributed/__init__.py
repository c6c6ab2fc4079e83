"""One sequence over several ranks, on ``torch.distributed``: `ContextParallel` has the losses and the attention.

Nothing in the package imports it but what runs on several ranks: importing ``torch.distributed`` takes a while.
"""

from streamkl.distributed.context_parallel import ContextParallel
from streamkl.distributed.gathering import Gathered
from streamkl.distributed.layout import HeadTail

__all__ = ["ContextParallel", "Gathered", "HeadTail"]
