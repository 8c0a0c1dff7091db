"""Run `quire serve` with arguments that it must reject, in its own process or inside this one."""

from __future__ import annotations

import signal
import subprocess

import pytest

from quire.base import log
from tests.serve import preloaded
from tests.unit.cli.command import quire_main


def serve(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command in its own process; its engine, if it starts one, has another."""
    return preloaded.run("serve", *arguments)


def serve_in_process(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command inside this process, where it is rejected before an engine is started."""
    on_hangup = signal.getsignal(signal.SIGHUP)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(log, "process_level", log.process_level)
            patch.setattr(log, "process_form", log.process_form)
            return quire_main("serve", *arguments)
    finally:
        signal.signal(signal.SIGHUP, on_hangup)
