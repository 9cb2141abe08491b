# SPDX-License-Identifier: Apache-2.0
"""Text for the demo: a file, or the source of Python's own standard library."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch

from swapio.errors import ConfigError

TEXT_BYTES_MAX = 16 << 20


def load_text(file: str | None = None) -> tuple[torch.Tensor, str]:
    """Read the training text.

    Args:
        file: A file of any kind; None takes the standard library's modules, in order of name.

    Returns:
        The bytes as a tensor of uint8, at most 16 MiB of them, and where they came from.

    Raises:
        ConfigError: The file is missing, unreadable or empty.
    """
    if file is None:
        folder = Path(sysconfig.get_path("stdlib"))
        sources = sorted(folder.glob("*.py"))
        data = b"\n".join(path.read_bytes() for path in sources)
        where = f"{len(sources)} modules of Python's standard library in {folder}"
    else:
        path = Path(file).expanduser()
        try:
            with path.open("rb") as stream:
                data = stream.read(TEXT_BYTES_MAX)
        except OSError as error:
            raise ConfigError(f"--data {path}: {error.strerror}") from error
        where = str(path)
    if not data:
        raise ConfigError(f"--data: {where} holds no bytes to learn from")
    return torch.frombuffer(bytearray(data[:TEXT_BYTES_MAX]), dtype=torch.uint8), where


def batches(
    text: torch.Tensor, *, steps: int, batch: int, sequence: int, seed: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield `steps` pairs (inputs, targets) of shape (batch, sequence); the seed decides which."""
    if text.numel() <= sequence:
        raise ConfigError(f"the text has {text.numel()} bytes; it needs more than {sequence}")
    generator = torch.Generator().manual_seed(seed)
    offsets = torch.arange(sequence + 1)
    for _ in range(steps):
        starts = torch.randint(text.numel() - sequence, (batch, 1), generator=generator)
        window = text[starts + offsets].long()
        yield window[:, :-1], window[:, 1:]
