"""A steady call launches what a full call would: the same bytes, and the same refusals.

Every call here is made twice: as users make it, where a plan may serve it, and in full.  New
arrays are handed out again for each shape, so that the bytes of both are equal in every member.
"""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import attngen
from attngen.analysis.ranges import exceeding_int64, launch_ranges
from attngen.api import Kernel
from attngen.backend import device as device_module
from attngen.backend import launch as launch_module
from attngen.backend.device import read, view
from attngen.binding import IntegerCheck
from attngen.diagnostics.diagnostic import AttnError
from attngen.engines import call_plan
from attngen.engines.call_plan import MOST_PLANS
from attngen.kernels import forward_mma

from .fake_gpu import FakeGpus, FakeTensor, read_block
from .texts import FULL, PLAIN, SIGMOID, SINK, catch, draw

B, HQ, HKV, SQ, SKV, D = 2, 4, 2, 3, 5, 8


class Subtensor(FakeTensor):
    """A tensor of a type of its own."""


class Gpus(FakeGpus):
    """FakeGpus that hand out one array for each shape, and count what was asked in full."""

    def __init__(self, devices: int = 2) -> None:
        super().__init__(*[(9, 0)] * devices)
        self.made: dict[Any, FakeTensor] = {}
        self.in_full = 0

    def tensor(self, array: Any, index: int = 0, kind: type[FakeTensor] = FakeTensor) -> Any:
        found = kind(self, np.asarray(array), index)
        found.new_empty = self.hand_out(found)  # type: ignore[method-assign]
        return found

    def hand_out(self, like: FakeTensor) -> Callable[..., FakeTensor]:
        def new_empty(shape: tuple[int, ...], dtype: Any) -> FakeTensor:
            key = (shape, str(dtype), like.device, type(like), threading.get_ident())
            if key not in self.made:
                array = np.zeros(shape, dtype.name)
                self.made[key] = type(like)(self, array, like.device.index)
            return self.made[key]

        return new_empty


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Gpus:
    gpus = Gpus()
    monkeypatch.setattr(launch_module, "load_driver", lambda: gpus)
    monkeypatch.setattr(device_module, "_libraries", {})
    monkeypatch.setattr(device_module, "_torch_names", {})
    monkeypatch.setitem(sys.modules, "torch", gpus.torch)
    real = Kernel._call_in_full

    def counted(self: Kernel, *arguments: Any) -> Any:
        gpus.in_full += 1
        return real(self, *arguments)

    monkeypatch.setattr(Kernel, "_call_in_full", counted)
    return gpus


class Arguments:
    """One call: changes are made by name, and everything else stays as it is."""

    def __init__(self, *operands: Any, **named: Any) -> None:
        self.operands, self.named = operands, named

    def outcome(self, gpus: Gpus, call: Callable[..., Any]) -> Any:
        """What was launched and returned, or the words of the refusal."""
        before = len(gpus.launches)
        try:
            results = call(*self.operands, **self.named)
        except AttnError as error:
            assert len(gpus.launches) == before
            return [(d.code, d.message(), d.label_text()) for d in error.diagnostics]
        shown = results if isinstance(results, tuple) else (results,)
        return gpus.launches[before:], [(id(x), x.shape, x.device) for x in shown]


def in_full(kernel: Kernel) -> Callable[..., Any]:
    """The same kernel, without its plans."""

    def call(
        q: Any,
        k: Any,
        v: Any,
        *,
        return_lse: bool = False,
        out: Any = None,
        layout: Any = "bhsd",
        check: bool = False,
        **named: Any,
    ) -> Any:
        return kernel._call_in_full(q, k, v, return_lse, out, layout, check, named, None)

    return call


def assert_like_in_full(gpus: Gpus, kernel: Kernel, arguments: Arguments) -> Any:
    found = arguments.outcome(gpus, kernel)
    assert found == arguments.outcome(gpus, in_full(kernel))
    return found


# ---- arrays of every kind ----------------------------------------------------------------


def strided(shape: tuple[int, ...], dtype: Any, *, gap: int = 0, axis: int = 0, at: int = 0) -> Any:
    """An array whose stride along an axis is longer by `gap` elements, `at` bytes from 16."""
    strides = [1]
    for i in range(len(shape) - 2, -1, -1):
        strides.insert(0, strides[0] * shape[i + 1] + (gap if i == axis else 0))
    item = np.dtype(dtype).itemsize
    size = item * (sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + 1)
    memory = np.zeros(size + 48, np.uint8)
    begin = -memory.ctypes.data % 16 + at
    flat = memory[begin : begin + size].view(dtype)
    byte_strides = tuple(s * item for s in strides)
    return np.lib.stride_tricks.as_strided(flat, shape, byte_strides)


def plain_arguments(gpus: Gpus, **changes: Any) -> Arguments:
    """q, k, v of some sizes, dtype, device, gaps and alignment."""
    get = {"dtype": np.float16, "index": 0, "layout": "bhsd", "Dqk": D, "Dv": D} | changes
    sizes = {"B": B, "Hq": HQ, "Hkv": HKV, "Sq": SQ, "Skv": SKV} | changes
    shapes = {
        "q": (sizes["B"], sizes["Hq"], sizes["Sq"], get["Dqk"]),
        "k": (sizes["B"], sizes["Hkv"], sizes["Skv"], get["Dqk"]),
        "v": (sizes["B"], sizes["Hkv"], sizes["Skv"], get["Dv"]),
    }
    operands = []
    for name, (b, h, s, d) in shapes.items():
        shape = (b, h, s, d) if get["layout"] == "bhsd" else (b, s, h, d)
        placed = get.get(name, {})
        x = strided(shape, placed.get("dtype", get["dtype"]), **placed.get("strides", {}))
        x = x[..., ::-1] if placed.get("reversed") else x
        tensor = gpus.tensor(x, placed.get("index", get["index"]), placed.get("kind", FakeTensor))
        tensor.requires_grad = placed.get("requires_grad", False)
        if placed.get("is_neg"):
            tensor.is_neg = lambda: True
        operands.append(tensor)
    passed = ("layout", "return_lse", "check", "dropout_p", "nonsense")
    return Arguments(*operands, **{n: changes[n] for n in passed if n in changes})


CHANGES: dict[str, dict[str, Any]] = {
    "nothing": {},
    "dtype": {"dtype": np.float32},
    "dtype of k": {"k": {"dtype": np.float32}},
    "integers": {"dtype": np.int32},
    "B": {"B": 3},
    "B = 1": {"B": 1},
    "B = 0": {"B": 0},
    "Hq": {"Hq": 6},
    "Hkv": {"Hkv": 4},
    "Hkv = 3": {"Hkv": 3},
    "Sq": {"Sq": 4},
    "Sq = 0": {"Sq": 0},
    "Skv": {"Skv": 6},
    "Skv = 0": {"Skv": 0},
    "Dqk": {"Dqk": 16},
    "Dv": {"Dv": 16},
    "layout": {"layout": "bshd"},
    "layout of the same sizes": {"layout": "bshd", "Sq": HQ, "Hq": SQ, "Skv": HKV, "Hkv": 1},
    "no layout": {"layout": "sbhd"},
    "unhashable layout": {"layout": ["bhsd"]},
    "device": {"index": 1},
    "device of v": {"v": {"index": 1}},
    "return_lse": {"return_lse": True},
    "return_lse = 1": {"return_lse": 1},
    "check": {"check": True},
    "unknown name": {"nonsense": 3},
    "no dropout": {"dropout_p": 0.0},
    "dropout": {"dropout_p": 0.5},
    **{
        f"stride of {name} along {axis}": {name: {"strides": {"gap": 8, "axis": axis}}}
        for name in "qkv"
        for axis in range(3)
    },
    **{f"odd stride of {n}": {n: {"strides": {"gap": 1, "axis": 2}}} for n in "qkv"},
    **{f"reversed {n}": {n: {"reversed": True}} for n in "qkv"},
    **{f"{n} at {at}": {n: {"strides": {"at": at}}} for n in "qkv" for at in (1, 2, 8)},
    **{f"type of {n}": {n: {"kind": Subtensor}} for n in "qkv"},
    **{f"gradient of {n}": {n: {"requires_grad": True}} for n in "qkv"},
    **{f"sign of {n}": {n: {"is_neg": True}} for n in "qkv"},
}


@pytest.mark.filterwarnings("ignore:.*slower text")
@pytest.mark.parametrize("schedule", ["kernel forward_mma", "kernel forward_simt"])
def test_whatever_changes_between_two_calls(gpus: Gpus, schedule: str) -> None:
    """Each call behind each other one that leaves a plan: 50 times 50 pairs, most of them one."""
    kernel = attngen.compile_text(PLAIN, schedule=schedule)
    base = plain_arguments(gpus)
    assert_like_in_full(gpus, kernel, base)
    outcomes = {}
    for _ in range(2):
        for name, change in CHANGES.items():
            found = assert_like_in_full(gpus, kernel, plain_arguments(gpus, **change))
            assert_like_in_full(gpus, kernel, base)
            if schedule == "kernel forward_simt":
                outcomes[name] = found
    if outcomes:
        refused = {n: f[0][0] for n, f in outcomes.items() if isinstance(f, list)}
        assert refused["dtype of k"] == "A622"
        assert refused["device of v"] == "A608"
        assert refused["gradient of q"] == "A606"
        assert refused["q at 1"] == "A604"
        assert refused["dropout"] == refused["no layout"] == "A632"
        assert "no dropout" not in refused
        assert len(refused) < len(CHANGES) / 2


def test_only_the_first_call_of_a_kind_is_in_full(gpus: Gpus) -> None:
    kernel = attngen.compile_text(PLAIN, schedule="kernel forward_simt")
    for name in ("nothing", "dtype", "Skv", "layout", "device", "return_lse", "reversed k"):
        change = CHANGES[name]
        before = gpus.in_full, len(gpus.launches)
        for _ in range(5):
            kernel(*(a := plain_arguments(gpus, **change)).operands, **a.named)
        assert (gpus.in_full, len(gpus.launches)) == (before[0] + 1, before[1] + 5), name


def test_a_type_of_array_has_a_plan_of_its_own(gpus: Gpus) -> None:
    kernel = attngen.compile_text(PLAIN)
    for count, name in enumerate(("nothing", "type of q", "type of k", "type of v"), start=1):
        for _ in range(2):
            kernel(*plain_arguments(gpus, **CHANGES[name]).operands)
            assert (len(kernel._plans), gpus.in_full) == (count, count)


@pytest.mark.parametrize(
    "name", ["check", "no dropout", "B = 0", "Sq = 0", "gradient of q", "sign of v", "q at 1"]
)
def test_what_is_unusual_is_always_in_full(gpus: Gpus, name: str) -> None:
    kernel = attngen.compile_text(PLAIN, schedule="kernel forward_simt")
    for _ in range(3):
        before = gpus.in_full
        plain_arguments(gpus, **CHANGES[name]).outcome(gpus, kernel)
        assert gpus.in_full == before + 1


def test_a_gradient_is_asked_about_at_every_call(gpus: Gpus) -> None:
    kernel = attngen.compile_text(PLAIN)
    arguments = plain_arguments(gpus, q={"requires_grad": True})
    gpus.torch.is_grad_enabled = lambda: False
    for _ in range(3):
        kernel(*arguments.operands)
    assert gpus.in_full == 1
    gpus.torch.is_grad_enabled = lambda: True
    assert catch(kernel, *arguments.operands).code == "A606"


def test_partial_results_have_no_plan(gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attngen.api._to_array", lambda x, device: x.array)
    kernel = attngen.compile_text(PLAIN)
    q, k, v = plain_arguments(gpus).operands
    kernel(q, k, v)
    kernel(q, k, v)
    for keys in ((0, SKV), (2, 4)):
        kernel.partial(q, k, v, kv_range=keys)
        found = read_block(kernel.render("sm_90a", dtype="fp16", head_dim=D).arguments,
                           gpus.launches[-1]["block"])  # fmt: skip
        assert (found["kv_begin"], found["kv_end"], found["o"]) == (*keys, 0)
    assert len(kernel._plans) == 1


# ---- captured tensors, params and outputs ------------------------------------------------


def full_arguments(gpus: Gpus, changes: dict[str, Any]) -> Arguments:
    """What FULL takes, with bias [Hq?, Sq, Skv] in one of its forms."""
    q, k, v = plain_arguments(gpus, dtype=np.float32).operands
    shape = {"whole": (HQ, SQ, SKV), "one": (1, SQ, SKV), "absent": (SQ, SKV), "wrong": (2, SKV)}
    bias = strided(shape[changes.get("bias", "whole")], changes.get("bias_dtype", np.float32),
                   gap=changes.get("bias_gap", 0))  # fmt: skip
    doc = strided((B, SKV), changes.get("doc_dtype", np.int32), gap=changes.get("doc_gap", 0))
    named = {
        "doc": gpus.tensor(doc, changes.get("doc_index", 0)),
        "bias": gpus.tensor(bias, 0, changes.get("bias_kind", FakeTensor)),
    }
    named |= {n: changes[n] for n in ("cap", "left", "is_on", "return_lse") if n in changes}
    if changes.get("no_doc"):
        del named["doc"]
    if changes.get("backwards"):
        named = dict(reversed(named.items()))
    if changes.get("out"):
        named["out"] = gpus.tensor(strided((B, HQ, SQ, D), np.float32, gap=changes.get("gap", 0)))
    return Arguments(q, k, v, **named)


one_call = st.fixed_dictionaries(
    {},
    optional={
        "bias": st.sampled_from(["whole", "one", "absent", "wrong"]),
        "bias_gap": st.sampled_from([0, 1]),
        "bias_kind": st.sampled_from([FakeTensor, Subtensor]),
        "bias_dtype": st.sampled_from([np.float32, np.float32, np.float16]),
        "doc_gap": st.sampled_from([0, 3]),
        "doc_dtype": st.sampled_from([np.int32, np.int32, np.int64]),
        "doc_index": st.sampled_from([0, 0, 0, 1]),
        "no_doc": st.sampled_from([False, False, False, True]),
        "backwards": st.booleans(),
        "out": st.booleans(),
        "gap": st.sampled_from([0, 1]),
        "return_lse": st.booleans(),
        "cap": st.sampled_from([1.0, 50, 2.5, 0.0, 2000.0, np.float32(7), "x", True, None]),
        "left": st.sampled_from([0, 3, -1, 2**31, 2**62, 2**63 - 1, 2**70, 2.0, np.int64(5), True]),
        "is_on": st.sampled_from([True, False, np.bool_(True), 1]),
    },
)


def test_random_calls_behind_each_other(gpus: Gpus) -> None:
    kernel = attngen.compile_text(FULL)
    in_plans = []

    @settings(max_examples=100)
    @given(st.lists(one_call, min_size=1, max_size=6))
    def check(calls: list[dict[str, Any]]) -> None:
        for changes in calls:
            before = gpus.in_full
            found = assert_like_in_full(gpus, kernel, full_arguments(gpus, changes))
            in_plans.append(gpus.in_full == before + 1 and not isinstance(found, list))

    check()
    assert in_plans.count(True) > 30
    assert in_plans.count(False) > 30


def test_params_may_change_from_call_to_call(gpus: Gpus) -> None:
    kernel = attngen.compile_text(FULL)
    layout = kernel.render("sm_90a", dtype="fp32", head_dim=D).arguments
    for left in range(5):
        for cap in (1.5, 20, np.float32(7.0)):
            for is_on in (True, False):
                changes = {"left": left, "cap": cap, "is_on": is_on}
                arguments = full_arguments(gpus, changes)
                kernel(*arguments.operands, **arguments.named)
                found = read_block(layout, gpus.launches[-1]["block"])
                assert [found[f"p_{n}"] for n in ("left", "cap", "is_on")] == [left, cap, is_on]
    assert gpus.in_full == 1


def test_a_default_and_its_value_are_one_call(gpus: Gpus) -> None:
    kernel = attngen.compile_text(FULL)
    blocks = set()
    for changes in ({}, {"left": 1000}, {"cap": 50.0, "is_on": True, "backwards": True}):
        arguments = full_arguments(gpus, changes)
        (launch,), _ = arguments.outcome(gpus, kernel)
        found = read_block(kernel.render("sm_90a", dtype="fp32", head_dim=D).arguments,
                           launch["block"])  # fmt: skip
        blocks.add(tuple(found[f"p_{name}"] for name in ("left", "cap", "is_on")))
    assert len(blocks) == gpus.in_full == 1


def test_integers_beyond_64_bits_are_found_behind_a_plan(gpus: Gpus) -> None:
    kernel = attngen.compile_text("attention a {\n    param w : int\n    mask kv * w <= q\n}\n")
    for w in (3, 2**50, 2**62, 3, 2**62, 2**50, -(2**62), 2**63, -4):
        arguments = plain_arguments(gpus)
        found = assert_like_in_full(gpus, kernel, Arguments(*arguments.operands, w=w))
        assert isinstance(found, list) == (abs(w) > 2**50)
        if isinstance(found, list):
            assert found[0][0] == "A630"
    assert gpus.in_full == 9 + 2 + 4  # beside those that are compared: new keys, and refusals


@pytest.mark.parametrize(
    "text", [SINK, SIGMOID, PLAIN.replace("mask", "output row_max, o\n    mask")]
)
@pytest.mark.parametrize("schedule", ["loop q, kv", "loop kv, q"])
def test_every_output_and_workspace(gpus: Gpus, text: str, schedule: str) -> None:
    kernel = attngen.compile_text(text, schedule=schedule)
    q, k, v = plain_arguments(gpus, dtype=np.float32).operands
    for return_lse in (False, True, False):
        for out in (None, strided((B, HQ, SQ, D), np.float32)):
            named: dict[str, Any] = {"return_lse": return_lse}
            if out is not None:
                named["out"] = gpus.tensor(out)
            if kernel.attention.tensors:
                named["sink"] = gpus.tensor(draw(HQ))
            for _ in range(2):
                assert_like_in_full(gpus, kernel, Arguments(q, k, v, **named))
    assert len(kernel._plans) == (2 if kernel.name == "sigmoid_weights" else 4)


AHEAD = """attention ahead {
    tensor doc : int32[B, Skv]
    param left : int = 2
    mask doc[b, kv] == left
}
"""


def test_a_plan_carries_both_launches(gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond 5 keys another launch summarises them, into a workspace of each call."""
    monkeypatch.setattr(forward_mma, "PREPASS_KEYS", 5)
    kernel = attngen.compile_text(AHEAD, schedule="kernel forward_mma; tile q = 16, kv = 16")
    layout = kernel.render("sm_90a", dtype="fp16", head_dim=D).arguments
    for keys, grids in ((5, [2 * B * HQ]), (6, [B, 2 * B * HQ]), (513, [2 * B, 2 * B * HQ])):
        q, k, v = plain_arguments(gpus, Sq=17, Skv=keys).operands
        doc = gpus.tensor(np.zeros((B, keys), np.int32))
        before = gpus.in_full
        for left in (2, 3, 4):
            arguments = Arguments(q, k, v, doc=doc, left=left)
            launches, _ = assert_like_in_full(gpus, kernel, arguments)
            assert [launch["grid"] for launch in launches] == grids
            assert len({launch["block"] for launch in launches}) == 1
            found = read_block(layout, launches[-1]["block"])
            assert found["p_left"] == left
            groups = -(-keys // 512)
            ends = [x for (shape, *_), x in gpus.made.items() if shape == (B, 2, 33, groups)]
            pointers = [ends[0].data_ptr()] if len(grids) == 2 else [0]
            assert [found["key_ends"]] == pointers
        assert gpus.in_full == before + 1 + 3  # the first, and those that it is compared with


def test_a_capture_without_memory_of_its_own_does_without(
    gpus: Gpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A workspace that is freed during the capture would be overwritten by every replay."""
    monkeypatch.setattr(forward_mma, "PREPASS_KEYS", 5)
    for module in (attngen.api, call_plan):
        monkeypatch.setattr(module, "may_be_freed_in_capture", lambda like: False)
    kernel = attngen.compile_text(AHEAD, schedule="kernel forward_mma; tile q = 16, kv = 16")
    layout = kernel.render("sm_90a", dtype="fp16", head_dim=D).arguments
    q, k, v = plain_arguments(gpus, Sq=17, Skv=6).operands
    arguments = Arguments(q, k, v, doc=gpus.tensor(np.zeros((B, 6), np.int32)))
    counts = []
    for is_capturing in (False, True, True, False, False):
        gpus.is_capturing_now = is_capturing
        launches, _ = assert_like_in_full(gpus, kernel, arguments)
        counts.append(len(launches))
        ends = read_block(layout, launches[-1]["block"])["key_ends"]
        assert (ends == 0) == is_capturing
    assert counts == [2, 1, 1, 2, 2]
    assert len(kernel._plans) == 1
    assert gpus.in_full == 5 + 1 + 2  # beside those that are compared: the first, and the captured


# ---- out ---------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [1, -1])
def test_out_may_not_share_memory_with_an_input(gpus: Gpus, step: int) -> None:
    """One buffer, of which q is a slice and `out` another, a bit further at each call."""
    kernel = attngen.compile_text(PLAIN)
    _, k, v = plain_arguments(gpus, dtype=np.float32, Hkv=HQ).operands
    size = B * HQ * SQ * D
    buffer = np.zeros(3 * size, np.float32)
    shape = (B, HQ, SQ, D)
    q = gpus.tensor(buffer[size : 2 * size].reshape(shape)[::step, ::step, ::step])
    found = []
    for _ in range(2):
        for begin in (0, 4, size - 4, size, 2 * size - 4, 2 * size):
            out = gpus.tensor(buffer[begin : begin + size].reshape(shape))
            found.append(assert_like_in_full(gpus, kernel, Arguments(q, k, v, out=out)))
    codes = [f[0][0] if isinstance(f, list) else "right" for f in found]
    assert codes == ["right", *["A633"] * 4, "right"] * 2
    assert gpus.in_full == 12 + 1 + 8  # beside those that are compared: the first, and refusals


def test_out_between_the_rows_of_an_input_is_in_full(gpus: Gpus) -> None:
    kernel = attngen.compile_text(PLAIN)
    _, k, v = plain_arguments(gpus, dtype=np.float32, Hkv=HQ).operands
    buffer = np.zeros((B, HQ, SQ, 2, D), np.float32)
    q, out = (gpus.tensor(buffer[:, :, :, i]) for i in (0, 1))
    apart = gpus.tensor(np.zeros_like(buffer)[:, :, :, 1])
    for _ in range(3):
        assert kernel(q, k, v, out=out) is out
        assert kernel(q, k, v, out=apart) is apart
    assert gpus.in_full == 3  # the first with `out` left a plan, which serves `apart`


# ---- arrays that are gone ----------------------------------------------------------------


def test_a_plan_keeps_no_array(gpus: Gpus) -> None:
    kernel = attngen.compile_text(FULL)
    arguments = full_arguments(gpus, {"out": True})
    kernel(*arguments.operands, **arguments.named)
    assert len(kernel._plans) == 1
    arrays = [x for x in (*arguments.operands, *arguments.named.values()) if hasattr(x, "array")]
    alive = [weakref.ref(array) for array in arrays]
    del arguments, arrays
    gc.collect()
    assert [each() for each in alive] == [None] * 6


def test_arrays_in_the_place_of_others(gpus: Gpus) -> None:
    """Objects and memory are used again for arrays of another kind."""
    kernel = attngen.compile_text(PLAIN)
    rng = np.random.default_rng(0)
    ids, pointers = set(), set()
    for _ in range(150):
        sizes = {"Sq": int(rng.integers(1, 4)), "Skv": int(rng.integers(1, 4))}
        arguments = plain_arguments(gpus, **sizes)
        assert_like_in_full(gpus, kernel, arguments)
        ids |= {id(x) for x in arguments.operands}
        pointers |= {x.data_ptr() for x in arguments.operands}
        del arguments
    assert len(ids) < 450
    assert len(pointers) < 450


def test_memory_is_bounded_and_old_plans_come_again(gpus: Gpus) -> None:
    kernel = attngen.compile_text(PLAIN)
    for Skv in (*range(1, MOST_PLANS + 20), *range(1, 10)):
        assert_like_in_full(gpus, kernel, plain_arguments(gpus, Skv=Skv))
        assert len(kernel._plans) <= MOST_PLANS
    assert len(kernel._plans) == MOST_PLANS


# ---- the driver --------------------------------------------------------------------------


def test_a_failing_launch_says_the_same(gpus: Gpus) -> None:
    kernel = attngen.compile_text(PLAIN)
    arguments = plain_arguments(gpus)
    kernel(*arguments.operands)
    gpus.launch_status = 700
    before = gpus.in_full
    steady = catch(kernel, *arguments.operands)
    assert gpus.in_full == before
    assert len(gpus.launches) == 2  # it was not tried again
    assert steady == catch(in_full(kernel), *arguments.operands)
    assert steady.code == "A618"


def test_a_steady_call_can_be_captured(gpus: Gpus) -> None:
    kernel = attngen.compile_text(PLAIN)
    kernel(*plain_arguments(gpus).operands)
    gpus.is_capturing_now = True
    kernel(*plain_arguments(gpus).operands)
    assert gpus.in_full == 1
    assert catch(kernel, *plain_arguments(gpus, index=1).operands).code == "A613"
    assert len(gpus.launches) == 2


def test_the_stream_is_that_of_the_moment(gpus: Gpus) -> None:
    kernel = attngen.compile_text(PLAIN)
    for stream in (5, 6, 7):
        gpus.torch._C._cuda_getCurrentRawStream = lambda index, s=stream: s
        kernel(*plain_arguments(gpus).operands)
        assert gpus.launches[-1]["stream"] == stream
    assert gpus.in_full == 1


def test_new_arrays_of_another_kind_are_looked_at_in_full(gpus: Gpus) -> None:
    kernel = attngen.compile_text(PLAIN)
    arguments = plain_arguments(gpus)
    kernel(*arguments.operands)
    q = arguments.operands[0]
    transposed = np.zeros((HQ, B, SQ, D), np.float16).transpose(1, 0, 2, 3)
    q.new_empty = lambda shape, dtype: FakeTensor(gpus, transposed, 0)
    kernel(*arguments.operands)
    assert gpus.in_full == 2
    found = read_block(kernel.render("sm_90a", dtype="fp16", head_dim=D).arguments,
                       gpus.launches[-1]["block"])  # fmt: skip
    assert found["o_stride_h"] == B * SQ * D

    def fail(shape: tuple[int, ...], dtype: Any) -> Any:
        raise MemoryError("no memory is left")

    q.new_empty = fail
    with pytest.raises(MemoryError, match="no memory is left"):
        kernel(*arguments.operands)
    assert len(gpus.launches) == 2


def test_threads_share_plans(gpus: Gpus) -> None:
    kernel = attngen.compile_text(FULL)
    start = threading.Barrier(6)

    def work(thread: int) -> list[tuple[Any, Any]]:
        gpus.set_device(0)
        start.wait(60)
        pairs = []
        for left in range(30):
            arguments = full_arguments(gpus, {"left": left, "cap": thread + 1, "out": True})
            kernel(*arguments.operands, **arguments.named)
            pairs.append((thread + 1, left, *[x.data_ptr() for x in arguments.operands]))
        return pairs

    with ThreadPoolExecutor(6) as pool:
        expected = [pair for pairs in pool.map(work, range(6)) for pair in pairs]
    layout = kernel.render("sm_90a", dtype="fp32", head_dim=D).arguments
    blocks = [read_block(layout, launch["block"]) for launch in gpus.launches]
    members = ("p_cap", "p_left", "q", "k", "v")
    assert sorted(tuple(b[m] for m in members) for b in blocks) == sorted(expected)
    assert gpus.in_full <= 6


# ---- what the key is made of -------------------------------------------------------------


@given(st.lists(st.sampled_from(sorted(CHANGES)), min_size=2, max_size=2))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_equal_facts_are_equal_views(gpus: Gpus, names: list[str]) -> None:
    """The promise of `read`, over every two kinds of arrays that the tests have."""
    one, other = (plain_arguments(gpus, **CHANGES[name]).operands for name in names)
    for a in one:
        for b in other:
            look, its_look = read(a), read(b)
            if look is None or its_look is None or look[1] != its_look[1]:
                continue
            if look[0] % 2:
                assert catch(view, a, "x").code == catch(view, b, "x").code == "A604"
            else:
                first, second = (view(x, "x")._replace(pointer=0, owner=None) for x in (a, b))
                assert first == second
            assert look[0] % 16 == its_look[0] % 16


def test_arrays_of_cupy(gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    """CuPy's own arrays over memory of the CPU; only stream and driver are fakes."""
    cupy = pytest.importorskip("cupy")
    monkeypatch.setattr(device_module, "_stream_of_cupy", lambda index, like: 70 + index)

    def move(x: Any, index: int) -> Any:
        memory = x
        while isinstance(memory.base, np.ndarray):
            memory = memory.base
        owner = cupy.cuda.UnownedMemory(memory.ctypes.data, memory.nbytes, memory, index)
        place = cupy.cuda.MemoryPointer(owner, x.ctypes.data - memory.ctypes.data)
        return cupy.ndarray(x.shape, x.dtype, place, x.strides)

    kernel = attngen.compile_text(PLAIN, schedule="kernel forward_simt")
    refused = {"int16": {"dtype": np.int16}, "int16 in k": {"k": {"dtype": np.int16}},
               "device of v": CHANGES["device of v"]}  # fmt: skip
    taken = ("nothing", "dtype", "B", "Sq", "Skv", "Hq", "layout", "odd stride of k", "reversed q",
             "q at 8", "q at 2", "device")  # fmt: skip
    for name, change in 2 * [*((n, CHANGES[n]) for n in taken), *refused.items()]:
        arguments = plain_arguments(gpus, **change)
        q, k, v = (move(x.array, x.device.index) for x in arguments.operands)
        out = move(strided(q.shape, q.dtype), q.data.device_id)
        for _ in range(2):
            named = {**arguments.named, "out": out}
            found = assert_like_in_full(gpus, kernel, Arguments(q, k, v, **named))
            assert isinstance(found, list) == (name in refused)
            if name not in refused:
                assert found[0][0]["stream"] == 70 + q.data.device_id
    assert len(kernel._plans) == len(taken)
    assert gpus.in_full == 4 * (len(taken) + 2 * len(refused)) + len(taken)


INTEGERS = [
    "param w : int\n    mask kv * w <= q",
    "param w : int where 0 <= w < 2**31\n    param x : int\n    mask kv - w > x * 4",
    "param w : int\n    mask kv * w * w <= q",
    "param x : float\n    param w : int\n    mask floor(x) * w <= kv * w",
    "param w : int\n    param x : int where x > 2**40\n    mask kv + w < x",
]


@given(
    st.sampled_from(INTEGERS),
    st.sampled_from([0, 1, -1, 2**31 - 1, -(2**31), 2**31, 2**45, 2**62, -(2**63)]),
    st.sampled_from([0, 5, 2**40 + 1, 2**61, 2**63 - 1]),
    st.sampled_from([1, 7, 2**20, 2**31 - 2000]),
)
@settings(max_examples=200)
def test_where_no_search_is_needed_it_would_find_nothing(text: str, w: int, x: int, n: int) -> None:
    attention = attngen.compile_text(f"attention a {{\n    {text}\n}}\n").attention
    params: dict[str, Any] = {"w": w, "x": float(x) if "x : float" in text else x}
    params = {p.name: params[p.name] for p in attention.params}
    sizes = {"B": 1, "Hq": 1, "Hkv": 1, "Sq": n, "Skv": n, "Dqk": 8, "Dv": 8}
    exceeds = any(exceeding_int64(attention, launch_ranges(attention, sizes, params)))
    assert IntegerCheck(attention).is_needed(params.values()) >= exceeds


def test_mostly_no_search_is_needed() -> None:
    checks = [
        IntegerCheck(attngen.compile_text(f"attention a {{\n    {text}\n}}\n").attention)
        for text in INTEGERS[:3]
    ]
    assert [check.is_needed([5, 7]) for check in checks] == [False, False, True]
    assert [check.is_needed([2**40, 7]) for check in checks] == [True, True, True]
