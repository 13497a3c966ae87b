"""From the rewards of a group to the advantage of each of its trajectories."""

import numpy as np
from jaxtyping import Float

EQUAL = 1e-6  # rewards of a group closer than this are the same reward
EPSILON = 1e-6  # added to the standard deviation, as in the reference code


def group_advantages(rewards: Float[np.ndarray, "P G"]) -> Float[np.ndarray, "P G"]:
    """(reward - mean) / (standard deviation + 1e-6) within each group, divisor G - 1.

    NaN marks a trajectory that could not be graded: it is left out of mean and deviation and gets
    advantage 0. Equal rewards give exact zeros, and so does a group with one graded member, which
    has no sibling to compare with. (Paper, section 2.1.)
    """
    graded = np.isfinite(rewards)
    count = graded.sum(axis=1, keepdims=True)
    values = np.where(graded, rewards, 0.0).astype(np.float64)
    mean = values.sum(axis=1, keepdims=True) / np.maximum(count, 1)
    centered = np.where(graded, values - mean, 0.0)
    deviation = np.sqrt((centered**2).sum(axis=1, keepdims=True) / np.maximum(count - 1, 1))
    different = spread(rewards)[:, None] > EQUAL
    return np.where(different, centered / (deviation + EPSILON), 0.0)


def spread(rewards: Float[np.ndarray, "P G"]) -> Float[np.ndarray, " P"]:
    """Largest minus smallest graded reward of each group; 0 where fewer than two are graded."""
    graded = np.isfinite(rewards)
    high = np.where(graded, rewards, -np.inf).max(axis=1)
    low = np.where(graded, rewards, np.inf).min(axis=1)
    return np.where(graded.sum(axis=1) >= 2, high - low, 0.0)
