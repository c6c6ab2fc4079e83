"""Tiles: where one is, its products, row states and gradients, and row vectors computed before a pass."""
