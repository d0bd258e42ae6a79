// Does what tables say.  In each step a warp may load a matrix; then a thread touches at most one
// word or 16 bytes of shared memory, or starts a copy there; then it may wait for its copies; and then
// its warp or its block meets, or nobody.
struct CopyAccessesArgs {
    const int* accesses;  // [grid][steps][threads]: kind + 8 * (place in units of its size)
    const int* waits;     // [grid][steps][threads]: 0 none, 1 commit, 2 to 4 commit and wait<0 to 2>
    const int* matrices;  // [grid][steps][warps]: 0 none, 1 + a place of 16 bytes
    const int* barriers;  // [grid][steps][warps]: 0 none, 1 warp, 2 block
    const ag_u32* source;
    int steps;
};

constexpr int kThreads = 96, kWarps = kThreads / 32, kBytes = 64;
constexpr int kRead = 1, kWrite = 2, kCopy = 3, kRead16 = 4, kWriteByAddress = 5;

AG_KERNEL(kThreads, mma_accesses, CopyAccessesArgs) {
    AG_SHARED_MEMORY(buffer);
    ag_shared<ag_u32> words(buffer, 0, kBytes / 4);
    const ag_u32 shared = ag_shared_address(buffer, 0);

    if (ag_thread() < kBytes / 4) words[ag_thread()] = 0;
    ag_sync();
    for (int step = 0; step < args.steps; ++step) {
        const int row = ag_block() * args.steps + step;
        const int access = ag_load(args.accesses + row * kThreads + ag_thread());
        const int wait = ag_load(args.waits + row * kThreads + ag_thread());
        const int matrix = ag_load(args.matrices + row * kWarps + ag_thread() / 32);
        const int barrier = ag_load(args.barriers + row * kWarps + ag_thread() / 32);
        const int kind = access % 8, index = access / 8;
        ag_u32 x[4];
        if (matrix > 0) ag_load_matrices(x, shared + (matrix - 1) * 16);
        if (kind == kRead) x[0] = words[index];
        if (kind == kWrite) words[index] = 1;
        if (kind == kCopy) ag_copy_async(shared + index * 16, args.source + index * 4, index % 2 == 0);
        if (kind == kRead16) ag_shared_load16(x, shared + index * 16);
        if (kind == kWriteByAddress) ag_shared_store4(shared + index * 4, 2);
        if (wait > 0) ag_copy_commit();
        if (wait == 2) ag_copy_wait<0>();
        if (wait == 3) ag_copy_wait<1>();
        if (wait == 4) ag_copy_wait<2>();
        if (barrier == 1) ag_sync_warp();
        if (barrier == 2) ag_sync();
    }
    ag_copy_commit();
    ag_copy_wait<0>();
}
