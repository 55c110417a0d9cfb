"""`holdfast worker` in a process that can say what lives in it: `python -m bench.scale.census PATH worker --config …`.

Whoever connects to the Unix socket at PATH is told, as one line of JSON, how many objects there are by type, after
garbage has been collected. What was there before the worker began its work is not among them: the worker freezes it.
"""

from __future__ import annotations

import gc
import json
import socket
import sys
import threading
from collections import Counter

from holdfast.cli.main import app


def census() -> Counter[str]:
    gc.collect()
    return Counter(f"{type(one).__module__}.{type(one).__qualname__}" for one in gc.get_objects())


def answer(path: str) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        while True:
            asking, _ = listener.accept()
            with asking:
                asking.sendall(json.dumps(census()).encode() + b"\n")


def main() -> None:
    path, *arguments = sys.argv[1:]
    threading.Thread(target=answer, args=(path,), name="census", daemon=True).start()
    app(arguments)


if __name__ == "__main__":
    main()
