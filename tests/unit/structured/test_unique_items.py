"""uniqueItems over scalars: every mask is compared with a list of all valid texts, answers are
drawn and validated, and rolled-back, copied and replayed matchers agree."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.base.errors import InvalidParameter
from quire.base.grammar import json_schema
from quire.structured import item_values
from quire.structured.compiler import GrammarCompiler
from quire.structured.item_values import NONE_USED, Items, Used, key_of, settled
from quire.structured.matcher import Matcher, MatcherError
from quire.structured.unique_plan import planned
from quire.structured.unique_tracker import UniqueTracker
from quire.structured.vocabulary import Vocabulary
from quire.text.tokenizer import Tokenizer
from tests.cases import each_case
from tests.drawn import examples
from tests.unit.structured.conftest import Accepts, json_text
from tests.unit.structured.test_matcher import ids_of

# Single bytes, and tokens that end an item and go on, or hold whole arrays.
TOKENS = [
    *(bytes([byte]) for byte in range(256)),
    *(b'",', b'", "', b'"]', b'["', b'a"', b"ab", b'","', b", ", b"],", b"1,", b"1, 1", b'a", "a"'),
    *(b'["a", "a"', b'"a", "a"]', b"[1, 1]", b"[0, 1", b"true", b"tr", b"\\n", b"\\u0", b"00"),
    *(b"10", b"1.0", b", 1", b'{"tags": ["', b'n",', b'b", "b', b"e1", b"]]", b"\\", b'b"]}'),
]
EOS_ID = len(TOKENS)
ARRAY = {"type": "array", "uniqueItems": True}
STRINGS = {**ARRAY, "items": {"type": "string"}}


@pytest.fixture(scope="module")
def small() -> Iterator[GrammarCompiler]:
    vocabulary = Vocabulary(
        token_bytes=[*TOKENS, b"<eos>"],
        special_ids=frozenset({EOS_ID}),
        eos_ids=(EOS_ID,),
        encode=lambda text: list(text.encode()),
    )
    made = GrammarCompiler(lambda: vocabulary, now_ms=lambda: 0.0)
    yield made
    made.close()


def unfiltered(matcher: Matcher) -> list[int]:
    """The ids llguidance allows, which knows no uniqueItems."""
    bits = np.unpackbits(matcher._grammar_mask().view(np.uint8), bitorder="little")
    return [int(id_) for id_ in bits.nonzero()[0]]


def drawn(matcher: Matcher, random: np.random.Generator, most: int) -> tuple[bytes, bool]:
    """Return a text of tokens that the masks allow, and True if it is a whole answer."""
    text = b""
    for _ in range(most):
        if matcher.is_complete:
            return text, True
        ids = ids_of(matcher)
        few = [id_ for id_ in ids if id_ > 255 or chr(id_) in 'ab01",[]. -e:{}']
        id_ = int(random.choice(few or ids))
        if id_ == EOS_ID:
            return text, True
        matcher.take([id_])
        text += TOKENS[id_]
    return text, False


def listed(items: list[bytes], lengths: range) -> list[bytes]:
    """Return the texts of all arrays of distinct items, given the texts of the items."""
    return [
        b"[" + b", ".join(chosen) + b"]"
        for length in lengths
        for chosen in itertools.permutations(items, length)
        if len({key_of(text) for text in chosen}) == length
    ]


def in_object(tags: list[bytes], rest: list[bytes]) -> list[bytes]:
    return [
        b'{"tags": ' + one + b', "rest": ' + other + b"}"
        for one, other in itertools.product(tags, rest)
    ]


_AB = [b'"' + bytes(text) + b'"' for n in (0, 1, 2) for text in itertools.product(b"ab", repeat=n)]
_LINES = [b'"a"', b'"\\n"', b'"\\u000a"', b'"\\u000A"']
_SMALL = {"type": "string", "pattern": "^[ab]?$"}
_SMALL_TEXTS = [b'""', b'"a"', b'"b"']
# Schemas with all their valid texts.
FINITE: dict[str, tuple[Any, list[bytes]]] = {
    "patterns": (
        {**ARRAY, "items": {"type": "string", "pattern": "^[ab]{0,2}$"}, "maxItems": 3},
        listed(_AB, range(4)),
    ),
    "all of few strings": (
        {**ARRAY, "items": _SMALL, "minItems": 3},
        listed(_SMALL_TEXTS, range(3, 4)),
    ),
    "escapes": (
        {**ARRAY, "items": {"type": "string", "pattern": "^[a\\n]$"}},
        listed(_LINES, range(3)),
    ),
    "listed values": (
        {**ARRAY, "items": {"enum": ["a", "ab", "abc", 1, 10, True, None]}, "minItems": 2},
        listed([b'"a"', b'"ab"', b'"abc"', b"1", b"10", b"true", b"null"], range(2, 8)),
    ),
    "integers": (
        {**ARRAY, "items": {"type": "integer", "minimum": 0, "maximum": 11}, "maxItems": 3},
        listed([b"%d" % number for number in range(12)], range(4)),
    ),
    "of several types": (
        {
            **ARRAY,
            "items": {"anyOf": [_SMALL, {"type": "integer", "minimum": 9, "maximum": 10}]},
            "maxItems": 4,
        },
        listed([*_SMALL_TEXTS, b"9", b"10"], range(5)),
    ),
    "in an object": (
        {
            "type": "object",
            "properties": {
                "tags": {**ARRAY, "items": _SMALL},
                "rest": {"type": "array", "items": _SMALL, "maxItems": 2},
            },
            "required": ["tags", "rest"],
            "additionalProperties": False,
        },
        in_object(
            listed(_SMALL_TEXTS, range(4)),
            [
                b"[" + b", ".join(chosen) + b"]"
                for length in range(3)
                for chosen in itertools.product(_SMALL_TEXTS, repeat=length)
            ],
        ),
    ),
    "in arrays": (
        {
            "type": "array",
            "items": {**ARRAY, "items": {"type": "integer", "minimum": 0, "maximum": 1}},
            "maxItems": 2,
        },
        [
            b"[" + b", ".join(chosen) + b"]"
            for length in range(3)
            for chosen in itertools.product(listed([b"0", b"1"], range(3)), repeat=length)
        ],
    ),
}


@pytest.mark.parametrize("name", FINITE)
def test_a_mask_has_the_tokens_that_begin_a_valid_text_and_no_others(
    name: str, small: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.structured.schema.MAX_ARRAYS", 0)  # else some are listed
    schema, texts = FINITE[name]
    judge = jsonschema.Draft202012Validator(schema)
    assert all(judge.is_valid(json.loads(text)) for text in texts)
    grammar = json_schema({**schema, "title": name})
    for seed in range(12):
        random, matcher, text = np.random.default_rng(seed), small.matcher(grammar), b""
        while not matcher.is_complete:
            left = [one for one in texts if one.startswith(text)]
            begin = tuple({one[len(text) :][:end] for one in left for end in range(1, 20)})
            expected = [
                id_
                for id_ in unfiltered(matcher)
                if (text in texts if id_ == EOS_ID else TOKENS[id_] in begin)
            ]
            assert ids_of(matcher) == expected
            id_ = int(random.choice(expected))
            matcher.take([id_])
            text += TOKENS[id_]
        assert text in texts


@pytest.mark.parametrize("name", FINITE)
def test_every_valid_text_can_be_written(
    name: str, small: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.structured.schema.MAX_ARRAYS", 0)
    schema, texts = FINITE[name]
    root = small.matcher(json_schema({**schema, "title": name}))
    for text in texts[:: max(1, len(texts) // 60)]:
        matcher, at = root.copy(), 0
        while at < len(text):
            # a byte, or where several are certain the token for them
            ids = [id_ for id_ in ids_of(matcher) if text.startswith(TOKENS[id_], at)]
            id_ = min(ids, key=lambda id_: len(TOKENS[id_]))
            matcher.take([id_])
            at += len(TOKENS[id_])
        assert matcher.is_complete


_STRINGS = st.fixed_dictionaries(
    {"type": st.just("string")},
    optional={
        "maxLength": st.integers(1, 3),
        "pattern": st.sampled_from(["^[ab]{1,3}$", "^a*b?$", "^(a|b+)$", '^[a"\\\\]*$']),
    },
)
_NUMBERS = st.fixed_dictionaries(
    {"type": st.sampled_from(["integer", "number"])},
    optional={"minimum": st.integers(-1, 1), "maximum": st.integers(2, 12)},
)
_ITEMS = st.one_of(
    _STRINGS,
    _NUMBERS,
    st.tuples(_STRINGS, _NUMBERS).map(lambda both: {"anyOf": list(both)}),
    st.just({"type": ["string", "boolean", "null", "number"]}),
    st.lists(
        st.sampled_from(["a", "ab", "b", "", 0, 1, 1.5, 10, True, None]), min_size=1, max_size=8
    ).map(lambda values: {"enum": values}),
)
# Among these are at least four values of each that has so many.
CANDIDATES = [
    *("".join(letters) for n in range(4) for letters in itertools.product('ab"\\', repeat=n)),
    *(range(-1, 13)),
    *(1.25, 1.5, 1.75, True, False, None),
]


@settings(max_examples=examples(150), deadline=None)
@given(
    items=_ITEMS,
    at_least=st.integers(0, 4),
    is_nested=st.booleans(),
    whitespace=st.sampled_from([None, "", "[ \n]{0,2}"]),
    seed=st.integers(0, 2**32 - 1),
)
def test_an_answer_is_never_stuck_and_is_valid(
    items: Any,
    at_least: int,
    is_nested: bool,
    whitespace: str | None,
    seed: int,
    small: GrammarCompiler,
) -> None:
    schema: Any = {**ARRAY, "items": items, "minItems": at_least}
    if is_nested:
        named = {"tags": {"$ref": "#/$defs/tags"}, "more": {"type": "array", "items": schema}}
        schema = {"type": "object", "properties": named, "$defs": {"tags": schema}}
        schema |= {"additionalProperties": False, "required": ["tags"]}
    grammar = json_schema(schema, whitespace=whitespace)
    judge = jsonschema.Draft202012Validator(items)
    if sum(map(judge.is_valid, CANDIDATES)) < at_least:
        with pytest.raises(InvalidParameter):
            small.matcher(grammar)
        return
    matcher = small.matcher(grammar)
    text, is_whole = drawn(matcher, np.random.default_rng(seed), 80)
    if is_whole:
        jsonschema.validate(json.loads(text), schema)


@settings(max_examples=60, deadline=None)
@given(name=st.sampled_from(sorted(FINITE)), seed=st.integers(0, 2**32 - 1))
def test_copied_rolled_back_and_replayed_matchers_agree(
    name: str, seed: int, small: GrammarCompiler
) -> None:
    random = np.random.default_rng(seed)
    root = small.matcher(json_schema(FINITE[name][0]))
    matcher, taken = root.copy(), list[int]()
    for _ in range(30):
        if matcher.is_complete:
            break
        id_ = int(random.choice(ids_of(matcher)))
        if id_ == EOS_ID:
            break
        matcher.take([id_])
        taken.append(id_)
    replayed, twin = root.copy(), matcher.copy()
    replayed.replay(taken)
    back = int(random.integers(0, len(taken) + 1))
    kept = len(taken) - back
    twin.go_back(back)
    begun = root.copy()
    begun.replay(taken[:kept])
    if not begun.is_complete:
        assert (twin.mask() == begun.mask()).all()
    twin.replay(taken[kept:])
    for other in (replayed, twin):
        assert other.is_complete == matcher.is_complete
        assert matcher.is_complete or (other.mask() == matcher.mask()).all()


def test_taking_a_repeated_item_fails(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    matcher = compiler.matcher(json_schema(STRINGS))
    with pytest.raises(MatcherError, match="repeat an item"):
        matcher.take(tokenizer.encode('["a", "a"', add_special_tokens=False))


TRACKED: dict[str, tuple[Any, list[Any], list[Any]]] = {
    "strings": (STRINGS, [[], ["a", "b"], ['"', "\\", "é", "\n"]], [["a", "a"], ["é", "b", "é"]]),
    "no type": (
        {"items": {"type": "string"}, "uniqueItems": True},
        [1, {"a": [1, 1]}, ["a"]],
        [["a", "a"]],
    ),
    "integers": ({**ARRAY, "items": {"type": "integer"}}, [[1, 11, 111]], [[1, 1], [11, 1, 11]]),
    "numbers": (
        {**ARRAY, "items": {"type": "number"}},
        [[1, 1.5, 10], [0.1, 0.2]],
        [[1, 1.0], [100, 1e2], [0, -0.0], [1.5, 1.50]],
    ),
    "scalars": (
        {**ARRAY, "items": {"type": ["string", "boolean", "null", "integer"]}},
        [[1, True, "1", "true", None, "null", False, 0]],
        [[None, None], [True, 1, True]],
    ),
    "formats": (
        {**ARRAY, "items": {"type": "string", "format": "date"}},
        [["2026-11-22", "2026-11-23"]],
        [["2026-11-22", "2026-11-22"]],
    ),
    "several arrays": (
        {
            "type": "object",
            "properties": {"a": STRINGS, "b": {"type": "array", "items": {"type": "string"}}},
            "additionalProperties": STRINGS,
            "required": ["a", "b"],
        },
        [{"a": ["x"], "b": ["x", "x"], "c": ["x"]}],
        [{"a": ["x", "x"], "b": []}, {"a": [], "b": [], "c": ["y", "y"]}],
    ),
    "arrays in objects in arrays": (
        {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {"n": {"type": "string"}, "tags": STRINGS},
                "additionalProperties": False,
            },
        },
        [[{"n": "x", "tags": ["x"]}, {"tags": ["x"]}]],
        [[{"tags": ["x"]}, {"n": "y", "tags": ["x", "x"]}]],
    ),
    "recursion": (
        {
            "$ref": "#/$defs/node",
            "$defs": {
                "node": {
                    "type": "object",
                    "properties": {
                        "tags": STRINGS,
                        "below": {"type": "array", "items": {"$ref": "#/$defs/node"}},
                    },
                    "additionalProperties": False,
                }
            },
        },
        [{"tags": ["a"], "below": [{"tags": ["a"], "below": [{"tags": ["a", "b"]}]}]}],
        [{"below": [{"below": [{"tags": ["a", "a"]}]}]}],
    ),
    "an alternative of another type": (
        {"anyOf": [STRINGS, {"type": "null"}, {"type": "string"}]},
        [None, "a", ["a", "b"]],
        [["a", "a"]],
    ),
    "parts": (
        {"allOf": [{"type": "array", "uniqueItems": True}, {"items": {"type": "string"}}]},
        [["a"]],
        [["a", "a"]],
    ),
}


@each_case("name", TRACKED)
def test_valid_answers_are_taken_and_repeated_items_are_not(name: str, accepts: Accepts) -> None:
    schema, good, bad = TRACKED[name]
    judge = jsonschema.Draft202012Validator(schema)
    assert [judge.is_valid(one) for one in good + bad] == [True] * len(good) + [False] * len(bad)
    allowed = json_schema(schema)
    assert [value for value in good if not accepts(allowed, json_text(value))] == []
    assert [value for value in bad if accepts(allowed, json_text(value))] == []


REFUSED: dict[str, tuple[Any, str]] = {
    "objects": (
        {**ARRAY, "items": {"type": "object"}},
        r"uniqueItems \(at #/uniqueItems\), which cannot be enforced there: its items may be",
    ),
    "anything": ({"properties": {"a": {"uniqueItems": True}}}, r"#/properties/a/uniqueItems\)"),
    "arrays": ({**ARRAY, "items": {"type": ["string", "array"]}}, "its items may be arrays"),
    "another alternative without it": (
        {"anyOf": [STRINGS, {"type": "array", "items": {"type": "integer"}}]},
        "another alternative allows an array",
    ),
    "alternatives of other items": (
        {"anyOf": [STRINGS, {**ARRAY, "items": {"type": "integer"}}]},
        "arrays of different items",
    ),
    "below patternProperties": (
        {"type": "object", "patternProperties": {"^a": STRINGS}},
        "below patternProperties",
    ),
    "prefixItems": (
        {**ARRAY, "prefixItems": [{"type": "string"}, {"type": "string"}]},
        "schemas of their own",
    ),
    "too many kinds of items": (
        {
            "type": "object",
            "properties": {
                f"p{n}": {**ARRAY, "items": {"type": "string", "maxLength": n + 9}}
                for n in range(33)
            },
        },
        "more than 32 different kinds",
    ),
    "too many alternatives": (
        {
            "allOf": [
                {"anyOf": [{"properties": {f"p{n}": STRINGS}}, {"required": [f"r{n}"]}]}
                for n in range(7)
            ]
        },
        "more than 64 alternatives",
    ),
    "too few items": (
        {**ARRAY, "items": {"type": "string", "pattern": "^[a-c]$"}, "minItems": 4},
        "needs 4 items",
    ),
}


@each_case("name", REFUSED)
def test_what_cannot_be_tracked_is_refused_with_path_and_reason(
    name: str, compiler: GrammarCompiler
) -> None:
    schema, said = REFUSED[name]
    with pytest.raises(InvalidParameter, match=said):
        compiler.matcher(json_schema(schema, param="response_format"))


def test_a_property_of_that_name_is_no_keyword(accepts: Accepts) -> None:
    schema = {"type": "object", "properties": {"uniqueItems": {"type": "boolean"}}}
    assert planned(schema) == (schema, None)
    assert accepts(json_schema(schema), '{"uniqueItems": true}')


def test_a_plan_in_a_schema_of_the_client_is_ignored(accepts: Accepts) -> None:
    schema = {"type": "array", "items": {"type": "string"}, "x-quire-unique-items": {"places": 3}}
    assert accepts(json_schema(schema), '["a", "a"]')


def test_a_full_array_closes(accepts: Accepts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(item_values, "MAX_DISTINCT", 3)
    for kind, values in (("string", ["a", "b", "c", "d"]), ("integer", [1, 2, 3, 4])):
        allowed = json_schema({**ARRAY, "items": {"type": kind}})
        assert accepts(allowed, json_text(values[:3]))
        assert not accepts(allowed, json_text(values))


def test_an_error_of_the_tracker_fails_the_matcher_only(
    compiler: GrammarCompiler, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    matcher = compiler.matcher(json_schema({**ARRAY, "items": {"type": "string"}}))
    matcher.take(tokenizer.encode('["', add_special_tokens=False))

    def broken(*_: object) -> None:
        raise ValueError("planted")

    monkeypatch.setattr(UniqueTracker, "narrowed", broken)
    with pytest.raises(MatcherError, match="planted"):
        matcher.copy().mask()
    monkeypatch.setattr(UniqueTracker, "take", broken)
    with pytest.raises(MatcherError, match="planted"):
        matcher.copy().take(tokenizer.encode("a", add_special_tokens=False))


def test_what_items_remember_counts_as_memory_of_the_grammar(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    schema = json_schema({**ARRAY, "items": {"pattern": "^[a-c]{4}$", "type": "string"}})
    matcher = compiler.matcher(schema)
    entry = compiler._entries[schema.digest]
    remembered, num_bytes = matcher.root.num_tracker_bytes, entry.num_bytes
    matcher.take(tokenizer.encode('["aaaa", "', add_special_tokens=False))
    matcher.mask()
    grown = matcher.root.num_tracker_bytes - remembered
    assert grown > 0
    assert entry.num_bytes - num_bytes == grown


def test_a_grammar_without_uniqueitems_has_no_tracker(compiler: GrammarCompiler) -> None:
    assert compiler.matcher(json_schema({"type": "array"}))._trackers == ()
    assert compiler.matcher(json_schema(STRINGS))._trackers


@settings(max_examples=examples(300), deadline=None)
@given(text=st.text(max_size=8), end=st.integers(0, 60), is_ascii=st.booleans())
def test_the_beginning_of_a_string_is_read_whatever_its_escapes(
    text: str, end: int, is_ascii: bool
) -> None:
    written = json.dumps(text, ensure_ascii=is_ascii).encode("utf-8", "surrogatepass")
    whole = text.encode("utf-8", "surrogatepass")
    assert key_of(written) == whole
    raw = written[1:-1][:end]
    begun, unfinished = settled(raw)
    assert whole.startswith(begun)
    assert raw.endswith(unfinished)
    assert bool(unfinished) or begun == json_inside(raw)


def json_inside(raw: bytes) -> bytes:
    """A string's inside read by json; a character that is cut stays as it is."""
    inside = raw.decode("utf-8", "surrogateescape")
    read: str = json.loads(f'"{inside}"')
    return (
        read.encode("utf-16", "surrogatepass")
        .decode("utf-16", "surrogatepass")
        .encode("utf-8", "surrogateescape")
    )


def test_a_search_in_a_long_list_visits_closed_beginnings_once() -> None:
    """Each item closes its beginnings for good, so the searches of an array add up to its items."""
    values = [f"item-{number:03}" for number in range(300)]
    items = Items({"allOf": [{"enum": values}]}, min_items=300)
    asked = list[bytes]()
    after = items._grammar.after

    def counted(start: bytes) -> tuple[bytes, bool]:
        asked.append(start)
        return after(start)

    items._grammar.after = counted  # type: ignore[method-assign]
    used: Used = NONE_USED
    for value in values:
        assert items.is_open(b"", used)
        used = used.with_item(value.encode())
    assert not items.is_open(b"", used)
    assert len(asked) < 300 * 40
