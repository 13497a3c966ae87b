"""A gcloud for tests: notes its arguments, and answers what the test has written down.

In the folder $FAKE_GCLOUD: `calls.jsonl` gets the arguments of every call; `answers.json` maps the
first words of a call ("tpu-vm describe", "queued-resources create", ...) to what it answers, one
after another, the last one for good. An answer is what is printed, or {"fails": what is said}.
"""

import json
import os
import sys
from pathlib import Path


def answer(folder: Path, words: list[str]) -> str | dict:
    """What is to be answered to this call; the answers that are left are written back."""
    path = folder / "answers.json"
    answers = json.loads(path.read_text()) if path.exists() else {}
    found = [key for key in answers if " ".join(words).startswith(key)]
    if not found:
        return ""
    mine = answers[max(found, key=len)]
    taken = mine.pop(0) if len(mine) > 1 else mine[0]
    path.write_text(json.dumps(answers))
    return taken


def main() -> None:
    folder, words = Path(os.environ["FAKE_GCLOUD"]), sys.argv[1:]
    with open(folder / "calls.jsonl", "a") as calls:
        calls.write(json.dumps(words) + "\n")
    plain = words[2:] if words[:2] == ["compute", "tpus"] else words
    if plain[1] == "ssh":  # what is asked of a worker tells calls apart
        command = next(word for word in words if word.startswith("--command="))
        plain = ["ssh", command.rpartition("worker.sh ")[2]]
    said = answer(folder, plain)
    if isinstance(said, dict):
        sys.exit(f"ERROR: (gcloud) {said['fails']}")
    print(said)


if __name__ == "__main__":
    main()
