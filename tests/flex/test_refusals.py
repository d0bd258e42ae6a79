"""What is refused, with the Python line that caused it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from attngen.diagnostics.diagnostic import AttnError, Diagnostic
from attngen.flex import flex_attention, from_python
from tests.flex.dense import operands

words = np.array([1, 2, 3], np.float64)
matrix = np.zeros((4, 4), np.float32)


def _fault(*functions: Any) -> Diagnostic:
    with pytest.raises(AttnError) as caught:
        from_python(*functions)
    (found,) = caught.value.diagnostics
    return found


SCORES: list[tuple[Callable[..., Any], str, str]] = [
    (lambda s, b, h, q, kv: s if q > 3 else -s, "A262", "q > 3"),
    (lambda s, b, h, q, kv: s if 0 <= kv < 3 else -s, "A262", "0 <= kv < 3"),
    (lambda s, b, h, q, kv: sum(range(kv)), "A262", "range(kv)"),
    (lambda s, b, h, q, kv: s + [1.0, 2.0][h], "A262", "[1.0, 2.0][h]"),
    (lambda s, b, h, q, kv: s + float(q), "A262", "float(q)"),
    (lambda s, b, h, q, kv: s + int(q), "A262", "int(q)"),
    (lambda s, b, h, q, kv: s.item(), "A262", "s.item()"),
    (lambda s, b, h, q, kv: s + len(q), "A262", "len(q)"),
    (lambda s, b, h, q, kv: s + max(q, kv), "A262", "max(q, kv)"),
    (lambda s, b, h, q, kv: round(s), "A261", "round(s)"),
    (lambda s, b, h, q, kv: s.cumsum(0), "A261", "s.cumsum"),
    (lambda s, b, h, q, kv: np.sin(s), "A261", "np.sin(s)"),
    (lambda s, b, h, q, kv: np.add.reduce(s), "A261", "np.add.reduce(s)"),
    (lambda s, b, h, q, kv: s.clamp(minimum=1), "A261", "s.clamp(minimum=1)"),
    (lambda s, b, h, q, kv: s + "1", "A261", 's + "1"'),
    (lambda s, b, h, q, kv: s**q, "A261", "s**q"),
    (lambda s, b, h, q, kv: s & 1, "A261", "s & 1"),
    (lambda s, b, h, q, kv: q & kv, "A261", "q & kv"),
    (lambda s, b, h, q, kv: (q | kv) + 1, "A261", "(q | kv) + 1"),
    (lambda s, b, h, q, kv: q << kv, "A261", "q << kv"),
    (lambda s, b, h, q, kv: s.half(), "A261", "s.half()"),
    (lambda s, b, h, q, kv: s + matrix[s, q], "A261", "matrix[s, q]"),
    (lambda s, b, h, q, kv: s + matrix[q, kv, b], "A261", "matrix[q, kv, b]"),
    (lambda s, b, h, q, kv: s + matrix[q, 1:].sum(), "A261", "matrix[q, 1:]"),
    (lambda s, b, h, q, kv: s + words[q], "A265", "words[q]"),
    (lambda s, b, h, q, kv: s > 0, "A264", "s > 0"),
    (lambda s, b, h, q, kv: matrix[q], "A264", None),
    (lambda s, b, h, q, kv: None, "A264", None),
    (lambda s, b, h, q: s, "A263", None),
]


@pytest.mark.parametrize(("score_mod", "code", "text"), SCORES)
def test_the_place_in_the_python_source(
    score_mod: Callable[..., Any], code: str, text: str | None
) -> None:
    found = _fault(score_mod)
    assert found.code == code
    assert found.span is not None
    assert found.span.source.name == __file__
    shown = found.span.text
    assert shown == text if text is not None else "lambda s, b, h, q" in shown


def test_and_of_python() -> None:
    found = _fault(lambda s, b, h, q, kv: s + (q > 3 and kv > 3))
    assert found.code == "A262"
    assert found.span is not None
    assert found.span.text.startswith("q > 3")  # Python's versions differ about the end


def test_a_line_of_a_function_with_a_wide_character() -> None:
    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        größe = 3
        return kv_idx if q_idx > größe else q_idx

    found = _fault(None, mask_mod)
    assert found.span is not None
    assert found.span.text == "q_idx > größe"


def test_source_that_nobody_has() -> None:
    names: dict[str, Any] = {}
    exec("\n\ndef mask_mod(b, h, q, kv):\n    return q.cumsum(0) == 0\n", names)
    found = _fault(None, names["mask_mod"])
    assert found.span is not None
    assert found.span.first.line == 4


@pytest.mark.parametrize("mask_mod", [3, "causal", np.zeros(3)])
def test_no_function(mask_mod: Any) -> None:
    assert _fault(None, mask_mod).code == "A263"


def test_a_mask_is_a_truth_value() -> None:
    assert _fault(None, lambda b, h, q, kv: q - kv).code == "A264"
    assert _fault(None, lambda b, h, q, kv: 1).code == "A264"


def test_what_the_function_raises_is_left_alone() -> None:
    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        raise KeyError("window")

    with pytest.raises(KeyError, match="window"):
        from_python(mask_mod=mask_mod)


def test_errors_of_the_checker_name_the_python_line() -> None:
    def score_mod(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return s + q // 0

    with pytest.raises(AttnError) as caught:
        flex_attention(*operands(1, 1, 1, 4, 4), score_mod, engine="numpy")
    assert caught.value.diagnostics[0].code == "A214"
    (note,) = caught.value.__notes__
    assert note.startswith(f"traced from {__file__}:")
    assert note.endswith(": return s + q // 0")


NUMBERS = np.arange(4, dtype=np.float32)

SAID: list[tuple[Any, Any, str, str | None]] = [
    (lambda s, b, h, q, kv: matrix[q], None, "returns a row of 4 elements", "`.sum()`"),
    (lambda s, b, h, q, kv: matrix, None, "returns several rows of 4 x 4 elements", "`.sum()`"),
    (lambda s, b, h, q, kv: None, None, "returns nothing; expected one number", "`return`"),
    (lambda s, b, h, q, kv: (s, q), None, "returns a value of type tuple", None),
    (lambda s, b, h, q, kv: s + NUMBERS[q / 2], None, "an index that is a float", "by `//`"),
    (lambda b, h, q, kv: q >= kv, None, "`score_mod` is no function", "of a `mask_mod`"),
    (None, lambda s, b, h, q, kv: s, "`mask_mod` is no function", "of a `score_mod`"),
    (None, lambda b, h, q: q > 1, "`mask_mod` is no function", None),
    (None, matrix, "`mask_mod` is no function", "mask[q_idx, kv_idx]"),
]


@pytest.mark.parametrize(("score_mod", "mask_mod", "message", "hint"), SAID)
def test_what_is_said(score_mod: Any, mask_mod: Any, message: str, hint: str | None) -> None:
    found = _fault(score_mod, mask_mod)
    assert message in found.message()
    said = found.hint_text()
    assert said is None if hint is None else said is not None and hint in said


def test_a_call_with_wrong_arguments_names_no_function_of_attngen() -> None:
    found = _fault(lambda s, b, h, q, kv: s.masked_fill(q < kv))
    assert found.label_text() == "missing 1 required positional argument: 'value'"
