"""What a cascade saves at an equal score: the next word of texts, by two real models.

The task: the beginning of a text, and the word that comes next. Half are stories, which the models
were trained on, and half are of an encyclopedia, of which neither knows much. Each model answers
alone; then a router with a cascade answers at several thresholds of the mean log-probability.
Tokens are those of prompt and output that each model took, by the router's own counters. An equal
score is that of the large model alone or more. The models are small, and so is what they know: the
numbers say how well confidence finds the answers of the small model that need no second one.

Beside it what needs no answer first, as for streams: a rule (prompts longer than a bound go to the
large model) and a classifier, trained on tasks of other texts, where hard means that the large
model is right and the small one is not. The classifier is also shown before the judge.
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
from quire.router.classifier_training import file_bytes, report, train
from quire.router.outcome_files import read_outcomes

LARGE, SMALL = "stories260K", "llama2xs"
STORIES = "text/tinystories_1000.json"
OTHERS = ("text/wikitext2-test.txt", "text/wikitext2-valid.txt")
THRESHOLDS = (-0.1, -0.2, -0.3, -0.5, -0.75, -1.0, -1.5)
PROMPT_TOKENS = (20, 40, 60, 80)
HARD_ABOVE = (0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2)
# Of the judge behind a rule or a classifier.
JUDGED_AT = -0.75
# Tasks to learn from for each task that is measured.
LEARNED = 5
MAX_TOKENS = 4
PATH = "/v1/completions"
_COUNTED = re.compile(
    r'quire_router_cascade_tokens_total\{cascade="auto",model="(\w+)",use="(\w+)"\} (\S+)'
)


def tasks(count: int, part: int = 0) -> list[tuple[str, str]]:
    """Return beginnings of texts, each with its next word. part: of the texts, 0 or 1."""
    drawn, found = random.Random(11 + part), list[tuple[str, str]]()
    stories = json.loads(outside(STORIES).read_text())[part::2]
    texts = [[one if isinstance(one, str) else one["story"] for one in stories]]
    lines = outside(OTHERS[part]).read_text(encoding="utf-8").splitlines()
    texts.append([one.strip() for one in lines if len(one.split()) > 60])
    while len(found) < count:
        words = drawn.choice(texts[len(found) % 2]).split()
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
        file = Path(stack.enter_context(TemporaryDirectory())) / "hard.json"
        learned = _learn(urls, tasks(LEARNED * rounds, part=1), file)
        alone = {name: _alone(urls, asked, name) for name in ("large", "small")}
        rows = {name: _summary(*one) for name, one in alone.items()}
        steps = {
            f"{threshold:g}": _row(urls, asked, f"min-mean-logprob = {threshold}\n")
            for threshold in THRESHOLDS
        }
        guessed = f'classifier = "{file}"\nhard-above = {{}}\n'
        ways = {
            "by_max_prompt_tokens": ("max-prompt-tokens = {}\nescalate = []\n", PROMPT_TOKENS),
            "by_hard_above": (f"{guessed}escalate = []\n", HARD_ABOVE),
            "by_hard_above_judged": (f"{guessed}min-mean-logprob = {JUDGED_AT}\n", HARD_ABOVE),
        }
        found: dict[str, dict[str, Any]] = {"by_min_mean_logprob": steps}
        for name, (settings, values) in ways.items():
            found[name] = {
                f"{value:g}": _row(urls, asked, settings.format(value)) for value in values
            }
    saved = {name: _saved(steps, rows["large"]) for name, steps in found.items()}
    return {
        "models": {"large": LARGE, "small": SMALL},
        "tasks": rounds,
        "learned": learned,
        "judged_at": JUDGED_AT,
        "alone": rows,
        **found,
        "large_tokens_saved_at_equal_score": saved["by_min_mean_logprob"],
        "saved_at_equal_score": saved,
    }


def _saved(steps: dict[str, Any], large: dict[str, Any]) -> float | None:
    """Add to each row what it saves; return the most that is saved at an equal score."""
    for row in steps.values():
        row["large_tokens_saved"] = 1 - row["large_tokens"] / large["tokens"]
    equal = [row["large_tokens_saved"] for row in steps.values() if row["score"] >= large["score"]]
    return max(equal, default=None)


def _learn(urls: list[str], asked: list[tuple[str, str]], file: Path) -> dict[str, Any]:
    """Train a classifier from the outcomes of tasks; return what is known of it."""
    right = {name: _alone(urls, asked, name)[0] for name in ("large", "small")}
    outcomes = file.with_name("outcomes.jsonl")
    with outcomes.open("w") as lines:
        for at, (prompt, _) in enumerate(asked):
            is_hard = right["large"][at] and not right["small"][at]
            line = {"request": _body("auto", prompt), "path": PATH, "hard": is_hard}
            lines.write(json.dumps(line) + "\n")
    examples, _ = read_outcomes([str(outcomes)])
    file.write_bytes(file_bytes(train(examples)))
    found = report(examples, small_price=0.1)
    kept = ("num_examples", "num_hard", "num_held_out", "auc", "log_loss", "base_log_loss")
    return {name: one for name, one in found._asdict().items() if name in kept}


def _alone(urls: list[str], asked: list[tuple[str, str]], model: str) -> tuple[list[bool], int]:
    """Return which tasks a model has right, and the tokens that it took."""
    with Router(*urls, "--port", "0") as router:
        answers = [_post(router.port, model, prompt) for prompt, _ in asked]
    right = [_is_right(one, word) for one, (_, word) in zip(answers, asked, strict=True)]
    return right, sum(one["usage"]["total_tokens"] for one in answers)


def _summary(right: list[bool], num_tokens: int) -> dict[str, Any]:
    return {"score": sum(right) / len(right), "tokens": num_tokens}


def _row(urls: list[str], asked: list[tuple[str, str]], settings: str) -> dict[str, Any]:
    """Ask all tasks of a cascade. settings: lines of its table."""
    text = f'[cascades.auto]\nsmall = "small"\nlarge = "large"\n{settings}'
    with TemporaryDirectory() as folder:
        path = Path(folder) / "route.toml"
        path.write_text(text)
        with Router("--config", str(path), *urls, "--port", "0") as router:
            num_right = sum(
                _is_right(_post(router.port, "auto", prompt), word) for prompt, word in asked
            )
            counted = _COUNTED.findall(_get(router.port, "/metrics"))
    taken = {(which, use): float(value) for which, use, value in counted}
    return {
        "score": num_right / len(asked),
        "large_tokens": taken.get(("large", "answered"), 0.0),
        "small_tokens": taken.get(("small", "answered"), 0.0)
        + taken.get(("small", "replaced"), 0.0),
    }


def _is_right(answer: dict[str, Any], word: str) -> bool:
    said = answer["choices"][0]["text"].split()
    return bool(said) and _plain(said[0]) == word


def _body(model: str, prompt: str) -> dict[str, Any]:
    return {"model": model, "prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0}


def _plain(word: str) -> str:
    return re.sub(r"[^a-z']", "", word.lower())


def _post(port: int, model: str, prompt: str) -> dict[str, Any]:
    body = _body(model, prompt)
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        head = {"content-type": "application/json"}
        connection.request("POST", PATH, json.dumps(body), head)
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
