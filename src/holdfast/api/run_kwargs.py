"""A run's kwargs: the part of a request that the worker needs, as it is stored with the run."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from holdfast.api.bodies import Checkpoint, RunCreate
from holdfast.api.listing import clean_configurable
from holdfast.engine.runs import LANGSMITH_PROJECT_KEY
from holdfast.errors import BadRequest, InvalidRequest

LANGSMITH_EXAMPLE_KEY = "__langsmith_example_id__"


def request_kwargs(body: RunCreate, *, stateless: bool, temporary: bool) -> dict[str, Any]:
    """The kwargs of a run, without the keys that only the server sets. Raises BadRequest and InvalidRequest."""
    if stateless and body.command is not None and body.command.resume is not None:
        raise BadRequest("A stateless run has no interrupt to resume: post command.resume to the run's thread.")
    config = body.config.model_dump(exclude_none=True) if body.config is not None else {}
    given: dict[str, Any] = config.get("configurable") or {}
    answers = _answers(given) if body.command is None else {}
    options = clean_configurable(given)
    # `clean_configurable` has removed what only the server sets. What is left are options, which have two names.
    if body.context and any(name != "user_id" for name in options):
        raise BadRequest("Give either config.configurable or context, not both: context is the newer name.")
    configurable = {**options, **_starting_checkpoint(body, given), **_tracer_keys(body)}
    if configurable or given:
        config["configurable"] = configurable
    durability = body.durability or ("exit" if body.checkpoint_during is False else "async")
    return {
        "input": body.input,
        # An empty command counts as none: LangGraph fails on it.
        "command": (body.command.model_dump(mode="json", exclude_none=True) or None) if body.command else None,
        "config": config,
        "context": None if body.context is None else clean_configurable(body.context),
        "stream_mode": body.stream_mode,
        "interrupt_before": body.interrupt_before,
        "interrupt_after": body.interrupt_after,
        "webhook": body.webhook,
        "feedback_keys": body.feedback_keys,
        "temporary": temporary,
        "subgraphs": body.stream_subgraphs,
        "resumable": body.stream_resumable,
        "checkpoint_during": durability != "exit",
        "durability": durability,
        "strict_resume": body.strict_resume,
        **({"answers": answers} if answers else {}),
        **({"budget": body.budget} if body.budget else {}),
    }


def _starting_checkpoint(body: RunCreate, configurable: dict[str, Any]) -> dict[str, Any]:
    """The checkpoint at which the run starts. `checkpoint` and `checkpoint_id` win over the id in `configurable`, which
    clients of the thread-centric protocol use. Raises InvalidRequest."""
    named = {"checkpoint_id": configurable["checkpoint_id"]} if configurable.get("checkpoint_id") else {}
    try:
        place = Checkpoint.model_validate(named).model_dump(mode="json", exclude_none=True) if named else {}
    except ValidationError as error:
        problem = error.errors()[0]
        raise InvalidRequest(f"config.configurable.{problem['loc'][0]}: {problem['msg']}") from None
    if body.checkpoint is not None:
        place |= body.checkpoint.model_dump(mode="json", exclude_none=True)
    if body.checkpoint_id is not None:
        place["checkpoint_id"] = str(body.checkpoint_id)
    return place


def _answers(configurable: dict[str, Any]) -> dict[str, Any]:
    """The resume values that LangGraph's RemoteGraph sends, by interrupt id. As a node of a graph that is resumed, it
    sends them in LangGraph's internal keys of `configurable`, and the state as input, as in its first call."""
    answers = configurable.get("__pregel_resume_map")
    return answers if configurable.get("__pregel_resuming") is True and isinstance(answers, dict) else {}


def _tracer_keys(body: RunCreate) -> dict[str, Any]:
    """The keys of `configurable` from which the LangSmith tracer reads the project and the example of a run."""
    if body.langsmith_tracer is None:
        return {}
    tracer = body.langsmith_tracer
    keys = {LANGSMITH_PROJECT_KEY: tracer.project_name, LANGSMITH_EXAMPLE_KEY: tracer.example_id}
    return {key: value for key, value in keys.items() if value is not None}
