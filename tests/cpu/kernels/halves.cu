// Shared memory as elements of one size and then of another: neighbours write the two halves of a
// word, one thread reads the word, writes it again as a whole, and the halves are read back.
struct HalvesArgs {
    const ag_fp16* in;
    float* out;
    int* words;
};

constexpr int kThreads = 64;

AG_KERNEL(kThreads, halves, HalvesArgs) {
    AG_SHARED_MEMORY(buffer);
    ag_shared<ag_fp16> half(buffer, 0, kThreads);
    ag_shared<int> word(buffer, 0, kThreads / 2);
    int i = ag_thread();

    half[i] = ag_load(args.in + i);
    ag_sync();
    if (i < kThreads / 2) {
        int both = word[i];
        ag_store(args.words + i, both);
        word[i] = both;
    }
    ag_sync();
    ag_store(args.out + i, ag_to_float(half[i ^ 1]));
}
