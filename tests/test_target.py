"""Loading targets, cutting them, tapping them, and what a folder that cannot be a target gets."""

import importlib
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import orjson
import pytest
import torch
from rich.progress import Progress
from safetensors.torch import load_file, save_file
from torch import nn

from engine.errors import EngineError, NonFinite, ScheduleError, TargetError
from engine.target.kernels import (
    CPU_PATH,
    CUDA_ONLY_PACKAGES,
    gpu_packages_hidden,
    route_cpu_calls_to_torch,
)
from engine.target.loading import Target, load_target, read_target_config
from engine.target.taps import check_taps, check_target_layer_ids, default_target_layer_ids

torch.set_num_threads(1)

CPU = torch.device("cpu")
KINDS = ["qwen3", "llama", "qwen3_5_text", "qwen3_5"]
LAYERS, WIDTH, VOCABULARY = 6, 32, 96
TAPS = (1, 3)

COMMON: dict[str, Any] = {
    "hidden_size": WIDTH,
    "vocab_size": VOCABULARY,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "eos_token_id": 7,
    "pad_token_id": 3,
    "tie_word_embeddings": False,
    "initializer_range": 0.2,
}
HYBRID: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": (["linear_attention"] * 2 + ["full_attention"]) * 2,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e7,
        "partial_rotary_factor": 0.25,
        "mrope_section": [1, 1, 0],
        "mrope_interleaved": True,
    },
}


def settings_of(kind: str, **changes: Any) -> dict[str, Any]:
    if kind in ("qwen3", "llama"):
        name = {"qwen3": "Qwen3ForCausalLM", "llama": "LlamaForCausalLM"}[kind]
        return {**COMMON, "model_type": kind, "architectures": [name], "rope_theta": 5e5, **changes}
    text = {**COMMON, **HYBRID, "model_type": "qwen3_5_text", **changes}
    if kind == "qwen3_5_text":
        return {**text, "architectures": ["Qwen3_5ForCausalLM"]}
    vision = {"model_type": "qwen3_5_vision", "depth": 1, "hidden_size": 16, "num_heads": 2}
    return {
        "model_type": "qwen3_5",
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "text_config": text,
        "vision_config": {**vision, "intermediate_size": 16, "out_hidden_size": WIDTH},
        "tie_word_embeddings": text["tie_word_embeddings"],
    }


def write_config(folder: Path, settings: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_bytes(orjson.dumps(settings))
    return folder


def full_model(kind: str, **changes: Any) -> Any:
    """The whole text model by Hugging Face's own means, with weights that no initialiser would give."""
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = settings_of("qwen3_5_text" if kind == "qwen3_5" else kind, **changes)
    with gpu_packages_hidden():
        config = AutoConfig.for_model(settings.pop("model_type"), **settings)
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    route_cpu_calls_to_torch(model)
    return model


def write_checkpoint(folder: Path, kind: str, model: nn.Module, shards: int = 1, **changes: Any) -> Path:
    write_config(folder, settings_of(kind, **changes))
    tied = changes.get("tie_word_embeddings", False)
    tensors = {
        name: t.contiguous()
        for name, t in model.state_dict().items()
        if not (tied and name == "lm_head.weight")
    }
    if kind == "qwen3_5":
        tensors = {name.replace("model.", "model.language_model.", 1): t for name, t in tensors.items()}
        tensors["model.visual.patch_embed.proj.weight"] = torch.full((4, 4), torch.nan)
        tensors["mtp.fc.weight"] = torch.zeros(4, 4)
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    weight_map = {
        name: f"model-{i % shards + 1:05}-of-{shards:05}.safetensors" for i, name in enumerate(tensors)
    }
    for file in set(weight_map.values()):
        save_file({name: t for name, t in tensors.items() if weight_map[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_bytes(orjson.dumps({"weight_map": weight_map}))
    return folder


def load(folder: Path, **changes: Any) -> Target:
    options: dict[str, Any] = {"target_layer_ids": TAPS, "dtype": torch.float32, "device": CPU, **changes}
    return load_target(folder, **options)


def rows(count: int = 2, length: int = 24, seed: int = 1) -> torch.Tensor:
    return torch.randint(8, VOCABULARY, (count, length), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_taps_equal_the_hidden_states_of_the_full_model_bit_for_bit(
    tmp_path: Path, kind: str, shards: int
) -> None:
    model = full_model(kind)
    target = load(write_checkpoint(tmp_path, kind, model, shards))
    with torch.no_grad():
        reference = model(input_ids=rows(), output_hidden_states=True, use_cache=False).hidden_states
    taps = target.forward_taps(rows())
    assert [tap.shape for tap in taps] == [(2, 24, WIDTH)] * 2
    for tap, layer in zip(taps, TAPS, strict=True):
        assert torch.equal(tap, reference[layer + 1])
    assert not torch.equal(taps[0], reference[TAPS[0]])
    assert torch.equal(target.embed_tokens, model.get_input_embeddings().weight)
    assert torch.equal(target.lm_head, model.get_output_embeddings().weight)
    check_taps(taps, [24, 24], target_layer_ids=TAPS, padded_length=24)


@pytest.mark.parametrize("kind", KINDS[:3])
def test_what_stands_in_the_padding_leaves_real_tokens_unchanged(tmp_path: Path, kind: str) -> None:
    target = load(write_checkpoint(tmp_path, kind, full_model(kind)))
    padded = rows()
    padded[0, 15:] = 3
    other = padded.clone()
    other[0, 15:] = rows(seed=9)[0, 15:]
    for tap, again in zip(target.forward_taps(padded), target.forward_taps(other), strict=True):
        assert torch.equal(tap[0, :15], again[0, :15])
        assert torch.equal(tap[1], again[1])
        assert not torch.equal(tap[0, 15:], again[0, 15:])


@pytest.mark.parametrize("kind", KINDS)
def test_layers_behind_the_last_tap_and_the_final_norm_are_dropped(tmp_path: Path, kind: str) -> None:
    target = load(write_checkpoint(tmp_path, kind, full_model(kind)))
    base = target.model.base_model
    assert len(base.layers) == max(TAPS) + 1
    assert isinstance(base.norm, nn.Identity)
    assert not any("visual" in name for name, _ in target.model.named_modules())
    with pytest.raises(EngineError, match="keep_head"):
        target.logits(rows())


@pytest.mark.parametrize("kind", KINDS)
def test_a_target_with_its_head_gives_the_full_models_logits_and_the_same_taps(
    tmp_path: Path, kind: str
) -> None:
    model = full_model(kind)
    folder = write_checkpoint(tmp_path, kind, model)
    whole, cut = load(folder, keep_head=True), load(folder)
    with torch.no_grad():
        assert torch.equal(whole.logits(rows()), model(input_ids=rows(), use_cache=False).logits)
    for tap, again in zip(whole.forward_taps(rows()), cut.forward_taps(rows()), strict=True):
        assert torch.equal(tap, again)
    assert len(whole.model.base_model.layers) == LAYERS


def test_taps_do_not_compute_layers_behind_the_last_one_even_where_they_are_kept(tmp_path: Path) -> None:
    target = load(write_checkpoint(tmp_path, "qwen3", full_model("qwen3")), keep_head=True)
    ran: list[int] = []
    for number, layer in enumerate(target.model.base_model.layers):
        layer.register_forward_hook(lambda *_, number=number: ran.append(number))
    target.forward_taps(rows())
    assert ran == list(range(max(TAPS) + 1))


def test_taps_can_be_used_in_a_graph_that_needs_gradients(tmp_path: Path) -> None:
    target = load(write_checkpoint(tmp_path, "qwen3", full_model("qwen3")))
    weight = torch.ones(WIDTH, requires_grad=True)
    (target.forward_taps(rows())[0] * weight).sum().backward()
    assert weight.grad is not None
    assert not any(parameter.requires_grad for parameter in target.model.parameters())


def test_two_threads_that_share_a_target_each_get_their_own_taps(tmp_path: Path) -> None:
    from concurrent.futures import ThreadPoolExecutor

    target = load(write_checkpoint(tmp_path, "qwen3", full_model("qwen3")))
    batches = [rows(seed=seed) for seed in range(8)]
    alone = [target.forward_taps(batch) for batch in batches]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(target.forward_taps, batches))
    for first, second in zip(alone, together, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("init", ["checkpoint", "random"])
def test_rotary_frequencies_stay_float32_in_a_bfloat16_target(tmp_path: Path, kind: str, init: Any) -> None:
    model = full_model(kind)
    folder = write_checkpoint(tmp_path, kind, model)
    target = load(folder, dtype=torch.bfloat16, init=init)
    ours = dict(target.model.named_buffers())
    names = [name for name in ours if name.endswith("inv_freq")]
    assert names
    for name in names:
        assert ours[name].dtype == torch.float32
        assert torch.equal(ours[name], dict(model.named_buffers())[name])
    assert {parameter.dtype for parameter in target.model.parameters()} == {torch.bfloat16}
    assert target.forward_taps(rows())[0].dtype == torch.bfloat16


@pytest.mark.parametrize("kind", KINDS)
def test_random_weights_need_only_a_configuration_and_are_sane(tmp_path: Path, kind: str) -> None:
    folder = write_config(tmp_path, settings_of(kind))
    target, again, other = (load(folder, init="random", seed=seed) for seed in (5, 5, 6))
    taps = target.forward_taps(rows())
    check_taps(taps, [24, 24])
    assert all(torch.equal(a, b) for a, b in zip(taps, again.forward_taps(rows()), strict=True))
    assert not torch.equal(taps[0], other.forward_taps(rows())[0])
    std = target.lm_head.std().item()
    assert 0.18 < std < 0.22
    for name, parameter in target.model.named_parameters():
        if "layernorm" in name:
            centred = kind.startswith("qwen3_5")
            assert torch.equal(parameter, torch.zeros(WIDTH) if centred else torch.ones(WIDTH)), name


@pytest.mark.parametrize("kind", KINDS)
def test_random_weights_do_not_depend_on_where_the_target_is_cut(tmp_path: Path, kind: str) -> None:
    folder = write_config(tmp_path, settings_of(kind))
    cut, whole = (load(folder, init="random", keep_head=keep).model.state_dict() for keep in (False, True))
    assert len(cut) < len(whole) and all(torch.equal(cut[name], whole[name]) for name in cut)


def test_drawing_random_weights_leaves_the_callers_generator_alone(tmp_path: Path) -> None:
    folder = write_config(tmp_path, settings_of("qwen3_5_text"))
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    load(folder, init="random")
    assert torch.equal(torch.rand(4), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_tied_embeddings_are_one_tensor(tmp_path: Path, kind: str) -> None:
    model = full_model(kind, tie_word_embeddings=True)
    folder = write_checkpoint(tmp_path, kind, model, tie_word_embeddings=True)
    target = load(folder, keep_head=True)
    assert target.summary.tie_word_embeddings
    assert target.lm_head.data_ptr() == target.embed_tokens.data_ptr()
    with torch.no_grad():
        assert torch.equal(target.logits(rows()), model(input_ids=rows(), use_cache=False).logits)


def test_tying_stated_beside_the_text_section_only_is_seen(tmp_path: Path) -> None:
    model = full_model("qwen3_5", tie_word_embeddings=True)
    folder = write_checkpoint(tmp_path, "qwen3_5", model, tie_word_embeddings=True)
    settings = orjson.loads((folder / "config.json").read_bytes())
    del settings["text_config"]["tie_word_embeddings"]
    target = load(write_config(folder, settings))
    assert target.lm_head.data_ptr() == target.embed_tokens.data_ptr()


def test_loading_reaches_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a socket was opened")

    folder = write_checkpoint(tmp_path, "qwen3_5", full_model("qwen3_5"))
    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    load(folder)


def test_progress_reaches_the_whole_size_in_either_display(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, "qwen3", full_model("qwen3"), shards=3)
    lines: list[str] = []
    load(folder, progress=lines.append)
    assert len(lines) == 3
    assert "3 of 3 files" in lines[-1]
    with Progress(disable=True) as bar:
        load(folder, progress=bar)
    assert bar.tasks[0].finished


# --- kernels -------------------------------------------------------------------------------------


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without CUDA")
def test_a_hybrid_runs_on_a_cpu_machine_where_fla_is_installed(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    assert importlib.util.find_spec("fla") is not None
    folder = write_checkpoint(tmp_path, "qwen3_5", full_model("qwen3_5"))
    # A fresh interpreter, because a model file is bound once, by whoever imports it first.
    script = f"""
import sys, torch
from pathlib import Path
from engine.target.loading import load_target
cpu = torch.device("cpu")
target = load_target({str(folder)!r}, target_layer_ids=[1, 3], dtype=torch.float32, device=cpu)
assert all(tap.isfinite().all() for tap in target.forward_taps(torch.arange(16).reshape(1, 16)))
kernels = target.kernels()
assert kernels["chunk_gated_delta_rule"] == kernels["causal_conv1d_fn"] == {CPU_PATH!r}, kernels
assert kernels["norm"].endswith("Qwen3_5RMSNorm.forward") and kernels["attention"] == "sdpa", kernels
assert not any(name == "fla" or name.startswith("fla.") for name in sys.modules)
assert "jax" not in sys.modules
import fla.ops.gated_delta_rule
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=Path(__file__).parents[1]
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without CUDA")
def test_a_model_file_that_bound_fla_before_still_serves_cpu_tensors(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, "qwen3_5_text", full_model("qwen3_5_text"))
    script = f"""
import torch
import fla
from transformers.models.qwen3_5 import modeling_qwen3_5 as file
from engine.target.kernels import bound_kernels
from engine.target.loading import load_target
rule = file.torch_chunk_gated_delta_rule
cpu = torch.device("cpu")
for again in range(2):
    target = load_target({str(folder)!r}, target_layer_ids=[1], dtype=torch.float32, device=cpu)
    routed = file.torch_chunk_gated_delta_rule
    assert routed is not rule and routed.__wrapped__ is rule
    assert target.kernels()["chunk_gated_delta_rule"] == {CPU_PATH!r}
target.forward_taps(torch.arange(16).reshape(1, 16))
elsewhere = bound_kernels(file.Qwen3_5ForCausalLM(target.model.config).to("meta"))
assert elsewhere["chunk_gated_delta_rule"].startswith("fla.ops.gated_delta_rule"), elsewhere
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=Path(__file__).parents[1]
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without CUDA")
def test_hiding_gpu_packages_puts_back_what_it_found(monkeypatch: pytest.MonkeyPatch) -> None:
    imported = object()
    monkeypatch.setitem(sys.modules, "fla", imported)
    monkeypatch.delitem(sys.modules, "mamba_ssm", raising=False)
    with pytest.raises(RuntimeError), gpu_packages_hidden():
        with gpu_packages_hidden(), pytest.raises(ImportError):
            importlib.import_module("fla")
        for name in CUDA_ONLY_PACKAGES:
            assert importlib.util.find_spec(name) is None
        raise RuntimeError
    assert sys.modules["fla"] is imported
    assert "mamba_ssm" not in sys.modules


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_a_gpu_hybrid_takes_fla_and_stays_near_the_plain_path(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, "qwen3_5", full_model("qwen3_5"))
    on_gpu = load(folder, device=torch.device("cuda"))
    on_cpu = load(folder)
    assert on_gpu.kernels()["chunk_gated_delta_rule"].startswith("fla.")
    assert on_cpu.kernels()["chunk_gated_delta_rule"] == CPU_PATH
    for tap, reference in zip(on_gpu.forward_taps(rows().cuda()), on_cpu.forward_taps(rows()), strict=True):
        assert (tap.cpu() - reference).abs().max() / reference.abs().max() < 2e-2


# --- configuration -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_summary_reads_the_text_part_wherever_it_stands(tmp_path: Path, kind: str) -> None:
    summary = read_target_config(write_config(tmp_path, settings_of(kind)))
    assert (summary.layers, summary.hidden_size, summary.vocab_size) == (LAYERS, WIDTH, VOCABULARY)
    assert summary.max_position_embeddings == 512
    assert summary.rope_theta == (1e7 if kind.startswith("qwen3_5") else 5e5)
    assert summary.rms_norm_eps == 1e-6
    assert summary.model_type == ("qwen3_5_text" if kind == "qwen3_5" else kind)
    assert (summary.pad_token_id, summary.eos_token_ids, summary.tie_word_embeddings) == (3, (7,), False)


def test_a_summary_of_what_transformers_saves_agrees_with_its_configuration(tmp_path: Path) -> None:
    model = full_model("qwen3_5_text")
    model.save_pretrained(tmp_path)
    summary = read_target_config(tmp_path)
    assert (summary.layers, summary.rope_theta, summary.max_position_embeddings) == (LAYERS, 1e7, 512)
    assert torch.equal(load(tmp_path).lm_head, model.lm_head.weight)


def test_end_of_text_ids_come_from_all_three_files(tmp_path: Path) -> None:
    folder = write_config(tmp_path, settings_of("qwen3", pad_token_id=None))
    (folder / "generation_config.json").write_bytes(orjson.dumps({"eos_token_id": [9, 7]}))
    tokenizer: dict[str, Any] = {"eos_token": "<|end|>", "pad_token": {"content": "<|pad|>"}}
    tokenizer["added_tokens_decoder"] = {"11": {"content": "<|end|>"}}
    (folder / "tokenizer_config.json").write_bytes(orjson.dumps(tokenizer))
    (folder / "tokenizer.json").write_bytes(
        orjson.dumps({"added_tokens": [{"id": 13, "content": "<|pad|>"}]})
    )
    summary = read_target_config(folder)
    assert summary.eos_token_ids == (7, 9, 11)
    assert summary.pad_token_id == 13


def test_reading_a_configuration_and_checking_taps_imports_no_torch(tmp_path: Path) -> None:
    folder = write_config(tmp_path, settings_of("qwen3"))
    script = f"""
import sys
from engine.target.configuration import read_target_config
from engine.target.taps import check_target_layer_ids, default_target_layer_ids
summary = read_target_config({str(folder)!r})
check_target_layer_ids(default_target_layer_ids(summary.layers, 2), summary.layers)
assert not {{"torch", "transformers"}} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", script], check=True, cwd=Path(__file__).parents[1])


# --- what cannot be a target ---------------------------------------------------------------------


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(TargetError, match="nowhere: no such folder"):
        read_target_config(tmp_path / "nowhere")
    (tmp_path / "file").touch()
    with pytest.raises(TargetError, match="is a file"):
        read_target_config(tmp_path / "file")


def test_a_folder_without_a_configuration_is_named(tmp_path: Path) -> None:
    with pytest.raises(TargetError, match=f"{tmp_path}: no config.json"):
        read_target_config(tmp_path)


@pytest.mark.parametrize("content", [b'{"model_type": "qw', b"[1]", b"\xff\xfe"])
def test_an_unreadable_configuration_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(TargetError, match=r"config\.json: "):
        read_target_config(tmp_path)


@pytest.mark.parametrize(
    "settings",
    [
        {"model_type": "bert", "architectures": ["BertForMaskedLM"]},
        {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "is_encoder_decoder": True},
        {"model_type": "qwen3", "architectures": ["Qwen3Model"]},
        {"sizes": 3},
    ],
)
def test_what_is_no_causal_language_model_is_refused(tmp_path: Path, settings: dict[str, Any]) -> None:
    with pytest.raises(TargetError, match=r"config\.json: "):
        read_target_config(write_config(tmp_path, {**COMMON, **settings}))


def test_an_architecture_without_a_causal_class_is_refused_at_loading(tmp_path: Path) -> None:
    settings = {**settings_of("qwen3"), "model_type": "clip_text_model", "architectures": None}
    with pytest.raises(TargetError, match="clip_text_model"):
        load(write_config(tmp_path, settings), init="random")
    settings["model_type"] = "never_heard_of"
    with pytest.raises(TargetError, match="never_heard_of"):
        load(write_config(tmp_path, settings), init="random")


def test_a_size_that_cannot_be_is_named(tmp_path: Path) -> None:
    with pytest.raises(TargetError, match="hidden_size is '32'"):
        read_target_config(write_config(tmp_path, settings_of("qwen3", hidden_size="32")))


def test_a_folder_without_weights_says_how_to_go_on(tmp_path: Path) -> None:
    with pytest.raises(TargetError, match='target.init = "random"'):
        load(write_config(tmp_path, settings_of("qwen3")))


def test_pickled_weights_are_never_read(tmp_path: Path) -> None:
    folder = write_config(tmp_path, settings_of("qwen3"))
    (folder / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch harm'\ntR.")
    with pytest.raises(TargetError, match=r"pytorch_model\.bin; pickled"):
        load(folder)


def test_quantised_checkpoints_are_refused(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, "qwen3", full_model("qwen3"))
    write_config(folder, settings_of("qwen3", quantization_config={"quant_method": "fp8"}))
    with pytest.raises(TargetError, match=r"quantised \(fp8\)"):
        load(folder)


@pytest.mark.parametrize("cut", [4, 200, -100])
@pytest.mark.parametrize("shards", [1, 3])
def test_a_corrupt_shard_is_named(tmp_path: Path, cut: int, shards: int) -> None:
    folder = write_checkpoint(tmp_path, "qwen3", full_model("qwen3"), shards)
    victim = sorted(folder.glob("*.safetensors"))[-1]
    victim.write_bytes(victim.read_bytes()[:cut])
    with pytest.raises(TargetError, match=f"{victim.name}: not readable as safetensors"):
        load(folder)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, "qwen3", full_model("qwen3"), shards=3)
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(TargetError, match=r"model-00002-of-00003\.safetensors: not there"):
        load(folder)


def edit_weights(folder: Path, edit: Any) -> Path:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_missing_tensors_are_listed_and_ones_that_are_cut_away_may_be_missing(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, "qwen3", full_model("qwen3"))
    edit_weights(folder, lambda tensors: tensors.pop("model.layers.5.mlp.up_proj.weight"))
    load(folder)
    edit_weights(folder, lambda tensors: tensors.pop("model.layers.2.mlp.up_proj.weight"))
    with pytest.raises(
        TargetError, match=r"1 of the \d+ tensors .*: model\.layers\.2\.mlp\.up_proj\.weight;"
    ):
        load(folder)


def test_a_checkpoint_with_separate_experts_is_refused_with_the_reason(tmp_path: Path) -> None:
    settings = settings_of("qwen3", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
    settings |= {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"]}
    target = load(write_config(tmp_path, settings), init="random", keep_head=True)
    check_taps(target.forward_taps(rows()), [24, 24])
    target.model.save_pretrained(tmp_path)
    with pytest.raises(TargetError, match="experts in separate tensors"):
        load(tmp_path)


def test_a_tensor_of_another_shape_is_named(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, "qwen3", full_model("qwen3"))
    edit_weights(
        folder, lambda tensors: tensors.update({"lm_head.weight": torch.zeros(VOCABULARY + 1, WIDTH)})
    )
    with pytest.raises(
        TargetError, match=r"lm_head\.weight has shape \[97, 32\], config\.json asks for \[96, 32\]"
    ):
        load(folder)


def test_a_tensor_without_a_place_in_a_kept_layer_is_named(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, "llama", full_model("llama"))
    computed = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)}
    load(edit_weights(folder, lambda tensors: tensors.update(computed)))
    bias = {"model.layers.0.self_attn.q_proj.bias": torch.ones(WIDTH)}
    edit_weights(folder, lambda tensors: tensors.update(bias))
    with pytest.raises(TargetError, match=r"no place for 1 tensors .*q_proj\.bias"):
        load(folder)


def test_a_weight_that_is_not_finite_is_named(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, "qwen3", full_model("qwen3"))
    edit_weights(folder, lambda tensors: tensors["model.layers.1.mlp.up_proj.weight"][0].fill_(torch.inf))
    with pytest.raises(NonFinite, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        load(folder)


# --- taps ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layers", "drafter_layers", "expected"),
    [
        (64, 5, [1, 16, 31, 46, 61]),
        (36, 5, [1, 9, 17, 25, 33]),
        (64, 1, [32]),
        (8, 5, [1, 2, 3, 4, 5]),
        (6, 5, [0, 1, 2, 3, 4]),
        (4, 2, [0, 2]),
        (2, 1, [0]),
    ],
)
def test_default_taps(layers: int, drafter_layers: int, expected: list[int]) -> None:
    assert default_target_layer_ids(layers, drafter_layers) == expected


def test_default_taps_can_always_be_used_or_are_refused() -> None:
    for layers in range(1, 70):
        for drafter_layers in range(1, 12):
            if drafter_layers > layers - 1:
                with pytest.raises(TargetError, match=f"a target of {layers} layers"):
                    default_target_layer_ids(layers, drafter_layers)
            else:
                ids = default_target_layer_ids(layers, drafter_layers)
                check_target_layer_ids(ids, layers)
                assert len(ids) == drafter_layers


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (
            [1, 16, 31, 46, 64],
            r"drafter\.target_layer_ids\[4\] = 64: the target has 64 layers, so taps lie in 0…62",
        ),
        ([1, 63], r"drafter\.target_layer_ids\[1\] = 63: "),
        ([-1], r"drafter\.target_layer_ids\[0\] = -1: "),
        ([3, 3], r"drafter\.target_layer_ids\[1\] = 3: .*distinct and increasing"),
        ([5, 3], r"drafter\.target_layer_ids\[1\] = 3: .*distinct and increasing"),
        ([], "at least one tap"),
    ],
)
def test_taps_that_cannot_be_are_refused(ids: list[int], message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        check_target_layer_ids(ids, 64)


def test_sane_states_pass_whatever_the_padding_holds() -> None:
    tap = torch.randn(2, 20, 8, generator=torch.Generator().manual_seed(0))
    tap[0, 12:] = torch.nan
    check_taps([tap, tap.bfloat16()], [12, 20], target_layer_ids=[1, 3], padded_length=20)


@pytest.mark.parametrize(
    ("spoil", "error", "message"),
    [
        (lambda tap: tap[1, 4, 0].fill_(torch.nan), NonFinite, "tap 1 .*layer 3.*: the states of 1 of 32"),
        (lambda tap: tap.zero_(), TargetError, "tap 1 .*zero"),
        (lambda tap: tap.copy_(torch.arange(8.0)), TargetError, "tap 1 .*same state"),
        (lambda tap: tap.mul_(1e6), TargetError, "tap 1 .*root-mean-square"),
        (lambda tap: tap.mul_(1e-7), TargetError, "tap 1 .*root-mean-square"),
        (lambda tap: tap.resize_(2, 19, 8), TargetError, "tap 1 .*shape"),
    ],
)
def test_states_that_no_drafter_can_learn_from_are_refused(
    spoil: Any, error: type[Exception], message: str
) -> None:
    taps = [torch.randn(2, 20, 8, generator=torch.Generator().manual_seed(i)) for i in range(2)]
    spoil(taps[1])
    with pytest.raises(error, match=message):
        check_taps(taps, [12, 20], target_layer_ids=[1, 3])


def test_states_of_another_length_than_the_prompts_are_refused() -> None:
    taps = [torch.randn(1, 20, 8)]
    with pytest.raises(TargetError, match=r"shape \[1, 20, 8\], the prompts ask for \[1, 24, 8\]"):
        check_taps(taps, [20], padded_length=24)
    with pytest.raises(TargetError, match="row 0 has 21 real tokens"):
        check_taps(taps, [21])
