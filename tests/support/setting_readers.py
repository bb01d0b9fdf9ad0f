"""Who reads a setting: found in the sources, by their syntax.

A setting is read by a call that is given its name: `config.get_int("...")`, `config.listener_value(listener, "...")`,
`group_value("...", ...)`, or a function that hands its argument on to one of these. The name is a text in that call, a
constant, or one of a table that the function goes through. A topic's setting is also read as the attribute of
`TopicConfig` that is called like it.

A value that is only handed on, as a keyword of a class, is read when the attribute of that name is, and so on: a field
that is filled and never used is no reader.

Not seen here: a name that is put together at run time, which is why names are written out in full; and whether what is
done with a value is right.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Final

from millrace.config import GROUP_SETTINGS, TOPIC_SETTINGS, Scope, TopicConfig

NOT_OF_BROKERS: Final = frozenset({"cli", "client", "console", "demo", "local", "spark", "testing"})
"""Settings of the same names that belong to clients, and texts that become the files of brokers."""
TABLES: Final = frozenset({"config/table.py", "config/without_effect.py", "config/page.py"})
READERS: Final = frozenset({
    "get", "get_int", "get_float", "get_bool", "get_str", "get_list", "listener_value", "group_value", "topic_value",
    "value", "_topic_setting",
})  # fmt: skip
"""The last two are what queues are given to ask for the settings of groups and topics."""
OF_CONFIG: Final = frozenset({"config", "_config", "self"})
"""Whose `get` is meant: that of a dictionary is none."""
CONVERSIONS: Final = frozenset({"int", "float", "bool", "str", "tuple", "whole_number", "min", "max"})
CLIENT_METRICS_MODULES: Final = ("client_metrics", "telemetry")
"""Settings of subscriptions have names of one everyday word: they count where subscriptions are read."""


@dataclass
class Module:
    """One file of the package."""

    path: str
    tree: ast.Module
    parents: dict[ast.AST, ast.AST] = field(default_factory=dict)
    constants: dict[str, ast.expr] = field(default_factory=dict)
    nodes: list[ast.AST] = field(default_factory=list)
    messages: set[str] = field(default_factory=set)
    """Names of what is imported from `wire`."""

    def __post_init__(self) -> None:
        self.nodes = list(ast.walk(self.tree))
        for node in self.nodes:
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("millrace.wire"):
                self.messages |= {each.asname or each.name for each in node.names}
            for child in ast.iter_child_nodes(node):
                self.parents[child] = node
        for statement in self.tree.body:
            target: ast.expr | None = statement.target if isinstance(statement, ast.AnnAssign) else None
            if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
                target = statement.targets[0]
            if isinstance(target, ast.Name) and isinstance(statement, ast.Assign | ast.AnnAssign) and statement.value:
                self.constants[target.id] = statement.value

    def above(self, node: ast.AST) -> Iterator[ast.AST]:
        while node in self.parents:
            node = self.parents[node]
            yield node


def modules_of(sources: Path) -> list[Module]:
    """The parts of a package that a broker is made of."""
    paths = {path.relative_to(sources): path for path in sorted(sources.rglob("*.py"))}
    return [
        Module(str(name), ast.parse(path.read_text()))
        for name, path in paths.items()
        if name.parts[0] not in NOT_OF_BROKERS and str(name) not in TABLES
    ]


class SettingReaders:
    """The reads of settings in a package's sources."""

    def __init__(self, modules: Sequence[Module], calls: frozenset[str] = READERS) -> None:
        """`calls` are the names of the functions that are given the name of a setting."""
        self.modules = modules
        self._calls = calls
        self.attributes: dict[str, list[tuple[Module, ast.Attribute]]] = defaultdict(list)
        self.used_by_class: dict[str, set[str]] = defaultdict(set)
        """By the name of a class: the names that it does more with than to keep their values."""
        self._known_uses: dict[tuple[str, frozenset[str]], list[str]] = {}
        for module in self.modules:
            for node in module.nodes:
                if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                    self.attributes[node.attr].append((module, node))
                if isinstance(node, ast.ClassDef):
                    self.used_by_class[node.name] |= {
                        each.id
                        for each in ast.walk(node)
                        if isinstance(each, ast.Name)
                        and isinstance(each.ctx, ast.Load)
                        and not isinstance(module.parents[each], ast.Assign)
                    }
        self.named: dict[str, list[str]] = defaultdict(list)
        """By the name of a setting: where it is read, and used."""
        self.told: dict[str, list[str]] = defaultdict(list)
        """The same for names that are given to anything at all where subscriptions of client metrics are read."""
        for module in self.modules:
            self._find(module)

    def of(self, scope: Scope, name: str) -> list[str]:
        """Where a setting is read: `path:line`."""
        if scope is Scope.CLIENT_METRICS:
            return self.told[name]
        found = list(self.named[name])
        if scope is Scope.TOPIC:
            attribute = name.replace(".", "_")
            if attribute in {each.name for each in fields(TopicConfig)}:
                found += self._uses(attribute, frozenset())
        if scope is Scope.BROKER:
            for inner_scope, rows in ((Scope.TOPIC, TOPIC_SETTINGS), (Scope.GROUP, GROUP_SETTINGS)):
                for row in rows.values():
                    names = {synonym.name for synonym in row.synonyms} | set(row.bounds or ())
                    if name in names:
                        found += self.of(inner_scope, row.name)
        return found

    # --- reads --------------------------------------------------------------------------------------------------------

    def _find(self, module: Module) -> None:
        readers = set(self._calls)
        calls = [node for node in module.nodes if isinstance(node, ast.Call)]
        seen: set[tuple[ast.Call, str]] = set()
        again = True
        while again:  # a function that hands a name on is a reader, too
            again = False
            for call in calls:
                for text in self._names_read(module, call, readers):
                    if (call, text) in seen:
                        continue
                    seen.add((call, text))
                    if self._is_used(module, call, frozenset()):
                        self.named[text].append(f"{module.path}:{call.lineno}")
                for function in self._handing_on(module, call, readers):
                    if function not in readers:
                        readers.add(function)
                        again = True
        if any(word in module.path for word in CLIENT_METRICS_MODULES):
            for node in module.nodes:
                inside = [*node.args] if isinstance(node, ast.Call) else []
                inside += [node.slice] if isinstance(node, ast.Subscript) else []
                for argument in inside:
                    for text in _texts(argument):
                        self.told[text].append(f"{module.path}:{argument.lineno}")

    def _arguments(self, call: ast.Call, readers: set[str]) -> list[ast.expr]:
        """What a read is given; nothing where the call is none."""
        function, arguments = call.func, list(call.args)
        if _last(function) == "partial" and arguments:
            function, arguments = arguments[0], arguments[1:]
        if _last(function) not in readers:
            return []
        if _last(function) == "get" and not (
            isinstance(function, ast.Attribute) and _last(function.value) in OF_CONFIG
        ):
            return []
        return arguments

    def _names_read(self, module: Module, call: ast.Call, readers: set[str]) -> Iterator[str]:
        for argument in self._arguments(call, readers):
            if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                yield argument.value
            elif isinstance(argument, ast.Name):
                yield from self._meant(module, call, argument.id)
            elif isinstance(argument, ast.Attribute):
                for other in self.modules:
                    if other.path.endswith(f"/{_last(argument.value)}.py"):
                        yield from _texts(other.constants.get(argument.attr))

    def _meant(self, module: Module, call: ast.Call, name: str) -> Iterator[str]:
        """The texts that a name stands for: those of a constant, or of what a loop goes through."""
        constant = module.constants.get(name) or self._imported(module, name)
        if constant is not None:
            yield from _texts(constant)
            return
        for node in module.above(call):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                for statement in ast.walk(node):
                    if isinstance(statement, ast.Assign) and any(name in _names(each) for each in statement.targets):
                        yield from _texts(statement.value)
            if isinstance(node, ast.For | ast.comprehension) and name in _names(node.target):
                yield from _texts(node.iter)
                for each in _names(node.iter):
                    yield from _texts(module.constants.get(each))
            if isinstance(node, ast.GeneratorExp | ast.ListComp | ast.DictComp | ast.SetComp):
                for generator in node.generators:
                    if name in _names(generator.target):
                        yield from _texts(generator.iter)

    def _imported(self, module: Module, name: str) -> ast.expr | None:
        for statement in module.tree.body:
            if isinstance(statement, ast.ImportFrom) and name in {each.asname or each.name for each in statement.names}:
                path = (statement.module or "").removeprefix("millrace.").replace(".", "/")
                for other in self.modules:
                    if other.path in (f"{path}.py", f"{path}/__init__.py"):
                        return other.constants.get(name)
        return None

    def _handing_on(self, module: Module, call: ast.Call, readers: set[str]) -> Iterator[str]:
        """The functions around a read that give it one of their own arguments."""
        given = {argument.id for argument in self._arguments(call, readers) if isinstance(argument, ast.Name)}
        for node in module.above(call):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                arguments = {each.arg for each in (*node.args.args, *node.args.kwonlyargs)} - {"self", "cls"}
                if given & arguments and not node.name.startswith(("__", "get")):
                    yield node.name

    # --- uses ---------------------------------------------------------------------------------------------------------

    def _is_used(self, module: Module, node: ast.AST, seen: frozenset[str]) -> bool:
        """Whether a value is used where it is read, or in the end where it is handed on to."""
        for above in module.above(node):
            if isinstance(above, ast.keyword) and above.arg is not None:
                call = module.parents[above]
                if not isinstance(call, ast.Call) or not _makes_object(call) or self._is_sent(module, call):
                    return True
                return self._is_used_by_object(_last(call.func), above.arg, seen)
            if isinstance(above, ast.Call) and _last(above.func) not in CONVERSIONS:
                return True
            if isinstance(above, ast.stmt):
                return True
        return True

    def _is_used_by_object(self, name: str, keyword: str, seen: frozenset[str]) -> bool:
        """Whether a class does something with what it is given: as its attribute, or when it is made."""
        if keyword in self.used_by_class[name]:
            return True
        return bool(self._uses(keyword, seen) or self._uses("_" + keyword, seen))

    def _is_sent(self, module: Module, call: ast.Call) -> bool:
        """Whether a message of the protocol is made: somebody else reads it."""
        root: ast.AST = call.func
        while isinstance(root, ast.Attribute):
            root = root.value
        return _last(root) in module.messages

    def _uses(self, attribute: str, seen: frozenset[str]) -> list[str]:
        """Where an attribute is read, and used."""
        if attribute in seen:
            return []
        if (attribute, seen) not in self._known_uses:
            self._known_uses[attribute, seen] = [
                f"{module.path}:{node.lineno}"
                for module, node in self.attributes[attribute]
                if self._is_used(module, node, seen | {attribute})
            ]
        return self._known_uses[attribute, seen]


def _last(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _makes_object(call: ast.Call) -> bool:
    name = _last(call.func)
    return name == "cls" or name.lstrip("_")[:1].isupper()


def _names(node: ast.AST) -> set[str]:
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}


def _texts(node: ast.AST | None) -> Iterator[str]:
    if node is not None:
        for each in ast.walk(node):
            if isinstance(each, ast.Constant) and isinstance(each.value, str):
                yield each.value
