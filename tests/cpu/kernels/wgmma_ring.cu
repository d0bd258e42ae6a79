// A ring between two warp groups: one lane loads rows to two stages, a warp group doubles them and hands them
// back through shared memory.  Every kind of barrier, and the fence between both ways to shared memory.
constexpr int kThreads = 256, kStages = 2, kRows = 16, kColumns = 64;  // of a tile
constexpr int kTileBytes = kRows * kColumns * 2;
constexpr int kFull = 0, kEmpty = kFull + 8 * kStages, kTiles = 1024, kOut = kTiles + kStages * kTileBytes;

struct RingArgs {
    ag_tensor_map from, to;
    int steps;  // tiles of a block
};

AG_DEVICE ag_u32 twice(ag_u32 x) { return ag_pack<ag_bf16>(2.0f * ag_to_float(ag_bf16{(ag_u16)x}), 2.0f * ag_to_float(ag_bf16{(ag_u16)(x >> 16)})); }

AG_DEVICE void produce(const RingArgs& args, ag_u32 shared) {
    int stage = 0, parity = 1;
    for (int step = 0; step < args.steps; ++step) {
        ag_barrier_wait(shared + kEmpty + 8 * stage, parity);
        ag_barrier_arrive_expect(shared + kFull + 8 * stage, kTileBytes);
        ag_tensor_load_hinted(kEvictFirst, shared + kTiles + stage * kTileBytes, args.from, shared + kFull + 8 * stage, 0,
                              (ag_block() * args.steps + step) * kRows);
        if (++stage == kStages) {
            stage = 0;
            parity ^= 1;
        }
    }
}

AG_DEVICE void consume(const RingArgs& args, ag_u32 shared) {
    const int warp = ag_thread() / 32 % 4, lane = ag_thread() % 32;
    // Of four 8x8 matrices a lane names a row: rows lane % 16, and 16 bytes of columns.
    const ag_u32 place = lane % 16 * (kColumns * 2) + warp * 32 + lane / 16 * 16;
    int stage = 0, parity = 0;
    for (int step = 0; step < args.steps; ++step) {
        ag_barrier_wait(shared + kFull + 8 * stage, parity);
        ag_u32 r[4];
        ag_load_matrices(r, shared + kTiles + stage * kTileBytes + place);
        ag_sync_warp();
        if (lane == 0) ag_barrier_arrive(shared + kEmpty + 8 * stage);
        for (int i = 0; i < 4; ++i) r[i] = twice(r[i]);
        if (warp == 0 && ag_elect()) ag_tensor_store_wait_read<0>();
        ag_named_sync(1, 128);  // the last tile has left
        ag_store_matrices(shared + kOut + place, r);
        ag_async_fence();
        if (warp == 0) ag_named_sync(2, 128); else ag_named_arrive(2, 128);  // this one is there
        if (warp == 0 && ag_elect()) {
            ag_tensor_store(args.to, shared + kOut, 0, (ag_block() * args.steps + step) * kRows);
            ag_tensor_store_commit();
        }
        if (++stage == kStages) {
            stage = 0;
            parity ^= 1;
        }
    }
    if (warp == 0 && ag_elect()) ag_tensor_store_wait<0>();
}

AG_KERNEL(kThreads, wgmma_ring, RingArgs) {
    AG_SHARED_MEMORY(buffer);
    const ag_u32 shared = ag_shared_address(buffer, 0);
    if (ag_thread() == 0) {
        for (int i = 0; i < kStages; ++i) {
            ag_barrier_init(shared + kFull + 8 * i, 1);
            ag_barrier_init(shared + kEmpty + 8 * i, 4);
        }
        ag_barrier_init_fence();
    }
    ag_sync();
    if (ag_warp_group() == 0) {
        ag_registers_decrease<56>();
        if (ag_thread() == 0) produce(args, shared);
    } else {
        ag_registers_increase<256>();
        consume(args, shared);
    }
}
