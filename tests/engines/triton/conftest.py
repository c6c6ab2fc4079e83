"""Tests of the Triton engine, which are left out where Triton is too old for it."""

import torch

from streamkl.engines import triton

collect_ignore_glob = ["test_*.py"] if triton.unsupported(torch.device("cpu")) else []
