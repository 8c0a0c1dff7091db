"""deploy/kubernetes and the chart: strictly valid, and true to the flags and metrics they name.

With the extra `manifests` (`make manifests`) Kubernetes' own schemas are checked, and Helm's own
engine renders the chart; no cluster is needed.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from functools import cache
from typing import Any

import jsonschema
import pytest
import yaml

from quire.cli import route, serve
from quire.deploy.ray_serve.app_args import read_args
from quire.engine.model_card import EngineState
from quire.router.route_file import parse_route_file
from tests.data import outside
from tests.repository.kubernetes_schemas import problems_of
from tests.repository.promql import check
from tests.repository.source_files import ROOT
from tests.repository.test_deploy import exported

MANIFESTS = ROOT / "deploy" / "kubernetes"
CHART = ROOT / "deploy" / "helm" / "quire"
FILES = sorted(path.name for path in MANIFESTS.glob("*.yaml"))
_DEFINITIONS = {
    "InferencePool": "inferencepools.yaml",
    "LeaderWorkerSet": "leaderworkersets.yaml",
    "RayService": "rayservices.yaml",
    "ScaledObject": "scaledobjects.yaml",
}


@cache
def resources() -> tuple[dict[str, Any], ...]:
    return tuple(
        one for name in FILES for one in yaml.safe_load_all((MANIFESTS / name).read_text("utf-8"))
    )


def definition_of(kind: str) -> dict[str, Any]:
    """Return a CustomResourceDefinition; they are long, so by the C parser where it is built."""
    text = (outside("crds") / _DEFINITIONS[kind]).read_text("utf-8")
    loaded: dict[str, Any] = yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    return loaded


def of_kind(kind: str) -> list[dict[str, Any]]:
    return [one for one in resources() if one["kind"] == kind]


def pods() -> list[dict[str, Any]]:
    """Return all pod templates."""
    found = [one["spec"]["template"] for one in of_kind("Deployment")]
    for one in of_kind("LeaderWorkerSet"):
        group = one["spec"]["leaderWorkerTemplate"]
        found += [group["leaderTemplate"], group["workerTemplate"]]
    return found


def containers() -> list[dict[str, Any]]:
    return [
        container
        for pod in pods()
        for container in (*pod["spec"].get("initContainers", ()), *pod["spec"]["containers"])
    ]


def flags_of(module: Any) -> set[str]:
    parser = argparse.ArgumentParser()
    module.add_arguments(parser)
    return set(parser._option_string_actions)


@pytest.mark.parametrize("name", FILES)
def test_manifests_pass_the_strict_schemas_of_kubernetes(name: str) -> None:
    validate = pytest.importorskip("kubernetes_validate")
    for resource in yaml.safe_load_all((MANIFESTS / name).read_text("utf-8")):
        if resource["kind"] not in _DEFINITIONS:
            validate.validate(resource, validate.latest_version(), strict=True)


@pytest.mark.parametrize("kind", _DEFINITIONS)
def test_custom_resources_pass_their_definitions(kind: str) -> None:
    definition = definition_of(kind)
    found = of_kind(kind)
    assert found
    for resource in found:
        assert problems_of(resource, definition) == []
        misspelt = {**resource, "spec": {**resource["spec"], "replicasCount": 3}}
        assert any("replicasCount" in one for one in problems_of(misspelt, definition))


def test_unknown_keys_of_a_custom_resource_are_found() -> None:
    """The self-made case: a definition of our own."""
    schema = {
        "type": "object",
        "properties": {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            "metadata": {"type": "object"},
            "spec": {
                "type": "object",
                "required": ["size"],
                "properties": {
                    "size": {"type": "integer", "minimum": 1},
                    "port": {"x-kubernetes-int-or-string": True, "anyOf": []},
                    "labels": {"type": "object", "additionalProperties": {"type": "string"}},
                    "free": {"type": "object", "x-kubernetes-preserve-unknown-fields": True},
                    "rules": {
                        "type": "array",
                        "items": {"type": "object", "properties": {"name": {"type": "string"}}},
                    },
                },
            },
        },
    }
    definition = {
        "spec": {
            "group": "example.org",
            "names": {"kind": "Group"},
            "versions": [
                {"name": "v1", "served": True, "schema": {"openAPIV3Schema": schema}},
            ],
        }
    }
    spec: dict[str, Any] = {
        "size": 3,
        "port": "http",
        "labels": {"any": "label"},
        "free": {"any": 1},
        "rules": [{"name": "a"}],
    }
    resource = {"apiVersion": "example.org/v1", "kind": "Group", "metadata": {"name": "a"}}
    assert problems_of({**resource, "spec": spec}, definition) == []
    for wrong in (
        {**spec, "sise": 3},
        {**spec, "size": 0},
        {**spec, "port": []},
        {**spec, "labels": {"a": 1}},
        {**spec, "rules": [{"nam": "a"}]},
        {"port": 1},
    ):
        assert problems_of({**resource, "spec": wrong}, definition)
    assert problems_of({**resource, "spec": spec, "status": {}}, definition)
    assert problems_of({**resource, "kind": "Other", "spec": spec}, definition)


def test_settings_and_arguments_are_those_of_the_commands() -> None:
    variables = {
        f"QUIRE_{flag.removeprefix('--').replace('-', '_').upper()}"
        for flag in flags_of(serve)
        if flag.startswith("--")
    }
    for container in containers():
        for entry in container.get("env", ()):
            if entry["name"].startswith("QUIRE_"):
                assert entry["name"] in variables, entry
        command, *words = container["args"]
        known = {"serve": flags_of(serve), "route": flags_of(route), "pull": set()}[command]
        for word in words:
            if word.startswith("-"):
                assert word.partition("=")[0] in known, word
    text = "".join((CHART / "templates" / "_helpers.tpl").read_text("utf-8"))
    for name in re.findall(r"QUIRE_[A-Z_]+[A-Z]", text):
        assert name in variables


def test_pods_run_without_rights_and_drain_in_time() -> None:
    check_pods(pods())


def check_pods(pods: Sequence[dict[str, Any]]) -> None:
    """Check the rights of pods, and that they have the time to drain."""
    assert pods
    for pod in pods:
        spec = pod["spec"]
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["automountServiceAccountToken"] is ("serviceAccountName" in spec)
        volumes = {volume["name"] for volume in spec["volumes"]}
        for container in (*spec.get("initContainers", ()), *spec["containers"]):
            security = container["securityContext"]
            assert security["readOnlyRootFilesystem"] is True
            assert security["allowPrivilegeEscalation"] is False
            assert security["capabilities"] == {"drop": ["ALL"]}
            assert {mount["name"] for mount in container["volumeMounts"]} == volumes & {
                mount["name"] for mount in container["volumeMounts"]
            }
            assert "memory" in container["resources"]["limits"]
        [container] = spec["containers"]
        waits_s = container["lifecycle"]["preStop"]["sleep"]["seconds"]
        env = {entry["name"]: entry.get("value") for entry in container.get("env", ())}
        flags = dict(word.split("=", 1) for word in container["args"] if word.startswith("--"))
        grace_s = int(env.get("QUIRE_GRACE_SECONDS") or flags["--grace-seconds"])
        # Some seconds for the last events (SUPERVISOR: 10) beyond the grace time.
        assert spec["terminationGracePeriodSeconds"] >= waits_s + grace_s + 10


def test_probes_judge_progress() -> None:
    for pod in pods():
        [container] = pod["spec"]["containers"]
        if "serviceAccountName" not in pod["spec"]:
            assert container["readinessProbe"]["httpGet"] == {"path": "/health", "port": "http"}
        if container["args"][0] == "serve":
            assert container["startupProbe"]["httpGet"]["path"] == "/health"
            [_, _, script] = container["livenessProbe"]["exec"]["command"]
            _check_liveness(script)
    chart = (CHART / "templates" / "_helpers.tpl").read_text("utf-8")
    [script] = re.findall(r"- '(import http\.client.*)'", chart)
    _check_liveness(script)


def _check_liveness(script: str) -> None:
    """Run the condition of a liveness probe on all states."""
    condition = re.search(r"sys\.exit\((.*)\)$", script)
    assert condition is not None
    compile(script, "probe", "exec")
    for state in EngineState.__args__:  # type: ignore[attr-defined]
        for ok in (False, True):
            fails = eval(condition[1], {"h": {"state": state, "ok": ok}})
            assert fails == (state == "dead" or (state == "ready" and not ok)), state


def test_names_and_selectors_fit_together() -> None:
    names = {one["metadata"]["name"] for one in resources()}
    assert "quire" not in names  # its variables would look like settings
    templates = [pod["metadata"]["labels"].items() for pod in pods()]
    for one in (*of_kind("Service"), *of_kind("PodDisruptionBudget"), *of_kind("InferencePool")):
        selector = one["spec"]["selector"]
        labels = selector.get("matchLabels", selector).items()
        assert sum(labels <= template for template in templates) == 1, one["metadata"]["name"]
    secrets = {one["metadata"]["name"] for one in of_kind("Secret")}
    for container in containers():
        for entry in container.get("env", ()):
            if "valueFrom" in entry and "secretKeyRef" in entry["valueFrom"]:
                assert entry["valueFrom"]["secretKeyRef"]["name"] in secrets
    for one in (*of_kind("HorizontalPodAutoscaler"), *of_kind("ScaledObject")):
        target = one["spec"]["scaleTargetRef"]
        assert target["name"] in {dep["metadata"]["name"] for dep in of_kind("Deployment")}


def test_a_router_may_read_what_it_asks_for_and_follows_a_service_that_there_is() -> None:
    check_router(resources())


def check_router(objects: Sequence[dict[str, Any]]) -> None:
    """Check that a router's account, rights, settings and Service fit together."""

    def of_kind(kind: str) -> list[dict[str, Any]]:
        return [one for one in objects if one["kind"] == kind]

    [account], [role], [binding] = (
        of_kind(kind) for kind in ("ServiceAccount", "Role", "RoleBinding")
    )
    assert role["rules"] == [
        {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"]}
        | {"verbs": ["list", "watch"]}
    ]
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    [subject] = binding["subjects"]
    assert subject == {"kind": "ServiceAccount", "name": account["metadata"]["name"]}
    pods = [one["spec"]["template"]["spec"] for one in of_kind("Deployment")]
    [pod] = [pod for pod in pods if "serviceAccountName" in pod]
    assert pod["serviceAccountName"] == account["metadata"]["name"]
    # Without replicas it stays in its Service, and requests wait: its /health is 503 then.
    probe = pod["containers"][0]["readinessProbe"]
    assert probe["httpGet"] == {"path": "/metrics", "port": "http"}
    [settings] = of_kind("ConfigMap")
    volumes = [volume.get("configMap", {}).get("name") for volume in pod["volumes"]]
    assert settings["metadata"]["name"] in volumes
    [[name, text]] = settings["data"].items()
    assert f"--config=/etc/quire/{name}" in pod["containers"][0]["args"]
    table = parse_route_file(text).kubernetes
    assert table is not None
    [service] = [one for one in of_kind("Service") if one["metadata"]["name"] == table.service]
    assert table.port in [port["name"] for port in service["spec"]["ports"]]


def test_scaling_reads_exported_metrics() -> None:
    for one in of_kind("ScaledObject"):
        for trigger in one["spec"]["triggers"]:
            assert check(trigger["metadata"]["query"], exported())
    for one in of_kind("HorizontalPodAutoscaler"):
        for metric in one["spec"]["metrics"]:
            assert metric["pods"]["metric"]["name"] in exported()


def test_ray_pods_have_the_variables_and_the_rights_that_the_page_says() -> None:
    [service] = of_kind("RayService")
    cluster = service["spec"]["rayClusterConfig"]
    assert cluster["authOptions"] == {"mode": "token"}
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    config = yaml.safe_load(service["spec"]["serveConfigV2"])
    [application] = config["applications"]
    grace_s = application["args"]["settings"]["grace_seconds"]
    for group in groups:
        spec = group["template"]["spec"]
        assert spec["securityContext"]["runAsNonRoot"] is True
        [container] = spec["containers"]
        env = {entry["name"]: entry["value"] for entry in container["env"]}
        assert env["RAY_SERVE_ENABLE_HA_PROXY"] == "1"
        assert env["RAY_USAGE_STATS_ENABLED"] == "0"
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert "memory" in container["resources"]["limits"]
        assert {mount["name"] for mount in container["volumeMounts"]} == {
            volume["name"] for volume in spec["volumes"]
        }
        if group is not cluster["headGroupSpec"]:
            assert spec["terminationGracePeriodSeconds"] >= grace_s + 15


# ---- the chart


def values() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text("utf-8"))
    return found


def test_values_pass_their_schema_and_unknown_ones_do_not() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text("utf-8"))
    jsonschema.Draft7Validator.check_schema(schema)
    jsonschema.validate(values(), schema)
    for wrong in (
        {"replica": 1},
        {"name": "quire"},
        {"replicas": "3"},
        {"settings": {"API_KEY": "secret"}},
        {"autoscaling": {"kind": "both"}},
    ):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({**values(), **wrong}, schema)


def test_templates_read_defined_values_and_are_balanced() -> None:
    for file in (CHART / "templates").iterdir():
        text = file.read_text("utf-8")
        assert text.count("{{") == text.count("}}")
        opened = len(re.findall(r"{{-? (?:if|range|with|define)\b", text))
        assert opened == len(re.findall(r"{{-? end\b", text)), file.name
        for path in re.findall(r"\.Values((?:\.\w+)+)", text):
            at: Any = values()
            for name in path.strip(".").split("."):
                assert name in at, f"{file.name}: .Values{path}"
                at = at[name]


def rendered(sets: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the objects that Helm's own engine renders with these values, without a cluster."""
    helm = pytest.importorskip("helm_python")
    with helm.Chart.load(str(CHART)) as chart:
        files: dict[str, str] = chart.render(sets, name="llm", namespace="default")
    return [one for text in files.values() for one in yaml.safe_load_all(text) if one]


def check_objects(objects: list[dict[str, Any]]) -> None:
    """Check objects strictly: unknown keys are refused, custom ones by their definitions."""
    validate = pytest.importorskip("kubernetes_validate")
    for one in objects:
        if one["kind"] in _DEFINITIONS:
            assert problems_of(one, definition_of(one["kind"])) == []
        else:
            validate.validate(one, validate.latest_version(), strict=True)


_ALL = {name: {"enabled": True} for name in ("inferencePool", "router", "fleet", "ray")}
_OF_ROUTER = {"ServiceAccount", "Role", "RoleBinding", "ConfigMap"}
_CHART_CASES: list[tuple[dict[str, Any], set[str]]] = [
    ({}, set()),
    ({"autoscaling": {"kind": "hpa"}}, {"HorizontalPodAutoscaler"}),
    ({"autoscaling": {"kind": "keda"}, **_ALL}, {"ScaledObject", *_DEFINITIONS, *_OF_ROUTER}),
]


@pytest.mark.parametrize(("sets", "kinds"), _CHART_CASES)
def test_the_rendered_chart_is_strictly_valid(sets: dict[str, Any], kinds: set[str]) -> None:
    objects = rendered(sets)
    found = {one["kind"] for one in objects}
    always = {"Deployment", "Service", "PersistentVolumeClaim", "PodDisruptionBudget"}
    assert found == always | kinds
    check_objects(objects)
    deployments = {one["metadata"]["name"]: one for one in objects if one["kind"] == "Deployment"}
    server = deployments["llm"]
    assert ("replicas" in server["spec"]) == ("autoscaling" not in sets)  # else the scaler has it


def test_a_misspelt_key_of_a_rendered_object_is_found() -> None:
    validate = pytest.importorskip("kubernetes_validate")
    [service] = [one for one in rendered({}) if one["kind"] == "Service"]
    service["spec"]["portz"] = service["spec"].pop("ports")
    with pytest.raises(validate.ValidationError):
        check_objects([service])


def test_rendered_names_and_selectors_fit_together() -> None:
    pool = {"inferencePool": {"enabled": True, "endpointPicker": "chat-picker"}}
    objects = rendered({**_ALL, **pool, "name": "chat", "secretName": "chat-keys"})
    assert {one["metadata"]["name"].split("-")[0] for one in objects} == {"chat"}
    templates = [one["spec"]["template"] for one in objects if one["kind"] == "Deployment"]
    for one in objects:
        if one["kind"] == "LeaderWorkerSet":
            group = one["spec"]["leaderWorkerTemplate"]
            templates += [group["leaderTemplate"], group["workerTemplate"]]
    labels = [template["metadata"]["labels"].items() for template in templates]
    for one in objects:
        if one["kind"] in ("Service", "PodDisruptionBudget", "InferencePool"):
            selector = one["spec"]["selector"]
            wanted = selector.get("matchLabels", selector).items()
            assert sum(wanted <= found for found in labels) == 1, one["metadata"]["name"]
    text = json.dumps(objects)
    assert "llm" not in text
    assert text.count('"secretKeyRef": {"name": "chat-keys"') == 2  # server and fleet


def test_the_rendered_router_follows_the_rendered_service() -> None:
    settings = 'policy = "session-affinity"\n[hedging]\n'
    router = {"enabled": True, "replicas": 2, "settings": settings}
    objects = rendered({"name": "chat", "router": router})
    check_router(objects)
    check_pods([one["spec"]["template"] for one in objects if one["kind"] == "Deployment"])
    [text] = [one["data"]["route.toml"] for one in objects if one["kind"] == "ConfigMap"]
    assert parse_route_file(text).policy == "session-affinity"
    assert parse_route_file(text).hedging is not None


def test_the_rendered_ray_application_is_accepted() -> None:
    sets = {**_ALL, "model": "ORG/OTHER", "settings": {"KV_CACHE_MEMORY": "2GiB"}}
    [service] = [one for one in rendered(sets) if one["kind"] == "RayService"]
    [application] = yaml.safe_load(service["spec"]["serveConfigV2"])["applications"]
    args = read_args(application["args"])
    assert args.model == "ORG/OTHER"
    assert args.configs("10.0.0.1")[1].cache.kv_cache_memory_bytes == 2 * 2**30


def test_values_that_the_schema_refuses_are_not_rendered() -> None:
    helm = pytest.importorskip("helm_python")
    for wrong in ({"name": "quire"}, {"replica": 1}, {"autoscaling": {"kind": "both"}}):
        with pytest.raises(helm.HelmValuesError):
            rendered(wrong)
    report = helm.lint(str(CHART), strict=True)
    assert [one for one in report["messages"] if one["severity"] > 1] == []
    assert report["errors"] == []
