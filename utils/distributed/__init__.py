"""Run a function on several ranks, from a notebook or a script, and count what the ranks send one another.

::

    import torch, torch.distributed as dist
    from utils.distributed import launch, record_collectives

    def add(size):
        with record_collectives() as log:
            x = torch.full((size,), float(dist.get_rank()))
            dist.all_reduce(x)
        return x[0].item(), log

    sums, ledgers = zip(*launch(add, 1000, world_size=4))
    print(sums)                 # (6.0, 6.0, 6.0, 6.0): 0 + 1 + 2 + 3 on each rank
    print(ledgers[0].report())  # one all-reduce of 1,000 elements, 4,000 bytes; a ring sends 6,000 from each rank

**What a rank is.** A process of its own, with its own memory: a list that a rank appends to is its copy, and what you
want back you must return. In it ``dist.get_rank()`` and ``dist.get_world_size()`` answer, the default process group is
ready (gloo between CPUs, NCCL between GPUs), and ``device()`` is where its tensors belong. Tensors come back on the
CPU. What rank 0 prints is shown as it comes, what the others print after it.

**When it goes wrong** ``launch`` raises ``DistributedError``, which names the rank and the reason. Ranks work in step,
so three mistakes are the most frequent:

- A collective under ``if rank == 0``: the others never call it ("rank 1 never arrived", with the line where it is).
- Shapes, dtypes or kinds that differ from rank to rank ("rank 1 called another collective than its peers").
- An exception on one rank; the others are then ended, since they would wait for it for ever.

``.rank``, ``.kind``, ``.traceback`` and ``.exception`` of the error say it to a program.

**What takes time.** The first launch imports PyTorch in a process that the ranks are forked from, 2 seconds or so; the
next ones take a quarter of a second. ``start_ahead()`` starts that process while the caller does something else. It
ends a minute after the last job, with its caller, at ``shutdown()``, or when a job fails. In a ``with warm():`` block
it outlives jobs that fail.

**How it is made.** ``launcher`` packs the function, ``pool`` keeps agents, ``agent`` runs PyTorch's elastic agent in a
process of its own, ``rank_server`` is what ranks are forked from, ``worker`` is a rank, ``job`` waits and finds out who
is at fault, ``watch`` compares the ranks' collectives while they run; ``calls`` sees each collective in PyTorch's
dispatcher, ``collective_log`` records them. ``patches`` puts right, in ranks on CPUs, what an older PyTorch gets wrong.
"""

from utils.distributed.collective_log import CollectiveLog, Entry, record_collectives
from utils.distributed.faults import DistributedError
from utils.distributed.launcher import launch
from utils.distributed.pool import shutdown, start_ahead, warm
from utils.distributed.worker import device
