"""Which clients may make an application start an engine."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from quire.base.log import Log
from quire.deploy.ray_serve.app_args import read_args
from quire.deploy.ray_serve.wake_keys import WakeKeys


def _accepts(args: dict[str, Any], *keys: str) -> list[bool]:
    found = WakeKeys(read_args(args), Log("router", io.StringIO()))
    return [
        found.accept([(b"host", b"a"), (b"authorization", f"Bearer {key}".encode())])
        for key in keys
    ]


def test_only_keys_of_the_engines_start_one(tmp_path: Path) -> None:
    keys, tenants = tmp_path / "keys", tmp_path / "tenants.toml"
    keys.write_text("one\ntwo\n")
    tenants.write_text('[tenants.search]\nkeys = ["three"]\n')
    for settings, accepted in (
        ({"api_key": "zero"}, {"zero"}),
        ({"api_key_file": str(keys)}, {"one", "two"}),
        ({"tenants": str(tenants)}, {"three"}),
        ({"api_key_file": str(keys), "tenants": str(tenants)}, {"one", "two", "three"}),
    ):
        sent = ("zero", "one", "two", "three", "four", "", "ö")
        found = _accepts({"settings": settings}, *sent)
        assert {key for key, is_known in zip(sent, found, strict=True) if is_known} == accepted
        insecure = _accepts({"settings": settings, "insecure": True}, *sent)
        assert insecure == found  # keys that are set are needed


def test_a_key_in_either_header_counts_and_none_is_no_key() -> None:
    found = WakeKeys(read_args({"settings": {"api_key": "k"}}), Log("router", io.StringIO()))
    assert found.accept([(b"x-api-key", b"k")])
    assert not found.accept([])
    assert not found.accept([(b"authorization", b"Basic k")])


def test_an_open_application_accepts_all() -> None:
    assert _accepts({"insecure": True}, "", "any") == [True, True]


def test_files_are_read_anew_and_a_lost_file_opens_nothing(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("one\n")
    args = {"settings": {"api_key_file": str(keys)}, "insecure": True}
    text = io.StringIO()
    found = WakeKeys(read_args(args), Log("router", text))
    header = [(b"authorization", b"Bearer two")]
    assert not found.accept(header)
    keys.write_text("two\n")
    assert found.accept(header)
    keys.unlink()
    assert not found.accept(header)
    assert "keys cannot be read" in text.getvalue()
