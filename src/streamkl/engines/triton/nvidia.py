"""How kernels are cut for NVIDIA GPUs."""

from streamkl.engines.triton.meta import Config

PROCESSORS = {"sm_80": 108, "sm_86": 84, "sm_89": 128, "sm_90": 132, "sm_100": 148, "sm_120": 170}
"""Multiprocessors of the largest GPU of each."""

T = {
    "lse": {
        64: Config(128, 128, 8, 2),
        128: Config(128, 128, 8, 2),
        256: Config(128, 64, 8, 2),
        1024: Config(128, 64, 8, 3),
    },
    "paired": {
        64: Config(128, 64, 8, 2),
        128: Config(128, 64, 8, 2),
        256: Config(64, 32, 4, 2),
        1024: Config(64, 64, 4, 2),
    },
    "mixture": {
        64: Config(128, 64, 8, 2),
        128: Config(128, 64, 8, 2),
        256: Config(64, 32, 4, 2),
        1024: Config(64, 64, 4, 2),
    },
    "keys_one": {
        64: Config(64, 64, 4, 2),
        128: Config(64, 64, 8, 2),
        256: Config(32, 32, 4, 1),
        1024: Config(64, 64, 8, 1),
    },
}
for k in ("keys_both", "keys_group", "queries_one", "queries_both", "queries_group"):
    T[k] = dict(T["keys_one"])
TABLES = {"sm_90": T}
