"""Who takes part."""

from __future__ import annotations

from enum import StrEnum


class Participant(StrEnum):
    """In the order they are shown in, and have their turns in the first round."""

    HOLDFAST = "holdfast"
    LANGGRAPH_DEV = "langgraph-dev"
    AEGRA_DEV = "aegra-dev"
    AEGRA_WORKERS = "aegra-workers"
    HOLDFAST_REDIS = "holdfast-redis"
    HOLDFAST_4 = "holdfast-4"
    BARE = "bare"
    BARE_POSTGRES = "bare-postgres"

    @property
    def label(self) -> str:
        return LABELS[self]


LABELS = {
    Participant.HOLDFAST: "Holdfast",
    Participant.LANGGRAPH_DEV: "langgraph dev",
    Participant.AEGRA_DEV: "Aegra dev",
    Participant.AEGRA_WORKERS: "Aegra workers",
    Participant.HOLDFAST_REDIS: "Holdfast, Redis",
    Participant.HOLDFAST_4: "Holdfast, 4 workers",
    Participant.BARE: "bare graph",
    Participant.BARE_POSTGRES: "bare graph, stock checkpointer",
}

OURS = (Participant.HOLDFAST, Participant.HOLDFAST_REDIS, Participant.HOLDFAST_4)
PEERS = (Participant.LANGGRAPH_DEV, Participant.AEGRA_DEV, Participant.AEGRA_WORKERS)
BARES = (Participant.BARE, Participant.BARE_POSTGRES)
"""The limit: the graph without any server."""
