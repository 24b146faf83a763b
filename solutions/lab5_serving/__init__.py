"""Lab 5, serving: a KV cache in blocks, a scheduler, paged attention and speculative decoding around one engine.

Edit the modules beside this file; the notebook explains the exercises and checks your functions.
"""

from .block_manager import BlockManager, OutOfBlocks
from .engine import Engine, EngineFull
from .history import StepRecord
from .request import Request, RequestOutput, Status
from .runner import ModelRunner
from .scheduler import Chunk, Scheduler, StaticScheduler, Step
from .speculative import draw, residual, speculative_sample, verify
from .speculative_decoding import Round, SpeculativeGeneration, speculative_generate, speculative_rounds
from .speculative_engine import SpeculativeEngine

__all__ = [
    "BlockManager",
    "Chunk",
    "Engine",
    "EngineFull",
    "ModelRunner",
    "OutOfBlocks",
    "Request",
    "RequestOutput",
    "Round",
    "Scheduler",
    "SpeculativeEngine",
    "SpeculativeGeneration",
    "StaticScheduler",
    "Status",
    "Step",
    "StepRecord",
    "draw",
    "residual",
    "speculative_generate",
    "speculative_rounds",
    "speculative_sample",
    "verify",
]
