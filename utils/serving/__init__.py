"""A small language model that really serves: configuration, decoder, checkpoint, tokenizer, plain generation.

::

    from utils.serving import MODELS, SamplingParams, generate, load_model, load_tokenizer

    model, tokenizer = load_model(MODELS / "target"), load_tokenizer(MODELS / "target")
    answer = generate(model, tokenizer.encode("It is a truth universally"), SamplingParams(max_new_tokens=40))
    print(tokenizer.decode(answer.tokens))

Any Hugging Face folder of the families in :data:`FAMILIES` loads in the same way. :func:`generate` serves one request
with a contiguous cache and nothing clever: an engine that batches, pages and speculates is held against it.
"""

from pathlib import Path

from utils.serving.config import FAMILIES, ConfigError, ModelConfig, RopeScaling
from utils.serving.generate import Generation, SamplingParams, generate, probabilities, sample, stream
from utils.serving.load import CheckpointError, load_model, save_model
from utils.serving.metrics import Report, RequestRecord
from utils.serving.model import Attend, Decoder, KVCache, attend_causally, causal_attention
from utils.serving.replay import replay_workload
from utils.serving.tokenizer import StreamDecoder, Tokenizer, load_tokenizer
from utils.serving.workload import TimedRequest, Workload

#: The models that come with the course: ``MODELS / "target"`` and ``MODELS / "draft"``, which share one tokenizer.
MODELS = Path(__file__).parent / "models"
