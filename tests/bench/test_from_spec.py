"""Specs as FlexAttention's functions: every example, in PyTorch's own FlexAttention on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import attngen
from attngen.api import Kernel
from attngen.bench.from_spec import NotExpressibleError, as_flex_functions, plain_mask
from attngen.bench.machines import TorchMachine
from attngen.cli.inputs import make_operands
from attngen.cli.problem import make_problem

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.attn"))
SIZES: dict[str, dict[str, int]] = {
    "natten_2d": {"Sq": 392},
    "swin_shifted": {"Sq": 49},
    "block_diffusion": {"Sq": 64},
    "bigbird": {"Sq": 40, "Skv": 200},
    "streaming_llm": {"Sq": 20, "Skv": 120},
}
REFUSED = {
    "gpt_oss": "sinks",
    "softmax_off_by_one": "sinks",
    "sigmoid_attention": "other weights",
    "cross_attention": "one length",
    "padded_decode": "one length",
    "ragged_prefill": "one length",
}


def plain_kernel(*lines: str) -> Any:
    return attngen.compile_text("\n".join(("attention a {", *lines, "}"))).attention


@pytest.mark.parametrize(
    ("lines", "mask"),
    [
        ([], "full"),
        (["mask causal"], "causal"),
        (["mask qpos >= kv"], "causal"),
        (["scale 0.5", "mask causal"], "causal"),
        (["mask causal(top_left)"], None),
        (["mask kv < qpos"], None),
        (["mask window(left = 3)"], None),
        (["score s + 1.0"], None),
        (["weights sigmoid"], None),
    ],
)
def test_what_is_plain(lines: list[str], mask: str | None) -> None:
    assert plain_mask(plain_kernel(*lines)) == mask


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_every_example(path: Path) -> None:
    torch = pytest.importorskip("torch", reason="the functions are those of PyTorch")
    machine = TorchMachine("cpu")
    kernel = Kernel(attngen.load_file(path))
    sizes = SIZES.get(path.stem, {})
    problem = make_problem(
        kernel.attention,
        shape={name: size for name, size in sizes.items() if name == "Skv"},
        values={},
        inputs={},
        defaults={"B": 2, "Hq": 4, "Sq": 33} | sizes,
        seed=0,
    )
    tensors = {name: machine.asarray(given.array) for name, given in problem.tensors.items()}
    arguments = problem.attention, problem.sizes, problem.params, tensors
    if path.stem in REFUSED:
        with pytest.raises(NotExpressibleError, match=REFUSED[path.stem]):
            as_flex_functions(*arguments)
        return
    functions = as_flex_functions(*arguments)
    given = make_operands(problem, {}, seed=0)
    q, k, v = (np.asarray(given[name].array, np.float32) for name in "qkv")
    right = attngen.reference(
        kernel.unit,
        q,
        k,
        v,
        tensors={name: each.array for name, each in problem.tensors.items()},
        params=problem.params,
        dtype="fp32",
    )
    o = attend(torch, functions, *(torch.from_numpy(x) for x in (q, k, v)))
    assert right.accepts_o(o).all()


def attend(torch: Any, functions: Any, q: Any, k: Any, v: Any) -> Any:
    """Dense attention in float64 with FlexAttention's functions, one pair at a time."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    score = q.double() @ k.double().transpose(2, 3) * functions.scale
    places = [torch.arange(size) for size in score.shape]
    if functions.score_mod is not None:
        score = over_all_pairs(torch, functions.score_mod, 1)(score.float(), *places).double()
    if functions.mask_mod is not None:
        attends = over_all_pairs(torch, functions.mask_mod, 0)(*places)
        score = score.masked_fill(~attends, -float("inf"))
    return (score.softmax(-1).nan_to_num(0.0) @ v.double()).numpy()


def over_all_pairs(torch: Any, function: Any, lead: int) -> Any:
    for position in reversed(range(4)):
        which = tuple(0 if i == position else None for i in range(4))
        function = torch.vmap(function, in_dims=(*[0] * lead, *which))
    return function
