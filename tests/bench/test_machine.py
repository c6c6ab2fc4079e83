"""A record has the machine and the commit of the package."""

import subprocess
from pathlib import Path

import torch

from streamkl.bench import machine


def git(directory: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=test", "-c", "user.email=test@example.com")
    result = subprocess.run(
        ["git", "-C", str(directory), *identity, *arguments], check=True, capture_output=True, text=True
    )
    return result.stdout.strip()


def test_the_commit_is_that_of_the_package(tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    assert machine.commit(package) == "", "no repository"
    git(tmp_path, "init", "-q")
    assert machine.commit(package) == "", "a repository that does not have it"
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "first")
    head = git(tmp_path, "rev-parse", "--short=12", "HEAD")
    (tmp_path / "results.jsonl").write_text("beside the package")
    assert machine.commit(package) == head
    (package / "__init__.py").write_text("changed")
    dirty = machine.commit(package)
    assert dirty.startswith(f"{head}-dirty-")


def test_facts_are_there() -> None:
    facts = machine.facts(torch.device("cpu"))
    assert facts["torch"] == torch.__version__
    assert all(facts[name] for name in ("device", "capability", "python", "streamkl"))
    assert machine.available_bytes(torch.device("cpu")) > 1 << 20
