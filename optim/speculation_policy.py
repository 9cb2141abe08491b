# SPDX-License-Identifier: Apache-2.0
"""Whether early steps are worth it: forced, or decided by what recent steps cost. Pure.

    off, off, off | on, on, on | the faster of both, looked at again now and then

Two things make early steps a loss. Where a step is clipped or skipped its early steps were for
nothing: after two such steps in a row they pause, for twice as long each time. And where backward
needs the cores itself, as on a machine without accelerator, nothing is hidden: iterations with and
without are timed, and the faster way is kept.

Invariant: with "always" every step speculates.
"""

from __future__ import annotations

from swapio.errors import ConfigError

MODES = (False, "adaptive", "always")
UNDOS = ("exact", "algebraic")

_WINDOW = 3  # iterations that are timed for one side
_WORTH = 0.98  # on must take at most this share of off
_LOOK_AGAIN = 400  # iterations until the other side is timed again
_WASTED_MAX = 2
_PAUSE_MIN, _PAUSE_MAX = 16, 512


class Policy:
    """Decides for each step; see the module.

    Args:
        mode: "always" or "adaptive".

    Attributes:
        reason: Why the current step does not speculate, or "".
    """

    def __init__(self, mode: str) -> None:
        self._mode = mode
        self.reason = ""
        self._times: dict[bool, list[float]] = {False: [], True: []}
        self._is_on = mode == "always"
        self._left = _WINDOW
        self._is_settled = mode == "always"
        self._wasted = 0
        self._pause = 0
        self._next_pause = _PAUSE_MIN

    @property
    def is_on(self) -> bool:
        """Whether the current step speculates."""
        if self._mode == "always":
            return True
        return self._is_on and not self._pause

    def end_step(self, seconds: float | None, *, wasted: bool) -> None:
        """Take note of a step.

        Args:
            seconds: Since the step before; None if that says nothing.
            wasted: It was clipped or skipped, so that early steps had to be done again.
        """
        if self._mode == "always":
            return
        if self._pause:
            self._pause -= 1
            return
        if self._is_on:
            self._wasted = self._wasted + 1 if wasted else 0
            if self._wasted >= _WASTED_MAX:
                self._wasted = 0
                self._pause = self._next_pause
                self._next_pause = min(_PAUSE_MAX, 2 * self._next_pause)
                self.reason = "recent steps were clipped or skipped"
                return
            if not wasted:
                self._next_pause = _PAUSE_MIN
        if seconds is not None and not (self._is_on and wasted):
            self._times[self._is_on].append(seconds)
        self._left -= 1
        if self._left <= 0:
            self._turn()

    def _turn(self) -> None:
        """A window is over: time the other side, or keep the faster one for a while."""
        other = not self._is_on
        if not self._is_settled and not self._times[other]:
            self._set(other, _WINDOW)
            return
        if self._is_settled:
            self._times = {self._is_on: self._times[self._is_on][-_WINDOW:], other: []}
            self._is_settled = False
            self._set(other, _WINDOW)
            return
        on, off = (min(self._times[side], default=float("inf")) for side in (True, False))
        self._is_settled = True
        self._set(on <= _WORTH * off, _LOOK_AGAIN)

    def _set(self, is_on: bool, left: int) -> None:
        self._is_on, self._left = is_on, left
        self.reason = "" if is_on else "iterations are as fast without"


def check_mode(speculate: object, gradients: str, undo: str, ratio: float) -> None:
    """Raise ConfigError unless the arguments of an optimizer fit together."""
    if speculate not in MODES:
        raise ConfigError(f"speculate={speculate!r} is none of False, 'adaptive', 'always'")
    if undo not in UNDOS:
        raise ConfigError(f"undo={undo!r} is neither 'exact' nor 'algebraic'")
    if not 0.0 <= ratio <= 1.0:
        raise ConfigError(f"ratio={ratio!r} is no share from 0 to 1")
    if speculate and gradients != "stream":
        raise ConfigError("speculate needs gradients='stream': leave `gradients` out, or set it so")
