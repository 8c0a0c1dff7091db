// Bindings for digests of token blocks (quire/cache/plain_digest.py is the reference of
// hash_chains) and of contents. Shapes and bounds are checked here, so that native/src can trust
// its pointers. No state is kept between calls.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>

#include <memory>
#include <stdexcept>
#include <utility>
#include <vector>

#include "quire/hash.h"
#include "quire/pool.h"

namespace nb = nanobind;

namespace {

using Int32s = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Seed = nb::ndarray<const uint64_t, nb::shape<2>, nb::c_contig, nb::device::cpu>;
using Bytes = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Writable = nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Digests = nb::ndarray<nb::numpy, uint64_t, nb::shape<-1, 2>, nb::c_contig>;

const uint8_t* key_bytes(const nb::bytes& key) {
    if (key.size() != 16) throw std::invalid_argument("the hash key must have 16 bytes");
    return reinterpret_cast<const uint8_t*>(key.c_str());
}

nb::tuple siphash128(nb::bytes message, nb::bytes key) {
    const quire::Digest digest = quire::siphash128(
        reinterpret_cast<const uint8_t*>(message.c_str()), message.size(), key_bytes(key));
    return nb::make_tuple(digest.low, digest.high);
}

// Digests of the full blocks of token_ids[i] in a chain from seeds[i] on, one chain after another.
Digests hash_chains(const nb::list& token_ids, const nb::list& seeds, int64_t block_size,
                    nb::bytes key) {
    const size_t num_chains = nb::len(token_ids);
    if (nb::len(seeds) != num_chains) {
        throw std::invalid_argument("token_ids and seeds differ in length");
    }
    if (block_size < 1) throw std::invalid_argument("block_size must be at least 1");
    std::vector<Int32s> tokens;
    std::vector<Seed> starts;
    int64_t total = 0;
    for (size_t i = 0; i < num_chains; ++i) {
        tokens.push_back(nb::cast<Int32s>(token_ids[i]));
        starts.push_back(nb::cast<Seed>(seeds[i]));
        total += static_cast<int64_t>(tokens[i].size()) / block_size;
    }
    const uint8_t* key_start = key_bytes(key);
    auto digests = std::make_unique<quire::Digest[]>(static_cast<size_t>(total));
    quire::Digest* out = digests.get();
    for (size_t i = 0; i < num_chains; ++i) {
        const int64_t count = static_cast<int64_t>(tokens[i].size()) / block_size;
        quire::hash_chain(tokens[i].data(), count, block_size, {starts[i](0), starts[i](1)},
                          key_start, out);
        out += count;
    }
    quire::Digest* owned = digests.release();
    nb::capsule owner(owned, [](void* p) noexcept { delete[] static_cast<quire::Digest*>(p); });
    return Digests(reinterpret_cast<uint64_t*>(owned), {static_cast<size_t>(total), 2}, owner);
}

// The second words of the digests of one chain, as KV events publish them: a list of ints, for
// callers without NumPy.
nb::list published_hashes(const Int32s& token_ids, int64_t block_size,
                          const std::pair<uint64_t, uint64_t>& seed, nb::bytes key) {
    if (block_size < 1) throw std::invalid_argument("block_size must be at least 1");
    const int64_t count = static_cast<int64_t>(token_ids.size()) / block_size;
    std::vector<quire::Digest> digests(static_cast<size_t>(count));
    quire::hash_chain(token_ids.data(), count, block_size, {seed.first, seed.second},
                      key_bytes(key), digests.data());
    nb::list hashes;
    for (const quire::Digest& digest : digests) hashes.append(digest.high);
    return hashes;
}

nb::tuple content_digest(const Bytes& bytes, quire::Pool* pool) {
    quire::Content content(bytes.data(), static_cast<int64_t>(bytes.size()));
    {
        nb::gil_scoped_release release;
        const auto take = [&](int64_t begin, int64_t end, int) {
            for (int64_t piece = begin; piece < end; ++piece) content.take(piece);
        };
        if (pool == nullptr) {
            take(0, content.pieces(), 0);
        } else {
            pool->deal(content.pieces(), 1, take);
        }
    }
    const quire::Digest digest = content.digest();
    return nb::make_tuple(digest.low, digest.high);
}

nb::tuple copy_digest(const Bytes& bytes, const Writable& out) {
    if (bytes.size() != out.size()) {
        throw std::invalid_argument("content and out differ in length");
    }
    quire::Content content(bytes.data(), static_cast<int64_t>(bytes.size()), out.data());
    {
        nb::gil_scoped_release release;
        for (int64_t piece = 0; piece < content.pieces(); ++piece) content.take(piece);
    }
    const quire::Digest digest = content.digest();
    return nb::make_tuple(digest.low, digest.high);
}

}  // namespace

void bind_cache(nb::module_& module) {
    module.def("siphash128", &siphash128, nb::arg("message"), nb::arg("key"),
               "SipHash-2-4 with 128-bit output: (low, high).");
    module.def("hash_chains", &hash_chains, nb::arg("token_ids"), nb::arg("seeds"),
               nb::arg("block_size"), nb::arg("key"),
               "Chained digests of token blocks; see quire.cache.chain.HashChains.");
    module.def("published_hashes", &published_hashes, nb::arg("token_ids"), nb::arg("block_size"),
               nb::arg("seed"), nb::arg("key"),
               "Hashes of a prompt's full blocks; see quire.router.block_hashes.");
    module.def("content_digest", &content_digest, nb::arg("content"),
               nb::arg("pool").none() = nb::none(),
               "128 bits over every byte of uint8 [n]: (low, high), as Weight.fill returns.");
    module.def("copy_digest", &copy_digest, nb::arg("content"), nb::arg("out"),
               "Copies uint8 [n] to out [n], which does not overlap it; returns the content_digest "
               "of what was written.");
}
