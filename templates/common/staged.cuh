// ---- device functions for what is read ahead into shared memory ---------------------------------
#ifndef AG_HOST

// Start copying the first `bytes` of 16, which may be none, and zeros behind them; both addresses are
// multiples of 16.  (PTX ISA: cp.async.cg.shared.global, with src-size)
AG_DEVICE void ag_copy_async_part(ag_u32 to, const void* from, int bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
// Start copying 4 bytes, or 4 zeros when `valid` is false; both addresses are multiples of 4.
// (PTX ISA: cp.async.ca.shared.global, with src-size)
AG_DEVICE void ag_copy_async4(ag_u32 to, const void* from, bool valid) {
    const int bytes = valid ? 4 : 0;
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
// Arrive at a barrier once all copies that this thread has started are over; one of the arrivals that the
// barrier counts.  (PTX ISA: cp.async.mbarrier.arrive.noinc)
AG_DEVICE void ag_copy_arrive(ag_u32 barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// One element of shared memory of up to 8 bytes, by address.  (PTX ISA: ld.shared, st.shared)
template <class T> AG_DEVICE T ag_shared_load(ag_u32 address) { return *(const T*)__cvta_shared_to_generic(address); }
template <class T> AG_DEVICE void ag_shared_store(ag_u32 address, T x) { *(T*)__cvta_shared_to_generic(address) = x; }

#endif  // AG_HOST

template <class T> struct alignas(2 * sizeof(T)) ag_pair { T low, high; };

// One element from global to shared memory, or zeros without a source; asynchronously if it has 4 bytes.
template <class T> AG_DEVICE void ag_stage(ag_u32 to, const T* from) {
    if (sizeof(T) == 4) {
        ag_copy_async4(to, from, from != nullptr);
    } else {
        ag_shared_store(to, from != nullptr ? ag_load(from) : T{});
    }
}

