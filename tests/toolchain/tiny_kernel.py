"""A small kernel in the dialect of the generated ones, and its machine code."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from attngen import targets
from attngen.backend.nvrtc import compile_cuda

PRELUDE = (Path(__file__).parents[2] / "templates/common/device.cuh").read_text()

# y[i] = scale * x[i], through shared memory: 512 bytes of its own, the rest as launched.
# The compiler rounds its own up to the alignment of the rest.
SOURCE = (
    PRELUDE
    + """
struct Args { const float* x; float* y; ag_i64 count; float scale; };

AG_KERNEL(128, scale_floats, Args) {
    __shared__ float own[128];
    AG_SHARED_MEMORY(buffer);
    ag_shared<float> staged(buffer, 0, 128);
    const ag_i64 i = (ag_i64)ag_block() * 128 + ag_thread();
    staged[ag_thread()] = i < args.count ? ag_load(args.x + i) : 0.0f;
    own[ag_thread()] = staged[ag_thread()];
    ag_sync();
    if (i < args.count) ag_store(args.y + i, own[ag_thread()] * args.scale);
}
"""
)
KERNEL = "scale_floats"
ARGUMENT_BYTES = 32
STATIC_SHARED_BYTES = 1024


@cache
def compile_tiny(target: str) -> bytes:
    return compile_cuda(SOURCE, name="tiny", target=targets.get(target)).binary
