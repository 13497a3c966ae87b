"""The one tool of the policy: a Python interpreter (the paper's `code_interpreter`)."""

import re
from typing import Any

from demyrl.types import ToolCall, ToolResult

NAME = "code_interpreter"
SCHEMA: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": NAME,
        "description": "Run Python code.",
        "parameters": {
            "type": "object",
            "properties": {"code": {"type": "string"}},
            "required": ["code"],
        },
    },
}
FENCE = re.compile(r"\s*```(?:python3?|py)?[ \t]*\n(.*?)\n?[ \t]*```\s*", re.DOTALL | re.IGNORECASE)


def code_of(call: ToolCall) -> str | ToolResult:
    """The program a call asks for, without a Markdown fence around it.

    A call that is not one of this tool is a "malformed" result whose text names the fault.
    """
    if call.name != NAME:
        return _malformed(f"there is no tool {str(call.name)[:80]!r}; the only one is {NAME!r}")
    arguments = call.arguments
    if not isinstance(arguments, dict):
        kind = type(arguments).__name__
        return _malformed(f"the arguments must be an object with one key 'code', not {kind}")
    if "code" not in arguments:
        return _malformed("the argument 'code' is missing")
    extra = sorted(str(name) for name in arguments if name != "code")
    if extra:
        names = ", ".join(extra)[:80]
        return _malformed(f"unknown arguments ({names}); the only one is 'code'")
    code = arguments["code"]
    if not isinstance(code, str):
        return _malformed(f"the argument 'code' must be a string, not {type(code).__name__}")
    fenced = FENCE.fullmatch(code)
    return fenced[1] if fenced else code


def _malformed(fault: str) -> ToolResult:
    return ToolResult("malformed", f"Malformed tool call: {fault}.")
