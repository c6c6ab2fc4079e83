"""The kernels: ``tile/`` what they all use, ``dense/``, ``gathered/`` and ``sparse/`` the passes.

``groups.py`` names the arguments that belong together. Only the plans and ``streamkl kernels`` import them.
"""
