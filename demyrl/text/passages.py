"""A reply as a person reads it while it is written: words, thought and the programs of its calls.

For the eye only: what a reply asks for is what `toolcalls.py` reads in it.
"""

import json
import re

from demyrl.text.toolcalls import CALL_CLOSE, CALL_OPEN, THINK_CLOSE, THINK_OPEN

BLOCK = re.compile(
    rf"{THINK_OPEN}.*?(?:{THINK_CLOSE}|\Z)|{CALL_OPEN}.*?(?:{CALL_CLOSE}|\Z)", re.DOTALL
)
NAME = re.compile(r'"name"\s*:\s*"([^"\\]*)"')
CODE = re.compile(  # as far as it can be read: half an escape, or half a pair of them, is left out
    r'"code"\s*:\s*"((?:[^"\\]|\\["\\/bfnrt]|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[0-9a-fA-F]{4}'
    r"|\\u(?![dD][89abAB])[0-9a-fA-F]{4})*)"
)


def passages(text: str, over: bool) -> list[tuple[str, str]]:
    """A reply as it is shown, and the kind of each part: words, thought or call.

    While a reply grows, what is shown of it only grows; unless it is `over`, an end that may still
    become a character or a tag is held back.
    """
    text = text if over else _settled(text)
    parts, done, end = [], "", 0
    for block in BLOCK.finditer(text):
        words, written = text[end : block.start()], block[0]
        done += words
        kind = "thought" if written.startswith(THINK_OPEN) else "call"
        if kind == "call":
            at_line_start = not done or done.endswith("\n")
            written = _call(written, over, "" if at_line_start else "\n")
        parts += [("words", words), (kind, written)]
        done += written
        end = block.end()
    return [*parts, ("words", text[end:])]


def _settled(text: str) -> str:
    text = text.rstrip("\ufffd")
    last = text.rfind("<")
    grows = last >= 0 and any(tag.startswith(text[last:]) for tag in (THINK_OPEN, CALL_OPEN))
    return text[:last] if grows else text


def _call(block: str, over: bool, before: str) -> str:
    """A call's program as far as it is written; what has none is shown as it is, once complete."""
    complete = over or block.endswith(CALL_CLOSE)
    code = CODE.search(block)
    if not code:
        return f"{before}[call]\n{block}\n" if complete else ""
    name = NAME.search(block, 0, code.start())
    program = json.loads(f'"{code[1]}"', strict=False)
    title = f"[call {name[1]}]" if name else "[call]"
    return f"{before}{title}\n{program}" + ("\n" if complete else "")
