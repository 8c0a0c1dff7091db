"""Files and batches with the official client: a killed server continues with the same answers."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import openai

from tests.serve.running_server import RunningServer

NUM_LINES = 24
GIVE_UP_S = 120


def body_of(number: int) -> dict[str, Any]:
    said = [{"role": "user", "content": f"the sea and the stone {number}"}]
    return {"messages": said, "seed": number, "max_tokens": 40, "ignore_eos": True}


def lines() -> bytes:
    url = "/v1/chat/completions"
    entries = [
        {"custom_id": f"line-{at}", "method": "POST", "url": url, "body": body_of(at)}
        for at in range(NUM_LINES)
    ]
    entries[3]["body"] = {"messages": "none"}
    return "\n".join(map(json.dumps, entries)).encode()


def client_of(server: RunningServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def wait_for(client: openai.OpenAI, id_: str, num_done: int, status: str) -> Any:
    """Return the batch once it has so many results, or that status."""
    late_s = time.monotonic() + GIVE_UP_S
    while time.monotonic() < late_s:
        batch = client.batches.retrieve(id_)
        assert batch.request_counts is not None
        if batch.status == status or batch.request_counts.completed >= num_done:
            return batch
        time.sleep(0.02)
    raise AssertionError(batch)


def test_a_batch_continues_after_its_server_was_killed(tiny: Path, tmp_path: Path) -> None:
    flags = ("--threads", "1", "--batch-store", str(tmp_path / "batches"), "--batch-lines", "2")
    with RunningServer(tiny, *flags) as server, client_of(server) as client:
        file = client.files.create(file=("../lines.jsonl", lines()), purpose="batch")
        assert (file.filename, file.bytes) == ("lines.jsonl", len(lines()))
        assert client.files.content(file.id).read() == lines()
        batch = client.batches.create(
            input_file_id=file.id,
            endpoint="/v1/chat/completions",
            completion_window="24h",
            metadata={"name": "first"},
        )
        wait_for(client, batch.id, 3, "completed")
        server.kill()  # SIGKILL
    with RunningServer(tiny, *flags) as server, client_of(server) as client:
        kept = client.batches.retrieve(batch.id)
        assert kept.request_counts is not None
        assert kept.request_counts.completed >= 3
        done = wait_for(client, batch.id, NUM_LINES + 1, "completed")
        assert done.request_counts.to_dict() == {
            "total": NUM_LINES,
            "completed": NUM_LINES - 1,
            "failed": 1,
        }
        assert done.metadata == {"name": "first"}
        output = [
            json.loads(line) for line in client.files.content(done.output_file_id).iter_lines()
        ]
        expected = [f"line-{at}" for at in range(NUM_LINES) if at != 3]
        assert [entry["custom_id"] for entry in output] == expected
        for number in (0, 12, NUM_LINES - 1):
            _, alone = server.post("/v1/chat/completions", body_of(number))
            found = next(entry for entry in output if entry["custom_id"] == f"line-{number}")
            assert found["response"]["body"]["choices"] == alone["choices"]
        (error,) = [
            json.loads(line) for line in client.files.content(done.error_file_id).iter_lines()
        ]
        assert error["custom_id"] == "line-3"
        assert error["response"]["body"]["error"]["param"] == "messages"
        assert [entry.id for entry in client.batches.list()] == [batch.id]
        assert {entry.id for entry in client.files.list(purpose="batch_output")} == {
            done.output_file_id,
            done.error_file_id,
        }
        assert client.files.delete(file.id).deleted
        again = server.request("POST", f"/v1/batches/{batch.id}/cancel", b"")
        assert again[0] == 400
