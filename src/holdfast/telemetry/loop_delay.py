"""Measures how late the event loop executes timers. All tasks wait that much longer."""

from __future__ import annotations

import asyncio

from holdfast.telemetry.metrics import Metrics

# The time between two measurements.
MEASURE_INTERVAL_SECONDS = 0.5


async def measure_loop_delay(metrics: Metrics, interval: float = MEASURE_INTERVAL_SECONDS) -> None:
    """Measure until cancelled."""
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + interval
        await asyncio.sleep(interval)
        metrics.loop_delay.observe(max(0.0, loop.time() - due))
