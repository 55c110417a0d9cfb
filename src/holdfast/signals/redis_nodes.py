"""Finding the Redis server to talk to, and connecting to it."""

from __future__ import annotations

from typing import Any

from redis.asyncio.connection import AbstractConnection, Connection, SSLConnection, UnixDomainSocketConnection
from redis.crc import key_slot
from redis.exceptions import ConnectionError as NotConnected
from redis.exceptions import RedisError

from holdfast.signals.redis_url import Address, RedisPlace

# Seconds to connect, or for the answer to a command.
TIMEOUT = 5.0
OPTIONS: dict[str, Any] = {
    "protocol": 2,
    "socket_timeout": TIMEOUT,
    "socket_connect_timeout": TIMEOUT,
    "driver_info": None,
}


async def open_connection(place: RedisPlace, channel: str) -> AbstractConnection:
    """A connection to the server that carries a channel. The caller disconnects it."""
    match place.mode:
        case "socket":
            connection = UnixDomainSocketConnection(path=place.path, db=place.database, **place.credentials, **OPTIONS)
            await connection.connect()  # type: ignore[no-untyped-call]
            return connection
        case "server":
            return await _connect(place, place.addresses[0], place.database, place.credentials)
        case "cluster":
            return await _connect(place, await _ask_cluster(place, channel), 0, place.credentials)
        case "sentinel":
            address = await _ask_sentinels(place)
            master = await _connect(place, address, place.database, place.credentials)
            # A sentinel that was cut off itself names the master of yesterday.
            if (await _command(master, "ROLE"))[0] != b"master":
                await master.disconnect(nowait=True)
                raise NotConnected(f"{address[0]}:{address[1]} is not the master {place.master} any more")
            return master


async def _ask_sentinels(place: RedisPlace) -> Address:
    problem: Exception = NotConnected("there are no sentinels")
    for sentinel in place.addresses:
        try:
            found = await _ask(
                place,
                sentinel,
                {"password": place.sentinel_password},
                "SENTINEL",
                "GET-MASTER-ADDR-BY-NAME",
                place.master,
            )
        except (RedisError, OSError) as error:
            problem = error
            continue
        if found is not None:
            return found[0].decode(), int(found[1])
        problem = NotConnected(f"the sentinels know no master {place.master}")
    raise problem


async def _ask_cluster(place: RedisPlace, channel: str) -> Address:
    slot = key_slot(channel.encode())
    problem: Exception = NotConnected("there are no nodes")
    for node in place.addresses:
        try:
            ranges = await _ask(place, node, place.credentials, "CLUSTER", "SLOTS")
        except (RedisError, OSError) as error:
            problem = error
            continue
        for first, last, master, *_ in ranges:
            if first <= slot <= last:
                # A node that does not know its own name gives an empty one: it is the node that was asked.
                return master[0].decode() if master[0] else node[0], int(master[1])
        problem = NotConnected(f"slot {slot} of the Cluster is not served")
    raise problem


async def _connect(
    place: RedisPlace, address: Address, database: int, credentials: dict[str, Any]
) -> AbstractConnection:
    kind: type[Connection] = SSLConnection if place.tls else Connection
    host, port = address
    connection = kind(
        host=host, port=port, db=database, socket_keepalive=True, **{**credentials, **place.tls_options, **OPTIONS}
    )
    await connection.connect()  # type: ignore[no-untyped-call]
    return connection


async def _ask(place: RedisPlace, address: Address, credentials: dict[str, Any], *command: str) -> Any:
    connection = await _connect(place, address, 0, credentials)
    try:
        return await _command(connection, *command)
    finally:
        await connection.disconnect(nowait=True)


async def _command(connection: AbstractConnection, *command: str) -> Any:
    await connection.send_command(*command)
    return await connection.read_response()
