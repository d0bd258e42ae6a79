// A block hands values from one thread to another through global memory.
struct WorkspaceArgs {
    float* work;
    float* out;
};

constexpr int kThreads = 64;

AG_KERNEL(kThreads, workspace, WorkspaceArgs) {
    float* mine = args.work + ag_block() * kThreads;
    int i = ag_thread();

    ag_store(mine + i, (float)i);
    ag_sync();
    float other = ag_load(mine + (kThreads - 1 - i));
    ag_sync();
    ag_store(mine + i, other + 1.0f);
    ag_sync_warp();
    ag_store(args.out + ag_block() * kThreads + i, ag_load(mine + (i ^ 1)));
}
