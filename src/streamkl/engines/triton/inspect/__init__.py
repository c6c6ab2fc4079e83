"""What ``streamkl kernels`` needs: every launch compiled for GPUs that are not there, and what the binaries say.

``matrix.py`` lists what is compiled, ``compiler.py`` compiles and caches it, ``binary.py`` reads the binaries,
``budget.py`` holds them to their targets' limits and derives the static ceilings.
"""
