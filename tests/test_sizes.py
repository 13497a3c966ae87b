"""The table of published models."""

import pytest

from demyrl.model.sizes import SIZES, size
from demyrl.model.transformer import parameter_count

PUBLISHED = {  # the sum over the tensors of each release, a tied head counted once
    "qwen2.5_0.5b": 494_032_768,
    "qwen2.5_1.5b": 1_543_714_304,
    "qwen2.5_3b": 3_085_938_688,
    "qwen2.5_7b": 7_615_616_512,
    "qwen2.5_14b": 14_770_033_664,
    "qwen2.5_32b": 32_763_876_352,
    "qwen3_0.6b": 596_049_920,
    "qwen3_1.7b": 1_720_574_976,
    "qwen3_4b": 4_022_468_096,
    "qwen3_4b_2507": 4_022_468_096,
    "qwen3_8b": 8_190_735_360,
    "qwen3_14b": 14_768_307_200,
    "qwen3_32b": 32_762_123_264,
    "smollm2_135m": 134_515_008,
}


@pytest.mark.parametrize("name", SIZES)
def test_a_size_has_as_many_parameters_as_its_release(name):
    assert parameter_count(size(name, "bfloat16")) == PUBLISHED[name]


def test_the_long_qwen3_differs_from_the_first_only_in_its_positions():
    first, long = SIZES["qwen3_4b"], SIZES["qwen3_4b_2507"]
    differ = {key: long[key] for key in long if long[key] != first[key]}
    assert differ == {"rope_theta": 5e6, "max_positions": 262_144}


def test_a_name_that_is_not_listed_is_refused_with_those_that_are():
    with pytest.raises(ValueError, match="no size 'qwen2_7b': use one of qwen2.5_0.5b, "):
        size("qwen2_7b", "float32")
