"""`check=True` reports reads outside of a tensor by the mask, and none that only tiles make."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import attngen
from attngen.diagnostics.diagnostic import AttnError

KEYS, INSIDE = 150, 20
"""`short` has fewer elements than there are keys."""

SPEC = """attention a {{
    tensor short : int32[N]
    tensor index : int32[Skv]
    tensor keep : bool[Skv]
    mask   {mask}
}}
"""


def call(mask: str, index: np.ndarray, **options: Any) -> np.ndarray:
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, 2, KEYS, 16)).astype(np.float16) for _ in range(3))
    kernel = attngen.compile_text(
        SPEC.format(mask=mask), engine="cpu", schedule="kernel forward_mma"
    )
    tensors = {"short": np.ones(INSIDE, np.int32), "index": index, "keep": index < INSIDE}
    o: np.ndarray = kernel(q, k, v, **tensors, **options)
    return o


INDEX = np.arange(KEYS, dtype=np.int32)


@pytest.mark.parametrize(
    "mask",
    [
        f"kv < {INSIDE} and q >= kv - 1000 and short[kv] == 1",
        f"kv < {INSIDE} and short[kv] == 1",
        "keep[kv] and short[index[kv]] == 1",
        "keep[kv] and q + kv >= 0 and short[index[kv]] == 1",
        f"where(kv < {INSIDE}, short[kv] == 1, q < 0)",
    ],
)
def test_a_guarded_read_is_no_error(mask: str, host_compiler: None) -> None:
    checked = call(mask, INDEX, check=True)
    np.testing.assert_array_equal(checked, call(mask, INDEX))


@pytest.mark.parametrize(
    "mask",
    [
        "short[index[kv]] == 1",  # tiles would be full: the nearest element is 1 as well
        "short[index[kv]] == 2",  # tiles would be skipped
        "q >= 0 and short[index[kv]] >= 0",
    ],
)
def test_a_read_outside_is_reported_in_every_kind_of_tile(mask: str, host_compiler: None) -> None:
    index = np.zeros(KEYS, np.int32)
    call(mask, index, check=True)
    index[KEYS // 2] = INSIDE
    with pytest.raises(AttnError, match="A661"):
        call(mask, index, check=True)
