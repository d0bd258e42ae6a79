"""Everything that can be wrong with names, types and statements (A2xx), with a schedule value
by itself (A40x), and with the files that a text imports (A70x)."""

from __future__ import annotations

from dataclasses import field
from typing import final

from attngen.diagnostics.diagnostic import Diagnostic, Note
from attngen.diagnostics.span import Span

__all__ = [
    "BadPower",
    "BadTensorSize",
    "CheckDiagnostic",
    "ConflictingValue",
    "ConstWithoutValue",
    "DivisionByZero",
    "DuplicateName",
    "DuplicateSchedule",
    "DuplicateSetting",
    "DuplicateStatement",
    "EmptyRange",
    "ExpansionTooLarge",
    "ExpressionTooDeep",
    "HeadDimOutOfRange",
    "HeadsNotDivisible",
    "HiddenHere",
    "ImportCycle",
    "MissingArgument",
    "NegativeIndex",
    "NoAttention",
    "NotATensor",
    "NotCallable",
    "NotConstant",
    "NumberOutOfRange",
    "OptionalSizeUnbound",
    "OutsideRange",
    "RecursiveDefinition",
    "RepeatedArgument",
    "ReservedName",
    "ScoreInMask",
    "SettingOutOfRange",
    "SettingWithSigmoid",
    "SeveralAttentions",
    "SigmoidWithout",
    "TensorWithoutIndex",
    "UnknownArgument",
    "UnknownConst",
    "UnknownDtype",
    "UnknownElement",
    "UnknownFunction",
    "UnknownName",
    "UnknownOutput",
    "UnknownSetting",
    "UnknownType",
    "UnknownWeights",
    "UnreadableFile",
    "UnsupportedRange",
    "UsedTooEarly",
    "WithoutOutput",
    "WrongArgumentCount",
    "WrongIndexCount",
    "WrongSetting",
    "WrongType",
]


class CheckDiagnostic(Diagnostic):
    """An error that may lie inside of a definition; `calls` leads there from the block."""

    calls: tuple[Note, ...] = field(default=(), kw_only=True)

    def notes(self) -> tuple[Note, ...]:
        return self.calls


# ---- names -------------------------------------------------------------------------------


@final
class UnknownName(CheckDiagnostic):
    """`kvv <= qpos`."""

    code = "A201"
    title = "unknown name `{name}`"
    label = "nothing of this name is visible {place}"
    hint = "{advice}"
    name: str
    place: str
    advice: str | None


@final
class UnknownFunction(CheckDiagnostic):
    """`mask windw(4, 0)`."""

    code = "A202"
    title = "unknown function or definition `{name}`"
    label = "nothing of this name can be called"
    hint = "{advice}"
    name: str
    advice: str | None


@final
class DuplicateName(CheckDiagnostic):
    """Two declarations of one name."""

    code = "A203"
    title = "`{name}` is declared twice"
    label = "declared again here"
    name: str
    first: Span

    def notes(self) -> tuple[Note, ...]:
        return (Note("first declared here", self.first),)


@final
class ReservedName(CheckDiagnostic):
    """`param kv : int`."""

    code = "A204"
    title = "`{name}` cannot be declared"
    label = "`{name}` is {meaning}"
    hint = "choose another name, such as `{example}`"
    name: str
    meaning: str
    example: str


@final
class UsedTooEarly(CheckDiagnostic):
    """A let, or a const in another const, above its own line."""

    code = "A205"
    title = "`{name}` is used above its declaration"
    label = "not declared yet"
    hint = "move `{statement} {name}` up"
    name: str
    statement: str
    declared: Span

    def notes(self) -> tuple[Note, ...]:
        return (Note("declared here", self.declared), *self.calls)


@final
class HiddenHere(CheckDiagnostic):
    """An index, a size or `s` where its value does not exist: `kv` in a scale."""

    code = "A206"
    title = "{place} cannot depend on `{name}`"
    label = "{text}"
    hint = "{advice}"
    place: str
    name: str
    text: str
    advice: str | None


@final
class ScoreInMask(CheckDiagnostic):
    """`mask s > 0`."""

    code = "A207"
    title = "a mask cannot depend on the score `s`"
    label = "{text}"
    hint = "write `score where(s > t, s, -inf)`: a score of -inf is a masked pair"
    text: str


@final
class TensorWithoutIndex(CheckDiagnostic):
    """`doc == 3` for a tensor `doc`."""

    code = "A208"
    title = "the tensor `{name}` is used without an index"
    label = "a whole tensor is no value"
    hint = "read one element: `{example}`"
    name: str
    example: str


@final
class NotATensor(CheckDiagnostic):
    """`W[b]` for a const `W`, `table = 3` for a parameter of type tensor."""

    code = "A209"
    title = "`{name}` is not a tensor"
    label = "{found}"
    hint = "{advice}"
    name: str
    found: str
    advice: str | None


@final
class NotCallable(CheckDiagnostic):
    """`W(3)` for a const `W`."""

    code = "A210"
    title = "`{name}` cannot be called"
    label = "`{name}` is {meaning}"
    hint = "{advice}"
    name: str
    meaning: str
    advice: str | None


# ---- types -------------------------------------------------------------------------------


@final
class WrongType(CheckDiagnostic):
    """`causal + 1`, `doc[b, 0.5]`, `3 and x`."""

    code = "A211"
    title = "{what} must be {expected}"
    label = "this is {found}"
    hint = "{advice}"
    what: str
    expected: str
    found: str
    advice: str | None


@final
class WrongIndexCount(CheckDiagnostic):
    """`doc[b]` for `int32[B, Skv]`."""

    code = "A212"
    title = "`{name}` has {dims}, and {given}"
    label = "the tensor is `{declared}`"
    hint = "optional dimensions are indexed too"
    name: str
    dims: str
    given: str
    declared: str
    place: Span | None

    def notes(self) -> tuple[Note, ...]:
        return (Note("declared here", self.place), *self.calls)


@final
class NegativeIndex(CheckDiagnostic):
    """`doc[b, -1]`."""

    code = "A213"
    title = "index {index} of `{name}` is outside of the tensor"
    label = "{reason}"
    hint = "{advice}"
    name: str
    index: int
    reason: str
    advice: str | None


@final
class DivisionByZero(CheckDiagnostic):
    """`q // 0`."""

    code = "A214"
    title = "division by zero"
    label = "this is always 0"


@final
class BadPower(CheckDiagnostic):
    """`x ** y`."""

    code = "A215"
    title = "`**` takes a whole constant exponent of 0 to {largest}, or the base 2"
    label = "this exponent is {found}"
    hint = "{advice}"
    largest: int
    found: str
    advice: str


@final
class NumberOutOfRange(CheckDiagnostic):
    """`2**64`, `1e39`."""

    code = "A216"
    title = "{what} does not fit {holder}"
    label = "{found}"
    hint = "{advice}"
    what: str
    holder: str
    found: str
    advice: str | None


@final
class NotConstant(CheckDiagnostic):
    """`head_dim w` for a param `w`."""

    code = "A217"
    title = "{what} must be known at compile time"
    label = "`{name}` is {meaning}"
    hint = "{advice}"
    what: str
    name: str
    meaning: str
    advice: str | None


# ---- calls -------------------------------------------------------------------------------


@final
class WrongArgumentCount(CheckDiagnostic):
    """`min(1)`, `causal(1)`."""

    code = "A221"
    title = "`{name}` takes {takes}, and {given}"
    label = "{usage}"
    name: str
    takes: str
    given: str
    usage: str


@final
class UnknownArgument(CheckDiagnostic):
    """`window(lft = 3, right = 0)`."""

    code = "A222"
    title = "`{function}` has no parameter `{name}`"
    label = "{usage}"
    hint = "{advice}"
    function: str
    name: str
    usage: str
    advice: str | None


@final
class RepeatedArgument(CheckDiagnostic):
    """`window(1, left = 2)`."""

    code = "A223"
    title = "`{name}` of `{function}` is given twice"
    label = "given again here"
    function: str
    name: str
    first: Span

    def notes(self) -> tuple[Note, ...]:
        return (Note("first given here", self.first), *self.calls)


@final
class MissingArgument(CheckDiagnostic):
    """`window()`."""

    code = "A224"
    title = "`{function}` needs a value for {names}"
    label = "{usage}"
    function: str
    names: str
    usage: str


@final
class RecursiveDefinition(CheckDiagnostic):
    """A definition that needs itself."""

    code = "A225"
    title = "`{name}` is defined by itself"
    label = "{chain}"
    name: str
    chain: str


@final
class ExpansionTooLarge(CheckDiagnostic):
    """Definitions that call each other too often."""

    code = "A226"
    title = "the expressions have more than {limit} operations"
    label = "the limit is reached here"
    hint = "give a part that is used several times a name with `let`"
    limit: int


@final
class ExpressionTooDeep(CheckDiagnostic):
    """Lets and definitions that nest too deeply."""

    code = "A227"
    title = "expression nested too deeply"
    label = "more than {limit} operations inside one another, definitions and lets included"
    limit: int


# ---- statements --------------------------------------------------------------------------


@final
class DuplicateStatement(CheckDiagnostic):
    """`scale 1.0` twice."""

    code = "A231"
    title = "`{statement}` is given twice"
    label = "given again here"
    statement: str
    first: Span

    def notes(self) -> tuple[Note, ...]:
        return (Note("first given here", self.first),)


@final
class UnknownType(CheckDiagnostic):
    """`param w : integer`."""

    code = "A232"
    title = "unknown type `{name}`"
    label = "{what} is {choices}"
    hint = "did you mean `{closest}`?"
    name: str
    what: str
    choices: str
    closest: str | None


@final
class UnknownElement(CheckDiagnostic):
    """`tensor doc : int23[B, Skv]`."""

    code = "A233"
    title = "unknown element type `{name}`"
    label = "elements are {choices}"
    hint = "did you mean `{closest}`?"
    name: str
    choices: str
    closest: str | None


@final
class UnknownDtype(CheckDiagnostic):
    """`dtype half`."""

    code = "A234"
    title = "unknown dtype `{name}`"
    label = "queries, keys and values are {choices}"
    hint = "did you mean `{closest}`?"
    name: str
    choices: str
    closest: str | None


@final
class HeadDimOutOfRange(CheckDiagnostic):
    """`head_dim 512`."""

    code = "A235"
    title = "head dim {name} = {value} is not supported"
    label = "supported are 1 to {largest}"
    name: str
    value: int
    largest: int


@final
class HeadsNotDivisible(CheckDiagnostic):
    """`heads q = 6, kv = 4`."""

    code = "A236"
    title = "{q} query heads cannot share {kv} key/value heads"
    label = "{reason}"
    hint = "{advice}"
    q: int
    kv: int
    reason: str
    advice: str | None


@final
class ConflictingValue(CheckDiagnostic):
    """A dtype or head dim that the block and the caller state differently."""

    code = "A237"
    title = "{what} is {declared} here, and was asked to be {given}"
    label = "declared here"
    hint = "leave the statement out to let the caller choose"
    what: str
    declared: str
    given: str


@final
class ConstWithoutValue(CheckDiagnostic):
    """`const W : int` without -D W=…"""

    code = "A238"
    title = "the const `{name}` has no value"
    label = "it must be given"
    hint = "give it with `-D {name}={example}`, or write a value here"
    name: str
    example: str


@final
class UnknownConst(CheckDiagnostic):
    """`-D V=4` for a block without a const `V`."""

    code = "A239"
    title = "there is no const `{name}` to give a value to"
    label = "{reason}"
    hint = "did you mean `{closest}`?"
    name: str
    reason: str
    closest: str | None


@final
class UnsupportedRange(CheckDiagnostic):
    """`param w : int where w * w < 9`."""

    code = "A240"
    title = "the range of `{name}` must compare `{name}` with constants"
    label = "{reason}"
    hint = "write `where 1 <= {name} < 4096`, with one end or both"
    name: str
    reason: str


@final
class EmptyRange(CheckDiagnostic):
    """`where 4 <= w < 4`."""

    code = "A241"
    title = "no value of `{name}` lies in this range"
    label = "the range is empty"
    name: str


@final
class OutsideRange(CheckDiagnostic):
    """`param w : int = 0 where 1 <= w`."""

    code = "A242"
    title = "the default {value} of `{name}` lies outside of its range"
    label = "the default"
    name: str
    value: str
    range: Span

    def notes(self) -> tuple[Note, ...]:
        return (Note("the range", self.range),)


@final
class BadTensorSize(CheckDiagnostic):
    """`tensor t : float[B, skv]`, `float[w]` for a param `w`, `float[0]`."""

    code = "A243"
    title = "`{name}` cannot be the size of a dimension"
    label = "{reason}"
    hint = "{advice}"
    name: str
    reason: str
    advice: str | None


@final
class OptionalSizeUnbound(CheckDiagnostic):
    """`tensor t : float[N?]` where nothing else says what `N` is."""

    code = "A244"
    title = "nothing gives the size `{name}` a value"
    label = "a dimension with `?` may be 1 or absent, and so binds no name"
    hint = "use `{name}` without `?` in some tensor, or a size of the problem here"
    name: str


@final
class UnknownWeights(CheckDiagnostic):
    """`weights sofmax`."""

    code = "A245"
    title = "unknown weights `{name}`"
    label = "weights are {choices}"
    hint = "did you mean `{closest}`?"
    name: str
    choices: str
    closest: str | None


@final
class SigmoidWithout(CheckDiagnostic):
    """`weights sigmoid` with `output lse` or a sink."""

    code = "A246"
    title = "`weights sigmoid` has no {what}"
    label = "{reason}"
    what: str
    reason: str


@final
class UnknownOutput(CheckDiagnostic):
    """`output o, lsee`."""

    code = "A247"
    title = "unknown output `{name}`"
    label = "outputs are {choices}"
    hint = "did you mean `{closest}`?"
    name: str
    choices: str
    closest: str | None


@final
class WithoutOutput(CheckDiagnostic):
    """`output lse`."""

    code = "A248"
    title = "`o` is missing among the outputs"
    label = "every kernel writes `o`"
    hint = "write `output {fixed}`"
    fixed: str


@final
class NoAttention(CheckDiagnostic):
    """A file of definitions only."""

    code = "A251"
    title = "the file has no `attention` block"
    label = "definitions and schedules alone compute nothing"
    hint = "add `attention NAME {{ }}`, or import this file from one that has it"


@final
class SeveralAttentions(CheckDiagnostic):
    """Two blocks in one file."""

    code = "A252"
    title = "the file has several `attention` blocks: {names}"
    label = "the first one"
    hint = "put each into a file of its own; shared definitions can be imported"
    names: str
    others: tuple[Span, ...]

    def notes(self) -> tuple[Note, ...]:
        return tuple(Note("another one", span) for span in self.others)


# ---- schedules ---------------------------------------------------------------------------


@final
class UnknownSetting(CheckDiagnostic):
    """`tiles q = 64, kv = 64`."""

    code = "A401"
    title = "a schedule has no setting `{key}`"
    label = "settings are {choices}"
    hint = "did you mean `{closest}`?"
    key: str
    choices: str
    closest: str | None


@final
class DuplicateSetting(CheckDiagnostic):
    """`warps` twice in one block."""

    code = "A402"
    title = "`{key}` is set twice in one schedule"
    label = "set again here"
    key: str
    first: Span

    def notes(self) -> tuple[Note, ...]:
        return (Note("first set here", self.first),)


@final
class DuplicateSchedule(CheckDiagnostic):
    """Two blocks for one target."""

    code = "A403"
    title = "there are two schedules for {target}"
    label = "the second one"
    target: str
    first: Span

    def notes(self) -> tuple[Note, ...]:
        return (Note("the first one", self.first),)


@final
class WrongSetting(CheckDiagnostic):
    """`passes four`, `tile 64`, `loop q`."""

    code = "A404"
    title = "`{key}` takes {takes}"
    label = "{problem}"
    hint = "did you mean `{closest}`?"
    key: str
    takes: str
    problem: str
    closest: str | None


@final
class SettingOutOfRange(CheckDiagnostic):
    """`warps 64`."""

    code = "A405"
    title = "`{key}` = {value} is out of range"
    label = "{low} to {high} are possible"
    key: str
    value: int
    low: int
    high: int


@final
class SettingWithSigmoid(CheckDiagnostic):
    """`passes` or `normalize` where the weights are sigmoid."""

    code = "A406"
    title = "`{key}` means nothing with `weights sigmoid`"
    label = "sigmoid weights need no maximum and no sum: there is one pass and nothing to divide"
    key: str
    weights: Span | None

    def notes(self) -> tuple[Note, ...]:
        return (Note("the weights", self.weights),)


# ---- files -------------------------------------------------------------------------------


@final
class UnreadableFile(CheckDiagnostic):
    """An import, or a main file, that cannot be read."""

    code = "A701"
    title = "cannot read `{path}`"
    label = "{reason}"
    path: str
    reason: str


@final
class ImportCycle(CheckDiagnostic):
    """Files that import each other, or a very long chain of imports."""

    code = "A702"
    title = "the imports go round in a circle, or on for too long"
    label = "{chain}"
    chain: str
