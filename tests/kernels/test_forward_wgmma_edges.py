"""What must not reach a row, reads that are checked, large scores, and operands for a stand-in."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import attngen
from attngen import api
from attngen.diagnostics.diagnostic import AttnError
from attngen.kernels import all_families

from .test_forward_mma_checked import INDEX, INSIDE, KEYS, SPEC
from .test_forward_mma_edges import operands
from .test_forward_wgmma_runs import compile_forced


def assert_right(body: str, given: list[np.ndarray], **named: Any) -> np.ndarray:
    """o of a variant that is `body`, in the bound with its LSE."""
    kernel = compile_forced(f"attention a {{\n{body}\noutput o, lse\n}}\n")
    right = attngen.reference(kernel.unit, *given, tensors=named)
    o, lse = kernel(*given, **named)
    assert right.accepts_o(o).all()
    assert right.accepts_lse(lse).all()
    result: np.ndarray = o
    return result


def test_a_value_that_no_row_of_the_tile_sees_reaches_none(host_compiler: None) -> None:
    q, k, v = operands(256, 266)
    v[0, 0, 150] = np.nan  # row 140 is the first to see it, and is in the tile from 128 on
    kernel = compile_forced("attention a {\nmask causal\n}\n", "tile q = 128, kv = 128")
    o = kernel(q, k, v).astype(np.float32)
    assert np.isfinite(o[0, 0, :128]).all()
    assert np.isnan(o[0, 0, 140:]).all()


def test_keys_that_nobody_sees_count_as_zero(host_compiler: None) -> None:
    q, k, v = operands(130, 300)
    keep = (np.arange(300) % 7 != 3) & ((np.arange(300) < 80) | (np.arange(300) > 240))
    k[0, 0, ~keep] = v[0, 0, ~keep] = np.nan
    body = "tensor keep : bool[Skv]\nmask keep[kv] and kv <= qpos + 60"
    kernel = compile_forced(f"attention a {{\n{body}\noutput o, lse\n}}\n")
    clean = [q, *(np.where(np.isnan(x), 0, x).astype(x.dtype) for x in (k, v))]
    right = attngen.reference(kernel.unit, *clean, tensors={"keep": keep})
    o, lse = kernel(q, k, v, keep=keep)
    assert right.accepts_o(o).all()
    assert right.accepts_lse(lse).all()


def test_an_empty_row_is_zero_whatever_others_see(host_compiler: None) -> None:
    q, k, v = operands()
    v[0, 0, 3] = np.inf
    kernel = compile_forced("attention a {\nmask causal and q != 10\noutput o, lse\n}\n")
    o, lse = kernel(q, k, v)
    assert (o[0, 0, 10] == 0).all()
    assert lse[0, 0, 10] == -np.inf
    assert np.isinf(o[0, 0, 11].astype(np.float32)).any()


def test_nan_and_infinity_show_in_their_rows_alone(host_compiler: None) -> None:
    q, k, v = operands(140, 40)
    q[0, 0, 5], q[0, 0, 130] = np.nan, np.inf
    o, lse = compile_forced("attention a {\noutput o, lse\n}\n")(q, k, v)
    bad = np.zeros(140, bool)
    bad[[5, 130]] = True
    assert (np.isnan(o[0, 0]).all(-1) == bad).all()
    assert (np.isnan(lse[0, 0]) == bad).all()


@pytest.mark.parametrize("size", [1.0, 300.0, 1200.0])
def test_large_scores(size: float, host_compiler: None) -> None:
    q = np.full((1, 1, 16, 64), size, np.float16)
    k = q.copy()
    k[0, 0, ::2] -= np.float16(size / 256)
    assert_right("", [q, k, operands(16, 16, D=64)[2]])


def test_many_heads_that_share_keys(host_compiler: None) -> None:
    assert_right("", operands(1, 1, Hq=150, D=16))


def test_a_guarded_read_is_no_error(host_compiler: None) -> None:
    mask = "keep[kv] and q + kv >= 0 and short[index[kv]] == 1"
    checked = call_checked(mask, INDEX, check=True)
    np.testing.assert_array_equal(checked, call_checked(mask, INDEX))


def test_a_read_outside_is_reported(host_compiler: None) -> None:
    mask = "q >= 0 and short[index[kv]] >= 0"
    index = np.zeros(KEYS, np.int32)
    call_checked(mask, index, check=True)
    index[KEYS // 2] = INSIDE
    with pytest.raises(AttnError, match="A661"):
        call_checked(mask, index, check=True)


def call_checked(mask: str, index: np.ndarray, **options: Any) -> Any:
    q, k, v = operands(KEYS, KEYS, Hq=2)
    tensors = {"short": np.ones(INSIDE, np.int32), "index": index, "keep": index < INSIDE}
    return compile_forced(SPEC.format(mask=mask))(q, k, v, **tensors, **options)


# ---- operands that no tensor map describes ---------------------------------------------------


def test_another_family_stands_in(host_compiler: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "_said", set())
    kernel = compile_forced("attention standing_in {\nmask causal\n}\n")
    q, k, v = operands(70, 70)
    right = kernel(q, k, v).astype(np.float32)
    upwards = k[:, :, ::-1].copy()[:, :, ::-1]  # the same keys, the last one first in memory
    with pytest.warns(UserWarning, match="forward_mma stands in for forward_wgmma: `k` has a"):
        found = kernel(q, upwards, v)
    np.testing.assert_allclose(found.astype(np.float32), right, atol=2e-3)
    assert [p.main.family for p in kernel.programs] == ["forward_wgmma", "forward_mma"]
    repeated = np.broadcast_to(v[:, :, :1], v.shape)
    with pytest.warns(UserWarning, match="`v` has a stride of 0 bytes along its tokens"):
        kernel(q, k, repeated)
    assert kernel.compilations == 2


def test_strides_of_single_tokens_do_not_matter() -> None:
    wgmma = all_families()["forward_wgmma"]
    one_head = np.zeros((1, 1, 5, 24), np.float16)[..., :16]
    views = {"q": api.view(one_head, "q")}
    assert wgmma.why_unaligned(views) is None
    assert wgmma.why_unaligned({"q": api.view(one_head[:, :, ::2, :8], "q")}) is None
    odd = np.zeros((1, 1, 5, 17), np.float16)[..., :16]
    assert "34 bytes along its tokens" in str(wgmma.why_unaligned({"q": api.view(odd, "q")}))
    assert wgmma.why_unaligned({"q": api.view(odd[:, :, :1], "q")}) is None
    assert wgmma.why_unaligned({"q": api.view(odd[:, :, :0], "q")}) is None


REFUSED = {
    "tile q = 64": "`tile q` is 128 or 192, not 64",
    "tile kv = 24": "`tile kv` is a multiple of 16",
    "tile q = 128, kv = 256; stages 4": "shared memory",
    "stages 1": "`stages` is 2, 3 or 4",
    "loop kv, q": "`loop q, kv`",
    "passes two": "`passes fused`",
    "warps 4": "each warp has 16 rows",
}


@pytest.mark.parametrize("schedule", REFUSED)
def test_a_schedule_is_refused_with_its_reason(schedule: str) -> None:
    kernel = compile_forced("attention a {\nmask causal\n}\n", schedule)
    with pytest.raises(AttnError, match=REFUSED[schedule].replace("(", r"\(")):
        kernel.render("sm_90a", dtype="fp16", head_dim=128)


@pytest.mark.parametrize(
    ("target", "dims", "reason"),
    [
        ("sm_80", (64, 64), "sm_80 has no tma, setmaxnreg, wgmma"),
        ("sm_120", (64, 64), "wgmma"),
        ("sm_90a", (40, 64), "multiples of 16 up to 256, which 40 is not"),
        ("sm_90a", (64, 128), "rows of v are not wider"),
    ],
)
def test_a_problem_is_refused_with_its_reason(
    target: str, dims: tuple[int, int], reason: str
) -> None:
    kernel = compile_forced("attention a {\nmask causal\n}\n")
    with pytest.raises(AttnError, match=reason):
        kernel.render(target, dtype="fp16", head_dim=dims)
