"""What a run writes besides checkpoints: its settings at the start, and its results at the end."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from safetensors import SafetensorError
from transformers import AutoTokenizer, TrainingArguments

from streamkl.distillation import checkpoints, ranks
from streamkl.distillation.checkpoints import CheckpointError
from streamkl.distillation.settings import RunSettings

T = TypeVar("T")
MODEL, SETTINGS = "model", "settings.json"


def on_first(args: TrainingArguments, what: str, write: Callable[[], T]) -> T | None:
    """Writes on the rank that saves; a `CheckpointError` on all ranks if it could not."""
    error, done = None, None
    try:
        if args.should_save:
            done = write()
    except (OSError, SafetensorError) as raised:
        error = raised
    wrong = ranks.agree(error)
    if wrong is not None:
        shutil.rmtree(Path(args.output_dir or ".") / checkpoints.STAGING, ignore_errors=True)
        raise CheckpointError(f"{ranks.prefix()}{what} ({wrong}); make room, and --resume writes them") from error
    return done


def check_output(output: Path) -> None:
    """Refuses a file in place of the folder of results."""
    if output.exists() and not output.is_dir():
        raise ValueError(f"{output} is a file: output names a folder")


def write_settings(output: Path, settings: RunSettings) -> None:
    """Writes the settings that affect the trained weights, for the reader of a run's folder."""
    output.mkdir(parents=True, exist_ok=True)
    (output / SETTINGS).write_text(json.dumps(settings.training(), indent=2) + "\n")


def check_model_place(folder: Path) -> None:
    """Refuses to replace a model, or anything else, that no run wrote."""
    if folder.exists() and not (folder / checkpoints.MARKER).is_file():
        raise ValueError(f"{folder} is there already and was not written by a run: choose another output folder")


def write_model(output: Path, model: str, save: Callable[[Path], None]) -> Path:
    """Writes a trained model and its tokenizer, under another name until it is complete.

    Args:
        output: The folder of the run.
        model: The model that was trained, for its tokenizer.
        save: Writes the model to a folder.

    Returns:
        The folder of the model.
    """
    staged, folder = output / checkpoints.STAGING / MODEL, output / MODEL
    save(staged)
    AutoTokenizer.from_pretrained(model).save_pretrained(staged)
    checkpoints.finish(staged, folder, {})
    shutil.rmtree(staged.parent)
    return folder
