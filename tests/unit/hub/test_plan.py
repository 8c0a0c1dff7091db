"""`quire plan ORG/NAME` looks in the local cache, as `quire serve` does."""

from __future__ import annotations

from pathlib import Path

from tests.fake_hub import FakeHub
from tests.tiny_models import write_tiny_llama
from tests.unit.cli.command import quire_main
from tests.unit.hub.test_cache import cached


def test_a_name_is_looked_up_in_the_cache(hub: FakeHub, tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    cached("some/tiny", write_tiny_llama(tmp_path / "m"))
    done = quire_main("plan", "some/tiny", "--device", "h100")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("some/tiny on NVIDIA H100")
    missing = quire_main("plan", "some/other", "--device", "h100")
    assert missing.returncode == 2
    assert "quire pull some/other" in missing.stderr
