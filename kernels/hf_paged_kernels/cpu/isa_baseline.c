/* Whatever the compiler makes for the plainest processor of the platform. */
#define LANES 4
#define ISA isa_baseline
#define ISA_NAME "baseline"
#include "isa.inc.h"
