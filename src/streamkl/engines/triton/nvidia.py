"""How kernels are cut for NVIDIA GPUs."""
from streamkl.engines.triton.meta import Config
PROCESSORS = {"sm_90": 132}
TABLES = {"sm_90": {}}
