# SPDX-License-Identifier: Apache-2.0
"""Predicted seconds of a step, and what bounds them. Pure; standard library only.

Facts: many drives are half duplex: both at once is slower than the sum of either alone, and taking
turns is at times faster than mixing. Update, matrix products (Newton-Schulz) and checksums share
the CPUs; all of them overlap transfers when the pipeline is on.

Consequence: the drive needs the lesser of turns (R / B_read + W / B_write) and mixing (the balanced
part at the mixed rate, the rest alone). A pipelined step takes the longer of drive and CPU.
"""

from __future__ import annotations

from dataclasses import dataclass

_CPU_PARTS = ("compute", "products", "checksum")


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Measured speeds in bytes per second; None where not known.

    Attributes:
        read: The drives together, reading only.
        write: Writing only.
        mixed: Read and written together, both at once in equal parts.
        compute: Bytes of RAM that the update kernel touches in a second, all threads.
        products: Operations of matrix products in a second, all threads.
        checksum: Bytes hashed in a second, all threads.
    """

    read: int | None = None
    write: int | None = None
    mixed: int | None = None
    compute: int | None = None
    products: int | None = None
    checksum: int | None = None


@dataclass(frozen=True, kw_only=True)
class PlanTime:
    """Predicted seconds of one step; None where a rate is not known.

    Attributes:
        read: Reads alone.
        write: Writes alone.
        device: Both, the better of taking turns and mixing.
        compute: The update kernels.
        products: The matrix products of the update: Muon's Newton-Schulz.
        checksum: Hashing what is read and written.
        step: The step, without forward and backward.
        bound: "read", "write", "mixed", "compute", "products", "checksum", or None when nothing is
            known.
        checksum_limits: Whether hashing is slower than the drive.
        rates: What it was predicted from.
    """

    read: float | None
    write: float | None
    device: float | None
    compute: float | None
    products: float | None
    checksum: float | None
    step: float | None
    bound: str | None
    checksum_limits: bool
    rates: Rates

    def exposed_seconds(
        self, read_bytes: int, write_bytes: int, buffered_bytes: int
    ) -> float | None:
        """Return the I/O that cannot hide behind forward and backward, however long they are.

        Args:
            read_bytes: Read in a step.
            write_bytes: Written in a step.
            buffered_bytes: RAM that holds read-ahead before, or dirty buffers after the step.
        """
        read = _seconds(max(0, read_bytes - buffered_bytes), self.rates.read)
        write = _seconds(max(0, write_bytes - buffered_bytes), self.rates.write)
        return None if read is None or write is None else read + write


def predict(
    rates: Rates,
    *,
    read_bytes: int,
    write_bytes: int,
    touched_bytes: int,
    checksum: bool,
    pipeline_read: bool,
    pipeline_write: bool,
    flops: int = 0,
) -> PlanTime:
    """Predict a step from the bytes it moves and touches, and the operations of its products.

    Args:
        rates: Measured speeds.
        read_bytes: Read from storage.
        write_bytes: Written to storage.
        touched_bytes: RAM traffic of the update.
        checksum: Whether what is read and written is hashed.
        pipeline_read: Whether reads overlap the update.
        pipeline_write: Whether writes overlap the update.
        flops: Operations of matrix products.
    """
    read, write = _seconds(read_bytes, rates.read), _seconds(write_bytes, rates.write)
    device = device_seconds(rates, read_bytes, write_bytes)
    compute = _seconds(touched_bytes, rates.compute)
    hashed = read_bytes + write_bytes if checksum else 0
    hashing = _seconds(hashed, rates.checksum)
    products = _seconds(flops, rates.products)
    cpu = (compute or 0.0) + (products or 0.0) + (hashing or 0.0)
    parts = {
        _device_bound(read_bytes, write_bytes): device,
        "compute": compute,
        "products": products,
        "checksum": hashing,
    }
    known = {name: value for name, value in parts.items() if value}
    return PlanTime(
        read=read,
        write=write,
        device=device,
        compute=compute,
        products=products,
        checksum=hashing,
        step=_step(device, read, write, cpu, (pipeline_read, pipeline_write)),
        bound=_bound(known, device, cpu),
        checksum_limits=bool(hashing and device and hashing > device),
        rates=rates,
    )


def _seconds(nbytes: int, rate: int | None) -> float | None:
    if not nbytes:
        return 0.0
    return None if rate is None else nbytes / rate


def device_seconds(rates: Rates, read_bytes: int, write_bytes: int) -> float | None:
    """Return the least time in which the drives move these bytes; None where it is not known."""
    read, write = _seconds(read_bytes, rates.read), _seconds(write_bytes, rates.write)
    if read is None or write is None:
        return None
    turns = read + write
    if rates.mixed is None:
        return turns
    both = min(read_bytes, write_bytes)
    rest_read = _seconds(read_bytes - both, rates.read) or 0.0
    rest_write = _seconds(write_bytes - both, rates.write) or 0.0
    return min(turns, 2 * both / rates.mixed + rest_read + rest_write)


def _device_bound(read_bytes: int, write_bytes: int) -> str:
    if not write_bytes:
        return "read"
    return "mixed" if read_bytes else "write"


def _step(
    device: float | None,
    read: float | None,
    write: float | None,
    cpu: float,
    pipeline: tuple[bool, bool],
) -> float | None:
    if device is None or read is None or write is None:
        return None
    if pipeline == (True, True):
        return max(device, cpu)
    if pipeline == (True, False):
        return max(read, cpu) + write
    if pipeline == (False, True):
        return read + max(write, cpu)
    return read + write + cpu


def _bound(known: dict[str, float], device: float | None, cpu: float) -> str | None:
    """Return the largest part of the side (drive or CPU) that is the longer."""
    if not known:
        return None
    if device is not None and device < cpu:
        known = {name: value for name, value in known.items() if name in _CPU_PARTS}
    elif device:
        known = {name: value for name, value in known.items() if name not in _CPU_PARTS}
    return max(known, key=lambda name: known[name])
