"""`quire pull ORG/NAME[:FILE.gguf]`: download a model into the local Hugging Face cache.

Prints the model's path on standard output and everything else on standard error, so that
`quire serve "$(quire pull ORG/NAME)"` works. `quire serve ORG/NAME` needs the name only.
"""

from __future__ import annotations

import argparse
import sys

from quire.base.errors import ConfigError
from quire.hub.cache import find, why_not_found
from quire.hub.names import HubName, hub_name, required_name


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the subcommand's arguments."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="ORG/NAME, or ORG/NAME:FILE.gguf for one GGUF file (also by quantization, as in "
        "ORG/NAME:Q4_K_M)",
    )
    parser.add_argument(
        "--revision",
        metavar="REVISION",
        help="branch, tag or commit (default main); afterwards it is named ORG/NAME@REVISION",
    )


def run(arguments: argparse.Namespace) -> int:
    """Download and print the path. Raises SettingError, ModelError or CapacityError."""
    name = required_name(arguments.model, arguments.revision)
    print(pull_named(name))
    return 0


def add_pull_flag(parser: argparse.ArgumentParser) -> None:
    """Add --pull to a subcommand that runs a model."""
    parser.add_argument(
        "--pull",
        action="store_true",
        help="download MODEL first if it is ORG/NAME and not in the Hugging Face cache; without "
        "it, nothing is downloaded unless a question on the terminal is answered with yes",
    )


def pull_if_asked(arguments: argparse.Namespace) -> None:
    """Download the model of a subcommand with --pull, or after a question on a terminal.

    Returns at once for a path, and for a model in the cache. Raises ConfigError otherwise.
    """
    name = hub_name(arguments.model)
    if name is None or find(name) is not None:
        return
    if not arguments.pull and not _is_wanted(name):
        raise ConfigError(f"{why_not_found(name)}, or add --pull to this command")
    pull_named(name)


def pull_named(name: HubName) -> str:
    """Download a model, with progress on standard error, and return its path."""
    from quire.cli.download_progress import DownloadProgress
    from quire.hub.pull import pull  # imports huggingface_hub

    progress = DownloadProgress(str(name))
    return str(pull(name, report=progress.line, progress=progress))


def _is_wanted(name: HubName) -> bool:
    """Ask on a terminal; False without one, so that a service never waits for an answer."""
    if sys.stdin is None or not (sys.stdin.isatty() and sys.stderr.isatty()):
        return False
    sys.stderr.write(f"{name} is not in the Hugging Face cache. Download it now? [y/N] ")
    sys.stderr.flush()
    return sys.stdin.readline().strip().lower() in ("y", "yes")
