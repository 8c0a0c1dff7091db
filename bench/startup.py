"""Start-up: process start to ready, and to the first streamed token; installed size.

For the model in the box and for a 0.6B bf16 checkpoint of random weights in the page cache. Beside
each stands the floor of the imports: a bare interpreter that imports what the server imports.
Refuses to report if two starts answer the same greedy request differently. Knows the command line
and HTTP only. Run: python -m bench.startup [--starts 7] [--out bench/results/startup.json]
"""

from __future__ import annotations

import argparse
import http.client
import json
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench.checkpoints import random_checkpoint
from quire.bench.machine import machine_card

GOALS_S = {"box": 1.0, "llama-0.6b": 2.0}
SERVER_IMPORTS = (
    "numpy, msgspec, zmq, starlette.applications, uvicorn, uvloop, httptools, tokenizers, "
    "jinja2, prometheus_client"
)
ENGINE_IMPORTS = "numpy, msgspec, zmq"
GIVE_UP_S = 120.0


def free_port() -> int:
    """A port nobody listens on right now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def one_start(model: list[str]) -> tuple[float, float, str]:
    """(seconds to ready, seconds to the first streamed token, the greedy answer)."""
    port = free_port()
    command = [sys.executable, "-m", "quire", "serve", *model, "--port", str(port)]
    started = time.perf_counter()
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        ready_s = _until_ready(port, server, started)
        first_s, text = _first_token(port, started)
    finally:
        server.send_signal(signal.SIGTERM)
        if server.wait(timeout=60) != 0:
            raise SystemExit(f"the server ended with exit code {server.returncode}, not 0")
    return ready_s, first_s, text


def _until_ready(port: int, server: subprocess.Popen[bytes], started: float) -> float:
    while time.perf_counter() - started < GIVE_UP_S:
        if server.poll() is not None:
            raise SystemExit(f"the server ended with exit code {server.returncode} before ready")
        try:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
            connection.request("GET", "/health")
            if connection.getresponse().status == 200:
                return time.perf_counter() - started
        except OSError:
            pass
        time.sleep(0.002)
    raise SystemExit(f"not ready within {GIVE_UP_S:.0f} s")


def _first_token(port: int, started: float) -> tuple[float, str]:
    body = {
        "model": _model_name(port),
        "prompt": "Once upon a time",
        "max_tokens": 8,
        "temperature": 0,
        "stream": True,
    }
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=GIVE_UP_S)
    connection.request(
        "POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"}
    )
    response = connection.getresponse()
    first_s, text = 0.0, ""
    for line in response:
        if not line.startswith(b"data: {"):
            continue
        first_s = first_s or time.perf_counter() - started
        choices = json.loads(line[6:])["choices"]
        text += choices[0]["text"] if choices else ""
    if not first_s:
        raise SystemExit(f"no token came: HTTP {response.status}")
    return first_s, text


def _model_name(port: int) -> str:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    connection.request("GET", "/v1/models")
    return str(json.load(connection.getresponse())["data"][0]["id"])


def import_floor_s(modules: str, times: int) -> float:
    """Median seconds of an interpreter that only imports `modules`."""
    seconds = []
    for _ in range(times):
        started = time.perf_counter()
        subprocess.run([sys.executable, "-c", f"import {modules}"], check=True)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def installed_size_mb(root: Path) -> float:
    """Megabytes of a fresh environment's packages after `pip install .`, bytecode included."""
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
    """Medians over `starts` starts after one warm-up; exits where answers differ."""
    runs = [one_start(model) for _ in range(starts + 1)][1:]
    answers = {text for _, _, text in runs}
    if len(answers) != 1:
        raise SystemExit(f"{name}: starts answered differently: {sorted(answers)}")
    ready = sorted(run[0] for run in runs)
    first = sorted(run[1] for run in runs)
    return {
        "model": name,
        "starts": starts,
        "ready_s": statistics.median(ready),
        "ready_s_range": [ready[0], ready[-1]],
        "first_token_s": statistics.median(first),
        "first_token_s_range": [first[0], first[-1]],
        "goal_first_token_s": GOALS_S[name],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--starts", type=int, default=7)
    parser.add_argument("--no-size", action="store_true", help="skip the installed size")
    parser.add_argument("--out", type=Path, default=Path("bench/results/startup.json"))
    args = parser.parse_args()
    result: dict[str, object] = {"bench": "startup", "machine": machine_card()}
    result["import_floor_s"] = {
        "api_process": import_floor_s(SERVER_IMPORTS, args.starts),
        "engine_process": import_floor_s(ENGINE_IMPORTS, args.starts),
    }
    models = [("box", []), ("llama-0.6b", [str(random_checkpoint("llama-0.6b"))])]
    result["starts"] = [measure(name, model, args.starts) for name, model in models]
    if not args.no_size:
        result["installed_mb"] = installed_size_mb(Path(__file__).parents[1])
        result["goal_installed_mb"] = 180
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
