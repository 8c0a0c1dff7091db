"""The arguments of build_app: what is refused by name, and what engines and routers get."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from quire.base.errors import SettingError
from quire.deploy.ray_serve.app_args import read_args
from tests.cases import each_case
from tests.repository.source_files import ROOT


@each_case(
    ("args", "said"),
    [
        ({"modell": "a"}, "did you mean 'model'"),
        ({"scaling": {"max_replica": 2}}, "did you mean 'max_replicas'"),
        ({"scaling": {"max_replicas": 0}}, "scaling.max_replicas"),
        ({"scaling": {"min_replicas": 3, "max_replicas": 2}}, "raise max_replicas"),
        ({"scaling": {"busy_share": 1.5}}, "scaling.busy_share"),
        ({"scaling": 3}, "scaling"),
        ({"num_cpus": "two"}, "num_cpus"),
        ({"ingress": "both"}, "ingress"),
        ({"settings": {"max_num_seq": 4}}, "max_num_seqs"),
        ({"settings": {"max_num_seqs": "four"}}, "max_num_seqs"),
        ({"settings": {"port": 8000}}, "routers learn"),
        ({"settings": {"tls-cert": "x.pem"}}, "private network"),
        ({"router": {"polic": "warm-cache"}}, "did you mean policy"),
        ({"router": {"policy": "cold"}}, "--policy"),
        ({"router": {"replicas": ["http://127.0.0.1:1"]}}, "directory of replicas"),
        ({"router": {"stall-seconds": 0.1}}, "--stall-seconds"),
        ({"router": {"kv-events": {"port": 5557}}}, "router has kv-events, .* leave it out"),
    ],
)
def test_wrong_arguments_are_refused_with_their_place(args: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingError, match=said):
        read_args({"insecure": True, **args})


def test_an_application_without_keys_is_refused() -> None:
    for args in ({}, {"host": "127.0.0.1"}, {"settings": {"api_key": []}}):
        with pytest.raises(SettingError, match="no key is set"):
            read_args(args)
    for name, value in (("api_key", "a"), ("api_key_file", "keys"), ("tenants", "tenants.toml")):
        read_args({"settings": {name: value}})


def test_an_engine_gets_its_settings_and_its_address() -> None:
    args = read_args(
        {
            "insecure": True,
            "settings": {"max-num-seqs": 3, "kv_cache_memory": "8MiB", "grace_seconds": 5},
        }
    )
    server, engine = args.configs("10.0.0.7")
    assert (server.host, server.port, server.grace_s) == ("10.0.0.7", 0, 5.0)
    assert engine.scheduler.max_num_seqs == 3
    assert engine.cache.kv_cache_memory_bytes == 8 * 2**20


def test_requests_wait_for_engines_that_are_started_on_demand(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("first\nsecond\n")
    args = read_args({"settings": {"api_key_file": str(keys)}})
    assert args.router_settings().wait_s > 0
    assert args.replica_key() == "first"
    router = {"wait-seconds": 0, "resume-seconds": 7, "policy": "least-tokens"}
    args = read_args({"router": router, "insecure": True})
    settings = args.router_settings()
    assert (settings.wait_s, settings.resume_s, settings.policy) == (0.0, 7.0, "least-tokens")
    assert args.replica_key() is None
    keys.unlink()
    args = read_args({"settings": {"api_key_file": str(keys)}})  # the nodes have it, or not
    with pytest.raises(SettingError, match="cannot be read"):
        args.replica_key()


@pytest.mark.parametrize("name", ["deploy/ray/serve.yaml", "deploy/kubernetes/ray-service.yaml"])
def test_the_arguments_of_the_examples_are_accepted(name: str) -> None:
    found = yaml.safe_load((ROOT / name).read_text("utf-8"))
    if found.get("kind") == "RayService":
        found = yaml.safe_load(found["spec"]["serveConfigV2"])
    [application] = found["applications"]
    assert application["import_path"] == "quire.deploy.ray:build_app"
    read_args(application["args"])
