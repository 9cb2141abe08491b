# SPDX-License-Identifier: Apache-2.0
"""Which parameter Muon steps and which AdamW: the routing, and a table that shows it.

Matrices go to Muon. Embeddings, the output head and everything of fewer than two dimensions go to
AdamW. The logical shape decides, also where a parameter is sharded or a flat placeholder, and so
does each name under which a parameter is registered: a head that shares the embedding's weight is
stepped by AdamW.

Others differ. torch.optim.Muon takes two-dimensional parameters only and leaves routing to the
caller; the original Muon's example routes by `ndim >= 2` within the blocks of the model and steps
convolutions as [out, rest]; Moonlight routes by name ("embed_tokens", "lm_head"); DeepSpeed reads
an attribute `use_muon` that the user sets on each parameter, and steps what lacks it by something
else.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, TypeVar

import torch
from torch import nn

from swapio.errors import ConfigError
from swapio.optim.muon_math import MatrixLayout, MatrixView, matrix_layout

_log = logging.getLogger("swapio.optim")
_T = TypeVar("_T")

EMBEDDING_NAMES = frozenset(
    (
        *("embed", "embedding", "embeddings", "embed_tokens", "embed_positions", "wte", "wpe"),
        *("token_embedding", "token_embeddings", "tok_embedding", "tok_embeddings", "tok_emb"),
        *("position_embedding", "position_embeddings", "pos_embedding", "pos_embed", "pos_emb"),
        *("word_embeddings", "token_type_embeddings", "cls_token"),
    )
)
HEAD_NAMES = frozenset(
    (
        *("lm_head", "head", "heads", "output", "output_layer", "out_head", "embed_out"),
        *("unembed", "unembedding", "to_logits", "logits", "classifier", "score", "qa_outputs"),
    )
)


@dataclass(frozen=True, slots=True)
class Route:
    """Where one parameter goes, and why.

    Attributes:
        name: The first name under which the model registers it.
        shape: Its logical shape.
        algorithm: "muon", "adamw", or "frozen" for a parameter that needs no gradient.
        layout: The matrices that Muon sees; None for others.
        view: The setting behind `layout`.
        num_heads: The setting behind `layout`.
        reason: One phrase.
    """

    name: str
    shape: tuple[int, ...]
    algorithm: str
    layout: MatrixLayout | None
    view: MatrixView
    num_heads: int
    reason: str


class ParamGroups(list[dict[str, Any]]):
    """Parameter groups for `swapio.optim.Muon`, and the routing that made them."""

    def __init__(self, groups: Iterable[dict[str, Any]], routes: Sequence[Route]) -> None:
        """Keep the groups as the list's items, and `routes` in the model's order."""
        super().__init__(groups)
        self.routes = tuple(routes)

    def table(self) -> str:
        """Return one line per parameter: name, logical shape, route, matrices and reason."""
        return format_routes(self.routes)


def format_routes(routes: Sequence[Route]) -> str:
    """Return a text table of the routes, one line per parameter and a header."""
    rows = [("parameter", "shape", "route", "matrices", "because")]
    for route in routes:
        layout = route.layout
        matrices = f"{layout.num_matrices} of {layout.rows}x{layout.cols}" if layout else "-"
        shape = "x".join(map(str, route.shape)) or "scalar"
        rows.append((route.name, shape, route.algorithm, matrices, route.reason))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    return "\n".join(
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[4]])
        for row in rows
    )


def muon_param_groups(
    model: nn.Module,
    *,
    muon: Mapping[str, Any] | None = None,
    adamw: Mapping[str, Any] | None = None,
    num_heads: Mapping[str, int] | None = None,
    views: Mapping[str, MatrixView] | None = None,
    force_muon: Sequence[str] = (),
    force_adamw: Sequence[str] = (),
    logical_shapes: Mapping[str, Sequence[int]] | None = None,
    show: bool = True,
) -> ParamGroups:
    """Route each parameter of `model` to Muon or AdamW, and write the table to standard output.

    Patterns are those of fnmatch on the parameter's names ("*.q_proj.weight"); the first that
    matches counts.

    Args:
        model: The model; parameters that need no gradient are shown but not routed.
        muon: Settings of the Muon groups, such as lr and weight_decay.
        adamw: Settings of the AdamW group, such as lr, betas, eps and weight_decay.
        num_heads: Pattern -> number of blocks in which the rows are cut.
        views: Pattern -> "stacked" or "flat", see `matrix_layout`; convolutions are flat anyway.
        force_muon: Patterns of parameters that Muon shall step although they look like a head or
            an embedding. Parameters without matrices cannot be forced.
        force_adamw: Patterns of parameters that AdamW shall step.
        logical_shapes: Name -> shape of parameters that are flat placeholders or shards now.
            DTensors and DeepSpeed's `ds_shape` are understood without it.
        show: Whether to print the table; it is logged at INFO to "swapio.optim" otherwise.

    Returns:
        Groups with `params` as (name, parameter) pairs, `use_muon`, and for Muon groups
        `muon_view` and `num_heads`; one Muon group for each combination. Also `.routes`.

    Raises:
        ConfigError: naming the parameter whose rows cannot be cut, or the pattern that matches no
            parameter.
    """
    rules = _Rules(
        num_heads or {}, views or {}, tuple(force_muon), tuple(force_adamw), logical_shapes or {}
    )
    registered = _registered(model)
    rules.check_used([name for entry in registered for name in entry.names])
    routes: list[Route] = []
    members: dict[tuple[bool, MatrixView, int], list[tuple[str, nn.Parameter]]] = {}
    for parameter in registered:
        route = _route(parameter, rules)
        routes.append(route)
        if route.algorithm != "frozen":
            key = (route.algorithm == "muon", route.view, route.num_heads)
            members.setdefault(key, []).append((route.name, parameter.param))
    groups: list[dict[str, Any]] = []
    for (use_muon, view, heads), named in sorted(members.items(), key=lambda item: not item[0][0]):
        settings = dict((muon if use_muon else adamw) or {})
        if use_muon:
            settings |= {"muon_view": view, "num_heads": heads}
        groups.append({"params": named, "use_muon": use_muon, **settings})
    result = ParamGroups(groups, routes)
    if show:
        sys.stdout.write(result.table() + "\n")
    else:
        _log.info("routing of the parameters:\n%s", result.table())
    return result


@dataclass(slots=True)
class _Registered:
    """A parameter with every place where the model registers it."""

    param: nn.Parameter
    names: list[str]
    owners: list[nn.Module]
    is_output: bool = False


@dataclass(slots=True)
class _Rules:
    """What the caller asked for, by pattern."""

    num_heads: Mapping[str, int]
    views: Mapping[str, MatrixView]
    force_muon: Sequence[str]
    force_adamw: Sequence[str]
    logical_shapes: Mapping[str, Sequence[int]]

    def shape(self, entry: _Registered) -> tuple[int, ...]:
        for name in entry.names:
            if name in self.logical_shapes:
                return tuple(self.logical_shapes[name])
        return tuple(getattr(entry.param, "ds_shape", entry.param.shape))

    def check_used(self, names: Sequence[str]) -> None:
        """A pattern that matches nothing is a misspelled one, and would route silently."""
        patterns = [*self.num_heads, *self.views, *self.force_muon, *self.force_adamw]
        for pattern in [*patterns, *self.logical_shapes]:
            if not any(fnmatchcase(name, pattern) for name in names):
                raise ConfigError(f"{pattern!r} matches no parameter of the model: {names[:8]} ...")


def _lookup(table: Mapping[str, _T], names: Iterable[str], default: _T) -> _T:
    names = list(names)
    for pattern, value in table.items():
        if any(fnmatchcase(name, pattern) for name in names):
            return value
    return default


def _registered(model: nn.Module) -> list[_Registered]:
    """Return each parameter once, in the model's order."""
    entries: dict[int, _Registered] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, param in module.named_parameters(recurse=False):
            entry = entries.setdefault(id(param), _Registered(param, [], []))
            entry.names.append(f"{prefix}.{name}" if prefix else name)
            entry.owners.append(module)
    outputs: Callable[[], object] | None = getattr(model, "get_output_embeddings", None)
    head = outputs() if callable(outputs) else None
    for param in head.parameters(recurse=False) if isinstance(head, nn.Module) else ():
        if id(param) in entries:
            entries[id(param)].is_output = True
    if not any(_is_head(entry) for entry in entries.values()):
        _mark_output_by_size(list(entries.values()))
    return list(entries.values())


def _mark_output_by_size(entries: Sequence[_Registered]) -> None:
    """Without a telling name, a last linear layer as wide as a vocabulary is the output head."""
    sizes = {owner.num_embeddings for entry in entries for owner in entry.owners if _embeds(owner)}
    linear = [entry for entry in entries if any(isinstance(o, nn.Linear) for o in entry.owners)]
    matrices = [entry for entry in linear if entry.param.ndim == 2]
    if matrices and matrices[-1].param.shape[0] in sizes:
        matrices[-1].is_output = True


def _embeds(module: nn.Module) -> bool:
    return isinstance(module, nn.Embedding | nn.EmbeddingBag)


def _is_head(entry: _Registered) -> bool:
    """Whether the layer's own name, next to "weight", is one that output heads have.

    Inside numbered blocks "output" and the like are ordinary layers ("layers.3.attn.output").
    """
    parts = [name.split(".") for name in entry.names]
    outside = [part for part in parts if not any(piece.isdigit() for piece in part)]
    return entry.is_output or any(HEAD_NAMES.intersection(part[-2:]) for part in outside)


def _is_embedding(entry: _Registered) -> bool:
    layers = {part for name in entry.names for part in name.split(".")[-2:]}
    return any(map(_embeds, entry.owners)) or bool(layers & EMBEDDING_NAMES)


def _route(entry: _Registered, rules: _Rules) -> Route:
    shape = rules.shape(entry)
    name = entry.names[0]

    def to(algorithm: str, reason: str) -> Route:
        return Route(name, shape, algorithm, None, "auto", 1, reason)

    def matches(patterns: Sequence[str]) -> bool:
        return _lookup(dict.fromkeys(patterns, True), entry.names, False)

    if not entry.param.requires_grad:
        return to("frozen", "needs no gradient")
    if len(shape) < 2:
        return to("adamw", f"{len(shape)} dimensions")
    if not torch.is_floating_point(entry.param):
        raise ConfigError(
            f"{name}: optimizers step floating point parameters, not {entry.param.dtype}"
        )
    if matches(rules.force_adamw):
        return to("adamw", "force_adamw")
    forced = matches(rules.force_muon)
    if not forced and _is_embedding(entry):
        return to("adamw", "embedding")
    if not forced and _is_head(entry):
        return to("adamw", "output head")
    convolution = any(isinstance(owner, nn.modules.conv._ConvNd) for owner in entry.owners)
    default: MatrixView = "flat" if convolution else "auto"
    view = _lookup(rules.views, entry.names, default)
    heads = _lookup(rules.num_heads, entry.names, 1)
    layout = matrix_layout(shape, view=view, num_heads=heads, name=name)
    reason = "force_muon" if forced else "convolution" if convolution else "matrix"
    return Route(name, shape, "muon", layout, view, heads, reason)
