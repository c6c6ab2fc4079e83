"""What holds an engine to the contract: seeded problems, the accuracy rule, and a pytest plugin that poisons memory.

Nothing in the package imports it; a project that brings an engine of its own can.
"""

from streamkl.testing.accuracy import Errors, Results, check_accuracy, evaluate
from streamkl.testing.indexer_cases import INDEX, IndexerHeads, make_indexer_case, random_indexer_case
from streamkl.testing.problems import STUDENT, TEACHER, Case, Heads, make_case, random_case

__all__ = [
    "INDEX",
    "STUDENT",
    "TEACHER",
    "Case",
    "Errors",
    "Heads",
    "IndexerHeads",
    "Results",
    "check_accuracy",
    "evaluate",
    "make_case",
    "make_indexer_case",
    "random_case",
    "random_indexer_case",
]
