// How many threads a call uses: never more than the caller allows (torch.set_num_threads), and one where a second would
// cost more than it saves. Entering a parallel region costs 5 to 20 microseconds.
#ifndef SPECDEC_THREADS_H
#define SPECDEC_THREADS_H

#include <stdint.h>

#ifdef _OPENMP
#include <omp.h>
#endif

// work and grain in the same unit; a thread is added for each full grain of work.
static inline int threads_for(int64_t work, int64_t grain) {
#ifdef _OPENMP
  int64_t wanted = work / grain, most = omp_get_max_threads();
  return (int)(wanted < 1 ? 1 : wanted < most ? wanted : most);
#else
  (void)work, (void)grain;
  return 1;
#endif
}

#endif
