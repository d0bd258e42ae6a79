"""Explain a syntax error in the language's own words.

The parser says where it stopped and which terminals would have gone on.  A list of small
rules, most telling first, recognises the usual mistakes; the last one always answers.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Sequence
from typing import Final, final

from attngen.diagnostics.diagnostic import Diagnostic
from attngen.diagnostics.span import Span
from attngen.frontend import errors
from attngen.frontend.tokens import (
    END,
    NEW_LINE,
    RESERVED_WORDS,
    SCHEDULE_KEYS,
    STARTS,
    STATEMENTS,
    TOP_LEVEL,
    Token,
)
from attngen.record import record

__all__ = ["PARTNER", "Mistake", "closest_word", "explain"]

PARTNER: Final = {"(": ")", "[": "]", "{": "}"}

_OPERATORS: Final = {"ADD", "MULTIPLY", "POWER", "COMPARE", "AND", "OR"}
_VALUES: Final = {"NAME", "NUMBER", "TRUE", "FALSE", "INF", "NAN", "ADD", "NOT", "LPAR"}
_SIGNS: Final = {
    "EQUAL": "`=`",
    "COLON": "`:`",
    "COMMA": "`,`",
    "RPAR": "`)`",
    "RSQB": "`]`",
    "LBRACE": "`{`",
    "QMARK": "`?`",
    "RBRACE": "`}`",
    "WHERE": "`where`",
    "LPAR": "`(`",
    "LSQB": "`[`",
    "STRING": "a text in double quotes",
    NEW_LINE: "the end of the line",
}

_CHOOSE: Final = "choose with `where(condition, a, b)`"
_FOREIGN: Final = {
    "&&": "write `and`",
    "&": "write `and`",
    "||": "write `or`",
    "|": "write `or`",
    "!": "write `not`",
    "~": "write `not`",
    "^": "a power is written `**`",
    ";": "every statement has a line of its own",
    "if": _CHOOSE,
    "elif": _CHOOSE,
    "else": _CHOOSE,
    "?": _CHOOSE,
    "is": "write `==`",
    "AND": "write `and`",
    "OR": "write `or`",
    "NOT": "write `not`",
    "xor": "write `!=` between two conditions",
}
_LOOK_ALIKE: Final = {
    "≤": "<=",
    "≥": ">=",
    "≠": "!=",
    "−": "-",
    "–": "-",
    "×": "*",
    "·": "*",
    "÷": "/",
    "∧": "and",
    "∨": "or",
    "¬": "not",
    "∞": "inf",
    "“": '"',
    "”": '"',
    "'": '"',
}
_ALIASES: Final = {
    "def": "define",
    "fn": "define",
    "func": "define",
    "function": "define",
    "var": "let",
    "input": "tensor",
    "attn": "attention",
}


@final
@record
class Mistake:
    """Where the parser stopped, and all that it knew there."""

    tokens: Sequence[Token]
    at: int
    """Index of the token that does not fit."""
    start: int
    """Index of the first token of its statement."""
    expected: frozenset[str]
    """The terminals that would fit."""
    brackets: tuple[Token, ...]
    """The open `(` and `[` of the statement."""
    block: Token | None
    """The `{` of the block around it."""
    scope: str
    """`file`, `attention` or `schedule`."""

    @property
    def found(self) -> Token:
        return self.tokens[self.at]

    @property
    def before(self) -> Token | None:
        """The token in front, within the statement."""
        inside = reversed(self.tokens[self.start : self.at])
        return next((t for t in inside if t.type != NEW_LINE), None)

    @property
    def after(self) -> Token | None:
        """The token behind, on the same line."""
        token = self.tokens[self.at + 1] if self.at + 1 < len(self.tokens) else None
        return None if token is None or token.type in (NEW_LINE, END) else token

    @property
    def keyword(self) -> str:
        """The first word of the statement."""
        return self.tokens[self.start].text

    @property
    def at_start(self) -> bool:
        return self.at == self.start

    @property
    def at_text_end(self) -> bool:
        last = self.found if self.found.type != NEW_LINE else self.tokens[self.at + 1]
        return last.type == END

    @property
    def first_on_line(self) -> bool:
        return self.at == 0 or self.tokens[self.at - 1].type == NEW_LINE

    @property
    def wants_value(self) -> bool:
        """An expression could begin here."""
        return {"NUMBER", "LPAR"} <= self.expected

    @property
    def wants_operator(self) -> bool:
        """An expression could go on here."""
        return {"ADD", "MULTIPLY"} <= self.expected

    @property
    def span(self) -> Span:
        """The token, or the place right behind the last one where something is missing."""
        return self.gap if self.found.type == NEW_LINE else self.found.span

    @property
    def gap(self) -> Span:
        """The empty place behind the token in front; at the end of the text, that end."""
        span = self.found.span
        if self.found.type == END or self.before is None:
            return span.source.span(span.start, span.start)
        return span.source.span(self.before.span.end, self.before.span.end)

    @property
    def says(self) -> str:
        """What was found, for a label."""
        if self.at_text_end:
            return "the text ends here"
        if self.found.type == NEW_LINE:
            return "the line ends here"
        return f"found `{_shortened(self.found.text)}`"


def explain(mistake: Mistake) -> Diagnostic:
    """The diagnostic that helps most."""
    answers = (rule(mistake) for rule in _RULES)
    return next((answer for answer in answers if answer), None) or _expected(mistake)


def closest_word(word: str, words: Sequence[str]) -> str | None:
    """The word that was probably meant."""
    lowered = word.lower()
    if lowered in _ALIASES and _ALIASES[lowered] in words:
        return _ALIASES[lowered]
    from difflib import get_close_matches

    return next(iter(get_close_matches(lowered, words, n=1, cutoff=0.6)), None)


# ---- the rules ---------------------------------------------------------------------------


def _wrong_character(m: Mistake) -> Diagnostic | None:
    if m.found.type != "STRAY":
        return None
    text = m.found.text
    if text == '"':
        return errors.UnclosedString(m.found.span)
    if text in _FOREIGN:
        return errors.ForeignSyntax(m.found.span, text, _FOREIGN[text])
    why = "not part of the language"
    if text.isalnum():
        why = "names consist of the letters a to z, digits and `_`"
    return errors.UnexpectedCharacter(m.found.span, _shown(text), why, _LOOK_ALIKE.get(text))


def _shown(character: str) -> str:
    if character.isprintable() and not unicodedata.combining(character):
        return f"`{character}`"
    name = unicodedata.name(character, "a control character").lower()
    return f"U+{ord(character):04X} ({name})"


def _reserved_for_later(m: Mistake) -> Diagnostic | None:
    if m.at_start and m.found.text == "transform" and m.scope == "attention":
        return errors.ReservedForLater(m.found.span, "vector operations on q and k (`transform`)")
    if m.keyword == "dtype" and m.found.text == "=" and m.at == m.start + 2:
        what, advice = "dtypes for each operand", "write one for all, such as `dtype bf16`"
        return errors.ReservedForLater(m.before.span if m.before else m.span, what, advice)
    opened_by = m.tokens[_index_of(m.tokens, m.brackets[-1]) - 1].text if m.brackets else None
    if m.found.text == ":" and opened_by == "any":
        return errors.ReservedForLater(m.found.span, "quantifiers (`any(j < T: …)`)")
    return None


def _unclosed_bracket(m: Mistake) -> Diagnostic | None:
    if not m.brackets:
        return None
    opening, found = m.brackets[-1], m.found
    partner = PARTNER[opening.text]
    if found.text in PARTNER.values() and found.text not in (partner, "}"):
        return errors.MismatchedBracket(found.span, found.text, opening.text, partner, opening.span)
    begins_statement = m.first_on_line and found.text in STARTS[m.scope]
    if found.type == END or found.text == "}" or begins_statement:
        return errors.UnclosedBracket(m.gap, opening.text, partner, opening.span)
    return None


def _unopened_bracket(m: Mistake) -> Diagnostic | None:
    inside = m.block if m.found.text == "}" else m.brackets
    if m.found.text not in PARTNER.values() or inside:
        return None
    return errors.UnopenedBracket(m.found.span, m.found.text)


def _late_import(m: Mistake) -> Diagnostic | None:
    late = m.scope == "file" and m.at_start and m.found.text == "import"
    return errors.LateImport(m.found.span) if late else None


def _unknown_statement(m: Mistake) -> Diagnostic | None:
    if not m.at_start or not m.found.text.isidentifier():
        return None
    word, span = m.found.text, m.found.span
    if word in _FOREIGN:
        return errors.ForeignSyntax(span, word, _FOREIGN[word])
    if m.scope != "file" and word in TOP_LEVEL:
        return errors.MisplacedStatement(span, word, "outside of every block")
    if m.scope == "file":
        if word in STATEMENTS:
            return errors.MisplacedStatement(span, word, "inside of an `attention` block")
        if word in SCHEDULE_KEYS:
            return errors.MisplacedStatement(span, word, "inside of a `schedule` block")
        where = "a file has `import`, `define`, `attention` and `schedule`"
        return errors.UnknownStatement(span, word, where, closest_word(word, TOP_LEVEL))
    if m.scope == "attention":
        if word in SCHEDULE_KEYS:
            return errors.MisplacedStatement(span, word, "inside of a `schedule` block")
        where = "no statement of an `attention` block begins so"
        return errors.UnknownStatement(span, word, where, closest_word(word, STATEMENTS))
    return None


def _missing_name(m: Mistake) -> Diagnostic | None:
    examples = {
        "attention": "attention NAME { }",
        "define": "define NAME : float = …",
        "const": "const NAME = …",
        "param": "param NAME : float = …",
        "tensor": "tensor NAME : float[Skv]",
        "let": "let NAME = …",
    }
    if m.at != m.start + 1 or m.expected != {"NAME"} or m.keyword not in examples:
        return None
    if m.found.text in RESERVED_WORDS:
        return errors.ReservedWord(m.found.span, m.found.text)
    return errors.MissingName(m.span, m.keyword, m.says, examples[m.keyword])


def _missing_type(m: Mistake) -> Diagnostic | None:
    if "COLON" not in m.expected or m.before is None:
        return None
    name = m.before.text
    if m.keyword == "define" and m.before.text == ")":
        name = m.tokens[m.start + 1].text
    elif m.keyword not in ("define", "param", "tensor"):
        return None
    type_ = "float[Skv]" if m.keyword == "tensor" else "float"
    return errors.MissingType(m.span, name, m.says, f"{name} : {type_}")


def _wrong_equals(m: Mistake) -> Diagnostic | None:
    text = m.found.text
    if text == "==" and "EQUAL" in m.expected and not m.wants_operator:
        return _expected(m, "write `=`; `==` compares two values")
    if text not in ("=", ":"):
        return None
    if m.at == m.start + 1 and m.wants_value and m.keyword in STATEMENTS:
        return _expected(m, f"`{m.keyword}` is followed by its value at once")
    if text == ":" and "EQUAL" in m.expected:
        return _expected(m, "a value is given with `=`")
    if text == "=" and m.wants_operator:
        signs = {"<": "<=", ">": ">="}
        instead = signs.get(m.after.text, "==") if m.after else "=="
        return errors.SingleEquals(m.found.span, instead)
    return None


def _foreign_word(m: Mistake) -> Diagnostic | None:
    text = m.found.text
    if text in _FOREIGN and m.wants_operator:
        return errors.ForeignSyntax(m.found.span, text, _FOREIGN[text])
    before = m.before
    if before and before.text == "lambda":
        advice = "a function is a `define NAME(…) : type = …` of its own"
        return errors.ForeignSyntax(before.span, "lambda", advice)
    if before and before.text in ("NOT", "if") and m.wants_operator:
        return errors.ForeignSyntax(before.span, before.text, _FOREIGN[before.text])
    if text == "not" and m.wants_value:
        return _expected(m, "put `not …` in parentheses")
    if text == ">" and before and before.text == "<":
        return _expected(m, "unequal is written `!=`")
    return None


def _malformed_number(m: Mistake) -> Diagnostic | None:
    before, found = m.before, m.found
    if (
        before
        and before.type == "NUMBER"
        and before.span.end == found.span.start
        and (found.type == "NUMBER" or found.text.isidentifier())
    ):
        return errors.MalformedNumber(
            before.span.to(found.span), _shortened(before.text + found.text)
        )
    return None


def _reserved_word(m: Mistake) -> Diagnostic | None:
    named = m.found.text in RESERVED_WORDS and "NAME" in m.expected and not m.wants_value
    return errors.ReservedWord(m.found.span, m.found.text) if named else None


_RULES: Final[tuple[Callable[[Mistake], Diagnostic | None], ...]] = (
    _wrong_character,
    _reserved_for_later,
    _unclosed_bracket,
    _unopened_bracket,
    _late_import,
    _unknown_statement,
    _missing_name,
    _wrong_equals,
    _foreign_word,
    _malformed_number,
    _missing_type,
    _reserved_word,
)


# ---- the general case --------------------------------------------------------------------


def _expected(m: Mistake, advice: str | None = None) -> Diagnostic:
    in_brackets = m.brackets[-1].span if m.brackets else None
    opening = m.block.span if m.block and m.at_text_end and not m.brackets else in_brackets
    if m.wants_value and m.found.type == NEW_LINE and not m.at_text_end:
        advice = advice or "an expression goes on in the next line only inside of brackets"
    return errors.ExpectedOther(m.span, _one_of(m), m.says, advice, opening)


def _one_of(m: Mistake) -> str:
    """`an operator, `,` or `)``: what would fit, in the words of the language."""
    expected = set(m.expected)
    words: list[str] = []
    if m.at_start:
        words = {
            "file": ["`attention`", "`schedule`", "`define`", "`import`"],
            "attention": ["a statement"],
            "schedule": ["a setting such as `tile q = 128`"],
        }[m.scope]
        expected &= {"RBRACE"}
    elif m.wants_value:
        words.append("an expression")
        expected -= _VALUES
    elif "NAME" in expected:
        words.append(_name_of_what(m))
    if m.wants_operator:
        words.append("an operator")
        expected -= {*_OPERATORS, "LPAR", "LSQB"}
    words += [word for terminal, word in _SIGNS.items() if terminal in expected]
    return " or ".join(filter(None, [", ".join(words[:-1]), words[-1]]))


def _name_of_what(m: Mistake) -> str:
    before = m.before.text if m.before else ""
    if before == ":":
        return "a type"
    if m.keyword == "dtype":
        return "a dtype such as `bf16`"
    if m.keyword == "weights":
        return "`softmax` or `sigmoid`"
    if m.keyword == "tensor":
        return "a dimension"
    return "a name"


def _index_of(tokens: Sequence[Token], token: Token) -> int:
    return next(i for i, t in enumerate(tokens) if t is token)


def _shortened(text: str) -> str:
    return text if len(text) <= 40 else text[:37] + "..."
