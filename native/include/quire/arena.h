// Arena: the buffers of a program at fixed offsets in one memory area, which they share over time.
// A program has one for steps, and one for layered prefill. Every buffer lies inside the area,
// aligned to 64 bytes.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "quire/memory.h"
#include "quire/types.h"

namespace quire {

enum class RowCount : int32_t { tokens = 0, samples = 1, sequences = 2 };

struct BufferSpec {
    RowCount rows;
    int64_t offset_bytes;  // in the arena
    int64_t stride;        // elements
    int64_t max_rows;
    Type type;
};

inline int64_t bytes_of(const BufferSpec& buffer) {
    return buffer.max_rows * buffer.stride * type_bytes(buffer.type);
}

class Arena {
  public:
    explicit Arena(int64_t bytes) : memory_(static_cast<size_t>(bytes)) {}

    // Throws std::invalid_argument if it does not lie in the area.
    void add(const BufferSpec& buffer) {
        if (buffer.offset_bytes < 0 || buffer.offset_bytes % 64 != 0 ||
            buffer.offset_bytes + bytes_of(buffer) > static_cast<int64_t>(memory_.bytes())) {
            throw std::invalid_argument("buffer " + std::to_string(buffers_.size()) +
                                        " does not lie in the arena");
        }
        buffers_.push_back(buffer);
    }
    // Throws std::invalid_argument if there is no such buffer.
    const BufferSpec& at(int64_t index) const {
        if (index < 0 || index >= static_cast<int64_t>(buffers_.size())) {
            throw std::invalid_argument("no buffer " + std::to_string(index));
        }
        return buffers_[static_cast<size_t>(index)];
    }
    size_t num_buffers() const { return buffers_.size(); }
    char* data(const BufferSpec& buffer) const { return memory_.data() + buffer.offset_bytes; }
    // Returns whether the two overlap.
    bool overlap(int64_t one, int64_t other) const {
        const BufferSpec &a = at(one), &b = at(other);
        return a.offset_bytes < b.offset_bytes + bytes_of(b) &&
               b.offset_bytes < a.offset_bytes + bytes_of(a);
    }

  private:
    Memory memory_;
    std::vector<BufferSpec> buffers_;
};

}  // namespace quire
