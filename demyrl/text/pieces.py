"""What a chat template adds to the texts of a conversation, found by rendering marks.

Nothing here knows a template's words: conversations whose texts are marks are rendered, and what
stands between the marks is kept, as tokens where it can be.
"""

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from demyrl.text.tokenizer import HERMES, Tokenizer
from demyrl.text.toolcalls import THINK_CLOSE, THINK_OPEN, parse_reply
from demyrl.types import ToolCall


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
class ToolPieces:
    """What a template adds to calls and to their results."""

    call_open: str  # from the assistant's words to the name of the first call
    call_open_thought: str  # the same where the last words close a thought
    call_open_bare: str  # ... and where there are no words
    call_middle: str  # from the name to the arguments
    call_next: str  # from the arguments to the name of the next call
    call_close: str  # from the last arguments to the end-of-turn token
    reply_result: Glue
    result_result: Glue
    result_reply: Glue

    def calls(self, words: str, calls: Sequence[ToolCall]) -> str:
        """What an assistant writes behind its words, if any, to make one call or more."""
        text = self.call_open if words else self.call_open_bare
        if words.endswith(THINK_CLOSE):
            text = self.call_open_thought
        for index, call in enumerate(calls):
            text += (self.call_next if index else "") + call.name
            text += self.call_middle + json.dumps(call.arguments, ensure_ascii=False)
        return text + self.call_close


@dataclasses.dataclass(frozen=True)
class Pieces:
    """All that a template adds to the texts of a conversation."""

    start: Glue  # up to the first user's text, in a conversation without a system message
    start_system: Glue
    system_user: Glue
    user_reply: Glue  # from a user's text to where the reply begins
    reply_user: Glue  # from behind the end-of-turn token to the next user's text
    end: int  # the end-of-turn token
    tools: ToolPieces | None  # None where the template does not support them


def find_pieces(tokenizer: Tokenizer, tools: list[dict[str, Any]] | None) -> Pieces:
    """The pieces of a tokenizer's template; raises ValueError where it drops or reorders texts.

    A template without support for tools is refused only if there are tools.
    """
    question, reply = _say("user", "markA"), _say("assistant", "markB")
    begin, to_reply, behind, _ = _split(
        tokenizer.render([question, reply, _say("user", "markG")], tools, True),
        ["markA", "markB", "markG"],
    )
    begin_system, system_user, _ = _split(
        tokenizer.render([_say("system", "markG"), question], tools, True), ["markG", "markA"]
    )
    end = _end_token(tokenizer, behind)
    end_text = tokenizer.decode([end])
    try:
        tool_pieces = _find_tool_pieces(tokenizer, tools, end_text)
    except ValueError as error:
        if tools:
            raise ValueError(without_tool_support(tokenizer, str(error))) from error
        tool_pieces = None
    return Pieces(
        start=_to_text(tokenizer, begin),
        start_system=_to_text(tokenizer, begin_system),
        system_user=_glue(tokenizer, system_user),
        user_reply=_to_reply(tokenizer, to_reply),
        reply_user=_to_text(tokenizer, behind.removeprefix(end_text)),
        end=end,
        tools=tool_pieces,
    )


def supports_tools(tokenizer: Tokenizer) -> bool:
    """Whether a tokenizer's template shows tools, writes calls as we read them, and results."""
    try:
        find_pieces(tokenizer, [TOOL])
    except ValueError:
        return False
    return True


def without_tool_support(tokenizer: Tokenizer, reason: str) -> str:
    """What is wrong with a template that cannot be used with tools, and what to do."""
    hermes = f"--config.chat.template={HERMES}, " if tokenizer.has_chatml else ""
    return (
        f"the chat template of {tokenizer.origin} has no tool support: {reason} Use {hermes}"
        "another template (--config.chat.template=FILE), or no tools (chat.prompts=no_tool and "
        "tools.enabled=False)."
    )


ARGUMENTS = {"code": "mark"}
CALLS = (ToolCall("markC", ARGUMENTS), ToolCall("markD", ARGUMENTS))
CALLING = {
    "tool_calls": [
        {"type": "function", "function": {"name": each.name, "arguments": each.arguments}}
        for each in CALLS
    ]
}
PARAMETERS = {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]}
TOOL = {
    "type": "function",
    "function": {"name": "markT", "description": "markU", "parameters": PARAMETERS},
}


def _find_tool_pieces(
    tokenizer: Tokenizer, tools: list[dict[str, Any]] | None, end_text: str
) -> ToolPieces:
    """Raises ValueError with the reason where the template does not support tools."""
    question, reply = _say("user", "markA"), _say("assistant", "markB")
    results = [_say("tool", "markE"), _say("tool", "markF")]
    written = json.dumps(ARGUMENTS)
    if "markT" not in tokenizer.render([question], [TOOL], True):
        raise ValueError("it does not show tools to the model.")
    _, to_reply, call_open, middle, following, _, closing, to_result, last = _split(
        tokenizer.render([question, reply | CALLING, *results], tools, True),
        ["markA", "markB", "markC", written, "markD", written, "markE", "markF"],
    )
    _, bare, _ = _split(
        tokenizer.render([question, _say("assistant", "") | CALLING, *results], tools, True),
        ["markA", "markC"],
    )
    call_close, found, behind_call = closing.partition(end_text)
    if not found:
        raise ValueError(f"it writes {closing!r} behind a call, without the {end_text} of a reply.")
    pieces = ToolPieces(
        call_open=call_open,
        call_open_thought=_behind_thought(tokenizer, tools) or call_open,
        call_open_bare=_behind(bare, to_reply),
        call_middle=middle,
        call_next=following,
        call_close=call_close,
        reply_result=_to_text(tokenizer, behind_call),
        result_result=_glue(tokenizer, to_result),
        result_reply=_to_reply(tokenizer, last),
    )
    said = pieces.calls("", CALLS)
    if parse_reply(said).calls != CALLS:
        raise ValueError(f"it writes calls as {said!r}, which are not Hermes <tool_call> blocks.")
    return pieces


def _behind_thought(tokenizer: Tokenizer, tools: list[dict[str, Any]] | None) -> str:
    """What stands between a thought and a call right behind it; "" where thoughts are dropped."""
    thought = f"{THINK_OPEN}\nmarkB\n{THINK_CLOSE}"
    messages = [_say("user", "markA"), _say("assistant", thought) | CALLING, _say("tool", "markE")]
    _, kept, behind = tokenizer.render(messages, tools, True).partition(thought)
    return behind.partition("markC")[0] if kept else ""


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
