"""The call: its arguments, what is compiled, and what is read when."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from attngen.diagnostics.diagnostic import AttnError
from attngen.flex import attention, flex_attention
from attngen.flex.numbers_seen import NumbersSeen
from attngen.flex.remembered import Traces
from tests.flex.dense import attend, operands


def causal(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return kv_idx <= q_idx


def block_mask(mask_mod: Any, *lengths: int) -> Any:
    """What of PyTorch's `BlockMask` is looked at."""
    return SimpleNamespace(mask_mod=mask_mod, seq_lengths=lengths, BLOCK_SIZE=(128, 128))


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The kernels that a test makes."""
    made: list[Any] = []
    make = attention.Kernel

    def record(*arguments: Any, **options: Any) -> Any:
        made.append(make(*arguments, **options))
        return made[-1]

    monkeypatch.setattr(attention, "Kernel", record)
    monkeypatch.setattr(attention, "_numbers", NumbersSeen())
    monkeypatch.setattr(attention, "_traces", Traces())
    attention._kernel.cache_clear()
    yield made
    attention._kernel.cache_clear()


def run(*arguments: Any, **options: Any) -> Any:
    return flex_attention(*arguments, engine="numpy", **options)


# ---- arguments ---------------------------------------------------------------------------


def test_rows_count_from_the_first_key() -> None:
    """`q_idx` is the row number, whatever the lengths: causal is aligned at the top left."""
    q, k, v = operands(1, 1, 1, 3, 7)
    o = run(q, k, v, mask_mod=causal)
    np.testing.assert_allclose(o[0, 0, 0], v[0, 0, 0], atol=1e-6)


def test_scale_is_given_with_each_call(compiled: list[Any]) -> None:
    q, k, v = operands(1, 2, 2, 5, 6)
    for scale in (0.5, -1.25, 2):
        o = run(q, k, v, scale=scale)
        np.testing.assert_allclose(o, attend(q, k, v, scale=scale)[0], atol=1e-5)
    assert [kernel.compilations for kernel in compiled] == [1]


def test_a_score_mod_gets_the_scaled_score() -> None:
    q, k, v = operands(1, 1, 1, 5, 6)

    def square(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score * score

    o = run(q, k, v, square, scale=0.1)
    np.testing.assert_allclose(o, attend(q, k, v, square, scale=0.1)[0], atol=2e-6)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_sinks_join_the_sum(dtype: Any) -> None:
    q, k, v = operands(2, 4, 2, 9, 9)
    sinks = np.array([-1.0, 0.0, 1.5, 30.0], dtype)
    plain, lse = flex_attention(q, k, v, mask_mod=causal, enable_gqa=True, return_lse=True)
    o, with_sinks = flex_attention(
        q, k, v, mask_mod=causal, enable_gqa=True, sinks=sinks, return_lse=True
    )
    right = np.logaddexp(lse, sinks.astype(np.float32)[None, :, None])
    np.testing.assert_allclose(with_sinks, right, rtol=1e-6)
    np.testing.assert_allclose(o, plain * np.exp(lse - right)[..., None], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("sinks", "code"), [([1.0] * 4, "A632"), (np.zeros(3, np.float32), "A621")]
)
def test_sinks_that_are_none(sinks: Any, code: str) -> None:
    q, k, v = operands(2, 4, 2, 9, 9)
    with pytest.raises(AttnError) as caught:
        flex_attention(q, k, v, enable_gqa=True, sinks=sinks)
    assert caught.value.diagnostics[0].code == code


def test_rows_without_a_key_give_zero() -> None:
    q, k, v = operands(1, 2, 1, 4, 4)
    o, lse = run(q, k, v, mask_mod=lambda b, h, i, j: j < i, enable_gqa=True, return_lse=True)
    assert not o[:, :, 0].any()
    assert np.isneginf(lse[:, :, 0]).all()
    assert np.isfinite(lse[:, :, 1:]).all()


def test_shared_heads_need_enable_gqa() -> None:
    q, k, v = operands(1, 4, 2, 3, 3)
    assert run(q, k, v, enable_gqa=True).shape == q.shape
    with pytest.raises(AttnError, match=r"A632.*give `enable_gqa=True`"):
        run(q, k, v)
    with pytest.raises(AttnError, match="A627"):
        run(*operands(1, 4, 3, 3, 3))


def test_a_block_mask_gives_its_mask_mod() -> None:
    q, k, v = operands(1, 1, 1, 5, 6)
    o = run(q, k, v, block_mask=block_mask(causal, 5, 6))
    np.testing.assert_array_equal(o, run(q, k, v, mask_mod=causal))


def test_a_block_mask_lets_sequences_share_keys() -> None:
    q, _, _ = operands(3, 1, 1, 5, 6)
    _, k, v = operands(1, 1, 1, 5, 6)
    o = run(q, k, v, block_mask=block_mask(causal, 5, 6))
    for b in range(3):
        np.testing.assert_array_equal(o[b : b + 1], run(q[b : b + 1], k, v, mask_mod=causal))
    with pytest.raises(AttnError, match="A621"):
        run(q, k, v, mask_mod=causal)


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"block_mask": block_mask(causal, 5, 7)}, "A621"),
        ({"block_mask": block_mask(causal, 5, 6), "mask_mod": causal}, "A632"),
        ({"block_mask": object()}, "A632.*has no `mask_mod`"),
        ({"block_mask": causal}, "A632.*give it as `mask_mod=`"),
        ({"block_mask": np.ones((5, 6), np.bool_)}, "A632.*a function that reads it"),
        ({"scale": "x"}, "A632.*it is one number"),
        ({"return_lse": True, "return_aux": SimpleNamespace(lse=True, max_scores=False)}, "A632"),
    ],
)
def test_arguments_that_contradict_each_other(options: dict[str, Any], code: str) -> None:
    q, k, v = operands(1, 1, 1, 5, 6)
    with pytest.raises(AttnError, match=code):
        run(q, k, v, **options)


def test_a_block_mask_without_blocks_takes_any_length() -> None:
    mask = block_mask(causal, 1, 1)
    mask.BLOCK_SIZE = (1 << 30, 1 << 30)
    q, k, v = operands(1, 1, 1, 5, 6)
    np.testing.assert_array_equal(run(q, k, v, block_mask=mask), run(q, k, v, mask_mod=causal))


def test_operands_have_four_dimensions() -> None:
    q, k, v = operands(1, 1, 1, 5, 6)
    with pytest.raises(AttnError, match="A621"):
        run(q[0], k, v)


def test_a_schedule() -> None:
    q, k, v = operands(1, 1, 1, 9, 9)
    o = run(q, k, v, mask_mod=causal, schedule="passes three; tile q = 4, kv = 4")
    np.testing.assert_allclose(o, attend(q, k, v, None, causal)[0], atol=2e-6)


def test_pytorch_is_not_loaded() -> None:
    code = (
        "import sys, numpy, attngen.flex\n"
        "x = numpy.ones((1, 1, 2, 4), numpy.float32)\n"
        "attngen.flex.flex_attention(x, x, x, lambda s, b, h, i, j: s - i, engine='numpy')\n"
        "print('torch' in sys.modules)"
    )
    root = Path(attention.__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["False"]


# ---- what is compiled --------------------------------------------------------------------


def window(size: Any) -> Any:
    return lambda b, h, q_idx, kv_idx: q_idx - kv_idx <= size


def test_a_new_closure_of_the_same_code_compiles_nothing(compiled: list[Any]) -> None:
    for rows in (3, 9, 17):
        q, k, v = operands(1, 1, 1, rows, rows)
        run(q, k, v, mask_mod=window(4))
    assert [kernel.compilations for kernel in compiled] == [1]


def test_a_number_that_changes_is_a_param_from_then_on(compiled: list[Any]) -> None:
    q, k, v = operands(1, 1, 1, 9, 9)
    for size in (4, 2, 3, 4, 0, -1):
        mask_mod = window(size)
        o = run(q, k, v, mask_mod=mask_mod)
        np.testing.assert_allclose(o, attend(q, k, v, None, mask_mod)[0], atol=2e-6)
    assert len(compiled) == 3  # 4 as it stands, then a param, and -1 is written with a sign
    assert [len(kernel.attention.params) for kernel in compiled] == [0, 1, 0]


def test_only_the_number_that_changes_is_a_param(compiled: list[Any]) -> None:
    q, k, v = operands(1, 1, 1, 9, 9)
    for size in (2, 3):
        run(q, k, v, mask_mod=lambda b, h, i, j, n=size: (abs(i - j) <= n) & (j % 4 != 3))
    (param,) = compiled[-1].attention.params
    assert "% 4 != 3" in compiled[-1].unit.main.span.source.text
    assert f"<= {param.name} and" in compiled[-1].unit.main.span.source.text


def test_exponents_and_bare_indices_stay_constants(compiled: list[Any]) -> None:
    q, k, v = operands(1, 1, 1, 4, 4)
    table = np.arange(12, dtype=np.float32).reshape(3, 4)
    for n in (1, 2):

        def score_mod(s: Any, b: Any, h: Any, i: Any, j: Any, n: int = n) -> Any:
            return s**n + table[n, j]

        o = run(q, k, v, score_mod)
        np.testing.assert_allclose(o, attend(q, k, v, score_mod)[0], atol=2e-6)
    assert not any(kernel.attention.params for kernel in compiled)


def test_an_integer_in_place_of_a_float(compiled: list[Any]) -> None:
    q, k, v = operands(1, 1, 1, 4, 4)
    for cap in (30.0, 20, 10.0, 5):

        def score_mod(s: Any, b: Any, h: Any, i: Any, j: Any, cap: float = cap) -> Any:
            return s / cap

        o = run(q, k, v, score_mod)
        np.testing.assert_allclose(o, attend(q, k, v, score_mod)[0], atol=2e-6)
    assert len(compiled) == 4


# ---- captured arrays ---------------------------------------------------------------------


def test_contents_are_read_at_the_call(compiled: list[Any]) -> None:
    q, k, v = operands(1, 1, 1, 6, 6)
    ids = np.zeros(6, np.int32)

    def same(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return ids[q_idx] == ids[kv_idx]

    for contents in ([0, 0, 0, 1, 1, 1], [0, 1, 2, 0, 1, 2]):
        ids[:] = contents
        np.testing.assert_allclose(
            run(q, k, v, mask_mod=same), attend(q, k, v, None, same)[0], atol=2e-6
        )
    assert len(compiled) == 1


def test_a_longer_array_than_is_read() -> None:
    q, k, v = operands(1, 2, 2, 5, 6)
    bias = np.linspace(0, 3, 64, dtype=np.float32).reshape(8, 8)

    def score_mod(s: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return s + bias[q_idx, kv_idx]

    np.testing.assert_allclose(run(q, k, v, score_mod), attend(q, k, v, score_mod)[0], atol=2e-6)


def test_a_shorter_array_than_is_read_is_an_error() -> None:
    q, k, v = operands(1, 1, 1, 5, 6)
    short = np.zeros(5, np.float32)
    with pytest.raises(AttnError, match="A621"):
        run(q, k, v, lambda s, b, h, q_idx, kv_idx: s + short[kv_idx])


def test_an_untaken_read_does_not_happen() -> None:
    """Where PyTorch's eager mode reads every element, and fails."""
    q, k, v = operands(1, 1, 1, 5, 6)
    allowed = np.ones(3, np.bool_)
    o = run(q, k, v, mask_mod=lambda b, h, i, j: (j < 3) & allowed[j * 1])
    expected = attend(q, k, v, None, lambda b, h, i, j: j < 3)[0]
    np.testing.assert_allclose(o, expected, atol=2e-6)


def test_an_array_without_dimensions_is_read_by_the_kernel(compiled: list[Any]) -> None:
    q, k, v = operands(1, 1, 1, 5, 6)
    limit = np.array(3, np.int32)
    for value in (3, 5):
        limit[...] = value
        o = run(q, k, v, mask_mod=lambda b, h, i, j: j < limit)
        expected = attend(q, k, v, None, lambda b, h, i, j, n=value: j < n)[0]
        np.testing.assert_allclose(o, expected, atol=2e-6)
    assert len(compiled) == 1
    assert "tensor    limit : int32[1]" in compiled[0].unit.main.span.source.text


def test_a_read_outside_is_an_error_where_it_is_checked() -> None:
    q, k, v = operands(1, 1, 1, 5, 6)
    table = np.zeros(4, np.float32)
    with pytest.raises(AttnError, match="table"):
        run(q, k, v, lambda s, b, h, i, j: s + table[i - j + 3])
