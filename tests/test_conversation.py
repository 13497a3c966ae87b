"""A conversation is one row of tokens to which messages, answers and results are appended."""

from concurrent.futures import Future

import pytest

from demyrl.rollout.conversation import Conversation, TooLong
from demyrl.rollout.sampler import Sampler, SamplerConfig
from demyrl.types import Message, ToolCall, ToolResult
from tests.tiny import MODEL, FakeTools, ScriptedSampler, chat, params

CALL = Message("assistant", "Let me see.\n", (ToolCall("code_interpreter", {"code": "1+1"}),))
ANSWER = Message("assistant", "It is 2.")
END = chat().end_tokens[0]
CONTEXT = 160


class Watcher:
    """What a viewer was told."""

    def __init__(self):
        self.said, self.came = [], []

    def reply(self, text, over):
        self.said.append((text, over))

    def results(self, results):
        self.came += results


def made(sampler_class=Sampler, tools=None, max_new_tokens=64, temperature=1.0):
    shapes = SamplerConfig(1, CONTEXT, 4, 1, (16, 64), temperature)
    sampler = sampler_class(MODEL, shapes, chat().end_tokens)
    sampler.load(params())
    return Conversation(sampler, chat(), tools, max_new_tokens, seed=0)


def scripted(*answers, **options):
    """A conversation whose model says answers[k] to message k, each a list of turns."""
    order = []

    def script(key, turn):
        if key not in order:
            order.append(key)
        said = answers[order.index(key)][turn]
        return said if isinstance(said, list) else chat().assistant(said)

    sampler_class = type("Scripted", (ScriptedSampler,), {"script": staticmethod(script)})
    return made(sampler_class, **options)


@pytest.fixture(scope="module")
def two_messages():
    """A conversation of two messages, the first answered with a call, and its two answers."""
    talk = scripted([CALL, ANSWER], [ANSWER], tools=FakeTools())
    watcher = Watcher()
    return talk, [talk.answer(text, watcher) for text in ("What is 1+1?", "Again?")], watcher


def test_the_tokens_of_two_messages_are_those_of_the_chat_template(two_messages):
    said = [Message("user", "What is 1+1?"), CALL, Message("tool", "1+1"), ANSWER]
    want, _ = chat().conversation([*said, Message("user", "Again?"), ANSWER])
    assert two_messages[0].tokens == want


def test_the_cache_saw_each_token_but_the_last_once(two_messages):
    talk = two_messages[0]
    assert talk.sampler.fed[0] == talk.tokens[:-1]


def test_ids_are_what_was_sampled_with_the_end_of_each_turn(two_messages):
    want = [chat().assistant(CALL), chat().assistant(ANSWER)]
    answer = two_messages[1][0]
    assert [turn.ids for turn in answer.turns] == want and answer.ids == sum(want, [])


def test_the_prompt_of_a_later_answer_is_all_that_was_said(two_messages):
    talk, (_, second), _ = two_messages
    assert second.prompt_ids + second.ids == talk.tokens


def test_an_answer_as_json_has_the_call_the_result_and_the_last_text(two_messages):
    row = two_messages[1][0].row()
    assert row["turns"][0]["calls"] == [{"name": "code_interpreter", "arguments": {"code": "1+1"}}]
    assert row["turns"][0]["results"] == [{"status": "ok", "output": "1+1"}]
    assert (row["text"], row["stop"]) == ("It is 2.", "answered")


def test_a_viewer_sees_the_reply_grow_and_the_results(two_messages):
    watcher = two_messages[2]
    said = [text for text, _ in watcher.said]
    assert sum(over for _, over in watcher.said) == 3 and len(said) > 6
    assert said[-1] == "It is 2." and said[-2] and said[-1].startswith(said[-2])
    assert watcher.came == [ToolResult("ok", "1+1")]


def test_an_answer_is_greedy_in_the_same_way_whatever_was_said_before():
    talk = made(temperature=0.0, max_new_tokens=9)
    first = talk.answer("One", Watcher())
    talk.answer("Two", Watcher())
    talk.restart()
    assert talk.answer("One", Watcher()).ids == first.ids


def test_sampled_answers_to_one_message_differ():
    talk = made(max_new_tokens=9)
    first = talk.answer("One", Watcher())
    talk.restart()
    assert talk.answer("One", Watcher()).ids != first.ids


def test_max_new_tokens_is_for_all_turns_together():
    calls = chat().assistant(CALL)
    talk = scripted([CALL, [9] * 50], tools=FakeTools(), max_new_tokens=len(calls) + 5)
    answer = talk.answer("Hi", Watcher())
    assert [len(turn.ids) for turn in answer.turns] == [len(calls), 5]
    assert answer.stop == "max_new_tokens"


def test_a_call_with_the_last_token_gets_its_result_and_no_reply():
    calls = chat().assistant(CALL)
    answer = scripted([CALL], tools=FakeTools(), max_new_tokens=len(calls)).answer("Hi", Watcher())
    assert answer.stop == "max_new_tokens"
    assert [len(turn.results) for turn in answer.turns] == [1, 0]


def test_without_tools_a_call_is_text():
    answer = scripted([CALL]).answer("Hi", Watcher())
    assert (answer.stop, answer.turns[0].calls) == ("answered", ())
    assert "<tool_call>" in answer.turns[0].text


def test_a_malformed_call_is_on_record_with_its_reason():
    talk = scripted([Message("assistant", "<tool_call>no</tool_call>"), ANSWER], tools=FakeTools())
    turn = talk.answer("Hi", Watcher()).row()["turns"][0]
    assert turn["calls"][0]["name"] is None and "not valid JSON" in turn["calls"][0]["reason"]
    assert turn["results"][0]["status"] == "malformed"


def test_an_answer_that_was_stopped_is_closed_and_the_next_one_follows_it():
    talk = scripted([[9] * 50], [ANSWER])
    answer = talk.answer("Hi", Watcher(), iter([False, False, True]).__next__)
    assert (answer.ids, answer.stop) == ([9] * 8, "interrupted")
    assert talk.answer("And?", Watcher()).stop == "answered"
    want = chat().prompt("Hi") + [9] * 8 + [END] + chat().next_user("And?")
    assert talk.tokens == want + chat().assistant(ANSWER)
    assert talk.sampler.fed[0] == talk.tokens[:-1]


def test_a_running_tool_can_be_stopped():
    class Stuck(FakeTools):
        def submit(self, call):
            return Future()

    looks = iter([False] * 20 + [True] * 9)
    talk = scripted([CALL], tools=Stuck())
    answer = talk.answer("Hi", Watcher(), lambda: bool(talk.tokens) or next(looks))
    assert answer.stop == "interrupted" and answer.turns[0].results == ()


def test_a_message_that_does_not_fit_names_both_lengths_and_is_forgotten():
    talk = scripted([ANSWER])
    length = len(chat().prompt("word " * 99))
    with pytest.raises(TooLong, match=f"has {length} tokens and the context holds {CONTEXT}.*Sho"):
        talk.answer("word " * 99, Watcher())
    assert talk.answer("Hi", Watcher()).stop == "answered"
    with pytest.raises(TooLong, match="the conversation with this message has .*Begin a new one"):
        talk.answer("word " * 99, Watcher())


@pytest.mark.parametrize("tools", [None, FakeTools()], ids=["without_tools", "with_tools"])
def test_a_full_context_ends_an_answer(tools):
    talk = scripted([[9] * CONTEXT], tools=tools, max_new_tokens=CONTEXT)
    answer = talk.answer("Hi", Watcher())
    assert len(answer.prompt_ids) + len(answer.ids) == CONTEXT
    assert answer.stop == "context_full"


def test_a_thought_that_the_prompt_opened_is_shown_as_one(monkeypatch):
    talk, watcher = scripted([Message("assistant", "Hm.\n</think>\n\nYes.")]), Watcher()
    opened = chat().prompt("Hi") + chat().tokenizer.encode_written("<think>\n")
    monkeypatch.setattr(talk.chat, "prompt", lambda text: opened)
    answer = talk.answer("Hi", watcher)
    assert watcher.said[-1] == ("<think>\nHm.\n</think>\n\nYes.", True)
    assert answer.turns[0].text == "Hm.\n</think>\n\nYes."
