"""Lab 5's engine over a model that is cut over ranks: every rank runs the same scheduler on the same requests.

Rank 0 is told what arrives. Before each step it tells the others, so that all schedulers see the same requests in the
same order and choose the same chunks; nothing that they decide depends on a clock. The ranks compute the step together,
each with its own heads and its own cache. Then rank 0 chooses the tokens, as :class:`Engine` does, and tells the
others. All ranks have the logits and could choose for themselves; but a last bit that differed on one of two GPUs would
then give the ranks different texts, and nobody would notice. A message a step rules that out.

Two ranks on CPUs, each a process that runs ``serve.py`` (``torchrun --nproc-per-node 2 serve.py``)::

    import torch.distributed as dist
    from solutions.lab6_frontiers.tensor_parallel_engine import TensorParallelEngine
    from utils.serving import MODELS, SamplingParams, load_model

    dist.init_process_group("gloo")
    with TensorParallelEngine(load_model(MODELS / "target", dtype="float32")) as engine:
        if engine.leads:
            print(engine.generate([[5, 6, 7]], SamplingParams(max_new_tokens=8))[0].tokens, flush=True)
        else:
            engine.follow()
    dist.destroy_process_group()

On GPUs the backend is "nccl", and each rank takes its own GPU first and loads the model there
(``torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))``, ``load_model(..., device="cuda")``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, ClassVar, Self

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from solutions.lab5_serving.engine import Engine
from solutions.lab5_serving.memory import default_num_blocks
from solutions.lab5_serving.request import RequestOutput
from solutions.lab5_serving.scheduler import Chunk, Step
from utils.serving import Decoder, SamplingParams
from utils.serving.worker import Unavailable

from .rank_channel import RankChannel
from .tensor_parallel_decoder import TensorParallelRunner, shard

#: Settings that decide on nothing: each rank may have its own.
OWN_SETTINGS = ("clock", "history", "max_waiting")


class RankFailed(Unavailable):
    """A rank has failed, died or not answered in time; the engine has ended on all ranks."""


class TensorParallelEngine(Engine):
    """An :class:`Engine` of which each rank of a group has a part. It is made on all ranks, with the same settings.

    On rank 0 it is used as any engine. On the other ranks :meth:`follow` does what rank 0 is told, until
    :meth:`close`. The texts are those of :class:`Engine`, as far as rounding leaves them: a sum over ranks is rounded
    otherwise than a sum over columns.

    One thing differs. Where a step fails inside the model, :class:`Engine` repeats it request by request to find the
    one at fault. Here a rank that failed alone cannot repeat a step for which the others wait in an all-reduce, so the
    failure ends the engine. A request that cannot be given a token still fails alone.

    Args:
        model: the whole, the same on all ranks (see :func:`.tensor_parallel_decoder.shard`), or cut already.
        group: the ranks, by default all, or those that the model is cut over.
        num_blocks: of each rank's cache; None: what the rank with the least memory has room for.
        block_size, max_batch: of :class:`Engine`.
        runner: brings its own model and cache; None: a :class:`.tensor_parallel_decoder.TensorParallelRunner`.
        timeout: seconds that rank 0 waits for another rank that does not listen. Within a step, where all compute
            together, the timeout of the group holds.
        settings: the other arguments of :class:`Engine`.

    Attributes:
        rank, leads: this process's place in the group, and whether that is 0.

    Raises:
        ValueError: as :class:`Engine` and as ``shard``, or settings that differ between the ranks.
        RankFailed: on use, when a rank has died or raised, or did not arrive in time. Between GPUs, NCCL's watchdog may
            end the process instead.
    """

    #: What computes a step where no runner is given.
    runner_type: ClassVar[type[TensorParallelRunner]] = TensorParallelRunner

    def __init__(
        self,
        model: Decoder,
        *,
        group: ProcessGroup | None = None,
        num_blocks: int | None = None,
        block_size: int = 16,
        max_batch: int = 64,
        runner: TensorParallelRunner | None = None,
        timeout: float = 60.0,
        **settings: Any,
    ) -> None:
        model = shard(model, group) if runner is None else runner.model
        self._group, self.rank = model.group, dist.get_rank(model.group)
        self._calls: list[tuple[str, dict[str, Any]]] = []  # what rank 0 has yet to tell
        self._failure = ""
        if runner is not None:
            num_blocks, block_size = runner.num_blocks, runner.block_size
        deciding = {"num_blocks": num_blocks, "block_size": block_size, "max_batch": max_batch, "model": model.config}
        deciding |= {name: value for name, value in settings.items() if name not in OWN_SETTINGS}
        room = num_blocks or default_num_blocks(model, block_size, max_batch)
        num_blocks = min(self._agree(deciding, room))
        self._channel = RankChannel(
            self._group, timeout
        )  # all ranks have come here, so none waits for one that has not
        runner = runner or self.runner_type(model, num_blocks, block_size)
        super().__init__(model, runner=runner, max_batch=max_batch, **settings)

    def _agree(self, deciding: dict[str, Any], room: int) -> list[int]:
        """Every rank's ``room``, if what decides is equal on all of them."""
        everyone: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(everyone, (deciding, room), group=self._group)
        for rank, (theirs, _) in enumerate(everyone):
            first = everyone[0][0]
            for name in sorted(first.keys() | theirs.keys()):
                if first.get(name) != theirs.get(name):
                    raise ValueError(
                        f"every rank needs the same {name}, got {first.get(name)} on rank 0 and {theirs.get(name)} on "
                        f"rank {rank}"
                    )
        return [room for _, room in everyone]

    @property
    def leads(self) -> bool:
        """Whether this is rank 0, which is told what arrives."""
        return self.rank == 0

    # ---- rank 0 --------------------------------------------------------------------------------------------------

    def add(
        self,
        prompt: Sequence[int],
        params: SamplingParams | None = None,
        *,
        id: str | None = None,
        arrival: float | None = None,
    ) -> str:
        """As :meth:`Engine.add`; the other ranks hear of it before the next step.

        Raises:
            ValueError, EngineFull: as :meth:`Engine.add`; the other ranks hear nothing then.
            RuntimeError: on another rank than 0.
            RankFailed: the engine has ended.
        """
        self._require_lead("add")
        id = super().add(prompt, params, id=id, arrival=arrival)
        self._calls.append(("add", {"prompt": self.requests[id].prompt, "params": params, "id": id}))
        return id

    def abort(self, id: str) -> bool:
        """As :meth:`Engine.abort`; the other ranks hear of it before the next step. False if the engine has ended."""
        if self._failure:
            return False
        self._require_lead("abort")
        known = super().abort(id)
        if known:
            self._calls.append(("abort", {"id": id}))
        return known

    def step(self) -> list[RequestOutput]:
        """As :meth:`Engine.step`, on all ranks at once.

        Raises:
            RankFailed: this rank or another one has failed, now or before.
        """
        self._require_lead("step")
        if not self.has_work:
            return []
        with self._failing_together():
            calls, self._calls = self._calls, []
            self._channel.say(("step", calls))
            return super().step()

    def close(self) -> None:
        """End the engine: the other ranks return from :meth:`follow`. Called there, or again, it does nothing."""
        if self.leads and not self._failure:
            self._failure = "the engine has been closed"
            with suppress(RuntimeError):  # who has died needs no message
                self._channel.say(("end", None))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _require_lead(self, name: str) -> None:
        if not self.leads:
            raise RuntimeError(f"rank 0 is asked for {name}(), this is rank {self.rank}: call follow() here")
        if self._failure:
            raise RankFailed(self._failure)

    # ---- the other ranks -----------------------------------------------------------------------------------------

    def follow(self) -> None:
        """Do what rank 0 is told, until it closes the engine.

        Raises:
            RuntimeError: on rank 0.
            RankFailed: this rank or another one has failed.
        """
        if self.leads:
            raise RuntimeError("the other ranks follow rank 0, and this is rank 0: call add() and step() here")
        with self._failing_together():
            while (calls := self._hear("step")) is not None:
                for name, arguments in calls:
                    getattr(super(), name)(**arguments)
                super().step()

    def _hear(self, kind: str) -> Any:
        """What rank 0 says next; None if that is the end and a step would have come."""
        told, value = self._channel.hear()
        if told == "end" and kind == "step":
            return None
        if told != kind:
            raise RankFailed(value or "rank 0 was stopped amid a step")
        return value

    # ---- one step ------------------------------------------------------------------------------------------------

    def _run(self, step: Step) -> tuple[Tensor | None, dict[str, str]]:
        """Compute a step together; what goes wrong on one rank ends it for all."""
        return self.runner.run(step, self.manager), {}

    def _choose(self, sampling: list[Chunk], logits: Tensor | None, failed: dict[str, str]) -> list[int]:
        """Rank 0 chooses, and says what and who cannot get a token."""
        if not sampling:
            return []
        if self.leads:
            tokens = super()._choose(sampling, logits, failed)
            self._channel.say(("tokens", (tokens, failed)))
            return tokens
        tokens, wrong = self._hear("tokens")
        failed.update(wrong)
        return tokens

    @contextmanager
    def _failing_together(self) -> Iterator[None]:
        """Whatever is raised here ends the engine: as RankFailed, which the others that listen get too."""
        try:
            yield
        except RankFailed as error:
            self._failure = str(error)
            raise
        except Exception as error:
            ranks = dist.get_world_size(self._group)
            self._failure = f"rank {self.rank} of {ranks} cannot go on: {type(error).__name__}: {error}"
            if self.leads:
                with suppress(RuntimeError):
                    self._channel.say(("failed", self._failure), wait=False)
            raise RankFailed(self._failure) from error
