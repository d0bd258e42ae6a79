"""Every example: canonical, with its source named, and checked to what the oracle computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from attngen.diagnostics.span import Source
from attngen.frontend.check import check
from attngen.frontend.format import format_file
from attngen.frontend.load import Unit, load_file, load_text
from attngen.frontend.parse import parse
from attngen.ir.attention import Attention
from attngen.ir.digest import digest_attention
from attngen.ir.expr import Expr
from attngen.ir.row_state import SIGMOID
from attngen.ir.semantics import evaluate
from attngen.ir.types import ScalarType
from attngen.ir.verify import verify_attention
from attngen.oracle.dense import reference

FILES = sorted((Path(__file__).parents[2] / "examples").glob("*.attn"))
SIZES: dict[str, tuple[int, int]] = {
    "natten_2d": (392, 392),
    "swin_shifted": (49, 49),
    "block_diffusion": (64, 64),
    "bigbird": (40, 400),
    "llama4_chunked": (3, 8200),
    "streaming_llm": (20, 1100),
    "gpt_oss": (9, 200),
    "dilated_window": (7, 300),
}
"""Sq and Skv where a variant needs them to be large, or of a kind."""
NAMED = 400
"""What names in shapes are bound to."""
LISTED = {
    "gemma3_local", "gemma3_global", "gpt_oss", "llama4_chunked", "mla_prefill", "longformer",
    "bigbird", "t5", "alibi", "swin_shifted", "alphafold_pair_bias", "natten_2d",
    "speculative_tree", "prefix_lm", "packed_documents", "padded_decode", "streaming_llm",
    "log_n_scaling", "softmax_off_by_one", "sigmoid_attention", "block_diffusion",
    "cross_attention", "block_sparse", "causal", "full", "gemma2_local", "bert_padded",
}  # fmt: skip


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_file(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert format_file(parse(Source(path.name, text))) == text
    unit = load_file(path)
    assert "# Source: " in "\n".join(unit.attention.comments.above) or path.stem == "minilm"
    attention = check(unit).attention
    assert verify_attention(attention) == []
    again = load_text(attention.source)
    assert again.canonical_text() == attention.source
    assert digest_attention(check(again).attention) == digest_attention(attention)


def test_everything_that_the_language_promises_is_there() -> None:
    assert {path.stem for path in FILES} >= LISTED


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_checked_form_means_what_the_oracle_computes(path: Path) -> None:
    unit = load_file(path)
    attention = check(unit).attention
    rng = np.random.default_rng(7)
    for Sq, Skv in (SIZES[path.stem],) if path.stem in SIZES else ((5, 9), (9, 5)):
        compare(unit, attention, arrays(attention, Sq, Skv, rng))


def arrays(attention: Attention, Sq: int, Skv: int, rng: np.random.Generator) -> dict[str, Any]:
    """Random arrays: small integers, so that every index lies inside of its tensor."""
    qk, v = attention.head_dim_qk or 16, attention.head_dim_v or 16
    Hq, Hkv = attention.heads_q or 6, attention.heads_kv or 3
    B = 1 if Skv > 100 else 2
    sizes = {"B": B, "Hq": Hq, "Hkv": Hkv, "Sq": Sq, "Skv": Skv, "Dqk": qk, "Dv": v}
    made = {
        "q": rng.standard_normal((B, Hq, Sq, qk)),
        "k": rng.standard_normal((B, Hkv, Skv, qk)),
        "v": rng.standard_normal((B, Hkv, Skv, v)),
        "sizes": sizes,
        "tensors": {},
    }
    for tensor in attention.tensors:
        shape = [
            1 if d.optional else d.size if isinstance(d.size, int) else sizes.get(d.size, NAMED)
            for d in tensor.dims
        ]
        array: Any = rng.standard_normal(shape).astype(np.float32)
        if tensor.element.scalar is ScalarType.INT:
            array = rng.integers(0, min(Sq, Skv, 4), shape).astype(tensor.element.name)
        elif tensor.element.scalar is ScalarType.BOOL:
            array = rng.random(shape) < 0.5
        made["tensors"][tensor.name] = array
    return made


def compare(unit: Unit, attention: Attention, given: dict[str, Any]) -> None:
    sizes, tensors = given["sizes"], given["tensors"]
    params = {p.name: 1.5 for p in attention.params if p.default is None}
    right = reference(
        unit, given["q"], given["k"], given["v"], tensors=tensors, params=params, dtype="fp32"
    )
    params |= {p.name: p.default for p in attention.params if p.default is not None}
    full = {
        t.name: np.broadcast_to(
            tensors[t.name],
            [d.size if isinstance(d.size, int) else sizes.get(d.size, NAMED) for d in t.dims],
        )
        for t in attention.tensors
    }
    for b in range(sizes["B"]):
        visible, scores, sink = attend(attention, given, b, {**sizes, **params}, full)
        assert (visible == right.visible[b]).all()
        with np.errstate(all="ignore"):
            weights = np.where(visible, np.exp(scores), 0.0)
            if attention.row_state is SIGMOID:
                weights = np.where(visible, 1 / (1 + np.exp(-scores)), 0.0)
                total = np.ones(weights.shape[:2])
            else:
                total = weights.sum(-1) + np.exp(sink)[..., 0]
                np.testing.assert_allclose(np.log(total), right.lse[b], rtol=1e-4, atol=1e-4)
        v = np.repeat(given["v"][b], sizes["Hq"] // sizes["Hkv"], axis=0)
        o = weights @ v / np.where(total == 0, 1, total)[..., None]
        np.testing.assert_allclose(o, right.o[b], rtol=1e-3, atol=1e-4)


def attend(
    attention: Attention, given: dict[str, Any], b: int, names: dict[str, Any], tensors: Any
) -> tuple[Any, Any, Any]:
    """Visible pairs, scores and sinks of one batch entry, from the checked form."""
    Hq, group = names["Hq"], names["Hq"] // names["Hkv"]
    h, q, kv = np.ogrid[0:Hq, 0 : names["Sq"], 0 : names["Skv"]]
    symbols: dict[str, Any] = {n: np.asarray(v) for n, v in names.items()}
    symbols |= dict.fromkeys((n for n in attention.named_sizes), np.int64(NAMED))
    symbols |= {n: np.float32(v) for n, v in names.items() if isinstance(v, float)}
    symbols |= {"b": np.int64(b), "h": h, "hkv": h // group, "q": q, "kv": kv}

    def value(e: Expr) -> Any:
        found = evaluate(e, symbols, tensors)
        return found.data, found.outside

    lengths = {}
    for name, e in (("Sq", attention.length_q), ("Skv", attention.length_kv)):
        lengths[name] = np.int64(names[name] if e is None else value(e)[0])
    symbols |= lengths
    symbols["qpos"] = q + lengths["Skv"] - lengths["Sq"]
    inside = (q < lengths["Sq"]) & (kv < lengths["Skv"])
    visible = np.broadcast_to(inside, (Hq, names["Sq"], names["Skv"]))
    if attention.mask is not None:
        mask, outside = value(attention.mask)
        assert not (outside & inside).any()
        visible = visible & mask
    k = np.repeat(given["k"][b], group, axis=0)
    s = np.einsum("hqd,hkd->hqk", given["q"][b], k)
    symbols["s"] = (s * value(attention.scale)[0]).astype(np.float32)
    for score in attention.scores:
        symbols["s"], outside = value(score)
        assert not (outside & visible).any()
    sink = np.float64(-np.inf) if attention.sink is None else value(attention.sink)[0]
    scores = np.broadcast_to(symbols["s"], visible.shape).astype(np.float64)
    visible = visible & ~np.isneginf(scores)
    return visible, scores, np.broadcast_to(np.asarray(sink, np.float64), (Hq, 1, 1))
