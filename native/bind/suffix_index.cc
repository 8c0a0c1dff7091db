// Bindings for the suffix index (quire/speculative/suffix.py is its reference), one text per slot
// and many slots per call, and for the history of other texts that a slot may share. Shapes and
// numbers are checked here, so that native/src can trust them: what is wrong raises ValueError
// before anything is read.

#include "quire/suffix_index.h"

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/shared_ptr.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <stdexcept>
#include <utility>
#include <vector>

#include "quire/token_history.h"

namespace nb = nanobind;

namespace {

using quire::Match;
using quire::SuffixIndex;
using quire::TokenHistory;
using Slots = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Numbers = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Texts = nb::ndarray<const int32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Counts = nb::ndarray<int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Table = nb::ndarray<int32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Ids = nb::ndarray<nb::numpy, int32_t, nb::ndim<1>, nb::c_contig>;

// The text of a slot, and other texts that its drafts may come from.
struct SlotTexts {
    SuffixIndex own;
    std::shared_ptr<TokenHistory> others;
    // Where the last match in these ended, 0 before one, and for how many tokens it was found.
    int64_t kept_end = 0;
    int32_t kept_length = 0;

    // The longest match of a text in the others, where there are any.
    Match in_others(const int32_t* text, int32_t length) const {
        return others->longest_match(text, length, next_in_others(length));
    }
    // Where the last match in the others goes on; 0: nowhere.
    int64_t next_in_others(int32_t length) const {
        return kept_end && length >= kept_length ? kept_end + length - kept_length : 0;
    }
    void share(std::shared_ptr<TokenHistory> texts) {
        others = std::move(texts);
        kept_end = 0;
    }
};

// Of all slots.
class Indexes {
  public:
    explicit Indexes(size_t num_slots) : of_slot_(num_slots) {}

    SlotTexts& at(int64_t slot) {
        if (slot < 0 || static_cast<size_t>(slot) >= of_slot_.size()) {
            throw std::invalid_argument("a slot is out of range");
        }
        return of_slot_[static_cast<size_t>(slot)];
    }

    void forget(int64_t slot) {
        at(slot).own.forget();
        at(slot).share(nullptr);
    }

  private:
    std::vector<SlotTexts> of_slot_;
};

// The text of a slot in a table, checked.
const int32_t* text_of(const Texts& tokens, int64_t slot, int32_t length) {
    if (slot < 0 || static_cast<size_t>(slot) >= tokens.shape(0) || length < 0 ||
        static_cast<size_t>(length) > tokens.shape(1)) {
        throw std::invalid_argument("a text or a limit is longer than its row");
    }
    return tokens.data() + static_cast<size_t>(slot) * tokens.shape(1);
}

// What follows the first `length` tokens of `text`, and the length of the match that it follows;
// returns how many ids there are. The longer match wins, that of the text itself among equal ones.
int32_t continuation(SlotTexts& texts, const int32_t* text, int32_t length, int32_t limit,
                     int32_t* ids, int32_t& match_length) {
    texts.own.learn(text, length);
    const Match own = texts.own.longest_match(text, text, length, length);
    texts.own.keep(own, length);
    match_length = own.length;
    if (texts.others && own.length < SuffixIndex::kMaxMatch) {
        const Match other = texts.in_others(text, length);
        if (other.end) texts.kept_end = other.end, texts.kept_length = length;
        if (other.length > own.length) {
            match_length = other.length;
            return texts.others->continuation(other, limit, ids);
        }
    }
    if (!own.end) return 0;
    for (int32_t i = 0; i < limit; ++i) {
        const auto from = static_cast<int32_t>(own.end) + i;
        // Beyond the text it goes on with itself.
        ids[i] = from < length ? text[from] : ids[from - length];
    }
    return limit;
}

void propose(Indexes& indexes, const Texts& tokens, const Slots& slots, const Numbers& lengths,
             const Numbers& limits, const Table& ids, const Counts& counts,
             const Counts& matches) {
    const size_t num = slots.shape(0);
    if (lengths.shape(0) != num || limits.shape(0) != num || ids.shape(0) != num ||
        counts.shape(0) != num || matches.shape(0) != num) {
        throw std::invalid_argument("slots and what belongs to them differ in length");
    }
    for (size_t i = 0; i < num; ++i) {
        SlotTexts& texts = indexes.at(slots(i));
        const int32_t* text = text_of(tokens, slots(i), lengths(i));
        if (limits(i) < 0 || static_cast<size_t>(limits(i)) > ids.shape(1)) {
            throw std::invalid_argument("a text or a limit is longer than its row");
        }
        counts(i) = continuation(texts, text, lengths(i), limits(i), ids.data() + i * ids.shape(1),
                                 matches(i));
    }
}

// Whether a call for any of the slots would find something that follows a match of `least` tokens;
// lengths are by slot.
bool finds_any(Indexes& indexes, const Texts& tokens, const Slots& slots, const Numbers& lengths,
               int32_t least) {
    for (size_t i = 0; i < slots.shape(0); ++i) {
        SlotTexts& texts = indexes.at(slots(i));
        if (static_cast<size_t>(slots(i)) >= lengths.shape(0)) {
            throw std::invalid_argument("a slot is out of range");
        }
        const int32_t length = lengths(static_cast<size_t>(slots(i)));
        const int32_t* text = text_of(tokens, slots(i), length);
        texts.own.learn(text, length);
        if (least > SuffixIndex::kMinMatch) {
            if (texts.own.longest_match(text, text, length, length).length >= least) return true;
            if (texts.others && texts.in_others(text, length).length >= least) return true;
        } else if (texts.own.repeats(text, length) ||
                   (texts.others &&
                    texts.others->knows(text, length, texts.next_in_others(length)))) {
            return true;
        }
    }
    return false;
}

// The match of the last tokens of a tail in the whole `text` of a slot that something follows: an
// empty tail matches the start of the text, and a single token the first one.
std::optional<Match> match_in_text(SuffixIndex& index, const Numbers& text, const Numbers& tail) {
    const auto length = static_cast<int32_t>(text.shape(0));
    const auto tail_length = static_cast<int32_t>(tail.shape(0));
    index.learn(text.data(), length);
    if (tail_length >= length && tail_length < SuffixIndex::kMinMatch) return std::nullopt;
    if (tail_length == 0) return Match{};
    if (tail_length == 1) return text(0) == tail(0) ? std::optional(Match{1, 1}) : std::nullopt;
    const Match match = index.longest_match(text.data(), tail.data(), tail_length, length);
    return match.end ? std::optional(match) : std::nullopt;
}

Ids follow(Indexes& indexes, int64_t slot, const Numbers& text, const Numbers& tail,
           int32_t limit) {
    SuffixIndex& index = indexes.at(slot).own;
    const std::optional<Match> match = match_in_text(index, text, tail);
    int32_t count = 0, end = 0;
    if (match) {
        index.keep(*match, static_cast<int32_t>(tail.shape(0)));
        end = static_cast<int32_t>(match->end);
        count = std::max(std::min(limit, static_cast<int32_t>(text.shape(0)) - end), 0);
    }
    auto ids = std::make_unique<int32_t[]>(static_cast<size_t>(count) + 1);
    std::copy_n(text.data() + end, count, ids.get());
    int32_t* owned = ids.release();
    nb::capsule owner(owned, [](void* p) noexcept { delete[] static_cast<int32_t*>(p); });
    return Ids(owned, {static_cast<size_t>(count)}, owner);
}

// Whether `follow` would find something after a match of `least` tokens, or of the whole tail.
bool aligns(Indexes& indexes, int64_t slot, const Numbers& text, const Numbers& tail,
            int32_t least) {
    const std::optional<Match> match = match_in_text(indexes.at(slot).own, text, tail);
    return match && match->length >= std::min(least, static_cast<int32_t>(tail.shape(0)));
}

void check_max_tokens(size_t max_tokens) {
    if (max_tokens < 1 || max_tokens > (size_t{1} << 40)) {
        throw std::invalid_argument("a history has at least one token");
    }
}

}  // namespace

void bind_suffix_index(nb::module_& module) {
    nb::class_<TokenHistory>(module, "TokenHistory",
                             "Texts that have ended; see quire.speculative.plain_history.")
        .def("__init__",
             [](TokenHistory* history, size_t max_tokens) {
                 check_max_tokens(max_tokens);
                 new (history) TokenHistory(max_tokens);
             },
             nb::arg("max_tokens"))
        .def_static("num_bytes",
                    [](size_t max_tokens) {
                        check_max_tokens(max_tokens);
                        return TokenHistory::num_bytes(max_tokens);
                    },
                    nb::arg("max_tokens"))
        .def_prop_ro("num_compared", &TokenHistory::num_compared)
        .def("add",
             [](TokenHistory& history, const Numbers& tokens) {
                 history.add(tokens.data(), tokens.shape(0));
             },
             nb::arg("tokens"));
    nb::class_<Indexes>(module, "SuffixIndex",
                        "Continuations of texts, one per slot; see quire.speculative.suffix.")
        .def(nb::init<size_t>(), nb::arg("num_slots"))
        .def("forget", &Indexes::forget, nb::arg("slot"))
        .def("share",
             [](Indexes& indexes, int64_t slot, std::shared_ptr<TokenHistory> others) {
                 indexes.at(slot).share(std::move(others));
             },
             nb::arg("slot"), nb::arg("others"))
        .def("propose", &propose, nb::arg("tokens"), nb::arg("slots"), nb::arg("lengths"),
             nb::arg("limits"), nb::arg("ids"), nb::arg("counts"), nb::arg("matches"))
        .def("finds_any", &finds_any, nb::arg("tokens"), nb::arg("slots"), nb::arg("lengths"),
             nb::arg("least"))
        .def("follow", &follow, nb::arg("slot"), nb::arg("text"), nb::arg("tail"),
             nb::arg("limit"))
        .def("aligns", &aligns, nb::arg("slot"), nb::arg("text"), nb::arg("tail"),
             nb::arg("least"));
}
