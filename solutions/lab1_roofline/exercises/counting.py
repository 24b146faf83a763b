"""Oracles of lab 1 that count by doing: a machine that really multiplies, adds and moves elements, one at a time.

An answer is never compared with another copy of itself: on small cases the expected number comes from here, where the
operator is carried out scalar by scalar on a machine that counts. (The closed forms that serve the large cases are held
against these counts by the course's tests.)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence


class Scalar:
    """A number on the chip; each arithmetic operation with it is one FLOP on the machine it lives on."""

    def __init__(self, machine: Machine, value: float) -> None:
        self.machine, self.value = machine, value

    def _operate(self, result: Callable[[float, float], float], other: Scalar | float) -> Scalar:
        self.machine.flops += 1
        return Scalar(self.machine, result(self.value, other.value if isinstance(other, Scalar) else other))

    def __add__(self, other: Scalar | float) -> Scalar:
        return self._operate(lambda a, b: a + b, other)

    def __sub__(self, other: Scalar | float) -> Scalar:
        return self._operate(lambda a, b: a - b, other)

    def __mul__(self, other: Scalar | float) -> Scalar:
        return self._operate(lambda a, b: a * b, other)

    def __truediv__(self, other: Scalar | float) -> Scalar:
        return self._operate(lambda a, b: a / b, other)

    def maximum(self, other: Scalar | float) -> Scalar:
        """The larger of two numbers: a comparison, counted apart from the FLOPs."""
        self.machine.comparisons += 1
        return Scalar(self.machine, max(self.value, other.value if isinstance(other, Scalar) else other))

    def exp(self) -> Scalar:
        """The exponential: one FLOP in the course's count, whatever it costs in hardware."""
        return self._operate(lambda a, _: math.exp(a), 0.0)


class Tensor:
    """Numbers in HBM. Reading one brings it onto the chip, where it stays until the machine forgets."""

    def __init__(self, machine: Machine, shape: Sequence[int]) -> None:
        self.machine, self.shape = machine, tuple(shape)
        self.values: dict[tuple[int, ...], float] = {}

    def _index(self, index: int | tuple[int, ...]) -> tuple[int, ...]:
        index = index if isinstance(index, tuple) else (index,)
        if len(index) != len(self.shape) or not all(0 <= i < n for i, n in zip(index, self.shape, strict=True)):
            raise IndexError(f"index {index} in a tensor of shape {self.shape}")
        return index

    def __getitem__(self, index: int | tuple[int, ...]) -> Scalar:
        index = self._index(index)
        if (self, index) not in self.machine.on_chip:
            self.machine.on_chip.add((self, index))
            self.machine.elements_read += 1
        return Scalar(self.machine, self.values.get(index, 0.5))

    def __setitem__(self, index: int | tuple[int, ...], scalar: Scalar) -> None:
        self.values[self._index(index)] = scalar.value
        self.machine.elements_written += 1


class Machine:
    """Counts the FLOPs of scalar arithmetic and the elements that cross between HBM and the chip.

    On-chip memory is as large as one likes, so a kernel reads each element once; :meth:`forget` empties it, which is
    what the end of a kernel does, or a row that is too long to stay.
    """

    def __init__(self) -> None:
        self.flops = self.comparisons = self.elements_read = self.elements_written = 0
        self.statistics = 0  # float32 numbers written beside the elements
        self.on_chip: set[tuple[Tensor, tuple[int, ...]]] = set()

    @property
    def elements_moved(self) -> int:
        return self.elements_read + self.elements_written

    def tensor(self, *shape: int) -> Tensor:
        """A tensor in HBM."""
        return Tensor(self, shape)

    def number(self, value: float) -> Scalar:
        """A constant that is born on the chip (an accumulator's zero): it costs no traffic."""
        return Scalar(self, value)

    def forget(self) -> None:
        """Empty the on-chip memory: what is read next comes from HBM again."""
        self.on_chip.clear()


def dot_product(n: int) -> Machine:
    """Carry out a dot product of two vectors of ``n`` elements."""
    machine = Machine()
    x, y, out = machine.tensor(n), machine.tensor(n), machine.tensor(1)
    total = machine.number(0.0)
    for i in range(n):
        total = total + x[i] * y[i]
    out[0] = total
    return machine


def matmul(m: int, k: int, n: int) -> Machine:
    """Carry out the product of an (m, k) and a (k, n) matrix in one kernel."""
    machine = Machine()
    a, b, c = machine.tensor(m, k), machine.tensor(k, n), machine.tensor(m, n)
    for row in range(m):
        for col in range(n):
            total = machine.number(0.0)
            for i in range(k):
                total = total + a[row, i] * b[i, col]
            c[row, col] = total
    return machine


def relu(n: int) -> Machine:
    """Carry out ReLU on ``n`` elements."""
    machine = Machine()
    x, y = machine.tensor(n), machine.tensor(n)
    for i in range(n):
        y[i] = x[i].maximum(0.0)
    return machine


def softmax(rows: int, cols: int, method: str) -> Machine:
    """Carry out a softmax over the rows of a (rows, cols) matrix: ``"fused"``, ``"three_pass"`` or ``"eager"``."""
    machine = Machine()
    x, y = machine.tensor(rows, cols), machine.tensor(rows, cols)
    if method == "eager":
        _eager_softmax(machine, x, y)
        return machine
    for row in range(rows):
        largest, total = machine.number(-math.inf), machine.number(0.0)
        for col in range(cols):
            largest = largest.maximum(x[row, col])
        if method == "three_pass":
            machine.forget()
        exponentials = []
        for col in range(cols):
            exponentials.append((x[row, col] - largest).exp())
            total = total + exponentials[-1]
        if method == "three_pass":  # nothing of the row was kept: the third pass computes the exponentials again
            machine.forget()
            exponentials = [(x[row, col] - largest).exp() for col in range(cols)]
        for col in range(cols):
            y[row, col] = exponentials[col] / total
    return machine


def _eager_softmax(machine: Machine, x: Tensor, y: Tensor) -> None:
    """Five kernels, each of which reads its inputs from HBM and writes its result there."""
    rows, cols = x.shape
    largest, shifted, exponentials, total = (machine.tensor(*s) for s in ((rows,), x.shape, x.shape, (rows,)))
    for row in range(rows):
        running = machine.number(-math.inf)
        for col in range(cols):
            running = running.maximum(x[row, col])
        largest[row] = running
    machine.forget()
    for row in range(rows):
        for col in range(cols):
            shifted[row, col] = x[row, col] - largest[row]
    machine.forget()
    for row in range(rows):
        for col in range(cols):
            exponentials[row, col] = shifted[row, col].exp()
    machine.forget()
    for row in range(rows):
        running = machine.number(0.0)
        for col in range(cols):
            running = running + exponentials[row, col]
        total[row] = running
    machine.forget()
    for row in range(rows):
        for col in range(cols):
            y[row, col] = exponentials[row, col] / total[row]


def attention(
    batch: int, heads: int, seq_q: int, seq_k: int, head_dim: int, causal: bool, materialize: bool
) -> Machine:
    """Carry out attention head by head: as three kernels (QK^T, softmax, PV), or as one when nothing is materialised.

    A causal mask is aligned to the last query and the last key: query i sees key j when j - seq_k <= i - seq_q. What
    the mask hides is not computed, but a materialised matrix is stored in full. One kernel also stores a log-sum-exp
    per query, counted in ``statistics``.
    """
    machine = Machine()
    for _ in range(batch * heads):
        _attention_head(machine, seq_q, seq_k, head_dim, causal, materialize)
        machine.forget()
    return machine


def _attention_head(m: Machine, seq_q: int, seq_k: int, head_dim: int, causal: bool, materialize: bool) -> None:
    q, k, v, o = (m.tensor(n, head_dim) for n in (seq_q, seq_k, seq_k, seq_q))
    visible = {(i, j) for i in range(seq_q) for j in range(seq_k) if not causal or j - seq_k <= i - seq_q}
    hidden = {(i, j): m.number(0.0) for i in range(seq_q) for j in range(seq_k) if (i, j) not in visible}

    def through_memory(values: dict[tuple[int, int], Scalar]) -> dict[tuple[int, int], Scalar]:
        """What the next kernel sees of a matrix: read back from HBM when it is materialised."""
        if not materialize:
            return values
        stored = m.tensor(seq_q, seq_k)
        for index, scalar in (values | hidden).items():
            stored[index] = scalar
        m.forget()
        return {index: stored[index] for index in values | hidden}

    scores = {}
    for i, j in visible:
        scores[i, j] = m.number(0.0)
        for d in range(head_dim):
            scores[i, j] = scores[i, j] + q[i, d] * k[j, d]
    scores = through_memory(scores)
    weights = {(i, j): (scores[i, j] * head_dim**-0.5 - 0.5).exp() for i, j in visible}
    for i in range(seq_q):
        total = m.number(0.0)
        for j in range(seq_k):
            if (i, j) in visible:
                total = total + weights[i, j]
        for j in range(seq_k):
            if (i, j) in visible:
                weights[i, j] = weights[i, j] / total
        m.statistics += not materialize
    weights = through_memory(weights)
    for i in range(seq_q):
        for d in range(head_dim):
            total = m.number(0.0)
            for j in range(seq_k):
                if (i, j) in visible:
                    total = total + weights[i, j] * v[j, d]
            o[i, d] = total
