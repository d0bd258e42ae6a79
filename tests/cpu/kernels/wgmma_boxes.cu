// Boxes: from a tensor to shared memory, whose bytes are written down, and on to another tensor.
constexpr int kThreads = 64, kRank = 4;

struct BoxesArgs {
    ag_tensor_map from, to;
    ag_u32* image;  // [words]: shared memory behind the load
    const int* at;  // [2][kRank]: coordinates in either tensor, the densest first
    int words;
};

constexpr int kData = 1024;  // the barrier comes before the box

AG_KERNEL(kThreads, wgmma_boxes, BoxesArgs) {
    AG_SHARED_MEMORY(buffer);
    const ag_u32 barrier = ag_shared_address(buffer, 0), data = ag_shared_address(buffer, kData);
    const int* at = args.at;
    if (ag_thread() == 0) {
        ag_barrier_init(barrier, 1);
        ag_barrier_init_fence();
    }
    ag_sync();
    if (ag_thread() == 0) {
        ag_tensor_prefetch(args.from);
        ag_barrier_arrive_expect(barrier, args.words * 4);
        ag_tensor_load(data, args.from, barrier, ag_load(at), ag_load(at + 1), ag_load(at + 2), ag_load(at + 3));
    }
    ag_barrier_wait(barrier, 0);
    for (int w = ag_thread() * 4; w < args.words; w += kThreads * 4) {
        ag_u32 x[4];
        ag_shared_load16(x, data + w * 4);
        ag_store16(args.image + w, x[0], x[1], x[2], x[3]);
    }
    if (ag_thread() == 0) {
        ag_tensor_store(args.to, data, ag_load(at + kRank), ag_load(at + kRank + 1), ag_load(at + kRank + 2), ag_load(at + kRank + 3));
        ag_tensor_store_commit();
        ag_tensor_store_wait<0>();
    }
}
