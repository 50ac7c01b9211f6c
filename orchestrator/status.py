"""A line of `ps`, from what a supervisor holds. Reads only."""

from __future__ import annotations

import msgspec

from ..protocol.values import ModelStatus
from .incarnation import Incarnation
from .policy.health import Health
from .policy.lifecycle import Model, State


def of_model(name: str, model: Model, now: float) -> ModelStatus:
    """What the lifecycle tells. `now`: monotonic seconds."""
    return ModelStatus(
        name=name,
        state=model.state.value,
        incarnation=model.incarnation,
        restarts=model.restarts,
        crashes=model.crashes,
        last_exit=model.last_exit,
        problem=model.problem.message if model.problem is not None else "",
        next_retry_s=max(0.0, model.deadline - now) if model.state is State.BACKOFF and model.deadline else None,
    )


def with_worker(line: ModelStatus, worker: Incarnation | None, health: Health, now: float) -> ModelStatus:
    """The same with what is known of the worker in charge, if there is one."""
    if worker is None:
        return line
    return msgspec.structs.replace(
        line,
        pid=worker.pid,
        uptime_s=now - worker.started_at,
        footprint=worker.process.footprint,
        health=health.value,
        stats=worker.stats,
        stats_age_s=now - worker.pulse.at if worker.stats is not None else None,
    )
