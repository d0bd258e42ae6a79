"""sm_80: A100, A30."""

from attngen.targets.base import KIB, Feature, Target

TARGET = Target(
    name="sm_80",
    capability=(8, 0),
    features=frozenset(
        {Feature.CP_ASYNC, Feature.LDMATRIX, Feature.BF16_MMA, Feature.MBARRIER}  # PTX
    ),
    shared_bytes_per_block=163 * KIB,  # Guide, compute capability 8.0
    shared_bytes_per_sm=164 * KIB,  # Guide, 8.0
    max_threads_per_sm=2048,  # Guide, 8.0
    max_blocks_per_sm=32,  # Guide, 8.0
)
