"""Numbers of 8 and 4 bits: their codes, and tensors that keep them with a scale.

::

    from utils.formats import decode, encode, quantize

    codes = encode(torch.tensor([0.3, 1.7]), "e4m3")  # uint8, one code per number
    decode(codes, "e4m3")  # tensor([0.3125, 1.7500])
    weight = quantize(torch.randn(64, 256), "nvfp4")
    weight.values, weight.scales, weight.dequantize()

:func:`encode`, :func:`decode` and :func:`grid` know the *element formats* e4m3, e5m2, e2m1, int8 and int4.
:func:`quantize` also knows the *block formats* mxfp8, mxfp4 and nvfp4, which are elements with scales.
"""

from utils.formats.elements import ELEMENTS, ElementFormat, decode, encode, grid, pack, unpack
from utils.formats.errors import quantization_error, rounding_error
from utils.formats.quantized import BLOCKS, FORMATS, BlockFormat, Quantized, quantize
