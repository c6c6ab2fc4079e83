"""Where a run resumes, with which settings, and what is left of it when a rank is lost."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from transformers import TrainingArguments

from streamkl.cache import locked
from streamkl.distillation import checkpoints, ranks
from streamkl.distillation.checkpoints import CheckpointError
from streamkl.distillation.settings import FinetuneSettings, RunSettings, Settings

KINDS = (Settings, FinetuneSettings)
AGAIN = "--resume continues the run with its settings; another run needs another --output"


@contextmanager
def naming_the_last_checkpoint(output: Path) -> Iterator[None]:
    """Ends with a `RankError` that names the last checkpoint if another rank is lost."""
    try:
        yield
    except CheckpointError:
        raise
    except RuntimeError as error:
        if not ranks.is_lost(error):
            raise
        ranks.wake()
        last = checkpoints.latest(output)
        kept = "there is no checkpoint yet" if last is None else f"the last good checkpoint is {last}"
        raise ranks.RankError(
            f"{ranks.prefix()}another rank ended, or does not answer ({error}): {kept}; start all with --resume"
        ) from error


@contextmanager
def alone(output: Path, args: TrainingArguments) -> Iterator[None]:
    """Keeps other runs out of the folder of results, on all ranks; refuses if there is one in it."""
    place, busy = output.resolve(), None
    with ExitStack() as held:
        if args.should_save:
            try:
                held.enter_context(locked(place.with_name(f"{place.name}.lock"), "it is under way"))
            except BlockingIOError as error:
                busy = error
        if ranks.agree(busy) is not None:
            raise ValueError(f"another run writes to {output}: wait for it, or name another folder")
        yield


def resumed(settings: RunSettings, output: Path, args: TrainingArguments) -> Path | None:
    """The checkpoint to resume from.

    Raises:
        ValueError: There are checkpoints, and the run was not told to resume.
    """
    if not settings.resume:
        if ranks.same(bool(checkpoints.steps(output))):
            raise ValueError(f"{output} holds checkpoints of a run: resume it with --resume, or name another folder")
        return None
    if args.should_save:
        checkpoints.clean(output)
    return ranks.same(checkpoints.latest(output) if ranks.number() == 0 else None)


def check_same(folder: Path, about: dict[str, Any]) -> None:
    """Refuses to resume with other settings, another model or another text than a checkpoint was made with."""
    then = checkpoints.about(folder)
    assert then is not None, "it was found because it is whole"
    # Some of the model's weights, the tokens and the global batch are compared instead.
    usual = {f.name: [] if f.default is MISSING else f.default for kind in KINDS for f in fields(kind)}
    where = {"model", "text", "field", "encoding", "on_nan", "batch", "accumulation"}
    for name, value in about["settings"].items():
        made = then["settings"].get(name, usual.get(name))  # it may be older than the setting
        if name not in where and made != value:
            raise ValueError(f"{folder} was made with {name} = {made}: got {value}; {AGAIN}")
    if then.get("global_batch") != about["global_batch"]:
        raise ValueError(
            f"{folder} was made with {then.get('global_batch')} sequences per step: got {about['global_batch']}, "
            f"--batch times --accumulation times the number of groups of processes; {AGAIN}"
        )
    if then.get("fingerprint", about["fingerprint"]) != about["fingerprint"]:
        raise ValueError(f"{folder} was made with another model; {AGAIN}")
    if then["tokens"] != about["tokens"]:
        raise ValueError(f"{folder} was made with another text, or another tokenizer; {AGAIN}")
