"""`LightningIndexer` with a transformers indexer's own weights selects the keys that it selects."""

import warnings

import pytest
import torch

from streamkl.indexer import LightningIndexer

HIDDEN, LATENT, HEADS, DIM, ROPE, TOKENS, TOPK = 48, 24, 4, 32, 16, 40, 6
SIZES = {
    "hidden_size": HIDDEN, "q_lora_rank": LATENT, "index_n_heads": HEADS, "index_head_dim": DIM, "index_topk": TOPK,
    "qk_rope_head_dim": ROPE, "qk_nope_head_dim": 16, "v_head_dim": 16, "kv_lora_rank": 16, "num_attention_heads": 4,
    "num_key_value_heads": 4, "num_hidden_layers": 1, "intermediate_size": 64, "moe_intermediate_size": 32,
    "vocab_size": 64,
}  # fmt: skip


@pytest.mark.parametrize(
    ("family", "name", "layout"),
    [("deepseek_v32", "DeepseekV32", "half"), ("glm_moe_dsa", "GlmMoeDsa", "interleaved")],
)
def test_a_checkpoints_indexer_selects_the_same_keys(family, name, layout) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers' own
        models = pytest.importorskip(f"transformers.models.{family}.modeling_{family}")
        configuration = pytest.importorskip(f"transformers.models.{family}.configuration_{family}")
        config = getattr(configuration, f"{name}Config")(**SIZES)
        torch.manual_seed(0)
        theirs = getattr(models, f"{name}Indexer")(config, layer_idx=0)
        rotary = getattr(models, f"{name}RotaryEmbedding")(config)
    torch.nn.init.normal_(theirs.k_norm.bias)
    hidden, latent = torch.randn(2, TOKENS, HIDDEN), torch.randn(2, TOKENS, LATENT)
    positions = torch.arange(TOKENS)[None]
    tables = rotary(hidden, positions)
    visible = torch.ones(2, TOKENS, TOKENS, dtype=torch.bool).tril()
    selected = theirs(hidden, latent, tables, visible, positions)
    selected = selected[0] if isinstance(selected, tuple) else selected  # later versions return scores as well

    ours = LightningIndexer(HIDDEN, query_dim=LATENT, heads=HEADS, head_dim=DIM, rope_dim=ROPE, rope_layout=layout)
    ours.load_state_dict(theirs.state_dict())
    arguments = {"query": latent, "position_embeddings": tables}
    scores, found = ours.scores(hidden, **arguments), ours.topk(hidden, TOPK, **arguments)
    for row in range(TOPK - 1, TOKENS):  # earlier queries see fewer keys, and transformers then selects hidden ones
        best, got = (scores[:, row].gather(-1, x[:, row].long()).sort(-1).values for x in (found, selected))
        torch.testing.assert_close(best, got, msg=f"query {row}")  # of keys that tie at 0 it may select any
        sure = best[:, 0] > scores[:, row].sort(-1).values[:, -TOPK - 1] + 1e-4
        for batch in sure.nonzero().flatten().tolist():
            assert set(found[batch, row].tolist()) == set(selected[batch, row].tolist()), f"query {row}"
    ours.rope_layout = "interleaved" if layout == "half" else "half"
    assert not torch.equal(ours.topk(hidden, TOPK, **arguments), found)
