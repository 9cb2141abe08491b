# SPDX-License-Identifier: Apache-2.0
"""What the compiler made: each ISA object is vectorised, and no other object is wide.

A wide instruction in a generic object is a crash on a machine without it (an inline function that
the linker took from an AVX-512 object, say); an ISA object without them is a slow kernel.
"""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from swapio import _kernels

ROOT = Path(__file__).resolve().parents[2]
LEVELS = ("scalar", "avx2", "avx512")
OBJECTS = "CMakeFiles/swapio_kernels.dir/kernels"
FUSED = re.compile(r"\sv(?:fn?m(?:add|sub)|cvtne2?ps2?bf16|rsqrt|rcp)\w*\s")

pytestmark = [
    pytest.mark.skipif(platform.machine() != "x86_64", reason="reads x86-64 disassembly"),
    pytest.mark.skipif(shutil.which("objdump") is None, reason="needs objdump (binutils)"),
]


def is_plain_release(build: Path) -> bool:
    """Whether the build folder is of the kind that is installed: other variants differ."""
    settings = (build / "CMakeCache.txt").read_text(encoding="utf-8")
    wanted = ("SWAPIO_SANITIZE:BOOL=OFF", "SWAPIO_TSAN:BOOL=OFF", "CMAKE_BUILD_TYPE:STRING=Release")
    whole = all((build / OBJECTS / f"isa_{level}.cpp.o").exists() for level in LEVELS)
    return whole and all(setting in settings for setting in wanted)


def object_folder() -> Path:
    """The newest build of what is tested here; skips where only a wheel is installed."""
    builds = [path.parent for path in ROOT.glob("build/*/CMakeCache.txt")]
    folders = [build / OBJECTS for build in builds if is_plain_release(build)]
    if not folders:
        pytest.skip(f"no objects under {ROOT / 'build'}: the module was not built in this folder")
    return max(folders, key=lambda path: (path / "pool.cpp.o").stat().st_mtime)


def disassembly(name: str) -> str:
    path = object_folder() / f"{name}.o"
    command = ["objdump", "-d", "--no-show-raw-insn", path]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_isa_objects_are_vectorised() -> None:
    avx2, avx512 = disassembly("isa_avx2.cpp"), disassembly("isa_avx512.cpp")
    for text, register, suffix in ((avx2, "ymm", "ps"), (avx512, "zmm", "ps")):
        for instruction in ("vsqrt", "vdiv", "vmul", "vadd", "vsub"):
            wide = re.findall(rf"\s{instruction}{suffix}\s.*%{register}", text)
            assert len(wide) >= 36, f"{instruction} on {register}: {len(wide)}"  # one for each form
    assert "zmm" not in avx2
    assert re.search(r"\s(?:vsqrtss|vdivss)\s", avx2 + avx512) is None, "a scalar tail loop"


@pytest.mark.parametrize("name", ["isa_scalar.cpp", "isa_avx2.cpp", "isa_avx512.cpp"])
def test_nothing_is_fused_or_approximated(name: str) -> None:
    assert FUSED.search(disassembly(name)) is None


@pytest.mark.parametrize(
    "name", ["adam_spans", "data_spans", "dispatch", "pool", "symmetric", "isa_scalar"]
)
def test_generic_objects_are_not_wide(name: str) -> None:
    text = disassembly(f"{name}.cpp")
    assert re.search(r"%[yz]mm|%xmm(?:1[6-9]|2\d|3[01])\b|\sv[a-z]+\s.*%xmm", text) is None


def test_isa_objects_export_one_function_each() -> None:
    """And define nothing weak: the linker may keep a weak copy for the whole module."""
    if shutil.which("nm") is None:
        pytest.skip("needs nm (binutils)")
    for level in LEVELS:
        path = object_folder() / f"isa_{level}.cpp.o"
        listing = subprocess.run(["nm", "-C", path], capture_output=True, text=True, check=True)
        rows = [line.split(maxsplit=2)[-2:] for line in listing.stdout.splitlines()]
        weak = [name for kind, name in rows if kind in "WVu"]
        assert [name for name in weak if f"swapio::{level}::" not in name] == []
        assert [name for kind, name in rows if kind == "T"] == [
            f"swapio::{level}::fill_table(swapio::KernelTable&)"
        ]


@pytest.mark.parametrize(("level", "register"), [("avx2", "ymm"), ("avx512", "zmm")])
def test_products_are_fused_wide_and_kept_in_registers(level: str, register: str) -> None:
    text = disassembly(f"symmetric_{level}.cpp")
    fused = re.findall(rf"\svfmadd\w+ps\s.*%{register}", text)
    assert len(fused) >= 24 if level == "avx512" else len(fused) >= 12
    spilled = re.findall(rf"\svfmadd\w+ps\s.*\(%rsp.*%{register}", text)
    assert not spilled, "a sum lives in memory"
    if shutil.which("nm") is None:
        pytest.skip("needs nm (binutils)")
    path = object_folder() / f"symmetric_{level}.cpp.o"
    listing = subprocess.run(["nm", "-C", path], capture_output=True, text=True, check=True)
    rows = [line.split(maxsplit=2)[-2:] for line in listing.stdout.splitlines()]
    assert [name for kind, name in rows if kind in "WVuT"] == []
    assert [name for kind, name in rows if kind in "DR"] == [f"swapio::{level}::symmetric_ops"]


def test_the_module_says_what_it_runs() -> None:
    assert _kernels.simd_level() in _kernels.simd_levels()
    assert _kernels.simd_levels()[0] == "scalar"
