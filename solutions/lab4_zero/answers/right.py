"""Plain answers to lab 4, as a student might write them: right, and without what the solution adds.

A test fills the lab's places with them, so that the checks are held to an answer that is not the solution, and wrong
answers are edits of these.
"""

from __future__ import annotations

from utils.checks.answers import Answers

#: What stands in each place, by the label that the place has in the solution.
ANSWERS = Answers(
    {
        "4.1: the steps of a ring reduce-scatter": """
        rank, world_size = dist.get_rank(group), dist.get_world_size(group)
        for step in range(world_size - 1):
            mine = chunks[(rank - step - 2) % world_size]
            incoming = torch.empty_like(mine)
            exchange(chunks[(rank - step - 1) % world_size], incoming, group)
            mine.add_(incoming)
        """,
        "4.1: the steps of a ring all-gather": """
        rank, world_size = dist.get_rank(group), dist.get_world_size(group)
        for step in range(world_size - 1):
            incoming = chunks[(rank - step - 1) % world_size]
            exchange(chunks[(rank - step) % world_size], incoming, group)
        """,
        "4.1: ring all-reduce": """
        world_size = dist.get_world_size(group)
        chunks = flat.tensor_split(world_size)
        reduce_scatter_steps(chunks, group)
        if op == "mean":
            chunks[dist.get_rank(group)].div_(world_size)
        all_gather_steps(chunks, group)
        """,
        "4.2: bytes on each rank": """
        optimizer = optimizer_bytes / world_size if stage >= 1 else optimizer_bytes
        gradient = gradient_bytes / world_size if stage >= 2 else gradient_bytes
        weight = weight_bytes / world_size if stage >= 3 else weight_bytes
        return parameters * (weight + gradient + optimizer)
        """,
        "4.3: the same start": """
        for parameter in module.parameters():
            dist.broadcast(parameter.detach(), group=group, group_src=0)
        for buffer in module.buffers():
            dist.broadcast(buffer, group=group, group_src=0)
        """,
        "4.3: a gradient arrives": """
        k = self._bucket_of[parameter]
        self._missing[k] -= 1
        while self._next < len(self._buckets) and self._missing[self._next] == 0:
            self._on_full(self._next)
            self._next += 1
        """,
        "4.3: average a bucket": """
        if self._synchronise:
            self._averaging.append(all_reduce_mean(self.flat_gradients[k], self.group))
        """,
        "4.3: the end of a backward pass": """
        for pending in self._averaging:
            pending.wait()
        self._averaging.clear()
        """,
        "4.4: what of each parameter lies in a shard": """
        first = rank * self.shard_numel
        last = first + self.shard_numel
        pieces = []
        for k, parameter in enumerate(self.parameters):
            begin, end = self.starts[k], self.starts[k] + parameter.numel()
            if begin < last and end > first:
                low, high = max(begin, first), min(end, last)
                pieces.append(Piece(k, low - first, high - first, low - begin))
        return pieces
        """,
        "4.4: reduce-scatter the gradients": """
        for bucket, flat, shard in zip(self.buckets, self.flat_gradients, self.sharded.shards):
            bucket.collect(bucket.views(flat))
            shard.gradient = torch.empty_like(bucket.shard(flat, rank))
            reduce_scatter_mean(shard.gradient, flat, self.group).wait()
        """,
        "4.4: gradients of the shard": """
        for piece, tensor in zip(self.pieces, self.tensors):
            anyone = used[self.bucket.parameters[piece.parameter]]
            tensor.grad = self.gradient[piece.start : piece.stop].to(tensor.dtype) if anyone else None
        """,
        "4.4: step the shard, gather the weights": """
        for shard in self.shards:
            shard.set_gradients(used)
        self.inner.step()
        for shard in self.shards:
            if shard.master is not shard.weights:
                shard.weights.copy_(shard.master)
            all_gather(shard.flat, shard.weights, self.group).wait()
        """,
        "4.4: the norm of a gradient in shards": """
        square = sum(shard.gradient.float().square().sum() for shard in self.shards)
        dist.all_reduce(square, group=self.group)
        norm = square.sqrt()
        if norm > max_norm:
            for shard in self.shards:
                shard.gradient.mul_(max_norm / norm)
        return norm
        """,
        "4.5: reduce-scatter a bucket and free it": """
        while len(self._reducing) >= IN_FLIGHT:
            self._take_oldest()
        flat = bucket.new_flat()
        bucket.collect(bucket.views(flat))
        bucket.release()
        into = torch.empty_like(self.gradients[k])
        self._reducing.append((k, reduce_scatter_mean(into, flat, self.group), flat))
        """,
        "4.5: a shard arrives": """
        k, pending, flat = self._reducing.popleft()
        mean = pending.wait()
        if self._filled[k]:
            self.gradients[k].add_(mean)
        else:
            self.gradients[k].copy_(mean)
        self._filled[k] = True
        """,
        "4.6: a rank's shard": """
        size = self.bucket.shard_numel
        self.shard = flat[self.rank * size : (self.rank + 1) * size].clone()
        """,
        "4.6: what of each parameter lies in the shard": """
        size, bounds = self.bucket.shard_numel, []
        for start, parameter in zip(self.bucket.starts, self.bucket.parameters):
            low = max(0, start - self.rank * size)
            high = min(size, start + parameter.numel() - self.rank * size)
            bounds.append((low, high) if low < high else (0, 0))
        return bounds
        """,
        "4.6: gather the weights": """
        self.full.untyped_storage().resize_(self.full.numel() * self.full.element_size())
        all_gather(self.full, self.shard, self.group).wait()
        """,
        "4.6: free the weights": """
        storage = self.full.untyped_storage()
        storage.resize_(0)
        """,
        "4.6: reduce and scatter the gradients": """
        flat = self.bucket.new_flat()
        self.bucket.collect(self.bucket.views(flat))
        self.bucket.release()
        mean = torch.empty_like(self.shard)
        reduce_scatter_mean(mean, flat, self.group).wait()
        for k, (low, high) in enumerate(self.bounds()):
            if not used[k]:
                continue
            if self.pieces[k].grad is None:
                self.pieces[k].grad = mean[low:high].clone()
            else:
                self.pieces[k].grad += mean[low:high]
        """,
        "4.6: when a block is gathered and freed": """
        part.register_forward_pre_hook(lambda *_: unit.gather())
        part.register_forward_hook(lambda *_: unit.free())
        if part is not self.module:
            part.register_full_backward_pre_hook(lambda *_: unit.gather())
            part.register_full_backward_hook(lambda *found: self._after_backward(unit, *found))
        """,
        "4.7: the gradient of what all ranks read": """
        total = gradient.contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None
        """,
        "4.7: the sum of all ranks' parts": """
        total = x.contiguous().clone()
        dist.all_reduce(total, group=group)
        return total
        """,
        "4.7: the gradient of one rank's part": """
        return gradient, None
        """,
        "4.7: column-parallel linear layer": """
        x = copy_to_tp_region(x, self.group)
        return F.linear(x, self.weight, self.bias)
        """,
        "4.7: row-parallel linear layer": """
        y = reduce_from_tp_region(F.linear(x, self.weight), self.group)
        if self.bias is not None:
            y = y + self.bias
        return y
        """,
        "4.7: which matrix is cut which way": """
        self.up = ColumnParallelLinear.from_linear(mlp.up, group)
        self.down = RowParallelLinear.from_linear(mlp.down, group)
        """,
        "4.7: the MLP": """
        return self.down(F.gelu(self.up(x), approximate="tanh"))
        """,
        "4.8: the 1F1B order": """
        ahead = min(stages - stage - 1, micro_batches)
        order = [Action("F", i) for i in range(ahead)]
        done = 0
        for i in range(ahead, micro_batches):
            order.append(Action("F", i))
            order.append(Action("B", done))
            done += 1
        while done < micro_batches:
            order.append(Action("B", done))
            done += 1
        return order
        """,
        "4.9: one step": """
        for item in communication_plan(order, self.rank, self.stages):
            if not isinstance(item, Action):
                run.exchange(item)
            elif item.kind == "F":
                run.forward(item.micro_batch)
            else:
                run.backward(item.micro_batch)
        """,
        "4.9: a micro-batch forward": """
        if self.stage.first:
            x, given = None, self.tokens[i]
        else:
            x = given = self.received.pop(("activation", i))
            x.requires_grad = True
        if self.stage.last:
            y = self.stage(given, self.targets[i])
            end = (y if self.weights[i] else y.nan_to_num(0)) * self.weights[i]
            self.loss = end.detach() + (0 if self.loss is None else self.loss)
        else:
            y = self.stage(given)
            self.made["activation", i] = y.detach().contiguous()
            end = get_gradient_edge(y) if y.requires_grad else None
        self.in_flight[i] = (x, end)
        """,
        "4.9: a micro-batch backward": """
        x, end = self.in_flight.pop(i)
        if self.stage.last:
            torch.autograd.backward(end)
        else:
            gradient = self.received.pop(("gradient", i))
            if end is not None:
                torch.autograd.backward(end, gradient)
        if not self.stage.first:
            self.made["gradient", i] = torch.zeros_like(x) if x.grad is None else x.grad.contiguous()
        """,
        "4.10: start to gather": """
        if not self.has_memory:
            self.full.untyped_storage().resize_(self.full.nbytes)
            self.pending = all_gather(self.full, self.shard, self.group)
        """,
        "4.10: wait for the weights": """
        self.start()
        if self.pending is not None:
            self.pending.wait()
        self.pending = None
        """,
        "4.10: the hooks of a block": """
        k = self.blocks.index(unit)

        def before(*_):
            self._before(k)

        def after_forward(*_):
            if not self.in_backward:
                unit.free()

        part.register_forward_pre_hook(before)
        part.register_forward_hook(after_forward)
        part.register_full_backward_pre_hook(before)
        part.register_full_backward_hook(lambda *found: self._after_backward(unit, *found))
        """,
        "4.10: before a block computes": """
        if self.in_backward:
            ahead = k - 1
        else:
            ahead = k + 1
        blocks = self.blocks
        if 0 <= ahead < len(blocks):
            blocks[k].start()
            blocks[ahead].start()
        blocks[k].gather()
        """,
    }
)
