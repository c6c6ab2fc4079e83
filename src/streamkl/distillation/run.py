"""A distillation run, from its settings to a folder of trained indexers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from streamkl.distillation import curves, teacher
from streamkl.distillation.indexers import make_indexers
from streamkl.distillation.mesh import Mesh, check_heads
from streamkl.distillation.model import Distiller
from streamkl.distillation.results import MODEL, check_model_place, check_output, write_model
from streamkl.distillation.sequences import samples_of
from streamkl.distillation.settings import Settings
from streamkl.distillation.trainer import INDEXERS, DistillationTrainer, write_indexers
from streamkl.distillation.training import Loaded, Prepared, loadable, train
from streamkl.integrations.saved.folder import check_place
from streamkl.integrations.transformers import probe
from streamkl.integrations.transformers.families import Family, GroupedQuery


@dataclass(frozen=True)
class Result:
    """The results of a run.

    Attributes:
        indexers: The folder of trained indexers, for `streamkl.integrations.transformers.sparsify`.
        model: The folder of the model, for plain transformers, if it has indexers of its own and is not sharded.
        curves: The plot, if there is matplotlib.
        skipped: How many steps were skipped because their gradients were not finite.
    """

    indexers: Path
    model: Path | None
    curves: Path | None
    skipped: int


def distill(settings: Settings) -> Result:
    """Trains indexers for a frozen model; see `Settings`.

    Raises:
        ValueError: A setting, the text or the model is unsuitable, or the output folder holds another run.
        CheckpointError: A checkpoint, or the results, could not be written.
        NotFiniteError: Too many steps in a row had gradients that are not finite.
        RankError: Another rank ended, or does not answer.
    """
    output = Path(settings.output)
    check_output(output)
    check_place(output / INDEXERS)  # before it is trained, and not after
    written, skipped = train(settings, DistillationTrainer, lambda: prepare(settings), lambda p: _write(settings, p))
    folder, picture = (None, None) if written is None else written
    return Result(output / INDEXERS, folder, picture, skipped)


def prepare(settings: Settings) -> Prepared:
    """Lays out the ranks, loads the model, packs the text and makes the indexers."""
    mesh = Mesh(settings.context_parallel, settings.tensor_parallel)  # before anything large is loaded
    config, family, tokenizer = loadable(settings)
    check_heads(config, settings.tensor_parallel)
    samples = samples_of(settings, tokenizer, mesh.data, late=settings.row_weight == "late")
    backbone = teacher.load(
        settings.model, getattr(torch, settings.dtype), family, shard=settings.shard_teacher,
        tensor=settings.tensor_parallel,
    )  # fmt: skip
    if not isinstance(family, GroupedQuery):  # then the model is a result
        check_model_place(Path(settings.output) / MODEL)
    probe.check(backbone, family, head=False)
    loaded = Loaded.of(backbone, family)
    indexers = make_indexers(backbone, family, settings)
    model = Distiller(backbone, family, indexers, mesh=mesh, selects=_selects(settings, family, config))
    return Prepared(model, samples, loaded)


def _selects(settings: Settings, family: Family, config: Any) -> int:
    """How many keys the loss is over, per query; 0 for all."""
    if settings.keys == "all":
        return 0
    return settings.topk or min(family.own_topk(config) or settings.measured, settings.length)


def _write(settings: Settings, prepared: Prepared) -> tuple[Path | None, Path | None]:
    """Writes the indexers, the model if it has indexers of its own and is whole, and the plot."""
    output, model = Path(settings.output), prepared.model
    write_indexers(output / INDEXERS, model, settings.measured, settings.query_block)
    folder = None
    if not isinstance(model.family, GroupedQuery) and not any(map(teacher.is_sharded, model.backbone.parameters())):
        folder = write_model(output, settings.model, lambda path: _save_dense(prepared, path))
    return folder, curves.draw(output)


def _save_dense(prepared: Prepared, path: Path) -> None:
    """Saves a model with indexers of its own for plain transformers, in the dtypes that it was loaded in."""
    backbone: Any = prepared.model.backbone
    prepared.loaded.restore_dtypes(backbone)
    backbone.set_attn_implementation(prepared.loaded.implementation)
    backbone.save_pretrained(path)
