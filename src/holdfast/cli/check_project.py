"""`python -m holdfast.cli.check_project LANGGRAPH_JSON`: check a project before a server starts.

Loads everything that langgraph.json names and checks the settings of OpenTelemetry. Exits with 0 and prints nothing if
all is well; otherwise prints the reason to stderr and exits with 78 (EX_CONFIG). It is a process of its own so that
broken user code leaves no half-imported modules behind in the server.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from holdfast.auth.custom import CustomAuth
from holdfast.errors import OperatorError
from holdfast.graphs.catalog import GraphCatalog
from holdfast.graphs.checkpointer import checkpointer_section
from holdfast.graphs.config import load_config
from holdfast.graphs.http import check_app
from holdfast.graphs.store import load_embeddings, store_section
from holdfast.graphs.webhooks import webhooks_section
from holdfast.settings import load_settings
from holdfast.telemetry.tracing import check_tracing

EX_CONFIG = 78


def main(arguments: Sequence[str], environ: Mapping[str, str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m holdfast.cli.check_project")
    parser.add_argument("path", metavar="LANGGRAPH_JSON", type=Path)
    try:
        project = load_config(parser.parse_args(arguments).path, environ)
        GraphCatalog.load(project)
        CustomAuth.load(project, studio=False)
        check_app(project)
        checkpointer_section(project)
        webhooks_section(project)
        if (index := store_section(project).index) is not None:
            load_embeddings(project, index.embed)
        # After the project is loaded: exporters may need its variables and modules, as in the processes that trace.
        check_tracing(load_settings({**project.env, **environ}))
    except OperatorError as error:
        print(error, file=sys.stderr)
        return EX_CONFIG
    return 0


if __name__ == "__main__":
    status = main(sys.argv[1:], os.environ)
    sys.stdout.flush()
    sys.stderr.flush()
    # Do not wait for threads that graph modules have started: they may never end.
    os._exit(status)
