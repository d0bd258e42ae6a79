"""The right answer of a conformance case: its own NumPy formulas, evaluated densely in float64."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from .cases import Case, Inputs

__all__ = ["Answer", "expected", "has_bug"]


@dataclass(frozen=True, eq=False)
class Answer:
    """`o [B, Hq, rows, Dv]`, `lse [B, Hq, rows]`, `visible [B, Hq, rows, Skv]`."""

    o: np.ndarray
    lse: np.ndarray
    visible: np.ndarray


def has_bug(record: Mapping[str, Any]) -> bool:
    """Whether a case also says what the usual bug computes."""
    return "bug_mask_np" in record or "bug_score_np" in record


def expected(case: Case, inputs: Inputs, *, bug: bool = False) -> Answer:
    """The answer for `case.rows`; with `bug`, what the usual bug of this case computes."""
    d = case.dims
    rows = np.arange(d["Sq"]) if case.rows is None else np.asarray(case.rows)
    group = np.arange(d["Hq"]) // (d["Hq"] // d["Hkv"])
    q = inputs.q[:, :, rows].astype(np.float64)
    k, v = (x[:, group].astype(np.float64) for x in (inputs.k, inputs.v))
    names: dict[str, Any] = {
        **d,
        **{n: a.astype(np.float64) if _is_float(a) else a for n, a in inputs.aux.items()},
        "np": np,
        "scale": case.scale,
        "b": np.arange(d["B"])[:, None, None, None],
        "h": np.arange(d["Hq"])[:, None, None],
        "q": rows[:, None],
        "kv": np.arange(d["Skv"]),
    }

    def formula(key: str) -> Any:
        text = case.record.get(f"bug_{key}" if bug else key) or case.record.get(key)
        return eval(text, names) if text else None

    with np.errstate(all="ignore"):
        names["s"] = score = case.scale * np.einsum("bhid,bhjd->bhij", q, k)
        changed, mask = formula("score_np"), formula("mask_np")
        score = score if changed is None else np.broadcast_to(changed, score.shape)
        visible = np.broadcast_to(True if mask is None else mask, score.shape)
        visible = visible & (score != -np.inf)
        score = np.where(visible, score, -np.inf)
        sink = np.asarray(names[case.record["sink_np"]] if "sink_np" in case.record else -np.inf)
        sink = np.broadcast_to(sink, (d["Hq"],))[:, None, None]
        largest = np.maximum(score.max(axis=-1, keepdims=True, initial=-np.inf), sink)
        offset = np.where(largest == -np.inf, 0.0, largest)
        weight = np.where(visible, np.exp(score - offset), 0.0)
        total = weight.sum(axis=-1, keepdims=True) + np.exp(sink - offset)
        lse = (offset + np.log(total))[..., 0]
        weight = weight / np.where(total == 0.0, 1.0, total)
    return Answer(_combine(weight, visible, v), lse, visible)


def _combine(weight: np.ndarray, visible: np.ndarray, v: np.ndarray) -> np.ndarray:
    if np.isfinite(v).all():
        return np.asarray(np.einsum("bhij,bhjd->bhid", weight, v))
    with np.errstate(all="ignore"):
        products = weight[..., None] * v[:, :, None]
    return np.asarray(np.where(visible[..., None], products, 0.0).sum(axis=3))


def _is_float(x: Any) -> bool:
    return isinstance(x, np.ndarray) and x.dtype.kind == "f"
