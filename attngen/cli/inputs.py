"""Arrays from `.npz` and `.npy` files, and q, k, v where no file has them."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from attngen.backend.device import numpy_dtype
from attngen.cli.console import note
from attngen.cli.errors import BadOption, CannotRead, UnknownInput
from attngen.cli.files import require_file
from attngen.cli.memory import require_memory
from attngen.cli.problem import Input, Problem, as_element
from attngen.diagnostics.diagnostic import AttnError
from attngen.ir.attention import Attention

__all__ = ["make_operands", "read_inputs", "to_bhsd"]

Array: TypeAlias = Any


def read_inputs(
    attention: Attention, archive: Path | None, single: Mapping[str, Path]
) -> dict[str, Input]:
    """The arrays of `--inputs` and, winning over those, of `--input NAME=FILE`.

    An array of an archive for which the variant has no name is left out, with a note, unless
    its name looks misspelt.

    Errors:  A712 a file that holds no arrays; A716 a misspelt name.
    """
    inputs: dict[str, Input] = {}
    if archive is not None:
        found = _load(archive)
        if not isinstance(found, dict):
            advice = f"it holds one array: pass --input q={archive} for q"
            raise AttnError(CannotRead(None, str(archive), "it is no .npz archive", advice))
        inputs |= {name: Input(array, archive.name) for name, array in found.items()}
    known = _known_names(attention)
    for name in [name for name in inputs if name not in known]:
        missing = [other for other in known if other not in inputs and other not in single]
        closest = difflib.get_close_matches(name, missing, n=1)
        if closest:
            assert archive is not None
            takes = ", ".join(known)
            error = UnknownInput(
                None, str(archive), attention.name, "input", name, takes, closest[0]
            )
            raise AttnError(error)
        del inputs[name]
        note(f"`{name}` of {archive} is not used: `{attention.name}` has no input of this name")
    for name, path in single.items():
        array = _load(path)
        if isinstance(array, dict):
            held = ", ".join(array) or "nothing"
            advice = f"it is an archive of {held}: pass --inputs {path}"
            raise AttnError(CannotRead(None, str(path), "it is no .npy file", advice))
        inputs[name] = Input(array, path.name)
    return inputs


def _known_names(attention: Attention) -> list[str]:
    tensors = [tensor.name for tensor in attention.tensors]
    return ["q", "k", "v", *tensors, *(param.name for param in attention.params)]


def _load(path: Path) -> Any:
    """An array, or a dictionary of arrays from an archive."""
    require_file(path)
    try:
        loaded = np.load(path, allow_pickle=False)
        if isinstance(loaded, np.lib.npyio.NpzFile):
            with loaded:
                return {name: _require_numbers(loaded[name], path, name) for name in loaded.files}
        return _require_numbers(loaded, path, "it")
    except (AttnError, MemoryError):
        raise
    except Exception as error:  # NumPy raises whatever its parsers raise on a damaged file
        reason = _reason(error)
    raise AttnError(CannotRead(None, str(path), reason, "it should come from numpy.save or savez"))


def _require_numbers(array: Any, path: Path, name: str) -> Array:
    if not isinstance(array, np.ndarray) or array.dtype.hasobject or array.dtype.names:
        kind = getattr(array, "dtype", type(array).__name__)
        raise AttnError(CannotRead(None, str(path), f"`{name}` holds {kind}, not numbers"))
    return array


def _reason(error: Exception) -> str:
    text = " ".join(str(error).split())
    if "pickle" in text:
        return "it holds no plain arrays"
    return (text[:1].lower() + text[1:]) or type(error).__name__


# ---- q, k, v -------------------------------------------------------------------------------


def make_operands(problem: Problem, inputs: Mapping[str, Input], *, seed: int) -> dict[str, Input]:
    """q, k, v as [B, H, S, D] in the problem's dtype; standard normal where no file has them.

    `inputs` holds those from files, as [B, H, S, D].
    """
    sizes = problem.sizes
    shapes = {
        "q": (sizes["B"], sizes["Hq"], sizes["Sq"], sizes["Dqk"]),
        "k": (sizes["B"], sizes["Hkv"], sizes["Skv"], sizes["Dqk"]),
        "v": (sizes["B"], sizes["Hkv"], sizes["Skv"], sizes["Dv"]),
    }
    dtype = numpy_dtype(problem.dtype.name)
    operands: dict[str, Input] = {}
    for number, (name, shape) in enumerate(shapes.items()):
        if name in inputs:
            given = inputs[name]
            array = as_element(given, name, problem.dtype)
            rounded = "" if array.dtype == given.array.dtype else f", as {problem.dtype.name}"
            operands[name] = Input(array, given.origin + rounded)
            continue
        require_memory(math.prod(shape) * (4 + problem.dtype.bytes), f"`{name}` {shape}")
        # Each has a stream of its own, so that one from a file leaves the others as they were.
        rng = np.random.default_rng((seed, number))
        values = rng.standard_normal(shape, np.float32).astype(dtype)
        operands[name] = Input(values, "made: standard normal")
    return operands


def to_bhsd(inputs: Mapping[str, Input], layout: str) -> dict[str, Input]:
    """The same arrays, with q, k, v seen as [B, H, S, D].

    Errors:  A711 when one is not four-dimensional.
    """
    if layout == "bhsd":
        return dict(inputs)
    result = dict(inputs)
    for name in ("q", "k", "v"):
        if name in inputs:
            if inputs[name].array.ndim != 4:
                problem = f"`{name}` of {inputs[name].origin} has not four dimensions"
                raise AttnError(BadOption(None, "--layout", layout, problem))
            swapped = np.swapaxes(inputs[name].array, 1, 2)
            result[name] = Input(swapped, inputs[name].origin)
    return result
