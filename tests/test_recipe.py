"""Every setting is checked before any work, and the message says what would work."""

import pytest
from ml_collections import ConfigDict

from configs.grpo_tcr import get_config
from demyrl import recipe

RANDOM_WEIGHTS = {"model__source": "", "tokenizer": "builtin:tiny"}  # whose shape is the config's


def config_with(**changes):
    """The tiny config with dotted keys changed, `__` for the dot; new keys are allowed."""
    config = get_config("tiny").unlock()
    for key, value in changes.items():
        *sections, last = key.split("__")
        place = config
        for section in sections:
            place = place[section]
        place[last] = value
    return config.lock()


REFUSED = {
    "a prompt style that is none": (
        {"chat__prompts": "polite"},
        "chat.prompts is 'polite': use one of bare, agentic, no_tool",
    ),
    "prompts without the tool, and the tool": (
        {"chat__prompts": "no_tool"},
        "chat.prompts is 'no_tool' and tools.enabled is True",
    ),
    "a group of one": (
        {"train__samples": 1},
        "train.samples is 1: a group of one has no siblings to compare with",
    ),
    "more updates than groups": (
        {"train__updates": 20},
        "train.updates is 20 with train.problems = 16: each update takes whole groups",
    ),
    "no update": ({"train__updates": 0}, "train.updates is 0: use at least 1"),
    "greedy training": (
        {"rollout__temperature": 0.0},
        "rollout.temperature is 0.0: training needs the log-probs of a sampled distribution",
    ),
    "an aggregation that is none": (
        {"loss__aggregation": "tokens"},
        "loss.aggregation is 'tokens': use one of token, sequence",
    ),
    "rows shorter than the context": (
        {"train__pack__row_tokens": 200},
        "train.pack.row_tokens is 200 and rollout.context is 224: .* Use at least 224",
    ),
    "a turn that fills the context": (
        {"rollout__turn_tokens": 190},
        "rollout.turn_tokens 190 and rollout.output_tokens 40 leave no room in rollout.context",
    ),
    "a penalty that is never reached": (
        {"reward__max_len": 300},
        "reward.max_len is 300, but a trajectory ends at rollout.context = 224",
    ),
    "a penalty from the first token": ({"reward__cache_len": 400}, "cache_len is 400"),
    "rows that the mesh does not divide": (
        {"mesh__data": 3, "model__width": 96} | RANDOM_WEIGHTS,
        "rollout.slots is 64, which mesh.data = 3 does not divide",
    ),
    "heads that the mesh does not divide": (
        {"mesh__tensor": 2},
        "model.kv_heads is 1, which mesh.tensor = 2 does not divide",
    ),
    "no device": (
        {"mesh__data": 0},
        "mesh.data is 0, mesh.tensor is 1, mesh.sequence is 1: an axis",
    ),
    "heads that do not share evenly": (
        {"model__kv_heads": 3} | RANDOM_WEIGHTS,
        "kv_heads is 3",
    ),
    "a lower clip of one": ({"loss__clip_low": 1.0}, "loss.clip_low is 1.0"),
    "no checkpoint kept": ({"train__keep": 0}, "train.keep is 0: use at least 1"),
    "never saving": ({"sft__save_every": 0}, "sft.save_every is 0: use at least 1"),
    "no row": ({"sft__pack__rows": 0}, "sft.pack.rows is 0: use at least 1"),
    "lengths out of order": ({"rollout__extend_lengths": (96, 32)}, "in ascending order"),
    "an unknown family": ({"problems__families": ("sums",)}, r"families is .*\['sums'\]"),
    "an unknown isolation": ({"tools__isolation": "none"}, "isolation"),
    "a mistyped key of two stages": (
        {"rollout__slot": 8},
        "rollout has no key 'slot': it has calls, context",
    ),
    "a key that this section has elsewhere": (
        {"sft__decay_updates": 5},
        "sft has no key 'decay_updates'",
    ),
    "waiting for more rows than there are": (
        {"rollout__early_return": 1.5},
        "rollout.early_return is 1.5: it is a share",
    ),
    "an empty chunk": ({"rollout__extend_lengths": (0, 32)}, "extend_lengths is .*lengths start"),
    "fewer than no tokens": (
        {"rollout__output_tokens": -1},
        "rollout.output_tokens is -1: neither can be negative",
    ),
    "a gap nothing keeps": ({"rollout__max_gap": 0.0}, "rollout.max_gap is 0.0"),
    "a temperature below greedy": ({"evaluate__temperature": -1.0}, "evaluate.temperature is -1"),
    "a cool-down longer than the run": (
        {"sft__cooldown_steps": 900},
        "sft.cooldown_steps is 900, .* must fit in the steps",
    ),
    "a probe that never comes": ({"sft__probe_every": 1000}, "sft.probe_every 1000"),
    "no held-out problem": ({"problems__eval_count": 0}, "problems.eval_count is 0: use at least"),
    "a rate that goes uphill": ({"optimizer__learning_rate": -1.0}, "learning_rate is -1.0"),
    "an evaluation in the past": ({"train__eval_every": -3}, "eval_every is -3: use 0 for never"),
    "a mistyped section": ({"rewards": {}}, "the config has no key 'rewards'"),
}


@pytest.mark.parametrize("changes, message", REFUSED.values(), ids=REFUSED)
def test_the_recipe_refuses(changes, message):
    with pytest.raises(ValueError, match=message):
        recipe.read(config_with(**changes))


@pytest.mark.parametrize("section, key", [(None, "seed"), ("model", "source"), ("train", "pack")])
def test_a_missing_key_is_named(section, key):
    values = get_config("tiny").to_dict()
    del (values[section] if section else values)[key]
    with pytest.raises(ValueError, match=f"{section or 'the config'} lacks the key '{key}'"):
        recipe.read(ConfigDict(values))


def test_a_penalty_that_is_off_may_have_any_length():
    assert not recipe.read(config_with(reward__overlong=False, reward__max_len=300)).reward.overlong


def test_updates_need_not_divide_the_problems():
    assert recipe.read(config_with(train__updates=3)).train.updates == 3


def test_the_decay_without_a_length_of_its_own_lasts_the_whole_run():
    settings = recipe.read(config_with(train__steps=7, train__updates=3))
    assert settings.optimizer.decay_updates == 21


def test_a_decay_with_a_length_of_its_own_keeps_it():
    assert recipe.read(config_with(optimizer__decay_updates=9)).optimizer.decay_updates == 9


def test_the_sft_rate_has_no_decay_of_its_own():
    settings = recipe.read(get_config("tiny"))
    assert settings.sft_optimizer.decay_updates == 0
    assert settings.sft_optimizer.learning_rate == get_config("tiny").sft.learning_rate
