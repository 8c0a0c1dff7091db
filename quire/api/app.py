"""The routes and what wraps them.

Wiring only: each route's knowledge is in its own file, and what is the same for all of them (keys,
errors, counters) in edge.py. Always holds: nothing is served but what is listed here.
"""

from __future__ import annotations

from collections.abc import Sequence

from starlette.exceptions import HTTPException
from starlette.routing import Match, Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from quire.api.admin.cache import CacheRoutes
from quire.api.admin.health import HealthRoutes
from quire.api.admin.routes import AdminRoutes
from quire.api.admin.version import Pointer, show_version
from quire.api.http.errors import UnknownRoute
from quire.api.http.middleware import RequestMiddleware
from quire.api.http.paths import hint_for
from quire.api.native.requests import RequestRoutes
from quire.api.native.token_generate import TokenGenerateRoute
from quire.api.native.tokenize import TokenizeRoutes
from quire.api.openai.chat import ChatRoute
from quire.api.openai.completions import CompletionsRoute
from quire.api.openai.models import ModelsRoutes
from quire.api.openapi.routes import Document
from quire.api.server_state import ServerState
from quire.base.show import show


def build_app(serving: ServerState) -> ASGIApp:
    """The application a server runs."""
    return RequestMiddleware(_routed(routes_of(serving)), serving)


def routes_of(serving: ServerState) -> list[Route]:
    """All that is served where callers ask; openapi/operations.py says what each is for."""
    completions, chat, ids = (
        CompletionsRoute(serving),
        ChatRoute(serving),
        TokenGenerateRoute(serving),
    )
    requests, texts = RequestRoutes(serving, serving.peers), TokenizeRoutes(serving)
    models, watch = ModelsRoutes(serving), HealthRoutes(serving)
    document, pointer = Document(serving), Pointer(serving.config.root_path)
    routes = [
        Route("/v1/completions", completions.post, methods=["POST"]),
        Route("/v1/chat/completions", chat.post, methods=["POST"]),
        Route("/generate", ids.post, methods=["POST"]),
        Route("/tokenize", texts.tokenize, methods=["POST"]),
        Route("/detokenize", texts.detokenize, methods=["POST"]),
        Route("/apply_template", texts.apply_template, methods=["POST"]),
        Route("/apply-template", texts.apply_template, methods=["POST"]),
        Route("/tokenizer_info", models.tokenizer, methods=["GET"]),
        Route("/v1/models", models.list, methods=["GET"]),
        Route("/v1/models/{name:path}", models.one, methods=["GET"]),
        *requests.routes(),
        Route("/health", watch.health, methods=["GET"]),
        Route("/metrics", watch.metrics, methods=["GET"]),
        Route("/version", show_version, methods=["GET"]),
        Route("/openapi.json", document.get, methods=["GET"]),
        Route("/docs", document.page, methods=["GET"]),
        Route("/", pointer.show, methods=["GET"]),
    ]
    if serving.config.admin_port is None:
        routes += _admin_routes(serving)
    return routes


def build_admin_app(serving: ServerState) -> ASGIApp:
    """The application at --admin-port."""
    watch, document = HealthRoutes(serving), Document(serving)
    routes = [
        *_admin_routes(serving),
        Route("/health", watch.health, methods=["GET"]),
        Route("/metrics", watch.metrics, methods=["GET"]),
        Route("/version", show_version, methods=["GET"]),
        Route("/openapi.json", document.get, methods=["GET"]),
        Route("/docs", document.page, methods=["GET"]),
    ]
    return RequestMiddleware(_routed(routes), serving, for_admins=True)


def _admin_routes(serving: ServerState) -> list[Route]:
    """What auth.ADMIN_PATHS guards."""
    cache, admin = CacheRoutes(serving), AdminRoutes(serving)
    return [
        Route("/v1/cache", cache.get, methods=["GET"]),
        Route("/v1/cache/flush", cache.flush, methods=["POST"]),
        Route("/reset_prefix_cache", cache.flush, methods=["POST"]),
        Route("/flush_cache", cache.flush, methods=["POST"]),
        Route("/admin", admin.get, methods=["GET"]),
        Route("/admin/pause", admin.pause, methods=["POST"]),
        Route("/admin/drain", admin.drain, methods=["POST"]),
        Route("/admin/resume", admin.resume, methods=["POST"]),
        Route("/admin/log-level", admin.log_level, methods=["PUT"]),
    ]


def _routed(routes: Sequence[Route]) -> ASGIApp:
    paths = sorted({route.path for route in routes if "{" not in route.path})

    async def refuse(scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        hint = hint_for(path, paths)
        raise UnknownRoute(
            f"nothing is served at {show(path)}; {hint and hint + '; '}GET / lists what is"
        )

    return _Raising(Router(routes, redirect_slashes=False, default=refuse))


class _Raising:
    """Starlette's routes raise what they refuse only inside an app; otherwise they answer text."""

    def __init__(self, router: Router) -> None:
        self._router = router

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["app"] = self
        try:
            await self._router(scope, receive, send)
        except HTTPException as error:
            if error.status_code == 405:  # the first route of that path knows only its own
                raise HTTPException(405, headers={"Allow": self._allowed(scope)}) from error
            raise

    def _allowed(self, scope: Scope) -> str:
        matching = [
            route.methods or set()
            for route in self._router.routes
            if isinstance(route, Route) and route.matches(scope)[0] is not Match.NONE
        ]
        return ", ".join(sorted(set().union(*matching)))
