"""Selects the checks of the backend suite that CI runs with each model."""

import pytest

PART_CHECKS = (
    *("test_cross_entropy_is_a_plain_weighted_sum", "test_a_fresh_model_equals_the_base_model"),
    *("test_trainer_and_sampler_logprobs_agree", "test_samples_depend_on_the_seed_only"),
    *("test_samples_do_not_depend_on_the_parts_of_a_request", "test_prompts_are_cached_for_one_scope_only"),
    *("test_samples_beyond_the_slots_wait", "test_prompt_results_are_those_of_the_trainer"),
    *("test_result_i_belongs_to_example_i", "test_training_lowers_the_loss"),
    *("test_a_step_on_one_model_leaves_others_bit_equal", "test_a_diverged_model_changes_no_other"),
    *("test_training_changes_no_snapshot", "test_training_changes_no_sampler"),
    *("test_gradients_are_batch_invariant", "test_interleaved_passes_are_batch_invariant"),
    *("test_a_restored_model_continues_bit_equal",),
)
"""Checks that depend on the parts of a model.

Other checks depend only on its shapes, and TestJax covers them.
"""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the remaining checks `exhaustive` for all models except the dense model."""
    for item in items:
        if not isinstance(item, pytest.Function) or item.cls is None:
            continue
        if item.cls.__name__.startswith("TestJaxWith") and item.originalname not in PART_CHECKS:
            item.add_marker(pytest.mark.exhaustive)
