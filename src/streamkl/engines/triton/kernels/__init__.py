"""The kernels.

Tile code is in ``primitives.py`` and ``gradient.py``, sweeps are in ``lse.py``, ``forward.py`` and ``backward.py``;
``split.py`` merges split keys, ``rows.py`` makes row vectors. Only ``plans.py`` and ``streamkl kernels`` import them.
"""
