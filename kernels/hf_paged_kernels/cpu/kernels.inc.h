/* One storage type of K and V: its rows, and the products with them. */
#include "rows.inc.h"
#include "dots.inc.h"
#undef S
#undef TYPE
#undef LOAD2
#undef EXACT2
#undef STORE2
#undef PAIRED
#undef CODES
