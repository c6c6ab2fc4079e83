"""``streamkl tokenize``: what it says when it is done, stopped or wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from streamkl.cli import app


@pytest.fixture
def corpus(tmp_path: Path) -> dict[str, Path]:
    """A text and where its tokens go."""
    pytest.importorskip("transformers")
    (tmp_path / "text.txt").write_text("It is a truth universally acknowledged")
    return {"model": tmp_path, "text": tmp_path / "text.txt", "output": tmp_path / "corpus"}


def call(flags: dict[str, Any]) -> Any:
    return CliRunner().invoke(app, ["tokenize", *(part for name in flags for part in (f"--{name}", str(flags[name])))])


def test_it_says_how_much_it_wrote(corpus: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    from streamkl.distillation import tokenizing

    told: dict[str, Any] = {}

    def tokenize(*args: Any, tell: Any, **options: Any) -> tokenizing.Progress:
        told.update(options, args=args)
        tell(tokenizing.Progress(0, 1000, 4000))
        return tokenizing.Progress(2, 1234, 5678)

    monkeypatch.setattr(tokenizing, "tokenize", tokenize)
    result = call({**corpus, "workers": 3, "shard-tokens": 1000})
    assert result.exit_code == 0, result.output
    assert f"{corpus['output']} has 1,234 tokens in 2 shards, of 5,678 characters." in result.output
    assert told["args"] == (str(corpus["model"]), [str(corpus["text"])], corpus["output"])
    assert (told["workers"], told["shard_tokens"], told["field"]) == (3, 1000, "text")


def test_an_interrupted_one_says_how_to_resume(corpus: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*args: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("streamkl.distillation.tokenizing.tokenize", interrupted)
    result = call(corpus)
    assert result.exit_code == 130
    assert "Stopped: the same command resumes after the last whole shard." in result.output


def test_a_text_that_is_not_there_is_an_error_of_the_user(corpus: dict[str, Path]) -> None:
    result = call({**corpus, "text": corpus["text"].with_name("nowhere.txt")})
    assert result.exit_code == 2
    assert "there is no file" in result.output
    assert not corpus["output"].exists()
