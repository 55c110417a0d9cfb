"""What a process remembers of assistants is bounded by number and by bytes."""

from __future__ import annotations

from holdfast.resources.known_assistants import MAX_ASSISTANT_BYTES, MAX_ASSISTANTS, KnownAssistants


def test_large_assistant_is_not_remembered() -> None:
    known = KnownAssistants()
    assert known.keep("small", {"config": {"text": "x"}})
    assert known.keep("large", {"config": {"text": "x"}})
    assert not known.keep("large", {"config": {"text": "x" * MAX_ASSISTANT_BYTES}})
    assert known.get("small") == {"config": {"text": "x"}}
    assert known.get("large") is None


def test_oldest_assistant_is_forgotten_first() -> None:
    known = KnownAssistants()
    for number in range(MAX_ASSISTANTS + 1):
        known.keep(str(number), {"number": number})
    assert known.get("0") is None
    assert known.get(str(MAX_ASSISTANTS)) == {"number": MAX_ASSISTANTS}
