"""Problems of the package reasoning-gym, each with what the package's own verifier needs.

    python -m demyrl.data.reasoning_gym --datasets basic_arithmetic,gcd --count 200 --seed 0 \\
        --set basic_arithmetic.min_terms=2 --out problems.jsonl

The file is one of `problems.write_problems`. A problem's `answer` is JSON: the dataset, its
settings, and the package's answer and metadata; its grader is "reasoning_gym". The package is an
optional extra of exactly one version, because problems and verdicts depend on it, and because only
that version's scorers have been read: what a policy writes is never run as code. A dataset that
stands in REFUSED, or in neither table, is not used.
"""

import argparse
import dataclasses
import functools
import importlib.metadata
import itertools
import json
import random
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from demyrl.data.generators import PATIENCE, Split, digest, shares, split_of
from demyrl.data.problems import write_problems
from demyrl.types import Domain, Problem

GRADER = "reasoning_gym"
VERSION = "0.1.25"
INSTALL = f"pip install reasoning-gym=={VERSION}"
CHUNK = 128  # problems drawn from one instance: some datasets fill a list when they are made
MAX_CHARS = 8000  # of a reply; the longest answer seen, 127 moves of a tower, has half of that
NONSENSE = ("?", "nan")  # a verifier that accepts one of these accepts anything
KEPT = {"answer", "dataset", "settings", "metadata"}

CALCULATIONS = (  # the package's algebra, arithmetic and geometry, and four that ask for numbers
    "base_conversion count_primes cryptarithm number_sequence polynomial_equations "
    "simple_equations basic_arithmetic calendar_arithmetic chain_sum count_bits "
    "decimal_arithmetic decimal_chain_sum dice fraction_simplification gcd gsm_symbolic lcm "
    "leg_counting number_format power_function prime_factorization products time_intervals "
    "advanced_geometry simple_geometry"
)
PUZZLES = (  # its other categories: algorithmic, arc, cognition, games, graphs, induction, logic
    "ab binary_alternation caesar_cipher game_of_life group_anagrams jugs letter_counting "
    "letter_jumble manipulate_matrix number_filtering palindrome_generation "
    "palindrome_partitioning pool_matrix rotate_matrix rotten_oranges sentence_reordering "
    "spell_backward string_manipulation string_splitting string_synthesis word_sequence_reversal "
    "word_sorting arc_1d color_cube_rotation figlet_font modulo_grid needle_haystack "
    "rectangle_count emoji_mystery futoshiki kakurasu mahjong_puzzle maze mini_sudoku sokoban "
    "sudoku survo tower_of_hanoi tsumego course_schedule family_relationships largest_island "
    "path_star quantum_lock shortest_path acre aiw circuit_logic knights_knaves self_reference "
    "syllogism zebra_puzzles"
)
PROGRAMS = "bf"  # asks what a program prints

DOMAINS: dict[str, Domain] = {
    **dict.fromkeys(CALCULATIONS.split(), "math"),
    **dict.fromkeys(PUZZLES.split(), "science"),  # a Problem has no domain for puzzles
    **dict.fromkeys(PROGRAMS.split(), "code"),
}

RUNS_REPLY = "its scorer runs the reply as Python code"
RUNS_FILE = "its scorer runs text of the problem file as Python code"
NO_ANSWER = "it gives no answer of its own, so its scorer cannot be tried on one"
NOT_JSON = "what its scorer compares with does not survive JSON"
UNSTABLE = "one seed gives other problems or answers in another process"
ACCEPTS = "its scorer accepts wrong answers"
REFUSED: dict[str, str] = {
    **dict.fromkeys(("binary_matrix", "n_queens", "spiral_matrix", "string_insertion"), RUNS_REPLY),
    **dict.fromkeys(("countdown", "puzzle24", "polynomial_multiplication"), RUNS_REPLY),
    **dict.fromkeys(("intermediate_integration", "simple_integration"), RUNS_REPLY),
    **dict.fromkeys(("bitwise_arithmetic", "number_sorting"), RUNS_FILE),
    **dict.fromkeys(("boxnet", "graph_color", "rubiks_cube", "rush_hour"), NO_ANSWER),
    "propositional_logic": NO_ANSWER,
    **dict.fromkeys(("arc_agi", "rearc"), NOT_JSON),
    **dict.fromkeys(("isomorphic_strings", "knight_swap", "ransom_note", "word_ladder"), UNSTABLE),
    "list_functions": UNSTABLE,
    "coin_flip": f"{ACCEPTS}: 0 for every small probability",
    "complex_arithmetic": f"{ACCEPTS}: nan for every number",
    "game_of_life_halting": f"{ACCEPTS}: any text",
    "codeio": "to draw a problem it runs programs that a language model wrote",
    "composite": "it only mixes others; name those",
}


def require_reasoning_gym() -> None:
    """Raises ValueError with the command to run unless the right version is installed."""
    try:
        import reasoning_gym  # noqa: F401
    except ImportError as error:
        raise ValueError(
            f"problems with the grader {GRADER!r} need the package reasoning-gym: {INSTALL}"
        ) from error
    found = importlib.metadata.version("reasoning-gym")
    if found != VERSION:
        raise ValueError(
            f"reasoning-gym is {found}, but its scorers were read, and its problems are the same, "
            f"only in {VERSION}: {INSTALL}"
        )


def gym_problems(
    settings: Mapping[str, Mapping[str, Any]], split: Split, count: int, seed: int
) -> list[Problem]:
    """`count` different problems of one split, evenly over the datasets that `settings` names.

    A problem's split follows from a hash of its question, so train and eval never share one,
    whatever seeds and settings. The same arguments give the same list in every process. Raises
    ValueError for a dataset, a setting or a count that cannot be had.
    """
    require_reasoning_gym()
    if count < 1 or split not in ("train", "eval") or not settings:
        raise ValueError(
            f"count is {count}, split is {split!r}, datasets are {list(settings)}: expected at "
            "least 1 problem, 'train' or 'eval', and at least one dataset."
        )
    for name, chosen in settings.items():
        check_dataset(name)
        check_settings(name, chosen)
    found = []
    for name, share in zip(settings, shares(count, len(settings)), strict=True):
        found += draw(name, settings[name], split, share, seed)
    random.Random(seed).shuffle(found)
    return found


def draw(
    name: str, settings: Mapping[str, Any], split: Split, count: int, seed: int
) -> list[Problem]:
    """`count` different problems of one dataset; ValueError when it has too few."""
    found: dict[str, Problem] = {}
    idle = 0
    for entry in entries(name, settings, seed):
        if len(found) == count:
            break
        question = entry["question"].strip()
        known = question in found or split_of(name, question) != split
        answer = None if known else answer_of(name, settings, entry)
        if answer is None:
            idle += 1
        else:
            found[question] = problem_of(name, question, answer)
            idle = 0
        if idle == PATIENCE:
            raise ValueError(
                f"dataset {name!r} gave only {len(found)} different {split} problems of the "
                f"{count} asked for that its own scorer can judge, with {dict(settings)}. Ask for "
                "fewer, or change its settings."
            )
    return list(found.values())


def entries(name: str, settings: Mapping[str, Any], seed: int) -> Iterator[dict[str, Any]]:
    """The package's entries without end; different seeds share none but by chance."""
    for chunk in itertools.count():
        chunk_seed = digest(f"{name}|{seed}|{chunk}") % 2**31
        dataset = instance(name, settings, chunk_seed, CHUNK)
        for index in range(CHUNK):
            yield dataset[index]


def answer_of(name: str, settings: Mapping[str, Any], entry: Mapping[str, Any]) -> str | None:
    """The JSON that a problem keeps; None where it cannot be kept, or its answer not be handed in.

    Raises ValueError for a dataset whose scorer accepts nonsense.
    """
    own = entry["answer"]
    if not isinstance(own, str) or not boxable(own.strip()):
        return None
    metadata = {} if only_compares(name, settings) else entry["metadata"]
    kept = {"answer": own, "dataset": name, "settings": settings, "metadata": metadata}
    try:
        answer = json.dumps(kept, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError):
        return None
    if not solves(answer, own.strip()):
        return None
    for text in NONSENSE:
        if text != own.strip() and solves(answer, text):
            raise ValueError(f"dataset {name!r} is refused: its scorer accepts {text!r}.")
    return answer


def boxable(text: str) -> bool:
    """Whether the text comes back whole out of a box: every brace has its partner in it."""
    depth = 0
    bare = re.sub(r"\\.", "", text, flags=re.DOTALL)
    for character in bare:
        depth += (character == "{") - (character == "}")
        if depth < 0:
            return False
    return bool(text) and depth == 0 and "\\" not in bare


def problem_of(name: str, question: str, answer: str) -> Problem:
    return Problem(
        id=f"{GRADER}-{name}-{digest(question) % 16**12:012x}",
        source=f"{GRADER}/{name}",
        domain=DOMAINS[name],
        prompt=question,
        answer=answer,
        grader=GRADER,
    )


# The verifier


def solves(answer: str, text: str) -> bool:
    """Whether the package's scorer gives `text` its full score, 1; part of it is not enough.

    `answer` is a problem's. A text that the scorer stumbles over is wrong. Raises ValueError when
    `answer` is no such JSON, and what the scorer raises on the package's own answer.
    """
    kept = read_answer(answer)
    if len(text) > MAX_CHARS:
        return False
    dataset = scorer(kept["dataset"], json.dumps(kept["settings"]))
    try:
        return bool(dataset.score_answer(text, kept) == 1.0)
    except Exception:  # scorers parse as they please, and a reply may be anything
        own = read_answer(answer)
        dataset.score_answer(own["answer"], own)
        return False


def check_problems(problems: Iterable[Problem], where: str) -> None:
    """Raises ValueError when the package's problems in the file `where` cannot be judged here."""
    ours = [problem for problem in problems if problem.grader == GRADER]
    if ours:
        require_reasoning_gym()
    for problem in ours:
        try:
            kept = read_answer(problem.answer)
            check_settings(kept["dataset"], kept["settings"])
        except ValueError as error:
            raise ValueError(f"{where}, problem {problem.id!r}: {error}") from error


def read_answer(answer: str) -> dict[str, Any]:
    """What `answer_of` wrote; ValueError for anything else, and for a refused dataset."""
    try:
        kept = json.loads(answer)
    except json.JSONDecodeError as error:
        raise ValueError(f"answer {answer!r:.60} is not JSON ({error}).") from error
    if not isinstance(kept, dict) or set(kept) != KEPT or not isinstance(kept["settings"], dict):
        raise ValueError(f"answer {answer!r:.60} is not an object with {', '.join(sorted(KEPT))}.")
    check_dataset(str(kept["dataset"]))
    return kept


def check_dataset(name: str) -> None:
    """Raises ValueError for a dataset whose problems are not used, with the reason."""
    if name in REFUSED:
        raise ValueError(f"dataset {name!r} is refused: {REFUSED[name]}.")
    if name not in DOMAINS:
        raise ValueError(f"there is no dataset {name!r}: choose from {', '.join(sorted(DOMAINS))}.")


def check_settings(name: str, settings: Mapping[str, Any]) -> None:
    """Raises ValueError for a setting that the dataset does not have, or a value it refuses."""
    from reasoning_gym.factory import DATASETS

    fields = [field.name for field in dataclasses.fields(DATASETS[name][1])]
    known = [field for field in fields if field not in ("seed", "size")]
    for key in settings:
        if key not in known:
            raise ValueError(f"dataset {name!r} has no setting {key!r}: it has {', '.join(known)}.")
    try:
        scorer(name, json.dumps(settings))
    except (AssertionError, TypeError, ValueError) as error:
        raise ValueError(f"dataset {name!r} cannot be had with {settings}: {error}.") from error


def only_compares(name: str, settings: Mapping[str, Any]) -> bool:
    """Whether the scorer is the package's default one, which looks at nothing but the answer."""
    from reasoning_gym.dataset import ProceduralDataset

    ours = type(scorer(name, json.dumps(settings)))
    return ours.score_answer is ProceduralDataset.score_answer


@functools.lru_cache(maxsize=128)
def scorer(name: str, settings: str) -> Any:
    """The package's object that scores; `settings` is JSON, and its own draws are never used."""
    return instance(name, json.loads(settings), seed=0, size=1)


def instance(name: str, settings: Mapping[str, Any], seed: int, size: int) -> Any:
    import reasoning_gym

    return reasoning_gym.create_dataset(name, seed=seed, size=size, **settings)


# The command line


def settings_of(datasets: str, assignments: list[str]) -> dict[str, dict[str, Any]]:
    """Each named dataset with its settings, from "a,b" and lines like "a.min_terms=2".

    A value is JSON; what is not JSON is text. Raises ValueError for a dataset that is named twice,
    and an assignment of another form or to a dataset that is not named.
    """
    names = [name.strip() for name in datasets.split(",") if name.strip()]
    if len(set(names)) != len(names):
        raise ValueError(f"--datasets is {datasets}: name each dataset once.")
    chosen: dict[str, dict[str, Any]] = {name: {} for name in names}
    for assignment in assignments:
        target, equals, value = assignment.partition("=")
        name, dot, key = target.partition(".")
        if not equals or not dot or name not in chosen:
            raise ValueError(
                f"--set {assignment}: expected DATASET.SETTING=VALUE, where DATASET is one of "
                f"{', '.join(names)}."
            )
        try:
            chosen[name][key] = json.loads(value)
        except json.JSONDecodeError:
            chosen[name][key] = value
    return chosen


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m demyrl.data.reasoning_gym")
    parser.add_argument("--datasets", required=True, help="names with commas between them")
    parser.add_argument("--count", type=int, required=True, help="problems in all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--split", choices=("train", "eval"), default="train")
    parser.add_argument("--set", action="append", default=[], metavar="DATASET.SETTING=VALUE")
    parser.add_argument("--out", required=True, help="the .jsonl file to write")
    args = parser.parse_args()
    try:
        settings = settings_of(args.datasets, args.set)
        problems = gym_problems(settings, args.split, args.count, args.seed)
        write_problems(args.out, problems)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    print(f"{args.out}: {len(problems)} {args.split} problems")


if __name__ == "__main__":
    main()
