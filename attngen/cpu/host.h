// The device functions of a generated kernel, for a CPU.
//
// Generated CUDA text reaches the machine only through functions named ag_*.  This header gives
// each of them a meaning in C++17, so that the same text, unchanged, becomes a shared object:
//
//     g++ -std=c++17 -O2 -ffp-contract=off -fno-strict-aliasing -fPIC -shared -DAG_HOST
//         -include host.h -include host_mma.h -include host_wgmma.h -x c++ kernel.cu
//
// (attngen/cpu/build.py adds the compiler's own checks of integers and local arrays.)
//
// It exports, for each kernel, `<name>_cpu(args, launch, report)`.  One fiber stands for one CUDA
// thread.  A fiber runs until it waits at a barrier or at a warp collective; blocks are spread over
// OS threads.  Nothing outlives a run, and nothing is shared between runs.
//
// The point is to find mistakes, also those that a GPU would not show:
//   - every shared and global access is checked against its array, its alignment and its rights;
//   - shared memory that nobody has written may not be read;
//   - what an asynchronous copy reads and writes is left alone until it has been waited for;
//   - two accesses to one place by different threads, one of them a write, need a barrier between
//     them.  This is decided by the barriers alone, never by the order in which fibers ran;
//   - barriers and warp collectives must be reached by everybody, at the same place in the text;
//   - local arrays are used inside their bounds, and integers do not overflow.
//
// Sections: launch and report; fibers; threads, warps and blocks; faults; scheduling; barriers;
// the race detector; shared memory; global memory; what the compiler checks; the run; the device
// functions.  Asynchronous copies and what else tensor cores need are in host_mma.h, and what came
// with sm_90a in host_wgmma.h; the members that only those headers use cost a kernel without them
// nothing.
#ifndef AG_HOST_H
#define AG_HOST_H

#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

// ---- launch and report: the C structures that attngen/cpu/run.py fills and reads -----------

extern "C" {

// One argument array in global memory.  `element_bytes` is the unit in which races are found;
// 1 is always right, the size of the array's elements is faster.
struct ag_range {
    uintptr_t begin, end;
    const char* name;
    int32_t is_writable;
    int32_t element_bytes;
};

struct ag_launch {
    int64_t struct_bytes;  // sizeof(ag_launch): a library of another version is refused
    int64_t args_bytes;
    int64_t shared_bytes;
    int32_t grid, threads;
    int32_t workers;       // OS threads
    int32_t mode;          // ag_host::Mode
    uint32_t seed;         // of Mode random
    int32_t landing;       // ag_host::Landing
    int32_t is_checked;    // 0: no search for races and unwritten memory; addresses are checked
    int32_t range_count;
    const ag_range* ranges;
};

struct ag_report {
    int32_t fault;         // ag_host::Fault
    int32_t block, thread, line;
    int64_t switches;      // from one fiber to another
    int64_t meetings;      // of a block at ag_sync, or of a warp at a barrier or collective
    int64_t index_reads;   // of threads that ask which one they are
    int64_t notes;         // a checksum of integers and words stored in shared memory, and of where
    int64_t shared_reads, shared_writes, global_loads, global_stores;
    int64_t shared_wavefronts, shared_wavefronts_least;
    char text[2048];
};

}  // extern "C"

// Two libraries in one process stay strangers: nothing but the kernels' entries is visible.
#pragma GCC visibility push(hidden)

namespace ag_host {

enum Mode : int32_t { kRing, kEager, kEagerLast, kRandom };
enum Landing : int32_t { kLate, kEarly };  // when an asynchronous copy moves its bytes

enum Fault : int32_t {
    kNone,
    kUninitialisedRead,   // shared memory that no thread of the block has written
    kSharedBounds,        // outside a shared array, or the array outside the block's buffer
    kMisaligned,
    kGlobalBounds,        // outside every argument array
    kReadOnly,            // a write to an array that is only read
    kDivergentWarp,       // lanes of one warp at different collectives
    kEndedLane,           // a collective or barrier that a thread which has ended never reaches
    kDivergentBarrier,    // threads of one block at different barriers
    kDeadlock,
    kSharedRace,
    kGlobalRace,
    kShuffleLane,         // a shuffle from a lane that does not exist
    kLocalBounds,         // outside an array of the thread's own
    kInteger,             // an overflow, a division by zero, or a shift that C++ does not define
    kUnfinishedCopy,      // a thread has ended without a wait for its copies
    kLaunch,              // the launch does not fit the kernel, or memory ran out
    kBarrierProtocol,     // a barrier in memory, or by number, used as it may not be
    kMissingFence,        // written by threads, used asynchronously, and no fence between
    kRegistersInFlight,   // touched while an asynchronous product uses them
    kRegisterCount,       // setmaxnreg with a number that cannot be had
};

// A place in the kernel's text.  Functions that can fail take the caller's as defaulted arguments.
struct Site {
    const char* file;
    int line;
};
#define AG_SITE const char *file = __builtin_FILE(), int line = __builtin_LINE()

inline bool is_same(Site a, Site b) {
    return a.line == b.line && (a.file == b.file || strcmp(a.file, b.file) == 0);
}

#define AG_DEVICE inline __attribute__((always_inline))
#define AG_NOINLINE static __attribute__((noinline, unused))
#define AG_COLD __attribute__((cold, noinline, unused)) static
#define AG_LIKELY(x) __builtin_expect(!!(x), 1)
#define AG_UNLIKELY(x) __builtin_expect(!!(x), 0)

// ---- fibers: a stack each, and a switch that saves what the ABI says a callee must keep ------

extern "C" void ag_host_switch(void** save_stack_here, void* go_on_with_stack);

#if defined(__x86_64__)
constexpr int kSavedWords = 6;
constexpr int kReturnWord = 6;  // `ret` takes the address above the six registers
asm(R"(
    .text
    .globl ag_host_switch
    .hidden ag_host_switch
    .type ag_host_switch, @function
ag_host_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
    .size ag_host_switch, . - ag_host_switch
)");
#elif defined(__aarch64__)
constexpr int kSavedWords = 20;
constexpr int kReturnWord = 11;  // x30, the link register
asm(R"(
    .text
    .globl ag_host_switch
    .hidden ag_host_switch
    .type ag_host_switch, %function
ag_host_switch:
    sub sp, sp, #160
    stp x19, x20, [sp]
    stp x21, x22, [sp, #16]
    stp x23, x24, [sp, #32]
    stp x25, x26, [sp, #48]
    stp x27, x28, [sp, #64]
    stp x29, x30, [sp, #80]
    stp d8, d9, [sp, #96]
    stp d10, d11, [sp, #112]
    stp d12, d13, [sp, #128]
    stp d14, d15, [sp, #144]
    mov x9, sp
    str x9, [x0]
    mov sp, x1
    ldp x19, x20, [sp]
    ldp x21, x22, [sp, #16]
    ldp x23, x24, [sp, #32]
    ldp x25, x26, [sp, #48]
    ldp x27, x28, [sp, #64]
    ldp x29, x30, [sp, #80]
    ldp d8, d9, [sp, #96]
    ldp d10, d11, [sp, #112]
    ldp d12, d13, [sp, #128]
    ldp d14, d15, [sp, #144]
    add sp, sp, #160
    ret
    .size ag_host_switch, . - ag_host_switch
)");
#else
#error "the fiber switch is written for x86-64 and aarch64"
#endif

constexpr size_t kStackBytes = 256 << 10;
constexpr size_t kGuardBytes = 64 << 10;  // at the end of a stack: using them stops the process

// Stacks that start at the same offset of their pages fight for the same cache sets, so each
// begins a few cache lines below its neighbour's start.
constexpr size_t kStackStagger = 320, kStackStaggerSpan = 16 << 10;

// So much of a stack is NaN at first: local arrays that are read before they are set.
constexpr size_t kStackPoison = 4 << 10;

// The stack pointer of a fiber that has not run: the switch will "return" into `entry`.
inline void* first_stack_pointer(unsigned char* stack_end, void (*entry)()) {
    // `entry` starts as if it had been called: on x86-64 eight bytes below a multiple of 16, with
    // a zero return address there; on aarch64 at a multiple of 16.
    void** words = (void**)stack_end - 2;
    words[0] = words[1] = nullptr;
    words -= kSavedWords;
    memset(words, 0, kSavedWords * sizeof(void*));
    words[kReturnWord] = (void*)entry;
    return words;
}

// ---- threads, warps and blocks ---------------------------------------------------------------

// When and by whom a place in memory was last touched, in one integer:
//
//     block + 1 : 26 | tick : 26 | thread : 10 | low : 2
//
// A block's tick counts its barriers of either kind; an access carries the tick of the last
// barrier that its thread has passed.  So stamps of one block compare as their ticks do, and 0
// is "never".  `low` is the size of a written element (size_code; 0 while a copy is on its way
// there), or who read it (Readers).
typedef uint64_t Stamp;
constexpr int kThreadShift = 2, kTickShift = 12, kBlockShift = 38;
constexpr uint64_t kTickLimit = 1ull << (kBlockShift - kTickShift);
constexpr uint64_t kBlockLimit = (1ull << (64 - kBlockShift)) - 1;

inline Stamp stamp_of(uint64_t block, uint64_t tick, uint64_t thread) {
    return (block + 1) << kBlockShift | tick << kTickShift | thread << kThreadShift;
}
inline int stamp_thread(Stamp s) { return (int)(s >> kThreadShift) & 1023; }
inline int stamp_warp(Stamp s) { return stamp_thread(s) / 32; }
inline int64_t stamp_block(Stamp s) { return (int64_t)(s >> kBlockShift) - 1; }

// What the race detector knows of one element.
struct Cell {
    Stamp written, read;
};

struct Counters {
    int64_t index_reads, shared_reads, shared_writes, global_loads, global_stores;
    uint64_t notes;
};

struct Warp;
struct Block;
struct Copies;
struct Async;

// One CUDA thread.  A cache line for memory accesses comes first, and then one for waiting.
struct alignas(64) Thread {
    Stamp stamp;           // of an access made now
    Stamp block_since;     // accesses of this block below it are ordered before now, for all
    Stamp warp_since;      // the same for accesses of this warp
    Stamp block_first;     // below it: another block's
    unsigned char* shared;
    Cell* cells;           // null: unchecked
    size_t cell_plane;
    Copies* copies;
    uint32_t* clock;       // null unless the block has barriers in memory: see host_wgmma.h

    int index, lane, warp_index;
    uint32_t shared_bytes;
    Warp* warp;
    Block* block;
    void* stack_pointer;   // while it does not run
    const char* waits_in;  // the function, while it waits
    Site waits_at;

    Counters counters;
};

// Lanes are bits.  What a collective is given is filled by the arriving lanes, each its own place;
// the last one makes of it what all of them take with them.
struct alignas(64) Warp {
    uint32_t lanes, ready, waiting, ended;
    const char* collective;
    Site site;
    int first_waiting;
    Stamp since;
    float in[32], out[32];     // of a shuffle
    int source[32];
    int votes[32], vote;       // of each lane, and of all
    uint32_t rows[32];         // of matrices: places in shared memory
    uint16_t matrices[4 * 8 * 8];
    alignas(32) uint16_t a[4 * 8 * 8];  // of a product: see host_mma.h
    alignas(32) uint16_t b[16 * 8];
    alignas(32) float c[16 * 8];
};

// The accesses of a warp's lanes to shared memory at one line of the text, those that the lanes
// make together on a GPU in one record: the first of each lane, the second of each, and so on.
struct WarpAccess {
    uint32_t lanes;
    uint32_t places[32];
};
struct AccessLine {
    Site site;
    int bytes, count, capacity;
    WarpAccess* accesses;
    int made[32];              // by each lane
};
struct AccessLog {
    AccessLine* lines;
    int count, capacity, recent;
    void (*close)(Block& b, AccessLog& log);  // null when nothing is open
};

// An asynchronous copy of 16 bytes, from its start until its thread has waited for it.
struct Copy {
    const unsigned char* source;  // null: zeros
    uint32_t place;               // of its destination
    uint32_t bytes, size;         // that are read, and of the destination; zeros come behind
    int64_t group;
    Site site;
    bool is_source_writable;
};

// The copies of a thread that are on their way, `items[first]` to `items[count - 1]`; the oldest
// comes first.
struct Copies {
    Copy* items;
    int first, count, capacity;
    int64_t groups;               // that were closed
};

constexpr int kMaxThreads = 1024, kMaxWarps = kMaxThreads / 32;

struct Run;
struct Range;
struct SharedArray;
enum Access { kRead, kWarpRead, kWrite };

// What host_wgmma.h does where this header has its own answer, once a block needs it.
struct AsyncHooks {
    bool (*is_known)(const Thread&, Stamp earlier);  // is an access ordered before now?
    void (*check_shared)(Thread&, uint32_t address, uint32_t bytes, Access, SharedArray, Site);
    void (*meet)(Block&, int first, int count, uint64_t tick);  // threads have met at a barrier
    void (*describe_waits)(const Block&, char* text, size_t size);
    void (*end_thread)(Thread&);
    void (*end_block)(Thread& last);
};

// The block that a worker runs at the moment; the worker uses it again for the next one.
struct Block {
    Run* run;
    bool is_in_order;      // a warp's later lanes come next, if any are ready
    int index, thread_count, warp_count;
    Thread* threads;
    Warp warps[kMaxWarps];
    uint32_t ready_warps;
    int live, arrived, first_arrived;
    Site barrier_site;
    uint64_t tick;
    Stamp since;
    uint64_t random;
    int64_t switches;      // of all blocks of the worker, like the next four
    int64_t meetings;
    Counters counters;
    int64_t wavefronts, wavefronts_least;
    unsigned char* shared;
    Cell* cells;
    Copies* copies;        // of each thread
    // Called by stores to global memory while copies from writable arrays are on their way.
    void (*check_sources)(Thread&, uintptr_t address, size_t bytes, const Range&, Site);
    int writable_sources;  // how many such copies
    Async* async;          // kept from block to block
    void (*free_async)(Async*);
    const AsyncHooks* hooks;  // null until this block needs them
    AccessLog* logs;       // of each warp
    int recent_range;
    void* home;            // the worker's own stack pointer
    unsigned char* stacks;
    size_t stacks_bytes;
    Fault fault;
    int fault_thread, fault_line;
    char fault_text[sizeof(ag_report::text)];
};

struct Range {
    uintptr_t begin, end;
    const char* name;
    bool is_writable;
    size_t element_bytes;
    Cell* cells;           // one per element of a writable range; null: unchecked
    size_t cells_bytes;
};

struct Run {
    const ag_launch* launch;
    void (*kernel)(const void* args);
    const void* args;
    Range* ranges;
    int next_block, is_stopped;  // atomic
    pthread_mutex_t lock;        // guards `report`
    ag_report* report;
};

// The fiber that runs on this OS thread.  A fiber never moves to another OS thread.
static thread_local Thread* self = nullptr;

// ---- faults: the first one ends its block, and then the run ----------------------------------

[[noreturn]] AG_COLD __attribute__((format(printf, 4, 5))) void fail(Thread& t, Fault fault,
                                                                     Site site,
                                                                     const char* format, ...) {
    Block& b = *t.block;
    b.fault = fault;
    b.fault_thread = t.index;
    b.fault_line = site.line;
    int used = snprintf(b.fault_text, sizeof b.fault_text, "%s:%d: thread %d of block %d ",
                        site.file, site.line, t.index, b.index);
    va_list values;
    va_start(values, format);
    if (used >= 0 && (size_t)used < sizeof b.fault_text)
        vsnprintf(b.fault_text + used, sizeof b.fault_text - used, format, values);
    va_end(values);
    void* abandoned;
    ag_host_switch(&abandoned, b.home);  // the other fibers are never run again
    __builtin_unreachable();
}

// Where the waiting threads are, as runs of thread numbers.
AG_COLD void list_waiting(const Block& b, char* text, size_t size) {
    size_t used = 0;
    text[0] = 0;
    for (int first = 0; first < b.thread_count && used + 1 < size;) {
        const Thread& t = b.threads[first];
        int next = first + 1;
        while (next < b.thread_count && b.threads[next].waits_in == t.waits_in &&
               (!t.waits_in || is_same(b.threads[next].waits_at, t.waits_at)))
            ++next;
        char where[256];
        if (t.waits_in)
            snprintf(where, sizeof where, "in %s at %s:%d", t.waits_in, t.waits_at.file,
                     t.waits_at.line);
        else
            snprintf(where, sizeof where, "ended");
        used += snprintf(text + used, size - used, "%s%d-%d %s", first ? ", " : "", first, next - 1,
                         where);
        first = next;
    }
}

// ---- scheduling: who runs when a fiber has to wait -------------------------------------------

inline int bit_after(uint32_t bits, int position) {  // the next set bit, around the end
    uint32_t later = position == 31 ? 0 : bits & (~0u << (position + 1));
    return __builtin_ctz(later ? later : bits);
}
inline int bit_before(uint32_t bits, int position) {
    uint32_t earlier = bits & ((1u << position) - 1);
    return 31 - __builtin_clz(earlier ? earlier : bits);
}
inline int lowest_bit(uint32_t bits) { return __builtin_ctz(bits); }
inline int highest_bit(uint32_t bits) { return 31 - __builtin_clz(bits); }

inline uint32_t next_random(Block& b) {  // xorshift64*, Marsaglia 2003 and Vigna 2016
    b.random ^= b.random >> 12;
    b.random ^= b.random << 25;
    b.random ^= b.random >> 27;
    return (uint32_t)((b.random * 0x2545f4914f6cdd1dull) >> 32);
}
inline int random_bit(Block& b, uint32_t bits) {
    for (int skip = next_random(b) % __builtin_popcount(bits); skip > 0; --skip) bits &= bits - 1;
    return lowest_bit(bits);
}

inline Thread* thread_at(Block& b, int warp, int lane) { return &b.threads[warp * 32 + lane]; }

// The ready fiber to run after `t`, or null when there is none.
//   ring        threads in order, one after the other
//   eager       a warp until all its lanes are stuck, then the next warp
//   eager last  the same backwards, the last warp first
//   random      any
AG_NOINLINE Thread* pick_any(Block& b, const Thread& t) {
    if (!b.ready_warps) return nullptr;
    int w = t.warp_index;
    uint32_t own = b.warps[w].ready;
    switch (b.run->launch->mode) {
        case kEager:
            if (own) return thread_at(b, w, bit_after(own, t.lane));
            w = bit_after(b.ready_warps, w);
            return thread_at(b, w, lowest_bit(b.warps[w].ready));
        case kEagerLast:
            if (own) return thread_at(b, w, bit_before(own, t.lane));
            w = bit_before(b.ready_warps, w);
            return thread_at(b, w, highest_bit(b.warps[w].ready));
        case kRandom:
            w = random_bit(b, b.ready_warps);
            return thread_at(b, w, random_bit(b, b.warps[w].ready));
        default:
            if (own >> t.lane >> 1) return thread_at(b, w, bit_after(own, t.lane));
            w = bit_after(b.ready_warps, w);
            return thread_at(b, w, lowest_bit(b.warps[w].ready));
    }
}

// The same, with the frequent answer in line: the next lane.
inline Thread* pick_next(Block& b, Thread& t) {
    uint32_t later = t.warp->ready >> t.lane >> 1;
    if (AG_LIKELY(b.is_in_order && later)) return &t + 1 + lowest_bit(later);
    return pick_any(b, t);
}

inline void switch_to(Thread& from, Thread& to) {
    if (&from == &to) return;
    ++from.block->switches;
    self = &to;
    ag_host_switch(&from.stack_pointer, to.stack_pointer);
}

inline void set_ready(Block& b, int warp, uint32_t lanes) {
    b.warps[warp].ready |= lanes;
    if (b.warps[warp].ready) b.ready_warps |= 1u << warp;
}
inline void set_stuck(Block& b, const Thread& t) {
    Warp& w = *t.warp;
    w.ready &= ~(1u << t.lane);
    if (!w.ready) b.ready_warps &= ~(1u << t.warp_index);
}

[[noreturn]] AG_COLD void fail_deadlock(Thread& t) {
    char waiting[1024];
    list_waiting(*t.block, waiting, sizeof waiting);
    const AsyncHooks* hooks = t.block->hooks;
    size_t used = strlen(waiting);
    if (hooks) hooks->describe_waits(*t.block, waiting + used, sizeof waiting - used);
    Site site = t.waits_in ? t.waits_at : Site{"kernel", 0};
    fail(t, kDeadlock, site, "cannot go on, and no other thread can: threads %s", waiting);
}

// `t` waits until another fiber has made it ready again.
AG_NOINLINE void wait_here(Thread& t, const char* function, Site site) {
    t.waits_in = function;
    t.waits_at = site;
    set_stuck(*t.block, t);
    Thread* next = pick_next(*t.block, t);
    if (AG_UNLIKELY(!next)) fail_deadlock(t);
    switch_to(t, *next);
    t.waits_in = nullptr;
}

// Behind a barrier the last to arrive would always be the first to go on; not in random mode.
inline void let_others_go_first(Thread& t) {
    if (t.block->run->launch->mode == kRandom) switch_to(t, *pick_next(*t.block, t));
}

// ---- barriers and warp collectives: everybody, at one place in the text ----------------------

inline uint64_t next_tick(Thread& t, Site site) {
    if (AG_UNLIKELY(++t.block->tick == kTickLimit))
        fail(t, kLaunch, site, "is behind %llu barriers, more than a stamp can count",
             (unsigned long long)kTickLimit);
    return t.block->tick;
}

inline void refresh_stamps(Thread& t) {
    t.block_since = t.block->since;
    t.warp_since = t.warp->since;
    t.stamp = t.warp_since | (Stamp)t.index << kThreadShift;
}

// Where all lanes of a warp have come to.
inline void close_log(Block& b, int warp) {
    AccessLog& log = b.logs[warp];
    if (AG_UNLIKELY(log.close)) log.close(b, log);
}

static void sync_block(Thread& t, Site site) {
    Block& b = *t.block;
    if (b.live != b.thread_count)
        fail(t, kEndedLane, site, "waits in ag_sync, but %d thread(s) of the block have ended",
             b.thread_count - b.live);
    if (b.arrived == 0) {
        b.barrier_site = site;
        b.first_arrived = t.index;
    } else if (AG_UNLIKELY(!is_same(b.barrier_site, site))) {
        fail(t, kDivergentBarrier, site, "waits in ag_sync, but thread %d in the one at %s:%d",
             b.first_arrived, b.barrier_site.file, b.barrier_site.line);
    }
    if (++b.arrived < b.thread_count) {
        wait_here(t, "ag_sync", site);
    } else {
        b.arrived = 0;
        ++b.meetings;
        b.since = stamp_of(b.index, next_tick(t, site), 0);
        for (int w = 0; w < b.warp_count; ++w) {
            b.warps[w].since = b.since;
            set_ready(b, w, b.warps[w].lanes);
            close_log(b, w);
        }
        if (b.hooks) b.hooks->meet(b, 0, b.thread_count, b.tick);
        let_others_go_first(t);
    }
    refresh_stamps(t);
}

// A rendezvous of all lanes of a warp.  The last lane calls `finish` before anybody goes on.
template <class Finish>
inline void warp_collective(Thread& t, const char* name, Site site, Finish finish) {
    Warp& w = *t.warp;
    uint32_t lane_bit = 1u << t.lane;
    if (AG_UNLIKELY(w.ended))
        fail(t, kEndedLane, site, "is in %s, but thread %d of its warp has ended", name,
             t.warp_index * 32 + lowest_bit(w.ended));
    if (!w.waiting) {
        w.collective = name;
        w.site = site;
        w.first_waiting = t.index;
    } else if (AG_UNLIKELY(w.collective != name || !is_same(w.site, site))) {
        fail(t, kDivergentWarp, site, "is in %s, but thread %d of its warp is in %s at %s:%d", name,
             w.first_waiting, w.collective, w.site.file, w.site.line);
    }
    w.waiting |= lane_bit;
    if (w.waiting != w.lanes) {
        wait_here(t, name, site);
    } else {
        close_log(*t.block, t.warp_index);
        ++t.block->meetings;
        finish(w);
        w.waiting = 0;
        set_ready(*t.block, t.warp_index, w.lanes);
        let_others_go_first(t);
    }
}

constexpr const char* kSyncWarp = "ag_sync_warp";
constexpr const char* kShuffleXor = "ag_shuffle_xor";

static void sync_warp(Thread& t, Site site) {
    warp_collective(t, kSyncWarp, site, [&](Warp& w) {
        Block& b = *t.block;
        w.since = stamp_of(b.index, next_tick(t, site), 0);
        if (b.hooks) b.hooks->meet(b, t.warp_index * 32, __builtin_popcount(w.lanes), b.tick);
    });
    refresh_stamps(t);
}

// Lanes meet, but memory is not ordered: the manual promises that for bar.warp.sync only
// (PTX ISA: shfl.sync), so a shuffle does not move the stamps.
static float shuffle_xor(Thread& t, float x, int mask, Site site) {
    Warp& w = *t.warp;
    int source = t.lane ^ mask;
    if (AG_UNLIKELY(mask < 0 || mask > 31 || !(w.lanes >> source & 1)))
        fail(t, kShuffleLane, site, "is lane %d and shuffles with mask %d: there is no such lane",
             t.lane, mask);
    w.in[t.lane] = x;
    w.source[t.lane] = source;
    warp_collective(t, kShuffleXor, site, [](Warp& w) {
        for (int lane = 0; lane < 32; ++lane)
            if (w.lanes >> lane & 1) w.out[lane] = w.in[w.source[lane]];
    });
    return w.out[t.lane];
}

// ---- the race detector -----------------------------------------------------------------------
//
// Only barriers order memory: `ag_sync` for the block, `ag_sync_warp` for the warp.  An access by
// thread s happened before an access that thread t makes now, in the same block, exactly if
//   - s is t, or
//   - t has passed an ag_sync since: the access's tick is below that of t's last ag_sync, or
//   - s and t share a warp, and t has passed either barrier since.
// A cell keeps the last write and a summary of the reads behind it; because older accesses are
// ordered before those, this loses nothing (as in FastTrack, Flanagan and Freund 2009).
//
// Two events are more than one access of one thread.  A matrix that a warp loads is read by all
// its lanes.  An asynchronous copy writes at some time between its start and the end of the wait
// for it: both count as writes, and whoever meets it in between is in a race (host_mma.h).

enum Readers : Stamp { kOneThread, kSeveralLanes, kSeveralWarps, kSeveralBlocks };
constexpr Stamp kLow = 3;

// Is an access of this block, made by the one thread in `earlier`, ordered before now?
inline bool is_ordered(const Thread& t, Stamp earlier) {
    return earlier < t.block_since || stamp_thread(earlier) == t.index ||
           (stamp_warp(earlier) == t.warp_index && earlier < t.warp_since) ||
           (t.clock && t.block->hooks->is_known(t, earlier));
}

// The same for a summary of reads by threads of this block.
inline bool are_ordered(const Thread& t, Stamp reads) {
    if (reads < t.block_since) return true;
    switch (reads & kLow) {
        case kOneThread: return is_ordered(t, reads);
        case kSeveralLanes: return stamp_warp(reads) == t.warp_index && reads < t.warp_since;
        default: return false;
    }
}

// The summary of `reads` and a read by `t` now.  Reads that are ordered before this one are
// forgotten: whoever is ordered behind this one is ordered behind them.
inline Stamp with_reader(const Thread& t, Stamp reads) {
    if (reads < t.block_since) return t.stamp;
    if ((reads & kLow) >= kSeveralWarps) return reads;
    if (stamp_warp(reads) != t.warp_index) return (reads & ~kLow) | kSeveralWarps;
    if (reads < t.warp_since) return t.stamp;
    if (stamp_thread(reads) == t.index) return reads;
    return (reads & ~kLow) | kSeveralLanes;
}

// The same two for a read by the whole warp of `t`.
inline bool is_ordered_for_warp(const Thread& t, Stamp earlier) {
    return earlier < t.block_since ||
           (stamp_warp(earlier) == t.warp_index && earlier < t.warp_since);
}
inline Stamp with_warp_as_reader(const Thread& t, Stamp reads) {
    Stamp joined = with_reader(t, reads);
    return (joined & kLow) >= kSeveralWarps ? joined : (joined & ~kLow) | kSeveralLanes;
}

// "wrote, with no barrier between" and the like, for either kind of memory.
struct Conflict {
    const char* now;      // "reads" or "writes"
    const char* earlier;  // "wrote" or "read"
    Stamp stamp;
};

AG_COLD void describe_conflict(const Thread& t, Conflict c, char* text, size_t size) {
    int64_t block = stamp_block(c.stamp);
    int thread = stamp_thread(c.stamp);
    Stamp readers = c.earlier[0] == 'r' ? c.stamp & kLow : (Stamp)kOneThread;
    if (readers == kSeveralBlocks) {
        snprintf(text, size, "which several blocks %s", c.earlier);
    } else if (block != t.block->index) {
        snprintf(text, size, "which thread %d of block %lld %s", thread, (long long)block,
                 c.earlier);
    } else {
        snprintf(text, size, "which thread %d%s %s with no %s between", thread,
                 readers == kOneThread ? "" : " and others", c.earlier,
                 readers != kSeveralWarps && stamp_warp(c.stamp) == t.warp_index
                     ? "ag_sync_warp or ag_sync" : "ag_sync");
    }
}

// ---- shared memory ---------------------------------------------------------------------------

// The cell of an element is that of its first byte.  Cells lie in four planes, by the byte's
// place in its word, so that arrays of words touch one dense plane only.
inline Cell& cell_at(const Thread& t, uint32_t address) {
    return t.cells[(address & 3) * t.cell_plane + (address >> 2)];
}

// The size of the element that a cell describes, in the low bits of `written`.
constexpr Stamp size_code(size_t bytes) { return bytes == 4 ? 3 : bytes; }
inline uint32_t written_bytes(Stamp written) {
    return (written & kLow) == 3 ? 4 : (uint32_t)(written & kLow);
}

// An array as messages name it; with elements of 0 bytes there is none, only an address.
struct SharedArray {
    uint32_t first_byte, element_bytes;
};
constexpr SharedArray kByAddress = {0, 0};

AG_COLD void name_element(uint32_t address, SharedArray a, char* text, size_t size) {
    if (a.element_bytes)
        snprintf(text, size, "element %u of the shared array at byte %u",
                 (address - a.first_byte) / a.element_bytes, a.first_byte);
    else
        snprintf(text, size, "byte %u of shared memory", address);
}

[[noreturn]] AG_COLD void fail_shared_race(Thread& t, uint32_t address, SharedArray a,
                                           Conflict c, Site site) {
    char element[80], other[160];
    name_element(address, a, element, sizeof element);
    describe_conflict(t, c, other, sizeof other);
    fail(t, kSharedRace, site, "%s %s, %s", c.now, element, other);
}

[[noreturn]] AG_COLD void fail_uninitialised(Thread& t, uint32_t address, SharedArray a,
                                             Site site) {
    char element[80];
    name_element(address, a, element, sizeof element);
    fail(t, kUninitialisedRead, site,
         "reads %s, which no thread of the block has written so far (or a barrier is missing)",
         element);
}

// Is a copy on its way to the word that this is the cell of?
inline bool is_on_its_way(const Thread& t, Stamp written) {
    return written >= t.block_first && !(written & kLow);
}

AG_COLD void name_copy(const Thread& t, const Thread& owner, const Copy& copy, char* text,
                       size_t size) {
    int used = &t == &owner ? snprintf(text, size, "its own copy")
                            : snprintf(text, size, "the copy of thread %d", owner.index);
    snprintf(text + used, size - used, " at %s:%d%s", copy.site.file, copy.site.line,
             copy.group == owner.copies->groups ? ", in no group," : "");
}

[[noreturn]] AG_COLD void fail_on_its_way(Thread& t, uint32_t address, Stamp start,
                                          Access access, SharedArray array, Site site) {
    char element[80], name[200] = "a copy";
    name_element(address, array, element, sizeof element);
    const Thread& owner = t.block->threads[stamp_thread(start)];
    for (int i = owner.copies->first; i < owner.copies->count; ++i) {
        const Copy& copy = owner.copies->items[i];
        if (copy.place == (address & ~15u)) name_copy(t, owner, copy, name, sizeof name);
    }
    fail(t, kSharedRace, site, "%s %s, where %s is still on its way",
         access == kWrite ? "writes" : "reads", element, name);
}

// One piece of an access: a cell that was written in this block.
inline void check_piece(Thread& t, const Cell& cell, uint32_t address, Access access,
                        SharedArray array, Site site) {
    const char* now = access == kWrite ? "writes" : "reads";
    if (!(access == kWarpRead ? is_ordered_for_warp(t, cell.written)
                              : is_ordered(t, cell.written)))
        fail_shared_race(t, address, array, {now, "wrote", cell.written}, site);
    if (access == kWrite && !are_ordered(t, cell.read))
        fail_shared_race(t, address, array, {now, "read", cell.read}, site);
}

// The whole rule for one access of 1, 2 or 4 bytes, also where elements of another size were
// there before: a larger one is cut up, smaller ones are each looked at and then covered.
AG_NOINLINE void check_shared(Thread& t, uint32_t address, uint32_t bytes, Access access,
                              SharedArray array, Site site) {
    if (t.clock) return t.block->hooks->check_shared(t, address, bytes, access, array, site);
    Stamp word = cell_at(t, address & ~3u).written;
    if (is_on_its_way(t, word)) fail_on_its_way(t, address, word, access, array, site);
    for (uint32_t size = 4; size > bytes; size /= 2) {
        uint32_t first = address & ~(size - 1);
        Cell whole = cell_at(t, first);
        if (whole.written < t.block_first || written_bytes(whole.written) != size) continue;
        for (uint32_t a = first; a < first + size; a += bytes)
            cell_at(t, a) = {(whole.written & ~kLow) | size_code(bytes), whole.read};
    }
    for (uint32_t a = address; a < address + bytes;) {
        Cell& cell = cell_at(t, a);
        if (cell.written < t.block_first) {
            if (access != kWrite) fail_uninitialised(t, address, array, site);
            a += 1;
            continue;
        }
        check_piece(t, cell, address, access, array, site);
        a += written_bytes(cell.written);
        if (access == kWrite)
            cell = {0, 0};
        else if (access == kWarpRead)
            cell.read = with_warp_as_reader(t, cell.read);
        else
            cell.read = with_reader(t, cell.read);
    }
    if (access == kWrite) cell_at(t, address) = {t.stamp | size_code(bytes), 0};
}

// The frequent cases, decided in line: written before the last ag_sync, as the same size.
template <size_t bytes>
AG_DEVICE void note_shared_read(Thread& t, uint32_t address, SharedArray array, Site site) {
    Cell& cell = cell_at(t, address);
    Stamp written = cell.written, read = cell.read;
    bool is_plain = written >= t.block_first && written < t.block_since &&
                    (written & kLow) == size_code(bytes);
    if (AG_UNLIKELY(!is_plain)) return check_shared(t, address, bytes, kRead, array, site);
    bool is_known = read == t.stamp || (read >= t.block_since && (read & kLow) == kSeveralWarps);
    if (!is_known) cell.read = with_reader(t, read);
}
template <size_t bytes>
AG_DEVICE void note_shared_write(Thread& t, uint32_t address, SharedArray array, Site site) {
    Cell& cell = cell_at(t, address);
    Stamp written = cell.written;
    bool is_plain = written >= t.block_first && written < t.block_since &&
                    (written & kLow) == size_code(bytes) && cell.read < t.block_since;
    if (AG_UNLIKELY(!is_plain)) return check_shared(t, address, bytes, kWrite, array, site);
    cell.written = t.stamp | size_code(bytes);
}

[[noreturn]] AG_COLD void fail_shared_bounds(Thread& t, long long index, int count,
                                             uint32_t first_byte, Site site) {
    fail(t, kSharedBounds, site, "uses element %lld of the shared array at byte %u, which has %d "
         "elements", index, first_byte, count);
}

// One element of a shared array, so that reads and writes can be told apart.  It lives for one
// expression: take the value with `float x = array[i]`, never with `auto`.
// What storing a number adds to `Counters::notes`: integers say what is to be done, floats do not.
template <class T> inline uint64_t note_of(T, uint64_t) { return 0; }
inline uint64_t note_of(uint32_t x, uint64_t byte) { return ((uint64_t)x + 1) * (2 * byte + 1); }
inline uint64_t note_of(int32_t x, uint64_t byte) { return note_of((uint32_t)x, byte); }

template <class T> struct Element {
    Thread* thread;
    T* place;
    SharedArray array;
    Site site;

    static constexpr size_t kPieceBytes = sizeof(T) < 4 ? sizeof(T) : 4;

    AG_DEVICE T load() const {
        Thread& t = *thread;
        ++t.counters.shared_reads;
        if (AG_LIKELY(t.cells != nullptr)) {
            uint32_t address = (uint32_t)((unsigned char*)place - t.shared);
            for (uint32_t piece = 0; piece < sizeof(T); piece += kPieceBytes)
                note_shared_read<kPieceBytes>(t, address + piece, array, site);
        }
        T value;
        memcpy(&value, place, sizeof value);
        return value;
    }
    AG_DEVICE void store(T value) const {
        Thread& t = *thread;
        ++t.counters.shared_writes;
        t.counters.notes += note_of(value, (uint64_t)((unsigned char*)place - t.shared));
        if (AG_LIKELY(t.cells != nullptr)) {
            uint32_t address = (uint32_t)((unsigned char*)place - t.shared);
            for (uint32_t piece = 0; piece < sizeof(T); piece += kPieceBytes)
                note_shared_write<kPieceBytes>(t, address + piece, array, site);
        }
        memcpy(place, &value, sizeof value);
    }

    AG_DEVICE operator T() && { return load(); }
    AG_DEVICE void operator=(T x) && { store(x); }
    AG_DEVICE void operator=(Element&& x) && { store(x.load()); }
    AG_DEVICE void operator+=(T x) && { store(load() + x); }
    AG_DEVICE void operator-=(T x) && { store(load() - x); }
    AG_DEVICE void operator*=(T x) && { store(load() * x); }
};

// An index, and the line it was written on: the conversion happens at the place of the access.
struct Index {
    long long value;
    Site site;

    AG_DEVICE Index(long long i, AG_SITE) : value(i), site{file, line} {}
    template <class T>
    AG_DEVICE Index(Element<T>&& i, AG_SITE) : value(i.load()), site{file, line} {}
};

// ---- global memory ---------------------------------------------------------------------------

[[noreturn]] AG_COLD void fail_global_bounds(Thread& t, uintptr_t address, size_t bytes,
                                             bool is_write, Site site) {
    const Run& run = *t.block->run;
    const char* verb = is_write ? "writes" : "reads";
    const Range* nearest = nullptr;
    uintptr_t least = UINTPTR_MAX;
    for (int i = 0; i < run.launch->range_count; ++i) {
        const Range& r = run.ranges[i];
        uintptr_t distance = address < r.begin ? r.begin - address
                             : address >= r.end ? address - r.end : 0;
        if (distance < least) nearest = &r, least = distance;
    }
    if (!nearest)
        fail(t, kGlobalBounds, site, "%s global memory, but no array was given", verb);
    fail(t, kGlobalBounds, site, "%s %zu bytes at byte %lld of %s, which has %lld bytes", verb,
         bytes, (long long)(address - nearest->begin), nearest->name,
         (long long)(nearest->end - nearest->begin));
}

[[noreturn]] AG_COLD void fail_global_race(Thread& t, const Range& r, size_t element,
                                           Conflict c, Site site) {
    char other[160];
    describe_conflict(t, c, other, sizeof other);
    fail(t, kGlobalRace, site, "%s byte %zu of %s, %s", c.now, element * r.element_bytes, r.name,
         other);
}

// Blocks run at the same time, so cells of global memory are atomic.  Of a writer and a reader in
// different blocks at least one sees the other: each first marks the cell and then looks.
inline void note_global_write(Thread& t, const Range& r, size_t element, Site site) {
    Cell& cell = r.cells[element];
    Stamp written = __atomic_exchange_n(&cell.written, t.stamp, __ATOMIC_SEQ_CST);
    Stamp reads = __atomic_load_n(&cell.read, __ATOMIC_SEQ_CST);
    int block = t.block->index;
    if (written && (stamp_block(written) != block || !is_ordered(t, written)))
        fail_global_race(t, r, element, {"writes", "wrote", written}, site);
    if (reads && ((reads & kLow) == kSeveralBlocks || stamp_block(reads) != block ||
                  !are_ordered(t, reads)))
        fail_global_race(t, r, element, {"writes", "read", reads}, site);
}

inline void note_global_read(Thread& t, const Range& r, size_t element, Site site) {
    Cell& cell = r.cells[element];
    int block = t.block->index;
    Stamp reads = __atomic_load_n(&cell.read, __ATOMIC_SEQ_CST), joined;
    do {
        if (!reads)
            joined = t.stamp;
        else if ((reads & kLow) == kSeveralBlocks || stamp_block(reads) != block)
            joined = reads | kSeveralBlocks;
        else
            joined = with_reader(t, reads);
    } while (!__atomic_compare_exchange_n(&cell.read, &reads, joined, false, __ATOMIC_SEQ_CST,
                                          __ATOMIC_SEQ_CST));
    Stamp written = __atomic_load_n(&cell.written, __ATOMIC_SEQ_CST);
    if (written && (stamp_block(written) != block || !is_ordered(t, written)))
        fail_global_race(t, r, element, {"reads", "wrote", written}, site);
}

// The array that an access is in.
AG_NOINLINE const Range& check_global(Thread& t, const void* p, size_t bytes, bool is_write,
                                      Site site) {
    uintptr_t address = (uintptr_t)p;
    Block& b = *t.block;
    const Range* ranges = b.run->ranges;
    auto holds = [=](const Range& r) { return address >= r.begin && address + bytes <= r.end; };
    int found = b.recent_range, count = b.run->launch->range_count;
    if (!(found < count && holds(ranges[found]))) {
        found = 0;
        while (found < count && !holds(ranges[found])) ++found;
        if (found == count) fail_global_bounds(t, address, bytes, is_write, site);
        b.recent_range = found;
    }
    const Range& r = ranges[found];
    if (address & (bytes - 1))
        fail(t, kMisaligned, site, "uses %zu bytes at byte %zu of %s: the address is not aligned",
             bytes, (size_t)(address - r.begin), r.name);
    if (is_write && !r.is_writable)
        fail(t, kReadOnly, site, "writes byte %zu of %s, which is read-only",
             (size_t)(address - r.begin), r.name);
    if (!r.cells) return r;
    if (AG_UNLIKELY(is_write && b.writable_sources)) b.check_sources(t, address, bytes, r, site);
    if (bytes < r.element_bytes)
        fail(t, kMisaligned, site, "uses %zu byte(s) of %s, whose elements have %zu", bytes, r.name,
             r.element_bytes);
    size_t element = (address - r.begin) / r.element_bytes;
    size_t last = (address + bytes - 1 - r.begin) / r.element_bytes;
    for (; element <= last; ++element)
        if (is_write)
            note_global_write(t, r, element, site);
        else
            note_global_read(t, r, element, site);
    return r;
}

// ---- what the compiler checks: local arrays and integers -------------------------------------
//
// With -fsanitize=... the compiler calls one of these handlers, which it expects to find in a
// library of its own; here each is a fault.

struct CompilerSite {
    const char* file;
    uint32_t line, column;
};

AG_COLD void fail_compiled_check(const void* data, Fault fault, const char* what) {
    if (!self) abort();  // this header's own mistake
    const CompilerSite& site = *(const CompilerSite*)data;  // the first member of all of them
    fail(*self, fault, {site.file, (int)site.line}, "%s", what);
}

#define AG_COMPILED_CHECK(name, fault, what)                                       \
    extern "C" void __ubsan_handle_##name(void* data, uintptr_t, uintptr_t) {      \
        fail_compiled_check(data, fault, what);                                    \
    }
AG_COMPILED_CHECK(out_of_bounds, kLocalBounds, "uses an element outside a local array")
AG_COMPILED_CHECK(add_overflow, kInteger, "adds two integers beyond their type")
AG_COMPILED_CHECK(sub_overflow, kInteger, "subtracts two integers beyond their type")
AG_COMPILED_CHECK(mul_overflow, kInteger, "multiplies two integers beyond their type")
AG_COMPILED_CHECK(negate_overflow, kInteger, "negates the least integer of its type")
AG_COMPILED_CHECK(divrem_overflow, kInteger, "divides by zero, or the least integer by -1")
AG_COMPILED_CHECK(shift_out_of_bounds, kInteger, "shifts an integer out of its type")
AG_COMPILED_CHECK(float_cast_overflow, kInteger, "makes an integer of a float that is too large")

// ---- the run: workers take blocks in order until none is left or one has failed ---------------

static void* map_memory(size_t bytes) {  // zeros, and only the pages that are touched cost anything
    void* p = mmap(nullptr, bytes ? bytes : 1, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return p == MAP_FAILED ? nullptr : p;
}
static void unmap_memory(void* p, size_t bytes) {
    if (p) munmap(p, bytes ? bytes : 1);
}

// The kernel returned in this fiber.
[[noreturn]] static void end_thread(Thread& t) {
    Block& b = *t.block;
    Warp& w = *t.warp;
    if (w.waiting)
        fail(t, kEndedLane, w.site, "has ended, but thread %d of its warp waits in %s",
             w.first_waiting, w.collective);
    if (b.arrived)
        fail(t, kEndedLane, b.barrier_site, "has ended, but thread %d waits in ag_sync",
             b.first_arrived);
    if (t.copies->count) {
        const Copy& copy = t.copies->items[t.copies->first];
        fail(t, kUnfinishedCopy, copy.site, "has ended, but its copy is still on its way%s",
             copy.group == t.copies->groups ? ", in no group" : "");
    }
    if (b.hooks) b.hooks->end_thread(t);
    w.ended |= 1u << t.lane;
    --b.live;
    set_stuck(b, t);
    Thread* next = pick_next(b, t);
    void* abandoned;
    if (next) {
        ++b.switches;
        self = next;
        ag_host_switch(&abandoned, next->stack_pointer);
    } else if (b.live) {
        fail_deadlock(t);
    } else {
        if (b.hooks) b.hooks->end_block(t);
        ag_host_switch(&abandoned, b.home);
    }
    __builtin_unreachable();
}

static void start_thread() {
    Thread& t = *self;
    t.block->run->kernel(t.block->run->args);
    end_thread(t);
}

static bool allocate_block(Block& b, Run& run) {
    const ag_launch& launch = *run.launch;
    b.run = &run;
    b.thread_count = launch.threads;
    b.warp_count = (launch.threads + 31) / 32;
    b.is_in_order = launch.mode == kRing || launch.mode == kEager;
    b.threads = (Thread*)map_memory(launch.threads * sizeof(Thread));
    b.shared = (unsigned char*)map_memory(launch.shared_bytes);
    b.stacks_bytes = launch.threads * kStackBytes;
    b.stacks = (unsigned char*)map_memory(b.stacks_bytes);
    b.copies = (Copies*)map_memory(launch.threads * sizeof(Copies));
    b.logs = (AccessLog*)map_memory(b.warp_count * sizeof(AccessLog));
    if (!b.threads || !b.shared || !b.stacks || !b.copies || !b.logs) return false;
    // Where the system has no room for so many guards (very many threads times workers) the run
    // goes on without.
    for (int i = 0; i < launch.threads; ++i)
        mprotect(b.stacks + i * kStackBytes, kGuardBytes, PROT_NONE);
    if (launch.is_checked) {
        size_t plane = (launch.shared_bytes + 3) / 4;
        b.cells = (Cell*)map_memory(4 * plane * sizeof(Cell));
        if (!b.cells) return false;
    }
    return true;
}

static void free_block(Block& b) {
    const ag_launch& launch = *b.run->launch;
    if (b.async) b.free_async(b.async);
    for (int i = 0; b.copies && i < b.thread_count; ++i) free(b.copies[i].items);
    for (int w = 0; b.logs && w < b.warp_count; ++w) {
        for (int l = 0; l < b.logs[w].count; ++l) free(b.logs[w].lines[l].accesses);
        free(b.logs[w].lines);
    }
    unmap_memory(b.copies, launch.threads * sizeof(Copies));
    unmap_memory(b.logs, b.warp_count * sizeof(AccessLog));
    unmap_memory(b.threads, launch.threads * sizeof(Thread));
    unmap_memory(b.shared, launch.shared_bytes);
    unmap_memory(b.stacks, b.stacks_bytes);
    unmap_memory(b.cells, 4 * ((launch.shared_bytes + 3) / 4) * sizeof(Cell));
}

static void reset_block(Block& b, int index) {
    const ag_launch& launch = *b.run->launch;
    b.index = index;
    b.live = b.thread_count;
    b.arrived = 0;
    b.tick = 0;
    b.since = stamp_of(index, 0, 0);
    b.random = (launch.seed + 1) * 0x9e3779b97f4a7c15ull + (uint64_t)index * 0xbf58476d1ce4e5b9ull;
    if (!b.random) b.random = 1;
    b.fault = kNone;
    b.ready_warps = 0;
    b.writable_sources = 0;
    b.hooks = nullptr;
    memset(b.shared, 0xff, launch.shared_bytes);  // a NaN in every float format
    memset(b.threads, 0, b.thread_count * sizeof(Thread));
    for (int w = 0; w < b.warp_count; ++w) {
        int lanes = b.thread_count - w * 32;
        memset(&b.warps[w], 0, sizeof(Warp));
        b.warps[w].lanes = lanes >= 32 ? ~0u : (1u << lanes) - 1;
        b.warps[w].since = b.since;
        set_ready(b, w, b.warps[w].lanes);
    }
    for (int i = 0; i < b.thread_count; ++i) {
        Thread& t = b.threads[i];
        t.index = i;
        t.lane = i % 32;
        t.warp_index = i / 32;
        t.warp = &b.warps[i / 32];
        t.block = &b;
        t.shared = b.shared;
        t.cells = b.cells;
        t.cell_plane = (launch.shared_bytes + 3) / 4;
        t.shared_bytes = (uint32_t)launch.shared_bytes;
        t.copies = &b.copies[i];
        t.copies->first = t.copies->count = 0;
        t.copies->groups = 0;
        t.block_first = b.since;
        refresh_stamps(t);
        unsigned char* end = b.stacks + (i + 1) * kStackBytes;
        end -= i * kStackStagger % kStackStaggerSpan;
        if (launch.is_checked) memset(end - kStackPoison, 0xff, kStackPoison);
        t.stack_pointer = first_stack_pointer(end, start_thread);
    }
}

static void run_block(Block& b, int index) {
    reset_block(b, index);
    Thread* first = &b.threads[0];
    if (b.run->launch->mode == kEagerLast) first = &b.threads[b.thread_count - 1];
    if (b.run->launch->mode == kRandom) first = pick_next(b, *first);
    self = first;
    ag_host_switch(&b.home, first->stack_pointer);
    self = nullptr;
    for (int w = 0; w < b.warp_count; ++w) close_log(b, w);
}

static void add_counters(Block& b) {
    for (int i = 0; i < b.thread_count; ++i) {
        const Counters& c = b.threads[i].counters;
        b.counters.index_reads += c.index_reads;
        b.counters.notes += c.notes;
        b.counters.shared_reads += c.shared_reads;
        b.counters.shared_writes += c.shared_writes;
        b.counters.global_loads += c.global_loads;
        b.counters.global_stores += c.global_stores;
    }
}

// Blocks are handed out in order and a worker finishes the one it has, so among the blocks that
// fail the first is reported, whatever the workers' speed.
static void report_fault(Run& run, const Block& b) {
    __atomic_store_n(&run.is_stopped, 1, __ATOMIC_RELAXED);
    pthread_mutex_lock(&run.lock);
    ag_report& report = *run.report;
    if (report.fault == kNone || b.index < report.block) {
        report.fault = b.fault;
        report.block = b.index;
        report.thread = b.fault_thread;
        report.line = b.fault_line;
        memcpy(report.text, b.fault_text, sizeof report.text);
    }
    pthread_mutex_unlock(&run.lock);
}

static void* work(void* argument) {
    Run& run = *(Run*)argument;
    Block* b = (Block*)map_memory(sizeof(Block));
    if (!b) return argument;
    bool is_ready = allocate_block(*b, run);
    while (is_ready && !__atomic_load_n(&run.is_stopped, __ATOMIC_RELAXED)) {
        int index = __atomic_fetch_add(&run.next_block, 1, __ATOMIC_RELAXED);
        if (index >= run.launch->grid) break;
        run_block(*b, index);
        add_counters(*b);
        if (b->fault != kNone) report_fault(run, *b);
    }
    pthread_mutex_lock(&run.lock);
    run.report->switches += b->switches;
    run.report->meetings += b->meetings;
    run.report->index_reads += b->counters.index_reads;
    run.report->notes = (int64_t)((uint64_t)run.report->notes + b->counters.notes);
    run.report->shared_reads += b->counters.shared_reads;
    run.report->shared_writes += b->counters.shared_writes;
    run.report->global_loads += b->counters.global_loads;
    run.report->global_stores += b->counters.global_stores;
    run.report->shared_wavefronts += b->wavefronts;
    run.report->shared_wavefronts_least += b->wavefronts_least;
    pthread_mutex_unlock(&run.lock);
    free_block(*b);
    unmap_memory(b, sizeof(Block));
    return is_ready ? nullptr : argument;  // not null: it had no memory
}

AG_COLD __attribute__((format(printf, 2, 3))) void refuse(ag_report& report, const char* format,
                                                          ...) {
    va_list values;
    va_start(values, format);
    report.fault = kLaunch;
    vsnprintf(report.text, sizeof report.text, format, values);
    va_end(values);
}

static bool check_launch(const ag_launch& launch, int threads, size_t args_bytes,
                         ag_report& report) {
    if (launch.args_bytes != (int64_t)args_bytes)
        refuse(report, "the kernel's arguments take %zu bytes, %lld were given", args_bytes,
               (long long)launch.args_bytes);
    else if (launch.threads != threads || threads < 1 || threads > kMaxThreads)
        refuse(report, "the kernel has %d threads a block (at most %d), launched with %d", threads,
               kMaxThreads, launch.threads);
    else if (launch.grid < 0 || (uint64_t)launch.grid >= kBlockLimit)
        refuse(report, "a grid of %d blocks is outside 0 to %lld", launch.grid,
               (long long)kBlockLimit - 1);
    else if (launch.shared_bytes < 0 || launch.shared_bytes > INT32_MAX)
        refuse(report, "%lld bytes of shared memory", (long long)launch.shared_bytes);
    return report.fault == kNone;
}

static bool allocate_ranges(Run& run) {
    const ag_launch& launch = *run.launch;
    run.ranges = (Range*)calloc(launch.range_count + 1, sizeof(Range));
    if (!run.ranges) return false;
    for (int i = 0; i < launch.range_count; ++i) {
        const ag_range& given = launch.ranges[i];
        Range& r = run.ranges[i];
        r = {given.begin, given.end, given.name, given.is_writable != 0,
             given.element_bytes > 0 ? (size_t)given.element_bytes : 1, nullptr, 0};
        if (!launch.is_checked || !r.is_writable || r.end <= r.begin) continue;
        r.cells_bytes = ((r.end - r.begin) / r.element_bytes + 1) * sizeof(Cell);
        r.cells = (Cell*)map_memory(r.cells_bytes);
        if (!r.cells) return false;
    }
    return true;
}

static void run_grid(const ag_launch& launch, int threads, size_t args_bytes, const void* args,
                     void (*kernel)(const void*), ag_report& report) {
    memset(&report, 0, sizeof report);
    if (launch.struct_bytes != (int64_t)sizeof(ag_launch))
        return refuse(report, "this library was built for another version of attngen");
    if (!check_launch(launch, threads, args_bytes, report)) return;
    Run run = {};
    run.launch = &launch;
    run.kernel = kernel;
    run.args = args;
    run.report = &report;
    pthread_mutex_init(&run.lock, nullptr);
    bool has_memory = allocate_ranges(run);

    constexpr int kMaxWorkers = 256;
    pthread_t helpers[kMaxWorkers];
    int started = 0;
    if (has_memory) {
        // This OS thread works too; one that cannot be started is done without.
        while (started + 1 < launch.workers && started < kMaxWorkers && started + 1 < launch.grid &&
               pthread_create(&helpers[started], nullptr, work, &run) == 0)
            ++started;
        has_memory = work(&run) == nullptr;
        for (int i = 0; i < started; ++i) {
            void* failure;
            pthread_join(helpers[i], &failure);
            has_memory = has_memory && !failure;
        }
    }
    if (!has_memory && report.fault == kNone)
        refuse(report, "memory ran out: %d threads a block, %d workers, checks %s", launch.threads,
               started + 1, launch.is_checked ? "on" : "off");
    for (int i = 0; run.ranges && i < launch.range_count; ++i)
        unmap_memory(run.ranges[i].cells, run.ranges[i].cells_bytes);
    free(run.ranges);
    pthread_mutex_destroy(&run.lock);
}

// What AG_KERNEL exports: the arguments are copied to where their type may lie.
template <class Args, void (*kernel)(const Args&)>
void run_kernel(int threads, const void* args, const ag_launch* launch, ag_report* report) {
    alignas(Args) unsigned char copy[sizeof(Args)];
    if (launch->args_bytes == (int64_t)sizeof(Args)) memcpy(copy, args, sizeof(Args));
    run_grid(*launch, threads, sizeof(Args), copy,
             [](const void* p) { kernel(*(const Args*)p); }, *report);
}

inline uint32_t bits_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}
inline float float_of(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

template <class T> struct Same { typedef T type; };  // keeps a parameter out of deduction

}  // namespace ag_host

#pragma GCC visibility pop

// ---- the device functions: the same names and meanings as in the generated text ---------------

typedef long long ag_i64;
typedef unsigned int ag_u32;
typedef unsigned short ag_u16;

struct alignas(2) ag_fp16 { ag_u16 bits; };
struct alignas(2) ag_bf16 { ag_u16 bits; };

#define AG_KERNEL(threads, name, Args)                                                            \
    static void name(const Args& args);                                                           \
    extern "C" __attribute__((visibility("default"))) void name##_cpu(                            \
        const void* args, const ag_launch* launch, ag_report* report) {                           \
        ag_host::run_kernel<Args, name>(threads, args, launch, report);                           \
    }                                                                                             \
    static void name(const Args& args)
#define AG_SHARED_MEMORY(name) unsigned char* const name = ag_host::self->shared
#define AG_INFINITY __builtin_inff()
#define AG_NAN ag_host::float_of(0x7fffffffu)

AG_DEVICE int ag_thread() {
    ag_host::Thread& t = *ag_host::self;
    ++t.counters.index_reads;
    return t.index;
}
AG_DEVICE int ag_block() { return ag_host::self->block->index; }

AG_DEVICE void ag_sync(AG_SITE) { ag_host::sync_block(*ag_host::self, {file, line}); }
AG_DEVICE void ag_sync_warp(AG_SITE) { ag_host::sync_warp(*ag_host::self, {file, line}); }
AG_DEVICE float ag_shuffle_xor(float x, int mask, AG_SITE) {
    return ag_host::shuffle_xor(*ag_host::self, x, mask, {file, line});
}

template <class T> struct ag_shared {
    T* data;
    int count;
    ag_host::SharedArray array;
    ag_host::Thread* thread;

    AG_DEVICE ag_shared(unsigned char* buffer, int offset, int count, AG_SITE)
        : data((T*)(buffer + offset)), count(count), thread(ag_host::self) {
        long long first = buffer - thread->shared + (long long)offset;
        long long bytes = (long long)count * (long long)sizeof(T);
        long long limit = thread->block->run->launch->shared_bytes;
        if (first < 0 || count < 0 || first + bytes > limit)
            ag_host::fail(*thread, ag_host::kSharedBounds, {file, line},
                          "declares a shared array at bytes %lld to %lld of a buffer of %lld",
                          first, first + bytes, limit);
        if (first % (long long)alignof(T))
            ag_host::fail(*thread, ag_host::kMisaligned, {file, line},
                          "declares a shared array at byte %lld, whose elements are aligned to %zu",
                          first, alignof(T));
        array = {(uint32_t)first, (uint32_t)sizeof(T)};
    }
    AG_DEVICE ag_host::Element<T> operator[](ag_host::Index i) const {
        if (AG_UNLIKELY((unsigned long long)i.value >= (unsigned long long)count))
            ag_host::fail_shared_bounds(*thread, i.value, count, array.first_byte, i.site);
        return {thread, data + i.value, array, i.site};
    }
};

template <class T> AG_DEVICE T ag_load(const T* p, AG_SITE) {
    ag_host::Thread& t = *ag_host::self;
    ++t.counters.global_loads;
    ag_host::check_global(t, p, sizeof(T), false, {file, line});
    return *p;
}
template <class T> AG_DEVICE void ag_store(T* p, typename ag_host::Same<T>::type x, AG_SITE) {
    ag_host::Thread& t = *ag_host::self;
    ++t.counters.global_stores;
    ag_host::check_global(t, p, sizeof(T), true, {file, line});
    *p = x;
}

// Conversions, bit for bit those of the GPU (compared on an H200): to nearest even; the NaN that
// comes out is 0x7fff or 0x7fffffff, except that a bf16 keeps its bits.
AG_DEVICE float ag_to_float(float x) { return x; }
AG_DEVICE float ag_to_float(ag_fp16 x) {
    ag_u32 sign = (ag_u32)(x.bits & 0x8000u) << 16;
    ag_u32 exponent = x.bits >> 10 & 31u, fraction = x.bits & 1023u;
    if (exponent == 0) {
        ag_u32 magnitude = ag_host::bits_of((float)fraction * 0x1p-24f);
        return ag_host::float_of(sign | magnitude);
    }
    if (exponent == 31) return fraction ? AG_NAN : ag_host::float_of(sign | 0x7f800000u);
    return ag_host::float_of(sign | (exponent + 112) << 23 | fraction << 13);
}
AG_DEVICE float ag_to_float(ag_bf16 x) { return ag_host::float_of((ag_u32)x.bits << 16); }

template <class T> AG_DEVICE T ag_from_float(float x);
template <> AG_DEVICE float ag_from_float<float>(float x) { return x; }
template <> AG_DEVICE ag_fp16 ag_from_float<ag_fp16>(float x) {
    ag_u32 bits = ag_host::bits_of(x), sign = bits >> 16 & 0x8000u, size = bits & 0x7fffffffu;
    if (size > 0x7f800000u) return {0x7fff};
    ag_u32 half;
    if (size >= 0x47800000u)       // 2^16 and more
        half = 0x7c00u;
    else if (size < 0x38800000u)   // below 2^-14: adding 0.5 leaves a multiple of 2^-24, rounded
        half = ag_host::bits_of(ag_host::float_of(size) + 0.5f) - 0x3f000000u;
    else                           // rounding up carries into the exponent, and so to infinity
        half = (size - 0x38000000u + 0xfffu + (size >> 13 & 1u)) >> 13;
    return {(ag_u16)(sign | half)};
}
template <> AG_DEVICE ag_bf16 ag_from_float<ag_bf16>(float x) {
    ag_u32 bits = ag_host::bits_of(x);
    if (x != x) return {0x7fff};
    return {(ag_u16)((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16)};
}

// The host library's functions; they differ from the GPU's in the last bits.
AG_DEVICE float ag_fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
AG_DEVICE float ag_exp(float x) { return __builtin_expf(x); }
AG_DEVICE float ag_exp2(float x) { return __builtin_exp2f(x); }
AG_DEVICE float ag_log(float x) { return __builtin_logf(x); }
AG_DEVICE float ag_log2(float x) { return __builtin_log2f(x); }
AG_DEVICE float ag_sqrt(float x) { return __builtin_sqrtf(x); }
AG_DEVICE float ag_rsqrt(float x) { return 1.0f / __builtin_sqrtf(x); }
AG_DEVICE float ag_tanh(float x) { return __builtin_tanhf(x); }
AG_DEVICE float ag_floor(float x) { return __builtin_floorf(x); }

#endif  // AG_HOST_H
