"""``streamkl distill``: flags of the settings' names, or a YAML file with keys of the same names."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import typer

from streamkl.cli.errors import UserError
from streamkl.cli.hub import tell_of_hub
from streamkl.distillation.settings import Settings, helps, split_sources
from streamkl.text import files


def command() -> Callable[..., None]:
    """The command, with a flag for each setting."""

    def distill(**given: Any) -> None:
        """Trains indexers for a frozen model by KL divergence from its own attention, one per layer.

        Runs alone, or under `accelerate launch -m streamkl distill ...` on several processes.
        """
        given.pop("config")
        try:
            settings = Settings(**given)
        except ValueError as error:
            raise UserError(str(error)) from None
        run(settings)

    hints, texts = get_type_hints(Settings), helps()
    parameters = [
        inspect.Parameter(
            "config",
            inspect.Parameter.KEYWORD_ONLY,
            default=typer.Option(
                None, callback=_read, is_eager=True, exists=True, dir_okay=False,
                help="A YAML file with settings by their names; flags override it.",
            ),
            annotation=Path,
        )
    ]  # fmt: skip
    for field in dataclasses.fields(Settings):
        is_list = field.default is dataclasses.MISSING
        option = typer.Option([] if is_list else field.default, help=texts[field.name])
        parameters.append(
            inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=option, annotation=hints[field.name])
        )
    distill.__signature__ = inspect.Signature(parameters)  # pyright: ignore[reportFunctionMemberAccess]
    distill.__annotations__ = {p.name: p.annotation for p in parameters}
    return distill


def run(settings: Settings) -> None:
    """Trains, or prints an estimate; errors that a user can fix end in a message, not in a traceback."""
    output, is_first = Path(settings.output), int(os.environ.get("RANK", "0")) == 0
    try:  # before transformers is loaded, which takes a while
        named, _ = split_sources(settings.text)
        if named:
            files(named)
        if is_first:
            tell_of_hub(settings.model)
            _warn_of_large_topk(settings)
    except (ValueError, OSError) as error:
        raise UserError(str(error)) from None
    try:
        from streamkl.distillation import checkpoints, curves
        from streamkl.distillation.checkpoints import CheckpointError
        from streamkl.distillation.run import distill
        from streamkl.distillation.trainer import NotFiniteError
    except ImportError as error:
        raise UserError(
            f"distillation needs transformers and accelerate: pip install 'streamkl[hf,bench]' ({error})"
        ) from None
    try:
        if settings.dry_run:
            from streamkl.distillation.estimate import estimate

            typer.echo(estimate(settings))
            _warn_of_small_topk(settings)
            return
        if settings.resume and is_first:
            last = checkpoints.latest(output)
            message = (
                f"{output} has no complete checkpoint: starting at the first step"
                if last is None
                else f"The last complete checkpoint is {last}"
            )
            typer.echo(f"{message}.", err=True)
        result = distill(settings)
    except (CheckpointError, NotFiniteError, ValueError, OSError) as error:
        raise UserError(str(error)) from None
    except KeyboardInterrupt:
        if is_first:
            curves.draw(output)
            typer.echo(f"\n{_stopped(checkpoints.latest(output), settings)}", err=True)
        sys.exit(130)
    if not is_first:
        return
    for line in curves.read(output / curves.LOG)[-1:]:
        shown = (f"{text} {line[name]:.3g}" for name, text in curves.FIGURES.items() if line.get(name) is not None)
        typer.echo(f"Step {line['step']}, means over layers: {', '.join(shown)}.")
    typer.echo(
        f"Indexers are in {result.indexers}: {settings.measured} keys per query block of {settings.query_block}."
    )
    _warn_of_small_topk(settings)
    if result.model is not None:
        typer.echo(f"The model with them is in {result.model}.")
    if result.curves is not None:
        typer.echo(f"Curves are in {result.curves}.")
    if result.skipped:
        typer.echo(f"{result.skipped} steps were skipped because their gradients were not finite.")


def _warn_of_large_topk(settings: Settings) -> None:
    if settings.measured >= settings.length:
        typer.echo(
            f"Recall and mass say nothing: a top-k of {settings.measured} keys holds all of {settings.length} tokens.",
            err=True,
        )


def _warn_of_small_topk(settings: Settings) -> None:
    if settings.measured <= settings.query_block:
        typer.echo(
            f"A top-k of {settings.measured} keys shared by a query block of {settings.query_block} holds only keys "
            f"on the block's diagonal: select more keys, or use a smaller query block, where the indexers are used."
        )


def _stopped(last: Path | None, settings: Settings) -> str:
    """The message after an interruption."""
    if last is None:
        return f"Stopped before the first checkpoint: there is one every --save-every {settings.save_every} steps."
    return f"Stopped. {last} is whole: the same command with --resume resumes from it."


def _read(context: typer.Context, path: Path | None) -> Path | None:
    """Makes the file's values the defaults of the flags."""
    if path is None:
        return None
    import yaml

    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not YAML: {error}") from None
    found = {} if found is None else found
    if not isinstance(found, dict):
        raise UserError(f"{path} must hold names and values of settings")
    found = {str(name).replace("-", "_"): value for name, value in found.items()}
    if isinstance(found.get("set"), dict):
        found["set"] = [f"{name}={json.dumps(value)}" for name, value in found["set"].items()]
    for name in ("text", "report_to", "set"):
        if isinstance(found.get(name), str):
            found[name] = [found[name]]  # one of a list
    hints = get_type_hints(Settings)
    for name, value in found.items():
        if name not in hints:
            close = difflib.get_close_matches(name, hints, 1)
            raise UserError(
                f"{path}: there is no setting {name!r}" + (f"; did you mean {close[0]!r}?" if close else "")
            )
        if not _fits(value, hints[name]):
            raise UserError(f"{path}: {name} must be {_words(hints[name])}: got {value!r}")
    context.default_map = {**(context.default_map or {}), **found}
    return path


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value of YAML, which has ``1e-4`` as a string, is one of a setting's type."""
    if get_origin(hint) is list:
        return isinstance(value, list) and all(_fits(one, get_args(hint)[0]) for one in value)
    if hint is float:
        return isinstance(value, (int, float, str)) and not isinstance(value, bool) and _is_number(value)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, hint)


def _is_number(value: float | str) -> bool:
    try:
        float(value)
    except ValueError:
        return False
    return True


def _words(hint: Any) -> str:
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "a word"}
    return names.get(hint) or f"a list, each {names[get_args(hint)[0]]}"
