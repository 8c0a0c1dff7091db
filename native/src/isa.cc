// Selects kernels at run time: CPUID reports the processor's features, XGETBV whether the operating
// system saves those registers. Every extension that CMakeLists.txt enables for a set's files is
// checked here.

#include "quire/isa.h"

#include <cstdlib>
#include <stdexcept>

#include "quire/kernels.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace quire {

namespace portable { const KernelTable& kernel_table(); }
#if defined(__x86_64__)
namespace avx2 { const KernelTable& kernel_table(); }
namespace avx2vnni { const KernelTable& kernel_table(); }
namespace avx512 { const KernelTable& kernel_table(); }
namespace avx512vnni { const KernelTable& kernel_table(); }
namespace avx512bf16 { const KernelTable& kernel_table(); }
namespace amx { const KernelTable& kernel_table(); }
#endif

namespace {

#if defined(__x86_64__)

bool bit(unsigned word, int index) { return (word >> index & 1u) != 0; }

// Requests the tile registers from Linux once, which grants them to a process only on request.
bool tiles_granted() {
#if defined(__linux__)
    constexpr long kRequestPermission = 0x1023, kTileData = 18;
    static const bool granted = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
    return granted;
#else
    return false;
#endif
}

// What this machine supports, each including the requirements of the ones before it in its line.
struct Has {
    bool avx2, avx2vnni;
    bool avx512, avx512vnni, avx512bf16, amx;
};

Has machine_has() {
    Has has{};
    unsigned a = 0, b = 0, c = 0, d = 0;
    if (!__get_cpuid(1, &a, &b, &c, &d)) return has;
    const bool fma = bit(c, 12), osxsave = bit(c, 27), avx = bit(c, 28), f16c = bit(c, 29);
    if (!osxsave || !avx || !fma || !f16c) return has;
    unsigned saved = 0, saved_high = 0;
    __asm__ volatile("xgetbv" : "=a"(saved), "=d"(saved_high) : "c"(0));
    if ((saved & 0x6u) != 0x6u) return has;  // the system does not save ymm
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !bit(b, 5)) return has;
    has.avx2 = true;
    const unsigned leaves = a;
    const bool zmm_saved = (saved & 0xe6u) == 0xe6u;
    has.avx512 = zmm_saved && bit(b, 16) && bit(b, 17) && bit(b, 28) && bit(b, 30) && bit(b, 31);
    has.avx512vnni = has.avx512 && bit(c, 11);
    const bool amx = bit(d, 22) && bit(d, 24) && bit(d, 25) && (saved & 0x60000u) == 0x60000u;
    if (leaves < 1 || !__get_cpuid_count(7, 1, &a, &b, &c, &d)) return has;
    has.avx2vnni = bit(a, 4);
    has.avx512bf16 = has.avx512vnni && bit(a, 5);
    has.amx = has.avx512bf16 && amx && tiles_granted();
    return has;
}

#endif

// The best first.
std::vector<const KernelTable*> available_tables() {
    std::vector<const KernelTable*> tables;
#if defined(__x86_64__)
    const Has has = machine_has();
    if (has.amx) tables.push_back(&amx::kernel_table());
    if (has.avx512bf16) tables.push_back(&avx512bf16::kernel_table());
    if (has.avx512vnni) tables.push_back(&avx512vnni::kernel_table());
    if (has.avx512) tables.push_back(&avx512::kernel_table());
    if (has.avx2vnni) tables.push_back(&avx2vnni::kernel_table());
    if (has.avx2) tables.push_back(&avx2::kernel_table());
#endif
    tables.push_back(&portable::kernel_table());
    return tables;
}

}  // namespace

std::vector<std::string> available_isas() {
    std::vector<std::string> names;
    for (const KernelTable* table : available_tables()) names.emplace_back(table->isa);
    return names;
}

const KernelTable& kernels_for(const std::string& isa) {
    const auto tables = available_tables();
    std::string wanted = isa;
    std::string origin = "isa";
    if (wanted.empty()) {
        const char* forced = std::getenv("QUIRE_ISA");
        if (forced == nullptr || *forced == '\0') return *tables.front();
        wanted = forced;
        origin = "QUIRE_ISA";
    }
    std::string names;
    for (const KernelTable* table : tables) {
        if (wanted == table->isa) return *table;
        names += (names.empty() ? "" : ", ") + std::string(table->isa);
    }
    throw std::runtime_error(origin + " is \"" + wanted + "\"; this machine can run: " + names +
                             ". Choose one of these, or unset " + origin + ".");
}

}  // namespace quire
