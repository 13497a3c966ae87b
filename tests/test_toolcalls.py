"""What a policy writes is taken apart, whatever it is."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from demyrl.text.toolcalls import MalformedCall, parse_reply
from demyrl.types import ToolCall

CALL = '<tool_call>\n{"name": "run", "arguments": {"code": "print(1)"}}\n</tool_call>'
RUN = ToolCall("run", {"code": "print(1)"})


def block(body: str) -> str:
    return f"<tool_call>{body}</tool_call>"


def only_reason(text: str) -> str:
    (call,) = parse_reply(text).calls
    assert isinstance(call, MalformedCall)
    return call.reason


def test_a_call_is_found_with_the_words_around_it():
    reply = parse_reply(f"Before {CALL} after")
    assert (reply.text, reply.calls) == ("Before  after", (RUN,))


def test_calls_keep_their_order():
    other = block('{"name": "other", "arguments": {}}')
    assert [call.name for call in parse_reply(CALL + other + CALL).calls] == ["run", "other", "run"]


def test_raw_newlines_in_a_program_are_accepted():
    (call,) = parse_reply(block('{"name": "run", "arguments": {"code": "a\n\tb"}}')).calls
    assert call == ToolCall("run", {"code": "a\n\tb"})


def test_a_closing_tag_inside_a_program_does_not_close_the_call():
    code = 'print("</tool_call><think>")'
    text = block(json.dumps({"name": "run", "arguments": {"code": code}}))
    assert parse_reply(text).calls == (ToolCall("run", {"code": code}),)


def test_nulls_inside_arguments_survive():
    (call,) = parse_reply(block('{"name": "run", "arguments": {"x": null}}')).calls
    assert call.arguments == {"x": None}


def test_arguments_written_as_a_json_string_are_parsed():
    text = block(json.dumps({"name": "run", "arguments": json.dumps({"code": "1"})}))
    assert parse_reply(text).calls == (ToolCall("run", {"code": "1"}),)


@pytest.mark.parametrize(
    "thinking", [f"<think>{CALL}", f"<think>{CALL}</think>", f"{CALL}</think>"]
)
def test_a_call_inside_a_thought_is_not_a_call(thinking):
    reply = parse_reply(thinking)
    assert reply.calls == ()
    assert reply.thought == CALL


def test_a_thought_is_kept_apart_from_the_words():
    reply = parse_reply(f"<think>\nplan\n</think>\nGo.\n{CALL}")
    assert (reply.thought, reply.text, reply.calls) == ("plan", "Go.", (RUN,))


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ('{"name": "x", "arguments": ', "not valid JSON"),
        ("[]", "got a list"),
        ('"run"', "got a string"),
        ('{"arguments": {}}', 'no "name"'),
        ('{"name": "x"}', 'no "arguments"'),
        ('{"name": 5, "arguments": {}}', '"name" must be a string, got a number'),
        ('{"name": "x", "arguments": []}', '"arguments" must be a JSON object, got a list'),
        ('{"name": "x", "arguments": null}', "got null"),
        ('{"name": "x", "arguments": "1+1"}', "got a string"),
        ('{"name": "x", "arguments": {}} extra', "text after"),
        ("", "not valid JSON"),
        ("[" * 100_000, "too deeply"),
        ('{"name": "x", "arguments": {"n": ' + "9" * 5000 + "}}", "too many digits"),
    ],
)
def test_a_malformed_call_says_what_is_wrong(body, said):
    assert said in only_reason(block(body))


def test_a_call_that_is_not_closed_is_malformed():
    assert "not closed" in only_reason('<tool_call>{"name": "run", "arguments": {}}')


def test_a_call_opened_inside_another_counts_by_itself():
    first, second = parse_reply(f"<tool_call>{CALL}").calls
    assert "not closed" in first.reason
    assert second == RUN


def test_the_raw_text_of_a_malformed_call_is_the_whole_block():
    (call,) = parse_reply(f"a {block('oops')} b").calls
    assert call.raw == block("oops")


PARTS = ["<think>", "</think>", "<tool_call>", "</tool_call>", CALL, '{"name": "x"', "}", "\\", '"']


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from(PARTS) | st.text(max_size=8), max_size=12).map("".join))
def test_any_text_gives_a_reply(text):
    reply = parse_reply(text)
    assert all(isinstance(call, ToolCall | MalformedCall) for call in reply.calls)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**9), 10**9) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=6,
)


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=8), st.dictionaries(st.text(max_size=5), JSON, max_size=3))
def test_every_call_that_is_rendered_is_read_back(name, arguments):
    text = block(json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False))
    assert parse_reply(text).calls == (ToolCall(name, arguments),)
