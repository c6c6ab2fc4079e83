"""Where a run resumes, with which settings, and what is left of it when a rank is lost."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

from transformers import TrainingArguments

from streamkl.distillation import checkpoints, ranks
from streamkl.distillation.checkpoints import CheckpointError
from streamkl.distillation.settings import FinetuneSettings, RunSettings, Settings

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
    """Refuses to resume with other settings or another text than a checkpoint was made with."""
    then = checkpoints.about(folder)
    assert then is not None, "it was found because it is whole"
    # The weights, the tokens and the global batch are compared instead.
    usual = {f.name: f.default for kind in (Settings, FinetuneSettings) for f in fields(kind)}
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
    if then["tokens"] != about["tokens"]:
        raise ValueError(f"{folder} was made with another text, or another tokenizer; {AGAIN}")
