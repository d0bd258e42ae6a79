"""One run of a `score_mod` and a `mask_mod` with symbols for the indices and the score."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from typing import Any, Final, final

from attngen.diagnostics.diagnostic import AttnError
from attngen.flex.captured import Captured, is_array, name_arrays, with_stand_ins
from attngen.flex.errors import NotTraceable, WrongResult
from attngen.flex.functions import CREATING, call_library, name_of
from attngen.flex.graph import Graph
from attngen.flex.places import function_place
from attngen.flex.values import Row, Scalar, scalars_of, to_value
from attngen.frontend import ast
from attngen.ir.types import ScalarType
from attngen.record import record

__all__ = ["Trace", "trace"]

_BOOL, _INT, _FLOAT = ScalarType.BOOL, ScalarType.INT, ScalarType.FLOAT

_INDICES: Final = {"batch": "b", "head": "h", "q_idx": "q", "kv_idx": "kv"}
"""FlexAttention's indices, and the language's: `q_idx` counts rows from 0, as `q` does."""
_INDEX_BITS: Final = 2**31 - 1
_ABOUT: Final = frozenset(
    {".device", ".dtype", ".ndim", ".shape", "dim", "is_floating_point", "len", "numel", "size"}
)
"""What is asked about a tensor, whatever its contents."""
_KIND_TEXT: Final = {_BOOL: "a truth value", _INT: "an integer", _FLOAT: "a number"}


@final
@record(eq=False)
class Trace:
    """What the functions compute; `score` or `mask` is None where it changes nothing."""

    name: str
    score: ast.Expr | None
    mask: ast.Expr | None
    captured: tuple[Captured, ...]
    reads: tuple[ast.Index, ...]
    """Every read of a captured array, once."""
    variables: Mapping[int, str]
    """The Python variable that a node was stored in, by its id."""
    is_computed: bool
    """Whether the functions computed with tensors, whose contents may be in the trace."""


def trace(score_mod: Any, mask_mod: Any, *, device: Any = None) -> Trace:
    """Run the functions once; either may be None.

    Errors:  A261 an operation without words in the language; A262 `if`, `range` and the like
             on a traced value; A263 no function of five (four) arguments; A264 its result;
             A265 a captured array.  Whatever the functions raise themselves is left alone.
    """
    graph = Graph(device)
    indices = [
        Scalar(graph, ast.Name(name, _nowhere()), _INT, _INDEX_BITS) for name in _INDICES.values()
    ]
    score = mask = None
    names: list[str] = []
    if score_mod is not None:
        s = Scalar(graph, ast.Name("s", _nowhere()), _FLOAT)
        result = _run(graph, "score_mod", score_mod, (s, *indices))
        score = None if result is s else _as_score(result, score_mod)
        names.append(_name_of(score_mod))
    if mask_mod is not None:
        mask = _as_mask(_run(graph, "mask_mod", mask_mod, tuple(indices)), mask_mod)
        names.append(_name_of(mask_mod))
    name = "_".join(each for each in names if each) or "flex"
    captured, reads = tuple(graph.captured), tuple(graph.reads)
    return Trace(name, score, mask, captured, reads, graph.variables, graph.is_computed)


def _run(graph: Graph, argument: str, function: Any, symbols: tuple[Scalar, ...]) -> Any:
    _require_signature(argument, function, len(symbols))
    graph.names.update(name_arrays(function))
    known: dict[int, Any] = {}

    def stand_in(array: Any) -> Any:
        graph.names.setdefault(id(array), "captured")
        return known.setdefault(id(array), to_value(graph, array))

    traced = with_stand_ins(function, stand_in)
    with _watch_torch(graph):
        result = traced(*symbols)
    if isinstance(result, Row) and result.shape == (1,):
        result = result.items[0]
    if isinstance(result, Scalar):
        return result
    if isinstance(result, bool | int | float) or getattr(result, "shape", None) == ():
        return to_value(graph, result)
    expected = "one number" if argument == "score_mod" else "one truth value"
    found, advice = _describe_result(result)
    raise AttnError(
        WrongResult(_place(function), argument, found, expected, advice, "by this function")
    )


def _describe_result(result: Any) -> tuple[str, str | None]:
    """What a function returned that is no single value, and what would be one."""
    if result is None:
        return "nothing", "end it with `return`"
    shape = getattr(result, "shape", None)
    if isinstance(result, Row) or is_array(result):
        found = "a row" if shape is None or len(shape) == 1 else "several rows"
        sizes = " x ".join(map(str, shape or ()))
        advice = "give every dimension of a tensor an index, or reduce it, as by `.sum()`"
        return f"{found} of {sizes} elements", advice
    return f"a value of type {type(result).__name__}", None


def _as_score(result: Scalar, function: Any) -> ast.Expr:
    if result.kind is _BOOL:
        found, advice = "a truth value", "use `torch.where(keep, score, -float('inf'))`"
        error = WrongResult(_result_place(result, function), "score_mod", found, "a number", advice)
        raise AttnError(error)
    return result.node


def _as_mask(result: Scalar, function: Any) -> ast.Expr | None:
    if result.kind is not _BOOL:
        found, advice = _KIND_TEXT[result.kind], "compare it, for example with `!= 0`"
        error = WrongResult(
            _result_place(result, function), "mask_mod", found, "a truth value", advice
        )
        raise AttnError(error)
    return None if result.constant is True else result.node


def _result_place(result: Scalar, function: Any) -> Any:
    span = result.node.span
    return span if span.source.text else _place(function)


def _require_signature(argument: str, function: Any, count: int) -> None:
    names = ", ".join([*["score"] * (count - 4), *_INDICES])
    if not callable(function):
        found, advice = f"of type {type(function).__name__}", None
        if is_array(function) and argument == "mask_mod":
            advice = "a function can read it: `lambda b, h, q_idx, kv_idx: mask[q_idx, kv_idx]`"
        raise AttnError(NotTraceable(None, argument, f"({names})", found, advice))
    try:
        signature = inspect.signature(function)
        signature.bind(*range(count))
    except TypeError:
        shown = f"{_name_of(function) or 'a function'}{signature}"
        other, its_count = ("mask_mod", 4) if argument == "score_mod" else ("score_mod", 5)
        is_other = _takes(signature, its_count)
        advice = f"it has the arguments of a `{other}`" if is_other else None
        raise AttnError(
            NotTraceable(_place(function), argument, f"({names})", shown, advice)
        ) from None
    except ValueError:  # a builtin that does not tell
        return


def _takes(signature: inspect.Signature, count: int) -> bool:
    try:
        signature.bind(*range(count))
    except TypeError:
        return False
    return True


def _place(function: Any) -> Any:
    code = _code(function)
    return None if code is None else function_place(code)


def _name_of(function: Any) -> str:
    """The name in its `def`: what a factory writes into `__name__` may differ with each call."""
    code = _code(function)
    name = "" if code is None else code.co_name
    return name if name.isidentifier() and name.isascii() else ""


def _code(function: Any) -> Any:
    while isinstance(function, partial):
        function = function.func
    function = getattr(function, "__func__", function)
    return getattr(function, "__code__", None)


@cache
def _nowhere() -> Any:
    from attngen.diagnostics.span import Source

    return Source("<symbol>", "").span(0, 0)


def _are_numbers(arguments: Iterable[Any]) -> bool:
    """Whether no argument is an array, or holds one."""
    return not any(
        is_array(each) or (isinstance(each, list | tuple) and not _are_numbers(each))
        for each in arguments
    )


# ---- PyTorch -----------------------------------------------------------------------------


def _watch_torch(graph: Graph) -> AbstractContextManager[Any]:
    """While it lasts, PyTorch tells of every function that is called on a tensor."""
    if "torch" not in sys.modules:
        return nullcontext()
    watch: AbstractContextManager[Any] = _watcher()(graph)
    return watch


@cache
def _watcher() -> Callable[[Graph], Any]:
    from torch.overrides import TorchFunctionMode

    class Watcher(TorchFunctionMode):  # type: ignore[misc]
        """What involves a traced value is traced; the rest is computed as it stands."""

        def __init__(self, graph: Graph) -> None:
            super().__init__()
            self._graph = graph

        def __torch_function__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            options = kwargs or {}
            if any(True for _ in scalars_of((*args, *options.values()))):
                return call_library(function, args, options)
            name = name_of(function)
            is_new = name in CREATING
            is_of_numbers = is_new and _are_numbers((*args, *options.values()))
            if not is_of_numbers and name not in _ABOUT:
                self._graph.is_computed = True
            result = function(*args, **options)
            if is_new and result.shape == ():
                return to_value(self._graph, result.item())
            return result

    return Watcher
