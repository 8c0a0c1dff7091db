"""Settings of the exchange of KV blocks: values, combinations, peers and the key file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quire.base.errors import SettingError
from quire.config.flags import engine_config
from quire.config.key_file import read_shared_key
from quire.config.transfer import TransferConfig, peer_address
from tests.cases import each_case

KEY = {"kv_transfer_key_file": "key"}


def test_roles_say_who_hands_over_and_who_fetches() -> None:
    assert not TransferConfig().is_on
    for role, hands_over, fetches in (
        ("prefill", True, False),
        ("decode", False, True),
        ("both", True, True),
    ):
        config = TransferConfig(role=role, **KEY)  # type: ignore[arg-type]
        assert (config.hands_over, config.fetches) == (hands_over, fetches)


@each_case(
    ("settings", "words"),
    [
        ({"role": "server"}, "prefill, decode, both"),
        ({"role": "prefill"}, "add kv_transfer_key_file"),
        ({"kv_transfer_port": 7001}, "add kv_transfer_key_file"),
        ({"kv_transfer_peer": ("a:1",)}, "add kv_transfer_key_file"),
        (KEY | {"kv_transfer_key_file": ""}, "empty"),
        (KEY | {"kv_transfer_host": "0.0.0.0"}, "network card"),
        (KEY | {"kv_transfer_host": "::"}, "network card"),
        (KEY | {"kv_transfer_port": 65536}, "65535"),
        (KEY | {"kv_transfer_bytes": 0}, "at least 1"),
        (KEY | {"kv_transfer_timeout_s": 0.0}, "at least"),
        (KEY | {"kv_transfer_backend": "rdma"}, "auto, tcp, shm, nixl"),
        ({"kv_transfer_tls_ca": "a.pem"}, "add kv_transfer_key_file"),
        (KEY | {"kv_transfer_tls_ca": ""}, "empty"),
        (KEY | {"role": "decode", "kv_transfer_tls_key": "k"}, "without kv_transfer_tls_cert"),
        (KEY | {"role": "prefill", "kv_transfer_tls_ca": "a"}, "add kv_transfer_tls_cert"),
        (KEY | {"role": "both", "kv_transfer_tls_ca": "a"}, "add kv_transfer_tls_cert"),
        (KEY | {"role": "both", "kv_transfer_tls_cert": "c"}, "add kv_transfer_tls_ca"),
        (KEY | {"kv_transfer_peer": ("a:b",)}, "HOST:PORT"),
        (KEY | {"role": "prefill", "kv_transfer_peer": ("a:1",)}, "fetches no blocks"),
    ],
)
def test_wrong_values_are_refused_with_what_is_allowed(settings: Any, words: str) -> None:
    with pytest.raises(SettingError, match=words):
        TransferConfig(**settings)


def test_an_exchange_without_prefix_caching_is_refused() -> None:
    with pytest.raises(SettingError, match="found by their prefix"):
        engine_config({**KEY, "enable_prefix_caching": False})


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("10.0.0.7:7777", ("10.0.0.7", 7777)),
        ("prefill.local", ("prefill.local", 0)),
        ("[fd00::7]:7777", ("fd00::7", 7777)),
        ("[fd00::7]", ("fd00::7", 0)),
        ("fd00::7", ("fd00::7", 0)),
        ("10.0.0.0/8", ("10.0.0.0/8", 0)),
        ("fd00::/8", ("fd00::/8", 0)),
    ],
)
def test_peers_are_hosts_with_or_without_a_port(text: str, address: tuple[str, int]) -> None:
    assert peer_address(text) == address


@pytest.mark.parametrize(
    "text", ["", ":1", "a:", "a:70000", "a:1x", "[::1", "[::1]x", "a:\u0661", "10.0.0.7/8", "a/8"]
)
def test_malformed_peers_are_refused(text: str) -> None:
    with pytest.raises(SettingError, match="HOST:PORT"):
        peer_address(text)


def test_a_key_file_must_be_secret_and_long(tmp_path: Path) -> None:
    path = tmp_path / "key"
    with pytest.raises(SettingError, match="cannot be read"):
        read_shared_key(str(path), "kv_transfer_key_file")
    path.write_text("a key of some length\n")
    path.chmod(0o640)
    with pytest.raises(SettingError, match="chmod 600"):
        read_shared_key(str(path), "kv_transfer_key_file")
    path.chmod(0o600)
    assert read_shared_key(str(path), "kv_transfer_key_file") == b"a key of some length"
    for content in ("short", "x" * 5000):
        path.write_text(content)
        with pytest.raises(SettingError, match="16 to 4096"):
            read_shared_key(str(path), "kv_transfer_key_file")
