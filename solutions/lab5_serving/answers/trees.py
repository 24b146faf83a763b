"""Right and wrong answers to exercise 5.8, the tree mask."""

from __future__ import annotations

import functools

from utils.checks.answers import Answers

POSITIONS, MASK, PATH, KEEP = (
    "5.8: positions of the nodes",
    "5.8: who sees whom",
    "5.8: the accepted path",
    "5.8: keep the path",
)
ANSWERS = Answers(
    {
        POSITIONS: """
        result = []
        for node in range(len(parents)):
            position = past
            while parents[node] != -1:
                node = parents[node]
                position += 1
            result.append(position)
        return torch.tensor(result)
        """,
        MASK: """
        n = len(parents)
        mask = torch.zeros(n, past + n, dtype=torch.bool)
        for i in range(n):
            mask[i, :past] = True
            node = i
            while node != -1:
                mask[i, past + node] = True
                node = parents[node]
        return mask
        """,
        PATH: """
        path = []
        node = 0
        while True:
            children = [c for c in range(1, len(parents)) if parents[c] == node and tokens[c] == choices[node]]
            if not children:
                return path
            node = children[0]
            path.append(node)
        """,
        KEEP: """
        new = []
        slots = [past]
        last = 0
        for node in path:
            new.append(tokens[node])
            slots.append(past + node)
            last = node
        new.append(choices[last])
        cache.keep(slots)
        """,
    }
)

# ---- right answers that few would write
also_right = ANSWERS.also_right
also_right("counted in the mask", {
    POSITIONS: "return tree_mask(parents, 0).sum(dim=1) - 1 + past",
    MASK: """
        def sees(i, j):
            return i == j or (i > j and sees(parents[i], j))

        n = len(parents)
        rows = [[True] * past + [sees(i, j) for j in range(n)] for i in range(n)]
        return torch.tensor(rows, dtype=torch.bool).reshape(n, past + n)
    """,
})  # fmt: skip
also_right("steps of a graph", {
    MASK: """
        n = len(parents)
        up = torch.zeros(n, n)
        for node in range(1, n):
            up[node, parents[node]] = 1.0
        seen = torch.linalg.inv(torch.eye(n) - up) > 0.5
        return torch.cat([torch.ones(n, past, dtype=torch.bool), seen], dim=-1)
    """,
    KEEP: """
        ends = [0] + path
        cache.keep((torch.tensor(ends) + past).tolist())
        new = [choices[node] for node in ends]
    """,
})  # fmt: skip
also_right("bits", {
    MASK: """
        bits = []
        for node, parent in enumerate(parents):
            bits.append(1 << node | (bits[parent] if node else 0))
        n = len(parents)
        nodes = torch.tensor([[bool(row >> j & 1) for j in range(n)] for row in bits])
        return torch.cat((nodes.new_ones(n, past), nodes), dim=1)
    """,
    PATH: """
        child = {}
        for node in range(len(parents) - 1, 0, -1):
            child[parents[node], tokens[node]] = node
        path = [0]
        while (path[-1], choices[path[-1]]) in child:
            path.append(child[path[-1], choices[path[-1]]])
        return path[1:]
    """,
})  # fmt: skip
also_right("recursion", {
    POSITIONS: """
        def depth(node):
            return 0 if node == 0 else 1 + depth(parents[node])

        return torch.tensor([depth(node) for node in range(len(parents))], dtype=torch.int64).add(past)
    """,
    PATH: """
        def below(node):
            for child, parent in enumerate(parents):
                if parent == node and tokens[child] == choices[node]:
                    return [child, *below(child)]
            return []

        return below(0)
    """,
})  # fmt: skip
also_right("from the leaves up", {
    POSITIONS: """
        steps = torch.zeros(len(parents), dtype=torch.int64)
        at = list(range(len(parents)))
        while any(at):
            steps += torch.tensor([int(node > 0) for node in at])
            at = [max(parents[node], 0) for node in at]
        return past + steps
    """,
    MASK: """
        n = len(parents)
        mask = torch.cat((torch.ones(n, past), torch.eye(n)), dim=1)
        for node in reversed(range(1, n)):
            above = parents[node]
            while above >= 0:
                mask[node, past + above] = 1
                above = parents[above]
        return mask.bool()
    """,
    PATH: """
        accepted, taken = {0}, set()
        for node in range(1, len(parents)):
            parent = parents[node]
            if parent in accepted and parent not in taken and choices[parent] == tokens[node]:
                accepted.add(node)
                taken.add(parent)
        return sorted(accepted - {0})
    """,
})  # fmt: skip

# ---- wrong answers
wrong = functools.partial(ANSWERS.wrong, POSITIONS)
wrong(
    "numbers of the nodes",
    "siblings are candidates for one place",
    '"classic wrong answers" 1',
    instead="return past + torch.arange(len(parents))",
)
wrong("without the past", "the root stands behind the text", edits={"position = past": "position = 0"})
wrong("one late", "the root stands at past", edits={"position = past": "position = past + 1"})
wrong("one early", "one too early", edits={"position = past": "position = past - 1"})
wrong("behind the parent's number", "behind its parent's place", instead="return past + 1 + torch.tensor(parents)")
wrong("as floats", "torch.int64", edits={"torch.tensor(result)": "torch.tensor(result).float()"})

wrong = functools.partial(ANSWERS.wrong, MASK)
NODES = "mask[i, past + node] = True"
wrong(
    "causal",
    "the mask is causal",
    '"classic wrong answers" 2',
    edits={NODES: "mask[i, past : past + i + 1] = True"},
)
wrong("everybody", "all nodes see one another", edits={NODES: "mask[i, past:] = True"})
wrong("descendants", "rows and columns are swapped", edits={NODES: "mask[node, past + i] = True"})
wrong("upside down", "the mask is upside down", edits={"return mask": "return ~mask"})
wrong(
    "siblings",
    "a node sees its siblings",
    edits={"            node = i\n": "            node = i\n            for j in range(n):\n"
           "                mask[i, past + j] = parents[i] == parents[j]\n"},
)  # fmt: skip
wrong("not itself", "does not see itself", '"classic wrong answers" 3', edits={"node = i\n": "node = parents[i]\n"})
wrong("parent alone", "not its parent's parent", edits={NODES: "mask[i, past + node] = node in (i, parents[i])"})
wrong("root alone", "sees the root and itself", edits={NODES: "mask[i, past + node] = node in (i, 0)"})
wrong("without the root", "the root is hidden", edits={"node != -1": "node > 0"})
wrong("without the text", "the text is hidden", edits={"mask[i, :past] = True": "pass"})
wrong("text behind the nodes", "the keys of the text come first", edits={
    "mask[i, :past] = True": "mask[i, n:] = True", NODES: "mask[i, node] = True"
})  # fmt: skip
wrong("without columns of the text", "expected a tensor of", edits={"return mask": "return mask[:, past:]"})
wrong("zeros and ones", "torch.bool", edits={"return mask": "return mask.long()"})

wrong = functools.partial(ANSWERS.wrong, PATH)
wrong(
    "first child alone",
    "only the first child is tried",
    '"classic wrong answers" 4',
    edits={
        "children = [c for c in range(1, len(parents)) if parents[c] == node and tokens[c] == choices[node]]": (
            "children = [c for c in range(1, len(parents)) if parents[c] == node][:1]\n"
            "            children = [c for c in children if tokens[c] == choices[node]]"
        )
    },
)
wrong(
    "wherever it fits",
    "only if its parent is",
    instead="return [c for c in range(1, len(parents)) if tokens[c] == choices[parents[c]]]",
)
wrong(
    "its own choice", "choices[i] comes after node i", edits={"tokens[c] == choices[node]": "tokens[c] == choices[c]"}
)
wrong("the root's choice", "a choice of its own", edits={"== choices[node]": "== choices[0]"})
wrong("with the root", "the root is in the text already", edits={"path = []": "path = [0]"})
wrong("last of equals", "the first is accepted", edits={"children[0]": "children[-1]"})
wrong("tokens", "these are tokens", edits={"path.append(node)": "path.append(tokens[node])"})
wrong("one node", "the path ends after its first node", edits={"path.append(node)": "return [node]"})
wrong("from the end", "from the root's child to its last node", edits={"return path": "return path[::-1]"})
wrong("a tensor", "expected a list of ints", edits={"return path": "return torch.tensor(path)"})

wrong = functools.partial(ANSWERS.wrong, KEEP)
wrong(
    "slots without the past",
    "lies in slot past + i",
    '"classic wrong answers" 5',
    edits={"slots = [past]": "slots = [0]", "past + node": "node"},
)
wrong("slots without the root", "keep its slot too", edits={"slots = [past]": "slots = []"})
wrong("all nodes", "and no other", edits={"keep(slots)": "keep(range(past, past + len(parents)))"})
wrong("the next slots", "and no other", edits={"keep(slots)": "keep(range(past, past + len(new)))"})
wrong("the text's slots too", "stays by itself", edits={"keep(slots)": "keep([*range(past), *slots])"})
wrong("the path before the root", "in the order of the text", edits={"keep(slots)": "keep([*slots[1:], slots[0]])"})
wrong("nothing kept", "nothing of the pass is kept", edits={"cache.keep(slots)": "pass"})
wrong(
    "no token of its own",
    "it is free",
    '"classic wrong answers" 6',
    edits={"new.append(choices[last])": "pass"},
)
wrong("choice after the root", "not after the root", edits={"choices[last]": "choices[0]"})
wrong("without the path", "come before the target's own choice", edits={"new.append(tokens[node])": "pass"})
wrong("root again", "the root is in the text already", edits={"new = []": "new = [tokens[0]]"})
