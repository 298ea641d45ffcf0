"""A chat template's syntax tree: what is refused when the model loads, and the steps that bound a render.

jinja2 looks up filters and tests of a branch when the branch runs. Here the whole tree is checked at once, so that a
broken template fails at load and not on the first request that takes the wrong turn.
"""

from __future__ import annotations

from jinja2 import nodes
from jinja2.exceptions import TemplateSyntaxError
from jinja2.sandbox import SandboxedEnvironment
from jinja2.visitor import NodeTransformer

from tlserve.text.sandbox import CONCAT, PRINT, STEP, WEIGH

_OTHER_FILES = (nodes.Include, nodes.Import, nodes.FromImport, nodes.Extends)
# Filters that take the name of a filter or test, and which argument it is.
_NAMES_FILTER = {"map": 0}
_NAMES_TEST = {"select": 0, "reject": 0, "selectattr": 1, "rejectattr": 1}


def check_tree(tree: nodes.Template, environment: SandboxedEnvironment) -> None:
    """Refuse what can be seen to fail or to reach for Python's internals.

    Raises TemplateSyntaxError.
    """
    for node in tree.find_all(nodes.Node):
        if isinstance(node, _OTHER_FILES):
            raise TemplateSyntaxError("a chat template cannot use other templates", node.lineno)
        if isinstance(node, nodes.ScopedEvalContextModifier):
            raise TemplateSyntaxError("autoescape is not supported", node.lineno)
        if isinstance(node, nodes.Filter):
            _check_filter(node, environment)
        elif isinstance(node, nodes.Test):
            _check_name(node.name, "test", environment.tests, node)
        elif isinstance(node, nodes.Getattr):
            _check_attribute(node.attr, node)
        elif isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const):
            _check_attribute(node.arg.value, node)


def _check_filter(node: nodes.Filter, environment: SandboxedEnvironment) -> None:
    _check_name(node.name, "filter", environment.filters, node)
    for argument in (*node.args, *(keyword.value for keyword in node.kwargs)):
        if node.name in ("attr", "map", "sort", "groupby") and isinstance(argument, nodes.Const):
            _check_attribute(argument.value, node)
    for kind, places, known in (
        ("filter", _NAMES_FILTER, environment.filters),
        ("test", _NAMES_TEST, environment.tests),
    ):
        place = places.get(node.name, len(node.args))
        named = node.args[place] if place < len(node.args) else None
        if isinstance(named, nodes.Const) and isinstance(named.value, str):
            _check_name(named.value, kind, known, node)


def _check_name(name: str, kind: str, known: object, node: nodes.Node) -> None:
    assert isinstance(known, dict)
    if name not in known:
        raise TemplateSyntaxError(f"there is no {kind} {name!r}", node.lineno)


def _check_attribute(name: object, node: nodes.Node) -> None:
    if isinstance(name, str) and any(part.startswith("__") for part in name.split(".")):
        raise TemplateSyntaxError(f"access to {name!r} is not allowed", node.lineno)


class Metering(NodeTransformer):
    """Rewrites a tree so that its render is metered: see meter.py for the rules.

    Calls, filters and operators are metered by the environment; here are the loops, the bodies that can run again,
    and the nodes for which jinja2 writes Python that makes a value directly.
    """

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self._count_runs(node)
        if node.test is not None:
            # The test also runs for the turns that it leaves out.
            node.test = nodes.And(_filtered(nodes.Const(None), STEP, node), node.test, lineno=node.lineno)
        return node

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        return self._count_runs(node)

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node:
        return self._count_runs(node)

    def visit_Block(self, node: nodes.Block) -> nodes.Node:
        return self._count_runs(node)

    def _count_runs(self, node: nodes.For | nodes.Macro | nodes.CallBlock | nodes.Block) -> nodes.Node:
        self.generic_visit(node)
        step = _filtered(nodes.Const(None), STEP, node)
        node.body.insert(0, nodes.ExprStmt(step, lineno=node.lineno))
        return node

    def visit_Output(self, node: nodes.Output) -> nodes.Node:
        self.generic_visit(node)
        node.nodes = [_filtered(part, PRINT, node) for part in node.nodes]
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(nodes.List(node.nodes, lineno=node.lineno), CONCAT, node)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(node, WEIGH, node) if isinstance(node.arg, nodes.Slice) else node

    def visit_List(self, node: nodes.List) -> nodes.Node:
        return self._weigh_literal(node)

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:
        return self._weigh_literal(node)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        return node if node.ctx == "store" else self._weigh_literal(node)

    def _weigh_literal(self, node: nodes.Expr) -> nodes.Node:
        self.generic_visit(node)
        is_constant = all(isinstance(part, nodes.Const | nodes.Pair) for part in node.find_all(nodes.Expr))
        return node if is_constant else _filtered(node, WEIGH, node)


def _filtered(value: nodes.Expr, name: str, at: nodes.Node) -> nodes.Filter:
    return nodes.Filter(value, name, [], [], None, None, lineno=at.lineno)
