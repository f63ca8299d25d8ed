/* One storage type: its rows, then the two kernels over them. */
#include "rows.inc.h"
#include "few.inc.h"
#include "tile.inc.h"
#undef S
#undef TYPE
#undef LOAD2
#undef STORE2
#undef PAIRED
