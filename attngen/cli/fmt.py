"""`attngen fmt`: the one canonical form of a file, in place."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterator
from pathlib import Path

import click

from attngen.cli.console import say
from attngen.cli.errors import CannotRead
from attngen.cli.files import MAX_BYTES, read_text, write_together
from attngen.diagnostics.diagnostic import AttnError, Diagnostic
from attngen.diagnostics.span import Source
from attngen.frontend.format import format_file
from attngen.frontend.parse import parse

__all__ = ["command"]


@click.command("fmt", epilog="Example:  attngen fmt --check examples/*.attn")
@click.argument(
    "specs", type=click.Path(path_type=Path), nargs=-1, required=True, metavar="SPEC.attn…"
)
@click.option("--check", "only_check", is_flag=True, help="Write nothing; exit code 1 says no.")
@click.option("--diff", "show_diff", is_flag=True, help="Write nothing; show what would change.")
def command(specs: tuple[Path, ...], only_check: bool, show_diff: bool) -> int:
    """Bring files into their canonical form; `-` formats stdin to stdout.

    A file with a syntax error stays as it is.  Comments are kept.
    """
    errors: list[Diagnostic] = []
    changed = 0
    for spec in specs:
        is_stdin = str(spec) == "-"
        try:
            before = _read_stdin() if is_stdin else read_text(spec)
            after = _canonical(before, "<stdin>" if is_stdin else str(spec))
            changed += before != after
            if show_diff:
                click.echo("".join(_diff(before, after, str(spec))), nl=False)
            if only_check or show_diff:
                if only_check and before != after:
                    say(f"{spec} is not in its canonical form")
            elif is_stdin:
                click.echo(after, nl=False)
            elif before != after:
                write_together({spec: after.encode()})
                say(f"formatted {spec}")
        except AttnError as error:
            errors += error.diagnostics
    if errors:
        raise AttnError(*errors)
    return 1 if only_check and changed else 0


def _read_stdin() -> str:
    data = sys.stdin.buffer.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise AttnError(CannotRead(None, "<stdin>", f"it has more than {MAX_BYTES} bytes"))
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        reason = f"byte {error.start} is not UTF-8"
    raise AttnError(CannotRead(None, "<stdin>", reason))


def _canonical(text: str, name: str) -> str:
    """The canonical text, after a proof that it says the same."""
    tree = parse(Source(name, text))
    canonical = format_file(tree)
    again = parse(Source(name, canonical))
    if again != tree or format_file(again) != canonical:
        raise RuntimeError(f"the canonical form of {name} says something else")
    if sorted(_comments(canonical)) != sorted(_comments(text)):
        raise RuntimeError(f"the canonical form of {name} loses a comment")
    return canonical


def _comments(text: str) -> Iterator[str]:
    """The comments of a text that parses; a `#` inside of an import's path starts none."""
    for line in text.replace("\r\n", "\n").replace("\r", "\n").split("\n"):
        in_string = False
        for i, character in enumerate(line):
            in_string ^= character == '"'
            if character == "#" and not in_string:
                yield line[i:].strip()
                break


def _diff(before: str, after: str, name: str) -> Iterator[str]:
    lines = difflib.unified_diff(
        before.splitlines(keepends=True), after.splitlines(keepends=True), name, name
    )
    for line in lines:
        yield line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"
