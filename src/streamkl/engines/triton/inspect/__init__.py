"""What ``streamkl kernels`` needs: every launch compiled for GPUs that are not there, and what the binaries say.

``table.py`` lists what is compiled, ``matrix.py`` makes its launches, ``compiler.py`` compiles them, ``binary.py``
reads the binaries, ``kept.py`` remembers what was read, ``budget.py`` holds it to the targets' limits and derives the
static ceilings.
"""
