// The table of an instruction set that differs from another (QUIRE_BASE_NS) by one instruction,
// which multiplies four bytes a lane: integer products and their measured limit are its own;
// everything else is the other's. Bits are the same as the other's, as integer sums are exact.

#include "quire/kernels.h"

#define QUIRE_QUOTE(text) #text
#define QUIRE_QUOTE_VALUE(macro) QUIRE_QUOTE(macro)

namespace quire {

namespace QUIRE_BASE_NS { const KernelTable& kernel_table(); }

namespace QUIRE_ISA_NS {

const KernelTable& kernel_table() {
    static const KernelTable table = [] {
        KernelTable made = QUIRE_BASE_NS::kernel_table();
        made.isa = QUIRE_QUOTE_VALUE(QUIRE_ISA_NS);
        made.linear_ints = &linear_ints;
        made.limit = &limit;
        return made;
    }();
    return table;
}

}  // namespace QUIRE_ISA_NS

}  // namespace quire
