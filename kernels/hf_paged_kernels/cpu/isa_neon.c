/* 64-bit ARM: NEON is part of it. */
#if defined(__aarch64__)
#define HF_NEON
#define LANES 4
#define ISA isa_neon
#define ISA_NAME "neon"
#include "isa.inc.h"
#endif
