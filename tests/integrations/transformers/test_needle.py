"""The oracle on a real model: a number hidden in prose is found through the keys that it selects."""

import pytest

import streamkl.integrations.transformers as skl
from streamkl.sparse import OracleSelector
from streamkl.testing import needle, smollm2

TOKENS, TOPK, BLOCK = 1024, 128, 64


@pytest.fixture(scope="module")
def count(request: pytest.FixtureRequest) -> int:
    return request.config.getoption("--needles")


@pytest.mark.slow
def test_the_oracle_finds_what_the_dense_model_finds_and_a_window_does_not(smol, count) -> None:
    model, tokenizer = smol
    prose = smollm2.prose()
    needles = [needle.hide(prose, tokenizer, tokens=TOKENS, seed=seed) for seed in range(count)]

    def found() -> int:
        return sum(needle.finds(model, tokenizer, each) for each in needles)

    dense = found()
    skl.sparsify(model, OracleSelector(TOPK, BLOCK), decode="sparse")
    oracle = found()
    model.set_attn_implementation("streamkl_window")
    window = found()
    model.streamkl.remove()
    print(f"{count} numbers in {TOKENS} tokens: dense {dense}, oracle with {TOPK} keys {oracle}, window {window}")
    assert dense > 0.9 * count
    assert oracle >= dense - 1
    assert window < 0.25 * count
