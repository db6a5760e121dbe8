"""What a model and a layout need of each other, told without importing torch."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_rl.config.base import ConfigError
from megatron_rl.config.trainer import ParallelConfig
from megatron_rl.models import check_supported, presets, read_hf_config

QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 259,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "rope_theta": 1000000,
    "rope_scaling": None,
}


def _problem(changes, **sizes):
    (problem,) = check_supported(QWEN3 | changes, ParallelConfig(**sizes))
    assert "\n" not in problem
    return problem


def test_supported_layouts_have_no_problems():
    for sizes in (
        {},
        {"tensor_parallel": 2},
        {"pipeline_parallel": 4},
        {"tensor_parallel": 2, "pipeline_parallel": 2, "context_parallel": 2},
        {"context_parallel": 4, "context_parallel_kind": "ulysses"},
    ):
        assert check_supported(QWEN3, ParallelConfig(**sizes)) == []


def test_unknown_architecture_names_the_known_ones():
    problem = _problem({"architectures": ["MysteryForCausalLM"]})
    assert "MysteryForCausalLM" in problem and "Qwen3ForCausalLM" in problem and "LlamaForCausalLM" in problem


@pytest.mark.parametrize(
    ("changes", "sizes", "expected"),
    [
        ({}, {"pipeline_parallel": 3}, "pipeline_parallel = 3 does not divide the model's 4 layers; choose one of 1, 2, 4"),
        ({}, {"pipeline_parallel": 3}, "or say in pipeline_layers how many layers each chunk has"),
        ({}, {"pipeline_parallel": 3, "pipeline_layers": [2, 1]}, "pipeline_layers names 3 layers in 2 chunks; the model has 4 layers"),
        ({}, {"pipeline_parallel": 2, "pipeline_layers": [3, 2]}, "pipeline_layers names 5 layers in 2 chunks"),
        ({}, {"tensor_parallel": 4}, "tensor_parallel = 4 does not divide the model's 2 key-value heads; choose one of 1, 2"),
        ({}, {"context_parallel": 3, "context_parallel_kind": "ulysses"}, "must divide a tensor rank's 4 attention heads"),
        (
            {},
            {"tensor_parallel": 2, "context_parallel": 4, "context_parallel_kind": "ulysses"},
            "a multiple of its 1 key-value heads; change it, or context_parallel_kind to 'ring' or 'all_gather'",
        ),
        ({"intermediate_size": 81}, {"tensor_parallel": 2}, "81 MLP columns"),
        ({"num_key_value_heads": 4, "vocab_size": 5}, {"tensor_parallel": 4}, "leaves the last rank no row of a vocabulary of 5"),
    ],
)
def test_what_does_not_divide_is_named_with_the_choices(changes, sizes, expected):
    assert expected in _problem(changes, **sizes)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"attention_bias": True}, "attention_bias = True"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"use_sliding_window": True}, "use_sliding_window = True"),
        ({"rope_scaling": {"type": "yarn", "factor": 4}}, "rope type 'yarn'"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4}}, "rope type 'dynamic'"),
        (
            {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4}},
            "needs 'orig",
        ),
        ({"vocab_size": None}, "'vocab_size' is missing"),
    ],
)
def test_what_we_would_compute_differently_is_refused(changes, expected):
    assert expected in _problem(changes)


def test_a_single_normalised_expert_is_refused_before_megatron_does():
    moe = {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 8, "num_experts_per_tok": 1, "moe_intermediate_size": 40}
    assert check_supported(QWEN3 | moe, ParallelConfig()) == []
    assert "num_experts_per_tok = 1 with norm_topk_prob" in _problem(moe | {"norm_topk_prob": True})


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"rms_norm_eps": None}, "'rms_norm_eps' is missing"),
        ({"rms_norm_eps": "x"}, "'rms_norm_eps' = 'x' is no float above 0"),
        ({"num_hidden_layers": "4"}, "'num_hidden_layers' = '4' is no int above 0"),
        ({"num_hidden_layers": 4.0}, "'num_hidden_layers' = 4.0 is no int above 0"),
        ({"rope_theta": "abc"}, "rope_theta = 'abc' is no number above 0"),
        ({"rope_theta": -5}, "rope_theta = -5 is no number above 0"),
        ({"rope_scaling": "linear"}, "rope_scaling = 'linear' is no table"),
        ({"rope_parameters": [1]}, "rope_parameters = [1] is no table"),
        ({"architectures": 5}, "architectures = 5 is not supported"),
    ],
)
def test_a_config_of_wrong_types_is_refused_in_one_line(changes, expected):
    assert expected in _problem(changes)


@pytest.mark.parametrize("field", ["routed_scaling_factor", "n_group", "topk_group"])
def test_what_no_weight_shows_must_stand_in_the_config(field):
    hf = presets()["deepseek-v3"]
    assert check_supported(hf, ParallelConfig()) == []
    assert check_supported({key: value for key, value in hf.items() if key != field}, ParallelConfig()) == [
        f"config.json: {field!r} is missing"
    ]


def test_several_problems_are_several_lines():
    assert len(check_supported(QWEN3 | {"attention_bias": True}, ParallelConfig(tensor_parallel=4, pipeline_parallel=3))) == 3


def test_checking_does_not_import_torch():
    program = (
        "import json, sys; from megatron_rl.config.trainer import ParallelConfig; from megatron_rl.models import check_supported;"
        "print(check_supported(json.loads(sys.argv[1]), ParallelConfig()), 'torch' in sys.modules)"
    )
    output = subprocess.run([sys.executable, "-c", program, json.dumps(QWEN3)], capture_output=True, text=True, check=True).stdout
    assert output.split() == ["[]", "False"]


def test_unreadable_config_json_is_one_line(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"config\.json cannot be read: No such file"):
        read_hf_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="not JSON"):
        read_hf_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match="holds no JSON object; give a Hugging Face model directory"):
        read_hf_config(tmp_path)
