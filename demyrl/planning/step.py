"""The least time of a whole RL step on a slice, from what its programs must do."""

from demyrl.learn.batch import shapes
from demyrl.planning import flops
from demyrl.planning.chips import Chip
from demyrl.planning.programs import Planned, Scene, decode_step, extend_work
from demyrl.planning.work import Work, least_seconds


def step_seconds(scene: Scene, programs: list[Planned], chip: Chip) -> dict[str, float]:
    """Seconds of each phase and of the step, when all trajectories are of the average length.

    Packing is taken to fill all rows, every slot to be busy, and tools to answer at once.
    """
    by_name = {program.name: program.work for program in programs}
    train = scene.recipe.train
    count, tokens = train.problems * train.samples, scene.load.tokens
    model, needed = scene.recipe.model, count * tokens * scene.load.sampled
    rows, row_tokens = shapes(scene.recipe.pack)[0]
    micro_batches = count * tokens / (rows * row_tokens)
    each = [tokens] * count
    forward = flops.forward(model, each, needed) / scene.mesh.size
    trained = flops.training(model, each, needed, scene.recipe.memory.remat) / scene.mesh.size

    def moved(name: str) -> float:
        return by_name[name].bytes * micro_batches

    size = f"{rows}x{row_tokens}"
    scored = Work(forward, moved(f"score_{size}"))
    updated = Work(trained, moved(f"update_{size}"))
    applied = least_seconds(by_name["update_apply"], chip) * train.updates
    loaded = by_name["layer_for_sampling"].times(model.layers).plus(by_name["rest_for_sampling"])
    seconds = {
        "rollout": least_seconds(loaded, chip) + rollout_seconds(scene, chip),
        "score": least_seconds(scored, chip),
        "update": least_seconds(updated, chip) + applied,
    }
    return seconds | {"step": sum(seconds.values())}


def rollout_seconds(scene: Scene, chip: Chip) -> float:
    """Seconds of feeding what the policy did not choose, and of sampling what it did."""
    config, train, load = scene.recipe.rollout.sampler, scene.recipe.train, scene.load
    total = train.problems * train.samples * load.tokens
    longest = config.extend_lengths[-1]
    feeds = total * (1 - load.sampled) / (config.extend_rows * longest)
    steps = total * load.sampled / config.slots
    fed = least_seconds(extend_work(scene, longest), chip) * feeds
    return fed + least_seconds(decode_step(scene, config.slots, load.tokens / 2), chip) * steps
