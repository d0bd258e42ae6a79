// Accesses to shared memory, in an order that barriers of every kind decide as a table says.  A 3 is a fence, with an
// element a tensor store of the first four elements.
struct OrdersArgs {
    ag_tensor_map out;
    const int* accesses;  // [steps][kThreads]: 0 none, else 1 read, 2 write or 3, and 4 times the element
    const int* meets;     // [steps][kThreads]: bits, see below
    const int* arrivals;  // [steps]: at the barrier in memory of the step
    const int* named;     // [steps]: threads at the barrier by number of the step
    int steps;
};

constexpr int kThreads = 128, kElements = 8, kMostSteps = 12;
constexpr int kArrives = 1, kWaits = 2, kSyncs = 4, kComes = 8, kWarp = 16, kBlock = 32;

AG_KERNEL(kThreads, wgmma_orders, OrdersArgs) {
    AG_SHARED_MEMORY(buffer);
    ag_shared<int> elements(buffer, 0, kElements);
    const ag_u32 barriers = ag_shared_address(buffer, kElements * 4);
    const int thread = ag_thread();
    if (thread == 0)
        for (int step = 0; step < args.steps; ++step) ag_barrier_init(barriers + 8 * step, ag_load(args.arrivals + step));
    if (thread < kElements) elements[thread] = 0;
    ag_async_fence();
    ag_sync();
    for (int step = 0; step < args.steps; ++step) {
        const int access = ag_load(args.accesses + step * kThreads + thread), meets = ag_load(args.meets + step * kThreads + thread);
        if (access % 4 == 1) {
            const int x = elements[access / 4];
            if (x < 0) return;
        }
        if (access % 4 == 2) elements[access / 4] = thread;
        if (access == 3) ag_async_fence();
        if (access % 4 == 3 && access > 3) {
            ag_tensor_store(args.out, ag_shared_address(buffer, 0), 0, thread);
            ag_tensor_store_commit();
            ag_tensor_store_wait_read<0>();
        }
        if (meets & kArrives) ag_barrier_arrive(barriers + 8 * step);
        if (meets & kWaits) ag_barrier_wait(barriers + 8 * step, 0);
        if (meets & kSyncs) ag_named_sync(1 + step % 15, ag_load(args.named + step));
        if (meets & kComes) ag_named_arrive(1 + step % 15, ag_load(args.named + step));
        if (meets & kWarp) ag_sync_warp();
        if (meets & kBlock) ag_sync();
    }
}
