/* x86-64 with AVX-512 F, BW, DQ and VL, and products of bfloat16 pairs (Intel since 2020, AMD since 2022). */
#include "paged.h"
#if HF_KNOWS_AVX512_BF16
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c,prefer-vector-width=512")
#endif
#define HF_AVX512
#define HF_AVX512_BF16
#define HF_BF16_PAIRS
#define LANES 16
#define ISA isa_avx512_bf16
#define ISA_NAME "avx512_bf16"
#include "isa.inc.h"
#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
