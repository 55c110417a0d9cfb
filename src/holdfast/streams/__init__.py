"""The event log and its streams: reading, following, framing."""
