// ---- device functions for copies of whole parts -----------------------------------------------------
#ifndef AG_HOST

// Start copying 16 bytes; both addresses are multiples of 16.  Without a number of bytes it takes a third of the
// instructions.  (PTX ISA: cp.async.cg.shared.global)
AG_DEVICE void ag_copy_async16(ag_u32 to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

#endif  // AG_HOST
