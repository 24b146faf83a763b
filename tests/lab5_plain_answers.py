"""Plain answers to lab 5, as a student might write them: right, and without what the solution adds.

A test fills the lab's places with them, so that the checks are held to an answer that is not the solution, and wrong
answers are edits of these.
"""

from __future__ import annotations

LAB = "lab5_serving"

#: What stands in each place, by the label that the place has in the solution.
ANSWERS: dict[str, str] = {
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
}
