"""Problems in files: what is written comes back, and bad files say what is wrong where."""

import builtins
import dataclasses
import json

import pytest

from demyrl.data.problems import read_problems, read_verl, write_problems, write_rows
from demyrl.types import Problem

ONE = Problem("a-1", "lcm", "math", "What is the lcm of 12 and 18?", "36", "number")
TWO = dataclasses.replace(ONE, id="a-2", prompt="Größe?\nx", grader="text")
VERL = {
    "data_source": "dapo",
    "prompt": [{"role": "user", "content": "What is 1+1?"}],
    "ability": "MATH",
    "reward_model": {"ground_truth": "2"},
    "extra_info": {"index": 7},
}


def file_of(folder, *lines) -> str:
    path = folder / "problems.jsonl"
    path.write_text("\n".join(lines))
    return str(path)


def line_of(**changes) -> str:
    return json.dumps(dataclasses.asdict(ONE) | changes)


def test_problems_come_back_as_written(tmp_path):
    write_problems(tmp_path / "p.jsonl", [ONE, TWO])
    assert read_problems(tmp_path / "p.jsonl") == [ONE, TWO]


def test_blank_lines_are_skipped(tmp_path):
    assert read_problems(file_of(tmp_path, "", line_of(), "  ")) == [ONE]


def test_a_failed_write_keeps_the_old_file_and_leaves_nothing_else(tmp_path):
    write_rows(tmp_path / "p.jsonl", [{"old": 1}])
    with pytest.raises(TypeError):
        write_rows(tmp_path / "p.jsonl", [{"new": 1}, {"new": object()}])
    assert [path.read_text() for path in tmp_path.iterdir()] == ['{"old": 1}\n']


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([line_of(), "{"], r"problems.jsonl, line 2: not JSON"),
        (["[1]"], r"line 1: \[1\] is not an object"),
        ([line_of(hint="x")], r"unknown fields \['hint'\]"),
        (['{"id": "x"}'], r"missing fields \['answer', 'domain'"),
        ([line_of(answer=36)], r"answer is 36: expected a non-empty string"),
        ([line_of(prompt=" ")], r"prompt is ' '"),
        ([line_of(domain="art")], r"domain is 'art'"),
        ([line_of(grader="vibes")], r"grader is 'vibes'"),
        ([line_of(), "", line_of()], r"line 3: id 'a-1' stands on line 1 too"),
        ([""], r"holds no problems"),
    ],
)
def test_a_bad_file_says_where_and_what(tmp_path, lines, message):
    with pytest.raises(ValueError, match=message):
        read_problems(file_of(tmp_path, *lines))


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"nowhere.jsonl cannot be read"):
        read_problems(tmp_path / "nowhere.jsonl")


def test_a_file_that_is_not_text_is_named(tmp_path):
    (tmp_path / "p.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match=r"p.jsonl cannot be read"):
        read_problems(tmp_path / "p.jsonl")


def test_a_verl_row_becomes_a_problem(tmp_path):
    assert read_verl(file_of(tmp_path, json.dumps(VERL)), "number") == [
        Problem("dapo-7", "dapo", "math", "What is 1+1?", "2", "number")
    ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"reward_model": None}, "row 1: not a verl-style row"),
        ({"extra_info": {}}, "row 1: not a verl-style row"),
        ({"prompt": []}, "one user message"),
        ({"prompt": [{"role": "system", "content": "x"}]}, "one user message"),
        ({"ability": "code"}, "ability is 'code'"),
        ({"reward_model": {"ground_truth": ""}}, "answer is ''"),
    ],
)
def test_a_bad_verl_row_says_what_is_wrong(tmp_path, change, message):
    with pytest.raises(ValueError, match=message):
        read_verl(file_of(tmp_path, json.dumps(VERL | change)), "number")


def test_two_verl_rows_with_one_index_are_refused(tmp_path):
    with pytest.raises(ValueError, match="row 2: dapo-7 is the index of row 1 too"):
        read_verl(file_of(tmp_path, json.dumps(VERL), json.dumps(VERL)), "number")


def test_parquet_without_pyarrow_says_what_to_install(tmp_path, monkeypatch):
    real_import = builtins.__import__

    def without_pyarrow(name, *args, **kwargs):
        if name.startswith("pyarrow"):
            raise ImportError(name)
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_pyarrow)
    with pytest.raises(ValueError, match="install pyarrow"):
        read_verl(tmp_path / "p.parquet", "number")
