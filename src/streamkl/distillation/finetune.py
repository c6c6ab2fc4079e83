"""The joint stage: a model and its indexers, trained with sparse attention; from settings to a sparse model."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from streamkl.distillation import curves
from streamkl.distillation.joint import JointModel
from streamkl.distillation.joint_trainer import JointTrainer
from streamkl.distillation.mesh import Mesh
from streamkl.distillation.results import MODEL, check_model_place, check_output, write_model
from streamkl.distillation.sequences import samples_of
from streamkl.distillation.settings import FinetuneSettings
from streamkl.distillation.training import Loaded, Prepared, loadable, train
from streamkl.extras import how_to_install
from streamkl.integrations.transformers.checkpointing import checkpoint_activations
from streamkl.integrations.transformers.indexers import load_indexers
from streamkl.integrations.transformers.model import SparseModel, sparsify

ALPHA = 2
"""LoRA's alpha is this many times its rank."""


@dataclass(frozen=True)
class Result:
    """The results of a run.

    Attributes:
        model: The folder of the sparse model, with its indexers and its tokenizer.
        curves: The plot, if there is matplotlib.
        skipped: How many steps were skipped because their gradients were not finite.
    """

    model: Path
    curves: Path | None
    skipped: int


def finetune(settings: FinetuneSettings) -> Result:
    """Trains a model with sparse attention, and its indexers on the keys that they select; see `FinetuneSettings`.

    Raises:
        ValueError: A setting, the text, the model or its indexers are unsuitable, or the output folder holds another
            run.
        CheckpointError: A checkpoint, or the results, could not be written.
        NotFiniteError: Too many steps in a row had gradients that are not finite.
        RankError: Another rank ended, or does not answer.
    """
    output = Path(settings.output)
    check_output(output)
    check_model_place(output / MODEL)
    trainer = functools.partial(JointTrainer, index_lr=settings.index_lr)
    picture, skipped = train(settings, trainer, lambda: prepare(settings), lambda p: _write(settings, p))
    return Result(output / MODEL, picture, skipped)


def prepare(settings: FinetuneSettings) -> Prepared:
    """Loads the model, makes it sparse, packs the text, and adds the adapters of LoRA."""
    _, family, tokenizer = loadable(settings)
    samples = samples_of(settings, tokenizer, Mesh().data)
    backbone: Any = AutoModelForCausalLM.from_pretrained(settings.model, dtype=getattr(torch, settings.dtype))
    loaded = Loaded.of(backbone, family)
    model = JointModel(_sparse(backbone, settings))
    if settings.checkpointing:
        checkpoint_activations(backbone)
    if settings.lora:
        _add_adapters(model, settings)
    return Prepared(model, samples, loaded)


def _sparse(backbone: Any, settings: FinetuneSettings) -> SparseModel:
    """The model, sparse by the indexers of a folder, by those that it was saved with, or by its own."""
    before: SparseModel | None = getattr(backbone, "streamkl", None)
    if settings.indexers:
        indexers, selector = load_indexers(settings.indexers, backbone)
    elif before is not None:
        indexers, selector = before.indexers, before.selector
    else:
        before = sparsify(backbone)  # with indexers of its own, or it says what is missing
        indexers, selector = None, before.selector
    if indexers is not None:
        indexers.to(torch.promote_types(backbone.dtype, torch.float32))  # for the optimizer
        late = before is not None and before.family.selects_late
        block = selector.query_block if late else settings.query_block
        selector = dataclasses.replace(selector, topk=settings.measured, query_block=block)  # pyright: ignore
    elif settings.topk:
        selector = dataclasses.replace(selector, topk=settings.topk)  # pyright: ignore
    return sparsify(backbone, selector, indexers)


def _add_adapters(model: JointModel, settings: FinetuneSettings) -> None:
    """Adds adapters to the linear layers, in place; only they and the indexers are trained then."""
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError:
        raise ValueError(f"--lora needs peft: {how_to_install('peft')}") from None
    own = any(".indexer." in name for name, _ in model.backbone.named_modules())  # they are trained whole
    config = LoraConfig(
        r=settings.lora, lora_alpha=ALPHA * settings.lora, target_modules="all-linear",
        exclude_modules=r".*\.indexer\..*" if own else None,
    )  # fmt: skip
    torch.manual_seed(settings.seed)
    model.adapters = get_peft_model(model.backbone, config)
    model.indexers.requires_grad_(True)


def _write(settings: FinetuneSettings, prepared: Prepared) -> Path | None:
    """Writes the sparse model, with adapters merged into its weights, and the plot."""
    model, output = prepared.model, Path(settings.output)
    if settings.lora:
        model.adapters.merge_and_unload()
    prepared.loaded.restore_dtypes(model.backbone)
    write_model(output, settings.model, model.sparse.save_pretrained)
    return curves.draw(output)
