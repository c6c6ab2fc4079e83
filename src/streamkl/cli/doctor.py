"""``streamkl doctor``: what is installed, which engine each device gets and why, what is missing.

It must work when nothing else does: a torch that is missing, broken or too old is a finding, not a traceback.
"""

from __future__ import annotations

import platform
import re
import warnings
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

from rich.console import Console
from rich.table import Table

OPTIONAL = {
    "triton": "the engine for NVIDIA and AMD GPUs",
    "numpy": "conversions between tensors and arrays",
    "transformers": "models of Hugging Face, streamkl distill and evaluate (extra hf)",
    "accelerate": "streamkl distill (extra hf)",
    "datasets": "streamkl distill on datasets (extra hf)",
    "matplotlib": "pictures (extra bench)",
    "lm_eval": "streamkl lm-eval (extra eval)",
}
"""Packages that are not needed, and what they are for."""


@dataclass
class Report:
    """The findings of the doctor.

    Attributes:
        versions: Name, version and remark of each package that matters.
        devices: Device, engine, the reason for it, and how the check went.
        errors: Problems that must be fixed, each with a fix.
        hints: Possible improvements, each with a way to get them.
    """

    versions: list[tuple[str, str, str]] = field(default_factory=list)
    devices: list[tuple[str, str, str, str]] = field(default_factory=list)
    errors: list[tuple[str, str]] = field(default_factory=list)
    hints: list[tuple[str, str]] = field(default_factory=list)


def run() -> int:
    """Examines the environment, prints what it found, and returns the exit code."""
    report = examine()
    show(report, Console())
    return 1 if report.errors else 0


def examine() -> Report:
    """Looks at versions and devices, and runs a small loss and its gradients on each device."""
    report = Report()
    report.versions.append(("python", platform.python_version(), f"{platform.system()} {platform.machine()}"))
    report.versions.append(("streamkl", metadata.version("streamkl"), ""))
    minimum = minimum_torch()
    try:
        import torch
    except Exception as error:
        report.versions.append(("torch", _installed("torch") or "not installed", "does not import"))
        report.errors.append((f"torch does not import: {error}", f"pip install 'torch>={minimum}'"))
        return report
    report.versions.append(("torch", torch.__version__, _build(torch)))
    for name, purpose in OPTIONAL.items():
        report.versions.append((name, _installed(name) or "not installed", purpose))
    if _numbers(torch.__version__) < _numbers(minimum):
        report.errors.append(
            (f"torch {torch.__version__} is older than {minimum}", f"pip install --upgrade 'torch>={minimum}'")
        )
        return report
    for device in _devices(torch):
        report.devices.append(_examine_device(device, report))
    if len(report.devices) == 1:
        report.hints.append(_missing_accelerator(torch))
    return report


def show(report: Report, console: Console) -> None:
    """Prints a report."""
    versions = Table("package", "version", "", title="Versions", title_justify="left")
    for row in report.versions:
        versions.add_row(*row)
    console.print(versions)
    if report.devices:
        devices = Table("device", "engine", "because", "check", title="Engines (backend='auto')", title_justify="left")
        for row in report.devices:
            devices.add_row(*row)
        console.print(devices)
    for title, style, findings in (("To fix", "bold red", report.errors), ("Hints", "bold", report.hints)):
        for what, how in findings:
            console.print(f"[{style}]{title}:[/] {what}", highlight=False)
            console.print(f"  {how}", highlight=False, markup=False)
    if not report.errors:
        console.print("[green]streamkl works here.[/]")


def minimum_torch() -> str:
    """The oldest torch that the installed package declares it works with."""
    requirements = metadata.requires("streamkl") or []
    match = re.search(r">=\s*([\d.]+)", next(r for r in requirements if re.match(r"torch\b", r)))
    assert match is not None, "pyproject.toml names a minimum torch"
    return match.group(1)


def _examine_device(device: str, report: Report) -> tuple[str, str, str, str]:
    """The engine for a device, checked on a small problem against the float64 reference."""
    try:
        import torch

        from streamkl.engines import broken, choose
        from streamkl.testing import check_accuracy, make_case

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # of an engine that is broken, which is a hint below
            choice = choose("auto", torch.device(device))
            errors = check_accuracy(make_case(device=device, causal=True, guard=False))
        reason = choice.reason
        for name, failure in broken(torch.device(device)).items():
            reason = reason.replace(failure, "should run here and does not, see below")
            report.hints.append((f"the {name} engine should run on {device} and does not", failure))
        if device == "cpu":
            reason += _examine_build(choice.engine.name == "cpu", report)
    except Exception as error:
        report.errors.append(
            (f"the check on {device} failed: {error}", "report it with the output of `streamkl doctor`")
        )
        return device, "none", "", f"[red]{type(error).__name__}[/]"
    if errors.worst > 1:
        report.errors.append((f"wrong results on {device}: {errors}", "report it with the output of `streamkl doctor`"))
        return device, choice.engine.name, reason, "[red]wrong[/]"
    return device, choice.engine.name, reason, "[green]exact to rounding[/]"


def _examine_build(runs: bool, report: Report) -> str:
    """How the CPU engine multiplies, if it runs; hints at what its build lacks."""
    from streamkl.engines.cpu import build, products

    if not runs:
        missing = build.missing()
        if build.unfit() is None and missing is not None:
            report.hints.append(("the cpu engine is faster than this one and could run here", missing))
        return ""
    passed_over = build.passed_over()
    if passed_over is not None:
        report.hints.append(
            ("the cpu engine is kept in a temporary folder, and built again when that goes", passed_over)
        )
    return f"; {products()}"


def _devices(torch: Any) -> list[str]:
    devices = ["cpu"]
    if torch.cuda.is_available():
        devices += [f"cuda:{n}" for n in range(torch.cuda.device_count())]
    if torch.backends.mps.is_available():
        devices.append("mps")
    if torch.xpu.is_available():
        devices += [f"xpu:{n}" for n in range(torch.xpu.device_count())]
    return devices


def _missing_accelerator(torch: Any) -> tuple[str, str]:
    if torch.version.cuda is None and torch.version.hip is None:
        return "torch sees the CPU alone, and this build has neither CUDA nor ROCm", "see pytorch.org for other builds"
    return (
        "torch sees the CPU alone, though this build could use a GPU",
        "check that the driver is loaded (nvidia-smi, rocm-smi) and CUDA_VISIBLE_DEVICES is not empty",
    )


def _build(torch: Any) -> str:
    if torch.version.hip is not None:
        return f"ROCm {torch.version.hip}"
    return f"CUDA {torch.version.cuda}" if torch.version.cuda is not None else "CPU build"


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.split("+")[0])[:3])
