// Memory by mmap: zero pages on demand. The system guarantees address space, not pages: the memory
// plan is computed before (quire/config/memory.py). Some bytes of slack follow each area, so that
// reading ahead is legal.
//
// Large areas are placed consecutively in regions aligned to huge pages. A product's weight is a
// few megabytes: aligned separately, up to half of it would be in small pages, and page ends stop
// hardware prefetchers. A region is never reused, so unwritten bytes are zero; it is unmapped with
// its last area.

#include "quire/memory.h"

#include <mutex>
#include <new>
#include <utility>

#if defined(__GLIBC__)
#include <malloc.h>
#endif
#include <sys/mman.h>

namespace quire {

// Bytes of a mapping, allocated from its beginning.
struct Memory::Region {
    char* mapped;
    std::size_t mapped_bytes;
    char* next;
    char* end;
    std::size_t areas;  // live areas; one more while new areas come from this region
};

namespace {

constexpr std::size_t kHugePage = std::size_t{2} << 20;
constexpr std::size_t kWorthHugePages = kHugePage / 8;
constexpr std::size_t kRegion = std::size_t{64} << 20;
constexpr std::size_t kSlack = 64;
constexpr std::size_t kPage = 4096;

std::size_t rounded(std::size_t bytes, std::size_t to) { return (bytes + to - 1) / to * to; }

char* map(std::size_t bytes) {
    void* mapped = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapped == MAP_FAILED) throw std::bad_alloc();
    return static_cast<char*>(mapped);
}

}  // namespace

// The region new areas come from, and the lock of all regions.
struct Memory::Regions {
    std::mutex lock;
    Region* open = nullptr;

    static Regions& all() {
        static Regions regions;
        return regions;
    }

    Region* with_room(std::size_t bytes) {
        if (open != nullptr && static_cast<std::size_t>(open->end - open->next) >= bytes) {
            return open;
        }
        const std::size_t whole = rounded(bytes > kRegion ? bytes : kRegion, kHugePage);
        char* mapped = map(whole + kHugePage);
        const auto address = reinterpret_cast<std::uintptr_t>(mapped);
        char* first = mapped + (rounded(address, kHugePage) - address);
#if defined(MADV_HUGEPAGE)
        madvise(first, whole, MADV_HUGEPAGE);
#endif
        auto* made = new Region{mapped, whole + kHugePage, first, first + whole, 0};
        // a mapping of its own, so that the rest of the open region is not wasted
        if (bytes > kRegion / 2) return made;
        close(open);
        open = made;
        ++made->areas;
        return made;
    }

    void close(Region* region) {
        if (region == nullptr || --region->areas > 0) return;
        munmap(region->mapped, region->mapped_bytes);
        delete region;
    }
};

Memory::Memory(std::size_t bytes) : bytes_(bytes) {
    if (bytes < kWorthHugePages) {
        mapped_bytes_ = bytes + kSlack;
        mapped_ = data_ = map(mapped_bytes_);
        return;
    }
    Regions& regions = Regions::all();
    const std::lock_guard<std::mutex> hold(regions.lock);
    region_ = regions.with_room(rounded(bytes + kSlack, kPage));
    data_ = region_->next;
    region_->next += rounded(bytes + kSlack, kPage);
    ++region_->areas;
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
    region_ = std::exchange(other.region_, nullptr);
    return *this;
}

void Memory::release() {
    if (mapped_ != nullptr) munmap(mapped_, mapped_bytes_);
    if (region_ != nullptr) {
        Regions& regions = Regions::all();
        const std::lock_guard<std::mutex> hold(regions.lock);
        // The region may live on without these pages; they are not allocated again.
        madvise(data_, rounded(bytes_ + kSlack, kPage), MADV_DONTNEED);
        regions.close(region_);
    }
    mapped_ = data_ = nullptr;
    region_ = nullptr;
}

void give_back_freed_memory() {
#if defined(__GLIBC__)
    malloc_trim(0);
#endif
}

}  // namespace quire
