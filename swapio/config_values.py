# SPDX-License-Identifier: Apache-2.0
"""How the text and numbers of a configuration become values. Pure; standard library only.

Each parser takes the name of a setting and what was given, and returns the canonical value or
raises ConfigError naming the setting, the value and the accepted forms. Text and native values
are accepted alike, so that files, environment variables, flags and Python mean the same.
"""

from __future__ import annotations

import operator
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction

from swapio.errors import ConfigError

Parser = Callable[[str, object], object]

_BINARY = {"k": 1, "m": 2, "g": 3, "t": 4, "p": 5}
_NUMBER = re.compile(r"([+-]?[0-9][0-9_]*(?:\.[0-9]*)?(?:e[+-]?[0-9]+)?)\s*([a-z]*)", re.IGNORECASE)
_TRUE = frozenset({"true", "yes", "on", "1"})
_FALSE = frozenset({"false", "no", "off", "0"})
_NONE = frozenset({"none", "null", ""})

DTYPES = {
    "float32": "float32",
    "fp32": "float32",
    "float": "float32",
    "bfloat16": "bfloat16",
    "bf16": "bfloat16",
    "float16": "float16",
    "fp16": "float16",
    "half": "float16",
}


def parse_size(name: str, value: object, *, minimum: int = 0) -> int:
    """Return a whole number of bytes or elements.

    Accepted: ints, floats and text that are whole ("4096", "1e9", "1_000"), and with a unit: K, M,
    G, T, P, also as "Ki" or "KiB", are powers of 1024; "KB", "MB", "GB" are powers of 1000.

    Raises:
        ConfigError: Not a number, not whole, or below `minimum`.
    """
    number = _number(name, value)
    if number.denominator != 1:
        raise ConfigError(f"{name} is {value!r}, which is not a whole number")
    if number < minimum:
        raise ConfigError(f"{name} is {value!r}; want at least {minimum}")
    return int(number)


def _number(name: str, value: object) -> Fraction:
    if isinstance(value, str):
        return _text_number(name, value)
    if not isinstance(value, bool):
        if isinstance(value, float):
            if value - value == 0:
                return Fraction(value)
        else:
            try:
                return Fraction(operator.index(value))  # type: ignore[arg-type]
            except TypeError:
                pass
    raise ConfigError(f"{name} is {value!r}; want a number, or text like '8GiB', '512KiB', '1e9'")


def _text_number(name: str, text: str) -> Fraction:
    match = _NUMBER.fullmatch(text.strip())
    unit = match[2].lower() if match else ""
    prefix, suffix = unit[:1], unit[1:]
    known = unit in ("", "b") or (prefix in _BINARY and suffix in ("", "i", "ib", "b"))
    if match is None or not known:
        raise ConfigError(
            f"{name} is {text!r}; want a number, or one with a unit, as '8GiB' (1024 ** 3), "
            "'8GB' (1000 ** 3), '512KiB', '1e9'"
        )
    base = 1000 if suffix == "b" else 1024
    scale: int = base ** _BINARY.get(prefix, 0)
    return Fraction(match[1].replace("_", "")) * scale


def format_size(nbytes: int) -> str:
    """Return bytes in the largest binary unit: '8GiB', '1.50GiB', '512KiB'."""
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if abs(nbytes) >= 1024**power:
            whole, rest = divmod(nbytes, 1024**power)
            return f"{whole}{unit}" if not rest else f"{nbytes / 1024**power:.2f}{unit}"
    return f"{nbytes}B"


def size(minimum: int = 0, *, maximum: int | None = None, multiple: int = 1) -> Parser:
    """Return a parser of whole sizes or counts within limits."""

    def parse(name: str, value: object) -> int:
        number = parse_size(name, value, minimum=minimum)
        if maximum is not None and number > maximum:
            raise ConfigError(f"{name} is {value!r}; want at most {maximum}")
        if number % multiple:
            raise ConfigError(f"{name} is {value!r}; want a multiple of {multiple}")
        return number

    return parse


def rate(name: str, value: object) -> int:
    """Parse bytes per second: as a size, also written '3.4GB/s'. Below 1 is refused."""
    text = value.strip() if isinstance(value, str) else value
    if isinstance(text, str) and text.lower().endswith("/s"):
        text = text[:-2]
    number = int(_number(name, text))
    if number < 1:
        raise ConfigError(f"{name} is {value!r}; want at least one byte per second")
    return number


def seconds(name: str, value: object) -> float:
    """Parse seconds: a finite number of at least 0."""
    number = float(_number(name, value))
    if number < 0:
        raise ConfigError(f"{name} is {value!r}; want at least 0 seconds")
    return number


def flag(name: str, value: object) -> bool:
    """Parse true or false, also as text (true/false, yes/no, on/off, 1/0)."""
    text = value.strip().lower() if isinstance(value, str) else str(value).lower()
    if text in _TRUE:
        return True
    if text in _FALSE:
        return False
    raise ConfigError(f"{name} is {value!r}; want true or false")


def choice(*choices: str) -> Parser:
    """Return a parser of one of a few words; case and surrounding space do not matter."""

    def parse(name: str, value: object) -> str:
        text = value.strip().lower().replace("-", "_") if isinstance(value, str) else value
        if isinstance(text, str) and text in choices:
            return text
        wanted = ", ".join(repr(word) for word in choices)
        raise ConfigError(f"{name} is {value!r}; want one of {wanted}")

    return parse


def automatic(parser: Parser, *, word: str = "auto") -> Parser:
    """Return a parser that also accepts `word`."""

    def parse(name: str, value: object) -> object:
        if isinstance(value, str) and value.strip().lower() == word:
            return word
        try:
            return parser(name, value)
        except ConfigError as error:
            raise ConfigError(f"{error}, or {word!r}") from None

    return parse


def optional(parser: Parser) -> Parser:
    """Return a parser that also accepts None, or the text 'none'."""

    def parse(name: str, value: object) -> object:
        if value is None or (isinstance(value, str) and value.strip().lower() in _NONE):
            return None
        return parser(name, value)

    return parse


def dtype(*allowed: str) -> Parser:
    """Return a parser of dtype names; torch dtypes and the short names (bf16) are understood."""

    def parse(name: str, value: object) -> str:
        text = str(value).strip().lower().removeprefix("torch.")
        canonical = DTYPES.get(text)
        if canonical in allowed:
            return canonical
        raise ConfigError(f"{name} is {value!r}; want one of {', '.join(allowed)}")

    return parse


def names(name: str, value: object) -> tuple[str, ...]:
    """Parse a list of names: text with commas, or any collection of text. Order is kept."""
    given = value.split(",") if isinstance(value, str) else value
    if not isinstance(given, Iterable) or isinstance(given, Mapping):
        raise ConfigError(f"{name} is {value!r}; want names, as a list or separated by commas")
    items = sorted(given, key=str) if isinstance(given, set | frozenset) else list(given)
    if not all(isinstance(item, str) for item in items):
        raise ConfigError(f"{name} is {value!r}; want names, each of them text")
    stripped = [item.strip() for item in items]
    return tuple(dict.fromkeys(item for item in stripped if item))


def paths(name: str, value: object) -> str | tuple[str, ...] | None:
    """Parse one folder, a list of several, or None.

    `~` is expanded and relative paths are made absolute, so that a later chdir changes nothing.
    """
    if value is None:
        return None
    if isinstance(value, str | os.PathLike):
        given: Sequence[object] = [value]
    elif isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
        given = value
    else:
        raise ConfigError(f"{name} is {value!r}; want a folder, or a list of folders")
    found = tuple(_folder(name, item) for item in given)
    if not found:
        raise ConfigError(f"{name} is an empty list; want at least one folder, or None for RAM")
    if len(set(found)) < len(found):
        raise ConfigError(f"{name} is {value!r}; the same folder is given twice")
    return found[0] if len(found) == 1 else found


def _folder(name: str, value: object) -> str:
    text = os.fspath(value) if isinstance(value, str | os.PathLike) else value
    if not isinstance(text, str) or not text.strip() or "\0" in text:
        raise ConfigError(f"{name} contains {value!r}; want the path of a folder")
    # os.path, not pathlib: abspath also removes "..", and leaves symbolic links alone.
    return os.path.abspath(os.path.expanduser(text))  # noqa: PTH100, PTH111


def file_path(name: str, value: object) -> str:
    """Parse the path of one file; `~` is expanded and a relative path made absolute."""
    return _folder(name, value)


def cpus(name: str, value: object) -> tuple[int, ...]:
    """Parse CPU numbers: a collection of ints, or text as in /sys ('0-3,8'). Sorted."""
    if isinstance(value, str):
        found: list[int] = []
        for part in value.split(","):
            first, dash, last = part.strip().partition("-")
            low = parse_size(name, first)
            high = parse_size(name, last) if dash else low
            if high < low or high - low > 65535:
                raise ConfigError(f"{name} is {value!r}; want CPU numbers like '0-3,8'")
            found += range(low, high + 1)
    elif isinstance(value, Iterable):
        found = [parse_size(name, item) for item in value]
    else:
        raise ConfigError(f"{name} is {value!r}; want CPU numbers like '0-3,8' or [0, 1]")
    if not found:
        raise ConfigError(f"{name} is {value!r}; want at least one CPU number")
    return tuple(sorted(set(found)))


def weights(name: str, value: object) -> tuple[float, ...]:
    """Parse positive shares, one a path: a collection of numbers, or text with commas."""
    given = value.split(",") if isinstance(value, str) else value
    if not isinstance(given, Iterable) or isinstance(given, Mapping):
        raise ConfigError(f"{name} is {value!r}; want numbers, one for each path")
    found = tuple(float(_number(name, item)) for item in given)
    if not found or min(found) <= 0:
        raise ConfigError(f"{name} is {value!r}; want numbers above 0, one for each path")
    return found


def word(name: str, value: object) -> str:
    """Parse text that can be part of a file name: letters, digits, '.', '_' and '-'; or empty."""
    if isinstance(value, str) and re.fullmatch(r"(?!\.)[\w.-]*", value):
        return value
    raise ConfigError(f"{name} is {value!r}; want letters, digits, '.', '_' and '-'")
