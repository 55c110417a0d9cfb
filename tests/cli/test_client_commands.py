"""`holdfast run` and `holdfast runs` against a server that plays a script."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from holdfast.cli.exit_codes import ExitCode

from .fake_server import RUN, THREAD, Script, serving
from .processes import Program, holdfast

# Its tests start processes or listen on sockets.
pytestmark = pytest.mark.servers

METADATA = ("metadata", {"run_id": RUN, "attempt": 1})
HELLO = '{"messages": [{"role": "user", "content": "hello"}]}'


def command(url: str, *arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "HOLDFAST_URL": url, "COLUMNS": "200"}
    return subprocess.run(holdfast(*arguments), input=stdin, env=environ, capture_output=True, text=True, timeout=60)


def message(kind: str, content: str, identity: str) -> dict[str, Any]:
    return {"type": kind, "content": content, "id": identity}


def test_run_posts_and_renders_and_succeeds() -> None:
    script = Script([METADATA, ("updates", {"reply": {"count": 3, "done": ["s1"]}})])
    with serving(script) as url:
        done = command(url, "run", "echo", "--input", HELLO)
    assert done.returncode == ExitCode.OK, done.stderr
    assert f"run {RUN}  thread {THREAD}" in done.stdout
    assert 'reply {"count": 3, "done": ["s1"]}' in done.stdout
    assert "✓ the run finished" in done.stdout
    verb, path, headers, body = script.seen[1]
    assert (verb, path) == ("POST", f"/threads/{THREAD}/runs/stream")
    assert body["assistant_id"] == "echo"
    assert body["input"] == json.loads(HELLO)
    assert headers["Idempotency-Key"]


def test_run_shows_each_message_once_and_tokens_as_they_come() -> None:
    chunk = {"type": "AIMessageChunk", "id": "m1"}
    script = Script(
        [
            METADATA,
            ("messages", [{**chunk, "content": "Hel"}, {}]),
            ("messages", [{**chunk, "content": [{"type": "text", "text": "lo"}]}, {}]),
            ("updates", {"reply": {"messages": [message("ai", "Hello", "m1"), message("ai", "again", "m2")]}}),
            ("values", {"messages": [message("ai", "Hello", "m1"), message("ai", "again", "m2")]}),
        ]
    )
    with serving(script) as url:
        done = command(url, "run", "chat", "--input", HELLO)
    assert done.stdout.count("Hello") == 1
    assert done.stdout.count("again") == 1


@pytest.mark.parametrize("breaks", [[2], [1, 1, 0, 2], [0, 3]])
def test_run_resumes_a_dropped_connection_after_the_last_event(breaks: list[int]) -> None:
    events: list[tuple[str, Any]] = [METADATA, *(("updates", {f"s{n}": {"n": n}}) for n in range(1, 6))]
    script = Script(events, drop_after=list(breaks))
    with serving(script) as url:
        done = command(url, "run", "steps", "--input", "{}", "--json")
    assert done.returncode == ExitCode.OK, done.stderr
    shown = [json.loads(line) for line in done.stdout.splitlines()]
    assert [int(line["id"]) for line in shown] == [1, 2, 3, 4, 5, 6]
    assert [path for path in script.requests("POST") if path.endswith("/runs/stream")] == [
        f"/threads/{THREAD}/runs/stream"
    ]
    assert "connection lost" in done.stderr
    assert "connected again" in done.stderr


def test_run_of_a_server_without_timelines_names_only_the_attempt() -> None:
    script = Script([METADATA, ("updates", {"s1": {}}), ("metadata", {"run_id": RUN, "attempt": 2})])
    with serving(script) as url:
        done = command(url, "run", "steps", "--input", "{}")
    assert "resumed attempt 2" in done.stdout
    assert "after 2 attempts" in done.stdout


@pytest.mark.parametrize(
    ("status", "code"),
    [
        ("error", ExitCode.RUN_ERROR),
        ("timeout", ExitCode.RUN_TIMEOUT),
        ("interrupted", ExitCode.RUN_CANCELLED),
        (None, ExitCode.RUN_CANCELLED),
    ],
)
def test_the_exit_code_tells_how_the_run_ended(status: str | None, code: ExitCode) -> None:
    script = Script([METADATA, ("error", {"error": "ValueError", "message": "no"})], status=status)
    with serving(script) as url:
        done = command(url, "run", "boom", "--input", "{}")
    assert done.returncode == code
    assert "error ValueError: no" in done.stdout


def test_an_interrupt_is_shown_once_as_a_question() -> None:
    asked = [{"id": "i1", "value": {"question": "Deploy?"}}]
    script = Script([METADATA, ("updates", {"__interrupt__": asked}), ("values", {"__interrupt__": asked})])
    with serving(script) as url:
        done = command(url, "run", "ask", "--input", "{}")
    assert done.returncode == ExitCode.OK
    assert done.stdout.count("Deploy?") == 1
    assert "waiting for an answer" in done.stdout
    assert "holdfast interrupts answer i1" in done.stdout


def test_what_the_server_refuses_is_said_in_its_words() -> None:
    with serving(Script([])) as url:
        done = command(url, "run", "nonesuch", "--input", "{}")
    assert done.returncode == ExitCode.FAILURE
    assert "No assistant or graph 'nonesuch' (404)" in done.stderr


def test_input_from_a_file_and_from_stdin(tmp_path: Path) -> None:
    file = tmp_path / "input.json"
    file.write_text('{"from": "file"}')
    script = Script([METADATA])
    with serving(script) as url:
        assert command(url, "run", "echo", "--input", f"@{file}", "--thread", THREAD).returncode == ExitCode.OK
        assert command(url, "run", "echo", "--input", "-", stdin='{"from": "stdin"}').returncode == ExitCode.OK
    assert [body["input"] for *_, body in script.seen if body] == [{"from": "file"}, {"from": "stdin"}]
    assert script.requests("POST").count("/threads") == 1, "a thread that is given is not made"


def test_resume_answers_a_thread() -> None:
    script = Script([METADATA])
    with serving(script) as url:
        done = command(url, "run", "ask", "--thread", THREAD, "--resume", '"yes"')
        alone = command(url, "run", "ask", "--resume", '"yes"')
    assert done.returncode == ExitCode.OK, done.stderr
    assert script.seen[0][3]["command"] == {"resume": "yes"}
    assert "input" not in script.seen[0][3]
    assert alone.returncode == ExitCode.USAGE


def test_ctrl_c_leaves_the_run_alone_and_says_how_to_go_on() -> None:
    script = Script([METADATA], status="pending")
    with serving(script) as url, Program(holdfast("run", "steps", "--input", "{}", "--url", url)) as program:
        program.expect(f"run {RUN}")
        program.process.send_signal(signal.SIGINT)
        assert program.wait() == ExitCode.DETACHED
        program.expect(f"holdfast runs tail {RUN} --url {url}")
        program.expect(f"holdfast runs cancel {RUN} --url {url}")
    assert not [path for path in script.requests("POST") if "cancel" in path]


def test_runs_list_and_show() -> None:
    script = Script([], finished=True)
    with serving(script) as url:
        listed = command(url, "runs", "list", "--limit", "5", "--status", "success")
        shown = command(url, "runs", "show", RUN, "--json")
        missing = command(url, "runs", "show", "018f0000-0000-7000-8000-000000000000")
    assert listed.returncode == shown.returncode == ExitCode.OK, listed.stderr
    assert RUN in listed.stdout
    assert "echo" in listed.stdout
    assert script.seen[0][1] == "/runs?status=success&limit=5&offset=0"
    assert json.loads(shown.stdout)["run_id"] == RUN
    assert missing.returncode == ExitCode.FAILURE
    assert "There is no run 018f0000" in missing.stderr


def test_runs_tail_replays_from_the_start() -> None:
    script = Script([METADATA, ("updates", {"s1": {"n": 1}})])
    with serving(script) as url:
        tailed = command(url, "runs", "tail", RUN)
        later = command(url, "runs", "tail", RUN, "--after", "1", "--json")
    assert tailed.returncode == ExitCode.OK, tailed.stderr
    assert 's1 {"n": 1}' in tailed.stdout
    assert [json.loads(line)["id"] for line in later.stdout.splitlines()] == ["2"]


@pytest.mark.parametrize(("flags", "action"), [([], "interrupt"), (["--rollback"], "rollback")])
def test_runs_cancel(flags: list[str], action: str) -> None:
    script = Script([], status="pending")
    with serving(script) as url:
        done = command(url, "runs", "cancel", RUN, *flags)
    assert done.returncode == ExitCode.OK, done.stderr
    assert script.requests("POST") == [f"/threads/{THREAD}/runs/{RUN}/cancel?wait=0&action={action}"]


@pytest.mark.parametrize(
    "arguments", [["run", "echo", "--input", "{}"], ["runs", "list"], ["runs", "tail", RUN], ["runs", "cancel", RUN]]
)
def test_a_server_that_is_not_there(arguments: list[str]) -> None:
    done = command("http://127.0.0.1:9", *arguments)
    assert done.returncode == ExitCode.UNAVAILABLE
    assert "http://127.0.0.1:9 cannot be reached" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("url", "code", "shown"),
    [
        ("http://ann:TOPSECRET@127.0.0.1:9", ExitCode.UNAVAILABLE, "http://***@127.0.0.1:9 cannot be reached"),
        ("ftp://ann:TOPSECRET@127.0.0.1:9", ExitCode.USAGE, "--url ftp://***@127.0.0.1:9: must begin with"),
        ("ann:TOPSECRET@127.0.0.1:9", ExitCode.USAGE, "must begin with"),
        ("http://ann:TOPSECRET/1@127.0.0.1:9", ExitCode.USAGE, "percent-encode"),
        ("localhost:9", ExitCode.USAGE, "--url localhost:9: must begin with"),
    ],
)
def test_password_of_the_url_is_not_printed(url: str, code: ExitCode, shown: str) -> None:
    for arguments in (["runs", "list"], ["top", "--once"]):
        done = command(url, *arguments)
        assert done.returncode == code, done.stderr
        assert "TOPSECRET" not in done.stdout + done.stderr
        assert shown in done.stderr or arguments[0] == "top"


@pytest.mark.parametrize("key", ["hf_TOP\nSECRET", "hf_TOP SECRET", "hf_TOP\u20acSECRET"])
def test_key_that_no_header_can_hold_is_not_printed(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_API_KEY", key)
    done = command("http://127.0.0.1:9", "runs", "list")
    assert done.returncode == ExitCode.USAGE, done.stderr
    assert "HOLDFAST_API_KEY: a key has only printable ASCII characters" in done.stderr
    assert "TOP" not in done.stdout + done.stderr
    assert "SECRET" not in done.stdout + done.stderr


def test_line_break_after_the_key_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_API_KEY", "hf_key\n")
    script = Script([METADATA])
    with serving(script) as url:
        assert command(url, "runs", "list").returncode == ExitCode.OK
    assert script.seen[0][2]["x-api-key"] == "hf_key"
