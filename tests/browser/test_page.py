"""The web page in a browser: a chat with the built-in model, and the engine view under load."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.keys import Keys

from tests.browser.page import Page
from tests.serve.running_server import ROOT, RunningServer

pytestmark = pytest.mark.browser

ASSISTANT = ".message.assistant"
TEXT = f"{ASSISTANT} .text"
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Rome", "Oslo"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
# What a hostile model may say: HTML, an ANSI escape, an override of the writing direction.
HOSTILE = (
    "<img src=x onerror=\"document.title='run'\"> \x1b[31mred \u202egnp.exe "
    "[link](javascript:alert(1)) <script>document.title='run'</script>"
)


def chunk(finish: str | None = None, **delta: Any) -> dict[str, Any]:
    """A chunk of a scripted answer."""
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}


@contextmanager
def load(server: RunningServer, num_requests: int) -> Iterator[None]:
    """Requests that run until the end of the block."""
    over = threading.Event()

    def send(number: int) -> None:
        while not over.is_set():
            body = {"prompt": f"Story {number}", "max_tokens": 300, "ignore_eos": True}
            server.post("/v1/completions", body)

    threads = [threading.Thread(target=send, args=(number,)) for number in range(num_requests)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()


def test_an_answer_is_streamed_and_is_there_after_a_reload(page: Page) -> None:
    page.open()
    page.fill("#set-max_tokens", "60")
    page.throttle(4000)
    page.say("Tell me a story about a little dog.")
    page.until(lambda: page.text(TEXT), "text while the answer runs")
    assert page.one("#stop").is_displayed()
    page.throttle(-1)
    page.until_answered()
    text = page.text(TEXT)
    assert len(text) > 100
    stats = page.text(f"{ASSISTANT} .stats")
    assert "tokens" in stats
    assert "tok/s" in stats
    assert "first token" in stats
    page.open()
    page.until(lambda: page.text(TEXT) == text, "the conversation after a reload")
    assert page.text("#conversations .title") == "Tell me a story about a little dog."
    assert page.text(f"{ASSISTANT} .stats") == stats


def test_stop_keeps_what_was_generated_and_ends_the_request(
    page: Page, server: RunningServer
) -> None:
    page.open()
    page.fill("#set-extra", '{"ignore_eos": true}')
    page.fill("#set-max_tokens", "450")
    page.throttle(4000)
    page.say("Tell me a very long story.")
    page.until(lambda: len(page.text(TEXT)) > 20, "text")
    page.one("#prompt").send_keys(Keys.ESCAPE)
    page.throttle(-1)
    page.until_answered()
    assert "stopped" in page.text(f"{ASSISTANT} .stats")
    assert 20 < len(page.text(TEXT)) < 1500
    server.until(lambda: server.metric("quire_running_requests") == 0, "no request runs")


def test_regenerate_adds_an_answer_and_both_can_be_shown(page: Page) -> None:
    page.open()
    page.fill("#set-max_tokens", "30")
    page.say("Tell me a story.")
    page.until_answered()
    first = page.text(TEXT)
    page.fill("#set-seed", "77")
    page.fill("#set-temperature", "1.5")
    page.driver.find_element("xpath", "//button[.='Regenerate']").click()
    page.until(lambda: page.text(f"{ASSISTANT} .place") == "2/2", "a second answer")
    page.until_answered()
    second = page.text(TEXT)
    assert second
    assert second != first
    page.click("[aria-label='Previous answer']")
    assert page.text(TEXT) == first
    assert page.text(f"{ASSISTANT} .place") == "1/2"


def test_an_edited_message_replaces_what_follows_when_it_is_sent(page: Page) -> None:
    page.open()
    page.script_answers(chunk(content="An answer."), chunk(finish="stop"))
    for text in ("First", "Second"):
        page.say(text)
        page.until_answered()
    page.click(".message.user .actions button:last-child")
    assert len(page.all(".message.replaced")) == 4
    page.one("#prompt").send_keys(Keys.ESCAPE)
    assert page.all(".message.replaced") == []
    page.click(".message.user .actions button:last-child")
    page.say(" again")
    page.until_answered()
    assert [each.text for each in page.all(".message.user .body")] == ["First again"]
    assert len(page.all(ASSISTANT)) == 1


def test_a_conversation_that_is_deleted_while_it_runs_stays_deleted(page: Page) -> None:
    page.open()
    page.throttle(4000)
    page.say("Tell me a story.")
    page.until(lambda: page.text(TEXT), "text")
    for _ in range(2):  # the second confirms
        page.press("#conversations .delete")
    page.throttle(-1)
    page.until(lambda: page.all(".welcome"), "a new conversation")
    page.script_answers(chunk(content="Yes."), chunk(finish="stop"))
    page.say("Another")
    page.until_answered()
    assert [each.text for each in page.all("#conversations .title")] == ["Another"]
    assert (
        page.run("return Object.keys(localStorage).filter((key) => /:chat:/.test(key)).length") == 1
    )


def test_tokens_show_their_alternatives_on_hover_and_by_keyboard(page: Page) -> None:
    page.open()
    page.click("#open-settings")
    page.click("#set-logprobs")
    page.fill("#set-max_tokens", "12")
    page.say("Tell me a story.")
    page.until_answered()
    tokens = page.all(f"{ASSISTANT} .token")
    assert len(tokens) == 12
    ActionChains(page.driver).move_to_element(tokens[2]).perform()
    page.until(lambda: page.one("#tip").is_displayed(), "the tip")
    assert len(page.all("#tip tr")) >= 5
    assert "%" in page.text("#tip")
    shown = page.text("#tip")
    page.run("document.querySelector('.message.assistant .tokens').focus()")
    ActionChains(page.driver).send_keys(Keys.ARROW_RIGHT).perform()
    page.until(lambda: page.text("#tip") not in ("", shown), "the next token")
    page.driver.find_element("xpath", "//button[.='Tokens']").click()
    assert page.one(TEXT).is_displayed()


def test_log_probabilities_are_there_after_a_reload(page: Page) -> None:
    page.open()
    page.click("#open-settings")
    page.click("#set-logprobs")
    page.fill("#set-max_tokens", "6")
    page.say("Tell me a story.")
    page.until_answered()

    def tip() -> str:
        page.until(lambda: len(page.all(f"{ASSISTANT} .token")) == 6, "the tokens")
        ActionChains(page.driver).move_to_element(page.all(f"{ASSISTANT} .token")[2]).perform()
        page.until(lambda: page.one("#tip").is_displayed(), "the tip")
        return page.text("#tip")

    shown = tip()
    page.open("/docs")
    page.open()
    assert tip() == shown
    # Without room for tokens the conversation is stored without them.
    page.run(
        "const real = Storage.prototype.setItem; Storage.prototype.setItem = function (name, text) "
        "{ if (text.includes('\"tokens\"')) throw new Error('full'); real.call(this, name, text) }"
    )
    page.driver.find_element("xpath", "//button[.='Regenerate']").click()
    page.until(lambda: "2/2" in page.text(f"{ASSISTANT} .place"), "another answer")
    page.until_answered()
    page.open()
    page.until(lambda: page.text(f"{ASSISTANT} .place") == "2/2", "the conversation")
    assert page.all(f"{ASSISTANT} .token") == []


def test_a_tool_call_is_shown_and_its_result_goes_back(page: Page) -> None:
    page.open()
    page.fill("#set-tools", json.dumps([TOOL]))
    page.fill("#set-tool_choice", "required")
    page.fill("#set-max_tokens", "60")
    page.say("What is the weather?")
    page.until_answered()
    assert page.text(".call-name code") == "get_weather"
    assert json.loads(page.text(".call pre"))["city"] in ("Rome", "Oslo")
    page.fill("#set-tool_choice", "none")
    page.fill(".call textarea", '{"sky": "clear"}')
    page.click(".results")
    page.until(lambda: len(page.all(ASSISTANT)) == 2, "the next answer")
    page.until_answered()
    assert '{"sky": "clear"}' in page.text(".message.tool")
    assert page.all(".error:not([hidden])") == []


def test_reasoning_is_folded(page: Page) -> None:
    page.open()
    page.script_answers(
        chunk(reasoning_content="I *think*"), chunk(content="**Yes.**"), chunk(finish="stop")
    )
    page.say("Well?")
    page.until_answered()
    assert page.one(".reasoning").get_attribute("open") is None
    assert not page.one(".reasoning-text").is_displayed()
    page.click(".reasoning summary")
    assert page.one(".reasoning-text").text == "I think"
    assert page.one(f"{TEXT} strong").text == "Yes."


def test_hostile_output_is_text(page: Page) -> None:
    function = {"name": HOSTILE, "arguments": HOSTILE}
    page.open()
    page.script_answers(
        chunk(reasoning_content=HOSTILE),
        chunk(content=f"{HOSTILE}\n\n```html\n{HOSTILE}\n```\n\n| {HOSTILE} | b |\n|---|---|\n"),
        chunk(tool_calls=[{"index": 0, "id": "1", "function": function}]),
        chunk(finish="tool_calls"),
    )
    page.say(HOSTILE.replace("\x1b", ""))
    page.until_answered()
    page.open()
    page.until(lambda: page.all(ASSISTANT), "the conversation")
    assert page.all("main img, main script, main a") == []
    assert page.driver.title == "Quire"
    shown = page.run("return document.querySelector('main').textContent")
    assert "<img src=x" in shown
    assert "\x1b" not in shown
    assert "\u241b[31mred" in shown
    assert "\u202e" not in shown
    assert "[U+202E]gnp.exe" in shown


def test_an_error_of_the_server_is_shown_and_the_conversation_goes_on(page: Page) -> None:
    page.open()
    page.fill("#set-extra", '{"nonsense": 1}')
    page.say("Hello")
    page.until_answered()
    assert "nonsense" in page.text(".error")
    page.fill("#set-extra", "")
    page.fill("#set-max_tokens", "5")
    page.driver.find_element("xpath", "//button[.='Regenerate']").click()
    page.until(lambda: page.text(f"{ASSISTANT} .place") == "2/2", "a second answer")
    page.until_answered()
    assert page.text(TEXT)
    assert page.problems().pop().count("400")  # the browser reports the refused request


def test_the_engine_view_shows_requests_and_blocks(page: Page, server: RunningServer) -> None:
    page.open("/#engine")
    with load(server, 7):
        page.until(lambda: len(page.all("#running tbody tr")) == 4, "running requests")
        page.until(lambda: len(page.all("#waiting tbody tr")) >= 1, "waiting requests")
        page.until(lambda: "running" in page.text("#legend"), "blocks of running requests")
        page.until(lambda: page.text(".tile:first-child .value").isdigit(), "the count of running")
        page.until(lambda: re.search(r"\d m?s", page.text("#latency tbody")), "percentiles")
    label = page.one("#map").get_attribute("aria-label")
    assert label is not None
    assert "KV blocks" in label
    colours = (
        "const map = document.getElementById('map'), data = map.getContext('2d')"
        ".getImageData(0, 0, map.width, map.height).data, found = new Set();"
        "for (let at = 0; at < data.length; at += 4) found.add(data.slice(at, at + 4).join());"
        "return found.size"
    )
    assert page.run(colours) > 2
    ActionChains(page.driver).move_to_element(page.one("#map")).perform()
    page.until(lambda: "Block" in page.text("#map-tip"), "the block under the pointer")


def test_nothing_is_polled_unless_the_engine_view_is_shown(
    page: Page, server: RunningServer
) -> None:
    polls = 'quire_http_responses_total{route="/v1/engine",status="200"}'

    def num_polls() -> float:
        text = server.request("GET", "/metrics")[2].decode()
        return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(polls))

    page.open("/#engine")
    begun = num_polls()
    server.until(lambda: num_polls() > begun, "the view polls")
    page.click("#tab-chat")
    page.until(lambda: page.one("#prompt").is_displayed(), "the chat")
    page.fill("#set-max_tokens", "60")
    before = num_polls()
    page.say("Tell me a story.")
    page.until_answered()
    page.run("return new Promise((done) => setTimeout(done, 2500))")
    assert num_polls() <= before + 1  # one may have been under way


@pytest.mark.parametrize("path", ["/", "/#engine", "/docs"])
@pytest.mark.parametrize("width", [320, 390, 1280])
def test_no_width_needs_horizontal_scrolling(page: Page, path: str, width: int) -> None:
    page.resize(width, 800)
    page.open(path)
    if path == "/":
        page.script_answers(chunk(content="`" + "x" * 300 + "`\n\n```\n" + "y" * 300 + "\n```"))
        page.fill("#prompt", "z" * 300)
        page.click("#send")
        page.until(lambda: page.all(f"{TEXT} pre"), "the answer")
    if path == "/#engine":
        page.until(lambda: page.all("#latency tbody tr"), "numbers")
    sizes = "return [document.documentElement.scrollWidth, document.body.scrollWidth, innerWidth]"
    assert max(page.run(sizes)) == width
    if path == "/":
        page.click("#open-settings")
        assert page.one("#system").is_displayed()
        assert max(page.run(sizes)) == width


def test_dark_follows_the_system_and_the_switch_decides(page: Page) -> None:
    background = "return getComputedStyle(document.body).backgroundColor"
    page.prefer("light")
    page.open()
    light = page.run(background)
    page.prefer("dark")
    page.until(lambda: page.run(background) != light, "the system's dark scheme")
    dark = page.run(background)
    page.click("#theme")
    assert page.run(background) == light
    page.open()
    assert page.run(background) == light
    page.click("#theme")
    page.prefer("light")
    assert page.run(background) == dark


def test_the_page_asks_for_a_key_and_keeps_it_for_the_session(
    tools: tuple[str, str], page: Page
) -> None:
    with RunningServer(ROOT / "quire/models/box", "--api-key", "sk-one") as locked:
        page.url = locked.url
        page.open()
        page.until(lambda: page.one("#key-dialog").is_displayed(), "the dialog")
        page.one("#key-input").send_keys("sk-wrong\n")
        page.until(lambda: "not one of" in page.text("#key-why"), "the refusal")
        page.one("#key-input").send_keys("sk-one\n")
        page.until(lambda: page.text("#model") == "box", "the model's name")
        page.open("/#engine")
        page.until(lambda: page.all("#latency tbody tr"), "the engine view with the key")
        stored = page.run("return [JSON.stringify(localStorage), JSON.stringify(sessionStorage)]")
        assert "sk-one" not in stored[0]
        assert "sk-one" in stored[1]
        page.open("/docs")
        page.press("article[data-path='/v1/models'] summary")
        page.press("article[data-path='/v1/models'] .try button")
        page.until(lambda: '"id": "box"' in page.text("article .try pre"), "the answer")
    reported = page.problems()
    assert all("401" in each for each in reported), reported
    reported.clear()


def test_docs_sends_a_request(page: Page) -> None:
    page.open("/docs")
    article = "article[data-path='/v1/completions']"
    page.run("for (const each of arguments[0]) each.open = true", page.all(f"{article} > details"))
    page.press(f"{article} .try button")
    page.until(lambda: "text_completion" in page.text(f"{article} .try pre"), "the answer")
    assert page.text(f"{article} [role=status]").startswith("200")


def test_docs_shows_the_beginning_of_a_long_answer(page: Page) -> None:
    page.open("/docs")
    article = "article[data-path='/v1/models']"
    page.run(
        "window.fetch = () => Promise.resolve(new Response(JSON.stringify(['x'.repeat(500_000)]), "
        "{ headers: { 'content-type': 'application/json' } }))"
    )
    page.run("for (const each of arguments[0]) each.open = true", page.all(f"{article} > details"))
    page.press(f"{article} .try button")
    page.until(lambda: "characters" in page.text(f"{article} [role=status]"), "the answer")
    assert page.text(f"{article} [role=status]").startswith("200")
    assert page.text(f"{article} .try pre").startswith('["xxx')


def test_the_page_of_several_api_processes_shows_the_one_engine(
    tools: tuple[str, str], page: Page
) -> None:
    flags = ("--api-processes", "2", "--max-num-seqs", "4")
    with RunningServer(ROOT / "quire/models/box", *flags) as shared:
        page.url = shared.url
        page.open()
        page.fill("#set-max_tokens", "20")
        page.say("Tell me a story.")
        page.until_answered()
        assert page.text(TEXT)
        page.open("/#engine")
        with load(shared, 6):
            page.until(lambda: len(page.all("#running tbody tr")) == 4, "running requests")
        page.driver.get("about:blank")
