"""``streamkl selfcheck --vllm`` on this machine: all its checks pass, and none is empty."""

from streamkl.selfcheck import serving


def test_all_checks_pass_in_float32() -> None:
    found = list(serving.checks("float32"))
    assert [outcome.name for outcome in found if not outcome.passed] == []
    assert len(found) == 5
