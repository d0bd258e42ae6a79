"""Digests that name what an attention variant computes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from hashlib import sha256
from itertools import count

from attngen.ir.attention import Attention, TensorDim
from attngen.ir.expr import Expr, Let, Load, Role, Symbol
from attngen.ir.printer import print_attention
from attngen.ir.traverse import rewrite_all

__all__ = ["digest_attention", "digest_operation"]


def digest_attention(attention: Attention) -> str:
    """SHA-256 of the canonical text, in hexadecimal."""
    return sha256(print_attention(attention).encode()).hexdigest()


def digest_operation(attention: Attention) -> str:
    """The same for variants that differ in names and in defaults of params only.

    Those have the same machine code.  The order of declarations counts, for it is that of the
    argument struct.
    """
    return digest_attention(_without_names(attention))


def _without_names(attention: Attention) -> Attention:
    """The variant as if its author had numbered everything.

    attention local { param w : int = 64; mask qpos - kv < w }
        →   attention operation { param p1 : int; mask qpos - kv < p1 }
    """
    params = _number("p", (param.name for param in attention.params))
    tensors = _number("t", (tensor.name for tensor in attention.tensors))
    sizes = _number("n", attention.named_sizes)
    lets = count(1)

    def rename(node: Expr) -> Expr:
        match node:
            case Symbol(name, Role.PARAM):
                return replace(node, name=params[name])
            case Symbol(name, Role.SIZE):
                return replace(node, name=sizes.get(name, name))
            case Load(name):
                return replace(node, tensor=tensors[name])
            case Let():
                return replace(node, name=f"let{next(lets)}")
            case _:
                return node

    renamed = attention.with_expressions(rewrite_all(attention.expressions(), rename))
    return replace(
        renamed,
        name="operation",
        params=tuple(replace(p, name=params[p.name], default=None) for p in attention.params),
        tensors=tuple(
            replace(t, name=tensors[t.name], dims=_rename_dims(t.dims, sizes))
            for t in attention.tensors
        ),
    )


def _number(letter: str, names: Iterable[str]) -> dict[str, str]:
    return {name: f"{letter}{i}" for i, name in enumerate(names, 1)}


def _rename_dims(dims: tuple[TensorDim, ...], sizes: Mapping[str, str]) -> tuple[TensorDim, ...]:
    return tuple(replace(dim, size=sizes.get(str(dim.size), dim.size)) for dim in dims)
