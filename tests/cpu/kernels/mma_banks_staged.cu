// One access of each lane to shared memory, of 1, 2 or 4 bytes or of a pair of these.
struct BanksArgs {
    const int* places;  // [32]
    int* sum;           // [32]
    int bytes;          // of an element
    int is_pair, writes;
};

constexpr int kThreads = 32;

template <class T> AG_DEVICE int touch(ag_u32 at, int is_pair, int writes) {
    if (writes) return ag_shared_store(at, (T)1), 1;
    if (!is_pair) return (int)ag_shared_load<T>(at);
    const ag_pair<T> pair = ag_shared_load<ag_pair<T>>(at);
    return (int)pair.low + (int)pair.high;
}

AG_KERNEL(kThreads, mma_banks_staged, BanksArgs) {
    AG_SHARED_MEMORY(buffer);
    ag_shared<ag_u32> words(buffer, 0, 1024);
    for (int i = 0; i < 32; ++i) words[i * 32 + ag_thread()] = 0;
    ag_sync();
    const ag_u32 at = ag_shared_address(buffer, 0) + ag_load(args.places + ag_thread());
    int sum = 0;
    if (args.bytes == 1) sum = touch<unsigned char>(at, args.is_pair, args.writes);
    if (args.bytes == 2) sum = touch<unsigned short>(at, args.is_pair, args.writes);
    if (args.bytes == 4) sum = touch<ag_u32>(at, args.is_pair, args.writes);
    ag_store(args.sum + ag_thread(), sum);
}
