import dataclasses

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from demyrl.model.mesh import MeshConfig, make_mesh
from demyrl.model.sharding import params_sharding
from demyrl.model.transformer import output_embedding
from demyrl.rollout.episode import EpisodeConfig
from demyrl.types import Message, ToolCall
from tests.test_sampler import whole_pass
from tests.tiny import (
    LIMITS,
    MODEL,
    FakeTools,
    ScriptedSampler,
    chat,
    compilations,
    drawn_params,
    make_agent,
    params,
    problem,
)

ROOT = jax.random.key(0)
PROBLEMS = [problem(i) for i in range(3)]
WIDE = dataclasses.replace(MODEL, layers=1, heads=8, kv_heads=8)


def roll(agent, problems=PROBLEMS, step=0, version=5):
    return agent.roll_out(problems, ROOT, step, version)


def tokens_of(rollout):
    return [t.tokens.tolist() for t in rollout.trajectories]


def call_text(code="1+1"):
    return chat().assistant(
        Message("assistant", "", (ToolCall("code_interpreter", {"code": code}),))
    )


def answer_text(text="\\boxed{4}"):
    return chat().assistant(Message("assistant", text))


def scripted(turns, **options):
    """An agent whose policy says turns[k] in turn k, the last one for good."""
    sampler = type("Scripted", (ScriptedSampler,), {})
    sampler.script = staticmethod(lambda key, turn: turns[min(turn, len(turns) - 1)])
    return make_agent(sampler_class=sampler, **options)


def by_key(key, turn):
    """Zero to two calls, then an answer: which, depends on the episode."""
    return call_text(f"{key[0] % 1000}") if turn < key[1] % 3 else answer_text()


def scripted_by_key(**options):
    sampler = type("ByKey", (ScriptedSampler,), {"script": staticmethod(by_key)})
    return make_agent(sampler_class=sampler, **options)


@pytest.mark.parametrize(
    "slots,steps,early", [(1, 4, 0.0), (2, 1, 0.5), (5, 16, 1.0), (9, 3, 0.75)]
)
def test_the_tokens_do_not_depend_on_slots_steps_or_early_return(slots, steps, early):
    want = tokens_of(roll(make_agent(slots=4, decode_steps=4)))
    got = tokens_of(roll(make_agent(slots=slots, decode_steps=steps, early_return=early)))
    assert got == want


@given(st.sampled_from([1, 4]), st.sampled_from([1, 4]), st.integers(0, 3))
@settings(max_examples=6, deadline=None)
def test_tool_latency_does_not_change_an_episode(slots, steps, seed):
    want = tokens_of(roll(scripted_by_key(slots=9, decode_steps=40)))
    slow = FakeTools(slow_s=0.02, seed=seed)
    got = roll(scripted_by_key(slots=slots, decode_steps=steps, tools=slow))
    assert tokens_of(got) == want


def test_what_the_cache_saw_is_what_the_trajectory_holds():
    agent = scripted_by_key(slots=9, tools=FakeTools(slow_s=0.01))
    rollout = roll(agent)
    fed = {tuple(row) for row in agent.sampler.fed.values()}
    assert fed == {tuple(t.tokens[:-1].tolist()) for t in rollout.trajectories}


def test_a_prompt_is_prefilled_once_for_its_group():
    rollout = roll(make_agent(slots=9, samples=3))
    assert rollout.numbers["rollout/prefills"] == len(PROBLEMS)


def test_one_slot_prefills_a_group_once_as_well():
    rollout = roll(make_agent(slots=1, samples=3))
    assert rollout.numbers["rollout/prefills"] == len(PROBLEMS)


@pytest.mark.parametrize("slots", [2, 9])
def test_sampled_logprobs_are_those_of_one_whole_pass(slots):
    for t in roll(make_agent(slots=slots)).trajectories[:4]:
        logprobs = jax.nn.log_softmax(whole_pass(t.tokens) @ output_embedding(params()).T)
        at = np.flatnonzero(t.sampled)
        want = np.asarray(logprobs)[at - 1, t.tokens[at]]
        np.testing.assert_allclose(t.logprobs[at], want, atol=1e-4)


def test_arrays_of_a_trajectory_describe_the_same_tokens():
    for t in roll(scripted_by_key(slots=4)).trajectories:
        assert len({len(a) for a in (t.tokens, t.sampled, t.logprobs, t.turn)}) == 1
        np.testing.assert_array_equal(t.sampled, t.policy_version == 5)
        assert not t.sampled[: t.prompt_len].any()
        assert np.all(t.logprobs[~t.sampled] == 0)


def test_the_prompt_is_that_of_the_chat_format():
    t = roll(make_agent()).trajectories[0]
    assert t.tokens[: t.prompt_len].tolist() == chat().prompt(PROBLEMS[0].prompt)


def test_a_conversation_of_two_calls_reads_as_the_template_writes_it():
    t = roll(
        scripted([call_text("ab"), call_text("cd"), answer_text()]), PROBLEMS[:1]
    ).trajectories[0]
    messages = [Message("user", PROBLEMS[0].prompt)]
    for code, output in (("ab", "ba"), ("cd", "dc")):
        messages.append(Message("assistant", "", (ToolCall("code_interpreter", {"code": code}),)))
        messages.append(Message("tool", output))
    tokens, sampled = chat().conversation([*messages, Message("assistant", "\\boxed{4}")])
    assert t.tokens.tolist() == tokens
    assert t.sampled.tolist() == sampled
    assert t.stop == "answered" and t.stops == ("called", "called", "ended")


def test_tool_tokens_are_encoded_once_each(monkeypatch):
    agent = scripted([call_text("ab"), answer_text()], samples=2)
    seen = []
    real = agent.chat.tool_results
    monkeypatch.setattr(
        type(agent.chat), "tool_results", lambda self, *a: seen.append(a) or real(*a)
    )
    roll(agent)
    assert len(seen) == 2 * len(PROBLEMS)


def test_a_malformed_call_is_answered_and_the_episode_goes_on():
    broken = chat().tokenizer.encode_written('<tool_call>\n{"name": \n</tool_call>')
    t = roll(scripted([[*broken, chat().end_tokens[0]], answer_text()]), PROBLEMS[:1]).trajectories[
        0
    ]
    assert t.calls == (None,)
    assert t.results[0].status == "malformed"
    assert t.stop == "answered"


def test_the_turn_limit_ends_an_episode_without_running_the_last_call():
    tools = FakeTools()
    t = roll(scripted([call_text()], tools=tools, samples=2), PROBLEMS[:1]).trajectories[0]
    assert t.stop == "turn_limit" and len(t.stops) == LIMITS.turns
    assert t.results[-1].status == "not_executed"
    assert len(tools.calls) == 2 * (LIMITS.turns - 1)


def test_the_call_limit_counts_calls_not_turns():
    calls = (ToolCall("code_interpreter", {"code": "1"}),) * 2
    two = chat().assistant(Message("assistant", "", calls))
    limits = EpisodeConfig(context=128, turn_tokens=48, turns=3, calls=3, output_tokens=16)
    t = roll(scripted([two], limits=limits), PROBLEMS[:1]).trajectories[0]
    assert t.stop == "call_limit"
    assert [r.status for r in t.results] == ["ok", "ok", "not_executed", "not_executed"]


def test_a_result_without_room_ends_the_episode_as_context_full():
    limits = EpisodeConfig(context=70, turn_tokens=24, turns=3, calls=3, output_tokens=40)
    t = roll(scripted([call_text("x" * 8)], limits=limits), PROBLEMS[:1]).trajectories[0]
    assert t.stop == "context_full"
    assert t.results[0].status == "ok"
    assert t.tokens[-1] == chat().end_tokens[0]


def test_an_endless_turn_ends_at_its_own_limit():
    t = roll(scripted([[65] * 99]), PROBLEMS[:1]).trajectories[0]
    assert t.stop == "turn_length" and t.stops == ("length",)
    assert t.sampled_len == LIMITS.turn_tokens


def test_a_truncated_call_does_not_run():
    tools = FakeTools()
    roll(scripted([call_text("y" * 60)], tools=tools), PROBLEMS[:1])
    assert tools.calls == []


def test_a_prompt_as_long_as_the_context_is_refused():
    limits = EpisodeConfig(context=40, turn_tokens=8, turns=1, calls=1, output_tokens=8)
    with pytest.raises(ValueError, match="problem p0 has .* the context holds 40"):
        roll(make_agent(limits=limits), PROBLEMS[:1])


def test_another_step_draws_other_tokens():
    agent = make_agent()
    assert tokens_of(roll(agent, step=0)) != tokens_of(roll(agent, step=1))


def test_an_episode_can_be_replayed_alone():
    want = tokens_of(roll(make_agent()))[3:6]
    assert tokens_of(roll(make_agent(slots=2), PROBLEMS[1:2])) == want


def test_a_rollout_compiles_each_program_once_for_each_rung_of_its_ladder():
    with compilations() as first:
        agent = scripted_by_key(slots=11, decode_steps=3)  # shapes that no other test uses
        roll(agent)
        roll(agent, step=1)
    counts = {name: first.count(name) for name in ("decode", "extend", "copy_cache_rows")}
    assert counts["decode"] <= 1 and counts["copy_cache_rows"] <= 1
    assert 1 <= counts["extend"] <= len(agent.sampler.config.extend_lengths)


def test_a_second_rollout_compiles_nothing():
    agent = scripted_by_key(slots=4)
    roll(agent)
    with compilations() as found:
        roll(agent, step=1)
    assert found == []


def on_mesh(**options):
    """An agent with the weights and slots of all tests below, on eight devices."""
    mesh = make_mesh(MeshConfig(data=2, tensor=2, sequence=2))
    weights = jax.device_put(drawn_params(WIDE), params_sharding(WIDE, mesh))
    return make_agent(slots=4, decode_steps=12, model=WIDE, mesh=mesh, weights=weights, **options)


def test_a_rollout_on_a_mesh_has_the_tokens_of_one_device_and_compiles_once():
    agent = on_mesh()
    with compilations() as first:
        got = roll(agent)
    one = make_agent(slots=4, model=WIDE, weights=drawn_params(WIDE))
    assert tokens_of(got) == tokens_of(roll(one))
    assert first.count("decode") == 1
    assert first.count("extend") <= len(agent.sampler.config.extend_lengths)
    with compilations() as second:
        roll(agent, step=1)
    assert second == []


def test_tools_on_a_mesh_change_no_token_and_prefill_a_group_once_a_shard():
    one = roll(scripted_by_key(slots=9, decode_steps=40))
    sampler = type("ByKey", (ScriptedSampler,), {"script": staticmethod(by_key)})
    got = roll(on_mesh(sampler_class=sampler, tools=FakeTools(slow_s=0.02)))
    assert tokens_of(got) == tokens_of(one)
    assert got.numbers["rollout/prefills"] <= 2 * len(PROBLEMS)


def test_every_finished_episode_is_heard_of():
    heard = []
    make_agent(slots=2).roll_out(PROBLEMS, ROOT, 0, 5, heard.append)
    assert sum(heard) == 3 * len(PROBLEMS) and min(heard) >= 0


def test_without_problems_nothing_is_played():
    assert roll(make_agent(), []).trajectories == ()


def test_a_decode_budget_never_leads_past_the_context():
    for t in roll(make_agent(slots=3)).trajectories:
        assert len(t.tokens) <= LIMITS.context


def test_the_start_of_a_reply_is_prompt_to_the_cache_and_reply_to_the_grader():
    agent = scripted([chat().tokenizer.encode("4}") + [chat().end_tokens[0]]], samples=2)
    agent.config = dataclasses.replace(agent.config, reply_start="\\boxed{")
    t = roll(agent, PROBLEMS[:1]).trajectories[0]
    assert t.reply == "\\boxed{4}"
    assert t.sampled_len == 3


def test_each_problem_is_asked_by_its_own_domain():
    limits = EpisodeConfig(context=512, turn_tokens=8, turns=1, calls=0, output_tokens=8)
    agent = make_agent(limits=limits)
    agent.config = dataclasses.replace(agent.config, prompts="agentic")
    mixed = [problem(0, "math"), problem(1, "science")]
    prompts = [chat().tokenizer.decode(agent.prompt(each)) for each in mixed]
    assert "math problem" in prompts[0] and "science problem" in prompts[1]
    assert all(each.prompt in text for each, text in zip(mixed, prompts, strict=True))
