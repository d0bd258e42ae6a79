"""One main text and every definition it needs: its own, imported ones and the library's.

A name means the nearest definition: one of the same file, else one of a file that this file
imports, else the library's.  The attention block's own names (consts, params, tensors, lets)
come before the library as well.  So a new name in the library never changes an old file.

A library definition stands in a file of its own name and is read when it is needed.  Further
definitions in that file are its helpers; nobody else sees them.  The result is one flat
mapping: a definition that the main file cannot name, or that is hidden by another one, is
listed as `<file>__<name>`, and the texts that use it are changed to say so.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Final, assert_never, final

from attngen import resources
from attngen.diagnostics.diagnostic import AttnError, Diagnostic
from attngen.diagnostics.span import Source, Span
from attngen.frontend import ast
from attngen.frontend.check_errors import (
    DuplicateName,
    ImportCycle,
    NoAttention,
    SeveralAttentions,
    UnreadableFile,
)
from attngen.frontend.format import format_file
from attngen.frontend.parse import parse
from attngen.record import record

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

__all__ = [
    "Unit",
    "canonical_text",
    "expressions",
    "is_library",
    "library_names",
    "load_file",
    "load_text",
    "walk",
]

_LIBRARY: Final = "attngen/library/"
"""Library files are shown under names that begin so."""

MAX_BYTES: Final = 1 << 20
"""A larger file is no `.attn` file."""

MAX_IMPORTS: Final = 32
"""Longest chain of files that import each other."""


@final
@record(eq=False)
class Unit:
    """A main file with everything that it uses."""

    main: ast.File
    definitions: Mapping[str, ast.Definition]
    """The main file's own definitions, and all others that something here uses."""
    attention: ast.Attention
    schedules: tuple[ast.Schedule, ...]

    def canonical_text(self) -> str:
        """The attention block and the definitions it uses, in the one canonical form.

        A complete `.attn` text by itself, without comments, imports and schedules: the same
        text means the same computation.
        """
        return canonical_text(self.attention, self.definitions)


def load_text(text: str, name: str = "<text>", directory: str | Path | None = None) -> Unit:
    """Parse a main text and find its definitions; imports are relative to `directory`.

    Errors:  A1xx syntax, A2xx several definitions of a name, not exactly one attention block,
             A7xx imports.
    """
    folder = None if directory is None else Path(directory)
    return _link(_parse_module(text, name, folder))


def load_file(path: str | Path) -> Unit:
    """The same from a file; imports are relative to it.  Errors: also A701, unreadable."""
    path = Path(path)
    text = _read(path, str(path), None)
    return _link(_parse_module(text, str(path), path.parent, chain=(path,)))


def canonical_text(attention: ast.Attention, definitions: Mapping[str, ast.Definition]) -> str:
    """See `Unit.canonical_text`."""
    used = sorted(_reachable(_free_names(attention), definitions))
    blocks = [definitions[name] for name in used]
    items = (_without_comments(attention), *map(_without_comments, blocks))
    return format_file(ast.File(items, attention.span))


@cache
def library_names() -> Mapping[str, Traversable]:
    """The file of every library definition, by name."""
    found: dict[str, Traversable] = {}
    folders = [resources.package_folder("library")]
    while folders:
        for entry in sorted(folders.pop().iterdir(), key=lambda entry: entry.name):
            if entry.is_dir():
                folders.append(entry)
            elif entry.name.endswith(".attn"):
                found[entry.name.removesuffix(".attn")] = entry
    return dict(sorted(found.items()))


def is_library(definition: ast.Definition) -> bool:
    """Whether a definition comes from attngen's own library."""
    return definition.span.source.name.startswith(_LIBRARY)


# ---- files -------------------------------------------------------------------------------


@final
class _Module:
    """One parsed file and the files it imports.

    `label` is the file's name without its ending, for the names of hidden definitions.
    """

    def __init__(self, label: str, file: ast.File) -> None:
        self.label = label
        self.file = file
        self.own: dict[str, ast.Definition] = {}
        self.imported: dict[str, tuple[_Module, ast.Definition]] = {}

    def find(self, name: str) -> tuple[_Module, ast.Definition] | None:
        """What a name means in this file."""
        if name in self.own:
            return self, self.own[name]
        if name in self.imported:
            return self.imported[name]
        module = _library_module(name)
        return None if module is None else (module, module.own[name])


@cache
def _library_module(name: str) -> _Module | None:
    entry = library_names().get(name)
    if entry is None:
        return None
    return _parse_module(entry.read_text(encoding="utf-8"), f"{_LIBRARY}{name}.attn", None)


def _parse_module(
    text: str, name: str, directory: Path | None, chain: tuple[Path, ...] = ()
) -> _Module:
    """Parse a file and, in turn, what it imports; `chain` are the files that led here."""
    label = re.sub(r"\W|^(?=\d)", "_", Path(name).stem)
    module = _Module(label, parse(Source(name, text)))
    errors: list[Diagnostic] = []
    for item in module.file.items:
        try:
            match item:
                case ast.Import():
                    _add_imported(module, item, directory, chain)
                case ast.Definition():
                    _add_own(module, item)
        except AttnError as error:
            errors += error.diagnostics
    if errors:
        raise AttnError(*errors)
    return module


def _add_own(module: _Module, definition: ast.Definition) -> None:
    first = module.own.setdefault(definition.name, definition)
    if first is not definition:
        raise AttnError(DuplicateName(definition.name_span, definition.name, first.name_span))


def _add_imported(
    module: _Module, item: ast.Import, directory: Path | None, chain: tuple[Path, ...]
) -> None:
    if directory is None:
        reason = "a text that is no file has no place for imports to be relative to"
        raise AttnError(UnreadableFile(item.span, item.path, reason))
    path = directory / item.path
    shown = str(Path(item.span.source.name).parent / item.path)
    text = _read(path, item.path, item.span)
    before = [other.resolve() for other in chain]
    if path.resolve() in before or len(chain) >= MAX_IMPORTS:
        steps = (*chain[before.index(path.resolve()) if path.resolve() in before else 0 :], path)
        raise AttnError(ImportCycle(item.span, " -> ".join(step.name for step in steps)))
    imported = _parse_module(text, shown, path.parent, (*chain, path))
    errors = []
    for name, definition in imported.own.items():
        _, first = module.imported.setdefault(name, (imported, definition))
        if first is not definition and first.span.source.name != definition.span.source.name:
            errors.append(DuplicateName(item.span, name, first.name_span))
    if errors:
        raise AttnError(*errors)


def _read(path: Path, shown: str, span: Span | None) -> str:
    try:
        if not path.is_file():
            raise AttnError(UnreadableFile(span, shown, "there is no such file"))
        if path.stat().st_size > MAX_BYTES:
            raise AttnError(UnreadableFile(span, shown, f"it has more than {MAX_BYTES} bytes"))
        return path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        reason = f"byte {error.start} is not UTF-8"
    except OSError as error:
        reason = error.strerror or type(error).__name__
    except ValueError:  # a null character in the path
        reason = "there is no such file"
    raise AttnError(UnreadableFile(span, shown, reason))


# ---- names -------------------------------------------------------------------------------


def _link(module: _Module) -> Unit:
    """Collect every definition that the main file's own ones and its attention block need."""
    attention = _only_attention(module.file)
    schedules = tuple(item for item in module.file.items if isinstance(item, ast.Schedule))
    linker = _Linker(module)
    local = _declared_names(attention)
    for name in (*module.own, *(n for n in _free_names(attention) if n not in local)):
        linker.need(module, name)
    return Unit(module.file, linker.link(), attention, schedules)


def _only_attention(file: ast.File) -> ast.Attention:
    blocks = [item for item in file.items if isinstance(item, ast.Attention)]
    if not blocks:
        raise AttnError(NoAttention(file.items[0].span if file.items else file.span))
    if len(blocks) > 1:
        names = ", ".join(block.name for block in blocks)
        places = tuple(block.name_span for block in blocks[1:])
        raise AttnError(SeveralAttentions(blocks[0].name_span, names, places))
    return blocks[0]


@final
class _Linker:
    """Gives every needed definition a name of its own."""

    def __init__(self, main: _Module) -> None:
        self._main = main
        self._keys: dict[int, str] = {}
        self._found: list[tuple[_Module, ast.Definition]] = []

    def need(self, module: _Module, name: str) -> None:
        """Take in what `name` means in a file, and everything behind it."""
        pending = [(module, name)]
        while pending:
            module, name = pending.pop()
            found = module.find(name)
            if found is None or id(found[1]) in self._keys:
                continue
            self._found.append(found)
            self._keys[id(found[1])] = ""
            pending += [(found[0], free) for free in _body_names(found[1])]

    def link(self) -> dict[str, ast.Definition]:
        """All of them by their new names, own ones first."""
        plain: list[tuple[_Module, ast.Definition]] = []
        hidden: list[tuple[_Module, ast.Definition]] = []
        for module, definition in self._found:
            seen = self._main.find(definition.name)
            is_seen = seen is not None and seen[1] is definition
            (plain if is_seen else hidden).append((module, definition))
        taken = {definition.name for _, definition in plain}
        for _, definition in plain:
            self._keys[id(definition)] = definition.name
        for module, definition in hidden:
            name = f"{module.label}__{definition.name}"
            while name in taken:
                name += "_"
            taken.add(name)
            self._keys[id(definition)] = name
        linked = [self._renamed(module, definition) for module, definition in plain + hidden]
        return {definition.name: definition for definition in linked}

    def _renamed(self, module: _Module, definition: ast.Definition) -> ast.Definition:
        new: dict[str, str] = {}
        for name in _body_names(definition):
            found = module.find(name)
            if found is not None and self._keys[id(found[1])] != name:
                new[name] = self._keys[id(found[1])]
        key = self._keys[id(definition)]
        if not new and key == definition.name:
            return definition
        parameters = tuple(
            replace(p, default=None if p.default is None else _rename(p.default, new))
            for p in definition.parameters
        )
        own = {parameter.name for parameter in parameters}  # not seen by the defaults
        body = _rename(definition.body, {n: k for n, k in new.items() if n not in own})
        return replace(definition, name=key, parameters=parameters, body=body)


def _reachable(names: Iterable[str], definitions: Mapping[str, ast.Definition]) -> set[str]:
    reached: set[str] = set()
    pending = [name for name in names if name in definitions]
    while pending:
        name = pending.pop()
        if name not in reached:
            reached.add(name)
            pending += [n for n in _body_names(definitions[name]) if n in definitions]
    return reached


def _declared_names(attention: ast.Attention) -> set[str]:
    named = ast.Const | ast.Param | ast.Tensor | ast.Let
    names = {s.name for s in attention.statements if isinstance(s, named)}
    dims = (d for s in attention.statements if isinstance(s, ast.Tensor) for d in s.dims)
    return names | {dim.size for dim in dims if isinstance(dim.size, str)}


def _free_names(attention: ast.Attention) -> tuple[str, ...]:
    """Every name that the block's expressions mention, in order."""
    found: dict[str, None] = {}
    for statement in attention.statements:
        for e in expressions(statement):
            found.update(dict.fromkeys(_mentioned(e)))
    return tuple(found)


def _body_names(definition: ast.Definition) -> tuple[str, ...]:
    parameters = {parameter.name for parameter in definition.parameters}
    found = dict.fromkeys(n for n in _mentioned(definition.body) if n not in parameters)
    for parameter in definition.parameters:
        if parameter.default is not None:
            found.update(dict.fromkeys(_mentioned(parameter.default)))
    return tuple(found)


def _mentioned(e: ast.Expr) -> Iterator[str]:
    for node in walk(e):
        if isinstance(node, ast.Name | ast.Call):
            yield node.name


# ---- syntax trees ------------------------------------------------------------------------


def expressions(statement: ast.Statement) -> tuple[ast.Expr, ...]:
    """The expressions of a statement, in order."""
    match statement:
        case ast.Dtype() | ast.Tensor() | ast.Output():
            found: tuple[ast.Expr | None, ...] = ()
        case ast.HeadDim(qk, v):
            found = (qk,) if qk is v else (qk, v)
        case ast.Heads(q, kv) | ast.Length(q, kv):
            found = (q, kv)
        case ast.Const() | ast.Let() | ast.Scale() | ast.Score() | ast.Mask():
            found = (statement.value,)
        case ast.Param():
            found = (statement.default, statement.range)
        case ast.Weights():
            found = (statement.sink,)
        case _:
            assert_never(statement)
    return tuple(e for e in found if e is not None)


def walk(root: ast.Expr) -> Iterator[ast.Expr]:
    """Every node of an expression, from left to right, outer ones first."""
    stack = [root]
    while stack:
        node = stack.pop()
        yield node
        stack.extend(reversed(ast.operands(node)))


def _rename(node: ast.Expr, new: Mapping[str, str]) -> ast.Expr:
    """Definitions by their new names.  The parser bounds the depth."""
    match node:
        case ast.Literal():
            return node
        case ast.Name():
            return replace(node, name=new.get(node.name, node.name))
        case ast.Index():
            return replace(node, indices=tuple(_rename(i, new) for i in node.indices))
        case ast.Call():
            arguments = tuple(replace(a, value=_rename(a.value, new)) for a in node.arguments)
            return replace(node, name=new.get(node.name, node.name), arguments=arguments)
        case ast.Unary():
            return replace(node, operand=_rename(node.operand, new))
        case ast.Binary():
            return replace(node, left=_rename(node.left, new), right=_rename(node.right, new))
        case ast.Comparison() | ast.BoolOp():
            return replace(node, operands=tuple(_rename(o, new) for o in node.operands))
        case _:
            assert_never(node)


def _without_comments(item: ast.Attention | ast.Definition) -> ast.Attention | ast.Definition:
    if isinstance(item, ast.Definition):
        return replace(item, comments=ast.Comments())
    statements = tuple(replace(s, comments=ast.Comments()) for s in item.statements)
    return replace(item, statements=statements, comments=ast.Comments(), closing=())
