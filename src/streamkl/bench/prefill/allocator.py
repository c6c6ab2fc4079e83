"""Freed memory that stays with the process, as allocators of servers (jemalloc, tcmalloc) keep it.

glibc takes every large tensor from the system and returns it, so that its pages are cleared and mapped again whenever a
layer allocates its activations. At 32K tokens that is a third of a dense prefill, and more of a sparse one.
"""

from __future__ import annotations

import ctypes
from contextlib import suppress

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
"""The numbers that glibc's ``malloc.h`` gives them."""


def keep_freed_memory() -> bool:
    """Sets it in glibc for this process; returns whether there is a glibc.

    ``MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=100000000000`` in the environment does the same for any program.
    """
    with suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        return bool(mallopt(M_MMAP_MAX, 0)) and bool(mallopt(M_TRIM_THRESHOLD, -1))
    return False
