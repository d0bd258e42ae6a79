// Does what a table says: in each step a thread touches at most one element, of 1, 2 or 4 bytes,
// in shared or in global memory; then its warp or its block meets, or nobody.
struct AccessesArgs {
    const int* accesses;  // [grid][steps][threads]: kind + 4 * (log2 of the size) + 16 * index
    const int* barriers;  // [grid][steps][warps]: 0 none, 1 warp, 2 block,
                          // 3 a shuffle
    unsigned char* global;
    int steps, is_global;
};

constexpr int kThreads = 96, kWarps = kThreads / 32, kBytes = 16;
constexpr int kRead = 1, kWrite = 2;

template <class T> AG_DEVICE void touch_shared(ag_shared<T> array, int kind, int index) {
    if (kind == kWrite) array[index] = (T)index;
    if (kind == kRead) {
        T unused = array[index];
        (void)unused;
    }
}

template <class T> AG_DEVICE void touch_global(T* array, int kind, int index) {
    if (kind == kWrite) ag_store(array + index, (T)index);
    if (kind == kRead) ag_load(array + index);
}

AG_KERNEL(kThreads, accesses, AccessesArgs) {
    AG_SHARED_MEMORY(buffer);
    ag_shared<unsigned char> bytes(buffer, 0, kBytes);
    ag_shared<ag_u16> halves(buffer, 0, kBytes / 2);
    ag_shared<ag_u32> words(buffer, 0, kBytes / 4);

    if (ag_thread() < kBytes) bytes[ag_thread()] = 0;
    ag_sync();
    for (int step = 0; step < args.steps; ++step) {
        int row = ag_block() * args.steps + step;
        int access = ag_load(args.accesses + row * kThreads + ag_thread());
        int barrier = ag_load(args.barriers + row * kWarps + ag_thread() / 32);
        int kind = access % 4, size = access / 4 % 4, index = access / 16;
        if (args.is_global) {
            if (size == 0) touch_global(args.global, kind, index);
            if (size == 1) touch_global((ag_u16*)args.global, kind, index);
            if (size == 2) touch_global((ag_u32*)args.global, kind, index);
        } else {
            if (size == 0) touch_shared(bytes, kind, index);
            if (size == 1) touch_shared(halves, kind, index);
            if (size == 2) touch_shared(words, kind, index);
        }
        if (barrier == 1) ag_sync_warp();
        if (barrier == 2) ag_sync();
        if (barrier == 3) ag_shuffle_xor(0.0f, 1);
    }
}
