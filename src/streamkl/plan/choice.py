"""A plan: the costs of a run, and the smallest layout of ranks that fits their memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from streamkl.plan.arithmetic import Arithmetic, Seconds, arithmetic, seconds
from streamkl.plan.assumptions import Assumptions
from streamkl.plan.memory import Memory, memory
from streamkl.plan.model import Model
from streamkl.plan.run import Run
from streamkl.plan.traffic import Traffic, traffic


@dataclass(frozen=True)
class Plan:
    """What a run costs.

    Attributes:
        model: Its teacher.
        run: The run, with the layout of its ranks.
        assumptions: About the hardware.
        memory: Of one rank.
        traffic: Of one rank.
        arithmetic: Of one rank.
        seconds: Of a step, under the assumptions.
    """

    model: Model
    run: Run
    assumptions: Assumptions
    memory: Memory
    traffic: Traffic
    arithmetic: Arithmetic
    seconds: Seconds

    @property
    def fits(self) -> bool:
        """Whether the peak of a rank fits a GPU, with the headroom left free."""
        return self.memory.peak <= self.assumptions.usable

    @property
    def tokens_per_second(self) -> float:
        """Of all ranks."""
        return self.run.data * self.run.batch * self.run.tokens / self.seconds.step

    @property
    def gpu_hours_per_billion(self) -> float:
        """GPU-hours for a billion tokens."""
        return 1e9 / self.tokens_per_second * self.run.ranks / 3600

    @property
    def flags(self) -> list[str]:
        """The flags of ``streamkl distill`` for this layout."""
        run, found = self.run, ["--length", str(self.run.tokens)]
        if not self.model.index_heads:
            found += ["--heads", str(run.index_heads), "--head-dim", str(run.index_dim)]
        found += ["--batch", str(run.batch)] if run.batch > 1 else []
        found += ["--dtype", run.dtype] if run.dtype != "bfloat16" else []
        found += ["--context-parallel", str(run.context)] if run.context > 1 else []
        found += ["--tensor-parallel", str(run.tensor)] if run.tensor > 1 else []
        return found + ["--shard-teacher"] * run.sharded

    def to_dict(self) -> dict[str, Any]:
        """All figures, for JSON."""
        return {
            "model": self.model.name,
            "weights": self.model.weights,
            "run": {**asdict(self.run), "data": self.run.data},
            "assumptions": asdict(self.assumptions),
            "memory": {
                **asdict(self.memory), "moment": self.memory.moment, "step": self.memory.step,
                "peak": self.memory.peak,
            },
            "traffic": {**asdict(self.traffic), "layer_total": self.traffic.layer.total},
            "arithmetic": asdict(self.arithmetic),
            "seconds": {**asdict(self.seconds), "step": self.seconds.step},
            "tokens_per_second": self.tokens_per_second,
            "gpu_hours_per_billion_tokens": self.gpu_hours_per_billion,
            "fits": self.fits,
            "flags": self.flags,
        }  # fmt: skip


def plan(model: Model, run: Run, assumptions: Assumptions | None = None) -> Plan:
    """The costs of a run as it is laid out.

    Raises:
        ValueError: Tensor-parallel ranks would not have the same number of heads.
    """
    if any(heads % run.tensor for heads in (model.heads, model.kv_heads)):
        raise ValueError(
            f"tensor_parallel = {run.tensor} does not divide the {model.heads} query and {model.kv_heads} key heads of "
            f"the model"
        )
    given = Assumptions() if assumptions is None else assumptions
    work, exchanged = arithmetic(model, run), traffic(model, run)
    return Plan(model, run, given, memory(model, run), exchanged, work, seconds(work, exchanged, run, given))


def choose(
    model: Model,
    run: Run,
    assumptions: Assumptions | None = None,
    *,
    context: int | None = None,
    sharded: bool | None = None,
) -> Plan:
    """The plan with the fewest ranks per sequence that fits, the teacher sharded only where it has to be.

    Args:
        model: The teacher.
        run: What is distilled; of its layout only ``ranks`` and ``tensor`` count.
        assumptions: About the hardware.
        context: Ranks that share a sequence, if that is decided.
        sharded: Whether the teacher is sharded, if that is decided.

    Returns:
        The first plan that fits, or, if none does, the one with the smallest peak.
    """
    found = []
    for layout in _layouts(run, context, sharded):
        candidate = plan(model, layout, assumptions)
        if candidate.fits:
            return candidate
        found.append(candidate)
    return min(found, key=lambda candidate: candidate.memory.peak)


def _layouts(run: Run, context: int | None, sharded: bool | None) -> Iterator[Run]:
    sizes = [n for n in range(1, run.ranks + 1) if run.ranks % n == 0] if context is None else [context]
    if run.tensor > 1:  # ranks that share heads share the sequence, too
        sizes = [1]
    for size in sizes:
        for shards in (False, True) if sharded is None and run.ranks > 1 else (bool(sharded),):
            yield replace(run, context=size, sharded=shards)
