"""What autocast makes of the inputs of attention."""

from __future__ import annotations

import torch
from torch import Tensor


def autocast(x: Tensor) -> Tensor:
    """Casts as autocast casts the inputs of ``scaled_dot_product_attention``: float64 stays."""
    device = x.device.type
    if device != "meta" and torch.is_autocast_enabled(device) and x.dtype != torch.float64:
        return x.to(torch.get_autocast_dtype(device))
    return x
