#include "quire/kernels.h"
#define QUIRE_STRING2(x) #x
#define QUIRE_STRING(x) QUIRE_STRING2(x)
namespace quire::QUIRE_ISA_NS {
const KernelTable& kernel_table() {
    static constexpr KernelTable table{QUIRE_STRING(QUIRE_ISA_NS)};
    return table;
}
}
