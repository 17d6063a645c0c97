"""The text model of Kimi K2 (model_type kimi_k2): DeepSeek-V3's layers, config.json and names under another name.

transformers 5.19 lacks it. Its folders come with code (auto_map), which is not executed: transformers prefers a class that is
registered for the model_type. vLLM 0.32 has the same entry (transformers_utils/config.py:_CONFIG_REGISTRY).
"""

from __future__ import annotations

from transformers import AutoConfig, AutoModelForCausalLM, DeepseekV3Config

NAME = "kimi_k2"


class KimiK2Config(DeepseekV3Config):  # type: ignore[misc]
    model_type = NAME


def register_model() -> None:
    """Have AutoModelForCausalLM load such folders, too; the engine needs the config alone."""
    from transformers import DeepseekV3ForCausalLM
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping

    register_checkpoint_conversion_mapping(NAME, get_checkpoint_conversion_mapping("deepseek_v3"), overwrite=True)
    fields = {"config_class": KimiK2Config}
    model = type("DeepseekV3ForCausalLM", (DeepseekV3ForCausalLM,), fields)  # what its folders name in `architectures`
    AutoModelForCausalLM.register(KimiK2Config, model, exist_ok=True)


AutoConfig.register(NAME, KimiK2Config, exist_ok=True)
