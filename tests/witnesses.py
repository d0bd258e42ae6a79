"""Small kernels that are judged beside the goldens: what their lines can do wrong and no golden
shows.

A golden has dead keys only before or behind all others, and none has tiles so small that a list
of more than 32 groups of them is cheap.
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


_TEXT = """attention kept_documents {
    heads     q = 1, kv = 1
    tensor    doc : int32[B, Skv]
    tensor    keep : bool[B, Skv]
    mask      keep[b, kv] and doc[b, qpos] == doc[b, kv]
    output    o, lse
}
"""


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


WITNESSES = (
    Witness(
        "kept_documents",
        "",
        "sm_80",
        "fp16",
        (16, 16),
        "kernel forward_mma; tile q = 16, kv = 64; warps 1; stages 1",
        text=_TEXT,
        problems=problems_of_kept_documents,
    ),
)
