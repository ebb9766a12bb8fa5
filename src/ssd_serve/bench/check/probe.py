"""One code of `ssd bench check`, as a script: run with the sources to measure on PYTHONPATH.

Loads the pair of the job, answers where its sources lie, then for every line on stdin (the number of a turn)
decodes this turn's prompts plainly and with SSD, and answers tokens a second as one line of JSON. Later codes
compare themselves with this one through it: what a job and answers hold must not change.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any


def main(job: dict[str, Any]) -> None:
    """Load, then answer until stdin ends."""
    from ssd_serve.cluster.process import worker_environment

    os.environ.update(worker_environment())  # before torch is imported

    import ssd_serve
    from ssd_serve.base.engine_settings import Mode
    from ssd_serve.base.settings import Settings
    from ssd_serve.bench.prompts import Prompt, refuse_loops
    from ssd_serve.bench.rig import EngineWay, Rig, remote_drafter, use_cores
    from ssd_serve.bench.stage import CORES
    from ssd_serve.bench.timed_request import Runner

    use_cores(str(CORES.target))
    settings = Settings(target=job["target"], draft=job["draft"], mode=Mode.SSD, prefix_cache=False)
    rig = Rig(settings)
    ar, ssd = rig.engine(EngineWay("ar")), rig.engine(EngineWay("ssd"))
    prompts = [Prompt(each["path"], tuple(each["tokens"]), each["seed"]) for each in job["prompts"]]
    runner, count = Runner(job["tokens"]), job["prompts_of_a_pass"]
    with remote_drafter(rig, ssd, str(CORES.draft)):
        _answer({"source": ssd_serve.__file__})
        for line in sys.stdin:
            first = int(line) * count
            chosen = [prompts[(first + index) % len(prompts)] for index in range(count)]
            speeds: dict[str, object] = {}
            for mode, engine in (("ar", ar), ("ssd", ssd)):
                samples = [runner.run(engine, prompt, 0.0) for prompt in chosen]
                refuse_loops(mode, chosen, (sample.tokens for sample in samples))
                speeds[mode] = sum(each.decoded for each in samples) / sum(each.seconds for each in samples)
            _answer(speeds)


def _answer(values: dict[str, object]) -> None:
    print(json.dumps(values), flush=True)


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
