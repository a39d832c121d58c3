import json
import re

import pytest

from skyrl_tx.tools.quickstart.training import QuestionFileError, load_excerpt, load_questions


def write(path, *rows):
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return path


def row(number, **fields):
    return {"question": f"{number}?", "answer": f"#### {number}", **fields}


def test_excerpt_answers_end_with_a_number():
    questions = load_excerpt()
    assert len(questions.train) == 384 and len(questions.held_out) == 64
    assert not set(questions.train) & set(questions.held_out)
    for question in questions.train + questions.held_out:
        assert re.search(r"\n#### -?[\d,.]+$", question.answer), question


def test_split_field_selects_the_part(tmp_path):
    questions = load_questions(write(tmp_path / "q.jsonl", row(1, split="test"), "", row(2, split="train")))
    assert [question.text for question in questions.train] == ["2?"]
    assert [question.text for question in questions.held_out] == ["1?"]


def test_lines_end_at_newlines_only(tmp_path):
    line = json.dumps(row(1, split="test") | {"question": "1\u2028?"}, ensure_ascii=False)
    assert load_questions(write(tmp_path / "q.jsonl", line, row(2))).held_out[0].text == "1\u2028?"


def test_every_tenth_row_is_held_out_without_splits(tmp_path):
    questions = load_questions(write(tmp_path / "q.jsonl", *map(row, range(1, 21))))
    assert [question.text for question in questions.held_out] == ["10?", "20?"]
    assert len(questions.train) == 18


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{", "line 2: Invalid JSON"),
        ("[]", "line 2: Input should be an object, not []"),
        ({"answer": "#### 1"}, "line 2: 'question': Field required"),
        ({"question": 1, "answer": "#### 1"}, "line 2: 'question': Input should be a valid string, not 1"),
        ({"question": "1?", "answer": "  "}, "line 2: 'answer': String should have at least 1 character, not '  '"),
        (row(1, split="dev"), "line 2: 'split': Input should be 'train' or 'test', not 'dev'"),
    ],
)
def test_error_names_an_invalid_line(tmp_path, line, complaint):
    with pytest.raises(QuestionFileError, match=re.escape(complaint)):
        load_questions(write(tmp_path / "q.jsonl", row(1), line))


def test_error_without_held_out_questions(tmp_path):
    with pytest.raises(QuestionFileError, match="1 rows to train on and 0 to hold out"):
        load_questions(write(tmp_path / "q.jsonl", row(1)))


def test_error_names_a_missing_file(tmp_path):
    with pytest.raises(QuestionFileError, match=r"absent\.jsonl"):
        load_questions(tmp_path / "absent.jsonl")
