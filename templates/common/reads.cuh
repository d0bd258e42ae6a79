// ---- device functions for reads whose tensor may be empty ------------------------------------------
#ifndef AG_HOST

// One element of up to 8 bytes if `exists`, else zeros; never a branch, so that many reads are waited for
// together.  (PTX ISA: ld.global, with a predicate)
template <class T> AG_DEVICE T ag_load_if(const T* from, bool exists) {
    T x;
    if constexpr (sizeof(T) == 8) {
        ag_i64 bits;
        asm("{ .reg .pred p; setp.ne.s32 p, %2, 0; mov.b64 %0, 0; @p ld.global.b64 %0, [%1]; }" : "=&l"(bits) : "l"(from), "r"((int)exists));
        memcpy(&x, &bits, sizeof(T));
    } else if constexpr (sizeof(T) == 4) {
        ag_u32 bits;
        asm("{ .reg .pred p; setp.ne.s32 p, %2, 0; mov.b32 %0, 0; @p ld.global.b32 %0, [%1]; }" : "=&r"(bits) : "l"(from), "r"((int)exists));
        memcpy(&x, &bits, sizeof(T));
    } else if constexpr (sizeof(T) == 2) {
        ag_u16 bits;
        asm("{ .reg .pred p; setp.ne.s32 p, %2, 0; mov.b16 %0, 0; @p ld.global.b16 %0, [%1]; }" : "=&h"(bits) : "l"(from), "r"((int)exists));
        memcpy(&x, &bits, sizeof(T));
    } else {
        ag_u32 bits;
        asm("{ .reg .pred p; setp.ne.s32 p, %2, 0; mov.b32 %0, 0; @p ld.global.u8 %0, [%1]; }" : "=&r"(bits) : "l"(from), "r"((int)exists));
        memcpy(&x, &bits, sizeof(T));
    }
    return x;
}

#endif  // AG_HOST
