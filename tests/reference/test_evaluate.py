"""What an expression is worth: one test for every rule of the language."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from attngen.diagnostics.diagnostic import AttnError
from attngen.diagnostics.span import Source
from attngen.frontend import ast
from attngen.frontend.parse import parse
from attngen.oracle.errors import IndexOutside, IntegerOverflow, Meaningless
from attngen.oracle.evaluate import Scope, evaluate
from attngen.oracle.values import Value, raise_faults


def scope_of(definitions: str = "", **names: Any) -> Scope:
    """Arrays of one dimension or more become tensors when their name starts with `t_`."""
    known = {}
    if definitions:
        file = parse(Source("definitions.attn", definitions))
        known = {d.name: d for d in file.items if isinstance(d, ast.Definition)}
    scope = Scope({"kv": Value(np.arange(4)), "Skv": Value(np.int64(4))}, known)
    for name, value in names.items():
        if name.startswith("t_"):
            scope.tensors[name] = np.asarray(value)
        elif isinstance(value, Value):
            scope.names[name] = value
        else:
            scope.names[name] = Value(np.asarray(value))
    return scope


def expression(text: str) -> ast.Expr:
    file = parse(Source("test.attn", f"attention t {{ score {text} }}"))
    (block,) = file.items
    assert isinstance(block, ast.Attention)
    (score,) = block.statements
    assert isinstance(score, ast.Score)
    return score.value


def value_of(text: str, definitions: str = "", *, needed: Any = True, **names: Any) -> Any:
    value = evaluate(expression(text), scope_of(definitions, **names))
    raise_faults(value, np.asarray(needed), {})
    return value.data


def error_of(text: str, definitions: str = "", **names: Any) -> Any:
    with pytest.raises(AttnError) as error:
        value_of(text, definitions, **names)
    return error.value.diagnostics[0]


# ---- operators ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("-2**2", -4),
        ("2**-1", 0.5),
        ("2**3**2", 512),
        ("2**62", 2**62),
        ("3**0", 1),
        ("0**2", 0),
        ("(-1)**1000001", -1),
        ("7 - 2 - 1", 4),
        ("2 + 3 * 4 % 5", 4),
        ("-7 // 2", -4),
        ("7 // -2", -4),
        ("-7 % 3", 2),
        ("7 % -3", -2),
        ("5 // 0", 0),
        ("-5 % 0", 0),
        ("5 / 2", 2.5),
        ("-5 / 2", -2.5),
        ("1 / 0", math.inf),
        ("7.5 // 2", 3.0),
        ("-7.5 % 2", 0.5),
        ("not 1 < 2 or 2 < 3", True),
        ("1 < 3 > 2", True),
        ("0 < 2 < 2", False),
        ("1 < 2 == true", None),
        ("(1 < 2) == true", True),
        ("true and false or true", True),
        ("+3", 3),
        ("inf - 1", math.inf),
        ("1 < nan", False),
        ("nan != nan", True),
        ("0.1", float(np.float32(0.1))),
        ("1e-45", float(np.float32(1e-45))),
        ("9007199254740993 - 1", 9007199254740992),
    ],
)
def test_operators(text: str, right: Any) -> None:
    if right is None:
        assert isinstance(error_of(text), Meaningless)
        return
    found = value_of(text)
    assert found == right
    assert np.asarray(found).dtype.kind == {bool: "b", int: "i", float: "f"}[type(right)]


def test_powers_by_an_index_are_floats() -> None:
    found = value_of("2**(kv * 30 - 1)")
    assert found.dtype == np.float64
    assert found.tolist() == [0.5, 2.0**29, 2.0**59, 2.0**89]


def test_integers_follow_python() -> None:
    numbers = [-9, -4, -3, -1, 0, 1, 2, 3, 8]
    a, b = np.meshgrid(numbers, [n for n in numbers if n != 0])
    found = value_of("a // b", needed=True, a=a, b=b), value_of("a % b", needed=True, a=a, b=b)
    for x, y, quotient, rest in zip(a.flat, b.flat, found[0].flat, found[1].flat, strict=True):
        assert (int(quotient), int(rest)) == divmod(int(x), int(y))


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("exp(1)", math.e),
        ("exp2(3)", 8.0),
        ("log(exp(2))", 2.0),
        ("log2(8)", 3.0),
        ("sqrt(9)", 3.0),
        ("rsqrt(4)", 0.5),
        ("tanh(0.5)", math.tanh(0.5)),
        ("sigmoid(0)", 0.5),
        ("sigmoid(-1000)", 0.0),
        ("sigmoid(1000)", 1.0),
        ("floor(-1.5)", -2),
        ("floor(-1000.5)", -1001),
        ("floor(-(2.0**63))", -(2**63)),
        ("floor(7)", 7),
        ("abs(-3)", 3),
        ("abs(-2.5)", 2.5),
        ("min(3, 1, 2)", 1),
        ("max(3, 1.5)", 3.0),
        ("min(nan, 2.0)", math.nan),
        ("max(2.0, nan, 3.0)", math.nan),
        ("clamp(7, 0, 5)", 5),
        ("clamp(-7, 0, 5)", 0),
        ("clamp(nan, 1.0, 5.0)", math.nan),
        ("where(1 < 2, 3, 4.5)", 3.0),
        ("bit(5, 0)", True),
        ("bit(5, 1)", False),
        ("bit(-1, 63)", True),
        ("bit(-1, 64)", False),
        ("bit(1, -1)", False),
    ],
)
def test_functions(text: str, right: Any) -> None:
    found = value_of(text)
    assert found == pytest.approx(right, rel=1e-15, nan_ok=True)
    assert np.asarray(found).dtype.kind == {bool: "b", int: "i", float: "f"}[type(right)]


@pytest.mark.parametrize(
    "text",
    [
        "1 + true", "not 1", "1 and true", "t_x[0.5]", "t_x[true]", "t_x[0, 0]", "t_y[0]", "t_x",
        "nowhere", "sqr(2)", "exp(1, 2)", "exp(x = 1)", "where(1, 2, 3)", "where(true, 1, false)",
        "true < false", "bit(1.0, 0)", "-true", "min(true, false)",
    ],
)  # fmt: skip
def test_what_has_no_meaning(text: str) -> None:
    assert isinstance(error_of(text, t_x=[1, 2]), Meaningless)


# ---- integers are mathematical -----------------------------------------------------------

LARGEST = 2**63 - 1


@pytest.mark.parametrize(
    "text",
    [
        "a + 1", "a - -1", "a * 2", "-(-a - 1)", "abs(-a - 1)", "(-a - 1) // -1", "2**63",
        "3**1000000000", "9223372036854775808", "floor(2.0**63)", "floor(nan)", "floor(-inf)",
        "3037000500 * 3037000500",
    ],
)  # fmt: skip
def test_integers_never_wrap(text: str) -> None:
    assert isinstance(error_of(text, a=LARGEST), IntegerOverflow)


def test_integers_overflow_pair_by_pair() -> None:
    assert value_of("where(kv < 2, kv * 2**62, -1)").tolist() == [0, 2**62, -1, -1]
    for text in ("kv * 2**62", "kv + a - 1", "-kv - a", "where(kv < 3, kv * 2**62, 0)"):
        assert isinstance(error_of(text, a=LARGEST), IntegerOverflow)


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("a + 0", LARGEST),
        ("-a - 1", -LARGEST - 1),
        ("(-a - 1) % -1", 0),
        ("where(a < 0, a + 1, 5)", 5),
        ("3037000499 * 3037000499", 3037000499**2),
        ("-(2**62) * 2", -(2**63)),
    ],
)
def test_integers_reach_the_ends_of_64_bits(text: str, right: int) -> None:
    assert int(value_of(text, a=LARGEST)) == right


# ---- laziness ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "where(i < 3, t_x[i], 0)",
        "where(i >= 3, 0, t_x[i])",
        "where(i < 3 and t_x[i] > 0, 1, 0)",
        "where(i >= 3 or t_x[i] > 0, 1, 0)",
        "where(0 > 2 - i < t_x[i], 1, 2)",
        "where(false, t_x[t_x[99]], 7)",
        "where(i < 3, where(i < 9, t_x[i], t_x[77]), 0)",
    ],
)
def test_a_read_that_is_not_taken_does_not_happen(text: str) -> None:
    i = np.arange(6) if "2 - i" not in text else np.arange(3)
    value_of(text, i=i, t_x=np.array([5, 6, 7]))


@pytest.mark.parametrize(
    "text",
    [
        "t_x[i]",
        "where(i < 4, t_x[i], 0)",
        "where(t_x[i] > 0, 1, 1)",
        "where(t_x[i] > 0 and i < 3, 1, 1)",
        "where(i >= 4 or t_x[i] > 0, 1, 0)",
        "min(t_x[i], 0)",
        "t_x[i] * 0",
        "where(1 < 2 < t_x[i], 1, 2)",
    ],
)
def test_a_read_outside_names_tensor_index_and_size(text: str) -> None:
    found = error_of(text, i=np.arange(6), t_x=np.array([5, 6, 7]))
    assert isinstance(found, IndexOutside)
    assert (found.tensor, found.axis, found.index, found.size) == ("t_x", 0, 3, 3)
    assert found.span is not None
    assert found.span.text == "t_x[i]"


def test_a_read_outside_counts_only_where_it_is_needed() -> None:
    needed = np.array([True, True, True, False])
    found = value_of("t_x[kv]", needed=needed, t_x=np.array([5, 6, 7]))
    assert found[:3].tolist() == [5, 6, 7]


def test_negative_indices_are_outside() -> None:
    found = error_of("t_x[0, kv - 1]", t_x=np.zeros((2, 8)))
    assert (found.axis, found.index, found.size) == (1, -1, 8)


def test_an_empty_tensor_has_no_element() -> None:
    assert isinstance(error_of("t_x[0]", t_x=np.zeros(0)), IndexOutside)
    assert value_of("where(false, t_x[0], 3)", t_x=np.zeros(0)) == 3


# ---- definitions -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("definitions", "text", "right"),
    [
        ("define f(x : int) : int = x + kv", "f(10)", [10, 11, 12, 13]),
        ("define f(kv : int) : int = kv", "f(7)", 7),
        ("define f(x : int, y : int = 2) : int = 10 * x + y", "f(1)", 12),
        ("define f(x : int, y : int = Skv) : int = 10 * x + y", "f(1)", 14),
        ("define f(x : int, y : int = 2) : int = 10 * x + y", "f(y = 1, x = 3)", 31),
        ("define f(x : int) : int = x\ndefine g(x : int) : int = f(x + 1) * 2", "g(f(f(3)))", 8),
        ("define f(x : float) : float = x / 2", "f(3)", 1.5),
        ("define f(x : float) : float = x // 2", "f(3)", 1.0),
        ("define f : bool = kv < 2", "f", [True, True, False, False]),
        ("define f(up : flag) : int = where(up, 1, 2)", "f(up)", 1),
        ("define f(up : flag) : int = where(up, 1, 2)", "f()", 2),
        ("define f(up : flag) : int = where(up, 1, 2)", "f", 2),
        ("define f(up : flag) : int = where(up, 1, 2)", "f(up = 1 < 2)", 1),
        ("define f(x : int, up : flag) : int = where(up, x, 2)", "f(up, 5)", 5),
        ("define f(t : tensor) : int = t[kv]", "f(t_x)", [5, 6, 7, 8]),
        ("define f(t : tensor) : int = t[kv]\ndefine g(u : tensor) : int = f(u)", "g(t_x)",
         [5, 6, 7, 8]),
        # An argument is expanded, so laziness goes through.
        ("define f(c : bool, x : int) : int = where(c, x, 0)", "f(kv > 9, t_x[99])", [0] * 4),
    ],
)  # fmt: skip
def test_definitions(definitions: str, text: str, right: Any) -> None:
    found = np.broadcast_to(value_of(text, definitions, t_x=np.array([5, 6, 7, 8])), (4,))
    assert found.tolist() == (right if isinstance(right, list) else [right] * 4)


@pytest.mark.parametrize(
    ("definitions", "text"),
    [
        ("define f(x : int) : int = x + a", "f(1)"),  # not its caller's names
        ("define f(x : int) : int = t_x[x]", "f(1)"),
        ("define f(x : int) : int = f(x)", "f(1)"),
        ("define f : int = g\ndefine g : int = f", "f"),
        ("define f(x : int) : int = x", "f(1.5)"),
        ("define f(x : int) : int = x", "f(1, 2)"),
        ("define f(x : int) : int = x", "f()"),
        ("define f(x : int) : int = x", "f(y = 1)"),
        ("define f(x : int) : int = x", "f(1, x = 1)"),
        ("define f(x : int) : bool = x", "f(1)"),
        ("define f(t : tensor) : int = t[0]", "f(3)"),
        ("define f(t : tensor) : int = t[0]", "f(a)"),
    ],
)
def test_definitions_that_do_not_expand(definitions: str, text: str) -> None:
    assert isinstance(error_of(text, definitions, a=1, t_x=np.array([5, 6])), Meaningless)


@pytest.mark.parametrize("op", ["or", "and"])
def test_chains_may_be_long(op: str) -> None:
    found = value_of(f" {op} ".join(["kv < 2"] * 2000))
    assert found.tolist() == [True, True, False, False]


@pytest.mark.parametrize(
    "layer",
    [
        "max(x, {})", "where(x > 1, {}, 0)", "-({})", "x - ({})", "x ** ({})", "t_x[{}]",
        "where(0 < ({}) or x < 0, 1, 0)", "where((0 < ({})) == true, 1, 0)", "f({})",
    ],
)  # fmt: skip
def test_whatever_the_parser_lets_through_is_evaluated(layer: str) -> None:
    """The parser bounds the depth of nesting; the evaluator's recursion has to bear that."""
    text = "1"
    while True:
        deeper = layer.format(text)
        try:
            expression(deeper)
        except AttnError:
            break
        text = deeper
    assert text.count("(") + text.count("[") > 40
    value_of(text, "define f(x : int) : int = x", needed=False, x=1, t_x=np.array([1, 1]))


# ---- derivatives -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "s", "3 * s + 2", "s * s", "s - 2 * s", "1 / s", "s / (1 + s)", "-s", "s**3", "s**2.5",
        "2**s", "s**s", "exp(s)", "exp2(s)", "log(s)", "log2(s)", "sqrt(s)", "rsqrt(s)",
        "tanh(s)", "sigmoid(s)", "abs(s - 1)", "min(s, 1.1)", "max(1.1, s)", "max(s, 1.1, 2 * s)",
        "clamp(s, 0.7, 1.3)", "where(s > 1, s * s, 5 * s)", "floor(s * 3)", "s // 0.4", "s % 0.4",
        "5 % s", "50 * tanh(s / 50)", "kv * s", "where(kv > 1, s, -s)", "x + s * 0",
        "where(s > 0.9 and s < 1.2, s, 0.0)",
    ],
)  # fmt: skip
def test_slope_is_the_derivative(text: str) -> None:
    points = np.linspace(0.53, 1.87, 101).reshape(-1, 1)
    step = 1e-6
    e = expression(text)

    def at(s: Any) -> Value:
        value = evaluate(e, scope_of(s=Value(s, np.float64(1.0)), x=np.float64(2.0)))
        return Value(np.broadcast_to(value.data, (101, 4)), value.slope)

    slope = at(points).slope
    slope = np.broadcast_to(0.0 if slope is None else slope, (101, 4))
    above, below = at(points + step).data, at(points - step).data
    difference = (above - below) / (2 * step)
    smooth = np.abs(above - below) < 1e-3  # not across a jump of where, floor, //
    assert smooth.mean() > 0.9
    assert np.allclose(slope[smooth], difference[smooth], rtol=1e-6, atol=1e-6)


def test_the_steeper_side_counts_at_a_tie() -> None:
    scope = scope_of(s=Value(np.float64(0.0), np.float64(1.0)))
    for text in ("max(s, 3 * s)", "min(s, 3 * s)", "max(3 * s, s)"):
        assert evaluate(expression(text), scope).slope == 3.0
    assert evaluate(expression("max(s, 0)"), scope).slope == 1.0
