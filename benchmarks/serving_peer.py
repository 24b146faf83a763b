"""``transformers`` serving the same requests with the same weights: its own continuous batching, as it comes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.serving_work import synchronize
from utils import runtime
from utils.serving import Decoder


def version() -> str:
    """Of transformers.

    Raises:
        ImportError: it is not installed (``pip install -e '.[test]'``).
    """
    import transformers

    return transformers.__version__


def peer_of(model: Decoder) -> Any:
    """A transformers model with the weights of ours, PyTorch's attention, and no end of text."""
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = model.config.to_dict() | {"eos_token_id": None, "bos_token_id": None, "pad_token_id": 0}
    with torch.device(runtime.DEVICE):
        peer = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(settings.pop("model_type"), **settings), attn_implementation="sdpa", dtype=model.dtype
        ).eval()
    weights = {
        name if name == "lm_head.weight" else f"model.{name}": weight for name, weight in model.state_dict().items()
    }
    peer.load_state_dict(weights)
    return peer


def generate(peer: Any, prompts: Sequence[list[int]], new_tokens: int) -> tuple[list[list[int]], float]:
    """Greedy tokens of every prompt by ``generate_batch``, in order, and the seconds that it took.

    Raises:
        RuntimeError: a request did not get all its tokens.
    """
    from transformers import GenerationConfig

    # With 256 sequences of different lengths cuDNN's attention stopped with an error; PyTorch has others.
    torch.backends.cuda.enable_cudnn_sdp(False)
    settings = GenerationConfig(max_new_tokens=new_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
    if runtime.HAS_GPU:
        torch.cuda.empty_cache()  # it sizes its cache by what is free
    synchronize()
    start = time.perf_counter()
    results = peer.generate_batch(inputs=[list(prompt) for prompt in prompts], generation_config=settings)
    synchronize()
    seconds = time.perf_counter() - start
    outputs = [list(result.generated_tokens) for result in results.values()]
    if [len(output) for output in outputs] != [new_tokens] * len(prompts):
        lengths = sorted({len(output) for output in outputs})
        raise RuntimeError(f"{len(prompts)} requests of {new_tokens} tokens: {len(outputs)} came, of {lengths} tokens")
    if runtime.HAS_GPU:
        torch.cuda.empty_cache()
    return outputs, seconds
