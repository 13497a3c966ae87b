"""A conversation with a model in the terminal, with the tool of the rollouts.

    python -m demyrl.chat --source DIR
    python -m demyrl.chat --source DIR --prompt "What is 2**100?" --json

DIR is a checkpoint folder in Hugging Face format, the workdir of a run, or builtin:tiny. An empty
line, Ctrl-D or /quit ends, /new begins a new conversation, Ctrl-C stops an answer. With --prompt
one answer is given, greedy unless --temperature says otherwise. It is sampled, parsed and continued
by what rollouts use, so the model sees the tokens that it sees in training.
"""

import argparse
import contextlib
import json
import math
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import jax
import numpy as np
from rich.console import Console

from demyrl import command
from demyrl.model.config import AUTO, DTYPES, ModelConfig
from demyrl.model.mesh import MeshConfig, make_mesh
from demyrl.rollout.conversation import Conversation, TooLong
from demyrl.rollout.sampler import Feed, Sampler, SamplerConfig
from demyrl.text.chat import Chat
from demyrl.text.passages import passages
from demyrl.text.pieces import supports_tools
from demyrl.text.tokenizer import HERMES, load_tokenizer
from demyrl.tools.sandbox import SandboxUnavailable
from demyrl.tools.toolbox import ToolBox, ToolConfig
from demyrl.types import ToolResult
from demyrl.weights import compute_dtype, shape_of, starting_params, tokenizer_of

CONTEXT = 4096  # tokens of a conversation, where neither user nor weights ask for fewer
TEMPERATURE = 0.7  # of a conversation; a single answer is greedy
DECODE_STEPS = 8  # tokens that appear at once
EXTEND_LENGTHS = (16, 64, 256)  # a short message does not pay for a long one
STYLES = {"words": None, "thought": "dim", "call": "cyan", "result": "green", "fault": "yellow"}
CONTROL = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {
    code: 0xFFFD for code in range(0x7F, 0xA0)
}


class Screen:
    """Shows answers while they grow; `notes` takes what is not a part of them."""

    def __init__(self, console: Console, notes: Console):
        self._console, self._notes = console, notes
        self._shown = 0  # characters of the current reply
        self._at_line_start = True

    def reply(self, text: str, over: bool) -> None:
        """Adds what the current turn has gained; `over` ends it."""
        skip = self._shown
        for kind, part in passages(text, over):
            fresh = part[skip:]
            skip = max(0, skip - len(part))
            self._write(fresh, STYLES[kind])
            self._shown += len(fresh)
        if over:
            self._shown = 0
            self.end_line()

    def results(self, results: Sequence[ToolResult]) -> None:
        """What the tool gave back."""
        for each in results:
            self.end_line()
            style = STYLES["result" if each.status == "ok" else "fault"]
            self._write(f"[result {each.status}, {each.seconds:.2f} s]\n{each.output}", style)
            self.end_line()

    def note(self, text: str) -> None:
        """A dim line."""
        self._shown = 0
        self.end_line()
        self._notes.print(text, style="dim", markup=False, soft_wrap=True)

    def end_line(self) -> None:
        if not self._at_line_start:
            self._write("\n", None)

    def _write(self, text: str, style: str | None) -> None:
        """Writes text in which nothing can steer the terminal."""
        if text:
            safe = text.translate(CONTROL)
            self._console.out(safe, style=style, highlight=False, end="")
            self._at_line_start = text.endswith("\n")


# Setting up


class Parser(argparse.ArgumentParser):
    """Refuses a wrong command line with one line."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}. --help lists what can be given.")


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """The checked options; ValueError names what is wrong."""
    form = argparse.RawDescriptionHelpFormatter
    parser = Parser("demyrl.chat", description=__doc__, formatter_class=form, allow_abbrev=False)
    add = parser.add_argument
    add("--source", required=True, help="checkpoint folder, workdir of a run, or builtin:tiny")
    add("--prompt", help="answer this and exit")
    about = "with --prompt: an object with the ids of all turns, the text of the last, and turns"
    add("--json", action="store_true", help=about)
    add("--no_tools", action="store_true", help="no tool in the prompt; calls are only text")
    add("--isolation", choices=("bwrap", "unsafe"), default="bwrap", help="of the tool's programs")
    add("--template", default="", help=f"the checkpoint's own by default; {HERMES} or a file")
    add("--temperature", type=float, help=f"default {TEMPERATURE}, and 0 (greedy) with --prompt")
    add("--seed", type=int, default=0, help="of the draws: same seed, same conversation")
    add("--max_new_tokens", type=int, default=512, help="of an answer, all its turns together")
    add("--context", type=int, help=f"tokens of a conversation; default {CONTEXT} or the model's")
    add("--dtype", choices=DTYPES, default=AUTO, help="auto: float32 on CPU")
    args = parser.parse_args(argv)
    if args.temperature is None:
        args.temperature = TEMPERATURE if args.prompt is None else 0.0
    _check(args)
    return args


def _check(args: argparse.Namespace) -> None:
    wrong = {
        "--json is for one answer: give --prompt as well.": args.json and args.prompt is None,
        f"--temperature is {args.temperature}: use 0 (greedy) or more.": (
            not 0 <= args.temperature < math.inf
        ),
        f"--max_new_tokens is {args.max_new_tokens}: use at least 1.": args.max_new_tokens < 1,
        f"--context is {args.context}: use at least 2, a prompt and an answer.": (
            args.context is not None and args.context < 2
        ),
        f"--seed is {args.seed}: use a number from 0 to {2**32 - 1}.": not 0 <= args.seed < 2**32,
    }
    for message, is_wrong in wrong.items():
        if is_wrong:
            raise ValueError(message)


def context_of(asked: int | None, model: ModelConfig) -> int:
    """Tokens of a conversation; ValueError when the model was not made for as many as asked."""
    most = model.max_positions or asked or CONTEXT
    if asked is not None and asked > most:
        raise ValueError(
            f"--context is {asked}, but the weights were made for up to {most} tokens "
            f"(max_position_embeddings). Use at most {most}."
        )
    return asked or min(most, CONTEXT)


def make_chat(source: str, template: str, model: ModelConfig, schemas: list) -> Chat:
    """The chat format of a source; one that cannot show tools makes way for the Hermes template.

    Raises ValueError when a template that was asked for cannot show tools, or the tokenizer has
    more tokens than the model.
    """
    folder = tokenizer_of(source)
    tokenizer = load_tokenizer(folder, template)
    if schemas and not supports_tools(tokenizer):
        if template:
            raise ValueError(
                f"--template {template} does not show tools to the model: use --no_tools, or "
                f"--template {HERMES}."
            )
        if not tokenizer.has_chatml:
            raise ValueError(
                f"the chat template of {source} knows no tools, and its tokenizer lacks the tokens "
                f"of {HERMES}. Use --no_tools, or --template FILE."
            )
        print(
            f"the chat template of {source} knows no tools, so {HERMES} takes its place "
            "(--no_tools keeps it).",
            file=sys.stderr,
        )
        tokenizer = load_tokenizer(folder, HERMES)
    if tokenizer.vocab_size > model.vocab:
        raise ValueError(
            f"the tokenizer of {source} has {tokenizer.vocab_size} tokens and the model embeds "
            f"{model.vocab}: they do not belong together."
        )
    return Chat(tokenizer, schemas, keep=True)  # earlier turns stay as the model has seen them


def load(args: argparse.Namespace, tools: ToolBox | None, notes: Console) -> Conversation:
    """A conversation that has not begun, its weights loaded and its programs compiled."""
    started = time.perf_counter()
    model = shape_of(args.source, compute_dtype(args.dtype))
    context = context_of(args.context, model)
    chat = make_chat(args.source, args.template, model, tools.schemas if tools else [])
    if args.prompt is not None and len(chat.prompt(args.prompt)) >= context:
        raise ValueError(
            f"the prompt has {len(chat.prompt(args.prompt))} tokens and the context holds "
            f"{context}: no room for an answer. Shorten it, or raise --context."
        )
    shapes = SamplerConfig(1, context, DECODE_STEPS, 1, EXTEND_LENGTHS, args.temperature)
    sampler = Sampler(model, shapes, chat.end_tokens)
    mesh = make_mesh(MeshConfig(1, 1, 1))
    with notes.status(f"loading {args.source}"), contextlib.redirect_stdout(sys.stderr):
        sampler.load(starting_params(args.source, model, mesh, args.seed))
        jax.block_until_ready(sampler.weights)
    loaded = time.perf_counter()
    with notes.status("compiling"):
        warm_up(sampler, args.prompt is None)
    size = sum(leaf.size for leaf in jax.tree.leaves(sampler.weights)) / 1e6
    notes.print(
        f"{args.source}: {size:.3g}M parameters in {model.dtype}, loaded in "
        f"{loaded - started:.1f} s, compiled in {time.perf_counter() - loaded:.1f} s",
        style="dim", markup=False, soft_wrap=True,
    )  # fmt: skip
    return Conversation(sampler, chat, tools, args.max_new_tokens, args.seed)


def warm_up(sampler: Sampler, all_lengths: bool) -> None:
    """Compiles decoding, and what feeds messages of every length, which a single one needs not."""
    for length in sampler.config.extend_lengths if all_lengths else ():
        sampler.extend([Feed(0, 0, [0] * min(length, sampler.config.context))])
    nothing = np.zeros(1, np.int32)
    sampler.decode(nothing, nothing, nothing, np.zeros((1, 2), np.uint32), 1)


@contextlib.contextmanager
def open_tools(isolation: str) -> Iterator[ToolBox]:
    """The tool, ready; RuntimeError when it cannot be kept apart from this machine."""
    box = ToolBox(ToolConfig(True, isolation, 1, 10.0, 512, 8, 4096, 0.0))
    try:
        box.__enter__()
    except SandboxUnavailable as error:
        raise RuntimeError(
            f"{error} Here that is --isolation unsafe; --no_tools goes without the tool."
        ) from error
    with contextlib.closing(box):
        yield box


# The two ways to talk


@contextlib.contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Whether Ctrl-C was pressed in the block; pressed again, it interrupts as usual.

    An interrupt inside of JAX would lose the cache, which its programs take over while they run.
    """
    pressed = threading.Event()

    def note(number: int, frame: Any) -> None:
        if pressed.is_set():
            raise KeyboardInterrupt
        pressed.set()

    before = signal.signal(signal.SIGINT, note)
    try:
        yield pressed.is_set
    finally:
        signal.signal(signal.SIGINT, before)


def typed(prompt: str) -> Iterator[str]:
    """The lines of the standard input, until one is empty or /quit."""
    while True:
        try:
            line = input(prompt)
        except (EOFError, KeyboardInterrupt):
            print(end="\n" if prompt else "")  # what follows does not stand behind the prompt
            return
        if line.strip() in ("", "/quit"):
            return
        yield line


def talk(conversation: Conversation, lines: Iterator[str], screen: Screen) -> None:
    """Answers one line after another."""
    for line in lines:
        if line.strip() == "/new":
            conversation.restart()
            screen.note("a new conversation")
            continue
        try:
            with interruptible() as stopped:
                answer = conversation.answer(line, screen, stopped)
        except TooLong as error:
            screen.note(str(error))
        else:
            screen.note(answer.summary())


def main(argv: Sequence[str] | None = None) -> None:
    """Talks as the command line says."""
    args = parse_arguments(sys.argv[1:] if argv is None else argv)
    sys.stdout.reconfigure(errors="replace")
    terminal = sys.stdin.isatty()
    plain = None if terminal else False  # without control codes
    notes = Console(stderr=True, highlight=False, force_terminal=plain)
    console = Console(stderr=args.json, highlight=False, force_terminal=plain)
    screen = Screen(console, notes)
    with contextlib.ExitStack() as stack:
        tools = None if args.no_tools else stack.enter_context(open_tools(args.isolation))
        command.enable_compilation_cache()
        conversation = load(args, tools, notes)
        if args.prompt is None:
            if terminal:
                import readline  # noqa: F401  lines can be edited and recalled
            return talk(conversation, typed("> " if terminal else ""), screen)
        answer = conversation.answer(args.prompt, screen)
        screen.note(f"ids {answer.ids}, {answer.summary()}")
        if args.json:
            print(json.dumps(answer.row()), flush=True)


if __name__ == "__main__":
    command.end(main)
