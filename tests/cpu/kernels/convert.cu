// Conversions and integer division, one element a thread.
struct ConvertArgs {
    const ag_fp16* fp16;
    const ag_bf16* bf16;
    const float* floats;
    const int* a;
    const int* b;
    float* from_fp16;
    float* from_bf16;
    ag_fp16* to_fp16;
    ag_bf16* to_bf16;
    int* quotient;
    int* remainder;
    ag_i64* quotient64;
    ag_i64* remainder64;
    int halves, float_count, pairs;
};

constexpr int kThreads = 256;

AG_KERNEL(kThreads, convert, ConvertArgs) {
    int i = ag_block() * kThreads + ag_thread();
    if (i < args.halves) {
        ag_store(args.from_fp16 + i, ag_to_float(ag_load(args.fp16 + i)));
        ag_store(args.from_bf16 + i, ag_to_float(ag_load(args.bf16 + i)));
    }
    if (i < args.float_count) {
        float x = ag_load(args.floats + i);
        ag_store(args.to_fp16 + i, ag_from_float<ag_fp16>(x));
        ag_store(args.to_bf16 + i, ag_from_float<ag_bf16>(x));
    }
    if (i < args.pairs) {
        int a = ag_load(args.a + i), b = ag_load(args.b + i);
        ag_store(args.quotient + i, ag_floordiv(a, b));
        ag_store(args.remainder + i, ag_mod(a, b));
        ag_store(args.quotient64 + i, ag_floordiv((ag_i64)a * 3000000007LL, (ag_i64)b));
        ag_store(args.remainder64 + i, ag_mod((ag_i64)a * 3000000007LL, (ag_i64)b));
    }
}
