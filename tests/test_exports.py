# SPDX-License-Identifier: Apache-2.0
"""What the package exports: complete, sorted, documented, and one truth for the native boundary."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("swapio", "swapio.optim")


def sort_key(name: str) -> tuple[int, str]:
    return (0 if name.isupper() else 1 if name[0].isupper() else 2, name)


def public_names(module: ModuleType) -> set[str]:
    """Return what a module offers and did not merely import for its own use."""
    tools = {"annotations", "Any", "TYPE_CHECKING"}
    names = (name for name in dir(module) if not name.startswith("_") and name not in tools)
    return {name for name in names if not isinstance(getattr(module, name), ModuleType)}


@pytest.mark.parametrize("package", PACKAGES)
def test_all_is_complete_and_sorted(package: str) -> None:
    module = importlib.import_module(package)
    if not hasattr(module, "__all__"):
        pytest.skip(f"{package} exports nothing yet")
    exported = [name for name in module.__all__ if name != "__version__"]
    modules = {name for name in exported if isinstance(getattr(module, name), ModuleType)}
    assert set(exported) - modules == public_names(module)
    assert exported == sorted(exported, key=sort_key)
    assert len(set(exported)) == len(exported)


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_is_documented(package: str) -> None:
    module = importlib.import_module(package)
    for name in getattr(module, "__all__", ()):
        value = getattr(module, name)
        if isinstance(value, type) or callable(value) or isinstance(value, ModuleType):
            assert inspect.getdoc(value), f"{package}.{name} has no docstring"
        if isinstance(value, type) and value.__module__.startswith("swapio"):
            for method, function in vars(value).items():
                if inspect.isfunction(function) and not method.startswith("_"):
                    assert inspect.getdoc(getattr(value, method)), (
                        f"{name}.{method} has no docstring"
                    )


def test_native_declarations_agree() -> None:
    """The cdef header, its typed twin and the built module name the same functions."""
    header = ROOT / "csrc" / "aio" / "aio.cdef.h"
    if not header.exists():
        pytest.skip("the native engine is not in this tree")
    text = re.sub(r"/\*.*?\*/|//[^\n]*", "", header.read_text(), flags=re.S)
    declared = set(re.findall(r"\b(swapio_\w+)\s*\(", text))
    typed = set(re.findall(r"def (swapio_\w+)\(", (ROOT / "swapio" / "_aio.pyi").read_text()))
    lib = importlib.import_module("swapio._aio").lib
    built = {name for name in dir(lib) if name.startswith("swapio_")}
    assert declared
    assert declared == typed
    assert declared == built
