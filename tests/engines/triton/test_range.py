"""Logits below the number that stands for a row without keys: no result is better than a wrong one."""

import pytest

from streamkl import attention_kl
from streamkl.testing import Heads, make_case

pytest.importorskip("triton")


@pytest.mark.parametrize("side", ["teacher", "student"])
@pytest.mark.parametrize("heads", [Heads(1, 1, 1, 1), Heads(2, 1, 1, 1)], ids=["per_head", "groups"])
def test_a_row_whose_logits_are_all_out_of_range_is_nan(heads: Heads, side: str, small_tiles: None) -> None:
    case = make_case(0, heads=heads, batch=1, tokens=(3, 20), dims=(16, 16), guard=False)
    tensors = {name: x.clone() for name, x in case.tensors.items()}
    tensors[f"{side}_q"][:, :, 1] = 0.0
    tensors[f"{side}_q"][:, :, 1, 0], tensors[f"{side}_k"][..., 0] = 1e19, -1e19  # -2.5e37 each, which float32 has
    kl = attention_kl(**tensors, reduction="none", backend="triton")
    assert kl[0, 0].isnan().tolist() == [False, True, False]
