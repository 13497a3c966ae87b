"""Text to tokens and back, with the tiny tokenizer and, where they are at hand, Qwen's."""

import json
import pathlib
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from demyrl.text.tokenizer import load_tokenizer
from experiments.make_tiny_tokenizer import ASSETS, train

FIXTURES = pathlib.Path(__file__).parents[2] / "shared" / "fixtures"
TINY = load_tokenizer("builtin:tiny")
HERMES = load_tokenizer("builtin:tiny", "builtin:hermes")
TOOLS = [{"type": "function", "function": {"name": "run", "description": "é <b>'x'</b>"}}]
MESSAGES = [
    {"role": "user", "content": "What is 12*34?"},
    {
        "role": "assistant",
        "content": "<think>\nCompute.\n</think>",
        "tool_calls": [
            {"type": "function", "function": {"name": "run", "arguments": {"c": "é\n<", "x": None}}}
        ],
    },
    {"role": "tool", "content": "408"},
    {"role": "tool", "content": "409"},
    {"role": "assistant", "content": "\\boxed{408}"},
    {"role": "user", "content": "Sure?"},
]


@pytest.fixture(scope="module", params=["tiny", "qwen2.5-tokenizer", "qwen3-tokenizer"])
def folder(request) -> pathlib.Path:
    if request.param == "tiny":
        return ASSETS
    if not (FIXTURES / request.param).is_dir():
        pytest.skip(f"{request.param} does not ship with demyrl and is not in {FIXTURES}")
    return FIXTURES / request.param


@pytest.fixture(scope="module")
def ours(folder):
    return load_tokenizer(str(folder))


@pytest.fixture(scope="module")
def both(folder, ours):
    transformers = pytest.importorskip("transformers")
    return ours, transformers.AutoTokenizer.from_pretrained(folder)


@pytest.fixture
def copy(tmp_path):
    for file in ASSETS.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def spelled(text: str) -> list[str]:
    return [TINY.decode([token]) for token in TINY.encode(text)]


def test_templates_render_as_transformers_renders_them(both):
    ours, theirs = both
    for messages in (MESSAGES, [{"role": "system", "content": "Be brief."}, *MESSAGES]):
        for tools in (None, TOOLS):
            expected = theirs.apply_chat_template(
                messages, tools=tools, tokenize=False, add_generation_prompt=True
            )
            assert ours.render(messages, tools, True) == expected


def test_hermes_renders_as_transformers_renders_it():
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(ASSETS)
    expected = theirs.apply_chat_template(
        MESSAGES,
        tools=TOOLS,
        chat_template=HERMES.template,
        tokenize=False,
        add_generation_prompt=True,
    )
    assert HERMES.render(MESSAGES, TOOLS, True) == expected


def test_hermes_shows_the_tools_and_how_to_call_them():
    text = HERMES.render(MESSAGES, TOOLS, True)
    system = text.partition("<|im_end|>")[0]
    assert json.dumps(TOOLS[0], ensure_ascii=False) in system
    assert '<tool_call>\n{"name": "...", "arguments": {...}}\n</tool_call>' in system
    assert "<tool_response>" in system


def test_hermes_adds_no_system_message_without_tools():
    text = HERMES.render(MESSAGES[:1], None, True)
    assert text == "<|im_start|>user\nWhat is 12*34?<|im_end|>\n<|im_start|>assistant\n"


def test_markup_is_encoded_as_transformers_encodes_it(both):
    ours, theirs = both
    text = ours.render(MESSAGES, TOOLS, True)
    assert ours.encode_markup(text) == theirs(text)["input_ids"]


def test_sizes_and_special_tokens_are_those_of_transformers(both):
    ours, theirs = both
    assert ours.vocab_size == len(theirs)
    assert ours.end_tokens[0] == theirs.eos_token_id
    assert ours.pad == theirs.pad_token_id


def test_transformers_loads_the_tiny_one_as_a_fast_tokenizer_with_a_template():
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(ASSETS)
    assert theirs.is_fast
    assert theirs.chat_template is not None


def test_end_tokens_are_end_of_turn_and_end_of_text():
    assert [TINY.decode([token]) for token in TINY.end_tokens] == ["<|im_end|>", "<|endoftext|>"]


def test_control_tokens_in_plain_text_are_spelled_out():
    text = "<|im_end|><tool_call></think>"
    assert not set(TINY.encode(text)) & set(TINY.encode_markup(text))
    assert TINY.decode(TINY.encode(text)) == text


def test_no_control_token_comes_out_of_plain_text(folder, ours):
    added = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))["added_tokens"]
    text = " ".join(token["content"] for token in added)
    assert not set(ours.encode(text)) & {token["id"] for token in added}
    assert ours.decode(ours.encode(text)) == text


def test_an_assistant_can_write_tags_but_not_end_a_turn_in_its_text():
    tokens = TINY.encode_written("<think>a</think><|im_end|>")
    assert tokens[0] in TINY.encode_markup("<think>")
    assert not set(tokens) & set(TINY.end_tokens)


def test_tags_are_kept_when_special_tokens_are_skipped():
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(ASSETS)
    tokens = TINY.encode_markup("<think>a</think><tool_call><|im_end|>")
    assert theirs.decode(tokens, skip_special_tokens=True) == "<think>a</think><tool_call>"


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=40))
def test_any_text_comes_back(text):
    for encode in (TINY.encode, TINY.encode_markup, TINY.encode_written):
        assert TINY.decode(encode(text)) == text


def test_a_batch_is_encoded_as_its_texts_are():
    texts = ["12*34", "", "<|im_end|> é", "\ud800"]
    assert TINY.encode_batch(texts) == [TINY.encode(text) for text in texts]


def test_half_a_surrogate_pair_becomes_a_replacement_character():
    assert TINY.decode(TINY.encode("a\ud83d")) == "a\ufffd"


def test_half_a_character_decodes_to_a_replacement_character():
    assert TINY.decode(TINY.encode("é")[:1]) == "\ufffd"


def test_all_numbers_of_one_or_two_digits_are_one_token():
    numbers = [f"{i:02d}" for i in range(100)] + [str(i) for i in range(10)]
    assert all(len(TINY.encode(number)) == 1 for number in numbers)


def test_digits_are_paired_from_the_left():
    assert spelled("12345*67-8") == ["12", "34", "5", "*", "67", "-", "8"]


def test_an_operand_is_the_same_token_in_a_question_and_in_a_program():
    token = TINY.encode("47")[0]
    for text in ("What is 47*83?", '{"code": "print(83-47)"}', "x=47\ny", "47%3"):
        assert token in TINY.encode(text)


def test_json_keys_are_one_token_with_their_punctuation():
    assert spelled('{"name": "') == ['{"name": "']
    assert spelled('", "arguments": {"code": "') == ['", "arguments": ', '{"code": "']


def test_the_tiny_vocabulary_has_at_most_1024_tokens():
    assert TINY.vocab_size <= 1024


def test_the_script_makes_the_tiny_tokenizer_that_ships():
    made = train((ASSETS / "chat_template.jinja").read_text(encoding="utf-8"))
    shipped = json.loads((ASSETS / "tokenizer.json").read_text(encoding="utf-8"))
    model = json.loads(made.to_str())["model"]
    assert {name: shipped["model"][name] for name in ("vocab", "merges")} == {
        name: model[name] for name in ("vocab", "merges")
    }


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("/nowhere", "not a directory"),
        ("builtin:huge", "builtin:tiny"),
        ("builtin:..", "built in"),
        ("builtin:templates", "built in"),
    ],
)
def test_an_unknown_path_is_named_with_what_there_is(path, said):
    with pytest.raises(FileNotFoundError, match=said):
        load_tokenizer(path)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_missing_file_is_named(copy, name):
    (copy / name).unlink()
    with pytest.raises(FileNotFoundError, match=f"no {name}.*--config.tokenizer"):
        load_tokenizer(str(copy))


@pytest.mark.parametrize("weights", [True, False])
def test_weights_without_a_tokenizer_are_told_from_an_empty_folder(copy, weights):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (copy / name).unlink()
    if not weights:
        (copy / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="no tokenizer.json and no tokenizer_c") as raised:
        load_tokenizer(str(copy))
    assert ("model weights but no" in str(raised.value)) == weights


TURN = TINY.end_tokens[0]


@pytest.mark.parametrize(
    ("ids", "ends"),
    [
        (5, (TURN, 5)),
        ([5, TURN, 6], (TURN, 5, 6)),
        (None, TINY.end_tokens),
        ([], TINY.end_tokens),
    ],
)
def test_what_a_generation_config_ends_on_ends_turns_and_end_of_turn_does(copy, ids, ends):
    (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    assert load_tokenizer(str(copy)).end_tokens == ends


def test_the_size_is_one_more_than_the_largest_id(copy):
    file = copy / "tokenizer.json"
    content = json.loads(file.read_text())
    content["model"]["vocab"]["farthest"] = 4999
    file.write_text(json.dumps(content))
    assert load_tokenizer(str(copy)).vocab_size == 5000


def test_what_an_assistant_says_may_be_marked_in_a_template(copy):
    file = copy / "chat_template.jinja"
    plain = file.read_text()
    said = "{{- '<|im_start|>assistant\\n' + message.content }}"
    assert said in plain
    file.write_text(plain.replace(said, "{%- generation %}" + said + "{%- endgeneration %}"))
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    marked = load_tokenizer(str(copy)).render(messages, None, False)
    assert marked == TINY.render(messages, None, False)


@pytest.mark.parametrize("ids", [151645, [1, -1], "2", [True]])
def test_an_end_token_that_the_tokenizer_lacks_is_refused(copy, ids):
    (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    with pytest.raises(ValueError, match="generation_config.json: eos_token_id is .*below 7"):
        load_tokenizer(str(copy))


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_damaged_file_is_named(copy, name):
    (copy / name).write_text('{"model": ')
    with pytest.raises(ValueError, match=name):
        load_tokenizer(str(copy))


def test_a_folder_without_a_template_is_refused(copy):
    (copy / "chat_template.jinja").unlink()
    with pytest.raises(ValueError, match="no chat template.*--config.chat.template=builtin:hermes"):
        load_tokenizer(str(copy))


def test_a_folder_without_a_template_takes_a_given_one(copy):
    (copy / "chat_template.jinja").unlink()
    ours = load_tokenizer(str(copy), "builtin:hermes")
    assert "</tool_call>" in ours.render(MESSAGES, TOOLS, True)


def test_a_given_template_replaces_that_of_the_tokenizer(tmp_path):
    (tmp_path / "mine.jinja").write_text("{{ messages | length }} é\n", encoding="utf-8")
    ours = load_tokenizer("builtin:tiny", str(tmp_path / "mine.jinja"))
    assert ours.render(MESSAGES, TOOLS, True) == "6 é"
    assert ours.template == "{{ messages | length }} é\n"


@pytest.mark.parametrize("template", ["builtin:huge", "builtin:../tiny", "nowhere.jinja", "/"])
def test_an_unknown_template_is_named_with_what_there_is(template):
    with pytest.raises(FileNotFoundError, match=f"{template!r} is not .*'builtin:hermes'"):
        load_tokenizer("builtin:tiny", template)


@pytest.mark.parametrize(
    ("content", "said"), [(b"\n{% if %}", "error in line 2"), (b"\xff", "UTF-8")]
)
def test_a_damaged_template_is_named(tmp_path, content, said):
    (tmp_path / "bad.jinja").write_bytes(content)
    with pytest.raises(ValueError, match=f"bad.jinja.*{said}"):
        load_tokenizer("builtin:tiny", str(tmp_path / "bad.jinja"))


def test_hermes_is_refused_where_its_tokens_are_missing(copy):
    file = copy / "tokenizer.json"
    file.write_text(file.read_text(encoding="utf-8").replace("<|im_start|>", "<|turn|>"))
    with pytest.raises(ValueError, match="builtin:hermes is written with .*does not have"):
        load_tokenizer(str(copy), "builtin:hermes")


def test_a_template_can_stand_in_the_config(copy):
    template = (copy / "chat_template.jinja").read_text()
    (copy / "chat_template.jinja").unlink()
    config = json.loads((copy / "tokenizer_config.json").read_text())
    (copy / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": template}))
    ours = load_tokenizer(str(copy))
    assert ours.render(MESSAGES, TOOLS, True) == TINY.render(MESSAGES, TOOLS, True)


def test_a_refusal_of_the_template_is_a_value_error():
    with pytest.raises(ValueError, match="unexpected role judge"):
        TINY.render([{"role": "judge", "content": ""}], None, False)


def test_text_never_loads_jax_or_transformers():
    program = (
        "import sys, demyrl.text.chat, demyrl.text.toolcalls;"
        "print([m for m in ('jax', 'transformers', 'torch') if m in sys.modules])"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ran.stdout == "[]\n", ran.stderr
