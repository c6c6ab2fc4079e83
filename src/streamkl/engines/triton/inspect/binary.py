"""Figures of a compiled kernel's machine code: registers, spills, shared memory, instructions of its main loop."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import triton

MMA = {
    "HMMA": "HMMA", "HGMMA": "WGMMA", "UTCHMMA": "tcgen05", "v_mfma": "MFMA",
}  # fmt: skip
"""Tensor-core instructions as the disassemblers print them, and their common names."""

EXP = ("MUFU.EX2", "v_exp_f32")


class Loop(NamedTuple):
    """The innermost loop with products that has fewest instructions: the one without masks."""

    instructions: int
    products: dict[str, int]
    exp: int
    mix: dict[str, int]


class Binary(NamedTuple):
    """One kernel's figures; ``mma`` counts tensor-core instructions by kind, over the whole kernel."""

    registers: int
    spills: int
    shared: int
    mma: dict[str, int]
    exp: int
    loop: Loop


class Instruction(NamedTuple):
    """Address, name with its suffixes, and where it jumps to."""

    address: int
    name: str
    jump: int | None
    text: str


def read(compiled: Any) -> Binary:
    """Reads a compiled kernel of either vendor."""
    if "cubin" in compiled.asm:
        registers, instructions = _nvidia(compiled.asm["cubin"])
        spills = sum(i.name.startswith(("STL", "LDL")) for i in instructions)
    else:
        registers, spills, instructions = _amd(compiled.asm["amdgcn"])
    counts = Counter(kind for i in instructions if (kind := _mma(i.name)))
    exp = sum(i.name.startswith(EXP) for i in instructions)
    return Binary(registers, spills, compiled.metadata.shared, dict(counts), exp, _main_loop(instructions))


def _mma(name: str) -> str | None:
    return next((kind for start, kind in MMA.items() if name.startswith(start)), None)


def _main_loop(instructions: list[Instruction]) -> Loop:
    """Among the loops that hold a product, and hold no other such loop, the shortest."""
    at = {i.address: n for n, i in enumerate(instructions)}
    loops = []
    for n, i in enumerate(instructions):
        if i.jump is not None and i.jump in at and at[i.jump] < n:
            loops.append((at[i.jump], n))
    with_mma = [(a, b) for a, b in loops if any(_mma(i.name) for i in instructions[a : b + 1])]
    inner = [
        (a, b) for a, b in with_mma if not any((c, d) != (a, b) and a <= c and d <= b for c, d in with_mma)
    ]  # fmt: skip
    if not inner:
        return Loop(0, {}, 0, {})
    a, b = min(inner, key=lambda span: span[1] - span[0])
    body = instructions[a : b + 1]
    mix = Counter(i.name.split(".")[0] for i in body)
    products = Counter(i.name for i in body if _mma(i.name))
    return Loop(len(body), dict(products), sum(i.name.startswith(EXP) for i in body), dict(mix.most_common()))


def _nvidia(cubin: bytes) -> tuple[int, list[Instruction]]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        usage = _run("cuobjdump", "-res-usage", str(path))
        sass = _run("nvdisasm", "--print-code", "--no-dataflow", str(path))  # cuobjdump's analysis takes twice as long
    registers = re.search(r"REG:(\d+)", usage)
    assert registers is not None, usage
    labels: dict[str, int] = {}
    waiting: list[str] = []
    found = []
    for label, address, text in re.findall(r"^(\.L\w+):|/\*([0-9a-f]{4,})\*/\s+([^;]+?)\s*;", sass, re.MULTILINE):
        if label:
            waiting.append(label)
            continue
        labels.update(dict.fromkeys(waiting, int(address, 16)))
        waiting.clear()
        found.append((int(address, 16), text))
    instructions = []
    for address, text in found:
        words = [word for word in text.split() if not word.startswith("@")]
        jump = re.search(r"`\((\.L\w+)\)$", text) if words[0].startswith("BRA") else None
        instructions.append(Instruction(address, words[0], labels.get(jump.group(1)) if jump else None, text))
    return int(registers.group(1)), instructions


def _amd(assembly: str) -> tuple[int, int, list[Instruction]]:
    def figure(name: str) -> int:
        found = re.search(rf"\.{name}:\s+(\d+)", assembly)
        return int(found.group(1)) if found else 0

    labels: dict[str, int] = {}
    lines = []
    for line in assembly.splitlines():
        label = re.match(r"(\.L\w+):", line)
        if label:
            labels[label.group(1)] = len(lines)
        elif re.match(r"\t[a-z]\w+", line) and not line.startswith("\t."):
            lines.append(line.strip())
        if line.startswith(".Lfunc_end"):
            break
    instructions = []
    for n, text in enumerate(lines):
        name = text.split()[0]
        target = text.split()[-1] if name.startswith(("s_cbranch", "s_branch")) else None
        instructions.append(Instruction(n, name, labels.get(target) if target else None, text))
    # Scalar registers spill to lanes of vector registers, which costs moves but no memory: those are not counted.
    return figure("vgpr_count"), figure("vgpr_spill_count"), instructions


def _run(tool: str, *arguments: str) -> str:
    packaged = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / tool
    program = str(packaged) if packaged.exists() else shutil.which(tool)
    if program is None:
        raise RuntimeError(f"{tool} was not found, neither in Triton's package nor on the PATH")
    return subprocess.run([program, *arguments], capture_output=True, text=True, check=True).stdout
