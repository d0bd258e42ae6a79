// One warp copies words and stores others, and arrives behind both; the other waits for that, and reads them.
struct ArriveArgs {
    const float* given;  // [64]
    float* out;          // [32]: the sum of a word that was copied and one that was stored
};

constexpr int kThreads = 64, kCopied = 0, kStored = 128, kBarrier = 256;

AG_KERNEL(kThreads, wgmma_staged, ArriveArgs) {
    AG_SHARED_MEMORY(buffer);
    const ag_u32 shared = ag_shared_address(buffer, 0), barrier = shared + kBarrier;
    const int lane = ag_thread() % 32;
    if (ag_thread() == 0) {
        ag_barrier_init(barrier, 64);
        ag_barrier_init_fence();
    }
    ag_sync();
    if (ag_thread() < 32) {
        ag_copy_async4(shared + kCopied + 4 * lane, args.given + lane, true);
        ag_shared_store(shared + kStored + 4 * lane, ag_load(args.given + 32 + lane));
        ag_copy_arrive(barrier);
        ag_barrier_arrive(barrier);
        return;
    }
    ag_barrier_wait(barrier, 0);
    const int other = lane ^ 1;
    ag_store(args.out + other, ag_shared_load<float>(shared + kCopied + 4 * other) + ag_shared_load<float>(shared + kStored + 4 * other));
}
