/* What a file with entry points needs: their visibility, and OpenMP or, without it, one thread. */
#ifndef HF_PAGED_ENTRY_H
#define HF_PAGED_ENTRY_H

#if defined(HF_PAGED_WITHOUT_OPENMP)
static inline int omp_get_thread_num(void) { return 0; }
static inline int omp_get_num_threads(void) { return 1; }
#else
#include <omp.h>
#endif

#if defined(_WIN32)
#define EXPORT __declspec(dllexport)
#else
#define EXPORT __attribute__((visibility("default")))
#endif

#endif
