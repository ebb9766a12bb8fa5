"""`serve run CONFIG` for every line of stdin, which names a Serve config, on a small Ray of its own."""

import sys
import tempfile
from typing import Any, cast

import ray
from ray.serve.scripts import run


def main() -> None:
    # The names of Ray's sockets would be too long in a test's own folder.
    with tempfile.TemporaryDirectory(prefix="ray") as folder:
        cast(Any, ray).init(
            num_cpus=4,
            include_dashboard=False,
            object_store_memory=80_000_000,
            namespace="serve",
            _temp_dir=folder,
        )
        for line in sys.stdin:
            run.main([line.strip(), "--non-blocking"], standalone_mode=False)
        ray.shutdown()


if __name__ == "__main__":
    main()
