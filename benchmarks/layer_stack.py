"""Layers of Llama 3 8B end to end: the same stack with the attention of attngen, cuDNN and FA2.

    python -m benchmarks.layer_stack [--layers 4] [--tokens 8192] [--batch 1] [--compile]
        [--lanes attngen,cudnn,fa2] [--out DIR]
    python -m benchmarks.layer_stack --device cpu

RMS norms, rotated queries and keys, 32 heads over 8 of 128, a gated feed-forward of 14336: the
shape of a layer of Llama 3 8B (its config.json), with random weights, bf16, causal, one prefill.
Everything but the attention is the same code of PyTorch.  Each lane's result is compared with the
whole stack in float64; then the lanes are timed, interleaved, as replays of CUDA graphs and as
eager calls.  `--compile` puts `torch.compile` around the stack.
`--device cpu` is a dry run with a tiny shape: its times mean nothing.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Final, TypeAlias, final

from attngen.bench.machines import Machine, Timer, open_machine
from attngen.bench.timing import Plan, Times, measure
from attngen.record import record
from benchmarks import environment
from benchmarks.attention import RESULTS, Results, choose_path, describe_run
from benchmarks.peers import make_peer

__all__ = ["LANES", "Shape", "Stack", "main", "make_attend", "make_stack", "render"]

Tensor: TypeAlias = Any
Attend: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(q [B, S, Hq, D], k, v [B, S, Hkv, D]) → [B, S, Hq, D], causal."""

LANES: Final = ("attngen", "cudnn", "fa2")
_PLAN: Final = Plan(min_rounds=9, max_rounds=40, sample_ms=20.0)
_DRY_PLAN: Final = Plan(min_rounds=1, max_rounds=1, sample_ms=0.0)
_THETA: Final = 500000.0
"""Of the rotation, in Llama 3's config.json."""
_MOST_ERROR: Final = 1.5
"""attngen's rms error in units of the better one of PyTorch's own."""
_CAUSAL: Final = "attention causal_layer {\n    mask causal\n}\n"


@final
@record
class Shape:
    """The sizes of a layer, and how many there are."""

    layers: int
    width: int = 4096
    hidden: int = 14336
    Hq: int = 32
    Hkv: int = 8
    D: int = 128


_TINY: Final = Shape(layers=2, width=64, hidden=96, Hq=4, Hkv=2, D=16)


@final
@record(eq=False)
class Stack:
    """Weights of all layers: for each the projections, and the scales of both norms."""

    shape: Shape
    layers: tuple[Mapping[str, Tensor], ...]

    def to(self, dtype: Any) -> Stack:
        """The same stack in another dtype."""
        wide = ({name: weight.to(dtype) for name, weight in layer.items()} for layer in self.layers)
        return Stack(self.shape, tuple(wide))

    def __call__(self, x: Tensor, attend: Attend) -> Tensor:
        """The hidden states behind the last layer; x [B, S, width]."""
        cos, sin = _rotation(x, self.shape.D)
        for layer in self.layers:
            x = x + _attention(self.shape, layer, _norm(x, layer["norm"]), cos, sin, attend)
            x = x + _feed_forward(layer, _norm(x, layer["second_norm"]))
        return x


def make_stack(shape: Shape, machine: Machine) -> Stack:
    """Random weights, scaled so that every projection keeps the size of its input."""
    width, hidden, queries, keys = (
        shape.width,
        shape.hidden,
        shape.Hq * shape.D,
        shape.Hkv * shape.D,
    )
    sizes = {
        "q": (queries, width),
        "k": (keys, width),
        "v": (keys, width),
        "o": (width, queries),
        "gate": (hidden, width),
        "up": (hidden, width),
        "down": (width, hidden),
    }
    layers = []
    for number in range(shape.layers):
        layer = {
            name: machine.randn(size, "bf16", 100 * number + place) * size[1] ** -0.5
            for place, (name, size) in enumerate(sizes.items())
        }
        for place, name in enumerate(("norm", "second_norm")):
            layer[name] = 1 + 0.1 * machine.randn((width,), "bf16", 100 * number + 50 + place)
        layers.append(layer)
    return Stack(shape, tuple(layers))


def _norm(x: Tensor, scale: Tensor) -> Tensor:
    from torch.nn.functional import rms_norm

    return rms_norm(x, (x.shape[-1],), scale, 1e-5)


def _rotation(x: Tensor, D: int) -> tuple[Tensor, Tensor]:
    """Cosine and sine of each position's angles, [S, 1, D / 2]."""
    import torch

    wide = torch.promote_types(x.dtype, torch.float32)
    rates = _THETA ** -(torch.arange(0, D, 2, device=x.device, dtype=torch.float64) / D)
    angles = torch.arange(x.shape[1], device=x.device, dtype=torch.float64)[:, None, None] * rates
    return angles.cos().to(wide), angles.sin().to(wide)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The first half of each head with the second half as its partner."""
    import torch

    one, other = x.to(cos.dtype).chunk(2, dim=-1)
    return torch.cat([one * cos - other * sin, other * cos + one * sin], dim=-1).to(x.dtype)


def _attention(
    shape: Shape, layer: Mapping[str, Tensor], x: Tensor, cos: Tensor, sin: Tensor, attend: Attend
) -> Tensor:
    q, k, v = (
        (x @ layer[name].T).unflatten(-1, (heads, shape.D))
        for name, heads in (("q", shape.Hq), ("k", shape.Hkv), ("v", shape.Hkv))
    )
    o = attend(_rotate(q, cos, sin), _rotate(k, cos, sin), v)
    return o.flatten(2) @ layer["o"].T


def _feed_forward(layer: Mapping[str, Tensor], x: Tensor) -> Tensor:
    from torch.nn.functional import silu

    return (silu(x @ layer["gate"].T) * (x @ layer["up"].T)) @ layer["down"].T


# ---- the attention of each lane ------------------------------------------------------------------


def make_attend(lane: str, machine: Machine) -> Attend:
    """Causal attention by a library; `exact` is dense, in the dtype of its operands."""
    if lane == "exact":
        return _attend_densely
    if lane == "attngen":
        import attngen
        import attngen.torch

        engine: Any = "auto" if machine.kind == "cuda" else "numpy"
        kernel = attngen.compile_text(_CAUSAL, engine=engine)
        operator: Attend = attngen.torch.operator(kernel, layout="bshd")
        return operator
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    backend = {"cudnn": SDPBackend.CUDNN_ATTENTION, "fa2": SDPBackend.FLASH_ATTENTION}[lane]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        with sdpa_kernel(backend):
            o = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return o.transpose(1, 2)

    return attend


def _attend_densely(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """One head after the other, since the pairs of all of them would take much memory."""
    import torch

    S, Hq, D = q.shape[1:]
    is_later = torch.ones(S, S, dtype=torch.bool, device=q.device).triu(1)
    o = torch.empty_like(q)
    for h in range(Hq):
        key, value = (x[:, :, h // (Hq // x.shape[2])] for x in (k, v))
        score = q[:, :, h] @ key.transpose(1, 2) * D**-0.5
        o[:, :, h] = score.masked_fill(is_later, -float("inf")).softmax(-1) @ value
    return o


# ---- checked and timed ---------------------------------------------------------------------------


def run_lanes(
    stack: Stack, x: Tensor, lanes: Sequence[str], machine: Machine, plan: Plan, compiled: bool
) -> list[dict[str, Any]]:
    """A record for each lane: its error, and its times in a graph and eager."""
    import torch

    right = stack.to(torch.float64)(x.double(), make_attend("exact", machine))
    sizes = {"B": x.shape[0], "S": x.shape[1], "layers": stack.shape.layers, "compiled": compiled}
    records: dict[str, dict[str, Any]] = {}
    timers: dict[str, Timer] = {}
    for lane in lanes:
        call = _make_call(stack, x, make_attend(lane, machine), compiled)
        error = call().double() - right
        rms = float(error.square().mean().sqrt() / right.square().mean().sqrt())
        if not rms < 0.1:  # NaN is not
            raise SystemExit(f"{lane} is wrong: its relative error is {rms:.3g}")
        records[lane] = {"suite": "layer_stack", **sizes, "lane": lane, "rms_err": _short(rms)}
        timers[lane] = machine.timer(call)
        timers[f"{lane}, eager"] = _Eager(call, machine)
    for name, times in measure(timers, plan).items():
        lane, _, is_eager = name.partition(", ")
        records[lane] |= _as_fields("eager" if is_eager else timers[lane].mode, times)
    return [records[lane] for lane in lanes]


def _make_call(stack: Stack, x: Tensor, attend: Attend, compiled: bool) -> Callable[[], Tensor]:
    if not compiled:
        return lambda: stack(x, attend)
    import torch

    whole = torch.compile(lambda x: stack(x, attend), fullgraph=True, dynamic=False)
    return lambda: whole(x)


class _Eager:
    """Milliseconds of a call from Python, until the device has done all of it."""

    mode = "eager"

    def __init__(self, call: Callable[[], Tensor], machine: Machine) -> None:
        self._call, self._machine = call, machine

    def __call__(self, repeats: int) -> float:
        import time

        self._call()
        self._machine.synchronize()
        start = time.perf_counter()
        for _ in range(repeats):
            self._call()
        self._machine.synchronize()
        return (time.perf_counter() - start) * 1e3 / repeats


def _as_fields(mode: str, times: Times) -> dict[str, Any]:
    found = {"ms": times.ms, "low_ms": times.low_ms, "high_ms": times.high_ms}
    return {f"{mode}_{name}": _short(ms) for name, ms in found.items()}


def _short(value: float) -> float:
    return float(f"{value:.5g}")


# ---- the table -----------------------------------------------------------------------------------


def render(records: Sequence[Mapping[str, Any]]) -> str:
    """Times and errors as Markdown, and how attngen compares with the best of the others."""
    lanes = [r for r in records if r["suite"] == "layer_stack"]
    gpu = next((r["gpu"] for r in records if r["suite"] == "environment"), "an unknown device")
    first = lanes[0]
    how = "compiled by torch.compile" if first["compiled"] else "not compiled"
    lines = [
        f"# {first['layers']} layers of Llama 3 8B on {gpu}",
        "",
        f"{first['B']} x {first['S']} tokens, bf16, random weights, {how}.",
        "",
        "| attention | graph, ms | eager, ms | relative rms error |",
        "| --- | --- | --- | --- |",
    ]
    for r in lanes:
        graph, eager = (_milliseconds(r.get(f"{mode}_ms")) for mode in ("graph", "eager"))
        lines.append(f"| {r['lane']} | {graph} | {eager} | {r['rms_err']:.3g} |")
    compared = (_compare(lanes, name) for name in ("graph_ms", "eager_ms", "rms_err"))
    lines += ["", *(line for line in compared if line is not None)]
    return "\n".join(lines) + "\n"


def _compare(lanes: Sequence[Mapping[str, Any]], name: str) -> str | None:
    own = next((r.get(name) for r in lanes if r["lane"] == "attngen"), None)
    others = [r[name] for r in lanes if r["lane"] != "attngen" and name in r]
    if own is None or not others:
        return None
    if name == "rms_err":
        return f"Error: attngen's is {own / min(others):.3f} of the smallest of the others."
    mode = name.partition("_")[0]
    return f"- {mode}: attngen is {min(others) / own:.3f} times as fast as the best of the others."


def _milliseconds(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


# ---- the command ---------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    """1 when attngen's error is too large beside that of the others."""
    given = _parse(arguments)
    try:
        machine = open_machine(given.device)
    except RuntimeError as error:
        raise SystemExit(str(error)) from None
    if not machine.has_torch:
        raise SystemExit("the layers are those of PyTorch, which is not installed")
    import torch

    is_dry = machine.kind == "cpu"
    shape = _TINY if is_dry else Shape(layers=given.layers)
    missing = {lane: make_peer(lane, machine).missing() for lane in given.lanes}
    lanes = [lane for lane in given.lanes if missing[lane] is None]
    gone = {lane: reason for lane, reason in missing.items() if reason is not None}
    plan = _DRY_PLAN if is_dry else _PLAN
    path = None
    if given.out is not None:
        given.out.mkdir(parents=True, exist_ok=True)
        path = choose_path(given.out, f"{environment.file_stem(machine.name)}-layers")
    with nullcontext() if path is None else path.open("w", encoding="utf-8") as file:
        results = Results(file)
        results.write(describe_run(machine, gone, plan, 0))
        with torch.no_grad():
            stack = make_stack(shape, machine)
            tokens = 64 if is_dry else given.tokens
            x = machine.randn((given.batch, tokens, shape.width), "bf16", 1)
            for line in run_lanes(stack, x, lanes, machine, plan, given.compile):
                results.write(line)
    report = render(results.records)
    if path is not None:
        path.with_suffix(".md").write_text(report, encoding="utf-8")
    print(report)
    return int(_is_too_far(results.records))


def _is_too_far(records: Sequence[Mapping[str, Any]]) -> bool:
    errors = {r["lane"]: r["rms_err"] for r in records if r["suite"] == "layer_stack"}
    own = errors.pop("attngen", None)
    return own is not None and bool(errors) and own > _MOST_ERROR * min(errors.values())


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.layer_stack",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--lanes", type=_lanes, default=LANES)
    parser.add_argument("--out", type=Path, metavar="DIR")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    given = parser.parse_args(arguments)
    if given.out is None and given.device == "cuda":
        given.out = RESULTS
    is_dry = given.device == "cpu"
    if is_dry and given.out is not None and given.out.resolve().is_relative_to(RESULTS):
        parser.error("a dry run does not write to benchmarks/results")
    return given


def _lanes(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    for name in names:
        if name not in LANES:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(LANES)}")
    return names


if __name__ == "__main__":
    sys.exit(main())
