"""START HERE: the RL loop of GRPO-TCR.

    python -m demyrl.train --config=configs/grpo_tcr.py:tiny --config.model.source=runs/x/sft \\
        --config.train.pool=runs/x/select/pool.jsonl --workdir=runs/x/rl

A step samples G trajectories for each of P problems with the tool in the loop, grades them, turns
rewards into group advantages, and makes a few updates with the token-level, asymmetrically clipped
loss. The same command on the same workdir goes on where it was stopped, bit for bit.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from demyrl import checkpoint, command, logs, recipe
from demyrl.arrays import TrainState
from demyrl.data.generators import tasks
from demyrl.data.problems import read_problems
from demyrl.data.stream import ProblemStream
from demyrl.evaluate import (
    eval_problems,
    grade_all,
    judge_policy,
    make_agent,
    make_chat,
    refuse_broken_sandbox,
)
from demyrl.learn.advantages import group_advantages
from demyrl.learn.batch import Example, pack, token_weights, unpack
from demyrl.learn.loss import grpo_loss
from demyrl.learn.update import (
    learning_rate,
    make_optimizer,
    make_programs,
    update,
)
from demyrl.model.sharding import make_mesh, rows_sharding
from demyrl.records import reward_numbers, rollout_numbers, row_of
from demyrl.tools.toolbox import ToolBox
from demyrl.types import Problem, Reward, Trajectory
from demyrl.weights import first_state, is_workdir, keep_source

MAY_CHANGE = ("train.save_every", "train.keep", "tools.workers", "tools.delay_s")
PROBLEMS_WITHOUT_POOL = 2000
SHARES = (  # of the weight that was run through the model
    "loss/clipped_low",
    "loss/clipped_high",
    "loss/dual_clipped",
    "loss/kl_to_old",
)


class Rl:
    """One RL run: its data, agent, programs and state."""

    def __init__(self, settings: recipe.Recipe, tools: ToolBox):
        settings = self.settings = recipe.on_device(settings)
        part = settings.train
        self.chat = make_chat(settings, tools)
        temperature = settings.rollout.sampler.temperature
        self.agent = make_agent(settings, self.chat, tools, part.samples, temperature)
        problems = training_problems(settings)
        held_out = eval_problems(settings) if part.eval_every else []
        for problem in [*problems, *held_out]:
            self.agent.prompt(problem)  # refuses what does not fit, before any step
        self.stream = ProblemStream(problems, part.problems, settings.seed)
        self.mesh = make_mesh(settings.mesh)
        self.optimizer = make_optimizer(settings.optimizer, settings.model)
        self.programs = make_programs(
            settings.model, self.optimizer, self.loss, temperature, settings.head_chunk
        )
        self.state: TrainState | None = None
        self.root = jax.random.key(settings.seed)
        self.gap_checked = False

    def loss(self, logprobs, batch):
        return grpo_loss(logprobs, batch, self.settings.loss)

    def start(self, workdir: Path) -> int:
        """Loads the newest checkpoint or the first weights; returns the step to go on from."""
        s = self.settings
        self.state, restored = first_state(
            workdir, s.source, s.model, self.mesh, s.seed, self.optimizer
        )
        if restored is None:
            return 0
        self.stream.restore(restored.extra["stream"])
        return restored.step

    def save(self, workdir: Path, step: int) -> None:
        extra = {"stream": self.stream.state(), "config": self.settings.config_json}
        checkpoint.save(workdir, step, self.state, extra, self.settings.train.keep)

    def step(self, step: int, log: logs.Logs) -> dict[str, float]:
        """One pass of the loop; returns its numbers and leaves its trajectories in the log."""
        part = self.settings.train
        problems = self.stream.next()
        with log.timer("rollout"), log.phase("rollout", part.problems * part.samples, step) as tick:
            self.agent.sampler.load(self.state.params)
            version = int(self.state.step)
            rollout = self.agent.roll_out(problems, self.root, step, version, tick)
        rewards = grade_all(self.settings, problems, rollout)
        log.trajectories(step, self.rows(step, problems, rollout.trajectories, rewards))
        refuse_broken_sandbox(rollout.trajectories)
        with log.timer("score"):
            old_logprobs, numbers = self.score(rollout.trajectories)
        with log.timer("update"), log.phase("update", part.updates, step) as tick:
            trained = self.updates(step, rollout.trajectories, rewards, old_logprobs, tick)
        return (
            reward_numbers(rewards, part.samples)
            | rollout_numbers(rollout.trajectories)
            | rollout.numbers
            | numbers
            | trained
            | throughput(rollout.trajectories, trained["optim/trained_tokens"], log)
        )

    def score(self, trajectories: Sequence[Trajectory]) -> tuple[list[np.ndarray], dict]:
        """Old log-probs of the training graph, entropy, and the gap to the sampler's numbers.

        Raises RuntimeError at the first step of a run in float32 when the two disagree: what is
        trained would not be what was sampled. In bfloat16 the gap is for the metrics to tell.
        """
        examples = [Example(t.tokens, t.sampled.astype(np.float32)) for t in trajectories]
        packed = pack(examples, self.settings.pack)
        batches = jax.device_put(packed.batches, rows_sharding(self.mesh))
        scores = jax.device_get([self.programs.score(self.state.params, b) for b in batches])
        lengths = [len(t.tokens) for t in trajectories]
        logprobs = unpack(packed, [s.logprobs for s in scores], lengths)
        entropy = unpack(packed, [s.entropy for s in scores], lengths)
        sampled = np.concatenate([t.sampled for t in trajectories])
        gap = np.abs(np.concatenate(logprobs) - np.concatenate([t.logprobs for t in trajectories]))
        numbers = {
            "policy/entropy": float(np.concatenate(entropy)[sampled].mean()),
            "policy/sampler_gap": float(gap[sampled].mean()),
            "policy/sampler_gap_max": float(gap[sampled].max()),
        }
        most = self.settings.rollout.max_gap
        limited = self.settings.model.dtype == "float32" and not self.gap_checked
        if limited and not numbers["policy/sampler_gap"] <= most:
            raise RuntimeError(
                f"the sampler and the trainer disagree on the log-probs of the first rollout by "
                f"{numbers['policy/sampler_gap']:.2e} nats on average; rollout.max_gap allows "
                f"{most:.2e}. In float32 this is a bug."
            )
        self.gap_checked = True
        return logprobs, numbers

    def updates(self, step, trajectories, rewards, old_logprobs, tick) -> dict[str, float]:
        """The step's updates, each on whole groups; the mean of their numbers.

        Token weights are shared out among all graded trajectories of an update. Those with
        advantage 0 have no gradient, so they are not run through the model; those that could not be
        graded have no weight at all. An update without any other trajectory is left out.
        """
        part, collected, tokens = self.settings.train, [], 0
        advantages = group_advantages(totals(rewards, part.samples)).reshape(-1)
        update_of = [i // part.samples % part.updates for i in range(len(trajectories))]
        for u in range(part.updates):
            chosen = [i for i, of in enumerate(update_of) if of == u and rewards[i].graded]
            masks = [trajectories[i].sampled for i in chosen]
            weights = token_weights(masks, self.settings.aggregation)
            examples = [
                Example(trajectories[i].tokens, w, advantages[i], old_logprobs[i])
                for i, w in zip(chosen, weights, strict=True)
                if advantages[i] != 0
            ]
            if examples:
                collected.append(self.update(examples, step * part.updates + u))
                tokens += sum(int((e.weights > 0).sum()) for e in examples)
            tick(1)
        names = collected[0] if collected else {}
        numbers = {n: float(np.mean([each[n] for each in collected])) for n in names}
        return numbers | {
            "optim/updates": float(self.state.step),
            "optim/trained_tokens": float(tokens),
        }

    def update(self, examples: Sequence[Example], number: int) -> dict[str, float]:
        """One optimizer application; `number` counts updates, left-out ones too, for the rate."""
        packed = pack(examples, self.settings.pack)
        batches = jax.device_put(packed.batches, rows_sharding(self.mesh))
        rate = learning_rate(self.settings.optimizer, number)
        self.state, numbers = update(self.programs, self.loss, self.state, batches, rate)
        run = sum(float(e.weights.sum()) for e in examples)
        numbers = {name: float(x) for name, x in jax.device_get(numbers).items()}
        return numbers | {n: numbers[n] / run for n in SHARES} | {"optim/learning_rate": rate}

    def rows(
        self,
        step: int,
        problems: Sequence[Problem],
        trajectories: Sequence[Trajectory],
        rewards: Sequence[Reward],
    ) -> list[dict[str, Any]]:
        samples, isolation = self.settings.train.samples, self.agent.tools.isolation
        return [
            {"step": step, **row_of(problems[i // samples], t, rewards[i], self.chat, isolation)}
            for i, t in enumerate(trajectories)
        ]


def training_problems(settings: recipe.Recipe) -> list[Problem]:
    """The pool of select_problems, a file of problems, or freshly made ones."""
    path = settings.train.pool or settings.problems_path
    if path:
        return read_problems(path)
    made = tasks(settings.problems, "train", PROBLEMS_WITHOUT_POOL, settings.seed)
    return [task.problem for task in made]


def totals(rewards: Sequence[Reward], samples: int) -> np.ndarray:
    """Total rewards, one row a group; NaN where a trajectory could not be graded."""
    return np.array([r.total if r.graded else np.nan for r in rewards]).reshape(-1, samples)


def throughput(
    trajectories: Sequence[Trajectory], trained_tokens: float, log: logs.Logs
) -> dict[str, float]:
    """Tokens sampled, and tokens trained on, each over the seconds of its part of the step."""
    sampled = sum(t.sampled_len for t in trajectories)
    return {
        "throughput/sampled_tokens_per_s": sampled / log.seconds("rollout"),
        "throughput/trained_tokens_per_s": trained_tokens / log.seconds("update"),
    }


def evaluation_numbers(rl: Rl, step: int, log: logs.Logs) -> dict[str, float]:
    """Held-out accuracy of the current weights, in the names of `logs.METRICS`."""
    problems = eval_problems(rl.settings)
    with log.phase("evaluate", len(problems) * rl.settings.train.samples, step) as tick:
        rl.agent.sampler.load(rl.state.params)
        summary = judge_policy(rl.settings, rl.agent, problems, step, tick).summary
    return {
        f"eval/{domain}/{name}": part[name]["value"]
        for domain, part in summary["domains"].items()
        for name in ("avg_at_k", "pass_at_k", "maj_at_k", "call_share")
    }


def train(config: Any, workdir: Path) -> None:
    """The stage: leaves checkpoints, metrics.jsonl and rollouts/ in the workdir."""
    settings = recipe.read(config, workdir)
    logs.record_run(workdir, settings.config_json, logs.environment(), MAY_CHANGE)
    part = settings.train
    with ToolBox(settings.tools) as tools:
        command.enable_compilation_cache()
        rl = Rl(settings, tools)
        if not is_workdir(workdir):
            template = rl.chat.tokenizer.template
            keep_source(workdir, settings.source, settings.tokenizer, template)
        first = rl.start(workdir)
        with logs.Logs(workdir, part.steps, first) as log:
            for step in range(first, part.steps):
                with log.timer("step"):
                    numbers = rl.step(step, log)
                if part.eval_every and (step + 1) % part.eval_every == 0:
                    numbers |= evaluation_numbers(rl, step, log)
                log.numbers(step, numbers)
                if (step + 1) % part.save_every == 0 or step + 1 == part.steps:
                    rl.save(workdir, step + 1)


if __name__ == "__main__":
    command.run(train, "configs/grpo_tcr.py:tiny")
