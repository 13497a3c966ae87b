"""Text to tokens and back, for any Hugging Face directory with a fast tokenizer.

Reads tokenizer.json, tokenizer_config.json and the chat template itself, because importing
transformers costs seconds and every command would pay them. What belongs between the turns of a
conversation is the subject of `chat.py`.
"""

import datetime
import importlib.resources
import json
import pathlib
import re
from collections.abc import Sequence
from typing import Any

import jinja2
import jinja2.ext
import tokenizers
from jinja2.sandbox import ImmutableSandboxedEnvironment

from demyrl import storage

BUILTIN = "builtin:"
HERMES = BUILTIN + "hermes"
FILES = ("tokenizer.json", "tokenizer_config.json")
CHATML = ("<|im_start|>", "<|im_end|>")
END_OF_TURN = ("<|im_end|>", "<|endoftext|>")
NAMED_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")


def load_tokenizer(path: str, template: str = "") -> "Tokenizer":
    """The tokenizer of a directory, or the one that ships with demyrl: "builtin:tiny".

    Its chat template is its own, or the one given: "builtin:hermes" or the path of a jinja file.
    Tokens that the directory's generation_config.json ends on end turns too. Raises
    FileNotFoundError or ValueError that name what is missing or unreadable.
    """
    folder = _folder(path)
    fast = _fast_tokenizer(folder / "tokenizer.json")
    config = _read_json(folder / "tokenizer_config.json")
    ends = _generation_ends(folder / "generation_config.json", _ids_below(fast))
    file = _template_file(template) if template else folder / "chat_template.jinja"
    text = _read_text(file) if template or file.is_file() else _template_in(config, folder, fast)
    if template == HERMES and not _has_chatml(fast):
        raise ValueError(
            f"the template {HERMES} is written with {' and '.join(CHATML)}, which tokenizer {path} "
            "does not have. Use its own template, or a file with one in its tokens."
        )
    return Tokenizer(fast, config, text, template or str(folder), ends)


class Tokenizer:
    """A byte-level tokenizer with its chat template.

    Text from users and tools goes through `encode`, which never makes a control token, so that it
    cannot end a turn or fake a call. Only templates go through `encode_markup`.
    """

    def __init__(
        self,
        fast: tokenizers.Tokenizer,
        config: dict[str, Any],
        template: str,
        origin: str = "the tokenizer",
        ends: Sequence[int] = (),
    ) -> None:
        added = fast.get_added_tokens_decoder()
        self._fast = fast
        self._plain = _without_added_tokens(fast)
        self._markup = {token.content: id for id, token in added.items()}
        self._tags = _any_of([t.content for t in added.values() if not t.special])
        named = {name: _content(config.get(name)) for name in NAMED_TOKENS}
        self._named = {name: token for name, token in named.items() if token is not None}
        self._compiled = _compile(template, origin)
        self.template = template
        self.origin = origin  # where the template comes from
        self.has_chatml = _has_chatml(fast)
        self.markup_pattern = _any_of(list(self._markup))
        self.vocab_size: int = _ids_below(fast)
        self.end_tokens: tuple[int, ...] = _end_tokens(fast, self._named.get("eos_token"), ends)
        pad = self._named.get("pad_token", END_OF_TURN[-1])
        self.pad: int = self._markup.get(pad, self.end_tokens[-1])

    def encode(self, text: str) -> list[int]:
        """Tokens of text nobody vouches for: what looks like a control token is spelled out."""
        return self._plain.encode(_valid(text), add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` of each text, faster."""
        batch = self._plain.encode_batch_fast(list(map(_valid, texts)), add_special_tokens=False)
        return [encoding.ids for encoding in batch]

    def encode_markup(self, text: str) -> list[int]:
        """Tokens of what a template wrote: every control token in it is recognised."""
        return self._fast.encode(_valid(text), add_special_tokens=False).ids

    def encode_written(self, text: str) -> list[int]:
        """Tokens of what an assistant wrote: tags such as <think> are recognised, the tokens
        that delimit turns are not."""
        tokens: list[int] = []
        for index, piece in enumerate(self._tags.split(text)):
            tokens += [self._markup[piece]] if index % 2 else self.encode(piece) if piece else []
        return tokens

    def decode(self, tokens: Sequence[int]) -> str:
        """The text, control tokens included; bytes that are no UTF-8 become U+FFFD."""
        return self._fast.decode(list(tokens), skip_special_tokens=False)

    def render(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        add_generation_prompt: bool,
    ) -> str:
        """The chat template's text; raises ValueError where the template refuses."""
        try:
            return self._compiled.render(
                messages=messages,
                tools=tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._named,
            )
        except (jinja2.TemplateError, TypeError) as error:
            roles = ", ".join(str(each.get("role")) for each in messages)
            raise ValueError(
                f"the chat template of {self.origin} refuses messages of {roles}: {error}"
            ) from error


def _folder(path: str) -> pathlib.Path:
    """The folder of a tokenizer, with all the files that it needs."""
    if path.startswith(BUILTIN):
        known = {
            BUILTIN + file.parent.name: file.parent for file in _assets().glob(f"*/{FILES[0]}")
        }
        if path in known:
            return known[path]
        raise FileNotFoundError(f"tokenizer {path!r} is not built in; there is {', '.join(known)}.")
    folder = storage.local_folder(storage.path(path).expanduser())
    if not folder.is_dir():
        raise FileNotFoundError(
            f"tokenizer {path!r} is not a directory. Give a folder that holds "
            f"{' and '.join(FILES)}, or '{BUILTIN}tiny'."
        )
    missing = [name for name in FILES if not (folder / name).is_file()]
    if not missing:
        return folder
    weights = "model weights but " if any(folder.glob("*.safetensors")) else ""
    raise FileNotFoundError(
        f"{folder} has {weights}no {' and no '.join(missing)}. Copy the tokenizer files of the "
        "model's original repository there, or name another folder: --config.tokenizer=DIR. "
        "A slow tokenizer becomes a fast one with transformers' save_pretrained."
    )


def _assets() -> pathlib.Path:
    return pathlib.Path(str(importlib.resources.files("demyrl"))) / "assets"


def _read_text(file: pathlib.Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is not UTF-8 text ({error}).") from error


def _read_json(file: pathlib.Path) -> dict[str, Any]:
    try:
        content = json.loads(_read_text(file))
    except json.JSONDecodeError as error:
        raise ValueError(f"{file} is not JSON ({error}). Fetch the file again.") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file} holds a {type(content).__name__}, expected a JSON object.")
    return content


def _fast_tokenizer(file: pathlib.Path) -> tokenizers.Tokenizer:
    try:
        fast = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing narrower
        raise ValueError(f"{file} cannot be read as a tokenizer ({error}).") from error
    for token in fast.get_added_tokens_decoder().values():
        if token.lstrip or token.rstrip or token.single_word:
            raise ValueError(
                f"{file}: added token {token.content!r} swallows the text around it (lstrip, "
                "rstrip or single_word), so turns could not be joined token by token."
            )
    return fast


def _generation_ends(file: pathlib.Path, vocab_size: int) -> tuple[int, ...]:
    """The ids that end a text according to a generation config; none where there is no file."""
    ids = _read_json(file).get("eos_token_id") if file.is_file() else None
    ids = ids if isinstance(ids, list) else [] if ids is None else [ids]
    if all(type(each) is int and 0 <= each < vocab_size for each in ids):
        return tuple(ids)
    raise ValueError(
        f"{file}: eos_token_id is {ids!r:.80}, expected ids below {vocab_size}, the size of the "
        "tokenizer. Use the files of one model."
    )


def _template_file(template: str) -> pathlib.Path:
    """The file of a template that was asked for by name or path."""
    if template.startswith(BUILTIN):
        files = (_assets() / "templates").glob("*.jinja")
        known = {BUILTIN + file.stem: file for file in files}
        if template in known:
            return known[template]
        there_is = f"is not built in; there is {', '.join(known)}"
    else:
        file = pathlib.Path(template).expanduser()
        if file.is_file():
            return file
        there_is = "is not a file"
    raise FileNotFoundError(
        f"chat template {template!r} {there_is}. Give the path of a jinja file, '{HERMES}', or '' "
        "for the tokenizer's own."
    )


def _template_in(config: dict[str, Any], folder: pathlib.Path, fast: tokenizers.Tokenizer) -> str:
    """The template in a tokenizer's config."""
    template = config.get("chat_template")
    if isinstance(template, list):
        template = {each["name"]: each["template"] for each in template}.get("default")
    if isinstance(template, str):
        return template
    builtin = f" or --config.chat.template={HERMES}" if _has_chatml(fast) else ""
    raise ValueError(
        f"{folder} has no chat template: neither chat_template.jinja nor a chat_template in "
        f"tokenizer_config.json. Use the tokenizer of an instruct model{builtin}, or name a jinja "
        "file with --config.chat.template=FILE."
    )


def _ids_below(fast: tokenizers.Tokenizer) -> int:
    """One more than the largest id, which is more than the number of tokens where ids have gaps."""
    return 1 + max(fast.get_vocab(with_added_tokens=True).values())


def _has_chatml(fast: tokenizers.Tokenizer) -> bool:
    added = {token.content for token in fast.get_added_tokens_decoder().values()}
    return added.issuperset(CHATML)


def _without_added_tokens(fast: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """The same vocabulary (shared, not copied) that recognises no added token."""
    plain = tokenizers.Tokenizer(fast.model)
    if fast.normalizer is not None:
        plain.normalizer = fast.normalizer
    plain.pre_tokenizer = fast.pre_tokenizer
    plain.decoder = fast.decoder
    return plain


def _any_of(literals: list[str]) -> re.Pattern[str]:
    """Matches any of the literals, the longest first, in a group; nothing when there are none."""
    longest_first = sorted(literals, key=len, reverse=True)
    return re.compile("(" + ("|".join(map(re.escape, longest_first)) or r"(?!)") + ")")


def _end_tokens(
    fast: tokenizers.Tokenizer, eos: str | None, more: Sequence[int]
) -> tuple[int, ...]:
    names = END_OF_TURN[:1] if more else (*END_OF_TURN, *([eos] if eos else []))
    ids = [fast.token_to_id(token) for token in names]
    known = tuple(dict.fromkeys(id for id in (*ids, *more) if id is not None))
    if not known:
        raise ValueError(
            f"the tokenizer has none of {', '.join(END_OF_TURN)} and no eos_token, so no turn "
            "could ever end. Use a tokenizer of the Qwen family."
        )
    return known


def _valid(text: str) -> str:
    """The text with U+FFFD for halves of surrogate pairs, which JSON can hold and UTF-8 cannot."""
    if text.isascii():
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _content(token: Any) -> str | None:
    return token["content"] if isinstance(token, dict) else token


class _Generation(jinja2.ext.Extension):
    """{% generation %}, which marks what an assistant says and changes nothing of it."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _compile(template: str, origin: str) -> jinja2.Template:
    """The template in the environment that transformers gives it."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _Generation]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    try:
        return environment.from_string(template)
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(
            f"the chat template of {origin} has an error in line {error.lineno}: {error}."
        ) from error


def _to_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)
