# SPDX-License-Identifier: Apache-2.0
"""The house rules, as tests: layering, sizes, names, and what the library must not do."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FILE_LINES_MAX = 500
FUNCTION_LINES_MAX = 70
COLUMNS_MAX = 100

# From the ground up. A module may import its own layer and those before it.
LAYERS: dict[str, tuple[str, ...]] = {
    "pure": ("errors", "align", "partition", "config", "config_*", "host_limits"),
    "native": ("_aio", "_kernels"),
    "engine": ("aio", "_aio_*"),
    "memory": ("buffers", "_buffers_*"),
    "storage": (
        *(
            "catalog",
            "checksum",
            "store",
            "filestore",
            "filesystem",
            "slots",
            "slotfiles",
            "tables",
        ),
        *("manifest", "commit", "commitlog", "committer", "holds", "leftovers", "locking"),
        *("provision", "recovery", "storefolders", "striping", "tasks", "transaction", "transfer"),
        "persistent",
        "verification",
    ),
    "policy": (
        *("residency", "plan", "plan_*", "subgroup", "views", "lifecycle", "access", "gradients"),
        *(
            "cache",
            "writebehind",
            "swapper",
            "pipeline",
            "provisional",
            "runtime",
            "runstats",
            "tracing",
        ),
        *("turns", "device_turns", "path_rates", "resume"),
    ),
    "durability": ("checkpoint", "checkpoint.*"),
    "optim": ("optim", "optim.*"),
    "edges": ("cli", "cli.*", "demo", "demo.*", "integrations", "integrations.*", "__main__"),
}
ORDER = list(LAYERS)
MAY_PRINT = ("swapio.cli", "swapio.demo", "swapio.__main__")
MAY_USE_DISTRIBUTED = (
    "swapio.optim.zero.comm",
    "swapio.optim.zero.dtensors",
    "swapio.integrations",
)
MAY_BLOCK = {"close", "join", "result", "wait", "drain", "acquire", "release", "unlink"}
ASSERT_MAY_CALL = {"isinstance", "len", "all", "any", "issubclass", "type"}
# The inner loops of these are single expressions over many fields; none so far.
LONG_FUNCTIONS_ALLOWED: frozenset[str] = frozenset()


def library_files() -> list[Path]:
    return sorted([*(ROOT / "swapio").rglob("*.py"), *(ROOT / "optim").rglob("*.py")])


def python_files() -> list[Path]:
    folders = ("swapio", "optim", "tests", "benchmarks", "examples", "scripts", "docs")
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def cpp_files() -> list[Path]:
    paths = (path for pattern in ("*.cpp", "*.h", "*.c") for path in (ROOT / "csrc").rglob(pattern))
    return sorted(paths)


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = ("swapio", *parts) if parts[0] == "optim" else parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def layer_of(module: str) -> str | None:
    """Return the layer of `swapio.x`, None for the package itself and for foreign modules."""
    if not module.startswith("swapio."):
        return None
    name = module.removeprefix("swapio.")
    for layer, patterns in LAYERS.items():
        if any(fnmatchcase(name, pattern) for pattern in patterns):
            return layer
    return None


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def imports_of(path: Path) -> Iterator[tuple[str, ast.stmt, bool]]:
    """Yield (absolute module or name, node, is it inside a function or under TYPE_CHECKING)."""
    package = (
        module_name(path) if path.name == "__init__.py" else module_name(path).rpartition(".")[0]
    )

    def walk(node: ast.AST, lazy: bool) -> Iterator[tuple[str, ast.stmt, bool]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                for alias in child.names:
                    yield alias.name, child, lazy
            elif isinstance(child, ast.ImportFrom):
                base = package.split(".")[: len(package.split(".")) - child.level + 1]
                module = (
                    ".".join([*base, *filter(None, [child.module])])
                    if child.level
                    else child.module
                )
                for alias in child.names:
                    yield f"{module}.{alias.name}", child, lazy
            inner = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            guard = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
            yield from walk(child, lazy or inner or guard)

    yield from walk(parse(path), False)


def own_module(name: str) -> str:
    """Strip an imported name to the module of swapio that it comes from."""
    while name.startswith("swapio.") and layer_of(name) is None:
        name = name.rpartition(".")[0]
    return name


@pytest.mark.parametrize("path", library_files(), ids=module_name)
def test_every_module_has_a_layer(path: Path) -> None:
    module = module_name(path)
    assert module == "swapio" or layer_of(module), f"{module}: name its layer in LAYERS above"


@pytest.mark.parametrize("path", library_files(), ids=module_name)
def test_imports_go_downwards(path: Path) -> None:
    layer = layer_of(module_name(path))
    if layer is None:
        return
    for name, node, lazy in imports_of(path):
        target = layer_of(own_module(name))
        if target is None or (lazy and layer == "edges"):
            continue
        where = f"{path.relative_to(ROOT)}:{node.lineno}: {layer} imports {name} of {target}"
        assert ORDER.index(target) <= ORDER.index(layer), where
        assert target != "optim" or layer == "optim", f"{where} outside a function"


@pytest.mark.parametrize("path", library_files(), ids=module_name)
def test_imports_of_guarded_modules(path: Path) -> None:
    module = module_name(path)
    for name, node, _ in imports_of(path):
        where = f"{path.relative_to(ROOT)}:{node.lineno}"
        first = name.split(".")[0]
        assert first != "optim", f"{where}: write swapio.optim"
        if name.startswith("swapio._aio.") or name == "swapio._aio":
            assert layer_of(module) == "engine", f"{where}: only the engine imports _aio"
        if name.startswith("torch.distributed"):
            assert module.startswith(MAY_USE_DISTRIBUTED), f"{where}: torch.distributed"
    uses = [
        node.lineno
        for node in ast.walk(parse(path))
        if isinstance(node, ast.Attribute) and ast.unparse(node).startswith("torch.distributed.")
    ]
    assert not uses or module.startswith(MAY_USE_DISTRIBUTED), (
        f"{module}: torch.distributed, {uses}"
    )


@pytest.mark.parametrize("path", library_files(), ids=module_name)
def test_library_neither_prints_nor_works_in_asserts_or_del(path: Path) -> None:
    module = module_name(path)
    for node in ast.walk(parse(path)):
        where = f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id == "print"
        ):
            assert module.startswith(MAY_PRINT), f"{where}: use logging"
        if isinstance(node, ast.Assert):
            calls = {ast.unparse(n.func) for n in ast.walk(node) if isinstance(n, ast.Call)}
            assert calls <= ASSERT_MAY_CALL, f"{where}: an assert calls {calls - ASSERT_MAY_CALL}"
        if isinstance(node, ast.FunctionDef) and node.name == "__del__":
            calls = {ast.unparse(n.func) for n in ast.walk(node) if isinstance(n, ast.Call)}
            calls = {call.rpartition(".")[2] for call in calls}
            assert not calls & MAY_BLOCK, f"{where}: __del__ may block in {calls & MAY_BLOCK}"


def docstring_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    first = node.body[0]
    has_docstring = ast.get_docstring(node) is not None
    return (first.end_lineno or first.lineno) - first.lineno + 1 if has_docstring else 0


@pytest.mark.parametrize("path", python_files(), ids=lambda p: str(p.relative_to(ROOT)))
def test_python_sizes_and_first_line(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    assert "# SPDX-License-Identifier: Apache-2.0" in lines[: 2 if lines[0][:2] == "#!" else 1]
    assert len(lines) <= FILE_LINES_MAX
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1 - docstring_lines(node)
            name = f"{module_name(path)}.{node.name}"
            assert length <= FUNCTION_LINES_MAX or name in LONG_FUNCTIONS_ALLOWED, (
                f"{name}: {length}"
            )


@pytest.mark.parametrize(
    "path", [*python_files(), *cpp_files()], ids=lambda p: str(p.relative_to(ROOT))
)
def test_no_notes_to_self(path: Path) -> None:
    words = re.compile(
        r"\b(" + "|".join(["TO" + "DO", "FIX" + "ME", "X" + "XX", "HA" + "CK"]) + r")\b"
    )
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        assert not words.search(line), f"{path.relative_to(ROOT)}:{number}: {line.strip()}"


def cpp_functions(text: str) -> Iterator[tuple[str, int]]:
    """Yield (header, number of lines) of each function body, told by its braces."""
    blank = lambda match: re.sub(r"[^\n]", " ", match.group())  # noqa: E731
    text = re.sub(
        r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])\'', blank, text, flags=re.S
    )
    text = re.sub(r"^[ \t]*#(?:[^\n]*\\\n)*[^\n]*", blank, text, flags=re.M)
    stack: list[tuple[str, int]] = []  # (header of a function, "" otherwise; line)
    header, line = "", 1
    for index, char in enumerate(text):
        line += char == "\n"
        if char == "{":
            is_initializer = text[index - 1 : index].isalnum() or text[index - 1] in "_>(,={"
            inside = any(name for name, _ in stack)
            is_function = (
                not inside
                and not is_initializer
                and "(" in header
                and not re.match(r"\s*(namespace|class|struct|enum|union|extern)\b", header)
            )
            stack.append((" ".join(header.split()) if is_function else "", line))
            header = header if is_initializer else ""
        elif char == "}" and stack:
            name, start = stack.pop()
            if name:
                yield name, line - start + 1
                header = ""
            elif not re.search(r"[\w)]\s*:", header) and text[index + 1 : index + 2] not in ",; ":
                header = ""
        elif char == ";":
            header = ""
        else:
            header += char


def test_cpp_functions_are_found() -> None:
    text = """namespace a {
class B : C {
  B(int x) : y_{x}, z_(1) {
    f();
  }
  int g() const;
};
int B::g() const {
  if (x) {
    return 1;
  }
  return 0;
}
}  // namespace a
"""
    assert [length for _, length in cpp_functions(text)] == [3, 6]


@pytest.mark.parametrize("path", cpp_files(), ids=lambda p: str(p.relative_to(ROOT)))
def test_cpp_sizes_and_first_line(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines()
    assert lines
    assert "SPDX-License-Identifier: Apache-2.0" in lines[0]
    assert len(lines) <= FILE_LINES_MAX
    assert max(map(len, lines)) <= COLUMNS_MAX
    for name, length in cpp_functions(text):
        assert length <= FUNCTION_LINES_MAX, f"{name}: {length} lines"
    if "tests" not in path.parts and not path.name.startswith("test_"):
        assert not re.search(r"\b(std::cout|std::cerr|f?printf)\b", text), (
            "the library never prints"
        )
