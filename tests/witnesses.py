"""Small kernels that are judged beside the goldens: what their lines can do wrong and no golden
shows.

A golden has dead keys only before or behind all others, none has heads so few that more than 32
groups of key tiles are cheap, none has keys that alone decide about a group of tiles, a tile of
one meets 25 blocks at most, none has more than 128 keys in a tile, and none with a limit of the
head beside documents has a tile in which all pairs attend.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import attngen
from tests.goldens import Golden, Problem, make_problem


@dataclass(frozen=True)
class Witness(Golden):
    """A generated text that is not kept; it has the lines of a golden, and problems of its own."""

    text: str = ""
    problems: Callable[[Witness], Iterator[Problem]] = lambda witness: iter(())

    def kernel(self, engine: attngen.api.Engine = "cpu") -> attngen.Kernel:
        return attngen.compile_text(
            self.text,
            name=f"{self.name}.attn",
            dtype=self.dtype,
            head_dim=self.head_dim,
            arch=self.target,
            engine=engine,
            schedule=self.schedule,
        )


_KEPT_DOCUMENTS = """attention kept_documents {
    heads     q = 1, kv = 1
    tensor    doc : int32[B, Skv]
    tensor    keep : bool[B, Skv]
    mask      keep[b, kv] and doc[b, qpos] == doc[b, kv]
    output    o, lse
}
"""


_SMALL_BLOCKS = """attention small_blocks {
    heads     q = 1, kv = 1
    tensor    select : bool[B, NB, NB]
    mask      select[b, qpos // 4, kv // 4]
    output    o, lse
}
"""


_POINTED = """attention pointed {
    heads     q = 1, kv = 1
    tensor    key : int32[B, Skv]
    tensor    keep : bool[B, Skv]
    mask      key[b, qpos] == kv and keep[b, kv]
    output    o, lse
}
"""


_WIDE = """attention wide {
    heads     q = 1, kv = 1
    mask      causal
    output    o, lse
}
"""


_LIMITED = """attention limited {
    heads     q = 1, kv = 1
    tensor    length : int32[B]
    tensor    doc : int32[B, Skv]
    mask      kv < length[b] and doc[b, qpos] == doc[b, kv]
    output    o, lse
}
"""


def problems_of_limited(witness: Witness) -> Iterator[Problem]:
    """One document: a tile in which all pairs attend, and one that has keys behind the limit."""
    problem = make_problem(witness, 20, 40)
    problem.named["doc"][...] = 0
    problem.named["length"][...] = 37
    yield problem


def problems_of_wide(witness: Witness) -> Iterator[Problem]:
    """The last keys of the first tile, which a second word has, and then a second tile."""
    yield make_problem(witness, 163, 163)


def problems_of_kept_documents(witness: Witness) -> Iterator[Problem]:
    """One dead key in a tile: its first one, the 33rd, the last.  Then keys of which only the last
    three are seen, behind 32 groups of 32 tiles."""
    problem = make_problem(witness, 5, 64)
    problem.named["doc"][...] = 0
    problem.named["keep"][...] = True
    for b, key in enumerate((0, 32, 63)):
        problem.named["keep"][b, key] = False
    yield problem

    problem = make_problem(witness, 3, 32 * 32 * 64 + 3)
    named = {name: tensor[:1] for name, tensor in problem.named.items()}
    named["doc"][...] = 0
    named["doc"][:, -3:] = 1
    named["keep"][...] = True
    yield Problem(problem.q[:1], problem.k[:1], problem.v[:1], named)


def problems_of_pointed(witness: Witness) -> Iterator[Problem]:
    """Every row sees one key, the last of a group of key tiles or of all.

    The second part of the keys begins with the second group and has two of them, of which the last
    is whole or not; the first part is as many tiles as a list has.
    """
    group = 32 * 16
    for keys, place in (
        (3 * group - 7, 2 * group - 1),
        (3 * group - 7, 3 * group - 8),
        (3 * group, 2 * group - 1),
    ):
        problem = make_problem(witness, 1, keys)
        problem.named["key"][...] = place
        problem.named["keep"][...] = True
        yield problem


def problems_of_small_blocks(witness: Witness) -> Iterator[Problem]:
    """The first 16 rows lie in 5 blocks of rows, the keys in 13: one element more than are looked
    at.  They are all the same."""
    problem = make_problem(witness, 17, 52)
    problem.named["select"][...] = True
    yield problem


_SMALL = ("", "sm_80", "fp16", (16, 16))
_SMALL_TILES = "kernel forward_mma; tile q = 16, kv = 64; warps 1; stages 1"
_SMALLEST_TILES = "kernel forward_mma; tile q = 16, kv = 16; warps 1; stages 1"
_WIDE_TILES = "kernel forward_mma; tile q = 16, kv = 160; warps 1; stages 1"

WITNESSES = (
    Witness(
        "kept_documents",
        *_SMALL,
        _SMALL_TILES,
        text=_KEPT_DOCUMENTS,
        problems=problems_of_kept_documents,
    ),
    Witness(
        "pointed",
        *_SMALL,
        _SMALLEST_TILES,
        text=_POINTED,
        problems=problems_of_pointed,
    ),
    Witness(
        "small_blocks",
        *_SMALL,
        _SMALL_TILES,
        text=_SMALL_BLOCKS,
        problems=problems_of_small_blocks,
    ),
    Witness("limited", *_SMALL, _SMALLEST_TILES, text=_LIMITED, problems=problems_of_limited),
    Witness("wide", *_SMALL, _WIDE_TILES, text=_WIDE, problems=problems_of_wide),
)
