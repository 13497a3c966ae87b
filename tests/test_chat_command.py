"""The chat command: its options, what it shows, and that one answer is what transformers gives."""

import dataclasses
import io
import json
import os
import shutil
import signal

import pytest
from rich.console import Console

from demyrl.chat import Screen, context_of, interruptible, main, make_chat, parse_arguments
from demyrl.text.tokenizer import load_tokenizer
from demyrl.tools.sandbox import SandboxUnavailable
from demyrl.tools.toolbox import ToolBox
from demyrl.types import ToolResult
from demyrl.weights import builtin_folder
from tests.tiny import MODEL, FakeTools

TINY = ["--source", "builtin:tiny"]
SHORT = [*TINY, "--context", "256", "--max_new_tokens", "12", "--temperature", "0"]
ONCE = [*SHORT, "--no_tools"]
TORCH_IS_MISSING = "torch is not a dependency; nothing to compare with"
TOOLLESS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture
def toolless(tmp_path):
    """A checkpoint folder whose chat template knows no tools."""
    shutil.copytree(builtin_folder("builtin:tiny"), tmp_path, dirs_exist_ok=True)
    (tmp_path / "chat_template.jinja").write_text(TOOLLESS)
    return str(tmp_path)


def screen_on(terminal):
    """A screen, and what it has written."""
    file = io.StringIO()
    colors = "standard" if terminal else None
    console = Console(file=file, force_terminal=terminal, color_system=colors, highlight=False)
    return Screen(console, console), file


# The options


@pytest.mark.parametrize(
    "words, fault",
    [
        ([], "--source"),
        (["--surce", "x"], "--source"),
        ([*TINY, "--json"], "--json is for one answer: give --prompt"),
        ([*TINY, "--temperature", "-1"], "--temperature is -1.0: use 0"),
        ([*TINY, "--temperature", "nan"], "--temperature is nan"),
        ([*TINY, "--max_new_tokens", "0"], "--max_new_tokens is 0: use at least 1"),
        ([*TINY, "--max_new_tokens", "many"], "invalid int value: 'many'"),
        ([*TINY, "--context", "1"], "--context is 1: use at least 2"),
        ([*TINY, "--seed", "-3"], "--seed is -3"),
        ([*TINY, "--isolation", "none"], "invalid choice: 'none'"),
        ([*TINY, "--prom", "x"], "unrecognized arguments: --prom x"),
    ],
)
def test_a_wrong_option_is_refused_by_its_name(words, fault):
    with pytest.raises(ValueError, match=fault):
        parse_arguments(words)


def test_one_answer_is_greedy_and_a_conversation_is_not():
    asked = [parse_arguments([*TINY, *more]).temperature for more in ([], ["--prompt", "Hi"])]
    assert asked[0] > 0 and asked[1] == 0


@pytest.mark.parametrize(
    "source, fault",
    [
        ("Qwen/Qwen3-4B", "Weights must be on disk"),
        ("no_such_folder", "no such folder"),
    ],
)
def test_a_source_without_weights_is_refused_with_the_way_to_get_them(source, fault):
    with pytest.raises(ValueError, match=fault):
        main(["--source", source, "--no_tools", "--prompt", "Hi"])


def test_a_folder_without_a_tokenizer_is_refused(toolless):
    os.remove(f"{toolless}/tokenizer.json")
    with pytest.raises(FileNotFoundError, match="no tokenizer.json"):
        main(["--source", toolless, "--no_tools", "--prompt", "Hi"])


def test_the_context_is_that_of_the_weights_up_to_4096():
    long, short = (dataclasses.replace(MODEL, max_positions=n) for n in (40_000, 512))
    found = [context_of(None, model) for model in (long, short, MODEL)]
    assert found == [4096, 512, 4096] and context_of(9000, long) == 9000
    with pytest.raises(ValueError, match="--context is 513, but .* up to 512 tokens"):
        context_of(513, short)


def test_a_prompt_that_does_not_fit_is_refused_with_both_lengths():
    with pytest.raises(ValueError, match="the prompt has .* and the context holds 256"):
        main([*ONCE, "--prompt", "word " * 200])


def test_a_template_without_tools_makes_way_for_the_hermes_template(toolless, capsys):
    model = dataclasses.replace(MODEL, vocab=768)
    with_tools = make_chat(toolless, "", model, FakeTools.schemas)
    assert "builtin:hermes takes its place" in capsys.readouterr().err
    assert "code_interpreter" in with_tools.tokenizer.decode(with_tools.prompt("Hi"))


def test_without_tools_the_own_template_stays(toolless, capsys):
    own = make_chat(toolless, "", MODEL, [])
    assert own.tokenizer.decode(own.prompt("Hi")) == (
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert capsys.readouterr().err == ""


def test_a_template_that_was_asked_for_must_show_tools(toolless):
    file = f"{toolless}/chat_template.jinja"
    with pytest.raises(ValueError, match="does not show tools to the model: use --no_tools"):
        make_chat(toolless, file, MODEL, FakeTools.schemas)


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused():
    with pytest.raises(ValueError, match="has 728 tokens and the model embeds 700"):
        make_chat("builtin:tiny", "", dataclasses.replace(MODEL, vocab=700), [])


def test_a_wall_that_cannot_be_built_ends_with_the_options_that_help(monkeypatch):
    def unavailable(box):
        raise SandboxUnavailable("There is no bwrap.")

    monkeypatch.setattr(ToolBox, "__enter__", unavailable)
    with pytest.raises(RuntimeError, match="no bwrap.*--isolation unsafe; --no_tools"):
        main([*TINY, "--prompt", "Hi"])


# What is shown


def test_a_terminal_shows_thought_dim_and_a_call_and_its_result_in_color():
    screen, file = screen_on(terminal=True)
    call = '<tool_call>{"name": "run", "arguments": {"code": "1"}}</tool_call>'
    screen.reply(f"<think>Hm</think>So{call}", over=True)
    screen.results([ToolResult("ok", "one"), ToolResult("timeout", "late")])
    written = file.getvalue()
    assert "\x1b[2m<think>Hm</think>\x1b[0mSo" in written
    assert "\n\x1b[36m[call run]" in written
    assert "\x1b[32m[result ok" in written and "\x1b[33m[result timeout" in written


def test_growing_text_is_written_once():
    screen, file = screen_on(terminal=False)
    for text in ("", "One", "One two", "One two <th", "One two <three"):
        screen.reply(text, over=False)
    screen.reply("One two <three>", over=True)
    screen.reply("Next", over=True)
    assert file.getvalue() == "One two <three>\nNext\n"


def test_what_a_model_or_a_program_writes_cannot_steer_the_terminal():
    screen, file = screen_on(terminal=False)
    screen.reply("\x1b[2J\rA\x9b1mB\x00", over=True)
    screen.results([ToolResult("ok", "\x1b]0;title\x07")])
    assert not {char for char in file.getvalue() if ord(char) < 32 or 127 <= ord(char) < 160} - {
        "\n"
    }


def test_the_first_interrupt_stops_an_answer_and_the_second_the_command():
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), interruptible() as stopped:
        assert not stopped()
        os.kill(os.getpid(), signal.SIGINT)
        assert stopped()
        os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_lines_that_are_piped_in_are_answered_without_control_codes(monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO("One\nTwo\n/new\nOne\n/quit\nThree\n"))
    main(ONCE)
    out, err = capsys.readouterr()
    told = [line for line in err.splitlines() if "tokens/s" in line or "new" in line]
    assert [("tokens/s" in line) for line in told] == [True, True, False, True]
    assert out.strip() and "\x1b" not in out + err and "> " not in out


def test_a_message_that_does_not_fit_does_not_end_a_conversation(monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO("word " * 200 + "\nHi\n"))
    main(ONCE)
    err = capsys.readouterr().err
    assert "the context holds 256" in err and err.rstrip().count("tokens/s") == 1


# One answer for scripts


def test_json_is_all_that_the_standard_output_gets(capsys):
    main([*ONCE, "--prompt", "2+2", "--json"])
    row = json.loads(capsys.readouterr().out)
    assert set(row) == {"prompt_ids", "ids", "text", "stop", "turns", "tokens_per_s"}
    assert row["ids"] == row["turns"][0]["ids"] and len(row["ids"]) <= 12


def test_an_answer_for_people_is_all_that_the_standard_output_gets(capsys):
    main([*ONCE, "--prompt", "2+2", "--json"])
    text = json.loads(capsys.readouterr().out)["text"]
    main([*ONCE, "--prompt", "2+2"])
    assert capsys.readouterr().out == text + "\n"


def test_tools_are_on_unless_switched_off(monkeypatch, capsys):
    monkeypatch.setattr(ToolBox, "_start", lambda box: None)  # no program will run
    main([*SHORT, "--prompt", "2+2", "--json"])
    ids = json.loads(capsys.readouterr().out)["prompt_ids"]
    assert "code_interpreter" in load_tokenizer("builtin:tiny").decode(ids)


QUESTIONS = ("What is 2+2?", "\u00c9cris \U0001f31f!")


@dataclasses.dataclass(frozen=True)
class Greedy:
    """What transformers says to a question: all ids, and how many of them are the prompt's."""

    ids: list[int]
    prompt: int


@pytest.fixture(scope="module")
def random_checkpoint(tmp_path_factory):
    """A small Llama with the built-in tokenizer, and transformers' answers to QUESTIONS.

    The seventh token of the first answer is made an end token, so that one answer ends by itself.
    """
    torch = pytest.importorskip("torch", reason=TORCH_IS_MISSING)
    transformers = pytest.importorskip("transformers", reason=TORCH_IS_MISSING)
    config = transformers.LlamaConfig(
        vocab_size=768, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
        initializer_range=0.4, tie_word_embeddings=False,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("llama")
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(builtin_folder("builtin:tiny") / name, folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)

    def answer(question, ends):
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}],
            add_generation_prompt=True, return_tensors="pt", return_dict=True,
        )  # fmt: skip
        ids = model.generate(**prompt, max_new_tokens=24, do_sample=False, eos_token_id=ends)
        return Greedy(ids[0].tolist(), prompt["input_ids"].shape[1])

    first = answer(QUESTIONS[0], [tokenizer.eos_token_id])
    end = first.ids[first.prompt + 6]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": end}))
    ends = [end, tokenizer.eos_token_id, tokenizer.pad_token_id]
    return folder, {question: answer(question, ends) for question in QUESTIONS}


def answered(folder, text, capsys):
    main(["--source", str(folder), "--no_tools", "--prompt", text, "--json", "--temperature", "0",
          "--max_new_tokens", "24"])  # fmt: skip
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("question", QUESTIONS)
def test_greedy_ids_are_those_of_transformers(random_checkpoint, question, capsys):
    folder, answers = random_checkpoint
    row = answered(folder, question, capsys)
    assert row["prompt_ids"] + row["ids"] == answers[question].ids
    assert len(row["prompt_ids"]) == answers[question].prompt


def test_an_end_token_is_the_last_of_the_ids_as_in_transformers(random_checkpoint, capsys):
    folder, answers = random_checkpoint
    row = answered(folder, QUESTIONS[0], capsys)
    end = json.loads((folder / "generation_config.json").read_text())["eos_token_id"]
    assert row["stop"] == "answered" and len(row["ids"]) <= 7
    assert row["ids"][-1] == answers[QUESTIONS[0]].ids[-1] == end
