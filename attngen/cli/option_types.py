"""What stands behind an option: `--head-dim 192,128`, `-D W=1024`, `--shape B=2,Sq=512`."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar, final

import click

if TYPE_CHECKING:
    ParamType = click.ParamType[Any]
else:
    ParamType = click.ParamType  # before click 8.5 it has no type argument

__all__ = [
    "ASSIGNMENT", "HEAD_DIM", "Names", "ParamType", "ROWS", "SHAPE", "Scalar", "consts_option",
    "dtype_option", "head_dim_option", "input_option", "inputs_option", "schedule_option",
    "seed_option", "set_option", "shape_option", "spec_argument", "unique",
]  # fmt: skip

Scalar: TypeAlias = bool | int | float
F = TypeVar("F", bound=Callable[..., Any])

_NAME: Final = r"[A-Za-z_][A-Za-z_0-9]*"
_INTEGER: Final = re.compile(r"[+-]?(0[xX][0-9a-fA-F]+|[0-9][0-9_]*)")
_LARGEST: Final = 2**63 - 1


@final
class _HeadDim(ParamType):
    """`128`, or `192,128` for query and key, and value."""

    name = "D|Dqk,Dv"

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[int, int]:
        if isinstance(value, tuple):
            return value
        match = re.fullmatch(r"\s*(\d{1,9})\s*(?:,\s*(\d{1,9})\s*)?", value)
        if match is None:
            self.fail(f"{value!r} is neither a head dim nor two, as in 128 or 192,128", param, ctx)
        return int(match[1]), int(match[2] or match[1])


@final
class _Assignment(ParamType):
    """`NAME=VALUE`, a number or a truth value, or numbers with commas between them."""

    name = "NAME=VALUE"

    def __init__(self, *, is_list: bool) -> None:
        self._is_list = is_list

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[str, Any]:
        if isinstance(value, tuple):
            return value
        name, equals, text = value.partition("=")
        if not equals or not re.fullmatch(_NAME, name.strip()):
            self.fail(f"{value!r} is not NAME=VALUE, as in W=1024", param, ctx)
        parts = text.split(",") if self._is_list else [text]
        values = [_scalar(part.strip()) for part in parts]
        for part, found in zip(parts, values, strict=True):
            if found is None:
                self.fail(f"{part.strip()!r} is neither a number nor true or false", param, ctx)
        return name.strip(), values[0] if len(values) == 1 else tuple(values)


@final
class _FileAssignment(ParamType):
    """`NAME=FILE.npy`."""

    name = "NAME=FILE"

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[str, Path]:
        if isinstance(value, tuple):
            return value
        name, equals, path = value.partition("=")
        if not equals or not path or not re.fullmatch(_NAME, name):
            self.fail(f"{value!r} is not NAME=FILE, as in q=q.npy", param, ctx)
        return name, Path(path)


@final
class _Shape(ParamType):
    """`B=2,Hq=16,Sq=8192`: sizes by name."""

    name = "NAME=SIZE,…"

    def convert(self, value: Any, param: Any, ctx: Any) -> Mapping[str, int]:
        if isinstance(value, dict):
            return value
        sizes: dict[str, int] = {}
        for part in value.split(","):
            match = re.fullmatch(rf"\s*({_NAME})\s*=\s*([0-9][0-9_]{{0,18}})\s*", part)
            if match is None:
                self.fail(f"{part.strip()!r} is not NAME=SIZE, as in Sq=8192", param, ctx)
            if match[1] in sizes:
                self.fail(f"{match[1]} is given twice", param, ctx)
            sizes[match[1]] = int(match[2])
        return sizes


@final
class _Rows(ParamType):
    """`100:200`, half-open."""

    name = "BEGIN:END"

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[int, int]:
        if isinstance(value, tuple):
            return value
        match = re.fullmatch(r"(\d{1,18}):(\d{1,18})", value)
        if match is None:
            self.fail(f"{value!r} is not BEGIN:END, as in 100:200", param, ctx)
        return int(match[1]), int(match[2])


@final
class Names(ParamType):
    """`sm_80,sm_90a`: words with commas between them, each once."""

    name = "NAME,…"

    def __init__(self, choices: tuple[str, ...] | None = None) -> None:
        self._choices = choices

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[str, ...]:
        if isinstance(value, tuple):
            return value
        words = tuple(dict.fromkeys(word.strip() for word in value.split(",")))
        for word in words:
            if not word or (self._choices is not None and word not in self._choices):
                wanted = f"; possible are {', '.join(self._choices)}" if self._choices else ""
                self.fail(f"{word!r} is not a name{wanted}", param, ctx)
        return words


def _scalar(text: str) -> Scalar | None:
    match text.lower():
        case "true":
            return True
        case "false":
            return False
    if _INTEGER.fullmatch(text):
        if len(text) > 40:  # far outside 64 bits, and slow to read
            return None
        try:
            return int(text, 16) if "x" in text.lower() else int(text)
        except ValueError:
            return None
    try:
        number = float(text)
    except ValueError:
        return None
    if math.isinf(number) and "inf" not in text.lower():
        return None
    return number


HEAD_DIM: Final = _HeadDim()
ASSIGNMENT: Final = _Assignment(is_list=False)
LIST_ASSIGNMENT: Final = _Assignment(is_list=True)
FILE_ASSIGNMENT: Final = _FileAssignment()
SHAPE: Final = _Shape()
ROWS: Final = _Rows()


def unique(option: str, pairs: tuple[tuple[str, Any], ...]) -> dict[str, Any]:
    """Pairs from a repeated option as a mapping; the same name twice is an error."""
    result: dict[str, Any] = {}
    for name, value in pairs:
        if name in result:
            raise click.BadParameter(f"{name} is given twice", param_hint=f"'{option}'")
        result[name] = value
    return result


# ---- options that several commands have ---------------------------------------------------


def spec_argument(function: F) -> F:
    return click.argument("spec", type=click.Path(path_type=Path), metavar="SPEC.attn")(function)


def dtype_option(function: F) -> F:
    return click.option(
        "--dtype",
        metavar="[fp16|bf16|fp32]",
        help="Element type of q, k, v and o, where the file leaves it open.",
    )(function)


def head_dim_option(function: F) -> F:
    return click.option(
        "--head-dim",
        type=HEAD_DIM,
        metavar="D or Dqk,Dv",
        help="Head dim, or two: of q and k, and of v; where the file leaves it open.",
    )(function)


def consts_option(function: F) -> F:
    return click.option(
        "-D", "--define", "consts", type=ASSIGNMENT, multiple=True,
        help="A value for a `const` of the file.  May be repeated.",
    )(function)  # fmt: skip


def _without_braces(context: Any, parameter: Any, value: str | None) -> str | None:
    """The text is what stands between the braces of a schedule block."""
    if value is not None and not {"{", "}"}.isdisjoint(value):
        raise click.BadParameter("a schedule is settings without braces, as in 'tile q = 16'")
    return value


def schedule_option(function: F) -> F:
    return click.option(
        "--schedule",
        metavar="TEXT",
        callback=_without_braces,
        help='Settings that win over the file\'s, as in "tile q = 16; passes two".',
    )(function)


def shape_option(function: F) -> F:
    return click.option(
        "--shape",
        type=SHAPE,
        help="Sizes of the problem: B, Hq, Hkv, Sq, Skv, and names that tensors' shapes use.",
    )(function)


def inputs_option(function: F) -> F:
    return click.option(
        "--inputs", "archive", type=click.Path(path_type=Path), metavar="FILE.npz",
        help="Arrays by name: q, k, v, tensors, params.",
    )(function)  # fmt: skip


def input_option(function: F) -> F:
    return click.option(
        "--input", "files", type=FILE_ASSIGNMENT, multiple=True,
        help="A .npy file for an array; wins over an archive.  May be repeated.",
    )(function)  # fmt: skip


def set_option(function: F) -> F:
    return click.option(
        "--set", "values", type=LIST_ASSIGNMENT, multiple=True,
        help="A value for a param, or one for a whole tensor.  May be repeated.",
    )(function)  # fmt: skip


def seed_option(function: F) -> F:
    return click.option(
        "--seed", type=click.IntRange(0), default=0, help="For inputs that are made up."
    )(function)
