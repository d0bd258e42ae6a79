"""Random functions: PyTorch's promotion of types, and its rounding, in masks without a formula."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from attngen.flex import flex_attention  # noqa: E402
from tests.flex.peer import attending_pairs  # noqa: E402

ROWS, KEYS = 6, 7

NAMES = {
    "torch": torch,
    "ids": torch.tensor([3, -2, 0, 5, -7, 1, 4]),
    "small": torch.tensor([1, 7, 3, 0, 2, 9, 5], dtype=torch.uint8),
    "flags": torch.tensor([True, False, True, True, False, False, True]),
    "floats": torch.tensor([0.5, -1.25, 2.0, 0.0, -0.75, 3.5, 1.0]),
    "halves": torch.tensor([0.5, -1.25, 2.0, 0.25, -0.75, 3.5, 1.0], dtype=torch.float16),
    "count": torch.tensor(3),
    "ratio": torch.tensor(0.25),
}

_LEAVES = ["q", "kv", "h", "ids[q]", "ids[kv]", "floats[q]", "flags[kv]", "flags[q]",
           "floats[kv]", "count", "ratio", "(q > 2)", "small[kv].int()", "halves[q].float()",
           "(2 - ids[q])", "(0.5 + flags[q])", "(True + flags[kv] * 2)"]  # fmt: skip
_OPERATIONS = ["({} + {})", "({} * {})", "(1 * {} - 1 * {})", "({} / 4 + {})",
               "({} // 2 - 1 * {})", "({} % 3 + {})", "({} // -4 + {})", "({} % -2.5 + {})",
               "torch.maximum({}, q + {})", "torch.where(q > kv, {}, {})",
               "((1 * {}).clamp(-1, 2) * {})", "(abs(1 * {}) + {})", "((q < {}) * {})",
               "(torch.floor(0.5 * {}) + {})", "((0.5 * {}).int() + {})",
               "((1 * {}).bool() + 1 * {})", "((q + {} == 1) ^ (kv + {} > 2))",
               "(torch.div(3 * {}, 2, rounding_mode='trunc') + {})",
               "(torch.sign(1 * {}) + {})", "(3 / (1 + abs(1 * {})) + {})"]  # fmt: skip

values = st.recursive(
    st.sampled_from(_LEAVES),
    lambda inner: st.builds(str.format, st.sampled_from(_OPERATIONS), inner, inner),
    max_leaves=5,
)


@settings(max_examples=80)
@given(values, values, st.sampled_from(["<", "<=", "==", "!=", ">"]))
def test_random_functions(left: str, right: str, op: str) -> None:
    text = f"(0 * q + {left}) {op} ({right})"
    mask_mod: Any = eval(f"lambda b, h, q, kv: {text}", dict(NAMES))
    expected = attending_pairs(mask_mod, 1, 2, ROWS, KEYS)
    q, k = torch.zeros(1, 2, ROWS, 4), torch.zeros(1, 2, KEYS, 4)
    v = torch.eye(KEYS).expand(1, 2, KEYS, KEYS)
    o = flex_attention(q, k, v, mask_mod=mask_mod, engine="numpy")
    assert torch.equal(o > 0, expected), text
