"""What functions were traced to, kept for as long as a trace would give the same.

`guards.py` says when that is.  Captured arrays are not kept: each call brings its own, found at the
same places of its functions, so that a new closure over other tensors is served as well.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Hashable
from typing import Any, Final, Generic, NamedTuple, Protocol, Self, TypeVar, final

from attngen.flex.guards import Guard, UnguardedError, make_guard
from attngen.flex.trace import Trace

__all__ = ["Traces"]

MOST_KEYS: Final = 256
MOST_OF_A_KEY: Final = 16
"""Traces of one code, such as for several lengths of what it captures; the oldest goes."""
MOST_IN_VAIN: Final = 32
"""Traces one after the other of which none was used again: then no more of them are kept."""


class _Made(Protocol):
    def without_arrays(self) -> Self: ...


M = TypeVar("M", bound=_Made)


class _Kept(NamedTuple, Generic[M]):
    """`places` says where among the arrays that a guard finds each captured one is."""

    guard: Guard
    made: M
    places: tuple[int, ...]


class _OfKey(Generic[M]):
    """The traces of functions of one code, the last one used first."""

    def __init__(self) -> None:
        self.kept: list[_Kept[M]] = []
        self.in_vain = 0


@final
class Traces(Generic[M]):
    """Traces and what was made of them.  Threads may share it."""

    def __init__(self) -> None:
        self._keys: dict[Hashable, _OfKey[M]] = {}
        self._lock = threading.Lock()

    def clear(self) -> None:
        with self._lock:
            self._keys.clear()

    def find(
        self,
        functions: tuple[Any, Any],
        options: Hashable,
        trace: Callable[[], Trace],
        make: Callable[[Trace], M],
    ) -> tuple[M, list[Any] | None]:
        """What `make` makes of the functions' trace, now or before, and the captured arrays.

        The arrays are None where they are in what was made.

        options:  whatever else the trace depends on, and what is made of it.
        """
        key = (_identity(functions[0]), _identity(functions[1]), options)
        of_key = self._keys.get(key)
        if of_key is not None:
            for at, kept in enumerate(of_key.kept):
                found = kept.guard.arrays_of(functions)
                if found is not None:
                    of_key.in_vain = 0
                    if at:
                        self._put_first(of_key, kept)
                    return kept.made, [found[place] for place in kept.places]
            if of_key.in_vain >= MOST_IN_VAIN:
                return make(trace()), None
        try:
            guard = make_guard(functions)
        except UnguardedError:
            guard = None
        traced = trace()
        made = make(traced)
        self._keep(key, guard, functions, traced, made)
        return made, None

    def _put_first(self, of_key: _OfKey[M], kept: _Kept[M]) -> None:
        with self._lock:
            of_key.kept = [kept, *(each for each in of_key.kept if each is not kept)]

    def _keep(
        self,
        key: Hashable,
        guard: Guard | None,
        functions: tuple[Any, Any],
        traced: Trace,
        made: M,
    ) -> None:
        places = None
        if guard is not None and not traced.is_computed:
            places = _places(guard, functions, traced)
        with self._lock:
            of_key = self._keys.get(key)
            if of_key is None:
                while len(self._keys) >= MOST_KEYS:
                    del self._keys[next(iter(self._keys))]
                of_key = self._keys[key] = _OfKey()
            of_key.in_vain += 1
            if guard is not None and places is not None:
                kept = _Kept(guard, made.without_arrays(), places)
                of_key.kept = [kept, *of_key.kept[: MOST_OF_A_KEY - 1]]


def _places(guard: Guard, functions: tuple[Any, Any], traced: Trace) -> tuple[int, ...] | None:
    """None where the functions changed while they were traced, or made an array themselves."""
    arrays = guard.arrays_of(functions)
    if arrays is None:
        return None
    at = {id(array): place for place, array in enumerate(arrays)}
    if any(id(each.array) not in at for each in traced.captured):
        return None
    return tuple(at[id(each.array)] for each in traced.captured)


def _identity(function: Any) -> int:
    """A number that closures of the same code share; the guard looks closer."""
    while type(function) is functools.partial:
        function = function.func
    function = getattr(function, "__func__", function)
    code = getattr(function, "__code__", None)
    return id(type(function) if code is None else code)
