"""Run the command line inside of this process, and look at what it said."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from attngen.cli import main

__all__ = ["CAUSAL", "DOCUMENTS", "Result", "run", "run_process", "write"]

CAUSAL = """\
attention causal_lm {
    dtype     fp32
    head_dim  16
    mask      kv <= qpos
    output    o, lse
}
"""

DOCUMENTS = """\
attention documents {
    dtype     bf16
    head_dim  32
    heads     q = 4, kv = 2
    const     W = 32
    param     cap : float = 20.0
    tensor    doc : int32[B, Skv]

    score     softcap(s, cap)
    mask      window(left = W - 1) and doc[b, qpos] == doc[b, kv]
    output    o, lse
}
"""


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str


def run(*arguments: Any, stdin: bytes | None = None) -> Result:
    """`attngen arguments…`, with its streams captured."""
    runner = CliRunner()
    with runner.isolation(input=stdin) as streams:
        code = main([str(argument) for argument in arguments])
        sys.stdout.flush()
        sys.stderr.flush()
        out, err = (stream.getvalue().decode("utf-8", "replace") for stream in streams[:2])
    assert "Traceback" not in out + err
    return Result(code, out, err)


def run_process(*arguments: Any, **environment: str) -> Result:
    """The same in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "attngen", *map(str, arguments)],
        capture_output=True,
        env={**os.environ, **environment},
        timeout=300,
        check=False,
    )
    return Result(done.returncode, done.stdout.decode(), done.stderr.decode())


def write(folder: Path, text: str, name: str = "spec.attn") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path
