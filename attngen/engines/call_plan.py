"""The steady call: a GPU call that is like an earlier one starts without its checks.

A full call looks at its arrays, checks them against the declaration, chooses a specialisation
and fills the argument struct, in 40 to 150 microseconds.  All but addresses and params follows
from few facts, the call's key.  So the first call with a key leaves a plan: the struct's bytes,
and the launches.  The next one allocates its outputs, puts its own addresses and params into a
copy of the bytes, and starts.

    read     arrays, params                → Call: key, addresses, checked params, plan if any
    repeat   plan, Call                    → outputs, launched; None where the plan cannot tell
    keep     Call, what a full call did    → plan

Whatever is unusual is None, and then the full call runs: it finds the error, and its words.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import partial
from operator import itemgetter
from struct import Struct, calcsize
from typing import TYPE_CHECKING, Any, Final, NamedTuple, final

from attngen.backend.device import (
    ArrayView,
    allocate,
    find_library,
    may_be_freed_in_capture,
    read,
)
from attngen.binding import Binding, IntegerCheck, ParamCheck
from attngen.codegen.arguments import Field
from attngen.engines.outputs import Encode, encode_map, encode_tile_map, reach
from attngen.ir.attention import Attention
from attngen.ir.program import TensorBox, TileBox
from attngen.record import record

if TYPE_CHECKING:
    from attngen.engines.cuda_engine import Launched

__all__ = ["Call", "CallPlan", "CallPlans", "DoneCall", "KnownMaps", "NewArray"]

Array = Any

MOST_PLANS: Final = 64
"""Plans of one kernel, about 4 KiB each; beyond it the oldest goes."""

MOST_MAPS: Final = 64
"""Tensor maps of one operand in one plan, 128 bytes each; beyond it all of them go."""


class NewArray(NamedTuple):
    """An array that a call allocates: the struct's member that points to it, shape and dtype."""

    member: str
    shape: tuple[int, ...]
    dtype: str

    def allocate(self, like: Array) -> Array:
        return allocate(self.shape, self.dtype, like)


class Call(NamedTuple):
    """One call as plans see it.

    `pointers` are those of q, k, v, the captured tensors in the order of their declaration, and
    `out` where it is given; `params` are checked, in the order of theirs; `plan` is that of an
    earlier call with the same key.
    """

    key: Hashable
    pointers: tuple[int, ...]
    params: tuple[bool | int | float, ...]
    plan: CallPlan | None


@final
class CallPlans:
    """The plans of one kernel, by the key of the calls they serve; threads may share them."""

    def __init__(self, attention: Attention, integers: IntegerCheck) -> None:
        self._tensors = tuple(tensor.name for tensor in attention.tensors)
        self._params = tuple(ParamCheck(param) for param in attention.params)
        self._names = frozenset((*self._tensors, *(param.name for param in self._params)))
        self._integers = integers
        self._plans: dict[Hashable, CallPlan] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._plans)

    def read(
        self,
        q: Array,
        k: Array,
        v: Array,
        named: Mapping[str, Any],
        out: Array | None,
        layout: str,
        return_lse: bool,
    ) -> Call | None:
        """What a plan needs to know of a call; None for one that no plan can serve."""
        try:
            return self._read(q, k, v, named, out, layout, return_lse)
        except Exception:  # an error of the caller, which the full call explains
            return None

    def _read(
        self,
        q: Array,
        k: Array,
        v: Array,
        named: Mapping[str, Any],
        out: Array | None,
        layout: str,
        return_lse: bool,
    ) -> Call | None:
        if named and not named.keys() <= self._names:
            return None
        arrays = [q, k, v]
        if self._tensors:
            arrays += [named[name] for name in self._tensors]
        if out is not None:
            arrays.append(out)
        pointers, facts = [], []
        for array in arrays:
            found = read(array)
            if found is None:
                return None
            pointer, its_facts = found
            pointers.append(pointer)
            facts.append(its_facts)
        params: tuple[bool | int | float, ...] = ()
        if self._params:
            params = tuple([check(named.get(check.name, check.default)) for check in self._params])
        # What a call depends on, beside its addresses and params: the type, dtype, device, shape
        # and strides of each array and how far it is aligned, which arrays there are, and what
        # else the caller chose.  Params are checked here, each by itself; they belong to the key
        # only where their values and the sizes must be looked at together.
        key = (
            layout,
            bool(return_lse),
            out is None,
            tuple(facts),
            params if params and self._integers.is_needed(params) else None,
        )
        return Call(key, tuple(pointers), params, self._plans.get(key))

    def keep(self, call: Call, done: DoneCall) -> None:
        """Serve calls like this one, which just ran in full, with a plan from now on."""
        looks = [read(array) for array in done.new.values()]
        if None in looks:
            return
        plan = CallPlan(call, done, [look for look in looks if look is not None])
        with self._lock:
            while len(self._plans) >= MOST_PLANS:
                del self._plans[next(iter(self._plans))]
            self._plans[call.key] = plan


@final
class KnownMaps:
    """The tensor maps of an array, by its address: to encode one takes microseconds.

    Threads may share one; two that meet a new address at once both encode it.
    """

    def __init__(self, view: ArrayView, encode: Callable[[ArrayView], bytes]) -> None:
        self._view, self._encode = view, encode
        self._maps: dict[int, bytes] = {}

    def find(self, pointer: int) -> bytes:
        found = self._maps.get(pointer)
        if found is None:
            found = self._encode(self._view._replace(pointer=pointer))
            if len(self._maps) >= MOST_MAPS:
                self._maps.clear()
            self._maps[pointer] = found
        return found


@final
@record
class DoneCall:
    """What a full call launched.

    boxes, tile_boxes:  of its tensor maps.
    new:     what it allocated.
    out:     the caller's own array for `o`, if any.
    wanted:  the members whose arrays it returned, in order.
    """

    launched: Launched
    boxes: tuple[TensorBox, ...]
    tile_boxes: tuple[TileBox, ...]
    fields: tuple[Field, ...]
    binding: Binding
    new: Mapping[NewArray, Array]
    out: ArrayView | None
    wanted: tuple[str, ...]


@final
class CallPlan:
    """What the calls of one key have in common; it never changes, and holds no array."""

    def __init__(self, call: Call, done: DoneCall, looks: Sequence[tuple[int, Hashable]]) -> None:
        """`looks` are those at the arrays that the call allocated."""
        binding, members = done.binding, [array.member for array in done.new]
        given = {"q": binding.q, "k": binding.k, "v": binding.v}
        given |= {f"t_{name}": view for name, view in binding.tensors.items()}
        if done.out is not None:
            given["o"] = done.out
        self._ready, self._block = done.launched
        self._device = self._ready[0].device.index
        library = find_library(binding.q.owner, "q")  # that of every call: its type is in the key
        self._allocate, self._current_stream = library.allocate, library.current_stream
        self._new = [
            (new.shape, new.dtype, look[1]) for new, look in zip(done.new, looks, strict=True)
        ]
        self._spans = [_span(view) for view in given.values()]
        self._returned = [(*members, "o").index(member) for member in done.wanted]
        encode, order = self._ready[0].driver.encode_tensor_map, list(given)
        maps = [*_operand_maps(done, encode), *_tile_maps(done, encode)]
        self._maps = [(order.index(each.array), each.known) for each in maps]
        changing = [*given, *members, None]  # null stands behind them
        changing += [each.member for each in maps]
        changing += [f"p_{name}" for name in binding.params]
        self._pack, self._in_order, self._constants = _lay_out(done.fields, self._block, changing)
        assert self._fill_block(call, [pointer for pointer, _ in looks]) == self._block

    def repeat(self, call: Call, like: Array, out: Array | None) -> Array | None:
        """The results, launched; None, with nothing launched, where a full call must decide.

        `like` is q, for the library of new arrays and its current stream.

        Errors:  A612, A618 of the launch.
        """
        if out is not None and self._may_overlap(call.pointers):
            return None
        try:
            arrays, pointers = [], []
            for shape, dtype, facts in self._new:
                array = self._allocate(shape, dtype, like)
                found = read(array)
                if found is None or found[1] != facts:
                    return None
                arrays.append(array)
                pointers.append(found[0])
            block = self._fill_block(call, pointers)
            stream = self._current_stream(self._device, like)
            if len(self._ready) > 1 and self._must_stay(stream, like):
                return None
        except Exception:  # the full call meets it again, and explains it
            return None
        for launch in self._ready:
            launch.start(stream, block)
        if out is not None:
            arrays.append(out)
        if len(self._returned) == 1:
            return arrays[self._returned[0]]
        return tuple([arrays[i] for i in self._returned])

    def _must_stay(self, stream: int, like: Array) -> bool:
        """Whether a workspace would have to outlive the call: a graph is captured."""
        return self._ready[0].driver.is_capturing(stream) and not may_be_freed_in_capture(like)

    def _fill_block(self, call: Call, new: list[int]) -> bytes:
        """The argument struct with this call's addresses and params; null where there is none."""
        pointers = call.pointers
        maps = [known.find(pointers[operand]) for operand, known in self._maps]
        values = (*pointers, *new, 0, *maps, *call.params, *self._constants)
        return self._pack(*self._in_order(values))

    def _may_overlap(self, pointers: tuple[int, ...]) -> bool:
        """Whether the range of `out`, the last array, meets that of an input."""
        *inputs, out = pointers
        low, high = self._spans[-1]
        begin, end = out + low, out + high
        for pointer, (its_low, its_high) in zip(inputs, self._spans, strict=False):
            if begin < pointer + its_high and pointer + its_low < end:
                return True
        return False


class _Map(NamedTuple):
    """A member of the struct that is a tensor map, and the member that points to its array."""

    member: str
    array: str
    known: KnownMaps


def _operand_maps(done: DoneCall, encode: Encode) -> Iterator[_Map]:
    binding = done.binding
    views = {"q": binding.q, "k": binding.k, "v": binding.v}
    for box in done.boxes:
        to_bytes = partial(encode_map, box, element=binding.dtype, encode=encode)
        yield _Map(f"map_{box.operand}", box.operand, KnownMaps(views[box.operand], to_bytes))


def _tile_maps(done: DoneCall, encode: Encode) -> Iterator[_Map]:
    for box in done.tile_boxes:
        to_bytes = partial(encode_tile_map, box, encode=encode)
        known = KnownMaps(done.binding.tensors[box.tensor], to_bytes)
        yield _Map(f"map_{box.value}", f"t_{box.tensor}", known)


def _span(view: ArrayView) -> tuple[int, int]:
    """The bytes that a view may touch, from its pointer on."""
    begin, end = reach(view)
    return begin - view.pointer, end - view.pointer


def _lay_out(
    fields: Sequence[Field], block: bytes, changing: Sequence[str | None]
) -> tuple[Callable[..., bytes], Callable[[Sequence[Any]], Any], tuple[bytes, ...]]:
    """How a struct is packed of what changes and of the bytes between, which stay.

    changing:  the members that change, None for the null of all addresses that are not there.
    Returns:   the packer; what brings the values of `changing`, with the constants behind them,
               into its order; and the constants.
    """
    places = {name: place for place, name in enumerate(changing)}
    formats, end = ["<"], 0
    order: list[int] = []
    constants: list[bytes] = []

    def keep(begin: int, stop: int) -> None:
        if begin < stop:
            formats.append(f"{stop - begin}s")
            order.append(len(changing) + len(constants))
            constants.append(block[begin:stop])

    for field in fields:
        is_address = field.format == "Q"
        if field.name not in places and not is_address:
            continue
        keep(end, field.offset)
        formats.append(field.format)
        order.append(places.get(field.name, places[None]))
        end = field.offset + calcsize(f"<{field.format}")
    keep(end, len(block))
    return Struct("".join(formats)).pack, itemgetter(*order), tuple(constants)
