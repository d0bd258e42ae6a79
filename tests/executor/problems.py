"""Random problems: a text of the language, a schedule, shapes and arrays."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Any

import ml_dtypes
import numpy as np
from hypothesis import strategies as st

import attngen

DTYPES = {"fp32": np.float32, "fp16": np.float16, "bf16": ml_dtypes.bfloat16}
SCHEDULES = tuple(
    f"loop {loop}; passes {passes}; normalize {normalize}"
    for loop, passes, normalize in product(
        ("q, kv", "kv, q"), ("three", "two", "fused"), ("last", "every_tile")
    )
)
"""All twelve; sigmoid weights know only the loop order."""

DECLARATIONS = """
    param   w : int
    param   cap : float
    tensor  doc : int32[B, Skv]
    tensor  seen : bool[Hq?, Skv]
    tensor  bias : float[B?, Hq?, Sq, Skv]
    tensor  sinks : float[Hq]
    tensor  ql : int32[B]
    tensor  kl : int32[B]
"""
MASKS = (
    "causal", "causal(top_left)", "window(left = 2)", "window(left = 3, right = 1)",
    "kv % 2 == 0", "kv <= q + 1 or kv == 0", "(q * 7 + kv * 13) % 5 < 3", "kv >= 5", "kv < w",
    "qpos // 3 == kv // 3", "0 <= q - kv < w", "doc[b, kv] == 1", "document(doc)", "seen[h, kv]",
    "h % 2 == 0", "b == 0 or kv > w", "q != 2", "dilated(2)", "chunked(4)", "false", "true",
    "where(kv > 0, doc[b, kv - 1] == 0, true)", "abs(qpos - kv) % 3 == w % 3",
    "prefix(w)", "bit(w * 37, kv)", "max(q, kv) - min(q, kv) <= 2",
)  # fmt: skip
SCORES = (
    "softcap(s, cap)", "s + bias[b, h, q, kv]", "s * 40", "alibi(s)", "s - log(1.0 + kv)",
    "where(kv % 3 == 0, -inf, s)", "where(q == 1 and kv == 2, nan, s)", "s * tanh(s)",
    "where(q % 4 == 2 and kv == 1, inf, s)", "-s", "max(s, -0.5)", "s + where(kv > w, 3.0, -3.0)",
    "where(bias[b, h, q, kv] > 0, s, -inf)",
)  # fmt: skip
LENGTHS = (None, None, "kv = kl[b]", "q = ql[b]", "q = ql[b], kv = kl[b]")
WEIGHTS = ("softmax", "softmax(sink = sinks[h])", "softmax(sink = 0.0)", "sigmoid")


@dataclass(frozen=True)
class Problem:
    """One call: what is computed, how, and on what."""

    mask: str | None
    scores: tuple[str, ...]
    weights: str
    scale: str | None
    lengths: str | None
    schedule: str
    tile: tuple[int, int]
    dtype: str
    shape: tuple[int, int, int, int, int]
    """B, Hq, Hkv, Sq, Skv"""
    head_dim: tuple[int, int]
    w: int
    cap: float
    seed: int

    @property
    def text(self) -> str:
        lines = [*(f"score {line}" for line in self.scores), f"weights {self.weights}"]
        lines += [] if self.mask is None else [f"mask {self.mask}"]
        lines += [] if self.scale is None else [f"scale {self.scale}"]
        lines += [] if self.lengths is None else [f"length {self.lengths}"]
        lines.append("output o" if self.is_sigmoid else "output o, lse, row_max")
        return "attention problem {" + DECLARATIONS + "\n".join(f"    {x}" for x in lines) + "\n}\n"

    @property
    def is_sigmoid(self) -> bool:
        return self.weights == "sigmoid"

    @property
    def schedule_text(self) -> str:
        lines = self.schedule.split(";")[0] if self.is_sigmoid else self.schedule
        return f"{lines}; tile q = {self.tile[0]}, kv = {self.tile[1]}"

    def kernel(self, engine: Any = "numpy") -> attngen.Kernel:
        return attngen.compile_text(self.text, engine=engine, schedule=self.schedule_text)

    def operands(self) -> tuple[Any, Any, Any]:
        B, Hq, Hkv, Sq, Skv = self.shape
        Dqk, Dv = self.head_dim
        rng = np.random.default_rng(self.seed)
        shapes = (B, Hq, Sq, Dqk), (B, Hkv, Skv, Dqk), (B, Hkv, Skv, Dv)
        return tuple(rng.standard_normal(s).astype(DTYPES[self.dtype]) for s in shapes)  # type: ignore[return-value]

    def tensors(self) -> dict[str, Any]:
        B, Hq, _, Sq, Skv = self.shape
        rng = np.random.default_rng(self.seed + 1)
        return {
            "doc": rng.integers(0, 3, (B, Skv)).astype(np.int32),
            "seen": rng.random((Hq, Skv)) < 0.6,
            "bias": rng.standard_normal((Hq, Sq, Skv)).astype(np.float32),
            "sinks": rng.standard_normal(Hq).astype(np.float32),
            "ql": rng.integers(0, Sq + 1, B).astype(np.int32),
            "kl": rng.integers(0, Skv + 1, B).astype(np.int32),
        }

    @property
    def params(self) -> dict[str, Any]:
        return {"w": self.w, "cap": self.cap}

    def reference(self, kernel: attngen.Kernel, **options: Any) -> Any:
        q, k, v = self.operands()
        tensors = self.tensors()
        return attngen.reference(
            kernel.unit, q, k, v, tensors=tensors, params=self.params, dtype=self.dtype, **options
        )


masks = st.none() | st.recursive(
    st.sampled_from(MASKS),
    lambda inner: st.one_of(
        st.tuples(inner, inner).map(lambda ab: f"({ab[0]} and {ab[1]})"),
        st.tuples(inner, inner).map(lambda ab: f"({ab[0]} or {ab[1]})"),
        inner.map(lambda a: f"(not {a})"),
    ),
    max_leaves=4,
)


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    tile = draw(st.sampled_from((1, 2, 3, 4, 5, 8, 64))), draw(st.sampled_from((1, 2, 3, 4, 7, 64)))
    Hkv = draw(st.integers(1, 2))

    def length(size: int) -> int:
        around = (0, 1, 2, size - 1, size, size + 1, 2 * size + 1, 3 * size + 2)
        return draw(st.sampled_from(sorted({n for n in around if 0 <= n <= 23})))

    Sq, Skv = length(tile[0]), length(tile[1])
    return Problem(
        mask=draw(masks),
        scores=tuple(draw(st.lists(st.sampled_from(SCORES), max_size=2))),
        weights=draw(st.sampled_from(WEIGHTS)),
        scale=draw(st.sampled_from((None, None, "0.3", "-cap / 4", "1.0 / (1 + h + b)"))),
        lengths=draw(st.sampled_from(LENGTHS)),
        schedule=draw(st.sampled_from(SCHEDULES)),
        tile=tile,
        dtype=draw(st.sampled_from(tuple(DTYPES))),
        shape=(
            draw(st.sampled_from((1, 1, 2, 3, 0))), Hkv * draw(st.integers(1, 3)), Hkv, Sq, Skv
        ),
        head_dim=(draw(st.sampled_from((1, 3, 8))), draw(st.sampled_from((1, 2, 8)))),
        w=draw(st.integers(-2, 9)),
        cap=draw(st.sampled_from((1.5, 30.0))),
        seed=draw(st.integers(0, 5)),
    )  # fmt: skip
