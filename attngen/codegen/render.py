"""Templates and typed contexts → CUDA text.

Every template takes one variable, `c`, a frozen dataclass of its family; an unknown name is
an error (`StrictUndefined`), and a test demands that declared and used members agree.
"""

from __future__ import annotations

import hashlib
import re
import sys
from functools import cache
from typing import TYPE_CHECKING, Any

from attngen import resources
from attngen.disk_cache import DiskCache, make_key, open_cache

if TYPE_CHECKING:
    import jinja2

__all__ = ["render", "template_digest"]


@cache
def _environment() -> jinja2.Environment:
    import jinja2

    options: dict[str, Any] = {
        "undefined": jinja2.StrictUndefined,
        "trim_blocks": True,
        "lstrip_blocks": True,
        "keep_trailing_newline": True,
        "autoescape": False,
    }
    disk = open_cache("templates", ".code")
    return jinja2.Environment(
        loader=jinja2.FunctionLoader(resources.load_template),
        bytecode_cache=None if disk is None else _bytecode_cache(disk, repr(options)),
        **options,
    )


def _bytecode_cache(disk: DiskCache, options: str) -> jinja2.BytecodeCache:
    """Compiled templates on disk: to compile one takes 20 ms, to load it 1 ms.

    Jinja takes care of a template's name, path and text; our key has the rest.
    """
    import jinja2

    rest = ("attngen-template/1", jinja2.__version__, sys.implementation.cache_tag, options)

    class Stored(jinja2.BytecodeCache):
        def load_bytecode(self, bucket: jinja2.bccache.Bucket) -> None:
            if (code := disk.load(self._key(bucket))) is not None:
                bucket.bytecode_from_string(code)

        def dump_bytecode(self, bucket: jinja2.bccache.Bucket) -> None:
            disk.store(self._key(bucket), bucket.bytecode_to_string())

        def _key(self, bucket: jinja2.bccache.Bucket) -> str:
            return make_key(*rest, bucket.key, bucket.checksum)

    return Stored()


def render(template: str, context: Any, *, name: str) -> str:
    """The text of a template with context `c`; `name` is the virtual name of the result.

    A line `#line @here@` becomes one that counts on from the place where it stands.
    """
    text = _environment().get_template(template).render(c=context)
    text = re.sub(r"\n{3,}", "\n\n", text).rstrip() + "\n"
    lines = text.split("\n")
    for i, line in enumerate(lines):
        if line == "#line @here@":
            lines[i] = f'#line {i + 2} "{name}.cu"'
    return "\n".join(lines)


@cache
def template_digest(*names: str) -> str:
    """The first 12 hex digits of the sha256 of some template files."""
    text = "\0".join(resources.template_source(name) for name in names)
    return hashlib.sha256(text.encode()).hexdigest()[:12]
