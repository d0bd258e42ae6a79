"""What the host header can find; the numbers are `ag_host::Fault` in `host.h`."""

from __future__ import annotations

from enum import Enum

__all__ = ["Fault"]


class Fault(Enum):
    NONE = 0
    UNINITIALISED_READ = 1
    SHARED_BOUNDS = 2
    MISALIGNED = 3
    GLOBAL_BOUNDS = 4
    READ_ONLY = 5
    DIVERGENT_WARP = 6
    ENDED_LANE = 7
    DIVERGENT_BARRIER = 8
    DEADLOCK = 9
    SHARED_RACE = 10
    GLOBAL_RACE = 11
    SHUFFLE_LANE = 12
    LOCAL_BOUNDS = 13
    INTEGER = 14
    UNFINISHED_COPY = 15
    LAUNCH = 16
    BARRIER_PROTOCOL = 17
    MISSING_FENCE = 18
    REGISTERS_IN_FLIGHT = 19
    REGISTER_COUNT = 20

    def __str__(self) -> str:
        """The fault in words, as messages say it."""
        return _MEANINGS[self]


_MEANINGS = {
    Fault.NONE: "no fault",
    Fault.UNINITIALISED_READ: "shared memory is read before it is written",
    Fault.SHARED_BOUNDS: "shared memory is used outside an array",
    Fault.MISALIGNED: "an address is not aligned to its elements",
    Fault.GLOBAL_BOUNDS: "global memory is used outside every argument",
    Fault.READ_ONLY: "an input is written",
    Fault.DIVERGENT_WARP: "lanes of one warp are at different collectives",
    Fault.ENDED_LANE: "a thread has ended that others wait for",
    Fault.DIVERGENT_BARRIER: "threads of one block are at different barriers",
    Fault.DEADLOCK: "no thread can go on",
    Fault.SHARED_RACE: "a race in shared memory",
    Fault.GLOBAL_RACE: "a race in global memory",
    Fault.SHUFFLE_LANE: "a shuffle reads a lane that does not exist",
    Fault.LOCAL_BOUNDS: "a local array is used outside its bounds",
    Fault.INTEGER: "integer arithmetic has no defined result",
    Fault.UNFINISHED_COPY: "a thread ends before its asynchronous copies",
    Fault.LAUNCH: "the launch does not fit the kernel",
    Fault.BARRIER_PROTOCOL: "a barrier is used as it may not be",
    Fault.MISSING_FENCE: "what threads wrote is used asynchronously without a fence",
    Fault.REGISTERS_IN_FLIGHT: "registers of an asynchronous product are changed before it is over",
    Fault.REGISTER_COUNT: "this number of registers cannot be had",
}
