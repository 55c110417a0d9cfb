"""The event log and its way to clients: reading, following, framing."""
