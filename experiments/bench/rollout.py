"""How fast whole rollouts are, with the sandbox in the loop.

    python -m experiments.bench.rollout --config.model.source=runs/quickstart/sft --seconds 20

Samples as a training step does: the config's problems, samples, slots and sandboxes. Only weights
that call the tool say something about the tool: `builtin:tiny`, the default, hardly does. Keys:

  trajectories_per_s, calls_per_s, sampled_tokens_per_s
  device_share      share of the time in which the host waits for the device
  tools_wait_share  share in which every slot waits for a tool: the device idles for that reason
  host_share        the rest: text, tokens, bookkeeping; the device idles here too
  slot_use          share of slot-steps of the decode loop that made a token
  call_share        share of trajectories with at least one call
  tool_ms           mean milliseconds of a call
  first_rollout_s   seconds of the first rollout, which compiles, or loads what was compiled
  source, isolation, workers, slots, problems, samples, rollouts, rollouts_s   what was measured
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from demyrl import command, recipe
from demyrl.data.generators import tasks
from demyrl.evaluate import make_agent, make_chat
from demyrl.model.mesh import make_mesh
from demyrl.rollout.agent import Rollout
from demyrl.tools.toolbox import ToolBox
from demyrl.weights import starting_params
from experiments.bench.measure import options_of, print_line, repeat


class Timed:
    """A sampler, and the seconds spent in it: `decode` returns when the device is done."""

    def __init__(self, sampler: Any):
        self.config, self.rounds, self.seconds = sampler.config, sampler.rounds, 0.0
        self.copy, self.extend, self.decode = map(
            self.timed, (sampler.copy, sampler.extend, sampler.decode)
        )

    def timed(self, call: Callable) -> Callable:
        def run(*args: Any) -> Any:
            start = time.perf_counter()
            try:
                return call(*args)
            finally:
                self.seconds += time.perf_counter() - start

        return run


class Rollouts:
    """An agent with weights, and the next step to sample for."""

    def __init__(self, settings: recipe.Recipe, tools: ToolBox):
        part = settings.train
        chat, temperature = make_chat(settings, tools), settings.rollout.sampler.temperature
        self.agent = make_agent(settings, chat, tools, part.samples, temperature)
        mesh = make_mesh(settings.mesh)
        params = starting_params(settings.source, settings.model, mesh, settings.seed)
        self.agent.sampler.load(params)
        self.agent.sampler = self.sampler = Timed(self.agent.sampler)
        made = tasks(settings.problems, "train", part.problems, settings.seed)
        self.problems = [task.problem for task in made]
        self.root, self.step = jax.random.key(settings.seed), 0

    def next(self) -> tuple[Rollout, float]:
        """A rollout, and how many of its seconds the sampler had."""
        before, self.step = self.sampler.seconds, self.step + 1
        rollout = self.agent.roll_out(self.problems, self.root, self.step, 0)
        return rollout, self.sampler.seconds - before


def numbers_of(results: Sequence[tuple[Rollout, float]], elapsed: float) -> dict[str, float]:
    """The keys of the header that are measured."""
    played = [t for rollout, _ in results for t in rollout.trajectories]
    calls = [result for t in played for result in t.results]
    device = sum(seconds for _, seconds in results) / elapsed
    waiting = sum(r.numbers["time/tools_wait_s"] for r, _ in results) / elapsed
    return {
        "trajectories_per_s": len(played) / elapsed,
        "calls_per_s": len(calls) / elapsed,
        "sampled_tokens_per_s": sum(t.sampled_len for t in played) / elapsed,
        "device_share": device,
        "tools_wait_share": waiting,
        "host_share": 1 - device - waiting,
        "slot_use": float(np.mean([r.numbers["rollout/slot_use"] for r, _ in results])),
        "call_share": float(np.mean([bool(t.calls) for t in played])),
        "tool_ms": 1000 * float(np.mean([c.seconds for c in calls])) if calls else 0.0,
        "rollouts": len(results),
        "rollouts_s": elapsed,
    }


def main(argv: Sequence[str] | None = None) -> None:
    options, config = options_of(__doc__, argv)
    settings = recipe.read(config)
    command.enable_compilation_cache()
    with ToolBox(settings.tools) as tools:
        rollouts = Rollouts(recipe.on_device(settings), tools)
        start = time.perf_counter()
        rollouts.next()
        first = time.perf_counter() - start
        results, elapsed = repeat(rollouts.next, options.seconds)
    print_line(
        "rollout",
        options,
        **numbers_of(results, elapsed),
        first_rollout_s=first,
        source=settings.source,
        isolation=settings.tools.isolation,
        workers=settings.tools.workers,
        slots=settings.rollout.sampler.slots,
        problems=settings.train.problems,
        samples=settings.train.samples,
    )


if __name__ == "__main__":
    main()
