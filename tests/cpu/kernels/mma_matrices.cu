// Every way into and out of shared memory by address, once: 4 matrices come by asynchronous copies,
// go as fragments into registers, plain and transposed, and are written back word by word.
struct MatricesArgs {
    const ag_u32* matrices;  // [4][8] rows of 16 bytes
    const int* rows;         // of each lane: whose row it gives the address of
    const int* is_valid;     // [32]: which rows are copied, and not zeros
    ag_u32* plain;           // [32 lanes][4]
    ag_u32* transposed;      // [32 lanes][4]
    ag_u32* back;            // [32] rows
};

constexpr int kThreads = 32;

AG_KERNEL(kThreads, mma_matrices, MatricesArgs) {
    AG_SHARED_MEMORY(buffer);
    const ag_u32 shared = ag_shared_address(buffer, 0), copy = ag_shared_address(buffer, 512);
    const int lane = ag_thread();
    ag_copy_async(shared + lane * 16, args.matrices + lane * 4, ag_load(args.is_valid + lane) != 0);
    ag_copy_commit();
    ag_copy_wait<0>();
    ag_sync_warp();
    ag_u32 r[4];
    ag_load_matrices(r, shared + ag_load(args.rows + lane) * 16);
    for (int i = 0; i < 4; ++i) ag_shared_store4(copy + i * 128 + lane * 4, r[i]);
    ag_store16(args.plain + lane * 4, r[0], r[1], r[2], r[3]);
    ag_load_matrices_transposed(r, shared + ag_load(args.rows + lane) * 16);
    ag_store16(args.transposed + lane * 4, r[0], r[1], r[2], r[3]);
    ag_sync_warp();
    ag_shared_load16(r, copy + lane * 16);
    ag_store16(args.back + lane * 4, r[0], r[1], r[2], r[3]);
}
