"""Wrong answers to lab 4, each with one mistake, and what the check must say of it: edits of the plain answers."""

from __future__ import annotations

from . import own
from .right import ANSWERS

wrong = ANSWERS.wrong
instead_of = ANSWERS.wrong_function

# ---- wrong answers that fill no place but are whole
DDP = "DistributedDataParallel"
instead_of("4.3", DDP, "wrong answers")(own.WaitsForUnused)
instead_of(
    "4.3",
    DDP,
    "RuntimeError: cannot register a hook",
    "a frozen parameter has no gradient and takes no hook",
)(own.HooksFrozen)
instead_of("4.3", DDP, "changes the weights themselves", "a hook is handed the parameter")(own.AveragesWeights)
instead_of("4.3", DDP, "uses a built-in, torch.nn.parallel.distributed.DistributedDataParallel")(own.ReachesDDP)
instead_of("4.6", "Zero3", "uses a built-in", "FSDPModule")(own.ReachesFSDP)
instead_of("4.4", "Zero1Optimizer", "elements of state", "this rank keeps the moments of all parameters")(
    own.WholeMoments
)
instead_of("4.5", "Zero2", "gradients are still unreduced in the backward pass", '"classic wrong answers" 7')(
    own.PlainZero2
)
instead_of("4.6", "Zero3", "its share is about", "keeps its shard of every unit")(own.WholeZero3)

# ---- 4.1 ring all-reduce
SCATTER, GATHER, RING = (
    "4.1: the steps of a ring reduce-scatter",
    "4.1: the steps of a ring all-gather",
    "4.1: ring all-reduce",
)
wrong(
    SCATTER,
    "send before receive",
    "deadlock: every rank is blocked",
    "every rank sends first",
    "last send of",
    edits={
        "exchange(chunks[(rank - step - 1) % world_size], incoming, group)": (
            "dist.send(chunks[(rank - step - 1) % world_size], group=group, group_dst=(rank + 1) % world_size)"
            "; dist.recv(incoming, group=group, group_src=(rank - 1) % world_size)"
        )
    },
)
wrong(SCATTER, "copied", "ring_reduce_scatter is wrong", "nothing is added", edits={"mine.add_(": "mine.copy_("})
wrong(
    SCATTER,
    "a step too few",
    "ring_reduce_scatter is wrong",
    "too few steps",
    edits={"range(world_size - 1)": "range(world_size - 2)"},
)
wrong(
    SCATTER,
    "a step too many",
    "too many steps",
    '"classic wrong answers" 3',
    edits={"range(world_size - 1)": "range(world_size)"},
)
wrong(
    SCATTER,
    "chunks that end one rank early",
    "ring_reduce_scatter is wrong",
    "another chunk ends here: chunk r is the last one that rank r receives",
    '"classic wrong answers" 3',
    edits={"rank - step - 1": "rank - step", "rank - step - 2": "rank - step - 1"},
)
wrong(
    SCATTER,
    "one size",
    "the first chunk is as large as any",
    edits={"torch.empty_like(mine)": "torch.empty_like(chunks[0])"},
)
wrong(
    SCATTER,
    "ranks of the whole job",
    "ranks count within it, dist.get_rank(group)",
    edits={"rank, world_size = dist.get_rank(group)": "rank, world_size = dist.get_rank()"},
)
wrong(
    GATHER,
    "chunks out of order",
    "a message came that is larger than the tensor",
    "collectives.py, line",
    edits={"rank - step - 1": "rank + step + 1"},
)
wrong(
    SCATTER,
    "not added",
    "what arrives is not added",
    '"classic wrong answers" 3',
    edits={"mine.add_(incoming)": "mine.add(incoming)"},
)
wrong(
    RING,
    "no reduce-scatter",
    "2 messages, where a reduce-scatter and an all-gather take 2 (N - 1) = 4",
    '"classic wrong answers" 3',
    edits={"reduce_scatter_steps(chunks, group)": "pass"},
)
wrong(
    RING,
    "no all-gather",
    "the second round, the all-gather, is missing",
    "chunks on rank 0: .XX",
    edits={"all_gather_steps(chunks, group)": "pass"},
)
wrong(RING, "sum for mean", "this is the sum", edits={'if op == "mean":': "if False:"})
wrong(
    RING,
    "mean twice",
    "divided by N twice",
    edits={"div_(world_size)": "div_(world_size**2)"},
)
wrong(
    RING,
    "copy of the chunks",
    "the tensor is as it was",
    edits={"flat.tensor_split": "flat.clone().tensor_split"},
)
wrong(
    RING,
    "ready made",
    "ring_all_reduce calls the ready-made collective all_reduce",
    instead='dist.all_reduce(flat, group=group)\nif op == "mean":\n    flat.div_(dist.get_world_size(group))',
)
wrong(
    RING,
    "whole tensors",
    "whole tensors travel",
    '"classic wrong answers" 6',
    instead="""
        world_size = dist.get_world_size(group)
        total, travelling = flat.clone(), flat.clone()
        for step in range(world_size - 1):
            incoming = torch.empty_like(flat)
            exchange(travelling, incoming, group)
            total += incoming
            travelling = incoming
        flat.copy_(total / world_size if op == "mean" else total)
        """,
)
wrong(
    SCATTER,
    "right up to three ranks",
    "too few steps: 2 messages, where a chunk takes N - 1 = 4",
    "5 ranks",
    edits={"range(world_size - 1)": "range(min(world_size - 1, 2))"},
)
wrong(
    SCATTER,
    "straight to the owners",
    "rank 0 sends to rank 2 in ring_reduce_scatter, its right neighbour is rank 1",
    '"classic wrong answers" 8',
    instead="""
        rank, world_size = dist.get_rank(group), dist.get_world_size(group)
        for distance in range(1, world_size):
            incoming = torch.empty_like(chunks[rank])
            exchange(chunks[(rank + distance) % world_size], incoming, group, distance)
            chunks[rank].add_(incoming)
        """,
)
wrong(
    RING,
    "rest in no chunk",
    "are in no chunk",
    '"classic wrong answers" 5',
    edits={
        "chunks = flat.tensor_split(world_size)": (
            "m = flat.numel() // world_size; chunks = [flat[k * m : (k + 1) * m] for k in range(world_size)]"
        )
    },
)
wrong(
    RING,
    "mean over the whole job",
    "its sum is divided by all ranks, not by dist.get_world_size(group)",
    edits={"div_(world_size)": "div_(dist.get_world_size())"},
)

# ---- 4.2 memory
BYTES = "4.2: bytes on each rank"
wrong(
    BYTES,
    "no master weights",
    "without the float32 master weights",
    edits={"parameters * (": "parameters * (-4 / (world_size if stage >= 1 else 1) + "},
)
wrong(
    BYTES,
    "wrong order",
    "stages shard in the wrong order",
    instead="""
        weight = weight_bytes / world_size if stage >= 1 else weight_bytes
        gradient = gradient_bytes / world_size if stage >= 2 else gradient_bytes
        optimizer = optimizer_bytes / world_size if stage >= 3 else optimizer_bytes
        return parameters * (weight + gradient + optimizer)
        """,
)
wrong(
    BYTES,
    "a stage late",
    "each stage counts from one stage later",
    edits={">= 3": ">= 4", ">= 2": ">= 3", ">= 1": ">= 2"},
)
wrong(BYTES, "everything sharded", "every stage shards everything", edits={">= 2": ">= 1", ">= 3": ">= 1"})
wrong(
    BYTES, "own part alone", "a stage shards its own part alone", edits={">= 1": "== 1", ">= 2": "== 2", ">= 3": "== 3"}
)
wrong(
    BYTES,
    "all ranks",
    "this is the memory of all ranks together",
    edits={"parameters * (": "world_size * parameters * ("},
)
wrong(
    BYTES,
    "fixed bytes",
    "the byte counts are fixed",
    instead="""
        optimizer = 12 / world_size if stage >= 1 else 12
        gradient = 2 / world_size if stage >= 2 else 2
        return parameters * (optimizer + gradient + (2 / world_size if stage >= 3 else 2))
        """,
)
wrong(
    BYTES,
    "whole bytes",
    "whole bytes are cut off",
    edits={"(weight + gradient + optimizer)": "(weight + gradient + optimizer) // 1"},
)
wrong(
    BYTES,
    "whole bytes of each kind",
    "whole bytes are cut off by //",
    '"classic wrong answers" 6',
    instead="""
        optimizer = parameters * optimizer_bytes // (world_size if stage >= 1 else 1)
        gradient = parameters * gradient_bytes // (world_size if stage >= 2 else 1)
        weight = parameters * weight_bytes // (world_size if stage >= 3 else 1)
        return weight + gradient + optimizer
        """,
)
wrong(
    BYTES,
    "whole bytes of each parameter",
    "whole bytes of each parameter are cut off by //",
    '"classic wrong answers" 6',
    edits={"/ world_size": "// world_size"},
)

# ---- 4.3 data parallelism
START, ARRIVES, AVERAGE, FINISH = (
    "4.3: the same start",
    "4.3: a gradient arrives",
    "4.3: average a bucket",
    "4.3: the end of a backward pass",
)
PENDING = "self._averaging.append(all_reduce_mean(self.flat_gradients[k], self.group))"
wrong(
    AVERAGE,
    "sum for mean",
    "this is the sum over the ranks",
    edits={PENDING: "dist.all_reduce(self.flat_gradients[k], group=self.group)"},
)
wrong(
    AVERAGE,
    "divided twice",
    "divided by N once more",
    edits={PENDING: "self.flat_gradients[k].div_(dist.get_world_size()); " + PENDING},
)
wrong(
    AVERAGE,
    "weights averaged",
    "changes the weights themselves",
    edits={PENDING: "[self._averaging.append(all_reduce_mean(p.data, self.group)) for p in bucket.parameters]"},
)
wrong(
    AVERAGE,
    "last bucket missing",
    "the last bucket is never sent",
    edits={"if self._synchronise:": "if self._synchronise and (k == 0 or k < len(self.buckets) - 1):"},
)
wrong(AVERAGE, "never averaged", "the rank's own rows: no collective has reached it", instead="pass")
wrong(
    AVERAGE,
    "an all-reduce for each parameter",
    "gradients travel in buckets",
    '"classic wrong answers" 6',
    edits={
        PENDING: (
            "views = bucket.views(self.flat_gradients[k]); "
            "self._averaging += [all_reduce_mean(view, self.group) for view in views]"
        )
    },
)
wrong(
    AVERAGE,
    "all gradients gathered",
    "all_gather moves",
    '"classic wrong answers" 6',
    instead="""
        if self._synchronise:
            flat, ranks = self.flat_gradients[k], dist.get_world_size(self.group)
            every = flat.new_empty(ranks * flat.numel())
            dist.all_gather_into_tensor(every, flat, group=self.group)
            flat.copy_(every.view(ranks, -1).mean(0))
        """,
)
wrong(AVERAGE, "no_sync sends", "inside no_sync()", edits={"if self._synchronise:": "if True:"})
wrong(
    START,
    "buffers of the state alone",
    "does not start with rank 0's shift",
    "state_dict() leaves it out",
    '"classic wrong answers" 7',
    instead="for tensor in module.state_dict().values():\n    dist.broadcast(tensor, group=group, group_src=0)",
)
wrong(
    START,
    "broadcasts not waited for",
    "broadcasts are never waited for",
    '"classic wrong answers" 7',
    edits={
        "dist.broadcast(parameter.detach(), group=group, group_src=0)": (
            "dist.broadcast(parameter.detach(), group=group, group_src=0, async_op=True)"
        )
    },
)
wrong(START, "nothing broadcast", "does not start with rank 0's", "ranks that start apart stay apart", instead="pass")
wrong(
    START,
    "buffers not broadcast",
    "does not start with rank 0's scale, shift",
    "buffers are part of a module's state too",
    edits={"for buffer in module.buffers()": "for buffer in ()"},
)
wrong(
    START,
    "frozen not broadcast",
    "does not start with rank 0's frozen",
    "a frozen parameter is not trained, but it computes",
    edits={"in module.parameters():": "in (p for p in module.parameters() if p.requires_grad):"},
)
wrong(
    START,
    "from the last rank",
    "rank 0 does not start with rank 0's",
    edits={"group_src=0": "group_src=dist.get_world_size(group) - 1"},
)
wrong(ARRIVES, "no overlap", "no all-reduce has started when the backward pass reaches the first layer", instead="pass")
wrong(
    ARRIVES,
    "as buckets get full",
    "the ranks call different collectives",
    instead="""
        k = self._bucket_of[parameter]
        self._missing[k] -= 1
        if self._missing[k] == 0:
            self._on_full(k)
            self._next = max(self._next, k + 1)
        """,
)
GROUP = "only a group of some ranks goes wrong"
wrong(AVERAGE, "ranks of the whole job", GROUP, "OutsideGroup", edits={PENDING: PENDING.replace(", self.group", "")})
wrong(START, "from the job's first rank", GROUP, edits={"group_src=0": "src=0"})
wrong(
    AVERAGE,
    "waits at once",
    "have been waited for when the backward pass reaches the first layer",
    "wait for all of them at its end",
    edits={PENDING: "all_reduce_mean(self.flat_gradients[k], self.group).wait()"},
)
wrong(
    ARRIVES,
    "each gradient counted twice",
    "every bucket was sent, but before this gradient was there",
    '"classic wrong answers" 8',
    edits={"self._missing[k] -= 1": "self._missing[k] -= 2"},
)
wrong(
    ARRIVES,
    "full with one missing",
    "every bucket was sent, but before this gradient was there",
    '"classic wrong answers" 8',
    edits={"self._missing[self._next] == 0": "self._missing[self._next] <= 1"},
)
wrong(
    ARRIVES,
    "beyond the last bucket",
    "IndexError",
    edits={"self._next < len(self._buckets)": "self._next <= len(self._buckets)"},
)
wrong(
    ARRIVES,
    "one bucket at a time",
    "although the buckets after it were full",
    edits={"while self._next": "if self._next"},
)
wrong(
    FINISH,
    "averages never forgotten",
    "averages of the first backward pass are waited for again in the second",
    '"classic wrong answers" 9',
    edits={"self._averaging.clear()": "pass"},
)
wrong(FINISH, "nobody waits", "are never waited for", '"classic wrong answers" 10', instead="pass")
wrong(
    AVERAGE,
    "last bucket missing on one rank",
    "the ranks call different collectives",
    "a rank leaves out the last bucket",
    edits={
        "if self._synchronise:": (
            "if self._synchronise and not (0 < k == len(self.buckets) - 1 and dist.get_rank(self.group) == 1):"
        )
    },
)

# ---- 4.4 ZeRO-1
PIECES, REDUCE, SHARD, STEP, NORM = (
    "4.4: what of each parameter lies in a shard",
    "4.4: reduce-scatter the gradients",
    "4.4: gradients of the shard",
    "4.4: step the shard, gather the weights",
    "4.4: the norm of a gradient in shards",
)
wrong(
    PIECES,
    "pieces end where they begin",
    "the step moves no element, on no rank",
    "the pieces do not cover the shard",
    '"classic wrong answers" 4',
    edits={"high - first": "low - first"},
)
REDUCED = "reduce_scatter_mean(shard.gradient, flat, self.group).wait()"
wrong(
    REDUCE,
    "sum for mean",
    "this is the sum over the ranks",
    edits={REDUCED: "dist.reduce_scatter_tensor(shard.gradient, flat, group=self.group)"},
)
wrong(
    REDUCE,
    "divided twice",
    "divided by N once more",
    edits={REDUCED: REDUCED + "; shard.gradient /= dist.get_world_size()"},
)
wrong(
    REDUCE,
    "own gradient",
    "the rank's own rows: no collective has reached it",
    edits={REDUCED: "shard.gradient.copy_(bucket.shard(flat, rank))"},
)
wrong(
    REDUCE,
    "all-reduce",
    "elements are all-reduced in a step",
    "an all-reduce sends 2 Psi where a reduce-scatter sends Psi",
    edits={
        REDUCED: "dist.all_reduce(flat, group=self.group); "
        "shard.gradient.copy_(bucket.shard(flat, rank) / dist.get_world_size())"
    },
)
wrong(
    STEP,
    "never gathered",
    "the ranks have different weights after a step",
    "the new weights were never gathered",
    edits={"all_gather(shard.flat, shard.weights, self.group).wait()": "pass"},
)
wrong(
    STEP,
    "master not copied",
    "small steps move",
    "small steps add up in a float32 master",
    '"classic wrong answers" 9',
    edits={"if shard.master is not shard.weights:": "if False:"},
)
wrong(
    STEP,
    "master overwritten",
    "small steps move",
    '"classic wrong answers" 9',
    edits={"shard.weights.copy_(shard.master)": "shard.master.copy_(shard.weights)"},
)
wrong(
    STEP,
    "stepped once for each bucket",
    "the optimizer steps every piece that has a gradient, also those that it has stepped already",
    '"classic wrong answers" 6',
    instead="""
        for shard in self.shards:
            shard.set_gradients(used)
            self.inner.step()
            if shard.master is not shard.weights:
                shard.weights.copy_(shard.master)
            all_gather(shard.flat, shard.weights, self.group).wait()
        """,
)
wrong(
    PIECES,
    "pieces before the shard",
    "does not lie in its shard",
    "a piece begins and ends in the shard",
    '"classic wrong answers" 4',
    edits={"begin < last and end > first": "begin < last", "low, high = max(begin, first),": "low, high = begin,"},
)
wrong(
    PIECES,
    "off by one",
    "are never stepped, on no rank",
    "the pieces do not cover the shard",
    '"classic wrong answers" 4',
    edits={"last = first + self.shard_numel": "last = first + self.shard_numel - 1"},
)
wrong(
    PIECES,
    "whole parameters",
    "are never stepped, on no rank",
    edits={"if begin < last and end > first:": "if first <= begin and end <= last:"},
)
wrong(
    PIECES,
    "offset of the shard",
    "took a wrong step",
    edits={"Piece(k, low - first, high - first, low - begin)": "Piece(k, low - begin, high - begin, low - begin)"},
)
wrong(
    PIECES,
    "offset in the flat tensor",
    "Piece(",
    "offset from the parameter's",
    '"classic wrong answers" 4',
    edits={"low - begin": "low"},
)
wrong(
    PIECES,
    "offset zero",
    "Piece(",
    "offset from the parameter's",
    edits={"low - begin": "0"},
)
wrong(
    PIECES,
    "padding in the last piece",
    "padding is in no piece",
    '"classic wrong answers" 4',
    edits={
        "begin, end = self.starts[k], self.starts[k] + parameter.numel()": (
            "begin, end = self.starts[k], self.starts[k] + parameter.numel(); "
            "end = self.numel if k == len(self.parameters) - 1 else end"
        )
    },
)
wrong(
    REDUCE,
    "not waited for",
    "collectives are never waited for",
    '"classic wrong answers" 11',
    edits={REDUCED: "reduce_scatter_mean(shard.gradient, flat, self.group)"},
)
wrong(
    SHARD,
    "gradient of the step before",
    "a gradient that is still there",
    '"classic wrong answers" 7',
    edits={
        "tensor.grad = self.gradient[piece.start : piece.stop].to(tensor.dtype) if anyone else None": (
            "tensor.grad = self.gradient[piece.start : piece.stop].to(tensor.dtype).clone() if anyone else tensor.grad"
        )
    },
)
wrong(
    PIECES,
    "beyond the shard",
    "does not lie in its shard",
    '"classic wrong answers" 4',
    edits={"min(end, last)": "min(end, last + 1)"},
)
wrong(
    PIECES,
    "beyond the parameter",
    "a piece ends where its parameter does",
    '"classic wrong answers" 4',
    edits={"min(end, last)": "last"},
)
wrong(
    SHARD,
    "zeros for unused",
    "unused",
    '"classic wrong answers" 7',
    edits={" if anyone else None": ""},
)
wrong(
    NORM,
    "norm of bfloat16",
    "the norm of bfloat16 gradients is a bfloat16, expected float32",
    '"classic wrong answers" 8',
    edits={"shard.gradient.float()": "shard.gradient"},
)
wrong(
    NORM,
    "largest bucket alone",
    "clip_grad_norm returns",
    '"classic wrong answers" 8',
    edits={"sum(shard": "max(shard"},
)
wrong(
    NORM,
    "norm of the own shard",
    "each rank takes the norm of its own shard",
    edits={"dist.all_reduce(square, group=self.group)": "pass"},
)
wrong(NORM, "squares", "the root is taken at the end", edits={"norm = square.sqrt()": "norm = square"})
wrong(NORM, "not scaled", "the gradients are not scaled", edits={"if norm > max_norm:": "if False:"})
wrong(REDUCE, "ranks of the whole job", GROUP, edits={REDUCED: REDUCED.replace(", self.group", "")})
wrong(NORM, "norm over the whole job", GROUP, edits={"(square, group=self.group)": "(square)"})

# ---- 4.5 ZeRO-2
BUCKET, TAKE = "4.5: reduce-scatter a bucket and free it", "4.5: a shard arrives"
SENT = "self._reducing.append((k, reduce_scatter_mean(into, flat, self.group), flat))"
wrong(
    BUCKET,
    "all-reduce",
    "elements are all-reduced in a step",
    "an all-reduce sends 2 Psi where a reduce-scatter sends Psi",
    edits={
        SENT: "from .async_collectives import AsyncWork; "
        "work = dist.all_reduce(flat, group=self.group, async_op=True); "
        "mine = bucket.shard(flat, dist.get_rank(self.group)); "
        "self._reducing.append((k, AsyncWork(work, mine, dist.get_world_size(self.group)), flat))"
    },
)
wrong(
    BUCKET,
    "sum for mean",
    "this is the sum over the ranks",
    edits={
        SENT: "from .async_collectives import AsyncWork; self._reducing.append("
        "(k, AsyncWork(dist.reduce_scatter_tensor(into, flat, group=self.group, async_op=True), into), flat))"
    },
)
wrong(BUCKET, "not released", "elements of full gradients exist", edits={"bucket.release()": "pass"})
wrong(
    BUCKET,
    "flat tensors kept",
    "bytes more after a backward pass",
    "a flat bucket that has been reduced is still referred to",
    edits={SENT: SENT + "; self.__dict__.setdefault('kept', []).append(flat)"},
)
wrong(
    BUCKET,
    "reduced before it is filled",
    "the gradients that reach the optimizer are zeros",
    edits={"bucket.collect(bucket.views(flat))": "flat.zero_()"},
)
wrong(
    BUCKET,
    "own gradient",
    "the rank's own rows: no collective has reached it",
    edits={SENT: "self._reducing.append((k, bucket.shard(flat, dist.get_rank(self.group)).clone(), flat))"},
    also={TAKE: {"pending.wait()": "pending"}},
)
wrong(
    TAKE,
    "second pass overwrites",
    "two do not: the second must add to the shard",
    edits={"self.gradients[k].add_(mean)": "self.gradients[k].copy_(mean)"},
)
wrong(
    TAKE,
    "added to the step before",
    "a gradient that the shard still holds",
    edits={"self.gradients[k].copy_(mean)": "self.gradients[k].add_(mean)"},
)
wrong(BUCKET, "ranks of the whole job", GROUP, edits={SENT: SENT.replace(", self.group", "")})
wrong(
    BUCKET,
    "all in flight",
    "buckets are under way when another one is sent",
    "take the oldest until fewer than IN_FLIGHT are under way",
    edits={"while len(self._reducing) >= IN_FLIGHT:": "while False:"},
)
wrong(
    BUCKET,
    "two in flight",
    "1 buckets are under way when another one is sent, 0 may be",
    '"classic wrong answers" 7',
    edits={">= IN_FLIGHT": "> IN_FLIGHT"},
)
wrong(
    BUCKET,
    "oldest taken too late",
    "1 buckets are under way when a new flat tensor is made, 0 may be",
    '"classic wrong answers" 7',
    instead="""
        flat = bucket.new_flat()
        bucket.collect(bucket.views(flat))
        bucket.release()
        while len(self._reducing) >= IN_FLIGHT:
            self._take_oldest()
        into = torch.empty_like(self.gradients[k])
        self._reducing.append((k, reduce_scatter_mean(into, flat, self.group), flat))
        """,
)
wrong(
    TAKE,
    "not waited for",
    "collectives are never waited for",
    '"classic wrong answers" 11',
    edits={"mean = pending.wait()": "mean = pending._result"},
)
wrong(
    BUCKET,
    "added to itself",
    "it is counted twice: if it was reduced into self.gradients[k], nothing is left to add to it",
    '"classic wrong answers" 9',
    edits={"torch.empty_like(self.gradients[k])": "self.gradients[k]"},
    also={TAKE: {"self.gradients[k].copy_(mean)": "self.gradients[k].add_(mean)"}},
)
REBOUND = "self.gradients[k] is another tensor now than the optimizer's"
wrong(TAKE, "another tensor", REBOUND, edits={"self.gradients[k].copy_(mean)": "self.gradients[k] = mean"})
wrong(
    TAKE,
    "another tensor for the sum",
    REBOUND,
    edits={"self.gradients[k].add_(mean)": "self.gradients[k] = self.gradients[k] + mean"},
)

# ---- 4.6 ZeRO-3
OWN, BOUNDS, FILL, EMPTY, SPREAD, WHEN = (
    "4.6: a rank's shard",
    "4.6: what of each parameter lies in the shard",
    "4.6: gather the weights",
    "4.6: free the weights",
    "4.6: reduce and scatter the gradients",
    "4.6: when a block is gathered and freed",
)
AFTER_FORWARD = "part.register_forward_hook(lambda *_: unit.free())"
BEFORE_BACKWARD = "part.register_full_backward_pre_hook(lambda *_: unit.gather())"
wrong(
    OWN,
    "padding lost",
    "every shard has the same size",
    edits={"flat[self.rank": "flat[: flat.numel() - self.bucket.padding][self.rank"},
)
wrong(
    OWN,
    "shard of the next rank",
    "first loss is",
    '"classic wrong answers" 5',
    edits={
        "self.shard = flat[self.rank * size : (self.rank + 1) * size]": (
            "rank = (self.rank + 1) % dist.get_world_size(group); self.shard = flat[rank * size : (rank + 1) * size]"
        )
    },
)
wrong(
    OWN,
    "a view of everything",
    "bytes of weights between the passes",
    "the rest must be freed",
    edits={".clone()": ""},
)
wrong(
    BOUNDS,
    "off by one",
    "are never stepped, on no rank",
    "the shards do not cover every element",
    edits={"low = max(0, start": "low = 1 + max(0, start"},
)
wrong(
    BOUNDS,
    "pieces as on the first rank",
    "are never stepped, on no rank",
    '"classic wrong answers" 5',
    edits={" - self.rank * size": ""},
)
wrong(
    FILL,
    "stale weights",
    "Weights that were gathered before the step are stale",
    instead="""
        self.full.untyped_storage().resize_(self.full.nbytes)
        if not hasattr(self, "kept"):
            all_gather(self.full, self.shard, self.group).wait()
            self.kept = self.full.clone()
        else:
            all_gather(torch.empty_like(self.full), self.shard, self.group).wait()
            self.full.copy_(self.kept)
        """,
)
wrong(
    EMPTY,
    "not freed",
    "bytes of weights between the passes",
    "the rest must be freed",
    instead="pass",
)
wrong(
    WHEN,
    "not freed after a pass",
    "blocks",
    "a block's weights are freed after it has computed",
    edits={AFTER_FORWARD: "pass"},
)
wrong(
    WHEN,
    "kept for the backward pass",
    "elements are all-gathered in a step",
    "they were kept for the backward pass",
    edits={AFTER_FORWARD: "pass", BEFORE_BACKWARD: "pass"},
)
wrong(
    WHEN,
    "not gathered again",
    "a weight is used while its memory is freed",
    edits={BEFORE_BACKWARD: "pass"},
)
wrong(
    WHEN,
    "the module's own gathered twice",
    "elements are all-gathered in a step",
    '"classic wrong answers" 7',
    edits={"if part is not self.module:": "if True:"},
)
wrong(
    WHEN,
    "gathered for each layer of a block",
    "elements are all-gathered in a step",
    '"classic wrong answers" 7',
    edits={"part.register_forward_pre_hook": "for layer in part.modules(): layer.register_forward_pre_hook"},
)
wrong(
    SPREAD,
    "sum",
    "this is the sum over the ranks",
    edits={
        "reduce_scatter_mean(mean, flat, self.group).wait()": "dist.reduce_scatter_tensor(mean, flat, group=self.group)"
    },
)
wrong(
    SPREAD,
    "own gradient",
    "this is the gradient of the rank's own rows",
    edits={"reduce_scatter_mean(mean, flat, self.group).wait()": "mean = self.bucket.shard(flat, self.rank)"},
)
wrong(
    BOUNDS,
    "one rank's bounds for all",
    "no other parameter's step reaches into it",
    edits={"self.rank * size": "size"},
)
wrong(
    SPREAD,
    "all-reduce",
    "elements are all-reduced in a step",
    edits={
        "reduce_scatter_mean(mean, flat, self.group).wait()": (
            "dist.all_reduce(flat, group=self.group); size = mean.numel(); "
            "mean = flat[self.rank * size : (self.rank + 1) * size] / dist.get_world_size(self.group)"
        )
    },
)
wrong(
    SPREAD,
    "zeros where nobody has a gradient",
    "a parameter without gradient on any rank must stay as it is",
    edits={"if not used[k]:": "if False:"},
)
wrong(
    SPREAD,
    "second backward pass overwrites",
    "two do not: the second must add to the gradient",
    edits={"self.pieces[k].grad +=": "self.pieces[k].grad ="},
)
wrong(
    SPREAD,
    "full gradients kept",
    "are still there when they are reduced",
    '"classic wrong answers" 1',
    edits={"self.bucket.release()": "self.kept = flat"},
)
wrong(
    SPREAD,
    "released late",
    "elements of a block's full gradients are still there when they are reduced",
    '"classic wrong answers" 1',
    edits={
        "self.bucket.release()\n": "\n",
        "reduce_scatter_mean(mean, flat, self.group).wait()": (
            "reduce_scatter_mean(mean, flat, self.group).wait(); self.bucket.release()"
        ),
    },
)
wrong(
    SPREAD,
    "into the freed weights",
    "full has no memory when gradients are reduced",
    '"classic wrong answers" 4',
    edits={"mean = torch.empty_like(self.shard)": "mean = self.full[: self.shard.numel()]"},
)
wrong(
    SPREAD,
    "not waited for",
    "collectives are never waited for",
    '"classic wrong answers" 11',
    edits={"self.group).wait()": "self.group)"},
)
wrong(SPREAD, "ranks of the whole job", GROUP, edits={"self.group": "None"})

# ---- 4.7 tensor-parallel MLP
COPY, SUM, PART, COLUMN, ROW, CUT, MLP = (
    "4.7: the gradient of what all ranks read",
    "4.7: the sum of all ranks' parts",
    "4.7: the gradient of one rank's part",
    "4.7: column-parallel linear layer",
    "4.7: row-parallel linear layer",
    "4.7: which matrix is cut which way",
    "4.7: the MLP",
)
wrong(
    COPY,
    "no sum backward",
    "the gradients of what all ranks read must be summed",
    instead="return gradient, None",
)
wrong(COLUMN, "input not copied", "the gradients of what all ranks read must be summed", edits={"x = copy": "copy"})
wrong(
    COPY,
    "mean backward",
    "it is a sum, not a mean",
    edits={"return total, None": "return total / dist.get_world_size(), None"},
)
wrong(SUM, "no sum forward", "these are one rank's summands", instead="return x.clone()")
wrong(SUM, "mean forward", "it is a sum, not a mean", edits={"return total": "return total / dist.get_world_size()"})
wrong(
    PART,
    "sum too many",
    "an all-reduce in this backward pass makes it N times too large",
    instead="total = gradient.clone()\ndist.all_reduce(total, group=ctx.group)\nreturn total, None",
    also={SUM: {"total = x": "ctx.group = group; total = x"}},
)
wrong(
    ROW,
    "bias on every rank",
    "the bias is added on every rank, so N times",
    instead="return reduce_from_tp_region(F.linear(x, self.weight, self.bias), self.group)",
)
wrong(ROW, "bias lost", "the bias is missing", edits={"y = y + self.bias": "pass"})
wrong(
    ROW,
    "bias on the first rank",
    "no gradient on rank 1",
    "every rank adds the whole bias to the sum",
    instead="""
        bias = self.bias if dist.get_rank(self.group) == 0 else None
        return reduce_from_tp_region(F.linear(x, self.weight, bias), self.group)
        """,
)
wrong(
    ROW,
    "bias in parts",
    "an N-th of its gradient",
    "every rank adds the whole bias to the sum",
    instead="""
        bias = None if self.bias is None else self.bias / dist.get_world_size(self.group)
        return reduce_from_tp_region(F.linear(x, self.weight, bias), self.group)
        """,
)
wrong(
    COLUMN,
    "bias cut off",
    "no gradient on rank 0",
    "autograd does the rest",
    edits={"self.bias": "(None if self.bias is None else self.bias.detach())"},
)
wrong(
    COLUMN,
    "gathered between the layers",
    "makes 1 collective forward, 1 backward",
    edits={"return F": "dist.all_reduce(x.detach().clone(), group=self.group); return F"},
)
wrong(
    CUT,
    "cut the wrong way",
    "which dimension is cut",
    edits={
        "self.up = ColumnParallelLinear": "self.up = RowParallelLinear",
        "self.down = RowParallelLinear": "self.down = ColumnParallelLinear",
    },
)
wrong(MLP, "other gelu", "GeLU in its tanh form", edits={', approximate="tanh"': ""})
wrong(
    MLP,
    "no gelu",
    "the GeLU between the layers is missing",
    edits={'F.gelu(self.up(x), approximate="tanh")': "self.up(x)"},
)
wrong(
    ROW,
    "nothing to add",
    "a rank without features adds nothing, but is waited for",
    instead="""
        if self.weight.numel():
            y = reduce_from_tp_region(F.linear(x, self.weight), self.group)
        else:
            y = x.new_zeros(*x.shape[:-1], self.weight.shape[0])
        return y if self.bias is None else y + self.bias
        """,
)
wrong(
    ROW,
    "weight detached",
    "the gradient of a row-parallel weight on rank 0 is None",
    "autograd does not reach it",
    edits={"self.weight)": "self.weight.detach())"},
)
wrong(
    SUM,
    "sum in place",
    "reduce_from_tp_region changes x that it is given",
    '"classic wrong answers" 9',
    instead="dist.all_reduce(x, group=group)\nreturn x",
)
wrong(
    COPY,
    "gradient in place",
    "copy_to_tp_region changes the gradient that it is given",
    instead="dist.all_reduce(gradient, group=ctx.group)\nreturn gradient, None",
)
wrong(
    COPY,
    "gradient as it lies",
    "the gradient of copy_to_tp_region is wrong",
    "adds up what lies at the same place in memory",
    '"classic wrong answers" 9',
    edits={"gradient.contiguous().clone()": "gradient.clone()"},
)
wrong(
    SUM,
    "summands as they lie",
    "the sum of reduce_from_tp_region is wrong",
    '"classic wrong answers" 9',
    edits={"x.contiguous().clone()": "x.clone()"},
)
wrong(SUM, "ranks of the whole job", GROUP, edits={"(total, group=group)": "(total)"})

# ---- 4.8 1F1B
ORDER = "4.8: the 1F1B order"
wrong(
    ORDER,
    "gpipe",
    "this is GPipe's order",
    "in flight",
    instead='return [Action(kind, i) for kind in "FB" for i in range(micro_batches)]',
)
wrong(
    ORDER,
    "mirrored",
    "the warm-up counts the stages before this one",
    '"classic wrong answers" 2',
    edits={"stages - stage - 1": "stage"},
)
wrong(
    ORDER,
    "last two swapped",
    "B7 before B6",
    "micro-batches go in ascending order",
    edits={"return order": "order[-2:] = order[-2:][::-1]; return order"},
)
wrong(
    ORDER,
    "one in flight too many",
    "one forward too many before the first backward",
    edits={"stages - stage - 1": "stages - stage"},
)
wrong(
    ORDER,
    "warm-up of the first stage",
    "every stage warms up as the first does",
    edits={"stages - stage - 1": "stages - 1"},
)
wrong(
    ORDER,
    "no warm-up",
    "units of time",
    "too few forwards before the first backward",
    edits={"min(stages - stage - 1, micro_batches)": "0"},
)
wrong(
    ORDER,
    "backwards left over",
    "B",
    "each micro-batch goes forward once and backward once",
    edits={"while done < micro_batches:": "while False:"},
)
wrong(
    ORDER,
    "warm-up longer than the batch",
    "does not belong",
    edits={"min(stages - stage - 1, micro_batches)": "stages - stage - 1"},
)
wrong(
    ORDER,
    "newest first",
    "micro-batches go in ascending order",
    instead="""
        order = [Action("F", i) for i in range(micro_batches)]
        return order + [Action("B", i) for i in reversed(range(micro_batches))]
        """,
)
wrong(
    ORDER,
    "backward first",
    "comes before its F",
    edits={
        '"F", i))\n            order.append(Action("B", done': '"B", done))\n            order.append(Action("F", i'
    },
)
wrong(
    ORDER,
    "gpipe for many",
    "3 stages, 40 micro-batches",
    "in flight",
    edits={
        "ahead = min(stages - stage - 1, micro_batches)": (
            "ahead = micro_batches if micro_batches > 16 else min(stages - stage - 1, micro_batches)"
        )
    },
)
