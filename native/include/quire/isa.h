// Instruction sets: those of the build, those of this machine, and the selected one.
// A returned table can run here, and a request by name returns that table or an error, never
// another.
#pragma once

#include <string>
#include <vector>

namespace quire {

struct KernelTable;

// Names of the instruction sets in this build that this machine supports, best first.
std::vector<std::string> available_isas();

// Returns the kernels of one instruction set. An empty name selects by the environment variable
// QUIRE_ISA, or the best available if that is unset. Throws std::runtime_error, naming what is
// available, if the machine or the build lacks it.
const KernelTable& kernels_for(const std::string& isa);

}  // namespace quire
