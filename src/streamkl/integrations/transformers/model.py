"""Makes a model of transformers sparse: ``sparsify``, and the handle that it returns."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from streamkl.integrations.saved.selectors import from_json, to_json
from streamkl.integrations.saved.settings import FOLDER, as_saved
from streamkl.integrations.transformers import probe
from streamkl.integrations.transformers.capture import capture_attention, is_tensor_parallel
from streamkl.integrations.transformers.families import Family, family_of
from streamkl.integrations.transformers.indexers import Indexers, load_indexers, own_indexers, save_indexers
from streamkl.integrations.transformers.layer import SparseLayer
from streamkl.integrations.transformers.recording import Attended
from streamkl.integrations.transformers.selection import PREFIX
from streamkl.sparse import IndexerSelector, OracleSelector, Selector

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DEFAULT = OracleSelector(topk=2048, query_block=64)
"""The default of ``attn_implementation="streamkl_oracle"`` and others: it has the top-k and the query block."""


class SparseModel:
    """Handle to a sparsified model, also available as ``model.streamkl``.

    Attributes:
        model: The model.
        family: Its family.
        selector: Selects keys under ``streamkl_sparse``.
        indexers: Its indexers; empty if it has none.
        layers: The `SparseLayer` of each attention module, by the number of its layer.
    """

    def __init__(
        self, model: PreTrainedModel, family: Family, selector: Selector, indexers: Indexers,
        decode: Literal["dense", "sparse"],
    ) -> None:  # fmt: skip
        self.model, self.family, self.selector, self.indexers = model, family, selector, indexers
        parallel = is_tensor_parallel(model)
        self.layers = {
            number: SparseLayer(attention, family, selector, indexers.of(number), decode, parallel)
            for number, attention in family.attentions(model).items()
        }
        self._before = _implementation(model)

    def attach(self) -> None:
        """Attaches the layers and this handle to the model."""
        for layer in self.layers.values():
            layer.attach()
        setattr(self.model, "streamkl", self)  # noqa: B010  # type checkers expect a tensor or module

    def remove(self) -> None:
        """Restores the model as it was before `sparsify`, with its attention implementation."""
        for layer in self.layers.values():
            layer.detach()
        del self.model.streamkl
        if _implementation(self.model).startswith(PREFIX):
            self.model.set_attn_implementation(self._before)

    @property
    def decode(self) -> Literal["dense", "sparse"]:
        """How a single query attends."""
        return next(iter(self.layers.values())).decode

    @contextlib.contextmanager
    def watch(self, function: Callable[[Attended], None]) -> Iterator[None]:
        """Calls ``function`` with the `Attended` of each layer that sees all keys, inside of a ``with`` block.

        It sees only calls of the thread, or task of ``asyncio``, that entered the block. The call has q and k after
        RoPE, the mask, and the indexer's tensors with their graph: all that ``streamkl.indexer_kl`` takes. It is
        `capture_attention` of a sparse model.
        """
        layers = [number for number, layer in self.layers.items() if layer.is_global]
        with capture_attention(self.model, layers, each=function):
            yield

    def save_indexers(self, path: str | os.PathLike[str]) -> Path:
        """Writes the indexers and the selector to a folder for ``sparsify(model, indexers=path)``."""
        if not self.indexers:
            raise ValueError("the model has no indexers to save")
        return save_indexers(path, self.model, self.indexers, self.selector)

    def save_pretrained(self, path: str | os.PathLike[str], **options: Any) -> None:
        """Saves the model, its indexers beside it, and a config that points to them.

        ``from_pretrained(path)`` gives the sparse model again where ``streamkl.integrations.transformers`` has been
        imported, and the dense one elsewhere. ``model.save_pretrained`` saves the dense one.

        Args:
            path: The model's folder.
            options: Of the model's ``save_pretrained``, but ``push_to_hub``.

        Raises:
            ValueError: The folder is to be uploaded, or transformers would save adapters without a config.
        """
        if options.get("push_to_hub"):
            raise ValueError("save_pretrained uploads no indexers: save the model, and upload its folder")
        if getattr(self.model, "_hf_peft_config_loaded", False):
            raise ValueError("the model has adapters, which are saved without a config: merge them, or save_indexers")
        settings = {"selector": to_json(self.selector), "decode": self.decode}
        if self.indexers and not own_indexers(self.model, self.family):
            if options.get("is_main_process", True):
                self.save_indexers(Path(path) / FOLDER)
            settings["indexers"] = FOLDER
        configs = configs_of(self.model)
        for config in configs:
            config.streamkl = settings
        try:
            self.model.save_pretrained(path, **options)
        finally:
            for config in configs:
                del config.streamkl


def sparsify(
    model: PreTrainedModel,
    selector: Selector | None = None,
    indexers: str | os.PathLike[str] | Indexers | None = None,
    *,
    decode: Literal["dense", "sparse"] | None = None,
) -> SparseModel:
    """Makes a model attend to selected keys, under the attention implementation ``streamkl_sparse``.

    ``model.set_attn_implementation("sdpa")`` makes it dense again, bit for bit, and ``"streamkl_sparse"`` sparse.
    ``"streamkl_oracle"``, ``"streamkl_window"`` (the window baseline) and ``"streamkl_random"`` select as many keys by
    other policies; ``"streamkl_dense"`` attends to all keys and calls watchers.

    Args:
        model: A causal language model of transformers, of a known family.
        selector: Selects keys. By default the selector that the indexers were saved with; for models with indexers of
            their own, a per-query top-k of these with the model's own number of keys.
        indexers: A folder of indexers, which get the model's dtype, or the dtypes of its own indexers where it has
            them; or `Indexers`, for models that have none.
        decode: How a single query attends. By default dense; sparse for models with indexers of their own.

    Returns:
        The handle, also available as ``model.streamkl``.

    Raises:
        ValueError: The family is not known, sparse attention does not support its attention, the indexers belong to
            another model, or there is no selector; the message says what to do.

    Examples:
        >>> import torch
        >>> import streamkl.integrations.transformers as skl
        >>> from streamkl.sparse import OracleSelector
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        ...     num_attention_heads=4, num_key_value_heads=2)
        >>> model = LlamaForCausalLM(config).eval()
        >>> sparse = skl.sparsify(model, OracleSelector(topk=8, query_block=4))
        >>> ids = torch.arange(32)[None]
        >>> sorted(sparse.layers), model(ids).logits.shape
        ([0, 1], torch.Size([1, 32, 64]))
        >>> model.set_attn_implementation("sdpa")  # dense again
    """
    if selector is not None and not hasattr(selector, "select"):
        raise ValueError(f"selector must be a selector: got {selector!r}; a folder of indexers is given as indexers=")
    family, before = family_of(model.config), getattr(model, "streamkl", None)
    if family.not_sparse is not None:
        raise ValueError(f"{family.name} cannot be made sparse: {family.not_sparse}")
    if before is None:
        probe.check(model, family)
    saved = None
    if isinstance(indexers, (str, os.PathLike)):
        indexers, saved = load_indexers(indexers, model)
        if not own_indexers(model, family):  # which keep the dtypes that transformers gives them
            indexers.to(model.dtype)  # the products of scores then run at the model's speed
    elif indexers is None:
        indexers = own_indexers(model, family)
    selector = as_saved(selector or saved or family.selector(model.config), saved)
    if selector is None:
        raise ValueError(
            "there is nothing to select keys with: give a selector, such as "
            "streamkl.sparse.OracleSelector(topk=256, query_block=64), or a folder of indexers"
        )
    _check_indexers(model, selector, indexers)
    family.check_selector(selector)
    if decode not in ("dense", "sparse", None):
        raise ValueError(f"decode must be 'dense', 'sparse' or None: got {decode!r}")
    if before is not None:
        before.remove()
    handle = SparseModel(model, family, selector, indexers, decode or family.decode)
    handle.attach()
    model.set_attn_implementation("streamkl_sparse")
    return handle


def attach_loaded(
    model: PreTrainedModel, settings: dict[str, Any] | None, folder: Path | None, name: str | None
) -> None:
    """Makes a loaded model sparse that was saved sparse, or asked for with an implementation of StreamKL.

    Args:
        model: The model.
        settings: ``streamkl`` of its config, if it has it, checked by `check_settings`.
        folder: The folder of its indexers, if there is one.
        name: The attention implementation that was asked for, if one was.
    """
    if settings is not None:
        sparsify(model, from_json(settings["selector"]), folder, decode=settings["decode"])
    elif name == "streamkl_sparse":
        sparsify(model)
    else:
        sparsify(model, DEFAULT)
    if name is not None:
        model.set_attn_implementation(name)


def configs_of(model: Any) -> list[Any]:
    """The configs that say how a model is sparse: its own, and that of its text, by which it may be loaded alone."""
    config = model.config
    text = config.get_text_config()
    return [config] if text is config else [config, text]


def _check_indexers(model: Any, selector: Selector, indexers: Indexers) -> None:
    if not isinstance(selector, IndexerSelector):
        return
    if not indexers:
        raise ValueError(
            f"an IndexerSelector needs indexers, and {model.config.model_type} has none of its own: give a folder of "
            f"them, or new_indexers(model) to train"
        )
    activation = next(iter(indexers.values())).activation
    if activation != selector.activation:
        raise ValueError(f"the indexers have activation {activation!r}, and the selector {selector.activation!r}")


def _implementation(model: Any) -> str:
    """The attention implementation of a model's text layers."""
    return model.config.get_text_config()._attn_implementation
