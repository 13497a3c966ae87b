"""From the config of a run to the frozen settings of each stage, every check included.

`read` is the one place where settings are checked against each other, before any process or
compilation. Stages take what it returns; nothing behind it sees the config. The shape of the model
is that of `model.source`; the config's own numbers describe random weights.
"""

import dataclasses
import math
import os
import sys
from typing import Any

from demyrl import processes
from demyrl.command import config_json, frozen, plain
from demyrl.data import generators
from demyrl.data.demonstrations import Habits
from demyrl.data.generators import ProblemConfig
from demyrl.learn.batch import AGGREGATIONS, PackConfig
from demyrl.learn.loss import LossConfig
from demyrl.learn.optimizer import OptimizerConfig
from demyrl.learn.update import MemoryConfig
from demyrl.model.config import ModelConfig
from demyrl.model.mesh import MeshConfig, divisible
from demyrl.rewards.grade import RewardConfig
from demyrl.rollout.episode import EpisodeConfig
from demyrl.rollout.sampler import SamplerConfig
from demyrl.settings import (
    ChatConfig,
    CollectSettings,
    EvaluateConfig,
    Recipe,
    RolloutSettings,
    SelectConfig,
    SftConfig,
    TrainConfig,
)
from demyrl.storage import Place
from demyrl.text.prompts import STYLES
from demyrl.tools.toolbox import ToolConfig
from demyrl.weights import compute_dtype, is_workdir, shape_of, tokenizer_of


def read(config: Any, workdir: Place | None = None) -> Recipe:
    """The checked settings; ValueError names the key, its value, and what would work.

    A run that goes on in its `workdir` needs its source no more, but for a KL term, which compares
    with it.
    """
    c = plain(config)
    check_keys(c)
    check_counts(c)
    going_on = workdir is not None and is_workdir(workdir)
    source = str(workdir) if going_on else c["model"]["source"]
    c["model"] |= shape_of_source(c["model"], source)
    problems = frozen(ProblemConfig, without(c["problems"], "path", "eval_count"))
    recipe = Recipe(
        config_json=config_json(c),
        seed=c["seed"],
        tokenizer=tokenizer(c["tokenizer"], source),
        chat=frozen(ChatConfig, c["chat"]),
        source=c["model"]["source"],
        head_chunk=c["head_chunk"],
        model=frozen(ModelConfig, without(c["model"], "source")),
        mesh=frozen(MeshConfig, c["mesh"]),
        memory=frozen(MemoryConfig, c["memory"]),
        tools=frozen(ToolConfig, c["tools"]),
        problems=problems,
        problems_path=c["problems"]["path"],
        eval_count=c["problems"]["eval_count"],
        collect=frozen(CollectSettings, only(c["collect"], CollectSettings)),
        habits=frozen(Habits, without(c["collect"], "count", "in_flight")),
        sft=frozen(SftConfig, only(c["sft"], SftConfig)),
        sft_optimizer=sft_optimizer(c["sft"]),
        sft_pack=frozen(PackConfig, c["sft"]["pack"]),
        rollout=rollout_settings(c["rollout"]),
        evaluate=frozen(EvaluateConfig, c["evaluate"]),
        select=frozen(SelectConfig, c["select"]),
        reward=frozen(RewardConfig, c["reward"]),
        loss=frozen(LossConfig, without(c["loss"], "aggregation")),
        aggregation=c["loss"]["aggregation"],
        optimizer=rl_optimizer(c["optimizer"], c["train"]),
        train=frozen(TrainConfig, without(c["train"], "pack")),
        pack=frozen(PackConfig, c["train"]["pack"]),
    )
    generators.check(problems, "eval", recipe.eval_count)
    check_ranges(recipe)
    check_chat(recipe)
    check_rows(recipe)
    check_lengths(recipe)
    return recipe


def shape_of_source(section: dict, source: str) -> dict:
    """The model section's shape as the source has it; a difference is told."""
    if not source:
        return {}
    shape = dataclasses.asdict(shape_of(source, section["dtype"]))
    other = [f"{key} {value}" for key, value in shape.items() if not same(value, section[key])]
    if other and os.environ.get("JAX_PROCESS_ID", "0") == "0":
        print(f"the model is that of {source}: {', '.join(other)}", file=sys.stderr)
    return shape


def same(one: Any, other: Any) -> bool:
    """Equal, or two float32 spellings of a number."""
    return one == other or (isinstance(one, float) and math.isclose(one, other, rel_tol=1e-6))


def tokenizer(given: str, source: str) -> str:
    """The tokenizer to load: the one that is named, or that of the weights."""
    if not given and not source:
        raise ValueError(
            "tokenizer is '' and model.source is '': random weights bring no tokenizer. Name a "
            "folder with one, or 'builtin:tiny'."
        )
    return given or tokenizer_of(source)


def on_device(recipe: Recipe) -> Recipe:
    """The recipe with a data type that this platform computes fast in, where it is "auto".

    Joins the other processes, if there are any, and loads JAX's devices, so stages that run
    programs call it after the sandbox has started.
    """
    processes.join()
    model = dataclasses.replace(recipe.model, dtype=compute_dtype(recipe.model.dtype))
    return dataclasses.replace(recipe, model=model)


def without(section: dict, *keys: str) -> dict:
    return {key: value for key, value in section.items() if key not in keys}


def only(section: dict, cls: type) -> dict:
    names = {field.name for field in dataclasses.fields(cls)}
    return {key: value for key, value in section.items() if key in names}


def sft_optimizer(section: dict) -> OptimizerConfig:
    """Constant after the warm-up: the cool-down begins when the probe says so."""
    return frozen(OptimizerConfig, {**only(section, OptimizerConfig), "decay_updates": 0})


def rl_optimizer(section: dict, train: dict) -> OptimizerConfig:
    updates = section["decay_updates"] or train["steps"] * train["updates"]
    return frozen(OptimizerConfig, {**section, "decay_updates": updates})


def rollout_settings(section: dict) -> RolloutSettings:
    return RolloutSettings(
        sampler=frozen(SamplerConfig, only(section, SamplerConfig)),
        episode=frozen(EpisodeConfig, only(section, EpisodeConfig)),
        early_return=section["early_return"],
        max_gap=section["max_gap"],
    )


def names(*classes: type) -> set[str]:
    return {field.name for cls in classes for field in dataclasses.fields(cls)}


SECTIONS: dict[str, set[str]] = {
    "model": names(ModelConfig) | {"source"},
    "chat": names(ChatConfig),
    "mesh": names(MeshConfig),
    "memory": names(MemoryConfig),
    "tools": names(ToolConfig),
    "problems": names(ProblemConfig) | {"path", "eval_count"},
    "collect": names(CollectSettings, Habits),
    "sft": names(SftConfig, OptimizerConfig) - {"decay_updates"} | {"pack"},
    "rollout": names(SamplerConfig, EpisodeConfig) | {"early_return", "max_gap"},
    "evaluate": names(EvaluateConfig),
    "select": names(SelectConfig),
    "reward": names(RewardConfig),
    "loss": names(LossConfig) | {"aggregation"},
    "optimizer": names(OptimizerConfig),
    "train": names(TrainConfig) | {"pack"},
}
VALUES = {"seed", "tokenizer", "head_chunk"}


def check_keys(c: dict) -> None:
    """No key is missing, and none is there that nothing would read."""
    places = {"the config": (c, VALUES | set(SECTIONS))}
    places |= {name: (c.get(name, {}), keys) for name, keys in SECTIONS.items()}
    for place, (section, keys) in places.items():
        unknown, missing = sorted(set(section) - keys), sorted(keys - set(section))
        if unknown:
            raise ValueError(
                f"{place} has no key {unknown[0]!r}: it has {', '.join(sorted(keys))}."
            )
        if missing:
            raise ValueError(f"{place} lacks the key {missing[0]!r}: add it to the config file.")


COUNTS = {
    "problems": ("eval_count",),
    "collect": ("count", "in_flight"),
    "sft": ("rows_per_step", "max_steps", "probe_every", "probe_count", "save_every"),
    "rollout": ("slots", "decode_steps", "extend_rows", "turn_tokens", "turns"),
    "evaluate": ("samples",),
    "select": ("problems", "samples"),
    "train": ("steps", "problems", "samples", "updates", "save_every", "keep"),
}


def check_counts(c: dict) -> None:
    """What is counted, there is at least one of."""
    counts = {f"{part}.{key}": c[part][key] for part, keys in COUNTS.items() for key in keys}
    counts |= {
        f"{part}.pack.{k}": v for part in ("sft", "train") for k, v in c[part]["pack"].items()
    }
    counts |= {"head_chunk": c["head_chunk"]}
    for key, count in counts.items():
        if count < 1:
            raise ValueError(f"{key} is {count}: use at least 1.")


def check_ranges(recipe: Recipe) -> None:
    """Single values that would make no sense, or run for ever."""
    rollout, sft, episode = recipe.rollout, recipe.sft, recipe.rollout.episode
    wrong = {
        f"rollout.early_return is {rollout.early_return}: it is a share, so give 0 to 1.": (
            not 0 <= rollout.early_return <= 1
        ),
        f"rollout.max_gap is {rollout.max_gap}: give what the run may tolerate, above 0.": (
            rollout.max_gap <= 0
        ),
        f"rollout.extend_lengths is {rollout.sampler.extend_lengths}: lengths start at 1.": (
            rollout.sampler.extend_lengths[0] < 1
        ),
        f"rollout.calls is {episode.calls} and rollout.output_tokens is {episode.output_tokens}: "
        "neither can be negative.": min(episode.calls, episode.output_tokens) < 0,
        f"evaluate.temperature is {recipe.evaluate.temperature}: use 0 (greedy) or more.": (
            recipe.evaluate.temperature < 0
        ),
        f"train.eval_every is {recipe.train.eval_every}: use 0 for never.": (
            recipe.train.eval_every < 0
        ),
        f"sft.cooldown_steps is {sft.cooldown_steps}, sft.probe_every {sft.probe_every} and "
        f"sft.max_steps {sft.max_steps}: the cool-down and a probe must fit in the steps.": (
            not 1 <= sft.cooldown_steps <= sft.max_steps or sft.probe_every > sft.max_steps
        ),
    }
    for message, is_wrong in wrong.items():
        if is_wrong:
            raise ValueError(message)


def check_chat(recipe: Recipe) -> None:
    """Prompts that exist, and that fit the tools."""
    style = recipe.chat.prompts
    if style not in STYLES:
        raise ValueError(f"chat.prompts is {style!r}: use one of {', '.join(STYLES)}.")
    if style == "no_tool" and recipe.tools.enabled:
        raise ValueError(
            "chat.prompts is 'no_tool' and tools.enabled is True: a prompt without the tool leaves "
            "nothing to call. Set tools.enabled=False as well."
        )


def check_rows(recipe: Recipe) -> None:
    """Counts that must divide, and groups that must compare."""
    train, mesh = recipe.train, recipe.mesh
    if train.samples < 2:
        raise ValueError(
            f"train.samples is {train.samples}: a group of one has no siblings to compare with, so "
            "every advantage would be 0. Use at least 2."
        )
    if not 1 <= train.updates <= train.problems:
        raise ValueError(
            f"train.updates is {train.updates} with train.problems = {train.problems}: each update "
            "takes whole groups, so there must be at least as many problems as updates."
        )
    if recipe.rollout.sampler.temperature <= 0:
        raise ValueError(
            f"rollout.temperature is {recipe.rollout.sampler.temperature}: training needs the "
            "log-probs of a sampled distribution, so it must be above 0. Greedy decoding is for "
            "evaluation (evaluate.temperature)."
        )
    if recipe.aggregation not in AGGREGATIONS:
        raise ValueError(
            f"loss.aggregation is {recipe.aggregation!r}: use one of {', '.join(AGGREGATIONS)}."
        )
    divisible(recipe.model, mesh, spread_counts(recipe))


def spread_counts(recipe: Recipe) -> dict[str, tuple[str, int]]:
    """What the mesh must divide besides the model's sizes, as `divisible` takes it."""
    sampler = recipe.rollout.sampler
    counts = {
        "rollout.slots": ("rows", sampler.slots),
        "rollout.extend_rows": ("rows", sampler.extend_rows),
    }
    for key, shape in (("train.pack", recipe.pack), ("sft.pack", recipe.sft_pack)):
        shortest = shape.row_tokens >> (shape.rungs - 1)
        counts[f"{key}.rows"] = ("rows", shape.rows)
        counts[f"{key}.row_tokens / 2**(rungs - 1)"] = ("tokens", shortest)
    return counts


def check_lengths(recipe: Recipe) -> None:
    """Budgets that must fit into each other."""
    episode, sampler = recipe.rollout.episode, recipe.rollout.sampler
    if 0 < recipe.model.max_positions < sampler.context:
        raise ValueError(
            f"rollout.context is {sampler.context}, but the weights were made for sequences of up "
            f"to {recipe.model.max_positions} tokens (max_position_embeddings). Lower the context."
        )
    if recipe.pack.row_tokens < sampler.context:
        raise ValueError(
            f"train.pack.row_tokens is {recipe.pack.row_tokens} and rollout.context is "
            f"{sampler.context}: a trajectory as long as the context would not fit in a row. "
            f"Use at least {sampler.context}."
        )
    if episode.turn_tokens + episode.output_tokens >= episode.context:
        raise ValueError(
            f"rollout.turn_tokens {episode.turn_tokens} and rollout.output_tokens "
            f"{episode.output_tokens} leave no room in rollout.context = {episode.context} for a "
            "prompt and an answer. Lower them or raise the context."
        )
    if recipe.reward.overlong and recipe.reward.max_len > sampler.context:
        raise ValueError(
            f"reward.max_len is {recipe.reward.max_len}, but a trajectory ends at "
            f"rollout.context = {sampler.context}: the penalty would never be reached. Use less."
        )
