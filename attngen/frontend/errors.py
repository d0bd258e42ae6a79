"""Everything that can be wrong with the syntax of a `.attn` file (A1xx)."""

from __future__ import annotations

from typing import final

from attngen.diagnostics.diagnostic import Diagnostic, Note
from attngen.diagnostics.span import Span

__all__ = [
    "EmptyProgram",
    "ExpectedOther",
    "ForeignSyntax",
    "LateImport",
    "MalformedNumber",
    "MismatchedBracket",
    "MisplacedStatement",
    "MissingName",
    "MissingType",
    "MissingValue",
    "NumberTooLarge",
    "OnlyComments",
    "ReservedForLater",
    "ReservedWord",
    "SingleEquals",
    "TooDeep",
    "UnclosedBracket",
    "UnclosedString",
    "UnexpectedCharacter",
    "UnknownStatement",
    "UnopenedBracket",
    "WrongArguments",
    "WrongDimension",
]


# ---- the whole text ----------------------------------------------------------------------


@final
class EmptyProgram(Diagnostic):
    """A text of nothing but blanks."""

    code = "A101"
    title = "the program is empty"
    hint = "the smallest program is `attention NAME {{ }}`"


@final
class OnlyComments(Diagnostic):
    """A text of nothing but comments."""

    code = "A102"
    title = "the program has comments only"
    label = "behind here, an `attention` block is missing"
    hint = "the smallest program is `attention NAME {{ }}`"


# ---- words and signs ---------------------------------------------------------------------


@final
class ExpectedOther(Diagnostic):
    """The general case: what stands here fits no rule of the language."""

    code = "A103"
    title = "expected {expected}"
    label = "{found}"
    hint = "{advice}"
    expected: str
    found: str
    advice: str | None = None
    opening: Span | None = None

    def notes(self) -> tuple[Note, ...]:
        return _opened_here(self.opening)


@final
class UnexpectedCharacter(Diagnostic):
    """A character that no token of the language has: `@`, a typographic minus."""

    code = "A104"
    title = "unexpected character {character}"
    label = "{why}"
    hint = "write `{instead}`"
    character: str
    why: str
    instead: str | None


@final
class UnclosedString(Diagnostic):
    """`import "masks.attn` without the second quote."""

    code = "A105"
    title = "the text in quotes has no end"
    label = 'a second `"` is missing on this line'


@final
class ForeignSyntax(Diagnostic):
    """What another language writes: `&&`, `True`, `a if c else b`."""

    code = "A106"
    title = "`{found}` is not part of the language"
    label = "here"
    hint = "{advice}"
    found: str
    advice: str | None


@final
class SingleEquals(Diagnostic):
    """`mask a = b`."""

    code = "A107"
    title = "`=` gives a value to a name; it does not compare"
    label = "here"
    hint = "write `{instead}`"
    instead: str


@final
class ReservedWord(Diagnostic):
    """`param inf : float`."""

    code = "A108"
    title = "`{word}` cannot be a name"
    label = "the word has a meaning of its own"
    word: str


@final
class ReservedForLater(Diagnostic):
    """Syntax that is kept free for an extension that does not exist yet."""

    code = "A109"
    title = "{what} are reserved for a later version"
    label = "not available yet"
    hint = "{advice}"
    what: str
    advice: str | None = None


@final
class MalformedNumber(Diagnostic):
    """`0x1F`, `1.2.3`, `64k`, `007`."""

    code = "A110"
    title = "`{text}` is not a number"
    label = "numbers are decimal, such as `64`, `0.5` or `1e-3`"
    text: str


@final
class NumberTooLarge(Diagnostic):
    """`1e999`."""

    code = "A111"
    title = "the number is too large"
    label = "no float and no integer of attngen holds it"
    hint = "infinity is written `inf`"


# ---- brackets ----------------------------------------------------------------------------


@final
class UnclosedBracket(Diagnostic):
    """A `(`, `[` or `{` whose partner is missing; the span is where it is missed."""

    code = "A112"
    title = "`{bracket}` is never closed"
    label = "`{partner}` is missing here"
    bracket: str
    partner: str
    opening: Span

    def notes(self) -> tuple[Note, ...]:
        return _opened_here(self.opening)


@final
class MismatchedBracket(Diagnostic):
    """`( ... ]`."""

    code = "A113"
    title = "`{found}` does not close `{bracket}`"
    label = "`{partner}` closes it"
    found: str
    bracket: str
    partner: str
    opening: Span

    def notes(self) -> tuple[Note, ...]:
        return _opened_here(self.opening)


@final
class UnopenedBracket(Diagnostic):
    """A `)`, `]` or `}` with nothing to close."""

    code = "A114"
    title = "`{bracket}` closes nothing"
    label = "no bracket is open here"
    bracket: str


def _opened_here(opening: Span | None) -> tuple[Note, ...]:
    return () if opening is None else (Note("opened here", opening),)


# ---- statements --------------------------------------------------------------------------


@final
class UnknownStatement(Diagnostic):
    """`wieghts softmax`."""

    code = "A115"
    title = "unknown statement `{word}`"
    label = "{where}"
    hint = "did you mean `{closest}`?"
    word: str
    where: str
    closest: str | None


@final
class MisplacedStatement(Diagnostic):
    """`mask` outside of every block, `tile` in an attention block."""

    code = "A116"
    title = "`{word}` does not belong here"
    label = "it belongs {place}"
    word: str
    place: str


@final
class LateImport(Diagnostic):
    """`import` behind a definition or block."""

    code = "A117"
    title = "imports come first"
    label = "move this line to the top of the file"


@final
class MissingName(Diagnostic):
    """`attention { ... }`, `let = 3`."""

    code = "A118"
    title = "`{statement}` needs a name"
    label = "{found}"
    hint = "write `{example}`"
    statement: str
    found: str
    example: str


@final
class MissingType(Diagnostic):
    """`param cap = 50.0`."""

    code = "A119"
    title = "`{name}` needs a type"
    label = "{found}"
    hint = "write `{example}`"
    name: str
    found: str
    example: str


@final
class MissingValue(Diagnostic):
    """`const W` with neither a value nor a type."""

    code = "A120"
    title = "`const {name}` has neither a value nor a type"
    label = "a value or a type is missing"
    hint = "write `const {name} = 128`, or `const {name} : int` for a value given with -D"
    name: str


@final
class WrongArguments(Diagnostic):
    """`heads 32`, `length k = 5`, `weights softmax(3)`."""

    code = "A121"
    title = "`{statement}` takes {takes}"
    label = "{problem}"
    statement: str
    takes: str
    problem: str


@final
class WrongDimension(Diagnostic):
    """`tensor t : float[2.5]`."""

    code = "A122"
    title = "a dimension is a name or a whole number"
    label = "`{text}` is neither"
    text: str


# ---- expressions -------------------------------------------------------------------------


@final
class TooDeep(Diagnostic):
    """A sum of a thousand terms, or a function of a function of a function ..."""

    code = "A123"
    title = "expression nested too deeply"
    label = "more than {limit} levels of operations"
    hint = "give a part of it a name with `let`; chains of `and`, `or` may have any length"
    limit: int
