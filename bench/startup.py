"""Start-up: process start to ready, and to the first streamed token; installed size.

For the built-in model and for a random 0.6B bf16 checkpoint in the page cache, packed at each start
and mapped from a pack cache that the first, uncounted start has filled. Beside each stands the
floor of the imports: a bare interpreter that imports what the server imports. Refuses to report if
two starts answer the same greedy request differently. Also the time of a request that wakes an
engine after a short sleep, and after a longer one, in which a process waits for the wake. Uses the
command line and HTTP only.

Run: python -m bench.startup [--starts 7] [--only-wake] [--out bench/results/startup.json]
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench.checkpoints import random_checkpoint
from bench.frontend.servers import Child
from quire.base.errors import WorkerError
from quire.bench.machine import machine_card
from quire.bench.startup import check_same, one_start, spread

PACKED = "qwen3-0.6b, packed before"
GOALS_S = {"box": 1.0, "qwen3-0.6b": 2.0, PACKED: 1.0}
SERVER_IMPORTS = (
    "numpy, msgspec, zmq, starlette.applications, uvicorn, uvloop, httptools, tokenizers, "
    "jinja2, prometheus_client"
)
ENGINE_IMPORTS = "numpy, msgspec, zmq"
# Beyond the time after which a process waits for the wake, and that of its imports.
LONG_SLEEP_S = 6.0


def import_floor_s(modules: str, times: int) -> float:
    """Return the median seconds of an interpreter that only imports `modules`."""
    seconds = []
    for _ in range(times):
        started = time.perf_counter()
        subprocess.run([sys.executable, "-c", f"import {modules}"], check=True)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def installed_size_mb(root: Path) -> float:
    """Return the megabytes of a new environment after `pip install .`, with bytecode."""
    with tempfile.TemporaryDirectory() as folder:
        environment = Path(folder) / "env"
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
        python = environment / "bin" / "python"
        target = Path(
            subprocess.run(
                [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
                check=True,
                capture_output=True,
                text=True,
            ).stdout.strip()
        )
        subprocess.run(
            [sys.executable, "-m", "pip", "--quiet", "--python", str(python), "install", str(root)],
            check=True,
        )
        subprocess.run([python, "-m", "compileall", "-q", str(target)], check=False)
        return sum(f.stat().st_size for f in target.rglob("*") if f.is_file()) / 1e6


def measure(name: str, model: list[str], starts: int) -> dict[str, object]:
    """Return medians over `starts` starts after one warm-up; exit if answers differ."""
    found = [one_start(model) for _ in range(starts + 1)]
    try:
        counted = check_same(found)[1:]
    except WorkerError as error:
        raise SystemExit(f"{name}: {error}") from error
    ready = spread([one.ready_s for one in counted])
    first = spread([one.first_token_s for one in counted])
    return {
        "model": name,
        "starts": starts,
        "ready_s": ready["median"],
        "ready_s_range": [ready["least"], ready["most"]],
        "first_token_s": first["median"],
        "first_token_s_range": [first["least"], first["most"]],
        "goal_first_token_s": GOALS_S[name],
    }


def wakes(model: list[str], times: int) -> dict[str, object]:
    """Return the times of a request of one token that wakes the engine; exit if answers differ.

    Every other sleep is a long one, so that both kinds see the machine in the same state.
    """
    body = json.dumps({"prompt": "Once upon a time", "max_tokens": 1, "temperature": 0})
    short, long, answers = list[float](), list[float](), set[str]()

    def post(port: int, path: str, content: str | None) -> bytes:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
        try:
            connection.request("POST", path, content, {"content-type": "application/json"})
            response = connection.getresponse()
            raw = response.read()
        finally:
            connection.close()
        if response.status != 200:
            raise SystemExit(f"{path} answered {response.status}: {raw[:500]!r}")
        return raw

    with Child("quire", "serve", *model, "--restart-engine", "--port", "0") as server:
        post(server.port, "/v1/completions", body)  # fills the pack cache
        for seconds in [long, *[short, long] * times]:  # the first wake is not counted
            post(server.port, "/admin/sleep", None)
            time.sleep(LONG_SLEEP_S if seconds is long else 0.0)
            started = time.perf_counter()
            answer = json.loads(post(server.port, "/v1/completions", body))
            seconds.append(time.perf_counter() - started)
            answers.add(answer["choices"][0]["text"])
    if len(answers) > 1:
        raise SystemExit(f"a woken engine answers otherwise: {answers}")
    soon, later = spread(short), spread(long[1:])
    return {
        "wakes": times,
        "first_token_s": later["median"],
        "first_token_s_range": [later["least"], later["most"]],
        "after_short_sleep_s": soon["median"],
        "after_short_sleep_s_range": [soon["least"], soon["most"]],
        "goal_first_token_s": 1.0,
    }


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__)
    parser.add_argument("--starts", type=int, default=7)
    parser.add_argument("--only-wake", action="store_true", help="keep what else the file has")
    parser.add_argument("--no-size", action="store_true", help="keep the size the file has")
    parser.add_argument("--out", type=Path, default=Path("bench/results/startup.json"))
    args = parser.parse_args()
    # What is installed has bytecode: a start without it would compile each module.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    large = str(random_checkpoint("qwen3-0.6b"))
    with tempfile.TemporaryDirectory() as packed:
        wake = wakes([large, "--pack-cache", packed], args.starts)
    if args.only_wake:
        known = json.loads(args.out.read_text()) if args.out.exists() else {}
        args.out.write_text(json.dumps({**known, "wake": wake}, indent=1) + "\n")
        print(json.dumps(wake, indent=1))
        return
    result: dict[str, object] = {"bench": "startup", "machine": machine_card(), "wake": wake}
    result["import_floor_s"] = {
        "api_process": import_floor_s(SERVER_IMPORTS, args.starts),
        "engine_process": import_floor_s(ENGINE_IMPORTS, args.starts),
    }
    with tempfile.TemporaryDirectory() as packed:
        models = [
            ("box", []),
            ("qwen3-0.6b", [large]),
            (PACKED, [large, "--pack-cache", packed]),
        ]
        result["starts"] = [measure(name, model, args.starts) for name, model in models]
    if not args.no_size:
        result["installed_mb"] = installed_size_mb(Path(__file__).parents[1])
        result["goal_installed_mb"] = 180
    elif args.out.exists():
        known = json.loads(args.out.read_text())
        result |= {name: known[name] for name in known if "installed_mb" in name}
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
