"""sm_86: A10, A40, RTX 30xx, RTX A6000; its cubins also run on 8.7 (Orin)."""

from attngen.targets.base import KIB, Feature, Target

TARGET = Target(
    name="sm_86",
    capability=(8, 6),
    features=frozenset(
        {Feature.CP_ASYNC, Feature.LDMATRIX, Feature.BF16_MMA, Feature.MBARRIER}  # PTX
    ),
    shared_bytes_per_block=99 * KIB,  # Guide, compute capability 8.6
    shared_bytes_per_sm=100 * KIB,  # Guide, 8.6
    max_threads_per_sm=1536,  # Guide, 8.6
    max_blocks_per_sm=16,  # Guide, 8.6
)
