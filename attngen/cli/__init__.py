"""The command line: `attngen check`, `compile`, `doctor`, `explain`, `fmt`, `run`."""

from attngen.cli.app import main

__all__ = ["main"]
