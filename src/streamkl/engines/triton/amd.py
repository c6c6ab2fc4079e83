"""How kernels are cut for AMD GPUs."""

PROCESSORS = {"gfx942": 304}
TABLES = {"gfx942": {}}
