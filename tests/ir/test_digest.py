"""The digest of an operation: what it depends on, and what it does not."""

from __future__ import annotations

import pytest

from attngen import targets
from attngen.api import compile_text
from attngen.backend.nvrtc import load_nvrtc
from attngen.compiler import Lowered, lower_program, render_lowered
from attngen.diagnostics.diagnostic import AttnError
from attngen.engines.cuda_engine import compile_rendered, digest_code
from attngen.ir.digest import digest_operation
from attngen.ir.types import BF16

WINDOW = """\
attention local {
    const  W = 8
    param  reach : int = 64 where 1 <= reach < 4096
    tensor doc : int32[B, n]
    let    same = doc[b, q] == doc[b, kv] and kv <= qpos
    mask   same and qpos - kv < reach + W
}
"""


def lower(text: str) -> Lowered:
    return lower_program(compile_text(text).checked, BF16, (64, 64), targets.get("sm_80"))


def digest(text: str) -> str:
    return digest_operation(lower(text).program.attention)


COSMETICS = {
    "the name": ("attention local", "attention other"),
    "a param's name": ("reach", "width"),
    "a param's default": ("= 64 ", ""),
    "a tensor's name": ("doc", "document"),
    "a size's name": ("n]", "total]"),
    "a let's name": ("same", "is_same"),
    "a const's name": ("W", "EXTRA"),
    "a comment": ("mask ", "# here\n    mask "),
    "a schedule": ("}\n", "}\nschedule {\n    tile q = 32\n}\n"),
    "dtype and head dim, stated": ("    const", "    dtype bf16\n    head_dim 64\n    const"),
}
MEANING = {
    "a formula": ("kv <= qpos", "kv < qpos"),
    "a constant": ("W = 8", "W = 9"),
    "a param's range": ("4096", "4097"),
    "a tensor's type": ("int32", "int64"),
    "an output": ("    mask", "    output o, lse\n    mask"),
    "the scale": ("    const", "    scale 2.0\n    const"),
}


def changed(old: str, new: str) -> str:
    text = WINDOW.replace(old, new)
    assert text != WINDOW
    return text


@pytest.mark.parametrize(("old", "new"), COSMETICS.values(), ids=COSMETICS)
def test_what_an_operation_does_not_depend_on(old: str, new: str) -> None:
    assert digest(changed(old, new)) == digest(WINDOW)


@pytest.mark.parametrize(("old", "new"), MEANING.values(), ids=MEANING)
def test_what_an_operation_depends_on(old: str, new: str) -> None:
    assert digest(changed(old, new)) != digest(WINDOW)


def test_the_order_of_declarations_counts() -> None:
    """It is that of the argument struct, and so of the machine code."""
    one = "attention a {\n    param x : int\n    param y : int\n    mask kv < x - y\n}\n"
    other = one.replace("param x : int\n    param y", "param y : int\n    param x")
    assert digest(one) != digest(other)


def test_one_operation_has_one_machine_code() -> None:
    try:
        load_nvrtc()
    except AttnError as error:
        pytest.skip(error.diagnostics[0].message())
    text = WINDOW
    for name in ("the name", "a param's name", "a tensor's name", "a let's name"):
        text = text.replace(*COSMETICS[name])
    rendered = [render_lowered(lower(each)) for each in (WINDOW, text)]
    assert rendered[0].source != rendered[1].source
    one, other = (digest_code(each, compile_rendered(each)) for each in rendered)
    assert one == other


def test_digests_in_files_stay_valid() -> None:
    """Records are found by it: a change here makes every record that exists unknown."""
    text = "attention causal {\n    mask kv <= qpos\n}\n"
    assert digest(text) == "82df1a0c4b1cb7a723bc40f286b547f9a20859553a874fb14c87e007b02680e8"
