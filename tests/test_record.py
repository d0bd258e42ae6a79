"""Records behave as the frozen dataclasses that they are."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import (
    FrozenInstanceError,
    asdict,
    astuple,
    dataclass,
    field,
    fields,
    is_dataclass,
    replace,
)
from typing import Any, ClassVar

import pytest

from attngen.diagnostics.diagnostic import Diagnostic
from attngen.record import record


@record
class Point:
    """A place."""

    kind: ClassVar[str] = "point"
    x: int
    y: int = 0
    note: str = field(default="", compare=False, repr=False)

    @property
    def sum(self) -> int:
        return self.x + self.y


@dataclass(frozen=True)
class PlainPoint:
    kind: ClassVar[str] = "point"
    x: int
    y: int = 0
    note: str = field(default="", compare=False, repr=False)


@record(eq=False)
class Node:
    name: str
    children: tuple[Node, ...] = ()


@record(kw_only=True)
class Options:
    first: int
    second: int = 2


@record
class Named(Point):
    name: str = "p"


@record
class Nothing:
    pass


@record
class Shown:
    x: int

    def __repr__(self) -> str:
        return f"<{self.x}>"


class Wrong(Diagnostic):
    code = "A000"
    title = "`{name}` is wrong"
    calls: tuple[str, ...] = field(default=(), kw_only=True)
    name: str


def test_values_are_given_by_place_name_or_default() -> None:
    for point in (Point(1, 2, "n"), Point(1, y=2, note="n"), Point(note="n", y=2, x=1)):
        assert (point.x, point.y, point.note) == (1, 2, "n")
    assert astuple(Point(1)) == (1, 0, "")
    assert astuple(Point(1, note="n")) == (1, 0, "n")
    assert astuple(Options(first=1)) == (1, 2)
    assert Nothing() == Nothing()


@pytest.mark.parametrize(
    "make",
    [
        lambda: Point(),
        lambda: Point(y=1),
        lambda: Point(1, 2, "n", 4),
        lambda: Point(1, x=2),
        lambda: Point(1, z=2),
        lambda: Point(y=1, note="n", z=2),
        lambda: Options(1),
        lambda: Nothing(1),
        lambda: Wrong(None, "name", ("call",)),
    ],
)
def test_other_arguments_are_refused(make: Callable[[], object]) -> None:
    with pytest.raises(TypeError, match=r"^\w+ takes "):
        make()


def test_nothing_changes_a_record() -> None:
    point: Any = Point(1)
    for change in (
        lambda: setattr(point, "x", 2),
        lambda: setattr(point, "z", 2),
        lambda: delattr(point, "x"),
    ):
        with pytest.raises(FrozenInstanceError):
            change()
    assert point == Point(1)


@pytest.mark.parametrize(
    ("one", "other"), [((1, 2), (1, 2)), ((1, 2), (1, 3)), ((1, 2, "a"), (1, 2, "b"))]
)
def test_they_compare_as_dataclasses_do(one: tuple[Any, ...], other: tuple[Any, ...]) -> None:
    assert (Point(*one) == Point(*other)) == (PlainPoint(*one) == PlainPoint(*other))
    assert (hash(Point(*one)) == hash(Point(*other))) == (
        hash(PlainPoint(*one)) == hash(PlainPoint(*other))
    )


def test_another_class_is_never_equal() -> None:
    assert Point(1) != PlainPoint(1)
    assert Point(1) != Named(1)
    assert Point(1) != (1, 0)


def test_without_eq_each_equals_itself_only() -> None:
    node = Node("a")
    assert node == node
    assert node != Node("a")
    assert len({node, node, Node("a")}) == 2


def test_texts_are_those_of_a_dataclass() -> None:
    assert repr(Point(1, 2, "n")) == repr(PlainPoint(1, 2, "n")).removeprefix("Plain")
    assert (
        repr(Node("a", (Node("b"),))) == "Node(name='a', children=(Node(name='b', children=()),))"
    )
    assert repr(Shown(1)) == "<1>"
    assert Point.__doc__ == "A place."
    assert Node.__doc__ == "Node"


def test_the_tools_of_dataclasses_take_them() -> None:
    point = Point(1, 2, "n")
    assert is_dataclass(Point)
    assert [f.name for f in fields(Point)] == ["x", "y", "note"]
    assert asdict(point) == {"x": 1, "y": 2, "note": "n"}
    assert astuple(replace(point, y=5)) == (1, 5, "n")
    with pytest.raises(TypeError):
        replace(point, z=5)


@pytest.mark.parametrize(
    "copied",
    [
        copy.copy,
        copy.deepcopy,
        *(lambda x, n=n: pickle.loads(pickle.dumps(x, n)) for n in range(6)),
    ],
)
def test_copies_and_pickles(copied: Callable[[Any], Any]) -> None:
    for value in (Point(1, 2, "n"), Named(1), Nothing(), Wrong(None, "x", calls=("a",))):
        assert copied(value) == value
        assert astuple(copied(value)) == astuple(value)
    assert copied(Node("a", (Node("b"),))).children[0].name == "b"


def test_they_match_by_place() -> None:
    match Point(1, 2):
        case Point(x, y):
            assert (x, y) == (1, 2)


def test_fields_are_inherited() -> None:
    named = Named(1, 2, "note", "name")
    assert [f.name for f in fields(Named)] == ["x", "y", "note", "name"]
    assert (named.sum, named.name, named.kind) == (3, "name", "point")
    assert Named(1) == Named(1, 0, "other")
    assert Named(1) != Named(1, name="q")


def test_a_diagnostic_is_a_record_by_inheritance() -> None:
    error = Wrong(None, "x")
    assert error.message() == "`x` is wrong"
    assert error == Wrong(None, "x", calls=())
    assert replace(error, calls=("a",)).calls == ("a",)
    assert [f.name for f in fields(Wrong)] == ["span", "calls", "name"]
