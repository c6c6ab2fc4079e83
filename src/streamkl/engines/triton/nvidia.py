"""How kernels are cut for NVIDIA GPUs: for each architecture and kind of kernel, a `Config` by the widest head it fits.

``Config(rows, keys, warps, stages)``; heads wider than ``hold`` are read in chunks. ``streamkl kernels --check`` holds
every row to zero spills and the target's shared memory; ``docs/kernels.md`` says how to try rows of your own.
"""

from streamkl.engines.triton.meta import Config

PROCESSORS = {"sm_80": 108, "sm_86": 84, "sm_89": 142, "sm_90": 132, "sm_100": 148, "sm_120": 188}
"""Multiprocessors of the largest GPU of each."""

MISALIGNED = {
    "sm_80": {
        "lse_misaligned": {1024: Config(64, 32, 8, 1, hold=16, chunk=32, grad=32)},
        "paired_misaligned": {1024: Config(64, 32, 8, 1, hold=16, chunk=32, grad=32)},
        "mixture_misaligned": {1024: Config(64, 32, 8, 1, hold=16, chunk=32, grad=32)},
        "keys_one_misaligned": {1024: Config(64, 32, 8, 1, hold=16, chunk=32, grad=32)},
        "keys_both_misaligned": {1024: Config(128, 32, 8, 1, hold=16, chunk=16, grad=16)},
        "keys_group_misaligned": {1024: Config(64, 32, 8, 1, hold=16, chunk=32, grad=32)},
        "queries_one_misaligned": {1024: Config(64, 32, 8, 1, hold=16, chunk=32, grad=32)},
        "queries_group_misaligned": {1024: Config(64, 32, 8, 1, hold=16, chunk=32, grad=32)},
    },
    "sm_86": {
        "lse_misaligned": {1024: Config(64, 32, 8, 1, hold=16, chunk=32, grad=32)},
        "paired_misaligned": {1024: Config(64, 32, 8, 1, hold=16, chunk=32, grad=32)},
        "mixture_misaligned": {1024: Config(64, 32, 8, 1, hold=16, chunk=32, grad=32)},
        "keys_one_misaligned": {1024: Config(64, 32, 8, 1, hold=16, chunk=32, grad=32)},
        "keys_both_misaligned": {1024: Config(128, 32, 8, 1, hold=16, chunk=16, grad=16)},
        "keys_group_misaligned": {1024: Config(64, 32, 8, 1, hold=16, chunk=32, grad=32)},
        "queries_one_misaligned": {1024: Config(64, 32, 8, 1, hold=16, chunk=32, grad=32)},
        "queries_group_misaligned": {1024: Config(64, 32, 8, 1, hold=16, chunk=32, grad=32)},
    },
    "sm_89": {
        "lse_misaligned": {1024: Config(64, 32, 8, 1, hold=16, chunk=32, grad=32)},
        "paired_misaligned": {1024: Config(64, 32, 8, 1, hold=16, chunk=32, grad=32)},
        "mixture_misaligned": {1024: Config(64, 32, 8, 1, hold=16, chunk=32, grad=32)},
        "keys_one_misaligned": {1024: Config(64, 32, 8, 1, hold=16, chunk=32, grad=32)},
        "keys_both_misaligned": {1024: Config(128, 32, 8, 1, hold=16, chunk=16, grad=16)},
        "keys_group_misaligned": {1024: Config(64, 32, 8, 1, hold=16, chunk=32, grad=32)},
        "queries_one_misaligned": {1024: Config(64, 32, 8, 1, hold=16, chunk=32, grad=32)},
        "queries_group_misaligned": {1024: Config(64, 32, 8, 1, hold=16, chunk=32, grad=32)},
    },
    "sm_90": {
        "lse_misaligned": {1024: Config(128, 32, 8, 1, hold=16, chunk=32, grad=32)},
        "paired_misaligned": {1024: Config(128, 32, 8, 1, hold=16, chunk=16, grad=16)},
        "mixture_misaligned": {1024: Config(128, 32, 8, 1, hold=16, chunk=32, grad=32)},
        "keys_one_misaligned": {1024: Config(128, 32, 8, 1, hold=16, chunk=16, grad=16)},
        "keys_both_misaligned": {1024: Config(128, 32, 8, 1, hold=16, chunk=16, grad=16)},
        "keys_group_misaligned": {1024: Config(128, 32, 8, 1, hold=16, chunk=16, grad=16)},
        "queries_one_misaligned": {1024: Config(128, 16, 8, 1, hold=16, chunk=16, grad=16)},
        "queries_group_misaligned": {1024: Config(128, 32, 8, 1, hold=16, chunk=16, grad=16)},
    },
    "sm_100": {
        "lse_misaligned": {1024: Config(128, 32, 8, 1, hold=16, chunk=32, grad=32)},
        "paired_misaligned": {1024: Config(128, 32, 8, 1, hold=16, chunk=16, grad=16)},
        "mixture_misaligned": {1024: Config(128, 32, 8, 1, hold=16, chunk=32, grad=32)},
        "keys_one_misaligned": {1024: Config(128, 32, 8, 1, hold=16, chunk=16, grad=16)},
        "keys_both_misaligned": {1024: Config(128, 32, 8, 1, hold=16, chunk=16, grad=16)},
        "keys_group_misaligned": {1024: Config(128, 32, 8, 1, hold=16, chunk=16, grad=16)},
        "queries_one_misaligned": {1024: Config(128, 16, 8, 1, hold=16, chunk=16, grad=16)},
        "queries_group_misaligned": {1024: Config(128, 32, 8, 1, hold=16, chunk=16, grad=16)},
    },
    "sm_120": {
        "lse_misaligned": {1024: Config(64, 32, 8, 1, hold=16, chunk=32, grad=32)},
        "paired_misaligned": {1024: Config(64, 32, 8, 1, hold=16, chunk=32, grad=32)},
        "mixture_misaligned": {1024: Config(64, 32, 8, 1, hold=16, chunk=32, grad=32)},
        "keys_one_misaligned": {1024: Config(64, 32, 8, 1, hold=16, chunk=32, grad=32)},
        "keys_both_misaligned": {1024: Config(128, 32, 8, 1, hold=16, chunk=16, grad=16)},
        "keys_group_misaligned": {1024: Config(64, 32, 8, 1, hold=16, chunk=32, grad=32)},
        "queries_one_misaligned": {1024: Config(64, 32, 8, 1, hold=16, chunk=32, grad=32)},
        "queries_group_misaligned": {1024: Config(64, 32, 8, 1, hold=16, chunk=32, grad=32)},
    },
}
"""Where 16 bytes cannot be loaded at once, each element has a pointer of its own: small chunks."""

FLOAT32 = {
    **{
        f"{kind}_float32": {1024: Config(32, 32, 4, 1, hold=64, chunk=32, grad=64)}
        for kind in ("lse", "paired", "mixture", "keys_one", "keys_both", "keys_group")
    },
    **{
        f"{kind}_float32": {1024: Config(32, 32, 4, 1, hold=16, chunk=32, grad=32)}
        for kind in ("queries_one", "queries_group")
    },
}
"""float32 is multiplied without tensor cores, to keep its digits."""

TABLES = {
    "sm_80": {
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
            64: Config(128, 64, 8, 1, hold=32, chunk=32, grad=64),
            128: Config(64, 32, 8, 1, hold=64),
            256: Config(64, 32, 8, 1, hold=128),
            1024: Config(64, 32, 8, 1, hold=128),
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
        **MISALIGNED["sm_80"],
        **FLOAT32,
    },
    "sm_86": {
        "lse": {
            64: Config(128, 128, 8, 2),
            128: Config(128, 128, 8, 2),
            256: Config(128, 64, 8, 2),
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
            64: Config(128, 64, 8, 1, hold=32, chunk=32, grad=64),
            128: Config(64, 32, 8, 1, hold=64),
            256: Config(64, 32, 8, 1, hold=128),
            1024: Config(64, 32, 8, 1, hold=128),
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
        **MISALIGNED["sm_86"],
        **FLOAT32,
    },
    "sm_89": {
        "lse": {
            64: Config(128, 128, 8, 2),
            128: Config(128, 128, 8, 2),
            256: Config(128, 64, 8, 2),
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
            64: Config(128, 64, 8, 1, hold=32, chunk=32, grad=64),
            128: Config(64, 32, 8, 1, hold=64),
            256: Config(64, 32, 8, 1, hold=128),
            1024: Config(64, 32, 8, 1, hold=128),
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
        **MISALIGNED["sm_89"],
        **FLOAT32,
    },
    "sm_90": {
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
            64: Config(128, 64, 8, 1),
        },
        "keys_group": {
            64: Config(128, 64, 8, 2),
            128: Config(128, 32, 8, 2),
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
        **MISALIGNED["sm_90"],
        **FLOAT32,
    },
    "sm_100": {
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
            64: Config(128, 64, 8, 1),
        },
        "keys_group": {
            64: Config(128, 64, 8, 2),
            128: Config(128, 16, 8, 1),
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
        **MISALIGNED["sm_100"],
        **FLOAT32,
    },
    "sm_120": {
        "lse": {
            64: Config(128, 128, 8, 2),
            128: Config(128, 128, 8, 2),
            256: Config(128, 64, 8, 2),
            1024: Config(128, 64, 8, 2, hold=128),
        },
        "paired": {
            64: Config(128, 64, 8, 2),
            128: Config(128, 64, 8, 2),
            256: Config(128, 64, 8, 2, hold=128),
            1024: Config(128, 64, 8, 2, hold=128),
        },
        "mixture": {
            64: Config(128, 64, 8, 2),
            128: Config(128, 64, 8, 1, hold=64),
            256: Config(128, 32, 8, 1, hold=128),
            1024: Config(128, 64, 8, 1, hold=128),
        },
        "keys_one": {
            64: Config(128, 32, 8, 1, hold=32, chunk=32, grad=64),
            128: Config(64, 32, 8, 1, hold=64),
            256: Config(64, 32, 8, 1, hold=128),
            1024: Config(64, 32, 8, 1, hold=128),
        },
        "keys_both": {
            64: Config(64, 32, 4, 1, hold=32, chunk=32, grad=64),
        },
        "keys_group": {
            64: Config(128, 64, 8, 1, hold=32, chunk=32, grad=64),
            128: Config(64, 32, 8, 1, hold=64),
            256: Config(64, 32, 8, 1, hold=128),
            1024: Config(64, 32, 8, 1, hold=128),
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
        **MISALIGNED["sm_120"],
        **FLOAT32,
    },
}
