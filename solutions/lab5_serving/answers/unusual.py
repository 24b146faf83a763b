"""Right answers to lab 5 that few would write: comprehensions where others loop, other masks, other orders."""

from __future__ import annotations

from utils.checks.answers import Answers

ANSWERS = Answers()
also_right = ANSWERS.also_right

# ---- 5.1: KV-cached decode
POSITIONS, KEEP = "5.1: position ids", "5.1: keep keys and values"
VISIBLE, STEP = "5.1: what each query sees", "5.1: one step"
also_right("broadcast sums", {
    POSITIONS: "return torch.arange(count, device=self.lengths.device).unsqueeze(0) + self.lengths.unsqueeze(1)",
    KEEP: """
        slots = self.positions(count)
        for b in range(batch):
            self.keys[layer, b].index_copy_(0, slots[b], k[b])
            self.values[layer, b].index_copy_(0, slots[b], v[b])
    """,
    VISIBLE: "visible = ~(torch.arange(end)[None, None] > self.positions(count).unsqueeze(-1))",
})  # fmt: skip
also_right("triangles", {
    POSITIONS: "return torch.tensor([[int(n) + t for t in range(count)] for n in self.lengths])",
    VISIBLE: """
        ones = torch.ones(count, end, dtype=torch.bool)
        visible = torch.stack([torch.tril(ones, diagonal=n) for n in self.lengths.tolist()])
    """,
    STEP: """
        logits = model(step, cache.positions(step.shape[1]), cache)
        last = logits.gather(1, (counts - 1)[:, None, None].expand(-1, 1, logits.shape[-1]))
        tokens = last.squeeze(1).argmax(dim=-1)
        cache.advance(counts)
    """,
})  # fmt: skip
also_right("scattered through a mask of slots", {
    KEEP: """
        slots = self.positions(count)[:, :, None, None].expand_as(k)
        self.keys[layer].scatter_(1, slots, k.to(self.keys.dtype))
        self.values[layer].scatter_(1, slots, v.to(self.values.dtype))
    """,
    VISIBLE: """
        query = self.positions(count)
        slot = torch.arange(end, device=k.device)
        visible = (query[..., None] - slot) >= 0
    """,
})  # fmt: skip
also_right("by cumulative sums", {
    POSITIONS: """
        steps = torch.ones(len(self.lengths), count, dtype=torch.int64, device=self.lengths.device)
        steps[:, 0] = self.lengths
        return steps.cumsum(1)
    """,
    STEP: """
        logits = model(step, cache.positions(step.size(1)), cache)
        chosen = []
        for row, n in zip(logits, counts.tolist(), strict=True):
            chosen.append(int(torch.argmax(row[n - 1])))
        tokens = torch.tensor(chosen, device=step.device)
        cache.advance(counts)
    """,
})  # fmt: skip

# ---- 5.2: block manager
ALLOCATE, APPEND, FORK, FREE = "5.2: allocate", "5.2: append", "5.2: fork", "5.2: free"
also_right("comprehensions", {
    ALLOCATE: """
        for block in cached:
            self.pool.share(block)
        new = [self.pool.take() for _ in range(len(cached), self.blocks_for(len(tokens)))]
        self.sequences[id] = Sequence(tokens=tokens[:], blocks=[*cached, *new], digests=digests[:])
        return self.block_size * len(cached)
    """,
    FORK: """
        shared = original.blocks[:]
        for block in shared:
            self.pool.share(block)
        self.sequences[child] = Sequence(original.tokens[:], shared, original.digests[:])
    """,
})  # fmt: skip
also_right("one token after another", {
    APPEND: """
        if len(tokens) > 0:
            if self.writes_shared(id):
                copies.append((sequence.blocks[-1], self.pool.take()))
                self.pool.give_back(sequence.blocks.pop())
                sequence.blocks.append(copies[0][1])
            elif len(sequence.tokens) % self.block_size > 0:
                self.pool.forget(sequence.blocks[-1])
        for token in tokens:
            if len(sequence.tokens) == len(sequence.blocks) * self.block_size:
                sequence.blocks.append(self.pool.take())
            sequence.tokens.append(token)
    """,
    FREE: """
        blocks = list(self.sequences.pop(id).blocks)
        while blocks:
            self.pool.give_back(blocks.pop())
    """,
})  # fmt: skip
also_right("counted first", {
    APPEND: """
        partial = len(sequence.tokens) % self.block_size
        if tokens and partial and self.writes_shared(id):
            shared, sequence.blocks[-1] = sequence.blocks[-1], self.pool.take()
            self.pool.give_back(shared)
            copies += [(shared, sequence.blocks[-1])]
        elif tokens and partial:
            self.pool.forget(sequence.blocks[-1])
        missing = self.blocks_for(len(sequence.tokens) + len(tokens)) - len(sequence.blocks)
        sequence.blocks.extend(self.pool.take() for _ in range(missing))
        sequence.tokens.extend(tokens)
    """,
    FREE: """
        for index in range(len(sequence.blocks) - 1, -1, -1):
            self.pool.give_back(sequence.blocks[index])
        self.sequences.pop(id)
    """,
})  # fmt: skip
also_right("copied and replaced", {
    ALLOCATE: """
        from itertools import chain

        list(map(self.pool.share, cached))
        rest = self.blocks_for(len(tokens)) - len(cached)
        blocks = list(chain(cached, (self.pool.take() for _ in range(rest))))
        self.sequences[id] = Sequence([*tokens], blocks, list(digests))
        return len(digests) * self.block_size
    """,
    FORK: """
        from copy import deepcopy

        self.sequences[child] = deepcopy(original)
        for block in self.sequences[child].blocks:
            self.pool.share(block)
    """,
})  # fmt: skip

# ---- 5.3: schedulers
CONTINUOUS, STATIC = "5.3: a step of continuous batching", "5.3: a step of static batching"
also_right("a helper that plans", {
    CONTINUOUS: """
        def plan(request, count):
            step.chunks.append(Chunk(request=request, start=request.computed, count=count))
            return max(0, budget - count)

        for request in tuple(self.running):
            if request.status is Status.RUNNING and budget > 0:
                count = self._make_room(request, min(budget, request.pending), step)
                if count:
                    budget = plan(request, count)
        first = True
        while budget > 0 and self.waiting and not step.preempted and len(self.running) < self.max_batch:
            fits = self.chunked_prefill or self.waiting[0].pending <= budget
            if not (fits or first) or not self._admit(step):
                break
            first = False
            newest = self.running[-1]
            budget = plan(newest, min(newest.pending, budget) if self.chunked_prefill else newest.pending)
    """,
})  # fmt: skip
also_right("an endless loop with breaks", {
    CONTINUOUS: """
        index = 0
        while index < len(self.running) and budget > 0:
            request = self.running[index]
            count = self._make_room(request, min(request.pending, budget), step)
            if count == 0:
                break
            step.chunks.append(Chunk(request, request.computed, count))
            budget -= count
            index += 1
        admitted = 0
        while True:
            if budget <= 0 or not self.waiting or step.preempted or len(self.running) >= self.max_batch:
                break
            if admitted > 0 and not self.chunked_prefill and self.waiting[0].pending > budget:
                break
            if not self._admit(step):
                break
            request = self.running[-1]
            count = min(request.pending, budget) if self.chunked_prefill else request.pending
            step.chunks.append(Chunk(request, request.computed, count))
            admitted += 1
            budget -= min(budget, count)
    """,
})  # fmt: skip
also_right("a static batch promised as a sum", {
    STATIC: """
        if len(self.running) == 0:
            needs = []
            while self.waiting and len(self.running) < self.max_batch:
                needs.append(self.manager.blocks_for(self.waiting[0].limit - 1))
                if sum(needs) > self.manager.num_blocks:
                    break
                if not self._admit(step):
                    break
        for request in self.running[:]:
            if budget <= 0:
                break
            wanted = request.pending
            if self.chunked_prefill:
                wanted = min(wanted, budget)
            given = self._make_room(request, wanted, step)
            step.chunks += [Chunk(request, request.computed, given)]
            budget -= min(budget, given)
    """,
})  # fmt: skip
also_right("what is left counted down", {
    STATIC: """
        if not self.running:
            left = self.manager.num_blocks
            for _ in range(min(self.max_batch, len(self.waiting))):
                left -= self.manager.blocks_for(self.waiting[0].limit - 1)
                if left < 0 or not self._admit(step):
                    break
        for request in list(self.running):
            count = request.pending if not self.chunked_prefill else min(budget, request.pending)
            if budget == 0 or count == 0:
                continue
            self._make_room(request, count, step)
            step.chunks.append(Chunk(request, request.computed, count))
            budget = budget - count if budget > count else 0
    """,
    CONTINUOUS: {"if not self._admit(step):": "if self._admit(step) is False:"},
})  # fmt: skip

# ---- 5.4: paged decode kernel
PART, LOOP, END = "5.4: the tokens of a part", "5.4: one step of the loop", "5.4: the end of a part"
SUM = "o = o * ratio[:, None] + tl.dot(p.to(v.dtype), v, input_precision=PRECISION)"
also_right("a sum in the product", {
    LOOP: {SUM: "o = tl.dot(p.to(v.dtype), v, o * ratio[:, None], input_precision=PRECISION)"},
    PART: {"tiles = (length + BLOCK_N - 1) // BLOCK_N": "tiles = tl.cdiv(length, BLOCK_N)",
           "end = tl.minimum(end, length)": "end = min(length, end)"},
})  # fmt: skip
also_right("the factor last", {
    LOOP: {"s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale_log2":
           "s = scale_log2 * tl.dot(q, k.T, input_precision=PRECISION)",
           "d = d * ratio + tl.sum(p, axis=1)": "d *= ratio\n        d += tl.sum(p, axis=1)"},
    END: {"0.6931471805599453 * (m + tl.log2(d))": "m * 0.6931471805599453 + tl.log(d)"},
})  # fmt: skip
also_right("scores shifted in place", {
    LOOP: {"p = tl.exp2(s - new[:, None])": "s -= new[:, None]\n        p = tl.exp2(s)",
           "mask=inside, other=0)": "mask=token < end, other=0)"},
    END: {"o = o / tl.where(seen, d, 1.0)[:, None]": "o = o * (1.0 / tl.where(seen, d, 1.0))[:, None]"},
})  # fmt: skip
also_right("the larger by a comparison", {
    LOOP: {"new = tl.maximum(m, tl.max(s, axis=1))":
           "top = tl.max(s, axis=1)\n        new = tl.where(top > m, top, m)"},
    END: {"seen = d > 0": "seen = d != 0.0"},
})  # fmt: skip

# ---- 5.5: split-KV merge
MERGE = "5.5: merging parts"
also_right("powers of two", {
    MERGE: {"weight = tl.exp(lse - new)": "weight = tl.exp2((lse - new) * 1.4426950408889634)",
            "ratio = tl.exp(m - new)": "ratio = tl.exp2((m - new) * 1.4426950408889634)"},
})  # fmt: skip
also_right("sums in place", {
    MERGE: {"d = d * ratio + tl.sum(weight, axis=0)": "d *= ratio\n        d += tl.sum(weight, axis=0)",
            "o = o * ratio + tl.sum(weight[:, None] * x, axis=0)":
                "o *= ratio\n        o += tl.sum(x * weight[:, None], axis=0)"},
})  # fmt: skip
also_right("empty parts by their weight", {
    MERGE: {"x = tl.where(weight[:, None] > 0, x, 0.0)\n":
                "weighted = tl.where(weight[:, None] == 0.0, 0.0, weight[:, None] * x)\n",
            "tl.sum(weight[:, None] * x, axis=0)": "tl.sum(weighted, 0)"},
})  # fmt: skip
also_right("loaded only where a part saw something", {
    MERGE: {"mask=inside[:, None] & (column < HEAD_DIM)[None, :]":
            "mask=(lse > float('-inf'))[:, None] & inside[:, None] & (column < HEAD_DIM)[None, :]",
            "        x = tl.where(weight[:, None] > 0, x, 0.0)\n": ""},
})  # fmt: skip

# ---- 5.6: speculative sampling
RESIDUAL, ACCEPT, DROP = "5.6: the residual distribution", "5.6: accept, replace or add", "5.6: drop what was rejected"
also_right("without a quotient", {
    ACCEPT: """
        accepted = 0
        while accepted < len(drafted):
            token = int(drafted[accepted])
            if uniforms[accepted] * draft_probs[accepted, token].double() >= target_probs[accepted, token].double():
                break
            accepted += 1
        if accepted < len(drafted):
            rest = residual(target_probs[accepted], draft_probs[accepted])
        else:
            rest = target_probs[accepted]
        return drafted[:accepted].tolist() + [int(draw(rest, uniforms[-1]))]
    """,
    DROP: "drafter.keep(len(tokens) - 1)\nchecker.keep(len(tokens) - 1)",
})  # fmt: skip
also_right("all at once", {
    RESIDUAL: """
        positive = torch.relu(target_probs.double() - draft_probs.double())
        mass = positive.sum(-1, keepdim=True)
        return torch.where(mass > 0, positive / mass, target_probs.double())
    """,
    ACCEPT: """
        rows = torch.arange(len(drafted))
        p, q = target_probs[rows, drafted].double(), draft_probs[rows, drafted].double()
        kept = (uniforms[:-1] < p / q).long()
        count = int(kept.cumprod(0).sum())
        source = target_probs[-1] if count == len(drafted) else residual(target_probs[count], draft_probs[count])
        return [*drafted.tolist()[:count], draw(source, uniforms[-1]).item()]
    """,
})  # fmt: skip
also_right("a for loop with an else", {
    RESIDUAL: """
        p, q = target_probs.double(), draft_probs.double()
        left = torch.maximum(p, q) - q
        total = left.sum(-1, keepdim=True)
        return torch.where(total == 0, p, left / torch.where(total == 0, torch.ones_like(total), total))
    """,
    ACCEPT: """
        tokens = []
        for p, q, token, u in zip(target_probs, draft_probs, drafted.tolist(), uniforms.tolist()):
            if u >= p[token].item() / q[token].item():
                tokens.append(int(draw(residual(p, q), uniforms[-1])))
                break
            tokens.append(token)
        else:
            tokens.append(int(draw(target_probs[-1], uniforms[-1])))
        return tokens
    """,
})  # fmt: skip
also_right("the first rejected one", {
    ACCEPT: """
        def rejected(i):
            token = drafted[i]
            return not float(uniforms[i]) < float(target_probs[i, token]) / float(draft_probs[i, token])

        first = next(filter(rejected, range(len(drafted))), None)
        if first is None:
            return drafted.tolist() + [int(draw(target_probs[-1], uniforms[-1]))]
        added = draw(residual(target_probs[first], draft_probs[first]), uniforms[-1])
        return drafted[:first].tolist() + [int(added)]
    """,
    DROP: "for model in [drafter, checker]:\n    model.keep(len(tokens[:-1]))",
})  # fmt: skip

# ---- 5.7: the engine
RUN, COUNT = "5.7: schedule and run", "5.7: count and commit"
SAMPLE, TOKENS = "5.7: who gets a token", "5.7: tokens and errors"
also_right("comprehensions", {
    SAMPLE: "sampling = [c for c in step.chunks if c.request.id not in failed and c.samples]",
    TOKENS: """
        outputs += [self._accept(c.request, t, now) for c, t in zip(sampling, chosen) if c.request.id not in failed]
        outputs += [self._end(self.requests[id], "error", failed[id]) for id in failed]
    """,
})  # fmt: skip
also_right("filter and extend", {
    RUN: "step = self.scheduler.schedule()\nresult = self._run(step)\nlogits, failed = result",
    COUNT: """
        for chunk in filter(lambda chunk: chunk.request.id not in failed, step.chunks):
            chunk.request.computed += chunk.count
            self.manager.commit(chunk.request.id, chunk.request.computed)
    """,
    SAMPLE: "sampling = list(filter(lambda each: each.samples and each.request.id not in failed, step.chunks))",
})  # fmt: skip
also_right("a set of what went well", {
    COUNT: """
        good = [chunk for chunk in step.chunks if chunk.request.id not in failed]
        for request, start, count in ((chunk.request, chunk.start, chunk.count) for chunk in good):
            request.computed = start + count
            self.manager.commit(id=request.id, computed=request.computed)
    """,
    SAMPLE: "sampling = [chunk for chunk in good if chunk.samples]",
})  # fmt: skip
also_right("indices", {
    SAMPLE: """
        sampling = []
        for i in range(len(step.chunks)):
            if step.chunks[i].request.id in failed or not step.chunks[i].samples:
                continue
            sampling += [step.chunks[i]]
    """,
    TOKENS: """
        for i, chunk in enumerate(sampling):
            if chunk.request.id not in failed:
                outputs.append(self._accept(chunk.request, chosen[i], now))
        for request in [self.requests[id] for id in failed]:
            outputs.append(self._end(request, "error", failed[request.id]))
    """,
})  # fmt: skip
