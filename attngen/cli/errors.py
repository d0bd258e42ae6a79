"""What can be wrong with a command line and with the files it names: A71x, A72x; and A902."""

from __future__ import annotations

from typing import final

from attngen.diagnostics.diagnostic import Diagnostic

__all__ = [
    "BadOption", "CannotMake", "CannotRead", "CannotWrite", "InputMismatch",
    "InternalError", "LeftOpen", "NoGpuToTune", "OutOfMemory", "ParamWithoutValue",
    "ReadsOutside", "UnknownInput", "WrongUsage",
]  # fmt: skip


@final
class WrongUsage(Diagnostic):
    """The command line itself: an unknown command or option, a missing argument."""

    code = "A710"
    title = "{problem}"
    hint = "`{command} -h` shows what it takes"
    problem: str
    command: str


@final
class BadOption(Diagnostic):
    """`--shape Hqq=4`, `--rows 8:4`: readable, but not possible here."""

    code = "A711"
    title = "{option} {value}: {problem}"
    hint = "{advice}"
    option: str
    value: str
    problem: str
    advice: str | None = None


@final
class CannotRead(Diagnostic):
    """A file that is not there, is a directory, or does not hold what it should."""

    code = "A712"
    title = "cannot read `{path}`: {reason}"
    hint = "{advice}"
    path: str
    reason: str
    advice: str | None = None


@final
class CannotWrite(Diagnostic):
    """An output that cannot be written.  What was there before is there still."""

    code = "A713"
    title = "cannot write `{path}`: {reason}"
    label = "nothing was changed"
    path: str
    reason: str


@final
class LeftOpen(Diagnostic):
    """A dtype or head dim that neither the file nor the command line gives."""

    code = "A714"
    title = "`{attention}` leaves its {what} open"
    hint = "pass {option}, or write `{statement}` into the attention block"
    attention: str
    what: str
    option: str
    statement: str


@final
class ParamWithoutValue(Diagnostic):
    code = "A715"
    title = "`{attention}` needs a value for the param `{param}`"
    label = "declared here, without a default"
    hint = "pass --set {param}=…"
    attention: str
    param: str


@final
class UnknownInput(Diagnostic):
    """An array or value for a name that the attention block does not have."""

    code = "A716"
    title = "{where}: `{attention}` has no {kind} `{name}`"
    label = "it takes {takes}"
    hint = "did you mean `{closest}`?"
    where: str
    attention: str
    kind: str
    name: str
    takes: str
    closest: str | None


@final
class CannotMake(Diagnostic):
    """A captured tensor whose valid values nobody can guess."""

    code = "A717"
    title = "no valid values could be made up for the tensor `{tensor}`: {reason}"
    label = "declared here"
    hint = "pass --input {tensor}={tensor}.npy{alternative}"
    tensor: str
    reason: str
    alternative: str = ""


@final
class InputMismatch(Diagnostic):
    """An array from a file that does not fit the rest."""

    code = "A718"
    title = "`{name}` from {where} {problem}"
    label = "expected {expected}"
    name: str
    where: str
    problem: str
    expected: str


@final
class OutOfMemory(Diagnostic):
    code = "A719"
    title = "there is not enough memory for this: {reason}"
    hint = "choose a smaller --shape, or a part of it with --rows"
    reason: str


@final
class NoGpuToTune(Diagnostic):
    """`attngen tune` on a machine on which nothing can be timed."""

    code = "A721"
    title = "schedules are timed on a GPU: {reason}"
    hint = (
        "--dry-run ranks them by the cost model, for --device h200 or another; --replay FILE"
        " searches with recorded times; --device cpu rehearses everything but the times"
    )
    reason: str


@final
class ReadsOutside(Diagnostic):
    """Sizes that were asked for, with which a tensor is too small for what is read of it."""

    code = "A722"
    title = "with {sizes} the tensor `{tensor}` is read outside of its shape {shape}"
    label = "declared here"
    hint = "every read is inside where Sq and Skv are at most {longest}"
    sizes: str
    tensor: str
    shape: tuple[int, ...]
    longest: int | None


@final
class InternalError(Diagnostic):
    """Anything that is not an AttnError: whatever the input was, it should have been one."""

    code = "A902"
    title = "bug in attngen: {kind}: {said}"
    label = "{details}"
    hint = "please report it with the command line and the .attn file"
    kind: str
    said: str
    details: str
