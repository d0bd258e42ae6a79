"""PyTorch tensors on the CPU: no copies, tensors back, gradients refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import attngen

from .texts import PLAIN, SINK, catch, words

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

ENGINES = ("numpy", "cpu")


def make(*shape: int, dtype: Any = None, seed: int = 0) -> Any:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype or torch.float32)


def make_qkv(dtype: Any = None) -> tuple[Any, Any, Any]:
    q, k, v = make(2, 4, 9, 8), make(2, 2, 21, 8, seed=1), make(2, 2, 21, 8, seed=2)
    return q.to(dtype), k.to(dtype), v.to(dtype)


def causal(q: Any, k: Any, v: Any) -> Any:
    """PyTorch's own, in float64."""
    mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
    k, v = (x.double().repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    return torch.nn.functional.scaled_dot_product_attention(q.double(), k, v, attn_mask=mask)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("dtype", "near"), [("float32", 2e-6), ("float16", 2e-3), ("bfloat16", 2e-2)]
)
def test_tensors_come_back(engine: Any, dtype: str, near: float, host_compiler: None) -> None:
    kernel = attngen.compile_text(PLAIN, engine=engine)
    q, k, v = make_qkv(getattr(torch, dtype))
    o, lse = kernel(q, k, v, return_lse=True)
    assert isinstance(o, torch.Tensor)
    assert o.dtype == q.dtype
    assert lse.dtype == torch.float32
    assert (o.double() - causal(q, k, v)).abs().max() < near


@pytest.mark.parametrize("engine", ENGINES)
def test_strides_are_taken_as_they_are(engine: Any, host_compiler: None) -> None:
    kernel = attngen.compile_text(PLAIN, engine=engine)
    q, k, v = make_qkv()
    right = kernel(q, k, v)
    odd = [x.permute(3, 0, 2, 1).contiguous().permute(1, 3, 2, 0) for x in (q, k, v)]
    assert torch.equal(kernel(*odd), right)
    out = torch.full((2, 9, 4, 8), torch.nan).transpose(1, 2)
    assert kernel(*odd, out=out) is out
    assert torch.equal(out, right)
    one = make(2, 1, 21, 8, seed=1)
    shared = one.expand(2, 2, 21, 8)
    assert torch.equal(kernel(q, shared, shared), kernel(q, one, one))


def test_gradients_are_refused_in_words() -> None:
    kernel = attngen.compile_text(PLAIN, engine="numpy")
    q, k, v = make_qkv()
    right = kernel(q, k, v)
    v.requires_grad_()
    error = catch(kernel, q, k, v)
    assert error.code == "A606"
    assert "`v`" in error.message()
    assert "v.detach()" in words(error)
    assert torch.equal(kernel(q, k, v.detach()), right)
    with torch.no_grad():
        assert torch.equal(kernel(q, k, v), right)
    out = torch.empty(2, 4, 9, 8).requires_grad_()
    assert "`out`" in catch(kernel, q, k, v.detach(), out=out).message()


def test_dtypes_and_devices_are_refused_by_name() -> None:
    kernel = attngen.compile_text(SINK, engine="numpy")
    q, k, v = make_qkv()
    sink = torch.zeros(4)
    assert "float64" in catch(kernel, q.double(), k, v, sink=sink).message()
    assert "`k` is on device meta" in catch(kernel, q, k.to("meta"), v, sink=sink).message()
    error = catch(kernel, q, k, v, sink=sink.long())
    assert words(error).splitlines()[0] == "argument `sink` has dtype int64"
    sparse = torch.zeros(4).to_sparse()
    assert catch(kernel, q, k, v, sink=sparse).code == "A609"


@pytest.mark.parametrize("engine", ENGINES)
def test_params_and_tensors_mix_libraries(engine: Any, host_compiler: None) -> None:
    text = "attention a {\n    param t : float\n    param w : int\n    param on : bool\n"
    text += "    tensor doc : int64[Skv]\n    score s * t\n    mask doc[kv] < w and on\n}\n"
    kernel = attngen.compile_text(text, engine=engine)
    q, k, v = make_qkv()
    doc = torch.arange(21)
    o = kernel(q, k, v, doc=doc, t=torch.tensor(2.0), w=torch.tensor(5), on=torch.tensor(True))
    same = kernel(q, k, v.numpy(), doc=doc.numpy(), t=2.0, w=5, on=True)
    assert isinstance(o, torch.Tensor)
    assert torch.equal(o, same)


@pytest.mark.parametrize("engine", ENGINES)
def test_partial_states_are_numpys(engine: Any, host_compiler: None) -> None:
    kernel = attngen.compile_text(SINK, engine=engine)
    q, k, v = make_qkv()
    sink = torch.tensor([float("-inf"), 0.0, 5.0, 100.0])
    right, right_lse = kernel(q, k, v, sink=sink)
    parts = [kernel.partial(q, k, v, kv_range=r, sink=sink) for r in ((0, 8), (8, 21))]
    o, lse = parts[0].merge(parts[1]).finalize()
    assert isinstance(o, np.ndarray)
    assert np.allclose(o, right, atol=2e-6)
    assert np.allclose(lse, right_lse, atol=2e-6)
