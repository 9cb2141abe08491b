# SPDX-License-Identifier: Apache-2.0
"""A training engine with an optimizer of its own, AdEMAMix, on swapio's pipelined swapper.

    python examples/custom_engine.py --swap-path /nvme/run1 --swap-durability step --steps 20
    (kill -9 it at any time, and run it again: it goes on at the step after the last committed one)

swapio knows nothing of the rule: a sub-group is a few named records, here `master`, `fast`, `slow`
and `square`, fp32, of the same length. docs/engines.md explains each part.
"""

from __future__ import annotations

import argparse

import torch

import swapio.config_flags
from swapio import GroupRequest, RecordSpec, SwapRuntime
from swapio.partition import pack

BETAS = (0.9, 0.999, 0.9999)
MOMENTS = ("fast", "slow", "square")


class AdEMAMixEngine:
    """Owns a model's optimizer state: two first moments, a second one, and fp32 masters.

    Args:
        model: bf16 or fp32 parameters on the CPU.
        config: Where the state lives, in how much memory, how durable.
        lr: Learning rate.
        alpha: Weight of the slow moment.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        config: swapio.SwapConfig,
        *,
        lr: float = 1e-3,
        alpha: float = 5.0,
    ) -> None:
        self.params = [p for p in model.parameters() if p.requires_grad]
        self.lr, self.alpha = lr, alpha
        sizes = [p.numel() for p in self.params]
        self.groups = {f"group-{plan.index}": plan for plan in pack(sizes, config.sub_group_numel)}
        requests = [self._request(key) for key in self.groups]
        self.runtime = SwapRuntime(config, requests, resume=config.durability != "checkpoint")
        self.swapper = self.runtime.swapper
        recovered = self.runtime.recovered
        self.num_steps = recovered.step if recovered else 0
        self.payload = recovered.payload if recovered else b""
        if recovered:
            self._publish_masters()

    def _request(self, key: str) -> GroupRequest:
        numel = self.groups[key].numel

        def first_master(start: int, out: torch.Tensor) -> None:
            for param, piece in self._pieces(key, start, start + out.numel()):
                out[piece].copy_(param)

        records = {"master": RecordSpec((numel,), torch.float32, first_master)}
        records |= {name: RecordSpec((numel,), torch.float32, 0.0) for name in MOMENTS}
        return GroupRequest(key, records)

    def _pieces(self, key: str, start: int, stop: int, *, of_gradients: bool = False):
        """Yield (part of a flat parameter, slice of [start, stop)) for a range of a sub-group."""
        for fragment in self.groups[key].fragments:
            low, high = max(start, fragment.sub_group_offset), min(stop, fragment.sub_group_end)
            if low < high:
                param = self.params[fragment.param_index]
                tensor = param.grad if of_gradients else param.data
                first = fragment.param_offset + low - fragment.sub_group_offset
                yield tensor.view(-1)[first : first + high - low], slice(low - start, high - start)

    @torch.no_grad()
    def step(self, payload: bytes = b"") -> None:
        """Update every parameter from its .grad; writes go on while the next forward runs."""
        step = self.num_steps + 1
        order = list(self.groups) if step % 2 else list(self.groups)[::-1]
        self.swapper.set_order(order)
        try:
            for key in order:
                with self.swapper.swap_in(key) as view:
                    for chunk in view.chunks():
                        self._update(key, chunk, step)
                        chunk.mark_dirty()
            self.swapper.commit(step, payload)
        except BaseException as error:
            self.swapper.fail(error)  # some sub-groups are a step ahead: nothing may go on
            raise
        self.num_steps = step

    def _update(self, key: str, chunk, step: int) -> None:
        grad = torch.empty(chunk.numel)
        for source, piece in self._pieces(key, chunk.start, chunk.stop, of_gradients=True):
            grad[piece].copy_(source)
        fast, slow, square, master = (chunk[name] for name in (*MOMENTS, "master"))
        fast.lerp_(grad, 1 - BETAS[0])
        square.mul_(BETAS[1]).addcmul_(grad, grad, value=1 - BETAS[1])
        slow.lerp_(grad, 1 - BETAS[2])
        root = (square / (1 - BETAS[1] ** step)).sqrt_().add_(1e-8)
        master.sub_(
            (fast / (1 - BETAS[0] ** step)).add_(slow, alpha=self.alpha).div_(root), alpha=self.lr
        )
        for target, piece in self._pieces(key, chunk.start, chunk.stop):
            target.copy_(master[piece])

    @torch.no_grad()
    def _publish_masters(self) -> None:
        for key, plan in self.groups.items():
            master = self.swapper.read(key, "master")
            for target, piece in self._pieces(key, 0, plan.numel):
                target.copy_(master[piece])

    def close(self) -> None:
        """Wait for all writes; committed state stays, other files are removed."""
        self.runtime.close()


def train(args: argparse.Namespace, config: swapio.SwapConfig) -> torch.Tensor:
    torch.manual_seed(1)
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 1024), torch.nn.Tanh(), torch.nn.Linear(1024, 512)
    )
    model.bfloat16()
    engine = AdEMAMixEngine(model, config)
    for step in range(engine.num_steps, args.steps):
        inputs = torch.randn(8, 64, generator=torch.Generator().manual_seed(step)).bfloat16()
        loss = (model(inputs) - inputs.sum(1, keepdim=True)).float().square().mean()
        loss.backward()
        engine.step(payload=f"loss {loss.item():.6f}".encode())
        model.zero_grad()
        print(f"step {engine.num_steps} loss {loss.item():.6f}", flush=True)
    engine.close()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--steps", type=int, default=20, help="steps in total")
    parser.add_argument("--weights", help="save the trained weights to this file")
    swapio.config_flags.add_arguments(parser)
    args = parser.parse_args()
    weights = train(args, swapio.config_flags.from_arguments(args))
    if args.weights:
        torch.save(weights, args.weights)


if __name__ == "__main__":
    main()
