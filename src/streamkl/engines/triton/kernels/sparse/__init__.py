"""Sparse attention: the output over the keys that a query block selected."""
