// The kernel table of one instruction set (compiled once for each). Made from the list in
// kernels.h, so a missing kernel is a link error, never an empty entry. isa.cc selects the table
// for this machine.

#include "quire/kernels.h"

#define QUIRE_QUOTE(text) #text
#define QUIRE_QUOTE_VALUE(macro) QUIRE_QUOTE(macro)

namespace quire::QUIRE_ISA_NS {

const KernelTable& kernel_table() {
    static const KernelTable table{
        QUIRE_QUOTE_VALUE(QUIRE_ISA_NS),
#define QUIRE_KERNEL_ADDRESS(name, Args) &name,
        QUIRE_KERNELS(QUIRE_KERNEL_ADDRESS)
#undef QUIRE_KERNEL_ADDRESS
    };
    return table;
}

}  // namespace quire::QUIRE_ISA_NS
