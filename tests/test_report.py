"""The report: what it says of a made-up run, and that nothing a model writes can break it."""

import json
import re
import subprocess
import sys
from html.parser import HTMLParser

import pytest

from demyrl.analysis import report, stats
from demyrl.analysis.run_folder import concerns, load
from demyrl.analysis.transcript import examples, transcript

ATTACK = "<script>alert('x')</script><img src=http://evil.example/x.png>&\u202e"


def trajectory(problem="math-1", sample=0, correct=True, statuses=("ok",), text="thought", **other):
    pieces = [{"kind": "prompt", "turn": -1, "text": "the prompt", "mean_logprob": None}]
    for turn, status in enumerate(statuses):
        called = f"<think>{text}</think><tool_call>{{}}</tool_call>"
        pieces.append({"kind": "sampled", "turn": turn, "text": called, "mean_logprob": -0.25})
        pieces.append({"kind": "tool", "turn": turn, "text": status, "mean_logprob": None})
    pieces.append({"kind": "sampled", "turn": 9, "text": f"{text} 42", "mean_logprob": -0.5})
    row = {
        "problem_id": problem,
        "domain": problem.partition("-")[0],
        "source": "products",
        "prompt": "What is 6 * 7?",
        "answer": "42",
        "sample": sample,
        "step": 0,
        "reward": {"outcome": 1.0 if correct else -1.0, "tool_bonus": 0.0, "total": 1.0},
        "correct": correct,
        "stop": "answered",
        "stops": ["called", "ended"],
        "reply": "42",
        "answer_given": "42" if correct else None,
        "isolation": "bubblewrap",
        "calls": [{"name": "code_interpreter", "arguments": {}} for _ in statuses],
        "results": [{"status": s, "output": "", "seconds": 0.1} for s in statuses],
        "pieces": pieces,
        "response_len": 30,
        "sampled_len": 20,
    }
    return {**row, **other}


def write_jsonl(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_evaluation(folder, right, text="thought"):
    rows = [
        trajectory(f"{domain}-{problem}", sample, sample < right, text=text)
        for domain in ("math", "code")
        for problem in range(3)
        for sample in range(4)
    ]
    write_jsonl(folder / "rollouts" / "step_000000.jsonl", rows)
    flat = [{**row, "answer": row["answer_given"], "calls": len(row["calls"])} for row in rows]
    (folder / "evaluation.json").write_text(json.dumps({**stats.summarize(flat, 4), "rows": []}))


def training_rows():
    return [
        {"step": step, "reward/avg_at_g": 0.25 + 0.25 * step, "policy/entropy": 0.5}
        for step in range(3)
    ]


def write_quickstart(root, text="thought"):
    write_jsonl(root / "sft" / "metrics.jsonl", [{"step": 0, "sft/loss": 2.0}])
    write_jsonl(root / "rl" / "metrics.jsonl", training_rows())
    rows = [trajectory(text=text), trajectory(sample=1, correct=False, statuses=("error",))]
    write_jsonl(root / "rl" / "rollouts" / "step_000002.jsonl", rows)
    (root / "rl" / "config.json").write_text(json.dumps({"loss": {"clip_high": 0.28}}))
    (root / "rl" / "environment.json").write_text(json.dumps([{"started": "2026-01-05T10:00:00Z"}]))
    for folder, right in (("eval_sft", 1), ("eval_rl", 3), ("eval_rl_no_tool", 0)):
        write_evaluation(root / folder, right, text)
    summary = {"seed": 7, "sft": {}, "rl": {}, "rl_no_tool": {}, "seconds": {"sft": 100, "rl": 50}}
    (root / "summary.json").write_text(json.dumps(summary))
    return root


class Structure(HTMLParser):
    """Collects the tags and checks that they nest."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.links = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.links += [v for k, v in attributes if k in ("src", "href", "srcset")]
        if tag not in ("meta", "img", "source", "input"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory):
    """The page of a quickstart whose model wrote markup, and its folder."""
    root = write_quickstart(tmp_path_factory.mktemp("quickstart"), text=ATTACK)
    assert report.main(["--workdir", str(root)]) == 0
    return root, (root / "report.html").read_text()


def test_the_headline_is_the_change_on_held_out_problems(quickstart):
    assert "<h1>From 25% to 75% right</h1>" in quickstart[1]


def test_the_table_has_each_model_in_each_domain(quickstart):
    assert quickstart[1].count("</span>RL without tool</td>") == 3
    assert '<th class="group" colspan="5">Code</th>' in quickstart[1]


def test_markup_of_the_model_stays_text(quickstart):
    assert "script" not in Structure(quickstart[1]).tags
    assert "&lt;script&gt;alert(&#x27;x&#x27;)" in quickstart[1]


def test_invisible_characters_of_the_model_are_shown_as_unknown(quickstart):
    assert "\u202e" not in quickstart[1]


def test_the_page_needs_no_other_file_and_no_network(quickstart):
    links = Structure(quickstart[1]).links
    assert len(links) > 6
    assert all(link.startswith(("data:image/png;base64,", "#")) for link in links)
    assert not re.search(r"@import|url\(", quickstart[1])


def test_tags_nest(quickstart):
    assert Structure(quickstart[1]).open == []


def test_links_of_the_navigation_have_a_target(quickstart):
    targets = [link[1:] for link in Structure(quickstart[1]).links if link.startswith("#")]
    assert targets and all(f'<section id="{target}">' in quickstart[1] for target in targets)


def test_the_figures_are_written_beside_the_page(quickstart):
    drawn = {path.name for path in (quickstart[0] / "figures").glob("*.png")}
    assert drawn == {"before_after.png", "learning.png", "entropy.png", "sft_loss.png"}


def test_the_config_and_the_time_of_the_stages_are_shown(quickstart):
    assert "<code>loss.clip_high</code></td><td>0.28</td>" in quickstart[1]
    assert "150 s" in quickstart[1]


def test_a_training_workdir_alone_gives_a_report(tmp_path):
    write_jsonl(tmp_path / "metrics.jsonl", training_rows())
    write_jsonl(tmp_path / "rollouts" / "step_000000.jsonl", [trajectory()])
    page = report.render(load(tmp_path), tmp_path / "figures")
    assert "From 25% to 75% right while training" in page
    assert "Right, with one call" in page


def test_missing_parts_are_named(tmp_path):
    write_jsonl(tmp_path / "rl" / "metrics.jsonl", training_rows())
    page = report.render(load(tmp_path), tmp_path / "figures")
    assert "eval_sft/evaluation.json" in page and "rl/rollouts" in page


def test_a_half_written_evaluation_is_named_and_left_out(tmp_path):
    write_quickstart(tmp_path)
    (tmp_path / "eval_sft" / "evaluation.json").write_text('{"k": 4, "dom')
    run = load(tmp_path)
    assert "eval_sft/evaluation.json (not valid JSON)" in run.missing
    assert list(run.evaluations) == ["RL", "RL without tool"]


def test_the_summary_stands_in_for_missing_evaluations(tmp_path):
    numbers = {"avg@8": 0.5, "pass@8": 0.75, "maj@8": 0.6, "call_share": 1.0}
    (tmp_path / "summary.json").write_text(json.dumps({"sft": numbers, "rl": numbers}))
    found = load(tmp_path).evaluations["RL"]
    assert (found["k"], found["domains"]["all"]["pass_at_k"]["value"]) == (8, 0.75)
    assert "50%" in report.render(load(tmp_path), tmp_path / "figures")


def test_an_empty_folder_is_refused_with_what_was_expected(tmp_path, capsys):
    assert report.main(["--workdir", str(tmp_path)]) == 1
    assert "holds no run: expected metrics.jsonl" in capsys.readouterr().err


def test_examples_are_of_different_kinds():
    rows = [
        trajectory("math-1"),
        trajectory("math-2", statuses=("error", "ok")),
        trajectory("math-3", correct=False),
        trajectory("math-4", correct=False, statuses=(), stop="context_full"),
    ]
    chosen = {title: row["problem_id"] for title, row in examples(rows).items()}
    assert chosen == {
        "Right, with one call": "math-1",
        "Right, after a failed call": "math-2",
        "Wrong, though its programs ran": "math-3",
        "Wrong without a call": "math-4",
    }


def test_examples_prefer_a_domain_not_shown_yet():
    rows = [trajectory("math-1"), trajectory("math-2", correct=False)]
    rows.append(trajectory("code-1", correct=False))
    assert examples(rows)["Wrong, though its programs ran"]["problem_id"] == "code-1"


def test_a_token_is_shaded_by_its_surprise():
    row = trajectory(statuses=())
    row["pieces"][-1]["spans"] = [["4", -1.5], ["2", -9.0], ["!", 0.0]]
    shown = transcript("t", row)
    assert '<span style="--surprise:0.50" title="log-prob -1.500">4</span>' in shown
    assert '<span style="--surprise:1.00" title="log-prob -9.000">2</span>!' in shown


def test_a_trajectory_that_could_not_be_graded_is_shown():
    row = trajectory(correct=False, reward={"outcome": None, "total": None})
    assert "could not be graded" in transcript("t", row)


def test_a_very_long_piece_is_shortened():
    shown = transcript("t", trajectory(statuses=(), text="x" * 50_000))
    assert len(shown) < 20_000 and "characters left out" in shown


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        ({"rollout/truncated": 0.95}, "cut off"),
        ({"reward/equal_groups": 1.0}, "nothing left to learn from"),
        ({"policy/sampler_gap": 0.5}, "disagree"),
        ({"tools/sandbox_errors": 2.0}, "6 calls failed through the sandbox"),
        ({"reward/ungraded": 1.0}, "3 trajectories could not be graded"),
    ],
)
def test_a_run_that_cannot_be_trusted_says_so(tmp_path, numbers, expected):
    write_jsonl(tmp_path / "metrics.jsonl", [{"step": step, **numbers} for step in range(3)])
    (concern,) = concerns(load(tmp_path))
    assert expected in concern


def test_programs_without_isolation_are_a_concern(tmp_path):
    write_jsonl(tmp_path / "rollouts" / "step_000000.jsonl", [trajectory(isolation="unsafe")])
    write_jsonl(tmp_path / "metrics.jsonl", training_rows())
    assert "without isolation" in concerns(load(tmp_path))[0]


def test_analysis_does_not_load_jax():
    code = "import sys, demyrl.analysis.report; print('jax' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "False"
