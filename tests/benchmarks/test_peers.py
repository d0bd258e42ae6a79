"""What the peers are asked, and what is passed to them, without the libraries themselves."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from attngen.bench.machines import NumpyMachine
from benchmarks.cells import Cell
from benchmarks.peers import PEERS, Attngen, Inputs, RefusedError, make_peer
from benchmarks.run_cell import make_inputs
from benchmarks.variants import Native, Variant, make_variant

MODULES = {"fa3": "flash_attn_interface", "fa4": "flash_attn.cute"}


class FakeTensor:
    """As much of a tensor as packing tokens needs."""

    def __init__(self, host: Any) -> None:
        self.host, self.shape = host, host.shape

    def flatten(self, first: int, last: int) -> FakeTensor:
        assert (first, last) == (0, 1)
        return FakeTensor(self.host.reshape(-1, *self.host.shape[2:]))

    def unflatten(self, dim: int, sizes: tuple[int, ...]) -> FakeTensor:
        assert dim == 0
        return FakeTensor(self.host.reshape(*sizes, *self.host.shape[1:]))


def cell_of(name: str) -> Cell:
    return Cell("variants", name, "fp32", B=2, S=64, Hq=4, Hkv=4, D=16, Dv=16)


def problem(name: str) -> tuple[Cell, Variant, Inputs]:
    cell = cell_of(name)
    variant = make_variant(cell)
    return cell, variant, make_inputs(cell, variant, NumpyMachine(), 0)


@pytest.fixture(params=["fa3", "fa4"])
def flash(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A FlashAttention package that returns q and keeps the options it was given."""
    seen: dict[str, Any] = {}

    def attend(q: Any, k: Any, v: Any, **options: Any) -> Any:
        seen.update(options)
        return (q, "lse") if request.param == "fa4" else q

    module = SimpleNamespace(flash_attn_func=attend, flash_attn_varlen_func=attend)
    monkeypatch.setitem(sys.modules, MODULES[request.param], module)
    return SimpleNamespace(peer=make_peer(request.param, NumpyMachine()), seen=seen)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("full", {"causal": False}),
        ("causal", {"causal": True}),
        ("window", {"causal": True, "window_size": (7, 0)}),
        ("softcap", {"causal": True, "softcap": 30.0}),
        ("gemma2", {"causal": True, "window_size": (31, 0), "softcap": 50.0}),
    ],
)
def test_flash_attention_gets_its_own_options(
    flash: Any, name: str, options: dict[str, Any]
) -> None:
    cell, variant, inputs = problem(name)
    prepared = flash.peer.prepare(cell, variant, inputs)
    assert prepared.read(prepared.call()) is inputs.q
    assert flash.seen == options


def test_flash_attention_packs_documents(flash: Any) -> None:
    cell, variant, inputs = problem("documents")
    q, k, v = (FakeTensor(x) for x in (inputs.q, inputs.k, inputs.v))
    prepared = flash.peer.prepare(cell, variant, Inputs(q, k, v, {}, {}))
    output = prepared.call()
    assert output.shape == (2 * 64, 4, 16)
    np.testing.assert_array_equal(prepared.read(output).host, inputs.q)
    starts = flash.seen["cu_seqlens_q"]
    assert starts.dtype == np.int32
    assert (starts[0], starts[-1]) == (0, 2 * 64)
    doc = variant.tensors["doc"].reshape(-1)
    changes = np.flatnonzero(np.diff(doc)) + 1
    assert set(starts) == {0, 64, 128, *changes}
    assert flash.seen["max_seqlen_q"] == np.diff(starts).max() == 7


@pytest.mark.parametrize("name", ["prefix_lm", "alibi", "natten_2d", "sigmoid"])
def test_flash_attention_refuses_what_it_has_no_option_for(flash: Any, name: str) -> None:
    with pytest.raises(RefusedError, match=f"no option for {name}"):
        flash.peer.prepare(*problem(name))


@pytest.mark.parametrize("peer", ["fa2", "cudnn"])
@pytest.mark.parametrize("name", ["window", "documents", "softcap", "longformer", "sigmoid"])
def test_sdpa_takes_full_and_causal_only(peer: str, name: str) -> None:
    with pytest.raises(RefusedError, match="full or causal"):
        make_peer(peer, NumpyMachine()).prepare(*problem(name))


@pytest.mark.parametrize("peer", ["flex", "flex_flash"])
def test_flex_attention_refuses_sigmoid_weights(peer: str) -> None:
    with pytest.raises(RefusedError, match="softmax weights only"):
        make_peer(peer, NumpyMachine()).prepare(*problem("sigmoid"))


def test_without_pytorch_and_a_gpu_only_attngen_is_here() -> None:
    missing = {name: make_peer(name, NumpyMachine()).missing() for name in PEERS}
    assert missing.pop("attngen") is None
    assert all(isinstance(reason, str) and reason for reason in missing.values())


def test_an_unknown_peer_is_refused() -> None:
    with pytest.raises(ValueError, match="no peer 'xformers'"):
        make_peer("xformers", NumpyMachine())


def test_attngen_compiles_a_text_once_for_all_lengths() -> None:
    peer = Attngen(NumpyMachine(), None)
    (cell, variant, inputs), machine = problem("causal"), NumpyMachine()
    peer.prepare(cell, variant, inputs)
    shorter = Cell("variants", "causal", "fp32", B=1, S=48, Hq=2, Hkv=2, D=16, Dv=16)
    peer.prepare(shorter, variant, make_inputs(shorter, variant, machine, 1))
    (kernel,) = peer._kernels.values()
    assert kernel.compilations == 1


def test_plain_is_full_or_causal() -> None:
    assert Native().is_plain
    assert Native(causal=True).is_plain
    assert not Native(causal=True, window=5).is_plain
    assert not Native(softcap=30.0).is_plain
    assert not Native(documents=(3, 4)).is_plain
