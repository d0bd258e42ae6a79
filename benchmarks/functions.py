"""FlexAttention's functions at the size at which they are timed: the attention gym's, and examples.

The gym's (`attn-gym` on PyPI) are called as they are.  The examples are what people write for
FlexAttention and the gym does not have, from their formulas.  Sizes follow the number of tokens,
so that a short problem is the same picture: at 8192 tokens a window is 1024 and a picture 64 x 128.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeAlias, final

from attngen.record import record

__all__ = ["FUNCTIONS", "Function", "Made", "Size"]

Tensor: TypeAlias = Any
Index: TypeAlias = Any


@final
@record
class Size:
    """B sequences of S tokens, H heads, and where tensors are made."""

    B: int
    H: int
    S: int
    device: str

    @property
    def picture(self) -> tuple[int, int]:
        """Rows and columns of S pixels: as high as wide, or half as high."""
        rows = 1 << (self.S.bit_length() - 1) // 2
        return rows, self.S // rows

    @property
    def video(self) -> tuple[int, int, int]:
        """Frames, rows and columns of S pixels: 8 x 32 x 32 at 8192."""
        frames = self.S // (1 << (self.S.bit_length() - 3) // 2 * 2)
        side = 1 << (self.S // frames).bit_length() // 2
        return frames, side, side


@final
@record(eq=False)
class Made:
    """What FlexAttention takes, and over how many rows and keys.

    varies:  whether the mask depends on the sequence or the head, so that each has its own.
    """

    score_mod: Any = None
    mask_mod: Any = None
    rows: int | None = None
    keys: int | None = None
    varies: bool = False


@final
@record(eq=False)
class Function:
    """A score or mask function by name; `make` builds it with PyTorch."""

    name: str
    make: Callable[[Size], Made]


# ---- what the gym's functions are made with --------------------------------------------------


def _offsets(size: Size) -> Tensor:
    """Where documents of an eighth less than an eighth of the tokens begin, and the end."""
    import torch

    length = max(2, size.S * 125 // 1024)
    starts = torch.arange(0, size.S, length, dtype=torch.int32, device=size.device)
    end = torch.tensor([size.S], dtype=torch.int32, device=size.device)
    return torch.cat([starts, end])


def _shared_prefix(size: Size) -> Made:
    """Every third document is what the two behind it begin with."""
    import torch
    from attn_gym import masks

    offsets = _offsets(size)
    numbers = torch.arange(len(offsets) - 1, device=size.device)
    return Made(mask_mod=masks.generate_shared_prefix_mask_mod(offsets, numbers // 3 * 3))


def _global_window(size: Size) -> Made:
    import torch
    from attn_gym import masks

    is_global = torch.zeros(size.S, dtype=torch.bool, device=size.device)
    generator = torch.Generator().manual_seed(0)
    marked = torch.randint(size.S, (max(1, size.S // 512),), generator=generator)
    is_global[marked.to(size.device)] = True
    return Made(mask_mod=masks.generate_global_sliding_window(size.S // 32, is_global))


def _images_in_a_text(size: Size) -> Made:
    """Eight images, each seen by a quarter of the text, beginning at another place."""
    import torch
    from attn_gym import masks

    begin = torch.arange(8, dtype=torch.int32, device=size.device) * (size.S // 11)
    intervals = torch.stack([begin, begin + size.S // 4], dim=1)
    return Made(mask_mod=masks.generate_vision_cross_attention_mask_mod(intervals, size.S // 8))


def _video_tiles(size: Size) -> Made:
    from attn_gym import masks

    tile = tuple(side // 4 for side in size.video)
    kernel = tuple(3 * side for side in tile)
    return Made(mask_mod=masks.generate_sta_mask_mod_3d(size.video, kernel, tile))


def _picture_tiles(size: Size) -> Made:
    from attn_gym import masks

    tile = tuple(side // 8 for side in size.picture)
    kernel = tuple(3 * side for side in tile)
    return Made(mask_mod=masks.generate_sta_mask_mod_2d(size.picture, kernel, tile))


def _draft_tree(size: Size) -> Made:
    """A binary tree of drafted tokens behind a prefix: rows are its nodes alone."""
    from attn_gym import masks

    count = size.S // 8
    parents = [-1, *((i - 1) // 2 for i in range(1, count))]
    ancestors = masks.build_tree_ancestor_matrix(parents, device=size.device)
    mask_mod = masks.generate_jetspec_tree_causal_mask_mod(size.S - count, ancestors)
    return Made(mask_mod=mask_mod, rows=count)


def _draft_training(size: Size) -> Made:
    from attn_gym import masks

    mask_mod = masks.generate_jetspec_training_mask_mod(size.S // 2, 16)
    return Made(mask_mod=mask_mod, rows=size.S // 2)


def _selected_tiles(size: Size) -> Made:
    """A quarter of the tiles, others for every sequence, head and tile of rows."""
    import torch
    from attn_gym import masks

    count = 64 if size.S >= 4096 else 8
    generator = torch.Generator().manual_seed(0)
    order = torch.rand(size.B, size.H, count, count, generator=generator).argsort(-1)
    chosen = order[..., : count // 4].to(torch.int32).to(size.device)
    mask_mod = masks.generate_vsa_mask_mod(chosen, size.S // count, _tile_lengths(size, count))
    return Made(mask_mod=mask_mod, varies=True)


def _padded_tiles(size: Size) -> Made:
    from attn_gym.masks import vsa

    count = 64 if size.S >= 4096 else 8
    lengths = _tile_lengths(size, count)
    return Made(mask_mod=vsa.generate_vsa_padding_mask_mod(lengths, size.S // count))


def _tile_lengths(size: Size, count: int) -> Tensor:
    """How many tokens of each tile are real: all, or in every fourth three quarters."""
    import torch

    whole = size.S // count
    is_fourth = torch.arange(count, device=size.device) % 4 == 3
    return torch.where(is_fourth, whole * 3 // 4, whole).to(torch.int32)


def _rope(size: Size) -> Made:
    import torch
    from attn_gym import mods

    rows = torch.randn(size.B, size.H, size.S, 16, device=size.device)
    keys = torch.randn(size.B, 1, size.S, 16, device=size.device)
    return Made(mods.generate_mla_rope_score_mod(rows, keys, size.H, 0.25))


def _spatial(size: Size) -> Made:
    """Distances in a graph up to 20; made up, since finding them takes S^3 steps."""
    import torch
    from attn_gym import mods

    table = torch.randn(size.H, 22, device=size.device)
    shape = (size.B, size.S, size.S)
    distances = torch.randint(22, shape, dtype=torch.int32, device=size.device)
    return Made(mods.generate_graphormer_spatial_bias(table, distances))


def _edges(size: Size) -> Made:
    """Up to three edges of four types on each path, made up likewise."""
    import torch
    from attn_gym import mods

    shape = (size.B, size.S, size.S)
    types = torch.randint(4, (*shape, 3), dtype=torch.int32, device=size.device)
    lengths = torch.randint(4, shape, dtype=torch.int32, device=size.device)
    table = torch.randn(size.H, 3, 4, device=size.device)
    return Made(mods.generate_graphormer_edge_bias(table, types, lengths))


def _gym_mask(name: str, *arguments: Callable[[Size], Any]) -> Callable[[Size], Made]:
    """A mask that the gym's function makes of arguments for a size."""

    def make(size: Size) -> Made:
        from attn_gym import masks

        return Made(mask_mod=getattr(masks, name)(*(each(size) for each in arguments)))

    return make


def _gym_score(name: str, *arguments: Any, **options: Any) -> Callable[[Size], Made]:
    def make(size: Size) -> Made:
        from attn_gym import mods

        return Made(getattr(mods, name)(*arguments, **options))

    return make


def _causal(size: Size) -> Made:
    from attn_gym import masks

    return Made(mask_mod=masks.causal_mask)


def _causal_in_parts(size: Size) -> Made:
    from attn_gym import masks

    return Made(mask_mod=masks.batchify_mask_mod(masks.causal_mask, size.S // 8))


def _causal_documents(size: Size) -> Made:
    from attn_gym import masks

    return Made(mask_mod=masks.generate_doc_mask_mod(masks.causal_mask, _offsets(size)))


def _alibi(size: Size) -> Made:
    from attn_gym import mods

    return Made(mods.generate_alibi_bias(size.H))


def _sandwich(size: Size) -> Made:
    from attn_gym import mods

    return Made(mods.generate_sandwich_bias(size.H, size.S, device=size.device))


def _relu(size: Size) -> Made:
    from attn_gym import mods
    from torch.nn import functional

    return Made(mods.generate_activation_score_mod(functional.relu))


# ---- examples ------------------------------------------------------------------------------------


def _as_score(size: Size) -> Made:
    """A mask written as a score, as it was before `mask_mod`."""
    import torch

    def masked(score: Any, b: Index, h: Index, q_idx: Index, kv_idx: Index) -> Any:
        return torch.where(q_idx >= kv_idx, score, -float("inf"))

    return Made(masked)


def _relative(size: Size) -> Made:
    """T5's kind of bias: a table of every distance for each head."""
    import torch

    table = torch.randn(size.H, 2 * size.S - 1, device=size.device)
    last = size.S - 1

    def relative(score: Any, b: Index, h: Index, q_idx: Index, kv_idx: Index) -> Any:
        return score + table[h, q_idx - kv_idx + last]

    return Made(relative)


def _pair_bias(size: Size) -> Made:
    """A bias for each pair, in bf16, the same for every head and sequence."""
    import torch

    bias = torch.randn(size.S, size.S, device=size.device).bfloat16()
    return Made(lambda score, b, h, q_idx, kv_idx: score + bias[q_idx, kv_idx])


def _restarting(size: Size) -> Made:
    """Positions that begin anew in every document: a read inside of a read."""
    import torch

    offsets = _offsets(size)
    counts = (offsets[1:] - offsets[:-1]).long()
    document = torch.repeat_interleave(torch.arange(len(counts), device=size.device), counts)
    reach = max(1, size.S // 64)

    def near(b: Index, h: Index, q_idx: Index, kv_idx: Index) -> Any:
        row, key = q_idx - offsets[document[q_idx]], kv_idx - offsets[document[kv_idx]]
        return (document[q_idx] == document[kv_idx]) & (abs(row - key) < reach)

    return Made(mask_mod=near)


def _window_2d(size: Size) -> Made:
    (_, width), radius = size.picture, 3

    def window(b: Index, h: Index, q_idx: Index, kv_idx: Index) -> Any:
        dy, dx = q_idx // width - kv_idx // width, q_idx % width - kv_idx % width
        return (abs(dy) <= radius) & (abs(dx) <= radius)

    return Made(mask_mod=window)


def _window_3d(size: Size) -> Made:
    _, height, width = size.video

    def place(index: Index) -> tuple[Any, Any, Any]:
        return index // (height * width), index // width % height, index % width

    def window(b: Index, h: Index, q_idx: Index, kv_idx: Index) -> Any:
        (qt, qy, qx), (kt, ky, kx) = place(q_idx), place(kv_idx)
        return (abs(qt - kt) <= 1) & (abs(qy - ky) <= 3) & (abs(qx - kx) <= 3)

    return Made(mask_mod=window)


def _heads(size: Size) -> Made:
    """A window of its own for every head, and a score that falls off beside it."""
    import torch

    reach = (size.S // 64) * (1 + torch.arange(size.H, dtype=torch.int32, device=size.device))

    def fall(score: Any, b: Index, h: Index, q_idx: Index, kv_idx: Index) -> Any:
        return score - 0.01 * abs(q_idx - kv_idx) / (h + 1)

    def window(b: Index, h: Index, q_idx: Index, kv_idx: Index) -> Any:
        return abs(q_idx - kv_idx) <= reach[h]

    return Made(fall, window, varies=True)


def _paged(size: Size) -> Made:
    """Keys in pages of a cache that lie in any order, another for each sequence."""
    import torch

    page = max(1, size.S // 64)
    generator = torch.Generator().manual_seed(0)
    order = [torch.randperm(size.S // page, generator=generator) for _ in range(size.B)]
    logical = torch.stack(order).to(size.device)

    def paged(b: Index, h: Index, q_idx: Index, kv_idx: Index) -> Any:
        return logical[b, kv_idx // page] * page + kv_idx % page <= q_idx

    return Made(mask_mod=paged, varies=True)


def _window_of(size: Size) -> int:
    return size.S // 8


def _height(size: Size) -> int:
    return size.picture[0]


def _width(size: Size) -> int:
    return size.picture[1]


def _seven(size: Size) -> int:
    return 7


FUNCTIONS: Final = (
    Function("masks.causal_mask", _causal),
    Function("masks.batchify_mask_mod", _causal_in_parts),
    Function("masks.sliding_window", _gym_mask("generate_sliding_window", _window_of)),
    Function(
        "masks.dilated_sliding_window",
        _gym_mask("generate_dilated_sliding_window", _window_of, lambda size: 2),
    ),
    Function("masks.global_sliding_window", _global_window),
    Function("masks.prefix_lm", _gym_mask("generate_prefix_lm_mask", lambda size: size.S // 4)),
    Function("masks.doc_mask_mod", _causal_documents),
    Function("masks.packed_causal_doc", _gym_mask("generate_packed_causal_doc_mask_mod", _offsets)),
    Function("masks.shared_prefix", _shared_prefix),
    Function("masks.vision_cross_attention", _images_in_a_text),
    Function("masks.natten", _gym_mask("generate_natten", _width, _height, _seven, _seven)),
    Function(
        "masks.tiled_natten",
        _gym_mask(
            "generate_tiled_natten",
            _width,
            _height,
            _seven,
            _seven,
            lambda size: _width(size) // 8,
            lambda size: _height(size) // 8,
        ),
    ),
    Function(
        "masks.morton_natten",
        _gym_mask("generate_morton_natten", _width, _height, _seven, _seven),
    ),
    Function("masks.sta_2d", _picture_tiles),
    Function("masks.sta_3d", _video_tiles),
    Function(
        "masks.spatial_head",
        _gym_mask(
            "generate_spatial_head_mask_mod",
            lambda size: size.S // 32,
            lambda size: 8,
            _window_of,
            lambda size: 2,
            lambda size: True,
            lambda size: max(1, size.S // 64),
        ),
    ),
    Function(
        "masks.temporal_head",
        _gym_mask(
            "generate_temporal_head_mask_mod",
            lambda size: size.S // 32,
            lambda size: 8,
            _window_of,
            lambda size: 2,
        ),
    ),
    Function(
        "masks.block_diffusion",
        _gym_mask(
            "generate_block_diffusion_mask",
            lambda size: size.S // 2,
            lambda size: max(4, size.S // 256),
        ),
    ),
    Function("masks.jetspec_tree_causal", _draft_tree),
    Function("masks.jetspec_training", _draft_training),
    Function("masks.vsa", _selected_tiles),
    Function("masks.vsa_padding", _padded_tiles),
    Function("mods.alibi_bias", _alibi),
    Function("mods.tanh_softcap", _gym_score("generate_tanh_softcap", 30)),
    Function("mods.tanh_softcap_approx", _gym_score("generate_tanh_softcap", 30, approx=True)),
    Function("mods.activation_gelu", _gym_score("generate_activation_score_mod")),
    Function("mods.activation_relu", _relu),
    Function("mods.sandwich_bias", _sandwich),
    Function("mods.mla_rope", _rope),
    Function("mods.graphormer_spatial_bias", _spatial),
    Function("mods.graphormer_edge_bias", _edges),
    Function("example.mask_as_score", _as_score),
    Function("example.relative_table", _relative),
    Function("example.pair_bias", _pair_bias),
    Function("example.restarting_positions", _restarting),
    Function("example.window_2d", _window_2d),
    Function("example.window_3d", _window_3d),
    Function("example.heads", _heads),
    Function("example.paged", _paged),
)
"""Every function of the gym that makes a mask or a score, and what it lacks of the examples."""
