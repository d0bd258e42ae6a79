"""Lifting masks out of scores changes no pair: which attend, and with what score."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import attngen
from attngen.ir.attention import Attention
from attngen.ir.printer import print_expr
from attngen.ir.semantics import evaluate
from attngen.ir.verify import verify_attention
from attngen.passes.fold_constants import fold_constants
from attngen.passes.lift_masks import lift_masks


def checked(*scores: str, mask: str | None = None) -> Attention:
    lines = [f"score {line}" for line in scores] + ([f"mask {mask}"] if mask else [])
    text = "attention a {\n" + "\n".join(lines) + "\n}\n"
    return fold_constants(attngen.compile_text(text).attention)


@pytest.mark.parametrize(
    ("scores", "mask", "left", "lifted"),
    [
        (["where(kv <= q, s, -inf)"], None, [], "kv <= q"),
        (["where(kv <= q, s * 2.0, -inf)"], None, ["s * 2.0"], "kv <= q"),
        (["where(kv > q, -inf, s)"], "kv != 3", [], "kv != 3 and not kv > q"),
        (["where(kv <= q, where(kv != 0, s, -inf), -inf)"], None, [], "kv <= q and kv != 0"),
        (["s * 2.0", "where(kv <= q, s, -inf)"], None, ["s * 2.0"], "kv <= q"),
        (["where(kv != 0, s, -inf)", "where(kv <= q, s, -inf)"], None, [], "kv <= q and kv != 0"),
        # A condition on the score stays, and so does one that a later line might undo.
        (["where(s > 0.0, s, -inf)"], None, ["where(s > 0.0, s, -inf)"], None),
        (
            ["where(kv <= q, s, -inf)", "tanh(s)"],
            None,
            ["where(kv <= q, s, -inf)", "tanh(s)"],
            None,
        ),
        (["where(kv <= q, s, -1000.0)"], None, ["where(kv <= q, s, -1000.0)"], None),
    ],
)
def test_what_is_lifted(
    scores: list[str], mask: str | None, left: list[str], lifted: str | None
) -> None:
    found = lift_masks(checked(*scores, mask=mask))
    assert verify_attention(found) == []
    right = checked(*left, mask=lifted)
    assert [print_expr(e) for e in found.scores] == [print_expr(e) for e in right.scores]
    assert (found.mask and print_expr(found.mask)) == (right.mask and print_expr(right.mask))


_CONDITIONS = st.sampled_from(["kv <= q", "kv != 2", "s > 0.0", "q // 2 == kv // 2", "h == 0"])


def _lines(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    where = st.tuples(_CONDITIONS, inner, inner)
    return st.one_of(
        where.map(lambda t: f"where({t[0]}, {t[1]}, {t[2]})"),
        inner.map(lambda x: f"({x}) * 0.5"),
        inner.map(lambda x: f"tanh({x})"),
    )


_LINES = st.recursive(st.sampled_from(["s", "-inf", "s + 1.0"]), _lines, max_leaves=5)


@given(st.lists(_LINES, min_size=1, max_size=3), st.sampled_from([None, "kv != 1"]))
def test_every_pair_keeps_its_score(lines: list[str], mask: str | None) -> None:
    before = checked(*lines, mask=mask)
    after = lift_masks(before)
    assert verify_attention(after) == []
    np.testing.assert_array_equal(final_scores(after), final_scores(before))


def final_scores(attention: Attention) -> np.ndarray:
    """[h, q, kv]; -inf where a pair does not attend."""
    h, q, kv = np.ix_(np.arange(2), np.arange(4), np.arange(5))
    at = {"h": h, "q": q, "kv": kv}
    s = np.float32(kv - q) + np.float32(0.5)
    for line in attention.scores:
        s = evaluate(line, {**at, "s": s}, {}).data
    attends = True if attention.mask is None else evaluate(attention.mask, at, {}).data
    return np.broadcast_to(np.where(attends, s, -np.inf), (2, 4, 5))
