"""The frozen settings of every stage, which `recipe.read` makes of a config and checks."""

import dataclasses

from demyrl.data.demonstrations import Habits
from demyrl.data.generators import ProblemConfig
from demyrl.learn.batch import PackConfig
from demyrl.learn.loss import LossConfig
from demyrl.learn.optimizer import OptimizerConfig
from demyrl.learn.update import MemoryConfig
from demyrl.model.config import ModelConfig
from demyrl.model.mesh import MeshConfig
from demyrl.rewards.grade import RewardConfig
from demyrl.rollout.episode import EpisodeConfig
from demyrl.rollout.sampler import SamplerConfig
from demyrl.tools.toolbox import ToolConfig


@dataclasses.dataclass(frozen=True)
class ChatConfig:
    """How problems become prompts, and turns tokens."""

    template: str  # "" for the tokenizer's own, "builtin:hermes", or a file
    keep: bool  # append turns although the template would rewrite earlier ones
    prompts: str  # what is said around a problem, see text/prompts.py


@dataclasses.dataclass(frozen=True)
class CollectSettings:
    """How many problems the teacher solves, and how many episodes run together."""

    count: int
    in_flight: int


@dataclasses.dataclass(frozen=True)
class SftConfig:
    """The cold start (paper, section 3.1)."""

    demonstrations: str
    rows_per_step: int
    max_steps: int
    probe_every: int
    probe_count: int
    probe_enough: float
    cooldown_steps: int
    save_every: int


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """The RL loop (paper, section 2.3)."""

    pool: str
    steps: int
    problems: int
    samples: int
    updates: int
    eval_every: int
    save_every: int
    keep: int


@dataclasses.dataclass(frozen=True)
class SelectConfig:
    """Model-aware selection (paper, section 3.3)."""

    problems: int
    samples: int


@dataclasses.dataclass(frozen=True)
class EvaluateConfig:
    problems: str
    samples: int
    temperature: float
    reply_start: str


@dataclasses.dataclass(frozen=True)
class RolloutSettings:
    """What the three parts of the rollout need."""

    sampler: SamplerConfig
    episode: EpisodeConfig
    early_return: float
    max_gap: float


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Every stage's settings, checked."""

    config_json: str  # the config as JSON, with the shape of the source
    seed: int
    tokenizer: str
    chat: ChatConfig
    source: str
    head_chunk: int
    model: ModelConfig
    mesh: MeshConfig
    memory: MemoryConfig
    tools: ToolConfig
    problems: ProblemConfig
    problems_path: str
    eval_count: int
    collect: CollectSettings
    habits: Habits
    sft: SftConfig
    sft_optimizer: OptimizerConfig
    sft_pack: PackConfig
    rollout: RolloutSettings
    evaluate: EvaluateConfig
    select: SelectConfig
    reward: RewardConfig
    loss: LossConfig
    aggregation: str
    optimizer: OptimizerConfig
    train: TrainConfig
    pack: PackConfig
