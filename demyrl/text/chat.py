"""Messages to tokens, a piece at a time, with which of them the policy chose.

A conversation only ever grows: what the template writes between turns is found once (`pieces.py`),
and then pieces are appended: the prompt, what the assistant wrote, the results of its calls.
Rollouts and supervised rows are made of the same pieces, so no conversation is rendered or encoded
twice. The file form of a conversation, the columns of the Open-AgentRL rows, is here too.
"""

import itertools
import json
import os
from collections.abc import Iterator, Sequence
from typing import Any

from demyrl.text.pieces import Glue, Pieces, ToolPieces, find_pieces, without_tool_support
from demyrl.text.tokenizer import Tokenizer
from demyrl.types import Message, ToolCall

CUT_NOTE = " ... "
LONGEST_CHARACTER = 4  # bytes of UTF-8, so it has at most as many tokens
ROLES = ("system", "user", "assistant", "tool")
FOLLOWERS = {
    None: ("system", "user"),
    "system": ("user",),
    "user": ("assistant",),
    "assistant": ("tool", "user"),
    "tool": ("tool", "assistant"),
}
PROBE = (
    Message("user", " Question \n"),  # a template that trims it would not render what is asked
    Message(
        "assistant",
        "<think>\nPlan\n</think>\n\nFirst",
        (ToolCall("one", {"code": 'print("\u00e9")\n'}), ToolCall("two", {"x": None, "y": [1.5]})),
    ),
    Message("tool", "3"),
    Message("tool", "Four."),
    Message("assistant", "", (ToolCall("one", {}),)),
    Message("tool", ""),
    Message("assistant", "<think>\nCheck\n</think>", (ToolCall("one", {}),)),
    Message("tool", "4"),
    Message("assistant", "Answer"),
    Message("user", "Another"),
    Message("assistant", "Last."),
)
PROBE_OF_WORDS = (*PROBE[:1], Message("assistant", PROBE[1].text), *PROBE[-2:])


class Chat:
    """The conversations of one tokenizer and one set of tools, as tokens.

    Raises ValueError when there are tools and the template does not support them, and when pieces
    joined one by one differ from the template's rendering of the whole, as with templates that
    rewrite earlier turns. `keep=True` accepts the latter: what the policy has seen then stays as it
    was. A first prompt is the template's rendering in any case.
    """

    def __init__(
        self, tokenizer: Tokenizer, schemas: Sequence[dict[str, Any]], keep: bool = False
    ) -> None:
        self.tokenizer = tokenizer
        self._tools = list(schemas) or None
        self._pieces: Pieces = find_pieces(tokenizer, self._tools)
        self._note = tokenizer.encode(CUT_NOTE)
        self.end_tokens: tuple[int, ...] = tokenizer.end_tokens
        probe = PROBE if self._pieces.tools else PROBE_OF_WORDS
        self._prove_prompt(probe[0])
        if not keep:
            self._prove(probe)

    def prompt(self, text: str) -> list[int]:
        """Everything before the first token of the first reply."""
        return self._join([self._pieces.start, self._pieces.user_reply], [text])

    def next_user(self, text: str) -> list[int]:
        """Everything between an end-of-turn token and the first token of the reply to text."""
        return self._join([self._pieces.reply_user, self._pieces.user_reply], [text])

    def assistant(self, message: Message) -> list[int]:
        """What a policy samples to say this, the end-of-turn token included."""
        text = message.text
        if message.calls:
            text += self._tool_pieces().calls(text, message.calls)
        return [*self.tokenizer.encode_written(text), self._pieces.end]

    def tool_results(self, outputs: Sequence[str], max_tokens: int) -> list[int]:
        """Everything between a turn's end-of-turn token and the first token of the next reply.

        An output of more than `max_tokens` tokens loses its middle and is then never longer; what
        the template writes around it comes on top.
        """
        if not outputs or max_tokens < 0:
            raise ValueError(
                f"tool_results got {len(outputs)} outputs and max_tokens {max_tokens}: give an "
                "output for each call of the turn, and a limit of at least 0 tokens."
            )
        return self._results(outputs, max_tokens)

    def conversation(
        self, messages: Sequence[Message], max_tool_tokens: int | None = None
    ) -> tuple[list[int], list[bool]]:
        """The tokens of a whole conversation, and True where an assistant chose them.

        It ends with the end-of-turn token of its last turn, which must be the assistant's. Raises
        ValueError for an order of roles that no rollout can produce.
        """
        tokens: list[int] = []
        sampled: list[bool] = []
        for piece, chosen in self._turns(messages, max_tool_tokens):
            tokens += piece
            sampled += [chosen] * len(piece)
        return tokens, sampled

    def _turns(
        self, messages: Sequence[Message], max_tool_tokens: int | None
    ) -> Iterator[tuple[list[int], bool]]:
        """The piece of each turn, and whether an assistant chose it; a prompt is one piece."""
        pieces = self._pieces
        before, texts = [pieces.start], []
        for role, turn in itertools.groupby(_checked(messages), lambda message: message.role):
            said = list(turn)
            if role == "assistant":
                yield self.assistant(said[0]), True
                before = [pieces.reply_user]
            elif role == "tool":
                yield self._results([each.text for each in said], max_tool_tokens), False
            elif role == "system":
                before, texts = [pieces.start_system, pieces.system_user], [said[0].text]
            else:
                yield self._join([*before, pieces.user_reply], [*texts, said[0].text]), False
                texts = []

    def _results(self, outputs: Sequence[str], max_tokens: int | None) -> list[int]:
        pieces = self._tool_pieces()
        between = [pieces.result_result] * (len(outputs) - 1)
        return self._join([pieces.reply_result, *between, pieces.result_reply], outputs, max_tokens)

    def _tool_pieces(self) -> ToolPieces:
        if self._pieces.tools is None:
            reason = "it cannot write the calls and results of this conversation."
            raise ValueError(without_tool_support(self.tokenizer, reason))
        return self._pieces.tools

    def _join(
        self, glues: Sequence[Glue], texts: Sequence[str], max_tokens: int | None = None
    ) -> list[int]:
        """Texts with glue before, between and behind them, each text encoded once."""
        tokens = list(glues[0].tokens)
        for before, text, after in zip(glues, texts, glues[1:], strict=False):
            body = self.tokenizer.encode(before.right + text + after.left)
            if max_tokens is not None and len(body) > max_tokens:
                body = self._shortened(body, before.right, after.left, max_tokens)
            tokens += body
            tokens += after.tokens
        return tokens

    def _shortened(self, tokens: list[int], before: str, after: str, max_tokens: int) -> list[int]:
        """Tokens of a text without its middle; `before` and `after` around it stay whole."""
        first, last = len(self.tokenizer.encode(before)), len(self.tokenizer.encode(after))
        if len(tokens) - first - last <= max_tokens:
            return tokens
        note = self._note if max_tokens > len(self._note) else []
        kept = max_tokens - len(note)
        head = tokens[: first + kept - kept // 2]
        tail = tokens[len(tokens) - last - kept // 2 :]
        return [*self._whole_end(head), *note, *self._whole_start(tail)]

    def _whole_end(self, tokens: list[int]) -> list[int]:
        """Tokens without a part of a character at their end."""
        for cut in range(min(LONGEST_CHARACTER, len(tokens))):
            kept = tokens[: len(tokens) - cut]
            if not self.tokenizer.decode(kept[-LONGEST_CHARACTER:]).endswith("\ufffd"):
                return kept
        return tokens

    def _whole_start(self, tokens: list[int]) -> list[int]:
        """Tokens without a part of a character at their start."""
        for cut in range(min(LONGEST_CHARACTER, len(tokens))):
            if not self.tokenizer.decode(tokens[cut:][:LONGEST_CHARACTER]).startswith("\ufffd"):
                return tokens[cut:]
        return tokens

    def _prove_prompt(self, question: Message) -> None:
        """Raises ValueError unless a first prompt is what the template renders."""
        prompt = self.tokenizer.render(message_dicts([question]), self._tools, True)
        if fault := self._difference(self.prompt(question.text), prompt, exact=True):
            raise ValueError(
                f"the chat template of {self.tokenizer.origin} does not only append: for a single "
                f"question {fault}. Use another template (--config.chat.template=FILE)."
            )

    def _prove(self, messages: Sequence[Message]) -> None:
        """Raises ValueError unless the template renders every prefix as the pieces have it."""
        seen: list[int] = []
        dicts = message_dicts(messages)
        replies = iter([i for i, each in enumerate(messages) if each.role == "assistant"])
        for piece, chosen in self._turns(messages, None):
            if not chosen:
                seen += piece
                continue
            reply = next(replies)
            prompt = self.tokenizer.render(dicts[:reply], self._tools, True)
            self._compare(f"the context of message {reply}", seen, prompt, exact=True)
            seen += piece
            whole = self.tokenizer.render(dicts[: reply + 1], self._tools, False)
            self._compare(f"everything up to message {reply}", seen, whole, exact=False)

    def _compare(self, what: str, seen: list[int], rendered: str, exact: bool) -> None:
        if fault := self._difference(seen, rendered, exact):
            raise ValueError(
                f"the chat template of {self.tokenizer.origin} does not only append: for {what} of "
                f"a test conversation {fault}. Use a template without such rewriting "
                "(--config.chat.template=FILE), or chat.keep=True (--config.chat.keep=True) to "
                "train on what the policy has seen."
            )

    def _difference(self, seen: list[int], rendered: str, exact: bool) -> str:
        """Where what was seen leaves what is rendered, in words; "" when it does not."""
        tokens = self.tokenizer.encode_markup(rendered)
        if tokens == seen or (not exact and tokens[: len(seen)] == seen):
            return ""
        ours = self.tokenizer.decode(seen)
        at = len(os.path.commonprefix([ours, rendered]))
        around = slice(max(0, at - 30), at + 50)
        other = " in other tokens" if at == len(ours) else ""
        return f"it gives {rendered[around]!r} where the policy has seen {ours[around]!r}{other}"


def message_dicts(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages as templates and rows have them."""
    dicts = []
    for message in messages:
        each: dict[str, Any] = {"role": message.role, "content": message.text}
        if message.calls:
            each["tool_calls"] = [
                {"type": "function", "function": {"name": c.name, "arguments": c.arguments}}
                for c in message.calls
            ]
        dicts.append(each)
    return dicts


def row_of(messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A supervised row with the columns `messages` and `tools`."""
    return {"messages": message_dicts(messages), "tools": list(tools)}


def messages_from_row(row: dict[str, Any]) -> list[Message]:
    """The conversation of a supervised row; raises ValueError that names the message at fault."""
    dicts = row.get("messages")
    if not isinstance(dicts, list | tuple) or not dicts:
        raise ValueError(f"the row has no list of messages; its columns are {sorted(row)}.")
    return [_message(each, f"message {index}") for index, each in enumerate(dicts)]


def _message(each: Any, where: str) -> Message:
    if not isinstance(each, dict) or each.get("role") not in ROLES:
        raise ValueError(
            f"{where} is {each!r:.200}: expected an object whose role is system, user, assistant "
            "or tool."
        )
    text = each.get("content")
    calls = each.get("tool_calls") or ()
    if not isinstance(text, str) and not (text is None and calls):
        raise ValueError(f"{where}: content is {text!r:.200}, expected a string.")
    if calls and each["role"] != "assistant":
        raise ValueError(f"{where} has tool_calls but is the {each['role']}'s.")
    return Message(each["role"], text or "", tuple(_call(call, where) for call in calls))


def _call(call: Any, where: str) -> ToolCall:
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError(f"{where}: the tool call {call!r:.200} has no function with a name.")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments, strict=False)
        except ValueError as error:
            raise ValueError(f"{where}: arguments {arguments!r:.200} are no JSON: {error}.") from (
                error
            )
    if not isinstance(arguments, dict):
        raise ValueError(f"{where}: arguments are {arguments!r:.200}, expected an object.")
    return ToolCall(function["name"], arguments)


def _checked(messages: Sequence[Message]) -> Sequence[Message]:
    previous = None
    for index, message in enumerate(messages):
        if message.role not in FOLLOWERS[previous]:
            raise ValueError(
                f"message {index} is the {message.role}'s, after {previous or 'nothing'}; expected "
                f"{' or '.join(FOLLOWERS[previous])}."
            )
        previous = message.role
    if previous != "assistant":
        raise ValueError(f"the last message is of {previous}; expected an assistant's.")
    return messages
