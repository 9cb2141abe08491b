# SPDX-License-Identifier: Apache-2.0
"""The oracles are independent: they import nothing of swapio, and agree with torch's optimizers."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from oracles.adamw import AdamWReference, check_elementwise, check_normwise, ulp

HERE = Path(__file__).parent
ORACLES = sorted(path for path in HERE.glob("*.py") if not path.name.startswith("test_"))


@pytest.mark.parametrize("path", ORACLES, ids=lambda path: path.stem)
def test_oracles_import_nothing_of_swapio(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            names = [node.module or ""]
        assert not [n for n in names if n.split(".")[0] in ("swapio", "optim", "support")]


def test_importing_the_oracles_loads_nothing_of_swapio() -> None:
    modules = ", ".join(f"oracles.{path.stem}" for path in ORACLES)
    code = f"import sys, {modules}; sys.exit(any(m.split('.')[0] == 'swapio' for m in sys.modules))"
    environment = {"PYTHONPATH": str(HERE.parent), "PATH": ""}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment, timeout=60)


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("maximize", [True, False])
def test_adamw_agrees_with_torch_in_float64(decoupled: bool, maximize: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    start = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in (7, 33)]
    params = [torch.nn.Parameter(tensor.clone()) for tensor in start]
    cls = torch.optim.AdamW if decoupled else torch.optim.Adam
    optimizer = cls(params, lr=0.01, weight_decay=0.1, maximize=maximize, foreach=False)
    reference = AdamWReference(
        start, lr=0.01, weight_decay=0.1, decoupled=decoupled, maximize=maximize
    )
    for step in range(5):
        grads: list[torch.Tensor | None] = [
            torch.randn(p.shape, generator=generator, dtype=torch.float64) for p in params
        ]
        grads[1] = grads[1] if step % 2 else None
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
        optimizer.step()
        reference.step(grads)
    assert reference.steps == [5, 2]
    for param, expected in zip(params, reference.params, strict=True):
        torch.testing.assert_close(param.detach(), expected, rtol=1e-13, atol=1e-15)


def test_elementwise_bound_accepts_fp32_and_refuses_a_wrong_epsilon() -> None:
    generator = torch.Generator().manual_seed(1)
    start = torch.zeros(1000)
    grads = [1e-7 * torch.randn(1000, generator=generator) for _ in range(3)]
    for eps, right in ((1e-8, True), (1.1e-8, False)):
        param = torch.nn.Parameter(start.clone())
        optimizer = torch.optim.AdamW([param], lr=0.01, eps=eps, foreach=False)
        reference = AdamWReference([start], lr=0.01)
        for grad in grads:
            param.grad = grad.clone()
            optimizer.step()
            reference.step([grad])
        if right:
            reference.check([param])
        else:
            with pytest.raises(AssertionError, match="times the bound"):
                reference.check([param])


def test_ulp_is_the_spacing_of_the_dtype() -> None:
    values = torch.tensor([1.0, 1.5, 2.0, 3e-39, 0.0, 1e30])
    above = torch.nextafter(values, torch.full_like(values, float("inf"))).double()
    normal = values.abs() >= torch.finfo(torch.float32).tiny
    assert torch.equal(ulp(values)[normal], (above - values.double())[normal])
    assert float(ulp(torch.tensor([1.0]), torch.bfloat16)) == 2.0**-7


def test_bounds_refuse() -> None:
    one = torch.ones(4)
    with pytest.raises(AssertionError, match="times the bound"):
        check_elementwise(one * 1.001, one.double(), num_steps=1, largest=one, moved=torch.zeros(4))
    check_normwise(one, one.double(), torch.zeros(4))
    with pytest.raises(AssertionError, match="off by"):
        check_normwise(one * 1.001, one.double(), torch.zeros(4))
