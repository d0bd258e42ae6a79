"""sm_120: RTX 50xx, RTX PRO Blackwell; its cubins also run on 12.1 (GB10)."""

from attngen.targets.base import KIB, Feature, Target

TARGET = Target(
    name="sm_120",
    capability=(12, 0),
    features=frozenset(
        {
            Feature.CP_ASYNC,
            Feature.LDMATRIX,
            Feature.BF16_MMA,
            Feature.FP8_MMA,
            Feature.MBARRIER,
            Feature.STMATRIX,
            Feature.CLUSTER,
            Feature.TMA,
            Feature.DEPENDENT_LAUNCH,
        }  # PTX; setmaxnreg needs sm_120a
    ),
    shared_bytes_per_block=99 * KIB,  # Guide, compute capability 12.0
    shared_bytes_per_sm=100 * KIB,  # Guide, 12.0
    max_threads_per_sm=1536,  # Guide, 12.0
    max_blocks_per_sm=24,  # Guide, 12.0
    registers_kept=56,  # NVRTC 13
)
