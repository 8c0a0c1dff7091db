"""The tenants file: read strictly, rejected with the place of an error, keys never stored."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from quire.base.errors import SettingError
from quire.config.tenants import MAX_FILE_BYTES, Tenant, needs_restart, read_tenants
from tests.cases import each_case

ALL = """
[tenants.search]
keys = ["key-1", "key-2"]
key_digests = ["{digest}"]
weight = 2
kv_floor_blocks = 10
kv_ceiling_share = 0.5
max_running = 4
max_queued = 8
priority = -3
priority_min = -5
priority_max = 5
isolate_cache = true
admin = true

[tenants.batch]
keys = ["key-3"]
""".format(digest=hashlib.sha256(b"key-4").hexdigest().upper())


def read(folder: Path, text: str, name: str = "tenants.toml") -> tuple[Tenant, ...]:
    file = folder / name
    file.write_text(text)
    return read_tenants(str(file))


def refused(folder: Path, text: str, name: str = "tenants.toml") -> str:
    with pytest.raises(SettingError) as caught:
        read(folder, text, name)
    assert str(folder / name) in str(caught.value)
    return str(caught.value)


def test_every_setting_is_read_and_the_default_tenant_comes_first(tmp_path: Path) -> None:
    default, search, batch = read(tmp_path, ALL)
    assert default.is_default
    assert default.name_in_requests == ""
    assert not default.key_digests
    assert search == Tenant(
        name="search",
        key_digests=tuple(
            hashlib.sha256(key).hexdigest() for key in (b"key-1", b"key-2", b"key-4")
        ),
        weight=2.0,
        kv_floor_blocks=10,
        kv_ceiling_share=0.5,
        max_running=4,
        max_queued=8,
        priority=-3,
        priority_min=-5,
        priority_max=5,
        isolate_cache=True,
        is_admin=True,
    )
    assert batch.name_in_requests == "batch"


def test_a_tenant_may_not_precede_others_unless_the_file_allows_it(tmp_path: Path) -> None:
    (_, tenant) = read(tmp_path, '[tenants.a]\nkeys = ["k"]')
    assert tenant.priority_min == 0 < tenant.priority_max
    assert not tenant.is_admin


def test_the_same_file_as_json_is_equal(tmp_path: Path) -> None:
    as_json = json.dumps({"tenants": {"a": {"keys": ["k"], "weight": 3}}})
    toml = '[tenants.a]\nkeys = ["k"]\nweight = 3'
    assert read(tmp_path, as_json, "t.json") == read(tmp_path, toml)


def test_no_key_is_stored_in_plain_text(tmp_path: Path) -> None:
    assert "key-1" not in repr(read(tmp_path, ALL))


def test_the_default_tenant_may_have_limits(tmp_path: Path) -> None:
    default, other = read(tmp_path, '[tenants.a]\nkeys = ["k"]\n[tenants.default]\nmax_running = 2')
    assert (default.max_running, other.name) == (2, "a")


@each_case(
    ("setting", "said"),
    [
        ("weigth = 2", '"weigth" is not known; did you mean weight?'),
        ("frob = 2", '"frob" is not known; known: keys'),
        ("weight = 0", "weight is 0; a finite number above 0"),
        ("weight = true", "weight is true"),
        ("weight = nan", "weight is "),
        ('weight = "2"', 'weight is "2"'),
        ("kv_floor_blocks = -1", "kv_floor_blocks is -1; a whole number from 0"),
        ("kv_floor_blocks = 1.5", "kv_floor_blocks is 1.5; a whole number"),
        ("kv_floor_share = 0", "kv_floor_share is 0; a finite number above 0 to 1"),
        ("kv_ceiling_share = 1.5", "kv_ceiling_share is 1.5"),
        ("kv_ceiling_blocks = 0", "kv_ceiling_blocks is 0; a whole number from 1"),
        ("kv_floor_blocks = 1\nkv_floor_share = 0.5", "kv_floor_blocks and kv_floor_share set"),
        ("kv_floor_blocks = 9\nkv_ceiling_blocks = 8", "kv_floor_blocks is 9, more than"),
        ("max_running = 0", "max_running is 0; a whole number from 1"),
        ("max_queued = 0", "max_queued is 0; a whole number from 1"),
        ("priority = 5000000", "priority is 5000000"),
        ("priority = -1", "priority is -1; it must lie between priority_min 0"),
        ("isolate_cache = 1", "isolate_cache is 1; true or false"),
        ("keys = []\nadmin = 0", "admin is 0; true or false"),
        ('keys = "k"', 'keys is "k"; a list is allowed'),
        ('keys = [""]', 'keys holds ""'),
        ('keys = [" k"]', "keys holds a key with leading or trailing white space"),
        ("keys = [5]", "keys holds 5"),
        ('key_digests = ["abc"]', 'key_digests holds "abc"; each must be a key\'s SHA-256'),
    ],
)
def test_invalid_entries_are_rejected_with_their_tenant(
    tmp_path: Path, setting: str, said: str
) -> None:
    message = refused(tmp_path, f"[tenants.a]\n{setting}")
    assert f"tenants.a: {said}" in message


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "it names no tenant"),
        ("tenants = 5", "it names no tenant"),
        ("[tenant.a]", '"tenant"; only `tenants` is known'),
        ("[tenants]\na = 5", "tenants.a is 5; a table"),
        ('[tenants."a b"]', 'a tenant is called "a b"'),
        ("[tenants.a]\n[tenants.a]", "it is not TOML"),
        ('[tenants.a]\nkeys = ["k"]\n[tenants.b]\nkeys = ["k"]', "a and b have a key in common"),
    ],
)
def test_an_invalid_file_is_rejected(tmp_path: Path, text: str, said: str) -> None:
    assert said in refused(tmp_path, text)


def test_a_duplicate_name_in_json_is_rejected(tmp_path: Path) -> None:
    assert "given twice" in refused(tmp_path, '{"tenants": {"a": {}, "a": {}}}', "t.json")


def test_another_kind_of_file_is_rejected(tmp_path: Path) -> None:
    assert ".toml and .json are read" in refused(tmp_path, "", "t.yaml")


def test_a_missing_too_large_or_invalid_file_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="cannot be read: No such file"):
        read_tenants(str(tmp_path / "none.toml"))
    file = tmp_path / "t.toml"
    file.write_bytes(b"#" * (MAX_FILE_BYTES + 1))
    with pytest.raises(SettingError, match="at most 4194304"):
        read_tenants(str(file))
    file.write_bytes(b"\xff")
    with pytest.raises(SettingError, match="not UTF-8"):
        read_tenants(str(file))


@each_case(
    ("was", "is_now", "said"),
    [
        ('"key-3"', '"key-5", "key-6"', None),
        ("priority = -3", "priority = 0", None),
        ("isolate_cache = true", "isolate_cache = false", None),
        ("admin = true", "admin = false", None),
        ("weight = 2", "weight = 3", "weight of tenant search was 2.0 and is 3.0"),
        ("kv_floor_blocks = 10", "", "kv_floor_blocks of tenant search was 10 and is null"),
        ("max_running = 4", "max_running = 5", "max_running of tenant search was 4 and is 5"),
        ("[tenants.batch]", "[tenants.lot]", "tenant batch is removed"),
        ("[tenants.batch]", '[tenants.new]\nkeys = ["k"]\n[tenants.batch]', "tenant new is new"),
    ],
)
def test_only_keys_and_api_checks_can_be_reloaded(
    was: str, is_now: str, said: str | None, tmp_path: Path
) -> None:
    before = read(tmp_path, ALL)
    assert was in ALL
    assert needs_restart(before, read(tmp_path, ALL.replace(was, is_now))) == said
