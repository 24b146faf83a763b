"""Right answers to lab 4 that few would write: other loops, other bookkeeping, other moments to wait."""

from __future__ import annotations

from utils.checks.answers import Answers

ANSWERS = Answers()
also_right = ANSWERS.also_right

# ---- 4.1: ring all-reduce
SCATTER, GATHER = "4.1: the steps of a ring reduce-scatter", "4.1: the steps of a ring all-gather"
ALL_REDUCE = "4.1: ring all-reduce"
also_right("steps counted from one", {
    SCATTER: """
        n, me = dist.get_world_size(group), dist.get_rank(group)
        for step in range(1, n):
            arriving = chunks[me - 1 - step]
            buffer = arriving.clone()
            exchange(chunks[me - step], buffer, group)
            arriving.copy_(arriving + buffer)
    """,
    GATHER: """
        n, me = len(chunks), dist.get_rank(group)
        for step in range(1, n):
            exchange(chunks[me + 1 - step], chunks[me - step], group)
    """,
})  # fmt: skip
also_right("a list that is turned", {
    GATHER: """
        me = dist.get_rank(group)
        ring = [*chunks[me::-1], *chunks[:me:-1]]  # the own chunk, then those of the left neighbours
        for outgoing, incoming in zip(ring, ring[1:]):
            exchange(outgoing, incoming, group)
    """,
})  # fmt: skip
also_right("the partial sum travels in a buffer", {
    SCATTER: """
        me, n = dist.get_rank(group), dist.get_world_size(group)
        travelling = chunks[(me - 1) % n]
        for distance in range(2, n + 1):
            mine = chunks[(me - distance) % n]
            arrived = torch.zeros_like(mine)
            exchange(travelling, arrived, group)
            torch.add(mine, arrived, out=mine)
            travelling = mine
    """,
})  # fmt: skip
also_right("pieces by split", {
    ALL_REDUCE: """
        n = dist.get_world_size(group)
        small, larger = divmod(flat.numel(), n)
        chunks = flat.split([small + 1 if index < larger else small for index in range(n)])
        reduce_scatter_steps(chunks, group)
        if op != "sum":
            own = chunks[dist.get_rank(group)]
            own /= n
        all_gather_steps(chunks, group)
    """,
})  # fmt: skip

# ---- 4.2: memory accounting
BYTES = "4.2: bytes on each rank"
also_right("a table of stages", {
    BYTES: """
        split = {"weight": stage > 2, "gradient": stage > 1, "optimizer": stage > 0}
        bytes_of = {"weight": weight_bytes, "gradient": gradient_bytes, "optimizer": optimizer_bytes}
        return sum(parameters * size / (world_size if split[what] else 1) for what, size in bytes_of.items())
    """,
})  # fmt: skip
also_right("a match statement", {
    BYTES: """
        match stage:
            case 0:
                whole, shared = weight_bytes + gradient_bytes + optimizer_bytes, 0
            case 1:
                whole, shared = weight_bytes + gradient_bytes, optimizer_bytes
            case 2:
                whole, shared = weight_bytes, gradient_bytes + optimizer_bytes
            case _:
                whole, shared = 0, weight_bytes + gradient_bytes + optimizer_bytes
        return parameters * (whole + shared / world_size)
    """,
})  # fmt: skip
also_right("the first so many are split", {
    BYTES: """
        parts = [optimizer_bytes, gradient_bytes, weight_bytes]
        return parameters * (sum(parts[:stage]) / world_size + sum(parts[stage:]))
    """,
})  # fmt: skip
also_right("stage by stage", {
    BYTES: """
        total = weight_bytes + gradient_bytes + optimizer_bytes
        for freed in (optimizer_bytes, gradient_bytes, weight_bytes)[:stage]:
            total -= freed * (world_size - 1) / world_size
        return total * parameters
    """,
})  # fmt: skip

# ---- 4.3: data parallelism
START, ARRIVES = "4.3: the same start", "4.3: a gradient arrives"
AVERAGE, DONE = "4.3: average a bucket", "4.3: the end of a backward pass"
also_right("one loop over all that is broadcast", {
    START: """
        from itertools import chain

        for tensor in chain(module.parameters(), module.buffers()):
            dist.broadcast(tensor.data, group=group, group_src=0)
    """,
    DONE: "while self._averaging:\n    self._averaging.pop(0).wait()",
})  # fmt: skip
also_right("started together, waited for together", {
    START: """
        tensors = [*module.parameters(), *module.buffers()]
        for work in [dist.broadcast(t.detach(), group=group, group_src=0, async_op=True) for t in tensors]:
            work.wait()
    """,
    ARRIVES: """
        k = self._bucket_of[parameter]
        self._missing[k] = self._missing[k] - 1
        if k != self._next:
            return
        while self._next < len(self._buckets) and not self._missing[self._next]:
            full = self._next
            self._next = full + 1
            self._on_full(full)
    """,
})  # fmt: skip
also_right("a condition turned round", {
    AVERAGE: """
        if not self._synchronise:
            return
        work = all_reduce_mean(self.flat_gradients[k], group=self.group)
        self._averaging += [work]
    """,
    DONE: "for work in self._averaging:\n    work.wait()\nself._averaging = []",
})  # fmt: skip
also_right("an endless loop with a break", {
    ARRIVES: """
        self._missing[self._bucket_of[parameter]] -= 1
        while True:
            k = self._next
            if k == len(self._buckets) or self._missing[k] > 0:
                break
            self._on_full(k)
            self._next += 1
    """,
})  # fmt: skip

# ---- 4.4: ZeRO-1
PIECES, REDUCE = "4.4: what of each parameter lies in a shard", "4.4: reduce-scatter the gradients"
SHARD, STEP = "4.4: gradients of the shard", "4.4: step the shard, gather the weights"
NORM = "4.4: the norm of a gradient in shards"
also_right("intersections", {
    PIECES: """
        shard = range(rank * self.shard_numel, (rank + 1) * self.shard_numel)
        found = []
        for k, (begin, parameter) in enumerate(zip(self.starts, self.parameters)):
            low = max(shard.start, begin)
            high = min(shard.stop, begin + parameter.numel())
            if high > low:
                found.append(Piece(k, low - shard.start, high - shard.start, low - begin))
        return found
    """,
    NORM: """
        norms = [torch.linalg.vector_norm(shard.gradient, dtype=torch.float32) ** 2 for shard in self.shards]
        square = torch.stack(norms).sum()
        dist.all_reduce(square, group=self.group)
        norm = square.sqrt()
        factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        for shard in self.shards:
            shard.gradient *= factor
        return norm
    """,
})  # fmt: skip
also_right("all under way at once", {
    REDUCE: """
        pending = []
        for k, bucket in enumerate(self.buckets):
            flat, shard = self.flat_gradients[k], self.sharded.shards[k]
            bucket.collect(bucket.views(flat))
            shard.gradient = flat.new_empty(bucket.shard_numel)
            pending.append(reduce_scatter_mean(shard.gradient, flat, self.group))
        for work in pending:
            work.wait()
    """,
    STEP: """
        for shard in self.shards:
            shard.set_gradients(used)
        self.inner.step()
        works = []
        for shard in self.shards:
            if shard.master is not shard.weights:
                shard.weights.copy_(shard.master)
            works.append(all_gather(shard.flat, shard.weights, self.group))
        for work in works:
            work.wait()
    """,
})  # fmt: skip
also_right("gradients by index", {
    SHARD: """
        for i in range(len(self.pieces)):
            piece = self.pieces[i]
            self.tensors[i].grad = None
            if used[self.bucket.parameters[piece.parameter]]:
                self.tensors[i].grad = self.gradient.narrow(0, piece.start, piece.stop - piece.start).to(
                    self.tensors[i].dtype
                )
    """,
})  # fmt: skip
also_right("the norm of one long tensor", {
    NORM: """
        own = torch.cat([shard.gradient.float().flatten() for shard in self.shards])
        square = torch.dot(own, own)
        dist.all_reduce(square, group=self.group)
        norm = torch.sqrt(square)
        if float(norm) > max_norm:
            torch._foreach_mul_([shard.gradient for shard in self.shards], float(max_norm / norm))
        return norm
    """,
})  # fmt: skip

# ---- 4.5: ZeRO-2
BUCKET, SHARD = "4.5: reduce-scatter a bucket and free it", "4.5: a shard arrives"
also_right("the flat gradient of the lab", {
    BUCKET: {"        flat = bucket.new_flat()\n        bucket.collect(bucket.views(flat))\n":
             "        flat = bucket.flat_gradient()\n"},
})  # fmt: skip
also_right("the first shard is written in place", {
    BUCKET: """
        if len(self._reducing) == IN_FLIGHT:
            self._take_oldest()
        flat = bucket.new_flat()
        bucket.collect(bucket.views(flat))
        bucket.release()
        target = self.gradients[k] if not self._filled[k] else torch.empty_like(self.gradients[k])
        self._reducing.append((k, reduce_scatter_mean(target, flat, self.group), flat))
    """,
    SHARD: """
        k, work, _ = self._reducing.popleft()
        mean = work.wait()
        if self._filled[k]:
            self.gradients[k] += mean
        self._filled[k] = True
    """,
})  # fmt: skip
also_right("a sum into a new tensor", {
    SHARD: """
        entry = self._reducing.popleft()
        k, mean = entry[0], entry[1].wait()
        target = self.gradients[k]
        target.copy_(target + mean if self._filled[k] else mean)
        self._filled[k] = True
    """,
})  # fmt: skip
also_right("zeroed, then always added", {
    SHARD: """
        k, pending, _ = self._reducing.popleft()
        shard = pending.wait()
        if not self._filled[k]:
            self.gradients[k].zero_()
        self.gradients[k].add_(shard)
        self._filled[k] = True
    """,
})  # fmt: skip

# ---- 4.6: ZeRO-3
OWN, BOUNDS = "4.6: a rank's shard", "4.6: what of each parameter lies in the shard"
GATHER, FREE, REDUCE = "4.6: gather the weights", "4.6: free the weights", "4.6: reduce and scatter the gradients"
HOOKS = "4.6: when a block is gathered and freed"
also_right("clamped bounds", {
    OWN: "self.shard = flat.narrow(0, self.rank * self.bucket.shard_numel, self.bucket.shard_numel).detach().clone()",
    BOUNDS: """
        size = self.bucket.shard_numel

        def inside(place):
            return min(max(place - self.rank * size, 0), size)

        pairs = zip(self.bucket.starts, self.bucket.parameters)
        return [(inside(start), inside(start + parameter.numel())) for start, parameter in pairs]
    """,
})  # fmt: skip
also_right("gathered into its own part", {
    GATHER: """
        storage = self.full.untyped_storage()
        storage.resize_(self.full.nbytes)
        part = self.bucket.shard(self.full, self.rank)
        part.copy_(self.shard)
        work = all_gather(self.full, part, self.group)
        work.wait()
    """,
    REDUCE: """
        flat = self.bucket.flat_gradient()
        self.bucket.release()
        mean = reduce_scatter_mean(torch.empty_like(self.shard), flat, self.group).wait()
        for anywhere, piece, (start, stop) in zip(used, self.pieces, self.bounds()):
            if anywhere:
                piece.grad = mean[start:stop] if piece.grad is None else piece.grad + mean[start:stop]
    """,
})  # fmt: skip
also_right("hooks that are functions", {
    HOOKS: """
        def gather(*_):
            unit.gather()

        def free(*_):
            unit.free()

        def after(block, inputs, outputs):
            self._after_backward(unit, block, inputs, outputs)

        part.register_forward_pre_hook(gather)
        part.register_forward_hook(free)
        if part is self.module:
            return
        part.register_full_backward_pre_hook(gather)
        part.register_full_backward_hook(after)
    """,
    FREE: "self.full.untyped_storage().resize_(0)",
})  # fmt: skip
also_right("a shard by chunk", {
    OWN: "self.shard = flat.chunk(len(flat) // self.bucket.shard_numel)[self.rank].clone()",
    REDUCE: {"+= mean[low:high]": "= self.pieces[k].grad + mean[low:high]"},
})  # fmt: skip

# ---- 4.7: tensor-parallel MLP
F_BACK, G_FORWARD = "4.7: the gradient of what all ranks read", "4.7: the sum of all ranks' parts"
COLUMN, ROW = "4.7: column-parallel linear layer", "4.7: row-parallel linear layer"
CUT, MLP = "4.7: which matrix is cut which way", "4.7: the MLP"
also_right("products by matmul", {
    COLUMN: """
        y = copy_to_tp_region(x, self.group) @ self.weight.t()
        return y if self.bias is None else y + self.bias
    """,
    ROW: """
        partial = torch.matmul(x, self.weight.t())
        total = reduce_from_tp_region(partial, self.group)
        return total if self.bias is None else total + self.bias
    """,
})  # fmt: skip
also_right("copies in another way", {
    F_BACK: """
        total = torch.empty_like(gradient, memory_format=torch.contiguous_format).copy_(gradient)
        dist.all_reduce(total, op=dist.ReduceOp.SUM, group=ctx.group)
        return (total, None)
    """,
    G_FORWARD: """
        total = torch.empty_like(x, memory_format=torch.contiguous_format)
        total.copy_(x)
        work = dist.all_reduce(total, group=group, async_op=True)
        work.wait()
        return total
    """,
})  # fmt: skip
also_right("names for each step", {
    MLP: """
        hidden = self.up(x)
        active = F.gelu(hidden, approximate="tanh")
        out = self.down(active)
        return out
    """,
    CUT: "self.down, self.up = RowParallelLinear.from_linear(mlp.down, group=group), "
         "ColumnParallelLinear.from_linear(mlp.up, group=group)",
})  # fmt: skip
also_right("a module for the activation", {
    CUT: """
        self.up = ColumnParallelLinear.from_linear(mlp.up, group)
        self.activation = nn.GELU(approximate="tanh")
        self.down = RowParallelLinear.from_linear(mlp.down, group)
    """,
    MLP: "for layer in (self.up, self.activation, self.down):\n    x = layer(x)\nreturn x",
})  # fmt: skip

# ---- 4.8: 1F1B schedule
ORDER = "4.8: the 1F1B order"
also_right("three parts", {
    ORDER: """
        warm = min(stages - 1 - stage, micro_batches)
        first = [Action("F", i) for i in range(warm)]
        steady = [Action(kind, i + (warm if kind == "F" else 0)) for i in range(micro_batches - warm) for kind in "FB"]
        last = [Action("B", i) for i in range(micro_batches - warm, micro_batches)]
        return first + steady + last
    """,
})  # fmt: skip
also_right("a simulation of what is in flight", {
    ORDER: """
        most = stages - stage
        forward = backward = 0
        order = []
        while backward < micro_batches:
            if forward < micro_batches and forward - backward < most:
                order.append(Action("F", forward))
                forward += 1
            else:
                order.append(Action("B", backward))
                backward += 1
        return order
    """,
})  # fmt: skip
also_right("iterators", {
    ORDER: """
        forward = (Action("F", i) for i in range(micro_batches))
        backward = (Action("B", i) for i in range(micro_batches))
        order = [next(forward) for _ in range(min(micro_batches, stages - stage - 1))]
        for action in forward:
            order += [action, next(backward)]
        return [*order, *backward]
    """,
})  # fmt: skip
also_right("sorted by time", {
    ORDER: """
        ahead = stages - stage - 1
        timed = [(2 * i if i >= ahead else -1, i, Action("F", i)) for i in range(micro_batches)]
        timed += [(2 * (i + ahead) + 1, i, Action("B", i)) for i in range(micro_batches)]
        return [action for _, _, action in sorted(timed, key=lambda entry: entry[:2])]
    """,
})  # fmt: skip

# ---- 4.9: pipeline step
STEP, FORWARD, BACKWARD = "4.9: one step", "4.9: a micro-batch forward", "4.9: a micro-batch backward"
also_right("a match statement", {
    STEP: """
        for item in communication_plan(order, self.rank, self.stages):
            match item:
                case Action(kind="F", micro_batch=i):
                    run.forward(i)
                case Action(kind="B", micro_batch=i):
                    run.backward(i)
                case _:
                    run.exchange(item)
    """,
})  # fmt: skip
also_right("a table of what to do", {
    STEP: """
        work = {"F": run.forward, "B": run.backward}
        for item in communication_plan(order, self.rank, self.stages):
            if isinstance(item, Action):
                work[item.kind](item.micro_batch)
            else:
                run.exchange(item)
    """,
    BACKWARD: {"x.grad.contiguous()": "x.grad.detach().clone(memory_format=torch.contiguous_format)"},
})  # fmt: skip
also_right("gradients asked for by a method", {
    FORWARD: {"x.requires_grad = True": "x.requires_grad_(True)",
              "y.detach().contiguous()": "y.detach().clone(memory_format=torch.contiguous_format)"},
})  # fmt: skip
also_right("conditions turned round", {
    FORWARD: {"if self.stage.first:\n            x, given = None, self.tokens[i]\n        else:\n"
              "            x = given = self.received.pop((\"activation\", i))\n            x.requires_grad = True":
              "x, given = None, self.tokens[i] if self.stage.first else self.received.pop((\"activation\", i))\n"
              "        if not self.stage.first:\n            x = given.requires_grad_()"},
})  # fmt: skip

# ---- 4.10: ZeRO-3 with prefetch
BEGIN, WAIT = "4.10: start to gather", "4.10: wait for the weights"
BLOCK, BEFORE = "4.10: the hooks of a block", "4.10: before a block computes"
also_right("nothing to do is said first", {
    BEGIN: """
        if self.has_memory:
            return
        self.full.untyped_storage().resize_(self.full.numel() * self.full.element_size())
        self.pending = all_gather(self.full, self.shard, self.group)
    """,
    WAIT: """
        self.start()
        work, self.pending = self.pending, None
        if work is not None:
            work.wait()
    """,
})  # fmt: skip
also_right("the neighbour by its sign", {
    BEFORE: """
        self.blocks[k].start()
        neighbour = k + (-1 if self.in_backward else 1)
        if neighbour in range(len(self.blocks)):
            self.blocks[neighbour].start()
        self.blocks[k].gather()
    """,
})  # fmt: skip
also_right("slices", {
    BEFORE: """
        ahead = self.blocks[k - 1 : k] if self.in_backward and k > 0 else []
        if not self.in_backward:
            ahead = self.blocks[k + 1 : k + 2]
        for unit in [self.blocks[k], *ahead]:
            unit.start()
        self.blocks[k].gather()
    """,
})  # fmt: skip
also_right("hooks that look the block up", {
    BLOCK: """
        part.register_forward_pre_hook(lambda *_: self._before(self.blocks.index(unit)))
        part.register_forward_hook(lambda *_: None if self.in_backward else unit.free())
        part.register_full_backward_pre_hook(lambda *_: self._before(self.blocks.index(unit)))
        part.register_full_backward_hook(lambda *block_and_gradients: self._after_backward(unit, *block_and_gradients))
    """,
})  # fmt: skip
