// Which instruction sets this library was built with, and which of them this machine can run.
#define EXPORT __attribute__((visibility("default")))

// Bit 0: c, bit 1: avx2, bit 2: avx512. Every call of a kernel goes to the function named after one of them.
EXPORT int specdec_built(void) { return SPECDEC_BUILT; }

EXPORT int specdec_supported(void) {
  int supported = 1;
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c")) supported |= 2;
  if ((supported & 2) && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni"))
    supported |= 4;
#endif
  return supported;
}

EXPORT const char *specdec_sources(void) { return SPECDEC_SOURCES; }
EXPORT const char *specdec_compiler(void) { return __VERSION__; }
