"""What a start does not do: load what is rarely needed, or compile methods of values.

Times are measured in `benchmarks/startup.py`; these are the two things that made them long.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def run(code: str) -> list[str]:
    """The words that a fresh process prints."""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return done.stdout.split()


def test_rare_modules_are_not_loaded() -> None:
    loaded = run(
        "import sys, attngen\n"
        "kernel = attngen.compile('examples/t5.attn', dtype='fp32')\n"
        "kernel.render('sm_90a')\n"
        "print(*sys.modules)"
    )
    rare = ("click", "cuda", "cupy", "difflib", "importlib.resources", "rich", "torch", "zipfile")
    assert set(loaded) & set(rare) == set()


def test_values_are_records() -> None:
    """A dataclass whose constructor is compiled at the start takes half a millisecond of it."""
    compiled = run(
        "import sys, attngen.api, attngen.engines.cuda_engine\n"
        "for name, module in list(sys.modules.items()):\n"
        "    for found in list(vars(module).values()) if name.startswith('attngen') else ():\n"
        "        code = getattr(getattr(found, '__init__', None), '__code__', None)\n"
        "        if isinstance(found, type) and code and code.co_filename == '<string>':\n"
        "            print(found.__name__)"
    )
    made_in_every_call = {"Binding", "Outputs"}  # where a faster constructor counts
    assert set(compiled) == made_in_every_call
