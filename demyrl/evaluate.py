"""avg@k, pass@k and maj@k of a policy on held-out problems, with intervals.

    python -m demyrl.evaluate --config=configs/grpo_tcr.py:tiny --config.model.source=runs/x/rl \\
        --workdir=runs/x/eval_rl

Uses the rollout code of training. `--config.tools.enabled=False` evaluates without the tool: calls
get the answer that it is switched off. Writes `evaluation.json` and one rollouts file.
"""

import dataclasses
import json
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from demyrl import command, logs, processes, recipe, storage
from demyrl.analysis.stats import summarize
from demyrl.data.generators import tasks
from demyrl.data.problems import read_problems
from demyrl.model.mesh import AXES, make_mesh
from demyrl.records import row_of, verdict_row
from demyrl.rewards.grade import grade
from demyrl.rollout.agent import Agent, AgentConfig
from demyrl.rollout.sampler import Sampler
from demyrl.storage import Place
from demyrl.text.chat import Chat
from demyrl.text.tokenizer import load_tokenizer
from demyrl.tools.toolbox import ToolBox
from demyrl.types import Problem, Reward, Trajectory
from demyrl.weights import starting_params

MOST_SANDBOX_ERRORS = 0.2  # share of trajectories; beyond it a stage stops
MESH = tuple(f"mesh.{axis}" for axis in AXES)  # a run may go on with other devices
EVALUATION = 1_000_000  # added to the step that seeds the draws: never those of training


def begin(settings: recipe.Recipe, workdir: Place, ignore: tuple[str, ...] = ()) -> recipe.Recipe:
    """The settings on this platform, once all processes are here and the start is on record.

    Raises ValueError when the processes have different configs or workdirs, or as `record_run`.
    """
    settings = recipe.on_device(settings)
    require_same_config(processes.gather(settings.config_json))
    here = settings.config_json
    processes.first(lambda: logs.record_run(workdir, here, logs.environment(), ignore))
    processes.require_shared(storage.path(workdir) / "environment.json")
    return settings


def require_same_config(configs: Sequence[str]) -> None:
    """Raises ValueError, with each key that differs, unless all processes have one config."""
    for other, config in enumerate(configs):
        said = logs.differences(json.loads(configs[0]), json.loads(config))
        if said:
            raise ValueError(
                f"process {other} (here) has another config than process 0 (there):\n{said}\n"
                "Start every process with the same command."
            )


def own_mesh(settings: recipe.Recipe) -> Mesh:
    """The mesh of a run, in which each process has rows of its own."""
    mesh = make_mesh(settings.mesh)
    processes.check(mesh)
    return mesh


def make_chat(settings: recipe.Recipe, tools: ToolBox) -> Chat:
    """The tokenizer's chat format with the tools in it.

    Raises ValueError when the tokenizer has more tokens than the model has embeddings.
    """
    tokenizer = load_tokenizer(settings.tokenizer, settings.chat.template)
    if tokenizer.vocab_size > settings.model.vocab:
        raise ValueError(
            f"tokenizer {settings.tokenizer} has {tokenizer.vocab_size} tokens and the model "
            f"{settings.model.vocab} embeddings (model.vocab): every token needs one. Use the "
            "model's own tokenizer, or for random weights raise model.vocab."
        )
    schemas = [] if settings.chat.prompts == "no_tool" else tools.schemas
    return Chat(tokenizer, schemas, keep=settings.chat.keep)


def make_agent(
    settings: recipe.Recipe,
    chat: Chat,
    tools: ToolBox,
    samples: int,
    temperature: float,
    reply_start: str = "",
) -> Agent:
    """An agent whose sampler has no weights yet."""
    shapes = dataclasses.replace(settings.rollout.sampler, temperature=temperature)
    sampler = Sampler(settings.model, shapes, chat.end_tokens, own_mesh(settings))
    style, early_return = settings.chat.prompts, settings.rollout.early_return
    config = AgentConfig(samples, early_return, reply_start, style)
    return Agent(sampler, chat, tools, config, settings.rollout.episode)


def eval_problems(settings: recipe.Recipe) -> list[Problem]:
    """The problems of `evaluate.problems`, or the built-in held-out ones: the same for every seed,
    and disjoint from all built-in training problems."""
    if settings.evaluate.problems:
        return read_problems(settings.evaluate.problems)
    return [task.problem for task in tasks(settings.problems, "eval", settings.eval_count, 0)]


def check_prompts(agent: Agent, problems: Sequence[Problem]) -> None:
    """Raises ValueError for a prompt that does not fit, and when processes have different ones."""
    prompts = [agent.prompt(problem) for problem in problems]
    parts = (f"{each}{prompt}".encode() for each, prompt in zip(problems, prompts, strict=True))
    processes.agree("problems or prompts", parts)


@dataclasses.dataclass(frozen=True)
class Played:
    """Every episode of some problems, problem by problem and sample by sample."""

    trajectories: tuple[Trajectory, ...]
    rewards: tuple[Reward, ...]
    numbers: dict[str, float]


def play(
    settings: recipe.Recipe,
    agent: Agent,
    problems: Sequence[Problem],
    root: jax.Array,
    step: int,
    version: int,
    advance: Callable[[int], None] = lambda finished: None,
) -> Played:
    """Samples and grades all problems; with several processes, each does its share of them."""
    share = problems[processes.index() :: processes.count()]
    rollout = agent.roll_out(share, root, step, version, advance)
    rewards = [
        grade(share[i // agent.config.samples], trajectory, settings.reward)
        for i, trajectory in enumerate(rollout.trajectories)
    ]
    size = agent.config.samples
    groups = processes.gather(
        [
            (rollout.trajectories[i : i + size], rewards[i : i + size])
            for i in range(0, len(rewards), size)
        ]
    )
    in_order = [groups[i % len(groups)][i // len(groups)] for i in range(len(problems))]
    return Played(
        tuple(trajectory for group, _ in in_order for trajectory in group),
        tuple(reward for _, group in in_order for reward in group),
        rollout.numbers,
    )


def refuse_broken_sandbox(trajectories: Sequence[Trajectory]) -> None:
    """Raises RuntimeError when the sandbox failed in more than a fifth of the trajectories."""
    failures = [
        next((r.output for r in t.results if r.status == "sandbox_error"), None)
        for t in trajectories
    ]
    broken = [failure for failure in failures if failure is not None]
    if len(broken) > MOST_SANDBOX_ERRORS * len(trajectories):
        raise RuntimeError(
            f"the sandbox failed in {len(broken)} of {len(trajectories)} trajectories, so their "
            f"rewards would mislead. The last failure said: {broken[-1]}"
        )


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """What a policy did on some problems."""

    summary: dict[str, Any]  # by domain and overall: avg, pass, maj with intervals; call share
    verdicts: list[dict[str, Any]]
    rows: list[dict[str, Any]]  # for rollouts/*.jsonl


def judge_policy(
    settings: recipe.Recipe,
    agent: Agent,
    problems: Sequence[Problem],
    step: int,
    advance: Callable[[int], None] = lambda finished: None,
) -> Evaluation:
    """Samples every problem with the weights the agent's sampler holds, grades and counts.

    Samples that could not be graded are counted apart, and the summary leaves their problems out.
    Raises RuntimeError when the sandbox fails too often for that.
    """
    root = jax.random.key(settings.seed)
    played = play(settings, agent, problems, root, EVALUATION + step, 0, advance)
    refuse_broken_sandbox(played.trajectories)
    samples = agent.config.samples
    triples = [
        (problems[i // samples], trajectory, played.rewards[i])
        for i, trajectory in enumerate(played.trajectories)
    ]
    verdicts = [verdict_row(*triple) for triple in triples]
    rows = [row_of(*triple, agent.chat, agent.tools.isolation) for triple in triples]
    spoilt = {verdict["problem_id"] for verdict in verdicts if not verdict["graded"]}
    whole = [verdict for verdict in verdicts if verdict["problem_id"] not in spoilt]
    ungraded = sum(not verdict["graded"] for verdict in verdicts)
    summary = {**summarize(whole, samples), "ungraded": ungraded}
    return Evaluation(summary, verdicts, rows)


def loaded_agent(
    settings: recipe.Recipe, tools: ToolBox, samples: int, temperature: float, reply_start: str = ""
) -> Agent:
    """An agent that samples with the weights of `model.source`."""
    settings = recipe.on_device(settings)
    chat = make_chat(settings, tools)
    agent = make_agent(settings, chat, tools, samples, temperature, reply_start)
    mesh = agent.sampler.mesh
    agent.sampler.load(starting_params(settings.source, settings.model, mesh, settings.seed))
    return agent


def evaluate(config: Any, workdir: Place) -> None:
    """The stage: writes evaluation.json and one file of rollouts."""
    settings = recipe.read(config)
    with ToolBox(settings.tools) as tools:
        command.enable_compilation_cache()
        settings = begin(settings, workdir)
        part, problems = settings.evaluate, eval_problems(settings)
        agent = loaded_agent(settings, tools, part.samples, part.temperature, part.reply_start)
        check_prompts(agent, problems)
        with logs.Logs(workdir, 1, writes=processes.is_first()) as log:
            with log.phase("evaluate", len(problems) * part.samples, 0) as advance:
                result = judge_policy(settings, agent, problems, 0, advance)
            log.trajectories(0, result.rows)
            log.note(sentence(result.summary))
    if processes.is_first():
        content = {**result.summary, "rows": result.verdicts}
        logs.write_json(storage.path(workdir) / "evaluation.json", content)


def sentence(summary: dict[str, Any]) -> str:
    """The overall numbers in one line."""
    overall, k = summary["domains"]["all"], summary["k"]
    names = ("avg", "pass", "maj")
    parts = [f"{name}@{k} {overall[f'{name}_at_k']['value']:.3f}" for name in names]
    return "  ".join([*parts, f"call share {overall['call_share']['value']:.3f}"])


if __name__ == "__main__":
    command.run(evaluate, "configs/grpo_tcr.py:tiny")
