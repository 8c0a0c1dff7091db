"""Imports among this project's own modules: no cycles, and only listed imports inside functions.

Imports under TYPE_CHECKING count: a cycle of types is a cycle for the reader as well.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from functools import cache

from tests.repository.source_files import code_files, name_of, tree_of

# Modules and packages outside quire.cli that import own modules inside functions, and why.
_GPU = "PyTorch and Triton are optional and slow to import"
_FORMATS = "readers of a file format, loaded for models that come in it"
_ON_DEMAND = "loaded only where the setting or request that needs it is given"
_NATIVE = "a compiled module that cannot be loaded is a finding"
LATE_IMPORTS: Mapping[str, tuple[str, str]] = {
    "quire": ("quire.base quire.engine", "the library's names load the engine on first use"),
    "quire.api.generation.foreign_fields": ("quire.api.generation", "only refusals need it"),
    "quire.api.batch_wiring": ("quire.api", _ON_DEMAND),
    "quire.api.openai.responses.open_store": ("quire.api.openai", _ON_DEMAND),
    "quire.api.openapi.routes": ("quire.api.openapi", _ON_DEMAND),
    "quire.api.rpc_wiring": ("quire.api", "gRPC is optional and slow to import"),
    "quire.api.request_spans": ("quire.obs", "OpenTelemetry is optional and slow to import"),
    "quire.api.workers.supervisor": ("quire.obs", "prometheus_client: not in the supervisor alone"),
    "quire.api.workers.worker_engines": ("quire.engine", _ON_DEMAND),
    "quire.bench.serve": ("quire.obs", _ON_DEMAND),
    "quire.api.served_engine": ("quire.engine", _ON_DEMAND),
    "quire.deploy.ray": ("quire.deploy.ray_serve", "Ray is optional and slow to import"),
    "quire.doctor.machine_exam": ("quire.doctor", _NATIVE),
    "quire.doctor.machine_facts": ("quire._native", _NATIVE),
    "quire.doctor.probes": ("quire.base quire.bench quire.engine", _ON_DEMAND),
    "quire.engine.assembly.assemble": ("quire.engine quire.transfer", _ON_DEMAND),
    "quire.engine.assembly.executor_choice": (
        "quire.engine.assembly quire.execute quire.speculative",
        "one executor is loaded",
    ),
    "quire.engine.assembly.features": ("quire.engine", _ON_DEMAND),
    "quire.engine.assembly.kv_store": ("quire.kv_store", "the client of Mooncake only where it is"),
    "quire.engine.assembly.offload": ("quire.execute", "one executor is loaded"),
    "quire.engine.assembly.outside": ("quire.engine.assembly", _ON_DEMAND),
    "quire.engine.assembly.proposers": ("quire.engine.assembly", _ON_DEMAND),
    "quire.engine.assembly.scheduler_factory": ("quire.cache", _ON_DEMAND),
    "quire.engine.assembly.ranks": ("quire.engine.assembly", _GPU),
    "quire.engine.assembly.torch_choice": ("quire.execute quire.ranks", _GPU),
    "quire.ranks.rank_loop": ("quire.ranks", _GPU),
    "quire.engine.assembly.self_draft": (
        "quire.execute quire.ranks quire.engine.assembly",
        "one executor is loaded, and ranks only where there are some",
    ),
    "quire.engine.assembly.sized_model": ("quire.engine.assembly", _ON_DEMAND),
    "quire.engine.assembly.sizing": (
        "quire.engine.assembly",
        "the tier only where one is configured",
    ),
    "quire.engine.assembly.vocabulary": ("quire.text", "the tokenizers library is slow to import"),
    "quire.engine.client.engine_client": (
        "quire.engine.client",
        "pyzmq for a process, the executors for a thread",
    ),
    "quire.engine.client.tokenizer_side": ("quire.models", "only refusals need all architectures"),
    "quire.execute.gpu": ("quire.execute.gpu quire.sampling quire._native", _GPU),
    "quire.hub.cache": ("quire.weights", "NumPy, before the engine process is started"),
    "quire.obs.metrics": ("quire.obs", "a server shows vLLM's names; the library needs none"),
    "quire.scheduler.wiring": ("quire.scheduler", _ON_DEMAND),
    "quire.structured.compiler": ("quire.structured", _ON_DEMAND),
    "quire.text.sources": ("quire.text", _FORMATS),
    "quire.text.template_files": ("quire.text", _FORMATS),
    "quire.weights.checkpoint": ("quire.weights", _FORMATS),
    "quire.weights.content": ("quire._native", "the native extension is optional"),
}


@cache
def _modules() -> dict[str, ast.Module]:
    trees = {}
    for file in code_files("quire"):
        if file.suffix == ".py":
            name = name_of(file).removesuffix(".py").removesuffix("/__init__").replace("/", ".")
            trees[name] = tree_of(file)
    return trees


def _imported(node: ast.AST, modules: Mapping[str, ast.Module]) -> Iterator[str]:
    """Yield the own modules that one statement imports."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names if alias.name in modules)
    elif isinstance(node, ast.ImportFrom) and node.module in modules:
        for alias in node.names:
            inner = f"{node.module}.{alias.name}"
            yield inner if inner in modules or alias.name == "_native" else node.module


def _late_imports(tree: ast.Module) -> list[ast.AST]:
    functions = [
        node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    return [
        node
        for function in functions
        for node in ast.walk(function)
        if isinstance(node, ast.Import | ast.ImportFrom)
    ]


@cache
def _dependencies() -> dict[str, set[str]]:
    modules = _modules()
    found = {}
    for name, tree in modules.items():
        late = {id(node) for node in _late_imports(tree)}
        nodes = [node for node in ast.walk(tree) if id(node) not in late]
        found[name] = {to for node in nodes for to in _imported(node, modules) if to in modules}
    return found


def cycles(dependencies: Mapping[str, set[str]]) -> list[set[str]]:
    """Return the sets of modules that import each other, directly or not."""
    after = {name: _reached(name, dependencies) for name in dependencies}
    found: list[set[str]] = []
    for name, reached in after.items():
        if name in reached and not any(name in cycle for cycle in found):
            found.append({other for other in reached if name in after[other]})
    return found


def _reached(start: str, dependencies: Mapping[str, set[str]]) -> set[str]:
    reached: set[str] = set()
    todo = list(dependencies[start])
    while todo:
        name = todo.pop()
        if name not in reached:
            reached.add(name)
            todo += dependencies[name]
    return reached


def test_modules_do_not_import_each_other_in_cycles() -> None:
    found = [sorted(cycle) for cycle in cycles(_dependencies())]
    assert not found, f"import cycles: {found}; move what both sides need below them"


def test_the_process_that_serves_http_imports_no_architecture() -> None:
    """Its start would take a tenth longer."""
    dependencies = _dependencies()
    for start in ("quire.api.server", "quire.engine.client.engine_client", "quire.cli.serve"):
        assert "quire.models.registry" not in _reached(start, dependencies), start
    assert "quire.models.registry" in _reached("quire.engine.process.main", dependencies)


def test_a_cycle_of_any_length_is_found() -> None:
    chain = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": {"e"}, "e": set[str]()}
    assert cycles(chain) == [{"a", "b", "c"}]


def test_own_modules_are_imported_in_functions_only_if_listed() -> None:
    modules = _modules()
    found: set[str] = set()
    for name, tree in modules.items():
        if name.startswith("quire.cli"):
            continue
        for node in _late_imports(tree):
            for to in _imported(node, modules):
                place = "quire.execute.gpu" if name.startswith("quire.execute.gpu.") else name
                allowed = LATE_IMPORTS.get(place, ("", ""))[0].split()
                assert any(f"{to}.".startswith(f"{package}.") for package in allowed), (
                    f"{name} imports {to} in a function; import it at the top, or list it in "
                    "LATE_IMPORTS with the reason"
                )
                found.add(place)
    gone = LATE_IMPORTS.keys() - found
    assert not gone, f"no longer import in functions: {sorted(gone)}; take them off LATE_IMPORTS"
