// Instruction sets: which the build has, which this machine can run, which one is used.
// Knows their names and tables, not what kernels compute. Always holds: a table that is handed
// out can run here, and asking for one by name gives that one or an error, never another.
#pragma once

#include <string>
#include <vector>

namespace quire {

struct KernelTable;

// Names of the instruction sets this build holds and this machine runs, best first.
std::vector<std::string> available_isas();

// The kernels of one instruction set. An empty name asks for the environment variable
// QUIRE_ISA, and where that is unset for the best available. Throws std::runtime_error, naming
// what is available, where the machine or the build lacks it.
const KernelTable& kernels_for(const std::string& isa);

}  // namespace quire
