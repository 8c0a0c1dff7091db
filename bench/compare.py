"""Compare Quire with other engines on this machine, pair by pair in one run, into one file.

    python -m bench.compare --workloads w1,w2,w3,w4 --precision bf16 --minutes 60

Makes the checkpoint and converts it if needed; `bench/peers/setup` must have run. The file under
bench/results/ is written after each pair, and the same command continues a stopped run. Refuses to
mix states of Quire or machines in one file, to time wrong answers, and to report ratios unless
llama.cpp and OpenVINO both ran.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench.arguments import parser_of_models
from bench.checkpoints import random_checkpoint
from bench.floors import workload_work
from bench.pairs import Conditions, Floor, PairRun, WrongAnswer, take_pairs
from bench.peers.child import Peer, PeerFailed, end_cleanly_on_sigterm
from bench.peers.convert import (
    Unavailable,
    converted,
    quire_settings,
    scheme_of,
)
from bench.peers.places import REPOSITORY
from bench.peers.settings import settings_for
from bench.record import (
    FAR_BEHIND,
    FAR_BEHIND_PAIRS,
    HEADLINES,
    MIN_PAIRS,
    TOOL_SUFFIX,
    Record,
    RecordMismatch,
    Subject,
    is_settled,
    kv_dtype_of,
)
from bench.token_check import agreement, greedy_tokens
from quire.bench.floor import program_of
from quire.bench.limits import machine_limits, peak_gflops
from quire.bench.machine import machine_card
from quire.bench.reading import ReadProbe
from quire.bench.workloads import WORKLOADS
from quire.config.machine import num_usable_cores
from quire.obs.report import table

_SIDES = ("quire", "other")
PEERS = ("llama.cpp", "llama.cpp tool", "openvino", "vllm", "transformers")
RESULTS = REPOSITORY / "bench" / "results"
LOAD_LIMIT_S = 240.0


class Comparison:
    """A record, and what is needed to add to it."""

    def __init__(self, record: Record, checkpoint: Path, args: argparse.Namespace) -> None:
        self._record = record
        self._checkpoint = checkpoint
        self._args = args
        self._end_s = time.monotonic() + 60 * args.minutes
        self._log = Path(tempfile.gettempdir()) / f"quire-compare-{os.getpid()}.log"
        self._quire_tokens: list[list[int]] | None = None

    def say(self, text: str) -> None:
        """Print a line with the remaining time."""
        left = max(self._end_s - time.monotonic(), 0) / 60
        print(f"[{left:5.1f} min left] {text}", flush=True)

    def has_time(self) -> bool:
        """Return whether the time budget is not spent."""
        return time.monotonic() < self._end_s

    def run(self) -> None:
        """Run all workloads against all peers, as far as time allows. Raises WrongAnswer."""
        self.say(f"standard error of the engines: {self._log}")
        with ReadProbe(self._args.threads) as probe:
            for peer in self._args.peers:
                self._try(lambda peer=peer: self._check_tokens(peer))
            for workload in self._args.workloads:
                for peer in self._args.peers:
                    self._try(lambda w=workload, peer=peer: self._measure(w, peer, probe))

    def _try(self, work: Callable[[], bool]) -> None:
        """Retry once on failure: an engine that hung once may run."""
        for _ in range(2):
            if not self.has_time() or work():
                return

    def _check_tokens(self, peer: str) -> bool:
        """Check tokens of both engines if possible; return whether that is done."""
        engine = peer.removesuffix(TOOL_SUFFIX)
        checks = self._record.content["checks"]
        if engine in checks:
            return True
        try:
            if self._quire_tokens is None:
                self._quire_tokens = greedy_tokens("quire", self._args.threads, self._log)
            theirs = greedy_tokens(engine, self._args.threads, self._log)
        except (PeerFailed, Unavailable) as error:
            self._record.add_failure("tokens", peer, str(error))
            self.say(f"tokens of {engine}: not checked: {error}")
            return False
        checks[engine] = agreement(self._quire_tokens, theirs)
        self._record.save()
        self.say(f"tokens of {engine}: {checks[engine]}")
        return True

    def _measure(self, name: str, peer: str, probe: ReadProbe) -> bool:
        """Measure a workload; return whether the engines ran."""
        kept = self._record.kept(name, peer)
        if is_settled(kept, self._args.pairs):
            return True
        engine, precision = peer.removesuffix(TOOL_SUFFIX), self._args.precision
        if not self._record.content["checks"].get(engine, {}).get("ok"):
            self.say(f"{name} {peer}: left out, its tokens were not found to be Quire's")
            return True
        settings = settings_for(engine, precision=precision, workload=name)
        if peer.endswith(TOOL_SUFFIX):
            settings["tools_only"] = True
        ours = self._quire_settings(name)
        try:
            model = converted(engine, self._checkpoint, precision)
            with (
                Peer("quire", self._args.threads, self._log) as quire,
                Peer(engine, self._args.threads, self._log) as other,
            ):
                described = quire.load(str(self._checkpoint), ours, limit_s=LOAD_LIMIT_S)
                vocab_size = int(described.pop("vocab_size"))
                self._note("quire", name, described, ours, precision)
                described = other.load(str(model), settings, limit_s=LOAD_LIMIT_S)
                self._note(peer, name, described, settings, scheme_of(engine, precision))
                run = PairRun(
                    quire,
                    other,
                    WORKLOADS[name],
                    peer=peer,
                    vocab_size=vocab_size,
                    probe=probe,
                    conditions=Conditions(
                        max_foreign_cores=self._args.max_foreign,
                        max_stolen_cores=self._args.max_stolen,
                        limit_s=self._args.limit,
                    ),
                    floor=self._floor(name),
                )
                run.warm_up()
                take_pairs(
                    run,
                    already=kept,
                    tried=self._record.num_tried(name, peer),
                    wanted=self._args.pairs,
                    add=self._record.add_pair,
                    has_time=self.has_time,
                    say=self.say,
                    headline=HEADLINES[name],
                )
        except (PeerFailed, Unavailable) as error:
            self._record.add_failure(name, peer, str(error))
            self.say(f"{name} {peer}: {error}")
            return False
        return True

    def _quire_settings(self, workload: str) -> dict[str, Any]:
        settings = quire_settings(self._args.precision, workload)
        if self._args.quire_kv is not None:
            settings["kv_cache_dtype"] = self._args.quire_kv
        return settings

    def _note(
        self,
        peer: str,
        workload: str,
        described: dict[str, Any],
        settings: dict[str, Any],
        scheme: str,
    ) -> None:
        described.pop("pid", None)
        entry = self._record.content["engines"].setdefault(peer, {"settings": {}})
        entry |= {
            key: value for key, value in described.items() if key not in ("scheme", "kv_dtype")
        }
        entry.setdefault("kv_dtypes", {})[workload] = described["kv_dtype"]
        entry["scheme"] = scheme if peer != "quire" else str(described["scheme"])
        entry["settings"][workload] = settings

    def _floor(self, name: str) -> Floor:
        """Return the floor of the program Quire runs.

        An integer precision's peak counts for all operations, also for those of attention,
        which are not integer: the true floor is higher.
        """
        precision = self._args.precision
        program = program_of(str(self._checkpoint), self._quire_settings(name))
        limits = self._record.content.setdefault("limits", machine_limits(self._args.threads))
        return Floor(
            whole=workload_work(program, WORKLOADS[name]),
            decode=workload_work(program, WORKLOADS[name], decode_only=True),
            peak_gflops=peak_gflops(limits, precision[:4]),
        )


def quire_state() -> str:
    """Return the commit, and a digest of uncommitted differences in quire/ and native/."""

    def git(*words: str) -> str:
        done = subprocess.run(
            ["git", *words], cwd=REPOSITORY, capture_output=True, text=True, check=False
        )
        return done.stdout

    commit = git("log", "-1", "--format=%h", "--", "quire", "native").strip() or "unknown"
    changed = git("diff", "HEAD", "--", "quire", "native")
    return commit + ("+" + hashlib.sha256(changed.encode()).hexdigest()[:8] if changed else "")


def summary_text(record: Record) -> str:
    """Return a line per workload and peer."""
    headings = (
        "",
        "pairs",
        "Quire",
        "peer",
        "ratio",
        "least",
        "most",
        "floor",
        "GB/s",
        "cores",
        "KV",
    )
    rows = []
    for workload, entries in record.content["summary"].items():
        for peer, entry in entries.items():
            ratio = entry.get("ratio")
            share = entry.get("quire_floor_share")
            rows.append(
                (
                    f"{workload} {peer}",
                    str(entry["pairs"]),
                    f"{entry['quire']['median']:.1f}",
                    f"{entry['other']['median']:.1f}",
                    *(
                        ("-", "-", "-")
                        if ratio is None
                        else (f"{ratio[key]:.2f}x" for key in ("median", "least", "most"))
                    ),
                    "-" if share is None else f"{100 * share:.0f} %",
                    f"{entry['quire_read_gb_per_s']:.1f}",
                    "/".join(f"{entry.get(f'{side}_own_cores', 0):.1f}" for side in _SIDES),
                    kv_dtype_of(record.content["engines"].get(peer, {}), workload),
                )
            )
    lines = [table(headings, rows)]
    for workload in record.content["summary"]:
        if not record.is_reportable(workload):
            lines.append(
                f"{workload}: no ratios: llama.cpp and OpenVINO need {MIN_PAIRS} kept pairs each "
                f"({FAR_BEHIND_PAIRS} where all put the peer {FAR_BEHIND:g} times behind), and "
                "tokens that were checked"
            )
    return "\n".join(lines)


def _arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = parser_of_models(__doc__)
    parser.add_argument("--workloads", type=_listed(HEADLINES), default=[*HEADLINES])
    parser.add_argument("--peers", type=_listed(PEERS), default=[*PEERS])
    parser.add_argument("--pairs", type=int, default=MIN_PAIRS, help="kept pairs wanted of each")
    parser.add_argument("--minutes", type=float, default=60.0, help="time budget (default 60)")
    parser.add_argument("--limit", type=float, default=240.0, help="seconds a sample may take")
    parser.add_argument("--threads", type=int, default=num_usable_cores())
    parser.add_argument(
        "--most-foreign", type=float, default=0.12, help="cores others may use in a kept sample"
    )
    parser.add_argument(
        "--most-stolen",
        type=float,
        default=0.1,
        help="cores the hypervisor may take away in a kept sample",
    )
    parser.add_argument(
        "--quire-kv",
        choices=("bf16", "int8"),
        help="Quire's KV dtype; default: as the settings say",
    )
    parser.add_argument("--out", type=Path, help="default: bench/results/cpu-SHAPE-PRECISION.json")
    parser.add_argument("--fresh", action="store_true", help="begin the file anew")
    return parser.parse_args(words)


def _listed(known: Sequence[str] | dict[str, str]) -> Any:
    def read(text: str) -> list[str]:
        names = [name.strip() for name in text.split(",")]
        if unknown := [name for name in names if name not in known]:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: known are {', '.join(known)}")
        return names

    return read


def main(words: Sequence[str] | None = None) -> None:
    """Compare, print the table."""
    args = _arguments(words)
    end_cleanly_on_sigterm()
    kv = f"-kv-{args.quire_kv}" if args.quire_kv else ""
    path = args.out or RESULTS / f"cpu-{args.shape}-{args.precision}{kv}.json"
    if args.fresh:
        path.unlink(missing_ok=True)
    machine = machine_card()
    subject = Subject(
        shape=args.shape,
        precision=args.precision,
        threads=args.threads,
        quire=quire_state(),
        cpu=str(machine["cpu"]),
        quire_kv=args.quire_kv,
    )
    try:
        record = Record(path, subject, machine)
        Comparison(record, random_checkpoint(args.shape), args).run()
    except (RecordMismatch, WrongAnswer) as error:
        sys.exit(str(error))
    record.save()
    print(summary_text(record))


if __name__ == "__main__":
    main()
