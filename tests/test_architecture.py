"""ARCHITECTURE.md's table of layers is that of the code: every module stands in it, and imports go down or sideways."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "mmdp"
MODULES = {path.relative_to(PACKAGE).as_posix(): path for path in PACKAGE.rglob("*.py")}
FOLDERS = ("demo/", "plots/")
"""Entered as a whole."""

TOP = ("__init__.py",)


def unit_of(module: str) -> str:
    """What the table calls it: a file, or the folder that it lies in."""
    return next((folder for folder in FOLDERS if module.startswith(folder)), module)


@cache
def layers() -> dict[str, int]:
    """Unit to layer, as the table says."""
    found: dict[str, int] = {}
    for line in (ROOT / "ARCHITECTURE.md").read_text().splitlines():
        if row := re.fullmatch(r"\| (\d) \| ([^|]+) \|.*\|", line):
            for unit in re.findall(r"`([\w/]+(?:\.py)?)`", row[2]):
                assert unit not in found, f"{unit} stands in the table twice"
                found[unit] = int(row[1])
    return found


def imports_of(path: Path, *, everywhere: bool) -> Iterator[str]:
    """Names of modules that a file imports: at its head, or everywhere; what only a type checker sees is left out."""
    tree = ast.parse(path.read_text())
    nodes: list[ast.AST] = list(ast.walk(tree)) if everywhere else list(tree.body)
    unseen = {
        id(node)
        for one in ast.walk(tree)
        if isinstance(one, ast.If) and ast.unparse(one.test) == "TYPE_CHECKING"
        for node in ast.walk(one)
    }
    for node in nodes:
        if id(node) in unseen:
            continue
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            yield from (f"{node.module}.{name.name}" for name in node.names)


def own(names: Iterator[str]) -> set[str]:
    """Those of the package, as files."""
    found = set()
    for name in names:
        if name.startswith("mmdp."):
            place = name.removeprefix("mmdp.").replace(".", "/")
            found |= {module for module in (f"{place}.py", f"{place}/__init__.py") if module in MODULES}
    return found


def test_every_module_has_its_layer():
    """And nothing stands in the table that is gone."""
    units = {unit_of(module) for module in MODULES} - set(TOP)
    assert units == set(layers())
    assert list(layers().values()) == sorted(layers().values())


@pytest.mark.parametrize("module", sorted(set(MODULES) - set(TOP)))
def test_imports_go_down_or_sideways(module):
    assert unit_of(module) in layers(), f"{module} has no layer in ARCHITECTURE.md: enter it there"
    higher = {
        f"{other} ({layers()[unit_of(other)]})"
        for other in own(imports_of(MODULES[module], everywhere=False))
        if unit_of(other) in layers() and layers()[unit_of(other)] > layers()[unit_of(module)]
    }
    assert not higher, f"{module} ({layers()[unit_of(module)]}) imports what stands above it"


def test_imports_make_no_circle():
    left = {module: own(imports_of(path, everywhere=False)) - {module} for module, path in MODULES.items()}
    while done := {module for module, needs in left.items() if not needs & left.keys()}:
        left = {module: needs for module, needs in left.items() if module not in done}
    assert not left


@pytest.mark.parametrize(
    ("library", "importers"),
    [
        ("matplotlib", "plots/"),
        ("obstore", "object_store.py"),
        ("urllib3", "web_store.py"),
        ("ray", "ray_"),
    ],
)
def test_only_they_import_it(library, importers):
    """Anywhere in a file; so it is loaded when it is used, and a change of it is met in one place."""
    whose = {
        module
        for module, path in MODULES.items()
        if any(name.split(".")[0] == library for name in imports_of(path, everywhere=True))
    }
    assert whose
    assert all(module.startswith(importers) for module in whose), whose


def test_a_row_is_built_without_what_only_others_need():
    """What a worker imports: no torch, no matplotlib, no Ray, no tokenizer."""
    code = "import sys, mmdp.row_builder; print(sorted(sys.modules))"
    loaded = ast.literal_eval(
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    )
    assert not {"torch", "matplotlib", "ray", "transformers", "datasets"} & set(loaded)
