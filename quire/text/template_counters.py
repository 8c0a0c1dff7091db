"""Insert counters into a chat template between parsing and compiling.

A counter is a filter around an expression: of each loop iteration, each text written, each list
created, each value compared. template_sandbox.py has the filters. Also parses
`{% generation %}` blocks, and rejects templates that need other templates.
"""

from __future__ import annotations

from typing import Any, TypeVar, cast

from jinja2 import TemplateSyntaxError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.visitor import NodeTransformer

Node = TypeVar("Node", bound=nodes.Node)

# Names of the counters; with a space, so that no template can use them.
MADE = "value made"
WRITTEN = "value written"
LOOKED = "value looked at"
HELD = "value looked into"
ROUND = "round begun"
_NODES_A_ROUND = 16
_NOT_POSSIBLE = (nodes.Include, nodes.Import, nodes.FromImport, nodes.Extends)


class GenerationBlock(Extension):
    """Render the body of `{% generation %}`, which marks model output for training."""

    tags = {"generation"}  # noqa: RUF012  Jinja's own shape

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class InsertCounters(NodeTransformer):
    """Insert the counting filters where a template can repeat or create much."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        if node.test is not None:
            test = cast(nodes.Expr, node.test)
            node.test = _filtered(test, ROUND, _cost(test))
        return self._counting_rounds(node)

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        return self._counting_rounds(node)

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node:
        return self._counting_rounds(node)

    def visit_Block(self, node: nodes.Block) -> nodes.Node:
        return self._counting_rounds(node)

    def visit_Output(self, node: nodes.Output) -> nodes.Node:
        self.generic_visit(node)
        node.nodes = [_filtered(child, WRITTEN) for child in node.nodes]
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        node.nodes = [_filtered(part, WRITTEN) for part in node.nodes]
        return _filtered(node, LOOKED)

    def visit_List(self, node: nodes.List) -> nodes.Node:
        return _filtered(self.generic_visit(node), MADE)

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:
        return _filtered(self.generic_visit(node), MADE)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(node, MADE) if node.ctx == "load" else node

    def visit_Pair(self, node: nodes.Pair) -> nodes.Node:
        self.generic_visit(node)
        if not isinstance(node.key, nodes.Const):
            node.key = _filtered(node.key, LOOKED)  # hashed by the dict
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(node, MADE) if isinstance(node.arg, nodes.Slice) else node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        only = node.ops[0] if len(node.ops) == 1 else None
        if only is not None and only.op in ("in", "notin"):
            only.expr = _unless_constant(only.expr, HELD)
            node.expr = _unless_constant(node.expr, LOOKED)
        elif only is None or not isinstance(only.expr, nodes.Const):
            node.expr = _unless_constant(node.expr, LOOKED)
            for operand in node.ops:
                operand.expr = _unless_constant(operand.expr, LOOKED)
        return node

    def visit_NSRef(self, node: nodes.NSRef) -> nodes.Node:
        if node.attr.startswith("_"):
            raise TemplateSyntaxError(f"attribute {node.attr!r} starts with '_'", node.lineno)
        return node

    def generic_visit(self, node: Node, *args: Any, **kwargs: Any) -> Node:
        """Reject other templates: include, import and extends."""
        if isinstance(node, _NOT_POSSIBLE):
            raise TemplateSyntaxError(
                "a chat template stands alone: it cannot include, import or extend", node.lineno
            )
        return cast(Node, super().generic_visit(node, *args, **kwargs))

    def _counting_rounds(
        self, node: nodes.For | nodes.Macro | nodes.CallBlock | nodes.Block
    ) -> nodes.Node:
        cost = _cost(*node.body)
        self.generic_visit(node)
        round_ = _filtered(nodes.Const(None, lineno=node.lineno), ROUND, cost)
        node.body.insert(0, nodes.ExprStmt(round_, lineno=node.lineno))
        return node


def _cost(*parts: nodes.Node) -> int:
    """Return the number of rounds that one pass over parts of a template counts as."""
    return 1 + sum(1 for part in parts for _ in part.find_all(nodes.Node)) // _NODES_A_ROUND


def _filtered(node: nodes.Expr, name: str, *args: int) -> nodes.Filter:
    line = node.lineno
    given: list[nodes.Expr] = [nodes.Const(arg, lineno=line) for arg in args]
    return nodes.Filter(node, name, given, [], None, None, lineno=line)


def _unless_constant(node: nodes.Expr, name: str) -> nodes.Expr:
    return node if isinstance(node, nodes.Const) else _filtered(node, name)
