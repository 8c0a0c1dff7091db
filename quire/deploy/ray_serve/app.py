"""The deployments of an application: engines, the directory of their addresses, and routers.

The only file of the package that imports Ray. What each deployment does is in files that know no
Ray; here are the ways between them, their resources and their scaling. Always holds: only control
messages pass through Ray (leases, reports of load, calls that wake an engine); requests and tokens
do not.
"""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import Any

import ray
from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy
from ray.serve.handle import DeploymentHandle
from ray.serve.schema import LoggingConfig

from quire.base.log import Log
from quire.deploy.ray_serve.app_args import STOP_MARGIN_S, AppArgs
from quire.deploy.ray_serve.directory import ReplicaDirectory
from quire.deploy.ray_serve.engine_replica import EngineReplica
from quire.deploy.ray_serve.environment import check_environment
from quire.deploy.ray_serve.ingress import Ingress
from quire.deploy.ray_serve.scaling import ScalingPolicy

ENGINES, DIRECTORY, ROUTERS = "Engine", "Directory", "Router"
# The resource that Ray gives the head node.
_HEAD = "node:__internal_head__"
# Calls of an actor that may be open at once: leases, reports and wake-ups only.
_MAX_CALLS = 10_000
# A stopped actor is replaced after three checks without an answer.
_CHECK_S, _ANSWER_S = 5.0, 10.0
_METRICS_S = 1.0


class _DirectoryHandle:
    """The directory, as an engine sees it."""

    def __init__(self, handle: DeploymentHandle) -> None:
        self._handle = handle

    async def hold(self, address: str) -> None:
        """Take or renew the lease of an address."""
        await self._handle.hold.remote(address)

    async def give_up(self, address: str) -> None:
        """End the lease of an address."""
        await self._handle.give_up.remote(address)


class EngineDeployment:
    """An engine. Serve calls `check_health`, `record_autoscaling_stats` and `__del__`."""

    _replica: EngineReplica | None = None

    async def __init__(self, args: AppArgs, directory: DeploymentHandle) -> None:  # type: ignore[misc]
        host = args.host or ray.util.get_node_ip_address()
        threads = max(int(args.num_cpus), 1)
        replica = EngineReplica(args, _DirectoryHandle(directory), host, threads)
        await replica.start()
        self._replica = replica

    async def wake(self) -> None:
        """Return; a call that waits makes Serve start an engine."""

    async def check_health(self) -> None:
        """Raise RuntimeError where the engine must be replaced."""
        if self._replica is not None:
            self._replica.check()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the load, for the scaling policy."""
        return {} if self._replica is None else await self._replica.load()

    async def __del__(self) -> None:
        if self._replica is not None:
            await self._replica.stop()


class RouterDeployment:
    """A router."""

    _router: Ingress | None = None

    async def __init__(  # type: ignore[misc]
        self, args: AppArgs, engines: DeploymentHandle, directory: DeploymentHandle
    ) -> None:
        for advice in check_environment(os.environ, args.ingress):
            Log("router").warning(advice)

        async def read_addresses() -> list[str]:
            found: list[str] = await directory.addresses.remote()
            return found

        async def ask_for_engine() -> None:
            await engines.wake.remote()

        router = Ingress(args, read_addresses, ask_for_engine)
        await router.start()
        self._router = router

    def __serve_build_asgi_app__(self) -> Any:
        """Return the application that Serve's ingress calls."""
        return self._router

    async def check_health(self) -> None:
        """Raise RuntimeError where the router must be replaced."""
        if self._router is not None:
            self._router.check()

    async def __del__(self) -> None:
        if self._router is not None:
            await self._router.stop()


def application(args: AppArgs) -> serve.Application:
    """Return the application of these arguments."""
    server, _ = args.configs("127.0.0.1")
    engine_stop_s = server.grace_s + STOP_MARGIN_S
    router_stop_s = args.router_settings().grace_s + STOP_MARGIN_S
    shared = {
        "max_ongoing_requests": _MAX_CALLS,
        "health_check_period_s": _CHECK_S,
        "health_check_timeout_s": _ANSWER_S,
        "logging_config": LoggingConfig(enable_access_log=False),  # leases are renewed all the time
    }
    at_front: dict[str, Any] = {"num_cpus": 0}
    if args.router_nodes == "head":
        at_front["resources"] = {_HEAD: 0.001}
    directory = serve.deployment(
        ReplicaDirectory,
        name=DIRECTORY,
        ray_actor_options=at_front,
        graceful_shutdown_timeout_s=1.0,
        **shared,
    ).bind()
    engines = serve.deployment(
        EngineDeployment,
        name=ENGINES,
        ray_actor_options={
            "num_cpus": args.num_cpus,
            "num_gpus": args.num_gpus,
            "resources": dict(args.resources),
        },
        autoscaling_config=_autoscaling(args),
        graceful_shutdown_wait_loop_s=1.0,
        graceful_shutdown_timeout_s=engine_stop_s,
        **shared,
    ).bind(args, directory)
    router = serve.deployment(
        serve.ingress()(RouterDeployment),
        name=ROUTERS,
        num_replicas=args.num_routers,
        ray_actor_options=at_front,
        graceful_shutdown_timeout_s=router_stop_s,
        **{**shared, "max_ongoing_requests": args.router_settings().max_open + _MAX_CALLS},
    )
    return router.bind(args, engines, directory)


def _autoscaling(args: AppArgs) -> AutoscalingConfig:
    scaling = args.scaling
    return AutoscalingConfig(
        min_replicas=scaling.min_replicas,
        max_replicas=scaling.max_replicas,
        upscale_delay_s=scaling.upscale_delay_s,
        downscale_delay_s=scaling.downscale_delay_s,
        downscale_to_zero_delay_s=scaling.to_zero_delay_s,
        look_back_period_s=scaling.look_back_s,
        metrics_interval_s=min(_METRICS_S, scaling.look_back_s),
        policy=AutoscalingPolicy(
            policy_function=f"{ScalingPolicy.__module__}:{ScalingPolicy.__name__}",
            policy_kwargs=asdict(scaling.target),
        ),
    )
