"""The evaluated model: loaded once, switched from method to method, asked for answers and losses."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar
from unittest import mock

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, logging

from streamkl.evaluation.methods import DENSE, SELECTORS, Method
from streamkl.integrations.saved.folder import marker
from streamkl.integrations.transformers import Indexers, load_indexers, sparsify
from streamkl.integrations.transformers.checkpoint import check_checkpoint, check_length
from streamkl.integrations.transformers.probe import dense_implementation

LOGITS = 1 << 25
"""How many logits are held at a time: 128 MB in float32."""

T = TypeVar("T")


class Answer(NamedTuple):
    """The generated text, and the seconds until its first token."""

    text: str
    seconds: float


class Losses(NamedTuple):
    """``rows [N - 1]``: the loss of each next token, and the seconds of the forward without its logits."""

    rows: Tensor
    seconds: float


class Subject:
    """A causal language model of transformers, its tokenizer, and folders of indexers for it.

    Args:
        model: A name or a folder, as ``from_pretrained`` takes it.
        indexers: Folders of indexers, by the name that methods have for them.
        dtype: Of the weights.
        device: Of the model.
        decode: How the tokens after the prompt attend: ``sparse`` or ``dense``.

    Attributes:
        fingerprint: Of the weights, to recognise the model: another model may have a folder of the same name.
    """

    def __init__(
        self,
        model: str | Path,
        indexers: dict[str, Path] | None = None,
        *,
        dtype: torch.dtype = torch.bfloat16,
        device: str | torch.device = "cpu",
        decode: Literal["dense", "sparse"] = "sparse",
    ) -> None:
        logging.disable_progress_bar()
        self.tokenizer: Any = load_tokenizer(model)
        self.model: Any = AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
        self.model = self.model.to(device).eval()
        self.use(DENSE)
        self.decode: Literal["dense", "sparse"] = decode
        self.fingerprint = _fingerprint(self.model)
        self.indexers: dict[str, Indexers] = {
            name: load_indexers(path, self.model)[0] for name, path in (indexers or {}).items()
        }

    def check_length(self, length: int) -> None:
        """Raises a ``ValueError`` if the context of the model is shorter."""
        check_length(self.model.config, length)

    def use(self, method: Method) -> None:
        """Switches the attention to a method."""
        if method != DENSE:
            sparsify(self.model, self.selector(method), self.indexers.get(method.selector), decode=self.decode)
            return
        if getattr(self.model, "streamkl", None) is not None:
            self.model.streamkl.remove()
        self.model.set_attn_implementation(dense_implementation(self.model))

    def selector(self, method: Method) -> Any:
        """The selector of a method."""
        if method.selector in SELECTORS:
            return method.make()
        return method.make(next(iter(self.indexers[method.selector].values())).activation)  # pyright: ignore

    @torch.no_grad()
    def answer(self, ids: list[int], steps: int) -> Answer:
        """The next ``steps`` tokens, greedily, fewer if the text ends."""
        prompt = torch.tensor([ids], device=self.model.device)
        out, seconds = self._timed(lambda: self.model(prompt, use_cache=True, logits_to_keep=1))
        ends, new = self._ends(), []
        for step in range(steps):
            new.append(int(out.logits[0, -1].argmax()))
            if new[-1] in ends or step == steps - 1:
                break
            token = torch.tensor([[new[-1]]], device=self.model.device)
            out = self.model(token, past_key_values=out.past_key_values, use_cache=True, logits_to_keep=1)
        return Answer(self.tokenizer.decode(new, skip_special_tokens=True), seconds)

    @torch.no_grad()
    def losses(self, ids: list[int]) -> Losses:
        """The loss of every token after the first, given those before it."""
        text = torch.tensor([ids], device=self.model.device)
        body = self.model.base_model
        out, seconds = self._timed(lambda: body(text, use_cache=False))
        hidden, rows = out.last_hidden_state, []
        # The model's own forward makes logits of hidden states, with its scales, caps and dtypes, a part at a time.
        for part in torch.arange(len(ids)).split(max(1, LOGITS // self.model.get_output_embeddings().weight.shape[0])):
            out.last_hidden_state = hidden[:, part]
            with mock.patch.object(body, "forward", return_value=out):
                logits = self.model(text[:, part], use_cache=False).logits[0].float()
            targets = text[0, part[0] + 1 : part[-1] + 2]
            rows.append(torch.nn.functional.cross_entropy(logits[: len(targets)], targets, reduction="none"))
        return Losses(torch.cat(rows).cpu(), seconds)

    def _timed(self, function: Callable[[], T]) -> tuple[T, float]:
        """The result of a function and its seconds, including the work of the device."""
        device = self.model.device
        wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
        wait()
        start = time.perf_counter()
        out = function()
        wait()
        return out, time.perf_counter() - start

    def _ends(self) -> set[int]:
        """The tokens that end a text."""
        ends = self.model.generation_config.eos_token_id
        return {ends} if isinstance(ends, int) else set(ends or ())


def load_tokenizer(model: str | Path) -> Any:
    """The tokenizer of a model, to check text before the model is loaded.

    Raises:
        ValueError: There is no model at that path.
    """
    check_checkpoint(model)
    return AutoTokenizer.from_pretrained(model)


def _fingerprint(model: torch.nn.Module) -> str:
    """A digest of some of each parameter."""
    found = hashlib.sha256()
    for name, parameter in model.named_parameters():
        few = parameter.detach().flatten()[:64].float().cpu()
        found.update(name.encode() + few.numpy().tobytes())
    return found.hexdigest()[:16]


def digest(folder: Path) -> str:
    """A digest of a folder of indexers, to recognise them."""
    return hashlib.sha256(marker(folder).read_bytes()).hexdigest()[:16]
