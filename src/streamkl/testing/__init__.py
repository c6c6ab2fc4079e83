"""Tools to test an engine: seeded problems, the accuracy rule, and a pytest plugin that poisons memory.

``streamkl doctor``, ``selfcheck`` and the gate of ``bench`` use it; a project with an engine of its own can, too.
"""

from streamkl.testing.accuracy import Errors, Results, check_accuracy, evaluate
from streamkl.testing.indexer_cases import INDEX, IndexerHeads, make_indexer_case, random_indexer_case
from streamkl.testing.problems import STUDENT, TEACHER, Case, Heads, Infinite, make_case, random_case
from streamkl.testing.sparse_accuracy import (
    check_index_topk,
    check_normalised_topk,
    check_oracle_topk,
    check_paged_attention,
    check_sparse_attention,
)
from streamkl.testing.sparse_cases import SparseCase, random_sparse_case

__all__ = [
    "INDEX",
    "STUDENT",
    "TEACHER",
    "Case",
    "Errors",
    "Heads",
    "IndexerHeads",
    "Infinite",
    "Results",
    "SparseCase",
    "check_accuracy",
    "check_index_topk",
    "check_normalised_topk",
    "check_oracle_topk",
    "check_paged_attention",
    "check_sparse_attention",
    "evaluate",
    "make_case",
    "make_indexer_case",
    "random_case",
    "random_indexer_case",
    "random_sparse_case",
]
