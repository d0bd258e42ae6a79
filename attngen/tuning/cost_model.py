"""How long a schedule takes, by arithmetic: which ones are worth measuring.

A key tile (a step) keeps a multiprocessor busy for so many clocks:

    products      2 · tile_q · tile_kv · (Dqk + Dv) / rate of the tensor cores
    exponentials  tile_q · tile_kv / 16
    shared        bytes that its warps read of shared memory / 128
    handing over  a constant for each warp group
    scores        operations of the score lines · tile_q · tile_kv / 128
    mask          operations of the mask · tile_q · tile_kv / 128, in partial tiles only

These overlap in part, and not all of their clocks count: each has a weight.  A query tile takes
its steps, a start, and the time in which its rows of q and o come and go.  Query tiles are dealt
to the multiprocessors in the order in which the family works on them; the one that gets most is
the time of the launch, so that the last, half-empty wave counts.

The weights were fitted to the 45 cells of `forward_wgmma` and the 47 of `forward_mma` in
benchmarks/results/2026-11-30-h200-3.jsonl and -4.jsonl, one schedule for each head dim and mask.
There the root of the mean squared error is 6.3 % and 4 %; half of the cells are within 2.5 %.  (It
was below 6 % before masks under which keys begin and end again and again became words: those cells
were timed when each pair was asked, and wait to be timed anew.)
Furthest off are a table of blocks, whose reads are not counted (23 % too fast), and sigmoid
weights (15 % too slow).  How schedules of one cell compare was not fitted, for lack of times; of
the comparisons in docs/performance.md it misses one (D 64, causal, 16384 tokens: 192 rows were 6 %
faster than 128, and are predicted 3 % slower).  `forward_simt` was not timed at all, and of other
GPUs only the rates are known.

Sources:  rates, where nothing else is said: CUDA C++ Programming Guide, "Arithmetic
          Instructions"; the sum of terms follows Dao, "FlashAttention-2", 2023, section 3, and
          Shah et al., "FlashAttention-3", 2024, section 3.1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeAlias, final

import numpy as np
from numpy.typing import NDArray

from attngen import targets
from attngen.analysis.tile_map import TileKind, TileMap, map_tiles
from attngen.codegen.forward_context import head_dims
from attngen.codegen.mask_parts import is_dear_per_pair
from attngen.codegen.score_parts import cost_of_pair
from attngen.ir.attention import Attention
from attngen.ir.schedule import Schedule
from attngen.kernels import all_families
from attngen.kernels.base import total_bytes
from attngen.record import record
from attngen.targets.base import Target
from attngen.tuning.call import Call
from attngen.tuning.device_class import DeviceClass

__all__ = ["MARGIN", "CostModel", "Prediction", "Roof"]

Floats: TypeAlias = NDArray[np.float64]

_EXPONENTIALS: Final = 16
"""Of a multiprocessor in a clock, on every target."""
_LANES: Final = 128
"""Lanes that issue an instruction in a clock: four schedulers of a warp each."""
_SHARED_BYTES: Final = 128
"""That shared memory hands out in a clock: 32 banks of 4 bytes."""
_DIVISION: Final = 6
"""Operations of a pair that sigmoid weights take more than those of softmax."""

_ROOF_TILE: Final = 128

MARGIN: Final = 0.2
"""How much faster a schedule has to be, by the model, to be chosen over a default unmeasured.

More than the model's own error within a cell, which no fit knows: at D 64, the times of the
defaults in benchmarks/results/2026-11-30-h200-6.jsonl are 2 % above to 18 % below the predictions,
and those with 192 rows furthest below.
"""


@final
@record(kw_only=True)
class Rates:
    """What a multiprocessor does in a clock.

    wgmma, mma_sync:  floating-point operations of dense products, 16 bits and float32 sums.
    clock_ghz:        that of a long run.
    """

    wgmma: int = 0
    mma_sync: int
    clock_ghz: float


# Products: peak of the data sheet over multiprocessors and boost clock.
_RATES: Final[Mapping[str, Rates]] = {
    "sm_80": Rates(mma_sync=2048, clock_ghz=1.41),  # A100: 312 TFLOP/s, 108 multiprocessors
    "sm_86": Rates(mma_sync=512, clock_ghz=1.70),  # GeForce RTX 3090: 71 TFLOP/s, 82
    "sm_89": Rates(mma_sync=1024, clock_ghz=2.52),  # L40S: 362 TFLOP/s, 142; GeForce has half
    # H100, H200: 989 TFLOP/s, 132.  `mma.sync` has 63 % of that: Luo et al., "Benchmarking and
    # Dissecting the Nvidia Hopper GPU Architecture via Microbenchmarking", 2024.  Clock: between
    # the 1.53 and 1.98 GHz that were read beside the fitted cells.
    "sm_90a": Rates(wgmma=4096, mma_sync=2560, clock_ghz=1.755),
    # Not published for `mma.sync`; taken to be as on sm_90a.
    "sm_100a": Rates(mma_sync=2560, clock_ghz=1.85),
    "sm_120": Rates(mma_sync=512, clock_ghz=2.41),  # GeForce RTX 5090: 209 TFLOP/s, 170
}


@final
@record(kw_only=True)
class Weights:
    """How much each term of a family counts; see the module.

    hand_over:  clocks for each 64 rows of a step.
    mask:       operations of a pair in a partial tile; `dear_mask` where it is more than a window.
    start_us:   of a query tile.
    moving:     of the time in which its rows of q and o come and go.
    one_stage:  of a step that nothing is loaded ahead of.
    """

    products: float
    exponentials: float
    shared: float = 0.0
    hand_over: float = 0.0
    scores: float
    mask: float
    dear_mask: float
    start_us: float
    moving: float
    one_stage: float = 1.0


_WEIGHTS: Final[Mapping[str, Weights]] = {
    "forward_wgmma": Weights(
        products=0.86,
        exponentials=0.76,
        hand_over=187.0,
        scores=1.45,
        mask=2.5,
        dear_mask=9.3,
        start_us=0.0,
        moving=2.2,
    ),
    "forward_mma": Weights(
        products=1.26,
        exponentials=0.6,
        shared=0.6,
        scores=0.31,
        mask=0.0,
        dear_mask=14.7,
        start_us=1.6,
        moving=1.1,
        one_stage=1.1,  # docs/performance.md: one stage loses 8 to 14 %
    ),
    # A multiplication and an addition of each lane for each element, whose operands come from
    # shared memory.  An estimate.
    "forward_simt": Weights(
        products=4.0,
        exponentials=1.0,
        scores=1.0,
        mask=8.0,
        dear_mask=30.0,
        start_us=1.6,
        moving=1.1,
    ),
}


@final
@record
class Prediction:
    """The time of a launch, and what it is made of.

    terms:  microseconds by name; together they are `us`.
    """

    us: float
    terms: Mapping[str, float]


@final
@record(kw_only=True)
class Roof:
    """The least that a call has to do, and the most that a GPU can.

    flops:        of the products of pairs that attend.
    moved_bytes:  q, k, v and o once.
    """

    flops: float
    moved_bytes: float
    peak_tflops: float
    bandwidth_tb_s: float

    @property
    def intensity(self) -> float:
        """Operations for each byte."""
        return self.flops / self.moved_bytes if self.moved_bytes else 0.0

    @property
    def least_us(self) -> float:
        """No schedule is faster."""
        computing = self.flops / (self.peak_tflops * 1e6)
        return max(computing, self.moved_bytes / (self.bandwidth_tb_s * 1e6))

    def tflops(self, us: float) -> float:
        """What a time means."""
        return self.flops / (us * 1e6) if us else 0.0


@final
class CostModel:
    """Predicts schedules of one call on one kind of GPU.

    Which tiles a mask leaves is looked up in the map of tiles of batch 0, head 0.
    """

    def __init__(self, attention: Attention, call: Call, device: DeviceClass) -> None:
        self._attention = attention
        self._call = call
        self._device = device
        self._target: Target = targets.get(device.arch)
        self._rates = _RATES[device.arch]
        self._maps: dict[tuple[int, int], tuple[Floats, Floats]] = {}

    def predict(self, schedule: Schedule) -> Prediction:
        """The time of a complete schedule."""
        assert schedule.tile_q is not None
        assert schedule.tile_kv is not None
        full, partial = self._steps(schedule.tile_q, schedule.tile_kv)
        per_step, masked = self._step_clocks(schedule)
        steps = full + partial
        per_tile: dict[str, Any] = {name: clocks * steps for name, clocks in per_step.items()}
        per_tile["mask"] = masked * partial
        per_tile["tiles"] = self._tile_clocks(schedule) * (steps > 0)
        of_tile: Floats = np.sum(list(per_tile.values()), axis=0)
        heads = self._call.sizes["B"] * self._call.sizes["Hq"]
        slots = self._device.sm_count * self._blocks_per_sm(schedule)
        # Blocks that share a multiprocessor share its time.
        busiest = _deal(of_tile, heads, slots, is_persistent=_is_persistent(schedule))
        clocks = busiest * slots / self._device.sm_count
        scale = 1e-3 / self._rates.clock_ghz
        mean = heads / self._device.sm_count
        terms = {name: float(c.sum()) * mean * scale for name, c in per_tile.items()}
        us = clocks * scale
        terms["waves"] = us - sum(terms.values())
        return Prediction(us, terms)

    def rank(self, schedules: Sequence[Schedule]) -> list[tuple[Schedule, Prediction]]:
        """The schedules with their times, the fastest first; of equal ones the first given."""
        found = [(schedule, self.predict(schedule)) for schedule in schedules]
        return sorted(found, key=lambda one: one[1].us)

    def choose(self, default: Schedule, schedules: Sequence[Schedule]) -> Schedule:
        """The default, unless another is faster by more than the model may be wrong."""
        best, prediction = self.rank(schedules)[0]
        is_clear = prediction.us < (1 - MARGIN) * self.predict(default).us
        return best if is_clear else default

    def roof(self) -> Roof:
        """What the call has to do at least, and what the GPU could do at most."""
        sizes, dims = self._call.sizes, sum(head_dims(self._attention))
        tiles = self._map(_ROOF_TILE, _ROOF_TILE)
        pairs = tiles.computed * (1 - tiles.wasted_share)
        rows = sizes["Hq"] * sizes["Sq"] + sizes["Hkv"] * sizes["Skv"]
        assert self._attention.dtype is not None
        rate = max(self._rates.wgmma, self._rates.mma_sync) * self._rates.clock_ghz * 1e-3
        return Roof(
            flops=2.0 * sizes["B"] * sizes["Hq"] * pairs * dims,
            moved_bytes=float(sizes["B"] * rows * dims * self._attention.dtype.bytes),
            peak_tflops=rate * self._device.sm_count,
            bandwidth_tb_s=self._device.bandwidth_tb_s,
        )

    def _steps(self, tile_q: int, tile_kv: int) -> tuple[Floats, Floats]:
        """Full and partial key tiles of each query tile."""
        found = self._maps.get((tile_q, tile_kv))
        if found is None:
            kinds = self._map(tile_q, tile_kv, most_pairs=0).kinds
            full, partial = (
                np.count_nonzero(kinds == kind, axis=1).astype(np.float64)
                for kind in (TileKind.FULL, TileKind.PARTIAL)
            )
            found = self._maps[tile_q, tile_kv] = full, partial
        return found

    def _map(self, tile_q: int, tile_kv: int, most_pairs: int | None = None) -> TileMap:
        return map_tiles(
            self._attention,
            tile_q=tile_q,
            tile_kv=tile_kv,
            sizes=self._call.sizes,
            params=self._call.params,
            tensors=self._call.tensors,
            most_pairs=most_pairs,
        )

    def _step_clocks(self, schedule: Schedule) -> tuple[dict[str, float], float]:
        """Clocks of a step by term, and what a partial one takes more."""
        assert schedule.kernel is not None
        assert schedule.tile_q is not None
        assert schedule.tile_kv is not None
        assert schedule.warps is not None
        weights, attention = _WEIGHTS[schedule.kernel], self._attention
        pairs, dims = schedule.tile_q * schedule.tile_kv, sum(head_dims(attention))
        operations = cost_of_pair(attention)
        if not attention.row_state.running_max:
            operations += _DIVISION
        clocks = {
            "products": weights.products * 2 * pairs * dims / self._product_rate(schedule),
            "exponentials": weights.exponentials * pairs / _EXPONENTIALS,
            # Every warp reads the whole tiles of keys and values, 2 bytes an element.
            "shared": weights.shared * schedule.warps * schedule.tile_kv * dims * 2 / _SHARED_BYTES,
            "handing over": weights.hand_over * schedule.tile_q / 64,
            "scores": weights.scores * operations * pairs / _LANES,
        }
        if schedule.stages == 1:
            clocks = {name: weights.one_stage * value for name, value in clocks.items()}
        mask = weights.dear_mask if is_dear_per_pair(attention) else weights.mask
        return clocks, mask * pairs / _LANES

    def _product_rate(self, schedule: Schedule) -> int:
        match schedule.kernel:
            case "forward_wgmma":
                return self._rates.wgmma
            case "forward_mma":
                return self._rates.mma_sync
            case _:
                return 2 * _LANES

    def _tile_clocks(self, schedule: Schedule) -> float:
        """What a query tile takes beside its steps."""
        assert schedule.kernel is not None
        assert schedule.tile_q is not None
        assert self._attention.dtype is not None
        weights = _WEIGHTS[schedule.kernel]
        moved = schedule.tile_q * sum(head_dims(self._attention)) * self._attention.dtype.bytes
        bytes_per_us = self._device.bandwidth_tb_s * 1e6 / self._device.sm_count
        us = weights.start_us + weights.moving * moved / bytes_per_us
        return us * self._rates.clock_ghz * 1e3

    def _blocks_per_sm(self, schedule: Schedule) -> int:
        """Blocks that share a multiprocessor, by their shared memory, registers and threads."""
        if _is_persistent(schedule):
            return 1
        assert schedule.kernel is not None
        assert schedule.warps is not None
        family, target = all_families()[schedule.kernel], self._target
        shared = total_bytes(family.shared_arrays(self._attention, schedule))
        registers = min(family.registers(self._attention, schedule), target.registers_per_thread)
        threads = target.threads_per_warp * schedule.warps
        return max(
            1,
            min(
                target.shared_bytes_per_sm // (shared + target.shared_bytes_reserved),
                target.registers_per_sm // (threads * registers),
                target.max_threads_per_sm // threads,
                target.max_blocks_per_sm,
            ),
        )


def _is_persistent(schedule: Schedule) -> bool:
    """Whether a block stays on its multiprocessor and gets its tiles by an order fixed before."""
    return schedule.kernel == "forward_wgmma"


def _deal(of_tile: Floats, heads: int, slots: int, *, is_persistent: bool) -> float:
    """The most clocks that one slot gets, when tiles are dealt back and forth.

        tiles 9 8 | 7 6 | 5 4 | 3  to two slots:  9 + 6 + 5 + 0,  8 + 7 + 4 + 3

    The last query tiles come first, of all heads together.  Where blocks come and go the GPU hands
    them to whoever is free, which is about what dealing them by length gives.
    """
    dealt = np.repeat(of_tile[::-1], heads)
    if not is_persistent:
        dealt = np.sort(dealt)[::-1]
    rounds = -(-len(dealt) // slots)
    table: Any = np.zeros((rounds, slots))
    table.reshape(-1)[: len(dealt)] = dealt
    table[1::2] = table[1::2, ::-1]
    return float(table.sum(axis=0).max(initial=0.0))
