"""Build the applications: the routes, their dialects and the middleware around them.

Wiring only: each route's logic is in its own file, and what all routes share (keys, errors,
counters) in http/middleware.py. A new HTTP dialect gets its routes here, and an entry for its API;
base/http_apis.py has the paths of the API. Always holds: only the paths listed here are served.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from quire.api.admin.beats import BeatRoutes
from quire.api.admin.cache import CacheRoutes
from quire.api.admin.engine import EngineRoutes
from quire.api.admin.health import HealthRoutes
from quire.api.admin.record import RecordRoutes
from quire.api.admin.routes import AdminRoutes
from quire.api.admin.version import ADMIN_OVERVIEW, OVERVIEW, show_version
from quire.api.anthropic.dialect import ANTHROPIC
from quire.api.anthropic.messages import messages_routes
from quire.api.batch_wiring import batch_routes
from quire.api.embeddings.routes import embedding_routes
from quire.api.embeddings.vectors import read_embeddings
from quire.api.generation.generate import endpoint
from quire.api.http.dialect import Dialect
from quire.api.http.errors import UnknownRoute
from quire.api.http.middleware import RequestMiddleware
from quire.api.http.paths import hint_for
from quire.api.llama_cpp.dialect import LLAMA_CPP
from quire.api.llama_cpp.routes import llama_cpp_admin_routes, llama_cpp_routes
from quire.api.model_wiring import MODELS_DIALECT, model_routes
from quire.api.native import token_generate
from quire.api.native.requests import RequestRoutes
from quire.api.native.timelines import TimelineRoutes
from quire.api.native.tokenize import TokenizeRoutes
from quire.api.ollama.dialect import OLLAMA
from quire.api.ollama.routes import ollama_routes
from quire.api.openai import chat
from quire.api.openai.completions import CompletionsRoute
from quire.api.openai.dialect import OPENAI
from quire.api.openai.responses.create import responses_routes
from quire.api.openai.responses.dialect import RESPONSES_DIALECT
from quire.api.openai.responses.open_store import store_of
from quire.api.openapi.routes import DocumentRoutes
from quire.api.server_state import ServerState
from quire.api.web.routes import WebPageRoutes
from quire.api.workers.sibling_workers import SiblingWorkers
from quire.base import http_apis
from quire.base.show import show

# For paths without another dialect, and before the path of a request is known.
DEFAULT_DIALECT: Dialect = OPENAI
_OF_APIS: Mapping[str, Dialect] = {
    http_apis.OPENAI: DEFAULT_DIALECT,
    http_apis.MODELS: MODELS_DIALECT,
    http_apis.RESPONSES: RESPONSES_DIALECT,
    http_apis.ANTHROPIC: ANTHROPIC,
    http_apis.OLLAMA: OLLAMA,
    http_apis.LLAMA_CPP: LLAMA_CPP,
}
# By path or prefix of paths. The GenerationRoute of such a path has the same dialect.
DIALECTS: Mapping[str, Dialect] = {path: _OF_APIS[api] for path, api in http_apis.API_PATHS.items()}


def build_app(server_state: ServerState, siblings: SiblingWorkers | None = None) -> ASGIApp:
    """Return the application of a server. siblings: its other API processes."""
    router = _router(routes_of(server_state, siblings))
    return RequestMiddleware(router, server_state, DEFAULT_DIALECT, dialects=DIALECTS)


def routes_of(server_state: ServerState, siblings: SiblingWorkers | None = None) -> list[Route]:
    """Return all routes of the public listener; openapi/operations.py documents each."""
    completions = CompletionsRoute(server_state)
    generate = token_generate.route_of(DEFAULT_DIALECT)
    requests = RequestRoutes(server_state, None if siblings is None else siblings.forward)
    tokenize = TokenizeRoutes(server_state)
    routes = [
        Route("/v1/completions", completions.post, methods=["POST"]),
        Route("/v1/chat/completions", endpoint(server_state, chat.ROUTE), methods=["POST"]),
        Route("/generate", endpoint(server_state, generate), methods=["POST"]),
        *messages_routes(server_state),
        *ollama_routes(server_state, read_embeddings),
        *llama_cpp_routes(server_state, read_embeddings),
        *_responses_routes(server_state, siblings),
        *embedding_routes(server_state, DEFAULT_DIALECT),
        Route("/tokenize", tokenize.tokenize, methods=["POST"]),
        Route("/detokenize", tokenize.detokenize, methods=["POST"]),
        Route("/apply_template", tokenize.apply_template, methods=["POST"]),
        Route("/apply-template", tokenize.apply_template, methods=["POST"]),
        *model_routes(server_state),
        *requests.routes(),
        *TimelineRoutes(server_state, None if siblings is None else siblings.forward).routes(),
        *_status_routes(server_state, siblings),
        *_page_routes(server_state, OVERVIEW),
    ]
    routes += batch_routes(server_state, routes)
    if server_state.config.admin_port is None:
        routes += _admin_routes(server_state, siblings)
    return routes


def _responses_routes(server_state: ServerState, siblings: SiblingWorkers | None) -> list[Route]:
    """Return the routes of /v1/responses. Raises SettingError if the store cannot be opened."""
    shared = None if siblings is None else siblings.responses_store
    store = store_of(server_state.config, shared)
    server_state.closing.callback(store.close)
    if siblings is None:
        return responses_routes(server_state, store)
    return responses_routes(server_state, store, siblings.forward)


def build_admin_app(server_state: ServerState, siblings: SiblingWorkers | None = None) -> ASGIApp:
    """Return the application of --admin-port."""
    routes = [*_admin_routes(server_state, siblings), *_status_routes(server_state, siblings)]
    router = _router([*routes, *_page_routes(server_state, ADMIN_OVERVIEW)])
    return RequestMiddleware(router, server_state, DEFAULT_DIALECT, for_admins=True)


def _status_routes(server_state: ServerState, siblings: SiblingWorkers | None) -> list[Route]:
    """Return the routes that every listener has."""
    beats = BeatRoutes(server_state, None if siblings is None else siblings.beats)
    health, document = HealthRoutes(server_state), DocumentRoutes(server_state)
    return [
        Route("/health", health.health, methods=["GET"]),
        Route("/v1/health", health.health, methods=["GET"]),
        Route("/health/beats", beats.get, methods=["GET"]),
        Route("/metrics", health.metrics, methods=["GET"]),
        Route("/version", show_version, methods=["GET"]),
        Route("/openapi.json", document.get, methods=["GET"]),
        Route("/docs", document.page, methods=["GET"]),
    ]


def _page_routes(server_state: ServerState, overview: str) -> list[Route]:
    """Return the routes of the web page. overview: for programs, and without the page."""
    config = server_state.config
    page = WebPageRoutes(overview, root_path=config.root_path, is_on=config.web_page)
    files = [Route("/web/{file}", page.file, methods=["GET"])] if config.web_page else []
    return [Route("/", page.front, methods=["GET"]), *files]


def _admin_routes(server_state: ServerState, siblings: SiblingWorkers | None) -> list[Route]:
    """Return the routes of origins.ADMIN_PATHS."""
    cache, admin = CacheRoutes(server_state), AdminRoutes(server_state, siblings)
    return [
        Route("/v1/engine", EngineRoutes(server_state).get, methods=["GET"]),
        Route("/v1/cache", cache.get, methods=["GET"]),
        Route("/v1/cache/flush", cache.flush, methods=["POST"]),
        Route("/reset_prefix_cache", cache.flush, methods=["POST"]),
        Route("/flush_cache", cache.flush, methods=["POST"]),
        *llama_cpp_admin_routes(server_state),
        Route("/admin", admin.get, methods=["GET"]),
        Route("/admin/pause", admin.pause, methods=["POST"]),
        Route("/admin/drain", admin.drain, methods=["POST"]),
        Route("/admin/resume", admin.resume, methods=["POST"]),
        Route("/admin/sleep", admin.sleep, methods=["POST"]),
        Route("/admin/wake", admin.wake, methods=["POST"]),
        Route("/admin/log-level", admin.log_level, methods=["PUT"]),
        Route("/admin/record", RecordRoutes(server_state, siblings).get, methods=["GET"]),
    ]


def _router(routes: Sequence[Route]) -> Router:
    paths = sorted({route.path for route in routes if "{" not in route.path})

    async def refuse(scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        hint = hint_for(scope["method"], path, paths)
        raise UnknownRoute(
            f"nothing is served at {show(path)}; {hint and hint + '; '}GET / lists what is"
        )

    return Router(routes, redirect_slashes=False, default=refuse)
