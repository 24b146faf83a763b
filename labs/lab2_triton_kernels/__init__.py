"""Lab 2, Triton kernels: GeLU, fused bias and ReLU, RMSNorm, cross-entropy, softmax and matrix product.

Edit the modules beside this file; the notebook explains the exercises and checks your functions.
"""

from .bias_relu import bias_relu
from .cross_entropy import cross_entropy
from .gelu import gelu
from .matmul import matmul
from .rms_norm import rms_norm
from .softmax import online_softmax, softmax
from .tiled_matmul import tiled_matmul
from .weighted_sum import weighted_sum
