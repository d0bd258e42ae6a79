"""What can be wrong with the arguments of a call: A62x."""

from __future__ import annotations

from attngen.diagnostics.diagnostic import Diagnostic

__all__ = [
    "DifferentStates", "DtypeMismatch", "GroupMismatch", "HeadDimUnsupported", "IntegerTooLarge",
    "MissingArgument", "OutputOverlaps", "ParamOutOfRange", "ParamType", "RangeOutside",
    "ReservedArgument", "ShapeMismatch", "SizeTooLarge", "UnknownArgument",
]  # fmt: skip


class ShapeMismatch(Diagnostic):
    code = "A621"
    title = "argument `{argument}` has shape {has}"
    label = "expected {expected}"
    argument: str
    has: str
    expected: str


class DtypeMismatch(Diagnostic):
    code = "A622"
    title = "argument `{argument}` has dtype {has}"
    label = "expected {expected}"
    hint = "{advice}"
    argument: str
    has: str
    expected: str
    advice: str | None = None


class MissingArgument(Diagnostic):
    code = "A623"
    title = "`{attention}` needs the {kind} `{argument}`, which was not given"
    label = "declared here"
    hint = "pass {argument}=…"
    attention: str
    kind: str
    argument: str


class UnknownArgument(Diagnostic):
    code = "A624"
    title = "`{attention}` has no tensor or param `{argument}`"
    label = "it takes {takes}"
    hint = "did you mean `{closest}`?"
    attention: str
    argument: str
    takes: str
    closest: str | None


class ParamType(Diagnostic):
    code = "A625"
    title = "param `{argument}` is {has}"
    label = "expected {expected}"
    argument: str
    has: str
    expected: str


class ParamOutOfRange(Diagnostic):
    code = "A626"
    title = "param `{argument}` is {has}, outside its declared range"
    label = "the range is declared here"
    argument: str
    has: str


class GroupMismatch(Diagnostic):
    code = "A627"
    title = "{Hq} query heads cannot share {Hkv} key/value heads"
    label = "the number of query heads must be a multiple of the number of key/value heads"
    Hq: int
    Hkv: int


class HeadDimUnsupported(Diagnostic):
    code = "A628"
    title = "head dim {head_dim} of `{argument}` is not supported"
    label = "head dims 1 to {largest} are supported"
    argument: str
    head_dim: int
    largest: int


class SizeTooLarge(Diagnostic):
    code = "A629"
    title = "{name} is {has}; at most {limit} is supported"
    name: str
    has: int
    limit: int


class IntegerTooLarge(Diagnostic):
    code = "A630"
    title = "with these sizes and params an integer may reach {value}, beyond 64 bits"
    label = "this one"
    value: str


class RangeOutside(Diagnostic):
    code = "A631"
    title = "{name} is [{begin}, {end}), which is not a range of [0, {size})"
    name: str
    begin: int
    end: int
    size: int


class ReservedArgument(Diagnostic):
    code = "A632"
    title = "`{argument}` is not supported: {reason}"
    argument: str
    reason: str


class OutputOverlaps(Diagnostic):
    code = "A633"
    title = "argument `out` shares memory with `{argument}`"
    label = "some query tiles would read what others have written"
    hint = "pass an array of its own, or leave `out` out"
    argument: str


class DifferentStates(Diagnostic):
    code = "A634"
    title = "partial states of different problems cannot be merged"
    label = "one is {one}, the other {other}"
    hint = "merge states of one kernel, over the same rows and heads and other keys"
    one: str
    other: str
