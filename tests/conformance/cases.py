"""Read the conformance cases: one `Case` for every numeric case and variant.

for case in numeric_cases():          # light: no arrays yet
    inputs = case.inputs()            # q, k, v in the case's dtype, and its auxiliary arrays
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

__all__ = ["DTYPES", "MAX_HEAD_DIM", "Case", "Inputs", "Tolerance", "numeric_cases", "records"]

FILE = Path(__file__).with_name("cases_open.jsonl")
DTYPES: Mapping[str, Any] = {
    "fp16": np.float16,
    "bf16": ml_dtypes.bfloat16,
    "fp32": np.float32,
}
MAX_HEAD_DIM = 256
"""Larger head dims are an error of the compiler that names them; the oracle computes them."""

_SIZES = ("B", "Hq", "Hkv", "Sq", "Skv", "Dqk", "Dv")


@dataclass(frozen=True)
class Tolerance:
    """`|found - right| <= absolute + relative * |right|`."""

    absolute: float
    relative: float

    def accepts(self, found: Any, right: Any) -> np.ndarray:
        """Where `found` is near enough, or the same infinity, or NaN where the answer is."""
        found, right = (np.asarray(x).astype(np.float64) for x in (found, right))
        with np.errstate(invalid="ignore"):
            near = np.abs(found - right) <= self.absolute + self.relative * np.abs(right)
        return np.asarray(near | (found == right) | (np.isnan(found) & np.isnan(right)))


@dataclass(frozen=True, eq=False)
class Inputs:
    """`q`, `k`, `v` in the case's dtype; `aux` holds numbers and arrays, floats as float32."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    aux: Mapping[str, Any]


@dataclass(frozen=True, eq=False)
class Case:
    """One numeric case in one variant; `record` is the line of the file with the variant in it."""

    id: str
    variant: int
    record: Mapping[str, Any]
    dims: Mapping[str, int]

    def __str__(self) -> str:
        return f"{self.id}-{self.variant}"

    @property
    def dtype(self) -> str:
        return str(self.record["dtype"])

    @property
    def heavy(self) -> bool:
        """Needs gigabytes when its mask is materialised."""
        return bool(self.record.get("heavy"))

    @property
    def rows(self) -> list[int] | None:
        """The query rows to compare; None: all."""
        return self.record.get("oracle_rows")

    @property
    def error(self) -> str | None:
        """What the compiler must refuse here, in its message; None: it computes the case."""
        largest = max(self.dims["Dqk"], self.dims["Dv"])
        return str(largest) if largest > MAX_HEAD_DIM else None

    @property
    def tolerance(self) -> Tolerance:
        """The case's own, of the variant's dtype where the variant is in a lower precision."""
        text = self.record["tol"]
        numbers = {word: float(x) for word, x in re.findall(r"(abs|rel) ([0-9.e-]+)", text)}
        least = {"fp32": 0.0, "fp16": 2e-3, "bf16": 1.6e-2}[self.dtype]
        relative = numbers.get("rel", 0.0)
        return Tolerance(max(numbers["abs"], least), max(relative, least if relative else 0.0))

    @property
    def lse_tolerance(self) -> Tolerance:
        """A float32 log-sum-exp, on scores that were summed in float32."""
        return Tolerance(self.tolerance.absolute, max(self.tolerance.relative, 2e-5))

    @property
    def scale(self) -> float:
        return float(_evaluate(str(self.record.get("scale", "1/np.sqrt(Dqk)")), dict(self.dims)))

    def inputs(self, seed: int = 0) -> Inputs:
        """Draw the arrays: auxiliary ones first, then q, k, v, from one stream."""
        d = self.dims
        names: dict[str, Any] = {**d, "rng": np.random.default_rng(seed), "scale": self.scale}
        aux: dict[str, Any] = {}
        for name, text in (self.record.get("aux") or {}).items():
            names[name] = aux[name] = _as_stored(_evaluate(text, names))
        names["qshape"] = (d["B"], d["Hq"], d["Sq"], d["Dqk"])
        names["kshape"] = (d["B"], d["Hkv"], d["Skv"], d["Dqk"])
        names["vshape"] = (d["B"], d["Hkv"], d["Skv"], d["Dv"])
        how = self.record.get("inputs") or {}
        arrays = [
            np.asarray(_evaluate(how.get(x, f"rng.standard_normal({x}shape)"), names))
            for x in ("q", "k", "v")
        ]
        q, k, v = (x.astype(np.float32).astype(DTYPES[self.dtype]) for x in arrays)
        return Inputs(q, k, v, aux)


def _evaluate(text: str, names: dict[str, Any]) -> Any:
    """A NumPy expression of the case file."""
    return eval(text, {"np": np}, names)


def _as_stored(value: Any) -> Any:
    """Float arrays as a kernel reads them, float32; all else as it is."""
    array = np.asarray(value)
    return array.astype(np.float32) if array.ndim and array.dtype.kind == "f" else value


@cache
def records() -> tuple[Mapping[str, Any], ...]:
    """Every case of the file, errors and behaviours included."""
    return tuple(json.loads(line) for line in FILE.read_text().splitlines())


def numeric_cases(*ids: str, reduced: bool = True) -> list[Case]:
    """The numeric cases (or those of the given ids), variant by variant.

    `reduced` takes the sizes that a file offers for the oracle's sake, with fewer batches.
    """
    cases = []
    for record in records():
        if record["kind"] != "numeric" or (ids and record["id"] not in ids):
            continue
        for number, variant in enumerate(record.get("variants") or [{}]):
            merged = dict(record)
            dims = dict(record["shapes"])
            for key, value in variant.items():
                if key in _SIZES:
                    dims[key] = value
                else:
                    inner = isinstance(value, dict)
                    merged[key] = {**(record.get(key) or {}), **value} if inner else value
            if reduced:
                dims.update(record.get("oracle_shapes") or {})
            cases.append(Case(record["id"], number, merged, dims))
    return cases
