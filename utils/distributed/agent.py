"""The process between the caller and the ranks: runs PyTorch's elastic agent, which starts and watches them."""

from __future__ import annotations

import multiprocessing
import multiprocessing.forkserver
import os
import pickle
import sys
import uuid
from pathlib import Path


def main() -> int:
    here = Path(sys.argv[1])
    multiprocessing.set_forkserver_preload(["torch.distributed.elastic.multiprocessing", "utils.distributed.worker"])
    multiprocessing.forkserver.ensure_running()
    settings = pickle.loads((here / "settings.pkl").read_bytes())
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")

    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    from utils.distributed import worker

    (here / "logs").mkdir()
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=settings["world_size"],
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        rdzv_configs={"timeout": 60},
        max_restarts=0,
        monitor_interval=0.05,
        start_method="forkserver",
        local_addr="localhost",
        logs_specs=DefaultLogsSpecs(log_dir=str(here / "logs"), redirects=Std.ALL),
    )
    try:
        elastic_launch(config, worker.run)(str(here), settings["backend"], settings["collective_timeout"])
    except ChildFailedError as error:
        failures = {
            rank: {"exit": failure.exitcode, "time": failure.timestamp, "message": str(failure.message)}
            for rank, failure in error.failures.items()
        }
        (here / "failures.pkl").write_bytes(pickle.dumps(failures))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
