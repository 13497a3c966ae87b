import pytest

from demyrl.tools.interpreter import SCHEMA, code_of
from demyrl.types import ToolCall, ToolResult


def call(**arguments) -> ToolCall:
    return ToolCall("code_interpreter", arguments)


def test_the_tool_asks_for_one_string():
    parameters = SCHEMA["function"]["parameters"]
    assert list(parameters["properties"]) == parameters["required"] == ["code"]
    assert parameters["properties"]["code"]["type"] == "string"


def test_the_code_of_a_good_call_is_untouched():
    assert code_of(call(code="  x = 1\nprint(x)\n")) == "  x = 1\nprint(x)\n"


@pytest.mark.parametrize(
    "fenced",
    [
        "```python\nprint(1)\n```",
        "```\nprint(1)\n```\n",
        "\n```py\nprint(1)```",
        "```Python\nprint(1)\n ```",
    ],
)
def test_a_fence_around_the_code_is_taken_off(fenced):
    assert code_of(call(code=fenced)) == "print(1)"


def test_a_fence_inside_the_code_stays():
    code = "s = '''\n```python\nx\n```\n'''"
    assert code_of(call(code=code)) == code


@pytest.mark.parametrize(
    ("bad", "fault"),
    [
        (ToolCall("python", {"code": "1"}), "no tool 'python'.*'code_interpreter'"),
        (ToolCall("code_interpreter", {}), "'code' is missing"),
        (ToolCall("code_interpreter", {"code": 5}), "must be a string, not int"),
        (ToolCall("code_interpreter", {"code": None}), "must be a string, not NoneType"),
        (ToolCall("code_interpreter", {"code": "1", "timeout": 9}), "unknown arguments .timeout."),
        (ToolCall("code_interpreter", ["1"]), "must be an object.*not list"),
        (ToolCall("code_interpreter", "1"), "must be an object.*not str"),
        (ToolCall("code_interpreter", None), "must be an object.*not NoneType"),
        (ToolCall(5, {"code": "1"}), "no tool '5'"),
    ],
)
def test_a_call_that_is_not_this_tools_names_its_fault(bad, fault):
    import re

    result = code_of(bad)
    assert isinstance(result, ToolResult)
    assert result.status == "malformed"
    assert re.search(fault, result.output)
