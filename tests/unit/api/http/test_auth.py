"""Keys: which requests are accepted, and comparison in constant time."""

from __future__ import annotations

import hmac

import pytest

from quire.api.http.auth import Caller, Keys
from quire.api.openai.dialect import OPENAI
from quire.base.errors import NotAuthorized
from tests.cases import each_case

PATH = "/v1/chat/completions"


def check(keys: Keys, path: str, authorization: bytes | None) -> Caller:
    headers = [] if authorization is None else [(b"authorization", authorization)]
    return keys.check(path, lambda: OPENAI.read_key(headers))


def test_without_keys_every_request_is_accepted() -> None:
    check(Keys(()), PATH, None)


@pytest.mark.parametrize("sent", [b"Bearer first", b"Bearer second", b"bearer  first "])
def test_each_configured_key_is_accepted(sent: bytes) -> None:
    check(Keys(("first", "second")), PATH, sent)


@each_case(
    "sent",
    [None, b"", b"first", b"Basic first", b"Bearer", b"Bearer ", b"Bearer firs", b"Bearer first2",
     b"Bearer \xff\xfe", b"Bearer first second"],
)  # fmt: skip
def test_anything_else_is_rejected(sent: bytes | None) -> None:
    with pytest.raises(NotAuthorized):
        check(Keys(("first", "second")), PATH, sent)


@pytest.mark.parametrize("path", ["/", "/health", "/version"])
def test_paths_for_load_balancers_need_no_key(path: str) -> None:
    check(Keys(("k",)), path, None)


@pytest.mark.parametrize("path", ["/metrics", "/v1/models", "/health/", "//health", "/nowhere"])
def test_all_other_paths_need_a_key(path: str) -> None:
    with pytest.raises(NotAuthorized):
        check(Keys(("k",)), path, None)


def test_all_keys_are_compared_by_digests_of_one_length(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[bytes, bytes]] = []

    def watched(left: bytes, right: bytes) -> bool:
        compared.append((left, right))
        return left == right

    monkeypatch.setattr(hmac, "compare_digest", watched)
    check(Keys(("first", "a much longer second key")), PATH, b"Bearer first")
    assert len(compared) == 2
    assert {len(side) for pair in compared for side in pair} == {32}
