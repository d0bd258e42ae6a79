// What is left of the instructions: matrices to shared memory, plain and transposed; bytes expected apart from the
// arrival; a look at a barrier that does not wait; a copy for the block alone.
struct MatricesArgs {
    ag_tensor_map rows;   // [8][64] elements
    const ag_u32* given;  // [32 lanes][4]
    ag_u32* plain;        // [32] rows of 16 bytes
    ag_u32* transposed;   // the same
    ag_u32* loaded;       // [64] rows of 16 bytes
    int* looks;           // [32 lanes]: before and behind the end of the phase, as bits
};

constexpr int kThreads = 32;
constexpr int kPlain = 0, kTransposed = 512, kRows = 1024, kBarrier = 2048;

AG_KERNEL(kThreads, wgmma_matrices, MatricesArgs) {
    AG_SHARED_MEMORY(buffer);
    const ag_u32 shared = ag_shared_address(buffer, 0), barrier = shared + kBarrier;
    const int lane = ag_thread();
    if (lane == 0) {
        ag_barrier_init(barrier, 32);
        ag_barrier_init_fence();
    }
    ag_sync();
    const bool before = ag_barrier_try_wait(barrier, 0), earlier = ag_barrier_try_wait(barrier, 1);
    if (ag_elect()) {
        ag_barrier_expect(barrier, 1024);
        ag_tensor_load_multicast(1, shared + kRows, args.rows, barrier, 0, 0, 0, 0);
    }
    ag_sync_warp();
    ag_barrier_arrive(barrier);
    ag_barrier_wait(barrier, 0);
    const bool behind = ag_barrier_try_wait(barrier, 0), next = ag_barrier_try_wait(barrier, 1);
    ag_store(args.looks + lane, before + 2 * earlier + 4 * behind + 8 * next);
    ag_u32 r[4];
    for (int half = 0; half < 2; ++half) {
        ag_shared_load16(r, shared + kRows + half * 512 + lane * 16);
        ag_store16(args.loaded + half * 128 + lane * 4, r[0], r[1], r[2], r[3]);
    }
    for (int i = 0; i < 4; ++i) r[i] = ag_load(args.given + lane * 4 + i);
    ag_store_matrices(shared + kPlain + lane * 16, r);
    ag_store_matrices_transposed(shared + kTransposed + (lane ^ 5) * 16, r);
    ag_sync_warp();
    ag_shared_load16(r, shared + kPlain + lane * 16);
    ag_store16(args.plain + lane * 4, r[0], r[1], r[2], r[3]);
    ag_shared_load16(r, shared + kTransposed + (lane ^ 5) * 16);
    ag_store16(args.transposed + lane * 4, r[0], r[1], r[2], r[3]);
}
