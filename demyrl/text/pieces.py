"""What a chat template adds to the texts of a conversation, found by rendering marks.

Nothing here knows a template's words: conversations whose texts are marks are rendered, and what
stands between the marks is kept, as tokens where it can be.
"""

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from demyrl.text.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True)
class Glue:
    """What a template writes between two texts, split where their tokens cannot reach.

    Tokens never cross a control token, but they may merge a text with the plain characters next
    to it; so those stay characters, and are encoded together with the text.
    """

    left: str  # ends the text before
    tokens: tuple[int, ...]
    right: str  # begins the text after


@dataclasses.dataclass(frozen=True)
class Pieces:
    """All that a template adds to the texts of a conversation."""

    start: Glue  # up to the first user's text, in a conversation without a system message
    start_system: Glue
    system_user: Glue
    user_reply: Glue  # from a user's text to where the reply begins
    reply_user: Glue  # from behind the end-of-turn token to the next user's text
    reply_result: Glue
    result_result: Glue
    result_reply: Glue
    call_open: str  # from the assistant's words to the name of the first call
    call_open_bare: str  # the same where there are no words
    call_middle: str  # from the name to the arguments
    call_next: str  # from the arguments to the name of the next call
    call_close: str  # from the last arguments to the end-of-turn token
    end: int  # the end-of-turn token


def find_pieces(tokenizer: Tokenizer, tools: list[dict[str, Any]] | None) -> Pieces:
    """The pieces of a tokenizer's template; raises ValueError where it drops or reorders texts."""
    question, reply = _say("user", "markA"), _say("assistant", "markB")
    results = [_say("tool", "markE"), _say("tool", "markF")]
    written = json.dumps(ARGUMENTS)

    def between(messages: list[dict[str, Any]], marks: Sequence[str]) -> list[str]:
        return _split(tokenizer.render(messages, tools, True), marks)

    begin, to_reply, behind, _ = between(
        [question, reply, _say("user", "markG")], ["markA", "markB", "markG"]
    )
    begin_system, system_user, _ = between([_say("system", "markG"), question], ["markG", "markA"])
    _, _, call_open, middle, following, _, closing, to_result, last = between(
        [question, reply | CALLS, *results],
        ["markA", "markB", "markC", written, "markD", written, "markE", "markF"],
    )
    _, bare, _ = between([question, _say("assistant", "") | CALLS, *results], ["markA", "markC"])
    end = _end_token(tokenizer, behind)
    end_text = tokenizer.decode([end])
    call_close, _, behind_call = closing.partition(end_text)
    return Pieces(
        start=_to_text(tokenizer, begin),
        start_system=_to_text(tokenizer, begin_system),
        system_user=_glue(tokenizer, system_user),
        user_reply=_to_reply(tokenizer, to_reply),
        reply_user=_to_text(tokenizer, behind.removeprefix(end_text)),
        reply_result=_to_text(tokenizer, behind_call),
        result_result=_glue(tokenizer, to_result),
        result_reply=_to_reply(tokenizer, last),
        call_open=call_open,
        call_open_bare=_behind(bare, to_reply),
        call_middle=middle,
        call_next=following,
        call_close=call_close,
        end=end,
    )


ARGUMENTS = {"code": "mark"}
CALLS = {
    "tool_calls": [
        {"type": "function", "function": {"name": name, "arguments": ARGUMENTS}}
        for name in ("markC", "markD")
    ]
}


def _say(role: str, text: str) -> dict[str, Any]:
    return {"role": role, "content": text}


def _split(rendered: str, marks: Sequence[str]) -> list[str]:
    """What stands before, between and behind the marks."""
    parts, rest = [], rendered
    for mark in marks:
        part, found, rest = rest.partition(mark)
        if not found:
            raise ValueError(
                f"the chat template lost {mark!r} or moved it: {rendered!r}. Conversations cannot "
                "be put together from its pieces; use another template."
            )
        parts.append(part)
    return [*parts, rest]


def _behind(text: str, prefix: str) -> str:
    if not text.startswith(prefix):
        raise ValueError(
            f"the chat template begins a reply with {prefix!r}, but one without words with "
            f"{text!r}. Replies cannot be appended; use another template."
        )
    return text.removeprefix(prefix)


def _end_token(tokenizer: Tokenizer, behind_reply: str) -> int:
    for token in tokenizer.end_tokens:
        if behind_reply.startswith(tokenizer.decode([token])):
            return token
    ends = [tokenizer.decode([token]) for token in tokenizer.end_tokens]
    raise ValueError(
        f"the chat template writes {behind_reply!r} behind a reply, which begins with none of "
        f"{', '.join(ends)}: a sampler would not know where turns end."
    )


def _glue(tokenizer: Tokenizer, text: str) -> Glue:
    """Glue from text to text. Without a control token it is cut at a line start in the middle
    where cutting leaves the tokens as they are."""
    found = list(tokenizer.markup_pattern.finditer(text))
    if found:
        first, last = found[0].start(), found[-1].end()
        tokens = tokenizer.encode_markup(text[first:last])
        return Glue(text[:first], tuple(tokens), text[last:])
    whole = tokenizer.encode(text)
    lines = [index for index in range(len(text) + 1) if text[:index].endswith("\n")]
    for cut in sorted(lines, key=lambda index: abs(2 * index - len(text))):
        if tokenizer.encode(text[:cut]) + tokenizer.encode(text[cut:]) == whole:
            return Glue(text[:cut], (), text[cut:])
    return Glue(text, (), "")


def _to_text(tokenizer: Tokenizer, text: str) -> Glue:
    """Glue with no text before it."""
    glue = _glue(tokenizer, text)
    return Glue("", (*tokenizer.encode(glue.left), *glue.tokens), glue.right)


def _to_reply(tokenizer: Tokenizer, text: str) -> Glue:
    """Glue up to where the policy samples: its tokens are complete there."""
    glue = _glue(tokenizer, text)
    return Glue(glue.left, (*glue.tokens, *tokenizer.encode(glue.right)), "")
