// Memory by mmap: zero pages lazily, aligned to huge pages where an area is worth them.
// The system promises address space, not pages: what the machine can hold is summed up before
// (quire/config/memory.py). Some bytes of slack follow each area, so that reading ahead is legal.

#include "quire/memory.h"

#include <new>
#include <utility>

#if defined(__GLIBC__)
#include <malloc.h>
#endif
#include <sys/mman.h>

namespace quire {

namespace {

constexpr std::size_t kHugePage = std::size_t{2} << 20;
constexpr std::size_t kWorthHugePages = 2 * kHugePage;  // one at least, wherever it begins
constexpr std::size_t kSlack = 64;

}  // namespace

Memory::Memory(std::size_t bytes) : bytes_(bytes) {
    const bool huge = bytes >= kWorthHugePages;
    mapped_bytes_ = bytes + kSlack + (huge ? kHugePage : 0);
    void* mapped = mmap(nullptr, mapped_bytes_, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapped == MAP_FAILED) throw std::bad_alloc();
    mapped_ = data_ = static_cast<char*>(mapped);
    if (!huge) return;
    const auto address = reinterpret_cast<std::uintptr_t>(mapped);
    data_ = mapped_ + ((address + kHugePage - 1) / kHugePage * kHugePage - address);
#if defined(MADV_HUGEPAGE)
    madvise(data_, bytes_, MADV_HUGEPAGE);
#endif
}

Memory Memory::borrowed(const char* data, std::size_t bytes) {
    Memory memory;
    memory.data_ = const_cast<char*>(data);
    memory.bytes_ = bytes;
    return memory;
}

Memory::~Memory() { release(); }

Memory::Memory(Memory&& other) noexcept { *this = std::move(other); }

Memory& Memory::operator=(Memory&& other) noexcept {
    if (this == &other) return *this;
    release();
    data_ = std::exchange(other.data_, nullptr);
    bytes_ = std::exchange(other.bytes_, 0);
    mapped_ = std::exchange(other.mapped_, nullptr);
    mapped_bytes_ = std::exchange(other.mapped_bytes_, 0);
    return *this;
}

void Memory::release() {
    if (mapped_ != nullptr) munmap(mapped_, mapped_bytes_);
    mapped_ = data_ = nullptr;
}

void give_back_freed_memory() {
#if defined(__GLIBC__)
    malloc_trim(0);
#endif
}

}  // namespace quire
