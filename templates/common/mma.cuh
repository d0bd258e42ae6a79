// ---- device functions of sm_80 and later: asynchronous copies, matrix fragments, products -----
#ifndef AG_HOST

// The 32-bit address in shared memory of byte `offset` of the block's buffer.
AG_DEVICE ag_u32 ag_shared_address(unsigned char* buffer, int offset) {
    return (ag_u32)__cvta_generic_to_shared(buffer + offset);
}

// Start copying 16 bytes from global to shared memory, or 16 zeros when `valid` is false; both
// addresses are multiples of 16.  (PTX ISA: cp.async.cg.shared.global, with src-size)
AG_DEVICE void ag_copy_async(ag_u32 to, const void* from, bool valid) {
    const int bytes = valid ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
// Close the group of this thread's copies since the last one.  (PTX ISA: cp.async.commit_group)
AG_DEVICE void ag_copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Wait until at most `kPending` of this thread's newest groups are still on their way.  What
// arrived is seen by other threads behind a barrier.  (PTX ISA: cp.async.wait_group)
template <int kPending> AG_DEVICE void ag_copy_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory"); }

// Four 8x8 matrices of 16-bit elements.  Lane i gives the address of row i % 8 of matrix i / 8, 16
// bytes, and gets elements (i / 4, 2 (i % 4)) and the next of each matrix; transposed, elements
// (2 (i % 4), i / 4) and the one below.  (PTX ISA: ldmatrix.x4, ldmatrix.x4.trans)
AG_DEVICE void ag_load_matrices(ag_u32 (&r)[4], ag_u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}
AG_DEVICE void ag_load_matrices_transposed(ag_u32 (&r)[4], ag_u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}

// c += a b, with a 16x16, b 16x8 and c 16x8; float32 accumulators.  With g = lane / 4 and t = lane % 4
// a lane holds c[0..1] = C[g][2t..], c[2..3] = C[g + 8][2t..], a[0] = A[g][2t..], a[1] = A[g + 8][2t..],
// a[2] = A[g][2t + 8..], a[3] = A[g + 8][2t + 8..], b0 = B[2t..][g], b1 = B[2t + 8..][g].
// (PTX ISA: mma.sync.aligned.m16n8k16)
template <class T> AG_DEVICE void ag_mma(float (&c)[4], const ag_u32 (&a)[4], ag_u32 b0, ag_u32 b1);
template <> AG_DEVICE void ag_mma<ag_bf16>(float (&c)[4], const ag_u32 (&a)[4], ag_u32 b0, ag_u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <> AG_DEVICE void ag_mma<ag_fp16>(float (&c)[4], const ag_u32 (&a)[4], ag_u32 b0, ag_u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Two floats rounded to nearest even, `low` in the lower half.  (PTX ISA: cvt.rn.bf16x2.f32, cvt.rn.f16x2.f32)
template <class T> AG_DEVICE ag_u32 ag_pack(float low, float high);
template <> AG_DEVICE ag_u32 ag_pack<ag_bf16>(float low, float high) { ag_u32 r; asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low)); return r; }
template <> AG_DEVICE ag_u32 ag_pack<ag_fp16>(float low, float high) { ag_u32 r; asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low)); return r; }

// x, of which the compiler knows nothing: what depends on it is computed here, and not kept in a
// register from before.  (No instruction)
AG_DEVICE int ag_renew(int x) { asm volatile("" : "+r"(x)); return x; }

// 2^x, relative error 2^-22, with flushed subnormals and without.  (PTX ISA: ex2.approx.ftz.f32, ex2.approx.f32)
AG_DEVICE float ag_exp2_approx(float x) { float y; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
AG_DEVICE float ag_exp2_quick(float x) { float y; asm("ex2.approx.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
// 1 / x with flushed subnormals, relative error 2^-23.  (PTX ISA: rcp.approx.ftz.f32)
AG_DEVICE float ag_reciprocal_approx(float x) { float y; asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
// log2(x) with flushed subnormals: absolute error 2^-22 between 1/2 and 2, relative error 2^-22 elsewhere; for any
// number with subnormals.  (PTX ISA: lg2.approx.ftz.f32, lg2.approx.f32)
AG_DEVICE float ag_log2_approx(float x) { float y; asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
AG_DEVICE float ag_log2_quick(float x) { float y; asm("lg2.approx.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }

// |x|, also of NaN.  (PTX ISA: abs.f32)
AG_DEVICE float ag_abs_quick(float x) { float y; asm("abs.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }

// One of two numbers, both of which are there: a branch, which `?:` may become, costs lanes that differ more.
// (PTX ISA: setp, selp.f32)
AG_DEVICE float ag_select(bool condition, float then, float otherwise) {
    float r;
    asm("{.reg .pred p; setp.ne.s32 p, %1, 0; selp.f32 %0, %2, %3, p;}" : "=f"(r) : "r"((int)condition), "f"(then), "f"(otherwise));
    return r;
}

// The larger of two numbers; of a number and a NaN, the number.  (PTX ISA: max.f32)
AG_DEVICE float ag_max_number(float a, float b) { float r; asm("max.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b)); return r; }

// One bit per lane: where the condition holds.  (PTX ISA: vote.sync.ballot)
AG_DEVICE ag_u32 ag_ballot(bool condition) { return __ballot_sync(0xffffffffu, condition); }
// The value of `x` in lane `lane`.  (PTX ISA: shfl.sync.idx)
template <class T> AG_DEVICE T ag_shuffle(T x, int lane) { return __shfl_sync(0xffffffffu, x, lane); }
// Minimum and maximum of an int over the warp.  (PTX ISA: redux.sync)
AG_DEVICE int ag_warp_min(int x) { return __reduce_min_sync(0xffffffffu, x); }
AG_DEVICE int ag_warp_max(int x) { return __reduce_max_sync(0xffffffffu, x); }
// How many bits are set.  (PTX ISA: popc)
AG_DEVICE int ag_count_bits(ag_u32 x) { return __popc(x); }
// The lowest n bits; n is 0 to 32.  (PTX ISA: bmsk)
AG_DEVICE ag_u32 ag_low_bits(int n) { ag_u32 r; asm("bmsk.clamp.b32 %0, 0, %1;" : "=r"(r) : "r"(n)); return r; }
// Position of the lowest set bit; 0 to 31.  (PTX ISA: brev, bfind)
AG_DEVICE int ag_lowest_bit(ag_u32 x) { return __ffs((int)x) - 1; }

// 16 bytes to global memory, at a multiple of 16.  (PTX ISA: st.global.v4)
AG_DEVICE void ag_store16(void* to, ag_u32 a, ag_u32 b, ag_u32 c, ag_u32 d) { *(uint4*)to = make_uint4(a, b, c, d); }
// Shared memory by address: 4 and 16 bytes.  (PTX ISA: st.shared, ld.shared.v4)
AG_DEVICE void ag_shared_store4(ag_u32 address, ag_u32 x) { asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(x) : "memory"); }
AG_DEVICE void ag_shared_load16(ag_u32 (&r)[4], ag_u32 address) {
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}

#endif  // AG_HOST

// ---- functions as 16-bit elements need them: absolute errors 2^-21 and 2^-22, far below theirs ------

// 1 / (1 + 2^-x).  2 of it, less 1, are tanh(x / (2 log2 e)).
AG_DEVICE float ag_sigmoid2_quick(float x) { return ag_reciprocal_approx(1.0f + ag_exp2_approx(-x)); }
AG_DEVICE float ag_sigmoid_quick(float x) { return ag_sigmoid2_quick(x * 1.442695f); }
// tanh with a relative error of 2^-21 near 0, where twice a sigmoid and -1 cancel.
AG_DEVICE float ag_tanh_quick(float x) {
    const float y = x * x;  // near 0 the series, whose relative error is below 2^-22
    const float series = ag_fma(x * y, ag_fma(y, ag_fma(y, -0.053968254f, 0.13333333f), -0.33333333f), x);
    const float far = ag_fma(-2.0f, ag_reciprocal_approx(1.0f + ag_exp2_approx(x * 2.8853901f)), 1.0f);
    return ag_select(y < 0.03125f, series, far);
}

// ---- end of device functions ----------------------------------------------------------------
