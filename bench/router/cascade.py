"""What a cascade saves at an equal score: the next word of stories, by two real models.

The task: the beginning of a story, and the word that comes next. Each model answers alone; then a
router with a cascade answers at several thresholds of the mean log-probability. Tokens are those of
prompt and output that each model took, by the router's own counters. An equal score is that of the
large model alone or more. The models are small, and so is what they know: the numbers say how well
confidence finds the answers of the small model that need no second one.
"""

from __future__ import annotations

import http.client
import json
import random
import re
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bench.data import outside
from bench.frontend.servers import Child
from bench.router.processes import Router

LARGE, SMALL = "stories260K", "llama2xs"
STORIES = "text/tinystories_1000.json"
THRESHOLDS = (-0.1, -0.2, -0.3, -0.5, -0.75, -1.0, -1.5)
MAX_TOKENS = 4
_COUNTED = re.compile(
    r'quire_router_cascade_tokens_total\{cascade="auto",model="(\w+)",use="(\w+)"\} (\S+)'
)


def tasks(count: int) -> list[tuple[str, str]]:
    """Return beginnings of stories, each with its next word."""
    drawn, found = random.Random(11), list[tuple[str, str]]()
    stories = json.loads(outside(STORIES).read_text())
    texts = [one if isinstance(one, str) else one["story"] for one in stories]
    while len(found) < count:
        words = drawn.choice(texts).split()
        at = drawn.randrange(6, 60)
        if at < len(words) and (word := _plain(words[at])):
            found.append((" ".join(words[:at]), word))
    return found


def cascade(rounds: int) -> dict[str, Any]:
    """Return scores and tokens of both models alone and of cascades. rounds: tasks."""
    asked = tasks(rounds)
    with ExitStack() as stack:
        urls = []
        for name, folder in (("large", LARGE), ("small", SMALL)):
            words = ("serve", str(outside(folder)), "--served-model-name", name)
            child = stack.enter_context(Child("quire", *words, "--port", "0", "--threads", "1"))
            urls.append(f"http://127.0.0.1:{child.port}")
        rows = {name: _row(urls, asked, name, None) for name in ("large", "small")}
        steps = {f"{threshold:g}": _row(urls, asked, "auto", threshold) for threshold in THRESHOLDS}
    alone = rows["large"]["tokens"]
    for row in steps.values():
        row["large_tokens_saved"] = 1 - row["large_tokens"] / alone
    equal = [one for one in steps.values() if one["score"] >= rows["large"]["score"]]
    best = max(equal, key=lambda row: row["large_tokens_saved"], default=None)
    return {
        "models": {"large": LARGE, "small": SMALL},
        "tasks": rounds,
        "alone": rows,
        "by_min_mean_logprob": steps,
        "large_tokens_saved_at_equal_score": best and best["large_tokens_saved"],
    }


def _row(
    urls: list[str], asked: list[tuple[str, str]], model: str, threshold: float | None
) -> dict[str, Any]:
    """Ask all tasks of one name through a router."""
    text = (
        ""
        if threshold is None
        else (
            f'[cascades.auto]\nsmall = "small"\nlarge = "large"\nmin-mean-logprob = {threshold}\n'
        )
    )
    with TemporaryDirectory() as folder:
        path = Path(folder) / "route.toml"
        path.write_text(text)
        with Router("--config", str(path), *urls, "--port", "0") as router:
            num_right = num_tokens = 0
            for prompt, word in asked:
                answer = _post(router.port, model, prompt)
                num_tokens += answer["usage"]["total_tokens"]
                said = answer["choices"][0]["text"].split()
                num_right += bool(said) and _plain(said[0]) == word
            if threshold is None:
                return {"score": num_right / len(asked), "tokens": num_tokens}
            counted = _COUNTED.findall(_get(router.port, "/metrics"))
    taken = {(which, use): float(value) for which, use, value in counted}
    return {
        "score": num_right / len(asked),
        "large_tokens": taken.get(("large", "answered"), 0.0),
        "small_tokens": taken.get(("small", "answered"), 0.0)
        + taken.get(("small", "replaced"), 0.0),
    }


def _plain(word: str) -> str:
    return re.sub(r"[^a-z']", "", word.lower())


def _post(port: int, model: str, prompt: str) -> dict[str, Any]:
    body = {"model": model, "prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        head = {"content-type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(body), head)
        response = connection.getresponse()
        raw = response.read()
        if response.status != 200:
            raise SystemExit(f"a task was refused: {raw[:500]!r}")
        answer: dict[str, Any] = json.loads(raw)
        return answer
    finally:
        connection.close()


def _get(port: int, path: str) -> str:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request("GET", path)
        return connection.getresponse().read().decode()
    finally:
        connection.close()
