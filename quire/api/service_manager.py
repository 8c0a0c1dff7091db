"""Notify systemd (`Type=notify`) of the state of a server, by datagrams to NOTIFY_SOCKET.

READY=1 when requests are accepted, STOPPING=1 when the server drains, WATCHDOG=1 twice in each
interval that WATCHDOG_USEC sets, from the event loop: a blocked loop sends none. Does nothing if
the variables are not set. A service manager that cannot be reached never fails the server.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Mapping
from contextlib import suppress

READY = "READY=1"
STOPPING = "STOPPING=1"
_WATCHDOG = "WATCHDOG=1"


def notify(state: str, environment: Mapping[str, str] = os.environ) -> None:
    """Send one state to the service manager."""
    address = environment.get("NOTIFY_SOCKET", "")
    if not address:
        return
    if address.startswith("@"):  # a name in Linux's abstract namespace
        address = "\0" + address[1:]
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as to:
        to.setblocking(False)
        to.sendto(state.encode(), address)


async def send_watchdog(environment: Mapping[str, str] = os.environ) -> None:
    """Report that the event loop runs, until cancelled; return at once without a watchdog."""
    interval_us, pid = environment.get("WATCHDOG_USEC", ""), environment.get("WATCHDOG_PID", "")
    if not interval_us.isdigit() or not int(interval_us) or pid not in ("", str(os.getpid())):
        return
    while True:
        notify(_WATCHDOG, environment)
        await asyncio.sleep(int(interval_us) / 2e6)
