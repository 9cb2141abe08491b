# SPDX-License-Identifier: Apache-2.0
"""Write docs/configuration.md from what the code knows about each setting.

python docs/make_configuration.py            writes the page
python docs/make_configuration.py --check    exits with 1 if the page is not up to date
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from swapio.config import SwapConfig, field_names, setting_of
from swapio.config_deepspeed_keys import OPTIMIZER_PARAMS, SECTIONS, TOP_LEVEL
from swapio.config_deepspeed_rules import Rule
from swapio.config_flags import flag_of
from swapio.config_sources import variable_of
from swapio.config_values import format_size

PAGE = Path(__file__).with_name("configuration.md")

INTRODUCTION = """\
# Configuration

<!-- Written by docs/make_configuration.py; change the code, then run it. -->

`swap=` of every optimizer takes a folder, a configuration file (`.json`, `.toml`), a dict, a
`swapio.SwapConfig`, or `None` for state in RAM:

```python
swapio.optim.AdamW(model.parameters(), lr=1e-3, swap="/nvme/run1")
swapio.optim.AdamW(model.parameters(), lr=1e-3, swap="swap.toml")
swapio.optim.AdamW(model.parameters(), lr=1e-3, swap={"path": "/nvme/run1", "host_memory": "8GiB"})
```

```toml
# swap.toml; a section [swapio] of a larger file, or [tool.swapio] of pyproject.toml, will do too
path = "/nvme/run1"
host_memory = "8GiB"
```

## Which value wins

Lowest first: the default; a file, dict or Python argument; a `SWAPIO_*` variable; a command-line
flag. An empty variable is as if it were not set, and `SWAPIO_PATH` does not move state to storage
where `swap=None` (or a path of None) keeps it in RAM. Several paths in a variable or flag are
separated by `:`. `swapio config show FILE` prints the effective values and where each came from.

Sizes are numbers, or text with a unit: `"8GiB"`, `"8Gi"` and `"8G"` are 8 x 1024^3, `"8GB"` is
8 x 1000^3; `"1e9"` and `"1_000_000"` are understood. A key that is not known is an error that names
the nearest known one.

Scripts with argparse get a flag for every setting:

```python
from swapio import config_flags

config_flags.add_arguments(parser)                       # --swap-path, --swap-host-memory, ...
config = config_flags.from_arguments(parser.parse_args())
```

## Settings
"""

DEEPSPEED = """\
## DeepSpeed's names

A DeepSpeed configuration is read as it is: a whole `ds_config.json`, some of its sections, or the
bare keys of `offload_optimizer`, `aio`, `zero_optimization` and `bf16`. Each key is mapped, noted
(it has no say over optimizer state here), or refused with the reason; swapio's own names may stand
beside them, or in a section `swapio`, and win. `"auto"` leaves a value to swapio or the trainer,
and `null` is as if the key were not there. Where a switch is absent swapio's default holds, not
DeepSpeed's. Parts that are no setting (optimizer, scaler, ZeRO stage) are returned by
`swapio.config_deepspeed.map_deepspeed_file`.
"""


def render() -> str:
    """Return the page."""
    lines = [INTRODUCTION, *_settings(), DEEPSPEED, *_deepspeed()]
    return "\n".join(lines).rstrip() + "\n"


def _settings() -> Iterator[str]:
    for name in field_names():
        about = setting_of(name)
        yield f"### `{name}`\n"
        yield f"{about.doc}\n"
        yield f"- Unit: {about.unit}"
        reason = about.evidence.partition(": ")[2]
        yield f"- Default: `{_default(name)}`. Why: {reason}"
        yield f"- Variable `{variable_of(name)}`, flag `{flag_of(name)}`\n"


def _default(name: str) -> str:
    value = SwapConfig.__dataclass_fields__[name].default
    is_bytes = setting_of(name).unit.startswith("bytes")
    if is_bytes and isinstance(value, int):
        return f"{value} ({format_size(value)})"
    return repr(value)


def _deepspeed() -> Iterator[str]:
    sections: Mapping[str, Mapping[str, Rule]] = {
        **{name: rules for name, rules in SECTIONS.items() if name != "bfloat16"},
        "optimizer.params": OPTIMIZER_PARAMS,
        "top level": TOP_LEVEL,
    }
    for section, rules in sections.items():
        yield f"### `{section}`\n" if section != "top level" else "### Top level\n"
        yield "| key | what happens | to what, or why |"
        yield "| --- | --- | --- |"
        for (outcome, text), keys in _alike(rules).items():
            yield f"| {', '.join(f'`{key}`' for key in keys)} | {outcome} | {text} |"
        yield ""
    yield (
        "`optimizer.type` is Adam, AdamW or Muon; DeepSpeed's Adam is AdamW unless `adam_w_mode` "
        "is false, as there. Other types are refused."
    )


def _alike(rules: Mapping[str, Rule]) -> dict[tuple[str, str], list[str]]:
    """Return keys that have the same fate together."""
    found: dict[tuple[str, str], list[str]] = {}
    for key, rule in rules.items():
        found.setdefault((rule.outcome, rule.text), []).append(key)
    return found


def main() -> int:
    """Write or check the page."""
    parser = argparse.ArgumentParser(description="Write docs/configuration.md from the code.")
    parser.add_argument("--check", action="store_true", help="only say whether it is up to date")
    args = parser.parse_args()
    page = render()
    if args.check:
        return 0 if PAGE.exists() and PAGE.read_text(encoding="utf-8") == page else 1
    PAGE.write_text(page, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
