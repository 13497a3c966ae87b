"""How often a model is right: avg@k, pass@k, maj@k, and how sure we are of them.

Every figure is a mean over problems, so a problem counts the same however many samples it has,
and every interval resamples problems, because the samples of one problem are not independent.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Float

RESAMPLES = 2000
SEED = 0  # of the bootstrap: the same rows always give the same interval


def avg_at_k(correct: Bool[np.ndarray, "P k"]) -> float:
    """The mean over problems of the share of right samples."""
    return float(np.mean(np.mean(correct, axis=1)))


def pass_at_k(n: int, c: int, k: int) -> float | None:
    """The chance that k samples drawn from n without replacement hold one of the c right ones.

    1 - C(n - c, k) / C(n, k), as a product that stays exact for large n. None when n < k: fewer
    samples cannot say.
    """
    if not 0 <= c <= n or k < 1:
        raise ValueError(f"{c} right of {n} samples at k={k}: expected 0 <= c <= n and k >= 1.")
    if n < k:
        return None
    if n - c < k:
        return 1.0
    return float(1.0 - np.prod(1.0 - k / np.arange(n - c + 1, n + 1)))


def pass_at_k_bootstrap_closed(n: int, c: int, k: int) -> float:
    """The chance of a right one among k samples drawn from n *with* replacement.

    Biased low (one right of four gives 0.684 at k = 4, where the answer is 1): only for comparing
    with figures that were made by such a bootstrap.
    """
    return 1.0 - (1.0 - c / n) ** k


def maj_at_k(answers: Sequence[str | None], correct: Sequence[bool]) -> float:
    """The chance that the commonest answer of one problem is right, a tie being drawn by lot.

    Samples without an answer vote together, for a candidate that is never right.
    """
    votes: dict[str | None, list[bool]] = {}
    for answer, right in zip(answers, correct, strict=True):
        votes.setdefault(answer, []).append(right and answer is not None)
    most = max(len(ballots) for ballots in votes.values())
    winners = [np.mean(ballots) for ballots in votes.values() if len(ballots) == most]
    return float(np.mean(winners))


def interval(
    values: Float[np.ndarray, " P"], resamples: int = RESAMPLES, seed: int = SEED
) -> tuple[float | None, float | None]:
    """The 95% interval of the mean over problems, by resampling problems.

    Where all problems are at 0 (or 1), resampling sees no spread; the exact binomial bound is given
    instead, which is 3 / P away. (None, None) for fewer than two problems.
    """
    count = len(values)
    if count < 2:
        return None, None
    bound = 1.0 - 0.025 ** (1.0 / count)
    if np.all(values == 0.0):
        return 0.0, bound
    if np.all(values == 1.0):
        return 1.0 - bound, 1.0
    shares = np.full(count, 1.0 / count)
    weights = np.random.default_rng(seed).multinomial(count, shares, size=resamples)
    low, high = np.quantile(weights @ values / count, [0.025, 0.975])
    return float(low), float(high)


def summarize(rows: Iterable[Mapping[str, Any]], k: int) -> dict[str, Any]:
    """avg@k, pass@k and maj@k of graded samples, in all and by domain, with 95% intervals.

    Rows are {"problem_id", "domain", "sample", "correct", "answer", "calls"}. avg and pass use
    every sample of a problem, maj the first k. Raises ValueError when a problem has fewer than k
    samples or a sample twice.
    """
    problems = _by_problem(rows, k)
    domains = sorted({samples[0]["domain"] for samples in problems.values()})
    groups = {"all": list(problems.values())}
    for domain in domains:
        groups[domain] = [group for group in problems.values() if group[0]["domain"] == domain]
    return {"k": k, "domains": {name: _summary(group, k) for name, group in groups.items()}}


def _by_problem(rows: Iterable[Mapping[str, Any]], k: int) -> dict[str, list[Mapping[str, Any]]]:
    problems: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        problems.setdefault(row["problem_id"], []).append(row)
    if not problems:
        raise ValueError("there are no rows to summarize: expected k samples of each problem.")
    for problem, samples in problems.items():
        if len(samples) < k:
            raise ValueError(
                f"problem {problem} has {len(samples)} samples: avg, pass and maj at {k} need "
                f"at least {k}. Sample more, or ask for a smaller k."
            )
        samples.sort(key=lambda row: row["sample"])
        numbers = [row["sample"] for row in samples]
        if len(set(numbers)) < len(numbers):
            raise ValueError(f"problem {problem} has a sample twice: its samples are {numbers}.")
    return problems


def _summary(problems: list[list[Mapping[str, Any]]], k: int) -> dict[str, Any]:
    right = [[bool(row["correct"]) for row in samples] for samples in problems]
    answers = [[row["answer"] for row in samples] for samples in problems]
    called = [[row["calls"] > 0 for row in samples] for samples in problems]
    majority = [maj_at_k(a[:k], r[:k]) for a, r in zip(answers, right, strict=True)]
    return {
        "problems": len(problems),
        "samples": sum(len(samples) for samples in problems),
        "avg_at_k": _estimate([np.mean(r) for r in right]),
        "pass_at_k": _estimate([pass_at_k(len(r), sum(r), k) for r in right]),
        "maj_at_k": _estimate(majority),
        "call_share": _estimate([np.mean(c) for c in called]),
        "calls": float(np.mean([row["calls"] for samples in problems for row in samples])),
    }


def _estimate(per_problem: Sequence[float]) -> dict[str, float | None]:
    values = np.asarray(per_problem, np.float64)
    low, high = interval(values)
    return {"value": float(np.mean(values)), "low": low, "high": high}
