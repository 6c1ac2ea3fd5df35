"""Which of the notebook's variables a cell uses: those that must travel with it."""

from __future__ import annotations

import ast
import dataclasses
import dis
from types import CodeType
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

_LOADS = ("LOAD_NAME", "LOAD_GLOBAL", "DELETE_NAME", "DELETE_GLOBAL", "LOAD_FROM_DICT_OR_GLOBALS")
_STORES = ("STORE_NAME", "STORE_GLOBAL")

# What a piece of code does first with a name. None: nothing, or it sets it only in some cases.
_Use = Literal["read", "set"] | None


@dataclasses.dataclass(frozen=True)
class CellNames:
    """``needed`` are read before the cell sets them; ``perhaps`` are set by the cell, and read by functions in it."""

    needed: tuple[str, ...]
    perhaps: tuple[str, ...]


def used_names(codes: Iterable[CodeType], tree: ast.Module, namespace: Mapping[str, object]) -> CellNames:
    """The names in ``namespace`` that a cell, as ``codes`` and as ``tree``, gets from it."""
    codes = tuple(codes)
    loaded = {name for code in codes for name in _names(code, _LOADS) if name in namespace}
    rebound = loaded & {name for code in codes for name in _names(code, _STORES)}
    own = {name for name in rebound if _first_use(tree.body, name) != "read"}
    in_functions = {name for code in codes for inner in _inner(code) for name in _names(inner, _LOADS)}
    return CellNames(tuple(sorted(loaded - own)), tuple(sorted(own & in_functions)))


def _inner(code: CodeType) -> Iterator[CodeType]:
    return (constant for constant in code.co_consts if isinstance(constant, CodeType))


def _names(code: CodeType, operations: tuple[str, ...]) -> Iterator[str]:
    for instruction in dis.get_instructions(code):
        if instruction.opname in operations:
            yield instruction.argval
    for inner in _inner(code):
        yield from _names(inner, operations)


def _first_use(statements: Iterable[ast.stmt], name: str) -> _Use:
    return next((use for statement in statements if (use := _use(statement, name)) is not None), None)


def _use(statement: ast.stmt, name: str) -> _Use:  # noqa: C901, PLR0911 - a case for each kind of statement
    """What running ``statement`` does first with ``name``; in doubt it reads."""
    match statement:
        case ast.With() | ast.AsyncWith():
            heads = [node for item in statement.items for node in (item.context_expr, item.optional_vars)]
            return _of_expressions(heads, name) or _first_use(statement.body, name)
        case ast.For() | ast.AsyncFor():
            head = _of_expressions([statement.iter, statement.target], name)
            inner = head or _first_use(statement.body, name)
            return "read" if "read" in (head, inner, _first_use(statement.orelse, name)) else None
        case ast.While():
            inner = _first_use([*statement.body, *statement.orelse], name)
            return "read" if "read" in (_of_expressions([statement.test], name), inner) else None
        case ast.If():
            branches = [_first_use(statement.body, name), _first_use(statement.orelse, name)]
            return _of_expressions([statement.test], name) or _of_branches(branches)
        case ast.Try():
            ways = [[*statement.body, *statement.orelse], *(each.body for each in statement.handlers)]
            return _of_branches([_first_use(way, name) for way in ways]) or _first_use(statement.finalbody, name)
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            defaults = [*statement.decorator_list, *statement.args.defaults, *statement.args.kw_defaults]
            return _of_expressions(defaults, name) or ("set" if statement.name == name else None)
        case ast.ClassDef():
            bases = [*statement.decorator_list, *statement.bases, *(each.value for each in statement.keywords)]
            if "read" in (_of_expressions(bases, name), _first_use(statement.body, name)):
                return "read"
            return "set" if statement.name == name else None
        case ast.Import() | ast.ImportFrom():
            return "set" if any((a.asname or a.name.partition(".")[0]) == name for a in statement.names) else None
        case ast.AugAssign(target=ast.Name(id=target)) if target == name:
            return "read"
        case _:
            return _of_expressions([statement], name)


def _of_branches(uses: list[_Use]) -> _Use:
    if "read" in uses:
        return "read"
    return "set" if all(use == "set" for use in uses) else None


def _of_expressions(nodes: Iterable[ast.AST | None], name: str) -> _Use:
    """What the nodes do, taken in order; within one, values are computed before targets are set."""
    for node in nodes:
        if node is not None:
            contexts = [child.ctx for child in _now(node) if isinstance(child, ast.Name) and child.id == name]
            if any(not isinstance(context, ast.Store) for context in contexts):
                return "read"
            if contexts:
                return "set"
    return None


def _now(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes inside ``node``, without those of lambdas, which run later, and comprehensions' own variables."""
    yield node
    if not isinstance(node, ast.Lambda):
        for child in ast.iter_child_nodes(node):
            if not (isinstance(node, ast.comprehension) and child is node.target):
                yield from _now(child)
