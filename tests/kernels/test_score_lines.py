"""Scores that are added while q.k is scaled, in both families for tensor cores."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import attngen

ROWS, KEYS, D = 40, 70, 16
TARGETS = {"forward_mma": "sm_80", "forward_wgmma": "sm_90a"}
DTYPES = {"fp16": np.float16, "bf16": ml_dtypes.bfloat16}
SCORES = (
    # Far below 0: nothing may be taken relative to 0 before a row has a maximum.
    "s - 1000.0",
    "s - 30.0 * kv",
    # What grows from key to key, upwards and downwards, with a factor and without.
    "s + (q - kv)",
    "s - (2 * kv - q)",
    "s + 0.5 * (q - kv)",
    "s - c * (3 * kv - q)",
    "c * (kv - q) + s",
    "s + slope[h] * (q - 2 * kv)",
    # With bf16, products begin with what these gain.
    "alibi(s)",
    "s - 0.125 * (3 * kv - q) + 0.75 * (qpos + kv)",
    "s + (kv - q) - (kv - qpos)",  # what grows in it makes up for each other
    "c + 2.0 * kv",  # without s
    "s - bias[h, q, kv]",
)


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        ("forward_mma", "fp16"),
        ("forward_mma", "bf16"),
        ("forward_wgmma", "fp16"),
        ("forward_wgmma", "bf16"),
    ],
)
@pytest.mark.parametrize("score", SCORES)
def test_score(score: str, family: str, dtype: str, host_compiler: None) -> None:
    text = f"""attention a {{
    param     c : float
    tensor    slope : float[Hq]
    tensor    bias : float[Hq, Sq, Skv]
    score     {score}
    output    o, lse, row_max
}}
"""
    rng = np.random.default_rng(0)
    shapes = (1, 2, ROWS, D), (1, 1, KEYS, D), (1, 1, KEYS, D)
    q, k, v = (rng.standard_normal(s).astype(DTYPES[dtype]) for s in shapes)
    given = {
        "slope": np.array([0.25, 0.75], np.float32),
        "bias": rng.standard_normal((2, ROWS, KEYS)).astype(np.float32),
    }
    kernel = attngen.compile_text(
        text,
        engine="cpu",
        arch=TARGETS[family],
        schedule=f"kernel {family}; tile kv = 32",
    )
    used = {t.name for t in kernel.attention.tensors}
    tensors = {n: x for n, x in given.items() if n in used}
    params = {"c": 0.375} if kernel.attention.params else {}
    right = attngen.reference(kernel.unit, q, k, v, tensors=tensors, params=params)
    o, lse, row_max = kernel(q, k, v, **tensors, **params)
    assert right.accepts_o(o).all()
    assert right.accepts_lse(lse).all()
    np.testing.assert_allclose(row_max, right.row_max, rtol=1e-6, atol=1e-3)


@pytest.mark.parametrize("family", TARGETS)
@pytest.mark.parametrize(
    ("score", "dtype", "begins"),
    [
        # What is gained within 32 keys is 256 at most.
        ("s + 8.0 * (kv - q)", "bf16", True),
        ("s - 8.0 * (kv - q)", "bf16", True),
        ("s + 8.5 * (kv - q)", "bf16", False),
        ("alibi(s)", "bf16", True),
        # Weights of fp16 show what the products lose.
        ("s + 8.0 * (kv - q)", "fp16", False),
        ("alibi(s)", "fp16", False),
        # Nothing is known of the slopes.
        ("s + slope[h] * (kv - q)", "bf16", False),
        ("s + c * (kv - q)", "bf16", False),
    ],
)
def test_products_begin_with_what_is_gained(
    score: str, dtype: str, begins: bool, family: str, host_compiler: None
) -> None:
    """Where that is known to be little, and right up to the limit."""
    declared = "param c : float\ntensor slope : float[Hq]\n"
    kernel = attngen.compile_text(
        f"attention a {{\n{declared}score {score}\nmask causal\noutput o, lse, row_max\n}}\n",
        engine="cpu",
        arch=TARGETS[family],
        schedule=f"kernel {family}; tile kv = 32",
    )
    rendered = kernel.render(TARGETS[family], dtype=dtype, head_dim=D)
    assert rendered.launch.tiles.tile_kv == 32
    assert ("addend_growth" in rendered.source) == begins
    rng = np.random.default_rng(3)
    shapes = (1, 2, ROWS, D), (1, 1, KEYS, D), (1, 1, KEYS, D)
    q, k, v = (rng.standard_normal(s).astype(DTYPES[dtype]) for s in shapes)
    tensors = {"slope": np.array([0.25, 8.0], np.float32)} if kernel.attention.tensors else {}
    params = {"c": 8.0} if kernel.attention.params else {}
    right = attngen.reference(kernel.unit, q, k, v, tensors=tensors, params=params)
    o, lse, row_max = kernel(q, k, v, **tensors, **params)
    assert right.accepts_o(o).all()
    assert right.accepts_lse(lse).all()
    np.testing.assert_allclose(row_max, right.row_max, rtol=1e-6, atol=1e-3)


DEAR = {
    "softcap": ("score softcap(s, 30.0)",),
    "softcap of a parameter": ("score softcap(s, c)",),
    "negative scale": ("scale -0.5", "score softcap(s, 3.0)"),
    "scale by head": ("scale slope[h]", "score 5.0 * tanh(s / 5.0) + 2.0"),
    "falls": ("score 2.0 - 8.0 * sigmoid(s / 2.0)",),
    "in turn": ("score s + bias[h, q, kv]", "score softcap(s, 8.0)", "score s / 2.0 - 1.0"),
    "relu": ("score log(max(s, 0.0) + 1.0)",),
    "masked by a logarithm": ("score log(max(s, 0.0))",),
    "gelu": ("score log(0.5 * s * (1.0 + tanh(0.8 * (s + 0.045 * s * s * s))) + 1.0)",),
    "sink": ("score softcap(s, 8.0)", "weights softmax(sink = 1.5)"),
    "sigmoid": ("score softcap(s, 8.0) - 3.0", "weights sigmoid"),
    "let": ("let x = s / 4.0", "score where(x < 0.0, exp(x) - 1.0, x) * 4.0"),
    "let that reads": ("let x = s + bias[h, q, kv]", "score where(kv < q, softcap(x, 2.0), x)"),
}


@pytest.mark.parametrize("family", TARGETS)
@pytest.mark.parametrize("name", DEAR)
def test_dear_scores(name: str, family: str, host_compiler: None) -> None:
    """Whose constants are multiplied out, of logits near 0, larger ones and peaked rows."""
    output = "o" if name == "sigmoid" else "o, lse, row_max"
    body = "\n".join((*DEAR[name], "mask causal", f"output {output}"))
    declared = "param c : float\ntensor slope : float[Hq]\ntensor bias : float[Hq, Sq, Skv]\n"
    text = f"attention a {{\n{declared}{body}\n}}\n"
    rng = np.random.default_rng(1)
    given = {
        "slope": np.array([0.25, 0.75], np.float32),
        "bias": rng.standard_normal((2, ROWS, KEYS)).astype(np.float32),
    }
    for dtype in (np.float16, ml_dtypes.bfloat16):
        kernel = attngen.compile_text(
            text, engine="cpu", arch=TARGETS[family], schedule=f"kernel {family}; tile kv = 32"
        )
        used = {t.name for t in kernel.attention.tensors}
        tensors = {n: x for n, x in given.items() if n in used}
        params = {"c": 0.375} if kernel.attention.params else {}
        shapes = (1, 2, ROWS, D), (1, 1, KEYS, D), (1, 1, KEYS, D)
        for size in (1.0, 2.0, 6.0):
            q, k, v = (rng.standard_normal(s).astype(dtype) for s in shapes)
            q, k = (q * dtype(size)), (k * dtype(size))
            right = attngen.reference(kernel.unit, q, k, v, tensors=tensors, params=params)
            results = kernel(q, k, v, **tensors, **params)
            if name == "sigmoid":
                assert right.accepts_o(results).all()
            else:
                o, lse, _ = results
                assert right.accepts_o(o).all()
                assert right.accepts_lse(lse).all()


@pytest.mark.parametrize("family", TARGETS)
def test_what_nobody_sees_is_not_in_the_score(family: str, host_compiler: None) -> None:
    """NaN and infinity in keys and values behind the mask, which are scored as well."""
    text = "attention a {\n score softcap(s, 30.0)\n mask kv < 37\n output o, lse\n}\n"
    kernel = attngen.compile_text(
        text, engine="cpu", arch=TARGETS[family], schedule=f"kernel {family}; tile kv = 32"
    )
    rng = np.random.default_rng(2)
    shapes = (1, 2, ROWS, D), (1, 1, KEYS, D), (1, 1, KEYS, D)
    q, k, v = (rng.standard_normal(s).astype(np.float16) for s in shapes)
    k[:, :, 37:50], k[:, :, 50:] = np.nan, np.inf
    right = attngen.reference(kernel.unit, q, k, v)
    o, lse = kernel(q, k, v)
    assert right.accepts_o(o).all()
    assert right.accepts_lse(lse).all()
    k[:, :, 37:] = 0.0  # what is near 0 may be computed otherwise, which these keys do not decide
    again = kernel(q, k, v)
    assert (o == again[0]).all()
    assert (lse == again[1]).all()
    k[:, :, 5] = np.nan
    o, lse = kernel(q, k, v)
    assert np.isnan(lse).all()
    assert np.isnan(o).all()
