"""Checks of a model before it is used; one whose family knows only its structure is probed.

A few tokens go through the model three times: as it is, with its embeddings changed by one rounding, and sparse with a
top-k of all keys. The second run says how far roundings take the logits; the third may be a few times as far.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM

from streamkl.integrations.transformers.attention import streamkl_attention
from streamkl.integrations.transformers.families import Attention, Family
from streamkl.integrations.transformers.layer import SparseLayer
from streamkl.integrations.transformers.masks import streamkl_mask
from streamkl.integrations.transformers.selection import PREFIX
from streamkl.sparse import OracleSelector, Selector

NAME = f"{PREFIX}probe"
TOKENS, BLOCK = 40, 8
"""Of the prompt, and of a query block."""
ROUNDINGS = 8
"""How many times as far as one rounding of its embeddings the logits of a sparse model may be from those of the dense.
Each of its layers rounds otherwise; a wrong mask or scale is thousands of times as far in float32."""
KNOWN = {
    "attention_mask", "cache_position", "dropout", "is_causal", "logits_to_keep", "output_attentions",
    "output_hidden_states", "output_router_logits", "position_ids", "return_dict", "s_aux", "scaling",
    "sliding_window", "use_cache",
}  # fmt: skip
"""Arguments of attention functions that are known: most change nothing but what the mask says, too; ``s_aux`` are
sinks. A model that passes others may mean something by them that no probe of a few tokens would show."""


class ProbedLayer(SparseLayer):
    """An attention module in a probe: it selects all keys, and notes the arguments of its attention function."""

    def __init__(self, module: Attention, family: Family) -> None:
        super().__init__(module, family, OracleSelector(TOKENS, BLOCK), None, "sparse")
        self.calls: list[dict[str, Any]] = []

    @property
    def active(self) -> Selector | None:
        """The selector of the probe."""
        return self.selector if self.is_global else None


def check(model: Any, family: Family, *, head: bool = True) -> None:
    """Refuses a model that its family does not take; one that is recognised by its structure is probed.

    Args:
        model: A causal language model of transformers, not sparse.
        family: Its family.
        head: Whether the probe compares logits. Without, it compares hidden states, and only the model below its head
            runs: under FSDP, what runs first is the root.

    Raises:
        ValueError: Its attention is not supported, or sparse attention to all keys is not its dense attention; the
            message says why.
    """
    attentions = _checked(model, family)
    if family.probed:
        _probe(model, [ProbedLayer(attention, family) for attention in attentions.values()], head)


def dense_implementation(model: Any) -> str:
    """PyTorch's attention where the model has it, else eager attention: models with sinks have no other on CPUs."""
    return "sdpa" if model._supports_sdpa else "eager"


def check_config(config: Any, family: Family) -> None:
    """Refuses what can be seen before weights are loaded: a model whose attention its family does not take.

    Args:
        config: Of a causal language model of transformers.
        family: Its family.

    Raises:
        ValueError: Its attention is not supported; the message says why.
    """
    if type(config) not in AutoModelForCausalLM._model_mapping:  # of images and text: checked when it is loaded
        return
    with torch.device("meta"):
        _checked(AutoModelForCausalLM.from_config(config), family)


def _checked(model: Any, family: Family) -> dict[int, Attention]:
    """The attention modules, each of them checked."""
    attentions = family.attentions(model)
    for number, attention in attentions.items():
        family.check(attention, number)
    if not any(map(family.is_global, attentions.values())):
        raise ValueError(f"no layer of this {model.config.model_type} model attends to all keys: each has a window")
    return attentions


@torch.no_grad()
def _probe(model: Any, layers: list[ProbedLayer], head: bool) -> None:
    kind, before = model.config.model_type, model.config.get_text_config()._attn_implementation

    def run() -> Tensor:
        return (model(input_ids=ids).logits if head else model.base_model(input_ids=ids)[0]).float()

    with _evaluation(model):
        try:
            ids = prompt(model)
            if before.startswith(PREFIX):  # it was loaded with the name of an implementation of StreamKL
                model.set_attn_implementation(dense_implementation(model))
            dense = run()
            with rounded(model):
                changed = run()
            with _attached(model, layers):
                sparse = run()
        except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
            what = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
            raise ValueError(f"the probe of this {kind} model failed: {what}") from error
        finally:
            model.set_attn_implementation(before)
    for layer in layers:
        _check_calls(kind, layer)
    far = too_far(sparse, dense, changed, torch.finfo(model.dtype).eps)
    if far:
        raise ValueError(
            f"with all keys selected, {'logits' if head else 'hidden states'} of this {kind} model differ from the "
            f"dense ones {far}: its attention is not what sparse attention computes"
        )


def too_far(found: Tensor, dense: Tensor, changed: Tensor, eps: float) -> str:
    """How far a run is from the dense one, for a message; empty if roundings explain it.

    Args:
        found: Logits or hidden states of a run that must be the dense one.
        dense: Those of the dense model.
        changed: Those of the dense model with `rounded` embeddings.
        eps: Of the model's dtype.
    """
    far, rounding = float((found - dense).abs().max()), float((changed - dense).abs().max())
    if far <= ROUNDINGS * rounding + eps * float(dense.abs().max()):
        return ""
    return f"by {far:.1e}, and by {rounding:.1e} for one rounding of its embeddings"


@contextlib.contextmanager
def _attached(model: Any, layers: list[ProbedLayer]) -> Iterator[None]:
    """The attention implementation of the probe; modules are then as they were, the name of the implementation not."""
    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, streamkl_mask)
    model.set_attn_implementation(NAME)
    for layer in layers:
        layer.attach()
    try:
        yield
    finally:
        for layer in layers:
            layer.detach()


def _attention(module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    layer = getattr(module, "streamkl_layer", None)
    if isinstance(layer, ProbedLayer):
        layer.calls.append(kwargs)
    return streamkl_attention(module, *args, **kwargs)


def _check_calls(kind: str, layer: ProbedLayer) -> None:
    """Refuses a layer that attends elsewhere, or several times, or with arguments that are not known."""
    if len(layer.calls) != 1:
        times = "did not attend through transformers' attention interface" if not layer.calls else (
            f"attends {len(layer.calls)} times in one forward"
        )  # fmt: skip
        raise ValueError(f"layer {layer.number} of this {kind} model {times}, which sparse attention does not support")
    given = layer.calls[0]
    unknown = sorted(name for name in given.keys() - KNOWN if given[name] is not None)
    if unknown:
        raise ValueError(
            f"layer {layer.number} of this {kind} model gives its attention {', '.join(unknown)}, of which sparse "
            f"attention knows nothing"
        )


def prompt(model: Any) -> Tensor:
    """Random tokens ``[1, TOKENS]``, none of them special."""
    configs = (model.config, model.config.get_text_config())
    special: set[int] = set()
    for name, value in (entry for config in configs for entry in vars(config).items()):
        if name.endswith(("token_id", "token_index", "token_ids")):
            special.update(value if isinstance(value, (list, tuple)) else [value])
    usual = torch.tensor([token for token in range(configs[1].vocab_size) if token not in special])
    chosen = torch.randint(len(usual), (1, TOKENS), generator=torch.Generator().manual_seed(0))
    return usual[chosen].to(model.device)


@contextlib.contextmanager
def _evaluation(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, and each module's own mode afterwards."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


@contextlib.contextmanager
def rounded(model: Any) -> Iterator[None]:
    """Changes the embeddings of tokens by one rounding, up and down in turn."""

    def change(module: nn.Module, args: tuple, output: Tensor) -> Tensor:
        eps = max(torch.finfo(output.dtype).eps, torch.finfo(model.dtype).eps)
        signs = 1 - 2 * (torch.arange(output.shape[-1], device=output.device) % 2)
        return output * (1 + eps * signs).to(output.dtype)

    hook = model.get_input_embeddings().register_forward_hook(change)
    try:
        yield
    finally:
        hook.remove()
