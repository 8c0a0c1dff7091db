// Zero-filled memory from the system, with pages allocated when first touched; huge pages for large
// areas. Memory that was never written reads as zero (the padding of packed weights relies on it),
// and one owner frees it once.
#pragma once

#include <cstddef>
#include <cstdint>

namespace quire {

class Memory {
  public:
    Memory() = default;
    // Throws std::bad_alloc. The base is aligned to at least 64 bytes. At least 64 readable bytes
    // follow the requested ones.
    explicit Memory(std::size_t bytes);
    // Wraps bytes owned elsewhere (a mapped file), which must outlive this object.
    static Memory borrowed(const char* data, std::size_t bytes);
    ~Memory();
    Memory(Memory&& other) noexcept;
    Memory& operator=(Memory&& other) noexcept;
    Memory(const Memory&) = delete;
    Memory& operator=(const Memory&) = delete;

    char* data() const { return data_; }
    std::size_t bytes() const { return bytes_; }
    bool is_borrowed() const { return data_ && !mapped_ && !region_; }  // read-only

  private:
    struct Region;
    struct Regions;
    void release();
    char* data_ = nullptr;
    std::size_t bytes_ = 0;
    char* mapped_ = nullptr;
    std::size_t mapped_bytes_ = 0;
    Region* region_ = nullptr;  // the region it is a part of, unless it has its own mapping
};

// Returns pages of freed small memory to the system, if the C library keeps them.
void give_back_freed_memory();

}  // namespace quire
