"""Where the grammar, the CUDA templates and other data are: the only module that knows.

Installed from a wheel they lie in `attngen/_data/`; in a checkout (editable, or not installed
at all) they are the top-level folders `grammar/`, `templates/` and `tuned/`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

__all__ = [
    "grammar_text",
    "load_template",
    "package_folder",
    "template_names",
    "template_source",
    "tuned_folder",
]

_PACKAGE = Path(__file__).resolve().parent
_CHECKOUT = _PACKAGE.parent


def package_folder(*names: str) -> Traversable:
    """A folder inside of the package, which may lie in an archive."""
    if _PACKAGE.is_dir():
        return _PACKAGE.joinpath(*names)
    from importlib.resources import files  # imports `zipfile` and more: 2 ms

    return files("attngen").joinpath(*names)


def grammar_text() -> str:
    """The Lark grammar of the language."""
    return _file("grammar", "attn.lark").read_text(encoding="utf-8")


def template_source(name: str) -> str:
    """The text of a template, by a name such as `common/mma.cu.j2`."""
    return _file("templates", name).read_text(encoding="utf-8")


def load_template(name: str) -> tuple[str, str, Callable[[], bool]] | None:
    """Loader for `jinja2.FunctionLoader`: tracebacks show the real file, also from a zip."""
    path = _file("templates", name)
    if not path.is_file():
        return None
    return path.read_text(encoding="utf-8"), str(path), lambda: True


def template_names() -> tuple[str, ...]:
    """The names of all Jinja templates, sorted."""

    def walk(folder: Traversable, prefix: str) -> Iterator[str]:
        for child in folder.iterdir():
            if child.is_dir():
                yield from walk(child, f"{prefix}{child.name}/")
            elif child.name.endswith(".j2"):
                yield prefix + child.name

    return tuple(sorted(walk(_folder("templates"), "")))


def tuned_folder() -> Traversable:
    """The tuning records that come with attngen."""
    return _folder("tuned")


def _file(folder: str, name: str) -> Traversable:
    return _folder(folder).joinpath(*name.split("/"))


def _folder(name: str) -> Traversable:
    packaged = package_folder("_data", name)
    if packaged.is_dir():
        return packaged
    # Any folder may be called `templates`, so a checkout is known by its grammar.
    if (_CHECKOUT / "grammar" / "attn.lark").is_file():
        return _CHECKOUT / name
    raise FileNotFoundError(f"attngen's data folder {name!r} is missing; reinstall attngen")
