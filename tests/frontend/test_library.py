"""Every mask and score of the library against its formula, element by element in plain Python.

The formulas here know nothing of the language: indices are Python integers, tensors NumPy
arrays.  All sizes have Skv != Sq, one of them with more rows than keys.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import attngen
from attngen.diagnostics.span import Source
from attngen.frontend import ast
from attngen.frontend.check import check
from attngen.frontend.format import format_file
from attngen.frontend.load import library_names, load_text
from attngen.frontend.parse import parse
from attngen.ir.attention import Attention
from attngen.ir.semantics import evaluate
from attngen.ir.verify import verify_attention

FILES = sorted((Path(attngen.__file__).parent / "library").rglob("*.attn"))
SIZES = [(2, 4, 2, 5, 9), (2, 6, 3, 9, 5), (1, 12, 12, 1, 8), (1, 3, 1, 8, 7), (2, 2, 1, 40, 70)]
"""B, Hq, Hkv, Sq, Skv."""


@dataclass
class Case:
    """A line of the language, the tensors it reads, and its formula in Python."""

    line: str
    formula: Callable[[SimpleNamespace, Any], Any]
    tensors: dict[str, str] = field(default_factory=dict)
    make: Callable[[np.random.Generator, SimpleNamespace], dict[str, Any]] = lambda rng, n: {}
    id: str = ""

    @property
    def name(self) -> str:
        return self.id or self.line


def document(rng: np.random.Generator, n: SimpleNamespace) -> dict[str, Any]:
    return {"doc": rng.integers(0, 3, (n.B, n.Skv))}


def near(i: int, j: int, n: int, size: int, dilation: int) -> bool:
    """Neighbourhood attention as its authors draw it: the window of the row's dilated group."""
    group = [x for x in range(n) if x % dilation == i % dilation]
    if i not in group or j not in group:
        return False
    at = group.index(i)
    start = min(max(at - size // 2, 0), len(group) - size)
    return j in group[start : start + size]


def alibi_slopes(heads: int) -> list[float]:
    """The rule of the ALiBi authors' code."""

    def of_power_of_two(n: int) -> list[float]:
        start = 2.0 ** (-(2.0 ** -(math.log2(n) - 3)))
        return [start * start**i for i in range(n)]

    if math.log2(heads).is_integer():
        return of_power_of_two(heads)
    closest = 2 ** math.floor(math.log2(heads))
    return of_power_of_two(closest) + alibi_slopes(2 * closest)[0::2][: heads - closest]


def t5_bucket(relative: int, both: bool, buckets: int, max_distance: int) -> int:
    """The rule of T5's code, with the logarithm in float64."""
    bucket = 0
    if both:
        buckets //= 2
        bucket += buckets if relative > 0 else 0
        distance = abs(relative)
    else:
        distance = -min(relative, 0)
    exact = buckets // 2
    if distance < exact:
        return bucket + distance
    part = math.log2(distance / exact) / math.log2(max_distance / exact) * (buckets - exact)
    return bucket + min(exact + int(part), buckets - 1)


MASKS = [
    Case("causal", lambda i, t: i.kv <= i.qpos),
    Case("causal(top_left)", lambda i, t: i.kv <= i.q),
    Case("causal(top_left = false)", lambda i, t: i.kv <= i.qpos),
    Case("window(left = 2, right = 1)", lambda i, t: i.qpos - 2 <= i.kv <= i.qpos + 1),
    Case("window(3)", lambda i, t: 0 <= i.qpos - i.kv <= 3),
    Case(
        "prefix(n[b])",
        lambda i, t: i.kv <= i.qpos or i.kv < t["n"][i.b],
        {"n": "int32[B]"},
        lambda rng, n: {"n": rng.integers(0, n.Skv + 1, n.B)},
    ),
    Case(
        "document(doc)",
        lambda i, t: i.qpos >= 0 and t["doc"][i.b, i.qpos] == t["doc"][i.b, i.kv],
        {"doc": "int32[B, Skv]"},
        document,
    ),
    Case(
        "same_span(doc)",
        lambda i, t: (
            i.qpos >= 0 and t["doc"][i.b, i.kv] > 0 and t["doc"][i.b, i.qpos] == t["doc"][i.b, i.kv]
        ),
        {"doc": "int32[B, Skv]"},
        document,
    ),
    Case("dilated(3)", lambda i, t: abs(i.qpos - i.kv) % 3 == 0),
    Case("chunked(4)", lambda i, t: math.floor(i.qpos / 4) == math.floor(i.kv / 4)),
    Case(
        "block_sparse(select, block_q = 2, block_kv = 3)",
        lambda i, t: i.qpos >= 0 and t["select"][0, i.h, i.qpos // 2, i.kv // 3],
        {"select": "bool[B?, Hq?, NQ, NKV]"},
        lambda rng, n: {
            "select": rng.random((1, n.Hq, -(-n.Skv // 2), -(-n.Skv // 3))) < 0.5,
        },
    ),
    Case(
        "tree(ancestor)",
        lambda i, t: i.kv < i.Skv - i.Sq or bool(t["ancestor"][i.b, i.q, i.kv - i.Skv + i.Sq]),
        {"ancestor": "bool[B, Sq, Sq]"},
        lambda rng, n: {"ancestor": rng.random((n.B, n.Sq, n.Sq)) < 0.5},
    ),
    Case(
        "tree_bits(path)",
        lambda i, t: i.kv < i.Skv - i.Sq or (int(t["path"][i.b, i.q]) >> i.kv - i.Skv + i.Sq) & 1,
        {"path": "int64[B, Sq]"},
        lambda rng, n: {"path": rng.integers(-(2**63), 2**63 - 1, (n.B, n.Sq))},
    ),
    Case(
        "key_padding(keep)",
        lambda i, t: t["keep"][i.b, i.kv],
        {"keep": "bool[B, Skv]"},
        lambda rng, n: {"keep": rng.random((n.B, n.Skv)) < 0.5},
    ),
    Case(
        "global_tokens(marked)",
        lambda i, t: t["marked"][i.b, i.kv] or (i.qpos >= 0 and t["marked"][i.b, i.qpos]),
        {"marked": "bool[B, Skv]"},
        lambda rng, n: {"marked": rng.random((n.B, n.Skv)) < 0.3},
    ),
    Case(
        "neighborhood(q, kv, Skv, 3)",
        lambda i, t: near(i.q, i.kv, i.Skv, 3, 1) if i.q < i.Skv else None,
    ),
    Case(
        "neighborhood(max(qpos, 0), kv, Skv, size = 3, dilation = 2)",
        lambda i, t: near(max(i.qpos, 0), i.kv, i.Skv, 3, 2) if i.Skv > 5 else None,
    ),
]

SCORES = [
    Case("softcap(s, 3.0)", lambda i, t: 3.0 * math.tanh(i.s / 3.0)),
    Case("softcap(s, cap = 20)", lambda i, t: 20.0 * math.tanh(i.s / 20.0)),
    Case("alibi(s)", lambda i, t: i.s + alibi_slopes(i.Hq)[i.h] * (i.kv - i.qpos)),
    Case(
        "relative_bias(s, table, reach = 3)",
        lambda i, t: i.s + t["table"][i.h, min(max(i.kv - i.qpos, -3), 3) + 3],
        {"table": "float[Hq, R]"},
        lambda rng, n: {"table": rng.standard_normal((n.Hq, 7))},
    ),
    Case(
        "bucketed_bias(s, table)",
        lambda i, t: i.s + t["table"][t5_bucket(i.kv - i.qpos, True, 32, 128), i.h],
        {"table": "float[32, Hq]"},
        lambda rng, n: {"table": rng.standard_normal((32, n.Hq))},
    ),
    Case(
        "bucketed_bias(s, table, causal_only, buckets = 8, max_distance = 32)",
        lambda i, t: i.s + t["table"][t5_bucket(i.kv - i.qpos, False, 8, 32), i.h],
        {"table": "float[8, Hq]"},
        lambda rng, n: {"table": rng.standard_normal((8, n.Hq))},
    ),
    Case(
        "pair_bias(s, bias)",
        lambda i, t: i.s + t["bias"][0, 0, i.q, i.kv],
        {"bias": "float[B?, Hq?, Sq, Skv]"},
        lambda rng, n: {"bias": rng.standard_normal((1, 1, n.Sq, n.Skv))},
    ),
    Case(
        "temperature(s, interval = 4.0, strength = 0.5)",
        lambda i, t: i.s * (0.5 * math.log((max(i.qpos, 0) + 1) // 4 + 1) + 1),
    ),
    Case(
        "temperature(s)",
        lambda i, t: i.s * (0.1 * math.log((max(i.qpos, 0) + 1) // 8192 + 1) + 1),
    ),
    Case(
        "log_n(s, trained = 4)",
        lambda i, t: i.s * (math.log(i.qpos + 1, 4) if i.qpos + 1 > 4 else 1),
    ),
]


def variant(statement: str, case: Case) -> Attention:
    tensors = "".join(f"tensor {name} : {shape}\n" for name, shape in case.tensors.items())
    unit = load_text(f"attention a {{\n{tensors}{statement} {case.line}\n}}")
    attention = check(unit).attention
    assert verify_attention(attention) == []
    return attention


def run(statement: str, case: Case, sizes: tuple[int, ...]) -> None:
    """Compare every element; where the formula says None, the case has no meaning."""
    attention = variant(statement, case)
    e = attention.mask if statement == "mask" else attention.scores[0]
    assert e is not None
    n = SimpleNamespace(**dict(zip(("B", "Hq", "Hkv", "Sq", "Skv"), sizes, strict=True)))
    rng = np.random.default_rng(sum(sizes))
    tensors = case.make(rng, n)
    shape = (n.B, n.Hq, n.Sq, n.Skv)
    b, h, q, kv = np.ogrid[tuple(slice(size) for size in shape)]
    s = rng.standard_normal(shape).astype(np.float32)
    symbols = {**vars(n), "b": b, "h": h, "q": q, "kv": kv, "qpos": q + n.Skv - n.Sq, "s": s}
    symbols |= {"hkv": h // (n.Hq // n.Hkv), "Dqk": np.int64(64), "Dv": np.int64(64)}
    symbols = {k: np.asarray(v) if k != "s" else v for k, v in symbols.items()}
    full = {
        tensor.name: np.broadcast_to(
            tensors[tensor.name],
            [
                symbols[str(d.size)] if d.optional else size
                for d, size in zip(tensor.dims, tensors[tensor.name].shape, strict=True)
            ],
        )
        for tensor in attention.tensors
    }
    value = evaluate(e, symbols, full)
    assert not np.any(value.outside), f"reads outside of {value.tensor}"
    found = np.broadcast_to(value.data, shape)
    step = 1 if n.Skv < 20 else 7
    for at in np.ndindex(shape):
        if sum(at) % step:
            continue
        i = SimpleNamespace(**vars(n), **dict(zip(("b", "h", "q", "kv"), at, strict=True)))
        i.qpos, i.s = i.q + n.Skv - n.Sq, float(s[at])
        expected = case.formula(i, tensors)
        if statement == "mask":
            assert expected is None or bool(expected) == found[at], vars(i)
        else:
            assert expected == pytest.approx(found[at], rel=1e-5, abs=1e-5), vars(i)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("case", MASKS, ids=lambda case: case.name)
def test_mask(case: Case, sizes: tuple[int, ...]) -> None:
    run("mask", case, sizes)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("case", SCORES, ids=lambda case: case.name)
def test_score(case: Case, sizes: tuple[int, ...]) -> None:
    run("score", case, sizes)


@pytest.mark.parametrize("heads", [1, 2, 3, 5, 7, 8, 12, 16, 20, 25, 40, 71, 112, 128, 255, 1000])
def test_alibi_for_any_number_of_heads(heads: int) -> None:
    attention = check(load_text("attention a {\n score alibi(s)\n}")).attention
    symbols = {"Hq": np.int64(heads), "h": np.arange(heads), "s": np.float32(0)}
    symbols |= {"kv": np.int64(1), "qpos": np.int64(0)}
    found = evaluate(attention.scores[0], symbols, {}).data
    np.testing.assert_allclose(found, alibi_slopes(heads), rtol=1e-5)


# ---- the files ---------------------------------------------------------------------------


def test_every_definition_has_a_case() -> None:
    tested = {case.line.split("(")[0] for case in MASKS + SCORES}
    assert tested == set(library_names()) == {path.stem for path in FILES}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_file(path: Path) -> None:
    """The first definition is called like its file, and says what, whence and how."""
    text = path.read_text(encoding="utf-8")
    file = parse(Source(path.name, text))
    assert format_file(file) == text
    assert all(isinstance(item, ast.Definition) for item in file.items)
    first = file.items[0]
    assert isinstance(first, ast.Definition)
    assert first.name == path.stem
    assert first.type == ("bool" if path.parent.name == "masks" else "float")
    comment = "\n".join(first.comments.above)
    assert "# Source: " in comment
    example = comment.split("# Example: ")[1].splitlines()[0]
    assert example.split()[0] == ("mask" if path.parent.name == "masks" else "score")
    assert path.stem in example
    parse(Source("example", f"attention a {{\n{example}\n}}"))


@pytest.mark.parametrize("name", sorted(library_names()))
def test_helpers_are_private(name: str) -> None:
    file = parse(Source(name, library_names()[name].read_text(encoding="utf-8")))
    helpers = [item.name for item in file.items[1:] if isinstance(item, ast.Definition)]
    assert not set(helpers) & set(library_names())
