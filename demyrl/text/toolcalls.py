"""What an assistant's text asks for: its thought, its words and its tool calls.

Calls are Hermes blocks: a JSON object with name and arguments between <tool_call> tags. Nothing a
policy can write raises; what is not a valid call becomes a `MalformedCall` whose reason is written
for the policy to read. Whether the tool exists and takes these arguments is for the tool to say.
"""

import dataclasses
import json
import re
from typing import Any

from demyrl.types import ToolCall

CALL_OPEN, CALL_CLOSE = "<tool_call>", "</tool_call>"
THINK_OPEN, THINK_CLOSE = "<think>", "</think>"

TAG = re.compile("|".join((CALL_OPEN, THINK_OPEN, THINK_CLOSE)))
BLANK = re.compile(r"\s*")
LENIENT = json.JSONDecoder(strict=False)  # a program often holds raw newlines and tabs


@dataclasses.dataclass(frozen=True)
class MalformedCall:
    """An attempted call that cannot be understood."""

    raw: str  # the block as written, tags included
    reason: str  # what is wrong with it, for the policy


@dataclasses.dataclass(frozen=True)
class Reply:
    """One assistant turn, taken apart."""

    thought: str  # inside <think>, finished or not
    text: str  # outside thought and calls
    calls: tuple[ToolCall | MalformedCall, ...]  # as written, in order; those in thought are none


def parse_reply(text: str) -> Reply:
    """The parts of an assistant turn's text, which is what came before the end-of-turn token.

    A closing think tag without an opening one makes everything before it thought, because some
    templates put the opening tag into the prompt.
    """
    thought: list[str] = []
    words: list[str] = []
    calls: list[ToolCall | MalformedCall] = []
    start = 0
    while tag := TAG.search(text, start):
        words.append(text[start : tag.start()])
        if tag.group() == THINK_OPEN:
            inside, start = _until(text, tag.end(), THINK_CLOSE)
            thought.append(inside)
        elif tag.group() == THINK_CLOSE:
            thought, words, calls = [text[: tag.start()]], [], []
            start = tag.end()
        else:
            call, start = _parse_block(text, tag.start())
            calls.append(call)
    words.append(text[start:])
    return Reply("\n".join(thought).strip(), "".join(words).strip(), tuple(calls))


def _until(text: str, start: int, tag: str) -> tuple[str, int]:
    """The text up to a tag, and where it goes on behind; all the rest when the tag is missing."""
    end = text.find(tag, start)
    return (text[start:], len(text)) if end < 0 else (text[start:end], end + len(tag))


def _parse_block(text: str, start: int) -> tuple[ToolCall | MalformedCall, int]:
    """The call whose opening tag is at `start`, and where the text goes on behind it."""
    body = BLANK.match(text, start + len(CALL_OPEN)).end()
    try:
        value, stop = LENIENT.raw_decode(text, body)
    except (ValueError, RecursionError) as error:
        return _unreadable(text, start, _json_fault(error, body))
    stop = BLANK.match(text, stop).end()
    if not text.startswith(CALL_CLOSE, stop):
        return _unreadable(text, start, "there is text after the JSON object")
    stop += len(CALL_CLOSE)
    return _read_call(value, text[start:stop]), stop


def _json_fault(error: Exception, body: int) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"not valid JSON: {error.msg} at character {error.pos - body}"
    if isinstance(error, RecursionError):
        return "not valid JSON: nested too deeply"
    return "not valid JSON: a number has too many digits"


def _unreadable(text: str, start: int, reason: str) -> tuple[MalformedCall, int]:
    """A block without a readable object: it ends at its closing tag or before the next call."""
    body = start + len(CALL_OPEN)
    close = text.find(CALL_CLOSE, body)
    following = text.find(CALL_OPEN, body)
    if close < 0 or 0 <= following < close:
        stop = following if following >= 0 else len(text)
        return MalformedCall(text[start:stop], f"the call is not closed with {CALL_CLOSE}"), stop
    stop = close + len(CALL_CLOSE)
    return MalformedCall(text[start:stop], reason), stop


def _read_call(value: Any, raw: str) -> ToolCall | MalformedCall:
    if not isinstance(value, dict):
        return MalformedCall(raw, f'expected a JSON object with "name", got {_kind(value)}')
    for key in ("name", "arguments"):
        if key not in value:
            return MalformedCall(raw, f'the call has no "{key}"')
    name, arguments = value["name"], _unquote(value["arguments"])
    if not isinstance(name, str):
        return MalformedCall(raw, f'"name" must be a string, got {_kind(name)}')
    if not isinstance(arguments, dict):
        return MalformedCall(raw, f'"arguments" must be a JSON object, got {_kind(arguments)}')
    return ToolCall(name, arguments)


def _unquote(arguments: Any) -> Any:
    """The object in arguments that were written as a JSON string; else the arguments."""
    if not isinstance(arguments, str):
        return arguments
    try:
        value = LENIENT.decode(arguments)
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments


def _kind(value: Any) -> str:
    """What JSON calls a value's type."""
    if value is None:
        return "null"
    names = {bool: "true or false", str: "a string", list: "a list", dict: "an object"}
    return names.get(type(value), "a number")
