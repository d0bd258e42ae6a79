"""Compiled kernels on disk: text, target, options and compiler in, machine code out.

An entry is named by the digest of everything that determines its content, so one that is found
is right.  No entry names a path or a machine: the directory can be copied.
"""

from __future__ import annotations

import json

from attngen import disk_cache
from attngen.backend.nvrtc import (
    FIXED_OPTIONS,
    Compiled,
    Compiler,
    Emit,
    compile_cuda,
    load_nvrtc,
)
from attngen.disk_cache import CacheWarning, DiskCache, open_cache
from attngen.targets import Target

__all__ = ["CacheWarning", "DiskCache", "compile_cached", "make_key", "open_cache"]

_SCHEMA = "attngen-kernel/1"  # changes when the meaning of a key or the layout of an entry does


def compile_cached(
    source: str,
    *,
    name: str,
    target: Target,
    options: tuple[str, ...] = (),
    emit: Emit = "cubin",
    context: tuple[str, ...] = (),
    compiler: Compiler | None = None,
    disk: DiskCache | None = None,
) -> Compiled:
    """`compile_cuda`, unless the disk cache has the result already.

    `context` are further facts that must be the same for an entry to be used.

    Errors:  those of `compile_cuda`.
    """
    compiler = compiler or load_nvrtc()
    disk = disk or open_cache()

    def build() -> bytes:
        compiled = compile_cuda(
            source, name=name, target=target, options=options, emit=emit, compiler=compiler
        )
        return _pack(compiled)

    if disk is None:
        return _unpack(build())
    all_options = (*FIXED_OPTIONS, *options)
    key = make_key(source, target.name, all_options, compiler.build(), emit, context)
    content = disk.load_or_build(key, build)
    try:
        return _unpack(content)
    except (ValueError, KeyError, TypeError):  # whole, but not written by this program
        disk.warn_damaged(key)
        content = build()
        disk.store(key, content)
        return _unpack(content)


def make_key(
    source: str,
    target: str,
    options: tuple[str, ...],
    compiler_version: str,
    emit: Emit,
    context: tuple[str, ...] = (),
) -> str:
    """The name of a compilation: equal exactly when all of its inputs are equal."""
    lists = json.dumps([options, context])
    return disk_cache.make_key(_SCHEMA, source, target, lists, compiler_version, emit)


# ---- a compilation as one blob: a line of JSON, then the binary --------------------------


def _pack(compiled: Compiled) -> bytes:
    facts = {
        "compiler_version": compiled.compiler_version,
        "emit": compiled.emit,
        "log": compiled.log,
        "target": compiled.target,
    }
    return json.dumps(facts, sort_keys=True).encode() + b"\n" + compiled.binary


def _unpack(content: bytes) -> Compiled:
    line, _, binary = content.partition(b"\n")
    facts = json.loads(line)
    return Compiled(binary, facts["log"], facts["compiler_version"], facts["target"], facts["emit"])
