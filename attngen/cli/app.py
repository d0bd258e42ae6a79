"""The command `attngen`: finds a command, runs it, and turns whatever goes wrong into words.

Exit codes: 0 all is well; 1 the answer is no (an output outside its bound, a file that is not
in its canonical form); 2 an error; 130 interrupted.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any, Final, final

import click

from attngen import __version__
from attngen.cli.console import ERRORS_AS_JSON, note, show_errors, show_errors_as_json
from attngen.diagnostics.diagnostic import AttnError

__all__ = ["app", "main"]

COMMANDS: Final = {
    "bench": "Time a file beside the attention libraries that are installed.",
    "cache": "List, merge, check and prune tuning records.",
    "check": "Say everything that is wrong with some files.",
    "compile": "Make CUDA text, machine code and a manifest for some targets.",
    "doctor": "Say what is installed, and what each missing part would give.",
    "explain": "Say what a file computes, draw its mask, and count the work.",
    "fmt": "Bring files into their canonical form.",
    "run": "Run a file on inputs from files or made up, and prove the result.",
    "tune": "Find the fastest schedules for some shapes, and keep what was measured.",
}
"""Each is a module of this package with a `command`; it is imported when it is used."""

ERROR: Final = 2
INTERRUPTED: Final = 130
PIPE_CLOSED: Final = 141
"""What a shell shows for a program that the signal SIGPIPE ended."""


@final
class _Commands(click.Group):
    """Imports a command when it is asked for, so that `attngen --version` is quick."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command = import_module(f"attngen.cli.{cmd_name}").command
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            raise click.UsageError(_unknown_command(args[0]), ctx)
        return super().resolve_command(ctx, args)


def _unknown_command(name: str) -> str:
    from difflib import get_close_matches

    closest = get_close_matches(name, COMMANDS, n=1)
    if closest:
        return f"there is no command `{name}`; did you mean `{closest[0]}`?"
    if name.endswith(".attn"):
        return f"a command comes first, as in `attngen run {name}`"
    return f"there is no command `{name}`; the commands are {', '.join(COMMANDS)}"


@click.group(
    cls=_Commands,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Example:  attngen run causal.attn --shape Sq=512,Skv=512 --dtype bf16 --head-dim 64\n\n"
    "Exit codes: 0 all is well; 1 the answer is no (an output outside its bound, a file not in"
    " its canonical form); 2 an error.",
)
@click.version_option(__version__, "-V", "--version", message="attngen %(version)s")
@click.option("--debug", is_flag=True, help="Keep the traceback of a bug in attngen in a file.")
@click.option("--json-errors", is_flag=True, help="Write errors to stderr as JSON, for tools.")
@click.pass_context
def app(context: click.Context, debug: bool, json_errors: bool) -> None:
    """Attention variants from a small language to fast, readable CUDA.

    A `.attn` file says what an attention variant computes.  The commands check it, draw its
    mask, compile it for NVIDIA GPUs (none is needed for that), and run and prove it.
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line (without the program's name) and return its exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    given, is_debug = _take_flag(given, "--debug")
    given, errors_as_json = _take_flag(given, "--json-errors")
    _accept_every_character()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.simplefilter("always", UserWarning)  # what attngen itself has to say
            warnings.showwarning = _show_warning
            if any("\0" in argument for argument in given):  # no file can have such a name
                raise click.UsageError("an argument holds a null character")
            result = app.main(
                given,
                prog_name="attngen",
                standalone_mode=False,
                obj=ERRORS_AS_JSON if errors_as_json else None,
            )
            sys.stdout.flush()
            return result if isinstance(result, int) else 0
    except click.exceptions.Exit as stop:
        return stop.exit_code
    except (KeyboardInterrupt, click.Abort):
        click.echo("\ninterrupted", err=True)
        return INTERRUPTED
    except BrokenPipeError:  # `attngen explain … | head`
        with suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE_CLOSED
    except Exception as error:
        _report(error, is_debug, errors_as_json)
        return ERROR


def _take_flag(arguments: list[str], flag: str) -> tuple[list[str], bool]:
    """The arguments without a flag that may stand anywhere in front of a `--`."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    options = [argument for argument in arguments[:end] if argument != flag]
    return options + arguments[end:], len(options) < end


def _accept_every_character() -> None:
    """A character that the terminal does not have is written as an escape, not refused."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="backslashreplace")


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    note(str(message))


# ---- what went wrong ---------------------------------------------------------------------


def _report(error: Exception, is_debug: bool, as_json: bool) -> None:
    diagnostics = _diagnostics_of(error, is_debug)
    (show_errors_as_json if as_json else show_errors)(diagnostics)


def _diagnostics_of(error: Exception, is_debug: bool) -> tuple[Any, ...]:
    from attngen.cli.errors import OutOfMemory, WrongUsage

    match error:
        case AttnError():
            return error.diagnostics
        case click.ClickException():
            context = getattr(error, "ctx", None)
            command = context.command_path if context is not None else "attngen"
            return (WrongUsage(None, _one_line(error.format_message()), command),)
        case MemoryError():
            return (OutOfMemory(None, _one_line(str(error)) or "an array does not fit"),)
        case _:
            return (_internal_error(error, is_debug),)


def _internal_error(error: Exception, is_debug: bool) -> Any:
    from attngen.cli.errors import InternalError
    from attngen.options import settings

    details = "--debug keeps the details in a file to send along"
    if is_debug or settings().is_debug:
        details = _keep_traceback(error)
    message = _one_line(str(error)) or "no message"
    return InternalError(None, type(error).__name__, message, details)


def _keep_traceback(error: Exception) -> str:
    import tempfile
    import traceback

    lines = [f"attngen {__version__}, Python {sys.version}\n", *traceback.format_exception(error)]
    try:
        with tempfile.NamedTemporaryFile(
            "w", prefix="attngen-bug-", suffix=".txt", encoding="utf-8",
            errors="backslashreplace", delete=False,
        ) as file:  # fmt: skip
            file.writelines(lines)
    except OSError as reason:
        return f"the details could not be kept: {reason}"
    return f"the details are in {file.name}"


def _one_line(text: str) -> str:
    return " ".join(text.split())
