"""4-bit weights in the order in which a kernel unpacks them.

Letters: N rows of the weight (outputs), K columns (inputs), in groups of 128 that share a scale.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from utils.formats import Quantized, unpack

#: Columns that share a scale, halfwords that hold their codes in one row, and codes in a halfword.
GROUP, HALFWORDS, NIBBLES = 128, 32, 4
#: A code is stored plus this: 0 to 15.
OFFSET = 8


@dataclass(frozen=True)
class PackedInt4:
    """A weight (N, K) of 4 bits: each number is its code times the scale of its group.

    Nibble j of halfword h in ``codes[g, n]`` is the code of row n, column ``128 g + 32 j + h``, plus 8. One mask takes
    the same nibble out of two neighbouring halfwords at once, which are neighbours along K as a tensor core wants them;
    and the tile of one group and some rows that a program reads is one piece of memory.

    A product on Hopper may read them before the kernel that was launched before it has ended. That kernel must not be
    the one that writes them; :func:`pack_int4` therefore waits until they are there.

    Attributes:
        codes: (K / 128, N, 32) int16.
        scales: (K / 128, N) float32.
    """

    codes: Tensor
    scales: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        groups, rows, _ = self.codes.shape
        return rows, groups * GROUP

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales: 4.25 bits for each number."""
        return self.codes.nbytes + self.scales.nbytes

    def dequantize(self) -> Tensor:
        """The numbers again, (N, K) float32."""
        shifts = 4 * torch.arange(NIBBLES, device=self.codes.device)
        codes = (self.codes.int().unsqueeze(2) >> shifts[:, None]) & 15  # (K / 128, N, 4, 32)
        numbers = (codes - OFFSET).float() * self.scales[:, :, None, None]
        return numbers.flatten(2).transpose(0, 1).flatten(1)


def pack_int4(weight: Quantized) -> PackedInt4:
    """The codes of a weight in the order of :class:`PackedInt4`; done once, when a model is loaded.

    On a GPU this waits for all work on the current stream, so that a CUDA graph cannot hold it.

    Args:
        weight: of shape (N, K) in the format int4 with blocks of 128.

    Raises:
        TypeError: no :class:`utils.formats.Quantized`.
        ValueError: another format or block, or not two axes.
    """
    packed = arranged(weight)
    if packed.codes.is_cuda:
        torch.cuda.current_stream(packed.codes.device).synchronize()
    return packed


def arranged(weight: Quantized) -> PackedInt4:
    """As :func:`pack_int4`, without waiting."""
    if not isinstance(weight, Quantized):
        raise TypeError(f"weight must be a utils.formats.Quantized, got {type(weight).__name__}")
    if weight.format != "int4" or weight.block != GROUP:
        raise ValueError(
            f"weight must be int4 in blocks of {GROUP}, got {weight.format} with block={weight.block} "
            f'(quantize(weight, "int4", {GROUP}))'
        )
    if weight.values.ndim != 2:
        raise ValueError(f"weight must have shape (N, K), got values of shape {tuple(weight.values.shape)}")
    codes = ((unpack(weight.values) + OFFSET) & 15).int()  # (N, K), from two's complement to 0..15
    nibbles = codes.unflatten(1, (-1, NIBBLES, HALFWORDS))  # (N, K / 128, 4, 32)
    shifts = 4 * torch.arange(NIBBLES, device=codes.device)
    halfwords = (nibbles << shifts[:, None]).sum(2)  # 0 to 65535
    halfwords = torch.where(halfwords > 32767, halfwords - 65536, halfwords).to(torch.int16)
    return PackedInt4(halfwords.transpose(0, 1).contiguous(), weight.scales.float().t().contiguous())
