"""An order in three steps. The second needs a payment service, which is up when a file is there."""

import operator
import os
from pathlib import Path
from typing import Annotated

from langgraph.graph import START, StateGraph
from typing_extensions import TypedDict


def service_is_up() -> bool:
    return Path(os.environ.get("PAYMENTS_UP", Path(__file__).with_name(".payments-up"))).exists()


class Order(TypedDict, total=False):
    item: str
    done: Annotated[list[str], operator.add]


async def reserve(state: Order) -> Order:
    return {"done": [f"reserved {state['item']}"]}


async def charge(state: Order) -> Order:
    if not service_is_up():
        # What a client library raises when nobody answers: Holdfast tries again, and then gives the run up.
        raise ConnectionError("the payment service does not answer")
    return {"done": ["charged"]}


async def ship(state: Order) -> Order:
    return {"done": ["shipped"]}


order = StateGraph(Order).add_sequence([reserve, charge, ship]).add_edge(START, "reserve").compile()
