import json
import re

import pytest

from skyrl_tx.quickstart.questions import QuestionFileError, load_excerpt, load_questions


def write(path, *rows):
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return path


def row(number, **fields):
    return {"question": f"{number}?", "answer": f"#### {number}", **fields}


def test_the_excerpt_holds_questions_with_final_numbers():
    questions = load_excerpt()
    assert len(questions.train) == 384 and len(questions.held_out) == 64
    assert not set(questions.train) & set(questions.held_out)
    for question in questions.train + questions.held_out:
        assert re.search(r"\n#### -?[\d,.]+$", question.answer), question


def test_rows_go_where_their_split_says(tmp_path):
    questions = load_questions(write(tmp_path / "q.jsonl", row(1, split="test"), "", row(2, split="train")))
    assert [question.text for question in questions.train] == ["2?"]
    assert [question.text for question in questions.held_out] == ["1?"]


def test_without_splits_every_tenth_row_is_held_out(tmp_path):
    questions = load_questions(write(tmp_path / "q.jsonl", *map(row, range(1, 21))))
    assert [question.text for question in questions.held_out] == ["10?", "20?"]
    assert len(questions.train) == 18


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{", "line 2: Expecting"),
        ("[]", "line 2: not a JSON object"),
        ({"answer": "#### 1"}, "line 2: 'question' must be text, not None"),
        ({"question": "1?", "answer": "  "}, "line 2: 'answer' must be text, not '  '"),
        (row(1, split="dev"), "line 2: 'split' must be 'train' or 'test', not 'dev'"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, complaint):
    with pytest.raises(QuestionFileError, match=re.escape(complaint)):
        load_questions(write(tmp_path / "q.jsonl", row(1), line))


def test_nothing_to_hold_out_is_an_error(tmp_path):
    with pytest.raises(QuestionFileError, match="1 rows to train on and 0 to hold out"):
        load_questions(write(tmp_path / "q.jsonl", row(1)))


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(QuestionFileError, match=r"absent\.jsonl"):
        load_questions(tmp_path / "absent.jsonl")
