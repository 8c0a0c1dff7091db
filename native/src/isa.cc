// Chooses kernels at run time: CPUID says what the processor has, XGETBV whether the operating
// system saves those registers. Knows nothing of what kernels compute. Always holds: every
// extension that CMakeLists.txt lets a set's files use was asked for here.

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
namespace avx512 { const KernelTable& kernel_table(); }
namespace avx512bf16 { const KernelTable& kernel_table(); }
namespace amx { const KernelTable& kernel_table(); }
#endif

namespace {

#if defined(__x86_64__)

bool bit(unsigned word, int index) { return (word >> index & 1u) != 0; }

// Asks Linux once for the tile registers, which it gives to a process on request only.
bool tiles_granted() {
#if defined(__linux__)
    constexpr long kRequestPermission = 0x1023, kTileData = 18;
    static const bool granted = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
    return granted;
#else
    return false;
#endif
}

// How far up the ladder avx2 (1), avx512 (2), avx512bf16 (3), amx (4) this machine reaches.
int machine_level() {
    unsigned a = 0, b = 0, c = 0, d = 0;
    if (!__get_cpuid(1, &a, &b, &c, &d)) return 0;
    const bool fma = bit(c, 12), osxsave = bit(c, 27), avx = bit(c, 28), f16c = bit(c, 29);
    if (!osxsave || !avx || !fma || !f16c) return 0;
    unsigned saved = 0, saved_high = 0;
    __asm__ volatile("xgetbv" : "=a"(saved), "=d"(saved_high) : "c"(0));
    if ((saved & 0x6u) != 0x6u) return 0;  // the system does not save ymm
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !bit(b, 5)) return 0;
    const unsigned leaves = a;
    const bool zmm_saved = (saved & 0xe6u) == 0xe6u;
    const bool avx512 = bit(b, 16) && bit(b, 17) && bit(b, 28) && bit(b, 30) && bit(b, 31);
    if (!zmm_saved || !avx512) return 1;
    const bool vnni = bit(c, 11);
    const bool amx = bit(d, 22) && bit(d, 24) && bit(d, 25) && (saved & 0x60000u) == 0x60000u;
    if (leaves < 1 || !__get_cpuid_count(7, 1, &a, &b, &c, &d)) return 2;
    if (!vnni || !bit(a, 5)) return 2;
    return amx && tiles_granted() ? 4 : 3;
}

#endif

std::vector<const KernelTable*> available_tables() {
    std::vector<const KernelTable*> tables;
#if defined(__x86_64__)
    const int level = machine_level();
    if (level >= 4) tables.push_back(&amx::kernel_table());
    if (level >= 3) tables.push_back(&avx512bf16::kernel_table());
    if (level >= 2) tables.push_back(&avx512::kernel_table());
    if (level >= 1) tables.push_back(&avx2::kernel_table());
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
