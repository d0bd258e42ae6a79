"""Text in, syntax tree out, or every syntax error of the text at once.

    text -- Lark's lexer --> tokens -- Lark's LALR parser --> Builder --> tree + comments

The parser is fed token by token (not by `Lark.parse`), since three things need to be known
between two tokens: whether a line end ends the statement, whether `mask` is a word of the
language or a name here, and where to go on after an error.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any, Final, Protocol, cast

import lark
from lark.grammar import Rule
from lark.lark import PostLex
from lark.lexer import TerminalDef

from attngen import resources
from attngen.diagnostics.diagnostic import AttnError, Diagnostic
from attngen.diagnostics.span import Source
from attngen.disk_cache import make_key, open_cache
from attngen.frontend.ast import File
from attngen.frontend.build_ast import Builder
from attngen.frontend.comments import attach_comments
from attngen.frontend.errors import EmptyProgram, OnlyComments, UnclosedBracket
from attngen.frontend.mistakes import Mistake, closest_word, explain
from attngen.frontend.tokens import END, NEW_LINE, RESERVED_WORDS, STARTS, TOP_LEVEL, Token

__all__ = ["parse"]

MAX_ERRORS: Final = 100
"""After so many errors the rest of a file is not looked at."""

_OPENING: Final = ("LPAR", "LSQB")
_CLOSING: Final = ("RPAR", "RSQB")


def parse(source: Source) -> File:
    """The syntax tree of a text, comments attached.

    Errors:  AttnError with all A1xx errors of the text, in its order.
    """
    tokens, comments = _tokenize(source)
    end = len(source.text.rstrip(" \t\r\n"))
    place = source.span(end, end)
    if all(token.type == NEW_LINE for token in tokens):
        raise AttnError(OnlyComments(place) if comments else EmptyProgram(place))
    if tokens[-1].type != NEW_LINE:
        tokens.append(Token(NEW_LINE, "", place))
    tokens.append(Token(END, "", place))
    return attach_comments(_Run(tokens).file(), comments)


class _Run:
    """One run over the tokens of a text.

    An error costs one statement: the parser returns to where it was before the statement
    (`checkpoint`) and goes on with the next one.
    """

    def __init__(self, tokens: Sequence[Token]) -> None:
        self.tokens = tokens
        self.at = 0
        """Index of the next token."""
        self.errors: list[Diagnostic] = []

        self.block: Token | None = None
        """The `{` of the block around the statement."""
        self.scope = "file"
        """`file`, `attention` or `schedule`."""

        self.start: int
        """Index of the first token of the statement."""
        self.fed: list[Token]
        """What the parser has been fed of the statement."""
        self.brackets: list[Token]
        """The open `(` and `[` of the statement."""

        self.parser = _new_parser()
        self.checkpoint: _Parser
        self._begin_statement()

    def file(self) -> File:
        """Parse everything."""
        result: File | None = None
        while self.at < len(self.tokens) and len(self.errors) < MAX_ERRORS:
            try:
                result = self._step(self.tokens[self.at])
            except lark.UnexpectedToken:
                self._fail(explain(self._mistake()))
            except AttnError as error:  # from the builder
                self._fail(*error.diagnostics)
        if self.errors:
            raise AttnError(*self.errors)
        assert result is not None
        return result

    # ---- one token

    def _step(self, token: Token) -> File | None:
        """Take one token; the file comes back with the last one."""
        if token.type == NEW_LINE and self._ends_nothing():
            self.at += 1
            if not self.fed:
                self.start = self.at
            return None
        if self.block and not self.fed and _begins_anew(token):
            self._close_block_early(token)
        if token.type == END and not self.fed and self.errors:
            self.at += 1
            return None
        if token.type == "RBRACE" and self.block and not self.brackets:
            self._end_statement(token)
        result = self._feed(token)
        self.at += 1
        match token.type:
            case "LPAR" | "LSQB":
                self.brackets.append(token)
            case "RPAR" | "RSQB":
                self.brackets.pop()
            case "LBRACE":
                self.block, self.scope = token, self.fed[0].text
                self._begin_statement()
            case "RBRACE":
                self.block, self.scope = None, "file"
                self._end_statement(token)
            case "_NL":
                self._begin_statement()
        return cast("File | None", result)

    def _ends_nothing(self) -> bool:
        """A line end that does not matter: an empty line, inside brackets, in front of `{`."""
        if not self.fed or self.brackets:
            return True
        return self.scope == "file" and self.tokens[self.at + 1].type == "LBRACE"

    def _feed(self, token: Token) -> object:
        if token.type not in self.parser.choices() and self._may_be_name(token):
            token = Token("NAME", token.text, token.span)
        result = self.parser.feed_token(token)
        self.fed.append(token)
        return result

    def _may_be_name(self, token: Token) -> bool:
        begins_item = token.text in TOP_LEVEL and not self.fed
        return token.text.isidentifier() and token.text not in RESERVED_WORDS and not begins_item

    def _begin_statement(self) -> None:
        self.start, self.fed, self.brackets = self.at, [], []
        self.checkpoint = self.parser.copy(deepcopy_values=False)

    def _end_statement(self, token: Token) -> None:
        """End the statement in front of a `}`, or the block behind it."""
        if self.fed:
            self._feed(Token(NEW_LINE, "", token.span))
            self._begin_statement()

    # ---- after an error

    def _fail(self, *diagnostics: Diagnostic) -> None:
        self.errors.extend(diagnostics)
        self._skip_statement()

    def _mistake(self) -> Mistake:
        # The parser may have reduced rules before it saw that the token does not fit, and then
        # knows less of what would have fitted: ask it again, without that token.
        before = self.checkpoint.copy(deepcopy_values=False)
        for token in self.fed:
            before.feed_token(token)
        return Mistake(
            self.tokens,
            self.at,
            self.start,
            frozenset(before.accepts()),
            tuple(self.brackets),
            self.block,
            self.scope,
        )

    def _skip_statement(self) -> None:
        """Move to where a next statement plausibly begins."""
        depth, braces, at = len(self.brackets), 0, self.at
        while (token := self.tokens[at]).type != END:
            if token.type == "LBRACE":
                if not braces and self._enter_block(at):
                    return
                braces += 1
            elif at > self.start and not braces:
                new_line = self.tokens[at - 1].type == NEW_LINE
                if new_line and (depth <= 0 or token.text in STARTS[self.scope]):
                    break
                if token.type == "RBRACE" and self.block:
                    break
            depth += (token.type in _OPENING) - (token.type in _CLOSING)
            braces -= token.type == "RBRACE" and braces > 0
            at += 1
        self.at = at
        self._restart()

    def _restart(self) -> None:
        self.parser = self.checkpoint.copy(deepcopy_values=False)
        self._begin_statement()

    def _enter_block(self, brace: int) -> bool:
        """Look into a block whose first line is wrong, as if that line were right."""
        word = closest_word(self.tokens[self.start].text, ("attention", "schedule"))
        if self.scope != "file" or word is None:
            return False
        self._restart()
        place = self.tokens[brace].span
        self._feed(Token(word.upper(), word, place))
        self._feed(Token("NAME", "_", place))
        self.at = brace
        return True

    def _close_block_early(self, token: Token) -> None:
        """Report that a `}` is missing in front of `token`, and go on as if it were there."""
        assert self.block is not None
        place = token.span.source.span(token.span.start, token.span.start)
        last = self.errors[-1].span if self.errors else None
        if token.type != END or last is None or last.end != place.end:  # not said already
            self.errors.append(UnclosedBracket(place, "{", "}", self.block.span))
        self._feed(Token("RBRACE", "}", token.span))
        self.block, self.scope = None, "file"
        self._end_statement(token)


def _begins_anew(token: Token) -> bool:
    """Whether a block must have ended before this: the end, or `attention` in column 1."""
    at_left = token.text in TOP_LEVEL and token.span.first.column == 1
    return token.type == END or at_left


# ---- Lark --------------------------------------------------------------------------------


class _Parser(Protocol):
    """The part of Lark's `InteractiveParser` that is used here.

    Of a token it wants the `type` only, so it takes ours.
    """

    def choices(self) -> Mapping[str, object]: ...
    def accepts(self) -> set[str]: ...
    def copy(self, deepcopy_values: bool) -> _Parser: ...
    def feed_token(self, token: Token) -> object: ...


class _KeepAll(PostLex):
    """Tells Lark's lexer to keep the terminals that no rule uses."""

    always_accept = ("COMMENT", "STRAY")

    def process(self, stream: Iterator[lark.Token]) -> Iterator[lark.Token]:
        return stream


@cache
def _lark() -> lark.Lark:
    """The parser of the grammar.

    Its tables take 40 ms to make and 3 ms to load, so they are kept in the disk cache.
    """
    grammar = resources.grammar_text()
    options: dict[str, Any] = {
        "parser": "lalr",
        "lexer": "basic",
        "start": "file",
        "maybe_placeholders": True,
    }
    objects = {"postlex": _KeepAll(), "transformer": Builder()}

    def build() -> lark.Lark:
        return lark.Lark(grammar, **options, **objects)

    disk = open_cache("grammar", ".tables")
    if disk is None:
        return build()
    key = make_key("attngen-grammar/1", lark.__version__, repr(options), grammar)
    return _unpack(disk.load_or_build(key, lambda: _pack(build(), objects)), objects)


def _pack(parser: lark.Lark, objects: Mapping[str, object]) -> bytes:
    """What `Lark.save` would write, as JSON, and without the objects among the options."""
    data, memo = parser.memo_serialize([TerminalDef, Rule])
    for name in objects:
        del data["options"][name]
    return json.dumps({"data": data, "memo": memo}).encode()


def _unpack(tables: bytes, objects: Mapping[str, object]) -> lark.Lark:
    """The parser again.  JSON has made texts of the numbers that were keys."""
    saved = json.loads(tables)
    table = saved["data"]["parser"]["parser"]
    table["tokens"] = _numbered(table["tokens"])
    table["states"] = {k: _numbered(v) for k, v in _numbered(table["states"]).items()}
    saved["data"]["options"] |= objects
    return lark.Lark.load({**saved, "memo": _numbered(saved["memo"])})


def _numbered(texts: Mapping[str, Any]) -> dict[int, Any]:
    return {int(key): value for key, value in texts.items()}


def _new_parser() -> _Parser:
    return cast(_Parser, _lark().parse_interactive(""))


def _tokenize(source: Source) -> tuple[list[Token], list[Token]]:
    """The tokens and the comments of a text; of several line ends in a row, the first."""
    lexer: Any = _lark().parse_interactive(source.text)
    tokens: list[Token] = []
    comments: list[Token] = []
    for token in lexer.lexer_thread.lex(lexer.parser_state):
        if token.type == NEW_LINE and tokens and tokens[-1].type == NEW_LINE:
            continue
        kept = Token(token.type, str(token), source.span(token.start_pos, token.end_pos))
        (comments if token.type == "COMMENT" else tokens).append(kept)
    return tokens, comments
