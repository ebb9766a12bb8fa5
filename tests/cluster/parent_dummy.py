"""A parent that launches tiny workers, prints their ids and waits to be killed. Run as a script by tests."""

import json
import sys
import time
from pathlib import Path

from ssd_serve.base.devices import this_machine
from ssd_serve.base.engine_config import Mode
from ssd_serve.base.logs import get_logger
from ssd_serve.base.settings import Settings
from ssd_serve.cluster.local import local_engine

WORKER = Path(__file__).with_name("worker_dummy.py")


def command(role: str, *_arguments: str) -> list[str]:
    return [sys.executable, str(WORKER), role, "sleep"]


def main() -> None:
    settings = Settings(mode=Mode.SSD, run_dir=Path(sys.argv[1]))
    with local_engine(settings, get_logger("server"), machine=this_machine(), command=command) as engine:
        print(json.dumps(engine.supervisor.pids()), flush=True)
        time.sleep(120)


if __name__ == "__main__":
    main()
