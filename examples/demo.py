"""Demo: start a server, stream one answer with the official client, shut down cleanly.

Runs `quire serve` on the built-in model at a free loopback port, streams one chat answer to the
terminal, prints what to try next and stops the server with SIGTERM. It uses only the command line
and HTTP, as a user would.
"""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request

from openai import OpenAI

READY_TIMEOUT_S = 60.0
PROMPT = "Tell me a story about a little dog."


def free_port() -> int:
    """Return a free port of the loopback interface."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_until_ready(url: str, server: subprocess.Popen[bytes]) -> None:
    """Poll /health until the server is ready; exit with its code if it ends first."""
    deadline = time.monotonic() + READY_TIMEOUT_S
    while time.monotonic() < deadline:
        if server.poll() is not None:
            sys.exit(f"the server ended with exit code {server.returncode} before it was ready")
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=1) as answer:
                if json.load(answer).get("state") == "ready":
                    return
        except (urllib.error.URLError, OSError):
            pass
        time.sleep(0.02)
    sys.exit(f"the server was not ready within {READY_TIMEOUT_S:.0f} s")


def stream_answer(url: str) -> None:
    """Stream one chat request: print the text as it arrives, then tokens and times."""
    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    model = client.models.list().data[0].id
    print(f"\n> {PROMPT}\n")
    started = time.monotonic()
    first_s = 0.0
    num_tokens = 0
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": PROMPT}],
        max_completion_tokens=160,
        seed=7,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in stream:
        if chunk.choices and chunk.choices[0].delta.content:
            first_s = first_s or time.monotonic() - started
            print(chunk.choices[0].delta.content, end="", flush=True)
        if chunk.usage:
            num_tokens = chunk.usage.completion_tokens
    total_s = time.monotonic() - started
    print(f"\n\n({num_tokens} tokens in {total_s:.2f} s, the first after {first_s * 1000:.0f} ms)")


def main() -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    print("[3/3] starting the server: quire serve (the built-in model)")
    command = [sys.executable, "-m", "quire", "serve", "--port", str(port)]
    # The log goes aside, so that it does not run into the story; it is shown if anything fails.
    with tempfile.TemporaryFile() as log:
        server = subprocess.Popen(command, stderr=log)
        try:
            wait_until_ready(url, server)
            stream_answer(url)
        except BaseException:
            log.seek(0)
            sys.stderr.write(log.read().decode(errors="replace"))
            raise
        finally:
            server.send_signal(signal.SIGTERM)
            code = server.wait(timeout=30)
    print(f"server stopped, exit code {code}\n")
    bin_dir = sys.executable.rsplit("/", 1)[0]
    print("The built-in model is a toy. Try next:")
    print(f"  {bin_dir}/quire chat                    talk to it")
    print(f"  {bin_dir}/quire serve /path/to/model    a Hugging Face folder, or a GGUF file")
    print(
        f"  {bin_dir}/quire program                 what the engine runs, with bytes and operations"
    )
    print("  make test                               prove it right")


if __name__ == "__main__":
    main()
