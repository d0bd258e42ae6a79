// Matrix products, one a block, from fragments as they are.
typedef ag_bf16 Element;

struct ProductsArgs {
    const ag_u32* a;  // [grid][32 lanes][4]
    const ag_u32* b;  // [grid][32 lanes][2]
    const float* c;   // [grid][32 lanes][4]
    float* out;       // [grid][32 lanes][4]
};

constexpr int kThreads = 32;

AG_KERNEL(kThreads, mma_products, ProductsArgs) {
    const int i = ag_block() * kThreads + ag_thread();
    ag_u32 a[4];
    float c[4];
    for (int e = 0; e < 4; ++e) {
        a[e] = ag_load(args.a + i * 4 + e);
        c[e] = ag_load(args.c + i * 4 + e);
    }
    ag_mma<Element>(c, a, ag_load(args.b + i * 2), ag_load(args.b + i * 2 + 1));
    for (int e = 0; e < 4; ++e) ag_store(args.out + i * 4 + e, c[e]);
}
