// D = C + A B, by the warp groups of a block: shared memory comes as it is, byte for byte, and the
// descriptors of A and B as they are, so this is about what a product makes of them.
constexpr int kColumns = 64;
constexpr ag_u32 kHighA = ag_matrix_high(kSwizzle128, 1024);
constexpr ag_u32 kHighB = ag_matrix_high(kSwizzle128, 1024);
constexpr ag_major kMajorB = kMajorK;

struct ProductsArgs {
    const ag_u32* image;      // of shared memory
    const ag_u32* fragments;  // of A, [128][4]
    const float* c;           // [128][kColumns / 2]
    float* from_shared;       // the same
    float* from_registers;
    int words, a, b, leading_a, leading_b;
};

constexpr int kThreads = 128;

AG_KERNEL(kThreads, wgmma_products, ProductsArgs) {
    AG_SHARED_MEMORY(buffer);
    const ag_u32 shared = ag_shared_address(buffer, 0);
    const int i = ag_thread();
    for (int w = i; w < args.words; w += kThreads) ag_shared_store4(shared + w * 4, ag_load(args.image + w));
    ag_async_fence();
    ag_sync();
    const ag_u32 low_a = ag_matrix_low(shared + args.a, args.leading_a);
    const ag_u32 low_b = ag_matrix_low(shared + args.b, args.leading_b);
    float x[kColumns / 2], y[kColumns / 2];
    ag_u32 a[4];
    for (int e = 0; e < 4; ++e) a[e] = ag_load(args.fragments + i * 4 + e);
    for (int e = 0; e < kColumns / 2; ++e) {
        x[e] = ag_load(args.c + i * (kColumns / 2) + e);
        y[e] = AG_NAN;
    }
    ag_wgmma_fence();
    ag_wgmma_shared_bf16<kHighA, kHighB, kMajorB>(x, low_a, low_b, true);
    ag_wgmma_commit();
    ag_wgmma_registers_bf16<kHighB, kMajorB>(y, a, low_b, false);
    ag_wgmma_commit();
    ag_wgmma_wait<1>();
    ag_pin(x);
    for (int e = 0; e < kColumns / 2; ++e) ag_store(args.from_shared + i * (kColumns / 2) + e, x[e]);
    ag_wgmma_wait<0>();
    ag_pin(y);
    for (int e = 0; e < kColumns / 2; ++e) ag_store(args.from_registers + i * (kColumns / 2) + e, y[e]);
}
