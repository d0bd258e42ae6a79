"""Scalar types of expressions, and element types of arrays in memory."""

from __future__ import annotations

from enum import Enum
from typing import Final, final

from attngen.record import record

__all__ = ["BF16", "ELEMENTS", "FP16", "FP32", "FLOATING", "Element", "ScalarType"]


class ScalarType(Enum):
    """What an expression is: a truth value, a mathematical integer, or a float32."""

    BOOL = "bool"
    INT = "int"
    FLOAT = "float"


@final
@record
class Element:
    """How one array element is stored.

    `low` and `high` bound integers; `unit` is the rounding unit u of a floating type
    (2^-8 bf16, 2^-11 fp16, 2^-24 fp32: half a unit in the last place, relative).
    `weight_scale` is the power of two that weights (at most 1) are multiplied by before they
    are rounded to this type, so that small ones keep their precision: fp16's smallest normal
    number is 2^-14, and a row of 50,000 equal weights would be subnormal throughout.
    """

    name: str
    scalar: ScalarType
    bytes: int
    low: int = 0
    high: int = 0
    unit: float = 0.0
    weight_scale: float = 1.0


FP16: Final = Element("fp16", ScalarType.FLOAT, 2, unit=2.0**-11, weight_scale=2.0**15)
BF16: Final = Element("bf16", ScalarType.FLOAT, 2, unit=2.0**-8)
FP32: Final = Element("fp32", ScalarType.FLOAT, 4, unit=2.0**-24)

_STORED = (
    Element("bool", ScalarType.BOOL, 1, 0, 1),
    Element("int8", ScalarType.INT, 1, -(2**7), 2**7 - 1),
    Element("uint8", ScalarType.INT, 1, 0, 2**8 - 1),
    Element("int16", ScalarType.INT, 2, -(2**15), 2**15 - 1),
    Element("int32", ScalarType.INT, 4, -(2**31), 2**31 - 1),
    Element("uint32", ScalarType.INT, 4, 0, 2**32 - 1),
    Element("int64", ScalarType.INT, 8, -(2**63), 2**63 - 1),
    FP16,
    BF16,
    FP32,
)

ELEMENTS: Final[dict[str, Element]] = {element.name: element for element in _STORED}
"""Every element type of a captured tensor, by name (`float` also means fp32, `int` int32)."""

FLOATING: Final[dict[str, Element]] = {e.name: e for e in (FP16, BF16, FP32)}
"""The element types of query, key, value and output."""
