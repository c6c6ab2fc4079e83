"""The kernels.

``groups.py`` names the arguments that belong together. Tile code is in ``tiles.py``, ``products.py``, ``states.py`` and
``gradient.py``, passes are in ``lse.py``, ``forward.py`` and ``backward.py``, those over selected keys in
``gathered.py``, ``gathered_backward.py`` and ``attention.py``; ``split.py`` merges split keys, ``rows.py`` computes row
vectors. Only the plans and ``streamkl kernels`` import them.
"""
