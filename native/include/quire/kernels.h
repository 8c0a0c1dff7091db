#pragma once
namespace quire {
struct KernelTable {
    const char* isa;
};
}
