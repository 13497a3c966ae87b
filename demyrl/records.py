"""What is written down about trajectories: one row each for `rollouts/*.jsonl`, and their numbers.

Host only: nothing here loads JAX.
"""

import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from demyrl.learn.advantages import EQUAL, spread
from demyrl.rewards.grade import vote_of
from demyrl.text.chat import Chat
from demyrl.types import Problem, Reward, Trajectory

CUT = ("context_full", "turn_length", "turn_limit", "call_limit")


def row_of(
    problem: Problem, trajectory: Trajectory, reward: Reward, chat: Chat, isolation: str
) -> dict[str, Any]:
    """One trajectory as JSON: its problem, reward, calls, text by kind, and exact tokens."""
    return {
        "problem_id": problem.id,
        "domain": problem.domain,
        "source": problem.source,
        "prompt": problem.prompt,
        "answer": problem.answer,
        "sample": trajectory.sample,
        "reward": {
            "outcome": reward.outcome,
            "tool_bonus": reward.tool_bonus,
            "overlong": reward.overlong,
            "format": reward.format,
            "total": reward.total,
        },
        "correct": reward.correct,
        "stop": trajectory.stop,
        "stops": list(trajectory.stops),
        "reply": trajectory.reply,
        "answer_given": vote_of(problem, trajectory.reply),
        "isolation": isolation,
        "calls": [c and {"name": c.name, "arguments": c.arguments} for c in trajectory.calls],
        "results": [
            {"status": r.status, "output": r.output, "seconds": round(r.seconds, 4)}
            for r in trajectory.results
        ],
        "pieces": pieces_of(trajectory, chat),
        "prompt_len": trajectory.prompt_len,
        "response_len": trajectory.response_len,
        "sampled_len": trajectory.sampled_len,
        "tokens": trajectory.tokens.tolist(),
        "logprobs": [round(float(x), 5) for x in trajectory.logprobs],
    }


def pieces_of(trajectory: Trajectory, chat: Chat) -> list[dict[str, Any]]:
    """The trajectory cut where the author changes: prompt, sampled, tool."""
    n = len(trajectory.tokens)
    kinds = [
        ("sampled" if trajectory.sampled[i] else "prompt" if i < trajectory.prompt_len else "tool",
         int(trajectory.turn[i]))
        for i in range(n)
    ]  # fmt: skip
    pieces, start = [], 0
    for (kind, turn), run in itertools.groupby(kinds):
        end = start + len(list(run))
        mean = float(trajectory.logprobs[start:end].mean()) if kind == "sampled" else None
        text = chat.tokenizer.decode(trajectory.tokens[start:end].tolist())
        pieces.append({"kind": kind, "turn": turn, "text": text, "mean_logprob": mean})
        start = end
    return pieces


def verdict_row(problem: Problem, trajectory: Trajectory, reward: Reward) -> dict[str, Any]:
    """What `analysis.stats.summarize` needs of one evaluated trajectory."""
    return {
        "problem_id": problem.id,
        "domain": problem.domain,
        "sample": trajectory.sample,
        "graded": reward.graded,
        "correct": reward.correct,
        "answer": vote_of(problem, trajectory.reply) or None,
        "calls": len(trajectory.calls),
    }


def reward_numbers(rewards: Sequence[Reward], samples: int) -> dict[str, float]:
    """Means over the graded trajectories of a step, and over its groups of `samples`."""
    totals = np.array([r.total for r in rewards]).reshape(-1, samples)
    graded = np.isfinite(totals)
    correct = np.array([r.correct for r in rewards]).reshape(-1, samples) & graded
    share = correct.sum(1) / np.maximum(graded.sum(1), 1)
    known = graded.any(1)
    overlong = [r.overlong for r in rewards if r.graded]
    return {
        "reward/mean": float(totals[graded].mean()) if graded.any() else float("nan"),
        "reward/std": float(totals[graded].std()) if graded.any() else float("nan"),
        "reward/correct": float(correct.sum() / max(graded.sum(), 1)),
        "reward/avg_at_g": mean(share[known]),
        "reward/pass_at_g": mean(share[known] > 0),
        "reward/equal_groups": mean(spread(totals)[known] <= EQUAL),
        "reward/solved_none": mean(share[known] == 0),
        "reward/solved_all": mean(share[known] == 1),
        "reward/ungraded": float((~graded).sum()),
        "reward/overlong": mean(overlong),
    }


def rollout_numbers(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Lengths, turns, calls and what became of the calls."""
    results = [result for t in trajectories for result in t.results]
    status = Counter(result.status for result in results)
    total = max(len(results), 1)
    seconds = [r.seconds for r in results if r.status in ("ok", "error", "timeout")]
    shares = ("ok", "error", "timeout", "malformed", "output_limit", "not_executed")
    return {
        "rollout/response_tokens": mean([t.response_len for t in trajectories]),
        "rollout/sampled_tokens": mean([t.sampled_len for t in trajectories]),
        "rollout/turns": mean([len(t.stops) for t in trajectories]),
        "rollout/calls": mean([len(t.calls) for t in trajectories]),
        "rollout/call_share": mean([len(t.calls) > 0 for t in trajectories]),
        "rollout/truncated": mean([t.stop in CUT for t in trajectories]),
        **{f"tools/{name}": status[name] / total for name in shares},
        "tools/sandbox_errors": float(status["sandbox_error"]),
        "tools/seconds": mean(seconds),
    }


def mean(values: Any) -> float:
    """The mean, 0 of nothing."""
    return float(np.mean(values)) if len(values) else 0.0
