"""The whole rewriting kit: children, rebuild, and folds that visit a shared node once.

No function here recurses, so depth is never a limit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TypeVar, assert_never

from attngen.ir.expr import (
    Binary,
    Call,
    Compare,
    Const,
    Expr,
    Let,
    Load,
    Logical,
    Negate,
    Not,
    Role,
    Select,
    Symbol,
    ToFloat,
)

__all__ = [
    "children",
    "fold_up",
    "postorder",
    "rebuild",
    "rewrite",
    "rewrite_all",
    "substitute",
    "symbols",
    "tensors",
]

T = TypeVar("T")


def children(e: Expr) -> tuple[Expr, ...]:
    """The operands of a node, in order."""
    match e:
        case Const() | Symbol():
            return ()
        case Load():
            return e.indices
        case Negate() | Not() | ToFloat():
            return (e.operand,)
        case Binary() | Compare():
            return (e.left, e.right)
        case Logical():
            return e.operands
        case Select():
            return (e.condition, e.then, e.otherwise)
        case Call():
            return e.arguments
        case Let():
            return (e.value,)
        case _:
            assert_never(e)


def rebuild(e: Expr, new: tuple[Expr, ...]) -> Expr:
    """The node with other operands; the same object when none differs."""
    if all(a is b for a, b in zip(children(e), new, strict=True)):
        return e
    match e:
        case Const() | Symbol():
            return e
        case Load():
            return replace(e, indices=new)
        case Negate() | Not() | ToFloat():
            return replace(e, operand=new[0])
        case Binary() | Compare():
            return replace(e, left=new[0], right=new[1])
        case Logical():
            return replace(e, operands=new)
        case Select():
            return replace(e, condition=new[0], then=new[1], otherwise=new[2])
        case Call():
            return replace(e, arguments=new)
        case Let():
            return replace(e, value=new[0])
        case _:
            assert_never(e)


def postorder(*roots: Expr) -> Iterator[Expr]:
    """Every node once, operands before the nodes that use them."""
    done: set[int] = set()
    stack: list[tuple[Expr, bool]] = [(root, False) for root in reversed(roots)]
    while stack:
        node, operands_done = stack.pop()
        if id(node) in done:
            continue
        if operands_done:
            done.add(id(node))
            yield node
        else:
            stack.append((node, True))
            stack.extend((child, False) for child in reversed(children(node)))


def fold_up(root: Expr, combine: Callable[[Expr, tuple[T, ...]], T]) -> T:
    """`combine(node, results of its operands)`, from the leaves to the root.

    A result is let go after its last use, so a fold over arrays holds few at a time.
    """
    order = list(postorder(root))
    uses = Counter(id(child) for node in order for child in children(node))
    results: dict[int, T] = {}
    for node in order:
        operands = tuple(results[id(child)] for child in children(node))
        results[id(node)] = combine(node, operands)
        for child in children(node):
            uses[id(child)] -= 1
            if not uses[id(child)]:
                results.pop(id(child), None)
    return results[id(root)]


def rewrite(root: Expr, rule: Callable[[Expr], Expr]) -> Expr:
    """Apply `rule` to every node, operands first; sharing and unchanged nodes are kept."""
    return rewrite_all((root,), rule)[0]


def rewrite_all(roots: tuple[Expr, ...], rule: Callable[[Expr], Expr]) -> tuple[Expr, ...]:
    """The same for several expressions; what they share with each other stays shared."""
    new: dict[int, Expr] = {}
    for node in postorder(*roots):
        new[id(node)] = rule(rebuild(node, tuple(new[id(child)] for child in children(node))))
    return tuple(new[id(root)] for root in roots)


def substitute(root: Expr, values: dict[str, Expr]) -> Expr:
    """Replace symbols by name."""

    def rule(node: Expr) -> Expr:
        return values.get(node.name, node) if isinstance(node, Symbol) else node

    return rewrite(root, rule)


def symbols(*roots: Expr, role: Role | None = None) -> set[str]:
    """Names of the symbols that occur, of one role or of all."""
    return {
        node.name
        for node in postorder(*roots)
        if isinstance(node, Symbol) and (role is None or node.role is role)
    }


def tensors(*roots: Expr) -> set[str]:
    """Names of the captured tensors that are read."""
    return {node.tensor for node in postorder(*roots) if isinstance(node, Load)}
