// Reads the 16-byte chunks of 64 rows of 128 bytes, as matrices and one by one, and writes the words
// of each row; rows of 128 bytes meet the same banks, unless their chunks are exchanged.
struct BanksArgs {
    ag_u32* sum;  // [64]
    int swizzles, reads_matrices, reads_chunks, writes_words;
};

constexpr int kThreads = 64, kPitch = 128, kRows = 64;

AG_KERNEL(kThreads, mma_banks, BanksArgs) {
    AG_SHARED_MEMORY(buffer);
    const ag_u32 shared = ag_shared_address(buffer, 0);
    ag_shared<ag_u32> words(buffer, 0, kRows * kPitch / 4);
    const int row = ag_thread();
    for (int i = ag_thread(); i < kRows * kPitch / 4; i += kThreads) words[i] = i;
    ag_sync();
    ag_u32 sum = 0;
    for (int chunk = 0; chunk < 8; ++chunk) {
        const ag_u32 at = shared + row * kPitch + (args.swizzles ? chunk ^ row % 8 : chunk) * 16;
        ag_u32 x[4] = {};
        if (args.reads_matrices) ag_load_matrices(x, at);
        sum += x[0] + x[1] + x[2] + x[3];
        if (args.reads_chunks) ag_shared_load16(x, at);
        sum += x[0] + x[1] + x[2] + x[3];
    }
    ag_store(args.sum + row, sum);
    ag_sync();
    for (int i = 0; i < 32; ++i)
        if (args.writes_words) ag_shared_store4(shared + row * kPitch + (args.swizzles ? i ^ row % 32 : i) * 4, i);
}
