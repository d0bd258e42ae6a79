"""Every mask and score function of the attention gym (`attn-gym` on PyPI), as it is.

    python -m tests.flex.gym        writes the table of docs/flexattention.md anew

A function is passed when attngen's output and LSE are those of PyTorch's eager FlexAttention.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from attn_gym import masks, mods
from attn_gym.masks import document_mask, vsa
from torch.nn import functional

from attngen.diagnostics.diagnostic import AttnError
from tests.flex.dense import operands
from tests.flex.examples import EXAMPLES
from tests.flex.peer import largest_difference

PAGE = Path(__file__).resolve().parents[2] / "docs" / "flexattention.md"
BEGIN, END = "<!-- table: python -m tests.flex.gym -->\n", "<!-- end of the table -->\n"
LARGEST_DIFFERENCE = 1e-5
HEADS = 2


@dataclass(frozen=True)
class Case:
    """One function; `make` calls what makes it, `sizes` are rows and keys."""

    name: str
    make: Callable[[], Any]
    rows: int = 16
    keys: int = 16
    note: str = ""

    @property
    def is_mask(self) -> bool:
        return self.name.startswith("masks.")


def _offsets() -> Any:
    return document_mask.length_to_offsets([5, 3, 8], "cpu")


def _tree(count: int) -> Any:
    parents = [-1, *((i - 1) // 2 for i in range(1, count))]
    return masks.build_tree_ancestor_matrix(parents, device="cpu")


def _graph() -> tuple[Any, Any]:
    """A ring of 16 nodes: adjacency, and a type for each edge."""
    adjacency = torch.zeros(1, 16, 16, dtype=torch.bool)
    nodes = torch.arange(16)
    adjacency[0, nodes, (nodes + 1) % 16] = adjacency[0, (nodes + 1) % 16, nodes] = True
    return adjacency, torch.arange(256).reshape(1, 16, 16) % 4


def _spatial() -> Any:
    table = torch.sin(torch.arange(HEADS * 6.0)).reshape(HEADS, 6)
    return mods.generate_graphormer_spatial_bias(
        table, mods.shortest_path_distances(_graph()[0], 4)
    )


def _edges() -> Any:
    types, lengths = mods.shortest_path_edge_types(*_graph(), 3)
    table = torch.cos(torch.arange(HEADS * 12.0)).reshape(HEADS, 3, 4)
    return mods.generate_graphormer_edge_bias(table, types, lengths)


def _rope() -> Any:
    rows = torch.sin(torch.arange(HEADS * 16 * 8.0)).reshape(1, HEADS, 16, 8)
    keys = torch.cos(torch.arange(16 * 8.0)).reshape(1, 1, 16, 8)
    return mods.generate_mla_rope_score_mod(rows, keys, HEADS, 0.5)


def _top_tiles() -> Any:
    return torch.tensor([[[[0, 1], [1, 2], [2, 3], [0, 3]]] * HEADS])


CASES = (
    Case("masks.causal_mask", lambda: masks.causal_mask, rows=11),
    Case("masks.batchify_mask_mod", lambda: masks.batchify_mask_mod(masks.causal_mask, 4)),
    Case("masks.generate_sliding_window", lambda: masks.generate_sliding_window(4)),
    Case(
        "masks.generate_dilated_sliding_window",
        lambda: masks.generate_dilated_sliding_window(6, 2),
    ),
    Case(
        "masks.generate_global_sliding_window",
        lambda: masks.generate_global_sliding_window(2, torch.arange(16) % 8 == 0),
    ),
    Case("masks.generate_prefix_lm_mask", lambda: masks.generate_prefix_lm_mask(4)),
    Case(
        "masks.generate_doc_mask_mod",
        lambda: masks.generate_doc_mask_mod(masks.causal_mask, _offsets()),
    ),
    Case(
        "masks.generate_packed_causal_doc_mask_mod",
        lambda: masks.generate_packed_causal_doc_mask_mod(_offsets()),
    ),
    Case(
        "masks.generate_shared_prefix_mask_mod",
        lambda: masks.generate_shared_prefix_mask_mod(_offsets(), torch.tensor([0, 0, 0])),
    ),
    Case(
        "masks.generate_vision_cross_attention_mask_mod",
        lambda: masks.generate_vision_cross_attention_mask_mod(
            torch.tensor([[0, 7], [1, 7], [7, 12]], dtype=torch.int32), 3
        ),
        rows=12,
        keys=9,
    ),
    Case("masks.generate_natten", lambda: masks.generate_natten(4, 4, 3, 3)),
    Case("masks.generate_tiled_natten", lambda: masks.generate_tiled_natten(4, 4, 3, 3, 2, 2)),
    Case(
        "masks.generate_morton_natten",
        lambda: masks.generate_morton_natten(4, 4, 3, 3),
        note="bit operations become sums of bits; `//` and `%` say it shorter",
    ),
    Case(
        "masks.generate_sta_mask_mod_2d",
        lambda: masks.generate_sta_mask_mod_2d((4, 4), (4, 2), (2, 2), 3),
        rows=19,
        keys=19,
    ),
    Case(
        "masks.generate_sta_mask_mod_3d",
        lambda: masks.generate_sta_mask_mod_3d((2, 4, 4), (2, 2, 4), (1, 2, 2)),
        rows=32,
        keys=32,
    ),
    Case(
        "masks.generate_spatial_head_mask_mod",
        lambda: masks.generate_spatial_head_mask_mod(2, 7, 2, 2, True, 4),
    ),
    Case(
        "masks.generate_temporal_head_mask_mod",
        lambda: masks.generate_temporal_head_mask_mod(2, 7, 2, 4),
    ),
    Case("masks.generate_block_diffusion_mask", lambda: masks.generate_block_diffusion_mask(8, 4)),
    Case(
        "masks.generate_jetspec_tree_causal_mask_mod",
        lambda: masks.generate_jetspec_tree_causal_mask_mod(4, _tree(12)),
        rows=12,
    ),
    Case(
        "masks.generate_jetspec_training_mask_mod",
        lambda: masks.generate_jetspec_training_mask_mod(4, 4),
        rows=12,
    ),
    Case(
        "masks.generate_vsa_mask_mod",
        lambda: masks.generate_vsa_mask_mod(_top_tiles(), 4, torch.tensor([4, 4, 3, 2])),
        note="the list of tiles is written out, so its length is in the text",
    ),
    Case(
        "masks.vsa.generate_vsa_padding_mask_mod",
        lambda: vsa.generate_vsa_padding_mask_mod(torch.tensor([4, 4, 3, 2]), 4),
        note="of a `BlockMask` that holds the selected tiles itself, only this would be used",
    ),
    Case("mods.generate_alibi_bias", lambda: mods.generate_alibi_bias(HEADS)),
    Case("mods.generate_tanh_softcap", lambda: mods.generate_tanh_softcap(30)),
    Case(
        "mods.generate_tanh_softcap(approx=True)",
        lambda: mods.generate_tanh_softcap(30, approx=True),
        note="`approx::tanh` is `tanh`, whose CUDA form attngen chooses",
    ),
    Case(
        "mods.generate_activation_score_mod",
        mods.generate_activation_score_mod,
        note="GELU by a definition of `erf`, within 1.5e-7",
    ),
    Case(
        "mods.generate_activation_score_mod(relu)",
        lambda: mods.generate_activation_score_mod(functional.relu),
    ),
    Case("mods.generate_sandwich_bias", lambda: mods.generate_sandwich_bias(HEADS, 16)),
    Case(
        "mods.generate_mla_rope_score_mod",
        _rope,
        note="the dot product is written out; attngen has no vector operations",
    ),
    Case("mods.generate_graphormer_spatial_bias", _spatial),
    Case("mods.generate_graphormer_edge_bias", _edges),
)


def verdict(case: Case) -> str:
    """`passed`, or why not."""
    q, k, v = (torch.from_numpy(x) for x in operands(1, HEADS, HEADS, case.rows, case.keys))
    function = case.make()
    score_mod, mask_mod = (None, function) if case.is_mask else (function, None)
    try:
        difference = largest_difference(q, k, v, score_mod, mask_mod)
    except AttnError as error:
        (found,) = error.diagnostics
        return f"refused: {found.message()}, {found.label_text()}"
    return "passed" if difference <= LARGEST_DIFFERENCE else f"differs by {difference:.1e}"


def functions_of_the_gym() -> Iterator[str]:
    """Every function of the gym that makes a mask or score function, or is one."""
    for package in (masks, mods):
        for _, module in inspect.getmembers(package, inspect.ismodule):
            for name, function in inspect.getmembers(module, inspect.isfunction):
                is_own = function.__module__ == module.__name__
                makes_one = name.startswith("generate_") and name != "generate_random_lengths"
                if is_own and (makes_one or name in ("causal_mask", "batchify_mask_mod")):
                    yield name


def table() -> str:
    """The table of the page, as Markdown."""
    lines = ["| function | result | |", "|---|---|---|"]
    lines += [f"| `{c.name}` | {verdict(c)} | {c.note} |" for c in CASES]
    for example in EXAMPLES:
        score_mod, mask_mod = example.make(torch)
        sizes = 2, 4, 4, example.rows, example.keys
        q, k, v = (torch.from_numpy(x) for x in operands(*sizes))
        difference = largest_difference(q, k, v, score_mod, mask_mod)
        result = "passed" if difference <= LARGEST_DIFFERENCE else f"differs by {difference:.1e}"
        lines.append(f"| example: {example.name} | {result} | |")
    return "\n".join(lines) + "\n"


def split_page() -> tuple[str, str, str]:
    """What stands in front of the table, the table, and what stands behind it."""
    before, _, rest = PAGE.read_text("utf-8").partition(BEGIN)
    shown, _, behind = rest.partition(END)
    return before, shown, behind


def main() -> None:
    before, _, behind = split_page()
    PAGE.write_text(before + BEGIN + table() + END + behind, "utf-8")


if __name__ == "__main__":
    main()
