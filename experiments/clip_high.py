"""Does a higher upper clip keep exploration alive, and where is it too high?

Expect   entropy falls later as clip_high rises; accuracy peaks in between, not at the end
Cost     4 variants x 3 seeds x (40 steps and one evaluation), one after another
Result   not run yet
"""

BASE = "configs/grpo_tcr.py:tiny"
VARIANTS = {
    "symmetric": {"loss.clip_high": 0.2},
    "recipe": {},
    "higher": {"loss.clip_high": 0.315},
    "highest": {"loss.clip_high": 0.35},
}
