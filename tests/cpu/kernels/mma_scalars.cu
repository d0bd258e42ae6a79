// The functions of one number, or of two; and what a warp finds out about one number of each lane.
struct ScalarsArgs {
    const float* x;
    const float* y;
    const int* votes;
    ag_u32* bf16_pairs;  // (x, y)
    ag_u32* fp16_pairs;
    float* exp2;         // of x
    float* reciprocal;   // of x
    float* tanh;         // of x
    float* sigmoid;      // of x
    float* max;          // of x and y
    ag_u32* positive;    // the same for all 32 lanes: whose vote is above 0
    int* least;          // likewise
    int* largest;        // likewise
    int* lowest;         // the lowest bit of a vote
    int* rotated;        // the vote of the lane that the lane's own vote names
    ag_i64* wide;        // that vote, times 2^31 and 1 more
    float* moved;        // x of the lane behind, to the bit
    int count;           // a multiple of 32
};

constexpr int kThreads = 128;

AG_KERNEL(kThreads, mma_scalars, ScalarsArgs) {
    const int i = ag_block() * kThreads + ag_thread();
    if (ag_thread() / 32 * 32 >= args.count - ag_block() * kThreads) return;
    const float x = ag_load(args.x + i);
    const float y = ag_load(args.y + i);
    const int vote = ag_load(args.votes + i);
    ag_store(args.bf16_pairs + i, ag_pack<ag_bf16>(x, y));
    ag_store(args.fp16_pairs + i, ag_pack<ag_fp16>(x, y));
    ag_store(args.exp2 + i, ag_exp2_approx(x));
    ag_store(args.reciprocal + i, ag_reciprocal_approx(x));
    ag_store(args.tanh + i, ag_tanh_quick(x));
    ag_store(args.sigmoid + i, ag_sigmoid_quick(x));
    ag_store(args.max + i, ag_max_number(x, y));
    ag_store(args.positive + i, ag_ballot(vote > 0));
    ag_store(args.least + i, ag_warp_min(vote));
    ag_store(args.largest + i, ag_warp_max(vote));
    ag_store(args.lowest + i, ag_lowest_bit((ag_u32)vote));
    const int lane = (int)((ag_u32)vote % 32);
    ag_store(args.rotated + i, ag_shuffle(vote, lane));
    ag_store(args.wide + i, ag_shuffle((ag_i64)vote * 2147483648LL + 1, lane));
    ag_store(args.moved + i, ag_shuffle(x, (i + 1) % 32));
}
