"""Tensor maps among the arguments: those of the arrays of each call, with a plan and without."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest

import attngen
from attngen.backend import device as device_module
from attngen.backend import launch as launch_module
from attngen.backend.device import view
from attngen.cpu.tensor_map import encode_for_cpu
from attngen.engines.outputs import encode_tile_map, tensor_map
from attngen.ir.types import FP16
from attngen.kernels import forward_wgmma
from tests.toolchain.fake_cuda import FakeDriver

from .fake_gpu import FakeGpus, read_block
from .texts import PLAIN

LONG_ROWS = "mask kv <= qpos or qpos % 64 == 0"
B, HQ, HKV, SQ, SKV, D = 2, 4, 2, 300, 70, 64


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> FakeGpus:
    gpus = FakeGpus((9, 0))
    monkeypatch.setattr(launch_module, "load_driver", lambda: gpus)
    monkeypatch.setattr(device_module, "_libraries", {})
    monkeypatch.setattr(device_module, "_torch_names", {})
    monkeypatch.setitem(sys.modules, "torch", gpus.torch)
    return gpus


def draw(gpus: FakeGpus) -> list[Any]:
    shapes = (B, HQ, SQ, D), (B, HKV, SKV, D), (B, HKV, SKV, D)
    memory = [np.zeros(int(np.prod(s)) + 8, np.float16) for s in shapes]
    begins = [-x.ctypes.data % 16 // 2 for x in memory]
    flat = zip(memory, begins, shapes, strict=True)
    return [gpus.tensor(x[i : i + int(np.prod(s))].reshape(s)) for x, i, s in flat]


def assert_maps(kernel: attngen.Kernel, launch: dict[str, Any], operands: list[Any]) -> None:
    (program,) = kernel.programs
    layout = kernel.render("sm_90a", dtype="fp16", head_dim=D).arguments
    values = read_block(layout, launch["block"])
    for box, operand in zip(program.main.boxes, operands, strict=True):
        expected = tensor_map(box, view(operand, box.operand), FP16)
        assert values[f"map_{box.operand}"] == encode_for_cpu(expected)
        assert values[box.operand] == operand.data_ptr()


def test_each_call_has_the_maps_of_its_arrays(
    gpus: FakeGpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded: list[str] = []
    encode = FakeDriver.encode_tensor_map

    def counted(self: FakeDriver, tensor: Any) -> bytes:
        encoded.append(tensor.name)
        return encode(self, tensor)

    monkeypatch.setattr(FakeDriver, "encode_tensor_map", counted)
    kernel = attngen.compile_text(PLAIN, schedule="kernel forward_wgmma")
    first, second = draw(gpus), draw(gpus)
    for operands in (first, second, first, [*first[:2], second[2]], second):
        kernel(*operands)
        assert_maps(kernel, gpus.launches[-1], operands)
    # The first call, and its plan; then q, k and v of the second; nothing is encoded twice.
    assert encoded == [*"qkv", *"qkv", *"qkv"]
    assert len(kernel._plans) == 1


def test_a_captured_tensor_has_a_map_where_its_rows_are_aligned(
    gpus: FakeGpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded: list[str] = []
    encode = FakeDriver.encode_tensor_map

    def counted(self: FakeDriver, tensor: Any) -> bytes:
        encoded.append(tensor.name)
        return encode(self, tensor)

    monkeypatch.setattr(FakeDriver, "encode_tensor_map", counted)
    text = "attention a {\n    tensor y : fp16[Sq, Skv]\n    score s + y[q, kv]\n}\n"
    kernel = attngen.compile_text(text, schedule="kernel forward_wgmma")
    operands, keys = draw(gpus), SKV + 2  # a row of 144 bytes
    memory = np.zeros(SQ * keys + 16, np.float16)
    begin = -memory.ctypes.data % 16 // 2
    layout = kernel.render("sm_90a", dtype="fp16", head_dim=D).arguments

    def call(first: int) -> tuple[dict[str, Any], Any]:
        rows = memory[begin + first : begin + first + SQ * keys].reshape(SQ, keys)
        tensor = gpus.tensor(rows[:, :SKV])
        kernel(*operands, y=tensor)
        return read_block(layout, gpus.launches[-1]["block"]), tensor

    for first in (0, 8, 0, 8):
        values, tensor = call(first)
        (box,) = kernel.programs[0].main.tile_boxes
        assert values["has_x0"] == 1
        assert values["map_x0"] == encode_tile_map(box, view(tensor, "y"), encode_for_cpu)
    assert encoded == [*"qkvy", *"qkvy", "y"]  # the first call, its plan, and another address
    with pytest.warns(UserWarning, match="not by tensor copies: it begins at an address"):
        values, _ = call(3)
    assert values["has_x0"] == 0
    assert values["map_x0"] == bytes(128)


@pytest.mark.parametrize(
    ("mask", "spread_keys", "multiprocessors", "grid"),
    [
        ("", 0, 132, 24),
        ("", 0, 10, 10),
        ("mask causal", 0, 10, 10),
        (LONG_ROWS, SKV, 10, 10),
        (LONG_ROWS, SKV - 1, 132, 24),
        (LONG_ROWS, SKV - 1, 10, 24),
    ],
)
def test_there_are_as_many_blocks_as_multiprocessors_unless_a_few_rows_are_long(
    mask: str,
    spread_keys: int,
    multiprocessors: int,
    grid: int,
    gpus: FakeGpus,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(forward_wgmma, "SPREAD_KEYS", spread_keys)
    monkeypatch.setattr(FakeDriver, "multiprocessors", lambda self, index: multiprocessors)
    schedule = "kernel forward_wgmma; tile q = 128, kv = 64"
    kernel = attngen.compile_text(f"attention a {{\n    {mask}\n}}\n", schedule=schedule)
    kernel(*draw(gpus))
    assert gpus.launches[-1]["grid"] == grid
    assert gpus.launches[-1]["threads"] == 384


def test_the_struct_begins_with_the_maps_at_a_multiple_of_64() -> None:
    kernel = attngen.compile_text(PLAIN, schedule="kernel forward_wgmma")
    layout = kernel.render("sm_90a", dtype="fp16", head_dim=D).arguments
    assert [(f.name, f.offset) for f in layout.fields[:4]] == [
        ("map_q", 0), ("map_k", 128), ("map_v", 256), ("q", 384),
    ]  # fmt: skip
    assert (layout.alignment, layout.size % 64) == (64, 0)
