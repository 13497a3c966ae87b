"""What the figures of a run ask of `metrics.jsonl`: one entry, one question. Data only."""

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class Chart:
    """One question to `metrics.jsonl`."""

    name: str  # of the file
    title: str
    unit: str  # label of the vertical axis
    lines: Mapping[str, str]  # metric -> label
    share: bool = False  # from 0 to 1, shown as percent
    log: bool = False
    points: bool = False  # add the evaluations made while training
    reading: str = ""  # what to look for


CHARTS = (
    Chart(
        "learning",
        "Right answers",
        "share right",
        {"reward/pass_at_g": "pass@G", "reward/avg_at_g": "avg@G"},
        share=True,
        points=True,
        reading="pass@G counts a problem with one right sample; the gap to avg@G is what training "
        "can still turn into reliable answers.",
    ),
    Chart(
        "reward",
        "Reward",
        "mean reward",
        {"reward/mean": "total", "reward/overlong": "length penalty"},
        reading="The outcome is 1 or -1, to which the shaping terms are added.",
    ),
    Chart(
        "entropy",
        "Policy entropy",
        "nats per sampled token",
        {"policy/entropy": "entropy"},
        reading="An early fall towards 0 means that the policy stopped exploring.",
    ),
    Chart(
        "tool_use",
        "Tool use",
        "share",
        {"rollout/call_share": "trajectories with a call", "tools/ok": "calls that ran"},
        share=True,
        reading="How often the tool is used, and how often the program runs to its end.",
    ),
    Chart(
        "failures",
        "Failed calls by cause",
        "share of calls",
        {
            "tools/error": "error",
            "tools/malformed": "malformed",
            "tools/timeout": "timeout",
            "tools/output_limit": "output limit",
            "tools/not_executed": "not executed",
        },
        share=True,
        reading="Errors are the program's, malformed calls the writing's, timeouts often loops.",
    ),
    Chart(
        "calls",
        "Turns and calls",
        "per trajectory",
        {"rollout/turns": "turns", "rollout/calls": "calls"},
        reading="More calls with less thought is the reactive way, the reverse the deliberative.",
    ),
    Chart(
        "length",
        "Length",
        "tokens per trajectory",
        {
            "rollout/response_tokens": "response with tool output",
            "rollout/sampled_tokens": "written by the policy",
        },
        reading="Growth without more right answers is padding; the length penalty should stop it.",
    ),
    Chart(
        "truncated",
        "Cut off and equal groups",
        "share",
        {
            "rollout/truncated": "trajectories cut off",
            "reward/equal_groups": "groups that teach nothing",
            "reward/solved_none": "groups never right",
            "reward/solved_all": "groups always right",
        },
        share=True,
        reading="A group whose rewards are all equal has no advantage to learn from.",
    ),
    Chart(
        "clipping",
        "Clipped share of the loss",
        "share of trained weight",
        {
            "loss/clipped_high": "upper clip",
            "loss/clipped_low": "lower clip",
            "loss/dual_clipped": "dual clip",
        },
        share=True,
        reading="How much of an update is held back because the policy moved far enough.",
    ),
    Chart(
        "gradient",
        "Gradient norm",
        "global norm",
        {"optim/grad_norm": "gradient norm"},
        reading="Before clipping. Spikes come before many collapses.",
    ),
    Chart(
        "sampler_gap",
        "Sampler against trainer",
        "|difference| of log-probs, nats",
        {"policy/sampler_gap": "mean", "policy/sampler_gap_max": "largest"},
        log=True,
        reading="The first number to look at when a run goes bad: it should stay tiny and flat.",
    ),
    Chart(
        "kl",
        "Distance moved in a step",
        "KL to the sampling policy, nats",
        {"loss/kl_to_old": "KL"},
        reading="How far the updates of one step take the policy.",
    ),
    Chart(
        "time",
        "Where the time goes",
        "seconds per step",
        {
            "time/step_s": "whole step",
            "time/rollout_s": "rollout",
            "time/score_s": "old log-probs",
            "time/update_s": "updates",
        },
        reading="The rollout includes the time tools take.",
    ),
    Chart(
        "sft_loss",
        "Cold start: loss",
        "nats per token",
        {"sft/loss": "loss"},
        log=True,
        reading="Cross-entropy of the assistant's tokens in the demonstrations.",
    ),
    Chart(
        "sft_probe",
        "Cold start: copying into the call",
        "share of calls exactly right",
        {"sft/probe_copy": "held-out calls"},
        share=True,
        reading="Copying operands into the program emerges suddenly; training stops on it.",
    ),
)
