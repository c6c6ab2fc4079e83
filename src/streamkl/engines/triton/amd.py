"""How kernels are cut for AMD GPUs."""
from streamkl.engines.triton.meta import Config
PROCESSORS = {"gfx942": 304}
TABLES = {"gfx942": {}}
