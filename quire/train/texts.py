"""Texts that a model wrote, to train its draft heads on: generated once, kept as token ids.

The first line of texts.jsonl says how the texts were made; each further one is a JSON object with
`ids`, prompt and answer, and `num_prompt_tokens`. Texts that were made otherwise are refused. A
generation that was interrupted continues after the last whole line. The answer of a line depends on
the model, the settings and the line's number only. Knows no PyTorch.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.base.errors import SettingError
from quire.base.sampling_params import SamplingParams
from quire.base.show import show
from quire.base.strict_json import parse_object
from quire.engine.library.answers import Answer
from quire.engine.library.llm import LLM
from quire.train.output_files import writing
from quire.train.precision import Precision
from quire.train.progress import Progress

MAX_LINE_BYTES = 1 << 22
# Prompts in one call, and so in one piece of the file.
_PER_CALL = 64


@dataclass(frozen=True, slots=True)
class Text:
    """Token ids of a prompt and what the model wrote after it."""

    ids: tuple[int, ...]
    num_prompt_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TextSettings:
    """What is generated: at least num_tokens tokens of answers of at most answer_tokens each, at
    the temperatures in turn, by the model in a precision. form: "text", or "chat" for prompts that
    are messages of a user, or "both" in turn. vocab_size: of the model."""

    num_tokens: int
    answer_tokens: int
    temperatures: tuple[float, ...]
    form: str
    seed: int
    max_num_seqs: int
    threads: int | None
    precision: Precision
    vocab_size: int

    def origin(self, identity: str) -> str:
        """Return the first line of a file of such texts. identity: of the model."""
        made = {
            "model": identity,
            "form": self.form,
            "answer_tokens": self.answer_tokens,
            "temperatures": list(self.temperatures),
            "seed": self.seed,
            **self.precision,
        }
        return json.dumps(made)

    def sampling(self, number: int, turn: int) -> SamplingParams:
        """Return how the answer of a line is sampled. turn: counts temperatures. Raises
        InvalidParameter."""
        return SamplingParams(
            temperature=self.temperatures[turn % len(self.temperatures)],
            top_p=1.0,
            top_k=0,
            min_p=0.0,
            max_tokens=self.answer_tokens,
            seed=self.seed + number,
        )

    def check(self) -> None:
        """Raise InvalidParameter for what no text can be sampled with."""
        for turn in range(len(self.temperatures)):
            self.sampling(0, turn)

    def is_chat(self, number: int) -> bool:
        """Return whether the prompt of a line is a message."""
        return self.form == "chat" or (self.form == "both" and number % 2 == 1)


def read_prompts(path: Path) -> list[str]:
    """Return the lines of a file that are not empty. Raises SettingError."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise SettingError(f"--prompts {path}: cannot be read: {error}") from error
    prompts = [line for line in lines if line.strip()]
    if not prompts:
        raise SettingError(f"--prompts {path}: there is no prompt in it; write one per line")
    return prompts


def generated_texts(
    model: str,
    identity: str,
    prompts: Sequence[str],
    settings: TextSettings,
    path: Path,
    progress: Progress,
) -> list[Text]:
    """Return the texts in `path`, generated as far as they are not there yet. model: where it lies;
    identity: what names it (precision.py)."""
    settings.check()
    origin = settings.origin(identity)
    texts = _read(path, origin, settings.vocab_size)
    done = sum(len(text.ids) - text.num_prompt_tokens for text in texts)
    if done >= settings.num_tokens:
        return texts
    options: dict[str, Any] = dict(settings.precision)
    if settings.threads:
        options["threads"] = settings.threads
    with LLM(model, max_num_seqs=settings.max_num_seqs, **options) as llm:
        while done < settings.num_tokens:
            numbers = range(len(texts), len(texts) + _PER_CALL)
            new = _answered(llm, prompts, settings, numbers)
            _append(path, new, "" if texts else origin + "\n")
            texts += new
            done += sum(len(text.ids) - text.num_prompt_tokens for text in new)
            progress.show("texts", min(done, settings.num_tokens), settings.num_tokens)
    return texts


def _append(path: Path, texts: Sequence[Text], origin: str) -> None:
    """Add texts to a file. origin: the settings, written with the first texts, so that a failed
    start does not fix them."""
    lines = [
        json.dumps({"ids": list(text.ids), "num_prompt_tokens": text.num_prompt_tokens}) + "\n"
        for text in texts
    ]
    with writing(path), path.open("a") as file:
        file.write(origin + "".join(lines))


def _answered(
    llm: LLM, prompts: Sequence[str], settings: TextSettings, numbers: range
) -> list[Text]:
    asked = [prompts[number % len(prompts)] for number in numbers]
    # Each prompt comes at all temperatures.
    sampling = [settings.sampling(number, number + number // len(prompts)) for number in numbers]
    chats = [number for number in numbers if settings.is_chat(number)]
    plain = [number for number in numbers if not settings.is_chat(number)]
    at = numbers.start
    answers: dict[int, Answer] = {}
    if chats:
        answers |= zip(
            chats,
            llm.chat(
                [[{"role": "user", "content": asked[number - at]}] for number in chats],
                [sampling[number - at] for number in chats],
                progress=False,
            ),
            strict=True,
        )
    if plain:
        answers |= zip(
            plain,
            llm.generate(
                [asked[number - at] for number in plain],
                [sampling[number - at] for number in plain],
                progress=False,
            ),
            strict=True,
        )
    return [
        Text((*answer.prompt_ids, *answer.outputs[0].token_ids), len(answer.prompt_ids))
        for answer in (answers[number] for number in numbers)
    ]


def _read(path: Path, origin: str, vocab_size: int) -> list[Text]:
    """Return the whole lines of a file, and cut off a last one that is not. Raises SettingError."""
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise SettingError(
            f"{path}: cannot be read: {error.strerror or error}; give another --out, or remove it "
            "to generate texts anew"
        ) from error
    end = raw.rfind(b"\n") + 1
    first, *lines = raw[:end].splitlines() or [b""]
    is_begun = not end and origin.encode().startswith(raw)  # and cut short before a text
    if first.decode(errors="replace") != origin and not is_begun:
        raise SettingError(
            f"{path} has texts that were made otherwise, or by another model "
            f"({first[:500].decode(errors='replace')}, not {origin}); give another --out, or "
            "delete the file to generate it anew"
        )
    texts = []
    for number, line in enumerate(lines, start=2):
        try:
            texts.append(_text(line, vocab_size))
        except ValueError as error:
            raise SettingError(
                f"{path}: line {number} is no text: {error}; delete that line and those after it "
                "to generate them anew, or the file"
            ) from error
    keep = end if texts else 0
    if keep < len(raw):
        with writing(path), path.open("r+b") as file:
            file.truncate(keep)
    return texts


def _text(line: bytes, vocab_size: int) -> Text:
    """Return the text of a line. Raises ValueError for a line that is none of this model."""
    values = parse_object(line, limit_bytes=MAX_LINE_BYTES)
    ids, num_prompt_tokens = values.get("ids"), values.get("num_prompt_tokens")
    if not isinstance(ids, list) or not ids:
        raise ValueError(f"ids is {show(ids)}; a list of token ids is needed")
    for id_ in ids:
        if type(id_) is not int or not 0 <= id_ < vocab_size:
            raise ValueError(
                f"ids has {show(id_)}; token ids from 0 to {vocab_size - 1} are allowed"
            )
    if type(num_prompt_tokens) is not int or not 1 <= num_prompt_tokens <= len(ids):
        raise ValueError(
            f"num_prompt_tokens is {show(num_prompt_tokens)}; a whole number from 1 to "
            f"{len(ids)}, the length of ids, is needed"
        )
    return Text(tuple(ids), num_prompt_tokens)
