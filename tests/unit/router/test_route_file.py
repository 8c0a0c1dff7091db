"""The configuration file: what is read, and that each mistake is named with its place."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.base.errors import SettingError
from quire.router.route_file import ModelTable, parse_route_file, read_route_file
from tests.cases import each_case

WHOLE = """
replicas = ["http://a:1", "http://b:2"]
policy = "least-tokens"
port = 9000
stall-seconds = 20
max-open-per-key = 4
default-model = "fast"

[models]
fast = "box"

[models.chat]
targets = [{model = "box", weight = 95}, {model = "box-2", weight = 5}]
longer = "box-long"

[cascades.auto]
small = "fast"
large = "chat"
large-patterns = ["(?i)prove"]
min-mean-logprob = -0.5

[hedging]

[summaries]
model = "fast"
max-requests = 4

[quotas]
tokens-per-minute = 1000

[tenants.acme]
key-digests = ["%s"]
tokens-per-minute = 5000
burst-tokens = 9000

[redis]
url = "redis://127.0.0.1:6379/0"
routers = 2
""" % ("0" * 64)


def test_a_whole_file_is_read() -> None:
    file = parse_route_file(WHOLE)
    assert file.replicas == ("http://a:1", "http://b:2")
    assert (file.port, file.stall_seconds, file.policy) == (9000, 20.0, "least-tokens")
    assert file.models["fast"] == "box"
    chat = file.models["chat"]
    assert isinstance(chat, ModelTable)
    assert [one.weight for one in chat.targets] == [95.0, 5.0]
    assert file.cascades["auto"].escalate == ("low-confidence", "failed-grammar", "refusal")
    assert file.hedging is not None
    assert (file.hedging.share, file.hedging.percentile) == (0.03, 95.0)
    assert file.tenants["acme"].burst_tokens == 9000
    assert file.summaries is not None
    assert (file.summaries.max_requests, file.summaries.max_tokens) == (4, 512)
    assert file.redis is not None
    assert file.redis.routers == 2
    assert parse_route_file("").quotas is None
    for target in ("ttft-ms = 1", "tpot-ms = 1"):
        tiers = parse_route_file(f"[tiers]\npreset = 'throughput-first'\n{target}").tiers
        assert tiers is not None
        assert tiers.preset == "throughput-first"


@each_case(
    ("text", "message"),
    [
        ("polcy = 'x'", "polcy is not a setting; did you mean policy?"),
        ("probe_seconds = 1", "did you mean probe-seconds?"),
        ("zzzz = 1", "there are: replicas, replicas-file"),
        (
            "[models.chat]\ntarget = []",
            "models.chat.target is not a setting; did you mean targets?",
        ),
        ("[models.chat]\ntargets = [{modle = 'a'}]", r"models.chat.targets\[0\].modle .* model\?"),
        ("[hedging]\nshar = 1", "hedging.shar is not a setting; did you mean share?"),
        ("[redis]\nurl = 1", "redis.url: expected `str`, got `int`"),
        ("port = 99999", "port: expected `int` <= 65535"),
        ("port = 'x'", "port: expected `int"),
        ("[hedging]\nshare = 0.9", "hedging.share: expected `float` <= 0.5"),
        ("[quotas]\ntokens-per-minute = 0", "tokens-per-minute: expected `int` >= 1"),
        ("[quotas]", "missing required field `tokens-per-minute`"),
        ("[models]\nfast = ''", "models.fast is empty"),
        ("[models.chat]\ntargets = [{model = 'a', weight = 0}]", "each target has weight 0"),
        ("[models.chat]\ntargets = [{model = 'a'}, {model = 'a'}]", "a target twice"),
        ("[models.chat]", "has no targets"),
        ("[models]\na = 'x'\n[cascades.a]\nsmall = 'b'\nlarge = 'c'", r"in \[models\] and in"),
        (
            "[cascades.a]\nsmall = 'b'\nlarge = 'c'\nclassifier = 'd'\nexplore = 0.1",
            "explore has no effect without outcomes.*name a file",
        ),
        (
            "[cascades.a]\nsmall = 'b'\nlarge = 'c'\noutcomes = 'd'\nexplore = 0.1",
            "explore is 0.1 .*without a classifier.*leave explore out",
        ),
        (
            "[cascades.a]\nsmall = 'b'\nlarge = 'c'\nhard-above = 0.5",
            "hard-above is 0.5 .*without a classifier.*leave hard-above out",
        ),
        ("[cascades.a]\nsmall = 'b'\nlarge = 'c'\nlarge-patterns = ['(']", "no regular expression"),
        (
            "[cascades.a]\nsmall = 'b'\nlarge = 'c'\nescalate = ['x']",
            "'x'; allowed are low-confidence, fai",
        ),
        (
            "[tiers]\npreset = 'x'",
            "invalid enum value 'x'; allowed are latency-first, throughput-fi",
        ),
        ("backlog-tokens = 'x'", "backlog-tokens: "),
        ("[tenants.a]\ntokens-per-minute = 1", "has no key-digests"),
        ("[tenants.a]\ntokens-per-minute = 1\nkey-digests = ['x']", "matching regex"),
        ("[redis]\nurl = 'redis://a'", "neither leases = true nor quotas"),
        (
            "[redis]\nurl = 'redis://a'\nleases = true\nrouters = 3",
            r"redis: routers is 3.*add \[quotas\] or \[tenants\], or leave routers out",
        ),
        (
            "[tiers]\npreset = 'latency-first'",
            "tiers: preset is 'latency-first'.*add ttft-ms or tpot-ms, or leave preset out",
        ),
        ("cors-origin = 'https://a'", "cors-origin: expected `array`"),
        (
            "[sleep]\nmax-awake = 1\n[kubernetes]\nservice = 'a'",
            r"\[sleep\] and \[kubernetes\] exclude each other",
        ),
        ("[models]\n'' = 'a'", "expected `str` of length >= 1"),
        ("backlog-tokens = 'many'", "backlog-tokens"),
        ("[kv-events]\ndata-parallel-size = 2", "put the replays at 5559 or later"),
        (
            "[kv-events]\nport = 65534\nreplay-port = 0\ndata-parallel-size = 3",
            "kv-events: the last of 3 engines .* port 65536",
        ),
        (
            "[kv-events.replicas.'http://a']\nendpoint = 'tcp://a:70'\ndata-parallel-size = 4\n"
            "replay-endpoint = 'tcp://a:72'",
            'kv-events.replicas."http://a": .* put the replays at 74',
        ),
        ("port = 1\nport = 2", "not valid TOML"),
        ("a = [" + "[" * 5000, "nested too deeply|not valid TOML"),
    ],
)
def test_mistakes_are_named_with_their_place(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "route.toml"
    path.write_text(text)
    with pytest.raises(SettingError, match=message) as raised:
        read_route_file(str(path))
    assert str(path) in str(raised.value)


def test_two_tenants_share_no_key() -> None:
    table = "tokens-per-minute = 1\nkey-digests = ['%s']\n" % ("a" * 64)
    with pytest.raises(ValueError, match="tenants one and two have a key in common"):
        parse_route_file(f"[tenants.one]\n{table}[tenants.two]\n{table}")


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    path = tmp_path / "route.toml"
    with pytest.raises(SettingError, match="No such file"):
        read_route_file(str(path))
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(SettingError, match="not UTF-8"):
        read_route_file(str(path))
    path.write_bytes(b"#" * ((1 << 20) + 1))
    with pytest.raises(SettingError, match="more than"):
        read_route_file(str(path))
