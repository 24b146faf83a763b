"""Lab 5, serving: a KV cache in blocks, a scheduler, paged attention and speculative decoding around one engine.

Edit the modules beside this file; the notebook explains the exercises and checks your functions.
"""

from .block_manager import BlockManager, OutOfBlocks
from .engine import Engine, EngineFull
from .history import StepRecord
from .kv_cache import CachedAttention, decode
from .merge import merge_parts
from .paged_decode import paged_attention_decode, paged_attention_parts
from .request import Request, RequestOutput, Status
from .runner import ModelRunner
from .scheduler import Chunk, Scheduler, StaticScheduler, Step
from .speculative import draw, residual, speculative_sample, verify
from .speculative_decoding import Round, SpeculativeGeneration, speculative_generate, speculative_rounds
from .speculative_engine import SpeculativeEngine
