"""attngen as an attention implementation of Transformers.

    import attngen.transformers
    attngen.transformers.register()
    model = AutoModelForCausalLM.from_pretrained(…, attn_implementation="attngen")

Needs PyTorch and Transformers, which nothing else in attngen imports.  A model's mask function is
traced and compiled like FlexAttention's, so padding, windows, chunks and packed sequences come
as the model says them, and no mask is ever built.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias, final

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import (
    add_offsets_to_mask_function,
    and_masks,
    causal_mask_function,
    padding_mask_function,
    prepare_padding_mask,
)

from attngen.api import Engine
from attngen.binding_errors import ReservedArgument
from attngen.diagnostics.diagnostic import AttnError
from attngen.flex.attention import Prepared, flex_attention, prepare
from attngen.flex.captured import element_of

__all__ = ["Mask", "attention", "make_mask", "register"]

Tensor: TypeAlias = Any
MaskFunction: TypeAlias = Callable[..., Any]

NAME: Final = "attngen"


@final
class Mask:
    """What a model's layers get as `attention_mask`: a function, and for which lengths it is.

    Layers that differ in their tensors alone share what the function was traced to.
    """

    def __init__(self, mask_mod: MaskFunction, seq_lengths: tuple[int, int]) -> None:
        self.mask_mod = mask_mod
        self.seq_lengths = seq_lengths
        self._prepared: dict[tuple[float | None, str | None], Prepared] = {}

    def prepared(self, softcap: float | None, sink: str | None, device: Any) -> Prepared:
        """The mask behind a score that is capped or not; `sink` is the element type of sinks."""
        found = self._prepared.get((softcap, sink))
        if found is None:
            score_mod = None if softcap is None else _make_score(softcap, ())
            found = prepare(score_mod, self.mask_mod, device=device, has_scale=True, sink=sink)
            self._prepared[softcap, sink] = found
        return found


def register(name: str = NAME, *, engine: Engine = "auto") -> None:
    """Make `attn_implementation=name` mean attngen, in all models of this process.

    engine:  as for `attngen.compile`.
    """

    def forward(*arguments: Any, **options: Any) -> tuple[Tensor, None]:
        return attention(*arguments, engine=engine, **options)

    AttentionInterface.register(name, forward)
    AttentionMaskInterface.register(name, make_mask)


def make_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: MaskFunction = causal_mask_function,
    attention_mask: Tensor | None = None,
    **ignored: Any,
) -> Mask:
    """The mask of all layers of one kind, in the form that Transformers asks for.

    Shapes:  attention_mask [batch_size, tokens so far], true at tokens that are no padding.
    q_offset, kv_offset:  the token that row 0, and key 0, stands for.
    """
    if attention_mask is not None:
        padding = prepare_padding_mask(attention_mask, kv_length, kv_offset)
        mask_function = and_masks(mask_function, padding_mask_function(padding))
    if q_offset or kv_offset:
        mask_function = add_offsets_to_mask_function(mask_function, q_offset, kv_offset)
    return Mask(mask_function, (q_length, kv_length))


def attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Mask | Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    is_causal: bool | None = None,
    *,
    engine: Engine = "auto",
    **ignored: Any,
) -> tuple[Tensor, None]:
    """One layer's attention, in the form that Transformers asks for.

    Shapes:  query [B, Hq, Sq, D], key and value [B, Hkv, Skv, D], result [B, Sq, Hq, D].
    attention_mask:  a `Mask`; or a tensor that broadcasts to [B, Hq, Sq, Skv], of truth values
                     or of numbers that are added; None: causal, where the module says so.
    s_aux:           [Hq], the sinks of gpt-oss.
    position_bias:   broadcasts to [B, Hq, Sq, Skv], and is added, as in T5.
    Errors:          AttnError about dropout, a gradient, or what the mask function does.
    """
    if dropout:
        reason = "attngen has none; use it with `model.eval()`, or set the config's to 0"
        raise AttnError(ReservedArgument(None, "dropout", reason))
    scale = query.shape[3] ** -0.5 if scaling is None else scaling
    sinks = None if s_aux is None else s_aux.detach()
    if isinstance(attention_mask, Mask):
        key, value = (x[:, :, : attention_mask.seq_lengths[1]] for x in (key, value))
    if isinstance(attention_mask, Mask) and position_bias is None:
        sink = None if sinks is None else element_of(sinks)
        prepared = attention_mask.prepared(softcap, sink, query.device)
        o = prepared(query, key, value, scale, sinks, engine=engine)
        return o.transpose(1, 2).contiguous(), None
    mask_mod, added = _as_functions(module, query, key, attention_mask, is_causal)
    biases = tuple(bias for bias in (added, position_bias) if bias is not None)
    o = flex_attention(
        query,
        key,
        value,
        None if softcap is None and not biases else _make_score(softcap, biases),
        mask_mod=mask_mod,
        scale=scale,
        enable_gqa=True,
        sinks=sinks,
        engine=engine,
    )
    return o.transpose(1, 2).contiguous(), None


def _make_score(softcap: float | None, biases: Sequence[Tensor]) -> Callable[..., Any]:
    """The score behind the scaled product: capped, and with biases added."""

    def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        if softcap is not None:
            score = softcap * torch.tanh(score / softcap)
        for bias in biases:
            score = score + _read(bias, b, h, q_idx, kv_idx)
        return score

    return score_mod


def _as_functions(
    module: Any, query: Tensor, key: Tensor, mask: Mask | Tensor | None, is_causal: bool | None
) -> tuple[MaskFunction | None, Tensor | None]:
    """The mask as a function, or as a tensor to add."""
    if isinstance(mask, Mask):
        return mask.mask_mod, None
    if mask is None:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        if not causal or query.shape[2] == 1:
            return None, None
        offset = key.shape[2] - query.shape[2]
        return add_offsets_to_mask_function(causal_mask_function, offset, 0), None
    if mask.dtype == torch.bool:
        return (lambda b, h, q_idx, kv_idx: _read(mask, b, h, q_idx, kv_idx)), None
    return None, mask


def _read(tensor: Tensor, *indices: Any) -> Any:
    """An element of what broadcasts to [B, Hq, Sq, Skv]."""
    sizes = tensor.shape
    return tensor[tuple(0 if size == 1 else i for size, i in zip(sizes, indices, strict=True))]
