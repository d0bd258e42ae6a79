// The functions of templates/common/wgmma.cuh and wgmma.cu.j2 for a CPU; included behind
// host_mma.h.
//
// Sections: the state; clocks; shared memory under clocks; barriers in memory; barriers by number;
// tensor maps; tensor loads; tensor stores; warp groups; products; registers; the end; the device
// functions.
//
// With barriers in memory some threads are ordered and others are not, so one tick for the block is
// not enough: from the first of these functions on, a block keeps a clock for each thread.
//
// Tensor copies and products read and write shared memory by another way than threads do (the
// async proxy).  Here, what a thread has written is ready for them once the thread itself has been
// at ag_async_fence and a barrier orders that before them.  A fence on the other side of the
// barrier, by who starts the copy, is not taken for one.  Where threads have only read what a
// tensor load overwrites, the barrier is enough.
//
// Clusters are not run: a block is alone in its cluster.
#ifndef AG_HOST_WGMMA_H
#define AG_HOST_WGMMA_H

#pragma GCC visibility push(hidden)

namespace ag_host {

// ---- the state ----------------------------------------------------------------------------------

constexpr int kMostBarriers = 64, kNamedBarriers = 16;
constexpr int kMostGroups = kMaxThreads / 128;
constexpr uint32_t kMostArrivals = (1u << 20) - 1;  // PTX ISA: mbarrier, valid range of counts

// What is known of 16 bytes of shared memory, beside their cells.
struct Granule {
    uint32_t barrier;  // 1 + the number of that where the last tensor load of them arrives; 0: none
    uint32_t phase;    // in this one
    Site site;         // of the load
    int thread;
    bool is_touched;   // by threads, since that load
    uint32_t stores;   // on their way, that read them
    uint32_t products[kMostGroups];  // 1 + the number of the group's last product that reads them
};

// A barrier in memory.  `bytes` are those expected that have not arrived.
struct Barrier {
    uint32_t place, phase;
    int count, pending;
    int64_t bytes;
    Stamp made;
    uint64_t fenced;       // the tick of the fence behind the init; 0: none yet
    uint32_t seen;         // phases that a thread has waited for
    uint32_t loaded;       // 1 + the last phase in which a load arrives
    Site load_site;
    int load_thread;
    uint32_t waiting[kMaxWarps];
    int waiting_count;
    uint32_t* arrived;     // clocks: joined from all arrivals, and that of the last phase's end
    uint32_t* over;
};

struct NamedBarrier {
    int arrived, threads;
    Site site;
    int first;             // thread
    uint32_t came, waiting;  // warps
    uint32_t generation;
    uint32_t* clock;
};

struct HostTensorMap;

struct TensorCopy {
    const HostTensorMap* map;
    int at[5];
    uint32_t place;
    Site site;
    int thread;
    int barrier;           // of a load, and its phase
    uint32_t phase;
    int64_t bytes;
    int64_t group;         // of a store
};

template <class T> struct Queue {
    T* items;
    int count, capacity;

    void remove(int i) {
        --count;
        memmove(items + i, items + i + 1, (count - i) * sizeof(T));
    }
};

// Registers of the 128 threads that products have used: the accumulators, or A.
struct Accumulator {
    float* lanes[128];
    int count;             // registers of a thread
    int in_flight;         // products
    bool is_snapshot;      // `values` is what the registers held at the last fence
    uint64_t used;
    float values[64 * 256];
};
struct Fragment {
    const uint32_t* lanes[128];
    int in_flight;
    bool is_snapshot;
    uint64_t used;
    uint32_t words[128][4];
};

// A matrix in shared memory as a descriptor has it.
struct Matrix {
    uint32_t start, leading, stride, span;  // bytes; a swizzle of 0 spans none
    bool is_dense_along_mn;
};

enum ElementKind { kBf16, kFp16 };

struct Product {
    Matrix a, b;
    Fragment* fragment;    // null: A is in shared memory
    Accumulator* sum;
    int columns;
    bool accumulates;
    ElementKind kind;
    uint32_t number;
    int64_t group;
    Site site;
};

constexpr int kMostAccumulators = 8, kMostFragments = 64;

// What a lane brings to an operation of its warp group, and what all lanes have to agree on.
struct Brought {
    float* sum;
    const uint32_t* a;
    uint32_t words[2];
    bool accumulates;
};

struct WarpGroup {
    int arrived, first;
    const char* operation;
    Site site;
    Brought brought[128];
    bool is_fenced;
    Queue<Product> products;
    uint32_t started, over;    // products
    int64_t groups;            // that were closed
    Accumulator* accumulators[kMostAccumulators];
    Fragment* fragments[kMostFragments];
    uint64_t uses;
    int registers;
    bool waits_for_registers;
    uint32_t* clock;           // what all its threads know
    bool is_clock_valid;
};

struct Async {
    int threads, width;        // of a clock
    uint32_t* clocks;
    size_t clocks_bytes, granules_bytes;
    Granule* granules;
    Barrier barriers[kMostBarriers];
    int barrier_count;
    NamedBarrier named[kNamedBarriers];
    uint32_t warp_generation[kMaxWarps];
    WarpGroup groups[kMostGroups];
    Queue<TensorCopy> loads, stores;
    int64_t store_groups[kMaxThreads];
    uint32_t* readers;         // sets of them, `threads` ticks each
    int reader_sets, reader_capacity, free_readers;
    int spare_registers;
};

inline bool is_late(const Block& b) { return b.run->launch->landing == kLate; }
inline uint64_t tick_of(Stamp s) { return s >> kTickShift & (kTickLimit - 1); }

// ---- clocks -------------------------------------------------------------------------------------
//
// A clock says what is ordered before now, as numbers that only grow (vector clocks: Lamport 1978,
// Mattern 1989):
//   [0, threads)         what thread s did at ticks below this one
//   [threads, 2 threads) the same, as far as a fence of s makes it ready for the async proxy
//   then                 so many phases of each barrier: their tensor loads have arrived
//   then                 so many products of each warp group have read what they read
// Arriving somewhere joins a thread's clock into the barrier's, and starts a tick of its own;
// waiting joins the barrier's into the thread's.

inline uint32_t* clock_of(const Async& a, int i) { return a.clocks + (size_t)i * a.width; }
inline uint32_t& fenced_in(const Async& a, uint32_t* clock, int thread) {
    return clock[a.threads + thread];
}
inline uint32_t& phases_in(const Async& a, uint32_t* clock, int barrier) {
    return clock[2 * a.threads + barrier];
}
inline uint32_t& products_in(const Async& a, uint32_t* clock, int group) {
    return clock[2 * a.threads + kMostBarriers + group];
}

inline void join(uint32_t* into, const uint32_t* from, int width) {
    for (int i = 0; i < width; i += 8) {
        Words x, y;
        memcpy(&x, into + i, sizeof x);
        memcpy(&y, from + i, sizeof y);
        x = select((Words)(x > y), x, y);
        memcpy(into + i, &x, sizeof x);
    }
}

inline void forget_group_clock(Async& a, const Thread& t) {
    a.groups[t.index / 128].is_clock_valid = false;
}

inline void acquire(Thread& t, const uint32_t* clock) {
    if (!t.clock) return;
    Async& a = *t.block->async;
    join(t.clock, clock, a.width);
    forget_group_clock(a, t);
}

// A tick of the thread's own from here on.
inline uint64_t start_tick(Thread& t, Site site) {
    uint64_t tick = next_tick(t, site);
    t.stamp = stamp_of(t.block->index, tick, t.index);
    return tick;
}

inline void release(Thread& t, uint32_t* clock, Site site) {
    if (!t.clock) return;
    join(clock, t.clock, t.block->async->width);
    clock[t.index] = (uint32_t)start_tick(t, site);
}

static bool is_known(const Thread& t, Stamp earlier) {
    int thread = stamp_thread(earlier);
    return thread == t.index || tick_of(earlier) < t.clock[thread];
}

// Threads have met at ag_sync or ag_sync_warp.
static void meet(Block& b, int first, int count, uint64_t tick) {
    Async& a = *b.async;
    if (!b.threads[first].clock) return;
    uint32_t* all = b.threads[first].clock;
    for (int i = first + 1; i < first + count; ++i) join(all, b.threads[i].clock, a.width);
    for (int i = first; i < first + count; ++i) all[i] = (uint32_t)tick;
    for (int i = first + 1; i < first + count; ++i)
        memcpy(b.threads[i].clock, all, a.width * sizeof(uint32_t));
    for (int i = first; i < first + count; i += 32) forget_group_clock(a, b.threads[i]);
}

static void free_async(Async* a) {
    for (WarpGroup& g : a->groups) {
        for (Accumulator* x : g.accumulators) free(x);
        for (Fragment* x : g.fragments) free(x);
        free(g.products.items);
    }
    free(a->loads.items);
    free(a->stores.items);
    free(a->readers);
    unmap_memory(a->clocks, a->clocks_bytes);
    unmap_memory(a->granules, a->granules_bytes);
    unmap_memory(a, sizeof(Async));
}

static Async* allocate_async(const Block& b) {
    Async* a = (Async*)map_memory(sizeof(Async));
    if (!a) return nullptr;
    a->threads = b.thread_count;
    a->width = (2 * a->threads + kMostBarriers + kMostGroups + 7) / 8 * 8;
    int clocks = a->threads + 2 * kMostBarriers + kNamedBarriers + kMostGroups;
    a->clocks_bytes = (size_t)clocks * a->width * sizeof(uint32_t);
    a->granules_bytes = (b.run->launch->shared_bytes / 16 + 1) * sizeof(Granule);
    a->clocks = (uint32_t*)map_memory(a->clocks_bytes);
    a->granules = (Granule*)map_memory(a->granules_bytes);
    if (a->clocks && a->granules) return a;
    free_async(a);
    return nullptr;
}

// As a block finds it: what threads know of each other comes from the barriers so far.
static void reset_async(Block& b) {
    Async& a = *b.async;
    memset(a.clocks, 0, a.clocks_bytes);
    memset(a.granules, 0, a.granules_bytes);
    memset(a.named, 0, sizeof a.named);
    memset(a.warp_generation, 0, sizeof a.warp_generation);
    memset(a.store_groups, 0, sizeof a.store_groups);
    a.barrier_count = a.loads.count = a.stores.count = a.reader_sets = 0;
    a.free_readers = -1;
    int next = a.threads;
    for (Barrier& x : a.barriers) {
        x.arrived = clock_of(a, next++);
        x.over = clock_of(a, next++);
    }
    for (NamedBarrier& x : a.named) x.clock = clock_of(a, next++);
    int entry = 65536 / a.threads / 8 * 8;  // registers of each thread at the launch
    for (WarpGroup& g : a.groups) {
        g.clock = clock_of(a, next++);
        g.arrived = g.products.count = 0;
        g.started = g.over = 0;
        g.groups = 0;
        g.is_fenced = g.is_clock_valid = g.waits_for_registers = false;
        g.registers = entry < 256 ? entry : 256;
        for (Accumulator* x : g.accumulators)
            if (x) memset(x->lanes, 0, sizeof x->lanes), x->in_flight = 0;
        for (Fragment* x : g.fragments)
            if (x) memset(x->lanes, 0, sizeof x->lanes), x->in_flight = 0;
    }
    a.spare_registers = 0;
    for (int i = 0; i < b.thread_count && b.cells; ++i) {
        Thread& t = b.threads[i];
        t.clock = clock_of(a, i);
        for (int s = 0; s < b.thread_count; ++s)
            t.clock[s] = (uint32_t)tick_of(s / 32 == t.warp_index ? t.warp->since : b.since);
        t.block_first = ~0ull;  // no access is a plain one: check_shared is asked for all of them
    }
}

extern const AsyncHooks kAsyncHooks;

inline Async& async_of(Thread& t, Site site) {
    Block& b = *t.block;
    if (AG_LIKELY(b.hooks != nullptr)) return *b.async;
    if (!b.async) b.async = allocate_async(b);
    if (!b.async) fail(t, kLaunch, site, "has no memory for barriers and tensor copies");
    b.free_async = free_async;
    b.hooks = &kAsyncHooks;
    reset_async(b);
    return *b.async;
}

template <class T> inline T& append(Thread& t, Queue<T>& queue, const T& item, Site site) {
    if (!grow(queue.items, queue.count, queue.capacity))
        fail(t, kLaunch, site, "has no memory for what is on its way");
    return queue.items[queue.count++] = item;
}

// ---- shared memory under clocks -----------------------------------------------------------------
//
// A cell for each byte; sizes are those of single bytes, except where cells come from before, or
// from asynchronous copies of 16 bytes.  Readers that are not ordered among themselves become a
// set.

// In the low bits of `read`; the set's number is above them, and the block where stamps have it.
constexpr Stamp kReaderSet = 3;

inline Stamp first_stamp(const Thread& t) { return stamp_of(t.block->index, 0, 0); }

inline bool is_reader_set(const Thread& t, Stamp read) {
    return read >= first_stamp(t) && (read & kLow) == kReaderSet;
}
inline uint32_t number_of_set(Stamp read) { return (uint32_t)(read >> kThreadShift); }
inline uint32_t* readers_of(Async& a, uint32_t set) { return a.readers + (size_t)set * a.threads; }

// A set that is free holds the number of the next one.
AG_NOINLINE Stamp new_reader_set(Thread& t, Site site) {
    Async& a = *t.block->async;
    int set = a.free_readers;
    if (set >= 0) {
        a.free_readers = (int)readers_of(a, set)[0];
    } else {
        set = a.reader_sets++;
        if (a.reader_sets > a.reader_capacity) {
            a.reader_capacity = a.reader_capacity ? 2 * a.reader_capacity : 64;
            void* larger = realloc(a.readers, sizeof(uint32_t) * a.threads * a.reader_capacity);
            if (!larger) fail(t, kLaunch, site, "has no memory to remember who reads");
            a.readers = (uint32_t*)larger;
        }
    }
    memset(readers_of(a, set), 0, a.threads * sizeof(uint32_t));
    return first_stamp(t) | (Stamp)set << kThreadShift | kReaderSet;
}

inline void forget_readers(const Thread& t, Cell& cell) {
    Async& a = *t.block->async;
    if (is_reader_set(t, cell.read)) {
        uint32_t set = number_of_set(cell.read);
        readers_of(a, set)[0] = (uint32_t)a.free_readers;
        a.free_readers = (int)set;
    }
    cell.read = 0;
}

inline void add_reader(Thread& t, Cell& cell, Site site) {
    Async& a = *t.block->async;
    if (!is_reader_set(t, cell.read)) {
        if (cell.read < first_stamp(t) || are_ordered(t, cell.read)) {
            cell.read = t.stamp;
            return;
        }
        Stamp set = new_reader_set(t, site);
        readers_of(a, number_of_set(set))[stamp_thread(cell.read)] =
            (uint32_t)tick_of(cell.read) + 1;
        cell.read = set;
    }
    readers_of(a, number_of_set(cell.read))[t.index] = (uint32_t)tick_of(t.stamp) + 1;
}

// A reader whose read is not ordered before now; -1: none.
inline int open_reader(const Thread& t, const Cell& cell) {
    if (!is_reader_set(t, cell.read))
        return cell.read < first_stamp(t) || are_ordered(t, cell.read) ? -1
                                                                       : stamp_thread(cell.read);
    Async& a = *t.block->async;
    const uint32_t* readers = readers_of(a, number_of_set(cell.read));
    for (int s = 0; s < a.threads; ++s)
        if (readers[s] > t.clock[s] && s != t.index) return s;
    return -1;
}

// Cells of 2 and 4 bytes become cells of one.
inline void split_cells(const Thread& t, uint32_t word) {
    for (uint32_t size = 4; size > 1; size /= 2)
        for (uint32_t first = word; first < word + 4; first += size) {
            Cell whole = cell_at(t, first);
            if (whole.written < first_stamp(t) || written_bytes(whole.written) != size) continue;
            for (uint32_t i = first; i < first + size; ++i)
                cell_at(t, i) = {(whole.written & ~kLow) | size_code(1), whole.read};
        }
}

[[noreturn]] AG_COLD void fail_load_unknown(Thread& t, const Granule& g, const char* verb,
                                            uint32_t place, Site site) {
    const Barrier& barrier = t.block->async->barriers[g.barrier - 1];
    fail(t, kSharedRace, site, "%s byte %u of shared memory, where the tensor load of thread %d at "
         "%s:%d arrives with phase %u of the barrier at byte %u, which it has not waited for", verb,
         place, g.thread, g.site.file, g.site.line, g.phase, barrier.place);
}

[[noreturn]] AG_COLD void fail_open(Thread& t, const char* verb, uint32_t place, int thread,
                                    const char* other, Site site) {
    fail(t, kSharedRace, site, "%s byte %u of shared memory, which thread %d %s with no barrier "
         "between", verb, place, thread, other);
}

inline void check_load_known(Thread& t, uint32_t* clock, const Granule& g, const char* verb,
                             uint32_t place, Site site) {
    Async& a = *t.block->async;
    if (g.barrier && AG_UNLIKELY(phases_in(a, clock, g.barrier - 1) <= g.phase))
        fail_load_unknown(t, g, verb, place, site);
}

// A write, of a thread or a tensor load: is all that reads asynchronously over?
inline void check_reads_over(Thread& t, const Granule& g, uint32_t place, Site site) {
    Async& a = *t.block->async;
    for (int i = 0; i < kMostGroups; ++i)
        if (AG_UNLIKELY(g.products[i] > products_in(a, t.clock, i)))
            fail(t, kSharedRace, site,
                 "writes byte %u of shared memory, which a product of warp group "
                 "%d may still read",
                 place, i);
    if (!AG_UNLIKELY(g.stores)) return;
    for (int i = 0; i < a.stores.count; ++i)
        fail(t, kSharedRace, site,
             "writes byte %u of shared memory, which a tensor store may still "
             "read (one of thread %d at %s:%d is on its way)",
             place, a.stores.items[i].thread, a.stores.items[i].site.file,
             a.stores.items[i].site.line);
}

// The rule for an access of 1, 2 or 4 bytes, in place of host.h's.
static void check_shared_by_clock(Thread& t, uint32_t address, uint32_t bytes, Access access,
                                  SharedArray array, Site site) {
    Async& a = *t.block->async;
    uint32_t word = address & ~3u;
    const char* verb = access == kWrite ? "writes" : "reads";
    Stamp copied = cell_at(t, word).written;
    if (copied >= first_stamp(t) && !(copied & kLow))
        fail_on_its_way(t, address, copied, access, array, site);
    split_cells(t, word);
    Granule& g = a.granules[address / 16];
    Thread* readers = access == kWarpRead ? &t - t.lane : &t;
    int count = access == kWarpRead ? 32 : 1;
    for (Thread* r = readers; r < readers + count; ++r)
        check_load_known(*r, r->clock, g, verb, address, site);
    if (access == kWrite) check_reads_over(t, g, address, site);
    g.is_touched = true;
    for (uint32_t i = address; i < address + bytes; ++i) {
        Cell& cell = cell_at(t, i);
        bool is_written = cell.written >= first_stamp(t);
        if (!is_written && !g.barrier && access != kWrite)
            fail_uninitialised(t, address, array, site);
        for (Thread* r = readers; is_written && r < readers + count; ++r)
            if (!is_ordered(*r, cell.written))
                fail_open(*r, verb, i, stamp_thread(cell.written), "wrote", site);
        if (access != kWrite) {
            for (Thread* r = readers; r < readers + count; ++r) add_reader(*r, cell, site);
            continue;
        }
        int reader = cell.read ? open_reader(t, cell) : -1;
        if (reader >= 0) fail_open(t, verb, i, reader, "read", site);
        forget_readers(t, cell);
        cell.written = t.stamp | size_code(1);
    }
}

// What threads wrote to 16 bytes has to be known and fenced before the async proxy uses them.
// `clock` is that of the thread or warp group which starts the use.
AG_NOINLINE void check_fenced(Thread& t, uint32_t* clock, const Granule& g, uint32_t place,
                              const char* verb, bool is_read, Site site) {
    Async& a = *t.block->async;
    for (uint32_t i = place; i < place + 16; i += 4) {
        Stamp copied = cell_at(t, i).written;
        if (copied >= first_stamp(t) && !(copied & kLow))
            fail_on_its_way(t, i, copied, is_read ? kRead : kWrite, kByAddress, site);
        split_cells(t, i);
    }
    for (uint32_t i = place; i < place + 16; ++i) {
        Stamp written = cell_at(t, i).written;
        if (written < first_stamp(t)) {
            if (is_read && !g.barrier) fail_uninitialised(t, i, kByAddress, site);
            continue;
        }
        int thread = stamp_thread(written);
        uint64_t tick = tick_of(written);
        if (AG_LIKELY(tick < fenced_in(a, clock, thread))) continue;
        if (tick >= clock[thread] && thread != t.index)
            fail_open(t, verb, i, thread, "wrote", site);
        fail(t, kMissingFence, site, "%s byte %u of shared memory, which thread %d wrote with no "
             "ag_async_fence behind it and before the barrier", verb, i, thread);
    }
}

static void fence_async(Thread& t, Site site) {
    Async& a = async_of(t, site);
    if (!t.clock) return;
    fenced_in(a, t.clock, t.index) = (uint32_t)start_tick(t, site);
    forget_group_clock(a, t);
}

// ---- barriers in memory -------------------------------------------------------------------------

static void init_barrier(Thread& t, uint32_t address, int count, Site site) {
    Async& a = async_of(t, site);
    uint32_t place = place_of(t, address, 8, kWrite, site);
    if (count < 1 || (uint32_t)count > kMostArrivals)
        fail(t, kBarrierProtocol, site, "makes a barrier for %d arrivals", count);
    for (int i = 0; i < a.barrier_count; ++i)
        if (a.barriers[i].place == place)
            fail(t, kBarrierProtocol, site, "makes a barrier at byte %u, where there is one",
                 place);
    if (a.barrier_count == kMostBarriers)
        fail(t, kLaunch, site, "makes more barriers than the %d that a CPU run has", kMostBarriers);
    Barrier& x = a.barriers[a.barrier_count++];
    uint32_t *arrived = x.arrived, *over = x.over;
    memset(&x, 0, sizeof x);
    x.arrived = arrived;
    x.over = over;
    x.place = place;
    x.count = x.pending = count;
    x.made = t.stamp;
}

static void fence_inits(Thread& t, Site site) {
    Async& a = async_of(t, site);
    uint64_t tick = start_tick(t, site);
    for (int i = 0; i < a.barrier_count; ++i)
        if (!a.barriers[i].fenced && stamp_thread(a.barriers[i].made) == t.index)
            a.barriers[i].fenced = tick;
}

inline Barrier& barrier_at(Thread& t, uint32_t address, Site site) {
    Async& a = async_of(t, site);
    uint32_t place = place_of(t, address, 8, kRead, site);
    for (Barrier* x = a.barriers; x < a.barriers + a.barrier_count; ++x) {
        if (x->place != place) continue;
        if (t.clock && !is_known(t, x->made))
            fail(t, kSharedRace, site, "uses the barrier at byte %u, which thread %d made with no "
                 "ag_sync between", place, stamp_thread(x->made));
        return *x;
    }
    fail(t, kBarrierProtocol, site, "uses a barrier at byte %u of shared memory, where nobody has "
         "made one", place);
}

inline int number_of(const Async& a, const Barrier& x) { return (int)(&x - a.barriers); }

static void wake(Block& b, Barrier& x) {
    if (!x.waiting_count) return;
    for (int w = 0; w < b.warp_count; ++w)
        if (x.waiting[w]) set_ready(b, w, x.waiting[w]), x.waiting[w] = 0;
    x.waiting_count = 0;
}

static void end_phase_if_over(Thread& t, Barrier& x, Site site) {
    if (x.pending || x.bytes) return;
    Async& a = *t.block->async;
    int number = number_of(a, x);
    for (int i = 0; i < a.loads.count; ++i) {
        const TensorCopy& load = a.loads.items[i];
        if (load.barrier == number)
            fail(t, kBarrierProtocol, site,
                 "ends phase %u of the barrier at byte %u, but the tensor "
                 "load at %s:%d has not arrived: too few bytes are expected",
                 x.phase, x.place, load.site.file, load.site.line);
    }
    ++x.phase;
    x.pending = x.count;
    if (t.clock) {
        phases_in(a, x.arrived, number) = x.phase;
        memcpy(x.over, x.arrived, a.width * sizeof(uint32_t));
    }
    wake(*t.block, x);
}

static void land_load(Thread& t, const TensorCopy& load);

// Late loads: their bytes arrive when somebody waits and nothing else is missing.
static void land_if_last(Thread& t, Barrier& x, Site site) {
    Async& a = *t.block->async;
    int number = number_of(a, x);
    if (x.pending || !a.loads.count) return;
    int64_t on_their_way = 0;
    for (int i = 0; i < a.loads.count; ++i)
        if (a.loads.items[i].barrier == number) on_their_way += a.loads.items[i].bytes;
    if (on_their_way < x.bytes) return;
    uint32_t phase = x.phase;
    for (int i = 0; i < a.loads.count && x.phase == phase;) {
        if (a.loads.items[i].barrier != number) {
            ++i;
            continue;
        }
        TensorCopy load = a.loads.items[i];
        a.loads.remove(i);
        land_load(t, load);
        x.bytes -= load.bytes;
        end_phase_if_over(t, x, site);
    }
}

static void expect_bytes(Thread& t, Barrier& x, int bytes, Site site) {
    if (bytes < 0 || (uint32_t)bytes > kMostArrivals)
        fail(t, kBarrierProtocol, site, "expects %d bytes at a barrier", bytes);
    x.bytes += bytes;
}

static void arrive(Thread& t, Barrier& x, Site site) {
    if (!x.pending)
        fail(t, kBarrierProtocol, site, "arrives at the barrier at byte %u, but all %d arrivals of "
             "phase %u are there", x.place, x.count, x.phase);
    --x.pending;
    release(t, x.arrived, site);
    end_phase_if_over(t, x, site);
    if (x.waiting_count) land_if_last(t, x, site);
}

constexpr const char* kBarrierWait = "ag_barrier_wait";

// What a thread knows of a phase that it waits for tells a wait that comes too late: with two
// phases gone by, the parity is again that of a phase which is not over.
inline bool is_phase_over(Thread& t, const Barrier& x, int parity, Site site) {
    if (parity != 0 && parity != 1)
        fail(t, kBarrierProtocol, site, "waits for parity %d, which is neither 0 nor 1", parity);
    if (t.clock) {
        Async& a = *t.block->async;
        uint32_t known = phases_in(a, t.clock, number_of(a, x));
        if ((int)(known & 1) == parity && x.phase >= known + 2)
            fail(t, kBarrierProtocol, site,
                 "waits for phase %u of the barrier at byte %u, which is in "
                 "phase %u: the parities are the same",
                 known, x.place, x.phase);
    }
    return (int)(x.phase & 1) != parity;
}

inline void pass_phase(Thread& t, Barrier& x) {
    acquire(t, x.over);
    if (x.phase > x.seen) x.seen = x.phase;
}

static void wait_for_phase(Thread& t, uint32_t address, int parity, Site site) {
    Barrier& x = barrier_at(t, address, site);
    while (!is_phase_over(t, x, parity, site)) {
        land_if_last(t, x, site);
        if ((int)(x.phase & 1) != parity) break;
        x.waiting[t.warp_index] |= 1u << t.lane;
        ++x.waiting_count;
        wait_here(t, kBarrierWait, site);
        if ((int)(x.phase & 1) != parity) break;
    }
    pass_phase(t, x);
}

static bool try_wait(Thread& t, uint32_t address, int parity, Site site) {
    Barrier& x = barrier_at(t, address, site);
    if (!is_phase_over(t, x, parity, site)) {
        if (Thread* next = pick_next(*t.block, t)) switch_to(t, *next);
        land_if_last(t, x, site);
    }
    bool is_over = (int)(x.phase & 1) != parity;
    if (is_over) pass_phase(t, x);
    return is_over;
}

static void describe_waits(const Block& b, char* text, size_t size) {
    const Async& a = *b.async;
    size_t used = 0;
    // Late loads are on their way until nothing else is missing.
    auto missing = [&a](const Barrier& x) {
        int64_t bytes = x.bytes;
        for (int i = 0; i < a.loads.count; ++i)
            if (a.loads.items[i].barrier == number_of(a, x)) bytes -= a.loads.items[i].bytes;
        return (long long)bytes;
    };
    for (const Barrier* x = a.barriers; x < a.barriers + a.barrier_count && used + 1 < size; ++x)
        if (x->waiting_count)
            used += snprintf(text + used, size - used,
                             "; the barrier at byte %u lacks %d arrivals and "
                             "%lld bytes of phase %u",
                             x->place, x->pending, missing(*x), x->phase);
    for (int id = 0; id < kNamedBarriers && used + 1 < size; ++id)
        if (a.named[id].arrived)
            used += snprintf(text + used, size - used, "; %d of %d threads are at barrier %d",
                             a.named[id].arrived, a.named[id].threads, id);
}

// ---- barriers by number -------------------------------------------------------------------------

constexpr const char* kNamedSync = "ag_named_sync";
constexpr const char* kNamedArrive = "ag_named_arrive";

static void end_named(Thread& t, NamedBarrier& x) {
    Block& b = *t.block;
    for (int w = 0; w < b.warp_count; ++w) {
        if (!(x.waiting >> w & 1)) continue;
        for (int i = w * 32; i < w * 32 + 32; ++i) acquire(b.threads[i], x.clock);
        set_ready(b, w, ~0u);
    }
    if (t.clock) memset(x.clock, 0, b.async->width * sizeof(uint32_t));
    x.came = x.waiting = 0;
    x.arrived = 0;
    ++x.generation;
}

static void come_to_named(Thread& t, NamedBarrier& x, int id, int threads, bool waits, Site site) {
    Async& a = *t.block->async;
    if (x.arrived && x.threads != threads)
        fail(t, kBarrierProtocol, site,
             "is at barrier %d for %d threads, but thread %d at %s:%d for %d", id, threads, x.first,
             x.site.file, x.site.line, x.threads);
    if (!x.arrived) x.site = site, x.first = t.index, x.threads = threads;
    if (x.came >> t.warp_index & 1)
        fail(t, kBarrierProtocol, site,
             "comes to barrier %d again, where %d of %d threads are, its own "
             "warp among them",
             id, x.arrived, threads);
    x.came |= 1u << t.warp_index;
    a.warp_generation[t.warp_index] = x.generation;
    for (int i = 0; i < 32; ++i) release((&t - t.lane)[i], x.clock, site);
    x.arrived += 32;
    if (waits) x.waiting |= 1u << t.warp_index;
    if (x.arrived == threads) end_named(t, x);
}

static void named_barrier(Thread& t, int id, int threads, bool waits, Site site) {
    Async& a = async_of(t, site);
    if (id < 1 || id >= kNamedBarriers)
        fail(t, kBarrierProtocol, site, "uses barrier %d; numbers are 1 to %d", id,
             kNamedBarriers - 1);
    if (threads < 32 || threads % 32 || threads > a.threads)
        fail(t, kBarrierProtocol, site,
             "uses barrier %d for %d threads: whole warps, at most the %d of "
             "the block",
             id, threads, a.threads);
    NamedBarrier& x = a.named[id];
    // Lanes that come with another number would be at another place in the text, or a mistake.
    t.warp->votes[t.lane] = id << 16 | threads;
    whole_warp_collective(t, waits ? kNamedSync : kNamedArrive, site, [&](Warp& w) {
        for (int lane = 0; lane < 32; ++lane)
            if (w.votes[lane] != (id << 16 | threads))
                fail(t, kDivergentWarp, site,
                     "is at barrier %d for %d threads, but lane %d at barrier "
                     "%d for %d",
                     id, threads, lane, w.votes[lane] >> 16, w.votes[lane] & 0xffff);
        come_to_named(t, x, id, threads, waits, site);
    });
    if (!waits) return;
    uint32_t generation = a.warp_generation[t.warp_index];
    while (x.generation == generation) wait_here(t, kNamedSync, site);
}

// ---- tensor maps: attngen/cpu/tensor_map.py writes them, in place of the driver ----------------

constexpr uint64_t kTensorMapMark = 0x70616d5f67617461ull;

struct HostTensorMap {
    uint64_t mark, address;
    uint64_t sizes[5], strides[4];  // elements; bytes, of all dimensions but the first
    uint16_t box[5];
    uint8_t rank, element_bytes, swizzle_bytes;
    uint8_t rest[27];
};
static_assert(sizeof(HostTensorMap) == 128, "as large as the driver's");

// A swizzle exchanges chunks of 16 bytes by bits 7 to 9 of the address.
inline uint32_t swizzled(uint32_t address, uint32_t span) {
    return span ? address ^ (address >> 3 & (span - 16)) : address;
}

inline uint32_t row_bytes(const HostTensorMap& m) { return (uint32_t)m.box[0] * m.element_bytes; }
inline uint32_t rows_of(const HostTensorMap& m) {
    uint32_t rows = 1;
    for (int i = 1; i < m.rank; ++i) rows *= m.box[i];
    return rows;
}
inline uint32_t box_bytes(const HostTensorMap& m) { return row_bytes(m) * rows_of(m); }

// A box's row: where it is in the tensor, and which of its elements are.
struct BoxRow {
    unsigned char* first;    // of the row's element 0, there or not
    int64_t begin, end;      // elements that are there
};

inline BoxRow row_of(const TensorCopy& copy, uint32_t row) {
    const HostTensorMap& m = *copy.map;
    int64_t offset = (int64_t)copy.at[0] * m.element_bytes;
    bool is_there = true;
    for (int i = 1; i < m.rank; ++i) {
        int64_t at = (int64_t)copy.at[i] + row % m.box[i];
        row /= m.box[i];
        is_there = is_there && at >= 0 && (uint64_t)at < m.sizes[i];
        offset += at * (int64_t)m.strides[i - 1];
    }
    int64_t begin = copy.at[0] < 0 ? -(int64_t)copy.at[0] : 0;
    int64_t end = (int64_t)m.sizes[0] - copy.at[0];
    if (end > m.box[0]) end = m.box[0];
    if (!is_there || end < begin) end = begin;
    return {(unsigned char*)m.address + offset, begin, end};
}

static void check_row(Thread& t, const TensorCopy& copy, const BoxRow& row, bool is_write,
                      Site site) {
    const HostTensorMap& m = *copy.map;
    unsigned char* first = row.first + row.begin * m.element_bytes;
    size_t bytes = (size_t)(row.end - row.begin) * m.element_bytes;
    if (!bytes) return;
    const Range& r = check_global(t, first, m.element_bytes, is_write, site);
    if ((uintptr_t)first + bytes > r.end)
        fail_global_bounds(t, (uintptr_t)first, bytes, is_write, site);
    for (size_t i = m.element_bytes; r.cells && i < bytes; i += m.element_bytes)
        check_global(t, first + i, m.element_bytes, is_write, site);
}

// Calls `use(place)` for each 16 bytes of a box in shared memory, in its order.
template <class Use> inline void for_each_granule(const TensorCopy& copy, Use use) {
    for (uint32_t i = 0; i < copy.bytes; i += 16)
        use(swizzled(copy.place + i, copy.map->swizzle_bytes));
}

static TensorCopy start_tensor_copy(Thread& t, const void* map, uint32_t address, const int* at,
                                    int rank, bool is_load, Site site) {
    const HostTensorMap& m = *(const HostTensorMap*)map;
    const char* verb = is_load ? "loads" : "stores";
    if (m.mark != kTensorMapMark)
        fail(t, kLaunch, site, "%s a box by a tensor map that was not made for a CPU", verb);
    if (m.rank != rank)
        fail(t, kLaunch, site, "%s a box at %d coordinates of a tensor of %d dimensions", verb,
             rank, m.rank);
    uint32_t place = address - kSharedBase;
    if ((uint64_t)place + box_bytes(m) > t.shared_bytes)
        fail(t, kSharedBounds, site,
             "%s a box of %u bytes at byte %lld of shared memory, which has %u", verb, box_bytes(m),
             (long long)(int32_t)place, t.shared_bytes);
    if (place % 128)
        fail(t, kMisaligned, site,
             "%s a box at byte %u of shared memory, which is no multiple of 128", verb, place);
    TensorCopy copy = {};
    copy.map = &m;
    memcpy(copy.at, at, rank * sizeof(int));
    copy.place = place;
    copy.site = site;
    copy.thread = t.index;
    copy.bytes = box_bytes(m);
    return copy;
}

// ---- tensor loads -------------------------------------------------------------------------------
//
// A load is on its way until its bytes have arrived at its barrier.  A phase of the barrier ends
// only then, so whoever knows of the phase's end may use them.

static void land_load(Thread& t, const TensorCopy& load) {
    const HostTensorMap& m = *load.map;
    unsigned char bytes[256 * 16];
    uint32_t count = row_bytes(m);
    for (uint32_t i = 0; i < rows_of(m); ++i) {
        BoxRow row = row_of(load, i);
        check_row(t.block->threads[load.thread], load, row, false, load.site);
        memset(bytes, 0, count);
        memcpy(bytes + row.begin * m.element_bytes, row.first + row.begin * m.element_bytes,
               (size_t)(row.end - row.begin) * m.element_bytes);
        for (uint32_t j = 0; j < count; j += 16)
            memcpy(t.shared + swizzled(load.place + i * count + j, m.swizzle_bytes), bytes + j, 16);
    }
}

inline void note_load(Thread& t, const TensorCopy& load, Site site) {
    Async& a = *t.block->async;
    for_each_granule(load, [&](uint32_t place) {
        Granule& g = a.granules[place / 16];
        check_load_known(t, t.clock, g, "loads", place, site);
        check_reads_over(t, g, place, site);
        if (g.is_touched || !g.barrier) {
            check_fenced(t, t.clock, g, place, "loads", false, site);
            for (uint32_t i = place; i < place + 16; ++i) {
                Cell& cell = cell_at(t, i);
                int reader = cell.read ? open_reader(t, cell) : -1;
                if (reader >= 0) fail_open(t, "loads", i, reader, "read", site);
                forget_readers(t, cell);
                cell = {0, 0};
            }
        }
        g.barrier = (uint32_t)load.barrier + 1;
        g.phase = load.phase;
        g.site = site;
        g.thread = t.index;
        g.is_touched = false;
    });
}

static void tensor_load(Thread& t, uint32_t to, const void* map, uint32_t address, const int* at,
                        int rank, Site site) {
    Barrier& x = barrier_at(t, address, site);
    Async& a = *t.block->async;
    TensorCopy load = start_tensor_copy(t, map, to, at, rank, true, site);
    int maker = stamp_thread(x.made);
    if (t.clock && (!x.fenced || (maker != t.index && x.fenced >= t.clock[maker])))
        fail(t, kMissingFence, site,
             "loads a box to the barrier at byte %u, which thread %d made with "
             "no ag_barrier_init_fence behind it",
             x.place, maker);
    load.barrier = number_of(a, x);
    load.phase = x.phase;
    t.counters.global_loads += load.bytes / 16;
    t.counters.shared_writes += load.bytes / 16;
    if (t.clock) note_load(t, load, site);
    x.loaded = x.phase + 1;
    x.load_site = site;
    x.load_thread = t.index;
    if (is_late(*t.block)) {
        append(t, a.loads, load, site);
        if (x.waiting_count) land_if_last(t, x, site);
        return;
    }
    land_load(t, load);
    x.bytes -= load.bytes;
    end_phase_if_over(t, x, site);
}

// ---- tensor stores ------------------------------------------------------------------------------
//
// A store reads shared memory at some time between its start and its thread's wait for its group.
// The two kinds of wait are the same here.

static void move_store(Thread& t, const TensorCopy& store) {
    const HostTensorMap& m = *store.map;
    unsigned char bytes[256 * 16];
    uint32_t count = row_bytes(m);
    for (uint32_t i = 0; i < rows_of(m); ++i) {
        BoxRow row = row_of(store, i);
        check_row(t, store, row, true, store.site);
        for (uint32_t j = 0; j < count; j += 16)
            memcpy(bytes + j, t.shared + swizzled(store.place + i * count + j, m.swizzle_bytes),
                   16);
        memcpy(row.first + row.begin * m.element_bytes, bytes + row.begin * m.element_bytes,
               (size_t)(row.end - row.begin) * m.element_bytes);
    }
}

static void tensor_store(Thread& t, const void* map, uint32_t from, const int* at, int rank,
                         Site site) {
    Async& a = async_of(t, site);
    TensorCopy store = start_tensor_copy(t, map, from, at, rank, false, site);
    store.group = a.store_groups[t.index];
    t.counters.shared_reads += store.bytes / 16;
    t.counters.global_stores += store.bytes / 16;
    if (t.clock)
        for_each_granule(store, [&](uint32_t place) {
            Granule& g = a.granules[place / 16];
            check_load_known(t, t.clock, g, "stores", place, site);
            if (g.is_touched || !g.barrier)
                check_fenced(t, t.clock, g, place, "stores", true, site);
            ++g.stores;
        });
    if (!is_late(*t.block)) move_store(t, store);
    append(t, a.stores, store, site);
}

static void wait_for_stores(Thread& t, int pending, Site site) {
    Async& a = async_of(t, site);
    for (int i = 0; i < a.stores.count;) {
        TensorCopy store = a.stores.items[i];
        if (store.thread != t.index || store.group >= a.store_groups[t.index] - pending) {
            ++i;
            continue;
        }
        a.stores.remove(i);
        if (is_late(*t.block)) move_store(t, store);
        if (!t.clock) continue;
        for_each_granule(store, [&](uint32_t place) {  // the thread has read it until now
            Granule& g = a.granules[place / 16];
            --g.stores;
            g.is_touched = true;
            for (uint32_t j = place; j < place + 16; ++j) add_reader(t, cell_at(t, j), site);
        });
    }
}

// ---- warp groups: all 128 threads, at one place in the text -------------------------------------

inline WarpGroup& group_of(Thread& t, const char* operation, Site site) {
    Async& a = async_of(t, site);
    if (t.index / 128 * 128 + 128 > a.threads)
        fail(t, kDivergentWarp, site, "is in %s, but its warp group has only %d threads", operation,
             a.threads % 128);
    return a.groups[t.index / 128];
}

// The last thread calls `finish` before anybody goes on.
template <class Finish>
inline void group_collective(Thread& t, WarpGroup& g, const char* operation, Site site,
                             Finish finish) {
    Block& b = *t.block;
    int first_warp = t.index / 128 * 4;
    for (int w = first_warp; w < first_warp + 4; ++w)
        if (b.warps[w].ended || (b.warps[w].waiting && w == t.warp_index))
            fail(t, b.warps[w].ended ? kEndedLane : kDivergentWarp, site,
                 "is in %s, but another thread of its warp group %s", operation,
                 b.warps[w].ended ? "has ended" : b.warps[w].collective);
    if (!g.arrived) {
        g.operation = operation;
        g.site = site;
        g.first = t.index;
    } else if (AG_UNLIKELY(g.operation != operation || !is_same(g.site, site))) {
        fail(t, kDivergentWarp, site, "is in %s, but thread %d of its warp group is in %s at %s:%d",
             operation, g.first, g.operation, g.site.file, g.site.line);
    }
    if (++g.arrived < 128) return wait_here(t, operation, site);
    for (int w = first_warp; w < first_warp + 4; ++w) close_log(b, w);
    finish();
    g.arrived = 0;
    for (int w = first_warp; w < first_warp + 4; ++w) set_ready(b, w, ~0u);
    let_others_go_first(t);
}

inline uint32_t* group_clock(Thread& t, WarpGroup& g) {
    Async& a = *t.block->async;
    if (g.is_clock_valid) return g.clock;
    const Thread* first = &t.block->threads[t.index / 128 * 128];
    memcpy(g.clock, first->clock, a.width * sizeof(uint32_t));
    for (const Thread* x = first + 1; x < first + 128; ++x)
        for (int i = 0; i < a.width; i += 8) {
            Words mine, other;
            memcpy(&mine, g.clock + i, sizeof mine);
            memcpy(&other, x->clock + i, sizeof other);
            mine = select((Words)(mine < other), mine, other);
            memcpy(g.clock + i, &mine, sizeof mine);
        }
    g.is_clock_valid = true;
    return g.clock;
}

// ---- products -----------------------------------------------------------------------------------
//
// A product lasts from its start to the wait for its group.  It reads A, B and the accumulators,
// and writes the accumulators, at some time in between: late, in the wait, or early, at its start.
// In between the registers are not the threads'.  A late product leaves NaN in them until it is
// waited for; if a thread writes them, or A, the wait notices.
//
// Registers that a thread touches need a fence before a product uses them.  What is found: no fence
// since the last wait (or since the beginning), and registers which have changed since the fence.

constexpr const char* kProductShared = "ag_wgmma_shared";
constexpr const char* kProductRegisters = "ag_wgmma_registers";
constexpr uint32_t kInFlight = 0x7fdeadbe;  // a NaN

// Where lane i of a group has its accumulator j: row and column of the 64xN matrix.
inline int sum_row(int thread, int j) {
    return thread / 32 * 16 + thread % 32 / 4 + (j >> 1 & 1) * 8;
}
inline int sum_column(int thread, int j) { return j / 4 * 8 + thread % 4 * 2 + (j & 1); }

inline Matrix matrix_of(uint32_t low, uint32_t high, bool is_dense_along_mn) {
    static const uint32_t spans[4] = {0, 128, 64, 32};
    return {(low & 0x3fff) << 4, (low >> 16 & 0x3fff) << 4, (high & 0x3fff) << 4, spans[high >> 30],
            is_dense_along_mn};
}

// The address of 16 bytes: 8 elements along K of row or column `i` (dense along K), the first or
// the second; or 8 rows or columns (dense along MN), the `i`-th, of element k of K.
inline uint32_t chunk_of(const Matrix& m, uint32_t i, uint32_t k) {
    uint32_t at = m.start;
    if (!m.is_dense_along_mn && m.span) at += i / 8 * m.stride + i % 8 * m.span + k * 16;
    else if (!m.is_dense_along_mn) at += i / 8 * m.stride + i % 8 * 16 + k * m.leading;
    else if (m.span)
        at += i / (m.span / 16) * m.leading + i % (m.span / 16) * 16 + k / 8 * m.stride +
              k % 8 * m.span;
    else at += i * m.stride + k / 8 * m.leading + k % 8 * 16;
    return swizzled(at, m.span) - kSharedBase;
}

template <class Use> inline void for_each_chunk(const Matrix& m, uint32_t rows, Use use) {
    if (m.is_dense_along_mn) {
        for (uint32_t k = 0; k < 16; ++k)
            for (uint32_t i = 0; i < rows / 8; ++i) use(i, k, chunk_of(m, i, k));
    } else {
        for (uint32_t i = 0; i < rows; ++i)
            for (uint32_t k = 0; k < 2; ++k) use(i, k, chunk_of(m, i, k));
    }
}

// A matrix of `rows` rows and 16 columns as float32; `transposed` as 16 rows.
template <class T>
inline void read_matrix(const unsigned char* shared, const Matrix& m, uint32_t rows,
                        uint32_t row_step, uint32_t k_step, float* to) {
    for_each_chunk(m, rows, [&](uint32_t i, uint32_t k, uint32_t place) {
        Floats x = widen<T>((const uint16_t*)(shared + place));
        float* first = m.is_dense_along_mn ? to + i * 8 * row_step + k * k_step
                                           : to + i * row_step + k * 8 * k_step;
        uint32_t step = m.is_dense_along_mn ? row_step : k_step;
        for (int e = 0; e < 8; ++e) first[e * step] = x[e];
    });
}

template <class T> inline void read_fragment(const Fragment& f, float* to) {
    for (int thread = 0; thread < 128; ++thread)
        for (int j = 0; j < 4; ++j) {
            uint16_t halves[8] = {(uint16_t)f.words[thread][j],
                                  (uint16_t)(f.words[thread][j] >> 16)};
            Floats x = widen<T>(halves);
            int row = sum_row(thread, j * 2), k = j / 2 * 8 + thread % 4 * 2;
            to[row * 16 + k] = x[0];
            to[row * 16 + k + 1] = x[1];
        }
}

// Sums are rounded in float32, from the first column of A to the last; see multiply_matrices.
template <class T> AG_NOINLINE void compute_product(const Thread& t, const Product& p) {
    float a[64 * 16], b[16 * 256];
    uint32_t columns = (uint32_t)p.columns;
    if (p.fragment) read_fragment<T>(*p.fragment, a);
    else read_matrix<T>(t.shared, p.a, 64, 16, 1, a);
    read_matrix<T>(t.shared, p.b, columns, 1, columns, b);
    for (uint32_t row = 0; row < 64; row += 4)
        for (uint32_t column = 0; column < columns; column += 8) {
            float* c = p.sum->values + row * columns + column;
            Floats sums[4] = {};
            for (int r = 0; r < 4 && p.accumulates; ++r)
                memcpy(&sums[r], c + r * columns, sizeof sums[r]);
            Floats s0 = sums[0], s1 = sums[1], s2 = sums[2], s3 = sums[3];
            const float* x = a + row * 16;
            for (uint32_t k = 0; k < 16; ++k, ++x) {
                Floats y;
                memcpy(&y, b + k * columns + column, sizeof y);
                s0 += x[0] * y;
                s1 += x[16] * y;
                s2 += x[32] * y;
                s3 += x[48] * y;
            }
            Floats out[4] = {with_one_nan(s0), with_one_nan(s1), with_one_nan(s2),
                             with_one_nan(s3)};
            for (int r = 0; r < 4; ++r) memcpy(c + r * columns, &out[r], sizeof out[r]);
        }
}

inline void compute(const Thread& t, const Product& p) {
    if (p.kind == kBf16) compute_product<ag_bf16>(t, p);
    else compute_product<ag_fp16>(t, p);
}

inline void gather(Accumulator& x) {
    for (int i = 0; i < 128; ++i)
        for (int j = 0; j < x.count; ++j)
            x.values[sum_row(i, j) * x.count * 2 + sum_column(i, j)] = x.lanes[i][j];
}
inline void scatter(const Accumulator& x) {
    for (int i = 0; i < 128; ++i)
        for (int j = 0; j < x.count; ++j)
            x.lanes[i][j] = x.values[sum_row(i, j) * x.count * 2 + sum_column(i, j)];
}
// The thread whose registers are not those in `values`, or not what a product in flight leaves
// there.
inline int changed_thread(const Accumulator& x, bool is_poisoned) {
    for (int i = 0; i < 128; ++i)
        for (int j = 0; j < x.count; ++j) {
            float there = x.values[sum_row(i, j) * x.count * 2 + sum_column(i, j)];
            if (bits_of(x.lanes[i][j]) != (is_poisoned ? kInFlight : bits_of(there))) return i;
        }
    return -1;
}
inline int changed_thread(const Fragment& x) {
    for (int i = 0; i < 128; ++i)
        if (memcmp(x.lanes[i], x.words[i], 16)) return i;
    return -1;
}

inline void poison(const Accumulator& x) {
    for (int i = 0; i < 128; ++i)
        for (int j = 0; j < x.count; ++j) x.lanes[i][j] = float_of(kInFlight);
}

// What is kept of the registers that begin at `first`: the one there is, a new one, or that which
// was used longest ago.
template <class T, class Registers, int kMost>
inline T& slot_of(Thread& t, T* (&slots)[kMost], Registers first, Site site) {
    T* oldest = nullptr;
    for (T*& x : slots) {
        if (!x) x = (T*)calloc(1, sizeof(T));
        if (!x) fail(t, kLaunch, site, "has no memory for its products");
        if (x->lanes[0] == first) return *x;
        if (!x->in_flight && (!oldest || x->used < oldest->used)) oldest = x;
        if (!x->lanes[0]) break;
    }
    if (!oldest)
        fail(t, kLaunch, site, "has products in flight with more registers than a CPU run keeps");
    oldest->is_snapshot = false;
    return *oldest;
}

[[noreturn]] AG_COLD void fail_in_flight(Thread& t, int lane, const char* what, Site product,
                                         Site site) {
    Thread& owner = t.block->threads[t.index / 128 * 128 + lane];
    fail(owner, kRegistersInFlight, site,
         "has changed %s of the product at %s:%d before the wait for "
         "it",
         what, product.file, product.line);
}

[[noreturn]] AG_COLD void fail_unfenced(Thread& t, int lane, const char* what, Site site) {
    Thread& owner = t.block->threads[t.index / 128 * 128 + lane];
    fail(owner, kMissingFence, site, "has changed %s since the last ag_wgmma_fence", what);
}

static void take_accumulators(Thread& t, WarpGroup& g, Product& p, Site site) {
    Accumulator& x = slot_of(t, g.accumulators, g.brought[0].sum, site);
    p.sum = &x;
    int count = p.columns / 2;
    bool is_late_run = is_late(*t.block);
    if (x.in_flight) {
        if (x.count != count)
            fail(t, kRegistersInFlight, site, "uses accumulators of another width");
        int changed = changed_thread(x, is_late_run);
        if (changed >= 0) fail_in_flight(t, changed, "accumulators", site, site);
    } else {
        bool is_comparable = x.is_snapshot && x.count == count && p.accumulates;
        x.count = count;
        for (int i = 0; i < 128; ++i) x.lanes[i] = g.brought[i].sum;
        int changed = is_comparable ? changed_thread(x, false) : -1;
        if (changed >= 0) fail_unfenced(t, changed, "accumulators", site);
        gather(x);
        if (is_late_run) poison(x);
    }
    x.used = ++g.uses;
    x.is_snapshot = false;
    ++x.in_flight;
}

static void take_fragment(Thread& t, WarpGroup& g, Product& p, Site site) {
    Fragment& x = slot_of(t, g.fragments, g.brought[0].a, site);
    p.fragment = &x;
    if (x.in_flight || x.is_snapshot) {
        int changed = changed_thread(x);
        if (changed >= 0 && x.in_flight) fail_in_flight(t, changed, "A", site, site);
        if (changed >= 0) fail_unfenced(t, changed, "A", site);
    }
    for (int i = 0; i < 128; ++i) {
        x.lanes[i] = g.brought[i].a;
        memcpy(x.words[i], x.lanes[i], 16);
    }
    x.used = ++g.uses;
    ++x.in_flight;
}

static void check_matrix(Thread& t, WarpGroup& g, const Matrix& m, uint32_t rows, uint32_t number,
                         Site site) {
    Async& a = *t.block->async;
    if (m.span && (m.start >> 7 & (m.span / 16 - 1)))
        fail(t, kMisaligned, site,
             "multiplies a matrix at byte %d of shared memory: its rows begin in "
             "the middle of what a swizzle of %u bytes exchanges",
             (int)(m.start - kSharedBase), m.span);
    uint32_t* clock = t.clock ? group_clock(t, g) : nullptr;
    int group = t.index / 128;
    for_each_chunk(m, rows, [&](uint32_t, uint32_t, uint32_t place) {
        if ((uint64_t)place + 16 > t.shared_bytes)
            fail(t, kSharedBounds, site,
                 "multiplies 16 bytes at byte %lld of shared memory, which has %u",
                 (long long)(int32_t)place, t.shared_bytes);
        if (!clock) return;
        Granule& x = a.granules[place / 16];
        check_load_known(t, clock, x, "multiplies", place, site);
        if (x.is_touched || !x.barrier) check_fenced(t, clock, x, place, "multiplies", true, site);
        x.products[group] = number + 1;
    });
}

static void start_product(Thread& t, WarpGroup& g, Product& p, Site site) {
    const Brought& mine = g.brought[0];
    for (int i = 1; i < 128; ++i) {
        const Brought& other = g.brought[i];
        if (memcmp(other.words, mine.words, sizeof mine.words) ||
            other.accumulates != mine.accumulates)
            fail(t, kDivergentWarp, site,
                 "is in a product, but thread %d of its warp group with another "
                 "matrix",
                 t.index / 128 * 128 + i);
    }
    if (!g.is_fenced)
        fail(t, kMissingFence, site, "is in a product with no ag_wgmma_fence since %s",
             g.started ? "the last wait" : "the beginning");
    p.number = g.started++;
    p.group = g.groups;
    p.site = site;
    if (mine.a) take_fragment(t, g, p, site);
    else check_matrix(t, g, p.a, 64, p.number, site);
    check_matrix(t, g, p.b, (uint32_t)p.columns, p.number, site);
    take_accumulators(t, g, p, site);
    append(t, g.products, p, site);
    if (is_late(*t.block)) return;
    compute(t, p);
    scatter(*p.sum);
}

AG_NOINLINE void multiply_group(Thread& t, const Brought& mine, Product p, Site site) {
    const char* operation = mine.a ? kProductRegisters : kProductShared;
    WarpGroup& g = group_of(t, operation, site);
    g.brought[t.index % 128] = mine;
    group_collective(t, g, operation, site, [&] { start_product(t, g, p, site); });
}

static void end_product(Thread& t, const Product& p, Site site) {
    bool is_late_run = is_late(*t.block);
    if (p.fragment) {
        int changed = changed_thread(*p.fragment);
        if (changed >= 0) fail_in_flight(t, changed, "A", p.site, site);
        --p.fragment->in_flight;
        p.fragment->is_snapshot = false;
    }
    if (is_late_run) compute(t, p);
    if (--p.sum->in_flight) return;
    int changed = changed_thread(*p.sum, is_late_run);
    if (changed >= 0) fail_in_flight(t, changed, "accumulators", p.site, site);
    if (is_late_run) scatter(*p.sum);
}

static void wait_for_products(Thread& t, int pending, Site site) {
    WarpGroup& g = group_of(t, "ag_wgmma_wait", site);
    group_collective(t, g, "ag_wgmma_wait", site, [&] {
        int over = 0;
        while (over < g.products.count && g.products.items[over].group < g.groups - pending)
            end_product(t, g.products.items[over++], site);
        g.products.count -= over;
        memmove(g.products.items, g.products.items + over, g.products.count * sizeof(Product));
        g.over += (uint32_t)over;
        g.is_fenced = false;
        Async& a = *t.block->async;
        Thread* first = &t.block->threads[t.index / 128 * 128];
        for (Thread* x = first; x < first + 128 && x->clock; ++x)
            products_in(a, x->clock, t.index / 128) = g.over;
        g.is_clock_valid = false;
    });
}

static void fence_products(Thread& t, Site site) {
    WarpGroup& g = group_of(t, "ag_wgmma_fence", site);
    group_collective(t, g, "ag_wgmma_fence", site, [&] {
        g.is_fenced = true;
        for (Accumulator* x : g.accumulators)
            if (x && x->lanes[0] && !x->in_flight) gather(*x), x->is_snapshot = true;
        for (Fragment* x : g.fragments) {
            if (!x || !x->lanes[0] || x->in_flight) continue;
            for (int i = 0; i < 128; ++i) memcpy(x->words[i], x->lanes[i], 16);
            x->is_snapshot = true;
        }
    });
}

static void commit_products(Thread& t, Site site) {
    WarpGroup& g = group_of(t, "ag_wgmma_commit", site);
    group_collective(t, g, "ag_wgmma_commit", site, [&] { ++g.groups; });
}

// ---- registers ----------------------------------------------------------------------------------

static void set_registers(Thread& t, int count, bool is_increase, Site site) {
    const char* operation = is_increase ? "ag_registers_increase" : "ag_registers_decrease";
    WarpGroup& g = group_of(t, operation, site);
    Async& a = *t.block->async;
    if (count < 24 || count > 256 || count % 8)
        fail(t, kRegisterCount, site, "wants %d registers: a multiple of 8 from 24 to 256", count);
    if (is_increase ? count < g.registers : count > g.registers)
        fail(t, kRegisterCount, site, "has %d registers, and wants to %s to %d", g.registers,
             is_increase ? "increase" : "decrease", count);
    group_collective(t, g, operation, site, [&] {
        g.waits_for_registers = count - g.registers > a.spare_registers;
        if (g.waits_for_registers) return;
        a.spare_registers -= count - g.registers;
        g.registers = count;
        if (is_increase) return;
        for (int i = 0; i < a.threads; i += 32) {  // those that wait look again
            WarpGroup& other = a.groups[i / 128];
            if (other.waits_for_registers) set_ready(*t.block, i / 32, ~0u);
        }
    });
    while (g.waits_for_registers) {
        if (count - g.registers <= a.spare_registers) {
            a.spare_registers -= count - g.registers;
            g.registers = count;
            g.waits_for_registers = false;
        } else {
            wait_here(t, operation, site);
        }
    }
}

// ---- stmatrix, elect ----------------------------------------------------------------------------

constexpr const char* kStoreMatrices = "ag_store_matrices";
constexpr const char* kStoreMatricesTransposed = "ag_store_matrices_transposed";
constexpr const char* kElect = "ag_elect";

// Each lane writes the row whose address it gives.
AG_NOINLINE void store_matrices(Thread& t, uint32_t address, const uint32_t (&r)[4],
                                bool is_transposed, Site site) {
    uint32_t* rows = t.warp->rows;
    rows[t.lane] = place_of(t, address, 16, kWrite, site);
    uint16_t* matrices = t.warp->matrices;
    uint32_t i = t.lane / 4u, j = t.lane % 4u * 2;
    uint32_t first = is_transposed ? 8 * j + i : 8 * i + j, next = is_transposed ? 8 : 1;
    for (int x = 0; x < 4; ++x) {
        matrices[64 * x + first] = (uint16_t)r[x];
        matrices[64 * x + first + next] = (uint16_t)(r[x] >> 16);
    }
    ++t.counters.shared_writes;
    const char* name = is_transposed ? kStoreMatricesTransposed : kStoreMatrices;
    whole_warp_collective(t, name, site, [&t, site](Warp& w) {
        count_wavefronts(*t.block, w.rows, ~0u, 16);
        Thread* writer = &t - t.lane;
        for (int lane = 0; lane < 32; ++lane, ++writer) {
            for (uint32_t k = 0; t.cells && k < 16; k += 4)
                note_shared_write<4>(*writer, w.rows[lane] + k, kByAddress, site);
            memcpy(t.shared + w.rows[lane], w.matrices + 8 * lane, 16);
        }
    });
}

// Which lane is chosen is not promised, so the last one may be it.
AG_NOINLINE bool elect(Thread& t, Site site) {
    whole_warp_collective(t, kElect, site, [](Warp&) {});
    return t.lane == (t.block->run->launch->mode == kEagerLast ? 31 : 0);
}

// ---- atomic additions: no race with each other -------------------------------------------------

AG_NOINLINE void check_atomic(Thread& t, const void* p, Site site) {
    const Run& run = *t.block->run;
    const uintptr_t address = (uintptr_t)p;
    for (int i = 0; i < run.launch->range_count; ++i) {
        const Range& r = run.ranges[i];
        if (address < r.begin || address + sizeof(int) > r.end) continue;
        if (address % sizeof(int) == 0 && r.is_writable) return;
        fail(t, kReadOnly, site, "adds to bytes of %s, which are read-only or not aligned", r.name);
    }
    fail_global_bounds(t, address, sizeof(int), true, site);
}

// ---- the end: nothing may be on its way ---------------------------------------------------------

static void end_async_thread(Thread& t) {
    Async& a = *t.block->async;
    for (int i = 0; i < a.stores.count; ++i)
        if (a.stores.items[i].thread == t.index)
            fail(t, kUnfinishedCopy, a.stores.items[i].site,
                 "has ended, but its tensor store is still "
                 "on its way%s",
                 a.stores.items[i].group == a.store_groups[t.index] ? ", in no group" : "");
    const WarpGroup& g = a.groups[t.index / 128];
    if (g.products.count)
        fail(t, kUnfinishedCopy, g.products.items[0].site,
             "has ended, but a product of its warp group "
             "is in flight");
    if (g.arrived)
        fail(t, kEndedLane, g.site, "has ended, but thread %d of its warp group waits in %s",
             g.first, g.operation);
}

static void end_async_block(Thread& last) {
    Async& a = *last.block->async;
    for (const Barrier* x = a.barriers; x < a.barriers + a.barrier_count; ++x)
        if (x->loaded > x->seen)
            fail(last, kUnfinishedCopy, x->load_site,
                 "is the last to end, but nobody has waited for the "
                 "tensor load of thread %d to the barrier at byte %u",
                 x->load_thread, x->place);
    for (int id = 0; id < kNamedBarriers; ++id)
        if (a.named[id].arrived)
            fail(last, kBarrierProtocol, a.named[id].site,
                 "is the last to end, but %d of %d threads are "
                 "at barrier %d",
                 a.named[id].arrived, a.named[id].threads, id);
}

const AsyncHooks kAsyncHooks = {is_known,         check_shared_by_clock, meet, describe_waits,
                                end_async_thread, end_async_block};

}  // namespace ag_host

#pragma GCC visibility pop

// ---- the device functions -----------------------------------------------------------------------

struct alignas(64) ag_tensor_map { unsigned char bytes[128]; };

AG_DEVICE int ag_blocks() { return ag_host::self->block->run->launch->grid; }
AG_DEVICE int ag_warp_group() { return ag_host::self->index / 128; }
AG_DEVICE bool ag_elect(AG_SITE) { return ag_host::elect(*ag_host::self, {file, line}); }

AG_DEVICE void ag_barrier_init(ag_u32 barrier, int count, AG_SITE) {
    ag_host::init_barrier(*ag_host::self, barrier, count, {file, line});
}
AG_DEVICE void ag_barrier_init_fence(AG_SITE) {
    ag_host::fence_inits(*ag_host::self, {file, line});
}
AG_DEVICE void ag_barrier_arrive(ag_u32 barrier, AG_SITE) {
    ag_host::Thread& t = *ag_host::self;
    ag_host::arrive(t, ag_host::barrier_at(t, barrier, {file, line}), {file, line});
}
// All copies of the thread are over by then; which of the times in between it is makes no difference to
// who waits for the barrier.
AG_DEVICE void ag_copy_arrive(ag_u32 barrier, AG_SITE) {
    ag_host::Thread& t = *ag_host::self;
    ag_host::commit_copies(t);
    ag_host::wait_for_copies(t, 0);
    ag_host::arrive(t, ag_host::barrier_at(t, barrier, {file, line}), {file, line});
}
AG_DEVICE void ag_barrier_arrive_expect(ag_u32 barrier, int bytes, AG_SITE) {
    ag_host::Thread& t = *ag_host::self;
    ag_host::Barrier& x = ag_host::barrier_at(t, barrier, {file, line});
    ag_host::expect_bytes(t, x, bytes, {file, line});
    ag_host::arrive(t, x, {file, line});
}
AG_DEVICE void ag_barrier_expect(ag_u32 barrier, int bytes, AG_SITE) {
    ag_host::Thread& t = *ag_host::self;
    ag_host::expect_bytes(t, ag_host::barrier_at(t, barrier, {file, line}), bytes, {file, line});
}
AG_DEVICE bool ag_barrier_try_wait(ag_u32 barrier, int parity, AG_SITE) {
    return ag_host::try_wait(*ag_host::self, barrier, parity, {file, line});
}
AG_DEVICE void ag_barrier_wait(ag_u32 barrier, int parity, AG_SITE) {
    ag_host::wait_for_phase(*ag_host::self, barrier, parity, {file, line});
}

AG_DEVICE void ag_named_sync(int id, int threads, AG_SITE) {
    ag_host::named_barrier(*ag_host::self, id, threads, true, {file, line});
}
AG_DEVICE void ag_named_arrive(int id, int threads, AG_SITE) {
    ag_host::named_barrier(*ag_host::self, id, threads, false, {file, line});
}

template <int kRegisters> AG_DEVICE void ag_registers_increase(AG_SITE) {
    ag_host::set_registers(*ag_host::self, kRegisters, true, {file, line});
}
template <int kRegisters> AG_DEVICE void ag_registers_decrease(AG_SITE) {
    ag_host::set_registers(*ag_host::self, kRegisters, false, {file, line});
}

AG_DEVICE void ag_async_fence(AG_SITE) { ag_host::fence_async(*ag_host::self, {file, line}); }

AG_DEVICE void ag_tensor_prefetch(const ag_tensor_map&) {}

#define AG_TENSOR_COPIES(rank, parameters, ...)                                                     \
    AG_DEVICE void ag_tensor_load(ag_u32 to, const ag_tensor_map& map, ag_u32 barrier, parameters,  \
                                  AG_SITE) {                                                        \
        const int at[rank] = {__VA_ARGS__};                                                         \
        ag_host::tensor_load(*ag_host::self, to, &map, barrier, at, rank, {file, line});            \
    }                                                                                               \
    AG_DEVICE void ag_tensor_load_hinted(unsigned long long, ag_u32 to, const ag_tensor_map& map,   \
                                         ag_u32 barrier, parameters, AG_SITE) {                     \
        const int at[rank] = {__VA_ARGS__};                                                         \
        ag_host::tensor_load(*ag_host::self, to, &map, barrier, at, rank, {file, line});            \
    }                                                                                               \
    AG_DEVICE void ag_tensor_store(const ag_tensor_map& map, ag_u32 from, parameters, AG_SITE) {    \
        const int at[rank] = {__VA_ARGS__};                                                         \
        ag_host::tensor_store(*ag_host::self, &map, from, at, rank, {file, line});                  \
    }
#define AG_COMMA ,
AG_TENSOR_COPIES(2, int c0 AG_COMMA int c1, c0, c1)
AG_TENSOR_COPIES(3, int c0 AG_COMMA int c1 AG_COMMA int c2, c0, c1, c2)
AG_TENSOR_COPIES(4, int c0 AG_COMMA int c1 AG_COMMA int c2 AG_COMMA int c3, c0, c1, c2, c3)
AG_TENSOR_COPIES(5, int c0 AG_COMMA int c1 AG_COMMA int c2 AG_COMMA int c3 AG_COMMA int c4, c0, c1,
                 c2, c3, c4)

AG_DEVICE void ag_tensor_load_multicast(ag_u16 blocks, ag_u32 to, const ag_tensor_map& map,
                                        ag_u32 barrier, int c0, int c1, int c2, int c3, AG_SITE) {
    if (blocks != 1)
        ag_host::fail(*ag_host::self, ag_host::kLaunch, {file, line},
                      "loads a box to other blocks of a cluster, and a CPU runs none");
    ag_tensor_load(to, map, barrier, c0, c1, c2, c3, file, line);
}

AG_DEVICE void ag_tensor_store_commit(AG_SITE) {
    ag_host::Thread& t = *ag_host::self;
    ++ag_host::async_of(t, {file, line}).store_groups[t.index];
}
template <int kPending> AG_DEVICE void ag_tensor_store_wait_read(AG_SITE) {
    static_assert(kPending >= 0, "a number of groups");
    ag_host::wait_for_stores(*ag_host::self, kPending, {file, line});
}
template <int kPending> AG_DEVICE void ag_tensor_store_wait(AG_SITE) {
    ag_tensor_store_wait_read<kPending>(file, line);
}

AG_DEVICE void ag_wgmma_fence(AG_SITE) { ag_host::fence_products(*ag_host::self, {file, line}); }
AG_DEVICE void ag_wgmma_commit(AG_SITE) { ag_host::commit_products(*ag_host::self, {file, line}); }
template <int kPending> AG_DEVICE void ag_wgmma_wait(AG_SITE) {
    static_assert(kPending >= 0, "a number of groups");
    ag_host::wait_for_products(*ag_host::self, kPending, {file, line});
}

#define AG_PRODUCTS(element, Kind)                                                                  \
    template <ag_u32 kHighA, ag_u32 kHighB, int kMajorB, int kCount>                                \
    AG_DEVICE void ag_wgmma_shared_##element(float (&d)[kCount], ag_u32 a, ag_u32 b,                \
                                             bool accumulate, AG_SITE) {                            \
        static_assert(kCount % 4 == 0 && kCount <= 128, "8 to 256 columns");                        \
        AG_CHECK_LOCAL(d);                                                                          \
        ag_host::Product p = {};                                                                    \
        p.a = ag_host::matrix_of(a, kHighA, false);                                                 \
        p.b = ag_host::matrix_of(b, kHighB, kMajorB != 0);                                          \
        p.columns = kCount * 2;                                                                     \
        p.accumulates = accumulate;                                                                 \
        p.kind = Kind;                                                                              \
        ag_host::multiply_group(*ag_host::self, {d, nullptr, {a, b}, accumulate}, p, {file, line}); \
    }                                                                                               \
    template <ag_u32 kHighB, int kMajorB, int kCount>                                               \
    AG_DEVICE void ag_wgmma_registers_##element(float (&d)[kCount], const ag_u32 (&a)[4], ag_u32 b, \
                                                bool accumulate, AG_SITE) {                         \
        static_assert(kCount % 4 == 0 && kCount <= 128, "8 to 256 columns");                        \
        AG_CHECK_LOCAL(d);                                                                          \
        AG_CHECK_LOCAL(a);                                                                          \
        ag_host::Product p = {};                                                                    \
        p.b = ag_host::matrix_of(b, kHighB, kMajorB != 0);                                          \
        p.columns = kCount * 2;                                                                     \
        p.accumulates = accumulate;                                                                 \
        p.kind = Kind;                                                                              \
        ag_host::multiply_group(*ag_host::self, {d, a, {0, b}, accumulate}, p, {file, line});       \
    }
AG_PRODUCTS(bf16, ag_host::kBf16)
AG_PRODUCTS(fp16, ag_host::kFp16)

template <int kCount> AG_DEVICE void ag_pin(float (&)[kCount]) {}
template <int kCount> AG_DEVICE void ag_pin(ag_u32 (&)[kCount][4]) {}

AG_DEVICE ag_u32 ag_shuffle_xor(ag_u32 x, int mask, AG_SITE) {
    return ag_host::bits_of(
        ag_host::shuffle_xor(*ag_host::self, ag_host::float_of(x), mask, {file, line}));
}
AG_DEVICE void ag_store8(void* to, ag_u32 a, ag_u32 b, AG_SITE) {
    ag_host::Thread& t = *ag_host::self;
    ++t.counters.global_stores;
    ag_host::check_global(t, to, 8, true, {file, line});
    const ag_u32 words[2] = {a, b};
    memcpy(to, words, sizeof words);
}
AG_DEVICE int ag_fetch_add(int* p, int x, AG_SITE) {
    ag_host::Thread& t = *ag_host::self;
    ++t.counters.global_loads;
    ++t.counters.global_stores;
    ag_host::check_atomic(t, p, {file, line});
    return __atomic_fetch_add(p, x, __ATOMIC_RELAXED);
}

AG_DEVICE void ag_store_matrices(ag_u32 address, const ag_u32 (&r)[4], AG_SITE) {
    AG_CHECK_LOCAL(r);
    ag_host::store_matrices(*ag_host::self, address, r, false, {file, line});
}
AG_DEVICE void ag_store_matrices_transposed(ag_u32 address, const ag_u32 (&r)[4], AG_SITE) {
    AG_CHECK_LOCAL(r);
    ag_host::store_matrices(*ag_host::self, address, r, true, {file, line});
}

#endif  // AG_HOST_WGMMA_H
