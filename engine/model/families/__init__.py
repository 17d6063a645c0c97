"""Model families: how they differ from what mbridge builds, and those that it lacks.

table.py    whose bridge a family uses, fields under other names, who has layers of its own
gemma.py    the layers of Gemma 3, in Qwen 3's bridge
qwen3_5.py  Qwen 3.5, dense and with experts: a bridge of ours that registers with mbridge; the one to read before adding another
"""
