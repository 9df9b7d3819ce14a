// Which instruction sets this library was built with, and which of them this machine can run.
#if defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

// The processor multiplies tiles of 8-bit numbers, and the system lets this process use them: it must be asked once.
static int tiles(void) {
  enum { TILES = 1 << 24, TILES_INT8 = 1 << 25, ARCH_REQ_XCOMP_PERM = 0x1023, TILE_DATA = 18 };
  unsigned a, b, c, d;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & TILES) && (d & TILES_INT8) &&
         syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, TILE_DATA) == 0;
}
#else
static int tiles(void) { return 0; }
#endif

#define EXPORT __attribute__((visibility("default")))

// Bit 0: c, bit 1: avx2, bit 2: avx512, bit 3: amx. Every call of a kernel goes to the function named after one of them.
EXPORT int specdec_built(void) { return SPECDEC_BUILT; }

EXPORT int specdec_supported(void) {
  int supported = 1;
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c")) supported |= 2;
  if ((supported & 2) && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni"))
    supported |= 4;
  if ((supported & 4) && tiles()) supported |= 8;
#endif
  return supported;
}

EXPORT const char *specdec_sources(void) { return SPECDEC_SOURCES; }
EXPORT const char *specdec_compiler(void) { return __VERSION__; }
