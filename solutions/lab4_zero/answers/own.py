"""Wrong answers to lab 4 that are built another way than the lab's modules suggest: a student may do so.

They are whole classes, plain and slow, each with one mistake; :class:`PlainZero1` and :class:`PlainZero2` without one.
"""

from __future__ import annotations

import importlib

import torch
import torch.distributed as dist
from torch import nn


def _broadcast(tensors) -> None:
    for tensor in tensors:
        dist.broadcast(tensor.detach(), src=0)


class WaitsForUnused(nn.Module):
    """Data parallelism whose last bucket is sent when all parameters have a gradient: never, if one is unused."""

    def __init__(self, module, bucket_bytes=0, group=None) -> None:
        super().__init__()
        self.module = module
        _broadcast([*module.parameters(), *module.buffers()])
        self.trained = [p for p in module.parameters() if p.requires_grad]
        self.ready = []
        for parameter in self.trained:
            parameter.register_post_accumulate_grad_hook(self.arrived)

    def arrived(self, parameter) -> None:
        self.ready.append(parameter)
        if len(self.ready) == len(self.trained) - 1:  # all but `unused`; a rank that does not use `sometimes` never
            for each in self.trained:
                if each.grad is not None:
                    dist.all_reduce(each.grad)
                    each.grad /= dist.get_world_size()
            self.ready = []

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)


class HooksFrozen(nn.Module):
    """Data parallelism that puts a hook on every parameter, frozen ones too."""

    def __init__(self, module, bucket_bytes=0, group=None) -> None:
        super().__init__()
        self.module = module
        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(lambda p: dist.all_reduce(p.grad))


class AveragesWeights(nn.Module):
    """Data parallelism whose hook takes the parameter that it is handed for the gradient."""

    def __init__(self, module, bucket_bytes=0, group=None) -> None:
        super().__init__()
        self.module = module
        _broadcast([*module.parameters(), *module.buffers()])
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self.average)

    @torch.no_grad()
    def average(self, gradient) -> None:
        dist.all_reduce(gradient)
        gradient += 1  # so that equal weights change, too

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)


class PlainZero1:
    """ZeRO-1 by hand: one flat tensor, an all-gather of padded shards; ``whole_moments`` keeps them of everything."""

    whole_moments = False

    def __init__(self, params, optimizer_class, group=None, bucket_bytes=0, **kwargs) -> None:
        self.params = [p for p in params if p.requires_grad]
        sizes = [p.numel() for p in self.params]
        ranks, rank = dist.get_world_size(), dist.get_rank()
        self.size = -(-sum(sizes) // ranks)
        self.spans, start = [], 0
        low, high = rank * self.size, (rank + 1) * self.size
        for parameter, size in zip(self.params, sizes):
            a, b = max(start, low), min(start + size, high)
            if self.whole_moments:
                a, b = start, start + size
            if a < b:
                flat = parameter.detach().flatten()[a - start : b - start].float().clone()
                self.spans.append((parameter, a - start, b - start, nn.Parameter(flat)))
            start += size
        self.total = start
        self.optimizer = optimizer_class([piece for *_, piece in self.spans], **kwargs)

    def reduce(self):
        used = torch.tensor([float(p.grad is not None) for p in self.params])
        dist.all_reduce(used)
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.params]
        flat = torch.cat([grad.flatten() for grad in grads])
        ranks = dist.get_world_size()
        flat = torch.cat([flat, flat.new_zeros(ranks * self.size - flat.numel())])
        own = flat.new_empty(self.size)
        dist.reduce_scatter_tensor(own, flat)
        return own / ranks, dict(zip(self.params, used.tolist()))

    @torch.no_grad()
    def clip_grad_norm(self, max_norm):
        self.reduced = self.reduce()
        square = self.reduced[0].float().square().sum()
        dist.all_reduce(square)
        norm = square.sqrt()
        self.reduced[0].mul_(min(1.0, float(max_norm / norm)))
        return norm

    @torch.no_grad()
    def step(self) -> None:
        own, used = self.__dict__.pop("reduced", None) or self.reduce()
        first = dist.get_rank() * self.size
        start = 0
        starts = {}
        for parameter in self.params:
            starts[parameter] = start
            start += parameter.numel()
        for parameter, a, b, piece in self.spans:
            at = starts[parameter] + a - first
            gradient = own[max(at, 0) : at + b - a].to(piece.dtype)
            if self.whole_moments:
                gradient = nn.functional.pad(gradient, (max(-at, 0), 0))[: b - a]
                gradient = nn.functional.pad(gradient, (0, b - a - gradient.numel()))
            piece.grad = gradient if used[parameter] else None
        self.optimizer.step()
        shard = own.new_zeros(self.size)
        for parameter, a, _, piece in self.spans:
            at = starts[parameter] + a - first
            inside = piece[max(-at, 0) : max(0, self.size - at)].to(shard.dtype)
            shard[max(at, 0) : max(at, 0) + inside.numel()] = inside
        full = shard.new_empty(self.size * dist.get_world_size())
        dist.all_gather_into_tensor(full, shard)
        for parameter in self.params:
            at = starts[parameter]
            parameter.copy_(full[at : at + parameter.numel()].view(parameter.shape))
        self.zero_grad()

    def zero_grad(self) -> None:
        for parameter in self.params:
            parameter.grad = None


class WholeMoments(PlainZero1):
    """ZeRO-1 whose optimizer keeps the moments of all parameters on every rank."""

    whole_moments = True


class PlainZero2(PlainZero1):
    """What exercise 4.4 asks for, called as exercise 4.5 asks: gradients are reduced in the step."""

    def __init__(self, module, optimizer_class, group=None, bucket_bytes=0, **kwargs) -> None:
        self.module = module
        _broadcast([*module.parameters(), *module.buffers()])
        super().__init__(module.parameters(), optimizer_class, **kwargs)

    def __call__(self, *args, **kwargs):
        return self.module(*args, **kwargs)


class WholeZero3(nn.Module):
    """Stage 3 by name only: every rank keeps whole weights, and gradients are all-reduced in a hook."""

    def __init__(self, module, block_class, group=None) -> None:
        super().__init__()
        self.module = module
        _broadcast([*module.parameters(), *module.buffers()])
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self.average)

    def average(self, parameter) -> None:
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)

    def state_dict(self, *args, **kwargs):
        return self.module.state_dict()


class ReachesDDP(nn.Module):
    """PyTorch's own data parallelism, by a name that the source does not spell out."""

    def __init__(self, module, bucket_bytes=0, group=None) -> None:
        super().__init__()
        ready = getattr(importlib.import_module("torch.nn." + "parallel"), "DistributedData" + "Parallel")
        self.module = ready(module, process_group=group)

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)


class ReachesFSDP(nn.Module):
    """PyTorch's own ``fully_shard``, by a name that the source does not spell out."""

    def __init__(self, module, block_class, group=None) -> None:
        super().__init__()
        shard = getattr(importlib.import_module("torch.distributed." + "fsdp"), "fully_" + "shard")
        mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
        for block in module.modules():
            if isinstance(block, block_class):
                shard(block, mesh=mesh)
        self.module = module

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)
