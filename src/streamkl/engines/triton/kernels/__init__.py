"""The kernels.

Tile code is in ``primitives.py`` and ``gradient.py``, passes are in ``lse.py``, ``forward.py`` and ``backward.py``,
those over selected keys in ``gathered.py``, ``gathered_backward.py`` and ``attention.py``; ``split.py`` merges split
keys, ``rows.py`` computes row vectors. Only the plans and ``streamkl kernels`` import them.
"""
