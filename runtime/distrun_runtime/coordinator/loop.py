"""The coordinator's one loop: channels and signals put events on a queue; this thread decides and acts.

SKELETON: signatures are settled, the body follows.
"""

from __future__ import annotations

from typing import Sequence

from distrun_runtime.contract.plan import Plan, Secrets
from distrun_runtime.coordinator.channel import Channel
from distrun_runtime.coordinator.jobstore import JobFolder
from distrun_runtime.coordinator.outcome import Outcome
from distrun_runtime.coordinator.sink import Sink


def run(
    plan: Plan,
    secrets: Secrets,
    channels: Sequence[Channel],
    folder: JobFolder,
    sink: Sink,
    *,
    verbosity: int = 0,
) -> Outcome:
    """Run a job to its end: one channel for each host of the plan. Blocks; returns when no agent is left.

    Called in the main thread it takes over INT, TERM, HUP and TSTP and gives them back; a signal that was ignored
    stays ignored. `verbosity` >= 2 says every frame at level debug. The outcome is also in the folder
    (state.json, outcome.json); the failure report is `report.failure(outcome, tail, log)`.

    Raises:
        ContractError: channels and hosts of the plan do not match.
    """
    raise NotImplementedError
