r"""Where a reply keeps its answer: the last `\boxed{...}` the policy wrote outside its thoughts."""

import re

CALL = re.compile(r"<tool_call>.*?(?:</tool_call>|\Z)", re.DOTALL)
BRACE = re.compile(r"\\boxed\{|\\.|[{}]", re.DOTALL)


def last_boxed(text: str) -> str | None:
    r"""What the last balanced `\boxed{...}` holds, stripped; None without an answer.

    Only text after the last closed thought counts, and no text inside a tool call. A thought that
    was never closed, or an empty box, is no answer.
    """
    opened, closed = text.rfind("<think>"), text.rfind("</think>")
    if opened > closed:
        return None
    said = CALL.sub(" ", text[closed + len("</think>") :] if closed >= 0 else text)
    boxes: list[tuple[int, int]] = []
    open_braces: list[tuple[int, bool]] = []
    for match in BRACE.finditer(said):
        if match[0] == "}":
            start, is_box = open_braces.pop() if open_braces else (0, False)
            if is_box:
                boxes.append((start, match.start()))
        elif match[0].endswith("{") and match[0] != "\\{":
            open_braces.append((match.end(), len(match[0]) > 1))
    if not boxes:
        return None
    start, end = max(boxes)
    return said[start:end].strip() or None
