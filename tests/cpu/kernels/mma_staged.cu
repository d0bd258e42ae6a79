// Every way into and out of shared memory of common/staged.cuh, once: parts of 16 bytes and whole or missing
// words come by asynchronous copies; elements of 1, 2 and 4 bytes are stored one by one and come back in pairs.
struct StagedArgs {
    const unsigned char* parts;    // [32 lanes][16]
    const int* sizes;              // of each lane: how many of its 16 bytes are copied
    const ag_u32* words;           // [32]
    const unsigned char* bytes;    // [64]
    const unsigned short* halves;  // [64]
    const float* floats;           // [64]
    ag_u32* parts_back;            // [32][4]
    ag_u32* words_back;            // [32]: those of odd lanes are zeros
    ag_u32* staged_back;           // [32]: likewise, copied where the source is not null
    int* bytes_back;               // [64]
    int* halves_back;              // [64]
    float* floats_back;            // [64]
};

constexpr int kThreads = 32;
constexpr int kParts = 0, kWords = 512, kStaged = 640, kBytes = 768, kHalves = 832, kFloats = 960, kFilled = 1216;

AG_KERNEL(kThreads, mma_staged, StagedArgs) {
    AG_SHARED_MEMORY(buffer);
    const ag_u32 shared = ag_shared_address(buffer, 0);
    const int lane = ag_thread(), next = (lane + 1) % 32;
    for (int i = lane; i < kFilled / 4; i += kThreads) ag_shared_store(shared + 4 * i, ~0u);
    ag_sync_warp();
    ag_copy_async_part(shared + kParts + 16 * lane, args.parts + 16 * lane, ag_load(args.sizes + lane));
    ag_copy_async4(shared + kWords + 4 * lane, args.words + lane, lane % 2 == 0);
    ag_stage(shared + kStaged + 4 * lane, lane % 2 == 0 ? args.words + lane : nullptr);
    for (int i = 2 * lane; i < 2 * lane + 2; ++i) {
        ag_stage(shared + kBytes + i, i % 3 == 0 ? nullptr : args.bytes + i);
        ag_stage(shared + kHalves + 2 * i, i % 3 == 0 ? nullptr : args.halves + i);
        ag_shared_store(shared + kFloats + 4 * i, ag_load(args.floats + i));
    }
    ag_copy_commit();
    ag_copy_wait<0>();
    ag_sync_warp();
    for (int i = 0; i < 4; ++i)
        ag_store(args.parts_back + next * 4 + i, ag_shared_load<ag_u32>(shared + kParts + 16 * next + 4 * i));
    ag_store(args.words_back + next, ag_shared_load<ag_u32>(shared + kWords + 4 * next));
    ag_store(args.staged_back + next, ag_shared_load<ag_u32>(shared + kStaged + 4 * next));
    const ag_pair<unsigned char> bytes = ag_shared_load<ag_pair<unsigned char>>(shared + kBytes + 2 * next);
    const ag_pair<unsigned short> halves = ag_shared_load<ag_pair<unsigned short>>(shared + kHalves + 4 * next);
    const ag_pair<float> floats = ag_shared_load<ag_pair<float>>(shared + kFloats + 8 * next);
    ag_store(args.bytes_back + 2 * next, (int)bytes.low);
    ag_store(args.bytes_back + 2 * next + 1, (int)bytes.high);
    ag_store(args.halves_back + 2 * next, (int)halves.low);
    ag_store(args.halves_back + 2 * next + 1, (int)halves.high);
    ag_store(args.floats_back + 2 * next, floats.low);
    ag_store(args.floats_back + 2 * next + 1, floats.high);
}
