# SPDX-License-Identifier: Apache-2.0
"""What is known about one field of SwapConfig, carried as metadata of the dataclass field. Pure."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TypeVar

from swapio.config_values import Parser, choice

_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What is known about one field of SwapConfig.

    Attributes:
        parse: Makes the canonical value of whatever form was given, or raises ConfigError.
        doc: What it does, in whole sentences.
        unit: "bytes", "elements", "seconds", ... or the accepted words; for people.
        evidence: Why the default is what it is.
    """

    parse: Parser
    doc: str
    unit: str
    evidence: str


def setting(default: _T, parse: Parser, unit: str, doc: str, evidence: str) -> _T:
    """Return a dataclass field with what is known about it; typed as its default."""
    about = Setting(parse=parse, doc=doc, unit=unit, evidence=evidence)
    field: _T = dataclasses.field(default=default, metadata={"setting": about})
    return field


def one_of(default: _T, words: str, doc: str, evidence: str) -> _T:
    """Return a setting that is one of a few words, separated by spaces in `words`."""
    return setting(default, choice(*words.split()), words, doc, evidence)
