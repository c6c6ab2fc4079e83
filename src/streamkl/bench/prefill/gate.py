"""The gate: with all keys selected, sparse attention must give the logits of dense attention, or nothing is timed."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from streamkl.bench.gate import RedGateError
from streamkl.integrations.transformers import sparsify
from streamkl.sparse import WindowSelector

TOKENS = 384


@torch.no_grad()
def check(model: PreTrainedModel, prompt: Tensor, query_block: int) -> float:
    """Raises `RedGateError` if sparse logits differ from sdpa's more than twice as much as eager attention's do.

    Args:
        model: The model, dense.
        prompt: ``[1, N]``: its first tokens are read.
        query_block: Queries that share their top-k.

    Returns:
        The largest difference of a logit, as a fraction of the allowed one.
    """
    prompt = prompt[:, :TOKENS]
    logits = {}
    for name in ("sdpa", "eager"):
        model.set_attn_implementation(name)
        logits[name] = model(prompt).logits.float()
    model.set_attn_implementation("sdpa")
    handle = sparsify(model, WindowSelector(max(prompt.shape[1], query_block + 1), query_block))  # all keys
    ours = model(prompt).logits.float()
    handle.remove()
    one_rounding = torch.finfo(model.dtype).eps * logits["sdpa"].abs().max()
    allowed = 2 * (logits["eager"] - logits["sdpa"]).abs().max() + one_rounding
    ratio = ((ours - logits["sdpa"]).abs().max() / allowed).item()
    if not ratio <= 1:
        raise RedGateError(
            f"with all keys selected, logits differ from dense ones by {ratio:.1f} times what is allowed"
        )
    return ratio
