"""Which parameter of a module belongs to which unit."""

from __future__ import annotations

from torch import nn

from .flat_parameter import ParamInfo


def canonical_names(module: nn.Module) -> dict[str, str]:
    """Every name under which a parameter can be found, to its first one: tied weights have several names."""
    first: dict[int, str] = {}
    return {
        name: first.setdefault(id(parameter), name)
        for name, parameter in module.named_parameters(remove_duplicate=False)
    }


def infos_of_units(
    module: nn.Module, block_class: type[nn.Module] | tuple[type[nn.Module], ...]
) -> tuple[list[ParamInfo], dict[nn.Module, list[ParamInfo]]]:
    """Parameters of the root and of each block.

    A parameter belongs to the innermost block around it. One that lies in several units (tied weights) belongs to the
    root, which is gathered whenever any of them computes.

    Returns:
        The infos of the root's parameters, and of those of each block that has any, in the module's order.

    Raises:
        ValueError: the module has no block inside, or no parameters.
    """
    named = dict(module.named_modules(remove_duplicate=False))  # a module in two places has two names
    blocks = {name: part for name, part in named.items() if part is not module and isinstance(part, block_class)}
    if not blocks:
        classes = block_class if isinstance(block_class, tuple) else (block_class,)
        wanted = ", ".join(wanted.__name__ for wanted in classes)
        raise ValueError(f"block_class must name modules within {type(module).__name__}, and it has no {wanted}")
    found: dict[int, ParamInfo] = {}
    owners: dict[int, set[nn.Module]] = {}
    for path, part in named.items():
        around = [name for name in blocks if path == name or path.startswith(f"{name}.")]
        owner = blocks[max(around, key=len)] if around else module
        for attribute, parameter in part._parameters.items():
            if parameter is not None:
                info = found.setdefault(
                    id(parameter), ParamInfo(f"{path}.{attribute}" if path else attribute, parameter, [])
                )
                info.places.append((part, attribute))
                owners.setdefault(id(parameter), set()).add(owner)
    if not found:
        raise ValueError(f"{type(module).__name__} has no parameters to shard")
    units: dict[nn.Module, list[ParamInfo]] = {module: [], **{block: [] for block in blocks.values()}}
    for key, info in found.items():
        units[owners[key].pop() if len(owners[key]) == 1 else module].append(info)
    root = units.pop(module)
    return root, {block: infos for block, infos in units.items() if infos}
