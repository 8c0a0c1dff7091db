"""Several --served-model-name values: any may be requested, answers carry the first."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from tests.unit.api.fake_engine import CARD, FakeEngine, Site


def test_a_model_answers_to_each_of_its_names() -> None:
    async def exchange() -> None:
        site = Site(FakeEngine(card=replace(CARD, name="first", aliases=("second", "org/third"))))
        for name in ("first", "second", "org/third", "", None):
            reply = await site.post("/v1/completions", {"prompt": "a", "model": name})
            assert (reply.status, reply.json["model"]) == (200, "first")
        reply = await site.post("/v1/completions", {"prompt": "a", "model": "fourth"})
        assert (reply.status, reply.error["code"]) == (404, "model_not_found")
        assert 'served: "first", "second", "org/third" (--served-' in reply.error["message"]
        assert reply.error["param"] == "model"
        listed = (await site.get("/v1/models")).json["data"]
        assert [model["id"] for model in listed] == ["first", "second", "org/third"]
        assert (await site.get("/v1/models/org/third")).json["id"] == "org/third"
        assert (await site.get("/v1/models/fourth")).status == 404

    asyncio.run(exchange())
