"""A small Qwen3 with random weights, to be trained in a minute on a CPU. Leaves out its tokenizer, which goes with the task.

write_small_qwen3(Path("runs/quickstart/assets/model"), ("<pad>", "<eos>", "<unk>", "0", "1"), seed=0, dtype="float32")
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"


def write_small_qwen3(folder: Path, vocabulary: Sequence[str], seed: int, dtype: str, max_position_embeddings: int = 64) -> None:
    """About 1 M parameters, tied embeddings, random weights drawn from the seed. `vocabulary`: a token for each id."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()  # one small file is written in no time
    config = Qwen3Config(
        vocab_size=len(vocabulary),
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=max_position_embeddings,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=vocabulary.index(EOS),
        pad_token_id=vocabulary.index(PAD),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
    model.to(getattr(torch, dtype)).save_pretrained(folder)
