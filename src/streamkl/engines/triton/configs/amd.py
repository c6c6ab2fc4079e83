"""Kernel configs for AMD GPUs: for each architecture and kind of kernel, a `Config` by the widest head it fits.

``Config(rows, keys, warps, stages)``; heads wider than ``hold`` are read in chunks. ``streamkl kernels --check`` holds
every row but those of float32 to zero spills and the shared memory; ``docs/kernels.md`` says how to try your own.
"""

from streamkl.engines.triton.meta import FLOAT32, KINDS, Config

PROCESSORS = {"gfx942": 304, "gfx950": 256}
"""Compute units of the largest GPU of each architecture."""

MISALIGNED = {
    **{f"{kind}_misaligned": {1024: Config(64, 32, 4, 1, hold=16, chunk=32, grad=32)} for kind in KINDS},
    "keys_both_misaligned": {1024: Config(64, 16, 4, 1, hold=16, chunk=16, grad=16)},
}
"""Where 16 bytes cannot be loaded at once, each element has a pointer of its own: small chunks."""

GFX942 = {
    "lse": {
        64: Config(128, 64, 4, 2),
        128: Config(128, 64, 4, 2),
        256: Config(128, 64, 4, 2, hold=128),
        1024: Config(128, 64, 4, 2, hold=128),
    },
    "paired": {
        64: Config(128, 64, 4, 2),
        128: Config(128, 64, 4, 2),
        256: Config(128, 64, 4, 2, hold=128),
        1024: Config(128, 64, 4, 2, hold=128),
    },
    "mixture": {
        64: Config(128, 64, 4, 2),
        128: Config(128, 64, 4, 2),
        256: Config(128, 64, 4, 2, hold=128),
        1024: Config(128, 64, 4, 2, hold=128),
    },
    "keys_one": {
        64: Config(128, 64, 4, 1),
        128: Config(128, 32, 4, 1),
        256: Config(128, 32, 4, 1, hold=128),
        1024: Config(128, 32, 4, 1, hold=128),
    },
    "keys_both": {
        64: Config(128, 32, 4, 1),
    },
    "keys_group": {
        64: Config(128, 64, 4, 1),
        128: Config(128, 32, 4, 1),
        256: Config(128, 32, 4, 1, hold=128),
        1024: Config(128, 32, 4, 1, hold=128),
    },
    "queries_one": {
        64: Config(128, 64, 4, 1),
        128: Config(128, 64, 4, 1),
        256: Config(128, 64, 4, 1, hold=128),
        1024: Config(128, 64, 4, 1, hold=128),
    },
    "queries_group": {
        64: Config(128, 64, 4, 1),
        128: Config(128, 64, 4, 1),
        256: Config(128, 64, 4, 1, hold=128),
        1024: Config(128, 64, 4, 1, hold=128),
    },
    "lse_index": {
        1024: Config(128, 64, 4, 2, hold=128),
    },
    "mixture_index": {
        1024: Config(128, 64, 4, 2, hold=128),
    },
    "keys_index": {
        1024: Config(128, 32, 4, 1, hold=128),
    },
    "queries_index": {
        1024: Config(128, 32, 4, 1, hold=128),
    },
    "lse_gathered": {
        128: Config(128, 64, 4, 2),
        1024: Config(128, 64, 8, 2, hold=128),
    },
    "paired_gathered": {
        128: Config(128, 64, 4, 2),
        1024: Config(128, 64, 8, 2, hold=128),
    },
    "mixture_gathered": {
        128: Config(128, 64, 4, 2),
        1024: Config(128, 64, 8, 2, hold=128),
    },
    "gradient_gathered": {
        128: Config(128, 32, 4, 1),
        1024: Config(128, 32, 8, 1, hold=128),
    },
    "attention": {
        128: Config(128, 64, 4, 2),
        1024: Config(64, 64, 4, 2, hold=128),
    },
    "attention_queries": {
        128: Config(64, 32, 4, 1),
        1024: Config(64, 32, 4, 1, hold=128),
    },
    "attention_keys": {
        128: Config(64, 32, 4, 1),
        1024: Config(64, 32, 4, 1, hold=128),
    },
    "selection": {
        1024: Config(128, 64, 4, 2, hold=128),
    },
    "ranking": {1024: Config(1, 2048, 8, 1)},
    **MISALIGNED,
    **FLOAT32,
}

TABLES = {"gfx942": GFX942, "gfx950": GFX942}
