"""Checkpoints: written by all ranks, atomically, beside the training if wanted, and resumed in any layout and wrap.

    checkpoints/step_00000010/hf/                         the weights, a Hugging Face folder that transformers and vLLM load
                              adapter/                    with LoRA in its place: the adapter alone, a folder that PEFT loads
                              rank_00000-000.safetensors  a rank's part of main weights and optimizer state
                              random_00000.pt             a rank's random states: tensors, numbers and text only
                              index.json                  which file has which part of which tensor, schedule, layout

A checkpoint is written under a temporary name and renamed when every rank is done: a folder named step_* is complete.
Resuming builds the engine from `engine_arguments(folder)` and then calls `restore`. With the same layout it continues bit for
bit; with another one all tensors are the same and random states are derived from the checkpoint's. Leaves out another dtype and
other adapters.

saving.py     save: writes the files, then renames the folder
folder.py     names of checkpoints, the index's facts on the run that wrote it; restore
state.py      files of main weights and optimizer state: each rank writes its shards and reads the shards that it needs
shards.py     which part of which tensor of the whole model each of a rank's optimizer parameters is, as boxes
hf_folder.py  the folder that other programs load
"""

from engine.checkpoint.folder import engine_arguments, newest, restore, step_of
from engine.checkpoint.saving import CheckpointError, Save, save

__all__ = ["CheckpointError", "Save", "engine_arguments", "newest", "restore", "save", "step_of"]
