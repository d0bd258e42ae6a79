"""`attngen.torch`: a kernel as an operator of PyTorch, on the CPU."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

import attngen  # noqa: E402
import attngen.torch  # noqa: E402
from attngen.diagnostics.diagnostic import AttnError  # noqa: E402

DOCUMENTS = """attention documents {
    param  cap : float = 30.0 where cap > 0
    param  left : int where left >= 0
    param  is_strict : bool = false
    tensor doc : int32[B, Skv]
    score  softcap(s, cap)
    let    is_near = kv <= qpos and kv >= qpos - left and (not is_strict or kv < qpos)
    mask   doc[b, qpos] == doc[b, kv] and is_near
    output o, lse
}
"""
CAUSAL = "attention causal_plain {\n    mask kv <= qpos\n}\n"
SIGMOID = "attention sigmoid_plain {\n    mask kv <= qpos\n    weights sigmoid\n}\n"


@pytest.fixture(scope="module")
def causal() -> attngen.torch.Operator:
    return attngen.torch.operator(attngen.compile_text(CAUSAL, engine="numpy"))


@pytest.fixture(scope="module")
def documents() -> attngen.torch.Operator:
    return attngen.torch.operator(attngen.compile_text(DOCUMENTS, engine="numpy"))


def operands(B: int = 2, Hq: int = 4, Hkv: int = 2, S: int = 19, D: int = 16) -> tuple[Any, ...]:
    generator = torch.Generator().manual_seed(0)
    shapes = (B, Hq, S, D), (B, Hkv, S, D), (B, Hkv, S, D)
    return tuple(torch.randn(*shape, generator=generator) for shape in shapes)


def documents_of(B: int, S: int) -> Any:
    return torch.arange(S, dtype=torch.int32).div(7, rounding_mode="floor").repeat(B, 1)


def right(operator: attngen.torch.Operator, q: Any, k: Any, v: Any, **named: Any) -> Any:
    """The oracle's answer, accepted or not by its own bound."""
    kernel = operator.kernel
    tensors = {t.name: named[t.name].numpy() for t in kernel.attention.tensors}
    params = {p.name: named.get(p.name, p.default) for p in kernel.attention.params}
    arrays = (x.contiguous().numpy() for x in (q, k, v))
    return attngen.reference(kernel.unit, *arrays, tensors=tensors, params=params, dtype="fp32")


def test_results_are_those_of_the_kernel(documents: attngen.torch.Operator) -> None:
    q, k, v = operands()
    named = {"doc": documents_of(2, 19), "left": 4, "cap": 5.0}
    o, lse = documents(q, k, v, **named)
    answer = right(documents, q, k, v, **named)
    assert answer.accepts_o(o.numpy()).all()
    assert answer.accepts_lse(lse.numpy()).all()


def test_the_lse_is_there_on_request(causal: attngen.torch.Operator) -> None:
    q, k, v = operands()
    alone = causal(q, k, v)
    o, lse = causal(q, k, v, return_lse=True)
    assert isinstance(alone, torch.Tensor)
    assert torch.equal(alone, o)
    assert lse.shape == (2, 4, 19)
    assert right(causal, q, k, v).accepts_lse(lse.numpy()).all()


def test_heads_behind_tokens() -> None:
    kernel = attngen.compile_text(CAUSAL, engine="numpy")
    operator = attngen.torch.operator(kernel, layout="bshd")
    q, k, v = operands()
    o = operator(*(x.transpose(1, 2) for x in (q, k, v)))
    assert o.shape == (2, 19, 4, 16)
    assert right(operator, q, k, v).accepts_o(o.transpose(1, 2).numpy()).all()


def test_any_strides(causal: attngen.torch.Operator) -> None:
    q, k, v = operands()
    wide = torch.stack([q, q], dim=-1)[..., 0]
    turned = k.transpose(1, 2).contiguous().transpose(1, 2)
    assert not wide.is_contiguous()
    assert torch.equal(causal(wide, turned, v), causal(q, k, v))


@pytest.mark.usefixtures("host_compiler")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_cuda_text_on_the_cpu(dtype: str) -> None:
    operator = attngen.torch.operator(attngen.compile_text(CAUSAL, engine="cpu"))
    q, k, v = (x.to(getattr(torch, dtype)) for x in operands())
    o = operator(q, k, v)
    assert o.dtype == q.dtype
    exact = right(operator, q.float(), k.float(), v.float()).o
    step = {"float32": 1e-6, "bfloat16": 2**-7, "float16": 2**-9}[dtype]
    assert np.abs(o.float().numpy() - exact).max() < 2 * step


@pytest.mark.parametrize("name", ["causal", "documents"])
def test_opcheck(name: str, request: pytest.FixtureRequest) -> None:
    operator = request.getfixturevalue(name)
    q, k, v = operands()
    more = () if name == "causal" else (documents_of(2, 19), 30.0, 4, False)
    torch.library.opcheck(operator._plain, (q, k, v, *more))
    if operator._with_lse is not None:
        torch.library.opcheck(operator._with_lse, (q, k, v, *more))


def test_one_graph_serves_every_length(documents: attngen.torch.Operator) -> None:
    """`fullgraph`: nothing is left to Python; `dynamic`: nothing is compiled anew."""
    graphs = []

    def backend(graph: Any, example: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    @torch.compile(backend=backend, fullgraph=True, dynamic=True)
    def attend(q: Any, k: Any, v: Any, doc: Any) -> Any:
        o, lse = documents(2 * q, k, v, doc=doc, left=4)
        return o + 1, lse

    for S in (19, 5, 33):
        q, k, v = operands(S=S)
        o, lse = attend(q, k, v, documents_of(2, S))
        expected, expected_lse = documents(2 * q, k, v, doc=documents_of(2, S), left=4)
        assert torch.equal(o, expected + 1)
        assert torch.equal(lse, expected_lse)
    assert len(graphs) == 1


def test_through_the_passes_of_torch_compile(causal: attngen.torch.Operator) -> None:
    """With shapes from the fake implementation, as Inductor sees them."""
    q, k, v = operands()
    compiled = torch.compile(
        lambda q, k, v: causal(q, k, v).sum(-1), backend="aot_eager", fullgraph=True
    )
    assert torch.equal(compiled(q, k, v), causal(q, k, v).sum(-1))


def test_on_fake_tensors(documents: attngen.torch.Operator) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        q = torch.empty(3, 8, 5, 32, dtype=torch.bfloat16)
        k = torch.empty(3, 2, 7, 32, dtype=torch.bfloat16)
        v = torch.empty(3, 2, 7, 24, dtype=torch.bfloat16)
        o, lse = documents(q, k, v, doc=torch.empty(3, 7, dtype=torch.int32), left=1)
    assert (o.shape, o.dtype) == ((3, 8, 5, 24), torch.bfloat16)
    assert (lse.shape, lse.dtype) == ((3, 8, 5), torch.float32)


class Subtensor(torch.Tensor):
    """A tensor of a type of its own."""


def in_mode(mode: Any) -> Any:
    def run(call: Any, q: Any) -> Any:
        with mode():
            return call(q)

    return run


def modes() -> dict[str, Any]:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.utils._device import DeviceContext
    from torch.utils.flop_counter import FlopCounterMode

    return {
        "fake": in_mode(lambda: FakeTensorMode(allow_non_fake_inputs=True)),
        "dispatch mode": in_mode(lambda: FlopCounterMode(display=False)),
        "function mode": in_mode(lambda: DeviceContext("cpu")),
        "make_fx": lambda call, q: make_fx(call)(q),
        "jit.trace": lambda call, q: torch.jit.trace(call, (q,), check_trace=False),
        "functionalize": lambda call, q: torch.func.functionalize(call)(q),
        "subclass": lambda call, q: call(q.as_subclass(Subtensor)),
    }


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", modes())
def test_who_watches_sees_the_operator(name: str) -> None:
    operator = attngen.torch.operator(attngen.compile_text(CAUSAL, engine="numpy"))
    seen = count_dispatches(operator)
    _, k, v = operands()
    modes()[name](lambda q: operator(q, k, v), operands()[0])
    assert len(seen) == 1


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_alone_a_call_goes_to_the_kernel_at_once(mode: Any) -> None:
    operator = attngen.torch.operator(attngen.compile_text(CAUSAL, engine="numpy"))
    seen = count_dispatches(operator)
    q, k, v = operands()
    with mode():
        o = operator(torch.nn.Parameter(q, requires_grad=False), k, v)
        assert torch.equal(o, operator._plain(q, k, v)[0])
    assert len(seen) == 1  # the second


def test_a_pytorch_with_other_keys_dispatches_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attngen.torch, "_EAGER_KEYS", None)
    operator = attngen.torch.operator(attngen.compile_text(CAUSAL, engine="numpy"))
    seen = count_dispatches(operator)
    q, k, v = operands()
    assert operator(q, k, v).shape == q.shape
    assert len(seen) == 1


def count_dispatches(operator: attngen.torch.Operator) -> list[Any]:
    """Every call of the operator that PyTorch dispatches from now on."""
    seen, plain = [], operator._plain

    def counted(*arguments: Any) -> Any:
        seen.append(arguments)
        return plain(*arguments)

    operator._plain = counted
    return seen


def test_equal_kernels_are_one_operator() -> None:
    one, same = (attngen.torch.operator(attngen.compile_text(CAUSAL)) for _ in range(2))
    other = attngen.torch.operator(attngen.compile_text(CAUSAL, schedule="tile kv = 16"))
    assert one._plain is same._plain
    assert one._plain is not other._plain


# ---- what is refused --------------------------------------------------------------------------


def code_of(call: Any) -> str:
    with pytest.raises(AttnError) as caught:
        call()
    return caught.value.diagnostics[0].code


def test_gradients_are_refused(causal: attngen.torch.Operator) -> None:
    q, k, v = operands()
    assert code_of(lambda: causal(q, k, v.requires_grad_())) == "A606"
    with torch.no_grad():
        assert causal(q, k, v).shape == q.shape


def test_a_gradient_through_the_bare_operator_is_no_wrong_one(
    causal: attngen.torch.Operator,
) -> None:
    q, k, v = operands()
    (o,) = causal._plain(q.requires_grad_(), k, v)
    assert code_of(lambda: o.sum().backward()) == "A606"


def test_arguments_by_name(documents: attngen.torch.Operator) -> None:
    q, k, v = operands()
    doc = documents_of(2, 19)
    assert code_of(lambda: documents(q, k, v, doc=doc)) == "A623"
    assert code_of(lambda: documents(q, k, v, left=3)) == "A623"
    assert code_of(lambda: documents(q, k, v, doc=doc, left=3, depth=2)) == "A624"
    assert code_of(lambda: documents(q, k, v, doc=doc, left=3, out=q)) == "A624"
    assert code_of(lambda: documents(q, k, v, doc=doc, left=-1)) == "A626"
    assert code_of(lambda: documents(q, k, v, doc=doc[:, :5], left=1)) == "A621"


def test_sigmoid_has_no_lse() -> None:
    operator = attngen.torch.operator(attngen.compile_text(SIGMOID, engine="numpy"))
    q, k, v = operands()
    assert operator(q, k, v).shape == q.shape
    with pytest.raises(AttnError, match="no log-sum-exp"):
        operator(q, k, v, return_lse=True)


def test_a_layout_that_is_none() -> None:
    kernel = attngen.compile_text(CAUSAL)
    with pytest.raises(AttnError, match="layout"):
        attngen.torch.operator(kernel, layout="hbsd")  # type: ignore[arg-type]


def test_attngen_alone_imports_no_pytorch() -> None:
    program = "import attngen, sys; attngen.compile_text; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_numbers_of_numpy_are_params(documents: attngen.torch.Operator) -> None:
    q, k, v = operands()
    doc = documents_of(2, 19)
    one = documents(q, k, v, doc=doc, left=int(np.int64(4)), cap=float(np.float32(5)))
    other = documents(q, k, v, doc=doc, left=4, cap=5.0)
    assert all(torch.equal(x, y) for x, y in zip(one, other, strict=True))


# ---- on a GPU: `pytest tests/pytorch -m gpu` ----------------------------------------------------


def on_a_gpu(test: Any) -> Any:
    has_gpu = torch.cuda.is_available()
    return pytest.mark.gpu(pytest.mark.skipif(not has_gpu, reason="PyTorch finds no GPU")(test))


def on_the_gpu(S: int, dtype: Any = torch.bfloat16) -> tuple[Any, ...]:
    return tuple(x.to("cuda", dtype) for x in operands(S=S, D=64))


def gpu_operator() -> attngen.torch.Operator:
    return attngen.torch.operator(attngen.compile_text(DOCUMENTS, engine="cuda", tune="off"))


def accepts(operator: attngen.torch.Operator, found: Any, *given: Any, **named: Any) -> bool:
    kernel = operator.kernel
    tensors = {"doc": named["doc"].cpu().numpy()}
    params = {p.name: named.get(p.name, p.default) for p in kernel.attention.params}
    arrays = (x.float().cpu().numpy() for x in given)
    answer = attngen.reference(kernel.unit, *arrays, tensors=tensors, params=params, dtype="bf16")
    o, lse = (x.float().cpu().numpy() for x in found)
    return bool(answer.accepts_o(o).all() and answer.accepts_lse(lse).all())


@on_a_gpu
def test_opcheck_on_a_gpu() -> None:
    operator = gpu_operator()
    more = (documents_of(2, 19).cuda(), 30.0, 4, False)
    torch.library.opcheck(operator._plain, (*on_the_gpu(19), *more))


@on_a_gpu
def test_inductor_compiles_one_graph_for_every_length() -> None:
    operator = gpu_operator()

    @torch.compile(fullgraph=True, dynamic=True)
    def attend(q: Any, k: Any, v: Any, doc: Any) -> Any:
        o, lse = operator(2 * q, k, v, doc=doc, left=4)
        return o, lse

    for S in (300, 77, 512):
        q, k, v = on_the_gpu(S)
        doc = documents_of(2, S).cuda()
        assert accepts(operator, attend(q, k, v, doc), 2 * q, k, v, doc=doc, left=4)


@on_a_gpu
def test_in_a_graph() -> None:
    """What is captured reads the arrays as they are at each replay, on whichever stream."""
    operator = gpu_operator()
    q, k, v = on_the_gpu(300)
    doc = documents_of(2, 300).cuda()
    operator(q, k, v, doc=doc, left=4)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = operator(q, k, v, doc=doc, left=4)
    for factor in (1.0, -2.0):
        q.mul_(factor)
        for x in found:
            x.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert accepts(operator, found, q, k, v, doc=doc, left=4)
