"""The inspection behind ``streamkl kernels``: launches compiled for GPUs that are not present, figures of the binaries.

``table.py`` lists the variants to compile, ``matrix.py`` makes their launches, ``compiler.py`` compiles them,
``binary.py`` reads the binaries, ``kept.py`` caches the figures, ``budget.py`` checks them against the targets' limits
and derives the static ceilings.
"""
