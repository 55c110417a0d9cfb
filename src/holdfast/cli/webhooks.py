"""`holdfast webhooks`: list deliveries, send them again, and print the secrets that sign them."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.text import Text

from holdfast.cli.client import Client
from holdfast.cli.console import out, say, to_json
from holdfast.cli.options import DEFAULT_URL, AsJson, Url, examples
from holdfast.cli.webhook_secrets import secret

app = typer.Typer(
    help="See what was sent to webhooks, send it again, and show what it is signed with.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    epilog=examples(
        "holdfast webhooks list --state failed",
        "holdfast webhooks redeliver DELIVERY_ID",
        "holdfast webhooks secret acme",
    ),
)

LAYOUT = "{:36}  {:9}  {:>5}  {:>6}  {}"
STYLES = {"delivered": "green", "failed": "red", "pending": "cyan"}


@app.command("list", epilog=examples("holdfast webhooks list", "holdfast webhooks list --state failed --json"))
def list_deliveries(
    limit: Annotated[int, typer.Option(min=1, max=1000, metavar="N", help="At most this many.")] = 20,
    state: Annotated[str | None, typer.Option(metavar="STATE", help="pending, delivered or failed.")] = None,
    run: Annotated[str | None, typer.Option(metavar="ID", help="Only of this run.")] = None,
    as_json: AsJson = False,
    url: Url = DEFAULT_URL,
) -> None:
    """List deliveries, the latest first."""
    query: dict[str, Any] = {"state": state, "run_id": run}
    with Client(url) as client:
        given = {key: value for key, value in query.items() if value is not None}
        found = client.items("/webhooks/deliveries", given, limit)
    if as_json:
        for delivery in found:
            print(to_json(delivery))
        return
    if not found:
        say("No deliveries.")
        return
    # Not a rich table: it would shorten the ids, which users copy from here.
    out.print(LAYOUT.format("delivery", "state", "tries", "status", "url"), style="bold")
    for delivery in found:
        status = delivery["last_status"] or ("" if delivery["last_error"] is None else "-")
        line = LAYOUT.format(delivery["delivery_id"], delivery["state"], delivery["attempts"], status, delivery["url"])
        out.print(Text(line, style=STYLES.get(delivery["state"], "")))
        if delivery["state"] == "failed" and delivery["last_error"]:
            out.print(Text(f"  {delivery['last_error']}", style="dim"))


@app.command(epilog=examples("holdfast webhooks redeliver DELIVERY_ID"))
def redeliver(
    delivery_ids: Annotated[list[str], typer.Argument(metavar="DELIVERY_ID...", help="Which of them.")],
    url: Url = DEFAULT_URL,
) -> None:
    """Send deliveries again, in any state. Their retries start from the first."""
    with Client(url) as client:
        for delivery_id in delivery_ids:
            client.request("POST", f"/webhooks/deliveries/{delivery_id}/redeliver")
            out.print(f"{delivery_id}  is sent again")


app.command("secret", epilog=examples("holdfast webhooks secret acme", "holdfast webhooks secret acme --rotate"))(
    secret
)
