"""EngineProcess: starts the engine's process, before anything heavy is imported here.

    process = EngineProcess.launch(config)      # a few milliseconds; its imports overlap with ours
    client = EngineClient.attach(process)

Imports the standard library and the config records only. The engine gets its config as one line
of JSON on its standard input, which then stays open: its end signals that the client is gone.
A fresh interpreter, never a fork, that imports nothing from the current folder. A second line lets
it load the model; a spare process waits for that with its modules imported. The sockets lie in a
folder that only this user can enter. Why the engine failed comes back through a pipe as well:
unlike a message on a socket it can be read once the process has ended, however late that is.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import threading
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, get_type_hints

from quire.base.child_process import command_of, environment_of_ours
from quire.base.errors import SettingError
from quire.base.log_process import LogSettings
from quire.config.groups import EngineConfig
from quire.config.process_limits import check_open_files
from quire.engine.client.socket_directory import SocketDirectory

# The failure report must fit the pipe, which is read only once the process has ended.
MAX_FAILURE_BYTES = 32 * 1024


class EngineProcess:
    """A running engine process and the directory of its sockets.

    client: this process's number among its clients. is_ours: this process ends it. cpus: it runs
    on these processors; on all for none."""

    client = 0
    cpus: tuple[int, ...] = ()
    is_ours = True

    def __init__(
        self, popen: subprocess.Popen[bytes], sockets: SocketDirectory, failure_fd: int
    ) -> None:
        self._popen = popen
        self._sockets = sockets
        self._failure_fd: int | None = failure_fd
        self._failure = b""

    @property
    def folder(self) -> Path:
        """The directory of its sockets."""
        return self._sockets.path

    @classmethod
    def launch(
        cls, config: EngineConfig, logging: LogSettings | None = None, *, is_spare: bool = False
    ) -> EngineProcess:
        """Start the process; does not wait for it. Raises SettingError where it cannot start.

        is_spare: it imports its modules and loads no model before `begin`.
        """
        check_open_files()
        logging = logging or LogSettings()
        sockets = SocketDirectory()
        command = [*command_of("quire.engine.process.main"), "--endpoint", str(sockets.path)]
        command += ["--starter", str(os.getpid())]
        command += ["--log-level", logging.level, "--log-format", logging.form]
        env = environment_of_ours()
        failure_fd: int | None = None
        try:
            failure_fd, child_fd = os.pipe()
            try:
                popen = subprocess.Popen(
                    [*command, "--failure-fd", str(child_fd)],
                    stdin=subprocess.PIPE,
                    bufsize=0,
                    env=env,
                    pass_fds=[child_fd],
                )
            finally:
                os.close(child_fd)
        except OSError as error:
            if failure_fd is not None:
                os.close(failure_fd)
            sockets.remove()
            raise SettingError(f"the engine process cannot be started: {error}") from error
        os.set_blocking(failure_fd, False)
        process = cls(popen, sockets, failure_fd)
        assert popen.stdin is not None, "Popen was asked for a pipe"
        with contextlib.suppress(OSError):  # it has already exited; `wait` reports how
            popen.stdin.write(config_to_json(config).encode() + b"\n")
        if not is_spare:
            process.begin()
        return process

    def begin(self) -> None:
        """Let the process load its model."""
        assert self._popen.stdin is not None, "Popen was asked for a pipe"
        with contextlib.suppress(OSError):  # as above
            self._popen.stdin.write(b"\n")

    @property
    def can_begin(self) -> bool:
        """Whether a spare process still runs and has its directory."""
        return self.wait(0.0) is None and self._sockets.is_there

    @property
    def process_id(self) -> int:
        """The operating system's number."""
        return self._popen.pid

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Return the exit code (negative: the signal that ended it); None where it still runs."""
        try:
            return self._popen.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def failure(self) -> bytes:
        """Return the failure report the process left: one frame, empty if it did not fail."""
        if self._failure_fd is not None:
            with contextlib.suppress(BlockingIOError):  # still running, and nothing is written
                self._failure += os.read(self._failure_fd, MAX_FAILURE_BYTES)
        return self._failure

    def kill(self) -> None:
        """End the process at once; `wait` reports it."""
        self._popen.kill()

    def end(self, timeout_s: float) -> None:
        """Close its input, give it `timeout_s` to exit, then kill it; remove the directory."""
        if self._popen.stdin is not None:
            with contextlib.suppress(OSError):  # it is gone, and did not read its config
                self._popen.stdin.close()
        if self.wait(timeout_s) is None:
            self._popen.kill()
            self._popen.wait()
        if self._failure_fd is not None:
            os.close(self._failure_fd)
            self._failure_fd = None
        self._sockets.remove()


class SharedEngine:
    """An engine process that the parent started for several of its processes.

    It has the same interface as EngineProcess, but it outlives this process. The parent reports
    its end by calling `ended`.
    """

    is_ours = False

    def __init__(self, folder: Path, client: int) -> None:
        self.folder = folder
        self.client = client
        self._exit_code: int | None = None
        self._failure = b""
        self._has_ended = threading.Event()

    def ended(self, exit_code: int, failure: bytes = b"") -> None:
        """Record the engine's end, with its failure report, and wake all waiting threads."""
        self._exit_code, self._failure = exit_code, failure
        self._has_ended.set()

    def failure(self) -> bytes:
        """Return the failure report the process left: one frame, empty if it did not fail."""
        return self._failure

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Return the exit code (negative: the signal that ended it); None where it still runs."""
        self._has_ended.wait(timeout_s)
        return self._exit_code

    def end(self, timeout_s: float) -> None:
        """Leave it as it is."""


def config_to_json(config: EngineConfig) -> str:
    """Return the config as one line."""
    return json.dumps(asdict(config))


def config_from_json(text: str) -> EngineConfig:
    """Return the config of a line made by config_to_json; each group checks its values again."""
    groups: dict[str, Any] = json.loads(text)
    hints = get_type_hints(EngineConfig)
    return EngineConfig(
        **{part.name: hints[part.name](**groups[part.name]) for part in fields(EngineConfig)}
    )
