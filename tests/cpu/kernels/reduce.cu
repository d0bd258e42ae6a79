// out[block] = the sum of a block's share of `in`: by shuffles in a warp, then over the warps.
struct ReduceArgs {
    const float* in;
    float* out;
    int count;  // elements of one block
};

constexpr int kThreads = 128, kWarps = kThreads / 32;

AG_DEVICE float warp_sum(float x) {
    for (int mask = 16; mask > 0; mask /= 2) x += ag_shuffle_xor(x, mask);
    return x;
}

AG_KERNEL(kThreads, reduce, ReduceArgs) {
    AG_SHARED_MEMORY(buffer);
    ag_shared<float> partial(buffer, 0, kWarps);
    int warp = ag_thread() / 32, lane = ag_thread() % 32;

    float sum = 0.0f;
    for (int i = ag_thread(); i < args.count; i += kThreads)
        sum += ag_load(args.in + ag_block() * args.count + i);
    sum = warp_sum(sum);
    if (lane == 0) partial[warp] = sum;
    ag_sync();
    if (warp == 0) {
        float total = warp_sum(lane < kWarps ? partial[lane] : 0.0f);
        if (lane == 0) ag_store(args.out + ag_block(), total);
    }
}
