"""From a problem to launches and their results, without reading a value; ``arguments.py`` makes kernels' arguments."""
