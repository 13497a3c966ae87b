"""START HERE: the RL loop of GRPO-TCR.

    python -m demyrl.train --config=configs/grpo_tcr.py:tiny --config.model.source=runs/x/sft \\
        --config.train.pool=runs/x/select/pool.jsonl --workdir=runs/x/rl

A step samples G trajectories for each of P problems with the tool in the loop, grades them, turns
rewards into group advantages, and makes a few updates with the token-level, asymmetrically clipped
loss. The same command on the same workdir goes on where it was stopped, bit for bit.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from demyrl import checkpoint, command, logs, processes, recipe
from demyrl.arrays import TrainState
from demyrl.data.generators import tasks
from demyrl.data.problems import read_problems
from demyrl.data.stream import ProblemStream
from demyrl.evaluate import (
    MESH,
    begin,
    check_prompts,
    eval_problems,
    judge_policy,
    make_agent,
    make_chat,
    play,
    refuse_broken_sandbox,
)
from demyrl.learn.advantages import group_advantages
from demyrl.learn.batch import Example, pack, token_weights, weigh_by_micro_batch
from demyrl.learn.learner import HeadConfig, Learner
from demyrl.learn.loss import EXTREMES, grpo_loss
from demyrl.model.transformer import Params
from demyrl.records import reward_numbers, rollout_numbers, row_of
from demyrl.storage import Place
from demyrl.tools.toolbox import ToolBox
from demyrl.types import Problem, Reward, Trajectory
from demyrl.weights import first_state, is_workdir, keep_source, starting_params, step_of

MAY_CHANGE = ("train.save_every", "train.keep", "tools.workers", "tools.delay_s", *MESH)
PROBLEMS_WITHOUT_POOL = 2000
SHARES = (  # of the weight that was run through the model
    "loss/clipped_low",
    "loss/clipped_high",
    "loss/dual_clipped",
    "loss/kl_to_old",
    "loss/kl_to_reference",
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
        check_prompts(self.agent, [*problems, *held_out])  # before any step
        self.stream = ProblemStream(problems, part.problems, settings.seed)
        self.mesh = self.agent.sampler.mesh
        head = HeadConfig(temperature, settings.head_chunk)
        self.learner = Learner(
            settings.model, self.mesh, settings.optimizer, settings.memory, settings.pack,
            self.loss, head,
        )  # fmt: skip
        self.state: TrainState | None = None
        self.reference: Params | None = None  # what the KL term compares with
        self.reference_step: int | None = None  # ... of the run that it is from
        self.root = jax.random.key(settings.seed)
        self.gap_checked = False

    def loss(self, logprobs, batch):
        return grpo_loss(logprobs, batch, self.settings.loss)

    def start(self, workdir: Place) -> int:
        """Loads the newest checkpoint or the first weights; returns the step to go on from."""
        s = self.settings
        self.state, restored = first_state(
            workdir, s.source, s.model, self.mesh, s.seed, self.learner.optimizer, s.memory.offload
        )
        if s.loss.kl:
            begun = restored.extra if restored else {"reference_step": step_of(s.source)}
            self.reference_step = begun["reference_step"]
            first = starting_params(s.source, s.model, self.mesh, s.seed, self.reference_step)
            self.reference = self.learner.working(first)
        if restored is None:
            return 0
        self.stream.restore(restored.extra["stream"])
        return restored.step

    def save(self, workdir: Place, step: int) -> None:
        extra = {
            "stream": self.stream.state(),
            "reference_step": self.reference_step,
            "config": self.settings.config_json,
        }
        checkpoint.save(workdir, step, self.state, extra, self.settings.train.keep)

    def step(self, step: int, log: logs.Logs) -> dict[str, float]:
        """One pass of the loop; returns its numbers and leaves its trajectories in the log."""
        part = self.settings.train
        problems = self.stream.next()
        with log.timer("rollout"), log.phase("rollout", part.problems * part.samples, step) as tick:
            self.agent.sampler.load(self.learner.working(self.state.params))
            version = int(self.state.step)
            played = play(self.settings, self.agent, problems, self.root, step, version, tick)
            self.agent.sampler.unload()  # its memory is the update's now
        trajectories, rewards = played.trajectories, played.rewards
        log.trajectories(step, self.rows(step, problems, trajectories, rewards))
        refuse_broken_sandbox(trajectories)
        with log.timer("score"):
            examples, numbers = self.score(trajectories)
        with log.timer("update"), log.phase("update", part.updates, step) as tick:
            trained = self.updates(step, examples, rewards, tick, log)
        return (
            reward_numbers(rewards, part.samples)
            | rollout_numbers(trajectories)
            | played.numbers
            | numbers
            | trained
            | throughput(trajectories, trained["optim/trained_tokens"], log)
        )

    def score(self, trajectories: Sequence[Trajectory]) -> tuple[list[Example], dict[str, float]]:
        """The trajectories with their old log-probs by the training graph; entropy, and the gap to
        the sampler's numbers.

        Raises RuntimeError at the first step of a run in float32 when the two disagree: what is
        trained would not be what was sampled. In bfloat16 the gap is for the metrics to tell.
        """
        examples = [Example(t.tokens, t.sampled.astype(np.float32)) for t in trajectories]
        scored = self.learner.score(self.learner.working(self.state.params), examples)
        sampled = np.concatenate([t.sampled for t in trajectories])
        theirs = np.concatenate([t.logprobs for t in trajectories])
        gap = np.abs(np.concatenate(scored.logprobs) - theirs)[sampled]
        numbers = {
            "policy/entropy": float(np.concatenate(scored.entropy)[sampled].mean()),
            "policy/sampler_gap": float(gap.mean()),
            "policy/sampler_gap_max": float(gap.max()),
        }
        self.check_gap(numbers["policy/sampler_gap"])
        references = [0.0] * len(examples)
        if self.reference is not None:
            references = self.learner.score(self.reference, examples).logprobs
        examples = [
            dataclasses.replace(example, old_logprobs=old, ref_logprobs=reference)
            for example, old, reference in zip(examples, scored.logprobs, references, strict=True)
        ]
        return examples, numbers

    def check_gap(self, gap: float) -> None:
        most = self.settings.rollout.max_gap
        limited = self.settings.model.dtype == "float32" and not self.gap_checked
        if limited and not gap <= most:
            raise RuntimeError(
                f"the sampler and the trainer disagree on the log-probs of the first rollout by "
                f"{gap:.2e} nats on average; rollout.max_gap allows {most:.2e}. In float32 this is "
                "a bug."
            )
        self.gap_checked = True

    def updates(
        self,
        step: int,
        examples: Sequence[Example],
        rewards: Sequence[Reward],
        tick: Callable[[int], None],
        log: logs.Logs,
    ) -> dict[str, float]:
        """The step's updates, each on whole groups; the mean of their numbers.

        An update without a trajectory that has a gradient is left out.
        """
        part, collected, tokens = self.settings.train, [], 0
        advantages = group_advantages(totals(rewards, part.samples)).reshape(-1)
        for u in range(part.updates):
            chosen = self.weighted(
                [
                    dataclasses.replace(example, advantage=advantages[i])
                    for i, example in enumerate(examples)
                    if i // part.samples % part.updates == u and rewards[i].graded
                ]
            )
            if any(example.advantage or self.reference for example in chosen):
                collected.append(self.update(chosen, step * part.updates + u))
                tokens += sum(int((e.weights > 0).sum()) for e in chosen)
                if collected[-1]["optim/skipped"]:
                    log.note(self.learner.notice(step))
            tick(1)
        return over_updates(collected) | {
            "optim/updates": float(self.state.step),
            "optim/trained_tokens": float(tokens),
        }

    def weighted(self, examples: Sequence[Example]) -> list[Example]:
        """The examples of an update with what their tokens count for; their weights were masks.

        Weights are shared out among all of them. Those with advantage 0 have no gradient, so they
        are not run through the model afterwards, unless a micro-batch is to average over them.
        """
        settings, masks = self.settings, [example.weights > 0 for example in examples]
        if settings.aggregation == "micro_batch":
            return list(examples)  # weighed when they are packed
        weights = token_weights(masks, settings.aggregation, settings.rollout.episode.context)
        return [
            dataclasses.replace(example, weights=w)
            for example, w in zip(examples, weights, strict=True)
            if example.advantage or settings.loss.kl
        ]

    def update(self, examples: Sequence[Example], number: int) -> dict[str, float]:
        """One optimizer application; `number` counts updates, left-out ones too, for the rate."""
        packed = pack(examples, self.settings.pack)
        if self.settings.aggregation == "micro_batch":
            packed = weigh_by_micro_batch(packed)
        rate = self.learner.rate(number)
        self.state, numbers = self.learner.update(self.state, packed, rate)
        run = sum(float(batch.weights.sum()) for batch in packed.batches)
        shares = {name: numbers[name] / run for name in SHARES if name in numbers}
        return numbers | shares | {"optim/learning_rate": rate}

    def rows(
        self,
        step: int,
        problems: Sequence[Problem],
        trajectories: Sequence[Trajectory],
        rewards: Sequence[Reward],
    ) -> Iterator[dict[str, Any]]:
        samples, isolation = self.settings.train.samples, self.agent.tools.isolation
        for i, t in enumerate(trajectories):
            row = row_of(problems[i // samples], t, rewards[i], self.chat, isolation)
            yield {"step": step, **row}


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


def over_updates(collected: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean of each number over the updates of a step that were not skipped, if there are any;
    of extremes, the most extreme."""
    names = collected[0] if collected else {}
    fine = [each for each in collected if not each["optim/skipped"]] or collected
    combine = {name: {jnp.maximum: max, jnp.minimum: min}[kind] for name, kind in EXTREMES.items()}
    numbers = {n: float(combine.get(n, np.mean)([each[n] for each in fine])) for n in names}
    skipped = [each["optim/skipped"] for each in collected]
    return numbers | ({"optim/skipped": float(np.mean(skipped))} if skipped else {})


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
        rl.agent.sampler.load(rl.learner.working(rl.state.params))
        summary = judge_policy(rl.settings, rl.agent, problems, step, tick).summary
        rl.agent.sampler.unload()
    return {
        f"eval/{domain}/{name}": part[name]["value"]
        for domain, part in summary["domains"].items()
        for name in ("avg_at_k", "pass_at_k", "maj_at_k", "call_share")
    }


def train(config: Any, workdir: Place) -> None:
    """The stage: leaves checkpoints, metrics.jsonl and rollouts/ in the workdir."""
    settings = recipe.read(config, workdir)
    part = settings.train
    with ToolBox(settings.tools) as tools:
        command.enable_compilation_cache()
        rl = Rl(begin(settings, workdir, MAY_CHANGE), tools)
        if processes.is_first() and not is_workdir(workdir):
            template = rl.chat.tokenizer.template
            keep_source(workdir, settings.source, settings.tokenizer, template)
        first = rl.start(workdir)
        with logs.Logs(workdir, part.steps, first, processes.is_first()) as log:
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
