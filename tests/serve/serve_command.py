"""Run `quire serve` with arguments that it must reject, in its own process or inside this one."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from quire.base import log
from tests.serve.running_server import GIVE_UP_S, ROOT
from tests.unit.cli.command import quire_main


def serve(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command in its own process."""
    command = [sys.executable, "-m", "quire", "serve", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=GIVE_UP_S)


def serve_in_process(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command inside this process, which has its modules; an engine has its own process."""
    on_hangup = signal.getsignal(signal.SIGHUP)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(log, "process_level", log.process_level)
            patch.setattr(log, "process_form", log.process_form)
            return quire_main("serve", *arguments)
    finally:
        signal.signal(signal.SIGHUP, on_hangup)
