"""`attngen check`: every error of every file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from attngen.cli.console import say, say_json
from attngen.cli.files import require_file
from attngen.cli.option_types import consts_option, dtype_option, head_dim_option, unique
from attngen.diagnostics.diagnostic import AttnError, Diagnostic
from attngen.diagnostics.render import to_json
from attngen.frontend.check import check
from attngen.frontend.load import load_file

__all__ = ["command"]


@click.command("check", epilog="Example:  attngen check examples/*.attn")
@click.argument(
    "specs", type=click.Path(path_type=Path), nargs=-1, required=True, metavar="SPEC.attn…"
)
@consts_option
@dtype_option
@head_dim_option
@click.option("--json", "as_json", is_flag=True, help="Write all errors to stdout, for tools.")
def command(
    specs: tuple[Path, ...],
    consts: tuple[tuple[str, Any], ...],
    dtype: str | None,
    head_dim: tuple[int, int] | None,
    as_json: bool,
) -> int:
    """Say everything that is wrong with some files; compile and run nothing.

    The exit code is 2 when there are errors and 0 when there are none.
    """
    given = unique("-D", consts)
    found = {spec: _errors_of(spec, given, dtype, head_dim) for spec in specs}
    everything = [error for errors in found.values() for error in errors]
    if as_json:
        files = [
            {"file": str(spec), "errors": [to_json(error) for error in errors]}
            for spec, errors in found.items()
        ]
        say_json({"format": "attngen-check/1", "files": files})
        return 2 if everything else 0
    if everything:
        raise AttnError(*everything)
    say("no errors in ", f"{len(found)} file{'s' if len(found) != 1 else ''}")
    return 0


def _errors_of(
    spec: Path,
    consts: Mapping[str, Any],
    dtype: str | None,
    head_dim: tuple[int, int] | None,
) -> tuple[Diagnostic, ...]:
    try:
        require_file(spec)
        check(load_file(spec), consts=consts, dtype=dtype, head_dim=head_dim)
    except AttnError as error:
        return error.diagnostics
    return ()
