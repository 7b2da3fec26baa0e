/* cell.h for every element type; ISA and TARGET are set by the includer. WORD is what sums multiply. */

#define ELEMENT u8
#define WORD u8
#define BITS 8
#include "cell.h"
#undef ELEMENT
#undef WORD
#undef BITS

#define ELEMENT u16
#define WORD u16
#define BITS 16
#include "cell.h"
#undef ELEMENT
#undef WORD
#undef BITS

#define ELEMENT u32
#define WORD u32
#define BITS 32
#include "cell.h"
#undef ELEMENT
#undef WORD
#undef BITS

#define ELEMENT u64
#define WORD u32
#define BITS 64
#include "cell.h"
#undef ELEMENT
#undef WORD
#undef BITS
