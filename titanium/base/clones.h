// For loops that are bound by memory or arithmetic: compiled whole for each instruction set, and the CPU
// picks one when the program starts.
#pragma once

#if defined(TITANIUM_NO_CLONES) || !defined(__x86_64__) || defined(__clang__)
#define TITANIUM_CLONES
#else
#define TITANIUM_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#endif
// What such a loop calls must be part of it.
#define TITANIUM_INLINE inline __attribute__((always_inline))
