// The functions of templates/common/mma.cuh and reads.cuh for a CPU; included behind host.h.
//
// Sections: wavefronts; shared memory by address; asynchronous copies; collectives; matrices;
// products; votes; the device functions.
//
// What a warp does together (matrices, products, votes) is a collective: all 32 lanes come to the
// same place, and the last one does it for all.
//
// Of an 8x8 matrix lane 4 r + c holds elements 2 c and 2 c + 1 of row r in one register, so the
// registers of the lanes, one behind the other, are the matrix, row by row.
#ifndef AG_HOST_MMA_H
#define AG_HOST_MMA_H

#ifndef __has_builtin  // gcc before 10
#define __has_builtin(name) 0
#endif

#pragma GCC visibility push(hidden)

namespace ag_host {

// ---- wavefronts: how often shared memory is asked for what could go at once --------------------
//
// Shared memory has 32 banks; consecutive words lie in consecutive banks.  Lanes that want
// different words of one bank are served one after the other, in wavefronts; 128 bytes in 32
// banks are one.  Wider accesses go in phases of 128 bytes: 8 lanes with 16 bytes each.  An H200
// counts the same (l1tex__data_pipe_lsu_wavefronts_mem_shared).  Asynchronous copies are left out:
// there, theirs followed from the source, whatever the banks of the destination.

constexpr int kMostOpenAccesses = 4096;  // of a line, between two meetings of the warp

template <class T> inline bool grow(T*& items, int count, int& capacity) {
    if (AG_LIKELY(count < capacity)) return true;
    int larger = capacity ? 2 * capacity : 16;
    T* moved = (T*)realloc(items, larger * sizeof(T));
    if (!moved) return false;
    items = moved;
    capacity = larger;
    return true;
}

// Wavefronts of one phase: `count` lanes from the lane `first` on, those in `lanes`; `bytes` is at least a word.
inline int wavefronts_of_phase(const uint32_t* places, uint32_t lanes, int first, int count,
                               uint32_t bytes) {
    uint32_t slots = 128 / bytes, met = 0;  // a slot is the banks of one access
    bool is_even = true;
    for (int i = first; i < first + count; ++i) {
        if (!(lanes >> i & 1)) continue;
        uint32_t bit = 1u << (places[i] / bytes % slots);
        is_even = is_even && !(met & bit);
        met |= bit;
    }
    if (AG_LIKELY(is_even)) return met != 0;
    int most = 0, distinct[32] = {};
    for (int i = first; i < first + count; ++i) {
        bool is_new = lanes >> i & 1;
        for (int j = first; j < i; ++j)  // what several lanes want is served once
            if (lanes >> j & 1) is_new = is_new && places[i] / bytes != places[j] / bytes;
        int& here = distinct[places[i] / bytes % slots];
        here += is_new;
        if (here > most) most = here;
    }
    return most;
}

inline void count_wavefronts(Block& b, const uint32_t* places, uint32_t lanes, uint32_t bytes) {
    bytes = bytes < 4 ? 4 : bytes;  // lanes that want parts of one word are served at once
    int width = 128 / (int)bytes;
    for (int first = 0; first < 32; first += width) {
        int needed = wavefronts_of_phase(places, lanes, first, width, bytes);
        b.wavefronts += needed;
        b.wavefronts_least += needed > 0;
    }
}

// A warp's accesses since its lanes met last.
AG_NOINLINE void count_open_accesses(Block& b, AccessLog& log) {
    log.close = nullptr;
    for (int l = 0; l < log.count; ++l) {
        AccessLine& line = log.lines[l];
        for (int i = 0; i < line.count; ++i)
            count_wavefronts(b, line.accesses[i].places, line.accesses[i].lanes, line.bytes);
        line.count = 0;
        memset(line.made, 0, sizeof line.made);
    }
}

inline AccessLine* line_of(AccessLog& log, uint32_t bytes, Site site) {
    for (int i = 0; i < log.count; ++i) {
        AccessLine& line = log.lines[(log.recent + i) % log.count];
        if (line.site.line != site.line || line.site.file != site.file) continue;
        log.recent = (int)(&line - log.lines);
        return &line;
    }
    if (!grow(log.lines, log.count, log.capacity)) return nullptr;
    AccessLine& line = log.lines[log.count++];
    line = {site, (int)bytes, 0, 0, nullptr, {}};
    return &line;
}

// Lanes that take different ways before they meet again may be put together wrongly.
AG_NOINLINE void log_access(Thread& t, uint32_t place, uint32_t bytes, Site site) {
    AccessLog& log = t.block->logs[t.warp_index];
    AccessLine* line = line_of(log, bytes, site);
    if (!line) return;  // no memory: not counted
    int i = line->made[t.lane]++;
    if (i >= kMostOpenAccesses || !grow(line->accesses, i, line->capacity)) return;
    WarpAccess& access = line->accesses[i];
    if (i == line->count) access.lanes = 0, ++line->count;
    access.lanes |= 1u << t.lane;
    access.places[t.lane] = place;
    log.close = count_open_accesses;
}

// ---- shared memory by address: an element, 4 or 16 bytes ---------------------------------------------------

// The 32-bit address of the buffer's first byte.  Not 0, so that a place in the buffer that is
// taken for an address is noticed.
constexpr uint32_t kSharedBase = 1024;

// The place in the block's buffer of what lies at an address.
inline uint32_t place_of(Thread& t, uint32_t address, uint32_t bytes, Access access, Site site) {
    uint32_t place = address - kSharedBase;
    bool is_inside = (uint64_t)place + bytes <= t.shared_bytes;
    if (AG_LIKELY(is_inside && !(place & (bytes - 1)))) return place;
    const char* verb = access == kWrite ? "writes" : "reads";
    long long byte = (long long)(int32_t)place;
    if (!is_inside)
        fail(t, kSharedBounds, site, "%s %u bytes at byte %lld of shared memory, which has %u",
             verb, bytes, byte, t.shared_bytes);
    fail(t, kMisaligned, site, "%s %u bytes at byte %lld of shared memory: the address is not "
         "aligned", verb, bytes, byte);
}

// A read of 16 bytes, by a thread or its warp.  The frequent case is that of note_shared_read.
inline void note_read16(Thread& t, uint32_t place, Access access, Site site) {
    Cell* cells = &cell_at(t, place);  // of four words, next to each other
    Stamp mark = access == kWarpRead ? t.stamp | kSeveralLanes : t.stamp;
    for (uint32_t i = 0; i < 4; ++i) {
        Stamp written = cells[i].written, read = cells[i].read;
        bool is_plain = written >= t.block_first && written < t.block_since &&
                        (written & kLow) == size_code(4);
        if (AG_UNLIKELY(!is_plain)) {
            check_shared(t, place + 4 * i, 4, access, kByAddress, site);
        } else if (read < t.block_since) {
            cells[i].read = mark;
        } else if (read != mark && (read & kLow) != kSeveralWarps) {
            cells[i].read = access == kWarpRead ? with_warp_as_reader(t, read)
                                                : with_reader(t, read);
        }
    }
}

AG_NOINLINE void load16(Thread& t, uint32_t (&x)[4], uint32_t address, Site site) {
    uint32_t place = place_of(t, address, 16, kRead, site);
    ++t.counters.shared_reads;
    if (AG_LIKELY(t.cells != nullptr)) note_read16(t, place, kRead, site);
    log_access(t, place, 16, site);
    memcpy(x, t.shared + place, 16);
}

// An element of up to 4 bytes, or a pair of them.
template <class T> inline T load_element(Thread& t, uint32_t address, Site site) {
    uint32_t place = place_of(t, address, sizeof(T), kRead, site);
    ++t.counters.shared_reads;
    if (AG_LIKELY(t.cells != nullptr)) {
        constexpr uint32_t piece = sizeof(T) < 4 ? sizeof(T) : 4;
        for (uint32_t at = place; at < place + sizeof(T); at += piece)
            note_shared_read<piece>(t, at, kByAddress, site);
    }
    log_access(t, place, sizeof(T), site);
    T x;
    memcpy(&x, t.shared + place, sizeof(T));
    return x;
}

template <class T> inline void store_element(Thread& t, uint32_t address, T x, Site site) {
    uint32_t place = place_of(t, address, sizeof(T), kWrite, site);
    ++t.counters.shared_writes;
    if (AG_LIKELY(t.cells != nullptr)) note_shared_write<sizeof(T)>(t, place, kByAddress, site);
    log_access(t, place, sizeof(T), site);
    memcpy(t.shared + place, &x, sizeof(T));
}

AG_NOINLINE void store4(Thread& t, uint32_t address, uint32_t x, Site site) {
    uint32_t place = place_of(t, address, 4, kWrite, site);
    ++t.counters.shared_writes;
    t.counters.notes += note_of(x, place);
    if (AG_LIKELY(t.cells != nullptr)) note_shared_write<4>(t, place, kByAddress, site);
    log_access(t, place, 4, site);
    memcpy(t.shared + place, &x, 4);
}

// ---- asynchronous copies -----------------------------------------------------------------------
//
// A copy is on its way from its start until its thread has waited for the group that it is in.  It
// reads and writes at some time in between, so in between
//   - its destination may be touched by nobody, not even by its thread;
//   - its source may not be written;
//   - what was done to the destination before has to be ordered before the start, as for any
//     write of the thread; and what comes after the wait is ordered behind it as behind any write:
//     at once for the thread, behind a barrier for others.
// None of this asks when the bytes move.  That is the launch's `landing`: in the wait (late), or at
// the start (early), the two ends of what may happen.
//
// While a copy is on its way, the cells of its destination hold the stamp of its start with size
// code 0, which no access takes for something it knows.
//
// Tensor copies and asynchronous products, which are waited for in other ways, are in host_wgmma.h.

inline void move_bytes(const Thread& t, const Copy& copy) {
    if (copy.source) memcpy(t.shared + copy.place, copy.source, copy.bytes);
    memset(t.shared + copy.place + copy.bytes, 0, copy.size - copy.bytes);
}

// Is a write to global memory one to the source of a copy on its way?
AG_COLD void check_sources(Thread& t, uintptr_t address, size_t bytes, const Range& r, Site site) {
    const Thread* threads = t.block->threads;
    for (const Thread* owner = threads; owner < threads + t.block->thread_count; ++owner)
        for (int i = owner->copies->first; i < owner->copies->count; ++i) {
            const Copy& copy = owner->copies->items[i];
            uintptr_t source = (uintptr_t)copy.source;
            if (!source || source >= address + bytes || address >= source + copy.bytes) continue;
            char name[200];
            name_copy(t, *owner, copy, name, sizeof name);
            fail(t, kGlobalRace, site, "writes byte %zu of %s, which %s may still read",
                 (size_t)(address - r.begin), r.name, name);
        }
}

inline void note_copy_start(Thread& t, uint32_t place, uint32_t size, Site site) {
    Cell* cells = &cell_at(t, place);
    for (uint32_t i = 0; i < size / 4; ++i) {
        Stamp written = cells[i].written;
        bool is_plain = written >= t.block_first && written < t.block_since &&
                        (written & kLow) == size_code(4) && cells[i].read < t.block_since;
        if (AG_UNLIKELY(!is_plain)) check_shared(t, place + 4 * i, 4, kWrite, kByAddress, site);
        cells[i] = {t.stamp, 0};
    }
}

// The queue is full: what has landed at its front makes room, else it grows.
inline bool make_room(Copies& copies) {
    if (copies.first > copies.capacity / 2) {
        copies.count -= copies.first;
        memmove(copies.items, copies.items + copies.first, copies.count * sizeof(Copy));
        copies.first = 0;
    }
    return grow(copies.items, copies.count, copies.capacity);
}

// Copies `bytes`, and zeros up to `size`.  With 0 bytes the source may lie anywhere, but aligned.
AG_NOINLINE void start_copy(Thread& t, uint32_t address, const void* from, uint32_t bytes,
                            uint32_t size, Site site) {
    uint32_t place = place_of(t, address, size, kWrite, site);
    if ((uintptr_t)from & (size - 1))
        fail(t, kMisaligned, site, "copies %u bytes from global memory: the address is not "
             "aligned", size);
    if (bytes > size) fail(t, kLaunch, site, "copies %u bytes of %u", bytes, size);
    Copies& copies = *t.copies;
    if (copies.count == copies.capacity && !make_room(copies))
        fail(t, kLaunch, site, "has no memory for its copies");
    Copy copy = {nullptr, place, bytes, size, copies.groups, site, false};
    if (bytes > 0) {
        ++t.counters.global_loads;
        const Range& r = check_global(t, from, bytes, false, site);
        copy.source = (const unsigned char*)from;
        copy.is_source_writable = r.cells != nullptr;
        t.block->writable_sources += copy.is_source_writable;
        t.block->check_sources = check_sources;
    }
    ++t.counters.shared_writes;
    if (AG_LIKELY(t.cells != nullptr)) note_copy_start(t, place, size, site);
    if (t.block->run->launch->landing == kEarly) move_bytes(t, copy);
    copies.items[copies.count++] = copy;
}

inline void commit_copies(Thread& t) { ++t.copies->groups; }

inline void land(Thread& t, const Copy& copy, bool is_late) {
    if (is_late) move_bytes(t, copy);
    if (copy.is_source_writable) {
        --t.block->writable_sources;
        check_global(t, copy.source, copy.bytes, false, copy.site);  // read until now
    }
    if (AG_UNLIKELY(t.cells == nullptr)) return;
    Cell* cells = &cell_at(t, copy.place);
    for (uint32_t i = 0; i < copy.size / 4; ++i) cells[i] = {t.stamp | size_code(4), 0};
}

// All groups but the newest `pending` ones; copies that are in no group yet are not waited for.
AG_NOINLINE void wait_for_copies(Thread& t, int pending) {
    Copies& copies = *t.copies;
    bool is_late = t.block->run->launch->landing == kLate;
    while (copies.first < copies.count &&
           copies.items[copies.first].group < copies.groups - pending)
        land(t, copies.items[copies.first++], is_late);
    if (copies.first == copies.count) copies.first = copies.count = 0;
}

// ---- collectives of all 32 lanes ---------------------------------------------------------------

template <class Finish>
inline void whole_warp_collective(Thread& t, const char* name, Site site, Finish finish) {
    if (AG_UNLIKELY(t.warp->lanes != ~0u))
        fail(t, kDivergentWarp, site, "is in %s, but its warp has only %d lanes", name,
             __builtin_popcount(t.warp->lanes));
    warp_collective(t, name, site, finish);
}

constexpr const char* kLoadMatrices = "ag_load_matrices";
constexpr const char* kLoadMatricesTransposed = "ag_load_matrices_transposed";
constexpr const char* kMultiply = "ag_mma";
constexpr const char* kBallot = "ag_ballot";
constexpr const char* kShuffle = "ag_shuffle";
constexpr const char* kWarpMin = "ag_warp_min";
constexpr const char* kWarpMax = "ag_warp_max";

// ---- matrices from shared memory ---------------------------------------------------------------

// Each lane's row is read by its whole warp, because every lane gets something of it or of its
// neighbours: a lane that has written it needs a barrier, too.
AG_NOINLINE void load_matrices(Thread& t, uint32_t (&r)[4], uint32_t address, bool is_transposed,
                               Site site) {
    uint32_t* rows = t.warp->rows;
    rows[t.lane] = place_of(t, address, 16, kRead, site);
    ++t.counters.shared_reads;
    const char* name = is_transposed ? kLoadMatricesTransposed : kLoadMatrices;
    whole_warp_collective(t, name, site, [&t, site](Warp& w) {
        count_wavefronts(*t.block, w.rows, ~0u, 16);
        Thread* reader = &t - t.lane;
        uint16_t* matrices = w.matrices;
        for (const uint32_t* row = w.rows; row < w.rows + 32; ++row, ++reader, matrices += 8) {
            if (AG_LIKELY(t.cells != nullptr)) note_read16(*reader, *row, kWarpRead, site);
            memcpy(matrices, t.shared + *row, 16);
        }
    });
    const uint16_t* matrix = t.warp->matrices;
    uint32_t i = t.lane / 4u, j = t.lane % 4u * 2;
    uint32_t first = is_transposed ? 8 * j + i : 8 * i + j, next = is_transposed ? 8 : 1;
    for (uint32_t* x = r; x < r + 4; ++x, matrix += 64)
        *x = matrix[first] | (uint32_t)matrix[first + next] << 16;
}

// ---- products ----------------------------------------------------------------------------------

// A row of 8 numbers.
typedef float Floats __attribute__((vector_size(32)));
typedef uint32_t Words __attribute__((vector_size(32)));
typedef uint16_t Halves __attribute__((vector_size(16)));

inline Words select(Words mask, Words yes, Words no) { return (mask & yes) | (~mask & no); }

// 8 elements as float32, which holds all of them; like ag_to_float, but for the bits of a NaN.
template <class T> inline Floats widen(const uint16_t* row);

template <> inline Floats widen<ag_bf16>(const uint16_t* row) {
    Halves halves;
    memcpy(&halves, row, sizeof halves);
    return (Floats)(__builtin_convertvector(halves, Words) << 16);
}
template <> inline Floats widen<ag_fp16>(const uint16_t* row) {
    Halves halves;
    memcpy(&halves, row, sizeof halves);
#if defined(__F16C__) && __has_builtin(__builtin_ia32_vcvtph2ps256)
    typedef short Shorts __attribute__((vector_size(16)));
    return (Floats)__builtin_ia32_vcvtph2ps256((Shorts)halves);
#else
    Words x = __builtin_convertvector(halves, Words);
    Words sign = (x & 0x8000u) << 16, size = (x & 0x7fffu) << 13, exponent = size & 31u << 23;
    // A subnormal number is the fraction behind a 1, less that 1; both are multiples of 2^-24.
    Words subnormal = (Words)((Floats)(size + (113u << 23)) - 0x1p-14f);
    Words bits = size + select((Words)(exponent == 31u << 23), Words{} + (224u << 23),
                               Words{} + (112u << 23));
    return (Floats)(sign | select((Words)(exponent == 0u), subnormal, bits));
#endif
}

inline Floats with_one_nan(Floats x) {  // the one that the GPU gives
    return (Floats)select((Words)(x == x), (Words)x, Words{} + bits_of(AG_NAN));
}

// C += A B, by 4 rows of C at a time, all in float32: products are exact, and each sum is rounded,
// from the first column of A to the last.  A GPU adds in another way, so its last bits differ.  It
// also keeps products beyond float32's range until they are added: where two of them cancel, it
// may have a number or an infinity, and this a NaN.
template <class T> AG_NOINLINE void multiply_matrices(Warp& w) {
    float a[16 * 16];
    Floats b[16];
    for (int row = 0; row < 16; ++row) {
        const uint16_t* left = w.a + row * 8;
        Floats low = widen<T>(left), high = widen<T>(left + 128);
        memcpy(a + row * 16, &low, sizeof low);
        memcpy(a + row * 16 + 8, &high, sizeof high);
    }
    Floats* b_row = b;
    for (const uint16_t* row = w.b; b_row < b + 16; row += 8) *b_row++ = widen<T>(row);

    for (int row = 0; row < 16; row += 4) {
        float* c = w.c + row * 8;
        Floats sum0, sum1, sum2, sum3;
        memcpy(&sum0, c, sizeof sum0);
        memcpy(&sum1, c + 8, sizeof sum1);
        memcpy(&sum2, c + 16, sizeof sum2);
        memcpy(&sum3, c + 24, sizeof sum3);
        const float* x = a + row * 16;
        for (b_row = b; b_row < b + 16; ++b_row, ++x) {
            sum0 += x[0] * *b_row;
            sum1 += x[16] * *b_row;
            sum2 += x[32] * *b_row;
            sum3 += x[48] * *b_row;
        }
        sum0 = with_one_nan(sum0);
        sum1 = with_one_nan(sum1);
        sum2 = with_one_nan(sum2);
        sum3 = with_one_nan(sum3);
        memcpy(c, &sum0, sizeof sum0);
        memcpy(c + 8, &sum1, sizeof sum1);
        memcpy(c + 16, &sum2, sizeof sum2);
        memcpy(c + 24, &sum3, sizeof sum3);
    }
}

template <class T>
AG_NOINLINE void multiply(Thread& t, float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                          uint32_t b1, Site site) {
    Warp& w = *t.warp;
    uint32_t lane = t.lane, row = lane / 4, pair = lane % 4 * 2;
    // a's registers are the matrices above each other, then those to the right.
    uint16_t* to_a = w.a + 2 * lane;
    for (int i = 0; i < 4; ++i) memcpy(to_a + 64 * i, &a[i], 4);
    // b's hold two elements of a column.
    uint16_t* to_b = w.b + pair * 8 + row;
    to_b[0] = (uint16_t)b0;
    to_b[8] = (uint16_t)(b0 >> 16);
    to_b[64] = (uint16_t)b1;
    to_b[72] = (uint16_t)(b1 >> 16);
    float* my_c = w.c + 2 * lane;
    memcpy(my_c, &c[0], 8);
    memcpy(my_c + 64, &c[2], 8);
    whole_warp_collective(t, kMultiply, site, multiply_matrices<T>);
    memcpy(&c[0], my_c, 8);
    memcpy(&c[2], my_c + 64, 8);
}

// ---- votes -------------------------------------------------------------------------------------

AG_NOINLINE uint32_t ballot(Thread& t, bool condition, Site site) {
    t.warp->votes[t.lane] = condition;
    whole_warp_collective(t, kBallot, site, [](Warp& w) {
        uint32_t bits = 0;
        for (int lane = 0; lane < 32; ++lane) bits |= (uint32_t)w.votes[lane] << lane;
        w.vote = (int)bits;
    });
    return (uint32_t)t.warp->vote;
}

AG_NOINLINE uint32_t shuffle(Thread& t, uint32_t x, int source, Site site) {
    if (AG_UNLIKELY(source < 0 || source > 31))
        fail(t, kShuffleLane, site, "is lane %d and shuffles from lane %d: there is no such lane",
             t.lane, source);
    memcpy(&t.warp->in[t.lane], &x, 4);
    t.warp->source[t.lane] = source;
    whole_warp_collective(t, kShuffle, site, [](Warp& w) {
        for (int lane = 0; lane < 32; ++lane) memcpy(&w.out[lane], &w.in[w.source[lane]], 4);
    });
    memcpy(&x, &t.warp->out[t.lane], 4);
    return x;
}

AG_NOINLINE int extreme(Thread& t, int x, bool is_largest, Site site) {
    t.warp->votes[t.lane] = x;
    whole_warp_collective(t, is_largest ? kWarpMax : kWarpMin, site, [is_largest](Warp& w) {
        w.vote = w.votes[0];
        for (int lane = 1; lane < 32; ++lane)
            if (is_largest ? w.votes[lane] > w.vote : w.votes[lane] < w.vote)
                w.vote = w.votes[lane];
    });
    return t.warp->vote;
}

}  // namespace ag_host

#pragma GCC visibility pop

// ---- the device functions ----------------------------------------------------------------------

AG_DEVICE ag_u32 ag_shared_address(unsigned char* buffer, int offset) {
    return ag_host::kSharedBase + (ag_u32)(buffer - ag_host::self->shared) + (ag_u32)offset;
}

template <class T> AG_DEVICE T ag_load_if(const T* from, bool exists, AG_SITE) {
    return exists ? ag_load(from, file, line) : T{};
}

AG_DEVICE void ag_copy_async(ag_u32 to, const void* from, bool valid, AG_SITE) {
    ag_host::start_copy(*ag_host::self, to, from, valid ? 16 : 0, 16, {file, line});
}
AG_DEVICE void ag_copy_async_part(ag_u32 to, const void* from, int bytes, AG_SITE) {
    ag_host::start_copy(*ag_host::self, to, from, (uint32_t)bytes, 16, {file, line});
}
AG_DEVICE void ag_copy_async4(ag_u32 to, const void* from, bool valid, AG_SITE) {
    ag_host::start_copy(*ag_host::self, to, from, valid ? 4 : 0, 4, {file, line});
}
AG_DEVICE void ag_copy_commit() { ag_host::commit_copies(*ag_host::self); }
template <int kPending> AG_DEVICE void ag_copy_wait() {
    static_assert(kPending >= 0, "a number of groups");
    ag_host::wait_for_copies(*ag_host::self, kPending);
}

// The compiler checks an index where an element is used, not where a reference is made of it, so
// functions that take an array by reference ask how much of it is there.
#if __has_builtin(__builtin_dynamic_object_size)
#define AG_BYTES_THERE(x) __builtin_dynamic_object_size(&(x), 0)
#else
#define AG_BYTES_THERE(x) sizeof(x)
#endif
#define AG_CHECK_LOCAL(x)                                                   \
    if (AG_UNLIKELY(AG_BYTES_THERE(x) < sizeof(x)))                         \
        ag_host::fail(*ag_host::self, ag_host::kLocalBounds, {file, line},  \
                      "uses an element outside a local array")

AG_DEVICE void ag_load_matrices(ag_u32 (&r)[4], ag_u32 address, AG_SITE) {
    AG_CHECK_LOCAL(r);
    ag_host::load_matrices(*ag_host::self, r, address, false, {file, line});
}
AG_DEVICE void ag_load_matrices_transposed(ag_u32 (&r)[4], ag_u32 address, AG_SITE) {
    AG_CHECK_LOCAL(r);
    ag_host::load_matrices(*ag_host::self, r, address, true, {file, line});
}

template <class T>
AG_DEVICE void ag_mma(float (&c)[4], const ag_u32 (&a)[4], ag_u32 b0, ag_u32 b1, AG_SITE) {
    AG_CHECK_LOCAL(c);
    AG_CHECK_LOCAL(a);
    ag_host::multiply<T>(*ag_host::self, c, a, b0, b1, {file, line});
}

template <class T> AG_DEVICE ag_u32 ag_pack(float low, float high) {
    return ag_from_float<T>(low).bits | (ag_u32)ag_from_float<T>(high).bits << 16;
}

AG_DEVICE int ag_renew(int x) { return x; }

// More exact than the GPU's approximations; the special values are the same.
AG_DEVICE float ag_exp2_approx(float x) {
    if (x != x) return AG_NAN;
    float y = __builtin_exp2f(x);
    return y < 0x1p-126f ? 0.0f : y;
}
AG_DEVICE float ag_exp2_quick(float x) { return x != x ? AG_NAN : __builtin_exp2f(x); }
AG_DEVICE float ag_log2_quick(float x) {
    if (x != x || x < 0.0f) return AG_NAN;
    return x == 0.0f ? -AG_INFINITY : __builtin_log2f(x);
}
AG_DEVICE float ag_log2_approx(float x) {
    return __builtin_fabsf(x) < 0x1p-126f ? -AG_INFINITY : ag_log2_quick(x);
}
AG_DEVICE float ag_reciprocal_approx(float x) {
    const float small = 0x1p-126f;
    if (__builtin_fabsf(x) < small) return __builtin_copysignf(AG_INFINITY, x);
    float y = 1.0f / x;
    return __builtin_fabsf(y) < small ? __builtin_copysignf(0.0f, y) : y;
}

AG_DEVICE float ag_abs_quick(float x) { return __builtin_fabsf(x); }

AG_DEVICE float ag_select(bool condition, float then, float otherwise) { return condition ? then : otherwise; }

AG_DEVICE float ag_max_number(float a, float b) {
    if (a != a) return b != b ? AG_NAN : b;
    if (b != b) return a;
    if (a == b) return ag_host::bits_of(a) >> 31 ? b : a;  // +0 is above -0
    return a > b ? a : b;
}

AG_DEVICE ag_u32 ag_ballot(bool condition, AG_SITE) {
    return ag_host::ballot(*ag_host::self, condition, {file, line});
}
template <class T> AG_DEVICE T ag_shuffle(T x, int lane, AG_SITE) {
    uint32_t words[sizeof(T) / 4];
    memcpy(words, &x, sizeof x);
    for (uint32_t& word : words) word = ag_host::shuffle(*ag_host::self, word, lane, {file, line});
    memcpy(&x, words, sizeof x);
    return x;
}
AG_DEVICE int ag_warp_min(int x, AG_SITE) {
    return ag_host::extreme(*ag_host::self, x, false, {file, line});
}
AG_DEVICE int ag_warp_max(int x, AG_SITE) {
    return ag_host::extreme(*ag_host::self, x, true, {file, line});
}
AG_DEVICE int ag_count_bits(ag_u32 x) { return __builtin_popcount(x); }
AG_DEVICE ag_u32 ag_low_bits(int n) { return n >= 32 ? ~0u : (1u << n) - 1; }
AG_DEVICE int ag_lowest_bit(ag_u32 x) { return x == 0 ? -1 : __builtin_ctz(x); }

AG_DEVICE void ag_store16(void* to, ag_u32 a, ag_u32 b, ag_u32 c, ag_u32 d, AG_SITE) {
    ag_host::Thread& t = *ag_host::self;
    ++t.counters.global_stores;
    ag_host::check_global(t, to, 16, true, {file, line});
    const ag_u32 words[4] = {a, b, c, d};
    memcpy(to, words, sizeof words);
}
template <class T> AG_DEVICE T ag_shared_load(ag_u32 address, AG_SITE) {
    return ag_host::load_element<T>(*ag_host::self, address, {file, line});
}
template <class T> AG_DEVICE void ag_shared_store(ag_u32 address, T x, AG_SITE) {
    ag_host::store_element(*ag_host::self, address, x, {file, line});
}
AG_DEVICE void ag_shared_store4(ag_u32 address, ag_u32 x, AG_SITE) {
    ag_host::store4(*ag_host::self, address, x, {file, line});
}
AG_DEVICE void ag_shared_load16(ag_u32 (&r)[4], ag_u32 address, AG_SITE) {
    AG_CHECK_LOCAL(r);
    ag_host::load16(*ag_host::self, r, address, {file, line});
}

#endif  // AG_HOST_MMA_H
