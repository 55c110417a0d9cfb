"""A run's kwargs: what a request says about a run, as it is stored for the worker."""

from __future__ import annotations

from typing import Any

from holdfast.api.bodies import RunCreate
from holdfast.api.listing import MACHINERY, RESERVED_CONFIGURABLE, clean_configurable
from holdfast.errors import BadRequest
from holdfast.resources.runs import PROJECT

# What clients repeat in `config.configurable` although the server knows it: that makes no second set of options.
SERVER_KEYS = RESERVED_CONFIGURABLE | {
    "thread_id",
    "run_id",
    "graph_id",
    "assistant_id",
    "user_id",
    "checkpoint_id",
    "checkpoint_ns",
    "checkpoint_map",
}
EXAMPLE = "__langsmith_example_id__"


def request_kwargs(body: RunCreate, *, stateless: bool, temporary: bool) -> dict[str, Any]:
    """What the worker needs of a request, as it is stored and shown; without what only the server sets."""
    if stateless and body.command is not None and body.command.resume is not None:
        raise BadRequest("A stateless run has no interrupt to resume: post command.resume to the run's thread.")
    config = body.config.model_dump(exclude_none=True) if body.config is not None else {}
    configurable: dict[str, Any] = dict(config.get("configurable") or {})
    answers = _answers(configurable) if body.command is None else {}
    options = [key for key in configurable if not key.startswith(MACHINERY)]
    if body.context and not SERVER_KEYS.issuperset(options):
        raise BadRequest("Give either config.configurable or context, not both: context is the newer name.")
    checkpoint = body.checkpoint.model_dump(mode="json", exclude_none=True) if body.checkpoint is not None else {}
    if body.checkpoint_id is not None:
        checkpoint["checkpoint_id"] = str(body.checkpoint_id)
    configurable = clean_configurable({**configurable, **checkpoint}) | traced(body)
    if configurable or config.get("configurable"):
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


def _answers(configurable: dict[str, Any]) -> dict[str, Any]:
    """A caller's answers to interrupts, by their ids. RemoteGraph, as a step of a graph that is resumed, sends them in
    that graph's own keys, and the state as input, as if it were called for the first time."""
    answers = configurable.get("__pregel_resume_map")
    return answers if configurable.get("__pregel_resuming") is True and isinstance(answers, dict) else {}


def traced(body: RunCreate) -> dict[str, Any]:
    """Where the run is traced, as the LangSmith tracer looks for it in a run's config."""
    if body.langsmith_tracer is None:
        return {}
    told = {PROJECT: body.langsmith_tracer.project_name, EXAMPLE: body.langsmith_tracer.example_id}
    return {key: value for key, value in told.items() if value is not None}
