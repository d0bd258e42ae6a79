// out = in transposed, by 32 x 32 tiles; one block a tile, 8 rows of 32 threads.
struct TransposeArgs {
    const float* in;
    float* out;
    int rows, columns;
};

constexpr int kTile = 32, kThreads = 256;

AG_KERNEL(kThreads, transpose, TransposeArgs) {
    AG_SHARED_MEMORY(buffer);
    ag_shared<float> tile(buffer, 0, kTile * (kTile + 1));
    int tiles_across = (args.columns + kTile - 1) / kTile;
    int row0 = ag_block() / tiles_across * kTile, column0 = ag_block() % tiles_across * kTile;
    int x = ag_thread() % kTile, y0 = ag_thread() / kTile;

    for (int y = y0; y < kTile; y += kThreads / kTile)
        if (row0 + y < args.rows && column0 + x < args.columns)
            tile[y * (kTile + 1) + x] = ag_load(args.in + (row0 + y) * args.columns + column0 + x);
    ag_sync();
    for (int y = y0; y < kTile; y += kThreads / kTile)
        if (column0 + y < args.columns && row0 + x < args.rows)
            ag_store(args.out + (column0 + y) * args.rows + row0 + x, tile[x * (kTile + 1) + y]);
}
