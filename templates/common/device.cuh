// ---- device functions: every instruction and builtin that the kernel below relies on -----
// The same names exist in a host header, so this text also runs on a CPU (-D AG_HOST).
#ifndef AG_HOST

typedef long long ag_i64;
typedef unsigned int ag_u32;
typedef unsigned short ag_u16;

struct alignas(2) ag_fp16 { ag_u16 bits; };   // IEEE binary16
struct alignas(2) ag_bf16 { ag_u16 bits; };   // the upper half of a binary32

#define AG_DEVICE __device__ __forceinline__
#define AG_NOINLINE __device__ __noinline__
#define AG_KERNEL(threads, name, Args) \
    extern "C" __global__ void __launch_bounds__(threads, 1) name(const __grid_constant__ Args args)
#define AG_SHARED_MEMORY(name) extern __shared__ __align__(1024) unsigned char name[]
#define AG_INFINITY __int_as_float(0x7f800000)
#define AG_NAN __int_as_float(0x7fffffff)

// Where this thread is.  Grids are one-dimensional.
AG_DEVICE int ag_thread() { return (int)threadIdx.x; }
AG_DEVICE int ag_block() { return (int)blockIdx.x; }

// Barriers: all threads of the block, or of the warp.  Shared and global writes made before
// one are seen behind it.  (PTX ISA: bar.sync, bar.warp.sync)
AG_DEVICE void ag_sync() { __syncthreads(); }
AG_DEVICE void ag_sync_warp() { __syncwarp(); }

// The value of `x` in the lane whose number differs by `mask`.  (PTX ISA: shfl.sync.bfly)
AG_DEVICE float ag_shuffle_xor(float x, int mask) { return __shfl_xor_sync(0xffffffffu, x, mask); }

// An array of `count` elements in shared memory, from byte `offset` of the block's buffer.
template <class T> struct ag_shared {
    T* data;
    AG_DEVICE ag_shared(unsigned char* buffer, int offset, int count) : data((T*)(buffer + offset)) {}
    AG_DEVICE T& operator[](int i) const { return data[i]; }
};

// Global memory, one element at a time.
template <class T> AG_DEVICE T ag_load(const T* p) { return *p; }
template <class T> AG_DEVICE void ag_store(T* p, T x) { *p = x; }

// Conversions; to a 16-bit type they round to nearest even.  (PTX ISA: cvt)
AG_DEVICE float ag_to_float(float x) { return x; }
AG_DEVICE float ag_to_float(ag_fp16 x) { float y; asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits)); return y; }
AG_DEVICE float ag_to_float(ag_bf16 x) { return __int_as_float((int)x.bits << 16); }
template <class T> AG_DEVICE T ag_from_float(float x);
template <> AG_DEVICE float ag_from_float<float>(float x) { return x; }
template <> AG_DEVICE ag_fp16 ag_from_float<ag_fp16>(float x) { ag_fp16 y; asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x)); return y; }
template <> AG_DEVICE ag_bf16 ag_from_float<ag_bf16>(float x) {
    // Written out, because cvt.rn.bf16.f32 needs sm_80 and NaN must stay NaN.
    ag_u32 bits = (ag_u32)__float_as_int(x);
    ag_bf16 y;
    y.bits = x != x ? (ag_u16)0x7fff : (ag_u16)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
    return y;
}

// Elementary functions, accurate to the bounds in the CUDA programming guide, appendix
// "Mathematical Functions" (1 ulp for exp2f and log2f, 2 ulp for expf, 1 to 3 for the rest).
AG_DEVICE float ag_fma(float a, float b, float c) { return __fmaf_rn(a, b, c); }
AG_DEVICE float ag_exp(float x) { return expf(x); }
AG_DEVICE float ag_exp2(float x) { return exp2f(x); }
AG_DEVICE float ag_log(float x) { return logf(x); }
AG_DEVICE float ag_log2(float x) { return log2f(x); }
AG_DEVICE float ag_sqrt(float x) { return __fsqrt_rn(x); }
AG_DEVICE float ag_rsqrt(float x) { return __fdiv_rn(1.0f, __fsqrt_rn(x)); }
AG_DEVICE float ag_tanh(float x) { return tanhf(x); }
AG_DEVICE float ag_floor(float x) { return floorf(x); }

#endif  // AG_HOST

// ---- arithmetic that the language defines, the same on both machines ---------------------

// min, max and abs; NaN when a float operand is NaN.
AG_DEVICE int ag_min(int a, int b) { return a < b ? a : b; }
AG_DEVICE int ag_max(int a, int b) { return a > b ? a : b; }
AG_DEVICE ag_i64 ag_min(ag_i64 a, ag_i64 b) { return a < b ? a : b; }
AG_DEVICE ag_i64 ag_max(ag_i64 a, ag_i64 b) { return a > b ? a : b; }
AG_DEVICE float ag_min(float a, float b) { return a < b || a != a ? a : b; }
AG_DEVICE float ag_max(float a, float b) { return a > b || a != a ? a : b; }
AG_DEVICE int ag_abs(int a) { return a < 0 ? -a : a; }
AG_DEVICE ag_i64 ag_abs(ag_i64 a) { return a < 0 ? -a : a; }
AG_DEVICE float ag_abs(float a) { return a < 0.0f || a == 0.0f ? 0.0f - a : a; }

// Floor division and its remainder, whose sign is the divisor's; both are 0 for divisor 0.
template <class T> AG_DEVICE T ag_floordiv(T a, T b) {
    if (b == 0) return 0;
    T quotient = a / b;
    return a % b != 0 && (a < 0) != (b < 0) ? quotient - 1 : quotient;
}
template <class T> AG_DEVICE T ag_mod(T a, T b) {
    if (b == 0) return 0;
    T remainder = a % b;
    return remainder != 0 && (remainder < 0) != (b < 0) ? remainder + b : remainder;
}

// x, but at least low and at most high.
template <class T> AG_DEVICE T ag_clamp(T x, T low, T high) { return ag_min(ag_max(x, low), high); }

// The number nearest to i that is at least 0 and below size.
AG_DEVICE ag_i64 ag_nearest(ag_i64 i, ag_i64 size) { return ag_clamp(i, (ag_i64)0, size - 1); }

// A sequence's length, between 0 and the size of the buffer that it lies in.
AG_DEVICE int ag_length(ag_i64 length, int size) { return (int)ag_clamp(length, (ag_i64)0, (ag_i64)size); }

// Whether one of the sizes is 0.
template <class... Sizes> AG_DEVICE bool ag_any_zero(Sizes... sizes) { return (... || (sizes == 0)); }

// Whether bit i of a word is set; false outside 0..63.
AG_DEVICE bool ag_bit(ag_i64 word, ag_i64 i) { return i >= 0 && i < 64 && ((word >> i) & 1) == 1; }

// The largest integer not above x, at the nearest end of 64 bits where it is beyond; 0 for NaN.
AG_DEVICE ag_i64 ag_floor_to_int(float x) {
    const ag_i64 largest = 9223372036854775807LL;
    const float y = ag_floor(x);
    if (y != y) return 0;
    if (y >= 9223372036854775808.0f) return largest;
    return y <= -9223372036854775808.0f ? -largest - 1 : (ag_i64)y;
}

AG_DEVICE float ag_sigmoid(float x) { return 1.0f / (1.0f + ag_exp(-x)); }

// exp(a - b), and 0 when a is -inf: nothing has no weight, also relative to nothing.
AG_DEVICE float ag_exp_difference(float a, float b) {
    return a == -AG_INFINITY ? 0.0f : ag_exp(a - b);
}

// ---- end of device functions ----------------------------------------------------------------
