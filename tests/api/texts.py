"""Small variants and arrays that the tests of the calls share."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from attngen.diagnostics.diagnostic import AttnError, Diagnostic

PLAIN = """\
attention plain {
    mask kv <= qpos
}
"""
FULL = """\
attention full {
    param cap : float = 50.0 where 0 < cap <= 1000.7
    param left : int = 1000 where 0 <= left
    param is_on : bool = true
    tensor doc : int32[B, Skv]
    tensor bias : float[Hq?, Sq, Skv]
    score softcap(s, cap) + bias[h, q, kv]
    mask doc[b, qpos] == doc[b, kv] and kv >= qpos - left and is_on
    output o, lse
}
"""
SINK = """\
attention with_sink {
    tensor sink : float[Hq]
    mask kv <= qpos
    weights softmax(sink = sink[h] + b)
    output o, lse
}
"""
SIGMOID = """\
attention sigmoid_weights {
    mask kv <= qpos
    weights sigmoid
}
"""

B, HQ, HKV, SQ, SKV, D = 2, 4, 2, 9, 21, 8


def draw(*shape: int, dtype: Any = np.float32, seed: int = 0) -> Any:
    return np.random.default_rng((seed, *shape)).standard_normal(shape).astype(dtype)


def make_qkv(dtype: Any = np.float32, *, Dv: int = D) -> tuple[Any, Any, Any]:
    q = draw(B, HQ, SQ, D, dtype=dtype)
    return q, draw(B, HKV, SKV, D, dtype=dtype, seed=1), draw(B, HKV, SKV, Dv, dtype=dtype, seed=2)


def make_tensors() -> dict[str, Any]:
    """What FULL captures."""
    doc = np.repeat(np.arange(3, dtype=np.int32), 7)[None].repeat(B, axis=0)
    return {"doc": doc, "bias": draw(HQ, SQ, SKV, seed=3)}


def catch(function: Any, *arguments: Any, **named: Any) -> Diagnostic:
    """The one diagnostic of a call that must be refused."""
    with pytest.raises(AttnError) as caught:
        function(*arguments, **named)
    (diagnostic,) = caught.value.diagnostics
    return diagnostic


def words(diagnostic: Diagnostic) -> str:
    """Everything that a diagnostic says."""
    parts = (diagnostic.message(), diagnostic.label_text(), diagnostic.hint_text())
    return "\n".join(part for part in parts if part)
