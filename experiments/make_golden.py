"""Makes tests/golden: the logits that transformers gives to small random checkpoints.

    python -m experiments.make_golden    # needs torch; the tests that read the files do not

A file holds what transformers answered and not the weights it was asked with: `drawn` makes those
again from their names and shapes. Its metadata are the config.json that transformers wrote, the
shapes of the tensors, the seed, and the versions that made it. A case is the transcript of a few
episodes: a prompt, greedy tokens, a tool result, greedy tokens; the logits are those of one pass
over a finished episode by itself. One more row has gaps between its positions, up to 32,767.
"""

import dataclasses
import json
import tempfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

GOLDEN = Path(__file__).parents[1] / "tests" / "golden"
SEED = 0
GREEDY = 4  # tokens chosen after a prompt, and again after a tool result
GAPS = (0, 1, 2, 3, 500, 8190, 8191, 8192, 8193, 8400, 20_000, 32_767)
KNOWN_TOKENS = 80  # prompts and tool results keep below: the rest of the vocabulary is padding
CLEAR = 1e-3  # a greedy token must win by more, so that rounding cannot change the transcript

SHAPE = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 40_960,
    "rms_norm_eps": 1e-6,
}
ROUNDS = ((3, 5), (7, 0), (12, 9))  # tokens of each row's prompt and tool result; 0: no tool call


@dataclasses.dataclass(frozen=True)
class Case:
    """One checkpoint, and how long the prompt and the tool result of each episode are."""

    family: str  # of classes in transformers
    settings: dict[str, Any]  # of its config class
    rounds: tuple[tuple[int, int], ...] = ROUNDS
    logits_from: int = 0  # the first position whose logits are kept


def case(family: str, theta: float, tied: bool, **changes: Any) -> Case:
    """A case of the common shape."""
    rope = {"rope_type": "default", "rope_theta": theta}
    return Case(family, {**SHAPE, "rope_parameters": rope, "tie_word_embeddings": tied, **changes})


LONG = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64}
CASES = {
    "qwen2": case("Qwen2", 1e6, False),
    "qwen3": case("Qwen3", 1e6, True, head_dim=32),  # not width over heads
    "llama": case("Llama", 1e4, True, rms_norm_eps=1e-5),
    "long": dataclasses.replace(
        case("Qwen3", 1e6, True, **LONG), rounds=((8_400, 0),), logits_from=8_384
    ),
}


@dataclasses.dataclass(frozen=True)
class Answers:
    """What transformers said about a checkpoint, with what it takes to make that one again."""

    arrays: dict[str, np.ndarray]  # tokens0, logits0, ... a row each; gap_tokens, gap_logits
    config: dict[str, Any]  # its config.json
    shapes: dict[str, list[int]]  # of its tensors, by name
    seed: int


def drawn(name: str, shape: Sequence[int], seed: int) -> np.ndarray:
    """A tensor whose norms and biases are not neutral, from the one numpy stream that is frozen."""
    noise = np.random.RandomState([seed, zlib.crc32(name.encode())]).standard_normal(tuple(shape))
    if name.endswith("norm.weight"):
        noise = 1 + noise / 4
    elif name.endswith("bias"):
        noise = noise / 2
    else:
        noise = noise / np.sqrt(shape[-1])
    return noise.astype(np.float32)


def drawn_tokens(name: str, count: int, seed: int) -> list[int]:
    """Tokens that are not padding of the vocabulary."""
    stream = np.random.RandomState([seed, zlib.crc32(name.encode())])
    return stream.randint(0, KNOWN_TOKENS, count).tolist()


def write_checkpoint(folder: Path, answers: Answers) -> None:
    """The folder that transformers was asked about, without torch."""
    tensors = {name: drawn(name, shape, answers.seed) for name, shape in answers.shapes.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(answers.config))


def read(name: str) -> Answers:
    """The golden answers for a case."""
    with safe_open(GOLDEN / f"{name}.safetensors", "numpy") as file:
        arrays = {key: file.get_tensor(key) for key in file.keys()}
        facts = json.loads(file.metadata()["facts"])
    return Answers(arrays, facts["config"], facts["shapes"], facts["seed"])


def ask(name: str, seed: int, folder: Path) -> Answers:
    """What the transformers installed here answers; leaves the checkpoint in the folder."""
    case = CASES[name]
    model = made(case, seed)
    model.save_pretrained(folder)
    arrays = {}
    for row, (prompt, tool) in enumerate(case.rounds):
        tokens = greedy(model, drawn_tokens(f"prompt{row}", prompt, seed))
        if tool:
            tokens = greedy(model, tokens + drawn_tokens(f"tool{row}", tool, seed))
        arrays[f"tokens{row}"] = np.array(tokens, np.uint8)
        arrays[f"logits{row}"] = logits(model, tokens, range(len(tokens)))[case.logits_from :]
    tokens = drawn_tokens("gaps", len(GAPS), seed)
    arrays |= {"gap_tokens": np.array(tokens, np.uint8), "gap_logits": logits(model, tokens, GAPS)}
    config = json.loads((folder / "config.json").read_text())
    return Answers(arrays, config, {n: list(p.shape) for n, p in model.named_parameters()}, seed)


def made(case: Case, seed: int) -> Any:
    """The model of a case, as an object of transformers, with drawn weights."""
    import torch
    import transformers

    config = getattr(transformers, f"{case.family}Config")(**case.settings)
    model = getattr(transformers, f"{case.family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            tensor.copy_(torch.from_numpy(drawn(name, tensor.shape, seed)))
    return model


def logits(model: Any, tokens: list[int], positions: Sequence[int]) -> np.ndarray:
    """Of every token, in one pass without a cache.

    The mask says that all tokens are one sequence, which gaps between positions would deny.
    """
    import torch

    row = torch.tensor([tokens])
    with torch.inference_mode():
        asked = {
            "attention_mask": torch.ones_like(row),
            "position_ids": torch.tensor([[*positions]]),
        }
        return model(row, **asked, use_cache=False).logits[0].numpy()


def greedy(model: Any, tokens: list[int]) -> list[int]:
    """The tokens with the GREEDY likeliest ones after them."""
    import torch

    for _ in range(GREEDY):
        with torch.inference_mode():
            answer = model(torch.tensor([tokens]), use_cache=False, logits_to_keep=1)
        (best, second), (token, _) = answer.logits[0, -1].topk(2)
        assert best - second > CLEAR, "a close call: draw with another seed"
        tokens = [*tokens, int(token)]
    return tokens


def main() -> None:
    """Writes every file anew."""
    import torch
    import transformers

    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    GOLDEN.mkdir(exist_ok=True)
    for name in CASES:
        with tempfile.TemporaryDirectory() as folder:
            answers = ask(name, SEED, Path(folder))
        facts = {"made_by": "experiments/make_golden.py", "versions": versions, "seed": SEED}
        facts |= {"config": answers.config, "shapes": answers.shapes}
        path = GOLDEN / f"{name}.safetensors"
        save_file(answers.arrays, path, metadata={"facts": json.dumps(facts)})
        print(f"{path}: {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
