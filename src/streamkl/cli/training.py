"""What commands that train have in common: a flag per setting, a YAML file, and messages for what a user can mend."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

import typer

from streamkl.cli.errors import UserError
from streamkl.cli.hints import say_slow_dtype
from streamkl.cli.hub import check_model
from streamkl.distillation.settings import RunSettings, helps, split_sources
from streamkl.distillation.shards import is_tokenized
from streamkl.extras import how_to_install
from streamkl.text import files

S = TypeVar("S", bound=RunSettings)


def command(kind: type[S], run: Callable[[S], None], name: str, doc: str) -> Callable[..., None]:
    """A command with a flag for each setting.

    Args:
        kind: The settings.
        run: Takes them.
        name: Of the command.
        doc: Its text in ``--help``.
    """

    def made(**given: Any) -> None:
        given.pop("config")
        try:
            settings = kind(**given)
        except ValueError as error:
            raise UserError(str(error)) from None
        run(settings)

    hints, texts = get_type_hints(kind), helps(kind)

    def read(context: typer.Context, path: Path | None) -> Path | None:
        if path is not None:
            context.default_map = {**(context.default_map or {}), **_read(path, hints)}
        return path

    parameters = [
        inspect.Parameter(
            "config",
            inspect.Parameter.KEYWORD_ONLY,
            default=typer.Option(
                None, callback=read, is_eager=True, exists=True, dir_okay=False,
                help="A YAML file with settings by their names; flags override it.",
            ),
            annotation=Path,
        )
    ]  # fmt: skip
    for field in dataclasses.fields(kind):
        is_list = field.default is dataclasses.MISSING
        option = typer.Option([] if is_list else field.default, help=texts[field.name])
        parameters.append(
            inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=option, annotation=hints[field.name])
        )
    made.__name__, made.__doc__ = name, doc
    made.__signature__ = inspect.Signature(parameters)  # pyright: ignore[reportFunctionMemberAccess]
    made.__annotations__ = {p.name: p.annotation for p in parameters}
    return made


def check_inputs(settings: RunSettings) -> None:
    """Refuses text and models that are not there, before transformers is loaded, which takes a while."""
    try:
        named = [name for name in split_sources(settings.text)[0] if not is_tokenized(name)]
        if named:
            files(named)
        if is_first():
            check_model(settings.model)
    except (ValueError, OSError) as error:
        raise UserError(str(error)) from None


def is_first() -> bool:
    """Whether this process is the one of its launcher that speaks."""
    return int(os.environ.get("RANK", "0")) == 0


@contextmanager
def told(settings: RunSettings) -> Iterator[None]:
    """Ends what a user can mend in a message, not in a traceback; an interrupted run says how to resume it."""
    output = Path(settings.output)
    try:
        import torch

        from streamkl.distillation import checkpoints, curves, ranks, run  # noqa: F401
        from streamkl.distillation.checkpoints import CheckpointError
        from streamkl.distillation.trainer import NotFiniteError
    except ImportError as error:
        raise UserError(
            f"training needs transformers and accelerate: {how_to_install('hf', 'bench')} ({error})"
        ) from None
    try:
        if settings.resume and is_first() and not settings.dry_run:
            last = checkpoints.latest(output)
            message = (
                f"{output} has no complete checkpoint: starting at the first step"
                if last is None
                else f"The last complete checkpoint is {last}"
            )
            typer.echo(f"{message}.", err=True)
        if is_first():
            say_slow_dtype(settings.dtype, "cuda" if torch.cuda.is_available() else "cpu")
        yield
    except (CheckpointError, NotFiniteError, ranks.RankError) as error:
        if not ranks.prefix():
            raise UserError(str(error)) from None
        typer.echo(f"Error: {error}", err=True)  # a line per rank, since all write to one place
        if isinstance(error, ranks.RankError):
            sys.stdout.flush()
            os._exit(2)  # nothing of a process group that is broken is waited for
        ranks.agree(None)  # a launcher ends all ranks when the first one does: each has said what happened
        sys.exit(2)
    except (ValueError, OSError) as error:
        raise UserError(str(error)) from None
    except KeyboardInterrupt:
        if is_first():
            curves.draw(output)
            typer.echo(f"\n{_stopped(checkpoints.latest(output), settings)}", err=True)
        sys.exit(130)


def say_figures(output: Path, kept: Path | None, skipped: int) -> None:
    """Prints the last figures of a run, where its curves are, and how many steps were skipped."""
    from streamkl.distillation import curves

    for line in curves.read(output / curves.LOG)[-1:]:
        shown = (f"{text} {line[name]:.3g}" for name, text in curves.FIGURES.items() if line.get(name) is not None)
        typer.echo(f"Step {line['step']}, means over layers: {', '.join(shown)}.")
    if kept is not None:
        typer.echo(f"Curves are in {kept}.")
    if skipped:
        typer.echo(f"{skipped} steps were skipped because their gradients were not finite.")


def _stopped(last: Path | None, settings: RunSettings) -> str:
    """The message after an interruption."""
    if last is None:
        return f"Stopped before the first checkpoint: there is one every --save-every {settings.save_every} steps."
    return f"Stopped. {last} is whole: the same command with --resume resumes from it."


def _read(path: Path, hints: dict[str, Any]) -> dict[str, Any]:
    """The values of a YAML file, by the names of settings."""
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
    for name, value in found.items():
        if name not in hints:
            close = difflib.get_close_matches(name, hints, 1)
            raise UserError(
                f"{path}: there is no setting {name!r}" + (f"; did you mean {close[0]!r}?" if close else "")
            )
        if not _fits(value, hints[name]):
            raise UserError(f"{path}: {name} must be {_words(hints[name])}: got {value!r}")
    return found


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
