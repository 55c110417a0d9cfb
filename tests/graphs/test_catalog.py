from __future__ import annotations

import subprocess
import sys
from typing import Any
from uuid import UUID

import pytest
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.pregel import Pregel
from langgraph.store.memory import InMemoryStore
from langgraph.types import Command
from structlog.testing import capture_logs

from holdfast.errors import ConfigError, NotFound
from holdfast.graphs.catalog import GraphCatalog
from tests.support.smoke import EXAMPLES

from .conftest import CONFIG, Project, run, single


class TestNames:
    def test_graphs_keep_their_order(self, project: Project) -> None:
        project.module("target = build()")
        catalog = project.load(graphs=dict.fromkeys(("zebra", "ant", "mole"), "./agent.py:target"))
        assert catalog.graph_ids == ("zebra", "ant", "mole")
        assert catalog.targets["ant"].spec == "./agent.py:target"

    @pytest.mark.parametrize(
        ("name", "cause"), [("a\0b", "NUL characters"), ("a\ud800b", "surrogate pair"), (5, "must be a string")]
    )
    def test_name_that_cannot_be_stored_is_refused(self, project: Project, name: object, cause: str) -> None:
        project.module(f"target = build().compile(name={name!r})")
        message = project.failure(graphs={"a": "./agent.py:target"})
        assert message.startswith("graphs.a: ./agent.py:target: the name that the graph was compiled with must ")
        assert cause in message

    def test_a_graph_has_a_stable_assistant(self) -> None:
        assert GraphCatalog.assistant_id("echo") == UUID("046b5dc7-2108-582c-9c6c-31d556d138f0")

    def test_resolving(self, project: Project) -> None:
        project.module("target = build()")
        catalog = project.load(graphs={"echo": "./agent.py:target"})
        assert catalog.resolve("echo") == "echo"
        assert catalog.resolve("046b5dc7-2108-582c-9c6c-31d556d138f0") == "echo"
        assert catalog.resolve("046B5DC7-2108-582C-9C6C-31D556D138F0") == "echo"
        assert catalog.resolve("046b5dc7-2108-582c-9c6c-31d556d138f1") is None
        assert catalog.resolve("Echo") is None

    def test_an_unknown_graph(self, project: Project) -> None:
        with pytest.raises(NotFound, match=r"Graph 'b' not found\. Expected one of: \['a'\]"):
            single(project, "target = build()").open("b", config={}, access_context="threads.read")


class TestTargets:
    @pytest.mark.parametrize(
        "definition",
        [
            "target = build('x').compile()",
            "target = build('x')",
            "def target(): return build('x').compile()",
            "def target(): return build('x')",
            "async def target(): return build('x')",
            "def target(config): return build('x')",
            "def target(anything): return build('x')",
            "target = lambda: build('x')",
            "import functools\ntarget = functools.partial(build, 'x')",
            "import contextlib\n@contextlib.asynccontextmanager\nasync def target(): yield build('x')",
            "import contextlib\n@contextlib.contextmanager\ndef target(): yield build('x')",
            "import contextlib\nasync def target(): return contextlib.nullcontext(build('x'))",
            """
            class target:
                async def __aenter__(self): return build('x').compile()
                async def __aexit__(self, *exception): pass
            """,
            """
            class Maker:
                async def __call__(self, config): return build('x')
            target = Maker()
            """,
            """
            from langgraph.func import entrypoint
            @entrypoint()
            async def target(state): return {"seen": ["x"]}
            """,
        ],
    )
    async def test_every_kind_runs(self, project: Project, definition: str) -> None:
        assert await run(single(project, definition), checkpointer=InMemorySaver()) == ["x"]

    async def test_a_module_target(self, project: Project) -> None:
        project.module("target = build('x')", "shop_module.py")
        assert await run(project.load(graphs={"a": "shop_module:target"})) == ["x"]

    async def test_a_state_graph_is_compiled_once(self, project: Project) -> None:
        catalog = single(
            project,
            """
            from langgraph.graph import StateGraph
            class Counted(StateGraph):
                compiled = 0
                def compile(self, *args, **kwargs):
                    Counted.compiled += 1
                    return super().compile(*args, **kwargs)
            target = Counted(State)
            target.add_node("node", lambda state: {"seen": [str(Counted.compiled)]})
            target.add_edge(START, "node")
            """,
        )
        assert [await run(catalog), await run(catalog)] == [["1"], ["1"]]

    async def test_a_factory_is_called_each_time(self, project: Project) -> None:
        catalog = single(
            project,
            """
            calls = []
            def target():
                calls.append(1)
                return build(str(len(calls)))
            """,
        )
        assert [await run(catalog), await run(catalog)] == [["1"], ["2"]]

    @pytest.mark.parametrize(
        ("definition", "cause"),
        [
            ("target = {'a': 1}", "./agent.py:target is a dict; expected a compiled graph"),
            ("target = None", "is None; expected"),
            ("target = State", "is the class State; expected"),
            (
                "from langchain_core.runnables import RunnableLambda\ntarget = RunnableLambda(len)",
                "is a RunnableLambda; expected",
            ),
            (
                "import contextlib\n@contextlib.asynccontextmanager\nasync def f(): yield build()\ntarget = f()",
                "is a context manager, good for one use; name the function that makes it",
            ),
            ("target = StateGraph(State)", "does not compile: ValueError: Graph must have an entrypoint"),
            ("async def target(): yield build()", "decorate it with contextlib.asynccontextmanager"),
            ("def target(): yield build()", "decorate it with contextlib.contextmanager"),
            ("def target(state: State): ...", "its parameter 'state: agent.State' is neither the config nor"),
            ("def target(config, size: int): ...", "its parameter 'size: int' is neither"),
            ("def target(one, two): ...", "its parameter 'two' is neither"),
            ("def target(runtime): ...", "annotate its parameter 'runtime' with"),
            ("target = min", "its parameters cannot be inspected"),
        ],
    )
    def test_target_that_is_no_graph_fails_at_start(self, project: Project, definition: str, cause: str) -> None:
        project.module(definition)
        message = project.failure(graphs={"a": "./agent.py:target"})
        assert message.startswith("graphs.a: ")
        assert "./agent.py:target" in message
        assert cause in message

    async def test_a_factory_that_returns_no_graph(self, project: Project) -> None:
        catalog = single(project, "async def target(): return 'surprise'")
        with pytest.raises(ConfigError) as caught:
            await run(catalog)
        assert str(caught.value).startswith(
            f"{project.path}: graphs.a: the factory ./agent.py:target returned a str; expected"
        )

    async def test_a_factory_that_fails(self, project: Project) -> None:
        with pytest.raises(ZeroDivisionError):
            await run(single(project, "def target(): 1 / 0"))


KINDS = [
    "target = build().compile({0})",
    "kept = build().compile({0})\ndef target(): return kept",
    "kept = build().compile({0})\nimport contextlib\ntarget = lambda: contextlib.nullcontext(kept)",
]


class TestPersistence:
    @pytest.mark.parametrize("kind", KINDS)
    async def test_the_checkpointer_and_store_are_ours(self, project: Project, kind: str) -> None:
        catalog = single(project, kind.format(""))
        one, two, store = InMemorySaver(), InMemorySaver(), InMemoryStore()
        first = catalog.open("a", config=CONFIG, access_context="threads.create_run", checkpointer=one, store=store)
        second = catalog.open("a", config=CONFIG, access_context="threads.create_run", checkpointer=two)
        async with first as left, second as right:
            assert isinstance(left, Pregel)
            assert (left.checkpointer, left.store) == (one, store)
            assert (right.checkpointer, right.store) == (two, None)
            await left.ainvoke({"seen": []}, CONFIG)
            assert (await left.aget_state(CONFIG)).values == {"seen": ["node"]}
            assert (await right.aget_state(CONFIG)).values == {}

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize(("own", "shown"), [("InMemorySaver()", "InMemorySaver"), ("False", "off")])
    async def test_the_users_own_checkpointer_is_replaced_with_one_warning(
        self, project: Project, kind: str, own: str, shown: str
    ) -> None:
        imports = "from langgraph.checkpoint.memory import InMemorySaver\n"
        catalog = single(project, imports + kind.format(own))
        ours = InMemorySaver()
        with capture_logs() as logs:
            await run(catalog, checkpointer=ours)
            await run(catalog, checkpointer=ours)
        assert [checkpoint async for checkpoint in ours.alist(CONFIG)]
        assert logs == [
            {
                "event": "graph.checkpointer_replaced",
                "graph_id": "a",
                "own": shown,
                "log_level": "warning",
            }
        ]

    async def test_the_users_own_checkpointer_is_not_used_without_ours_either(self, project: Project) -> None:
        catalog = single(
            project, "from langgraph.checkpoint.memory import *\ntarget = build().compile(InMemorySaver())"
        )
        with capture_logs():
            async with catalog.open("a", config={}, access_context="assistants.read") as graph:
                assert graph.checkpointer is None

    async def test_the_users_own_store_stays_until_there_is_ours(self, project: Project) -> None:
        catalog = single(
            project,
            "from langgraph.store.memory import InMemoryStore\nown = InMemoryStore()\n"
            "target = build().compile(store=own)",
        )
        own, ours = __import__("agent").own, InMemoryStore()
        with capture_logs() as logs:
            for given, used in ((None, own), (ours, ours), (ours, ours)):
                async with catalog.open("a", config={}, access_context="threads.read", store=given) as graph:
                    assert graph.store is used
        assert [entry["event"] for entry in logs] == ["graph.store_replaced"]

    async def test_an_opened_graph_keeps_all_that_compiling_set(self, project: Project) -> None:
        catalog = single(project, "target = build().compile(name='mine', interrupt_before=['node'])")
        original = __import__("agent").target
        original._serde_allowlist = {("a", "b")}
        async with catalog.open("a", config={}, access_context="threads.read") as graph:
            assert graph is not original
            assert {**vars(graph)} == vars(original)

    @pytest.mark.parametrize(
        ("mode", "second_run", "interrupts"), [("True", 2, True), ("None", 1, True), ("False", 1, False)]
    )
    async def test_subgraphs_keep_their_own_way_with_checkpoints(
        self, project: Project, mode: str, second_run: int, interrupts: bool
    ) -> None:
        project.write(
            "agent.py",
            f"""
            from typing import Annotated
            import operator
            from typing_extensions import TypedDict
            from langgraph.graph import START, StateGraph
            from langgraph.types import interrupt

            class Inner(TypedDict, total=False):
                text: str
                count: Annotated[int, operator.add]

            class Outer(TypedDict, total=False):
                text: str
                total: int

            def ask(state):
                return {{"text": interrupt("?")}} if state["text"] == "ask" else {{}}

            inner = (
                StateGraph(Inner)
                .add_node("add", lambda state: {{"count": 1}})
                .add_node("ask", ask)
                .add_edge(START, "add")
                .add_edge("add", "ask")
                .compile(checkpointer={mode})
            )

            async def call(state):
                answer = await inner.ainvoke({{"text": state["text"]}})
                return {{"text": answer["text"], "total": answer["count"]}}

            target = StateGraph(Outer).add_node("call", call).add_edge(START, "call")
            """,
        )
        catalog = project.load(graphs={"a": "./agent.py:target"})
        saver = InMemorySaver()

        async def invoke(value: Any) -> Any:
            async with catalog.open(
                "a", config=CONFIG, access_context="threads.create_run", checkpointer=saver
            ) as graph:
                return await graph.ainvoke(value, CONFIG)

        assert (await invoke({"text": "x"}))["total"] == 1
        assert (await invoke({"text": "x"}))["total"] == second_run
        if interrupts:
            stopped = await invoke({"text": "ask"})
            assert stopped["__interrupt__"][0].value == "?"
            # Resumed where it stopped: `add` did not run a second time.
            assert await invoke(Command(resume="yes")) == {"text": "yes", "total": 1 if mode == "None" else 3}


@pytest.mark.servers
def test_finalizers_may_import_while_the_types_of_a_project_are_collected() -> None:
    """The collector runs finalizers at any allocation, and one of them may import a module."""
    program = """
import gc, sys, types
from pathlib import Path
from holdfast.graphs.checkpoint_types import allowed_types
from holdfast.graphs.config import load_config

config = load_config(Path(sys.argv[1]))
imported = []

class Importing:
    def __init__(self):
        self.itself = self

    def __del__(self):
        imported.append(f"imported_{len(imported)}")
        sys.modules[imported[-1]] = types.ModuleType("imported")
        if len(imported) < 10_000:
            Importing()

Importing()
gc.set_threshold(10, 1, 1)
allowed_types(config)
assert imported
"""
    done = subprocess.run([sys.executable, "-c", program, str(EXAMPLES)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
