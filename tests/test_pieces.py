"""Templates with and without support for tools, as the pieces of conversations show it."""

import pytest

from demyrl.text.chat import Chat, message_dicts
from demyrl.text.pieces import supports_tools
from demyrl.text.tokenizer import load_tokenizer
from demyrl.tools.interpreter import SCHEMA
from demyrl.types import Message, ToolCall
from experiments.make_tiny_tokenizer import ASSETS

HERMES = load_tokenizer("builtin:tiny", "builtin:hermes")
TALK = (
    Message("user", "What is 12*34?"),
    Message("assistant", "408"),
    Message("user", "Sure?"),
    Message("assistant", "Yes."),
)
PLAIN = """
{%- for message in messages %}
    {%- if loop.first and message.role != 'system' %}
        {{- '<|im_start|>system\nBe kind.<|im_end|>\n' }}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}
"""
STRICT = PLAIN.replace(
    "{{- '<|im_start|>' + message.role",
    "{%- if message.role == 'tool' %}{{- raise_exception('no tools here') }}{%- endif %}"
    "{{- '<|im_start|>' + message.role",
)
SHOWING = PLAIN.replace("Be kind.", "' + tools | string + '")
REFUSING = STRICT.replace("Be kind.", "' + tools | string + '")
OTHER_CALLS = HERMES.template.replace("<tool_call>", "<function>")
SILENT = HERMES.template.replace("tool | tojson", "'a tool'")


@pytest.fixture
def templated(tmp_path):
    """Makes the tiny tokenizer with another template."""

    def make(template: str):
        (tmp_path / "other.jinja").write_text(template, encoding="utf-8")
        return load_tokenizer("builtin:tiny", str(tmp_path / "other.jinja"))

    return make


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (PLAIN, "does not show tools"),
        (SILENT, "does not show tools"),
        (SHOWING, "lost 'markC'"),
        (REFUSING, "no tools here"),
        (OTHER_CALLS, "are not Hermes <tool_call> blocks"),
    ],
)
def test_a_template_without_tool_support_is_refused_with_tools(templated, template, said):
    tokenizer = templated(template)
    with pytest.raises(ValueError, match=f"other.jinja has no tool support.*{said}") as raised:
        Chat(tokenizer, [SCHEMA], keep=True)
    assert "--config.chat.template=builtin:hermes" in str(raised.value)
    assert not supports_tools(tokenizer)


def test_hermes_supports_tools():
    assert supports_tools(HERMES)


@pytest.mark.parametrize("template", [PLAIN, STRICT, OTHER_CALLS])
def test_without_tools_a_template_needs_no_support_for_them(templated, template):
    tokenizer = templated(template)
    tokens, _ = Chat(tokenizer, []).conversation(TALK)
    whole = tokenizer.encode_markup(tokenizer.render(message_dicts(TALK), None, False))
    assert tokenizer.decode(whole[len(tokens) :]) == "\n"
    assert whole[: len(tokens)] == tokens


def test_a_prompt_holds_the_system_message_that_the_template_adds(templated):
    prompt = Chat(templated(PLAIN), []).prompt("Why?")
    assert HERMES.decode(prompt) == (
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nWhy?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("template", [PLAIN, STRICT])
def test_calls_and_results_are_refused_where_the_template_has_none(templated, template):
    chat = Chat(templated(template), [])
    call = Message("assistant", "", (ToolCall("f", {}),))
    for write in (lambda: chat.assistant(call), lambda: chat.tool_results(["408"], 9)):
        with pytest.raises(ValueError, match="no tool support.*builtin:hermes"):
            write()


def test_hermes_is_no_remedy_where_its_tokens_are_missing(tmp_path):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        text = (ASSETS / name).read_text(encoding="utf-8")
        (tmp_path / name).write_text(text.replace("<|im_start|>", "<|turn|>"), encoding="utf-8")
    (tmp_path / "chat_template.jinja").write_text(PLAIN.replace("<|im_start|>", "<|turn|>"))
    with pytest.raises(ValueError, match="no tool support") as raised:
        Chat(load_tokenizer(str(tmp_path)), [SCHEMA])
    assert "builtin:hermes" not in str(raised.value)
