"""config.json to a model and back: what it says is what we compute, or it is refused by its key."""

import dataclasses
import json

import pytest

from demyrl.model.hf_config import config_of, read_config
from demyrl.model.sizes import size
from tests.tiny import MODEL

QWEN3 = {  # of Qwen3-4B-Instruct-2507, as transformers 4 wrote it
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "max_position_embeddings": 262144,
    "max_window_layers": 36,
    "model_type": "qwen3",
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 5000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN2 = {  # of Qwen2.5-7B-Instruct
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
    "model_type": "qwen2",
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 131072,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 152064,
}
LLAMA = {  # of SmolLM2-135M-Instruct, as transformers 5 writes it
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "max_position_embeddings": 8192,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 9,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "rms_norm_eps": 1e-05,
    "rope_parameters": {"rope_theta": 100000.0, "rope_type": "default"},
    "tie_word_embeddings": True,
    "vocab_size": 49152,
}
QWEN2_MODEL = dataclasses.replace(MODEL, qk_norm=False, attention_bias=True)
LLAMA_MODEL = dataclasses.replace(MODEL, qk_norm=False, tied_embeddings=False, max_positions=512)
MODELS = {"qwen3": MODEL, "qwen2": QWEN2_MODEL, "llama": LLAMA_MODEL}
MISSING = object()


@pytest.fixture
def read(tmp_path):
    """The model of a config.json with these keys, changed; MISSING takes a key away."""

    def model(keys, **changes):
        kept = {key: value for key, value in (keys | changes).items() if value is not MISSING}
        (tmp_path / "config.json").write_text(json.dumps(kept))
        return read_config(tmp_path, "float32")

    return model


@pytest.mark.parametrize(
    "keys, name", [(QWEN3, "qwen3_4b_2507"), (QWEN2, "qwen2.5_7b"), (LLAMA, "smollm2_135m")]
)
def test_a_published_config_is_the_published_model(keys, name, read):
    assert read(keys) == size(name, "float32")


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_a_written_config_is_read_as_the_same_model(model, read):
    assert read(config_of(model)) == model


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_transformers_reads_a_written_config_as_the_same_model(model, tmp_path):
    from transformers import AutoConfig

    keys = config_of(dataclasses.replace(model, rope_theta=12_345.0))
    (tmp_path / "config.json").write_text(json.dumps(keys))
    theirs = AutoConfig.from_pretrained(tmp_path)
    assert type(theirs).__name__.startswith(keys["architectures"][0].removesuffix("ForCausalLM"))
    assert theirs.rope_parameters == {"rope_type": "default", "rope_theta": 12_345.0}
    same = ("vocab_size", "hidden_size", "head_dim", "num_key_value_heads", "tie_word_embeddings")
    assert {key: getattr(theirs, key) for key in same} == {key: keys[key] for key in same}


def test_a_model_with_both_query_norms_and_biases_has_no_config():
    both = dataclasses.replace(MODEL, attention_bias=True)
    with pytest.raises(ValueError, match="model.qk_norm and model.attention_bias are both on"):
        config_of(both)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 1e6},
        {"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}},
        {"rope_parameters": {"rope_theta": 1e6}},
        {"rope_theta": 1e6, "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"}},
        {"rope_theta": 1e6, "rope_scaling": {"type": "default"}},
    ],
)
def test_the_base_of_the_positions_is_found_in_each_of_its_places(rope, read):
    assert read(QWEN3, **({"rope_theta": MISSING} | rope)).rope_theta == 1e6


@pytest.mark.parametrize(
    "keys, missing, field, value",
    [
        (QWEN3, "rope_theta", "rope_theta", 10_000.0),
        (QWEN3, "head_dim", "head_dim", 128),
        (LLAMA, "head_dim", "head_dim", 64),
        (LLAMA, "num_key_value_heads", "kv_heads", 9),
        (LLAMA, "rms_norm_eps", "norm_eps", 1e-6),
        (LLAMA, "tie_word_embeddings", "tied_embeddings", False),
        (LLAMA, "max_position_embeddings", "max_positions", 0),
        (LLAMA, "architectures", "width", 576),
        (LLAMA, "model_type", "width", 576),
    ],
)
def test_what_is_not_said_is_what_transformers_takes_it_for(keys, missing, field, value, read):
    assert getattr(read(keys, **{missing: MISSING}), field) == value


def test_a_head_size_of_null_shares_out_the_width(read):
    assert read(QWEN3, head_dim=None).head_dim == 2560 // 32


@pytest.mark.parametrize(
    "scaling, kind",
    [
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_scaling asks for 'yarn'"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling asks for 'linear'"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_scaling asks for 'dynamic'"),
        ({"rope_parameters": {"rope_type": "llama3"}}, "rope_parameters asks for 'llama3'"),
        ({"rope_scaling": {"rope_type": "default", "type": "mrope"}}, "asks for 'mrope'"),
        ({"rope_scaling": {"factor": 4.0}}, "rope_scaling asks for 'unnamed'"),
    ],
)
def test_scaled_positions_are_refused_with_what_to_remove(scaling, kind, read):
    with pytest.raises(ValueError, match=f"config.json: .*{kind} scaling.*remove rope_"):
        read(QWEN3, **scaling)


@pytest.mark.parametrize(
    "keys, changes, message",
    [
        (QWEN3, {"attention_bias": True}, "attention_bias is true; in a qwen3 model"),
        (LLAMA, {"attention_bias": True}, "attention_bias is true; in a llama model"),
        (LLAMA, {"mlp_bias": True}, "mlp_bias is true"),
        (LLAMA, {"rope_interleaved": True}, "rope_interleaved is true"),
        (LLAMA, {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        (
            QWEN3,
            {"rope_parameters": {"partial_rotary_factor": 0.25}},
            "rope_parameters.partial_rotary_factor is 0.25",
        ),
        (
            QWEN3,
            {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}},
            "rope_parameters differs by kind of layer .full_attention.",
        ),
        (QWEN3, {"hidden_act": "gelu"}, 'hidden_act is "gelu"; this decoder computes only "silu"'),
        (QWEN2, {"use_sliding_window": True}, "use_sliding_window is true.*Set it to false"),
        (QWEN3, {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types is"),
        (QWEN3, {"layer_types": "full_attention"}, "layer_types is"),
        (QWEN3, {"quantization_config": {"bits": 4}}, "quantization_config is .*unquantized"),
        (QWEN3, {"rope_parameters": {"rope_theta": 1e4}}, "rope_theta = 5000000 and rope_param"),
    ],
)
def test_what_the_decoder_does_not_compute_is_refused_by_its_key(keys, changes, message, read):
    with pytest.raises(ValueError, match=message):
        read(keys, **changes)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"model_type": "mistral"}, 'model_type is "mistral"; supported are qwen2 .Qwen2For'),
        ({"model_type": "qwen3_moe"}, "Mixtures of experts are not supported"),
        ({"model_type": "qwen2_5_vl"}, "Models that see or hear are not supported"),
        ({"architectures": ["Qwen3ForSequenceClassification"]}, "This one scores text"),
        ({"architectures": ["Qwen2ForCausalLM"]}, 'architectures is ."Qwen2ForCausalLM".; .*agree'),
        ({"architectures": "Qwen3ForCausalLM"}, 'architectures is "Qwen3ForCausalLM"'),
        ({"model_type": MISSING, "architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel"),
        ({"model_type": MISSING, "architectures": MISSING}, "model_type is missing"),
        ({"model_type": ["qwen3"]}, r'model_type is \["qwen3"\]'),
    ],
)
def test_another_architecture_is_refused_by_name(changes, message, read):
    with pytest.raises(ValueError, match=message):
        read(QWEN3, **changes)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"vocab_size": MISSING}, "vocab_size is missing; expected a whole number above 0"),
        ({"hidden_size": None}, "hidden_size is null"),
        ({"num_hidden_layers": "36"}, 'num_hidden_layers is "36"'),
        ({"num_hidden_layers": 36.0}, "num_hidden_layers is 36.0"),
        ({"intermediate_size": -1}, "intermediate_size is -1"),
        ({"vocab_size": True}, "vocab_size is true"),
        ({"head_dim": 0}, "head_dim is 0"),
        ({"max_position_embeddings": 0}, "max_position_embeddings is 0"),
        ({"head_dim": None, "hidden_size": 2561}, "head_dim is null; without it the 32 heads"),
        ({"head_dim": 127}, "head_dim is 127.*The shape is that of .*config.json"),
        ({"num_key_value_heads": 5}, "must divide the first. .The shape is that of"),
        ({"tie_word_embeddings": "true"}, 'tie_word_embeddings is "true"; expected true or false'),
        ({"attention_bias": 0}, "attention_bias is 0; expected true or false"),
        ({"rms_norm_eps": "1e-6"}, "rms_norm_eps is '1e-6'"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
        ({"rope_theta": -1.0}, "rope_theta is -1.0"),
        ({"rope_theta": True}, "rope_theta is True"),
        ({"rope_scaling": "yarn"}, 'rope_scaling is "yarn"; expected an object or null'),
    ],
)
def test_a_value_that_makes_no_sense_is_refused_by_its_key(changes, message, read):
    with pytest.raises(ValueError, match=f"(?s){message}"):
        read(QWEN3, **changes)


@pytest.mark.parametrize(
    "content, message",
    [
        (b'{"model_type": ', "cannot be read as JSON"),
        (b"\xff\xfe\x00", "cannot be read as JSON"),
        (b"[]", "holds a JSON list; expected an object"),
    ],
)
def test_a_file_that_is_not_json_is_refused_by_its_path(content, message, tmp_path):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ValueError, match=f"config.json {message}"):
        read_config(tmp_path, "float32")


def test_a_folder_without_a_config_is_refused_with_what_belongs_there(tmp_path):
    with pytest.raises(ValueError, match="config.json does not exist: a checkpoint folder holds"):
        read_config(tmp_path, "float32")
