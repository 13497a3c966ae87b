"""Makes the tokenizer of the tiny models, `demyrl/assets/tiny`, from the built-in problems.

It is Qwen's in form, a byte-level BPE with the same control tokens, made so that a two-layer model
learns sooner. Digits go in pairs from the left: an operand below 100 is one token wherever it
stands. A JSON key is one piece with the punctuation around it, and so is a newline escaped in a
JSON string. Each piece the built-in problems use is a token by itself, and little else is, which
keeps both conversations and the vocabulary short; other text is spelled out in bytes and a few
merges. The chat template next to the tokenizer is written by hand.

The same problems and teacher give the same bytes. After changing their words run this again, and
train again, as token ids move:

    python -m experiments.make_tiny_tokenizer
"""

import json
import pathlib
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator

import tokenizers
from tokenizers import AddedToken, Regex, decoders, pre_tokenizers, trainers
from tokenizers.models import BPE

from demyrl.data.demonstrations import Episode, Habits, demonstrate, stitch, truth
from demyrl.data.families import FAMILIES, ProblemConfig
from demyrl.data.generators import Task, tasks
from demyrl.text.chat import message_dicts
from demyrl.text.tokenizer import Tokenizer
from demyrl.text.toolcalls import parse_reply
from demyrl.tools.interpreter import SCHEMA
from demyrl.types import Message, ToolResult

ASSETS = pathlib.Path(__file__).parents[1] / "demyrl" / "assets" / "tiny"

CONVERSATIONS = 1500
MIN_COUNT = 10  # a piece seen less often in all of them is spelled out
MERGES = 32
HABITS = Habits(head_guess=0.2, slip=0.4, recover=0.5, double_check=0.2)

SPACE = "\u0120"  # what stands for a space in the vocabulary
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")

CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": None,
    "eos_token": "<|im_end|>",
    "pad_token": "<|endoftext|>",
    "unk_token": None,
    "clean_up_tokenization_spaces": False,
    "model_max_length": 131072,
}

PIECES = (  # in order of preference
    r"\\n",  # the escaped newline, lest it begin the word behind it
    r"""[^\s\p{L}\p{N}]{0,6}(?:, )?"\p{L}+": (?:\["|")?""",  # ", "key": "
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)",
    r"[^\r\n\p{L}\p{N}]?\p{L}+",
    r"\p{N}{1,2}",  # Qwen has single digits
    r" ?[^\s\p{L}\p{N}]+[\r\n]*",
    r"\s*[\r\n]+",
    r"\s+(?!\S)",
    r"\s+",
)

ERRORS = (
    *(f"NameError: name '{name}' is not defined" for name in ("math", "power", "solve", "current")),
    "SyntaxError: '(' was never closed",
    "SyntaxError: invalid decimal literal",
    "SyntaxError: invalid syntax",
    "IndentationError: expected an indented block",
    "TypeError: 'int' object is not callable",
    "TypeError: 'int' object is not iterable",
    "ZeroDivisionError: division by zero",
    "ValueError: invalid literal for int() with base 10: 'x'",
    "ModuleNotFoundError: No module named 'sympy'",
)
BROKEN_CALLS = (
    '{"name": "x", "arguments": {"code": 1 2}}</tool_call>',
    '{"name": "x", "arguments": {"code" 1}}</tool_call>',
    '{"name": "x", "arguments": {code}}</tool_call>',
    '{"name": "x", "arguments": {"code": "1}}</tool_call>',
    '{"name": "x", "arguments": {"code": "\\(1"}}</tool_call>',
    '{"name": "x", "arguments": }</tool_call>',
    '{"name": "x", "arguments": 1}</tool_call>',
    '{"name": "x"}</tool_call>',
    '{"name": "x", "arguments": {}}}</tool_call>',
    '{"name": "x", "arguments": {}}',
)
NOTICES = (
    "The tool is switched off.",
    "timed out after 5 s",
    "Malformed tool call: the argument 'code' is missing.",
    "Malformed tool call: there is no tool 'x'; the only one is 'code_interpreter'.",
)


def corpus(render: Callable[..., str]) -> Iterator[str]:
    """What the tiny models read and write, cut at control tokens."""
    controls = re.compile("|".join(map(re.escape, SPECIAL + TAGS)))
    rng = random.Random(0)
    faults = [parse_reply(f"<tool_call>{broken}").calls[0].reason for broken in BROKEN_CALLS]
    yield from MIN_COUNT * [*NOTICES, *(f"This is not a valid tool call: {f}" for f in faults)]
    for terms in (3, 4, 5):
        config = ProblemConfig(families=tuple(FAMILIES), digits=2, terms=terms)
        for task in tasks(config, "train", CONVERSATIONS // 3, seed=terms):
            teacher = rng.choice((demonstrate, demonstrate, stitch))
            messages = played(teacher(task, rng, HABITS), task, rng)
            yield from controls.split(render(message_dicts(messages), [SCHEMA], False))


def played(episode: Episode, task: Task, rng: random.Random) -> list[Message]:
    """An episode whose tool is made up: the right program prints the answer, others mostly fail."""
    result = None
    while True:
        try:
            call = episode.send(result)
        except StopIteration as finished:
            return finished.value
        if call.arguments["code"] == task.program:
            result = ToolResult("ok", truth(task))
        elif rng.random() < 0.5:
            result = ToolResult("error", failure(call.arguments["code"], rng))
        else:
            result = ToolResult("ok", rng.choice(("", str(rng.randrange(10**6)))))


def failure(program: str, rng: random.Random) -> str:
    """What Python writes about a program that fails."""
    error = rng.choice(ERRORS)
    if error.startswith(("SyntaxError", "IndentationError")):
        line = rng.choice(program.splitlines())
        return (
            f'  File "<code>", line 1\n    {line}\n    {" " * rng.randrange(len(line))}^\n{error}'
        )
    return f'Traceback (most recent call last):\n  File "<code>", line 1, in <module>\n{error}'


def untrained() -> tokenizers.Tokenizer:
    """Cuts text into pieces and has no vocabulary."""
    return with_vocab({}, [])


def with_vocab(vocab: dict[str, int], merges: list[tuple[str, str]]) -> tokenizers.Tokenizer:
    """A piece that is a token is not merged from its bytes, so it needs no merges of its own."""
    fast = tokenizers.Tokenizer(BPE(vocab=vocab, merges=merges, ignore_merges=True))
    fast.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex("|".join(PIECES)), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    fast.decoder = decoders.ByteLevel()
    return fast


def with_controls(fast: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """The same tokenizer with the control tokens, which get the last ids, as Qwen's do."""
    fast.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIAL])
    fast.add_tokens([AddedToken(token, normalized=False) for token in TAGS])
    return fast


def pieces_of(fast: tokenizers.Tokenizer, texts: Iterator[str]) -> list[str]:
    """The pieces that deserve a token of their own."""
    counts = Counter(
        piece for text in texts for piece, _ in fast.pre_tokenizer.pre_tokenize_str(text)
    )
    return sorted(piece for piece, count in counts.items() if count >= MIN_COUNT)


def merges_of(pieces: list[str]) -> list[tuple[str, str]]:
    """The merges that shorten what is no token: those of each frequent word once, and indents."""
    fast = tokenizers.Tokenizer(BPE())
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=len(alphabet) + MERGES, show_progress=False, initial_alphabet=alphabet
    )
    words = sorted({piece.lstrip(SPACE) for piece in pieces})
    fast.train_from_iterator([word for word in words if word.isalpha()], trainer)
    indents = [(SPACE * width, SPACE * width) for width in (1, 2, 4, 8)]
    return indents + [tuple(pair) for pair in json.loads(fast.to_str())["model"]["merges"]]


def train(template: str) -> tokenizers.Tokenizer:
    """The tokenizer that fits the corpus, rendered with this chat template."""
    render = Tokenizer(with_controls(untrained()), CONFIG, template).render
    pieces = pieces_of(untrained(), corpus(render))
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = [f"{pair:02d}" for pair in range(100)]
    merges = merges_of(pieces)
    tokens = dict.fromkeys([*letters, *pairs, *map("".join, merges), *pieces])
    vocab = {token: index for index, token in enumerate(tokens)}
    return with_controls(with_vocab(vocab, merges))


def main() -> None:
    fast = train((ASSETS / "chat_template.jinja").read_text(encoding="utf-8"))
    fast.save(str(ASSETS / "tokenizer.json"))
    config = json.dumps(CONFIG, indent=2) + "\n"
    (ASSETS / "tokenizer_config.json").write_text(config, encoding="utf-8")
    print(f"{fast.get_vocab_size()} tokens in {ASSETS}")


if __name__ == "__main__":
    main()
