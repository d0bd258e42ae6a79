"""With PyTorch: the same functions in its own eager FlexAttention, on the CPU."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

import torch.nn.attention.flex_attention as peer  # noqa: E402
from torch.nn import functional as F  # noqa: E402, N812

from attngen.diagnostics.diagnostic import AttnError  # noqa: E402
from attngen.flex import attention, flex_attention, from_python  # noqa: E402
from attngen.flex.remembered import Traces  # noqa: E402
from tests.flex.dense import operands  # noqa: E402
from tests.flex.examples import EXAMPLES, Example  # noqa: E402
from tests.flex.peer import eager, largest_difference  # noqa: E402


def tensors(*sizes: int, dtype: Any = torch.float32) -> tuple[Any, Any, Any]:
    q, k, v = (torch.from_numpy(x).to(dtype) for x in operands(*sizes))
    return q, k, v


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda e: e.name)
def test_examples(example: Example) -> None:
    score_mod, mask_mod = example.make(torch)
    q, k, v = tensors(2, 4, 2, example.rows, example.keys)
    assert largest_difference(q, k, v, score_mod, mask_mod, enable_gqa=True) < 5e-6


@pytest.mark.usefixtures("host_compiler")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_cuda_text_on_the_cpu(dtype: str) -> None:
    """The same tensors, without a copy; outputs are PyTorch's."""
    bias = torch.linspace(-1, 1, 4).to(torch.bfloat16)

    def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return torch.tanh(score) * (q_idx - kv_idx) + bias[h]

    q, k, v = tensors(1, 4, 4, 9, 20, dtype=getattr(torch, dtype))
    o = flex_attention(q, k, v, score_mod, engine="cpu")
    assert isinstance(o, torch.Tensor)
    assert o.dtype == q.dtype
    wide = eager(*(x.double() for x in (q, k, v)), score_mod)[0]
    bound = {"float32": 1e-5, "bfloat16": 2**-7, "float16": 2**-10}[dtype]
    assert (o.double() - wide).abs().max() < bound * wide.abs().max()


# ---- functions ---------------------------------------------------------------------------

HALF = torch.linspace(0, 2, 24).to(torch.float16)
INTEGERS = torch.arange(24) * 7 % 11 - 5
FLAGS = torch.arange(24) % 3 == 0
SCALAR = torch.tensor(1.5)
COUNT = torch.tensor(7)
TABLE = torch.linspace(-1, 1, 24 * 4).reshape(24, 4)

SCORES: dict[str, Callable[..., Any]] = {
    "where": lambda s, b, h, q, kv: torch.where(q >= kv, s, s - 1),
    "where -inf": lambda s, b, h, q, kv: torch.where(q >= kv, s, -float("inf")),
    "where tensor": lambda s, b, h, q, kv: torch.where(q >= kv, s, torch.tensor(-float("inf"))),
    "masked fill": lambda s, b, h, q, kv: s.masked_fill(q < kv, -float("inf")) + s.new_tensor(2.0),
    "soft cap": lambda s, b, h, q, kv: 20 * torch.tanh(s / 20),
    "exp2": lambda s, b, h, q, kv: s + (kv - q) * torch.exp2(-((h + 1) * 8.0 / 4)),
    "exp": lambda s, b, h, q, kv: s * torch.exp(-(q - kv).abs() / 4),
    "log": lambda s, b, h, q, kv: s * torch.log(q + 2) + torch.log1p(kv),
    "log2": lambda s, b, h, q, kv: s - torch.log2(kv + 1.0) + torch.log10(kv + 1),
    "sqrt": lambda s, b, h, q, kv: s * torch.sqrt(q + 1) * torch.rsqrt(kv + 1),
    "sigmoid": lambda s, b, h, q, kv: torch.sigmoid(s) + s.sigmoid(),
    "clamp": lambda s, b, h, q, kv: torch.clamp(s, -0.5, 0.5) + s.clamp(min=0) + s.clamp_max(1),
    "min max": lambda s, b, h, q, kv: torch.minimum(s, q / 8) + torch.maximum(q, kv),
    "max of two": lambda s, b, h, q, kv: torch.max(s, SCALAR) + torch.min(q, kv),
    "gelu": lambda s, b, h, q, kv: F.gelu(s) + F.gelu(s, approximate="tanh"),
    "activations": lambda s, b, h, q, kv: F.relu(s) + F.silu(s) + F.softplus(s) + F.leaky_relu(s),
    "erf": lambda s, b, h, q, kv: torch.erf(s) + torch.expm1(s / 8),
    "power": lambda s, b, h, q, kv: s**3 + torch.pow(s, 2) + 2.0 ** -h + s.square(),
    "sign": lambda s, b, h, q, kv: torch.sign(s) + torch.sign(q - kv) + torch.reciprocal(q + 1),
    "floor": lambda s, b, h, q, kv: torch.floor(s * 4) + torch.ceil(s) + torch.trunc(s * 3),
    "casts": lambda s, b, h, q, kv: s + (s * 4).int() + s.to(torch.bool).to(s.dtype) + q.float(),
    "cast like": lambda s, b, h, q, kv: s + HALF[q].to(s.dtype) + (q > kv).to(torch.int32),
    "promotion of half": lambda s, b, h, q, kv: s * HALF[q] + (HALF[kv] + (q - kv) * s),
    "promotion of truth": lambda s, b, h, q, kv: s + FLAGS[q] * 2 + (q > kv) * s,
    "true division": lambda s, b, h, q, kv: s + INTEGERS[q] / 4 + q / (kv + 1),
    "floor division": lambda s, b, h, q, kv: s + INTEGERS[q] // 4 + INTEGERS[kv] // -3,
    "remainder": lambda s, b, h, q, kv: s + INTEGERS[q] % 4 + INTEGERS[kv] % -3 + (s % 1.5),
    "float floor": lambda s, b, h, q, kv: s + (s // 0.25) + INTEGERS[q] // 2.5,
    "rounding modes": lambda s, b, h, q, kv: s
    + torch.div(INTEGERS[q], 2, rounding_mode="floor")
    + torch.div(INTEGERS[q], 2, rounding_mode="trunc"),
    "numbers from tensors": lambda s, b, h, q, kv: s * SCALAR + COUNT - (COUNT - q) / SCALAR,
    "reversed": lambda s, b, h, q, kv: (1 - s) + 2 / (s * s + 1) + (3 - SCALAR * s),
    "alpha": lambda s, b, h, q, kv: torch.add(s, q, alpha=0.5) + torch.sub(s, kv, alpha=2),
    "bits": lambda s, b, h, q, kv: s + (q & 5) + (kv | 8) + (q ^ 3) + (kv << 1) + (q >> 1),
    "bits of negatives": lambda s, b, h, q, kv: s + (INTEGERS[q] & 6) + ~INTEGERS[kv],
    "rows": lambda s, b, h, q, kv: s + TABLE[q].sum() + TABLE[kv].amax() + TABLE[q].mean(),
    "dot": lambda s, b, h, q, kv: s + torch.dot(TABLE[q], TABLE[kv]),
    "new tensors": lambda s, b, h, q, kv: s + torch.zeros_like(s) + torch.full_like(s, 2.0),
    "column": lambda s, b, h, q, kv: s + TABLE[q, -1] + TABLE[kv][1],
    "tensor made inside": lambda s, b, h, q, kv: s + (TABLE[:, 0] * 2)[q],
    "same on each pair": lambda s, b, h, q, kv: s + TABLE[3, 2] + COUNT,
}  # fmt: skip

MASKS: dict[str, Callable[..., Any]] = {
    "operators": lambda b, h, q, kv: (q >= kv) & ~(kv == 3) | (q == 0),
    "logical": lambda b, h, q, kv: torch.logical_or(torch.logical_not(q < kv), FLAGS[kv]),
    "logical of numbers": lambda b, h, q, kv: torch.logical_and(q, kv) | (kv == 0),
    "xor": lambda b, h, q, kv: FLAGS[q] ^ FLAGS[kv] | (kv == q),
    "truth compared": lambda b, h, q, kv: (FLAGS[q] == FLAGS[kv]) | (FLAGS[q] < FLAGS[kv]),
    "comparisons": lambda b, h, q, kv: torch.ge(q, kv) & torch.ne(kv, 2) | torch.eq(q, kv),
    "any": lambda b, h, q, kv: (TABLE[q] > kv / 24).any() | (q == kv),
    "all": lambda b, h, q, kv: (INTEGERS[:3] < q).all() | (q >= kv),
    "search": lambda b, h, q, kv: (INTEGERS[:6] <= q).sum() >= kv // 2,
    "new": lambda b, h, q, kv: q.new_ones((), dtype=torch.bool),
    "noop": peer.noop_mask,
    "and_masks": peer.and_masks(lambda b, h, q, kv: q >= kv, lambda b, h, q, kv: q - kv < 4),
    "or_masks": peer.or_masks(lambda b, h, q, kv: q >= kv, lambda b, h, q, kv: kv < 4),
    "partial": functools.partial(lambda n, b, h, q, kv: q + n >= kv, 3),
}


@pytest.mark.parametrize("name", SCORES)
def test_score_functions(name: str) -> None:
    q, k, v = tensors(1, 2, 2, 20, 24)
    assert largest_difference(q, k, v, SCORES[name]) < 2e-5


@pytest.mark.parametrize("name", MASKS)
def test_mask_functions(name: str) -> None:
    q, k, v = tensors(1, 2, 2, 20, 24)
    assert largest_difference(q, k, v, None, MASKS[name]) < 5e-6


class Layer(torch.nn.Module):
    """A method whose tensors are reached through `self`."""

    def __init__(self) -> None:
        super().__init__()
        self.slopes = torch.linspace(0.1, 0.8, 4)
        self.tables = {"near": torch.linspace(0, 1, 24)}

    def score(self, s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return s - self.slopes[h] * self.tables["near"][kv]


def test_a_method() -> None:
    q, k, v = tensors(1, 4, 4, 20, 24)
    layer = Layer()
    assert largest_difference(q, k, v, layer.score) < 5e-6
    text = from_python(layer.score)
    assert "tensor    slopes : float[Hq]" in text
    assert "tensor    near : float[Skv]" in text


# ---- the call ----------------------------------------------------------------------------


def test_block_mask_lse_scale_and_shared_heads() -> None:
    q, k, v = tensors(2, 4, 2, 10, 13)
    mask = peer.create_block_mask(MASKS["operators"], None, None, 10, 13, device="cpu")
    options = {"block_mask": mask, "scale": 0.3, "enable_gqa": True}
    o, lse = flex_attention(q, k, v, return_lse=True, engine="numpy", **options)
    expected, expected_lse = eager(q, k, v, None, MASKS["operators"], 0.3, enable_gqa=True)
    assert (o - expected).abs().max() < 5e-6
    assert (lse - expected_lse).abs().max() < 5e-6


def test_rows_without_a_key_give_what_eager_gives() -> None:
    q, k, v = tensors(1, 2, 2, 10, 13)

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return kv_idx < q_idx

    results = flex_attention(q, k, v, mask_mod=mask_mod, return_lse=True, engine="numpy")
    for o, lse in (results, eager(q, k, v, None, mask_mod)):
        assert not o[:, :, 0].any()
        assert bool(torch.isneginf(lse[:, :, 0]).all())


def test_aux_request() -> None:
    q, k, v = tensors(1, 2, 2, 10, 13)
    request = peer.AuxRequest(lse=True, max_scores=True)
    _, aux = flex_attention(q, k, v, return_aux=request, scale=0.5, engine="numpy")
    scores = q.double() @ k.double().mT * 0.5
    assert isinstance(aux, peer.AuxOutput)
    assert (aux.lse - scores.logsumexp(-1)).abs().max() < 5e-6
    assert (aux.max_scores - scores.amax(-1)).abs().max() < 5e-6
    o, aux = flex_attention(q, k, v, return_aux=peer.AuxRequest(), engine="numpy")
    assert o.shape == q.shape
    assert aux == peer.AuxOutput()


def test_lengths_of_a_block_mask() -> None:
    q, k, v = tensors(1, 2, 2, 10, 13)
    mask = peer.create_block_mask(MASKS["operators"], None, None, 20, 13, device="cpu")
    with pytest.raises(AttnError, match="A621"):
        flex_attention(q, k, v, block_mask=mask)


def test_gradients_are_refused() -> None:
    q, k, v = tensors(1, 2, 2, 4, 4)
    bias = torch.nn.Parameter(torch.zeros(2))

    def score_mod(s: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return s + bias[h]

    with pytest.raises(AttnError, match="A606"):
        flex_attention(q, k, v, score_mod, engine="numpy")
    with pytest.raises(AttnError, match="A606"):
        flex_attention(q.requires_grad_(), k, v, engine="numpy")
    with torch.no_grad():
        assert flex_attention(q, k, v, score_mod, engine="numpy").shape == q.shape


REFUSED: dict[str, Callable[..., Any]] = {
    "sin": lambda s, b, h, q, kv: torch.sin(s),
    "cumsum": lambda s, b, h, q, kv: torch.cumsum(s, 0),
    "gather": lambda s, b, h, q, kv: torch.gather(INTEGERS, 0, q),
    "narrow cast": lambda s, b, h, q, kv: s.to(torch.bfloat16),
    "cast like a double": lambda s, b, h, q, kv: s.to(torch.zeros(1, dtype=torch.float64)),
    "in place": lambda s, b, h, q, kv: torch.zeros(()).add_(q),
    "assignment": lambda s, b, h, q, kv: operator.setitem(torch.zeros(3), q, 1.0),
    "out": lambda s, b, h, q, kv: torch.add(s, 1, out=s),
    "argument": lambda s, b, h, q, kv: s.clamp(minimum=1),
    "max along": lambda s, b, h, q, kv: TABLE[q].max(dim=0)[0] + TABLE[kv].max(0)[0],
    "long row": lambda s, b, h, q, kv: torch.zeros(24, 1000)[q].sum(),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_show_the_call(name: str) -> None:
    with pytest.raises(AttnError, match="A261") as caught:
        from_python(REFUSED[name])
    (found,) = caught.value.diagnostics
    assert found.span is not None
    assert found.span.source.name == __file__


def test_products_of_narrow_floats_are_not_rounded() -> None:
    """Eager mode rounds each product of two halves to a half, here it stays a float32."""
    q, k, v = tensors(1, 2, 2, 20, 24)

    def score_mod(s: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return s + HALF[q_idx] * HALF[kv_idx]

    def in_float32(s: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return s + HALF[q_idx].float() * HALF[kv_idx].float()

    o = flex_attention(q, k, v, score_mod, engine="numpy")
    assert (o - eager(q, k, v, in_float32)[0]).abs().max() < 5e-6
    assert (o - eager(q, k, v, score_mod)[0]).abs().max() > 1e-5


def test_python_numbers_of_tensors_may_decide() -> None:
    """A tensor that is read outside of the traced values has a value."""
    lengths = torch.tensor([3, 4])
    text = from_python(mask_mod=lambda b, h, q, kv: kv < int(lengths[0]) if lengths.any() else b)
    assert "mask      kv < 3" in text


def test_the_watch_ends_with_the_trace() -> None:
    with pytest.raises(AttnError):
        from_python(lambda s, b, h, q, kv: torch.sin(s))
    assert isinstance(torch.tensor(3.0), torch.Tensor)


# ---- functions that are called again -----------------------------------------------------


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The functions that were traced, from none remembered on."""
    made: list[Any] = []
    trace = attention.trace

    def record(*functions: Any, **options: Any) -> Any:
        made.append(functions)
        return trace(*functions, **options)

    monkeypatch.setattr(attention, "trace", record)
    monkeypatch.setattr(attention, "_traces", Traces())
    return made


def agrees(score_mod: Any = None, mask_mod: Any = None) -> bool:
    return bool(largest_difference(*tensors(1, 2, 2, 20, 24), score_mod, mask_mod) < 2e-5)


def test_another_tensor_and_its_contents(traced: list[Any]) -> None:
    def biased(bias: Any) -> Any:
        return lambda s, b, h, q, kv: torch.tanh(s) + bias[kv] * torch.tensor(0.5)

    row = torch.linspace(0, 1, 24)
    assert agrees(biased(row))
    assert agrees(biased(-row))
    row.mul_(3)
    assert agrees(biased(row))
    assert len(traced) == 1
    for other in (row.half(), torch.cat([row, row]), row.to("meta")):
        if other.device.type == "cpu":
            assert agrees(biased(other))
        else:
            with pytest.raises(AttnError):
                flex_attention(*tensors(1, 2, 2, 20, 24), biased(other), engine="numpy")
    assert len(traced) == 4


VALUES: dict[str, Callable[[Any], Any]] = {
    "item": lambda t: t[0].item(),
    "int": lambda t: int(t[0]),
    "list": lambda t: t.tolist()[0],
    "truth": lambda t: 3 if t[0] > 3 else 1,
    "length of a text": lambda t: len(f"{t[0]}"),
    "new tensor": lambda t: torch.tensor(t[0]),
}


@pytest.mark.parametrize("name", VALUES)
def test_contents_that_are_read_while_tracing(name: str, traced: list[Any]) -> None:
    """Nothing says when they change, so the function is traced again."""
    lengths, read = torch.tensor([3, 4]), VALUES[name]

    def mask_mod(b: Any, h: Any, q: Any, kv: Any) -> Any:
        return kv < read(lengths)

    for length in (3, 11):
        lengths[0] = length
        text = flex_attention(*tensors(1, 2, 2, 20, 24), mask_mod=mask_mod, engine="numpy")
        expected = eager(*tensors(1, 2, 2, 20, 24), None, lambda b, h, q, kv: kv < read(lengths))
        assert (text - expected[0]).abs().max() < 5e-6
    assert len(traced) == 2


def test_a_tensor_that_is_computed(traced: list[Any]) -> None:
    def score_mod(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return s + (TABLE[:, 0] * 2)[q]

    assert agrees(score_mod)
    assert agrees(score_mod)
    assert len(traced) == 2


def test_what_is_asked_about_a_tensor(traced: list[Any]) -> None:
    def score_mod(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return s + TABLE[q, TABLE.shape[1] - 1].to(s.dtype) * TABLE.size(0) * TABLE.dim()

    assert agrees(score_mod)
    assert agrees(score_mod)
    assert len(traced) == 1


def test_the_default_dtype(traced: list[Any]) -> None:
    """A tensor that a function makes of a number has it."""

    def score_mod(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return s * torch.tensor(0.1)

    q, k, v = tensors(1, 2, 2, 20, 24)
    exact = flex_attention(q, k, v, score_mod, engine="numpy")
    torch.set_default_dtype(torch.bfloat16)
    try:
        rounded = flex_attention(q, k, v, score_mod, engine="numpy")
    finally:
        torch.set_default_dtype(torch.float32)
    assert not torch.equal(exact, rounded)


def test_a_patched_function_of_pytorch(monkeypatch: pytest.MonkeyPatch, traced: list[Any]) -> None:
    def score_mod(s: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return torch.tanh(s)

    q, k, v = tensors(1, 2, 2, 20, 24)
    before = [flex_attention(q, k, v, score_mod, engine="numpy") for _ in range(2)]
    monkeypatch.setattr(torch, "tanh", torch.sigmoid)
    after = flex_attention(q, k, v, score_mod, engine="numpy")
    assert torch.equal(*before)
    assert not torch.equal(before[0], after)
    assert len(traced) == 2


def test_a_module_is_not_looked_into(traced: list[Any]) -> None:
    layer = Layer()
    q, k, v = tensors(1, 4, 4, 20, 24)
    first = flex_attention(q, k, v, layer.score, engine="numpy")
    layer.slopes = layer.slopes * 2
    assert not torch.equal(first, flex_attention(q, k, v, layer.score, engine="numpy"))


def _with_a_backward(factor: float) -> type:
    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(x: Any) -> Any:
            return torch.tanh(x) * factor

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            ctx.save_for_backward(output)

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:  # nobody runs it
            raise AssertionError

    return Scaled


def test_a_function_with_a_backward_is_traced_once(traced: list[Any]) -> None:
    """And again when its forward changed, or it is of another class."""
    q, k, v = tensors(1, 2, 2, 5, 9)
    scaled = _with_a_backward(2.0)

    def capped(apply: Any) -> Any:
        return lambda score, b, h, q_idx, kv_idx: 0.5 * apply(score)

    def call(function: Any, factor: float) -> None:
        o = flex_attention(q, k, v, capped(function.apply), engine="numpy")
        wanted = eager(q, k, v, lambda s, b, h, i, j: 0.5 * factor * torch.tanh(s))[0]
        torch.testing.assert_close(o, wanted, atol=5e-6, rtol=0.0)

    call(scaled, 2.0)
    call(scaled, 2.0)
    assert len(traced) == 1
    scaled.forward = staticmethod(lambda x: torch.tanh(x) * 3.0)  # type: ignore[attr-defined]
    call(scaled, 3.0)
    assert len(traced) == 2
    call(_with_a_backward(4.0), 4.0)
    assert len(traced) == 3
