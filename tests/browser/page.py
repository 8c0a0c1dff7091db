"""One window of a headless Chromium, with a profile of its own."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from selenium import webdriver
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement

GIVE_UP_S = 60.0
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    "--disable-dev-shm-usage",
)


class Page:
    """The web page of a server at `url`. folder: for the profile, emptied by the caller."""

    def __init__(self, browser: str, driver: str, url: str, folder: Path) -> None:
        self.url = url
        options = Options()
        options.binary_location = browser
        for flag in (*FLAGS, f"--user-data-dir={folder / 'profile'}"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        self.driver = webdriver.Chrome(options=options, service=Service(driver))
        self._reported: list[str] = []
        self.resize(1280, 900)

    def close(self) -> None:
        """End the browser."""
        self.driver.quit()

    def resize(self, width: int, height: int) -> None:
        """Set the size of the page in CSS pixels; narrow ones are a phone's."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)

    def prefer(self, scheme: str) -> None:
        """Set the system's colour scheme, light or dark."""
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})

    def throttle(self, bytes_per_s: int) -> None:
        """Let responses arrive so slowly, so that answers last on any machine; -1 for no limit."""
        self.driver.execute_cdp_cmd("Network.enable", {})
        limits = {"offline": False, "latency": 0, "uploadThroughput": -1}
        limits["downloadThroughput"] = bytes_per_s
        self.driver.execute_cdp_cmd("Network.emulateNetworkConditions", limits)

    def open(self, path: str = "/") -> None:
        """Load a path of the server."""
        self.driver.get(self.url + path)

    def problems(self) -> list[str]:
        """Return what the browser reported since the start: errors and violations of the policy."""
        for entry in self.driver.get_log("browser"):
            if entry["level"] == "SEVERE" or "Security Policy" in entry["message"]:
                self._reported.append(entry["message"])
        return self._reported

    def one(self, selector: str) -> WebElement:
        """Return the first element of a CSS selector, once there is one."""
        self.until(lambda: self.all(selector), selector)
        return self.all(selector)[0]

    def all(self, selector: str) -> list[WebElement]:
        """Return all elements of a CSS selector."""
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def text(self, selector: str) -> str:
        """Return the text of the last element of a selector, "" for none, hidden or not."""
        script = "return [...document.querySelectorAll(arguments[0])].at(-1)?.textContent ?? ''"
        return str(self.run(script, selector))

    def run(self, script: str, *arguments: Any) -> Any:
        """Run a script in the page and return what it returns."""
        return self.driver.execute_script(script, *arguments)

    def click(self, selector: str) -> None:
        """Click the first element of a selector."""
        self.one(selector).click()

    def press(self, selector: str) -> None:
        """Click the first element of a selector from a script, wherever it is scrolled to."""
        self.run("arguments[0].click()", self.one(selector))

    def fill(self, selector: str, text: str) -> None:
        """Set the value of a field as if it had been typed."""
        script = (
            "arguments[0].value = arguments[1];"
            "arguments[0].dispatchEvent(new Event('input', { bubbles: true }))"
        )
        self.run(script, self.one(selector), text)

    def say(self, text: str) -> None:
        """Send a message, with Enter."""
        self.one("#prompt").send_keys(text + "\n")

    def until(self, condition: Callable[[], Any], what: str) -> None:
        """Wait for a condition; fails with `what` after a long time."""
        deadline = time.monotonic() + GIVE_UP_S
        while not condition():
            assert time.monotonic() < deadline, f"never happened: {what}; {self.problems()}"
            time.sleep(0.02)

    def until_answered(self) -> None:
        """Wait until no request of the shown conversation runs."""
        self.until(lambda: self.one("#send").is_displayed(), "the answer is complete")

    def script_answers(self, *chunks: dict[str, Any]) -> None:
        """Let the next requests of the chat be answered with these chunks, without the server."""
        data = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
        self.run(
            "const real = window.fetch; const data = arguments[0]; window.fetch = (url, ...rest) =>"
            " String(url).includes('chat/completions')"
            " ? Promise.resolve(new Response(data)) : real(url, ...rest)",
            data,
        )
