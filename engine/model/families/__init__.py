"""Model families: how they differ from what mbridge builds, and those that it lacks.

table.py    whose bridge a family uses, fields under other names, who has layers of its own
gemma.py    the layers of Gemma 3, in Qwen 3's bridge
gpt_oss.py  gpt-oss: experts with biases in stacks, sinks
kimi_k2.py  the text model of Kimi K2: DeepSeek-V3 under another name
mxfp4.py    its folders of 4-bit numbers
olmo3.py    the layers of OLMo 3, in Qwen 3's bridge
qwen3_5.py  Qwen 3.5, dense and with experts: a bridge of ours that registers with mbridge; the one to read before adding another
qwen3_next.py  its layers, with projections in another order
"""
