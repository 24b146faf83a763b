"""What a profile finds wrong, each finding naming kernel, argument, index and program."""

from __future__ import annotations

from dataclasses import dataclass

Program = tuple[int, int, int]


@dataclass
class Finding:
    """One kind of misbehaviour of one program on one argument; further lanes of the same kind only add to ``count``.

    Attributes:
        kernel: Name of the kernel.
        argument: Name of the tensor argument.
        index: Element of the argument, counted in memory from where its pointer points: for a contiguous tensor the
            index into ``tensor.flatten()``, for a strided one the offset in elements.
        position: The same as one index per axis; None where it belongs to no axis (a gap, or a vector).
        program: The ``program_id`` triple of the program that did it.
        other_program: For a race, the program that touched the element before; otherwise None.
        access: ``read``, ``write`` or ``atomic``: what ``program`` did.
        count: Lanes of this kind.
        detail: What the index is held against, in words.
    """

    kernel: str
    argument: str
    index: int
    position: tuple[int, ...] | None
    program: Program
    access: str
    other_program: Program | None = None
    count: int = 0
    detail: str = ""

    @property
    def where(self) -> str:
        """Argument and index, such as ``x_ptr[3, 17] (element 113)``."""
        if self.position is None or len(self.position) < 2:
            return f"{self.argument}[{self.index}]"
        return f"{self.argument}[{', '.join(map(str, self.position))}] (element {self.index})"

    @property
    def more(self) -> str:
        """How many lanes beside the first did the same."""
        others = self.count - 1
        return f"; {others:,} more lane{'s' if others > 1 else ''} like it" if others > 0 else ""


class OutOfBounds(Finding):
    """A lane read or wrote outside of its argument. Outside of its allocation too, it was not carried out."""

    def __str__(self) -> str:
        return f"{self.kernel}: program {self.program} {_past(self.access)} {self.where}, {self.detail}{self.more}"


class UninitializedRead(Finding):
    """A lane read memory that came from ``torch.empty`` inside the block before anything wrote it; it got NaN or 0."""

    def __str__(self) -> str:
        return (
            f"{self.kernel}: program {self.program} read {self.where}, which came from torch.empty and which nothing "
            f"had written{self.more}"
        )


class Race(Finding):
    """Two programs of one launch touched one element, at least one of them wrote it, and not both atomically."""

    def __str__(self) -> str:
        return (
            f"{self.kernel}: programs {self.other_program} and {self.program} race for {self.where}: the first "
            f"{self.detail} it, the second {_past(self.access)} it, and their order is not defined{self.more}"
        )


def _past(access: str) -> str:
    return {"read": "read", "write": "wrote", "atomic": "atomically updated"}[access]
