"""In which order a pipeline's stage works, and what it sends and receives in between (exercise 4.8).

A batch goes through ``stages`` ranks as ``micro_batches`` pieces. A stage runs each piece forward (F) once and backward
(B) once; between a piece's F and its B the stage holds what it saved for the backward pass: the piece is *in flight*.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from utils.schedules import Action


@dataclass(frozen=True)
class Transfer:
    """One message of a stage: an activation goes to the next stage, the gradient of an activation to the previous one.

    Attributes:
        kind: what this stage does.
        content: "activation" or "gradient".
        micro_batch: of which piece of the batch.
        peer: the other stage.
    """

    kind: Literal["send", "recv"]
    content: Literal["activation", "gradient"]
    micro_batch: int
    peer: int


#: Messages that are posted together and may complete in any order.
Exchange = tuple[Transfer, ...]


def check_stage(stage: int, stages: int, micro_batches: int) -> None:
    """ValueError unless 0 <= stage < stages and micro_batches >= 1."""
    if not 0 <= stage < stages:
        raise ValueError(f"stage must be between 0 and {stages - 1}, got {stage}")
    if micro_batches < 1:
        raise ValueError(f"micro_batches must be at least 1, got {micro_batches}")


def gpipe_order(stage: int, stages: int, micro_batches: int) -> list[Action]:
    """GPipe (Huang et al. 2019): all micro-batches forward, then all backward: all of them are in flight at once.

    Returns:
        2 micro_batches actions: F 0, F 1, ..., then B 0, B 1, ...; the same on each stage.

    Raises:
        ValueError: a stage that there is not, or no micro-batch.
    """
    check_stage(stage, stages, micro_batches)
    return [Action(kind, i) for kind in "FB" for i in range(micro_batches)]


def one_f_one_b_order(stage: int, stages: int, micro_batches: int) -> list[Action]:
    """1F1B (Narayanan et al. 2019, PipeDream; flushed after each batch as in Narayanan et al. 2021, section 2.2).

    A stage first runs as many micro-batches forward as there are stages after it, so that the last stage can start;
    from then on one forward, one backward in turn; at the end the backwards that are left.

    Returns:
        2 micro_batches actions, each micro-batch forward once and backward once, both in ascending order. At most
        min(stages - stage, micro_batches) are in flight, and the pipeline takes no longer than GPipe's.

    Raises:
        ValueError: a stage that there is not, or no micro-batch.
    """
    check_stage(stage, stages, micro_batches)
    ### BEGIN SOLUTION 4.8: the 1F1B order
    ahead = min(stages - 1 - stage, micro_batches)
    order = [Action("F", i) for i in range(ahead)]
    for i in range(micro_batches - ahead):
        order += [Action("F", ahead + i), Action("B", i)]
    return order + [Action("B", i) for i in range(micro_batches - ahead, micro_batches)]
    ### END SOLUTION


def communication_plan(order: Sequence[Action], stage: int, stages: int) -> list[Action | Exchange]:
    """A stage's order of work with the messages between: what each action needs before it, what it makes after it.

    Between two actions stand at most one message sent and one received. If both are with the same neighbour, they are
    one exchange: in 1F1B each of two neighbours sends to the other before it receives, and two sends that wait for one
    another would wait forever. All messages of one kind between two stages are in ascending order of micro-batches, as
    NCCL, which knows no tags, needs it.

    Args:
        order: "F" and "B" actions of this stage.

    Returns:
        The actions in their order, with (stages - 1) micro_batches sends each way over all stages between them.
    """
    plan: list[Action | Exchange] = []
    sent: Transfer | None = None
    for action in order:
        needed = _message("recv", action, stage, stages)
        if sent and needed and sent.peer == needed.peer:
            plan.append((sent, needed))
        else:
            plan += [(transfer,) for transfer in (sent, needed) if transfer]
        plan.append(action)
        sent = _message("send", action, stage, stages)
    return plan + ([(sent,)] if sent else [])


def _message(kind: Literal["send", "recv"], action: Action, stage: int, stages: int) -> Transfer | None:
    """What an action receives first or sends afterwards; None at the ends of the pipeline."""
    forward = action.kind == "F"
    peer = stage + 1 if forward == (kind == "send") else stage - 1
    content = "activation" if forward else "gradient"
    return Transfer(kind, content, action.micro_batch, peer) if 0 <= peer < stages else None
