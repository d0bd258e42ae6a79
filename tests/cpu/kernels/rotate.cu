// Every warp turns its own 32 elements by one place, `turns` times; warps never meet.
struct RotateArgs {
    const float* in;
    float* out;
    int turns;
};

constexpr int kThreads = 64;

AG_KERNEL(kThreads, rotate, RotateArgs) {
    AG_SHARED_MEMORY(buffer);
    ag_shared<float> mine(buffer, ag_thread() / 32 * 32 * 4, 32);
    int lane = ag_thread() % 32;

    mine[lane] = ag_load(args.in + ag_thread());
    for (int turn = 0; turn < args.turns; ++turn) {
        ag_sync_warp();  // all have written
        float next = mine[(lane + 1) % 32];
        ag_sync_warp();  // all have read
        mine[lane] = next;
    }
    ag_store(args.out + ag_thread(), mine[lane]);
}
