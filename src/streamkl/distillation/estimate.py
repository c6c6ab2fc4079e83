"""Estimates the cost of a run from a few of its batches; writes nothing."""

from __future__ import annotations

import resource
import statistics
import sys
import time
from collections.abc import Callable

import torch

from streamkl.distillation.arguments import training_arguments
from streamkl.distillation.settings import RunSettings
from streamkl.distillation.training import Prepared

BATCHES = 3
"""The first of them warms up."""


def estimate(settings: RunSettings, prepare: Callable[[], Prepared]) -> str:
    """The size of the run, and the memory and time that it is expected to take on each process.

    Args:
        settings: Of the run.
        prepare: Loads its model and its text.
    """
    args = training_arguments(settings)
    prepared = prepare()
    model, samples = prepared.model, prepared.samples
    trained = [p for p in model.parameters() if p.requires_grad]
    device = torch.device("cuda" if torch.cuda.is_available() and settings.device == "auto" else "cpu")
    model.to(device).train()
    half = torch.bfloat16 if args.bf16 else torch.float16
    optimizer = torch.optim.AdamW(trained, lr=0.0, weight_decay=0.0)
    seconds = []
    for number in range(BATCHES):
        rows = [samples[(number * settings.batch + n) % len(samples)] for n in range(settings.batch)]
        batch = {name: torch.stack([row[name] for row in rows]).to(device) for name in rows[0]}
        start = time.perf_counter()
        with torch.autocast(device.type, half, enabled=args.bf16 or args.fp16):
            model(**batch, backward=torch.Tensor.backward)
        optimizer.step()
        optimizer.zero_grad()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    batches = settings.steps * settings.accumulation
    weights = sum(p.numel() for p in trained)
    passes = len(samples) / len(samples.sequences)
    return "\n".join(
        (
            f"trains    {weights:,} weights, {len(model.layers)} indexers, by {settings.steps:,} steps of "
            f"{settings.batch * settings.accumulation} x {settings.length:,} tokens",
            f"text      {samples.sequences.size:,} tokens, of which the run reads {passes:.3g} times as many",
            f"memory    {_peak(device) / 1e9:.1f} GB at its peak, on {device}",
            f"time      {_duration(statistics.median(seconds[1:]) * batches)}, without recall and mass for the log "
            f"({statistics.median(seconds[1:]):.2f} s per batch, the median of {BATCHES - 1} after a first)",
            f"disk      {settings.keep * 12 * weights / 1e6:.0f} MB for {settings.keep} checkpoints",
        )
    )


def _peak(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
