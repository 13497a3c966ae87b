"""Which parts of GRPO-TCR matter: plain GRPO, then one part more in each rung.

T  token-level loss instead of the mean of each sequence's mean
C  an upper clip that is wider than the lower one
R  a penalty for responses that come close to the length limit

Expect   +T and +C help, most of all the entropy; +R changes little where responses are short
Cost     4 variants x 3 seeds x (40 steps and one evaluation), one after another
Result   nothing that can be told apart at this size: held-out avg@8 (three seeds, least to most)
         grpo 0.938 (0.930-0.944), +T 0.913 (0.868-0.947), +C 0.944 (0.941-0.948), +R 0.932
         (0.924-0.941); one seed of +T drifted after step 20 (LOG.md, 2026-12-01)

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
