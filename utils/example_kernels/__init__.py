"""Real Triton kernels that notebooks, benchmarks and tests share, each beside a closed formula of what it moves.

Host functions take tensors on ``utils.runtime.DEVICE`` of any size; ``*_traffic`` gives the exact bytes that the
unmasked lanes of the kernel request, which ``utils.kernel_profile`` counts.
"""

from __future__ import annotations

from utils.example_kernels.attention import (
    flash_attention_forward,
    flash_attention_forward_kernel,
    flash_attention_forward_traffic,
)
from utils.example_kernels.attention_backward import (
    attention_delta_kernel,
    flash_attention_backward,
    flash_attention_backward_kernel,
    flash_attention_backward_traffic,
    flash_attention_dq_kernel,
)
from utils.example_kernels.elementwise import (
    copy,
    copy_kernel,
    copy_traffic,
    gather,
    gather_kernel,
    gather_traffic,
    gelu,
    gelu_kernel,
    gelu_traffic,
    strided_copy,
    strided_copy_kernel,
    strided_copy_traffic,
)
from utils.example_kernels.fusion import (
    add,
    add_kernel,
    add_relu,
    add_relu_kernel,
    add_relu_traffic,
    chain,
    chain_kernel,
    chain_traffic,
    gelu_tanh,
    gelu_tanh_kernel,
    relu,
    relu_kernel,
)
from utils.example_kernels.matmul import (
    descriptor_matmul,
    descriptor_matmul_kernel,
    naive_matmul,
    naive_matmul_kernel,
    naive_matmul_traffic,
    tiled_matmul,
    tiled_matmul_kernel,
    tiled_matmul_traffic,
)
from utils.example_kernels.reductions import (
    dot_partial_kernel,
    dot_product,
    dot_product_traffic,
    histogram,
    histogram_kernel,
    histogram_traffic,
    softmax,
    softmax_kernel,
    softmax_long_kernel,
    softmax_traffic,
    sum_kernel,
)
from utils.example_kernels.sigmoids import (
    sigmoids_backward,
    sigmoids_backward_kept,
    sigmoids_backward_kept_kernel,
    sigmoids_backward_kernel,
    sigmoids_forward,
    sigmoids_forward_kept,
    sigmoids_forward_kernel,
    sigmoids_traffic,
)
from utils.example_kernels.traffic import Traffic, cdiv
from utils.example_kernels.transpose import (
    naive_transpose,
    naive_transpose_kernel,
    tiled_transpose,
    tiled_transpose_kernel,
    transpose_traffic,
)
