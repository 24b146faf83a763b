"""Training in 16 bits with float32 masters, without sharding: the 16 bytes a parameter that ZeRO divides."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

#: Most elements whose gradients are widened to float32 at one time: 128 MiB.
ELEMENTS_AT_A_TIME = 2**25


class MasterWeightOptimizer:
    """An optimizer that keeps a float32 copy of each 16-bit parameter and steps that one.

    A bfloat16 weight has 8 significant bits: a step smaller than 1/512 of it is lost in rounding. So the steps add up
    in a float32 master, and the parameter is its rounded copy (Micikevicius et al. 2018, section 3.1). With Adam, this
    is 2 + 2 bytes of weight and gradient, and 4 + 4 + 4 of master, momentum and variance (Rajbhandari et al. 2020,
    section 3.1).

    Parameters of at least 32 bits are their own masters. Gradients are widened a part of the parameters at a time, so
    that no float32 gradient of the whole model ever exists.

    Args:
        params: parameters, or dictionaries of parameter groups, as optimizers take them.
        optimizer_class: of ``torch.optim``.
        **kwargs: for the optimizer.

    ``optimizer`` is the optimizer over the masters, for learning-rate schedules; ``param_groups`` is its.

    Raises:
        TypeError: a parameter that is not floating point.
        ValueError: no parameter at all.
    """

    def __init__(
        self, params: Iterable[Any], optimizer_class: type[torch.optim.Optimizer] = torch.optim.AdamW, **kwargs: Any
    ) -> None:
        groups = list(params)
        if not groups:
            raise ValueError("params must hold at least one parameter, got none")
        if not isinstance(groups[0], dict):
            groups = [{"params": groups}]
        groups = [dict(group) for group in groups]
        self.parameters: list[Tensor] = []
        self.masters: list[Tensor] = []
        for group in groups:
            members = [group["params"]] if isinstance(group["params"], Tensor) else list(group["params"])
            masters = [_master_of(parameter) for parameter in members]
            self.parameters += members
            self.masters += masters
            group["params"] = masters
        self.optimizer = optimizer_class(groups, **kwargs)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Groups of the optimizer over the masters; change ``lr`` here."""
        return self.optimizer.param_groups

    @torch.no_grad()
    def step(self) -> None:
        """Step the masters by the parameters' gradients, and round them into the parameters.

        Parameters without gradient stay as they are. The gradients stay for :meth:`zero_grad`.
        """
        gradients = [parameter.grad for parameter in self.parameters]
        for master in self.masters:
            master.grad = None
        for part in self._parts(gradients):
            for k in part:
                self.masters[k].grad = gradients[k].to(self.masters[k].dtype)
            self.optimizer.step()  # of those that have a gradient: this part
            for k in part:
                self.masters[k].grad = None
                if self.masters[k] is not self.parameters[k]:
                    self.parameters[k].copy_(self.masters[k])
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient

    def _parts(self, gradients: list[Tensor | None]) -> Iterator[list[int]]:
        """Numbers of the parameters that have gradients, so many at a time that a part is small."""
        part: list[int] = []
        elements = 0
        for k, gradient in enumerate(gradients):
            if gradient is None:
                continue
            if part and elements + gradient.numel() > ELEMENTS_AT_A_TIME:
                yield part
                part, elements = [], 0
            part.append(k)
            elements += gradient.numel()
        if part:
            yield part

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the parameters' gradients, or fill them with zeros."""
        for parameter in self.parameters:
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.zero_()

    def memory(self) -> dict[str, int]:
        """Bytes kept, by component: ``weights``, ``gradients``, ``masters``, and each tensor of the optimizer's state.

        A parameter that is its own master counts as a weight only.
        """
        own = [m for p, m in zip(self.parameters, self.masters, strict=True) if m is not p]
        kept = {
            "weights": _bytes(self.parameters),
            "gradients": _bytes(p.grad for p in self.parameters if p.grad is not None),
            "masters": _bytes(own),
        }
        for state in self.optimizer.state.values():
            for key, value in state.items():
                if isinstance(value, Tensor) and value.ndim:
                    kept[key] = kept.get(key, 0) + _bytes([value])
        return kept

    def state_dict(self) -> dict[str, Any]:
        """The masters in order, and the state of the optimizer over them."""
        return {"masters": [master.detach() for master in self.masters], "optimizer": self.optimizer.state_dict()}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take masters and optimizer state back; the parameters become the masters' rounded copies.

        Raises:
            ValueError: the number of masters, or the shape of one, is another.
        """
        shapes, saved = [tuple(m.shape) for m in self.masters], [tuple(m.shape) for m in state["masters"]]
        if shapes != saved:
            raise ValueError(f"the masters must have shapes {shapes}, got {saved}")
        self.optimizer.load_state_dict(state["optimizer"])
        for parameter, master, value in zip(self.parameters, self.masters, state["masters"], strict=True):
            master.copy_(value)
            parameter.copy_(master)


def _master_of(parameter: Tensor) -> Tensor:
    """A float32 copy of a 16-bit parameter; a wider parameter itself."""
    if not parameter.is_floating_point():
        raise TypeError(f"parameters must be floating point, got {parameter.dtype}")
    if parameter.element_size() >= 4:
        return parameter
    return parameter.detach().float().requires_grad_(parameter.requires_grad)


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
