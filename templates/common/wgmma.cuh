// ---- device functions of sm_90a: barriers in memory, tensor copies, products of warp groups -----
// They stand beside those of mma.cuh.  A warp group is four warps, threads 128 i to 128 i + 127.

// What a swizzle exchanges: 16-byte chunks inside of 128, 64 or 32 bytes, by the address.
enum ag_swizzle { kSwizzleNone, kSwizzle128, kSwizzle64, kSwizzle32 };
// Along which of its sides a matrix is dense: along what is summed (K), or along rows or columns (MN).
enum ag_major { kMajorK, kMajorMN };

// A matrix in shared memory, as a product finds it, in two words; bytes are multiples of 16.
// (PTX ISA: wgmma, matrix descriptor)
//   dense along K   8 rows are `stride` bytes from the next 8; with no swizzle, 8 elements along K
//                   are `leading` bytes from the next 8
//   dense along MN  with a swizzle, 8 elements along K are `stride` bytes from the next 8, and what
//                   a swizzle spans along MN `leading` bytes from the next; with none, the two change places
// Adding to the low word moves the matrix by so many times 16 bytes.
AG_DEVICE ag_u32 ag_matrix_low(ag_u32 address, int leading) { return (address & 0x3ffffu) >> 4 | (ag_u32)leading >> 4 << 16; }
AG_DEVICE constexpr ag_u32 ag_matrix_high(ag_swizzle swizzle, int stride) { return (ag_u32)swizzle << 30 | (ag_u32)stride >> 4; }

// What L2 keeps: as the driver writes such policies, for whole lines.
enum ag_policy : unsigned long long { kEvictFirst = 0x12f0000000000000ull, kEvictLast = 0x14f0000000000000ull };

#ifndef AG_HOST

// What the driver's cuTensorMapEncodeTiled writes; it lies in the kernel's arguments.
struct alignas(64) ag_tensor_map { unsigned long long words[16]; };

// How many blocks the grid has.
AG_DEVICE int ag_blocks() { return (int)gridDim.x; }
// What global memory held before `x` was added; one thread after the other.  (PTX ISA: atom.global.add)
AG_DEVICE int ag_fetch_add(int* p, int x) { return atomicAdd(p, x); }
// The number of this thread's warp group, which the compiler knows to be one for the warp.  (PTX ISA: shfl.sync.idx)
AG_DEVICE int ag_warp_group() { return __shfl_sync(0xffffffffu, (int)threadIdx.x / 128, 0); }
// True in one lane of the warp, always the same.  (PTX ISA: elect.sync)
AG_DEVICE bool ag_elect() {
    int is_elected;
    asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.b32 %0, 1, 0, p;\n}" : "=r"(is_elected));
    return is_elected != 0;
}

// A barrier in shared memory, 8 bytes.  A phase is over when `count` arrivals and all bytes expected have
// come; then the next one begins.  What was done before an arrival is seen behind a wait.  (PTX ISA: mbarrier.init)
AG_DEVICE void ag_barrier_init(ag_u32 barrier, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}
// Behind this thread's inits, and before others learn of them.  (PTX ISA: fence.mbarrier_init)
AG_DEVICE void ag_barrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
// (PTX ISA: mbarrier.arrive)
AG_DEVICE void ag_barrier_arrive(ag_u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Expect so many bytes of tensor copies in this phase; with the arrival, or alone.
// (PTX ISA: mbarrier.arrive.expect_tx, mbarrier.expect_tx)
AG_DEVICE void ag_barrier_arrive_expect(ag_u32 barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
AG_DEVICE void ag_barrier_expect(ag_u32 barrier, int bytes) {
    asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
// Whether the phase of this parity is over; phases count from 0, and before them lies one of parity 1 that
// is over.  Waits for a while.  (PTX ISA: mbarrier.try_wait.parity)
AG_DEVICE bool ag_barrier_try_wait(ag_u32 barrier, int parity) {
    int is_over;
    asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.b32 %0, 1, 0, p;\n}"
                 : "=r"(is_over) : "r"(barrier), "r"(parity) : "memory");
    return is_over != 0;
}
// Wait until it is.  (PTX ISA: mbarrier.try_wait.parity)
AG_DEVICE void ag_barrier_wait(ag_u32 barrier, int parity) {
    asm volatile("{\n.reg .pred p;\nWAIT_%=:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@!p bra WAIT_%=;\n}"
                 ::"r"(barrier), "r"(parity) : "memory");
}

// Barriers by number, 1 to 15, for `threads` threads, whole warps; those that arrive do not wait.
// (PTX ISA: bar.sync, bar.arrive)
AG_DEVICE void ag_named_sync(int id, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }
AG_DEVICE void ag_named_arrive(int id, int threads) { asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory"); }

// Registers of each thread of a warp group from here on: a multiple of 8, 24 to 256.  An increase waits
// until others have given up enough.  (PTX ISA: setmaxnreg)
template <int kRegisters> AG_DEVICE void ag_registers_increase() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters)); }
template <int kRegisters> AG_DEVICE void ag_registers_decrease() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters)); }

// Between this thread's own writes to shared memory and the barrier behind which a tensor copy or a product
// uses them.  (PTX ISA: fence.proxy.async)
AG_DEVICE void ag_async_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Fetch a tensor map before it is needed.  (PTX ISA: prefetch.tensormap)
AG_DEVICE void ag_tensor_prefetch(const ag_tensor_map& map) { asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory"); }

// Start copying the box at these coordinates (the densest first, elements that are outside are zeros) to
// shared memory, at a multiple of 128; its bytes arrive at the barrier.  One thread does it.
// (PTX ISA: cp.async.bulk.tensor, shared::cluster.global, mbarrier::complete_tx::bytes)
AG_DEVICE void ag_tensor_load(ag_u32 to, const ag_tensor_map& map, ag_u32 barrier, int c0, int c1) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];"
                 ::"r"(to), "l"(&map), "r"(barrier), "r"(c0), "r"(c1) : "memory");
}
AG_DEVICE void ag_tensor_load(ag_u32 to, const ag_tensor_map& map, ag_u32 barrier, int c0, int c1, int c2) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];"
                 ::"r"(to), "l"(&map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2) : "memory");
}
AG_DEVICE void ag_tensor_load(ag_u32 to, const ag_tensor_map& map, ag_u32 barrier, int c0, int c1, int c2, int c3) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], [%2];"
                 ::"r"(to), "l"(&map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3) : "memory");
}
AG_DEVICE void ag_tensor_load(ag_u32 to, const ag_tensor_map& map, ag_u32 barrier, int c0, int c1, int c2, int c3, int c4) {
    asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6, %7}], [%2];"
                 ::"r"(to), "l"(&map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4) : "memory");
}
// The same with a policy for L2.  (PTX ISA: cp.async.bulk.tensor, L2::cache_hint)
AG_DEVICE void ag_tensor_load_hinted(ag_policy policy, ag_u32 to, const ag_tensor_map& map, ag_u32 barrier, int c0, int c1) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%3, %4}], [%2], %5;"
                 ::"r"(to), "l"(&map), "r"(barrier), "r"(c0), "r"(c1), "l"((unsigned long long)policy) : "memory");
}
AG_DEVICE void ag_tensor_load_hinted(ag_policy policy, ag_u32 to, const ag_tensor_map& map, ag_u32 barrier, int c0, int c1, int c2) {
    asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%3, %4, %5}], [%2], %6;"
                 ::"r"(to), "l"(&map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "l"((unsigned long long)policy) : "memory");
}
AG_DEVICE void ag_tensor_load_hinted(ag_policy policy, ag_u32 to, const ag_tensor_map& map, ag_u32 barrier, int c0, int c1, int c2, int c3) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%3, %4, %5, %6}], [%2], %7;"
                 ::"r"(to), "l"(&map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "l"((unsigned long long)policy) : "memory");
}
AG_DEVICE void ag_tensor_load_hinted(ag_policy policy, ag_u32 to, const ag_tensor_map& map, ag_u32 barrier, int c0, int c1, int c2, int c3, int c4) {
    asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%3, %4, %5, %6, %7}], [%2], %8;"
                 ::"r"(to), "l"(&map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4), "l"((unsigned long long)policy) : "memory");
}
// The same to one place in several blocks of a cluster, one bit each.  (PTX ISA: cp.async.bulk.tensor, multicast::cluster)
AG_DEVICE void ag_tensor_load_multicast(ag_u16 blocks, ag_u32 to, const ag_tensor_map& map, ag_u32 barrier, int c0, int c1, int c2, int c3) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%3, %4, %5, %6}], [%2], %7;"
                 ::"r"(to), "l"(&map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "h"(blocks) : "memory");
}

// Start copying a box from shared memory to the tensor; elements that are outside are left out.
// (PTX ISA: cp.async.bulk.tensor, global.shared::cta, bulk_group)
AG_DEVICE void ag_tensor_store(const ag_tensor_map& map, ag_u32 from, int c0, int c1) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];" ::"l"(&map), "r"(from), "r"(c0), "r"(c1) : "memory");
}
AG_DEVICE void ag_tensor_store(const ag_tensor_map& map, ag_u32 from, int c0, int c1, int c2) {
    asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];"
                 ::"l"(&map), "r"(from), "r"(c0), "r"(c1), "r"(c2) : "memory");
}
AG_DEVICE void ag_tensor_store(const ag_tensor_map& map, ag_u32 from, int c0, int c1, int c2, int c3) {
    asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];"
                 ::"l"(&map), "r"(from), "r"(c0), "r"(c1), "r"(c2), "r"(c3) : "memory");
}
AG_DEVICE void ag_tensor_store(const ag_tensor_map& map, ag_u32 from, int c0, int c1, int c2, int c3, int c4) {
    asm volatile("cp.async.bulk.tensor.5d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5, %6}], [%1];"
                 ::"l"(&map), "r"(from), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4) : "memory");
}
// Close the group of this thread's stores since the last one.  (PTX ISA: cp.async.bulk.commit_group)
AG_DEVICE void ag_tensor_store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Wait until all but the newest `kPending` groups have read shared memory, or have also written the tensor.
// (PTX ISA: cp.async.bulk.wait_group.read, cp.async.bulk.wait_group)
template <int kPending> AG_DEVICE void ag_tensor_store_wait_read() { asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory"); }
template <int kPending> AG_DEVICE void ag_tensor_store_wait() { asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory"); }

// Products of a warp group, which go on beside it: the functions ag_wgmma_* are made as they are needed
// (wgmma.cu.j2).  The fence comes between what touches their registers and the first of them; a group of
// them is over, and its registers free, behind the wait for all but the newest `kPending` groups.
// (PTX ISA: wgmma.fence, wgmma.commit_group, wgmma.wait_group)
AG_DEVICE void ag_wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
AG_DEVICE void ag_wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kPending> AG_DEVICE void ag_wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory"); }
// Keeps the compiler from moving what uses these registers to the other side.  (No instruction)
template <int kCount> AG_DEVICE void ag_pin(float (&x)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(x[i])::"memory");
}
template <int kCount> AG_DEVICE void ag_pin(ag_u32 (&x)[kCount][4]) {
#pragma unroll
    for (int i = 0; i < kCount * 4; ++i) asm volatile("" : "+r"(x[i / 4][i % 4])::"memory");
}

// A word of the lane whose number differs by `mask`.  (PTX ISA: shfl.sync.bfly)
AG_DEVICE ag_u32 ag_shuffle_xor(ag_u32 x, int mask) { return __shfl_xor_sync(0xffffffffu, x, mask); }
// 8 bytes to global memory, at a multiple of 8.  (PTX ISA: st.global.v2)
AG_DEVICE void ag_store8(void* to, ag_u32 a, ag_u32 b) { *(uint2*)to = make_uint2(a, b); }

// Four 8x8 matrices of 16-bit elements to shared memory: the reverse of ag_load_matrices.
// (PTX ISA: stmatrix.x4, stmatrix.x4.trans)
AG_DEVICE void ag_store_matrices(ag_u32 address, const ag_u32 (&r)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
                 ::"r"(address), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]) : "memory");
}
AG_DEVICE void ag_store_matrices_transposed(ag_u32 address, const ag_u32 (&r)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};"
                 ::"r"(address), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]) : "memory");
}

#endif  // AG_HOST

// ---- end of device functions ----------------------------------------------------------------
