"""What an HF directory must be to be read."""

import json

import pytest

from megatron_rl.config.hf_directory import weight_files


@pytest.mark.parametrize("name", ["part/model.safetensors", "../model.safetensors", "/model.safetensors"])
def test_an_index_names_files_beside_it_alone(name, tmp_path):
    """Files of one name in two folders would be written over each other by a conversion."""
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(ValueError, match="which is no plain file name; put the files beside the index"):
        weight_files(tmp_path)
