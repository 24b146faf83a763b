"""Plain answers to lab 5, as a student might write them: right, and without what the solution adds.

A test fills the lab's places with them, so that the checks are held to an answer that is not the solution, and wrong
answers are edits of these.
"""

from __future__ import annotations

from utils.checks.answers import Answers

#: What stands in each place, by the label that the place has in the solution.
ANSWERS = Answers(
    {
        "5.1: position ids": """
        return torch.stack([torch.arange(n, n + count) for n in self.lengths.tolist()])
        """,
        "5.1: keep keys and values": """
        for b, n in enumerate(self.lengths.tolist()):
            self.keys[layer, b, n : n + count] = k[b]
            self.values[layer, b, n : n + count] = v[b]
        """,
        "5.1: what each query sees": """
        visible = torch.zeros(batch, count, end, dtype=torch.bool)
        for b, n in enumerate(self.lengths.tolist()):
            for t in range(count):
                visible[b, t, : n + t + 1] = True
        """,
        "5.1: one step": """
        scores = model(step, cache.positions(step.shape[1]), cache)
        tokens = torch.stack([scores[b, int(n) - 1].argmax() for b, n in enumerate(counts)])
        cache.advance(counts)
        """,
        "5.2: allocate": """
        blocks = list(cached)
        for block in blocks:
            self.pool.share(block)
        while len(blocks) < self.blocks_for(len(tokens)):
            blocks.append(self.pool.take())
        self.sequences[id] = Sequence(list(tokens), blocks, digests)
        return len(cached) * self.block_size
        """,
        "5.2: append": """
        if tokens and self.writes_shared(id):
            old = sequence.blocks[-1]
            new = self.pool.take()
            sequence.blocks[-1] = new
            self.pool.give_back(old)
            copies = [(old, new)]
        elif tokens and len(sequence.tokens) % self.block_size != 0:
            self.pool.forget(sequence.blocks[-1])
        sequence.tokens += tokens
        while len(sequence.blocks) < self.blocks_for(len(sequence.tokens)):
            sequence.blocks.append(self.pool.take())
        """,
        "5.2: fork": """
        for block in original.blocks:
            self.pool.share(block)
        self.sequences[child] = Sequence(list(original.tokens), list(original.blocks), [])
        """,
        "5.2: free": """
        for block in sequence.blocks[::-1]:
            self.pool.give_back(block)
        del self.sequences[id]
        """,
        "5.3: a step of continuous batching": """
        for request in list(self.running):
            if request not in self.running or budget == 0:
                continue
            count = self._make_room(request, min(request.pending, budget), step)
            if count > 0:
                step.chunks.append(Chunk(request, request.computed, count))
                budget -= count
        prompts = 0
        while self.waiting and budget > 0 and len(self.running) < self.max_batch and not step.preempted:
            if not self.chunked_prefill and prompts and self.waiting[0].pending > budget:
                break
            if not self._admit(step):
                break
            request = self.running[-1]
            count = request.pending
            if self.chunked_prefill:
                count = min(count, budget)
            step.chunks.append(Chunk(request, request.computed, count))
            prompts += 1
            budget = max(0, budget - count)
        """,
        "5.3: a step of static batching": """
        if not self.running:
            promised = 0
            while self.waiting and len(self.running) < self.max_batch:
                promised += self.manager.blocks_for(self.waiting[0].limit - 1)
                if promised > self.manager.num_blocks or not self._admit(step):
                    break
        for request in list(self.running):
            if budget == 0:
                break
            count = min(request.pending, budget) if self.chunked_prefill else request.pending
            count = self._make_room(request, count, step)
            step.chunks.append(Chunk(request, request.computed, count))
            budget = max(0, budget - count)
        """,
        "5.4: the tokens of a part": """
        tiles = (length + BLOCK_N - 1) // BLOCK_N
        first = (tiles * part // parts) * BLOCK_N
        end = (tiles * (part + 1) // parts) * BLOCK_N
        end = tl.minimum(end, length)
        return first, end
        """,
        "5.4: one step of the loop": """
        token = start + tl.arange(0, BLOCK_N)
        inside = token < end
        block = tl.load(table_ptr + (token // BLOCK_SIZE) * stride_bb, mask=inside, other=0)
        k = load_tokens(
            k_head_ptr, block, token, inside, stride_k[0], stride_k[1], stride_k[3], BLOCK_SIZE, HEAD_DIM, BLOCK_D
        )
        v = load_tokens(
            v_head_ptr, block, token, inside, stride_v[0], stride_v[1], stride_v[3], BLOCK_SIZE, HEAD_DIM, BLOCK_D
        )
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale_log2
        s = tl.where(inside[None, :], s, float("-inf"))
        new = tl.maximum(m, tl.max(s, axis=1))
        p = tl.exp2(s - new[:, None])
        ratio = tl.exp2(m - new)
        d = d * ratio + tl.sum(p, axis=1)
        o = o * ratio[:, None] + tl.dot(p.to(v.dtype), v, input_precision=PRECISION)
        m = new
        """,
        "5.4: the end of a part": """
        seen = d > 0
        o = o / tl.where(seen, d, 1.0)[:, None]
        lse = tl.where(seen, 0.6931471805599453 * (m + tl.log2(d)), float("-inf"))
        """,
        "5.5: merging parts": """
        part = start + tl.arange(0, BLOCK_P)
        inside = part < parts
        lse = tl.load(logsumexps_ptr + part * stride_lp, mask=inside, other=float("-inf"))
        new = tl.maximum(m, tl.max(lse, axis=0))
        weight = tl.exp(lse - new)
        place = part[:, None] * stride_ip + column[None, :] * stride_id
        x = tl.load(outputs_ptr + place, mask=inside[:, None] & (column < HEAD_DIM)[None, :], other=0.0)
        x = tl.where(weight[:, None] > 0, x, 0.0)
        ratio = tl.exp(m - new)
        d = d * ratio + tl.sum(weight, axis=0)
        o = o * ratio + tl.sum(weight[:, None] * x, axis=0)
        m = new
        """,
        "5.6: the residual distribution": """
        left = torch.clamp(target_probs.double() - draft_probs.double(), min=0)
        total = left.sum(dim=-1, keepdim=True)
        rest = left / total
        return torch.where(total == 0, target_probs.double(), rest)
        """,
        "5.6: accept, replace or add": """
        result = []
        for i, token in enumerate(drafted.tolist()):
            ratio = float(target_probs[i, token]) / float(draft_probs[i, token])
            if float(uniforms[i]) < min(1.0, ratio):
                result.append(token)
                continue
            rest = residual(target_probs[i], draft_probs[i])
            result.append(int(draw(rest, uniforms[-1])))
            return result
        result.append(int(draw(target_probs[-1], uniforms[-1])))
        return result
        """,
        "5.6: drop what was rejected": """
        for model in (checker, drafter):
            model.keep(len(tokens) - 1)
        """,
        "5.7: schedule and run": """
        step = self.scheduler.schedule()
        logits, failed = self._run(step)
        """,
        "5.7: count and commit": """
        for chunk in step.chunks:
            if chunk.request.id in failed:
                continue
            end = chunk.start + chunk.count
            chunk.request.computed = end
            self.manager.commit(chunk.request.id, end)
        """,
        "5.7: who gets a token": """
        sampling = []
        for chunk in step.chunks:
            if chunk.samples and chunk.request.id not in failed:
                sampling.append(chunk)
        """,
        "5.7: tokens and errors": """
        for chunk, token in zip(sampling, chosen):
            if chunk.request.id in failed:
                continue
            outputs.append(self._accept(chunk.request, token, now))
        for id, error in failed.items():
            outputs.append(self._end(self.requests[id], "error", error))
        """,
    }
)
