"""Score the GSM8K answers that inference.py wrote: the share with a number, and with the right one. Needs no server."""

import argparse
import json
from pathlib import Path

import common

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
parser.add_argument("answers", type=Path, nargs="?", default=Path("answers.jsonl"), help="file that inference.py wrote")
parser.add_argument("--show", type=int, default=0, help="how many wrong answers to print")


def main() -> None:
    args = parser.parse_args()
    rows = [json.loads(line) for line in args.answers.read_text().splitlines()]
    given = [common.number(row["answer"]) for row in rows]
    wrong = [row for row, number in zip(rows, given, strict=True) if number != common.number(row["reference"])]
    num_right, num_given = len(rows) - len(wrong), len(rows) - given.count(None)
    print(f"right {num_right}/{len(rows)} ({num_right / len(rows):.1%}); with a number {num_given / len(rows):.1%}")
    for row in wrong[: args.show]:
        print(f"\nQ: {row['question']}\nA: {row['answer']}\nright: {common.number(row['reference'])}")


if __name__ == "__main__":
    main()
