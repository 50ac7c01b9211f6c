"""Reads the source: which file imports and calls what. Nothing is imported for it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("mlx_bulkhead", "protocol", "worker", "orchestrator")


@dataclass(frozen=True)
class Source:
    """One Python file of the packages."""

    path: str
    """Relative to the root of the repository, with `/`."""
    imports: frozenset[str]
    """Absolute names of modules, and of `module.name` for `from module import name`."""
    calls: frozenset[str]
    """Dotted names that are called or mentioned: `os.kill`, `eval`, `process.terminate`."""
    signals: frozenset[str]
    """Calls that signal a process through psutil, such as `process.kill`."""

    @property
    def package(self) -> str:
        return self.path.split("/", 1)[0]

    def imports_any(self, *names: str) -> set[str]:
        """Those of its imports that are one of these modules or lie below one."""
        return {one for one in self.imports if any(one == name or one.startswith(f"{name}.") for name in names)}

    @property
    def top_level(self) -> set[str]:
        """Top-level names of all imported modules."""
        return {one.split(".", 1)[0] for one in self.imports}


@cache
def sources() -> tuple[Source, ...]:
    """All Python files of the packages."""
    return tuple(read(path) for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py")))


def read(path: Path) -> Source:
    """One file, parsed."""
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text, str(path))
    relative = path.relative_to(ROOT)
    return Source(
        path=relative.as_posix(),
        imports=frozenset(_imports(tree, module_of(relative))),
        calls=frozenset(_mentions(tree)),
        signals=frozenset(_psutil_signals(tree)),
    )


def module_of(relative: Path) -> tuple[str, ...]:
    """The package that relative imports of a file start from, as name parts."""
    folder = relative.parent.parts
    return folder if folder[:1] == ("mlx_bulkhead",) else ("mlx_bulkhead", *folder)


def _imports(tree: ast.AST, package: tuple[str, ...]) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join((*parts, *([node.module] if node.module else [])))
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and _dotted(node.func).endswith(("import_module", "__import__")):
            first = node.args[0] if node.args else None
            if isinstance(first, ast.Constant) and isinstance(first.value, str):
                level = len(first.value) - len(first.value.lstrip("."))
                parts = package[: len(package) - level + 1] if level else ()
                yield ".".join((*parts, first.value.lstrip(".")))
            else:
                yield "<computed>"


def _mentions(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and (name := _dotted(node)):
            yield name
        elif isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name):
                yield node.func.id
            elif isinstance(node.func, ast.Attribute):
                yield f"().{node.func.attr}"


def _psutil_signals(tree: ast.AST) -> Iterator[str]:
    """Calls of `kill` and its like on what psutil made: directly, or through a name assigned or looped over."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and _uses_psutil(node.value):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.For) and _uses_psutil(node.iter) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in ("kill", "terminate", "send_signal"):
            name = _dotted(node.value)
            if name in names or (not name and _uses_psutil(node.value)):
                yield f"{name or '()'}.{node.attr}"


def _uses_psutil(node: ast.AST) -> bool:
    return any(isinstance(one, ast.Name) and one.id == "psutil" for one in ast.walk(node))


def _dotted(node: ast.AST) -> str:
    """`a.b.c` for such an expression, else nothing."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        inner = _dotted(node.value)
        return f"{inner}.{node.attr}" if inner else ""
    return ""
