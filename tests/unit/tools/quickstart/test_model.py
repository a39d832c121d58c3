import json
from typing import get_args

import numpy as np
import pytest
from safetensors.numpy import load_file
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from skyrl_tx.models import describe_params, find_family
from skyrl_tx.tools.quickstart.model import TINY_MODELS, TITLES, Architecture, find_architecture, write_tiny_model
from skyrl_tx.weights import hf
from tests.support.tiny_tokenizer import (
    CONTROL_TOKENS,
    MARKUP_TOKENS,
    VOCAB_SIZE,
    excerpt_texts,
    train_tokenizer,
)


@pytest.fixture(scope="module", params=TINY_MODELS)
def name(request):
    return request.param


@pytest.fixture(scope="module")
def directory(tmp_path_factory, name):
    return write_tiny_model(tmp_path_factory.mktemp("model") / name, TINY_MODELS[name])


@pytest.fixture(scope="module")
def tokenizer(directory):
    return AutoTokenizer.from_pretrained(directory)


def test_written_bytes_never_vary(directory, name, tmp_path):
    again = write_tiny_model(tmp_path / "missing" / "parent" / "directories", TINY_MODELS[name])
    names = {path.name for path in directory.iterdir()}
    assert names == {path.name for path in again.iterdir()}
    assert all((directory / name).read_bytes() == (again / name).read_bytes() for name in names)


def test_packaged_tokenizer_is_the_trained_one(directory):
    packaged = Tokenizer.from_file(str(directory / "tokenizer.json"))
    assert packaged.to_str() == train_tokenizer(excerpt_texts()).to_str()


def test_weights_load_from_the_written_files(directory):
    config = hf.read_json(directory, "config.json")
    family = find_family(config)
    parameters = describe_params(family.config_from_hf(config))
    params = hf.load(directory, parameters, family.weights)
    written = load_file(directory / "model.safetensors")
    np.testing.assert_array_equal(params.embed, written["model.embed_tokens.weight"])
    np.testing.assert_array_equal(params.unembed, written["lm_head.weight"])


def test_the_architecture_of_a_written_model_is_found(directory, name, tmp_path):
    assert find_architecture(directory) == TINY_MODELS[name] and find_architecture(tmp_path) is None


def test_every_architecture_has_one_name_and_a_title():
    assert sorted(TINY_MODELS.values()) == sorted(get_args(Architecture)) == sorted(TITLES)


def test_every_qwen3_token_is_one_id(tokenizer):
    ids = [tokenizer.encode(token) for token in CONTROL_TOKENS + MARKUP_TOKENS]
    assert ids == [[VOCAB_SIZE - len(ids) + index] for index in range(len(ids))]
    assert len(tokenizer) == VOCAB_SIZE


def test_decoder_hides_special_tokens_and_shows_markup(tokenizer):
    ids = tokenizer.encode("<think>\n7\n</think><|im_end|><|endoftext|>")
    assert tokenizer.decode(ids, skip_special_tokens=True) == "<think>\n7\n</think>"


@pytest.mark.parametrize(
    "text",
    ["He has 12 = <<3*4=12>>12\n#### 12", "ünïcödé — 東京 🙂", "  two  spaces\n\n\ttab", "\\boxed{3.5}", "\x00\x7f"],
)
def test_encoding_round_trip(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_numbers_are_tokenized_digit_by_digit(tokenizer):
    assert [tokenizer.decode([token]) for token in tokenizer.encode("2048")] == ["2", "0", "4", "8"]


def test_end_of_turn_is_a_stop_token(directory, tokenizer):
    ends = hf.read_eos_token_ids(directory)
    assert ends == (*tokenizer.encode("<|im_end|>"), *tokenizer.encode("<|endoftext|>"))
    assert tokenizer.eos_token_id == ends[0] == json.loads((directory / "config.json").read_text())["eos_token_id"]


def test_chat_template_renders_chatml(directory, tokenizer):
    assert tokenizer.chat_template == (directory / "chat_template.jinja").read_text()
    pytest.importorskip("jinja2")
    messages = [{"role": "user", "content": "3+4?"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>user\n3+4?<|im_end|>\n<|im_start|>assistant\n"


def test_error_for_too_little_text():
    with pytest.raises(ValueError, match="too short to learn 1024 tokens"):
        train_tokenizer(["a few words"])
