"""What is wrong with a Hugging Face model directory, told without loading it (no torch, no transformers)."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. ValueError, in one sentence, when it is not one."""
    try:
        value = json.loads(path.read_text())
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds no JSON object")
    return value


def model_problems(path: str) -> Iterator[str]:
    """Problems of `model.path`: directory, config.json, weights."""
    directory = Path(path)
    if not directory.is_dir():
        yield f"model.path: {path} is not a directory; give a local HF model directory (config.json and *.safetensors)"
        return
    if not (directory / "config.json").is_file():
        yield f"model.path: {path} has no config.json"
    else:
        try:
            read_json(directory / "config.json")
        except ValueError as error:
            yield f"model.path: {error}"
    try:
        for name in weight_files(directory):
            tensor_shapes(directory / name)
    except ValueError as error:
        yield f"model.path: {error}"


def weight_files(directory: Path) -> list[str]:
    """Names of the safetensors files that make up a model: those its index names, else model.safetensors.

    Others may lie beside them (the vendor's own format, adapters). ValueError, in one sentence, when one is missing.
    """
    if (directory / INDEX).is_file():
        files_of = read_json(directory / INDEX).get("weight_map")
        if not isinstance(files_of, dict) or not all(isinstance(name, str) for name in files_of.values()):
            raise ValueError(f"{directory / INDEX} has no weight_map of tensors to files")
        files = sorted(set(files_of.values()))
        if nested := [name for name in files if Path(name).name != name]:
            raise ValueError(f"{directory / INDEX} names {nested[0]!r}, which is no plain file name; put the files beside the index")
        if missing := [name for name in files if not (directory / name).is_file()]:
            raise ValueError(f"{directory} lacks {', '.join(missing)}, which {INDEX} names")
    else:
        files = [WEIGHTS] if (directory / WEIGHTS).is_file() else []
    if not files:
        other = " (pytorch_model.bin is not read; convert it to safetensors)" if any(directory.glob("*.bin")) else ""
        raise ValueError(f"{directory} has no {WEIGHTS} and no {INDEX}{other}")
    return files


def tensor_shapes(file: Path) -> list[list[int]]:
    """Of every tensor in a safetensors file. ValueError as `named_shapes`."""
    return list(named_shapes(file).values())


def named_shapes(file: Path) -> dict[str, list[int]]:
    """Of every tensor in a safetensors file, by its name, from the header. ValueError, in one sentence, when it is damaged or too short."""
    with open(file, "rb") as f:
        length = int.from_bytes(f.read(8), "little")
        cut = ""
        try:
            data = file.stat().st_size - 8 - length
            header = json.loads(f.read(length)) if length and data >= 0 else None
            entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
            cut = next((f": tensor {name} is not all there" for name, entry in entries.items() if entry["data_offsets"][1] > data), "")
            if cut:
                raise ValueError
            return {name: entry["shape"] for name, entry in entries.items()}
        except (ValueError, TypeError, KeyError, IndexError, AttributeError):
            raise ValueError(f"{file} is no safetensors file, or was cut short{cut}") from None


def tokenizer_problems(key: str, path: str, hf_config: dict[str, Any] | None) -> Iterator[str]:
    """Problems of a tokenizer directory; with the model's config, also that every token id has an embedding row."""
    directory = Path(path)
    if not directory.is_dir():
        yield f"{key}: {path} is not a directory; give a local HF tokenizer directory"
        return
    if not any((directory / name).is_file() for name in TOKENIZERS):
        yield f"{key}: {path} has no tokenizer ({', '.join(TOKENIZERS)})"
        return
    if not _has_chat_template(directory):
        yield f"{key}: the tokenizer of {path} has no chat template; add chat_template.jinja to the directory"
    if not (directory / "tokenizer.json").is_file():
        return
    try:
        largest = _largest_id(read_json(directory / "tokenizer.json"))
    except ValueError as error:
        yield f"{key}: {error}"
        return
    vocab = text_config(hf_config).get("vocab_size") if hf_config else None
    if isinstance(vocab, int) and largest >= vocab:
        yield f"{key}: {path} has token id {largest}, the model's vocab_size is only {vocab}; use the model's own tokenizer"


def _has_chat_template(directory: Path) -> bool:
    """In a file of its own, or in tokenizer_config.json."""
    if (directory / "chat_template.jinja").is_file():
        return True
    try:
        return bool(read_json(directory / "tokenizer_config.json").get("chat_template"))
    except ValueError:
        return False


def text_config(hf_config: dict[str, Any]) -> dict[str, Any]:
    """The language model's part of a config (multimodal families nest it)."""
    return hf_config.get("text_config") or hf_config


def _largest_id(tokenizer: dict[str, Any]) -> int:
    vocab = tokenizer.get("model", {}).get("vocab", {})
    ids = list(vocab.values()) if isinstance(vocab, dict) else list(range(len(vocab)))
    ids += [token["id"] for token in tokenizer.get("added_tokens") or []]
    return max(ids, default=-1)
