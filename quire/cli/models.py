"""`quire models`: list cached models, packed weights and KV tiers, or remove some.

    quire models                                   # what there is, and what can be loaded
    quire models rm ORG/NAME                       # shows what would be removed, and asks
    quire models --pack-cache DIR --kv-tier-path DIR rm DIR --yes

The cache is shared with other programs that use the Hugging Face Hub.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from quire.base.errors import SettingError
from quire.base.user_path import user_path
from quire.hub.cache import cache_dir
from quire.hub.gguf_choice import size_text
from quire.hub.inventory import Entry, entries
from quire.hub.removal import freed_bytes, remove, selected


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the subcommand's arguments."""
    parser.add_argument("--json", action="store_true", help="print one JSON object, no table")
    parser.add_argument(
        "--pack-cache",
        action="append",
        default=[],
        metavar="DIR",
        help="also list packed weights of this directory (--pack-cache of quire serve); may be "
        "given repeatedly",
    )
    parser.add_argument(
        "--kv-tier-path",
        action="append",
        default=[],
        metavar="DIR",
        help="also list the KV tier of this directory; may be given repeatedly",
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", title="actions")
    removal = actions.add_parser("rm", help="remove models, packed weights or KV tiers")
    removal.set_defaults(parser=removal)
    removal.add_argument(
        "names", nargs="+", metavar="NAME", help="names as listed; ORG/NAME means all of it"
    )
    removal.add_argument("--yes", action="store_true", help="remove without asking")
    for flag in ("--pack-cache", "--kv-tier-path"):  # also after the action, as flags usually are
        removal.add_argument(
            flag,
            action="append",
            default=[],
            dest=f"rm_{flag[2:].replace('-', '_')}",
            metavar="DIR",
            help=f"as {flag} of quire models",
        )


def run(arguments: argparse.Namespace) -> int:
    """List or remove. Raises SettingError for an unknown name, or a removal not confirmed."""
    after = vars(arguments)
    packs = [*arguments.pack_cache, *after.get("rm_pack_cache", ())]
    tiers = [*arguments.kv_tier_path, *after.get("rm_kv_tier_path", ())]
    found = entries(_paths(packs, "--pack-cache"), _paths(tiers, "--kv-tier-path"))
    if arguments.action == "rm":
        return _remove(selected(found, arguments.names), is_confirmed=arguments.yes)
    if arguments.json:
        listed = [entry.record() for entry in found]
        print(json.dumps({"cache": str(cache_dir()), "entries": listed}))
        return 0
    print("\n".join(_table(found)) if found else _nothing())
    return 0


def _remove(chosen: Sequence[Entry], *, is_confirmed: bool) -> int:
    for line in _table(chosen):
        print(line)
    size = size_text(freed_bytes(chosen))
    if not is_confirmed and not _agrees(f"Remove this, {size}? [y/N] "):
        print("nothing was removed")
        return 0
    remove(chosen)
    print(f"removed, {size} freed")
    return 0


def _agrees(question: str) -> bool:
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise SettingError("nothing was removed: add --yes where no terminal can be asked")
    sys.stderr.write(question)
    sys.stderr.flush()
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _table(found: Sequence[Entry]) -> list[str]:
    rows = [(entry.name, size_text(entry.num_bytes), _verdict(entry)) for entry in found]
    name_width = max(len(row[0]) for row in rows)
    return [f"{name:<{name_width}}  {size:>9}  {verdict}" for name, size, verdict in rows]


def _verdict(entry: Entry) -> str:
    if entry.is_planned:
        return f"planned, without weights; quire pull {entry.name} downloads them"
    if entry.problem:
        return f"cannot be loaded: {entry.problem}"
    return entry.architecture or entry.kind


def _nothing() -> str:
    folder = cache_dir()
    for path in (folder, *folder.parents):
        if path.exists() and not path.is_dir():
            raise SettingError(
                f"the Hugging Face cache would be {folder}, and {path} is a file; give a directory "
                "in HF_HOME or HF_HUB_CACHE, or leave them out (~/.cache/huggingface)"
            )
    return (
        f"no models in the Hugging Face cache {folder}; quire pull ORG/NAME downloads one, "
        "and HF_HOME names another place"
    )


def _paths(folders: Sequence[str], flag: str) -> list[Path]:
    paths = [user_path(folder) for folder in folders]
    for path in paths:
        if not path.is_dir():
            found = "is not a directory" if path.exists() else "does not exist"
            raise SettingError(f"{flag} {path} {found}; give the directory that quire serve uses")
    return paths
