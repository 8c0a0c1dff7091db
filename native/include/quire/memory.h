// Zero-filled memory from the system, pages taken when first touched; huge pages where large. Knows
// nothing of what lies in it. Always holds: what was never written reads as zero (the padding of
// packed weights relies on it), and one owner gives it back once.
#pragma once

#include <cstddef>
#include <cstdint>

namespace quire {

class Memory {
  public:
    Memory() = default;
    // Throws std::bad_alloc. The base is aligned to at least 64 bytes. At least 64 readable
    // bytes follow the last one asked for.
    explicit Memory(std::size_t bytes);
    // Bytes owned elsewhere (a mapped file), which must outlive this object.
    static Memory borrowed(const char* data, std::size_t bytes);
    ~Memory();
    Memory(Memory&& other) noexcept;
    Memory& operator=(Memory&& other) noexcept;
    Memory(const Memory&) = delete;
    Memory& operator=(const Memory&) = delete;

    char* data() const { return data_; }
    std::size_t bytes() const { return bytes_; }
    bool is_borrowed() const { return data_ && !mapped_ && !region_; }  // read, never write

  private:
    struct Region;
    struct Regions;
    void release();
    char* data_ = nullptr;
    std::size_t bytes_ = 0;
    char* mapped_ = nullptr;
    std::size_t mapped_bytes_ = 0;
    Region* region_ = nullptr;  // what it is a part of, where it is no mapping of its own
};

// Pages of freed small memory go back to the system, where the C library keeps them.
void give_back_freed_memory();

}  // namespace quire
