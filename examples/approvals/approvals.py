"""A graph that asks for an approval, and two people who click at the same time.

holdfast dev --config examples/approvals/langgraph.json
python examples/approvals/approvals.py [URL]
"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
from langgraph.graph import START, StateGraph
from typing_extensions import TypedDict

import holdfast


class Expense(TypedDict, total=False):
    amount: float
    verdict: dict[str, Any]
    outcome: str


def approve(state: Expense) -> Expense:
    # Nothing is held while somebody thinks about it: no worker, no connection. After an hour the boss is told (add
    # "webhook": URL to have that done by a call), after another the answer is no.
    verdict = holdfast.ask(
        f"Pay {state['amount']:.2f}?",
        fields=[
            {"name": "verdict", "type": "select", "label": "Decision", "options": ["approve", "reject"]},
            {"name": "note", "label": "Note for the books", "required": False},
        ],
        deadline=3600,
        default={"verdict": "reject"},
        escalate={"to": "boss", "deadline": 3600},
    )
    return {"verdict": verdict}


def pay(state: Expense) -> Expense:
    return {"outcome": "paid" if state["verdict"]["verdict"] == "approve" else "refused"}


expense = StateGraph(Expense).add_sequence([approve, pay]).add_edge(START, "approve").compile()


def main(url: str) -> None:
    with httpx.Client(base_url=url, timeout=60) as client:
        thread_id = client.post("/threads", json={"metadata": {"team": "finance"}}).json()["thread_id"]
        body = {"assistant_id": "expense", "input": {"amount": 129.9}}
        run_id = client.post(f"/threads/{thread_id}/runs", json=body).json()["run_id"]
        client.get(f"/threads/{thread_id}/runs/{run_id}/join")

        # The inbox, as a user interface would show it.
        [question] = client.get("/interrupts", params={"thread_id": thread_id}).json()
        names = ", ".join(field["name"] for field in question["form"]["fields"])
        print(f"asked: {question['value']['question']} (fields: {names}; until {question['deadline_at']})")

        resume = f"/threads/{thread_id}/runs/{run_id}/resume"
        refused = client.post(resume, json={"answer": {"verdict": "perhaps"}})
        print(f"{refused.status_code}: {refused.json()['detail']}")

        # Two people click at once. One of them is told that the other was first.
        with ThreadPoolExecutor(2) as people:
            clicks = [people.submit(client.post, resume, json={"answer": {"verdict": "approve"}}) for _ in range(2)]
        for answer in sorted((click.result() for click in clicks), key=lambda answer: answer.status_code):
            print(f"{answer.status_code}: {answer.json().get('detail', 'accepted')}")

        # Follows the work across its pause, to the end of the run that went on with it.
        result = client.get(f"/threads/{thread_id}/runs/{run_id}/join", params={"follow": "true"}).json()
        print(f"the expense is {result['outcome']}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8123")
