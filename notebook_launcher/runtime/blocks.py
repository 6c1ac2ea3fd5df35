"""Which modules of a model are blocks: gathered, computed and given back one at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from notebook_launcher.core import fsdp_options
from notebook_launcher.core.registry import unknown_name

if TYPE_CHECKING:
    from notebook_launcher.core.fsdp_options import Settings

_CONTAINERS = (nn.ModuleList, nn.ModuleDict)  # they have no forward of their own, and so nothing to gather for


def choose(model: nn.Module, chosen: Settings) -> list[nn.Module]:
    """The modules that are gathered one at a time, inner ones first.

    One that shares a parameter with what is outside it is left to what holds both: sharded by itself, it would not be
    shared any more.
    """
    inside = [module for module in model.modules() if module is not model]
    if chosen.wrap == "NO_WRAP":
        return []
    if callable(chosen.wrap):
        found = [module for module in inside if chosen.wrap(module)]
    elif chosen.wrap == "SIZE_BASED_WRAP" or (chosen.wrap is None and chosen.min_num_params):
        found = _large(model, fsdp_options.size_limit(chosen))
    else:
        names = chosen.class_names or tuple(getattr(model, "_no_split_modules", None) or ())
        kinds = {type(module).__name__ for module in inside}
        if chosen.class_names and kinds.isdisjoint(names):
            raise unknown_name(f"transformer_cls_names_to_wrap for {type(model).__name__}:", names[0], kinds)
        found = [module for module in inside if type(module).__name__ in names]
    homes: dict[int, set[int]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            homes.setdefault(id(parameter), set()).add(id(module))

    def shares(block: nn.Module) -> bool:
        own = {id(module) for module in block.modules()}
        return any(homes[id(parameter)] - own for parameter in block.parameters())

    chosen_ones = [one for one in found if not isinstance(one, _CONTAINERS) and not shares(one)]
    return [one for one in reversed(chosen_ones) if next(one.parameters(), None) is not None]


def _large(model: nn.Module, limit: int) -> list[nn.Module]:
    """Outer modules first, as ``model.modules()``: those with ``limit`` parameters that no block inside them has."""
    found: list[nn.Module] = []

    def visit(module: nn.Module) -> int:
        left = sum(one.numel() for one in module.parameters(recurse=False))
        place = len(found)
        left += sum(visit(child) for child in module.children())
        if left < limit or module is model or isinstance(module, (*_CONTAINERS, nn.MultiheadAttention)):
            return left
        found.insert(place, module)
        return 0

    visit(model)
    return found
