/* x86-64 with AVX2, FMA and F16C (Intel since 2013, AMD since 2015). */
#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c")
#endif
#define HF_AVX2
#define LANES 8
#define ISA isa_avx2
#define ISA_NAME "avx2"
#include "isa.inc.h"
#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
