"""quire chat: commands, turns, stopped answers, pipes, and a real terminal."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from quire.base.errors import ContextTooLong, OverloadedError, StepRowError, WorkerError
from quire.base.sampling_params import SamplingParams
from quire.cli.chat import HELP, Conversation
from quire.engine.library.llm import LLM
from tests.tiny_models import write_tiny_llama
from tests.unit.cli.command import Terminal, quire_command


class FakeSpeaker:
    """Return the number of messages in two pieces, or raise the given error."""

    name = "fake"

    def __init__(self, error: BaseException | None = None) -> None:
        self.heard: list[list[dict[str, str]]] = []
        self.error = error

    def stream_answer(
        self, messages: Sequence[dict[str, str]], write: Callable[[str], None]
    ) -> None:
        self.heard.append([dict(message) for message in messages])
        write("I heard ")
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        write(f"{len(messages)}")

    def close(self) -> None:
        """Nothing."""


def _talk(backend: FakeSpeaker, *lines: str, system: str = "") -> tuple[str, str, Conversation]:
    out, notes = io.StringIO(), io.StringIO()
    conversation = Conversation(backend, out, notes, system=system)
    conversation.run(iter(lines))
    return out.getvalue(), notes.getvalue(), conversation


def test_each_turn_includes_all_before_it() -> None:
    backend = FakeSpeaker()
    out, notes, conversation = _talk(backend, "one", "", "  ", "two")
    assert (out, notes) == ("I heard 1\nI heard 3\n", "")
    assert [message["content"] for message in conversation.messages] == [
        "one", "I heard 1", "two", "I heard 3",
    ]  # fmt: skip


def test_reset_clears_the_conversation_and_keeps_the_system_text() -> None:
    backend = FakeSpeaker()
    _talk(backend, "one", "/reset", "two", system="Be brief.")
    assert backend.heard[1] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "two"},
    ]


def test_system_sets_and_removes_the_system_text() -> None:
    backend = FakeSpeaker()
    _, notes, _ = _talk(backend, "one", "/system Be kind.", "two", "/system", "three")
    assert [[message["role"] for message in heard] for heard in backend.heard] == [
        ["user"],
        ["system", "user"],
        ["user"],
    ]
    assert notes == "system text set\nsystem text removed\n"


def test_quit_help_and_unknown_commands() -> None:
    backend = FakeSpeaker()
    out, notes, _ = _talk(backend, "/help", "/sing", "//etc is a folder", "/quit", "not heard")
    assert notes == f"{HELP}\nno command /sing; /help lists them\n"
    assert out == "I heard 1\n"
    assert backend.heard[0][0]["content"] == "/etc is a folder"


def test_a_stopped_answer_is_kept_as_far_as_it_was_generated() -> None:
    backend = FakeSpeaker(KeyboardInterrupt())
    out, notes, conversation = _talk(backend, "one", "two")
    assert out == "I heard \nI heard 3\n"
    assert notes == " [stopped]\n"
    assert conversation.messages[1] == {"role": "assistant", "content": "I heard "}


@pytest.mark.parametrize(
    "error",
    [ContextTooLong("too long"), OverloadedError("busy"), StepRowError("its row failed")],
)
def test_an_unanswerable_turn_is_reported_and_dropped(error: Exception) -> None:
    backend = FakeSpeaker(error)
    out, notes, _ = _talk(backend, "one", "two")
    assert notes == f"{error} (/reset forgets the conversation)\n"
    assert out == "I heard \nI heard 1\n"


def test_a_broken_engine_ends_the_conversation() -> None:
    with pytest.raises(WorkerError, match="gone"):
        _talk(FakeSpeaker(WorkerError("gone")), "one", "two")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a chat template."""
    return write_tiny_llama(
        tmp_path_factory.mktemp("model") / "tiny", vocab_size=270, max_position_embeddings=16384
    )


def test_each_piped_line_is_answered(model: Path) -> None:
    words = ("chat", str(model), "--temperature", "0", "--max-tokens", "4", "--system", "Be.")
    done = quire_command(*words, given="Hi\n/reset\nHi\n")
    assert done.returncode == 0
    messages = [{"role": "system", "content": "Be."}, {"role": "user", "content": "Hi"}]
    with LLM(model) as llm:
        [answer] = llm.chat(messages, SamplingParams(temperature=0.0, max_tokens=4))
    expected = answer.text if answer.text.endswith("\n") else answer.text + "\n"
    assert done.stdout == expected * 2
    assert done.stderr == "conversation forgotten\n"


def test_a_model_without_a_template_is_rejected_with_a_remedy(tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path / "bare", vocab_size=270)
    (folder / "tokenizer_config.json").write_text('{"bos_token": null}')
    done = quire_command("chat", str(folder), given="Hi\n")
    assert done.returncode == 2
    assert "has no chat template" in done.stderr
    assert "`quire complete`" in done.stderr


def test_a_broken_template_is_reported_before_the_first_line_and_replaceable(
    tmp_path: Path,
) -> None:
    folder = write_tiny_llama(tmp_path / "broken", vocab_size=270)
    (folder / "chat_template.jinja").write_text("a\n{% if")
    done = quire_command("chat", str(folder), given="Hi\n")
    assert done.returncode == 2
    assert "chat template 'default', line 2" in done.stderr
    assert "--chat-template" in done.stderr
    own = tmp_path / "own.jinja"
    own.write_text("{{ messages[0].content }}")
    words = ("chat", str(folder), "--chat-template", str(own), "--max-tokens", "2")
    done = quire_command(*words, given="Hi\n")
    assert done.returncode == 0
    assert quire_command("complete", str(folder), "--prompt", "Hi").returncode == 0
    refused = quire_command("complete", str(folder), "--chat-template", str(own), "--prompt", "Hi")
    assert refused.returncode == 2


def test_at_a_terminal_it_prompts_streams_stops_and_leaves(model: Path) -> None:
    # Of many times what a terminal holds, so that it cannot end before Ctrl-C is pressed.
    long_answers = ("--min-tokens", "15000", "--max-tokens", "15500", "--temperature", "1")
    with Terminal(["chat", str(model), "--seed", "5", *long_answers]) as terminal:
        assert "/help lists the commands" in terminal.read_until("> ")
        terminal.type("Hello\r")
        terminal.read_until("Hello\n")
        terminal.read_more(40)  # it streams
        terminal.type("\x03")
        terminal.read_until("[stopped]")
        terminal.read_until("> ")
        terminal.type("/reset\r")
        terminal.read_until("conversation forgotten\n> ")
        terminal.type("half a line")
        terminal.read_until("half a line")  # the line reader is running already
        terminal.press_until("\x03", "/quit leaves")
        terminal.read_until("> ")
        terminal.type("\x04")
        assert terminal.end() == 0
