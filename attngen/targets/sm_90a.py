"""sm_90a: H100, H200, GH200; with wgmma and setmaxnreg, so for exactly this chip."""

from attngen.targets.base import KIB, Feature, Target

TARGET = Target(
    name="sm_90a",
    capability=(9, 0),
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
            Feature.WGMMA,
        }  # PTX
    ),
    shared_bytes_per_block=227 * KIB,  # Guide, compute capability 9.0
    shared_bytes_per_sm=228 * KIB,  # Guide, 9.0
    max_threads_per_sm=2048,  # Guide, 9.0
    max_blocks_per_sm=32,  # Guide, 9.0
)
