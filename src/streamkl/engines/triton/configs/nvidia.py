"""Kernel configs for NVIDIA GPUs: for each architecture and kind of kernel, a `Config` by the widest head it fits.

``Config(rows, keys, warps, stages)``; heads wider than ``hold`` are read in chunks. ``streamkl kernels --check`` holds
every row but those of float32 to zero spills and the shared memory; ``docs/kernels.md`` says how to try your own.
"""

from streamkl.engines.triton.meta import FLOAT32, KINDS, Config

PROCESSORS = {"sm_80": 108, "sm_86": 84, "sm_89": 142, "sm_90": 132, "sm_100": 148, "sm_120": 188}
"""Multiprocessors of the largest GPU of each architecture."""

WARP_MISALIGNED = {
    **{f"{kind}_misaligned": {1024: Config(64, 32, 8, 1, hold=16, chunk=32, grad=32)} for kind in KINDS},
    "keys_both_misaligned": {1024: Config(128, 32, 8, 1, hold=16, chunk=16, grad=16)},
    "mixture_gathered_misaligned": {1024: Config(64, 32, 8, 1, hold=16, chunk=16)},
    "attention_misaligned": {1024: Config(64, 32, 8, 1, hold=16, chunk=16, grad=16)},
}
"""Where 16 bytes cannot be loaded at once, each element has a pointer of its own: small chunks."""

WARPGROUP_MISALIGNED = {
    **{f"{kind}_misaligned": {1024: Config(128, 32, 8, 1, hold=16, chunk=16, grad=16)} for kind in KINDS},
    "lse_misaligned": {1024: Config(128, 32, 8, 1, hold=16, chunk=32, grad=32)},
    "mixture_misaligned": {1024: Config(128, 32, 8, 1, hold=16, chunk=32, grad=32)},
    "queries_one_misaligned": {1024: Config(128, 16, 8, 1, hold=16, chunk=16, grad=16)},
    "attention_keys_misaligned": {1024: Config(64, 32, 8, 1, hold=16, chunk=32, grad=32)},
}
"""The same for products of 64 rows per warp group, or 128 per program."""

SM_80 = {
    "lse": {
        64: Config(128, 128, 8, 2),
        128: Config(128, 128, 8, 2),
        256: Config(128, 128, 8, 2),
        1024: Config(128, 128, 8, 2, hold=128),
    },
    "paired": {
        64: Config(128, 64, 8, 2),
        128: Config(128, 64, 8, 2),
        256: Config(128, 64, 8, 2, hold=128),
        1024: Config(128, 64, 8, 2, hold=128),
    },
    "mixture": {
        64: Config(128, 64, 8, 2),
        128: Config(128, 64, 8, 2, hold=64),
        256: Config(128, 32, 8, 2, hold=128),
        1024: Config(128, 64, 8, 2, hold=128),
    },
    "keys_one": {
        64: Config(128, 32, 8, 2),
        128: Config(64, 32, 8, 1, hold=64),
        256: Config(64, 32, 8, 1, hold=128),
        1024: Config(64, 32, 8, 1, hold=128),
    },
    "keys_both": {
        64: Config(64, 32, 4, 1, hold=32, chunk=32, grad=64),
    },
    "keys_group": {
        64: Config(64, 64, 8, 1, hold=32, chunk=32, grad=64),
        1024: Config(64, 32, 8, 1, hold=64),
    },
    "queries_one": {
        64: Config(128, 64, 8, 1, hold=32, chunk=32, grad=64),
        128: Config(128, 32, 8, 1, hold=64),
        256: Config(64, 32, 8, 1, hold=128),
        1024: Config(64, 32, 8, 1, hold=128),
    },
    "queries_group": {
        64: Config(128, 64, 8, 1, hold=32, chunk=32, grad=64),
        128: Config(128, 32, 8, 1, hold=64),
        256: Config(64, 32, 8, 1, hold=128),
        1024: Config(64, 32, 8, 1, hold=128),
    },
    "lse_index": {
        1024: Config(128, 64, 8, 1, hold=128),
    },
    "mixture_index": {
        1024: Config(128, 64, 8, 1, hold=128, hold_a=64),
    },
    "keys_index": {
        1024: Config(64, 32, 8, 1, hold=64),
    },
    "queries_index": {
        1024: Config(64, 32, 8, 1, hold=64),
    },
    "lse_gathered": {
        128: Config(128, 64, 4, 2),
        1024: Config(128, 32, 8, 1, hold=128),
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
        128: Config(128, 32, 8, 1),
        1024: Config(128, 32, 8, 1, hold=128),
    },
    "attention": {
        128: Config(64, 64, 8, 2),
        1024: Config(64, 64, 8, 2, hold=128),
    },
    "attention_queries": {
        128: Config(64, 32, 8, 1),
        1024: Config(64, 32, 8, 1, hold=128),
    },
    "attention_keys": {
        128: Config(64, 32, 8, 1),
        1024: Config(64, 32, 8, 1, hold=128),
    },
    "selection": {
        1024: Config(128, 64, 8, 1, hold=128),
    },
    "ranking": {1024: Config(1, 2048, 8, 1)},
    **WARP_MISALIGNED,
    **FLOAT32,
}

SM_86 = SM_80 | {
    "lse": SM_80["lse"] | {256: Config(128, 64, 8, 2)},
    "mixture": SM_80["mixture"] | {128: Config(128, 64, 8, 1, hold=64)},
    "attention_queries": SM_80["attention_queries"] | {128: Config(64, 16, 8, 1)},
}
"""As sm_80, with 99 KB of shared memory."""

SM_90 = {
    "lse": {
        64: Config(128, 128, 8, 2),
        128: Config(128, 128, 8, 2),
        256: Config(128, 128, 8, 2),
        1024: Config(128, 128, 8, 2, hold=128),
    },
    "paired": {
        64: Config(128, 64, 8, 3),
        128: Config(128, 64, 8, 3),
        256: Config(128, 64, 8, 3, hold=128),
        1024: Config(128, 64, 8, 3, hold=128),
    },
    "mixture": {
        64: Config(128, 64, 8, 2),
        128: Config(128, 64, 8, 2),
        256: Config(128, 64, 8, 2, hold=128),
        1024: Config(128, 64, 8, 2, hold=128),
    },
    "keys_one": {
        64: Config(128, 64, 8, 1),
        128: Config(128, 32, 8, 2),
        256: Config(128, 32, 8, 2, hold=128),
        1024: Config(128, 32, 8, 2, hold=128),
    },
    "keys_both": {
        64: Config(128, 32, 8, 1),
    },
    "keys_group": {
        64: Config(128, 32, 8, 1),
        128: Config(128, 32, 8, 1, hold=64),
        256: Config(128, 32, 8, 2, hold=128),
        1024: Config(128, 32, 8, 2, hold=128),
    },
    "queries_one": {
        64: Config(128, 64, 8, 2),
        128: Config(128, 64, 8, 2),
        256: Config(128, 32, 8, 2, hold=128),
        1024: Config(128, 32, 8, 2, hold=128),
    },
    "queries_group": {
        64: Config(128, 64, 8, 2),
        128: Config(128, 32, 8, 2),
        256: Config(128, 32, 8, 2, hold=128),
        1024: Config(128, 32, 8, 2, hold=128),
    },
    "lse_index": {
        1024: Config(128, 128, 8, 2, hold=128),
    },
    "mixture_index": {
        1024: Config(128, 64, 8, 2, hold=128),
    },
    "keys_index": {
        128: Config(128, 32, 8, 2, hold=128, hold_a=64),
        1024: Config(128, 32, 8, 2, hold=64),
    },
    "queries_index": {
        1024: Config(128, 32, 8, 2, hold=128),
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
        128: Config(128, 64, 8, 1),
        1024: Config(128, 32, 8, 1, hold=128),
    },
    "gradient_gathered_max": {
        128: Config(128, 32, 8, 1),
        1024: Config(128, 32, 8, 1, hold=64),
    },
    "attention": {
        128: Config(128, 64, 8, 1),
        1024: Config(64, 64, 8, 2, hold=128),
    },
    "attention_queries": {
        128: Config(64, 32, 8, 1),
        1024: Config(64, 32, 8, 1, hold=128),
    },
    "attention_keys": {
        128: Config(64, 32, 8, 1),
        1024: Config(64, 32, 8, 1, hold=128),
    },
    "selection": {
        1024: Config(128, 128, 8, 2, hold=128),
    },
    "ranking": {1024: Config(1, 2048, 8, 1)},
    **WARPGROUP_MISALIGNED,
    **FLOAT32,
}

SM_100 = SM_90 | {
    "keys_one": {
        **SM_90["keys_one"],
        128: Config(128, 32, 8, 1),
        256: Config(128, 32, 8, 1, hold=128),
        1024: Config(128, 32, 8, 1, hold=128),
    },
    "keys_group": {
        **SM_90["keys_group"],
        64: Config(128, 32, 8, 2),
        128: Config(128, 16, 8, 1),
        256: Config(128, 32, 8, 1, hold=128),
        1024: Config(128, 32, 8, 1, hold=128),
    },
    "queries_group": {
        **SM_90["queries_group"],
        64: Config(128, 64, 8, 1),
        128: Config(128, 32, 8, 1),
        256: Config(128, 32, 4, 1, hold=128),
    },
    "lse_index": {
        1024: Config(128, 64, 8, 1, hold=128),
    },
    "mixture_index": {
        128: Config(128, 32, 8, 2, hold=128),
        1024: Config(128, 64, 8, 1, hold=128),
    },
    "keys_index": {
        1024: Config(128, 16, 8, 1, hold=128, hold_a=64),
    },
    "queries_index_max": {
        1024: Config(128, 32, 8, 1, hold=128),
    },
    "gradient_gathered": {128: Config(128, 32, 8, 1), 1024: Config(128, 32, 8, 1, hold=64)},
    "attention": {**SM_90["attention"], 128: Config(128, 32, 8, 2)},
    "attention_misaligned": {1024: Config(64, 32, 4, 1, hold=16, chunk=16, grad=16)},
    "selection": {
        1024: Config(128, 64, 8, 1, hold=128),
    },
    "ranking": {1024: Config(1, 2048, 16, 1)},
}

SM_120 = SM_86 | {
    "lse": {**SM_86["lse"], 1024: Config(128, 64, 8, 2, hold=128)},
    "mixture": {
        64: Config(128, 64, 8, 2),
        128: Config(128, 64, 8, 1, hold=64),
        256: Config(128, 32, 8, 1, hold=128),
        1024: Config(128, 64, 8, 1, hold=128),
    },
    "keys_one": {**SM_86["keys_one"], 64: Config(128, 32, 8, 1, hold=32, chunk=32, grad=64)},
    "keys_group": {
        **SM_86["keys_group"],
        128: Config(64, 32, 8, 1, hold=64),
        256: Config(64, 32, 8, 1, hold=64, chunk=32),
    },
    "attention_queries": SM_80["attention_queries"],
    "selection": {1024: Config(64, 64, 8, 1, hold=128)},
    "selection_misaligned": {1024: Config(64, 32, 8, 1, hold=16, chunk=16)},
    "lse_index_misaligned": {1024: Config(64, 32, 4, 1, hold=16, chunk=32)},
    "lse_gathered": {**SM_86["lse_gathered"], 1024: Config(128, 64, 8, 1, hold=128)},
    "gradient_gathered": {**SM_86["gradient_gathered"], 1024: Config(128, 32, 8, 1, hold=128, chunk=16)},
}

TABLES = {"sm_80": SM_80, "sm_86": SM_86, "sm_89": SM_86, "sm_90": SM_90, "sm_100": SM_100, "sm_120": SM_120}
