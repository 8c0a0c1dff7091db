"""Templates render as in `transformers`: published ones, and synthetic counterparts.

Three ways: recorded (a digest of each rendering, if the published files are available), live
(marked `parity`), and with synthetic templates and their texts, which need nothing else.
"""

from __future__ import annotations

import functools
import json
from datetime import datetime

import pytest

from quire.base.errors import InvalidParameter, TokenizerError
from quire.text.chat_template import ChatTemplate
from tests.cases import each_case
from tests.data import outside
from tests.unit.text.template_cases import (
    NOW,
    PUBLISHED,
    RECORDED,
    TALKS,
    TOKENS,
    Refused,
    Talk,
    cases,
    digest,
    expected,
    key_of,
)
from tests.unit.text.template_twins import REFUSING, TWINS


def _now() -> datetime:
    return NOW


@functools.lru_cache(maxsize=4)
def _template(source: str) -> ChatTemplate:
    return ChatTemplate({"default": source}, variables=TOKENS, now=_now)


def _ours(source: str, talk: Talk, begun: bool | None) -> str:
    settings = {**talk.settings, **({} if begun is None else {"add_generation_prompt": begun})}
    return _template(source).render(talk.messages, **settings)


def _source(name: str) -> str:
    return outside(f"templates/{name}.jinja").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_templates_render_as_recorded(name: str) -> None:
    source = _source(name)
    recorded = json.loads(RECORDED.read_text(encoding="utf-8"))[name]
    assert len(recorded) == len(cases())
    for talk, begun in cases():
        right = recorded[key_of(talk, begun)]
        if right.startswith("refused"):
            with pytest.raises((InvalidParameter, TokenizerError)) as caught:
                _ours(source, TALKS[talk], begun)
            _, _, words = str(caught.value).partition("refuses these messages: ")
            assert right in ("refused", f"refused {digest(words)}"), talk
        else:
            assert digest(_ours(source, TALKS[talk], begun)) == right, talk


@pytest.mark.parity
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_templates_render_as_in_transformers(name: str) -> None:
    pytest.importorskip("transformers")
    _compare(_source(name))


def _compare(source: str) -> None:
    for talk, begun in cases():
        right, words = _right(source, talk, begun)
        if right is None:
            with pytest.raises((InvalidParameter, TokenizerError)) as caught:
                _ours(source, TALKS[talk], begun)
            assert words in str(caught.value), talk
        else:
            assert _ours(source, TALKS[talk], begun) == right, talk


def _right(source: str, talk: str, begun: bool | None) -> tuple[str | None, str]:
    """Return the text, or None and the message of a rejection."""
    try:
        return expected(source, talk, begun), ""
    except Refused as refusal:
        return None, refusal.words or ""


@each_case("name", TWINS)
def test_synthetic_templates_render_their_texts(name: str) -> None:
    source, text = TWINS[name]
    assert _ours(source, TALKS["two calls at once"], begun=True) == text


@each_case("name", REFUSING)
def test_synthetic_templates_reject_with_their_own_message(name: str) -> None:
    source, words = REFUSING[name]
    with pytest.raises((InvalidParameter, TokenizerError)) as caught:
        _ours(source, TALKS["system"], begun=True)
    if words is not None:
        assert f"refuses these messages: {words}" in str(caught.value)
    else:
        assert "'default', line 1" in str(caught.value)


@pytest.mark.parity
@pytest.mark.parametrize("name", [*TWINS, *REFUSING])
def test_synthetic_templates_render_as_in_transformers(name: str) -> None:
    pytest.importorskip("transformers")
    _compare(TWINS[name][0] if name in TWINS else REFUSING[name][0])


def test_continuing_ends_with_the_last_words() -> None:
    for twin, spaces in (
        ("all that is given", "\n Once upon \n"),
        ("space taken off", "Once upon"),
    ):
        source = TWINS[twin][0]
        text = _ours(source, TALKS["to be continued after spaces"], begun=None)
        assert text.endswith(f"<assistant>{spaces}")
        text = _ours(source, TALKS["to be continued"], begun=None)
        assert text.endswith(f"<assistant>{'Once upon ' if spaces[0] != 'O' else 'Once upon'}")
    with pytest.raises(InvalidParameter, match="cannot be cut"):
        _ours(TWINS["today"][0], TALKS["to be continued"], begun=None)
    with pytest.raises(InvalidParameter, match="no text to continue"):
        _ours(TWINS["today"][0], TALKS["nothing to be continued"], begun=None)
    with pytest.raises(InvalidParameter, match="both true"):
        _ours(TWINS["today"][0], TALKS["to be continued"], begun=True)
