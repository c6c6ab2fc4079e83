"""Costs: two losses agree to a hundredth, or no figure is shown."""

import pytest

from streamkl.bench.costs import check_agreement
from streamkl.bench.gate import RedGateError


def test_losses_that_differ_by_more_than_a_hundredth_raise() -> None:
    check_agreement({"ours": 1.009, "theirs": 1.0}, "ours", "theirs", 64)
    for wrong in (1.02, 0.98, float("nan")):
        with pytest.raises(RedGateError, match="the losses at 64 tokens are"):
            check_agreement({"ours": wrong, "theirs": 1.0}, "ours", "theirs", 64)
