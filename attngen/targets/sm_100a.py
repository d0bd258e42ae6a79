"""sm_100a: B200, GB200; with tcgen05, so for exactly this chip."""

from attngen.targets.base import KIB, Feature, Target

TARGET = Target(
    name="sm_100a",
    capability=(10, 0),
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
            Feature.SETMAXNREG,
            Feature.TCGEN05,
        }  # PTX
    ),
    shared_bytes_per_block=227 * KIB,  # Guide, compute capability 10.0
    shared_bytes_per_sm=228 * KIB,  # Guide, 10.0
    max_threads_per_sm=2048,  # Guide, 10.0
    max_blocks_per_sm=32,  # Guide, 10.0
    registers_kept=32,  # NVRTC 13
)
