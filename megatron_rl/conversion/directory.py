"""Whether an HF directory holds the tensors that its config.json describes: from the headers of its files, before anything is loaded.
No torch import."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from megatron_rl.config.hf_directory import INDEX, named_shapes, weight_files
from megatron_rl.models.family import Family, HFConfig, tied


def problems(hf_dir: Path, hf: HFConfig, family: Family) -> Iterator[str]:
    """One line per file that can't be read, else per tensor that is missing, unexpected or has another shape than config.json says."""
    shapes: dict[str, list[int]] = {}
    file_of: dict[str, str] = {}
    try:
        for file in weight_files(hf_dir):
            held = named_shapes(hf_dir / file)
            shapes |= held
            file_of |= dict.fromkeys(held, file)
    except ValueError as error:
        yield str(error)
        return
    if (hf_dir / INDEX).is_file():
        listed = json.loads((hf_dir / INDEX).read_text())["weight_map"]
        yield from (
            f"{hf_dir / file}: tensor {name} is missing, though {INDEX} lists it" for name, file in listed.items() if name not in shapes
        )
        shapes = {name: shape for name, shape in shapes.items() if name in listed}
    dimensions = family.dimensions(hf)
    for rule in family.tensors(hf):
        for tensor in rule.hf:
            expected = [dimensions[dim] for dim in tensor.dims]
            if tensor.name not in shapes:
                yield f"{hf_dir}: tensor {tensor.name} is missing"
            elif (found := shapes[tensor.name]) != expected:
                yield f"{hf_dir / file_of[tensor.name]}: tensor {tensor.name} has shape {found}, config.json asks for {expected}"
    for name in unexpected(shapes, hf, family):
        yield f"{hf_dir / file_of[name]}: unexpected tensor {name}; config.json describes a {family.name} model without it"


def unexpected(names: Iterable[str], hf: HFConfig, family: Family) -> list[str]:
    """Tensors for which the model has no place, sorted. The copy of a tied embedding, rotary frequencies and what the family ignores are
    no mistakes."""
    known = {tensor.name for rule in family.tensors(hf) for tensor in rule.hf} | ({"lm_head.weight"} if tied(hf) else set())
    ignored = family.ignored(hf)
    return sorted(name for name in set(names) - known if not name.endswith("rotary_emb.inv_freq") and not name.startswith(ignored))
