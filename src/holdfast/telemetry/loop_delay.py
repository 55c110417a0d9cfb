"""How late an event loop is: what waits for it waits that much longer."""

from __future__ import annotations

import asyncio

from holdfast.telemetry.metrics import Metrics

# Seconds between two looks.
INTERVAL = 0.5


async def watch_loop(metrics: Metrics, interval: float = INTERVAL) -> None:
    """Look until cancelled."""
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + interval
        await asyncio.sleep(interval)
        metrics.loop_delay.observe(max(0.0, loop.time() - due))
