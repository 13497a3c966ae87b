"""GRPO-TCR from nothing: every number of the recipe, in the order of the stages.

    python -m demyrl.train --config=configs/grpo_tcr.py:tiny --workdir=runs/x

Sizes: `tiny` learns on two CPU cores in minutes; `small` is the same recipe for a machine with more
time, with longer operands and a wider model; `smollm2` starts from a real pretrained model of 135M
parameters, SmolLM2-135M-Instruct, and still runs on a CPU. `qwen3_0_6b`, `qwen3_4b` and `qwen25_7b`
are for TPUs: `python -m demyrl.plan` says what they take (docs/tpu.md).
"""

import dataclasses

from ml_collections import ConfigDict

from demyrl.model.sizes import size

FAMILIES = (
    "arithmetic", "power_mod", "digit_sum", "lcm", "linear_equation",
    "seconds", "kinetic_energy", "electric_power", "momentum",
    "loop_output", "list_output", "linear_expression",
)  # fmt: skip


def get_config(name: str = "tiny") -> ConfigDict:
    """The locked config of one size; raises ValueError for a name that is not one."""
    if name not in SIZES:
        raise ValueError(f"there is no size {name!r} in grpo_tcr.py: use {' or '.join(SIZES)}.")
    config = ConfigDict(tiny())
    SIZES[name](config)
    return config.lock()


def tiny() -> dict:
    """All sections at the size of a laptop."""
    return {
        "seed": 0,
        "tokenizer": "",  # that of the source; or "builtin:tiny", or a folder with one
        "model": {
            "source": "builtin:tiny",  # or "" for random weights, a checkpoint folder, a workdir
            # The shape of random weights; a source brings its own.
            "vocab": 768,
            "width": 64,
            "layers": 2,
            "heads": 2,
            "kv_heads": 1,
            "head_dim": 64,
            "feed_forward": 128,
            "rope_theta": 10_000.0,
            "norm_eps": 1e-6,
            "qk_norm": True,
            "attention_bias": False,
            "tied_embeddings": True,
            "max_positions": 0,
            "dtype": "auto",  # float32 on a CPU, bfloat16 on accelerators
        },
        "chat": {
            "template": "",  # the tokenizer's own; or "builtin:hermes", or a file
            "keep": False,  # append turns although the template would rewrite earlier ones
            "prompts": "bare",  # or "agentic", "no_tool": what is said around a problem
        },
        "mesh": {"data": 1, "tensor": 1, "sequence": 1},
        "memory": {
            # What layers keep for the way back: "none" (all, on a mesh also gathered weights),
            # "dots" (products and attention), "full" (their input).
            "remat": "none",
            "moments": "float32",  # or "bfloat16": of the optimizer, rounded at random
            "gradients": "float32",  # or "bfloat16": what micro-batches add up to
            "offload": False,  # float32 parameters and moments in the host's memory
        },
        "head_chunk": 1024,  # tokens whose logits exist at a time
        "tools": {
            "enabled": True,
            "isolation": "bwrap",  # "unsafe" runs model-written code without isolation
            "workers": 2,
            "timeout_s": 2.0,
            "memory_mb": 256,
            "disk_mb": 8,
            "output_bytes": 4096,
            "delay_s": 0.0,
        },
        "problems": {
            "path": "",  # a file of training problems; "" makes them
            "families": FAMILIES,
            "digits": 2,
            "terms": 3,
            "eval_count": 96,
        },
        "collect": {
            "count": 6000,
            "in_flight": 128,
            "head_guess": 0.25,
            "slip": 0.25,
            "recover": 0.5,
            "double_check": 0.02,
        },
        "sft": {
            "demonstrations": "",  # a file of conversations
            "rows_per_step": 16,
            "max_steps": 800,
            "probe_every": 25,
            "probe_count": 96,
            "probe_enough": 0.95,  # probe value that starts the cool-down
            "cooldown_steps": 200,
            "save_every": 100,
            "learning_rate": 5e-3,
            "warmup_updates": 20,
            "final_share": 0.05,
            "beta1": 0.9,
            "beta2": 0.95,
            "weight_decay": 0.01,
            "clip_norm": 1.0,
            "skips": 5,  # updates in a row without a finite gradient that stop the run
            "pack": {"rows": 16, "row_tokens": 160, "rungs": 1},
        },
        "rollout": {
            "slots": 64,
            "context": 224,
            "turn_tokens": 96,
            "turns": 4,
            "calls": 4,
            "output_tokens": 40,
            "decode_steps": 16,
            "extend_rows": 16,
            "extend_lengths": (32, 96),
            "early_return": 0.75,
            "temperature": 1.0,
            "max_gap": 1e-4,  # mean |sampler - trainer| log-prob that a run in float32 starts with
        },
        "evaluate": {
            "problems": "",  # a file of held-out problems; "" makes them
            "samples": 8,
            "temperature": 1.0,
            "reply_start": "",  # text put before every first reply
        },
        "select": {"problems": 256, "samples": 8},
        "reward": {
            "tool_bonus": "off",
            "overlong": True,
            "max_len": 160,
            "cache_len": 64,
            "count_tool_tokens": True,
        },
        "loss": {
            "ratio": "token",  # or "sequence": one ratio a trajectory, as in GSPO
            "clip_low": 0.2,
            "clip_high": 0.28,
            "dual_clip": 10.0,  # 0: none
            "kl": 0.0,  # weight of the KL term to the first weights; 0: none
            "kl_estimator": "k3",  # or "k1", "k2"
            "aggregation": "token",  # or "sequence", "constant", "micro_batch"
        },
        "optimizer": {
            "learning_rate": 1e-3,
            "warmup_updates": 0,
            "decay_updates": 0,  # 0: the whole run, steps x updates
            "final_share": 0.1,
            "beta1": 0.9,
            "beta2": 0.95,
            "weight_decay": 0.0,
            "clip_norm": 1.0,
            "skips": 5,
        },
        "train": {
            "pool": "",  # a file of problems from select_problems; "" uses all
            "steps": 40,
            "problems": 16,  # P
            "samples": 8,  # G
            "updates": 4,
            "eval_every": 0,  # 0: never
            "save_every": 10,
            "keep": 2,
            "pack": {
                "rows": 16,  # of a micro-batch
                "row_tokens": 224,
                "rungs": 1,  # shapes: each has twice the rows of the one before, half as long
            },
        },
    }


def small(config: ConfigDict) -> None:
    """Longer operands and a wider model: hours, not minutes, on a CPU."""
    config.model.source, config.tokenizer = "", "builtin:tiny"
    config.model.width, config.model.feed_forward, config.model.layers = 128, 384, 4
    config.problems.digits, config.problems.terms = 3, 4
    config.collect.count, config.sft.max_steps = 20_000, 4000
    config.rollout.context, config.train.pack.row_tokens = 288, 288
    config.sft.pack.row_tokens = 256
    config.train.steps = 150


def smollm2(config: ConfigDict) -> None:
    """A pretrained model on a CPU: some hundred demonstrations, then RL steps of minutes each.

    `model.source` names what it was made for; set it to the folder that holds the checkpoint.
    """
    config.model.update(dataclasses.asdict(size("smollm2_135m", "auto")))
    config.model.source = "HuggingFaceTB/SmolLM2-135M-Instruct"
    config.chat.template = "builtin:hermes"  # its own template knows no tools
    config.head_chunk = 256
    config.problems.eval_count = 24
    config.collect.count = 600
    config.sft.update(
        rows_per_step=10, max_steps=24, probe_every=12, probe_count=12, cooldown_steps=12,
        save_every=8, learning_rate=2e-4, warmup_updates=4,
    )  # fmt: skip
    config.sft.pack.update(rows=2, row_tokens=512)
    config.rollout.update(
        slots=32, context=384, turn_tokens=96, output_tokens=48, extend_rows=4,
        extend_lengths=(32, 128), max_gap=1e-3,
    )  # fmt: skip
    config.evaluate.samples = 4
    config.select.problems, config.select.samples = 36, 6
    config.reward.max_len, config.reward.cache_len = 256, 96
    config.optimizer.learning_rate = 4e-5
    config.train.update(steps=12, problems=4, samples=8, updates=2, save_every=2)
    config.train.pack.update(rows=2, row_tokens=512)


def paper(config: ConfigDict) -> None:
    """The numbers of the paper (section 6 and the released scripts) for agents on TPUs.

    Not the paper's: a linear cool-down in SFT, rows of 24,576 tokens there, a tool result of up to
    1,024 tokens, and one limit for prompt and response together.

    `model.source` names what they were made for; set it to the folder that holds the checkpoint,
    `sft.demonstrations` to real trajectories, and `problems.path` to problems.
    """
    config.chat.prompts, config.chat.keep = "agentic", True
    config.head_chunk = 1024
    config.memory.remat = "full"
    config.tools.update(workers=16, timeout_s=30.0, memory_mb=1024, output_bytes=16_384)
    config.sft.update(
        rows_per_step=32, max_steps=465, probe_every=31, probe_count=32, cooldown_steps=140,
        probe_enough=2.0,  # never: all steps
        save_every=93, learning_rate=1e-5, warmup_updates=46, final_share=0.0, weight_decay=0.01,
    )  # fmt: skip
    config.rollout.update(
        context=2_560 + 20_480, turn_tokens=20_480, output_tokens=1_024, turns=16, calls=16,
        decode_steps=64, extend_lengths=(256, 1_024), temperature=1.0,
    )  # fmt: skip
    config.evaluate.samples = 32
    config.select.problems, config.select.samples = 4_096, 8
    config.reward.max_len, config.reward.cache_len = 20_480, 4_096
    config.optimizer.update(
        learning_rate=1e-6, final_share=1.0, beta2=0.999, weight_decay=0.01,
    )  # fmt: skip
    config.train.update(
        steps=470, problems=64, samples=16, updates=4, eval_every=10, save_every=30, keep=2
    )


def qwen3_4b(config: ConfigDict) -> None:
    """Qwen3-4B-Instruct-2507 on 16 chips of v5e: rows of up to 23,040 tokens."""
    paper(config)
    config.model.update(dataclasses.asdict(size("qwen3_4b_2507", "bfloat16")))
    config.model.source = "Qwen/Qwen3-4B-Instruct-2507"
    config.mesh.update(data=4, tensor=1, sequence=4)
    config.rollout.slots, config.rollout.extend_rows = 32, 4
    config.sft.pack.update(rows=4, row_tokens=24_576, rungs=3)
    config.train.pack.update(rows=4, row_tokens=24_576, rungs=3)


def qwen25_7b(config: ConfigDict) -> None:
    """Qwen2.5-7B-Instruct on 8 chips of v5p, or with mesh.data=4 on 16 of v6e."""
    paper(config)
    config.model.update(dataclasses.asdict(size("qwen2.5_7b", "bfloat16")))
    config.model.source = "Qwen/Qwen2.5-7B-Instruct"
    config.mesh.update(data=2, tensor=1, sequence=4)
    config.rollout.slots, config.rollout.extend_rows = 64, 4
    config.sft.pack.update(rows=4, row_tokens=24_576, rungs=3)
    config.train.pack.update(rows=4, row_tokens=24_576, rungs=3)


def qwen3_0_6b(config: ConfigDict) -> None:
    """Qwen3-0.6B on one chip of v5e or v6e, as in Colab: shorter rows, fewer problems."""
    paper(config)
    config.model.update(dataclasses.asdict(size("qwen3_0.6b", "bfloat16")))
    config.model.source = "Qwen/Qwen3-0.6B"
    config.memory.moments = "bfloat16"
    config.rollout.update(
        slots=16, extend_rows=4, context=4_096, turn_tokens=2_048, output_tokens=512, turns=8,
        calls=8,
    )  # fmt: skip
    config.reward.max_len, config.reward.cache_len = 3_072, 1_024
    config.sft.pack.update(rows=1, row_tokens=4_096, rungs=1)
    config.train.update(steps=200, problems=16, samples=8, updates=2)
    config.train.pack.update(rows=1, row_tokens=4_096, rungs=1)


SIZES = {
    "tiny": lambda config: None,
    "small": small,
    "smollm2": smollm2,
    "qwen3_0_6b": qwen3_0_6b,
    "qwen3_4b": qwen3_4b,
    "qwen25_7b": qwen25_7b,
}
