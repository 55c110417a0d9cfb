from __future__ import annotations

import os
import pickle
import sys
import typing

import pytest

from holdfast.graphs.loading import LoadedTarget, load_targets, prepare_environment

from .conftest import Project


def load(project: Project, **document: typing.Any) -> dict[str, LoadedTarget]:
    config = project.configure(**document)
    prepare_environment(config)
    return load_targets(config)


class TestEnvironment:
    def test_variables_are_set_before_user_code_runs(self, project: Project) -> None:
        project.write("agent.py", "import os\nvalue = os.environ['HOLDFAST_TEST_COLOUR']\n")
        loaded = load(project, graphs={"a": "./agent.py:value"}, env={"HOLDFAST_TEST_COLOUR": "red"})
        assert loaded["a"].value == "red"

    def test_variables_that_are_set_win(self, project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HOLDFAST_TEST_COLOUR", "blue")
        project.write(".env", "HOLDFAST_TEST_COLOUR=red\nHOLDFAST_TEST_SHAPE=round\n")
        prepare_environment(project.configure(graphs={"a": "a.py:g"}, env=".env"))
        assert os.environ["HOLDFAST_TEST_COLOUR"] == "blue"
        assert os.environ["HOLDFAST_TEST_SHAPE"] == "round"

    def test_doing_it_twice_changes_nothing(self, project: Project) -> None:
        config = project.configure(graphs={"a": "a.py:g"}, dependencies=["."])
        prepare_environment(config)
        path = list(sys.path)
        prepare_environment(config)
        assert sys.path == path
        assert sys.path.count(str(project.root)) == 1


class TestDependencies:
    def test_modules_of_a_local_directory_can_be_imported(self, project: Project) -> None:
        project.write("libs/shop_prices.py", "price = 3")
        project.write("agent.py", "from shop_prices import price")
        loaded = load(project, graphs={"a": "./agent.py:price"}, dependencies=[".", "./libs"])
        assert loaded["a"].value == 3

    def test_project_directory_is_importable_without_a_dependency(self, project: Project) -> None:
        project.write("shop_stock/__init__.py", "")
        project.write("shop_stock/count.py", "count = 4")
        assert load(project, graphs={"a": "shop_stock.count:count"})["a"].value == 4

    def test_a_project_in_the_src_layout(self, project: Project) -> None:
        project.write("lib/src/shop_tax/__init__.py", "rate = 5")
        assert load(project, graphs={"a": "shop_tax:rate"}, dependencies=["./lib"])["a"].value == 5

    def test_a_directory_that_is_a_package(self, project: Project) -> None:
        project.write("libs/shop_cart/__init__.py", "size = 6")
        assert load(project, graphs={"a": "shop_cart:size"}, dependencies=["./libs/shop_cart"])["a"].value == 6

    def test_installed_packages_are_accepted(self, project: Project) -> None:
        project.write("agent.py", "x = 1")
        wanted = ["langgraph>=1,<2", "pydantic", "langgraph_sdk", 'nothing-like-it; python_version < "3"']
        assert load(project, graphs={"a": "./agent.py:x"}, dependencies=wanted)

    @pytest.mark.parametrize(
        ("dependency", "cause"),
        [
            ("./missing", "the directory './missing' does not exist in "),
            ("no-such-package-anywhere>=1", "the package 'no-such-package-anywhere' is not installed"),
            ("langgraph<1", "is installed, but <1 is required"),
            ("not a requirement!", "'not a requirement!' is neither a directory"),
        ],
    )
    def test_missing_dependency_is_named(self, project: Project, dependency: str, cause: str) -> None:
        message = project.failure(graphs={"a": "a.py:g"}, dependencies=[".", dependency])
        assert message.startswith("dependencies[1]: ")
        assert cause in message

    def test_a_directory_written_like_a_package_gets_a_hint(self, project: Project) -> None:
        (project.root / "shop_lib").mkdir()
        message = project.failure(graphs={"a": "a.py:g"}, dependencies=["shop_lib"])
        assert message == (
            "dependencies[0]: the package 'shop_lib' is not installed; for the directory write \"./shop_lib\""
        )


class TestFiles:
    def test_file_of_two_graphs_is_imported_once(self, project: Project) -> None:
        project.write("parts/agent.py", "one = object()\nboth = [one]")
        loaded = load(project, graphs={"a": "./parts/agent.py:one", "b": "parts/../parts/agent.py:both"})
        assert loaded["b"].value == [loaded["a"].value]
        assert loaded["a"].module is loaded["b"].module

    def test_two_files_of_the_same_name_are_two_modules(self, project: Project) -> None:
        project.write("north/agent.py", "where = 'north'")
        project.write("south/agent.py", "where = 'south'")
        loaded = load(project, graphs={"n": "./north/agent.py:where", "s": "./south/agent.py:where"})
        assert (loaded["n"].value, loaded["s"].value) == ("north", "south")

    def test_relative_imports_within_a_package(self, project: Project) -> None:
        project.write("src/shop_bot/__init__.py", "")
        project.write("src/shop_bot/words.py", "word = 'hello'")
        project.write("src/shop_bot/inner/__init__.py", "")
        project.write(
            "src/shop_bot/inner/agent.py",
            """
            from ..words import word
            from shop_bot import words
            same = words.word is word
            """,
        )
        loaded = load(project, graphs={"a": "./src/shop_bot/inner/agent.py:same"})
        assert loaded["a"].value is True
        assert loaded["a"].module.__name__ == "shop_bot.inner.agent"

    def test_a_package_is_a_target_too(self, project: Project) -> None:
        project.write("shop_whole/__init__.py", "from .part import value")
        project.write("shop_whole/part.py", "value = 7")
        loaded = load(project, graphs={"a": "./shop_whole/__init__.py:value"})
        assert (loaded["a"].value, loaded["a"].module.__name__) == (7, "shop_whole")

    def test_other_user_code_gets_the_same_module(self, project: Project) -> None:
        project.write("shop_state.py", "class State: pass")
        project.write("shop_agent.py", "import shop_state\nstate = shop_state.State")
        loaded = load(project, graphs={"a": "./shop_agent.py:state", "b": "./shop_state.py:State"})
        assert loaded["a"].value is loaded["b"].value

    @pytest.mark.parametrize("name", ["json.py", "my-agent.py", "pytest.py"])
    def test_a_name_that_python_gives_to_another_module(self, project: Project, name: str) -> None:
        project.write(name, "value = 8")
        taken = sys.modules.get(name.removesuffix(".py"))
        assert load(project, graphs={"a": f"./{name}:value"})["a"].value == 8
        assert sys.modules.get(name.removesuffix(".py")) is taken

    def test_relative_imports_within_a_package_whose_name_is_taken(self, project: Project) -> None:
        project.write("json/__init__.py", "")
        project.write("json/part.py", "value = 9")
        project.write("json/agent.py", "from .part import value")
        assert load(project, graphs={"a": "./json/agent.py:value"})["a"].value == 9

    def test_an_own_name_is_the_same_on_every_machine(self, project: Project) -> None:
        names = []
        for machine in ("one", "two"):
            there = Project(project.root / machine)
            there.write("parts/agent.py", "value = 1")
            loaded = load(there, graphs={"a": "./parts/agent.py:value"})
            name = loaded["a"].module.__name__
            names.append(name)
            del sys.modules[name]
        assert names[0] == names[1]
        assert "parts_agent" in names[0]

    def test_two_projects_in_one_process_stay_apart(self, project: Project) -> None:
        values = []
        for number in (1, 2):
            there = Project(project.root / str(number))
            there.write("parts/agent.py", f"value = {number}")
            values.append(load(there, graphs={"a": "./parts/agent.py:value"})["a"].value)
        assert values == [1, 2]

    def test_values_can_be_pickled_and_type_hints_resolved(self, project: Project) -> None:
        project.write(
            "parts/agent.py",
            """
            from __future__ import annotations
            from dataclasses import dataclass

            @dataclass
            class Leaf:
                size: int

            @dataclass
            class Tree:
                leaf: Leaf

            tree = Tree(Leaf(2))
            """,
        )
        tree: typing.Any = load(project, graphs={"a": "./parts/agent.py:tree"})["a"].value
        assert pickle.loads(pickle.dumps(tree)) == tree
        assert typing.get_type_hints(type(tree)) == {"leaf": type(tree.leaf)}

    def test_a_module_may_compute_its_variables(self, project: Project) -> None:
        project.write("agent.py", "def __getattr__(name):\n    return 'made ' + name")
        assert load(project, graphs={"a": "./agent.py:later"})["a"].value == "made later"


class TestFailures:
    def test_a_missing_file(self, project: Project) -> None:
        message = project.failure(graphs={"agent": "./gone.py:graph"})
        assert message == f"graphs.agent: ./gone.py:graph: the file {project.root}/gone.py does not exist"

    def test_a_missing_module(self, project: Project) -> None:
        message = project.failure(graphs={"agent": "no_such_module.agent:graph"})
        assert message.startswith("graphs.agent: no_such_module.agent:graph: there is no module 'no_such_module';")

    def test_a_missing_module_of_a_package(self, project: Project) -> None:
        project.write("shop_half/__init__.py", "")
        message = project.failure(graphs={"agent": "shop_half.agent:graph"})
        assert "there is no module 'shop_half.agent'" in message

    def test_a_missing_variable_with_near_names(self, project: Project) -> None:
        file = project.write("agent.py", "my_graph = 1\nmy_graphs = 2\n")
        message = project.failure(graphs={"agent": "./agent.py:mygraph"})
        assert message == (
            f"graphs.agent: ./agent.py:mygraph: {file} has no 'mygraph'; did you mean 'my_graph' or 'my_graphs'?"
        )

    def test_a_missing_variable_with_nothing_near(self, project: Project) -> None:
        file = project.write("agent.py", "x = 1\n")
        message = project.failure(graphs={"agent": "./agent.py:something"})
        assert message == f"graphs.agent: ./agent.py:something: {file} has no 'something'"

    @pytest.mark.parametrize(
        ("text", "line", "summary"),
        [
            ("x = 1\nraise ValueError('no luck')\n", 2, "ValueError: no luck"),
            ("\n\nimport no_such_library\n", 3, "ModuleNotFoundError: No module named 'no_such_library'"),
            ("from json import nothing_of_the_kind\n", 1, "ImportError: cannot import name"),
            ("import json\njson.loads('{')\n", 2, "JSONDecodeError: Expecting property name"),
            ("x = 1\ndef broken(:\n", 2, "SyntaxError: invalid syntax"),
            ("import sys\nsys.exit('bye')\n", 2, "SystemExit: bye"),
            ("assert 1 == 2\n", 1, "AssertionError"),
            ("def __getattr__(name):\n    raise OSError('disk')\n", 2, "OSError: disk"),
        ],
    )
    @pytest.mark.parametrize("target", ["./agent.py:graph", "./sub/agent.py:graph", "shop_agent:graph"])
    def test_user_code_that_fails_is_shown_with_its_line(
        self, project: Project, target: str, text: str, line: int, summary: str
    ) -> None:
        location = target.split(":")[0]
        file = project.write(location if location.endswith(".py") else f"{location}.py", text)
        message = project.failure(graphs={"agent": target})
        first, second = message.split("\n")
        assert first == f"graphs.agent: importing {target} failed at {file}:{line}"
        assert second.startswith(f"  {summary}")

    def test_import_error_shows_the_innermost_line_of_user_code(self, project: Project) -> None:
        project.write("agent.py", "import shop_depths\n")
        file = project.write("shop_depths.py", "import re\n\nre.compile('(')\n")
        message = project.failure(graphs={"agent": "./agent.py:graph"})
        assert f"failed at {file}:3\n" in message

    def test_a_failed_module_leaves_nothing_behind(self, project: Project) -> None:
        before = set(sys.modules)
        project.write("sub/agent.py", "1 / 0")
        project.failure(graphs={"agent": "./sub/agent.py:graph"})
        assert [name for name in set(sys.modules) - before if "agent" in name] == []

    def test_a_long_message_is_cut(self, project: Project) -> None:
        project.write("agent.py", "raise ValueError('long\\n' * 1000)")
        message = project.failure(graphs={"agent": "./agent.py:graph"})
        assert len(message.split("\n")[1]) < 600
