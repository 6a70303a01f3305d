"""What a target's folder says about itself, read without torch or transformers.

Checking a schedule needs a handful of numbers (depth, width, vocabulary, special tokens) and should
take milliseconds, so the JSON files are read directly. The text model of a multimodal checkpoint
stands in a nested `text_config`, the rotary base moved into `rope_parameters` in newer files, and
end-of-text tokens are spread over three files: this is the one place that knows.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import attrs
import orjson

from engine.errors import TargetError

_TEXT_CONFIG_KEYS = ("text_config", "language_config", "llm_config")


@attrs.frozen
class TargetSummary:
    """Facts about a target that others size themselves by; of the text part, if there are several."""

    folder: Path
    model_type: str
    """The text model's type, as in its configuration: `qwen3`, `llama`, `qwen3_5_text`, …"""
    layers: int
    hidden_size: int
    vocab_size: int
    max_position_embeddings: int
    rope_theta: float
    rms_norm_eps: float
    pad_token_id: int | None
    eos_token_ids: tuple[int, ...]
    """Every id that ends a text by the configuration, the generation settings or the tokenizer."""
    tie_word_embeddings: bool
    """As written; where the files leave it open, loading the target puts its class's default here."""
    quantization: str | None = None
    """The method's name where the checkpoint's weights are quantised."""


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        TargetError: the file cannot be read or holds no JSON object; names the file.
    """
    try:
        value = orjson.loads(path.read_bytes())
    except OSError as error:
        raise TargetError(f"{path}: cannot be read ({error.strerror})") from error
    except orjson.JSONDecodeError as error:
        raise TargetError(f"{path}: not readable as JSON ({error}); is the download complete?") from error
    if not isinstance(value, dict):
        raise TargetError(f"{path}: holds a {type(value).__name__}, a JSON object was expected")
    return value


def text_section(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a `config.json` that describes the text model: nested, or the whole of it."""
    for key in _TEXT_CONFIG_KEYS:
        if isinstance(config.get(key), dict):
            section: Mapping[str, Any] = config[key]
            return section
    return config


def read_target_config(folder: Path | str) -> TargetSummary:
    """Read `config.json` and, where they exist, the generation and tokenizer settings beside it.

    Raises:
        TargetError: no such folder, no or unreadable `config.json`, not a causal language model, or
            a size that is missing or no positive number; names the folder or file and the key.
    """
    folder = Path(folder)
    if not folder.is_dir():
        what = "is a file, a folder was expected" if folder.exists() else "no such folder"
        raise TargetError(f"target folder {folder}: {what}")
    path = folder / "config.json"
    if not path.is_file():
        raise TargetError(
            f"target folder {folder}: no config.json in it; a Hugging Face model folder was expected"
        )
    config = read_json(path)
    text = text_section(config)
    _check_causal(config, text, path)

    def size(*keys: str) -> int:
        value = next((text[key] for key in keys if text.get(key) is not None), None)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise TargetError(f"{path}: {keys[0]} is {value!r}, a positive number was expected")
        return value

    tokenizer = _optional_json(folder / "tokenizer_config.json")
    generation = _optional_json(folder / "generation_config.json")
    from_settings = [source.get("eos_token_id") for source in (text, config, generation)]
    eos_ids = _distinct([*from_settings, _token_id(folder, tokenizer, "eos_token")])
    pad_ids = [source.get("pad_token_id") for source in (text, config, generation)]
    pad = _distinct([*pad_ids, _token_id(folder, tokenizer, "pad_token")])
    quantization = config.get("quantization_config") or text.get("quantization_config")
    return TargetSummary(
        folder=folder,
        model_type=str(text.get("model_type") or config["model_type"]),
        layers=size("num_hidden_layers", "n_layer"),
        hidden_size=size("hidden_size", "n_embd"),
        vocab_size=size("vocab_size"),
        max_position_embeddings=size("max_position_embeddings", "n_positions"),
        rope_theta=_rope_theta(text),
        rms_norm_eps=float(text.get("rms_norm_eps") or text.get("layer_norm_epsilon") or 1e-6),
        pad_token_id=pad[0] if pad else None,
        eos_token_ids=eos_ids,
        tie_word_embeddings=bool(text.get("tie_word_embeddings", config.get("tie_word_embeddings", False))),
        quantization=str(quantization.get("quant_method", "unnamed")) if quantization else None,
    )


def _check_causal(config: Mapping[str, Any], text: Mapping[str, Any], path: Path) -> None:
    if not (text.get("model_type") or config.get("model_type")):
        raise TargetError(f"{path}: no model_type in it; a Hugging Face model configuration was expected")
    architectures = config.get("architectures") or []
    nested = text is not config
    causal = [a for a in architectures if a.endswith("ForCausalLM") or a.endswith("LMHeadModel")]
    causal += [a for a in architectures if nested and a.endswith("ForConditionalGeneration")]
    if config.get("is_encoder_decoder") or (architectures and not causal):
        named = ", ".join(architectures) or config.get("model_type")
        raise TargetError(f"{path}: {named} is not a causal language model, and only those can be targets")


def _rope_theta(text: Mapping[str, Any]) -> float:
    if text.get("rope_theta") is not None:
        return float(text["rope_theta"])
    parameters = text.get("rope_parameters") or text.get("rope_scaling") or {}
    # Models that rotate sliding layers differently nest one dictionary per kind of layer.
    parameters = parameters.get("full_attention", parameters)
    return float(parameters.get("rope_theta", 10000.0))


def _optional_json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _distinct(values: Iterable[Any]) -> tuple[int, ...]:
    """Token ids out of numbers, lists of numbers and absent values, each once, in order."""
    flat: list[int] = []
    for value in values:
        flat += value if isinstance(value, list) else [] if value is None else [value]
    return tuple(dict.fromkeys(token for token in flat if token >= 0))


def _token_id(folder: Path, tokenizer: Mapping[str, Any], key: str) -> int | None:
    """The id of a special token that `tokenizer_config.json` names by its text.

    A text that no vocabulary file holds has no id, so nothing can ever end or be padded with it.
    """
    token = tokenizer.get(key)
    text = token.get("content") if isinstance(token, dict) else token
    if not isinstance(text, str):
        return None
    for number, added in (tokenizer.get("added_tokens_decoder") or {}).items():
        if added.get("content") == text:
            return int(number)
    vocabulary = _optional_json(folder / "tokenizer.json")
    for added in vocabulary.get("added_tokens") or []:
        if added.get("content") == text:
            return int(added["id"])
    entries = (vocabulary.get("model") or {}).get("vocab")
    found = entries.get(text) if isinstance(entries, dict) else None
    return found if isinstance(found, int) else None
