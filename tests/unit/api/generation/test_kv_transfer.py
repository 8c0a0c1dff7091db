"""Hosts that a request may name as the engine which has its blocks."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest

from quire.api.generation.kv_transfer import PARAM, kv_transfer_of
from quire.base.errors import InvalidParameter
from quire.base.kv_transfer import TransferCard
from tests.cases import each_case

PEERS = ("prefill.local", "10.1.0.0/16", "fd00::/8", "192.168.0.7")
CARD: Any = SimpleNamespace(
    transfer=TransferCard(engine_id="e", role="decode", host="", port=0, peer_hosts=PEERS)
)


def read(host: str) -> Any:
    """Return what is fetched for a request that names a host."""
    params = {"do_remote_prefill": True, "remote_host": host, "remote_port": 7001}
    return kv_transfer_of({PARAM: {**params, "remote_request_id": "0" * 32}}, CARD)


ALLOWED = ("10.1.2.3", "fd00::7", "192.168.0.7", "prefill.local", "127.0.0.1", "localhost")
REFUSED = ("10.2.0.1", "fe80::7", "192.168.0.8", "other.local", "10.1.0.0/16", "10.1.2.3/32", "")


@each_case("host", ALLOWED)
def test_hosts_and_networks_of_the_configuration_are_connected_to(host: str) -> None:
    assert read(host).host == host


@each_case("host", REFUSED)
def test_other_hosts_are_refused_with_those_that_are_allowed(host: str) -> None:
    with pytest.raises(InvalidParameter, match=re.escape("10.1.0.0/16")):
        read(host)
