"""Sockets bound before anything is loaded: Unix sockets, their files and their modes."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire.api.http.sockets import SocketFile, listen, listen_for_admins, url_of
from quire.base.errors import SettingError
from quire.config.server_config import ServerConfig


@pytest.fixture
def usual_umask() -> Iterator[None]:
    before = os.umask(0o002)
    yield
    os.umask(before)


def at(path: Path, *keys: str) -> socket.socket:
    return listen(ServerConfig(uds=str(path), api_key=keys))


def test_a_unix_socket_accepts_connections_and_its_file_is_removed_at_the_end(
    tmp_path: Path,
) -> None:
    path = tmp_path / "quire.sock"
    with at(path) as listening:
        file = SocketFile(listening)
        assert url_of(listening) == f"unix:{path}"
        with socket.socket(socket.AF_UNIX) as caller:
            caller.connect(str(path))
        file.remove()
        assert not path.exists()
        file.remove()


def test_the_path_of_a_dead_server_is_reused(tmp_path: Path) -> None:
    path = tmp_path / "quire.sock"
    at(path).close()
    assert path.exists()
    with at(path):
        pass


def test_one_port_for_everything_is_said_to_be_both() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    config = ServerConfig(port=port, admin_port=port)
    for_admins = listen_for_admins(config)
    assert for_admins is not None
    with for_admins, pytest.raises(SettingError) as caught:
        listen(config)
    assert f"port and admin_port are both {port}; give admin_port another" in str(caught.value)


def test_a_path_in_use_is_reported_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "quire.sock"
    with at(path), pytest.raises(SettingError, match=r"in use; .*--uds"):
        at(path)
    assert path.exists()
    plain = tmp_path / "plain"
    plain.write_text("mine")
    with pytest.raises(SettingError, match="no socket"):
        at(plain)
    assert plain.read_text() == "mine"
    link = tmp_path / "link"
    link.symlink_to(plain)
    with pytest.raises(SettingError, match="no socket"):
        at(link)


def test_the_socket_file_of_a_later_server_is_not_removed(tmp_path: Path) -> None:
    path = tmp_path / "quire.sock"
    with at(path) as first:
        file = SocketFile(first)
        path.rename(tmp_path / "moved")  # so that the second gets another inode
        with at(path):
            file.remove()
            assert path.exists()


@pytest.mark.usefixtures("usual_umask")
def test_without_a_key_only_owner_and_group_may_connect(tmp_path: Path) -> None:
    os.umask(0)
    with at(tmp_path / "open"), at(tmp_path / "keyed", "k"):
        assert stat.S_IMODE((tmp_path / "open").stat().st_mode) == 0o770
        assert stat.S_IMODE((tmp_path / "keyed").stat().st_mode) == 0o777
    os.umask(0o077)
    with at(tmp_path / "strict", "k"):
        assert stat.S_IMODE((tmp_path / "strict").stat().st_mode) == 0o700
    assert os.umask(0o077) == 0o077


@pytest.mark.parametrize("name", ["x" * 120, "no/such/folder.sock"])
def test_an_impossible_socket_path_is_reported(tmp_path: Path, name: str) -> None:
    with pytest.raises(SettingError, match="107 bytes"):
        at(tmp_path / name)


def test_the_admin_port_listens_on_loopback_whatever_the_host() -> None:
    assert listen_for_admins(ServerConfig()) is None
    listening = listen_for_admins(ServerConfig(host="0.0.0.0", insecure=True, admin_port=0))
    assert listening is not None
    with listening:
        host, port = listening.getsockname()
        assert host == "127.0.0.1"
        with pytest.raises(SettingError, match=rf"port {port} on 127.0.0.1 is in use.*admin-port"):
            listen_for_admins(ServerConfig(admin_port=port))


@pytest.mark.parametrize("settings", [{"uds": ""}, {"admin_port": 65536}, {"admin_port": -1}])
def test_invalid_paths_are_rejected(settings: dict[str, object]) -> None:
    with pytest.raises(SettingError, match=next(iter(settings))):
        ServerConfig(**settings)  # type: ignore[arg-type]
