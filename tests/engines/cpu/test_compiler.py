"""The compiler is found as a shell would find it."""

import shutil

import pytest

from streamkl.engines.cpu import compiler

SHELL = shutil.which("sh")


@pytest.mark.parametrize(
    ("named", "words"),
    [
        ("sh", (SHELL,)),
        ("sh -x", (SHELL, "-x")),
        ("  sh  'two words' three\\ more ", (SHELL, "two words", "three more")),
    ],
)
def test_cxx_is_split_as_a_shell_does(named: str, words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", named)
    assert compiler.command() == words


@pytest.mark.parametrize(
    ("named", "reason"), [("no-such-compiler -x", "no program 'no-such-compiler'"), ("sh '", "No")]
)
def test_a_cxx_that_cannot_be_called_is_named(named: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", named)
    with pytest.raises(compiler.BuildError, match=reason) as caught:
        compiler.command()
    assert repr(named) in str(caught.value)


def test_without_cxx_the_first_compiler_found_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(shutil, "which", {"g++": None, "c++": "/bin/c++"}.get)
    assert compiler.command() == ("/bin/c++",)
    monkeypatch.setattr(shutil, "which", lambda _: None)
    assert compiler.command() is None
