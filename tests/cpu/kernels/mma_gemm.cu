// out = a b: tiles come by asynchronous copies, the next ones while these are multiplied.
typedef ag_bf16 Element;

struct GemmArgs {
    const Element* a;  // [rows][depth]
    const Element* b;  // [depth][columns]
    float* out;        // [rows][columns]
    int rows, columns, depth, column_tiles;
};

constexpr int kThreads = 128;          // 2 x 2 warps
constexpr int kTile = 64, kStep = 32;  // rows and columns of a block, and what is summed at once
constexpr int kBytesA = kTile * kStep * 2, kBytesB = kStep * kTile * 2;
constexpr int kStageBytes = kBytesA + kBytesB;

// Byte offsets of 16-byte chunks, exchanged so that 8 rows of one column meet all banks.
AG_DEVICE ag_u32 place_a(int row, int chunk) { return row * kStep * 2 + (chunk ^ row / 2 % 4) * 16; }
AG_DEVICE ag_u32 place_b(int row, int chunk) { return row * kTile * 2 + (chunk ^ row % 8) * 16; }

AG_DEVICE void load(const GemmArgs& args, ag_u32 stage, int row0, int column0, int k0) {
    for (int i = ag_thread(); i < kTile * kStep / 8; i += kThreads) {
        const int row = i / (kStep / 8), chunk = i % (kStep / 8);
        const bool is_there = row0 + row < args.rows && k0 + chunk * 8 < args.depth;
        const Element* from = args.a + (row0 + row) * args.depth + k0 + chunk * 8;
        ag_copy_async(stage + place_a(row, chunk), from, is_there);
    }
    for (int i = ag_thread(); i < kStep * kTile / 8; i += kThreads) {
        const int row = i / (kTile / 8), chunk = i % (kTile / 8);
        const bool is_there = k0 + row < args.depth && column0 + chunk * 8 < args.columns;
        const Element* from = args.b + (k0 + row) * args.columns + column0 + chunk * 8;
        ag_copy_async(stage + kBytesA + place_b(row, chunk), from, is_there);
    }
}

AG_DEVICE void multiply(ag_u32 stage, int warp_row, int warp_column, float (&c)[2][4][4]) {
    const int lane = ag_thread() % 32;
    for (int k = 0; k < kStep / 16; ++k) {
        ag_u32 a[2][4], b[2][4];
        for (int i = 0; i < 2; ++i)
            ag_load_matrices(a[i], stage + place_a(warp_row + i * 16 + lane % 16, k * 2 + lane / 16));
        for (int j = 0; j < 2; ++j)
            ag_load_matrices_transposed(
                b[j], stage + kBytesA + place_b(k * 16 + lane % 16, warp_column / 8 + j * 2 + lane / 16));
        for (int i = 0; i < 2; ++i)
            for (int j = 0; j < 4; ++j) ag_mma<Element>(c[i][j], a[i], b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
    }
}

AG_KERNEL(kThreads, mma_gemm, GemmArgs) {
    AG_SHARED_MEMORY(buffer);
    const ag_u32 shared = ag_shared_address(buffer, 0);
    const int row0 = ag_block() / args.column_tiles * kTile, column0 = ag_block() % args.column_tiles * kTile;
    const int warp = ag_thread() / 32, lane = ag_thread() % 32;
    const int warp_row = warp / 2 * 32, warp_column = warp % 2 * 32;
    float c[2][4][4] = {};

    load(args, shared, row0, column0, 0);
    ag_copy_commit();
    for (int k0 = 0, stage = 0; k0 < args.depth; k0 += kStep, stage ^= 1) {
        if (k0 + kStep < args.depth) load(args, shared + (stage ^ 1) * kStageBytes, row0, column0, k0 + kStep);
        ag_copy_commit();
        ag_copy_wait<1>();
        ag_sync();  // this step has arrived
        multiply(shared + stage * kStageBytes, warp_row, warp_column, c);
        ag_sync();  // nobody reads it any more
    }
    for (int i = 0; i < 2; ++i)
        for (int j = 0; j < 4; ++j)
            for (int e = 0; e < 4; ++e) {
                const int row = row0 + warp_row + i * 16 + e / 2 * 8 + lane / 4;
                const int column = column0 + warp_column + j * 8 + lane % 4 * 2 + e % 2;
                if (row < args.rows && column < args.columns) ag_store(args.out + row * args.columns + column, c[i][j][e]);
            }
}
