# SPDX-License-Identifier: Apache-2.0
"""Public names say what they take, what they raise, and whether they block.

Public: what swapio and swapio.optim export, swapio.optim.kernels, the integrations, and the public
methods of those classes that swapio defines, inherited ones too.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator

import pytest

MODULES = (
    "swapio",
    "swapio.optim",
    "swapio.optim.kernels",
    "swapio.config_flags",
    "swapio.integrations.accelerate",
    "swapio.integrations.deepspeed",
    "swapio.integrations.deepspeed.async_io",
    "swapio.integrations.deepspeed.cpu_adam",
    "swapio.integrations.deepspeed.pinned",
)
ARGUMENTS_WITHOUT_SECTION_MAX = 3
# Words by which a docstring says whether the caller waits.
BLOCKING = re.compile(
    r"block|at once|never wait|without wait|waits? (for|until)|wait\b|cheap|GIL|start to"
    r"|in the background",
    re.IGNORECASE,
)
# What moves bytes, or may: by the name of the method.
TRANSFERS = {
    *("pread", "pwrite", "submit", "fsync", "drain", "open", "close", "save", "load", "recover"),
    *("swap_in", "swap_out", "prefetch", "writeback", "commit", "flush", "synchronize", "step"),
    *("state_dict", "load_state_dict", "read", "write", "wait", "allocate", "result", "register"),
    *("tag_resident", "untag_resident", "set_order", "release", "add_sub_group"),
}


def public_functions() -> Iterator[tuple[str, object]]:
    """Yield (name, function or class) of everything public, once."""
    seen: set[int] = set()
    for module_name in MODULES:
        module = importlib.import_module(module_name)
        names = getattr(module, "__all__", [n for n in vars(module) if not n.startswith("_")])
        for name in names:
            value = getattr(module, name)
            if not getattr(value, "__module__", "").startswith("swapio") or id(value) in seen:
                continue
            seen.add(id(value))
            if inspect.isfunction(value) or inspect.isclass(value):
                yield f"{module_name}.{name}", value
            if inspect.isclass(value):
                yield from methods(f"{module_name}.{name}", value, seen)


def methods(prefix: str, kind: type, seen: set[int]) -> Iterator[tuple[str, object]]:
    for base in kind.__mro__:
        if not base.__module__.startswith("swapio"):
            continue
        for name, value in vars(base).items():
            if name.startswith("_") or not inspect.isfunction(value) or id(value) in seen:
                continue
            seen.add(id(value))
            yield f"{prefix}.{name}", getattr(kind, name)


FUNCTIONS = dict(public_functions())


@pytest.mark.parametrize("name", FUNCTIONS)
def test_public_names_say_what_they_do(name: str) -> None:
    value = FUNCTIONS[name]
    text = inspect.getdoc(value) or ""
    assert text, f"{name} has no docstring"
    first = text.splitlines()[0]
    assert len(first) <= 100
    assert first.rstrip().endswith((".", ":", "?")) or "\n\n" not in text, first
    if inspect.isclass(value):
        return
    arguments = [
        argument
        for argument in inspect.signature(value).parameters.values()  # type: ignore[arg-type]
        if argument.name not in ("self", "_") and argument.kind is not argument.VAR_POSITIONAL
    ]
    many = len(arguments) > ARGUMENTS_WITHOUT_SECTION_MAX
    known = all(argument.name in text for argument in arguments)
    refers = re.search(r"\b[Ss]ee\b|\b[Aa]s (for )?[\w.`]+", text) is not None
    assert not many or "Args:" in text or known or refers, (
        f"{name}: its arguments are not described"
    )
    if name.rpartition(".")[2] in TRANSFERS and ".optim.kernels" not in name:
        described = BLOCKING.search(text) or BLOCKING.search(class_doc(value)) or refers
        assert described, f"{name}: does it block?"


def class_doc(function: object) -> str:
    """Return the docstrings of the class and module that a method was defined in."""
    module = importlib.import_module(getattr(function, "__module__", "swapio"))
    owner = getattr(module, getattr(function, "__qualname__", "").partition(".")[0], None)
    return (inspect.getdoc(owner) or "") + (module.__doc__ or "")


def test_there_is_something_to_look_at() -> None:
    assert len(FUNCTIONS) > 100
    assert "swapio.Engine.pread" in FUNCTIONS
