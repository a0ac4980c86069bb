"""Two ranks of processes live a storm through iteration graphs, and the same storm through separate graphs; prints both as one JSON line.

    PYTHONPATH=python:test python test/process/rank_life.py FLAGS...

On a CPU the ranks exchange over gloo, and graphs are recorded calls.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from msgspec import structs

from runtime.check_acceptance import open_worker
from runtime.config.flag_parser import parse_shared
from runtime.config.runtime_config import RuntimeConfig
from runtime.entrypoints.prepare import prepare
from runtime.model_executor.graph_runner import eagerly
from runtime.sampling_params import SamplingParams
from unit.driver import GREEDY, EveryNth
from unit.storm import SIZES, Storm

SAMPLINGS = ((GREEDY,), (GREEDY, SamplingParams(temperature=0.9), SamplingParams(temperature=0.8, top_k=20, top_p=0.9)))
TURNS = 14
"""All batch sizes of a storm, twice."""


def live(worker: Any) -> dict[str, Any]:
    """A storm with each of `SAMPLINGS`: the tokens and accept lengths of all steps, the replays of each graph runner, and eager samples."""
    worker.parts.monitor.schedule = EveryNth(3)
    before, sampled, lives = replays(worker), worker.eager_drafts.samples, []
    for samplings in SAMPLINGS:
        storm = Storm(worker, 3, samplings, poison=worker.parts.target.device.type == "cpu").run(TURNS)
        lives.append([storm.trace, [(end.prompt, end.out) for end in storm.ends]])
        worker.reset()
    counts = {name: count - before[name] for name, count in replays(worker).items()}
    return {"life": lives, "replays": counts, "samples": worker.eager_drafts.samples - sampled}


def replays(worker: Any) -> dict[str, int]:
    return {runs.runner: runs.replayed for runs in worker.info().graph_runs}


def with_draft_graphs(config: RuntimeConfig) -> RuntimeConfig:
    """The configuration with the draft's graphs, which a CPU does without."""
    if config.speculative is None:
        return config
    return structs.replace(config, speculative=structs.replace(config.speculative, draft_decode_graph=True, draft_extend_graph=True))


def main() -> None:
    config, model_config = prepare(parse_shared(sys.argv[1:]))
    on_cpu = config.device.device == "cpu"
    with open_worker(with_draft_graphs(config), model_config, "eager" if on_cpu else None, SIZES if on_cpu else None) as worker:
        whole = live(worker)
        with eagerly(worker.iteration_runners):
            separate = live(worker)
    print(json.dumps({"whole": whole, "separate": separate}))


if __name__ == "__main__":
    main()
