"""Rotary embeddings against complex rotations, and against how transformers writes them."""

import pytest
import torch

from streamkl.indexer import apply_rope, rope_tables


def rotate(x: torch.Tensor, positions: torch.Tensor, dim: int, layout: str, base: float) -> torch.Tensor:
    """Pairs as complex numbers, turned by ``position * base^(-2i/dim)``; float64."""
    turned = x.double().clone()
    for i in range(dim // 2):
        a, b = (i, i + dim // 2) if layout == "half" else (2 * i, 2 * i + 1)
        z = torch.complex(x[..., a].double(), x[..., b].double())
        z = z * torch.polar(torch.ones(()).double(), positions.double() * base ** (-2 * i / dim))
        turned[..., a], turned[..., b] = z.real, z.imag
    return turned


@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize("dim", [2, 8, 16])
@pytest.mark.parametrize("base", [10000.0, 5e6])
def test_pairs_are_rotated_by_their_angle(layout, dim, base) -> None:
    torch.manual_seed(0)
    x, positions = torch.randn(2, 5, 16), torch.tensor([0, 1, 2, 1000, 1_000_000])
    got = apply_rope(x, *rope_tables(positions, dim, base), layout=layout)
    torch.testing.assert_close(got, rotate(x, positions, dim, layout, base).float())


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_products_depend_on_the_distance_alone(layout) -> None:
    torch.manual_seed(0)
    q, k = torch.randn(8), torch.randn(8)
    products = []
    for at in (0, 7, 123):
        rotated = (apply_rope(x, *rope_tables(torch.tensor(at + far), 8), layout=layout) for x, far in ((q, 5), (k, 0)))
        products.append(torch.dot(*rotated))
    torch.testing.assert_close(products[0].expand(3), torch.stack(products))


def test_half_layout_is_transformers_rotate_half() -> None:
    torch.manual_seed(0)
    x = torch.randn(1, 2, 6, 8)
    cos, sin = rope_tables(torch.arange(6), 8)
    swapped = torch.cat((-x[..., 4:], x[..., :4]), -1)
    torch.testing.assert_close(apply_rope(x, cos, sin), x * cos + swapped * sin)


def test_interleaved_products_are_those_of_transformers_reordered_halves() -> None:
    """transformers moves even dims before odd ones and then rotates halves: the same order for q and k."""
    torch.manual_seed(0)
    q, k = torch.randn(6, 8), torch.randn(6, 8)
    cos, sin = rope_tables(torch.arange(6), 8)
    ours = apply_rope(q, cos, sin, "interleaved") @ apply_rope(k, cos, sin, "interleaved").mT
    moved_q, moved_k = (torch.cat((x[..., ::2], x[..., 1::2]), -1) for x in (q, k))
    torch.testing.assert_close(ours, apply_rope(moved_q, cos, sin) @ apply_rope(moved_k, cos, sin).mT)


def test_the_dtype_stays() -> None:
    x = torch.randn(3, 8, dtype=torch.bfloat16)
    assert apply_rope(x, *rope_tables(torch.arange(3), 4)).dtype == torch.bfloat16


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="dim must be even and not negative"):
        rope_tables(torch.arange(3), 5)
    cos, sin = rope_tables(torch.arange(3), 8)
    with pytest.raises(ValueError, match="at most the 4 of x: got 8 and 8"):
        apply_rope(torch.zeros(3, 4), cos, sin)
    with pytest.raises(ValueError, match="layout must be one of 'half', 'interleaved': got 'pairs'"):
        apply_rope(torch.zeros(3, 8), cos, sin, "pairs")  # type: ignore[arg-type]
    for dim in (8, 16):
        with pytest.raises(RuntimeError, match="Sizes of tensors must match"):
            apply_rope(torch.zeros(1, 3, dim), cos.expand(2, 3, 8), sin.expand(2, 3, 8))
