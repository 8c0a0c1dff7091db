"""Arguments of subcommands that are clients of a running server.

Imports nothing of the engine, so that such a subcommand starts fast. An address has no argument
here: it is a word for some subcommands and a flag for others.
"""

from __future__ import annotations

import argparse
import os

from quire.base.server_url import KEY_DEFAULT, default_key


def add_key_argument(parser: argparse.ArgumentParser, what: str) -> None:
    """Add --api-key, with the key of the environment as its default. what: the key it is."""
    parser.add_argument(
        "--api-key",
        default=default_key(os.environ),
        metavar="KEY",
        help=f"{what} ({KEY_DEFAULT})",
    )
