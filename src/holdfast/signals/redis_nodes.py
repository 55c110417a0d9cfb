"""Finds the Redis server that carries a channel, and connects to it."""

from __future__ import annotations

from typing import Any

from redis.asyncio.connection import AbstractConnection, Connection, SSLConnection, UnixDomainSocketConnection
from redis.crc import key_slot
from redis.exceptions import ConnectionError as NotConnected
from redis.exceptions import RedisError

from holdfast.signals.redis_url import Address, RedisTarget

# The limit for connecting and for the answer to a command.
TIMEOUT_SECONDS = 5.0
OPTIONS: dict[str, Any] = {
    "protocol": 2,
    "socket_timeout": TIMEOUT_SECONDS,
    "socket_connect_timeout": TIMEOUT_SECONDS,
    "driver_info": None,
}


async def open_connection(target: RedisTarget, channel: str) -> AbstractConnection:
    """Connect to the server that carries a channel. The caller disconnects."""
    match target.mode:
        case "socket":
            connection = UnixDomainSocketConnection(
                path=target.path, db=target.database, **target.credentials, **OPTIONS
            )
            await connection.connect()  # type: ignore[no-untyped-call]
            return connection
        case "server":
            return await _connect(target, target.addresses[0], target.database, target.credentials)
        case "cluster":
            return await _connect(target, await _ask_cluster(target, channel), 0, target.credentials)
        case "sentinel":
            address = await _ask_sentinels(target)
            master = await _connect(target, address, target.database, target.credentials)
            # A sentinel that was isolated may name the former master.
            if (await _command(master, "ROLE"))[0] != b"master":
                await master.disconnect(nowait=True)
                raise NotConnected(f"{address[0]}:{address[1]} is not the master {target.master} any more")
            return master


async def _ask_sentinels(target: RedisTarget) -> Address:
    problem: Exception = NotConnected("there are no sentinels")
    for sentinel in target.addresses:
        try:
            found = await _ask(
                target,
                sentinel,
                {"password": target.sentinel_password},
                "SENTINEL",
                "GET-MASTER-ADDR-BY-NAME",
                target.master,
            )
        except (RedisError, OSError) as error:
            problem = error
            continue
        if found is not None:
            return found[0].decode(), int(found[1])
        problem = NotConnected(f"the sentinels know no master {target.master}")
    raise problem


async def _ask_cluster(target: RedisTarget, channel: str) -> Address:
    slot = key_slot(channel.encode())
    problem: Exception = NotConnected("there are no nodes")
    for node in target.addresses:
        try:
            ranges = await _ask(target, node, target.credentials, "CLUSTER", "SLOTS")
        except (RedisError, OSError) as error:
            problem = error
            continue
        for first, last, master, *_ in ranges:
            if first <= slot <= last:
                # An empty host name stands for the node that was asked: it does not know its own name.
                return master[0].decode() if master[0] else node[0], int(master[1])
        problem = NotConnected(f"slot {slot} of the Cluster is not served")
    raise problem


async def _connect(
    target: RedisTarget, address: Address, database: int, credentials: dict[str, Any]
) -> AbstractConnection:
    kind: type[Connection] = SSLConnection if target.tls else Connection
    host, port = address
    connection = kind(
        host=host,
        port=port,
        db=database,
        socket_keepalive=True,
        **{**credentials, **target.tls_options, **OPTIONS},
    )
    await connection.connect()  # type: ignore[no-untyped-call]
    return connection


async def _ask(target: RedisTarget, address: Address, credentials: dict[str, Any], *command: str) -> Any:
    connection = await _connect(target, address, 0, credentials)
    try:
        return await _command(connection, *command)
    finally:
        await connection.disconnect(nowait=True)


async def _command(connection: AbstractConnection, *command: str) -> Any:
    await connection.send_command(*command)
    return await connection.read_response()
