"""Machine code as instructions and where each may go on, from what nvdisasm prints."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
from collections import deque
from dataclasses import dataclass
from pathlib import Path

_LABEL = re.compile(r"^(\.L_\w+):")
_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z][A-Z0-9_.]*)(.*?);")
_TARGET = re.compile(r"`\((\.L_\w+)\)")
_ENDS = ("EXIT", "RET", "JMP", "BRX", "BRA")
"""What does not go on behind it, unless it has a predicate."""


@dataclass(frozen=True)
class Instruction:
    """One instruction: its operation with modifiers, and the indices of what may follow."""

    op: str
    next: tuple[int, ...]

    @property
    def name(self) -> str:
        """The operation without modifiers."""
        return self.op.partition(".")[0]


def find_tool(name: str) -> str | None:
    """A program of the CUDA toolkit, from PATH or from NVIDIA's wheels; None if there is none."""
    found = shutil.which(name)
    if found is not None:
        return found
    spec = importlib.util.find_spec("nvidia")
    for folder in spec.submodule_search_locations or [] if spec else []:
        for path in sorted(Path(folder).glob(f"*/bin/{name}")):
            return str(path)
    return None


def disassemble(tool: str, cubin: bytes, kernel: str, folder: Path) -> tuple[Instruction, ...]:
    """The instructions of one kernel of a cubin."""
    path = folder / "kernel.cubin"
    path.write_bytes(cubin)
    shown = subprocess.run([tool, "-c", path], capture_output=True, text=True, check=True).stdout
    return parse(shown, kernel)


def parse(shown: str, kernel: str) -> tuple[Instruction, ...]:
    """The same from the text of `nvdisasm -c`."""
    labels: dict[str, int] = {}
    found: list[tuple[str, bool, str | None]] = []
    is_inside = False
    for line in shown.splitlines():
        if line.split()[:1] == [".section"]:  # and not .sectioninfo, which is inside
            is_inside = f".text.{kernel}," in line
        elif is_inside and (label := _LABEL.match(line)) is not None:
            labels[label[1]] = len(found)
        elif is_inside and (instruction := _INSTRUCTION.match(line)) is not None:
            target = _TARGET.search(instruction[3]) if instruction[2].startswith("BRA") else None
            found.append((instruction[2], instruction[1] is not None, target and target[1]))
    instructions = []
    for i, (op, is_predicated, target) in enumerate(found):
        ends = op.partition(".")[0] in _ENDS and not is_predicated
        after = () if ends or i + 1 == len(found) else (i + 1,)
        jump = () if target is None else (labels[target],)
        instructions.append(Instruction(op, (*after, *jump)))
    return tuple(instructions)


def shortest_cycle(code: tuple[Instruction, ...], start: int) -> tuple[int, ...]:
    """The indices on the shortest way from an instruction back to itself; () if there is none."""
    before: dict[int, int] = {}
    waiting = deque([start])
    while waiting:
        at = waiting.popleft()
        for then in code[at].next:
            if then == start:
                way = [at]
                while way[-1] != start:
                    way.append(before[way[-1]])
                return tuple(reversed(way))
            if then not in before:
                before[then] = at
                waiting.append(then)
    return ()
