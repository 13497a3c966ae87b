"""Problems in files: our own rows and the verl-style rows of published data sets.

One small function per format. Every error names the file, the row and what is wrong with it.
"""

import dataclasses
import json
from collections.abc import Iterable, Iterator
from typing import Any, get_args

from demyrl import storage
from demyrl.storage import Place
from demyrl.types import Domain, Problem

DOMAINS: tuple[str, ...] = get_args(Domain)
GRADERS = ("number", "text", "expression", "reasoning_gym")
FIELDS = tuple(field.name for field in dataclasses.fields(Problem))
ABILITIES: dict[str, Domain] = {"math": "math", "science": "science"}


def write_problems(path: Place | str, problems: Iterable[Problem]) -> None:
    """Writes one JSON object a line; the file appears whole or not at all."""
    write_rows(path, map(dataclasses.asdict, problems))


def write_rows(path: Place | str, rows: Iterable[dict[str, Any]]) -> None:
    """Writes rows as JSON lines; equal rows, equal bytes. The file appears whole or not at all."""
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    storage.write_text(storage.path(path), text)


def read_problems(path: Place | str) -> list[Problem]:
    """The problems of a file that `write_problems` wrote, in its order.

    Raises ValueError, naming file and line, for a file that cannot be read or is empty, a row that
    is not a problem, and an id that occurs twice; and, naming the file, when problems of
    reasoning-gym cannot be judged here.
    """
    problems, seen = [], {}
    for line, row in json_lines(storage.path(path)):
        where = f"{path}, line {line}"
        problem = problem_of(row, where)
        if problem.id in seen:
            raise ValueError(f"{where}: id {problem.id!r} stands on line {seen[problem.id]} too.")
        seen[problem.id] = line
        problems.append(problem)
    if not problems:
        raise ValueError(f"{path} holds no problems: expected one JSON object a line.")
    from demyrl.data.reasoning_gym import check_problems  # here, as it writes with this module

    check_problems(problems, str(path))
    return problems


def problem_of(row: Any, where: str) -> Problem:
    """One checked row as a Problem; ValueError names `where` and the field."""
    if not isinstance(row, dict):
        raise ValueError(f"{where}: {row!r:.60} is not an object with {', '.join(FIELDS)}.")
    if set(row) != set(FIELDS):
        missing, unknown = sorted(set(FIELDS) - set(row)), sorted(set(row) - set(FIELDS))
        raise ValueError(
            f"{where}: missing fields {missing}, unknown fields {unknown}; "
            f"a problem has {', '.join(FIELDS)}."
        )
    for name in FIELDS:
        if not isinstance(row[name], str) or not row[name].strip():
            raise ValueError(f"{where}: {name} is {row[name]!r:.60}: expected a non-empty string.")
    if row["domain"] not in DOMAINS:
        raise ValueError(f"{where}: domain is {row['domain']!r}: expected one of {DOMAINS}.")
    if row["grader"] not in GRADERS:
        raise ValueError(f"{where}: grader is {row['grader']!r}: expected one of {GRADERS}.")
    return Problem(**row)


def read_verl(path: Place | str, grader: str) -> list[Problem]:
    """Problems from verl-style columns in a .jsonl or .parquet file, all with one grader.

    The columns are data_source, prompt (a list with one user message), ability,
    reward_model.ground_truth and extra_info.index. Raises ValueError, naming file and row, for a
    row of another shape, and for an ability without a grader here (tests of programs).
    """
    path = storage.path(path)
    rows = parquet_rows(path) if path.suffix == ".parquet" else json_lines(path)
    problems, seen = [], {}
    for number, row in rows:
        problem = verl_problem(row, grader, f"{path}, row {number}")
        if problem.id in seen:
            raise ValueError(
                f"{path}, row {number}: {problem.id} is the index of row {seen[problem.id]} too."
            )
        seen[problem.id] = number
        problems.append(problem)
    if not problems:
        raise ValueError(f"{path} holds no problems.")
    return problems


def verl_problem(row: Any, grader: str, where: str) -> Problem:
    """One verl-style row as a Problem; ValueError names `where` and what is wrong."""
    try:
        source, messages = row["data_source"], row["prompt"]
        ability, answer = str(row["ability"]).lower(), row["reward_model"]["ground_truth"]
        index = (row.get("extra_info") or {})["index"]
        if len(messages) != 1 or messages[0]["role"] != "user":
            raise ValueError(f"{where}: prompt must be a list with one user message.")
        prompt = messages[0]["content"]
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{where}: not a verl-style row ({error!r}).") from error
    if ability not in ABILITIES:
        raise ValueError(
            f"{where}: ability is {ability!r}: only {', '.join(ABILITIES)} can be graded. "
            "Drop these rows first."
        )
    return problem_of(
        {
            "id": f"{source}-{index}",
            "source": source,
            "domain": ABILITIES[ability],
            "prompt": prompt,
            "answer": answer,
            "grader": grader,
        },
        where,
    )


def json_lines(path: Place) -> Iterator[tuple[int, Any]]:
    """Line numbers from 1 and the JSON values of the lines that are not blank."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read: {error}.") from error
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                yield number, json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}, line {number}: not JSON ({error}).") from error


def parquet_rows(path: Place) -> Iterator[tuple[int, Any]]:
    """Row numbers from 0 and the rows of a parquet file; needs pyarrow."""
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise ValueError(f"{path}: install pyarrow to read parquet files.") from error
    try:
        with path.open("rb") as file:
            rows = pyarrow.parquet.read_table(file).to_pylist()
    except (OSError, pyarrow.lib.ArrowException) as error:
        raise ValueError(f"{path} cannot be read: {error}.") from error
    yield from enumerate(rows)
