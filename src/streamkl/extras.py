"""How optional dependencies are installed, for messages about one that is missing."""

from __future__ import annotations


def how_to_install(*extras: str) -> str:
    """The command that installs extras of this package, which is on no index: it runs in a checkout.

    Examples:
        >>> how_to_install("hf", "bench")
        "pip install -e '.[hf,bench]' in the checkout"
    """
    return f"pip install -e '.[{','.join(extras)}]' in the checkout"
