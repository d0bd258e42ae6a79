"""sm_89: L4, L40, RTX 40xx."""

from attngen.targets.base import KIB, Feature, Target

TARGET = Target(
    name="sm_89",
    capability=(8, 9),
    features=frozenset(
        {
            Feature.CP_ASYNC,
            Feature.LDMATRIX,
            Feature.BF16_MMA,
            Feature.FP8_MMA,
            Feature.MBARRIER,
        }  # PTX
    ),
    shared_bytes_per_block=99 * KIB,  # Guide, compute capability 8.9
    shared_bytes_per_sm=100 * KIB,  # Guide, 8.9
    max_threads_per_sm=1536,  # Guide, 8.9
    max_blocks_per_sm=24,  # Guide, 8.9
)
