"""What the project's Python files say, read with ast: their names and imports."""

import ast
import os
from pathlib import Path


def within(module, name):
    return module == name or module.startswith(name + ".")


def name_of(path, root):
    return ".".join(path.relative_to(root).with_suffix("").parts)


def sources(root):
    """Every Python file under `root` but tests, __init__.py, and those in hidden folders and virtual environments."""
    found = []
    for folder, inside, files in os.walk(root):
        is_top = Path(folder) == root
        inside[:] = sorted(
            name for name in inside
            if name[0] != "." and not (is_top and name == "tests") and not Path(folder, name, "pyvenv.cfg").exists()
        )  # fmt: skip
        found += [Path(folder, name) for name in sorted(files) if name.endswith(".py") and name != "__init__.py"]
    return found


def imports_of(path):
    """Yield the names that `path` imports, at the top or inside functions."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}:{node.lineno}: write the import in full, not relative"
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def bound_in(path):
    """Yield the names that a module binds: what it imports, defines and assigns."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from (alias.asname or alias.name for alias in node.names)


def names_of(path):
    """Yield the names that `path` uses, and its strings, which may be annotations or names of attributes."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        for field in ("id", "attr", "name", "value"):
            if isinstance(text := getattr(node, field, None), str):
                yield text
