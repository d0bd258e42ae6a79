"""The example functions with arrays of NumPy, against the same functions run dense."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from attngen.flex import flex_attention, from_python
from attngen.frontend.check import check
from attngen.frontend.format import format_file
from attngen.frontend.load import load_text
from tests.flex.dense import attend, operands
from tests.flex.examples import EXAMPLES, Example

by_example = pytest.mark.parametrize("example", EXAMPLES, ids=lambda e: e.name)


@by_example
def test_same_as_dense(example: Example) -> None:
    score_mod, mask_mod = example.make(np)
    q, k, v = operands(2, 4, 2, example.rows, example.keys)
    o, lse = flex_attention(
        q, k, v, score_mod, mask_mod=mask_mod, enable_gqa=True, return_lse=True, engine="numpy"
    )
    expected, expected_lse = attend(q, k, v, score_mod, mask_mod)
    np.testing.assert_allclose(o, expected, atol=2e-6)
    np.testing.assert_allclose(lse, expected_lse, atol=5e-6)


@by_example
def test_text_is_canonical_and_complete(example: Example) -> None:
    text = from_python(*example.make(np))
    unit = load_text(text)
    assert format_file(unit.main) == text
    assert check(unit).attention.mask is not None or "score" in text


@pytest.mark.usefixtures("host_compiler")
@pytest.mark.parametrize("name", ["packed documents", "heads"])
def test_cuda_text_on_the_cpu(name: str) -> None:
    (example,) = [e for e in EXAMPLES if e.name == name]
    score_mod, mask_mod = example.make(np)
    q, k, v = operands(2, 4, 4, example.rows, example.keys)
    o = flex_attention(q, k, v, score_mod, mask_mod=mask_mod, engine="cpu")
    np.testing.assert_allclose(o, attend(q, k, v, score_mod, mask_mod)[0], atol=2e-6)


def test_document_text() -> None:
    document = np.zeros(8, np.int32)
    bias = np.zeros((4, 15), np.float16)

    def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + bias[h, q_idx - kv_idx + 7]

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (document[q_idx] == document[kv_idx]) & (q_idx >= kv_idx)

    assert from_python(score_mod, mask_mod) == (
        "attention score_mod_mask_mod {\n"
        "    tensor    bias : fp16[Hq, bias_dim2]\n"
        "    tensor    document : int32[document_len]\n"
        "    score     s + bias[h, q - kv + 7]\n"
        "    mask      document[q] == document[kv] and q >= kv\n"
        "    output    o\n"
        "}\n"
    )
