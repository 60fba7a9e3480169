// Compiles a CPU loop once for each vector width; the loader picks the widest that the processor
// has. GCC vectorises these loops at -O3. Empty for other compilers and under sanitizers.
#pragma once

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && defined(__linux__) && \
    !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)
#define HDP_VECTOR_CLONES \
  __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define HDP_VECTOR_CLONES
#endif
