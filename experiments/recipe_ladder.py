"""Which parts of GRPO-TCR matter: plain GRPO, then one part more in each rung.

T  token-level loss instead of the mean of each sequence's mean
C  an upper clip that is wider than the lower one
R  a penalty for responses that come close to the length limit

Expect   +T and +C help, most of all the entropy; +R changes little where responses are short
Cost     4 variants x 3 seeds x (40 steps and one evaluation), one after another
Result   not run yet

Compare accuracy (`reward/avg_at_g`), not `reward/mean`: only the last rung's reward has the penalty
in it. No rung has a KL term, which the original GRPO has.
"""

BASE = "configs/grpo_tcr.py:tiny"
VARIANTS = {
    "grpo": {"loss.aggregation": "sequence", "loss.clip_high": 0.2, "reward.overlong": False},
    "+T": {"loss.clip_high": 0.2, "reward.overlong": False},
    "+C": {"reward.overlong": False},
    "+R": {},
}
