"""Models in few bits: weights rounded with the help of calibration data, and products in fp8 for training.

::

    from functools import partial

    from utils.quantization import gptq, quantize_decoder

    quantized = quantize_decoder(model, tokens, partial(gptq, bits=3, group=128))

:func:`round_to_nearest`, :func:`gptq` and :func:`awq` round one weight matrix; :func:`quantize_decoder` applies one of
them to all layers of a :class:`utils.serving.Decoder`. :func:`round_products` makes the linear layers of a model
multiply factors that are rounded to fp8, as training in fp8 does.
"""

from utils.quantization.decoder import bits_per_weight, quantize_decoder, window_losses
from utils.quantization.products import SCALINGS, Fp8Scaling, round_products
from utils.quantization.weights import Calibration, awq, calibrate, gptq, output_error, round_to_nearest
