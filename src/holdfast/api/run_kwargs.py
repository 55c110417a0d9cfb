"""A run's kwargs: what a request says about a run, as it is stored for the worker."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from holdfast.api.bodies import Checkpoint, RunCreate
from holdfast.api.listing import clean_configurable
from holdfast.engine.runs import LANGSMITH_PROJECT_KEY
from holdfast.errors import BadRequest, InvalidRequest

EXAMPLE = "__langsmith_example_id__"


def request_kwargs(body: RunCreate, *, stateless: bool, temporary: bool) -> dict[str, Any]:
    """What the worker needs of a request, as it is stored and shown; without what only the server sets."""
    if stateless and body.command is not None and body.command.resume is not None:
        raise BadRequest("A stateless run has no interrupt to resume: post command.resume to the run's thread.")
    config = body.config.model_dump(exclude_none=True) if body.config is not None else {}
    given: dict[str, Any] = config.get("configurable") or {}
    answers = _answers(given) if body.command is None else {}
    options = clean_configurable(given)
    # A client that repeats in `configurable` what the server knows does not give a second set of options.
    if body.context and any(name != "user_id" for name in options):
        raise BadRequest("Give either config.configurable or context, not both: context is the newer name.")
    configurable = {**options, **_starting_checkpoint(body, given), **traced(body)}
    if configurable or given:
        config["configurable"] = configurable
    durability = body.durability or ("exit" if body.checkpoint_during is False else "async")
    return {
        "input": body.input,
        # One that says nothing is none: LangGraph would stumble over it.
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
    """Where in its thread the run starts. `checkpoint` and `checkpoint_id` win over the id in `configurable`, by which
    clients of the thread-centric protocol name a checkpoint. Raises InvalidRequest."""
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
    """A caller's answers to interrupts, by their ids. RemoteGraph, as a step of a graph that is resumed, sends them in
    that graph's own keys, and the state as input, as if it were called for the first time."""
    answers = configurable.get("__pregel_resume_map")
    return answers if configurable.get("__pregel_resuming") is True and isinstance(answers, dict) else {}


def traced(body: RunCreate) -> dict[str, Any]:
    """Where the run is traced, as the LangSmith tracer looks for it in a run's config."""
    if body.langsmith_tracer is None:
        return {}
    told = {LANGSMITH_PROJECT_KEY: body.langsmith_tracer.project_name, EXAMPLE: body.langsmith_tracer.example_id}
    return {key: value for key, value in told.items() if value is not None}
