"""attngen against a real model: every layer of a capture, and then the whole model.

    python examples/minilm/compare.py build/minilm                          # CUDA text on the CPU
    python examples/minilm/compare.py build/minilm --device numpy
    python examples/minilm/compare.py build/minilm --device cuda --dtype bf16

`build/minilm` is what capture.py wrote.  Per layer it prints the largest error against the
model's own attention and against the float64 oracle, and the largest part of the oracle's
error bound that was used, by attngen and by the model itself.  Exit code 1 when either is more
than all of it: then attngen computes something else than the spec, or the spec than the model.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import ml_dtypes
import numpy as np
from capture import Array, Capture, MiniLM, load

from attngen.api import Kernel
from attngen.api import compile as compile_spec
from attngen.diagnostics.diagnostic import AttnError
from attngen.oracle.dense import Reference, reference

Run: TypeAlias = Callable[[Array, Array, Array, Array], Array]
"""q, k, v [B, H, S, D] of the dtype asked for, length → o, all NumPy arrays."""

SPEC = Path(__file__).parents[1] / "minilm.attn"
DTYPES = {"fp32": np.float32, "fp16": np.float16, "bf16": ml_dtypes.bfloat16}


@dataclass(frozen=True, slots=True)
class LayerErrors:
    """Largest absolute errors of one layer, over all rows, padded ones included."""

    model: float
    """Against the model's float32 attention of the same layer, before q, k, v are rounded."""
    oracle: float
    """Against the float64 oracle of the rounded q, k, v."""
    bound: float
    """The largest part of the bound that an element used; right when at most 1."""
    model_bound: float
    """The same for the model's attention, with the float32 q, k, v and their bound."""
    seconds: float

    @property
    def fits(self) -> bool:
        return self.bound <= 1 and self.model_bound <= 1


def compare_layer(
    kernel: Kernel, run: Run, captured: Capture, layer: int, dtype: str
) -> LayerErrors:
    exact, context, length = captured.qkv[layer], captured.context[layer], captured.batch.length
    q, k, v = (x.astype(DTYPES[dtype]) for x in exact)
    start = time.perf_counter()
    o = run(q, k, v, length).astype(np.float64)
    seconds = time.perf_counter() - start
    answer = reference(kernel.unit, q, k, v, tensors={"length": length})
    model_answer = reference(kernel.unit, *exact, tensors={"length": length}, dtype="fp32")
    return LayerErrors(
        model=float(np.abs(o - context).max()),
        oracle=float(np.abs(o - answer.o).max()),
        bound=part_of_bound(o, answer),
        model_bound=part_of_bound(context, model_answer),
        seconds=seconds,
    )


def part_of_bound(o: Array, answer: Reference) -> float:
    part = np.abs(o - answer.o) / answer.bound
    return float(part.max())  # NaN when one is, which is no number below 1 either


def compare_model(run: Run, captured: Capture, dtype: str) -> None:
    """The whole model with attngen's attention: do the sentences keep their neighbours?"""
    model = MiniLM.load()

    def attention(layer: int, q: Array, k: Array, v: Array, length: Array) -> Array:
        q, k, v = (x.astype(DTYPES[dtype]) for x in (q, k, v))
        return run(q, k, v, length).astype(np.float32)

    own = captured.embedding
    found = model.embed(captured.batch, attention)
    similarity, expected = found @ found.T, own @ own.T
    print("\nwhole model, similarity of the sentences:")
    for row, sentence in zip(similarity, captured.sentences, strict=True):
        numbers = " ".join(f"{x:5.2f}" for x in row)
        print(f"  {numbers}  {sentence[:40]}{'…' if len(sentence) > 40 else ''}")
    same = int((nearest(similarity) == nearest(expected)).sum())
    print(f"largest difference to the model's own: {np.abs(similarity - expected).max():.1e}")
    print(f"same nearest sentence: {same} of {len(own)}")


def nearest(similarity: Array) -> Array:
    """The most similar other sentence of each."""
    others = similarity - 4 * np.eye(len(similarity))
    found: Array = others.argmax(axis=1)
    return found


def runner(kernel: Kernel, device: str) -> Run:
    """A call of the kernel with NumPy arrays, by way of the GPU where that is asked for."""
    if device != "cuda":
        return lambda q, k, v, length: kernel(q, k, v, length=length)
    import cupy

    cupy.cuda.Device(0).use()  # where there is none, an error with CUDA's own words

    def on_gpu(*arrays: Array) -> Array:
        q, k, v, length = map(cupy.asarray, arrays)
        o: Array = cupy.asnumpy(kernel(q, k, v, length=length))
        return o

    return on_gpu


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare attngen with captured attention.")
    parser.add_argument("capture", type=Path, help="what capture.py wrote")
    parser.add_argument("--device", choices=("cpu", "numpy", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="fp32")
    layer_help = "only this layer, and not the whole model"
    parser.add_argument("--layer", type=int, choices=range(6), help=layer_help)
    parser.add_argument("--spec", type=Path, default=SPEC, help="an .attn file with this mask")
    options = parser.parse_args()
    warnings.simplefilter("ignore")  # that this is for checking and not for speed
    try:
        captured = load(options.capture)
        kernel = compile_spec(options.spec, dtype=options.dtype, engine=options.device)
        run = runner(kernel, options.device)
        fits = compare_layers(kernel, run, captured, options.dtype, options.layer)
    except (AttnError, OSError, ImportError, RuntimeError) as error:
        print(error, file=sys.stderr)
        return 2
    if options.layer is None:
        try:
            compare_model(run, captured, options.dtype)
        except ModuleNotFoundError as error:
            print(f"\nwhole model: left out, {error.name} is not installed")
    return 0 if fits else 1


def compare_layers(
    kernel: Kernel, run: Run, captured: Capture, dtype: str, only: int | None
) -> bool:
    """Print the table; whether everything is within the bound."""
    B, H, S, D = captured.context.shape[1:]
    print(f"{kernel.name}, {dtype}: B = {B}, H = {H}, S = {S}, D = {D}")
    print("        largest error to the     part of the bound used by")
    print("layer      model     oracle      attngen        the model        seconds")
    fits = True
    for layer in range(len(captured.qkv)) if only is None else (only,):
        e = compare_layer(kernel, run, captured, layer, dtype)
        fits = fits and e.fits
        errors = f"{e.model:9.2e}  {e.oracle:9.2e}"
        parts = f"{e.bound:11.3f}   {e.model_bound:14.3f}"
        print(f"{layer:5}  {errors}  {parts}   {e.seconds:13.2f}")
    return fits


if __name__ == "__main__":
    sys.exit(main())
