"""TLS of transfer connections: certificates that are accepted, refusals, and cut connections."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from quire.base.errors import SettingError
from quire.base.kv_transfer import Failure
from quire.transfer.links import security as security_module
from quire.transfer.links.security import LinkSecurity, connecting_context, serving_context
from tests.certificates import authority, key_of, signed
from tests.flawed_link import cutting, flawed_link, flipping
from tests.unit.transfer.links.test_block_exchange import (
    BLOCK_BYTES,
    KEYS,
    NUM_BLOCKS,
    Pair,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return certificates: ours and theirs by one authority, stranger by another."""
    root = tmp_path_factory.mktemp("certificates")
    ours, other = authority(root, "authority"), authority(root, "other-authority")
    signed(root, "server", ours)
    signed(root, "client", ours)
    signed(root, "elsewhere", ours, host="IP:10.9.8.7")
    signed(root, "stranger", other)
    return root


def serving(folder: Path, name: str = "server", ca: str | None = None) -> LinkSecurity:
    certificate = folder / f"{name}.pem"
    authorities = None if ca is None else str(folder / f"{ca}.pem")
    context = serving_context(str(certificate), str(key_of(certificate)), authorities)
    return LinkSecurity(KEYS.links, serving=context)


def connecting(folder: Path, ca: str = "authority", name: str | None = None) -> LinkSecurity:
    certificate = None if name is None else folder / f"{name}.pem"
    context = connecting_context(
        str(folder / f"{ca}.pem"),
        None if certificate is None else str(certificate),
        None if certificate is None else str(key_of(certificate)),
    )
    return LinkSecurity(KEYS.links, connecting=context)


@contextmanager
def pair_of(server: LinkSecurity, client: LinkSecurity) -> Iterator[Pair]:
    made = Pair(security=server, own_security=client)
    try:
        made.lease()
        yield made
    finally:
        made.close()


def test_blocks_arrive_by_tls(folder: Path) -> None:
    with pair_of(serving(folder), connecting(folder)) as made:
        job = made.finished(made.start())
        assert (job.failure, job.num_landed) == (None, NUM_BLOCKS)
        made.until(lambda: not len(made.leases))


def test_blocks_arrive_by_tls_while_others_are_still_computed(folder: Path) -> None:
    made = Pair(security=serving(folder), own_security=connecting(folder))
    try:
        made.lease(num_landed=3)
        job = made.start()
        made.until(lambda: job.num_landed == 3)
        made.land(3, NUM_BLOCKS)
        assert made.finished(job).failure is None
    finally:
        made.close()


def test_both_sides_can_ask_for_certificates(folder: Path) -> None:
    with pair_of(serving(folder, ca="authority"), connecting(folder, name="client")) as made:
        assert made.finished(made.start()).failure is None
    for name in (None, "stranger"):
        with pair_of(serving(folder, ca="authority"), connecting(folder, name=name)) as made:
            job = made.finished(made.start())
            assert job.failure in (Failure.REFUSED, Failure.CUT)
            assert made.server.counts.blocks_total == 0
            made.until(lambda: any("refused" in one for one in made.reports))


@pytest.mark.parametrize(
    ("server", "ca", "words"),
    [("stranger", "authority", "not accepted"), ("elsewhere", "authority", "must name this host")],
)
def test_another_engines_certificate_is_refused(
    folder: Path, server: str, ca: str, words: str
) -> None:
    with pair_of(serving(folder, server), connecting(folder, ca)) as made:
        job = made.finished(made.start())
        assert job.failure is Failure.REFUSED
        assert words in job.detail
        assert "--kv-transfer-tls" in job.detail


def test_a_side_without_tls_is_refused_with_what_to_do(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = LinkSecurity(KEYS.links)
    with pair_of(serving(folder), plain) as made:
        job = made.finished(made.start())
        assert job.failure is Failure.CUT
        assert "--kv-transfer-tls-ca" in job.detail
        made.until(lambda: any("speaks no TLS" in one for one in made.reports))
    monkeypatch.setattr(security_module, "TLS_S", 1.0)
    with pair_of(plain, connecting(folder)) as made:
        job = made.finished(made.start())
        assert job.failure is Failure.REFUSED
        assert "--kv-transfer-tls-cert" in job.detail
        assert made.server.counts.blocks_total == 0


def test_strangers_end_no_other_transfer(folder: Path) -> None:
    with pair_of(serving(folder), connecting(folder)) as made:
        for raw in (b"", b"\x16", b"\x16\x03\x01" + b"x" * 4000, b"GET / HTTP/1.1\r\n\r\n"):
            with socket.create_connection(("127.0.0.1", made.port)) as stranger:
                stranger.sendall(raw)
        assert made.finished(made.start()).failure is None


def test_a_changed_or_cut_connection_ends_the_job(folder: Path) -> None:
    for harm in (flipping(6 * BLOCK_BYTES), cutting(6 * BLOCK_BYTES), cutting(100)):
        with pair_of(serving(folder), connecting(folder)) as made:
            with flawed_link(made.port, harm) as port:
                job = made.finished(made.start(port=port))
            assert job.failure in (Failure.REFUSED, Failure.CUT)
            assert job.num_landed < NUM_BLOCKS
            made.until(lambda: not len(made.leases) or job.num_landed == 0)  # noqa: B023


def test_closing_ends_connections_in_the_middle(folder: Path) -> None:
    made = Pair(security=serving(folder), own_security=connecting(folder))
    made.lease(num_landed=2)
    job = made.start()
    made.until(lambda: job.num_landed == 2)
    idle = socket.create_connection(("127.0.0.1", made.port))  # in the middle of its handshake
    made.close()
    idle.close()


def test_files_that_cannot_be_used_are_named(folder: Path, tmp_path: Path) -> None:
    server, key = str(folder / "server.pem"), str(folder / "server.key")
    text = tmp_path / "text"
    text.write_text("no certificate")
    for call, words in (
        (lambda: serving_context(str(tmp_path / "none"), key, None), "kv_transfer_tls_cert"),
        (lambda: serving_context(server, str(tmp_path / "none"), None), "kv_transfer_tls_key"),
        (lambda: serving_context(str(text), key, None), "PEM"),
        (lambda: serving_context(server, str(folder / "client.key"), None), "cannot be used"),
        (lambda: serving_context(server, key, str(text)), "kv_transfer_tls_ca"),
        (lambda: connecting_context(str(tmp_path / "none"), None, None), "cannot be read"),
    ):
        with pytest.raises(SettingError, match=words):
            call()
